use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use drover_core::{Capabilities, Cost, DeviceError};
use drover_device::backend::MemoryDevice;
use drover_device::testing::Strict;

use super::abi::{Descriptor, Operation};
use super::workers::{Job, Mailbox, Workers};
use super::*;

/// The numbers that `linux/ublk_cmd.h` gives on x86-64 and arm64.
#[test]
fn commands_have_the_numbers_of_the_header() {
    assert_eq!(command::GET_DEV_INFO, 0x8020_7502);
    assert_eq!(command::ADD_DEV, 0xc020_7504);
    assert_eq!(command::DEL_DEV, 0xc020_7505);
    assert_eq!(command::START_DEV, 0xc020_7506);
    assert_eq!(command::STOP_DEV, 0xc020_7507);
    assert_eq!(command::SET_PARAMS, 0xc020_7508);
    assert_eq!(command::GET_FEATURES, 0x8020_7513);
    assert_eq!(command::FETCH_REQ, 0xc010_7520);
    assert_eq!(command::COMMIT_AND_FETCH_REQ, 0xc010_7521);
    assert_eq!(abi::descriptors_at(2), 2 * 4096 * 24);
    assert_eq!(abi::data_at(0, 0), 0x8000_0000);
    assert_eq!(abi::data_at(3, 5), 0x8000_0000 + (3 << 41) + (5 << 25));
}

#[test]
#[cfg(target_endian = "little")]
fn structures_have_the_bytes_of_the_header() {
    let bytes = abi::control_command(7, 0x1122_3344_5566_7788, 64, 9);
    #[rustfmt::skip]
    let expected = [
        7, 0, 0, 0, 0xff, 0xff, 64, 0,
        0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11,
        9, 0, 0, 0, 0, 0, 0, 0,
    ];
    assert_eq!(bytes[..24], expected);
    assert!(bytes[24..].iter().all(|b| *b == 0));
    assert_eq!(
        abi::io_command(2, 0x103, -5),
        [2, 0, 3, 1, 0xfb, 0xff, 0xff, 0xff, 0, 0, 0, 0, 0, 0, 0, 0]
    );

    let info = Info {
        queues: 4,
        depth: 64,
        longest: 1 << 20,
        device: abi::ANY_DEVICE,
        features: abi::FEATURE_IOCTL_ENCODE | abi::FEATURE_USER_COPY,
        token: 0x0102_0304_0506_0708,
    };
    let bytes = info.encode();
    assert_eq!(
        bytes[..16],
        [4, 0, 64, 0, 0, 0, 0, 0, 0, 0, 16, 0, 0xff, 0xff, 0xff, 0xff]
    );
    assert_eq!(
        bytes[24..40],
        [0xc0, 0, 0, 0, 0, 0, 0, 0, 8, 7, 6, 5, 4, 3, 2, 1]
    );
    assert_eq!(Info::decode(&bytes), Some(info));
    assert_eq!(Info::decode(&bytes[..63]), None);

    let params = Params {
        read_only: true,
        logical_block: 512,
        physical_block: 4096,
        preferred: 65536,
        longest: 1 << 20,
        size: 64 << 20,
        longest_discard: 1 << 30,
        longest_zeroes: 16 << 20,
    };
    #[rustfmt::skip]
    let expected = [
        112, 0, 0, 0, 3, 0, 0, 0, // length; basic and discard
        13, 0, 0, 0, 9, 12, 16, 12, // read-only, cache, FUA; shifts
        0, 8, 0, 0, 0, 0, 0, 0, // most sectors, no chunks
        0, 0, 2, 0, 0, 0, 0, 0, // sectors
        0, 0, 0, 0, 0, 0, 0, 0, // no boundary
        0, 0, 0, 0, 0, 16, 0, 0, // alignment and granularity
        0, 0, 32, 0, 0, 128, 0, 0, // most to discard, to zero
        1, 0, 0, 0, // one segment
    ];
    assert_eq!(params.encode()[..60], expected);
    assert!(params.encode()[60..].iter().all(|b| *b == 0));
}

fn raw_descriptor(flags: u32, sectors: u32, start: u64) -> [u8; Descriptor::SIZE] {
    let mut bytes = [0; Descriptor::SIZE];
    bytes[..4].copy_from_slice(&flags.to_ne_bytes());
    bytes[4..8].copy_from_slice(&sectors.to_ne_bytes());
    bytes[8..16].copy_from_slice(&start.to_ne_bytes());
    bytes
}

