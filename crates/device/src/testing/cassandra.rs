//! A real cluster of Cassandra.

use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::backend::chunk_store::cassandra_query;

/// How long a server may take to listen.
const PATIENCE: Duration = Duration::from_secs(240);

/// What the virtual machine of Java 17 lets Cassandra see of itself.
const EXPORTS: [&str; 7] = [
    "java.base/jdk.internal.misc",
    "java.base/jdk.internal.ref",
    "java.base/sun.nio.ch",
    "java.management.rmi/com.sun.jmx.remote.internal.rmi",
    "java.rmi/sun.rmi.registry",
    "java.rmi/sun.rmi.server",
    "java.sql/java.sql",
];
const OPENS: [&str; 15] = [
    "java.base/java.io",
    "java.base/java.lang",
    "java.base/java.lang.module",
    "java.base/java.nio",
    "java.base/java.util",
    "java.base/java.util.concurrent",
    "java.base/java.util.concurrent.atomic",
    "java.base/jdk.internal.loader",
    "java.base/jdk.internal.math",
    "java.base/jdk.internal.module",
    "java.base/jdk.internal.ref",
    "java.base/jdk.internal.reflect",
    "java.base/jdk.internal.util.jar",
    "java.base/sun.nio.ch",
    "jdk.management/com.sun.management.internal",
];

/// Servers of Cassandra, each with an address of its own; they end with this.
pub struct CassandraCluster {
    libraries: PathBuf,
    servers: Vec<Server>,
}

struct Server {
    child: Option<Child>,
    directory: PathBuf,
    address: Ipv4Addr,
}

impl CassandraCluster {
    /// So many servers, with a keyspace `disks` that has each row on all of them; none, said loudly, if Cassandra is not on this
    /// host.
    ///
    /// # Panics
    /// If they do not start.
    #[must_use]
    pub fn start(directory: &Path, count: usize) -> Option<CassandraCluster> {
        let libraries = libraries()?;
        // One network of 127.0.0.0/8 for each: the ports are the same for all servers.
        let network = fastrand::u32(1 << 8..(1 << 16) - 1) << 8;
        let addresses: Vec<_> = (1..=count as u32)
            .map(|nth| Ipv4Addr::from((127 << 24) | network | nth))
            .collect();
        let ports = [free_port(addresses[0]), free_port(addresses[0])];
        let mut cluster = CassandraCluster {
            libraries,
            servers: Vec::new(),
        };
        for address in &addresses {
            let directory = directory.join(address.to_string());
            std::fs::create_dir_all(&directory).expect("a directory");
            let settings = settings(&directory, *address, addresses[0], ports);
            std::fs::write(directory.join("cassandra.yaml"), settings).expect("its settings");
            cluster.servers.push(Server {
                child: None,
                directory,
                address: *address,
            });
        }
        for nth in 0..count {
            cluster.start_again(nth);
        }
        let keyspace = format!(
            "CREATE KEYSPACE disks WITH replication = {{'class': 'SimpleStrategy', 'replication_factor': {count}}}"
        );
        cluster.query(&keyspace);
        Some(cluster)
    }

    /// Where a server is reached: its address and port.
    #[must_use]
    pub fn at(&self, nth: usize) -> String {
        let server = &self.servers[nth];
        let settings = std::fs::read_to_string(server.directory.join("cassandra.yaml"));
        let settings = settings.expect("its settings");
        let port = settings
            .lines()
            .find_map(|line| line.strip_prefix("native_transport_port: "));
        format!("{}:{}", server.address, port.expect("its port"))
    }

    /// Executes a statement at the first server.
    ///
    /// # Panics
    /// If that refuses.
    pub fn query(&self, text: &str) {
        let at = self.at(0);
        let (host, port) = at.rsplit_once(':').expect("a port");
        let done = cassandra_query(host, port.parse().expect("a port"), text);
        done.unwrap_or_else(|e| panic!("{text}: {e}"));
    }

