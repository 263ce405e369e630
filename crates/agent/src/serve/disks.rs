//! Disks in stores that can no longer be used: whoever mounts them is told.

use std::sync::Arc;

use super::domains::Domain;
use crate::disks::{LostDisks, refusal_of_lost};

/// Ends the mounts of disks that are lost, until the site ends.
pub async fn refuse_lost(domain: Arc<Domain>, mut lost: LostDisks) {
    while let Some((name, why)) = lost.recv().await {
        tracing::error!(disk = %name, "{why}: it is served no more until the site is started again");
        let refusal = refusal_of_lost(&name, &domain.home.name());
        let domain = Arc::clone(&domain);
        // It waits for connections: another disk does not wait for that.
        tokio::spawn(async move { domain.devices.refuse_mounts(&name, &refusal).await });
    }
}
