//! A merge on a file system with reflinks needs space only for the changes.

use std::fs::{self, File};
use std::path::PathBuf;
use std::process::Command;

use crate::mount::ends::write;
use crate::mount::{can_mount, clear_all, has, text};
use crate::world::{World, same, until};

/// A world whose home `far` is on its own xfs.
struct Xfs {
    world: World,
    home: PathBuf,
}

impl Xfs {
    fn new(test: &str) -> Option<Xfs> {
        if !can_mount(test) || !has(test, &["mkfs.xfs", "losetup"]) {
            return None;
        }
        let world = World::new();
        let (disk, home) = (world.path("xfs"), world.path("far"));
        fs::create_dir(&home).unwrap();
        File::create(&disk).unwrap().set_len(320 << 20).unwrap();
        let run = |program: &str, args: &[&str]| {
            let out = Command::new(program).args(args).output();
            out.is_ok_and(|out| out.status.success())
        };
        let made = run("mkfs.xfs", &["-q", text(&disk)])
            && run("mount", &["-o", "loop", text(&disk), text(&home)]);
        if !made {
            eprintln!("SKIP {test}: no xfs can be mounted");
            return None;
        }
        Some(Xfs { world, home })
    }
}

impl Drop for Xfs {
    fn drop(&mut self) {
        clear_all(&self.home.join("mounts"));
        let _ = Command::new("umount").arg("-l").arg(&self.home).output();
    }
}

#[test]
fn a_raw_image_that_fits_only_once_is_merged() {
    let Some(xfs) = Xfs::new("a_raw_image_that_fits_only_once_is_merged") else {
        return;
    };
    let run = |args: &[&str]| xfs.world.run("far", args);
    run(&["init"]).ok();
    let image = xfs.home.join("images/web.img");
    let noise = xfs.world.image("noise", 131, 40_000);
    fs::copy(&noise, &image).unwrap();
    run(&["index", text(&image)]).ok();
    let free = rustix::fs::statvfs(&xfs.home).unwrap();
    let size = image.metadata().unwrap().len();
    assert!(free.f_bavail * free.f_frsize < size, "it fits twice");

    let disk = xfs.world.path("disk");
    run(&["mount", "web.img", text(&disk)]).ok();
    let expected = File::options().write(true).open(&noise).unwrap();
    let mut rng = fastrand::Rng::with_seed(132);
    for _ in 0..50 {
        let mut data = vec![0; rng.usize(1..40_000)];
        if rng.bool() {
            rng.fill(&mut data);
        }
        let at = rng.u64(0..size - data.len() as u64);
        write(&disk, at, &data);
        std::os::unix::fs::FileExt::write_all_at(&expected, &data, at).unwrap();
    }
    until("it is unmounted", || {
        run(&["unmount", text(&disk)]).code == Some(0)
    });
    let merged = run(&["changes", "merge", "web.img", "--json"]).ok().json();
    assert_eq!(merged[0]["merged"], true);
    same(&fs::read(&image).unwrap(), &noise);
    run(&["verify", "web.img"]).ok();
    assert!(run(&["changes", "--json"]).ok().out.is_empty());
}
