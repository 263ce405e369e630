//! Peers and images that reach for files of the receiving host.

use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use crate::mount::{Mounts, has, text, tool};
use crate::world::{World, same};

#[test]
fn a_delivery_overwrites_no_file_that_the_site_does_not_know() {
    let world = World::new();
    let far = world.pair();
    let image = world.image("a.img", 1, 300);
    let notes = world.path("far/images/notes.img");
    fs::write(&notes, "the administrator's own").unwrap();
    let link = world.path("far/images/link.img");
    std::os::unix::fs::symlink(&notes, &link).unwrap();
    for name in ["notes.img", "link.img"] {
        let ran = world.run("near", &["send", "a.img", "far", "--as", name, "--json"]);
        let ran = ran.fails(3, &[name, "does not know", "index that file or move it"]);
        let started = ran.json().iter().any(|line| line["event"] == "started");
        assert!(!started, "data was asked for: {}", ran.out);
        assert!(!ran.err.contains(world.path("far").to_str().unwrap()));
    }
    assert_eq!(fs::read(&notes).unwrap(), b"the administrator's own");
    assert!(link.is_symlink());
    // The way out that the message names: an image that was indexed can be replaced.
    fs::remove_file(&link).unwrap();
    world
        .run("near", &["send", "a.img", "far", "--as", "link.img"])
        .ok();
    same(&world.delivered("far", "link.img"), &image);
    world.run("far", &["index", notes.to_str().unwrap()]).ok();
    world
        .run("near", &["send", "a.img", "far", "--as", "notes.img"])
        .ok();
    same(&world.delivered("far", "notes.img"), &image);
    assert_eq!(far.stop().0, Some(0));
}

#[test]
fn what_drover_writes_is_private_unless_the_site_says_otherwise() {
    let mut m = Mounts::new();
    m.world.image("a.img", 1, 300);
    m.near(&["send", "a.img", "far"]).ok();
    let socket = m.export("a.img", &[]);
    let check = |m: &Mounts, dir: &str, but: &[(&str, u32)]| {
        for path in below(&m.world.path(dir)) {
            let about = path.symlink_metadata().unwrap();
            let name = path.file_name().unwrap();
            let wanted = match but.iter().find(|(but, _)| *but == name) {
                Some((_, mode)) => *mode,
                None if about.is_dir() => 0o700,
                None => 0o600,
            };
            assert_eq!(about.mode() & 0o7777, wanted, "{}", path.display());
        }
    };
    check(&m, "far", &[]);
    check(&m, "near", &[]);
    assert_eq!(socket.metadata().unwrap().mode() & 0o7777, 0o600);
    m.unmount(&socket, &[]).ok();
    // The images, and the directory for them, of a site that says so.
    m.kill_site();
    let (config, images) = (m.world.path("far/config.toml"), m.world.path("vm"));
    let text = format!("image-mode = \"0640\"\nimages = {images:?}\n");
    fs::write(&config, text).unwrap();
    fs::set_permissions(&config, Permissions::from_mode(0o600)).unwrap();
    m.start_site();
    m.near(&["send", "a.img", "far", "--as", "b.img"]).ok();
    check(&m, "far", &[]);
    check(&m, "vm", &[("vm", 0o750), ("b.img", 0o640)]);
}

/// A directory and all that is in it.
fn below(dir: &Path) -> Vec<PathBuf> {
    let mut found = vec![dir.to_path_buf()];
    for entry in fs::read_dir(dir).unwrap() {
        let entry = entry.unwrap();
        match entry.file_type().unwrap().is_dir() {
            true => found.extend(below(&entry.path())),
            false => found.push(entry.path()),
        }
    }
    found
}

#[test]
fn a_home_that_others_can_write_to_is_refused() {
    let world = World::new();
    world.run("h", &["init"]).ok();
    let home = world.path("h");
    let chmod = |dir: &Path, mode| {
        fs::set_permissions(dir, Permissions::from_mode(mode)).unwrap();
    };
    chmod(&home, 0o755);
    for dir in [home.clone(), home.join("index")] {
        let mend = format!("`chmod go-w {}`", dir.display());
        for mode in [0o777, 0o770, 0o702] {
            chmod(&dir, mode);
            for command in ["serve", "teleporter", "init", "peers"] {
                world.run("h", &[command]).fails(3, &[&mend]);
            }
        }
        chmod(&dir, 0o755);
        world.run("h", &["peers"]).ok();
    }
}

/// Makes the images directory of the far site `vm`, so that its working files are in it, and restarts the site.
fn images_elsewhere(m: &mut Mounts) {
    m.kill_site();
    let images = m.world.path("vm");
    fs::write(
        m.world.path("far/config.toml"),
        format!("images = {images:?}\n"),
    )
    .unwrap();
    m.start_site();
}

/// A vmdk descriptor with one extent.
fn vmdk(m: &Mounts, image: &str, extent: &str) {
    let text = format!(
        "# Disk DescriptorFile\nversion=1\nCID=fffffffe\nparentCID=ffffffff\ncreateType=\"custom\"\nRW 128 {extent}\n"
    );
    fs::write(m.world.path(image), text).unwrap();
}

