//! Builds two small related images from the host's own files, for a smoke run without a network.

use std::fs::{self, File, FileTimes};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::cache::{Built, Cache, remove_tree};
use super::filesystem;
use super::table::Selection;

const ROOTS: &[&str] = &["/usr/bin", "/usr/sbin", "/usr/share", "/usr/lib"];
/// Upper bound on a file's size, so that no single file dominates and the image stays small.
const MAX_FILE: u64 = 8 << 20;
const MAX_TOTAL: u64 = 160 << 20;

/// Copies the selection to a tree and makes an image of it.
///
/// # Errors
/// When the disk is full or `mke2fs` fails.
pub fn make(cache: &Cache, name: &str, selection: Selection, out: &Path) -> Result<Built> {
    let tree = cache.work.join(name);
    let time = filesystem::time_of(name);
    let budget = MAX_TOTAL / ROOTS.len() as u64;
    for root in ROOTS {
        let mut files = Vec::new();
        walk(Path::new(root), budget, &mut 0, &mut files);
        for path in files {
            let (Some(change), Ok(mut content)) = (selected(&path, selection), fs::read(&path))
            else {
                continue;
            };
            let to = tree.join(path.strip_prefix("/").unwrap_or(&path));
            fs::create_dir_all(to.parent().unwrap_or(&tree))?;
            if change {
                content.extend_from_slice(b"\n# a line that the other image lacks\n");
            }
            fs::write(&to, content).with_context(|| format!("cannot write {}", to.display()))?;
            File::open(&to)?.set_times(FileTimes::new().set_accessed(time).set_modified(time))?;
        }
    }
    let written_by = filesystem::mke2fs(&tree, out, name)?;
    remove_tree(&tree)?;
    Ok(Built {
        written_by,
        ..Built::default()
    })
}

/// Collects regular files below `dir` in a fixed order, up to `budget` bytes.
fn walk(dir: &Path, budget: u64, taken: &mut u64, out: &mut Vec<PathBuf>) {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let mut paths: Vec<PathBuf> = entries.map(|e| e.path()).collect();
    paths.sort();
    for path in paths {
        let Ok(meta) = path.symlink_metadata() else {
            continue;
        };
        if *taken >= budget {
            return;
        }
        if meta.is_dir() {
            walk(&path, budget, taken, out);
        } else if meta.is_file() && meta.len() <= MAX_FILE {
            *taken += meta.len();
            out.push(path);
        }
    }
}

/// Whether a file is part of a selection, and if so, whether it is modified there.
pub fn selected(path: &Path, selection: Selection) -> Option<bool> {
    let hash = blake3::hash(path.as_os_str().as_encoded_bytes());
    let (part, change) = (
        hash.as_bytes()[0] % 8,
        hash.as_bytes()[1].is_multiple_of(32),
    );
    match selection {
        Selection::One => (part != 0).then_some(false),
        Selection::Two => (part != 1).then_some(change),
    }
}
