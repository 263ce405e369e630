//! Makes the process of a home a node of its site: finds out whether the directory of images is that of the other nodes, enters
//! the node in the table, and brings its files of the last start along.

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use drover_core::ImageName;
use drover_net::random_id;
use drover_storage::{atomic_replace, make_private_dir, open_private, sync_parent};
use drover_store::nodes::{Joining, Nodes};
use drover_store::{CatalogUrl, changes};
use drover_teleport::FENCED;

use crate::error::{Context, Error, Result};
use crate::home::Home;
use crate::mounts::leased_on_disk;
use crate::node::{DIRECTORY_FILE, Node, Place, Setting, clock, directory_of, fence};

/// How long a node that starts waits for the term of another of its name to end, beyond what that has left.
const PATIENCE: Duration = Duration::from_secs(20);

/// How often it looks.
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// Where what a node had is kept that did not share its site yet.
const FORMER: [&str; 6] = [
    "transfers",
    "flocks",
    "merges",
    "links",
    "sequences.data",
    "sequences.pending",
];

/// Makes this process the node of a home whose catalog is on a database server, if it is not yet; none if its catalog is a
/// file. Blocks.
///
/// # Errors
/// When the directory of images is not that of the other nodes, a node of that name is running, or the database is away.
pub fn join(home: &Home) -> Result<Option<Arc<Node>>> {
    let site = home.of_site().unwrap_or_else(|| home.clone());
    let Some(url) = site.config.catalog.clone() else {
        return Ok(None);
    };
    if let Some(node) = site.node() {
        return Ok(Some(node));
    }
    let lock = lock(&site)?;
    let nodes = Nodes::open(&url)?;
    let images = site.images_dir();
    let images = images.canonicalize().unwrap_or(images);
    let directory = directory(&images, &nodes, &url)?;
    let token: String = random_id().iter().map(|b| format!("{b:02x}")).collect();
    let former = site.node_tokens();
    let listed = [vec![token.clone()], former.clone()].concat();
    note(&site, &listed)?;
    let bases = {
        let site = site.apart();
        move || bases(&site)
    };
    let joining = Joining {
        name: site.node_name(),
        token: token.clone(),
        place: place(&site)?,
        directory: directory.clone(),
        path: images.display().to_string(),
        addresses: Vec::new(),
        version: env!("CARGO_PKG_VERSION").into(),
        term: site.config.term(),
    };
    let shared = Place {
        images: &images,
        directory: &directory,
        bases: &bases,
    };
    let asked = enter(&nodes, &joining, &shared)?;
    bring_along(&site, &nodes, &joining, &former)?;
    note(&site, std::slice::from_ref(&token))?;
    let its = site.apart();
    let setting = Setting {
        name: joining.name,
        token,
        term: joining.term,
        images,
        directory,
        bases: Box::new(bases),
        is_idle: Box::new(move |domain, name| is_idle(&its, domain, name)),
        identity: site.identity().ok(),
    };
    let node = Node::start(setting, nodes, lock, asked)?;
    site.set_node(Arc::clone(&node));
    Ok(Some(node))
}

/// Locks what only one process of a home may be.
fn lock(site: &Home) -> Result<File> {
    let path = site.dir().join("node.lock");
    let cannot = || format!("cannot lock {}", path.display());
    let file = open_private(&path).with_context(cannot)?;
    let until = Instant::now() + Duration::from_secs(2);
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(file),
            Err(fs::TryLockError::Error(e)) => return Err(e).with_context(cannot),
            Err(fs::TryLockError::WouldBlock) if Instant::now() < until => {
                std::thread::sleep(LOOK_EVERY / 4);
            }
            Err(fs::TryLockError::WouldBlock) => {
                return Err(Error::refused(format!(
                    "another drover process uses {}; try again when it is done",
                    site.dir().display()
                )));
            }
        }
    }
}

