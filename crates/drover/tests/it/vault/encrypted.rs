//! An encrypted vault, with the real program.

use super::*;
use crate::mount::clear_all;
use crate::mount::client::Client;

#[test]
fn an_encrypted_vault_opens_with_each_of_its_keys_and_with_nothing_else() {
    let world = World::new();
    let run = |args: &[&str]| world.run("h", args);
    let image = world.image("web.img", 1, 2000);
    let help = run(&["vault", "key", "--help"]).ok().out;
    assert!(help.contains("Examples:"), "{help}");
    let made = run(&["vault", "init", "store", "--encrypt", "--key-file", "key"]).ok();
    assert!(
        made.err.contains("ever") && made.err.contains("created the key file"),
        "{}",
        made.err
    );
    run(&["snapshot", "web.img"]).ok();
    run(&["restore", "web@latest", "again.img"]).ok();
    same(&fs::read(&image).unwrap(), &world.path("again.img"));
    let mut found = Vec::new();
    files(&world.path("store"), &mut found);
    assert!(
        !found
            .iter()
            .any(|path| path.to_string_lossy().contains("web")),
        "{found:?}"
    );

    // A second key, a passphrase; without a file it is asked for.
    let add = ["vault", "key", "add", "--label", "spare"];
    world.run_with("h", &add, "correct horse\n").ok();
    let keys = run(&["vault", "key", "list", "--json"]).ok().json();
    // Two of one second are listed in either order.
    assert_eq!(keys.len(), 2);
    let used = keys.iter().position(|key| key["used"] == true).unwrap();
    let (first, last) = (&keys[used], &keys[1 - used]);
    assert_eq!(
        (&first["label"], &last["label"]),
        (&"the first".into(), &"spare".into())
    );
    let [first, last] = [first, last].map(|key| key["key"].as_str().unwrap());
    fs::write(world.path("phrase"), "correct horse").unwrap();
    fs::write(world.path("wrong"), "wrong").unwrap();
    run(&["snapshots", "--key-file", "wrong"])
        .fails(3, &["is not a passphrase or key file of the vault"]);
    run(&["snapshots", "--key-file", "none"]).fails(3, &["cannot read the key file"]);
    run(&["vault", "key", "remove", first, "--key-file", "phrase"]).ok();
    run(&["snapshots"]).fails(3, &["is not a passphrase or key file of the vault"]);
    run(&["vault", "key", "remove", last, "--key-file", "phrase"]).fails(3, &["the last key"]);
    // Another home does not know how it is opened.
    let place = world.path("store");
    let other = ["snapshots", "--vault", place.to_str().unwrap()];
    world.run("other", &other).fails(2, &["passphrase"]);
    let listed = world.run_with("other", &other, "correct horse\n").ok();
    assert!(listed.out.contains("web"), "{}", listed.out);

    // A disk of it. Its process has the key file.
    let listen = format!("unix:{}", world.path("s").display());
    let export = ["export", "web@latest", "--nbd", &listen, "--background"];
    run(&[&export[..], &["--key-file", "phrase"]].concat()).ok();
    let mut client = Client::connect(&world.path("s"), "");
    assert!(client.read(0, 1 << 20).unwrap() == fs::read(&image).unwrap()[..1 << 20]);
    drop(client);
    run(&["unmount", "s"]).ok();
    clear_all(&world.path("h/mounts"));
    run(&["vault", "check", "--full", "--key-file", "phrase"]).ok();

    // A plain vault in its place is refused, before anything is written to it; also by a site that only has opened it,
    // whose own vault is still its default.
    world.run("third", &["vault", "init", "plain"]).ok();
    let third = [&other[..], &["--key-file", "phrase"]].concat();
    world.run("third", &third).ok();
    world
        .run("third", &["vault", "key", "list"])
        .fails(3, &["is not encrypted"]);
    fs::rename(&place, world.path("moved")).unwrap();
    fs::rename(world.path("plain"), &place).unwrap();
    run(&["snapshot", "web.img"]).fails(3, &["is not encrypted, but it should be"]);
    assert!(!place.join("containers").exists());
    let refused = world.run("third", &other);
    refused.fails(3, &["is not encrypted, but it should be"]);
    // What a site knows is not passed over because it cannot be read.
    fs::write(world.path("h/vaults"), "damaged").unwrap();
    run(&other).fails(1, &["h/vaults", "remove it"]);
}

#[test]
fn a_passphrase_is_read_from_stdin_and_a_mount_needs_a_file() {
    let world = World::new();
    world.image("web.img", 1, 500);
    let with = |args: &[&str], text: &str| world.run_with("h", args, text);
    world
        .run("h", &["vault", "init", "store", "--encrypt"])
        .fails(2, &["passphrase"]);
    world
        .run("h", &["vault", "init", "store", "--key-file", "x"])
        .code(2);
    assert!(!world.path("store/vault").exists());
    with(&["vault", "init", "store", "--encrypt"], "battery staple\n").ok();
    with(&["snapshot", "web.img"], "battery staple\n").ok();
    // Spaces are part of it, as they are in a file.
    with(&["vault", "key", "add"], "\n").fails(2, &["passphrase"]);
    let short = with(&["vault", "key", "add"], "battery staple\n x \n").ok();
    assert!(short.err.contains("shorter than 8"), "{}", short.err);
    with(&["snapshots"], "x\n").fails(3, &["is not a passphrase"]);
    with(&["snapshots"], " x \n").ok();
    fs::write(world.path("x"), " x \n").unwrap();
    world.run("h", &["snapshots", "--key-file", "x"]).ok();
    with(&["snapshot", "web.img"], "battery\n").fails(3, &["is not a passphrase"]);
    let listen = format!("unix:{}", world.path("s").display());
    world
        .run(
            "h",
            &["export", "web@latest", "--nbd", &listen, "--background"],
        )
        .fails(3, &["--key-file"]);
}
