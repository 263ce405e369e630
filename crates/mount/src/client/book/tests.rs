use super::*;

fn background(first: u64, count: u32) -> Job<()> {
    Job {
        ask: Ask::Read {
            id: 0,
            first,
            count,
            background: true,
        },
        body: Bytes::new(),
        deadline: Duration::from_secs(10),
        again: false,
        to: (),
    }
}

fn run(first: u64, count: u32) -> Chunks {
    Chunks { first, count }
}

#[test]
fn what_was_hurried_along_with_a_neighbour_is_not_asked_for_again() {
    let shape = Shape {
        size: 1 << 30,
        chunk: 65_536,
    };
    let limit = Duration::from_secs(20);
    let mut book = Book::new(shape, None);
    book.lane_up(0, LaneKind::Front);
    // Sent.
    book.ask(background(0, 8)).unwrap();
    assert!(book.select(Duration::ZERO).is_some());
    let (asks, missing) = book.hurry(run(2, 1), limit);
    assert_eq!((asks.len(), missing), (1, vec![]));
    let (asks, missing) = book.hurry(run(3, 7), limit);
    assert_eq!((asks.len(), missing), (0, vec![run(8, 2)]));
    // Not sent yet.
    book.ask(background(100, 8)).unwrap();
    let (asks, missing) = book.hurry(run(100, 1), limit);
    assert_eq!((asks.len(), missing), (0, vec![]));
    let (asks, missing) = book.hurry(run(101, 1), limit);
    assert_eq!((asks.len(), missing), (0, vec![]));
    assert_eq!(book.in_flight(), 16 * 65_536);
}
