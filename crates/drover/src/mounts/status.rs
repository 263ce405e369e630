//! How a mount is, for people, scripts and metrics.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::text::{bytes, clean};

/// How a mount is.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Status {
    /// Its name.
    pub name: String,
    /// Where it is.
    pub place: String,
    /// Devices that belong to it.
    pub devices: Vec<PathBuf>,
    /// The process that keeps it; 0 when none does.
    pub process: u32,
    /// Since when, seconds since 1970.
    pub since_unix: i64,
    /// What it is doing.
    pub state: State,
    /// Its disks.
    pub disks: Vec<DiskStatus>,
}

/// What a mount is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// It can be used.
    Up,
    /// It is ending.
    Ending,
    /// Its process is gone; mounting there again takes it up, unmounting clears it away.
    Dead,
    /// It was ended and its cache kept; the same can be done.
    Unmounted,
    /// Its process is there and does not answer.
    Silent,
    /// What is written down of it cannot be used; its cache is there.
    Damaged,
}

/// How one disk is.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct DiskStatus {
    /// What it shows.
    pub image: String,
    /// `direct`, `managed` or `own`.
    pub mode: String,
    /// Takes no writes.
    pub read_only: bool,
    /// Bytes of the disk.
    pub size: u64,
    /// Chunks' bytes that are here, zeros included.
    pub local: u64,
    /// Bytes written here that the other site does not have.
    pub dirty: u64,
    /// Chunks' bytes under way.
    pub in_flight: u64,
    /// Bytes that arrived on the link.
    pub received: u64,
    /// Bytes that left on the link.
    pub sent: u64,
    /// Chunks' bytes arriving in a second.
    pub rate: f64,
    /// Seconds until all is here, as it goes now.
    pub seconds_left: Option<f64>,
    /// The last state of the disk that the other site has.
    pub epoch: u64,
    /// `up`, or why the other site cannot be reached.
    pub link: String,
    /// Bytes of the push that is under way.
    #[serde(default)]
    pub pushing: u64,
    /// Those of them that have arrived: they are not sent again.
    #[serde(default)]
    pub pushed: u64,
    /// How often pushes failed since one succeeded.
    #[serde(default)]
    pub push_failures: u64,
    /// Why the last of them did.
    #[serde(default)]
    pub push_error: Option<String>,
    /// What went wrong in the background, for a person.
    pub trouble: Option<String>,
}

impl DiskStatus {
    /// How much is here, in hundredths of the disk.
    pub fn percent(&self) -> u64 {
        match self.size {
            0 => 100,
            size => (u128::from(self.local) * 100 / u128::from(size)) as u64,
        }
    }

    /// What there is to say in a few words.
    pub fn words(&self) -> String {
        let mut parts = Vec::new();
        // Its size is not known when nobody keeps it.
        if self.mode == "managed" && self.size > 0 {
            parts.push(format!("{}% here", self.percent()));
            if self.rate > 0.0 && self.percent() < 100 {
                parts.push(format!("{}/s", bytes(self.rate as u64)));
            }
        }
        if self.dirty > 0 {
            parts.push(format!("{} to push", bytes(self.dirty)));
        }
        if self.pushed > 0 {
            let (pushed, all) = (bytes(self.pushed), bytes(self.pushing));
            parts.push(format!("{pushed} of {all} sent"));
        }
        let failing = self.push_error.as_ref().filter(|_| self.dirty > 0);
        if let Some(why) = failing {
            let times = match self.push_failures {
                0 | 1 => String::new(),
                n => format!(" {n} times"),
            };
            parts.push(format!("pushing failed{times}: {}", clean(why)));
        }
        if self.link != "up" && self.mode != "own" {
            parts.push(clean(&self.link));
        }
        if let Some(trouble) = &self.trouble
            && *trouble != self.link
            && failing != Some(trouble)
        {
            parts.push(clean(trouble));
        }
        parts.join(", ")
    }
}

impl Status {
    /// A row for `drover mounts`.
    pub fn row(&self) -> Vec<String> {
        let images: Vec<String> = self.disks.iter().map(|d| clean(&d.image)).collect();
        let words: Vec<String> = self
            .disks
            .iter()
            .map(DiskStatus::words)
            .filter(|w| !w.is_empty())
            .collect();
        let devices: Vec<String> = self
            .devices
            .iter()
            .map(|d| d.display().to_string())
            .collect();
        let mode = self.disks.first().map_or_else(String::new, |d| {
            format!("{}{}", d.mode, if d.read_only { ", read-only" } else { "" })
        });
        vec![
            clean(&self.name),
            images.join(" "),
            clean(&self.place),
            devices.join(" "),
            mode,
            match self.state {
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
    pub const HEADING: [&'static str; 7] = [
        "name",
        "image",
        "at",
        "device",
        "mode",
        "state",
        "how it is",
    ];
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
        let said = disk.words();
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
        // What a keeper of an older version says has none of this.
        let mut old = json;
        let fields = old.as_object_mut().expect("an object");
        for field in ["pushing", "pushed", "push_failures", "push_error"] {
            fields.remove(field);
        }
        let old: DiskStatus = serde_json::from_value(old).expect("a status");
        assert_eq!(old.push_failures, 0);
        disk = DiskStatus {
            dirty: 0,
            pushed: 0,
            trouble: None,
            ..disk
        };
        assert_eq!(disk.words(), "", "all of it got there");
    }
}
