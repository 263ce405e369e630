//! Hostile clients: untrusted keys, malformed frames, and (`files`) images that reach for files of the site.

mod files;

mod domains;
mod matching;
mod ownership;
mod profiles;
mod quota;
mod replicas;
mod revoked;
mod rights;
mod sharing;

use std::fs;
use std::time::Duration;

use drover_agent::domains::{AddDomain, MoveImage, RemoveDomain};
use drover_agent::machines::{
    BreakMachine, CloseMachine, CountMigration, GetGenerations, GetMissing, RefuseMachine,
};
use drover_agent::replicas::{FailOver, ForgetReplica};
use drover_agent::serve::{GetMetrics, GetStatus, Pair};
use drover_agent::vaults::OpenVault;
use drover_agent::{changes, mounts};
use drover_core::ImageName;
use drover_migrate::protocol::{
    DescribeMachine, FetchDisks, Kind, MeasureLink, OpenMove, SendDisks, SendMemory,
    TellGenerations,
};
use drover_migrate::replica::protocol::{BeginRound, CompleteRound, TellPoint};
use drover_mount::protocol::{HandOverLease, LookAtChanges, LookAtLease};
use drover_net::service::{self, Request, encode_call, kind};
use drover_net::{
    Code, ConnectOptions, Connection, FrameReader, FrameWriter, Identity, NetError, Refusal, Role,
    Ticket, connect_any, decode, greet, greet_as,
};
use drover_store::lease::MountId;
use drover_store::machine::{Generation, Seed, Token};
use drover_teleport::services::{
    BeginMatching, BeginMatchingFor, ClaimBlocks, EndFlock, GetProfile, IndexImage, JoinSession,
    KnowFiles, ListFlocks, ListImages, ListNodes, ListTransfers, LookAt, OpenFlock, OpenSession,
    PutProfile, RemoveImage, RemoveTransfer, SendFlock, ShareImage, VerifyImage,
};

use crate::world::{Site, World};

mod admission;

/// A client that can send arbitrary frames.
struct Client {
    identity: Identity,
    ticket: Ticket,
}

impl Client {
    fn new(site: &Site) -> Client {
        Client {
            identity: Identity::generate(),
            ticket: site.ticket.parse().unwrap(),
        }
    }

    async fn connect(&self) -> Connection {
        let options = ConnectOptions::named("the site");
        connect_any(
            &self.ticket.addresses,
            &self.identity,
            &self.ticket.key,
            &options,
        )
        .await
        .unwrap()
    }

    async fn greeted(&self) -> (FrameReader, FrameWriter) {
        let (mut reader, mut writer) = self.connect().await.split();
        greet(&mut reader, &mut writer, Role::Client).await.unwrap();
        reader.set_idle_timeout(Some(Duration::from_secs(60)));
        (reader, writer)
    }

    async fn ask<R: Request>(&self, request: &R) -> Result<R::Reply, NetError> {
        service::call(self.connect().await, request, |_| {}).await
    }

    async fn pair(&self, name: &str, addresses: Vec<String>) -> Result<String, NetError> {
        self.ask(&Pair {
            secret: self.ticket.secret,
            name: name.into(),
            addresses,
        })
        .await
    }

    /// The refusal in reply to a call.
    async fn refused(&self, call: &[u8]) -> Refusal {
        let (mut reader, mut writer) = self.greeted().await;
        writer.send(kind::CALL, call).await.unwrap();
        writer.flush().await.unwrap();
        let frame = reader.next().await.unwrap().unwrap();
        assert_eq!(frame.kind, kind::REFUSED, "{call:?}");
        decode(&frame.payload).unwrap()
    }
}

fn run<T>(test: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap()
        .block_on(test)
}