/// What the directory of images says that it is; the first node of a site gives it a name.
fn directory(images: &Path, nodes: &Nodes, url: &CatalogUrl) -> Result<String> {
    if let Some(known) = directory_of(images) {
        return Ok(known);
    }
    if !nodes.directory()?.is_empty() {
        return Err(Error::refused(format!(
            "the directory of images {0} is not the one of this site's other nodes: it has no {DIRECTORY_FILE}, and the catalog at {url} knows one that has; is its file system mounted?",
            images.display()
        )));
    }
    let path = images.join(DIRECTORY_FILE);
    let cannot = || format!("cannot write {}", path.display());
    let id = random_id();
    let new = images.join(format!("{DIRECTORY_FILE}.{:02x}{:02x}", id[0], id[1]));
    let id: String = id.iter().map(|b| format!("{b:02x}")).collect();
    let write = || -> io::Result<()> {
        let mut file = File::create(&new)?;
        writeln!(file, "{id}")?;
        file.sync_all()?;
        // Another node that starts now is not overwritten.
        let linked = fs::hard_link(&new, &path);
        fs::remove_file(&new)?;
        linked.or_else(|e| match e.kind() {
            io::ErrorKind::AlreadyExists => Ok(()),
            _ => Err(e),
        })?;
        sync_parent(&path)
    };
    write().with_context(cannot)?;
    directory_of(images).with_context(cannot)
}

/// Where a home is, on a host since that has started.
fn place(site: &Home) -> Result<String> {
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id");
    let boot = boot.context("cannot read which boot of this host it is")?;
    let about = site.dir().metadata();
    let about = about.with_context(|| format!("cannot read {}", site.dir().display()))?;
    Ok(format!("{}/{}/{}", boot.trim(), about.dev(), about.ino()))
}

/// Enters the node in the table; returns when that was asked for, by [`clock`].
fn enter(nodes: &Nodes, joining: &Joining, shared: &Place<'_>) -> Result<Duration> {
    let mut until = None;
    loop {
        let asked = clock();
        if nodes.join(joining)? {
            return Ok(asked);
        }
        let until = *until.get_or_insert_with(|| {
            let left = nodes.list().unwrap_or_default();
            let left = left.iter().find(|node| node.name == joining.name);
            let left = left.map_or(0, |node| node.left_ms.max(0));
            crate::notice::notice(&format!(
                "waiting for the term of the node {} as it was started before, or elsewhere: it ends in {} s, unless that node is running",
                joining.name,
                left / 1000
            ));
            Instant::now() + Duration::from_millis(left.unsigned_abs()) + PATIENCE
        });
        if Instant::now() > until {
            return Err(Error::refused(format!(
                "a node called {0} is running elsewhere: give this one another name (`node` in config.toml)",
                joining.name
            )));
        }
        fence(nodes, shared)?;
        std::thread::sleep(LOOK_EVERY);
    }
}

/// The directories of the work directories of all nodes, of all domains.
fn bases(site: &Home) -> io::Result<Vec<PathBuf>> {
    let homes = site.all_domains().map_err(io::Error::other)?;
    let mut all: Vec<PathBuf> = homes.iter().map(Home::work_base).collect();
    // Domains that only other nodes have.
    let domains = match fs::read_dir(site.images_dir().join(".drover-domains")) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(all),
        domains => domains?,
    };
    for entry in domains {
        let base = entry?.path().join(".drover-work");
        if !all.contains(&base) {
            all.push(base);
        }
    }
    Ok(all)
}

/// Writes the tokens of a home's starts, the latest first.
fn note(site: &Home, tokens: &[String]) -> Result<()> {
    let path = site.node_tokens_path();
    let text = tokens.join("\n") + "\n";
    atomic_replace(&path, text.as_bytes())
        .with_context(|| format!("cannot write {}", path.display()))
}

