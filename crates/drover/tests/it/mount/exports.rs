//! NBD exports with real clients.

use std::fs;
use std::process::{Command, Stdio};
use std::time::Duration;

use super::client::Client;
use super::{Mounts, has, text, tool, tried};
use crate::world::{own_address, until};

#[test]
fn nbd_tools_read_and_write_an_export() {
    let test = "nbd_tools_read_and_write_an_export";
    if !has(test, &["nbdinfo", "nbdcopy", "qemu-img", "qemu-io"]) {
        return;
    }
    let m = Mounts::new();
    let mut bytes = m.qcow2("web.qcow2", 51);
    let socket = m.export("web.qcow2", &[]);
    let uri = format!("nbd+unix:///web.qcow2?socket={}", socket.display());
    assert_eq!(
        tool("nbdinfo", &["--size", &uri]).trim(),
        bytes.len().to_string()
    );
    assert!(tool("nbdinfo", &["--list", &uri]).contains("web.qcow2"));
    let out = m.world.path("out.raw");
    tool("nbdcopy", &[&uri, text(&out)]);
    assert!(
        fs::read(&out).unwrap() == bytes,
        "nbdcopy reads another image"
    );
    tool(
        "qemu-img",
        &["compare", "-f", "raw", "-F", "raw", &uri, text(&out)],
    );
    let write = ["write -P 7 70000 100000", "flush", "read -P 7 70000 100000"];
    let write = write.iter().flat_map(|c| ["-c", c]);
    tool(
        "qemu-io",
        &["-f", "raw"]
            .into_iter()
            .chain(write)
            .chain([uri.as_str()])
            .collect::<Vec<_>>(),
    );
    bytes[70_000..170_000].fill(7);
    let converted = m.world.path("out.qcow2");
    tool(
        "qemu-img",
        &[
            "convert",
            "-f",
            "raw",
            "-O",
            "qcow2",
            &uri,
            text(&converted),
        ],
    );
    tool(
        "qemu-img",
        &["convert", "-O", "raw", text(&converted), text(&out)],
    );
    assert!(
        fs::read(&out).unwrap() == bytes,
        "qemu-img reads another image"
    );
    // Rewrite all of it.
    bytes.reverse();
    fs::write(&out, &bytes).unwrap();
    tool("nbdcopy", &["--flush", text(&out), &uri]);
    m.unmount(&socket, &[]).ok();
    assert!(!socket.exists());
    assert!(
        m.far_bytes("web.qcow2") == bytes,
        "nbdcopy writes another image"
    );
}

#[test]
fn fio_verifies_what_it_writes() {
    let test = "fio_verifies_what_it_writes";
    if !has(test, &["fio"]) {
        return;
    }
    if !tried("fio", &["--enghelp"]).out.contains("nbd") {
        eprintln!("SKIP {test}: fio has no nbd engine");
        return;
    }
    let m = Mounts::new();
    m.raw("web.raw", 52);
    let socket = m.export("web.raw", &["--push-interval", "100ms"]);
    let uri = format!("--uri=nbd+unix:///web.raw?socket={}", socket.display());
    let dir = m.world.path("fio");
    fs::create_dir(&dir).unwrap();
    let aux = format!("--aux-path={}", dir.display());
    tool(
        "fio",
        &[
            "--name=x",
            "--ioengine=nbd",
            &uri,
            &aux,
            "--rw=randwrite",
            "--bs=4k",
            "--iodepth=16",
            "--size=4m",
            "--verify=crc32c",
            "--verify_fatal=1",
            "--do_verify=1",
            "--randseed=7",
            "--verify_state_save=0",
        ],
    );
    m.unmount(&socket, &[]).ok();
}

#[test]
fn several_images_by_tcp_and_a_foreground_that_ends_by_signal() {
    let test = "several_images_by_tcp_and_a_foreground_that_ends_by_signal";
    if !has(test, &["nbdinfo", "qemu-img"]) {
        return;
    }
    let m = Mounts::new();
    m.raw("one.raw", 53);
    m.raw("two.raw", 54);
    let address = own_address().to_string();
    let args = [
        "export",
        "far:one.raw",
        "far:two.raw",
        "--nbd",
        &address,
        "--allow-local-users",
        "--read-only",
    ];
    let mut child = m
        .world
        .drover("near", &args)
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    until("it listens", || {
        tried("nbdinfo", &["--list", &format!("nbd://{address}/")]).code == Some(0)
    });
    for name in ["one.raw", "two.raw"] {
        let uri = format!("nbd://{address}/{name}");
        let file = m.world.path(name);
        tool(
            "qemu-img",
            &["compare", "-f", "raw", "-F", "raw", &uri, text(&file)],
        );
    }
    assert_ne!(
        tried("nbdinfo", &[&format!("nbd://{address}/three")]).code,
        Some(0)
    );
    m.near(&args).fails(1, &["already in use"]);
    crate::world::signal(child.id(), "TERM");
    assert_eq!(crate::world::wait(&mut child), Some(0));
    assert_eq!(m.list().len(), 0);
}

