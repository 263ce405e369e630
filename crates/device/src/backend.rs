//! Where a device's bytes live.

mod file;
mod memory;

pub use file::FileDevice;
pub use memory::MemoryDevice;