/// A qcow2 image whose backing file need not exist.
fn qcow2(m: &Mounts, image: &str, format: &str, backing: &str) {
    let path = m.world.path(image);
    let create = [
        "create",
        "-q",
        "-u",
        "-f",
        "qcow2",
        "-F",
        format,
        "-b",
        backing,
        text(&path),
        "64K",
    ];
    tool("qemu-img", &create);
}

/// A peer's image names files of the site: one that is not in the catalog, the site's own, and one that a link of the
/// administrator leads to. None can be read through it.
#[test]
fn a_delivered_image_is_not_read_from_files_that_it_only_names() {
    if !has(
        "a_delivered_image_is_not_read_from_files_that_it_only_names",
        &["qemu-img"],
    ) {
        return;
    }
    let mut m = Mounts::new();
    images_elsewhere(&mut m);
    fs::create_dir(m.world.path("etc")).unwrap();
    for secret in [
        "vm/secret.raw",
        "etc/passwd",
        "vm/.drover-work/sequences.data",
    ] {
        fs::write(m.world.path(secret), vec![b's'; 64 << 10]).unwrap();
    }
    std::os::unix::fs::symlink(m.world.path("etc"), m.world.path("vm/way")).unwrap();
    std::os::unix::fs::symlink(m.world.path("etc/passwd"), m.world.path("vm/link.raw")).unwrap();
    let passwd = m.world.path("etc/passwd");
    let (absolute, inside) = (text(&passwd), m.world.path("vm/secret.raw"));
    for name in [
        "secret.raw",
        ".drover-work/sequences.data",
        "way/passwd",
        "link.raw",
        "../etc/passwd",
        "./secret.raw",
        "none.raw",
        absolute,
        text(&inside),
        "way/../secret.raw",
    ] {
        qcow2(&m, "evil.qcow2", "raw", name);
        vmdk(&m, "flat.vmdk", &format!("FLAT \"{name}\" 0"));
        vmdk(&m, "sparse.vmdk", &format!("SPARSE \"{name}\""));
        for image in ["evil.qcow2", "flat.vmdk", "sparse.vmdk"] {
            m.near(&["send", image, "far", "--opaque"]).ok();
            let listen = format!("unix:{}", m.world.path("evil.sock").display());
            let far = format!("far:{image}");
            for (home, image) in [("near", far.as_str()), ("far", image)] {
                let ran = m
                    .world
                    .run(home, &["export", image, "--nbd", &listen, "--background"]);
                let ran = ran.fails(3, &["names the file", "it is not followed"]);
                let vm = m.world.path("vm");
                assert!(
                    name.starts_with('/') || !ran.err.contains(text(&vm)),
                    "{ran:?}"
                );
            }
        }
    }
}

/// What a delivered image may be read from: other images of the site, as long as they are what was delivered.
#[test]
fn a_delivered_image_is_read_from_other_images() {
    if !has("a_delivered_image_is_read_from_other_images", &["qemu-img"]) {
        return;
    }
    let mut m = Mounts::new();
    images_elsewhere(&mut m);
    let bytes = fs::read(m.world.image("base.raw", 5, 64)).unwrap();
    let (base, top) = (m.world.path("base.raw"), m.world.path("top.qcow2"));
    let create = [
        "create",
        "-q",
        "-f",
        "qcow2",
        "-F",
        "raw",
        "-b",
        "base.raw",
        text(&top),
    ];
    tool("qemu-img", &create);
    m.near(&["send", "top.qcow2", "far"])
        .fails(3, &["base.raw", "--with-parts", "--opaque"]);
    m.near(&["send", "top.qcow2", "far", "--with-parts"]).ok();
    assert!(fs::read(m.world.path("vm/base.raw")).unwrap() == fs::read(&base).unwrap());
    let see = |m: &Mounts| {
        let socket = m.export("top.qcow2", &["--read-only"]);
        let (uri, out) = (
            format!("nbd+unix:///top.qcow2?socket={}", socket.display()),
            m.world.path("out.raw"),
        );
        tool(
            "qemu-img",
            &["convert", "-f", "raw", "-O", "raw", &uri, text(&out)],
        );
        m.unmount(&socket, &[]).ok();
        fs::read(out).unwrap()
    };
    assert!(see(&m) == bytes);
    // One that was changed in place is no longer the image that was delivered.
    let changed = m.world.path("vm/base.raw");
    let file = fs::File::options().write(true).open(&changed).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, b"changed", 0).unwrap();
    drop(file);
    let listen = format!("unix:{}", m.world.path("no.sock").display());
    m.near(&["export", "far:top.qcow2", "--nbd", &listen, "--background"])
        .fails(3, &["base.raw", "was changed"]);
    m.world.run("far", &["index", text(&changed)]).ok();
    assert!(see(&m)[..7] == *b"changed");
}

