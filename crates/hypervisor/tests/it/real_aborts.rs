//! Migrations that end in the middle: what QEMU does by itself, and what it has to be told.

use std::path::{Path, PathBuf};
use std::time::Duration;

use drover_hypervisor::machine::{
    Channel, Machine, MigrationParameters, MigrationStatus, Node, RunState, Yank,
};
use drover_hypervisor::qmp::Command;
use drover_hypervisor::testing::{Guest, Launch, PATIENCE, Qemu, program};
use drover_hypervisor::{HypervisorError, Rounds};
use serde_json::Value;
use tokio::sync::watch;
use tokio::time::{Instant, sleep};

use crate::util::{Pair, connect, copy, drive, raw};

const SIZE: u64 = 1 << 20;

/// A guest that writes, and what a destination of it needs.
struct Site {
    here: Qemu,
    source: Machine,
    /// How a destination is started; its disk is a stub until it has to run.
    there: Launch,
    rounds: Rounds,
    path: PathBuf,
    copy: PathBuf,
    /// Said before the last abort.
    said: u64,
    tries: u32,
}

impl Site {
    async fn start(path: &Path, guest: &Guest) -> Site {
        let image = raw(path, "a.raw", SIZE);
        let copied = raw(path, "a.copy", SIZE);
        let mut here = drive(Launch::new(), &image)
            .guest(guest, 5, 4)
            .start(path, "here");
        let source = here.machine().await;
        here.wait_said("beat", 20).await;
        let node = source.disks().await.unwrap()[0]
            .medium
            .clone()
            .unwrap()
            .node;
        let (nodes, directory) = ([node.as_str()], path.join("rounds"));
        let rounds = Rounds::begin(&source, "there", &nodes, &directory, 4096);
        let rounds = rounds.await.unwrap();
        copy(&rounds.whole().await.unwrap()[0], &copied).await;
        let stub = Node::Null {
            name: "stub".into(),
            size: SIZE,
        };
        let disk = Node::Raw {
            name: "disk".into(),
            file: "stub".into(),
        };
        let there = Launch::new()
            .node(&stub)
            .node(&disk)
            .disk("vd0", "disk")
            .guest(guest, 5, 4)
            .incoming();
        Site {
            here,
            source,
            there,
            rounds,
            path: path.to_owned(),
            copy: copied,
            said: 0,
            tries: 0,
        }
    }

    /// A destination that waits.
    async fn pair(&mut self) -> (Qemu, Pair) {
        self.tries += 1;
        let mut there = self
            .there
            .start(&self.path, &format!("there{}", self.tries));
        let destination = there.machine().await;
        (there, Pair::new(self.source.clone(), destination).await)
    }

    fn socket(&self) -> Channel {
        Channel::Unix(self.path.join(format!("memory{}", self.tries)))
    }

    /// Migrates so slowly that memory is being sent for long.
    async fn send_slowly(&self, pair: &mut Pair, from: &Channel, to: &Channel) {
        self.bandwidth(64 << 10).await;
        pair.destination.migrate_incoming(to).await.unwrap();
        pair.source.migrate(from).await.unwrap();
        let active = MigrationStatus::Active;
        let events = &mut pair.source_events;
        let begun = pair.source.wait_migration(events, &active, PATIENCE);
        begun.await.unwrap();
    }

    /// Migrates until the guest is paused, and copies the rest of its disk.
    async fn send(&mut self, pair: &mut Pair) {
        self.bandwidth(1 << 30).await;
        let channel = self.socket();
        pair.begin(&channel, &channel).await;
        self.round().await;
    }

    async fn bandwidth(&self, bytes: u64) {
        self.limit(bytes, 300).await;
    }

    async fn limit(&self, bytes: u64, pause_ms: u64) {
        let parameters = MigrationParameters {
            max_bandwidth: Some(bytes),
            downtime_limit: Some(pause_ms),
            ..Default::default()
        };
        self.source.set_parameters(&parameters).await.unwrap();
    }

    async fn round(&mut self) {
        copy(&self.rounds.next().await.unwrap()[0], &self.copy).await;
        self.rounds.confirm().await.unwrap();
    }

    /// The guest runs here, as if nothing had been.
    async fn goes_on(&mut self) {
        let begun = Instant::now();
        // By itself, soon.
        while self.source.status().await.unwrap() != RunState::Running {
            assert!(begun.elapsed() < PATIENCE, "it does not go on");
            sleep(Duration::from_millis(10)).await;
        }
        let said = self.here.said("beat").unwrap();
        assert!(said >= self.said);
        self.said = self.here.wait_said("beat", said + 5).await;
    }
}

/// Waits until the migration has failed or was cancelled; which of the two one that is given up has, depends on QEMU's version.
async fn given_up(pair: &mut Pair) {
    let (events, failed) = (&mut pair.source_events, MigrationStatus::Failed);
    let ended = pair.source.wait_migration(events, &failed, PATIENCE).await;
    assert!(
        matches!(ended, Ok(()) | Err(HypervisorError::Migration { .. })),
        "{ended:?}"
    );
}

