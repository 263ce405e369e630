//! What all tables have: rows of values with a checksum each, and the access to them that every database gives.

use std::path::Path;

use rusqlite::types::Value;

use crate::catalog_error::CatalogError;

/// Errors of a row.
#[derive(Debug)]
pub enum RowError {
    /// An SQLite error.
    Sql(rusqlite::Error),
    /// An error of a database server, and whether it can help to try again.
    #[cfg_attr(not(feature = "postgres"), expect(dead_code))]
    Server(String, bool),
    /// The row is corrupt.
    Damaged(String),
    /// The change conflicts with existing rows; a message for the user.
    Conflict(String),
}

impl RowError {
    /// Adds what was being done, and the database file.
    pub fn at(self, doing: &'static str, path: &Path) -> CatalogError {
        let path = path.to_path_buf();
        match self {
            RowError::Damaged(what) => CatalogError::Damaged { path, what },
            RowError::Sql(error) if means_damage(&error) => CatalogError::Damaged {
                path,
                what: error.to_string(),
            },
            RowError::Sql(error) => CatalogError::Sql { doing, path, error },
            RowError::Conflict(message) => CatalogError::Conflict(message),
            RowError::Server(..) => self.at_server(doing, &path.display().to_string()),
        }
    }

    /// Adds what was being done, and the database server.
    pub fn at_server(self, doing: &'static str, server: &str) -> CatalogError {
        let server = server.to_owned();
        let (why, retry) = match self {
            RowError::Conflict(message) => return CatalogError::Conflict(message),
            RowError::Damaged(what) => return CatalogError::Altered { server, what },
            RowError::Server(why, retry) => (why, retry),
            RowError::Sql(error) => (error.to_string(), false),
        };
        CatalogError::Server {
            doing,
            server,
            why,
            retry,
        }
    }
}

impl From<rusqlite::Error> for RowError {
    fn from(e: rusqlite::Error) -> Self {
        RowError::Sql(e)
    }
}

/// The tables of a database, within a transaction. The first of the columns of a table is its key.
pub trait Tables {
    /// The values of these columns in all rows, or in those whose column is equal to a value; by key. Each is intact or
    /// damaged; what is after a damaged one may be missing.
    fn select(
        &self,
        table: &'static str,
        columns: &[&'static str],
        only: Option<(&'static str, &Value)>,
    ) -> Result<Vec<Result<Vec<Value>, RowError>>, RowError>;

    /// Inserts a row, replacing the one with the same key.
    fn replace(
        &self,
        table: &'static str,
        columns: &[&'static str],
        values: Vec<Value>,
    ) -> Result<(), RowError>;

    /// Deletes the row with this key.
    fn delete(
        &self,
        table: &'static str,
        key_column: &'static str,
        key: &Value,
    ) -> Result<(), RowError>;
}

/// The column after those of [`Row::COLUMNS`], with the checksum of their values.
pub const SUM: &str = "sum";

/// A row of a table, as column values; the first column is the key.
pub trait Row: Sized {
    /// The table's name.
    const TABLE: &'static str;
    /// The columns except `sum`.
    const COLUMNS: &'static [&'static str];
    /// How many of them schema 1 had: the first.
    const FIRST: usize = Self::COLUMNS.len();

    /// The values of [`Row::COLUMNS`], in order.
    fn values(&self) -> Vec<Value>;

    /// Builds a row from these values; `None` if they are invalid.
    fn of(values: &[Value]) -> Option<Self>;

    /// The values for a row of schema 1 in the columns after [`Row::FIRST`].
    fn added() -> Vec<Value> {
        Vec::new()
    }

    /// The row's checksum.
    fn sum(&self) -> i64 {
        checksum(Self::TABLE, &self.values())
    }

    /// The row whose `column` is `value`.
    fn find(c: &dyn Tables, column: &'static str, value: &Value) -> Result<Option<Self>, RowError> {
        let found = c.select(Self::TABLE, &columns::<Self>(), Some((column, value)))?;
        found.into_iter().next().map(read).transpose()
    }

    /// The row with this key.
    fn get(c: &dyn Tables, key: &str) -> Result<Option<Self>, RowError> {
        Self::find(c, Self::COLUMNS[0], &Value::Text(key.into()))
    }

    /// All rows, by key. Stops at the first damaged one.
    fn all(c: &dyn Tables) -> Result<Vec<Self>, RowError> {
        Self::each(c)?.into_iter().collect()
    }

    /// All rows that the database yields, by key, each intact or damaged.
    fn each(c: &dyn Tables) -> Result<Vec<Result<Self, RowError>>, RowError> {
        let found = c.select(Self::TABLE, &columns::<Self>(), None)?;
        Ok(found.into_iter().map(read).collect())
    }
}

/// All columns of a table.
pub fn columns<R: Row>() -> Vec<&'static str> {
    [R::COLUMNS, &[SUM]].concat()
}

/// Reads a row and verifies its checksum.
fn read<R: Row>(values: Result<Vec<Value>, RowError>) -> Result<R, RowError> {
    let damaged = || RowError::Damaged(format!("a row of {} has a wrong checksum", R::TABLE));
    let mut values = values?;
    let Some(Value::Integer(sum)) = values.pop() else {
        return Err(damaged());
    };
    if checksum(R::TABLE, &values) != sum {
        return Err(damaged());
    }
    R::of(&values).ok_or_else(damaged)
}

/// The first eight bytes of the BLAKE3 of the table's name and the values, each with its type and length.
pub fn checksum(table: &str, values: &[Value]) -> i64 {
    let mut hasher = blake3::Hasher::new();
    let mut field = |kind: u8, bytes: &[u8]| {
        hasher.update(&[kind]);
        hasher.update(&(bytes.len() as u64).to_le_bytes());
        hasher.update(bytes);
    };
    field(b't', table.as_bytes());
    for value in values {
        match value {
            Value::Null => field(b'0', &[]),
            Value::Integer(i) => field(b'i', &i.to_le_bytes()),
            Value::Real(r) => field(b'r', &r.to_le_bytes()),
            Value::Text(t) => field(b's', t.as_bytes()),
            Value::Blob(b) => field(b'b', b),
        }
    }
    let hash = hasher.finalize();
    i64::from_le_bytes(
        hash.as_bytes()[..8]
            .try_into()
            .expect("a hash has 32 bytes"),
    )
}

/// Whether this error, met during use, means that the file's content is damaged.
fn means_damage(e: &rusqlite::Error) -> bool {
    matches!(
        e.sqlite_error_code(),
        Some(rusqlite::ErrorCode::DatabaseCorrupt | rusqlite::ErrorCode::NotADatabase)
    )
}
