//! Random reads, writes, flushes, link cuts and daemon kills from a seed, compared with a model.

use std::path::Path;

use super::Mounts;
use super::client::Client;
use crate::world::until;

const STEPS: usize = 300;
const ENOSPC: i32 = 28;

/// The expected disk content: `now` while the daemon lives; after a kill, each block has one of its contents since the
/// last flush.
struct Model {
    now: Vec<u8>,
    flushed: Vec<u8>,
    /// Writes since the last flush: offset and data.
    since: Vec<(usize, Vec<u8>)>,
}

impl Model {
    fn write(&mut self, at: usize, data: &[u8]) {
        self.now[at..][..data.len()].copy_from_slice(data);
        self.since.push((at, data.to_vec()));
    }

    fn flush(&mut self) {
        self.flushed.copy_from_slice(&self.now);
        self.since.clear();
    }

    /// Accepts the content after a kill if it is one of those allowed.
    fn crash(&mut self, there: &[u8]) {
        for (at, byte) in there.iter().enumerate() {
            if *byte == self.flushed[at] {
                continue;
            }
            let is_of_a_write = self.since.iter().any(|(start, data)| {
                at.checked_sub(*start).and_then(|i| data.get(i)) == Some(byte)
            });
            assert!(is_of_a_write, "byte {at} is {byte}, which it never was");
        }
        self.now.copy_from_slice(there);
        // Content read after the crash has been observed, but only a flush makes it durable.
        self.since.push((0, there.to_vec()));
    }
}

fn check(client: &mut Client, model: &Model, rng: &mut fastrand::Rng) {
    let (at, length) = range(rng, model.now.len());
    let got = client.read(at as u64, length).unwrap();
    assert!(
        got == model.now[at..][..length],
        "{length} bytes at {at} differ"
    );
}

/// Retries a write: while the link is cut, a small cache full of dirty chunks has no space for some time.
fn through(mut write: impl FnMut() -> std::io::Result<()>) {
    until("there is space", || match write() {
        Ok(()) => true,
        Err(e) => {
            assert_eq!(e.raw_os_error(), Some(ENOSPC), "{e}");
            false
        }
    });
}

fn range(rng: &mut fastrand::Rng, size: usize) -> (usize, usize) {
    let length = match rng.u8(..3) {
        0 => 512 * rng.usize(1..32),
        1 => 65536,
        _ => rng.usize(1..200_000),
    };
    let at = rng.usize(..size - length);
    (if rng.bool() { at / 4096 * 4096 } else { at }, length)
}

fn run(seed: u64) {
    eprintln!("seed {seed}");
    let m = Mounts::new();
    let bytes = m.raw("web.raw", seed);
    let mut model = Model {
        now: bytes.clone(),
        flushed: bytes,
        since: Vec::new(),
    };
    let mut rng = fastrand::Rng::with_seed(seed);
    let options = ["--push-interval", "100ms", "--cache-size", "2MiB"];
    let options = if rng.bool() {
        &options[..]
    } else {
        &options[..2]
    };
    let connect = |socket: &Path| Client::connect(socket, "web.raw");
    let mut socket = m.export("web.raw", options);
    let mut client = connect(&socket);
    assert_eq!(client.size, model.now.len() as u64);
    let mut kills = 0;
    for _ in 0..STEPS {
        match rng.u8(..100) {
            0..40 => check(&mut client, &model, &mut rng),
            40..80 => {
                let (at, length) = range(&mut rng, model.now.len());
                let data = vec![rng.u8(..); length];
                through(|| client.write(at as u64, &data));
                model.write(at, &data);
            }
            80..86 => {
                let (at, length) = range(&mut rng, model.now.len());
                through(|| client.zero(at as u64, u32::try_from(length).unwrap()));
                model.write(at, &vec![0; length]);
            }
            86..95 => {
                client.flush().unwrap();
                model.flush();
            }
            95..99 => {
                m.proxy.cut();
                m.proxy.heal();
            }
            _ if kills < 4 => {
                kills += 1;
                m.kill_daemon();
                socket = m.export("web.raw", options);
                client = connect(&socket);
                let there: Vec<u8> = (0..model.now.len())
                    .step_by(1 << 20)
                    .flat_map(|at| client.read(at as u64, 1 << 20).unwrap())
                    .collect();
                model.crash(&there);
            }
            _ => {}
        }
    }
    drop(client);
    until("nobody is connected", || {
        m.unmount(&socket, &[]).code == Some(0)
    });
    assert!(
        m.far_bytes("web.raw") == model.now,
        "the remote site has another disk"
    );
    assert!(m.proxy.to_far() > 0);
}

#[test]
fn lives_from_seeds_keep_every_flushed_byte() {
    if !super::can_mount("lives_from_seeds_keep_every_flushed_byte") {
        return;
    }
    let seed = std::env::var("DROVER_SEED")
        .ok()
        .map(|s| s.parse().unwrap());
    match seed {
        Some(seed) => run(seed),
        None => (1..=3).for_each(run),
    }
}
