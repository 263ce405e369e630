//! A site that stopped at any point of a delivery recovers when it opens again.

mod names;
mod nodes;
mod owners;

use std::collections::HashMap;

use drover_core::CompactIndex;
use drover_net::Right;
use drover_store::sequences::From;
use drover_store::{BlockMap, CatalogError, ImageMap};

use super::*;
use crate::files;
use crate::log::RecordKind;
use crate::transfer::tests::{Sample, sample};
use crate::transfer::{Closing, transfer_key};

/// The origin of images that no peer sent.
const MADE_HERE: Origin<'static> = Origin {
    from: "",
    owner: None,
};

fn key(sample: &Sample) -> String {
    transfer_key(&sample.opening.peer, &sample.opening.offer.name)
}

/// A catalog that outlives its site.
#[derive(Default)]
pub(crate) struct Memory(Mutex<(u64, HashMap<ImageName, ImageRecord>)>, AtomicBool);

impl Catalog for Memory {
    fn new_image_id(&self) -> Result<ImageId, CatalogError> {
        let mut state = self.0.lock();
        state.0 += 1;
        Ok(ImageId(state.0 + 1000))
    }
    fn images(&self) -> Result<Vec<ImageRecord>, CatalogError> {
        Ok(self.0.lock().1.values().cloned().collect())
    }
    fn by_name(&self, name: &ImageName) -> Result<Option<ImageRecord>, CatalogError> {
        Ok(self.0.lock().1.get(name).cloned())
    }
    fn put(&self, record: &ImageRecord) -> Result<Option<ImageRecord>, CatalogError> {
        if self.1.load(Ordering::Relaxed) {
            return Err(CatalogError::Conflict(
                "the catalog is on a full disk".into(),
            ));
        }
        let mut state = self.0.lock();
        Ok(state.1.insert(record.name.clone(), record.clone()))
    }
    fn remove(&self, name: &ImageName) -> Result<Option<ImageRecord>, CatalogError> {
        Ok(self.0.lock().1.remove(name))
    }
}

pub(crate) struct Home {
    dir: tempfile::TempDir,
    catalog: Arc<Memory>,
}

impl Home {
    pub(crate) fn new() -> Self {
        Home {
            dir: tempfile::tempdir().unwrap(),
            catalog: Arc::default(),
        }
    }

    fn path(&self, below: &str) -> PathBuf {
        self.dir.path().join(below)
    }

    pub(crate) fn open(&self) -> (Arc<Site>, Vec<String>) {
        self.open_with(0)
    }

    fn open_with(&self, reserve_bytes: u64) -> (Arc<Site>, Vec<String>) {
        let (site, mut repairs) =
            Site::open(self.config(reserve_bytes), self.catalog.clone()).unwrap();
        // Images delivered here were not matched, so they have no hash files.
        repairs.retain(|r| !r.contains("its hash file"));
        (site, repairs)
    }

    fn config(&self, reserve_bytes: u64) -> SiteConfig {
        SiteConfig {
            images_dir: self.path("images"),
            work_dir: self.path("work"),
            state_dir: self.path("state"),
            teleporter: None,
            reserve_bytes,
            supplies: Supplies::new(1),
            sequence_data_bytes: drover_store::sequences::SEQUENCE_DATA_BYTES,
            image_mode: 0o600,
            disk: Arc::new(drover_storage::HostDisk),
            shared: None,
        }
    }

    /// Delivers an image.
    pub(crate) fn deliver(&self, sample: &Sample) {
        self.arrive(sample, Until::Rename);
        self.open();
    }

