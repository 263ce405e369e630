//! What a site answers about moves, without a hypervisor.

use std::os::unix::fs::symlink;

use drover_net::PeerKey;
use drover_net::service::DEFAULT_DOMAIN;
use drover_net::{Right, Rights};
use drover_store::machine::{Decision, Generation, MAX_DISKS, Owner, Seed};

use super::conversation::Conversation;
use super::*;
use crate::protocol::{DiskOffer, Kind, MAX_DEVICE, OpenMove};

struct Home {
    machines: Machines,
    directory: tempfile::TempDir,
    /// Of the disks that were discarded.
    discarded: Mutex<Vec<Vec<ImageName>>>,
    /// What is lost with a source.
    losing: Mutex<Result<u64, Refusal>>,
}

impl Site for Home {
    fn machines(&self) -> &Machines {
        &self.machines
    }

    fn allow<'a>(
        &'a self,
        _: &'a Peer,
        _: &'a ImageName,
        disks: &'a [ImageName],
    ) -> Pending<'a, Result<(), Refusal>> {
        Box::pin(async move {
            let forbidden = disks.iter().any(|disk| disk.as_str() == "another.raw");
            match forbidden {
                true => Err(Refusal::new(Code::Denied, "another's")),
                false => Ok(()),
            }
        })
    }

    fn happened(&self, _: &ImageName, _: &Other, _: Happened<'_>) {}

    fn give_disks<'a>(
        &'a self,
        _: &'a ImageName,
        _: &'a MachineRecord,
        _: Option<&'a Peer>,
    ) -> Pending<'a, ()> {
        Box::pin(async {})
    }

    fn refused(&self, _: &Peer, _: &str, _: &Refusal) {}

    fn hypervisor(&self, _: &ImageName) -> Result<Place, Refusal> {
        Ok(Place::Qmp(self.directory.path().join("no.qmp")))
    }

    fn incoming<'a>(&'a self, _: &'a ImageName) -> Pending<'a, Result<Place, Refusal>> {
        Box::pin(async { panic!("nothing is started") })
    }

    fn open_disks<'a>(
        &'a self,
        _: &'a ImageName,
        record: &'a MachineRecord,
    ) -> Pending<'a, Result<Vec<Served>, Refusal>> {
        assert!(record.may_run(), "nothing is opened");
        Box::pin(async { Ok(Vec::new()) })
    }

    fn lose_rest<'a>(
        &'a self,
        _: &'a ImageName,
        _: &'a MachineRecord,
    ) -> Pending<'a, Result<u64, Refusal>> {
        Box::pin(async { self.losing.lock().clone() })
    }

    fn discard_disks<'a>(
        &'a self,
        _: &'a ImageName,
        record: &'a MachineRecord,
        _: bool,
    ) -> Pending<'a, Result<(), Refusal>> {
        Box::pin(async move {
            self.discarded.lock().push(record.disks.clone());
            Ok(())
        })
    }
}

fn site() -> Arc<Moves<Home>> {
    let directory = tempfile::tempdir().unwrap();
    Moves::new(Arc::new(Home {
        machines: Machines::new(directory.path().join("machines")),
        directory,
        discarded: Mutex::default(),
        losing: Mutex::new(Ok(0)),
    }))
}

fn peer(n: u8) -> Peer {
    Peer {
        key: PeerKey([n; 32]),
        name: format!("site{n}"),
        rights: Rights::of(&[Right::Host]),
        domain: DEFAULT_DOMAIN.into(),
    }
}

fn web() -> ImageName {
    ImageName::new("web").unwrap()
}

fn offer(token: u8, disk: &str) -> Arc<OpenMove> {
    Arc::new(OpenMove {
        kind: Kind::Machine,
        token: Token([token; 16]),
        machine: web(),
        seed: Seed([7; 16]),
        generation: Generation(0),
        disks: vec![DiskOffer {
            image: ImageName::new(disk).unwrap(),
            device: "vd0".into(),
            size: 4096,
            read_only: false,
        }],
        memory_bytes: 1,
        mounted: Vec::new(),
    })
}

