//! What is noted in the qcow2 file of a disk: which state of the disk it has, and since when QEMU records what it writes.

use std::ffi::OsStr;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use drover_image::Stamp;
use drover_mount::server::keep_on_disk;
use drover_net::{Code, DEFAULT_DOMAIN};
use drover_storage::HostDirectory;
use drover_store::generations::{
    self, GenerationsError, InFileError, Summary, new_of_file, of_file, remove_from_file,
    write_in_file,
};
use drover_store::{Catalog, ImageRecord, changes};
use tokio::sync::Mutex;

use crate::error::{Context, Error, Result, bail};
use crate::home::Home;
use crate::mounts::{is_read_by, refuse_written};
use crate::site;

/// How often a hypervisor that is about to end is looked at.
const HYPERVISOR_POLL: Duration = Duration::from_millis(20);

/// Held while a file is changed, or looked for among those of all images: the lock that keeps hypervisors out of a file ends when
/// this process closes it anywhere, as it does with each that it looks into.
static ALONE: Mutex<()> = Mutex::const_new(());

/// Notes in the qcow2 file of a disk that nobody writes which state of the disk it has, so that the disk can be compared with any
/// copy of the file, and has QEMU record in it what it writes from now on. Returns the generations as a peer is told them. Waits for
/// a hypervisor that is about to end, for as long as `patience`. The file has to be indexed then.
///
/// # Errors
/// [`Code::Held`] for a file of an image that is mounted, or has changes; or the file is in use, is no qcow2 that can have them, or
/// cannot be written. Then it is not marked, and the same disk.
pub async fn mark(home: &Home, file: &Path, patience: Duration) -> Result<Vec<u8>> {
    change(home, file, move |file| note(file, patience)).await
}

/// Removes from a qcow2 file what [`mark`] has written. The file has to be indexed then: it is another image, which is not frozen.
///
/// # Errors
/// As [`mark`].
pub async fn unmark(home: &Home, file: &Path) -> Result<()> {
    change(home, file, remove).await
}

/// Changes a file beside the disk that is in it. It is not mounted meanwhile.
async fn change<T: Send + 'static>(
    home: &Home,
    file: &Path,
    change: impl FnOnce(&Path) -> Result<T> + Send + 'static,
) -> Result<T> {
    let alone = ALONE.lock().await;
    let (of, path) = (home.clone(), file.to_owned());
    let images = tokio::task::spawn_blocking(move || KeptOut::of(&of, &path)).await??;
    images.refuse_mounted(home, file).await?;
    let path = file.to_owned();
    let changed = tokio::task::spawn_blocking(move || {
        let changed = change(&path);
        drop((images, alone));
        changed
    });
    changed.await?
}

/// The images of this site that are read from a file, in all domains, none of which can be mounted for writing as long as this is
/// there.
struct KeptOut {
    images: Vec<(Home, ImageRecord)>,
    _locks: Vec<Box<dyn Send + Sync>>,
}

impl KeptOut {
    /// Refuses a file that a mount of this home writes to, that a disk of a machine follows from, or over which there are changes: they
    /// are changes of the file as it is. Blocks.
    fn of(home: &Home, file: &Path) -> Result<Self> {
        refuse_written(home, file)?;
        let cannot = || format!("cannot look at {}", file.display());
        let about = file.metadata().with_context(cannot)?;
        for left in drover_migrate::left_files(&home.machines()).map_err(Error::msg)? {
            let is_same =
                |left: &std::fs::Metadata| (left.dev(), left.ino()) == (about.dev(), about.ino());
            if left.path.metadata().is_ok_and(|left| is_same(&left)) {
                let text = format!(
                    "cannot change {}: what the machine {} lacks at its new site is read from it; run `drover migrate` for it again",
                    file.display(),
                    left.machine
                );
                return Err(Error::coded(Code::Held, text));
            }
        }
        let (mut images, mut locks) = (Vec::new(), Vec::new());
        for domain in home.all_domains()? {
            for image in site::look_at_catalog(&domain)?.images()? {
                if !is_read_by(&about, &image.path) {
                    continue;
                }
                let path = changes::directory(&domain.mounted_dir(), &image.name);
                let directory = HostDirectory::open_or_create(&path)
                    .with_context(|| format!("cannot open {}", path.display()))?;
                match generations::hold(&directory) {
                    Ok(lock) => locks.push(lock),
                    Err(GenerationsError::Busy(_)) => {
                        return Err(is_mounted(file, &domain, &image));
                    }
                    Err(e) => return Err(Error::msg(e)),
                }
                images.push((domain.clone(), image));
            }
        }
        for (domain, image) in &images {
            let changes = crate::changes::of_image(domain, &image.name);
            if changes.is_some_and(|changes| changes.changed_bytes > 0) {
                let text = "mounts have made changes to it: merge or drop them (`drover changes`)";
                return Err(held(file, domain, image, text));
            }
        }
        let _locks = locks;
        Ok(Self { images, _locks })
    }

