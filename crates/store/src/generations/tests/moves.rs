//! A machine that moves among three sites, with what each of them knows: whatever is skipped, each copy is the disk.

use std::collections::BTreeSet;

use super::*;

const CHUNKS: u64 = 12;
const SIZE: u64 = CHUNKS * CHUNK;

#[derive(Clone, Debug)]
enum Step {
    Write(u64),
    /// To another site, with writes to these chunks after its disk was read, and whether the site is told afterwards.
    Move {
        to: usize,
        late: Vec<u64>,
        told: bool,
    },
    /// The same, given up when the image is there.
    GivenUp(usize),
    /// The site with the machine is killed, and comes back.
    Crash,
    /// A person thaws an old copy, and writes to it.
    Branch(usize, u64),
    /// An old copy is written by another program.
    Foreign(usize, u64),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let chunks = || 0..CHUNKS;
    let moved = (0..3usize, proptest::collection::vec(chunks(), 0..3));
    let step = prop_oneof![
        6 => chunks().prop_map(Step::Write),
        4 => (moved, prop::bool::weighted(0.8)).prop_map(|((to, late), told)| Step::Move { to, late, told }),
        1 => (0..3usize).prop_map(Step::GivenUp),
        1 => Just(Step::Crash),
        1 => (0..3usize, chunks()).prop_map(|(site, chunk)| Step::Branch(site, chunk)),
        1 => (0..3usize, chunks()).prop_map(|(site, chunk)| Step::Foreign(site, chunk)),
    ];
    proptest::collection::vec(step, 1..60)
}

#[derive(Default)]
struct Site {
    directory: FakeDirectory,
    /// The bytes of each chunk of the disk's image here, if there is one.
    disk: Option<Vec<u64>>,
    /// What tells the image from others, and the version of its changes.
    image: u64,
    version: u64,
    open: Option<Generations>,
    /// Chunks that another program wrote: nobody can know.
    foreign: BTreeSet<u64>,
}

impl Site {
    fn contents(&self) -> Contents {
        Contents::new(&self.image.to_le_bytes(), 1, self.version)
    }

    fn open(&self) -> Generations {
        let directory = Arc::new(self.directory.clone());
        Generations::open(directory, SIZE, self.contents()).unwrap()
    }

    fn begin(&mut self) {
        let map = self.open();
        map.begin(self.contents()).unwrap();
        self.open = Some(map);
    }

    fn write(&mut self, chunk: u64, bytes: u64) {
        let map = self.open.as_ref().unwrap();
        drop(map.before_write(chunk * CHUNK, CHUNK).unwrap());
        self.disk.as_mut().unwrap()[chunk as usize] = bytes;
        self.version += 1;
    }

    /// What a disk with these generations differs in from the copy here.
    fn differs(&self, of: &Summary) -> Option<Vec<std::ops::Range<u64>>> {
        self.disk.as_ref()?;
        let directory = Arc::new(self.directory.clone());
        let known = summary(directory, self.contents()).unwrap()?;
        match of.compare(&known) {
            Comparison::Newer { ranges, .. }
            | Comparison::Older { ranges, .. }
            | Comparison::Branch { ranges, .. } => Some(ranges),
            Comparison::Unknown(_) => None,
        }
    }

    /// Receives an image of the disk; how many chunks were not read.
    fn receive(&mut self, from: &Site, image: u64) -> usize {
        let of = from.open.as_ref().unwrap().summary().unwrap();
        let of = Summary::decode(&of.encode()).unwrap();
        let sent = from.disk.clone().unwrap();
        let differs = self.differs(&of);
        let (mut disk, mut kept) = (sent.clone(), 0);
        if let (Some(differs), Some(old)) = (differs, &self.disk) {
            for chunk in 0..CHUNKS as usize {
                let at = chunk as u64 * CHUNK;
                if !differs.iter().any(|range| range.contains(&at)) {
                    disk[chunk] = old[chunk];
                    kept += 1;
                }
            }
        }
        let wrong: BTreeSet<_> = (0..CHUNKS)
            .filter(|chunk| disk[*chunk as usize] != sent[*chunk as usize])
            .collect();
        assert!(wrong.is_subset(&self.foreign), "{wrong:?}");
        // The comparison of the whole disk finds those.
        self.disk = Some(sent);
        self.foreign.clear();
        (self.image, self.version) = (image, 0);
        kept
    }

