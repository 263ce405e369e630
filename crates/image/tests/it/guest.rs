//! Looks inside disks that `mke2fs` and `qemu-img` have made.

use std::collections::HashSet;
use std::ops::Range;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use drover_core::ReadAt;
use drover_image::VirtualDisk;
use drover_image::guest::{
    FileSystem, MAX_BOOT_BYTES, MAX_LOOK_BYTES, PartitionTable, Use, boot_ranges, look,
};

use crate::qemu;

/// Programs of administrators may not be in the path.
fn mke2fs() -> Option<&'static str> {
    let found = ["mke2fs", "/usr/sbin/mke2fs", "/sbin/mke2fs"]
        .into_iter()
        .find(|program| Command::new(program).arg("-V").output().is_ok());
    if found.is_none() {
        eprintln!("SKIP: mke2fs (Debian: e2fsprogs) is not installed");
    }
    found
}

const PACKAGES: usize = 3000;

fn noise(seed: u64, length: usize) -> Vec<u8> {
    let mut rng = fastrand::Rng::with_seed(seed);
    (0..length).map(|_| rng.u8(1..)).collect()
}

/// A small operating system in a directory.
fn tree(root: &Path) {
    let put = |path: &str, bytes: &[u8]| {
        let path = root.join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, bytes).unwrap();
    };
    let release = b"PRETTY_NAME=\"Debian GNU/Linux 12 (bookworm)\"\nID=debian\nVERSION_ID=\"12\"\n";
    put("usr/lib/os-release", release);
    put("etc/hostname", b"web\n");
    std::os::unix::fs::symlink("../usr/lib/os-release", root.join("etc/os-release")).unwrap();
    // Both links are followed: usr/lib is reached by an absolute one.
    std::os::unix::fs::symlink("/usr/lib", root.join("lib")).unwrap();
    let package = |i: usize| {
        format!(
            "Package: package-{i}\nStatus: install ok installed\nPriority: optional\nVersion: {i}.0-1\n\n"
        )
    };
    let status: String = (0..PACKAGES).map(package).collect();
    put("var/lib/dpkg/status", status.as_bytes());
    put("boot/vmlinuz-6.9.1", &noise(1, 300_000));
    put("boot/vmlinuz-6.10.1", &noise(2, 3_000_000));
    put("boot/initrd.img-6.9.1", &noise(3, 200_000));
    put("boot/initrd.img-6.10.1", &noise(4, 5_000_000));
    put("boot/grub/i386-pc/normal.mod", &noise(5, 50_000));
    // A directory with an index.
    for i in 0..800 {
        put(&format!("var/lib/dpkg/info/package-{i}.list"), b"x");
    }
}

fn make(program: &str, tree: &Path, file: &Path, options: &[&str], size: &str) {
    let made = Command::new(program)
        .args(options)
        .args(["-q", "-F", "-d"])
        .args([tree, file])
        .arg(size)
        .output()
        .unwrap();
    assert!(made.status.success(), "{made:?}");
}

fn read(disk: &dyn ReadAt, range: &Range<u64>) -> Vec<u8> {
    let mut bytes = vec![0; (range.end - range.start) as usize];
    disk.read_exact_at(&mut bytes, range.start).unwrap();
    bytes
}

/// The pieces of 1024 bytes, the smallest block of a file system; the last one of a file may be shorter.
fn pieces(bytes: &[u8]) -> impl Iterator<Item = &[u8]> {
    bytes.chunks_exact(1024)
}

/// Checks what is found in a disk with the tree, whose booted kernel has these numbers.
fn check(disk: &dyn ReadAt, kind: FileSystem, booted: [u64; 2]) {
    let found = look(disk);
    let system = found.system.expect("an operating system");
    assert_eq!((&*system.id, &*system.version), ("debian", "12"));
    assert_eq!(system.name, "Debian GNU/Linux 12 (bookworm)");
    assert_eq!(system.host, "web");
    assert_eq!(system.packages.len(), PACKAGES);
    assert!(
        system
            .packages
            .iter()
            .any(|p| p.name == "package-2999" && p.version == "2999.0-1")
    );
    assert_eq!(found.file_system, Some(kind));
    // The list of packages, and little else.
    assert!(found.read_bytes < 500_000, "{} bytes", found.read_bytes);
    let ranges = boot_ranges(disk);
    let mut sorted = ranges.clone();
    sorted.sort_by_key(|r| r.start);
    assert!(
        sorted.windows(2).all(|w| w[0].end <= w[1].start),
        "{sorted:?}"
    );
    let read = ranges.iter().map(|range| read(disk, range));
    let read: Vec<Vec<u8>> = read.collect();
    let there: HashSet<&[u8]> = read.iter().flat_map(|bytes| pieces(bytes)).collect();
    let has = |file: &[u8]| pieces(file).all(|piece| there.contains(piece));
    for (seed, length) in [
        (booted[0], [300_000, 3_000_000]),
        (booted[1], [200_000, 5_000_000]),
    ] {
        let length = length[usize::from(seed % 2 == 0)];
        assert!(has(&noise(seed, length)), "file {seed}");
    }
    let others = [1, 2, 3, 4].into_iter().filter(|n| !booted.contains(n));
    for other in others {
        assert!(!has(&noise(other, 4096)), "file {other}");
    }
    assert!(has(&noise(5, 50_000)));
}

