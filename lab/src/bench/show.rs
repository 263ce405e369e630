//! Rows as cells of a table, for the terminal and for the document.

use comfy_table::Table;

use super::runner::words;
use super::{About, Column, Figure, Row};
use crate::report;

/// A table's heads and cells. Columns of figures that no row has are left out; a last one says what went wrong, where
/// something did.
pub struct Cells {
    /// The headings.
    pub heads: Vec<String>,
    /// Whether a column holds numbers.
    pub numbers: Vec<bool>,
    /// A line for each row.
    pub lines: Vec<Vec<String>>,
}

impl Cells {
    /// The rows of an experiment.
    pub fn of(about: &About, rows: &[&Row]) -> Self {
        let mut cells = Self {
            heads: Vec::new(),
            numbers: Vec::new(),
            lines: vec![Vec::new(); rows.len()],
        };
        for column in about.columns {
            match column {
                Column::Label { key, head } => {
                    cells.add(
                        head,
                        false,
                        rows.iter().map(|row| row.label(key).to_owned()),
                    );
                }
                Column::Figure {
                    key,
                    head,
                    decimals,
                    ..
                } if rows.iter().any(|row| row.figures.contains_key(*key)) => {
                    let shown = |row: &&Row| row.figures.get(*key).map(|f| figure(f, *decimals));
                    let shown = rows.iter().map(|row| shown(row).unwrap_or_default());
                    cells.add(head, true, shown);
                }
                Column::Figure { .. } => {}
            }
        }
        let verdicts: Vec<Option<String>> = rows.iter().map(|row| words(&row.verdict)).collect();
        if verdicts.iter().any(Option::is_some) {
            let shown = verdicts
                .into_iter()
                .map(|words| words.unwrap_or("good".to_owned()));
            cells.add("verdict", false, shown);
        }
        cells
    }

    /// Adds a column.
    pub fn add(&mut self, head: &str, number: bool, values: impl IntoIterator<Item = String>) {
        self.heads.push(head.to_owned());
        self.numbers.push(number);
        for (line, value) in self.lines.iter_mut().zip(values) {
            line.push(value);
        }
    }

    /// For the terminal.
    pub fn table(&self) -> Table {
        let heads: Vec<&str> = self.heads.iter().map(String::as_str).collect();
        let mut table = report::table(&heads);
        for (column, number) in table.column_iter_mut().zip(&self.numbers) {
            column.set_cell_alignment(if *number {
                comfy_table::CellAlignment::Right
            } else {
                comfy_table::CellAlignment::Left
            });
        }
        for line in &self.lines {
            table.add_row(line);
        }
        table
    }
}

/// `1.18 (1.13 to 1.34)` where it was measured repeatedly, else the figure alone.
pub fn figure(figure: &Figure, decimals: usize) -> String {
    let spread = &figure.spread;
    if figure.runs > 1 {
        format!(
            "{:.decimals$} ({:.decimals$} to {:.decimals$})",
            spread.median, spread.min, spread.max
        )
    } else {
        format!("{:.decimals$}", spread.median)
    }
}
