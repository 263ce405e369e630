//! Peers of one domain that want to know what is in another.

use serde_json::Value;

use super::*;
use crate::mount::client::Client as Nbd;
use crate::mount::{Mounts, text};
use crate::world::{same, signal, until};

/// A site with a domain for each of two tenants, paired as `a` and `b`.
fn two_tenants(world: &World) -> Site {
    let site = world.serve("far", &[]);
    add_tenants(world);
    site
}

fn add_tenants(world: &World) {
    for tenant in ["a", "b"] {
        world.run("far", &["domains", "add", tenant]).ok();
        let ticket = world
            .run("far", &["ticket", "--domain", tenant, "--name", tenant])
            .ok()
            .out;
        world
            .run(tenant, &["pair", ticket.trim(), "--name", "far"])
            .ok();
    }
}

#[test]
fn what_is_in_a_domain_is_not_seen_or_matched_in_another() {
    let world = World::new();
    let site = two_tenants(&world);
    let image = world.image("web.img", 1, 256);
    let path = image.to_str().unwrap();
    let sent = |tenant: &str| {
        let ran = world.run(tenant, &["send", path, "far", "--json"]).ok();
        let done = ran.json().pop().unwrap();
        done["images"][0]["matched_blocks"].as_u64().unwrap()
    };
    assert_eq!(sent("a"), 0);
    // The same image by another tenant: all of it crosses, also for an estimate.
    let estimate = world
        .run("b", &["send", path, "far", "--dry-run", "--json"])
        .ok();
    let estimate = estimate.json().pop().unwrap();
    assert_eq!(estimate["estimates"][0]["matched_blocks"], 0, "{estimate}");
    for (tenant, images) in [("a", 1), ("b", 0)] {
        let listed = world.run(tenant, &["images", "far", "--json"]).ok().json();
        assert_eq!(listed.len(), images, "{tenant}");
    }
    world
        .run("b", &["verify", "web.img", "far"])
        .fails(3, &["no image called web.img"]);
    assert_eq!(sent("b"), 0);
    // Two images of one name.
    for tenant in ["a", "b"] {
        same(
            &fs::read(
                world
                    .path("far")
                    .join("domains")
                    .join(tenant)
                    .join("images/web.img"),
            )
            .unwrap(),
            &image,
        );
        let listed = world
            .run("far", &["images", "--domain", tenant, "--json"])
            .ok();
        assert_eq!(listed.json().len(), 1, "{tenant}");
    }
    assert_eq!(world.run("far", &["images", "--json"]).ok().out, "");
    // Within a domain it is matched.
    world
        .run("a", &["send", path, "far", "--as", "copy.img"])
        .ok();
    assert_eq!(site.stop().0, Some(0));
}

