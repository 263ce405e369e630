//! Pairing, tickets and trust.

use std::os::unix::fs::PermissionsExt;
use std::process::Stdio;

use drover_net::Ticket;
use serde_json::{Value, json};

use crate::world::{World, signal, until, wait};

#[test]
fn pairing_is_mutual_and_a_ticket_is_good_once() {
    let world = World::new();
    let far = world.serve("far", &[]);
    // The near site listens too, so the far one learns where.
    let near = world.serve("near", &[]);
    let paired = world
        .run(
            "near",
            &[
                "pair",
                &far.ticket,
                "--name",
                "lyon",
                "--can",
                "read",
                "--json",
            ],
        )
        .ok()
        .json();
    assert_eq!(paired[0]["name"], "lyon");
    let lyon = world.run("near", &["peers", "--json"]).ok().json();
    assert_eq!(lyon[0]["key"], paired[0]["key"]);
    let back = world.run("far", &["peers", "--json"]).ok().json();
    let name = back[0]["name"].as_str().unwrap().to_string();
    assert!(!back[0]["addresses"].as_array().unwrap().is_empty());
    // Each can now query the other.
    world.run("near", &["images", "lyon"]).ok();
    world.run("far", &["images", &name]).ok();

    world
        .run("third", &["pair", &far.ticket, "--name", "lyon"])
        .fails(3, &["lyon", "used already", "drover ticket"]);
    assert_eq!(
        world.run("third", &["peers", "--json"]).ok().out,
        "",
        "a refused pairing leaves no peer"
    );
    // The peer that redeemed it may do so again: its first reply may have been lost.
    world
        .run("near", &["pair", &far.ticket, "--name", "lyon"])
        .ok();
    near.stop();
    far.stop();
}

#[test]
fn tickets_are_made_beside_a_running_site_and_without_one() {
    let world = World::new();
    let far = world.serve("far", &[]);
    let ticket = world.run("far", &["ticket"]).ok();
    assert_eq!(ticket.err, "");
    world
        .run("near", &["pair", ticket.out.trim(), "--name", "a"])
        .ok();
    let old = world.run("far", &["ticket", "--expires", "0s"]).ok();
    world
        .run("third", &["pair", old.out.trim(), "--name", "a"])
        .fails(3, &["too old"]);
    let (code, rest) = far.stop();
    assert_eq!(
        (code, rest.as_str()),
        (Some(0), ""),
        "one line on stdout and no more"
    );
    let ticket = world.run("far", &["ticket"]).ok();
    assert!(ticket.err.contains("no site is running"), "{}", ticket.err);
    world
        .run("third", &["pair", ticket.out.trim(), "--name", "a"])
        .fails(1, &["cannot reach a at 127.0.0.1", "drover serve"]);
}

#[test]
fn a_key_that_is_not_trusted_may_do_nothing() {
    let world = World::new();
    let far = world.pair();
    world.image("a.img", 1, 10);
    let me = world.run("far", &["peers", "--json"]).ok().json()[0]["name"]
        .as_str()
        .unwrap()
        .to_string();
    world
        .run("far", &["peers", "forget", &me])
        .fails(2, &["--yes"]);
    let forgotten = world
        .run("far", &["peers", "forget", &me, "--yes", "--json"])
        .ok()
        .json();
    assert_eq!(
        (&forgotten[0]["name"], &forgotten[0]["forgotten"]),
        (&me.as_str().into(), &true.into())
    );
    world.run("near", &["images", "far"]).fails(
        3,
        &["far: the key of your site is not trusted", "drover pair"],
    );
    world
        .run("near", &["verify", "a.img", "far"])
        .fails(3, &["far: the key", "not trusted"]);
    let ran = world
        .run("near", &["send", "a.img", "far", "--json"])
        .fails(3, &["far: the key of your site is not trusted"]);
    let last = ran.json().pop().unwrap();
    assert_eq!(
        (last["event"].as_str(), last["code"].as_i64()),
        (Some("error"), Some(3))
    );
    assert!(!world.path("far/images/a.img").exists());
    // The used ticket does not restore trust; a new one does.
    world
        .run("near", &["pair", &far.ticket, "--name", "far"])
        .fails(3, &["used already"]);
    let fresh = world.run("far", &["ticket"]).ok().out;
    world
        .run("near", &["pair", fresh.trim(), "--name", "far"])
        .ok();
    world.run("near", &["images", "far"]).ok();
}

