//! The audit log.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::Stdio;

use drover_net::Ticket;
use serde_json::Value;

use crate::world::{Site, World, until};

fn events(world: &World, options: &[&str]) -> Vec<Value> {
    let args = [&["audit", "--json"], options].concat();
    world.run("far", &args).ok().json()
}

/// The names of events, with what tells them from others.
fn said(events: &[Value]) -> Vec<String> {
    let text = |event: &Value, field: &str| event[field].as_str().unwrap_or("-").to_owned();
    let line = |event: &Value| {
        let fields = ["event", "peer", "image", "right"].map(|field| text(event, field));
        fields.join(" ")
    };
    events.iter().map(line).collect()
}

/// A site with the peers `acme`, which may do everything, and `zeta`, which may send and read.
fn two_tenants(world: &World) -> Site {
    let site = world.serve("far", &[]);
    for (name, can) in [("acme", "send,read,write"), ("zeta", "send,read")] {
        let ticket = ["ticket", "--name", name, "--can", can];
        let ticket = world.run("far", &ticket).ok().out;
        world
            .run(name, &["pair", ticket.trim(), "--name", "far"])
            .ok();
    }
    site
}

#[test]
fn what_peers_did_and_were_refused_is_in_the_log() {
    let world = World::new();
    let site = two_tenants(&world);
    let image = world.image("web.img", 1, 64);
    let image = image.to_str().unwrap();
    world.run("acme", &["send", image, "far"]).ok();
    let other = world.image("other.img", 2, 64);
    let other = ["send", other.to_str().unwrap(), "far", "--as", "web.img"];
    world.run("zeta", &other).code(3);
    let socket = world.path("web.sock");
    let socket = format!("unix:{}", socket.display());
    let export = ["export", "far:web.img", "--nbd", &socket];
    world.run("zeta", &export).code(3);
    world.run("far", &["verify", "web.img"]).ok();
    let share = ["share", "web.img", "--with", "zeta"];
    world.run("far", &share).ok();
    world.run("far", &["domains", "add", "labs"]).ok();
    world
        .run("far", &["peers", "set", "zeta", "--can", "read"])
        .ok();
    world.run("zeta", &other).code(3);
    world.run("far", &["peers", "forget", "zeta", "--yes"]).ok();
    world.run("zeta", &["images", "far"]).code(3);
    assert_eq!(site.stop().0, Some(0));
    // Without a running site, the command itself writes.
    world.run("far", &["rm", "web.img", "--yes"]).ok();

    let all = events(&world, &[]);
    let lines = said(&all);
    let mut from = 0;
    for wanted in [
        "ticket-made - - -",
        "ticket-made acme - -",
        "paired acme - -",
        "paired zeta - -",
        "connected acme - -",
        "send-begun acme web.img -",
        "send-delivered acme web.img -",
        "refused zeta web.img -",
        "refused zeta web.img write",
        "verified - web.img -",
        "shared - web.img -",
        "domain-added - - -",
        "rights-changed zeta - -",
        "refused zeta - send",
        "forgotten zeta - -",
        "refused - - -",
        "removed - web.img -",
    ] {
        let found = lines[from..].iter().position(|line| line == wanted);
        from += found.unwrap_or_else(|| panic!("no {wanted:?} in {lines:#?}")) + 1;
    }
    let one = |name: &str| all.iter().find(|event| event["event"] == name).unwrap();
    let delivered = one("send-delivered");
    assert_eq!(
        (&delivered["outcome"], &delivered["by"]),
        (&"ok".into(), &"peer".into())
    );
    assert_eq!(delivered["bytes"], 64 * 4096 + (1 << 20));
    assert_eq!(delivered["domain"], "default");
    assert!(
        delivered["address"]
            .as_str()
            .unwrap()
            .starts_with("127.0.0.1:")
    );
    assert_eq!(delivered["key"].as_str().unwrap().len(), 52);
    let paired = all
        .iter()
        .find(|e| e["event"] == "paired" && e["peer"] == "zeta");
    assert_eq!(paired.unwrap()["detail"], "can send,read");
    let ticket = &paired.unwrap()["ticket"];
    let made = all.iter().filter(|e| e["ticket"] == *ticket);
    assert_eq!(made.count(), 2, "where it was made, and where it was used");
    assert_eq!(one("domain-added")["domain"], "labs");
    assert_eq!(one("removed")["by"], "user");

    // What a person looks for.
    let refused = said(&events(&world, &["--refused", "--peer", "zeta"]));
    assert!(refused.len() >= 3, "{refused:?}");
    assert!(refused.iter().all(|line| line.starts_with("refused zeta")));
    let key = delivered["key"].as_str().unwrap();
    let by_key = events(&world, &["--peer", &key[..8], "--image", "web.img"]);
    assert_eq!(
        said(&by_key),
        ["send-begun acme web.img -", "send-delivered acme web.img -"]
    );
    assert_eq!(events(&world, &["--since", "1h"]).len(), all.len());
    assert!(events(&world, &["--since", "0s"]).is_empty());
    let table = world.run("far", &["audit", "--refused"]).ok().out;
    assert!(table.starts_with("TIME (UTC)"), "{table}");
    let right =
        |line: &str| line.contains("zeta") && line.contains("does not have the right write");
    assert!(table.lines().any(right), "{table}");
    let none = world.run("far", &["audit", "--image", "nothing"]).ok();
    assert!(
        none.out.is_empty() && none.err.contains("no such events"),
        "{none:?}"
    );
    let mode = fs::metadata(world.path("far").join("audit.log")).unwrap();
    assert_eq!(
        std::os::unix::fs::PermissionsExt::mode(&mode.permissions()) & 0o777,
        0o600
    );
}

