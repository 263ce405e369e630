//! A mount that is about to stand by.

use std::sync::Arc;

use drover_net::PeerKey;
use drover_store::lease::MountId;
use tokio::runtime::Handle;

use super::image::Image;

/// A mount that was admitted to stand by. Unless it joins, it does so no more when this is dropped: its connection was refused,
/// or has ended meanwhile.
pub(super) struct Standing(Option<(Arc<Image>, (PeerKey, MountId), u64)>);

impl Standing {
    pub(super) fn new(image: &Arc<Image>, key: (PeerKey, MountId), link: u64) -> Self {
        Self(Some((Arc::clone(image), key, link)))
    }

    pub(super) fn joined(mut self) {
        self.0 = None;
    }
}

impl Drop for Standing {
    fn drop(&mut self) {
        let runtime = Handle::try_current();
        if let (Some((image, (peer, mount), link)), Ok(runtime)) = (self.0.take(), runtime) {
            // The leases may be locked for long.
            runtime.spawn_blocking(move || image.end_standby(peer, mount, link));
        }
    }
}
