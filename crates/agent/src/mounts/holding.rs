//! The disk of a mount as of one moment, lent to another process of this site, which reads it for a snapshot: the mount daemon
//! holds it, because it has the device, and serves it over NBD until it has been read.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use drover_core::{BlockDevice, ImageName};
use drover_device::backend::NbdDevice;
use drover_device::backend::nbd::{NbdAddress, NbdOptions, NbdSocket};
use drover_frontend::nbd;
use drover_migrate::Movable;
use drover_migrate::moment::DeviceMoments;
use drover_net::service::{CallEvent, OutgoingCall};
use drover_net::{NetError, connect_unix, request};
use serde::{Deserialize, Serialize};

use super::moving::mounted;
use super::record::{Front, Place};
use crate::error::{Error, Result};
use crate::home::Home;
use crate::remote::SocketPath;

/// Most ranges that are told: more are joined with what is between them.
const MAX_RANGES: usize = 1024;

/// What ranges are widened to at first, in bytes: what a vault takes over or reads at once.
const UNIT: u64 = 2 << 20;

/// The name of the export.
const EXPORT: &str = "held";

/// Request: hold the disk of a mount as it is now, and lend it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct HoldDisk {
    /// The image of this site that is mounted.
    pub image: ImageName,
    /// For whom what is written is recorded from one moment to the next.
    pub purpose: String,
    /// Directory for what is overwritten meanwhile; none for that of the mount.
    pub scratch: Option<PathBuf>,
}
request!(HoldDisk: "mount.hold", Manage, Holding => ());

/// How it goes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Holding {
    /// From the daemon: it is held.
    Held {
        /// The socket of an NBD server with it.
        socket: PathBuf,
        /// What the state before was called, and the ranges that were written since; none if that is not known.
        since: Option<(String, Vec<Range<u64>>)>,
    },
    /// From the caller: all was read, and the state is called so.
    Read(String),
}

/// What is recorded of a device between moments.
#[derive(Default)]
pub struct Kept(Option<Recorded>);

struct Recorded {
    purpose: String,
    /// What the state is called that was read last; none if it was not.
    note: Option<String>,
    moments: DeviceMoments,
}

/// A state that is lent. Dropping it ends that.
pub struct Lent {
    server: nbd::Server,
    listening: nbd::Listening,
}

impl Drop for Lent {
    fn drop(&mut self) {
        self.listening.stop();
        self.server.stop();
    }
}

impl Kept {
    /// Holds the device as it is now, and lends it at a socket in the directory of the mount.
    ///
    /// # Errors
    /// Those of the device and the socket.
    pub async fn hold(
        &mut self,
        order: &HoldDisk,
        device: Arc<Movable>,
        directory: &Path,
    ) -> Result<(Holding, Lent)> {
        let (note, mut moments) = match self.0.take() {
            Some(known) if known.purpose == order.purpose => (known.note, known.moments),
            // What is recorded for others goes on from another moment.
            other => {
                if let Some(mut other) = other {
                    other.moments.end();
                }
                (None, DeviceMoments::new(device))
            }
        };
        let scratch = order.scratch.clone();
        let scratch = scratch.unwrap_or_else(|| directory.to_owned());
        let (state, written) = moments.hold(scratch).await.map_err(Error::msg)?;
        let lent = lend(state, directory);
        self.0 = Some(Recorded {
            purpose: order.purpose.clone(),
            note: None,
            moments,
        });
        let (socket, lent) = match lent {
            Ok(lent) => lent,
            Err(e) => {
                self.rest(None);
                return Err(e);
            }
        };
        let since = note.zip(written.map(|written| coarse(written, UNIT)));
        Ok((Holding::Held { socket, since }, lent))
    }

    /// Ends what is held. If it was read, what is written from then on is recorded, and it is called so.
    pub fn rest(&mut self, note: Option<String>) {
        if let Some(known) = &mut self.0 {
            known.moments.rest(note.is_some());
            known.note = note;
        }
    }
}

fn lend(state: Arc<dyn BlockDevice>, directory: &Path) -> Result<(PathBuf, Lent)> {
    let socket = directory.join("held.sock");
    // Of a daemon that was killed.
    let _ = std::fs::remove_file(&socket);
    let export = nbd::Export {
        name: EXPORT.into(),
        description: "as of one moment, by drover".into(),
        read_only: true,
        device: state,
    };
    let options = nbd::ServerOptions {
        // Only this user can reach the socket.
        plain_unix: true,
        ..nbd::ServerOptions::default()
    };
    let server = nbd::Server::new(vec![export], options)?;
    let short = SocketPath::of(&socket)?;
    let listening = server.listen_unix(short.path())?;
    Ok((socket, Lent { server, listening }))
}

