//! How fast frames are written and read: header, checksum, gathering, and the Unix socket that carries them.
//!
//! `cargo bench -p drover-net`, 10 seconds. Both ends take turns on one thread.

use std::hint::black_box;
use std::time::Duration;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use drover_net::{Connection, decode, encode};
use serde::{Deserialize, Serialize};
use tokio::net::UnixStream;
use tokio::runtime::Builder;

fn frames(c: &mut Criterion) {
    let runtime = Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("a runtime");
    let mut g = c.benchmark_group("frames");
    for (name, bytes) in [
        ("64 B", 64),
        ("4 KiB", 4 << 10),
        ("64 KiB", 64 << 10),
        ("1 MiB", 1 << 20),
    ] {
        let (mut writer, mut reader) = runtime.block_on(async {
            let (here, there) = UnixStream::pair().expect("a pair of sockets");
            let (_, writer) = Connection::from_unix(here, "there").split();
            let (reader, _) = Connection::from_unix(there, "here").split();
            (writer, reader)
        });
        let mut rng = fastrand::Rng::with_seed(1);
        let payload: Vec<u8> = (0..bytes).map(|_| rng.u8(..)).collect();
        // So many that the end of a round does not matter.
        let count = ((4 << 20) / bytes).clamp(4, 4096);
        g.throughput(Throughput::Bytes((count * bytes) as u64));
        g.bench_function(format!("there, {name} each"), |b| {
            b.iter(|| {
                runtime.block_on(async {
                    let send = async {
                        for _ in 0..count {
                            writer.send(7, black_box(&payload)).await.expect("sends");
                        }
                        writer.flush().await.expect("flushes");
                    };
                    let receive = async {
                        for _ in 0..count {
                            let frame = reader.next().await.expect("receives").expect("a frame");
                            assert_eq!(frame.payload.len(), bytes);
                        }
                    };
                    tokio::join!(send, receive);
                });
            });
        });
    }
    g.finish();
}

/// What a control message is like.
#[derive(Serialize, Deserialize)]
struct Message {
    image: u64,
    name: String,
    done: Vec<(u64, u32)>,
}

fn messages(c: &mut Criterion) {
    let message = Message {
        image: 17,
        name: "bookworm-app.qcow2".to_owned(),
        done: (0..64).map(|i| (i << 20, 2048)).collect(),
    };
    let encoded = encode(&message);
    let mut g = c.benchmark_group("messages");
    g.throughput(Throughput::Bytes(encoded.len() as u64));
    g.bench_function("encode", |b| b.iter(|| encode(black_box(&message))));
    g.bench_function("decode", |b| {
        b.iter(|| decode::<Message>(black_box(&encoded)).expect("decodes"));
    });
    g.finish();
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .sample_size(20)
        .warm_up_time(Duration::from_millis(300))
        .measurement_time(Duration::from_secs(1));
    targets = frames, messages
}
criterion_main!(benches);
