//! Wrong bases, concurrent users, and damaged files.

use std::io;

use super::*;
use drover_storage::Operation;
use drover_storage::chunk_log::ChunkLogError;

fn with(identity: Identity, fake: &FakeDirectory) -> Result<Overlay, OverlayError> {
    let base = Arc::new(MemoryDevice::new(identity.size));
    Overlay::open(Arc::new(fake.clone()), base, identity, Options::default())
}

#[test]
fn an_overlay_of_another_image_is_refused() {
    let fake = FakeDirectory::default();
    with(identity(8 * BLOCK), &fake).unwrap();
    let other = Identity {
        base: Digest([9; 32]),
        name: "db.qcow2".into(),
        ..identity(8 * BLOCK)
    };
    for wrong in [other, identity(9 * BLOCK)] {
        let error = with(wrong.clone(), &fake).err().unwrap();
        assert!(matches!(error, OverlayError::AnotherBase { .. }), "{error}");
        let said = error.to_string();
        for word in ["web.qcow2", "0707070707070707", wrong.name.as_str()] {
            assert!(said.contains(word), "{said}");
        }
    }
    let renamed = Identity {
        name: "web-2.qcow2".into(),
        ..identity(8 * BLOCK)
    };
    assert_eq!(with(renamed, &fake).unwrap().identity().name, "web.qcow2");
}

#[test]
fn a_base_that_is_not_what_it_is_said_to_be_is_refused() {
    let fake = FakeDirectory::default();
    let small = Arc::new(MemoryDevice::new(100));
    let error = Overlay::open(
        Arc::new(fake.clone()),
        small,
        identity(8 * BLOCK),
        Options::default(),
    );
    assert!(matches!(error, Err(OverlayError::UnfitBase { .. })));
    let long = Identity {
        name: "ä".repeat(3000),
        ..identity(BLOCK)
    };
    with(long.clone(), &fake).unwrap();
    let overlay = with(long, &fake).unwrap();
    assert_eq!(overlay.identity().name, "ä".repeat(MAX_NAME / 2));
}

#[test]
fn readers_share_and_writers_do_not() {
    let fake = FakeDirectory::default();
    let base = image(8 * BLOCK);
    let reading = Options {
        read_only: true,
        ..Options::default()
    };
    let open = |options| open_over(Arc::new(fake.clone()), &base, options);
    assert!(matches!(open(reading), Err(OverlayError::Missing { .. })));
    let writer = open(Options::default()).unwrap();
    writer.write(5, &[1; 5000]).unwrap();
    for options in [reading, Options::default()] {
        assert!(matches!(open(options), Err(OverlayError::Busy { .. })));
    }
    writer.flush().unwrap();
    let now = everything(&writer);
    drop(writer);
    let steps = fake.steps();
    let (one, two) = (open(reading).unwrap(), open(reading).unwrap());
    assert!(matches!(
        open(Options::default()),
        Err(OverlayError::Busy { .. })
    ));
    assert!(everything(&one) == now && everything(&two) == now);
    assert!(one.capabilities().read_only && one.changed() == 2 * BLOCK);
    let zeroes = one.write_zeroes(0, 1, Zeroes::default());
    for refused in [one.write(0, &[1]), zeroes, one.trim(0, BLOCK)] {
        assert!(matches!(refused, Err(DeviceError::ReadOnly)), "{refused:?}");
    }
    let staged = one.stage(Epoch(2), &[]);
    assert!(matches!(staged, Err(OverlayError::ReadOnly)));
    one.flush().unwrap();
    drop((one, two));
    assert_eq!(fake.steps(), steps, "reading changed something");
    open(Options::default()).unwrap();
}

/// An overlay with a flushed write and two epochs, and its files.
fn used() -> (FakeDirectory, Vec<u8>, Vec<u8>) {
    let fake = FakeDirectory::default();
    let base = image(8 * BLOCK);
    let overlay = open_fake(&fake, &base).unwrap();
    overlay.write(10, &[3; 5000]).unwrap();
    overlay.flush().unwrap();
    overlay
        .stage(Epoch(2), &[write(4 * BLOCK, 4, BLOCK)])
        .unwrap();
    overlay.commit(Epoch(2)).unwrap();
    let now = everything(&overlay);
    (fake, base, now)
}

#[test]
fn damaged_files_are_errors_that_name_them() {
    let (fake, base, _) = used();
    let states = fake.bytes(STATES).unwrap();
    for at in (0..states.len()).step_by(7) {
        let mut damaged = states.clone();
        damaged[at] ^= 4;
        fake.put(STATES, &damaged);
        if let Err(error) = open_fake(&fake, &base) {
            assert!(error.to_string().contains("fake/states"), "{error}");
            assert!(matches!(error, OverlayError::Log(_)), "{error}");
        }
    }
    fake.put(STATES, b"");
    let error = open_fake(&fake, &base).err().unwrap();
    assert!(
        matches!(error, OverlayError::Log(ChunkLogError::NotALog { .. })),
        "{error}"
    );

    fake.put(STATES, &states);
    let data = fake.bytes(DATA).unwrap();
    fake.put(DATA, &data[..data.len() - 1]);
    let error = open_fake(&fake, &base).err().unwrap();
    assert!(matches!(error, OverlayError::Damaged { .. }), "{error}");
    fake.remove(DATA).unwrap();
    let error = open_fake(&fake, &base).err().unwrap();
    assert!(
        error.to_string().contains("fake/data is damaged"),
        "{error}"
    );
}