#[tokio::test]
async fn an_offer_of_mounted_disks_is_checked() {
    let moves = site();
    let disk = |n: u8| MountedDisk {
        device: "vd1".into(),
        size: 4096,
        site: PeerKey([n; 32]),
        image: web(),
    };
    let of = |kind, mounted: Vec<MountedDisk>| {
        Arc::new(OpenMove {
            kind,
            mounted,
            ..(*offer(1, "web.raw")).clone()
        })
    };
    let long = MountedDisk {
        device: "d".repeat(MAX_DEVICE + 1),
        ..disk(1)
    };
    for bad in [
        of(Kind::Machine, (0..MAX_DISKS as u8).map(disk).collect()),
        of(Kind::Machine, vec![disk(1), disk(1)]),
        of(Kind::Machine, vec![long]),
        of(Kind::Disk, vec![disk(1)]),
    ] {
        let refused = moves.open(&peer(1), bad).await.map(|_| ()).unwrap_err();
        assert_eq!(refused.code, Code::Protocol, "{refused}");
    }
    // This site has no mounts, and says so before anything is copied.
    let offered = of(Kind::Machine, vec![disk(1), disk(2)]);
    let (about, _) = moves.open(&peer(1), offered).await.unwrap();
    let begun = moves.asked(&about, Ask::Begin).await.unwrap().unwrap();
    assert!(begun.why.contains("no mounts"), "{}", begun.why);
}

#[tokio::test]
async fn a_peer_does_not_end_the_move_of_another() {
    let moves = site();
    let (one, answer) = moves.open(&peer(1), offer(1, "web.raw")).await.unwrap();
    assert_eq!(answer.decision, Decision::Open);
    for token in [1, 2] {
        let refused = moves.open(&peer(2), offer(token, "web.raw")).await;
        let code = refused.map(|_| ()).unwrap_err().code;
        assert!(matches!(code, Code::Denied | Code::Held), "{code:?}");
    }
    let begun = moves.asked(&one, Ask::Begin).await.unwrap().unwrap();
    assert_eq!((begun.decision, begun.why.as_str()), (Decision::Open, ""));
    // Its own next conversation takes the place of the first.
    let (two, _) = moves.open(&peer(1), offer(1, "web.raw")).await.unwrap();
    assert_eq!(moves.asked(&one, Ask::Cancel).await.unwrap(), None);
    let cancelled = moves.asked(&two, Ask::Cancel).await.unwrap().unwrap();
    assert_eq!(cancelled.decision, Decision::Refused);
}

#[tokio::test]
async fn memory_may_come_before_a_copy_that_has_begun_is_prepared() {
    let (moves, token) = (site(), Token([1; 16]));
    let early =
        async |moves: &Arc<Moves<Home>>, n: u8| moves.attempt(&peer(n), &web(), token).await.ok();
    assert_eq!(early(&moves, 1).await, None, "nothing comes");
    let (about, _) = moves.open(&peer(1), offer(1, "web.raw")).await.unwrap();
    assert_eq!(early(&moves, 1).await, None, "it has not begun");
    moves.asked(&about, Ask::Begin).await.unwrap();
    let first = early(&moves, 1).await.unwrap();
    assert_eq!(early(&moves, 2).await, None, "it is another's");
    // That of an earlier attempt is not that of a later one.
    moves.asked(&about, Ask::Begin).await.unwrap();
    let second = early(&moves, 1).await.unwrap();
    assert_ne!(first, second);
    let until = async |n: u8, attempt: u64| {
        let (peer, name) = (peer(n), web());
        let until = moves.until_prepared(&peer, &name, token, attempt);
        tokio::time::timeout(10 * PREPARED_POLL, until).await
    };
    assert!(until(1, first).await.unwrap().is_none());
    assert!(until(2, second).await.unwrap().is_none());
    assert!(until(1, second).await.is_err(), "it is waited for");
    // The newest call counts.
    let third = early(&moves, 1).await.unwrap();
    assert!(until(1, second).await.unwrap().is_none());
    let second = third;
    // A seeder that is away is waited for as long as its connection may live.
    for (seconds, waits) in [(1, true), (31, false)] {
        let entry = moves.entry(&web()).unwrap();
        let since = Instant::now().checked_sub(Duration::from_secs(seconds));
        entry.lock().await.as_mut().unwrap().silent = since;
        assert_eq!(until(1, second).await.is_err(), waits);
    }
    let (about, _) = moves.open(&peer(1), offer(1, "web.raw")).await.unwrap();
    assert!(until(1, second).await.is_err(), "it is back");
    moves.asked(&about, Ask::Cancel).await.unwrap();
    assert!(until(1, second).await.unwrap().is_none());
    assert_eq!(early(&moves, 1).await, None, "it is decided");
}

