//! `migrate --break`: a machine runs on here whose destination, or source, is lost for good.

use anyhow::{Result, bail};
use drover_agent::error::{Error, one_line};
use drover_agent::home::Home;
use drover_agent::machines::{BreakMachine, GetMissing};
use drover_agent::remote::Call;
use drover_agent::site;
use drover_agent::text::{bytes, clean};
use drover_core::ImageName;
use drover_migrate::{Broken, MigrateError, NoAnswer, ask_once, break_move as end_move};
use drover_net::PeerKey;
use drover_store::machine::{Decision, MachineRecord, Move, Other};
use drover_teleport::SendOptions;
use serde_json::json;

use super::ended;
use super::under_way::{failed, if_there, stop_mover, work};
use crate::cli::MigrateArgs;
use crate::failure;
use crate::out;
use crate::prompt;

/// Lets a machine run here that was handed over, if the user confirms that it does not run there; ends the move of one that arrives
/// here from a site that is lost.
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
    let to = match &known.under_way {
        Some(Move::Committed(_, to)) => to,
        Some(Move::Partial(_, from)) => return give_up_rest(home, name, from, args).await,
        _ => {
            return Err(failure::refused(format!(
                "{name} is not being handed over: there is nothing to break; see `drover migrate --list`"
            )));
        }
    };
    let peer = clean(&to.name);
    prompt::confirm(
        &format!(
            "{name} was handed over to {peer}, and must not run there, now or later. Let it run here?"
        ),
        args.yes,
    )?;
    let is_refused = match ask(home, name, &known, to).await? {
        Ok(Decision::Taken) => {
            return Err(failure::refused(format!(
                "{peer} answers, and has taken {name}: migrate it there again to go on, or move it back from there; only if {peer} is lost for good, with all that {name} wrote there, stop its site first"
            )));
        }
        Ok(decision) => decision == Decision::Refused,
        Err(NoAnswer::Unsaid(e)) => {
            return Err(failure::refused(format!(
                "{peer} answers, and may have {name}: {}: wait until it says what it decided, and run the same command again; only if {peer} is lost for good, stop its site first, or what takes connections at its address",
                one_line(&e)
            )));
        }
        Err(NoAnswer::Unreached(e)) => {
            out::note(&format!("{peer} does not answer: {}", one_line(&e)));
            false
        }
    };
    if !stop_mover(&records, name).await? {
        bail!("the process that moves {name} does not end; see `drover migrate --list`");
    }
    if is_refused && records.load(name)?.is_some_and(|now| now.may_run()) {
        // The command that moved it has heard that, too.
        if args.json {
            return out::json(&json!({"event": "aborted", "machine": name.as_str()}));
        }
        return out::line(&format!("{name}: stays here: {peer} had not taken it"));
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
        return out::json(&json!({
            "event": "broken",
            "machine": name.as_str(),
            "peer": peer,
            "runs": broken.runs,
            "mounts": broken.mounts,
        }));
    }
    out::line(&said(name, &peer, recorded, &broken))
}

/// Asks the destination what it decided, or why it does not say.
///
/// # Errors
/// When this site cannot ask.
async fn ask(
    home: &Home,
    name: &ImageName,
    known: &MachineRecord,
    to: &Other,
) -> Result<Result<Decision, NoAnswer>> {
    let peers = site::open_catalog(home)?.peers()?;
    let Some(peer) = peers.into_iter().find(|peer| peer.key == PeerKey(to.key)) else {
        let text = format!("{} is no peer any more", clean(&to.name));
        return Ok(Err(NoAnswer::Unreached(MigrateError::Unsupported(text))));
    };
    let send = SendOptions::to_peer(home.identity()?, &peer);
    Ok(ask_once(&send, name, known).await)
}

/// Ends the move of a machine that runs here, and some of whose disks is at a site that is lost for good.
async fn give_up_rest(
    home: &Home,
    name: &ImageName,
    from: &Other,
    args: &MigrateArgs,
) -> Result<()> {
    let peer = clean(&from.name);
    let Some(call) = Call::local(home).await? else {
        return Err(failure::refused(format!(
            "the site does not run, which has the disks of {name}: start it with `drover serve`"
        )));
    };
    let missing = GetMissing { name: name.clone() };
    let left = match call.ask(&missing, |()| {}).await? {
        Some(left) => bytes(left),
        None => "some".into(),
    };
    prompt::confirm(
        &format!(
            "{name} runs here, and {left} of its disks is at {peer} still. Is {peer} lost for good? Then that is lost: reading it fails, until it is written over"
        ),
        args.yes,
    )?;
    let ask = BreakMachine { name: name.clone() };
    let call = Call::local(home).await?;
    let call = call.ok_or_else(|| Error::msg("the site has just been stopped"))?;
    let kept = call.ask(&ask, |()| {}).await?;
    ended::given_up(home, name, from, kept.lost_bytes);
    if args.json {
        return out::json(&json!({
            "event": "given-up",
            "machine": name.as_str(),
            "peer": peer,
            "runs": kept.runs,
            "lost_bytes": kept.lost_bytes,
        }));
    }
    let mut said = match kept.runs {
        true => format!("{name}: runs here"),
        false => format!("{name}: is here, and has to be started by hand"),
    };
    said += &match kept.lost_bytes {
        Some(0) => String::new(),
        Some(lost) => format!(
            "; {} of its disks is lost: reading it fails, until it is written over",
            bytes(lost)
        ),
        None => "; it is not known what of its disks had not arrived, since their write lease was revoked: check them".into(),
    };
    out::line(&said)
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
