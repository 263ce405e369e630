//! Peers that violate the protocol: here malicious sites, in `mounts` malicious mounts, in `space` those
//! that want more of the disk than there is, in `turns` those that ask for what takes long.

mod mounts;
mod space;
mod turns;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use drover_core::{BlockDevice, DeviceError, Digest};
use drover_device::remote::{Epoch, Link, Remote};
use drover_mount::client::{Client, Connecting, Connector, Options};
use drover_mount::direct::RemoteDevice;
use drover_mount::protocol::{
    Coding, ConnectionKind, DirectCapabilities, MAX_MOUNT_FRAME, Open, Opened, Reply, Request,
    decode_message, encode_message, kind,
};
use drover_net::service::{self, IncomingCall, reply_in};
use drover_net::{Code, Connection, Frame, FrameReader, FrameWriter, NetError, Refusal};
use drover_store::lease::{Access, Identity, MountId};
use tokio::sync::watch;

use crate::local_stub::LocalStub;
use crate::util::{Near, Site, content, memory, name, runtime};

const CHUNK: u32 = 65_536;

/// What a liar answers to a request: frames of a kind, a head and a body.
type Lie = dyn Fn(&Request) -> Vec<(u8, Vec<u8>, Vec<u8>)> + Send + Sync;

/// A site that sends scripted replies.
struct Liar {
    opened: Box<dyn Fn(u64) -> Opened + Send + Sync>,
    lie: Arc<Lie>,
    connects: AtomicU64,
}

impl Liar {
    fn new(
        lie: impl Fn(&Request) -> Vec<(u8, Vec<u8>, Vec<u8>)> + Send + Sync + 'static,
    ) -> Arc<Self> {
        Self::opening(|_| honest(), lie)
    }

    fn opening(
        opened: impl Fn(u64) -> Opened + Send + Sync + 'static,
        lie: impl Fn(&Request) -> Vec<(u8, Vec<u8>, Vec<u8>)> + Send + Sync + 'static,
    ) -> Arc<Self> {
        Arc::new(Self {
            opened: Box::new(opened),
            lie: Arc::new(lie),
            connects: AtomicU64::new(0),
        })
    }
}

fn honest() -> Opened {
    Opened {
        size: 1 << 20,
        chunk: CHUNK,
        identity: Identity {
            digest: Digest([1; 32]),
            edition: 0,
            epoch: 0,
        },
        fresh: false,
        read_only: true,
        direct: DirectCapabilities::default(),
        term: None,
    }
}

impl Connector for Liar {
    fn connect(&self) -> Connecting<'_> {
        let count = self.connects.fetch_add(1, Ordering::Relaxed);
        let (opened, lie) = ((self.opened)(count), self.lie.clone());
        Box::pin(async move {
            let (here, there) = Connection::pair().expect("a pair");
            tokio::spawn(async move {
                let stop = watch::channel(false).1;
                let mut call = IncomingCall::receive(there, stop).await.expect("a call");
                // The mount may be gone already.
                let _ = call.accept::<Open>(&opened).await;
                let IncomingCall {
                    mut reader,
                    mut writer,
                    ..
                } = call;
                writer.set_max_frame(64 << 20);
                let _ = writer.flush().await;
                while let Ok(Some(frame)) = reader.next().await {
                    let Ok(message) = decode_message::<Request>(&frame.payload) else {
                        return;
                    };
                    if message.head.id().is_none() {
                        continue;
                    }
                    for (kind, head, body) in lie(&message.head) {
                        if writer.send_vectored(kind, &[&head, &body]).await.is_err() {
                            return;
                        }
                    }
                    let _ = writer.flush().await;
                }
            });
            Ok(here)
        })
    }
}

fn options() -> Options {
    Options {
        back_connections: 0,
        give_up: Duration::from_millis(800),
        ..Options::new(name("web"), Access::ReadOnly)
    }
}

fn chunks(
    request: &Request,
    zeros: Vec<u8>,
    coding: Coding,
    body: Vec<u8>,
) -> (u8, Vec<u8>, Vec<u8>) {
    let Request::Read {
        id, first, count, ..
    } = *request
    else {
        panic!("{request:?}");
    };
    let head = Reply::Chunks {
        id,
        first,
        count,
        zeros,
        coding,
        echo: 0,
        last: true,
    };
    (kind::REPLY, encode_message(&head), body)
}

