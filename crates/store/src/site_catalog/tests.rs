//! What a catalog does, whatever its database is.

use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::Arc;
#[cfg(feature = "postgres")]
use std::sync::LazyLock;
use std::time::Duration;

use drover_core::{Digest, ImageName};
use drover_image::Stamp;
use drover_index::ImageId;
use drover_net::PeerKey;
use tempfile::TempDir;

use super::*;
use crate::Images;
use crate::catalog::{Catalog, ImageRecord, Known};

mod rights;

use rights::{
    a_ticket_gives_what_it_says_also_to_a_peer_that_is_known,
    a_used_ticket_does_not_bring_rights_back, tickets_are_listed_and_revoked,
    what_cannot_be_read_back_is_not_stored,
};

pub const DAY: Duration = Duration::from_secs(86_400);

/// Where the catalog of a test is.
enum Place {
    Home(TempDir),
    #[cfg(feature = "postgres")]
    Server(CatalogUrl),
}

impl Place {
    fn home() -> Place {
        Place::Home(TempDir::new().unwrap())
    }

    /// A new database on a server that all tests of this program use; `None` where there is no PostgreSQL.
    #[cfg(feature = "postgres")]
    fn server() -> Option<Place> {
        use crate::testing::PostgresServer;
        static SERVER: LazyLock<Option<PostgresServer>> = LazyLock::new(PostgresServer::start);
        let url = SERVER.as_ref()?.new_database();
        Some(Place::Server(url.parse().unwrap()))
    }

    fn open(&self) -> SiteCatalog {
        match self {
            Place::Home(dir) => {
                let (catalog, repairs) = SiteCatalog::open(dir.path()).unwrap();
                assert_eq!(repairs, Vec::<String>::new());
                catalog
            }
            #[cfg(feature = "postgres")]
            Place::Server(url) => {
                let mut nothing = || Ok(None);
                let mut waiting = |why: &str| panic!("{why}");
                let opened = SiteCatalog::connect(url, "default", &mut nothing, DAY, &mut waiting);
                opened.unwrap().0
            }
        }
    }
}

/// Runs each of these functions, which say what a catalog does, on each database.
macro_rules! on_each_database {
    ($($name:ident),* $(,)?) => {
        mod sqlite {
            $(#[test]
            fn $name() {
                super::$name(&super::Place::home());
            })*
        }

        #[cfg(feature = "postgres")]
        mod postgres {
            $(#[test]
            fn $name() {
                if let Some(place) = super::Place::server() {
                    super::$name(&place);
                }
            })*
        }
    };
}

on_each_database! {
    rows_survive_closing_and_reopening,
    an_image_replaces_the_one_of_its_name_and_numbers_never_come_back,
    every_change_is_noticed_whoever_made_it,
    a_ticket_is_good_once,
    tickets_do_not_pile_up,
    names_of_peers_are_unique_and_keys_too,
    several_users_at_once_see_every_change,
    what_others_changed_is_read_and_nothing_else,
    a_ticket_gives_what_it_says_also_to_a_peer_that_is_known,
    a_used_ticket_does_not_bring_rights_back,
    tickets_are_listed_and_revoked,
    what_cannot_be_read_back_is_not_stored,
}

pub fn peer(name: &str, n: u8) -> Peer {
    Peer {
        name: name.into(),
        key: PeerKey([n; 32]),
        addresses: vec![format!("10.0.0.{n}:7377"), "host:1".into()],
        paired_unix: 1_700_000_000 + i64::from(n),
        grant: match n {
            2 => Grant {
                domain: "acme".into(),
                quota_bytes: Some(500 << 30),
                ..Grant::of("read".parse().unwrap())
            },
            _ => Grant::default(),
        },
    }
}

pub fn image(name: &str, id: u64) -> ImageRecord {
    ImageRecord {
        id: ImageId(id),
        name: ImageName::new(name).unwrap(),
        path: PathBuf::from(format!("/srv/images/{name}")),
        format: "qcow2".into(),
        size_bytes: 1 << 40,
        data_bytes: 1 << 30,
        virtual_bytes: 1 << 41,
        digest: Digest([id as u8; 32]),
        stamp: Some(Stamp {
            device: 1,
            inode: u64::MAX,
            size: 3,
            mtime_ns: -4,
            ctime_ns: i128::from(i64::MAX),
        }),
        added_unix: 12,
        from: "lyon".into(),
        external: id % 2 == 1,
        owner: id.is_multiple_of(2).then_some(PeerKey([1; 32])),
        shared: (0..id as u8 % 3).map(|n| PeerKey([n; 32])).collect(),
    }
}

