//! The file that describes a flock, for `drover send --flock-file`.

use std::io::Read;
use std::path::{Path, PathBuf};

use drover_core::ImageName;
use drover_image::Conversion;
use drover_teleport::{Effort, MAX_FLOCK_IMAGES};
use serde::{Deserialize, Deserializer};

use crate::error::{Context, Error, Result};
use crate::images::new_name;
use crate::text;

/// Upper bound on the size of the file.
const MAX_BYTES: u64 = 1 << 20;

/// A flock as its file describes it.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct FlockFile {
    /// The flock's name.
    #[serde(deserialize_with = "name")]
    pub name: ImageName,
    /// Whether all of its images are delivered, or none.
    #[serde(default)]
    pub atomic: bool,
    /// How many images are sent at once.
    pub at_once: Option<usize>,
    /// Bytes per second, as in `"20M"`.
    #[serde(default, deserialize_with = "rate")]
    pub limit: Option<u64>,
    /// Connections for block data.
    pub connections: Option<u16>,
    /// As of the command line.
    #[serde(default, deserialize_with = "compress")]
    pub compress: Option<Effort>,
    /// The images; sorted by `start`.
    #[serde(rename = "image")]
    pub images: Vec<FileImage>,
}

/// An image of a flock.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct FileImage {
    /// Its file; relative to the directory of the flock's file.
    pub path: PathBuf,
    /// Its name at the destination.
    #[serde(default, deserialize_with = "optional_name")]
    pub name: Option<ImageName>,
    /// Its place in the order in which the machines start: those with lower numbers are sent first.
    pub start: Option<u32>,
    /// The file of a profile that is sent along with it, in the place of the image's own; relative likewise.
    pub profile: Option<PathBuf>,
    /// The form in which it is sent.
    #[serde(default, deserialize_with = "conversion")]
    pub to: Conversion,
}

impl FlockFile {
    /// Reads the file.
    ///
    /// # Errors
    /// When it cannot be read; a usage error that names the line when something in it is wrong.
    pub fn load(path: &Path) -> Result<FlockFile> {
        let cannot = || format!("cannot read {}", path.display());
        let file = std::fs::File::open(path).with_context(cannot)?;
        let mut content = String::new();
        file.take(MAX_BYTES + 1)
            .read_to_string(&mut content)
            .with_context(cannot)?;
        if content.len() as u64 > MAX_BYTES {
            let text = format!("{} is larger than {MAX_BYTES} bytes", path.display());
            return Err(Error::usage(text));
        }
        let directory = path.parent().unwrap_or(Path::new(""));
        FlockFile::parse(&content, directory).map_err(|(line, why)| match line {
            Some(line) => Error::usage(format!("{}, line {line}: {why}", path.display())),
            None => Error::usage(format!("{}: {why}", path.display())),
        })
    }

    /// Parses its content; on failure the line, if it is of one, and why.
    fn parse(content: &str, directory: &Path) -> Result<FlockFile, (Option<usize>, String)> {
        let mut flock: FlockFile = toml::from_str(content).map_err(|e| {
            let line = e
                .span()
                .map(|s| content[..s.start].matches('\n').count() + 1);
            (line, e.message().to_owned())
        })?;
        let count = flock.images.len();
        if count == 0 || count > MAX_FLOCK_IMAGES {
            let why = format!("it names {count} images; a flock has 1 to {MAX_FLOCK_IMAGES}");
            return Err((None, why));
        }
        // Those without a number come last, in the order of the file.
        flock
            .images
            .sort_by_key(|image| image.start.unwrap_or(u32::MAX));
        for image in &mut flock.images {
            image.path = directory.join(&image.path);
            image.profile = image.profile.take().map(|path| directory.join(path));
        }
        Ok(flock)
    }
}

fn name<'de, D: Deserializer<'de>>(d: D) -> Result<ImageName, D::Error> {
    let text = String::deserialize(d)?;
    new_name(&text).map_err(serde::de::Error::custom)
}

fn optional_name<'de, D: Deserializer<'de>>(d: D) -> Result<Option<ImageName>, D::Error> {
    name(d).map(Some)
}

