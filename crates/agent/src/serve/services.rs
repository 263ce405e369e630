//! The table of services that this process registers.

use std::marker::PhantomData;
use std::sync::Arc;

use drover_migrate::{Conversations, DiskFetches, DiskWrites, Measures, MemoryStreams};
use drover_mount::server::Connections;
use drover_net::service::Services;
use drover_net::{Code, Refusal};
use drover_teleport::services::{BeginMatching, BeginMatchingFor};
use drover_teleport::{DataConnections, FlockSessions, Sessions};

use super::audited::Told;
use super::in_domain::{Conversation, InDomain};
use super::manage::Manage;
use super::matching::Matching;
use super::moves::{OfMachines, SiteMoves};
use super::server::{Common, Duty, Server};
use super::sessions::Counted;

/// The services of this process.
pub fn of(server: &Arc<Server>, moves: Option<&Arc<SiteMoves>>) -> Services {
    let (unknown, what) = match server.duty {
        Duty::Site(_) => (
            Code::Unsupported,
            "does not support this request; it may run an earlier version of drover",
        ),
        Duty::Teleporter(_) => (Code::Denied, "is a teleporter and has no images"),
    };
    let mut services = Services::new(Refusal::new(unknown, format!("{} {what}", server.name)));
    for_all(&mut services, server);
    if let Some(moves) = moves {
        for_machines(&mut services, moves);
    }
    match &server.duty {
        Duty::Site(_) => for_site(&mut services, server),
        Duty::Teleporter(matchers) => {
            let own = || (Arc::clone(server), Arc::clone(matchers));
            let (server, matchers) = own();
            services.add(Matching::<BeginMatching>(server, matchers, PhantomData));
            let (server, matchers) = own();
            services.add(Matching::<BeginMatchingFor>(server, matchers, PhantomData));
        }
    }
    services
}

fn for_all(services: &mut Services, server: &Arc<Server>) {
    let common = || Common(Arc::clone(server));
    services.handle::<super::pairing::Pair>(common());
    services.handle::<super::status::GetStatus>(common());
    services.handle::<super::status::GetMetrics>(common());
}

fn for_machines(services: &mut Services, moves: &Arc<SiteMoves>) {
    services.add(Conversations(Arc::clone(moves)));
    services.add(DiskWrites(Arc::clone(moves)));
    services.add(DiskFetches(Arc::clone(moves)));
    services.add(MemoryStreams(Arc::clone(moves)));
    services.add(Measures);
    services.handle::<drover_migrate::protocol::DescribeMachine>(OfMachines(Arc::clone(moves)));
    services.handle::<drover_migrate::protocol::TellGenerations>(OfMachines(Arc::clone(moves)));
    services.handle::<crate::machines::GetGenerations>(OfMachines(Arc::clone(moves)));
    services.handle::<crate::machines::GetMissing>(OfMachines(Arc::clone(moves)));
    services.handle::<crate::replicas::FailOver>(OfMachines(Arc::clone(moves)));
    services.handle::<crate::machines::CloseMachine>(OfMachines(Arc::clone(moves)));
    services.handle::<crate::machines::CountMigration>(OfMachines(Arc::clone(moves)));
    services.handle::<crate::machines::RefuseMachine>(OfMachines(Arc::clone(moves)));
    services.handle::<crate::machines::BreakMachine>(OfMachines(Arc::clone(moves)));
}

fn for_site(services: &mut Services, server: &Arc<Server>) {
    use drover_teleport::services as of_teleport;
    let text = format!(
        "{} is a site, not a teleporter; run `drover teleporter` there",
        server.name
    );
    let no_teleporter = Refusal::new(Code::Denied, text);
    services.refuse::<BeginMatching>(no_teleporter.clone());
    services.refuse::<BeginMatchingFor>(no_teleporter);
    let sessions = Conversation::<of_teleport::OpenSession, _>::new(server, |domain| {
        Sessions(Arc::clone(&domain.site))
    });
    services.add(Counted(Arc::clone(server), sessions));
    let of_flocks = Conversation::<of_teleport::SendFlock, _>::new(server, |domain| {
        FlockSessions(Arc::clone(&domain.site))
    });
    services.add(Counted(Arc::clone(server), of_flocks));
    services.add(Conversation::<of_teleport::JoinSession, _>::new(
        server,
        |domain| DataConnections(Arc::clone(&domain.site)),
    ));
    services.add(Conversation::<drover_mount::protocol::Open, _>::new(
        server,
        |domain| Connections(Arc::clone(&domain.devices)),
    ));
    services.add(super::vaults::Vaults::new(server));
    let site = InDomain(Arc::clone(server));
    services.handle::<of_teleport::ListImages>(site.clone());
    services.handle::<of_teleport::ListTransfers>(site.clone());
    services.handle::<of_teleport::GetProfile>(site.clone());
    services.handle::<of_teleport::OpenFlock>(site.clone());
    services.handle::<of_teleport::EndFlock>(site.clone());
    services.handle::<of_teleport::ListFlocks>(site.clone());
    services.handle::<of_teleport::ClaimBlocks>(site.clone());
    services.handle::<of_teleport::LookAt>(site.clone());
    services.handle::<of_teleport::ListNodes>(Common(Arc::clone(server)));
    services.handle::<crate::mounts::ListLaunches>(site.clone());
    services.handle::<crate::mounts::ListLeases>(Common(Arc::clone(server)));
    services.handle::<drover_mount::protocol::LookAtLease>(site.clone());
    services.handle::<drover_mount::protocol::LookAtChanges>(site.clone());
    services.handle::<drover_mount::protocol::HandOverLease>(site.clone());
    services.handle::<drover_migrate::replica::protocol::BeginRound>(site.clone());
    services.handle::<drover_migrate::replica::protocol::CompleteRound>(site.clone());
    services.handle::<drover_migrate::replica::protocol::TellPoint>(site.clone());
    services.handle::<crate::replicas::ForgetReplica>(site.clone());
    // The mounts tell of it.
    services.handle::<crate::mounts::BreakLease>(site.clone());
    services.handle::<crate::changes::ListChanges>(site.clone());
    let told = || Told(Arc::clone(server.home.audit()), site.clone());
    services.handle::<of_teleport::VerifyImage>(told());
    services.handle::<of_teleport::IndexImage>(told());
    services.handle::<of_teleport::KnowFiles>(told());
    services.handle::<of_teleport::RemoveImage>(told());
    services.handle::<of_teleport::ShareImage>(told());
    services.handle::<of_teleport::RemoveTransfer>(told());
    services.handle::<of_teleport::PutProfile>(told());
    services.handle::<crate::changes::DropChanges>(told());
    services.handle::<crate::changes::Order>(told());
    let manage = || Told(Arc::clone(server.home.audit()), Manage(Arc::clone(server)));
    services.handle::<crate::domains::AddDomain>(manage());
    services.handle::<crate::domains::RemoveDomain>(manage());
    services.handle::<crate::domains::MoveImage>(manage());
}
