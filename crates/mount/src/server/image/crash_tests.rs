//! The power fails while an image is written: what its disk may hold is recorded in its generations.

use std::path::Path;

use drover_core::Zeroes;
use drover_device::backend::MemoryDevice;
use drover_net::Rights;
use drover_storage::FakeDirectory;
use drover_store::generations::{CHUNK, Generation};

use super::*;

const CHUNKS: u64 = 200;

/// One image, the files of its overlay in memory.
struct OnFake(FakeDirectory);

impl Images for OnFake {
    fn allow(&self, _: &ImageName, _: &Peer, _: Access) -> Result<(), Refusal> {
        Ok(())
    }

    fn room(&self, _: &PeerKey, _: u64) -> Result<Room, Refusal> {
        Ok(Box::new(()))
    }

    fn open(&self, _: &ImageName) -> Result<Base, Refusal> {
        Ok(Base {
            device: Arc::new(MemoryDevice::new(CHUNKS * CHUNK)),
            digest: Digest([7; 32]),
            arriving: None,
            through: None,
        })
    }

    fn overlay(&self, _: &Path) -> std::io::Result<Arc<dyn Directory>> {
        Ok(Arc::new(self.0.clone()))
    }
}

fn who(mount: u8) -> Who {
    Who {
        peer: Peer {
            key: PeerKey([1; 32]),
            name: "lyon".into(),
            rights: Rights::DEFAULT.of_peer(),
            domain: "default".into(),
        },
        mount: MountId([mount; 16]),
        link: 1,
        note: "disk".into(),
        term: None,
    }
}

/// Opens the image for a writer; an error when the power is off.
fn open(fake: &FakeDirectory, state: &Path, mount: u8) -> Result<Image, Refusal> {
    let images: Arc<dyn Images> = Arc::new(OnFake(fake.clone()));
    let image = Image::open(&ImageName::new("web").unwrap(), &images, state)?;
    image.enter(
        &who(mount),
        Access::ReadWrite,
        None,
        Duration::ZERO,
        &|_| false,
        &|| (),
    )?;
    image.begin_link()?;
    Ok(image)
}

#[test]
fn whatever_the_disk_holds_after_a_power_loss_is_recorded() {
    let mut known = 0;
    for seed in 0..150 {
        let mut random = fastrand::Rng::with_seed(seed);
        let state = tempfile::tempdir().unwrap();
        let fake = FakeDirectory::new(512, seed);
        let mut image = open(&fake, state.path(), 1).unwrap();
        let line = image.generations().unwrap().about().seed;
        image.generations().unwrap().track().unwrap();
        fake.cut_power_at(fake.steps() + random.u64(1..120));
        while !fake.is_off() {
            // Blocks are never written with what they had.
            let mut block = vec![0; 4096];
            block.fill_with(|| random.u8(1..));
            let offset = random.u64(..CHUNKS * 256) * 4096;
            let _ = match random.u8(..8) {
                0 => image.device().flush().map_err(refusal_of),
                1 => image.device().write(offset, &block).map_err(refusal_of),
                2 => image.device().trim(offset, 4096).map_err(refusal_of),
                3 => {
                    let zeroes = Zeroes::default();
                    let zeroed = image.device().write_zeroes(offset, 4096, zeroes);
                    zeroed.map_err(refusal_of)
                }
                4 => {
                    // Closed, and opened by a process that starts.
                    let mount = MountId([1; 16]);
                    let _ = image.close(PeerKey([1; 32]), mount, random.u64(..9));
                    drop(image);
                    match open(&fake, state.path(), 2) {
                        Ok(opened) => {
                            image = opened;
                            let _ = image.close(PeerKey([1; 32]), MountId([2; 16]), 1);
                            drop(image);
                            match open(&fake, state.path(), 1) {
                                Ok(opened) => image = opened,
                                Err(_) => break,
                            }
                        }
                        Err(_) => break,
                    }
                    Ok(())
                }
                _ => {
                    let epoch = image.committed() + 1;
                    let (peer, mount) = (PeerKey([1; 32]), MountId([1; 16]));
                    let changes = [Change::Write(offset, block.into())];
                    let staged = image.stage(&peer, epoch, &changes);
                    let committed = staged.and_then(|()| image.commit(epoch, 4096, peer, mount));
                    if random.bool() {
                        image.settle();
                    } else {
                        let _ = image.abandon();
                    }
                    committed
                }
            };
        }
        let crashed = fake.after_crash(seed);
        let name = ImageName::new("web").unwrap();
        let directory = changes::directory(state.path(), &name);
        let mut leases = LeaseTable::open(name, directory).unwrap();
        leases.break_lease(&|_| Some(Loss::Revoked)).unwrap();
        let image = open(&crashed, state.path(), 3)
            .unwrap_or_else(|refusal| panic!("seed {seed}: {refusal:?}"));
        let generations = image.generations().unwrap();
        if generations.about().seed != line {
            // It was not believed, and says nothing.
            continue;
        }
        known += 1;
        // What was written is of the second generation: none was before.
        let newer = generations.newer_than(Generation(1)).unwrap();
        for (changed, _) in image.changes_in(0..CHUNKS * CHUNK) {
            let chunks = changed.start / CHUNK..changed.end.div_ceil(CHUNK);
            for chunk in chunks {
                let is_known = newer.iter().any(|newer| newer.contains(&(chunk * CHUNK)));
                assert!(is_known, "seed {seed}: chunk {chunk}");
            }
        }
    }
    assert!(
        known > 100,
        "a crash loses the generations: only {known} were known"
    );
}
