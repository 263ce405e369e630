//! The runner with tiny experiments that fail, panic, or hand out nonsense.

use std::cell::RefCell;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::judge::{self, Exit};
use super::needs::Lacking;
use super::plan::{Fate, Plan, Wish};
use super::process::{Ended, Runner};
use super::runner;
use super::store::{Record, Store};
use super::*;
use crate::experiments::Common;

/// An experiment of given cases whose ids say what becomes of them.
struct Tiny(&'static About, Vec<Case>);

static ABOUT: About = About {
    name: "tiny",
    title: "A tiny experiment",
    text: "Nothing is *measured*.",
    columns: &[
        Column::label("by", "by"),
        Column::figure("seconds", "seconds", 2),
        Column::optional("extra", "extra", 0),
    ],
};
static OTHER: About = About {
    name: "other",
    title: "Another",
    text: "Nothing.",
    columns: ABOUT.columns,
};

impl Experiment for Tiny {
    fn about(&self) -> &'static About {
        self.0
    }

    fn cases(&self, _: &Lab) -> Result<Vec<Case>> {
        Ok(self.1.clone())
    }

    fn run(&self, _: &Lab, case: &Case) -> Result<Vec<Row>> {
        let row = Row::new([("by", case.id.clone())]);
        match case.id.as_str() {
            "error" => anyhow::bail!("it broke"),
            "panic" => panic!("it panicked on purpose"),
            "nothing" => Ok(Vec::new()),
            "lacks" => Ok(vec![row.with("extra", 1.0)]),
            "nan" => Ok(vec![row.with("seconds", f64::NAN)]),
            "infinite" => Ok(vec![row.with("seconds", 1.0).with("odd", f64::INFINITY)]),
            "full" => anyhow::bail!("cp: No space left on device"),
            "wrong" => Ok(vec![Row {
                verdict: Verdict::Wrong("byte 7".to_owned()),
                ..row
            }]),
            "skipped" => Ok(vec![Row {
                verdict: Verdict::Skipped("not installed".to_owned()),
                ..row
            }]),
            _ => {
                let mut row = row.with("extra", 3.0);
                row.set_all("seconds", &[1.13, 1.18, 1.34]);
                Ok(vec![row])
            }
        }
    }

    fn plots(&self, rows: &[Row]) -> Vec<Plot> {
        let bars = rows
            .iter()
            .map(|row| (row.label("by").to_owned(), row.value("seconds")));
        let (groups, values) = bars.unzip();
        vec![Plot {
            name: "seconds".to_owned(),
            title: "Seconds of each".to_owned(),
            x: Axis::linear("by"),
            y: Axis::linear("seconds"),
            kind: Kind::Bars {
                groups,
                series: vec![("seconds".to_owned(), values)],
                stacked: false,
            },
        }]
    }
}

fn case(id: &str, rank: u8, seconds: f64) -> Case {
    Case {
        id: id.to_owned(),
        what: format!("the case {id}"),
        seconds,
        rank,
        subject: Subject::Drover,
        needs: &[],
    }
}

fn rival(id: &str) -> Case {
    Case {
        subject: Subject::Rival("rsync 3.4".to_owned()),
        ..case(id, 0, 1.0)
    }
}

fn lab(dir: &Path) -> Lab {
    std::fs::write(dir.join("drover"), "one build").unwrap();
    Lab {
        common: Common {
            drover: dir.join("drover"),
            dir: dir.join("cache"),
            out: dir.join("out"),
            json: false,
        },
        repeat: 1,
        small: false,
    }
}

/// Measures in this process, and remembers what it measured.
struct Here<'a>(&'a Lab, RefCell<Vec<String>>);

impl Runner for Here<'_> {
    fn run(&mut self, experiment: &dyn Experiment, case: &Case, _: Duration) -> Ended {
        self.1.borrow_mut().push(case.id.clone());
        if case.id == "interrupt" {
            return Ended::Interrupted;
        }
        Ended::Rows(judge::measure(experiment, self.0, case))
    }
}

/// Plans and runs.
fn run(
    lab: &Lab,
    experiments: &[&dyn Experiment],
    wish: &Wish,
) -> (Plan, runner::Outcome, Vec<String>) {
    let store = Store::at(&lab.common.out, false);
    let mut plan = Plan::make(experiments, lab, &store, wish).unwrap();
    let mut here = Here(lab, RefCell::default());
    let outcome = runner::run(experiments, lab, &store, &mut plan, &mut here);
    store.save_plan(&plan).unwrap();
    (plan, outcome, here.1.into_inner())
}

