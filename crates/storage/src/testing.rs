//! For tests: a real S3 server, and a proxy before it that fails as told.

mod s3_proxy;
mod s3_server;

pub use s3_proxy::{Fault, Proxy, SILENCE, Server};
pub use s3_server::S3Server;