#[test]
fn beyond_this_machine_only_with_certificates() {
    let test = "beyond_this_machine_only_with_certificates";
    let m = Mounts::new();
    m.raw("web.raw", 55);
    m.near(&["export", "far:web.raw", "--nbd", "0.0.0.0:0"])
        .fails(2, &["--tls-certificates", "unix:PATH"]);
    m.near(&["export", "far:web.raw", "far:web.raw", "--nbd", "unix:/x"])
        .fails(2, &["twice"]);
    if !has(test, &["openssl", "nbdinfo"]) {
        return;
    }
    let dir = m.world.path("pki");
    fs::create_dir(&dir).unwrap();
    // Find a free port on the address that the certificate is for.
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    drop(listener);
    let listen = address.to_string();
    let secure = [
        "export",
        "far:web.raw",
        "--nbd",
        &listen,
        "--background",
        "--tls-certificates",
        text(&dir),
    ];
    let open = [&secure[..], &["--allow-local-users"]].concat();
    m.near(&open).fails(1, &["server-cert.pem"]);
    let (key, cert) = (dir.join("server-key.pem"), dir.join("server-cert.pem"));
    tool(
        "openssl",
        &[
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:prime256v1",
            "-nodes",
            "-days",
            "2",
            "-subj",
            "/CN=localhost",
            "-addext",
            "subjectAltName=DNS:localhost,IP:127.0.0.1",
            "-keyout",
            text(&key),
            "-out",
            text(&cert),
        ],
    );
    // The server's certificate keeps nobody out: on a loopback address that must be allowed, otherwise clients need one too.
    m.near(&secure).fails(2, &["--allow-local-users"]);
    m.near(&open).ok();
    m.near(&[
        "export",
        "far:web.raw",
        "--nbd",
        "0.0.0.0:0",
        "--tls-certificates",
        text(&dir),
    ])
    .fails(2, &["ca-cert.pem", text(&dir)]);
    assert_ne!(
        tried("nbdinfo", &[&format!("nbd://{listen}/web.raw")]).code,
        Some(0),
        "served without TLS"
    );
    let client = m.world.path("client-pki");
    fs::create_dir(&client).unwrap();
    fs::copy(&cert, client.join("ca-cert.pem")).unwrap();
    let uri = format!(
        "nbds://localhost:{}/web.raw?tls-certificates={}",
        address.port(),
        client.display()
    );
    assert_eq!(
        tool("nbdinfo", &["--size", &uri]).trim(),
        (4 << 20).to_string()
    );
    until("it is free", || {
        m.near(&["unmount", &listen]).code == Some(0)
    });
    // With client certificates, other users have nothing to connect with.
    fs::copy(&cert, dir.join("ca-cert.pem")).unwrap();
    m.near(&secure).ok();
    assert_ne!(tried("nbdinfo", &[&uri]).code, Some(0), "served to anyone");
    until("it is free", || {
        m.near(&["unmount", &listen]).code == Some(0)
    });
}

#[test]
fn nbdfuse_shows_it_and_an_open_connection_keeps_it() {
    let test = "nbdfuse_shows_it_and_an_open_connection_keeps_it";
    if !has(test, &["nbdfuse", "fusermount3"]) || !super::can_mount(test) {
        return;
    }
    let m = Mounts::new();
    let bytes = m.raw("web.raw", 56);
    let socket = m.export("web.raw", &["--read-only"]);
    let dir = m.world.path("fuse");
    fs::create_dir(&dir).unwrap();
    let uri = format!("nbd+unix:///web.raw?socket={}", socket.display());
    let mut child = Command::new("nbdfuse")
        .args(["-r", text(&dir), &uri])
        .spawn()
        .unwrap();
    let file = dir.join("nbd");
    until("nbdfuse is there", || file.exists());
    let read = fs::read(&file).unwrap();
    let refused = m.unmount(&socket, &[]);
    tool("fusermount3", &["-u", text(&dir)]);
    crate::world::wait(&mut child);
    assert!(read == bytes);
    refused.fails(1, &["NBD connection", "--lazy"]);
    std::thread::sleep(Duration::from_millis(50));
    m.unmount(&socket, &["--lazy"]).ok();
}

#[test]
fn a_client_that_is_about_to_end_is_waited_for() {
    let m = Mounts::new();
    m.raw("web.raw", 60);
    let socket = m.export("web.raw", &["--read-only"]);
    // On a busy machine the state may be over before this test observes it: retry.
    until("an unmount waited", || {
        let nbd = Client::connect(&socket, "web.raw");
        std::thread::scope(|scope| {
            let unmount = scope.spawn(|| m.unmount(&socket, &[]));
            until("the unmount waits, or has failed", || {
                unmount.is_finished() || m.list().iter().any(|mount| mount["state"] == "ending")
            });
            drop(nbd);
            let ran = unmount.join().unwrap();
            if ran.code != Some(0) {
                ran.fails(1, &["NBD connection"]);
                return false;
            }
            true
        })
    });
}