fn fates(plan: &Plan) -> Vec<(&str, &str, &Fate)> {
    let entries = plan.entries.iter();
    entries
        .map(|e| (e.experiment.as_str(), e.case.as_str(), &e.fate))
        .collect()
}

#[test]
fn ranks_are_spread_over_experiments_and_fill_the_time() {
    let dir = tempfile::tempdir().unwrap();
    let lab = lab(dir.path());
    let one = Tiny(
        &ABOUT,
        vec![
            case("a", 0, 50.0),
            case("b", 0, 50.0),
            case("c", 1, 30.0),
            case("d", 2, 5.0),
        ],
    );
    let two = Tiny(
        &OTHER,
        vec![case("a", 0, 10.0), case("b", 1, 9.0), case("c", 1, 4.0)],
    );
    let store = Store::at(&lab.common.out, false);
    let wish = Wish {
        budget: Some(125.0),
        ..Wish::default()
    };
    let plan = Plan::make(&[&one, &two], &lab, &store, &wish).unwrap();
    // 110 s of rank 0, then what fits into the 15 s that are left: 30 does not, 9 and 4 do, 5 no longer.
    assert_eq!(
        fates(&plan),
        [
            ("tiny", "a", &Fate::Run),
            ("other", "a", &Fate::Run),
            ("tiny", "b", &Fate::Run),
            ("tiny", "c", &Fate::OverBudget),
            ("other", "b", &Fate::Run),
            ("other", "c", &Fate::Run),
            ("tiny", "d", &Fate::OverBudget),
        ]
    );
    assert_eq!(plan.seconds(), 123.0);
    // What is important is begun in any case; with time to spare, what was left out is taken in again.
    let none = Wish {
        budget: Some(0.0),
        ..Wish::default()
    };
    let mut plan = Plan::make(&[&one, &two], &lab, &store, &none).unwrap();
    assert_eq!(plan.count(&Fate::Run), 3);
    plan.budget = Some(60.0);
    plan.fit(3, 15.0);
    let (_, _, fate) = fates(&plan)[3];
    assert_eq!((fate, plan.count(&Fate::OverBudget)), (&Fate::Run, 1));
}

#[test]
fn only_what_was_asked_for_is_measured() {
    let dir = tempfile::tempdir().unwrap();
    let lab = lab(dir.path());
    let tiny = Tiny(
        &ABOUT,
        vec![case("20mbit-drover", 0, 1.0), case("20mbit-zstd", 0, 1.0)],
    );
    let ask = |only: &str| Wish {
        only: vec![only.parse().unwrap()],
        ..Wish::default()
    };
    for (only, count) in [
        ("tiny", 2),
        ("tiny/*-drover", 1),
        ("t?ny/20*z*", 1),
        ("*", 2),
    ] {
        let store = Store::at(&lab.common.out, false);
        let plan = Plan::make(&[&tiny], &lab, &store, &ask(only)).unwrap();
        assert_eq!(plan.count(&Fate::Run), count, "{only}");
    }
    let store = Store::at(&lab.common.out, false);
    let error = Plan::make(&[&tiny], &lab, &store, &ask("tiny/none")).unwrap_err();
    assert!(error.to_string().contains("tiny/none"), "{error}");
}

#[test]
fn what_the_machine_lacks_is_left_out_with_its_reason() {
    let dir = tempfile::tempdir().unwrap();
    let lab = lab(dir.path());
    let needy = Case {
        needs: &[Need::Link],
        ..case("far", 0, 1.0)
    };
    let tiny = Tiny(&ABOUT, vec![needy, case("near", 0, 1.0)]);
    let store = Store::at(&lab.common.out, false);
    let mut plan = Plan::of(
        vec![(&tiny, tiny.1.clone())],
        &lab,
        &store,
        &Wish::default(),
        &Lacking::just(Need::Link, "no root"),
        BTreeMap::new(),
    );
    assert_eq!(plan.lacking(), [("tiny", "no root", 1)]);
    let mut here = Here(&lab, RefCell::default());
    let outcome = runner::run(&[&tiny], &lab, &store, &mut plan, &mut here);
    assert_eq!((outcome.exit.code(), outcome.records.len()), (4, 1));
    // The library is really missing here.
    let library = Case {
        needs: &[Need::Library],
        ..case("images", 0, 1.0)
    };
    let tiny = Tiny(&ABOUT, vec![library]);
    let (plan, outcome, ran) = run(&lab, &[&tiny], &Wish::default());
    let (_, why, _) = plan.lacking()[0];
    assert!(why.contains("lab library"), "{why}");
    assert_eq!((outcome.exit.code(), ran.len()), (4, 0));
}

