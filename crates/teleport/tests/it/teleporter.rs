//! A teleporter on a third host: its use, and that transfers succeed without it.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use drover_core::CompactIndex;
use drover_index::{ImageId, Origin, Plan, PlanRun, SequenceStore, Via};
use drover_net::service::{IncomingCall, Request};
use drover_net::{Frame, Identity, Listener};
use drover_teleport::LocalTeleporter;
use drover_teleport::progress::SendEvent;
use drover_teleport::protocol::kind;
use drover_teleport::serve_teleporter;
use drover_teleport::services::BeginMatching;
use drover_teleport::testing::connect;
use drover_teleport::testing::teleporter::{Answer, Event, ImageEvent};
use drover_teleport::testing::{decode_event, encode_answer, encode_event};
use drover_teleport::{RemoteTeleporter, SiteConfig, TeleportError, open_teleporter};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

use crate::harness::*;

/// A link that can be cut, with all that is on it, and healed.
pub struct Link {
    address: String,
    up: watch::Sender<bool>,
}

async fn link(to: String) -> Link {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let (up, state) = watch::channel(true);
    tokio::spawn(async move {
        loop {
            let (mut from, _) = listener.accept().await.unwrap();
            let mut state = state.clone();
            if !*state.borrow() {
                continue;
            }
            let mut to = TcpStream::connect(&to).await.unwrap();
            tokio::spawn(async move {
                tokio::select! {
                    _ = tokio::io::copy_bidirectional(&mut from, &mut to) => {}
                    Ok(_) = state.wait_for(|up| !up) => {}
                }
            });
        }
    });
    Link { address, up }
}

/// Listens as a teleporter would and hands over the connections of sites.
pub async fn listen<F, Fut>(serve: F) -> (Identity, String)
where
    F: Fn(IncomingCall) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = ()> + Send + 'static,
{
    let identity = Identity::generate();
    let bind = "127.0.0.1:0".parse().unwrap();
    let listener = Listener::bind(bind, &identity).await.unwrap();
    let address = listener.local_addr().to_string();
    let serve = Arc::new(serve);
    tokio::spawn(async move {
        while let Ok(pending) = listener.accept().await {
            let serve = serve.clone();
            tokio::spawn(async move {
                let Ok(connection) = pending.handshake().await else {
                    return;
                };
                let stop = watch::channel(false).1;
                let Ok(call) = IncomingCall::receive(connection, stop).await else {
                    return;
                };
                assert_eq!(call.service, BeginMatching::SERVICE);
                serve(call).await;
            });
        }
    });
    (identity, address)
}

/// A teleporter behind a link, and a site that uses it.
pub struct Three {
    pub there: TestSite,
    link: Link,
    pub teleporter: LocalTeleporter,
    /// How the site reaches it.
    remote: RemoteTeleporter,
    pub dir: tempfile::TempDir,
}

async fn three() -> Three {
    three_with(drover_store::sequences::SEQUENCE_DATA_BYTES).await
}

/// The same, with a site that keeps so much sequence data.
pub async fn three_with(sequence_data_bytes: u64) -> Three {
    let dir = tempfile::tempdir().unwrap();
    let teleporter = open_teleporter(
        &dir.path().join("teleporter"),
        drover_store::sequences::SEQUENCE_DATA_BYTES,
        &mut Vec::new(),
    )
    .unwrap();
    let shared = teleporter.clone();
    let (identity, address) = listen(move |call| {
        let shared = shared.clone();
        async move {
            let _ = serve_teleporter(call, shared, |_| false).await;
        }
    })
    .await;
    let link = link(address).await;
    let remote = remote(&identity, &link.address);
    let there = site_with(&dir.path().join("there"), &remote, sequence_data_bytes).await;
    Three {
        there,
        link,
        teleporter,
        remote,
        dir,
    }
}

pub fn remote(teleporter: &Identity, address: &str) -> RemoteTeleporter {
    RemoteTeleporter {
        domain: "default".into(),
        identity: Identity::generate(),
        key: teleporter.key(),
        addresses: vec![address.into()],
    }
}

async fn site(dir: &Path, remote: &RemoteTeleporter) -> TestSite {
    site_with(dir, remote, drover_store::sequences::SEQUENCE_DATA_BYTES).await
}

async fn site_with(dir: &Path, remote: &RemoteTeleporter, sequence_data_bytes: u64) -> TestSite {
    let config = SiteConfig {
        teleporter: Some(remote.clone()),
        sequence_data_bytes,
        ..config(dir)
    };
    TestSite::start_as(config, Default::default()).await
}

