//! What a site directory must be: out of reach of other users, and apart from the images that peers send.

use std::fs::Metadata;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};

use crate::error::{Context, Error, Result};

/// The site's own directories in its home, which no image may be in.
const OWN: [&str; 5] = ["work", "index", "mounted", "mounts", "domains"];

/// Fails if another user can write to the home or to one of its own directories: that user could act as the site.
///
/// # Errors
/// A refusal with the mend.
pub(super) fn private(home: &Path) -> Result<()> {
    let Some(about) = owned(home)? else {
        return Ok(());
    };
    let can_enter = about.mode() & 0o011 != 0;
    for dir in OWN.map(|name| home.join(name)) {
        // Nobody else gets to a directory in a private home. Earlier versions left its mode to the umask.
        if can_enter || dir.is_symlink() {
            owned(&dir)?;
        }
    }
    Ok(())
}

/// Fails if a directory belongs to another user, or others can write to it; `None` when there is none.
fn owned(dir: &Path) -> Result<Option<Metadata>> {
    let about = match dir.metadata() {
        Ok(about) => about,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(e).with_context(|| format!("cannot open {}", dir.display())),
    };
    let dir = dir.display();
    let user = rustix::process::geteuid().as_raw();
    if ![0, user].contains(&about.uid()) {
        return Err(Error::refused(format!(
            "the site directory {dir} belongs to another user (UID {}): run the command as that user, or set DROVER_HOME to a directory of your own",
            about.uid()
        )));
    }
    if about.mode() & 0o022 != 0 {
        return Err(Error::refused(format!(
            "other users can write to the site directory {dir} (mode {:04o}) and so act as the site: `chmod go-w {dir}` ends that",
            about.mode() & 0o7777
        )));
    }
    Ok(Some(about))
}

/// Fails if the directory for images is, or contains, one of the site's own directories, or is inside one: a peer
/// chooses the names of the files there.
///
/// # Errors
/// A refusal that names both.
pub(super) fn apart(home: &Path, images: &Path) -> Result<()> {
    let real_images = real(images);
    let inside = std::iter::once(home.to_path_buf()).chain(OWN.map(|name| home.join(name)));
    for (nth, own) in inside.enumerate() {
        let real_own = real(&own);
        // The images may be in the home itself, beside the other directories.
        let is_home = nth == 0;
        if real_own.starts_with(&real_images) || (!is_home && real_images.starts_with(&real_own)) {
            return Err(Error::refused(format!(
                "the directory for images {} and the site's own directory {} must not contain each other: set `images` in config.toml to a directory of its own",
                images.display(),
                own.display()
            )));
        }
    }
    Ok(())
}

/// The absolute `path` with symbolic links resolved, as far as it exists.
fn real(path: &Path) -> PathBuf {
    let mut real = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => {
                real.pop();
            }
            Component::CurDir => {}
            part => real.push(part),
        }
        real = real.canonicalize().unwrap_or(real);
    }
    real
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    #[test]
    fn a_home_that_others_can_write_to_is_refused_with_the_mend() {
        let tmp = tempfile::tempdir().unwrap();
        let home = tmp.path().join("h");
        private(&home).unwrap();
        fs::create_dir_all(home.join("work")).unwrap();
        let chmod = |dir: &Path, mode| {
            fs::set_permissions(dir, Permissions::from_mode(mode)).unwrap();
        };
        chmod(&home, 0o755);
        private(&home).unwrap();
        for (dir, mode) in [("", 0o777), ("", 0o720), ("work", 0o1702)] {
            let dir = if dir.is_empty() {
                home.clone()
            } else {
                home.join(dir)
            };
            chmod(&dir, mode);
            let e = private(&home).unwrap_err().to_string();
            assert!(e.contains(&format!("mode {mode:04o}")), "{e}");
            assert!(
                e.contains(&format!("`chmod go-w {}`", dir.display())),
                "{e}"
            );
            chmod(&dir, 0o755);
        }
        private(&home).unwrap();
        // What nobody else can get to, and what is elsewhere.
        chmod(&home, 0o700);
        chmod(&home.join("work"), 0o777);
        private(&home).unwrap();
        fs::rename(home.join("work"), tmp.path().join("elsewhere")).unwrap();
        symlink(tmp.path().join("elsewhere"), home.join("work")).unwrap();
        assert!(private(&home).is_err());
        chmod(&tmp.path().join("elsewhere"), 0o755);
        private(&home).unwrap();
        if rustix::process::geteuid().is_root() {
            std::os::unix::fs::chown(&home, Some(65534), None).unwrap();
            let e = private(&home).unwrap_err().to_string();
            assert!(e.contains("UID 65534"), "{e}");
        } else {
            eprintln!("SKIP: only root can give a directory to another user");
        }
    }

    #[test]
    fn images_are_kept_apart_from_the_sites_own_files() {
        let tmp = tempfile::tempdir().unwrap();
        let home = tmp.path().join("h");
        fs::create_dir_all(home.join("mounted")).unwrap();
        symlink(&home, tmp.path().join("link")).unwrap();
        symlink(home.join("mounted"), tmp.path().join("changes")).unwrap();
        for bad in [
            "h",
            "h/",
            "h/.",
            "h/mounted",
            "h/work/images",
            "h/none/../index",
            ".",
            "link",
            "link/mounts/x",
            "changes",
            "changes/x",
        ] {
            let images = tmp.path().join(bad);
            let e = apart(&home, &images).unwrap_err().to_string();
            assert!(e.contains(&images.display().to_string()), "{e}");
            assert!(e.contains(&home.display().to_string()), "{e}");
        }
        for good in [
            "h/images",
            "h/images/x",
            "h/vm",
            "vm",
            "hx",
            "link/images",
            "h2/../vm",
        ] {
            apart(&home, &tmp.path().join(good)).unwrap();
        }
        // The site's own directory may be elsewhere.
        fs::create_dir(tmp.path().join("vm")).unwrap();
        symlink(tmp.path().join("vm/index"), home.join("index")).unwrap();
        fs::create_dir(tmp.path().join("vm/index")).unwrap();
        assert!(apart(&home, &tmp.path().join("vm")).is_err());
    }
}
