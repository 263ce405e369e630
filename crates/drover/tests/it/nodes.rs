//! A site on two hosts: two processes with homes of their own, one directory of images, and one catalog on a PostgreSQL server.

mod flocks;
mod nfs;

use std::fs;
use std::path::PathBuf;
use std::process::{Child, Stdio};

use drover_store::testing::PostgresServer;
use serde_json::Value;

use crate::migrate::fake_time;
use crate::mount::client::Client;
use crate::world::{Site, World, own_address, same, signal, until, wait};

/// Two homes of one site.
struct Cluster {
    world: World,
    url: String,
    _server: PostgresServer,
}

impl Cluster {
    fn new() -> Option<Cluster> {
        let server = PostgresServer::start()?;
        let cluster = Cluster {
            world: World::new(),
            url: server.new_database(),
            _server: server,
        };
        cluster.home("a", "shared");
        cluster.home("b", "shared");
        Some(cluster)
    }

    /// A home whose images are in this directory.
    fn home(&self, name: &str, images: &str) {
        let world = &self.world;
        world.run(name, &["init"]).ok();
        let images = world.path(images);
        let config = format!(
            "images = {:?}\nnode = {name:?}\nname = \"far\"\nnode-term = \"6s\"\ncatalog = {:?}\n",
            images.display().to_string(),
            self.url
        );
        fs::write(world.path(name).join("config.toml"), config).unwrap();
        if name != "a" {
            let key = |home: &str| world.path(home).join("identity.key");
            fs::copy(key("a"), key(name)).unwrap();
        }
    }

    fn serve(&self, home: &str) -> Site {
        let address = own_address().to_string();
        self.world.process(home, &["serve", "--listen", &address])
    }

    /// The same with a clock that is an hour ahead, if there is what gives it one.
    fn serve_an_hour_ahead(&self, home: &str) -> Site {
        let Some(library) = fake_time() else {
            println!("SKIP nodes whose clocks are apart: no libfaketime (Debian: faketime)");
            return self.serve(home);
        };
        let address = own_address().to_string();
        let clock = [
            ("LD_PRELOAD", library.as_str()),
            ("FAKETIME", "+1h"),
            ("DONT_FAKE_MONOTONIC", "1"),
        ];
        let args = ["serve", "--listen", &address];
        self.world.process_with(home, &args, &clock)
    }

    /// What is known of a node.
    fn node(&self, name: &str) -> Option<Value> {
        let listed = self.world.run("b", &["nodes", "--json"]).ok().json();
        listed.into_iter().find(|node| node["name"] == name)
    }

    fn state(&self, name: &str) -> String {
        let node = self.node(name);
        node.map_or_else(String::new, |node| node["state"].as_str().unwrap().into())
    }

    fn image(&self, name: &str) -> PathBuf {
        self.world.path("shared").join(name)
    }

    /// Sends at 4 MB/s, until some of it is at that home.
    fn send_slowly(&self, image: &str, at: &str) -> Child {
        let world = &self.world;
        let log = fs::File::create(world.path("send.log")).unwrap();
        let sending = world
            .drover("near", &["send", image, "far", "--limit", "4M"])
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .unwrap();
        until("some of it comes", || {
            let unfinished = world.run(at, &["transfers", "--json"]).ok().json();
            unfinished
                .iter()
                .any(|t| t["done_bytes"].as_u64() > Some(4 << 20))
        });
        sending
    }

    fn sent(&self) -> String {
        fs::read_to_string(self.world.path("send.log")).unwrap()
    }
}

