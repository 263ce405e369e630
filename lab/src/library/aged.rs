//! Ages an image: packages are upgraded and added, files are rewritten, edited, moved and deleted, logs grow, a
//! database runs.
//!
//! A copy of an image is mounted and modified in place: unchanged data stays where it is, and the file system allocates
//! new data where it finds space. An image of the host's files (the small set) is aged as a directory tree instead,
//! without root. All choices are derived from a seed.

use std::fmt::Write as _;
use std::fs::{self, File, FileTimes};
use std::io::{BufWriter, Write as _};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result};
use fastrand::Rng;

use super::cache::{Built, Cache, remove_tree};
use super::table::{Recipe, Spec};
use super::{debian, filesystem};
use crate::shell;

/// Seed of all random choices.
const SEED: u64 = 0x0061_6765;
const LOG_BYTES: usize = 48 << 20;
/// Time between the installation and the aged state.
const AGE: Duration = Duration::from_secs(120 * 86_400);
/// Number of rounds in which the database and the logs grow alternately.
const ROUNDS: usize = 2;
/// Packages that an administrator installs in the first week.
const ADDED: &str = "vim tmux htop curl rsync";
/// Rows inserted per database round; half as many are then updated and a quarter deleted, among the rows of all rounds.
const ROWS: usize = 12_000;

/// Ages a copy of the raw image `base`, an image of the machine of `root`.
///
/// # Errors
/// Without root (except for the host's files), when packages cannot be fetched, or when the disk is full.
pub fn make(cache: &Cache, spec: &Spec, root: &Spec, base: &Path, out: &Path) -> Result<Built> {
    let time = filesystem::time_of(&root.name) + AGE;
    let mut rng = Rng::with_seed(SEED);
    let Recipe::Debian { suite, .. } = &root.recipe else {
        let tree = cache.work.join(&spec.name);
        fs::create_dir_all(&tree)?;
        let dump = format!("rdump / \"{}\"", tree.display());
        shell::run(Command::new("debugfs").args(["-R", &dump]).arg(base))?;
        let notes = vec![churn(&tree, time, 0)?];
        grow_logs(&tree.join("var/log"), LOG_BYTES / 8, time, &mut rng)?;
        let written_by = filesystem::mke2fs(&tree, out, &spec.name)?;
        remove_tree(&tree)?;
        return Ok(Built {
            written_by,
            notes,
            ..Built::default()
        });
    };
    shell::run(
        Command::new("cp")
            .args(["--sparse=always", "--reflink=auto"])
            .args([base, out]),
    )?;
    let mounted = filesystem::Mounted::new(out, cache.work.join("mnt"), spec.fs, false)?;
    let (at, debs) = (mounted.at.as_path(), cache.packages(suite)?);
    let mut notes = vec![upgrade(at, &debs, suite, ADDED, "")?, churn(at, time, 0)?];
    for round in 0..ROUNDS {
        grow_logs(&at.join("var/log"), LOG_BYTES / ROUNDS, time, &mut rng)?;
        notes.extend(run_database(at, &debs, round, false)?);
    }
    notes.push(format!("logs grew by {} MiB", LOG_BYTES >> 20));
    let packages = debian::installed(at)?;
    mounted.close()?;
    Ok(Built {
        packages,
        written_by: "loop mount of a copy".to_owned(),
        notes,
    })
}

/// Enables the suite's updates, upgrades all packages with the machine's own apt, and installs some more; then runs
/// another script. Prevents services from starting, since nothing would stop them.
pub(super) fn upgrade(
    root: &Path,
    debs: &Path,
    suite: &str,
    added: &str,
    then: &str,
) -> Result<String> {
    let sources = debian::sources_for(suite, true)?;
    let stanzas = root.join("etc/apt/sources.list.d");
    for entry in fs::read_dir(&stanzas).into_iter().flatten().flatten() {
        fs::remove_file(entry.path())?;
    }
    let place = if sources.contains("URIs:") {
        stanzas.join("debian.sources")
    } else {
        root.join("etc/apt/sources.list")
    };
    fs::write(place, sources)?;
    let policy = root.join("usr/sbin/policy-rc.d");
    fs::write(&policy, "#!/bin/sh\nexit 101\n")?;
    fs::set_permissions(&policy, fs::Permissions::from_mode(0o755))?;
    let before = debian::installed(root)?;
    let options = "-q -y -o Dpkg::Options::=--force-confold -o Dpkg::Options::=--force-unsafe-io --no-install-recommends";
    let script = format!(
        "apt-get -q update; apt-get {options} --with-new-pkgs upgrade; apt-get {options} install {added}\n{then}"
    );
    debian::inside(root, debs, &script).context("upgrading and adding packages")?;
    fs::remove_file(policy)?;
    let after = debian::installed(root)?;
    let changed = after.iter().filter(|line| !before.contains(line)).count();
    Ok(format!(
        "{changed} packages upgraded or added, {added} among them"
    ))
}

