//! Text in and out: what comes from others made harmless, and quantities read and written.

use std::time::Duration;

use bytesize::ByteSize;
use drover_teleport::compress::{Effort, MAX_LEVEL};

/// Makes text from elsewhere fit for a terminal: control characters and the marks that reorder
/// or hide text are escaped.
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

/// Reads a size such as `500M`, `1.5GiB` or `4096`, in bytes.
///
/// # Errors
/// A line for a person when it is none.
pub fn parse_size(text: &str) -> Result<u64, String> {
    text.parse::<ByteSize>()
        .map(|b| b.0)
        .map_err(|_| format!("{:?} is not a size such as 20M or 1.5GiB", clean(text)))
}

/// Reads a rate such as `20M` or `20M/s`, in bytes a second; zero is none.
///
/// # Errors
/// A line for a person.
pub fn parse_rate(text: &str) -> Result<u64, String> {
    let number = text.strip_suffix("/s").unwrap_or(text);
    match parse_size(number) {
        Ok(n) if n >= 1000 => Ok(n),
        Ok(_) => Err("a limit below 1k bytes a second would never end".into()),
        Err(_) => Err(format!(
            "{:?} is not a rate such as 20M (bytes a second)",
            clean(text)
        )),
    }
}

/// How hard to compress: as suits the link, or always the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Compress(pub Option<Effort>);

/// Reads `auto`, `none`, `lz4`, or a level of zstd.
///
/// # Errors
/// A line for a person.
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

/// Reads a duration such as `90s`, `10m` or `1h 30m`.
///
/// # Errors
/// A line for a person.
pub fn parse_duration(text: &str) -> Result<Duration, String> {
    text.parse::<jiff::SignedDuration>()
        .ok()
        .and_then(|d| Duration::try_from(d).ok())
        .ok_or_else(|| format!("{:?} is not a duration such as 90s, 10m or 1h", clean(text)))
}

/// Reads an age such as `7d` or `36h`, of whole days or as [`parse_duration`] reads it.
///
/// # Errors
/// A line for a person.
pub fn parse_age(text: &str) -> Result<Duration, String> {
    let days = text.strip_suffix('d').and_then(|n| n.parse::<u64>().ok());
    let seconds = days.and_then(|n| n.checked_mul(24 * 3600));
    match seconds {
        Some(seconds) => Ok(Duration::from_secs(seconds)),
        None => parse_duration(text)
            .map_err(|_| format!("{:?} is not an age such as 36h or 7d", clean(text))),
    }
}

/// Bytes for a person: `1.5 GiB`.
pub fn bytes(n: u64) -> String {
    ByteSize(n).display().iec().to_string()
}

/// A moment, in seconds since 1970, for a person: UTC, to the minute.
pub fn moment(unix: i64) -> String {
    match jiff::Timestamp::from_second(unix) {
        Ok(t) => t.strftime("%Y-%m-%d %H:%M").to_string(),
        Err(_) => "-".into(),
    }
}

/// Seconds since 1970 now.
pub fn now_unix() -> i64 {
    jiff::Timestamp::now().as_second()
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
    fn rates_are_bytes_a_second() {
        assert_eq!(parse_rate("20M"), Ok(20_000_000));
        assert_eq!(parse_rate("20MiB/s"), Ok(20 << 20));
        assert_eq!(parse_rate("125000"), Ok(125_000));
        for bad in ["", "0", "fast", "-1M", "20M/h"] {
            assert!(parse_rate(bad).is_err(), "{bad}");
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
        assert_eq!(parse_duration("10m"), Ok(Duration::from_secs(600)));
        assert_eq!(parse_duration("1h 30m"), Ok(Duration::from_secs(5400)));
        for bad in ["", "10", "-5m", "soon"] {
            assert!(parse_duration(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn ages_have_days() {
        assert_eq!(parse_age("7d"), Ok(Duration::from_secs(7 * 24 * 3600)));
        assert_eq!(parse_age("36h"), Ok(Duration::from_secs(36 * 3600)));
        for bad in ["", "7", "-1d", "d", "99999999999999999999d", "soon"] {
            assert!(parse_age(bad).is_err(), "{bad}");
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