#[test]
fn every_bad_end_is_a_row() {
    let dir = tempfile::tempdir().unwrap();
    let lab = lab(dir.path());
    let bad = [
        ("error", "it broke"),
        ("panic", "it panicked on purpose"),
        ("nothing", "no rows"),
        ("lacks", "no figure seconds"),
        ("nan", "no figure seconds"),
        ("infinite", "no figure odd"),
        ("full", " on "),
    ];
    for (id, words) in bad {
        let tiny = Tiny(&ABOUT, vec![case(id, 0, 1.0), case("good", 1, 1.0)]);
        let (_, outcome, ran) = run(&lab, &[&tiny], &Wish::default());
        let verdict = &outcome.records[0].rows[0].verdict;
        let Verdict::Failed(why) = verdict else {
            panic!("{id}: {verdict:?}");
        };
        assert!(why.contains(words), "{id}: {why}");
        assert_eq!(outcome.records[0].rows[0].label("by"), id);
        // The run went on, and what failed will be measured again.
        assert_eq!(outcome.exit.code(), 1, "{id}");
        let again = run(&lab, &[&tiny], &Wish::default()).2;
        assert_eq!(
            (ran.first(), again),
            (Some(&id.to_owned()), vec![id.to_owned()])
        );
    }
}

#[test]
fn the_exit_code_tells_whose_fault_it_is() {
    let code = |cases: Vec<Case>| {
        let dir = tempfile::tempdir().unwrap();
        let tiny = Tiny(&ABOUT, cases);
        run(&lab(dir.path()), &[&tiny], &Wish::default())
            .1
            .exit
            .code()
    };
    assert_eq!(code(vec![case("good", 0, 1.0), rival("fine")]), 0);
    assert_eq!(code(vec![case("good", 0, 1.0), rival("skipped")]), 0);
    assert_eq!(code(vec![case("skipped", 0, 1.0), rival("fine")]), 4);
    assert_eq!(code(vec![case("skipped", 0, 1.0), rival("wrong")]), 3);
    assert_eq!(code(vec![rival("error"), case("good", 0, 1.0)]), 3);
    assert_eq!(code(vec![rival("error"), case("wrong", 0, 1.0)]), 1);
    assert_eq!(Exit::default().code(), 0);
    // Who is measured beside drover in one case is told by the row.
    for (by, code) in [("drover, again", 1), ("limit", 1), ("rsync --fsync", 3)] {
        let mut row = Row::new([("by", by.to_owned())]);
        row.verdict = Verdict::Failed("broken".to_owned());
        let mut exit = Exit::default();
        exit.see(&case("all", 0, 1.0), &[row]);
        assert_eq!(exit.code(), code, "{by}");
    }
}

#[test]
fn what_holds_is_kept_and_what_changed_is_measured_again() {
    let dir = tempfile::tempdir().unwrap();
    let mut lab = lab(dir.path());
    let tiny = Tiny(&ABOUT, vec![case("own", 0, 1.0), rival("theirs")]);
    let ran = |lab: &Lab, tiny: &Tiny, again| {
        let wish = Wish {
            again,
            ..Wish::default()
        };
        run(lab, &[tiny], &wish).2
    };
    assert_eq!(ran(&lab, &tiny, false), ["own", "theirs"]);
    assert!(ran(&lab, &tiny, false).is_empty());
    assert_eq!(ran(&lab, &tiny, true), ["own", "theirs"]);
    // Another build: a rival's result still holds.
    std::fs::write(&lab.common.drover, "another build").unwrap();
    assert_eq!(ran(&lab, &tiny, false), ["own"]);
    let newer = Case {
        subject: Subject::Rival("rsync 3.5".to_owned()),
        ..rival("theirs")
    };
    assert_eq!(ran(&lab, &Tiny(&ABOUT, vec![newer]), false), ["theirs"]);
    lab.repeat = 3;
    assert_eq!(ran(&lab, &tiny, false), ["own", "theirs"]);
}

