//! What this machine lacks, found out by trying it.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Result, bail};

use super::Need;
use super::identity;
use crate::experiments::Lab;
use crate::link;

/// What is missing here, with the reason and the way to get it.
#[derive(Debug, Default)]
pub struct Lacking(BTreeMap<Need, String>);

impl Lacking {
    /// Tries each of `needs` once.
    pub fn look(lab: &Lab, needs: impl Iterator<Item = Need>) -> Self {
        let needs: std::collections::BTreeSet<Need> = needs.collect();
        let tried = needs.into_iter().filter_map(|need| {
            let tried = match need {
                Need::Link => {
                    link::available().map_err(|why| anyhow::anyhow!("no link here: {why}"))
                }
                Need::Library => library(lab),
            };
            Some((need, format!("{:#}", tried.err()?)))
        });
        Self(tried.collect())
    }

    /// A machine that lacks just this.
    #[cfg(test)]
    pub fn just(need: Need, why: &str) -> Self {
        Self([(need, why.to_owned())].into())
    }

    /// Why a case with these needs cannot be measured here.
    pub fn of(&self, needs: &[Need]) -> Option<String> {
        let missing: Vec<&str> = needs
            .iter()
            .filter_map(|need| self.0.get(need).map(String::as_str))
            .collect();
        (!missing.is_empty()).then(|| missing.join("; "))
    }
}

fn library(lab: &Lab) -> Result<()> {
    if !identity::set(lab).is_empty() {
        return Ok(());
    }
    let set = if lab.small { " --set small" } else { "" };
    bail!(
        "no image in {}: `lab library{set}` builds them",
        shown(&lab.common.dir)
    )
}

fn shown(dir: &Path) -> String {
    dir.join("images").display().to_string()
}
