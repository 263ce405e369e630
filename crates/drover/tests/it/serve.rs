//! The running site: its socket, its metrics, and limits on strangers.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixDatagram;
use std::time::Duration;

use crate::world::{World, until};

fn address_of(world: &World, home: &str) -> SocketAddr {
    let status = world.run(home, &["status", "--json"]).ok().json();
    status[0]["addresses"][0].as_str().unwrap().parse().unwrap()
}

#[test]
fn status_says_what_runs_and_when_nothing_does() {
    let world = World::new();
    let site = world.serve("far", &[]);
    let status = world.run("far", &["status", "--json"]).ok().json();
    assert_eq!(
        (&status[0]["running"], &status[0]["duty"]),
        (&true.into(), &"site".into())
    );
    assert!(
        world
            .run("far", &["status"])
            .ok()
            .out
            .contains("images 0, peers 0")
    );
    let socket = world.path("far/site.sock");
    assert_eq!(
        std::fs::metadata(&socket).unwrap().permissions().mode() & 0o777,
        0o600
    );
    // Only one process can own a home.
    world
        .run("far", &["serve", "--listen", "127.0.0.1:0"])
        .fails(1, &["in use by another drover process"]);
    site.stop();
    assert!(!socket.exists());
    let ran = world
        .run("far", &["status", "--json"])
        .fails(1, &["no site is running", "drover serve"]);
    assert_eq!(ran.json()[0]["running"], false);
}

#[test]
fn a_killed_site_does_not_block_the_next() {
    let world = World::new();
    let mut site = world.serve("far", &[]);
    site.signal("KILL");
    site.wait();
    world
        .run("far", &["status"])
        .fails(1, &["no site is running"]);
    world.run("far", &["images"]).ok();
    let site = world.serve("far", &[]);
    assert_eq!(site.stop().0, Some(0));
}

#[test]
fn metrics_are_on_the_socket_and_on_a_port_that_was_asked_for() {
    let world = World::new();
    let port = crate::world::own_address();
    let _site = world.serve("far", &["--metrics-listen", &port.to_string()]);
    let local = world.run("far", &["status", "--metrics"]).ok().out;
    assert!(
        local.contains("\ndrover_images{domain=\"default\"} 0\n"),
        "{local}"
    );
    let answer = http(port, "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n");
    assert!(
        answer.starts_with("HTTP/1.1 200 OK\r\n") && answer.contains("\ndrover_connections_open "),
        "{answer}"
    );
    assert!(http(port, "GET / HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 404"));
    assert!(http(port, "DELETE /metrics HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 405"));
    assert!(http(port, "GET /metrics?x=1 HTTP/1.0\r\n\r\n").starts_with("HTTP/1.0 200"));
    for bad in ["GET\r\n\r\n", "GET /metrics SSH-2.0\r\n\r\n"] {
        assert!(http(port, bad).starts_with("HTTP/1.1 400"), "{bad:?}");
    }
    // Like `nc -N`: shuts down its sending side, and waits for the response.
    let mut stream = TcpStream::connect(port).unwrap();
    stream.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").unwrap();
    stream.shutdown(std::net::Shutdown::Write).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    let endless = http(port, &"x".repeat(20_000));
    assert!(
        endless.is_empty() || endless.starts_with("HTTP/1.1 431"),
        "an endless request is cut off: {endless}"
    );
}

#[test]
fn work_that_a_running_site_must_do_goes_through_its_socket() {
    let world = World::new();
    let _site = world.serve("far", &[]);
    let path = world.image("a.img", 3, 300);
    world.run("far", &["index", "a.img"]).ok();
    assert_eq!(
        world.run("far", &["status", "--json"]).ok().json()[0]["images"],
        1
    );
    world.run("far", &["verify", "a.img"]).ok();
    world.run("far", &["verify", "b.img"]).fails(3, &["b.img"]);
    let metrics = world.run("far", &["status", "--metrics"]).ok().out;
    assert!(
        metrics.contains("drover_images_verified_total{result=\"good\"} 1"),
        "{metrics}"
    );
    world.run("far", &["rm", "a.img", "--yes"]).ok();
    assert!(path.exists());
    assert_eq!(
        world.run("far", &["status", "--json"]).ok().json()[0]["images"],
        0
    );
}

#[test]
fn a_deep_home_works_too() {
    let world = World::new();
    let home = format!("{}/{}", "d".repeat(80), "e".repeat(80));
    world.run(&home, &["init"]).ok();
    let log_dir = world.path(&"d".repeat(80));
    assert!(log_dir.is_dir());
    let site = world.serve(&home, &[]);
    world.run(&home, &["status"]).ok();
    assert_eq!(site.stop().0, Some(0));
}

#[test]
fn strangers_cannot_keep_peers_out() {
    let world = World::new();
    let site = world.pair();
    let address = address_of(&world, "far");
    // Silent connections, and some that send garbage.
    let mut strangers: Vec<TcpStream> = (0..40)
        .map(|_| TcpStream::connect(address).unwrap())
        .collect();
    for (i, s) in strangers.iter_mut().enumerate().filter(|(i, _)| i % 2 == 0) {
        let _ = s.write_all(&[i as u8; 10_000]);
    }
    // They are dropped after seconds; a peer that retries gets in.
    until("the peer gets in", || {
        world.run("near", &["images", "far"]).code == Some(0)
    });
    let metrics = world.run("far", &["status", "--metrics"]).ok().out;
    let rejected = metrics
        .lines()
        .find_map(|l| l.strip_prefix("drover_connections_rejected_total{reason=\"handshake\"} "));
    assert!(rejected.unwrap().parse::<u64>().unwrap() >= 20, "{metrics}");
    assert!(!site.log().contains("panicked"), "{}", site.log());
    // Nor do they delay the shutdown.
    let _more: Vec<TcpStream> = (0..5)
        .map(|_| TcpStream::connect(address).unwrap())
        .collect();
    assert_eq!(site.stop().0, Some(0));
}

#[test]
fn systemd_is_notified() {
    let world = World::new();
    let path = world.path("notify");
    let socket = UnixDatagram::bind(&path).unwrap();
    socket
        .set_read_timeout(Some(Duration::from_secs(60)))
        .unwrap();
    let mut child = world
        .drover("far", &["serve", "--listen", "127.0.0.1:0"])
        .env("NOTIFY_SOCKET", &path)
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::null())
        .spawn()
        .unwrap();
    let hear = || {
        let mut buf = [0u8; 4096];
        let n = socket.recv(&mut buf).unwrap();
        String::from_utf8_lossy(&buf[..n]).into_owned()
    };
    let ready = hear();
    assert!(
        ready.contains("READY=1") && ready.contains("STATUS=listening on 127.0.0.1:"),
        "{ready}"
    );
    crate::world::signal(child.id(), "TERM");
    assert!(hear().contains("STOPPING=1"));
    assert_eq!(crate::world::wait(&mut child), Some(0));
}

#[test]
fn an_address_in_use_is_one_clear_line() {
    let world = World::new();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    world
        .run("far", &["serve", "--listen", &address])
        .fails(1, &["cannot listen on", &address, "in use"]);
}

fn http(address: SocketAddr, request: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    stream
        .set_read_timeout(Some(Duration::from_secs(60)))
        .unwrap();
    let _ = stream.write_all(request.as_bytes());
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    String::from_utf8(answer).unwrap()
}
