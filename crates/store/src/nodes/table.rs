//! What the database knows of the nodes of a site, and the rules by which that changes. Times are those of the database, in
//! milliseconds since some moment.

use std::collections::BTreeMap;
use std::time::Duration;

/// Upper bound on the nodes of a site.
pub const MAX_NODES: usize = 64;

/// Upper bound on names that are held at once.
pub const MAX_HELD: usize = 4096;

/// Upper bound on images that are mounted, or have changes, at a node.
pub const MAX_MOUNTS: usize = 65_536;

/// What a node does, as the database knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NodeState {
    /// It serves.
    Serving,
    /// It takes no new transfers and mounts.
    Draining,
    /// It has ended by itself.
    Ended,
    /// Its term was over, and another node is taking its directory away. It may change nothing any more.
    Fencing,
    /// Its directory was taken away, and the names that it held are free.
    Fenced,
}

impl NodeState {
    const ALL: [NodeState; 5] = [
        NodeState::Serving,
        NodeState::Draining,
        NodeState::Ended,
        NodeState::Fencing,
        NodeState::Fenced,
    ];

    /// As users see it, and as it is stored.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            NodeState::Serving => "serving",
            NodeState::Draining => "draining",
            NodeState::Ended => "ended",
            NodeState::Fencing => "fencing",
            NodeState::Fenced => "fenced",
        }
    }

    /// Reads [`NodeState::as_str`].
    #[must_use]
    pub fn of(text: &str) -> Option<NodeState> {
        let mut all = NodeState::ALL.into_iter();
        all.find(|state| state.as_str() == text)
    }

    /// Whether it may change what nodes share.
    #[must_use]
    pub fn is_in(self) -> bool {
        matches!(self, NodeState::Serving | NodeState::Draining)
    }
}

/// A node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Row {
    /// The token of its last start.
    pub token: String,
    /// The home that it was started from, on a host since that has started: where it is the same, the lock of the home says
    /// that the former process is gone.
    pub place: String,
    /// What it does.
    pub state: NodeState,
    /// Where peers reach it.
    pub addresses: Vec<String>,
    /// The version of its program.
    pub version: String,
    /// When it started.
    pub started_ms: i64,
    /// How long its terms are.
    pub term_ms: i64,
    /// When its term ends.
    pub ends_ms: i64,
}

impl Row {
    fn is_overdue(&self, now_ms: i64) -> bool {
        self.state.is_in() && self.ends_ms < now_ms
    }
}

/// A node that starts.
#[derive(Debug, Clone)]
pub struct Joining {
    /// Its name.
    pub name: String,
    /// A token that no start of any node had.
    pub token: String,
    /// See [`Row::place`].
    pub place: String,
    /// What the directory of its images says that it is.
    pub directory: String,
    /// The path of that directory.
    pub path: String,
    /// Where peers reach it.
    pub addresses: Vec<String>,
    /// The version of its program.
    pub version: String,
    /// How long its terms are to be.
    pub term: Duration,
}

/// What the name of an image is held for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Use {
    /// An image of that name is received.
    Transfer,
    /// The record or the file of the image is changed.
    Change,
}

impl Use {
    /// As it is stored.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Use::Transfer => "transfer",
            Use::Change => "change",
        }
    }

    /// Reads [`Use::as_str`].
    #[must_use]
    pub fn of(text: &str) -> Option<Use> {
        [Use::Transfer, Use::Change]
            .into_iter()
            .find(|this| this.as_str() == text)
    }
}

/// A name that a node holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Held {
    /// The node's token.
    pub token: String,
    /// The transfer that it is held for, if it is.
    pub key: String,
}

/// What came of holding a name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Holding {
    /// The node holds it.
    Yes,
    /// This node holds it for the same transfer, or for a change: it will be free soon, or another takes it over.
    Wait(String),
    /// This node holds it for another transfer.
    Taken(String),
    /// This node has mounts or changes of the image.
    Mounted(String),
    /// The node that asks was taken for dead.
    Fenced,
}

