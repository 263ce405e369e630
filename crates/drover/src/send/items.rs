//! The files to send, and their names at the peer.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use drover_agent::images::new_name;
use drover_agent::text::{bytes, clean, some};
use drover_core::ImageName;
use drover_image::{Conversion, Part, named_files, open_for_sending, parts};
use drover_store::Peer;
use drover_teleport::SendItem;

use crate::cli::{Format, SendArgs};
use crate::failure::{of_opening, refused, usage};

/// The peer and the images that the command line names.
///
/// # Errors
/// Usage, when a name is invalid or given twice, or `--as` names several images.
pub fn from_args(args: &SendArgs) -> Result<(String, Vec<SendItem>)> {
    let Some((peer, images @ [_, ..])) = args.images_and_peer.split_last() else {
        return Err(usage(
            "name at least one image, and then the peer to send to",
        ));
    };
    let peer = peer
        .to_str()
        .ok_or_else(|| usage("the name of the peer is not UTF-8"))?;
    if args.rename.is_some() && images.len() > 1 {
        return Err(usage(
            "--as renames a single image; send the images one by one to rename them",
        ));
    }
    if peer.contains('/') {
        return Err(usage(format!(
            "{:?} is not the name of a peer; the last argument must be the peer to send to",
            clean(peer)
        )));
    }
    let conversion = match args.to {
        Some(Format::Raw) => Conversion::Raw,
        Some(Format::Qcow2) => Conversion::Qcow2,
        None if args.opaque => Conversion::Opaque,
        None => Conversion::AsIs,
    };
    let mut items = Vec::new();
    for path in images {
        let name = match &args.rename {
            Some(name) => name.clone(),
            None => name_of(path).map_err(usage)?,
        };
        items.push(SendItem {
            path: path.clone(),
            name,
            conversion,
            snapshot: None,
            profile: None,
        });
    }
    let mut seen = HashSet::new();
    if let Some(twice) = items.iter().find(|i| !seen.insert(i.name.clone())) {
        return Err(usage(format!(
            "two of the images would be called {} at the peer; rename one with --as",
            twice.name
        )));
    }
    Ok((peer.to_owned(), items))
}

/// Fails if a peer cannot be reached.
///
/// # Errors
/// With the way out.
pub fn must_have_address(peer: &Peer) -> Result<()> {
    let name = &peer.name;
    if peer.addresses.is_empty() {
        bail!(
            "the address of {name} is unknown: pair again with a ticket from {name}: `drover pair --name {name}`"
        );
    }
    Ok(())
}

/// What goes to the peer.
#[derive(Debug, Default)]
pub struct Sent {
    /// The images, each after its parts.
    pub items: Vec<SendItem>,
    /// For each part, the image and a note about the part.
    pub notes: Vec<(PathBuf, String)>,
}

/// Adds the other files that the images need if `asked`, each before the image that needs it.
///
/// # Errors
/// When an image cannot be opened, one has parts and they were not asked for, or do not look like parts, or two
/// different files would get the same name.
pub fn with_parts(items: Vec<SendItem>, asked: bool) -> Result<Sent> {
    let named: HashSet<ImageName> = items.iter().map(|i| i.name.clone()).collect();
    let mut sent = Sent::default();
    for item in items {
        for part in parts_of(&item, asked)? {
            let as_file = item.conversion == Conversion::AsIs;
            if as_file {
                add_part(&item, &part, &named, &mut sent.items)?;
            }
            let note = format!(
                "its part {} ({}, {}) is {}",
                part.path.display(),
                part.format,
                bytes(part.size),
                if as_file {
                    "sent with it"
                } else {
                    "read for the conversion"
                }
            );
            sent.notes.push((item.path.clone(), note));
        }
        // Opened again when it is sent; here so that a damaged one is noticed before the others are sent.
        open_for_sending(&item.path, item.conversion).map_err(of_opening)?;
        sent.items.push(item);
    }
    Ok(sent)
}

/// The files that an image is read from beside its own.
fn parts_of(item: &SendItem, asked: bool) -> Result<Vec<Part>> {
    if item.conversion == Conversion::Opaque {
        return Ok(Vec::new());
    }
    let names = named_files(&item.path).map_err(of_opening)?;
    match (names.is_empty(), asked) {
        (true, _) => Ok(Vec::new()),
        (false, true) => parts(&item.path).map_err(of_opening),
        (false, false) => Err(refused(format!(
            "{} is not complete without {}: --with-parts sends also what it names, --opaque only the file itself",
            clean(&item.path.display().to_string()),
            some(&names)
        ))),
    }
}

/// Adds a part of `item` to what is sent, unless it is among that or was named on the command line.
fn add_part(
    item: &SendItem,
    part: &Part,
    named: &HashSet<ImageName>,
    items: &mut Vec<SendItem>,
) -> Result<()> {
    let path = &part.path;
    let name = name_of(path).map_err(|e| {
        usage(format!(
            "{} consists of several files, one of which cannot be sent: {e}",
            item.path.display()
        ))
    })?;
    let queued = items.iter().find(|o| o.name == name);
    match queued {
        Some(same) if same_file(&same.path, path)? => {}
        Some(other) => {
            return Err(usage(format!(
                "{} and {} would both be called {name} at the peer",
                other.path.display(),
                path.display()
            )));
        }
        // Also named on the command line: sent in its own turn.
        None if named.contains(&name) => {}
        None => items.push(SendItem {
            path: path.clone(),
            name,
            conversion: Conversion::AsIs,
            snapshot: None,
            profile: None,
        }),
    }
    Ok(())
}

