//! Everything that `qemu-img` can create, compared with what QEMU reads from it.

mod attached;
mod check;
mod guest;
mod hostile;
mod layouts;
mod others;
mod qcow2;
mod qemu;
