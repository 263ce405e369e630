//! Names of machines and snapshots, and the keys of objects.

use std::fmt;

use drover_core::{ImageName, NameError};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::container::{ContainerId, SessionId};

/// What stands for the name of a machine where blocks of many are meant.
const POPULAR: &str = "@popular";

/// The name of a machine whose snapshots a vault keeps.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Machine(ImageName);

impl Machine {
    /// Checks a name: that of an image, without `@`.
    ///
    /// # Errors
    /// [`NameError`] when it is none.
    pub fn new(name: impl Into<String>) -> Result<Self, NameError> {
        let name = ImageName::new(name)?;
        match name.as_str().contains('@') {
            true => Err(NameError::Character('@')),
            false => Ok(Machine(name)),
        }
    }

    /// The owner of the blocks that many machines have: no machine, and none can have this name.
    ///
    /// # Panics
    /// Never.
    #[must_use]
    pub fn popular() -> Self {
        Machine(ImageName::new(POPULAR).expect("a name"))
    }

    /// Whether it is [`Machine::popular`].
    #[must_use]
    pub fn is_popular(&self) -> bool {
        self.as_str() == POPULAR
    }

    /// The name as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        self.0.as_str()
    }

    /// As a component of a key: bytes that a store might not take are `=` and two hexadecimal digits.
    #[must_use]
    pub fn component(&self) -> String {
        let mut out = String::new();
        for byte in self.as_str().bytes() {
            match byte {
                b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'.' => {
                    out.push(char::from(byte));
                }
                _ => out.push_str(&format!("={byte:02x}")),
            }
        }
        out
    }

    /// The name that [`component`](Self::component) wrote.
    #[must_use]
    pub fn from_component(text: &str) -> Option<Self> {
        let mut bytes = Vec::new();
        let mut rest = text.as_bytes();
        while let Some((&byte, tail)) = rest.split_first() {
            rest = tail;
            bytes.push(match byte {
                b'=' => {
                    let (digits, tail) = rest.split_first_chunk::<2>()?;
                    rest = tail;
                    u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()?
                }
                _ => byte,
            });
        }
        let machine = Machine::try_from(String::from_utf8(bytes).ok()?).ok()?;
        (machine.component() == text).then_some(machine)
    }
}

impl TryFrom<String> for Machine {
    type Error = NameError;
    fn try_from(s: String) -> Result<Self, NameError> {
        match s.as_str() {
            POPULAR => Ok(Machine::popular()),
            _ => Machine::new(s),
        }
    }
}

impl From<Machine> for String {
    fn from(machine: Machine) -> String {
        machine.as_str().to_owned()
    }
}

impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// One snapshot: of which machine, when (whole seconds, UTC), by which session.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct SnapshotId {
    /// The machine.
    pub machine: Machine,
    /// Seconds since 1970.
    pub time: i64,
    /// The session that made it.
    pub session: SessionId,
}

impl SnapshotId {
    /// The end of its keys: `MACHINE/20261120T100000Z-0123456789`.
    #[must_use]
    pub fn suffix(&self) -> String {
        format!(
            "{}/{}-{}",
            self.machine.component(),
            compact(self.time),
            self.session
        )
    }

    /// The snapshot that a key is about, whatever the kind of its object.
    #[must_use]
    pub fn of_key(key: &str) -> Option<Self> {
        let mut parts = key.split('/').skip(1);
        let machine = Machine::from_component(parts.next()?)?;
        let (time, session) = parts.next()?.split_once('-')?;
        let id = SnapshotId {
            machine,
            time: time.parse::<Timestamp>().ok()?.as_second(),
            session: SessionId::parse(session)?,
        };
        // One text for each, so that no two keys are about the same.
        key.split_once('/')
            .is_some_and(|(_, rest)| rest == id.suffix() || rest.starts_with(&(id.suffix() + "/")))
            .then_some(id)
    }

    /// The key of its record.
    #[must_use]
    pub fn record(&self) -> String {
        format!("snapshots/{}", self.suffix())
    }

    /// The key of its uses.
    #[must_use]
    pub fn uses(&self) -> String {
        format!("uses/{}", self.suffix())
    }

    /// The key of its tombstone.
    #[must_use]
    pub fn tombstone(&self) -> String {
        format!("forgotten/{}", self.suffix())
    }

    /// The key of the head of its recipe.
    #[must_use]
    pub fn recipe(&self) -> String {
        format!("recipes/{}/head", self.suffix())
    }

    /// The key of part `n` of its recipe.
    #[must_use]
    pub fn part(&self, n: u32) -> String {
        format!("recipes/{}/{n}", self.suffix())
    }

    /// When, as text: `2026-11-20T10:00:00Z`.
    #[must_use]
    pub fn when(&self) -> String {
        Timestamp::from_second(self.time).map_or_else(|_| "?".into(), |t| t.to_string())
    }
}

impl TryFrom<String> for SnapshotId {
    type Error = &'static str;
    fn try_from(suffix: String) -> Result<Self, &'static str> {
        let key = format!("snapshots/{suffix}");
        let id = SnapshotId::of_key(&key).filter(|id| id.record() == key);
        id.ok_or("it names no snapshot")
    }
}

impl From<SnapshotId> for String {
    fn from(id: SnapshotId) -> String {
        id.suffix()
    }
}

impl fmt::Display for SnapshotId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{}", self.machine, self.when())
    }
}

/// `20261120T100000Z`.
fn compact(time: i64) -> String {
    Timestamp::from_second(time)
        .map_or_else(|_| "0".into(), |t| t.strftime("%Y%m%dT%H%M%SZ").to_string())
}

