//! A leecher whose seeder is the test: each thing is said when it is to be.

use std::os::unix::fs::MetadataExt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use drover_core::{BlockDevice, DeviceError};
use drover_device::backend::MemoryDevice;
use drover_net::{Code, FrameReader, FrameWriter, NetError, encode};
use drover_store::machine::{Decision, Generation, MachineRecord, Machines, Other, Seed, Token};
use parking_lot::Mutex;
use tokio::runtime::Runtime;
use tokio::sync::mpsc;

use super::super::protocol::{self, FetchPages, Left, OpenProgram, PartOffer, SendPages};
use super::super::site::call;
use super::super::*;
use super::world::{Way, name, runtime, serve};
use crate::error::MigrateError;
use crate::protocol::{Answer, Ask, Coding, WriteHead, kind};
use crate::talk::Talk;

const SIZE: u64 = 4 * 4096;
const SEED: Seed = Seed([3; 16]);

struct There {
    made: Mutex<Vec<Weak<MemoryDevice>>>,
    device: Mutex<Option<Arc<dyn BlockDevice>>>,
    /// Told before it reads all of the device.
    reads: Option<mpsc::UnboundedSender<()>>,
    discards: AtomicU64,
}

impl Host for There {
    fn prepare(&self, _parts: &[PartOffer]) -> Result<Vec<Target>, drover_net::Refusal> {
        let below = Arc::new(MemoryDevice::new(SIZE));
        self.made.lock().push(Arc::downgrade(&below));
        let (target, device) = Target::device(below);
        *self.device.lock() = Some(device);
        Ok(vec![target])
    }

    fn run(&self, _state: Vec<u8>) -> Result<(), String> {
        let Some(reads) = &self.reads else {
            return Ok(());
        };
        reads.send(()).unwrap();
        let device = self.device.lock().clone().unwrap();
        let read = device.read(0, &mut [0; SIZE as usize]);
        read.map_err(|e: DeviceError| e.to_string())
    }

    fn discard(&self, _why: &str) {
        *self.device.lock() = None;
        self.discards.fetch_add(1, Ordering::SeqCst);
    }
}

/// The process that takes it.
struct Process {
    runtime: Runtime,
    host: Arc<There>,
    leecher: Arc<Leecher<There>>,
    site: Arc<dyn Site>,
    patience_ms: u64,
}

impl Process {
    fn start(machines: &Machines, reads: Option<mpsc::UnboundedSender<()>>) -> Self {
        let runtime = runtime();
        let host = Arc::new(There {
            made: Mutex::default(),
            device: Mutex::default(),
            reads,
            discards: AtomicU64::new(0),
        });
        let leecher = Leecher::new(name("program"), machines.clone(), Arc::clone(&host));
        let site = Way::new(serve(&runtime, &leecher));
        Self {
            runtime,
            host,
            leecher,
            site,
            patience_ms: 60_000,
        }
    }

    fn kill(self) {
        drop(self.site);
        self.runtime.shutdown_timeout(Duration::from_secs(10));
    }
}

fn machines() -> (tempfile::TempDir, Machines) {
    let directory = tempfile::tempdir().unwrap();
    let machines = Machines::new(directory.path().join("there"));
    (directory, machines)
}

fn token(n: u8) -> Token {
    Token([n; 16])
}

async fn open(process: &Process, n: u8, generation: u64) -> Result<(Talk, Answer), MigrateError> {
    let offer = OpenProgram {
        token: token(n),
        program: name("program"),
        seed: SEED,
        generation: Generation(generation),
        parts: vec![PartOffer {
            name: "disk".into(),
            size: SIZE,
        }],
        patience_ms: process.patience_ms,
    };
    let (reader, writer) = call(&process.site, &offer).await?;
    let mut talk = Talk::new(reader, writer);
    let answer = talk.hear(kind::ANSWER).await?;
    Ok((talk, answer))
}

async fn ask(talk: &mut Talk, ask: Ask) -> Answer {
    talk.say(kind::ASK, &ask).await.unwrap();
    talk.hear(kind::ANSWER).await.unwrap()
}

async fn pages(process: &Process) -> Result<(FrameReader, FrameWriter), MigrateError> {
    let request = SendPages {
        program: name("program"),
        token: token(1),
    };
    call(&process.site, &request).await
}

async fn write(writer: &mut FrameWriter, block: u64, byte: u8) {
    let head = WriteHead {
        disk: 0,
        offset: block * 4096,
        length: 4096,
        coding: Coding::Plain,
    };
    let mut payload = encode(&head);
    payload.extend_from_slice(&[byte; 4096]);
    writer.send(kind::WRITE, &payload).await.unwrap();
    writer.flush().await.unwrap();
}