    /// Brings a transfer to the point where its file is complete and `until` is the next step.
    fn arrive(&self, sample: &Sample, until: Until) {
        let (site, _) = self.open();
        let dir = site.transfer_dir(&key(sample));
        let mut transfer = sample.arrived(&dir);
        let mut blocks = BlockMap::default();
        sample.batches.iter().for_each(|b| blocks.push(&b.data));
        let mut arrived = Arrived {
            dir: dir.clone(),
            opening: sample.opening.clone(),
            layout: sample.layout.clone(),
            blocks: Arc::new(blocks),
            closing: Closing {
                digest: sample.digest,
                added_unix: 5,
            },
            mapped: None,
        };
        site.save_map(&mut arrived).unwrap();
        if until == Until::Closing {
            return;
        }
        arrived.log(&mut transfer.log).unwrap();
        let kept = std::fs::read(dir.join("log")).unwrap();
        let target = site
            .config
            .images_dir
            .join(sample.opening.offer.name.as_str());
        match until {
            Until::Closing | Until::Rename => {}
            Until::Catalog => std::fs::rename(dir.join("image.part"), target).unwrap(),
            Until::Removal => {
                site.settle(&arrived, None).unwrap();
                std::fs::create_dir(&dir).unwrap();
                std::fs::write(dir.join("log"), kept).unwrap();
            }
        }
    }
}

/// The step of a delivery before which the site stops.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Until {
    /// The map is written; the log does not have the closing record yet.
    Closing,
    Rename,
    Catalog,
    /// Removal of the transfer's directory.
    Removal,
}

fn check_delivered(home: &Home, site: &Site, sample: &Sample, about: &str) {
    let name = &sample.opening.offer.name;
    let record = site.images.by_name(name).expect(about);
    assert_eq!(record.id, ImageId(sample.opening.image), "{about}");
    assert_eq!(record.owner, Some(sample.opening.peer), "{about}");
    assert_eq!(home.catalog.by_name(name).unwrap().unwrap(), record);
    assert!(
        std::fs::read(&record.path).unwrap() == sample.bytes,
        "{about}"
    );
    let (expected, found) = site.verify(name, &mut |_, _| {}).unwrap();
    assert_eq!((expected, found), (sample.digest, sample.digest), "{about}");
    // Its blocks can be reused.
    let image = site.images.open_image(record.id).expect(about);
    let blocks: u64 = sample.batches.iter().map(|b| b.data.count()).sum();
    assert_eq!(image.map.blocks.data_blocks(), blocks, "{about}");
    let maps: Vec<_> = std::fs::read_dir(home.path("state/maps"))
        .unwrap()
        .collect();
    assert_eq!(maps.len(), 1, "{about}: {maps:?}");
    let left: Vec<_> = std::fs::read_dir(home.path("work/transfers"))
        .unwrap()
        .collect();
    assert!(left.is_empty(), "{about}: {left:?}");
}

#[test]
fn a_delivery_cut_off_at_any_step_is_finished_when_the_site_opens() {
    for replaces in [false, true] {
        for until in [Until::Rename, Until::Catalog, Until::Removal] {
            let about = format!("{until:?}, replaces: {replaces}");
            let home = Home::new();
            if replaces {
                home.arrive(&sample("a.raw", 1, 3_000_000), Until::Removal);
                let (site, _) = home.open();
                check_delivered(&home, &site, &sample("a.raw", 1, 3_000_000), &about);
            }
            let new = sample("a.raw", 2, 2_500_001);
            home.arrive(&new, until);
            let (site, repairs) = home.open();
            check_delivered(&home, &site, &new, &about);
            assert_eq!(repairs.len(), 1, "{about}: {repairs:?}");
            assert!(repairs[0].starts_with("a.raw: was whole"), "{repairs:?}");
            drop(site);
            let (site, repairs) = home.open();
            check_delivered(&home, &site, &new, &about);
            assert_eq!(repairs, [""; 0], "{about}");
        }
    }
}

