//! Servers that break the protocol, stall or die: one clear error, no hang, nothing allocated for them.

use super::*;

/// What a server says from its first byte on, and what the client says of it.
fn negotiations() -> Vec<(&'static str, Vec<u8>, &'static str)> {
    let base = || {
        let mut out = greeting(3);
        option_reply(&mut out, option::STRUCTURED_REPLY, reply::ACK, &[]);
        out
    };
    let structured = |kind, parts: &[&[u8]]| {
        let mut out = greeting(3);
        option_reply(&mut out, option::STRUCTURED_REPLY, kind, parts);
        out
    };
    let contexts = |replies: &[(u32, &[u8])]| {
        let mut out = base();
        for (kind, data) in replies {
            option_reply(&mut out, option::SET_META_CONTEXT, *kind, &[data]);
        }
        out
    };
    let context = |id: u32, name: &str| [&id.to_be_bytes(), name.as_bytes()].concat();
    let go = |replies: &[(u32, &[u8])]| {
        let mut out = contexts(&[
            (reply::META_CONTEXT, &context(1, BITMAP)),
            (reply::ACK, &[]),
        ]);
        for (kind, data) in replies {
            option_reply(&mut out, option::GO, *kind, &[data]);
        }
        out
    };
    let mut huge = base();
    huge.extend(&OPTION_REPLY_MAGIC);
    huge.extend(option::SET_META_CONTEXT.to_be_bytes());
    huge.extend(reply::META_CONTEXT.to_be_bytes());
    huge.extend(u32::MAX.to_be_bytes());
    let (known, other) = (context(1, BITMAP), context(1, allocation::NAME));
    let (meta, ack) = (reply::META_CONTEXT, reply::ACK);
    let many: Vec<(u32, &[u8])> = vec![(reply::INFO, &[0, 3]); 100];
    let export = |size: u64| [&[0, 0], &size.to_be_bytes()[..], &ABLE.to_be_bytes()].concat();
    let sizes = |sizes: [u32; 3]| {
        let mut data = vec![0, 3];
        data.extend(sizes.into_iter().flat_map(u32::to_be_bytes));
        data
    };
    let sized = |size: u64, of: [u32; 3]| {
        go(&[
            (reply::INFO, &sizes(of)),
            (reply::INFO, &export(size)),
            (ack, &[]),
        ])
    };
    vec![
        (
            "another protocol",
            b"HTTP/1.1 400 Bad Request\r\n\r\n".to_vec(),
            "this is not NBD",
        ),
        (
            "oldstyle",
            [GREETING.to_be_bytes(), *b"\0\0\x42\x02\x81\x86\x12\x53"].concat(),
            "too old",
        ),
        ("not fixed", greeting(2), "too old"),
        (
            "no reply magic",
            [greeting(3), vec![7; 20]].concat(),
            "this is not NBD",
        ),
        (
            "an answer too many",
            structured(reply::INFO, &[]),
            "malformed",
        ),
        (
            "an answer to another",
            [base(), base()[18..].to_vec()].concat(),
            "malformed",
        ),
        ("a huge reply", huge, "malformed"),
        ("an ACK with data", structured(ack, &[b"x"]), "malformed"),
        (
            "no structured replies",
            structured(reply::ERR_UNSUP, &[]),
            "does not offer",
        ),
        (
            "no contexts",
            contexts(&[(reply::ERR_UNSUP, &[])]),
            "does not offer",
        ),
        (
            "not this context",
            contexts(&[(meta, &other), (ack, &[])]),
            "does not offer",
        ),
        (
            "a context twice",
            contexts(&[(meta, &known), (meta, &known)]),
            "malformed",
        ),
        (
            "an id twice",
            contexts(&[(meta, &known), (meta, &other)]),
            "malformed",
        ),
        (
            "an unknown context",
            contexts(&[(meta, &context(1, "base:x"))]),
            "malformed",
        ),
        ("half a context", contexts(&[(meta, &[0, 0])]), "malformed"),
        (
            "no export",
            go(&[(reply::ERR_UNKNOWN, b"gone\nfor\x1b[2J good")]),
            "no export of this name",
        ),
        ("TLS", go(&[(reply::ERR_TLS_REQD, &[])]), "requires TLS"),
        ("no GO", go(&[(reply::ERR_UNSUP, &[])]), "too old"),
        (
            "policy",
            go(&[(reply::ERR_POLICY, &[0xFF; 4000])]),
            "does not allow",
        ),
        (
            "its end",
            go(&[(reply::ERR_SHUTDOWN, &[])]),
            "shutting down",
        ),
        ("another error", go(&[(1 << 31 | 77, &[])]), "0x8000004d"),
        ("too much information", go(&many), "malformed"),
        ("no information", go(&[(ack, &[])]), "no size"),
        ("short information", go(&[(reply::INFO, &[0])]), "malformed"),
        (
            "half an export",
            go(&[(reply::INFO, &[0, 0, 1])]),
            "malformed",
        ),
        (
            "half a block size",
            go(&[(reply::INFO, &[0, 3, 1])]),
            "malformed",
        ),
        ("a huge size", sized(u64::MAX, [1, 1, 1]), "malformed size"),
        (
            "an odd size",
            sized(5000, [4096, 4096, 4096]),
            "malformed size",
        ),
        (
            "alignment 0",
            sized(4096, [0, 4096, 4096]),
            "malformed block size",
        ),
        (
            "alignment 3",
            sized(4096, [3, 4096, 4096]),
            "malformed block size",
        ),
        (
            "alignment 1 MiB",
            sized(1 << 20, [1 << 20; 3]),
            "malformed block size",
        ),
        (
            "maximum 0",
            sized(4096, [512, 4096, 0]),
            "malformed block size",
        ),
    ]
}

