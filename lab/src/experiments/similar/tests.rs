use std::collections::BTreeSet;
use std::fs;

use super::*;
use crate::experiments::stand_in;

const ONE: Scenario = scenario("similar", "two", &["one"]);

/// A lab whose library has `one` and `two`.
fn lab_in(dir: &std::path::Path, damage: &str) -> Lab {
    let images = dir.join("cache/images");
    fs::create_dir_all(&images).unwrap();
    for (name, byte) in [("one.raw", 1), ("two.raw", 2)] {
        let bytes = [vec![byte; 4096], vec![9; 8192]].concat();
        fs::write(images.join(name), bytes).unwrap();
    }
    stand_in::lab(dir, damage)
}

fn by_drover(scenario: Scenario) -> Job {
    Job {
        line: None,
        by: Some(By::Drover),
        scenarios: vec![scenario],
    }
}

#[test]
fn every_run_begins_with_a_site_of_its_own() {
    let dir = tempfile::tempdir().unwrap();
    // A site that is sent what it has already would not be the one that was asked for.
    let damage = r#"[ "$(ls "$(dirname "$to")" | wc -l)" -le 2 ]"#;
    let lab = lab_in(dir.path(), damage);
    let row = measure(&lab, &by_drover(ONE), &ONE);
    assert_eq!(row.verdict, Verdict::Good);
    let seconds = row.figures[key::SECONDS];
    assert_eq!(seconds.runs, lab.repeat);
    assert!((row.value(key::BYTES).unwrap() - 0.012_295).abs() < 1e-9);
    let job = Job {
        by: None,
        ..by_drover(ONE)
    };
    let limit = measure(&lab, &job, &ONE);
    // One block of `two` is not in `one`.
    assert!(limit.value(key::BYTES).unwrap() < 0.0042);
}

#[test]
fn what_is_not_built_is_skipped_and_what_fails_says_why() {
    let dir = tempfile::tempdir().unwrap();
    let damage = r#"[ "$name" = two.raw ] || { echo the disk is full >&2; exit 1; }"#;
    let lab = lab_in(dir.path(), damage);
    let row = measure(&lab, &by_drover(ONE), &ONE);
    let Verdict::Failed(why) = &row.verdict else {
        panic!("{:?}", row.verdict)
    };
    assert!(
        why.contains("preparing with one") && why.contains("the disk is full"),
        "{why}"
    );
    let absent = scenario("aged", "two-aged", &["two"]);
    let row = measure(&lab, &by_drover(absent), &absent);
    assert!(matches!(&row.verdict, Verdict::Skipped(why) if why.contains("two-aged")));
}

#[test]
fn the_reference_comes_first_and_every_case_has_a_name_of_its_own() {
    let dir = tempfile::tempdir().unwrap();
    let lab = lab_in(dir.path(), "");
    let plan = plan(&lab);
    let ids: BTreeSet<&str> = plan.iter().map(|(case, _)| case.id.as_str()).collect();
    assert_eq!(ids.len(), plan.len());
    assert!(plan.is_sorted_by_key(|(case, _)| case.rank));
    let first: Vec<_> = plan.iter().filter(|(case, _)| case.rank == 0).collect();
    assert!(first.iter().all(|(_, job)| job.line == Some(REFERENCE)));
    let drover = plan
        .iter()
        .filter(|(_, job)| matches!(job.by, Some(By::Drover)));
    let scenarios: usize = drover.map(|(_, job)| job.scenarios.len()).sum();
    assert_eq!(scenarios, 18 * FULL.len());
}

#[test]
fn lines_of_the_plot_are_told_apart_by_rate_and_loss() {
    let row = |link: &str, rtt: f64, value: f64| {
        Row::new([
            ("scenario", "similar".to_owned()),
            ("link", link.to_owned()),
            ("by", "drover".to_owned()),
        ])
        .with(RTT, rtt)
        .with(key::OVER_IDEAL, value)
    };
    let rows = [
        row("100 Mbit/s, 40 ms", 40.0, 1.1),
        row("100 Mbit/s, 5 ms", 5.0, 1.0),
        row("100 Mbit/s, 5 ms, 0.1 % loss", 5.0, 2.0),
    ];
    let plots = plots(&rows);
    let Kind::Lines(lines) = &plots[0].kind else {
        panic!("not lines")
    };
    assert_eq!(plots.len(), 1);
    assert_eq!(lines[0].0, "100 Mbit/s");
    let points: Vec<(f64, f64)> = lines[0].1.iter().map(|p| (p.x, p.y)).collect();
    assert_eq!(points, [(5.0, 1.0), (40.0, 1.1)]);
    assert_eq!(lines[1].0, "100 Mbit/s, 0.1 % loss");
}
