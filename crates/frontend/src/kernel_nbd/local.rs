//! The kernel's client and this crate's server in one process, on socket pairs: the path mount of r3map §1.4.4.6.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use super::{Attached, Detach, Error, Options, attach, index_of, owner, reconnect};
use crate::nbd::{Connection, Negotiated, Server};

/// How long a connection may take to end when its device is gone, with nothing in flight.
const END: Duration = Duration::from_secs(10);

/// How long the kernel may take to free a device after its connections have ended.
const SOON: Duration = Duration::from_secs(2);

/// An attached device and the connections on which this process serves it. Dropping it detaches by force.
pub struct Local {
    attached: Attached,
    connections: Vec<Connection>,
}

impl Local {
    /// The node, `/dev/nbdN`.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.attached.path()
    }

    /// Whether the kernel has closed all connections: another process has detached the device.
    #[must_use]
    pub fn is_gone(&self) -> bool {
        !self.connections.iter().any(Connection::is_open)
    }

    /// Detaches; returns when the device is free again and its connections have ended.
    ///
    /// # Errors
    /// [`Error`]; the device then stays attached.
    pub fn detach(&mut self, how: Detach) -> Result<(), Error> {
        if self.is_gone() {
            // The process that detached it is about to free it; until then a flush would fail.
            self.attached.wait_free(SOON);
        }
        self.attached.detach(how)?;
        for connection in self.connections.drain(..) {
            if !connection.stop(END) {
                tracing::warn!("an NBD connection was cut off after its device was gone");
            }
        }
        Ok(())
    }
}

/// Attaches an export of `server` over `connections` socket pairs. `change` sets what the server does not know: the
/// device's number, timeouts, a name.
///
/// Multiple connections let the kernel send and receive on several CPUs at once; one is enough for many requests in
/// flight.
///
/// # Errors
/// [`Error`]; nothing stays attached then.
pub fn attach_local(
    server: &Server,
    export: &str,
    connections: usize,
    change: impl FnOnce(Options) -> Options,
) -> Result<Local, Error> {
    let facts = server.facts(export);
    let facts = facts.ok_or_else(|| Error::Options(format!("there is no export {export:?}")))?;
    let options = change(Options::of(&facts));
    options.check(connections)?;
    let (sockets, connections) = connect(server, export, connections)?;
    let attached = attach(sockets, &options)?;
    Ok(Local {
        attached,
        connections,
    })
}

/// Takes over a device whose server is gone, while its requests wait ([`Options::dead_conn_timeout`]): after a restart
/// of the process that served it. The export must be unchanged.
///
/// # Errors
/// [`Error`].
pub fn reconnect_local(
    path: &Path,
    server: &Server,
    export: &str,
    connections: usize,
) -> Result<Local, Error> {
    let (sockets, connections) = connect(server, export, connections)?;
    reconnect(path, sockets)?;
    Ok(Local {
        attached: Attached {
            path: path.into(),
            session: None,
            owner: owner(index_of(path)?),
            attached: true,
        },
        connections,
    })
}

fn connect(
    server: &Server,
    export: &str,
    count: usize,
) -> Result<(Vec<OwnedFd>, Vec<Connection>), Error> {
    let mut sockets = Vec::new();
    let mut connections = Vec::new();
    for _ in 0..count {
        let (kernel, own) = UnixStream::pair()
            .map_err(|error| Error::kernel("make sockets for", Path::new("/dev/nbd"), error))?;
        // The kernel supports neither structured replies nor block status.
        let connection = server.serve_transmission(own, export, Negotiated::default())?;
        sockets.push(kernel.into());
        connections.push(connection);
    }
    Ok((sockets, connections))
}
