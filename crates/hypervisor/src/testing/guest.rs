//! What the guest boots: a kernel, and an initial root file system of one program and the modules of its disk.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::booted::{name_of, shared};
use super::skip;

/// In the order in which they are loaded. What a kernel has built in has no file.
const MODULES: [&str; 6] = [
    "drivers/virtio/virtio_ring.ko",
    "drivers/virtio/virtio.ko",
    "drivers/virtio/virtio_pci_legacy_dev.ko",
    "drivers/virtio/virtio_pci_modern_dev.ko",
    "drivers/virtio/virtio_pci.ko",
    "drivers/block/virtio_blk.ko",
];

/// In this order, too: what a disk with an ext4 needs.
const EXT4: [&str; 6] = [
    "lib/crc16.ko",
    "fs/mbcache.ko",
    "fs/jbd2/jbd2.ko",
    "crypto/crc32c_generic.ko",
    "lib/libcrc32c.ko",
    "fs/ext4/ext4.ko",
];

/// The files of a guest.
#[derive(Debug, Clone)]
pub struct Guest {
    /// The kernel.
    pub kernel: PathBuf,
    /// Its first file system.
    pub initrd: PathBuf,
}

impl Guest {
    /// Builds the guest in `directory`; or says SKIP for `test`, and returns `None`.
    ///
    /// # Panics
    /// When the program does not compile, or a file cannot be written.
    #[must_use]
    pub fn build(test: &str, directory: &Path) -> Option<Guest> {
        Self::with_modules(test, directory, &MODULES)
    }

    /// The same, which can use a second disk with an ext4, too.
    ///
    /// # Panics
    /// As [`Guest::build`].
    #[must_use]
    pub fn build_with_ext4(test: &str, directory: &Path) -> Option<Guest> {
        Self::with_modules(test, directory, &[MODULES, EXT4].concat())
    }

    fn with_modules(test: &str, directory: &Path, wanted: &[&str]) -> Option<Guest> {
        let tree = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../lab/cache/guest/trixie");
        let Some(kernel) = only(&tree.join("boot"), "vmlinuz-") else {
            return skip(
                test,
                "no kernel for a guest: lab/guest/fetch.sh fetches one",
            );
        };
        let modules = only(&tree.join("usr/lib/modules"), "").expect("a kernel with modules");
        let of = name_of(&(include_str!("guest.c"), wanted, &modules));
        // Once for all tests, where that is possible.
        let initrd = match shared() {
            Some(shared) => shared.join(format!("{of}.initrd")),
            None => directory.join("initrd"),
        };
        if !initrd.exists() {
            make_initrd(test, directory, &modules, wanted, &initrd)?;
        }
        Some(Guest { kernel, initrd })
    }
}

fn make_initrd(
    test: &str,
    directory: &Path,
    modules: &Path,
    wanted: &[&str],
    initrd: &Path,
) -> Option<()> {
    let source = directory.join("init.c");
    let init = directory.join("init");
    fs::write(&source, include_str!("guest.c")).expect("a directory to write to");
    let compiled = Command::new("cc")
        .args(["-static", "-O2", "-s", "-o"])
        .args([&init, &source])
        .output();
    match compiled {
        Ok(done) if done.status.success() => {}
        Ok(done) => panic!("cc: {}", String::from_utf8_lossy(&done.stderr)),
        Err(e) => return skip(test, &format!("no C compiler (build-essential): {e}")),
    }
    let mut archive = Archive::default();
    archive.add("dev", 0o040_755, &[]);
    archive.add("proc", 0o040_755, &[]);
    archive.add("dev/console", 0o020_600, &[]);
    archive.add("init", 0o100_755, &fs::read(&init).expect("the program"));
    let found = wanted.iter().flat_map(|module| {
        let path = modules.join("kernel").join(module);
        [path.clone(), path.with_extension("ko.xz")]
    });
    for (number, module) in found.filter(|path| path.exists()).enumerate() {
        let content = fs::read(module).expect("a module");
        archive.add(&format!("{number}.ko"), 0o100_644, &content);
    }
    let beside = initrd.with_extension(format!("{}.new", std::process::id()));
    fs::write(&beside, archive.finish()).expect("a directory to write to");
    fs::rename(&beside, initrd).expect("a directory to write to");
    Some(())
}

/// The entry of a directory whose name begins so.
fn only(directory: &Path, prefix: &str) -> Option<PathBuf> {
    let mut entries = fs::read_dir(directory).ok()?.flatten();
    let found = entries.find(|entry| entry.file_name().to_string_lossy().starts_with(prefix));
    found.map(|entry| entry.path())
}

/// An archive as the kernel reads it: cpio's format `newc`.
#[derive(Default)]
struct Archive {
    bytes: Vec<u8>,
    entries: u32,
}

impl Archive {
    fn add(&mut self, name: &str, mode: u32, content: &[u8]) {
        self.entries += 1;
        // The console's number; nothing else is a device.
        let (major, minor) = if mode & 0o170_000 == 0o020_000 {
            (5, 1)
        } else {
            (0, 0)
        };
        let length = |bytes: usize| u32::try_from(bytes).expect("small files");
        let fields = [
            self.entries,
            mode,
            0,
            0,
            1,
            0,
            length(content.len()),
            0,
            0,
            major,
            minor,
            length(name.len() + 1),
            0,
        ];
        self.bytes.extend(b"070701");
        for field in fields {
            self.bytes.extend(format!("{field:08X}").bytes());
        }
        self.bytes.extend(name.bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend(content);
        self.pad();
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }

    fn finish(mut self) -> Vec<u8> {
        self.add("TRAILER!!!", 0, &[]);
        self.bytes
    }
}