async fn flush(reader: &mut FrameReader, writer: &mut FrameWriter) {
    writer.send(kind::FLUSH, &[]).await.unwrap();
    writer.flush().await.unwrap();
    let frame = reader.next().await.unwrap().unwrap();
    assert_eq!(frame.kind, kind::FLUSHED);
}

/// All that is said before it is committed, with a block that is left or not.
async fn copied(process: &Process, is_left: bool) -> (Talk, FrameReader, FrameWriter) {
    let (mut talk, answer) = open(process, 1, 0).await.unwrap();
    assert_eq!(answer.decision, Decision::Open);
    ask(&mut talk, Ask::Begin).await;
    ask(&mut talk, Ask::Prepare).await;
    let (reader, mut writer) = pages(process).await.unwrap();
    write(&mut writer, 1, 1).await;
    if is_left {
        let left = encode(&Left {
            part: 0,
            runs: vec![(1, 1)],
        });
        writer.send(protocol::kind::LEFT, &left).await.unwrap();
    }
    writer.send(protocol::kind::STATE, b"").await.unwrap();
    writer.flush().await.unwrap();
    (talk, reader, writer)
}

fn record(machines: &Machines) -> MachineRecord {
    machines.load(&name("program")).unwrap().unwrap()
}

fn settled(machines: &Machines) -> Settled {
    runtime()
        .block_on(settle(machines, &name("program"), None))
        .unwrap()
}

#[test]
fn what_has_come_in_part_is_not_started_from_its_devices_when_its_process_dies() {
    let (_directory, machines) = machines();
    let process = Process::start(&machines, None);
    process.runtime.block_on(async {
        let (mut talk, _reader, _writer) = copied(&process, true).await;
        let answer = ask(&mut talk, Ask::Commit).await;
        assert_eq!(answer.decision, Decision::Taken);
        let running = Leecher::stage(&process.leecher).borrow().clone();
        assert_eq!(running, Stage::Running);
        // Another process of this site must wait, and so must another move.
        assert!(machines.lock(&name("program")).unwrap().is_none());
    });
    process.kill();
    for _ in 0..2 {
        assert_eq!(settled(&machines), Settled::Incomplete("here".into()));
    }
    let again = Process::start(&machines, None);
    let file = machines.directory().join("program");
    let before = std::fs::metadata(&file).unwrap().ino();
    again.runtime.block_on(async {
        let (_, answer) = open(&again, 1, 0).await.unwrap();
        // Whether what that process had written is durable is not known.
        assert_ne!(std::fs::metadata(&file).unwrap().ino(), before);
        assert_eq!(answer.decision, Decision::Taken);
        assert!(answer.why.contains("lost"), "{}", answer.why);
        let refused = pages(&again).await.map(drop).unwrap_err();
        assert!(super::super::behind::is_unknown(&refused), "{refused}");
    });
    again.kill();
    assert_eq!(settled(&machines), Settled::Incomplete("here".into()));
}

#[test]
fn the_seeder_may_end_when_it_is_recorded_that_all_has_come() {
    let (_directory, machines) = machines();
    let process = Process::start(&machines, None);
    process.runtime.block_on(async {
        let (mut talk, mut reader, mut writer) = copied(&process, true).await;
        ask(&mut talk, Ask::Commit).await;
        assert!(record(&machines).is_partial());
        write(&mut writer, 1, 2).await;
        flush(&mut reader, &mut writer).await;
        assert!(record(&machines).under_way.is_none());
    });
    assert_eq!(*process.leecher.stage().borrow(), Stage::Complete);
    process.kill();
    assert_eq!(settled(&machines), Settled::Here);
}

#[test]
fn a_seeder_that_comes_back_brings_what_was_given_up() {
    let (_directory, machines) = machines();
    let mut process = Process::start(&machines, None);
    process.patience_ms = 0;
    process.runtime.block_on(async {
        let (mut talk, reader, writer) = copied(&process, true).await;
        ask(&mut talk, Ask::Commit).await;
        drop((talk, reader, writer));
        let mut stage = process.leecher.stage();
        let lost = stage.wait_for(|stage| matches!(stage, Stage::Lost(_)));
        tokio::time::timeout(Duration::from_secs(30), lost)
            .await
            .unwrap()
            .unwrap();
        let device = process.host.device.lock().clone().unwrap();
        device.read(4096, &mut [0]).unwrap_err();
        let (mut reader, mut writer) = pages(&process).await.unwrap();
        write(&mut writer, 1, 2).await;
        flush(&mut reader, &mut writer).await;
        let mut found = [0];
        device.read(4096, &mut found).unwrap();
        assert_eq!(found, [2]);
        process.leecher.complete().await.unwrap();
    });
    process.kill();
    assert_eq!(settled(&machines), Settled::Here);
}

