//! A to-do list that is memory: a region whose pages are at a site, and which one machine after the other mounts.
//!
//! ```text
//! todo serve DIR ADDRESS      the site; the list is made if there is none
//! todo edit DIR ADDRESS       a machine: reads `list`, `add TEXT`, `done N`, `save` until the end of its input
//! ```
//!
//! DIR has the key that they share. The program reads and writes bytes in memory; nothing of it knows a network. Two machines
//! cannot have the list at a time: the second is refused until the first gives it back.

#[path = "far/mod.rs"]
mod far;

use std::path::Path;
use std::sync::Arc;

use drover_core::BlockDevice;
use drover_device::backend::FileDevice;
use drover_frontend::region::{Options, Region};
use drover_net::Identity;
use drover_store::lease::Access;
use far::{Failed, Mount, Named, Site, mib};

/// The list is of one page with the number of items, and then of items.
const HEAD: usize = 4096;
/// An item: whether it is done, the length of its text, its text.
const ITEM: usize = 256;
/// What has been done in ten years, and room for as much again.
const OLD: u32 = 50_000;
const MAX_ITEMS: usize = 2 * OLD as usize;

/// The list in memory, wherever that is from.
struct List<'a>(&'a mut [u8]);

impl List<'_> {
    fn count(&self) -> usize {
        let count = self
            .0
            .first_chunk()
            .map_or(0, |bytes| u32::from_le_bytes(*bytes));
        (count as usize).min(MAX_ITEMS)
    }

    fn item(&mut self, n: usize) -> &mut [u8] {
        &mut self.0[HEAD + n * ITEM..][..ITEM]
    }

    fn add(&mut self, text: &str) -> Result<usize, Failed> {
        let n = self.count();
        if n == MAX_ITEMS || text.len() > ITEM - 2 {
            return Err("there is no room for it".into());
        }
        let item = self.item(n);
        item.fill(0);
        item[1] = text.len() as u8;
        item[2..][..text.len()].copy_from_slice(text.as_bytes());
        self.0[..4].copy_from_slice(&(n as u32 + 1).to_le_bytes());
        Ok(n)
    }

    fn done(&mut self, which: &str) -> Result<(), Failed> {
        let n = which.parse().ok().filter(|n| *n < self.count());
        self.item(n.ok_or("there is no such item")?)[0] = 1;
        Ok(())
    }

    /// The last items.
    fn last(&mut self, most: usize) -> Vec<String> {
        let count = self.count();
        let mut show = |n: usize| {
            let item = self.item(n);
            let text = &item[2..][..usize::from(item[1]).min(ITEM - 2)];
            let mark = if item[0] == 1 { 'x' } else { ' ' };
            format!("[{mark}] {n} {}", String::from_utf8_lossy(text))
        };
        (count.saturating_sub(most)..count).map(&mut show).collect()
    }
}

fn serve(dir: &Path, address: &str) -> Result<(), Failed> {
    let (path, size) = (dir.join("list"), HEAD + MAX_ITEMS * ITEM);
    if !path.exists() {
        let mut bytes = vec![0; size];
        let mut list = List(&mut bytes);
        for n in 0..OLD {
            let n = list.add(&format!("something of long ago, number {n}"))?;
            list.done(&n.to_string())?;
        }
        std::fs::write(&path, bytes)?;
    }
    let runtime = tokio::runtime::Runtime::new()?;
    let identity = Identity::load_or_create(dir.join("key"))?;
    let device = FileDevice::new(std::fs::File::open(path)?, true)?;
    let named: Vec<Named> = vec![("list", Arc::new(device))];
    let _site = runtime.block_on(Site::serve(address, identity, named, &dir.join("state")))?;
    println!("ready");
    // Until it is killed: what was pushed is safe.
    runtime.block_on(std::future::pending())
}

fn edit(dir: &Path, address: &str) -> Result<(), Failed> {
    let runtime = tokio::runtime::Runtime::new()?;
    let identity = Identity::load_or_create(dir.join("key"))?;
    let address = address.to_owned();
    let site = Site { address, identity };
    let cache = tempfile::tempdir()?;
    let mount = Mount::open(
        runtime.handle(),
        &site,
        "list",
        Access::ReadWrite,
        cache.path(),
    )?;
    let options = Options {
        writable: true,
        // Single pages: the list is read here and there.
        prefetch: 0,
        ..Options::default()
    };
    let mut region = Region::new(Arc::clone(&mount.device), options)?;
    println!("ready");
    for line in std::io::stdin().lines() {
        let line = line?;
        let (command, rest) = line.split_once(' ').unwrap_or((&line, ""));
        let mut held = region.hold();
        let mut list = List(held.bytes_mut().ok_or("it cannot be written")?);
        let answer = match command {
            "add" => list.add(rest).map(|n| n.to_string()),
            "done" => list.done(rest).map(|()| "done".into()),
            "list" => Ok(list.last(5).join("\n")),
            // What was written is at the site, whatever becomes of this machine.
            "save" => {
                drop(held);
                region.push()?;
                mount.push()?;
                Ok("saved".into())
            }
            _ => Err("list, add TEXT, done N, save".into()),
        };
        println!("{}", answer.unwrap_or_else(|why| why.to_string()));
    }
    let pushed = region.push()?;
    drop(region);
    let (here, whole) = (mount.here(), mount.device.size());
    mount.close()?;
    println!(
        "fetched {:.2} of {:.1} MiB ({:.2} %), wrote {} KiB",
        mib(here),
        mib(whole),
        100.0 * here as f64 / whole as f64,
        pushed.bytes >> 10
    );
    Ok(())
}

fn main() -> Result<(), Failed> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments[..] {
        ["serve", dir, address] => serve(Path::new(dir), address),
        ["edit", dir, address] => edit(Path::new(dir), address),
        _ => Err("usage: todo serve DIR ADDRESS | edit DIR ADDRESS".into()),
    }
}
