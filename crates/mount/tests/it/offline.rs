//! A mount that starts while its site is unreachable.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use drover_core::{BlockDevice, Digest};
use drover_device::remote::{Link, Remote};
use drover_mount::MountError;
use drover_mount::client::{Client, Options};
use drover_mount::protocol::Opened;
use drover_mount::server::Base;
use drover_store::lease::{Access, MountId};

use crate::local_stub::LocalStub;
use crate::util::{Near, Shelf, Site, content, memory, name, runtime, serve};

fn options(mount: MountId, known: Option<Opened>) -> Options {
    Options {
        mount,
        known,
        first_contact: Duration::from_secs(3),
        ..Options::new(name("web"), Access::ReadWrite)
    }
}

#[test]
fn it_begins_without_a_link_and_goes_on_when_there_is_one() {
    let runtime = runtime();
    let _inside = runtime.enter();
    let bytes = content(1_000_000, 11);
    let site = Site::with("web", memory(&bytes));
    let near = Near::new(site.server.clone());
    let mount = MountId::random();
    let open = |known| {
        let options = options(mount, known);
        runtime.block_on(Client::open(runtime.handle(), near.clone(), options))
    };
    let client = open(None).unwrap();
    assert!(client.was_reached());
    let known = client.opened().clone();
    drop(client);
    near.down.store(true, Ordering::Relaxed);
    let refused = open(None).err();
    assert!(
        matches!(&refused, Some(MountError::Unreachable(why)) if why.contains("no route")),
        "{refused:?}"
    );
    let client = open(Some(known.clone())).unwrap();
    assert!(!client.was_reached());
    assert_eq!(client.shape(), known.shape());
    assert!(matches!(client.link(), Link::Down(_)));
    let local = LocalStub::attach(&client, true);
    near.down.store(false, Ordering::Relaxed);
    local.wait_all();
    local.all_is(&bytes);
    assert_eq!(client.committed().0, 0);
}

#[test]
fn another_image_ends_it_when_the_link_comes() {
    let runtime = runtime();
    let _inside = runtime.enter();
    let bytes = content(1_000_000, 12);
    let site = Site::with("web", memory(&bytes));
    let near = Near::new(site.server.clone());
    let mount = MountId::random();
    let first = options(mount, None);
    let client = runtime
        .block_on(Client::open(runtime.handle(), near.clone(), first))
        .unwrap();
    let known = client.opened().clone();
    drop(client);
    near.down.store(true, Ordering::Relaxed);
    let again = options(mount, Some(known));
    let client = runtime
        .block_on(Client::open(runtime.handle(), near.clone(), again))
        .unwrap();
    let local = LocalStub::attach(&client, false);
    let shelf = Shelf::default();
    let device: Arc<dyn BlockDevice> = memory(&content(1_000_000, 13));
    let digest = Digest([8; 32]);
    shelf.0.lock().insert(
        name("web"),
        Base {
            device,
            digest,
            arriving: None,
            through: None,
        },
    );
    let elsewhere = tempfile::tempdir().unwrap();
    near.now(serve(Arc::new(shelf), elsewhere.path()));
    near.down.store(false, Ordering::Relaxed);
    local.wait("the end", |received| {
        matches!(received.links.last(), Some(Link::Gone(_)))
    });
    let Link::Gone(error) = client.link() else {
        panic!("it is there");
    };
    assert!(error.to_string().contains("another image"), "{error}");
}
