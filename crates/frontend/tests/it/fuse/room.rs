//! A full cache.

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::mpsc;
use std::time::Duration;

use drover_frontend::fuse::{FileMount, Options};

use super::support::{Place, can_mount};
use crate::support::{CHUNK, DIRTY, full};

#[test]
fn writes_that_wait_for_room_keep_no_local_read_waiting() {
    if !can_mount("writes_that_wait_for_room_keep_no_local_read_waiting") {
        return;
    }
    let (device, remote) = full();
    let place = Place::new();
    let path = place.path("disk");
    let mut mount = FileMount::mount(&path, Arc::clone(&device) as _, Options::default()).unwrap();
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .open(&path)
        .unwrap();
    let file = Arc::new(file);
    // More than there are threads that serve what need not wait.
    let writes = (0..40).map(|n| {
        let file = Arc::clone(&file);
        let at = (DIRTY + n) * CHUNK;
        std::thread::spawn(move || file.write_all_at(&[7; 4096], at))
    });
    let writes: Vec<_> = writes.collect();
    let (say, hear) = mpsc::channel();
    let reader = Arc::clone(&file);
    let reads = std::thread::spawn(move || {
        // Some before all of the writes are there, some after.
        for n in 0..50 {
            let index = n % DIRTY;
            let mut buffer = [0; 4096];
            reader.read_exact_at(&mut buffer, index * CHUNK).unwrap();
            assert_eq!(buffer, [index as u8 + 1; 4096]);
            std::thread::sleep(Duration::from_millis(10));
        }
        say.send(()).unwrap();
    });
    let heard = hear.recv_timeout(Duration::from_secs(60));
    // Also after a failure: otherwise this process could not be ended.
    remote.mend();
    heard.expect("a local read waits");
    reads.join().unwrap();
    for write in writes {
        write.join().unwrap().unwrap();
    }
    drop(file);
    mount.unmount().unwrap();
    device.close(true).unwrap();
}
