//! What a run measures: what fits in its time, most important first, and what it leaves out for which reason.

use std::collections::BTreeMap;

use anyhow::{Result, bail};
use serde::{Deserialize, Serialize};

use super::identity::{Identities, Identity};
use super::needs::Lacking;
use super::store::{FORMAT, Record, Store};
use super::{Case, Experiment};
use crate::experiments::Lab;
use crate::report::Machine;

/// What to measure, as it was asked for.
#[derive(Clone, Debug, Default)]
pub struct Wish {
    /// Only cases that one of these fits; all without any.
    pub only: Vec<Filter>,
    /// Seconds that the run may take; none: as long as it takes.
    pub budget: Option<f64>,
    /// Measure also what has a result that still holds.
    pub again: bool,
}

/// `EXPERIMENT` or `EXPERIMENT/CASE`, the case with `*` and `?`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Filter {
    experiment: String,
    case: String,
}

impl std::str::FromStr for Filter {
    type Err = std::convert::Infallible;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (experiment, case) = text.split_once('/').unwrap_or((text, "*"));
        Ok(Self {
            experiment: experiment.to_owned(),
            case: case.to_owned(),
        })
    }
}

impl std::fmt::Display for Filter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.experiment, self.case)
    }
}

impl Filter {
    /// Whether it is about an experiment.
    fn concerns(&self, experiment: &str) -> bool {
        like(self.experiment.as_bytes(), experiment.as_bytes())
    }

    /// Whether it fits a case.
    pub fn fits(&self, experiment: &str, case: &str) -> bool {
        like(self.experiment.as_bytes(), experiment.as_bytes())
            && like(self.case.as_bytes(), case.as_bytes())
    }
}

/// Whether `text` is as `pattern` says: `*` is any text, `?` any byte.
fn like(pattern: &[u8], text: &[u8]) -> bool {
    match (pattern.split_first(), text.split_first()) {
        (None, None) => true,
        (Some((b'*', rest)), _) => {
            like(rest, text) || text.split_first().is_some_and(|(_, t)| like(pattern, t))
        }
        (Some((b'?', rest)), Some((_, t))) => like(rest, t),
        (Some((p, rest)), Some((c, t))) => p == c && like(rest, t),
        _ => false,
    }
}

/// What becomes of a case in a run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "fate", content = "why", rename_all = "snake_case")]
pub enum Fate {
    /// It is measured.
    Run,
    /// Its kept result still holds.
    Kept,
    /// It was not asked for.
    NotAsked,
    /// The machine lacks what it needs.
    Lacking(String),
    /// It does not fit in the time.
    OverBudget,
    /// It was measured in this run.
    Done,
}

/// A case in a plan.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Entry {
    /// The experiment's name.
    pub experiment: String,
    /// The case's id.
    pub case: String,
    /// In words.
    pub what: String,
    /// See [`Case::rank`].
    pub rank: u8,
    /// What it is expected to take: what it took last time on this machine, or the experiment's estimate.
    pub seconds: f64,
    /// What its result depends on, as that is now.
    pub identity: Identity,
    /// What becomes of it.
    #[serde(flatten)]
    pub fate: Fate,
    /// The case itself.
    #[serde(skip)]
    pub of: Option<Case>,
}

/// All cases of all experiments, in the order in which they are measured.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// [`FORMAT`].
    pub format: u32,
    /// This machine.
    pub machine: Machine,
    /// Whether it is about the small set.
    pub small: bool,
    /// Seconds that the run may take; none: as long as it takes.
    pub budget: Option<f64>,
    /// The cases.
    pub entries: Vec<Entry>,
    /// Experiments that cannot even say what they would measure, with the reason.
    pub mute: BTreeMap<String, String>,
}

/// Where kept results are, and what they say about the time that a case takes.
struct Kept<'a> {
    store: &'a Store,
    repeat: usize,
}

impl Kept<'_> {
    fn of(&self, experiment: &str, case: &str) -> Option<Record> {
        self.store.load(experiment, case).unwrap_or_else(|error| {
            eprintln!("WARNING {error:#}: measured again");
            None
        })
    }
}

impl Plan {
    /// Makes a plan: what is possible here, what still holds, and what fits in the time.
    ///
    /// # Errors
    /// When a filter fits nothing.
    pub fn make(
        experiments: &[&dyn Experiment],
        lab: &Lab,
        store: &Store,
        wish: &Wish,
    ) -> Result<Self> {
        let mut mute = BTreeMap::new();
        let listed: Vec<(&dyn Experiment, Vec<Case>)> = experiments
            .iter()
            .map(|experiment| {
                let cases = experiment.cases(lab).unwrap_or_else(|error| {
                    mute.insert(experiment.about().name.to_owned(), format!("{error:#}"));
                    Vec::new()
                });
                (*experiment, cases)
            })
            .collect();
        let needs = listed.iter().flat_map(|(experiment, cases)| {
            let name = experiment.about().name;
            cases
                .iter()
                .filter(move |case| wish.asks(name, &case.id))
                .flat_map(|case| case.needs.iter().copied())
        });
        let lacking = Lacking::look(lab, needs);
        let mut plan = Self::of(listed, lab, store, wish, &lacking, mute);
        plan.all_filters_fit(experiments, wish)?;
        plan.mute
            .retain(|name, _| wish.only.is_empty() || wish.only.iter().any(|f| f.concerns(name)));
        Ok(plan)
    }

