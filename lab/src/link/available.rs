//! Whether this machine can have a link, and if not, why, in one line.

use std::fs::File;
use std::io::ErrorKind;

use anyhow::Result;

use super::namespaces::Namespaces;
use crate::shell;

/// The machine cannot have the link that was asked for; the reason is one line for a person.
///
/// It is in the chain of the error, so that whoever drives links can tell "not here" from "went wrong":
/// `error.downcast_ref::<Unavailable>()`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unavailable(pub String);

impl std::fmt::Display for Unavailable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "no link here: {}", self.0)
    }
}

impl std::error::Error for Unavailable {}

/// Exit code of `lab link` when there can be no link here.
pub const EXIT_UNAVAILABLE: u8 = 4;

/// Capabilities by their bit in `CapEff` (capabilities(7)).
const CAP_NET_ADMIN: (u32, &str) = (12, "CAP_NET_ADMIN");
const CAP_SYS_ADMIN: (u32, &str) = (21, "CAP_SYS_ADMIN");

/// Makes two namespaces and what joins them, and removes them: what a link needs first.
///
/// # Errors
/// The reason, in one line.
pub fn available() -> Result<(), String> {
    let probe = || -> Result<()> {
        let name = format!("lab-probe-{}", fastrand::u32(..));
        let namespaces = Namespaces::make(&name)?;
        // Either engine will do.
        super::netem::probe(&namespaces).or_else(|_| super::user::probe(&namespaces))
    };
    probe().map_err(|error| match error.downcast_ref::<Unavailable>() {
        Some(Unavailable(why)) => why.clone(),
        None => format!("{error:#}"),
    })
}

/// What must be there before a namespace can be made.
pub(super) fn rights() -> Result<(), Unavailable> {
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

/// What must be there before a TUN device can be made.
pub(super) fn tun() -> Result<(), Unavailable> {
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
        // What a container gets by default.
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
