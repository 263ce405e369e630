//! Mounts that violate the protocol.

use super::*;

/// A mount that need not keep to the rules: a connection to a real site.
pub struct Rude {
    pub reader: FrameReader,
    pub writer: FrameWriter,
}

impl Rude {
    pub fn open(site: &Site, near: &Near, open: Vec<u8>) -> Self {
        let (here, there) = Connection::pair().unwrap();
        let (server, peer) = (site.server.clone(), near.peer.clone());
        tokio::spawn(async move {
            let (reader, writer) = there.split();
            let (_go, stop) = watch::channel(false);
            let call = IncomingCall {
                service: <Open as service::Request>::SERVICE.into(),
                request: open.into(),
                reader,
                writer,
                stop,
            };
            let _ = server.serve_connection(peer, call).await;
        });
        let (mut reader, mut writer) = here.split();
        reader.set_max_frame(MAX_MOUNT_FRAME);
        writer.set_max_frame(64 << 20);
        Self { reader, writer }
    }

    pub async fn send_request(&mut self, request: &Request, body: &[u8]) {
        let head = encode_message(request);
        let sent = self
            .writer
            .send_vectored(kind::REQUEST, &[&head, body])
            .await;
        sent.unwrap();
        self.writer.flush().await.unwrap();
    }

    /// The connection is open.
    pub async fn opened(&mut self) {
        let frame = self.reader.next().await.unwrap().expect("a reply");
        reply_in::<Open>(&frame, "the site").expect("an open connection");
    }

    /// The next answer, but for what only says that a body arrived.
    pub async fn hear(&mut self) -> Option<Reply> {
        let limit = Duration::from_secs(60);
        loop {
            let frame: Option<Frame> = tokio::time::timeout(limit, self.reader.next())
                .await
                .expect("an answer")
                .ok()?;
            let frame = frame?;
            if let Err(NetError::Refused(refusal)) = reply_in::<Open>(&frame, "the site") {
                return Some(Reply::Error { id: 0, refusal });
            }
            match decode_message::<Reply>(&frame.payload).unwrap().head {
                Reply::Arrived { .. } => {}
                reply => return Some(reply),
            }
        }
    }

    /// The error that ends the connection.
    async fn end(&mut self) -> Refusal {
        loop {
            match self.hear().await.expect("a last word") {
                Reply::Error { id: 0, refusal } => {
                    assert_eq!(self.hear().await, None);
                    return refusal;
                }
                _ => continue,
            }
        }
    }
}

pub fn opening(mount: MountId, access: Access) -> Vec<u8> {
    let open = Open {
        mount,
        connection: ConnectionKind::Front,
        link: 1,
        image: name("web"),
        access,
        chunk: CHUNK,
        expected: None,
        note: String::new(),
        term: None,
    };
    drover_net::encode(&open)
}

fn read(id: u64, first: u64, count: u32) -> Request {
    Request::Read {
        id,
        first,
        count,
        background: id.is_multiple_of(2),
    }
}

#[test]
fn a_site_ends_the_connection_of_a_mount_that_asks_too_much() {
    let runtime = runtime();
    let _inside = runtime.enter();
    let site = Site::with("web", memory(&content(3_000_000, 9)));
    let near = Near::new(site.server.clone());
    let write = |length| Request::DirectWrite {
        id: 1,
        offset: 0,
        length,
        coding: Coding::Plain,
    };
    let cases: Vec<(Request, Vec<u8>)> = vec![
        (read(1, 0, 0), vec![]),
        (read(1, 0, u32::MAX), vec![]),
        (read(1, 0, 17), vec![]),
        (read(0, 0, 1), vec![]),
        (read(1, 0, 1), vec![1]),
        (write(u32::MAX), vec![]),
        (write(10), vec![0; 11]),
        (
            Request::DirectRead {
                id: 1,
                offset: 0,
                length: u32::MAX,
            },
            vec![],
        ),
    ];
    runtime.block_on(async {
        for (request, body) in cases {
            let open = opening(MountId::random(), Access::ReadOnly);
            let mut rude = Rude::open(&site, &near, open);
            rude.opened().await;
            rude.send_request(&request, &body).await;
            let refusal = rude.end().await;
            assert_eq!(refusal.code, Code::Protocol, "{request:?}: {refusal}");
        }
        // Rubbish, and a frame of another kind.
        for (kind, payload) in [(kind::REQUEST, vec![9; 50]), (kind::REPLY, vec![])] {
            let open = opening(MountId::random(), Access::ReadOnly);
            let mut rude = Rude::open(&site, &near, open);
            rude.opened().await;
            rude.writer.send(kind, &payload).await.unwrap();
            rude.writer.flush().await.unwrap();
            assert_eq!(rude.end().await.code, Code::Protocol);
        }
        for open in [vec![], vec![1], vec![200; 500], b"drover".to_vec()] {
            let mut rude = Rude::open(&site, &near, open);
            assert!(!matches!(rude.end().await.code, Code::Io));
        }
    });
}