    /// Refuses a file of an image that is mounted.
    async fn refuse_mounted(&self, home: &Home, file: &Path) -> Result<()> {
        if self.images.is_empty() {
            return Ok(());
        }
        let leases = crate::mounts::held(home).await?;
        for (domain, image) in &self.images {
            let mut leases = leases.iter().filter(|one| {
                one.image == image.name.as_str() && one.domain == domain.domain_name()
            });
            if leases.any(|one| one.writer.is_some() || !one.connected.is_empty()) {
                return Err(is_mounted(file, domain, image));
            }
        }
        Ok(())
    }
}

fn is_mounted(file: &Path, domain: &Home, image: &ImageRecord) -> Error {
    held(
        file,
        domain,
        image,
        "it is mounted (`drover mounts leases`)",
    )
}

/// The refusal of a file, since it is one of an image.
fn held(file: &Path, domain: &Home, image: &ImageRecord, why: &str) -> Error {
    let of = match domain.domain_name() {
        DEFAULT_DOMAIN => String::new(),
        name => format!(" of domain {name}"),
    };
    let text = format!(
        "cannot change {}, the file of image {}{of}: {why}",
        file.display(),
        image.name
    );
    Error::coded(Code::Held, text)
}

/// Takes up what the file of an image that was just indexed says of the generations of its disk, if it is the copy of a disk that
/// a machine has left ([`mark`]).
pub(super) fn take_up(home: &Home, image: &ImageRecord) -> Result<()> {
    let Some(of) = (image.format == "qcow2")
        .then(|| of_file(&image.path))
        .flatten()
    else {
        return Ok(());
    };
    // What was read is what was indexed.
    if image.stamp.is_none() || image.stamp != Stamp::of_path(&image.path).ok() {
        return Ok(());
    }
    let (state, size) = (home.mounted_dir(), image.virtual_bytes);
    Ok(keep_on_disk(&state, &image.name, size, image.digest, &of)?)
}

fn note(file: &Path, patience: Duration) -> Result<Vec<u8>> {
    let begun = Instant::now();
    let generations = loop {
        match new_of_file(file) {
            Err(InFileError::InUse(_)) if begun.elapsed() < patience => {
                std::thread::sleep(HYPERVISOR_POLL);
            }
            generations => break generations.map_err(Error::msg)?,
        }
    };
    // First, since that opens the file for writing, and nothing else is believed without it.
    let before = bitmaps(file)?;
    let name = generations
        .bitmap_name()
        .context("a generation that goes on")?;
    bitmap(file, &["--add", "-g", "64K"], &name)?;
    for name in before {
        bitmap(file, &["--remove"], &name)?;
    }
    write_in_file(file, &generations).map_err(Error::msg)?;
    Ok(generations.encode())
}

fn remove(file: &Path) -> Result<()> {
    remove_from_file(file).map_err(Error::msg)?;
    for name in bitmaps(file)? {
        bitmap(file, &["--remove"], &name)?;
    }
    Ok(())
}

/// The dirty bitmaps in a qcow2 file that are named after generations.
fn bitmaps(file: &Path) -> Result<Vec<String>> {
    let said = qemu_img(
        &["info", "--output=json", "-f", "qcow2"],
        &[file.as_os_str()],
    )?;
    let about: serde_json::Value = serde_json::from_slice(&said).unwrap_or_default();
    let known = about["format-specific"]["data"]["bitmaps"].as_array();
    let names = known
        .into_iter()
        .flatten()
        .filter_map(|bitmap| bitmap["name"].as_str());
    let ours = names.filter(|name| Summary::since(name, 0, &[]).is_some());
    Ok(ours.map(str::to_owned).collect())
}

/// Adds a bitmap to a qcow2 file, or removes it.
fn bitmap(file: &Path, how: &[&str], name: &str) -> Result<()> {
    let args = [&["bitmap", "-f", "qcow2"], how].concat();
    qemu_img(&args, &[file.as_os_str(), OsStr::new(name)]).map(drop)
}

fn qemu_img(args: &[&str], about: &[&OsStr]) -> Result<Vec<u8>> {
    let done = Command::new("qemu-img").args(args).args(about).output();
    let done = done.context("cannot run qemu-img (install qemu-utils)")?;
    if !done.status.success() {
        let said = String::from_utf8_lossy(&done.stderr);
        bail!("{}", said.trim());
    }
    Ok(done.stdout)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[tokio::test]
    async fn no_file_is_looked_into_while_one_is_changed() {
        let directory = tempfile::tempdir().unwrap();
        let home = Home::create(directory.path().join("home")).unwrap();
        site::open_catalog(&home).unwrap();
        let (a, b) = (directory.path().join("a"), directory.path().join("b"));
        for file in [&a, &b] {
            std::fs::write(file, "").unwrap();
        }
        let under_way = AtomicUsize::new(0);
        let under_way: &'static AtomicUsize = Box::leak(Box::new(under_way));
        let alone = move |_: &Path| {
            let others = under_way.fetch_add(1, Ordering::SeqCst);
            std::thread::sleep(Duration::from_millis(100));
            under_way.fetch_sub(1, Ordering::SeqCst);
            Ok(others == 0)
        };
        let both = tokio::join!(change(&home, &a, alone), change(&home, &b, alone));
        assert!(both.0.unwrap() && both.1.unwrap());
    }
}
