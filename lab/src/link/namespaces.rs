//! The two namespaces at the ends of the link, and the janitor that removes them even after a kill -9.

use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::fs::{FlockOperation, flock};

use super::{MTU, NETWORK, Options, Side, Unavailable, available};
use crate::shell;

/// How long to wait for another link of the same name to be gone.
const LOCK_WAIT: Duration = Duration::from_secs(10);

/// Two namespaces named `PREFIX-a` and `PREFIX-b`; gone when this is dropped or its process dies.
pub struct Namespaces {
    prefix: String,
    janitor: Child,
}

/// One run must not learn from the one before, and no neighbour discovery is to be counted.
const SYSCTL: &str = "cd /proc/sys/net
echo 1 > ipv4/tcp_no_metrics_save
[ ! -e ipv6/conf/all/disable_ipv6 ] || echo 1 > ipv6/conf/all/disable_ipv6";

/// Reads until its standard input ends, which the kernel sees to when the lab dies, and then ends what
/// still runs in the two namespaces (only what was started there is there) and removes them, and last the lock file
/// `$0`, whose lock it still holds.
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
rm -f "$0"
exit 0
"#;

impl Namespaces {
    /// Makes the namespaces, removing what a run before left.
    ///
    /// # Errors
    /// Without root or `ip`, or when another link of this name is up.
    pub fn make(prefix: &str) -> Result<Self> {
        available::rights()?;
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
                &lock_path(prefix).to_string_lossy(),
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
            shell::run(Command::new("ip").args(["netns", "add", &name])).map_err(|error| {
                Unavailable(format!("this machine makes no network namespace: {error}"))
            })?;
            this.ip(side, &["link", "set", "lo", "up"])?;
            shell::run(this.command(side, "sh").args(["-c", SYSCTL]))?;
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

    /// Runs `ip` in a side's namespace.
    pub fn ip(&self, side: Side, args: &[&str]) -> Result<()> {
        let namespace = self.name(side);
        shell::run(Command::new("ip").args(["-n", &namespace]).args(args)).map(drop)
    }

    /// Lets the kernel hand over pieces of the size that suits the link.
    pub fn pieces(&self, side: Side, options: &Options) -> Result<()> {
        let piece = options.piece_bytes(side);
        let (bytes, packets) = (piece.to_string(), (piece / (MTU - 40)).max(1).to_string());
        let limits = ["gso_max_size", &bytes, "gso_max_segs", &packets];
        self.ip(side, &[&["link", "set", "wan0"], &limits[..]].concat())
    }

    /// Gives a side's `wan0` its address and routes, and sets it up.
    pub fn address(&self, side: Side, options: &Options) -> Result<()> {
        let (mtu, address) = (MTU.to_string(), format!("{}/24", side.address()));
        self.ip(
            side,
            &["link", "set", "wan0", "mtu", &mtu, "addrgenmode", "none"],
        )?;
        self.ip(side, &["addr", "add", &address, "dev", "wan0"])?;
        self.ip(side, &["link", "set", "wan0", "up"])?;
        let (source, congestion) = (side.address(), options.congestion.as_str());
        let route = ["route", "replace", NETWORK, "dev", "wan0", "src", source];
        self.ip(side, &[&route[..], &["congctl", congestion]].concat())
            .context("cannot choose TCP's congestion control")
    }
}

impl Drop for Namespaces {
    fn drop(&mut self) {
        drop(self.janitor.stdin.take());
        let _ = self.janitor.wait();
    }
}

fn lock_path(prefix: &str) -> PathBuf {
    std::env::temp_dir().join(format!("drover-lab-link-{prefix}.lock"))
}

fn lock(prefix: &str) -> Result<File> {
    let path = lock_path(prefix);
    let started = Instant::now();
    loop {
        let file =
            File::create(&path).with_context(|| format!("cannot make {}", path.display()))?;
        if flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok() {
            // A janitor may have removed it between the two steps, and another be there by now.
            let there = std::fs::metadata(&path).map(|there| there.ino()).ok();
            if there == Some(file.metadata()?.ino()) {
                return Ok(file);
            }
            continue;
        }
        if started.elapsed() > LOCK_WAIT {
            return Err(Unavailable(format!(
                "another link named {prefix} is up; choose a name with --name"
            ))
            .into());
        }
        std::thread::sleep(Duration::from_millis(100));
    }
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
