//! Plots as SVG and PNG, from one drawing routine.
//!
//! Text is set with a font that is part of the program (a subset of DejaVu Sans, see `assets/`), so that a machine without
//! fonts draws the same picture.

mod axis;
mod bars;
mod colour;
mod draw;
mod lines;

use anyhow::{Context, Result, anyhow};
use plotters::backend::{BitMapBackend, SVGBackend};
use plotters::drawing::IntoDrawingArea;
use plotters::style::{FontStyle, register_font};

use crate::bench::{Kind, Plot};

/// Width and height of an SVG, in its units.
pub const SIZE: (u32, u32) = (960, 540);
/// Width and height of a PNG, in pixels.
pub const PIXELS: (u32, u32) = (SIZE.0 * DRAWN / SHRUNK, SIZE.1 * DRAWN / SHRUNK);

/// A PNG is drawn this many times as large as an SVG...
const DRAWN: u32 = 3;
/// ...and then made smaller by this, which smooths its edges: the bitmap backend does not.
const SHRUNK: u32 = 2;

const FONT: &[u8] = include_bytes!("../assets/DejaVuSans-subset.ttf");

/// Whether there is anything to see in it.
pub fn has_data(plot: &Plot) -> bool {
    match &plot.kind {
        Kind::Lines(series) => series.iter().any(|(_, points)| !points.is_empty()),
        Kind::Bars { series, .. } => series
            .iter()
            .any(|(_, values)| values.iter().any(Option::is_some)),
    }
}

/// The plot as SVG.
///
/// # Errors
/// When it cannot be drawn: nothing that its data can cause.
pub fn svg(plot: &Plot) -> Result<String> {
    fonts()?;
    let mut text = String::new();
    {
        let area = SVGBackend::with_string(&mut text, SIZE).into_drawing_area();
        draw::draw(&area, plot, 1).map_err(|error| anyhow!("{error}"))?;
        area.present().map_err(|error| anyhow!("{error}"))?;
    }
    Ok(text)
}

/// The plot as PNG.
///
/// # Errors
/// When it cannot be drawn: nothing that its data can cause.
pub fn png(plot: &Plot) -> Result<Vec<u8>> {
    fonts()?;
    let drawn = (SIZE.0 * DRAWN, SIZE.1 * DRAWN);
    let mut pixels = vec![0; (drawn.0 * drawn.1 * 3) as usize];
    {
        let area = BitMapBackend::with_buffer(&mut pixels, drawn).into_drawing_area();
        draw::draw(&area, plot, DRAWN).map_err(|error| anyhow!("{error}"))?;
        area.present().map_err(|error| anyhow!("{error}"))?;
    }
    let mut file = Vec::new();
    let mut encoder = png::Encoder::new(&mut file, PIXELS.0, PIXELS.1);
    encoder.set_color(png::ColorType::Rgb);
    encoder.set_depth(png::BitDepth::Eight);
    encoder.set_compression(png::Compression::High);
    let mut writer = encoder.write_header()?;
    writer.write_image_data(&shrink(&pixels, drawn.0 as usize))?;
    writer.finish().context("cannot encode a PNG")?;
    Ok(file)
}

/// Each pixel the mean of a square of [`SHRUNK`] by [`SHRUNK`].
fn shrink(pixels: &[u8], width: usize) -> Vec<u8> {
    let step = SHRUNK as usize;
    let mut small = Vec::with_capacity(pixels.len() / step / step);
    for rows in pixels.chunks_exact(width * 3 * step) {
        for x in (0..width).step_by(step) {
            for colour in 0..3 {
                let square = (0..step * step)
                    .map(|i| u32::from(rows[(i / step * width + x + i % step) * 3 + colour]));
                small.push((square.sum::<u32>() / (SHRUNK * SHRUNK)) as u8);
            }
        }
    }
    small
}

fn fonts() -> Result<()> {
    register_font("sans-serif", FontStyle::Normal, FONT)
        .map_err(|_| anyhow!("the built-in font is damaged"))
}

#[cfg(test)]
mod tests;