#[test]
fn a_site_shows_its_user_all_domains_without_opening_them() {
    let mut m = Mounts::new();
    add_tenants(&m.world);
    m.world
        .run("far", &["peers", "set", "a", "--quota", "8M"])
        .ok();
    let image = m.world.image("web.img", 1, 256);
    m.world.run("a", &["send", text(&image), "far"]).ok();
    let socket = m.world.path("nbd.sock");
    let listen = format!("unix:{}", text(&socket));
    let export = ["export", "far:web.img", "--nbd", &listen, "--background"];
    m.world.run("a", &export).ok();
    let mut disk = Nbd::connect(&socket, "web.img");
    disk.write(0, &[7; 4096]).unwrap();
    drop(disk);
    let status = |m: &Mounts| {
        m.world
            .run("far", &["status", "--json"])
            .ok()
            .json()
            .remove(0)
    };
    let of = |status: &Value, domain: &str| {
        let domains = status["domains"].as_array().unwrap();
        domains
            .iter()
            .find(|d| d["name"] == domain)
            .unwrap()
            .clone()
    };
    let taken = 256 * 4096;
    let check = |status: &Value| {
        assert_eq!(status["images"], 1, "{status}");
        let a = of(status, "a");
        assert_eq!((&a["images"], &a["leases"]), (&1.into(), &1.into()), "{a}");
        assert_eq!(a["peers"][0]["peer"], "a", "{a}");
        assert!(
            a["peers"][0]["taken_bytes"].as_u64().unwrap() >= taken,
            "{a}"
        );
        assert_eq!(a["peers"][0]["quota_bytes"], 8 << 20, "{a}");
    };
    let now = status(&m);
    check(&now);
    let a = of(&now, "a");
    assert_eq!(a["site"]["delivered_images"], 1, "{a}");
    assert_eq!(a["served"]["writers"], 1, "{a}");
    assert!(of(&now, "b")["site"].is_null(), "nobody has used it");
    let metrics = m.world.run("far", &["status", "--metrics"]).ok().out;
    for line in [
        "drover_images{domain=\"a\"} 1",
        "drover_images{domain=\"b\"} 0",
        "drover_domain_open{domain=\"a\"} 1",
        "drover_domain_open{domain=\"b\"} 0",
        "drover_images_delivered_total{domain=\"a\"} 1",
        "drover_peer_quota_bytes{domain=\"a\",peer=\"a\"} 8388608",
    ] {
        assert!(metrics.lines().any(|l| l == line), "{line}: {metrics}");
    }
    let shown = m.world.run("far", &["status"]).ok().out;
    let line = |domain: &str| {
        shown
            .lines()
            .find(|l| l.starts_with(&format!("{domain} ")))
            .unwrap()
    };
    assert!(
        !line("a").ends_with("closed") && line("b").ends_with("closed"),
        "{shown}"
    );

    // The lease of a mount that is gone, in a domain that nobody has opened since.
    signal(
        m.world.run("a", &["mounts", "--json"]).ok().json()[0]["process"]
            .as_u64()
            .unwrap() as u32,
        "KILL",
    );
    m.kill_site();
    let leases = |m: &Mounts| {
        m.world
            .run("far", &["mounts", "leases", "--json"])
            .ok()
            .json()
    };
    let held = |m: &Mounts| {
        let leases = leases(m);
        assert_eq!(leases.len(), 1, "{leases:?}");
        assert_eq!(
            (&leases[0]["domain"], &leases[0]["image"]),
            (&"a".into(), &"web.img".into())
        );
        assert_eq!(leases[0]["writer"]["peer"], "a");
    };
    held(&m);
    m.start_site();
    held(&m);
    let now = status(&m);
    check(&now);
    assert!(
        of(&now, "a")["site"].is_null(),
        "it was opened to be counted"
    );
    let shown = m.world.run("far", &["mounts", "leases"]).ok().out;
    assert!(
        shown.contains("DOMAIN") && shown.contains("web.img"),
        "{shown}"
    );
    let break_lease = |more: &[&str]| {
        let args = [&["mounts", "break", "web.img", "--yes"], more].concat();
        m.world.run("far", &args)
    };
    break_lease(&[]).fails(3, &["web.img", "--domain a"]);
    break_lease(&["--domain", "b"]).fails(3, &["web.img", "--domain a"]);
    break_lease(&["--domain", "a"]).ok();
    assert!(leases(&m).iter().all(|lease| lease["writer"].is_null()));
}

