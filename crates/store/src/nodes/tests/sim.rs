//! Nodes in one directory with one database, simulated: each may stand still between any two of its steps, for longer than its
//! term, may be killed and start again, and its clock is wrong by up to an hour and by a hundredth in its rate. A node that
//! stands still does not notice that its term is over, so none looks before it acts: what keeps the images right is that
//! the database refuses its changes, and that its directory is gone.

use super::*;

const BLOCKS: usize = 4;
const NODES: usize = 3;
const TERM: Duration = Duration::from_secs(30);

/// A file: each block is of some version of the image, 0 if it was not written.
type File = Vec<u32>;

/// A transfer on the disk.
#[derive(Debug, Clone)]
struct OnDisk {
    /// The partial file, until it has its name.
    part: Option<usize>,
    version: u32,
    /// Its log says that it is complete.
    closed: bool,
}

/// The shared directory. Images and transfers are by name; there is one source for each.
#[derive(Default)]
struct Disk {
    files: Vec<File>,
    images: BTreeMap<usize, usize>,
    /// By directory.
    transfers: BTreeMap<String, BTreeMap<usize, OnDisk>>,
}

impl Disk {
    fn new_file(&mut self, content: File) -> usize {
        self.files.push(content);
        self.files.len() - 1
    }

    fn is_whole(&self, file: usize, version: u32) -> bool {
        self.files[file].iter().all(|block| *block == version)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    Idle,
    /// Holds the name.
    Hold,
    Fetch,
    /// Writes this block to the open file.
    Write(usize),
    Close,
    Lock,
    Rename,
    Enter,
    Free,
}

/// What a node does besides: asks for its term, and takes over.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Care {
    Ask,
    /// It asked at this time by its clock.
    Asked(Duration),
    /// It is about to take away the directories of these.
    Rename(Vec<(String, String)>),
    Fenced(Vec<(String, String)>),
}

struct Node {
    name: String,
    token: String,
    term: Term,
    rate: f64,
    offset: f64,
    stands_until: u64,
    step: Step,
    care: Care,
    /// What it receives: image, version.
    job: (usize, u32),
    /// The file that it has open.
    file: usize,
    starts: usize,
}

struct Sim {
    rng: fastrand::Rng,
    now_ms: u64,
    table: Table,
    catalog: BTreeMap<usize, u32>,
    disk: Disk,
    nodes: Vec<Node>,
    /// What each source sends, and what was acknowledged.
    sends: Vec<u32>,
    acknowledged: Vec<u32>,
    takeovers: usize,
    refused: usize,
}

impl Sim {
    fn new(seed: u64) -> Sim {
        let mut rng = fastrand::Rng::with_seed(seed);
        let images = rng.usize(1..=2);
        let nodes = (0..NODES).map(|n| Node {
            name: format!("n{n}"),
            token: String::new(),
            term: Term::new(TERM),
            rate: 0.99 + 0.02 * rng.f64(),
            offset: 3600.0 * rng.f64(),
            stands_until: 0,
            step: Step::Idle,
            care: Care::Ask,
            job: (0, 0),
            file: 0,
            starts: 0,
        });
        let nodes = nodes.collect();
        let mut sim = Sim {
            rng,
            now_ms: 7_200_000,
            table: Table::default(),
            catalog: BTreeMap::new(),
            disk: Disk::default(),
            nodes,
            sends: vec![1; images],
            acknowledged: vec![0; images],
            takeovers: 0,
            refused: 0,
        };
        (0..NODES).for_each(|n| sim.start(n));
        sim
    }

    /// By the database's clock.
    fn db_ms(&self) -> i64 {
        self.now_ms as i64 - 3_600_000
    }

    fn clock(&self, n: usize) -> Duration {
        let node = &self.nodes[n];
        Duration::from_secs_f64(node.offset + node.rate * self.now_ms as f64 / 1000.0)
    }