/// The error of a chunk from a site that lies so, and how often the chunk was requested.
fn lied_to(
    lie: impl Fn(&Request) -> Vec<(u8, Vec<u8>, Vec<u8>)> + Send + Sync + 'static,
) -> (DeviceError, u64) {
    let runtime = runtime();
    let _inside = runtime.enter();
    let asked = Arc::new(AtomicU64::new(0));
    let counter = asked.clone();
    let liar = Liar::new(move |request| {
        if !matches!(request, Request::Read { .. }) {
            return Vec::new();
        }
        counter.fetch_add(1, Ordering::Relaxed);
        lie(request)
    });
    let client = runtime
        .block_on(Client::open(runtime.handle(), liar, options()))
        .unwrap();
    let local = LocalStub::attach(&client, false);
    let began = Instant::now();
    let error = local.get(&client, 3).unwrap_err();
    assert!(
        began.elapsed() < Duration::from_secs(60),
        "{:?}",
        began.elapsed()
    );
    assert!(local.received.lock().chunks.is_empty());
    (error, asked.load(Ordering::Relaxed))
}

#[test]
fn a_wrong_digest_is_asked_for_once_more_and_then_an_error() {
    let (error, asked) = lied_to(|request| {
        let mut body = vec![9; 32];
        body.extend(vec![5; CHUNK as usize]);
        vec![chunks(request, vec![0], Coding::Plain, body)]
    });
    assert!(matches!(error, DeviceError::Corrupt(_)), "{error}");
    assert!(error.to_string().contains("chunk 3 of web"), "{error}");
    assert_eq!(asked, 2);
}

#[test]
fn bombs_and_bodies_of_other_lengths_are_errors() {
    let bomb = zstd::bulk::compress(&vec![0; 64 << 20], 19).unwrap();
    let (error, asked) =
        lied_to(move |request| vec![chunks(request, vec![0], Coding::Zstd, bomb.clone())]);
    assert!(matches!(error, DeviceError::Corrupt(_)), "{error}");
    assert_eq!(asked, 2);
    for length in [0, 31, 32 + CHUNK as usize - 1] {
        let (error, _) =
            lied_to(move |request| vec![chunks(request, vec![0], Coding::Plain, vec![0; length])]);
        assert!(
            matches!(error, DeviceError::Corrupt(_)),
            "{length}: {error}"
        );
    }
}

#[test]
fn answers_that_break_the_protocol_cost_the_link_and_not_more() {
    let zero = |request: &Request| chunks(request, vec![1], Coding::Plain, vec![]);
    let reply = |head: Reply| (kind::REPLY, encode_message(&head), vec![]);
    let lies: Vec<Box<Lie>> = vec![
        // An unknown kind, rubbish, a frame that is too long.
        Box::new(|_| vec![(0x11, vec![1, 2, 3], vec![])]),
        Box::new(|_| vec![(kind::REPLY, vec![255; 40], vec![])]),
        Box::new(|_| vec![(kind::REPLY, vec![0; MAX_MOUNT_FRAME + 1], vec![])]),
        // Longer than what it brings: it would wait to be verified.
        Box::new(|request| {
            let body = vec![0; 32 + CHUNK as usize + 1];
            vec![chunks(request, vec![0], Coding::Zstd, body)]
        }),
        Box::new(|request| vec![chunks(request, vec![1], Coding::Plain, vec![0])]),
        // To nothing that was asked; another run; no zero map; a run at the end of all numbers.
        Box::new(move |_| vec![reply(Reply::Done { id: 77 })]),
        Box::new(move |request| {
            let (kind, head, body) = zero(request);
            let mut message = decode_message::<Reply>(&Bytes::from(head)).unwrap().head;
            if let Reply::Chunks { first, .. } = &mut message {
                *first = 4;
            }
            vec![(kind, encode_message(&message), body)]
        }),
        Box::new(move |request| vec![chunks(request, vec![], Coding::Plain, vec![])]),
        Box::new(move |request| {
            let (kind, _, body) = zero(request);
            let head = Reply::Chunks {
                id: request.id().unwrap(),
                first: u64::MAX,
                count: u32::MAX,
                zeros: vec![1],
                coding: Coding::Plain,
                echo: u64::MAX,
                last: true,
            };
            vec![(kind, encode_message(&head), body)]
        }),
        // Nothing at all.
        Box::new(|_| vec![]),
    ];
    for (which, lie) in lies.into_iter().enumerate() {
        let (error, _) = lied_to(move |request| lie(request));
        assert!(
            matches!(error, DeviceError::Unavailable(_)),
            "{which}: {error}"
        );
    }
}

