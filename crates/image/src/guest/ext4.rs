//! Reads files of ext2, ext3 and ext4, each step bounded; decision 0052 says why no library does it. Checksums are not
//! verified and the journal is not replayed.

use std::ops::Range;

use super::bounded::{Bounded, Stop, le16, le32};

/// Upper bound on the depth of a tree of extents, as in Linux.
const MAX_DEPTH: u16 = 5;

/// Upper bound on the runs of a file that are looked at.
const MAX_RUNS: usize = 8192;

/// Upper bound on the blocks of a directory that are searched.
const MAX_DIRECTORY_BLOCKS: u64 = 1024;

/// Upper bound on the entries of a directory that are listed.
const MAX_ENTRIES: usize = 4096;

/// Upper bound on the symbolic links of a path.
const MAX_LINKS: usize = 16;

/// Upper bound on the components of a path, links followed.
const MAX_COMPONENTS: usize = 64;

/// Upper bound on the length of a symbolic link.
const MAX_LINK_BYTES: u64 = 4096;

/// Bytes of a file that are read at once.
const READ_BYTES: u64 = 64 << 10;

/// Number of the root directory.
const ROOT: u32 = 2;

const EXTENTS: u32 = 0x8_0000;
const ENCRYPTED: u32 = 0x800;
const INLINE_DATA: u32 = 0x1000_0000;

/// Features that change what is read here: compression, a journal's device, meta groups of blocks.
const UNKNOWN_FEATURES: u32 = 0x1 | 0x8 | 0x10;

/// The journal has to be replayed.
const NEEDS_RECOVERY: u32 = 0x4;

/// A file system.
pub(super) struct Ext4 {
    at: Range<u64>,
    block_size: u64,
    blocks: u64,
    inodes: u32,
    inodes_per_group: u32,
    inode_size: u64,
    descriptors: u64,
    descriptor_size: u64,
    needs_recovery: bool,
}

/// A file, a directory or a link.
pub(super) struct Inode {
    mode: u16,
    flags: u32,
    pub(super) size: u64,
    /// The root of its tree of extents, or pointers to blocks, or a short link.
    body: [u8; 60],
}

/// A run of a file's blocks.
struct Run {
    /// Its first block in the file.
    first: u64,
    blocks: u64,
    /// Its first block in the file system.
    at: u64,
}

impl Inode {
    fn is(&self, kind: u16) -> bool {
        self.mode & 0xf000 == kind
    }

    pub(super) fn is_file(&self) -> bool {
        self.is(0x8000)
    }

    pub(super) fn is_directory(&self) -> bool {
        self.is(0x4000)
    }

    fn is_link(&self) -> bool {
        self.is(0xa000)
    }
}

impl Ext4 {
    /// The file system in this range of the disk; `None` when it is another one.
    pub(super) fn open(disk: &mut Bounded<'_>, at: Range<u64>) -> Result<Option<Self>, Stop> {
        let sb: [u8; 1024] = disk.bytes(at.start.saturating_add(1024))?;
        if le16(&sb, 0x38) != 0xef53 {
            return Ok(None);
        }
        let (log_size, features) = (le32(&sb, 0x18), le32(&sb, 0x60));
        if log_size > 6 || features & UNKNOWN_FEATURES != 0 {
            return Err(Stop::Unreadable);
        }
        let block_size = 1024 << log_size;
        let wide = features & 0x80 != 0;
        let high = if wide { le32(&sb, 0x150) } else { 0 };
        let fs = Ext4 {
            block_size,
            blocks: u64::from(high) << 32 | u64::from(le32(&sb, 0x4)),
            inodes: le32(&sb, 0),
            inodes_per_group: le32(&sb, 0x28),
            inode_size: match le32(&sb, 0x4c) {
                0 => 128,
                _ => u64::from(le16(&sb, 0x58)),
            },
            descriptors: (u64::from(le32(&sb, 0x14)) + 1) * block_size,
            descriptor_size: match wide {
                true => u64::from(le16(&sb, 0xfe)),
                false => 32,
            },
            needs_recovery: features & NEEDS_RECOVERY != 0,
            at,
        };
        let sound = fs.inodes_per_group > 0
            && (128..=block_size).contains(&fs.inode_size)
            && (32..=block_size).contains(&fs.descriptor_size);
        match sound {
            true => Ok(Some(fs)),
            false => Err(Stop::Unreadable),
        }
    }

