//! Replicas of machines and disks: copies of them as of one moment after another, kept at another site.
//!
//! Each has one small file (`docs/format/replica.md`), and each change of it is atomic and durable. A **point** is a set of
//! images, of all disks of the machine as of one moment. The next one arrives as other images, and becomes *the* point by one
//! change of the file: whatever is interrupted, there is a point, and only one. A **failover** is another such change: from then
//! on no round of the source is accepted, and the images can be written.

use std::io;
use std::marker::PhantomData;
use std::path::{Path, PathBuf};

use drover_core::{Digest, ImageName};
use drover_net::{Code, Refusal, decode, encode};
use drover_storage::Envelope;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::machine::{MAX_DISKS, MachineLock, Machines, Other, Seed, Token};

const FORMAT: Envelope = Envelope {
    magic: *b"DRVRREP\0",
    version: 1,
    max_bytes: 64 << 10,
};

/// Upper bound on the name of a device, in bytes.
const MAX_DEVICE: usize = 200;

/// An image of a point.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PointImage {
    /// Its name.
    pub name: ImageName,
    /// What the hypervisor of the source calls the device; empty if it has none.
    pub device: String,
    /// What was delivered.
    pub digest: Digest,
    /// Size of the disk in bytes.
    pub size: u64,
}

/// All disks as of one moment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Point {
    /// The round that brought it.
    pub round: Token,
    /// The moment, by the clock of the site that has it: milliseconds since 1970.
    pub moment_ms: u64,
    /// Its images, in the order of the disks.
    pub images: Vec<PointImage>,
}

/// A round that is being received.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Round {
    /// Names it: random, chosen by this site.
    pub token: Token,
    /// The images that it brings, in the order of the disks.
    pub images: Vec<ImageName>,
    /// What the hypervisor of the source calls the devices.
    pub devices: Vec<String>,
}

/// A replica that is kept at this site.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Replica {
    /// Identifies what it is a replica of: random, chosen by the source.
    pub seed: Seed,
    /// The site that it comes from.
    pub from: Other,
    /// Whether it is of a machine, not of an image.
    pub is_machine: bool,
    /// Seconds from one round to the next; none if they are made one by one.
    pub every_seconds: Option<u64>,
    /// The newest complete state.
    pub point: Option<Point>,
    /// The round that is being received.
    pub under_way: Option<Round>,
    /// When its source was last heard: milliseconds since 1970.
    pub heard_ms: u64,
    /// Rounds that were complete.
    pub rounds: u64,
    /// When it took over, if it has: milliseconds since 1970. No round is accepted any more.
    pub failed_over_ms: Option<u64>,
}

/// The names that a replica may have whose disks include this image.
pub fn may_be_of(image: &ImageName) -> impl Iterator<Item = ImageName> {
    let name = image.as_str();
    let name = name
        .strip_suffix(".a.raw")
        .or_else(|| name.strip_suffix(".b.raw"));
    let of_machine = name.and_then(|name| {
        let (name, disk) = name.rsplit_once('-')?;
        disk.parse::<usize>().ok().map(|_| name)
    });
    let names = name.into_iter().chain(of_machine);
    names.filter_map(|name| ImageName::new(name).ok())
}

/// A replica that is sent from this site.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sent {
    /// Its seed.
    pub seed: Seed,
    /// Where it is kept.
    pub to: Other,
    /// Its name there.
    pub name_there: ImageName,
    /// What it is of, as the command that sends it was told.
    pub source: String,
    /// Seconds from one round to the next; none if they are made one by one.
    pub every_seconds: Option<u64>,
    /// The moment of the newest point that is complete there, by this site's clock: milliseconds since 1970.
    pub moment_ms: Option<u64>,
    /// Bytes of its disks.
    pub size: u64,
    /// Bytes on the wire for the newest point.
    pub wire_bytes: u64,
    /// Rounds that were complete.
    pub rounds: u64,
    /// What the other site said when it had taken over.
    pub fenced: Option<String>,
}

impl Replica {
    /// A replica of which nothing has arrived.
    #[must_use]
    pub fn new(seed: Seed, from: Other, is_machine: bool, now_ms: u64) -> Self {
        Self {
            seed,
            from,
            is_machine,
            every_seconds: None,
            point: None,
            under_way: None,
            heard_ms: now_ms,
            rounds: 0,
            failed_over_ms: None,
        }
    }

