//! Site directories that a drover from before rights, owners and domains left.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use rusqlite::Connection;
use rusqlite::types::Value;

use crate::world::{Site, World, own_address, same};

/// The tables of schema 1.
const TABLES: &str = include_str!("../../../store/src/site_catalog/sqlite/schema/1.sql");

/// Their columns before `sum`.
const COLUMNS: [(&str, &str); 4] = [
    ("settings", "key, value"),
    ("peers", "name, key, addresses, paired_unix"),
    ("tickets", "secret, created_unix, expires_unix, used_by"),
    (
        "images",
        "name, id, path, format, size_bytes, data_bytes, virtual_bytes, digest, stamp, added_unix, peer, external",
    ),
];

fn sum(table: &str, values: &[Value]) -> i64 {
    let mut hasher = blake3::Hasher::new();
    let mut field = |kind: u8, bytes: &[u8]| {
        hasher.update(&[kind]);
        hasher.update(&(bytes.len() as u64).to_le_bytes());
        hasher.update(bytes);
    };
    field(b't', table.as_bytes());
    for value in values {
        match value {
            Value::Integer(i) => field(b'i', &i.to_le_bytes()),
            Value::Text(t) => field(b's', t.as_bytes()),
            Value::Blob(b) => field(b'b', b),
            other => panic!("{other:?} is in {table}"),
        }
    }
    i64::from_le_bytes(hasher.finalize().as_bytes()[..8].try_into().unwrap())
}

/// Writes the catalog of a home as a drover with schema 1 had it, and its spare.
fn make_catalog_old(home: &Path) {
    let path = home.join("catalog.db");
    let now = Connection::open(&path).unwrap();
    let mut tables = Vec::new();
    for (table, columns) in COLUMNS {
        let sql = format!("SELECT {columns} FROM {table}");
        let mut statement = now.prepare(&sql).unwrap();
        let width = statement.column_count();
        let row = |row: &rusqlite::Row<'_>| (0..width).map(|i| row.get(i)).collect();
        let rows = statement.query_map([], row).unwrap();
        let rows: Vec<Vec<Value>> = rows.map(Result::unwrap).collect();
        tables.push((table, rows));
    }
    let revision = now.query_row("SELECT revision FROM seal", [], |row| row.get(0));
    let revision: i64 = revision.unwrap();
    now.close().unwrap();
    for old in [
        "catalog.db",
        "catalog.db-wal",
        "catalog.db-shm",
        "catalog.bak",
    ] {
        fs::remove_file(home.join(old)).ok();
    }

    let old = Connection::open(&path).unwrap();
    old.pragma_update(None, "application_id", 0x6472_6f76)
        .unwrap();
    old.pragma_update(None, "user_version", 1).unwrap();
    old.execute_batch(TABLES).unwrap();
    let (mut count, mut content) = (0, 0i64);
    for (table, rows) in tables {
        for mut row in rows {
            let sum = sum(table, &row);
            (count, content) = (count + 1, content.wrapping_add(sum));
            row.push(Value::Integer(sum));
            let marks = vec!["?"; row.len()].join(", ");
            let sql = format!("INSERT INTO {table} VALUES ({marks})");
            old.execute(&sql, rusqlite::params_from_iter(row)).unwrap();
        }
    }
    let seal = [1, revision, count, content].map(Value::Integer);
    let sum = Value::Integer(sum("seal", &seal));
    let row = [Value::Integer(1)].into_iter().chain(seal).chain([sum]);
    let sql = "INSERT INTO seal VALUES (?, ?, ?, ?, ?, ?)";
    old.execute(sql, rusqlite::params_from_iter(row)).unwrap();
    old.close().unwrap();
    fs::copy(&path, home.join("catalog.bak")).unwrap();
}

/// Makes a home as it was: its catalog, and files that others could have read if they were let into the home.
fn make_old(home: &Path) {
    make_catalog_old(home);
    for new in ["audit.log", "serve.ticket"] {
        fs::remove_file(home.join(new)).ok();
    }
    let open = |path: &Path| fs::set_permissions(path, Permissions::from_mode(0o644)).unwrap();
    for dir in ["images", "index/maps"] {
        for file in fs::read_dir(home.join(dir)).into_iter().flatten() {
            open(&file.unwrap().path());
        }
    }
    let open_dir = Permissions::from_mode(0o755);
    if home.join("mounted").exists() {
        fs::set_permissions(home.join("mounted"), open_dir).unwrap();
    }
}

