//! A small key-value server whose table is a memory region, and which moves to another process while clients write.
//!
//! ```text
//! move_kv serve DIR CLIENTS_A                  has the table: serves clients at one address
//! move_kv take  DIR CLIENTS_B MOVES_B          takes it, and serves them at another one
//! move_kv client CLIENTS_A,CLIENTS_B SECONDS   writes, reads what it wrote, and says what was lost
//! ```
//!
//! The directory has the key of both processes and the record of each. `serve` moves the table when a line `MOVES_B` comes
//! on its standard input, and both print what happens. A client is told `MOVED` by whoever has not got the table, and
//! goes to the other one; a write counts when it was answered.
//!
//! The protocol is lines: `SET key value`, `GET key`; `OK`, `VALUE value`, `NONE`, `MOVED`, `ERROR why`.

use std::collections::HashMap;
use std::io::{self, BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use drover_core::{DeviceError, ImageName};
use drover_device::backend::MemoryDevice;
use drover_frontend::region::{Options, Region};
use drover_migrate::program::protocol::PartOffer;
use drover_migrate::program::{
    Host, Leecher, Part, Program, RemoteSite, Seeder, SeederOptions, Settled, Target, settle,
};
use drover_net::{Code, Identity, Listener, Refusal};
use drover_store::machine::Machines;
use parking_lot::{Mutex, RwLock};

/// Size of the table in bytes.
const SIZE: u64 = 16 << 20;
/// Size of a slot: key and value, each with its length.
const SLOT: u64 = 256;
/// Longest key or value.
const LONGEST: usize = 120;

fn name() -> ImageName {
    ImageName::new("table").expect("a name")
}

/// An open-addressing hash table in a region.
struct Table(Arc<Region>);

impl Table {
    /// The slot of a key: its own, or an empty one.
    fn find(&self, key: &[u8]) -> Result<(u64, Option<Vec<u8>>), DeviceError> {
        let slots = SIZE / SLOT;
        let mut hash = 0xcbf2_9ce4_8422_2325_u64;
        for byte in key {
            hash = (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
        }
        for step in 0..slots {
            let at = (hash + step) % slots * SLOT;
            let mut slot = [0; SLOT as usize];
            self.0.read_at(at, &mut slot)?;
            let length = usize::from(slot[0]);
            if length == 0 {
                return Ok((at, None));
            }
            if slot[1..1 + length] == *key {
                let value = usize::from(slot[128]);
                return Ok((at, Some(slot[129..129 + value].to_vec())));
            }
        }
        Err(DeviceError::NoSpace("the table is full".into()))
    }

    fn set(&self, key: &[u8], value: &[u8]) -> Result<(), DeviceError> {
        let (at, _) = self.find(key)?;
        let mut slot = [0; SLOT as usize];
        slot[0] = key.len() as u8;
        slot[1..1 + key.len()].copy_from_slice(key);
        slot[128] = value.len() as u8;
        slot[129..129 + value.len()].copy_from_slice(value);
        self.0.write_at(at, &slot)
    }
}

/// The server: the table is here, or it is not.
#[derive(Default)]
struct Server {
    table: RwLock<Option<Table>>,
}

impl Server {
    fn answer(&self, line: &str) -> String {
        let mut words = line.split(' ');
        let command = (words.next(), words.next(), words.next());
        let is_long = |word: Option<&str>| word.is_some_and(|word| word.len() > LONGEST);
        if is_long(command.1) || is_long(command.2) {
            return "ERROR too long".to_owned();
        }
        // Held until it is answered: a pause waits for what is under way.
        let table = self.table.read();
        let Some(table) = &*table else {
            return "MOVED".to_owned();
        };
        let answer = match command {
            (Some("SET"), Some(key), Some(value)) if !key.is_empty() => table
                .set(key.as_bytes(), value.as_bytes())
                .map(|()| "OK".to_owned()),
            (Some("GET"), Some(key), None) => {
                table.find(key.as_bytes()).map(|(_, value)| match value {
                    Some(value) => format!("VALUE {}", String::from_utf8_lossy(&value)),
                    None => "NONE".to_owned(),
                })
            }
            _ => Ok("ERROR what".to_owned()),
        };
        answer.unwrap_or_else(|e| format!("ERROR {e}"))
    }

    fn listen(self: &Arc<Self>, address: &str) {
        let listener = TcpListener::bind(address).expect("an address for clients");
        let server = Arc::clone(self);
        std::thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let server = Arc::clone(&server);
                std::thread::spawn(move || server.serve(client));
            }
        });
    }

    fn serve(&self, client: TcpStream) -> io::Result<()> {
        client.set_nodelay(true)?;
        let mut out = client.try_clone()?;
        for line in BufReader::new(client).lines() {
            writeln!(out, "{}", self.answer(&line?))?;
        }
        Ok(())
    }
}

/// A server whose table leaves.
struct Leaving {
    server: Arc<Server>,
    paused: Mutex<Option<Table>>,
}

impl Program for Leaving {
    fn pause(&self) -> io::Result<Vec<u8>> {
        *self.paused.lock() = self.server.table.write().take();
        Ok(Vec::new())
    }

    fn resume(&self) {
        *self.server.table.write() = self.paused.lock().take();
    }
}

/// A server that takes a table.
struct Taking {
    server: Arc<Server>,
    region: Mutex<Option<Arc<Region>>>,
}

impl Host for Taking {
    fn prepare(&self, parts: &[PartOffer]) -> Result<Vec<Target>, Refusal> {
        if parts.len() != 1 || parts[0].size != SIZE {
            return Err(Refusal::new(Code::Denied, "that is not the table"));
        }
        let made = Target::region(Arc::new(MemoryDevice::new(SIZE)), Options::default());
        let (target, region) = made.map_err(|e| Refusal::new(Code::Failed, e.to_string()))?;
        *self.region.lock() = Some(region);
        Ok(vec![target])
    }

