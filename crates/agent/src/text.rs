//! Text input and output: sanitizing untrusted text, parsing and formatting quantities.

use std::net::SocketAddr;
use std::time::Duration;

use bytesize::ByteSize;
use drover_store::lease::{MAX_TERM, term_text};
use drover_teleport::{Effort, MAX_LEVEL};

/// Most names in a message.
const MAX_SHOWN: usize = 8;

/// Sanitizes untrusted text for a terminal: escapes control characters, and the marks that reorder or hide text.
pub fn clean(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        let tricky = matches!(c, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}');
        if c.is_control() || tricky {
            out.extend(c.escape_default());
        } else {
            out.push(c);
        }
    }
    out
}

/// Reads a size in bytes, such as `4096`, `64K` or `1.5GiB`. `K`, `M`, `G` and `T` are binary, as are `KiB`
/// and the like; `KB` and the like are decimal. Letter case does not matter; a fraction of a byte is dropped.
///
/// # Errors
/// A message for the user when it is not a size, or more than 2^64 - 1 bytes.
pub fn parse_size(text: &str) -> Result<u64, String> {
    quantity(text, 1024).ok_or_else(|| {
        format!(
            "{:?} is not a size such as 4096, 64K, 1.5GiB (binary) or 20MB (decimal)",
            clean(text)
        )
    })
}

/// Reads a rate in bytes per second, such as `20M` or `512KiB/s`. `K`, `M`, `G` and `T` are decimal, as network
/// rates are; `KiB` and the like are binary.
///
/// # Errors
/// A message for the user when it is not a rate, or below 1000 bytes per second.
pub fn parse_rate(text: &str) -> Result<u64, String> {
    match quantity(text.strip_suffix("/s").unwrap_or(text), 1000) {
        Some(n) if n >= 1000 => Ok(n),
        Some(_) => Err("a rate must be at least 1K (1000 bytes per second)".into()),
        None => Err(format!(
            "{:?} is not a rate such as 20M or 512KiB/s (bytes per second)",
            clean(text)
        )),
    }
}

/// A number with an optional unit, in which a bare prefix such as `K` stands for a power of `bare`.
fn quantity(text: &str, bare: u64) -> Option<u64> {
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.');
    let (number, unit) = text.split_at(end.unwrap_or(text.len()));
    let mut unit = unit.trim_start().to_ascii_uppercase();
    let power = unit.chars().next().and_then(|c| "KMGTPE".find(c));
    let factor = match power {
        None if unit.is_empty() || unit == "B" => 1,
        None => return None,
        Some(power) => {
            let base: u64 = match unit.split_off(1).as_str() {
                "" => bare,
                "B" => 1000,
                "I" | "IB" => 1024,
                _ => return None,
            };
            base.pow(power as u32 + 1)
        }
    };
    let (whole, fraction) = number.split_once('.').unwrap_or((number, "0"));
    let places = u32::try_from(fraction.len()).ok().filter(|n| *n <= 18)?;
    let parts = u128::from(fraction.parse::<u64>().ok()?) * u128::from(factor);
    let whole = u128::from(whole.parse::<u64>().ok()?) * u128::from(factor);
    u64::try_from(whole + parts / 10u128.pow(places)).ok()
}

/// Compression effort: adapted to the link when `None`, else fixed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Compress(pub Option<Effort>);

/// Parses `auto`, `none`, `lz4`, or a level of zstd.
///
/// # Errors
/// A message for the user.
pub fn parse_compress(text: &str) -> Result<Compress, String> {
    let effort = match text {
        "auto" => return Ok(Compress(None)),
        "none" => Effort::None,
        "lz4" => Effort::Lz4,
        level => match level.parse() {
            Ok(level @ 1..=MAX_LEVEL) => Effort::Zstd(level),
            _ => {
                return Err(format!(
                    "{:?} is not auto, none, lz4 or a level from 1 to {MAX_LEVEL}",
                    clean(text)
                ));
            }
        },
    };
    Ok(Compress(Some(effort)))
}

