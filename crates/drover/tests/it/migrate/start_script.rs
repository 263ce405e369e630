//! The script that `drover migrate --start-script` prints starts a QEMU that the machine can move to.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;

use drover_hypervisor::Machine;

use super::{Moving, Sites};
use crate::world::until;

#[tokio::test(flavor = "multi_thread")]
async fn a_printed_script_starts_the_qemu_that_waits() {
    let Some(mut sites) = Sites::new("a_printed_script_starts_the_qemu_that_waits") else {
        return;
    };
    let mut here = sites.start("near").await;
    here.wait_said("beat", 20).await;
    let near = sites.hypervisor("near");
    let printed = sites
        .world
        .run("near", &["migrate", &near, "--start-script"]);
    let script = printed.ok().out.clone();
    assert!(script.contains("[machines.web]"), "{script}");
    let kernel = script
        .lines()
        .find(|line| line.contains("as here"))
        .unwrap();
    assert!(kernel.contains("vmlinuz"), "{kernel}");
    // As an administrator would: other paths there.
    let moved = |name: &str| (name.replace("far", "near"), name.to_owned());
    let (mut script, path) = (script, sites.world.path("start-web"));
    for (from, to) in ["web-far.qmp", "web-far.console", "web-far.log"].map(moved) {
        script = script.replace(&from, &to);
    }
    fs::write(&path, script).unwrap();
    fs::set_permissions(&path, Permissions::from_mode(0o700)).unwrap();
    let config = sites.world.path("far").join("config.toml");
    let told = fs::read_to_string(&config).unwrap();
    fs::write(&config, format!("{told}start = [{path:?}]\n")).unwrap();
    sites.restart("far");
    Moving::begin(&sites, "near", "far", &[]).done();
    here.ended().await;
    let there = sites.world.path("web-far.qmp");
    let there = Machine::connect(&there).await.unwrap();
    let last = here.said("beat").unwrap();
    let console = sites.world.path("web-far.log");
    until("it writes on there", || {
        let told = fs::read_to_string(&console).unwrap_or_default();
        told.contains(&format!("beat {}", last + 20))
    });
    there.quit().await.unwrap();
}

#[test]
fn what_is_no_qemu_has_no_script() {
    let world = crate::world::World::new();
    world.run("near", &["init"]).ok();
    let socket = world.path("none.qmp");
    let machine = format!("qmp:{}", socket.display());
    world
        .run("near", &["migrate", &machine, "--start-script"])
        .fails(1, &["cannot connect to QEMU", "none.qmp"]);
    world
        .run("near", &["migrate", &machine, "far", "--start-script"])
        .code(2);
    world.run("near", &["migrate", &machine]).code(2);
}