    /// The machine has left: its changes become part of the image.
    fn leave(&mut self, image: u64) {
        let map = self.open.take().unwrap();
        map.close(self.contents()).unwrap();
        map.freeze(self.contents()).unwrap();
        (self.image, self.version) = (image, 0);
        map.rename(self.contents()).unwrap();
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn what_is_skipped_is_the_disk(steps in steps()) {
        let mut sites: [Site; 3] = Default::default();
        let (mut at, mut bytes) = (0, 1);
        let mut image = 0;
        let mut next = || {
            image += 1;
            image
        };
        sites[0].disk = Some(vec![0; CHUNKS as usize]);
        sites[0].image = next();
        sites[0].begin();
        for step in steps {
            bytes += 1;
            match step {
                Step::Write(chunk) => sites[at].write(chunk, bytes),
                Step::Crash => {
                    // Without any word: the map is that of an open disk.
                    sites[at].open = None;
                    sites[at].begin();
                }
                Step::GivenUp(to) if to != at => {
                    let [here, there] = sites.get_disjoint_mut([at, to]).unwrap();
                    there.receive(here, next());
                }
                Step::Move { to, late, told } if to != at => {
                    let [here, there] = sites.get_disjoint_mut([at, to]).unwrap();
                    there.receive(here, next());
                    there.open().thaw().unwrap();
                    there.begin();
                    for chunk in late {
                        bytes += 1;
                        here.write(chunk, bytes);
                        there.write(chunk, bytes);
                    }
                    here.leave(next());
                    prop_assert_eq!(&here.disk, &there.disk);
                    if told {
                        let left = summary(Arc::new(here.directory.clone()), here.contents());
                        let left = Summary::decode(&left.unwrap().unwrap().encode()).unwrap();
                        prop_assert!(left.over);
                        there.open.as_ref().unwrap().adopt(&left).unwrap();
                    }
                    at = to;
                }
                Step::Branch(site, chunk) if site != at && sites[site].disk.is_some() => {
                    let site = &mut sites[site];
                    site.open().thaw().unwrap();
                    site.begin();
                    site.write(chunk, bytes);
                    let map = site.open.take().unwrap();
                    map.close(site.contents()).unwrap();
                }
                Step::Foreign(site, chunk) if site != at => {
                    let site = &mut sites[site];
                    if let Some(disk) = &mut site.disk {
                        disk[chunk as usize] = bytes;
                        site.foreign.insert(chunk);
                    }
                }
                _ => {}
            }
        }
    }
}

#[test]
fn a_machine_that_is_told_comes_back_for_what_changed() {
    let mut sites: [Site; 3] = Default::default();
    sites[0].disk = Some(vec![0; CHUNKS as usize]);
    sites[0].begin();
    sites[0].write(0, 1);
    let path = [0, 1, 2, 0, 1, 0];
    let mut kept = Vec::new();
    for (n, hop) in path.windows(2).enumerate() {
        let [here, there] = sites.get_disjoint_mut([hop[0], hop[1]]).unwrap();
        kept.push(there.receive(here, 100 + n as u64));
        there.begin();
        here.leave(200 + n as u64);
        let left = summary(Arc::new(here.directory.clone()), here.contents());
        let told = there.open.as_ref().unwrap();
        told.adopt(&left.unwrap().unwrap()).unwrap();
        there.write(1 + n as u64, 7);
    }
    // By two sites home; then there and back.
    assert_eq!(kept, [0, 0, 10, 10, 11]);
}

#[test]
fn what_a_bitmap_recorded_is_newer_than_what_it_is_named_after() {
    let now = |version| Contents::new(b"x", 0, version);
    let open = |directory: &Arc<FakeDirectory>| {
        Generations::open(directory.clone(), 10 * CHUNK + 5, now(0)).unwrap()
    };
    let directory = Arc::new(FakeDirectory::default());
    let old = open(&directory);
    assert_eq!(old.summary().unwrap().bitmap_name(), None, "it is not over");
    old.track().unwrap();
    old.freeze(now(0)).unwrap();
    let old = old.summary().unwrap();
    let name = old.bitmap_name().unwrap();
    let since = |written: &[Range<u64>]| Summary::since(&name, old.size, written).unwrap();
    let ranges = |written: &[Range<u64>]| {
        let since = since(written);
        assert_eq!(Summary::decode(&since.encode()), Ok(since.clone()));
        match since.compare(&old) {
            Comparison::Newer {
                since: Generation(2),
                ranges,
            } => ranges,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(ranges(&[]), []);
    assert_eq!(ranges(&[0..1]), [0..CHUNK]);
    let end = 10 * CHUNK..10 * CHUNK + 5;
    assert_eq!(ranges(&[10 * CHUNK..11 * CHUNK]), [end]);
    let several = [
        CHUNK - 1..CHUNK + 1,
        CHUNK + 5..CHUNK + 6,
        2 * CHUNK..2 * CHUNK + 1,
        5 * CHUNK..6 * CHUNK,
    ];
    assert_eq!(ranges(&several), [0..3 * CHUNK, 5 * CHUNK..6 * CHUNK]);
    // Two that go on from it are branches, and another disk's is none.
    let branches = since(&several).compare(&since(&[0..1]));
    assert!(
        matches!(branches, Comparison::Branch { .. }),
        "{branches:?}"
    );
    let other = Summary::since(&name, 9 * CHUNK, &[]).unwrap();
    assert!(matches!(other.compare(&old), Comparison::Unknown(_)));
    for wrong in [
        "drover-move-1".to_owned(),
        name.replace("drover-", "backup-"),
        name.replace("-2-", "-0-"),
        name.replace("-2-", "--"),
        format!("{name}-1"),
        name[..name.len() - 1].to_owned(),
    ] {
        assert_eq!(Summary::since(&wrong, CHUNK, &[]), None, "{wrong}");
    }
}
