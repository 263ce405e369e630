//! What this process does for whoever calls, put together.

use std::sync::Arc;

use drover_mount::server::Connections;
use drover_net::service::Services;
use drover_net::{Code, Refusal};
use drover_teleport::session::{SessionLanes, Sessions};

use super::matching::Matching;
use super::server::{Common, Duty, OfSite, Server};
use super::sessions::Counted;

/// The services of this process.
pub fn of(server: &Arc<Server>) -> Services {
    let (unknown, what) = match server.duty {
        Duty::Site(..) => (
            Code::Unsupported,
            "does nothing of that name; it may be of an earlier version",
        ),
        Duty::Teleporter(_) => (Code::Denied, "is a teleporter and holds no images"),
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
    services.answer::<super::pairing::Pair>(common());
    services.answer::<super::status::GetStatus>(common());
    services.answer::<super::status::GetMetrics>(common());
}

fn for_site(services: &mut Services, site: &OfSite) {
    use drover_teleport::services as of_teleport;
    let text = format!(
        "{} is a site and no teleporter; run `drover teleporter` there",
        site.server.name
    );
    services.answer::<of_teleport::BeginMatching>(Refusal::new(Code::Denied, text));
    let sessions = Sessions(Arc::clone(&site.site));
    services.add(Counted(Arc::clone(&site.server), sessions));
    services.add(SessionLanes(Arc::clone(&site.site)));
    services.add(Connections(Arc::clone(&site.devices)));
    services.answer::<of_teleport::ListImages>(site.clone());
    services.answer::<of_teleport::VerifyImage>(site.clone());
    services.answer::<of_teleport::IndexImage>(site.clone());
    services.answer::<of_teleport::RemoveImage>(site.clone());
    services.answer::<of_teleport::ListTransfers>(site.clone());
    services.answer::<of_teleport::RemoveTransfer>(site.clone());
    services.answer::<crate::mounts::ListLeases>(site.clone());
    services.answer::<crate::mounts::BreakLease>(site.clone());
    services.answer::<crate::changes::ListChanges>(site.clone());
    services.answer::<crate::changes::DropChanges>(site.clone());
    services.answer::<crate::changes::Order>(site.clone());
}
