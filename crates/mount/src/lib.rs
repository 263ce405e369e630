//! Remote devices: the protocol that serves a device to another site, its client, and direct and managed mounts
//! composed from `device` and `net`.
//!
//! - [`server`]: the site's side. It serves images as devices and stores what mounts write in overlays beside them.
//! - [`client`]: the mount's side. [`client::Client`] is the remote of a managed device (with a cache, see
//!   `drover_device::synced`); [`direct::RemoteDevice`] turns it into a device without a cache.
//! - [`protocol`]: the messages between the two.
//!
//! ```
//! use std::sync::Arc;
//!
//! use drover_core::{BlockDevice, Digest, ImageName};
//! use drover_device::backend::MemoryDevice;
//! use drover_mount::client::{Client, Connecting, Connector, Options};
//! use drover_mount::direct::RemoteDevice;
//! use drover_mount::server::{Base, Config, Images, Room, Server};
//! use drover_net::service::IncomingCall;
//! use drover_net::{Connection, Identity, Peer, PeerKey, Refusal, Rights};
//! use drover_store::lease::Access;
//!
//! /// A site with one image, in memory.
//! struct OneImage;
//!
//! impl Images for OneImage {
//!     fn allow(&self, _: &ImageName, _: &Peer, _: Access) -> Result<(), Refusal> {
//!         Ok(())
//!     }
//!
//!     fn room(&self, _: &PeerKey, _: u64) -> Result<Room, Refusal> {
//!         Ok(Box::new(()))
//!     }
//!
//!     fn open(&self, _: &ImageName) -> Result<Base, Refusal> {
//!         let device = Arc::new(MemoryDevice::from_bytes(&[7; 1 << 20]));
//!         Ok(Base { device, digest: Digest([7; 32]), arriving: None, through: None })
//!     }
//! }
//!
//! /// Connects to a server of this process; a real one uses `drover_net::connect`.
//! struct Local(Arc<Server>, Peer);
//!
//! impl Connector for Local {
//!     fn connect(&self) -> Connecting<'_> {
//!         let (here, there) = Connection::pair().expect("a pair of sockets");
//!         let (server, peer) = (self.0.clone(), self.1.clone());
//!         tokio::spawn(async move {
//!             let (_stop, stopped) = tokio::sync::watch::channel(false);
//!             let call = IncomingCall::receive(there, stopped).await?;
//!             server.serve_connection(peer, call).await
//!         });
//!         Box::pin(async { Ok(here) })
//!     }
//! }
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let runtime = tokio::runtime::Runtime::new()?;
//! let _inside = runtime.enter();
//! let state = tempfile::tempdir()?;
//! let server = Server::new(Config::new(Arc::new(OneImage), state.path(), 2))?;
//! let options = Options::new(ImageName::new("web")?, Access::ReadOnly);
//! let peer = Peer { key: Identity::generate().key(), name: "nantes".into(), rights: Rights::DEFAULT.of_peer(), domain: "default".into() };
//! let connector = Arc::new(Local(server, peer));
//! let client = runtime.block_on(Client::open(runtime.handle(), connector, options))?;
//! let device = RemoteDevice::new(Arc::new(client));
//! let mut bytes = [0; 16];
//! device.read(4096, &mut bytes)?;
//! assert_eq!(bytes, [7; 16]);
//! device.close()?;
//! # Ok(())
//! # }
//! ```
//!
//! Not in this crate: exposing a device to a kernel or a program (`frontend`), and the command line (`drover`).

pub mod client;
mod compress;
pub mod direct;
mod error;
#[cfg(fuzzing)]
pub mod fuzzing;
pub mod protocol;
pub mod server;

pub use error::MountError;

#[cfg(test)]
mod simulation;
