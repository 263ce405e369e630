//! For every stage: which capabilities it forwards and which it masks on purpose, and that it forwards every request
//! unchanged.

use std::sync::Arc;
use std::time::Duration;

use drover_core::{BlockDevice, Capabilities, Cost, DeviceError, Zeroes};

use super::*;
use crate::testing::{Call, Cut, Delay, Errors, Probe, Rate, Strict};

const CHUNK: u32 = 4096;
const SIZE: u64 = 1 << 20;

struct Row {
    name: &'static str,
    make: fn(Arc<Probe>) -> Box<dyn BlockDevice>,
    /// What becomes of the capabilities below.
    capabilities: fn(Capabilities) -> Capabilities,
    /// What becomes of the cost below.
    cost: fn(Cost) -> Cost,
}

fn same(below: Capabilities) -> Capabilities {
    below
}

fn network(_: Cost) -> Cost {
    Cost::Network
}

fn inner(cost: Cost) -> Cost {
    cost
}

const LONG: Duration = Duration::from_secs(60);

/// Every stage that wraps one device.
fn rows() -> Vec<Row> {
    vec![
        Row {
            name: "strict",
            make: |probe| Box::new(Strict::new(probe, CHUNK, 1 << 20)),
            // Demands are only ever made harder.
            capabilities: |below| Capabilities {
                alignment: below.alignment.max(CHUNK),
                longest: below.longest.min(1 << 20),
                ..below
            },
            cost: inner,
        },
        Row {
            name: "chunked",
            make: |probe| Box::new(Chunked::new(probe, CHUNK)),
            // Takes any range of any length; chunks cost least.
            capabilities: |below| Capabilities {
                alignment: 1,
                longest: u32::MAX,
                preferred: below.preferred.max(CHUNK),
                ..below
            },
            cost: inner,
        },
        Row {
            name: "tracked",
            make: |probe| Box::new(Tracked::new(probe, CHUNK).0),
            capabilities: same,
            cost: inner,
        },
        Row {
            name: "arriving",
            make: |probe| Box::new(Arriving::new(probe, LONG).0),
            capabilities: same,
            cost: inner,
        },
        Row {
            name: "holding",
            make: |probe| Box::new(Holding::new(probe).0),
            capabilities: same,
            cost: inner,
        },
        Row {
            name: "lockable",
            make: |probe| Box::new(Lockable::new(probe, LONG).0),
            capabilities: same,
            cost: inner,
        },
        Row {
            name: "profiled",
            make: |probe| {
                let (stage, handle) = Profiled::new(probe);
                assert!(handle.start());
                Box::new(stage)
            },
            capabilities: same,
            cost: inner,
        },
        Row {
            name: "delay",
            make: |probe| Box::new(Delay::new(probe, Duration::ZERO, Duration::ZERO)),
            capabilities: same,
            // It stands for a link, which is worth a thread.
            cost: network,
        },
        Row {
            name: "rate",
            make: |probe| Box::new(Rate::new(probe, u64::MAX, 0)),
            capabilities: same,
            cost: network,
        },
        Row {
            name: "cut",
            make: |probe| Box::new(Cut::new(probe, LONG).0),
            capabilities: same,
            cost: network,
        },
        Row {
            name: "errors",
            make: |probe| Box::new(Errors::new(probe, 1, vec![]).0),
            capabilities: same,
            cost: inner,
        },
    ]
}

/// Devices that have each capability and lack it.
fn abilities() -> Vec<Capabilities> {
    let all = Probe::able(0).capabilities();
    // A capability that is new is tested, too: this does not compile until it is.
    let Capabilities {
        read_only,
        fast_zeroes,
        trim,
        durable,
        extents,
        alignment: _,
        preferred: _,
        longest: _,
    } = all;
    assert!(!read_only && fast_zeroes && trim && durable && extents);
    vec![
        all,
        Capabilities {
            read_only: true,
            ..all
        },
        Capabilities {
            fast_zeroes: false,
            ..all
        },
        Capabilities { trim: false, ..all },
        Capabilities {
            durable: false,
            ..all
        },
        Capabilities {
            extents: false,
            ..all
        },
        Capabilities {
            alignment: 512,
            ..all
        },
        Capabilities {
            preferred: 512,
            ..all
        },
        Capabilities {
            preferred: 1 << 20,
            ..all
        },
        Capabilities {
            longest: 64 << 10,
            ..all
        },
    ]
}

#[test]
fn every_stage_forwards_or_masks_each_capability() {
    for row in rows() {
        for below in abilities() {
            for cost in [Cost::Memory, Cost::Disk, Cost::Network] {
                let probe = Arc::new(Probe::new(SIZE, below, cost));
                let stage = (row.make)(probe);
                let expected = (row.capabilities)(below);
                assert_eq!(stage.capabilities(), expected, "{} on {below:?}", row.name);
                assert_eq!(stage.cost(0, 4096), (row.cost)(cost), "{}", row.name);
                assert_eq!(stage.write_cost(0, 4096), (row.cost)(cost), "{}", row.name);
                assert_eq!(stage.size(), SIZE, "{}", row.name);
            }
        }
    }
}

#[test]
fn every_stage_forwards_every_request_as_it_came() {
    for row in rows() {
        let probe = Arc::new(Probe::able(SIZE));
        let stage = (row.make)(Arc::clone(&probe));
        // Whole chunks: other ranges are tested with chunked itself.
        let (at, length) = (8192, 16384);
        let mut calls = Vec::new();
        for keep_allocated in [false, true] {
            for only_fast in [false, true] {
                let zeroes = Zeroes {
                    keep_allocated,
                    only_fast,
                };
                stage.write_zeroes(at, length, zeroes).unwrap();
                calls.push(Call::Zero(at, length, zeroes));
            }
        }
        let data: Vec<u8> = (0..length).map(|n| n as u8).collect();
        stage.write(at, &data).unwrap();
        let mut back = vec![0; length as usize];
        stage.read(at, &mut back).unwrap();
        assert!(back == data, "{}", row.name);
        let runs = stage.extents(at, length).unwrap();
        assert_eq!(runs, probe.extents(at, length).unwrap(), "{}", row.name);
        stage.prefetch(at, length).unwrap();
        let _ = stage.cost(at, length);
        let _ = stage.write_cost(at, length);
        stage.trim(at, length).unwrap();
        stage.flush().unwrap();
        calls.extend([
            Call::Write(at, length),
            Call::Read(at, length),
            // Once through the stage, once to compare.
            Call::Extents(at, length),
            Call::Extents(at, length),
            Call::Prefetch(at, length),
            Call::Cost(at, length),
            Call::WriteCost(at, length),
            Call::Trim(at, length),
            Call::Flush,
        ]);
        assert_eq!(probe.calls(), calls, "{}", row.name);
    }
}

#[test]
fn every_stage_says_that_a_device_takes_no_writes() {
    let read_only = Capabilities {
        read_only: true,
        ..Probe::able(0).capabilities()
    };
    for row in rows() {
        let stage = (row.make)(Arc::new(Probe::new(SIZE, read_only, Cost::Disk)));
        for result in [
            stage.write(0, &[1; 4096]),
            stage.write_zeroes(0, 4096, Zeroes::default()),
            stage.trim(0, 4096),
        ] {
            assert!(
                matches!(result, Err(DeviceError::ReadOnly)),
                "{}: {result:?}",
                row.name
            );
        }
        stage.read(0, &mut [0; 4096]).unwrap();
        stage.flush().unwrap();
    }
}