#[tokio::test]
async fn after_the_decision_nothing_is_prepared_and_nothing_discarded() {
    let moves = site();
    let (about, _) = moves.open(&peer(1), offer(1, "web.raw")).await.unwrap();
    moves.asked(&about, Ask::Cancel).await.unwrap();
    let before = moves.site.discarded.lock().len();
    // Nothing is opened or started: the site would panic.
    for ask in [Ask::Prepare, Ask::Begin, Ask::Arrived, Ask::Commit] {
        let answer = moves.asked(&about, ask).await.unwrap().unwrap();
        assert_eq!(answer.decision, Decision::Refused);
    }
    assert_eq!(moves.site.discarded.lock().len(), before);
}

#[tokio::test]
async fn an_image_that_came_meanwhile_and_is_anothers_is_not_opened() {
    let moves = site();
    let refused = moves.open(&peer(1), offer(1, "another.raw")).await;
    assert!(refused.is_err());
    let (about, _) = moves.open(&peer(1), offer(1, "web.raw")).await.unwrap();
    let mut record = moves.site.machines.load(&web()).unwrap().unwrap();
    record.disks = vec![ImageName::new("another.raw").unwrap()];
    let refused = moves.prepare(&about, &record).await;
    assert!(refused.is_err_and(|e| e.code() == Some(Code::Denied)));
}

#[tokio::test]
async fn what_could_not_be_recorded_is_not_answered() {
    let moves = site();
    let (about, _) = moves.open(&peer(1), offer(1, "web.raw")).await.unwrap();
    break_records(&moves);
    assert!(moves.asked(&about, Ask::Cancel).await.is_err());
    mend(&moves);
    let (about, answer) = moves.open(&peer(1), offer(1, "web.raw")).await.unwrap();
    assert_eq!(answer.decision, Decision::Open, "as it is recorded");
    let answer = moves.asked(&about, Ask::Commit).await.unwrap().unwrap();
    assert_eq!(answer.decision, Decision::Refused);
    let known = moves.site.machines.load(&web()).unwrap().unwrap();
    assert_eq!(known.decision(Token([1; 16])), Decision::Refused);
}

/// Nothing can be written there any more, until [`mend`].
fn break_records(moves: &Moves<Home>) {
    let directory = moves.site.machines.directory();
    std::fs::rename(directory, directory.with_extension("aside")).unwrap();
    symlink("/dev/null/none", directory).unwrap();
}

fn mend(moves: &Moves<Home>) {
    let directory = moves.site.machines.directory();
    std::fs::remove_file(directory).unwrap();
    std::fs::rename(directory.with_extension("aside"), directory).unwrap();
}

/// A machine that was taken in part, from the first peer, by the first move.
async fn partial() -> Arc<Moves<Home>> {
    let moves = site();
    let (token, from) = (
        Token([1; 16]),
        Other {
            key: [1; 32],
            name: "site1".into(),
        },
    );
    let unknown = MachineRecord::foreign(Seed([7; 16]), Generation(0), from.clone());
    let coming = unknown.receive(token, Seed([7; 16]), Generation(0), from, Vec::new());
    let partial = coming.unwrap().take_part(token).unwrap();
    moves.site.machines.store(&web(), &partial).unwrap();
    moves.restart().await;
    moves
}