/// The key of a container.
#[must_use]
pub fn container_key(machine: &Machine, id: ContainerId, generation: u32) -> String {
    format!("containers/{}/{id}.{generation}", machine.component())
}

/// Machine, container and generation of a key.
#[must_use]
pub fn parse_container_key(key: &str) -> Option<(Machine, ContainerId, u32)> {
    let mut parts = key.strip_prefix("containers/")?.split('/');
    let machine = Machine::from_component(parts.next()?)?;
    let (id, generation) = parts.next()?.split_once('.')?;
    let (id, generation) = (ContainerId::parse(id)?, generation.parse().ok()?);
    let one = parts.next().is_none() && container_key(&machine, id, generation) == key;
    one.then_some((machine, id, generation))
}

/// The key that says that a snapshot was deleted here which copies may still have: by machine, time and root, which
/// are the same in all of them.
#[must_use]
pub fn dropped_key(machine: &Machine, time: i64, root: &drover_core::Digest) -> String {
    format!("dropped/{}/{}-{root}", machine.component(), compact(time))
}

/// The key of the hooks of what a session stored.
#[must_use]
pub fn hooks_key(session: SessionId) -> String {
    format!("hooks/{session}")
}

/// The key of claim `n` of a session.
#[must_use]
pub fn claim_key(session: SessionId, n: u32) -> String {
    format!("claims/{session}/{n}")
}

/// The key of a collector's mark on a container.
#[must_use]
pub fn mark_key(id: ContainerId, collector: SessionId) -> String {
    format!("marks/{id}/{collector}")
}

/// The container of a mark's key.
#[must_use]
pub fn parse_mark_key(key: &str) -> Option<ContainerId> {
    ContainerId::parse(key.strip_prefix("marks/")?.split('/').next()?)
}

/// What a person calls snapshots: `NAME`, `NAME@latest`, `NAME@2026-11-20`, `NAME@2026-11-20T10:00:00Z`, or the
/// number of a session after the `@`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reference {
    /// The machine.
    pub machine: Machine,
    /// Which of its snapshots: the text after the `@`.
    pub which: String,
}

impl Reference {
    /// Reads a reference; none when the text has no `@`, or is none for another reason.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let (machine, which) = text.rsplit_once('@')?;
        let dated = which
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b':'));
        (dated && !which.is_empty()).then_some(())?;
        Some(Reference {
            machine: Machine::new(machine).ok()?,
            which: which.to_owned(),
        })
    }

    /// Whether a snapshot of that machine matches; `latest` is decided by the caller.
    #[must_use]
    pub fn matches(&self, id: &SnapshotId) -> bool {
        id.machine == self.machine
            && (id.when().starts_with(&self.which) || id.session.to_string() == self.which)
    }
}

impl fmt::Display for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{}", self.machine, self.which)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn keys_and_back() {
        let id = SnapshotId {
            machine: Machine::new("web 01/x".replace('/', "_") + "é").unwrap(),
            time: 1_795_168_800,
            session: SessionId(0x12_3456_789a),
        };
        assert_eq!(id.suffix(), "web=2001_x=c3=a9/20261120T100000Z-123456789a");
        for key in [
            id.record(),
            id.uses(),
            id.tombstone(),
            id.recipe(),
            id.part(3),
        ] {
            assert_eq!(SnapshotId::of_key(&key).as_ref(), Some(&id), "{key}");
        }
        assert_eq!(id.when(), "2026-11-20T10:00:00Z");
        assert_eq!(SnapshotId::try_from(id.suffix()).as_ref(), Ok(&id));
        for bad in [id.suffix() + "/x", id.suffix() + "0", "web".into()] {
            assert!(SnapshotId::try_from(bad).is_err());
        }
        let key = container_key(&id.machine, ContainerId(5), 2);
        assert_eq!(
            parse_container_key(&key),
            Some((id.machine.clone(), ContainerId(5), 2))
        );
        assert_eq!(parse_container_key(&(key + "0")).map(|k| k.2), Some(20));
        assert_eq!(
            parse_mark_key(&mark_key(ContainerId(9), SessionId(1))),
            Some(ContainerId(9))
        );
    }

    #[test]
    fn references() {
        let id = SnapshotId {
            machine: Machine::new("web").unwrap(),
            time: 1_795_168_800,
            session: SessionId(0xab),
        };
        for (text, fits) in [
            ("web@2026-11-20", true),
            ("web@2026-11", true),
            ("web@2026-11-20T10:00:00Z", true),
            ("web@2026-11-20T11", false),
            ("web@00000000ab", true),
            ("db@2026-11-20", false),
        ] {
            assert_eq!(Reference::parse(text).unwrap().matches(&id), fits, "{text}");
        }
        // Nobody can make a snapshot of what is no machine, or ask for one.
        assert!(Machine::new("@popular").is_err());
        assert_eq!(Reference::parse("@popular@latest"), None);
        let popular = Machine::popular();
        assert_eq!(Machine::from_component(&popular.component()), Some(popular));
        for text in ["web", "web@", "@latest", "web@../x", "web@a b"] {
            assert_eq!(Reference::parse(text), None, "{text}");
        }
    }

    proptest! {
        #[test]
        fn a_machine_is_one_component(name in "\\PC{1,30}") {
            if let Ok(machine) = Machine::new(name) {
                let text = machine.component();
                prop_assert!(!text.contains('/') && !text.starts_with('.'));
                prop_assert_eq!(Machine::from_component(&text), Some(machine));
            }
        }

        #[test]
        fn hostile_keys(key in "\\PC{0,60}") {
            let _ = (SnapshotId::of_key(&key), parse_container_key(&key), parse_mark_key(&key));
        }
    }
}
