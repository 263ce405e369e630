//! Sending disk images between sites: the three roles as state machines, and the sessions that
//! drive them.
//!
//! - [`send`] sends images; a [`Site`] receives them with its services [`Sessions`] and [`DataConnections`].
//! - [`send_flock`] sends images as one job; the site also needs [`FlockSessions`].
//! - [`Site::launch`]: an image in transit as a device ([`LaunchDevice`]).
//! - [`open_teleporter`] and [`serve_teleporter`]: a teleporter that matches for other sites.
//! - [`protocol`]: the messages and limits of a session; [`services`]: the other requests that a site answers;
//!   [`progress`]: events and counters of a running send.
//!
//! Source, destination and teleporter are protocol logic without I/O and without a clock (`source`, `destination`,
//! `teleporter`); the modules under `session` drive them with threads and sockets.
//!
//! What must not live here: sockets and TLS (`net`), the parsing of image formats (`image`), the
//! matcher's data structures (`index`), and anything about a command line.
//!
//! Sending an image to a site over the loopback interface:
//!
//! ```
//! use std::sync::Arc;
//! use std::time::Duration;
//!
//! use drover_core::ImageName;
//! use drover_image::Conversion;
//! use drover_net::service::{IncomingCall, Peer, Services};
//! use drover_net::{Code, Identity, Listener, Refusal, Rights};
//! use drover_store::SiteCatalog;
//! use drover_teleport::progress::SendEvent;
//! use drover_teleport::{DataConnections, SendItem, SendOptions, Sessions, Site, SiteConfig, Supplies, send};
//!
//! # #[tokio::main]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! // A site and its services.
//! let home = tempfile::tempdir()?;
//! let (catalog, _) = SiteCatalog::open(home.path())?;
//! let config = SiteConfig {
//!     images_dir: home.path().join("images"),
//!     work_dir: home.path().join("work"),
//!     state_dir: home.path().join("state"),
//!     teleporter: None,
//!     reserve_bytes: 0,
//!     supplies: Supplies::new(8),
//!     sequence_data_bytes: 64 << 20,
//!     image_mode: 0o600,
//!     disk: Arc::new(drover_storage::HostDisk),
//!     shared: None,
//! };
//! let (site, _) = Site::open(config, Arc::new(catalog))?;
//! let mut services = Services::new(Refusal::new(Code::Unsupported, "no such service"));
//! services.add(Sessions(site.clone()));
//! services.add(DataConnections(site.clone()));
//! let services = Arc::new(services);
//! let there = Identity::generate();
//! let listener = Listener::bind("127.0.0.1:0".parse()?, &there).await?;
//! let address = listener.local_addr().to_string();
//! let (_stop, stopped) = tokio::sync::watch::channel(false);
//! let site_stops = stopped.clone();
//! tokio::spawn(async move {
//!     while let Ok(pending) = listener.accept().await {
//!         let (services, stop) = (services.clone(), site_stops.clone());
//!         tokio::spawn(async move {
//!             let connection = pending.handshake().await?;
//!             let key = connection.peer().expect("a peer of TLS has a key");
//!             let peer = Peer { key, name: "lyon".into(), rights: Rights::DEFAULT.of_peer(), domain: "default".into() };
//!             services.serve(peer, IncomingCall::receive(connection, stop).await?).await
//!         });
//!     }
//! });
//!
//! // An image and its destination.
//! let path = home.path().join("disk.raw");
//! std::fs::write(&path, vec![7; 1 << 20])?;
//! let item = SendItem { path, name: ImageName::new("disk.raw")?, conversion: Conversion::AsIs, snapshot: None, profile: None };
//! let options = SendOptions {
//!     identity: Identity::generate(),
//!     peer: there.key(),
//!     peer_name: "paris".into(),
//!     addresses: vec![address],
//!     route: Arc::default(),
//!     limit: None,
//!     dry_run: false,
//!     connections: None,
//!     compress: None,
//!     give_up_after: Duration::from_secs(10),
//!     profiles: None,
//! };
//! let on_event = Arc::new(|event: SendEvent| println!("{event:?}"));
//! let reports = send(vec![item], options, on_event, Arc::default(), Arc::default(), stopped).await?;
//! // Its 256 blocks are identical: they do not all cross the link.
//! assert_eq!(reports[0].sent_blocks + reports[0].matched_blocks, 256);
//! assert!(reports[0].wire_sent_bytes < 1 << 20);
//! assert_eq!(site.list()[0].digest, reports[0].digest);
//! # Ok(())
//! # }
//! ```

mod active;
mod codec;
mod compress;
mod destination;
mod error;
mod files;
mod flock;
mod frames;
#[cfg(fuzzing)]
pub mod fuzzing;
mod launch;
mod log;
mod matching;
mod others;
mod partials;
pub mod progress;
pub mod protocol;
pub mod services;
mod session;
mod site;
mod source;
mod stages;
mod teleporter;
#[cfg(any(fuzzing, feature = "testing"))]
pub mod testing;
mod transfer;
mod transfers;
mod walk;

pub use codec::Packing;
pub use compress::{Effort, MAX_LEVEL, Pace, Packer, Passed, Unpacker};
pub use error::TeleportError;
pub use flock::hints::{Claimed, MAX_HINTS};
pub use flock::{
    FlockImage, FlockInfo, FlockRecord, FlockState, ImageBlocks, ImageState, MAX_FLOCK_IMAGES,
    MAX_FLOCKS, MAX_PEER_FLOCKS, flocks,
};
pub use launch::{Launch, LaunchDevice, LaunchStatus, boot, follow};
pub use matching::{LocalTeleporter, RemoteTeleporter, open_teleporter, serve_teleporter};
pub use others::{FENCED, NotHeld, Others, Shared};
pub use session::{
    DataConnections, FindProfile, FlockOrder, FlockSent, FlockSessions, OnEvent, SendItem,
    SendLane, SendOptions, Sessions, Snapshot, end_flock, nodes_of, open_flock, send, send_flock,
    send_of_flock, source_stamp,
};
pub use site::{
    Callbacks, Holder, MAX_IDLE, MAX_LAYOUT_MEMORY, MAX_PEER_SESSIONS, OldCopies, OldCopy, Origin,
    Quota, RightsOf, SendEvent, SendStep, Site, SiteConfig, SiteStatus, Supplies, TransferStatus,
    Watcher,
};
pub use stages::StageTime;
pub use teleporter::Teleporter;
pub use transfers::{TransferState, Unfinished, unfinished};
pub use walk::{digest_file, digest_of};
