//! Any bytes as the disk of a guest: a look inside ends within its limits, and what it finds is in order. The corpus has a file system of
//! each kind that is read.

use std::sync::Arc;

use drover_core::ReadAt;
use drover_image::VirtualDisk;
use drover_image::guest::{
    MAX_BOOT_BYTES, MAX_BOOT_RANGES, MAX_LOOK_BYTES, boot_ranges, find_file, look,
};

use crate::image_open::Content;

fn looked_at(disk: &dyn ReadAt) {
    let found = look(disk);
    // The last read is counted before it is refused.
    assert!(found.read_bytes <= MAX_LOOK_BYTES + (64 << 10));
    for partition in &found.partitions {
        assert!(partition.start <= partition.end && partition.end <= disk.len());
    }
    if let Some(system) = found.system {
        assert!(system.packages.windows(2).all(|w| w[0] < w[1]));
        assert!(!system.name.chars().any(char::is_control));
    }
    a_file_is_within(disk, "/etc/os-release");
    let ranges = boot_ranges(disk);
    assert!(ranges.len() <= MAX_BOOT_RANGES);
    assert!(
        ranges
            .iter()
            .all(|r| r.start < r.end && r.end <= disk.len())
    );
    assert!(ranges.iter().map(|r| r.end - r.start).sum::<u64>() <= MAX_BOOT_BYTES);
    let mut sorted = ranges;
    sorted.sort_by_key(|r| r.start);
    assert!(sorted.windows(2).all(|w| w[0].end <= w[1].start));
}

fn a_file_is_within(disk: &dyn ReadAt, path: &str) {
    if let Ok(found) = find_file(disk, path) {
        let mut end = 0;
        for (at, range) in &found.pieces {
            assert!(range.start <= range.end && range.end <= disk.len());
            assert!(*at >= end || range.is_empty());
            end = end.max(at + (range.end - range.start));
        }
        assert!(end <= found.size);
    }
}

pub fn run(data: &[u8]) {
    let Some(content) = Content::new(data) else {
        return;
    };
    let file: Arc<dyn ReadAt> = Arc::new(content);
    looked_at(&*file);
    if let Ok(disk) = VirtualDisk::peek(file) {
        looked_at(&disk);
    }
}