#[test]
fn another_site_at_the_same_address_is_refused() {
    let world = World::new();
    let far = world.pair();
    let address = world.run("near", &["peers", "--json"]).ok().json()[0]["addresses"][0]
        .as_str()
        .unwrap()
        .to_string();
    far.stop();
    let _impostor = world.process("impostor", &["serve", "--listen", &address]);
    world.image("a.img", 1, 10);
    world
        .run("near", &["images", "far"])
        .fails(3, &["far", "is not the site that was paired"]);
    world
        .run("near", &["send", "a.img", "far"])
        .fails(3, &["is not the site that was paired"]);
}

#[test]
fn names_are_unique_on_both_sides() {
    let world = World::new();
    let far = world.serve("far", &[]);
    let other = world.serve("other", &[]);
    world
        .run("near", &["pair", &far.ticket, "--name", "lyon"])
        .ok();
    // A name collision is detected before the ticket is spent.
    world
        .run("near", &["pair", &other.ticket, "--name", "lyon"])
        .fails(2, &["lyon", "peers forget"]);
    world
        .run("near", &["pair", &other.ticket, "--name", "nice"])
        .ok();
    world
        .run("near", &["pair", &other.ticket, "--name", "a/b"])
        .code(2);
    world
        .run("far", &["pair", &far.ticket])
        .fails(2, &["this site"]);
    // Two machines with the same host name are two peers.
    let ticket = world.run("far", &["ticket"]).ok().out;
    world
        .run("third", &["pair", ticket.trim(), "--name", "lyon"])
        .ok();
    let names: Vec<String> = world
        .run("far", &["peers", "--json"])
        .ok()
        .json()
        .iter()
        .map(|p| p["name"].as_str().unwrap().to_string())
        .collect();
    assert_eq!(names.len(), 2);
    assert!(names.contains(&format!("{}-2", names[0])), "{names:?}");
}

#[test]
fn a_ticket_says_what_its_peer_may_do_and_the_peer_gives_nothing_back() {
    let world = World::new();
    let far = world.serve("far", &[]);
    world.run("far", &["domains", "add", "acme"]).ok();
    let made = [
        "ticket",
        "--name",
        "vm",
        "--can",
        "read, send",
        "--domain",
        "acme",
        "--quota",
        "1G",
        "--json",
    ];
    let ticket = world.run("far", &made).ok().json();
    assert_eq!(ticket[0]["can"], json!(["send", "read"]));
    let word = ticket[0]["ticket"].as_str().unwrap();
    world.run("near", &["pair", word, "--name", "lyon"]).ok();
    let grant = |peer: &Value| {
        let fields = ["name", "can", "domain", "quota_bytes"];
        json!(fields.map(|field| &peer[field]))
    };
    let peer = |home: &str| grant(&world.run(home, &["peers", "--json"]).ok().json()[0]);
    assert_eq!(
        peer("far"),
        json!(["vm", ["send", "read"], "acme", 1 << 30])
    );
    assert_eq!(peer("near"), json!(["lyon", [], "default", null]));
    // Unless it says so.
    let again = ["pair", word, "--name", "lyon", "--can", "match"];
    world.run("near", &again).ok();
    assert_eq!(peer("near"), json!(["lyon", ["match"], "default", null]));
    // It stays where it is, with its quota.
    world.run("near", &["domains", "add", "apart"]).ok();
    let set = ["peers", "set", "lyon", "--domain", "apart", "--quota", "1M"];
    world.run("near", &set).ok();
    let again = ["pair", word, "--name", "lyon", "--can", "read"];
    world.run("near", &again).ok();
    let in_place = json!(["lyon", ["read"], "apart", 1 << 20]);
    assert_eq!(peer("near"), in_place);
    world.run("near", &["pair", word, "--name", "lyon"]).ok();
    assert_eq!(peer("near"), in_place);

    let set = |args: &[&str]| world.run("far", &[&["peers", "set", "vm"], args].concat());
    let now = set(&["--can", "none", "--json"]).ok().json();
    assert_eq!(grant(&now[0]), json!(["vm", [], "acme", 1 << 30]));
    let said = set(&["--quota", "none", "--can", "write,send"]).ok().out;
    assert!(
        said.contains("send,write") && said.contains("acme"),
        "{said}"
    );
    assert_eq!(peer("far"), json!(["vm", ["send", "write"], "acme", null]));
    set(&[]).code(2);
    let wrong = set(&["--can", "send,root"]).code(2).err;
    assert!(wrong.contains("send, read, write, host"), "{wrong}");
    world
        .run("far", &["peers", "set", "nobody", "--can", "send"])
        .fails(3, &["no peer is called"]);
    far.stop();
}