/// As [`Tiny`], reading one image.
struct Reading(PathBuf);

impl Experiment for Reading {
    fn about(&self) -> &'static About {
        &ABOUT
    }
    fn cases(&self, _: &Lab) -> Result<Vec<Case>> {
        Ok(vec![case("good", 0, 1.0)])
    }
    fn run(&self, _: &Lab, _: &Case) -> Result<Vec<Row>> {
        Ok(vec![Row::default().with("seconds", 1.0)])
    }
    fn plots(&self, _: &[Row]) -> Vec<Plot> {
        Vec::new()
    }
    fn images(&self, _: &Lab, _: &Case) -> Option<Vec<PathBuf>> {
        Some(vec![self.0.clone()])
    }
}

#[test]
fn another_image_makes_another_result() {
    let dir = tempfile::tempdir().unwrap();
    let lab = lab(dir.path());
    let image = dir.path().join("a.raw");
    std::fs::write(&image, "one").unwrap();
    let reading = Reading(image.clone());
    assert_eq!(run(&lab, &[&reading], &Wish::default()).2.len(), 1);
    assert_eq!(run(&lab, &[&reading], &Wish::default()).2.len(), 0);
    std::fs::write(&image, "three").unwrap();
    assert_eq!(run(&lab, &[&reading], &Wish::default()).2.len(), 1);
}

#[test]
fn an_interrupted_run_keeps_what_was_done_and_goes_on_later() {
    let dir = tempfile::tempdir().unwrap();
    let lab = lab(dir.path());
    let cases = ["first", "interrupt", "last"].map(|id| case(id, 0, 1.0));
    let tiny = Tiny(&ABOUT, cases.to_vec());
    let (plan, outcome, ran) = run(&lab, &[&tiny], &Wish::default());
    assert!(outcome.interrupted);
    assert_eq!(ran, ["first", "interrupt"]);
    assert_eq!((plan.count(&Fate::Done), plan.count(&Fate::Run)), (1, 2));
    let (_, _, ran) = run(&lab, &[&tiny], &Wish::default());
    assert_eq!(ran, ["interrupt"]);
}

#[test]
fn files_that_are_no_records_are_told_and_measured_again() {
    let dir = tempfile::tempdir().unwrap();
    let lab = lab(dir.path());
    let store = Store::at(&lab.common.out, false);
    let tiny = Tiny(&ABOUT, vec![case("good", 0, 1.0)]);
    let (_, outcome, _) = run(&lab, &[&tiny], &Wish::default());
    let path = lab.common.out.join("bench/tiny/good.json");
    let whole = std::fs::read(&path).unwrap();
    assert_eq!(
        store.load("tiny", "good").unwrap().as_ref(),
        outcome.records.first()
    );
    let foreign = String::from_utf8(whole.clone())
        .unwrap()
        .replace("\"case\": \"good\"", "\"case\": \"bad\"");
    let newer = String::from_utf8(whole.clone())
        .unwrap()
        .replace("\"format\": 1", "\"format\": 2");
    let damaged: [(&[u8], &str); 5] = [
        (&whole[..whole.len() / 2], "torn"),
        (b"", "torn"),
        (b"{\"format\": 1}", "not ours"),
        (foreign.as_bytes(), "holds"),
        (newer.as_bytes(), "format 2"),
    ];
    for (bytes, words) in damaged {
        std::fs::write(&path, bytes).unwrap();
        let error = store.load("tiny", "good").unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
        assert_eq!(run(&lab, &[&tiny], &Wish::default()).2, ["good"]);
        assert!(store.load("tiny", "good").is_ok());
    }
    // What a killed run left half-written is not seen.
    std::fs::write(path.with_file_name(".good.json.part"), "{").unwrap();
    assert!(run(&lab, &[&tiny], &Wish::default()).2.is_empty());
    assert!(store.load("tiny", "../good").is_err());
    // Two runs at once would measure each other.
    let _held = store.lock().unwrap();
    assert!(store.lock().is_err());
}

