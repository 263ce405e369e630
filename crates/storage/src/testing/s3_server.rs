//! A real S3 server, `versitygw`.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use super::server::on_a_free_port;

/// The server, with a bucket `vaults`, a user `test` and the password `testsecret`; it ends with this.
pub struct S3Server {
    child: Child,
    port: u16,
}

impl S3Server {
    /// A server that keeps its objects below `directory`; none, said loudly, if there is no such program on this host.
    ///
    /// # Panics
    /// If it does not start.
    #[must_use]
    pub fn start(directory: &Path) -> Option<S3Server> {
        let program = program()?;
        std::fs::create_dir_all(directory.join("vaults")).expect("a bucket");
        let start = |port: u16| {
            let child = Command::new(&program)
                .args(["--port", &format!("127.0.0.1:{port}"), "--quiet", "posix"])
                .arg(directory)
                .env("ROOT_ACCESS_KEY", "test")
                .env("ROOT_SECRET_KEY", "testsecret")
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn();
            Some(child.expect("versitygw"))
        };
        let (child, port) = on_a_free_port(start)?;
        Some(S3Server { child, port })
    }

    /// Its process.
    #[must_use]
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Its port on 127.0.0.1.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }
}

impl Drop for S3Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn program() -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut dirs: Vec<_> = std::env::split_paths(&path).collect();
    dirs.extend(std::env::var_os("HOME").map(|home| Path::new(&home).join("go/bin")));
    let found = dirs
        .into_iter()
        .map(|dir| dir.join("versitygw"))
        .find(|program| program.is_file());
    if found.is_none() {
        println!("SKIP object stores: no versitygw here (scripts/install-deps test)");
    }
    found
}
