//! This process as one of the nodes of a site that share its catalog and the directory of its images: its term, which it renews
//! in the background, and what it holds among them. See `drover_store::nodes`, and decision `0054`.

mod siblings;

use std::collections::HashMap;
use std::fmt;
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use drover_core::ImageName;
use drover_net::{Code, DEFAULT_DOMAIN, Identity, Refusal};
use drover_store::CatalogError;
use drover_store::nodes::{Holding, NodeState, Nodes, Term, Use, renew_every};
use drover_teleport::services::{ClaimBlocks, LookAt, Looks};
use drover_teleport::{Claimed, FENCED, NotHeld, Others};
use parking_lot::{Condvar, Mutex};
use rustix::time::{ClockId, clock_gettime};
use tokio::sync::Notify;

use siblings::Siblings;

/// The file that says which directory of images this is.
pub const DIRECTORY_FILE: &str = ".drover-site";

/// How long an image that is not mounted any more is kept for the mounts of this node.
const MOUNT_KEPT: Duration = Duration::from_secs(120);

/// Upper bound on the images that are freed in one go: each is a call of the database, and the term must be renewed.
const MAX_FREED: usize = 16;

/// Lists the directories of the work directories of all nodes, of all domains.
pub type Bases = dyn Fn() -> io::Result<Vec<PathBuf>> + Send + Sync;

/// Whether an image of a domain is idle.
pub type IsIdle = dyn Fn(&str, &ImageName) -> bool + Send + Sync;

/// Called when something has happened.
type Told = dyn Fn() + Send + Sync;

/// What a node needs to know of its home.
pub struct Setting {
    /// Its name among the nodes.
    pub name: String,
    /// The token of this start.
    pub token: String,
    /// How long its terms are.
    pub term: Duration,
    /// The directory of images.
    pub images: PathBuf,
    /// What that directory says that it is.
    pub directory: String,
    /// The directories of the work directories of all nodes, of all domains.
    pub bases: Box<Bases>,
    /// Whether an image of a domain has neither mounts nor changes at this node.
    pub is_idle: Box<IsIdle>,
    /// The identity of the site, if it has one.
    pub identity: Option<Identity>,
}

/// This process as a node.
pub struct Node {
    setting: Setting,
    nodes: Nodes,
    siblings: Siblings,
    /// Held as long as this process is the node of its home.
    lock: Mutex<Option<File>>,
    term: Mutex<Term>,
    drains: AtomicBool,
    /// Names that could not be freed since the database was away. Locked while one is held or freed.
    owed: Mutex<Vec<(String, ImageName, Use)>>,
    /// Images that are noted as mounted at this node, by domain and name.
    mounted: Mutex<HashMap<(String, ImageName), Mounted>>,
    /// Called when something was taken over from another node.
    took_over: Mutex<Option<Box<Told>>>,
    /// Notified when others may have changed the database.
    changes: Notify,
    ended: Mutex<bool>,
    wake: Condvar,
}

/// An image that is mounted, or has been.
#[derive(Debug, Clone, Copy)]
struct Mounted {
    /// Whether the other nodes know that it is mounted, and that it is written. If that is not known here, they are asked.
    noted: bool,
    writes: bool,
    /// Mounts that have connections.
    connected: usize,
    /// When it last was opened or closed.
    since: Instant,
}

impl Mounted {
    fn new(writes: bool) -> Mounted {
        Mounted {
            noted: true,
            writes,
            connected: 0,
            since: Instant::now(),
        }
    }

    fn is_old(&self) -> bool {
        self.connected == 0 && self.since.elapsed() > MOUNT_KEPT
    }
}

impl fmt::Debug for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Node({}, {})", self.setting.name, self.setting.token)
    }
}

/// The time by a clock that nobody sets, and that goes on while the host sleeps.
pub fn clock() -> Duration {
    let now = clock_gettime(ClockId::Boottime);
    let seconds = u64::try_from(now.tv_sec).unwrap_or(0);
    Duration::new(seconds, u32::try_from(now.tv_nsec).unwrap_or(0))
}

