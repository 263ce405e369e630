//! Two nodes whose shared directory is NFS: each has a mount of it of its own, with its own caches, in a machine whose kernel has
//! the server and the client. `nfs.sh` runs in it and reports each step. The database is a server here.

use std::net::IpAddr;
use std::path::Path;

use drover_store::testing::PostgresServer;

use crate::attach_guest::{guest, lean_drover};
use crate::world::own_address;

/// Each module after those that it needs.
const MODULES: [&str; 11] = [
    "e1000",
    "sunrpc",
    "grace",
    "lockd",
    "auth_rpcgss",
    "nfs_acl",
    "nfsd",
    "netfs",
    "dns_resolver",
    "nfs",
    "nfsv4",
];

const STEPS: [&str; 11] = [
    "the database answers",
    "a: its mount is NFS",
    "b: its mount is NFS",
    "another directory is refused",
    "an image is sent",
    "a: the image is whole",
    "b: the image is whole",
    "b takes over from a",
    "the rest goes to b",
    "a: what b has received is whole",
    "the kernel is well",
];

#[test]
#[ignore = "boots a machine without KVM, which takes minutes: \
            cargo test -p drover --test it -- --ignored two_nodes_share_a_directory_by_nfs"]
fn two_nodes_share_a_directory_by_nfs() {
    let test = "two_nodes_share_a_directory_by_nfs";
    let Some(mut server) = PostgresServer::start() else {
        return;
    };
    let IpAddr::V4(address) = own_address().ip() else {
        panic!("it is of loopback")
    };
    server.listen_at(address);
    let url = server.new_database();
    let (_, database) = url.split_once("@/").unwrap();
    let database = database.split_once('?').unwrap().0;
    let lean = tempfile::tempdir().unwrap();
    let Some(program) = lean_drover(test, lean.path()) else {
        return;
    };
    let mut with = vec![program];
    with.extend(
        ["mount", "unshare", "cmp", "timeout"].map(|tool| Path::new("/usr/bin").join(tool)),
    );
    let script = include_str!("nfs.sh").replace("DATABASE", database);
    guest::Guest {
        test,
        with,
        modules: MODULES.to_vec(),
        nic: &format!(
            "user,model=e1000,restrict=on,guestfwd=tcp:10.0.2.100:5432-cmd:socat STDIO TCP:{address}:5432"
        ),
        timeout: "1700",
        script: &script,
        steps: &STEPS,
    }
    .run();
}
