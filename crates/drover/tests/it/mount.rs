//! Tests of mounts: images of another site as local disks, with the real binary and real clients.

mod bad;
mod blockdev;
pub mod client;
mod crash;
mod damage;
pub mod ends;
mod exports;
mod files;
mod full;
mod generations;
mod killed;
mod leases;
mod links;
mod local;
mod marks;
mod metrics;
mod nbd;
mod proxy;
mod random;
mod replaced;
mod snapshots;
mod standby;

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use crate::world::{Ran, Site, World, own_address, signal, until};
use proxy::Proxy;

/// A far site, a near home that is paired with it, and the link between them. Dropping it ends all mounts of all homes,
/// also after a panic.
pub struct Mounts {
    pub site: Option<Site>,
    listen: String,
    pub proxy: Proxy,
    pub world: World,
}

impl Mounts {
    pub fn new() -> Mounts {
        let (world, proxy) = (World::new(), Proxy::new());
        let mut mounts = Mounts {
            site: None,
            listen: own_address().to_string(),
            proxy,
            world,
        };
        mounts.start_site();
        mounts.pair("near");
        mounts
    }

    /// Starts or restarts the far site.
    pub fn start_site(&mut self) {
        let advertise = self.proxy.address().to_string();
        let args = ["serve", "--listen", &self.listen, "--advertise", &advertise];
        self.site = Some(self.world.process("far", &args));
        self.proxy.lead_to(self.listen.parse().unwrap());
    }

    /// Kills the far site.
    pub fn kill_site(&mut self) {
        self.site = None;
    }

    /// Pairs a home with the far site, over the link.
    pub fn pair(&self, home: &str) {
        let ticket = self.world.run("far", &["ticket"]).ok().out;
        self.world
            .run(home, &["pair", ticket.trim(), "--name", "far"])
            .ok();
    }

    /// Creates a raw image at the far site: random data with holes.
    pub fn raw(&self, name: &str, seed: u64) -> Vec<u8> {
        let mut bytes = vec![0; 4 << 20];
        let mut rng = fastrand::Rng::with_seed(seed);
        rng.fill(&mut bytes[..2 << 20]);
        rng.fill(&mut bytes[3 << 20..(3 << 20) + 300_000]);
        fs::write(self.world.path(name), &bytes).unwrap();
        self.index(name);
        bytes
    }

    /// The same in qcow2 format.
    pub fn qcow2(&self, name: &str, seed: u64) -> Vec<u8> {
        let bytes = self.raw("before.raw", seed);
        let (from, to) = (self.world.path("before.raw"), self.world.path(name));
        tool(
            "qemu-img",
            &["convert", "-O", "qcow2", text(&from), text(&to)],
        );
        self.index(name);
        bytes
    }

    /// Creates an empty image.
    pub fn empty(&self, name: &str, size: u64) {
        let file = File::create(self.world.path(name)).unwrap();
        file.set_len(size).unwrap();
        drop(file);
        self.index(name);
    }

    pub fn index(&self, name: &str) {
        let path = self.world.path(name);
        self.world.run("far", &["index", text(&path)]).ok();
    }

    /// Runs a command of the near home.
    pub fn near(&self, args: &[&str]) -> Ran {
        self.world.run("near", args)
    }

    /// Mounts an image of the far site as a file of the near one.
    pub fn mount(&self, image: &str, file: &str, options: &[&str]) -> PathBuf {
        let path = self.world.path(file);
        let image = format!("far:{image}");
        let mut args = vec!["mount", &image, text(&path)];
        args.extend(options);
        let ran = self.near(&args).ok();
        PathBuf::from(ran.out.trim())
    }

    /// Exports an image on a Unix socket, in the background.
    pub fn export(&self, image: &str, options: &[&str]) -> PathBuf {
        let path = self.world.path("nbd.sock");
        let (image, listen) = (format!("far:{image}"), format!("unix:{}", path.display()));
        let mut args = vec!["export", &image, "--nbd", &listen, "--background"];
        args.extend(options);
        self.near(&args).ok();
        path
    }

    pub fn unmount(&self, what: &Path, options: &[&str]) -> Ran {
        let mut args = vec!["unmount", text(what)];
        args.extend(options);
        self.near(&args)
    }

    /// Lists the near home's mounts.
    pub fn list(&self) -> Vec<Value> {
        self.near(&["mounts", "--json"]).ok().json()
    }

