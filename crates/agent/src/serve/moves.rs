//! All moves to a site, and requests about them.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use drover_migrate::protocol::{DescribeMachine, Kind, TellGenerations};
use drover_migrate::{AllMoves, Moves, Pending};
use drover_net::Refusal;
use drover_net::service::{Exchange, Handler, Peer};

use super::in_domain::InDomain;
use super::machines::{SiteMachines, moves};
use super::server::Server;
use crate::machines::{
    BreakMachine, CloseMachine, CountMigration, GetGenerations, GetMissing, KeptMachine,
    RefuseMachine,
};

/// The moves to a site: of machines, and of disks of each domain.
pub struct SiteMoves {
    server: Arc<Server>,
    machines: Arc<Moves<SiteMachines>>,
    /// By the names of their domains.
    disks: parking_lot::Mutex<HashMap<String, Arc<Moves<SiteMachines>>>>,
}

impl SiteMoves {
    /// The moves to a site.
    pub fn new(server: &Arc<Server>) -> Arc<SiteMoves> {
        Arc::new(SiteMoves {
            machines: moves(server, None, server.home.machines()),
            server: Arc::clone(server),
            disks: parking_lot::Mutex::default(),
        })
    }

    /// Those of disks of a domain.
    async fn disks(&self, domain: &str) -> Result<Arc<Moves<SiteMachines>>, Refusal> {
        let opened = InDomain(Arc::clone(&self.server)).of(domain).await?;
        let (name, server) = (domain.to_owned(), &self.server);
        let mut disks = self.disks.lock();
        let found = disks
            .entry(name.clone())
            .or_insert_with(|| moves(server, Some(name), opened.home.disks()));
        Ok(Arc::clone(found))
    }

    /// Continues after a restart of the site.
    pub async fn restart(&self) {
        SiteMachines::restart(&self.machines).await;
        let domains = self.server.home.all_domains();
        for home in domains.unwrap_or_default() {
            if home.disks().names().is_ok_and(|names| names.is_empty()) {
                continue;
            }
            match self.disks(home.domain_name()).await {
                Ok(disks) => SiteMachines::restart(&disks).await,
                Err(e) => tracing::warn!(domain = home.domain_name(), "{e}"),
            }
        }
    }

    /// The site's machines.
    pub fn machines(&self) -> &Arc<SiteMachines> {
        self.machines.site()
    }

    /// The site.
    pub fn server(&self) -> &Arc<Server> {
        &self.server
    }

    /// Stops serving all disks; their leases remain.
    pub async fn stop(&self) {
        self.machines.site().stop().await;
        let disks: Vec<_> = self.disks.lock().values().cloned().collect();
        for disks in disks {
            disks.site().stop().await;
        }
    }
}

impl AllMoves for SiteMoves {
    type Site = SiteMachines;

    fn of<'a>(
        &'a self,
        peer: &'a Peer,
        kind: Kind,
    ) -> Pending<'a, Result<Arc<Moves<SiteMachines>>, Refusal>> {
        Box::pin(async move {
            match kind {
                Kind::Machine => Ok(Arc::clone(&self.machines)),
                Kind::Disk => self.disks(&peer.domain).await,
            }
        })
    }
}

/// Handles requests about the machines and disks of a site.
#[derive(Clone)]
pub struct OfMachines(pub Arc<SiteMoves>);

impl Handler<CloseMachine> for OfMachines {
    async fn handle(
        &self,
        peer: &Peer,
        CloseMachine { kind, name }: CloseMachine,
        _: &mut Exchange<'_, CloseMachine>,
    ) -> Result<(), Refusal> {
        self.0.of(peer, kind).await?.site().left(&name).await
    }
}

impl Handler<GetGenerations> for OfMachines {
    async fn handle(
        &self,
        peer: &Peer,
        GetGenerations { name, disk }: GetGenerations,
        _: &mut Exchange<'_, GetGenerations>,
    ) -> Result<Option<Vec<u8>>, Refusal> {
        let machines = self.0.of(peer, Kind::Machine).await?;
        machines.site().generations(&name, disk).await
    }
}

impl Handler<GetMissing> for OfMachines {
    async fn handle(
        &self,
        peer: &Peer,
        GetMissing { name }: GetMissing,
        _: &mut Exchange<'_, GetMissing>,
    ) -> Result<Option<u64>, Refusal> {
        let machines = self.0.of(peer, Kind::Machine).await?;
        Ok(machines.site().missing(&name).await)
    }
}

impl Handler<DescribeMachine> for OfMachines {
    async fn handle(
        &self,
        peer: &Peer,
        told: DescribeMachine,
        _: &mut Exchange<'_, DescribeMachine>,
    ) -> Result<bool, Refusal> {
        let machines = self.0.of(peer, Kind::Machine).await?;
        machines.site().described(peer, told).await
    }
}

impl Handler<TellGenerations> for OfMachines {
    async fn handle(
        &self,
        peer: &Peer,
        told: TellGenerations,
        _: &mut Exchange<'_, TellGenerations>,
    ) -> Result<(), Refusal> {
        let machines = self.0.of(peer, Kind::Machine).await?;
        machines.site().told_generations(peer, told).await
    }
}

impl Handler<CountMigration> for OfMachines {
    async fn handle(
        &self,
        _: &Peer,
        CountMigration { moved }: CountMigration,
        _: &mut Exchange<'_, CountMigration>,
    ) -> Result<(), Refusal> {
        let migrations = &self.0.server.metrics.migrations;
        match &moved {
            Some(migration) => migrations.left(migration),
            None => migrations.stayed.fetch_add(1, Relaxed),
        };
        Ok(())
    }
}

impl Handler<RefuseMachine> for OfMachines {
    async fn handle(
        &self,
        peer: &Peer,
        RefuseMachine { kind, name }: RefuseMachine,
        _: &mut Exchange<'_, RefuseMachine>,
    ) -> Result<(), Refusal> {
        self.0.of(peer, kind).await?.give_up(name).await
    }
}

impl Handler<BreakMachine> for OfMachines {
    async fn handle(
        &self,
        peer: &Peer,
        BreakMachine { name }: BreakMachine,
        _: &mut Exchange<'_, BreakMachine>,
    ) -> Result<KeptMachine, Refusal> {
        let machines = self.0.of(peer, Kind::Machine).await?;
        let kept = machines.break_off(name).await?;
        Ok(KeptMachine {
            lost_bytes: kept.lost_bytes,
            runs: kept.runs,
        })
    }
}
