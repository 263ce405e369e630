//! The library in order against a stand-in for drover, a shell script that keeps the promises that scripts rely on
//! (and, if asked, breaks one): that bad news becomes rows, and that the figures are of what they say.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use super::*;
use crate::bench::Figure;
use crate::experiments::stand_in;
use crate::rivals::{Carrier, Rival};
use crate::site::Where;

/// Two images of which the second shares its last blocks with the first.
fn images_in(dir: &Path) -> Vec<PathBuf> {
    [("one.raw", 1), ("two.raw", 2)]
        .map(|(name, byte)| {
            let path = dir.join(name);
            fs::write(&path, [vec![byte; 4096], vec![9; 8192]].concat()).unwrap();
            path
        })
        .to_vec()
}

fn sent(dir: &Path, by: By, damage: &str) -> Result<Vec<Row>> {
    let images = images_in(dir);
    let lab = stand_in::lab(dir, damage);
    let limits = Scales::new(&lab.common.out).limits(&[], &images)?;
    let rows = send_all(&lab, None, by, &images, &limits);
    // Nothing is left of the sites.
    let left: Vec<_> = fs::read_dir(&lab.common.out).unwrap().flatten().collect();
    assert_eq!(left.len(), 1, "{left:?}");
    rows
}

#[test]
fn the_reference_comes_first_and_who_sends_everything_last() {
    let dir = tempfile::tempdir().unwrap();
    let lab = stand_in::lab(dir.path(), "");
    let images = dir.path().join("cache/images");
    fs::create_dir_all(&images).unwrap();
    for name in ["plain", "app", "db", "nfs", "web", "dev"] {
        let file = fs::File::create(images.join(format!("bookworm-{name}.raw"))).unwrap();
        file.set_len(2 << 30).unwrap();
    }
    let plan = plan(&lab).unwrap();
    let rank = |id: &str| plan.iter().find(|(case, _)| case.id == id).unwrap().0.rank;
    assert_eq!(rank("100mbit-40ms-drover"), 0);
    assert_eq!(rank("100mbit-40ms-rsync-whole"), 2);
    assert_eq!(rank("1000mbit-5ms-drover"), 2);
    assert_eq!(rank("1000mbit-5ms-rsync-delta"), 3);
    assert!(plan.is_sorted_by_key(|(case, _)| case.rank));
    let each = 2 + mover::rivals().count();
    assert_eq!(plan.len(), 18 * each);
    let reference = plan.iter().filter(|(_, job)| job.line == Some(REFERENCE));
    assert_eq!(reference.count(), each);
}

#[test]
fn every_image_has_a_row_and_all_have_one() {
    let dir = tempfile::tempdir().unwrap();
    // A run that was killed has left its sites; no process has this number.
    fs::create_dir_all(dir.path().join("out/work-library-4194999/site")).unwrap();
    let rows = sent(dir.path(), By::Drover, "").unwrap();
    let names: Vec<&str> = rows.iter().map(|row| row.label("image")).collect();
    assert_eq!(names, ["one", "two", ALL]);
    for row in &rows {
        assert_eq!(row.verdict, Verdict::Good);
        for column in ABOUT.columns {
            if let Column::Figure {
                key,
                required: true,
                ..
            } = column
            {
                assert!(row.value(key).is_some(), "{key}");
            }
        }
    }
    // The stand-in says 12288 and 7 bytes an image.
    assert!((rows[1].value(key::BYTES).unwrap() - 0.012_295).abs() < 1e-9);
    assert!((rows[2].value(key::BYTES).unwrap() - 0.024_590).abs() < 1e-9);
    let sum = rows[0].value(key::SECONDS).unwrap() + rows[1].value(key::SECONDS).unwrap();
    assert!((rows[2].value(key::SECONDS).unwrap() - sum).abs() < 1e-9);
}

