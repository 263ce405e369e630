//! Hostile users of the same host: they look for a ticket, and connect to an export.

use std::fs::{self, File, Permissions};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::mount::{Mounts, has, text};
use crate::world::{World, own_address};

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().permissions().mode() & 0o777
}

/// An empty file of this mode.
fn file(world: &World, name: &str, mode: u32) -> (PathBuf, File) {
    let path = world.path(name);
    let file = File::create(&path).unwrap();
    file.set_permissions(Permissions::from_mode(mode)).unwrap();
    (path, file)
}

#[test]
fn a_ticket_need_not_be_an_argument() {
    let world = World::new();
    let far = world.serve("far", &[]);
    // The same key may redeem it again.
    for args in [
        &["pair", "-", "--name", "far"][..],
        &["pair", "--name", "far"],
    ] {
        let ran = world.run_with("near", args, &format!("{}\nmore\n", far.ticket));
        assert!(ran.ok().out.contains("paired with far"));
    }
    world
        .run_with("near", &["pair", "-"], "")
        .fails(2, &["no ticket on stdin"]);
    world
        .run_with("near", &["pair"], "drover1x\n")
        .fails(2, &["damaged"]);
    world.run("near", &["images", "far"]).ok();
}

#[test]
fn a_terminal_does_not_show_the_ticket() {
    if !has(
        "a_terminal_does_not_show_the_ticket",
        &["script", "timeout"],
    ) {
        return;
    }
    let world = World::new();
    let far = world.serve("far", &[]);
    let typed = format!("{}\n", far.ticket);
    let seen = at_prompt(&world, "\"$0\" pair --name far", &typed);
    assert!(seen.contains("paired with far"), "{seen}");
    assert!(!seen.contains("drover1"), "{seen}");
    // Ctrl-C leaves the terminal as it was.
    let seen = at_prompt(&world, "\"$0\" pair --name far; stty -a", "drover1x\x03");
    assert!(seen.contains("drover: cancelled"), "{seen}");
    let modes = Vec::from_iter(seen.split_whitespace());
    assert!(modes.contains(&"echo") && modes.contains(&"isig"), "{seen}");
    assert!(seen.contains("eol = <undef>"), "{seen}");
}

/// Runs a shell command, which gets drover as `$0`, at a terminal, types something at its prompt, and returns what the
/// terminal has shown.
fn at_prompt(world: &World, command: &str, typed: &str) -> String {
    let drover = assert_cmd::cargo::cargo_bin!("drover");
    let mut script = Command::new("timeout")
        .args(["120", "script", "-qec"])
        .arg(format!("sh -c '{command}' '{}'", drover.display()))
        .arg("/dev/null")
        .env("DROVER_HOME", world.path("near"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = script.stdin.take().unwrap();
    let mut stdout = script.stdout.take().unwrap();
    let mut seen = Vec::new();
    // Until the prompt, the terminal shows what is typed.
    while !seen.ends_with(b"(not shown): ") {
        let mut byte = [0];
        stdout
            .read_exact(&mut byte)
            .unwrap_or_else(|e| panic!("{e}: {}", String::from_utf8_lossy(&seen)));
        seen.push(byte[0]);
    }
    stdin.write_all(typed.as_bytes()).unwrap();
    stdout.read_to_end(&mut seen).unwrap();
    script.wait().unwrap();
    String::from_utf8(seen).unwrap()
}

#[test]
fn a_ticket_goes_only_where_its_owner_alone_can_read_it() {
    let world = World::new();
    let far = world.serve("far", &[]);
    let path = world.path("lyon.ticket");
    let out = ["ticket", "--out", text(&path)];
    let forced = ["ticket", "--force", "--out", text(&path)];
    assert_eq!(world.run("far", &out).ok().out, "");
    assert_eq!(mode(&path), 0o600);
    let first = fs::read_to_string(&path).unwrap();
    world.run("far", &out).fails(2, &["exists", "--force"]);
    assert_eq!(fs::read_to_string(&path).unwrap(), first);
    // What another user could read or has open is not written to.
    fs::set_permissions(&path, Permissions::from_mode(0o644)).unwrap();
    let mut open = File::open(&path).unwrap();
    world.run("far", &forced).ok();
    assert_eq!(mode(&path), 0o600);
    let mut old = String::new();
    open.read_to_string(&mut old).unwrap();
    assert_eq!(old, first);
    let link = world.path("link");
    symlink(&path, &link).unwrap();
    world
        .run("far", &["ticket", "--force", "--out", text(&link)])
        .fails(2, &["not a regular file"]);
    let ticket = fs::read_to_string(&path).unwrap();
    assert_ne!(ticket, first);
    world
        .run_with("near", &["pair", "-", "--name", "far"], &ticket)
        .ok();

    let ticket_to = |file: File| {
        let mut command = world.drover("far", &["ticket"]);
        command.stdout(file).output().unwrap()
    };
    let (shown, open) = file(&world, "shown", 0o644);
    let ran = ticket_to(open);
    let says = String::from_utf8(ran.stderr).unwrap();
    assert_eq!(ran.status.code(), Some(2), "{says}");
    assert!(says.contains("--out"), "{says}");
    let (own, open) = file(&world, "own", 0o600);
    assert!(ticket_to(open).status.success());
    assert!(fs::read_to_string(&own).unwrap().starts_with("drover1"));

    // Nor does a site print one there.
    let open = File::options().append(true).open(&shown).unwrap();
    let mut site = world
        .drover("other", &["serve", "--listen", "127.0.0.1:0"])
        .stdout(open)
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(site.stderr.take().unwrap()).lines();
    let mut lines = lines.map_while(Result::ok);
    let says = lines.find(|line| line.contains("ticket"));
    site.kill().unwrap();
    site.wait().unwrap();
    assert!(says.is_some_and(|line| line.contains("no ticket is printed")));
    assert_eq!(fs::read(&shown).unwrap(), b"");
    drop(far);
}

#[test]
fn an_export_is_for_its_owner_unless_asked_otherwise() {
    let m = Mounts::new();
    m.raw("web.raw", 91);
    let address = own_address().to_string();
    m.near(&["export", "far:web.raw", "--nbd", &address, "--background"])
        .fails(2, &["every user", "unix:PATH", "--allow-local-users"]);
    assert!(TcpStream::connect(&address).is_err());
    let socket = m.export("web.raw", &[]);
    assert_eq!(mode(&socket), 0o600);
    m.unmount(&socket, &[]).ok();
    let unix = format!("unix:{}", socket.display());
    m.near(&[
        "export",
        "far:web.raw",
        "--nbd",
        &unix,
        "--allow-local-users",
    ])
    .fails(2, &["ADDRESS:PORT"]);
}