#[test]
fn a_system_is_found_in_every_kind_of_ext_and_container() {
    let Some(program) = mke2fs() else { return };
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("tree");
    tree(&root);
    let kinds = [
        (FileSystem::Ext4, vec!["-t", "ext4"]),
        (
            FileSystem::Ext4,
            vec![
                "-t",
                "ext4",
                "-b",
                "1024",
                "-I",
                "256",
                "-O",
                "^64bit,^metadata_csum",
            ],
        ),
        (FileSystem::Ext3, vec!["-t", "ext3", "-b", "1024"]),
        (FileSystem::Ext2, vec!["-t", "ext2", "-b", "4096"]),
    ];
    for (kind, options) in kinds {
        let file = dir.path().join("disk.raw");
        let _ = std::fs::remove_file(&file);
        make(program, &root, &file, &options, "48M");
        check(&VirtualDisk::open(&file).unwrap(), kind, [2, 4]);
    }
    if qemu::available() {
        qemu::img(
            dir.path(),
            &[
                "convert",
                "-f",
                "raw",
                "-O",
                "qcow2",
                "-c",
                "disk.raw",
                "disk.qcow2",
            ],
        );
        let disk = VirtualDisk::open(&dir.path().join("disk.qcow2")).unwrap();
        check(&disk, FileSystem::Ext2, [2, 4]);
    }
}

#[test]
fn the_menu_says_which_kernel_is_booted() {
    let Some(program) = mke2fs() else { return };
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("tree");
    tree(&root);
    let menu = "set default=0\nmenuentry 'old' {\n\tlinux /boot/vmlinuz-6.9.1 root=/dev/sda1\n\tinitrd /boot/initrd.img-6.9.1\n}\n\
        menuentry 'new' {\n\tlinux /boot/vmlinuz-6.10.1\n\tinitrd /boot/initrd.img-6.10.1\n}\n";
    std::fs::write(root.join("boot/grub/grub.cfg"), menu).unwrap();
    let file = dir.path().join("disk.raw");
    make(program, &root, &file, &["-t", "ext4"], "48M");
    check(&VirtualDisk::open(&file).unwrap(), FileSystem::Ext4, [1, 3]);
}

/// An entry of an MBR.
fn entry(kind: u8, first: u32, sectors: u32) -> [u8; 16] {
    let mut out = [0; 16];
    out[4] = kind;
    out[8..12].copy_from_slice(&first.to_le_bytes());
    out[12..].copy_from_slice(&sectors.to_le_bytes());
    out
}

fn table(sector: &mut [u8], entries: &[[u8; 16]]) {
    for (i, entry) in entries.iter().enumerate() {
        sector[446 + 16 * i..][..16].copy_from_slice(entry);
    }
    sector[510..512].copy_from_slice(&[0x55, 0xaa]);
}

#[test]
fn partitions_of_both_tables_are_found() {
    let Some(program) = mke2fs() else { return };
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("tree");
    tree(&root);
    let file = dir.path().join("part.raw");
    make(program, &root, &file, &["-t", "ext4"], "48M");
    let inside = std::fs::read(&file).unwrap();
    let sectors = (inside.len() / 512) as u32;

    // A logical partition behind one with xfs.
    let mut mbr = vec![0; (2 << 20) + 4096 + inside.len()];
    table(
        &mut mbr,
        &[entry(0x83, 2048, 8), entry(5, 4096, sectors + 8)],
    );
    mbr[1 << 20..][..4].copy_from_slice(b"XFSB");
    table(&mut mbr[2 << 20..], &[entry(0x83, 8, sectors)]);
    mbr[(2 << 20) + 4096..].copy_from_slice(&inside);
    let found = look(&mbr);
    assert_eq!(found.table, Some(PartitionTable::Mbr));
    let kinds: Vec<_> = found.partitions.iter().map(|p| p.file_system).collect();
    assert_eq!(kinds, [Some(FileSystem::Xfs), Some(FileSystem::Ext4)]);
    check(&mbr, FileSystem::Ext4, [2, 4]);
    assert_eq!(boot_ranges(&mbr)[0], 0..1 << 20);

    let mut gpt = vec![0; (2 << 20) + inside.len() + 33 * 512];
    table(&mut gpt, &[entry(0xee, 1, u32::MAX)]);
    gpt[512..520].copy_from_slice(b"EFI PART");
    gpt[512 + 72..][..8].copy_from_slice(&2u64.to_le_bytes());
    gpt[512 + 80..][..4].copy_from_slice(&128u32.to_le_bytes());
    gpt[512 + 84..][..4].copy_from_slice(&128u32.to_le_bytes());
    let mut slot = |i: usize, kind: [u8; 16], first: u64, last: u64| {
        let at = 1024 + 128 * i;
        gpt[at..at + 16].copy_from_slice(&kind);
        gpt[at + 32..][..8].copy_from_slice(&first.to_le_bytes());
        gpt[at + 40..][..8].copy_from_slice(&last.to_le_bytes());
    };
    slot(0, *b"Hah!IdontNeedEFI", 2048, 2055);
    slot(3, [7; 16], 4096, 4096 + u64::from(sectors) - 1);
    gpt[2 << 20..][..inside.len()].copy_from_slice(&inside);
    let found = look(&gpt);
    assert_eq!(found.table, Some(PartitionTable::Gpt));
    let uses: Vec<_> = found.partitions.iter().map(|p| p.use_).collect();
    assert_eq!(uses, [Use::BiosBoot, Use::Other]);
    check(&gpt, FileSystem::Ext4, [2, 4]);
}