/// The rename failed while the site kept running, and another image took the name before the next start.
#[test]
fn what_took_the_name_since_is_not_replaced_at_the_start() {
    let home = Home::new();
    let old = sample("a.raw", 1, 2_500_001);
    home.arrive(&old, Until::Rename);
    let transfers = home.path("work/transfers");
    let aside = home.path("aside");
    std::fs::rename(transfers.join(key(&old)), &aside).unwrap();
    let mut new = sample("a.raw", 2, 3_000_000);
    new.opening.peer = drover_net::PeerKey([4; 32]);
    home.arrive(&new, Until::Removal);
    drop(home.open());
    std::fs::rename(&aside, transfers.join(key(&old))).unwrap();
    for start in 0..2 {
        let (site, repairs) = home.open();
        let record = site.images.by_name(&new.opening.offer.name).unwrap();
        assert_eq!(record.id, ImageId(2), "{repairs:?}");
        assert!(std::fs::read(&record.path).unwrap() == new.bytes);
        assert_eq!(repairs.len(), 1 - start, "{repairs:?}");
        assert!(repairs.iter().all(|r| r.contains("newer image")));
        // It can be resumed and removed, and its blocks can be reused meanwhile.
        assert!(site.partials.knows(ImageId(1)));
        assert!(!site.images.map_path(ImageId(1)).exists());
        let listed = site.unfinished().unwrap();
        assert_eq!(listed[0].state, crate::transfers::TransferState::Stopped);
    }
    home.open().0.remove_transfer(&key(&old)).unwrap();
}

#[test]
fn an_image_that_is_held_is_not_replaced_at_the_start() {
    let home = Home::new();
    let old = sample("a.raw", 1, 3_000_000);
    home.arrive(&old, Until::Removal);
    drop(home.open());
    let new = sample("a.raw", 2, 2_500_001);
    // `arrive` opens the site before the transfer exists.
    home.arrive(&new, Until::Rename);
    let told: Arc<Mutex<Vec<String>>> = Arc::default();
    let tells = told.clone();
    let callbacks = |holder: Arc<Holder>| {
        let tells = tells.clone();
        Callbacks {
            holder,
            rights: Arc::new(|_| Ok(Rights::DEFAULT)),
            watcher: Arc::new(move |event| {
                assert!(matches!(event.what, SendStep::Delivered), "{event:?}");
                tells.lock().push(event.image.to_string());
            }),
        }
    };
    for _ in 0..2 {
        let held: Arc<Holder> = Arc::new(|name| Some(format!("{name} is mounted by lyon")));
        let opened = Site::open_for(home.config(0), home.catalog.clone(), callbacks(held));
        let (site, repairs) = opened.unwrap();
        let said = |r: &String| r.contains("mounted by lyon");
        assert_eq!(repairs.iter().filter(|r| said(r)).count(), 1, "{repairs:?}");
        let record = site.images.by_name(&old.opening.offer.name).unwrap();
        assert_eq!(record.id, ImageId(1));
        assert!(std::fs::read(&record.path).unwrap() == old.bytes);
        assert!(site.partials.knows(ImageId(2)));
        let listed = site.unfinished().unwrap();
        assert_eq!(listed[0].state, crate::transfers::TransferState::Whole);
        assert!(site.check_held(&record.name, "it").is_err());
    }
    assert!(told.lock().is_empty());
    let free = callbacks(Arc::new(|_| None));
    let (site, repairs) = Site::open_for(home.config(0), home.catalog.clone(), free).unwrap();
    let delivered = repairs.iter().filter(|r| r.contains("delivered now"));
    assert_eq!(delivered.count(), 1, "{repairs:?}");
    check_delivered(&home, &site, &new, "held no more");
    assert_eq!(*told.lock(), ["a.raw"], "what was delivered at last");
}

