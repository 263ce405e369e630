//! An image whose lease the site itself holds, during a merge of changes.

use drover_core::ImageName;
use drover_mount::server::{Server, WhyBroken};
use drover_net::{Identity, Peer, Rights};
use drover_store::lease::MountId;

use crate::util::{Site, memory, name, runtime};

fn holder(server: &Server, image: &ImageName) -> Option<MountId> {
    let leased = server.leased(image).unwrap()?;
    leased.holder.map(|holder| holder.mount)
}

#[test]
fn what_is_done_for_a_claim_is_done_only_while_it_is_held() {
    let runtime = runtime();
    let _entered = runtime.enter();
    let mut site = Site::with("web", memory(&[1; 8192]));
    let (image, mount) = (name("web"), MountId([5; 16]));
    let peer = Peer {
        key: Identity::generate().key(),
        name: "the site itself".into(),
        rights: Rights::OWNER,
        domain: "default".into(),
    };
    let key = (peer.key, mount);
    let claim = site.server.claim(&image, peer, mount, "a merge").unwrap();
    let other = (key.0, MountId([6; 16]));
    assert_eq!(
        site.server.while_claimed(&image, other, || 1).unwrap(),
        None
    );
    assert_eq!(
        site.server.while_claimed(&image, key, || 1).unwrap(),
        Some(1)
    );
    claim.leave();

    // By what is written down, when the process ended meanwhile.
    site.restart();
    assert_eq!(holder(&site.server, &image), Some(mount));
    assert_eq!(
        site.server.while_claimed(&image, key, || 1).unwrap(),
        Some(1)
    );
    let view = site.server.view(&image).unwrap();
    assert_eq!(
        site.server.while_claimed(&image, key, || 1).unwrap(),
        Some(1)
    );
    drop(view);

    // Revoked while the claim's file is being read again: another mount may have written.
    let broken = site.server.break_lease(&image, WhyBroken::ByUser);
    assert!(runtime.block_on(broken).unwrap().is_some());
    assert_eq!(site.server.while_claimed(&image, key, || 1).unwrap(), None);
    assert_eq!(holder(&site.server, &image), None);
}
