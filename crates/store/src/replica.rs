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

/// Upper bound on an encoded record, in bytes: what its file holds beside magic, version and checksum.
pub const MAX_RECORD_BYTES: usize = (64 << 10) - 44;

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
    /// Images that earlier rounds have brought, whole or in part, and that are of no use any more: to be removed.
    pub left: Vec<ImageName>,
    /// When its source was last heard: milliseconds since 1970.
    pub heard_ms: u64,
    /// Rounds that were complete.
    pub rounds: u64,
    /// When it took over, if it has: milliseconds since 1970. No round is accepted any more.
    pub failed_over_ms: Option<u64>,
    /// Whether its machine became this site's then, to be started here. It may have moved on since.
    pub booted: bool,
}

/// What the source of a replica says when it begins a round.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Offer {
    /// What it is a replica of.
    pub seed: Seed,
    /// Whether that is a machine, not an image.
    pub is_machine: bool,
    /// What its hypervisor calls the devices, in the order of the disks; empty if it has none.
    pub devices: Vec<String>,
    /// Seconds from one round to the next; none if they are made one by one.
    pub every_seconds: Option<u64>,
}

/// The image of a disk of a replica. No two replicas have a name in common, whatever they are called: the last dash ends the
/// name of the replica.
fn image_of(replica: &ImageName, disk: usize, letter: char) -> Result<ImageName, Refusal> {
    ImageName::new(format!("{replica}-{disk}.{letter}.raw")).map_err(|e| {
        let text = format!("the images of a replica called {replica} have no valid names: {e}");
        Refusal::new(Code::Denied, text)
    })
}

/// The only replica that may have an image of this name, if any may.
#[must_use]
pub fn replica_of(image: &ImageName) -> Option<ImageName> {
    let name = image.as_str();
    let name = name
        .strip_suffix(".a.raw")
        .or_else(|| name.strip_suffix(".b.raw"))?;
    let (name, disk) = name.rsplit_once('-')?;
    let number: usize = disk.parse().ok()?;
    // As it is written by `image_of`.
    let is_number = number.to_string() == disk && number < MAX_DISKS;
    is_number.then(|| ImageName::new(name).ok())?
}

