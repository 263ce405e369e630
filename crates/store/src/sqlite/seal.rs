//! The seal of the catalog, and changes that maintain it.

use rusqlite::types::Value;
use rusqlite::{Connection, Transaction};

use super::rows::{Row, RowError, checksum};

/// The row that covers all others: their number and the sum of their checksums.
///
/// It detects a row that vanishes or reappears, even where SQLite finds nothing wrong.
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
    pub fn load(c: &Connection) -> Result<Seal, RowError> {
        let (schema, revision, rows, content, sum) = c
            .prepare_cached("SELECT schema, revision, rows, content, sum FROM seal WHERE id = 1")?
            .query_row([], |r| {
                Ok((
                    r.get(0)?,
                    r.get(1)?,
                    r.get(2)?,
                    r.get(3)?,
                    r.get::<_, i64>(4)?,
                ))
            })?;
        let seal = Seal {
            schema,
            revision,
            rows,
            content,
            changed: false,
        };
        if checksum("seal", &seal.values()) != sum {
            return Err(RowError::Damaged("its seal has a wrong checksum".into()));
        }
        Ok(seal)
    }

    /// Whether rows have changed since it was read.
    pub fn changed(&self) -> bool {
        self.changed
    }

    /// Increments the revision and writes the seal.
    pub fn store(&mut self, tx: &Transaction<'_>) -> Result<(), RowError> {
        self.revision += 1;
        Ok(self.write(tx)?)
    }

    fn write(&self, tx: &Transaction<'_>) -> rusqlite::Result<()> {
        tx.execute(
            "INSERT OR REPLACE INTO seal (id, schema, revision, rows, content, sum) VALUES (1, ?1, ?2, ?3, ?4, ?5)",
            (self.schema, self.revision, self.rows, self.content, checksum("seal", &self.values())),
        )?;
        Ok(())
    }

    /// Adds a row.
    pub fn add(&mut self, sum: i64) {
        self.rows += 1;
        self.content = self.content.wrapping_add(sum);
        self.changed = true;
    }

    /// Inserts a row, replacing and returning the one with the same key.
    pub fn put<R: Row>(&mut self, tx: &Transaction<'_>, row: &R) -> Result<Option<R>, RowError> {
        let values = row.values();
        let old = match &values[0] {
            Value::Text(key) => self.take::<R>(tx, key)?,
            _ => None,
        };
        let marks: Vec<String> = (1..=values.len() + 1).map(|i| format!("?{i}")).collect();
        let sql = format!(
            "INSERT INTO {} ({}, sum) VALUES ({})",
            R::TABLE,
            R::COLUMNS.join(", "),
            marks.join(", ")
        );
        let sum = row.sum();
        let mut all = values;
        all.push(Value::Integer(sum));
        tx.prepare_cached(&sql)?
            .execute(rusqlite::params_from_iter(all))?;
        self.add(sum);
        Ok(old)
    }

    /// Removes and returns the row with this key.
    pub fn take<R: Row>(&mut self, tx: &Transaction<'_>, key: &str) -> Result<Option<R>, RowError> {
        let Some(old) = R::get(tx, key)? else {
            return Ok(None);
        };
        let sql = format!("DELETE FROM {} WHERE {} = ?1", R::TABLE, R::COLUMNS[0]);
        tx.prepare_cached(&sql)?.execute([key])?;
        self.rows -= 1;
        self.content = self.content.wrapping_sub(old.sum());
        self.changed = true;
        Ok(Some(old))
    }
}