    /// Where `length` bytes of the file system, from `at` on, are on the disk.
    fn place(&self, at: u64, length: u64) -> Result<u64, Stop> {
        let start = self.at.start.checked_add(at);
        let end = start.and_then(|start| start.checked_add(length));
        match (start, end) {
            (Some(start), Some(end)) if end <= self.at.end => Ok(start),
            _ => Err(Stop::Unreadable),
        }
    }

    fn block_at(&self, block: u64, blocks: u64) -> Result<u64, Stop> {
        let end = block.checked_add(blocks);
        if block == 0 || end.is_none_or(|end| end > self.blocks) {
            return Err(Stop::Unreadable);
        }
        let bytes = |blocks: u64| blocks.checked_mul(self.block_size).ok_or(Stop::Unreadable);
        self.place(bytes(block)?, bytes(blocks)?)
    }

    fn block(&self, disk: &mut Bounded<'_>, block: u64) -> Result<Vec<u8>, Stop> {
        let at = self.block_at(block, 1)?;
        let mut bytes = vec![0; self.block_size as usize];
        disk.read(at, &mut bytes)?;
        Ok(bytes)
    }

    fn inode(&self, disk: &mut Bounded<'_>, number: u32) -> Result<Inode, Stop> {
        if number == 0 || number > self.inodes {
            return Err(Stop::Unreadable);
        }
        let (group, index) = (
            (number - 1) / self.inodes_per_group,
            (number - 1) % self.inodes_per_group,
        );
        let descriptor = self.descriptors + u64::from(group) * self.descriptor_size;
        let place = self.place(descriptor, self.descriptor_size)?;
        let mut bytes = [0; 64];
        let bytes = &mut bytes[..self.descriptor_size.min(64) as usize];
        disk.read(place, bytes)?;
        // The upper half is there only in a descriptor of 64 bytes.
        let table = u64::from(le32(bytes, 0x28)) << 32 | u64::from(le32(bytes, 0x8));
        let offset = u64::from(index) * self.inode_size;
        let block = table.checked_add(offset / self.block_size);
        let at = self.block_at(block.ok_or(Stop::Unreadable)?, 1)? + offset % self.block_size;
        let inode: [u8; 128] = disk.bytes(at)?;
        Ok(Inode {
            mode: le16(&inode, 0),
            flags: le32(&inode, 0x20),
            size: u64::from(le32(&inode, 0x6c)) << 32 | u64::from(le32(&inode, 0x4)),
            body: inode[0x28..0x64].try_into().map_err(|_| Stop::Unreadable)?,
        })
    }

    /// The runs of a file's first blocks, in order, without holes.
    fn runs(&self, disk: &mut Bounded<'_>, inode: &Inode, blocks: u64) -> Result<Vec<Run>, Stop> {
        if inode.flags & (ENCRYPTED | INLINE_DATA) != 0 {
            return Err(Stop::Unreadable);
        }
        let mut runs = Vec::new();
        let blocks = blocks.min(inode.size.div_ceil(self.block_size));
        if inode.flags & EXTENTS != 0 {
            self.extents(disk, &inode.body, MAX_DEPTH, blocks, &mut runs)?;
        } else {
            let mut map = Map {
                fs: self,
                next: 0,
                end: blocks,
                runs: &mut runs,
            };
            for (slot, pointer) in inode.body.chunks_exact(4).enumerate() {
                map.add(
                    disk,
                    u64::from(le32(pointer, 0)),
                    slot.saturating_sub(11) as u32,
                )?;
            }
        }
        Ok(runs)
    }

    /// The runs of the extents in a node whose depth is at most `depth`, and of its children.
    fn extents(
        &self,
        disk: &mut Bounded<'_>,
        node: &[u8],
        depth: u16,
        end: u64,
        runs: &mut Vec<Run>,
    ) -> Result<(), Stop> {
        let here = le16(node, 6);
        if le16(node, 0) != 0xf30a || here > depth {
            return Err(Stop::Unreadable);
        }
        let entries = node[12..].chunks_exact(12).take(usize::from(le16(node, 2)));
        for entry in entries {
            // Extents are in order, so that a block that was visited is not visited again.
            let first = u64::from(le32(entry, 0));
            let next = runs.last().map_or(0, |run| run.first + run.blocks);
            if first >= end {
                return Ok(());
            }
            if here > 0 {
                let low = u64::from(le32(entry, 4));
                let child = self.block(disk, u64::from(le16(entry, 8)) << 32 | low)?;
                self.extents(disk, &child, here - 1, end, runs)?;
                continue;
            }
            if first < next || runs.len() >= MAX_RUNS {
                return Err(Stop::Unreadable);
            }
            let length = u64::from(le16(entry, 4));
            // Longer ones are allocated, but not written: they read as zeros.
            if (1..=32_768).contains(&length) {
                let at = u64::from(le16(entry, 6)) << 32 | u64::from(le32(entry, 8));
                let blocks = length.min(end - first);
                self.block_at(at, blocks)?;
                runs.push(Run { first, blocks, at });
            }
        }
        Ok(())
    }

