//! Devices that wrap a device.

mod strict;

pub use strict::Strict;
