//! The fuzz targets in one program, since linking one for each takes longer than running them. The environment variable
//! `FUZZ_TARGET` names the one to run.

#![no_main]

mod batch_decode;
mod calls;
mod chunk_log;
mod chunk_store;
mod control_messages;
mod directory_device;
mod flock_messages;
mod generations;
mod guest_look;
mod image_map;
mod image_open;
mod index_bits;
mod index_files;
mod known_files;
mod layout_decode;
mod literal_decode;
mod machine_spec;
mod match_event_decode;
mod mount_messages;
mod nbd;
mod nbd_replies;
mod need_decode;
mod net_frames;
mod overlay_files;
mod pending_journal;
mod plan_decode;
mod profile;
mod program_frames;
mod qmp_messages;
mod replica_calls;
mod roles;
mod transfer_log;
mod vault_objects;

use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;

type Target = fn(&[u8]);

const TARGETS: &[(&str, Target)] = &[
    ("batch_decode", batch_decode::run),
    ("calls", calls::run),
    ("chunk_log", chunk_log::run),
    ("chunk_store", chunk_store::run),
    ("control_messages", control_messages::run),
    ("directory_device", directory_device::run),
    ("flock_messages", flock_messages::run),
    ("generations", generations::run),
    ("guest_look", guest_look::run),
    ("image_map", image_map::run),
    ("image_open", image_open::run),
    ("index_bits", index_bits::run),
    ("index_files", index_files::run),
    ("known_files", known_files::run),
    ("layout_decode", layout_decode::run),
    ("literal_decode", literal_decode::run),
    ("machine_spec", machine_spec::run),
    ("match_event_decode", match_event_decode::run),
    ("mount_messages", mount_messages::run),
    ("nbd", nbd::run),
    ("nbd_replies", nbd_replies::run),
    ("need_decode", need_decode::run),
    ("net_frames", net_frames::run),
    ("overlay_files", overlay_files::run),
    ("pending_journal", pending_journal::run),
    ("plan_decode", plan_decode::run),
    ("profile", profile::run),
    ("program_frames", program_frames::run),
    ("qmp_messages", qmp_messages::run),
    ("replica_calls", replica_calls::run),
    ("roles", roles::run),
    ("transfer_log", transfer_log::run),
    ("vault_objects", vault_objects::run),
];

static TARGET: LazyLock<Target> = LazyLock::new(|| {
    let name = std::env::var("FUZZ_TARGET").unwrap_or_default();
    let target = TARGETS.iter().find(|(known, _)| *known == name);
    target
        .unwrap_or_else(|| panic!("FUZZ_TARGET: no target {name:?}"))
        .1
});

fuzz_target!(|data: &[u8]| TARGET(data));
