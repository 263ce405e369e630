use super::*;

const LIMITS: Limits = Limits {
    reading: 7,
    back: 3,
    reading_one: 5,
    reading_peer: 6,
    changing: 6,
    changing_peer: 5,
    writing: 3,
    syncing: 5,
    syncing_peer: 4,
};

type Job = (Running<u32, u32>, u32);

/// Mounts of as many peers.
struct Mounts(Schedule<u32, u32, u32>);

impl Mounts {
    fn put(&mut self, mount: u32, kind: Kind, job: u32) {
        self.0.put((mount, mount), kind, 0, job);
    }

    fn next_read(&mut self) -> Option<Job> {
        self.0.next_read()
    }

    fn next_change(&mut self) -> Option<Job> {
        self.0.next_change()
    }

    fn done(&mut self, running: Running<u32, u32>) {
        self.0.done(running, Duration::ZERO);
    }
}

fn schedule() -> Mounts {
    Mounts(Schedule::new(LIMITS))
}

#[test]
fn there_is_always_a_thread_for_foreground_work() {
    for threads in 0..20 {
        let limits = Limits::new(threads);
        assert!(limits.back > 0 && limits.back < limits.reading);
        assert!(limits.reading_one < limits.reading && limits.reading_one > limits.back);
        assert!(limits.reading_peer < limits.reading && limits.reading_peer > limits.reading_one);
        assert!(limits.syncing < limits.changing && limits.writing < limits.changing);
        assert!(limits.changing_peer < limits.changing && limits.syncing_peer < limits.syncing);
    }
    assert_eq!(Limits::new(4), LIMITS);
}

#[test]
fn mounts_take_turns_and_a_mounts_jobs_keep_their_order() {
    let mut schedule = schedule();
    for job in 0..4 {
        schedule.put(1, Kind::Front, 10 + job);
    }
    schedule.put(2, Kind::Front, 20);
    schedule.put(3, Kind::Front, 30);
    schedule.put(3, Kind::Front, 31);
    let mut order = Vec::new();
    while let Some((running, job)) = schedule.next_read() {
        schedule.done(running);
        order.push(job);
    }
    assert_eq!(order, [10, 20, 30, 11, 31, 12, 13]);
    assert!(schedule.0.reads.values().all(Reads::is_empty) && schedule.0.reading.is_empty());
    assert!(schedule.0.reading_peers.is_empty());
}

#[test]
fn foreground_work_goes_first_and_background_work_leaves_it_room() {
    let mut schedule = schedule();
    for job in 0..9 {
        schedule.put(job, Kind::Back, job);
    }
    let back: Vec<_> = std::iter::from_fn(|| schedule.next_read()).collect();
    assert_eq!(back.len(), 3);
    schedule.put(1, Kind::Front, 100);
    let (front, job) = schedule.next_read().unwrap();
    assert_eq!((front.kind, job), (Kind::Front, 100));
    schedule.done(front);
    assert_eq!(schedule.next_read(), None);
    schedule.done(back[0].0);
    assert_eq!(schedule.next_read().unwrap().1, 3);
}

#[test]
fn reads_of_one_mount_that_hang_leave_threads_to_the_others() {
    let mut schedule = schedule();
    for job in 0..50 {
        schedule.put(1, Kind::Front, job);
    }
    let hang: Vec<_> = std::iter::from_fn(|| schedule.next_read()).collect();
    assert_eq!(hang.len(), 5);
    schedule.put(2, Kind::Front, 200);
    schedule.put(2, Kind::Back, 201);
    let (read, job) = schedule.next_read().unwrap();
    assert_eq!(job, 200);
    schedule.done(read);
    assert_eq!(schedule.next_read().unwrap().1, 201);
}

#[test]
fn changes_are_one_at_a_time_for_a_mount_and_no_read_waits_for_them() {
    let mut schedule = schedule();
    for job in 0..5 {
        schedule.put(1, Kind::Change, job);
    }
    schedule.put(1, Kind::Sync, 5);
    schedule.put(2, Kind::Change, 20);
    schedule.put(1, Kind::Front, 100);
    let (first, job) = schedule.next_change().unwrap();
    assert_eq!(job, 0);
    assert_eq!(schedule.next_change().unwrap().1, 20);
    assert_eq!(schedule.next_change(), None);
    assert_eq!(schedule.next_read().unwrap().1, 100);
    schedule.done(first);
    for expected in 1..=5 {
        let (running, job) = schedule.next_change().unwrap();
        assert_eq!(job, expected, "in their order");
        schedule.done(running);
    }
}

