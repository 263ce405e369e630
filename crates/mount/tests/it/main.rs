//! Client and server of mounts against each other.

mod blocked;
mod claims;
mod direct;
mod early;
mod examples;
mod generations;
mod hostile;
mod killed;
mod lease;
mod local_stub;
mod managed;
mod nearby;
mod offline;
mod push;
mod real;
mod seal;
mod standby;
mod term;
mod unflushed;
mod util;
