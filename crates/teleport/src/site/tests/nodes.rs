//! What a node takes over from one that was taken for dead, and may wake.

use std::path::Path;

use drover_store::profile::{FirstRead, Profile};

use super::*;
use crate::site::nodes::{copy, copy_files};
use crate::transfer::{close, keep_profile};
use crate::{NotHeld, Others, Shared};

mod flocks;

/// Nodes that grant each other everything: what counts is what the directory of images lets them do.
struct Granting;

impl Others for Granting {
    fn hold(&self, _: &ImageName, _: &str) -> Result<(), NotHeld> {
        Ok(())
    }
    fn free(&self, _: &ImageName) {}
    fn lock(&self, _: &ImageName, _: bool) -> Result<(), NotHeld> {
        Ok(())
    }
    fn unlock(&self, _: &ImageName) {}
    fn name(&self) -> String {
        "a".into()
    }
    fn receiving(&self) -> Vec<String> {
        Vec::new()
    }
    fn may_begin(&self) -> bool {
        true
    }
}

impl Home {
    /// Opens the site as one of its nodes.
    fn node(&self, token: &str) -> Arc<Site> {
        let config = SiteConfig {
            work_dir: self.path("nodes").join(token),
            state_dir: self.path("state").join(token),
            shared: Some(Shared {
                maps_dir: self.path("maps"),
                work_dirs: self.path("nodes"),
                others: Arc::new(Granting),
            }),
            ..self.config(0)
        };
        std::fs::create_dir_all(self.path("nodes")).unwrap();
        std::fs::create_dir_all(self.path("state")).unwrap();
        Site::open(config, self.catalog.clone()).unwrap().0
    }

    /// A node is taken for dead; returns where the transfer of the sample is then.
    fn fence(&self, token: &str, sample: &Sample) -> PathBuf {
        let fenced = self.path("nodes").join(format!("{token}.fenced"));
        std::fs::rename(self.path("nodes").join(token), &fenced).unwrap();
        fenced.join("transfers").join(key(sample))
    }
}

/// A complete file at a node, about to get its name.
fn whole(site: &Site, sample: &Sample, added_unix: i64) -> Arrived {
    let dir = site.transfer_dir(&key(sample));
    let mut transfer = sample.arrived(&dir);
    let mut blocks = BlockMap::default();
    sample.batches.iter().for_each(|b| blocks.push(&b.data));
    let mut arrived = Arrived {
        dir,
        opening: sample.opening.clone(),
        layout: sample.layout.clone(),
        blocks: Arc::new(blocks),
        closing: Closing {
            digest: sample.digest,
            added_unix,
        },
        mapped: None,
    };
    site.save_map(&mut arrived).unwrap();
    arrived.log(&mut transfer.log).unwrap();
    arrived
}

fn copy_all(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
}

fn check_is(home: &Home, sample: &Sample) {
    let name = &sample.opening.offer.name;
    let record = home.catalog.by_name(name).unwrap().unwrap();
    assert_eq!(record.id, ImageId(sample.opening.image));
    assert!(std::fs::read(home.path("images").join(name.as_str())).unwrap() == sample.bytes);
}

/// The clock of the node that died was an hour ahead, and the one that takes over has not heard of the newer image.
#[test]
fn what_is_taken_over_late_replaces_no_newer_image() {
    for heard in [false, true] {
        let home = Home::new();
        let (old, new) = (sample("a.raw", 1, 2_500_001), sample("a.raw", 2, 3_000_000));
        let one = home.node("one");
        whole(&one, &old, 3605);
        let from = home.fence("one", &old);
        // Nobody sees it before the newer one is there.
        std::fs::rename(&from, home.path("aside")).unwrap();
        let two = home.node("two");
        let three = home.node("three");
        assert!(three.settle(&whole(&three, &new, 5), None).unwrap());
        std::fs::rename(home.path("aside"), &from).unwrap();
        if heard {
            two.refresh().unwrap();
        }
        let done = two.take_over().unwrap();
        assert_eq!(done.len(), 1, "{done:?}");
        assert!(done[0].contains("newer image"), "{done:?}");
        check_is(&home, &new);
        let listed = two.unfinished().unwrap();
        assert_eq!(listed[0].state, crate::transfers::TransferState::Stopped);
    }
}

