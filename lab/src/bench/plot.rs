//! SVG plots: bar charts and line charts.

const WIDTH: f64 = 900.0;
/// Space for names beside bars, and for numbers beside lines.
const NAMES: f64 = 190.0;
const NUMBERS: f64 = 80.0;
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

/// A bar chart in units of `unit`.
pub fn bars(title: &str, unit: &str, bars: &[(String, f64)]) -> String {
    let most = max(bars.iter().map(|bar| bar.1));
    let mut body = String::new();
    for (at, (name, value)) in bars.iter().enumerate() {
        let top = TOP + BAR * at as f64 + 4.0;
        let width = (WIDTH - NAMES - RIGHT) * value / most;
        let colour = match name.as_str() {
            "limit" => COLOURS[6],
            name => COLOURS[usize::from(!name.starts_with("drover"))],
        };
        body += &text(NAMES - 8.0, top + 15.0, "end", name);
        body += &format!(
            "<rect x=\"{NAMES}\" y=\"{top:.1}\" width=\"{width:.1}\" height=\"20\" fill=\"{colour}\"/>\n"
        );
        body += &text(NAMES + width + 6.0, top + 15.0, "start", &number(*value));
    }
    let end = TOP + BAR * bars.len() as f64;
    body += &text((NAMES + WIDTH - RIGHT) / 2.0, end + 24.0, "middle", unit);
    svg(title, end + 40.0, &body)
}

/// A line chart of points sorted by x.
pub fn lines(title: &str, x: &str, y: &str, lines: &[(String, Vec<(f64, f64)>)]) -> String {
    let all = || lines.iter().flat_map(|(_, points)| points);
    let (right, top) = (nice(max(all().map(|p| p.0))), nice(max(all().map(|p| p.1))));
    let (end, bottom) = (WIDTH - RIGHT, TOP + HEIGHT);
    let across = |v: f64| NUMBERS + (end - NUMBERS) * v / right;
    let up = |v: f64| bottom - HEIGHT * v / top;
    let mut body = String::new();
    for step in 0..=5 {
        let (u, v) = (right * f64::from(step) / 5.0, top * f64::from(step) / 5.0);
        let height = up(v);
        body += &format!("<path d=\"M{NUMBERS:.1} {height:.1}H{end:.1}\" stroke=\"#ddd\"/>\n");
        body += &text(NUMBERS - 8.0, height + 5.0, "end", &number(v));
        body += &text(across(u), bottom + 20.0, "middle", &number(u));
    }
    let mut legend = bottom + 64.0;
    for ((name, points), colour) in lines.iter().zip(COLOURS.iter().cycle()) {
        let points = points.iter().map(|p| (across(p.0), up(p.1)));
        let place = |(x, y)| format!("{x:.1},{y:.1}");
        let path = Vec::from_iter(points.clone().map(place)).join(" ");
        let line = legend - 5.0;
        body += &format!(
            "<polyline points=\"{path}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"/>\n"
        );
        for (x, y) in points {
            body += &format!("<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3\" fill=\"{colour}\"/>\n");
        }
        body += &format!(
            "<path d=\"M{NUMBERS} {line:.1}h24\" stroke=\"{colour}\" stroke-width=\"3\"/>\n"
        );
        body += &text(NUMBERS + 32.0, legend, "start", name);
        legend += 20.0;
    }
    body += &text((NUMBERS + end) / 2.0, bottom + 42.0, "middle", x);
    body += &text(10.0, TOP - 12.0, "start", y);
    svg(title, legend, &body)
}

fn svg(title: &str, height: f64, body: &str) -> String {
    let title = text(WIDTH / 2.0, 28.0, "middle", title);
    format!(
        r#"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="14">
<rect width="100%" height="100%" fill="white"/>
{body}{title}</svg>
"#
    )
}

fn text(x: f64, y: f64, anchor: &str, words: &str) -> String {
    let words = words.replace('&', "&amp;").replace('<', "&lt;");
    format!("<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{words}</text>\n")
}

fn max(values: impl Iterator<Item = f64>) -> f64 {
    values.fold(f64::MIN_POSITIVE, f64::max)
}

/// The smallest number that is at least `most` and is 1, 2, 2.5 or 5 times a power of ten.
pub fn nice(most: f64) -> f64 {
    let power = 10f64.powf(most.log10().floor());
    let steps = [1.0, 2.0, 2.5, 5.0].map(|step| step * power);
    let fits = steps.into_iter().find(|step| *step >= most * 0.999);
    fits.unwrap_or(10.0 * power)
}

/// Three significant digits, or all digits before the decimal point.
fn number(value: f64) -> String {
    match value.abs() {
        v if v >= 100.0 || v == v.trunc() => format!("{value:.0}"),
        v if v >= 10.0 => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    }
}
