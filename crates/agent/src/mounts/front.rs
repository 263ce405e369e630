//! Front ends of a mount: expose disks as a file, over NBD or as a kernel block device.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use drover_core::BlockDevice;
use drover_frontend::kernel_nbd::Detach;
use drover_frontend::{fuse, kernel_nbd, loopdev, nbd, ublk};
use drover_net::Code;

use super::disk::Disk;
use super::kernel::{self, KernelNbd};
use super::record::{Driver, Front, Record};
use super::target::{Listen, Target};
use crate::error::{Error, Result, bail, one_line};

/// How long an unmount waits for NBD connections that are closing.
const CLOSING: Duration = Duration::from_secs(2);

/// A running front end.
pub enum Shown {
    /// A file, and the loop device on it. The device is removed first.
    File {
        /// The loop device.
        device: Option<loopdev::LoopDevice>,
        /// The file.
        mount: fuse::FileMount,
    },
    /// An NBD server.
    Nbd {
        /// The server.
        server: nbd::Server,
        /// Its socket.
        listening: nbd::Listening,
    },
    /// A device of the kernel's NBD client, `/dev/nbdN`.
    KernelNbd(KernelNbd),
    /// A ublk device.
    KernelUblk(ublk::Attached),
}

impl Shown {
    /// Starts the front end of the record.
    ///
    /// # Errors
    /// When it cannot be started; nothing is left of it then.
    pub fn make(record: &Record, disks: &[Disk]) -> Result<Shown> {
        match &record.front {
            Front::File {
                path,
                device,
                partitions,
            } => {
                let scan = device.then_some(*partitions);
                file(record, path, scan, only(disks)?)
            }
            Front::Nbd { listen, tls } => serve(listen, tls.as_deref(), disks, record),
            Front::Kernel {
                driver: Driver::Nbd,
                device,
            } => {
                let exported = export(record, "disk", only(disks)?.device());
                let attached = KernelNbd::attach(record, device.clone(), exported)?;
                Ok(Shown::KernelNbd(attached))
            }
            Front::Kernel {
                driver: Driver::Ublk,
                device,
            } => {
                let disk = only(disks)?.device();
                let attached = kernel::attach_ublk(record, device.clone(), disk)?;
                Ok(Shown::KernelUblk(attached))
            }
        }
    }

    /// Starts the NBD server of a mount whose disk comes later: `device` stands for it.
    ///
    /// # Errors
    /// As [`Shown::make`]; other front ends read the disk as soon as they are there.
    pub fn early(record: &Record, device: Arc<dyn BlockDevice>) -> Result<Shown> {
        match (&record.front, record.images.as_slice()) {
            (Front::Nbd { listen, tls }, [image]) => {
                let exports = vec![export(record, &image.image, device)];
                listen_to(listen, tls.as_deref(), exports)
            }
            _ => bail!("only one image exported over NBD can be shown before it is there"),
        }
    }

    /// Cuts the connections of an NBD server at once, without an answer to what they wait for.
    pub fn cut(&self) {
        if let Shown::Nbd { server, .. } = self {
            server.cut();
        }
    }

    /// The block devices it created.
    pub fn devices(&self) -> Vec<PathBuf> {
        match self {
            Shown::File { device, .. } => device.iter().map(|d| d.path().to_owned()).collect(),
            Shown::Nbd { .. } => Vec::new(),
            Shown::KernelNbd(attached) => vec![attached.path().to_owned()],
            Shown::KernelUblk(attached) => vec![attached.path().to_owned()],
        }
    }

    /// Its paths or addresses.
    pub fn lines(&self, record: &Record) -> Vec<String> {
        match self {
            Shown::File { device, mount } => match device {
                Some(device) => vec![device.path().display().to_string()],
                None => vec![mount.path().display().to_string()],
            },
            Shown::Nbd { listening, .. } => {
                let listen = match listening.local_addr() {
                    nbd::Address::Unix(path) => Listen::Unix(path.clone()),
                    nbd::Address::Tcp(address) => Listen::Tcp(*address),
                };
                let tls = matches!(record.front, Front::Nbd { tls: Some(_), .. });
                let uri = |image: &Target| listen.uri(&image.image, tls);
                record.images.iter().map(uri).collect()
            }
            Shown::KernelNbd(attached) => vec![attached.path().display().to_string()],
            Shown::KernelUblk(attached) => vec![attached.path().display().to_string()],
        }
    }

