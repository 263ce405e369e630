//! Bar charts as SVG.

const WIDTH: f64 = 900.0;
/// Space for names beside bars.
const NAMES: f64 = 190.0;
const RIGHT: f64 = 70.0;
const TOP: f64 = 50.0;
/// Height of a bar, including spacing.
const BAR: f64 = 30.0;
/// Of a colour-blind-safe palette (Okabe and Ito): drover, the others, the limit.
const COLOURS: [&str; 3] = ["#0072b2", "#d55e00", "#555555"];

/// A bar chart.
pub fn bars(title: &str, bars: &[(String, f64)]) -> String {
    let values = bars.iter().map(|bar| bar.1);
    let most = values.fold(f64::MIN_POSITIVE, f64::max);
    let mut body = String::new();
    for (at, (name, value)) in bars.iter().enumerate() {
        let top = TOP + BAR * at as f64 + 4.0;
        let width = (WIDTH - NAMES - RIGHT) * value / most;
        let colour = match name.as_str() {
            "limit" => COLOURS[2],
            name => COLOURS[usize::from(!name.starts_with("drover"))],
        };
        body += &text(NAMES - 8.0, top + 15.0, "end", name);
        body += &format!(
            "<rect x=\"{NAMES}\" y=\"{top:.1}\" width=\"{width:.1}\" height=\"20\" fill=\"{colour}\"/>\n"
        );
        body += &text(NAMES + width + 6.0, top + 15.0, "start", &number(*value));
    }
    let height = TOP + BAR * bars.len() as f64 + 10.0;
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

/// Three significant digits, or all digits before the decimal point.
fn number(value: f64) -> String {
    match value.abs() {
        v if v >= 100.0 || v == v.trunc() => format!("{value:.0}"),
        v if v >= 10.0 => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    }
}
