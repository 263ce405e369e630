use drover_core::Digest;
use drover_net::Rights;

use super::*;

fn who(n: u8) -> Who {
    Who {
        peer: Peer {
            key: PeerKey([n; 32]),
            name: format!("site{n}"),
            rights: Rights::PEER,
        },
        mount: MountId([n; 16]),
        link: 1,
        note: "disk of a guest".into(),
    }
}

fn at(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

struct Place(tempfile::TempDir);

impl Place {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn desk(&self) -> Desk {
        let name = ImageName::new("web").unwrap();
        Desk::open(name, self.0.path().join("web")).unwrap()
    }
}

fn state(desk: &Desk, who: &Who, edition: u64, epoch: u64, now: u64) -> (u64, bool) {
    let identity = |edition, epoch| Identity {
        digest: Digest([1; 32]),
        edition,
        epoch,
    };
    desk.edition(who, Some(identity(edition, epoch)), identity(0, now))
}

#[test]
fn one_writes_or_many_read() {
    let place = Place::new();
    let mut desk = place.desk();
    desk.enter(&who(1), Access::ReadOnly, at(0), &|_| false)
        .unwrap();
    desk.enter(&who(2), Access::ReadOnly, at(0), &|_| false)
        .unwrap();
    let e = desk
        .enter(&who(3), Access::ReadWrite, at(300), &|_| false)
        .unwrap_err();
    assert_eq!(e.code, Code::Held);
    assert!(
        e.message
            .starts_with("web was mounted for reading 5 min ago by site")
            && e.message.contains("; unmount it there"),
        "{e}"
    );
    desk.close(who(1).peer.key, who(1).mount, who(1).link)
        .unwrap();
    desk.left(who(2).peer.key, who(2).mount, at(300));
    assert!(
        desk.enter(&who(3), Access::ReadWrite, at(359), &|_| false)
            .is_err()
    );
    desk.enter(&who(3), Access::ReadWrite, at(360), &|_| false)
        .unwrap();
    for access in [Access::ReadOnly, Access::ReadWrite] {
        let e = desk
            .enter(&who(4), access, at(400), &|_| false)
            .unwrap_err();
        let words = "web was mounted for writing a moment ago by site3 (disk of a guest), ";
        assert!(e.message.starts_with(words), "{e}");
        assert!(e.message.contains("`drover mounts break web`"), "{e}");
    }
}

#[test]
fn a_writer_that_is_gone_keeps_its_lease_until_it_is_closed() {
    let place = Place::new();
    place
        .desk()
        .enter(&who(1), Access::ReadWrite, at(0), &|_| false)
        .unwrap();
    // The site starts anew.
    let mut desk = place.desk();
    assert!(
        desk.enter(&who(2), Access::ReadWrite, at(9999), &|_| false)
            .is_err()
    );
    desk.enter(&who(1), Access::ReadWrite, at(9999), &|_| false)
        .unwrap();
    // Another mount of the same site is another mount.
    let other = Who {
        mount: MountId([9; 16]),
        ..who(1)
    };
    assert!(
        desk.enter(&other, Access::ReadWrite, at(9999), &|_| false)
            .is_err()
    );
    desk.close(who(2).peer.key, who(2).mount, who(2).link)
        .unwrap();
    assert!(desk.holder().is_some(), "not somebody else's to close");
    desk.close(who(1).peer.key, who(1).mount, who(1).link)
        .unwrap();
    let mut desk = place.desk();
    desk.enter(&who(2), Access::ReadWrite, at(0), &|_| false)
        .unwrap();
}

#[test]
fn a_broken_lease_is_told_to_who_had_it() {
    let place = Place::new();
    let mut desk = place.desk();
    assert_eq!(desk.break_lease(), Ok(None));
    desk.enter(&who(1), Access::ReadWrite, at(0), &|_| false)
        .unwrap();
    let had = desk.break_lease().unwrap().unwrap();
    assert_eq!((had.peer, had.peer_name.as_str()), ([1; 32], "site1"));
    let mut desk = place.desk();
    let e = desk
        .enter(&who(1), Access::ReadWrite, at(1), &|_| false)
        .unwrap_err();
    assert_eq!(e.code, Code::Lost, "{e}");
    desk.enter(&who(2), Access::ReadWrite, at(1), &|_| false)
        .unwrap();
}

#[test]
fn a_cache_is_good_until_somebody_else_writes() {
    let place = Place::new();
    let mut desk = place.desk();
    let (reader, writer) = (who(1), who(2));
    assert_eq!(state(&desk, &reader, 0, 0, 0), (0, true));
    desk.enter(&writer, Access::ReadWrite, at(0), &|_| false)
        .unwrap();
    // Its own cache of before the lease is not told from another's.
    assert_eq!(state(&desk, &writer, 0, 0, 0), (1, false));
    // Epochs of its own do not make its cache stale, and the site must not have lost any.
    assert_eq!(state(&desk, &writer, 1, 4, 5), (1, true));
    assert_eq!(state(&desk, &writer, 1, 6, 5), (1, false));
    desk.close(writer.peer.key, writer.mount, writer.link)
        .unwrap();
    // A connection of the closed link that was still being opened.
    let late = desk.enter(&writer, Access::ReadWrite, at(9), &|_| false);
    assert_eq!(late.unwrap_err().code, Code::Unavailable);
    let writer = Who { link: 2, ..writer };
    desk.enter(&writer, Access::ReadWrite, at(9), &|_| false)
        .unwrap();
    assert_eq!(state(&desk, &writer, 1, 5, 5), (1, true));
    desk.close(writer.peer.key, writer.mount, writer.link)
        .unwrap();
    desk.enter(&reader, Access::ReadOnly, at(10), &|_| false)
        .unwrap();
    assert_eq!(state(&desk, &reader, 0, 0, 5), (1, false));
    assert_eq!(state(&desk, &reader, 1, 4, 5), (1, false));
    assert_eq!(state(&desk, &reader, 1, 5, 5), (1, true));
}

#[test]
fn a_damaged_file_is_named_and_not_believed() {
    let place = Place::new();
    place
        .desk()
        .enter(&who(1), Access::ReadWrite, at(0), &|_| false)
        .unwrap();
    let path = place.0.path().join("web").join(file::FILE_NAME);
    let good = std::fs::read(&path).unwrap();
    for n in 0..good.len() {
        let mut bad = good.clone();
        bad[n] ^= 4;
        assert!(file::parse(&bad).is_err(), "byte {n}");
        assert!(file::parse(&good[..n]).is_err(), "cut at {n}");
    }
    std::fs::write(&path, &good[1..]).unwrap();
    let name = ImageName::new("web").unwrap();
    let e = Desk::open(name, place.0.path().join("web")).err().unwrap();
    assert!(e.message.contains("lease: damaged"), "{e}");
}

#[test]
fn the_site_claims_what_nobody_has_and_the_next_edition_is_another() {
    let place = Place::new();
    let mut desk = place.desk();
    let (reader, writer) = (who(1), who(2));
    let site = Who {
        note: MERGE_NOTE.into(),
        ..who(9)
    };
    let nobody = |_: &_| false;
    desk.enter(&reader, Access::ReadOnly, at(0), &nobody)
        .unwrap();
    let e = desk.claim(&site, at(1), &|_| true).unwrap_err();
    assert!(e.code == Code::Held && e.message.contains("site1"), "{e}");
    desk.close(reader.peer.key, reader.mount, 1).unwrap();
    desk.enter(&writer, Access::ReadWrite, at(2), &nobody)
        .unwrap();
    let e = desk.claim(&site, at(3), &nobody).unwrap_err();
    assert!(e.code == Code::Held && e.message.contains("site2"), "{e}");
    desk.close(writer.peer.key, writer.mount, 1).unwrap();

    desk.claim(&site, at(4), &nobody).unwrap();
    let mut desk = place.desk();
    assert!(desk.is_held_by(site.peer.key, site.mount));
    assert_eq!(desk.last_writer().unwrap().peer_name, "site2");
    for access in [Access::ReadOnly, Access::ReadWrite] {
        let e = desk.enter(&reader, access, at(5), &nobody).unwrap_err();
        assert!(e.code == Code::Held, "{e}");
        assert!(e.message.contains("is being made part of it"), "{e}");
    }
    // The claim has changed nothing.
    assert_eq!(state(&desk, &writer, 1, 5, 5), (1, true));
    desk.renew().unwrap();
    desk.close(site.peer.key, site.mount, 0).unwrap();
    let desk = place.desk();
    assert_eq!(state(&desk, &writer, 1, 5, 5), (2, false));
    assert_eq!((desk.holder(), desk.last_writer()), (None, None));
}

#[test]
fn a_lease_of_the_first_version_is_read() {
    let holder = who(3).holder();
    let body = drover_net::encode(&(
        4u64,
        Some((holder.peer, holder.mount)),
        Some(holder.clone()),
        Vec::<([u8; 32], MountId)>::new(),
    ));
    let mut bytes = b"DRVRLSE\0\x01\0\0\0".to_vec();
    bytes.extend_from_slice(blake3::hash(&body).as_bytes());
    bytes.extend_from_slice(&body);
    let record = file::parse(&bytes).unwrap();
    assert_eq!((record.edition, &record.holder), (4, &Some(holder.clone())));
    assert_eq!(record.last, Some(holder));
}