/// Parses a duration such as `90s`, `10m`, `1h30m` or `7d`.
///
/// # Errors
/// A message for the user.
pub fn parse_duration(text: &str) -> Result<Duration, String> {
    duration(text).ok_or_else(|| {
        format!(
            "{:?} is not a duration: use a number with s, m, h or d, such as 90s, 1h30m or 7d",
            clean(text)
        )
    })
}

/// Parses the term of a lease: a duration of at least a second.
///
/// # Errors
/// A message for the user.
pub fn parse_term(text: &str) -> Result<Duration, String> {
    let term = parse_duration(text)?;
    match (1..=MAX_TERM).contains(&term.as_secs()) {
        true => Ok(term),
        false => Err(format!(
            "{:?} is not a term of leases: use at least 1s, and at most {}",
            clean(text),
            term_text(MAX_TERM)
        )),
    }
}

fn duration(text: &str) -> Option<Duration> {
    // The library does not parse days, as not all have 24 hours.
    let days = text.split_once('d');
    let days = days.and_then(|(days, rest)| Some((days.parse::<u64>().ok()?, rest.trim_start())));
    let (days, rest) = match days {
        Some((days, "")) => (days, "0s"),
        days => days.unwrap_or((0, text)),
    };
    let whole = Duration::from_secs(days.checked_mul(24 * 3600)?);
    let rest: jiff::SignedDuration = rest.parse().ok()?;
    whole.checked_add(Duration::try_from(rest).ok()?)
}

/// Parses an address to listen on.
///
/// # Errors
/// A message for the user.
pub fn parse_address(text: &str) -> Result<SocketAddr, String> {
    let address = text.parse();
    address.map_err(|_| {
        format!(
            "{:?} is not an address: use ADDR:PORT, such as 0.0.0.0:7377",
            clean(text)
        )
    })
}

/// Formats a number of bytes in binary units: `1.5 GiB`.
pub fn bytes(n: u64) -> String {
    ByteSize(n).display().iec().to_string()
}

/// Formats a time, given in seconds since 1970: UTC, to the minute.
pub fn moment(unix: i64) -> String {
    match jiff::Timestamp::from_second(unix) {
        Ok(t) => t.strftime("%Y-%m-%d %H:%M").to_string(),
        Err(_) => "-".into(),
    }
}

/// The current time in seconds since 1970.
pub fn now_unix() -> i64 {
    jiff::Timestamp::now().as_second()
}

/// Untrusted names for a message, the first few of many.
pub fn some(names: &[String]) -> String {
    let shown = &names[..names.len().min(MAX_SHOWN)];
    let more = names.len() - shown.len();
    let text = clean(&shown.join(", "));
    match more {
        0 => text,
        more => format!("{text} and {more} more"),
    }
}