fn serve(world: &World, home: &str, address: &str) -> Site {
    world.process(home, &["serve", "--listen", address])
}

/// What each peer of a home may do.
fn rights(world: &World, home: &str) -> Vec<(String, String)> {
    let ran = world.run(home, &["peers", "--json"]).ok();
    assert_eq!(ran.err, "", "nothing is wrong with it");
    let peers = ran.json();
    let one = |peer: &serde_json::Value| {
        assert_eq!(peer["domain"], "default");
        assert!(peer["quota_bytes"].is_null());
        let text = |key: &str| peer[key].as_str().unwrap().to_owned();
        let mut can: Vec<_> = peer["can"].as_array().unwrap().iter().collect();
        can.sort_by_key(|right| right.to_string());
        let can: Vec<_> = can.iter().map(|right| right.as_str().unwrap()).collect();
        (text("name"), can.join(","))
    };
    peers.iter().map(one).collect()
}

#[test]
fn an_old_site_keeps_working_and_its_peers_get_the_default_rights() {
    let world = World::new();
    let [address, matching] = [(); 2].map(|()| own_address().to_string());
    let lone = ["teleporter", "--listen", &matching];
    let teleporter = world.process("matcher", &lone);
    world
        .run("far", &["pair", &teleporter.ticket, "--name", "matcher"])
        .ok();
    fs::write(world.path("far/config.toml"), "teleporter = \"matcher\"\n").unwrap();
    let site = serve(&world, "far", &address);
    world
        .run("near", &["pair", &site.ticket, "--name", "far"])
        .ok();
    let image = world.image("a.img", 1, 300);
    world.run("near", &["send", "a.img", "far"]).ok();
    world.image("own.img", 2, 300);
    world.run("far", &["index", "own.img"]).ok();
    let ticket = world.run("far", &["ticket"]).ok().out;
    site.stop();
    teleporter.stop();
    let keys = ["far", "near", "matcher"].map(|home| {
        make_old(&world.path(home));
        fs::read(world.path(home).join("identity.key")).unwrap()
    });

    // A command that only reads is the first.
    let default = "read,send,write";
    let of_far = rights(&world, "far");
    assert_eq!(of_far.len(), 2);
    for (name, can) in &of_far {
        let expected = if name == "matcher" { "match" } else { default };
        assert_eq!(can, expected, "{name}");
    }
    let teleporter = world.process("matcher", &lone);
    let site = serve(&world, "far", &address);
    assert_eq!(rights(&world, "far"), of_far);
    assert_eq!(rights(&world, "near"), [("far".into(), default.into())]);
    let [(_, can)] = &rights(&world, "matcher")[..] else {
        panic!("one site was paired with it");
    };
    assert_eq!(can, "match");

    // What was there is there, and is its sender's.
    same(&fs::read(&image).unwrap(), &world.path("far/images/a.img"));
    world.run("far", &["verify", "a.img"]).ok();
    let listed = world.run("near", &["images", "far", "--json"]).ok().json();
    assert_eq!(listed.len(), 2);
    let ran = world.run("near", &["send", "a.img", "far", "--as", "b.img"]);
    assert!(ran.ok().err.contains("b.img"));
    let changed = world.image("a.img", 3, 300);
    world.run("near", &["send", "a.img", "far"]).ok();
    same(
        &fs::read(&changed).unwrap(),
        &world.path("far/images/a.img"),
    );
    // A ticket that was given before is good for another site, which gets none of the first one's images.
    world
        .run("third", &["pair", ticket.trim(), "--name", "far"])
        .ok();
    world.run("third", &["images", "far"]).ok();
    world
        .run("third", &["send", "own.img", "far", "--as", "a.img"])
        .fails(3, &["belongs to another peer"]);
    world
        .run("third", &["send", "own.img", "far", "--as", "c.img"])
        .ok();
    assert_eq!(rights(&world, "far").len(), 3);

    site.stop();
    teleporter.stop();
    let still = ["far", "near", "matcher"]
        .map(|home| fs::read(world.path(home).join("identity.key")).unwrap());
    assert!(keys == still, "they are the same sites");
}
