//! The end of a broken lease.

use drover_device::backend::MemoryDevice;
use drover_net::Rights;

use super::*;

struct One;

impl Images for One {
    fn allow(&self, _: &ImageName, _: &Peer, _: Access) -> Result<(), Refusal> {
        Ok(())
    }

    fn room(&self, _: &PeerKey, _: u64) -> Result<Room, Refusal> {
        Ok(Box::new(()))
    }

    fn open(&self, _: &ImageName) -> Result<Base, Refusal> {
        Ok(Base {
            device: Arc::new(MemoryDevice::from_bytes(&[0; 8192])),
            digest: Digest([7; 32]),
            arriving: None,
            through: None,
        })
    }
}

#[test]
fn the_end_of_a_broken_lease_takes_nothing_from_the_next_writer() {
    let state = tempfile::tempdir().unwrap();
    let name = ImageName::new("web").unwrap();
    let images: Arc<dyn Images> = Arc::new(One);
    let image = Image::open(&name, &images, state.path()).unwrap();
    let enter = |n: u8| {
        let who = Who {
            peer: Peer {
                key: PeerKey([n; 32]),
                name: format!("site{n}"),
                rights: Rights::DEFAULT.of_peer(),
                domain: "default".into(),
            },
            mount: MountId([n; 16]),
            link: 1,
            note: "disk".into(),
            term: None,
        };
        let entered = image.enter(
            &who,
            Access::ReadWrite,
            None,
            Duration::ZERO,
            &|_| false,
            &|| (),
        );
        entered.unwrap();
        image.begin_link().unwrap();
    };
    let peer = |n| PeerKey([n; 32]);
    let change = |at| [Change::Write(at, vec![9; 4096].into())];
    enter(1);
    image.stage(&peer(1), 5, &change(0)).unwrap();
    image.break_lease(&|_| Some(Loss::Revoked)).unwrap();
    enter(2);
    image.stage(&peer(2), 6, &change(0)).unwrap();
    // The thread that broke the lease has waited until now for the first writer's connections.
    image.abandon_unheld().unwrap();
    image.stage(&peer(2), 6, &change(4096)).unwrap();
    image.commit(6, 8192, peer(2), MountId([2; 16])).unwrap();
    let mut bytes = [0; 8192];
    image.device().read(0, &mut bytes).unwrap();
    assert!(bytes == [9; 8192], "half an epoch counts");
    // Without a next writer the staged epoch is dropped.
    image.stage(&peer(2), 7, &change(0)).unwrap();
    image.break_lease(&|_| Some(Loss::Revoked)).unwrap();
    image.abandon_unheld().unwrap();
    assert_eq!(image.staged(7, 0).0, 0);
}
