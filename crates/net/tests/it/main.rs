//! Real connections, with honest and hostile peers.

mod ends;
mod frames;
mod hello;
mod local;
mod reach;
mod services;
mod time;
mod trust;
mod util;