    /// Starts a node, on the same host: its former process is gone.
    fn start(&mut self, n: usize) {
        let node = &mut self.nodes[n];
        node.starts += 1;
        let former = std::mem::replace(&mut node.token, format!("n{n}.{}", node.starts));
        (node.step, node.care, node.term) = (Step::Idle, Care::Ask, Term::new(TERM));
        let joining = joining(&node.name, &node.token, &node.name);
        let token = node.token.clone();
        let now = self.db_ms();
        if self.table.join(&joining, now) != Ok(true) {
            // Another is taking over from it: later.
            self.nodes[n].token = former;
            self.nodes[n].stands_until = self.now_ms + 100;
            self.nodes[n].term.lose();
            return;
        }
        let own = self.disk.transfers.remove(&former).unwrap_or_default();
        self.disk.transfers.insert(token, own);
    }

    fn check(&self) {
        for node in &self.nodes {
            let holds = node.term.holds(self.clock(self.index(node)));
            let row = self.table.nodes.get(&node.name);
            if holds && let Some(row) = row.filter(|row| row.token == node.token) {
                assert!(
                    row.ends_ms >= self.db_ms(),
                    "{} takes its term to be longer",
                    node.name
                );
            }
        }
        for (image, acknowledged) in self.acknowledged.iter().enumerate() {
            let entered = self.catalog.get(&image).copied().unwrap_or(0);
            assert!(entered >= *acknowledged, "{entered} {acknowledged}");
            // Unless it is just being replaced, or was when its node stopped.
            let named = |own: &BTreeMap<usize, OnDisk>| {
                own.get(&image)
                    .is_some_and(|t| t.closed && t.part.is_none())
            };
            let mut held = self.table.held.keys();
            if held.any(|(_, name, _)| *name == Sim::at((image, 0)))
                || self.disk.transfers.values().any(named)
            {
                continue;
            }
            if let Some(file) = self.disk.images.get(&image) {
                let content = &self.disk.files[*file];
                assert!(self.disk.is_whole(*file, entered), "{entered}: {content:?}");
            }
        }
    }

    fn index(&self, node: &Node) -> usize {
        let mut all = self.nodes.iter();
        all.position(|other| other.name == node.name).unwrap()
    }

    fn at(job: (usize, u32)) -> String {
        format!("i{}", job.0)
    }

    /// One step of what a node receives.
    fn work(&mut self, n: usize) {
        let (token, job, file) = {
            let node = &self.nodes[n];
            (node.token.clone(), node.job, node.file)
        };
        let (image, version) = job;
        let name = Sim::at(job);
        let next = match self.nodes[n].step {
            Step::Idle => {
                // A source comes, with what it has now.
                let image = self.rng.usize(..self.sends.len());
                self.nodes[n].job = (image, self.sends[image]);
                Step::Hold
            }
            Step::Hold => {
                let at = ("d", &*name, Use::Transfer);
                match self.table.hold(&token, at, "k", true) {
                    Holding::Yes if self.sends[image] == version => Step::Fetch,
                    Holding::Yes => Step::Free,
                    _ => Step::Idle,
                }
            }
            Step::Fetch => self.fetch(n),
            Step::Write(block) => {
                self.disk.files[file][block] = version;
                // What had come is written, but nothing more comes from a source that is elsewhere by now.
                match self.sends[image] == version {
                    true if block + 1 < BLOCKS => Step::Write(block + 1),
                    true => Step::Close,
                    false => Step::Free,
                }
            }
            Step::Close => {
                // By the path, and by the digest of what the open file holds.
                let whole = self.disk.is_whole(file, version);
                let own = self.disk.transfers.get_mut(&token);
                match own.and_then(|own| own.get_mut(&image)) {
                    Some(transfer) if whole && transfer.part == Some(file) => {
                        transfer.closed = true;
                        Step::Lock
                    }
                    _ => Step::Free,
                }
            }
            Step::Lock => match self.table.hold(&token, ("d", &name, Use::Change), "", true) {
                Holding::Yes => Step::Rename,
                Holding::Fenced => Step::Free,
                _ => Step::Lock,
            },
            Step::Rename => {
                let own = self.disk.transfers.get_mut(&token);
                match own.and_then(|own| own.get_mut(&image)) {
                    Some(transfer) if transfer.part.is_some() => {
                        let part = transfer.part.take().unwrap();
                        self.disk.images.insert(image, part);
                        Step::Enter
                    }
                    Some(_) => Step::Enter,
                    None => Step::Free,
                }
            }
            Step::Enter => {
                // What is refused is undone by name, in a directory that is gone.
                if self.table.is_in(&token) {
                    self.catalog.insert(image, version);
                    if let Some(own) = self.disk.transfers.get_mut(&token) {
                        own.remove(&image);
                    }
                    if self.sends[image] == version {
                        self.acknowledged[image] = version;
                        self.sends[image] += 1;
                    }
                } else {
                    self.refused += 1;
                }
                Step::Free
            }
            Step::Free => {
                self.table.free(&token, ("d", &name, Use::Change));
                self.table.free(&token, ("d", &name, Use::Transfer));
                Step::Idle
            }
        };
        self.nodes[n].step = next;
    }