const OPTION_REPLY_MAGIC: [u8; 8] = drover_core::nbd::OPTION_REPLY.to_be_bytes();

/// Tries to open the export of a server that says `bytes` and then waits.
fn refusal(bytes: Vec<u8>, then: impl FnOnce(UnixStream) + Send + 'static) -> NbdError {
    let played = Played::raw(move |mut stream| {
        let _ = stream.write_all(&bytes);
        then(stream);
    });
    let began = Instant::now();
    let opened = NbdDevice::connect(&played.address(), &options(5000));
    let error = opened.err().expect("it must not open");
    assert!(began.elapsed() < Duration::from_secs(4), "{error}");
    let text = error.to_string();
    assert!(text.starts_with(&played.address().to_string()), "{text}");
    assert!(!text.chars().any(char::is_control), "{text}");
    assert!(text.len() < 900, "{text}");
    error
}

/// Waits until the client hangs up.
fn linger(mut stream: UnixStream) {
    let _ = std::io::copy(&mut stream, &mut std::io::sink());
}

#[test]
fn a_bad_negotiation_is_refused_in_one_line() {
    for (name, bytes, why) in negotiations() {
        let error = refusal(bytes, linger);
        assert!(error.to_string().contains(why), "{name}: {error}");
        assert_eq!(error.is_transient(), name == "its end", "{name}: {error}");
    }
}

#[test]
fn a_torn_negotiation_is_refused_at_every_byte() {
    let whole = negotiation(SIZE, ABLE, [1, 4096, 1 << 25]);
    for length in (0..whole.len()).step_by(7).chain([whole.len() - 1]) {
        // It reads what the client says, so that nothing is lost by a reset.
        let error = refusal(whole[..length].to_vec(), |stream| {
            stream.shutdown(std::net::Shutdown::Write).unwrap();
            linger(stream);
        });
        assert!(error.is_transient(), "{length}: {error}");
        assert!(
            error.to_string().contains("closed the connection"),
            "{error}"
        );
    }
}

