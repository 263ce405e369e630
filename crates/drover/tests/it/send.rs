//! Sending images: delivery, and the JSON output for scripts.

use std::fs;
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::world::{World, same, signal, until, wait};

/// Required fields of every image in a `done` line.
const FIELDS: &[&str] = &[
    "name",
    "digest",
    "size_bytes",
    "data_bytes",
    "wire_sent_bytes",
    "wire_received_bytes",
    "matched_blocks",
    "sent_blocks",
    "zero_blocks",
    "seconds",
];

fn done(lines: &[Value]) -> &Vec<Value> {
    let last = lines.last().unwrap();
    assert_eq!(last["event"], "done", "{last}");
    last["images"].as_array().unwrap()
}

#[test]
fn an_image_arrives_byte_for_byte_and_again_for_almost_nothing() {
    let world = World::new();
    let far = world.pair();
    let path = world.image("a.img", 1, 2500);
    let lines = world
        .run("near", &["send", "a.img", "far", "--json"])
        .ok()
        .json();
    assert!(lines.iter().all(|l| l["event"].is_string()));
    let image = &done(&lines)[0];
    for field in FIELDS {
        assert!(!image[*field].is_null(), "{field}: {image}");
    }
    assert_eq!(image["name"], "a.img");
    let stages = &image["stages"];
    assert_eq!(stages["source"]["read"]["bytes"], 2500 * 4096); // The rest is a hole.
    assert_eq!(stages["destination"]["write"]["bytes"], 2500 * 4096);
    let busy = &stages["destination"]["sync"]["busy_seconds"];
    assert!(busy.as_f64().unwrap() >= 0.0, "{stages}");
    assert_eq!(image["size_bytes"], 2500 * 4096 + (1 << 20));
    assert_eq!(
        (&image["sent_blocks"], &image["matched_blocks"]),
        (&2500.into(), &0.into())
    );
    assert!(image["wire_sent_bytes"].as_u64().unwrap() > 2500 * 4096);
    same(&world.delivered("far", "a.img"), &path);
    // The site's log has the session and its statistics.
    until("the session's end is logged", || {
        far.log().contains("session ended")
    });
    let log = far.log();
    assert!(log.contains("session opened peer="), "{log}");
    let (_, bytes) = log.split_once(" images=1 bytes=").unwrap();
    let bytes = bytes.split(' ').next().unwrap();
    assert!(bytes.parse::<u64>().unwrap() > 2500 * 4000, "{log}");
    let digest = world
        .run("near", &["digest", "a.img", "--json"])
        .ok()
        .json();
    assert_eq!(digest[0]["digest"], image["digest"]);
    let there = world.run("near", &["images", "far", "--json"]).ok().json();
    assert_eq!(
        (&there[0]["name"], &there[0]["digest"]),
        (&"a.img".into(), &image["digest"])
    );
    world.run("near", &["verify", "a.img", "far"]).ok();

    let lines = world
        .run(
            "near",
            &["send", "a.img", "far", "--as", "copy.img", "--json"],
        )
        .ok()
        .json();
    let image = &done(&lines)[0];
    assert!(
        image["wire_sent_bytes"].as_u64().unwrap() < 2500 * 4096 / 10,
        "{image}"
    );
    assert_eq!(image["sent_blocks"], 0);
    same(&world.delivered("far", "copy.img"), &path);
}

#[test]
fn several_images_and_sources_at_once() {
    let world = World::new();
    let far = world.pair();
    let ticket = world.run("far", &["ticket"]).ok().out;
    world
        .run("other", &["pair", ticket.trim(), "--name", "far"])
        .ok();
    let names: Vec<String> = (0..6).map(|i| format!("i{i}.img")).collect();
    for (i, name) in names.iter().enumerate() {
        world.image(name, i as u64, 400 + i);
    }
    let spawn = |home: &str, images: &[String]| {
        let args: Vec<&str> = ["send"]
            .into_iter()
            .chain(images.iter().map(String::as_str))
            .chain(["far"])
            .collect();
        world
            .drover(home, &args)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap()
    };
    let mut children = [spawn("near", &names[..3]), spawn("other", &names[3..])];
    for child in &mut children {
        assert_eq!(wait(child), Some(0), "{}", far.log());
    }
    for name in &names {
        same(&world.delivered("far", name), &world.path(name));
    }
    let table = world.run("near", &["images", "far"]).ok().out;
    assert_eq!(table.lines().count(), 7, "{table}");
}

