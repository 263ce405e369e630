//! Pairing with other sites: making a ticket, and redeeming another site's.

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::Duration;

use drover_net::{ConnectOptions, PeerKey, Rights, Ticket, TicketError, connect_any};
use drover_storage::atomic_replace;
use drover_store::{Grant, Peer, SiteCatalog, TICKET_LIFETIME, peer_name, ticket_id};

use crate::addresses;
use crate::audit::{Event, Record, grant_text};
use crate::error::{Context, Error, Result, one_line};
use crate::home::{CleanUp, Home};
use crate::remote::Call;
use crate::serve::Pair;
use crate::site;
use crate::text::now_unix;

/// A new ticket.
#[derive(Debug)]
pub struct NewTicket {
    /// The ticket.
    pub ticket: Ticket,
    /// When it expires, seconds since 1970.
    pub expires_unix: i64,
    /// Whether a site runs here that can accept it.
    pub site_runs: bool,
}

/// Makes a single-use ticket, valid for `lifetime`: its peer gets the grant, and the name unless it is empty. It contains the
/// addresses in `advertise`, or else the known ones.
///
/// # Errors
/// When the catalog cannot be written, or no address is known.
pub fn new_ticket(
    home: &Home,
    advertise: &[String],
    lifetime: Duration,
    grant: &Grant,
    name: &str,
) -> Result<NewTicket> {
    let identity = home.identity()?;
    let mut room = CleanUp::of(home);
    let catalog = room.run(|| site::open_catalog(home))?;
    let addresses = addresses::for_ticket(home, &catalog, advertise)?;
    let ticket = Ticket::new(identity.key(), addresses);
    let now = now_unix();
    room.run(|| Ok(catalog.add_ticket(&ticket.secret, grant, name, now, lifetime)?))?;
    let made = Record::new(Event::TicketMade).ticket(&ticket_id(&ticket.secret));
    let made = made.in_domain(&grant.domain).detail(grant_text(grant));
    home.audit().write(match name {
        "" => made,
        name => Record {
            peer: Some(name.to_owned()),
            ..made
        },
    });
    let seconds = i64::try_from(lifetime.as_secs()).unwrap_or(i64::MAX);
    Ok(NewTicket {
        ticket,
        expires_unix: now.saturating_add(seconds),
        site_runs: home.used_by()?.is_some(),
    })
}

/// The ticket that a server shows when it starts: that of an earlier start while it is good, else a new one, which gives
/// `grant`. It is kept in a file of the home, since the catalog has only the hash of its secret.
///
/// # Errors
/// When the catalog cannot be written.
pub(crate) fn ticket_of_server(
    home: &Home,
    catalog: &SiteCatalog,
    addresses: &[String],
    grant: &Grant,
) -> Result<ShownTicket> {
    let path = home.dir().join("serve.ticket");
    let new = Ticket::new(home.identity()?.key(), addresses.iter().cloned());
    let now = now_unix();
    let before = std::fs::read_to_string(&path).ok();
    let before: Option<Ticket> = before.and_then(|text| text.trim().parse().ok());
    if let Some(before) = before
        && let Some(info) = catalog.ticket(&before.secret)?
        && (info.used_by, info.expires_unix > now) == (None, true)
        && (&info.grant, info.name.as_str()) == (grant, "")
    {
        // The addresses may be others now.
        let ticket = Ticket {
            secret: before.secret,
            ..new
        };
        return Ok(ShownTicket {
            ticket,
            expires_unix: info.expires_unix,
        });
    }
    catalog.add_ticket(&new.secret, grant, "", now, TICKET_LIFETIME)?;
    let made = Record::new(Event::TicketMade).by_site();
    let made = made.ticket(&ticket_id(&new.secret));
    home.audit().write(made.detail(grant_text(grant)));
    if let Err(e) = save_ticket(&new, &path, true) {
        tracing::warn!("{}: the next start makes another ticket", one_line(&e));
    }
    Ok(ShownTicket {
        ticket: new,
        expires_unix: now.saturating_add(i64::try_from(TICKET_LIFETIME.as_secs()).unwrap_or(0)),
    })
}

/// A ticket that a server shows.
#[derive(Debug)]
pub struct ShownTicket {
    /// The ticket.
    pub ticket: Ticket,
    /// When it expires, seconds since 1970.
    pub expires_unix: i64,
}

/// Writes a ticket to a file that only this user can read. A file in its place is an error, unless it may be replaced.
///
/// # Errors
/// When the file cannot be written.
pub fn save_ticket(ticket: &Ticket, path: &Path, may_replace: bool) -> Result<()> {
    let text = format!("{ticket}\n");
    let saved = match may_replace {
        true => atomic_replace(path, text.as_bytes()),
        false => File::options()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(path)
            .and_then(|mut file| file.write_all(text.as_bytes())),
    };
    saved.with_context(|| format!("cannot write {}", path.display()))
}