#[test]
fn nodes_serve_one_site_and_another_directory_is_refused() {
    let Some(cluster) = Cluster::new() else {
        return;
    };
    let world = &cluster.world;
    let mut a = cluster.serve("a");
    let b = cluster.serve("b");
    assert_eq!([cluster.state("a"), cluster.state("b")], ["serving"; 2]);
    world
        .run("near", &["pair", &b.ticket, "--name", "far"])
        .ok();

    // What comes to one is known to the other, at once or soon.
    let x = world.image("x.img", 1, 500);
    world.run("near", &["send", "x.img", "far"]).ok();
    same(&fs::read(cluster.image("x.img")).unwrap(), &x);
    until("the other knows it", || {
        world.run("a", &["verify", "x.img"]).code == Some(0)
    });
    world.run("a", &["rm", "x.img", "--yes"]).ok();
    assert!(!cluster.image("x.img").exists());
    until("the other forgets it", || {
        world.run("b", &["verify", "x.img"]).code != Some(0)
    });

    // Two senders to one name, at two nodes: what is whole is whole.
    world.run("b", &["nodes", "drain", "b"]).ok();
    assert_eq!(cluster.state("b"), "draining");
    until("it drains", || b.log().contains("told to drain"));
    let y = world.image("y.img", 2, 500);
    world.run("near", &["send", "y.img", "far"]).ok();
    same(&fs::read(cluster.image("y.img")).unwrap(), &y);
    assert!(a.log().contains("session opened"), "{}", a.log());
    world.run("a", &["nodes", "drain", "b", "--undo"]).ok();
    world
        .run("a", &["nodes", "remove", "b", "--yes"])
        .fails(1, &["the node b is running"]);
    world
        .run("a", &["nodes", "drain", "c"])
        .fails(1, &["no node called c is running"]);

    // A node whose directory of images is another one, or at another place.
    cluster.home("c", "other");
    let address = own_address().to_string();
    let serve = ["serve", "--listen", &address];
    world.run("c", &serve).fails(
        3,
        &["is not the one of this site's other nodes", ".drover-site"],
    );
    let id = || fs::read(world.path("shared/.drover-site")).unwrap();
    fs::write(world.path("other/.drover-site"), id()).unwrap();
    world
        .run("c", &serve)
        .fails(1, &["mount it at the same path"]);
    fs::write(world.path("other/.drover-site"), "0".repeat(32)).unwrap();
    world
        .run("c", &serve)
        .fails(1, &["is not the one of this site's other nodes"]);

    // It goes away under a node: that one loses its term.
    fs::rename(world.path("shared"), world.path("elsewhere")).unwrap();
    fs::create_dir(world.path("shared")).unwrap();
    until("it notices", || {
        a.log().contains("is another one now") && a.log().contains("the term of this node is over")
    });
    fs::remove_dir_all(world.path("shared")).unwrap();
    fs::rename(world.path("elsewhere"), world.path("shared")).unwrap();
    // Perhaps nobody took over, since neither could.
    until("one serves", || {
        ["a", "b"]
            .iter()
            .any(|name| cluster.state(name) == "serving")
    });
    a.signal("TERM");
    a.wait();
    assert_ne!(cluster.state("a"), "serving");
}

#[test]
fn a_transfer_goes_on_at_another_node_when_its_own_is_killed() {
    let Some(cluster) = Cluster::new() else {
        return;
    };
    let world = &cluster.world;
    // Terms are by the database's time.
    let b = cluster.serve_an_hour_ahead("b");
    let a = cluster.serve("a");
    world
        .run("near", &["pair", &a.ticket, "--name", "far"])
        .ok();
    let image = world.image("web.img", 3, 10_000);
    let mut sending = cluster.send_slowly("web.img", "a");
    assert_eq!(cluster.node("a").unwrap()["transfers"], 1);
    assert_eq!([cluster.state("a"), cluster.state("b")], ["serving"; 2]);
    // As kill -9.
    drop(a);
    assert_eq!(
        wait(&mut sending),
        Some(0),
        "{}\n{}",
        cluster.sent(),
        b.log()
    );
    same(&fs::read(cluster.image("web.img")).unwrap(), &image);
    assert!(
        b.log().contains("a transfer goes on at this node"),
        "{}",
        b.log()
    );
    assert_eq!(cluster.state("a"), "fenced");
    world.run("b", &["verify", "web.img"]).ok();

    // It comes back with nothing of that, and serves.
    let a = cluster.serve("a");
    assert_eq!(cluster.state("a"), "serving");
    assert_eq!(
        world.run("a", &["transfers", "--json"]).ok().json().len(),
        0
    );
    world.run("a", &["verify", "web.img"]).ok();
    // Killed again, it is in at once: nobody else can be in its home.
    drop(a);
    let a = cluster.serve("a");
    assert_eq!(cluster.state("a"), "serving");
    let (code, _) = a.stop();
    assert_eq!(code, Some(0));
    assert_eq!(cluster.state("a"), "ended");
    world.run("b", &["nodes", "remove", "a", "--yes"]).ok();
    assert!(cluster.node("a").is_none());
}

