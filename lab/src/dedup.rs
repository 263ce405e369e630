//! *Dedup-separate* (`vmflock` §4.1.3, after Hirofuchi et al.): a deduplicating transfer to compare with, small and plain.
//!
//! An image is cut into blocks of a fixed size. The sender sends the digest of every block that is not zeros (20 bytes, as
//! SHA-1 has), the receiver says which it lacks, and these are sent, each compressed by zlib at its default level. The receiver
//! finds blocks in the image itself and in the images that it had when it started, so not in those that came since: each image
//! of a flock is sent for itself. Unlike in the paper, zeros cost nothing but a bit.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, BufReader, BufWriter, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use flate2::Compression;
use flate2::bufread::ZlibDecoder;
use flate2::write::ZlibEncoder;

use crate::limit::each_piece;

/// Bytes of a digest.
const DIGEST: usize = 20;
/// The longest name of an image.
const MAX_NAME: usize = 255;
/// The largest image, in blocks.
const MAX_BLOCKS: u64 = 1 << 28;
/// The largest compressed block: zlib adds little to what does not compress.
const MAX_PACKED: usize = 1 << 20;

type Digest = [u8; DIGEST];

fn digest(block: &[u8]) -> Digest {
    let mut digest = [0; DIGEST];
    digest.copy_from_slice(&blake3::hash(block).as_bytes()[..DIGEST]);
    digest
}

/// Where each block of the images of a directory is.
struct Index {
    files: Vec<File>,
    blocks: HashMap<Digest, (u32, u64)>,
}

impl Index {
    fn of(dir: &Path, block: usize) -> Result<Index> {
        let mut index = Index {
            files: Vec::new(),
            blocks: HashMap::new(),
        };
        for entry in std::fs::read_dir(dir)? {
            let file = File::open(entry?.path())?;
            let size = file.metadata()?.len();
            let nth = index.files.len() as u32;
            each_piece(&file, size, block, |at, piece| {
                if piece.len() == block {
                    index.blocks.entry(digest(piece)).or_insert((nth, at));
                }
                Ok(())
            })?;
            index.files.push(file);
        }
        Ok(index)
    }
}

/// Receives images into a directory until the process is killed.
///
/// # Errors
/// When the directory cannot be read, or the address cannot be used.
pub fn serve(address: &str, dir: &Path, block: usize) -> Result<()> {
    let index = Arc::new(Index::of(dir, block)?);
    let listener =
        TcpListener::bind(address).with_context(|| format!("cannot listen at {address}"))?;
    for stream in listener.incoming() {
        let (stream, index, dir) = (stream?, index.clone(), dir.to_owned());
        std::thread::spawn(move || {
            if let Err(error) = receive(stream, &index, &dir, block) {
                eprintln!("{error:#}");
            }
        });
    }
    Ok(())
}

/// Sends an image to a receiver with the same size of blocks, and waits until it is on its disk.
///
/// # Errors
/// When the image cannot be read, or the receiver fails.
pub fn send(image: &Path, address: &str, block: usize) -> Result<()> {
    let file = File::open(image).with_context(|| format!("cannot open {}", image.display()))?;
    let size = file.metadata()?.len();
    let name = image.file_name().unwrap_or_default().as_encoded_bytes();
    let stream = TcpStream::connect(address).with_context(|| format!("cannot reach {address}"))?;
    let (mut from, mut to) = (
        BufReader::new(&stream),
        BufWriter::with_capacity(1 << 18, &stream),
    );
    to.write_all(&(name.len() as u32).to_le_bytes())?;
    to.write_all(name)?;
    to.write_all(&size.to_le_bytes())?;
    let mut data = vec![0u8; bits_len(blocks_of(size, block)?)];
    let mut digests = Vec::new();
    each_piece(&file, size, block, |at, piece| {
        set(&mut data, at / block as u64);
        digests.push((at, digest(piece)));
        Ok(())
    })?;
    to.write_all(&data)?;
    for (_, digest) in &digests {
        to.write_all(digest)?;
    }
    to.flush()?;
    let mut wanted = vec![0u8; bits_len(digests.len() as u64)];
    from.read_exact(&mut wanted)?;
    let mut piece = vec![0; block];
    for (nth, (at, _)) in digests.iter().enumerate() {
        if !get(&wanted, nth as u64) {
            continue;
        }
        let length = ((size - at) as usize).min(block);
        file.read_exact_at(&mut piece[..length], *at)?;
        let mut packed = ZlibEncoder::new(Vec::new(), Compression::default());
        packed.write_all(&piece[..length])?;
        let packed = packed.finish()?;
        to.write_all(&(packed.len() as u32).to_le_bytes())?;
        to.write_all(&packed)?;
    }
    to.flush()?;
    let mut answer = [0; 2];
    from.read_exact(&mut answer)
        .context("the receiver failed")?;
    ensure!(&answer == b"ok", "the receiver failed");
    Ok(())
}