/// A catalog with some peers, tickets, images and settings.
pub fn filled(catalog: &SiteCatalog) -> (Vec<Peer>, Vec<ImageRecord>) {
    let peers = vec![peer("lyon", 1), peer("nice", 2)];
    let images: Vec<_> = (1..=5)
        .map(|i| image(&format!("image-{i}.img"), i))
        .collect();
    peers.iter().for_each(|p| catalog.put_peer(p).unwrap());
    for i in &images {
        assert_eq!(catalog.new_image_id().unwrap(), i.id);
        catalog.put(i).unwrap();
    }
    let grant = Grant::default();
    catalog.add_ticket(&[9; 16], &grant, "", 100, DAY).unwrap();
    catalog.set_setting("addresses", "10.0.0.1:7377").unwrap();
    (peers, images)
}

fn rows_survive_closing_and_reopening(place: &Place) {
    let (peers, images) = filled(&place.open());
    let catalog = place.open();
    assert_eq!(catalog.peers().unwrap(), peers);
    assert_eq!(catalog.images().unwrap(), images);
    assert_eq!(
        catalog.by_name(&images[2].name).unwrap().as_ref(),
        Some(&images[2])
    );
    assert_eq!(catalog.peer("lyon").unwrap().as_ref(), Some(&peers[0]));
    assert_eq!(
        catalog.peer_by_key(&peers[1].key).unwrap().as_ref(),
        Some(&peers[1])
    );
    assert_eq!(
        catalog.setting("addresses").unwrap().as_deref(),
        Some("10.0.0.1:7377")
    );
    assert_eq!(catalog.setting("nothing").unwrap(), None);
}

fn what_others_changed_is_read_and_nothing_else(place: &Place) {
    let (ours, theirs) = (place.open(), place.open());
    filled(&theirs);
    let mut known = Known::default();
    let names = |changed: Option<Vec<ImageRecord>>| {
        changed.map(|all| Vec::from_iter(all.into_iter().map(|r| r.name.to_string())))
    };
    let all = names(ours.changed(&mut known).unwrap()).unwrap();
    assert_eq!((all.len(), known.sums.len()), (5, 5));
    // One row is read, and says that nothing has changed.
    assert_eq!(ours.changed(&mut known).unwrap(), None);
    theirs.put(&image("image-2.img", 20)).unwrap();
    theirs
        .remove(&ImageName::new("image-4.img").unwrap())
        .unwrap();
    theirs.put(&image("new.img", 21)).unwrap();
    let mut changed = names(ours.changed(&mut known).unwrap()).unwrap();
    changed.sort();
    assert_eq!(changed, ["image-2.img", "new.img"]);
    assert!(!known.sums.contains_key("image-4.img"));
    // What is no image changes no image.
    theirs.set_setting("addresses", "10.0.0.2:1").unwrap();
    assert_eq!(names(ours.changed(&mut known).unwrap()), Some(vec![]));
    for n in 0..100 {
        theirs.put(&image(&format!("many-{n}"), 100 + n)).unwrap();
    }
    assert!(ours.changed(&mut known).unwrap().unwrap().len() >= 100);

    // The images that a node knows are those of the catalog, whoever changed what in between.
    let dir = TempDir::new().unwrap();
    let shared = |n: u8| {
        let catalog = Arc::new(place.open());
        Images::open_shared(catalog, dir.path().join(n.to_string())).unwrap()
    };
    let nodes = [shared(0), shared(1)];
    let mut random = fastrand::Rng::with_seed(7);
    for id in 1000..1100 {
        let name = format!("image-{}.img", random.u8(1..7));
        let name = ImageName::new(name).unwrap();
        let node = &nodes[random.usize(0..2)];
        match random.u8(0..4) {
            0 => drop(node.remove(&name).unwrap()),
            1 => node.reread(&name).unwrap(),
            _ => drop(node.put(&image(name.as_str(), id)).unwrap()),
        }
        let looks = &nodes[random.usize(0..2)];
        let before: HashSet<ImageId> = looks.list().iter().map(|r| r.id).collect();
        let (gone, new) = looks.refresh().unwrap();
        let sorted = |mut all: Vec<ImageRecord>| {
            all.sort_by(|a, b| a.name.cmp(&b.name));
            all
        };
        let listed = sorted(looks.list());
        assert_eq!(listed, sorted(theirs.images().unwrap()));
        let now: HashSet<ImageId> = listed.iter().map(|r| r.id).collect();
        assert_eq!(gone.into_iter().collect::<HashSet<_>>(), &before - &now);
        assert_eq!(new.into_iter().collect::<HashSet<_>>(), &now - &before);
    }
}

