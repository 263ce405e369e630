//! The table of nodes on a database server.

use std::time::Duration;

use super::table::{Holding, Joining, NodeInfo, NodeState, Table, Use};
use super::work::{JobInfo, TakenUnit, UnitState};
use crate::catalog_error::Result;
use crate::site_catalog::CatalogUrl;
#[cfg(feature = "postgres")]
use crate::site_catalog::ServerTable;

/// Calls the table on the server.
macro_rules! of_table {
    ($self:ident.$method:ident($($argument:expr),*)) => {{
        #[cfg(feature = "postgres")]
        {
            $self.table.$method($($argument),*)
        }
        #[cfg(not(feature = "postgres"))]
        {
            let _ = ($($argument,)*);
            match $self.never {}
        }
    }};
}

/// The table of the nodes of a site. Calls are short transactions, one after the other whichever node makes them; safe from any
/// thread.
pub struct Nodes {
    #[cfg(feature = "postgres")]
    table: ServerTable,
    #[cfg(not(feature = "postgres"))]
    never: std::convert::Infallible,
}

impl Nodes {
    /// Those of the site whose catalog is at this address; it was connected to before. Creates the tables if there are none.
    ///
    /// # Errors
    /// When the server cannot be reached or its tables cannot be used; the same for every method here.
    pub fn open(url: &CatalogUrl) -> Result<Nodes> {
        #[cfg(feature = "postgres")]
        {
            let table = ServerTable::open(url)?;
            Ok(Nodes { table })
        }
        #[cfg(not(feature = "postgres"))]
        Err(crate::site_catalog::without_postgres(url))
    }

    /// Runs `f` on the table, with the time by the database's clock.
    fn run<T>(
        &self,
        doing: &'static str,
        f: impl FnOnce(&mut Table, i64) -> Result<T, String>,
    ) -> Result<T> {
        #[cfg(feature = "postgres")]
        {
            self.table.run(doing, f)
        }
        #[cfg(not(feature = "postgres"))]
        {
            let _ = (doing, f);
            match self.never {}
        }
    }

    /// What the directory of the site's images says that it is; empty before the first node.
    ///
    /// # Errors
    /// As above.
    pub fn directory(&self) -> Result<String> {
        self.run("looking for the directory of images", |t, _| {
            Ok(t.directory.clone())
        })
    }

    /// See [`Table::join`].
    ///
    /// # Errors
    /// As there, and above.
    pub fn join(&self, node: &Joining) -> Result<bool> {
        self.run("entering a node", |t, now| t.join(node, now))
    }

    /// See [`Table::renew`].
    ///
    /// # Errors
    /// As above.
    pub fn renew(&self, token: &str) -> Result<Option<NodeState>> {
        let renew = |t: &mut Table, now| Ok(t.renew(token, now));
        let doing = "prolonging the term of this node";
        #[cfg(feature = "postgres")]
        return self.table.run_for_term(doing, renew);
        #[cfg(not(feature = "postgres"))]
        self.run(doing, renew)
    }

    /// See [`Table::advertise`].
    ///
    /// # Errors
    /// As above.
    pub fn advertise(&self, token: &str, addresses: &[String]) -> Result<Vec<Vec<String>>> {
        self.run("noting the addresses of this node", |t, _| {
            Ok(t.advertise(token, addresses))
        })
    }

    /// See [`Table::fence`].
    ///
    /// # Errors
    /// As above.
    pub fn fence(&self) -> Result<Vec<(String, String)>> {
        self.run("looking for nodes that are gone", |t, now| Ok(t.fence(now)))
    }

    /// See [`Table::fenced`].
    ///
    /// # Errors
    /// As above.
    pub fn fenced(&self, token: &str) -> Result<()> {
        self.run("taking over from a node", |t, _| {
            t.fenced(token);
            Ok(())
        })
    }

    /// See [`Table::leave`].
    ///
    /// # Errors
    /// As above.
    pub fn leave(&self, token: &str) -> Result<()> {
        self.run("ending the term of this node", |t, now| {
            t.leave(token, now);
            Ok(())
        })
    }

    /// See [`Table::list`].
    ///
    /// # Errors
    /// As above.
    pub fn list(&self) -> Result<Vec<NodeInfo>> {
        self.run("listing nodes", |t, now| Ok(t.list(now)))
    }

