//! Programs that use the file in different ways: databases, mappings, direct I/O, many threads.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use drover_core::BlockDevice;
use drover_device::backend::MemoryDevice;
use drover_frontend::fuse::{FileMount, FuseError, Options};
use rustix::fs::{FallocateFlags, fallocate};

use super::support::{Place, Troubled, can_attach, can_mount, eventually};
use crate::support::{installed, noise, succeeds, text};

fn mounts(
    test: &str,
    page_cache: bool,
    device: Arc<dyn BlockDevice>,
) -> Option<(Place, FileMount)> {
    if !can_mount(test) {
        return None;
    }
    let place = Place::new();
    let options = Options {
        page_cache,
        ..Options::default()
    };
    let mount = FileMount::mount(&place.path("disk"), device, options).unwrap();
    Some((place, mount))
}

/// Threads that each write, read, zero and sync bytes of their own, which lie in pages that they share, against a
/// vector.
fn threads_agree_with_a_vector(path: &Path, device: &MemoryDevice, direct: bool, seed: u64) {
    const THREADS: usize = 6;
    /// Not a multiple of a page.
    const STRIPE: usize = 5003;
    const STRIPES: usize = 40;
    const STEPS: usize = 250;
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(if direct { libc::O_DIRECT } else { 0 })
        .open(path)
        .unwrap();
    let models: Vec<Vec<Vec<u8>>> = std::thread::scope(|scope| {
        let thread = |me: usize| {
            let file = &file;
            scope.spawn(move || {
                let mut random = fastrand::Rng::with_seed(seed * 100 + me as u64);
                let mut model = vec![vec![0u8; STRIPE]; STRIPES];
                for step in 0..STEPS {
                    let stripe = random.usize(..STRIPES);
                    let from = random.usize(..STRIPE);
                    let to = random.usize(from..=STRIPE);
                    let at = ((stripe * THREADS + me) * STRIPE + from) as u64;
                    let bytes = &mut model[stripe][from..to];
                    match random.u8(0..10) {
                        0..5 => {
                            random.fill(bytes);
                            file.write_all_at(bytes, at).unwrap();
                        }
                        5 if !bytes.is_empty() => {
                            bytes.fill(0);
                            let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                            fallocate(file, punch, at, bytes.len() as u64).unwrap();
                        }
                        6 => file.sync_data().unwrap(),
                        _ => {}
                    }
                    let whole = &model[stripe];
                    let mut seen = vec![0xEE; STRIPE];
                    file.read_exact_at(&mut seen, ((stripe * THREADS + me) * STRIPE) as u64)
                        .unwrap();
                    assert!(
                        &seen == whole,
                        "seed {seed}, thread {me}, step {step}: stripe {stripe} differs"
                    );
                }
                model
            })
        };
        let threads: Vec<_> = (0..THREADS).map(thread).collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .collect()
    });
    file.sync_all().unwrap();
    for (me, model) in models.iter().enumerate() {
        for (stripe, bytes) in model.iter().enumerate() {
            let mut seen = vec![0; STRIPE];
            device
                .read(((stripe * THREADS + me) * STRIPE) as u64, &mut seen)
                .unwrap();
            assert!(
                &seen == bytes,
                "seed {seed}: stripe {stripe} of thread {me} differs on the device"
            );
        }
    }
}

#[test]
fn threads_that_share_pages_see_their_own_bytes() {
    for (page_cache, direct, seed) in [
        (false, false, 1),
        (false, true, 2),
        (true, false, 3),
        (true, true, 4),
    ] {
        let memory = Arc::new(MemoryDevice::new(2 << 20));
        let test = "threads_that_share_pages_see_their_own_bytes";
        let Some((_place, mut mount)) = mounts(test, page_cache, memory.clone()) else {
            return;
        };
        threads_agree_with_a_vector(mount.path(), &memory, direct, seed);
        mount.unmount().unwrap();
    }
}

#[test]
fn shared_mappings_and_reads_agree() {
    let test = "shared_mappings_and_reads_agree";
    for page_cache in [false, true] {
        if !installed(test, &["fio"]) {
            return;
        }
        let memory = Arc::new(MemoryDevice::new(4 << 20));
        let Some((place, mut mount)) = mounts(test, page_cache, memory.clone()) else {
            return;
        };
        let file = format!("--filename={}", text(mount.path()));
        let common = [
            "--name=v",
            &file,
            "--size=4M",
            "--bs=4k",
            "--verify=crc32c",
            "--fallocate=none",
            "--minimal",
        ];
        let state = format!("--aux-path={}", text(&place.path("")));
        // Written through a shared mapping, read and checked through it, then by direct reads, then the other way.
        let engine = |engine: &'static str, what: &'static str| {
            let mut words = common.to_vec();
            words.extend([engine, what, &state]);
            succeeds("fio", &words);
        };
        engine("--ioengine=mmap", "--rw=randwrite");
        let mut words = common.to_vec();
        words.extend([
            "--ioengine=psync",
            "--direct=1",
            "--rw=randread",
            "--verify_only",
            &state,
        ]);
        succeeds("fio", &words);
        engine("--ioengine=psync", "--rw=randwrite");
        let mut words = common.to_vec();
        words.extend(["--ioengine=mmap", "--rw=randread", "--verify_only", &state]);
        succeeds("fio", &words);
        assert_eq!(memory.allocated(), 4 << 20);
        mount.unmount().unwrap();
    }
}

