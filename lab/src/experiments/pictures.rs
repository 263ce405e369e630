//! Plots from rows: which labels group and which tell series apart.

use super::lines::REFERENCE;
use crate::bench::{Axis, Kind, Plot, Point, Row, Verdict};

/// What is written on a plot with bars.
pub struct Words<'a> {
    /// The stem of its files.
    pub name: &'a str,
    /// What it shows.
    pub title: String,
    /// The vertical axis.
    pub y: Axis,
}

/// The different values of a label, in the order in which rows have them.
pub fn values(rows: &[&Row], key: &str) -> Vec<String> {
    let mut values: Vec<String> = Vec::new();
    for row in rows {
        let value = row.label(key);
        if !value.is_empty() && !values.iter().any(|v| v == value) {
            values.push(value.to_owned());
        }
    }
    values
}

/// The link at which plots of one link are drawn: the reference, or the first that was measured.
pub fn shown_link(links: &[String]) -> Option<&str> {
    let reference = REFERENCE.describe();
    let link = links.iter().find(|link| **link == reference);
    link.or(links.first()).map(String::as_str)
}

/// The rows that went well and whose label has the value.
pub fn only<'a>(rows: &[&'a Row], key: &str, value: &str) -> Vec<&'a Row> {
    let fits = |row: &&Row| row.verdict == Verdict::Good && row.label(key) == value;
    rows.iter().copied().filter(fits).collect()
}

/// Bars in groups by one label, with a series for each value of another; none without a value.
pub fn bars(
    rows: &[&Row],
    group: &str,
    series: &str,
    figure: &str,
    words: Words<'_>,
) -> Option<Plot> {
    let good: Vec<&Row> = rows
        .iter()
        .copied()
        .filter(|row| row.verdict == Verdict::Good && row.value(figure).is_some())
        .collect();
    if good.is_empty() {
        return None;
    }
    let groups = values(&good, group);
    let of = |series_value: &str| -> Vec<Option<f64>> {
        let rows = only(&good, series, series_value);
        groups
            .iter()
            .map(|g| only(&rows, group, g).first()?.value(figure))
            .collect()
    };
    let all = values(&good, series)
        .into_iter()
        .map(|value| {
            let bars = of(&value);
            (value, bars)
        })
        .collect();
    Some(Plot {
        name: words.name.to_owned(),
        title: words.title,
        x: Axis::linear(""),
        y: words.y,
        kind: Kind::Bars {
            groups,
            series: all,
            stacked: false,
        },
    })
}

/// One bar a row, named by its label.
pub fn ranking(
    rows: &[&Row],
    label: &str,
    value: impl Fn(&Row) -> Option<f64>,
    words: Words<'_>,
) -> Option<Plot> {
    let bars: Vec<(String, f64)> = rows
        .iter()
        .filter(|row| row.verdict == Verdict::Good)
        .filter_map(|row| Some((row.label(label).to_owned(), value(row)?)))
        .collect();
    if bars.is_empty() {
        return None;
    }
    let (groups, values) = bars.into_iter().map(|(g, v)| (g, Some(v))).unzip();
    Some(Plot {
        name: words.name.to_owned(),
        title: words.title,
        x: Axis::linear(""),
        y: words.y.clone(),
        kind: Kind::Bars {
            groups,
            series: vec![(words.y.label, values)],
            stacked: false,
        },
    })
}

/// The running sum of a figure over rows in their order, a line for each value of a label; a line ends before the
/// first row without the figure.
pub fn cumulated(
    rows: &[&Row],
    order: (&str, &[String]),
    series: &str,
    figure: &str,
    x: Axis,
    words: Words<'_>,
) -> Option<Plot> {
    let mut lines = Vec::new();
    for value in values(rows, series) {
        let own = only(rows, series, &value);
        let mut sum = 0.0;
        let mut points = Vec::new();
        for (index, step) in order.1.iter().enumerate() {
            let here = only(&own, order.0, step);
            let Some(more) = here.first().and_then(|row| row.value(figure)) else {
                break;
            };
            sum += more;
            points.push(Point {
                x: (index + 1) as f64,
                y: sum,
                range: None,
            });
        }
        if !points.is_empty() {
            lines.push((value, points));
        }
    }
    (!lines.is_empty()).then(|| Plot {
        name: words.name.to_owned(),
        title: words.title,
        x,
        y: words.y,
        kind: Kind::Lines(lines),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words() -> Words<'static> {
        Words {
            name: "x",
            title: String::new(),
            y: Axis::linear("MB"),
        }
    }

    fn row(by: &str, image: &str, value: f64) -> Row {
        Row::new([("by", by.to_owned()), ("image", image.to_owned())]).with("mb", value)
    }

    #[test]
    fn what_is_missing_or_bad_has_no_bar_and_ends_a_line() {
        let mut rows = vec![
            row("a", "one", 1.0),
            row("a", "two", 2.0),
            row("b", "two", 5.0),
        ];
        let mut wrong = row("b", "one", 9.0);
        wrong.verdict = Verdict::Wrong(String::new());
        rows.push(wrong);
        let rows: Vec<&Row> = rows.iter().collect();
        let plot = bars(&rows, "image", "by", "mb", words()).unwrap();
        let Kind::Bars { groups, series, .. } = plot.kind else {
            panic!("not bars")
        };
        assert_eq!(groups, ["one", "two"]);
        assert_eq!(series[0], ("a".to_owned(), vec![Some(1.0), Some(2.0)]));
        assert_eq!(series[1], ("b".to_owned(), vec![None, Some(5.0)]));

        let order = ["one".to_owned(), "two".to_owned()];
        let plot = cumulated(
            &rows,
            ("image", &order),
            "by",
            "mb",
            Axis::linear(""),
            words(),
        )
        .unwrap();
        let Kind::Lines(lines) = plot.kind else {
            panic!("not lines")
        };
        assert_eq!(lines.len(), 1);
        let ys: Vec<f64> = lines[0].1.iter().map(|p| p.y).collect();
        assert_eq!(ys, [1.0, 3.0]);
        assert!(bars(&[], "image", "by", "mb", words()).is_none());
    }
}
