//! Records of moves.

use super::*;

const TOKEN: Token = Token([1; 16]);
const LATER: Token = Token([2; 16]);
const SEED: Seed = Seed([3; 16]);

fn other(n: u8) -> Other {
    Other {
        key: [n; 32],
        name: format!("site{n}"),
    }
}

fn name() -> ImageName {
    ImageName::new("web").unwrap()
}

#[test]
fn a_move_there_and_back() {
    let home = MachineRecord::new(SEED, vec![name()]);
    let leaving = home.leave(TOKEN, other(2)).unwrap();
    assert!(leaving.may_run());
    let none = MachineRecord::foreign(SEED, Generation(0), other(1));
    let coming = none
        .receive(TOKEN, SEED, Generation(0), other(1), vec![name()])
        .unwrap();
    assert!(!coming.may_run() && coming.decision(TOKEN) == Decision::Open);
    let committed = leaving.commit(TOKEN).unwrap();
    assert!(!committed.may_run());
    let there = coming.take(TOKEN).unwrap();
    assert!(there.may_run() && there.decision(TOKEN) == Decision::Taken);
    assert_eq!(there.generation, Generation(1));
    let gone = committed.gone(TOKEN).unwrap();
    assert!(!gone.may_run() && gone.generation == Generation(1));

    assert_eq!(there.leave(LATER, other(1)).unwrap_err().code, Code::Held);
    let there = there.started(TOKEN).unwrap();
    let back = there.leave(LATER, other(1)).unwrap();
    let home = gone
        .receive(LATER, SEED, Generation(1), other(2), vec![name()])
        .unwrap();
    let back = back.commit(LATER).unwrap();
    let home = home.take(LATER).unwrap();
    assert!(home.may_run() && home.generation == Generation(2));
    assert!(!back.gone(LATER).unwrap().may_run());
}

#[test]
fn what_was_taken_in_part_is_not_started_until_it_is_whole() {
    let none = MachineRecord::foreign(SEED, Generation(0), other(1));
    let coming = none
        .receive(TOKEN, SEED, Generation(0), other(1), Vec::new())
        .unwrap();
    let partial = coming.take_part(TOKEN).unwrap();
    assert!(partial.is_partial() && partial.may_run());
    assert_eq!(partial.decision(TOKEN), Decision::Taken);
    assert_eq!(partial.started(TOKEN), None);
    assert_eq!(partial.leave(LATER, other(1)).unwrap_err().code, Code::Held);
    assert_eq!(partial.whole(LATER), None);
    let whole = partial.whole(TOKEN).unwrap();
    assert_eq!(whole, coming.take(TOKEN).unwrap());
    assert!(whole.started(TOKEN).is_some());
}

#[test]
fn a_decision_stands() {
    let none = MachineRecord::foreign(SEED, Generation(0), other(1));
    let coming = none
        .receive(TOKEN, SEED, Generation(0), other(1), vec![name()])
        .unwrap();
    let refused = coming.refuse(TOKEN).unwrap();
    assert_eq!(refused.decision(TOKEN), Decision::Refused);
    assert_eq!((refused.take(TOKEN), refused.refuse(TOKEN)), (None, None));
    let again = refused.receive(TOKEN, SEED, Generation(0), other(1), vec![name()]);
    assert_eq!(again.unwrap_err().code, Code::Denied);
    let coming = refused
        .receive(LATER, SEED, Generation(0), other(1), vec![name()])
        .unwrap();
    let taken = coming.take(LATER).unwrap();
    assert_eq!(taken.decision(LATER), Decision::Taken);
    assert_eq!(taken.refuse(LATER), None);
    assert_eq!(taken.decision(Token([9; 16])), Decision::Unknown);
}

#[test]
fn a_machine_that_never_came_keeps_neither_name_nor_generation() {
    let known = MachineRecord::foreign(SEED, Generation(0), other(1));
    let from = |machine: &MachineRecord, token, seed: u8, at, n| {
        machine.receive(
            token,
            Seed([seed; 16]),
            Generation(at),
            other(n),
            vec![name()],
        )
    };
    // One that says that it has moved for ever so often, and is not taken.
    let liar = from(&known, TOKEN, 3, u64::MAX, 1).unwrap();
    let refused = liar.refuse(TOKEN).unwrap();
    assert_eq!(refused.generation, Generation(0));
    let honest = from(&refused, LATER, 3, 0, 1).unwrap();
    assert_eq!(honest.take(LATER).unwrap().generation, Generation(1));
    // Another machine of that name, after it and from another site.
    let coming = from(&refused, LATER, 4, 0, 2).unwrap();
    assert_eq!(coming.seed, Seed([4; 16]));
    assert_eq!(coming.decision(TOKEN), Decision::Refused, "not forgotten");
    let code = |got: Result<MachineRecord, Refusal>| got.unwrap_err().code;
    let third = Token([5; 16]);
    assert_eq!(code(from(&coming, third, 5, 0, 3)), Code::Held);
    assert_eq!(code(from(&coming, TOKEN, 4, 0, 2)), Code::Denied);
    // The same site begins with a new machine: it has given up the other.
    let newer = from(&coming, third, 5, 0, 2).unwrap();
    assert_eq!(newer.decision(LATER), Decision::Refused);
    // One that came keeps it, also when it has left.
    let here = newer.take(third).unwrap().started(third).unwrap();
    assert_eq!(code(from(&here, Token([6; 16]), 4, 0, 2)), Code::Denied);
    let left = here.leave(LATER, other(2)).unwrap().commit(LATER).unwrap();
    let left = left.gone(LATER).unwrap();
    assert_eq!(code(from(&left, Token([6; 16]), 4, 9, 2)), Code::Denied);
}