impl Node {
    /// The node that has joined, as asked for at `asked` by [`clock`]. Renews its term until [`Node::leave`].
    ///
    /// # Errors
    /// When what is mounted at it cannot be read, or there is no thread for it.
    pub fn start(
        setting: Setting,
        nodes: Nodes,
        lock: File,
        asked: Duration,
    ) -> Result<Arc<Node>, CatalogError> {
        let mut term = Term::new(setting.term);
        term.granted(asked);
        let mut mounted = HashMap::new();
        for (domain, image) in nodes.mounts_at(&setting.token)? {
            if let Ok(name) = ImageName::new(image) {
                // Whether it was written as well is asked for when it is.
                mounted.insert((domain, name), Mounted::new(false));
            }
        }
        let node = Arc::new(Node {
            siblings: Siblings::new(setting.identity.clone()),
            nodes,
            lock: Mutex::new(Some(lock)),
            term: Mutex::new(term),
            drains: AtomicBool::new(false),
            owed: Mutex::default(),
            mounted: Mutex::new(mounted),
            took_over: Mutex::default(),
            changes: Notify::new(),
            ended: Mutex::new(false),
            wake: Condvar::new(),
            setting,
        });
        let every = renew_every(node.setting.term);
        // What the others have left takes as long as it takes: the term does not wait for it.
        for (name, work) in [
            ("term", keep as fn(&Weak<Node>, Duration)),
            ("node", care as fn(&Weak<Node>, Duration)),
        ] {
            let weak = Arc::downgrade(&node);
            let thread = std::thread::Builder::new().name(name.into());
            let started = thread.spawn(move || work(&weak, every));
            started.map_err(CatalogError::file(
                "start a thread for",
                &node.setting.images,
            ))?;
        }
        Ok(node)
    }

    /// Its name among the nodes.
    pub fn name(&self) -> &str {
        &self.setting.name
    }

    /// The token of this start.
    pub fn token(&self) -> &str {
        &self.setting.token
    }

    /// The table of all nodes.
    pub fn nodes(&self) -> &Nodes {
        &self.nodes
    }

    /// Whether it may change what nodes share.
    pub fn holds(&self) -> bool {
        self.term.lock().holds(clock())
    }

    /// Whether it takes work: its term is not over, and it does not drain.
    pub fn takes_work(&self) -> bool {
        self.holds() && !self.drains.load(Ordering::Relaxed)
    }

    /// Whether another node has taken over from it.
    pub fn is_lost(&self) -> bool {
        self.term.lock().is_lost()
    }

    /// Has `f` called whenever something was taken over from another node.
    pub fn on_take_over(&self, f: impl Fn() + Send + Sync + 'static) {
        *self.took_over.lock() = Some(Box::new(f));
    }

    /// Says that others may have changed the database.
    pub fn tell_of_changes(&self) {
        self.changes.notify_one();
    }

    /// Waits until others may have changed the database since the last time. Cancel safe.
    pub async fn told_of_changes(&self) {
        self.changes.notified().await;
    }

    /// What the site of a domain agrees on with other nodes.
    pub fn among(self: &Arc<Self>, domain: &str) -> Arc<dyn Others> {
        Arc::new(Among {
            node: Arc::clone(self),
            domain: domain.to_owned(),
        })
    }

    /// Ends the term.
    pub fn leave(&self) {
        if std::mem::replace(&mut *self.ended.lock(), true) {
            return;
        }
        self.wake.notify_all();
        if let Err(e) = self.nodes.leave(self.token()) {
            tracing::warn!("the other nodes of the site are not told that this one ends: {e}");
        }
        *self.lock.lock() = None;
    }

    /// Whether it has ended its term by itself.
    pub fn has_left(&self) -> bool {
        *self.ended.lock()
    }

    /// Notes that an image is about to be mounted here, or, if it `writes`, to be written.
    ///
    /// # Errors
    /// Another node has a writer or changes, or replaces it; this node takes no mounts now.
    pub fn mount(&self, domain: &str, name: &ImageName, writes: bool) -> Result<(), Refusal> {
        let mut mounted = self.mounted.lock();
        let at = (domain.to_owned(), name.clone());
        let known = mounted.get(&at).copied();
        if known.is_none_or(|known| !known.noted || writes && !known.writes) {
            if known.is_none() && self.drains.load(Ordering::Relaxed) {
                let text = format!("the node {} takes no mounts now: it drains", self.name());
                return Err(Refusal::new(Code::Unavailable, text));
            }
            let noted = self
                .nodes
                .mount(self.token(), domain, name.as_str(), writes);
            noted.map_err(|e| Refusal::new(Code::Unavailable, e.to_string()))?;
        }
        let mounted = mounted.entry(at).or_insert_with(|| Mounted::new(writes));
        mounted.noted = true;
        mounted.writes |= writes;
        mounted.since = Instant::now();
        Ok(())
    }

    /// Counts the mounts of an image that have connections.
    pub fn connected(&self, domain: &str, name: &ImageName, one_more: bool) {
        let mut mounted = self.mounted.lock();
        if let Some(mounted) = mounted.get_mut(&(domain.to_owned(), name.clone())) {
            mounted.connected = match one_more {
                true => mounted.connected + 1,
                false => mounted.connected.saturating_sub(1),
            };
            mounted.since = Instant::now();
        }
    }

