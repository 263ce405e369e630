//! What there is and whether it still is what its manifest says: `lab library --list` and `--check`.

use std::path::Path;

use anyhow::{Result, bail};
use comfy_table::Table as Printed;
use serde::Serialize;

use super::catalog::Entry;
use super::manifest::{self, BUILDER};

/// How an image stands by a look at names and sizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum State {
    /// There, as its manifest says.
    Built,
    /// There, of another recipe than the table's, or by an earlier builder.
    Outdated,
    /// There, with another size than its manifest says.
    Changed,
    /// There, and nothing says what it is.
    NoManifest,
    /// Not there.
    Missing,
}

impl State {
    fn words(self) -> &'static str {
        match self {
            Self::Built => "built",
            Self::Outdated => "built by an earlier recipe",
            Self::Changed => "CHANGED: not the size in its manifest",
            Self::NoManifest => "NO MANIFEST",
            Self::Missing => "missing",
        }
    }
}

/// How an image stands, without reading it.
pub fn state(entry: &Entry) -> State {
    let Ok(meta) = std::fs::metadata(&entry.path) else {
        return State::Missing;
    };
    match &entry.manifest {
        None => State::NoManifest,
        Some(manifest) if manifest.size_bytes != meta.len() => State::Changed,
        Some(manifest) if changed_recipe(entry, manifest).is_some() => State::Outdated,
        Some(_) => State::Built,
    }
}

fn changed_recipe(entry: &Entry, manifest: &manifest::Manifest) -> Option<String> {
    if manifest.recipe != entry.recipe {
        return Some(format!(
            "the recipe was {:?}, now it is {:?}",
            manifest.recipe, entry.recipe
        ));
    }
    (manifest.builder != BUILDER).then(|| {
        format!(
            "made by builder {} of the lab, now there is {BUILDER}",
            manifest.builder
        )
    })
}

#[derive(Serialize)]
struct Listed<'a> {
    #[serde(flatten)]
    entry: &'a Entry,
    state: State,
}

/// Prints a list of images.
///
/// # Errors
/// When it cannot be written as JSON.
pub fn list(entries: &[Entry], json: bool) -> Result<()> {
    if json {
        let listed: Vec<Listed<'_>> = entries
            .iter()
            .map(|entry| Listed {
                entry,
                state: state(entry),
            })
            .collect();
        println!("{}", serde_json::to_string_pretty(&listed)?);
        return Ok(());
    }
    let mut printed = Printed::new();
    printed.load_style(comfy_table::presets::NOTHING);
    printed.set_header([
        "image", "suite", "set", "fs", "format", "MiB", "on disk", "state", "made of",
    ]);
    for entry in entries {
        let (size, room) = match std::fs::metadata(&entry.path) {
            Ok(meta) => {
                let room = std::os::unix::fs::MetadataExt::blocks(&meta) * 512;
                ((meta.len() >> 20).to_string(), (room >> 20).to_string())
            }
            Err(_) => ("-".to_owned(), "-".to_owned()),
        };
        let or_dash = |word: &Option<String>| word.clone().unwrap_or_else(|| "-".to_owned());
        printed.add_row([
            entry.name.clone(),
            or_dash(&entry.suite),
            or_dash(&entry.set),
            entry.fs.to_string(),
            entry.format.to_string(),
            size,
            room,
            state(entry).words().to_owned(),
            entry.recipe.clone(),
        ]);
    }
    println!("{printed}");
    Ok(())
}

/// How an image stands after reading it.
#[derive(Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", tag = "result", content = "why")]
pub enum Found {
    /// As its manifest says.
    Good,
    /// As its manifest says, which is of another recipe.
    Outdated(String),
    /// Not there.
    Missing,
    /// Nothing to compare it with.
    Unproved(String),
    /// Not what its manifest says.
    Wrong(String),
}

