//! A real Redis server.

use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// How long it may take to listen.
const PATIENCE: Duration = Duration::from_secs(60);
/// Ports that are tried: another process may take one before the server does.
const MAX_PORTS: usize = 10;

/// A `redis-server` with its files in a directory; it ends with this.
pub struct RedisProcess {
    child: Child,
    port: u16,
    directory: PathBuf,
    options: Vec<String>,
}

impl RedisProcess {
    /// A server with these options (`--appendonly yes`); none, said loudly, if there is no such program on this host.
    ///
    /// # Panics
    /// If it does not start.
    #[must_use]
    pub fn start(directory: &Path, options: &[&str]) -> Option<RedisProcess> {
        std::fs::create_dir_all(directory).expect("a directory");
        let options: Vec<_> = options.iter().map(|option| (*option).to_owned()).collect();
        for _ in 0..MAX_PORTS {
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
            let port = listener.local_addr().expect("an address").port();
            drop(listener);
            let Some(child) = spawn(directory, &options, port) else {
                println!("SKIP disks in Redis: no redis-server here (scripts/install-deps test)");
                return None;
            };
            let mut server = RedisProcess {
                child,
                port,
                directory: directory.to_owned(),
                options: options.clone(),
            };
            if server.listens() {
                return Some(server);
            }
        }
        panic!("redis-server does not start");
    }

    fn listens(&mut self) -> bool {
        let began = Instant::now();
        while began.elapsed() < PATIENCE && matches!(self.child.try_wait(), Ok(None)) {
            if TcpStream::connect((Ipv4Addr::LOCALHOST, self.port)).is_ok() {
                return true;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        false
    }

    /// Its port on 127.0.0.1.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Kills it, as a crash would.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Starts it again, at the same port, with what its files have.
    ///
    /// # Panics
    /// If it does not start.
    pub fn start_again(&mut self) {
        self.child = spawn(&self.directory, &self.options, self.port).expect("redis-server");
        assert!(self.listens(), "redis-server does not start again");
    }
}

fn spawn(directory: &Path, options: &[String], port: u16) -> Option<Child> {
    let child = Command::new("redis-server")
        .args(["--port", &port.to_string(), "--bind", "127.0.0.1"])
        .arg("--dir")
        .arg(directory)
        .args(["--save", "", "--daemonize", "no", "--logfile", "log"])
        .args(options)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn();
    child.ok()
}

impl Drop for RedisProcess {
    fn drop(&mut self) {
        self.kill();
    }
}