/// One call per service, and whether it is for local callers only.
fn every_call() -> Vec<(Vec<u8>, bool)> {
    let name = ImageName::new("a.img").unwrap();
    let session = [0; 16];
    let path = String::from("/etc/passwd");
    let order = changes::Order {
        name: name.clone(),
        rename: None,
        to: None,
        drop: false,
        dry_run: true,
    };
    let (of, key, earlier, dry_run) = (|| name.clone(), String::new(), false, false);
    let at_peers = [
        encode_call(&OpenSession { images: 1, session }),
        encode_call(&JoinSession { session }),
        encode_call(&ListImages),
        encode_call(&VerifyImage { name: of() }),
        encode_call(&OpenFlock {
            name: of(),
            id: session,
            atomic: true,
            images: Vec::new(),
        }),
        encode_call(&SendFlock {
            images: 1,
            session,
            flock: session,
        }),
        encode_call(&EndFlock {
            id: session,
            failed: Vec::new(),
            why: String::new(),
        }),
        encode_call(&ListFlocks),
        encode_call(&ListNodes),
        encode_call(&ListTransfers),
        encode_call(&RemoveTransfer { key }),
        encode_call(&RemoveImage {
            name: of(),
            dry_run,
        }),
        encode_call(&changes::ListChanges),
        encode_call(&changes::DropChanges {
            name: of(),
            earlier,
        }),
        encode_call(&order),
        encode_call(&PutProfile {
            name: of(),
            bytes: 0,
        }),
        encode_call(&GetProfile { name: of() }),
        encode_call(&ShareImage {
            name: of(),
            with: "web".into(),
            share: true,
        }),
        encode_call(&OpenMove {
            kind: Kind::Machine,
            token: Token([1; 16]),
            machine: of(),
            seed: Seed([1; 16]),
            generation: Generation(0),
            disks: Vec::new(),
            memory_bytes: 0,
            mounted: Vec::new(),
        }),
        encode_call(&SendDisks {
            kind: Kind::Disk,
            machine: of(),
            token: Token([1; 16]),
        }),
        encode_call(&FetchDisks {
            machine: of(),
            token: Token([1; 16]),
        }),
        encode_call(&SendMemory {
            machine: of(),
            token: Token([1; 16]),
        }),
        encode_call(&DescribeMachine {
            machine: of(),
            token: Some(Token([1; 16])),
            spec: None,
        }),
        encode_call(&MeasureLink),
        encode_call(&OpenVault {}),
        encode_call(&TellGenerations {
            machine: of(),
            token: Token([1; 16]),
            disk: 0,
            generations: Vec::new(),
        }),
        encode_call(&BeginRound {
            name: of(),
            seed: Seed([1; 16]),
            is_machine: true,
            disks: vec!["vd0".into()],
            every_seconds: None,
        }),
        encode_call(&CompleteRound {
            name: of(),
            round: Token([1; 16]),
            age_ms: 0,
            digests: Vec::new(),
        }),
        encode_call(&TellPoint {
            name: of(),
            round: Token([1; 16]),
            disk: 0,
            generations: Vec::new(),
        }),
        encode_call(&LookAtLease {
            image: of(),
            mount: MountId([1; 16]),
            point: true,
        }),
        encode_call(&HandOverLease {
            image: of(),
            mount: MountId([1; 16]),
            link: 1,
            token: [1; 16],
            to: None,
            to_mount: None,
            commit: true,
        }),
        b"\x07nothing".to_vec(),
    ];
    let at_home = [
        encode_call(&BeginMatching),
        encode_call(&BeginMatchingFor {
            domain: "acme".into(),
        }),
        encode_call(&AddDomain {
            name: "acme".into(),
        }),
        encode_call(&RemoveDomain {
            name: "acme".into(),
        }),
        encode_call(&MoveImage {
            name: of(),
            to: "acme".into(),
        }),
        encode_call(&ClaimBlocks::new([1; 16], 1, "n1", &[])),
        encode_call(&LookAt { runs: Vec::new() }),
        encode_call(&GetStatus),
        encode_call(&GetMetrics),
        encode_call(&KnowFiles {
            directory: path.clone(),
        }),
        encode_call(&IndexImage { path }),
        encode_call(&CloseMachine {
            kind: Kind::Disk,
            name: of(),
        }),
        encode_call(&CountMigration { moved: None }),
        encode_call(&RefuseMachine {
            kind: Kind::Machine,
            name: of(),
        }),
        encode_call(&BreakMachine { name: of() }),
        encode_call(&GetGenerations {
            name: of(),
            disk: 0,
        }),
        encode_call(&GetMissing { name: of() }),
        encode_call(&FailOver {
            name: of(),
            dry_run: true,
            force: false,
            start: false,
        }),
        encode_call(&ForgetReplica { name: of() }),
        encode_call(&mounts::ListLaunches),
        encode_call(&LookAtChanges {
            image: of(),
            mount: MountId([1; 16]),
        }),
        encode_call(&mounts::ListLeases),
        encode_call(&mounts::BreakLease { name: of() }),
    ];
    let calls = at_peers.into_iter().map(|call| (call, false));
    calls.chain(at_home.map(|call| (call, true))).collect()
}

/// Every service of a site is in the list, except those that have tests of their own.
#[test]
fn the_list_of_calls_is_whole() {
    let page = include_str!("../../../../docs/format/services.md");
    let of_sites = page.split("The mount daemon has").next().unwrap();
    let rows = of_sites.lines().filter_map(|line| line.strip_prefix("| `"));
    let mut ids: Vec<&str> = rows.filter_map(|row| row.split('`').next()).collect();
    ids.retain(|id| !["site.pair", "mount.open"].contains(id));
    let calls = every_call();
    let mut called: Vec<&str> = calls
        .iter()
        .map(|(call, _)| service::decode_call(call).unwrap().0)
        .filter(|id| *id != "nothing")
        .collect();
    ids.sort_unstable();
    called.sort_unstable();
    assert_eq!(called, ids);
}

