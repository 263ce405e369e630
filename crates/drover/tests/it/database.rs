//! A site whose catalog is on a PostgreSQL server: used by all commands, and away for a while.

use std::fs;
use std::process::{Child, Stdio};

use drover_store::testing::PostgresServer;

use crate::world::{World, same, signal, until, wait};

/// Starts `drover serve` in a home without waiting for it.
fn begin(world: &World, home: &str, args: &[&str]) -> (Child, String) {
    let log = format!("{home}.begun");
    let file = fs::File::create(world.path(&log)).unwrap();
    let mut command = world.drover(
        home,
        &[&["serve", "--listen", "127.0.0.1:0"], args].concat(),
    );
    let child = command.stdout(Stdio::piped()).stderr(file).spawn();
    (child.unwrap(), log)
}

#[test]
fn a_site_on_a_server_is_what_it_was_in_a_file() {
    let Some(mut server) = PostgresServer::start() else {
        return;
    };
    let url = server.new_database();
    let world = World::new();
    // It begins as any other, and moves with its peers and images.
    let far = world.pair();
    let status = world.run("far", &["status", "--json"]).ok().json();
    let address = status[0]["addresses"][0].as_str().unwrap().to_owned();
    let a = world.image("a.img", 1, 2000);
    world.run("near", &["send", "a.img", "far"]).ok();
    far.stop();
    let serve = ["serve", "--listen", &address];
    let far = world.process("far", &[&serve[..], &["--catalog", &url]].concat());
    assert!(far.log().contains("has what was in"), "{}", far.log());
    let names = |home: &str, args: &[&str]| {
        let listed = world.run(home, &[&["images", "--json"], args].concat());
        let listed = listed.ok().json().into_iter();
        let names: Vec<String> = listed.map(|i| i["name"].as_str().unwrap().into()).collect();
        names.join(" ")
    };
    assert_eq!(names("far", &[]), "a.img");
    let used = server.sql(&url, "SELECT count(*) FROM \"drover/default\".images");
    assert_eq!(used, "1");
    far.stop();
    // From now on without being told.
    let far = world.process("far", &serve);
    assert_eq!(names("near", &["far"]), "a.img");
    world.run("far", &["domains", "add", "acme"]).ok();
    let tables = "SELECT count(*) FROM pg_tables WHERE schemaname = 'drover/acme'";
    assert_eq!(server.sql(&url, tables), "5");
    world.run("other", &["init"]).ok();
    world
        .run(
            "other",
            &["serve", "--listen", "127.0.0.1:0", "--catalog", &url],
        )
        .fails(
            3,
            &["is that of the site with the key", "copy identity.key"],
        );
    fs::copy(
        world.path("far/identity.key"),
        world.path("other/identity.key"),
    )
    .unwrap();
    world
        .run(
            "other",
            &["serve", "--listen", "127.0.0.1:0", "--catalog", &url],
        )
        .fails(
            3,
            &["is not the one of this site's other nodes", ".drover-site"],
        );

    // The server goes away while an image is under way, which arrives all the same.
    let b = world.image("b.img", 2, 10_000);
    let mut sending = world
        .drover("near", &["send", "b.img", "far", "--limit", "4M"])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    until("some of it comes", || {
        let unfinished = world.run("far", &["transfers", "--json"]).ok().json();
        unfinished
            .iter()
            .any(|t| t["done_bytes"].as_u64() > Some(2 << 20))
    });
    server.stop();
    // What needs no catalog goes on.
    let status = world.run("far", &["status", "--json"]).ok().json();
    let domain = &status[0]["domains"][0];
    let problem = domain["problem"].as_str().unwrap();
    assert!(
        problem.contains("cannot use the catalog at postgres://"),
        "{problem}"
    );
    assert_eq!(domain["site"]["sessions"], 1, "{status:?}");
    world
        .run("near", &["images", "far"])
        .fails(1, &["the catalog of", "cannot be read now"]);
    world
        .run("far", &["images"])
        .fails(1, &["cannot use the catalog at postgres://"]);
    assert!(sending.try_wait().unwrap().is_none(), "{}", far.log());
    server.resume();
    assert_eq!(wait(&mut sending), Some(0), "{}", far.log());
    same(&world.delivered("far", "b.img"), &b);
    same(&world.delivered("far", "a.img"), &a);
    assert_eq!(names("near", &["far"]), "a.img b.img");
    world.run("far", &["verify", "b.img"]).ok();
    far.stop();
}

#[test]
fn a_server_that_is_down_at_the_start_is_waited_for_and_a_newer_schema_is_not_used() {
    let Some(mut server) = PostgresServer::start() else {
        return;
    };
    let url = server.new_database();
    let world = World::new();
    server.stop();
    let (mut child, log) = begin(&world, "far", &["--catalog", &url]);
    let said = || fs::read_to_string(world.path(&log)).unwrap();
    until("it says what it waits for", || {
        said().contains("waiting for the catalog at postgres://")
    });
    assert!(child.try_wait().unwrap().is_none(), "{}", said());
    server.resume();
    until("it is ready", || said().contains("is listening on"));
    signal(child.id(), "TERM");
    assert_eq!(wait(&mut child), Some(0), "{}", said());
    assert_eq!(said().matches("waiting").count(), 1, "{}", said());

    // The row that says what schema it is cannot be altered by hand.
    let schema = "UPDATE \"drover/default\".seal SET schema = 99";
    server.sql(&url, schema);
    world
        .run("far", &["images"])
        .fails(1, &["was altered", "from a backup"]);
    let remote = "postgres://drover@db.example.net/drover";
    world.run("new", &["serve", "--catalog", remote]).fails(
        1,
        &[
            "sslmode=verify-full",
            "postgres://drover@db.example.net/drover",
        ],
    );
    let ran = world.run("new", &["serve", "--catalog", "mysql://db/x"]);
    assert!(
        ran.code == Some(2) && ran.err.contains("postgres://"),
        "{ran:?}"
    );
}
