//! Discards overlays, and converts their errors to refusals.

use std::path::Path;

use drover_device::backend::overlay::{self, OverlayError};
use drover_net::{Code, Refusal};
use drover_storage::HostDirectory;

use crate::protocol::refusal_of;
use drover_store::lease::LeaseTable;

/// Converts an error of an overlay to a refusal.
pub fn refuse(e: OverlayError) -> Refusal {
    refusal_of(e.into())
}

/// Discards the overlay of a directory and starts a new edition, so that no cache of the old state is taken as valid.
pub fn discard(path: &Path, leases: &mut LeaseTable) -> Result<(), Refusal> {
    let failed =
        |e: std::io::Error| Refusal::new(Code::Io, format!("cannot open {}: {e}", path.display()));
    let directory = HostDirectory::open(path).map_err(failed)?;
    overlay::discard(&directory).map_err(refuse)?;
    finish_discarding(&directory, leases)
}

/// Completes a [`discard`] that a crash interrupted.
pub fn finish_discarding(
    directory: &HostDirectory,
    leases: &mut LeaseTable,
) -> Result<(), Refusal> {
    if overlay::was_discarded(directory).map_err(refuse)? {
        // Free the space first: on a full disk the lease could not be written.
        overlay::discard(directory).map_err(refuse)?;
        leases.renew()?;
        overlay::forget_discarded(directory).map_err(refuse)?;
    }
    Ok(())
}
