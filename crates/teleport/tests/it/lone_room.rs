//! Freeing sequence data, with the matcher on another host.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use drover_index::SEGMENT_SLOTS;
use drover_net::service::IncomingCall;
use drover_store::sequences::SEQUENCE_DATA_BYTES;
use drover_teleport::LocalTeleporter;
use drover_teleport::protocol::kind;
use drover_teleport::services::BeginMatching;
use drover_teleport::testing::teleporter::Answer;
use drover_teleport::testing::{decode_event, encode_answer, handle};
use drover_teleport::{SiteConfig, open_teleporter};

use crate::harness::*;
use crate::room::{allocated, remove};
use crate::teleporter::{Three, listen, remote, three_with};

const SEGMENT_BYTES: u64 = SEGMENT_SLOTS * 4096;

/// Of this, 2 MiB may stay whatever goes.
const LIMIT: u64 = 256 << 20;

async fn all_copied(there: &TestSite) {
    until("all is copied", || {
        there.site.status().pending_sequences == 0
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sequence_data_gives_room_back_with_a_lone_teleporter() {
    let Three {
        there,
        teleporter,
        dir,
        ..
    } = three_with(LIMIT).await;
    caught_up(&there).await;
    let home = dir.path().join("there");
    let client = Client::new();
    let mut files = Vec::new();
    for (file, seed, pool) in [("a", 1, 7), ("b", 2, 7), ("c", 3, 8), ("d", 4, 8)] {
        let path = dir.path().join(file);
        write(&path, &image(seed, pool, 120));
        client.send(&[&path], &there).await.unwrap();
        files.push(path);
    }
    all_copied(&there).await;
    let known = || u64::from(teleporter.lock().sequence_segments()) * SEGMENT_BYTES;
    let all = allocated(&home);
    assert!(all > 5 << 20 && known() >= all, "{all} of {}", known());
    for gone in ["a", "b", "c"] {
        remove(&there, gone).await;
    }
    // What the one that is left shares with the next is there all the same.
    let path = dir.path().join("e");
    write(&path, &image(3, 8, 120));
    let report = client.send(&[&path], &there).await.unwrap().remove(0);
    assert!(report.matched_blocks > report.sent_blocks, "{report:?}");
    same(&path, &there.image("e"));
    for gone in ["d", "e"] {
        remove(&there, gone).await;
    }
    until("room came back", || allocated(&home) <= 2 << 20).await;
    until("it is given back there, too", || known() <= 2 << 20).await;

    // And it is used again.
    for file in &files {
        client.send(&[file], &there).await.unwrap();
        let name = file.file_name().unwrap().to_str().unwrap();
        same(file, &there.image(name));
    }
    all_copied(&there).await;
    assert!(allocated(&home) > 4 << 20, "{}", allocated(&home));
}

/// A teleporter that counts what it frees, and can be killed between that and its answer.
struct Mortal {
    dir: PathBuf,
    teleporter: LocalTeleporter,
    freed: AtomicUsize,
    dies: AtomicBool,
}

impl Mortal {
    fn new(dir: &Path) -> Arc<Self> {
        Arc::new(Mortal {
            dir: dir.into(),
            teleporter: open_teleporter(dir, SEQUENCE_DATA_BYTES, &mut Vec::new()).unwrap(),
            freed: AtomicUsize::new(0),
            dies: AtomicBool::new(false),
        })
    }

    async fn serve(
        self: Arc<Self>,
        mut call: IncomingCall,
    ) -> Result<(), drover_teleport::TeleportError> {
        call.accept::<BeginMatching>(&()).await?;
        let IncomingCall {
            mut reader,
            mut writer,
            ..
        } = call;
        writer.flush().await?;
        reader.set_max_frame(2 << 20);
        while let Some(frame) = reader.next().await? {
            let event = decode_event(&frame.payload)?;
            let mortal = self.clone();
            let answered = tokio::task::spawn_blocking(move || handle(&mortal.teleporter, event));
            let answer = answered.await.unwrap().map_err(drover_net::Refusal::from);
            if let Ok(Answer::Freed(segments)) = &answer {
                self.freed.fetch_add(segments.len(), Ordering::Relaxed);
                if !segments.is_empty() && self.dies.swap(false, Ordering::Relaxed) {
                    let again = open_teleporter(&self.dir, SEQUENCE_DATA_BYTES, &mut Vec::new());
                    let again = Arc::into_inner(again.unwrap()).unwrap();
                    *self.teleporter.lock() = again.into_inner();
                    return Ok(());
                }
            }
            writer.send(kind::PLAN, &encode_answer(&answer)).await?;
            writer.flush().await?;
        }
        Ok(())
    }

    fn known(&self) -> u64 {
        u64::from(self.teleporter.lock().sequence_segments()) * SEGMENT_BYTES
    }
}

async fn mortal(dir: &Path, reserve_bytes: u64) -> (TestSite, Arc<Mortal>) {
    let mortal = Mortal::new(&dir.join("teleporter"));
    let shared = mortal.clone();
    let (identity, address) = listen(move |call| {
        let shared = shared.clone();
        async move {
            let _ = shared.serve(call).await;
        }
    })
    .await;
    let config = SiteConfig {
        teleporter: Some(remote(&identity, &address)),
        sequence_data_bytes: LIMIT,
        reserve_bytes,
        ..config(&dir.join("there"))
    };
    let there = TestSite::start_as(config, Default::default()).await;
    caught_up(&there).await;
    (there, mortal)
}

/// What takes room is what the teleporter knows of; the file system needs a little to write that down.
async fn no_room_is_lost(there: &TestSite, mortal: &Mortal) {
    all_copied(there).await;
    until("all that is empty is given back", || {
        allocated(&there.dir) <= mortal.known() + (64 << 10)
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn room_comes_back_while_two_peers_send() {
    let dir = tempfile::tempdir().unwrap();
    let (there, mortal) = mortal(dir.path(), 0).await;
    let send = async |pool: u64| {
        let client = Client::new();
        for n in 0..6 {
            let name = |n| format!("{pool}-{n}");
            let path = dir.path().join(name(n));
            // Each content comes twice, so all of it is kept.
            write(&path, &image(pool * 100 + n / 2, pool + n / 2, 60));
            client.send(&[&path], &there).await.unwrap();
            same(&path, &there.image(&name(n)));
            if n > 0 {
                remove(&there, &name(n - 1)).await;
            }
        }
    };
    tokio::join!(send(10), send(20));
    assert_eq!(there.site.list().len(), 2);
    until("some of it is freed", || {
        mortal.freed.load(Ordering::Relaxed) > 0
    })
    .await;
    no_room_is_lost(&there, &mortal).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn room_comes_back_after_a_teleporter_that_died_over_it() {
    let dir = tempfile::tempdir().unwrap();
    let (there, mortal) = mortal(dir.path(), 0).await;
    let client = Client::new();
    let files = ["a", "b", "c", "d"].map(|name| dir.path().join(name));
    for (n, path) in files.iter().enumerate() {
        let seed = n as u64 / 2;
        write(path, &image(seed, 7 + seed, 60));
        client.send(&[path], &there).await.unwrap();
    }
    all_copied(&there).await;
    mortal.dies.store(true, Ordering::Relaxed);
    for gone in ["a", "b", "c"] {
        remove(&there, gone).await;
    }
    until("it dies", || !mortal.dies.load(Ordering::Relaxed)).await;
    // What comes next has the site look again.
    let next = dir.path().join("e");
    write(&next, &image(30, 3, 10));
    client.send(&[&next], &there).await.unwrap();
    let left = || there.site.list().iter().map(|i| i.data_bytes).sum::<u64>();
    until("it is down to what is left", || mortal.known() <= left()).await;
    no_room_is_lost(&there, &mortal).await;
    for path in &files[..3] {
        client.send(&[path], &there).await.unwrap();
        let name = path.file_name().unwrap().to_str().unwrap();
        same(path, &there.image(name));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_image_gets_the_room_of_sequence_data_with_a_lone_teleporter() {
    let dir = tempfile::tempdir().unwrap();
    let Some(_disk) = SmallDisk::mount(&dir.path().join("there"), 64 << 20) else {
        return;
    };
    let (there, mortal) = mortal(dir.path(), 4 << 20).await;
    let client = Client::new();
    for name in ["a", "b"] {
        let path = dir.path().join(name);
        write(&path, &image(1, 7, 60));
        client.send(&[&path], &there).await.unwrap();
    }
    all_copied(&there).await;
    let before = allocated(&there.dir);
    assert!(before > 3 << 20, "{before}");
    let needed = there.site.free_bytes().unwrap() + (2 << 20);
    let mut own = vec![0; needed as usize];
    fastrand::Rng::with_seed(9).fill(&mut own);
    let path = dir.path().join("own");
    write(&path, &own);
    client.send(&[&path], &there).await.unwrap();
    same(&path, &there.image("own"));
    assert!(mortal.freed.load(Ordering::Relaxed) > 0);
    assert!(before - allocated(&there.dir) >= 2 << 20);
}
