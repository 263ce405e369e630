//! Two ends of real connections, honest and hostile.

mod ends;
mod frames;
mod hello;
mod local;
mod reach;
mod services;
mod time;
mod trust;
mod util;
