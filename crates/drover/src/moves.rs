//! `move`: moves a disk that a program uses to a peer, and shows the progress.

use std::time::{Duration, Instant};

use anyhow::Result;
use drover_agent::home::Home;
use drover_agent::machines;
use drover_agent::mounts::{self, MoveDisk, MoveStep, Moving};
use drover_agent::text::{bytes, clean};
use drover_core::ImageName;
use drover_migrate::MoveReport;
use drover_net::DEFAULT_DOMAIN;
use serde_json::{Value, json};

use crate::cli::MoveArgs;
use crate::failure::usage;
use crate::out;

/// How often a person is told how much of the image is there.
const TELL_EVERY: Duration = Duration::from_secs(5);

/// What the names of images in other formats than raw end in.
const FORMATS: [&str; 5] = [".qcow2", ".vmdk", ".vhdx", ".vhd", ".vdi"];

/// `drover move`.
///
/// # Errors
/// When the disk does not move, or what was asked for cannot be done.
pub async fn move_disk(home: &Home, args: MoveArgs) -> Result<()> {
    let domain = Some(args.of.domain.clone()).filter(|name| name != DEFAULT_DOMAIN);
    if args.list {
        return list(&home.domain(&args.of.domain)?, args.json);
    }
    if let Some(image) = &args.abort {
        let is_here = mounts::abort_move(home, domain.as_deref(), image).await?;
        let said = match is_here {
            true => "stays here",
            false => "does not come here",
        };
        if args.json {
            return out::json(&json!({"event": "aborted", "image": image.as_str()}));
        }
        return out::line(&format!("{image}: {said}"));
    }
    let (Some(image), Some(peer)) = (args.image, args.peer) else {
        return Err(usage("name an image and a peer"));
    };
    let name_there = match args.rename {
        Some(name) => name,
        None => raw(&image)?,
    };
    let scratch = args.scratch.map(std::path::absolute).transpose()?;
    let order = MoveDisk {
        domain,
        peer,
        name_there,
        pause: args.pause,
        resume: args.resume,
        max_pause: args.max_pause,
        limit: args.limit,
        give_up_after: args.give_up_after,
        scratch,
        dry_run: args.dry_run,
        image,
    };
    let mut show = Show {
        json: args.json,
        image: order.image.to_string(),
        told: Instant::now(),
    };
    let report = mounts::move_disk(home, &order, |moving| show.event(moving)).await?;
    show.done(&order, &report)
}

/// The name of an image with the same contents in raw format.
fn raw(image: &ImageName) -> Result<ImageName> {
    let name = image.as_str();
    let stem = FORMATS.iter().find_map(|format| name.strip_suffix(format));
    Ok(match stem {
        Some(stem) => ImageName::new(format!("{stem}.raw"))?,
        None => image.clone(),
    })
}

struct Show {
    json: bool,
    image: String,
    told: Instant,
}

impl Show {
    fn event(&mut self, moving: Moving) {
        let image = self.image.clone();
        match moving {
            Moving::Step(step) => {
                self.told = Instant::now();
                let text = match step {
                    MoveStep::Image => "copying it",
                    MoveStep::Rounds => "copying what is written meanwhile",
                    MoveStep::Switch => "frozen, handing it over",
                };
                self.print(
                    json!({"event": "step", "image": image, "step": step}),
                    || format!("{image}: {text}"),
                );
            }
            Moving::Sent(_, 0) => {}
            Moving::Sent(done, total) => {
                let done = done.min(total);
                if !self.json && self.told.elapsed() < TELL_EVERY {
                    return;
                }
                self.told = Instant::now();
                let line =
                    json!({"event": "progress", "image": image, "done": done, "total": total});
                self.print(line, || {
                    format!("{image}: {} of {}", bytes(done), bytes(total))
                });
            }
            // A round without writes is nothing to tell a person.
            Moving::Round(_, 0) if !self.json => {}
            Moving::Round(round, n) => {
                let line = json!({"event": "round", "image": image, "round": round, "bytes": n});
                self.print(line, || {
                    format!("{image}: round {round}: {} written", bytes(n))
                });
            }
            Moving::Reconnecting(error) => {
                let error = clean(&error);
                let line = json!({"event": "reconnecting", "image": image, "message": error});
                self.print(line, || format!("{image}: {error}; trying again"));
            }
        }
    }

    fn print(&self, line: Value, text: impl FnOnce() -> String) {
        match self.json {
            // The last line tells what matters.
            true => drop(out::json(&line)),
            false => out::note(&text()),
        }
    }

    fn done(&self, order: &MoveDisk, report: &MoveReport) -> Result<()> {
        let (image, there) = (&self.image, &order.name_there);
        let peer = clean(&order.peer);
        if self.json {
            let mut last = serde_json::to_value(report)?;
            last["event"] = "done".into();
            last["image"] = image.clone().into();
            last["name"] = there.as_str().into();
            last["peer"] = order.peer.clone().into();
            last["dry_run"] = order.dry_run.into();
            return out::json(&last);
        }
        if order.dry_run {
            return out::line(&format!(
                "{image}: can move; about {} to send, besides what is written meanwhile",
                bytes(report.image_wire_bytes)
            ));
        }
        let pause = &report.pause;
        out::line(&format!(
            "{image} is {there} at {peer}: paused for {} ms (hook {}, last round {}, hand-over {}); {} of the image, {} of changes in {:.1} s",
            pause.total_ms,
            pause.hook_ms,
            pause.disks_ms,
            pause.hand_over_ms,
            bytes(report.image_wire_bytes),
            bytes(report.disk_wire_bytes),
            report.seconds,
        ))
    }
}

fn list(home: &Home, json: bool) -> Result<()> {
    let list = machines::list_disks(home)?;
    if json {
        return list.iter().try_for_each(|disk| {
            out::json(&json!({
                "name": disk.name, "state": disk.state, "peer": disk.peer, "moves": disk.generation,
            }))
        });
    }
    if list.is_empty() {
        out::note("drover: no disk has moved to this site or from it");
        return Ok(());
    }
    let rows = list.iter().map(|disk| {
        let peer = disk.peer.as_deref().map_or_else(|| "-".into(), clean);
        let moves = disk.generation.to_string();
        vec![clean(&disk.name), disk.state.into(), peer, moves]
    });
    let heading = ["image", "state", "peer", "moves"];
    out::line(&out::table(&heading, rows.collect(), &[3]))
}
