//! A mount as a row of `drover mounts`.

use drover_agent::mounts::{DiskStatus, State, Status};
use drover_agent::text::{bytes, clean};

/// A row for `drover mounts`.
pub fn row(status: &Status) -> Vec<String> {
    let images: Vec<String> = status.disks.iter().map(|d| clean(&d.image)).collect();
    let words: Vec<String> = status
        .disks
        .iter()
        .map(words)
        .filter(|w| !w.is_empty())
        .collect();
    let devices: Vec<String> = status
        .devices
        .iter()
        .map(|d| d.display().to_string())
        .collect();
    let mode = status.disks.first().map_or_else(String::new, |d| {
        format!("{}{}", d.mode, if d.read_only { ", read-only" } else { "" })
    });
    vec![
        clean(&status.name),
        images.join(" "),
        clean(&status.place),
        devices.join(" "),
        mode,
        match status.state {
            State::Up => "up",
            State::Ending => "ending",
            State::Dead => "dead",
            State::Unmounted => "unmounted",
            State::Silent => "silent",
            State::Damaged => "damaged",
        }
        .into(),
        words.join("; "),
    ]
}

/// The row's heading.
pub const HEADING: [&str; 7] = [
    "name",
    "image",
    "at",
    "device",
    "mode",
    "state",
    "how it is",
];

/// What there is to say in a few words.
fn words(disk: &DiskStatus) -> String {
    let mut parts = Vec::new();
    // Its size is not known when nobody keeps it.
    if disk.mode == "managed" && disk.size > 0 {
        parts.push(format!("{}% here", disk.percent()));
        if disk.rate > 0.0 && disk.percent() < 100 {
            parts.push(format!("{}/s", bytes(disk.rate as u64)));
        }
    }
    if disk.dirty > 0 {
        parts.push(format!("{} to push", bytes(disk.dirty)));
    }
    if disk.pushed > 0 {
        let (pushed, all) = (bytes(disk.pushed), bytes(disk.pushing));
        parts.push(format!("{pushed} of {all} sent"));
    }
    let failing = disk.push_error.as_ref().filter(|_| disk.dirty > 0);
    if let Some(why) = failing {
        let times = match disk.push_failures {
            0 | 1 => String::new(),
            n => format!(" {n} times"),
        };
        parts.push(format!("pushing failed{times}: {}", clean(why)));
    }
    if disk.link != "up" && disk.mode != "own" {
        parts.push(clean(&disk.link));
    }
    if let Some(trouble) = &disk.trouble
        && *trouble != disk.link
        && failing != Some(trouble)
    {
        parts.push(clean(trouble));
    }
    parts.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pushes_that_fail_are_told_with_the_reason() {
        let mut disk = DiskStatus {
            link: "up".into(),
            dirty: 3 << 30,
            pushing: 2 << 30,
            pushed: 1 << 30,
            push_failures: 4,
            push_error: Some("no room at lyon".into()),
            trouble: Some("no room at lyon".into()),
            ..DiskStatus::default()
        };
        let said = words(&disk);
        assert_eq!(
            said,
            "3.0 GiB to push, 1.0 GiB of 2.0 GiB sent, pushing failed 4 times: no room at lyon"
        );
        let json = serde_json::to_value(&disk).expect("JSON");
        assert_eq!(
            (&json["push_failures"], &json["pushed"]),
            (&4.into(), &(1u64 << 30).into())
        );
        assert_eq!(json["push_error"], "no room at lyon");
        disk = DiskStatus {
            dirty: 0,
            pushed: 0,
            trouble: None,
            ..disk
        };
        assert_eq!(words(&disk), "", "all of it got there");
    }
}
