//! Who may replace an image is decided when that happens, and what else changes meanwhile is not lost.

use std::thread;
use std::time::Duration;

use super::*;
use crate::transfers::TransferState;

const A: PeerKey = PeerKey([3; 32]);
const B: PeerKey = PeerKey([4; 32]);

/// An image `a.raw` that `sender` sends.
fn by(sender: PeerKey, seed: u64) -> Sample {
    let mut sample = sample("a.raw", seed, 300_000);
    sample.opening.peer = sender;
    sample
}

fn name() -> ImageName {
    ImageName::new("a.raw").unwrap()
}

/// A site with the image 1 of A, whose record `change` has changed since the image 2 of B was whole. That gets the name at
/// the next start.
fn waiting(change: impl FnOnce(&mut ImageRecord)) -> Home {
    let home = Home::new();
    home.arrive(&by(A, 1), Until::Removal);
    let (site, _) = home.open();
    let record = site.by_name(&name()).unwrap();
    site.share(&record, B, true).unwrap();
    drop(site);
    home.arrive(&by(B, 2), Until::Rename);
    let mut record = home.catalog.by_name(&name()).unwrap().unwrap();
    change(&mut record);
    home.catalog.put(&record).unwrap();
    home
}

fn open_with_rights(home: &Home, rights: Rights) -> (Arc<Site>, Vec<String>) {
    let callbacks = Callbacks {
        holder: Arc::new(|_| None),
        rights: Arc::new(move |_| Ok(rights)),
        watcher: Arc::new(|_| ()),
    };
    Site::open_for(home.config(0), home.catalog.clone(), callbacks).unwrap()
}

#[test]
fn an_image_of_another_peer_is_not_replaced_unless_that_is_allowed_then() {
    let stopped = |record: &mut ImageRecord| record.shared.clear();
    let indexed = |record: &mut ImageRecord| record.external = true;
    let only_reads = Rights::of(&[Right::Read, Right::Write]);
    for (home, rights, why) in [
        (waiting(stopped), Rights::DEFAULT, "belongs to another peer"),
        (waiting(indexed), Rights::DEFAULT, "indexed in place"),
        (waiting(|_| ()), only_reads, "no longer send"),
        (waiting(|_| ()), Rights::NONE, "no longer send"),
    ] {
        let (site, repairs) = open_with_rights(&home, rights);
        assert!(repairs[0].contains(why), "{repairs:?}");
        let record = site.by_name(&name()).unwrap();
        assert_eq!(record.id, ImageId(1), "{repairs:?}");
        assert!(std::fs::read(&record.path).unwrap() == by(A, 1).bytes);
        // What B has sent can be resumed and removed.
        let listed = site.unfinished().unwrap();
        assert_eq!(listed[0].state, TransferState::Stopped, "{repairs:?}");
        site.remove_transfer(&key(&by(B, 2))).unwrap();
    }
}

#[test]
fn who_replaces_an_image_gets_it_unless_it_is_another_peers() {
    const C: PeerKey = PeerKey([5; 32]);
    let of = |owner| move |record: &mut ImageRecord| record.owner = owner;
    let own = |record: &mut ImageRecord| {
        (record.owner, record.from, record.shared) = (None, String::new(), Vec::new());
    };
    for (home, owner) in [
        (waiting(|_| ()), A),
        (waiting(of(Some(C))), C),
        (waiting(own), B),
    ] {
        let (site, repairs) = home.open();
        let record = site.by_name(&name()).unwrap();
        assert_eq!(record.id, ImageId(2), "{repairs:?}");
        assert_eq!(record.owner, Some(owner));
        // A catalog that is rebuilt from the maps gives the image to the same peer.
        let map = ImageMap::load(&site.images.map_path(record.id)).unwrap();
        assert_eq!(map.unwrap().0.owner, Some(owner));
    }
}

#[test]
fn sharing_changes_the_image_that_has_the_name_then() {
    let home = Home::new();
    home.arrive(&by(A, 1), Until::Removal);
    let (site, _) = home.open();
    let old = site.by_name(&name()).unwrap();
    let changing = site.changing.lock();
    let sharing = thread::spawn({
        let (site, old) = (site.clone(), old.clone());
        move || site.share(&old, B, true)
    });
    thread::sleep(Duration::from_millis(100));
    assert!(!sharing.is_finished());
    // As a delivery does.
    let new = ImageRecord {
        id: ImageId(2),
        ..old.clone()
    };
    site.images.put(&new).unwrap();
    drop(changing);
    sharing.join().unwrap().unwrap();
    let shared = ImageRecord {
        shared: vec![B],
        ..new.clone()
    };
    assert_eq!(site.list(), [shared]);
    assert_eq!(site.list(), home.catalog.images().unwrap());
    let of_another = ImageRecord {
        owner: Some(B),
        ..old.clone()
    };
    site.share(&of_another, B, false).unwrap_err();
    // Nor is it removed in the place of the other.
    let refused = site.remove_this(&old).unwrap_err();
    assert!(refused.to_string().contains("replaced"), "{refused}");
    assert!(old.path.exists());
    // One is forgotten.
    assert_eq!(site.share_only(&|key| *key != A).unwrap(), 0);
    assert_eq!(site.share_only(&|key| *key != B).unwrap(), 1);
    assert_eq!(home.catalog.images().unwrap(), [new]);
}
