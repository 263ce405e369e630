//! `pair` and `peers`: the sites that this one knows, and what they may do here.

use anyhow::{Result, bail};
use drover_agent::audit::{Event, Record, grant_text};
use drover_agent::home::{CleanUp, Home};
use drover_agent::machines::check_not_handed_over;
use drover_agent::pairing;
use drover_agent::site;
use drover_agent::site::find_peer;
use drover_agent::text::{bytes, clean, moment};
use drover_net::Right;
use drover_store::{Grant, Peer};
use serde_json::{Value, json};

use crate::cli::{PairArgs, PeersAction, PeersArgs};
use crate::{out, prompt};

/// Pairs with the site that made the ticket.
///
/// # Errors
/// When the ticket is damaged (usage error) or refused, or its site cannot be reached.
pub async fn pair(home: &Home, args: PairArgs) -> Result<()> {
    let ticket = match args.ticket {
        Some(ticket) if ticket != "-" => ticket,
        _ => prompt::secret("ticket")?,
    };
    let paired = pairing::pair(home, &ticket, args.name, args.can).await?;
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

/// Lists peers, changes what one may do, or removes one.
///
/// # Errors
/// When the catalog cannot be read or written, or there is no such peer.
pub fn peers(home: &Home, args: PeersArgs) -> Result<()> {
    match args.action {
        None => list(home, args.json),
        Some(PeersAction::List { json }) => list(home, json),
        Some(PeersAction::Forget { name, yes, json }) => forget(home, &name, yes, json),
        Some(PeersAction::Set {
            name,
            can,
            domain,
            quota,
            json,
        }) => {
            if let Some(domain) = &domain {
                home.domain(domain)?;
            }
            set(home, &name, json, |grant| {
                grant.rights = can.unwrap_or(grant.rights);
                grant.domain = domain.clone().unwrap_or_else(|| grant.domain.clone());
                grant.quota_bytes = quota.map_or(grant.quota_bytes, |quota| quota.0);
            })
        }
    }
}

fn set(home: &Home, name: &str, json: bool, change: impl Fn(&mut Grant)) -> Result<()> {
    // Rights are also taken away on a full disk.
    let mut room = CleanUp::of(home);
    let catalog = room.run(|| site::open_catalog(home))?;
    find_peer(&catalog, name)?;
    let Some(peer) = room.run(|| Ok(catalog.change_grant(name, &change)?))? else {
        bail!("{name} was removed by another command");
    };
    let record = Record::new(Event::RightsChanged).about(name, peer.key);
    let record = record.in_domain(&peer.grant.domain);
    home.audit().write(record.detail(grant_text(&peer.grant)));
    if json {
        return out::json(&json_of_peer(&peer));
    }
    let [can, domain, quota] = columns_of(&peer.grant);
    out::line(&format!(
        "{name} can: {can}; domain {domain}; quota {quota}"
    ))
}

fn forget(home: &Home, name: &str, yes: bool, json: bool) -> Result<()> {
    let mut room = CleanUp::of(home);
    let catalog = room.run(|| site::open_catalog(home))?;
    let peer = find_peer(&catalog, name)?;
    check_not_handed_over(home, name, &peer.key)?;
    prompt::confirm(
        &format!("Stop trusting {name} (key {})?", peer.key.short()),
        yes,
    )?;
    if room.run(|| Ok(catalog.forget_peer(name)?))?.is_none() {
        bail!("{name} was removed by another command");
    }
    let record = Record::new(Event::Forgotten).about(name, peer.key);
    home.audit().write(record.in_domain(&peer.grant.domain));
    if json {
        let key = peer.key.to_string();
        return out::json(&json!({"name": name, "key": key, "forgotten": true}));
    }
    out::line(&format!(
        "{name} is no longer trusted: it cannot connect until it pairs again"
    ))
}

fn list(home: &Home, json: bool) -> Result<()> {
    let catalog = site::look_at_catalog(home)?;
    for misnamed in pairing::misnamed(&catalog)? {
        out::note(&format!("drover: {misnamed}"));
    }
    let peers = catalog.peers()?;
    if json {
        return peers.iter().try_for_each(|p| out::json(&json_of_peer(p)));
    }
    if peers.is_empty() {
        out::note("drover: no peers; `drover pair --name NAME` adds one");
        return Ok(());
    }
    let rows = peers.into_iter().map(|p| {
        let addresses = if p.addresses.is_empty() {
            "-".into()
        } else {
            clean(&p.addresses.join(", "))
        };
        let [can, domain, quota] = columns_of(&p.grant);
        let (key, paired) = (p.key.short(), moment(p.paired_unix));
        vec![p.name, key, can, domain, quota, paired, addresses]
    });
    let headings = [
        "name",
        "key",
        "can",
        "domain",
        "quota",
        "paired (UTC)",
        "addresses",
    ];
    out::line(&out::table(&headings, rows.collect(), &[]))
}

fn json_of_peer(peer: &Peer) -> Value {
    let mut shown = json_of(&peer.grant);
    shown["name"] = peer.name.clone().into();
    shown["key"] = peer.key.to_string().into();
    shown["addresses"] = peer.addresses.clone().into();
    shown["paired_unix"] = peer.paired_unix.into();
    shown
}

/// The fields of a grant.
pub fn json_of(grant: &Grant) -> Value {
    let can = Right::GIVEN
        .into_iter()
        .filter(|right| grant.rights.has(*right));
    let can = Vec::from_iter(can.map(Right::name));
    json!({"can": can, "domain": grant.domain, "quota_bytes": grant.quota_bytes})
}

/// A grant in the columns CAN, DOMAIN and QUOTA.
pub fn columns_of(grant: &Grant) -> [String; 3] {
    let quota = grant.quota_bytes.map_or_else(|| "none".into(), bytes);
    [grant.rights.to_string(), grant.domain.clone(), quota]
}