#[test]
fn what_happens_is_followed() {
    let world = World::new();
    let _site = two_tenants(&world);
    let mut child = world
        .drover("far", &["audit", "--follow", "--json", "--peer", "acme"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut next = || -> Value { serde_json::from_str(&lines.next().unwrap().unwrap()).unwrap() };
    assert_eq!(next()["event"], "ticket-made");
    assert_eq!(next()["event"], "paired");
    world.run("far", &["peers", "forget", "acme", "--yes"]).ok();
    assert_eq!(next()["event"], "forgotten");
    child.kill().unwrap();
    child.wait().unwrap();
}

/// Whatever strangers do, they take little of the disk, and push nothing else out of the log.
#[test]
fn strangers_write_few_lines() {
    let world = World::new();
    let site = world.serve("far", &[]);
    let ticket: Ticket = site.ticket.parse().unwrap();
    let to: SocketAddr = ticket.addresses[0].parse().unwrap();
    let log = world.path("far").join("audit.log");
    let before = fs::metadata(&log).unwrap().len();
    for _ in 0..500 {
        let mut tcp = TcpStream::connect(to).unwrap();
        let _ = tcp.write_all(b"GET / HTTP/1.1\r\n\r\n");
        let _ = tcp.read_to_end(&mut Vec::new());
    }
    let after = fs::metadata(&log).unwrap().len();
    assert!(
        (1..2000).contains(&(after - before)),
        "{before} to {after} bytes"
    );
    let refused = events(&world, &["--refused"]);
    assert_eq!(refused[0]["by"], "stranger");
    let address = refused[0]["address"].as_str().unwrap();
    assert!(address.starts_with("127.0.0.1:"), "{address}");
}

#[test]
fn a_peer_that_is_refused_again_and_again_writes_few_lines() {
    let world = World::new();
    let site = two_tenants(&world);
    world
        .run("far", &["peers", "set", "acme", "--can", "none"])
        .ok();
    for _ in 0..30 {
        world.run("acme", &["images", "far"]).code(3);
    }
    // How many more there were is written at the latest when the site stops.
    assert_eq!(site.stop().0, Some(0));
    let refused = events(&world, &["--refused", "--peer", "acme"]);
    let more: u64 = refused.iter().filter_map(|e| e["more"].as_u64()).sum();
    let lines = refused.iter().filter(|e| e["more"].is_null()).count();
    assert_eq!(lines as u64 + more, 30, "{refused:#?}");
    // More than ten only if the test took more than a minute.
    assert!(lines <= 20, "{lines} lines");
}

#[test]
fn a_log_that_cannot_be_written_stops_nothing() {
    let world = World::new();
    fs::create_dir_all(world.path("far/audit.log")).unwrap();
    let site = world.pair();
    let image = world.image("web.img", 1, 64);
    world
        .run("near", &["send", image.to_str().unwrap(), "far"])
        .ok();
    let metrics = world.run("far", &["status", "--metrics"]).ok().out;
    let failed = metrics
        .lines()
        .find_map(|line| line.strip_prefix("drover_audit_failed_total "))
        .unwrap();
    assert!(failed.parse::<u64>().unwrap() >= 3, "{metrics}");
    let warnings = site.log().matches("cannot write to").count();
    assert_eq!(warnings, 1, "{}", site.log());
    // The way out is to remove what is in its place.
    fs::remove_dir(world.path("far/audit.log")).unwrap();
    world.run("far", &["verify", "web.img"]).ok();
    until("the log is written again", || {
        said(&events(&world, &[])).contains(&"verified - web.img -".into())
    });
}
