use std::collections::BTreeSet;

use drover_core::Digest;
use drover_net::Rights;
use proptest::prelude::*;

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
        term: None,
    }
}

/// The same with a lease of this term, in seconds.
fn with_term(n: u8, term: u64) -> Who {
    Who {
        term: Some(term),
        ..who(n)
    }
}

fn revoked(_: &Holder) -> Option<Loss> {
    Some(Loss::Revoked)
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
    assert_eq!(leases.break_lease(&revoked), Ok(None));
    leases
        .enter(&who(1), Access::ReadWrite, at(0), &|_| false)
        .unwrap();
    let (had, _) = leases.break_lease(&revoked).unwrap().unwrap();
    assert_eq!((had.peer, had.peer_name.as_str()), ([1; 32], "site1"));
    let mut leases = place.leases();
    let e = leases
        .enter(&who(1), Access::ReadWrite, at(1), &|_| false)
        .unwrap_err();
    assert_eq!(e.code, Code::Lost, "{e}");
    assert!(e.message.contains("was revoked at its site"), "{e}");
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
fn a_lease_with_a_term_is_lost_to_another_mount_when_its_holder_is_gone_for_longer() {
    let place = Place::new();
    let nobody = |_: &_| false;
    let mut leases = place.leases();
    leases
        .enter(&with_term(1, 3600), Access::ReadWrite, at(0), &nobody)
        .unwrap();
    // The site restarts.
    let mut leases = place.leases();
    let e = leases
        .enter(&who(2), Access::ReadOnly, at(1), &nobody)
        .unwrap_err();
    assert_eq!(e.code, Code::Held);
    assert!(e.message.contains("out of contact for 1h"), "{e}");
    let taken = |leases: &mut LeaseTable, gone| {
        let how = |holder: &Holder| holder.loss(at(gone), &who(2));
        leases.break_lease(&how).unwrap()
    };
    assert_eq!(taken(&mut leases, 3599), None);
    let (holder, _) = taken(&mut leases, 3600).unwrap();
    assert_eq!(holder.peer_name, "site1");
    let mut leases = place.leases();
    leases
        .enter(&who(2), Access::ReadWrite, at(2), &nobody)
        .unwrap();
    let e = leases
        .enter(&with_term(1, 3600), Access::ReadWrite, at(3), &nobody)
        .unwrap_err();
    assert_eq!(e.code, Code::Lost, "{e}");
    for words in [
        "the write lease of web ended at 20",
        " UTC, when site2 (disk of a guest) took it",
        "the lease's term, 1h",
        "stays in this mount's cache; discard it",
    ] {
        assert!(e.message.contains(words), "{words:?} is not in {e}");
    }
    // One without a term is kept for ever.
    assert_eq!(taken(&mut leases, u64::MAX), None);
}

#[test]
fn a_holder_may_choose_another_term() {
    let place = Place::new();
    let term = |leases: &LeaseTable| leases.holder().unwrap().term;
    let wants = [None, Some(60), Some(7200), None];
    for wanted in wants {
        let who = Who {
            term: wanted,
            ..who(1)
        };
        let mut leases = place.leases();
        leases
            .enter(&who, Access::ReadWrite, at(0), &|_| false)
            .unwrap();
        let leases = place.leases();
        assert_eq!(term(&leases), wanted);
        assert_eq!(leases.last_edition(), 1, "it is the same writer");
        assert_eq!(leases.last_writer(), leases.holder());
    }
}

#[test]
fn terms_are_said_as_they_are_chosen() {
    for (seconds, text) in [
        (1, "1s"),
        (90, "1m 30s"),
        (3600, "1h"),
        (86_400, "1d"),
        (90_000, "1d 1h"),
        (30 * 86_400, "30d"),
    ] {
        assert_eq!(term_text(seconds), text);
    }
    assert!(!term_text(u64::MAX).is_empty());
}

type Old = ([u8; 32], String, MountId, u64, String);

fn old(holder: &Holder) -> Old {
    let Holder {
        peer,
        peer_name,
        mount,
        since_unix,
        note,
        ..
    } = holder.clone();
    (peer, peer_name, mount, since_unix, note)
}

fn file_of(version: u8, body: &[u8]) -> Vec<u8> {
    let mut bytes = b"DRVRLSE\0".to_vec();
    bytes.extend([version, 0, 0, 0]);
    bytes.extend_from_slice(blake3::hash(body).as_bytes());
    bytes.extend_from_slice(body);
    bytes
}

#[test]
fn leases_of_earlier_versions_are_read_and_have_no_term() {
    let (holder, last) = (who(3).holder(), who(4).holder());
    let writer = Some((holder.peer, holder.mount));
    let lost = vec![(last.peer, last.mount)];
    let body = drover_net::encode(&(4u64, writer, Some(old(&holder)), lost.clone()));
    let first = file::parse(&file_of(1, &body)).unwrap();
    assert_eq!((first.edition, &first.holder), (4, &Some(holder.clone())));
    assert_eq!(first.last, Some(holder.clone()));
    let body = (4u64, writer, Some(old(&holder)), lost, Some(old(&last)));
    let body = drover_net::encode(&body);
    let second = file::parse(&file_of(2, &body)).unwrap();
    let expected = Record {
        edition: 4,
        last_writer: writer,
        holder: Some(holder),
        broken: vec![Broken {
            peer: last.peer,
            mount: last.mount,
            how: Loss::Revoked,
        }],
        last: Some(last),
    };
    assert_eq!(second, expected);
    // It is written in the new one.
    let place = Place::new();
    let directory = place.0.path().join("web");
    std::fs::create_dir(&directory).unwrap();
    std::fs::write(directory.join(file::FILE_NAME), file_of(2, &body)).unwrap();
    place.leases().store_again().unwrap();
    let bytes = std::fs::read(directory.join(file::FILE_NAME)).unwrap();
    assert_eq!(bytes[8], 4);
    assert_eq!(file::parse(&bytes).unwrap(), expected);
    // Version 3 only lacks what can have happened.
    let third = [&bytes[..8], &[3], &bytes[9..]].concat();
    assert_eq!(file::parse(&third).unwrap(), expected);
    assert!(file::parse(&file_of(5, &body)).is_err());
}

#[derive(Clone, Debug)]
enum Step {
    Enter(u8, Option<u64>),
    Close(u8),
    /// Another mount wants it, and the holder has been gone for so long.
    Want(u8, u64),
    Revoke,
    /// The site restarts.
    Restart,
    /// A mount stands by, or does so no more.
    StandBy(u8),
    Leave(u8),
    /// One hands over to another, by this token.
    HandOver(u8, u8, u8),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let term = prop::option::of(1u64..10);
    let step = prop_oneof![
        (1u8..5, term).prop_map(|(n, term)| Step::Enter(n, term)),
        (1u8..5).prop_map(Step::Close),
        (1u8..5, 0u64..12).prop_map(|(n, gone)| Step::Want(n, gone)),
        Just(Step::Revoke),
        Just(Step::Restart),
        (1u8..5).prop_map(Step::StandBy),
        (1u8..5).prop_map(Step::Leave),
        (1u8..5, 1u8..5, 0u8..3).prop_map(|(from, to, token)| Step::HandOver(from, to, token)),
        (1u8..5, 1u8..5, 0u8..3).prop_map(|(from, to, token)| Step::HandOver(from, to, token)),
    ];
    prop::collection::vec(step, 0..60)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// At any time at most one mount holds the lease, its term is the one it asked for last, and who has lost it is told so
    /// ever after.
    #[test]
    fn a_lease_is_lost_only_when_its_term_is_over_it_is_revoked_or_handed_over(steps in steps()) {
        let place = Place::new();
        let mut leases = place.leases();
        let (mut standing, mut done) = (BTreeSet::new(), BTreeSet::new());
        let (mut holder, mut lost): (Option<(u8, Option<u64>)>, Vec<u8>) = (None, Vec::new());
        for (link, step) in steps.into_iter().enumerate() {
            match step {
                Step::Enter(n, term) => {
                    let who = Who { term, link: link as u64 + 1, ..who(n) };
                    let entered = leases.enter(&who, Access::ReadWrite, at(0), &|_| false);
                    let expected = match holder {
                        _ if lost.contains(&n) => Err(Code::Lost),
                        Some((other, _)) if other != n => Err(Code::Held),
                        _ => Ok(()),
                    };
                    if expected.is_ok() {
                        holder = Some((n, term));
                        standing.remove(&n);
                    }
                    prop_assert_eq!(entered.map_err(|e| e.code), expected);
                }
                Step::Close(n) => {
                    leases.close(who(n).peer.key, who(n).mount, link as u64).unwrap();
                    holder = holder.filter(|(other, _)| *other != n);
                    standing.remove(&n);
                }
                Step::Want(n, gone) => {
                    let how = |holder: &Holder| holder.loss(at(gone), &who(n));
                    let broken = leases.break_lease(&how).unwrap().map(|(was, _)| was.peer[0]);
                    let over = holder.filter(|(_, term)| term.is_some_and(|term| gone >= term));
                    prop_assert_eq!(broken, over.map(|(n, _)| n));
                    if let Some((n, _)) = over {
                        holder = None;
                        lost.push(n);
                    }
                }
                Step::Revoke => {
                    leases.break_lease(&revoked).unwrap();
                    lost.extend(holder.take().map(|(n, _)| n));
                }
                Step::Restart => {
                    leases = place.leases();
                    standing.clear();
                }
                Step::StandBy(n) => {
                    let who = Who { link: link as u64 + 1, ..who(n) };
                    let entered = leases.enter(&who, Access::Standby, at(0), &|_| false);
                    prop_assert_eq!(entered.is_ok(), !lost.contains(&n));
                    if entered.is_ok() && holder.is_none_or(|(other, _)| other != n) {
                        standing.insert(n);
                    }
                }
                Step::Leave(n) => {
                    leases.end_standby(who(n).peer.key, who(n).mount, link as u64);
                    standing.remove(&n);
                }
                Step::HandOver(from, to, token) => {
                    let (key, mount) = (who(from).peer.key, who(from).mount);
                    let outcome = leases.hand_over(key, mount, u64::MAX, [token; 16], &who(to));
                    let holds = holder.is_some_and(|(n, _)| n == from);
                    let expected = match () {
                        () if done.contains(&(from, token)) => Ok(()),
                        () if !holds => Err(Code::Lost),
                        () if !standing.contains(&to) => Err(Code::OutOfOrder),
                        () => {
                            (holder, standing) = (Some((to, None)), &standing - &BTreeSet::from([to]));
                            lost.push(from);
                            done.insert((from, token));
                            Ok(())
                        }
                    };
                    prop_assert_eq!(outcome.map_err(|e| e.code), expected);
                }
            }
            let found = leases.holder().map(|holder| (holder.peer[0], holder.term));
            prop_assert_eq!(found, holder);
            let stored = place.leases();
            prop_assert_eq!(stored.holder(), leases.holder(), "it is durable");
        }
    }
}

#[test]
fn nobody_begins_to_stand_by_during_a_merge_and_no_peer_takes_all_places() {
    let place = Place::new();
    let mut leases = place.leases();
    let stand_by = |leases: &mut LeaseTable, peer, mount| {
        let who = Who {
            mount: MountId([mount; 16]),
            ..who(peer)
        };
        let entered = leases.enter(&who, Access::Standby, at(0), &|_| true);
        entered.map_err(|refusal| refusal.code)
    };
    let site = Who {
        note: MERGE_NOTE.into(),
        ..who(9)
    };
    leases.claim(&site, at(0), &|_| false).unwrap();
    assert_eq!(stand_by(&mut leases, 1, 1), Err(Code::Held));
    leases.close(site.peer.key, site.mount, 1).unwrap();
    for mount in 1..=4 {
        assert_eq!(stand_by(&mut leases, 1, mount), Ok(()));
    }
    assert_eq!(stand_by(&mut leases, 1, 5), Err(Code::Busy));
    assert_eq!(stand_by(&mut leases, 1, 4), Ok(()), "again");
    assert_eq!(stand_by(&mut leases, 2, 5), Ok(()));
}

#[test]
fn a_lease_is_not_handed_over_for_a_process_that_another_has_followed() {
    let place = Place::new();
    let mut leases = place.leases();
    let by = |link, n| Who { link, ..who(n) };
    let enter = |leases: &mut LeaseTable, who: &Who, access| {
        leases.enter(who, access, at(0), &|_| false).unwrap();
    };
    enter(&mut leases, &by(5, 1), Access::ReadWrite);
    enter(&mut leases, &by(1, 2), Access::Standby);
    // Its process is killed, and mounted again while the request waits.
    enter(&mut leases, &by(8, 1), Access::ReadWrite);
    let hand_over = |leases: &mut LeaseTable, link| {
        let (key, mount) = (who(1).peer.key, who(1).mount);
        let done = leases.hand_over(key, mount, link, [1; 16], &who(2));
        done.map_err(|refusal| refusal.code)
    };
    assert_eq!(hand_over(&mut leases, 5), Err(Code::Unavailable));
    assert!(leases.is_held_by(who(1).peer.key, who(1).mount));
    assert_eq!(hand_over(&mut leases, 8), Ok(()));
    assert!(leases.is_held_by(who(2).peer.key, who(2).mount));
    // The links of one holder say nothing about the next.
    enter(&mut leases, &by(2, 2), Access::ReadWrite);
    enter(&mut leases, &by(1, 3), Access::Standby);
    let (key, mount) = (who(2).peer.key, who(2).mount);
    leases.hand_over(key, mount, 2, [2; 16], &who(3)).unwrap();
}

#[test]
fn it_is_known_who_handed_the_lease_to_its_holder() {
    let place = Place::new();
    let mut leases = place.leases();
    let enter = |leases: &mut LeaseTable, who: &Who, access| {
        leases.enter(who, access, at(0), &|_| false).unwrap();
    };
    enter(&mut leases, &who(1), Access::ReadWrite);
    assert_eq!(leases.handed_by(), None, "it took it");
    enter(&mut leases, &who(2), Access::Standby);
    let (key, mount) = (who(1).peer.key, who(1).mount);
    leases
        .hand_over(key, mount, u64::MAX, [1; 16], &who(2))
        .unwrap();
    assert_eq!(leases.handed_by(), Some(key));
    let mut leases = place.leases();
    assert_eq!(leases.handed_by(), Some(key), "after a restart");
    // It comes for the lease, and gives it up; another takes it.
    enter(&mut leases, &who(2), Access::ReadWrite);
    assert_eq!(leases.handed_by(), Some(key));
    leases
        .close(who(2).peer.key, who(2).mount, who(2).link)
        .unwrap();
    assert_eq!(leases.handed_by(), None);
    enter(&mut leases, &who(3), Access::ReadWrite);
    assert_eq!(leases.handed_by(), None);
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
