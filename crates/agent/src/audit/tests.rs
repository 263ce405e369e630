use std::fs;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

use drover_core::ImageName;
use drover_net::{Code, PeerKey, Refusal, Right};
use proptest::prelude::*;

use super::*;

fn read(log: Log) -> (Vec<Record>, u64) {
    let mut lines = Lines::of(log).unwrap();
    let mut records = Vec::new();
    while let Some(entry) = lines.next_entry().unwrap() {
        records.push(entry.record);
    }
    (records, lines.damaged())
}

fn details(records: &[Record]) -> Vec<String> {
    let details = records.iter().map(|record| record.detail.clone());
    details.map(Option::unwrap_or_default).collect()
}

fn line(detail: &str) -> Vec<u8> {
    let record = Record::new(Event::Removed).detail(detail);
    record.line(jiff::Timestamp::now())
}

#[test]
fn an_event_is_read_as_it_was_written() {
    let tmp = tempfile::tempdir().unwrap();
    let audit = Audit::new(tmp.path());
    let name = ImageName::new("web.img").unwrap();
    let record = Record::new(Event::SendDelivered)
        .by_peer("acme", PeerKey([3; 32]))
        .from("10.0.0.7:4711")
        .in_domain("default")
        .image(&name)
        .bytes(8 << 20)
        .took(Duration::from_millis(1500));
    audit.write(record.clone());
    let refusal = Refusal::new(Code::Denied, "no\x1b[31m, \u{9b}never");
    audit.write(Record::refused("session.open", &refusal, None).by_stranger(None));
    audit.write(Record::refused("mount.open", &refusal, Some(Right::Write)));
    let path = tmp.path().join("audit.log");
    let mode = fs::metadata(&path).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let text = fs::read_to_string(&path).unwrap();
    let harmless = |c: char| !c.is_control() || c == '\n';
    assert!(text.chars().all(harmless), "{text:?}");
    let (read, damaged) = read(Log::new(tmp.path()));
    assert_eq!((read.len(), damaged), (3, 0));
    let time = read[0].time.clone();
    assert_eq!(read[0], Record { time, ..record });
    assert!(read[0].when().unwrap() <= jiff::Timestamp::now());
    assert!(read[1].detail.as_ref().unwrap().contains("never"));
    assert_eq!(read[1].by, By::Stranger);
    assert_eq!(read[2].right.as_deref(), Some("write"));
    assert_eq!(read[2].detail, None);
}

#[test]
fn no_event_is_longer_than_a_line_may_be() {
    let long = "\"".repeat(5000);
    let record = Record {
        peer: Some(long.clone()),
        key: Some(PeerKey([255; 32])),
        address: Some(long.clone()),
        domain: Some(long.clone()),
        image: Some(long.clone()),
        request: Some(long.clone()),
        right: Some(long.clone()),
        ticket: Some(long.clone()),
        bytes: Some(u64::MAX),
        ms: Some(u64::MAX),
        more: Some(u64::MAX),
        detail: Some(long),
        ..Record::new(Event::TransferRemoved)
    };
    let line = record.line(jiff::Timestamp::now());
    assert!(line.len() <= MAX_LINE_BYTES, "{}", line.len());
    let read: Record = serde_json::from_slice(&line).unwrap();
    assert!(read.detail.unwrap().ends_with("..."));
}

#[test]
fn what_cannot_be_written_is_counted_and_stops_nothing() {
    let tmp = tempfile::tempdir().unwrap();
    let audit = Audit::new(&tmp.path().join("no such directory"));
    audit.write(Record::new(Event::Removed));
    audit.write(Record::new(Event::Removed));
    assert_eq!(audit.failed(), 2);
    // Neither is it written where a link points to.
    let target = tmp.path().join("elsewhere");
    fs::write(&target, "").unwrap();
    std::os::unix::fs::symlink(&target, tmp.path().join("audit.log")).unwrap();
    let audit = Audit::new(tmp.path());
    audit.write(Record::new(Event::Removed));
    assert_eq!(audit.failed(), 1);
    assert_eq!(fs::read(&target).unwrap(), b"");
}

#[test]
fn a_filter_finds_a_peer_an_image_and_refusals() {
    let name = ImageName::new("web.img").unwrap();
    let key = PeerKey([3; 32]);
    let mut record = Record::new(Event::Refused)
        .by_peer("acme", key)
        .image(&name);
    record.time = "2026-11-23T10:00:00.000Z".into();
    let wanted = |change: &dyn Fn(&mut Filter)| {
        let mut filter = Filter::default();
        change(&mut filter);
        filter.wants(&record)
    };
    assert!(wanted(&|_| {}));
    assert!(wanted(&|f| f.peer = Some("acme".into())));
    assert!(wanted(&|f| f.peer = Some(key.short())));
    assert!(wanted(&|f| f.peer = Some(key.to_string())));
    assert!(!wanted(&|f| f.peer = Some("ac".into())));
    assert!(!wanted(&|f| f.peer = Some(key.short()[..4].into())));
    assert!(wanted(&|f| f.image = Some("web.img".into())));
    assert!(!wanted(&|f| f.image = Some("web".into())));
    assert!(wanted(&|f| f.refused = true));
    let at = |text: &str| Some(text.parse().unwrap());
    assert!(wanted(&|f| f.since = at("2026-11-23T10:00:00Z")));
    assert!(!wanted(&|f| f.since = at("2026-11-23T10:00:01Z")));
    record.outcome = Outcome::Ok;
    let refused = Filter {
        refused: true,
        ..Filter::default()
    };
    assert!(!refused.wants(&record));
}

