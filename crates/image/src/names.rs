//! File names stored in an image, and which of them are followed.

use std::path::{Component, Path, PathBuf};

use crate::ImageError;

/// Resolves `name`, as stored in the image at `image`, to a path in the image's directory or below it.
///
/// # Errors
/// As [`below`].
pub(crate) fn beside(image: &Path, name: &str) -> Result<PathBuf, ImageError> {
    Ok(directory(image).join(below(image, name)?))
}

/// The directory of the image at `image`.
pub(crate) fn directory(image: &Path) -> &Path {
    match image.parent() {
        Some(p) if !p.as_os_str().is_empty() => p,
        _ => Path::new("."),
    }
}

/// Resolves `name`, as stored in the image at `image`, to a path relative to the image's directory.
///
/// The name comes from the image and not from the user, so it must not point anywhere else: no `..`, no absolute path
/// outside, no protocol.
///
/// # Errors
/// [`ImageError::OutsideDirectory`].
pub(crate) fn below(image: &Path, name: &str) -> Result<PathBuf, ImageError> {
    let refuse = || ImageError::OutsideDirectory { name: name.into() };
    let path = local_path(name).ok_or_else(refuse)?;
    let relative = if path.is_absolute() {
        let dir = std::path::absolute(directory(image)).map_err(|_| refuse())?;
        path.strip_prefix(&dir).map_err(|_| refuse())?.to_owned()
    } else {
        path.to_owned()
    };
    let plain = relative
        .components()
        .all(|c| matches!(c, Component::Normal(_) | Component::CurDir));
    if !plain || relative.file_name().is_none() {
        return Err(refuse());
    }
    Ok(relative)
}

/// The relative path that `name` is, as stored in an image from elsewhere: no absolute path, and no component that
/// begins with a dot.
///
/// # Errors
/// [`ImageError::NotFollowed`].
pub(crate) fn plain(name: &str) -> Result<PathBuf, ImageError> {
    let path = local_path(name).and_then(Path::to_str);
    let is_plain = |path: &&str| {
        path.split('/')
            .all(|part| !part.is_empty() && !part.starts_with('.'))
    };
    match path.filter(is_plain) {
        Some(path) => Ok(path.into()),
        None => Err(ImageError::NotFollowed {
            name: name.into(),
            why: "is not a plain path below the image's directory".into(),
        }),
    }
}

/// Resolves `name` without restrictions, as QEMU would.
pub(crate) fn anywhere(image: &Path, name: &str) -> Result<PathBuf, ImageError> {
    let path =
        local_path(name).ok_or_else(|| ImageError::OutsideDirectory { name: name.into() })?;
    Ok(image.parent().unwrap_or(Path::new("")).join(path))
}

/// The path in a file name that may have a protocol prefix; `None` when it is not a plain file.
fn local_path(name: &str) -> Option<&Path> {
    // Control characters in a file name can only be meant to corrupt a log or a terminal.
    if name.is_empty() || name.chars().any(char::is_control) {
        return None;
    }
    let (scheme, rest) = match name.split_once(':') {
        // A colon after a slash is part of a name, as QEMU has it.
        Some((scheme, rest)) if !scheme.contains('/') => (scheme, rest),
        _ => ("file", name),
    };
    match scheme {
        "file" if !rest.is_empty() && !rest.starts_with("//") => Some(Path::new(rest)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_lies_beside_or_below_is_followed() {
        let image = Path::new("/vms/web/disk.qcow2");
        for (name, path) in [
            ("base.qcow2", "/vms/web/base.qcow2"),
            ("./base.qcow2", "/vms/web/base.qcow2"),
            ("old/base", "/vms/web/old/base"),
            ("file:base", "/vms/web/base"),
            ("/vms/web/base", "/vms/web/base"),
            ("./a:b", "/vms/web/a:b"),
        ] {
            assert_eq!(beside(image, name).unwrap(), Path::new(path), "{name}");
        }
        for bad in [
            "",
            "..",
            "../base",
            "a/../../b",
            "/etc/shadow",
            "/vms/web/../other",
            "/vms/webcam",
            "/vms/web",
            "nbd://host/x",
            "json:{}",
            "a\0b",
            "a\nb",
            "file:///etc/passwd",
            ".",
        ] {
            assert!(beside(image, bad).is_err(), "{bad:?}");
        }
        assert_eq!(
            beside(Path::new("disk"), "base").unwrap(),
            Path::new("./base")
        );
    }

    #[test]
    fn of_images_from_elsewhere_only_plain_paths_are_followed() {
        for good in ["base.qcow2", "old/base", "a..b", "file:base"] {
            assert!(plain(good).is_ok(), "{good}");
        }
        for bad in [
            "",
            ".",
            "..",
            "./base",
            "a/./b",
            "a/../b",
            "../a",
            "/base",
            "a//b",
            "a/",
            ".hidden",
            ".drover-work/sequences.data",
            "a/.b",
            "nbd:x",
            "json:{}",
            "a\nb",
        ] {
            assert!(plain(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn with_trust_a_name_may_lead_anywhere_but_not_off_the_machine() {
        let image = Path::new("/vms/web/disk.qcow2");
        assert_eq!(anywhere(image, "/base/x").unwrap(), Path::new("/base/x"));
        assert_eq!(
            anywhere(image, "../base").unwrap(),
            Path::new("/vms/web/../base")
        );
        assert!(anywhere(image, "nbd:host:10809").is_err());
    }
}