/// Modifies some of the files below /usr/share, /usr/lib and /etc, selected by a hash of their names, on each `day`
/// others; returns a summary.
///
/// # Errors
/// When the disk is full.
pub fn churn(root: &Path, time: SystemTime, day: usize) -> Result<String> {
    let mut files = Vec::new();
    for dir in ["usr/share", "usr/lib", "etc", "home", "srv"] {
        regular_files(&root.join(dir), &mut files);
    }
    files.sort();
    let (mut rewritten, mut edited, mut moved, mut deleted) = (0, 0, 0, 0);
    for path in files {
        let relative = path.strip_prefix(root).unwrap_or(&path);
        let key = blake3::hash(relative.as_os_str().as_encoded_bytes()).as_bytes()[day % 32];
        let spare = relative.starts_with("usr/share/doc") || relative.starts_with("usr/share/man");
        let is_text = relative
            .extension()
            .is_some_and(|e| e == "conf" || e == "cfg" || e == "list")
            || relative.starts_with("etc/default")
            || relative.starts_with("etc/cron.d");
        match key {
            0..4 => {
                rewrite(&path, time)?;
                rewritten += 1;
            }
            // Append comments where they are harmless.
            4..40 if relative.starts_with("etc") && is_text => {
                let mut file = File::options().append(true).open(&path)?;
                writeln!(file, "# edited by an administrator")?;
                stamp(&file, time)?;
                edited += 1;
            }
            40..48 if spare => {
                fs::rename(&path, path.with_extension("old"))?;
                moved += 1;
            }
            48..60 if spare => {
                fs::remove_file(&path)?;
                deleted += 1;
            }
            _ => {}
        }
    }
    Ok(format!(
        "{rewritten} files rewritten, {edited} edited, {moved} moved, {deleted} deleted"
    ))
}

/// Rewrites a file like an editor or an upgrade: a new file with the same content, elsewhere on the disk.
fn rewrite(path: &Path, time: SystemTime) -> Result<()> {
    let meta = path.metadata()?;
    let aside = path.with_extension("drover-lab");
    fs::copy(path, &aside).with_context(|| format!("cannot rewrite {}", path.display()))?;
    // Set the mode after the owner: chown clears some mode bits.
    std::os::unix::fs::chown(&aside, Some(meta.uid()), Some(meta.gid()))?;
    fs::set_permissions(&aside, meta.permissions())?;
    stamp(&File::open(&aside)?, time)?;
    Ok(fs::rename(&aside, path)?)
}

fn stamp(file: &File, time: SystemTime) -> std::io::Result<()> {
    file.set_times(FileTimes::new().set_accessed(time).set_modified(time))
}

fn regular_files(dir: &Path, out: &mut Vec<PathBuf>) {
    for path in fs::read_dir(dir)
        .into_iter()
        .flatten()
        .flatten()
        .map(|e| e.path())
    {
        match path.symlink_metadata() {
            Ok(meta) if meta.is_dir() => regular_files(&path, out),
            Ok(meta) if meta.is_file() => out.push(path),
            _ => {}
        }
    }
}

/// Appends `bytes` in total to the logs.
pub(super) fn grow_logs(dir: &Path, bytes: usize, time: SystemTime, rng: &mut Rng) -> Result<()> {
    fs::create_dir_all(dir)?;
    for (name, share) in [("syslog", 6), ("auth.log", 3), ("kern.log", 1)] {
        let mut file = BufWriter::new(
            File::options()
                .create(true)
                .append(true)
                .open(dir.join(name))?,
        );
        let (mut clock, mut written) = (filesystem::EPOCH, 0);
        while written < bytes / 10 * share {
            clock += rng.u64(0..30);
            let (pid, host, port, key) = (
                rng.u32(300..40_000),
                rng.u8(..),
                rng.u16(1024..),
                rng.u128(..),
            );
            let what = match rng.u8(0..4) {
                0 => format!(
                    "sshd[{pid}]: Accepted publickey for admin from 192.0.2.{host} port {port} ssh2: ED25519 SHA256:{key:032x}"
                ),
                1 => {
                    format!("CRON[{pid}]: (root) CMD (cd / && run-parts --report /etc/cron.hourly)")
                }
                2 => format!("systemd[1]: session-{pid}.scope: Deactivated successfully."),
                _ => format!(
                    "sshd[{pid}]: Failed password for invalid user u{port:x} from 198.51.100.{host} port {port}"
                ),
            };
            let line = format!("{clock} vm {what}\n");
            file.write_all(line.as_bytes())
                .context("the log cannot grow")?;
            written += line.len();
        }
        stamp(
            &file
                .into_inner()
                .map_err(std::io::IntoInnerError::into_error)?,
            time,
        )?;
    }
    Ok(())
}

