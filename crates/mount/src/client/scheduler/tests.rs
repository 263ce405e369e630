use super::*;

fn background(first: u64, count: u32) -> Job<()> {
    Job::read(run(first, count), true, Duration::from_secs(10))
}

fn run(first: u64, count: u32) -> Chunks {
    Chunks { first, count }
}

#[test]
fn chunks_promoted_along_with_a_neighbour_are_not_requested_again() {
    let shape = Shape {
        size: 1 << 30,
        chunk: 65_536,
    };
    let limit = Duration::from_secs(60);
    let mut scheduler = Scheduler::new(shape, None);
    scheduler.connection_up(0, ConnectionKind::Front);
    // Sent.
    scheduler.enqueue(background(0, 8)).unwrap();
    assert!(scheduler.select(Duration::ZERO).is_some());
    let (requests, missing) = scheduler.hurry(run(2, 1), limit);
    assert_eq!((requests.len(), missing), (1, vec![]));
    let (requests, missing) = scheduler.hurry(run(3, 7), limit);
    assert_eq!((requests.len(), missing), (0, vec![run(8, 2)]));
    // Not sent yet.
    scheduler.enqueue(background(100, 8)).unwrap();
    let (requests, missing) = scheduler.hurry(run(100, 1), limit);
    assert_eq!((requests.len(), missing), (0, vec![]));
    let (requests, missing) = scheduler.hurry(run(101, 1), limit);
    assert_eq!((requests.len(), missing), (0, vec![]));
    assert_eq!(scheduler.in_flight(), 16 * 65_536);
}

fn part(deadline: u64, body: usize) -> Job<()> {
    Job {
        request: Request::Write {
            id: 0,
            epoch: 1 << 32,
            offset: 0,
            length: body as u32,
            coding: crate::protocol::Coding::Plain,
        },
        body: Bytes::from(vec![1; body]),
        deadline: Duration::from_secs(deadline),
        again: false,
        to: (),
    }
}

#[test]
fn an_answered_part_of_an_epoch_gives_those_behind_it_time_and_nothing_else() {
    let shape = Shape {
        size: 1 << 30,
        chunk: 65_536,
    };
    let at = Duration::from_secs;
    let mut scheduler = Scheduler::new(shape, None);
    scheduler.connection_up(0, ConnectionKind::Front);
    scheduler.connection_up(1, ConnectionKind::Push);
    // Two parts in flight, one that waits for room on its connection, zeros behind them, and others' requests.
    scheduler.enqueue(part(10, 16 << 10)).unwrap();
    scheduler.enqueue(part(10, 16 << 10)).unwrap();
    scheduler.enqueue(part(10, 16 << 10)).unwrap();
    scheduler.enqueue(part(90, 0)).unwrap();
    let zero = Request::Zero {
        id: 0,
        epoch: 1 << 32,
        offset: 0,
        length: 1 << 20,
    };
    scheduler
        .enqueue(Job {
            request: zero,
            ..part(10, 0)
        })
        .unwrap();
    let commit = Request::Commit {
        id: 0,
        epoch: 2 << 32,
        covers: 1 << 20,
    };
    scheduler
        .enqueue(Job {
            request: commit,
            ..part(10, 0)
        })
        .unwrap();
    scheduler.enqueue(background(0, 4)).unwrap();
    let mut sent = Vec::new();
    while let Some((connection, request, _)) = scheduler.select(at(0)) {
        sent.push((connection, request));
    }
    let first = sent
        .iter()
        .find_map(|(connection, request)| {
            matches!(request, Request::Write { .. }).then(|| (*connection, request.id().unwrap()))
        })
        .unwrap();
    let waits = |scheduler: &Scheduler<()>| {
        scheduler
            .front
            .iter()
            .filter(|j| !j.body.is_empty())
            .count()
    };
    assert_eq!(waits(&scheduler), 1, "32 KiB of bodies are under way");
    assert!(scheduler.end(first.0, first.1, at(0)).unwrap().is_some());
    scheduler.pushed(at(40));

    // Requests that are not part of an epoch keep their deadlines.
    let (late, stalled) = scheduler.expire(at(10));
    let mut kinds: Vec<_> = late.iter().map(|(job, _)| kind(&job.request)).collect();
    kinds.sort_unstable();
    assert_eq!((kinds, stalled), (vec!["commit", "read"], true));
    assert!(scheduler.expire(at(39)).0.is_empty());
    // The parts get the later deadline, sent or not; a deadline that was later stays.
    let (late, _) = scheduler.expire(at(40));
    let mut kinds: Vec<_> = late.iter().map(|(job, _)| kind(&job.request)).collect();
    kinds.sort_unstable();
    assert_eq!(kinds, ["write", "write", "zero"]);
    scheduler.pushed(at(41));
    assert!(
        scheduler.expire(at(89)).0.is_empty(),
        "never sooner than before"
    );
    assert_eq!(scheduler.expire(at(90)).0.len(), 1);
}