/// Brings the files of the last start along, as far as they are still this node's.
fn bring_along(site: &Home, nodes: &Nodes, joining: &Joining, former: &[String]) -> Result<()> {
    let others = nodes.list()?;
    let is_others = |token: &&String| {
        let mut others = others.iter();
        others.any(|node| node.name != joining.name && node.row.token == **token)
    };
    let former: Vec<&String> = former.iter().filter(|token| !is_others(token)).collect();
    for home in site.all_domains()? {
        let base = home.work_base();
        let own = base.join(&joining.token);
        let cannot = || format!("cannot create {}", own.display());
        make_private_dir(&base).with_context(cannot)?;
        for token in &former {
            let last = base.join(token);
            if !own.exists() && last.is_dir() {
                let renamed = fs::rename(&last, &own);
                renamed.with_context(|| format!("cannot rename {}", last.display()))?;
            }
        }
        make_private_dir(&own).with_context(cannot)?;
        for token in &former {
            // What it was receiving is anybody's: another process may still have it open. So are its flocks, without their images.
            let fenced = base.join(format!("{token}.{FENCED}"));
            for entry in fs::read_dir(&fenced).into_iter().flatten().flatten() {
                let (from, to) = (entry.path(), own.join(entry.file_name()));
                let is_anybodys = ["transfers", "flocks"]
                    .iter()
                    .any(|n| entry.file_name() == *n);
                if !is_anybodys && !to.exists() {
                    let renamed = fs::rename(&from, &to);
                    renamed.with_context(|| format!("cannot rename {}", from.display()))?;
                }
            }
        }
        // If nothing else was there.
        for token in &former {
            let fenced = base.join(format!("{token}.{FENCED}"));
            if fs::remove_dir(fenced.join("transfers")).is_ok() {
                let _ = fs::remove_dir_all(fenced.join("flocks"));
            }
            let _ = fs::remove_dir(fenced);
        }
        // From before it had other nodes.
        for name in FORMER {
            let (from, to) = (base.join(name), own.join(name));
            if from.exists() && !to.exists() {
                let renamed = fs::rename(&from, &to);
                renamed.with_context(|| format!("cannot rename {}", from.display()))?;
            }
        }
        sync_parent(&own.join("x")).with_context(cannot)?;
        sync_parent(&own).with_context(cannot)?;
        share_maps(&home)?;
    }
    Ok(())
}

/// Copies the maps and profiles of a home that did not share its site yet.
fn share_maps(home: &Home) -> Result<()> {
    let maps = home.maps_dir();
    let former = home.index_dir().join("maps");
    if maps.exists() || !former.exists() {
        return Ok(());
    }
    let copy = |from: &Path, to: &Path| -> io::Result<()> {
        let new = to.with_extension("new");
        let _ = fs::remove_dir_all(&new);
        make_private_dir(&new)?;
        for entry in fs::read_dir(from)? {
            let entry = entry?;
            if entry.file_type()?.is_file() {
                fs::copy(entry.path(), new.join(entry.file_name()))?;
            }
        }
        fs::rename(&new, to)
    };
    let cannot = || format!("cannot copy to {}", maps.display());
    let profiles = former.with_file_name("profiles");
    let shared = maps.with_file_name("profiles");
    if profiles.is_dir() && !shared.exists() {
        copy(&profiles, &shared).with_context(cannot)?;
    }
    copy(&former, &maps).with_context(cannot)
}

/// Whether an image has neither a write lease nor changes here.
fn is_idle(site: &Home, domain: &str, name: &ImageName) -> bool {
    let Ok(home) = site.domain(domain) else {
        return false;
    };
    let state = home.mounted_dir();
    let is_leased = leased_on_disk(&state, name);
    let is_leased = is_leased.map_or(true, |leased| leased.is_some_and(|l| l.holder.is_some()));
    !is_leased && changes::of_image(&state, name).is_none()
}

/// The table of the nodes of a home's site.
///
/// # Errors
/// When its catalog is a file, or the database is away.
pub fn nodes(home: &Home) -> Result<Nodes> {
    let Some(url) = &home.config.catalog else {
        return Err(Error::refused(format!(
            "the site in {} has one node: its catalog is a file; see `drover serve --catalog`",
            home.dir().display()
        )));
    };
    Ok(Nodes::open(url)?)
}

/// Forgets a node that does not run, and what it was receiving.
///
/// # Errors
/// When there is none of that name, or it runs; when its files cannot be removed.
pub fn remove_node(home: &Home, name: &str) -> Result<()> {
    let token = nodes(home)?.remove(name)?;
    let bases = bases(home).context("cannot list the domains of the site")?;
    for base in bases {
        for dir in [base.join(&token), base.join(format!("{token}.{FENCED}"))] {
            match fs::remove_dir_all(&dir) {
                Err(e) if e.kind() != io::ErrorKind::NotFound => {
                    return Err(e).with_context(|| format!("cannot remove {}", dir.display()));
                }
                _ => {}
            }
        }
    }
    Ok(())
}
