//! Tests of the catalog in normal use, and with damaged files.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use drover_core::{Digest, ImageName};
use drover_image::Stamp;
use drover_index::ImageId;
use drover_net::PeerKey;
use tempfile::TempDir;

use super::*;
use crate::catalog::{Catalog, ImageRecord};
use crate::catalog_error::CatalogError;

mod rights;
mod schema1;

const DAY: Duration = Duration::from_secs(86_400);

fn open(dir: &Path) -> SiteCatalog {
    let (catalog, repairs) = SiteCatalog::open(dir).unwrap();
    assert_eq!(repairs, Vec::<String>::new());
    catalog
}

fn peer(name: &str, n: u8) -> Peer {
    Peer {
        name: name.into(),
        key: PeerKey([n; 32]),
        addresses: vec![format!("10.0.0.{n}:7377"), "host:1".into()],
        paired_unix: 1_700_000_000 + i64::from(n),
        grant: match n {
            2 => Grant {
                domain: "acme".into(),
                quota_bytes: Some(500 << 30),
                ..Grant::of("read".parse().unwrap())
            },
            _ => Grant::default(),
        },
    }
}

fn image(name: &str, id: u64) -> ImageRecord {
    ImageRecord {
        id: ImageId(id),
        name: ImageName::new(name).unwrap(),
        path: PathBuf::from(format!("/srv/images/{name}")),
        format: "qcow2".into(),
        size_bytes: 1 << 40,
        data_bytes: 1 << 30,
        virtual_bytes: 1 << 41,
        digest: Digest([id as u8; 32]),
        stamp: Some(Stamp {
            device: 1,
            inode: u64::MAX,
            size: 3,
            mtime_ns: -4,
            ctime_ns: i128::from(i64::MAX),
        }),
        added_unix: 12,
        from: "lyon".into(),
        external: id % 2 == 1,
        owner: id.is_multiple_of(2).then_some(PeerKey([1; 32])),
        shared: (0..id as u8 % 3).map(|n| PeerKey([n; 32])).collect(),
    }
}

/// A catalog with some peers, tickets, images and settings.
fn filled(dir: &Path) -> (Vec<Peer>, Vec<ImageRecord>) {
    let catalog = open(dir);
    let peers = vec![peer("lyon", 1), peer("nice", 2)];
    let images: Vec<_> = (1..=5)
        .map(|i| image(&format!("image-{i}.img"), i))
        .collect();
    peers.iter().for_each(|p| catalog.put_peer(p).unwrap());
    for i in &images {
        assert_eq!(catalog.new_image_id().unwrap(), i.id);
        catalog.put(i).unwrap();
    }
    let grant = Grant::default();
    catalog.add_ticket(&[9; 16], &grant, "", 100, DAY).unwrap();
    catalog.set_setting("addresses", "10.0.0.1:7377").unwrap();
    (peers, images)
}

#[test]
fn rows_survive_closing_and_reopening() {
    let tmp = TempDir::new().unwrap();
    let (peers, images) = filled(tmp.path());
    let catalog = open(tmp.path());
    assert_eq!(catalog.peers().unwrap(), peers);
    assert_eq!(catalog.images().unwrap(), images);
    assert_eq!(
        catalog.by_name(&images[2].name).unwrap().as_ref(),
        Some(&images[2])
    );
    assert_eq!(catalog.peer("lyon").unwrap().as_ref(), Some(&peers[0]));
    assert_eq!(
        catalog.peer_by_key(&peers[1].key).unwrap().as_ref(),
        Some(&peers[1])
    );
    assert_eq!(
        catalog.setting("addresses").unwrap().as_deref(),
        Some("10.0.0.1:7377")
    );
    assert_eq!(catalog.setting("nothing").unwrap(), None);
}

#[test]
fn an_image_replaces_the_one_of_its_name_and_numbers_never_come_back() {
    let tmp = TempDir::new().unwrap();
    let (_, images) = filled(tmp.path());
    let catalog = open(tmp.path());
    let new = ImageRecord {
        id: catalog.new_image_id().unwrap(),
        stamp: None,
        ..images[0].clone()
    };
    assert_eq!(new.id, ImageId(6));
    assert_eq!(catalog.put(&new).unwrap().as_ref(), Some(&images[0]));
    assert_eq!(catalog.by_name(&new.name).unwrap().as_ref(), Some(&new));
    assert_eq!(catalog.remove(&new.name).unwrap().as_ref(), Some(&new));
    assert_eq!(catalog.remove(&new.name).unwrap(), None);
    assert_eq!(catalog.images().unwrap().len(), 4);
    assert_eq!(catalog.new_image_id().unwrap(), ImageId(7));
    let thief = ImageRecord {
        name: ImageName::new("other").unwrap(),
        ..images[1].clone()
    };
    assert!(
        catalog
            .put(&thief)
            .unwrap_err()
            .to_string()
            .contains("image-2.img")
    );
}

