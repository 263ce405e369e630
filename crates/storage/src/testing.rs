//! For tests: real servers of this host: of S3, with a proxy before it that fails as told, or any other.

mod s3_proxy;
mod s3_server;
mod server;

pub use s3_proxy::{Fault, Proxy, SILENCE, Server};
pub use s3_server::S3Server;
pub use server::{listens, on_a_free_port};
