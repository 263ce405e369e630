//! The connection to a database server: where it is, and when it is tried again.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio_postgres::config::{Host, SslMode};
use tokio_postgres::{Client, Config};
use tokio_postgres_rustls::MakeRustlsConnect;

use super::tls::Security;
use super::waits::{CALL_LIMIT, wait};
use crate::catalog_error::{CatalogError, Result};
use crate::site_catalog::table::RowError;
use crate::site_catalog::url::CatalogUrl;

/// How long a connection may take.
pub(super) const CONNECT_LIMIT: Duration = Duration::from_secs(5);

/// Pause after the first failed connection; it doubles with each, up to [`MAX_PAUSE`].
const MIN_PAUSE: Duration = Duration::from_millis(200);
const MAX_PAUSE: Duration = Duration::from_secs(5);

/// Longest name of a domain here: the server cuts names at 63 bytes.
const MAX_DOMAIN_BYTES: usize = 50;

/// A statement gives up before those who wait for it do. A transaction whose process stands still does not keep the others,
/// nor does the claim of a host that is gone keep its successor.
pub(super) const SET_UP: &str = "
    SET tcp_keepalives_idle = 10;
    SET tcp_keepalives_interval = 5;
    SET tcp_keepalives_count = 3;
    SET statement_timeout = '10s';
    SET lock_timeout = '10s';
    SET idle_in_transaction_session_timeout = '10s';
    SET synchronous_commit = on;
    SET client_min_messages = warning;
    SET default_transaction_isolation = 'read committed';
";

/// Where a catalog is.
pub struct Server {
    pub(super) config: Config,
    pub(super) tls: MakeRustlsConnect,
    /// Its address without secrets.
    pub shown: String,
    /// The name of its schema, which needs quotes.
    pub schema: String,
}

impl Server {
    /// The catalog of a domain.
    ///
    /// # Errors
    /// When the address is wrong, or asks for what there is not.
    pub fn new(url: &CatalogUrl, domain: &str) -> Result<Server> {
        let shown = url.to_string();
        let wrong = |why: &str| CatalogError::Conflict(format!("cannot use {shown}: {why}"));
        let (address, security) = Security::of(url.secret()).map_err(|e| wrong(&e))?;
        let mut config: Config = address.parse().map_err(|e: tokio_postgres::Error| {
            let why = std::error::Error::source(&e).map_or(e.to_string(), ToString::to_string);
            wrong(&why)
        })?;
        let is_near = |host: &Host| match host {
            Host::Unix(_) => true,
            Host::Tcp(name) => {
                let address = name.parse::<std::net::IpAddr>();
                name == "localhost" || address.is_ok_and(|a| a.is_loopback())
            }
        };
        if config.get_hosts().is_empty() {
            return Err(wrong(
                "it names no host; for a Unix socket add ?host=/run/postgresql",
            ));
        }
        let addresses = config.get_hostaddrs();
        let near = config.get_hosts().iter().all(is_near)
            && addresses.iter().all(std::net::IpAddr::is_loopback);
        let is_socket = |host: &Host| matches!(host, Host::Unix(_));
        config.ssl_mode(match security {
            Security::Plain { said: false } if !near => {
                return Err(wrong(
                    "it does not say whether to use TLS: add ?sslmode=verify-full&sslrootcert=FILE, or, on a network that you trust, ?sslmode=disable",
                ));
            }
            Security::Plain { .. } => SslMode::Disable,
            Security::Tls { .. } if config.get_hosts().iter().any(is_socket) => {
                return Err(wrong("a Unix socket has no TLS, and needs none"));
            }
            Security::Tls { .. } => SslMode::Require,
        });
        let tls = security.connector().map_err(|e| wrong(&e))?;
        if domain.len() > MAX_DOMAIN_BYTES {
            return Err(wrong(&format!(
                "the names of domains have at most {MAX_DOMAIN_BYTES} bytes there, and {domain} has more"
            )));
        }
        if config.get_connect_timeout().is_none() {
            config.connect_timeout(CONNECT_LIMIT);
        }
        if config.get_application_name().is_none() {
            config.application_name("drover");
        }
        config.keepalives_idle(Duration::from_secs(10));
        config.tcp_user_timeout(CALL_LIMIT);
        Ok(Server {
            config,
            tls,
            shown,
            schema: format!("drover/{domain}"),
        })
    }

