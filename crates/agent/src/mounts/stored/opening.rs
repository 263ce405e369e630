//! How a disk in a store is opened, or made.

use std::sync::Arc;

use drover_core::BlockDevice;
use drover_device::backend::StoreDevice;
use drover_device::backend::chunk_store::{
    NewStore, OpenError, StoreAddress, StoreOptions, create,
};
use drover_net::Code;

use crate::error::Error;

/// Why a disk was not opened.
pub enum Failed {
    /// Its store cannot be reached now.
    Away(String),
    /// Its store does not let it be opened now.
    Store(Error),
    /// Another reason, which stands until somebody changes something.
    Finally(Error),
}

impl From<Failed> for Error {
    fn from(failed: Failed) -> Error {
        match failed {
            Failed::Away(why) => Error::coded(Code::Unavailable, why),
            Failed::Store(error) | Failed::Finally(error) => error,
        }
    }
}

/// How a mount opens a disk.
pub struct Opening {
    /// Where it is.
    pub address: StoreAddress,
    /// Who opens it, and for what.
    pub options: StoreOptions,
    /// The mount's name.
    pub name: String,
    /// The size that it must have.
    pub size: Option<u64>,
    /// What is made if there is none; none as well if there was one when it was mounted here before.
    pub new: Option<NewStore>,
    /// It was mounted here before: then there is no other disk in its place, and none is made.
    pub was_here: bool,
}

impl Opening {
    /// Opens it.
    ///
    /// # Errors
    /// [`Failed`].
    pub fn open(&self) -> Result<StoreDevice, Failed> {
        let failed = |error| self.failed(error);
        let store = self.address.store().map_err(|e| failed(e.into()))?;
        let opened = match StoreDevice::open(Arc::clone(&store), &self.options) {
            Err(OpenError::Absent(_)) if let Some(new) = self.new => {
                create(&*store, new).map_err(failed)?;
                StoreDevice::open(store, &self.options)
            }
            opened => opened,
        };
        let device = opened.map_err(failed)?;
        match self.size {
            Some(size) if size != device.size() => {
                let error = Error::refused(format!(
                    "{} has {} bytes, not {size}; leave --size out to use it as it is",
                    self.address,
                    device.size(),
                ));
                if let Err(e) = device.close() {
                    tracing::warn!("{e}");
                }
                Err(Failed::Finally(error))
            }
            _ => Ok(device),
        }
    }

    /// The number and the size of the disk, found without its lease; none if only opening it tells more.
    pub fn look(&self) -> Option<([u8; 16], u64)> {
        let store = self.address.store().ok()?;
        let mut options = self.options.clone();
        options.read_only = true;
        let device = StoreDevice::open(store, &options).ok()?;
        Some((device.id(), device.size()))
    }

    /// The error when there is another disk than the one of the cache.
    pub fn is_another(&self) -> Error {
        Error::coded(
            Code::NotFound,
            format!(
                "another disk was made at {}, and the cache here is of the one before; {}",
                self.address,
                self.way_out()
            ),
        )
    }

    fn way_out(&self) -> String {
        format!(
            "`drover unmount {} --discard` forgets that one and removes its cache",
            self.name
        )
    }

    fn failed(&self, error: OpenError) -> Failed {
        if error.is_transient() {
            return Failed::Away(error.to_string());
        }
        Failed::Finally(match error {
            OpenError::Absent(_) if self.was_here => Error::coded(
                Code::NotFound,
                format!(
                    "{error}, but there was one when it was mounted here: its store has lost it, or somebody has deleted it; {}, and then --size makes a new one",
                    self.way_out()
                ),
            ),
            OpenError::Absent(_) => Error::refused(format!("{error}; --size SIZE makes one")),
            OpenError::Held { .. } => Error::refused(format!(
                "{error}; if that mount is gone for good, `drover mounts break '{}'` ends its lease",
                self.address
            )),
            OpenError::Store(error) => return Failed::Store(Error::from(error)),
            error => Error::refused(error.to_string()),
        })
    }
}