#[test]
fn a_peer_that_is_given_another_name_goes_on() {
    let renamed = |n| Other {
        name: "renamed".into(),
        ..other(n)
    };
    let here = MachineRecord::new(SEED, vec![name()]);
    let leaving = here.leave(TOKEN, other(2)).unwrap();
    let committed = leaving.commit(TOKEN).unwrap();
    assert_eq!(committed.leave(LATER, renamed(2)).unwrap(), committed);
    let none = MachineRecord::foreign(SEED, Generation(0), other(1));
    let receive = |machine: &MachineRecord, from| {
        machine.receive(TOKEN, SEED, Generation(0), from, vec![name()])
    };
    let coming = receive(&none, other(1)).unwrap();
    assert_eq!(receive(&coming, renamed(1)).unwrap(), coming);
}

#[test]
fn two_machines_of_one_origin_are_found() {
    let here = MachineRecord::new(SEED, vec![name()]);
    let e = here.receive(TOKEN, SEED, Generation(0), other(2), vec![name()]);
    assert_eq!(e.unwrap_err().code, Code::Held);
    let e = here.receive(TOKEN, Seed([4; 16]), Generation(0), other(2), vec![name()]);
    assert_eq!(e.unwrap_err().code, Code::Denied);
    let old = MachineRecord::foreign(SEED, Generation(5), other(1));
    let e = old.receive(TOKEN, SEED, Generation(4), other(2), vec![name()]);
    assert_eq!(e.unwrap_err().code, Code::Denied);
    let leaving = here.leave(TOKEN, other(2)).unwrap();
    assert_eq!(leaving.leave(LATER, other(3)).unwrap_err().code, Code::Held);
    assert_eq!(leaving.leave(LATER, other(2)).unwrap(), leaving);
    assert_eq!(leaving.commit(LATER), None);
}

#[test]
fn a_record_is_read_back_or_refused() {
    let tmp = tempfile::tempdir().unwrap();
    let machines = Machines::new(tmp.path().join("machines"));
    assert_eq!(machines.load(&name()).unwrap(), None);
    assert!(machines.names().unwrap().is_empty());
    let machine = MachineRecord::new(SEED, vec![name()]);
    machines.store(&name(), &machine).unwrap();
    assert_eq!(machines.load(&name()).unwrap(), Some(machine));
    let lock = machines.lock(&name()).unwrap();
    assert!(lock.is_some() && machines.lock(&name()).unwrap().is_none());
    drop(lock);
    assert!(machines.lock(&name()).unwrap().is_some());
    assert_eq!(machines.names().unwrap(), [name()]);
    let path = tmp.path().join("machines/web");
    let good = std::fs::read(&path).unwrap();
    for at in 0..good.len() {
        let mut bad = good.clone();
        bad[at] ^= 1;
        std::fs::write(&path, &bad).unwrap();
        assert_eq!(machines.load(&name()).unwrap_err().code, Code::Corrupt);
    }
    machines.remove(&name()).unwrap();
    assert_eq!(machines.load(&name()).unwrap(), None);
}

#[test]
fn of_machines_that_never_came_the_last_are_remembered() {
    let tmp = tempfile::tempdir().unwrap();
    let machines = Machines::new(tmp.path().join("disks"));
    let names = |of: &str, n: usize| ImageName::new(format!("{of}-{n:03}")).unwrap();
    let received = |n: u8| {
        let none = MachineRecord::foreign(SEED, Generation(0), other(n));
        let coming = none.receive(TOKEN, SEED, Generation(0), other(n), Vec::new());
        coming.unwrap()
    };
    let refused = received(1).refuse(TOKEN).unwrap();
    let now = SystemTime::now();
    for n in 0..MAX_REFUSED + 10 {
        let name = names("refused", n);
        drop(machines.lock(&name).unwrap());
        let lock = machines.lock(&name).unwrap();
        machines.store(&name, &refused).unwrap();
        drop(lock);
        let file = File::open(machines.directory().join(name.as_str())).unwrap();
        let age = std::time::Duration::from_secs(1000 - n as u64);
        file.set_modified(now - age).unwrap();
    }
    // Those of another site, one that comes, one that is here.
    for (n, record) in [
        (1, received(2).refuse(TOKEN).unwrap()),
        (2, received(1)),
        (3, received(1).take(TOKEN).unwrap()),
    ] {
        machines.store(&names("kept", n), &record).unwrap();
    }
    // One that is in use.
    let used = machines.lock(&names("refused", 4)).unwrap();
    machines.forget_refused().unwrap();
    drop(used);
    let left = machines.names().unwrap();
    assert_eq!(left.len(), 3 + MAX_REFUSED + 1);
    assert_eq!(
        left[..4],
        [
            names("kept", 1),
            names("kept", 2),
            names("kept", 3),
            names("refused", 4)
        ]
    );
    assert_eq!(left[4], names("refused", 10));
    let entries = std::fs::read_dir(machines.directory()).unwrap().count();
    assert_eq!(entries, left.len() + MAX_REFUSED + 1, "a lock is left");
}

#[test]
fn a_lock_that_was_removed_is_nobodys() {
    let tmp = tempfile::tempdir().unwrap();
    let machines = Machines::new(tmp.path().join("disks"));
    let holders = std::sync::atomic::AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..500 {
                    if let Some(lock) = machines.lock(&name()).unwrap() {
                        let others = holders.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
                        assert_eq!(others, 0);
                        holders.fetch_sub(1, std::sync::atomic::Ordering::SeqCst);
                        drop(lock);
                    }
                }
            });
        }
    });
    assert_eq!(std::fs::read_dir(machines.directory()).unwrap().count(), 0);
}
