//! The record of a flock that several nodes receive: what one has changed is learnt by the others, and none puts back an older one.

use std::sync::atomic::AtomicBool;

use drover_core::CompactIndex;

use super::*;
use crate::flock::live::Flock;
use crate::flock::{FlockState, ImageState};
use crate::protocol::Delivered;
use crate::services::{EndFlock, FlockItem, OpenFlock};
use crate::site::Found;

const ID: [u8; 16] = [9; 16];
const PEER: PeerKey = PeerKey([3; 32]);
const NAMES: [&str; 3] = ["a.raw", "b.raw", "c.raw"];

fn order(flock: &str, id: [u8; 16], atomic: bool) -> OpenFlock {
    let item = |name: &str| FlockItem {
        name: ImageName::new(name).unwrap(),
        unchanged: None,
    };
    OpenFlock {
        name: ImageName::new(flock).unwrap(),
        id,
        atomic,
        images: NAMES.map(item).into(),
    }
}

/// Both nodes of a site, to one of which a flock is sent; and the flock there.
fn begun(home: &Home) -> ([Arc<Site>; 2], Arc<Flock>, [Sample; 3]) {
    let nodes = ["one", "two"].map(|token| home.node(token));
    nodes[0]
        .open_flock(&PEER, "lyon", order("shop", ID, false))
        .unwrap();
    let flock = nodes[0].flock_of(&PEER, &ID).unwrap();
    let mut seed = 10;
    let samples = NAMES.map(|name| {
        seed += 1;
        sample(name, seed, 300_000)
    });
    (nodes, flock, samples)
}

fn begin(site: &Site, flock: &Flock, sample: &Sample) -> ImageId {
    let id = ImageId(sample.opening.image);
    site.flock_image_begins(flock, &sample.opening.offer, id)
        .unwrap();
    id
}

fn done(site: &Site, flock: &Flock, sample: &Sample, state: ImageState) {
    let (offer, delivered) = (&sample.opening.offer, Delivered::default());
    site.flock_image_done(flock, &offer.name, offer.file_bytes, state, &delivered)
        .unwrap();
}

fn states(site: &Site) -> Vec<ImageState> {
    let known = site.flocks().remove(0).record;
    known.images.iter().map(|image| image.state).collect()
}

#[test]
fn what_a_node_changes_is_learnt_by_the_others() {
    let home = Home::new();
    let ([one, two], flock, samples) = begun(&home);
    // The other has heard of nothing yet.
    assert_eq!(two.flocks().len(), 1);
    let there = two.flock_of(&PEER, &ID).unwrap();
    let id = begin(&one, &flock, &samples[0]);
    assert!(!there.has(id));
    two.reread_flocks().unwrap();
    assert!(there.has(id), "its blocks are those of the flock");
    done(&one, &flock, &samples[0], ImageState::Delivered);
    begin(&two, &there, &samples[1]);
    done(&two, &there, &samples[1], ImageState::Failed);
    let expected = [
        ImageState::Delivered,
        ImageState::Failed,
        ImageState::Waiting,
    ];
    assert_eq!(
        (states(&one), states(&two)),
        (expected.into(), expected.into())
    );
    // A new sending takes its place at both.
    two.open_flock(&PEER, "lyon", order("shop", [8; 16], false))
        .unwrap();
    one.reread_flocks().unwrap();
    assert!(one.flock_of(&PEER, &ID).is_none() && one.flock_of(&PEER, &[8; 16]).is_some());
    assert_eq!(states(&one), [ImageState::Waiting; 3]);
    // Its end at one is that at the other, and so is that it is forgotten. An atomic one is of its node alone.
    one.open_flock(&PEER, "lyon", order("atomic", [7; 16], true))
        .unwrap();
    let end = EndFlock {
        id: [8; 16],
        failed: Vec::new(),
        why: String::new(),
    };
    one.end_flock(&PEER, &end).unwrap();
    let of =
        |site: &Site| Vec::from_iter(site.flocks().into_iter().map(|known| known.record.state));
    assert_eq!(of(&two), [FlockState::Failed]);
    assert!(two.flock_of(&PEER, &[8; 16]).is_none());
    let shared = home.path("nodes").join("shared").join("flocks");
    let records = std::fs::read_dir(&shared).unwrap();
    records.for_each(|record| std::fs::remove_file(record.unwrap().path()).unwrap());
    assert_eq!((of(&two).len(), of(&one)), (0, vec![FlockState::Open]));
}

/// A node reads all records again while it and another one change one: nothing that was changed is lost.
#[test]
fn no_node_puts_back_an_older_record() {
    let home = Home::new();
    let ([one, two], flock, samples) = begun(&home);
    let there = two.flock_of(&PEER, &ID).unwrap();
    let ends = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for site in [&one, &two] {
            scope.spawn(|| {
                while !ends.load(Ordering::Relaxed) {
                    site.reread_flocks().unwrap();
                }
            });
        }
        let change = |site: &Site, flock: &Flock, sample: &Sample| {
            for _ in 0..15 {
                begin(site, flock, sample);
                done(site, flock, sample, ImageState::Delivered);
                let known = site.flocks.record(flock).unwrap();
                let mut own = known.images.iter();
                let own = own.find(|i| i.name == sample.opening.offer.name).unwrap();
                assert_eq!(own.state, ImageState::Delivered);
            }
        };
        // The nodes take turns at the record; within one, threads do.
        let both = [(&one, &flock, &samples[0]), (&one, &flock, &samples[1])];
        let threads =
            both.map(|(site, flock, sample)| scope.spawn(move || change(site, flock, sample)));
        threads
            .into_iter()
            .for_each(|thread| thread.join().unwrap());
        change(&two, &there, &samples[2]);
        ends.store(true, Ordering::Relaxed);
    });
    for site in [&one, &two] {
        assert_eq!(states(site), [ImageState::Delivered; 3]);
    }
}

/// Blocks of an image that no node receives at the moment are waited for, since another one takes it over; not those of one that is given up.
#[test]
fn blocks_of_an_image_that_is_taken_over_are_waited_for() {
    let home = Home::new();
    let ([one, two], flock, samples) = begun(&home);
    let ids = [0, 1, 2].map(|n| begin(&one, &flock, &samples[n]));
    two.reread_flocks().unwrap();
    let there = two.flock_of(&PEER, &ID).unwrap();
    let look = |image: ImageId| {
        let run = (image, CompactIndex(0), 5);
        two.look_elsewhere(&there, &[run]).remove(&run).unwrap()
    };
    assert_eq!(look(ids[0]), Found::Coming);
    for sample in &samples[1..] {
        let name = &sample.opening.offer.name;
        one.flock_image_given_up(&flock, name);
    }
    begin(&one, &flock, &samples[2]);
    done(&one, &flock, &samples[2], ImageState::Delivered);
    one.flock_image_given_up(&flock, &samples[2].opening.offer.name);
    std::thread::sleep(Duration::from_millis(1100));
    assert_eq!(look(ids[0]), Found::Coming);
    assert_eq!(look(ids[1]), Found::Gone);
    // Its record is read before the catalog says so.
    assert_eq!(look(ids[2]), Found::Coming);
    // Of another image nothing is known.
    assert_eq!(look(ImageId(999)), Found::Gone);
    // What has been sent again is another flock.
    one.open_flock(&PEER, "lyon", order("shop", [8; 16], false))
        .unwrap();
    std::thread::sleep(Duration::from_millis(1100));
    assert_eq!(look(ids[0]), Found::Gone);
}