#[test]
fn every_change_is_noticed_whoever_made_it() {
    let dir = TempDir::new().unwrap();
    let (own, other) = (open(dir.path()), open(dir.path()));
    let (mut seen, versions) = (own.version().unwrap(), || own.version().unwrap());
    for (n, catalog) in [&own, &other, &own].into_iter().enumerate() {
        let name = format!("peer{n}");
        catalog.put_peer(&peer(&name, n as u8)).unwrap();
        assert_ne!(versions(), seen, "{name}");
        seen = versions();
        other.peers().unwrap();
        assert_eq!(versions(), seen, "reading is no change");
    }
}

#[test]
fn a_ticket_is_good_once() {
    let tmp = TempDir::new().unwrap();
    let catalog = open(tmp.path());
    let (key, other) = (PeerKey([1; 32]), PeerKey([2; 32]));
    let grant = Grant::default();
    catalog.add_ticket(&[1; 16], &grant, "", 1000, DAY).unwrap();
    catalog.add_ticket(&[2; 16], &grant, "", 1000, DAY).unwrap();
    let pair = |secret, key, now| {
        catalog
            .pair(&[secret; 16], key, "web", &["a:1".into()], now)
            .unwrap()
    };
    assert_eq!(pair(7, key, 1001), PairOutcome::UnknownTicket);
    assert_eq!(pair(1, key, 1000 + 86_400), PairOutcome::ExpiredTicket);
    assert!(catalog.peers().unwrap().is_empty());
    assert_eq!(pair(1, key, 1001), PairOutcome::Paired("web".into()));
    assert_eq!(pair(1, other, 1002), PairOutcome::UsedTicket);
    // A retry after a lost reply succeeds.
    assert_eq!(pair(1, key, 1003), PairOutcome::Paired("web".into()));
    assert_eq!(pair(2, other, 1004), PairOutcome::Paired("web-2".into()));
    assert_eq!(catalog.peers().unwrap().len(), 2);
    // But it fails once the trust has been revoked.
    catalog.forget_peer("web").unwrap().unwrap();
    assert_eq!(pair(1, key, 1005), PairOutcome::UsedTicket);
    assert_eq!(catalog.peer_by_key(&key).unwrap(), None);
}

#[test]
fn tickets_do_not_pile_up() {
    let tmp = TempDir::new().unwrap();
    let catalog = open(tmp.path());
    let grant = Grant::default();
    let later = 30 * 86_400;
    catalog.add_ticket(&[1; 16], &grant, "", 0, DAY).unwrap();
    catalog
        .add_ticket(&[2; 16], &grant, "", later, DAY)
        .unwrap();
    let pair = |secret, now| {
        catalog
            .pair(&[secret; 16], PeerKey([1; 32]), "x", &[], now)
            .unwrap()
    };
    assert_eq!(
        pair(1, 1),
        PairOutcome::UnknownTicket,
        "long expired, so forgotten"
    );
    assert_eq!(pair(2, later), PairOutcome::Paired("x".into()));
}

#[test]
fn names_of_peers_are_unique_and_keys_too() {
    let tmp = TempDir::new().unwrap();
    filled(tmp.path());
    let catalog = open(tmp.path());
    let e = catalog.put_peer(&peer("lyon", 3)).unwrap_err();
    assert!(e.to_string().contains("drover peers forget lyon"), "{e}");
    // The same key under a new name is the same peer.
    catalog.put_peer(&peer("paris", 1)).unwrap();
    let names: Vec<String> = catalog
        .peers()
        .unwrap()
        .into_iter()
        .map(|p| p.name)
        .collect();
    assert_eq!(names, ["nice", "paris"]);
}

#[test]
fn several_users_at_once_see_every_change() {
    let tmp = TempDir::new().unwrap();
    let ids: Vec<u64> = std::thread::scope(|s| {
        let workers: Vec<_> = (0..4)
            .map(|w| {
                let dir = tmp.path();
                s.spawn(move || {
                    let catalog = open(dir);
                    (0..10)
                        .map(|i| {
                            let id = catalog.new_image_id().unwrap();
                            catalog.put(&image(&format!("w{w}-{i}"), id.0)).unwrap();
                            id.0
                        })
                        .collect::<Vec<_>>()
                })
            })
            .collect();
        workers
            .into_iter()
            .flat_map(|w| w.join().unwrap())
            .collect()
    });
    let unique: std::collections::HashSet<_> = ids.iter().collect();
    assert_eq!(unique.len(), 40);
    assert_eq!(open(tmp.path()).images().unwrap().len(), 40);
}

