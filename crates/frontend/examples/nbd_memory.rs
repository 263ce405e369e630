//! Serves a memory device over NBD, to be compared with `nbdkit memory`.
//!
//! `nbd_memory unix:/path/of.sock 1073741824`, or `nbd_memory tcp:127.0.0.1:10809 1G`; until its input ends.

use std::io::Read;
use std::path::Path;
use std::sync::Arc;

use drover_device::backend::MemoryDevice;
use drover_frontend::nbd::{Export, Server, ServerOptions};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let usage = "usage: nbd_memory unix:PATH|tcp:ADDRESS:PORT BYTES[K|M|G]";
    let mut arguments = std::env::args().skip(1);
    let (Some(address), Some(size)) = (arguments.next(), arguments.next()) else {
        return Err(usage.into());
    };
    let export = Export {
        name: String::new(),
        description: "memory".into(),
        device: Arc::new(MemoryDevice::new(bytes(&size).ok_or(usage)?)),
        read_only: false,
    };
    let server = Server::new(vec![export], ServerOptions::default())?;
    let listening = if let Some(path) = address.strip_prefix("unix:") {
        server.listen_unix(Path::new(path))?
    } else if let Some(address) = address.strip_prefix("tcp:") {
        server.listen_tcp(address.parse()?)?
    } else {
        return Err(usage.into());
    };
    println!("{}", listening.local_addr());
    std::io::stdin().read_to_end(&mut Vec::new())?;
    let cut = listening.stop();
    println!("{:?}, {cut} connections cut off", server.counts());
    Ok(())
}

/// A number of bytes, or of KiB, MiB or GiB.
fn bytes(text: &str) -> Option<u64> {
    let (number, unit) = match text.strip_suffix(['K', 'M', 'G']) {
        Some(number) => (number, &text[number.len()..]),
        None => (text, ""),
    };
    let shift = match unit {
        "K" => 10,
        "M" => 20,
        "G" => 30,
        _ => 0,
    };
    number.parse::<u64>().ok()?.checked_shl(shift)
}