#[test]
fn silence_before_the_first_request_ends_at_the_deadline() {
    let whole = negotiation(SIZE, ABLE, [1, 4096, 1 << 25]);
    for length in [0, 8, 20, 60, whole.len() - 1] {
        let said = whole[..length].to_vec();
        let played = Played::raw(move |mut stream| {
            stream.write_all(&said).unwrap();
            linger(stream);
        });
        let began = Instant::now();
        let opened = NbdDevice::connect(&played.address(), &options(150));
        let error = opened.err().expect("it must not open");
        assert!(
            error.to_string().contains("no answer within 0.15 s"),
            "{error}"
        );
        assert!(error.is_transient(), "{error}");
        assert!(began.elapsed() < Duration::from_secs(3));
    }
    // Nobody accepts, and the queue of connections is full.
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("s");
    let socket = rustix::net::socket(
        rustix::net::AddressFamily::UNIX,
        rustix::net::SocketType::STREAM,
        None,
    )
    .unwrap();
    rustix::net::bind(&socket, &rustix::net::SocketAddrUnix::new(&path).unwrap()).unwrap();
    rustix::net::listen(&socket, 0).unwrap();
    let _first = UnixStream::connect(&path).unwrap();
    let error = NbdDevice::connect(&address(&path), &options(150)).err();
    assert!(error.unwrap().to_string().contains("no answer"));
}

#[test]
fn a_server_that_is_not_there_is_named() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("s");
    let error = NbdDevice::connect(&address(&path), &options(1000))
        .err()
        .unwrap();
    assert!(error.is_transient());
    assert!(
        error.to_string().contains("cannot connect: No such file"),
        "{error}"
    );
    drop(UnixListener::bind(&path).unwrap());
    let error = NbdDevice::connect(&address(&path), &options(1000))
        .err()
        .unwrap();
    assert!(error.to_string().contains("refused"), "{error}");
    let too_long = directory.path().join("x".repeat(200));
    assert!(NbdDevice::connect(&address(&too_long), &options(1000)).is_err());
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let tcp = NbdAddress {
        socket: NbdSocket::Tcp("127.0.0.1".into(), port.local_addr().unwrap().port()),
        export: String::new(),
    };
    drop(port);
    let error = NbdDevice::connect(&tcp, &options(1000)).err().unwrap();
    assert!(error.to_string().contains("refused"), "{error}");
}

type Answer = fn(&Request) -> Vec<u8>;

/// Answers to a read of 8192 bytes at 4096 that end the connection.
fn bad_reads() -> Vec<(&'static str, Answer)> {
    vec![
        ("no magic", |_| vec![0; 64]),
        ("another cookie", |r| {
            data_of(r.cookie + 1, 4096, &[1; 8192], true)
        }),
        ("a simple reply", |r| {
            let mut out = simple_reply(r.cookie, 0).to_vec();
            out.extend([1; 8192]);
            out
        }),
        ("simple after chunks", |r| {
            let mut out = data_of(r.cookie, 4096, &[1; 4096], false);
            out.extend(simple_reply(r.cookie, errno::EIO));
            out
        }),
        ("a huge chunk", |r| {
            chunk_head(r.cookie, chunk::OFFSET_DATA, true, u32::MAX).to_vec()
        }),
        ("more than asked for", |r| {
            data_of(r.cookie, 4096, &[1; 8193], true)
        }),
        ("before it", |r| data_of(r.cookie, 4095, &[1; 8192], true)),
        ("after it", |r| data_of(r.cookie, 12_288, &[1; 1], true)),
        ("far away", |r| {
            data_of(r.cookie, u64::MAX, &[1; 8192], true)
        }),
        ("nothing at an offset", |r| {
            data_of(r.cookie, 4096, &[], true)
        }),
        ("data twice", |r| {
            let mut out = data_of(r.cookie, 4096, &[1; 4096], false);
            out.extend(data_of(r.cookie, 8191, &[1; 4097], true));
            out
        }),
        ("a hole over data", |r| {
            let mut out = data_of(r.cookie, 4096, &[1; 8192], false);
            out.extend(hole_of(r.cookie, 4096, 8192, true));
            out
        }),
        ("a long hole", |r| hole_of(r.cookie, 4096, u32::MAX, true)),
        ("an empty hole", |r| hole_of(r.cookie, 4096, 0, true)),
        ("less than asked for", |r| {
            data_of(r.cookie, 4096, &[1; 8191], true)
        }),
        ("nothing", |r| chunk_of(r.cookie, chunk::NONE, true, &[])),
        ("an endless nothing", |r| {
            chunk_of(r.cookie, chunk::NONE, false, &[])
        }),
        ("a nothing with data", |r| {
            chunk_of(r.cookie, chunk::NONE, true, &[&[1]])
        }),
        ("extents", |r| {
            status_of(r.cookie, allocation::ID, &[(8192, 0)], true)
        }),
        ("an unknown kind", |r| chunk_of(r.cookie, 77, true, &[])),
        ("a short error", |r| {
            chunk_of(r.cookie, chunk::ERROR, true, &[&[0, 0, 0, 5, 0]])
        }),
        ("an error of its own length", |r| {
            chunk_of(r.cookie, chunk::ERROR, true, &[&[0, 0, 0, 5, 0, 9, b'x']])
        }),
        ("no error", |r| {
            chunk_of(r.cookie, chunk::ERROR, true, &[&[0; 6]])
        }),
        ("a huge error", |r| {
            chunk_of(r.cookie, chunk::ERROR, true, &[&[1; 9000]])
        }),
    ]
}

