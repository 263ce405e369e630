//! An SQLite database at another site is queried when 5 % of it is here: fetched from its beginning, or its index first.
//!
//! `cargo run -p drover-mount --example stream_sqlite`. SQLite knows nothing of it: it opens a file.

#[path = "far/mod.rs"]
mod far;

use std::ops::Range;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use drover_frontend::fuse::{self, FileMount};
use far::{Failed, Site, mib};

const PAGE: u64 = 4096;

const CREATE: &str = "
    PRAGMA page_size = 4096;
    CREATE TABLE readings (id INTEGER PRIMARY KEY, station INT, value INT, note TEXT);
    INSERT INTO readings
        SELECT value, value * 7919 % 97, value * 48271 % 1000003, hex(randomblob(200))
        FROM generate_series(1, 200000);
    CREATE INDEX by_value ON readings (station, value);";

/// Which stations there are, how much each has measured, and what was noted where one of them measured most.
const REPORT: &str = "
    SELECT station, count(*), max(value) FROM readings GROUP BY station;
    SELECT value, note FROM readings WHERE station = 42 ORDER BY value DESC LIMIT 5;";

/// The pages of the index, and those that lead to the rows of the table. Whoever offers the database can say it.
const INDEX: &str = "
    SELECT pageno FROM dbstat WHERE pageno = 1 OR name = 'by_value' OR pagetype = 'internal';";

/// What SQLite prints. The file does not change: it need not be locked.
fn sql(file: &Path, mode: &str, text: &str) -> Result<String, Failed> {
    let uri = format!("file:{}?{mode}", file.display());
    let said = Command::new("sqlite3").args([&uri, text]).output()?;
    match said.status.success() && said.stderr.is_empty() {
        true => Ok(String::from_utf8(said.stdout)?),
        false => Err(String::from_utf8_lossy(&said.stderr).into()),
    }
}

fn main() -> Result<(), Failed> {
    if Command::new("sqlite3").arg("-version").output().is_err() {
        println!("SKIP stream_sqlite: no sqlite3 (scripts/install-deps test)");
        return Ok(());
    }
    let runtime = tokio::runtime::Runtime::new()?;
    let dir = tempfile::tempdir()?;
    let file = dir.path().join("readings.db");
    sql(&file, "mode=rwc", CREATE)?;
    let expected = sql(&file, "immutable=1", REPORT)?;
    let pages = sql(&file, "immutable=1", INDEX)?;
    let pages: Vec<u64> = pages.lines().map(str::parse).collect::<Result<_, _>>()?;
    let index: Vec<_> = pages.iter().map(|n| (n - 1) * PAGE..n * PAGE).collect();
    let whole = file.metadata()?.len();
    println!(
        "a database of {:.1} MiB, its index {:.1} MiB",
        mib(whole),
        mib(index.len() as u64 * PAGE)
    );

    let query = |title: &str, order: &[Range<u64>]| -> Result<u64, Failed> {
        let dir = dir.path().join(title);
        std::fs::create_dir(&dir)?;
        let mount = Site::stream(runtime.handle(), &file, &dir)?;
        mount.pull(order, whole / 20)?;
        let options = fuse::Options {
            read_only: true,
            ..fuse::Options::default()
        };
        let mut shown = FileMount::mount(&dir.join("db"), mount.device.clone(), options)?;
        let (before, began) = (mount.here(), Instant::now());
        let answer = sql(shown.path(), "immutable=1", REPORT)?;
        let seconds = began.elapsed().as_secs_f64();
        assert!(answer == expected, "{title}: another answer");
        let here = mount.here();
        println!(
            "{title:13} {:.2} MiB here, the report fetches {:.2} MiB more in {seconds:.2} s: {:.1} % of all",
            mib(before),
            mib(here - before),
            100.0 * here as f64 / whole as f64
        );
        shown.unmount()?;
        mount.close()?;
        Ok(here - before)
    };
    let all = 0..whole;
    let beginning = query("sequential", std::slice::from_ref(&all))?;
    let first = query("index-first", &index)?;
    // What is left is the rows themselves, and what is read ahead of a reader that begins at the beginning.
    assert!(first * 2 < beginning, "the index was here: {first} bytes");
    assert!(beginning < whole / 10);
    Ok(())
}
