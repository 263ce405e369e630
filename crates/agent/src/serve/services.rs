//! The table of services that this process registers.

use std::sync::Arc;

use drover_mount::server::Connections;
use drover_net::service::Services;
use drover_net::{Code, Refusal};
use drover_teleport::{DataConnections, Sessions};

use super::matching::Matching;
use super::server::{Common, Duty, OfSite, Server};
use super::sessions::Counted;

/// The services of this process.
pub fn of(server: &Arc<Server>) -> Services {
    let (unknown, what) = match server.duty {
        Duty::Site(..) => (
            Code::Unsupported,
            "does not support this request; it may run an earlier version of drover",
        ),
        Duty::Teleporter(_) => (Code::Denied, "is a teleporter and has no images"),
    };
    let mut services = Services::new(Refusal::new(unknown, format!("{} {what}", server.name)));
    for_all(&mut services, server);
    match &server.duty {
        Duty::Site(site, devices) => {
            let of_site = OfSite {
                server: Arc::clone(server),
                site: Arc::clone(site),
                devices: Arc::clone(devices),
            };
            for_site(&mut services, &of_site);
        }
        Duty::Teleporter(matchers) => {
            services.add(Matching(Arc::clone(server), Arc::clone(matchers)));
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

fn for_site(services: &mut Services, site: &OfSite) {
    use drover_teleport::services as of_teleport;
    let text = format!(
        "{} is a site, not a teleporter; run `drover teleporter` there",
        site.server.name
    );
    services.handle::<of_teleport::BeginMatching>(Refusal::new(Code::Denied, text));
    let sessions = Sessions(Arc::clone(&site.site));
    services.add(Counted(Arc::clone(&site.server), sessions));
    services.add(DataConnections(Arc::clone(&site.site)));
    services.add(Connections(Arc::clone(&site.devices)));
    services.handle::<of_teleport::ListImages>(site.clone());
    services.handle::<of_teleport::VerifyImage>(site.clone());
    services.handle::<of_teleport::IndexImage>(site.clone());
    services.handle::<of_teleport::RemoveImage>(site.clone());
    services.handle::<of_teleport::ListTransfers>(site.clone());
    services.handle::<of_teleport::RemoveTransfer>(site.clone());
    services.handle::<crate::mounts::ListLeases>(site.clone());
    services.handle::<crate::mounts::BreakLease>(site.clone());
    services.handle::<crate::changes::ListChanges>(site.clone());
    services.handle::<crate::changes::DropChanges>(site.clone());
    services.handle::<crate::changes::Order>(site.clone());
}