const MARIADB: &str = r#"
    install -d -o mysql -g mysql /run/mysqld
    at=--socket=/run/mysqld/lab.sock
    mariadbd --user=mysql --skip-networking $at --pid-file=/run/mysqld/lab.pid >/run/server.log 2>&1 &
    server=$!
    for try in $(seq 150); do
        if mariadb-admin $at ping >/dev/null 2>&1; then break; fi
        kill -0 $server || { tail -n 3 /run/server.log >&2; exit 1; }
        sleep 0.2
    done
    mariadb $at -e 'CREATE DATABASE IF NOT EXISTS shop'
    mariadb $at shop </var/cache/apt/archives/load.sql
    if [ -n "${dump:-}" ]; then mariadb-dump $at --all-databases >/var/backups/databases.sql; fi
    mariadb-admin $at shutdown
    wait $server
"#;

const POSTGRES: &str = r#"
    version=$(ls /etc/postgresql | head -n 1)
    install -d -o postgres -g postgres -m 2775 /run/postgresql
    pg_ctlcluster --skip-systemctl-redirect "$version" main start >&2
    runuser -u postgres -- psql -q -v ON_ERROR_STOP=1 postgres </var/cache/apt/archives/load.sql
    if [ -n "${dump:-}" ]; then runuser -u postgres -- pg_dumpall >/var/backups/databases.sql; fi
    pg_ctlcluster --skip-systemctl-redirect "$version" main stop -m fast >&2
"#;

/// Starts the machine's own database in it, loads it with seeded SQL, dumps it if wanted, and stops it cleanly; returns
/// a summary, or `None` without a database.
pub(super) fn run_database(
    root: &Path,
    debs: &Path,
    round: usize,
    dumps: bool,
) -> Result<Option<String>> {
    let (server, script) = match (
        root.join("usr/sbin/mariadbd").exists(),
        root.join("etc/postgresql").exists(),
    ) {
        (true, _) => ("mariadb", MARIADB),
        (_, true) => ("postgresql", POSTGRES),
        _ => return Ok(None),
    };
    let statements = debs.join("load.sql");
    fs::write(&statements, sql(round)?)?;
    let dump = if dumps { "dump=yes\n" } else { "" };
    let done = debian::inside(root, debs, &format!("{dump}{script}"));
    fs::remove_file(&statements)?;
    done.with_context(|| format!("{server} did not run"))?;
    Ok(Some(format!(
        "{server} ran: {ROWS} rows inserted, {} updates, {} deletes",
        ROWS / 2,
        ROWS / 4
    )))
}

/// The SQL of a round, the same for every server and every run.
pub fn sql(round: usize) -> Result<String> {
    const WORDS: [&str; 10] = [
        "ship",
        "before",
        "noon",
        "fragile",
        "gift",
        "paid",
        "return",
        "warehouse",
        "north",
        "courier",
    ];
    let mut rng = Rng::with_seed(SEED + round as u64);
    let note = |rng: &mut Rng| {
        let words: Vec<&str> = (0..rng.usize(8..40))
            .map(|_| WORDS[rng.usize(..WORDS.len())])
            .collect();
        format!("{:012x} {}", rng.u64(..) >> 16, words.join(" "))
    };
    let mut out = "CREATE TABLE IF NOT EXISTS orders (id INT PRIMARY KEY, customer VARCHAR(40), amount INT, note VARCHAR(500));\n".to_owned();
    let all = (round + 1) * ROWS;
    for id in all - ROWS..all {
        let (customer, amount, text) = (rng.u32(0..3000), rng.u32(100..100_000), note(&mut rng));
        let begin = if id % 100 == 0 {
            "INSERT INTO orders VALUES\n"
        } else {
            ""
        };
        let end = if id % 100 == 99 { ";" } else { "," };
        writeln!(
            out,
            "{begin}({id}, 'customer {customer}', {amount}, '{text}'){end}"
        )?;
    }
    writeln!(out, "BEGIN;")?;
    for change in 0..ROWS / 2 {
        let (id, amount, text) = (rng.usize(..all), rng.u32(100..100_000), note(&mut rng));
        writeln!(
            out,
            "UPDATE orders SET amount = {amount}, note = '{text}' WHERE id = {id};"
        )?;
        if change % 2 == 0 {
            writeln!(out, "DELETE FROM orders WHERE id = {};", rng.usize(..all))?;
        }
    }
    writeln!(out, "COMMIT;")?;
    Ok(out)
}
