//! The serving process is killed: what remains can be cleaned up, and nothing hangs.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use drover_frontend::fuse::{FileMount, FuseError, Options};
use drover_frontend::loopdev::{self, LoopError};

use super::support::{
    Place, attached_under, can_attach, can_mount, eventually, example, mounted_under,
};
use crate::support::{installed, succeeds, text};

/// The example, serving.
struct Server {
    child: Child,
    file: PathBuf,
    device: PathBuf,
}

impl Server {
    fn start(at: &Path) -> Self {
        let mut child = Command::new(example())
            .args(["32M", text(at), "--device"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut next = || PathBuf::from(lines.next().expect("a path").unwrap());
        let (file, device) = (next(), next());
        Self {
            child,
            file,
            device,
        }
    }

    fn kill(&mut self) {
        self.child.kill().unwrap();
        let child = &mut self.child;
        eventually("the killed process is gone", || {
            child.try_wait().unwrap().is_some()
        });
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
    }
}

fn write_without_sync(device: &Path) {
    let file = File::options().write(true).open(device).unwrap();
    for n in 0..64 {
        file.write_all_at(&[7; 65536], n * 131_072).unwrap();
    }
}

#[test]
fn a_killed_server_leaves_what_can_be_cleared_and_nothing_after_that() {
    if !can_attach(
        "a_killed_server_leaves_what_can_be_cleared_and_nothing_after_that",
        &[],
    ) {
        return;
    }
    let place = Place::new();
    for (name, makes) in [("disk", false), ("dir", true)] {
        let at = place.path(name);
        if makes {
            std::fs::create_dir(&at).unwrap();
        }
        let mut server = Server::start(&at);
        assert_eq!(
            loopdev::find_by_backing(&server.file).unwrap(),
            [server.device.clone()]
        );
        assert!(!FileMount::is_stale(&at));
        assert!(matches!(
            FileMount::clear_stale(&at),
            Err(FuseError::Mounted { .. })
        ));
        // Dirty pages that the kernel has to write back when the dying process closes the device.
        write_without_sync(&server.device);
        server.kill();
        eventually("the loop device is gone", || {
            attached_under(place.path("").as_path()).is_empty()
        });
        assert!(FileMount::is_stale(&at));
        let again = FileMount::mount(
            &at,
            std::sync::Arc::new(drover_device::backend::MemoryDevice::new(4096)),
            Options::default(),
        );
        assert!(matches!(again, Err(FuseError::Stale { .. })), "{again:?}");
        FileMount::clear_stale(&at).unwrap();
        assert!(!FileMount::is_stale(&at));
        assert_eq!(mounted_under(&place.path("")), Vec::<PathBuf>::new());
        assert_eq!(
            at.exists(),
            makes,
            "a file that was made for it goes, a directory stays"
        );
    }
}

#[test]
fn a_loop_device_in_use_outlives_its_killed_server_until_it_is_closed() {
    if !can_attach(
        "a_loop_device_in_use_outlives_its_killed_server_until_it_is_closed",
        &["mkfs.ext4"],
    ) {
        return;
    }
    let place = Place::new();
    let (at, point) = (place.path("disk"), place.path("mnt"));
    std::fs::create_dir(&point).unwrap();
    let mut server = Server::start(&at);
    let device = server.device.clone();
    succeeds("mkfs.ext4", &["-q", text(&device)]);
    succeeds("mount", &[text(&device), text(&point)]);
    std::fs::write(point.join("file"), vec![3; 1 << 20]).unwrap();
    server.kill();
    let refused = loopdev::detach_path(&device);
    match &refused {
        Err(LoopError::Busy { users, .. }) => {
            assert!(
                refused
                    .as_ref()
                    .unwrap_err()
                    .to_string()
                    .contains(text(&point)),
                "{users:?}"
            );
        }
        other => panic!("{other:?}"),
    }
    succeeds("umount", &[text(&point)]);
    eventually("the loop device is gone", || {
        attached_under(&place.path("")).is_empty()
    });
    // What is not attached any more is detached.
    loopdev::detach_path(&device).unwrap();
    FileMount::clear_stale(&at).unwrap();
    assert!(!at.exists());
}

#[test]
fn a_user_mounts_through_the_helper() {
    let test = "a_user_mounts_through_the_helper";
    if !can_mount(test) || !installed(test, &["fusermount3", "setpriv"]) {
        return;
    }
    let fuse = std::fs::metadata("/dev/fuse").unwrap();
    if std::os::unix::fs::MetadataExt::mode(&fuse) & 0o006 != 0o006 {
        eprintln!("SKIP {test}: only root may open /dev/fuse here");
        return;
    }
    let place = Place::new();
    let home = place.path("home");
    std::fs::create_dir(&home).unwrap();
    let all = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(place.path(""), all).unwrap();
    // The user cannot reach the build's directory.
    let program = place.path("fuse_memory");
    std::fs::copy(example(), &program).unwrap();
    std::os::unix::fs::chown(&home, Some(65534), Some(65534)).unwrap();
    std::fs::create_dir(home.join("dir")).unwrap();
    std::os::unix::fs::chown(home.join("dir"), Some(65534), Some(65534)).unwrap();
    for (name, file) in [("disk", "disk"), ("dir", "dir/memory")] {
        let as_user = |words: &[&str]| {
            let mut command = Command::new("setpriv");
            command.args(["--reuid=65534", "--regid=65534", "--clear-groups"]);
            command.args(words);
            command
        };
        let mut child = as_user(&[text(&program), "1M", text(&home.join(name))])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let path = PathBuf::from(lines.next().expect("a path").unwrap());
        assert_eq!(path, home.join(file));
        let script = format!(
            "echo hello > '{0}.in' && dd if='{0}.in' of='{1}' conv=notrunc status=none && head -c 5 '{1}'",
            text(&home.join(name)),
            text(&path)
        );
        let seen = as_user(&["sh", "-c", &script]).output().unwrap();
        assert_eq!(seen.stdout, b"hello", "{seen:?}");
        // It is the user's alone.
        assert!(File::open(&path).is_err());
        drop(child.stdin.take());
        assert!(child.wait().unwrap().success());
        assert_eq!(mounted_under(&place.path("")), Vec::<PathBuf>::new());
        assert_eq!(home.join(name).exists(), name == "dir");
    }
}
