//! Links that carry nothing.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::*;
use crate::world::PATIENCE;

/// A proxy that can stop to forward, and says nothing of it, or cut all connections.
pub struct Proxy {
    pub address: String,
    black: Arc<AtomicBool>,
    streams: Arc<Mutex<Vec<TcpStream>>>,
}

impl Proxy {
    pub fn to(to: SocketAddr) -> Proxy {
        let listener = TcpListener::bind(own_address()).unwrap();
        let proxy = Proxy {
            address: listener.local_addr().unwrap().to_string(),
            black: Arc::default(),
            streams: Arc::default(),
        };
        let (black, streams) = (proxy.black.clone(), proxy.streams.clone());
        std::thread::spawn(move || {
            for from in listener.incoming().map_while(Result::ok) {
                let Ok(far) = TcpStream::connect(to) else {
                    continue;
                };
                streams.lock().unwrap().push(from.try_clone().unwrap());
                let pairs = [
                    (from.try_clone().unwrap(), far.try_clone().unwrap()),
                    (far, from),
                ];
                for (from, to) in pairs {
                    let black = black.clone();
                    std::thread::spawn(move || forward(from, to, &black));
                }
            }
        });
        proxy
    }

    /// Ends all connections that there are.
    pub fn cut(&self) {
        for stream in self.streams.lock().unwrap().drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

fn forward(mut from: TcpStream, mut to: TcpStream, black: &AtomicBool) {
    let mut buffer = vec![0; 64 << 10];
    while let Ok(n @ 1..) = from.read(&mut buffer) {
        while black.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_millis(5));
        }
        if to.write_all(&buffer[..n]).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Both);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_link_that_carries_nothing_any_more() {
    let address = own_address();
    let proxy = Proxy::to(address);
    let options = ["--advertise", proxy.address.as_str()];
    let test = "a_link_that_carries_nothing_any_more";
    let Some(sites) = Sites::with(test, World::new(), address, &options) else {
        return;
    };
    let mut here = sites.start("near").await;
    let mut there = sites.wait_for_it("far").await;
    here.wait_said("beat", 20).await;
    let mut moving = Moving::begin(&sites, "near", "far", &["--limit", "2M"]);
    moving.until("step", "memory");
    proxy.black.store(true, Ordering::Relaxed);
    let begun = Instant::now();
    moving.until("event", "reconnecting");
    assert!(begun.elapsed() < PATIENCE, "{:?}", begun.elapsed());
    // It ran all the time, and nothing is in its way.
    let last = here.said("beat").unwrap();
    here.wait_said("beat", last + 20).await;
    assert!(here.verify().await >= last + 20);
    there.kill();
    there = sites.wait_for_it("far").await;
    proxy.black.store(false, Ordering::Relaxed);
    moving.done();
    here.ended().await;
    goes_on(&here, &mut there).await;
}
