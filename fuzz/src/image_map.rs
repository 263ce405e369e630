//! A damaged or forged map file, as it is and with only its block map forged.

use drover_image::Layout;
use drover_store::fuzzing;

pub fn run(data: &[u8]) {
    match data {
        [0, rest @ ..] => fuzzing::image_map(rest),
        [blocks, rest @ ..] => {
            let length = u64::from(*blocks) * 64 * 4096;
            fuzzing::block_map(&Layout::in_file_order(length, &[0..length]), rest);
        }
        [] => {}
    }
}