#[test]
fn what_is_outside_or_not_allowed_is_the_requests_own_error() {
    let runtime = runtime();
    let _inside = runtime.enter();
    let site = Site::with("web", memory(&content(3_000_000, 9)));
    let near = Near::new(site.server.clone());
    let cases = [
        (read(1, 46, 1), Code::OutOfRange),
        (read(1, u64::MAX, 2), Code::OutOfRange),
        (
            Request::Presence {
                id: 1,
                first: u64::MAX,
                count: u32::MAX,
            },
            Code::OutOfRange,
        ),
        (
            Request::Digests {
                id: 1,
                first: 0,
                count: 0,
            },
            Code::OutOfRange,
        ),
        (
            Request::DirectRead {
                id: 1,
                offset: u64::MAX,
                length: 1 << 20,
            },
            Code::OutOfRange,
        ),
        (
            Request::Commit {
                id: 1,
                epoch: 1,
                covers: 0,
            },
            Code::ReadOnly,
        ),
        (
            Request::Zero {
                id: 1,
                epoch: u64::MAX,
                offset: 0,
                length: u64::MAX,
            },
            Code::ReadOnly,
        ),
    ];
    runtime.block_on(async {
        let open = opening(MountId::random(), Access::ReadOnly);
        let mut rude = Rude::open(&site, &near, open);
        rude.opened().await;
        for (request, code) in cases {
            rude.send_request(&request, &[]).await;
            match rude.hear().await {
                Some(Reply::Error { id: 1, refusal }) => {
                    assert_eq!(refusal.code, code, "{request:?}")
                }
                other => panic!("{request:?}: {other:?}"),
            }
        }
        // The connection still works; credits that lie do it no harm.
        rude.send_request(
            &Request::Credit {
                received: u64::MAX,
                window: u64::MAX,
            },
            &[],
        )
        .await;
        rude.send_request(&Request::Hurry { id: 12_345 }, &[]).await;
        rude.send_request(&read(2, 45, 1), &[]).await;
        assert!(matches!(
            rude.hear().await,
            Some(Reply::Chunks { first: 45, .. })
        ));
    });
}

#[test]
fn another_sites_mount_is_not_taken_over_by_its_number() {
    let runtime = runtime();
    let _inside = runtime.enter();
    let site = Site::with("web", memory(&content(3_000_000, 9)));
    let (near, thief) = (
        Near::new(site.server.clone()),
        Near::new(site.server.clone()),
    );
    let mount = MountId::random();
    runtime.block_on(async {
        let mut owner = Rude::open(&site, &near, opening(mount, Access::ReadWrite));
        owner.opened().await;
        let mut rude = Rude::open(&site, &thief, opening(mount, Access::ReadWrite));
        assert_eq!(rude.end().await.code, Code::Held);
        // A body that is not what it says; an epoch that counts already.
        let write = |epoch, coding| Request::Write {
            id: 5,
            epoch,
            offset: 0,
            length: 4096,
            coding,
        };
        for (request, code) in [
            (write(1, Coding::Zstd), Code::Protocol),
            (write(1, Coding::Plain), Code::Protocol),
            (write(0, Coding::Plain), Code::OutOfOrder),
        ] {
            let body = if code == Code::OutOfOrder {
                vec![1; 4096]
            } else {
                vec![1; 99]
            };
            owner.send_request(&request, &body).await;
            match owner.hear().await {
                Some(Reply::Error { id: 5, refusal }) => {
                    assert_eq!(refusal.code, code, "{request:?}")
                }
                other => panic!("{request:?}: {other:?}"),
            }
        }
    });
}

