//! A site's home directory, which holds all of its state: identity, catalog, images and caches.
//!
//! ```text
//! identity.key   config.toml   catalog.db   catalog.bak   catalog.url   site.sock   lock   reserve   audit.log   serve.ticket
//! node.tokens    node.lock
//! images/        work/         index/        mounted/     mounts/      machines/   qemu/
//! domains/NAME/  # catalog.db, site.sock, lock, images/, work/, index/ and mounted/ of a domain
//! ```

mod catalog;
mod checks;
mod config;
pub mod qemu;
mod reserve;

use std::fs::{self, File, Permissions, TryLockError};
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use drover_core::ImageName;
use drover_device::backend::chunk_store::StoreAddress;
use drover_net::{DEFAULT_DOMAIN, Identity};
use drover_storage::{make_private_dir, open_private};
use drover_store::machine::Machines;
use drover_store::replica::{Records, Replica, Sent};
use drover_store::space::Places;
use drover_store::{CatalogUrl, domain};
use parking_lot::Mutex;

use crate::audit::Audit;
use crate::error::{Context, Error, Result, bail};
use crate::node::Node;

pub use config::{BuildConfig, Chosen, Config, DiskConfig, MachineConfig, disk_name};
pub use reserve::{CleanUp, LOOK_EVERY};

/// Retries of a lock that is held, and the pause between them.
const LOCK_TRIES: u32 = 10;
const LOCK_PAUSE: Duration = Duration::from_millis(50);

/// A site's home directory and its configuration.
#[derive(Debug, Clone)]
pub struct Home {
    dir: PathBuf,
    /// The directory of the site, if this is that of a domain.
    site: Option<PathBuf>,
    /// The audit log of the site.
    audit: Arc<Audit>,
    /// This process as a node of the site, while it is one.
    node: Arc<Mutex<Option<Arc<Node>>>>,
    /// The settings of `config.toml`, or the defaults.
    pub config: Config,
}

/// Exclusive lock of the home: only its holder may change images and caches.
#[derive(Debug)]
pub struct HomeLock(
    #[expect(dead_code, reason = "the lock lasts as long as the file is open")] File,
);

impl Home {
    /// The directory of the home: `chosen`, else `/var/lib/drover` for root,
    /// else `drover` in the XDG data directory.
    ///
    /// # Errors
    /// When none of these can be determined.
    pub fn locate(chosen: Option<&Path>) -> Result<PathBuf> {
        let dir = match chosen {
            Some(dir) if dir.as_os_str().is_empty() => {
                return Err(Error::usage(
                    "the path of the site directory is empty; unset DROVER_HOME or set it to a directory",
                ));
            }
            Some(dir) => dir.to_path_buf(),
            None if rustix::process::geteuid().is_root() => PathBuf::from("/var/lib/drover"),
            None => data_dir(
                std::env::var_os("XDG_DATA_HOME").map(PathBuf::from),
                std::env::var_os("HOME").map(PathBuf::from),
            )
            .context("neither DROVER_HOME nor HOME is set; set DROVER_HOME to a directory")?
            .join("drover"),
        };
        std::path::absolute(&dir).with_context(|| format!("cannot find {}", dir.display()))
    }

    /// Opens the home in `dir`, creating it, private to this user, if there is none.
    ///
    /// # Errors
    /// When it cannot be created, or its configuration cannot be read.
    pub fn create(dir: PathBuf) -> Result<Home> {
        make_dir(&dir)?;
        checks::private(&dir)?;
        let mut config = Config::load(&dir.join("config.toml"))?;
        if config.catalog.is_none() {
            config.catalog = catalog::remembered(&dir)?;
        }
        let home = Home {
            audit: Audit::new(&dir),
            node: Arc::default(),
            dir,
            site: None,
            config,
        };
        checks::apart(&home.dir, &home.images_dir())?;
        for sub in ["work", "index"] {
            make_dir(&home.dir.join(sub))?;
        }
        make_images_dir(&home.images_dir(), home.config.image_mode())?;
        Ok(home)
    }