    fn run(&self, _state: Vec<u8>) -> Result<(), String> {
        let region = self.region.lock().take().ok_or("it was not prepared")?;
        *self.server.table.write() = Some(Table(region));
        println!("here");
        Ok(())
    }
}

async fn serve(directory: &Path, clients: &str) {
    let identity = Identity::load_or_create(directory.join("key")).expect("a key");
    let machines = Machines::new(directory.join("here"));
    let settled = settle(&machines, &name(), None).await.expect("the record");
    assert_eq!(settled, Settled::Here, "it is elsewhere");
    let options = Options {
        writable: true,
        ..Options::default()
    };
    let region = Region::new(Arc::new(MemoryDevice::new(SIZE)), options).expect("a region");
    let region = Arc::new(region);
    let server = Arc::new(Server::default());
    *server.table.write() = Some(Table(Arc::clone(&region)));
    server.listen(clients);
    println!("ready");
    for line in io::stdin().lines() {
        let address = line.expect("a line");
        let to = Arc::new(RemoteSite {
            addresses: vec![address],
            key: identity.key(),
            identity: identity.clone(),
            name: "there".to_owned(),
        });
        let options = SeederOptions {
            // Some of it is to follow.
            max_pause: Duration::ZERO,
            max_rounds: 1,
            ..SeederOptions::new(name(), machines.clone(), to)
        };
        let program = Arc::new(Leaving {
            server: Arc::clone(&server),
            paused: Mutex::default(),
        });
        let moved = async {
            let parts = vec![Part::region("table", Arc::clone(&region))];
            let mut seeder = Seeder::open(parts, options).await?;
            seeder.track().await?;
            seeder.finalize(program).await
        };
        match moved.await {
            Ok(report) => {
                println!("moved, paused {:?}, {} behind", report.pause, report.behind);
                return;
            }
            Err(e) => println!("stayed: {e}"),
        }
    }
}

async fn take(directory: &Path, clients: &str, moves: &str) {
    let identity = Identity::load_or_create(directory.join("key")).expect("a key");
    let machines = Machines::new(directory.join("there"));
    settle(&machines, &name(), None).await.expect("the record");
    let server = Arc::new(Server::default());
    server.listen(clients);
    let host = Arc::new(Taking {
        server,
        region: Mutex::default(),
    });
    let leecher = Leecher::new(name(), machines, host);
    let address = moves.parse().expect("an address");
    let listener = Listener::bind(address, &identity)
        .await
        .expect("a listener");
    println!("ready");
    let serving = Arc::clone(&leecher);
    tokio::spawn(async move { serving.listen(listener, identity.key()).await });
    match leecher.complete().await {
        Ok(()) => println!("complete"),
        Err(e) => println!("lost: {e}"),
    }
    // Until it is killed.
    std::future::pending::<()>().await;
}

/// Writes to whoever has the table. A write that was not answered is repeated.
fn client(addresses: &[&str], seconds: f64) {
    let mut random = fastrand::Rng::with_seed(1);
    let mut acknowledged: HashMap<u64, u64> = HashMap::new();
    let (mut at, mut number, mut longest) = (0, 0_u64, Duration::ZERO);
    let mut connection: Option<(TcpStream, BufReader<TcpStream>)> = None;
    let begun = Instant::now();
    let mut ask = |request: &str| -> String {
        loop {
            assert!(
                begun.elapsed().as_secs_f64() < seconds + 60.0,
                "nobody has it"
            );
            let answer = (|| -> io::Result<String> {
                if connection.is_none() {
                    let stream = TcpStream::connect(addresses[at % addresses.len()])?;
                    stream.set_nodelay(true)?;
                    connection = Some((stream.try_clone()?, BufReader::new(stream)));
                }
                let (out, back) = connection.as_mut().expect("it was made");
                writeln!(out, "{request}")?;
                let mut answer = String::new();
                match back.read_line(&mut answer)? {
                    0 => Err(io::ErrorKind::UnexpectedEof.into()),
                    _ => Ok(answer.trim_end().to_owned()),
                }
            })();
            match answer {
                Ok(answer) if answer != "MOVED" => return answer,
                _ => {
                    (connection, at) = (None, at + 1);
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
        }
    };
    while begun.elapsed().as_secs_f64() < seconds {
        let key = random.u64(0..20_000);
        number += 1;
        let asked = Instant::now();
        let answer = ask(&format!("SET key{key} {number}"));
        assert_eq!(answer, "OK");
        longest = longest.max(asked.elapsed());
        acknowledged.insert(key, number);
    }
    let mut lost = 0;
    for (key, number) in &acknowledged {
        lost += u64::from(ask(&format!("GET key{key}")) != format!("VALUE {number}"));
    }
    println!(
        "{number} writes, {lost} lost, longest wait {} ms",
        longest.as_millis()
    );
    assert_eq!(lost, 0);
}

#[tokio::main]
async fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments[..] {
        ["serve", directory, clients] => serve(Path::new(directory), clients).await,
        ["take", directory, clients, moves] => take(Path::new(directory), clients, moves).await,
        ["client", addresses, seconds] => {
            let addresses: Vec<&str> = addresses.split(',').collect();
            client(&addresses, seconds.parse().expect("seconds"));
        }
        _ => {
            eprintln!(
                "usage: move_kv serve DIR CLIENTS | take DIR CLIENTS MOVES | client ADDRESS,ADDRESS SECONDS"
            );
            std::process::exit(2);
        }
    }
}