    /// Connects, at once.
    ///
    /// # Errors
    /// When the server cannot be reached or refuses.
    pub fn connect(&self) -> Result<Arc<Client>, RowError> {
        let (config, tls) = (self.config.clone(), self.tls.clone());
        let set_up = format!("{SET_UP} SET search_path = \"{}\";", self.schema);
        let connected = wait(CONNECT_LIMIT + CALL_LIMIT, async move {
            let (client, connection) = config.connect(tls).await?;
            tokio::spawn(async move {
                // Whoever uses the connection is told.
                if let Err(e) = connection.await {
                    tracing::debug!("connection to the catalog: {e}");
                }
            });
            client.batch_execute(&set_up).await?;
            Ok(client)
        });
        connected.map(Arc::new)
    }
}

/// A connection that is kept.
#[derive(Default)]
pub struct Link {
    /// The connection, when there is one that nobody uses.
    pub client: Option<Arc<Client>>,
    failed: Option<Failed>,
}

/// The last attempt to connect.
struct Failed {
    why: String,
    pause: Duration,
    next: Instant,
}

impl Link {
    /// Takes the connection out, or makes one; and whether it was used before. For some time after a failure, which grows,
    /// fails at once.
    ///
    /// # Errors
    /// When the server cannot be reached or refuses.
    pub fn client(&mut self, server: &Server) -> Result<(Arc<Client>, bool), RowError> {
        if let Some(client) = self.client.take().filter(|c| !c.is_closed()) {
            return Ok((client, true));
        }
        let now = Instant::now();
        if let Some(failed) = self.failed.as_ref().filter(|f| now < f.next) {
            return Err(RowError::Server(failed.why.clone(), true));
        }
        match server.connect() {
            Ok(client) => {
                if self.failed.take().is_some() {
                    tracing::info!("the catalog at {} is back", server.shown);
                }
                Ok((client, false))
            }
            Err(RowError::Server(why, retry)) => {
                if self.failed.is_none() {
                    tracing::warn!("the catalog at {} cannot be reached: {why}", server.shown);
                }
                let pause = self.failed.as_ref().map_or(MIN_PAUSE, |f| f.pause * 2);
                let pause = pause.min(MAX_PAUSE);
                self.failed = Some(Failed {
                    why: why.clone(),
                    pause,
                    next: Instant::now() + pause,
                });
                Err(RowError::Server(why, retry))
            }
            Err(e) => Err(e),
        }
    }

    /// The first connection: tries for as long as `patience`. `waiting` is told why there is none yet, once.
    ///
    /// # Errors
    /// When there was none in time, or the server refuses.
    pub fn first(
        &mut self,
        server: &Server,
        patience: Duration,
        waiting: &mut dyn FnMut(&str),
    ) -> Result<Arc<Client>> {
        let until = Instant::now() + patience;
        let mut told = false;
        loop {
            let e = match server.connect() {
                Ok(client) => return Ok(client),
                Err(e) => e,
            };
            let left = until.saturating_duration_since(Instant::now());
            match &e {
                RowError::Server(why, true) if !left.is_zero() => {
                    if !std::mem::replace(&mut told, true) {
                        waiting(&format!(
                            "waiting for the catalog at {}: {why}; giving up after {} s",
                            server.shown,
                            patience.as_secs()
                        ));
                    }
                }
                _ => return Err(e.at_server("connecting", &server.shown)),
            }
            std::thread::sleep(left.min(MIN_PAUSE * 2));
        }
    }

    /// Puts a connection back that was used without a failure.
    pub fn put_back(&mut self, client: Arc<Client>) {
        self.client = Some(client);
    }
}
