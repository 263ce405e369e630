//! The catalog on a server that is down, comes back, or holds what another drover made.

use std::net::Ipv4Addr;
use std::thread;
use std::time::{Duration, Instant};

use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};

use super::*;
use crate::catalog::Catalog;
use crate::catalog_error::CatalogError;
use crate::nodes::{
    Holding, Joining, MAX_ORDER_BYTES, MAX_SAID_BYTES, NodeState, Nodes, UnitState, Use,
};
use crate::site_catalog::SiteCatalog;
use crate::site_catalog::tests::{DAY, filled, image, peer};
use crate::testing::PostgresServer;

fn connect(url: &str, patience: Duration, waiting: &mut dyn FnMut(&str)) -> Result<SiteCatalog> {
    let url = url.parse().unwrap();
    let opened = SiteCatalog::connect(&url, "default", &mut || Ok(None), patience, waiting);
    opened.map(|(catalog, _)| catalog)
}

fn open(url: &str) -> SiteCatalog {
    connect(url, DAY, &mut |why| panic!("{why}")).unwrap()
}

/// Repeats what fails while the server is away.
fn again<T>(mut f: impl FnMut() -> Result<T>) -> T {
    let until = Instant::now() + Duration::from_secs(120);
    loop {
        match f() {
            Ok(out) => return out,
            Err(e) => assert!(e.may_pass() && Instant::now() < until, "{e}"),
        }
        thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_server_that_goes_away_and_comes_back_loses_nothing() {
    let Some(mut server) = PostgresServer::start() else {
        return;
    };
    let url = server.new_database();
    let catalog = open(&url);
    let (peers, images) = filled(&catalog);
    let seen = catalog.version().unwrap();
    server.stop();
    for failed in [
        catalog.images().map(drop),
        catalog.put(&image("late.img", 9)).map(drop),
        catalog.version().map(drop),
    ] {
        let e = failed.unwrap_err();
        assert!(e.may_pass(), "{e}");
        let line = e.to_string();
        assert!(
            line.contains(&*format!("{}", url.parse::<CatalogUrl>().unwrap())),
            "{line}"
        );
        assert!(!line.contains('\n'), "{line}");
    }
    // What is not there at the start is waited for, but not for ever.
    let mut said = Vec::new();
    let short = Duration::from_millis(1500);
    let Err(e) = connect(&url, short, &mut |why| said.push(why.to_owned())) else {
        panic!("there is no server")
    };
    assert!(e.may_pass(), "{e}");
    assert!(
        said.len() == 1 && said[0].starts_with("waiting for the catalog at postgres://"),
        "{said:?}"
    );
    thread::scope(|s| {
        let opened = s.spawn(|| connect(&url, DAY, &mut |_| ()).unwrap().images().unwrap());
        thread::sleep(Duration::from_millis(300));
        server.resume();
        assert_eq!(opened.join().unwrap(), images);
    });
    assert_eq!(again(|| catalog.images()), images);
    assert_eq!(again(|| catalog.version()), seen);
    assert_eq!(catalog.peers().unwrap(), peers);
    // A connection that was lost while nobody used it is no failure.
    server.stop();
    server.resume();
    catalog.put_peer(&peer("paris", 7)).unwrap();
    server.stop();
    server.resume();
    assert_eq!(catalog.peers().unwrap().len(), 3);
}

#[test]
fn changes_under_a_server_that_is_killed_are_there_or_not_and_never_in_part() {
    let Some(mut server) = PostgresServer::start() else {
        return;
    };
    let url = server.new_database();
    let first = open(&url);
    let made = thread::scope(|s| {
        let workers: Vec<_> = (0..3)
            .map(|w| {
                let url = &url;
                s.spawn(move || {
                    let catalog = open(url);
                    let mut made = Vec::new();
                    for i in 0..20 {
                        let id = again(|| catalog.new_image_id());
                        let image = image(&format!("w{w}-{i}"), id.0);
                        // Whether it was done or not when the server went: the same again.
                        again(|| catalog.put(&image));
                        made.push(image);
                    }
                    made
                })
            })
            .collect();
        for _ in 0..3 {
            thread::sleep(Duration::from_millis(150));
            server.stop();
            server.resume();
        }
        let made = workers.into_iter().map(|w| w.join().unwrap());
        let mut made: Vec<_> = made.flatten().collect();
        made.sort_by(|a, b| a.name.cmp(&b.name));
        made
    });
    // Each read checks the sums of the rows, each change those of all.
    assert_eq!(again(|| first.images()), made);
    let open = Open::new(
        Server::new(&url.parse().unwrap(), "default")
            .unwrap()
            .connect()
            .unwrap(),
    );
    let (seal, mut counted) = (Seal::load(&open).unwrap(), Seal::blank());
    use crate::site_catalog::rows::Setting;
    use crate::site_catalog::table::Row;
    made.iter().for_each(|i| counted.add(i.sum()));
    let settings = Setting::all(&open).unwrap();
    settings.iter().for_each(|s| counted.add(s.sum()));
    assert_eq!((seal.rows, seal.content), (counted.rows, counted.content));
}

#[test]
fn what_another_made_is_refused_and_left_alone() {
    let Some(server) = PostgresServer::start() else {
        return;
    };
    let url = server.new_database();
    let catalog = open(&url);
    filled(&catalog);
    let schema = r#"SET search_path = "drover/default";"#;
    let refused = |what: &str| {
        let Err(e) = connect(&url, DAY, &mut |_| ()) else {
            panic!("opened it")
        };
        let e = e.to_string();
        assert!(e.contains(what) && e.contains("postgres://drover@"), "{e}");
    };
    server.sql(&url, &format!("{schema} UPDATE peers SET rights = 'admin'"));
    let e = catalog.peer("lyon").unwrap_err();
    assert!(matches!(e, CatalogError::Altered { .. }), "{e}");
    assert!(e.to_string().contains("from a backup"), "{e}");
    // As a newer drover leaves it.
    let raised = catalog.change("a test", |tx, seal| {
        seal.schema = 99;
        seal.put(
            tx,
            &crate::site_catalog::rows::Setting {
                key: "x".into(),
                value: "y".into(),
            },
        )
    });
    raised.unwrap();
    refused("made by a newer drover (schema 99)");
    let e = catalog.new_image_id().unwrap_err().to_string();
    assert!(e.contains("made by a newer drover (schema 99)"), "{e}");
    let rows = server.sql(&url, &format!("{schema} SELECT count(*) FROM images"));
    assert!(rows.ends_with('5'), "{rows}");
    server.sql(&url, &format!("{schema} UPDATE seal SET revision = 7"));
    refused("was altered");
}

#[test]
fn a_new_catalog_is_filled_once_from_that_of_the_home() {
    let Some(server) = PostgresServer::start() else {
        return;
    };
    let url: CatalogUrl = server.new_database().parse().unwrap();
    let home = tempfile::tempdir().unwrap();
    let (peers, images) = filled(&SiteCatalog::open(home.path()).unwrap().0);
    let connect = |domain: &str, home: Option<&std::path::Path>| {
        let mut former = || {
            home.map(|dir| SiteCatalog::open(dir).map(|(c, _)| c))
                .transpose()
        };
        SiteCatalog::connect(&url, domain, &mut former, DAY, &mut |_| ()).unwrap()
    };
    let (catalog, is_filled) = connect("default", Some(home.path()));
    assert!(is_filled);
    assert_eq!(
        (catalog.peers().unwrap(), catalog.images().unwrap()),
        (peers, images.clone())
    );
    assert_eq!(catalog.new_image_id().unwrap().0, 6);
    catalog.remove(&images[0].name).unwrap().unwrap();
    let (catalog, is_filled) = connect("default", Some(home.path()));
    assert!(!is_filled && catalog.images().unwrap().len() == 4);
    let (other, is_filled) = connect("acme", None);
    assert!(!is_filled && other.images().unwrap().is_empty());
    // Two domains never see each other.
    other.put(&images[0]).unwrap();
    assert_eq!(catalog.by_name(&images[0].name).unwrap(), None);
}

#[test]
fn an_address_that_asks_for_tls_or_crosses_a_network_unasked_is_refused() {
    let server = |url: &str| Server::new(&url.parse().unwrap(), "default").map(drop);
    for good in [
        "postgres://u@/x?host=/run/postgresql",
        "postgres://u@localhost/x",
        "postgres://u@127.0.0.1:5433/x",
        "postgres://u@db.example.net/x?sslmode=disable",
    ] {
        server(good).unwrap();
    }
    for bad in [
        "postgres://u@db.example.net/x",
        "postgres://u@10.0.0.1/x?sslmode=prefer",
        "postgres://u@localhost/x?sslmode=require",
        "postgres://u@localhost/x?hostaddr=10.0.0.1",
        "postgres://u@/x",
        "postgres://u@/x?host=/run/postgresql&sslmode=require&sslrootcert=/etc/x.pem",
        "postgres://u@db/x?nonsense=1",
        "postgres://u@db:port/x",
    ] {
        let e = server(bad).unwrap_err().to_string();
        assert!(e.contains("postgres://u@") && !e.contains('\n'), "{e}");
    }
    let url = "postgres://u@localhost/x".parse().unwrap();
    assert!(Server::new(&url, &"x".repeat(51)).is_err());
}

fn joining(name: &str, token: &str) -> Joining {
    Joining {
        name: name.into(),
        token: token.into(),
        place: format!("host/{name}"),
        directory: "d1".into(),
        path: "/srv/vm".into(),
        addresses: vec!["127.0.0.1:7377".into(), "[::1]:7377".into()],
        version: "1".into(),
        term: DAY,
    }
}

#[test]
fn nodes_are_in_one_table_and_a_fenced_one_changes_no_catalog() {
    let Some(mut server) = PostgresServer::start() else {
        return;
    };
    let url = server.new_database();
    let nodes = |url: &str| Nodes::open(&url.parse().unwrap()).unwrap();
    let catalogs = [open(&url), open(&url)];
    let (one, two) = (nodes(&url), nodes(&url));
    assert_eq!(one.directory().unwrap(), "");
    assert!(one.join(&joining("a", "t1")).unwrap());
    assert!(two.join(&joining("b", "t2")).unwrap());
    catalogs[0].change_as("t1");
    catalogs[1].change_as("t2");
    let listed = two.list().unwrap();
    assert_eq!(listed.len(), 2);
    assert_eq!(listed[0].row.addresses, ["127.0.0.1:7377", "[::1]:7377"]);
    assert!(listed[0].left_ms > 0 && listed[0].up_ms >= 0);
    let e = nodes(&server.new_database()).drain("a", true).unwrap_err();
    assert!(e.to_string().contains("no node called a"), "{e}");

    // What one changes, the other hears of; what it holds, the other does not get.
    two.wait_for_change(Duration::ZERO);
    catalogs[0].put(&image("x.img", 1)).unwrap();
    let began = Instant::now();
    two.wait_for_change(DAY);
    assert!(began.elapsed() < Duration::from_secs(3600));
    assert_eq!(catalogs[1].images().unwrap().len(), 1);
    let at = ("default", "x.img", Use::Transfer);
    assert_eq!(one.hold("t1", at, "k", true).unwrap(), Holding::Yes);
    assert_eq!(
        two.hold("t2", at, "k", true).unwrap(),
        Holding::Wait("a".into())
    );
    two.mount("t2", "acme", "x.img", true).unwrap();
    assert_eq!(two.list().unwrap()[0].transfers, 1);
    assert_eq!(
        two.mounts_at("t2").unwrap(),
        [("acme".to_owned(), "x.img".to_owned())]
    );
    assert_eq!(one.renew("t1").unwrap(), Some(NodeState::Serving));
    one.drain("a", true).unwrap();
    assert_eq!(one.renew("t1").unwrap(), Some(NodeState::Draining));

    // By the database's time its term is over.
    assert_eq!(two.fence().unwrap(), []);
    server.sql(
        &url,
        "UPDATE \"drover/\".nodes SET ends_ms = 0 WHERE name = 'a'",
    );
    assert_eq!(two.fence().unwrap(), [("a".to_owned(), "t1".to_owned())]);
    assert_eq!(one.renew("t1").unwrap(), None);
    let e = catalogs[0].put(&image("y.img", 2)).unwrap_err();
    assert!(
        e.to_string().contains("was taken for dead") && !e.may_pass(),
        "{e}"
    );
    assert_eq!(
        two.hold("t2", at, "k", true).unwrap(),
        Holding::Wait("a".into())
    );
    two.fenced("t1").unwrap();
    assert_eq!(two.hold("t2", at, "k", true).unwrap(), Holding::Yes);
    catalogs[1].put(&image("y.img", 2)).unwrap();
    two.leave("t2").unwrap();
    assert!(catalogs[1].put(&image("z.img", 3)).is_err());
    assert_eq!(one.remove("a").unwrap(), "t1");

    // Whoever is away and comes back is the same.
    server.stop();
    assert!(one.list().unwrap_err().may_pass());
    two.wait_for_change(Duration::from_millis(10));
    server.resume();
    assert_eq!(again(|| one.list()).len(), 1);
    server.sql(&url, "UPDATE \"drover/\".site SET version = 9");
    let e = one.list().unwrap_err().to_string();
    assert!(e.contains("newer drover"), "{e}");
    let Err(e) = Nodes::open(&url.parse().unwrap()) else {
        panic!("its tables are newer")
    };
    assert!(
        matches!(e, CatalogError::NewerServer { found: 9, .. }),
        "{e}"
    );
}

/// A node whose term is prolonged again and again is in all the time, for whoever waits for its row.
#[test]
fn a_change_of_the_catalog_beside_renewals_is_not_refused() {
    let Some(server) = PostgresServer::start() else {
        return;
    };
    let url = server.new_database();
    let catalog = open(&url);
    let nodes = Nodes::open(&url.parse().unwrap()).unwrap();
    nodes.join(&joining("a", "t1")).unwrap();
    catalog.change_as("t1");
    thread::scope(|s| {
        s.spawn(|| {
            for _ in 0..100 {
                assert_eq!(nodes.renew("t1").unwrap(), Some(NodeState::Serving));
            }
        });
        for n in 0..100 {
            catalog.put(&image("x.img", 1 + n)).unwrap();
        }
    });
}

/// A call that is under way, and may wait for a connection that does not answer, does not keep the term.
#[test]
fn a_term_is_prolonged_beside_a_call_that_waits() {
    let Some(server) = PostgresServer::start() else {
        return;
    };
    let url = server.new_database().parse().unwrap();
    Nodes::open(&url)
        .unwrap()
        .join(&joining("a", "t1"))
        .unwrap();
    let table = ServerTable::open(&url).unwrap();
    let renewed = table.with_others_waiting(|| {
        let renew = |t: &mut crate::nodes::Table, now| Ok(t.renew("t1", now));
        table.run_for_term("prolonging a term", renew)
    });
    assert_eq!(renewed.unwrap(), Some(NodeState::Serving));
}

/// An authority that signs certificates, and its own, PEM.
fn authority() -> (Issuer<'static, KeyPair>, String) {
    let mut params = CertificateParams::new(Vec::new()).unwrap();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let key = KeyPair::generate().unwrap();
    let own = params.self_signed(&key).unwrap().pem();
    (Issuer::new(params, key), own)
}

#[test]
fn a_server_on_a_network_proves_who_it_is_or_is_not_used() {
    let Some(mut server) = PostgresServer::start() else {
        return;
    };
    let database = server.new_database();
    let database = database.split(['/', '?']).nth(3).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let roots = |name: &str, pem: &str| {
        let path = dir.path().join(name);
        std::fs::write(&path, pem).unwrap();
        path.display().to_string()
    };
    let (issuer, own) = authority();
    let (good, other) = (roots("good.pem", &own), roots("other.pem", &authority().1));
    let address = Ipv4Addr::from((127 << 24) | fastrand::u32(1 << 16..(1 << 24) - 1));
    let mut use_certificate_of = |name: &str| {
        let params = CertificateParams::new(vec![name.to_owned()]).unwrap();
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &issuer).unwrap().pem();
        server.listen_with_tls(address, &certificate, &key.serialize_pem());
    };
    let with = |mode: &str, roots: &str| {
        let url = format!("postgres://drover@{address}/{database}?{mode}&sslrootcert={roots}");
        connect(&url, DAY, &mut |why| panic!("it waits: {why}"))
    };
    use_certificate_of(&address.to_string());
    for mode in [
        "sslmode=verify-full",
        "sslmode=verify-ca",
        "sslmode=require",
        "",
    ] {
        let catalog = with(mode, &good).unwrap();
        catalog.set_setting("mode", mode).unwrap();
        let e = with(mode, &other).err().unwrap();
        assert!(
            !e.may_pass() && e.to_string().contains("certificate"),
            "{e}"
        );
    }
    // The nodes' connections, and the one that listens, are no others.
    let url = format!("postgres://drover@{address}/{database}?sslrootcert={good}");
    let nodes = Nodes::open(&url.parse().unwrap()).unwrap();
    assert!(nodes.join(&joining("a", "t1")).unwrap());
    nodes.wait_for_change(Duration::ZERO);
    with("", &good).unwrap().put(&image("x.img", 1)).unwrap();
    nodes.wait_for_change(DAY);
    drop(nodes);

    // One for another host is that of no host that was named.
    use_certificate_of("db.example.net");
    let e = with("sslmode=verify-full", &good).err().unwrap();
    assert!(
        !e.may_pass() && e.to_string().contains("db.example.net"),
        "{e}"
    );
    assert!(with("sslmode=verify-full", &other).is_err());
    assert!(with("sslmode=require", &other).is_err());
    let catalog = with("sslmode=require", &good).unwrap();
    assert_eq!(catalog.images().unwrap().len(), 1);
    // All of them were encrypted.
    let plain = "SELECT count(*) FROM pg_stat_activity JOIN pg_stat_ssl USING (pid) WHERE application_name = 'drover' AND NOT ssl";
    let ssl = plain.replace("NOT ssl", "ssl");
    assert_eq!(server.sql(database, plain), "0");
    assert_ne!(server.sql(database, &ssl), "0");
    // Whoever is in between cannot have it go on without.
    server.stop();
    server.listen_without_tls();
    let e = with("sslmode=require", &good).err().unwrap();
    assert!(!e.may_pass() && e.to_string().contains("TLS"), "{e}");
}

/// Nodes take units of work at the same time: each has one owner, and what a node had that was taken for dead is taken by another.
#[test]
fn units_of_work_are_taken_once_and_again_when_their_node_is_gone() {
    let Some(server) = PostgresServer::start() else {
        return;
    };
    let url = server.new_database();
    let tables: Vec<Nodes> = (0..3)
        .map(|_| Nodes::open(&url.parse().unwrap()).unwrap())
        .collect();
    let items: Vec<Vec<u8>> = (0..60).map(|n| vec![n]).collect();
    let (term, tokens) = (Duration::from_secs(3600), ["t0", "t1", "t2"]);
    for (n, token) in tokens.iter().enumerate() {
        tables[n].join(&joining(&format!("n{n}"), token)).unwrap();
    }
    // The others hear of it.
    tables[1].wait_for_change(Duration::ZERO);
    tables[0].begin_job("j", b"order", &items, term).unwrap();
    let began = Instant::now();
    tables[1].wait_for_change(DAY);
    assert!(began.elapsed() < Duration::from_secs(3600));
    let taken: Vec<Vec<i64>> = thread::scope(|s| {
        let take = |n: usize| {
            let (table, mut doing) = (&tables[n], Vec::new());
            s.spawn(move || {
                while let Some(unit) = table.take_unit(tokens[n], &doing, &[]).unwrap() {
                    assert_eq!((unit.order, unit.nodes), (b"order".to_vec(), (3, n)));
                    assert_eq!(unit.item, [unit.nth as u8]);
                    doing.push((unit.job, unit.nth));
                }
                doing.into_iter().map(|(_, nth)| nth).collect()
            })
        };
        let all: Vec<_> = (0..3).map(take).collect();
        all.into_iter().map(|t| t.join().unwrap()).collect()
    });
    let mut all = taken.concat();
    all.sort_unstable();
    assert_eq!(all, Vec::from_iter(0..60));

    // Of a job that a node has enough of, it takes none.
    let full = ["j".to_owned()];
    assert_eq!(tables[0].take_unit("t0", &[], &full).unwrap(), None);
    for nth in &taken[0] {
        let at = ("j", *nth);
        let long = vec![0; MAX_SAID_BYTES + 1];
        assert!(
            tables[0]
                .say_unit("t0", at, UnitState::Done, &long)
                .is_err()
        );
        assert!(
            tables[0]
                .say_unit("t0", at, UnitState::Done, b"ok")
                .unwrap()
        );
        assert!(!tables[1].say_unit("t1", at, UnitState::Taken, b"").unwrap());
    }
    let job = tables[1].watch_job("j").unwrap().unwrap();
    assert_eq!((job.units.len(), job.nodes), (60, 3));
    let done = job.units.iter().filter(|u| u.state == UnitState::Done);
    assert_eq!(done.count(), taken[0].len());

    // The node of some of the rest is gone.
    server.sql(
        &url,
        "UPDATE \"drover/\".nodes SET ends_ms = 0 WHERE token = 't1'",
    );
    assert_eq!(tables[2].fence().unwrap().len(), 1);
    assert!(
        tables[1]
            .say_unit("t1", ("j", 0), UnitState::Done, b"")
            .is_err()
    );
    assert!(tables[1].take_unit("t1", &[], &[]).is_err());
    let mut doing: Vec<_> = taken[2].iter().map(|nth| ("j".to_owned(), *nth)).collect();
    let mut again = Vec::new();
    while let Some(unit) = tables[2].take_unit("t2", &doing, &[]).unwrap() {
        again.push(unit.nth);
        doing.push((unit.job, unit.nth));
    }
    assert_eq!(again, taken[1]);

    // Nobody waits for it any more: it stops, and makes room.
    server.sql(&url, "UPDATE \"drover/\".jobs SET ends_ms = 0");
    let at = (&*doing[0].0, doing[0].1);
    assert!(!tables[2].say_unit("t2", at, UnitState::Taken, b"").unwrap());
    assert_eq!(tables[0].take_unit("t0", &[], &[]).unwrap(), None);
    tables[0].begin_job("k", b"", &items[..1], term).unwrap();
    assert_eq!(tables[0].watch_job("j").unwrap(), None);
    let long = vec![vec![0; MAX_ORDER_BYTES + 1]];
    assert!(tables[0].begin_job("l", b"", &long, term).is_err());
    tables[0].end_job("k").unwrap();
    assert_eq!(tables[0].watch_job("k").unwrap(), None);
}