#[test]
fn a_write_lease_at_one_node_keeps_the_image_also_when_that_node_is_gone() {
    let Some(cluster) = Cluster::new() else {
        return;
    };
    let world = &cluster.world;
    let mut nodes = vec![("a", cluster.serve("a")), ("b", cluster.serve("b"))];
    world
        .run("near", &["pair", &nodes[1].1.ticket, "--name", "far"])
        .ok();
    world.image("web.img", 6, 100);
    world.run("near", &["send", "web.img", "far"]).ok();
    let socket = format!("unix:{}", world.path("s").display());
    let export = ["export", "far:web.img", "--nbd", &socket];
    let log = fs::File::create(world.path("export.log")).unwrap();
    let mut export = world.drover("near", &export);
    let export = export.stdout(Stdio::null()).stderr(log).spawn();
    let mut export = export.unwrap();
    until("it is exported", || world.path("s").exists());
    let mounts = |name: &str| cluster.node(name).unwrap()["mounts"].as_u64().unwrap();
    let (here, site) = nodes.remove(usize::from(mounts("b") == 1));
    let (there, _site) = nodes.remove(0);
    assert_eq!([mounts(here), mounts(there)], [1, 0]);
    let rm = || world.run(there, &["rm", "web.img", "--yes"]);
    let says = format!("it is mounted at the node {here}");
    until("the other knows the image", || rm().err.contains(&says));
    drop(site);
    until("the other takes over", || cluster.state(here) == "fenced");
    assert!(rm().err.contains(&says));
    assert!(cluster.image("web.img").exists());
    signal(export.id(), "KILL");
    wait(&mut export);
    world.run(there, &["nodes", "remove", here, "--yes"]).ok();
    rm().ok();
    assert!(!cluster.image("web.img").exists());
}

#[test]
fn a_mount_that_a_node_refuses_goes_to_the_node_that_has_the_image() {
    let Some(cluster) = Cluster::new() else {
        return;
    };
    let world = &cluster.world;
    let _a = cluster.serve("a");
    let b = cluster.serve("b");
    world
        .run("near", &["pair", &b.ticket, "--name", "far"])
        .ok();
    world.image("web.img", 6, 100);
    world.run("near", &["send", "web.img", "far"]).ok();
    for home in ["a", "b"] {
        until("it knows the image", || {
            world.run(home, &["verify", "web.img"]).code == Some(0)
        });
    }
    // What is written through one node stays there.
    let mount = |home: &str, socket: &str, options: &[&str]| {
        let path = world.path(socket);
        let listen = format!("unix:{}", path.display());
        let args = ["export", "far:web.img", "--nbd", &listen, "--background"];
        world.run(home, &[&args[..], options].concat()).ok();
        Client::connect(&path, "web.img")
    };
    let unmount = |home: &str, socket: &str| {
        let path = world.path(socket).display().to_string();
        until("the client has left", || {
            world.run(home, &["unmount", &path]).code == Some(0)
        });
    };
    let mut machine = mount("near", "s", &[]);
    machine.write(8192, &[7; 4096]).unwrap();
    machine.flush().unwrap();
    drop(machine);
    unmount("near", "s");
    let changed = |home: &str| {
        let changes = world.run(home, &["changes", "--json"]).ok().json();
        !changes.is_empty()
    };
    let at: Vec<&str> = ["a", "b"]
        .into_iter()
        .filter(|home| changed(home))
        .collect();
    let [here] = at[..] else {
        panic!("changes at {at:?}")
    };
    // Another peer, which is told of the other node first.
    let there = if here == "a" { "b" } else { "a" };
    let ticket = world.run(there, &["ticket", "--can", "read"]).ok().out;
    world
        .run("next", &["pair", ticket.trim(), "--name", "far"])
        .ok();
    let mut machine = mount("next", "t", &["--read-only"]);
    assert!(machine.read(8192, 4096).unwrap() == [7; 4096]);
    drop(machine);
    unmount("next", "t");
}

#[test]
fn a_node_that_stood_still_for_longer_than_its_term_harms_nothing_when_it_wakes() {
    let Some(cluster) = Cluster::new() else {
        return;
    };
    let world = &cluster.world;
    let b = cluster.serve("b");
    let mut a = cluster.serve("a");
    world
        .run("near", &["pair", &a.ticket, "--name", "far"])
        .ok();
    world.image("web.img", 4, 10_000);
    let mut sending = cluster.send_slowly("web.img", "a");
    a.signal("STOP");
    until("the other takes over", || cluster.state("a") == "fenced");
    signal(sending.id(), "KILL");
    wait(&mut sending);
    // The rest goes to the other node, and then a newer image of that name.
    world.run("near", &["send", "web.img", "far"]).ok();
    assert!(
        b.log().contains("a transfer goes on at this node"),
        "{}",
        b.log()
    );
    let newer = world.image("web.img", 5, 3_000);
    world.run("near", &["send", "web.img", "far"]).ok();
    a.signal("CONT");
    let code = a.wait();
    assert!(
        code != Some(0) && a.log().contains("was taken for dead"),
        "{}",
        a.log()
    );
    same(&fs::read(cluster.image("web.img")).unwrap(), &newer);
    world.run("b", &["verify", "web.img"]).ok();
    let listed = world.run("b", &["images", "--json"]).ok().json();
    assert_eq!(listed.len(), 1);
    // It is of use again.
    let a = cluster.serve("a");
    assert_eq!(cluster.state("a"), "serving");
    world.run("a", &["verify", "web.img"]).ok();
    drop(a);
}