fn written(dir: &Path, name: &str, seed: u64, files: usize) -> std::path::PathBuf {
    let path = dir.join(name);
    write(&path, &image(seed, 5, files));
    path
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn images_arrive_and_the_second_costs_less() {
    let Three {
        there,
        teleporter,
        dir,
        ..
    } = three().await;
    let a = written(dir.path(), "a.raw", 1, 150);
    let b = written(dir.path(), "b.raw", 2, 150);
    let client = Client::new();
    let reports = client.send(&[&a, &b], &there).await.unwrap();
    same(&a, &there.image("a.raw"));
    same(&b, &there.image("b.raw"));
    let second = &reports[1];
    assert!(second.matched_blocks > second.sent_blocks, "{second:?}");
    assert!(second.wire_sent_bytes < reports[0].wire_sent_bytes);
    // The site has no matcher: it was that one.
    assert!(there.site.status().matcher.is_empty());
    assert!(teleporter.lock().stats().matched >= second.matched_blocks);
    // In place of itself, and as another.
    for name in ["a.raw", "c.raw"] {
        let mut again = items(&[&a]);
        again[0].name = drover_core::ImageName::new(name).unwrap();
        let options = client.options(&there, &there.address);
        let reports = client.send_with(again, options).await.unwrap();
        assert_eq!(reports[0].sent_blocks, 0, "{reports:?}");
        same(&a, &there.image(name));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_teleporter_that_dies_costs_matches_and_nothing_else() {
    let Three {
        there, link, dir, ..
    } = three().await;
    let a = written(dir.path(), "a.raw", 1, 60);
    let client = Client::new();
    client.send(&[&a], &there).await.unwrap();
    // Of the same name, so that the teleporter would have to forget the one before.
    let own: Vec<u8> = std::iter::repeat_with({
        let mut rng = fastrand::Rng::with_seed(5);
        move || rng.u8(..)
    })
    .take(30 << 20)
    .collect();
    write(&a, &[own, std::fs::read(&a).unwrap()].concat());
    let mut options = client.options(&there, &there.address);
    options.limit = Some(Arc::new(drover_net::RateLimit::new(12 << 20)));
    let counters = client.counters.clone();
    let up = link.up.clone();
    let before = counters.sent_blocks.load(Ordering::Relaxed);
    let cut = tokio::spawn(async move {
        while counters.sent_blocks.load(Ordering::Relaxed) < before.min(1) + 1500 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        up.send_replace(false);
    });
    let reports = client.send_with(items(&[&a]), options).await.unwrap();
    cut.await.unwrap();
    same(&a, &there.image("a.raw"));
    let r = &reports[0];
    let blocks = r.matched_blocks + r.sent_blocks + r.zero_blocks + r.resumed_blocks;
    assert_eq!(blocks, r.size_bytes.div_ceil(4096), "{r:?}");
    assert_eq!(there.site.list().len(), 1);
    // Without it from the start.
    let b = written(dir.path(), "b.raw", 2, 60);
    let reports = client.send(&[&b], &there).await.unwrap();
    same(&b, &there.image("b.raw"));
    assert_eq!(reports[0].matched_blocks, 0, "{reports:?}");
    // And when it is back, what it knows helps again.
    link.up.send_replace(true);
    let c = written(dir.path(), "c.raw", 3, 60);
    client.send(&[&c], &there).await.unwrap();
    let mut again = items(&[&c]);
    again[0].name = drover_core::ImageName::new("d.raw").unwrap();
    let options = client.options(&there, &there.address);
    let reports = client.send_with(again, options).await.unwrap();
    assert_eq!(reports[0].sent_blocks, 0, "{reports:?}");
    same(&c, &there.image("d.raw"));
}

/// What a teleporter that has gone mad might answer.
fn mad_answer(rng: &mut fastrand::Rng, blocks: u32, own: ImageId) -> Vec<u8> {
    let mut runs = Vec::new();
    let mut left = blocks;
    while left > 0 {
        let count = rng.u32(1..=left.min(300));
        left -= count;
        let first = match rng.u8(0..3) {
            0 => rng.u64(0..3000),
            1 => rng.u64(0..1 << 20),
            _ => 1 << 40,
        };
        let origin = match rng.u8(0..4) {
            0 => Origin::Literal,
            1 => Origin::Image {
                image: own,
                first: CompactIndex(first),
            },
            2 => Origin::Image {
                image: ImageId(rng.u64(0..4)),
                first: CompactIndex(first),
            },
            _ => Origin::Sequence { first },
        };
        runs.push(PlanRun {
            count,
            origin,
            via: Via::C1,
        });
    }
    let stores = (0..rng.usize(0..20))
        .map(|_| SequenceStore {
            first: rng.u64(..9) + (1 << rng.u32(..40)),
            from: CompactIndex(rng.u64(..9) + (1 << rng.u32(..40))),
            count: rng.u32(0..=2048),
        })
        .collect();
    encode_answer(&Ok(Answer::Plan(Plan { runs, stores })))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whatever_a_teleporter_answers_the_images_are_right() {
    let dir = tempfile::tempdir().unwrap();
    for (seed, rubbish) in [(1, false), (2, false), (3, true)] {
        let (identity, address) = listen(move |call| async move {
            let _ = mad_teleporter(call, seed, rubbish).await;
        })
        .await;
        let home = dir.path().join(format!("there-{seed}"));
        let there = site(&home, &remote(&identity, &address)).await;
        let client = Client::new();
        for n in 0..3 {
            let name = format!("{n}.raw");
            let path = written(dir.path(), &name, 10 + n, 100);
            client.send(&[&path], &there).await.unwrap();
            same(&path, &there.image(&name));
        }
    }
}

async fn mad_teleporter(
    mut call: IncomingCall,
    seed: u64,
    rubbish: bool,
) -> Result<(), TeleportError> {
    let mut rng = fastrand::Rng::with_seed(seed);
    call.accept::<BeginMatching>(&()).await?;
    let IncomingCall {
        mut reader,
        mut writer,
        ..
    } = call;
    writer.flush().await?;
    reader.set_max_frame(2 << 20);
    while let Some(Frame { payload, .. }) = reader.next().await? {
        let answer = match decode_event(&payload)? {
            Event::Match(..) if rubbish && rng.bool() => (0..99).map(|_| rng.u8(..)).collect(),
            Event::Match(own, batch) => mad_answer(&mut rng, batch.digests.len() as u32, own),
            _ => encode_answer(&Ok(Answer::Done)),
        };
        writer.send(kind::PLAN, &answer).await?;
        writer.flush().await?;
    }
    Ok(())
}

/// Frames that make no sense end their connection, and what it had begun is given up.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_site_that_breaks_the_rules_ends_its_own_connection_only() {
    let Three {
        there,
        teleporter,
        remote,
        dir,
        ..
    } = three().await;
    for frame in [
        (kind::MATCH, vec![]),
        (kind::MATCH, vec![9, 9, 9]),
        (kind::PLAN, vec![0, 1]),
        (kind::BATCH, vec![5; 100]),
    ] {
        let mut remote = connect(&remote).await.unwrap();
        let begin = encode_event(&Event::Image(ImageId(900), ImageEvent::Begin));
        for (kind, payload) in [(kind::MATCH, begin), frame] {
            let payload = payload.into();
            remote.to.send(Frame { kind, payload }).await.unwrap();
        }
        let first = remote.from.recv().await.unwrap().unwrap();
        assert_eq!(first.kind, kind::PLAN);
        let end = remote.from.recv().await;
        assert!(!matches!(end, Some(Ok(_))), "{end:?}");
    }
    assert!(format!("{:?}", teleporter.lock()).contains("in_transit: 0"));
    let a = written(dir.path(), "a.raw", 1, 30);
    Client::new().send(&[&a], &there).await.unwrap();
    same(&a, &there.image("a.raw"));
}

/// Whether the teleporter has hash files of so many whole images.
async fn knows_images(teleporter: &LocalTeleporter, images: usize) {
    until("the teleporter has the images", || {
        teleporter.lock().whole_images().len() == images
    })
    .await;
}

async fn again(client: &Client, path: &Path, name: &str, there: &TestSite) -> u64 {
    let mut items = items(&[path]);
    items[0].name = drover_core::ImageName::new(name).unwrap();
    let options = client.options(there, &there.address);
    let reports = client.send_with(items, options).await.unwrap();
    same(path, &there.image(name));
    reports[0].sent_blocks
}

/// What was delivered while it could not be reached is matched once it can be, and what went is forgotten.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_teleporter_that_was_away_gets_what_it_missed() {
    let Three {
        there,
        link,
        teleporter,
        dir,
        ..
    } = three().await;
    let [a, b, c] = [1, 2, 3].map(|n| written(dir.path(), &format!("{n}.raw"), n, 60));
    let client = Client::new();
    client.send(&[&a], &there).await.unwrap();
    link.up.send_replace(false);
    client.send(&[&b], &there).await.unwrap();
    let name = drover_core::ImageName::new("1.raw").unwrap();
    let (site, gone) = (there.site.clone(), name.clone());
    let removed = tokio::task::spawn_blocking(move || site.remove(&gone));
    removed.await.unwrap().unwrap();
    assert!(there.site.status().catching_up);
    link.up.send_replace(true);
    caught_up(&there).await;
    knows_images(&teleporter, 1).await;
    assert_eq!(again(&client, &b, "b.raw", &there).await, 0);
    client.send(&[&c], &there).await.unwrap();
    assert_eq!(again(&client, &c, "c.raw", &there).await, 0);
}

/// One that begins anew, and a site that starts meanwhile.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_teleporter_that_lost_its_files_is_filled_again() {
    let Three {
        there,
        teleporter,
        remote,
        dir,
        ..
    } = three().await;
    let [a, b] = [1, 2].map(|n| written(dir.path(), &format!("{n}.raw"), n, 60));
    let client = Client::new();
    client.send(&[&a, &b], &there).await.unwrap();
    let catalog = there.kill().await;
    let new = open_teleporter(&dir.path().join("new"), 1 << 30, &mut Vec::new()).unwrap();
    *teleporter.lock() = std::sync::Arc::into_inner(new).unwrap().into_inner();
    let home = dir.path().join("there");
    let there = TestSite::start_as(
        SiteConfig {
            teleporter: Some(remote.clone()),
            ..config(&home)
        },
        catalog,
    )
    .await;
    caught_up(&there).await;
    knows_images(&teleporter, 2).await;
    for (path, name) in [(&a, "a.raw"), (&b, "b.raw")] {
        assert_eq!(again(&client, path, name, &there).await, 0);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dry_run_asks_the_lone_teleporter() {
    let Three {
        there, link, dir, ..
    } = three().await;
    let [a, b] = [1, 2].map(|n| written(dir.path(), &format!("{n}.raw"), n, 150));
    let client = Client::new();
    client.send(&[&a], &there).await.unwrap();
    let dry = async |path: &Path| {
        let options = drover_teleport::SendOptions {
            dry_run: true,
            ..client.options(&there, &there.address)
        };
        client.send_with(items(&[path]), options).await?;
        let last = client.events.lock().unwrap().pop().unwrap();
        match last {
            SendEvent::Estimated { estimate, .. } => Ok::<_, TeleportError>(estimate),
            other => panic!("{other:?}"),
        }
    };
    let estimate = dry(&b).await.unwrap();
    assert!(!there.image("2.raw").exists());
    // One run does not change the next.
    assert_eq!(dry(&b).await.unwrap(), estimate);
    assert_eq!(dry(&a).await.unwrap().sent_blocks, 0);
    let report = client.send(&[&b], &there).await.unwrap().remove(0);
    // It does not see what the image repeats of itself across batches.
    assert!(
        estimate.sent_blocks >= report.sent_blocks
            && estimate.matched_blocks > report.matched_blocks / 2,
        "{estimate:?} {report:?}"
    );
    link.up.send_replace(false);
    let error = dry(&b).await.unwrap_err().to_string();
    assert!(error.contains("without an estimate"), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_destination_that_asks_nothing_makes_room_for_others() {
    let dir = tempfile::tempdir().unwrap();
    let teleporter = open_teleporter(dir.path(), 1 << 20, &mut Vec::new()).unwrap();
    let (tell, mut ended) = tokio::sync::mpsc::channel(1);
    let (identity, address) = listen(move |call| {
        let (teleporter, tell) = (teleporter.clone(), tell.clone());
        async move {
            let max = Duration::from_secs(2);
            let end = serve_teleporter(call, teleporter, |idle| idle >= max).await;
            tell.send(end).await.unwrap();
        }
    })
    .await;
    let mut link = connect(&remote(&identity, &address)).await.unwrap();
    // One that asks now and then stays.
    let ask = || Frame::new(kind::MATCH, encode_event(&Event::List));
    for _ in 0..4 {
        tokio::time::sleep(Duration::from_secs(1)).await;
        link.to.send(ask()).await.unwrap();
        link.from.recv().await.unwrap().unwrap();
    }
    let end = tokio::time::timeout(Duration::from_secs(10), ended.recv()).await;
    let end = end.unwrap().unwrap().unwrap_err();
    assert!(end.to_string().contains("while others waited"), "{end}");
    assert!(link.from.recv().await.is_none(), "it hung up");
}
