//! Reuse takes no space on file systems that share extents; tested on real ones in a loop device.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::*;

/// A file system in a file, mounted until dropped.
struct Mounted {
    _dir: tempfile::TempDir,
    at: PathBuf,
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(&self.at).status();
    }
}

/// Runs a command; returns its error output if it failed, or that it does not exist.
fn run(program: &str, args: &[&Path]) -> Result<(), String> {
    let out = Command::new(program).args(args).output();
    let out = out.map_err(|e| format!("{program}: {e}"))?;
    let said = String::from_utf8_lossy(&out.stderr).trim().to_owned();
    match out.status.success() {
        true => Ok(()),
        false => Err(format!("{program}: {said}")),
    }
}

fn mounted(kind: &str) -> Result<Mounted, String> {
    if !rustix::process::geteuid().is_root() {
        return Err("only root can mount".into());
    }
    let dir = tempfile::tempdir().map_err(|e| e.to_string())?;
    let (image, at) = (dir.path().join("fs"), dir.path().join("mnt"));
    let made = File::create(&image).and_then(|f| f.set_len(600 << 20));
    made.and_then(|()| std::fs::create_dir(&at))
        .map_err(|e| e.to_string())?;
    run(&format!("mkfs.{kind}"), &[Path::new("-q"), &image])?;
    run("mount", &[Path::new("-o"), Path::new("loop"), &image, &at])?;
    Ok(Mounted { _dir: dir, at })
}

fn used_bytes(at: &Path) -> u64 {
    rustix::fs::syncfs(File::open(at).unwrap()).unwrap();
    let fs = rustix::fs::statvfs(at).unwrap();
    (fs.f_blocks - fs.f_bfree) * fs.f_frsize
}

/// Copies most of a file in pieces, as a plan would, and returns by how much the used space grew.
fn growth(at: &Path, shift: u64) -> u64 {
    const BYTES: usize = 64 << 20;
    let mut rng = Rng::with_seed(4);
    let mut bytes = vec![0; BYTES];
    rng.fill(&mut bytes);
    std::fs::write(at.join("source"), &bytes).unwrap();
    let open = |name| {
        let options = &mut File::options();
        let options = options.read(true).write(true).create(true).truncate(false);
        options.open(at.join(name)).unwrap()
    };
    let (source, target) = (open("source"), open("target"));
    target.set_len(2 * BYTES as u64).unwrap();
    let before = used_bytes(at);
    let (mut from, mut to) = (Vec::new(), Vec::new());
    let mut block = 0;
    let blocks = (BYTES / BLOCK_SIZE) as u64 - 1;
    while block < blocks {
        let n = rng.u64(1..2000).min(blocks - block);
        from.push((Some(block * BLOCK_SIZE_U64), n * BLOCK_SIZE_U64));
        let there = (block + blocks / 3) * BLOCK_SIZE_U64 + shift;
        to.push((Some(there), n * BLOCK_SIZE_U64));
        block += n;
    }
    copy_spans(&source, &from, &target, &to).unwrap();
    let mut back = vec![0; blocks as usize * BLOCK_SIZE];
    target.read_exact_at(&mut back, to[0].0.unwrap()).unwrap();
    assert!(back == bytes[..back.len()]);
    used_bytes(at).saturating_sub(before)
}

#[test]
fn aligned_reuse_takes_no_space_on_xfs_and_btrfs() {
    for kind in ["xfs", "btrfs"] {
        let there = match mounted(kind) {
            Ok(there) => there,
            Err(e) => {
                eprintln!("SKIP shared extents on {kind}: {e}");
                continue;
            }
        };
        let grown = growth(&there.at, 0);
        assert!(
            grown < 4 << 20,
            "{kind}: {grown} bytes for what could be shared"
        );
        std::fs::remove_file(there.at.join("target")).unwrap();
        let grown = growth(&there.at, 512);
        assert!(
            grown > 60 << 20,
            "{kind}: the measurement is wrong: {grown}"
        );
    }
}
