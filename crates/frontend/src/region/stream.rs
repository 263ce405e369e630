//! Detection of sequential access: how far to read ahead of a fault.

/// Readers tracked at a time; the oldest is replaced.
const STREAMS: usize = 16;

/// The sequential readers of the region, most recent last.
///
/// Counts in units. A fault where no reader was expected fetches one unit; a fault where a reader was expected to
/// continue doubles its window, up to a limit. So random faults cost one unit each.
pub(super) struct Streams {
    known: Vec<Stream>,
    longest: usize,
}

#[derive(Clone, Copy)]
struct Stream {
    /// Start of its last fetch.
    from: usize,
    /// End of its last fetch.
    next: usize,
    /// Size of its last fetch.
    window: usize,
}

/// What to fetch for a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Window {
    /// Units to fetch at once, including the faulting one.
    pub(super) now: usize,
    /// Units after those to fetch as read-ahead.
    pub(super) ahead: usize,
}

impl Streams {
    /// At most `longest` units at once; 1 disables tracking.
    pub(super) fn new(longest: usize) -> Self {
        Self {
            known: Vec::with_capacity(STREAMS),
            longest: longest.max(1),
        }
    }

    /// Records a fault at `unit`.
    pub(super) fn fault(&mut self, unit: usize) -> Window {
        if self.longest == 1 {
            return Window { now: 1, ahead: 0 };
        }
        // The last fetch may still be in progress, and threads that share a stream do not fault in order.
        let on_the_way =
            |stream: &Stream| unit > stream.from && unit <= stream.next + stream.window;
        let followed = self.known.iter().rposition(on_the_way);
        let mut stream = match followed {
            Some(index) => {
                let stream = self.known.remove(index);
                let window = (stream.window * 2).min(self.longest);
                Stream { window, ..stream }
            }
            None => Stream {
                from: unit,
                next: unit,
                window: 1,
            },
        };
        let ahead = match followed {
            Some(_) => stream.window,
            None => 0,
        };
        stream.from = unit;
        stream.next = stream.next.max(unit + stream.window + ahead);
        if self.known.len() == STREAMS {
            self.known.remove(0);
        }
        self.known.push(stream);
        Window {
            now: stream.window,
            ahead,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reads on from `from` and returns how many faults that took.
    fn read_on(streams: &mut Streams, from: usize, units: usize) -> usize {
        let (mut at, mut faults) = (from, 0);
        while at < from + units {
            let window = streams.fault(at);
            at += window.now + window.ahead;
            faults += 1;
        }
        faults
    }

    #[test]
    fn who_reads_on_gets_more_each_time() {
        let mut streams = Streams::new(64);
        assert_eq!(streams.fault(100), Window { now: 1, ahead: 0 });
        assert_eq!(streams.fault(101), Window { now: 2, ahead: 2 });
        assert_eq!(streams.fault(105), Window { now: 4, ahead: 4 });
        let faults = read_on(&mut streams, 113, 6400);
        assert!(faults < 60, "{faults}");
        assert_eq!(streams.fault(1 << 20), Window { now: 1, ahead: 0 });
    }

    #[test]
    fn several_readers_are_followed() {
        let mut streams = Streams::new(64);
        let mut at = [0, 1 << 20, 1 << 21];
        for _ in 0..10 {
            for at in &mut at {
                let window = streams.fault(*at);
                *at += window.now + window.ahead;
            }
        }
        for at in at {
            assert_eq!(streams.fault(at).now, 64, "{at}");
        }
    }

    #[test]
    fn random_faults_fetch_little() {
        let mut streams = Streams::new(256);
        let mut random = fastrand::Rng::with_seed(1);
        let fetched: usize = (0..10_000)
            .map(|_| streams.fault(random.usize(0..1 << 24)))
            .map(|window| window.now + window.ahead)
            .sum();
        assert!(fetched < 10_100, "{fetched}");
    }

    #[test]
    fn no_stream_is_followed_without_prefetch() {
        let mut streams = Streams::new(1);
        assert_eq!(read_on(&mut streams, 0, 100), 100);
    }
}