#[tokio::test]
async fn a_guest_survives_every_abort_and_moves_at_last() {
    let test = "a_guest_survives_every_abort_and_moves_at_last";
    let Some(()) = program(test) else { return };
    let dir = tempfile::tempdir().unwrap();
    let Some(guest) = Guest::build(test, dir.path()) else {
        return;
    };
    let mut site = Site::start(dir.path(), &guest).await;

    // The destination dies while memory is sent.
    let (mut there, mut pair) = site.pair().await;
    let channel = site.socket();
    site.send_slowly(&mut pair, &channel, &channel).await;
    there.kill();
    given_up(&mut pair).await;
    site.goes_on().await;

    // Given up while memory is sent.
    let (mut there, mut pair) = site.pair().await;
    let channel = site.socket();
    site.send_slowly(&mut pair, &channel, &channel).await;
    site.source.cancel_migration().await.unwrap();
    given_up(&mut pair).await;
    site.goes_on().await;
    there.kill();

    // The link becomes a black hole while memory is sent: nobody notices.
    let (mut there, mut pair) = site.pair().await;
    let (gate, open) = watch::channel(true);
    let channel = connect(&pair.source, &pair.destination, &open).await;
    site.send_slowly(&mut pair, &channel, &channel).await;
    gate.send_replace(false);
    sleep(Duration::from_millis(500)).await;
    let info = site.source.migration().await.unwrap();
    assert_eq!(info.status, MigrationStatus::Active);
    site.goes_on().await;
    site.source.cancel_migration().await.unwrap();
    given_up(&mut pair).await;
    site.goes_on().await;
    let waiting = pair.destination.status().await.unwrap();
    assert_eq!(waiting, RunState::InMigrate);
    there.kill();

    // The destination dies before the switch: it is noticed by the switch.
    let (mut there, mut pair) = site.pair().await;
    site.send(&mut pair).await;
    there.kill();
    sleep(Duration::from_millis(200)).await;
    let info = site.source.migration().await.unwrap();
    assert_eq!(info.status, MigrationStatus::PreSwitchover);
    site.source.continue_migration().await.unwrap();
    given_up(&mut pair).await;
    site.goes_on().await;

    // Given up before the switch.
    let (mut there, mut pair) = site.pair().await;
    site.send(&mut pair).await;
    if site.source.version().major < 8 {
        let refused = site.source.cont().await.unwrap_err();
        assert!(matches!(refused, HypervisorError::Refused { .. }));
    }
    site.source.cancel_migration().await.unwrap();
    given_up(&mut pair).await;
    site.goes_on().await;
    there.kill();

    // The link becomes a black hole in the switch: QEMU hangs until it is told out of band, or the link is reset.
    for told in [true, false] {
        let (mut there, mut pair) = site.pair().await;
        let (gate, open) = watch::channel(true);
        let channel = connect(&pair.source, &pair.destination, &open).await;
        // Most of the memory is sent in the switch, which is more than sockets buffer.
        site.limit(1 << 20, 2_000_000).await;
        pair.begin(&channel, &channel).await;
        site.round().await;
        gate.send_replace(false);
        site.source.continue_migration().await.unwrap();
        let device = MigrationStatus::Device;
        let events = &mut pair.source_events;
        let switching = site.source.wait_migration(events, &device, PATIENCE);
        switching.await.unwrap();
        let ask = || Command::new("query-status").timeout(Duration::from_millis(300));
        while site.source.qmp().run::<Value>(ask()).await.is_ok() {
            sleep(Duration::from_millis(10)).await;
        }
        match told {
            true => site.source.yank(&[Yank::Migration]).await.unwrap(),
            false => drop(gate),
        }
        given_up(&mut pair).await;
        site.goes_on().await;
        there.kill();
    }

    // The destination dies when it has all, and has not run.
    let (mut there, mut pair) = site.pair().await;
    site.send(&mut pair).await;
    pair.switch().await;
    there.kill();
    let waiting = site.source.status().await.unwrap();
    assert_eq!(waiting, RunState::PostMigrate);
    site.source.cont().await.unwrap();
    site.goes_on().await;
    site.round().await;

    // The source dies when the destination has all.
    let (mut there, mut pair) = site.pair().await;
    site.send(&mut pair).await;
    pair.switch().await;
    let last = site.here.said("beat").unwrap();
    site.here.kill();
    assert_eq!(pair.destination.status().await.unwrap(), RunState::Paused);
    let bytes = Node::File {
        name: "bytes".into(),
        path: site.copy.clone(),
    };
    let disk = Node::Raw {
        name: "disk".into(),
        file: "bytes".into(),
    };
    pair.destination.add_node(&bytes).await.unwrap();
    pair.destination.reopen_node(&disk).await.unwrap();
    pair.destination.cont().await.unwrap();
    there.wait_said("beat", last + 20).await;
    assert!(there.verify().await > last);
}

#[tokio::test]
async fn a_destination_ends_when_the_source_dies_before_the_switch() {
    let Some(()) = program("a_destination_ends_when_the_source_dies_before_the_switch") else {
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    for paused in [false, true] {
        let name = |kind: &str| format!("{kind}{paused}");
        let mut here = Launch::new().start(dir.path(), &name("here"));
        let launch = Launch::new().incoming();
        let mut there = launch.start(dir.path(), &name("there"));
        let mut pair = Pair::new(here.machine().await, there.machine().await).await;
        let channel = Channel::Unix(dir.path().join(name("memory")));
        if paused {
            pair.begin(&channel, &channel).await;
        } else {
            let parameters = MigrationParameters {
                max_bandwidth: Some(64 << 10),
                ..Default::default()
            };
            pair.source.set_parameters(&parameters).await.unwrap();
            pair.destination.migrate_incoming(&channel).await.unwrap();
            pair.source.migrate(&channel).await.unwrap();
            let events = &mut pair.source_events;
            let active = MigrationStatus::Active;
            let begun = pair.source.wait_migration(events, &active, PATIENCE);
            begun.await.unwrap();
        }
        here.kill();
        there.ended().await;
    }
}
