//! Common NBD clients.

use std::path::Path;
use std::process::{Child, Command};
use std::sync::Arc;
use std::time::{Duration, Instant};

use drover_core::{BlockDevice, Cost};
use drover_device::backend::{FileDevice, MemoryDevice};
use drover_frontend::nbd::{Address, Export, ServerOptions};

use super::Served;
use super::raw::Odd;
use crate::support::{fails, installed, noise, run, succeeds, text};

/// All bytes of a device.
fn content(device: &dyn BlockDevice) -> Vec<u8> {
    let mut bytes = vec![1; device.size() as usize];
    device.read(0, &mut bytes).unwrap();
    bytes
}

#[test]
fn nbdcopy_copies_both_ways() {
    if !installed("nbdcopy_copies_both_ways", &["nbdcopy"]) {
        return;
    }
    for cost in [Cost::Memory, Cost::Disk, Cost::Network] {
        let device = Arc::new(Odd::new(40 << 20, cost));
        let served = Served::one(device.clone());
        let mut bytes = noise(1, 40 << 20);
        bytes[5 << 20..25 << 20].fill(0);
        let (from, back) = (served.path("from"), served.path("back"));
        std::fs::write(&from, &bytes).unwrap();
        let flush = ["--flush", text(&from), &served.uri("")];
        succeeds("nbdcopy", &flush);
        assert!(
            content(&device.inner) == bytes,
            "what nbdcopy wrote is not there"
        );
        succeeds("nbdcopy", &[&served.uri(""), text(&back)]);
        assert!(
            std::fs::read(&back).unwrap() == bytes,
            "what nbdcopy read differs"
        );
        // Several connections and requests in flight over TCP, too.
        let listening = served
            .server
            .listen_tcp("127.0.0.1:0".parse().unwrap())
            .unwrap();
        let Address::Tcp(address) = listening.local_addr() else {
            panic!("not TCP");
        };
        let uri = format!("nbd://{address}");
        let arguments = ["--connections=4", "--requests=64", "--request-size=65536"];
        succeeds("nbdcopy", &[&arguments[..], &[&uri, text(&back)]].concat());
        assert!(
            std::fs::read(&back).unwrap() == bytes,
            "what nbdcopy read over TCP differs"
        );
        assert!(served.server.counts().connections >= 6);
        assert_eq!(served.server.counts().errors, 0);
    }
}

#[test]
fn nbdinfo_sees_what_is_there() {
    if !installed("nbdinfo_sees_what_is_there", &["nbdinfo"]) {
        return;
    }
    let device = Arc::new(MemoryDevice::new(1 << 20));
    device.write(256 << 10, &noise(1, 64 << 10)).unwrap();
    let read_only = Export {
        name: "still".into(),
        description: "does not change".into(),
        device: device.clone(),
        read_only: true,
    };
    let changes = Export {
        name: "moves".into(),
        read_only: false,
        ..read_only.clone()
    };
    let served = Served::exports(vec![read_only, changes], ServerOptions::default());
    let json = succeeds("nbdinfo", &["--json", &served.uri("still")]);
    for part in [
        "\"protocol\": \"newstyle-fixed\"",
        "\"structured\": true",
        "\"export-name\": \"still\"",
        "\"description\": \"does not change\"",
        "\"export-size\": 1048576",
        "\"is_read_only\": true",
        "\"can_multi_conn\": true",
        "\"can_cache\": true",
        "\"can_df\": true",
        "\"block_size_minimum\": 1",
        "\"block_size_preferred\": 65536",
        "\"block_size_maximum\": 33554432",
        "base:allocation",
    ] {
        assert!(json.contains(part), "no {part} in {json}");
    }
    let json = succeeds("nbdinfo", &["--list", "--json", &served.uri("")]);
    for part in [
        "\"still\"",
        "\"moves\"",
        "\"can_fast_zero\": true",
        "\"can_trim\": true",
    ] {
        assert!(json.contains(part), "no {part} in {json}");
    }
    let map = succeeds("nbdinfo", &["--map", &served.uri("moves")]);
    let lines: Vec<Vec<&str>> = map
        .lines()
        .map(|l| l.split_whitespace().collect())
        .collect();
    assert_eq!(
        lines,
        [
            ["0", "262144", "3", "hole,zero"],
            ["262144", "65536", "0", "data"],
            ["327680", "720896", "3", "hole,zero"],
        ]
        .map(|line| line.to_vec())
    );
    fails("nbdinfo", &[&served.uri("elsewhere")]);
}

