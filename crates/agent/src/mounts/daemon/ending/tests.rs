use std::fs::File;
use std::sync::atomic::AtomicBool;

use drover_device::backend::FileDevice;
use drover_device::stage::Operation;
use drover_device::testing::{Errors, Fault, When};
use parking_lot::Mutex;
use serde_json::json;

use super::*;
use crate::home::Home;
use crate::mounts::record::{Place, Record};

#[test]
fn a_local_disk_whose_last_flush_fails_is_unmounted_and_reports_lost_writes() {
    for offline in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        let home = Home::create(dir.path().join("home")).unwrap();
        let path = dir.path().join("disk.raw");
        let file = File::create_new(&path).unwrap();
        file.lock().unwrap();
        let fault = Fault::on(Operation::Flush, When::Always);
        let device = FileDevice::new(file.try_clone().unwrap(), false).unwrap();
        let (device, _) = Errors::new(device, 1, vec![fault]);
        let record: Record = serde_json::from_value(json!({
            "version": 2, "name": "m", "id": vec![0; 16],
            "images": [{"peer": null, "image": "disk.raw", "local": {"file": path}}],
            "front": {"file": {"path": "/nowhere", "device": false}},
            "how": {
                "read_only": false, "direct": false, "sync": "local", "chunk": 65536, "cache_size": null,
                "prefetch": "None", "record": null, "push_interval": {"secs": 1, "nanos": 0},
                "window": null, "give_up_after": {"secs": 1, "nanos": 0},
            },
        }))
        .unwrap();
        let place = Place::of(&home, &record.images, &record.front, false);
        let _kept = place.keep().unwrap().unwrap();
        place.write(&record).unwrap();
        let disks = vec![Disk::local(&record.images[0], Arc::new(device), file)];
        let daemon = Daemon {
            home: home.clone(),
            moving: Mutex::default(),
            replicating: tokio::sync::Mutex::default(),
            profiling: Mutex::default(),
            place,
            record: Mutex::new(record),
            disks,
            shown: Mutex::new(None),
            ending: AtomicBool::new(false),
            overtaken: AtomicBool::new(false),
            ended: Mutex::new(None),
            done: AtomicBool::new(false),
        };
        let how = StopHow {
            offline,
            ..StopHow::default()
        };
        let failed = daemon.end(how, None, &mut |_| {}).unwrap_err();
        let text = one_line(&failed);
        assert!(
            text.contains("disk.raw: the last writes may be lost"),
            "{text}"
        );
        assert!(
            !text.contains("pushed") && !text.contains("cache"),
            "{text}"
        );
        // Any other code would make the client suggest to keep the cache.
        assert_eq!(crate::error::failed(failed).code, Code::Failed);
        assert!(daemon.done.load(Ordering::SeqCst), "the process ends");
        assert!(Place::list(&home).unwrap().is_empty());
        File::open(&path).unwrap().try_lock().unwrap();
    }
}
