//! That pictures are pictures: well-formed, of the right size, the same each time, and with their data in them.

use super::*;
use crate::bench::{Axis, Point};

fn lines() -> Plot {
    let line = |name: &str, factor: f64| {
        let point = |x: f64| Point {
            x,
            y: factor / x + 3.0,
            range: (factor > 500.0).then_some((factor / x + 2.0, factor / x + 6.0)),
        };
        (name.to_owned(), [20.0, 100.0, 1000.0].map(point).to_vec())
    };
    Plot {
        name: "rates".into(),
        title: "One image to a site that has a similar one, 40 ms".into(),
        x: Axis::log("link, Mbit/s"),
        y: Axis::log("seconds until the whole file is there"),
        kind: Kind::Lines(vec![
            line("drover", 400.0),
            line("rsync --whole-file", 8000.0),
            line("rsync-delta", 1500.0),
            line("zstd | socket", 2600.0),
            line("casync & <co>", 2000.0),
            line("restic", 2300.0),
            line("borg", 2400.0),
            line("limit", 300.0),
        ]),
    }
}

fn bars(stacked: bool) -> Plot {
    let groups = [
        "bookworm-plain",
        "bookworm-app",
        "bookworm-db",
        "bookworm-nfs",
        "bookworm-web",
        "bookworm-dev",
        "trixie-plain",
        "bullseye-plain",
    ];
    let series = |name: &str, factor: f64| {
        let values = (0..groups.len()).map(|g| (g != 3).then_some(factor * (g + 1) as f64));
        (name.to_owned(), values.collect())
    };
    Plot {
        name: "bytes".into(),
        title: "The library in order to an empty site".into(),
        x: Axis::linear("image, in the order in which it was sent"),
        y: Axis::linear("MB on the wire"),
        kind: Kind::Bars {
            groups: groups.map(str::to_owned).to_vec(),
            series: vec![
                series("drover", 31.0),
                series("zstd", 54.5),
                series("limit", 27.25),
            ],
            stacked,
        },
    }
}

/// Many groups with long names, and bars below zero.
fn upright() -> Plot {
    let groups: Vec<String> = (0..17)
        .map(|g| format!("destination: stage {g} of all"))
        .collect();
    let values = |sign: f64| {
        groups
            .iter()
            .enumerate()
            .map(|(g, _)| Some(sign * (g as f64 - 4.0)))
            .collect()
    };
    Plot {
        kind: Kind::Bars {
            series: vec![
                ("drover, first".into(), values(1.0)),
                ("drover, again".into(), values(-0.5)),
            ],
            groups: groups.clone(),
            stacked: false,
        },
        ..bars(false)
    }
}

#[test]
fn drover_has_its_colour_where_tools_are_groups() {
    let mut plot = bars(false);
    plot.kind = Kind::Bars {
        groups: ["zstd", "drover", "limit"].map(str::to_owned).to_vec(),
        series: vec![("seconds".into(), vec![Some(3.0), Some(1.0), Some(0.5)])],
        stacked: false,
    };
    let text = svg(&plot).unwrap();
    for colour in ["#D55E00", "#0072B2", "#555555"] {
        assert_eq!(text.matches(colour).count(), 1, "{colour}");
    }
}

fn decoded(file: &[u8]) -> (png::OutputInfo, Vec<u8>) {
    let mut reader = png::Decoder::new(std::io::Cursor::new(file))
        .read_info()
        .unwrap();
    let mut pixels = vec![0; reader.output_buffer_size().unwrap()];
    let info = reader.next_frame(&mut pixels).unwrap();
    (info, pixels)
}

#[test]
fn every_kind_is_drawn_twice_the_same_in_its_size() {
    // With LAB_PLOTS=DIR the pictures are kept, to be looked at.
    let keep = std::env::var_os("LAB_PLOTS").map(std::path::PathBuf::from);
    for (name, plot) in [
        ("lines", lines()),
        ("bars", bars(false)),
        ("stacked", bars(true)),
        ("upright", upright()),
    ] {
        assert!(has_data(&plot));
        let (text, file) = (svg(&plot).unwrap(), png(&plot).unwrap());
        assert_eq!(text, svg(&plot).unwrap());
        if name == "lines" {
            assert_eq!(file, png(&plot).unwrap());
        }
        let head = format!(r#"<svg width="{}" height="{}""#, SIZE.0, SIZE.1);
        assert!(text.starts_with(&head), "{}", &text[..80]);
        well_formed(&text);
        for words in [&plot.title, &plot.x.label, &plot.y.label] {
            assert!(text.contains(words.as_str()), "{words}");
        }
        let (info, pixels) = decoded(&file);
        assert_eq!((info.width, info.height), PIXELS);
        // drover's colour is in it, and its background is light.
        let has = |colour: [u8; 3]| pixels.chunks(3).filter(|p| *p == colour).count();
        assert!(has([0xD5, 0x5E, 0x00]) > 100, "{name}");
        assert!(has([0xFF; 3]) > pixels.len() / 6, "{name}");
        if let Some(dir) = &keep {
            std::fs::write(dir.join(format!("{name}.png")), &file).unwrap();
            std::fs::write(dir.join(format!("{name}.svg")), &text).unwrap();
        }
    }
}

#[test]
fn values_that_have_no_place_do_no_harm() {
    let mut plot = lines();
    if let Kind::Lines(series) = &mut plot.kind {
        series[0].1[0].y = 0.0;
        series[1].1[0].y = f64::NAN;
        series[2].1[0].x = f64::INFINITY;
        series.push(("empty".into(), Vec::new()));
    }
    well_formed(&svg(&plot).unwrap());
    let none = Plot {
        kind: Kind::Lines(vec![("nothing".into(), Vec::new())]),
        ..plot
    };
    assert!(!has_data(&none));
    well_formed(&svg(&none).unwrap());
    decoded(&png(&none).unwrap());
    let mut uneven = bars(false);
    if let Kind::Bars { series, .. } = &mut uneven.kind {
        series[0].1 = vec![Some(0.0), None, Some(f64::NAN)];
        series[1].1.clear();
    }
    well_formed(&svg(&uneven).unwrap());
}

/// Every element that is opened is closed, and no bare `&` or `<` is in a text.
fn well_formed(svg: &str) {
    let mut open: Vec<String> = Vec::new();
    let mut rest = svg;
    while let Some(at) = rest.find('<') {
        let text = &rest[..at];
        for entity in text.split('&').skip(1) {
            assert!(entity.contains(';'), "{text}");
        }
        let end = at + rest[at..].find('>').expect("an element that ends");
        let tag = &rest[at + 1..end];
        if let Some(name) = tag.strip_prefix('/') {
            assert_eq!(open.pop().as_deref(), Some(name.trim()));
        } else if !tag.ends_with('/') && !tag.starts_with(['?', '!']) {
            open.push(tag.split_whitespace().next().unwrap_or_default().to_owned());
        }
        rest = &rest[end + 1..];
    }
    assert!(open.is_empty(), "{open:?}");
}
