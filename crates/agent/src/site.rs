//! Opens the site of a home: configures the teleport layer from the home's settings. All other code that depends on how
//! a site is opened belongs here, too.

use std::sync::Arc;
use std::time::Duration;

use drover_net::service::Request;
use drover_net::{Identity, Right, Rights};
use drover_store::sequences::SEQUENCE_DATA_BYTES;
use drover_store::{Catalog, CatalogError, CatalogUrl, Grant, Peer, SiteCatalog};
use drover_teleport::services::OpenSession;
use drover_teleport::{
    Callbacks, Holder, RemoteTeleporter, RightsOf, SendEvent, SendStep, Shared, Site, SiteConfig,
    Supplies, Watcher,
};

use crate::audit::{Audit, Event, Record};
use crate::error::{Context, Error, Result, failed};
use crate::home::Home;
use crate::text::clean;

/// Default space to keep free on the images' file system.
const RESERVE_BYTES: u64 = 256 << 20;

/// Default limit on concurrent sessions.
const MAX_SESSIONS: usize = 16;

/// How long a site that starts waits for the server of its catalog, and how long others do.
const START_PATIENCE: Duration = Duration::from_secs(60);
const PATIENCE: Duration = Duration::from_secs(5);

/// The setting with the key of the site: nodes that share a catalog have the same.
const SITE_KEY: &str = "site key";

/// Opens the catalog of a home, and reports repairs.
///
/// # Errors
/// When it cannot be used.
pub fn open_catalog(home: &Home) -> Result<SiteCatalog> {
    open_within(home, PATIENCE, &mut |_| ())
}

/// The same for a site that starts: it may have to wait longer for the server, and says so.
///
/// # Errors
/// As [`open_catalog`].
pub fn open_catalog_to_serve(home: &Home) -> Result<SiteCatalog> {
    open_within(home, START_PATIENCE, &mut |why| {
        crate::notice::notice(&clean(why));
    })
}

fn open_within(
    home: &Home,
    patience: Duration,
    waiting: &mut dyn FnMut(&str),
) -> Result<SiteCatalog> {
    let former = |peer: Option<&Peer>| former_grant(home, peer);
    let in_home = || -> Result<SiteCatalog, CatalogError> {
        let (catalog, repairs) = SiteCatalog::open_with(home.dir(), &former)?;
        tell(&repairs);
        Ok(catalog)
    };
    let Some(url) = &home.config.catalog else {
        return Ok(in_home()?);
    };
    let file = home.dir().join("catalog.db");
    let mut former = || file.exists().then(in_home).transpose();
    let domain = home.domain_name();
    let (catalog, filled) = SiteCatalog::connect(url, domain, &mut former, patience, waiting)?;
    if filled {
        crate::notice::notice(&format!(
            "the new catalog at {url} has what was in {}, which is no longer used",
            file.display()
        ));
    }
    if domain == drover_net::DEFAULT_DOMAIN {
        check_site(home, &catalog, url)?;
    }
    Ok(catalog)
}

/// Fails if a catalog is that of another site: its peers know another key.
fn check_site(home: &Home, catalog: &SiteCatalog, url: &CatalogUrl) -> Result<()> {
    let own = home.identity()?.key().to_string();
    match catalog.setting(SITE_KEY)? {
        None => Ok(catalog.set_setting(SITE_KEY, &own)?),
        Some(key) if key == own => Ok(()),
        Some(key) => Err(Error::refused(format!(
            "the catalog at {url} is that of the site with the key {key}, and the key of {} is {own}: copy identity.key from a node of that site, or choose another database",
            home.dir().display()
        ))),
    }
}

/// What a peer of a catalog without rights may do from now on, or, without a peer, one that redeems a ticket of it: what
/// it has done so far, except that a teleporter is sent digests only and a standalone one serves nothing else.
fn former_grant(home: &Home, peer: Option<&Peer>) -> Grant {
    let teleporter = home.config.teleporter.as_deref();
    if teleporter.is_some() && peer.map(|p| &*p.name) == teleporter {
        return Grant::matching();
    }
    let index = home.index_dir();
    // A teleporter has one directory for each site, a site has maps.
    let matched = std::fs::read_dir(&index).is_ok_and(|entries| {
        let mut names = entries.flatten().map(|entry| entry.file_name());
        names.any(|name| name.as_encoded_bytes().starts_with(b"for-"))
    });
    match (matched, index.join("maps").exists()) {
        (true, false) => Grant::matching(),
        (true, true) => Grant::of(Rights::of(&[
            Right::Send,
            Right::Read,
            Right::Write,
            Right::Match,
        ])),
        (false, _) => Grant::default(),
    }
}