/// A node, as users see it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeInfo {
    /// Its name.
    pub name: String,
    /// What the database knows.
    pub row: Row,
    /// Milliseconds since its last start.
    pub up_ms: i64,
    /// Milliseconds until its term ends; negative if it has.
    pub left_ms: i64,
    /// Images that are being received there.
    pub transfers: usize,
    /// Images that have mounts or changes there.
    pub mounts: usize,
}

/// The table of the nodes of a site.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Table {
    /// What the directory of images says that it is; empty before the first node.
    pub directory: String,
    /// Its path.
    pub path: String,
    /// The nodes by name.
    pub nodes: BTreeMap<String, Row>,
    /// Names that are held: domain, image, what for.
    pub held: BTreeMap<(String, String, Use), Held>,
    /// Images with mounts or changes: domain, image, node; and whether there is a writer, or changes.
    pub mounts: BTreeMap<(String, String, String), bool>,
}

impl Table {
    fn of_token(&mut self, token: &str) -> Option<(&String, &mut Row)> {
        self.nodes.iter_mut().find(|(_, row)| row.token == token)
    }

    fn name_of(&self, token: &str) -> Option<&str> {
        let mut nodes = self.nodes.iter();
        let found = nodes.find(|(_, row)| row.token == token);
        found.map(|(name, _)| name.as_str())
    }

    /// Whether the node with this token may change what nodes share.
    #[must_use]
    pub fn is_in(&self, token: &str) -> bool {
        self.nodes
            .values()
            .any(|row| row.token == token && row.state.is_in())
    }

    fn release(&mut self, token: &str) {
        self.held.retain(|_, held| held.token != token);
    }

    /// Enters a node that starts, in the place of the one of its name. Returns false while it has to wait for the term of that
    /// one, which may be running elsewhere, or for another node to take over from it.
    ///
    /// # Errors
    /// A line for the user: another directory of images; too many nodes.
    pub fn join(&mut self, node: &Joining, now_ms: i64) -> Result<bool, String> {
        if self.directory.is_empty() {
            self.directory.clone_from(&node.directory);
            self.path.clone_from(&node.path);
        }
        if self.directory != node.directory {
            return Err(format!(
                "the directory of images {} is not the one of this site's other nodes: mount theirs there, or set `images` in config.toml to it",
                node.path
            ));
        }
        if self.path != node.path {
            return Err(format!(
                "the directory of images is {} here, and {} at this site's other nodes: mount it at the same path",
                node.path, self.path
            ));
        }
        if let Some(row) = self.nodes.get(&node.name) {
            let is_same = row.place == node.place;
            if !is_same && row.state.is_in() || row.state == NodeState::Fencing {
                return Ok(false);
            }
            let token = row.token.clone();
            self.release(&token);
        } else if self.nodes.len() >= MAX_NODES {
            return Err(format!(
                "the site has {MAX_NODES} nodes, which is the most: `drover nodes remove` forgets one"
            ));
        }
        let term_ms = i64::try_from(node.term.as_millis()).unwrap_or(i64::MAX);
        let row = Row {
            token: node.token.clone(),
            place: node.place.clone(),
            state: NodeState::Serving,
            addresses: node.addresses.clone(),
            version: node.version.clone(),
            started_ms: now_ms,
            term_ms,
            ends_ms: now_ms.saturating_add(term_ms),
        };
        self.nodes.insert(node.name.clone(), row);
        Ok(true)
    }

    /// Prolongs the term of a node, whether it is over or not; what it is to do. `None` when another has taken over from it.
    pub fn renew(&mut self, token: &str, now_ms: i64) -> Option<NodeState> {
        let (_, row) = self.of_token(token).filter(|(_, row)| row.state.is_in())?;
        row.ends_ms = row.ends_ms.max(now_ms.saturating_add(row.term_ms));
        Some(row.state)
    }

