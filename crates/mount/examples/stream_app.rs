//! An application is started from a file system image at another site: what it needs comes when it needs it, and at the second
//! start before.
//!
//! `cargo run -p drover-mount --example stream_app`, as root. The application is Perl with all of its library, in a squashfs.

#[path = "far/mod.rs"]
mod far;

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use drover_frontend::fuse::{self, FileMount};
use drover_frontend::loopdev::{self, LoopDevice};
use far::{Failed, Site, mib};

/// A program that needs some of the library, and says where it has it from.
const PROGRAM: &str = r#"
    use strict; use JSON::PP; use POSIX qw(floor); use List::Util qw(sum);
    my %said = (sum => sum(map { floor($_ / 2) } 1 .. 1000), from => $INC{"JSON/PP.pm"});
    print JSON::PP->new->canonical->encode(\%said);"#;

fn run(command: &mut Command) -> Result<String, Failed> {
    let said = command.output().map_err(|e| format!("{command:?}: {e}"))?;
    match said.status.success() {
        true => Ok(String::from_utf8(said.stdout)?),
        false => Err(format!("{command:?}: {}", String::from_utf8_lossy(&said.stderr)).into()),
    }
}

/// A mounted file system, unmounted at the end.
struct Tree<'a>(&'a Path);

impl Drop for Tree<'_> {
    fn drop(&mut self) {
        if let Err(error) = run(Command::new("umount").arg(self.0)) {
            eprintln!("{error}");
        }
    }
}

/// Why it cannot be shown here.
fn obstacle() -> Option<&'static str> {
    let known = std::fs::read_to_string("/proc/filesystems").unwrap_or_default();
    let lacks = |program: &str| Command::new(program).arg("-version").output().is_err();
    match () {
        () if lacks("mksquashfs") => Some("no mksquashfs (scripts/install-deps test)"),
        () if lacks("perl") => Some("no perl (scripts/install-deps test)"),
        () if !rustix::process::geteuid().is_root() => Some("only root may mount"),
        () if !known.contains("\tsquashfs\n") => {
            Some("the kernel has no squashfs (modprobe squashfs)")
        }
        () => None,
    }
}

fn main() -> Result<(), Failed> {
    if let Some(why) = obstacle() {
        println!("SKIP stream_app: {why}");
        return Ok(());
    }
    let runtime = tokio::runtime::Runtime::new()?;
    let dir = tempfile::tempdir()?;
    let image = dir.path().join("perl.squashfs");
    let mut ask = Command::new("perl");
    let library = run(ask.args([
        "-MConfig",
        "-e",
        r#"print "$Config{privlib}\n$Config{archlib}""#,
    ]))?;
    let library: Vec<PathBuf> = library
        .lines()
        .map(std::fs::canonicalize)
        .collect::<Result<_, _>>()?;
    let mut make = Command::new("mksquashfs");
    make.arg("/usr/bin/perl").args(&library).arg(&image);
    make.args(["-no-strip", "-quiet", "-no-progress"]);
    // As it is: what crosses the link is compressed there.
    run(make.args(["-noI", "-noD", "-noF", "-noX"]))?;
    let whole = image.metadata()?.len();
    println!("an application of {:.1} MiB", mib(whole));

    // Mounts it with what is fetched first, starts it, and returns what has come for it.
    let start = |title: &str, first: &[Range<u64>]| -> Result<(Vec<Range<u64>>, u64), Failed> {
        let dir = dir.path().join(title);
        let tree = dir.join("tree");
        std::fs::create_dir_all(&tree)?;
        let mount = Site::stream(runtime.handle(), &image, &dir)?;
        let bytes = first.iter().map(|range| range.end - range.start).sum();
        if bytes > 0 {
            mount.pull(first, bytes)?;
        }
        let before = mount.here();
        let options = fuse::Options {
            read_only: true,
            ..fuse::Options::default()
        };
        let mut file = FileMount::mount(&dir.join("image"), mount.device.clone(), options)?;
        let options = loopdev::Options {
            read_only: true,
            read_ahead: 64 << 10,
            ..loopdev::Options::default()
        };
        let mut disk = LoopDevice::attach(file.path(), options)?;
        let began = Instant::now();
        let mut attach = Command::new("mount");
        run(attach
            .args(["-t", "squashfs", "-o", "ro"])
            .arg(disk.path())
            .arg(&tree))?;
        let mounted = Tree(&tree);
        let below = |path: &PathBuf| tree.join(path.strip_prefix("/").unwrap_or(path));
        let library = std::env::join_paths(library.iter().map(below))?;
        let mut perl = Command::new(tree.join("usr/bin/perl"));
        let said = run(perl.env("PERL5LIB", library).args(["-e", PROGRAM]))?;
        let seconds = began.elapsed().as_secs_f64();
        assert!(said.contains(r#""sum":250000"#), "{said}");
        assert!(
            said.contains(&*tree.to_string_lossy()),
            "it is from elsewhere: {said}"
        );
        let here = mount.here();
        println!(
            "{title:7} {:.2} MiB here, has started after {seconds:.2} s and {:.2} MiB more: {:.1} % of all",
            mib(before),
            mib(here - before),
            100.0 * here as f64 / whole as f64
        );
        drop(mounted);
        disk.detach()?;
        file.unmount()?;
        let came = mount.came();
        mount.close()?;
        assert!(here < whole / 2, "{here} of {whole} bytes");
        Ok((came, here - before))
    };
    let (order, fetched) = start("first", &[])?;
    let (_, more) = start("second", &order)?;
    // What is read ahead for whoever goes on reading; nothing waits for it.
    assert!(
        more < fetched / 4 * 3,
        "{more} of {fetched} bytes once more"
    );
    Ok(())
}
