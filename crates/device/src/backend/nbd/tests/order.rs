//! Many requests in flight: answers in any order, and limits.

use super::*;

/// The bytes at an offset, in the world of these tests.
fn content(offset: u64, length: usize) -> Vec<u8> {
    (offset..).take(length).map(|at| (at / 7) as u8).collect()
}

#[test]
fn answers_in_any_order_and_in_pieces_reach_their_requests() {
    const COUNT: usize = 60;
    let played = Played::with(|mut stream| {
        for _ in 0..4 {
            let mut asked: Vec<_> = (0..COUNT).map(|_| request(&mut stream).0).collect();
            asked.reverse();
            // The first halves of all, then the second ones in another order.
            for request in &asked {
                let half = request.length as usize / 2;
                let at = request.offset + half as u64;
                let data = content(at, request.length as usize - half);
                let out = data_of(request.cookie, at, &data, false);
                stream.write_all(&out).unwrap();
            }
            fastrand::Rng::with_seed(1).shuffle(&mut asked);
            for request in &asked {
                let data = content(request.offset, request.length as usize / 2);
                let out = data_of(request.cookie, request.offset, &data, true);
                stream.write_all(&out).unwrap();
            }
        }
    });
    let device = played.open(20_000);
    std::thread::scope(|scope| {
        for thread in 0..COUNT as u64 {
            let device = &device;
            scope.spawn(move || {
                for round in 0..4 {
                    let offset = thread * 5000 + round * 13;
                    let mut buffer = vec![0; 4000 + thread as usize];
                    device.read(offset, &mut buffer).unwrap();
                    assert!(buffer == content(offset, buffer.len()), "{thread}, {round}");
                }
            });
        }
    });
    drop(device);
    played.end();
}

#[test]
fn holes_read_as_zeros() {
    let played = Played::with(|mut stream| {
        let cookie = request(&mut stream).0.cookie;
        let mut out = hole_of(cookie, 4096, 4096, false);
        out.extend(data_of(cookie, 0, &[7; 4096], false));
        out.extend(hole_of(cookie, 8192, 100, false));
        out.extend(chunk_of(cookie, chunk::NONE, true, &[]));
        stream.write_all(&out).unwrap();
    });
    let device = played.open(5000);
    let mut buffer = vec![9; 8292];
    device.read(0, &mut buffer).unwrap();
    assert!(buffer[..4096] == [7; 4096] && buffer[4096..].iter().all(|b| *b == 0));
    played.end();
}

#[test]
fn requests_and_their_bytes_in_flight_have_a_limit() {
    let (big, small) = (1 << 20, 512);
    for (length, most) in [(big, 64), (small, 128)] {
        let (told, heard) = std::sync::mpsc::channel();
        let played = Played::with(move |mut stream| {
            let first: Vec<_> = (0..most).map(|_| request(&mut stream).0).collect();
            // No more until some are answered.
            stream
                .set_read_timeout(Some(Duration::from_millis(200)))
                .unwrap();
            told.send(stream.read(&mut [0]).is_err()).unwrap();
            stream.set_read_timeout(None).unwrap();
            for of in first {
                let out = hole_of(of.cookie, of.offset, of.length, true);
                stream.write_all(&out).unwrap();
            }
            for _ in most..200 {
                let of = request(&mut stream).0;
                let out = hole_of(of.cookie, of.offset, of.length, true);
                stream.write_all(&out).unwrap();
            }
        });
        let device = played.open(20_000);
        std::thread::scope(|scope| {
            for _ in 0..200 {
                scope.spawn(|| device.read(0, &mut vec![1; length]).unwrap());
            }
        });
        assert!(heard.recv().unwrap(), "more than {most} of {length} bytes");
        played.end();
    }
}