#[tokio::test]
async fn a_source_that_comes_back_is_told_that_its_rest_was_given_up() {
    let token = Token([1; 16]);
    // Its disks are somebody else's since: nobody knows what was lost.
    let revoked = Refusal::new(Code::Held, "the write lease was revoked");
    for (lost, told) in [
        (Ok(4096), Code::Lost),
        (Err(revoked), Code::Lost),
        (Ok(0), Code::OutOfOrder),
    ] {
        let moves = partial().await;
        (*moves.site.losing.lock()).clone_from(&lost);
        let kept = moves.break_off(web()).await.unwrap();
        assert_eq!(kept.lost_bytes, lost.ok());
        let known = moves.site.machines.load(&web()).unwrap().unwrap();
        assert!(known.under_way.is_none(), "{known:?}");
        let to = Other {
            key: [2; 32],
            name: "site2".into(),
        };
        let next = Token([2; 16]);
        let left = known.leave(next, to).unwrap().commit(next).unwrap();
        // It is remembered after a restart, and when the machine has moved on.
        for known in [&known, &left.gone(next).unwrap()] {
            moves.site.machines.store(&web(), known).unwrap();
            let again = Moves::new(Arc::clone(&moves.site));
            for moves in [&moves, &again] {
                let refused = moves.transfer_of(&peer(1), &web(), token).await;
                assert_eq!(refused.map(drop).unwrap_err().code, told);
                let other = moves.transfer_of(&peer(1), &web(), next).await;
                assert_eq!(other.map(drop).unwrap_err().code, Code::OutOfOrder);
            }
        }
    }
}

#[tokio::test]
async fn a_break_that_failed_is_none() {
    let token = Token([1; 16]);
    let moves = partial().await;
    *moves.site.losing.lock() = Err(Refusal::new(Code::Io, "the disk is full"));
    let failed = moves.break_off(web()).await;
    assert_eq!(failed.unwrap_err().code, Code::Io);
    // The list cannot be written.
    *moves.site.losing.lock() = Ok(4096);
    break_records(&moves);
    moves.break_off(web()).await.unwrap_err();
    mend(&moves);
    let file = moves.site.machines.directory().join(".web.broken");
    std::fs::write(&file, "torn").unwrap();
    moves.break_off(web()).await.unwrap_err();
    std::fs::remove_file(&file).unwrap();
    // The source goes on, and brings it all.
    moves.transfer_of(&peer(1), &web(), token).await.unwrap();
    moves.whole(&web(), token).await.unwrap();
}

/// What a crash within a break leaves is a move that goes on, or one that was broken.
#[tokio::test]
async fn a_crash_between_the_steps_of_a_break_is_before_it_or_after_it() {
    let token = Token([1; 16]);
    for step in ["none", "given up", "broken"] {
        // The process that had taken it is gone.
        let site = Arc::clone(&partial().await.site);
        let machines = &site.machines;
        if step != "none" {
            // The first thing that is durable.
            GivenUp::of(machines, &web()).add(token).unwrap();
        }
        if step == "broken" {
            let known = machines.load(&web()).unwrap().unwrap();
            let mut leecher = Leecher::restart(&known, &mut Vec::new()).unwrap();
            let mut actions = Vec::new();
            leecher.handle(Event::Whole, &mut actions);
            machines.store(&web(), leecher.record()).unwrap();
        }
        // The process is killed, and killed again as soon as it has looked.
        for _ in 0..2 {
            let again = Moves::new(Arc::clone(&site));
            again.restart().await;
            let has = GivenUp::of(machines, &web()).has(token).unwrap();
            assert_eq!(has, step == "broken", "{step}");
        }
        // Also where the source is back before the site has looked.
        for looks in [true, false] {
            if !looks && step != "broken" {
                GivenUp::of(machines, &web()).add(token).unwrap();
            }
            let again = Moves::new(Arc::clone(&site));
            if looks {
                again.restart().await;
            }
            let told = again.transfer_of(&peer(1), &web(), token).await;
            match step {
                "broken" => assert_eq!(told.map(drop).unwrap_err().code, Code::Lost),
                _ => drop(told.unwrap()),
            }
            assert_eq!(
                GivenUp::of(machines, &web()).has(token).unwrap(),
                step == "broken"
            );
        }
        if step == "broken" {
            continue;
        }
        // It brings all, and is told so for good, not that something was lost.
        let again = Moves::new(Arc::clone(&site));
        again.transfer_of(&peer(1), &web(), token).await.unwrap();
        again.whole(&web(), token).await.unwrap();
        let known = machines.load(&web()).unwrap().unwrap();
        assert!(!known.is_partial(), "{known:?}");
        let told = Moves::new(Arc::clone(&site));
        let told = told.transfer_of(&peer(1), &web(), token).await;
        assert_eq!(told.map(drop).unwrap_err().code, Code::OutOfOrder);
    }
}