#[test]
fn a_site_is_no_teleporter_whatever_rights_one_has() {
    let world = World::new();
    let site = world.serve("far", &[]);
    run(async {
        let peer = Client::new(&site);
        peer.pair("web", vec![]).await.unwrap();
        let domain = "acme".into();
        for call in [
            encode_call(&BeginMatching),
            encode_call(&BeginMatchingFor { domain }),
        ] {
            let refusal = peer.refused(&call).await;
            assert_eq!(refusal.code, Code::Denied);
            let text = refusal.message;
            assert!(
                text.contains("not a teleporter") && !text.contains("--can"),
                "{text}"
            );
        }
    });
}

#[test]
fn a_strangers_every_request_is_refused() {
    let world = World::new();
    let site = world.serve("far", &[]);
    run(async {
        let stranger = Client::new(&site);
        for (call, _) in every_call() {
            let refusal = stranger.refused(&call).await;
            assert_eq!(refusal.code, Code::Untrusted, "{call:?}");
        }
        let guess = encode_call(&Pair {
            secret: [7; 16],
            name: "x".into(),
            addresses: vec![],
        });
        let refusal = stranger.refused(&guess).await;
        assert_eq!(refusal.code, Code::Untrusted);
        let text = refusal.message;
        assert!(text.contains("not one of this site's"), "{text}");
    });
    assert_eq!(world.run("far", &["peers", "--json"]).ok().out, "");
}

#[test]
fn what_only_the_machine_itself_may_ask_is_refused_to_peers() {
    let world = World::new();
    let site = world.serve("far", &[]);
    run(async {
        let peer = Client::new(&site);
        peer.pair("web", vec![]).await.unwrap();
        for (call, local) in every_call() {
            if local {
                let refusal = peer.refused(&call).await;
                assert_eq!(refusal.code, Code::Denied, "{call:?}");
            }
        }
        let refusal = peer.refused(b"\x07nothing").await;
        assert_eq!(refusal.code, Code::Unsupported, "{refusal}");
        peer.ask(&ListImages).await.unwrap();
    });
}

#[test]
fn invalid_frames_end_only_their_own_connection() {
    let world = World::new();
    let site = world.serve("far", &[]);
    run(async {
        let client = Client::new(&site);
        // Too large for an untrusted sender.
        let (mut reader, mut writer) = client.greeted().await;
        let _ = writer.send(kind::CALL, &vec![0u8; 1 << 20]).await;
        let _ = writer.flush().await;
        assert!(
            !matches!(reader.next().await, Ok(Some(_))),
            "answered a frame that is too large"
        );
        // A frame kind that cannot start a call; and garbage in one that can.
        for (frame, payload) in [
            (drover_teleport::protocol::kind::LITERAL, vec![1, 2, 3]),
            (kind::CALL, vec![0xff; 64]),
            (kind::CALL, vec![]),
        ] {
            let (mut reader, mut writer) = client.greeted().await;
            writer.send(frame, &payload).await.unwrap();
            writer.flush().await.unwrap();
            assert!(
                !matches!(reader.next().await, Ok(Some(_))),
                "answered rubbish"
            );
        }
        // A protocol version older than any.
        let (mut reader, mut writer) = client.connect().await.split();
        let e = greet_as(
            &mut reader,
            &mut writer,
            Role::Client,
            "drover 0.0.1",
            0..=0,
        )
        .await
        .unwrap_err();
        assert!(e.to_string().contains("upgrade"), "{e}");
        // Disconnect without a byte.
        drop(client.connect().await);
        let goes_on = client.pair("web", vec![]).await;
        assert!(goes_on.is_ok(), "{goes_on:?}");
    });
    assert!(!site.log().contains("panicked"), "{}", site.log());
    assert_eq!(site.stop().0, Some(0));
}

#[test]
fn what_a_peer_calls_itself_is_made_harmless() {
    let world = World::new();
    let site = world.serve("far", &[]);
    run(async {
        let client = Client::new(&site);
        let addresses = [
            "\u{1b}[2J:1",
            "ok.example:7377",
            "no port",
            &"x".repeat(300),
        ]
        .map(String::from);
        let paired = client.pair("../\u{1b}]0;owned\u{7}\n", addresses.to_vec());
        paired.await.unwrap();
    });
    let peers = world.run("far", &["peers", "--json"]).ok().json();
    assert_eq!(
        peers[0]["addresses"],
        serde_json::json!(["ok.example:7377"])
    );
    let name = peers[0]["name"].as_str().unwrap();
    assert!(
        name.chars().all(|c| c.is_ascii_alphanumeric() || c == '-'),
        "{name}"
    );
    let shown = world.run("far", &["peers"]).ok().out + &site.log();
    assert!(
        !shown.contains('\u{1b}') && !shown.contains('\u{7}'),
        "{shown:?}"
    );
    world.run("far", &["peers", "forget", name, "--yes"]).ok();
}
