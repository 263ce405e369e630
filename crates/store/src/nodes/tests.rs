use std::collections::BTreeMap;
use std::time::Duration;

use super::*;

fn joining(name: &str, token: &str, place: &str) -> Joining {
    Joining {
        name: name.into(),
        token: token.into(),
        place: place.into(),
        directory: "d".into(),
        path: "/srv/vm".into(),
        addresses: Vec::new(),
        version: "1".into(),
        term: Duration::from_secs(30),
    }
}

fn two() -> Table {
    let mut table = Table::default();
    assert_eq!(table.join(&joining("a", "t1", "h1"), 0), Ok(true));
    assert_eq!(table.join(&joining("b", "t2", "h2"), 0), Ok(true));
    table
}

#[test]
fn a_term_counts_from_when_it_was_asked_for() {
    let s = Duration::from_secs;
    let mut term = Term::new(s(40));
    assert!(!term.holds(s(0)));
    term.granted(s(100));
    assert!(term.holds(s(100)) && term.holds(s(129)) && !term.holds(s(130)));
    // An answer that comes late, after a later one, shortens nothing.
    term.granted(s(110));
    term.granted(s(105));
    assert!(term.holds(s(139)));
    term.lose();
    assert!(!term.holds(s(110)) && term.is_lost());
    term.granted(s(111));
    assert!(!term.holds(s(111)), "a lost term does not come back");
}

#[test]
fn a_node_takes_the_place_of_its_former_start_at_once_and_of_another_host_never() {
    let mut table = two();
    // The lock of its home says that the former process is gone.
    assert_eq!(table.join(&joining("a", "t3", "h1"), 1), Ok(true));
    assert!(!table.is_in("t1") && table.is_in("t3"));
    assert_eq!(table.renew("t1", 2), None);
    // From elsewhere it waits, until somebody has taken the directory of the former away.
    let elsewhere = joining("a", "t4", "h9");
    assert_eq!(table.join(&elsewhere, 2), Ok(false));
    assert_eq!(table.join(&elsewhere, 100_000), Ok(false));
    let overdue = table.fence(100_000);
    assert_eq!(overdue.len(), 2);
    assert_eq!(table.join(&elsewhere, 100_000), Ok(false));
    table.fenced("t3");
    assert_eq!(table.join(&elsewhere, 100_000), Ok(true));
    // One that ended by itself is not waited for.
    table.leave("t4", 100_001);
    assert_eq!(table.join(&joining("a", "t5", "h1"), 100_002), Ok(true));
}

#[test]
fn another_directory_or_another_path_is_refused_with_a_way_out() {
    let mut table = two();
    let mut other = joining("c", "t3", "h3");
    other.directory = "e".into();
    let e = table.join(&other, 0).unwrap_err();
    assert!(e.contains("not the one of this site's other nodes"), "{e}");
    other.directory = "d".into();
    other.path = "/mnt/vm".into();
    let e = table.join(&other, 0).unwrap_err();
    assert!(e.contains("/mnt/vm") && e.contains("/srv/vm"), "{e}");
    for n in 2..MAX_NODES {
        let name = format!("n{n}");
        assert_eq!(table.join(&joining(&name, &name, &name), 0), Ok(true));
    }
    let e = table.join(&joining("late", "late", "late"), 0).unwrap_err();
    assert!(e.contains("drover nodes remove"), "{e}");
}

#[test]
fn names_are_held_by_one_node_and_free_once_it_is_fenced() {
    let mut table = two();
    let at = ("default", "x", Use::Transfer);
    assert_eq!(table.hold("t1", at, "k", true), Holding::Yes);
    assert_eq!(table.hold("t1", at, "k", true), Holding::Yes);
    assert_eq!(table.hold("t2", at, "k", true), Holding::Wait("a".into()));
    assert_eq!(table.hold("t2", at, "l", true), Holding::Taken("a".into()));
    let other = ("acme", "x", Use::Transfer);
    assert_eq!(table.hold("t2", other, "l", true), Holding::Yes);
    // Not one's own, and not by a former start.
    table.free("t2", at);
    assert_eq!(table.hold("t0", at, "k", true), Holding::Fenced);
    assert_eq!(table.list(0)[0].transfers, 1);
    table.renew("t2", 31_000).unwrap();
    assert_eq!(table.fence(31_000), [("a".to_owned(), "t1".to_owned())]);
    assert_eq!(table.hold("t2", at, "k", true), Holding::Wait("a".into()));
    table.fenced("t1");
    assert_eq!(table.hold("t2", at, "k", true), Holding::Yes);
    table.free("t2", at);
    table.free("t2", other);
    assert!(table.held.is_empty());
}

#[test]
fn mounts_do_not_expire_and_a_writer_keeps_other_nodes_out() {
    let mut table = two();
    table.mount("t1", "d", "x", false).unwrap();
    table.mount("t2", "d", "x", false).unwrap();
    let e = table.mount("t2", "d", "x", true).unwrap_err();
    assert!(e.contains("at the node a"), "{e}");
    table.unmount("t2", "d", "x");
    table.mount("t1", "d", "x", true).unwrap();
    assert!(table.mount("t2", "d", "x", false).is_err());
    // Nobody else replaces it, even when that node is gone.
    table.renew("t2", 31_000).unwrap();
    table.fence(31_000);
    table.fenced("t1");
    let at = ("d", "x", Use::Change);
    assert_eq!(table.hold("t2", at, "", true), Holding::Mounted("a".into()));
    assert_eq!(table.hold("t2", at, "", false), Holding::Yes);
    table.free("t2", at);
    assert!(table.remove("b").unwrap_err().contains("is running"));
    assert_eq!(table.remove("a").unwrap(), "t1");
    assert_eq!(table.hold("t2", at, "", true), Holding::Yes);
    assert!(table.remove("a").is_err());
}

#[test]
fn a_node_that_drains_keeps_its_term() {
    let mut table = two();
    table.drain("a", true).unwrap();
    assert_eq!(table.renew("t1", 5), Some(NodeState::Draining));
    table.drain("a", false).unwrap();
    assert_eq!(table.renew("t1", 5), Some(NodeState::Serving));
    table.leave("t1", 6);
    assert!(table.drain("a", true).is_err());
    for state in ["serving", "draining", "ended", "fencing", "fenced"] {
        assert_eq!(NodeState::of(state).unwrap().as_str(), state);
    }
}

mod sim;
mod work;
