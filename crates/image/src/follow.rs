//! Opens the files that an image names.

use std::fs::File;
use std::path::Path;

use rustix::fs::{Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

use crate::{ImageError, ImageFile, Stamp, names};

/// How often a path is resolved again when directories in it are renamed at that moment.
const TRIES: u32 = 16;

/// How far file names in an image are followed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Trust {
    /// Only to files in the image's own directory and below it; a symbolic link there may lead anywhere.
    #[default]
    Beside,
    /// The same, but no symbolic link is followed out of that directory. For images whose author may not read every
    /// file that the user may.
    Beneath,
    /// Backing files may be anywhere on this machine, as in QEMU. For images whose author may read every file that the
    /// user may.
    Anywhere,
}

/// The images of a site, some of which came from elsewhere: decides what they are read from.
pub trait Known {
    /// Whether the image at `image` came from elsewhere. Names in any other are followed as [`Trust::Beside`] says.
    fn is_foreign(&self, image: &Path) -> bool;

    /// Whether an image from elsewhere may be read from the file `path`, which it names: the stamp that the file must
    /// have, as far as that is known.
    ///
    /// # Errors
    /// Why not, to complete "the image names the file x, which ...".
    fn part(&self, path: &Path) -> Result<Option<Stamp>, String>;
}

/// Which of the files that an image names are opened.
#[derive(Clone, Copy)]
pub(crate) enum Follow<'a> {
    By(Trust),
    /// By images from elsewhere only those that are known, beneath the image's directory, without any symbolic link.
    Known(&'a dyn Known),
}

impl Follow<'_> {
    /// Opens what the image at `image` calls `name` and has part of its data in.
    pub(crate) fn part(self, image: &Path, name: &str) -> Result<ImageFile, ImageError> {
        match self {
            Follow::By(Trust::Beneath) => {
                let below = names::below(image, name)?;
                beneath(image, name, &below, ResolveFlags::BENEATH)
            }
            Follow::Known(known) if known.is_foreign(image) => {
                let refuse = |why| not_followed(name, why);
                let below = names::plain(name)?;
                let stamp = known
                    .part(&names::directory(image).join(&below))
                    .map_err(refuse)?;
                let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
                let file = beneath(image, name, &below, resolve)?;
                let now = (file.stamp().size, file.stamp().mtime_ns);
                match stamp.is_none_or(|stamp| (stamp.size, stamp.mtime_ns) == now) {
                    true => Ok(file),
                    false => Err(refuse("was changed after it had been indexed".into())),
                }
            }
            _ => ImageFile::open(&names::beside(image, name)?),
        }
    }

    /// Opens what the image at `image` calls `name` and has as its backing file.
    pub(crate) fn backing(self, image: &Path, name: &str) -> Result<ImageFile, ImageError> {
        match self {
            Follow::By(Trust::Anywhere) => ImageFile::open(&names::anywhere(image, name)?),
            _ => self.part(image, name),
        }
    }
}

fn not_followed(name: &str, why: String) -> ImageError {
    ImageError::NotFollowed {
        name: name.into(),
        why,
    }
}

/// Opens `below`, which the image at `image` calls `name`, in the image's directory. The kernel resolves the path, so
/// that what was checked is what is open.
fn beneath(
    image: &Path,
    name: &str,
    below: &Path,
    resolve: ResolveFlags,
) -> Result<ImageFile, ImageError> {
    let directory = names::directory(image);
    let path = directory.join(below);
    let failed = |e: Errno| match e {
        Errno::XDEV => ImageError::OutsideDirectory { name: name.into() },
        Errno::LOOP if resolve.contains(ResolveFlags::NO_SYMLINKS) => {
            not_followed(name, "is a symbolic link or behind one".into())
        }
        e => ImageError::io("open the image", e.into()).in_file(&path),
    };
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let directory = rustix::fs::open(directory, flags, Mode::empty()).map_err(failed)?;
    let mut tries = 0;
    let file = loop {
        let flags = ImageFile::FLAGS | OFlags::RDONLY | OFlags::CLOEXEC;
        match rustix::fs::openat2(
            &directory,
            below,
            flags,
            Mode::empty(),
            resolve | ResolveFlags::NO_MAGICLINKS,
        ) {
            Err(Errno::AGAIN | Errno::INTR) if tries < TRIES => tries += 1,
            opened => break opened.map_err(failed)?,
        }
    };
    ImageFile::new(File::from(file), &path)
}
