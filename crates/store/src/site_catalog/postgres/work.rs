//! The work table, beside that of the nodes. Whoever takes a unit locks its row, and skips rows that others are taking.

use std::time::Duration;

use rusqlite::types::Value;

use super::listen::CHANNEL;
use super::nodes::{ServerTable, must_be_in, number, rows_of, text, word};
use crate::catalog_error::Result;
use crate::nodes::{
    JobInfo, MAX_JOBS, MAX_ORDER_BYTES, MAX_SAID_BYTES, MAX_UNITS, TakenUnit, Unit, UnitInfo,
    UnitState,
};
use crate::site_catalog::table::RowError;

/// The database's time in milliseconds.
const NOW: &str = "CAST(EXTRACT(EPOCH FROM clock_timestamp()) * 1000 AS BIGINT)";

/// Whether a node is running.
const IS_IN: &str = "state IN ('serving', 'draining')";

fn millis(time: Duration) -> Value {
    Value::Integer(i64::try_from(time.as_millis()).unwrap_or(i64::MAX))
}

fn bytes(row: &[Value], column: usize) -> Vec<u8> {
    match row.get(column) {
        Some(Value::Blob(bytes)) => bytes.clone(),
        _ => Vec::new(),
    }
}

fn state(row: &[Value], column: usize) -> Result<UnitState, RowError> {
    let unknown = || RowError::Damaged("a unit of work has an unknown state".into());
    UnitState::of(&word(row, column)).ok_or_else(unknown)
}

/// A unit from its first four columns.
fn unit(row: &[Value]) -> Result<Unit, RowError> {
    Ok(Unit {
        job: word(row, 0),
        nth: number(row, 1),
        state: state(row, 2)?,
        token: word(row, 3),
    })
}

impl ServerTable {
    /// See [`crate::nodes::Nodes::begin_job`].
    pub fn begin_job(
        &self,
        id: &str,
        order: &[u8],
        items: &[Vec<u8>],
        term: Duration,
    ) -> Result<()> {
        let too_large = |bytes: &[u8]| bytes.len() > MAX_ORDER_BYTES;
        self.alone_with("entering a job", |open| {
            if items.len() > MAX_UNITS || too_large(order) || items.iter().any(|i| too_large(i)) {
                return Err(RowError::Conflict("the job is too large".into()));
            }
            open.execute(&format!("DELETE FROM jobs WHERE ends_ms < {NOW}"))?;
            let count = rows_of(open, "SELECT count(*) FROM jobs", Vec::new())?;
            if count.first().map_or(0, |row| number(row, 0)) >= MAX_JOBS as i64 {
                let text = "too many flocks are being sent by this site's nodes; try again later";
                return Err(RowError::Conflict(text.into()));
            }
            let sql = format!("INSERT INTO jobs VALUES ($1, $2, $3, {NOW}, {NOW} + $3)");
            let values = vec![text(id), Value::Blob(order.to_vec()), millis(term)];
            rows_of(open, &sql, values)?;
            for (nth, item) in items.iter().enumerate() {
                let sql = "INSERT INTO units VALUES ($1, $2, $3, 'waiting', '', '', $4)";
                let nth = Value::Integer(nth as i64);
                let values = vec![
                    text(id),
                    nth,
                    Value::Blob(item.clone()),
                    Value::Blob(Vec::new()),
                ];
                rows_of(open, sql, values)?;
            }
            // Delivered when it is committed.
            open.execute(&format!("NOTIFY {CHANNEL}, 'work'"))?;
            Ok((true, ()))
        })
    }