/// Wherever the site stops while it restores the previous file: the named file matches the catalog.
#[test]
fn a_catalog_that_fails_leaves_the_image_before_whatever_was_cut_off() {
    for cut in ["nothing", "keeping", "undoing"] {
        let home = Home::new();
        let old = sample("a.raw", 1, 3_000_000);
        home.arrive(&old, Until::Removal);
        drop(home.open());
        let new = sample("a.raw", 2, 2_500_001);
        home.arrive(&new, Until::Rename);
        let dir = home.path("work/transfers").join(key(&new));
        let (part, aside) = (dir.join("image.part"), dir.join("replaced"));
        let target = home.path("images/a.raw");
        if cut != "nothing" {
            std::fs::hard_link(&target, &aside).unwrap();
        }
        if cut == "undoing" {
            std::fs::rename(&part, &target).unwrap();
            std::fs::hard_link(&target, &part).unwrap();
        }
        home.catalog.1.store(true, Ordering::Relaxed);
        for start in 0..2 {
            let (site, repairs) = home.open();
            let about = format!("{cut} {start}: {repairs:?}");
            assert_eq!(repairs.len(), 1, "{about}");
            assert!(repairs[0].contains("full disk"), "{about}");
            let (expected, found) = site
                .verify(&old.opening.offer.name, &mut |_, _| {})
                .unwrap();
            assert_eq!((expected, found), (old.digest, old.digest), "{about}");
            assert!(part.exists() && !aside.exists(), "{about}");
            let listed = site.unfinished().unwrap();
            assert_eq!(listed[0].state, crate::transfers::TransferState::Whole);
        }
        home.catalog.1.store(false, Ordering::Relaxed);
        let (site, _) = home.open();
        check_delivered(&home, &site, &new, cut);
    }
}

/// If the catalog rejects a locally created file, that file and the previous one are back where they were.
#[test]
fn a_file_that_cannot_be_adopted_is_where_it_was() {
    let home = Home::new();
    let old = sample("a.raw", 1, 3_000_000);
    home.arrive(&old, Until::Removal);
    let (site, _) = home.open();
    let new = sample("new", 2, 2_500_001);
    for name in ["a.raw", "b.raw"] {
        let file = home.path("work/made/image.part");
        std::fs::create_dir_all(file.parent().unwrap()).unwrap();
        std::fs::write(&file, &new.bytes).unwrap();
        let name = ImageName::new(name).unwrap();
        let prepared = site.prepare(&file, &name, MADE_HERE, &mut |_, _| Ok(()));
        let prepared = prepared.unwrap();
        home.catalog.1.store(true, Ordering::Relaxed);
        let fresh = name.as_str() == "b.raw";
        let failed = site.adopt(Some(&file), &prepared, fresh).unwrap_err();
        assert!(failed.to_string().contains("full disk"), "{failed}");
        home.catalog.1.store(false, Ordering::Relaxed);
        assert!(std::fs::read(&file).unwrap() == new.bytes);
        assert_eq!(home.path("images").join(name.as_str()).exists(), !fresh);
        let of_old = site.verify(&old.opening.offer.name, &mut |_, _| {});
        assert_eq!(of_old.unwrap(), (old.digest, old.digest));
        site.adopt(Some(&file), &prepared, fresh).unwrap();
        let of_new = site.verify(&name, &mut |_, _| {}).unwrap();
        assert_eq!(of_new, (new.digest, new.digest));
        // Restore the old image for the next case.
        if !fresh {
            std::fs::write(&file, &old.bytes).unwrap();
            let again = site
                .prepare(&file, &name, MADE_HERE, &mut |_, _| Ok(()))
                .unwrap();
            site.adopt(Some(&file), &again, false).unwrap();
        }
    }
}

/// A file that appears under the image's name while the image arrives is not replaced; once it is gone, the delivery
/// is finished.
#[test]
fn a_file_that_is_not_in_the_catalog_is_not_replaced() {
    let home = Home::new();
    let sample = sample("a.raw", 1, 3_000_000);
    let target = home.path("images/a.raw");
    home.arrive(&sample, Until::Rename);
    std::fs::write(&target, "not drover's").unwrap();
    for _ in 0..2 {
        let (site, repairs) = home.open();
        assert!(repairs[0].contains("does not know"), "{repairs:?}");
        assert_eq!(std::fs::read(&target).unwrap(), b"not drover's");
        let e = site.check_unknown_file(&sample.opening.offer.name);
        assert_eq!(e.unwrap_err().refusal(), Some(Code::Denied));
    }
    std::fs::remove_file(&target).unwrap();
    let (site, _) = home.open();
    check_delivered(&home, &site, &sample, "after the file was moved away");
}

