//! Tests of the link with real namespaces; skipped where these are not available.

use super::*;
use crate::shell;

fn options(name: &str) -> Options {
    Options {
        name: name.to_owned(),
        rtt_ms: 30.0,
        rate_mbit: 50.0,
        ..Options::default()
    }
}

/// Sets up a link; prints the reason if links are not supported.
fn up(options: &Options, test: &str) -> Option<Link> {
    match Link::up(options) {
        Ok(link) => Some(link),
        Err(error) => {
            let Some(Unavailable(why)) = error.downcast_ref() else {
                panic!("{error:#}");
            };
            eprintln!("SKIP {test}: {why}");
            None
        }
    }
}

#[test]
fn packets_cross_in_the_time_that_was_asked_for_and_a_cut_stops_them() {
    let test = "packets_cross_in_the_time_that_was_asked_for_and_a_cut_stops_them";
    let Some(link) = up(&options("labtest-ping"), test) else {
        return;
    };
    if !shell::have("ping") {
        eprintln!("SKIP {test}: no ping");
        return;
    }
    let ping = |count: &str| {
        let far = Side::B.address();
        link.command(Side::A, "ping")
            .args(["-q", "-n", "-i", "0.05", "-W", "1", "-c", count, far])
            .output()
            .unwrap()
    };
    let answer = ping("8");
    let text = String::from_utf8_lossy(&answer.stdout).into_owned();
    let rtt = text
        .lines()
        .find_map(|l| l.strip_prefix("rtt min/avg/max/mdev = "))
        .expect("an rtt");
    let least: f64 = rtt.split('/').next().unwrap().parse().unwrap();
    assert!((29.9..40.0).contains(&least), "{rtt}");
    assert!(link.traffic().a_to_b.packets_out >= 8);
    link.cut();
    assert!(!ping("2").status.success());
    assert!(link.traffic().a_to_b.cut >= 2);
    link.heal();
    assert!(ping("2").status.success());
}

#[test]
fn namespaces_are_gone_with_the_link() {
    let Some(link) = up(
        &options("labtest-gone"),
        "namespaces_are_gone_with_the_link",
    ) else {
        return;
    };
    let at = std::path::Path::new("/run/netns/labtest-gone-a");
    assert!(at.exists());
    // Processes inside are killed with it.
    let mut sleeper = link.command(Side::B, "sleep").arg("600").spawn().unwrap();
    drop(link);
    assert!(!at.exists());
    assert!(!sleeper.wait().unwrap().success());
}

#[test]
fn the_queue_is_a_round_trip_by_default() {
    let shape = options("x").shape();
    assert_eq!(shape.rate, 6_250_000);
    assert_eq!(shape.delay_ns, 15_000_000);
    assert_eq!(shape.queue_bytes, 187_500);
    assert_eq!(options("x").piece_bytes(), 3125);
    assert_eq!(
        Options {
            loss_percent: 1.0,
            ..options("x")
        }
        .piece_bytes(),
        MTU
    );
}

#[test]
fn a_probe_leaves_nothing() {
    match available() {
        Ok(()) => assert!(Link::up(&options("labtest-probe")).is_ok()),
        Err(why) => assert!(!why.contains('\n'), "{why}"),
    }
    let left = |dir: &str, start: &str| {
        let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
        let names = entries.map(|e| e.file_name().to_string_lossy().into_owned());
        names.filter(|name| name.starts_with(start)).count()
    };
    // Only of this probe; others may be running.
    assert!(left("/run/netns", "labtest-probe") == 0);
    assert!(left("/tmp", "drover-lab-link-labtest-probe") == 0);
}