    /// Takes over what another has of the transfer, and begins or goes on.
    fn fetch(&mut self, n: usize) -> Step {
        let (image, version) = self.nodes[n].job;
        let token = self.nodes[n].token.clone();
        let has = |dir: &String, disk: &Disk| disk.transfers[dir].contains_key(&image);
        if !self.disk.transfers.contains_key(&token) {
            return Step::Free;
        }
        let dirs: Vec<String> = self.disk.transfers.keys().cloned().collect();
        if !has(&token, &self.disk)
            && let Some(dir) = dirs.iter().find(|dir| has(dir, &self.disk))
        {
            let mut found = self
                .disk
                .transfers
                .get_mut(dir)
                .unwrap()
                .remove(&image)
                .unwrap();
            // Somebody may still write to it.
            if let Some(part) = found
                .part
                .filter(|_| dir.ends_with(".fenced") && !found.closed)
            {
                let copy = self.disk.files[part].clone();
                found.part = Some(self.disk.new_file(copy));
            }
            let own = self.disk.transfers.get_mut(&token).unwrap();
            own.insert(image, found);
            self.takeovers += 1;
        }
        let left = self.disk.transfers[&token].get(&image).cloned();
        match left {
            Some(left) if left.closed => {
                // Delivered first, whatever the source has by now; or it has its name already.
                let in_place = self.disk.images.get(&image).copied();
                let is_there = in_place.is_some_and(|file| self.disk.is_whole(file, left.version));
                if left.part.is_none() && !is_there {
                    self.disk.transfers.get_mut(&token).unwrap().remove(&image);
                    return Step::Free;
                }
                self.nodes[n].job.1 = left.version;
                Step::Lock
            }
            Some(left) if left.version == version => {
                self.nodes[n].file = left.part.unwrap();
                let content = &self.disk.files[left.part.unwrap()];
                match content.iter().position(|block| *block != version) {
                    Some(block) => Step::Write(block),
                    None => Step::Close,
                }
            }
            left => {
                // What is there of another version is overwritten.
                let there = left.and_then(|left| left.part);
                let file = there.unwrap_or_else(|| self.disk.new_file(vec![0; BLOCKS]));
                self.nodes[n].file = file;
                let transfer = OnDisk {
                    part: Some(file),
                    version,
                    closed: false,
                };
                let own = self.disk.transfers.get_mut(&token).unwrap();
                own.insert(image, transfer);
                Step::Write(0)
            }
        }
    }