/// The same for a block status of the whole device.
fn bad_statuses() -> Vec<(&'static str, Answer)> {
    vec![
        ("of another context", |r| {
            status_of(r.cookie, 5, &[(4096, 0)], true)
        }),
        ("of a context twice", |r| {
            let mut out = status_of(r.cookie, BITMAP_ID, &[(4096, 0)], false);
            out.extend(status_of(r.cookie, BITMAP_ID, &[(4096, 0)], true));
            out
        }),
        ("no extents", |r| status_of(r.cookie, BITMAP_ID, &[], true)),
        ("an empty extent", |r| {
            status_of(r.cookie, BITMAP_ID, &[(1, 0), (0, 0)], true)
        }),
        ("half an extent", |r| {
            chunk_of(r.cookie, chunk::BLOCK_STATUS, true, &[&[0; 8]])
        }),
        ("too many extents", |r| {
            chunk_head(r.cookie, chunk::BLOCK_STATUS, true, 4 + 8 * (2 << 20) + 8).to_vec()
        }),
        ("a huge number of extents", |r| {
            chunk_head(r.cookie, chunk::BLOCK_STATUS, true, u32::MAX - 3).to_vec()
        }),
        ("none at all", |r| {
            chunk_of(r.cookie, chunk::NONE, true, &[])
        }),
        ("a simple reply", |r| simple_reply(r.cookie, 0).to_vec()),
    ]
}

/// A device whose server answers one request with this.
fn answered(answer: Answer) -> (Played, NbdDevice) {
    let played = Played::with(move |mut stream| {
        let (asked, _) = request(&mut stream);
        let _ = stream.write_all(&answer(&asked));
        linger(stream);
    });
    let device = played.open(5000);
    (played, device)
}

/// That a request failed since the connection has ended, and that all others do.
fn ended(played: &Played, device: &NbdDevice, name: &str, error: &DeviceError) {
    let text = error.to_string();
    assert!(
        text.starts_with(&played.address().to_string()) && text.contains("open it again"),
        "{name}: {text}"
    );
    assert!(!error.is_transient(), "{name}: {error}");
    let said = device.ended().map(|error| error.to_string());
    assert_eq!(said.as_ref(), Some(&text), "{name}");
    let began = Instant::now();
    for result in [
        device.flush(),
        device.write(0, &[1]),
        device.read(0, &mut [0]),
    ] {
        assert_eq!(result.unwrap_err().to_string(), text, "{name}");
    }
    assert!(began.elapsed() < Duration::from_secs(1), "{name}");
}

