//! `init`, `ticket`, `pair` and `peers`: the identity of a site and its peers.

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use drover_agent::home::{CleanUp, Config, Home};
use drover_agent::remote::{Call, find_peer};
use drover_agent::serve::Pair;
use drover_agent::text::{clean, moment, now_unix};
use drover_agent::{addresses, site};
use drover_net::{ConnectOptions, Ticket, connect_any};
use drover_store::{Peer, peer_name};
use serde_json::json;

use crate::cli::{InitArgs, PairArgs, PeersAction, PeersArgs, TicketArgs};
use crate::failure::usage;
use crate::{out, prompt};

/// Creates a site directory.
///
/// # Errors
/// When it cannot be created, or options would change an existing configuration.
pub fn init(dir: PathBuf, args: InitArgs) -> Result<()> {
    let path = dir.join("config.toml");
    let chosen = args.name.is_some() || args.images.is_some() || args.listen.is_some();
    if path.exists() && chosen {
        return Err(usage(format!(
            "{} exists already: edit it to change the settings",
            path.display()
        )));
    }
    let fresh = !dir.join("identity.key").exists();
    if !path.exists() {
        // First, since it decides where images go.
        Home::make_bare(&dir)?;
        let text = configured(&args)?;
        drover_storage::atomic_replace(&path, text.as_bytes())
            .with_context(|| format!("cannot write {}", path.display()))?;
    }
    let home = Home::create(dir)?;
    let identity = home.identity()?;
    site::open_catalog(&home)?;
    home.try_keep_reserve();
    if args.json {
        return out::json(&json!({
            "home": home.dir(), "key": identity.key().to_string(), "name": home.name(), "new": fresh,
        }));
    }
    let what = if fresh { "created" } else { "is already" };
    out::line(&format!(
        "{}: {what} site {}, key {}",
        home.dir().display(),
        home.name(),
        identity.key()
    ))?;
    if fresh {
        out::note(&format!(
            "drover: the settings are in {}; `drover serve` starts the site",
            path.display()
        ));
    }
    Ok(())
}

/// The template with the chosen settings enabled.
fn configured(args: &InitArgs) -> Result<String> {
    let mut chosen = Vec::new();
    if let Some(name) = &args.name {
        chosen.push(("name", toml::Value::String(name.clone())));
    }
    if let Some(listen) = &args.listen {
        chosen.push(("listen", toml::Value::String(listen.to_string())));
    }
    if let Some(images) = &args.images {
        let images = std::path::absolute(images)?;
        let text = images
            .to_str()
            .context("--images: the path must be UTF-8")?;
        chosen.push(("images", toml::Value::String(text.into())));
    }
    let mut text = String::new();
    for line in Config::TEMPLATE.lines() {
        match chosen
            .iter()
            .find(|(key, _)| line.starts_with(&format!("#{key} = ")))
        {
            Some((key, value)) => text.push_str(&format!("{key} = {value}\n")),
            None => text.push_str(&format!("{line}\n")),
        }
    }
    Ok(text)
}

/// Prints a new ticket.
///
/// # Errors
/// When the catalog cannot be written, or no address is known.
pub fn ticket(home: &Home, args: TicketArgs) -> Result<()> {
    let identity = home.identity()?;
    let mut room = CleanUp::of(home);
    let catalog = room.run(|| site::open_catalog(home))?;
    let addresses = addresses::for_ticket(home, &catalog, &args.advertise)?;
    let ticket = Ticket::new(identity.key(), addresses.iter().cloned());
    let now = now_unix();
    room.run(|| Ok(catalog.add_ticket(&ticket.secret, now, args.expires)?))?;
    if home.used_by()?.is_none() {
        out::note(&format!(
            "drover: no site is running in {}; start it with `drover serve` before the ticket is used",
            home.dir().display()
        ));
    }
    if args.json {
        let expires = now.saturating_add(i64::try_from(args.expires.as_secs()).unwrap_or(i64::MAX));
        return out::json(&json!({
            "ticket": ticket.to_string(), "addresses": ticket.addresses, "expires_unix": expires,
        }));
    }
    out::line(&ticket.to_string())
}