    /// Frees what is not mounted any more.
    fn tidy_mounts(&self) {
        let old: Vec<_> = {
            let mounted = self.mounted.lock();
            let old = mounted.iter();
            let old = old.filter(|(_, mounted)| mounted.is_old());
            old.map(|(at, _)| at.clone()).take(MAX_FREED).collect()
        };
        for at in old {
            if !(self.setting.is_idle)(&at.0, &at.1) {
                continue;
            }
            let mut mounted = self.mounted.lock();
            let Some(old) = mounted.get_mut(&at).filter(|mounted| mounted.is_old()) else {
                continue;
            };
            // It may have been freed even if the answer is lost.
            (old.noted, old.writes) = (false, false);
            let freed = self.nodes.unmount(self.token(), &at.0, at.1.as_str());
            if freed.is_ok() {
                mounted.remove(&at);
            }
        }
    }

    /// Asks for the term to be prolonged, if the directory of images is there.
    fn renew(&self) {
        let asked = clock();
        // A disk that does not answer is no reason to keep the term.
        if !self.setting.has_directory() {
            tracing::error!(
                "the directory of images {} is another one now: is its file system mounted?",
                self.setting.images.display()
            );
            return;
        }
        match self.nodes.renew(self.token()) {
            Ok(Some(state)) => {
                let drains = state == NodeState::Draining;
                if self.drains.swap(drains, Ordering::Relaxed) != drains {
                    tracing::info!(drains, "told to drain, or to serve again");
                }
                self.term.lock().granted(asked);
            }
            Ok(None) => self.term.lock().lose(),
            Err(e) => tracing::debug!("the term is not prolonged: {e}"),
        }
    }

    /// Takes over from nodes whose terms are over.
    fn take_over(&self) {
        match fence(&self.nodes, &self.setting.place()) {
            Ok(gone) if gone.is_empty() => {}
            Ok(gone) => {
                let gone = gone.join(", ");
                tracing::warn!("the term of {gone} is over: this node takes over");
                if let Some(f) = &*self.took_over.lock() {
                    f();
                }
            }
            Err(e) => tracing::debug!("cannot look for nodes that are gone: {e}"),
        }
    }

    /// Frees names that could not be freed before.
    fn pay(&self) {
        let mut owed = self.owed.lock();
        owed.retain(|(domain, name, what)| {
            let at = (domain.as_str(), name.as_str(), *what);
            self.nodes.free(self.token(), at).is_err()
        });
    }
}

impl Node {
    /// Waits for so long; false when the term has ended.
    fn pause(&self, every: Duration) -> bool {
        let mut ended = self.ended.lock();
        if !*ended {
            self.wake.wait_for(&mut ended, every);
        }
        !*ended && !self.is_lost()
    }
}

/// Renews the term of a node until it ends.
fn keep(node: &Weak<Node>, every: Duration) {
    while let Some(node) = node.upgrade()
        && node.pause(every)
    {
        node.renew();
    }
}

/// Does what is due beside it, while it has a term.
fn care(node: &Weak<Node>, every: Duration) {
    let mut rounds = 0u32;
    while let Some(node) = node.upgrade()
        && node.pause(every)
    {
        if !node.holds() || !node.setting.has_directory() {
            continue;
        }
        node.pay();
        node.take_over();
        rounds = rounds.wrapping_add(1);
        if rounds.is_multiple_of(8) {
            node.tidy_mounts();
        }
    }
}

/// A directory of images that nodes share.
pub struct Place<'a> {
    /// Its path.
    pub images: &'a Path,
    /// What it says that it is.
    pub directory: &'a str,
    /// See [`Setting::bases`].
    pub bases: &'a Bases,
}

impl Place<'_> {
    /// Fails if another directory is there, as when its file system is not mounted.
    fn check(&self) -> Result<(), CatalogError> {
        match directory_of(self.images).as_deref() == Some(self.directory) {
            true => Ok(()),
            false => Err(CatalogError::file("find the site in", self.images)(
                io::ErrorKind::NotFound.into(),
            )),
        }
    }
}

impl Setting {
    fn place(&self) -> Place<'_> {
        Place {
            images: &self.images,
            directory: &self.directory,
            bases: &self.bases,
        }
    }

    fn has_directory(&self) -> bool {
        self.place().check().is_ok()
    }
}

