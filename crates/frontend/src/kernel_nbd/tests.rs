use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use drover_device::backend::MemoryDevice;

use super::netlink::{Answer, take_message};
use super::*;
use crate::nbd::Facts;
use crate::nbd::wire::transmission;
use crate::nbd::{Export, Server, ServerOptions};

fn message(kind: u16, sequence: u32, body: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    bytes.extend(u32::try_from(16 + body.len()).unwrap().to_ne_bytes());
    bytes.extend(kind.to_ne_bytes());
    bytes.extend([0; 2]);
    bytes.extend(sequence.to_ne_bytes());
    bytes.extend([0; 4]);
    bytes.extend(body);
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes
}

/// Written by hand from linux/netlink.h and linux/nbd-netlink.h.
#[test]
#[cfg(target_endian = "little")]
fn a_connect_request_is_the_bytes_that_the_kernel_expects() {
    let (one, other) = UnixStream::pair().unwrap();
    let sockets = [OwnedFd::from(one), OwnedFd::from(other)];
    let fd = |at: usize| u8::try_from(sockets[at].as_raw_fd()).unwrap();
    let options = Options {
        read_only: true,
        flags: transmission::SEND_FLUSH | transmission::CAN_MULTI_CONN,
        timeout: Some(Duration::from_millis(1500)),
        dead_conn_timeout: Some(Duration::from_secs(7)),
        identifier: Some("web".into()),
        ..Options::new(64 << 20)
    };
    let request = Request::new(0x1d, 5, COMMAND_CONNECT);
    let bytes = connect_request(request, Some(3), &sockets, &options).bytes();
    #[rustfmt::skip]
    let expected = [
        124, 0, 0, 0, 0x1d, 0, 5, 0, 5, 0, 0, 0, 0, 0, 0, 0, // length, family, request + ack, sequence, sender
        1, 1, 0, 0, // connect, version
        8, 0, 1, 0, 3, 0, 0, 0, // index
        12, 0, 2, 0, 0, 0, 0, 4, 0, 0, 0, 0, // size
        12, 0, 3, 0, 0, 2, 0, 0, 0, 0, 0, 0, // block size
        12, 0, 5, 0, 7, 1, 0, 0, 0, 0, 0, 0, // flags
        12, 0, 4, 0, 2, 0, 0, 0, 0, 0, 0, 0, // timeout, rounded up
        12, 0, 8, 0, 7, 0, 0, 0, 0, 0, 0, 0, // dead connection timeout
        8, 0, 10, 0, b'w', b'e', b'b', 0, // identifier
        28, 0, 7, 0x80, // sockets
        12, 0, 1, 0x80, 8, 0, 1, 0, fd(0), 0, 0, 0,
        12, 0, 1, 0x80, 8, 0, 1, 0, fd(1), 0, 0, 0,
    ];
    assert_eq!(bytes, expected);
}

#[test]
fn replies_are_distinguished() {
    let mut datagram = message(0x1d, 9, &[1, 1, 0, 0, 8, 0, 1, 0, 4, 0, 0, 0]);
    datagram.extend(message(2, 9, &(-16i32).to_ne_bytes()));
    let (answer, rest) = take_message(&datagram, 9).unwrap();
    let Answer::Data(attributes) = answer else {
        panic!("an answer is data");
    };
    assert_eq!(attributes.u32(INDEX), Some(4));
    assert_eq!(attributes.u32(SIZE_BYTES), None);
    let (answer, rest) = take_message(rest, 9).unwrap();
    assert!(matches!(answer, Answer::End(Err(Errno::BUSY))));
    assert!(take_message(rest, 9).is_none());
    // The answer to an earlier request that came too late is not this one's.
    assert!(matches!(
        take_message(&datagram, 8).unwrap().0,
        Answer::Other
    ));
}

#[test]
fn a_status_is_found_in_its_nest() {
    #[rustfmt::skip]
    let body = [
        5, 1, 0, 0,
        24, 0, 9, 0x80, // list
        20, 0, 1, 0x80, // item
        8, 0, 1, 0, 3, 0, 0, 0,
        5, 0, 2, 0, 1, 0, 0, 0,
    ];
    let datagram = message(0x1d, 1, &body);
    let (Answer::Data(attributes), _) = take_message(&datagram, 1).unwrap() else {
        panic!("an answer is data");
    };
    let item = attributes
        .nested(DEVICE_LIST)
        .unwrap()
        .nested(DEVICE_ITEM)
        .unwrap();
    assert_eq!(
        (item.u32(INDEX), item.u8(DEVICE_CONNECTED)),
        (Some(3), Some(1))
    );
}