fn receive(stream: TcpStream, index: &Index, dir: &Path, block: usize) -> Result<()> {
    let (mut from, mut to) = (
        BufReader::with_capacity(1 << 18, &stream),
        BufWriter::new(&stream),
    );
    let length = read_u32(&mut from)? as usize;
    ensure!((1..=MAX_NAME).contains(&length), "a name of {length} bytes");
    let mut name = vec![0; length];
    from.read_exact(&mut name)?;
    let name = String::from_utf8(name)?;
    ensure!(
        !name.contains('/') && !name.starts_with('.'),
        "the name {name:?}"
    );
    let mut size = [0; 8];
    from.read_exact(&mut size)?;
    let size = u64::from_le_bytes(size);
    let blocks = blocks_of(size, block)?;
    let mut data = vec![0; bits_len(blocks)];
    from.read_exact(&mut data)?;
    // Where each block is, and for those that are new where it comes first.
    let places: Vec<u64> = (0..blocks).filter(|i| get(&data, *i)).collect();
    let mut digests = Vec::with_capacity(places.len());
    let mut own: HashMap<Digest, usize> = HashMap::new();
    let mut wanted = vec![0u8; bits_len(places.len() as u64)];
    for nth in 0..places.len() {
        let mut digest = [0; DIGEST];
        from.read_exact(&mut digest)?;
        if !index.blocks.contains_key(&digest) && !own.contains_key(&digest) {
            own.insert(digest, nth);
            set(&mut wanted, nth as u64);
        }
        digests.push(digest);
    }
    to.write_all(&wanted)?;
    to.flush()?;
    let part = dir.join(format!(".{name}.part"));
    let file = File::options()
        .read(true)
        .write(true)
        .create(true)
        .truncate(true)
        .open(&part)?;
    file.set_len(size)?;
    let mut piece = vec![0; block];
    for (nth, place) in places.iter().enumerate() {
        let at = place * block as u64;
        let length = ((size - at) as usize).min(block);
        let piece = &mut piece[..length];
        if get(&wanted, nth as u64) {
            let packed = read_u32(&mut from)? as usize;
            ensure!(packed <= MAX_PACKED, "a block of {packed} bytes");
            let mut bytes = vec![0; packed];
            from.read_exact(&mut bytes)?;
            ZlibDecoder::new(&bytes[..]).read_exact(piece)?;
        } else if let Some((of, there)) = index.blocks.get(&digests[nth]) {
            index.files[*of as usize].read_exact_at(piece, *there)?;
        } else {
            let first = own.get(&digests[nth]).context("a block that is nowhere")?;
            file.read_exact_at(piece, places[*first] * block as u64)?;
        }
        if digest(piece) != digests[nth] {
            bail!("{name}: block {place} is not what was announced");
        }
        file.write_all_at(piece, at)?;
    }
    file.sync_all()?;
    std::fs::rename(&part, dir.join(&name))?;
    to.write_all(b"ok")?;
    to.flush()?;
    Ok(())
}

fn blocks_of(size: u64, block: usize) -> Result<u64> {
    let blocks = size.div_ceil(block as u64);
    ensure!(blocks <= MAX_BLOCKS, "an image of {size} bytes");
    Ok(blocks)
}

fn read_u32(from: &mut impl Read) -> io::Result<u32> {
    let mut bytes = [0; 4];
    from.read_exact(&mut bytes)?;
    Ok(u32::from_le_bytes(bytes))
}

fn bits_len(bits: u64) -> usize {
    bits.div_ceil(8) as usize
}

fn set(bits: &mut [u8], nth: u64) {
    bits[(nth / 8) as usize] |= 1 << (nth % 8);
}

fn get(bits: &[u8], nth: u64) -> bool {
    bits[(nth / 8) as usize] & 1 << (nth % 8) != 0
}

/// `lab dedup`.
#[derive(clap::Subcommand)]
pub enum DedupArgs {
    /// Receive images into DIR.
    Serve {
        /// Where to listen.
        address: String,
        /// The directory.
        dir: PathBuf,
        /// Bytes of a block.
        block: usize,
    },
    /// Send an image.
    Send {
        /// Where the receiver listens.
        address: String,
        /// The image.
        image: PathBuf,
        /// Bytes of a block.
        block: usize,
    },
}

/// Runs an end.
///
/// # Errors
/// As [`serve`] and [`send`].
pub fn run(args: &DedupArgs) -> Result<()> {
    match args {
        DedupArgs::Serve {
            address,
            dir,
            block,
        } => serve(address, dir, *block),
        DedupArgs::Send {
            address,
            image,
            block,
        } => send(image, address, *block),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn images_arrive_and_what_is_there_does_not_cross() {
        let dir = tempfile::tempdir().unwrap();
        let far = dir.path().join("far");
        std::fs::create_dir(&far).unwrap();
        let random = |seed: u64, blocks: usize| {
            let mut bytes = vec![0; blocks * 4096];
            fastrand::Rng::with_seed(seed).fill(&mut bytes);
            bytes
        };
        std::fs::write(far.join("old.raw"), random(1, 100)).unwrap();
        let image = dir.path().join("new.raw");
        let parts = [
            random(1, 100),
            vec![0; 1 << 20],
            random(2, 50),
            random(2, 50),
            vec![7; 5],
        ];
        std::fs::write(&image, parts.concat()).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let index = Index::of(&far, 4096).unwrap();
        let to = far.clone();
        let receiver = std::thread::spawn(move || {
            let (stream, _) = listener.accept().unwrap();
            receive(stream, &index, &to, 4096)
        });
        send(&image, &address, 4096).unwrap();
        receiver.join().unwrap().unwrap();
        assert!(std::fs::read(&image).unwrap() == std::fs::read(far.join("new.raw")).unwrap());
    }
}
