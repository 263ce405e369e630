//! A full disk under the cache.

use std::fs;
use std::io::Write;
use std::process::Command;

use super::client::Client;
use super::{Mounts, can_mount, clear_all, text, tried};
use crate::world::until;

const ENOSPC: i32 = 28;

/// A small file system, unmounted at the end.
struct Small(std::path::PathBuf);

impl Drop for Small {
    fn drop(&mut self) {
        // Mount records on it disappear with it: a daemon could not be found afterwards.
        clear_all(&self.0);
        let _ = Command::new("umount").arg("-l").arg(&self.0).output();
    }
}

#[test]
fn a_full_cache_disk_fails_writes_and_reads_go_on() {
    let test = "a_full_cache_disk_fails_writes_and_reads_go_on";
    if !can_mount(test) {
        return;
    }
    let m = Mounts::new();
    let bytes = m.raw("web.raw", 81);
    let dir = m.world.path("near/mounts");
    fs::create_dir_all(&dir).unwrap();
    let ran = tried(
        "mount",
        &["-t", "tmpfs", "-o", "size=2m", "none", text(&dir)],
    );
    if ran.code != Some(0) {
        eprintln!("SKIP {test}: no tmpfs: {}", ran.err);
        return;
    }
    let _small = Small(dir);
    let socket = m.export("web.raw", &["--give-up-after", "3s"]);
    let mut nbd = Client::connect(&socket, "web.raw");
    let read = |nbd: &mut Client| {
        for at in (0..bytes.len()).step_by(1 << 18) {
            assert!(nbd.read(at as u64, 1 << 18).unwrap() == bytes[at..][..1 << 18]);
        }
    };
    read(&mut nbd);
    let trouble = m.disk()["trouble"].to_string();
    assert!(trouble.contains("disk is full"), "not said: {trouble}");
    // With the link down, nothing can be pushed to free space.
    let mut wrote = 0;
    m.proxy.cut();
    let error = loop {
        assert!(wrote < bytes.len(), "4 MiB fit into 2");
        match nbd.write(wrote as u64, &bytes[wrote..][..1 << 16]) {
            Ok(()) => wrote += 1 << 16,
            Err(e) => break e,
        }
    };
    assert_eq!(
        error.raw_os_error(),
        Some(ENOSPC),
        "{error} after {wrote} bytes"
    );
    m.proxy.heal();
    read(&mut nbd);
    drop(nbd);
    until("the remote site has what was written", || {
        m.disk()["dirty"] == 0
    });
    // Every write that succeeded is intact at the far site. With the disk completely full, metadata that is no longer
    // needed must not have to be saved.
    let junk = fs::File::create(_small.0.join("junk")).unwrap();
    while (&junk).write(&[1; 512]).is_ok_and(|n| n > 0) {}
    m.near(&["unmount", text(&socket)]).ok();
    assert_eq!(m.list().len(), 0);
    assert!(m.far_bytes("web.raw") == bytes);
}