/// The node that took it over was cut off before it had removed what it had copied.
#[test]
fn an_image_that_was_removed_is_not_taken_over_once_more() {
    let home = Home::new();
    let sample = sample("a.raw", 1, 2_500_001);
    let one = home.node("one");
    let arrived = whole(&one, &sample, 5);
    let from = home.fence("one", &sample);
    let kept = home.path("kept");
    copy_all(&from, &kept);
    let two = home.node("two");
    check_is(&home, &sample);
    two.remove(&sample.opening.offer.name).unwrap();
    // As if it had been both here and there.
    copy_all(&kept, &from);
    let dir = two.transfer_dir(&key(&sample));
    copy_all(&kept, &dir);
    let again = Arrived {
        dir,
        mapped: None,
        ..arrived
    };
    assert!(two.settle(&again, None).unwrap());
    check_is(&home, &sample);
    assert!(!from.exists());
    two.remove(&sample.opening.offer.name).unwrap();
    assert_eq!(two.take_over().unwrap(), [""; 0]);
    drop(two);
    home.node("two");
    assert_eq!(home.catalog.images().unwrap(), []);
}

/// The node wakes while its partial file is copied, writes the rest, and logs that it is complete.
#[test]
fn a_file_that_is_finished_while_it_is_copied_is_not_taken_for_complete() {
    let home = Home::new();
    let sample = sample("a.raw", 1, 2_500_001);
    let one = home.node("one");
    let dir = one.transfer_dir(&key(&sample));
    drop(sample.arrived(&dir));
    let from = home.fence("one", &sample);
    let new = home.path("new");
    std::fs::create_dir(&new).unwrap();
    let wakes = |part: &Path, to: &Path| -> std::io::Result<()> {
        copy(part, to)?;
        if part.ends_with("image.part") {
            let closing = Closing {
                digest: sample.digest,
                added_unix: 5,
            };
            close(&from, 1, &closing, &crate::transfer::tests::disk()).unwrap();
        }
        Ok(())
    };
    copy_files(&from, &new, wakes).unwrap();
    assert!(crate::log::is_closed(&from.join("log")));
    assert!(!crate::log::is_closed(&new.join("log")));
}

/// The node died while it undid a rename that the catalog had refused.
#[test]
fn the_file_that_was_replaced_and_the_profile_are_taken_over() {
    let home = Home::new();
    let (old, new) = (sample("a.raw", 1, 3_000_000), sample("a.raw", 2, 2_500_001));
    let one = home.node("one");
    assert!(one.settle(&whole(&one, &old, 5), None).unwrap());
    let arrived = whole(&one, &new, 6);
    let reads = [0, 1].map(|block| FirstRead { block, at_ms: 1 });
    let profile = Profile::of_boot(&new.bytes, &reads).unwrap();
    keep_profile(&arrived.dir, Some(&profile)).unwrap();
    let target = home.path("images/a.raw");
    std::fs::hard_link(&target, arrived.dir.join("replaced")).unwrap();
    std::fs::rename(arrived.part(), &target).unwrap();
    std::fs::hard_link(&target, arrived.part()).unwrap();
    home.fence("one", &new);
    home.catalog.1.store(true, Ordering::Relaxed);
    let two = home.node("two");
    check_is(&home, &old);
    drop(two);
    home.catalog.1.store(false, Ordering::Relaxed);
    let two = home.node("two");
    check_is(&home, &new);
    let kept = two.images.profiles().load(ImageId(2)).unwrap();
    assert_eq!(kept, Some(profile));
}

/// The node wakes after it had locked the name, before or after another one has taken its transfer over.
#[test]
fn a_node_that_wakes_while_it_delivers_removes_nothing() {
    for taken in [false, true] {
        let home = Home::new();
        let sample = sample("a.raw", 1, 2_500_001);
        let one = home.node("one");
        let arrived = whole(&one, &sample, 5);
        let two = home.node("two");
        let mut from = home.fence("one", &sample);
        if taken {
            let own = two.transfer_dir(&key(&sample));
            std::fs::rename(&from, &own).unwrap();
            from = own;
        }
        let delivered = one.settle(&arrived, None);
        assert!(delivered.is_err() || !delivered.unwrap());
        assert!(from.join("image.part").exists());
        assert!(two.images.map_path(ImageId(1)).exists());
        drop(two);
        home.node("two");
        check_is(&home, &sample);
    }
}