/// Opens the catalog of a home for a read-only command; works even if the disk is too full to open it normally.
///
/// # Errors
/// When it cannot be read.
pub fn look_at_catalog(home: &Home) -> Result<SiteCatalog> {
    match open_catalog(home) {
        Err(e) if home.config.catalog.is_none() && home.is_full() => {
            let former = |peer: Option<&Peer>| former_grant(home, peer);
            match SiteCatalog::open_on_full_disk(home.dir(), &former) {
                Ok(Some(catalog)) => Ok(catalog),
                _ => Err(e),
            }
        }
        opened => opened,
    }
}

/// Opens the catalog of a home just to count what is in it: without a repair, and without creating files, where that is
/// possible.
///
/// # Errors
/// When it cannot be read.
pub(crate) fn glance_at_catalog(home: &Home) -> Result<SiteCatalog> {
    if home.config.catalog.is_some() {
        return open_catalog(home);
    }
    let former = |peer: Option<&Peer>| former_grant(home, peer);
    match SiteCatalog::open_on_full_disk(home.dir(), &former) {
        Ok(Some(catalog)) => Ok(catalog),
        _ => look_at_catalog(home),
    }
}

/// Opens the site of a home whose lock this process holds, and reports repairs.
///
/// # Errors
/// When its files cannot be used, or the configured teleporter is not a peer.
pub async fn open(
    home: &Home,
    catalog: &Arc<SiteCatalog>,
    identity: &Identity,
    supplies: Supplies,
) -> Result<Arc<Site>> {
    let (its, images) = (home.clone(), Arc::clone(catalog));
    let look = move || {
        // A domain has no peers of its own.
        let peers = match its.of_site() {
            Some(site) => Arc::new(open_catalog(&site)?),
            None => images,
        };
        let teleporter = its.config.teleporter.as_deref();
        let teleporter = teleporter.map(|name| find_peer(&peers, name)).transpose();
        let teleporter = teleporter.context("the teleporter of config.toml")?;
        Ok::<_, Error>((peers, teleporter))
    };
    let (peers, teleporter) = tokio::task::spawn_blocking(look).await??;
    let teleporter = teleporter.map(|peer| RemoteTeleporter {
        domain: home.domain_name().to_owned(),
        identity: identity.clone(),
        key: peer.key,
        addresses: peer.addresses,
    });
    let node = home.node();
    if let Some(node) = &node {
        catalog.change_as(node.token());
    } else if let Some(url) = &home.config.catalog {
        return Err(Error::msg(format!(
            "this process is no node of the site at {url}"
        )));
    }
    let config = SiteConfig {
        shared: node.map(|node| Shared {
            maps_dir: home.maps_dir(),
            work_dirs: home.work_base(),
            others: node.among(home.domain_name()),
        }),
        images_dir: home.images_dir(),
        work_dir: home.work_dir(),
        state_dir: home.index_dir(),
        teleporter,
        reserve_bytes: reserve_bytes(home),
        supplies,
        sequence_data_bytes: home.config.sequence_data.unwrap_or(SEQUENCE_DATA_BYTES),
        image_mode: home.config.image_mode(),
        disk: Arc::new(drover_storage::HostDisk),
    };
    let catalog = Arc::clone(catalog) as Arc<dyn Catalog>;
    // No mount is connected yet, so the lease file decides.
    let state = home.mounted_dir();
    let images = Arc::clone(&catalog);
    let holder: Arc<Holder> = Arc::new(move |name| {
        if crate::mounts::is_launched(name, &state, images.as_ref()) {
            return None;
        }
        crate::mounts::why_held(name, crate::mounts::leased_on_disk(&state, name))
    });
    let (log, domain) = (Arc::clone(home.audit()), home.domain_name().to_owned());
    let watcher: Arc<Watcher> = Arc::new(move |event| sent(&log, &domain, event));
    let callbacks = Callbacks {
        holder,
        rights: rights_in(home.domain_name().to_owned(), peers),
        watcher,
    };
    let (site, repairs) =
        tokio::task::spawn_blocking(move || Site::open_for(config, catalog, callbacks)).await??;
    let state = home.mounted_dir();
    site.launched_by(Arc::new(move |name| {
        let directory = drover_store::changes::directory(&state, name);
        if !drover_store::changes::is_launched(&directory) {
            return None;
        }
        crate::mounts::why_held(name, crate::mounts::leased_on_disk(&state, name))
    }));
    tell(&repairs);
    Ok(site)
}

/// The rights that peers have now in a domain.
fn rights_in(domain: String, peers: Arc<SiteCatalog>) -> Arc<RightsOf> {
    Arc::new(move |key| {
        let peer = peers.peer_by_key(key).map_err(failed)?;
        let grant = peer.map(|peer| peer.grant).filter(|g| g.domain == domain);
        Ok(grant.map_or(Rights::NONE, |grant| grant.rights))
    })
}

