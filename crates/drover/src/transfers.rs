//! `transfers`: unfinished transfers, here and at peers.

use anyhow::Result;
use drover_agent::home::Home;
use drover_agent::text::{bytes, clean, moment};
use drover_agent::transfers;
use drover_teleport::{TransferState, Unfinished};
use serde_json::{Value, json};

use crate::cli::{TransfersAction, TransfersArgs, TransfersRmArgs};
use crate::failure::{refused, usage};
use crate::{out, prompt};

/// `drover transfers`.
///
/// # Errors
/// When they cannot be listed or removed.
pub async fn transfers(home: &Home, args: TransfersArgs) -> Result<()> {
    match args.action {
        None => list(home, args.peer.as_deref(), args.json).await,
        Some(TransfersAction::List { peer, json }) => list(home, peer.as_deref(), json).await,
        Some(TransfersAction::Rm(args)) => rm(home, args).await,
    }
}

async fn list(home: &Home, peer: Option<&str>, json: bool) -> Result<()> {
    let list = transfers::listed(home, peer).await?;
    if json {
        return list.iter().map(object).try_for_each(|o| out::json(&o));
    }
    if list.is_empty() {
        let place = peer.map(|p| format!(" at {p}")).unwrap_or_default();
        out::note(&format!("drover: no unfinished transfers{place}"));
        return Ok(());
    }
    let rows = list
        .iter()
        .map(|t| {
            vec![
                clean(&t.name),
                clean(&t.peer),
                bytes(t.done_bytes),
                bytes(t.total_bytes),
                moment(t.touched_unix),
                bytes(t.room_bytes),
                state(t.state).into(),
            ]
        })
        .collect();
    let heading = [
        "name",
        "from",
        "done",
        "of",
        "last active (UTC)",
        "on disk",
        "state",
    ];
    out::line(&out::table(&heading, rows, &[2, 3, 5]))
}

fn state(state: TransferState) -> &'static str {
    match state {
        TransferState::Stopped => "interrupted",
        TransferState::UnderWay => "in progress",
        TransferState::Whole => "complete, delivered when the site starts",
        TransferState::Damaged => "damaged, removed when the site starts",
    }
}

fn object(t: &Unfinished) -> Value {
    json!({
        "key": t.key, "name": t.name, "from": t.peer, "state": t.state, "done_bytes": t.done_bytes,
        "total_bytes": t.total_bytes, "room_bytes": t.room_bytes, "touched_unix": t.touched_unix,
    })
}

async fn rm(home: &Home, args: TransfersRmArgs) -> Result<()> {
    let at = args.at.as_deref();
    let list = transfers::listed(home, at).await?;
    let chosen = choose(&list, &args)?;
    let descriptions: Vec<String> = chosen.iter().map(|t| describe(t, at)).collect();
    if args.dry_run {
        return chosen
            .iter()
            .zip(&descriptions)
            .try_for_each(|(t, what)| match args.json {
                true => out::json(&removed(t, false)),
                false => out::line(&format!("would remove {what}")),
            });
    }
    prompt::confirm(
        &format!(
            "Remove {}? Sending the image again then starts from the beginning",
            descriptions.join(", ")
        ),
        args.yes,
    )?;
    for (transfer, what) in chosen.iter().zip(descriptions) {
        transfers::remove(home, at, transfer).await?;
        match args.json {
            true => out::json(&removed(transfer, true))?,
            false => out::line(&format!("removed {what}"))?,
        }
    }
    Ok(())
}

fn removed(t: &Unfinished, gone: bool) -> Value {
    let mut object = object(t);
    object["removed"] = gone.into();
    object
}

fn describe(t: &Unfinished, at: Option<&str>) -> String {
    let whose = match at {
        Some(peer) => format!("to {peer}"),
        None => format!("from {}", clean(&t.peer)),
    };
    format!(
        "the transfer of {} {whose} ({} of {})",
        clean(&t.name),
        bytes(t.done_bytes),
        bytes(t.total_bytes)
    )
}

/// The transfers named: by key first, else by image name if only one transfer has it.
fn choose<'a>(list: &'a [Unfinished], args: &TransfersRmArgs) -> Result<Vec<&'a Unfinished>> {
    let mut out: Vec<&Unfinished> = Vec::new();
    for name in &args.names {
        let by_key = list.iter().find(|t| t.key == *name);
        let found: Vec<&Unfinished> = match by_key {
            Some(transfer) => vec![transfer],
            None => list.iter().filter(|t| t.name == *name).collect(),
        };
        match found[..] {
            [] => {
                let (place, how) = match &args.at {
                    Some(peer) => (
                        format!("this site has no unfinished transfer to {peer}"),
                        format!("see `drover transfers {peer}`"),
                    ),
                    None => (
                        "this site has no unfinished transfer".into(),
                        "see `drover transfers`".into(),
                    ),
                };
                let message = format!("{place} of {name}; {how}");
                return Err(refused(message));
            }
            [one] if out.iter().any(|t| t.key == one.key) => {}
            [one] => out.push(one),
            ref several => {
                let keys: Vec<String> = several
                    .iter()
                    .map(|t| format!("{} from {}", t.key, t.peer))
                    .collect();
                return Err(usage(format!(
                    "several transfers are of {name}; choose one by its key: {}",
                    keys.join(", ")
                )));
            }
        }
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use drover_net::PeerKey;

    fn transfer(key: &str, name: &str) -> Unfinished {
        Unfinished {
            key: key.into(),
            name: name.into(),
            peer: "lyon".into(),
            sender: PeerKey([1; 32]),
            state: TransferState::Stopped,
            done_bytes: 1,
            total_bytes: 2,
            room_bytes: 3,
            touched_unix: 4,
        }
    }

    #[test]
    fn keys_come_before_names_and_names_must_be_unique() {
        // An image whose name is the key of another.
        let list = [
            transfer("aa", "web"),
            transfer("bb", "aa"),
            transfer("cc", "db"),
            transfer("dd", "db"),
        ];
        let args = |names: &[&str]| TransfersRmArgs {
            names: names.iter().map(ToString::to_string).collect(),
            at: None,
            yes: false,
            dry_run: false,
            json: false,
        };
        let keys = |names: &[&str]| {
            let chosen = choose(&list, &args(names));
            chosen.map(|c| c.iter().map(|t| t.key.clone()).collect::<Vec<_>>())
        };
        assert_eq!(keys(&["aa"]).unwrap(), ["aa"]);
        assert_eq!(keys(&["web", "aa", "dd"]).unwrap(), ["aa", "dd"]);
        let several = keys(&["db"]).unwrap_err().to_string();
        assert!(several.contains("cc from lyon, dd from lyon"), "{several}");
        let none = keys(&["gone"]).unwrap_err().to_string();
        assert!(none.contains("gone; see `drover transfers`"), "{none}");
    }
}