#[test]
fn a_delivery_cut_off_before_it_was_logged_is_resumed() {
    let home = Home::new();
    let sample = sample("a.raw", 2, 2_500_001);
    home.arrive(&sample, Until::Closing);
    let (site, repairs) = home.open();
    assert_eq!(repairs, [""; 0]);
    assert!(site.images.list().is_empty());
    assert!(!home.path("images/a.raw").exists());
    let dir = site.transfer_dir(&key(&sample));
    let mut present = 0;
    let resumed = crate::transfer::Transfer::resume(
        &dir,
        &sample.opening.offer,
        &sample.layout,
        &sample.layout.encode(),
        &crate::transfer::tests::disk(),
        |_, r| {
            assert_eq!(r.missing.count(), 0);
            present += r.batch.digests.len() as u64;
            Ok(())
        },
    );
    assert!(resumed.unwrap().is_some());
    assert_eq!(
        present,
        sample.batches.iter().map(|b| b.data.count()).sum::<u64>()
    );
}

#[test]
fn a_whole_file_whose_map_was_lost_gets_another() {
    let home = Home::new();
    let sample = sample("a.raw", 2, 2_500_001);
    home.arrive(&sample, Until::Rename);
    std::fs::remove_dir_all(home.path("state/maps")).unwrap();
    let (site, _) = home.open();
    check_delivered(&home, &site, &sample, "without its map");
}

#[test]
fn transfers_without_a_usable_log_are_removed_and_so_is_one_without_its_file() {
    let home = Home::new();
    let whole = sample("a.raw", 2, 100_000);
    home.arrive(&whole, Until::Rename);
    let transfers = home.path("work/transfers");
    std::fs::remove_file(transfers.join(key(&whole)).join("image.part")).unwrap();
    for (name, log) in [
        ("none", None),
        ("empty", Some("")),
        ("odd", Some("DRVRLOG\0....x")),
    ] {
        std::fs::create_dir(transfers.join(name)).unwrap();
        std::fs::write(transfers.join(name).join("image.part"), "x").unwrap();
        if let Some(log) = log {
            std::fs::write(transfers.join(name).join("log"), log).unwrap();
        }
    }
    std::fs::write(transfers.join("file"), "x").unwrap();
    let resumable = sample("b.raw", 3, 100_000);
    drop(resumable.arrived(&transfers.join("kept")));
    let (site, repairs) = home.open();
    assert_eq!(repairs.len(), 5, "{repairs:?}");
    assert!(site.images.list().is_empty());
    let left: Vec<_> = std::fs::read_dir(&transfers)
        .unwrap()
        .map(|e| e.unwrap().file_name())
        .collect();
    // Under its current name.
    assert_eq!(left, [key(&resumable).as_str()]);
}

#[test]
fn a_catalog_that_was_lost_is_rebuilt_from_the_maps() {
    let home = Home::new();
    let sample = sample("a.raw", 2, 2_500_001);
    home.arrive(&sample, Until::Removal);
    drop(home.open());
    *home.catalog.0.lock() = Default::default();
    let (site, repairs) = home.open();
    check_delivered(&home, &site, &sample, "rebuilt");
    assert_eq!(repairs, ["a.raw: put back into the catalog from its map"]);
    drop(site);
    // An image with a damaged map is no source of blocks.
    let map = home.path("state/maps/2.map");
    let mut bytes = std::fs::read(&map).unwrap();
    bytes[100] ^= 1;
    std::fs::write(&map, bytes).unwrap();
    let (site, _) = home.open();
    assert!(site.images.open_image(ImageId(2)).is_none());
    *home.catalog.0.lock() = Default::default();
    drop(site);
    let (site, repairs) = home.open();
    assert!(site.images.list().is_empty(), "{repairs:?}");
}