#[test]
fn a_part_is_sent_when_those_before_it_have_arrived() {
    let shape = Shape {
        size: 1 << 30,
        chunk: 65_536,
    };
    let ms = Duration::from_millis;
    let mut scheduler = Scheduler::new(shape, None);
    scheduler.connection_up(0, ConnectionKind::Front);
    scheduler.connection_up(1, ConnectionKind::Push);
    for _ in 0..4 {
        scheduler.enqueue(part(10, 32 << 10)).unwrap();
    }
    // One fills the connection, and reads do not queue behind the others.
    assert!(
        scheduler
            .select(ms(0))
            .is_some_and(|(connection, _, _)| connection == 1)
    );
    scheduler
        .enqueue(Job {
            request: Request::Presence {
                id: 0,
                first: 0,
                count: 1,
            },
            ..part(10, 0)
        })
        .unwrap();
    assert!(
        scheduler
            .select(ms(0))
            .is_some_and(|(connection, _, _)| connection == 0)
    );
    assert!(scheduler.select(ms(0)).is_none());
    scheduler.arrived(1, 32 << 10, 0, ms(10)).unwrap();
    let (_, request, _) = scheduler.select(ms(10)).expect("it has arrived");
    // A repeated or lower report changes nothing; a report beyond what was sent is a violation.
    scheduler.arrived(1, 1 << 10, 0, ms(10)).unwrap();
    let lie = scheduler.arrived(1, (64 << 10) + 1, 0, ms(10));
    assert_eq!(lie.unwrap_err().code, Code::Protocol);
    // A reply acknowledges all body bytes up to its request.
    scheduler.end(1, request.id().unwrap(), ms(20)).unwrap();
    assert!(scheduler.select(ms(20)).is_some());
    assert!(scheduler.link_down().len() == 3, "nothing of them survives");
}

fn kind(request: &Request) -> &'static str {
    match request {
        Request::Write { .. } => "write",
        Request::Zero { .. } => "zero",
        Request::Commit { .. } => "commit",
        Request::Read { .. } => "read",
        _ => "other",
    }
}

#[test]
fn the_backlog_of_a_slow_disk_is_bounded_by_the_requests() {
    let shape = Shape {
        size: 1 << 30,
        chunk: 65_536,
    };
    let mut scheduler = Scheduler::new(shape, Some(drover_net::group::MAX_WINDOW));
    scheduler.connection_up(0, ConnectionKind::Back);
    let mut next = 0;
    let mut came = Vec::new();
    // Every request is answered at once, and the disk accepts nothing.
    while scheduler.room().is_some() {
        scheduler.enqueue(background(next, 1)).unwrap();
        next += 1;
        let (connection, request, _) = scheduler
            .select(Duration::ZERO)
            .expect("room on the connection");
        let reply = ChunksReply {
            id: request.id().unwrap(),
            first: next - 1,
            count: 1,
            wire: 65_600,
            echo: 0,
            last: true,
        };
        let taken = scheduler.chunks(connection, &reply, Duration::from_millis(1));
        assert_eq!(taken.unwrap(), Some(Taken { again: false }));
        came.push(run(next - 1, 1));
    }
    assert_eq!(next * 65_536, MAX_AHEAD);
    assert_eq!(scheduler.in_flight(), 0);
    for run in came {
        scheduler.verified(run);
        assert!(scheduler.room().is_some());
    }
}