/// A file's name as the name of an image.
pub fn name_of(path: &Path) -> Result<ImageName, String> {
    let shown = clean(&path.display().to_string());
    let name = path
        .file_name()
        .ok_or_else(|| format!("{shown} is a directory, not an image"))?;
    let name = name.to_str().ok_or_else(|| {
        format!("{shown}: the file name is not UTF-8; choose another name with --as")
    })?;
    new_name(name).map_err(|e| format!("{e}; choose another name with --as"))
}

fn same_file(a: &Path, b: &Path) -> Result<bool> {
    let real = |p: &Path| {
        p.canonicalize()
            .with_context(|| format!("cannot open {}", p.display()))
    };
    Ok(real(a)? == real(b)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{Cli, Command};
    use clap::Parser;
    use drover_agent::error::{Kind, kind_of};

    fn args(words: &[&str]) -> SendArgs {
        let cli = Cli::try_parse_from(["drover", "send"].iter().chain(words)).unwrap();
        match cli.command {
            Command::Send(args) => args,
            _ => unreachable!(),
        }
    }

    #[test]
    fn the_last_word_is_the_peer() {
        let (peer, items) = from_args(&args(&["a/web.qcow2", "db.raw", "lyon"])).unwrap();
        assert_eq!(peer, "lyon");
        let names: Vec<&str> = items.iter().map(|i| i.name.as_str()).collect();
        assert_eq!(names, ["web.qcow2", "db.raw"]);
        assert!(items.iter().all(|i| i.conversion == Conversion::AsIs));
        let (_, items) =
            from_args(&args(&["web.qcow2", "lyon", "--as", "x", "--to", "raw"])).unwrap();
        assert_eq!(
            (items[0].name.as_str(), items[0].conversion),
            ("x", Conversion::Raw)
        );
    }

    #[test]
    fn invalid_names_are_usage_errors() {
        for bad in [
            &["a/x.img", "b/x.img", "lyon"][..],
            &["x.img", "y.img", "lyon", "--as", "z"],
            &[".hidden", "lyon"],
            &["a:b", "lyon"],
            &["bad\nname", "lyon"],
            &["..", "lyon"],
            &["x.img", "./y.img"],
            &["x.img"],
        ] {
            let e = from_args(&args(bad)).unwrap_err();
            assert_eq!(kind_of(e.as_ref()), Kind::Usage, "{bad:?}: {e}");
        }
    }

    #[test]
    fn a_single_file_has_no_parts() {
        let tmp = tempfile::tempdir().unwrap();
        let path = tmp.path().join("x.img");
        std::fs::write(&path, vec![1u8; 8192]).unwrap();
        let item = SendItem {
            path,
            name: ImageName::new("x.img").unwrap(),
            conversion: Conversion::AsIs,
            snapshot: None,
            profile: None,
        };
        let items = with_parts(vec![item], false).unwrap().items;
        assert_eq!(items.len(), 1);
        let gone = SendItem {
            path: tmp.path().join("gone"),
            ..items[0].clone()
        };
        let e = with_parts(vec![gone], true).unwrap_err();
        assert!(e.to_string().contains("gone"), "{e}");
    }
    #[test]
    fn parts_are_sent_only_when_asked() {
        let tmp = tempfile::tempdir().unwrap();
        let path = tmp.path().join("x.vmdk");
        let text = "# Disk DescriptorFile\nparentCID=ffffffff\nRW 8 FLAT \"x-flat.vmdk\" 0\n";
        std::fs::write(&path, text).unwrap();
        std::fs::write(tmp.path().join("x-flat.vmdk"), vec![1u8; 4096]).unwrap();
        for (conversion, items) in [
            (Conversion::AsIs, 2),
            (Conversion::Raw, 1),
            (Conversion::Qcow2, 1),
        ] {
            let item = SendItem {
                path: path.clone(),
                name: ImageName::new("x.vmdk").unwrap(),
                conversion,
                snapshot: None,
                profile: None,
            };
            let e = with_parts(vec![item.clone()], false).unwrap_err();
            assert_eq!(kind_of(e.as_ref()), Kind::Refused);
            let e = e.to_string();
            assert!(
                e.contains("x-flat.vmdk") && e.contains("--with-parts"),
                "{e}"
            );
            let sent = with_parts(vec![item.clone()], true).unwrap();
            assert_eq!((sent.items.len(), sent.notes.len()), (items, 1));
            assert!(sent.notes[0].1.contains("x-flat.vmdk"), "{:?}", sent.notes);
            let opaque = SendItem {
                conversion: Conversion::Opaque,
                ..item
            };
            let sent = with_parts(vec![opaque], false).unwrap();
            assert_eq!((sent.items.len(), sent.notes.len()), (1, 0));
        }
    }
}