    /// See [`crate::nodes::Nodes::take_unit`].
    pub fn take_unit(
        &self,
        token: &str,
        doing: &[(String, i64)],
        full: &[String],
    ) -> Result<Option<TakenUnit>> {
        self.alone_with("taking a unit of work", |open| {
            must_be_in(open, token)?;
            let waiting = format!(
                "SELECT u.job, u.nth, u.state, u.token, CAST(EXISTS (SELECT 1 FROM nodes n WHERE n.token = u.token AND n.{IS_IN}) AS INT)::BIGINT
                 FROM units u JOIN jobs j ON j.id = u.job WHERE u.state IN ('waiting', 'taken') AND j.ends_ms >= {NOW}
                 ORDER BY j.begun_ms, u.job, u.nth"
            );
            for row in rows_of(open, &waiting, Vec::new())? {
                let is_in = number(&row, 4) != 0;
                let found = unit(&row)?;
                if full.contains(&found.job) || !found.is_free(token, doing, is_in) {
                    continue;
                }
                // Another node may be taking it at this moment, or may have.
                let at = vec![text(&found.job), Value::Integer(found.nth)];
                let locked = "SELECT job, nth, state, token, item FROM units WHERE job = $1 AND nth = $2 FOR UPDATE SKIP LOCKED";
                let locked = rows_of(open, locked, at.clone())?;
                let Some(row) = locked.first() else { continue };
                let mut now = unit(row)?;
                if now != found {
                    continue;
                }
                now.take(token);
                let nodes = format!("SELECT name, token, state FROM nodes WHERE {IS_IN} ORDER BY name");
                let nodes = rows_of(open, &nodes, Vec::new())?;
                let own = nodes.iter().position(|node| word(node, 1) == token);
                let name = own.map_or_else(String::new, |own| word(&nodes[own], 0));
                let values = vec![text(now.state.as_str()), text(token), text(&name), Value::Blob(Vec::new())];
                let sql = "UPDATE units SET state = $3, token = $4, node = $5, said = $6 WHERE job = $1 AND nth = $2";
                rows_of(open, sql, [at, values].concat())?;
                let order = "SELECT terms FROM jobs WHERE id = $1";
                let order = rows_of(open, order, vec![text(&now.job)])?;
                let taken = TakenUnit {
                    order: order.first().map(|row| bytes(row, 0)).unwrap_or_default(),
                    nth: now.nth,
                    item: bytes(row, 4),
                    nodes: (nodes.len(), own.unwrap_or(0)),
                    job: now.job,
                };
                return Ok((true, Some(taken)));
            }
            Ok((false, None))
        })
    }

    /// See [`crate::nodes::Nodes::say_unit`].
    pub fn say_unit(
        &self,
        token: &str,
        at: (&str, i64),
        state: UnitState,
        said: &[u8],
    ) -> Result<bool> {
        self.alone_with("telling of a unit of work", |open| {
            if said.len() > MAX_SAID_BYTES {
                let text = "what is told of an image that is sent is too long";
                return Err(RowError::Conflict(text.into()));
            }
            must_be_in(open, token)?;
            let key = vec![text(at.0), Value::Integer(at.1)];
            let sql = format!(
                "SELECT u.job, u.nth, u.state, u.token FROM units u JOIN jobs j ON j.id = u.job
                 WHERE u.job = $1 AND u.nth = $2 AND j.ends_ms >= {NOW} FOR UPDATE OF u"
            );
            let found = rows_of(open, &sql, key.clone())?;
            let Some(row) = found.first() else {
                return Ok((false, false));
            };
            let mut unit = unit(row)?;
            if !unit.say(token, state) {
                return Ok((false, false));
            }
            let values = vec![text(unit.state.as_str()), Value::Blob(said.to_vec())];
            let sql = "UPDATE units SET state = $3, said = $4 WHERE job = $1 AND nth = $2";
            rows_of(open, sql, [key, values].concat())?;
            Ok((true, true))
        })
    }

    /// See [`crate::nodes::Nodes::watch_job`].
    pub fn watch_job(&self, id: &str) -> Result<Option<JobInfo>> {
        self.alone_with("looking at a job", |open| {
            let sql = format!(
                "UPDATE jobs SET ends_ms = {NOW} + term_ms WHERE id = $1 RETURNING term_ms"
            );
            if rows_of(open, &sql, vec![text(id)])?.is_empty() {
                return Ok((false, None));
            }
            let sql = "SELECT nth, state, node, said FROM units WHERE job = $1 ORDER BY nth";
            let units = rows_of(open, sql, vec![text(id)])?;
            let units = units.iter().map(|row| {
                Ok(UnitInfo {
                    nth: number(row, 0),
                    state: state(row, 1)?,
                    node: word(row, 2),
                    said: bytes(row, 3),
                })
            });
            let units = units.collect::<Result<Vec<_>, RowError>>()?;
            let count = format!("SELECT count(*) FROM nodes WHERE {IS_IN} AND ends_ms >= {NOW}");
            let count = rows_of(open, &count, Vec::new())?;
            let nodes = count.first().map_or(0, |row| number(row, 0));
            let nodes = usize::try_from(nodes).unwrap_or(0);
            Ok((true, Some(JobInfo { units, nodes })))
        })
    }

    /// See [`crate::nodes::Nodes::end_job`].
    pub fn end_job(&self, id: &str) -> Result<()> {
        self.alone_with("ending a job", |open| {
            rows_of(open, "DELETE FROM jobs WHERE id = $1", vec![text(id)])?;
            Ok((true, ()))
        })
    }
}