#[test]
fn a_mapping_sees_what_was_written_before_and_after_it_was_made() {
    let test = "a_mapping_sees_what_was_written_before_and_after_it_was_made";
    let Some((place, mut mount)) = mounts(test, false, Arc::new(MemoryDevice::new(1 << 20))) else {
        return;
    };
    if !installed(test, &["python3"]) {
        return;
    }
    let script = place.path("map.py");
    std::fs::write(
        &script,
        "import mmap, os, sys
f = os.open(sys.argv[1], os.O_RDWR)
os.pwrite(f, b'before', 5000)
for flags in (mmap.MAP_SHARED, mmap.MAP_PRIVATE):
    m = mmap.mmap(f, 1 << 20, flags=flags)
    assert m[5000:5006] == b'before', m[5000:5006]
    os.pwrite(f, b'behind', 5000)
    assert m[5000:5006] == b'behind', m[5000:5006]
    m[9000:9006] = b'mapped'
    if flags == mmap.MAP_SHARED:
        assert os.pread(f, 6, 9000) == b'mapped'
        m.flush()
    else:
        assert os.pread(f, 6, 9000) == b'mapped', 'of the shared one'
        os.pwrite(f, b'direct', 9000)
        assert m[9000:9006] == b'mapped', 'private once it is written'
    os.pwrite(f, b'before', 5000)
",
    )
    .unwrap();
    succeeds("python3", &[text(&script), text(mount.path())]);
    mount.unmount().unwrap();
}

#[test]
fn dd_reads_directly_what_it_wrote() {
    let test = "dd_reads_directly_what_it_wrote";
    if !can_attach(test, &["dd", "cmp"]) {
        return;
    }
    let memory = Arc::new(MemoryDevice::new(8 << 20));
    let Some((place, mut mount)) = mounts(test, false, memory) else {
        return;
    };
    let (from, back) = (place.path("from"), place.path("back"));
    std::fs::write(&from, noise(9, 8 << 20)).unwrap();
    let mut disk = drover_frontend::loopdev::LoopDevice::attach(
        mount.path(),
        drover_frontend::loopdev::Options::default(),
    )
    .unwrap();
    // In by the device, out by the file, and the other way round: neither may hold bytes back from the other
    // once they are synced.
    for (to, out) in [(disk.path(), mount.path()), (mount.path(), disk.path())] {
        succeeds(
            "dd",
            &[
                &format!("if={}", text(&from)),
                &format!("of={}", text(to)),
                "bs=1M",
                "oflag=direct",
                "conv=notrunc,fsync",
                "status=none",
            ],
        );
        succeeds(
            "dd",
            &[
                &format!("if={}", text(out)),
                &format!("of={}", text(&back)),
                "bs=512k",
                "iflag=direct",
                "status=none",
            ],
        );
        succeeds("cmp", &[text(&from), text(&back)]);
        std::fs::write(&from, noise(10, 8 << 20)).unwrap();
    }
    disk.detach().unwrap();
    mount.unmount().unwrap();
}

#[test]
fn a_database_is_whole() {
    let test = "a_database_is_whole";
    if !can_attach(test, &["sqlite3", "mkfs.ext4", "mount", "umount"]) {
        return;
    }
    let Some((place, mut mount)) = mounts(test, false, Arc::new(MemoryDevice::new(32 << 20)))
    else {
        return;
    };
    let mut disk = drover_frontend::loopdev::LoopDevice::attach(
        mount.path(),
        drover_frontend::loopdev::Options::default(),
    )
    .unwrap();
    let point = place.path("mnt");
    std::fs::create_dir(&point).unwrap();
    succeeds("mkfs.ext4", &["-q", text(disk.path())]);
    succeeds("mount", &[text(disk.path()), text(&point)]);
    let base = point.join("base");
    let said = succeeds(
        "sqlite3",
        &[
            text(&base),
            "PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL; CREATE TABLE t(k INTEGER PRIMARY KEY, v BLOB);
             WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x+1 FROM n WHERE x<3000)
             INSERT INTO t SELECT x, randomblob(500) FROM n;
             UPDATE t SET v=randomblob(700) WHERE k%3=0; DELETE FROM t WHERE k%7=0;",
        ],
    );
    assert!(said.contains("wal"), "{said}");
    succeeds("umount", &[text(&point)]);
    succeeds("mount", &[text(disk.path()), text(&point)]);
    let said = succeeds(
        "sqlite3",
        &[
            text(&base),
            "PRAGMA mmap_size=67108864; PRAGMA integrity_check; SELECT count(*), sum(length(v)) FROM t;",
        ],
    );
    // 3000 rows less 428; a third of them of 700 bytes.
    assert!(said.contains("\nok\n2572|"), "{said}");
    succeeds("umount", &[text(&point)]);
    disk.detach().unwrap();
    mount.unmount().unwrap();
}