#[test]
fn a_library_of_links_is_one_too() {
    let dir = tempfile::tempdir().unwrap();
    let image = images_in(dir.path()).remove(0);
    let linked = dir.path().join("linked.raw");
    std::os::unix::fs::symlink(image, &linked).unwrap();
    let lab = stand_in::lab(dir.path(), "");
    let limits = Scales::new(&lab.common.out)
        .limits(&[], std::slice::from_ref(&linked))
        .unwrap();
    let rows = send_all(&lab, None, By::Drover, &[linked], &limits).unwrap();
    assert_eq!(rows[0].label("image"), "linked");
    assert!(
        rows.iter().all(|row| row.verdict == Verdict::Good),
        "{rows:?}"
    );
}

#[test]
fn a_wrong_file_is_said_to_be_wrong() {
    let dir = tempfile::tempdir().unwrap();
    let damage = r#"[ "$name" = two.raw ] && echo x >> "$to""#;
    let rows = sent(dir.path(), By::Drover, &format!("{{ {damage}; }} || true")).unwrap();
    assert_eq!(rows[0].verdict, Verdict::Good);
    assert!(matches!(rows[1].verdict, Verdict::Wrong(_)));
    assert_eq!(rows[2].verdict, Verdict::Failed("1 of 2 images".to_owned()));
}

#[test]
fn an_image_that_fails_says_why_and_the_others_go_on() {
    let dir = tempfile::tempdir().unwrap();
    let damage = r#"[ "$name" = two.raw ] || { echo no space there >&2; exit 3; }"#;
    let rows = sent(dir.path(), By::Drover, damage).unwrap();
    assert!(
        matches!(&rows[0].verdict, Verdict::Failed(why) if why.contains("no space there")),
        "{:?}",
        rows[0].verdict
    );
    assert_eq!(rows[1].verdict, Verdict::Good);
    assert!(matches!(rows[2].verdict, Verdict::Failed(_)));
}

#[test]
fn a_send_that_hangs_is_ended_at_its_deadline() {
    let dir = tempfile::tempdir().unwrap();
    let image = images_in(dir.path()).remove(0);
    let lab = stand_in::lab(dir.path(), "exec sleep 60");
    let net = Net::loopback();
    let drover = lab.binary().unwrap();
    let mut mover = Mover::start(By::Drover, &drover, &net, &dir.path().join("work")).unwrap();
    let started = Instant::now();
    let error = mover
        .carry(&net, &image, None, Duration::from_millis(300))
        .unwrap_err();
    assert!(format!("{error:#}").contains("deadline"), "{error:#}");
    assert!(started.elapsed() < Duration::from_secs(10));
}

/// A rival that is not there, or carries only what it likes.
struct Absent;
struct Picky;

impl Rival for Absent {
    fn name(&self) -> &'static str {
        "absent"
    }

    fn settings(&self) -> String {
        String::new()
    }

    fn version(&self) -> Result<String, String> {
        Err("absent is not installed".to_owned())
    }

    fn expected_bytes(&self, image: &Weight) -> u64 {
        image.data_bytes
    }

    fn start<'a>(&self, _: Where<'a>, _: &Path) -> Result<Box<dyn Carrier + 'a>> {
        bail!("it is not there")
    }
}

impl Rival for Picky {
    fn name(&self) -> &'static str {
        "picky"
    }

    fn settings(&self) -> String {
        String::new()
    }

    fn version(&self) -> Result<String, String> {
        Ok("1".to_owned())
    }

    fn expected_bytes(&self, image: &Weight) -> u64 {
        image.data_bytes
    }

    fn start<'a>(&self, _: Where<'a>, dir: &Path) -> Result<Box<dyn Carrier + 'a>> {
        Ok(Box::new(Copies(dir.to_owned(), None)))
    }
}

/// Copies what it is given a basis for; remembers that.
struct Copies(PathBuf, Option<PathBuf>);