#[test]
fn blocks_that_cannot_be_are_damage() {
    let (fake, base, _) = used();
    let header = identity(8 * BLOCK).encode();
    for (first, count, state) in [
        (8, 1, 1),
        (0, 9, 2),
        (u64::MAX, 2, 1),
        (0, 1, 3),
        (u64::MAX, 0, 16),
    ] {
        let mut log = ChunkLog::create(Arc::new(fake.clone()), STATES, &header).unwrap();
        let record = drover_storage::chunk_log::Record {
            first,
            count,
            state,
            mask: 0,
        };
        log.append(&[record]).unwrap();
        log.sync().unwrap();
        let error = open_fake(&fake, &base).err().unwrap();
        assert!(
            matches!(error, OverlayError::Log(ChunkLogError::Corrupt { .. })),
            "{error}"
        );
    }
}

#[test]
fn a_redo_that_was_sealed_is_whole_or_an_error() {
    let (fake, base, now) = used();
    let overlay = open_fake(&fake, &base).unwrap();
    let changes = [write(0, 8, 2 * BLOCK), Change::Zero(5 * BLOCK, BLOCK)];
    overlay.stage(Epoch(3), &changes).unwrap();
    let unsealed = fake.bytes("epoch-3").unwrap();
    overlay.seal(Epoch(3), 3 * BLOCK).unwrap();
    let sealed = fake.bytes("epoch-3").unwrap();
    let after = everything(&overlay);
    drop(overlay);
    let open = |redo: &[u8]| {
        let copy = fake.after_kill();
        copy.put("epoch-3", redo);
        let result = open_fake(&copy, &base);
        if let Ok(overlay) = &result {
            overlay.abandon().unwrap();
            assert!(!copy.list().unwrap().contains(&"epoch-3".to_owned()));
        }
        result
    };
    // Cut anywhere, it never counted.
    for length in (0..sealed.len())
        .step_by(97)
        .chain([unsealed.len(), sealed.len() - 1])
    {
        let overlay = open(&sealed[..length]).unwrap();
        assert!(
            everything(&overlay) == now && overlay.committed() == Epoch(2),
            "{length}"
        );
    }
    // Whole, it counts, and damaged it is not half an epoch.
    let overlay = open(&sealed).unwrap();
    assert!(everything(&overlay) == after && overlay.committed() == Epoch(3));
    let log = 8 * BLOCK_SIZE..unsealed.len();
    for at in (0..2 * BLOCK_SIZE).step_by(61).chain(log) {
        let mut damaged = sealed.clone();
        damaged[at] ^= 1;
        let error = open(&damaged).err().unwrap_or_else(|| panic!("byte {at}"));
        assert!(
            error.to_string().contains("fake/epoch-3 is damaged"),
            "{error}"
        );
    }
    // One that is over: it is in the log.
    let copy = fake.after_kill();
    drop(open_fake(&copy, &base).unwrap());
    copy.put("epoch-3", &sealed);
    copy.put("epoch-1", b"rubbish");
    let overlay = open_fake(&copy, &base).unwrap();
    overlay.write(0, &[1]).unwrap();
    assert!(
        !copy
            .list()
            .unwrap()
            .iter()
            .any(|name| name.starts_with("epoch"))
    );
}

#[test]
fn after_a_failed_sync_nothing_is_said_to_be_durable() {
    let fake = FakeDirectory::default();
    let base = image(8 * BLOCK);
    let overlay = open_fake(&fake, &base).unwrap();
    overlay.write(0, &[1; 100]).unwrap();
    fake.set_faults(|operation, name| {
        (operation == Operation::Sync && name == DATA).then_some(io::ErrorKind::Other)
    });
    assert!(overlay.flush().is_err());
    fake.clear_faults();
    assert!(overlay.flush().is_err() && overlay.write(0, &[1]).is_err());
    let error = overlay.stage(Epoch(1), &[]).unwrap_err();
    assert!(matches!(error, OverlayError::Broken { .. }), "{error}");
    drop(overlay);
    open_fake(&fake, &base).unwrap().write(0, &[1]).unwrap();
}

#[test]
fn a_full_disk_is_reported_and_can_be_cleaned_up() {
    let fake = FakeDirectory::default();
    let base = image(64 * BLOCK);
    let overlay = open_fake(&fake, &base).unwrap();
    overlay.write(0, &[1; 100]).unwrap();
    overlay.flush().unwrap();
    fake.set_capacity(Some(fake.used() + 3 * BLOCK));
    let mut model = everything(&overlay);
    let error = overlay
        .write(4 * BLOCK, &vec![7; 8 * BLOCK_SIZE])
        .unwrap_err();
    assert!(matches!(error, DeviceError::NoSpace(_)), "{error}");
    let now = everything(&overlay);
    let old_or_new = |(nth, (now, before)): (usize, (&u8, &u8))| {
        now == before || (*now == 7 && (4 * BLOCK_SIZE..12 * BLOCK_SIZE).contains(&nth))
    };
    assert!(now.iter().zip(&model).enumerate().all(old_or_new));
    fake.set_capacity(None);
    overlay.write(4 * BLOCK, &vec![7; 8 * BLOCK_SIZE]).unwrap();
    overlay.flush().unwrap();
    model[4 * BLOCK_SIZE..12 * BLOCK_SIZE].fill(7);
    assert!(everything(&open_fake(&fake.after_crash(1), &base).unwrap()) == model);
}