/// What a request of another kind than a read gets from a site that answers so.
fn answered<T>(
    access: Access,
    lie: impl Fn(&Request) -> Vec<(u8, Vec<u8>, Vec<u8>)> + Send + Sync + 'static,
    request: impl FnOnce(&Client, std::sync::mpsc::Sender<Result<T, DeviceError>>),
) -> Result<T, DeviceError> {
    let runtime = runtime();
    let _inside = runtime.enter();
    let writes = access == Access::ReadWrite;
    let opened = move |_| Opened {
        size: 64 << 30,
        read_only: !writes,
        ..honest()
    };
    let options = Options {
        access,
        give_up: Duration::from_secs(5),
        ..options()
    };
    let liar = Liar::opening(opened, lie);
    let client = runtime
        .block_on(Client::open(runtime.handle(), liar, options))
        .unwrap();
    let _local = LocalStub::attach(&client, writes);
    let (say, hear) = std::sync::mpsc::channel();
    request(&client, say);
    hear.recv_timeout(Duration::from_secs(60))
        .expect("an answer")
}

#[test]
fn of_what_a_site_says_is_zero_no_more_is_kept_than_was_asked_for() {
    let pages = Arc::new(AtomicU64::new(0));
    let seen = pages.clone();
    // Every other chunk of the largest device: a client that kept all of them would store half a million runs.
    let runs = answered(
        Access::ReadOnly,
        move |request| {
            let Request::Presence { id, first, .. } = *request else {
                return Vec::new();
            };
            seen.fetch_add(1, Ordering::Relaxed);
            let runs = (0..2048).map(|n| (first + 2 * n, 1)).collect();
            let end = first + 4096;
            let head = Reply::Presence { id, runs, end };
            vec![(kind::REPLY, encode_message(&head), vec![])]
        },
        |client, say| {
            let asked = drover_device::remote::Chunks {
                first: 0,
                count: 1 << 20,
            };
            client.presence(asked, Box::new(move |found| drop(say.send(found))));
        },
    )
    .unwrap();
    assert_eq!(runs.len(), 1 << 16);
    assert!(pages.load(Ordering::Relaxed) <= 33);
}

#[test]
fn an_answer_that_brings_more_than_was_asked_for_is_refused() {
    let fat = |request: &Request| {
        let id = request.id().unwrap();
        let head = match request {
            Request::Presence { count, .. } => Reply::Presence {
                id,
                runs: vec![],
                end: u64::from(*count),
            },
            Request::Commit { epoch, .. } => Reply::Committed { id, epoch: *epoch },
            _ => Reply::Done { id },
        };
        vec![(kind::REPLY, encode_message(&head), vec![0; 4 << 20])]
    };
    let asked = drover_device::remote::Chunks { first: 0, count: 9 };
    let error = answered(Access::ReadOnly, fat, |client, say| {
        client.presence(asked, Box::new(move |found| drop(say.send(found))));
    });
    assert!(matches!(error, Err(DeviceError::Corrupt(_))), "{error:?}");
    let commit = |client: &Client, say: std::sync::mpsc::Sender<_>| {
        client.commit(
            Epoch(1 << 32),
            4096,
            Box::new(move |done| drop(say.send(done))),
        );
    };
    let error = answered(Access::ReadWrite, fat, commit);
    assert!(matches!(error, Err(DeviceError::Corrupt(_))), "{error:?}");
    // Nor does another epoch count than the one that was to.
    let later = |request: &Request| {
        let id = request.id().unwrap();
        let epoch = u64::MAX;
        let head = Reply::Committed { id, epoch };
        vec![(kind::REPLY, encode_message(&head), vec![])]
    };
    let error = answered(Access::ReadWrite, later, commit);
    assert!(matches!(error, Err(DeviceError::Corrupt(_))), "{error:?}");
}