#[test]
fn a_period_begins_a_while_ago_or_at_a_moment() {
    let hour = jiff::SignedDuration::from_hours(1);
    let ago = since("1h").unwrap().duration_until(Timestamp::now());
    assert!(ago >= hour && ago < 2 * hour, "{ago}");
    let moment = "2026-11-23T18:00:00Z";
    assert_eq!(since(moment), Ok(moment.parse().unwrap()));
    assert!(since("yesterday").unwrap_err().contains("yesterday"));
    assert!(since("999999999999d").is_err());
}

#[test]
fn an_event_of_a_later_version_is_read() {
    let line = r#"{"v":2,"time":"2026-11-23T10:00:00.000Z","event":"teleported","outcome":"ok","by":"site","new":1}"#;
    let record: Record = serde_json::from_str(line).unwrap();
    assert_eq!(record.event, Event::Unknown);
    assert_eq!(Event::SendBegun.name(), "send-begun");
}

#[test]
fn the_files_together_have_a_limit() {
    let tmp = tempfile::tempdir().unwrap();
    let log = Log::with_limit(tmp.path(), 10_000);
    for n in 0..2000 {
        log.append(&line(&n.to_string())).unwrap();
    }
    let files = fs::read_dir(tmp.path()).unwrap();
    let sizes: Vec<u64> = files
        .map(|f| f.unwrap().metadata().unwrap().len())
        .collect();
    assert_eq!(sizes.len() as u32, OLD_FILES + 1);
    assert!(sizes.iter().all(|size| *size < 10_200), "{sizes:?}");
    let (records, damaged) = read(log);
    let wanted: Vec<String> = (2000 - records.len()..2000)
        .map(|n| n.to_string())
        .collect();
    assert_eq!(details(&records), wanted);
    assert!(records.len() > 200 && damaged == 0, "{}", records.len());
}

#[test]
fn writers_at_the_same_time_lose_and_mix_nothing() {
    let tmp = tempfile::tempdir().unwrap();
    std::thread::scope(|scope| {
        for writer in 0..4 {
            let log = Log::with_limit(tmp.path(), 20_000);
            scope.spawn(move || {
                for n in 0..100 {
                    log.append(&line(&format!("{writer}-{n}"))).unwrap();
                }
            });
        }
    });
    let (records, damaged) = read(Log::with_limit(tmp.path(), 20_000));
    let mut found = details(&records);
    found.sort();
    let mut wanted: Vec<String> = (0..400)
        .map(|n| format!("{}-{}", n / 100, n % 100))
        .collect();
    wanted.sort();
    assert_eq!((found, damaged), (wanted, 0));
}

proptest! {
    /// Writers that die in the middle of a line, between complete ones, with files of any length; the reader follows
    /// from the beginning, or begins in the middle.
    #[test]
    fn every_complete_line_is_read_once(
        max in 300u64..3000,
        steps in prop::collection::vec((0usize..400, any::<bool>(), any::<bool>()), 1..60),
    ) {
        let tmp = tempfile::tempdir().unwrap();
        let log = || Log::with_limit(tmp.path(), max);
        let mut follower = Lines::of(log()).unwrap();
        let (mut written, mut followed, mut torn) = (Vec::new(), Vec::new(), 0);
        let follow = |follower: &mut Lines, followed: &mut Vec<Record>| {
            while let Some(entry) = follower.next_entry().unwrap() {
                followed.push(entry.record);
            }
        };
        for (n, (length, tears, follows)) in steps.into_iter().enumerate() {
            let text = format!("{n} {}", "x".repeat(length % 120));
            let bytes = line(&text);
            if tears {
                // A crash: any part of the line, without its end.
                let part = &bytes[..length.min(bytes.len() - 2)];
                let path = tmp.path().join("audit.log");
                let mut file = fs::File::options().append(true).create(true).open(path).unwrap();
                file.write_all(part).unwrap();
                torn += 1;
            } else {
                log().append(&bytes).unwrap();
                written.push(text);
            }
            if follows {
                follow(&mut follower, &mut followed);
            }
        }
        follow(&mut follower, &mut followed);
        // Following often enough, nothing is missed; otherwise only files that are gone.
        let (found, missed) = (details(&followed), written.len() - followed.len());
        prop_assert!(found.iter().all(|text| written.contains(text)));
        let mut once = found.clone();
        once.dedup();
        prop_assert_eq!(&once, &found);
        let old = log().old(OLD_FILES);
        prop_assert!(missed == 0 || old.exists(), "{} missed", missed);
        let (records, damaged) = read(log());
        let tail = written.len() - records.len();
        prop_assert_eq!(details(&records), &written[tail..]);
        prop_assert!(tail == 0 || old.exists());
        prop_assert!(damaged <= torn);
    }
}
