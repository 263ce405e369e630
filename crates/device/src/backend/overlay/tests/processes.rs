//! Real processes, killed; real file systems, full.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use super::*;

const CHILD: &str = "DROVER_TEST_OVERLAY";
const SIZE: u64 = 64 * BLOCK;

fn open_in(path: &Path) -> Result<Overlay, OverlayError> {
    let directory = Arc::new(HostDirectory::open(path).unwrap());
    open_over(directory, &image(SIZE), Options::default())
}

/// Runs the test of this name in a process of its own, and passes it the overlay's directory.
struct Process(Child);

impl Process {
    fn start(test: &str, path: &Path) -> Self {
        let child = Command::new(std::env::current_exe().unwrap())
            .args([
                &format!("backend::overlay::tests::processes::{test}"),
                "--exact",
                "--nocapture",
            ])
            .env(CHILD, path)
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        Self(child)
    }

    /// Lines that begin with `said `, without that, until the process is gone.
    fn lines(&mut self) -> impl Iterator<Item = String> + use<> {
        let out = BufReader::new(self.0.stdout.take().unwrap());
        out.lines()
            .map_while(Result::ok)
            .filter_map(|line| Some(line.split_once("said ")?.1.to_owned()))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn am_child() -> Option<PathBuf> {
    std::env::var_os(CHILD).map(PathBuf::from)
}

fn say(what: impl std::fmt::Display) {
    println!("said {what}");
    std::io::stdout().flush().unwrap();
}

/// What round `n` makes of the device: two blocks that say `n`, and one zeroed.
fn round(n: u64) -> [Change; 3] {
    let at = |k: u64| (n * 7 + k * 13) % 64 * BLOCK;
    [
        write(at(0), n as u8, BLOCK),
        Change::Zero(at(1), BLOCK),
        write(at(2), n as u8, BLOCK),
    ]
}

fn apply(model: &mut [u8], changes: &[Change]) {
    for change in changes {
        let range = change.offset() as usize..(change.offset() + change.covers()) as usize;
        match change {
            Change::Write(_, bytes) => model[range].copy_from_slice(bytes),
            Change::Zero(..) => model[range].fill(0),
        }
    }
}

/// Rounds without end, by epochs and by plain writes in turn, each said when it is durable.
fn work(path: &Path) -> ! {
    let overlay = open_in(path).unwrap();
    for n in 0.. {
        let changes = round(n);
        if n % 2 == 0 {
            let epoch = Epoch(overlay.committed().0 + 1);
            for change in changes {
                overlay.stage(epoch, &[change]).unwrap();
            }
            overlay.commit(epoch).unwrap();
        } else {
            for change in changes {
                match change {
                    Change::Write(offset, bytes) => overlay.write(offset, &bytes).unwrap(),
                    Change::Zero(offset, length) => {
                        overlay
                            .write_zeroes(offset, length, Zeroes::default())
                            .unwrap();
                    }
                }
            }
            overlay.flush().unwrap();
        }
        say(n);
    }
    unreachable!("rounds without end")
}

#[test]
fn a_killed_process_loses_nothing_that_was_flushed() {
    if let Some(path) = am_child() {
        work(&path);
    }
    let base = image(SIZE);
    for run in 0..6usize {
        let dir = tempfile::tempdir().unwrap();
        let mut process = Process::start(
            "a_killed_process_loses_nothing_that_was_flushed",
            dir.path(),
        );
        let mut last = None;
        for line in process.lines() {
            last = Some(line.parse::<u64>().unwrap());
            if last >= Some(5 + run as u64 * 9) {
                process.0.kill().unwrap();
            }
        }
        process.0.wait().unwrap();
        let last = last.expect("a process that worked");
        let overlay = open_in(dir.path()).unwrap();
        let found = everything(&overlay);
        let mut model = base.clone();
        (0..=last).for_each(|n| apply(&mut model, &round(n)));
        // The round under way: a whole epoch or nothing; of plain writes each may be there.
        let next = round(last + 1);
        let mut possible = vec![model.clone()];
        for which in 1..8u8 {
            let part: Vec<_> = (0..3).filter(|k| which >> k & 1 == 1).collect();
            let plain = (last + 1) % 2 == 1;
            if plain || part.len() == 3 {
                let mut with = model.clone();
                part.into_iter()
                    .for_each(|k| apply(&mut with, &next[k..=k]));
                possible.push(with);
            }
        }
        assert!(
            possible.contains(&found),
            "run {run}: killed after round {last}"
        );
        assert!(overlay.committed().0 > last, "an epoch a round");
        // Killed in the middle of an epoch, it leaves one that is being staged, and that goes before plain writes.
        overlay.abandon().unwrap();
        overlay.write(0, &[1]).unwrap();
        overlay.flush().unwrap();
    }
}

#[test]
fn a_second_process_is_refused_as_in_use() {
    if let Some(path) = am_child() {
        let overlay = open_in(&path).unwrap();
        say("open");
        // It is killed before.
        std::thread::sleep(std::time::Duration::from_secs(20));
        drop(overlay);
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let mut process = Process::start("a_second_process_is_refused_as_in_use", dir.path());
    assert_eq!(process.lines().next().as_deref(), Some("open"));
    let error = open_in(dir.path()).err().unwrap();
    assert!(matches!(error, OverlayError::Busy { .. }), "{error}");
    assert!(
        error.to_string().contains(dir.path().to_str().unwrap()),
        "{error}"
    );
    drop(process);
    open_in(dir.path()).unwrap();
}

/// A small file system in memory, gone when this is dropped.
struct Small(tempfile::TempDir);

impl Small {
    fn mount(size: &str) -> Option<Self> {
        let dir = tempfile::tempdir().unwrap();
        let done = Command::new("mount")
            .args(["-t", "tmpfs", "-o", &format!("size={size}"), "drover-test"])
            .arg(dir.path())
            .output();
        match done {
            Ok(output) if output.status.success() => Some(Self(dir)),
            Ok(output) => {
                let said = String::from_utf8_lossy(&output.stderr).into_owned();
                eprintln!("SKIP a full disk: cannot mount a tmpfs: {}", said.trim());
                None
            }
            Err(error) => {
                eprintln!("SKIP a full disk: cannot run mount: {error}");
                None
            }
        }
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.0.path()).status();
    }
}

#[test]
fn a_full_disk_loses_nothing() {
    let Some(small) = Small::mount("256k") else {
        return;
    };
    let mut model = image(SIZE);
    let overlay = open_in(small.0.path()).unwrap();
    let full = |result: Result<(), DeviceError>| {
        let error = result.expect_err("there is room");
        assert!(matches!(error, DeviceError::NoSpace(_)), "{error}");
    };
    overlay.stage(Epoch(1), &[write(0, 1, 8 * BLOCK)]).unwrap();
    overlay.commit(Epoch(1)).unwrap();
    model[..8 * BLOCK_SIZE].fill(1);
    // Larger than the redo may become; room for the redo and not for the copy.
    full(
        overlay
            .stage(Epoch(2), &[write(0, 2, 60 * BLOCK)])
            .map_err(DeviceError::from),
    );
    overlay.abandon().unwrap();
    overlay
        .stage(Epoch(2), &[write(8 * BLOCK, 2, 30 * BLOCK)])
        .unwrap();
    full(overlay.commit(Epoch(2)).map_err(DeviceError::from));
    overlay.abandon().unwrap();
    assert_eq!(overlay.committed(), Epoch(1));
    assert!(everything(&overlay) == model);
    // Plain writes until it is full.
    let mut block = 8;
    let error = loop {
        match overlay.write(block * BLOCK, &[3; BLOCK_SIZE]) {
            Ok(()) => model[(block * BLOCK) as usize..][..BLOCK_SIZE].fill(3),
            Err(error) => break error,
        }
        block += 1;
    };
    full(Err(error));
    assert!(everything(&overlay) == model);
    // Giving room back helps.
    overlay.trim(0, 8 * BLOCK).unwrap();
    model[..8 * BLOCK_SIZE].fill(0);
    overlay.write(40 * BLOCK, &[4; BLOCK_SIZE]).unwrap();
    model[40 * BLOCK_SIZE..41 * BLOCK_SIZE].fill(4);
    overlay.flush().unwrap();
    drop(overlay);
    assert!(everything(&open_in(small.0.path()).unwrap()) == model);
}
