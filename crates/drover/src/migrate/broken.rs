//! `migrate --break`: a machine runs on here whose destination is lost for good.

use anyhow::{Result, bail};
use drover_agent::home::Home;
use drover_agent::text::clean;
use drover_core::ImageName;
use drover_migrate::{Broken, break_move as end_move};
use drover_store::machine::Move;

use super::ended;
use super::under_way::{failed, if_there, stop_mover, work};
use crate::cli::MigrateArgs;
use crate::failure;
use crate::out;
use crate::prompt;

/// Lets a machine run here that was handed over, if the user confirms that it does not run there.
///
/// # Errors
/// When it was not handed over, or cannot run here.
pub async fn break_move(home: &Home, name: &ImageName, args: &MigrateArgs) -> Result<()> {
    let records = home.machines();
    let Some(known) = records.load(name)? else {
        return Err(failure::refused(format!(
            "no machine called {name} has moved; see `drover migrate --list`"
        )));
    };
    let Some(Move::Committed(_, to)) = &known.under_way else {
        return Err(failure::refused(format!(
            "{name} is not being handed over: there is nothing to break; see `drover migrate --list`"
        )));
    };
    let peer = clean(&to.name);
    prompt::confirm(
        &format!(
            "{name} was handed over to {peer}, and must not run there, now or later. Let it run here?"
        ),
        args.yes,
    )?;
    if !stop_mover(&records, name).await? {
        bail!("the process that moves {name} does not end; see `drover migrate --list`");
    }
    let recorded = known.hypervisor.as_deref();
    let machine = if_there(home, recorded).await?;
    let work = work(home, name);
    let broken = end_move(machine, &records, name, &known, args.taken, &work).await;
    // Also if it then does not run: it is decided.
    let now = records.load(name)?;
    if now.is_some_and(|now| now != known && !matches!(now.under_way, Some(Move::Committed(..)))) {
        ended::broken(home, name, to).await;
    }
    let broken = broken.map_err(|e| failed(e, ""))?;
    if args.json {
        return out::json(&serde_json::json!({
            "event": "broken",
            "machine": name.as_str(),
            "peer": peer,
            "runs": broken.runs,
            "mounts": broken.mounts,
        }));
    }
    out::line(&said(name, &peer, recorded, &broken))
}

fn said(name: &ImageName, peer: &str, hypervisor: Option<&str>, broken: &Broken) -> String {
    let mut said = match (broken.runs, hypervisor) {
        (true, _) => format!("{name}: runs here"),
        (false, Some(hypervisor)) if hypervisor.starts_with("libvirt:") => {
            format!(
                "{name}: is this site's, and is off: `virsh start {name}` boots it from its disks"
            )
        }
        (false, hypervisor) => {
            let hypervisor = clean(hypervisor.unwrap_or("qmp:"));
            format!(
                "{name}: is this site's, and does not run ({hypervisor}): start its QEMU as before, which boots it from its disks"
            )
        }
    };
    for mount in &broken.mounts {
        said += &format!(
            "\n{name}: the write lease of {mount} may be {peer}'s: revoke it at the site that has the image (`drover mounts break`), and mount it again"
        );
    }
    said
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_said_how_what_does_not_run_is_started() {
        let name = ImageName::new("web").unwrap();
        let said = |hypervisor: &str, runs, mounts: &[&str]| {
            let mounts = mounts.iter().map(ToString::to_string).collect();
            said(&name, "lyon", Some(hypervisor), &Broken { runs, mounts })
        };
        assert_eq!(said("qmp:/run/web.qmp", true, &[]), "web: runs here");
        let ended = said("qmp:/run/web.qmp", false, &["paris:web.raw"]);
        assert!(ended.contains("start its QEMU as before"), "{ended}");
        assert!(ended.contains("paris:web.raw may be lyon's"), "{ended}");
        let off = said("libvirt:web", false, &[]);
        assert!(off.contains("virsh start web"), "{off}");
    }
}
