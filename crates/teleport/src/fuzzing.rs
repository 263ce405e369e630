//! Entry points into private parts for the fuzzers. Only built for them; checksums are not enforced.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use drover_core::{Digest, ImageName};
use drover_image::Layout;
use drover_net::PeerKey;
use drover_store::DataBits;

use crate::codec::Batch;
use crate::destination::Destination;
use crate::files::OrderedDigest;
use crate::log::{Log, RecordKind};
use crate::protocol::{BATCH_BLOCKS, Offer};
use crate::transfer::{Opening, Transfer, inspect};

/// Inspects and resumes arbitrary records as the log of a transfer in `dir`, after a valid front if there is a layout
/// for one.
pub fn transfer(dir: &Path, front: Option<&Layout>, records: &[(u8, &[u8])]) {
    let _ = std::fs::remove_dir_all(dir);
    std::fs::create_dir(dir).expect("a directory");
    let path = dir.join("log");
    let mut log = Log::create(&path, &disk()).expect("a log");
    if let Some(layout) = front {
        let opening = drover_net::encode(&opening(layout));
        log.append(RecordKind::Opening, &opening).expect("room");
        log.append(RecordKind::Layout, &layout.encode())
            .expect("room");
    }
    drop(log);
    let mut bytes = std::fs::read(&path).expect("the log");
    for (kind, payload) in records {
        bytes.extend((payload.len() as u32).to_le_bytes());
        bytes.extend([*kind, 0, 0, 0, 0, 0, 0, 0]);
        bytes.extend(*payload);
    }
    std::fs::write(&path, &bytes).expect("room");
    File::create(dir.join("image.part")).expect("room");
    let Ok(Some(left)) = inspect(dir) else {
        return;
    };
    // The checks that a site applies to an offer before it looks for its transfer.
    let offer = &left.opening.offer;
    if offer.walk_blocks != left.layout.walk_blocks()
        || offer.file_bytes != left.layout.file_len()
        || offer.file_bytes > 1 << 40
    {
        return;
    }
    let mut machine = Destination::new(offer.walk_blocks);
    let mut digest = OrderedDigest::new(&left.layout);
    let encoded = left.layout.encode();
    let resumed = Transfer::resume(
        dir,
        offer,
        &left.layout,
        &encoded,
        &disk(),
        |_, restored| {
            if let (None, Some(digest)) = (&restored.plan, &mut digest) {
                digest.batch(&left.layout, restored.batch.clone(), restored.full);
            }
            Ok(machine.restore(restored.batch, restored.missing)?)
        },
    );
    drop(resumed);
}

fn disk() -> Arc<dyn drover_storage::Disk> {
    Arc::new(drover_storage::HostDisk)
}

fn opening(layout: &Layout) -> Opening {
    Opening {
        peer: PeerKey([1; 32]),
        peer_name: "lyon".into(),
        offer: Offer {
            slot: 0,
            name: ImageName::new("a.raw").expect("a name"),
            format: "raw".into(),
            file_bytes: layout.file_len(),
            virtual_bytes: layout.file_len(),
            walk_blocks: layout.walk_blocks(),
            layout_bytes: 0,
            stamp: Digest([2; 32]),
            dry_run: false,
        },
        image: 1,
    }
}

/// Computes the file digest by a walk of any layout, with any blocks claimed to hold data.
pub fn file_digest(layout: &Layout, mut is_data: impl FnMut(u64) -> bool) {
    let blocks = layout.walk_blocks();
    let Some(mut digest) = OrderedDigest::new(layout) else {
        return;
    };
    for index in 0..blocks.div_ceil(BATCH_BLOCKS) {
        let first = index * BATCH_BLOCKS;
        let mut data = DataBits::new((blocks - first).min(BATCH_BLOCKS));
        for i in (0..data.blocks()).filter(|i| is_data(first + i)) {
            data.set(i);
        }
        let full = vec![Digest([3; 32]); data.count() as usize];
        let batch = Batch::new(index, data, vec![Default::default(); full.len()], &full);
        digest.batch(layout, Arc::new(batch), full);
    }
    let _ = digest.finish(layout);
}