fn rate<'de, D: Deserializer<'de>>(d: D) -> Result<Option<u64>, D::Error> {
    let text = String::deserialize(d)?;
    let rate = text::parse_rate(&text).map_err(serde::de::Error::custom)?;
    Ok(Some(rate))
}

fn compress<'de, D: Deserializer<'de>>(d: D) -> Result<Option<Effort>, D::Error> {
    let text = String::deserialize(d)?;
    let parsed = text::parse_compress(&text).map_err(serde::de::Error::custom)?;
    Ok(parsed.0)
}

fn conversion<'de, D: Deserializer<'de>>(d: D) -> Result<Conversion, D::Error> {
    match String::deserialize(d)?.as_str() {
        "raw" => Ok(Conversion::Raw),
        "qcow2" => Ok(Conversion::Qcow2),
        "opaque" => Ok(Conversion::Opaque),
        other => Err(serde::de::Error::custom(format!(
            "{other:?} is no form of an image: use \"raw\", \"qcow2\" or \"opaque\""
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::{Kind, kind_of};

    #[test]
    fn a_flock_is_read_in_the_order_in_which_it_starts() {
        let text = r#"
name = "shop"
atomic = true
at-once = 2
limit = "20M"
compress = "9"

[[image]]
path = "web.qcow2"
start = 2

[[image]]
path = "/srv/db.raw"
name = "database.qcow2"
start = 1
profile = "db.profile"
to = "qcow2"

[[image]]
path = "extra.img"
"#;
        let flock = FlockFile::parse(text, Path::new("/etc/flocks")).unwrap();
        assert_eq!((flock.name.as_str(), flock.atomic), ("shop", true));
        assert_eq!((flock.at_once, flock.limit), (Some(2), Some(20_000_000)));
        assert_eq!(flock.compress, Some(Effort::Zstd(9)));
        let paths: Vec<&Path> = flock.images.iter().map(|i| i.path.as_path()).collect();
        let expected = [
            "/srv/db.raw",
            "/etc/flocks/web.qcow2",
            "/etc/flocks/extra.img",
        ];
        assert_eq!(paths, expected.map(Path::new));
        let first = &flock.images[0];
        assert_eq!(first.name.as_ref().unwrap().as_str(), "database.qcow2");
        assert_eq!(first.to, Conversion::Qcow2);
        let profile = Path::new("/etc/flocks/db.profile");
        assert_eq!(first.profile.as_deref(), Some(profile));
        assert_eq!(flock.images[1].profile, None);
    }

    #[test]
    fn what_is_wrong_is_named_with_its_line() {
        let tmp = tempfile::tempdir().unwrap();
        let path = tmp.path().join("shop.toml");
        for (text, line, why) in [
            ("name = \"shop\"\nimages = 3\n", "line 2", "images"),
            (
                "name = \"shop\"\n\n[[image]]\npath = \"x\"\nsize = 3\n",
                "line 5",
                "size",
            ),
            ("name = \"a/b\"\n[[image]]\npath = \"x\"\n", "line 1", "'/'"),
            (
                "name = \"shop\"\nlimit = \"fast\"\n[[image]]\npath = \"x\"\n",
                "line 2",
                "fast",
            ),
            (
                "name = \"shop\"\n[[image]]\npath = \"x\"\nto = \"vmdk\"\n",
                "line 4",
                "vmdk",
            ),
            ("name = \"shop\"\nimage = []\n", "shop.toml: ", "0 images"),
            ("[[image]]\npath = \"x\"\n", "line 1", "name"),
            ("name = \"shop", "line 1", "string"),
        ] {
            std::fs::write(&path, text).unwrap();
            let e = FlockFile::load(&path).unwrap_err();
            assert_eq!(kind_of(&e), Kind::Usage, "{e}");
            let e = e.to_string();
            assert!(
                e.contains("shop.toml") && e.contains(line) && e.contains(why),
                "{e}"
            );
        }
        let e = FlockFile::load(&tmp.path().join("gone.toml")).unwrap_err();
        assert!(crate::error::one_line(&e).contains("gone.toml"), "{e}");
    }
}