    /// The number of the entry of that name in a directory.
    fn entry(
        &self,
        disk: &mut Bounded<'_>,
        directory: &Inode,
        name: &[u8],
    ) -> Result<Option<u32>, Stop> {
        let mut found = None;
        self.each_entry(disk, directory, |entry, number| {
            if entry == name {
                found = Some(number);
            }
            found.is_none()
        })?;
        Ok(found)
    }

    /// Calls `each` with the entries of a directory until it returns `false`.
    fn each_entry(
        &self,
        disk: &mut Bounded<'_>,
        directory: &Inode,
        mut each: impl FnMut(&[u8], u32) -> bool,
    ) -> Result<(), Stop> {
        if !directory.is_directory() {
            return Err(Stop::Unreadable);
        }
        // A directory with an index is also a list: the index looks like unused entries.
        for run in self.runs(disk, directory, MAX_DIRECTORY_BLOCKS)? {
            for block in run.at..run.at + run.blocks {
                let block = self.block(disk, block)?;
                let mut rest = &block[..];
                while rest.len() >= 8 {
                    let number = le32(rest, 0);
                    let length = match le16(rest, 4) {
                        0 | u16::MAX => rest.len(),
                        length => usize::from(length),
                    };
                    if length < 8 || length > rest.len() {
                        return Err(Stop::Unreadable);
                    }
                    let name = rest[8..length].get(..usize::from(rest[6]));
                    let name = name.filter(|name| number != 0 && !name.is_empty());
                    if let Some(name) = name
                        && !each(name, number)
                    {
                        return Ok(());
                    }
                    rest = &rest[length..];
                }
            }
        }
        Ok(())
    }

    /// The names in a directory, sorted, without `.` and `..`.
    pub(super) fn list(&self, disk: &mut Bounded<'_>, path: &str) -> Result<Vec<String>, Stop> {
        let Some(directory) = self.find(disk, path)? else {
            return Ok(Vec::new());
        };
        let mut names = Vec::new();
        self.each_entry(disk, &directory, |name, _| {
            let name = std::str::from_utf8(name).ok();
            let name = name.filter(|name| !matches!(*name, "." | ".."));
            names.extend(name.map(String::from));
            names.len() < MAX_ENTRIES
        })?;
        names.sort();
        Ok(names)
    }

    /// What is at an absolute path, links followed as the guest does.
    pub(super) fn find(&self, disk: &mut Bounded<'_>, path: &str) -> Result<Option<Inode>, Stop> {
        let components = |path: &str| -> Vec<String> {
            let parts = path.split('/').rev();
            parts.filter(|p| !p.is_empty()).map(String::from).collect()
        };
        // The last one is the next.
        let mut left = components(path);
        let mut parents: Vec<u32> = Vec::new();
        let (mut here, mut links) = (ROOT, 0);
        while let Some(name) = left.pop() {
            if left.len() > MAX_COMPONENTS || parents.len() > MAX_COMPONENTS {
                return Err(Stop::Limit);
            }
            match &*name {
                "." => continue,
                ".." => {
                    here = parents.pop().unwrap_or(ROOT);
                    continue;
                }
                _ => {}
            }
            let directory = self.inode(disk, here)?;
            if !directory.is_directory() {
                return Ok(None);
            }
            let Some(number) = self.entry(disk, &directory, name.as_bytes())? else {
                return Ok(None);
            };
            let inode = self.inode(disk, number)?;
            if !inode.is_link() {
                parents.push(here);
                here = number;
                continue;
            }
            links += 1;
            if links > MAX_LINKS || inode.size > MAX_LINK_BYTES {
                return Err(Stop::Limit);
            }
            let target = self.target(disk, &inode)?;
            if target.starts_with('/') {
                (here, parents) = (ROOT, Vec::new());
            }
            left.extend(components(&target));
        }
        self.inode(disk, here).map(Some)
    }