/// Whatever bytes come, reading them ends and does not panic.
#[test]
fn rubbish_is_no_message() {
    let mut random = fastrand::Rng::with_seed(4);
    for _ in 0..20_000 {
        let mut bytes = vec![0; random.usize(..96)];
        random.fill(&mut bytes);
        if bytes.len() >= 4 && random.bool() {
            // A length that may fit, for what comes after it to be looked at.
            let length = random.u32(..96);
            bytes[..4].copy_from_slice(&length.to_ne_bytes());
        }
        let sequence = bytes
            .get(8..12)
            .map_or(0, |b| u32::from_ne_bytes(b.try_into().unwrap()));
        let mut rest = &bytes[..];
        let mut messages = 0;
        while let Some((answer, after)) = take_message(rest, sequence) {
            if let Answer::Data(attributes) = answer {
                let _ = attributes.nested(1).and_then(|nest| nest.u8(2));
            }
            assert!(after.len() < rest.len());
            rest = after;
            messages += 1;
        }
        assert!(messages <= 6, "a message has 16 bytes at least");
    }
}

/// The part of the codec that every Linux can check: the controller's own family, and one that does not exist.
#[test]
fn the_kernels_controller_understands_the_requests() {
    match Connection::open("nlctrl", DEADLINE) {
        Ok(mut connection) => {
            let id = connection
                .ask(3, |r| r.text(2, "nlctrl"), |a| a.u16(1))
                .unwrap();
            assert_eq!(id, Some(0x10));
            let name = connection
                .ask(
                    3,
                    |r| r.text(2, "nlctrl"),
                    |a| a.find(2).map(<[u8]>::to_vec),
                )
                .unwrap();
            assert_eq!(name.as_deref(), Some(&b"nlctrl\0"[..]));
            let error = Connection::open("drover-none", DEADLINE).err().unwrap();
            assert!(is_absent(&error), "{error}");
        }
        Err(error) => {
            eprintln!(
                "SKIP the_kernels_controller_understands_the_requests: no generic netlink: {error}"
            );
        }
    }
}

#[test]
fn options_that_do_not_fit_are_refused_with_a_reason() {
    let good = Options::new(1 << 20);
    assert!(good.check(1).is_ok());
    let several = Options {
        flags: transmission::CAN_MULTI_CONN,
        ..good.clone()
    };
    assert!(several.check(MAX_CONNECTIONS).is_ok());
    let refused = |options: &Options, sockets, part: &str| {
        let message = options.check(sockets).unwrap_err().to_string();
        assert!(
            message.contains(part) && !message.contains('\n'),
            "{message}"
        );
    };
    refused(&good, 0, "0 sockets");
    refused(&good, 2, "does not support multiple");
    refused(&several, MAX_CONNECTIONS + 1, "17 sockets");
    let with = |block_size, size| Options {
        block_size,
        size,
        ..good.clone()
    };
    refused(&with(1000, 1 << 20), 1, "a power of two");
    refused(&with(8192, 1 << 20), 1, "512 to 4096");
    refused(&with(512, 0), 1, "size 0:");
    refused(&with(4096, 5 * 512), 1, "multiple");
    let named = |name: &str| Options {
        identifier: Some(name.into()),
        ..good.clone()
    };
    refused(&named("a\0b"), 1, "without NUL");
    refused(&named(&"x".repeat(201)), 1, "201 bytes");
}

#[test]
fn only_whole_nbd_devices_are_taken() {
    assert_eq!(index_of(Path::new("/dev/nbd0")).unwrap(), 0);
    assert_eq!(index_of(Path::new("/dev/nbd15")).unwrap(), 15);
    for path in [
        "/dev/nbd",
        "/dev/nbd0p1",
        "/dev/nbd-1",
        "/dev/nbd+1",
        "/dev/sda",
        "nbd0",
        "/dev/nbd4294967295",
        "/dev/nbd99999999999",
    ] {
        let message = index_of(Path::new(path)).unwrap_err().to_string();
        assert!(message.contains(path), "{message}");
    }
}

