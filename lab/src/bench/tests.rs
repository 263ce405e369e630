//! Tests of rows: validation, storage, display and plots.

use anyhow::anyhow;

use super::document::render;
use super::plot::bars;
use super::process::judged;
use super::rows::{Record, Rows};
use super::*;

const TINY: Experiment = Experiment {
    name: "library",
    title: "A tiny experiment",
    text: "Nothing is *measured*.",
    columns: &[
        Column::label("by", "by"),
        Column::figure("seconds", "seconds", 2),
        Column::optional("extra", "extra", 0),
    ],
    cases: |_| Ok(Vec::new()),
    run: |_, _| Ok(Vec::new()),
};

fn row(by: &str, seconds: &[f64]) -> Row {
    let mut row = Row::new([("by", by.to_owned())]);
    row.set_all("seconds", seconds);
    row
}

fn record(case: &str, build: &str, rows: Vec<Row>) -> Record {
    Record {
        experiment: TINY.name.to_owned(),
        case: case.to_owned(),
        measured: "2026-03-01".to_owned(),
        build: build.to_owned(),
        subject: String::new(),
        machine: "a machine".to_owned(),
        load: 1.25,
        rows,
    }
}

#[test]
fn a_figure_has_its_spread() {
    assert_eq!(Figure::of(&[]), None);
    assert_eq!(
        Figure::of(&[3.0, 1.0, 2.0]).unwrap().show(1),
        "2.0 (1.0 to 3.0)"
    );
    assert_eq!(Figure::of(&[4.0, 1.0]).unwrap().median, 2.5);
    assert_eq!(Figure::of(&[4.0]).unwrap().show(2), "4.00");
}

#[test]
fn rows_without_what_they_must_have_have_failed() {
    let case = Case::new("one", "", 0, &[]);
    let rows = vec![
        row("good", &[1.0]),
        row("nothing", &[]),
        row("nan", &[f64::NAN]),
    ];
    let rows = judged(&TINY, &case, Ok(rows));
    let failed = Verdict::Failed("no figure seconds".to_owned());
    let verdicts: Vec<&Verdict> = rows.iter().map(|row| &row.verdict).collect();
    assert_eq!(verdicts, [&Verdict::Good, &failed, &failed]);
    let rows = judged(&TINY, &case, Err(anyhow!("broken")));
    assert_eq!((rows[0].label("by"), rows.len()), ("one", 1));
    assert_eq!(rows[0].verdict, Verdict::Failed("broken".to_owned()));
    assert_eq!(judged(&TINY, &case, Ok(Vec::new())).len(), 1);
}

#[test]
fn what_is_kept_is_read_again() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("out/rows.jsonl");
    let mut rows = Rows::read(&file).unwrap();
    let wrong = row("b", &[2.0]).but(Verdict::Wrong("it differs".to_owned()));
    rows.keep(record("one", "aaa", vec![row("a", &[1.0])]))
        .unwrap();
    rows.keep(record("two", "aaa", vec![wrong])).unwrap();
    rows.keep(record("one", "bbb", vec![row("a", &[1.5, 3.0])]))
        .unwrap();
    let again = Rows::read(&file).unwrap();
    assert_eq!((&again.all, again.all.len()), (&rows.all, 2));
    assert!(again.of(TINY.name, "one").unwrap().is_good());
    assert!(!again.of(TINY.name, "two").unwrap().is_good());
    assert!(again.of("other", "one").is_none());
    std::fs::write(&file, "{").unwrap();
    assert!(Rows::read(&file).is_err());
}

#[test]
fn the_document_opens_with_the_answer_and_ends_with_what_is_missing() {
    let mut all = row("drover", &[93.35]);
    for (key, value) in [("image", "all"), ("link", "100 Mbit/s, 40 ms")] {
        all.labels.insert(key.to_owned(), value.to_owned());
    }
    all.set("link_mb", 1110.0);
    let failed =
        row("rsync", &[1.0]).but(Verdict::Failed("no /home/me/secret.raw here".to_owned()));
    let good = record("one", "aaa", vec![all, failed]);
    let text = render(&[TINY], &[good]);
    let at = |part: &str| {
        text.find(part)
            .unwrap_or_else(|| panic!("no {part:?} in {text}"))
    };
    assert!(at("(benchmarks/bytes.svg)") < at("| drover | 1110 | 93.3 |"));
    assert!(at("| drover | 1110 |") < at("| drover | 93.35 | `aaa` | m1 | 1.2 | good |"));
    assert!(at("FAILED: no secret.raw here") < at("## What was not measured"));
    assert!(at("## What was not measured") < at("- library: links other"));
}

#[test]
fn machines_have_the_same_number_in_every_table() {
    let mut other = record("two", "bbb", vec![row("b", &[2.0])]);
    other.machine = "another machine".to_owned();
    let text = render(
        &[TINY],
        &[record("one", "aaa", vec![row("a", &[1.0])]), other],
    );
    for part in [
        "- m1: a machine\n- m2: another machine\n",
        "| a | 1.00 | `aaa` | m1 |",
        "| b | 2.00 | `bbb` | m2 |",
    ] {
        assert!(text.contains(part), "no {part:?} in {text}");
    }
}

#[test]
fn bars_are_drawn_to_scale() {
    let bars = bars(
        "A & B",
        &[("drover".to_owned(), 50.0), ("rsync".to_owned(), 100.0)],
    );
    assert!(
        bars.contains("A &amp; B")
            && bars.contains("width=\"320.0\"")
            && bars.contains("width=\"640.0\""),
        "{bars}"
    );
    // What has no rows has no plot.
    assert!(!render(&[TINY], &[]).contains("svg"));
}