#[test]
fn people_get_a_table_and_plain_lines_without_a_terminal() {
    let world = World::new();
    let _far = world.pair();
    world.image("a.img", 1, 300);
    let ran = world.run("near", &["send", "a.img", "far"]).ok();
    assert!(
        ran.out.starts_with("IMAGE") && ran.out.contains("a.img"),
        "{}",
        ran.out
    );
    assert!(ran.err.contains("a.img: delivered, digest "), "{}", ran.err);
    assert!(
        !ran.err.contains('\u{1b}') && !ran.err.contains('\r'),
        "{:?}",
        ran.err
    );
}

#[test]
fn a_missing_or_unreadable_image_fails_before_anything_is_sent() {
    let world = World::new();
    let _far = world.pair();
    world.image("a.img", 1, 10);
    let ran = world
        .run("near", &["send", "a.img", "gone.img", "far", "--json"])
        .fails(1, &["gone.img"]);
    let last = ran.json().pop().unwrap();
    assert_eq!(
        (last["event"].as_str(), last["code"].as_i64()),
        (Some("error"), Some(1))
    );
    assert!(!world.path("far/images/a.img").exists());
    world.run("near", &["send", ".", "far"]).code(2);
    fs::create_dir(world.path("dir")).unwrap();
    world
        .run("near", &["send", "dir", "far"])
        .fails(1, &["dir"]);
}

#[test]
fn a_site_that_is_not_there_is_one_clear_line() {
    let world = World::new();
    let far = world.pair();
    far.stop();
    world.image("a.img", 1, 10);
    let ran = world
        .run("near", &["send", "a.img", "far", "--json"])
        .fails(
            1,
            &["cannot reach far at 127.0.0.1", "refused", "drover serve"],
        );
    assert_eq!(ran.json().pop().unwrap()["event"], "error");
}

#[test]
fn conversions_and_opaque_sending() {
    if Command::new("qemu-img")
        .arg("--version")
        .stdout(Stdio::null())
        .status()
        .is_err()
    {
        eprintln!("SKIP conversions_and_opaque_sending: qemu-img is not installed");
        return;
    }
    let world = World::new();
    let _far = world.pair();
    let raw = world.image("a.raw", 1, 1000);
    let qemu = |args: &[&str]| {
        let ran = Command::new("qemu-img")
            .args(args)
            .current_dir(world.path(""))
            .output()
            .unwrap();
        assert!(
            ran.status.success(),
            "{}",
            String::from_utf8_lossy(&ran.stderr)
        );
    };
    qemu(&["convert", "-f", "raw", "-O", "qcow2", "a.raw", "a.qcow2"]);
    world.run("near", &["send", "a.raw", "far"]).ok();
    // The same disk in another container: its blocks are already there, and the file is delivered exactly.
    let lines = world
        .run("near", &["send", "a.qcow2", "far", "--json"])
        .ok()
        .json();
    let image = &done(&lines)[0];
    assert!(image["matched_blocks"].as_u64().unwrap() >= 990, "{image}");
    same(&world.delivered("far", "a.qcow2"), &world.path("a.qcow2"));
    world
        .run(
            "near",
            &["send", "a.qcow2", "far", "--to", "raw", "--as", "b.raw"],
        )
        .ok();
    same(&world.delivered("far", "b.raw"), &raw);
    world
        .run(
            "near",
            &["send", "a.raw", "far", "--to", "qcow2", "--as", "b.qcow2"],
        )
        .ok();
    let far_file = world.path("far/images/b.qcow2");
    qemu(&[
        "compare",
        "-f",
        "qcow2",
        "-F",
        "raw",
        far_file.to_str().unwrap(),
        "a.raw",
    ]);
    world
        .run(
            "near",
            &["send", "a.qcow2", "far", "--opaque", "--as", "o.qcow2"],
        )
        .ok();
    same(&world.delivered("far", "o.qcow2"), &world.path("a.qcow2"));
    // An image of several files arrives complete.
    qemu(&[
        "convert",
        "-f",
        "raw",
        "-O",
        "vmdk",
        "-o",
        "subformat=twoGbMaxExtentFlat",
        "a.raw",
        "v.vmdk",
    ]);
    let send = ["send", "v.vmdk", "far", "--json"];
    let part = ["v-f001.vmdk", "--with-parts"];
    world.run("near", &send).fails(3, &part);
    let lines = world.run("near", &[&send[..], &part[1..]].concat());
    let lines = lines.ok().json();
    assert_eq!(done(&lines).len(), 2);
    let note = lines.iter().find(|line| line["event"] == "note").unwrap();
    let says = note["message"].as_str().unwrap();
    assert!(says.contains("v-f001.vmdk"), "{note}");
    same(&world.delivered("far", "v.vmdk"), &world.path("v.vmdk"));
    same(
        &world.delivered("far", "v-f001.vmdk"),
        &world.path("v-f001.vmdk"),
    );
}