    /// Creates the home in `dir` with its configuration and identity, as far as they are missing. Returns whether the
    /// site is new.
    ///
    /// # Errors
    /// When it cannot be created; a usage error when `chosen` would change a configuration that exists.
    pub fn init(dir: PathBuf, chosen: &Chosen) -> Result<(Home, bool)> {
        let path = dir.join("config.toml");
        let fresh = !dir.join("identity.key").exists();
        if path.exists() && chosen.is_any() {
            return Err(Error::usage(format!(
                "{} exists already: edit it to change the settings",
                path.display()
            )));
        }
        if !path.exists() {
            // First, because it determines where images go.
            make_dir(&dir)?;
            checks::private(&dir)?;
            if let Some(images) = &chosen.images {
                checks::apart(&dir, &std::path::absolute(images)?)?;
            }
            drover_storage::atomic_replace(&path, Config::template(chosen)?.as_bytes())
                .with_context(|| format!("cannot write {}", path.display()))?;
        }
        let home = Home::create(dir)?;
        home.identity()?;
        Ok((home, fresh))
    }

    /// Opens the home in `dir`.
    ///
    /// # Errors
    /// When there is none, or its configuration cannot be read.
    pub fn existing(dir: PathBuf) -> Result<Home> {
        let files = ["identity.key", "catalog.db", "config.toml"];
        let mut found = false;
        for file in files.map(|file| dir.join(file)) {
            found |= match file.try_exists() {
                Err(e) if e.kind() != io::ErrorKind::NotADirectory => {
                    return Err(e).with_context(|| format!("cannot open {}", file.display()));
                }
                found => found.unwrap_or(false),
            };
        }
        if !found {
            let what = match dir.metadata() {
                Ok(found) if !found.is_dir() => "is not a directory",
                Ok(_) => "has no site",
                Err(_) => "does not exist",
            };
            bail!(
                "the site directory {} {what}: create one with `drover init`, or set DROVER_HOME to another one",
                dir.display()
            );
        }
        Home::create(dir)
    }

    /// Uses the catalog at this address.
    ///
    /// # Errors
    /// When `config.toml` names another one.
    pub fn use_catalog(&mut self, url: CatalogUrl) -> Result<()> {
        let known = self.config.catalog.as_ref();
        if let Some(other) = known.filter(|known| **known != url)
            && !catalog::is_remembered(&self.dir)
        {
            return Err(Error::usage(format!(
                "config.toml says that the catalog of {} is at {other}: change it there",
                self.dir.display()
            )));
        }
        self.config.catalog = Some(url);
        Ok(())
    }

    /// Serves a disk in a store, beside those of `config.toml`.
    ///
    /// # Errors
    /// When another one has that name.
    pub fn serve_disk(&mut self, name: ImageName, store: StoreAddress) -> Result<()> {
        match self.config.disks.get(&name) {
            Some(other) if other.store != store => Err(Error::usage(format!(
                "two disks are to be served as {name}: {} and {store}",
                other.store
            ))),
            Some(_) => Ok(()),
            None => {
                let read_only = false;
                let disk = DiskConfig { store, read_only };
                self.config.disks.insert(name, disk);
                Ok(())
            }
        }
    }