/// `1 image`, `2 images`.
pub fn count(n: usize, one: &str) -> String {
    if n == 1 {
        format!("1 {one}")
    } else {
        format!("{n} {one}s")
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn nothing_from_a_peer_reaches_the_terminal_raw() {
        assert_eq!(clean("a\x1b]0;x\x07\n"), "a\\u{1b}]0;x\\u{7}\\n");
        assert_eq!(clean("ex\u{202e}gnp"), "ex\\u{202e}gnp");
        assert_eq!(clean("Gebäude 7.img"), "Gebäude 7.img");
        assert!(
            !(0..=0x10ffff)
                .filter_map(char::from_u32)
                .any(|c| { clean(&c.to_string()).chars().any(char::is_control) })
        );
    }

    #[test]
    fn bare_prefixes_are_binary_in_sizes_and_decimal_in_rates() {
        for (text, size, rate) in [
            ("125000", 125_000, 125_000),
            ("64K", 64 << 10, 64_000),
            ("20M", 20 << 20, 20_000_000),
            ("20m", 20 << 20, 20_000_000),
            ("20MB", 20_000_000, 20_000_000),
            ("20 MiB", 20 << 20, 20 << 20),
            ("1.5G", 3 << 29, 1_500_000_000),
            ("2T", 2 << 40, 2_000_000_000_000),
            ("5000.9B", 5000, 5000),
        ] {
            assert_eq!(parse_size(text), Ok(size), "{text}");
            assert_eq!(parse_rate(text), Ok(rate), "{text}");
            assert_eq!(parse_rate(&format!("{text}/s")), Ok(rate), "{text}/s");
        }
        assert_eq!(parse_size("0"), Ok(0));
        assert_eq!(parse_size("18446744073709551615"), Ok(u64::MAX));
        let bad = [
            "", "K", ".", ".5G", "1.", "-1M", "+1M", "1.2.3", "M20", "20Mb/h", "20Mx", "1 0",
            "16E", "fast", "1K K", "\u{661}K",
        ];
        for bad in bad {
            assert!(parse_size(bad).is_err(), "{bad}");
            assert!(parse_rate(bad).is_err() || bad == "16E", "{bad}");
        }
        for slow in ["0", "999", "0.9K"] {
            assert!(parse_rate(slow).unwrap_err().contains("at least 1K"));
        }
    }

    proptest! {
        #[test]
        fn whole_numbers_of_units_are_exact(n: u32, power in 0usize..4, kind in 0usize..3, small: bool) {
            let letter = ["K", "M", "G", "T"][power];
            let unit = format!("{letter}{}", ["", "B", "iB"][kind]);
            let text = format!("{n}{}", if small { unit.to_lowercase() } else { unit });
            let of = |base: u64| u64::from(n).checked_mul(base.pow(power as u32 + 1));
            let (binary, decimal) = (of(1024), of(1000));
            prop_assert_eq!(parse_size(&text).ok(), if kind == 1 { decimal } else { binary });
            let rate = if kind == 2 { binary } else { decimal };
            prop_assert_eq!(parse_rate(&text).ok(), rate.filter(|r| *r >= 1000));
        }

        #[test]
        fn a_formatted_size_parses_to_about_the_same(n: u64) {
            let read = parse_size(&bytes(n)).unwrap_or(u64::MAX) as f64;
            prop_assert!((read - n as f64).abs() <= n as f64 * 0.05 + 1.0, "{}", bytes(n));
        }

        #[test]
        fn no_text_panics(text: String) {
            let _ = (parse_size(&text), parse_rate(&text), parse_duration(&text));
        }
    }

    #[test]
    fn compression_is_a_word_or_a_level() {
        assert_eq!(parse_compress("auto"), Ok(Compress(None)));
        assert_eq!(parse_compress("none"), Ok(Compress(Some(Effort::None))));
        assert_eq!(parse_compress("15"), Ok(Compress(Some(Effort::Zstd(15)))));
        for bad in ["", "0", "16", "zstd", "-1", "LZ5"] {
            assert!(parse_compress(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn durations_are_friendly() {
        let seconds = [
            ("10m", 600),
            ("0s", 0),
            ("0d", 0),
            ("1h 30m", 5400),
            ("1h30m", 5400),
            ("36h", 36 * 3600),
            ("7d", 7 * 24 * 3600),
            ("1d12h", 36 * 3600),
            ("1d 12h", 36 * 3600),
            ("90 seconds", 90),
        ];
        for (text, seconds) in seconds {
            assert_eq!(parse_duration(text), Ok(Duration::from_secs(seconds)));
        }
        for bad in [
            "",
            "7",
            "10",
            "-5m",
            "-1d",
            "1d -5m",
            "d",
            "99999999999999999999d",
            "999999999999999d",
            "soon",
        ] {
            assert!(parse_duration(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_term_is_at_least_a_second() {
        assert_eq!(parse_term("1h"), Ok(Duration::from_secs(3600)));
        for bad in ["0s", "900ms", "100000d", "never"] {
            assert!(parse_term(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn people_read_these() {
        assert_eq!(bytes(1536), "1.5 KiB");
        assert_eq!(moment(0), "1970-01-01 00:00");
        assert_eq!(moment(i64::MAX), "-");
        assert_eq!(count(1, "image"), "1 image");
        assert_eq!(count(0, "image"), "0 images");
    }
}
