//! Catalogs of schema 1, which had no rights: intact, damaged, and cut off while they are migrated.

use rusqlite::Connection;
use rusqlite::types::Value;

use super::*;
use crate::site_catalog::sqlite::check::{DatabaseState, examine};
use crate::site_catalog::table::checksum;

/// The tables as drover made them.
const TABLES: &str = include_str!("../schema/1.sql");

const REVISION: i64 = 9;

fn text(text: &str) -> Value {
    Value::Text(text.into())
}

/// A site's catalog of schema 1 with its spare. Returns the peers and images that it is to have after the migration with
/// the default rights.
fn first(dir: &Path) -> (Vec<Peer>, Vec<ImageRecord>) {
    let path = dir.join("catalog.db");
    let c = Connection::open(&path).unwrap();
    c.execute_batch(TABLES).unwrap();
    c.pragma_update(None, "application_id", 0x6472_6f76)
        .unwrap();
    c.pragma_update(None, "user_version", 1).unwrap();
    let mut sums = Vec::new();
    let mut put = |table: &str, values: Vec<Value>| {
        let sum = checksum(table, &values);
        let marks = vec!["?"; values.len() + 1].join(", ");
        let all = values.into_iter().chain([Value::Integer(sum)]);
        let sql = format!("INSERT INTO {table} VALUES ({marks})");
        c.execute(&sql, rusqlite::params_from_iter(all)).unwrap();
        sums.push(sum);
    };
    put(
        "settings",
        vec![text("addresses"), text("10.0.0.1:7377\nhost:1")],
    );
    put("settings", vec![text("next image id"), text("6")]);
    let peers: Vec<Peer> = [("lyon", 1), ("matcher", 3), ("nice", 4)]
        .map(|(name, n)| peer(name, n))
        .into();
    for p in &peers {
        assert_eq!(p.grant, Grant::default());
        let key = p.key.to_string();
        let addresses = p.addresses.join("\n");
        put(
            "peers",
            vec![
                text(&p.name),
                text(&key),
                text(&addresses),
                Value::Integer(p.paired_unix),
            ],
        );
    }
    let secret = blake3::derive_key("drover 2026 ticket secret", &[9; 16]);
    let secret: String = secret.iter().map(|b| format!("{b:02x}")).collect();
    put(
        "tickets",
        vec![
            text(&secret),
            Value::Integer(100),
            Value::Integer(100 + 86_400),
            text(""),
        ],
    );
    let mut images = Vec::new();
    for (id, from) in (1..).zip(["lyon", "nice", "", "forgotten", "lyon"]) {
        let image = ImageRecord {
            from: from.into(),
            owner: peers.iter().find(|p| p.name == from).map(|p| p.key),
            shared: Vec::new(),
            ..image(&format!("image-{id}.img"), id)
        };
        put(
            "images",
            vec![
                text(image.name.as_str()),
                Value::Integer(id as i64),
                Value::Blob(image.path.to_str().unwrap().into()),
                text("qcow2"),
                Value::Integer(1 << 40),
                Value::Integer(1 << 30),
                Value::Integer(1 << 41),
                text(&image.digest.to_string()),
                text("1:18446744073709551615:3:-4:9223372036854775807"),
                Value::Integer(12),
                text(from),
                Value::Integer(i64::from(image.external)),
            ],
        );
        images.push(image);
    }
    let content = sums.iter().fold(0i64, |all, sum| all.wrapping_add(*sum));
    let seal = [1, REVISION, sums.len() as i64, content];
    let sum = checksum("seal", &seal.map(Value::Integer));
    let [schema, revision, rows, content] = seal;
    c.execute(
        "INSERT INTO seal VALUES (1, ?, ?, ?, ?, ?)",
        (schema, revision, rows, content, sum),
    )
    .unwrap();
    c.close().unwrap();
    fs::copy(&path, dir.join("catalog.bak")).unwrap();
    let c = Connection::open(&path).unwrap();
    c.pragma_update(None, "journal_mode", "wal").unwrap();
    c.close().unwrap();
    (peers, images)
}

fn holds(catalog: &SiteCatalog, expected: &(Vec<Peer>, Vec<ImageRecord>), about: &str) {
    assert_eq!(catalog.peers().unwrap(), expected.0, "{about}");
    assert_eq!(catalog.images().unwrap(), expected.1, "{about}");
}

/// Both files are of the current schema and equal.
fn is_current(dir: &Path) {
    let state = examine(&dir.join("catalog.db")).unwrap();
    assert_eq!(
        state,
        DatabaseState::Good {
            revision: REVISION + 1
        }
    );
    assert_eq!(examine(&dir.join("catalog.bak")).unwrap(), state);
    for file in ["catalog.db", "catalog.bak"] {
        let c = Connection::open(dir.join(file)).unwrap();
        let version: i64 = c
            .pragma_query_value(None, "user_version", |r| r.get(0))
            .unwrap();
        assert_eq!(version, 2, "{file}");
    }
}