#[test]
fn descriptors_are_read() {
    let read = |flags, sectors, start| Descriptor::decode(&raw_descriptor(flags, sectors, start));
    let is = |operation, offset, length| {
        Some(Descriptor {
            operation,
            offset,
            length,
        })
    };
    // With flags that are nothing to us, as the kernel sets them for metadata.
    assert_eq!(read(1 << 11, 8, 3), is(Operation::Read, 1536, 4096));
    let write = |through| Operation::Write { through };
    assert_eq!(read(1, 1, 0), is(write(false), 0, 512));
    assert_eq!(read(1 | 1 << 13, 1, 0), is(write(true), 0, 512));
    // The kernel says "nowhere" for a flush.
    assert_eq!(read(2, 0, u64::MAX), is(Operation::Flush, 0, 0));
    let most = u64::from(u32::MAX) * 512;
    assert_eq!(read(3, u32::MAX, 1), is(Operation::Discard, 512, most));
    let zeroes = |keep_allocated| Operation::WriteZeroes { keep_allocated };
    assert_eq!(read(5, 2, 0), is(zeroes(false), 0, 1024));
    assert_eq!(read(5 | 1 << 15, 2, 0), is(zeroes(true), 0, 1024));
    assert_eq!(read(77, 2, 0), is(Operation::Unknown, 0, 1024));
    assert_eq!(read(0, 8, u64::MAX / 2), None);
}

/// The real target, with a sparse file in the place of the driver's node: data is at the same positions.
fn target(device: Arc<dyn BlockDevice>) -> (Target, File) {
    let file = tempfile::tempfile().unwrap();
    let target = Target {
        channel: file.try_clone().unwrap(),
        device,
        longest: 1 << 20,
    };
    (target, file)
}

#[test]
fn requests_reach_the_device_and_come_back() {
    let memory = Arc::new(MemoryDevice::new(1 << 20));
    let (target, channel) = target(memory.clone());
    let mut buffer = Vec::new();
    let mut perform = |operation, offset, length| {
        let descriptor = Descriptor {
            operation,
            offset,
            length,
        };
        target.perform(0, 2, &descriptor, &mut buffer)
    };
    let at = abi::data_at(0, 2);
    let through = Operation::Write { through: true };

    channel.write_all_at(&[7; 4096], at).unwrap();
    assert_eq!(perform(through, 8192, 4096), 4096);
    channel.write_all_at(&[0; 4096], at).unwrap();
    assert_eq!(perform(Operation::Read, 8192 + 512, 1024), 1024);
    let mut data = [0; 2048];
    channel.read_exact_at(&mut data, at).unwrap();
    assert_eq!(data, [[7; 1024], [0; 1024]].concat()[..]);

    let zeroes = Operation::WriteZeroes {
        keep_allocated: false,
    };
    assert_eq!(perform(zeroes, 8192, 512), 0);
    let mut data = [1; 1024];
    memory.read(8192, &mut data).unwrap();
    assert_eq!(data, [[0; 512], [7; 512]].concat()[..]);
    assert_eq!(perform(Operation::Discard, 0, 1 << 20), 0);
    assert_eq!(memory.allocated(), 0);
    assert_eq!(perform(Operation::Flush, 0, 0), 0);

    let number = |errno: Errno| -errno.raw_os_error();
    assert_eq!(perform(Operation::Unknown, 0, 0), number(Errno::OPNOTSUPP));
    assert_eq!(perform(Operation::Read, 1 << 20, 512), number(Errno::INVAL));
    // Longer than was agreed: refused before there is memory for it.
    let long = u64::from(u32::MAX) * 512;
    assert_eq!(perform(Operation::Read, 0, long), number(Errno::INVAL));
    assert_eq!(perform(through, 0, (1 << 20) + 512), number(Errno::INVAL));
}

#[test]
fn errors_keep_their_meaning() {
    let is = |error: DeviceError, errno: Errno| assert_eq!(super::request::errno(&error), errno);
    is(DeviceError::NoSpace("full".into()), Errno::NOSPC);
    is(DeviceError::ReadOnly, Errno::ROFS);
    is(
        DeviceError::Unsupported("zero fast".into()),
        Errno::OPNOTSUPP,
    );
    is(DeviceError::Unavailable("cut".into()), Errno::IO);
    is(DeviceError::Corrupt("chunk".into()), Errno::IO);
    is(DeviceError::Closed, Errno::IO);
}