fn an_image_replaces_the_one_of_its_name_and_numbers_never_come_back(place: &Place) {
    let (_, images) = filled(&place.open());
    let catalog = place.open();
    let new = ImageRecord {
        id: catalog.new_image_id().unwrap(),
        stamp: None,
        ..images[0].clone()
    };
    assert_eq!(new.id, ImageId(6));
    assert_eq!(catalog.put(&new).unwrap().as_ref(), Some(&images[0]));
    assert_eq!(catalog.by_name(&new.name).unwrap().as_ref(), Some(&new));
    assert_eq!(catalog.remove(&new.name).unwrap().as_ref(), Some(&new));
    assert_eq!(catalog.remove(&new.name).unwrap(), None);
    assert_eq!(catalog.images().unwrap().len(), 4);
    assert_eq!(catalog.new_image_id().unwrap(), ImageId(7));
    let thief = ImageRecord {
        name: ImageName::new("other").unwrap(),
        ..images[1].clone()
    };
    assert!(
        catalog
            .put(&thief)
            .unwrap_err()
            .to_string()
            .contains("image-2.img")
    );
}

fn every_change_is_noticed_whoever_made_it(place: &Place) {
    let (own, other) = (place.open(), place.open());
    let (mut seen, versions) = (own.version().unwrap(), || own.version().unwrap());
    for (n, catalog) in [&own, &other, &own].into_iter().enumerate() {
        let name = format!("peer{n}");
        catalog.put_peer(&peer(&name, n as u8)).unwrap();
        assert_ne!(versions(), seen, "{name}");
        seen = versions();
        other.peers().unwrap();
        assert_eq!(versions(), seen, "reading is no change");
    }
}

fn a_ticket_is_good_once(place: &Place) {
    let catalog = place.open();
    let (key, other) = (PeerKey([1; 32]), PeerKey([2; 32]));
    let grant = Grant::default();
    catalog.add_ticket(&[1; 16], &grant, "", 1000, DAY).unwrap();
    catalog.add_ticket(&[2; 16], &grant, "", 1000, DAY).unwrap();
    let pair = |secret, key, now| {
        catalog
            .pair(&[secret; 16], key, "web", &["a:1".into()], now)
            .unwrap()
    };
    assert_eq!(pair(7, key, 1001), PairOutcome::UnknownTicket);
    assert_eq!(pair(1, key, 1000 + 86_400), PairOutcome::ExpiredTicket);
    assert!(catalog.peers().unwrap().is_empty());
    assert_eq!(pair(1, key, 1001), PairOutcome::Paired("web".into()));
    assert_eq!(pair(1, other, 1002), PairOutcome::UsedTicket);
    // A retry after a lost reply succeeds.
    assert_eq!(pair(1, key, 1003), PairOutcome::Paired("web".into()));
    assert_eq!(pair(2, other, 1004), PairOutcome::Paired("web-2".into()));
    assert_eq!(catalog.peers().unwrap().len(), 2);
    // But it fails once the trust has been revoked.
    catalog.forget_peer("web").unwrap().unwrap();
    assert_eq!(pair(1, key, 1005), PairOutcome::UsedTicket);
    assert_eq!(catalog.peer_by_key(&key).unwrap(), None);
}

fn tickets_do_not_pile_up(place: &Place) {
    let catalog = place.open();
    let grant = Grant::default();
    let later = 30 * 86_400;
    catalog.add_ticket(&[1; 16], &grant, "", 0, DAY).unwrap();
    catalog
        .add_ticket(&[2; 16], &grant, "", later, DAY)
        .unwrap();
    let pair = |secret, now| {
        catalog
            .pair(&[secret; 16], PeerKey([1; 32]), "x", &[], now)
            .unwrap()
    };
    assert_eq!(
        pair(1, 1),
        PairOutcome::UnknownTicket,
        "long expired, so forgotten"
    );
    assert_eq!(pair(2, later), PairOutcome::Paired("x".into()));
}

fn names_of_peers_are_unique_and_keys_too(place: &Place) {
    filled(&place.open());
    let catalog = place.open();
    let e = catalog.put_peer(&peer("lyon", 3)).unwrap_err();
    assert!(e.to_string().contains("drover peers forget lyon"), "{e}");
    // The same key under a new name is the same peer.
    catalog.put_peer(&peer("paris", 1)).unwrap();
    let names: Vec<String> = catalog
        .peers()
        .unwrap()
        .into_iter()
        .map(|p| p.name)
        .collect();
    assert_eq!(names, ["nice", "paris"]);
}

fn several_users_at_once_see_every_change(place: &Place) {
    let ids: Vec<u64> = std::thread::scope(|s| {
        let workers: Vec<_> = (0..4)
            .map(|w| {
                s.spawn(move || {
                    let catalog = place.open();
                    (0..10)
                        .map(|i| {
                            let id = catalog.new_image_id().unwrap();
                            catalog.put(&image(&format!("w{w}-{i}"), id.0)).unwrap();
                            id.0
                        })
                        .collect::<Vec<_>>()
                })
            })
            .collect();
        workers
            .into_iter()
            .flat_map(|w| w.join().unwrap())
            .collect()
    });
    let unique: std::collections::HashSet<_> = ids.iter().collect();
    assert_eq!(unique.len(), 40);
    assert_eq!(place.open().images().unwrap().len(), 40);
}