#[test]
fn writes_of_a_mount_that_have_no_byte_in_common_are_done_at_once_and_a_sync_waits_for_them() {
    let mut schedule = schedule();
    schedule.put(1, Kind::Write(0, 8192), 0);
    schedule.put(1, Kind::Write(8192, 9000), 1);
    schedule.put(1, Kind::Write(4096, 5000), 2);
    schedule.put(1, Kind::Write(20_000, 20_001), 3);
    schedule.put(1, Kind::Sync, 4);
    schedule.put(1, Kind::Write(30_000, 40_000), 5);
    let (first, job) = schedule.next_change().unwrap();
    assert_eq!(job, 0);
    let (second, job) = schedule.next_change().unwrap();
    assert_eq!(job, 1);
    assert_eq!(schedule.next_change(), None, "the third overlaps the first");
    schedule.done(second);
    assert_eq!(schedule.next_change(), None);
    schedule.done(first);
    let (third, job) = schedule.next_change().unwrap();
    assert_eq!(job, 2);
    let (fourth, job) = schedule.next_change().unwrap();
    assert_eq!(job, 3);
    assert_eq!(schedule.next_change(), None, "a sync is alone");
    schedule.done(third);
    assert_eq!(schedule.next_change(), None, "a sync is alone");
    schedule.done(fourth);
    let (sync, job) = schedule.next_change().unwrap();
    assert_eq!(job, 4);
    assert_eq!(schedule.next_change(), None, "nothing overtakes a sync");
    schedule.done(sync);
    assert_eq!(schedule.next_change().unwrap().1, 5);
}

#[test]
fn writes_of_one_mount_that_hang_leave_threads_to_the_others() {
    let mut schedule = schedule();
    for n in 0..50 {
        schedule.put(1, Kind::Write(n * 10, n * 10 + 10), 0);
    }
    let hang: Vec<_> = std::iter::from_fn(|| schedule.next_change()).collect();
    assert_eq!(hang.len(), LIMITS.writing);
    // The others still get one thread each, as before.
    for mount in 2..5 {
        schedule.put(mount, Kind::Write(0, 10), mount);
        schedule.put(mount, Kind::Write(10, 20), mount);
        assert_eq!(schedule.next_change().unwrap().1, mount);
    }
    assert_eq!(schedule.next_change(), None);
}

#[test]
fn syncs_leave_a_thread_for_changes() {
    let mut schedule = schedule();
    for mount in 0..9 {
        schedule.put(mount, Kind::Sync, mount);
    }
    let syncs: Vec<_> = std::iter::from_fn(|| schedule.next_change()).collect();
    assert_eq!(syncs.len(), 5);
    schedule.put(20, Kind::Change, 20);
    assert_eq!(schedule.next_change().unwrap().1, 20);
    schedule.done(syncs[0].0);
    assert_eq!(schedule.next_change().unwrap().1, 5);
}

const SECOND: Duration = Duration::from_secs(1);

/// 60 requests that each take a second, from as many mounts of one peer, and reads of another peer: it waits for what
/// runs, and for no more until it has used as much.
#[test]
fn requests_that_take_long_delay_those_of_their_own_peer_only() {
    let mut schedule = Schedule::new(LIMITS);
    for mount in 0..60 {
        schedule.put((1, mount), Kind::Front, 64, 1000 + mount);
    }
    let slow: Vec<_> = std::iter::from_fn(|| schedule.next_read()).collect();
    assert_eq!(slow.len(), LIMITS.reading_peer, "a thread is left");
    schedule.put((2, 0), Kind::Front, 4096, 2000);
    let (read, job) = schedule.next_read().unwrap();
    assert_eq!(job, 2000);
    schedule.done(read, SECOND / 1000);
    for (running, _) in slow {
        schedule.done(running, SECOND);
    }
    // Six seconds are owed: the other peer has thousands of short reads served before the next of these.
    let mut before = 0;
    loop {
        schedule.put((2, 0), Kind::Front, 4096, 2001);
        let (running, job) = schedule.next_read().unwrap();
        if job != 2001 {
            break;
        }
        schedule.done(running, SECOND / 1000);
        before += 1;
    }
    assert!((5900..=6100).contains(&before), "{before}");
}

#[test]
fn a_peer_gets_no_more_by_many_mounts_nor_by_calling_its_reads_urgent() {
    let mut schedule = Schedule::new(LIMITS);
    for job in 0..100 {
        schedule.put((1, job % 10), Kind::Front, 1 << 20, 1);
        schedule.put((2, 0), Kind::Back, 1 << 20, 2);
    }
    let mut got = [0; 3];
    for _ in 0..100 {
        let (running, job) = schedule.next_read().unwrap();
        schedule.done(running, Duration::ZERO);
        got[job as usize] += 1;
    }
    assert_eq!(got, [0, 50, 50]);
}

#[test]
fn changes_of_one_peer_leave_a_thread_to_the_others() {
    let mut schedule = Schedule::new(LIMITS);
    for mount in 0..50 {
        schedule.put((1, mount), Kind::Sync, 0, 1);
        schedule.put((1, 100 + mount), Kind::Change, 0, 1);
    }
    let hang: Vec<_> = std::iter::from_fn(|| schedule.next_change()).collect();
    assert_eq!(hang.len(), LIMITS.changing_peer);
    schedule.put((2, 0), Kind::Sync, 0, 2);
    assert_eq!(schedule.next_change().unwrap().1, 2);
}
