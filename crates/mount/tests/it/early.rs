//! Reads sent in the same flight as the open.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use bytes::Bytes;
use drover_device::remote::{Change, Chunks, Epoch, Link, Remote};
use drover_mount::client::{Client, Options};
use drover_store::lease::Access;

use crate::local_stub::LocalStub;
use crate::util::{Near, Site, content, memory, name, runtime};

const CHUNK: usize = 64 << 10;

fn options(wanted: &[u64], access: Access) -> Options {
    Options {
        wanted: wanted.to_vec(),
        chunk: CHUNK as u32,
        ..Options::new(name("web"), access)
    }
}

/// Waits until the site has sent all that it was asked, which is all that is under way.
fn quiet(client: &Client) {
    let limit = Instant::now() + Duration::from_secs(60);
    while client.traffic().in_flight > 0 {
        assert!(Instant::now() < limit, "it does not come");
        std::thread::sleep(Duration::from_millis(2));
    }
    // From the link to where it is received.
    std::thread::sleep(Duration::from_millis(50));
}

#[test]
fn chunks_that_are_wanted_first_come_with_the_open_and_wait_to_be_asked_for() {
    let runtime = runtime();
    let _inside = runtime.enter();
    let bytes = content(20 * CHUNK, 21);
    let site = Site::with("web", memory(&bytes));
    let near = Near::new(site.server.clone());
    // One lies outside the device, one is duplicated, and the last exceeds the limit.
    let options = options(&[3, 0, 1, 999_999, 3, 7, 8, 9, 15], Access::ReadOnly);
    let client = runtime
        .block_on(Client::open(runtime.handle(), near.clone(), options))
        .unwrap();
    quiet(&client);
    assert_eq!(client.traffic().rate as u64, 0);
    near.down.store(true, Ordering::Relaxed);
    near.cut();
    let local = LocalStub::attach(&client, false);
    local.wait("the link's end", |received| {
        matches!(received.links.last(), Some(Link::Down(_)))
    });
    // No client gets data that it did not request.
    assert!(local.received.lock().chunks.is_empty());
    for index in [0, 3, 9] {
        let at = index as usize * CHUNK;
        assert_eq!(
            local.get(&client, index).unwrap(),
            &bytes[at..at + CHUNK],
            "chunk {index}, without a link"
        );
    }
    client.fetch(Chunks {
        first: 15,
        count: 1,
    });
    std::thread::sleep(Duration::from_millis(100));
    assert_eq!(local.received.lock().chunks.len(), 3, "that one waits");
    near.down.store(false, Ordering::Relaxed);
    assert_eq!(
        local.get(&client, 15).unwrap(),
        &bytes[15 * CHUNK..16 * CHUNK]
    );
}

#[test]
fn a_pull_takes_what_came_with_the_open_and_everything_comes_once() {
    let runtime = runtime();
    let _inside = runtime.enter();
    let bytes = content(40 * CHUNK + 4096, 22);
    let site = Site::with("web", memory(&bytes));
    for pause in [0, 30] {
        let near = Near::new(site.server.clone());
        let options = options(&[0, 1, 2, 3, 40, 5, 6], Access::ReadOnly);
        let client = runtime
            .block_on(Client::open(runtime.handle(), near, options))
            .unwrap();
        std::thread::sleep(Duration::from_millis(pause));
        let local = LocalStub::attach(&client, true);
        local.wait_all();
        local.all_is(&bytes);
        assert_eq!(local.received.lock().twice, 0);
        assert_eq!(client.traffic().in_flight, 0);
    }
}

#[test]
fn what_is_asked_for_while_it_is_being_verified_is_handed_out() {
    // So long that verifying it takes a while.
    const LONG: usize = 4 << 20;
    let runtime = runtime();
    let _inside = runtime.enter();
    let bytes: Vec<u8> = std::iter::repeat_with(|| fastrand::u8(..))
        .take(2 * LONG)
        .collect();
    let site = Site::with("web", memory(&bytes));
    for round in 0..60 {
        let options = Options {
            chunk: LONG as u32,
            wanted: vec![0],
            ..Options::new(name("web"), Access::ReadOnly)
        };
        let near = Near::new(site.server.clone());
        let client = runtime
            .block_on(Client::open(runtime.handle(), near, options))
            .unwrap();
        let limit = Instant::now() + Duration::from_secs(60);
        while client.traffic().in_flight > 0 {
            assert!(Instant::now() < limit, "it does not come");
            std::thread::yield_now();
        }
        let pulls = round % 2 == 0;
        let local = LocalStub::attach(&client, pulls);
        match pulls {
            true => local.wait_all(),
            false => drop(local.get(&client, 0).unwrap()),
        }
        assert!(local.received.lock().chunks[&0] == bytes[..LONG], "{round}");
    }
}

#[test]
fn what_was_read_before_a_push_is_not_handed_out_after_it() {
    let runtime = runtime();
    let _inside = runtime.enter();
    let bytes = content(4 * CHUNK, 23);
    let site = Site::with("web", memory(&bytes));
    let near = Near::new(site.server.clone());
    let client = runtime
        .block_on(Client::open(
            runtime.handle(),
            near,
            options(&[0, 1], Access::ReadWrite),
        ))
        .unwrap();
    quiet(&client);
    let client = Arc::new(client);
    let local = LocalStub::attach(client.as_ref(), false);
    let new = Bytes::from(vec![9; CHUNK]);
    let epoch = Epoch(1 << 32);
    let (say, hear) = std::sync::mpsc::channel();
    let told = say.clone();
    let change = vec![Change::Write(0, new.clone())];
    client.push(epoch, change, Box::new(move |r| told.send(r).unwrap()));
    hear.recv_timeout(Duration::from_secs(60)).unwrap().unwrap();
    let covers = CHUNK as u64;
    client.commit(epoch, covers, Box::new(move |r| say.send(r).unwrap()));
    hear.recv_timeout(Duration::from_secs(60)).unwrap().unwrap();
    assert_eq!(local.get(client.as_ref(), 0).unwrap(), new);
    assert_eq!(
        local.get(client.as_ref(), 1).unwrap(),
        &bytes[CHUNK..2 * CHUNK]
    );
}
