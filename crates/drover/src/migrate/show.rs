//! The output of `migrate`: progress and the result, for people and for scripts.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use anyhow::Result;
use drover_agent::text::{bytes, clean};
use drover_migrate::{Expected, MoveEvent, MoveReport, Step};
use drover_teleport::progress::{Counters, WireTotals};
use parking_lot::Mutex;
use serde_json::{Value, json};

use super::memory_left::MemoryLeft;
use crate::cli::MigrateArgs;
use crate::out;
use crate::send::{self, short};

/// Shows a migration.
pub struct Show {
    json: bool,
    dry_run: bool,
    machine: String,
    peer: String,
    /// Shows the images of the disks.
    images: send::Show,
    counters: Arc<Counters>,
    wire: Arc<WireTotals>,
    begun: Instant,
    memory_left: Mutex<MemoryLeft>,
}

impl Show {
    /// Shows the migration of `machine` to `peer`; `alone` if there are no others at the same time.
    pub fn new(args: &MigrateArgs, alone: bool, machine: String, peer: String) -> Show {
        let (counters, wire) = (Arc::<Counters>::default(), Arc::<WireTotals>::default());
        let images = send::Show::new(
            args.json,
            args.dry_run,
            alone,
            peer.clone(),
            Arc::clone(&counters),
            Arc::clone(&wire),
        );
        Show {
            json: args.json,
            dry_run: args.dry_run,
            machine,
            peer,
            images,
            counters,
            wire,
            begun: Instant::now(),
            memory_left: Mutex::default(),
        }
    }

    /// What is counted while the images are sent.
    pub fn counters(&self) -> Arc<Counters> {
        Arc::clone(&self.counters)
    }

    /// Bytes on the wire while the images are sent.
    pub fn wire(&self) -> Arc<WireTotals> {
        Arc::clone(&self.wire)
    }

    /// Shows the progress of what is being sent.
    pub fn sample(&self) {
        self.images.sample();
    }

    /// Shows an event.
    pub fn event(&self, event: MoveEvent) {
        let machine = &self.machine;
        match event {
            MoveEvent::Send(event) => self.images.event(event),
            MoveEvent::Step(step) => {
                let (name, text) = match step {
                    Step::Images => ("images", "copying its disks"),
                    Step::Disks => ("disks", "copying what it wrote meanwhile"),
                    Step::Memory => ("memory", "copying its memory"),
                    Step::Switch => ("switch", "paused, handing it over"),
                    Step::Rest => ("rest", "runs there; copying what is left of its disks"),
                };
                self.print(
                    json!({"event": "step", "machine": machine, "step": name}),
                    || format!("{machine}: {text}"),
                );
            }
            // A round without writes is nothing to tell a person.
            MoveEvent::Round { bytes: 0, .. } if !self.json => {}
            MoveEvent::Round { round, bytes: n } => {
                let line =
                    json!({"event": "round", "machine": machine, "round": round, "bytes": n});
                self.print(line, || {
                    format!("{machine}: round {round}: {} written", bytes(n))
                });
            }
            MoveEvent::Memory(ram) => {
                let left = self.memory_left.lock().note(self.begun.elapsed(), &ram);
                let line = json!({
                    "event": "memory", "machine": machine, "sent_bytes": ram.transferred,
                    "left_bytes": ram.remaining, "total_bytes": ram.total,
                    "left_seconds": left.map(|left| left.as_secs()),
                });
                self.print(line, || {
                    format!(
                        "{machine}: memory: {} sent, {} of {} left{}",
                        bytes(ram.transferred),
                        bytes(ram.remaining),
                        bytes(ram.total),
                        left.map_or_else(String::new, |left| format!(", about {}", short(left)))
                    )
                });
            }
            MoveEvent::Left { bytes: n } => {
                let line = json!({"event": "left", "machine": machine, "left_bytes": n});
                self.print(line, || {
                    format!("{machine}: {} of its disks left", bytes(n))
                });
            }
            MoveEvent::Reconnecting { error } => {
                let line =
                    json!({"event": "reconnecting", "machine": machine, "message": clean(&error)});
                self.print(line, || format!("{machine}: {error}; trying again"));
            }
        }
    }

