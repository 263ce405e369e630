//! Groups of bars, side by side or on one another.

use plotters::drawing::DrawingAreaErrorKind;
use plotters::prelude::DrawingBackend;
use plotters::style::RGBColor;

use super::axis::{Scale, short};
use super::draw::{Canvas, Drawn, Fix, Frame, SMALL, axes, vertical};
use crate::bench::{Axis, Plot};

/// A bar is not wider than this.
const WIDEST: i32 = 64;
/// The size of numbers over bars.
const NUMBER: u32 = 12;

/// Draws the bars; returns the frame within which they are.
pub fn draw<DB: DrawingBackend>(
    canvas: &Canvas<'_, DB>,
    plot: &Plot,
    groups: &[String],
    series: &[(String, Vec<Option<f64>>)],
    stacked: bool,
    colours: &[RGBColor],
    frame: Frame,
) -> Result<Frame, DrawingAreaErrorKind<DB::ErrorType>> {
    let value = |s: usize, g: usize| {
        series[s]
            .1
            .get(g)
            .copied()
            .flatten()
            .filter(|v| v.is_finite())
    };
    let sum = |g: usize| (0..series.len()).filter_map(|s| value(s, g)).sum::<f64>();
    let heights: Vec<f64> = if stacked {
        (0..groups.len()).map(sum).collect()
    } else {
        let all = (0..series.len()).flat_map(|s| (0..groups.len()).map(move |g| (s, g)));
        all.filter_map(|(s, g)| value(s, g)).collect()
    };
    // A part of a sum has no length on a logarithmic axis.
    let axis = Axis {
        log: plot.y.log && !stacked,
        ..plot.y.clone()
    };
    let ys = Scale::of(&axis, &heights, true)
        .on_decades()
        .between(frame.bottom, frame.top);
    let frame = vertical(canvas, &ys, frame)?;
    let count = groups.len().max(1) as i32;
    let abreast = if stacked {
        1
    } else {
        series.len().max(1) as i32
    };
    let pitch = (frame.right - frame.left) / count;
    let width = ((pitch * 4 / 5) / abreast).clamp(1, WIDEST);
    for (g, group) in groups.iter().enumerate() {
        let middle = frame.left + pitch * g as i32 + pitch / 2;
        let left = middle - width * abreast / 2;
        name(canvas, group, middle, pitch, frame)?;
        if stacked {
            let mut below = 0.0;
            for (s, colour) in colours.iter().enumerate() {
                let Some(part) = value(s, g) else { continue };
                let (from, to) = (ys.at(below), ys.at(below + part));
                canvas.fill([(left, to), (left + width, from)], *colour)?;
                below += part;
            }
            if (0..series.len()).any(|s| value(s, g).is_some()) {
                number(canvas, below, (middle, ys.at(below)), pitch)?;
            }
            continue;
        }
        for (s, colour) in colours.iter().enumerate() {
            let Some(height) = value(s, g).filter(|v| ys.shows(*v)) else {
                continue;
            };
            let x = left + width * s as i32;
            let gap = i32::from(width > 6);
            let top = ys.at(height);
            canvas.fill([(x, top), (x + width - gap, frame.bottom)], *colour)?;
            number(canvas, height, (x + width / 2, top), width)?;
        }
    }
    axes(canvas, frame)?;
    Ok(frame)
}

/// The number over a bar, where it has room.
fn number<DB: DrawingBackend>(
    canvas: &Canvas<'_, DB>,
    value: f64,
    (x, top): (i32, i32),
    room: i32,
) -> Drawn<DB> {
    let text = short(value);
    if canvas.width(&text, NUMBER) < room {
        canvas.text(&text, (x, top - 8), NUMBER, Fix::Middle)?;
    }
    Ok(())
}

/// A group's name, in two lines or upright where it is long.
fn name<DB: DrawingBackend>(
    canvas: &Canvas<'_, DB>,
    group: &str,
    middle: i32,
    room: i32,
    frame: Frame,
) -> Drawn<DB> {
    let fits = |text: &str| canvas.width(text, SMALL) < room;
    let y = frame.bottom + 12;
    if fits(group) {
        return canvas.text(group, (middle, y), SMALL, Fix::Middle);
    }
    let broken = group
        .char_indices()
        .filter(|(_, c)| " -/,".contains(*c))
        .map(|(at, c)| group.split_at(at + c.len_utf8()))
        .filter(|(one, two)| fits(one) && fits(two))
        .min_by_key(|(one, two)| one.len().abs_diff(two.len()));
    if let Some((one, two)) = broken {
        canvas.text(one.trim_end(), (middle, y), SMALL, Fix::Middle)?;
        return canvas.text(two, (middle, y + 15), SMALL, Fix::Middle);
    }
    // Upright there is room for few characters only.
    let mut short = group.to_owned();
    while canvas.width(&short, SMALL) > 44 && short.pop().is_some() {}
    canvas.text(&short, (middle, frame.bottom + 4), SMALL, Fix::Up)
}