#[test]
fn a_bad_answer_ends_the_connection_at_once() {
    let began = Instant::now();
    for (name, answer) in bad_reads() {
        let (played, device) = answered(answer);
        let error = device.read(4096, &mut [0; 8192]).unwrap_err();
        ended(&played, &device, name, &error);
    }
    for (name, answer) in bad_statuses() {
        let (played, device) = answered(answer);
        let error = device.status(BITMAP, 0, SIZE).unwrap_err();
        ended(&played, &device, name, &error);
    }
    assert!(began.elapsed() < Duration::from_secs(20));
    // Each request has one answer.
    let (played, device) = answered(|r| {
        let mut out = data_of(r.cookie, 4096, &[1; 8192], true);
        out.extend(chunk_of(r.cookie, chunk::NONE, true, &[]));
        out
    });
    device.read(4096, &mut [0; 8192]).unwrap();
    ended(&played, &device, "twice", &device.flush().unwrap_err());
    // What it does not tell is no answer, and nothing worse.
    let (_played, device) = answered(|r| status_of(r.cookie, allocation::ID, &[(1, 0)], true));
    let error = device.status(BITMAP, 0, SIZE).unwrap_err();
    assert!(matches!(error, DeviceError::Corrupt(_)), "{error}");
}

#[test]
fn a_dead_server_fails_all_requests_at_once() {
    const COUNT: usize = 40;
    let played = Played::with(|mut stream| {
        for _ in 0..COUNT {
            request(&mut stream);
        }
    });
    let device = played.open(30_000);
    let began = Instant::now();
    std::thread::scope(|scope| {
        for index in 0..COUNT {
            let device = &device;
            scope.spawn(move || {
                let error = device.read(index as u64, &mut [0; 100]).unwrap_err();
                assert!(
                    error.to_string().contains("closed the connection"),
                    "{error}"
                );
            });
        }
    });
    assert!(began.elapsed() < Duration::from_secs(5));
    let error = device.flush().unwrap_err();
    ended(&played, &device, "dead", &error);
}

#[test]
fn silence_ends_every_request_at_the_deadline() {
    let play: [fn(UnixStream); 3] = [
        linger,
        // It reads nothing.
        |_stream| std::thread::sleep(Duration::from_millis(1500)),
        // A byte from time to time.
        |mut stream| {
            let (asked, _) = request(&mut stream);
            let out = data_of(asked.cookie, asked.offset, &[1; 100], true);
            for byte in out {
                std::thread::sleep(Duration::from_millis(20));
                if stream.write_all(&[byte]).is_err() {
                    break;
                }
            }
        },
    ];
    for (which, play) in play.into_iter().enumerate() {
        let played = Played::with(play);
        let device = played.open(300);
        let began = Instant::now();
        std::thread::scope(|scope| {
            let device = &device;
            scope.spawn(|| device.read(0, &mut [0; 100]).unwrap_err());
            // More than a socket takes.
            scope.spawn(|| device.write(0, &vec![1; SIZE as usize]).unwrap_err());
            scope.spawn(|| device.flush().unwrap_err());
        });
        let took = began.elapsed();
        assert!(took < Duration::from_millis(1200), "{which}: {took:?}");
        let error = device.flush().unwrap_err();
        assert!(
            error.to_string().contains("no answer within 0.3 s"),
            "{error}"
        );
        ended(&played, &device, "silence", &error);
    }
}

#[test]
fn a_server_that_takes_a_write_a_little_at_a_time_misses_the_deadline() {
    let played = Played::with(|mut stream| {
        let mut some = vec![0; 4096];
        while stream.read(&mut some).is_ok_and(|count| count > 0) {
            std::thread::sleep(Duration::from_millis(20));
        }
    });
    let device = played.open(300);
    let began = Instant::now();
    let error = device.write(0, &vec![1; SIZE as usize]).unwrap_err();
    assert!(error.to_string().contains("no answer"), "{error}");
    assert!(began.elapsed() < Duration::from_secs(1));
}
