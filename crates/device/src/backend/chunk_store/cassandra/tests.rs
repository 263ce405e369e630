//! Against a real cluster.

use drover_core::BlockDevice;

use super::super::{NewStore, StoreAddress, StoreDevice, StoreOptions, create};
use super::*;
use crate::testing::{CassandraCluster, contract};

fn store(cluster: &CassandraCluster, name: &str) -> Arc<dyn ChunkStore> {
    let url = format!("cassandra://{}/disks/{name}", cluster.at(0));
    url.parse::<StoreAddress>().unwrap().store().unwrap()
}

fn new(size: u64) -> NewStore {
    NewStore {
        size,
        chunk: 16 << 10,
        object: None,
    }
}

fn options() -> StoreOptions {
    StoreOptions::new([3; 16], "a test")
}

/// Of one server, which is killed and started again.
#[test]
fn a_disk_in_cassandra_is_a_disk() {
    let dir = tempfile::tempdir().unwrap();
    let Some(mut cluster) = CassandraCluster::start(dir.path(), 1) else {
        return;
    };
    let url = format!("cassandra://{}/nowhere/a", cluster.at(0));
    let error = url.parse::<StoreAddress>().unwrap().store().err().unwrap();
    assert!(error.to_string().contains("no keyspace nowhere"), "{error}");
    values_are_conditional_listed_and_removed(&cluster);
    contract(&|size| {
        let store = store(&cluster, &format!("of_{size}"));
        create(&*store, new(size)).unwrap();
        let mut options = options();
        options.max_buffer = 256 << 10;
        Box::new(StoreDevice::open(store, &options).unwrap())
    });

    let disk = store(&cluster, "kept");
    assert!(disk.promise().is_durable, "{:?}", disk.promise());
    let note = disk.promise().note.unwrap();
    assert!(note.contains("one copy"), "{note}");
    create(&*disk, new(8 << 20)).unwrap();
    let device = StoreDevice::open(Arc::clone(&disk), &options()).unwrap();
    let mut bytes = vec![0; 5 << 20];
    fastrand::Rng::with_seed(5).fill(&mut bytes);
    device.write(1 << 20, &bytes).unwrap();
    device.flush().unwrap();
    cluster.kill(0);
    cluster.start_again(0);
    let mut back = vec![0; 8 << 20];
    device.read(0, &mut back).unwrap();
    assert!(back[1 << 20..6 << 20] == bytes && back[6 << 20..].iter().all(|b| *b == 0));
    device.write(0, &[9; 4096]).unwrap();
    device.close().unwrap();

    // What somebody removes is not taken for zeros; another table is no disk.
    cluster.query("TRUNCATE disks.kept");
    assert!(matches!(
        StoreDevice::open(disk, &options()),
        Err(super::super::OpenError::Absent(_))
    ));
    cluster.query("CREATE TABLE disks.other (id int PRIMARY KEY)");
    let other = store(&cluster, "other");
    let error = StoreDevice::open(other, &options()).err().unwrap();
    assert!(!error.is_transient(), "{error}");
}

