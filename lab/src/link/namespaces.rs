//! The two namespaces at the ends of the link, and the janitor that removes them even after a kill -9.

use std::fs::File;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::fs::{FlockOperation, flock};

use super::Side;
use crate::shell;

/// How long to wait for another link of the same name to be gone.
const LOCK_WAIT: Duration = Duration::from_secs(10);

/// Two namespaces named `PREFIX-a` and `PREFIX-b`; gone when this is dropped or its process dies.
pub struct Namespaces {
    prefix: String,
    janitor: Child,
}

/// Reads until its standard input ends, which the kernel sees to when the lab dies, and then ends what
/// still runs in the two namespaces (only what was started there is there) and removes them.
const JANITOR: &str = r#"
cat >/dev/null
for signal in TERM KILL; do
  for ns in "$@"; do
    pids=$(ip netns pids "$ns" 2>/dev/null) && [ -n "$pids" ] && kill -s $signal $pids 2>/dev/null
  done
  for wait in 1 2 3 4 5 6 7 8; do
    left=
    for ns in "$@"; do left="$left$(ip netns pids "$ns" 2>/dev/null)"; done
    [ -z "$left" ] && break
    sleep 0.05
  done
done
for ns in "$@"; do ip netns del "$ns" 2>/dev/null; done
exit 0
"#;

impl Namespaces {
    /// Makes the namespaces, removing what a run before left.
    ///
    /// # Errors
    /// Without root or `ip`, or when another link of this name is up.
    pub fn make(prefix: &str) -> Result<Self> {
        if !rustix::process::geteuid().is_root() {
            bail!("needs root to make network namespaces");
        }
        if !shell::have("ip") {
            bail!("`ip` (iproute2) is not installed");
        }
        let valid = |c: char| c.is_ascii_alphanumeric() || c == '-';
        if prefix.is_empty() || prefix.len() > 32 || !prefix.chars().all(valid) {
            bail!("{prefix:?} is no name for a link: letters, digits and dashes, at most 32");
        }
        let lock = lock(prefix)?;
        // The janitor shares the lock by its open file: nobody makes these names while it still removes them.
        let janitor = Command::new("sh")
            .args([
                "-c",
                JANITOR,
                "janitor",
                &format!("{prefix}-a"),
                &format!("{prefix}-b"),
            ])
            .stdin(Stdio::piped())
            .stdout(lock)
            .stderr(Stdio::null())
            .current_dir("/")
            .process_group_of_its_own()
            .spawn()
            .context("cannot start the janitor")?;
        let this = Self {
            prefix: prefix.to_owned(),
            janitor,
        };
        for side in Side::BOTH {
            let name = this.name(side);
            if PathBuf::from("/run/netns").join(&name).exists() {
                shell::run(Command::new("ip").args(["netns", "del", &name]))?;
            }
            shell::run(Command::new("ip").args(["netns", "add", &name]))?;
            shell::run(Command::new("ip").args(["-n", &name, "link", "set", "lo", "up"]))?;
            // One run must not learn from the one before.
            let forget = "echo 1 > /proc/sys/net/ipv4/tcp_no_metrics_save";
            shell::run(this.command(side, "sh").args(["-c", forget]))?;
        }
        Ok(this)
    }

    /// The name of a side's namespace.
    pub fn name(&self, side: Side) -> String {
        format!("{}-{}", self.prefix, side.letter())
    }

    /// A command that runs in a side's namespace.
    pub fn command(&self, side: Side, program: &str) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.name(side), program]);
        command
    }
}

impl Drop for Namespaces {
    fn drop(&mut self) {
        drop(self.janitor.stdin.take());
        let _ = self.janitor.wait();
    }
}

fn lock(prefix: &str) -> Result<File> {
    let path = std::env::temp_dir().join(format!("drover-lab-link-{prefix}.lock"));
    let file = File::create(&path).with_context(|| format!("cannot make {}", path.display()))?;
    let started = Instant::now();
    while flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
        if started.elapsed() > LOCK_WAIT {
            bail!("another link named {prefix} is up; choose a name with --name");
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    Ok(file)
}

trait OwnGroup {
    fn process_group_of_its_own(&mut self) -> &mut Self;
}

impl OwnGroup for Command {
    /// A Ctrl-C at the terminal is for the lab, not for its janitor.
    fn process_group_of_its_own(&mut self) -> &mut Self {
        std::os::unix::process::CommandExt::process_group(self, 0)
    }
}
