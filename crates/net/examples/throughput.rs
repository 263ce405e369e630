//! How fast frames cross the loopback, both ends in this process.
//!
//! `cargo run --release -p drover-net --example throughput -- [GiB per run] [KiB per frame]`

use std::error::Error;
use std::time::{Duration, Instant};

use drover_net::{
    ConnectOptions, Connection, Identity, Listener, LocalListener, MAX_FRAME, close, connect,
    connect_unix,
};
use tokio::task::JoinSet;

const PATIENCE: Duration = Duration::from_secs(30);

type Failure = Box<dyn Error + Send + Sync>;

#[tokio::main]
async fn main() -> Result<(), Failure> {
    let mut arguments = std::env::args().skip(1);
    let gib: u64 = arguments.next().map_or(Ok(4), |a| a.parse())?;
    let kib: usize = arguments.next().map_or(Ok(1024), |a| a.parse())?;
    let (total, frame) = (gib << 30, kib << 10);

    for connections in [1, 2, 4] {
        let mut ends = Vec::new();
        for _ in 0..connections {
            ends.push(tls_pair().await?);
        }
        measure(&format!("TLS x{connections}"), ends, total, frame).await?;
    }
    measure("unix x1", vec![unix_pair().await?], total, frame).await
}

async fn tls_pair() -> Result<(Connection, Connection), Failure> {
    let (server, client) = (Identity::generate(), Identity::generate());
    let listener = Listener::bind(([127, 0, 0, 1], 0).into(), &server).await?;
    let (address, key) = (listener.local_addr().to_string(), server.key());
    let options = ConnectOptions::default();
    let (there, here) = tokio::join!(
        async { listener.accept().await?.handshake().await },
        connect(&address, &client, &key, &options)
    );
    Ok((there?, here?))
}

async fn unix_pair() -> Result<(Connection, Connection), Failure> {
    let path = std::env::temp_dir().join(format!("drover-throughput-{}", std::process::id()));
    let listener = LocalListener::bind(path)?;
    let (there, here) = tokio::join!(listener.accept(), connect_unix(listener.path()));
    Ok((there?, here?))
}

async fn measure(
    name: &str,
    ends: Vec<(Connection, Connection)>,
    total: u64,
    frame: usize,
) -> Result<(), Failure> {
    let each = total / ends.len() as u64 / frame as u64;
    let wires: Vec<_> = ends.iter().map(|(_, c)| c.wire()).collect();
    let started = Instant::now();
    let mut tasks = JoinSet::<Result<u64, Failure>>::new();
    for (there, here) in ends {
        let (mut reader, writer) = there.split();
        tasks.spawn(async move {
            reader.set_max_frame(MAX_FRAME);
            let mut got = 0;
            while let Some(frame) = reader.next().await? {
                got += frame.payload.len() as u64;
            }
            close(reader, writer, PATIENCE).await?;
            Ok(got)
        });
        let (reader, mut writer) = here.split();
        tasks.spawn(async move {
            let payload: Vec<u8> = (0..frame).map(|i| (i * 31) as u8).collect();
            for _ in 0..each {
                writer.send(1, &payload).await?;
            }
            close(reader, writer, PATIENCE).await?;
            Ok(0)
        });
    }
    let mut got = 0;
    while let Some(done) = tasks.join_next().await {
        got += done??;
    }
    let expected = each * frame as u64 * wires.len() as u64;
    if got != expected {
        return Err(format!("{name}: {got} of {expected} bytes arrived").into());
    }
    let seconds = started.elapsed().as_secs_f64();
    let wire: u64 = wires.iter().map(|w| w.sent()).sum();
    println!(
        "{name}: {:.2} GB/s, {got} bytes in {seconds:.2} s, overhead {:.3} %",
        got as f64 / seconds / 1e9,
        (wire as f64 / got as f64 - 1.0) * 100.0
    );
    Ok(())
}
