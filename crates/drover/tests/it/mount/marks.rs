//! Marks in the files of images: not while an image is in use, not over changes, and removed again.

use std::fs;
use std::path::PathBuf;

use drover_storage::HostDirectory;
use drover_store::generations;
use serde_json::Value;

use super::{Mounts, has, text, tool};
use crate::world::Ran;

const TOOLS: [&str; 2] = ["qemu-img", "qemu-io"];

impl Mounts {
    fn far(&self, args: &[&str]) -> Ran {
        self.world.run("far", args)
    }

    /// What the far site knows of the generations of one of its images.
    fn known(&self, name: &str) -> Value {
        let images = self.far(&["images", "--json"]).ok().json();
        let image = images.iter().find(|image| image["name"] == name);
        image.unwrap()["generations"].clone()
    }

    /// Exports an image of the far site there, and writes to it.
    fn write_far(&self, image: &str) -> PathBuf {
        let path = self.world.path("own.sock");
        let listen = format!("unix:{}", path.display());
        let export = ["export", image, "--nbd", &listen, "--background"];
        self.far(&export).ok();
        let uri = format!("nbd+unix:///{image}?socket={}", path.display());
        let write = ["-f", "raw", "-c", "write -P 7 1M 64k", "-c", "flush", &uri];
        tool("qemu-io", &write);
        path
    }
}

#[test]
fn a_file_is_not_marked_while_an_image_of_it_is_mounted_or_changed() {
    let test = "a_file_is_not_marked_while_an_image_of_it_is_mounted_or_changed";
    if !has(test, &TOOLS) {
        return;
    }
    let m = Mounts::new();
    m.qcow2("web.qcow2", 71);
    let (path, link) = (m.world.path("web.qcow2"), m.world.path("link.qcow2"));
    fs::hard_link(&path, &link).unwrap();
    m.far(&["domains", "add", "acme"]).ok();
    m.far(&["index", text(&path), "--domain", "acme"]).ok();
    // A file that reads from it is no other.
    let over = m.world.path("over.qcow2");
    let create = ["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b"];
    tool(
        "qemu-img",
        &[&create[..], &[text(&path), text(&over)]].concat(),
    );
    m.far(&["index", "--with-parts", text(&over)]).ok();
    let before = fs::read(&path).unwrap();
    let refused = |why: &str| {
        for options in [
            &["--mark", text(&link)][..],
            &["--unmark", text(&link)],
            &["--mark", text(&path), "--domain", "acme"],
        ] {
            let refused = m.far(&[&["index"], options].concat());
            refused.fails(3, &["cannot change", "of image", why]);
        }
    };
    let socket = m.write_far("web.qcow2");
    refused("is mounted");
    m.far(&["unmount", text(&socket)]).ok();
    refused("have made changes");
    assert_eq!(m.far_bytes("web.qcow2")[1 << 20], 7);
    m.far(&["changes", "drop", "web.qcow2", "-y"]).ok();
    let socket = m.write_far("over.qcow2");
    m.far(&["unmount", text(&socket)]).ok();
    refused("over.qcow2");
    m.far(&["changes", "drop", "over.qcow2", "-y"]).ok();
    assert!(fs::read(&path).unwrap() == before, "it was written");
    // While it is being marked, nobody gets a lease.
    let directory = m.world.path("far/mounted/overlays/web.qcow2");
    let held = generations::hold(&HostDirectory::open(&directory).unwrap()).unwrap();
    let listen = format!("unix:{}", m.world.path("own.sock").display());
    let export = ["export", "web.qcow2", "--nbd", &listen, "--background"];
    let refused = m.far(&export);
    assert_ne!(refused.code, Some(0));
    assert!(
        refused.err.contains("in use by another process"),
        "{refused:?}"
    );
    let leases = m.far(&["mounts", "leases", "--json"]).ok().json();
    assert!(
        leases.iter().all(|lease| lease["writer"].is_null()),
        "{leases:?}"
    );
    drop(held);
    m.far(&["index", "--mark", text(&link)]).ok();
    assert_eq!(m.known("link.qcow2")["frozen"], true);
}

