//! Tests of the experiments with a fake drover: failures become rows, and figures are correct.

use std::collections::BTreeSet;
use std::path::Path;

use super::mover::{self, Alike, key};
use super::*;
use crate::bench::{Case, Row, Verdict};
use crate::setup::{Common, Lab};

/// Runs the first case whose identifier contains `id`, with a fake that does some damage.
fn run(experiment: &Experiment, id: &str, damage: &str) -> Vec<Row> {
    let dir = tempfile::tempdir().unwrap();
    let lab = stand_in::lab(dir.path(), damage);
    let cases = (experiment.cases)(&lab).unwrap();
    let case = cases.into_iter().find(|case| case.id.contains(id)).unwrap();
    let rows = (experiment.run)(&lab, &case).unwrap();
    // Nothing is left of the sites.
    let left = std::fs::read_dir(dir.path().join("out")).unwrap().flatten();
    let left: Vec<_> = left.filter(|e| e.file_name() != "limits.json").collect();
    assert!(left.is_empty(), "{left:?}");
    rows
}

#[test]
fn cases_have_names_of_their_own() {
    let dir = tempfile::tempdir().unwrap();
    let mut lab = stand_in::lab(dir.path(), "");
    lab.small = false;
    for experiment in ALL {
        let cases: Vec<Case> = (experiment.cases)(&lab).unwrap();
        let ids: BTreeSet<&str> = cases.iter().map(|case| case.id.as_str()).collect();
        assert_eq!(ids.len(), cases.len(), "{}", experiment.name);
    }
    let first = |experiment: &Experiment| {
        let cases = (experiment.cases)(&lab).unwrap().into_iter();
        cases.filter(|case| case.rank == 0).count()
    };
    assert_eq!(
        first(&mount::EXPERIMENT),
        17,
        "five on three lines, a file, and a real disk"
    );
    assert_eq!((compress::EXPERIMENT.cases)(&lab).unwrap().len(), 16);
}

#[test]
fn every_image_of_the_library_has_a_row_and_all_have_one() {
    let limit = run(&library::EXPERIMENT, "-limit", "");
    let by_limit: Vec<&str> = limit.iter().map(|row| row.label("image")).collect();
    assert_eq!(by_limit, ["small-one", "small-two", "all"]);
    assert_eq!(limit[0].value(key::DATA), Some(12288e-6));
    let rows = run(&library::EXPERIMENT, "-drover", "");
    assert_eq!(rows.len(), 3);
    for row in &rows {
        assert_eq!(row.verdict, Verdict::Good, "{row:?}");
        assert!(row.value(key::SECONDS).unwrap() > 0.0);
    }
    assert_eq!(rows[2].value(key::WIRE), Some(2.0 * (12288.0 + 7.0) / 1e6));
}

#[test]
fn a_wrong_file_and_a_failure_are_rows_and_the_others_go_on() {
    let rows = run(
        &library::EXPERIMENT,
        "-drover",
        r#"[ $name != small-one.raw ] || echo x >> "$to""#,
    );
    assert!(matches!(rows[0].verdict, Verdict::Wrong(_)), "{rows:?}");
    assert_eq!(rows[1].verdict, Verdict::Good);
    assert_eq!(rows[2].verdict, Verdict::Failed("1 of 2 images".to_owned()));
    let rows = run(
        &library::EXPERIMENT,
        "-drover",
        "echo no space there >&2; exit 3",
    );
    let Verdict::Failed(why) = &rows[0].verdict else {
        panic!("{rows:?}")
    };
    assert!(why.contains("no space there"), "{why}");
}

