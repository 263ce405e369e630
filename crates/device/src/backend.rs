//! Backends: devices that store bytes themselves.

pub mod chunk_store;
mod directory;
mod file;
mod image;
mod memory;
pub mod nbd;
pub mod overlay;

pub use chunk_store::StoreDevice;
pub use directory::{DirectoryDevice, DirectoryOptions, MAX_CHUNKS};
pub use file::FileDevice;
pub use image::ImageDevice;
pub use memory::MemoryDevice;
pub use nbd::NbdDevice;
pub use overlay::Overlay;