#[test]
fn a_long_text_of_a_site_is_cut() {
    let (error, _) = lied_to(|request| {
        let refusal = Refusal {
            code: Code::NoSpace,
            message: "full\n".repeat(8000),
            retry: false,
        };
        let id = request.id().unwrap();
        vec![(
            kind::REPLY,
            encode_message(&Reply::Error { id, refusal }),
            vec![],
        )]
    });
    let text = error.to_string();
    assert!(text.len() < 1100 && !text.contains('\n'), "{}", text.len());
}

#[test]
fn an_error_of_the_site_is_the_error_of_the_request() {
    let (error, asked) = lied_to(|request| {
        let refusal = Refusal::new(Code::Corrupt, "web.qcow2: cluster 7 is damaged");
        let head = Reply::Error {
            id: request.id().unwrap(),
            refusal,
        };
        vec![(kind::REPLY, encode_message(&head), vec![])]
    });
    assert_eq!(
        error.to_string(),
        "damaged: web.qcow2: cluster 7 is damaged"
    );
    assert_eq!(asked, 1);
}

#[test]
fn sizes_that_lie_are_refused_and_sizes_that_change_end_the_mount() {
    let runtime = runtime();
    let _inside = runtime.enter();
    let other = |change: fn(&mut Opened)| {
        let mut opened = honest();
        change(&mut opened);
        opened
    };
    for change in [
        (|o| o.size = 0) as fn(&mut Opened),
        |o| o.size = u64::MAX,
        |o| o.chunk = 0,
        |o| o.chunk = 4096,
        |o| o.chunk = 3,
    ] {
        let liar = Liar::opening(move |_| other(change), |_| Vec::new());
        let opened = runtime.block_on(Client::open(runtime.handle(), liar, options()));
        let error = opened.err().expect("refused").to_string();
        assert!(error.contains("broke the mount protocol"), "{error}");
    }
    for change in [
        (|o| o.size += 1) as fn(&mut Opened),
        |o| o.identity.digest = Digest([2; 32]),
        |o| o.identity.epoch = 1,
    ] {
        let liar = Liar::opening(
            move |count| if count == 0 { honest() } else { other(change) },
            |_| vec![(0x11, vec![], vec![])],
        );
        let client = runtime
            .block_on(Client::open(runtime.handle(), liar, options()))
            .unwrap();
        let local = LocalStub::attach(&client, false);
        let error = local.get(&client, 0).unwrap_err().to_string();
        assert!(error.contains("mount it again"), "{error}");
        local.wait("gone", |received| {
            matches!(received.links.last(), Some(Link::Gone(_)))
        });
    }
}

#[test]
fn a_direct_read_takes_no_answer_of_another_kind() {
    let runtime = runtime();
    let _inside = runtime.enter();
    let liar = Liar::new(|request| {
        let id = request.id().unwrap();
        let head = match request {
            Request::DirectRead { .. } => Reply::Bytes {
                id,
                coding: Coding::Plain,
            },
            Request::DirectExtents { .. } => Reply::Extents {
                id,
                runs: vec![(u64::MAX, 0), (5, 1)],
            },
            _ => Reply::Committed { id, epoch: 1 },
        };
        vec![(kind::REPLY, encode_message(&head), vec![7; 99])]
    });
    let client = runtime
        .block_on(Client::open(runtime.handle(), liar, options()))
        .unwrap();
    let device = RemoteDevice::new(Arc::new(client));
    let short = device.read(0, &mut [0; 100]);
    assert!(matches!(short, Err(DeviceError::Corrupt(_))), "{short:?}");
    let runs = device.extents(0, 4096);
    assert!(matches!(runs, Err(DeviceError::Corrupt(_))), "{runs:?}");
}
