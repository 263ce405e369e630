//! Days of machines: each is kept as the blocks that it changed, so that many versions take little space.
//!
//! A day of a Debian machine: its packages are upgraded, some are added or installed anew, files are rewritten, logs and a
//! database grow, both are dumped, something is uploaded. What a day changes is not the same in every run: file systems
//! and databases write when they want to.

use std::fs::{self, File};
use std::io::{BufReader, BufWriter, Read, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use drover_core::BLOCK_SIZE;
use fastrand::Rng;

use super::cache::{Cache, Manifest};
use super::table::{Fs, Recipe, Spec, Table};
use super::{aged, debian, filesystem};
use crate::limit::each_piece;
use crate::shell;

/// What is installed on each day.
const ADDED: [&str; 4] = [
    "vim tmux htop curl rsync",
    "linux-image-cloud-amd64",
    "git python3",
    "strace tcpdump nmap",
];
/// Days that there can be after the first version.
pub const MAX_DAYS: usize = ADDED.len();
/// One package in so many is installed anew on a day.
const AGAIN: usize = 40;
const LOG_BYTES: usize = 8 << 20;
const UPLOAD_BYTES: usize = 6 << 20;
/// An upload is deleted after so many days.
const UPLOAD_DAYS: usize = 2;
const DAY: Duration = Duration::from_secs(86_400);
/// What a disk grows to on the first day: kernels need room.
const DISK_BYTES: u64 = 4 << 30;
/// Logs and settings as one archive, written anew.
const DUMP: &str = "tar -czf /var/backups/daily.tar.gz -C / etc var/log var/lib/dpkg/status";

/// The days of a machine of the library, as files for [`apply`], in order; those that are missing are made.
///
/// # Errors
/// When the image is not built, without root, when packages cannot be fetched, or when the disk is full.
pub fn days(dir: &Path, name: &str, count: usize) -> Result<Vec<PathBuf>> {
    let table = Table::load(None)?;
    let spec = table
        .find(name)
        .with_context(|| format!("no image {name}"))?;
    let manifest = Manifest::read(dir, name)?
        .with_context(|| format!("{name} is not built: lab library --only {name}"))?;
    let kept = dir.join("days");
    fs::create_dir_all(&kept)?;
    // Days are those of this very image.
    let of = manifest.digest.get(..12).unwrap_or_default();
    let days: Vec<PathBuf> = (1..=count.min(MAX_DAYS))
        .map(|day| kept.join(format!("{name}-{of}.{day}")))
        .collect();
    if days.iter().all(|day| day.is_file()) {
        return Ok(days);
    }
    let cache = Cache::open(dir)?;
    let images = cache.dir.join("images");
    // Removed with the next build, if this one is killed.
    let image = images.join(format!("{name}.day.part"));
    shell::run(
        Command::new("cp")
            .arg("--sparse=always")
            .arg(images.join(spec.file_name()))
            .arg(&image),
    )?;
    for (number, path) in (1..).zip(&days) {
        if path.is_file() {
            apply(path, &image)?;
            continue;
        }
        let before = digests(&image)?;
        let root = table.root(spec);
        age(&cache, spec, root, &image, number).with_context(|| format!("{name}, day {number}"))?;
        let changed = write_changes(&image, &before, path)?;
        eprintln!(
            "  {name}, day {number}: {:.1} MB changed",
            (changed * BLOCK_SIZE) as f64 / 1e6
        );
    }
    fs::remove_file(image)?;
    Ok(days)
}

fn age(cache: &Cache, spec: &Spec, root: &Spec, image: &Path, day: usize) -> Result<()> {
    let Recipe::Debian { suite, .. } = &root.recipe else {
        bail!("it is no Debian system");
    };
    let time = filesystem::time_of(&root.name) + DAY * day as u32;
    let seed = blake3::hash(format!("{} {day}", spec.name).as_bytes());
    let mut rng = Rng::with_seed(u64::from_le_bytes(seed.as_bytes()[..8].try_into()?));
    if day == 1 {
        grow(image, spec.fs)?;
    }
    let mounted = filesystem::Mounted::new(image, cache.work.join("mnt"), spec.fs, false)?;
    let (at, debs) = (mounted.at.as_path(), cache.packages(suite)?);
    // Of a package that the mirror has no more, apt says so and goes on.
    let again = format!(
        "apt-get -q -y -o Dpkg::Options::=--force-confold -o Dpkg::Options::=--force-unsafe-io --reinstall install \
         $(dpkg-query -W -f '${{Package}}\\n' | grep -v ^linux-image | awk 'NR % {AGAIN} == {day}')"
    );
    aged::upgrade(at, &debs, suite, ADDED[day - 1], &again)?;
    aged::churn(at, time, day)?;
    aged::grow_logs(&at.join("var/log"), LOG_BYTES, time, &mut rng)?;
    aged::run_database(at, &debs, day - 1, true)?;
    let upload = |day: usize| at.join(format!("srv/upload-{day}"));
    if let Some(old) = day.checked_sub(UPLOAD_DAYS).filter(|day| *day > 0) {
        fs::remove_file(upload(old))?;
    }
    let mut bytes = vec![0; UPLOAD_BYTES];
    rng.fill(&mut bytes);
    fs::write(upload(day), bytes)?;
    debian::inside(at, &debs, DUMP).context("dumping")?;
    mounted.close()
}

/// Makes a disk and its file system larger.
fn grow(image: &Path, fs: Fs) -> Result<()> {
    if fs != Fs::Ext4 {
        bail!("a machine with another file system than ext4 has no days");
    }
    let file = File::options().write(true).open(image)?;
    if file.metadata()?.len() < DISK_BYTES {
        file.set_len(DISK_BYTES)?;
        shell::run(Command::new("e2fsck").args(["-f", "-p"]).arg(image))?;
        shell::run(Command::new("resize2fs").arg(image))?;
    }
    Ok(())
}

/// The first halves of the digests of an image's blocks; zeros for zeros.
fn digests(image: &Path) -> Result<Vec<[u8; 16]>> {
    let file = File::open(image)?;
    let size = file.metadata()?.len();
    let mut digests = vec![[0; 16]; size.div_ceil(BLOCK_SIZE as u64) as usize];
    each_piece(&file, size, BLOCK_SIZE, |at, block| {
        let half = &mut digests[(at / BLOCK_SIZE as u64) as usize];
        half.copy_from_slice(&blake3::hash(block).as_bytes()[..16]);
        Ok(())
    })?;
    Ok(digests)
}

/// Writes the length of an image, and the blocks that differ from `before`, each after its number; how many.
fn write_changes(image: &Path, before: &[[u8; 16]], out: &Path) -> Result<usize> {
    let part = out.with_extension("part");
    let writer = BufWriter::new(File::create(&part)?);
    let mut writer = zstd::stream::Encoder::new(writer, 1)?;
    let file = File::open(image)?;
    writer.write_all(&file.metadata()?.len().to_le_bytes())?;
    let mut changed = 0;
    let mut block = [0; BLOCK_SIZE];
    for (number, new) in (0u64..).zip(&digests(image)?) {
        if before.get(number as usize).unwrap_or(&[0; 16]) != new {
            file.read_exact_at(&mut block, number * BLOCK_SIZE as u64)?;
            writer.write_all(&number.to_le_bytes())?;
            writer.write_all(&block)?;
            changed += 1;
        }
    }
    writer
        .finish()?
        .into_inner()
        .map_err(std::io::IntoInnerError::into_error)?
        .sync_all()?;
    fs::rename(part, out)?;
    Ok(changed)
}

/// Turns an image as of the day before into that of a day.
///
/// # Errors
/// When a file cannot be read or written.
pub fn apply(day: &Path, image: &Path) -> Result<()> {
    let reader = File::open(day).with_context(|| format!("cannot open {}", day.display()))?;
    let mut reader = BufReader::new(zstd::stream::Decoder::new(reader)?);
    let file = File::options().write(true).open(image)?;
    let mut len = [0; 8];
    reader.read_exact(&mut len)?;
    file.set_len(u64::from_le_bytes(len))?;
    let mut record = [0; 8 + BLOCK_SIZE];
    loop {
        // The end is between two blocks.
        if reader.read(&mut record[..1])? == 0 {
            return Ok(());
        }
        reader
            .read_exact(&mut record[1..])
            .with_context(|| format!("{} is cut off", day.display()))?;
        let (number, block) = record.split_at(8);
        let number = u64::from_le_bytes(number.try_into()?);
        file.write_all_at(block, number * BLOCK_SIZE as u64)?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_day_makes_the_next_version() {
        let dir = tempfile::tempdir().unwrap();
        let (old, new, day) = (
            dir.path().join("old"),
            dir.path().join("new"),
            dir.path().join("disk.1"),
        );
        let mut content = vec![0; 40 * BLOCK_SIZE];
        Rng::with_seed(1).fill(&mut content[..20 * BLOCK_SIZE]);
        fs::write(&old, &content).unwrap();
        content.extend([0; 5 * BLOCK_SIZE]);
        // One block is written, one is zeroed, two that were zero, or not there, get content.
        for (block, byte) in [(3, 7), (9, 0), (33, 1), (42, 5)] {
            content[block * BLOCK_SIZE..(block + 1) * BLOCK_SIZE].fill(byte);
        }
        fs::write(&new, &content).unwrap();
        let before = digests(&old).unwrap();
        assert_eq!(write_changes(&new, &before, &day).unwrap(), 4);
        apply(&day, &old).unwrap();
        assert!(fs::read(&old).unwrap() == content);
        assert_eq!(
            write_changes(&new, &digests(&old).unwrap(), &day).unwrap(),
            0
        );
    }
}
