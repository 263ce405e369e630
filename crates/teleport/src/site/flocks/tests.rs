//! An atomic flock gets all of its names or none, wherever the site stops; and which flocks are remembered.

use drover_core::Digest;

use super::*;
use crate::flock::record::flocks_dir;
use crate::services::FlockItem;
use crate::site::tests::Home;
use crate::transfer::tests::{Sample, sample};
use crate::transfer::transfer_key;
use crate::transfers::TransferState;

const PEER: PeerKey = PeerKey([3; 32]);
const ID: [u8; 16] = [9; 16];

fn name(text: &str) -> ImageName {
    ImageName::new(text).unwrap()
}

fn order(flock: &str, id: [u8; 16], atomic: bool, images: &[&str]) -> OpenFlock {
    let item = |image: &&str| FlockItem {
        name: name(image),
        unchanged: None,
    };
    OpenFlock {
        name: name(flock),
        id,
        atomic,
        images: images.iter().map(item).collect(),
    }
}

fn end(id: [u8; 16]) -> EndFlock {
    EndFlock {
        id,
        failed: Vec::new(),
        why: String::new(),
    }
}

/// Three images, of which `b.raw` replaces one that was delivered before.
fn samples() -> (Sample, [Sample; 3]) {
    let old = sample("b.raw", 1, 300_000);
    let new = [("a.raw", 11), ("b.raw", 12), ("c.raw", 13)];
    (old, new.map(|(name, seed)| sample(name, seed, 3_000_000)))
}

/// All images of an atomic flock have arrived.
fn arrived(home: &Home, new: &[Sample]) -> (Arc<Site>, Arc<Flock>) {
    let (site, _) = home.open();
    let order = order("shop", ID, true, &["a.raw", "b.raw", "c.raw"]);
    site.open_flock(&PEER, "lyon", order.clone()).unwrap();
    // Its reply may have been lost.
    site.open_flock(&PEER, "lyon", order).unwrap();
    let flock = site.flock_of(&PEER, &ID).unwrap();
    for sample in new {
        let offer = &sample.opening.offer;
        let dir = site.transfer_dir(&transfer_key(&PEER, &offer.name));
        site.flock_transfer_begins(Some(&flock), &PEER, offer)
            .unwrap();
        let id = ImageId(sample.opening.image);
        site.flock_image_begins(&flock, offer, id).unwrap();
        drop(sample.arrived(&dir));
        let delivered = Delivered {
            digest: sample.digest,
            sent_blocks: 700,
            ..Delivered::default()
        };
        let state = ImageState::Arrived;
        site.flock_image_done(&flock, &offer.name, offer.file_bytes, state, &delivered)
            .unwrap();
    }
    (site, flock)
}

fn digests(site: &Site) -> Vec<(String, Digest)> {
    let mut all: Vec<_> = site
        .list()
        .into_iter()
        .map(|image| (image.name.to_string(), image.digest))
        .collect();
    all.sort();
    all
}

#[test]
fn all_names_or_none_wherever_it_stops() {
    let (old, new) = samples();
    let before = vec![("b.raw".to_owned(), old.digest)];
    let after: Vec<_> = new
        .iter()
        .map(|s| (s.opening.offer.name.to_string(), s.digest))
        .collect();
    let mut decided = Vec::new();
    for steps in 0.. {
        let home = Home::new();
        home.deliver(&old);
        let (site, flock) = arrived(&home, &new);
        let mut record = site.flocks.record(&flock).unwrap();
        let mut left = steps;
        let stopped = site.name_all(&flock, &mut record, || {
            left -= 1;
            left >= 0
        });
        // As a kill leaves it: nothing is closed.
        drop((site, flock));
        let (site, repairs) = home.open();
        let found = digests(&site);
        let record = site.flocks().remove(0).record;
        match record.state {
            FlockState::Open => {
                assert_eq!(found, before, "after {steps} steps: {repairs:?}");
                let unfinished = site.unfinished().unwrap();
                let waits = |t: &crate::Unfinished| t.state == TransferState::Stopped;
                assert!(unfinished.len() == 3 && unfinished.iter().all(waits));
                // The source says it again, to the site that was started anew.
                let info = site.end_flock(&PEER, &end(ID)).unwrap();
                assert_eq!(info.record.state, FlockState::Delivered);
                assert_eq!(digests(&site), after);
            }
            FlockState::Delivered => {
                assert_eq!(found, after, "after {steps} steps: {repairs:?}");
                assert!(
                    record
                        .images
                        .iter()
                        .all(|i| i.state == ImageState::Delivered)
                );
            }
            other => panic!("{other:?} after {steps} steps: {record:?}"),
        }
        assert!(site.unfinished().unwrap().is_empty());
        for sample in &new {
            let path = site
                .config
                .images_dir
                .join(sample.opening.offer.name.as_str());
            assert!(std::fs::read(path).unwrap() == sample.bytes);
        }
        let again = site.end_flock(&PEER, &end(ID)).unwrap();
        assert_eq!(again.record.state, FlockState::Delivered);
        decided.push(record.state);
        if stopped.is_ok() {
            break;
        }
    }
    // Before the decision, and after it before each log, before each name, and before the end.
    assert_eq!(decided.len(), 9);
    assert_eq!(decided[0], FlockState::Open);
    assert!(decided[1..].iter().all(|s| *s == FlockState::Delivered));
}

