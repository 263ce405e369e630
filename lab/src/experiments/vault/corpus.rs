//! Machines of the library that are stored day by day: only one version of each is there at a time.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::path::PathBuf;

use anyhow::{Context, Result};

use super::series::{Series, Version};
use crate::bench::{Case, Need};
use crate::experiments::boot::copy;
use crate::library::daily::{self, MAX_DAYS};
use crate::setup::{Lab, Work};

/// The machines, by the names of their images.
const MACHINES: [&str; 10] = [
    "bookworm-db-release",
    "bookworm-plain",
    "bookworm-pg",
    "bookworm-web",
    "bookworm-dev",
    "bookworm-app",
    "bookworm-nfs",
    "bookworm-db",
    "trixie-plain",
    "bullseye-plain",
];
/// How many of them, with the rank of the case.
const CASES: [(&str, usize, u8); 3] = [
    ("corpus-3", 3, 1),
    ("corpus-6", 6, 2),
    ("corpus-10", MACHINES.len(), 2),
];
/// Versions of each machine.
const VERSIONS: usize = MAX_DAYS + 1;

/// The cases, of which the small set has none: it has no systems.
pub(super) fn cases(lab: &Lab) -> Vec<Case> {
    let case = |&(id, machines, rank): &(&str, usize, u8)| {
        let what = format!("{machines} machines day by day, {VERSIONS} versions each");
        Case::new(id, what, rank, &[Need::Library])
    };
    match lab.small {
        true => Vec::new(),
        false => CASES.iter().map(case).collect(),
    }
}

/// How many machines a case has, if it is one of these.
pub(super) fn machines(case: &str) -> Option<usize> {
    let found = CASES.iter().find(|(id, ..)| *id == case);
    found.map(|(_, machines, _)| *machines)
}

/// A machine: its first version, the days after it, and where the version is that was wanted last.
struct Machine {
    name: &'static str,
    base: PathBuf,
    days: Vec<PathBuf>,
    image: PathBuf,
}

/// Machines whose days are there.
pub(super) struct Daily {
    machines: Vec<Machine>,
    _work: Work,
    /// Which days there have been since the first version.
    done: RefCell<BTreeSet<(usize, usize)>>,
}

impl Daily {
    /// So many machines; days that are missing are made.
    pub(super) fn new(lab: &Lab, machines: usize) -> Result<Self> {
        let work = lab.work("corpus")?;
        let machine = |name: &&'static str| {
            let name = *name;
            Ok(Machine {
                name,
                base: lab.image(name)?,
                days: daily::days(&lab.common.dir, name, VERSIONS - 1)
                    .with_context(|| format!("the days of {name}"))?,
                image: work.join(&format!("{name}.raw")),
            })
        };
        Ok(Daily {
            machines: MACHINES[..machines]
                .iter()
                .map(machine)
                .collect::<Result<_>>()?,
            _work: work,
            done: RefCell::default(),
        })
    }

    /// All versions: a day of every machine, then the next.
    pub(super) fn series(&self) -> Series<'_> {
        let day = |_| {
            self.machines.iter().map(|machine| Version {
                machine: machine.name.to_owned(),
                image: machine.image.clone(),
            })
        };
        Series {
            versions: (0..VERSIONS).flat_map(day).collect(),
            ready: Box::new(|number| self.ready(number)),
        }
    }

    /// Makes the file of a version from that of the day before; the first one anew.
    fn ready(&self, number: usize) -> Result<()> {
        let (day, of) = (number / self.machines.len(), number % self.machines.len());
        let machine = &self.machines[of];
        let mut done = self.done.borrow_mut();
        match day.checked_sub(1) {
            None => {
                copy(&machine.base, &machine.image)?;
                done.retain(|(machine, _)| *machine != of);
            }
            Some(before) => {
                let follows = before == 0 || done.contains(&(of, before));
                anyhow::ensure!(follows && !done.contains(&(of, day)), "days out of order");
                daily::apply(&machine.days[before], &machine.image)?;
            }
        }
        done.insert((of, day));
        Ok(())
    }
}