/// Takes the directories of nodes away whose terms are over; returns their names.
///
/// # Errors
/// When the database is away, or the directory of images; the next call goes on.
pub fn fence(nodes: &Nodes, place: &Place<'_>) -> Result<Vec<String>, CatalogError> {
    let mut gone = Vec::new();
    for (name, token) in nodes.fence()? {
        // A directory that is not there says that a node has none only if the file system is there, before and after.
        place.check()?;
        let bases = (place.bases)().map_err(CatalogError::file("list", place.images))?;
        for base in bases {
            let dir = base.join(&token);
            match fs::rename(&dir, dir.with_extension(FENCED)) {
                Ok(()) => drover_storage::sync_parent(&dir)
                    .map_err(CatalogError::file("sync the directory of", &dir))?,
                Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                Err(e) => return Err(CatalogError::file("rename", &dir)(e)),
            }
        }
        place.check()?;
        nodes.fenced(&token)?;
        gone.push(name);
    }
    Ok(gone)
}

/// What a directory of images says that it is.
pub fn directory_of(images: &Path) -> Option<String> {
    let file = File::open(images.join(DIRECTORY_FILE)).ok()?;
    let mut text = String::new();
    file.take(64).read_to_string(&mut text).ok()?;
    let text = text.trim();
    let is_id = text.len() == 32 && text.bytes().all(|b| b.is_ascii_hexdigit());
    is_id.then(|| text.to_owned())
}

/// What the site of a domain agrees on with other nodes.
struct Among {
    node: Arc<Node>,
    domain: String,
}

impl Among {
    fn at<'a>(&'a self, name: &'a ImageName, what: Use) -> (&'a str, &'a str, Use) {
        (&self.domain, name.as_str(), what)
    }

    fn take(&self, name: &ImageName, what: Use, key: &str, goes: bool) -> Result<(), NotHeld> {
        let not_now = |why: String| NotHeld::Refused(Refusal::new(Code::Unavailable, why));
        if !self.node.holds() {
            return Err(not_now(
                "this node has no term now: the database does not answer, or the directory of images is not there".into(),
            ));
        }
        let mut owed = self.node.owed.lock();
        let held = self
            .node
            .nodes
            .hold(self.node.token(), self.at(name, what), key, goes);
        let held = held.map_err(|e| {
            // It may be held even if the answer is lost.
            owed.push((self.domain.clone(), name.clone(), what));
            not_now(e.to_string())
        })?;
        match held {
            Holding::Yes => {
                owed.retain(|(d, n, w)| (d, n, *w) != (&self.domain, name, what));
                Ok(())
            }
            Holding::Wait(node) => Err(NotHeld::Wait(node)),
            Holding::Taken(node) => Err(NotHeld::Taken(node)),
            Holding::Mounted(node) => {
                let text = format!(
                    "{name} cannot be replaced or removed: it is mounted at the node {node}, or has changes there"
                );
                Err(NotHeld::Refused(Refusal::new(Code::Denied, text)))
            }
            Holding::Fenced => Err(not_now("another node has taken over".into())),
        }
    }

    fn give_back(&self, name: &ImageName, what: Use) {
        let mut owed = self.node.owed.lock();
        let freed = self.node.nodes.free(self.node.token(), self.at(name, what));
        if let Err(e) = freed {
            tracing::debug!("{name} is freed later: {e}");
            owed.push((self.domain.clone(), name.clone(), what));
        }
    }
}

impl Others for Among {
    fn hold(&self, name: &ImageName, key: &str) -> Result<(), NotHeld> {
        self.take(name, Use::Transfer, key, true)
    }

    fn free(&self, name: &ImageName) {
        self.give_back(name, Use::Transfer);
    }

    fn lock(&self, name: &ImageName, goes: bool) -> Result<(), NotHeld> {
        self.take(name, Use::Change, "", goes)
    }

    fn unlock(&self, name: &ImageName) {
        self.give_back(name, Use::Change);
    }

    fn name(&self) -> String {
        self.node.name().to_owned()
    }

    fn receiving(&self) -> Vec<String> {
        let found = self.node.nodes().receiving(&self.domain);
        found.unwrap_or_else(|e| {
            tracing::debug!("not known what other nodes receive: {e}");
            Vec::new()
        })
    }

    fn owners(&self) -> Vec<String> {
        match self.domain == DEFAULT_DOMAIN {
            true => self.node.siblings.names(&self.node.nodes),
            // Nodes call each other in this domain only.
            false => Vec::new(),
        }
    }

    fn claim(&self, node: &str, claim: &ClaimBlocks) -> Option<Claimed> {
        self.node.siblings.ask(&self.node.nodes, node, claim)
    }

    fn look(&self, node: &str, look: &LookAt) -> Option<Looks> {
        self.node.siblings.ask(&self.node.nodes, node, look)
    }

    fn may_begin(&self) -> bool {
        self.node.takes_work()
    }
}

#[cfg(test)]
mod tests;
