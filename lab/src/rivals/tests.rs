//! Tests of every installed rival with small images, and of error reporting.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::ends::Limit;
use super::zstd::Zstd;
use super::*;
use crate::files::identical;
use crate::link;
use crate::site::Where;

/// Two related images with holes, a few MB each.
struct Images {
    dir: tempfile::TempDir,
}

impl Images {
    const SIZE: u64 = 24 << 20;
    /// Incompressible bytes in each image.
    const RANDOM: u64 = 3 << 20;

    fn new() -> Self {
        let images = Self {
            dir: tempfile::tempdir().unwrap(),
        };
        let mut rng = fastrand::Rng::with_seed(1);
        let content: Vec<u8> = (0..Self::RANDOM).map(|_| rng.u8(..)).collect();
        // Half of it is compressible, like text.
        let text: Vec<u8> = content.iter().map(|byte| b'a' + byte % 4).collect();
        for (name, shift, fresh) in [("one.raw", 0, 1), ("two.raw", 5 << 20, 2)] {
            let file = File::create(images.path(name)).unwrap();
            file.set_len(Self::SIZE).unwrap();
            file.write_all_at(&content, (1 << 20) + shift).unwrap();
            file.write_all_at(&text, (14 << 20) + 4096).unwrap();
            file.write_all_at(&[fresh; 5000], 12_345).unwrap();
            file.write_all_at(&[fresh; 10], Self::SIZE - 10).unwrap();
        }
        images
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }
}

/// Transfers the first image and then the second, with the first as its basis, and compares the results.
fn carry_all(rival: &dyn Rival, images: &Images) {
    let (one, two) = (images.path("one.raw"), images.path("two.raw"));
    let dir = images.path(rival.name());
    let mut carrier = rival.start(Where::Loopback, &dir).unwrap();
    let mut basis = None;
    for image in [&one, &two] {
        let seconds = carrier
            .carry(image, basis.as_deref())
            .unwrap_or_else(|error| panic!("{}: {error:#}", rival.name()));
        let delivered = carrier.delivered(image);
        assert!(seconds > 0.0);
        assert!(identical(image, &delivered).unwrap(), "{}", rival.name());
        assert!(delivered.starts_with(dir.canonicalize().unwrap()));
        basis = Some(carrier.delivered(&one));
    }
    assert!(identical(&one, &carrier.delivered(&one)).unwrap());
}

/// Processes whose arguments or working directory contain `dir`.
fn programs_at(dir: &Path) -> Vec<String> {
    let dir = dir.canonicalize().unwrap();
    let processes = fs::read_dir("/proc").unwrap().flatten();
    let told = processes.filter_map(|process| {
        let arguments = fs::read(process.path().join("cmdline")).ok()?;
        let arguments = String::from_utf8_lossy(&arguments).replace('\0', " ");
        let at = fs::read_link(process.path().join("cwd"));
        let here = at.is_ok_and(|at| at.starts_with(&dir));
        (here || arguments.contains(dir.to_str()?)).then_some(arguments)
    });
    told.collect()
}

