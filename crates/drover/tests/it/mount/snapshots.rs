//! Snapshots of a vault as disks: `mount`, `export`, `launch` of `NAME@TIME`.

use std::fs;
use std::path::Path;

use super::client::Client;
use super::local::Alone;
use super::{can_mount, has, tool};

/// A home with a vault and a snapshot of `web.qcow2`, a qcow2 file if `qemu-img` is there; the disk's bytes.
fn with_snapshot() -> (Alone, Vec<u8>) {
    let a = Alone::new();
    let bytes = a.raw("disk.raw", 3 << 20);
    a.run(&["vault", "init", "vault"]).ok();
    let (raw, image) = (a.path("disk.raw"), a.path("web.qcow2"));
    let (from, to) = (raw.to_str().unwrap(), image.to_str().unwrap());
    match has("snapshots of a qcow2 image", &["qemu-img"]) {
        true => drop(tool(
            "qemu-img",
            &["convert", "-f", "raw", "-O", "qcow2", "-c", from, to],
        )),
        false => drop(fs::copy(&raw, &image).unwrap()),
    }
    a.run(&["snapshot", "web.qcow2"]).ok();
    (a, bytes)
}

fn name_of(a: &Alone, which: usize) -> String {
    let listed = a.run(&["snapshots", "web", "--json"]).ok().json();
    listed[which]["snapshot"].as_str().unwrap().to_owned()
}

#[test]
fn a_snapshot_is_exported_and_written_over_and_what_was_flushed_survives_a_kill() {
    let (a, mut bytes) = with_snapshot();
    let name = name_of(&a, 0);
    a.export("web@latest", "s", &[]).ok();
    let mount = a.only();
    let disk = &mount["disks"][0];
    assert_eq!(
        (&disk["image"], &disk["mode"]),
        (&name.as_str().into(), &"snapshot".into())
    );
    let mut client = Client::connect(&a.path("s"), &name);
    assert_eq!(client.size, 3 << 20);
    assert!(client.read(0, 3 << 20).unwrap() == bytes);
    client.write(70_000, &[9; 5000]).unwrap();
    client.zero(1 << 20, 65_536).unwrap();
    client.flush().unwrap();
    // Not flushed: each sector may be old or new.
    client.write(2 << 20, &[8; 4096]).unwrap();
    bytes[70_000..75_000].fill(9);
    bytes[1 << 20..][..65_536].fill(0);

    // Neither written twice nor deleted meanwhile; a policy leaves it out, and says so.
    a.export(&name, "t", &[])
        .fails(3, &["is mounted for writing already"]);
    let by = mount["name"].as_str().unwrap();
    a.run(&["vault", "forget", &name, "--yes"])
        .fails(3, &["is in use", by]);
    let kept = a.run(&["vault", "forget", "web", "--yes"]).ok();
    assert!(kept.err.contains("is kept"), "{}", kept.err);
    assert_eq!(a.run(&["snapshots", "--json"]).ok().json().len(), 1);
    drop(client);
    a.kill_daemon();
    // The mount may come again, so it still holds the snapshot.
    a.run(&["vault", "forget", &name, "--yes"])
        .fails(3, &["is in use", by]);

    a.export(&name, "s", &[]).ok();
    let mut client = Client::connect(&a.path("s"), "");
    let read = client.read(0, 3 << 20).unwrap();
    assert!(
        read[..2 << 20] == bytes[..2 << 20]
            && read[(2 << 20) + 4096..] == bytes[(2 << 20) + 4096..]
    );
    // A read-only mount shows the snapshot as it was made.
    a.export(&name, "t", &["--read-only"]).ok();
    let mut other = Client::connect(&a.path("t"), "");
    assert!(other.read(0, 3 << 20).unwrap() == fs::read(a.path("disk.raw")).unwrap());
    assert_eq!(other.write(0, &[1]).unwrap_err().raw_os_error(), Some(1));
    drop((client, other));
    a.run(&["unmount", "s"]).ok();
    a.run(&["unmount", "t"]).ok();

    let changes = a.run(&["changes", "--json"]).ok().json();
    assert_eq!(changes[0]["image"], name.as_str());
    a.run(&["changes", "drop", &name, "--yes"]).ok();
    a.export(&name, "s", &[]).ok();
    let mut client = Client::connect(&a.path("s"), "");
    assert!(client.read(0, 3 << 20).unwrap() == fs::read(a.path("disk.raw")).unwrap());
    drop(client);
    // The vault was not written to, and nothing holds the snapshot of a mount that was killed and then unmounted.
    a.kill_daemon();
    a.run(&["unmount", "s"]).ok();
    a.run(&["vault", "check", "--full"]).ok();
    a.run(&["vault", "forget", &name, "--yes"]).ok();
    a.run(&["vault", "compact", "--grace", "0s"]).ok();
    a.export(&name, "s", &[])
        .fails(3, &["there is no snapshot"]);
}

#[test]
fn names_of_snapshots_on_the_command_line() {
    let (a, bytes) = with_snapshot();
    a.run(&["snapshot", "web.qcow2"]).ok();
    let (first, second) = (name_of(&a, 0), name_of(&a, 1));
    let day = first.split_once('T').unwrap().0;
    a.export(day, "s", &["--read-only"])
        .fails(2, &["is ambiguous", &first, &second]);
    a.export("db@latest", "s", &[])
        .fails(3, &["there is no snapshot db@latest"]);
    a.export("db.raw", "s", &["--vault", "vault"])
        .fails(2, &["--vault is for snapshots"]);
    a.export(&first, "s", &["--size", "1M"])
        .fails(2, &["--size"]);
    a.export(&first, "s", &["--direct"]).fails(2, &["--direct"]);
    a.export(&first, "s", &["--vault", "nowhere"])
        .fails(3, &["there is no vault"]);
    // An image of that very name goes first, unless a vault is named. A name with colons is no image's.
    fs::rename(a.path("disk.raw"), a.path("web@latest")).unwrap();
    a.run(&["index", a.path("web@latest").to_str().unwrap()])
        .ok();
    a.export("web@latest", "s", &["--read-only"]).ok();
    assert_eq!(a.only()["disks"][0]["mode"], "own");
    a.run(&["unmount", "s"]).ok();
    a.export("web@latest", "s", &["--read-only", "--vault", "vault"])
        .ok();
    assert_eq!(a.only()["disks"][0]["image"], second.as_str());
    a.run(&["unmount", "s"]).ok();

    // A machine is launched from one.
    let listen = format!("unix:{}", a.path("l").display());
    a.run(&["launch", &first, "--nbd", &listen, "--background"])
        .ok();
    let mut client = Client::connect(&a.path("l"), "");
    assert!(client.read(4096, 1 << 20).unwrap() == bytes[4096..][..1 << 20]);
    client.write(0, &[5; 512]).unwrap();
    drop(client);
    a.run(&["unmount", "l"]).ok();
    if can_mount("a snapshot as a file") {
        let path = a.path("mnt");
        a.run(&["mount", &first, path.to_str().unwrap()]).ok();
        check_file(&path, &bytes);
        a.run(&["unmount", path.to_str().unwrap()]).ok();
    }
}

/// The disk as a file, with what was written at its beginning.
fn check_file(path: &Path, bytes: &[u8]) {
    let read = fs::read(path).unwrap();
    assert!(read[..512] == [5; 512] && read[512..] == bytes[512..]);
}
