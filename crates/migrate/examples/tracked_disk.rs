//! Serves a file over NBD, with or without its generations being recorded, to be compared by `lab bench --only tracking/*`.
//!
//! `tracked_disk plain SOCKET FILE`, or `tracked_disk recorded SOCKET FILE DIRECTORY`, with the map in the directory. Each line of input
//! begins a new generation, and is answered by a line; the end of input ends it.

use std::fs::File;
use std::io::{BufRead, stdin};
use std::path::Path;
use std::sync::Arc;

use drover_device::backend::FileDevice;
use drover_frontend::nbd::{Export, Server, ServerOptions};
use drover_storage::HostDirectory;
use drover_store::generations::{Contents, Generations, Recorded};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let usage = "usage: tracked_disk plain SOCKET FILE | recorded SOCKET FILE DIRECTORY";
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let (socket, file, map) = match arguments[..] {
        ["plain", socket, file] => (socket, file, None),
        ["recorded", socket, file, map] => (socket, file, Some(map)),
        _ => return Err(usage.into()),
    };
    let file = File::options().read(true).write(true).open(file)?;
    let size = file.metadata()?.len();
    // The same stage in both, which only forwards without generations.
    let device = Recorded::new(FileDevice::new(file, false)?);
    let generations = match map {
        None => None,
        Some(directory) => {
            let directory = Arc::new(HostDirectory::open(Path::new(directory))?);
            let contents = Contents::new(&[], 0, 0);
            let generations = Arc::new(Generations::open(directory, size, contents)?);
            generations.begin(contents)?;
            device.record(Arc::clone(&generations));
            Some(generations)
        }
    };
    let export = Export {
        name: String::new(),
        description: "a file".into(),
        device: Arc::new(device),
        read_only: false,
    };
    let server = Server::new(vec![export], ServerOptions::default())?;
    let listening = server.listen_unix(Path::new(socket))?;
    println!("{}", listening.local_addr());
    for line in stdin().lock().lines() {
        line?;
        if let Some(generations) = &generations {
            generations.track()?;
        }
        println!("ready");
    }
    listening.stop();
    Ok(())
}
