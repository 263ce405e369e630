use drover_core::Digest;
use drover_net::Rights;

use super::*;

fn who(n: u8) -> Who {
    Who {
        peer: Peer {
            key: PeerKey([n; 32]),
            name: format!("site{n}"),
            rights: Rights::DEFAULT.of_peer(),
            domain: "default".into(),
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

    fn leases(&self) -> LeaseTable {
        let name = ImageName::new("web").unwrap();
        LeaseTable::open(name, self.0.path().join("web")).unwrap()
    }
}

fn state(leases: &LeaseTable, who: &Who, edition: u64, epoch: u64, now: u64) -> (u64, bool) {
    let identity = |edition, epoch| Identity {
        digest: Digest([1; 32]),
        edition,
        epoch,
    };
    leases.edition(who, Some(identity(edition, epoch)), identity(0, now))
}

#[test]
fn one_writes_or_many_read() {
    let place = Place::new();
    let mut leases = place.leases();
    leases
        .enter(&who(1), Access::ReadOnly, at(0), &|_| false)
        .unwrap();
    leases
        .enter(&who(2), Access::ReadOnly, at(0), &|_| false)
        .unwrap();
    let e = leases
        .enter(&who(3), Access::ReadWrite, at(300), &|_| false)
        .unwrap_err();
    assert_eq!(e.code, Code::Held);
    assert!(
        e.message
            .starts_with("web was mounted for reading 5 min ago by site")
            && e.message.contains("; unmount it there"),
        "{e}"
    );
    leases
        .close(who(1).peer.key, who(1).mount, who(1).link)
        .unwrap();
    leases.left(who(2).peer.key, who(2).mount, at(300));
    assert!(
        leases
            .enter(&who(3), Access::ReadWrite, at(359), &|_| false)
            .is_err()
    );
    leases
        .enter(&who(3), Access::ReadWrite, at(360), &|_| false)
        .unwrap();
    for access in [Access::ReadOnly, Access::ReadWrite] {
        let e = leases
            .enter(&who(4), access, at(400), &|_| false)
            .unwrap_err();
        let words = "site3 (disk of a guest) holds the write lease of web, taken a moment ago: ";
        assert!(e.message.starts_with(words), "{e}");
        assert!(e.message.contains("`drover mounts break web`"), "{e}");
    }
}

#[test]
fn a_writer_that_is_gone_keeps_its_lease_until_it_is_closed() {
    let place = Place::new();
    place
        .leases()
        .enter(&who(1), Access::ReadWrite, at(0), &|_| false)
        .unwrap();
    // The site restarts.
    let mut leases = place.leases();
    assert!(
        leases
            .enter(&who(2), Access::ReadWrite, at(9999), &|_| false)
            .is_err()
    );
    leases
        .enter(&who(1), Access::ReadWrite, at(9999), &|_| false)
        .unwrap();
    // Another mount of the same site counts as different.
    let other = Who {
        mount: MountId([9; 16]),
        ..who(1)
    };
    assert!(
        leases
            .enter(&other, Access::ReadWrite, at(9999), &|_| false)
            .is_err()
    );
    leases
        .close(who(2).peer.key, who(2).mount, who(2).link)
        .unwrap();
    assert!(leases.holder().is_some(), "not somebody else's to close");
    leases
        .close(who(1).peer.key, who(1).mount, who(1).link)
        .unwrap();
    let mut leases = place.leases();
    leases
        .enter(&who(2), Access::ReadWrite, at(0), &|_| false)
        .unwrap();
}

#[test]
fn the_holder_of_a_broken_lease_learns_of_it() {
    let place = Place::new();
    let mut leases = place.leases();
    assert_eq!(leases.break_lease(), Ok(None));
    leases
        .enter(&who(1), Access::ReadWrite, at(0), &|_| false)
        .unwrap();
    let had = leases.break_lease().unwrap().unwrap();
    assert_eq!((had.peer, had.peer_name.as_str()), ([1; 32], "site1"));
    let mut leases = place.leases();
    let e = leases
        .enter(&who(1), Access::ReadWrite, at(1), &|_| false)
        .unwrap_err();
    assert_eq!(e.code, Code::Lost, "{e}");
    leases
        .enter(&who(2), Access::ReadWrite, at(1), &|_| false)
        .unwrap();
}

#[test]
fn a_cache_is_valid_until_another_mount_writes() {
    let place = Place::new();
    let mut leases = place.leases();
    let (reader, writer) = (who(1), who(2));
    assert_eq!(state(&leases, &reader, 0, 0, 0), (0, true));
    leases
        .enter(&writer, Access::ReadWrite, at(0), &|_| false)
        .unwrap();
    // Its own cache from before the lease cannot be told from another's.
    assert_eq!(state(&leases, &writer, 0, 0, 0), (1, false));
    // Its own epochs do not make its cache stale, as long as the site has lost none.
    assert_eq!(state(&leases, &writer, 1, 4, 5), (1, true));
    assert_eq!(state(&leases, &writer, 1, 6, 5), (1, false));
    leases
        .close(writer.peer.key, writer.mount, writer.link)
        .unwrap();
    // A connection of the closed link that was still being established.
    let late = leases.enter(&writer, Access::ReadWrite, at(9), &|_| false);
    assert_eq!(late.unwrap_err().code, Code::Unavailable);
    let writer = Who { link: 2, ..writer };
    leases
        .enter(&writer, Access::ReadWrite, at(9), &|_| false)
        .unwrap();
    assert_eq!(state(&leases, &writer, 1, 5, 5), (1, true));
    leases
        .close(writer.peer.key, writer.mount, writer.link)
        .unwrap();
    leases
        .enter(&reader, Access::ReadOnly, at(10), &|_| false)
        .unwrap();
    assert_eq!(state(&leases, &reader, 0, 0, 5), (1, false));
    assert_eq!(state(&leases, &reader, 1, 4, 5), (1, false));
    assert_eq!(state(&leases, &reader, 1, 5, 5), (1, true));
}

#[test]
fn a_damaged_file_is_named_and_not_believed() {
    let place = Place::new();
    place
        .leases()
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
    let e = LeaseTable::open(name, place.0.path().join("web"))
        .err()
        .unwrap();
    assert!(e.message.contains("lease: damaged"), "{e}");
}

#[test]
fn the_site_claims_an_unheld_lease_and_starts_a_new_edition() {
    let place = Place::new();
    let mut leases = place.leases();
    let (reader, writer) = (who(1), who(2));
    let site = Who {
        note: MERGE_NOTE.into(),
        ..who(9)
    };
    let nobody = |_: &_| false;
    leases
        .enter(&reader, Access::ReadOnly, at(0), &nobody)
        .unwrap();
    let e = leases.claim(&site, at(1), &|_| true).unwrap_err();
    assert!(e.code == Code::Held && e.message.contains("site1"), "{e}");
    leases.close(reader.peer.key, reader.mount, 1).unwrap();
    leases
        .enter(&writer, Access::ReadWrite, at(2), &nobody)
        .unwrap();
    let e = leases.claim(&site, at(3), &nobody).unwrap_err();
    assert!(e.code == Code::Held && e.message.contains("site2"), "{e}");
    leases.close(writer.peer.key, writer.mount, 1).unwrap();

    leases.claim(&site, at(4), &nobody).unwrap();
    let mut leases = place.leases();
    assert!(leases.is_held_by(site.peer.key, site.mount));
    assert_eq!(leases.last_writer().unwrap().peer_name, "site2");
    for access in [Access::ReadOnly, Access::ReadWrite] {
        let e = leases.enter(&reader, access, at(5), &nobody).unwrap_err();
        assert!(e.code == Code::Held, "{e}");
        assert!(e.message.contains("is being made part of it"), "{e}");
    }
    // The claim changed nothing.
    assert_eq!(state(&leases, &writer, 1, 5, 5), (1, true));
    leases.renew().unwrap();
    leases.close(site.peer.key, site.mount, 0).unwrap();
    let leases = place.leases();
    assert_eq!(state(&leases, &writer, 1, 5, 5), (2, false));
    assert_eq!((leases.holder(), leases.last_writer()), (None, None));
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

#[test]
fn what_a_crashed_process_left_is_removed_when_the_table_is_opened() {
    let place = Place::new();
    let mut leases = place.leases();
    leases
        .enter(&who(1), Access::ReadWrite, at(0), &|_| false)
        .unwrap();
    let mut dead = std::process::Command::new("true").spawn().unwrap();
    dead.wait().unwrap();
    let left = place.0.path().join(format!("web/.lease.{}", dead.id()));
    std::fs::write(&left, "half a lease").unwrap();
    assert_eq!(place.leases().holder(), leases.holder());
    assert!(!left.exists());
}