#[tokio::test]
async fn what_has_arrived_is_recorded_when_that_is_possible_again() {
    let (moves, token) = (partial().await, Token([1; 16]));
    moves.transfer_of(&peer(1), &web(), token).await.unwrap();
    break_records(&moves);
    assert!(moves.whole(&web(), token).await.is_err());
    mend(&moves);
    // Its source comes again; others do not.
    let other = moves.transfer_of(&peer(2), &web(), token).await;
    assert_eq!(other.map(drop).unwrap_err().code, Code::OutOfOrder);
    moves.transfer_of(&peer(1), &web(), token).await.unwrap();
    moves.whole(&web(), token).await.unwrap();
    let known = moves.site.machines.load(&web()).unwrap().unwrap();
    assert!(!known.is_partial(), "{known:?}");
}

#[tokio::test]
async fn a_move_of_an_earlier_process_is_discarded_with_its_own_disks() {
    let first = site();
    first.open(&peer(1), offer(1, "web.raw")).await.unwrap();
    let known = first.site.machines.load(&web()).unwrap().unwrap();
    let second = site();
    second.site.machines.store(&web(), &known).unwrap();
    second.open(&peer(1), offer(2, "web-0.raw")).await.unwrap();
    let discarded = second.site.discarded.lock().clone();
    assert_eq!(discarded, std::slice::from_ref(&known.disks));
    // The same move with other disks is not the same.
    let third = site();
    third.site.machines.store(&web(), &known).unwrap();
    let refused = third.open(&peer(1), offer(1, "web-0.raw")).await;
    assert!(refused.is_err());
}

#[tokio::test]
async fn a_person_of_the_site_refuses_a_move() {
    let moves = site();
    assert!(moves.give_up(web()).await.is_err());
    let (about, _) = moves.open(&peer(1), offer(1, "web.raw")).await.unwrap();
    moves.give_up(web()).await.unwrap();
    let answer = moves.asked(&about, Ask::Commit).await.unwrap().unwrap();
    assert_eq!(answer.decision, Decision::Refused);
    // One whose machine was taken, and did not start, before a restart.
    let moves = site();
    let unknown = MachineRecord::foreign(Seed([7; 16]), Generation(0), about.from());
    let coming = unknown.receive(
        Token([1; 16]),
        Seed([7; 16]),
        Generation(0),
        about.from(),
        Vec::new(),
    );
    let taken = coming.unwrap().take(Token([1; 16])).unwrap();
    moves.site.machines.store(&web(), &taken).unwrap();
    moves.restart().await;
    let known = || moves.site.machines.load(&web()).unwrap().unwrap();
    assert!(known().under_way.is_some(), "no QEMU has it");
    moves.give_up(web()).await.unwrap();
    assert_eq!((known().owner, known().under_way), (Owner::Here, None));
}

impl Conversation {
    fn from(&self) -> Other {
        Other {
            key: self.peer.key.0,
            name: self.peer.name.clone(),
        }
    }
}