/// Expects that killed processes, and servers of closed connections, disappear in a moment.
fn none_left_at(dir: &Path) {
    let deadline = Instant::now() + Duration::from_secs(5);
    loop {
        let left = programs_at(dir);
        if left.is_empty() {
            return;
        }
        assert!(Instant::now() < deadline, "{left:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn every_rival_that_is_here_delivers_the_same_bytes_and_leaves_no_program() {
    let images = Images::new();
    for rival in ALL.iter().chain(OF_FLOCKS) {
        match rival.version() {
            Ok(version) => {
                assert!(!version.is_empty());
                carry_all(*rival, &images);
            }
            Err(missing) => eprintln!(
                "SKIP every_rival_that_is_here_delivers_the_same_bytes: {}: {missing}",
                rival.name()
            ),
        }
    }
    none_left_at(images.dir.path());
}

#[test]
fn what_every_rival_carries_crosses_the_link() {
    let test = "what_every_rival_carries_crosses_the_link";
    if let Err(why) = link::available() {
        eprintln!("SKIP {test}: {why}");
        return;
    }
    let images = Images::new();
    let one = images.path("one.raw");
    let options = link::Options {
        name: "labtest-rivals".to_owned(),
        rtt_ms: 4.0,
        rate_mbit: 1000.0,
        ..link::Options::default()
    };
    let link = link::Link::up(&options).unwrap();
    for rival in ALL.iter().chain(OF_FLOCKS) {
        if let Err(missing) = rival.version() {
            eprintln!("SKIP {test}: {}: {missing}", rival.name());
            continue;
        }
        let name = rival.name();
        let mut carrier = rival.start(Where::Over(&link), &images.path(name)).unwrap();
        let crossed = || link.traffic().a_to_b.bytes_out;
        let before = crossed();
        carrier
            .carry(&one, None)
            .unwrap_or_else(|error| panic!("{name}: {error:#}"));
        assert!(identical(&one, &carrier.delivered(&one)).unwrap(), "{name}");
        // These bytes are incompressible: if fewer were counted, they did not cross the link.
        let bytes = crossed() - before;
        assert!(bytes >= Images::RANDOM, "{name}: {bytes} bytes crossed");
        assert!(bytes < 2 * Images::SIZE, "{name}: {bytes} bytes crossed");
    }
}

/// A script of the test that replaces a tool.
fn fake(images: &Images, name: &str, script: &str) -> &'static str {
    let path = images.path(name);
    fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    // Leaked, because program names are constants elsewhere.
    String::leak(path.to_str().unwrap().to_owned())
}

fn fail(rival: &dyn Rival, images: &Images) -> String {
    let error = rival
        .start(Where::Loopback, &images.path(rival.name()))
        .and_then(|mut carrier| carrier.carry(&images.path("one.raw"), None))
        .expect_err("it cannot have carried");
    let error = format!("{error:#}");
    assert!(!error.contains('\n'), "{error}");
    error
}

#[test]
fn a_tool_that_crashes_is_told_with_its_own_words() {
    if let Err(missing) = tool::needs(&["socat"]) {
        eprintln!("SKIP a_tool_that_crashes_is_told_with_its_own_words: {missing}");
        return;
    }
    let images = Images::new();
    let crash = "echo out of luck >&2; exit 3";
    let zstd = |program| Zstd {
        program,
        limit: Limit::USUAL,
    };
    let here = zstd(fake(
        &images,
        "here",
        &format!("[ $1 = -d ] || {{ {crash}; }}"),
    ));
    let error = fail(&here, &images);
    assert!(error.contains("out of luck"), "{error}");
    let there = format!("if [ $1 = -d ]; then {crash}; else cat \"$7\"; fi");
    let error = fail(&zstd(fake(&images, "there", &there)), &images);
    assert!(error.contains("the far end: out of luck"), "{error}");
    // A daemon that does not start at all.
    let down = rsync::Tuned::WHOLE.with(fake(&images, "down", crash), Limit::USUAL);
    let error = fail(&down, &images);
    assert!(
        error.contains("rsync daemon: exit status: 3: out of luck"),
        "{error}"
    );
    assert!(down.version().unwrap_err().contains("out of luck"));
}

#[test]
fn a_tool_that_hangs_is_ended_at_its_deadline() {
    if let Err(missing) = tool::needs(&["socat"]) {
        eprintln!("SKIP a_tool_that_hangs_is_ended_at_its_deadline: {missing}");
        return;
    }
    let images = Images::new();
    let limit = Limit {
        floor: Duration::from_secs(1),
        bytes_per_second: u64::MAX,
    };
    let program = fake(&images, "hang", "sleep 600");
    let started = Instant::now();
    let error = fail(&Zstd { program, limit }, &images);
    assert!(error.contains("killed, not done after 1 s"), "{error}");
    assert!(started.elapsed() < Duration::from_secs(10));
    none_left_at(images.dir.path());
}

#[test]
fn a_tool_that_writes_a_wrong_file_is_found_out() {
    if let Err(missing) = tool::needs(&["socat"]) {
        eprintln!("SKIP a_tool_that_writes_a_wrong_file_is_found_out: {missing}");
        return;
    }
    let images = Images::new();
    let one = images.path("one.raw");
    let script =
        "if [ $1 = -d ]; then cat >/dev/null; head -c 9999 /dev/zero >\"$7\"; else echo; fi";
    let zstd = Zstd {
        program: fake(&images, "wrong", script),
        limit: Limit::USUAL,
    };
    let mut carrier = zstd.start(Where::Loopback, &images.path("zstd")).unwrap();
    carrier.carry(&one, None).unwrap();
    assert!(!identical(&one, &carrier.delivered(&one)).unwrap());
}

#[test]
fn rivals_have_names_of_their_own_fit_for_files() {
    for (at, rival) in ALL.iter().enumerate() {
        let first = ALL.iter().position(|other| other.name() == rival.name());
        assert_eq!(first, Some(at), "{}", rival.name());
        let fit = |c: char| c.is_ascii_lowercase() || c == '-';
        assert!(rival.name().chars().all(fit), "{}", rival.name());
    }
}
