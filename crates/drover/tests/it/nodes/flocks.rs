//! A flock that the nodes of one site send to the nodes of another: two of each, with a PostgreSQL server and a directory of images
//! for each site.

use std::fs;
use std::path::PathBuf;
use std::process::Child;

use drover_store::testing::PostgresServer;
use serde_json::Value;

use crate::world::{Site, World, own_address, same, until, wait};

const COMMON: usize = 1500;
const OWN: usize = 500;
const IMAGES: [&str; 4] = ["a.img", "b.img", "c.img", "d.img"];

/// The sites `near`, of the homes `p` and `q`, and `far`, of `x` and `y`.
struct Sites {
    world: World,
    server: PostgresServer,
    urls: [String; 2],
}

impl Sites {
    fn new() -> Option<Sites> {
        let server = PostgresServer::start()?;
        let sites = Sites {
            world: World::new(),
            urls: [server.new_database(), server.new_database()],
            server,
        };
        for (name, first, site) in [("p", "p", 0), ("q", "p", 0), ("x", "x", 1), ("y", "x", 1)] {
            let world = &sites.world;
            world.run(name, &["init"]).ok();
            let images = world.path(["origin", "shared"][site]);
            let config = format!(
                "images = {:?}\nnode = {name:?}\nname = {:?}\nnode-term = \"6s\"\ncatalog = {:?}\n",
                images.display().to_string(),
                ["near", "far"][site],
                sites.urls[site]
            );
            fs::write(world.path(name).join("config.toml"), config).unwrap();
            if name != first {
                let key = |home: &str| world.path(home).join("identity.key");
                fs::copy(key(first), key(name)).unwrap();
            }
        }
        Some(sites)
    }

    fn serve(&self, home: &str) -> Site {
        let address = own_address().to_string();
        self.world.process(home, &["serve", "--listen", &address])
    }

    /// Both sites, paired, in the order p, q, x, y; and the images at `near`.
    fn begin(&self) -> Vec<Site> {
        let all = Vec::from(["p", "q", "x", "y"].map(|home| self.serve(home)));
        // Its ticket is of before the other node joined.
        let pair = ["pair", &all[2].ticket, "--name", "far"];
        self.world.run("p", &pair).ok();
        let world = &self.world;
        let common = fs::read(world.image("common.tmp", 1, COMMON)).unwrap();
        for (n, name) in IMAGES.iter().enumerate() {
            let path = world.image(&format!("origin/{name}"), 10 + n as u64, OWN);
            let bytes = [&common[..COMMON * 4096], &fs::read(&path).unwrap()].concat();
            fs::write(path, bytes).unwrap();
        }
        all
    }

    fn there(&self, name: &str) -> PathBuf {
        self.world.path("shared").join(name)
    }

    /// Begins to send the flock, each node at 2 MB/s.
    fn send(&self) -> Child {
        let paths = IMAGES.map(|name| format!("origin/{name}"));
        let mut args = vec!["send"];
        args.extend(paths.iter().map(String::as_str));
        args.extend(["far", "--flock", "shop", "--limit", "2M", "--json"]);
        let file = |name: &str| fs::File::create(self.world.path(name)).unwrap();
        let mut sending = self.world.drover("p", &args);
        let sending = sending.stdout(file("send.out")).stderr(file("send.err"));
        sending.spawn().unwrap()
    }

    fn said(&self) -> String {
        let read = |name: &str| fs::read_to_string(self.world.path(name)).unwrap();
        format!("{}\n{}", read("send.out"), read("send.err"))
    }

    /// The object at the end.
    fn end(&self, sending: &mut Child, nodes: &[Site]) -> Value {
        let code = wait(sending);
        let logs = nodes.iter().map(Site::log).collect::<Vec<_>>().join("\n\n");
        assert_eq!(code, Some(0), "{}\n{logs}", self.said());
        let out = fs::read_to_string(self.world.path("send.out")).unwrap();
        let last: Value = serde_json::from_str(out.lines().last().unwrap()).unwrap();
        assert_eq!(last["event"], "done", "{last}");
        for name in IMAGES {
            let sent = self.world.path("origin").join(name);
            same(&fs::read(self.there(name)).unwrap(), &sent);
        }
        last
    }

    fn flock(&self, home: &str) -> Value {
        let listed = self.world.run(home, &["flock", "--json"]).ok().json();
        listed.into_iter().next().unwrap_or_default()
    }

    /// Waits until images are on their way to both nodes, and much of one is there.
    fn until_half(&self) {
        let coming = |home: &str| {
            let listed = self.world.run(home, &["transfers", "--json"]).ok().json();
            let mut done = listed.iter().map(|t| t["done_bytes"].as_u64());
            done.any(|done| done > Some(2 << 20))
        };
        let both = || names(&self.flock("y")["nodes"]) == ["x", "y"];
        until("images come to both nodes", || {
            both() && (coming("x") || coming("y"))
        });
    }
}

fn names(of: &Value) -> Vec<&str> {
    let all = of.as_array().map_or(&[][..], Vec::as_slice);
    all.iter()
        .map(|node| node["name"].as_str().unwrap())
        .collect()
}

fn sum(of: &Value, key: &str) -> u64 {
    let all = of.as_array().unwrap().iter();
    all.map(|each| each[key].as_u64().unwrap()).sum()
}

