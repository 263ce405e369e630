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