    /// Enters where peers reach a node, and returns where they reach the others that are running.
    pub fn advertise(&mut self, token: &str, addresses: &[String]) -> Vec<Vec<String>> {
        let mut others = Vec::new();
        for row in self.nodes.values_mut() {
            if row.token == token {
                row.addresses = addresses.to_vec();
            } else if row.state.is_in() {
                others.push(row.addresses.clone());
            }
        }
        others
    }

    /// Keeps the nodes whose terms are over from changing anything, and returns their tokens, and those that another began
    /// to take over from: the directories of all are to be taken away, before [`Table::fenced`].
    pub fn fence(&mut self, now_ms: i64) -> Vec<(String, String)> {
        let mut out = Vec::new();
        for (name, row) in &mut self.nodes {
            if row.is_overdue(now_ms) {
                row.state = NodeState::Fencing;
            }
            if row.state == NodeState::Fencing {
                out.push((name.clone(), row.token.clone()));
            }
        }
        out
    }

    /// The directory of a node was taken away: the names that it held are free.
    pub fn fenced(&mut self, token: &str) {
        match self.of_token(token) {
            Some((_, row)) if row.state == NodeState::Fencing => row.state = NodeState::Fenced,
            _ => return,
        }
        self.release(token);
    }

    /// Ends the term of a node that stops by itself.
    pub fn leave(&mut self, token: &str, now_ms: i64) {
        match self.of_token(token) {
            Some((_, row)) if row.state.is_in() => {
                row.state = NodeState::Ended;
                row.ends_ms = now_ms;
            }
            _ => return,
        }
        self.release(token);
    }

    /// Lets a node drain, or serve again.
    ///
    /// # Errors
    /// A line for the user: none of that name is running.
    pub fn drain(&mut self, name: &str, drain: bool) -> Result<(), String> {
        match self.nodes.get_mut(name).filter(|row| row.state.is_in()) {
            Some(row) => {
                row.state = match drain {
                    true => NodeState::Draining,
                    false => NodeState::Serving,
                };
                Ok(())
            }
            None => Err(format!(
                "no node called {name} is running; `drover nodes` lists them"
            )),
        }
    }

    /// Forgets a node that does not run, and its mounts. Returns its token.
    ///
    /// # Errors
    /// A line for the user: there is none, or it may be running.
    pub fn remove(&mut self, name: &str) -> Result<String, String> {
        let row = self
            .nodes
            .get(name)
            .ok_or_else(|| format!("there is no node called {name}; `drover nodes` lists them"))?;
        if row.state.is_in() || row.state == NodeState::Fencing {
            return Err(format!(
                "the node {name} is running, or its term is not over yet: stop it, and wait until `drover nodes` says ended or fenced"
            ));
        }
        let token = row.token.clone();
        self.release(&token);
        self.mounts.retain(|(_, _, node), _| node != name);
        self.nodes.remove(name);
        Ok(token)
    }

    /// Holds the name of an image for a node: as the transfer `key`, or for a change, of the file if it `goes`.
    pub fn hold(&mut self, token: &str, at: (&str, &str, Use), key: &str, goes: bool) -> Holding {
        if !self.is_in(token) {
            return Holding::Fenced;
        }
        let (domain, image, what) = at;
        if goes {
            let own = self.name_of(token).unwrap_or_default();
            let mut mounts = self.mounts.keys();
            let elsewhere = mounts.find(|(d, i, node)| d == domain && i == image && node != own);
            if let Some((_, _, node)) = elsewhere {
                return Holding::Mounted(node.clone());
            }
        }
        let at = (domain.to_owned(), image.to_owned(), what);
        match self.held.get(&at) {
            Some(held) if held.token != token => {
                let node = self.name_of(&held.token).unwrap_or_default().to_owned();
                match held.key == key {
                    true => Holding::Wait(node),
                    false => Holding::Taken(node),
                }
            }
            None if self.held.len() >= MAX_HELD => Holding::Taken("-".into()),
            _ => {
                let held = Held {
                    token: token.into(),
                    key: key.into(),
                };
                self.held.insert(at, held);
                Holding::Yes
            }
        }
    }