#[test]
fn all_nodes_of_one_site_send_to_all_of_the_other() {
    let Some(sites) = Sites::new() else { return };
    let nodes = sites.begin();
    let mut sending = sites.send();
    until("both nodes receive", || {
        names(&sites.flock("y")["nodes"]) == ["x", "y"]
    });
    let under_way = sites.flock("x");
    assert_eq!(under_way["in_progress"], true, "{under_way}");
    let last = sites.end(&mut sending, &nodes);

    // What each node of the source has sent, and each of the destination received.
    assert_eq!(names(&last["nodes"]), ["p", "q"], "{last}");
    assert_eq!(sum(&last["nodes"], "images"), 4, "{last}");
    let wire = sum(&last["images"], "wire_sent_bytes");
    let by_node = sum(&last["nodes"], "wire_sent_bytes");
    assert!(by_node >= wire && wire > (COMMON * 4096) as u64, "{last}");
    assert_eq!(names(&last["flock"]["nodes"]), ["x", "y"], "{last}");
    let sent = sum(&last["flock"]["nodes"], "sent_bytes");
    assert_eq!(sent, 4096 * sum(&last["images"], "sent_blocks"), "{last}");
    // What the images have in common crosses once, whichever nodes it goes between.
    let unique = (COMMON + IMAGES.len() * OWN) as u64;
    let sent = sum(&last["images"], "sent_blocks");
    eprintln!("{sent} blocks were sent, of {unique} that differ");
    assert!((unique..unique + unique / 100).contains(&sent), "{last}");
    for home in ["x", "y"] {
        let known = sites.flock(home);
        assert_eq!(known["state"], "delivered", "{known}");
        assert_eq!(names(&known["nodes"]), ["x", "y"]);
        assert_eq!(sum(&known["nodes"], "done"), 4);
    }
    let own = sites.flock("p");
    assert_eq!(
        (&own["direction"], &own["state"]),
        (&"sent".into(), &"delivered".into())
    );
    assert_eq!(names(&own["nodes"]), ["p", "q"]);
    let table = sites.world.run("y", &["flock"]).ok();
    assert!(table.err.contains("shop: node x: "), "{}", table.err);

    // An image elsewhere is sent by the host alone, which says so.
    sites.world.image("e.img", 30, 20);
    let alone = ["send", "e.img", "far", "--flock", "other"];
    let alone = sites.world.run("p", &alone).ok();
    assert!(alone.err.contains("only this host sends"), "{}", alone.err);
    // So is an atomic flock.
    sites.world.image("origin/g.img", 32, 20);
    let atomic = [
        "send",
        "origin/g.img",
        "far",
        "--flock",
        "atomic",
        "--atomic",
    ];
    let atomic = sites.world.run("p", &atomic).ok();
    assert!(atomic.err.contains("goes to one node"), "{}", atomic.err);
    // One that cannot be sent does not stop the others.
    sites.world.image("origin/f.img", 31, 20);
    let args = [
        "send",
        "origin/gone.img",
        "origin/f.img",
        "far",
        "--flock",
        "two",
    ];
    let part = sites.world.run("q", &args).code(1);
    assert!(part.err.contains("1 of 2 images"), "{}", part.err);
    assert!(sites.there("f.img").exists());
}

#[test]
fn a_node_of_either_site_is_killed_and_all_of_the_flock_arrives() {
    let Some(sites) = Sites::new() else { return };
    let mut nodes = sites.begin();
    let mut sending = sites.send();
    sites.until_half();
    // As kill -9: one that sends, and one that receives, perhaps from the other: that whose address is known.
    drop(nodes.remove(2));
    drop(nodes.remove(1));
    let last = sites.end(&mut sending, &nodes);
    assert!(names(&last["nodes"]).contains(&"p"), "{last}");
    let known = sites.flock("y");
    assert_eq!(known["state"], "delivered", "{known}");
    assert_eq!(sum(&known["nodes"], "done"), 4, "{known}");
    for name in IMAGES {
        sites.world.run("y", &["verify", name]).ok();
    }
    // Nothing of it is left in the work table.
    let jobs = "SELECT count(*) FROM \"drover/\".jobs";
    assert_eq!(sites.server.sql(&sites.urls[0], jobs), "0");
}

#[test]
fn the_databases_of_both_sites_are_away_while_a_flock_is_sent() {
    let Some(mut sites) = Sites::new() else {
        return;
    };
    let nodes = sites.begin();
    let mut sending = sites.send();
    sites.until_half();
    sites.server.stop();
    until("the terms are over", || {
        let over = |site: &Site| site.log().contains("the term of this node is over");
        nodes.iter().all(over)
    });
    assert!(sending.try_wait().unwrap().is_none(), "{}", sites.said());
    sites.server.resume();
    sites.end(&mut sending, &nodes);
}

#[test]
fn a_flock_that_nobody_waits_for_any_more_is_stopped_and_goes_on_when_it_is_sent_again() {
    let Some(sites) = Sites::new() else { return };
    let nodes = sites.begin();
    let mut sending = sites.send();
    sites.until_half();
    crate::world::signal(sending.id(), "TERM");
    assert_ne!(wait(&mut sending), Some(0));
    until("the nodes stop", || {
        let known = sites.flock("x");
        known["in_progress"] == false
    });
    let mut sending = sites.send();
    let last = sites.end(&mut sending, &nodes);
    assert!(sum(&last["images"], "resumed_blocks") > 0, "{last}");
}