#[test]
fn a_stopped_send_resumes_where_it_was() {
    let world = World::new();
    let _far = world.pair();
    let path = world.image("a.img", 9, 8192);
    let mut sending = world
        .drover("near", &["send", "a.img", "far", "--limit", "8M"])
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    until("a good part is there", || {
        let status = world.run("far", &["status", "--json"]).ok().json();
        let done = status[0]["domains"][0]["site"]["transfers"][0]["done_blocks"].as_u64();
        done.is_some_and(|d| d >= 2048)
    });
    signal(sending.id(), "TERM");
    assert_eq!(wait(&mut sending), Some(1));
    let mut err = String::new();
    std::io::Read::read_to_string(&mut sending.stderr.take().unwrap(), &mut err).unwrap();
    assert!(err.contains("can be resumed"), "{err}");
    assert!(
        !world.path("far/images/a.img").exists(),
        "nothing partial has the name"
    );
    let lines = world
        .run("near", &["send", "a.img", "far", "--json"])
        .ok()
        .json();
    let image = &done(&lines)[0];
    assert!(image["resumed_blocks"].as_u64().unwrap() >= 2048, "{image}");
    assert!(
        image["wire_sent_bytes"].as_u64().unwrap() < 6500 * 4096,
        "{image}"
    );
    same(&world.delivered("far", "a.img"), &path);
}

#[test]
fn a_site_that_stops_leaves_the_transfer_resumable_and_the_sender_goes_on() {
    let world = World::new();
    let far = world.pair();
    let address = world.run("near", &["peers", "--json"]).ok().json()[0]["addresses"][0]
        .as_str()
        .unwrap()
        .to_string();
    let path = world.image("a.img", 5, 8192);
    let mut sending = world
        .drover("near", &["send", "a.img", "far", "--limit", "8M", "--json"])
        .stdout(fs::File::create(world.path("out")).unwrap())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    until("a good part is there", || {
        let status = world.run("far", &["status", "--json"]).ok().json();
        status[0]["domains"][0]["site"]["transfers"][0]["done_blocks"]
            .as_u64()
            .is_some_and(|d| d >= 2048)
    });
    assert_eq!(far.stop().0, Some(0));
    let _far = world.process("far", &["serve", "--listen", &address]);
    assert_eq!(
        wait(&mut sending),
        Some(0),
        "{}",
        fs::read_to_string(world.path("out")).unwrap()
    );
    same(&world.delivered("far", "a.img"), &path);
    let out = fs::read_to_string(world.path("out")).unwrap();
    let lines: Vec<Value> = out
        .lines()
        .map(|l| serde_json::from_str(l).unwrap())
        .collect();
    assert!(lines.iter().any(|l| l["event"] == "reconnecting"), "{out}");
    assert!(
        lines
            .iter()
            .any(|l| l["event"] == "progress" && l["walked_bytes"].as_u64().unwrap() > 0),
        "{out}"
    );
    done(&lines);
}

#[test]
fn a_lone_teleporter_matches_for_a_site() {
    let world = World::new();
    let matcher = world.process("matcher", &["teleporter", "--listen", "127.0.0.1:0"]);
    world
        .run("far", &["pair", &matcher.ticket, "--name", "matcher"])
        .ok();
    fs::write(world.path("far/config.toml"), "teleporter = \"matcher\"\n").unwrap();
    let far = world.pair();
    world.image("a.img", 1, 1500);
    world.run("near", &["send", "a.img", "far"]).ok();
    let lines = world
        .run("near", &["send", "a.img", "far", "--as", "b.img", "--json"])
        .ok()
        .json();
    let image = &done(&lines)[0];
    assert_eq!(
        image["sent_blocks"],
        0,
        "{image}\n{}\n{}",
        far.log(),
        matcher.log()
    );
    same(&world.delivered("far", "b.img"), &world.path("a.img"));
    // It holds no images, and refuses all other requests.
    world
        .run("far", &["images", "matcher"])
        .fails(3, &["teleporter"]);
    assert_eq!(
        world.run("matcher", &["status", "--json"]).ok().json()[0]["duty"],
        "teleporter"
    );
    far.stop();
    assert_eq!(matcher.stop().0, Some(0));
}

