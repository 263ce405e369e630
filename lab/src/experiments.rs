//! The experiments: each runs the real `drover` and its rivals, compares every delivered file with its original, and
//! returns rows.

mod boot;
mod chunks;
mod client;
mod compress;
mod duplicates;
mod flock;
mod frontends;
mod guest;
mod launch;
mod library;
pub mod lines;
mod link;
mod migrate;
mod model;
mod mount;
pub mod mover;
mod nodes;
mod pull;
mod push;
mod qmp;
mod region;
mod regions;
mod resume;
mod shows;
mod similar;
mod throughput;
mod tracking;
mod vault;

use crate::bench::Experiment;

/// Every experiment, in the order of the document.
pub const ALL: &[Experiment] = &[
    library::EXPERIMENT,
    similar::EXPERIMENT,
    flock::EXPERIMENT,
    nodes::EXPERIMENT,
    resume::EXPERIMENT,
    throughput::EXPERIMENT,
    compress::EXPERIMENT,
    mount::EXPERIMENT,
    pull::EXPERIMENT,
    push::EXPERIMENT,
    boot::EXPERIMENT,
    launch::EXPERIMENT,
    launch::io::EXPERIMENT,
    migrate::PAUSE,
    migrate::WHOLE,
    migrate::RETURN,
    regions::EXPERIMENT,
    frontends::EXPERIMENT,
    region::EXPERIMENT,
    tracking::EXPERIMENT,
    vault::EXPERIMENT,
    duplicates::EXPERIMENT,
    duplicates::availability::EXPERIMENT,
    chunks::EXPERIMENT,
    vault::speed::EXPERIMENT,
    vault::boot::EXPERIMENT,
    vault::deletion::EXPERIMENT,
    vault::summaries::EXPERIMENT,
    vault::faults::EXPERIMENT,
    link::EXPERIMENT,
];

/// What no experiment measures yet, for the end of the document.
pub const NOT_MEASURED: &[(&str, &str)] = &[
    (
        "library",
        "links other than 100 Mbit/s, 40 ms (17 of the matrix); desync, which is not in Debian",
    ),
    ("similar", "rivals; most links but 100 Mbit/s, 40 ms"),
    (
        "flock",
        "same-os and diff-os; most rivals at 16 Mbit/s or where there is a similar image; blocks of other sizes",
    ),
    (
        "resume",
        "1000 Mbit/s, 5 ms, and 20 Mbit/s, 150 ms with loss",
    ),
    (
        "mount",
        "the FUSE file and `--sync remote` at other round trips, rivals at 0 and 5 ms",
    ),
    ("launch", "several machines of a flock; KVM"),
    ("boot", "other links than 400 Mbit/s, 40 ms; KVM"),
    ("pause", "KVM; a guest with more than 96 MiB"),
    (
        "migrate",
        "other links than 100 Mbit/s, 40 ms; mirrors in write-blocking mode; KVM",
    ),
    ("return", "other links than 100 Mbit/s, 40 ms; KVM"),
    ("tracking", "anything: the experiment is new"),
    (
        "regions",
        "less than 1 GiB, links other than 100 Mbit/s, 100 MB/s written; a machine that does nothing else; memory that compresses",
    ),
    (
        "vault",
        "anything: the experiment is new; machines day by day (`corpus-*`); an object store",
    ),
    ("duplicates", "anything: the experiment is new"),
    ("availability", "anything: the experiment is new"),
    ("chunks", "anything: the experiment is new"),
    ("snapshot-boot", "anything: the experiment is new; KVM"),
    (
        "snapshot-speed",
        "anything: the experiment is new; an object store",
    ),
    (
        "deletion",
        "anything: the experiment is new; an object store",
    ),
    ("summaries", "anything: the experiment is new"),
    ("vault-faults", "anything: the experiment is new"),
];

#[cfg(test)]
mod stand_in;
#[cfg(test)]
mod tests;
