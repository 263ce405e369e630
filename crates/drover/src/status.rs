//! `status`: what the running site of a home does.

use anyhow::{Result, bail};
use drover_agent::home::Home;
use drover_agent::remote::Call;
use drover_agent::text::{clean, moment};
use drover_teleport::protocol::Request;
use serde_json::{Value, json};

use crate::cli::StatusArgs;
use crate::out;

/// Prints the status of the site of this home.
///
/// # Errors
/// When none runs, or it does not answer.
pub async fn status(home: &Home, args: StatusArgs) -> Result<()> {
    let Some(call) = Call::local(home).await? else {
        if args.json {
            out::json(&json!({"running": false, "home": home.dir()}))?;
        }
        bail!(
            "no site is running in {}; `drover serve` runs it",
            home.dir().display()
        );
    };
    let request = match args.metrics {
        true => Request::Metrics,
        false => Request::Status,
    };
    let text = call.text(&request).await?;
    if args.json || args.metrics {
        return out::line(text.trim_end());
    }
    let status: Value = serde_json::from_str(&text)?;
    out::line(&for_people(&status))
}

/// The status as lines, transfers as a table.
fn for_people(status: &Value) -> String {
    let text = |key: &str| clean(status[key].as_str().unwrap_or("-"));
    let number = |key: &str| status[key].as_i64().unwrap_or(0);
    let addresses: Vec<&str> = status["addresses"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(Value::as_str)
        .collect();
    let mut lines = vec![
        format!(
            "{} {} (drover {}, process {})",
            text("duty"),
            text("name"),
            text("version"),
            number("process")
        ),
        format!("key        {}", text("key")),
        format!("home       {}", text("home")),
        format!("addresses  {}", clean(&addresses.join(", "))),
        format!("since      {} UTC", moment(number("started_unix"))),
        format!(
            "images {}, peers {}, connections {}, sessions {}",
            number("images"),
            number("peers"),
            number("connections_open"),
            number("sessions_open")
        ),
    ];
    let mut rest = Vec::new();
    walk("", &status["site"], &mut rest, &mut lines);
    lines.extend(rest);
    lines.join("\n")
}

/// Nested objects as `path  value` lines, lists of objects as tables.
fn walk(path: &str, value: &Value, lines: &mut Vec<String>, tables: &mut Vec<String>) {
    match value {
        Value::Null => {}
        Value::Object(fields) => {
            for (key, value) in fields {
                // Said above, or counts that only a graph makes sense of.
                if path.is_empty() && matches!(key.as_str(), "images" | "sessions" | "matcher") {
                    continue;
                }
                let path = if path.is_empty() {
                    key.clone()
                } else {
                    format!("{path} {key}")
                };
                walk(&path.replace('_', " "), value, lines, tables);
            }
        }
        Value::Array(items) => {
            for item in items {
                if let Some([Value::String(key), value]) = item.as_array().map(Vec::as_slice) {
                    walk(&format!("{path} {}", clean(key)), value, lines, tables);
                }
            }
            let Some(Value::Object(first)) = items.first() else {
                return;
            };
            let heading: Vec<&str> = first.keys().map(String::as_str).collect();
            let rows = items
                .iter()
                .map(|item| heading.iter().map(|&k| shown(&item[k])).collect())
                .collect();
            tables.push(format!("{path}:\n{}", out::table(&heading, rows, &[])));
        }
        plain => lines.push(format!("{path}: {}", shown(plain))),
    }
}

fn shown(value: &Value) -> String {
    match value {
        Value::String(s) => clean(s),
        other => clean(&other.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whatever_the_site_says_is_shown_harmlessly() {
        let status = json!({
            "duty": "site", "name": "a\u{1b}[31m", "version": "0.1.0", "process": 7, "key": "k", "home": "/h",
            "addresses": ["10.0.0.1:7377"], "started_unix": 0, "images": 2, "peers": 1,
            "connections_open": 0, "sessions_open": 1,
            "site": {"transfers": [{"name": "x.img\n", "done": 3, "total": 9}], "matcher": [["hits", 5]], "sent_blocks": 4},
        });
        let text = for_people(&status);
        assert!(text.contains("sent blocks: 4"), "{text}");
        assert!(text.contains("x.img\\n"), "{text}");
        assert!(
            text.contains("images 2, peers 1, connections 0, sessions 1"),
            "{text}"
        );
        assert!(!text.contains('\u{1b}'));
        for_people(&json!({}));
    }
}