#[test]
fn a_catalog_without_rights_gets_them_once() {
    let tmp = TempDir::new().unwrap();
    let mut expected = first(tmp.path());
    let intact = DatabaseState::Good { revision: REVISION };
    for file in ["catalog.db", "catalog.bak"] {
        assert_eq!(examine(&tmp.path().join(file)).unwrap(), intact, "{file}");
    }
    let former = |peer: Option<&Peer>| match peer.map(|p| &*p.name) {
        Some("matcher") => Grant::matching(),
        Some(_) => Grant::default(),
        None => Grant::of("read".parse().unwrap()),
    };
    expected.0[1].grant = Grant::matching();
    let (catalog, repairs) = SiteCatalog::open_with(tmp.path(), &former).unwrap();
    assert_eq!(repairs, Vec::<String>::new());
    holds(&catalog, &expected, "migrated");
    let addresses = catalog.setting("addresses").unwrap();
    assert_eq!(addresses.as_deref(), Some("10.0.0.1:7377\nhost:1"));
    is_current(tmp.path());
    assert_eq!(catalog.new_image_id().unwrap(), ImageId(6));
    let tickets = catalog.tickets().unwrap();
    assert_eq!((tickets.len(), tickets[0].created_unix), (1, 100));
    let paired = catalog.pair(&[9; 16], PeerKey([7; 32]), "new", &[], 101);
    assert_eq!(paired.unwrap(), PairOutcome::Paired("new".into()));
    let new = catalog.peer("new").unwrap().unwrap();
    assert_eq!(new.grant, Grant::of("read".parse().unwrap()));
    catalog.forget_peer("new").unwrap().unwrap();
    drop(catalog);
    let never = |_: Option<&Peer>| -> Grant { panic!("it has rights") };
    let (catalog, repairs) = SiteCatalog::open_with(tmp.path(), &never).unwrap();
    assert_eq!(repairs, Vec::<String>::new());
    holds(&catalog, &expected, "reopened");
}

#[test]
fn several_processes_may_find_a_catalog_without_rights() {
    let tmp = TempDir::new().unwrap();
    let expected = first(tmp.path());
    std::thread::scope(|s| {
        for _ in 0..4 {
            s.spawn(|| holds(&open(tmp.path()), &expected, "one of four"));
        }
    });
    is_current(tmp.path());
}

/// The power fails after any number of bytes of the migration's log, with the spare from before or, were it written
/// first, from after.
#[test]
fn a_migration_that_is_cut_off_is_done_again() {
    let tmp = TempDir::new().unwrap();
    let expected = first(tmp.path());
    let old = fs::read(tmp.path().join("catalog.bak")).unwrap();
    let catalog = open(tmp.path());
    let read = |file: &str| fs::read(tmp.path().join(file)).unwrap();
    let (db, wal, new) = (
        read("catalog.db"),
        read("catalog.db-wal"),
        read("catalog.bak"),
    );
    drop(catalog);
    assert_ne!(old, new);
    let frame = 24 + 4096;
    assert!(wal.len() > 32 + 3 * frame, "{}", wal.len());
    let frames = (32..=wal.len()).step_by(frame);
    let cuts = frames.flat_map(|end| [end - 20, end, end + 40]);
    for cut in cuts.chain([0, 1]).filter(|cut| *cut <= wal.len()) {
        for (spare, shown) in [(&old, "old"), (&new, "new")] {
            let about = format!("{cut} of {} bytes, {shown} spare", wal.len());
            let tmp = TempDir::new().unwrap();
            let write = |file: &str, bytes: &[u8]| fs::write(tmp.path().join(file), bytes).unwrap();
            write("catalog.db", &db);
            write("catalog.db-wal", &wal[..cut]);
            write("catalog.bak", spare);
            write("catalog.bak.tmp", &new[..new.len() / 2]);
            let (catalog, repairs) = SiteCatalog::open(tmp.path()).unwrap();
            holds(&catalog, &expected, &about);
            if shown == "old" {
                assert_eq!(repairs, Vec::<String>::new(), "{about}");
            }
            drop(catalog);
            is_current(tmp.path());
        }
    }
}

