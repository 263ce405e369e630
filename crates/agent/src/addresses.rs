//! The addresses under which others reach this site; they go into tickets.

use std::net::{IpAddr, SocketAddr};

use drover_net::Ticket;
use drover_store::SiteCatalog;

use crate::error::Error;
use crate::home::Home;

/// Catalog setting with the addresses of the last `serve`, one per line.
const SETTING: &str = "addresses";

/// The addresses to put into tickets for a site that listens on `listen`: those to advertise if any are given, else the
/// listen address, or all addresses of the host when that is the wildcard address.
pub fn of_listener(listen: SocketAddr, advertise: &[String]) -> Result<Vec<String>, String> {
    if !advertise.is_empty() {
        return advertise
            .iter()
            .map(|a| with_port(a, listen.port()))
            .collect();
    }
    if !listen.ip().is_unspecified() {
        return Ok(vec![listen.to_string()]);
    }
    let host: Vec<IpAddr> = if_addrs::get_if_addrs()
        .map_err(|e| {
            format!("cannot list this host's addresses: {e}; name the addresses to advertise")
        })?
        .into_iter()
        .map(|i| i.ip())
        .collect();
    Ok(best_first(host, listen.is_ipv4())
        .into_iter()
        .map(|ip| SocketAddr::new(ip, listen.port()).to_string())
        .collect())
}

/// Reachable addresses, most likely to work first, loopback last; at most as many as fit in a ticket.
fn best_first(mut host: Vec<IpAddr>, only_v4: bool) -> Vec<IpAddr> {
    // A link-local IPv6 address means nothing without the interface it belongs to.
    host.retain(|ip| match ip {
        IpAddr::V4(_) => true,
        IpAddr::V6(v6) => !only_v4 && !v6.is_unicast_link_local(),
    });
    let rank = |ip: &IpAddr| match ip {
        ip if ip.is_loopback() => 3,
        IpAddr::V4(v4) if v4.is_link_local() => 2,
        IpAddr::V4(_) => 0,
        IpAddr::V6(_) => 1,
    };
    host.sort_by_key(rank);
    let mut seen = Vec::new();
    host.retain(|ip| {
        !seen.contains(ip) && {
            seen.push(*ip);
            true
        }
    });
    let loopback = host.iter().position(|ip| ip.is_loopback());
    if let Some(at) = loopback.filter(|&at| at >= Ticket::MAX_ADDRESSES) {
        host.swap(at, Ticket::MAX_ADDRESSES - 1);
    }
    host.truncate(Ticket::MAX_ADDRESSES);
    host
}

/// Checks an address to advertise, `HOST` or `HOST:PORT`.
///
/// # Errors
/// A message for the user.
pub fn check(text: &str) -> Result<String, String> {
    with_port(text, 1).map(|_| text.to_owned())
}

/// Completes `HOST` or `HOST:PORT` to `HOST:PORT`.
fn with_port(text: &str, port: u16) -> Result<String, String> {
    let bad = || {
        format!(
            "{:?} is not an address: use HOST or HOST:PORT, such as lyon.example.net:7377",
            crate::text::clean(text)
        )
    };
    if let Ok(full) = text.parse::<SocketAddr>() {
        return if full.port() == 0 {
            Err(bad())
        } else {
            Ok(full.to_string())
        };
    }
    if let Ok(ip) = text
        .trim_start_matches('[')
        .trim_end_matches(']')
        .parse::<IpAddr>()
    {
        return Ok(SocketAddr::new(ip, port).to_string());
    }
    let (host, port) = match text.rsplit_once(':') {
        Some((host, port)) => (host, port.parse().ok().filter(|&p| p != 0).ok_or_else(bad)?),
        None => (text, port),
    };
    let good = |c: char| c.is_alphanumeric() || matches!(c, '.' | '-' | '_');
    if host.is_empty() || !host.chars().all(good) || host.len() > 200 {
        return Err(bad());
    }
    Ok(format!("{host}:{port}"))
}

/// Saves the addresses of this site for `drover ticket`.
pub fn save(catalog: &SiteCatalog, addresses: &[String]) -> Result<(), drover_store::CatalogError> {
    let text = addresses.join("\n");
    if catalog.setting(SETTING)?.as_deref() == Some(&text) {
        return Ok(());
    }
    catalog.set_setting(SETTING, &text)
}

/// The addresses saved by the last `serve`; empty if the site never ran.
pub fn saved(catalog: &SiteCatalog) -> Result<Vec<String>, drover_store::CatalogError> {
    Ok(catalog
        .setting(SETTING)?
        .unwrap_or_default()
        .lines()
        .map(String::from)
        .collect())
}

/// The addresses for a ticket made outside the serving process: those given, else the saved ones, else the configured
/// ones.
pub fn for_ticket(
    home: &Home,
    catalog: &SiteCatalog,
    advertise: &[String],
) -> crate::error::Result<Vec<String>> {
    let listen = home.config.listen();
    if !advertise.is_empty() {
        let known = saved(catalog)?;
        let port = known
            .first()
            .and_then(|a| a.rsplit_once(':')?.1.parse().ok())
            .unwrap_or(listen.port());
        return advertise
            .iter()
            .map(|a| with_port(a, port))
            .collect::<Result<_, _>>()
            .map_err(crate::error::Error::usage);
    }
    let known = saved(catalog)?;
    if !known.is_empty() {
        return Ok(known);
    }
    of_listener(listen, &home.config.advertise).map_err(Error::msg)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_advertised_gets_a_port() {
        let listen = "0.0.0.0:7377".parse().unwrap();
        let given = [
            "lyon.example.net",
            "10.0.0.1:80",
            "2001:db8::1",
            "[2001:db8::2]:9",
            "host:1",
        ]
        .map(String::from);
        assert_eq!(
            of_listener(listen, &given).unwrap(),
            [
                "lyon.example.net:7377",
                "10.0.0.1:80",
                "[2001:db8::1]:7377",
                "[2001:db8::2]:9",
                "host:1"
            ]
        );
        for bad in [
            "",
            ":1",
            "a b",
            "host:0",
            "host:99999",
            "x\n:1",
            "10.0.0.1:0",
        ] {
            assert!(of_listener(listen, &[bad.into()]).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn a_definite_address_is_the_address() {
        assert_eq!(
            of_listener("127.0.0.1:9".parse().unwrap(), &[]).unwrap(),
            ["127.0.0.1:9"]
        );
    }

    #[test]
    fn every_interface_means_the_hosts_addresses_loopback_last() {
        let ip = |s: &str| s.parse::<IpAddr>().unwrap();
        let host = vec![
            ip("127.0.0.1"),
            ip("::1"),
            ip("fe80::1"),
            ip("2001:db8::1"),
            ip("10.0.0.2"),
            ip("10.0.0.2"),
        ];
        assert_eq!(
            best_first(host.clone(), false),
            [
                ip("10.0.0.2"),
                ip("2001:db8::1"),
                ip("127.0.0.1"),
                ip("::1")
            ]
        );
        assert_eq!(best_first(host, true), [ip("10.0.0.2"), ip("127.0.0.1")]);
        let many: Vec<IpAddr> = (1..20)
            .map(|i| ip(&format!("10.0.0.{i}")))
            .chain([ip("127.0.0.1")])
            .collect();
        let best = best_first(many, true);
        assert_eq!(best.len(), Ticket::MAX_ADDRESSES);
        assert_eq!(best.last(), Some(&ip("127.0.0.1")));
    }
}
