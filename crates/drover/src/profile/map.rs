//! The map of a profile: how much is read of each part of the disk, and when.

use std::fmt::Write;

use drover_core::BLOCK_SIZE_U64;
use drover_store::profile::Profile;

/// Characters of a row, and rows.
const COLUMNS: usize = 64;
const ROWS: usize = 16;

/// Cells of a row of the picture, rows, and the side of a cell in pixels.
const SVG_COLUMNS: usize = 128;
const SVG_ROWS: usize = 64;
const SIDE: usize = 8;

/// How dense a cell is, from nothing read to all of it.
const SHADES: [char; 5] = ['.', '░', '▒', '▓', '█'];

/// What is read of an equal part of the disk.
#[derive(Clone, Copy, Default)]
struct Cell {
    blocks: u64,
    /// The sum of the places in the order at which they are read.
    places: u64,
}

/// The disk in equal parts, and how many blocks each has.
fn cells(profile: &Profile, most: usize) -> (Vec<Cell>, u64) {
    let blocks = profile.disk_bytes().div_ceil(BLOCK_SIZE_U64).max(1);
    let each = blocks.div_ceil(most as u64);
    let mut cells = vec![Cell::default(); blocks.div_ceil(each) as usize];
    for (place, entry) in (0..).zip(profile.entries()) {
        if let Some(cell) = cells.get_mut((entry.block / each) as usize) {
            cell.blocks += 1;
            cell.places += place;
        }
    }
    (cells, each)
}

/// The share of a cell in steps from 0 to `steps`, the last for all of it. A little is seen: the scale is that of the root.
fn level(cell: Cell, each: u64, steps: usize) -> usize {
    if cell.blocks == 0 {
        return 0;
    }
    let share = (cell.blocks as f64 / each as f64).sqrt();
    ((share * steps as f64).ceil() as usize).clamp(1, steps)
}

/// The map for a terminal, a row of characters for each sixteenth of the disk or less, with its offset.
pub fn text(profile: &Profile) -> String {
    let (cells, each) = cells(profile, COLUMNS * ROWS);
    let rows: Vec<String> = cells
        .chunks(COLUMNS)
        .enumerate()
        .map(|(row, cells)| {
            let shade = |cell: &Cell| SHADES[level(*cell, each, SHADES.len() - 1)];
            let offset = (row * COLUMNS) as u64 * each * BLOCK_SIZE_U64;
            let offset = drover_agent::text::bytes(offset);
            format!(
                "{offset:>10}  {}",
                cells.iter().map(shade).collect::<String>()
            )
        })
        .collect();
    rows.join("\n")
}

/// The map as a picture: what is read first is red, what is read last blue; what is not read is grey.
pub fn svg(profile: &Profile, title: &str) -> String {
    let (cells, each) = cells(profile, SVG_COLUMNS * SVG_ROWS);
    let rows = cells.len().div_ceil(SVG_COLUMNS);
    let (width, height) = (SVG_COLUMNS * SIDE, rows * SIDE);
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" viewBox=\"0 0 {width} {height}\">\n\
         <title>{}</title>\n<rect width=\"{width}\" height=\"{height}\" fill=\"#eee\"/>\n",
        escaped(title)
    );
    let last = profile.entries().len().max(1) as f64;
    for (at, cell) in cells.iter().enumerate().filter(|(_, cell)| cell.blocks > 0) {
        let (x, y) = (at % SVG_COLUMNS * SIDE, at / SVG_COLUMNS * SIDE);
        let hue = cell.places as f64 / cell.blocks as f64 / last * 240.0;
        let opacity = 0.25 + 0.75 * level(*cell, each, 8) as f64 / 8.0;
        // A String takes all that is written to it.
        let _ = writeln!(
            out,
            "<rect x=\"{x}\" y=\"{y}\" width=\"{SIDE}\" height=\"{SIDE}\" fill=\"hsl({hue:.0} 90% 45%)\" fill-opacity=\"{opacity:.2}\"/>"
        );
    }
    out.push_str("</svg>\n");
    out
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;")
}

#[cfg(test)]
mod tests {
    use drover_store::profile::FirstRead;

    use super::*;

    fn profile(blocks: usize, read: &[u64]) -> Profile {
        let disk = vec![1; blocks * 4096];
        let reads: Vec<_> = read
            .iter()
            .map(|block| FirstRead {
                block: *block,
                at_ms: 0,
            })
            .collect();
        Profile::of_boot(&disk, &reads).unwrap()
    }

    #[test]
    fn a_map_shows_where_much_is_read() {
        // Two blocks for each character.
        let map = text(&profile(2048, &[0, 1, 2, 2046, 128]));
        let rows: Vec<&str> = map.lines().collect();
        assert_eq!(rows.len(), ROWS);
        assert!(rows[0].trim_start().starts_with('0'), "{}", rows[0]);
        assert!(
            rows[0].ends_with(&format!("█▓{}", ".".repeat(62))),
            "{}",
            rows[0]
        );
        assert!(
            rows[1].ends_with(&format!("▓{}", ".".repeat(63))),
            "{}",
            rows[1]
        );
        assert!(rows[15].ends_with(".▓"), "{}", rows[15]);
        // A disk smaller than the map.
        assert!(text(&profile(3, &[1])).ends_with("  .█."));
    }

    #[test]
    fn a_picture_has_a_cell_for_each_part_that_is_read() {
        let picture = svg(&profile(300, &[299, 0]), "a <b>");
        assert!(picture.contains("<title>a &lt;b></title>"));
        assert_eq!(picture.matches("<rect x=").count(), 2);
        // The first is red, the last not.
        assert!(picture.contains("x=\"344\" y=\"16\" width=\"8\" height=\"8\" fill=\"hsl(0 "));
        assert!(picture.contains("x=\"0\" y=\"0\" width=\"8\" height=\"8\" fill=\"hsl(120 "));
        assert!(picture.ends_with("</svg>\n"));
    }
}
