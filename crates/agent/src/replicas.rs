//! Replicas of machines and disks: those that this site keeps, and those that it sends. Requests about them.

use std::time::{SystemTime, UNIX_EPOCH};

use drover_core::ImageName;
use drover_net::{Code, Refusal, request};
use drover_store::replica::{Named, Records, Replica, Sent, replica_of};
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result, bail};
use crate::home::Home;
use crate::remote::Call;
use crate::text::clean;

/// Request: the replica takes over. Its images can be written, and no round of its source is accepted any more. Repeated, it
/// says the same.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct FailOver {
    /// Its name.
    pub name: ImageName,
    /// Only say what would be done.
    pub dry_run: bool,
    /// Whoever asks answers for it that its source does not run any more, which the site cannot know. Without that it is refused.
    pub force: bool,
    /// Start the machine, if config.toml says how.
    pub start: bool,
}
request!(FailOver: "replica.failover", Manage, () => FailedOver);

/// A replica that has taken over, or would.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FailedOver {
    /// The site that it came from.
    pub from: String,
    /// The moment that its disks are of, in milliseconds since 1970.
    pub moment_ms: u64,
    /// When it took over; none if it would.
    pub failed_over_ms: Option<u64>,
    /// Its disks: images of this site.
    pub images: Vec<String>,
    /// When its source was last heard: it began a round then, or completed one.
    pub heard_ms: u64,
    /// Whether the round that it began then is not complete.
    pub under_way: bool,
    /// Whether it is of a machine, not of the disk of a program.
    pub is_machine: bool,
    /// Whether the machine runs here, or would.
    pub starts: bool,
    /// Why it does not, or would not, although it was to be started.
    pub not_started: Option<String>,
}

/// Request: forget a replica. The images of its newest point stay, as images like any others.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ForgetReplica {
    /// Its name.
    pub name: ImageName,
}
request!(ForgetReplica: "replica.forget", Manage, () => ());

/// A replica, as reported to users. Times are in milliseconds since 1970, by this site's clock.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReplicaInfo {
    /// Its name at the site that keeps it.
    pub name: String,
    /// `kept` here, `failed-over` here, `sent` from here, or `fenced`: it has taken over at the peer. `damaged`: its record
    /// cannot be read.
    pub state: String,
    /// The other site.
    pub peer: String,
    /// The moment of the newest complete point.
    pub moment_ms: Option<u64>,
    /// How long ago that was, in seconds: what would be lost now. None if this site's clock was set back behind it.
    pub age_seconds: Option<u64>,
    /// Seconds from one round to the next.
    pub every_seconds: Option<u64>,
    /// Bytes of its disks.
    pub size_bytes: u64,
    /// Rounds that were complete.
    pub rounds: u64,
    /// Whether a round is under way.
    pub under_way: bool,
    /// Its images here.
    pub images: Vec<String>,
    /// What it is of, of one that is sent.
    pub source: Option<String>,
}

/// Now, in milliseconds since 1970.
#[must_use]
pub fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| {
        u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
    })
}

/// Not known of a moment that is still to come: the clock was set back.
fn age(moment_ms: Option<u64>, now: u64) -> Option<u64> {
    Some(now.checked_sub(moment_ms?)? / 1000)
}

fn of_kept(name: &ImageName, replica: &Replica, now: u64) -> ReplicaInfo {
    let point = replica.point.as_ref();
    let images = point.map_or(&[][..], |point| &point.images);
    let moment_ms = point.map(|point| point.moment_ms);
    let state = match replica.failed_over_ms {
        Some(_) => "failed-over",
        None => "kept",
    };
    ReplicaInfo {
        name: name.to_string(),
        state: state.into(),
        peer: replica.from.name.clone(),
        moment_ms,
        age_seconds: age(moment_ms, replica.failed_over_ms.unwrap_or(now)),
        every_seconds: replica.every_seconds,
        size_bytes: images.iter().map(|image| image.size).sum(),
        rounds: replica.rounds,
        under_way: replica.under_way.is_some(),
        images: images.iter().map(|image| image.name.to_string()).collect(),
        source: None,
    }
}

fn of_sent(sent: &Sent, now: u64) -> ReplicaInfo {
    let state = match sent.fenced {
        Some(_) => "fenced",
        None => "sent",
    };
    ReplicaInfo {
        name: sent.name_there.to_string(),
        state: state.into(),
        peer: sent.to.name.clone(),
        moment_ms: sent.moment_ms,
        age_seconds: age(sent.moment_ms, now),
        every_seconds: sent.every_seconds,
        size_bytes: sent.size,
        rounds: sent.rounds,
        under_way: false,
        images: Vec::new(),
        source: Some(sent.source.clone()),
    }
}

/// One whose record cannot be read.
fn damaged(name: String, why: &Refusal) -> ReplicaInfo {
    tracing::warn!("{why}");
    ReplicaInfo {
        name,
        state: "damaged".into(),
        peer: String::new(),
        moment_ms: None,
        age_seconds: None,
        every_seconds: None,
        size_bytes: 0,
        rounds: 0,
        under_way: false,
        images: Vec::new(),
        source: None,
    }
}

