//! SVG plots: bar charts and line charts.

use std::fmt::Write as _;

/// A plot.
#[derive(Clone, Debug, PartialEq)]
pub struct Plot {
    /// Its title.
    pub title: String,
    x: String,
    y: String,
    kind: Kind,
}

#[derive(Clone, Debug, PartialEq)]
enum Kind {
    Bars(Vec<(String, f64)>),
    Lines(Vec<(String, Vec<(f64, f64)>)>),
}

impl Plot {
    /// A bar chart with one bar per name, in units of `unit`.
    pub fn bars(title: impl Into<String>, unit: &str, bars: Vec<(String, f64)>) -> Self {
        Self {
            title: title.into(),
            x: unit.to_owned(),
            y: String::new(),
            kind: Kind::Bars(bars),
        }
    }

    /// A line chart of points sorted by x.
    pub fn lines(
        title: impl Into<String>,
        x: &str,
        y: &str,
        lines: Vec<(String, Vec<(f64, f64)>)>,
    ) -> Self {
        Self {
            title: title.into(),
            x: x.to_owned(),
            y: y.to_owned(),
            kind: Kind::Lines(lines),
        }
    }

    /// Whether there is nothing to plot.
    pub fn is_empty(&self) -> bool {
        match &self.kind {
            Kind::Bars(bars) => bars.is_empty(),
            Kind::Lines(lines) => lines.iter().all(|(_, points)| points.is_empty()),
        }
    }
}

const WIDTH: f64 = 900.0;
const LEFT: f64 = 190.0;
const RIGHT: f64 = 70.0;
const TOP: f64 = 50.0;
/// Height of a bar, including spacing.
const BAR: f64 = 30.0;
/// Height of the area of a line chart.
const HEIGHT: f64 = 330.0;
/// A colour-blind-safe palette (Okabe and Ito).
const COLOURS: [&str; 7] = [
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#555555",
];

/// The plot as SVG.
pub fn svg(plot: &Plot) -> String {
    let mut body = String::new();
    let height = match &plot.kind {
        Kind::Bars(bars) => draw_bars(&mut body, &plot.x, bars),
        Kind::Lines(lines) => draw_lines(&mut body, plot, lines),
    };
    text(&mut body, WIDTH / 2.0, 28.0, "middle", &plot.title);
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" font-family=\"sans-serif\" font-size=\"14\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n{body}</svg>\n"
    )
}

fn draw_bars(body: &mut String, unit: &str, bars: &[(String, f64)]) -> f64 {
    let most = bars
        .iter()
        .map(|bar| bar.1)
        .fold(f64::MIN_POSITIVE, f64::max);
    for (at, (name, value)) in bars.iter().enumerate() {
        let y = TOP + BAR * at as f64;
        let width = (WIDTH - LEFT - RIGHT) * value.max(0.0) / most;
        let colour = COLOURS[usize::from(!name.starts_with("drover"))];
        let colour = if name == "limit" { COLOURS[6] } else { colour };
        text(body, LEFT - 8.0, y + 19.0, "end", name);
        _ = writeln!(
            body,
            "<rect x=\"{LEFT}\" y=\"{:.1}\" width=\"{width:.1}\" height=\"20\" fill=\"{colour}\"/>",
            y + 4.0
        );
        text(body, LEFT + width + 6.0, y + 19.0, "start", &number(*value));
    }
    let end = TOP + BAR * bars.len() as f64;
    text(
        body,
        (LEFT + WIDTH - RIGHT) / 2.0,
        end + 24.0,
        "middle",
        unit,
    );
    end + 40.0
}

