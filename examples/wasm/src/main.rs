//! A WebAssembly machine that moves to another process while it runs: its linear memory is a region, its disk a file, and
//! both go at one instant.
//!
//! ```text
//! drover-wasm-machine take DIR ADDRESS     at the other place
//! drover-wasm-machine run DIR              here; a line with ADDRESS on its standard input moves it there
//! ```
//!
//! The directory has the key of both processes, the record of each, and the two disks. Both print what the machine has
//! counted, 20 times a second; the one that takes it lets it check all of its memory and its disk at last.

mod machine;

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use drover_core::{BlockDevice, ImageName};
use drover_device::backend::{FileDevice, MemoryDevice};
use drover_device::stage::Tracked;
use drover_frontend::region::{Options, Region};
use drover_migrate::program::protocol::PartOffer;
use drover_migrate::program::{
    Host, Leecher, Part, Program, RemoteSite, Seeder, SeederOptions, Settled, Target, settle,
};
use drover_net::{Code, Identity, Listener, Refusal};
use drover_store::machine::Machines;

use machine::{DISK, MEMORY, Machine};

/// Steps between two looks whether it is to pause, and how long it rests then.
const SLICE: i32 = 20;
const REST: Duration = Duration::from_millis(1);

/// A machine that runs in a thread.
struct Running {
    stop: Arc<AtomicBool>,
    count: Arc<AtomicI64>,
    thread: Option<JoinHandle<Result<Machine>>>,
}

impl Running {
    fn start(mut machine: Machine) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let count = Arc::new(AtomicI64::new(0));
        let (stopped, counted) = (Arc::clone(&stop), Arc::clone(&count));
        let thread = std::thread::spawn(move || {
            while !stopped.load(Ordering::SeqCst) {
                counted.store(machine.run(SLICE)?, Ordering::SeqCst);
                std::thread::sleep(REST);
            }
            Ok(machine)
        });
        let thread = Some(thread);
        Self {
            stop,
            count,
            thread,
        }
    }

    /// Stops it after its slice.
    fn stop(&mut self) -> Result<Machine> {
        self.stop.store(true, Ordering::SeqCst);
        let thread = self.thread.take().context("it does not run")?;
        thread.join().ok().context("it panicked")?
    }
}

/// The machine of a process, if it runs there.
#[derive(Default)]
struct Here(Mutex<Option<Running>>, Mutex<Option<Machine>>);

impl Here {
    fn count(&self) -> Option<i64> {
        let running = self.0.lock().ok()?;
        let count = running.as_ref()?.count.load(Ordering::SeqCst);
        Some(count).filter(|count| *count > 0)
    }

    fn start(&self, machine: Machine) {
        *self.0.lock().expect("no panic") = Some(Running::start(machine));
    }

    fn stop(&self) -> Result<Machine> {
        let running = self.0.lock().expect("no panic").take();
        running.context("it does not run here")?.stop()
    }
}

impl Program for Here {
    fn pause(&self) -> std::io::Result<Vec<u8>> {
        let mut machine = self.stop().map_err(std::io::Error::other)?;
        let state = machine.state();
        *self.1.lock().expect("no panic") = Some(machine);
        Ok(state)
    }

    fn resume(&self) {
        if let Some(machine) = self.1.lock().expect("no panic").take() {
            self.start(machine);
        }
    }
}

fn name() -> ImageName {
    ImageName::new("machine").expect("a name")
}

fn disk(path: PathBuf) -> Result<Arc<dyn BlockDevice>> {
    let mut options = File::options();
    let options = options.read(true).write(true).create(true).truncate(true);
    let file = options.open(&path);
    let file = file.with_context(|| format!("cannot make {}", path.display()))?;
    file.set_len(DISK)?;
    Ok(Arc::new(FileDevice::new(file, false)?))
}

