//! What a machine reads of its disk to boot, as far as the disk itself says so.

use std::ops::Range;

use drover_core::ReadAt;

use super::bounded::{Bounded, Stop};
use super::ext4::Ext4;
use super::partitions::{self, Partition, Use};

/// Upper bound on the bytes of the ranges of a boot.
pub const MAX_BOOT_BYTES: u64 = 512 << 20;

/// Upper bound on the ranges of a boot.
pub const MAX_BOOT_RANGES: usize = 4096;

/// What lies before the first partition: the table, and the boot loader of a BIOS. At most so much of it is read.
const MAX_GAP_BYTES: u64 = 1 << 20;

/// Of a partition of boot loaders, at most so much is read.
const MAX_LOADER_BYTES: u64 = 8 << 20;

/// Of a file system of which nothing else is known, the superblock is in these first bytes.
const SUPERBLOCK_BYTES: u64 = 128 << 10;

/// The second partition table of GPT, at the end of the disk.
const LAST_TABLE_BYTES: u64 = 33 * 512;

/// Most bytes of one file of a boot loader, and of a kernel or an initial RAM disk.
const MAX_GRUB_FILE_BYTES: u64 = 4 << 20;
const MAX_KERNEL_BYTES: u64 = 256 << 20;

/// Kernels, and initial RAM disks, that are taken when no menu says which is booted.
const KERNELS: usize = 1;

/// The largest menu of GRUB that is read.
const MAX_MENU_BYTES: u64 = 1 << 20;

const KERNEL_NAMES: &[&str] = &["vmlinuz", "vmlinux", "bzImage", "Image", "kernel"];
const INITRD_NAMES: &[&str] = &["initrd", "initramfs"];

/// The parts of a disk that a machine probably reads when it boots, in the order in which it does: the partition table and the
/// boot loader, then, of each ext2, ext3 or ext4 file system with a kernel, its tables and directories, the boot loader's files, the
/// kernel and the initial RAM disk, then the superblocks of the other file systems. Ranges do not overlap and are multiples of 4096 bytes,
/// but for the disk's end; there are at most [`MAX_BOOT_RANGES`], of at most [`MAX_BOOT_BYTES`]. A guess from untrusted bytes, within
/// the limits of a look.
#[must_use]
pub fn boot_ranges(disk: &dyn ReadAt) -> Vec<Range<u64>> {
    let mut out = Ranges::new(disk.len());
    let mut disk = Bounded::new(disk);
    let (table, partitions) = partitions::of(&mut disk);
    disk.take_seen();
    if table.is_some() {
        let first = partitions.iter().map(|p| p.start).min();
        out.add(0..first.unwrap_or(MAX_GAP_BYTES).clamp(4096, MAX_GAP_BYTES));
        out.add(disk.len().saturating_sub(LAST_TABLE_BYTES)..disk.len());
    }
    for partition in partitions.iter().filter(|p| p.use_ != Use::Other) {
        out.add(begin_of(partition, MAX_LOADER_BYTES));
    }
    for partition in &partitions {
        // A limit or damage leaves the rest unknown.
        let _ = of_file_system(&mut disk, partition, &mut out);
    }
    for partition in partitions.iter().filter(|p| p.file_system.is_some()) {
        out.add(begin_of(partition, SUPERBLOCK_BYTES));
    }
    out.ranges
}

fn begin_of(partition: &Partition, bytes: u64) -> Range<u64> {
    partition.start..partition.end.min(partition.start.saturating_add(bytes))
}

fn of_file_system(
    disk: &mut Bounded<'_>,
    partition: &Partition,
    out: &mut Ranges,
) -> Result<(), Stop> {
    disk.take_seen();
    let Some(fs) = Ext4::open(disk, partition.start..partition.end)? else {
        return Ok(());
    };
    // A file system of its own for /boot, or the one of everything.
    for directory in ["/boot", "/"] {
        let names = fs.list(disk, directory)?;
        let kernels = named(&names, KERNEL_NAMES);
        if kernels.is_empty() {
            continue;
        }
        let root = match directory {
            "/" => "",
            other => other,
        };
        let mut loader = Vec::new();
        for below in ["grub", "grub2", "loader/entries"] {
            loader.extend(files_below(disk, &fs, &format!("{root}/{below}"))?);
        }
        let menu = loader.iter().find(|path| path.ends_with("/grub.cfg"));
        let menu = match menu {
            Some(path) => fs.file(disk, path, MAX_MENU_BYTES)?,
            None => None,
        };
        let menu = menu.map(|menu| first_entry(&String::from_utf8_lossy(&menu)));
        let booted = menu.filter(|files| !files.is_empty()).unwrap_or_else(|| {
            let initrds = named(&names, INITRD_NAMES);
            let newest = |names: Vec<&String>| -> Vec<String> {
                let names = names.into_iter().rev().take(KERNELS);
                names.map(|name| format!("{root}/{name}")).collect()
            };
            [newest(kernels), newest(initrds)].concat()
        });
        let mut files = Vec::new();
        for path in &loader {
            files.extend(file_ranges(disk, &fs, path, MAX_GRUB_FILE_BYTES)?);
        }
        for path in &booted {
            // A menu names files as its file system has them, or as the root file system has.
            for path in [path.clone(), format!("{root}{path}")] {
                let ranges = file_ranges(disk, &fs, &path, MAX_KERNEL_BYTES)?;
                let found = !ranges.is_empty();
                files.extend(ranges);
                if found {
                    break;
                }
            }
        }
        // The way to them comes first.
        for page in disk.take_seen() {
            out.add(page..page + 4096);
        }
        files.into_iter().for_each(|range| out.add(range));
        return Ok(());
    }
    Ok(())
}

