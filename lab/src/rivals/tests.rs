//! Every rival that is installed carries small images, and what goes wrong is told as what it is.

use std::fs::File;
use std::os::unix::fs::FileExt;

use super::*;
use crate::same::identical;

/// Two related images with holes, a few MB each.
struct Images {
    dir: tempfile::TempDir,
}

impl Images {
    const SIZE: u64 = 24 << 20;

    fn new() -> Self {
        let images = Self {
            dir: tempfile::tempdir().unwrap(),
        };
        let mut rng = fastrand::Rng::with_seed(1);
        let content: Vec<u8> = (0..3 << 20).map(|_| rng.u8(..)).collect();
        // Half of it is as text is: it can be compressed.
        let text: Vec<u8> = content.iter().map(|byte| b'a' + byte % 4).collect();
        for (name, shift, fresh) in [("one.raw", 0, 1), ("two.raw", 5 << 20, 2)] {
            let file = File::create(images.path(name)).unwrap();
            file.set_len(Self::SIZE).unwrap();
            file.write_all_at(&content, (1 << 20) + shift).unwrap();
            file.write_all_at(&text, (14 << 20) + 4096).unwrap();
            file.write_all_at(&[fresh; 5000], 12_345).unwrap();
            file.write_all_at(&[fresh; 10], Self::SIZE - 10).unwrap();
        }
        images
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }
}

#[test]
fn every_rival_that_is_here_delivers_the_same_bytes() {
    let images = Images::new();
    let (one, two) = (images.path("one.raw"), images.path("two.raw"));
    for rival in ALL {
        if let Err(missing) = rival.version() {
            eprintln!(
                "SKIP every_rival_that_is_here_delivers_the_same_bytes: {}: {missing}",
                rival.name()
            );
            continue;
        }
        let dir = images.path(rival.name());
        let carrier = &mut *rival.start(Where::Loopback, &dir).unwrap();
        let mut basis = None;
        // The second finds the first at the far end; the third is there already and comes again.
        for image in [&one, &two, &two] {
            let seconds = carrier
                .carry(image, basis.as_deref())
                .unwrap_or_else(|error| panic!("{}: {error:#}", rival.name()));
            let delivered = carrier.delivered(image);
            assert!(seconds > 0.0);
            assert!(identical(image, &delivered).unwrap(), "{}", rival.name());
            assert!(delivered.starts_with(dir.canonicalize().unwrap()));
            basis = Some(carrier.delivered(&one));
        }
        assert!(identical(&one, &carrier.delivered(&one)).unwrap());
    }
}

#[test]
fn rivals_have_names_of_their_own_and_are_found_by_them() {
    for (at, rival) in ALL.iter().enumerate() {
        let first = ALL.iter().position(|other| other.name() == rival.name());
        assert_eq!(first, Some(at), "{}", rival.name());
        assert_eq!(by_name(rival.name()).unwrap().settings(), rival.settings());
        let fit = |c: char| c.is_ascii_lowercase() || c == '-';
        assert!(rival.name().chars().all(fit), "{}", rival.name());
    }
    assert!(by_name("scp").is_none());
}