fn draw_lines(body: &mut String, plot: &Plot, lines: &[(String, Vec<(f64, f64)>)]) -> f64 {
    let all = || lines.iter().flat_map(|(_, points)| points);
    let top = nice(all().map(|p| p.1).fold(f64::MIN_POSITIVE, f64::max));
    let right = nice(all().map(|p| p.0).fold(f64::MIN_POSITIVE, f64::max));
    let (left, bottom) = (80.0, TOP + HEIGHT);
    let x = |v: f64| left + (WIDTH - left - RIGHT) * v / right;
    let y = |v: f64| bottom - HEIGHT * v / top;
    for step in 0..=5 {
        let (u, v) = (right * f64::from(step) / 5.0, top * f64::from(step) / 5.0);
        let (from, to) = (x(0.0), x(right));
        _ = writeln!(
            body,
            "<path d=\"M{from:.1} {0:.1}H{to:.1}\" stroke=\"#ddd\"/>",
            y(v)
        );
        text(body, left - 8.0, y(v) + 5.0, "end", &number(v));
        text(body, x(u), bottom + 20.0, "middle", &number(u));
    }
    for (at, (name, points)) in lines.iter().enumerate() {
        let colour = COLOURS[at % COLOURS.len()];
        let path: Vec<String> = points
            .iter()
            .map(|p| format!("{:.1},{:.1}", x(p.0), y(p.1)))
            .collect();
        _ = writeln!(
            body,
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"/>",
            path.join(" ")
        );
        for p in points {
            _ = writeln!(
                body,
                "<circle cx=\"{:.1}\" cy=\"{:.1}\" r=\"3\" fill=\"{colour}\"/>",
                x(p.0),
                y(p.1)
            );
        }
        let legend = bottom + 64.0 + 20.0 * at as f64;
        _ = writeln!(
            body,
            "<path d=\"M{left} {0:.1}h24\" stroke=\"{colour}\" stroke-width=\"3\"/>",
            legend - 5.0
        );
        text(body, left + 32.0, legend, "start", name);
    }
    text(
        body,
        (left + WIDTH - RIGHT) / 2.0,
        bottom + 42.0,
        "middle",
        &plot.x,
    );
    text(body, 10.0, TOP - 12.0, "start", &plot.y);
    bottom + 64.0 + 20.0 * lines.len() as f64
}

/// The smallest number that is at least `most` and is 1, 2, 2.5 or 5 times a power of ten.
fn nice(most: f64) -> f64 {
    let power = 10f64.powf(most.log10().floor());
    let step = [1.0, 2.0, 2.5, 5.0, 10.0]
        .into_iter()
        .find(|s| s * power >= most * 0.999);
    step.unwrap_or(10.0) * power
}

/// Three significant digits, or all digits before the decimal point.
fn number(value: f64) -> String {
    match value.abs() {
        v if v >= 100.0 || v == v.trunc() => format!("{value:.0}"),
        v if v >= 10.0 => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    }
}

fn text(body: &mut String, x: f64, y: f64, anchor: &str, words: &str) {
    let words = words.replace('&', "&amp;").replace('<', "&lt;");
    _ = writeln!(
        body,
        "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{words}</text>"
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_and_lines_are_drawn_to_scale() {
        let bars = svg(&Plot::bars(
            "A & B",
            "MB",
            vec![("drover".into(), 50.0), ("rsync".into(), 100.0)],
        ));
        assert!(
            bars.contains("A &amp; B")
                && bars.contains("width=\"320.0\"")
                && bars.contains("width=\"640.0\""),
            "{bars}"
        );
        let line = vec![("drover".to_owned(), vec![(0.0, 0.0), (40.0, 100.0)])];
        let plot = Plot::lines("t", "ms", "MiB", line);
        assert!(
            svg(&plot).contains("points=\"80.0,380.0 680.0,50.0\""),
            "{}",
            svg(&plot)
        );
        assert!(!plot.is_empty() && Plot::bars("t", "x", vec![]).is_empty());
    }

    #[test]
    fn axes_end_at_round_numbers() {
        assert_eq!([3.0, 0.7, 100.0, 114.0].map(nice), [5.0, 1.0, 100.0, 200.0]);
    }
}