    /// The plan for a machine that lacks `lacking`.
    pub(super) fn of(
        listed: Vec<(&dyn Experiment, Vec<Case>)>,
        lab: &Lab,
        store: &Store,
        wish: &Wish,
        lacking: &Lacking,
        mute: BTreeMap<String, String>,
    ) -> Self {
        let mut identities = Identities::new(lab);
        let kept = Kept {
            store,
            repeat: lab.repeat,
        };
        // By rank, then by place in the experiment's list, so that a rank is spread over the experiments.
        let mut entries: Vec<(u8, usize, Entry)> = Vec::new();
        for (experiment, cases) in listed {
            let mut places: BTreeMap<u8, usize> = BTreeMap::new();
            for case in cases {
                let name = experiment.about().name;
                if entries
                    .iter()
                    .any(|(_, _, e)| e.experiment == name && e.case == case.id)
                {
                    eprintln!(
                        "WARNING two cases are called {name}/{}: the second is left out",
                        case.id
                    );
                    continue;
                }
                let place = places.entry(case.rank).or_default();
                *place += 1;
                let identity = identities.of(experiment, &case);
                let at = (case.rank, *place);
                let entry = entry(
                    experiment.about().name,
                    case,
                    identity,
                    wish,
                    lacking,
                    &kept,
                );
                entries.push((at.0, at.1, entry));
            }
        }
        entries.sort_by_key(|(rank, place, _)| (*rank, *place));
        let mut plan = Self {
            format: FORMAT,
            machine: Machine::this(),
            small: lab.small,
            budget: wish.budget,
            entries: entries.into_iter().map(|(_, _, entry)| entry).collect(),
            mute,
        };
        plan.fit(0, 0.0);
        plan
    }

    /// Decides again, from entry `from` on, what fits in the time when `elapsed` seconds of it are over.
    pub fn fit(&mut self, from: usize, elapsed: f64) {
        let mut left = self.budget.map(|budget| budget - elapsed);
        for entry in self.entries.iter_mut().skip(from) {
            if !matches!(entry.fate, Fate::Run | Fate::OverBudget) {
                continue;
            }
            let fits = left.is_none_or(|left| entry.seconds <= left) || entry.rank == 0;
            entry.fate = if fits { Fate::Run } else { Fate::OverBudget };
            if fits && let Some(left) = &mut left {
                *left -= entry.seconds;
            }
        }
    }

    /// How many cases there are of a fate.
    pub fn count(&self, fate: &Fate) -> usize {
        self.entries.iter().filter(|e| e.fate == *fate).count()
    }

    /// What is to be measured is expected to take this long.
    pub fn seconds(&self) -> f64 {
        let run = self.entries.iter().filter(|e| e.fate == Fate::Run);
        run.map(|entry| entry.seconds).sum()
    }

    /// The reasons for which cases cannot be measured here, each with their number, by experiment.
    pub fn lacking(&self) -> Vec<(&str, &str, usize)> {
        let mut found: Vec<(&str, &str, usize)> = Vec::new();
        for entry in &self.entries {
            let Fate::Lacking(why) = &entry.fate else {
                continue;
            };
            let same = |f: &&mut (&str, &str, usize)| (f.0, f.1) == (&entry.experiment, why);
            match found.iter_mut().find(same) {
                Some(of) => of.2 += 1,
                None => found.push((&entry.experiment, why, 1)),
            }
        }
        found
    }

    fn all_filters_fit(&self, experiments: &[&dyn Experiment], wish: &Wish) -> Result<()> {
        for filter in &wish.only {
            let known = self.entries.iter().map(|e| (&e.experiment, &e.case));
            let mute = self.mute.keys().any(|name| filter.concerns(name));
            if !mute && !known.into_iter().any(|(e, c)| filter.fits(e, c)) {
                let names: Vec<&str> = experiments.iter().map(|e| e.about().name).collect();
                bail!(
                    "nothing to measure is called {filter}; there are {} (`lab bench --list` shows their cases)",
                    names.join(", ")
                );
            }
        }
        Ok(())
    }
}

impl Wish {
    fn asks(&self, experiment: &str, case: &str) -> bool {
        self.only.is_empty() || self.only.iter().any(|f| f.fits(experiment, case))
    }
}

fn entry(
    experiment: &str,
    case: Case,
    identity: Identity,
    wish: &Wish,
    lacking: &Lacking,
    kept: &Kept<'_>,
) -> Entry {
    let record = kept.of(experiment, &case.id);
    let holds = record
        .as_ref()
        .is_some_and(|record| record.outdated(&identity, kept.repeat).is_none());
    let fate = if !wish.asks(experiment, &case.id) {
        Fate::NotAsked
    } else if let Some(why) = lacking.of(case.needs) {
        Fate::Lacking(why)
    } else if holds && !wish.again {
        Fate::Kept
    } else {
        Fate::Run
    };
    let took = record
        .filter(|r| {
            r.is_good() && r.identity.machine == identity.machine && r.repeat == kept.repeat
        })
        .map(|record| record.seconds);
    Entry {
        experiment: experiment.to_owned(),
        case: case.id.clone(),
        what: case.what.clone(),
        rank: case.rank,
        seconds: took.unwrap_or(case.seconds),
        identity,
        fate,
        of: Some(case),
    }
}
