//! A real QEMU: alone, which takes a second, and with a guest that writes, which takes seconds (TCG).

mod real_aborts;
mod real_agent;
mod real_guest;
mod real_held;
mod real_qemu;
mod real_rounds;
mod real_spec;
mod util;