    /// Begins a round, or the same anew, with the disks of these devices; their images have names after `name`, other than those of the
    /// point.
    ///
    /// # Errors
    /// [`Code::Denied`] for disks that no machine has.
    pub fn begin(
        &self,
        name: &ImageName,
        devices: Vec<String>,
        token: Token,
    ) -> Result<Self, Refusal> {
        let disks = devices.len();
        if disks == 0 || disks > MAX_DISKS {
            let text = format!("a machine has 1 to {MAX_DISKS} disks");
            return Err(Refusal::new(Code::Denied, text));
        }
        if devices.iter().any(|device| device.len() > MAX_DEVICE) {
            let text = "the name of a device is too long";
            return Err(Refusal::new(Code::Denied, text));
        }
        let of_point = self.point.iter().flat_map(|point| &point.images);
        let ends_in_a = |image: &PointImage| image.name.as_str().ends_with(".a.raw");
        let letter = match of_point.clone().any(ends_in_a) {
            true => 'b',
            false => 'a',
        };
        let image = |n: usize| match self.is_machine {
            true => ImageName::new(format!("{name}-{n}.{letter}.raw")),
            false => ImageName::new(format!("{name}.{letter}.raw")),
        };
        let images: Result<Vec<_>, _> = (0..disks).map(image).collect();
        let images = images.map_err(|e| Refusal::new(Code::Denied, e.to_string()))?;
        Ok(Self {
            under_way: Some(Round {
                token,
                images,
                devices,
            }),
            ..self.clone()
        })
    }

    /// The round is complete: its images are the point. `None` if it is not under way.
    #[must_use]
    pub fn complete(&self, point: Point) -> Option<Self> {
        self.under_way
            .as_ref()
            .filter(|round| round.token == point.round)?;
        Some(Self {
            point: Some(point),
            under_way: None,
            rounds: self.rounds + 1,
            ..self.clone()
        })
    }

    /// Takes over. No round is accepted from now on.
    #[must_use]
    pub fn fail_over(&self, now_ms: u64) -> Self {
        Self {
            failed_over_ms: Some(self.failed_over_ms.unwrap_or(now_ms)),
            under_way: None,
            ..self.clone()
        }
    }

    /// Whether an image is of its point.
    #[must_use]
    pub fn has(&self, image: &ImageName) -> bool {
        let mut images = self.point.iter().flat_map(|point| &point.images);
        images.any(|of| of.name == *image)
    }

    /// Whether an image is one of the round that is being received.
    #[must_use]
    pub fn receives(&self, image: &ImageName) -> bool {
        let mut images = self.under_way.iter().flat_map(|round| &round.images);
        images.any(|of| of == image)
    }

    /// Whether its source was heard in the last interval, so that it may still run.
    #[must_use]
    pub fn was_heard(&self, now_ms: u64, usual_ms: u64) -> bool {
        let every = self
            .every_seconds
            .map(|seconds| seconds.saturating_mul(1000));
        let silent = now_ms.saturating_sub(self.heard_ms);
        silent <= every.unwrap_or(usual_ms).max(usual_ms)
    }
}

/// The name of a record, and what it says, or why it cannot be read.
pub type Named<T> = (ImageName, Result<T, Refusal>);

/// Records in a directory, by name.
#[derive(Clone, Debug)]
pub struct Records<T> {
    directory: PathBuf,
    of: PhantomData<fn() -> T>,
}

impl<T: Serialize + DeserializeOwned> Records<T> {
    /// Those in a directory, which need not exist.
    #[must_use]
    pub fn new(directory: PathBuf) -> Self {
        let of = PhantomData;
        Self { directory, of }
    }

    /// The directory.
    #[must_use]
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// The record of that name.
    ///
    /// # Errors
    /// A file that cannot be read, or is damaged.
    pub fn load(&self, name: &ImageName) -> Result<Option<T>, Refusal> {
        let wrong = |code, why: &dyn std::fmt::Display| {
            Refusal::new(code, format!("the record of the replica {name}: {why}"))
        };
        let read = FORMAT.read(&self.directory.join(name.as_str()));
        let Some(bytes) = read.map_err(|e| wrong(Code::Io, &e))? else {
            return Ok(None);
        };
        let body = FORMAT.open(&bytes).map_err(|e| wrong(Code::Corrupt, &e))?;
        Ok(Some(decode(body).map_err(|e| wrong(Code::Corrupt, &e))?))
    }

    /// Replaces it; durable when it returns.
    ///
    /// # Errors
    /// When it cannot be written; then the former record remains.
    pub fn store(&self, name: &ImageName, record: &T) -> Result<(), Refusal> {
        let write = || {
            drover_storage::make_private_dir(&self.directory)?;
            FORMAT.write(&self.directory.join(name.as_str()), &encode(record))
        };
        write().map_err(|e| {
            let text = format!("cannot write the record of the replica {name}: {e}");
            Refusal::new(Code::Io, text)
        })
    }

    /// Forgets it.
    ///
    /// # Errors
    /// Errors of the disk.
    pub fn remove(&self, name: &ImageName) -> io::Result<()> {
        Machines::new(self.directory.clone()).remove(name)
    }