/// Reads images and compares them with their manifests.
///
/// # Errors
/// When one is not what its manifest says, after all have been looked at.
pub fn check(entries: &[Entry], json: bool) -> Result<()> {
    let mut wrong = 0;
    let mut all = Vec::new();
    for entry in entries {
        let found = examine(entry, entries);
        wrong += usize::from(matches!(found, Found::Wrong(_) | Found::Unproved(_)));
        if json {
            all.push((entry.name.clone(), found));
            continue;
        }
        let words = match &found {
            Found::Good => "good".to_owned(),
            Found::Outdated(why) => format!("good, but {why}"),
            Found::Missing => "missing".to_owned(),
            Found::Unproved(why) => format!("UNPROVED: {why}"),
            Found::Wrong(why) => format!("WRONG: {why}"),
        };
        println!("{:<22} {words}", entry.name);
    }
    if json {
        let map: std::collections::BTreeMap<_, _> = all.into_iter().collect();
        println!("{}", serde_json::to_string_pretty(&map)?);
    }
    if wrong > 0 {
        bail!(
            "{wrong} image(s) are not what their manifests say; remove those files and build them again"
        );
    }
    Ok(())
}

fn examine(entry: &Entry, all: &[Entry]) -> Found {
    let Ok(meta) = std::fs::metadata(&entry.path) else {
        return Found::Missing;
    };
    let Some(manifest) = &entry.manifest else {
        return Found::Unproved("it has no manifest".to_owned());
    };
    if manifest.size_bytes != meta.len() {
        return Found::Wrong(format!(
            "{} bytes, its manifest says {}",
            meta.len(),
            manifest.size_bytes
        ));
    }
    if manifest.digest.is_empty() {
        return Found::Unproved("its manifest has no digest; lab library takes one".to_owned());
    }
    match manifest::digest_of(&entry.path) {
        Err(error) => return Found::Wrong(format!("{error:#}")),
        Ok(digest) if digest != manifest.digest => {
            return Found::Wrong(match in_use(&entry.path) {
                Some(device) => {
                    format!("its content changed; it is attached to {device} for writing")
                }
                None => "its content changed".to_owned(),
            });
        }
        Ok(_) => {}
    }
    if let Some(why) = changed_recipe(entry, manifest) {
        return Found::Outdated(why);
    }
    if let Some(base) = &manifest.made_from
        && let Some(now) = all.iter().find(|e| e.name == base.name)
        && let Some(now) = &now.manifest
        && now.digest != base.digest
    {
        return Found::Outdated(format!("{} was built again since", base.name));
    }
    Found::Good
}

fn in_use(image: &Path) -> Option<String> {
    super::mount::writable_loop(image).ok().flatten()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::library::manifest::Manifest;
    use crate::library::{Set, images};

    #[test]
    fn an_image_that_changed_is_found() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("images")).unwrap();
        let look = || images(dir.path(), Set::Small).unwrap().remove(0);
        assert_eq!(examine(&look(), &[]), Found::Missing);
        let path = look().path;
        fs::write(&path, b"content").unwrap();
        assert_eq!(state(&look()), State::NoManifest);
        assert!(matches!(examine(&look(), &[]), Found::Unproved(_)));

        let mut manifest = Manifest {
            name: "small-one".into(),
            recipe: look().recipe,
            builder: BUILDER,
            ..Manifest::default()
        };
        manifest.measure(&path).unwrap();
        let beside = dir.path().join("images/small-one.json");
        manifest.write(&beside).unwrap();
        assert_eq!(
            (state(&look()), examine(&look(), &[])),
            (State::Built, Found::Good)
        );

        fs::write(&path, b"contend").unwrap();
        assert_eq!(
            examine(&look(), &[]),
            Found::Wrong("its content changed".into())
        );
        assert!(check(&[look()], false).is_err());
        fs::write(&path, b"content and more").unwrap();
        assert_eq!(state(&look()), State::Changed);
        assert!(matches!(examine(&look(), &[]), Found::Wrong(_)));

        fs::write(&path, b"content").unwrap();
        manifest.recipe = "another".into();
        manifest.write(&beside).unwrap();
        assert_eq!(state(&look()), State::Outdated);
        assert!(matches!(examine(&look(), &[]), Found::Outdated(_)));
        assert!(check(&[look()], false).is_ok());
    }
}
