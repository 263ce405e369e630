//! A site can be stopped while an image is only being compared or estimated.

use std::time::Duration;

use drover_net::{Peer, PeerKey, Rights};
use tokio::sync::watch;

use super::*;
use crate::session::SessionShared;
use crate::site::tests::Home;
use crate::transfer::tests::{Sample, sample};

struct Ends {
    session: Session,
    frames: Frames,
    /// Frames from the source.
    source: mpsc::Sender<Result<Frame, TeleportError>>,
    /// Frames sent to the source.
    told: mpsc::Receiver<Frame>,
    stop: watch::Sender<bool>,
    _home: Home,
}

async fn ends() -> Ends {
    let home = Home::new();
    let (site, home) = tokio::task::spawn_blocking(move || (home.open().0, home))
        .await
        .unwrap();
    let (source, control) = mpsc::channel(64);
    let (to, first_data) = mpsc::channel(1);
    let (out, told) = mpsc::channel(64);
    let (stop, stopped) = watch::channel(false);
    let peer = Peer {
        key: PeerKey([3; 32]),
        name: "lyon".into(),
        rights: Rights::DEFAULT.of_peer(),
        domain: "default".into(),
    };
    let shared = SessionShared::new(peer, 1, to, None);
    Ends {
        session: Session {
            site,
            shared: Arc::new(shared),
            out,
            stop: stopped,
            generations: None,
            likeness: None,
            profile_parts: Vec::new(),
            profile: None,
        },
        frames: Frames {
            control,
            first_data,
            peer: "lyon".into(),
            wants: false,
        },
        source,
        told,
        stop,
        _home: home,
    }
}

fn dry_run(sample: &Sample) -> Offer {
    Offer {
        dry_run: true,
        ..sample.opening.offer.clone()
    }
}

fn frame(kind: u8, payload: Vec<u8>) -> Result<Frame, TeleportError> {
    let payload = payload.into();
    Ok(Frame { kind, payload })
}

/// Waits for a stopped image to end; returns how many of the sent frames it has read.
async fn ended(
    image: impl Future<Output = (Result<(), TeleportError>, Frames)>,
    sent: usize,
) -> usize {
    let ended = tokio::time::timeout(Duration::from_secs(60), image).await;
    let (result, mut frames) = ended.expect("it does not hear that it is to stop");
    assert!(matches!(result, Err(TeleportError::Stopped)), "{result:?}");
    frames.control.close();
    let mut left = 0;
    while frames.control.recv().await.is_some() {
        left += 1;
    }
    sent - left
}

#[tokio::test]
async fn a_layout_is_not_read_once_the_site_stops() {
    let sample = sample("a.raw", 1, 3_000_000);
    let mut ends = ends().await;
    ends.stop.send_replace(true);
    let layout = frame(kind::LAYOUT, sample.layout.encode());
    ends.source.send(layout).await.unwrap();
    let image = async {
        let done = ends.session.image_told(dry_run(&sample), &mut ends.frames);
        (done.await, ends.frames)
    };
    assert_eq!(ended(image, 1).await, 0);
}

#[tokio::test]
async fn a_dry_run_ends_when_the_site_stops() {
    let sample = sample("a.raw", 1, 3_000_000);
    let mut ends = ends().await;
    let layout = frame(kind::LAYOUT, sample.layout.encode());
    ends.source.send(layout).await.unwrap();
    let offer = dry_run(&sample);
    let (mut session, mut frames) = (ends.session, ends.frames);
    let image = tokio::spawn(async move {
        let done = session.image_told(offer, &mut frames).await;
        (done, frames)
    });
    assert_eq!(ends.told.recv().await.unwrap().kind, kind::ACCEPT);
    ends.stop.send_replace(true);
    for batch in &sample.batches {
        let batch = frame(kind::BATCH, batch.encode());
        ends.source.send(batch).await.unwrap();
    }
    let sent = sample.batches.len();
    assert_eq!(ended(async { image.await.unwrap() }, sent).await, 0);
}

/// What a session answers to a profile in these parts, before an offer of this disk.
async fn answer_to(parts: Vec<Vec<u8>>) -> String {
    let sample = sample("a.raw", 1, 3_000_000);
    let ends = ends().await;
    for part in parts {
        ends.source.send(frame(kind::PROFILE, part)).await.unwrap();
    }
    let offer = frame(kind::OFFER, encode(&sample.opening.offer));
    ends.source.send(offer).await.unwrap();
    let layout = frame(kind::LAYOUT, sample.layout.encode());
    ends.source.send(layout).await.unwrap();
    let (mut session, mut frames) = (ends.session, ends.frames);
    tokio::spawn(async move { session.run(&mut frames).await });
    let mut told = ends.told;
    let first = told.recv().await.unwrap();
    match first.kind {
        kind::ACCEPT => "accepted".into(),
        kind::REFUSE => decode::<Refusal>(&first.payload).unwrap().message,
        other => panic!("{other:#04x}"),
    }
}

#[tokio::test]
async fn a_profile_that_cannot_be_of_the_disk_is_refused_in_one_line() {
    use drover_store::profile::{FirstRead, MAX_BYTES, Profile};
    let reads: Vec<FirstRead> = (0..9).map(|block| FirstRead { block, at_ms: 1 }).collect();
    let of = |bytes: u64| Profile::without_content(bytes, &reads).encode();
    let good = of(3_000_000);
    let halves = good.split_at(good.len() / 2);
    assert_eq!(
        answer_to(vec![halves.0.to_vec(), halves.1.to_vec()]).await,
        "accepted"
    );
    assert_eq!(answer_to(vec![]).await, "accepted");
    let mut bad = good.clone();
    bad[30] ^= 1;
    for (parts, why) in [
        (vec![bad], "damaged"),
        (vec![halves.0.to_vec()], "damaged"),
        (vec![of(2_000_000)], "a disk of another size"),
        (vec![good, Vec::new()], "empty"),
        (
            vec![vec![7; 1 << 20]; MAX_BYTES / (1 << 20) + 1],
            "too long",
        ),
    ] {
        let answer = answer_to(parts).await;
        assert!(
            answer.contains(why) && answer.contains("profile"),
            "{answer}"
        );
        assert!(!answer.contains('\n'), "{answer}");
    }
}