/// Tells the audit log of an image that a peer sends.
fn sent(log: &Audit, domain: &str, event: &SendEvent) {
    let record = match &event.what {
        SendStep::Begun => Record::new(Event::SendBegun),
        SendStep::Delivered => Record::new(Event::SendDelivered).took(event.time),
        // It is told when the rest of its flock is there.
        SendStep::Arrived => return,
        SendStep::Unchanged => Record::new(Event::SendDelivered)
            .took(event.time)
            .detail("the site had it already"),
        SendStep::Estimated => Record::new(Event::SendEstimated).took(event.time),
        SendStep::Refused(refusal) => Record::refused(OpenSession::SERVICE, refusal, None),
        SendStep::Failed(why) => Record::new(Event::SendFailed)
            .took(event.time)
            .detail(why.as_str()),
    };
    let record = record
        .by_peer(&event.peer_name, event.peer)
        .from(&event.from)
        .in_domain(domain)
        .image(&event.image)
        .bytes(event.bytes);
    match event.what {
        SendStep::Delivered => log.write(record),
        // A peer that tries again and again causes no more than a few lines.
        _ => log.write_limited(record),
    }
}

/// What the sessions of all domains of a site take from.
pub fn supplies(home: &Home) -> Supplies {
    Supplies::new(home.config.max_sessions.unwrap_or(MAX_SESSIONS))
}

/// Bytes of the disks that are kept free.
pub fn reserve_bytes(home: &Home) -> u64 {
    home.config.reserve.unwrap_or(RESERVE_BYTES)
}

/// The peer of that name.
///
/// # Errors
/// When there is none; lists the known peers.
pub fn find_peer(catalog: &SiteCatalog, name: &str) -> Result<Peer> {
    if let Some(peer) = catalog.peer(name)? {
        return Ok(peer);
    }
    let known: Vec<String> = catalog.peers()?.into_iter().map(|p| p.name).collect();
    let known = match known.as_slice() {
        [] => "there are no peers".to_string(),
        some => format!("peers: {}", some.join(", ")),
    };
    Err(Error::refused(format!(
        "no peer is called {name:?} ({known}); `drover pair` adds one"
    )))
}

/// Reports repairs to the user.
pub fn tell(repairs: &[String]) {
    for repair in repairs {
        crate::notice::notice(&format!("repaired: {}", clean(repair)));
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use drover_net::PeerKey;

    use super::*;

    #[test]
    fn peers_from_before_rights_keep_what_they_did() {
        let tmp = tempfile::tempdir().unwrap();
        let mut home = Home::create(tmp.path().into()).unwrap();
        home.config.teleporter = Some("matcher".into());
        let peer = |name: &str| Peer {
            name: name.into(),
            key: PeerKey([1; 32]),
            addresses: Vec::new(),
            paired_unix: 0,
            grant: Grant::default(),
        };
        let given = |home: &Home, name: Option<&str>| {
            let peer = name.map(peer);
            former_grant(home, peer.as_ref()).rights.to_string()
        };
        let site = |home: &Home| {
            assert_eq!(given(home, Some("matcher")), "match");
            [given(home, Some("lyon")), given(home, None)]
        };
        assert_eq!(site(&home), ["send,read,write"; 2], "it never ran");
        let index = home.index_dir();
        fs::create_dir(index.join("maps")).unwrap();
        assert_eq!(site(&home), ["send,read,write"; 2]);
        fs::create_dir(index.join(format!("for-{}", PeerKey([2; 32])))).unwrap();
        assert_eq!(site(&home), ["send,read,write,match"; 2], "it was both");
        fs::remove_dir(index.join("maps")).unwrap();
        assert_eq!(site(&home), ["match"; 2]);
        home.config.teleporter = None;
        assert_eq!(given(&home, None), "match");
    }

    #[test]
    fn a_peer_has_rights_in_its_own_domain_as_long_as_it_is_one() {
        let tmp = tempfile::tempdir().unwrap();
        let home = Home::create(tmp.path().into()).unwrap();
        let catalog = Arc::new(open_catalog(&home).unwrap());
        let peer = Peer {
            name: "lyon".into(),
            key: PeerKey([1; 32]),
            addresses: Vec::new(),
            paired_unix: 0,
            grant: Grant::default(),
        };
        catalog.put_peer(&peer).unwrap();
        let rights = |domain: &str| rights_in(domain.into(), catalog.clone())(&peer.key).unwrap();
        assert_eq!(rights("default"), Rights::DEFAULT);
        assert_eq!(rights("acme"), Rights::NONE);
        let moved = |grant: &mut Grant| grant.domain = "acme".into();
        catalog.change_grant("lyon", moved).unwrap().unwrap();
        assert_eq!(rights("default"), Rights::NONE);
        assert_eq!(rights("acme"), Rights::DEFAULT);
        catalog.forget_peer("lyon").unwrap().unwrap();
        assert_eq!(rights("acme"), Rights::NONE);
    }
}
