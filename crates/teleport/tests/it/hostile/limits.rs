//! Peers that take more than their share: of sessions, and of memory.

use drover_net::ShareLimits;
use drover_store::layout_limits;
use drover_teleport::protocol::MAX_DATA_CONNECTIONS;
use drover_teleport::{MAX_LAYOUT_MEMORY, MAX_PEER_SESSIONS, SiteConfig, Supplies};

use super::*;

/// A site with these limits.
async fn limited(dir: &std::path::Path, max_sessions: usize, max_idle: Duration) -> TestSite {
    let mut supplies = Supplies::new(max_sessions);
    supplies.max_idle = max_idle;
    let config = SiteConfig {
        supplies,
        ..config(&dir.join("there"))
    };
    TestSite::start_as(config, Default::default()).await
}

/// Opens a session, or says why not.
async fn open(there: &TestSite, identity: &Identity) -> Result<Raw, Refusal> {
    let session = drover_net::random_id();
    let mut raw = Raw::dial(there, identity, OpenSession { images: 1, session }).await;
    let reply = raw.reader.next().await.unwrap().unwrap();
    match reply_in::<OpenSession>(&reply, "there") {
        Ok(()) => Ok(raw),
        Err(NetError::Refused(refusal)) => Err(refusal),
        Err(e) => panic!("{e}"),
    }
}

