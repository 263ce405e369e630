//! A pull over a real link, with random reads beside it: how full the link gets, and what the reads wait.
//!
//! `link serve KEY ADDRESS MIB` at one end (noise in memory), `link pull KEY ADDRESS [CHUNK] [CONNECTIONS]` at the other, with
//! the same key file.

use std::collections::HashMap;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use bytes::Bytes;
use drover_core::{BlockDevice, DeviceError, Digest, ImageName};
use drover_device::backend::MemoryDevice;
use drover_device::remote::{Chunks, Fetched, Link, Local, Remote};
use drover_mount::client::{Client, Connecting, Connector, Options};
use drover_mount::server::{Base, Config, Images, Room, Server};
use drover_net::service::IncomingCall;
use drover_net::{ConnectOptions, Identity, Listener, Peer, PeerKey, Refusal, Rights, connect};
use drover_store::lease::Access;
use parking_lot::{Condvar, Mutex};
use tokio::sync::watch;

struct Noise(Base);

impl Images for Noise {
    fn allow(&self, _: &ImageName, _: &Peer, _: Access) -> Result<(), Refusal> {
        Ok(())
    }

    fn room(&self, _: &PeerKey, _: u64) -> Result<Room, Refusal> {
        Ok(Box::new(()))
    }

    fn open(&self, _: &ImageName) -> Result<Base, Refusal> {
        Ok(self.0.clone())
    }
}

async fn serve(identity: Identity, address: &str, mib: u64) {
    let device = MemoryDevice::new(mib << 20);
    let mut noise = vec![0; 1 << 20];
    let mut random = fastrand::Rng::with_seed(1);
    for n in 0..mib {
        random.fill(&mut noise);
        device.write(n << 20, &noise).expect("memory");
    }
    let images = Arc::new(Noise(Base {
        device: Arc::new(device),
        digest: Digest([1; 32]),
        arriving: None,
        through: None,
    }));
    let config = Config::new(images, "/nonexistent", 3);
    let server = Server::new(config).expect("threads");
    let listener = Listener::bind(address.parse().expect("an address"), &identity)
        .await
        .expect("a listener");
    println!("ready");
    loop {
        let pending = listener.accept().await.expect("a connection");
        let server = server.clone();
        tokio::spawn(async move {
            let Ok(connection) = pending.handshake().await else {
                return;
            };
            let peer = Peer {
                key: connection.peer().expect("a key"),
                name: connection.remote().into(),
                rights: Rights::DEFAULT.of_peer(),
                domain: "default".into(),
            };
            let (_go, stop) = watch::channel(false);
            let Ok(call) = IncomingCall::receive(connection, stop).await else {
                return;
            };
            let served = server.serve_connection(peer, call);
            if let Err(error) = served.await {
                eprintln!("{error}");
            }
        });
    }
}

struct Far {
    identity: Identity,
    address: String,
}

impl Connector for Far {
    fn connect(&self) -> Connecting<'_> {
        Box::pin(async move {
            let options = ConnectOptions::default();
            let key = self.identity.key();
            Ok(connect(&self.address, &self.identity, &key, &options).await?)
        })
    }
}

/// Counts what comes and throws it away.
#[derive(Default)]
struct Sink {
    state: Mutex<State>,
    change: Condvar,
}

#[derive(Default)]
struct State {
    chunks: u64,
    cursor: u64,
    here: HashMap<u64, Bytes>,
    wanted: Option<u64>,
    got: bool,
    pulling: bool,
    shape: (u64, u64),
}

impl Local for Sink {
    fn arrived(&self, chunks: Vec<Fetched>) {
        let mut state = self.state.lock();
        for chunk in chunks {
            state.got |= state.wanted == Some(chunk.index);
            if state.here.insert(chunk.index, Bytes::new()).is_none() {
                state.chunks += 1;
            }
        }
        self.change.notify_all();
    }
    fn failed(&self, chunks: Chunks, error: DeviceError) {
        eprintln!("{chunks:?}: {error}");
    }
    fn next(&self, most: u64) -> Option<Chunks> {
        let mut state = self.state.lock();
        let (chunk, all) = state.shape;
        while state.here.contains_key(&state.cursor) {
            state.cursor += 1;
        }
        let first = state.cursor;
        let count = (most / chunk).max(1).min(all.saturating_sub(first));
        if !state.pulling || count == 0 {
            return None;
        }
        state.cursor += count;
        Some(Chunks {
            first,
            count: count as u32,
        })
    }
    fn link(&self, link: Link) {
        eprintln!("{link:?}");
    }
}

