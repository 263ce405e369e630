//! What tests with several QEMUs share.

use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream as Socket;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use drover_core::BlockDevice;
use drover_device::backend::nbd::{NbdDevice, NbdOptions};
use drover_hypervisor::machine::{Capability, Channel, Machine, MigrationStatus, RunState};
use drover_hypervisor::qmp::Events;
use drover_hypervisor::rounds::View;
use drover_hypervisor::testing::{Launch, PATIENCE};
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::sync::watch;

/// A raw image of so many zero bytes.
pub fn raw(directory: &Path, name: &str, size: u64) -> PathBuf {
    let path = directory.join(name);
    std::fs::File::create(&path).unwrap().set_len(size).unwrap();
    path
}

/// Both sides of a migration, with the events since before it began.
pub struct Pair {
    pub source: Machine,
    pub destination: Machine,
    pub source_events: Events,
    pub destination_events: Events,
}

impl Pair {
    /// Sets both up as a migration with drover needs it.
    pub async fn new(source: Machine, destination: Machine) -> Pair {
        for machine in [&source, &destination] {
            machine.check_migratable().await.unwrap();
            machine
                .set_capabilities(&Capability::NEEDED, true)
                .await
                .unwrap();
        }
        Pair {
            source_events: source.events(),
            destination_events: destination.events(),
            source,
            destination,
        }
    }

    /// Migrates until the source is in `pre-switchover`.
    pub async fn begin(&mut self, from: &Channel, to: &Channel) {
        self.destination.migrate_incoming(to).await.unwrap();
        self.source.migrate(from).await.unwrap();
        let events = &mut self.source_events;
        let reached = self
            .source
            .wait_migration(events, &MigrationStatus::PreSwitchover, PATIENCE);
        reached.await.unwrap();
    }

    /// Switches over, and waits until both sides say that it is done.
    pub async fn switch(&mut self) {
        let done = MigrationStatus::Completed;
        self.source.continue_migration().await.unwrap();
        self.source
            .wait_migration(&mut self.source_events, &done, PATIENCE)
            .await
            .unwrap();
        // Its run state follows a moment later.
        while self.source.status().await.unwrap() == RunState::FinishMigrate {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        let events = &mut self.destination_events;
        self.destination
            .wait_migration(events, &done, PATIENCE)
            .await
            .unwrap();
    }
}

/// Carries bytes both ways while the other end of `open` says so; then nothing, though both ends stay connected.
fn relay(here: Socket, there: Socket, open: &watch::Receiver<bool>) {
    let ends = [here, there].map(|socket| {
        socket.set_nonblocking(true).unwrap();
        UnixStream::from_std(socket).unwrap().into_split()
    });
    let [(read_here, write_here), (read_there, write_there)] = ends;
    for (mut from, mut to) in [(read_here, write_there), (read_there, write_here)] {
        let mut open = open.clone();
        tokio::spawn(async move {
            let mut buffer = vec![0; 64 << 10];
            while let Ok(count @ 1..) = from.read(&mut buffer).await {
                if open.wait_for(|open| *open).await.is_err()
                    || to.write_all(&buffer[..count]).await.is_err()
                {
                    return;
                }
            }
        });
    }
}

/// Hands each side an end of a connection through a relay.
pub async fn connect(
    source: &Machine,
    destination: &Machine,
    open: &watch::Receiver<bool>,
) -> Channel {
    let ends = [source, destination].map(|machine| (machine, Socket::pair().unwrap()));
    let mut ours = Vec::new();
    for (machine, (theirs, mine)) in ends {
        machine
            .pass_descriptor("migration", OwnedFd::from(theirs))
            .await
            .unwrap();
        ours.push(mine);
    }
    let (there, here) = (ours.pop().unwrap(), ours.pop().unwrap());
    relay(here, there, open);
    Channel::Descriptor("migration".into())
}

/// Waits for an event by its name.
pub async fn wait_event(events: &mut Events, name: &str) {
    let seen = events.wait_for(name, PATIENCE, |event| (event.name == name).then_some(()));
    seen.await.unwrap();
}

/// With a plain file as a disk, as people start it.
pub fn drive(launch: Launch, image: &Path) -> Launch {
    launch.with(&format!(
        "-drive file={},format=raw,if=virtio",
        image.display()
    ))
}

/// Has QEMU write 4096 bytes to a block of a disk.
pub async fn write(machine: &Machine, disk: usize, block: u64, byte: u8) {
    let line = format!(
        "qemu-io virtio{disk} \"write -P {byte} {} 4096\"",
        block * 4096
    );
    let command = json!({"command-line": line});
    // Whether it could is said on standard output only.
    let done = machine.qmp().order("human-monitor-command", command);
    done.await.unwrap();
}

/// Compares the files `a` and `b` of two kinds.
pub fn equal(directory: &Path, one: &str, other: &str) {
    for name in ["a", "b"] {
        let [one, other] = [one, other]
            .map(|kind| std::fs::read(directory.join(format!("{name}.{kind}"))).unwrap());
        assert!(one == other);
    }
}

/// Copies what is dirty of a disk into a file, or all of it; how many bytes those were.
pub async fn copy(view: &View, to: &Path) -> u64 {
    try_copy(view, to).await.unwrap()
}

/// As [`copy`], or why not.
pub async fn try_copy(view: &View, to: &Path) -> Result<u64, String> {
    let (view, to) = (view.clone(), to.to_owned());
    let copy = move || {
        let options = NbdOptions {
            read_only: true,
            contexts: view.context.iter().cloned().collect(),
            ..NbdOptions::default()
        };
        let device = NbdDevice::connect(&view.address, &options).unwrap();
        let file = std::fs::OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(false)
            .open(to)
            .unwrap();
        let mut copied = 0;
        let mut take = |offset: u64, length: u64| {
            let mut bytes = vec![0; usize::try_from(length).unwrap()];
            device.read(offset, &mut bytes).map_err(|e| e.to_string())?;
            file.write_all_at(&bytes, offset).unwrap();
            copied += length;
            Ok::<_, String>(())
        };
        match &view.context {
            None => take(0, device.size())?,
            Some(context) => {
                for range in device.dirty(context, 0, device.size()) {
                    let range = range.unwrap();
                    take(range.start, range.end - range.start)?;
                }
            }
        }
        Ok(copied)
    };
    tokio::task::spawn_blocking(copy).await.unwrap()
}

/// An NBD server of a raw image, export `disk`; none, with a SKIP, where there is no `qemu-nbd`.
pub fn serve_raw(test: &str, image: &Path, socket: &Path) -> Option<Server> {
    let started = Command::new("qemu-nbd")
        .args(["-t", "-e", "8", "-f", "raw", "-x", "disk", "-k"])
        .args([socket, image])
        .stdin(Stdio::null())
        .spawn();
    match started {
        Ok(child) => {
            let server = Server(child);
            let begun = std::time::Instant::now();
            while !socket.exists() {
                assert!(begun.elapsed() < PATIENCE, "qemu-nbd does not listen");
                std::thread::sleep(Duration::from_millis(5));
            }
            Some(server)
        }
        Err(e) => {
            eprintln!("SKIP {test}: no qemu-nbd (qemu-utils): {e}");
            None
        }
    }
}

/// Ends with the test.
pub struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
