//! The real binary, driven as people and scripts drive it.

mod attach_guest;
mod basics;
mod changes;
mod damage;
mod full;
mod hostile;
mod missing;
mod mount;
mod mount_offline;
mod pairing;
mod send;
mod serve;
mod space;
mod transfers;
mod world;