async fn pull(identity: Identity, address: &str, chunk: u32, connections: usize) {
    let began = Instant::now();
    let far = Arc::new(Far {
        identity,
        address: address.into(),
    });
    let name = ImageName::new("noise").expect("a name");
    let options = Options {
        chunk,
        back_connections: connections,
        ..Options::new(name, Access::ReadOnly)
    };
    let runtime = tokio::runtime::Handle::current();
    let client = Client::open(&runtime, far, options).await.expect("a mount");
    let run = move || {
        let sink = Arc::new(Sink::default());
        let shape = client.shape();
        sink.state.lock().shape = (u64::from(shape.chunk), shape.chunks());
        let weak: Weak<Sink> = Arc::downgrade(&sink);
        client.attach(weak);
        let request = |index: u64| {
            let mut state = sink.state.lock();
            state.wanted = Some(index);
            state.got = false;
            drop(state);
            let asked = Instant::now();
            client.fetch(Chunks {
                first: index,
                count: 1,
            });
            let mut state = sink.state.lock();
            while !state.got {
                let late = sink.change.wait_for(&mut state, Duration::from_secs(10));
                assert!(!late.timed_out(), "no chunk {index}");
            }
            asked.elapsed()
        };
        request(0);
        println!("first chunk after {:?}", began.elapsed());
        sink.state.lock().pulling = true;
        client.kick();
        let started = Instant::now();
        let mut random = fastrand::Rng::with_seed(3);
        let mut waits = Vec::new();
        let (mut at, mut wire, mut chunks) = (Instant::now(), 0, 0);
        loop {
            let index = random.u64(0..shape.chunks());
            if !sink.state.lock().here.contains_key(&index) {
                let wait = request(index);
                if started.elapsed() > Duration::from_secs(1) {
                    waits.push(wait);
                }
            }
            std::thread::sleep(Duration::from_millis(random.u64(1..10)));
            let here = sink.state.lock().chunks;
            if at.elapsed() >= Duration::from_millis(500) {
                let t = client.traffic();
                println!(
                    "{:4.1} s: {:6.1} Mbit/s on the link, {:6.1} of chunks, window {:5} KiB, trip {:.2} ms, asked {} KiB",
                    started.elapsed().as_secs_f64(),
                    (t.received - wire) as f64 * 8e-6 / at.elapsed().as_secs_f64(),
                    (here - chunks) as f64 * f64::from(shape.chunk) * 8e-6
                        / at.elapsed().as_secs_f64(),
                    t.window >> 10,
                    t.round_trip * 1e3,
                    t.in_flight >> 10,
                );
                (at, wire, chunks) = (Instant::now(), t.received, here);
            }
            if here * 100 >= shape.chunks() * 99 {
                break;
            }
        }
        let seconds = started.elapsed().as_secs_f64();
        waits.sort();
        let part = |p: usize| {
            waits
                .get(waits.len() * p / 100)
                .copied()
                .unwrap_or_default()
        };
        println!(
            "{:.1} Mbit/s of chunks over {seconds:.2} s; {} reads beside it: p50 {:.2?} p90 {:.2?} p99 {:.2?} most {:.2?}",
            shape.size as f64 * 0.99 * 8e-6 / seconds,
            waits.len(),
            part(50),
            part(90),
            part(99),
            waits.last().copied().unwrap_or_default()
        );
    };
    tokio::task::spawn_blocking(run).await.expect("no panic");
}

fn main() {
    let args: Vec<String> = std::env::args().collect();
    let arg = |n: usize| args.get(n).map(String::as_str);
    let (Some(role), Some(key), Some(address)) = (arg(1), arg(2), arg(3)) else {
        eprintln!("link serve KEY ADDRESS MIB | link pull KEY ADDRESS [CHUNK] [CONNECTIONS]");
        std::process::exit(2);
    };
    let number = |n: usize, default: u64| arg(n).and_then(|a| a.parse().ok()).unwrap_or(default);
    let identity = Identity::load_or_create(key).expect("a key");
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .expect("a runtime");
    match role {
        "serve" => runtime.block_on(serve(identity, address, number(4, 256))),
        _ => runtime.block_on(pull(
            identity,
            address,
            number(4, 65_536) as u32,
            number(5, 2) as usize,
        )),
    }
}
