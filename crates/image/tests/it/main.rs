//! Everything that `qemu-img` can make, read back and compared with what QEMU reads.

mod check;
mod hostile;
mod layouts;
mod others;
mod qcow2;
mod qemu;
