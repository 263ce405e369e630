//! The table of `drover mounts`.

use drover_agent::mounts::{DiskStatus, MountState, Status};
use drover_agent::text::{bytes, clean};

/// The row of one mount.
pub fn row(status: &Status) -> Vec<String> {
    let images: Vec<String> = status.disks.iter().map(|d| clean(&d.image)).collect();
    let progress: Vec<String> = status
        .disks
        .iter()
        .map(progress_of)
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
            MountState::Up => "up",
            MountState::Standby => "standing by",
            MountState::Ending => "ending",
            MountState::Dead => "dead",
            MountState::Unmounted => "unmounted",
            MountState::Silent => "not responding",
            MountState::Damaged => "damaged",
        }
        .into(),
        progress.join("; "),
    ]
}

/// The column headings.
pub const HEADINGS: [&str; 7] = [
    "name",
    "image",
    "mounted on",
    "device",
    "mode",
    "state",
    "status",
];

/// The sync progress of a disk, and its problems.
fn progress_of(disk: &DiskStatus) -> String {
    let mut parts = Vec::new();
    // The size is unknown when no process serves the mount.
    if disk.mode == "managed" && disk.size > 0 {
        parts.push(format!("{}% cached", disk.percent()));
        if disk.rate > 0.0 && disk.percent() < 100 {
            parts.push(format!("{}/s", bytes(disk.rate as u64)));
        }
    }
    if disk.mode == "launched" {
        parts.push(format!("{}% here", disk.percent()));
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
        parts.push(format!("push failed{times}: {}", clean(why)));
    }
    if disk.link != "up" && !matches!(disk.mode.as_str(), "own" | "launched") {
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
    fn failed_pushes_are_shown_with_the_reason() {
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
        let shown = progress_of(&disk);
        assert_eq!(
            shown,
            "3.0 GiB to push, 1.0 GiB of 2.0 GiB sent, push failed 4 times: no room at lyon"
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
        assert_eq!(progress_of(&disk), "", "everything was pushed");
    }
}