#[test]
fn what_was_flushed_before_it_is_taken_is_whole() {
    for is_flushed in [true, false] {
        let (_directory, machines) = machines();
        let process = Process::start(&machines, None);
        process.runtime.block_on(async {
            let (mut talk, mut reader, mut writer) = copied(&process, false).await;
            if is_flushed {
                flush(&mut reader, &mut writer).await;
            }
            ask(&mut talk, Ask::Commit).await;
            assert_eq!(record(&machines).is_partial(), !is_flushed);
        });
        process.kill();
    }
}

#[test]
fn a_move_that_is_refused_changes_nothing_of_the_one_that_is_under_way() {
    let (_directory, machines) = machines();
    let from = Other {
        key: [1; 32],
        name: "here".into(),
    };
    let known = MachineRecord::foreign(SEED, Generation(5), from);
    machines.store(&name("program"), &known).unwrap();
    let process = Process::start(&machines, None);
    process.runtime.block_on(async {
        let (mut talk, _) = open(&process, 1, 5).await.unwrap();
        ask(&mut talk, Ask::Begin).await;
        ask(&mut talk, Ask::Prepare).await;
        let code = |refused: Result<_, MigrateError>| match refused.map(drop) {
            Err(MigrateError::Net(NetError::Refused(refusal))) => refusal.code,
            other => panic!("{other:?}"),
        };
        // An older copy.
        assert_eq!(code(open(&process, 2, 4).await), Code::Denied);
        let (_reader, mut writer) = pages(&process).await.unwrap();
        let left = encode(&Left {
            part: 0,
            runs: vec![(1, 1)],
        });
        writer.send(protocol::kind::LEFT, &left).await.unwrap();
        writer.send(protocol::kind::STATE, b"").await.unwrap();
        writer.flush().await.unwrap();
        let answer = ask(&mut talk, Ask::Commit).await;
        assert_eq!(answer.decision, Decision::Taken, "{}", answer.why);
        // Now it runs, and something of it is missing.
        assert_eq!(code(open(&process, 3, 6).await), Code::Held);
        assert_eq!(process.leecher.left().await, 4096);
        assert!(pages(&process).await.is_ok());
    });
    assert_eq!(process.host.discards.load(Ordering::SeqCst), 0);
    process.kill();
}

#[test]
fn what_is_prepared_anew_takes_the_place_of_what_was() {
    let (_directory, machines) = machines();
    let process = Process::start(&machines, None);
    process.runtime.block_on(async {
        let (mut talk, _) = open(&process, 1, 0).await.unwrap();
        for _ in 0..5 {
            let answer = ask(&mut talk, Ask::Prepare).await;
            assert_eq!(answer.decision, Decision::Open);
            let made = process.host.made.lock();
            let kept = made.iter().filter(|made| made.strong_count() > 0).count();
            assert_eq!(kept, 1);
        }
    });
    assert_eq!(process.host.discards.load(Ordering::SeqCst), 4);
    process.kill();
}

#[test]
fn what_it_waits_for_while_it_is_started_comes_by_new_connections() {
    let (_directory, machines) = machines();
    let (reads, mut reading) = mpsc::unbounded_channel();
    let process = Process::start(&machines, Some(reads));
    process.runtime.block_on(async {
        let (mut talk, reader, writer) = copied(&process, true).await;
        talk.say(kind::ASK, &Ask::Commit).await.unwrap();
        reading.recv().await.unwrap();
        // All connections break while it reads what is absent.
        drop((talk, reader, writer));
        let again = async {
            let (mut talk, answer) = open(&process, 1, 0).await.unwrap();
            // Whether it runs is not known yet.
            assert_eq!(answer.decision, Decision::Open);
            let request = FetchPages {
                program: name("program"),
                token: token(1),
            };
            let (_wants, mut writer) = call(&process.site, &request).await.unwrap();
            write(&mut writer, 1, 2).await;
            ask(&mut talk, Ask::Commit).await
        };
        let again = tokio::time::timeout(Duration::from_secs(20), again).await;
        let answer = again.expect("it is reached while it is started");
        assert_eq!((answer.decision, &*answer.why), (Decision::Taken, ""));
    });
    process.kill();
}