    /// Kills a server, as a crash would.
    pub fn kill(&mut self, nth: usize) {
        if let Some(mut child) = self.servers[nth].child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    /// Starts a server, with what its files have.
    ///
    /// # Panics
    /// If it does not start.
    pub fn start_again(&mut self, nth: usize) {
        let at = self.at(nth);
        let server = &mut self.servers[nth];
        server.child = Some(server.spawn(&self.libraries));
        let began = Instant::now();
        while TcpStream::connect(&at).is_err() {
            let ended = server.child.as_mut().map(Child::try_wait);
            let log = server.directory.join("out");
            assert!(
                began.elapsed() < PATIENCE && matches!(ended, Some(Ok(None))),
                "Cassandra does not start: {}",
                std::fs::read_to_string(log).unwrap_or_default()
            );
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

impl Server {
    fn spawn(&self, libraries: &Path) -> Child {
        let out = std::fs::File::create(self.directory.join("out")).expect("a log");
        let err = out.try_clone().expect("a log");
        let mut command = Command::new("java");
        command.args(["-Xms256m", "-Xmx512m", "-XX:+UseSerialGC"]);
        command.args([
            "-XX:TieredStopAtLevel=1",
            "-Djdk.attach.allowAttachSelf=true",
        ]);
        for (option, modules) in [("--add-exports", &EXPORTS[..]), ("--add-opens", &OPENS)] {
            for module in modules {
                command.args([option, &format!("{module}=ALL-UNNAMED")]);
            }
        }
        let directory = self.directory.display();
        command
            .arg(format!(
                "-Dcassandra.config=file://{directory}/cassandra.yaml"
            ))
            .arg(format!("-Dcassandra.storagedir={directory}"))
            .args([
                "-Dcassandra-foreground=yes",
                "-Dcassandra.ring_delay_ms=100",
            ])
            .args([
                "-Dcassandra.skip_wait_for_gossip_to_settle=0",
                "-Dcassandra.superuser_setup_delay_ms=0",
            ])
            .arg("-cp")
            .arg(libraries.join("*"))
            .arg("org.apache.cassandra.service.CassandraDaemon")
            .current_dir(&self.directory)
            .stdin(Stdio::null())
            .stdout(out)
            .stderr(err);
        command.spawn().expect("java")
    }
}

impl Drop for CassandraCluster {
    fn drop(&mut self) {
        for nth in 0..self.servers.len() {
            self.kill(nth);
        }
    }
}

fn free_port(address: Ipv4Addr) -> u16 {
    let listener = TcpListener::bind((address, 0)).expect("a port");
    listener.local_addr().expect("an address").port()
}

fn settings(
    directory: &Path,
    own: Ipv4Addr,
    seed: Ipv4Addr,
    [storage, native]: [u16; 2],
) -> String {
    let directory = directory.display();
    format!(
        "cluster_name: drover
num_tokens: 1
auto_bootstrap: false
partitioner: org.apache.cassandra.dht.Murmur3Partitioner
endpoint_snitch: SimpleSnitch
seed_provider:
  - class_name: org.apache.cassandra.locator.SimpleSeedProvider
    parameters:
      - seeds: \"{seed}:{storage}\"
listen_address: {own}
rpc_address: {own}
storage_port: {storage}
ssl_storage_port: {storage}
native_transport_port: {native}
data_file_directories: [{directory}/data]
commitlog_directory: {directory}/log
saved_caches_directory: {directory}/caches
hints_directory: {directory}/hints
cdc_raw_directory: {directory}/cdc
commitlog_sync: batch
auto_snapshot: false
"
    )
}

/// The directory of its libraries, as `scripts/install-deps` makes it.
fn libraries() -> Option<PathBuf> {
    let home = std::env::var_os("HOME").unwrap_or_default();
    let libraries = Path::new(&home).join(".cache/drover-tests/cassandra");
    let has_java = std::env::var_os("PATH").is_some_and(|path| {
        let mut dirs = std::env::split_paths(&path);
        dirs.any(|dir| dir.join("java").is_file())
    });
    if has_java && libraries.is_dir() {
        return Some(libraries);
    }
    println!("SKIP disks in Cassandra: no Cassandra here (scripts/install-deps test)");
    None
}
