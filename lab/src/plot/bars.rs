//! Groups of bars, side by side or on one another.

use plotters::drawing::DrawingAreaErrorKind;
use plotters::prelude::DrawingBackend;
use plotters::style::RGBColor;

use super::axis::{Scale, short};
use super::colour;
use super::draw::{Canvas, Drawn, Fix, Frame, INK, SMALL, axes, vertical};
use crate::bench::{Axis, Plot};

/// A bar is not wider than this.
const WIDEST: i32 = 64;
/// The size of numbers over bars.
const NUMBER: u32 = 12;
/// Room for names that stand upright, at most.
const UPRIGHT: i32 = 150;

/// A bar to be drawn: its group and series, and from where to where it reaches.
struct Bar {
    group: usize,
    series: usize,
    from: f64,
    to: f64,
    /// The number at its end.
    number: Option<f64>,
}

/// Draws the bars; returns the frame within which they are.
pub fn draw<DB: DrawingBackend>(
    canvas: &Canvas<'_, DB>,
    plot: &Plot,
    groups: &[String],
    series: &[(String, Vec<Option<f64>>)],
    stacked: bool,
    colours: &[RGBColor],
    mut frame: Frame,
) -> Result<Frame, DrawingAreaErrorKind<DB::ErrorType>> {
    let bars = if stacked {
        stacks(groups.len(), series)
    } else {
        side_by_side(groups.len(), series)
    };
    let abreast = if stacked { 1 } else { series.len().max(1) };
    // The numbers of the vertical axis take about this; what is left is divided among the groups.
    let pitch = (frame.right - 60) / groups.len().max(1) as i32;
    let upright = groups
        .iter()
        .any(|group| lines_of(canvas, group, pitch).is_none());
    if upright {
        let longest = groups.iter().map(|group| canvas.width(group, SMALL)).max();
        frame.bottom -= (longest.unwrap_or(0) - 30).clamp(0, UPRIGHT);
    }
    // A part of a sum has no length on a logarithmic axis.
    let axis = Axis {
        log: plot.y.log && !stacked,
        ..plot.y.clone()
    };
    let ends: Vec<f64> = bars.iter().map(|bar| bar.to).collect();
    let ys = Scale::of(&axis, &ends, true)
        .on_decades()
        .between(frame.bottom, frame.top);
    let frame = vertical(canvas, &ys, frame)?;
    let pitch = (frame.right - frame.left) / groups.len().max(1) as i32;
    let width = ((pitch * 4 / 5) / abreast as i32).clamp(1, WIDEST);
    let room = if stacked { pitch } else { width };
    // All numbers or none: one here and there would look as if it meant something.
    let numbered = bars
        .iter()
        .filter_map(|bar| bar.number)
        .all(|number| canvas.width(&short(number), NUMBER) < room + 6);
    let own = own_colours(groups, series.len());
    for (g, group) in groups.iter().enumerate() {
        let middle = frame.left + pitch * g as i32 + pitch / 2;
        name(canvas, group, middle, (pitch, upright), frame)?;
        let left = middle - width * abreast as i32 / 2;
        for bar in bars.iter().filter(|bar| bar.group == g) {
            let x = match stacked {
                true => left,
                false => left + width * bar.series as i32,
            };
            let gap = i32::from(width > 6 && !stacked);
            let (from, to) = (ys.at(bar.from), ys.at(bar.to));
            let colour = own.as_ref().map_or(colours[bar.series], |own| own[g]);
            canvas.fill([(x, from.min(to)), (x + width - gap, from.max(to))], colour)?;
            if let Some(number) = bar.number.filter(|_| numbered) {
                let beyond = if bar.to < 0.0 { 9 } else { -8 };
                let at = (x + width / 2, to + beyond);
                canvas.text(&short(number), at, NUMBER, Fix::Middle)?;
            }
        }
    }
    axes(canvas, frame)?;
    let zero = ys.at(0.0);
    canvas.line(&[(frame.left, zero), (frame.right, zero)], INK, 1)?;
    Ok(frame)
}

fn value(series: &(String, Vec<Option<f64>>), group: usize) -> Option<f64> {
    let value = series.1.get(group).copied().flatten();
    value.filter(|value| value.is_finite())
}

fn side_by_side(groups: usize, series: &[(String, Vec<Option<f64>>)]) -> Vec<Bar> {
    let mut bars = Vec::new();
    for group in 0..groups {
        for (at, one) in series.iter().enumerate() {
            if let Some(to) = value(one, group) {
                bars.push(Bar {
                    group,
                    series: at,
                    from: 0.0,
                    to,
                    number: Some(to),
                });
            }
        }
    }
    bars
}

fn stacks(groups: usize, series: &[(String, Vec<Option<f64>>)]) -> Vec<Bar> {
    let mut bars: Vec<Bar> = Vec::new();
    for group in 0..groups {
        let mut top = 0.0;
        for (at, one) in series.iter().enumerate() {
            if let Some(part) = value(one, group).filter(|part| *part >= 0.0) {
                bars.push(Bar {
                    group,
                    series: at,
                    from: top,
                    to: top + part,
                    number: None,
                });
                top += part;
            }
        }
        if let Some(last) = bars.last_mut().filter(|bar| bar.group == group) {
            last.number = Some(top);
        }
    }
    bars
}

/// With one series only, groups that are tools have the colours that they have elsewhere.
fn own_colours(groups: &[String], series: usize) -> Option<Vec<RGBColor>> {
    let names: Vec<&str> = groups.iter().map(String::as_str).collect();
    let tools = names.iter().any(|name| name.starts_with("drover"));
    (series == 1 && tools).then(|| colour::of(&names))
}

/// A group's name in one line or two, or none where it fits in neither.
fn lines_of<'a, DB: DrawingBackend>(
    canvas: &Canvas<'_, DB>,
    group: &'a str,
    room: i32,
) -> Option<(&'a str, &'a str)> {
    let fits = |text: &str| canvas.width(text, SMALL) < room;
    if fits(group) {
        return Some((group, ""));
    }
    group
        .char_indices()
        .filter(|(_, c)| " -/,".contains(*c))
        .map(|(at, c)| group.split_at(at + c.len_utf8()))
        .filter(|(one, two)| fits(one) && fits(two))
        .min_by_key(|(one, two)| one.len().abs_diff(two.len()))
}

/// A group's name below it.
fn name<DB: DrawingBackend>(
    canvas: &Canvas<'_, DB>,
    group: &str,
    middle: i32,
    (room, upright): (i32, bool),
    frame: Frame,
) -> Drawn<DB> {
    let y = frame.bottom + 12;
    if let Some((one, two)) = lines_of(canvas, group, room).filter(|_| !upright) {
        canvas.text(one.trim_end(), (middle, y), SMALL, Fix::Middle)?;
        return canvas.text(two, (middle, y + 15), SMALL, Fix::Middle);
    }
    let mut short = group.to_owned();
    while canvas.width(&short, SMALL) > UPRIGHT + 30 && short.pop().is_some() {}
    canvas.text(&short, (middle, frame.bottom + 5), SMALL, Fix::Up)
}
