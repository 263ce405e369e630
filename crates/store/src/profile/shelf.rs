//! The profiles of a site's images: a file for each, named by the image's ID, in a directory beside that of the maps.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use drover_index::ImageId;
use drover_storage::{make_private_dir, open_private};

use super::{Profile, ProfileError};

/// The profiles of a site's images. Usable by several processes at once.
#[derive(Debug, Clone)]
pub struct Profiles {
    dir: PathBuf,
}

impl Profiles {
    /// Those in this directory, which is created when the first is written.
    #[must_use]
    pub fn in_dir(dir: PathBuf) -> Self {
        Profiles { dir }
    }

    /// Those of the images whose maps are in `maps_dir`.
    #[must_use]
    pub fn beside(maps_dir: &Path) -> Self {
        Self::in_dir(maps_dir.with_file_name("profiles"))
    }

    /// The file of an image's profile.
    #[must_use]
    pub fn path(&self, image: ImageId) -> PathBuf {
        self.dir.join(format!("{}.profile", image.0))
    }

    /// Reads the profile of an image; `None` when it has none.
    ///
    /// # Errors
    /// When it cannot be read, or is damaged: it can be replaced then, as it is only a hint.
    pub fn load(&self, image: ImageId) -> Result<Option<Profile>, ProfileError> {
        let path = self.path(image);
        Profile::read(&path).map_err(|e| e.of_file(&path))
    }

    /// Changes the profile of an image, of which `change` is given what there is; `None` removes it. Other processes wait
    /// meanwhile. A damaged one counts as none.
    ///
    /// # Errors
    /// When it cannot be written, and those of `change`.
    pub fn change<E: From<ProfileError>>(
        &self,
        image: ImageId,
        change: impl FnOnce(Option<Profile>) -> Result<Option<Profile>, E>,
    ) -> Result<(), E> {
        let path = self.path(image);
        let file = |why| ProfileError::File {
            path: path.clone(),
            why,
        };
        make_private_dir(&self.dir).map_err(file)?;
        let _lock = self.lock().map_err(file)?;
        let before = match self.load(image) {
            Err(e @ ProfileError::File { .. }) => return Err(e.into()),
            Err(e) => {
                tracing::warn!("{e}: it begins anew");
                None
            }
            Ok(before) => before,
        };
        match change(before)? {
            Some(profile) => profile.write(&path)?,
            None => self.remove(image).map_err(file)?,
        }
        Ok(())
    }

    fn lock(&self) -> io::Result<File> {
        let lock = open_private(&self.dir.join("lock"))?;
        lock.lock()?;
        Ok(lock)
    }

    /// Removes the profile of an image, if it has one.
    ///
    /// # Errors
    /// When it cannot be removed.
    pub fn remove(&self, image: ImageId) -> io::Result<()> {
        match fs::remove_file(self.path(image)) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
            _ => Ok(()),
        }
    }

    /// An image has replaced another: the profile is that of the new one, unless it came with one of its own.
    pub(crate) fn hand_down(&self, old: ImageId, new: ImageId) {
        if !self.path(new).exists() {
            let _ = fs::rename(self.path(old), self.path(new));
        }
    }

    /// Removes the profiles of images that there are not.
    pub(crate) fn remove_orphans(&self, is_known: impl Fn(ImageId) -> bool) {
        for entry in fs::read_dir(&self.dir).into_iter().flatten().flatten() {
            let path = entry.path();
            let id = path
                .file_stem()
                .and_then(|stem| stem.to_str()?.parse().ok());
            let is_profile = path.extension().is_some_and(|e| e == "profile");
            if let Some(id) = id.filter(|_| is_profile)
                && !is_known(ImageId(id))
            {
                let _ = fs::remove_file(&path);
            }
        }
    }
}

impl ProfileError {
    fn of_file(self, path: &Path) -> Self {
        match self {
            ProfileError::Envelope(why) => ProfileError::Damaged {
                path: path.to_owned(),
                why: why.to_string(),
            },
            ProfileError::Content(why) => ProfileError::Damaged {
                path: path.to_owned(),
                why: why.to_owned(),
            },
            other => other,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_has_a_profile_until_it_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        let profiles = Profiles::beside(&dir.path().join("maps"));
        assert_eq!(profiles.load(ImageId(1)).unwrap(), None);
        let disk = vec![1; 8192];
        let read = |block| super::super::FirstRead { block, at_ms: 0 };
        let boot = Profile::of_boot(&disk, &[read(1)]).unwrap();
        let put = |id, profile: &Profile| {
            let profile = Some(profile.clone());
            profiles.change(id, |_| Ok::<_, ProfileError>(profile))
        };
        put(ImageId(1), &boot).unwrap();
        put(ImageId(9), &boot).unwrap();
        let other = Profile::of_boot(&disk, &[read(0)]).unwrap();
        profiles
            .change(ImageId(1), |before| {
                assert_eq!(before, Some(boot.clone()));
                Ok::<_, ProfileError>(Some(other.clone()))
            })
            .unwrap();
        profiles.remove_orphans(|id| id == ImageId(1));
        assert_eq!(profiles.load(ImageId(1)).unwrap(), Some(other.clone()));
        assert_eq!(profiles.load(ImageId(9)).unwrap(), None);
        profiles.hand_down(ImageId(1), ImageId(2));
        assert_eq!(profiles.load(ImageId(2)).unwrap(), Some(other.clone()));
        assert_eq!(profiles.load(ImageId(1)).unwrap(), None);
        // One that is damaged is said to be, and replaced.
        fs::write(profiles.path(ImageId(2)), "x").unwrap();
        let damaged = profiles.load(ImageId(2)).unwrap_err().to_string();
        assert!(damaged.contains("2.profile"), "{damaged}");
        profiles
            .change(ImageId(2), |before| {
                assert_eq!(before, None);
                Ok::<_, ProfileError>(None)
            })
            .unwrap();
        assert_eq!(profiles.load(ImageId(2)).unwrap(), None);
        profiles.remove(ImageId(2)).unwrap();
    }
}