    /// Shows the result.
    ///
    /// # Errors
    /// When stdout cannot be written.
    pub fn done(&self, report: &MoveReport) -> Result<()> {
        self.images.clear();
        if self.json {
            let mut last = serde_json::to_value(report)?;
            last["event"] = "done".into();
            last["peer"] = self.peer.clone().into();
            last["dry_run"] = self.dry_run.into();
            last["left_bytes"] = report.left_bytes.into();
            last["asked_bytes"] = report.asked_bytes.into();
            if let (None, Some(fields)) = (&report.expected, last.as_object_mut()) {
                fields.remove("expected");
            }
            return out::json(&last);
        }
        for note in &report.notes {
            out::note(&format!("{}: {}", self.machine, clean(note)));
        }
        if self.dry_run {
            return out::line(&format!(
                "{}: can move; {} of memory besides its disks; {}{}{}",
                self.machine,
                bytes(report.memory_bytes),
                match report.handed_over.as_slice() {
                    [] => String::new(),
                    disks => format!("{} not copied, but handed over; ", clean(&disks.join(", "))),
                },
                match report.built {
                    true => format!("{} builds a QEMU for it", clean(&self.peer)),
                    false => format!("{} has its own QEMU for it", clean(&self.peer)),
                },
                report.expected.as_ref().map(expected).unwrap_or_default()
            ));
        }
        let pause = &report.pause;
        if !report.handed_over.is_empty() {
            out::line(&format!(
                "{}: {} handed over, {} ms after the pause",
                self.machine,
                clean(&report.handed_over.join(", ")),
                report.leases_ms
            ))?;
        }
        out::line(&format!(
            "{} runs at {}: paused for {} ms (disks {}, memory {}, hand-over {}); {} of disks, {} of changes, {} of memory in {:.1} s",
            self.machine,
            clean(&self.peer),
            pause.total_ms,
            pause.disks_ms,
            pause.memory_ms,
            pause.hand_over_ms,
            bytes(report.image_wire_bytes),
            bytes(report.disk_wire_bytes),
            bytes(report.memory_wire_bytes),
            report.seconds,
        ))
    }

    /// A file that the machine has left is being indexed.
    pub fn indexing(&self, file: &Path) {
        let machine = &self.machine;
        let line = json!({"event": "index", "machine": machine, "path": file});
        self.print(line, || {
            format!(
                "{machine}: runs at {}; indexing {} for the way back",
                self.peer,
                file.display()
            )
        });
    }

    /// It was not indexed.
    pub fn not_indexed(&self, file: &Path, why: &str) {
        let line = json!({"event": "note", "path": file, "message": clean(why)});
        self.print(line, || {
            format!("note: {}: not indexed: {why}", file.display())
        });
    }

    /// It was not noted in a file which state of the disk it has.
    pub fn not_marked(&self, file: &Path, why: &str) {
        let line = json!({"event": "note", "path": file, "message": clean(why)});
        self.print(line, || {
            format!("note: {}: not marked: {why}", file.display())
        });
    }

    /// The migration failed.
    pub fn failed(&self) {
        self.images.clear();
    }

    fn print(&self, line: Value, text: impl FnOnce() -> String) {
        self.images.print(line, text);
    }
}

/// What a dry run expects, for a person.
fn expected(of: &Expected) -> String {
    let whole = match (of.seconds, of.bytes_per_second) {
        (Some(seconds), Some(rate)) if of.measured => format!(
            "; at most about {seconds:.0} s at the {}/s that the link carried just now",
            bytes(rate)
        ),
        (Some(seconds), _) => format!("; at most {seconds:.0} s at this limit"),
        (None, _) => "; how long it takes is not known".into(),
    };
    format!(
        "; a pause of about {} ms (round trip: {:.0} ms){whole}",
        of.pause_ms, of.round_trip_ms
    )
}
