//! Callers on this machine: whoever may open the home's socket may ask for anything.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use drover_net::{Connection, Role, decode, greet};
use drover_teleport::RefuseReason;
use drover_teleport::protocol::{Reply, Request, kind};

use super::conversation::{answer, done, failed, images, no, transfers};
use super::{Duty, Server, jobs};
use crate::failure::{Exit, exit_of, one_line};
use crate::home::CleanUp;

/// How long a caller may take to say what it wants.
const REQUEST_LIMIT: Duration = Duration::from_secs(10);

/// The longest request.
const MAX_REQUEST: usize = 64 << 10;

/// Answers one caller.
pub async fn run(server: Arc<Server>, connection: Connection) {
    if let Err(e) = talk(&server, connection).await {
        tracing::debug!("local caller: {}", one_line(&e));
    }
}

async fn talk(server: &Arc<Server>, connection: Connection) -> Result<()> {
    let (mut reader, mut writer) = connection.split();
    reader.set_max_frame(MAX_REQUEST);
    greet(&mut reader, &mut writer, Role::Server).await?;
    let frame = tokio::time::timeout(REQUEST_LIMIT, reader.next())
        .await
        .context("no request came")??
        .context("it said nothing")?;
    if frame.kind != kind::REQUEST {
        bail!(
            "it began with a frame of kind {:#04x} and no request",
            frame.kind
        );
    }
    let request: Request = decode(&frame.payload)?;
    let text = |text: Result<String>| match text {
        Ok(text) => Reply::Text(text),
        Err(e) => failed(one_line(&e)),
    };
    let last = match (request, &server.duty) {
        (Request::Status, _) => text(server.status_json().await),
        (Request::Metrics, _) => text(server.metrics_text().await),
        (Request::Images, _) => {
            images(server, &mut writer).await?;
            return done(reader, writer).await;
        }
        (Request::Transfers, Duty::Site(site, _)) => {
            transfers(site, &mut writer).await?;
            return done(reader, writer).await;
        }
        (Request::RemoveTransfer { key }, Duty::Site(site, _)) => {
            jobs::remove_transfer(server, site, key, None).await?
        }
        (Request::Verify { name }, Duty::Site(site, _)) => {
            jobs::verify(server, site, name, &mut writer).await?
        }
        (Request::Remove { name }, Duty::Site(site, _)) => jobs::remove(server, site, name).await?,
        (Request::Index { paths }, Duty::Site(site, _)) => match <[String; 1]>::try_from(paths) {
            Ok([path]) if PathBuf::from(&path).is_absolute() => {
                jobs::index(server, site, PathBuf::from(path), &mut writer).await?
            }
            _ => failed("one absolute path at a time, please"),
        },
        (Request::Leases, Duty::Site(_, devices)) => {
            let devices = Arc::clone(devices);
            text(tokio::task::spawn_blocking(move || crate::mounts::leases_json(&devices)).await?)
        }
        (Request::BreakLease { name }, Duty::Site(_, devices)) => {
            let mut room = CleanUp::of(&server.home);
            let broken = room.run_async(|| crate::mounts::broken_json(devices, &name));
            let broken = broken.await;
            tokio::task::spawn_blocking(move || drop(room)).await?;
            text(broken)
        }
        (Request::Changes, Duty::Site(..)) => {
            let home = server.home.clone();
            text(tokio::task::spawn_blocking(move || crate::changes::list_json(&home)).await?)
        }
        (Request::DropChanges { name, earlier }, Duty::Site(_, devices)) => {
            let (home, devices) = (server.home.clone(), Arc::clone(devices));
            let dropped = tokio::task::spawn_blocking(move || {
                CleanUp::of(&home)
                    .run(|| crate::changes::drop_json(&home, &devices, &name, earlier))
            });
            match dropped.await? {
                Ok(text) => Reply::Text(text),
                Err(e) if exit_of(&e) == Exit::Refused => no(RefuseReason::Policy, one_line(&e)),
                Err(e) => failed(one_line(&e)),
            }
        }
        (
            Request::MergeChanges {
                name,
                rename,
                qcow2,
                drop,
                dry_run,
            },
            Duty::Site(site, devices),
        ) => {
            let order = crate::changes::Order {
                name,
                rename,
                to: crate::changes::target(qcow2),
                drop,
                dry_run,
            };
            jobs::merge(server, site, devices, order, &mut writer).await?
        }
        (Request::Device { open }, Duty::Site(_, devices)) => {
            let peer = crate::mounts::own(server.identity.key());
            let stop = server.stop.clone();
            return Ok(devices
                .serve_lane(reader, writer, peer, &open, stop)
                .await?);
        }
        (
            Request::Device { .. }
            | Request::Verify { .. }
            | Request::Remove { .. }
            | Request::Index { .. }
            | Request::Leases
            | Request::BreakLease { .. }
            | Request::Changes
            | Request::DropChanges { .. }
            | Request::MergeChanges { .. }
            | Request::Transfers
            | Request::RemoveTransfer { .. },
            Duty::Teleporter(_),
        ) => no(RefuseReason::Policy, "a teleporter holds no images"),
        (
            Request::Pair { .. }
            | Request::Send { .. }
            | Request::Lane { .. }
            | Request::Teleporter,
            _,
        ) => no(RefuseReason::Policy, "that is for peers, over the network"),
    };
    answer(reader, writer, &last).await
}
