//! Starting a server of this host on a port of 127.0.0.1.

use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::process::Child;
use std::time::{Duration, Instant};

/// How long it may take to listen.
const PATIENCE: Duration = Duration::from_secs(60);
/// Ports that are tried: another process may take one before the server does.
const MAX_PORTS: usize = 10;

/// Starts a server on a port that is free; none if `start` gives none.
///
/// # Panics
/// If no server comes to listen.
pub fn on_a_free_port(mut start: impl FnMut(u16) -> Option<Child>) -> Option<(Child, u16)> {
    for _ in 0..MAX_PORTS {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
        let port = listener.local_addr().expect("an address").port();
        drop(listener);
        let mut child = start(port)?;
        if listens(&mut child, port) {
            return Some((child, port));
        }
        let _ = child.kill();
        let _ = child.wait();
    }
    panic!("the server does not start on any of {MAX_PORTS} ports");
}

/// Waits until a server listens at its port of 127.0.0.1; whether it does.
pub fn listens(child: &mut Child, port: u16) -> bool {
    let began = Instant::now();
    while began.elapsed() < PATIENCE && matches!(child.try_wait(), Ok(None)) {
        if TcpStream::connect((Ipv4Addr::LOCALHOST, port)).is_ok() {
            return true;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    false
}