    /// One step of asking for the term and of taking over.
    fn care(&mut self, n: usize) {
        let (token, now) = (self.nodes[n].token.clone(), self.db_ms());
        let next = match self.nodes[n].care.clone() {
            Care::Ask => Care::Asked(self.clock(n)),
            Care::Asked(asked) => match self.table.renew(&token, now) {
                Some(_) => {
                    self.nodes[n].term.granted(asked);
                    match self.table.fence(now) {
                        gone if gone.is_empty() => Care::Ask,
                        gone => Care::Rename(gone),
                    }
                }
                None => {
                    self.nodes[n].term.lose();
                    // It ends, and is started again.
                    return self.start(n);
                }
            },
            Care::Rename(gone) => {
                for (_, token) in &gone {
                    if let Some(transfers) = self.disk.transfers.remove(token) {
                        let fenced = format!("{token}.fenced");
                        self.disk.transfers.insert(fenced, transfers);
                    }
                }
                Care::Fenced(gone)
            }
            Care::Fenced(gone) => {
                gone.iter().for_each(|(_, token)| self.table.fenced(token));
                Care::Ask
            }
        };
        self.nodes[n].care = next;
    }

    /// Lets every node finish what it does, and a node that is in take up what is left of each image.
    fn settle(&mut self) {
        let work_all = |sim: &mut Sim| {
            while let Some(n) = sim.nodes.iter().position(|node| node.step != Step::Idle) {
                sim.work(n);
            }
        };
        work_all(self);
        for n in 0..NODES {
            (0..6).for_each(|_| self.care(n));
        }
        work_all(self);
        for image in 0..self.sends.len() {
            let is_in = |node: &Node| self.table.is_in(&node.token);
            let n = self.nodes.iter().position(is_in).unwrap();
            self.nodes[n].job = (image, self.sends[image]);
            self.nodes[n].step = Step::Hold;
            work_all(self);
        }
    }

    fn step(&mut self, faults: bool) {
        self.now_ms += self.rng.u64(1..1_500);
        let n = self.rng.usize(..NODES);
        if faults && self.rng.u32(..25) == 0 {
            let long = [500, 20_000, 35_000, 45_000, 60_000, 80_000];
            self.nodes[n].stands_until = self.now_ms + long[self.rng.usize(..long.len())];
        }
        if faults && self.rng.u32(..300) == 0 {
            self.start(n);
        }
        if faults && self.rng.u32(..50) == 0 {
            // A source has a newer image.
            let image = self.rng.usize(..self.sends.len());
            self.sends[image] += 1;
        }
        if self.nodes[n].stands_until > self.now_ms {
            return;
        }
        let lost = self.nodes[n].term.is_lost();
        match self.rng.u32(..3) {
            0 => self.care(n),
            _ if lost => self.start(n),
            _ => self.work(n),
        }
        self.check();
    }
}

#[test]
fn nodes_that_stand_still_and_die_lose_nothing_and_harm_nothing() {
    let (mut takeovers, mut refused, mut delivered) = (0, 0, 0);
    for seed in 0..300 {
        println!("seed {seed}");
        let mut sim = Sim::new(seed);
        (0..3_000).for_each(|_| sim.step(true));
        // Without further faults every source gets through, and every image is what its record says.
        let before = sim.acknowledged.clone();
        for node in &mut sim.nodes {
            node.stands_until = 0;
        }
        let mut steps = 0;
        while !sim
            .acknowledged
            .iter()
            .zip(&before)
            .all(|(now, then)| now > &(then + 1))
        {
            sim.step(false);
            steps += 1;
            assert!(steps < 20_000, "it does not get on: {:?}", sim.table);
        }
        sim.settle();
        for (image, version) in &sim.catalog {
            let content = &sim.disk.files[sim.disk.images[image]];
            let whole = content.iter().all(|block| block == version);
            assert!(whole, "{version}: {content:?}");
        }
        takeovers += sim.takeovers;
        refused += sim.refused;
        delivered += sim.acknowledged.iter().sum::<u32>();
    }
    println!("{delivered} delivered, {takeovers} taken over, {refused} refused");
    assert!(takeovers > 1000 && refused > 10 && delivered > 10_000);
}
