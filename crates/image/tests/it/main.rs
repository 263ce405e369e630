//! Everything that `qemu-img` can make, read back and compared with what QEMU reads.

mod check;
mod others;
mod qcow2;
mod qemu;
