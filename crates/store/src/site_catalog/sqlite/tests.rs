//! The catalog in files: damage, spares, newer and older schemas.

use std::fs;
use std::path::Path;

use drover_index::ImageId;
use drover_net::PeerKey;
use tempfile::TempDir;

use super::*;
use crate::catalog::{Catalog, ImageRecord};
use crate::catalog_error::CatalogError;
use crate::grant::Grant;
use crate::site_catalog::rows::Peer;
use crate::site_catalog::tests::{self, image, peer};
use crate::site_catalog::{PairOutcome, SiteCatalog};

mod schema1;

fn open(dir: &Path) -> SiteCatalog {
    let (catalog, repairs) = SiteCatalog::open(dir).unwrap();
    assert_eq!(repairs, Vec::<String>::new());
    catalog
}

/// A catalog with some peers, tickets, images and settings.
fn filled(dir: &Path) -> (Vec<Peer>, Vec<ImageRecord>) {
    tests::filled(&open(dir))
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