#[test]
fn a_damaged_file_system_is_looked_at_within_limits() {
    let Some(program) = mke2fs() else { return };
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("tree");
    tree(&root);
    let file = dir.path().join("disk.raw");
    make(program, &root, &file, &["-t", "ext4", "-b", "1024"], "24M");
    let sound = std::fs::read(&file).unwrap();
    // Damage is worth something only where there are tables.
    let used: Vec<usize> = (0..sound.len() / 1024)
        .filter(|i| sound[i * 1024..][..1024].iter().any(|b| *b != 0))
        .take(1500)
        .collect();
    let mut rng = fastrand::Rng::with_seed(7);
    for _ in 0..120 {
        let mut disk = sound.clone();
        for _ in 0..rng.usize(1..40) {
            let at = used[rng.usize(..used.len())] * 1024 + rng.usize(..1024);
            disk[at] = rng.u8(..);
        }
        assert!(look(&disk).read_bytes <= MAX_LOOK_BYTES + (64 << 10));
        let ranges = boot_ranges(&disk);
        let bytes: u64 = ranges.iter().map(|r| r.end - r.start).sum();
        assert!(bytes <= MAX_BOOT_BYTES);
    }
}

/// A file system whose root directory is a tree of extents in which every entry points to the same child, so that the directory
/// has 340^4 runs, all of the same block.
fn endless(sound: &[u8]) -> Vec<u8> {
    let mut disk = sound.to_vec();
    let le32 = |disk: &[u8], at: usize| u32::from_le_bytes(disk[at..at + 4].try_into().unwrap());
    let block = 4096;
    let table = le32(&disk, block + 8) as usize * block;
    let inode_size = usize::from(u16::from_le_bytes([disk[1024 + 0x58], disk[1024 + 0x59]]));
    // The root directory is the second inode; the eleventh, lost+found, is empty.
    let (inode, empty) = (table + inode_size, table + 10 * inode_size);
    let first = le32(&disk, empty + 0x28 + 20) as usize;
    // No index, a huge size, and levels of nodes in blocks that are free.
    disk[inode + 4..inode + 8].copy_from_slice(&0xffff_f000u32.to_le_bytes());
    disk[inode + 0x6c..][..4].copy_from_slice(&0xfffu32.to_le_bytes());
    disk[inode + 0x20..][..4].copy_from_slice(&0x8_0000u32.to_le_bytes());
    let free: Vec<usize> = (100..disk.len() / block)
        .rev()
        .filter(|i| disk[i * block..][..block].iter().all(|b| *b == 0))
        .take(4)
        .collect();
    let mut node = |at: usize, room: usize, depth: u16, child: usize| {
        for (i, half) in [0xf30a, room as u16, room as u16, depth]
            .into_iter()
            .enumerate()
        {
            disk[at + 2 * i..][..2].copy_from_slice(&half.to_le_bytes());
        }
        for i in 0..room {
            let entry = at + 12 + 12 * i;
            disk[entry..entry + 12].fill(0);
            match depth {
                0 => {
                    disk[entry + 4..][..2].copy_from_slice(&1u16.to_le_bytes());
                    disk[entry + 8..][..4].copy_from_slice(&(child as u32).to_le_bytes());
                }
                _ => disk[entry + 4..][..4].copy_from_slice(&(child as u32).to_le_bytes()),
            }
        }
    };
    node(inode + 0x28, 4, 4, free[3]);
    for depth in (1..4u16).rev() {
        node(
            free[usize::from(depth)] * block,
            340,
            depth,
            free[usize::from(depth) - 1],
        );
    }
    node(free[0] * block, 340, 0, first);
    disk
}

#[test]
fn a_directory_without_end_ends() {
    let Some(program) = mke2fs() else { return };
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("tree");
    tree(&root);
    let file = dir.path().join("disk.raw");
    let options = ["-t", "ext4", "-b", "4096", "-O", "^metadata_csum,^64bit"];
    make(program, &root, &file, &options, "48M");
    let disk = endless(&std::fs::read(&file).unwrap());
    let found = look(&disk);
    assert_eq!(found.file_system, Some(FileSystem::Ext4));
    assert_eq!(found.system, None);
    assert!(found.read_bytes <= MAX_LOOK_BYTES);
    let file = Arc::new(disk);
    assert!(
        boot_ranges(&*file)
            .iter()
            .all(|r| r.end <= file.len() as u64)
    );
}