    /// All records, sorted by name.
    ///
    /// # Errors
    /// Errors of the disk.
    pub fn all(&self) -> Result<Vec<Named<T>>, Refusal> {
        let names = Machines::new(self.directory.clone()).names();
        let names = names.map_err(|e| Refusal::new(Code::Io, format!("the replicas: {e}")))?;
        let mut all = Vec::new();
        for name in names {
            // It may be removed meanwhile.
            let record = self.load(&name).transpose();
            all.extend(record.map(|record| (name, record)));
        }
        Ok(all)
    }

    /// Takes the lock of a record until the value is dropped; `None` when another process has it.
    ///
    /// # Errors
    /// Errors of the disk.
    pub fn lock(&self, name: &ImageName) -> io::Result<Option<MachineLock>> {
        Machines::new(self.directory.clone()).lock(name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIRST: Token = Token([1; 16]);
    const SECOND: Token = Token([2; 16]);

    fn replica() -> Replica {
        let from = Other {
            key: [1; 32],
            name: "paris".into(),
        };
        Replica::new(Seed([1; 16]), from, true, 1000)
    }

    fn devices(n: usize) -> Vec<String> {
        vec!["vd".into(); n]
    }

    fn name() -> ImageName {
        ImageName::new("web").unwrap()
    }

    fn point(of: &Replica) -> Point {
        let round = of.under_way.clone().unwrap();
        let image = |name: &ImageName| PointImage {
            name: name.clone(),
            device: String::new(),
            digest: Digest::default(),
            size: 4096,
        };
        Point {
            round: round.token,
            moment_ms: 900,
            images: round.images.iter().map(image).collect(),
        }
    }

    #[test]
    fn a_round_has_other_images_than_the_point() {
        let begun = replica().begin(&name(), devices(2), FIRST).unwrap();
        assert!(begun.point.is_none());
        let first = begun.complete(point(&begun)).unwrap();
        assert_eq!((first.rounds, &first.under_way), (1, &None));
        assert!(first.has(&ImageName::new("web-1.a.raw").unwrap()));
        let begun = first.begin(&name(), devices(2), SECOND).unwrap();
        assert_eq!(begun.point, first.point);
        let next = ImageName::new("web-1.b.raw").unwrap();
        assert!(begun.receives(&next) && !first.receives(&next));
        let images = &begun.under_way.as_ref().unwrap().images;
        assert_eq!(images[0].as_str(), "web-0.b.raw");
        assert!(!images.iter().any(|image| begun.has(image)));
        // A late end of the first one.
        assert_eq!(begun.complete(first.point.clone().unwrap()), None);
        let second = begun.complete(point(&begun)).unwrap();
        let third = second.begin(&name(), devices(1), FIRST).unwrap();
        assert_eq!(third.under_way.unwrap().images[0].as_str(), "web-0.a.raw");
        assert!(second.begin(&name(), devices(0), FIRST).is_err());
    }

    #[test]
    fn an_image_names_its_replicas() {
        let of = |image: &str| {
            let image = ImageName::new(image).unwrap();
            may_be_of(&image)
                .map(|name| name.to_string())
                .collect::<Vec<_>>()
        };
        assert_eq!(of("web-0.a.raw"), ["web-0", "web"]);
        assert_eq!(of("web-db.b.raw"), ["web-db"]);
        assert_eq!(of("web.raw"), Vec::<String>::new());
    }

    #[test]
    fn a_failover_is_for_good() {
        let begun = replica().begin(&name(), devices(1), FIRST).unwrap();
        let over = begun.fail_over(5000);
        assert_eq!(over.complete(point(&begun)), None);
        assert_eq!(over.fail_over(6000), over);
    }

    #[test]
    fn a_source_is_heard_in_its_interval() {
        let mut replica = replica();
        assert!(replica.was_heard(1000 + 500, 500));
        assert!(!replica.was_heard(1000 + 501, 500));
        replica.every_seconds = Some(60);
        assert!(replica.was_heard(1000 + 60_000, 500));
        // A clock that was set back.
        assert!(replica.was_heard(0, 500));
    }

    #[test]
    fn a_record_survives_and_a_damaged_one_is_said() {
        let directory = tempfile::tempdir().unwrap();
        let records = Records::<Replica>::new(directory.path().join("replicas"));
        assert_eq!(records.load(&name()).unwrap(), None);
        let begun = replica().begin(&name(), devices(2), FIRST).unwrap();
        records.store(&name(), &begun).unwrap();
        assert_eq!(records.all().unwrap(), [(name(), Ok(begun))]);
        let path = records.directory().join("web");
        let mut bytes = std::fs::read(&path).unwrap();
        bytes[40] ^= 1;
        std::fs::write(&path, bytes).unwrap();
        let refusal = records.load(&name()).unwrap_err();
        assert_eq!(refusal.code, Code::Corrupt);
        records.remove(&name()).unwrap();
        assert_eq!(records.load(&name()).unwrap(), None);
    }
}
