//! What a mount is told of an overlay, and throwing one away.

use std::path::Path;

use drover_device::backend::overlay::{self, OverlayError};
use drover_net::{Code, Refusal};
use drover_storage::HostDirectory;

use crate::protocol::refusal_of;
use drover_store::lease::LeaseTable;

/// What a mount is told of an error of an overlay.
pub fn refuse(e: OverlayError) -> Refusal {
    refusal_of(e.into())
}

/// Discards the overlay of a directory, and counts a new edition, so that no cache is taken for it.
pub fn discard(path: &Path, leases: &mut LeaseTable) -> Result<(), Refusal> {
    let failed =
        |e: std::io::Error| Refusal::new(Code::Io, format!("cannot open {}: {e}", path.display()));
    let directory = HostDirectory::open(path).map_err(failed)?;
    overlay::discard(&directory).map_err(refuse)?;
    finish_discarding(&directory, leases)
}

/// Goes on where a crash left a [`discard`].
pub fn finish_discarding(
    directory: &HostDirectory,
    leases: &mut LeaseTable,
) -> Result<(), Refusal> {
    if overlay::was_discarded(directory).map_err(refuse)? {
        // The room comes first: a full disk takes no lease.
        overlay::discard(directory).map_err(refuse)?;
        leases.renew()?;
        overlay::forget_discarded(directory).map_err(refuse)?;
    }
    Ok(())
}
