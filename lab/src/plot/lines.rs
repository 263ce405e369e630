//! Lines with points, and bars of error where a point was measured repeatedly.

use plotters::drawing::DrawingAreaErrorKind;
use plotters::prelude::DrawingBackend;
use plotters::style::{RGBColor, WHITE};

use super::axis::Scale;
use super::colour;
use super::draw::{Canvas, Drawn, Frame, axes, horizontal, vertical};
use crate::bench::{Plot, Point};

/// So many places on the horizontal axis get their own numbers; more get round ones.
const FEW: usize = 10;

/// Draws the series; returns the frame within which they are.
pub fn draw<DB: DrawingBackend>(
    canvas: &Canvas<'_, DB>,
    plot: &Plot,
    series: &[(String, Vec<Point>)],
    colours: &[RGBColor],
    frame: Frame,
) -> Result<Frame, DrawingAreaErrorKind<DB::ErrorType>> {
    let points = || series.iter().flat_map(|(_, points)| points);
    let heights: Vec<f64> = points()
        .flat_map(|p| {
            [
                p.y,
                p.range.map_or(p.y, |r| r.0),
                p.range.map_or(p.y, |r| r.1),
            ]
        })
        .collect();
    let mut places: Vec<f64> = points().map(|p| p.x).collect();
    places.sort_by(f64::total_cmp);
    places.dedup();
    let ys = Scale::of(&plot.y, &heights, true).between(frame.bottom, frame.top);
    let frame = vertical(canvas, &ys, frame)?;
    let xs = Scale::of(&plot.x, &places, false).between(frame.left, frame.right);
    places.retain(|x| xs.shows(*x));
    let ticks = if places.len() <= FEW {
        places
    } else {
        xs.ticks()
    };
    horizontal(canvas, &xs, &ticks, frame)?;
    axes(canvas, frame)?;
    for (at, (name, points)) in series.iter().enumerate() {
        let colour = colours[at];
        let shown: Vec<&Point> = points
            .iter()
            .filter(|p| xs.shows(p.x) && ys.shows(p.y))
            .collect();
        let path: Vec<_> = shown.iter().map(|p| (xs.at(p.x), ys.at(p.y))).collect();
        stroke(canvas, &path, colour, colour::is_bound(name))?;
        for (point, place) in shown.iter().zip(&path) {
            if let Some((least, greatest)) = point.range {
                error_bar(canvas, place.0, (ys.at(least), ys.at(greatest)), colour)?;
            }
            marker(canvas, at, *place, colour)?;
        }
    }
    Ok(frame)
}

/// A line through points, dashed for what is a bound and was not measured.
pub fn stroke<DB: DrawingBackend>(
    canvas: &Canvas<'_, DB>,
    path: &[(i32, i32)],
    colour: RGBColor,
    dashed: bool,
) -> Drawn<DB> {
    if !dashed {
        return canvas.line(path, colour, 2);
    }
    path.windows(2)
        .try_for_each(|ends| canvas.dashed(ends[0], ends[1], colour))
}

fn error_bar<DB: DrawingBackend>(
    canvas: &Canvas<'_, DB>,
    x: i32,
    (low, high): (i32, i32),
    colour: RGBColor,
) -> Drawn<DB> {
    canvas.line(&[(x, low), (x, high)], colour, 1)?;
    canvas.line(&[(x - 4, low), (x + 4, low)], colour, 1)?;
    canvas.line(&[(x - 4, high), (x + 4, high)], colour, 1)
}

/// A series' own mark, for those who do not see its colour.
pub fn marker<DB: DrawingBackend>(
    canvas: &Canvas<'_, DB>,
    series: usize,
    (x, y): (i32, i32),
    colour: RGBColor,
) -> Drawn<DB> {
    match series % 6 {
        0 => canvas.disc((x, y), 5, colour),
        1 => canvas.fill([(x - 4, y - 4), (x + 4, y + 4)], colour),
        2 => canvas.shape(&[(x, y - 6), (x + 5, y + 4), (x - 5, y + 4)], colour),
        3 => canvas.shape(&[(x, y - 6), (x + 6, y), (x, y + 6), (x - 6, y)], colour),
        4 => {
            canvas.disc((x, y), 5, colour)?;
            canvas.disc((x, y), 3, WHITE)
        }
        _ => canvas.shape(&[(x, y + 6), (x + 5, y - 4), (x - 5, y - 4)], colour),
    }
}
