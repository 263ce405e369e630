//! Backups, deletions and collections of several hosts, interleaved: at any operation of one, others run, down to a
//! depth of three. Nothing that was acknowledged is ever hollow.

use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;

use super::*;
use crate::SessionId;

/// What was acknowledged and not forgotten.
type Kept = Vec<(crate::SnapshotId, Vec<u32>)>;

struct World {
    objects: MemoryObjects,
    dir: PathBuf,
    rng: Mutex<fastrand::Rng>,
    kept: Mutex<Kept>,
    /// What is held, whether or not it is forgotten meanwhile.
    held: Mutex<Vec<(crate::Hold, crate::SnapshotId, Vec<u32>)>>,
    counts: Mutex<[u64; 5]>,
    /// How many hosts are interrupted by the one that runs.
    depth: AtomicUsize,
}

impl World {
    fn below(&self, n: usize) -> usize {
        self.rng.lock().usize(..n)
    }

    /// A view of the store on which others run now and then.
    fn view(self: &Arc<Self>, often: usize) -> MemoryObjects {
        let world = self.clone();
        self.objects.with_hook(move |_, _| {
            if world.depth.load(Ordering::Relaxed) < 3 && world.below(often) == 0 {
                world.depth.fetch_add(1, Ordering::Relaxed);
                world.act();
                world.depth.fetch_sub(1, Ordering::Relaxed);
            }
            None
        })
    }

    fn vault(self: &Arc<Self>) -> Vault {
        Vault::open_on(Arc::new(self.view(40))).unwrap()
    }

    /// One host does something.
    fn act(self: &Arc<Self>) {
        let what = self.below(12);
        match what {
            0..4 => self.make(),
            4..6 => self.forget(),
            6 => self.hold(),
            7 => drop({
                let mut held = self.held.lock();
                held.pop()
            }),
            _ => {
                let grace = [Duration::ZERO, Duration::from_secs(60)][self.below(2)];
                self.vault().collect(grace, &mut |_| {}).unwrap();
                self.counts.lock()[2] += 1;
                self.objects.advance(Duration::from_secs(30));
            }
        }
    }

    fn make(self: &Arc<Self>) {
        // Few different blocks, so that snapshots share them, and containers are half dead often.
        let mut blocks: Vec<u32> = {
            let mut rng = self.rng.lock();
            let from = rng.u32(1..300);
            (from..from + rng.u32(1..200))
                .filter(|_| rng.u8(..8) > 0)
                .collect()
        };
        let mut name = format!("m{}", self.below(3));
        let again = self.below(3) == 0;
        if let Some((id, old)) = self.kept.lock().last().filter(|_| again) {
            // As the latest of its machine is, perhaps: taken over as it is.
            name = id.machine.as_str().to_owned();
            blocks.clone_from(old);
        }
        let number = self.below(1 << 40);
        let path = self.dir.join(format!("image-{number}"));
        std::fs::write(&path, disk(&blocks)).unwrap();
        let made = self
            .vault()
            .backup_at(&path, &machine(&name), "host", 1000, &mut |_| {});
        match made {
            Ok(made) => {
                self.kept.lock().push((made.id, blocks));
                self.counts.lock()[0] += 1;
            }
            Err(VaultError::Overtaken(_)) => self.counts.lock()[3] += 1,
            Err(error) => panic!("{error}"),
        }
        std::fs::remove_file(path).unwrap();
    }

    fn forget(self: &Arc<Self>) {
        let chosen = {
            let mut kept = self.kept.lock();
            if kept.is_empty() {
                return;
            }
            let at = self.below(kept.len());
            kept.swap_remove(at)
        };
        match self.vault().forget(std::slice::from_ref(&chosen.0)) {
            Ok(_) => self.counts.lock()[1] += 1,
            Err(VaultError::Held { .. }) => self.kept.lock().push(chosen),
            Err(error) => panic!("{error}"),
        }
    }

    fn hold(self: &Arc<Self>) {
        let chosen = {
            let kept = self.kept.lock();
            if kept.is_empty() {
                return;
            }
            kept[self.below(kept.len())].clone()
        };
        let session = SessionId(self.below(1 << 39) as u64 + 1);
        match self.vault().hold(&chosen.0, session, "a mount") {
            Ok(hold) => {
                self.held.lock().push((hold, chosen.0, chosen.1));
                self.counts.lock()[4] += 1;
            }
            // Forgotten meanwhile.
            Err(VaultError::NoSnapshot { .. }) => {}
            Err(error) => panic!("{error}"),
        }
    }
}

#[test]
fn a_snapshot_that_was_acknowledged_is_never_hollow() {
    let mut total = [0; 5];
    for seed in 0..12 {
        let setting = Setting::new();
        let world = Arc::new(World {
            objects: setting.objects.clone(),
            dir: setting.dir.path().to_path_buf(),
            rng: Mutex::new(fastrand::Rng::with_seed(seed)),
            kept: Mutex::default(),
            held: Mutex::default(),
            counts: Mutex::default(),
            depth: AtomicUsize::new(0),
        });
        // Session numbers are random: a failure is repeated by running the seed often.
        for _ in 0..12 {
            world.act();
            let vault = setting.vault();
            for (id, blocks) in world.kept.lock().iter() {
                let got = content(&vault, id);
                let got = got.unwrap_or_else(|e| panic!("seed {seed}: {id}: {e}"));
                assert!(got == disk(blocks), "seed {seed}: {id}");
            }
            for (_, id, blocks) in world.held.lock().iter() {
                let got = content(&vault, id);
                let got = got.unwrap_or_else(|e| panic!("seed {seed}: {id}, held: {e}"));
                assert!(got == disk(blocks), "seed {seed}: {id}, held");
            }
        }
        let held = std::mem::take(&mut *world.held.lock());
        drop(held);
        let counts = *world.counts.lock();
        total.iter_mut().zip(counts).for_each(|(t, c)| *t += c);
    }
    println!(
        "{} snapshots, {} forgotten, {} collections, {} backups overtaken for good, {} held",
        total[0], total[1], total[2], total[3], total[4]
    );
    assert!(total[0] > 10 && total[1] > 4 && total[2] > 10 && total[4] > 4);
}