/// The replicas that a domain keeps.
///
/// # Errors
/// When their directory cannot be read.
pub fn kept(home: &Home) -> Result<Vec<ReplicaInfo>> {
    let now = now_ms();
    let kept = home.replicas().all().map_err(Error::Refused)?;
    let row = |(name, replica): &Named<Replica>| match replica {
        Ok(replica) => of_kept(name, replica, now),
        Err(e) => damaged(name.to_string(), e),
    };
    Ok(kept.iter().map(row).collect())
}

/// The replicas that a domain keeps, and those that it sends.
///
/// # Errors
/// When their directories cannot be read.
pub fn list(home: &Home) -> Result<Vec<ReplicaInfo>> {
    let now = now_ms();
    let mut list = kept(home)?;
    let sent = home.replicas_sent().all().map_err(Error::Refused)?;
    list.extend(sent.iter().map(|(key, sent)| match sent {
        Ok(sent) => of_sent(sent, now),
        Err(e) => {
            let name = key.as_str();
            let name = name.rsplit_once('@').map_or(name, |(name, _)| name);
            damaged(name.to_owned(), e)
        }
    }));
    Ok(list)
}

/// Whether an image may be written, replaced or removed: not if it is a disk of a replica that has not taken over.
///
/// # Errors
/// [`Code::Held`], with the way out.
pub(crate) fn may_be_changed(
    replicas: &Records<Replica>,
    image: &ImageName,
) -> Result<(), Refusal> {
    let Some(name) = replica_of(image) else {
        return Ok(());
    };
    // One that is damaged may be of this image.
    let of = replicas.load(&name)?;
    if of.is_some_and(|replica| replica.failed_over_ms.is_none() && replica.has(image)) {
        let text = format!(
            "{image} is a disk of the replica {name}: `drover failover {name}` makes it usable, `drover replicate --forget {name}` an image like any other"
        );
        return Err(Refusal::new(Code::Held, text));
    }
    Ok(())
}

/// Whether mounts may write to an image: also not if a round brings it, or has brought it and it is to be removed.
///
/// # Errors
/// As [`may_be_changed`].
pub(crate) fn may_be_written(
    replicas: &Records<Replica>,
    image: &ImageName,
) -> Result<(), Refusal> {
    may_be_changed(replicas, image)?;
    let Some(name) = replica_of(image) else {
        return Ok(());
    };
    let of = replicas.load(&name)?;
    if of.is_some_and(|replica| replica.receives(image)) {
        let text = format!(
            "{image} is of a round of the replica {name}: `drover replicate --forget {name}` ends that"
        );
        return Err(Refusal::new(Code::Held, text));
    }
    Ok(())
}

/// Asks the running site, which receives the replicas.
async fn site(home: &Home) -> Result<Call> {
    match Call::local(home).await? {
        Some(call) => Ok(call),
        None => bail!("the site is not running: start it with `drover serve`"),
    }
}

/// Has a replica take over, see [`FailOver`].
///
/// # Errors
/// When there is none, nothing of it is complete, or nobody answers for its source.
pub async fn fail_over(home: &Home, ask: &FailOver) -> Result<FailedOver> {
    site(home).await?.ask(ask, |()| {}).await
}

/// Forgets a replica that is kept here, or, if there is none, one that is sent. Whether it was kept.
///
/// # Errors
/// When there is none, or it is being sent.
pub async fn forget(home: &Home, name: &ImageName) -> Result<bool> {
    let kept = home.replicas();
    // One that is damaged is there.
    if !matches!(kept.load(name), Ok(None)) {
        let ask = ForgetReplica { name: name.clone() };
        site(home).await?.ask(&ask, |()| {}).await?;
        return Ok(true);
    }
    let records = home.replicas_sent();
    let sent = records.all().map_err(Error::Refused)?;
    let mut found = false;
    let is_it = |key: &ImageName, sent: &Result<Sent, Refusal>| match sent {
        Ok(sent) => sent.name_there == *name,
        Err(_) => key.as_str().rsplit_once('@').map(|(of, _)| of) == Some(name.as_str()),
    };
    for (key, _) in sent.iter().filter(|(key, sent)| is_it(key, sent)) {
        if records.lock(key)?.is_none() {
            bail!("{} is being sent: end that first", clean(name.as_str()));
        }
        records.remove(key)?;
        found = true;
    }
    match found {
        true => Ok(false),
        false => Err(Error::refused(format!(
            "no replica is called {name}; see `drover replicate --list`"
        ))),
    }
}

/// The name of the record of a replica that is sent: there may be one at each of several sites.
///
/// # Errors
/// When the name is too long.
pub fn sent_key(name_there: &ImageName, peer: &drover_net::PeerKey) -> Result<ImageName> {
    let key: String = peer.0[..8]
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    Ok(ImageName::new(format!("{name_there}@{key}"))?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_age_is_not_made_up_after_a_clock_was_set_back() {
        assert_eq!(age(Some(1000), 61_000), Some(60));
        assert_eq!(age(Some(61_000), 1000), None);
        assert_eq!(age(None, 1000), None);
    }
}
