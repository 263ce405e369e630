//! A PostgreSQL server for tests: a cluster of its own in a temporary directory, which is reached by a Unix socket only.

use std::io::{self, Write};
use std::net::Ipv4Addr;
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tempfile::TempDir;

/// Who runs it when the test is run by root, which PostgreSQL refuses: nobody.
const NOBODY: u32 = 65_534;

/// How long it may take to start or stop on a loaded machine.
const PATIENCE: Duration = Duration::from_secs(120);

/// Ends the server when a line comes, and removes its directory when the test program ends first, however that happens.
const KEEPER: &str = r#"
dir=$1; shift
"$@" >>"$dir/log" 2>&1 &
server=$!
read -r order
kill -QUIT $server
wait $server
[ "$order" = stop ] || rm -rf "$dir"
"#;

/// A server that was started by this program, and ends with it.
pub struct PostgresServer {
    dir: TempDir,
    programs: PathBuf,
    keeper: Option<Child>,
    databases: AtomicU64,
    /// Where it listens besides its socket, if it does.
    address: Option<Ipv4Addr>,
    tls: bool,
}

impl PostgresServer {
    /// Creates a cluster and starts its server; `None`, after a line that says `SKIP`, when PostgreSQL is not installed.
    ///
    /// # Panics
    /// When it is installed and cannot be started.
    #[must_use]
    pub fn start() -> Option<PostgresServer> {
        let Some(programs) = programs() else {
            println!("SKIP: no PostgreSQL server here (Debian: apt-get install postgresql)");
            return None;
        };
        let dir = TempDir::new().expect("a temporary directory");
        if is_root() {
            chown(dir.path(), Some(NOBODY), Some(NOBODY)).expect("to be root");
        }
        let mut server = PostgresServer {
            dir,
            programs,
            keeper: None,
            databases: AtomicU64::new(0),
            address: None,
            tls: false,
        };
        let made = server
            .command("initdb")
            .args(["--no-sync", "--auth=trust", "--username=drover"])
            .args(["--encoding=UTF8", "--no-locale", "-D"])
            .arg(server.data())
            .output()
            .expect("initdb");
        assert!(made.status.success(), "{made:?}");
        server.resume();
        Some(server)
    }

    /// The address of a new, empty database.
    ///
    /// # Panics
    /// When the server refuses.
    pub fn new_database(&self) -> String {
        let name = format!("test{}", self.databases.fetch_add(1, Ordering::Relaxed));
        self.sql("postgres", &format!("CREATE DATABASE {name}"));
        self.url(&name)
    }

    /// Starts it again, with this certificate and its key, at a loopback address of its own that it also listens on from now on.
    ///
    /// # Panics
    /// When it does not start.
    pub fn listen_with_tls(&mut self, address: Ipv4Addr, certificate: &str, key: &str) {
        self.stop();
        for (name, pem) in [("server.crt", certificate), ("server.key", key)] {
            let path = self.data().join(name);
            std::fs::write(&path, pem).expect("a directory of its own");
            let private = std::fs::Permissions::from_mode(0o600);
            std::fs::set_permissions(&path, private).expect("a file of its own");
            if is_root() {
                chown(&path, Some(NOBODY), Some(NOBODY)).expect("to be root");
            }
        }
        (self.address, self.tls) = (Some(address), true);
        self.resume();
    }

    /// Starts it again, without TLS, at a loopback address of its own that it also listens on from now on.
    ///
    /// # Panics
    /// When it does not start.
    pub fn listen_at(&mut self, address: Ipv4Addr) {
        self.stop();
        self.address = Some(address);
        self.resume();
    }

    /// Starts it again, listening where it did, without TLS.
    ///
    /// # Panics
    /// When it does not start.
    pub fn listen_without_tls(&mut self) {
        self.stop();
        self.tls = false;
        self.resume();
    }

    fn url(&self, database: &str) -> String {
        let host = self.dir.path().display();
        format!("postgres://drover@/{database}?host={host}")
    }

