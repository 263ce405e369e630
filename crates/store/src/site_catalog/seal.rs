//! The seal of the catalog, and changes that maintain it.

use rusqlite::types::Value;

use super::table::{Row, RowError, SUM, Tables, checksum, columns};

/// The table of the seal, and its columns except `sum`; the first is 1 in its only row.
pub const TABLE: &str = "seal";
const COLUMNS: [&str; 5] = ["id", "schema", "revision", "rows", "content"];

/// The row that covers all others: their number and the sum of their checksums.
///
/// It detects a row that vanishes or reappears, even where the database finds nothing wrong.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Seal {
    /// The schema version, as in `user_version`.
    pub schema: i64,
    /// Incremented with every change: the newer of two copies has the higher one.
    pub revision: i64,
    /// Number of rows in all tables.
    pub rows: i64,
    /// Sum of their checksums.
    pub content: i64,
    changed: bool,
}

impl Seal {
    fn values(&self) -> Vec<Value> {
        [self.schema, self.revision, self.rows, self.content]
            .map(Value::Integer)
            .to_vec()
    }

    /// The seal of an empty database.
    pub fn blank() -> Seal {
        Seal {
            schema: 0,
            revision: 0,
            rows: 0,
            content: 0,
            changed: false,
        }
    }

    /// Reads and verifies the seal.
    pub fn load(c: &dyn Tables) -> Result<Seal, RowError> {
        let columns = [&COLUMNS[1..], &[SUM]].concat();
        let found = c.select(TABLE, &columns, Some((COLUMNS[0], &Value::Integer(1))))?;
        let damaged = |what: &str| RowError::Damaged(what.into());
        let values = found.into_iter().next();
        let values = values.ok_or_else(|| damaged("its seal is missing"))??;
        let mut numbers = [0; 5];
        for (number, value) in numbers.iter_mut().zip(&values) {
            let Value::Integer(value) = value else {
                return Err(damaged("its seal has no numbers"));
            };
            *number = *value;
        }
        let [schema, revision, rows, content, sum] = numbers;
        let seal = Seal {
            schema,
            revision,
            rows,
            content,
            changed: false,
        };
        if checksum(TABLE, &seal.values()) != sum {
            return Err(damaged("its seal has a wrong checksum"));
        }
        Ok(seal)
    }

    /// Whether rows have changed since it was read.
    pub fn changed(&self) -> bool {
        self.changed
    }

    /// Increments the revision and writes the seal.
    pub fn store(&mut self, tx: &dyn Tables) -> Result<(), RowError> {
        self.revision += 1;
        let mut values = vec![Value::Integer(1)];
        values.extend(self.values());
        values.push(Value::Integer(checksum(TABLE, &self.values())));
        tx.replace(TABLE, &[&COLUMNS[..], &[SUM]].concat(), values)
    }

    /// Adds a row.
    pub fn add(&mut self, sum: i64) {
        self.rows += 1;
        self.content = self.content.wrapping_add(sum);
        self.changed = true;
    }

    /// Inserts a row, replacing and returning the one with the same key.
    pub fn put<R: Row>(&mut self, tx: &dyn Tables, row: &R) -> Result<Option<R>, RowError> {
        let mut values = row.values();
        let old = match &values[0] {
            Value::Text(key) => self.take::<R>(tx, key)?,
            _ => None,
        };
        let sum = row.sum();
        values.push(Value::Integer(sum));
        tx.replace(R::TABLE, &columns::<R>(), values)?;
        self.add(sum);
        Ok(old)
    }

    /// Removes and returns the row with this key.
    pub fn take<R: Row>(&mut self, tx: &dyn Tables, key: &str) -> Result<Option<R>, RowError> {
        let Some(old) = R::get(tx, key)? else {
            return Ok(None);
        };
        tx.delete(R::TABLE, R::COLUMNS[0], &Value::Text(key.into()))?;
        self.rows -= 1;
        self.content = self.content.wrapping_sub(old.sum());
        self.changed = true;
        Ok(Some(old))
    }
}
