//! Real servers: qemu-nbd, qemu-storage-daemon and nbdkit.

use std::process::{Child, Command, Stdio};

use super::*;
use crate::testing;

fn installed(test: &str, programs: &[&str]) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    for program in programs {
        if !std::env::split_paths(&path).any(|directory| directory.join(program).is_file()) {
            eprintln!("SKIP {test}: {program} is not installed");
            return false;
        }
    }
    true
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[track_caller]
fn run(program: &str, arguments: &[&str]) {
    let output = Command::new(program).args(arguments).output().unwrap();
    assert!(
        output.status.success(),
        "{program} {arguments:?}: {output:?}"
    );
}

/// A server's process and directory.
struct Real {
    directory: tempfile::TempDir,
    process: Child,
}

impl Drop for Real {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Real {
    fn start(program: &str, arguments: &[&str]) -> Self {
        Self::start_in(tempfile::tempdir().unwrap(), program, arguments)
    }

    /// Starts a program in a directory, where it listens at `s`.
    fn start_in(directory: tempfile::TempDir, program: &str, arguments: &[&str]) -> Self {
        let process = Command::new(program)
            .args(arguments)
            .current_dir(directory.path())
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        Self { directory, process }
    }

    fn open(&mut self, export: &str, contexts: &[&str]) -> Result<NbdDevice, NbdError> {
        let address = NbdAddress {
            socket: NbdSocket::Unix(self.directory.path().join("s")),
            export: export.into(),
        };
        self.open_at(&address, contexts)
    }

    fn open_at(&mut self, address: &NbdAddress, contexts: &[&str]) -> Result<NbdDevice, NbdError> {
        let options = NbdOptions {
            contexts: contexts.iter().map(|name| (*name).into()).collect(),
            ..NbdOptions::default()
        };
        let began = Instant::now();
        loop {
            match NbdDevice::connect(address, &options) {
                // It is not there yet.
                Err(error) if error.is_transient() && began.elapsed().as_secs() < 20 => {
                    assert!(
                        self.process.try_wait().unwrap().is_none(),
                        "it ended: {error}"
                    );
                    std::thread::sleep(Duration::from_millis(10));
                }
                opened => return opened,
            }
        }
    }
}

/// Sizes of disks, and a seed for each.
const DISKS: [(u64, u64); 3] = [(4096, 1), (200_704, 2), (1 << 20, 3)];

#[test]
fn nbdkit_keeps_the_contract_through_it() {
    if !installed("nbdkit_keeps_the_contract_through_it", &["nbdkit"]) {
        return;
    }
    let ways: [(&[&str], &[&str]); 4] = [
        (&["memory"], &[]),
        // Simple replies, and no extents.
        (&["--no-sr", "memory"], &[]),
        // No zeroing.
        (&["--filter=nozero", "memory"], &["zeromode=none"]),
        // Requests must be aligned.
        (
            &["--filter=blocksize-policy", "memory"],
            &[
                "blocksize-minimum=512",
                "blocksize-preferred=4096",
                "blocksize-maximum=64k",
                "blocksize-error-policy=error",
            ],
        ),
    ];
    for (plugin, parameters) in ways {
        for (size, seed) in DISKS {
            let text = size.to_string();
            let arguments = [&["-f", "-U", "s"], plugin, &[&text], parameters].concat();
            let mut real = Real::start("nbdkit", &arguments);
            let device = real.open("", &[]).unwrap_or_else(|e| panic!("{e}"));
            assert_eq!(device.size(), size);
            let aligned = device.capabilities().alignment > 1;
            assert_eq!(aligned, parameters.len() > 1);
            testing::run(&device, seed);
        }
    }
}

#[test]
fn qemu_nbd_keeps_the_contract_through_it() {
    if !installed("qemu_nbd_keeps_the_contract_through_it", &["qemu-nbd"]) {
        return;
    }
    for (size, seed) in DISKS {
        let directory = tempfile::tempdir().unwrap();
        let file = std::fs::File::create(directory.path().join("disk")).unwrap();
        file.set_len(size).unwrap();
        let socket = directory.path().join("s");
        let arguments = [
            "-t",
            "-f",
            "raw",
            "-k",
            text(&socket),
            "--discard=unmap",
            "disk",
        ];
        let mut real = Real::start_in(directory, "qemu-nbd", &arguments);
        let device = real.open("", &[]).unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(device.size(), size);
        let can = device.capabilities();
        assert!(
            can.trim && can.durable && can.extents && !can.read_only,
            "{can:?}"
        );
        testing::run(&device, seed);
    }
}

/// What was written to the disks here: offset and length, apart from each other by more than a grain.
const WRITES: [(u64, u64); 5] = [
    (0, 4096),
    (1 << 20, 100_000),
    (10_000_000, 1),
    ((1 << 30) - 8192, 65_536),
    ((3 << 30) - 512, 512),
];
/// Granularity of the bitmap (bytes).
const GRAIN: u64 = 4096;
const DISK: u64 = 3 << 30;

/// The ranges of whole grains that the writes touch.
fn touched() -> Vec<Range<u64>> {
    let whole = |(offset, length): (u64, u64)| {
        offset / GRAIN * GRAIN..(offset + length).next_multiple_of(GRAIN)
    };
    WRITES.into_iter().map(whole).collect()
}

/// A qcow2 of 3 GiB in `disk`, with some data, and a bitmap `b0` of what is written from now on.
fn disk_with_bitmap() -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    let disk = directory.path().join("disk");
    run(
        "qemu-img",
        &["create", "-q", "-f", "qcow2", text(&disk), "3G"],
    );
    let before = ["-f", "qcow2", "-c", "write -P 1 2M 1M", text(&disk)];
    run("qemu-io", &before);
    let grain = GRAIN.to_string();
    run(
        "qemu-img",
        &["bitmap", "--add", "-g", &grain, text(&disk), "b0"],
    );
    directory
}