/// Those of the names that begin so; with a version, the newest is the last.
fn named<'a>(names: &'a [String], begin: &[&str]) -> Vec<&'a String> {
    let named = names.iter().filter(|name| {
        let kind = begin.iter().find(|begin| name.starts_with(**begin));
        kind.is_some_and(|_| !name.ends_with(".old") && !name.contains("rescue"))
    });
    let mut named: Vec<&String> = named.collect();
    named.sort_by_key(|name| version_of(name));
    named
}

/// The numbers in a name, so that 6.10 comes after 6.9.
fn version_of(name: &str) -> Vec<u64> {
    let numbers = name.split(|c: char| !c.is_ascii_digit());
    let numbers = numbers.filter(|n| !n.is_empty());
    numbers.map(|n| n.parse().unwrap_or(u64::MAX)).collect()
}

/// The kernel and the initial RAM disks of the first entry of a menu.
fn first_entry(menu: &str) -> Vec<String> {
    let mut files = Vec::new();
    let mut kernel = false;
    for line in menu.lines() {
        let mut words = line.split_whitespace();
        match words.next() {
            Some("linux" | "linux16" | "linuxefi") if !kernel => {
                kernel = true;
                files.extend(words.next().map(path_in_menu));
            }
            Some("initrd" | "initrd16" | "initrdefi") if kernel => {
                files.extend(words.map(path_in_menu));
                break;
            }
            Some("}") if kernel => break,
            _ => {}
        }
    }
    files
}

/// Without the device that may be in front of it.
fn path_in_menu(word: &str) -> String {
    word[word.find('/').unwrap_or(0)..].to_owned()
}

/// The files in a directory and in those directly below it.
fn files_below(disk: &mut Bounded<'_>, fs: &Ext4, directory: &str) -> Result<Vec<String>, Stop> {
    let mut files = Vec::new();
    let is_directory = |disk: &mut Bounded<'_>, path: &str| -> Result<bool, Stop> {
        Ok(fs
            .find(disk, path)?
            .is_some_and(|found| found.is_directory()))
    };
    if !is_directory(disk, directory)? {
        return Ok(files);
    }
    for name in fs.list(disk, directory)? {
        let path = format!("{directory}/{name}");
        if !is_directory(disk, &path)? {
            files.push(path);
            continue;
        }
        let below = fs.list(disk, &path)?;
        files.extend(below.into_iter().map(|name| format!("{path}/{name}")));
        if files.len() > MAX_BOOT_RANGES {
            break;
        }
    }
    Ok(files)
}

fn file_ranges(
    disk: &mut Bounded<'_>,
    fs: &Ext4,
    path: &str,
    max: u64,
) -> Result<Vec<Range<u64>>, Stop> {
    match fs.find(disk, path) {
        Ok(Some(file)) if file.is_file() => fs.ranges(disk, &file, max.min(file.size)),
        Ok(_) | Err(Stop::Unreadable) => Ok(Vec::new()),
        Err(e) => Err(e),
    }
}

/// Ranges in the order in which they were added, each without what is there already.
struct Ranges {
    ranges: Vec<Range<u64>>,
    /// The same, sorted, with adjacent ones joined.
    covered: Vec<Range<u64>>,
    length: u64,
    bytes: u64,
}

impl Ranges {
    fn new(length: u64) -> Self {
        Ranges {
            ranges: Vec::new(),
            covered: Vec::new(),
            length,
            bytes: 0,
        }
    }

    fn add(&mut self, range: Range<u64>) {
        let mut at = range.start / 4096 * 4096;
        let end = range
            .end
            .div_ceil(4096)
            .saturating_mul(4096)
            .min(self.length);
        while at < end && self.ranges.len() < MAX_BOOT_RANGES && self.bytes < MAX_BOOT_BYTES {
            let next = self.covered.partition_point(|c| c.end <= at);
            let stop = match self.covered.get(next) {
                Some(c) if c.start <= at => {
                    at = c.end;
                    continue;
                }
                Some(c) => end.min(c.start),
                None => end,
            };
            let stop = stop.min(at + (MAX_BOOT_BYTES - self.bytes));
            self.bytes += stop - at;
            match self.ranges.last_mut() {
                Some(last) if last.end == at => last.end = stop,
                _ => self.ranges.push(at..stop),
            }
            self.covered.insert(next, at..stop);
            // Joined with its neighbours.
            if self.covered.get(next + 1).is_some_and(|c| c.start == stop) {
                self.covered[next].end = self.covered.remove(next + 1).end;
            }
            if next > 0 && self.covered[next - 1].end == at {
                self.covered[next - 1].end = self.covered.remove(next).end;
            }
            at = stop;
        }
    }
}
