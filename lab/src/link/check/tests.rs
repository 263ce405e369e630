//! The check's arithmetic, and that it tells a link that breaks its word from one that keeps it.

use super::*;

#[test]
fn an_interval_is_as_wide_as_chance() {
    let (least, most) = interval(0.001, 20_000);
    assert!(
        (0.0001..0.0002).contains(&least) && (0.0018..0.0019).contains(&most),
        "{least} {most}"
    );
    assert_eq!(interval(0.0, 1000), (0.0, 0.0));
    assert_eq!(interval(0.5, 0).0, 0.0);
}

#[test]
fn the_middle_leaves_out_what_is_far_off() {
    let mut times: Vec<f64> = (0..38).map(f64::from).collect();
    times.extend([900.0, -900.0]);
    assert_eq!(middle(&times), 35.0);
    assert_eq!(middle(&[7.0]), 0.0);
    assert_eq!(middle(&[]), 0.0);
}

#[test]
fn a_finding_holds_inside_its_bounds_only() {
    let finding = Finding::new("x", "least round trip", "ms").claims(40.0, 39.9, 42.0);
    assert!(finding.clone().measured(40.2).holds());
    assert!(!finding.clone().measured(39.0).holds());
    assert!(!finding.clone().measured(f64::INFINITY).holds());
    // Not measured is not held, unless the machine is to blame.
    assert!(!finding.holds());
    let mut excused = finding.clone();
    excused.excuse = Some("too slow");
    assert!(excused.holds());
    assert!(!excused.measured(50.0).holds());
    assert_eq!(
        finding.measured(50.0).complaint(),
        "least round trip: 50.000 ms instead of 39.900 to 42.000"
    );
}

#[test]
fn a_link_is_found_to_be_what_it_is_and_not_what_it_is_not() {
    let test = "a_link_is_found_to_be_what_it_is_and_not_what_it_is_not";
    let options = Options {
        name: "labtest-check".to_owned(),
        rtt_ms: 30.0,
        jitter_ms: 5.0,
        ..Options::default()
    };
    let link = match Link::up(&options) {
        Ok(link) if shell::have("ping") => link,
        Ok(_) => return eprintln!("SKIP {test}: no ping"),
        Err(error) => return eprintln!("SKIP {test}: {error:#}"),
    };
    fn broken(mut findings: Vec<Finding>) -> Vec<Finding> {
        findings.retain(|finding| !finding.holds());
        findings
    }
    let check = Check {
        options: &options,
        link: &link,
    };
    assert_eq!(broken(check.counters().unwrap()), []);
    assert_eq!(broken(check.idle().unwrap().1), []);
    assert_eq!(broken(check.cut().unwrap()), []);
    let slower = Options {
        rtt_ms: 60.0,
        jitter_ms: 0.0,
        ..options.clone()
    };
    let check = Check {
        options: &slower,
        link: &link,
    };
    let keys: Vec<_> = broken(check.idle().unwrap().1)
        .iter()
        .map(|finding| finding.key)
        .collect();
    assert_eq!(keys, ["rtt_min_ms", "rtt_ms"]);
    let wider = Options {
        jitter_ms: 15.0,
        ..options.clone()
    };
    let check = Check {
        options: &wider,
        link: &link,
    };
    let broken = broken(check.idle().unwrap().1);
    assert!(broken.iter().any(|finding| finding.key == "jitter_ms"));
}
