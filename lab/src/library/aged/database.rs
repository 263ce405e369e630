//! A database that ran: the machine's own server, started in it, loaded with seeded SQL and stopped cleanly.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::Result;

use super::SEED;
use crate::library::cache::Cache;
use crate::library::jail;

const LIMIT: Duration = Duration::from_secs(600);
/// Rows that a round inserts; half as many are then updated and a quarter deleted, over all rounds' rows.
const ROWS: u64 = 12_000;

/// Which server a machine has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Server {
    MariaDb,
    Postgres,
}

const MARIADB: &str = r#"
    install -d -o mysql -g mysql /run/mysqld
    at=--socket=/run/mysqld/lab.sock
    mariadbd --user=mysql --skip-networking $at --pid-file=/run/mysqld/lab.pid >/run/server.log 2>&1 &
    server=$!
    ready=no
    for try in $(seq 150); do
        if mariadb-admin $at ping >/dev/null 2>&1; then ready=yes; break; fi
        if ! kill -0 $server 2>/dev/null; then break; fi
        sleep 0.2
    done
    if [ $ready = no ]; then tail -n 3 /run/server.log >&2; exit 1; fi
    mariadb $at -e 'CREATE DATABASE IF NOT EXISTS shop'
    mariadb $at shop
    mariadb $at -N -e 'SELECT COUNT(*) FROM orders' shop
    mariadb-admin $at shutdown
    wait $server
"#;

const POSTGRES: &str = r#"
    version=$(ls /etc/postgresql | head -n 1)
    install -d -o postgres -g postgres -m 2775 /run/postgresql
    pg_ctlcluster --skip-systemctl-redirect "$version" main start >&2
    runuser -u postgres -- psql -q -v ON_ERROR_STOP=1 postgres
    runuser -u postgres -- psql -At -c 'SELECT COUNT(*) FROM orders' postgres
    pg_ctlcluster --skip-systemctl-redirect "$version" main stop -m fast >&2
"#;

/// Runs one round; says what was done, nothing where the machine has no database.
///
/// # Errors
/// When the server does not start or a statement fails.
pub fn run(cache: &Cache, root: &Path, debs: &Path, round: u64) -> Result<Option<String>> {
    let (server, script) = match server_of(root) {
        None => return Ok(None),
        Some(Server::MariaDb) => ("mariadb", MARIADB),
        Some(Server::Postgres) => ("postgresql", POSTGRES),
    };
    let statements = cache.work.join("load.sql");
    fs::write(&statements, sql(round))?;
    let mut command = jail::inside(root, debs, LIMIT, script);
    let output = jail::run(server, &mut command, Some(&statements));
    fs::remove_file(&statements)?;
    let rows = String::from_utf8_lossy(&output?.stdout).trim().to_owned();
    Ok(Some(format!(
        "{server} ran: {ROWS} rows inserted, {} updates, {} deletes, {rows} rows left",
        ROWS / 2,
        ROWS / 4
    )))
}

fn server_of(root: &Path) -> Option<Server> {
    if root.join("usr/sbin/mariadbd").exists() {
        return Some(Server::MariaDb);
    }
    let has_cluster =
        fs::read_dir(root.join("etc/postgresql")).is_ok_and(|mut d| d.next().is_some());
    has_cluster.then_some(Server::Postgres)
}

/// A round's statements, the same for every server and every run.
fn sql(round: u64) -> String {
    const WORDS: &[&str] = &[
        "ship",
        "before",
        "noon",
        "fragile",
        "gift",
        "paid",
        "return",
        "warehouse",
        "north",
        "courier",
    ];
    let mut rng = fastrand::Rng::with_seed(SEED + round);
    let note = |rng: &mut fastrand::Rng| {
        let mut note = format!("{:012x}", rng.u64(..) >> 16);
        for _ in 0..rng.usize(8..40) {
            note.push(' ');
            note.push_str(WORDS[rng.usize(..WORDS.len())]);
        }
        note
    };
    let mut out = String::from(
        "CREATE TABLE IF NOT EXISTS orders (id INT PRIMARY KEY, customer VARCHAR(40), amount INT, note VARCHAR(500));\n",
    );
    if round == 0 {
        out.push_str("CREATE INDEX by_customer ON orders (customer);\n");
    }
    let first = round * ROWS;
    for batch in 0..ROWS / 100 {
        out.push_str("INSERT INTO orders VALUES\n");
        for row in 0..100 {
            let id = first + batch * 100 + row;
            let (customer, amount) = (rng.u32(0..3000), rng.u32(100..100_000));
            let end = if row == 99 { ";" } else { "," };
            let text = note(&mut rng);
            let _ = writeln!(
                out,
                "({id}, 'customer {customer}', {amount}, '{text}'){end}"
            );
        }
    }
    for change in 0..ROWS / 2 {
        if change % 100 == 0 {
            out.push_str("BEGIN;\n");
        }
        let (id, text) = (rng.u64(0..first + ROWS), note(&mut rng));
        let amount = rng.u32(100..100_000);
        let _ = writeln!(
            out,
            "UPDATE orders SET amount = {amount}, note = '{text}' WHERE id = {id};"
        );
        if change % 2 == 0 {
            let gone = rng.u64(0..first + ROWS);
            let _ = writeln!(out, "DELETE FROM orders WHERE id = {gone};");
        }
        if change % 100 == 99 {
            out.push_str("COMMIT;\n");
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_are_the_same_every_time_and_differ_from_each_other() {
        assert_eq!(sql(0), sql(0));
        assert_ne!(sql(0), sql(1));
        let text = sql(1);
        let count = |word: &str| text.lines().filter(|l| l.starts_with(word)).count();
        assert_eq!(count("INSERT"), 120);
        assert_eq!((count("UPDATE"), count("DELETE")), (6000, 3000));
        assert_eq!(count("BEGIN"), count("COMMIT"));
    }

    #[test]
    fn a_machine_without_a_server_has_no_database() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(server_of(dir.path()), None);
        fs::create_dir_all(dir.path().join("etc/postgresql/15")).unwrap();
        assert_eq!(server_of(dir.path()), Some(Server::Postgres));
    }
}
