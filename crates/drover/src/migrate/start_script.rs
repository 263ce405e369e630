//! How the QEMU that waits for a machine is started: `migrate --start-script` prints it where the machine is, `migrate --start`
//! does it where it goes to.

use anyhow::{Context, Result};
use drover_agent::home::Home;
use drover_agent::qemu;
use drover_core::ImageName;
use drover_hypervisor::{CommandLine, Hypervisor};

use super::hypervisor::connect;
use crate::cli;
use crate::failure::usage;
use crate::out;

/// Starts the QEMU that is built here for a machine, and looks after it until it ends; or prints its command.
///
/// # Errors
/// When it cannot be started, or ends with an error.
pub async fn start(home: &Home, name: &ImageName, dry_run: bool) -> Result<()> {
    if dry_run {
        let plan = qemu::planned(home, name)?;
        let (monitor, console) = qemu::sockets(home, name);
        let mut text = format!(
            "# Its standard input is the listening socket {}, its standard output {}.\n",
            monitor.display(),
            console.display()
        );
        if let Some((user, group)) = plan.user {
            text.push_str(&format!(
                "# Started as the user {user} and the group {group}.\n"
            ));
        }
        return out::line(&(text + &plan.line.shell()));
    }
    let (home, name) = (home.clone(), name.clone());
    Ok(tokio::task::spawn_blocking(move || qemu::run(&home, &name)).await??)
}

/// Prints the script.
///
/// # Errors
/// When the hypervisor cannot be reached, or its command line is not understood.
pub async fn print(home: &Home, hypervisor: &cli::Hypervisor) -> Result<()> {
    let (machine, name) = connect(home, hypervisor).await?;
    let machine = machine.context("the machine has moved from there")?;
    let (Hypervisor::Qemu(machine), cli::Hypervisor::Qmp(path)) = (machine, hypervisor) else {
        return Err(usage(format!(
            "libvirt starts the machine there as it is defined there: `virsh dumpxml {name}` has its definition here"
        )));
    };
    let socket = path.display().to_string();
    let disks = machine.disks().await?;
    let own = CommandLine::of(path)?;
    let waiting = own.waiting(&disks, &socket);
    let waiting = waiting.map_err(|why| usage(format!("the QEMU at {socket} {why}")))?;
    let mut notes = vec![
        format!(
            "Starts the QEMU that waits for the machine {name}, with empty disks, which drover replaces."
        ),
        "In config.toml:".to_owned(),
        format!("  [machines.{name}]"),
        format!("  incoming = {socket:?}"),
        format!("  start = [\"/usr/local/bin/start-{name}\"]"),
    ];
    let files: Vec<_> = waiting.files();
    let files: Vec<&str> = files.into_iter().filter(|file| *file != socket).collect();
    if !files.is_empty() {
        notes.push("Must be there as here, or be replaced: ".to_owned() + &files.join(" "));
    }
    let mut text = String::from("#!/bin/sh\n");
    for note in notes {
        text.push_str(&format!("# {}\n", note.replace(char::is_control, " ")));
    }
    text.push_str("exec ");
    // After a failover it waits for no migration: drover says so.
    let shell = waiting.shell();
    let always = "-incoming defer";
    text.push_str(&shell.replacen(always, "${DROVER_INCOMING--incoming defer}", 1));
    out::line(&text)
}
