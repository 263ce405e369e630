//! The drawing routine: title, legend, frame, and within it lines or bars.
//!
//! The legend stands above the frame and the vertical axis' label at its upper left corner: nothing covers data, and nobody
//! has to turn their head.

use plotters::coord::Shift;
use plotters::drawing::{DrawingArea, DrawingAreaErrorKind};
use plotters::element::{Circle, PathElement, Polygon, Rectangle, Text};
use plotters::prelude::DrawingBackend;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use plotters::style::{Color, FontTransform, IntoFont, RGBColor, ShapeStyle, TextStyle, WHITE};

use super::axis::{Scale, short};
use super::{SIZE, bars, colour, lines};
use crate::bench::{Kind, Plot};

/// What drawing ends with.
pub type Drawn<DB> = Result<(), DrawingAreaErrorKind<<DB as DrawingBackend>::ErrorType>>;

pub const INK: RGBColor = RGBColor(0x22, 0x22, 0x22);
const GRID: RGBColor = RGBColor(0xDD, 0xDD, 0xDD);
const TITLE: u32 = 22;
const TEXT: u32 = 15;
pub const SMALL: u32 = 13;
/// Around everything.
const MARGIN: i32 = 18;
/// Between lines of text.
const LEADING: i32 = 22;

/// Somewhere to draw, in units of which an SVG has [`SIZE`].
pub struct Canvas<'a, DB: DrawingBackend> {
    area: &'a DrawingArea<DB, Shift>,
    zoom: i32,
}

/// Where text is fixed.
#[derive(Clone, Copy)]
pub enum Fix {
    Left,
    Middle,
    Right,
    /// Written upwards, its end at the point.
    Up,
}

impl<DB: DrawingBackend> Canvas<'_, DB> {
    fn point(&self, (x, y): (i32, i32)) -> (i32, i32) {
        (x * self.zoom, y * self.zoom)
    }

    fn style(&self, colour: RGBColor, width: u32) -> ShapeStyle {
        ShapeStyle {
            color: colour.to_rgba(),
            filled: false,
            stroke_width: width * self.zoom as u32,
        }
    }

    pub fn line(&self, points: &[(i32, i32)], colour: RGBColor, width: u32) -> Drawn<DB> {
        let points: Vec<_> = points.iter().map(|p| self.point(*p)).collect();
        let style = self.style(colour, width);
        self.area.draw(&PathElement::new(points, style))
    }

    pub fn dashed(&self, from: (i32, i32), to: (i32, i32), colour: RGBColor) -> Drawn<DB> {
        for dash in dashes(self.point(from), self.point(to), 7.0 * f64::from(self.zoom)) {
            let path = PathElement::new(dash.to_vec(), self.style(colour, 2));
            self.area.draw(&path)?;
        }
        Ok(())
    }

    pub fn fill(&self, corners: [(i32, i32); 2], colour: RGBColor) -> Drawn<DB> {
        let corners = corners.map(|p| self.point(p));
        self.area.draw(&Rectangle::new(corners, colour.filled()))
    }

    pub fn shape(&self, points: &[(i32, i32)], colour: RGBColor) -> Drawn<DB> {
        let points: Vec<_> = points.iter().map(|p| self.point(*p)).collect();
        self.area.draw(&Polygon::new(points, colour.filled()))
    }

    pub fn disc(&self, at: (i32, i32), radius: i32, colour: RGBColor) -> Drawn<DB> {
        let at = self.point(at);
        self.area
            .draw(&Circle::new(at, radius * self.zoom, colour.filled()))
    }

    /// Text whose middle line is at the height of `at`.
    pub fn text(&self, text: &str, at: (i32, i32), size: u32, fix: Fix) -> Drawn<DB> {
        let position = match fix {
            Fix::Left => Pos::new(HPos::Left, VPos::Center),
            Fix::Middle => Pos::new(HPos::Center, VPos::Center),
            Fix::Right => Pos::new(HPos::Right, VPos::Center),
            Fix::Up => Pos::new(HPos::Right, VPos::Center),
        };
        let mut font = ("sans-serif", size * self.zoom as u32).into_font();
        if matches!(fix, Fix::Up) {
            font = font.transform(FontTransform::Rotate270);
        }
        let style = TextStyle::from(font).color(&INK).pos(position);
        let (x, y) = self.point(at);
        // The bitmap backend centres the line with its descent, browsers centre letters.
        let sink = if self.zoom > 1 {
            size as i32 * self.zoom / 9
        } else {
            0
        };
        let at = match fix {
            Fix::Up => (x + sink, y),
            _ => (x, y + sink),
        };
        self.area.draw(&Text::new(text.to_owned(), at, style))
    }

    /// How wide text is.
    pub fn width(&self, text: &str, size: u32) -> i32 {
        let style = TextStyle::from(("sans-serif", size * self.zoom as u32).into_font());
        let measured = self.area.estimate_text_size(text, &style);
        measured.map_or(0, |(width, _)| width as i32 / self.zoom)
    }
}

/// Pieces of a straight line, so long and so far apart.
fn dashes(from: (i32, i32), to: (i32, i32), dash: f64) -> Vec<[(i32, i32); 2]> {
    let (dx, dy) = (f64::from(to.0 - from.0), f64::from(to.1 - from.1));
    let length = dx.hypot(dy);
    let at = |along: f64| {
        let share = (along / length).min(1.0);
        let step = |start: i32, span: f64| start + (span * share).round() as i32;
        (step(from.0, dx), step(from.1, dy))
    };
    let count = (length / (2.0 * dash)).ceil() as usize;
    (0..count)
        .map(|i| i as f64 * 2.0 * dash)
        .map(|start| [at(start), at(start + dash)])
        .collect()
}

