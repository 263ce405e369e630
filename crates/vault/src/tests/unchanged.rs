//! Snapshots of which the source says what was written since an earlier one.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use drover_image::{Format, Layout, Outgoing};

use super::*;
use crate::{Since, SnapshotId, Source};

const SEGMENT: u64 = 2 << 20;

/// A disk that counts what is read of it.
struct Counted {
    bytes: Vec<u8>,
    read: Arc<AtomicU64>,
}

impl ReadAt for Counted {
    fn len(&self) -> u64 {
        self.bytes.len() as u64
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> std::io::Result<usize> {
        self.read.fetch_add(buffer.len() as u64, Ordering::Relaxed);
        let from = (offset as usize).min(self.bytes.len());
        let n = buffer.len().min(self.bytes.len() - from);
        buffer[..n].copy_from_slice(&self.bytes[from..from + n]);
        Ok(n)
    }
}

fn source(bytes: &[u8], since: Option<Since>) -> (Source, Arc<AtomicU64>) {
    let read = Arc::<AtomicU64>::default();
    let size = bytes.len() as u64;
    let content = Counted {
        bytes: bytes.to_vec(),
        read: Arc::clone(&read),
    };
    let image = Outgoing {
        content: Arc::new(content),
        layout: Layout::in_file_order(size, std::slice::from_ref(&(0..size))),
        format: Format::Raw,
        virtual_size: size,
        notes: Vec::new(),
        stamps: Vec::new(),
    };
    let from = "qmp:/run/web.qmp".into();
    (Source { image, from, since }, read)
}

fn since(parent: &SnapshotId, written: &[Range<u64>]) -> Option<Since> {
    Some(Since {
        parent: parent.clone(),
        written: written.to_vec(),
    })
}

fn backup(vault: &Vault, source: &Source, time: i64) -> Backup {
    let made = vault.backup_source(source, &machine("web"), "host", time, &mut |_| {});
    made.unwrap()
}

#[test]
fn what_was_not_written_is_not_read() {
    let setting = Setting::new();
    let vault = setting.vault();
    let mut rng = fastrand::Rng::with_seed(7);
    // Longer than a page of the recipe, and not a multiple of a segment.
    let blocks = 33_000;
    let mut contents: Vec<u32> = (0..blocks).map(|n| n / 3 % 5000).collect();
    let first = backup(&vault, &source(&disk(&contents), None).0, 100);
    assert_eq!(first.read_bytes, u64::from(blocks) * 4096);
    let mut parent = first.id;
    for round in 0..6 {
        let written: Vec<Range<u64>> = (0..rng.u64(0..4))
            .map(|_| {
                let from = rng.usize(0..contents.len());
                let to = (from + rng.usize(1..700)).min(contents.len());
                for content in &mut contents[from..to] {
                    *content = rng.u32(0..9000);
                }
                from as u64 * 4096..to as u64 * 4096
            })
            .collect();
        let bytes = disk(&contents);
        let touched = (0..bytes.len() as u64)
            .step_by(SEGMENT as usize)
            .filter(|&at| written.iter().any(|w| w.start < at + SEGMENT && at < w.end))
            .map(|at| SEGMENT.min(bytes.len() as u64 - at));
        let touched: u64 = touched.sum();
        let (differing, read) = source(&bytes, since(&parent, &written));
        let made = backup(&vault, &differing, 200 + round);
        assert_eq!(made.read_bytes, touched);
        assert_eq!(read.load(Ordering::Relaxed), touched);
        // As if all had been read.
        let all = backup(&Setting::new().vault(), &source(&bytes, None).0, 100);
        assert_eq!(made.record.root, all.record.root);
        assert_eq!(made.record.data_bytes, all.record.data_bytes);
        assert!(content(&vault, &made.id).unwrap() == bytes);
        parent = made.id;
    }
    let report = vault.check(Checking::Full, &mut |_, _| {}).unwrap();
    assert_eq!(report.problems, []);
    // What only the parents used goes, and nothing else.
    let all = vault.live_ids(None).unwrap();
    let (last, before) = all.split_last().unwrap();
    vault.forget(before).unwrap();
    vault.collect(Duration::ZERO, &mut |_| {}).unwrap();
    assert!(content(&vault, last).unwrap() == disk(&contents));
}

#[test]
fn a_parent_that_is_not_there_is_not_used() {
    let setting = Setting::new();
    let vault = setting.vault();
    let old = disk(&(1..2000).collect::<Vec<_>>());
    let parent = backup(&vault, &source(&old, None).0, 100).id;
    // Of another size.
    let longer = disk(&(1..2600).collect::<Vec<_>>());
    let (grown, _) = source(&longer, since(&parent, &[]));
    assert_eq!(backup(&vault, &grown, 200).read_bytes, longer.len() as u64);
    // Forgotten, and collected.
    vault.forget(std::slice::from_ref(&parent)).unwrap();
    let new = disk(&(3000..4999).collect::<Vec<_>>());
    let (after, _) = source(&new, since(&parent, &[]));
    let made = backup(&vault, &after, 300);
    assert_eq!(made.read_bytes, new.len() as u64);
    assert!(content(&vault, &made.id).unwrap() == new);
    vault.collect(Duration::ZERO, &mut |_| {}).unwrap();
    let made = backup(&vault, &after, 400);
    assert!(content(&vault, &made.id).unwrap() == new);
}

#[test]
fn a_parent_that_goes_meanwhile_leaves_no_snapshot_hollow() {
    let setting = Setting::new();
    let bytes = disk(&(1..3000).collect::<Vec<_>>());
    let vault = setting.vault();
    let parent = backup(&vault, &source(&bytes, None).0, 100).id;
    // While the second is made, the first is forgotten, and its containers are collected.
    let (differing, read) = source(&bytes, since(&parent, std::slice::from_ref(&(0..1))));
    let collector = setting.vault();
    let mut is_done = false;
    let made = vault.backup_source(&differing, &machine("web"), "host", 200, &mut |_| {
        if !std::mem::replace(&mut is_done, true) {
            collector.forget(std::slice::from_ref(&parent)).unwrap();
            collector.collect(Duration::ZERO, &mut |_| {}).unwrap();
        }
    });
    let made = made.unwrap();
    assert!(content(&vault, &made.id).unwrap() == bytes);
    assert_eq!(made.read_bytes, bytes.len() as u64);
    assert_eq!(read.load(Ordering::Relaxed), SEGMENT + bytes.len() as u64);
    let report = vault.check(Checking::Full, &mut |_, _| {}).unwrap();
    assert_eq!(report.problems, []);
}

/// A collection that was killed leaves its marks for a day, and a container that is lost stays lost.
#[test]
fn a_parent_whose_containers_are_marked_or_lost_is_not_used() {
    for is_lost in [false, true] {
        let setting = Setting::new();
        let bytes = disk(&(1..3000).collect::<Vec<_>>());
        let vault = setting.vault();
        let parent = backup(&vault, &source(&bytes, None).0, 100).id;
        let keys = setting.objects.keys();
        let container = keys.iter().find(|k| k.starts_with("containers/")).unwrap();
        match is_lost {
            true => setting.objects.lose(container),
            false => {
                let id = vault.containers(None).unwrap().iter().next().unwrap().1;
                let mark = crate::names::mark_key(id, SessionId::random());
                let mark = setting.objects.create(&mark, Bytes::from_static(b"mark"));
                assert!(mark.unwrap());
            }
        }
        let (differing, _) = source(&bytes, since(&parent, &[]));
        let made = backup(&vault, &differing, 200);
        assert_eq!(made.read_bytes, bytes.len() as u64);
        assert!(content(&vault, &made.id).unwrap() == bytes);
        // The next goes on from it.
        let (next, _) = source(&bytes, since(&made.id, &[]));
        assert_eq!(backup(&vault, &next, 300).read_bytes, 0);
    }
}

#[test]
fn one_that_goes_on_from_another_is_stopped_at_every_operation() {
    let setting = Setting::new();
    let old: Vec<u32> = (1..1700).collect();
    let vault = setting.vault();
    let one = backup(&vault, &source(&disk(&old), None).0, 100);
    let mut new = old.clone();
    new[600..640].fill(9000);
    new[650] = 9001;
    let bytes = disk(&new);
    let written = 600 * 4096..651 * 4096;
    let (differing, _) = source(&bytes, since(&one.id, std::slice::from_ref(&written)));
    let mut runs = 0;
    for fault in super::crash::FAULTS {
        for at in 0.. {
            let copy = setting.objects.copy();
            let view = copy.with_hook(move |number, _| (number == at).then_some(fault));
            let made = Vault::open_on(Arc::new(view.clone())).and_then(|v| {
                v.backup_source(&differing, &machine("web"), "host", 200, &mut |_| {})
            });
            let what = format!("{fault:?} at {at}");
            let mut wanted = vec![(one.id.clone(), disk(&old))];
            if let Ok(made) = &made {
                wanted.push((made.id.clone(), bytes.clone()));
            }
            super::crash::is_whole(&copy, &wanted, &bytes, &what);
            runs += 1;
            if view.operations() <= at {
                break;
            }
        }
    }
    assert!(runs > 60, "{runs}");
}

#[test]
fn a_set_has_one_time_and_another_host_is_noted() {
    let setting = Setting::new();
    let vault = setting.vault();
    let bytes = disk(&[1, 2, 3]);
    backup(&vault, &source(&bytes, None).0, 500);
    let machines = [machine("db"), machine("web")];
    let (time, note) = vault.time_for(&machines, 100).unwrap();
    assert_eq!(time, 501);
    assert!(note.unwrap().contains("the clock of this host is behind"));
    for of in &machines {
        let (one, _) = source(&bytes, None);
        let made = vault.backup_source(&one, of, "other", time, &mut |_| {});
        let made = made.unwrap();
        assert_eq!(made.id.time, time);
        let is_noted = made
            .notes
            .iter()
            .any(|n| n.contains("on another host, host"));
        assert_eq!(is_noted, of.as_str() == "web", "{:?}", made.notes);
    }
}
