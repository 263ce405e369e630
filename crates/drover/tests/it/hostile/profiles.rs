//! Peers that give profiles of images that are not theirs, or that are none.

use drover_net::service::OutgoingCall;
use drover_net::{Right, Rights};
use drover_store::profile::{FirstRead, MAX_BYTES, Profile};
use drover_teleport::services::PutProfileReply;

use super::rights::{give, two_peers};
use super::*;

/// Gives the site a profile of `a.img`, said to be so long.
async fn put(peer: &Client, said: usize, bytes: &[u8]) -> Result<PutProfileReply, Refusal> {
    let request = PutProfile {
        name: ImageName::new("a.img").unwrap(),
        bytes: said as u32,
    };
    let calling = OutgoingCall::<PutProfile>::start(peer.connect().await, &request).await;
    let mut calling = calling.unwrap();
    // It may have refused already.
    let _ = calling.report(&bytes.to_vec()).await;
    match calling.next().await {
        Ok(service::CallEvent::Reply(reply)) => Ok(reply),
        Err(NetError::Refused(refusal)) => Err(refusal),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_profile_is_taken_from_whoever_may_change_the_image_and_names_blocks_of_it() {
    let world = World::new();
    let (_site, peer) = two_peers(&world);
    let read = |block| FirstRead { block, at_ms: 1 };
    let boot = Profile::without_content(64 * 4096, &[read(3), read(5)]).encode();
    let whole = |bytes: &[u8]| run(put(&peer, bytes.len(), bytes));
    let refused = whole(&boot).unwrap_err();
    assert_eq!(refused.code, Code::Denied, "{refused}");
    give(&world, Rights::of(&[Right::Read, Right::Admin]));
    // Too long, longer than it said, and none.
    let refused = run(put(&peer, MAX_BYTES + 1, b"")).unwrap_err();
    assert_eq!(refused.code, Code::OutOfRange, "{refused}");
    let refused = run(put(&peer, 10, &boot)).unwrap_err();
    assert_eq!(refused.code, Code::Protocol, "{refused}");
    let refused = whole(&[7; 100]).unwrap_err();
    assert_eq!(refused.code, Code::Corrupt, "{refused}");
    assert!(
        refused.message.contains("the profile of a.img"),
        "{refused}"
    );
    // Of another disk: reads outside of the image.
    let outside = Profile::without_content(1 << 40, &[read(1 << 27), read(1000)]).encode();
    assert_eq!(whole(&outside).unwrap().blocks, 0);
    world
        .run("far", &["profile", "a.img"])
        .fails(3, &["no profile"]);
    // One that is in order.
    assert_eq!(whole(&boot).unwrap().boots, 1);
    world.run("far", &["profile", "a.img"]).ok();
    world.run("far", &["verify", "a.img"]).ok();
    // All of it is in the audit log: the boot that was added, and what was refused as a decision.
    let log = world.run("far", &["audit", "--json"]).ok().json();
    let of = |event: &str| {
        let of_event = log.iter().filter(|e| e["event"] == event);
        of_event.cloned().collect::<Vec<_>>()
    };
    let changed = of("profile-changed");
    assert_eq!(changed.len(), 1, "{changed:?}");
    assert_eq!(changed[0]["image"], "a.img");
    assert_eq!(
        (&changed[0]["by"], &changed[0]["bytes"]),
        (&"peer".into(), &8192.into())
    );
    let refused = of("refused");
    assert!(
        refused
            .iter()
            .any(|e| e["request"] == "profile.put" && e["image"] == "a.img"),
        "{refused:?}"
    );
}
