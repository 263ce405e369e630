//! `init`, `ticket`, `pair` and `peers`: the identity of a site and its peers.

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use drover_agent::home::{Chosen, CleanUp, Home};
use drover_agent::pairing::{self, NewTicket};
use drover_agent::remote::find_peer;
use drover_agent::site;
use drover_agent::text::{clean, moment};
use serde_json::json;

use crate::cli::{InitArgs, PairArgs, PeersAction, PeersArgs, TicketArgs};
use crate::failure::usage;
use crate::{out, prompt};

/// Creates a site directory.
///
/// # Errors
/// When it cannot be created, or options would change an existing configuration.
pub fn init(dir: PathBuf, args: InitArgs) -> Result<()> {
    let chosen = Chosen {
        name: args.name,
        listen: args.listen,
        images: args.images,
    };
    let (home, fresh) = Home::init(dir, &chosen)?;
    site::open_catalog(&home)?;
    home.try_keep_reserve();
    let key = home.identity()?.key();
    if args.json {
        return out::json(&json!({
            "home": home.dir(), "key": key.to_string(), "name": home.name(), "new": fresh,
        }));
    }
    let what = if fresh {
        "created"
    } else {
        "already initialized as"
    };
    out::line(&format!(
        "{}: {what} site {}, key {key}",
        home.dir().display(),
        home.name()
    ))?;
    if fresh {
        out::note(&format!(
            "drover: the settings are in {}; `drover serve` starts the site",
            home.dir().join("config.toml").display()
        ));
    }
    Ok(())
}

/// Prints a new ticket.
///
/// # Errors
/// When the catalog or the file cannot be written, no address is known, or other users could read what it is printed to.
pub fn ticket(home: &Home, args: TicketArgs) -> Result<()> {
    match &args.out {
        Some(path) => check_new(path, args.force)?,
        None if out::is_readable_by_others() => {
            return Err(usage(
                "cannot print the ticket: stdout is a file that other users can read: use --out FILE",
            ));
        }
        None => {}
    }
    let NewTicket {
        ticket,
        expires_unix,
        site_runs,
    } = pairing::new_ticket(home, &args.advertise, args.expires)?;
    if !site_runs {
        out::note(&format!(
            "drover: no site is running in {}; start it with `drover serve` before the ticket is used",
            home.dir().display()
        ));
    }
    if args.json {
        return out::json(&json!({
            "ticket": ticket.to_string(), "addresses": ticket.addresses, "expires_unix": expires_unix,
        }));
    }
    match &args.out {
        Some(path) => {
            pairing::save_ticket(&ticket, path, args.force)?;
            out::note(&format!("drover: the ticket is in {}", path.display()));
            Ok(())
        }
        None => out::line(&ticket.to_string()),
    }
}

/// Refuses to write a ticket over a file, unless it may be replaced.
fn check_new(path: &Path, force: bool) -> Result<()> {
    match path.symlink_metadata() {
        Ok(found) if !found.is_file() => Err(usage(format!(
            "{} exists and is not a regular file: choose another path",
            path.display()
        ))),
        Ok(_) if !force => Err(usage(format!(
            "{} exists: --force replaces it",
            path.display()
        ))),
        _ => Ok(()),
    }
}

/// Pairs with the site that made the ticket.
///
/// # Errors
/// When the ticket is damaged (usage error) or refused, or its site cannot be reached.
pub async fn pair(home: &Home, args: PairArgs) -> Result<()> {
    let ticket = match args.ticket {
        Some(ticket) if ticket != "-" => ticket,
        _ => prompt::secret("ticket")?,
    };
    let paired = pairing::pair(home, &ticket, args.name).await?;
    let (name, key) = (paired.name, paired.key);
    let calls_itself = clean(&paired.calls_itself);
    if args.json {
        return out::json(
            &json!({"name": name, "key": key.to_string(), "calls_itself": calls_itself}),
        );
    }
    out::line(&format!(
        "paired with {name} (key {}, calls itself {calls_itself})",
        key.short()
    ))
}

/// Lists peers, or removes one.
///
/// # Errors
/// When the catalog cannot be read, or there is no such peer.
pub fn peers(home: &Home, args: PeersArgs) -> Result<()> {
    let mut room = CleanUp::of(home);
    let catalog = match args.action {
        Some(PeersAction::Forget { .. }) => room.run(|| site::open_catalog(home))?,
        _ => site::look_at_catalog(home)?,
    };
    let json = match args.action {
        None => args.json,
        Some(PeersAction::List { json }) => json,
        Some(PeersAction::Forget { name, yes, json }) => {
            let peer = find_peer(&catalog, &name)?;
            prompt::confirm(
                &format!("Stop trusting {name} (key {})?", peer.key.short()),
                yes,
            )?;
            if room.run(|| Ok(catalog.forget_peer(&name)?))?.is_none() {
                bail!("{name} was removed by another command");
            }
            if json {
                let key = peer.key.to_string();
                return out::json(&json!({"name": name, "key": key, "forgotten": true}));
            }
            return out::line(&format!(
                "{name} is no longer trusted: it cannot connect until it pairs again"
            ));
        }
    };
    for misnamed in pairing::misnamed(&catalog)? {
        out::note(&format!("drover: {misnamed}"));
    }
    let peers = catalog.peers()?;
    if json {
        for p in peers {
            out::json(&json!({
                "name": p.name, "key": p.key.to_string(), "addresses": p.addresses, "paired_unix": p.paired_unix,
            }))?;
        }
        return Ok(());
    }
    if peers.is_empty() {
        out::note("drover: no peers; `drover pair --name NAME` adds one");
        return Ok(());
    }
    let rows = peers
        .into_iter()
        .map(|p| {
            let addresses = if p.addresses.is_empty() {
                "-".into()
            } else {
                clean(&p.addresses.join(", "))
            };
            vec![p.name, p.key.short(), moment(p.paired_unix), addresses]
        })
        .collect();
    out::line(&out::table(
        &["name", "key", "paired (UTC)", "addresses"],
        rows,
        &[],
    ))
}
