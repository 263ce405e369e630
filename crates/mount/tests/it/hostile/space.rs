//! Mounts that write to a site whose disk, or their quota, is full.

use drover_core::ImageName;
use drover_mount::server::{Base, Images, Room};
use drover_net::{Peer, PeerKey};

use super::mounts::{Rude, opening};
use super::*;
use crate::util::Shelf;

/// A site that has so much space left.
struct Tight {
    shelf: Arc<Shelf>,
    left: AtomicU64,
}

impl Images for Tight {
    fn allow(&self, name: &ImageName, peer: &Peer, access: Access) -> Result<(), Refusal> {
        self.shelf.allow(name, peer, access)
    }

    fn room(&self, _: &PeerKey, bytes: u64) -> Result<Room, Refusal> {
        let order = Ordering::Relaxed;
        let taken = self
            .left
            .fetch_update(order, order, |left| left.checked_sub(bytes));
        taken.map_err(|_| Refusal::new(Code::NoSpace, "full"))?;
        Ok(Box::new(()))
    }

    fn open(&self, name: &ImageName) -> Result<Base, Refusal> {
        self.shelf.open(name)
    }
}

const BLOCK: u64 = 4096;

#[test]
fn every_change_that_takes_space_asks_for_it() {
    let runtime = runtime();
    let _inside = runtime.enter();
    let tight = Arc::new(Tight {
        shelf: Shelf::with("web", memory(&content(3_000_000, 9))),
        left: AtomicU64::new(0),
    });
    let site = Site::of(tight.clone());
    let near = Near::new(site.server.clone());
    let id = 1;
    let body = vec![5; BLOCK as usize];
    let (coding, length) = (Coding::Plain, BLOCK as u32);
    let write = |offset| Request::DirectWrite {
        id,
        offset,
        length,
        coding,
    };
    let zero = |offset, length, keep_allocated| Request::DirectZero {
        id,
        offset,
        length,
        keep_allocated,
        only_fast: false,
    };
    let trim = |offset, length| Request::DirectTrim { id, offset, length };
    let stage = |epoch| Request::Write {
        id,
        epoch,
        offset: 40 * BLOCK,
        length,
        coding,
    };
    let stage_zero = |epoch| Request::Zero {
        id,
        epoch,
        offset: 41 * BLOCK,
        length: BLOCK,
    };
    let commit = |epoch| Request::Commit {
        id,
        epoch,
        covers: 2 * BLOCK,
    };
    runtime.block_on(async {
        let mut rude = Rude::open(&site, &near, opening(MountId([1; 16]), Access::ReadWrite));
        rude.opened().await;
        let mut say = async |request: &Request| {
            let body: &[u8] = match request {
                Request::DirectWrite { .. } | Request::Write { .. } => &body,
                _ => &[],
            };
            rude.send_request(request, body).await;
            match rude.hear().await.expect("a reply") {
                Reply::Error { refusal, .. } => Err(refusal.code),
                _ => Ok(()),
            }
        };
        let refused = [
            write(0),
            zero(0, BLOCK, true),
            // Edges are written.
            zero(BLOCK + 1, 1, false),
            zero(BLOCK + 1, 1, true),
            // The log grows.
            zero(0, BLOCK, false),
            trim(0, BLOCK),
            stage(1),
            stage_zero(1),
        ];
        for request in &refused {
            assert_eq!(say(request).await, Err(Code::NoSpace), "{request:?}");
        }
        let give = |bytes| tight.left.store(bytes, Ordering::Relaxed);
        give(BLOCK + 100);
        assert_eq!(say(&write(0)).await, Ok(()));
        give(0);
        // What is there already, and what gives space back.
        for request in [
            write(0),
            zero(1, 1, false),
            zero(0, BLOCK, true),
            trim(0, BLOCK),
            trim(0, BLOCK),
        ] {
            assert_eq!(say(&request).await, Ok(()), "{request:?}");
        }
        // Later than those that the plain changes count as.
        give(BLOCK + 200);
        assert_eq!(say(&stage(9)).await, Ok(()));
        assert_eq!(say(&stage_zero(9)).await, Ok(()));
        // The copy takes as much again.
        assert_eq!(say(&commit(9)).await, Err(Code::NoSpace));
        give(BLOCK + 200);
        assert_eq!(say(&commit(9)).await, Ok(()), "it is still staged");
    });
}