    /// See [`Table::drain`].
    ///
    /// # Errors
    /// As there, and above.
    pub fn drain(&self, name: &str, drain: bool) -> Result<()> {
        self.run("draining a node", |t, _| t.drain(name, drain))
    }

    /// See [`Table::remove`].
    ///
    /// # Errors
    /// As there, and above.
    pub fn remove(&self, name: &str) -> Result<String> {
        self.run("removing a node", |t, _| t.remove(name))
    }

    /// See [`Table::hold`].
    ///
    /// # Errors
    /// As above.
    pub fn hold(
        &self,
        token: &str,
        at: (&str, &str, Use),
        key: &str,
        goes: bool,
    ) -> Result<Holding> {
        self.run("holding the name of an image", |t, _| {
            Ok(t.hold(token, at, key, goes))
        })
    }

    /// See [`Table::free`].
    ///
    /// # Errors
    /// As above.
    pub fn free(&self, token: &str, at: (&str, &str, Use)) -> Result<()> {
        self.run("freeing the name of an image", |t, _| {
            t.free(token, at);
            Ok(())
        })
    }

    /// See [`Table::mount`].
    ///
    /// # Errors
    /// As there, and above.
    pub fn mount(&self, token: &str, domain: &str, image: &str, writes: bool) -> Result<()> {
        self.run("noting a mount", |t, _| {
            t.mount(token, domain, image, writes)
        })
    }

    /// See [`Table::unmount`].
    ///
    /// # Errors
    /// As above.
    pub fn unmount(&self, token: &str, domain: &str, image: &str) -> Result<()> {
        self.run("noting the end of a mount", |t, _| {
            t.unmount(token, domain, image);
            Ok(())
        })
    }

    /// See [`Table::mounts_at`].
    ///
    /// # Errors
    /// As above.
    pub fn mounts_at(&self, token: &str) -> Result<Vec<(String, String)>> {
        self.run("listing mounts", |t, _| Ok(t.mounts_at(token)))
    }

    /// Enters a job: what is to be done with each of its units. It goes on for `term` after it was last watched. Forgets jobs that
    /// nobody waits for any more.
    ///
    /// # Errors
    /// When there are too many, or it is too large; as above.
    pub fn begin_job(
        &self,
        id: &str,
        order: &[u8],
        items: &[Vec<u8>],
        term: Duration,
    ) -> Result<()> {
        of_table!(self.begin_job(id, order, items, term))
    }

    /// Takes a unit of work for the node with this token, which is `doing` some already, and does no more of the jobs that are `full`.
    ///
    /// # Errors
    /// When the node was taken for dead; as above.
    pub fn take_unit(
        &self,
        token: &str,
        doing: &[(String, i64)],
        full: &[String],
    ) -> Result<Option<TakenUnit>> {
        of_table!(self.take_unit(token, doing, full))
    }

    /// Tells how a unit stands that the node has taken, see [`Unit::say`](super::Unit::say), and what else is to be `said` of it. False if it is to stop: another
    /// node has it by now, or nobody waits for it.
    ///
    /// # Errors
    /// When the node was taken for dead; as above.
    pub fn say_unit(
        &self,
        token: &str,
        at: (&str, i64),
        state: UnitState,
        said: &[u8],
    ) -> Result<bool> {
        of_table!(self.say_unit(token, at, state, said))
    }

    /// How a job stands, which goes on for another term; none if it was given up.
    ///
    /// # Errors
    /// As above.
    pub fn watch_job(&self, id: &str) -> Result<Option<JobInfo>> {
        of_table!(self.watch_job(id))
    }

    /// Forgets a job: nodes stop what they do of it.
    ///
    /// # Errors
    /// As above.
    pub fn end_job(&self, id: &str) -> Result<()> {
        of_table!(self.end_job(id))
    }

    /// See [`Table::receiving`].
    ///
    /// # Errors
    /// As above.
    pub fn receiving(&self, domain: &str) -> Result<Vec<String>> {
        self.run("listing what is received", |t, _| Ok(t.receiving(domain)))
    }

    /// Waits until some node has changed a catalog of the site, at most for so long; also returns when the connection is lost.
    pub fn wait_for_change(&self, patience: Duration) {
        #[cfg(feature = "postgres")]
        self.table.wait_for_change(patience);
        #[cfg(not(feature = "postgres"))]
        {
            let _ = patience;
            match self.never {}
        }
    }
}