#[test]
fn the_pool_answers_every_request_and_ends() {
    let (target, _channel) = target(Arc::new(MemoryDevice::new(1 << 20)));
    let target = Arc::new(target);
    let pool = Workers::new(target.clone(), 3);
    let mailbox = Arc::new(Mailbox::new().unwrap());
    for tag in 0..200 {
        pool.submit(Job {
            queue: 0,
            tag,
            descriptor: Descriptor {
                operation: Operation::Read,
                offset: u64::from(tag) * 512,
                length: 512,
            },
            mailbox: mailbox.clone(),
        });
    }
    // What is left over when the last handle goes is still done.
    drop(pool);
    let mut done = Vec::new();
    let end = Instant::now() + Duration::from_secs(60);
    while done.len() < 200 && Instant::now() < end {
        done.extend(mailbox.take());
        thread::sleep(Duration::from_millis(1));
    }
    done.sort_unstable();
    let expected: Vec<_> = (0..200).map(|tag| (tag, 512)).collect();
    assert_eq!(done, expected);
    let ended = || Arc::strong_count(&target) == 1;
    assert!(kernel::wait_until(DEADLINE, ended), "a thread stays");
}

#[test]
fn memory_is_served_on_the_spot_and_what_waits_is_not() {
    let memory = Arc::new(MemoryDevice::new(1 << 20));
    assert_eq!(memory.cost(0, 4096), Cost::Memory);
    let (target, _channel) = target(memory);
    let quick = |operation| {
        target.is_quick(&Descriptor {
            operation,
            offset: 0,
            length: 4096,
        })
    };
    assert!(quick(Operation::Read));
    assert!(quick(Operation::Write { through: false }));
    assert!(!quick(Operation::Write { through: true }));
    assert!(!quick(Operation::Flush));
    assert!(!quick(Operation::Discard));
}

#[test]
fn options_that_do_not_fit_are_refused_with_a_reason() {
    let refused = |options: Options, part: &str| {
        let message = options.check().unwrap_err().to_string();
        assert!(
            message.contains(part) && !message.contains('\n'),
            "{message}"
        );
    };
    let good = Options::default();
    assert!(good.check().is_ok());
    assert!((1..=4).contains(&good.queues));
    let with = |change: fn(&mut Options)| {
        let mut options = Options::default();
        change(&mut options);
        options
    };
    refused(with(|o| o.block_size = 8192), "512 to 4096");
    refused(with(|o| o.block_size = 1000), "power of two");
    refused(with(|o| o.queues = 0), "0 queues");
    refused(with(|o| o.queues = 17), "17 queues");
    refused(with(|o| o.depth = 1025), "depth 1025");
    refused(with(|o| o.workers = 257), "257 workers");
}

#[test]
fn the_kernel_gets_the_capabilities_of_the_device() {
    let memory = MemoryDevice::new(1 << 20);
    let can = memory.capabilities();
    let params = Options::default().params(&memory).unwrap();
    assert_eq!((params.size, params.logical_block), (1 << 20, 512));
    assert_eq!(params.longest_discard > 0, can.trim);
    assert!(params.longest <= can.longest && params.longest.is_multiple_of(4096));
    let read_only = Options {
        read_only: true,
        ..Options::default()
    };
    let params = read_only.params(&memory).unwrap();
    assert!(params.read_only);
    assert_eq!((params.longest_discard, params.longest_zeroes), (0, 0));

    let uneven = Options::default().params(&MemoryDevice::new(1000));
    let message = uneven.unwrap_err().to_string();
    assert!(message.contains("size 1000:"), "{message}");
    let strict = Strict::new(MemoryDevice::new(1 << 20), 65536, 1 << 20);
    let Capabilities { alignment, .. } = strict.capabilities();
    assert_eq!(alignment, 65536);
    let message = Options::default().params(&strict).unwrap_err().to_string();
    assert!(
        message.contains("alignment of the device, 65536"),
        "{message}"
    );
}

#[test]
fn only_whole_ublk_devices_are_taken() {
    assert_eq!(index_of(Path::new("/dev/ublkb12")).unwrap(), 12);
    for path in [
        "/dev/ublkb",
        "/dev/ublkc0",
        "/dev/ublkb0p1",
        "/dev/ublkb+1",
        "/dev/ublkb1048576",
    ] {
        let message = index_of(Path::new(path)).unwrap_err().to_string();
        assert!(message.contains(path), "{message}");
    }
}

#[test]
fn without_the_module_the_way_out_is_named() {
    if kernel::load_module("ublk_drv", is_present) {
        eprintln!("SKIP without_the_module_the_way_out_is_named: this kernel has ublk");
        return;
    }
    let device = Arc::new(MemoryDevice::new(1 << 20));
    let missing = attach(device, &Options::default()).err().unwrap();
    assert!(
        missing.to_string().contains("modprobe ublk_drv"),
        "{missing}"
    );
    let missing = detach_path(Path::new("/dev/ublkb0"), Detach::Force).unwrap_err();
    assert!(matches!(missing, Error::Missing { .. }), "{missing}");
}
