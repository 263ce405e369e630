//! How a program learns that a device is ready (r3map §1.4.4.4 and §1.5.3): netlink's answer, polling after the
//! ioctls, and the kernel's own event, which is what udev begins its work with.
//!
//! ```text
//! readiness ROUNDS
//! ```

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use drover_device::backend::MemoryDevice;
use drover_frontend::kernel_nbd::{Detach, Interface, attach_local};
use drover_frontend::nbd::{Export, Server, ServerOptions};
use drover_frontend::ublk;
use rustix::net::{self, AddressFamily, RecvFlags, SocketFlags, SocketType, netlink};

type Failure = Box<dyn std::error::Error>;

fn main() -> Result<(), Failure> {
    let rounds = std::env::args().nth(1).map_or(Ok(20), |n| n.parse())?;
    let events = events()?;
    let device = Arc::new(MemoryDevice::new(16 << 20));
    let export = Export {
        name: String::new(),
        description: String::new(),
        device: device.clone(),
        read_only: false,
    };
    let server = Server::new(vec![export], ServerOptions::default())?;
    for (name, interface) in [
        ("netlink", Interface::Netlink),
        ("ioctl-and-polling", Interface::Ioctl),
    ] {
        let mut attached = Vec::new();
        let mut times = Vec::new();
        for _ in 0..rounds {
            while events.try_recv().is_ok() {}
            let begin = Instant::now();
            let mut local = attach_local(&server, "", 1, |mut options| {
                options.interface = interface;
                options
            })?;
            attached.push(begin.elapsed());
            let event = events.recv_timeout(Duration::from_secs(5))?;
            times.push(event.saturating_duration_since(begin));
            local.detach(Detach::IfUnused)?;
        }
        say(&format!("nbd by {name}: attached"), attached);
        say(&format!("nbd by {name}: event"), times);
    }
    let mut attached = Vec::new();
    for _ in 0..rounds {
        let begin = Instant::now();
        let mut served = ublk::attach(device.clone(), &ublk::Options::default())?;
        attached.push(begin.elapsed());
        served.detach(Detach::IfUnused)?;
    }
    say("ublk: attached", attached);
    Ok(())
}

fn say(what: &str, mut times: Vec<Duration>) {
    times.sort_unstable();
    let at = |part: usize| times.get(times.len() * part / 10).map(Duration::as_micros);
    println!(
        "figure ready {what}: p50 {} us, p90 {} us",
        at(5).unwrap_or(0),
        at(9).unwrap_or(0)
    );
}

/// The times at which the kernel announces that an NBD device has changed.
fn events() -> Result<Receiver<Instant>, Failure> {
    let socket: OwnedFd = net::socket_with(
        AddressFamily::NETLINK,
        SocketType::RAW,
        SocketFlags::CLOEXEC,
        Some(netlink::KOBJECT_UEVENT),
    )?;
    net::bind(&socket, &netlink::SocketAddrNetlink::new(0, 1))?;
    let (sender, receiver) = channel();
    std::thread::spawn(move || {
        let mut buffer = [0; 8192];
        while let Ok((_, length)) = net::recv(&socket, &mut buffer[..], RecvFlags::empty()) {
            let text = String::from_utf8_lossy(&buffer[..length]);
            let changed = text.starts_with("change@") && text.contains("/block/nbd");
            if changed && sender.send(Instant::now()).is_err() {
                break;
            }
        }
    });
    Ok(receiver)
}
