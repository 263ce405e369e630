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
        covers: 0,
        repeats: false,
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
fn background_reads_wait_as_long_as_chunks_arrive() {
    let at = Duration::from_secs;
    let mut scheduler = linked().with_patience(at(10));
    scheduler.enqueue(background(0, 16)).unwrap();
    let (connection, request, _) = scheduler.select(at(0)).unwrap();
    scheduler.enqueue(background(100, 4)).unwrap();
    scheduler
        .enqueue(Job::read(run(200, 1), false, at(10)))
        .unwrap();
    let reply = |first| ChunksReply {
        id: request.id().unwrap(),
        first,
        count: 1,
        wire: 65_600,
        echo: 0,
        last: false,
    };
    for (first, now) in [(0, 5), (1, 9), (2, 14), (3, 22)] {
        scheduler
            .chunks(connection, &reply(first), at(now))
            .unwrap();
    }
    // What somebody waits for has its own time.
    let (late, _) = scheduler.expire(at(31));
    let late: Vec<_> = late.iter().map(|(job, _)| job.is_background()).collect();
    assert_eq!(late, [false]);
    // Once nothing comes any more, the link is cut.
    let (late, stalled) = scheduler.expire(at(32));
    assert!(stalled && late.len() == 2, "{late:?}");
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

fn direct(request: Request, body: usize) -> Job<()> {
    let body = Bytes::from(vec![1; body]);
    Job::new(request, body, Duration::from_secs(10), ())
}

fn direct_write(offset: u64) -> Job<()> {
    let request = Request::DirectWrite {
        id: 0,
        offset,
        length: 100,
        coding: crate::protocol::Coding::Plain,
    };
    direct(request, 100)
}

fn offset(request: &Request) -> Option<u64> {
    match *request {
        Request::DirectWrite { offset, .. } | Request::DirectTrim { offset, .. } => Some(offset),
        _ => None,
    }
}

#[test]
fn unflushed_changes_are_repeated_in_order_before_anything_else() {
    let shape = Shape {
        size: 1 << 30,
        chunk: 65_536,
    };
    let now = Duration::ZERO;
    let mut scheduler = Scheduler::new(shape, None);
    let up = |scheduler: &mut Scheduler<()>| {
        scheduler.connection_up(0, ConnectionKind::Front);
        scheduler.connection_up(1, ConnectionKind::Push);
    };
    up(&mut scheduler);
    let do_it = |scheduler: &mut Scheduler<()>, job| {
        scheduler.enqueue(job).unwrap();
        let (connection, request, _) = scheduler.select(now).unwrap();
        let id = request.id().unwrap();
        let (job, _) = scheduler.end(connection, id, now).unwrap().unwrap();
        scheduler.done(&job, now);
    };
    do_it(&mut scheduler, direct_write(1000));
    // What was written after the flush was asked for is not covered by it.
    scheduler
        .enqueue(direct(Request::DirectFlush { id: 0 }, 0))
        .unwrap();
    let (_, flush, _) = scheduler.select(now).unwrap();
    do_it(&mut scheduler, direct_write(2000));
    let (flush, _) = scheduler.end(0, flush.id().unwrap(), now).unwrap().unwrap();
    scheduler.done(&flush, now);
    let trim = Request::DirectTrim {
        id: 0,
        offset: 3000,
        length: 5,
    };
    do_it(&mut scheduler, direct(trim, 0));
    do_it(&mut scheduler, direct_write(4000));
    // Not answered when the link is lost; a read waits, too.
    scheduler.enqueue(direct_write(5000)).unwrap();
    scheduler.select(now).unwrap();
    let read = Request::DirectRead {
        id: 0,
        offset: 0,
        length: 10,
    };
    scheduler.enqueue(direct(read, 0)).unwrap();
    for _ in 0..2 {
        // The second time in the middle.
        assert!(scheduler.link_down().is_empty());
        up(&mut scheduler);
        let mut sent = Vec::new();
        while let Some((connection, request, _)) = scheduler.select(now) {
            assert_eq!(connection, 0, "another connection is another order");
            sent.push(request);
        }
        let repeated: Vec<_> = sent.iter().filter_map(offset).collect();
        assert_eq!(repeated, [2000, 3000, 4000]);
        assert_eq!(sent.len(), 3);
        let last = sent.last().unwrap().id().unwrap();
        let (job, _) = scheduler.end(0, last, now).unwrap().unwrap();
        scheduler.done(&job, now);
        assert!(scheduler.select(now).is_none());
    }
    scheduler.link_down();
    up(&mut scheduler);
    for _ in 0..3 {
        let (_, request, _) = scheduler.select(now).unwrap();
        let id = request.id().unwrap();
        let (job, _) = scheduler.end(0, id, now).unwrap().unwrap();
        scheduler.done(&job, now);
    }
    let (connection, request, _) = scheduler.select(now).unwrap();
    assert_eq!((connection, offset(&request)), (1, Some(5000)));
    assert!(matches!(
        scheduler.select(now),
        Some((_, Request::DirectRead { .. }, _))
    ));
    assert_eq!(scheduler.unflushed(), 2 * 100 + 3 * 128);
}

/// A scheduler whose link is up, with a front connection and one for pushes.
fn linked() -> Scheduler<()> {
    let shape = Shape {
        size: 1 << 30,
        chunk: 65_536,
    };
    let mut scheduler = Scheduler::new(shape, None);
    up(&mut scheduler);
    scheduler
}

fn up(scheduler: &mut Scheduler<()>) {
    scheduler.connection_up(0, ConnectionKind::Front);
    scheduler.connection_up(1, ConnectionKind::Push);
}

fn answer(scheduler: &mut Scheduler<()>, connection: usize, request: &Request) {
    let id = request.id().unwrap();
    let ended = scheduler.end(connection, id, Duration::ZERO).unwrap();
    scheduler.done(&ended.unwrap().0, Duration::ZERO);
}

/// The site makes these changes, one after another.
fn make(scheduler: &mut Scheduler<()>, jobs: impl IntoIterator<Item = Job<()>>) {
    for job in jobs {
        scheduler.enqueue(job).unwrap();
        let (connection, request, _) = scheduler.select(Duration::ZERO).unwrap();
        answer(scheduler, connection, &request);
    }
}

fn select_all(scheduler: &mut Scheduler<()>) -> Vec<(usize, Request)> {
    std::iter::from_fn(|| scheduler.select(Duration::ZERO))
        .map(|(connection, request, _)| (connection, request))
        .collect()
}

fn offsets(selected: &[(usize, Request)]) -> Vec<u64> {
    selected
        .iter()
        .filter_map(|(_, request)| offset(request))
        .collect()
}

#[test]
fn a_repeated_change_is_sent_when_those_that_it_overlaps_are_answered() {
    let mut scheduler = linked();
    make(&mut scheduler, [0, 1000, 50, 2000].map(direct_write));
    scheduler.link_down();
    up(&mut scheduler);
    let first = select_all(&mut scheduler);
    assert_eq!(offsets(&first), [0, 1000]);
    assert_eq!(scheduler.select_at(), None, "only a reply helps");
    answer(&mut scheduler, 0, &first[1].1);
    assert!(select_all(&mut scheduler).is_empty());
    answer(&mut scheduler, 0, &first[0].1);
    assert_eq!(offsets(&select_all(&mut scheduler)), [50, 2000]);
}

#[test]
fn nothing_waits_for_the_clock_while_the_link_is_down() {
    let mut scheduler = linked();
    make(&mut scheduler, [direct_write(0)]);
    scheduler.enqueue(direct_write(1000)).unwrap();
    assert!(scheduler.select_at().is_some());
    scheduler.link_down();
    assert_eq!(scheduler.select_at(), None);
    up(&mut scheduler);
    assert!(scheduler.select_at().is_some());
    // The same when nothing is to be repeated.
    let mut scheduler = linked();
    scheduler.link_down();
    scheduler.enqueue(direct_write(0)).unwrap();
    assert_eq!(scheduler.select_at(), None);
}

#[test]
fn what_later_changes_undo_is_not_repeated() {
    let write = |offset, length| {
        let request = Request::DirectWrite {
            id: 0,
            offset,
            length,
            coding: crate::protocol::Coding::Plain,
        };
        direct(request, length as usize)
    };
    let trim = |offset, length| {
        let request = Request::DirectTrim {
            id: 0,
            offset,
            length,
        };
        direct(request, 0)
    };
    let size = 1 << 30;
    let mut scheduler = linked();
    let jobs = [
        // In a block that is trimmed, and in one of which a part is.
        write(8192, 100),
        write(12_288, 50),
        trim(8000, 4500),
        // Covered by two together.
        write(20_000, 100),
        write(20_000, 70),
        write(20_050, 60),
        // Covered but for a byte.
        write(30_000, 100),
        write(30_000, 99),
        // A short block at the end of the device would be trimmed.
        write(size - 10, 10),
        trim(size - 4096, 4096),
    ];
    make(&mut scheduler, jobs);
    scheduler.link_down();
    up(&mut scheduler);
    let mut sent = Vec::new();
    loop {
        let selected = select_all(&mut scheduler);
        if selected.is_empty() {
            break;
        }
        sent.extend(offsets(&selected));
        for (connection, request) in selected {
            answer(&mut scheduler, connection, &request);
        }
    }
    let expected = [12_288, 8000, 20_000, 20_050, 30_000, 30_000, size - 4096];
    assert_eq!(sent, expected);
    // A flush that was asked for before some were left out drops the others.
    make(&mut scheduler, [direct(Request::DirectFlush { id: 0 }, 0)]);
    assert_eq!(scheduler.unflushed(), 0);
}

#[test]
fn what_waits_for_repeated_changes_waits_while_they_go_on() {
    let at = Duration::from_secs;
    let mut scheduler = linked().with_patience(at(20));
    make(&mut scheduler, [0, 1000, 2000, 3000].map(direct_write));
    // Until 10 s.
    scheduler.enqueue(direct_write(4000)).unwrap();
    let reply = |scheduler: &mut Scheduler<()>, request: &Request, now| {
        let id = request.id().unwrap();
        let (job, _) = scheduler.end(0, id, now).unwrap().unwrap();
        scheduler.done(&job, now);
    };
    scheduler.link_down();
    up(&mut scheduler);
    let sent = select_all(&mut scheduler);
    assert_eq!(sent.len(), 4);
    reply(&mut scheduler, &sent[0].1, at(9));
    reply(&mut scheduler, &sent[1].1, at(19));
    assert!(matches!(scheduler.expire(at(38)), (ended, false) if ended.is_empty()));
    // A site that answers nothing any more: the link is cut, and what overtakes nothing stays known.
    assert!(matches!(scheduler.expire(at(39)), (ended, true) if ended.len() == 1));
    assert!(matches!(scheduler.expire(at(40)), (ended, true) if ended.is_empty()));
    assert!(
        scheduler
            .end(0, sent[2].1.id().unwrap(), at(40))
            .unwrap()
            .is_some()
    );
    // Links that are lost before they come as far are no progress.
    scheduler.enqueue(direct_write(4000)).unwrap();
    scheduler.link_down();
    up(&mut scheduler);
    let sent = select_all(&mut scheduler);
    assert_eq!(sent.len(), 4);
    reply(&mut scheduler, &sent[0].1, at(5));
    reply(&mut scheduler, &sent[1].1, at(6));
    assert_eq!(scheduler.expire(at(10)).0.len(), 1);
    scheduler.enqueue(direct_write(4000)).unwrap();
    reply(&mut scheduler, &sent[2].1, at(7));
    assert_eq!(scheduler.expire(at(10)).0.len(), 0);
}