#[test]
fn a_spare_without_rights_is_replaced_or_migrated() {
    let tmp = TempDir::new().unwrap();
    let expected = first(tmp.path());
    let old = fs::read(tmp.path().join("catalog.bak")).unwrap();
    drop(open(tmp.path()));
    // Beside a good catalog it is out of date.
    fs::write(tmp.path().join("catalog.bak"), &old).unwrap();
    drop(open(tmp.path()));
    is_current(tmp.path());
    // Beside a damaged or missing one it is what there is.
    for damage in [Some("garbage"), None] {
        fs::write(tmp.path().join("catalog.bak"), &old).unwrap();
        let db = tmp.path().join("catalog.db");
        match damage {
            Some(text) => fs::write(&db, text).unwrap(),
            None => fs::remove_file(&db).unwrap(),
        }
        let (catalog, repairs) = SiteCatalog::open(tmp.path()).unwrap();
        assert!(repairs[0].contains("restored from"), "{repairs:?}");
        holds(&catalog, &expected, "restored");
        drop(catalog);
        is_current(tmp.path());
    }
}

#[test]
fn a_damaged_catalog_without_rights_is_repaired_and_gets_them() {
    let tmp = TempDir::new().unwrap();
    let (peers, images) = first(tmp.path());
    let seed = fastrand::u64(..);
    let mut rng = fastrand::Rng::with_seed(seed);
    for file in ["catalog.db", "catalog.bak"] {
        let len = fs::metadata(tmp.path().join(file)).unwrap().len() as usize;
        let anywhere: Vec<usize> = (0..40).map(|_| rng.usize(..len)).collect();
        for at in (0..100).step_by(5).chain(anywhere) {
            let mask = rng.u8(1..);
            let copy = damaged(tmp.path(), file, |b| b[at] ^= mask);
            let about = format!("seed {seed}: {file} byte {at} ^ {mask:#x}");
            survives(copy.path(), &peers, &images, &about);
        }
        for page in 0..len / 4096 {
            let copy = damaged(tmp.path(), file, |b| b[page * 4096..][..4096].fill(0));
            let about = format!("{file} page {page} zeroed");
            survives(copy.path(), &peers, &images, &about);
        }
    }
}

/// An index that is said to be of another table stays when its own is dropped, and makes the catalog unreadable.
#[test]
fn an_index_of_the_wrong_table_is_noticed_before_the_migration() {
    let tmp = TempDir::new().unwrap();
    let (peers, images) = first(tmp.path());
    for table in ["images", "peers"] {
        for file in ["catalog.db", "catalog.bak"] {
            let copy = damaged(tmp.path(), file, |bytes| {
                let row = format!("sqlite_autoindex_{table}_1{table}");
                let found = bytes.windows(row.len()).position(|at| at == row.as_bytes());
                bytes[found.unwrap() + row.len() - 1] ^= 1;
            });
            survives(copy.path(), &peers, &images, &format!("{file}: {table}"));
        }
    }
}

/// With the spare lost too, or the catalog beyond reading, the rows of either are kept and get the same rights.
#[test]
fn rows_saved_from_a_catalog_without_rights_get_them() {
    let former = |peer: Option<&Peer>| match peer.map(|p| &*p.name) {
        Some("matcher") => Grant::matching(),
        _ => Grant::of("read".parse().unwrap()),
    };
    let file = ["catalog.db", "catalog.bak"];
    for (keeps, lost) in [(0, 1), (1, 0)] {
        let tmp = TempDir::new().unwrap();
        let (mut peers, mut images) = first(tmp.path());
        let c = Connection::open(tmp.path().join(file[keeps])).unwrap();
        c.execute_batch(
            "UPDATE images SET peer = 'nice' WHERE name = 'image-3.img';
             UPDATE peers SET addresses = 'evil:1' WHERE name = 'nice'",
        )
        .unwrap();
        c.close().unwrap();
        fs::write(tmp.path().join(file[lost]), "garbage").unwrap();
        let (catalog, repairs) = SiteCatalog::open_with(tmp.path(), &former).unwrap();
        assert!(repairs[0].contains("2 peers, 4 images"), "{repairs:?}");
        peers.retain(|p| p.name != "nice");
        peers[0].grant = Grant::of("read".parse().unwrap());
        peers[1].grant = Grant::matching();
        images.retain(|i| i.id != ImageId(3));
        // Its sender is not known any more.
        images[1].owner = None;
        holds(&catalog, &(peers, images), file[keeps]);
        assert_eq!(catalog.tickets().unwrap(), []);
        drop(catalog);
        open(tmp.path());
    }
}

#[test]
fn a_catalog_without_rights_is_read_on_a_full_disk() {
    let tmp = TempDir::new().unwrap();
    let expected = first(tmp.path());
    let files = || {
        let read = |file: &str| fs::read(tmp.path().join(file)).unwrap();
        (read("catalog.db"), read("catalog.bak"))
    };
    let before = files();
    let opened = SiteCatalog::open_on_full_disk(tmp.path(), &|_| Grant::default());
    let catalog = opened.unwrap().unwrap();
    holds(&catalog, &expected, "in memory");
    assert!(catalog.set_setting("x", "y").is_err());
    assert!(catalog.forget_peer("lyon").is_err());
    drop(catalog);
    assert!(before == files());
}