#[test]
fn qemu_img_converts_maps_and_compares() {
    if !installed("qemu_img_converts_maps_and_compares", &["qemu-img"]) {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("disk");
    let open = std::fs::File::options()
        .read(true)
        .write(true)
        .create_new(true)
        .open(&file)
        .unwrap();
    open.set_len(24 << 20).unwrap();
    let device = Arc::new(FileDevice::new(open, false).unwrap());
    let served = Served::new(
        vec![
            ("disk", device as _),
            ("copy", Arc::new(MemoryDevice::new(24 << 20)) as _),
        ],
        ServerOptions::default(),
    );
    let url = |name: &str| format!("nbd:unix:{}:exportname={name}", served.socket().display());
    let mut bytes = noise(9, 24 << 20);
    bytes[3 << 20..17 << 20].fill(0);
    let (raw, qcow2) = (served.path("raw"), served.path("qcow2"));
    std::fs::write(&raw, &bytes).unwrap();
    // Onto the server, from there to a qcow2 file, from export to export.
    succeeds(
        "qemu-img",
        &[
            "convert",
            "-n",
            "-f",
            "raw",
            "-O",
            "raw",
            text(&raw),
            &url("disk"),
        ],
    );
    assert!(
        std::fs::read(&file).unwrap() == bytes,
        "convert wrote other bytes"
    );
    succeeds(
        "qemu-img",
        &[
            "convert",
            "-f",
            "raw",
            "-O",
            "qcow2",
            &url("disk"),
            text(&qcow2),
        ],
    );
    succeeds(
        "qemu-img",
        &[
            "compare",
            "-f",
            "raw",
            "-F",
            "qcow2",
            text(&raw),
            text(&qcow2),
        ],
    );
    let (disk, copy) = (url("disk"), url("copy"));
    succeeds(
        "qemu-img",
        &[
            "convert", "-n", "-f", "raw", "-O", "raw", "-W", "-m", "8", &disk, &copy,
        ],
    );
    succeeds(
        "qemu-img",
        &["compare", "-f", "raw", "-F", "raw", text(&raw), &copy],
    );
    let map = succeeds("qemu-img", &["map", "--output=json", &copy]);
    let zeros = "\"start\": 3145728, \"length\": 14680064, \"depth\": 0, \"present\": true, \"zero\": true, \"data\": false";
    let newer = zeros.replace("\"present\": true", "\"present\": false");
    assert!(map.contains(zeros) || map.contains(&newer), "{map}");
}

#[test]
fn qemu_io_writes_zeroes_discards_and_flushes() {
    if !installed("qemu_io_writes_zeroes_discards_and_flushes", &["qemu-io"]) {
        return;
    }
    let device = Arc::new(MemoryDevice::new(64 << 20));
    let served = Served::one(device.clone());
    let url = format!("nbd:unix:{}", served.socket().display());
    let commands = [
        "write -P 0xA1 0 4M",
        "write -P 0xA2 1000 3001",
        "read -P 0xA1 0 512",
        "read -P 0xA2 1000 3001",
        "read -P 0xA1 4001 4k",
        "write -f -P 0xA3 1M 64k",
        "write -z 2M 128k",
        "read -P 0 2M 128k",
        "write -z -u 3M 128k",
        "write -z -f 3333k 1k",
        "read -P 0 3333k 1k",
        "write -z -n 4M 1M",
        "discard 8M 8M",
        "flush",
        "aio_write -P 0xA4 32M 1M",
        "aio_write -P 0xA5 33M 1M",
        "aio_read -P 0xA1 512k 64k",
        "aio_flush",
        "read -P 0xA4 32M 1M",
        "read -P 0xA5 33M 1M",
        // Longer than one request may be.
        "write -P 0xA6 0 60M",
        "read -P 0xA6 0 60M",
    ];
    let mut arguments = vec!["-f", "raw"];
    for command in &commands {
        arguments.extend(["-c", command]);
    }
    arguments.push(&url);
    let said = succeeds("qemu-io", &arguments);
    assert!(
        !said.contains("failed") && !said.contains("error"),
        "{said}"
    );
    let bytes = content(device.as_ref());
    assert!(bytes[..60 << 20].iter().all(|b| *b == 0xA6));
    assert!(bytes[60 << 20..].iter().all(|b| *b == 0));
    assert_eq!(served.server.counts().errors, 0);
    // And what fails, fails.
    let output = run("qemu-io", &["-f", "raw", "-c", "write 64M 4k", &url]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned()
        + &String::from_utf8_lossy(&output.stdout);
    assert!(!output.status.success() || said.contains("error"), "{said}");
}

#[test]
fn fio_verifies_what_it_wrote() {
    let test = "fio_verifies_what_it_wrote";
    if !installed(test, &["fio"]) {
        return;
    }
    if !succeeds("fio", &["--enghelp"]).contains("nbd") {
        eprintln!("SKIP {test}: fio has no nbd engine");
        return;
    }
    for cost in [Cost::Memory, Cost::Network] {
        let served = Served::one(Arc::new(Odd::new(16 << 20, cost)));
        let directory = format!("--aux-path={}", served.directory.path().display());
        let uri = format!("--uri={}", served.uri(""));
        succeeds(
            "fio",
            &[
                "--name=verify",
                "--ioengine=nbd",
                &uri,
                &directory,
                "--rw=randrw",
                "--bsrange=512-64k",
                "--blockalign=512",
                "--iodepth=32",
                "--size=16m",
                "--verify=crc32c",
                "--verify_fatal=1",
                "--randseed=7",
            ],
        );
        let counts = served.server.counts();
        assert!(counts.written_bytes >= 4 << 20, "{counts:?}");
        assert_eq!(counts.errors, 0);
    }
}

/// A child that does not outlive its test, and what it mounted.
struct Mounted(Child, std::path::PathBuf);

impl Drop for Mounted {
    fn drop(&mut self) {
        let path = text(&self.1).to_string();
        if !run("fusermount3", &["-u", &path]).status.success() {
            run("umount", &["-l", &path]);
        }
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn nbdfuse_makes_a_file_of_it() {
    let test = "nbdfuse_makes_a_file_of_it";
    if !installed(test, &["nbdfuse"]) {
        return;
    }
    if !Path::new("/dev/fuse").exists() || !rustix::process::geteuid().is_root() {
        eprintln!("SKIP {test}: no /dev/fuse, or not allowed to mount");
        return;
    }
    let device = Arc::new(MemoryDevice::new(8 << 20));
    let served = Served::one(device.clone());
    let file = served.path("disk");
    std::fs::write(&file, "").unwrap();
    let child = Command::new("nbdfuse")
        .arg(&file)
        .arg(served.uri(""))
        .spawn()
        .unwrap();
    let mounted = Mounted(child, file.clone());
    let deadline = Instant::now() + Duration::from_secs(60);
    while std::fs::metadata(&file).is_ok_and(|m| m.len() == 0) {
        assert!(Instant::now() < deadline, "nbdfuse does not mount");
        std::thread::sleep(Duration::from_millis(10));
    }
    use std::os::unix::fs::FileExt;
    let open = std::fs::OpenOptions::new()
        .read(true)
        .write(true)
        .open(&file)
        .unwrap();
    let bytes = noise(4, 3 << 20);
    open.write_all_at(&bytes, 12_345).unwrap();
    open.sync_all().unwrap();
    assert!(content(device.as_ref())[12_345..][..bytes.len()] == bytes);
    let mut back = vec![0; bytes.len()];
    open.read_exact_at(&mut back, 12_345).unwrap();
    assert!(back == bytes);
    drop(open);
    drop(mounted);
}
