//! A connection in use: statements, one after the other, and the tables.

use std::cell::Cell;
use std::sync::Arc;

use rusqlite::types::Value;
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Client, Row as ServerRow};

use super::link::{Link, Server};
use super::waits::{CALL_LIMIT, wait};
use crate::site_catalog::table::{RowError, Tables};

/// A connection in use. Unless it is taken out again after success it is closed, which rolls back what it was doing.
pub struct Open {
    client: Arc<Client>,
    failed: Cell<bool>,
}

impl Open {
    pub fn new(client: Arc<Client>) -> Open {
        Open {
            client,
            failed: Cell::new(false),
        }
    }

    /// The connection, if every statement so far succeeded.
    pub fn sound(self) -> Option<Arc<Client>> {
        (!self.failed.get()).then_some(self.client)
    }

    /// Begins a transaction by a statement that has no effect if it fails.
    pub fn begin(link: &mut Link, server: &Server, sql: &str) -> Result<Open, RowError> {
        let begin = |client: Arc<Client>| {
            let open = Open::new(client);
            open.execute(sql).map(|()| open)
        };
        let (client, used_before) = link.client(server)?;
        match begin(client) {
            Err(RowError::Server(_, true)) if used_before => begin(link.client(server)?.0),
            begun => begun,
        }
    }

    pub fn execute(&self, sql: &str) -> Result<(), RowError> {
        let (client, sql) = (Arc::clone(&self.client), sql.to_owned());
        let done = wait(CALL_LIMIT, async move { client.batch_execute(&sql).await });
        self.note(done)
    }

    pub fn query(&self, sql: String, values: Vec<Value>) -> Result<Vec<ServerRow>, RowError> {
        let client = Arc::clone(&self.client);
        let found = wait(CALL_LIMIT, async move {
            let values: Vec<_> = values.iter().map(parameter).collect();
            client.query_typed(&sql, &values).await
        });
        self.note(found)
    }

    /// The answer to a question.
    pub fn is(&self, sql: String) -> Result<bool, RowError> {
        let found = self.query(sql, Vec::new())?;
        let there = found.first().map(|row| row.try_get::<_, bool>(0));
        Ok(there.is_some_and(|there| there.unwrap_or(false)))
    }

    fn note<T>(&self, done: Result<T, RowError>) -> Result<T, RowError> {
        if done.is_err() {
            self.failed.set(true);
        }
        done
    }

    /// Ends the transaction, and returns the connection.
    pub fn commit(self, changed: bool) -> Result<Arc<Client>, RowError> {
        // The server answers to the commit of a failed transaction as if all were well.
        if self.failed.get() {
            return Err(RowError::Server("a statement failed".into(), true));
        }
        if !changed {
            self.execute("ROLLBACK")?;
            return Ok(self.client);
        }
        self.execute("COMMIT").map_err(|e| match e {
            RowError::Server(why, retry) => RowError::Server(
                format!(
                    "{why}; whether the change was made is not known: look before trying again"
                ),
                retry,
            ),
            e => e,
        })?;
        Ok(self.client)
    }
}

impl Tables for Open {
    fn select(
        &self,
        table: &'static str,
        columns: &[&'static str],
        only: Option<(&'static str, &Value)>,
    ) -> Result<Vec<Result<Vec<Value>, RowError>>, RowError> {
        let listed = columns.join(", ");
        let (sql, values) = match only {
            Some((column, value)) => (
                format!("SELECT {listed} FROM {table} WHERE {column} = $1"),
                vec![value.clone()],
            ),
            None => (
                format!("SELECT {listed} FROM {table} ORDER BY {}", columns[0]),
                Vec::new(),
            ),
        };
        let found = self.query(sql, values)?;
        Ok(found.iter().map(|row| values_of(table, row)).collect())
    }

    fn replace(
        &self,
        table: &'static str,
        columns: &[&'static str],
        values: Vec<Value>,
    ) -> Result<(), RowError> {
        let marks = Vec::from_iter((1..=columns.len()).map(|n| format!("${n}")));
        let sets = columns[1..].iter().map(|c| format!("{c} = excluded.{c}"));
        let sql = format!(
            "INSERT INTO {table} ({}) VALUES ({}) ON CONFLICT ({}) DO UPDATE SET {}",
            columns.join(", "),
            marks.join(", "),
            columns[0],
            Vec::from_iter(sets).join(", ")
        );
        self.query(sql, values).map(drop)
    }

    fn delete(
        &self,
        table: &'static str,
        key_column: &'static str,
        key: &Value,
    ) -> Result<(), RowError> {
        let sql = format!("DELETE FROM {table} WHERE {key_column} = $1");
        self.query(sql, vec![key.clone()]).map(drop)
    }
}

/// A value as a parameter of a statement.
fn parameter(value: &Value) -> (&(dyn ToSql + Sync), Type) {
    match value {
        Value::Null => (&None::<i64>, Type::INT8),
        Value::Integer(i) => (i, Type::INT8),
        Value::Real(r) => (r, Type::FLOAT8),
        Value::Text(t) => (t, Type::TEXT),
        Value::Blob(b) => (b, Type::BYTEA),
    }
}

/// The values of a row.
pub(super) fn values_of(table: &'static str, row: &ServerRow) -> Result<Vec<Value>, RowError> {
    let value = |(i, column): (usize, &tokio_postgres::Column)| {
        let value = match *column.type_() {
            Type::INT8 => row.try_get::<_, Option<i64>>(i).ok()?.map(Value::Integer),
            Type::TEXT => row.try_get::<_, Option<String>>(i).ok()?.map(Value::Text),
            Type::BYTEA => row.try_get::<_, Option<Vec<u8>>>(i).ok()?.map(Value::Blob),
            _ => return None,
        };
        Some(value.unwrap_or(Value::Null))
    };
    let values = row.columns().iter().enumerate().map(value);
    values
        .collect::<Option<Vec<Value>>>()
        .ok_or_else(|| RowError::Damaged(format!("a row of {table} has a wrong value")))
}
