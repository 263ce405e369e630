//! What a launch asks for, and how long those wait who read from it.

use std::os::unix::fs::FileExt;

use drover_core::{BLOCK_SIZE, BLOCK_SIZE_U64, BlockDevice, Digest};
use drover_net::PeerKey;

use super::*;
use crate::partials::{Contents, Transit};
use crate::protocol::Offer;

const BLOCKS: u64 = 64;
const IMAGE: ImageId = ImageId(7);

/// A raw image in transit of which nothing is here.
struct Sent {
    launch: Arc<Launch>,
    partials: Arc<Partials>,
    sessions: Arc<Serving>,
    part: File,
    _transit: Transit,
    _dir: tempfile::TempDir,
}

impl Sent {
    fn new() -> Sent {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("image.part");
        let part = File::create_new(&path).unwrap();
        let bytes = BLOCKS * BLOCK_SIZE_U64;
        part.set_len(bytes).unwrap();
        let everything = 0..bytes;
        let layout = Layout::in_file_order(bytes, std::slice::from_ref(&everything));
        let layout = Arc::new(layout);
        let opening = Opening {
            peer: PeerKey([1; 32]),
            peer_name: "paris".into(),
            offer: Offer {
                slot: 0,
                name: ImageName::new("web.raw").unwrap(),
                format: "raw".into(),
                file_bytes: bytes,
                virtual_bytes: bytes,
                walk_blocks: BLOCKS,
                layout_bytes: 1,
                stamp: Digest([1; 32]),
                dry_run: false,
            },
            image: IMAGE.0,
        };
        let (partials, sessions) = (Arc::<Partials>::default(), Arc::<Serving>::default());
        let (peer, contents) = (opening.peer, Contents::default());
        let transit = partials.begin(IMAGE, peer, &path, layout.clone(), contents);
        let launch = Launch::new(
            opening,
            "key".into(),
            layout,
            File::open(&path).unwrap(),
            partials.clone(),
            sessions.clone(),
            true,
        );
        Sent {
            launch: Arc::new(launch),
            partials,
            sessions,
            part,
            _transit: transit.unwrap(),
            _dir: dir,
        }
    }
}

#[test]
fn what_a_machine_waits_for_is_asked_for_once_more_if_it_was_only_likely_to_be_read() {
    let sent = Sent::new();
    let asked = Arc::new(Mutex::new(Vec::new()));
    let noted = asked.clone();
    let note = move |want| {
        noted.lock().push(want);
        true
    };
    let _session = sent.sessions.serve(IMAGE, Box::new(note));
    let want = |waited, blocks: std::ops::Range<u64>| Want {
        waited,
        runs: blocks.collect(),
    };
    let all: Vec<u64> = (8..24).collect();
    sent.launch.ask(&all, 1, false);
    // With what is beside it; once.
    sent.launch.ask(&[9], TOGETHER, true);
    sent.launch.ask(&[9, 10], TOGETHER, true);
    sent.launch.ask(&[9, 20, 30], 1, false);
    let expected = [want(false, 8..24), want(true, 8..16), want(false, 30..31)];
    assert_eq!(*asked.lock(), expected);
    // What is asked for again is asked for as urgently.
    sent.launch.forget(&[9]);
    sent.launch.ask(&[9], 1, true);
    assert_eq!(asked.lock().last(), Some(&want(true, 9..10)));
}

#[tokio::test(start_paused = true)]
async fn a_reader_waits_for_an_hour_and_then_reads() {
    let sent = Sent::new();
    let device = Arc::new(LaunchDevice::open(&sent.launch).unwrap());
    let at = 5 * BLOCK_SIZE_U64;
    let arrival = tokio::spawn(device.clone().arrival(at, 100));
    // The source is gone all the time.
    tokio::time::sleep(Duration::from_secs(3600)).await;
    assert!(!arrival.is_finished());
    let status = sent.launch.status();
    assert!(!status.running && status.waiting_since_unix.is_some());
    let mut read = [0; 100];
    assert!(device.read(at, &mut read).is_err());
    sent.part.write_all_at(&[3; BLOCK_SIZE], at).unwrap();
    let partial = sent.partials.get(IMAGE).unwrap();
    partial.ahead(std::iter::once(5));
    arrival.await.unwrap();
    device.read(at, &mut read).unwrap();
    assert_eq!(read, [3; 100]);
    assert_eq!(sent.launch.status().waiting_since_unix, None);
}