    /// Frees a name.
    pub fn free(&mut self, token: &str, at: (&str, &str, Use)) {
        let at = (at.0.to_owned(), at.1.to_owned(), at.2);
        if self.held.get(&at).is_some_and(|held| held.token == token) {
            self.held.remove(&at);
        }
    }

    /// Notes that an image has mounts at a node, or, if `writes`, a writer or changes. This never expires by itself.
    ///
    /// # Errors
    /// A line for whoever mounts.
    pub fn mount(
        &mut self,
        token: &str,
        domain: &str,
        image: &str,
        writes: bool,
    ) -> Result<(), String> {
        let name = self.name_of(token).filter(|_| self.is_in(token));
        let Some(own) = name.map(String::from) else {
            return Err("this node was taken for dead, and another has taken over".into());
        };
        let others = self.mounts.iter();
        let mut others = others.filter(|((d, i, n), _)| d == domain && i == image && *n != own);
        if let Some(((_, _, node), _)) = others.find(|(_, other)| writes || **other) {
            return Err(format!(
                "{image} is mounted at the node {node}, or has changes there: mount it at the address of that node"
            ));
        }
        let at = (domain.to_owned(), image.to_owned(), Use::Change);
        if let Some(held) = self.held.get(&at).filter(|held| held.token != token) {
            let node = self.name_of(&held.token).unwrap_or_default();
            return Err(format!(
                "{image} is being replaced or removed by the node {node}: try again"
            ));
        }
        let at = (domain.to_owned(), image.to_owned(), own);
        if !self.mounts.contains_key(&at) && self.mounts.len() >= MAX_MOUNTS {
            return Err("the site has too many mounts".into());
        }
        *self.mounts.entry(at).or_default() |= writes;
        Ok(())
    }

    /// Notes that an image has no mounts and changes at a node any more.
    pub fn unmount(&mut self, token: &str, domain: &str, image: &str) {
        if let Some(node) = self.name_of(token) {
            let at = (domain.to_owned(), image.to_owned(), node.to_owned());
            self.mounts.remove(&at);
        }
    }

    /// The images that have mounts or changes at a node: domain and name.
    #[must_use]
    pub fn mounts_at(&self, token: &str) -> Vec<(String, String)> {
        let node = self.name_of(token);
        let here = self.mounts.keys();
        let here = here.filter(|(_, _, at)| Some(at.as_str()) == node);
        here.map(|(domain, image, _)| (domain.clone(), image.clone()))
            .collect()
    }

    /// The images of a domain that are being received now, at any node.
    #[must_use]
    pub fn receiving(&self, domain: &str) -> Vec<String> {
        let held = self.held.keys();
        let held = held.filter(|(d, _, what)| d == domain && *what == Use::Transfer);
        held.map(|(_, image, _)| image.clone()).collect()
    }

    /// The nodes, as users see them.
    #[must_use]
    pub fn list(&self, now_ms: i64) -> Vec<NodeInfo> {
        let info = |(name, row): (&String, &Row)| NodeInfo {
            name: name.clone(),
            up_ms: now_ms.saturating_sub(row.started_ms),
            left_ms: row.ends_ms.saturating_sub(now_ms),
            transfers: {
                let held = self.held.iter();
                let held = held.filter(|((_, _, what), _)| *what == Use::Transfer);
                held.filter(|(_, held)| held.token == row.token).count()
            },
            mounts: self.mounts.keys().filter(|(_, _, at)| at == name).count(),
            row: row.clone(),
        };
        self.nodes.iter().map(info).collect()
    }
}
