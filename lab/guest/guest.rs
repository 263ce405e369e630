//! Runs a script in a guest with Debian's kernel and judges what it says. Included by the tests of crates that the lab
//! cannot serve as a library, by `#[path]`.

use std::path::{Path, PathBuf};
use std::process::Command;

/// Modules that ext4 needs.
pub const EXT4: [&str; 6] = [
    "crc16",
    "mbcache",
    "jbd2",
    "crc32c_generic",
    "libcrc32c",
    "ext4",
];

/// What goes into the guest, and what it must say.
pub struct Guest<'a> {
    /// The test that it is for.
    pub test: &'a str,
    /// Programs.
    pub with: Vec<PathBuf>,
    /// Kernel modules, each after those that it needs.
    pub modules: Vec<&'a str>,
    /// Its network card, as QEMU's `-nic` has it; none if it is empty.
    pub nic: &'a str,
    /// Seconds.
    pub timeout: &'a str,
    /// What it runs.
    pub script: &'a str,
    /// Each must be reported as `ok STEP`.
    pub steps: &'a [&'a str],
}

impl Guest<'_> {
    /// Boots, runs the script, and fails where the guest does not say all that it must. Skips loudly where there can be no guest.
    pub fn run(&self) {
        let lab = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../lab");
        let mut guest = Command::new(lab.join("guest/run.sh"));
        guest.arg("--dir").arg(lab.join("cache"));
        guest.args(["--cpus", "2", "--timeout", self.timeout]);
        if !self.nic.is_empty() {
            guest.args(["--nic", self.nic]);
        }
        for program in &self.with {
            guest.arg("--with").arg(program);
        }
        for module in &self.modules {
            guest.args(["--module", module]);
        }
        let output = guest.arg(self.script).output().unwrap();
        let console = String::from_utf8_lossy(&output.stdout);
        if output.status.code() == Some(77) {
            let why = String::from_utf8_lossy(&output.stderr);
            return eprintln!("{} ({})", why.trim(), self.test);
        }
        assert!(output.status.success(), "{console}");
        assert!(!console.contains("FAIL"), "{console}");
        // The kernel's own words may be before a line's.
        let said = |words: &str| console.lines().any(|line| line.ends_with(words));
        for step in self.steps {
            assert!(said(&format!("ok {step}")), "{step} is missing:\n{console}");
        }
        assert!(said("done"), "{console}");
        for line in console.lines().filter(|line| line.starts_with("figure ")) {
            eprintln!("{line}");
        }
    }
}