#[test]
fn qemu_writes_zeroes_discards_and_maps() {
    let test = "qemu_writes_zeroes_discards_and_maps";
    if !installed(test, &["qemu-io", "qemu-img"]) {
        return;
    }
    let memory = Arc::new(MemoryDevice::new(8 << 20));
    let Some((_place, mut mount)) = mounts(test, false, memory.clone()) else {
        return;
    };
    for cache in ["none", "writeback", "directsync"] {
        let mut words = vec!["-f", "raw", "-t", cache, "-d", "unmap"];
        for command in [
            "write -P 5 1M 3M",
            "write -z -u 2M 1M",
            "discard 3M 512k",
            "flush",
            "read -P 5 1M 1M",
            "read -P 0 2M 1536k",
            "read -P 5 3584k 512k",
        ] {
            words.extend(["-c", command]);
        }
        words.push(text(mount.path()));
        // Of a pattern that differs it says so; not every version fails.
        let said = succeeds("qemu-io", &words);
        assert!(!said.contains("failed"), "{cache}: {said}");
        assert_eq!(memory.allocated(), (1 << 20) + (512 << 10), "{cache}");
    }
    let map = succeeds(
        "qemu-img",
        &["map", "--output=json", "-f", "raw", text(mount.path())],
    );
    let data = map.lines().filter(|line| line.contains("\"data\": true"));
    let starts: Vec<_> = data.map(|line| line.split(',').next().unwrap()).collect();
    assert_eq!(
        starts,
        ["{ \"start\": 1048576", "{ \"start\": 3670016"],
        "{map}"
    );
    mount.unmount().unwrap();
}

#[test]
fn requests_that_wait_leave_threads_for_those_that_need_not() {
    let device = Troubled::new(8 << 20);
    let test = "requests_that_wait_leave_threads_for_those_that_need_not";
    let Some((_place, mut mount)) = mounts(test, false, device.clone()) else {
        return;
    };
    *device.waits.lock() = Some(4 << 20..8 << 20);
    // More of them than threads that take requests.
    let readers: Vec<_> = (0..40)
        .map(|n| {
            let file = File::open(mount.path()).unwrap();
            std::thread::spawn(move || file.read_exact_at(&mut [1; 512], (4 << 20) + n * 4096))
        })
        .collect();
    std::thread::sleep(Duration::from_millis(100));
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .open(mount.path())
        .unwrap();
    let (done, answered) = mpsc::channel();
    std::thread::spawn(move || {
        for n in 0..100 {
            file.write_all_at(&[n; 100], u64::from(n) * 1000).unwrap();
            file.read_exact_at(&mut [0; 4096], u64::from(n) * 1000)
                .unwrap();
        }
        file.sync_all().unwrap();
        done.send(()).unwrap();
    });
    let answer = answered.recv_timeout(Duration::from_secs(60));
    assert!(readers.iter().all(|reader| !reader.is_finished()));
    device.free();
    assert_eq!(answer, Ok(()));
    for reader in readers {
        reader.join().unwrap().unwrap();
    }
    mount.unmount().unwrap();
}

#[test]
fn a_device_that_hangs_is_cut_off() {
    let device = Troubled::new(8 << 20);
    let test = "a_device_that_hangs_is_cut_off";
    let Some((place, mut mount)) = mounts(test, false, device.clone()) else {
        return;
    };
    *device.waits.lock() = Some(4 << 20..8 << 20);
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .open(mount.path())
        .unwrap();
    let reader = std::thread::spawn(move || file.read_exact_at(&mut [1; 512], 5 << 20));
    std::thread::sleep(Duration::from_millis(100));
    let refused = mount.unmount_within(Duration::from_secs(60)).unwrap_err();
    assert!(matches!(refused, FuseError::Busy { .. }), "{refused}");
    assert!(!reader.is_finished());
    mount.abort().unwrap();
    let error = reader.join().unwrap().unwrap_err();
    let number = error.raw_os_error().unwrap();
    assert!(
        [libc::ECONNABORTED, libc::ENOTCONN, libc::EIO].contains(&number),
        "{error}"
    );
    assert!(!place.path("disk").exists());
    device.free();
    eventually("the device is let go", || Arc::strong_count(&device) == 1);
}