/// A newly paired site.
#[derive(Debug)]
pub struct Paired {
    /// Its name here.
    pub name: String,
    /// Its key.
    pub key: PeerKey,
    /// The name that it announces: untrusted text.
    pub calls_itself: String,
}

/// Pairs with the site that made the ticket, under `name` or the name that it announces. That site may then do here what
/// `can` says; without any right in it, what it could do before: nothing if it was not a peer. A known peer stays in its domain, with
/// its quota.
///
/// # Errors
/// When the ticket is damaged (usage error) or refused, or its site cannot be reached.
pub async fn pair(home: &Home, ticket: &str, name: Option<String>, can: Rights) -> Result<Paired> {
    let ticket = ticket.trim().parse();
    let ticket: Ticket = ticket.map_err(|e: TicketError| Error::usage(e.to_string()))?;
    let identity = home.identity()?;
    if ticket.key == identity.key() {
        let text = "the ticket is from this site; use it at the other site";
        return Err(Error::usage(text));
    }
    if ticket.addresses.is_empty() {
        let text =
            "the ticket has no address; make another at its site, with an address to advertise";
        return Err(Error::usage(text));
    }
    let catalog = site::open_catalog(home)?;
    // Check the name before the ticket is redeemed.
    if let Some(name) = &name
        && catalog.peer(name)?.is_some_and(|p| p.key != ticket.key)
    {
        return Err(Error::usage(format!(
            "another peer is called {name}; choose another name, or run `drover peers forget {name}` first"
        )));
    }
    let shown = name.as_deref().unwrap_or("the site of the ticket");
    let options = ConnectOptions::named(shown);
    let connection = connect_any(&ticket.addresses, &identity, &ticket.key, &options).await?;
    let request = Pair {
        secret: ticket.secret,
        name: home.name(),
        addresses: addresses::saved(&catalog)?,
    };
    let call = Call::on(connection, Some(shown));
    let calls_itself = call.ask(&request, |()| {}).await?;
    let name = match name {
        Some(name) => name,
        None => {
            let known = catalog.peers()?;
            let taken = |n: &str| known.iter().any(|p| p.name == n && p.key != ticket.key);
            peer_name::unique(&peer_name::from_untrusted(&calls_itself), taken)
        }
    };
    home.try_keep_reserve();
    let known = catalog.peer_by_key(&ticket.key)?;
    let mut grant = known.map_or_else(Grant::nothing, |known| known.grant);
    if can != Rights::NONE {
        grant.rights = can;
    }
    let record = Record::new(Event::Paired).about(&name, ticket.key);
    let record = record.in_domain(&grant.domain).detail(grant_text(&grant));
    catalog.put_peer(&Peer {
        name: name.clone(),
        key: ticket.key,
        addresses: ticket.addresses,
        paired_unix: now_unix(),
        grant,
    })?;
    home.audit().write(record);
    Ok(Paired {
        name,
        key: ticket.key,
        calls_itself,
    })
}

/// A warning about peers that were paired under a name that is now a prefix of local targets, one each.
///
/// # Errors
/// When the catalog cannot be read.
pub fn misnamed(catalog: &SiteCatalog) -> Result<Vec<String>> {
    let peers = catalog.peers()?.into_iter().map(|p| p.name);
    let misnamed = peers.filter(|name| peer_name::is_reserved(name));
    let say = |name| {
        format!(
            "images of the peer {name} cannot be mounted: {name}:PATH is a disk of this host: run `drover peers forget {name}`, then pair again with `drover pair --name NAME`"
        )
    };
    Ok(misnamed.map(say).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_with_the_name_of_a_kind_of_disk_is_reported() {
        let tmp = tempfile::tempdir().unwrap();
        let home = Home::create(tmp.path().into()).unwrap();
        let catalog = site::open_catalog(&home).unwrap();
        for (n, name) in ["dir", "lyon"].into_iter().enumerate() {
            let peer = Peer {
                name: name.into(),
                key: PeerKey([n as u8; 32]),
                addresses: Vec::new(),
                paired_unix: 0,
                grant: Grant::default(),
            };
            catalog.put_peer(&peer).unwrap();
        }
        let said = misnamed(&catalog).unwrap();
        assert_eq!(said.len(), 1);
        assert!(said[0].contains("peers forget dir"), "{said:?}");
        assert!(said[0].contains("--name NAME"), "{said:?}");
    }
}
