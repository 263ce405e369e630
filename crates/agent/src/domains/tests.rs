use drover_core::BlockDevice;
use drover_device::backend::MemoryDevice;
use drover_device::backend::overlay::{Identity, Options, Overlay};
use drover_storage::HostDirectory;

use super::*;

/// A site with an image in the default domain, and another domain.
struct Sites {
    home: Home,
    other: Home,
    here: Here,
    sites: Vec<Own>,
    _dir: tempfile::TempDir,
}

impl Sites {
    /// Call within a runtime.
    async fn new() -> Sites {
        let dir = tempfile::tempdir().unwrap();
        let home = Home::create(dir.path().into()).unwrap();
        let other = make(&home, "acme").unwrap();
        let mut sites = Vec::new();
        for home in [&home, &other] {
            let catalog = Arc::new(site::open_catalog(home).unwrap());
            sites.push(Own::open(home, &catalog).await.unwrap());
        }
        let catalog = Arc::new(site::open_catalog(&home).unwrap());
        let here = Here::of(&home, &catalog, sites[0].site()).unwrap();
        let sites = Sites {
            home,
            other,
            here,
            sites,
            _dir: dir,
        };
        sites.deliver(1);
        sites
    }

    fn there(&self) -> &Arc<Site> {
        self.sites[1].site()
    }

    /// Puts an image of these bytes into the first domain, in the place of any before it.
    fn deliver(&self, byte: u8) {
        let site = &self.here.site;
        let file = site.work_dir().join("new/image.part");
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(&file, vec![byte; 1 << 20]).unwrap();
        let origin = Origin {
            from: "lyon",
            owner: Some(self.here.key),
        };
        let prepared = site.prepare(&file, &image(), origin, &mut |_, _| Ok(()));
        site.adopt(Some(&file), &prepared.unwrap(), false).unwrap();
    }

    /// Moves the image; `meanwhile` happens once, while it is read.
    async fn move_while(&self, mut meanwhile: impl FnMut() + Send) -> Result<()> {
        let mut first = true;
        let mut progress = |_, _| {
            if std::mem::take(&mut first) {
                meanwhile();
            }
        };
        let work = || move_between(&self.here, self.there(), &image(), &mut progress);
        tokio::task::block_in_place(work)
    }

    fn first_byte(&self, home: &Home) -> Option<u8> {
        let bytes = fs::read(home.images_dir().join("web.img")).ok()?;
        bytes.first().copied()
    }

    /// Nothing of a move that failed is left in the other domain.
    fn check_not_moved(&self) {
        assert!(self.there().by_name(&image()).is_none());
        assert_eq!(self.first_byte(&self.other), None);
        let links = fs::read_dir(self.there().links_dir()).unwrap();
        assert_eq!(links.count(), 0);
        let maps = fs::read_dir(self.other.index_dir().join("maps")).unwrap();
        assert_eq!(maps.count(), 0);
    }
}

fn image() -> ImageName {
    ImageName::new("web.img").unwrap()
}

fn refused(moved: Result<()>, why: &str) {
    let error = moved.unwrap_err();
    let text = crate::error::one_line(&error);
    assert!(text.contains(why), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_image_that_moves_becomes_the_sites_own_there() {
    let sites = Sites::new().await;
    let reserved = || {
        for site in [&sites.here.site, sites.there()] {
            let error = site.reserve_name(&image()).err().unwrap();
            assert!(error.to_string().contains("being sent or moved"), "{error}");
        }
    };
    sites.move_while(reserved).await.unwrap();
    assert_eq!(sites.first_byte(&sites.home), None);
    assert_eq!(sites.first_byte(&sites.other), Some(1));
    let record = sites.there().by_name(&image()).unwrap();
    assert_eq!((&*record.from, record.owner), ("", None));
    drop(sites.there().reserve_name(&image()).unwrap());
}

#[tokio::test(flavor = "multi_thread")]
async fn what_took_the_name_during_a_move_is_not_removed() {
    let sites = Sites::new().await;
    refused(sites.move_while(|| sites.deliver(2)).await, "replaced");
    assert_eq!(sites.first_byte(&sites.home), Some(2));
    assert!(sites.here.site.by_name(&image()).is_some());
    sites.check_not_moved();
    sites.move_while(|| ()).await.unwrap();
    assert_eq!(sites.first_byte(&sites.other), Some(2));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_mount_wrote_during_a_move_stays_with_its_image() {
    let sites = Sites::new().await;
    let record = sites.here.site.by_name(&image()).unwrap();
    let write = || {
        let directory = drover_store::changes::directory(&sites.here.state, &image());
        let directory = Arc::new(HostDirectory::open_or_create(&directory).unwrap());
        let base = Arc::new(MemoryDevice::new(1 << 20));
        let identity = Identity {
            base: record.digest,
            size: base.size(),
            name: "web.img".into(),
        };
        let overlay = Overlay::open(directory, base, identity, Options::default()).unwrap();
        overlay.write(0, &[7; 4096]).unwrap();
        overlay.flush().unwrap();
    };
    refused(sites.move_while(write).await, "changes by mounts");
    assert_eq!(sites.first_byte(&sites.home), Some(1));
    sites.check_not_moved();
    assert!(changes::of_image(&sites.home, &image()).is_some());
    refused(sites.move_while(|| ()).await, "changes by mounts");
}

#[test]
fn a_domain_with_files_that_it_does_not_know_stays() {
    let dir = tempfile::tempdir().unwrap();
    let mut home = Home::create(dir.path().into()).unwrap();
    for (n, images) in [None, Some("vm".into())].into_iter().enumerate() {
        home.config.images = images;
        let name = format!("d{n}");
        let domain = make(&home, &name).unwrap();
        fs::write(domain.work_dir().join("sequences.data"), "x").unwrap();
        let notes = domain.images_dir().join("notes.img");
        fs::write(&notes, "the administrator's own").unwrap();
        refused(unmake(&home, &name), "notes.img is not an image");
        assert_eq!(fs::read(&notes).unwrap(), b"the administrator's own");
        assert!(domain.work_dir().join("sequences.data").exists());
        fs::remove_file(&notes).unwrap();
        unmake(&home, &name).unwrap();
        assert!(!domain.dir().exists() && !domain.images_dir().exists());
    }
}
