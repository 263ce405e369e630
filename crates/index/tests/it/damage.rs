//! Files with bit rot, truncated files, and foreign files.

use drover_index::testing::Destination;
use drover_index::{ImageId, Matcher, MatcherConfig, Repair, SEGMENT_SLOTS};
use drover_storage::{Directory, FakeDirectory};

use crate::library::{Image, send};

const FILES: [(u64, u64); 5] = [(1, 300), (2, 5), (3, 290), (4, 77), (5, 400)];

/// Two images with the same files, so that there are sequences, and a snapshot.
fn made(config: MatcherConfig) -> (FakeDirectory, Destination) {
    let storage = FakeDirectory::default();
    let (mut m, _) = Matcher::open(storage.clone(), config).unwrap();
    let mut d = Destination::new();
    for id in [1, 2] {
        let mut c = m.begin(ImageId(id)).unwrap();
        send(&mut m, &mut d, &mut c, &Image::of(&FILES), 256).unwrap();
        m.finish(c).unwrap();
    }
    m.persist().unwrap();
    (storage, d)
}

fn small() -> MatcherConfig {
    MatcherConfig {
        c0_bytes: 96 << 10,
        c1_bytes: 32 << 10,
        c2_bytes: 64 << 10,
        ..MatcherConfig::default()
    }
}

/// Sends a third image; whatever is damaged, the plans keep the rules and reuse is what it claims.
fn resend(storage: &FakeDirectory, d: &Destination) -> (u64, Vec<Repair>) {
    let (mut m, report) = Matcher::open(storage.clone(), small()).unwrap();
    let mut d = d.clone();
    let mut c = m.begin(ImageId(3)).unwrap();
    let a = send(&mut m, &mut d, &mut c, &Image::of(&FILES), 256).unwrap();
    m.finish(c).unwrap();
    assert_eq!(a.refetched, 0, "what is matched was verified");
    let mut repairs = report.repairs;
    repairs.extend(m.take_repairs());
    (a.reused, repairs)
}

#[test]
fn any_byte_of_any_file() {
    let (storage, d) = made(small());
    let n = Image::of(&FILES).digests.len() as u64;
    assert_eq!(resend(&storage, &d), (n, vec![]));
    for name in storage.list().unwrap() {
        let len = storage.bytes(&name).unwrap().len();
        let mut reported = 0;
        let offsets: Vec<usize> = (0..64.min(len))
            .chain((64..len).step_by(len / 40 + 1))
            .collect();
        for &at in &offsets {
            let (storage, d) = made(small());
            storage.edit(&name, |b| b[at] ^= 0x55);
            if name != "caches.snap" {
                // So that everything is read.
                storage.remove("caches.snap").unwrap();
            }
            let (reused, repairs) = resend(&storage, &d);
            reported += usize::from(!repairs.is_empty());
            // One page or one image is lost, not all that is known.
            assert!(reused > n / 2, "{name} byte {at}: {reused} of {n}");
        }
        eprintln!("{name}: {reported} of {} reported", offsets.len());
        assert!(reported * 3 > offsets.len(), "{name}: {reported}");
    }
}

#[test]
fn files_cut_short_emptied_or_missing() {
    let (storage, _) = made(small());
    let n = Image::of(&FILES).digests.len() as u64;
    for name in storage.list().unwrap() {
        for keep in [0, 1, 63, 64, 65, 100, 4096, 5000] {
            let (storage, d) = made(small());
            storage.edit(&name, |b| b.truncate(keep));
            let (reused, _) = resend(&storage, &d);
            assert!(reused > n / 2, "{name} cut to {keep}: {reused}");
        }
        let (storage, d) = made(small());
        storage.remove(&name).unwrap();
        let (reused, _) = resend(&storage, &d);
        assert!(reused > n / 2, "without {name}: {reused}");
    }
}

#[test]
fn files_of_noise_and_files_that_are_none_of_ours() {
    let mut rng = fastrand::Rng::with_seed(5);
    for round in 0..60 {
        let (storage, d) = made(small());
        for name in storage.list().unwrap() {
            storage.edit(&name, |b| match rng.u32(..4) {
                0 => rng.fill(b),
                1 => {
                    let from = rng.usize(..=b.len());
                    rng.fill(&mut b[from..]);
                }
                2 => b.extend((0..200).map(|i| i as u8)),
                _ => {}
            });
        }
        for name in [
            "img-zz.hash",
            "img-00000000000000aa.hash",
            "notes.txt",
            "caches.tmp",
        ] {
            storage.create(name).unwrap().write_at(b"hello", 0).unwrap();
        }
        let (reused, _) = resend(&storage, &d);
        assert!(reused < 10_000, "round {round}");
        assert!(storage.list().unwrap().contains(&"notes.txt".to_owned()));
        assert!(!storage.list().unwrap().contains(&"caches.tmp".to_owned()));
    }
}

#[test]
fn a_damaged_page_of_the_image_is_reported_and_the_rest_is_used() {
    let (storage, d) = made(MatcherConfig {
        min_sequence: u32::MAX,
        ..small()
    });
    storage.edit("img-0000000000000001.hash", |b| b[4096 + 7] ^= 1);
    let (reused, repairs) = resend(&storage, &d);
    let n = Image::of(&FILES).digests.len() as u64;
    assert!(
        reused < n && reused >= n - 2 * SEGMENT_SLOTS,
        "{reused} of {n}"
    );
    assert!(
        repairs.contains(&Repair::ImagePage(ImageId(1), 1)),
        "{repairs:?}"
    );
    assert!(repairs[0].to_string().contains("page 1"));
}

#[test]
fn another_configuration_rebuilds_without_complaint() {
    let (storage, d) = made(small());
    let config = MatcherConfig {
        c0_bytes: 48 << 10,
        sequence_limit: 2,
        ..small()
    };
    let (mut m, report) = Matcher::open(storage, config).unwrap();
    assert!(!report.from_snapshot);
    assert_eq!(report.reindexed, [ImageId(1), ImageId(2)]);
    assert_eq!(report.repairs, [Repair::SequencesRebuilt]);
    let mut d = d.clone();
    let mut c = m.begin(ImageId(3)).unwrap();
    let a = send(&mut m, &mut d, &mut c, &Image::of(&FILES), 256).unwrap();
    assert_eq!((a.literal, a.refetched), (0, 0));
}