/// A slot known to the matcher: unknown ones are freed.
fn stored_slot(site: &Site) -> u64 {
    let mut data = drover_store::DataBits::new(300);
    (0..300).for_each(|i| data.set(i));
    let digests: Vec<Digest> = (0..300u32)
        .map(|n| Digest(*blake3::hash(&n.to_le_bytes()).as_bytes()))
        .collect();
    let heads = vec![drover_core::Head::Strong; 300];
    let batch = Arc::new(crate::codec::Batch::new(0, data, heads, &digests));
    let mut stores = Vec::new();
    for image in [900, 901].map(ImageId) {
        let tell = |event| site.matching.tell(event).unwrap();
        tell(Event::Image(image, ImageEvent::Begin));
        if let crate::teleporter::Answer::Plan(plan) = tell(Event::Match(image, batch.clone())) {
            stores.extend(plan.stores);
        }
        tell(Event::Image(image, ImageEvent::Finish));
    }
    stores[0].first
}

#[test]
fn a_sequence_for_which_there_was_no_room_is_copied_when_there_is() {
    use drover_index::SequenceStore;
    use drover_store::sequences::Copied;
    use std::os::unix::fs::FileExt;

    let home = Home::new();
    let sample = sample("a.raw", 2, 2_500_001);
    home.arrive(&sample, Until::Removal);
    let image = ImageId(sample.opening.image);
    let (site, _) = home.open_with(u64::MAX);
    let store = SequenceStore {
        first: stored_slot(&site),
        from: CompactIndex(0),
        count: 4,
    };
    site.sequences.add(image, store, None);
    assert_eq!(site.copy_next(&mut 0), Some(Copied::Later));
    assert_eq!(site.sequences.pending(), 1);
    site.close().unwrap();
    drop(site);
    let (site, _) = home.open();
    let start = std::time::Instant::now();
    while site.sequences.pending() > 0 {
        assert!(start.elapsed() < std::time::Duration::from_secs(60));
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    let whole = site.images.open_image(image).unwrap();
    let (mut block, mut copied) = ([0; 4096], [0; 4096]);
    for i in 0..4 {
        let runs = whole.map.blocks.walk_runs(CompactIndex(i), 1).unwrap();
        let at = files::spans_of(&whole.map.layout, &runs)[0].0.unwrap();
        whole.file.read_exact_at(&mut block, at).unwrap();
        let slot = Sequences::offset(store.first + i);
        let data = site.sequences.data();
        data.read_exact_at(&mut copied, slot).unwrap();
        assert!(block == copied && block != [0; 4096], "block {i}");
    }
}

/// A complete file waiting for its name does not expire and cannot be removed.
#[test]
fn a_whole_file_that_awaits_its_name_does_not_expire() {
    let home = Home::new();
    let (site, _) = home.open();
    let sample = sample("a.raw", 2, 100_000);
    let dir = site.transfer_dir(&key(&sample));
    let mut transfer = sample.arrived(&dir);
    let closing = Closing {
        digest: sample.digest,
        added_unix: 5,
    };
    transfer
        .log
        .append(RecordKind::Closing, &drover_net::encode(&closing))
        .unwrap();
    drop(transfer);
    for name in ["log", "image.part"] {
        let file = std::fs::File::options().write(true).open(dir.join(name));
        file.unwrap()
            .set_modified(std::time::UNIX_EPOCH + std::time::Duration::from_secs(1000))
            .unwrap();
    }
    let listed = site.unfinished().unwrap();
    assert_eq!(listed[0].state, crate::transfers::TransferState::Whole);
    let none = site.expire_transfers(std::time::Duration::from_secs(60));
    assert_eq!(none.unwrap(), []);
    assert!(site.remove_transfer(&key(&sample)).is_err());
    assert!(dir.join("image.part").exists());
    // The remains of an interrupted removal are deleted when the site opens.
    std::fs::rename(&dir, dir.with_extension("removed")).unwrap();
    assert_eq!(site.unfinished().unwrap(), []);
    drop(site);
    assert_eq!(home.open().1, [""; 0]);
    assert!(!dir.with_extension("removed").exists());
}

/// The log was damaged while the site was running: the transfer is listed, and its space can be freed without a
/// restart.
#[test]
fn a_transfer_whose_log_is_damaged_is_listed_removed_and_expires() {
    use crate::transfers::TransferState;

    let home = Home::new();
    let (site, _) = home.open();
    let damage = |name: &str, log: Option<&[u8]>| {
        let sample = sample(name, 7, 200_000);
        let dir = site.transfer_dir(&key(&sample));
        drop(sample.arrived(&dir));
        match log {
            Some(bytes) => std::fs::write(dir.join("log"), bytes).unwrap(),
            None => std::fs::remove_file(dir.join("log")).unwrap(),
        }
        key(&sample)
    };
    let cases: [Option<&[u8]>; 3] = [None, Some(b""), Some(b"DRVRLOG\0....x")];
    for log in cases {
        let removed = damage("a.raw", log);
        let listed = site.unfinished().unwrap();
        assert_eq!(listed.len(), 1, "{log:?}: {listed:?}");
        let about = &listed[0];
        assert_eq!(
            (about.key.as_str(), about.name.as_str()),
            (&*removed, &*removed)
        );
        assert_eq!(about.state, TransferState::Damaged);
        assert!(
            about.room_bytes > 0 && about.touched_unix > 1_000_000_000,
            "{about:?}"
        );
        // Not while it is starting.
        let name = ImageName::new("a.raw").unwrap();
        let hold = site
            .active
            .take(&name, &removed, 1, std::time::Duration::ZERO);
        assert_eq!(site.unfinished().unwrap(), []);
        assert!(site.remove_transfer(&removed).is_err());
        drop(hold);
        assert_eq!(
            site.remove_transfer(&removed).unwrap().state,
            TransferState::Damaged
        );
        assert!(!site.transfer_dir(&removed).exists());
    }
    let old = damage("b.raw", Some(b""));
    let hour = std::time::Duration::from_secs(3600);
    assert_eq!(site.expire_transfers(hour).unwrap(), []);
    for name in ["log", "image.part"] {
        let file = std::fs::File::options()
            .write(true)
            .open(site.transfer_dir(&old).join(name));
        let past = std::time::UNIX_EPOCH + std::time::Duration::from_secs(1000);
        file.unwrap().set_modified(past).unwrap();
    }
    let expired = site.expire_transfers(hour).unwrap();
    assert_eq!(expired.len(), 1);
    assert_eq!(expired[0].key, old);
    assert!(!site.transfer_dir(&old).exists());
}

/// Of too many transfers, the most recently active ones serve as sources; the others are still kept.
#[test]
fn the_newest_transfers_that_stopped_are_sources_after_a_start() {
    use crate::partials::MAX_STOPPED;

    let home = Home::new();
    let mut sample = sample("a.raw", 1, 20_000);
    let all = MAX_STOPPED as u64 + 4;
    for image in 1..=all {
        sample.opening.image = image;
        sample.opening.offer.name = ImageName::new(format!("{image}.raw").as_str()).unwrap();
        let dir = home.path("work/transfers").join(key(&sample));
        drop(sample.arrived(&dir));
        let log = std::fs::File::options().write(true).open(dir.join("log"));
        // The higher its number, the longer ago it was active.
        let written = std::time::UNIX_EPOCH + std::time::Duration::from_secs(100_000 - image);
        log.unwrap().set_modified(written).unwrap();
    }
    let (site, repairs) = home.open();
    assert_eq!(repairs, [""; 0]);
    assert_eq!(site.unfinished().unwrap().len() as u64, all);
    let sources = (1..=all).filter(|image| site.partials.knows(ImageId(*image)));
    assert!(sources.eq(1..=MAX_STOPPED as u64));
}

/// The blocks of a stopped transfer are a guess. A block that was wrong is looked up elsewhere from then on: in a
/// transfer that is receiving it, or at the source.
#[test]
fn a_guess_that_was_wrong_is_not_made_again() {
    use crate::codec::Batch;
    use crate::destination::{ReuseJob, Run};
    use drover_index::{Origin, Plan, PlanRun, SequenceStore, Via};

    let home = Home::new();
    let (site, _) = home.open();
    let (stopped, coming, own) = (ImageId(1), ImageId(2), ImageId(3));
    let sample = sample("a.raw", 1, 3_000_000);
    let mut blocks = BlockMap::default();
    sample.batches.iter().for_each(|b| blocks.push(&b.data));
    let part = home.path("image.part");
    std::fs::write(&part, &sample.bytes).unwrap();
    let layout = sample.layout.clone();
    site.partials
        .add_stopped(stopped, sample.opening.peer, &part, layout.clone(), blocks);
    // Another transfer has matched the same blocks, and is receiving them.
    let transit = site
        .partials
        .begin(
            coming,
            sample.opening.peer,
            &part,
            layout,
            crate::partials::Contents::default(),
        )
        .unwrap();
    transit.arrived(&sample.batches[0], false);
    let store = SequenceStore {
        first: 128,
        from: CompactIndex(100),
        count: 64,
    };
    site.sequences
        .add(coming, store, Some((stopped, CompactIndex(100))));
    let run = |origin| PlanRun {
        count: 64,
        origin,
        via: Via::C2,
    };
    let plan = Plan {
        runs: vec![
            run(Origin::Sequence { first: 128 }),
            run(Origin::Image {
                image: stopped,
                first: CompactIndex(100),
            }),
        ],
        stores: vec![],
    };
    let found = || -> Vec<(u32, From)> {
        let runs = site.resolve(own, &plan);
        runs.iter().map(|r| (r.count, r.from)).collect()
    };
    let at = |image, first| From::Image {
        image,
        first: CompactIndex(first),
    };
    let all = (64, at(stopped, 100));
    assert_eq!(found(), [all, all]);
    let job = ReuseJob {
        batch: Arc::new(Batch::clone(&sample.batches[0])),
        runs: vec![(
            7,
            Run {
                count: 64,
                from: at(stopped, 100),
                via: Via::C2,
            },
        )],
    };
    // The job begins at the batch's data block 7, so 17 is block 110 of the image.
    site.refute(&job, &[3, 17, 18, 19, 71]);
    let front = (10, at(stopped, 100));
    let back = (51, at(stopped, 113));
    let expected = [front, (3, at(coming, 110)), back];
    assert_eq!(
        found(),
        [&expected[..], &[front, (3, From::Literal), back]].concat()
    );
    // Once it is resumed, the blocks in place are known.
    drop(transit);
    site.partials.remove(coming);
    let literal = [front, (3, From::Literal), back];
    assert_eq!(found(), [literal, literal].concat());
}

/// The matcher is sent what it lacks only when no transfer waits for it.
#[test]
fn what_the_matcher_lacks_gives_way_to_transfers() {
    let until = |what: &str, holds: &dyn Fn() -> bool| {
        let start = std::time::Instant::now();
        while !holds() {
            assert!(start.elapsed().as_secs() < 60, "never: {what}");
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
    };
    let home = Home::new();
    let (site, _) = home.open();
    let sample = sample("a.raw", 1, 3_000_000);
    let path = home.path("a.raw");
    std::fs::write(&path, &sample.bytes).unwrap();
    let id = site.index_image(&path, &mut |_, _| {}).unwrap().id;
    // The site runs a pass by itself, too.
    until("it has looked", &|| !site.status().catching_up);
    let let_go = AtomicBool::new(false);
    let waiting = site.matched.waiting();
    std::thread::scope(|threads| {
        let telling = threads.spawn(|| {
            let mut link = site.matching.link().unwrap();
            let an_hour = std::time::Duration::from_secs(3600);
            let told = site.send_image(&mut link, id, &path, an_hour);
            (told.unwrap(), let_go.load(Ordering::SeqCst))
        });
        until("it gives way", &|| site.matched.giving_way() == 1);
        assert!(!site.matching.images().unwrap().contains(&id));
        let_go.store(true, Ordering::SeqCst);
        drop(waiting);
        assert_eq!(telling.join().unwrap(), (true, true));
    });
    assert!(site.matching.images().unwrap().contains(&id));
    // And it makes progress even if they never stop waiting.
    let _waiting = site.matched.waiting();
    let mut link = site.matching.link().unwrap();
    let told = site.send_image(&mut link, id, &path, std::time::Duration::ZERO);
    assert!(told.unwrap());
}