    /// The status of the only disk of the only mount.
    pub fn disk(&self) -> Value {
        let mounts = self.list();
        assert_eq!(mounts.len(), 1, "{mounts:?}");
        mounts[0]["disks"][0].clone()
    }

    /// Kills the daemon of the only mount, and waits until it is reported dead.
    pub fn kill_daemon(&self) {
        let process = self.list()[0]["process"].as_u64().unwrap();
        signal(u32::try_from(process).unwrap(), "KILL");
        until("the mount is dead", || self.list()[0]["state"] == "dead");
    }

    /// Waits until the only mount is fully cached.
    pub fn pulled(&self) {
        until("all is here", || {
            let disk = self.disk();
            disk["local"] == disk["size"]
        });
    }

    /// Waits until the only mount has no dirty data.
    pub fn pushed(&self) {
        until("all is there", || self.disk()["dirty"] == 0);
    }

    /// The current content of an image at the far site, read by another home that bypasses the proxy.
    pub fn far_bytes(&self, image: &str) -> Vec<u8> {
        let path = self.mount(image, "see-far", &["--read-only", "--direct"]);
        let bytes = fs::read(&path).unwrap();
        self.unmount(&path, &[]).ok();
        bytes
    }
}

impl Drop for Mounts {
    fn drop(&mut self) {
        // Nothing below may hang: the file of a dead daemon must return errors.
        self.proxy.cut();
        for home in ["near", "other", "a", "far"] {
            clear_all(&self.world.path(home).join("mounts"));
        }
    }
}

/// Forcibly ends every mount recorded in a home's mount directory.
pub fn clear_all(mounts: &Path) {
    let Ok(entries) = fs::read_dir(mounts) else {
        return;
    };
    for entry in entries.flatten() {
        let Ok(record) = fs::read(entry.path().join("record.json")) else {
            continue;
        };
        if let Ok(record) = serde_json::from_slice::<Value>(&record) {
            clear(&record);
        }
    }
}

/// Forcibly ends the mount of a record.
fn clear(record: &Value) {
    let quietly = |program: &str, args: &[&str]| {
        let _ = Command::new(program).args(args).output();
    };
    let process = record["process"].as_u64().unwrap_or(0);
    let is_ours = fs::read(format!("/proc/{process}/cmdline"))
        .is_ok_and(|c| c.windows(12).any(|w| w == b"mount-daemon"));
    if process > 1 && is_ours {
        quietly("kill", &["-KILL", &process.to_string()]);
    }
    for device in record["devices"].as_array().into_iter().flatten() {
        quietly("umount", &["-l", device.as_str().unwrap_or_default()]);
        quietly("losetup", &["-d", device.as_str().unwrap_or_default()]);
    }
    if let Some(path) = record["front"]["file"]["path"].as_str() {
        quietly("umount", &["-l", path]);
    }
}

/// A path as text.
pub fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// Runs a tool, and panics if it fails.
#[track_caller]
pub fn tool(program: &str, args: &[&str]) -> String {
    let ran = tried(program, args);
    assert_eq!(ran.code, Some(0), "{ran:#?}");
    ran.out
}

/// Runs a tool, with a timeout of five minutes.
#[track_caller]
pub fn tried(program: &str, args: &[&str]) -> Ran {
    let out = Command::new("timeout")
        .args(["--kill-after=5", "300", program])
        .args(args)
        .output()
        .unwrap();
    Ran {
        what: format!("{program} {}", args.join(" ")),
        code: out.status.code(),
        out: String::from_utf8_lossy(&out.stdout).into_owned(),
        err: String::from_utf8_lossy(&out.stderr).into_owned(),
    }
}

/// Whether these programs are installed; prints which is not.
pub fn has(test: &str, programs: &[&str]) -> bool {
    programs.iter().all(|program| {
        let path = std::env::var("PATH").unwrap_or_default() + ":/usr/sbin:/sbin";
        let found = path
            .split(':')
            .any(|dir| Path::new(dir).join(program).exists());
        if !found {
            eprintln!("SKIP {test}: {program} is not installed");
        }
        found
    })
}

/// Whether FUSE files can be mounted here; prints why not.
pub fn can_mount(test: &str) -> bool {
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIP {test}: only root may mount");
        return false;
    }
    if !Path::new("/dev/fuse").exists() {
        eprintln!("SKIP {test}: no /dev/fuse");
        return false;
    }
    true
}
