//! A state of a disk.

use drover_core::ImageName;
use drover_image::Outgoing;
use drover_store::generations::Summary;
use drover_teleport::SendItem;

/// A disk as of one moment.
pub struct Held {
    /// As it is sent.
    pub item: SendItem,
    /// Its generations, the last of which is over.
    pub generations: Summary,
}

impl Held {
    /// To be sent as an image of this name.
    pub fn new(name: ImageName, image: Outgoing, generations: Summary) -> Self {
        Self {
            item: crate::source::disks::item(name, image),
            generations,
        }
    }
}
