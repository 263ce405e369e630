//! Links that are cut or stall, and sites that restart.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use super::client::Client;
use super::{Mounts, can_mount};
use crate::world::until;

const EIO: i32 = 5;

#[test]
fn without_a_link_what_is_here_goes_on_and_what_is_not_waits() {
    let m = Mounts::new();
    let mut bytes = m.raw("web.raw", 11);
    let socket = m.export(
        "web.raw",
        &["--prefetch", "none", "--push-interval", "200ms"],
    );
    let mut nbd = Client::connect(&socket, "web.raw");
    assert!(nbd.read(0, 65536).unwrap() == bytes[..65536]);
    m.proxy.cut();
    until("the cut is seen", || m.disk()["link"] != "up");
    assert!(nbd.read(0, 65536).unwrap() == bytes[..65536]);
    nbd.write(1000, &[1; 3000]).unwrap();
    bytes[1000..4000].fill(1);
    // Writing a whole chunk needs no fetch.
    nbd.write(10 * 65536, &[2; 65536]).unwrap();
    bytes[10 * 65536..][..65536].fill(2);
    let start = Instant::now();
    nbd.flush().unwrap();
    // Well before the request timeout of ten minutes.
    assert!(start.elapsed() < Duration::from_secs(120));
    assert!(nbd.read(0, 65536).unwrap() == bytes[..65536]);
    assert!(m.disk()["dirty"].as_u64().unwrap() > 0);

    let mut other = Client::connect(&socket, "web.raw");
    let (say, hear) = std::sync::mpsc::channel();
    std::thread::spawn(move || say.send(other.read(1 << 20, 4096).unwrap()));
    let early = hear.recv_timeout(Duration::from_millis(700));
    assert!(early.is_err(), "bytes from nowhere");
    m.proxy.heal();
    let late = hear.recv_timeout(Duration::from_secs(60)).unwrap();
    assert!(late == bytes[1 << 20..][..4096]);
    m.pushed();
    assert_eq!(m.disk()["link"], "up");
    drop(nbd);
    until("nobody is connected", || {
        m.unmount(&socket, &[]).code == Some(0)
    });
    assert!(m.far_bytes("web.raw") == bytes);
}

#[test]
fn giving_up_fails_the_one_request() {
    let m = Mounts::new();
    let bytes = m.raw("web.raw", 12);
    let socket = m.export(
        "web.raw",
        &["--prefetch", "none", "--give-up-after", "2s", "--read-only"],
    );
    let mut nbd = Client::connect(&socket, "web.raw");
    assert!(nbd.read(0, 4096).unwrap() == bytes[..4096]);
    for stalled in [false, true] {
        match stalled {
            true => m.proxy.stall(),
            false => m.proxy.cut(),
        }
        let at = if stalled { 1 << 20 } else { 512 << 10 };
        let start = Instant::now();
        let error = nbd.read(at, 4096).unwrap_err();
        let took = start.elapsed();
        assert_eq!(error.raw_os_error(), Some(EIO), "{error}");
        assert!(
            (1..120).contains(&took.as_secs()),
            "{took:?} when stalled: {stalled}"
        );
        assert!(nbd.read(0, 4096).unwrap() == bytes[..4096]);
        m.proxy.heal();
        let at = usize::try_from(at).unwrap();
        until("it comes after all", || {
            nbd.read(at as u64, 4096)
                .is_ok_and(|b| b == bytes[at..][..4096])
        });
    }
}

#[test]
fn a_site_restarts_under_a_mount() {
    if !can_mount("a_site_restarts_under_a_mount") {
        return;
    }
    let mut m = Mounts::new();
    let mut bytes = m.raw("web.raw", 13);
    let disk = m.mount(
        "web.raw",
        "disk",
        &["--prefetch", "none", "--push-interval", "200ms"],
    );
    let file = File::options().read(true).write(true).open(&disk).unwrap();
    // From resident memory: for a constant that is still to be paged in from the program's file, the kernel may split
    // the write, and a partly written block needs a fetch.
    let (ones, twos) = (vec![1; 8192], vec![2; 8192]);
    file.write_all_at(&ones, 0).unwrap();
    file.sync_all().unwrap();
    m.pushed();
    m.kill_site();
    file.write_all_at(&twos, 4096).unwrap();
    file.sync_all().unwrap();
    bytes[..4096].fill(1);
    bytes[4096..12288].fill(2);
    std::thread::sleep(Duration::from_millis(300));
    m.start_site();
    let mut piece = vec![0; 4096];
    file.read_exact_at(&mut piece, 1 << 20).unwrap();
    assert!(piece == bytes[1 << 20..][..4096]);
    m.pushed();
    drop(file);
    m.unmount(&disk, &[]).ok();
    assert!(m.far_bytes("web.raw") == bytes);
}

#[test]
fn a_slow_link_is_only_slow() {
    if !can_mount("a_slow_link_is_only_slow") {
        return;
    }
    let m = Mounts::new();
    let bytes = m.raw("web.raw", 14);
    m.proxy.delay(Duration::from_millis(40));
    let disk = m.mount("web.raw", "disk", &["--read-only"]);
    let mut first = [0; 4096];
    File::open(&disk)
        .unwrap()
        .read_exact_at(&mut first, 0)
        .unwrap();
    assert!(first == bytes[..4096]);
    assert!(fs::read(&disk).unwrap() == bytes);
    m.unmount(&disk, &[]).ok();
}