fn dirty(device: &NbdDevice) -> Vec<Range<u64>> {
    let ranges: Result<_, _> = device.dirty(BITMAP, 0, device.size()).collect();
    ranges.unwrap_or_else(|e| panic!("{e}"))
}

#[test]
fn a_bitmap_of_qemu_nbd_lists_exactly_what_was_written() {
    let name = "a_bitmap_of_qemu_nbd_lists_exactly_what_was_written";
    if !installed(name, &["qemu-nbd", "qemu-img", "qemu-io"]) {
        return;
    }
    let directory = disk_with_bitmap();
    let socket = directory.path().join("s");
    let serve = [
        "-t",
        "-f",
        "qcow2",
        "--discard=unmap",
        "-k",
        text(&socket),
        "-x",
        "my disk",
    ];
    let serve = [&serve[..], &["-B", "b0", "-e", "2", "disk"]].concat();
    let mut real = Real::start_in(directory, "qemu-nbd", &serve);
    let device = real.open("my disk", &[BITMAP]).unwrap();
    assert_eq!(device.size(), DISK);
    assert!(device.contexts().any(|context| context == BITMAP));
    assert_eq!(dirty(&device), []);
    for (seed, (offset, length)) in WRITES.into_iter().enumerate() {
        device
            .write(offset, &vec![seed as u8 + 1; length as usize])
            .unwrap();
    }
    device.flush().unwrap();
    assert_eq!(dirty(&device), touched());
    // Within a range.
    let some: Result<Vec<_>, _> = device.dirty(BITMAP, 8192, 1 << 20).collect();
    let first = 1 << 20..(1 << 20) + 8192;
    assert!(some.unwrap().into_iter().eq(std::iter::once(first)));
    for (seed, (offset, length)) in WRITES.into_iter().enumerate() {
        let mut back = vec![0; length as usize];
        device.read(offset, &mut back).unwrap();
        assert!(back.iter().all(|byte| *byte == seed as u8 + 1), "{offset}");
    }
    let extents = device.extents(0, 4 << 20).unwrap();
    assert!(
        extents.iter().any(|e| e.kind != ExtentKind::Data),
        "{extents:?}"
    );
    // Trims and zeros count as writes.
    device.trim(64 << 20, 1 << 20).unwrap();
    device
        .write_zeroes(128 << 20, 1 << 20, Zeroes::default())
        .unwrap();
    let mut all = touched();
    all.insert(3, 64 << 20..65 << 20);
    all.insert(4, 128 << 20..129 << 20);
    assert_eq!(dirty(&device), all);
    let error = real
        .open("my disk", &["qemu:dirty-bitmap:b1"])
        .err()
        .unwrap();
    assert!(
        error
            .to_string()
            .contains("does not offer qemu:dirty-bitmap:b1"),
        "{error}"
    );
    let error = real.open("other", &[]).err().unwrap();
    assert!(
        error.to_string().contains("no export of this name"),
        "{error}"
    );
    // A server that is killed fails what follows at once.
    real.process.kill().unwrap();
    let error = device.read(0, &mut [0; 512]).unwrap_err();
    assert!(
        error.to_string().contains("closed the connection"),
        "{error}"
    );
}

#[test]
fn a_bitmap_of_qemu_storage_daemon_lists_exactly_what_was_written() {
    let name = "a_bitmap_of_qemu_storage_daemon_lists_exactly_what_was_written";
    if !installed(name, &["qemu-storage-daemon", "qemu-img", "qemu-io"]) {
        return;
    }
    let directory = disk_with_bitmap();
    let disk = directory.path().join("disk");
    for (offset, length) in WRITES {
        let write = format!("write -P 7 {offset} {length}");
        run("qemu-io", &["-f", "qcow2", "-c", &write, text(&disk)]);
    }
    run("qemu-img", &["bitmap", "--disable", text(&disk), "b0"]);
    let arguments = [
        "--blockdev",
        "qcow2,node-name=q,read-only=on,file.driver=file,file.filename=disk",
        "--nbd-server",
        "addr.type=unix,addr.path=s",
        "--export",
        "nbd,id=e,node-name=q,name=web,bitmaps.0=b0",
    ];
    let mut real = Real::start_in(directory, "qemu-storage-daemon", &arguments);
    let device = real.open("web", &[BITMAP]).unwrap();
    assert!(device.capabilities().read_only);
    assert_eq!(dirty(&device), touched());
    assert!(matches!(device.write(0, &[1]), Err(DeviceError::ReadOnly)));
    real.process.kill().unwrap();
    assert!(device.read(0, &mut [0]).is_err());
    device.flush().unwrap();
}

#[test]
fn tcp_is_spoken_too() {
    if !installed("tcp_is_spoken_too", &["nbdkit"]) {
        return;
    }
    // A port that was free a moment ago.
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let number = port.local_addr().unwrap().port();
    drop(port);
    let text = number.to_string();
    let arguments = ["-f", "-i", "127.0.0.1", "-p", &text, "memory", "1M"];
    let mut real = Real::start("nbdkit", &arguments);
    let address = format!("nbd://127.0.0.1:{number}/any").parse().unwrap();
    let device = real.open_at(&address, &[]).unwrap();
    testing::run(&device, 9);
}
