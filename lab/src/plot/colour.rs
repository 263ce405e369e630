//! Which colour a series has: the same in every plot, and told apart by those who see fewer colours.
//!
//! The palette is that of Okabe and Ito (Color Universal Design, 2008), darker where it is too pale for white paper.

use plotters::style::RGBColor;

const DROVER: [RGBColor; 4] = [
    RGBColor(0xD5, 0x5E, 0x00),
    RGBColor(0x8A, 0x3A, 0x00),
    RGBColor(0xF0, 0xA0, 0x64),
    RGBColor(0x5A, 0x2A, 0x0A),
];
const LIMIT: RGBColor = RGBColor(0x55, 0x55, 0x55);
/// Tools by how their names begin, the longer name first.
const TOOLS: &[(&str, RGBColor)] = &[
    ("zstd", RGBColor(0x00, 0x72, 0xB2)),
    ("rsync-delta", RGBColor(0x00, 0x9E, 0x73)),
    ("rsync-zstd", RGBColor(0x11, 0x55, 0x44)),
    ("rsync", RGBColor(0x56, 0xB4, 0xE9)),
    ("casync", RGBColor(0xCC, 0x79, 0xA7)),
    ("desync", RGBColor(0xE6, 0x9F, 0x00)),
    ("qemu", RGBColor(0x99, 0x99, 0x33)),
    ("restic", RGBColor(0x33, 0x22, 0x88)),
    ("borg", RGBColor(0x88, 0x22, 0x55)),
];
const OTHERS: [RGBColor; 8] = [
    RGBColor(0x00, 0x72, 0xB2),
    RGBColor(0x00, 0x9E, 0x73),
    RGBColor(0xCC, 0x79, 0xA7),
    RGBColor(0x56, 0xB4, 0xE9),
    RGBColor(0xE6, 0x9F, 0x00),
    RGBColor(0x33, 0x22, 0x88),
    RGBColor(0x99, 0x99, 0x33),
    RGBColor(0x88, 0x22, 0x55),
];

/// Whether a series is a bound and nothing that was measured.
pub fn is_bound(name: &str) -> bool {
    name.starts_with("limit") || name.starts_with("ideal") || name.starts_with("linear")
}

/// A colour for each series, by name.
pub fn of(names: &[&str]) -> Vec<RGBColor> {
    let mut used: Vec<RGBColor> = Vec::new();
    let mut drovers = 0;
    let mut colours: Vec<Option<RGBColor>> = Vec::new();
    for name in names {
        let colour = if name.starts_with("drover") {
            drovers += 1;
            Some(DROVER[(drovers - 1) % DROVER.len()])
        } else if is_bound(name) {
            Some(LIMIT)
        } else {
            let tool = TOOLS.iter().find(|(tool, _)| name.starts_with(tool));
            tool.map(|(_, colour)| *colour)
                .filter(|colour| !used.contains(colour))
        };
        used.extend(colour);
        colours.push(colour);
    }
    let mut rest = 0;
    colours
        .into_iter()
        .map(|colour| {
            colour.unwrap_or_else(|| {
                let free = OTHERS.iter().find(|other| !used.contains(other));
                let colour = free.copied().unwrap_or(OTHERS[rest % OTHERS.len()]);
                rest += 1;
                used.push(colour);
                colour
            })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tool_keeps_its_colour_whoever_stands_beside_it() {
        let one = of(&["drover", "rsync", "zstd", "limit"]);
        let two = of(&["limit", "zstd", "desync", "drover"]);
        assert_eq!((one[0], one[2], one[3]), (two[3], two[1], two[0]));
        let three = of(&[
            "read",
            "zstd",
            "drover",
            "drover, warm",
            "rsync x",
            "rsync y",
        ]);
        for (at, colour) in three.iter().enumerate() {
            assert!(!three[..at].contains(colour), "{three:?}");
        }
    }
}
