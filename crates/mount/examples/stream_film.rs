//! A film whose index stands at its end is played from its first second, while nearly nothing of it is here.
//!
//! `cargo run -p drover-mount --example stream_film`. An MP4 has a box `moov`, without which no frame can be found; most programs
//! write it last. A download would have to end before the film begins. The player knows nothing of it: it opens a file.

#[path = "far/mod.rs"]
mod far;

use std::ops::Range;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use drover_core::BlockDevice;
use drover_frontend::fuse::{self, FileMount};
use far::{Failed, Site, mib};

/// Ten seconds of moving pictures and noise, and then twelve times the same.
const SCENE: &str = "testsrc2=size=640x360:rate=25:duration=10,noise=alls=30:allf=t";

fn run(program: &str, arguments: &[&str]) -> Result<String, Failed> {
    let said = Command::new(program)
        .args(["-v", "error"])
        .args(arguments)
        .output()?;
    match said.status.success() && said.stderr.is_empty() {
        true => Ok(String::from_utf8(said.stdout)?),
        false => Err(String::from_utf8_lossy(&said.stderr).into()),
    }
}

fn make(dir: &Path, film: &Path) -> Result<(), Failed> {
    let scene = dir.join("scene.mp4");
    let (scene, film) = (
        scene.to_str().ok_or("a path")?,
        film.to_str().ok_or("a path")?,
    );
    let codec = ["-c:v", "mpeg4", "-b:v", "5M", "-g", "25"];
    run(
        "ffmpeg",
        &[&["-f", "lavfi", "-i", SCENE], &codec[..], &[scene]].concat(),
    )?;
    let again = ["-stream_loop", "11", "-i", scene, "-c", "copy", film];
    run("ffmpeg", &again).map(drop)
}

/// Where the index of an MP4 is: the boxes tell their sizes, so a few small reads find it wherever it is.
fn index_of(film: &dyn BlockDevice) -> Result<Range<u64>, Failed> {
    let mut at = 0;
    while at + 16 <= film.size() {
        let mut head = [0; 16];
        film.read(at, &mut head)?;
        let (small, rest) = head.split_at(4);
        let (kind, large) = rest.split_at(4);
        let size = match u32::from_be_bytes(small.try_into()?) {
            0 => film.size() - at,
            1 => u64::from_be_bytes(large.try_into()?),
            size => size.into(),
        };
        if kind == b"moov" {
            return Ok(at..at.saturating_add(size));
        }
        at = at.saturating_add(size.max(8));
    }
    Err("it has no index".into())
}

/// A second of the film from there, as the digests of its decoded frames.
fn play(film: &Path, from: &str) -> Result<String, Failed> {
    let film = film.to_str().ok_or("a path")?;
    let frames = ["-t", "1", "-map", "0:v", "-f", "framemd5", "-"];
    run(
        "ffmpeg",
        &[&["-ss", from, "-i", film], &frames[..]].concat(),
    )
}

fn main() -> Result<(), Failed> {
    for program in ["ffmpeg", "ffprobe"] {
        if Command::new(program).arg("-version").output().is_err() {
            println!("SKIP stream_film: no {program} (scripts/install-deps examples)");
            return Ok(());
        }
    }
    let runtime = tokio::runtime::Runtime::new()?;
    let dir = tempfile::tempdir()?;
    let file = dir.path().join("film.mp4");
    make(dir.path(), &file)?;
    let whole = file.metadata()?.len();
    let mount = Site::stream(runtime.handle(), &file, dir.path())?;

    let began = Instant::now();
    let index = index_of(mount.device.as_ref())?;
    println!(
        "a film of {:.1} MiB, its index {:.0} KiB at {:.1} MiB",
        mib(whole),
        1024.0 * mib(index.end - index.start),
        mib(index.start)
    );
    assert!(index.start > whole / 2, "its index stands at its end");
    mount.pull(std::slice::from_ref(&index), index.end - index.start)?;
    let options = fuse::Options {
        read_only: true,
        ..fuse::Options::default()
    };
    let mut shown = FileMount::mount(
        &dir.path().join("played.mp4"),
        mount.device.clone(),
        options,
    )?;
    let path = shown.path().to_owned();
    let told = |title: &str| {
        let here = mount.here();
        let share = 100.0 * here as f64 / whole as f64;
        let seconds = began.elapsed().as_secs_f64();
        println!(
            "{title:20} {:.2} MiB fetched ({share:.1} %), after {seconds:.2} s",
            mib(here)
        );
        here
    };
    told("index");
    let name = path.to_str().ok_or("a path")?;
    let duration = ["-show_entries", "format=duration", "-of", "csv=p=0", name];
    let duration: f64 = run("ffprobe", &duration)?.trim().parse()?;
    assert!((119.0..122.0).contains(&duration), "{duration}");
    told("its length is known");
    let first = play(&path, "0")?;
    let played = told("first second played");
    assert!(played < whole / 5, "{played} of {whole} bytes");
    let middle = play(&path, "60")?;
    let here = told("a second at 1:00");
    assert!(here < whole / 3, "{here} of {whole} bytes");
    let frames = first.lines().filter(|line| !line.starts_with('#')).count();
    assert_eq!(frames, 25);
    assert!(
        first == play(&file, "0")? && middle == play(&file, "60")?,
        "other pictures"
    );
    shown.unmount()?;
    mount.close()?;
    Ok(())
}