#[test]
fn a_mount_that_gave_its_lease_back_commits_nothing_more() {
    let runtime = runtime();
    let _inside = runtime.enter();
    let site = Site::with("web", memory(&content(3_000_000, 9)));
    let near = Near::new(site.server.clone());
    let epoch = 1 << 32;
    let write = |id| Request::Write {
        id,
        epoch,
        offset: 0,
        length: 4096,
        coding: Coding::Plain,
    };
    runtime.block_on(async {
        let open = opening(MountId::random(), Access::ReadWrite);
        let mut rude = Rude::open(&site, &near, open);
        rude.opened().await;
        rude.send_request(&write(1), &[7; 4096]).await;
        assert_eq!(rude.hear().await, Some(Reply::Done { id: 1 }));
        rude.send_request(&Request::Close { id: 2 }, &[]).await;
        assert_eq!(rude.hear().await, Some(Reply::Done { id: 2 }));
        let left = std::fs::read_dir(site.directory.path().join("overlays/web")).unwrap();
        let redo = left
            .flatten()
            .filter(|file| file.file_name().to_string_lossy().starts_with("epoch-"));
        assert_eq!(redo.count(), 0, "what was staged went with the lease");
        // The connection is there yet, its lease is not.
        let direct = Request::DirectWrite {
            id: 5,
            offset: 0,
            length: 4096,
            coding: Coding::Plain,
        };
        let late = [
            (write(3), vec![7; 4096]),
            (
                Request::Commit {
                    id: 4,
                    epoch,
                    covers: 4096,
                },
                vec![],
            ),
            (direct, vec![7; 4096]),
        ];
        for (request, body) in late {
            rude.send_request(&request, &body).await;
            let reply = rude.hear().await;
            assert!(
                matches!(&reply, Some(Reply::Error { id, refusal })
                    if Some(*id) == request.id() && refusal.code == Code::Lost),
                "{request:?}: {reply:?}"
            );
        }
    });
}

/// Parts that come before and after the site has dropped what it had do not make an epoch.
#[test]
fn half_an_epoch_that_was_begun_again_is_not_committed() {
    let runtime = runtime();
    let _inside = runtime.enter();
    let before = content(3_000_000, 9);
    let site = Site::with("web", memory(&before));
    let near = Near::new(site.server.clone());
    let epoch = 5 << 32;
    let write = |id, offset| Request::Write {
        id,
        epoch,
        offset,
        length: 4096,
        coding: Coding::Plain,
    };
    let commit = |id, covers| Request::Commit { id, epoch, covers };
    runtime.block_on(async {
        let open = opening(MountId::random(), Access::ReadWrite);
        let mut rude = Rude::open(&site, &near, open);
        rude.opened().await;
        rude.send_request(&write(1, 0), &[7; 4096]).await;
        assert_eq!(rude.hear().await, Some(Reply::Done { id: 1 }));
        // A plain change: it drops what is staged.
        let (offset, length) = (1 << 20, 0);
        let trim = Request::DirectTrim {
            id: 2,
            offset,
            length,
        };
        rude.send_request(&trim, &[]).await;
        assert_eq!(rude.hear().await, Some(Reply::Done { id: 2 }));
        rude.send_request(&write(3, 8192), &[8; 4096]).await;
        assert_eq!(rude.hear().await, Some(Reply::Done { id: 3 }));
        for (id, covers) in [(4, 8192), (5, 0)] {
            rude.send_request(&commit(id, covers), &[]).await;
            let reply = rude.hear().await;
            assert!(
                matches!(&reply, Some(Reply::Error { id: of, refusal })
                    if *of == id && refusal.code == Code::OutOfOrder),
                "{reply:?}"
            );
        }
        // What is staged is there yet, and the rest can follow.
        let staged = Request::Staged {
            id: 6,
            epoch,
            from: 0,
        };
        rude.send_request(&staged, &[]).await;
        let reply = Reply::Staged {
            id: 6,
            epoch,
            runs: vec![(8192, 4096)],
            end: before.len() as u64,
        };
        assert_eq!(rude.hear().await, Some(reply));
        rude.send_request(&write(7, 0), &[7; 4096]).await;
        assert_eq!(rude.hear().await, Some(Reply::Done { id: 7 }));
        // The second is one whose answer was lost.
        for id in [8, 9] {
            rude.send_request(&commit(id, 8192), &[]).await;
            assert_eq!(rude.hear().await, Some(Reply::Committed { id, epoch }));
        }
    });
}
