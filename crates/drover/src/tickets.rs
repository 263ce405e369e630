//! `ticket`: makes tickets for pairing, lists them and revokes them.

use std::path::Path;

use anyhow::Result;
use drover_agent::audit::{Event, Record};
use drover_agent::home::{CleanUp, Home};
use drover_agent::pairing::{self, NewTicket};
use drover_agent::site;
use drover_agent::text::{moment, now_unix};
use drover_store::{Grant, TicketInfo};
use serde_json::json;

use crate::cli::TicketArgs;
use crate::failure::{refused, usage};
use crate::out;
use crate::peers::{columns_of, json_of};

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
    home.domain(&args.domain)?;
    let grant = Grant {
        rights: args.can,
        domain: args.domain,
        quota_bytes: args.quota.0,
    };
    let name = args.name.unwrap_or_default();
    let NewTicket {
        ticket,
        expires_unix,
        site_runs,
    } = pairing::new_ticket(home, &args.advertise, args.expires, &grant, &name)?;
    if !site_runs {
        out::note(&format!(
            "drover: no site is running in {}; start it with `drover serve` before the ticket is used",
            home.dir().display()
        ));
    }
    if args.json {
        let mut shown = json_of(&grant);
        shown["ticket"] = ticket.to_string().into();
        shown["addresses"] = ticket.addresses.into();
        shown["expires_unix"] = expires_unix.into();
        shown["name"] = name.into();
        return out::json(&shown);
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

/// Lists the tickets of this site.
///
/// # Errors
/// When the catalog cannot be read.
pub fn list(home: &Home, json: bool) -> Result<()> {
    let catalog = site::look_at_catalog(home)?;
    let peers = catalog.peers()?;
    let now = now_unix();
    let used_by = |ticket: &TicketInfo| {
        ticket.used_by.map(|key| {
            let peer = peers.iter().find(|peer| peer.key == key);
            peer.map_or_else(|| key.short(), |peer| peer.name.clone())
        })
    };
    let tickets = catalog.tickets()?;
    if json {
        for ticket in &tickets {
            let mut shown = json_of(&ticket.grant);
            shown["id"] = ticket.id.clone().into();
            shown["created_unix"] = ticket.created_unix.into();
            shown["expires_unix"] = ticket.expires_unix.into();
            shown["state"] = state(ticket, now).into();
            shown["used_by"] = used_by(ticket).into();
            shown["name"] = ticket.name.clone().into();
            out::json(&shown)?;
        }
        return Ok(());
    }
    if tickets.is_empty() {
        out::note("drover: no tickets; `drover ticket` makes one");
        return Ok(());
    }
    let rows = tickets.iter().map(|ticket| {
        let [can, domain, quota] = columns_of(&ticket.grant);
        let name = match ticket.name.as_str() {
            "" => "-".into(),
            name => name.to_owned(),
        };
        let state = match used_by(ticket) {
            Some(peer) => format!("used by {peer}"),
            None => state(ticket, now).into(),
        };
        let expires = moment(ticket.expires_unix);
        vec![ticket.id.clone(), name, can, domain, quota, expires, state]
    });
    let headings = [
        "id",
        "name",
        "can",
        "domain",
        "quota",
        "expires (UTC)",
        "state",
    ];
    out::line(&out::table(&headings, rows.collect(), &[]))
}

/// `used`, `expired` or `valid`.
fn state(ticket: &TicketInfo, now_unix: i64) -> &'static str {
    match ticket {
        TicketInfo {
            used_by: Some(_), ..
        } => "used",
        ticket if ticket.expires_unix <= now_unix => "expired",
        _ => "valid",
    }
}

/// Makes a ticket invalid.
///
/// # Errors
/// When there is none with this ID, or the catalog cannot be written.
pub fn revoke(home: &Home, id: &str, json: bool) -> Result<()> {
    let mut room = CleanUp::of(home);
    let catalog = room.run(|| site::open_catalog(home))?;
    let Some(ticket) = room.run(|| Ok(catalog.revoke_ticket(id)?))? else {
        return Err(refused(format!(
            "no ticket has the ID {id:?}; `drover ticket --list` lists them"
        )));
    };
    let record = Record::new(Event::TicketRevoked).ticket(&ticket.id);
    home.audit().write(record.in_domain(&ticket.grant.domain));
    if json {
        return out::json(&json!({"id": ticket.id, "revoked": true}));
    }
    match ticket.used_by {
        None => out::line(&format!("{} is no longer valid", ticket.id)),
        Some(_) => out::line(&format!(
            "{} was used already: `drover peers forget` ends the trust in its peer",
            ticket.id
        )),
    }
}
