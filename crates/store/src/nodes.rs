//! The nodes of a site that share its catalog and the directory of its images (decision `0054`).
//!
//! - [`Table`]: what the database knows of them, and the rules by which that changes: no database, no clock.
//! - [`Unit`]: a part of what several nodes do together, and the rules by which they take it.
//! - [`Term`]: a node's own view of its term.
//! - [`Nodes`]: the table on a database server.
//!
//! Each start of a node is known by a *token*. Its files that are not complete are in a directory named by the token, and it
//! changes what nodes share only during its *term*, which the database grants and measures by its own clock. The node knows only
//! how long ago it asked, by a clock that nobody sets: its own view of the term ends earlier. When the term of a node is over,
//! another has the database refuse its changes from then on, then renames its directory, so that nothing it still does by
//! name has an effect; only after that the names it held are free.

mod server;
mod table;
mod term;
#[cfg(test)]
mod tests;
mod work;

pub use server::Nodes;
pub use table::{
    Held, Holding, Joining, MAX_HELD, MAX_MOUNTS, MAX_NODES, NodeInfo, NodeState, Row, Table, Use,
};
pub use term::{DEFAULT_TERM, MAX_TERM, MIN_TERM, Term, renew_every};
pub use work::{
    JOB_TERM, JobInfo, MAX_JOBS, MAX_ORDER_BYTES, MAX_SAID_BYTES, MAX_UNITS, TakenUnit, Unit,
    UnitInfo, UnitState,
};
