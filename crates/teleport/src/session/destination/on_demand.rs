//! Blocks that a machine waits for, or a profile names: they come ahead of everything, on the control connection.

use drover_core::{BLOCK_SIZE, BlockIndex, Digest, is_zero};
use drover_index::digest_blocks;

use super::prepare::Prepared;
use crate::TeleportError;
use crate::codec::{Literal, Runs};
use crate::compress::Unpacker;
use crate::destination::{Event, Given};
use crate::files;
use crate::protocol::GIVEN_BLOCKS;
use crate::session::literals_in::note_digests;

/// What arrives on the control connection, with the buffers for it.
#[derive(Default)]
pub struct GivenReceiver {
    unpacker: Unpacker,
    blocks: Vec<u8>,
    digests: Vec<Digest>,
}

impl GivenReceiver {
    /// Handles the payload of one GIVEN; returns the events for the state machine.
    ///
    /// # Errors
    /// When it violates the protocol, a block is not the one that was announced, or a file cannot be written.
    pub fn take(
        &mut self,
        payload: &[u8],
        prepared: &mut Prepared,
    ) -> Result<Vec<Event>, TeleportError> {
        let literal = Literal::decode(payload)?;
        let image = prepared.incoming.clone();
        if literal.header.slot != image.slot {
            // Of an image that has ended.
            return Ok(Vec::new());
        }
        let runs = &literal.header.runs;
        if runs.count() > GIVEN_BLOCKS as u64 {
            let text = "more blocks at once than may be given";
            return Err(TeleportError::Protocol(text.into()));
        }
        let bytes = &mut self.blocks;
        bytes.resize(runs.count() as usize * BLOCK_SIZE, 0);
        let unpacked = self
            .unpacker
            .unpack(literal.header.packing, literal.packed, bytes);
        unpacked.map_err(|e| TeleportError::Protocol(e.to_string()))?;
        self.digests.clear();
        digest_blocks(bytes, &mut self.digests);
        let (mut data, mut zero, mut announced) = (Vec::new(), Vec::new(), Vec::new());
        let mut noted = Vec::new();
        let failed = |e| TeleportError::file("write", &image.part_path)(e);
        let blocks = runs.blocks().zip(bytes.chunks_exact(BLOCK_SIZE));
        for ((block, content), digest) in blocks.zip(&self.digests) {
            let at = BlockIndex(block);
            match prepared.machine.given(block) {
                Given::Useless => continue,
                Given::Literal => {
                    let wrong = note_digests(&image, std::iter::once(block), &[*digest])?;
                    if let Some(block) = wrong {
                        return Err(TeleportError::NotAnnounced(block));
                    }
                    announced.push(block);
                }
                Given::Ahead if is_zero(content) => {
                    noted.push((block, *digest));
                    zero.push(block);
                    // The file may have something else there, of an earlier image.
                    let spans = files::spans_of(&image.layout, &[(at, 1)]).into_iter();
                    let spans = spans.filter_map(|(at, len)| Some((at?, len)));
                    files::clear(&image.part, spans).map_err(failed)?;
                    continue;
                }
                Given::Ahead => {
                    noted.push((block, *digest));
                    data.push(block);
                }
            }
            files::write_walk(&image.part, &image.layout, at, content).map_err(failed)?;
        }
        // From now on the file has what no logged batch mentions.
        prepared.transfer.compare |= !noted.is_empty();
        prepared.transfer.log_ahead(&noted)?;
        let mut events = Vec::new();
        if !noted.is_empty() {
            prepared.transit.ahead(data.iter().chain(&zero).copied());
            let (data, zero) = (runs_of(data), runs_of(zero));
            events.push(Event::Ahead { data, zero });
        }
        if !announced.is_empty() {
            events.push(Event::Written(runs_of(announced)));
        }
        Ok(events)
    }
}

fn runs_of(blocks: Vec<u64>) -> Runs {
    blocks.into_iter().collect()
}
