//! A real Redis server.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use drover_storage::testing::{listens, on_a_free_port};

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
        let start = |port| spawn(directory, &options, port);
        let Some((child, port)) = on_a_free_port(start) else {
            println!("SKIP disks in Redis: no redis-server here (scripts/install-deps test)");
            return None;
        };
        Some(RedisProcess {
            child,
            port,
            directory: directory.to_owned(),
            options,
        })
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
        let is_up = listens(&mut self.child, self.port);
        assert!(is_up, "redis-server does not start again");
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
