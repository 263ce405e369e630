//! Links that carry nothing.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::faults::Held;
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

/// Sites, the way to one of which can be cut.
fn behind_a_proxy(test: &str) -> Option<(Sites, Proxy)> {
    let address = own_address();
    let proxy = Proxy::to(address);
    let options = ["--advertise", proxy.address.as_str()];
    let sites = Sites::with(test, World::new(), address, &options)?;
    Some((sites, proxy))
}

/// The machine runs here while the link is lost; then a person gives up.
async fn stays_without_a_link(sites: &Sites, here: &mut Qemu, mut moving: Moving) {
    let last = here.said("beat").unwrap();
    here.wait_said("beat", last + 5).await;
    sites.world.run("near", &["migrate", "--abort", "web"]).ok();
    moving.was_at("memory");
    assert_eq!(wait(&mut moving.process), Some(1));
    stays(sites, here).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_link_that_is_cut_in_each_state() {
    let Some((mut sites, proxy)) = behind_a_proxy("a_link_that_is_cut_in_each_state") else {
        return;
    };
    let mut here = sites.start("near").await;
    here.wait_said("beat", 20).await;
    for step in ["disks", "memory"] {
        let mut there = sites.wait_for_it("far").await;
        let mut moving = Moving::begin(&sites, "near", "far", &["--limit", "2M"]);
        moving.until("step", step);
        proxy.cut();
        moving.until("event", "reconnecting");
        stays_without_a_link(&sites, &mut here, moving).await;
        assert_eq!(there.said("beat"), None, "{step}");
        there.kill();
    }
    let held = Held::at(&mut sites, "arriving");
    let mut there = sites.wait_for_it("far").await;
    let mut moving = Moving::begin(&sites, "near", "far", &[]);
    held.reached();
    let last = here.said("beat").unwrap();
    proxy.cut();
    moving.until("event", "reconnecting");
    here.wait_said("beat", last + 5).await;
    assert_eq!(there.said("beat"), None);
    there.kill();
    held.go_on();
    stays_without_a_link(&sites, &mut here, moving).await;
    // It is handed over: only the other site knows whether it has it.
    let held = Held::at(&mut sites, "asked to take");
    let mut there = sites.wait_for_it("far").await;
    let moving = Moving::begin(&sites, "near", "far", &[]);
    held.reached();
    let last = here.said("beat");
    proxy.cut();
    assert_eq!(sites.state("near"), "committed");
    held.go_on();
    moving.done();
    assert_eq!(here.said("beat"), last, "it stood still");
    here.ended().await;
    goes_on(&here, &mut there).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_link_that_carries_nothing_while_the_machine_is_paused() {
    let test = "a_link_that_carries_nothing_while_the_machine_is_paused";
    let Some((mut sites, proxy)) = behind_a_proxy(test) else {
        return;
    };
    let black = |is| proxy.black.store(is, Ordering::Relaxed);
    let mut here = sites.start("near").await;
    here.wait_said("beat", 20).await;
    let held = Held::at(&mut sites, "arriving");
    let mut there = sites.wait_for_it("far").await;
    let mut moving = Moving::begin(&sites, "near", "far", &[]);
    held.reached();
    let last = here.said("beat").unwrap();
    black(true);
    let begun = Instant::now();
    here.wait_said("beat", last + 1).await;
    // The signs of life of a connection that nobody waits for may be missing for 30 s.
    let paused = begun.elapsed();
    assert!(paused < Duration::from_secs(25), "{paused:?}");
    assert_eq!(there.said("beat"), None);
    assert!(here.verify().await > last);
    there.kill();
    there = sites.wait_for_it("far").await;
    held.go_on();
    black(false);
    moving.until("step", "switch");
    moving.done();
    here.ended().await;
    goes_on(&here, &mut there).await;

    // And after the commitment: it stands still until there is an answer.
    let mut back = sites.wait_for_it("near").await;
    Moving::begin(&sites, "far", "near", &[]).done();
    there.ended().await;
    goes_on(&there, &mut back).await;
    let held = Held::at(&mut sites, "asked to take");
    let mut there = sites.wait_for_it("far").await;
    let mut moving = Moving::begin(&sites, "near", "far", &[]);
    held.reached();
    black(true);
    let last = back.said("beat");
    moving.until("event", "reconnecting");
    assert_eq!(sites.state("near"), "committed");
    black(false);
    held.go_on();
    moving.done();
    assert_eq!(back.said("beat"), last, "it stood still");
    back.ended().await;
    goes_on(&back, &mut there).await;
}