#[test]
fn without_room_a_case_fails_and_names_the_file_system() {
    let dir = tempfile::tempdir().unwrap();
    let lab = lab(dir.path());
    // A file stands where results would go.
    std::fs::write(&lab.common.out, "").unwrap();
    let store = Store::at(&dir.path().join("elsewhere"), false);
    let tiny = Tiny(&ABOUT, vec![case("good", 0, 1.0)]);
    let mut plan = Plan::make(&[&tiny], &lab, &store, &Wish::default()).unwrap();
    let mut here = Here(&lab, RefCell::default());
    let outcome = runner::run(&[&tiny], &lab, &store, &mut plan, &mut here);
    assert!(here.1.borrow().is_empty());
    assert!(matches!(
        outcome.records[0].rows[0].verdict,
        Verdict::Failed(_)
    ));
    assert_eq!(outcome.exit.code(), 1);
}

/// A store with what a document has to tell apart; dates, commits and machines as given.
fn stored(dir: &Path) -> (Lab, Store) {
    let lab = lab(dir);
    let store = Store::at(&lab.common.out, false);
    let hour = Wish {
        budget: Some(3600.0),
        ..Wish::default()
    };
    run(&lab, &[&tiny()], &hour);
    let mut plan = store.load_plan().unwrap().unwrap();
    let machine = crate::report::Machine {
        processor: "a processor".to_owned(),
        cores: 2,
        memory_gib: 8,
        kernel: "6.1".to_owned(),
    };
    plan.machine = machine.clone();
    for entry in &mut plan.entries {
        entry.identity.machine = machine.clone();
        let Some(mut record) = store.load("tiny", &entry.case).unwrap() else {
            continue;
        };
        record.identity.machine = machine.clone();
        record.measured = "2026-03-01T10:00:00Z".to_owned();
        record.commit = "abc1234".to_owned();
        if entry.case == "older" {
            record.identity.subject = "drover 0000".to_owned();
            record.measured = "2026-02-01T10:00:00Z".to_owned();
            record.commit = "0ld-dirty".to_owned();
        }
        store.save(&record).unwrap();
    }
    let over = plan.entries.iter_mut().find(|e| e.case == "dear").unwrap();
    assert_eq!(over.fate, Fate::OverBudget);
    store.save_plan(&plan).unwrap();
    (lab, store)
}

fn tiny() -> Tiny {
    let cases = ["good", "older", "error", "skipped"].map(|id| case(id, 0, 1.0));
    let mut cases = cases.to_vec();
    cases.push(rival("theirs"));
    cases.push(case("dear", 1, 7200.0));
    Tiny(&ABOUT, cases)
}

#[test]
fn the_document_is_as_it_was() {
    let dir = tempfile::tempdir().unwrap();
    let (_, store) = stored(dir.path());
    let tiny = tiny();
    let file = dir.path().join("docs/benchmarks.md");
    std::fs::create_dir_all(dir.path().join("docs/benchmarks")).unwrap();
    std::fs::write(dir.path().join("docs/benchmarks/tiny-gone.svg"), "").unwrap();
    let tools = ["rsync", "zstd"].map(|name| document::Tool {
        name: name.to_owned(),
        settings: format!("{name} /usr/share/IMAGE | nc"),
    });
    document::publish(&[&tiny], &tools, &store, &file).unwrap();
    let text = std::fs::read_to_string(&file).unwrap();
    let golden = include_str!("golden.txt");
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/src/bench/golden.txt");
    if std::env::var_os("LAB_GOLDEN").is_some() {
        std::fs::write(path, &text).unwrap();
    }
    assert_eq!(text, golden, "LAB_GOLDEN=1 writes {path} anew");
    // The same again from the same results; pictures of the past are gone.
    document::publish(&[&tiny], &tools, &store, &file).unwrap();
    assert_eq!(std::fs::read_to_string(&file).unwrap(), golden);
    let mut pictures: Vec<String> = std::fs::read_dir(dir.path().join("docs/benchmarks"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    pictures.sort();
    assert_eq!(pictures, ["tiny-seconds.png", "tiny-seconds.svg"]);
}

#[test]
fn a_record_says_what_it_depends_on() {
    let dir = tempfile::tempdir().unwrap();
    let (lab, store) = stored(dir.path());
    let record: Record = store.load("tiny", "good").unwrap().unwrap();
    assert!(record.identity.subject.starts_with("drover "));
    assert_eq!(
        (record.identity.images.as_str(), record.repeat),
        ("none", lab.repeat)
    );
    let mut now = record.identity.clone();
    assert_eq!(record.outdated(&now, 1), None);
    assert!(record.outdated(&now, 2).is_some());
    now.machine.cores += 1;
    assert_eq!(record.outdated(&now, 1), Some("another machine"));
}
