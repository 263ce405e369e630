//! Machines' hypervisors, as they are named on the command line.

use std::path::Path;

use anyhow::{Context, Result};
use drover_agent::home::Home;
use drover_agent::machines;
use drover_agent::text::clean;
use drover_core::ImageName;
use drover_hypervisor::libvirt::Uri;
use drover_hypervisor::{Hypervisor, Place};

use crate::cli;
use crate::failure::usage;

/// Connects to the hypervisor; the machine's name: that under which it came here, or may come, else that of QEMU, else that of the
/// socket. Without a hypervisor, that of the machine which was last moved from there.
pub async fn connect(
    home: &Home,
    hypervisor: &cli::Hypervisor,
) -> Result<(Option<Hypervisor>, ImageName)> {
    let place = place(home, hypervisor)?;
    let connected = match Hypervisor::connect(&place).await {
        Ok(connected) => connected,
        Err(e) => {
            let text = hypervisor.to_string();
            let gone = machines::list(home)?.into_iter().find(|machine| {
                machine.state == "committed" && machine.hypervisor.as_deref() == Some(text.as_str())
            });
            return match gone {
                Some(machine) => Ok((None, ImageName::new(machine.name)?)),
                None => Err(e.into()),
            };
        }
    };
    let mut expected = home.config.machines.iter();
    let expected = expected.find(|(name, config)| config.hypervisor(name) == place);
    let named = match (expected, &connected) {
        (Some((name, _)), _) => Some(name.clone()),
        (None, Hypervisor::Qemu(machine)) => machine.description().await?.name,
        (None, Hypervisor::Libvirt(domain)) => Some(domain.name().to_owned()),
    };
    let of_another = |name: &&String| {
        let config = home.config.machines.get(*name);
        config.is_some_and(|config| config.hypervisor(name) != place)
    };
    // Its record and its disks are not this one's.
    if let Some(name) = named.as_ref().filter(of_another) {
        let other = match home.config.machines[name].hypervisor(name) {
            Place::Qmp(socket) => socket.display().to_string(),
            Place::Libvirt(uri, _) => uri.to_string(),
        };
        return Err(usage(format!(
            "the machine called {name} of this site is at {other} (config.toml): start this one under another name"
        )));
    }
    let name = match (named, &place) {
        (Some(name), _) => Some(name),
        (None, Place::Qmp(socket)) => stem(socket),
        (None, Place::Libvirt(_, name)) => Some(name.clone()),
    };
    let name = name.context("the machine has no name: start QEMU with -name")?;
    let name = ImageName::new(name.as_str())
        .map_err(|e| usage(format!("the machine's name {:?}: {e}", clean(&name))))?;
    Ok((Some(connected), name))
}

/// Where a hypervisor is asked.
pub fn place(home: &Home, hypervisor: &cli::Hypervisor) -> Result<Place> {
    Ok(match hypervisor {
        cli::Hypervisor::Qmp(socket) => Place::Qmp(socket.clone()),
        cli::Hypervisor::Libvirt(name) => {
            let config = home.config.machines.get(name);
            let uri = config.and_then(|config| config.libvirt.clone());
            let uri = match uri {
                Some(uri) => uri,
                None => Uri::usual().map_err(usage)?,
            };
            Place::Libvirt(uri, name.clone())
        }
    })
}

fn stem(path: &Path) -> Option<String> {
    Some(path.file_stem()?.to_str()?.to_owned())
}