#[test]
fn a_scenario_is_prepared_and_measured_as_often_as_asked() {
    let rows = run(&similar::EXPERIMENT, "-drover", "");
    assert_eq!(rows[0].label("what"), "small-two to a site with small-one");
    assert_eq!(rows[0].figures[key::SECONDS].runs, 2);
    // There is no aged image.
    assert!(matches!(rows[2].verdict, Verdict::Skipped(_)), "{rows:?}");
    let rows = run(&similar::EXPERIMENT, "-drover", r#"echo x >> "$to""#);
    let Verdict::Failed(why) = &rows[0].verdict else {
        panic!("{rows:?}")
    };
    assert!(why.contains("preparing with small-one"), "{why}");
}

#[test]
fn a_flock_is_one_row_beside_those_of_the_rivals() {
    let row = run(&flock::EXPERIMENT, "app-similar-drover", "").remove(0);
    assert_eq!(row.verdict, Verdict::Good, "{row:?}");
    assert_eq!(row.label("there"), "small-one");
    assert_eq!(row.figures[key::SECONDS].runs, 2);
    assert_eq!(row.value(key::WIRE), Some(2.0 * (12288.0 + 7.0) / 1e6));
    // One of the two is there, and the other has one block of its own.
    let limit = run(&flock::EXPERIMENT, "app-similar-limit", "").remove(0);
    assert!(limit.value(key::BYTES).unwrap() < 1e-3, "{limit:?}");
    let wrong = r#"[ $name != small-two.raw ] || echo x >> "$to""#;
    let row = run(&flock::EXPERIMENT, "app-empty-drover", wrong).remove(0);
    assert!(matches!(row.verdict, Verdict::Wrong(_)), "{row:?}");
}

#[test]
fn every_level_is_a_row_beside_the_best() {
    let rows = run(&compress::EXPERIMENT, "loopback", "");
    let best = rows[1..].iter().filter_map(|row| row.value("times_best"));
    assert_eq!(best.min_by(f64::total_cmp), Some(1.0));
    assert!(
        rows.iter().all(|row| row.verdict == Verdict::Good),
        "{rows:?}"
    );
}

#[test]
fn everyone_has_a_turn_at_throughput() {
    let rows = run(&throughput::EXPERIMENT, "loopback", "");
    let by: Vec<&str> = rows.iter().map(|row| row.label("by")).collect();
    assert_eq!(
        by[..3],
        ["drover, first", "drover, again", "drover, similar"]
    );
    assert_eq!(by[by.len() - 2..], ["cp", "dd conv=fsync"]);
    for row in rows
        .iter()
        .filter(|r| !matches!(r.verdict, Verdict::Skipped(_)))
    {
        assert_eq!(row.verdict, Verdict::Good, "{row:?}");
        assert_eq!(row.figures["seconds"].runs, 2, "{row:?}");
    }
    let wrong = run(&throughput::EXPERIMENT, "loopback", r#"echo x >> "$to""#);
    assert!(matches!(wrong[0].verdict, Verdict::Failed(_)), "{wrong:?}");
    assert_eq!(wrong.last().unwrap().verdict, Verdict::Good);
}

#[test]
fn the_most_similar_shares_most() {
    let dir = tempfile::tempdir().unwrap();
    let image = |name: &str, blocks: &[u8]| {
        let bytes: Vec<u8> = blocks.iter().flat_map(|b| vec![*b; 4096]).collect();
        std::fs::write(dir.path().join(name), bytes).unwrap();
        dir.path().join(name)
    };
    let candidates = [
        image("a", &[1, 9]),
        image("b", &[1, 2, 3]),
        image("c", &[1, 2, 4]),
    ];
    let mut alike = Alike::default();
    let best = alike.most_similar(&image("one", &[1, 2, 5]), &candidates);
    assert_eq!(best.unwrap(), Some(candidates[1].as_path()));
    let none = alike.most_similar(&image("other", &[77]), &candidates);
    assert_eq!(none.unwrap(), None);
}

#[test]
fn limits_are_kept_until_an_image_changes() {
    let dir = tempfile::tempdir().unwrap();
    let lab = stand_in::lab(dir.path(), "");
    let images = ["small-one", "small-two"].map(|name| lab.image(name).unwrap());
    let unique = || mover::limits(&lab, &[], &images).unwrap()[1].unique_blocks;
    assert_eq!(unique(), 1);
    let kept = dir.path().join("out/limits.json");
    let text = std::fs::read_to_string(&kept).unwrap();
    std::fs::write(
        &kept,
        text.replace("\"unique_blocks\":1", "\"unique_blocks\":77"),
    )
    .unwrap();
    assert_eq!(unique(), 77);
    std::fs::write(&images[1], vec![5; 12288]).unwrap();
    assert_eq!(unique(), 1);
}

#[test]
fn a_slow_start_is_no_part_of_the_steady_rate() {
    let mib = 1 << 20;
    let progress = [(1.0, mib), (2.0, 2 * mib), (3.0, 12 * mib), (6.0, 42 * mib)];
    assert_eq!(mount::steady_rate(&progress), Some(10.0));
    assert_eq!(mount::steady_rate(&progress[..1]), None);
    let mut values: Vec<f64> = (0..200).rev().map(f64::from).collect();
    assert_eq!(mount::percentile(&mut values, 99), Some(198.0));
    assert_eq!(mount::percentile(&mut [], 50), None);
}

#[test]
fn a_pull_ends_when_the_bytes_stop() {
    let samples = [
        (0.0, 1_000, (50, 100)),
        (1.0, 2_000, (60, 120)),
        (2.0, 5_001_000, (110, 220)),
        // A mount that is complete still sends keepalives.
        (3.0, 5_002_000, (110, 420)),
    ];
    let pulled = pull::Pulled::of(&samples).unwrap();
    assert_eq!(
        (pulled.seconds, pulled.bytes, pulled.cores_percent),
        (2.0, 5_000_000, 50.0)
    );
    assert_eq!(pull::Pulled::of(&samples[..2]), None);
}

#[test]
fn what_fio_says_is_read() {
    let said = br#"fio: a warning
{"jobs": [{"read": {"iops": 1000.0, "bw_bytes": 4194304,
  "lat_ns": {"percentile": {"50.000000": 900000, "99.000000": 2000000}}}, "write": {"iops": 0.0}}]}"#;
    assert_eq!(
        frontends::parse(said, false).unwrap(),
        [1000.0, 4.0, 900.0, 2000.0]
    );
    assert!(
        frontends::parse(said, true).is_err(),
        "no request was written"
    );
    assert!(frontends::parse(b"fio: no such engine", false).is_err());
}

/// Needs root, a release build of drover, and the library's image (`lab library`).
#[test]
#[ignore = "boots a machine without KVM twice, which takes two minutes: \
            cargo build --release -p drover && cargo test -p drover-lab a_guest_boots -- --ignored"]
fn a_guest_boots_from_afar_shuts_down_and_leaves_a_clean_disk() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let out = tempfile::tempdir().unwrap();
    let common = Common {
        drover: root.join("target/release/drover"),
        dir: root.join("lab/cache"),
        out: out.path().to_owned(),
    };
    let lab = Lab {
        common,
        repeat: 1,
        small: false,
    };
    let lacks = crate::link::available().err();
    if let Some(why) = lacks.or_else(|| lab.image("bookworm-web").err().map(|e| e.to_string())) {
        return eprintln!("SKIP boot: {why}");
    }
    for row in boot::measure(&lab, &[boot::ALL[0], boot::MANAGED]).unwrap() {
        match &row.verdict {
            Verdict::Skipped(why) => eprintln!("SKIP boot: {why}"),
            verdict => assert_eq!(*verdict, Verdict::Good, "{row:?}"),
        }
    }
}