#[test]
fn a_missing_catalog_comes_back_from_its_spare() {
    let tmp = TempDir::new().unwrap();
    let (peers, images) = filled(tmp.path());
    fs::remove_file(tmp.path().join("catalog.db")).unwrap();
    let (catalog, repairs) = SiteCatalog::open(tmp.path()).unwrap();
    assert!(
        repairs[0].contains("missing") && repairs[0].contains("catalog.bak"),
        "{repairs:?}"
    );
    assert_eq!(
        (catalog.peers().unwrap(), catalog.images().unwrap()),
        (peers, images)
    );
    assert_eq!(catalog.new_image_id().unwrap(), ImageId(6));
}

#[test]
fn without_a_good_spare_the_good_rows_are_saved_and_tickets_are_not() {
    let tmp = TempDir::new().unwrap();
    let (peers, images) = filled(tmp.path());
    {
        let c = rusqlite::Connection::open(tmp.path().join("catalog.db")).unwrap();
        c.execute(
            "UPDATE images SET size_bytes = 7 WHERE name = 'image-3.img'",
            [],
        )
        .unwrap();
    }
    fs::write(tmp.path().join("catalog.bak"), "garbage").unwrap();
    let (catalog, repairs) = SiteCatalog::open(tmp.path()).unwrap();
    assert!(repairs[0].contains("2 peers, 4 images"), "{repairs:?}");
    assert_eq!(catalog.peers().unwrap(), peers);
    let left: Vec<_> = images.into_iter().filter(|i| i.id != ImageId(3)).collect();
    assert_eq!(catalog.images().unwrap(), left);
    assert!(
        catalog.new_image_id().unwrap().0 > 1000,
        "no number comes back"
    );
    let outcome = catalog
        .pair(&[9; 16], PeerKey([5; 32]), "x", &[], 101)
        .unwrap();
    assert_eq!(outcome, PairOutcome::UnknownTicket);
    assert!(
        tmp.path().join("catalog.damaged").exists(),
        "what was damaged is kept"
    );
    drop(catalog);
    open(tmp.path());
}

#[test]
fn damage_under_a_running_process_is_reported_but_not_repaired() {
    let tmp = TempDir::new().unwrap();
    filled(tmp.path());
    let running = open(tmp.path());
    {
        let c = rusqlite::Connection::open(tmp.path().join("catalog.db")).unwrap();
        c.execute(
            "UPDATE peers SET addresses = 'evil:1' WHERE name = 'lyon'",
            [],
        )
        .unwrap();
    }
    let e = running.peer("lyon").unwrap_err();
    assert!(matches!(e, CatalogError::Damaged { .. }), "{e}");
    let Err(e) = SiteCatalog::open(tmp.path()) else {
        panic!("opened a damaged catalog in use")
    };
    assert!(e.to_string().contains("stop the drover processes"), "{e}");
    drop(running);
    let (catalog, repairs) = SiteCatalog::open(tmp.path()).unwrap();
    assert_eq!(repairs.len(), 1);
    assert_eq!(catalog.peer("lyon").unwrap(), Some(peer("lyon", 1)));
}

#[test]
fn a_catalog_of_a_newer_drover_is_left_alone() {
    let tmp = TempDir::new().unwrap();
    filled(tmp.path());
    let path = tmp.path().join("catalog.db");
    {
        let mut c = rusqlite::Connection::open(&path).unwrap();
        let tx = c.transaction().unwrap();
        tx.pragma_update(None, "user_version", 99).unwrap();
        let mut seal = Seal::load(&tx).unwrap();
        seal.schema = 99;
        seal.store(&tx).unwrap();
        tx.commit().unwrap();
    }
    let before = fs::read(&path).unwrap();
    let Err(e) = SiteCatalog::open(tmp.path()) else {
        panic!("opened it")
    };
    assert!(matches!(e, CatalogError::Newer { found: 99, .. }), "{e}");
    assert_eq!(fs::read(&path).unwrap(), before);
}

#[test]
fn changes_that_a_damaged_log_lost_come_back_from_the_spare() {
    let tmp = TempDir::new().unwrap();
    let (_, mut images) = filled(tmp.path());
    // A copy of the files of a killed process: its last change is only in the log.
    let killed = TempDir::new().unwrap();
    {
        let catalog = open(tmp.path());
        let last = image("last.img", catalog.new_image_id().unwrap().0);
        catalog.put(&last).unwrap();
        images.push(last);
        for file in ["catalog.db", "catalog.db-wal", "catalog.bak"] {
            fs::copy(tmp.path().join(file), killed.path().join(file)).unwrap();
        }
    }
    let wal = killed.path().join("catalog.db-wal");
    let mut bytes = fs::read(&wal).unwrap();
    assert!(bytes.len() > 4096);
    bytes[100] ^= 1;
    fs::write(&wal, bytes).unwrap();
    let (catalog, repairs) = SiteCatalog::open(killed.path()).unwrap();
    assert!(repairs[0].contains("last changes"), "{repairs:?}");
    assert_eq!(catalog.images().unwrap(), images);
}

