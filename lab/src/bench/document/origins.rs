//! Where rows come from: what stands below a table, and marks its rows.

use std::fmt::Write as _;

use crate::bench::plan::Entry;
use crate::bench::store::Record;
use crate::report::Machine;

/// When, at which commit and where an experiment's rows were measured.
pub struct Origins {
    blocks: Vec<Block>,
    /// The block of each record.
    by_record: Vec<usize>,
}

#[derive(PartialEq)]
struct Block {
    date: String,
    commit: String,
    /// The machine's number, where there are several.
    machine: Option<usize>,
    /// Why its rows may hold no longer.
    outdated: Option<&'static str>,
}

impl Origins {
    /// Of an experiment's records.
    pub fn of(records: &[(&Entry, &Record)], machines: &[Machine]) -> Self {
        let mut origins = Self {
            blocks: Vec::new(),
            by_record: Vec::new(),
        };
        for (entry, record) in records {
            let machine = machines.iter().position(|m| *m == record.identity.machine);
            let block = Block {
                date: record
                    .measured
                    .split('T')
                    .next()
                    .unwrap_or_default()
                    .to_owned(),
                commit: record.commit.clone(),
                machine: machine.filter(|_| machines.len() > 1),
                outdated: record.identity.differs(&entry.identity),
            };
            let at = origins.blocks.iter().position(|known| *known == block);
            origins.by_record.push(at.unwrap_or(origins.blocks.len()));
            if at.is_none() {
                origins.blocks.push(block);
            }
        }
        origins
    }

    /// The block of a record.
    pub fn of_record(&self, record: usize) -> usize {
        self.by_record[record]
    }

    /// Whether rows need marks: there are several blocks.
    pub fn marked(&self) -> bool {
        self.blocks.len() > 1
    }

    /// Whether some rows may hold no longer.
    pub fn some_outdated(&self) -> bool {
        self.blocks.iter().any(|block| block.outdated.is_some())
    }

    /// `a`, `b`, ..., with a dagger where the rows may hold no longer.
    pub fn mark(&self, at: usize) -> String {
        let letter = char::from(b'a' + (at % 26) as u8);
        let round = match at / 26 {
            0 => String::new(),
            round => round.to_string(),
        };
        let outdated = self.blocks[at].outdated.is_some();
        format!("{letter}{round}{}", if outdated { " †" } else { "" })
    }

    /// A line for each block.
    pub fn tell(&self, text: &mut String) {
        for (at, block) in self.blocks.iter().enumerate() {
            let mark = match self.blocks.len() {
                1 => "Measured".to_owned(),
                _ => format!("- {}: measured", self.mark(at)),
            };
            let machine = block.machine.map_or_else(String::new, |machine| {
                format!(" on machine {}", machine + 1)
            });
            let outdated = block.outdated.map_or_else(String::new, |why| {
                format!(", with {why} than the last run had")
            });
            let (date, commit) = (&block.date, &block.commit);
            _ = writeln!(text, "{mark} {date} at `{commit}`{machine}{outdated}.");
        }
        text.push('\n');
    }
}