impl Carrier for Copies {
    fn carry(&mut self, image: &Path, basis: Option<&Path>) -> Result<f64> {
        self.1 = basis.map(Path::to_owned);
        let name = image.file_name().unwrap();
        if name == "one.raw" && basis.is_some() {
            bail!("nothing can be a basis yet");
        }
        if name == "two.raw" && basis.is_none_or(|b| !b.ends_with("one.raw")) {
            bail!("not the most similar image");
        }
        fs::copy(image, self.0.join(name))?;
        Ok(0.5)
    }

    fn delivered(&self, image: &Path) -> PathBuf {
        self.0.join(image.file_name().unwrap())
    }
}

#[test]
fn rivals_are_skipped_when_absent_and_get_the_most_similar_basis() {
    let dir = tempfile::tempdir().unwrap();
    let rows = sent(dir.path(), By::Rival(&Absent), "").unwrap();
    assert_eq!(
        rows[0].verdict,
        Verdict::Skipped("absent is not installed".to_owned())
    );
    let rows = sent(dir.path(), By::Rival(&Picky), "").unwrap();
    assert!(
        rows.iter().all(|row| row.verdict == Verdict::Good),
        "{rows:?}"
    );
    assert_eq!(rows[2].value(key::SECONDS), Some(1.0));
}

fn carried(seconds: f64) -> Carried {
    Carried {
        seconds,
        link: Some((100_000_000, 1_000_000)),
        wire: None,
        sender: None,
        site: None,
        same: true,
    }
}

fn some_limit() -> Limit {
    Limit {
        name: String::new(),
        size_bytes: 1 << 30,
        data_blocks: 200_000,
        matched_blocks: 0,
        repeated_blocks: 0,
        unique_blocks: 1,
        limit_bytes: 50_500_000,
    }
}

#[test]
fn figures_are_of_what_they_say() {
    let (line, limit) = (Some(REFERENCE), some_limit());
    let runs = [carried(10.0), carried(8.0), carried(16.0)];
    let drover = mover::fill(row(ALL, line, "drover"), &runs, &limit, line);
    let value = |key: &str| drover.value(key).unwrap();
    // 819.2 MB are 65.5 s at 12.5 MB/s, and 100 MB 8 s.
    assert!((value(key::TIMES_COPY) - 6.5536).abs() < 1e-9);
    assert!((value(key::OVER_IDEAL) - 1.25).abs() < 1e-9);
    assert!((value(key::OVER_LIMIT) - 2.0).abs() < 1e-9);
    assert!((value(key::TELEPORTED) - 87.67).abs() < 0.01);
    let seconds: Figure = drover.figures[key::SECONDS];
    assert_eq!(
        (seconds.runs, seconds.spread.min, seconds.spread.max),
        (3, 8.0, 16.0)
    );
}

#[test]
fn there_is_a_plot_of_everything_that_was_measured() {
    let line = Some(REFERENCE);
    let mut rows = Vec::new();
    for by in ["drover", "zstd"] {
        for image in ["one", ALL] {
            let row = row(image, line, by);
            rows.push(mover::fill(row, &[carried(9.0)], &some_limit(), line));
        }
    }
    // One that sends the zeros, too.
    let whole = Carried {
        link: Some((2_000_000_000, 0)),
        ..carried(170.0)
    };
    for image in ["one", ALL] {
        let row = row(image, line, "rsync-whole");
        rows.push(mover::fill(
            row,
            std::slice::from_ref(&whole),
            &some_limit(),
            line,
        ));
    }
    let plots = plots(&rows);
    let names: Vec<&str> = plots.iter().map(|plot| plot.name.as_str()).collect();
    assert_eq!(
        names,
        ["bytes", "cumulated", "time", "teleported", "speedup"]
    );
    let shown = |name: &str| {
        let plot = plots.iter().find(|plot| plot.name == name).unwrap();
        format!("{:?}", plot.kind).contains("rsync-whole")
    };
    assert!(shown("time") && shown("speedup") && !shown("bytes") && !shown("cumulated"));
    assert!(plots[0].title.contains("rsync-whole"));
    assert!(super::plots(&[]).is_empty());
}