/// The administrator's own image is read from what it names, wherever a link leads, once that was asked for.
#[test]
fn an_indexed_image_is_read_from_its_parts_when_asked() {
    if !has(
        "an_indexed_image_is_read_from_its_parts_when_asked",
        &["qemu-img"],
    ) {
        return;
    }
    let m = Mounts::new();
    fs::create_dir(m.world.path("own")).unwrap();
    let bytes = fs::read(m.world.image("base.raw", 5, 64)).unwrap();
    std::os::unix::fs::symlink(m.world.path("base.raw"), m.world.path("own/base.raw")).unwrap();
    let top = m.world.path("own/top.qcow2");
    let create = [
        "create",
        "-q",
        "-f",
        "qcow2",
        "-F",
        "raw",
        "-b",
        "base.raw",
        text(&top),
    ];
    tool("qemu-img", &create);
    let index = ["index", text(&top), "--json", "--with-parts"];
    m.world
        .run("far", &index[..3])
        .fails(3, &["base.raw", "--with-parts"]);
    let said = m.world.run("far", &index).ok().json();
    assert_eq!(
        said[0]["parts"],
        serde_json::json!([m.world.path("own/base.raw")])
    );
    let socket = m.export("top.qcow2", &["--read-only"]);
    let uri = format!("nbd+unix:///top.qcow2?socket={}", socket.display());
    let out = m.world.path("out.raw");
    tool(
        "qemu-img",
        &["convert", "-f", "raw", "-O", "raw", &uri, text(&out)],
    );
    m.unmount(&socket, &[]).ok();
    assert!(fs::read(&out).unwrap() == bytes);
}

/// A downloaded image that names a key of the user does not make the user send that key.
#[test]
fn an_image_does_not_take_files_of_the_user_along() {
    let world = World::new();
    let far = world.pair();
    fs::create_dir(world.path(".ssh")).unwrap();
    fs::write(world.path(".ssh/id_rsa"), [b'k'; 2602]).unwrap();
    fs::write(world.path(".ssh/sectors"), [b'k'; 4096]).unwrap();
    fs::create_dir(world.path("down")).unwrap();
    std::os::unix::fs::symlink(world.path(".ssh"), world.path("down/way")).unwrap();
    // A whole number of sectors, as if the author knew the size: what is left is that it is listed.
    for (image, name, sectors) in [
        ("x.vmdk", ".ssh/id_rsa", 5),
        ("x.vmdk", ".ssh/id_rsa", 6),
        ("down/x.vmdk", "way/sectors", 8),
        ("down/x.vmdk", "../.ssh/sectors", 8),
    ] {
        let text = format!(
            "# Disk DescriptorFile\nversion=1\nCID=fffffffe\nparentCID=ffffffff\ncreateType=\"monolithicFlat\"\nRW {sectors} FLAT \"{name}\" 0\n"
        );
        fs::write(world.path(image), text).unwrap();
        world
            .run("near", &["send", image, "far"])
            .fails(3, &[image, name, "--with-parts"]);
        for options in [&["--with-parts"][..], &["--with-parts", "--to", "raw"]] {
            let asked = [&["send", image, "far"], options].concat();
            world.run("near", &asked).fails(1, &[name]);
        }
        world
            .run("near", &["send", image, "far", "--to", "raw"])
            .fails(3, &[name, "--with-parts"]);
    }
    assert_eq!(world.run("far", &["images", "--json"]).ok().out, "");
    let kept = below(&world.path("far"))
        .into_iter()
        .filter(|path| path.is_file());
    for path in kept {
        let bytes = fs::read(&path).unwrap();
        let key = bytes.windows(64).any(|part| part == [b'k'; 64]);
        assert!(!key, "{}", path.display());
    }
    // By itself, the descriptor does no harm.
    world
        .run("near", &["send", "x.vmdk", "far", "--opaque"])
        .ok();
    assert_eq!(far.stop().0, Some(0));
}

/// With the images in the home itself, a peer could send an `identity.key`.
#[test]
fn an_images_directory_with_the_sites_own_files_is_refused() {
    let world = World::new();
    let home = world.path("h");
    let root = world.path("");
    for images in [&home, &root, &home.join("mounted")] {
        let images = images.to_str().unwrap();
        world.run("h", &["init", "--images", images]).fails(
            3,
            &[
                images,
                home.to_str().unwrap(),
                "must not contain each other",
            ],
        );
    }
    world.run("h", &["init"]).ok();
    let config = home.join("config.toml");
    let kept = fs::read_to_string(&config).unwrap();
    std::os::unix::fs::symlink(&home, world.path("elsewhere")).unwrap();
    for images in [
        ".",
        "images/..",
        "work/x",
        root.to_str().unwrap(),
        "../elsewhere",
    ] {
        fs::write(&config, format!("images = {images:?}\n")).unwrap();
        for command in ["serve", "teleporter", "images"] {
            world
                .run("h", &[command])
                .fails(3, &[home.to_str().unwrap(), "config.toml"]);
        }
    }
    assert!(!home.join("work/x").exists());
    fs::write(&config, kept).unwrap();
    world.run("h", &["images"]).ok();
}