    /// Lets other processes of this home use the same catalog from now on.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn remember_catalog(&self) -> Result<()> {
        let known = match Config::load(&self.dir.join("config.toml"))?.catalog {
            None => catalog::remembered(&self.dir)?,
            known => known,
        };
        match &self.config.catalog {
            Some(url) if known.as_ref() != Some(url) => catalog::remember(&self.dir, url),
            _ => Ok(()),
        }
    }

    /// The directory itself (absolute).
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The audit log of the site, also for this domain.
    pub fn audit(&self) -> &Arc<Audit> {
        &self.audit
    }

    /// The directory of the site: of a domain's home, the one that it is in.
    fn site_dir(&self) -> &Path {
        self.site.as_deref().unwrap_or(&self.dir)
    }

    /// The home of the site, if this is that of a domain.
    pub fn of_site(&self) -> Option<Home> {
        let dir = self.site.clone()?;
        Some(Home {
            dir,
            site: None,
            audit: Arc::clone(&self.audit),
            node: Arc::clone(&self.node),
            config: self.config.clone(),
        })
    }

    /// The name of the domain that this is the home of.
    pub fn domain_name(&self) -> &str {
        let name = self.dir.file_name().and_then(|name| name.to_str());
        name.filter(|_| self.site.is_some())
            .unwrap_or(DEFAULT_DOMAIN)
    }

    /// The home of a domain of this site.
    ///
    /// # Errors
    /// When there is no such domain.
    pub fn domain(&self, name: &str) -> Result<Home> {
        let home = self.domain_to_be(name)?;
        if !home.dir.is_dir() {
            return Err(Error::refused(format!(
                "no domain is called {name:?}; `drover domains add {name}` makes one"
            )));
        }
        Ok(home)
    }

    /// The home that a domain of this site has, or would have.
    ///
    /// # Errors
    /// When a domain cannot have this name.
    pub fn domain_to_be(&self, name: &str) -> Result<Home> {
        if name == DEFAULT_DOMAIN {
            return Ok(self.of_site().unwrap_or_else(|| self.clone()));
        }
        domain::check(name).map_err(Error::usage)?;
        Ok(Home {
            dir: self.domains_dir().join(name),
            site: Some(self.site_dir().to_owned()),
            audit: Arc::clone(&self.audit),
            node: Arc::clone(&self.node),
            config: self.config.clone(),
        })
    }

    /// Creates the directories of a domain.
    ///
    /// # Errors
    /// When the file system refuses.
    pub fn make_domain(&self) -> Result<()> {
        for dir in [
            self.images_dir(),
            self.work_dir(),
            self.index_dir(),
            self.dir.clone(),
        ] {
            make_dir(&dir)?;
        }
        Ok(())
    }

    /// The names of the domains of this site, sorted; without the default one.
    ///
    /// # Errors
    /// When the directory cannot be read.
    pub fn domains(&self) -> Result<Vec<String>> {
        let dir = self.domains_dir();
        let entries = match dir.read_dir() {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries.with_context(|| format!("cannot read {}", dir.display()))?,
        };
        // Whatever else somebody has put there is none.
        let dirs = entries.flatten().filter(|entry| entry.path().is_dir());
        let names = dirs.filter_map(|entry| entry.file_name().into_string().ok());
        let mut names: Vec<_> = names.filter(|name| domain::check(name).is_ok()).collect();
        names.sort();
        Ok(names)
    }

    /// The homes of all domains of this site, the default one first.
    ///
    /// # Errors
    /// When they cannot be listed.
    pub fn all_domains(&self) -> Result<Vec<Home>> {
        let mut names = vec![DEFAULT_DOMAIN.to_owned()];
        names.extend(self.domains()?);
        // One that is removed meanwhile is left out.
        Ok(names
            .iter()
            .filter_map(|name| self.domain(name).ok())
            .collect())
    }

    fn domains_dir(&self) -> PathBuf {
        self.site_dir().join("domains")
    }

    /// Directory for delivered images.
    pub fn images_dir(&self) -> PathBuf {
        match (&self.config.images, &self.site) {
            (None, _) => self.dir.join("images"),
            (Some(dir), None) => self.dir.join(dir),
            (Some(dir), Some(site)) => {
                let beside = site.join(dir).join(".drover-domains");
                beside.join(self.domain_name())
            }
        }
    }

    /// Directory with the changes that mounts made to this site's images, and their leases.
    pub fn mounted_dir(&self) -> PathBuf {
        self.dir.join("mounted")
    }

    /// Directory where images are assembled, on the file system of [`Home::images_dir`] so that a rename delivers them: that of
    /// the last start of this node, if there may be others.
    pub fn work_dir(&self) -> PathBuf {
        let base = self.work_base();
        match self.node_tokens().first() {
            Some(token) => base.join(token),
            None => base,
        }
    }

    /// The directory of the work directories of all nodes.
    pub fn work_base(&self) -> PathBuf {
        match &self.config.images {
            Some(_) => self.images_dir().join(".drover-work"),
            None => self.dir.join("work"),
        }
    }

    /// The directories with records of flocks that are received: those of this node, and those that all nodes receive.
    pub fn flock_dirs(&self) -> [PathBuf; 2] {
        [self.work_dir(), self.work_base().join("shared")]
    }

    /// Directory with the maps of images.
    pub fn maps_dir(&self) -> PathBuf {
        match &self.config.catalog {
            Some(_) => self.work_base().join("shared/maps"),
            None => self.index_dir().join("maps"),
        }
    }

    /// This process as a node of the site; none before it has joined, and after it has left.
    pub fn node(&self) -> Option<Arc<Node>> {
        let node = self.node.lock().clone();
        node.filter(|node| !node.has_left())
    }

    /// Makes this process a node.
    pub fn set_node(&self, node: Arc<Node>) {
        *self.node.lock() = Some(node);
    }

    /// The same home, as if this process were no node.
    pub fn apart(&self) -> Home {
        Home {
            node: Arc::default(),
            ..self.clone()
        }
    }

    /// The name of this home's node: the configured one, else the host name.
    pub fn node_name(&self) -> String {
        self.config.node.clone().unwrap_or_else(|| {
            let host = rustix::system::uname();
            drover_store::peer_name::from_untrusted(&host.nodename().to_string_lossy())
        })
    }

    /// Where the tokens of the starts of this home's node are noted.
    pub fn node_tokens_path(&self) -> PathBuf {
        self.site_dir().join("node.tokens")
    }

    /// The tokens of the starts of this home's node whose files may be there, the latest first; none if its catalog is a file.
    pub fn node_tokens(&self) -> Vec<String> {
        if self.config.catalog.is_none() {
            return Vec::new();
        }
        let text = fs::read_to_string(self.node_tokens_path()).unwrap_or_default();
        let is_token =
            |line: &&str| line.len() == 32 && line.bytes().all(|b| b.is_ascii_hexdigit());
        text.lines().filter(is_token).map(String::from).collect()
    }

    /// Directory with the matcher's files.
    pub fn index_dir(&self) -> PathBuf {
        self.dir.join("index")
    }

    /// The directories of the site.
    pub fn places(&self) -> Places {
        Places {
            home: self.dir.clone(),
            images: self.images_dir(),
            overlays: self.mounted_dir(),
            work: self.work_dir(),
            mounts: self.dir.join("mounts"),
            index: self.index_dir(),
            reserve: self.reserve_path(),
        }
    }

    /// The records of machines that migrate, of all domains.
    pub fn machines(&self) -> Machines {
        Machines::new(self.site_dir().join("machines"))
    }

    /// The records of disks of programs that move, of this domain.
    pub fn disks(&self) -> Machines {
        Machines::new(self.dir.join("disks"))
    }

    /// The directory of what this site knows of the disks in stores that it serves.
    pub fn stores_dir(&self) -> PathBuf {
        self.dir.join("stores")
    }

    /// The records of replicas that this domain keeps.
    pub fn replicas(&self) -> Records<Replica> {
        Records::new(self.dir.join("replicas"))
    }

    /// The records of replicas that are sent from this domain.
    pub fn replicas_sent(&self) -> Records<Sent> {
        Records::new(self.dir.join("replicas-sent"))
    }

    /// The control socket of the running site.
    pub fn socket(&self) -> PathBuf {
        self.dir.join("site.sock")
    }

    /// The identity of this home, created on first use.
    ///
    /// # Errors
    /// When it cannot be read or created. It is never replaced.
    pub fn identity(&self) -> Result<Identity> {
        Ok(Identity::load_or_create(
            self.site_dir().join("identity.key"),
        )?)
    }

    /// The name this site announces to others: the configured name, else the host name.
    pub fn name(&self) -> String {
        let name = self.config.name.clone().unwrap_or_else(|| {
            rustix::system::uname()
                .nodename()
                .to_string_lossy()
                .into_owned()
        });
        drover_store::peer_name::from_untrusted(&name)
    }

    /// Locks the home for this process.
    ///
    /// # Errors
    /// When another process holds the lock; the message has its PID.
    pub fn lock(&self) -> Result<HomeLock> {
        let cannot = || format!("cannot lock {}", self.lock_path().display());
        let mut file = self.open_lock()?;
        let mut tries = 0;
        loop {
            match file.try_lock() {
                Ok(()) => break,
                // A process that only checks the lock holds it for a moment.
                Err(TryLockError::WouldBlock) if tries < LOCK_TRIES => tries += 1,
                Err(TryLockError::WouldBlock) => bail!(
                    "{} is in use by another drover process{}; stop it, or set DROVER_HOME to another site directory",
                    self.dir.display(),
                    holder(&mut file)
                ),
                Err(TryLockError::Error(e)) => return Err(e).with_context(cannot),
            }
            std::thread::sleep(LOCK_PAUSE);
        }
        // The PID only informs users; the lock itself is what counts.
        file.set_len(0).with_context(cannot)?;
        write!(file, "{}", std::process::id()).with_context(cannot)?;
        Ok(HomeLock(file))
    }

    /// The process that holds the lock, such as ` (process 17)`; `None` when none does.
    ///
    /// # Errors
    /// When the lock file cannot be used at all.
    pub fn used_by(&self) -> Result<Option<String>> {
        let mut file = self.open_lock()?;
        match file.try_lock_shared() {
            Ok(()) => Ok(None),
            Err(TryLockError::WouldBlock) => Ok(Some(holder(&mut file))),
            Err(TryLockError::Error(e)) => {
                Err(e).with_context(|| format!("cannot lock {}", self.lock_path().display()))
            }
        }
    }

    fn lock_path(&self) -> PathBuf {
        self.dir.join("lock")
    }

    fn open_lock(&self) -> Result<File> {
        let path = self.lock_path();
        open_private(&path).with_context(|| format!("cannot open {}", path.display()))
    }
}