/// At most [`MAX_RANGES`] ranges that cover all of these, in order.
fn coarse(ranges: Vec<Range<u64>>, unit: u64) -> Vec<Range<u64>> {
    let mut out: Vec<Range<u64>> = Vec::new();
    for range in &ranges {
        let wide = range.start / unit * unit..range.end.div_ceil(unit).saturating_mul(unit);
        match out.last_mut() {
            Some(last) if wide.start <= last.end => last.end = last.end.max(wide.end),
            _ => out.push(wide),
        }
    }
    match out.len() > MAX_RANGES {
        true => coarse(out, unit * 2),
        false => out,
    }
}

/// A disk that a mount daemon holds for this process.
pub struct Borrowed {
    call: OutgoingCall<HoldDisk>,
    /// The disk, as of the moment.
    pub device: Arc<dyn BlockDevice>,
    /// What the state before was called, and what was written since; none if that is not known.
    pub since: Option<(String, Vec<Range<u64>>)>,
}

impl Borrowed {
    /// All was read: the state is called so.
    ///
    /// # Errors
    /// When the daemon has gone: the next time all is read.
    pub async fn read(self, note: String) -> Result<()> {
        let Borrowed {
            mut call, device, ..
        } = self;
        drop(device);
        let told = async {
            call.report(&Holding::Read(note)).await?;
            while let CallEvent::Progress(_) = call.next().await? {}
            Ok::<_, NetError>(())
        };
        told.await.map_err(of_daemon)?;
        call.close().await;
        Ok(())
    }
}

fn of_daemon(error: NetError) -> Error {
    match error {
        NetError::Refused(refusal) => Error::Refused(refusal),
        e => Error::Net(e),
    }
}

/// Has the daemon that serves an image of this site for writing hold it; none if there is no such mount.
///
/// # Errors
/// When it cannot be held.
pub async fn borrow(home: &Home, domain: &str, order: &HoldDisk) -> Result<Option<Borrowed>> {
    let Some((place, _)) = mounted(home, &order.image, domain)? else {
        return Ok(None);
    };
    let socket = place.socket();
    let short = SocketPath::of(&socket)?;
    let begin = async {
        let mut call = OutgoingCall::start(connect_unix(short.path()).await?, order).await?;
        let event = call.next().await?;
        Ok::<_, NetError>((call, event))
    };
    let (call, event) = begin.await.map_err(of_daemon)?;
    let CallEvent::Progress(Holding::Held { socket, since }) = event else {
        return Err(Error::msg("the mount daemon does not lend its disk"));
    };
    let opened = tokio::task::spawn_blocking(move || {
        let short = SocketPath::of(&socket)?;
        let address = NbdAddress {
            socket: NbdSocket::Unix(short.path().to_owned()),
            export: EXPORT.into(),
        };
        let options = NbdOptions {
            read_only: true,
            ..NbdOptions::default()
        };
        NbdDevice::connect(&address, &options).map_err(Error::msg)
    });
    let device = opened.await.map_err(Error::msg)??;
    Ok(Some(Borrowed {
        call,
        device: Arc::new(device),
        since,
    }))
}

/// The image of this site that the mount at this path shows for writing, and its domain: a file, a device, or a name in `drover mounts`.
///
/// # Errors
/// When the records of mounts cannot be read.
pub fn shown_at(home: &Home, path: &Path) -> Result<Option<(ImageName, Option<String>)>> {
    let named = path.to_str().unwrap_or_default();
    for (place, record) in Place::list(home)? {
        let is_it = match &record.front {
            Front::File { path: file, .. } => file == path,
            Front::Nbd { .. } | Front::Kernel { .. } => false,
        };
        let is_it =
            is_it || record.devices.iter().any(|device| device == path) || place.name() == named;
        let [target] = record.images.as_slice() else {
            continue;
        };
        if is_it && place.is_kept() && target.is_own() && !record.how.read_only {
            return Ok(Some((
                ImageName::new(&target.image)?,
                target.domain.clone(),
            )));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_ranges_cover_all_that_was_written() {
        // A generator of numbers that look random.
        let mut state = 5u64;
        let mut below = |n: u64| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % n
        };
        for n in [0, 1, 10, 3000, 20_000] {
            let mut at = 0;
            let ranges: Vec<Range<u64>> = (0..n)
                .map(|_| {
                    let from = at + below(9 << 20);
                    at = from + 1 + below(99_999);
                    from..at
                })
                .collect();
            let found = coarse(ranges.clone(), UNIT);
            assert!(found.len() <= MAX_RANGES);
            assert!(found.windows(2).all(|two| two[0].end < two[1].start));
            let covers =
                |r: &Range<u64>| found.iter().any(|f| f.start <= r.start && r.end <= f.end);
            assert!(ranges.iter().all(covers), "{n}");
            let wide: u64 = found.iter().map(|f| f.end - f.start).sum();
            assert!(n > 1000 || wide <= n * 2 * UNIT);
        }
    }
}