/// Pairs with the site that made the ticket.
///
/// # Errors
/// When the ticket is damaged (usage error) or refused, or its site cannot be reached.
pub async fn pair(home: &Home, args: PairArgs) -> Result<()> {
    let ticket: Ticket = args
        .ticket
        .trim()
        .parse()
        .map_err(|e: drover_net::TicketError| usage(e.to_string()))?;
    let identity = home.identity()?;
    if ticket.key == identity.key() {
        return Err(usage(
            "the ticket is from this site; use it at the other site",
        ));
    }
    if ticket.addresses.is_empty() {
        return Err(usage(
            "the ticket has no address; print one with `drover ticket --advertise HOST` at the other site",
        ));
    }
    let catalog = site::open_catalog(home)?;
    // Check the name before the ticket is used up.
    if let Some(name) = &args.name
        && catalog.peer(name)?.is_some_and(|p| p.key != ticket.key)
    {
        return Err(usage(format!(
            "--name {name}: another peer has this name; choose another name, or run `drover peers forget {name}` first"
        )));
    }
    let shown = args
        .name
        .clone()
        .unwrap_or_else(|| "the site of the ticket".into());
    let options = ConnectOptions::named(&shown);
    let connection = connect_any(&ticket.addresses, &identity, &ticket.key, &options).await?;
    let request = Pair {
        secret: ticket.secret,
        name: home.name(),
        addresses: addresses::saved(&catalog)?,
    };
    let call = Call::on(connection, &shown);
    let calls_itself = call.ask(&request, |()| {}).await?;
    let name = match args.name {
        Some(name) => name,
        None => {
            let known = catalog.peers()?;
            let taken = |n: &str| known.iter().any(|p| p.name == n && p.key != ticket.key);
            peer_name::unique(&peer_name::from_untrusted(&calls_itself), taken)
        }
    };
    home.try_keep_reserve();
    catalog.put_peer(&Peer {
        name: name.clone(),
        key: ticket.key,
        addresses: ticket.addresses,
        paired_unix: now_unix(),
    })?;
    if args.json {
        return out::json(
            &json!({"name": name, "key": ticket.key.to_string(), "calls_itself": clean(&calls_itself)}),
        );
    }
    out::line(&format!(
        "paired with {name} (key {}, calls itself {})",
        ticket.key.short(),
        clean(&calls_itself)
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
        Some(PeersAction::Forget { name, yes }) => {
            let peer = find_peer(&catalog, &name)?;
            prompt::confirm(
                &format!("Stop trusting {name} (key {})?", peer.key.short()),
                yes,
            )?;
            if room.run(|| Ok(catalog.forget_peer(&name)?))?.is_none() {
                bail!("{name} was removed by another command");
            }
            return out::line(&format!(
                "removed peer {name}; it cannot connect until it pairs again"
            ));
        }
    };
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
        out::note("drover: no peers; `drover pair TICKET --name NAME` adds one");
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn init_enables_the_chosen_settings() {
        let args = InitArgs {
            name: Some("lyon".into()),
            images: Some("/srv/\"odd\"".into()),
            listen: Some("127.0.0.1:9".parse().unwrap()),
            json: false,
        };
        let tmp = tempfile::tempdir().unwrap();
        let path = tmp.path().join("config.toml");
        std::fs::write(&path, configured(&args).unwrap()).unwrap();
        let config = Config::load(&path).unwrap();
        assert_eq!(config.name.as_deref(), Some("lyon"));
        assert_eq!(config.images, Some("/srv/\"odd\"".into()));
        assert_eq!(config.listen().port(), 9);
        assert!(config.limit.is_none());
    }
}