    fn target(&self, disk: &mut Bounded<'_>, link: &Inode) -> Result<String, Stop> {
        let short = usize::try_from(link.size).ok().filter(|n| *n < 60);
        let bytes = match short {
            Some(n) if link.flags & EXTENTS == 0 => link.body[..n].to_vec(),
            _ => self.content(disk, link, MAX_LINK_BYTES)?,
        };
        String::from_utf8(bytes).map_err(|_| Stop::Unreadable)
    }

    /// The file at that path, if it is one of at most `max` bytes.
    pub(super) fn file(
        &self,
        disk: &mut Bounded<'_>,
        path: &str,
        max: u64,
    ) -> Result<Option<Vec<u8>>, Stop> {
        match self.find(disk, path)? {
            Some(inode) if inode.is_file() && inode.size <= max => {
                self.content(disk, &inode, max).map(Some)
            }
            _ => Ok(None),
        }
    }

    fn content(&self, disk: &mut Bounded<'_>, inode: &Inode, max: u64) -> Result<Vec<u8>, Stop> {
        let size = inode.size.min(max);
        let mut bytes = vec![0; size as usize];
        for run in self.runs(disk, inode, size.div_ceil(self.block_size))? {
            let start = run.first * self.block_size;
            let end = size.min(start + run.blocks * self.block_size);
            let place = self.block_at(run.at, run.blocks)?;
            let mut at = start;
            while at < end {
                let piece = (end - at).min(READ_BYTES);
                let to = &mut bytes[at as usize..(at + piece) as usize];
                disk.read_content(place + (at - start), to)?;
                at += piece;
            }
        }
        Ok(bytes)
    }

    /// Whether its journal has what is not in its place: it is in use, or was not unmounted.
    pub(super) fn needs_recovery(&self) -> bool {
        self.needs_recovery
    }

    /// The content of a file: offsets in it, and ranges of the disk, in order; the rest is zero.
    pub(super) fn pieces(
        &self,
        disk: &mut Bounded<'_>,
        inode: &Inode,
    ) -> Result<Vec<(u64, Range<u64>)>, Stop> {
        let piece = |run: &Run| {
            let (first, place) = (
                run.first * self.block_size,
                self.block_at(run.at, run.blocks)?,
            );
            let length = (run.blocks * self.block_size).min(inode.size.saturating_sub(first));
            Ok((first, place..place + length))
        };
        self.runs(disk, inode, u64::MAX)?
            .iter()
            .map(piece)
            .collect()
    }

    /// Where the first `max` bytes of a file are on the disk.
    pub(super) fn ranges(
        &self,
        disk: &mut Bounded<'_>,
        inode: &Inode,
        max: u64,
    ) -> Result<Vec<Range<u64>>, Stop> {
        let runs = self.runs(disk, inode, max.div_ceil(self.block_size))?;
        let range = |run: &Run| {
            let at = self.block_at(run.at, run.blocks)?;
            Ok(at..at + run.blocks * self.block_size)
        };
        runs.iter().map(range).collect()
    }
}

/// A file's blocks by pointers, as ext2 and ext3 have them.
struct Map<'a> {
    fs: &'a Ext4,
    /// The block of the file that the next pointer is for.
    next: u64,
    end: u64,
    runs: &'a mut Vec<Run>,
}

impl Map<'_> {
    /// Adds what a pointer points to, through `depth` blocks of pointers.
    fn add(&mut self, disk: &mut Bounded<'_>, pointer: u64, depth: u32) -> Result<(), Stop> {
        if self.next >= self.end {
            return Ok(());
        }
        if pointer == 0 {
            // A hole.
            self.next += (self.fs.block_size / 4).pow(depth);
            return Ok(());
        }
        if depth > 0 {
            let block = self.fs.block(disk, pointer)?;
            for pointer in block.chunks_exact(4) {
                self.add(disk, u64::from(le32(pointer, 0)), depth - 1)?;
            }
            return Ok(());
        }
        self.fs.block_at(pointer, 1)?;
        let first = self.next;
        self.next += 1;
        let full = self.runs.len() >= MAX_RUNS;
        match self.runs.last_mut() {
            Some(run) if run.first + run.blocks == first && run.at + run.blocks == pointer => {
                run.blocks += 1;
            }
            _ if full => return Err(Stop::Limit),
            _ => self.runs.push(Run {
                first,
                blocks: 1,
                at: pointer,
            }),
        }
        Ok(())
    }
}