    /// Runs a statement in the database with this address or name, by `psql`, and returns what it prints.
    ///
    /// # Panics
    /// When it fails.
    pub fn sql(&self, database: &str, statement: &str) -> String {
        let url = match database.contains("://") {
            true => database.to_owned(),
            false => self.url(database),
        };
        let done = self
            .command("psql")
            .args(["-X", "-At", "-v", "ON_ERROR_STOP=1", "-c", statement, &url])
            .output()
            .expect("psql");
        assert!(done.status.success(), "{statement}: {done:?}");
        String::from_utf8_lossy(&done.stdout).trim().to_owned()
    }

    /// Ends the server at once, as a crash does; the cluster stays.
    ///
    /// # Panics
    /// When it does not end.
    pub fn stop(&mut self) {
        let Some(mut keeper) = self.keeper.take() else {
            return;
        };
        let mut orders = keeper.stdin.take().expect("a pipe");
        orders.write_all(b"stop\n").expect("a keeper that reads");
        keeper.wait().expect("a child");
    }

    /// Starts it again.
    ///
    /// # Panics
    /// When it does not start.
    pub fn resume(&mut self) {
        let (dir, data) = (self.dir.path().to_owned(), self.data());
        let mut keeper = self.of_user(Command::new("/bin/sh"));
        let keeper = keeper
            .args(["-c", KEEPER, "keeper"])
            .arg(&dir)
            .arg(self.programs.join("postgres"))
            .arg("-D")
            .arg(data)
            .args(["-c", "fsync=off", "-c"])
            .arg(match self.address {
                None => "listen_addresses=".into(),
                Some(address) => format!("listen_addresses={address}"),
            })
            .arg("-c")
            .arg(match self.tls {
                false => "ssl=off",
                true => "ssl=on",
            })
            .arg("-c")
            .arg(format!("unix_socket_directories={}", dir.display()))
            .args(["-c", "max_connections=200", "-c", "shared_buffers=16MB"])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0);
        self.keeper = Some(keeper.spawn().expect("a shell"));
        let until = Instant::now() + PATIENCE;
        let ready = || {
            let mut ask = self.command("pg_isready");
            let asked = ask.arg("-q").arg("-h").arg(&dir).status();
            asked.expect("pg_isready").success()
        };
        while !ready() {
            let log = || std::fs::read_to_string(dir.join("log")).unwrap_or_default();
            assert!(Instant::now() < until, "it does not start: {}", log());
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    fn data(&self) -> PathBuf {
        self.dir.path().join("data")
    }

    fn command(&self, program: &str) -> Command {
        self.of_user(Command::new(self.programs.join(program)))
    }

    fn of_user(&self, mut command: Command) -> Command {
        if is_root() {
            command.uid(NOBODY).gid(NOBODY);
        }
        command.current_dir("/").stdin(Stdio::null());
        command
    }
}

impl Drop for PostgresServer {
    fn drop(&mut self) {
        self.stop();
    }
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// The directory of the server's programs: Debian keeps them out of `PATH`.
fn programs() -> Option<PathBuf> {
    let has = |dir: &PathBuf| {
        ["initdb", "postgres", "psql", "pg_isready"]
            .iter()
            .all(|program| is_executable(&dir.join(program)))
    };
    let versions = std::fs::read_dir("/usr/lib/postgresql")
        .into_iter()
        .flatten();
    let mut dirs: Vec<PathBuf> = versions.flatten().map(|v| v.path().join("bin")).collect();
    dirs.sort();
    dirs.reverse();
    dirs.extend(std::env::split_paths(&std::env::var_os("PATH")?));
    dirs.into_iter().find(has)
}

fn is_executable(path: &Path) -> bool {
    let mode = |path: &Path| -> io::Result<u32> { Ok(path.metadata()?.permissions().mode()) };
    mode(path).is_ok_and(|mode| mode & 0o111 != 0)
}