/// Reads the holder from the lock file.
fn holder(file: &mut File) -> String {
    let mut text = String::new();
    let read = file
        .rewind()
        .and_then(|()| file.take(20).read_to_string(&mut text));
    let known = read.is_ok() && !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    if known {
        format!(" (process {text})")
    } else {
        String::new()
    }
}

/// `$XDG_DATA_HOME` when it is absolute (the specification says to ignore it otherwise), else
/// `~/.local/share`.
fn data_dir(xdg: Option<PathBuf>, home: Option<PathBuf>) -> Option<PathBuf> {
    xdg.filter(|d| d.is_absolute()).or_else(|| {
        home.filter(|h| !h.as_os_str().is_empty())
            .map(|h| h.join(".local/share"))
    })
}

/// Creates a directory that only this user can access, and its parents.
pub(crate) fn make_dir(dir: &Path) -> Result<()> {
    if dir.is_dir() {
        return Ok(());
    }
    make_private_dir(dir).with_context(|| format!("cannot create {}", dir.display()))
}

/// Creates the directory for images, and its parents, for those who may read images of the permissions `image_mode`.
fn make_images_dir(dir: &Path, image_mode: u32) -> Result<()> {
    let missing: Vec<_> = dir.ancestors().take_while(|dir| !dir.exists()).collect();
    make_dir(dir)?;
    // Whoever may read a file must be able to list and enter its directory.
    let readers = image_mode & 0o044;
    let mode = 0o700 | readers | (readers >> 2);
    for new in missing.into_iter().filter(|_| mode != 0o700) {
        fs::set_permissions(new, Permissions::from_mode(mode))
            .with_context(|| format!("cannot set the mode of {}", new.display()))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_data_directory_follows_xdg() {
        let p = |s: &str| Some(PathBuf::from(s));
        assert_eq!(data_dir(p("/x"), p("/home/u")), p("/x"));
        assert_eq!(
            data_dir(p("relative"), p("/home/u")),
            p("/home/u/.local/share")
        );
        assert_eq!(data_dir(None, None), None);
        assert_eq!(data_dir(None, p("")), None);
    }

    #[test]
    fn a_home_is_private_and_has_one_owner() {
        let tmp = tempfile::tempdir().unwrap();
        let home = Home::create(tmp.path().join("a/b")).unwrap();
        let mode = fs::metadata(home.dir()).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o700);
        let lock = home.lock().unwrap();
        let e = home.lock().unwrap_err().to_string();
        assert!(
            e.contains(&format!("process {}", std::process::id())),
            "{e}"
        );
        assert!(e.contains("a/b"), "{e}");
        assert!(home.used_by().unwrap().is_some());
        drop(lock);
        assert_eq!(home.used_by().unwrap(), None);
        home.lock().unwrap();
    }

    #[test]
    fn the_images_directory_is_open_to_those_who_may_read_images() {
        let tmp = tempfile::tempdir().unwrap();
        for (image_mode, wanted) in [
            (0o600, 0o700),
            (0o640, 0o750),
            (0o660, 0o750),
            (0o644, 0o755),
        ] {
            let top = tmp.path().join(format!("{image_mode:o}"));
            make_images_dir(&top.join("images"), image_mode).unwrap();
            for dir in [&top, &top.join("images")] {
                let mode = fs::metadata(dir).unwrap().permissions().mode();
                assert_eq!(mode & 0o777, wanted);
            }
        }
    }

    #[test]
    fn a_home_that_is_not_there_is_an_error_with_a_way_out() {
        let tmp = tempfile::tempdir().unwrap();
        let e = Home::existing(tmp.path().join("nowhere"))
            .unwrap_err()
            .to_string();
        assert!(e.contains("nowhere") && e.contains("drover init"), "{e}");
        let existing = |dir: &Path| Home::existing(dir.into()).map_err(|e| e.to_string());
        assert!(existing(tmp.path()).unwrap_err().contains("has no site"));
        assert_eq!(fs::read_dir(tmp.path()).unwrap().count(), 0);
        let file = tmp.path().join("config.toml");
        fs::write(&file, "").unwrap();
        assert!(existing(&file).unwrap_err().contains("not a directory"));
        existing(tmp.path()).unwrap();
    }

    #[test]
    fn a_domain_is_a_home_with_the_identity_of_its_site() {
        let tmp = tempfile::tempdir().unwrap();
        let home = Home::create(tmp.path().into()).unwrap();
        assert!(home.domain("acme").is_err(), "there is none yet");
        for bad in ["..", "a/b", "", "Acme"] {
            assert!(home.domain_to_be(bad).is_err(), "{bad}");
        }
        let acme = home.domain_to_be("acme").unwrap();
        acme.make_domain().unwrap();
        fs::write(acme.dir().with_file_name("readme"), "").unwrap();
        assert_eq!(home.domains().unwrap(), ["acme"]);
        assert_eq!(home.domain("acme").unwrap().domain_name(), "acme");
        assert_eq!(home.domain_name(), "default");
        let keys = [&home, &acme].map(|home| home.identity().unwrap().key());
        assert_eq!(keys[0], keys[1]);
        assert!(!acme.dir().join("identity.key").exists());
        assert_ne!(acme.images_dir(), home.images_dir());
        assert_ne!(acme.socket(), home.socket());
        assert_eq!(acme.reserve_path(), home.reserve_path());
        assert_eq!(acme.of_site().unwrap().dir(), home.dir());
        let _lock = home.lock().unwrap();
        acme.lock().unwrap();
    }

    #[test]
    fn images_elsewhere_keep_their_work_beside_them() {
        let tmp = tempfile::tempdir().unwrap();
        fs::write(tmp.path().join("config.toml"), "images = \"/srv/vm\"\n").unwrap();
        let config = Config::load(&tmp.path().join("config.toml")).unwrap();
        let home = Home {
            dir: tmp.path().into(),
            site: None,
            audit: Audit::new(tmp.path()),
            node: Arc::default(),
            config,
        };
        assert_eq!(home.images_dir(), Path::new("/srv/vm"));
        assert_eq!(home.work_dir(), Path::new("/srv/vm/.drover-work"));
        let acme = home.domain_to_be("acme").unwrap();
        let images = Path::new("/srv/vm/.drover-domains/acme");
        assert_eq!(acme.images_dir(), images);
        assert_eq!(acme.work_dir(), images.join(".drover-work"));
    }
}