#[test]
fn a_site_without_space_refuses_before_anything_is_sent() {
    let world = World::new();
    world.run("far", &["init"]).ok();
    fs::write(world.path("far/config.toml"), "reserve = \"1000TiB\"\n").unwrap();
    let _far = world.pair();
    world.image("a.img", 1, 1000);
    let ran = world
        .run("near", &["send", "a.img", "far", "--json"])
        .fails(3, &["a.img: needs", "to spare"]);
    let last = ran.json().pop().unwrap();
    assert_eq!(
        (last["event"].as_str(), last["code"].as_i64()),
        (Some("error"), Some(3))
    );
    assert!(!world.path("far/images/a.img").exists());
}

#[test]
fn an_image_that_changes_while_it_is_sent_is_not_delivered() {
    let world = World::new();
    let _far = world.pair();
    let path = world.image("a.img", 4, 8192);
    let mut sending = world
        .drover("near", &["send", "a.img", "far", "--limit", "8M"])
        .stdout(Stdio::null())
        .stderr(fs::File::create(world.path("err")).unwrap())
        .spawn()
        .unwrap();
    until("it is on its way", || {
        let status = world.run("far", &["status", "--json"]).ok().json();
        status[0]["domains"][0]["site"]["transfers"][0]["done_blocks"]
            .as_u64()
            .is_some_and(|d| d > 0)
    });
    let file = fs::File::options().write(true).open(&path).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, b"changed", 8191 * 4096).unwrap();
    drop(file);
    assert_eq!(wait(&mut sending), Some(1));
    let err = fs::read_to_string(world.path("err")).unwrap();
    assert!(
        err.contains("a.img changed while it was being sent"),
        "{err}"
    );
    assert!(!world.path("far/images/a.img").exists());
    world.run("near", &["send", "a.img", "far"]).ok();
    same(&world.delivered("far", "a.img"), &path);
}

#[test]
fn a_damaged_container_is_refused_with_a_way_out() {
    let world = World::new();
    let _far = world.pair();
    // A qcow2 file whose cluster table lies beyond the end of the file.
    let mut bytes = vec![0u8; 65536];
    bytes[..8].copy_from_slice(b"QFI\xfb\0\0\0\x03");
    bytes[20..24].copy_from_slice(&16u32.to_be_bytes());
    bytes[24..32].copy_from_slice(&(1u64 << 30).to_be_bytes());
    bytes[36..40].copy_from_slice(&2u32.to_be_bytes());
    bytes[40..48].copy_from_slice(&(1u64 << 40).to_be_bytes());
    bytes[48..56].copy_from_slice(&65536u64.to_be_bytes());
    bytes[56..60].copy_from_slice(&1u32.to_be_bytes());
    bytes[96..100].copy_from_slice(&4u32.to_be_bytes());
    bytes[100..104].copy_from_slice(&104u32.to_be_bytes());
    let path = world.path("a.qcow2");
    fs::write(&path, bytes).unwrap();
    world
        .run("near", &["send", "a.qcow2", "far"])
        .fails(1, &["a.qcow2", "--opaque"]);
    world
        .run("near", &["send", "a.qcow2", "far", "--opaque"])
        .ok();
    same(&world.delivered("far", "a.qcow2"), &path);
}