#[test]
fn an_image_moves_to_another_domain_and_is_matched_there() {
    let world = World::new();
    let _site = two_tenants(&world);
    let image = world.image("web.img", 1, 256);
    let path = image.to_str().unwrap();
    world.run("a", &["send", path, "far"]).ok();
    let run = |args: &[&str]| world.run("far", args);
    run(&["domains", "move", "web.img", "--from", "a", "--to", "b"]).ok();
    run(&["domains", "move", "web.img", "--from", "a", "--to", "b"]).fails(3, &["web.img"]);
    run(&["verify", "web.img", "--domain", "b"]).ok();
    assert_eq!(run(&["images", "--domain", "a", "--json"]).ok().out, "");
    let ran = world
        .run("b", &["send", path, "far", "--as", "copy.img", "--json"])
        .ok();
    let done = ran.json().pop().unwrap();
    assert!(
        done["images"][0]["matched_blocks"].as_u64().unwrap() > 200,
        "{done}"
    );
    // Of the first domain nothing is told in the other, not even who sent it.
    let moved = &run(&["images", "--domain", "b", "--json"]).ok().json();
    let moved = moved.iter().find(|image| image["name"] == "web.img");
    assert_eq!(moved.unwrap()["from"], "");
    // Only an empty domain goes, which nobody can enter any more.
    run(&["domains", "rm", "b", "--yes"]).fails(3, &["b"]);
    run(&["domains", "rm", "a", "--yes"]).fails(3, &["peer a"]);
    run(&["peers", "forget", "a", "--yes"]).ok();
    run(&["ticket", "--domain", "a"]).ok();
    run(&["domains", "rm", "a", "--yes"]).fails(3, &["ticket --revoke"]);
    let tickets = run(&["ticket", "--list", "--json"]).ok().json();
    let valid = |t: &&serde_json::Value| t["domain"] == "a" && t["state"] == "valid";
    let ticket = tickets.iter().find(valid).unwrap();
    run(&["ticket", "--revoke", ticket["id"].as_str().unwrap()]).ok();
    let notes = world.path("far/domains/a/images/notes.img");
    fs::write(&notes, "the administrator's own").unwrap();
    run(&["domains", "rm", "a", "--yes"]).fails(3, &["notes.img"]);
    assert_eq!(fs::read(&notes).unwrap(), b"the administrator's own");
    fs::remove_file(&notes).unwrap();
    run(&["domains", "rm", "a", "--yes"]).ok();
    let names = run(&["domains", "--json"]).ok().json();
    let names: Vec<_> = names.iter().map(|d| d["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["default", "b"]);
}

#[test]
fn a_teleporter_matches_for_each_domain_apart() {
    let world = World::new();
    let teleporter = world.process("matcher", &["teleporter", "--listen", "127.0.0.1:0"]);
    world
        .run("far", &["pair", &teleporter.ticket, "--name", "matcher"])
        .ok();
    fs::write(
        world.path("far").join("config.toml"),
        "teleporter = \"matcher\"\n",
    )
    .unwrap();
    let _site = two_tenants(&world);
    let image = world.image("web.img", 1, 256);
    let path = image.to_str().unwrap();
    for (tenant, name) in [("a", "web.img"), ("b", "web.img"), ("b", "copy.img")] {
        let ran = world
            .run(tenant, &["send", path, "far", "--as", name, "--json"])
            .ok();
        let done = ran.json().pop().unwrap();
        let matched = done["images"][0]["matched_blocks"].as_u64().unwrap();
        assert_eq!(matched > 200, name == "copy.img", "{tenant}: {done}");
    }
}

#[test]
fn a_domain_that_is_not_there_is_no_peers() {
    let world = World::new();
    let _site = two_tenants(&world);
    let run = |args: &[&str]| world.run("far", args);
    let misspelt = ["no domain is called", "domains add aa"];
    run(&["ticket", "--domain", "aa"]).fails(3, &misspelt);
    run(&["peers", "set", "a", "--domain", "aa"]).fails(3, &misspelt);
    let peers = run(&["peers", "--json"]).ok().json();
    let domains = Vec::from_iter(peers.iter().map(|peer| peer["domain"].as_str().unwrap()));
    assert_eq!(domains, ["a", "b"]);
    // The domain at a peer is not for this site to choose.
    for args in [
        &["images", "a"][..],
        &["transfers", "a"],
        &["transfers", "rm", "x", "--at", "a"],
        &["verify", "x", "a"],
        &["share", "a:x", "--with", "b"],
        &["rm", "a:x", "--yes"],
    ] {
        let ran = run(&[args, &["--domain", "b"]].concat()).code(2);
        assert!(ran.err.contains("--domain"), "{ran:?}");
    }
}

/// A job goes on when its caller has left: what it works in does not go away under it.
#[test]
fn a_domain_in_which_work_goes_on_is_not_removed() {
    let world = World::new();
    let _site = world.serve("far", &[]);
    let run = |args: &[&str]| world.run("far", args);
    run(&["domains", "add", "acme"]).ok();
    let image = world.image("large.img", 1, 16 << 10);
    let index = ["index", image.to_str().unwrap(), "--domain", "acme"];
    let mut child = world.drover("far", &index).spawn().unwrap();
    let hash_files = world.path("far/domains/acme/index/index");
    let files = || fs::read_dir(&hash_files).map_or(0, Iterator::count);
    // Opening a domain makes files of its own.
    run(&["images", "--domain", "acme"]).ok();
    let before = files();
    until("it has begun", || files() > before);
    child.kill().unwrap();
    child.wait().unwrap();
    // In use, or not empty any more.
    run(&["domains", "rm", "acme", "--yes"]).fails(3, &["acme"]);
    until("it is done", || {
        let images = run(&["images", "--domain", "acme", "--json"]).ok();
        images.json().len() == 1
    });
    run(&["verify", "large.img", "--domain", "acme"]).ok();
}

#[test]
fn a_domain_that_cannot_be_opened_tells_peers_nothing_else() {
    let world = World::new();
    let site = two_tenants(&world);
    let work = world.path("far/domains/a/work");
    fs::remove_dir_all(&work).unwrap();
    fs::write(&work, "in the way").unwrap();
    let image = world.image("web.img", 1, 16);
    let image = image.to_str().unwrap();
    for args in [&["images", "far"][..], &["send", image, "far"]] {
        let ran = world.run("a", args);
        assert_ne!(ran.code, Some(0), "{ran:?}");
        assert!(ran.err.contains("the domain a cannot be opened"), "{ran:?}");
        let told = ran.err.replace(image, "");
        assert!(
            !told.contains("/domains/") && !told.contains("peer"),
            "{told}"
        );
    }
    assert!(
        site.log().contains(work.to_str().unwrap()),
        "{}",
        site.log()
    );
    // It harms nobody else, nor the next start.
    world.run("b", &["send", image, "far"]).ok();
    drop(site);
    fs::write(world.path("far/domains/readme"), "not a domain").unwrap();
    fs::remove_dir_all(world.path("far/domains/b")).unwrap();
    fs::create_dir_all(world.path("far/domains/c/site.sock")).unwrap();
    let _site = world.serve("far", &[]);
    world.run("far", &["images"]).ok();
}