/// The frame that data is drawn in.
#[derive(Clone, Copy)]
pub struct Frame {
    pub left: i32,
    pub right: i32,
    pub top: i32,
    pub bottom: i32,
}

/// Draws a plot, `zoom` times as large as an SVG.
pub fn draw<DB: DrawingBackend>(
    area: &DrawingArea<DB, Shift>,
    plot: &Plot,
    zoom: u32,
) -> Drawn<DB> {
    let canvas = Canvas {
        area,
        zoom: zoom as i32,
    };
    area.fill(&WHITE)?;
    let names: Vec<&str> = match &plot.kind {
        Kind::Lines(series) => series.iter().map(|(name, _)| name.as_str()).collect(),
        Kind::Bars { series, .. } => series.iter().map(|(name, _)| name.as_str()).collect(),
    };
    let colours = colour::of(&names);
    let mut y = MARGIN + TITLE as i32 / 2;
    canvas.text(&plot.title, (MARGIN, y), TITLE, Fix::Left)?;
    y += LEADING + 8;
    if names.len() > 1 {
        y = legend(&canvas, plot, &names, &colours, y)?;
    }
    canvas.text(&plot.y.label, (MARGIN, y), TEXT, Fix::Left)?;
    let frame = Frame {
        left: 0,
        right: SIZE.0 as i32 - MARGIN - 8,
        top: y + LEADING - 4,
        bottom: SIZE.1 as i32 - MARGIN - LEADING - 26,
    };
    let frame = match &plot.kind {
        Kind::Lines(series) => lines::draw(&canvas, plot, series, &colours, frame)?,
        Kind::Bars {
            groups,
            series,
            stacked,
        } => bars::draw(&canvas, plot, groups, series, *stacked, &colours, frame)?,
    };
    let middle = i32::midpoint(frame.left, frame.right);
    let below = SIZE.1 as i32 - MARGIN - 2;
    canvas.text(&plot.x.label, (middle, below), TEXT, Fix::Middle)
}

/// Names and colours, in as many lines as they take; returns the height below.
fn legend<DB: DrawingBackend>(
    canvas: &Canvas<'_, DB>,
    plot: &Plot,
    names: &[&str],
    colours: &[RGBColor],
    mut y: i32,
) -> Result<i32, DrawingAreaErrorKind<DB::ErrorType>> {
    const SWATCH: i32 = 26;
    let mut x = MARGIN;
    for (at, name) in names.iter().enumerate() {
        let width = SWATCH + 8 + canvas.width(name, TEXT) + 22;
        if x > MARGIN && x + width > SIZE.0 as i32 - MARGIN {
            x = MARGIN;
            y += LEADING;
        }
        match plot.kind {
            Kind::Lines(_) => {
                let ends = [(x, y), (x + SWATCH, y)];
                lines::stroke(canvas, &ends, colours[at], colour::is_bound(name))?;
                lines::marker(canvas, at, (x + SWATCH / 2, y), colours[at])?;
            }
            Kind::Bars { .. } => {
                canvas.fill([(x, y - 7), (x + SWATCH - 6, y + 7)], colours[at])?;
            }
        }
        canvas.text(name, (x + SWATCH + 8, y), TEXT, Fix::Left)?;
        x += width;
    }
    Ok(y + LEADING + 6)
}

/// Grid lines and numbers of the vertical axis; returns the frame with room for the numbers at its left.
pub fn vertical<DB: DrawingBackend>(
    canvas: &Canvas<'_, DB>,
    scale: &Scale,
    mut frame: Frame,
) -> Result<Frame, DrawingAreaErrorKind<DB::ErrorType>> {
    let ticks: Vec<(i32, String)> = scale
        .ticks()
        .into_iter()
        .map(|value| (scale.at(value), short(value)))
        .collect();
    let widest = ticks.iter().map(|(_, text)| canvas.width(text, SMALL));
    frame.left = MARGIN + widest.max().unwrap_or(0) + 8;
    for (y, text) in ticks {
        canvas.line(&[(frame.left, y), (frame.right, y)], GRID, 1)?;
        canvas.text(&text, (frame.left - 8, y), SMALL, Fix::Right)?;
    }
    Ok(frame)
}

/// Grid lines and numbers of the horizontal axis.
pub fn horizontal<DB: DrawingBackend>(
    canvas: &Canvas<'_, DB>,
    scale: &Scale,
    ticks: &[f64],
    frame: Frame,
) -> Drawn<DB> {
    let mut free = i32::MIN;
    for value in ticks {
        let (x, text) = (scale.at(*value), short(*value));
        let half = canvas.width(&text, SMALL) / 2 + 5;
        canvas.line(&[(x, frame.top), (x, frame.bottom)], GRID, 1)?;
        // Where numbers would touch, the later one is left out.
        if x - half > free {
            canvas.text(&text, (x, frame.bottom + 14), SMALL, Fix::Middle)?;
            free = x + half;
        }
    }
    Ok(())
}

/// The two axes themselves.
pub fn axes<DB: DrawingBackend>(canvas: &Canvas<'_, DB>, frame: Frame) -> Drawn<DB> {
    let corner = (frame.left, frame.bottom);
    let ends = [(frame.left, frame.top), corner, (frame.right, frame.bottom)];
    canvas.line(&ends, INK, 1)
}