#[test]
fn what_has_changed_meanwhile_keeps_all_of_it_back() {
    let (old, new) = samples();
    let home = Home::new();
    home.deliver(&old);
    let (site, flock) = arrived(&home, &new);
    let offer = &new[1].opening.offer;
    // Its transfer goes on: it is no longer complete.
    site.flock_transfer_begins(None, &PEER, offer).unwrap();
    let info = site.end_flock(&PEER, &end(ID)).unwrap();
    assert_eq!(info.record.state, FlockState::Failed);
    assert!(info.record.why.contains("b.raw"), "{}", info.record.why);
    assert_eq!(digests(&site), [("b.raw".to_owned(), old.digest)]);
    assert_eq!(site.unfinished().unwrap().len(), 3);
    drop((site, flock));

    for what in ["removed", "held", "a file of that name"] {
        let home = Home::new();
        home.deliver(&old);
        let (site, _flock) = arrived(&home, &new);
        match what {
            "removed" => {
                let key = transfer_key(&PEER, &name("a.raw"));
                site.remove_transfer(&key).unwrap();
            }
            "held" => site.hold_by(Arc::new(|image| {
                (image.as_str() == "b.raw").then(|| "b.raw is mounted".into())
            })),
            _ => std::fs::write(site.config.images_dir.join("c.raw"), "not ours").unwrap(),
        }
        let e = site.end_flock(&PEER, &end(ID)).unwrap_err().to_string();
        assert!(e.contains(".raw"), "{what}: {e}");
        assert_eq!(digests(&site), [("b.raw".to_owned(), old.digest)], "{what}");
    }
}

#[test]
fn flocks_are_refused_that_cannot_be() {
    let (site, _) = Home::new().open();
    let open = |order: OpenFlock| site.open_flock(&PEER, "lyon", order);
    let says = |order: OpenFlock, why: &str| {
        let e = open(order).unwrap_err().to_string();
        assert!(e.contains(why), "{e}");
    };
    says(order("x", ID, false, &[]), "1 to 256 images");
    says(
        order("x", ID, false, &["a", "b", "a"]),
        "two images of the name a",
    );
    let mut gone = order("x", ID, false, &["a"]);
    gone.images[0].unchanged = Some(Digest([1; 32]));
    says(gone, "has changed at the destination");
    assert!(site.flock_of(&PEER, &ID).is_none());
    open(order("x", ID, false, &["a"])).unwrap();
    assert!(
        site.flock_of(&PeerKey([4; 32]), &ID).is_none(),
        "another peer's"
    );
    assert!(site.end_flock(&PeerKey([4; 32]), &end(ID)).is_err());
    // Another sending of the same flock takes its place.
    let flock = site.flock_of(&PEER, &ID).unwrap();
    open(order("x", [8; 16], false, &["a"])).unwrap();
    assert!(site.flock_of(&PEER, &ID).is_none());
    let delivered = Delivered::default();
    let late = site.flock_image_done(&flock, &name("a"), 1, ImageState::Delivered, &delivered);
    assert!(late.unwrap_err().to_string().contains("sent again"));
    assert_eq!(site.flocks().len(), 1);
}

#[test]
fn a_peer_that_sends_many_flocks_loses_its_oldest() {
    let home = Home::new();
    let (site, _) = home.open();
    let number = |n: usize| [n as u8; 16];
    for n in 0..MAX_PEER_FLOCKS + 3 {
        let order = order(&format!("flock-{n:03}"), number(n), false, &["a"]);
        site.open_flock(&PEER, "lyon", order).unwrap();
    }
    let other = order("other", number(200), false, &["a"]);
    site.open_flock(&PeerKey([4; 32]), "nice", other).unwrap();
    assert_eq!(site.flocks().len(), MAX_PEER_FLOCKS + 1);
    let newest = site.flock_of(&PEER, &number(MAX_PEER_FLOCKS + 2));
    assert!(newest.is_some() && site.flock_of(&PeerKey([4; 32]), &number(200)).is_some());
    drop(site);
    // They survive a restart, but a damaged one.
    let dir = flocks_dir(&home.open().0.config.work_dir);
    let one = std::fs::read_dir(&dir).unwrap().next().unwrap().unwrap();
    std::fs::write(one.path(), "damaged").unwrap();
    let (site, repairs) = home.open();
    assert!(repairs.iter().any(|r| r.contains("flock")), "{repairs:?}");
    assert_eq!(site.flocks().len(), MAX_PEER_FLOCKS);
    site.expire_flocks(Duration::from_secs(1000)).unwrap();
    assert_eq!(site.flocks().len(), MAX_PEER_FLOCKS);
    std::thread::sleep(Duration::from_millis(1100));
    site.expire_flocks(Duration::ZERO).unwrap();
    assert!(site.flocks().is_empty());
    assert_eq!(std::fs::read_dir(dir).unwrap().count(), 0);
}