/// The contract under damage, whatever bytes it hits: no panic, and either everything is there or a repair is reported;
/// peers and images that are there are unaltered.
fn survives(dir: &Path, peers: &[Peer], images: &[ImageRecord], what: &str) {
    match SiteCatalog::open(dir) {
        Ok((catalog, repairs)) => {
            let (p, i) = (catalog.peers().unwrap(), catalog.images().unwrap());
            if repairs.is_empty() {
                assert_eq!(
                    (p.as_slice(), i.as_slice()),
                    (peers, images),
                    "{what}: silently different"
                );
            } else {
                assert!(p.iter().all(|p| peers.contains(p)), "{what}: {p:?}");
                assert!(i.iter().all(|i| images.contains(i)), "{what}: {i:?}");
            }
            drop(catalog);
            open(dir);
        }
        Err(e) => panic!("{what}: not repaired: {e}"),
    }
}

/// Copies the catalog's files to a new directory, modifying one of them.
fn damaged(from: &Path, file: &str, change: impl FnOnce(&mut Vec<u8>)) -> TempDir {
    let tmp = TempDir::new().unwrap();
    for name in ["catalog.db", "catalog.bak"] {
        fs::copy(from.join(name), tmp.path().join(name)).unwrap();
    }
    let path = tmp.path().join(file);
    let mut bytes = fs::read(&path).unwrap();
    change(&mut bytes);
    fs::write(&path, bytes).unwrap();
    tmp
}

#[test]
fn any_flipped_byte_is_noticed_or_harmless() {
    let tmp = TempDir::new().unwrap();
    let (peers, images) = filled(tmp.path());
    let seed = fastrand::u64(..);
    let mut rng = fastrand::Rng::with_seed(seed);
    for file in ["catalog.db", "catalog.bak"] {
        let len = fs::metadata(tmp.path().join(file)).unwrap().len() as usize;
        let header = (0..100).step_by(3);
        let anywhere: Vec<usize> = (0..60).map(|_| rng.usize(..len)).collect();
        for at in header.chain(anywhere) {
            let mask = rng.u8(1..);
            let copy = damaged(tmp.path(), file, |b| b[at] ^= mask);
            survives(
                copy.path(),
                &peers,
                &images,
                &format!("seed {seed}: {file} byte {at} ^ {mask:#x}"),
            );
        }
    }
}

#[test]
fn flips_in_both_copies_leave_only_true_rows() {
    let tmp = TempDir::new().unwrap();
    let (peers, images) = filled(tmp.path());
    let seed = fastrand::u64(..);
    let mut rng = fastrand::Rng::with_seed(seed);
    for round in 0..40 {
        let copy = damaged(tmp.path(), "catalog.db", |b| {
            for _ in 0..20 {
                let at = rng.usize(..b.len());
                b[at] ^= 0x55;
            }
        });
        let bak = copy.path().join("catalog.bak");
        let mut bytes = fs::read(&bak).unwrap();
        let at = rng.usize(..bytes.len());
        bytes.truncate(at);
        fs::write(&bak, bytes).unwrap();
        survives(
            copy.path(),
            &peers,
            &images,
            &format!("seed {seed}, round {round}"),
        );
    }
}

#[test]
fn truncation_and_lost_pages_are_repaired() {
    let tmp = TempDir::new().unwrap();
    let (peers, images) = filled(tmp.path());
    for len in [0usize, 1, 99, 100, 512, 4096, 4097, 8192, 16384] {
        let copy = damaged(tmp.path(), "catalog.db", |b| b.truncate(len));
        survives(copy.path(), &peers, &images, &format!("truncated to {len}"));
    }
    let pages = fs::metadata(tmp.path().join("catalog.db")).unwrap().len() as usize / 4096;
    for page in 0..pages {
        let copy = damaged(tmp.path(), "catalog.db", |b| {
            b[page * 4096..][..4096].fill(0)
        });
        survives(copy.path(), &peers, &images, &format!("page {page} zeroed"));
    }
    // Two pages swapped: all bytes are still there, in the wrong place.
    for page in 1..pages - 1 {
        let copy = damaged(tmp.path(), "catalog.db", |b| {
            let (a, z) = b.split_at_mut((page + 1) * 4096);
            a[page * 4096..].swap_with_slice(&mut z[..4096]);
        });
        survives(
            copy.path(),
            &peers,
            &images,
            &format!("pages {page} and the next swapped"),
        );
    }
}
