//! What a leecher is sent of a program: applied or refused, never more absent than there is.

pub fn run(data: &[u8]) {
    drover_migrate::fuzzing::program_frames(data);
}
