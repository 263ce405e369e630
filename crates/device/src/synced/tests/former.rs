//! Caches of another image of the same name, and caches of version 1, which do not record their image.

use super::*;
use drover_storage::chunk_log::ChunkLog;

const IMAGE: Digest = Digest([3; 32]);
const SIZE: usize = 300_000;

fn of(
    directory: &FakeDirectory,
    far: &Arc<Far>,
    image: Digest,
    former: Option<Digest>,
) -> SyncedOptions {
    SyncedOptions {
        image,
        former,
        sync: Sync::Local,
        push_interval: Duration::from_secs(1000),
        ..options(directory, &far.remote())
    }
}

/// A cache with all of an image and a write that was not pushed, and what its device holds.
fn used(far: &Arc<Far>) -> (FakeDirectory, Vec<u8>) {
    let directory = FakeDirectory::default();
    let device = Synced::open(of(&directory, far, IMAGE, None)).unwrap();
    assert!(device.puller().wait(Duration::from_secs(60)).unwrap());
    device.write(70_000, &[9; 5000]).unwrap();
    device.close(false).unwrap();
    (directory, read_after(far, 70_000, 5000, 9))
}

fn read_after(far: &Arc<Far>, at: usize, length: usize, byte: u8) -> Vec<u8> {
    let mut bytes = far.bytes();
    bytes[at..at + length].fill(byte);
    bytes
}

/// Makes it one that version 1 wrote.
fn make_former(directory: &FakeDirectory) {
    let shared: Arc<dyn Directory> = Arc::new(directory.clone());
    let opened = ChunkLog::open(Arc::clone(&shared), "map").unwrap();
    let mut header = opened.header()[..56].to_vec();
    header[8] = 1;
    let mut records = Vec::new();
    let mut log = opened
        .replay(|record| {
            records.push(record);
            Ok(())
        })
        .unwrap();
    log.rewrite(&header, records).unwrap();
}

fn left(directory: &FakeDirectory) -> CacheContents {
    let shared: Arc<dyn Directory> = Arc::new(directory.clone());
    CacheContents::read(&shared).unwrap().unwrap()
}

#[test]
fn a_cache_of_another_image_of_the_same_name_and_size_is_refused() {
    let far = Far::new(&random_bytes(1, SIZE));
    let (directory, _) = used(&far);
    assert_eq!(left(&directory).image, Some(IMAGE));
    let other = Digest([4; 32]);
    for former in [None, Some(other), Some(IMAGE)] {
        let refused = Synced::open(of(&directory, &far, other, former))
            .err()
            .unwrap();
        assert!(
            matches!(refused, SyncedError::OtherImage { .. }),
            "{refused}"
        );
    }
}

#[test]
fn a_former_cache_is_taken_over_when_it_is_known_of_which_image_it_is() {
    let far = Far::new(&random_bytes(2, SIZE));
    let (directory, bytes) = used(&far);
    make_former(&directory);
    let before = left(&directory);
    assert_eq!(before.image, None);
    assert!(before.dirty >= 5000, "{before:?}");
    let map = directory.bytes("map").unwrap();
    let refused = Synced::open(of(&directory, &far, IMAGE, None))
        .err()
        .unwrap();
    assert!(matches!(refused, SyncedError::Version { .. }), "{refused}");
    let other = Some(Digest([4; 32]));
    let refused = Synced::open(of(&directory, &far, IMAGE, other))
        .err()
        .unwrap();
    assert!(
        matches!(refused, SyncedError::OtherImage { .. }),
        "{refused}"
    );
    assert!(
        directory.bytes("map").unwrap() == map,
        "nothing was changed"
    );
    let device = Synced::open(of(&directory, &far, IMAGE, Some(IMAGE))).unwrap();
    assert!(read_all(device.as_ref()) == bytes);
    device.close(false).unwrap();
    assert_eq!(
        left(&directory).image,
        Some(IMAGE),
        "from now on it says so"
    );
    assert_eq!(left(&directory).dirty, before.dirty);
    let device = Synced::open(of(&directory, &far, IMAGE, None)).unwrap();
    device.close(true).unwrap();
    assert!(far.bytes() == bytes);
}

/// The power fails while it is taken over.
#[test]
fn a_former_cache_is_taken_over_whole_or_not_at_all() {
    let far = Far::new(&random_bytes(3, SIZE));
    let (directory, bytes) = used(&far);
    make_former(&directory);
    let former = directory.after_kill();
    let steps = {
        let directory = former.after_kill();
        let before = directory.steps();
        drop(Synced::open(of(&directory, &far, IMAGE, Some(IMAGE))).unwrap());
        directory.steps() - before
    };
    for step in 0..steps {
        let directory = former.after_kill();
        directory.cut_power_at(directory.steps() + step);
        drop(Synced::open(of(&directory, &far, IMAGE, Some(IMAGE))));
        let after = directory.after_crash(step);
        let device = Synced::open(of(&after, &far, IMAGE, Some(IMAGE))).unwrap();
        assert!(read_all(device.as_ref()) == bytes, "step {step}");
        assert!(device.pusher().pending() >= 5000, "step {step}");
    }
}
