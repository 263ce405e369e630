//! The oracle: `qemu-img` and `qemu-io`.

use std::path::{Path, PathBuf};
use std::process::Command;

/// Whether QEMU's tools are here; says loudly when they are not.
pub fn available() -> bool {
    let works = |tool| {
        Command::new(tool)
            .arg("--version")
            .output()
            .is_ok_and(|o| o.status.success())
    };
    let both = works("qemu-img") && works("qemu-io");
    if !both {
        eprintln!("SKIP: qemu-img and qemu-io (Debian: qemu-utils) are not installed");
    }
    both
}

fn run(tool: &str, dir: &Path, args: &[&str]) -> Result<String, String> {
    let out = Command::new(tool)
        .args(args)
        .current_dir(dir)
        .output()
        .map_err(|e| format!("{tool}: {e}"))?;
    if out.status.success() {
        Ok(String::from_utf8_lossy(&out.stdout).into_owned())
    } else {
        Err(format!(
            "{tool} {}: {}{}",
            args.join(" "),
            String::from_utf8_lossy(&out.stdout),
            String::from_utf8_lossy(&out.stderr)
        ))
    }
}

/// Runs `qemu-img` in `dir`; it must succeed.
pub fn img(dir: &Path, args: &[&str]) -> String {
    run("qemu-img", dir, args).unwrap_or_else(|e| panic!("{e}"))
}

/// Runs `qemu-img create` in `dir` with these arguments, separated by spaces; it must succeed.
pub fn create(dir: &Path, args: &str) {
    let args: Vec<&str> = ["create", "-q"]
        .into_iter()
        .chain(args.split(' '))
        .collect();
    img(dir, &args);
}

/// Runs `qemu-img` in `dir`; whether it succeeds is part of the question.
pub fn try_img(dir: &Path, args: &[&str]) -> Result<String, String> {
    run("qemu-img", dir, args)
}

/// Runs `qemu-io` commands on an image, all in one call.
pub fn io(dir: &Path, name: &str, format: &str, commands: &[String]) {
    let mut args = vec!["-f", format];
    for c in commands {
        args.extend(["-c", c]);
    }
    args.push(name);
    run("qemu-io", dir, &args).unwrap_or_else(|e| panic!("{e}"));
}

/// A directory with files of random bytes to write from.
pub struct Bench {
    dir: tempfile::TempDir,
    patterns: u32,
}

impl Bench {
    pub fn new(seed: u64) -> Self {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let mut rng = fastrand::Rng::with_seed(seed);
        let patterns = 4;
        for i in 0..patterns {
            // Not a multiple of a block, so that no two blocks of a long write are the same.
            let mut bytes = vec![0u8; 300_001];
            rng.fill(&mut bytes);
            std::fs::write(dir.path().join(format!("pattern{i}")), bytes).expect("a pattern");
        }
        Bench { dir, patterns }
    }

    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Writes, zeroes and discards at random through QEMU.
    pub fn scribble(&self, name: &str, format: &str, size: u64, writes: usize, seed: u64) {
        self.scribble_with(name, format, size, writes, seed, true);
    }

    /// The same; `clear` allows zeroing and discarding.
    pub fn scribble_with(
        &self,
        name: &str,
        format: &str,
        size: u64,
        writes: usize,
        seed: u64,
        clear: bool,
    ) {
        let mut rng = fastrand::Rng::with_seed(seed);
        let mut commands = Vec::with_capacity(writes);
        for _ in 0..writes {
            let unit = [512, 4096, 65536][rng.usize(..3)];
            let offset = rng.u64(..size / unit) * unit;
            let most = [8192u64, 65536, 1 << 20][rng.usize(..3)];
            let len = (rng.u64(1..=most.div_ceil(512)) * 512).min(size - offset);
            let pattern = rng.u32(..self.patterns);
            commands.push(match rng.u8(..8) {
                0 if clear => format!("write -z {offset} {len}"),
                1 if clear => format!("discard {offset} {len}"),
                2 if clear => format!("write -z -u {offset} {len}"),
                _ => format!("write -s pattern{pattern} {offset} {len}"),
            });
        }
        io(self.dir(), name, format, &commands);
    }

    /// Writes random bytes at one place.
    pub fn write(&self, name: &str, format: &str, offset: u64, len: u64) {
        io(
            self.dir(),
            name,
            format,
            &[format!("write -s pattern0 {offset} {len}")],
        );
    }
}
