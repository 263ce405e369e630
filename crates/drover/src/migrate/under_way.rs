//! Moves that are under way, perhaps by another process: where they are, and what stops them.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};
use drover_agent::error::Error;
use drover_agent::home::Home;
use drover_core::ImageName;
use drover_hypervisor::{Hypervisor, HypervisorError};
use drover_migrate::MigrateError;
use drover_net::NetError;
use drover_store::machine::Machines;

use super::hypervisor::place;
use crate::failure;

/// How long the process that moves a machine may take to give up.
const ABORT_LIMIT: Duration = Duration::from_secs(60);

/// How often that is looked at.
const ABORT_POLL: Duration = Duration::from_millis(50);

/// The directory of moves of a machine.
pub fn work(home: &Home, name: &ImageName) -> PathBuf {
    home.machines().directory().join(format!(".{name}.move"))
}

/// A failure of what was done with a peer.
pub fn failed(error: MigrateError, peer: &str) -> anyhow::Error {
    if let MigrateError::Stayed {
        code: Some(code), ..
    } = &error
    {
        return Error::coded(*code, error.to_string()).into();
    }
    match error {
        MigrateError::Refused(refusal) => Error::Refused(refusal).into(),
        MigrateError::Net(NetError::Refused(refusal)) => Error::of_peer(peer, &refusal).into(),
        MigrateError::Net(e) => Error::from(e).into(),
        MigrateError::Teleport(e) => failure::of_sending(e, peer),
        e => e.into(),
    }
}

/// Has the process that moves a machine stop that, if there is one; whether it has within its time. What else it moves goes on.
pub async fn stop_mover(records: &Machines, name: &ImageName) -> Result<bool> {
    let cannot = || format!("cannot stop the process that moves {name}");
    let gone = async {
        while records.mover(name)?.is_some() {
            records.ask_to_stop(name)?;
            tokio::time::sleep(ABORT_POLL).await;
        }
        std::io::Result::Ok(())
    };
    match tokio::time::timeout(ABORT_LIMIT, gone).await {
        Ok(gone) => gone.map(|()| true).with_context(cannot),
        Err(_) => Ok(false),
    }
}

/// The hypervisor that a record names, unless it has ended.
pub async fn if_there(home: &Home, recorded: Option<&str>) -> Result<Option<Hypervisor>> {
    let Some(Ok(hypervisor)) = recorded.map(str::parse) else {
        return Ok(None);
    };
    match Hypervisor::connect(&place(home, &hypervisor)?).await {
        Err(HypervisorError::Connect { is_gone: true, .. } | HypervisorError::NoMachine { .. }) => {
            Ok(None)
        }
        machine => Ok(Some(machine?)),
    }
}
