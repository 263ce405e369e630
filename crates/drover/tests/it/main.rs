//! Integration tests that run the real binary as people and scripts do.

mod attach_guest;
mod audit;
mod basics;
mod candidates;
mod changes;
mod damage;
mod database;
mod flock;
mod full;
mod hostile;
mod hostile_users;
mod launch;
mod migrate;
mod missing;
mod mount;
mod mount_offline;
mod moves;
mod pairing;
mod profile;
mod send;
mod serve;
mod space;
mod transfers;
mod upgrade;
mod vault;
mod world;