#[test]
fn tickets_are_listed_and_revoked() {
    let world = World::new();
    let far = world.serve("far", &[]);
    let ticket = world.run("far", &["ticket", "--name", "vm"]).ok().out;
    world
        .run("far", &["ticket", "--name", "old", "--expires", "0s"])
        .ok();
    let list = |name: &str| {
        let all = world
            .run("far", &["ticket", "--list", "--json"])
            .ok()
            .json();
        all.into_iter().find(|ticket| ticket["name"] == name)
    };
    assert_eq!(list("old").unwrap()["state"], "expired");
    let vm = list("vm").unwrap();
    assert_eq!(
        (&vm["state"], &vm["used_by"]),
        (&"valid".into(), &Value::Null)
    );
    let shown = world.run("far", &["ticket", "--list"]).ok().out;
    assert!(
        shown.contains("send,read,write") && !shown.contains("drover1"),
        "{shown}"
    );
    world
        .run("far", &["ticket", "--list", "--expires", "1h"])
        .code(2);
    let id = vm["id"].as_str().unwrap();
    world.run("far", &["ticket", "--revoke", id]).ok();
    assert_eq!(list("vm"), None);
    world
        .run("far", &["ticket", "--revoke", id])
        .fails(3, &[id, "drover ticket --list"]);
    world
        .run("near", &["pair", ticket.trim(), "--name", "lyon"])
        .fails(3, &["not one of this site's"]);
    world
        .run("near", &["pair", &far.ticket, "--name", "lyon"])
        .ok();
    let used = list("").unwrap();
    let peer = &world.run("far", &["peers", "--json"]).ok().json()[0]["name"];
    assert_eq!((&used["state"], &used["used_by"]), (&"used".into(), peer));
    let said = world.run("far", &["ticket", "--revoke", used["id"].as_str().unwrap()]);
    assert!(said.ok().out.contains("drover peers forget"));
}

#[test]
fn a_site_that_restarts_shows_the_ticket_that_is_still_good() {
    let world = World::new();
    let run = |home: &str, args: &[&str]| world.run(home, args);
    let valid = || {
        let listed = run("far", &["ticket", "--list", "--json"]).ok().json();
        let valid = listed.iter().filter(|t| t["state"] == "valid");
        Vec::from_iter(valid.map(|t| t["id"].as_str().unwrap().to_owned()))
    };
    let secret = |ticket: &str| ticket.parse::<Ticket>().unwrap().secret;
    let start = || {
        let far = world.serve("far", &[]);
        let ticket = far.ticket.clone();
        (far, ticket)
    };
    let (far, first) = start();
    let kept = world.path("far/serve.ticket");
    let mode = std::fs::metadata(&kept).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    far.stop();
    // It listens on another port now, which the ticket names.
    let (far, second) = start();
    assert_eq!(secret(&first), secret(&second));
    assert_eq!(valid().len(), 1);
    run("near", &["pair", &second, "--name", "far"]).ok();
    far.stop();
    // Used, revoked, damaged, or of another kind: a new one.
    let (far, third) = start();
    assert_ne!(secret(&second), secret(&third));
    run("far", &["ticket", "--revoke", &valid()[0]]).ok();
    far.stop();
    let (far, fourth) = start();
    assert_ne!(secret(&third), secret(&fourth));
    far.stop();
    std::fs::write(&kept, "drover1x").unwrap();
    let (far, fifth) = start();
    assert_ne!(secret(&fourth), secret(&fifth));
    far.stop();
    let teleporter = world.process("far", &["teleporter", "--listen", "127.0.0.1:0"]);
    assert_ne!(secret(&fifth), secret(&teleporter.ticket));
    teleporter.stop();

    // Where nobody sees it, none is made.
    let before = valid();
    let mut far = world
        .drover("far", &["serve", "--listen", "127.0.0.1:0"])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    until("it runs", || run("far", &["status"]).code == Some(0));
    signal(far.id(), "TERM");
    wait(&mut far);
    assert_eq!(valid(), before);
}