#[test]
fn a_name_that_exists_is_replaced_at_the_end() {
    let world = World::new();
    let _far = world.pair();
    let (old, new) = (
        world.image("old.img", 1, 600),
        world.image("new.img", 2, 8192),
    );
    world
        .run("near", &["send", "old.img", "far", "--as", "x.img"])
        .ok();
    let mut sending = world
        .drover(
            "near",
            &["send", "new.img", "far", "--as", "x.img", "--limit", "8M"],
        )
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    until("it is on its way", || {
        let status = world.run("far", &["status", "--json"]).ok().json();
        status[0]["domains"][0]["site"]["transfers"][0]["done_blocks"]
            .as_u64()
            .is_some_and(|d| d > 0)
    });
    same(&world.delivered("far", "x.img"), &old);
    assert_eq!(wait(&mut sending), Some(0));
    same(&world.delivered("far", "x.img"), &new);
    let list = world.run("near", &["images", "far", "--json"]).ok().json();
    assert_eq!(list.len(), 1);
    world.run("near", &["verify", "x.img", "far"]).ok();
}

#[test]
fn the_total_is_the_size_of_the_file_and_what_matched_is_counted() {
    let world = World::new();
    let _far = world.pair();
    let path = world.image("a.img", 31, 2100);
    world.run("near", &["send", "a.img", "far"]).ok();
    // The same data, and as much new data; then a hole.
    let mut bytes = fs::read(&path).unwrap();
    bytes.truncate(2100 * 4096);
    let mut more = vec![0; 2400 * 4096];
    fastrand::Rng::with_seed(32).fill(&mut more);
    bytes.extend(more);
    fs::write(world.path("b.img"), &bytes).unwrap();
    let size = bytes.len() as u64 + (3 << 20);
    let file = fs::File::options().write(true).open(world.path("b.img"));
    file.unwrap().set_len(size).unwrap();
    let lines = world
        .run("near", &["send", "b.img", "far", "--json", "--limit", "4M"])
        .ok()
        .json();
    let of = |kind: &'static str| lines.iter().filter(move |l| l["event"] == kind);
    assert_eq!(of("started").next().unwrap()["size_bytes"], size);
    let progress: Vec<&Value> = of("progress").collect();
    assert!(!progress.is_empty(), "{lines:?}");
    let number = |v: &Value| v.as_u64().unwrap();
    for line in progress {
        assert_eq!(line["total_bytes"], size);
        assert!(number(&line["done_bytes"]) <= size, "{line}");
        // Counts complete batches only: never more than there is, and nothing that awaits a reply.
        assert!(number(&line["matched_bytes"]) <= 2100 * 4096, "{line}");
    }
}

#[test]
fn the_last_line_of_a_dry_run_has_its_estimates() {
    let world = World::new();
    let _far = world.pair();
    world.image("a.img", 33, 300);
    world.image("b.img", 34, 200);
    let lines = world
        .run(
            "near",
            &["send", "a.img", "b.img", "far", "--dry-run", "--json"],
        )
        .ok()
        .json();
    let last = lines.last().unwrap();
    assert_eq!(last["event"], "done");
    let estimates = last["estimates"].as_array().unwrap();
    assert_eq!(estimates.len(), 2, "{last}");
    assert_eq!(estimates[0]["name"], "a.img");
    assert_eq!(estimates[0]["sent_blocks"], 300);
    assert!(estimates[1]["wire_bytes"].as_u64().unwrap() > 200 * 4096);
}

#[test]
fn one_image_that_is_refused_does_not_keep_the_others_back() {
    let world = World::new();
    let far = world.pair();
    for (n, name) in ["a.img", "b.img", "c.img"].into_iter().enumerate() {
        world.image(name, 40 + n as u64, 300);
    }
    drop(far);
    fs::create_dir(world.path("elsewhere")).unwrap();
    fs::write(world.path("elsewhere/b.img"), vec![1u8; 8192]).unwrap();
    world.run("far", &["index", "elsewhere/b.img"]).ok();
    let far = world.serve("far", &[]);
    world
        .run("near", &["pair", &far.ticket, "--name", "far2"])
        .ok();
    let ran = world
        .run("near", &["send", "a.img", "b.img", "c.img", "far2"])
        .code(3);
    assert!(ran.err.contains("b.img: not delivered: "), "{ran:#?}");
    // The name is not repeated.
    assert!(!ran.err.contains("b.img: b.img"), "{ran:#?}");
    assert!(
        ran.err
            .contains("drover: 1 of 3 images were not delivered; b.img: "),
        "{ran:#?}"
    );
    assert!(
        ran.out.contains("a.img") && ran.out.contains("c.img"),
        "{ran:#?}"
    );
    for name in ["a.img", "c.img"] {
        same(&world.delivered("far", name), &world.path(name));
    }
}
