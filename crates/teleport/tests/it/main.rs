//! Sites and senders in one process, over real sockets on loopback.

mod accidents;
mod crowd;
mod damage;
mod flock;
mod harness;
mod hostile;
mod lone_room;
mod lost_writes;
mod old_copies;
mod profile;
mod resume;
mod room;
mod send;
mod teleporter;
mod transfers;
