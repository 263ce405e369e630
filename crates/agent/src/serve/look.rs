//! The status of a site's domains. One that is closed is not opened for it: what is on the disk is read.

use std::sync::Arc;

use drover_net::DEFAULT_DOMAIN;
use drover_store::{Catalog, Peer, SiteCatalog};

use super::domains::Domain;
use super::server::{Duty, Server};
use crate::error::{Error, Result, one_line};
use crate::home::Home;
use crate::mounts::{Held, leases_of, leases_on_disk};
use crate::quota::taken;
use crate::replicas::list;
use crate::site;
use crate::status::{DomainStatus, Taken};

impl Server {
    /// The status of each domain, the default one first; none for a teleporter. Blocks on the disk.
    ///
    /// # Errors
    /// When the domains cannot be listed, or the catalog cannot be read and that will not pass.
    pub fn look_at_domains(&self) -> Result<Vec<DomainStatus>> {
        // What needs no catalog is shown also while its server is away.
        let (peers, away) = match self.catalog.peers() {
            Ok(peers) => (peers, None),
            Err(e) if e.may_pass() => (Vec::new(), Some(e.to_string())),
            Err(e) => return Err(e.into()),
        };
        let look = |home: &Home| {
            let name = home.domain_name();
            let peers = peers.iter().filter(|peer| peer.grant.domain == name);
            let open = self.open_domain(name);
            let looked = match (&away, &open) {
                (Some(why), _) => Err(Error::msg(why)),
                (None, Some(domain)) => look(home, &domain.catalog, Some(domain), peers),
                (None, None) => site::glance_at_catalog(home)
                    .and_then(|catalog| look(home, &catalog, None, peers)),
            };
            // One that cannot be read does not hide the others.
            looked.unwrap_or_else(|e| DomainStatus {
                name: name.to_owned(),
                problem: Some(one_line(&e)),
                site: open.as_ref().map(|domain| domain.site.status()),
                served: open.as_ref().map(|domain| domain.devices.counted()),
                ..DomainStatus::default()
            })
        };
        Ok(self.homes()?.iter().map(look).collect())
    }

    /// The leases of all domains. Blocks on the disk.
    ///
    /// # Errors
    /// When the domains, or the leases of one, cannot be read.
    pub fn leases(&self) -> Result<Vec<Held>> {
        let mut all = Vec::new();
        for home in self.homes()? {
            all.extend(match self.open_domain(home.domain_name()) {
                Some(domain) => leases_of(&domain.devices, home.domain_name())?,
                None => leases_on_disk(&home)?,
            });
        }
        Ok(all)
    }

    /// The homes of all domains; none for a teleporter.
    fn homes(&self) -> Result<Vec<Home>> {
        match self.duty {
            Duty::Site(_) => self.home.all_domains(),
            Duty::Teleporter(_) => Ok(Vec::new()),
        }
    }

    /// The domain of that name, if it is open.
    fn open_domain(&self, name: &str) -> Option<Arc<Domain>> {
        match &self.duty {
            Duty::Site(default) if name == DEFAULT_DOMAIN => Some(Arc::clone(default)),
            _ => self.domains.glance(name),
        }
    }
}

fn look<'a>(
    home: &Home,
    catalog: &SiteCatalog,
    open: Option<&Arc<Domain>>,
    peers: impl Iterator<Item = &'a Peer>,
) -> Result<DomainStatus> {
    let images = catalog.images()?;
    let transfers = drover_teleport::unfinished(&home.work_dir())?;
    let taken = taken(home, &images, &transfers)?;
    let peers = peers.map(|peer| Taken {
        peer: peer.name.clone(),
        taken_bytes: taken.get(&peer.key).copied().unwrap_or_default(),
        quota_bytes: peer.grant.quota_bytes,
    });
    let leases = match open {
        Some(domain) => leases_of(&domain.devices, home.domain_name()),
        None => leases_on_disk(home),
    };
    // An unreadable lease must not hide the rest of the status.
    let leases = leases.inspect_err(|e| tracing::warn!("{}", one_line(e)));
    let replicas = list(home).inspect_err(|e| tracing::warn!("{}", one_line(e)));
    let is_held = |held: &&Held| held.writer.is_some();
    Ok(DomainStatus {
        name: home.domain_name().to_owned(),
        images: images.len(),
        unfinished: transfers.len(),
        leases: leases.ok().map(|all| all.iter().filter(is_held).count()),
        peers: peers
            .filter(|peer| peer.taken_bytes > 0 || peer.quota_bytes.is_some())
            .collect(),
        replicas: replicas.unwrap_or_default(),
        problem: None,
        site: open.map(|domain| domain.site.status()),
        served: open.map(|domain| domain.devices.counted()),
    })
}