fn values_are_conditional_listed_and_removed(cluster: &CassandraCluster) {
    let store = store(cluster, "a");
    let value = |text: &'static str| Bytes::from_static(text.as_bytes());
    assert_eq!(store.look("disk", 100).unwrap(), None, "there is no table");
    store.list("", &mut |key| panic!("{key}")).unwrap();
    let none = store.no_tag();
    assert_eq!(store.swap("disk", Some(&none), value("no")).unwrap(), None);
    let first = store.swap("disk", None, value("one")).unwrap().unwrap();
    assert_eq!(store.swap("disk", None, value("two")).unwrap(), None);
    assert_eq!(store.swap("disk", Some(&none), value("no")).unwrap(), None);
    let second = store.swap("disk", Some(&first), value("three")).unwrap();
    assert_eq!(store.swap("disk", Some(&first), value("no")).unwrap(), None);
    let (now, tag) = store.look("disk", 100).unwrap().unwrap();
    assert_eq!((now, Some(tag)), (value("three"), second));
    assert!(store.look("disk", 4).is_err(), "it is longer");
    // More than are under way at once, and than a page has.
    let many = (0..2500).map(|n| (format!("o/{n:06x}"), Bytes::from(vec![n as u8; 100])));
    let many: Vec<_> = many.collect();
    for done in store.put(many.clone()) {
        done.unwrap();
    }
    let wanted = |n: usize| Wanted {
        key: format!("o/{n:06x}"),
        range: 10..20,
    };
    let got = store.get(&(2400..2600).map(wanted).collect::<Vec<_>>());
    for (n, got) in (2400..).zip(got) {
        let expected = (n < 2500).then(|| Bytes::from(vec![n as u8; 10]));
        assert_eq!(got.unwrap(), expected, "{n}");
    }
    let keys = |prefix: &str| {
        let mut keys = Vec::new();
        store
            .list(prefix, &mut |key| keys.push(key.to_owned()))
            .unwrap();
        keys.sort();
        keys
    };
    assert!(keys("o/").iter().eq(many.iter().map(|(key, _)| key)));
    store.remove(&keys("o/")).unwrap();
    store.remove(&["o/none".to_owned()]).unwrap();
    assert_eq!(keys(""), ["disk"]);
}

/// A write that a majority of the servers cannot get is an error for its request, and nothing is lost when they are back.
#[test]
fn a_lost_quorum_is_an_error_for_its_requests() {
    let dir = tempfile::tempdir().unwrap();
    let Some(mut cluster) = CassandraCluster::start(dir.path(), 2) else {
        return;
    };
    let table = |patience| {
        let url = format!("cassandra://{},{}/disks/a", cluster.at(0), cluster.at(1));
        let Ok(StoreAddress::Cassandra(table)) = url.parse::<StoreAddress>() else {
            panic!("{url}");
        };
        let mut store = CassandraStore::connect(table, &url).unwrap();
        store.later = patience;
        store
    };
    let store = Arc::new(table(Duration::from_secs(3)));
    create(&*store, new(4 << 20)).unwrap();
    let device = StoreDevice::open(store, &options()).unwrap();
    device.write(0, &[1; 200_000]).unwrap();
    device.flush().unwrap();
    cluster.kill(1);
    device.write(100_000, &[2; 200_000]).unwrap();
    let error = device.flush().unwrap_err();
    assert!(error.is_transient(), "{error}");
    let error = device.read(1 << 16, &mut [0; 10]).unwrap_err();
    assert!(error.is_transient(), "{error}");
    cluster.start_again(1);
    let began = Instant::now();
    while let Err(error) = device.flush() {
        assert!(
            error.is_transient() && began.elapsed() < Duration::from_secs(120),
            "{error}"
        );
    }
    let mut back = vec![0; 400_000];
    device.read(0, &mut back).unwrap();
    assert!(back[..100_000].iter().all(|b| *b == 1));
    assert!(back[100_000..300_000].iter().all(|b| *b == 2));
    assert!(back[300_000..].iter().all(|b| *b == 0));
    device.close().unwrap();
}

#[test]
fn what_a_keyspace_promises() {
    let replication = |copies: &str| {
        let pair = |key: &str, value: &str| (key.to_owned(), value.to_owned());
        vec![
            pair("class", "x.NetworkTopologyStrategy"),
            pair("lyon", copies),
        ]
    };
    let safe = promise(&replication("3"), true, Some("batch"));
    assert_eq!((safe.is_durable, safe.note), (true, None));
    let periodic = promise(&replication("3"), true, Some("periodic"));
    assert!(!periodic.is_durable && periodic.note.unwrap().contains("loss of power"));
    let single = promise(&replication("1"), false, Some("batch"));
    let note = single.note.unwrap();
    assert!(
        !single.is_durable && note.contains("no log") && note.contains("one copy"),
        "{note}"
    );
    assert!(!promise(&replication("3"), true, None).is_durable);
}