#[test]
fn the_first_free_device_has_no_size_and_no_reader() {
    let block = tempfile::tempdir().unwrap();
    let add = |name: &str, size: &str, pid: bool| {
        let dir = block.path().join(name);
        fs::create_dir(&dir).unwrap();
        fs::write(dir.join("size"), size).unwrap();
        if pid {
            fs::write(dir.join("pid"), "7\n").unwrap();
        }
    };
    add("loop0", "0\n", false);
    add("nbd0", "2048\n", false);
    add("nbd1", "0\n", true);
    assert_eq!(first_free(block.path()), None);
    add("nbd10", "0\n", false);
    add("nbd2", "0\n", false);
    assert_eq!(first_free(block.path()), Some("/dev/nbd2".into()));

    add("nbd12", "8\n", true);
    fs::write(block.path().join("nbd12/backend"), "web\n").unwrap();
    let found = |index, identifier: Option<&str>| AttachedDevice {
        path: format!("/dev/nbd{index}").into(),
        identifier: identifier.map(str::to_owned),
    };
    let expected = [found(1, None), found(12, Some("web"))];
    assert_eq!(list_below(block.path()), expected);
    assert_eq!(list_below(Path::new("/nonexistent")), []);
}

#[test]
fn without_the_module_the_way_out_is_named() {
    let (socket, _server) = UnixStream::pair().unwrap();
    if kernel::load_module("nbd", is_present) {
        eprintln!("SKIP without_the_module_the_way_out_is_named: this kernel has nbd");
        return;
    }
    let missing = attach(vec![socket.into()], &Options::new(1 << 20))
        .err()
        .unwrap();
    assert!(matches!(missing, Error::Missing { .. }));
    assert!(missing.to_string().contains("modprobe nbd"), "{missing}");
    let path = Path::new("/dev/nbd0");
    let missing = detach_path(path, Detach::Force).unwrap_err();
    assert!(matches!(missing, Error::Missing { .. }), "{missing}");
}

#[test]
fn times_are_whole_seconds_and_never_none() {
    assert_eq!(seconds(Duration::ZERO), 1);
    assert_eq!(seconds(Duration::from_millis(1001)), 2);
    assert_eq!(seconds(Duration::from_secs(30)), 30);
}

#[test]
fn an_export_is_offered_to_the_kernel_as_the_server_says() {
    let export = |alignment, read_only| {
        let can = drover_core::BlockDevice::capabilities(&MemoryDevice::new(1 << 20));
        let can = drover_core::Capabilities { alignment, ..can };
        Options::of(&Facts::new(1 << 20, can, read_only).unwrap())
    };
    let options = export(1, false);
    assert_eq!((options.size, options.block_size), (1 << 20, 512));
    assert!(
        options.check(4).is_ok(),
        "its server takes several connections"
    );
    assert_eq!(options.transmission_flags() & 0b1111, 0b1101);
    let options = export(4096, true);
    assert_eq!(options.block_size, 4096);
    assert_eq!(options.transmission_flags() & 0b1111, 0b1111);
    // Larger than the kernel's blocks can be.
    let message = export(8192, false).check(1).unwrap_err().to_string();
    assert!(message.contains("8192"), "{message}");
}

#[test]
fn a_local_device_needs_an_export_that_is_there() {
    let export = Export {
        name: "web".into(),
        description: String::new(),
        device: Arc::new(MemoryDevice::new(1 << 20)),
        read_only: false,
    };
    let server = Server::new(vec![export], ServerOptions::default()).unwrap();
    let attach = |name| attach_local(&server, name, 1, |options| options).err();
    let message = attach("mail").unwrap().to_string();
    assert!(message.contains("\"mail\""), "{message}");
    if !kernel::load_module("nbd", is_present) {
        assert!(matches!(attach("web").unwrap(), Error::Missing { .. }));
        // The connections that were begun for it have ended.
        let none = || server.counts().open == 0;
        assert!(kernel::wait_until(DEADLINE, none));
    }
}
