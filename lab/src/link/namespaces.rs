//! The two namespaces at the ends of the link, and the cleanup process that removes them even after a kill -9.

use std::fs::File;
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::fs::{FlockOperation, flock};

use crate::shell;

/// Timeout for another link of the same name to shut down.
const LOCK_WAIT: Duration = Duration::from_secs(10);

/// One end of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// 10.77.0.1
    A,
    /// 10.77.0.2
    B,
}

impl Side {
    pub(super) const BOTH: [Self; 2] = [Self::A, Self::B];

    /// The address of this end on the link.
    pub fn address(self) -> &'static str {
        match self {
            Self::A => "10.77.0.1",
            Self::B => "10.77.0.2",
        }
    }

    /// The last number of its address.
    pub(super) fn host(self) -> u8 {
        match self {
            Self::A => 1,
            Self::B => 2,
        }
    }

    pub(super) fn letter(self) -> char {
        match self {
            Self::A => 'a',
            Self::B => 'b',
        }
    }
}

/// Two namespaces `PREFIX-a` and `PREFIX-b`, or the first and one of another link; removed when this is dropped or its process dies, but
/// for that.
pub struct Namespaces {
    prefix: String,
    /// Of another link, at the far end.
    far: Option<String>,
    cleanup: Child,
}

/// Disables the caching of TCP metrics, which would affect later runs, and IPv6, whose neighbour discovery would be
/// counted.
const SYSCTL: &str = "cd /proc/sys/net
echo 1 > ipv4/tcp_no_metrics_save
[ ! -e ipv6/conf/all/disable_ipv6 ] || echo 1 > ipv6/conf/all/disable_ipv6";

/// The cleanup process. It reads until its stdin is closed, which happens at the latest when the lab dies, then kills
/// all processes in the two namespaces (only those that the lab started), removes the namespaces, and finally the lock
/// file `$0`, whose lock it still holds.
const CLEANUP: &str = r#"
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
    /// Creates the namespaces, after removing those of an earlier run; only the near one if `far` names another.
    ///
    /// # Errors
    /// Without root or `ip`, or when another link of this name is up.
    pub fn make(prefix: &str, far: Option<String>) -> Result<Self> {
        rights()?;
        let valid = |c: char| c.is_ascii_alphanumeric() || c == '-';
        if prefix.is_empty() || prefix.len() > 32 || !prefix.chars().all(valid) {
            bail!("{prefix:?} is no name for a link: letters, digits and dashes, at most 32");
        }
        let lock = lock(prefix)?;
        // The cleanup process inherits the locked file: nobody can create these names until it has removed them.
        let cleanup = Command::new("sh")
            .args([
                "-c",
                CLEANUP,
                &lock_path(prefix).to_string_lossy(),
                &format!("{prefix}-a"),
                &format!("{prefix}-b"),
            ])
            .stdin(Stdio::piped())
            .stdout(lock)
            .stderr(Stdio::null())
            .current_dir("/")
            // Ctrl-C in a terminal is for the lab, not for its cleanup process.
            .process_group(0)
            .spawn()
            .context("cannot start the cleanup process")?;
        let this = Self {
            prefix: prefix.to_owned(),
            far,
            cleanup,
        };
        let own = |side: &Side| *side == Side::A || this.far.is_none();
        for side in Side::BOTH.into_iter().filter(own) {
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
        match &self.far {
            Some(far) if side == Side::B => far.clone(),
            _ => format!("{}-{}", self.prefix, side.letter()),
        }
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
}

impl Drop for Namespaces {
    fn drop(&mut self) {
        drop(self.cleanup.stdin.take());
        let _ = self.cleanup.wait();
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
            // A cleanup process may have removed the file between the two steps, and another process may have created a
            // new one.
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

/// This machine does not support the requested link; the reason is one line for the user.
///
/// It is in the error's chain of causes, so that callers can distinguish "not supported" from "failed":
/// `error.downcast_ref::<Unavailable>()`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unavailable(pub String);

impl std::fmt::Display for Unavailable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "no link here: {}", self.0)
    }
}

impl std::error::Error for Unavailable {}

/// Capabilities by their bit in `CapEff` (capabilities(7)).
const CAP_NET_ADMIN: (u32, &str) = (12, "CAP_NET_ADMIN");
const CAP_SYS_ADMIN: (u32, &str) = (21, "CAP_SYS_ADMIN");

/// Checks the privileges needed to create a namespace.
fn rights() -> Result<(), Unavailable> {
    if !rustix::process::geteuid().is_root() {
        return Err(Unavailable(
            "network namespaces need root; run it with sudo".to_owned(),
        ));
    }
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    if let Some(missing) = missing_capability(&status) {
        return Err(Unavailable(format!(
            "root without {missing}, as in a container; start it with --privileged"
        )));
    }
    if !shell::have("ip") {
        return Err(Unavailable("`ip` is not installed (iproute2)".to_owned()));
    }
    Ok(())
}

/// The first capability that namespaces and devices need and this process lacks.
fn missing_capability(status: &str) -> Option<&'static str> {
    let line = status.lines().find_map(|l| l.strip_prefix("CapEff:"))?;
    let effective = u64::from_str_radix(line.trim(), 16).ok()?;
    [CAP_NET_ADMIN, CAP_SYS_ADMIN]
        .into_iter()
        .find(|(bit, _)| effective & (1 << bit) == 0)
        .map(|(_, name)| name)
}

/// Checks the requirements for a TUN device.
pub fn tun() -> Result<(), Unavailable> {
    const TUN: &str = "/dev/net/tun";
    let opened = File::options().read(true).write(true).open(TUN);
    opened.map(drop).map_err(|error| {
        Unavailable(match error.kind() {
            ErrorKind::NotFound => format!(
                "no {TUN}; `modprobe tun`, or give the container that device (--device {TUN})"
            ),
            _ => format!("cannot open {TUN}: {error}"),
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_capability_is_named() {
        let status = |caps: &str| format!("Name:\tlab\nCapPrm:\t0\nCapEff:\t{caps}\n");
        assert_eq!(missing_capability(&status("000001ffffffffff")), None);
        // The default of containers.
        assert_eq!(
            missing_capability(&status("00000000a80425fb")),
            Some("CAP_NET_ADMIN")
        );
        assert_eq!(
            missing_capability(&status("00000000a80435fb")),
            Some("CAP_SYS_ADMIN")
        );
    }

    #[test]
    fn a_reason_is_found_in_a_chain_of_errors() {
        use anyhow::Context;
        let error = Err::<(), _>(Unavailable("no luck".to_owned()))
            .context("while measuring")
            .unwrap_err();
        assert_eq!(
            error.downcast_ref::<Unavailable>().map(|u| u.0.as_str()),
            Some("no luck")
        );
    }
}