/// The name that the image of the same disk has in every other round.
#[must_use]
pub fn in_other_rounds(image: &ImageName) -> Option<ImageName> {
    let name = image.as_str();
    let other = match name.strip_suffix(".a.raw") {
        Some(name) => format!("{name}.b.raw"),
        None => format!("{}.a.raw", name.strip_suffix(".b.raw")?),
    };
    ImageName::new(other).ok()
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
    pub fn new(seed: Seed, from: Other, is_machine: bool) -> Self {
        Self {
            seed,
            from,
            is_machine,
            every_seconds: None,
            point: None,
            under_way: None,
            left: Vec::new(),
            heard_ms: 0,
            rounds: 0,
            failed_over_ms: None,
            booted: false,
        }
    }

    /// Begins a round, or the same anew; its images have names after `name`, other than those of the point.
    ///
    /// # Errors
    /// [`Code::Lost`] when it has taken over, [`Code::Denied`] for another machine, or disks that no machine has.
    pub fn begin(
        &self,
        name: &ImageName,
        offer: &Offer,
        token: Token,
        now_ms: u64,
    ) -> Result<Self, Refusal> {
        let refused = |code, text: String| Err(Refusal::new(code, text));
        if self.failed_over_ms.is_some() {
            return refused(Code::Lost, format!("{name} has taken over"));
        }
        if (self.seed, self.is_machine) != (offer.seed, offer.is_machine) {
            let text = format!(
                "a replica of another machine or disk is kept as {name}: use another name, or run `drover replicate --forget {name}` where it is kept"
            );
            return refused(Code::Denied, text);
        }
        let disks = offer.devices.len();
        if disks == 0 || disks > MAX_DISKS {
            let text = format!("a machine has 1 to {MAX_DISKS} disks");
            return refused(Code::Denied, text);
        }
        if offer.devices.iter().any(|device| device.len() > MAX_DEVICE) {
            let text = "the name of a device is too long";
            return refused(Code::Denied, text.into());
        }
        let mut of_point = self.point.iter().flat_map(|point| &point.images);
        let letter = match of_point.any(|image| image.name.as_str().ends_with(".a.raw")) {
            true => 'b',
            false => 'a',
        };
        let images: Result<Vec<_>, _> = (0..disks)
            .map(|disk| image_of(name, disk, letter))
            .collect();
        let images = images?;
        let mut begun = Self {
            every_seconds: offer.every_seconds,
            heard_ms: now_ms,
            ..self.clone()
        };
        begun.leave_round();
        begun.left.retain(|left| !images.contains(left));
        begun.under_way = Some(Round {
            token,
            images,
            devices: offer.devices.clone(),
        });
        Ok(begun)
    }

    /// The images of the round that is under way are of no use any more.
    fn leave_round(&mut self) {
        let images = self.under_way.take().into_iter();
        for image in images.flat_map(|round| round.images) {
            if !self.left.contains(&image) {
                self.left.push(image);
            }
        }
    }

    /// The round is complete: its images are the point, as of so long ago. `delivered` is asked for the bytes of the disk of each,
    /// if it was delivered with that digest. `None` if it was complete before.
    ///
    /// # Errors
    /// [`Code::OutOfOrder`] if it is not under way; those of `delivered`.
    pub fn complete(
        &self,
        token: Token,
        digests: &[Digest],
        age_ms: u64,
        now_ms: u64,
        delivered: impl Fn(&ImageName, &Digest) -> Result<u64, Refusal>,
    ) -> Result<Option<Self>, Refusal> {
        if self
            .point
            .as_ref()
            .is_some_and(|point| point.round == token)
        {
            return Ok(None);
        }
        let round = self.under_way.as_ref();
        let round =
            round.filter(|round| round.token == token && round.images.len() == digests.len());
        let none = || Refusal::new(Code::OutOfOrder, "that round is not under way");
        let round = round.ok_or_else(none)?;
        let mut images = Vec::new();
        for ((name, device), digest) in round.images.iter().zip(&round.devices).zip(digests) {
            images.push(PointImage {
                name: name.clone(),
                device: device.clone(),
                digest: *digest,
                size: delivered(name, digest)?,
            });
        }
        let before = self.point.iter().flat_map(|point| &point.images);
        let before = before.map(|image| image.name.clone());
        Ok(Some(Self {
            left: self.left.iter().cloned().chain(before).collect(),
            point: Some(Point {
                round: token,
                moment_ms: now_ms.saturating_sub(age_ms),
                images,
            }),
            under_way: None,
            heard_ms: now_ms,
            rounds: self.rounds.saturating_add(1),
            ..self.clone()
        }))
    }

    /// Takes over. No round is accepted from now on.
    #[must_use]
    pub fn fail_over(&self, now_ms: u64) -> Self {
        let mut over = self.clone();
        over.leave_round();
        over.failed_over_ms.get_or_insert(now_ms);
        over
    }

    /// Whether an image is of its point.
    #[must_use]
    pub fn has(&self, image: &ImageName) -> bool {
        let mut images = self.point.iter().flat_map(|point| &point.images);
        images.any(|of| of.name == *image)
    }

    /// Whether rounds bring an image of this name, or have brought it and will remove it.
    #[must_use]
    pub fn receives(&self, image: &ImageName) -> bool {
        let mut images = self.under_way.iter().flat_map(|round| &round.images);
        images.any(|of| of == image) || self.left.contains(image)
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

    const SEED: Seed = Seed([1; 16]);

    fn replica() -> Replica {
        let from = Other {
            key: [1; 32],
            name: "paris".into(),
        };
        Replica::new(SEED, from, true)
    }

    fn offer(disks: usize) -> Offer {
        Offer {
            seed: SEED,
            is_machine: true,
            devices: vec!["vd".into(); disks],
            every_seconds: None,
        }
    }

    fn name() -> ImageName {
        ImageName::new("web").unwrap()
    }

    fn begin(known: &Replica, disks: usize, token: Token) -> Replica {
        known.begin(&name(), &offer(disks), token, 1000).unwrap()
    }

    /// Completes the round that is under way, of which the moment was 100 ms ago.
    fn complete(known: &Replica) -> Replica {
        let round = known.under_way.as_ref().unwrap();
        let digests = vec![Digest::default(); round.images.len()];
        let done = known.complete(round.token, &digests, 100, 1000, |_, _| Ok(4096));
        done.unwrap().expect("a new point")
    }

    fn images(of: &Replica) -> Vec<&str> {
        let images = of.under_way.iter().flat_map(|round| &round.images);
        images.map(ImageName::as_str).collect()
    }

    #[test]
    fn a_round_has_other_images_than_the_point() {
        let begun = begin(&replica(), 2, FIRST);
        assert!(begun.point.is_none());
        let first = complete(&begun);
        assert_eq!((first.rounds, &first.under_way), (1, &None));
        assert_eq!(first.point.as_ref().unwrap().moment_ms, 900);
        assert!(first.has(&ImageName::new("web-1.a.raw").unwrap()));
        let begun = begin(&first, 2, SECOND);
        assert_eq!(begun.point, first.point);
        let next = ImageName::new("web-1.b.raw").unwrap();
        assert!(begun.receives(&next) && !first.receives(&next));
        assert_eq!(images(&begun), ["web-0.b.raw", "web-1.b.raw"]);
        let again = |round, digests: &[Digest]| {
            let delivered = |_: &ImageName, _: &Digest| panic!("of another round");
            begun.complete(round, digests, 0, 2000, delivered)
        };
        let digests = [Digest::default(); 2];
        // A late end of the first one changes nothing; one of another, or of other disks, is refused.
        assert_eq!(again(FIRST, &digests), Ok(None));
        for (round, digests) in [(Token([3; 16]), &digests[..]), (SECOND, &digests[..1])] {
            let refusal = again(round, digests).unwrap_err();
            assert_eq!(refusal.code, Code::OutOfOrder);
        }
        let second = complete(&begun);
        assert_eq!(
            second.left,
            ["web-0.a.raw", "web-1.a.raw"].map(|name| ImageName::new(name).unwrap())
        );
        let third = begin(&second, 1, FIRST);
        assert_eq!(images(&third), ["web-0.a.raw"]);
        assert!(second.begin(&name(), &offer(0), FIRST, 0).is_err());
        let other = Offer {
            seed: Seed([2; 16]),
            ..offer(1)
        };
        let refusal = second.begin(&name(), &other, FIRST, 0).unwrap_err();
        assert_eq!(refusal.code, Code::Denied);
    }

    #[test]
    fn what_rounds_with_more_disks_have_left_is_known() {
        let half = begin(&replica(), 3, FIRST);
        let begun = begin(&half, 1, SECOND);
        let left = |of: &Replica| of.left.iter().map(ToString::to_string).collect::<Vec<_>>();
        assert_eq!(left(&begun), ["web-1.a.raw", "web-2.a.raw"]);
        let complete = complete(&begun);
        assert_eq!(left(&complete), ["web-1.a.raw", "web-2.a.raw"]);
        // Another that has them again.
        let more = begin(&begin(&complete, 1, FIRST), 2, SECOND);
        assert_eq!(left(&more), ["web-1.a.raw", "web-2.a.raw"]);
        let over = more.fail_over(5000);
        let all = ["web-1.a.raw", "web-2.a.raw", "web-0.b.raw", "web-1.b.raw"];
        assert_eq!(left(&over), all);
    }

    #[test]
    fn an_image_is_of_one_replica_at_most() {
        let of = |image: &str| {
            let image = ImageName::new(image).unwrap();
            replica_of(&image).map(|name| name.to_string())
        };
        assert_eq!(of("web-0.a.raw").as_deref(), Some("web"));
        assert_eq!(of("web-0-0.a.raw").as_deref(), Some("web-0"));
        for none in [
            "web.raw",
            "web.a.raw",
            "web-db.b.raw",
            "web-00.a.raw",
            "web-+1.a.raw",
            "web-32.a.raw",
            "-0.a.raw",
        ] {
            assert_eq!(of(none), None, "{none}");
        }
        // What is called web-0, machine or disk, has no image in common with the disks of the machine web.
        let of = |name: &str, is_machine| {
            let name = ImageName::new(name).unwrap();
            let offer = Offer {
                is_machine,
                ..offer(MAX_DISKS)
            };
            let known = Replica {
                is_machine,
                ..replica()
            };
            let begun = known.begin(&name, &offer, FIRST, 0).unwrap();
            let images = begun.under_way.unwrap().images;
            assert!(
                images
                    .iter()
                    .all(|image| replica_of(image).as_ref() == Some(&name))
            );
            images
        };
        let web = of("web", true);
        let other = in_other_rounds(&web[31]).unwrap();
        assert_eq!(other.as_str(), "web-31.b.raw");
        assert_eq!(in_other_rounds(&other).as_ref(), Some(&web[31]));
        for is_machine in [true, false] {
            assert!(
                of("web-0", is_machine)
                    .iter()
                    .all(|image| !web.contains(image))
            );
        }
    }

    #[test]
    fn a_failover_is_for_good() {
        let begun = begin(&replica(), 1, FIRST);
        let over = begun.fail_over(5000);
        let refusal = over.complete(FIRST, &[Digest::default()], 0, 0, |_, _| Ok(1));
        assert_eq!(refusal.unwrap_err().code, Code::OutOfOrder);
        let refusal = over.begin(&name(), &offer(1), SECOND, 0).unwrap_err();
        assert_eq!(refusal.code, Code::Lost);
        assert_eq!(over.fail_over(6000), over);
    }

    #[test]
    fn a_record_survives_and_a_damaged_one_is_said() {
        let directory = tempfile::tempdir().unwrap();
        let records = Records::<Replica>::new(directory.path().join("replicas"));
        assert_eq!(records.load(&name()).unwrap(), None);
        let begun = begin(&replica(), 2, FIRST);
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