#[test]
fn what_a_person_thaws_or_unmarks_stays_so() {
    let test = "what_a_person_thaws_or_unmarks_stays_so";
    if !has(test, &TOOLS) {
        return;
    }
    let m = Mounts::new();
    m.qcow2("web.qcow2", 72);
    let path = m.world.path("web.qcow2");
    m.far(&["index", "--mark", text(&path)]).ok();
    let marked = m.known("web.qcow2");
    let sock = format!("unix:{}", m.world.path("own.sock").display());
    let refused = m.far(&["export", "web.qcow2", "--nbd", &sock, "--background"]);
    refused.fails(3, &["is frozen", "its file was marked", "mounts break"]);
    m.far(&["mounts", "break", "web.qcow2", "-y"]).ok();
    for _ in 0..2 {
        let socket = m.write_far("web.qcow2");
        m.far(&["unmount", text(&socket)]).ok();
        m.far(&["changes", "drop", "web.qcow2", "-y"]).ok();
        m.index("web.qcow2");
        assert_ne!(m.known("web.qcow2")["frozen"], true);
    }
    // Another mark is another decision.
    m.far(&["index", "--mark", text(&path)]).ok();
    let again = m.known("web.qcow2");
    assert_eq!(again["frozen"], true);
    assert_ne!(again["seed"], marked["seed"]);
    m.far(&["index", "--unmark", text(&path)]).ok();
    assert_ne!(m.known("web.qcow2")["frozen"], true);
    let info = tool("qemu-img", &["info", text(&path)]);
    assert!(!info.contains("drover-"), "{info}");
    tool("qemu-img", &["check", "-q", text(&path)]);
    let socket = m.write_far("web.qcow2");
    m.far(&["unmount", text(&socket)]).ok();
}

#[test]
fn what_cannot_be_marked_is_indexed_and_said() {
    let test = "what_cannot_be_marked_is_indexed_and_said";
    if !has(test, &TOOLS) {
        return;
    }
    let m = Mounts::new();
    let directory = m.world.path("images");
    fs::create_dir(&directory).unwrap();
    let create = |name: &str, format: &str| {
        let path = directory.join(name);
        tool(
            "qemu-img",
            &["create", "-q", "-f", format, text(&path), "3M"],
        );
        path
    };
    let first = create("aa.qcow2", "qcow2");
    let raw = create("bb.raw", "raw");
    let saved = create("cc.qcow2", "qcow2");
    tool("qemu-img", &["snapshot", "-c", "s", text(&saved)]);
    create("dd.qcow2", "qcow2");
    let ran = m.far(&["index", "--mark", "--json", text(&directory)]);
    let notes: Vec<_> = ran.json();
    let of = |name: &str| {
        let path = directory.join(name);
        let note = notes
            .iter()
            .find(|line| line["path"] == text(&path) && line["event"] == "note");
        note.map(|note| note["message"].as_str().unwrap().to_owned())
    };
    assert_eq!((of("aa.qcow2"), of("dd.qcow2")), (None, None));
    assert!(of("bb.raw").unwrap().contains("no qcow2"));
    assert!(of("cc.qcow2").unwrap().contains("qemu-img snapshot -d"));
    ran.fails(1, &["2 of 4 files are indexed, but not marked"]);
    for (name, frozen) in [
        ("aa.qcow2", Value::Bool(true)),
        ("bb.raw", Value::Null),
        ("cc.qcow2", Value::Null),
        ("dd.qcow2", Value::Bool(true)),
    ] {
        assert_eq!(m.known(name)["frozen"], frozen, "{name}");
    }
    tool("qemu-img", &["snapshot", "-a", "s", text(&saved)]);
    m.far(&["index", "--mark", text(&raw)])
        .fails(1, &["bb.raw", "is no qcow2"]);
    m.far(&["index", "--unmark", text(&raw)])
        .fails(1, &["bb.raw", "is no qcow2"]);

    // Without qemu-img nobody would know what is written later.
    m.far(&["index", "--unmark", text(&first)]).ok();
    let before = fs::read(&first).unwrap();
    let mut without = m.world.drover("far", &["index", "--mark", text(&first)]);
    let done = without.env("PATH", &directory).output().unwrap();
    let said = String::from_utf8_lossy(&done.stderr);
    assert!(
        !done.status.success() && said.contains("qemu-img"),
        "{said}"
    );
    assert!(fs::read(&first).unwrap() == before);
}
