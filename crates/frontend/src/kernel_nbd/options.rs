//! Options of the kernel's NBD client.

use std::path::PathBuf;
use std::time::Duration;

use crate::kernel::Error;
use crate::nbd::Facts;
use crate::nbd::wire::transmission;

/// Maximum sockets of a device.
pub const MAX_CONNECTIONS: usize = 16;
/// Maximum length of [`Options::identifier`] (bytes).
pub const MAX_IDENTIFIER: usize = 200;

/// Default of [`Options::timeout`]: longer than a device may take for a request.
const TIMEOUT_DEFAULT: Duration = Duration::from_secs(120);

/// The kernel's parameters of the device.
#[derive(Clone, Debug)]
pub struct Options {
    /// The node, `/dev/nbdN`; `None` for the first free one.
    pub device: Option<PathBuf>,
    /// Size in bytes, a multiple of the block size.
    pub size: u64,
    /// Logical block size: a power of two from 512 to 4096.
    pub block_size: u32,
    /// Read-only, regardless of `flags`.
    pub read_only: bool,
    /// The server's transmission flags. Multiple sockets need [`transmission::CAN_MULTI_CONN`].
    pub flags: u16,
    /// Time after which an unanswered request closes its connection (whole seconds, at least one). Without it, requests
    /// in flight when the server dies hang until the device is detached, because the kernel only then handles them;
    /// with it, a server must reply to every request in time, if only with an error.
    pub timeout: Option<Duration>,
    /// How long requests wait for [`reconnect`](super::reconnect) when all sockets are dead, before they fail (netlink
    /// only). `None`: new ones fail at once.
    pub dead_conn_timeout: Option<Duration>,
    /// A name shown by `/sys/block/nbdN/backend`, to identify the owner (netlink only).
    pub identifier: Option<String>,
    /// The kernel interface.
    pub interface: Interface,
}

impl Options {
    /// A writable device of `size` bytes with blocks of 512, a server that can flush, and a timeout of two minutes.
    #[must_use]
    pub fn new(size: u64) -> Self {
        Self {
            device: None,
            size,
            block_size: 512,
            read_only: false,
            flags: transmission::HAS_FLAGS | transmission::SEND_FLUSH,
            timeout: Some(TIMEOUT_DEFAULT),
            dead_conn_timeout: None,
            identifier: None,
            interface: Interface::Any,
        }
    }

    /// From the server's properties of an export.
    #[must_use]
    pub fn of(facts: &Facts) -> Self {
        Self {
            block_size: facts.minimum.max(512),
            read_only: facts.read_only,
            flags: facts.flags(false),
            ..Self::new(facts.size)
        }
    }

    pub(super) fn transmission_flags(&self) -> u64 {
        let read_only = if self.read_only {
            transmission::READ_ONLY
        } else {
            0
        };
        u64::from(self.flags | transmission::HAS_FLAGS | read_only)
    }

    pub(super) fn check(&self, sockets: usize) -> Result<(), Error> {
        let wrong = |why: String| Err(Error::Options(why));
        if sockets == 0 || sockets > MAX_CONNECTIONS {
            return wrong(format!(
                "{sockets} sockets: must be from 1 to {MAX_CONNECTIONS}"
            ));
        }
        if sockets > 1 && self.flags & transmission::CAN_MULTI_CONN == 0 {
            return wrong(format!(
                "{sockets} sockets, but the server does not support multiple connections"
            ));
        }
        if !self.block_size.is_power_of_two() || !(512..=4096).contains(&self.block_size) {
            return wrong(format!(
                "block size {}: must be a power of two from 512 to 4096",
                self.block_size
            ));
        }
        if self.size == 0 || !self.size.is_multiple_of(u64::from(self.block_size)) {
            return wrong(format!(
                "size {}: must be a non-zero multiple of the block size {}",
                self.size, self.block_size
            ));
        }
        if let Some(name) = &self.identifier
            && (name.is_empty() || name.len() > MAX_IDENTIFIER || name.contains('\0'))
        {
            return wrong(format!(
                "an identifier of {} bytes: must be 1 to {MAX_IDENTIFIER} bytes without NUL",
                name.len()
            ));
        }
        Ok(())
    }
}

/// The interface to the kernel's NBD client.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Interface {
    /// Netlink if the driver has it, else ioctls.
    #[default]
    Any,
    /// Generic netlink.
    Netlink,
    /// Ioctls on the node, with a thread blocked in one.
    Ioctl,
}

/// Whole seconds, at least one: zero means no timeout to the kernel.
pub(super) fn seconds(duration: Duration) -> u64 {
    let up = u64::from(duration.subsec_nanos() > 0);
    duration.as_secs().saturating_add(up).max(1)
}