    /// Shuts the front end down, when `lazy` even while it is in use.
    ///
    /// # Errors
    /// When it is in use or cannot be shut down: what remains of it, and the reason.
    pub fn end(self, lazy: bool) -> Result<(), Box<Unended>> {
        match self {
            Shown::File {
                mut device,
                mut mount,
            } => {
                let detached = device.as_mut().map_or(Ok(()), |device| match lazy {
                    true => device.detach_at_once(),
                    false => device.detach(),
                });
                if let Err(e) = detached {
                    if !lazy {
                        return Err(unended(Shown::File { device, mount }, e));
                    }
                    // The kernel removes it with its last user.
                    tracing::warn!("{e}");
                }
                drop(device.take());
                let ended = if lazy {
                    // Processes that have it open must get I/O errors rather than hang on a closed disk.
                    match mount.unmount_at_once() {
                        Err(fuse::FuseError::Busy { .. }) => mount.abort(),
                        other => other,
                    }
                } else {
                    mount.unmount()
                };
                match ended {
                    Ok(()) => Ok(()),
                    Err(e @ fuse::FuseError::CutOff { .. }) => {
                        tracing::warn!("{e}");
                        Ok(())
                    }
                    Err(e) => Err(unended(
                        Shown::File {
                            device: None,
                            mount,
                        },
                        e,
                    )),
                }
            }
            Shown::Nbd { server, listening } => {
                let open = match lazy {
                    true => 0,
                    false => still_open(&server),
                };
                if open > 0 {
                    let text = format!("{open} NBD connections are open: stop the clients first");
                    let e = Error::coded(Code::Busy, text);
                    return Err(unended(Shown::Nbd { server, listening }, e));
                }
                listening.stop();
                server.stop();
                Ok(())
            }
            Shown::KernelNbd(mut attached) => match attached.detach(how(lazy)) {
                Ok(()) => Ok(()),
                Err(e) => Err(unended(Shown::KernelNbd(attached), e)),
            },
            Shown::KernelUblk(mut attached) => match attached.detach(how(lazy)) {
                Ok(()) => Ok(()),
                Err(e) => Err(unended(Shown::KernelUblk(attached), e)),
            },
        }
    }
}

/// Open connections, after a grace period: a client that just ended may still be counted.
fn still_open(server: &nbd::Server) -> u64 {
    let end = Instant::now() + CLOSING;
    loop {
        let open = server.counts().open;
        if open == 0 || Instant::now() >= end {
            return open;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// A front end, or part of one, that could not be shut down, and why.
pub type Unended = (Shown, Error);

fn unended(shown: Shown, why: impl Into<Error>) -> Box<Unended> {
    let why = why.into();
    let is_busy = matches!(
        why,
        Error::Fuse(fuse::FuseError::Busy { .. })
            | Error::Loop(loopdev::LoopError::Busy { .. })
            | Error::Kernel(kernel_nbd::Error::Busy { .. })
    );
    let why = match is_busy {
        true => Error::coded(Code::Busy, one_line(&why)),
        false => why,
    };
    Box::new((shown, why))
}

fn how(lazy: bool) -> Detach {
    match lazy {
        true => Detach::Force,
        false => Detach::IfUnused,
    }
}

fn only(disks: &[Disk]) -> Result<&Disk> {
    match disks {
        [disk] => Ok(disk),
        _ => bail!("only one image can be mounted this way"),
    }
}

/// A file and, with `device`, a loop device on it; the value says whether its partitions are scanned.
fn file(record: &Record, path: &Path, device: Option<bool>, disk: &Disk) -> Result<Shown> {
    let read_only = disk.device().capabilities().read_only;
    let name = record.images.first().map_or("disk", |i| i.image.as_str());
    let options = fuse::Options {
        name: name.into(),
        read_only,
        // The loop device has a page cache of its own.
        page_cache: device.is_none(),
        ..fuse::Options::default()
    };
    let mut mount = fuse::FileMount::mount(path, disk.device(), options)?;
    let device = match device {
        None => None,
        Some(partitions) => {
            let options = loopdev::Options {
                read_only,
                partitions,
                ..loopdev::Options::default()
            };
            match loopdev::LoopDevice::attach(mount.path(), options) {
                Ok(device) => Some(device),
                Err(e) => {
                    mount.abort().ok();
                    return Err(e.into());
                }
            }
        }
    };
    Ok(Shown::File { device, mount })
}

fn export(record: &Record, name: &str, device: Arc<dyn BlockDevice>) -> nbd::Export {
    nbd::Export {
        name: name.into(),
        description: format!("{} by drover", record.name),
        read_only: device.capabilities().read_only,
        device,
    }
}

fn serve(listen: &Listen, tls: Option<&Path>, disks: &[Disk], record: &Record) -> Result<Shown> {
    let exports = disks
        .iter()
        .zip(&record.images)
        .map(|(disk, target)| export(record, &target.image, disk.device()))
        .collect();
    listen_to(listen, tls, exports)
}

fn listen_to(listen: &Listen, tls: Option<&Path>, exports: Vec<nbd::Export>) -> Result<Shown> {
    let tls = match tls {
        None => None,
        Some(dir) => {
            let ca = dir.join("ca-cert.pem");
            Some(nbd::Tls::from_files(
                &dir.join("server-cert.pem"),
                &dir.join("server-key.pem"),
                ca.exists().then_some(ca.as_path()),
            )?)
        }
    };
    let options = nbd::ServerOptions {
        // Access is controlled by the permissions of the socket file.
        plain_unix: true,
        tls,
        ..nbd::ServerOptions::default()
    };
    let server = nbd::Server::new(exports, options)?;
    let listening = match listen {
        Listen::Unix(path) => server.listen_unix(path)?,
        Listen::Tcp(address) => server.listen_tcp(*address)?,
    };
    Ok(Shown::Nbd { server, listening })
}