/// The refusal with which the site ends a session.
async fn refusal_of(raw: &mut Raw) -> Refusal {
    let heard = raw.listen().await;
    let refused = heard.iter().find(|(k, _)| *k == kind::REFUSE);
    decode(&refused.expect("a refusal").1).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn idle_sessions_of_one_peer_keep_nobody_out() {
    let dir = tempfile::tempdir().unwrap();
    let there = limited(dir.path(), 16, Duration::from_secs(600)).await;
    let idle = Identity::generate();
    let mut opened = Vec::new();
    for _ in 0..16 {
        match open(&there, &idle).await {
            Ok(raw) => opened.push(raw),
            Err(refusal) => {
                assert_eq!(refusal.code, Code::Busy);
                assert!(refusal.message.contains("your site has 8"), "{refusal}");
            }
        }
    }
    assert_eq!(opened.len() as u64, MAX_PEER_SESSIONS);
    // Another takes the rest; a third still gets a session, and can send.
    let other = Identity::generate();
    for _ in 0..8 {
        opened.push(open(&there, &other).await.expect("a session"));
    }
    let a = dir.path().join("a.raw");
    write(&a, &image(1, 1, 20));
    Client::new().send(&[&a], &there).await.unwrap();
    same(&a, &there.image("a.raw"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_that_offers_nothing_ends() {
    let dir = tempfile::tempdir().unwrap();
    let there = limited(dir.path(), 4, Duration::from_millis(300)).await;
    let mut raw = open(&there, &Identity::generate()).await.unwrap();
    let refusal = refusal_of(&mut raw).await;
    assert!(refusal.message.contains("was idle for"), "{refusal}");
    assert!(refusal.retry);
    until("the session is closed", || {
        there.site.status().sessions == 0
    })
    .await;
}

/// Within an image a source may pause, as long as nobody waits for its session.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_that_stands_still_in_an_image_makes_room_for_others() {
    let dir = tempfile::tempdir().unwrap();
    let there = limited(dir.path(), 2, Duration::from_secs(1)).await;
    let layout = flat(10 << 20);
    let mut paused = open(&there, &Identity::generate()).await.unwrap();
    paused
        .offer(&offer("p.raw", &layout), &layout.encode())
        .await;
    assert_eq!(
        paused.reader.next().await.unwrap().unwrap().kind,
        kind::ACCEPT
    );
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert_eq!(there.site.status().sessions, 1);
    // Every peer has one session in any case, so only its second can be turned away.
    let other = Identity::generate();
    let mut held = Vec::new();
    let refusal = loop {
        match open(&there, &other).await {
            Ok(raw) => held.push(raw),
            Err(refusal) => break refusal,
        }
    };
    assert!(refusal.message.contains("all sessions"), "{refusal}");
    let refusal = refusal_of(&mut paused).await;
    assert!(refusal.message.contains("while others waited"), "{refusal}");
    until("room", || there.site.status().sessions == 0).await;
    assert!(open(&there, &other).await.is_ok());
}

/// Sixteen small messages that each describe many ranges: only as many are decoded as there is memory for.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn layouts_are_decoded_only_while_there_is_memory_for_them() {
    let dir = tempfile::tempdir().unwrap();
    // A quarter of a site's limits, since the images that are accepted must fit on the disk.
    let memory = ShareLimits {
        all: MAX_LAYOUT_MEMORY.all >> 2,
        one: MAX_LAYOUT_MEMORY.one >> 2,
        sure: MAX_LAYOUT_MEMORY.sure,
    };
    let config = SiteConfig {
        supplies: Supplies::new(16).with_layout_memory(memory),
        ..config(&dir.path().join("there"))
    };
    let there = TestSite::start_as(config, Default::default()).await;
    let runs: Vec<_> = (0..1u64 << 18).map(|i| i * 4096..i * 4096 + 1).collect();
    let large = Layout::in_file_order(4096 << 18, &runs);
    let encoded = large.encode();
    assert!(encoded.len() < 1000);
    let needed = Layout::decoding_bytes(&encoded, layout_limits()).unwrap();
    let mut sessions = Vec::new();
    for peer in 0..4 {
        let identity = Identity::generate();
        for n in 0..4 {
            let mut raw = open(&there, &identity).await.unwrap();
            let name = format!("{peer}-{n}.raw");
            raw.offer(&offer(&name, &large), &encoded).await;
            sessions.push(raw);
        }
    }
    // What another peer sends meanwhile is delivered.
    let a = dir.path().join("a.raw");
    write(&a, &image(1, 1, 20));
    Client::new().send(&[&a], &there).await.unwrap();
    let mut accepted = Vec::new();
    let mut waiting = Vec::new();
    for mut raw in sessions {
        let answer = tokio::time::timeout(Duration::from_secs(1), raw.reader.next()).await;
        match answer {
            Ok(frame) => {
                assert_eq!(frame.unwrap().unwrap().kind, kind::ACCEPT);
                accepted.push(raw);
            }
            Err(_) => waiting.push(raw),
        }
    }
    let most = memory.all / needed;
    assert!(
        (1..=most).contains(&(accepted.len() as u64)),
        "{} of {most}",
        accepted.len()
    );
    // Those that wait are accepted when others have gone.
    drop(accepted);
    let mut next = waiting.remove(0);
    let answer = next.reader.next().await.unwrap().unwrap();
    assert_eq!(answer.kind, kind::ACCEPT);
}

/// However much a source keeps them alive: they end with their session, and take no thread after it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn data_connections_end_with_their_session() {
    let dir = tempfile::tempdir().unwrap();
    let there = limited(dir.path(), 4, Duration::from_secs(600)).await;
    let identity = Identity::generate();
    let (mut raw, session) = Raw::session(&there, &identity).await;
    let join = || Raw::dial(&there, &identity, JoinSession { session });
    let mut joined = Vec::new();
    for _ in 0..MAX_DATA_CONNECTIONS {
        let mut data = join().await;
        let reply = data.reader.next().await.unwrap().unwrap();
        reply_in::<JoinSession>(&reply, "there").unwrap();
        joined.push(data);
    }
    let reply = join().await.reader.next().await.unwrap().unwrap();
    assert!(reply_in::<JoinSession>(&reply, "there").is_err());
    raw.say(kind::GOODBYE, &[]).await;
    for data in &mut joined {
        let end = async {
            loop {
                tokio::select! {
                    frame = data.reader.next() => match frame.unwrap() {
                        Some(_) => {}
                        None => return,
                    },
                    () = tokio::time::sleep(Duration::from_millis(50)) => {
                        data.writer.ping().await.unwrap();
                    }
                }
            }
        };
        let ended = tokio::time::timeout(Duration::from_secs(8), end).await;
        assert!(ended.is_ok(), "it outlived its session");
    }
    // Nor do they stay half open.
    let all = [raw].into_iter().chain(joined);
    for mut connection in all {
        let closed = async {
            while connection.writer.ping().await.is_ok() {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(40), closed)
            .await
            .unwrap();
    }
}