async fn run(directory: &Path) -> Result<()> {
    let identity = Identity::load_or_create(directory.join("key"))?;
    let machines = Machines::new(directory.join("here"));
    let settled = settle(&machines, &name(), None).await?;
    ensure!(settled == Settled::Here, "the machine is elsewhere");
    let options = Options {
        writable: true,
        ..Options::default()
    };
    let region = Arc::new(Region::new(Arc::new(MemoryDevice::new(MEMORY)), options)?);
    let (disk, changes) = Tracked::new(disk(directory.join("disk-here"))?, 4096);
    let disk: Arc<dyn BlockDevice> = Arc::new(disk);
    let here = Arc::new(Here::default());
    here.start(Machine::new(Arc::clone(&region), Arc::clone(&disk))?);
    println!("ready");
    print(&here, false);
    for address in std::io::stdin().lines() {
        let to = Arc::new(RemoteSite {
            addresses: vec![address?],
            key: identity.key(),
            identity: identity.clone(),
            name: "there".to_owned(),
        });
        let parts = vec![
            Part::region("memory", Arc::clone(&region)),
            Part::device("disk", Arc::clone(&disk), changes.clone()),
        ];
        let moved = async {
            let options = SeederOptions::new(name(), machines.clone(), to);
            let mut seeder = Seeder::open(parts, options).await?;
            seeder.track().await?;
            seeder.finalize(Arc::clone(&here) as _).await
        };
        match moved.await {
            Ok(report) => {
                let (pause, behind) = (report.pause, report.behind >> 10);
                println!("moved: paused {pause:?}, {behind} KiB followed");
                return Ok(());
            }
            Err(e) => println!("stayed: {e}"),
        }
    }
    Ok(())
}

/// Prints the count while the machine runs here.
fn print(here: &Arc<Here>, there: bool) {
    let here = Arc::clone(here);
    std::thread::spawn(move || {
        loop {
            if let Some(count) = here.count() {
                println!("{} {count}", if there { "there" } else { "here" });
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    });
}

/// Where the machine goes.
struct Taking {
    here: Arc<Here>,
    directory: PathBuf,
    prepared: Mutex<Option<Machine>>,
}

impl Taking {
    fn make(&self) -> Result<(Vec<Target>, Machine)> {
        let (memory, region) =
            Target::region(Arc::new(MemoryDevice::new(MEMORY)), Options::default())?;
        let (disk, device) = Target::device(disk(self.directory.join("disk-there"))?);
        // Made ahead: compiling is not in the pause. Nothing of it touches the memory.
        let machine = Machine::new(region, device)?;
        Ok((vec![memory, disk], machine))
    }
}

impl Host for Taking {
    fn prepare(&self, parts: &[PartOffer]) -> Result<Vec<Target>, Refusal> {
        let expected = [("memory", MEMORY), ("disk", DISK)];
        if !parts
            .iter()
            .map(|part| (&*part.name, part.size))
            .eq(expected)
        {
            return Err(Refusal::new(Code::Denied, "that is another machine"));
        }
        let made = self.make();
        let (targets, machine) = made.map_err(|e| Refusal::new(Code::Failed, format!("{e:#}")))?;
        *self.prepared.lock().expect("no panic") = Some(machine);
        Ok(targets)
    }

    fn run(&self, state: Vec<u8>) -> Result<(), String> {
        let machine = self.prepared.lock().expect("no panic").take();
        let mut machine = machine.ok_or("it was not prepared")?;
        machine.set_state(&state).map_err(|e| format!("{e:#}"))?;
        self.here.start(machine);
        Ok(())
    }
}

async fn take(directory: &Path, address: &str) -> Result<()> {
    let identity = Identity::load_or_create(directory.join("key"))?;
    let machines = Machines::new(directory.join("there"));
    settle(&machines, &name(), None).await?;
    let here = Arc::new(Here::default());
    let leecher = Leecher::new(
        name(),
        machines,
        Arc::new(Taking {
            here: Arc::clone(&here),
            directory: directory.to_owned(),
            prepared: Mutex::default(),
        }),
    );
    let listener = Listener::bind(address.parse()?, &identity).await?;
    println!("ready");
    print(&here, true);
    let serving = Arc::clone(&leecher);
    tokio::spawn(async move { serving.listen(listener, identity.key()).await });
    leecher.complete().await?;
    println!("complete");
    tokio::time::sleep(Duration::from_millis(500)).await;
    let mut machine = here.stop()?;
    let count = machine.run(1)?;
    let wrong = machine.check()?;
    println!("checked {count}: {wrong} wrong");
    ensure!(wrong == 0, "what arrived is not what was there");
    Ok(())
}

#[tokio::main]
async fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments[..] {
        ["run", directory] => run(Path::new(directory)).await,
        ["take", directory, address] => take(Path::new(directory), address).await,
        _ => bail!("usage: drover-wasm-machine take DIR ADDRESS | run DIR"),
    }
}
