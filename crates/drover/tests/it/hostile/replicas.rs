//! Sources of replicas that say anything, at any time.

use drover_core::Digest;
use drover_migrate::replica::protocol::Begun;
use serde_json::Value;

use super::ownership::{pair, peer_of, stopped};
use super::*;
use crate::full::Small;

/// A source with the identity of a home.
struct Source<'a> {
    world: &'a World,
    home: &'a str,
    peer: Client,
    seed: Seed,
}

impl<'a> Source<'a> {
    fn new(world: &'a World, home: &'a str, seed: u8) -> Self {
        let peer = peer_of(world, home);
        let seed = Seed([seed; 16]);
        Source {
            world,
            home,
            peer,
            seed,
        }
    }

    fn begin(&self, name: &str, disks: usize) -> Result<Begun, Refusal> {
        let ask = BeginRound {
            name: ImageName::new(name).unwrap(),
            seed: self.seed,
            is_machine: true,
            disks: vec![String::new(); disks],
            every_seconds: None,
        };
        run(self.peer.ask(&ask)).map_err(refusal)
    }

    /// Delivers this image of a round.
    fn deliver(&self, image: &ImageName, seed: u64) -> Digest {
        let path = self
            .world
            .image(&format!("{}-{image}", self.home), seed, 20);
        let send = [
            "send",
            path.to_str().unwrap(),
            "far",
            "--as",
            image.as_str(),
        ];
        self.world.run(self.home, &send).ok();
        known(self.world, image.as_str()).expect("it was delivered")
    }

    fn complete(&self, name: &str, begun: &Begun, digests: Vec<Digest>) -> Result<(), Refusal> {
        let ask = CompleteRound {
            name: ImageName::new(name).unwrap(),
            round: begun.round,
            age_ms: u64::MAX,
            digests,
        };
        run(self.peer.ask(&ask)).map_err(refusal)
    }

    /// A whole round of one disk.
    fn round(&self, name: &str, seed: u64) -> Begun {
        let begun = self.begin(name, 1).unwrap();
        let digest = self.deliver(&begun.images[0], seed);
        self.complete(name, &begun, vec![digest]).unwrap();
        begun
    }
}

fn refusal(error: NetError) -> Refusal {
    match error {
        NetError::Refused(refusal) => refusal,
        other => panic!("{other}"),
    }
}

/// The digest of an image of the far site.
fn known(world: &World, image: &str) -> Option<Digest> {
    let images = world.run("far", &["images", "--json"]).ok().json();
    let image = images.iter().find(|known| known["name"] == image)?;
    Some(image["digest"].as_str().unwrap().parse().unwrap())
}

fn unfinished(world: &World) -> usize {
    world.run("far", &["transfers", "--json"]).ok().json().len()
}

fn over(world: &World, options: &[&str]) -> Value {
    let args = [&["failover", "web", "--json"], options].concat();
    world.run("far", &args).ok().json()[0].clone()
}

#[test]
fn what_rounds_have_left_is_removed_and_nothing_else_is() {
    let world = World::new();
    let _site = world.serve("far", &[]);
    pair(&world, "near", &[]);
    pair(&world, "other", &[]);
    let source = Source::new(&world, "near", 1);
    // A round of three disks, of which one has arrived and one in part.
    let half = source.begin("web", 3).unwrap();
    source.deliver(&half.images[1], 1);
    stopped(&world, "near", half.images[2].as_str());
    // Another one, of a machine that has one disk by now, releases what was promised to them.
    let begun = source.begin("web", 1).unwrap();
    assert_eq!(begun.images[..], half.images[..1]);
    assert_eq!(known(&world, half.images[1].as_str()), None);
    assert_eq!(unfinished(&world), 0);
    let digest = source.deliver(&begun.images[0], 2);
    let wrong = source.complete("web", &begun, vec![Digest::default()]);
    assert_eq!(wrong.unwrap_err().code, Code::Failed);
    let wrong = source.complete("web", &half, vec![digest; 3]);
    assert_eq!(wrong.unwrap_err().code, Code::OutOfOrder);
    source.complete("web", &begun, vec![digest]).unwrap();
    // Its reply was lost.
    source.complete("web", &begun, vec![digest]).unwrap();
    // Another peer, and another machine of the same peer.
    let refusal = Source::new(&world, "other", 1).begin("web", 1).unwrap_err();
    assert!(refusal.message.contains("of another peer"), "{refusal}");
    let refusal = Source::new(&world, "near", 2).begin("web", 1).unwrap_err();
    assert!(refusal.message.contains("of another machine"), "{refusal}");
    // An image that the peer has sent itself is nobody's round.
    let own = ImageName::new("db-0.b.raw").unwrap();
    let digest = source.deliver(&own, 3);
    let refusal = source.begin("db", 1).unwrap_err();
    assert!(
        refusal.message.contains("another image called db-0.b.raw"),
        "{refusal}"
    );
    assert_eq!(known(&world, own.as_str()), Some(digest));
    // What was forgotten is an image like any other, also for the source that goes on.
    world.run("far", &["replicate", "--forget", "web"]).ok();
    let kept = known(&world, begun.images[0].as_str());
    assert!(kept.is_some());
    let refusal = source.begin("web", 1).unwrap_err();
    assert!(
        refusal.message.contains("another image called web-0.a.raw"),
        "{refusal}"
    );
    assert_eq!(known(&world, begun.images[0].as_str()), kept);
}

#[test]
fn a_failover_is_confirmed_fences_its_source_and_needs_no_free_byte() {
    let test = "a_failover_is_confirmed_fences_its_source_and_needs_no_free_byte";
    let Some(small) = Small::new(test) else {
        return;
    };
    let world = &small.world;
    fs::write(small.home.join("config.toml"), "reserve = \"4KiB\"\n").unwrap();
    let _site = world.serve("far", &[]);
    pair(world, "near", &[]);
    let source = Source::new(world, "near", 1);
    let first = source.round("web", 1);
    let point = known(world, first.images[0].as_str());
    let late = source.begin("web", 2).unwrap();
    stopped(world, "near", late.images[0].as_str());
    // However long it was not heard of: it may make a round once a day, or not be reached.
    let would = over(world, &["--dry-run"]);
    assert_eq!(
        (&would["under_way"], &would["failed_over_ms"]),
        (&true.into(), &Value::Null)
    );
    let would = world.run("far", &["failover", "web", "--dry-run"]).ok().err;
    let said = would.contains("near began a round") && would.contains("may still run web");
    assert!(said, "{would}");
    world.run("far", &["failover", "web"]).fails(2, &["--yes"]);
    small.fill();
    let done = over(world, &["--yes"]);
    assert_eq!(done["images"][0], first.images[0].as_str());
    fs::remove_file(small.home.join("junk")).unwrap();
    assert_eq!(unfinished(world), 0);
    // Again, it has happened: nobody is asked.
    assert_eq!(over(world, &[])["failed_over_ms"], done["failed_over_ms"]);
    // The round goes on to its end, which is not heard of: what it brings is not left there.
    let digests: Vec<_> = late
        .images
        .iter()
        .map(|image| source.deliver(image, 5))
        .collect();
    let refusal = source.complete("web", &late, digests).unwrap_err();
    assert_eq!(refusal.code, Code::Lost, "{refusal}");
    assert!(
        late.images
            .iter()
            .all(|image| known(world, image.as_str()).is_none())
    );
    assert_eq!(source.begin("web", 1).unwrap_err().code, Code::Lost);
    assert_eq!(known(world, first.images[0].as_str()), point);
}

#[test]
fn a_failover_that_was_killed_half_way_has_not_happened() {
    let world = World::new();
    let serve = ["serve", "--listen", "127.0.0.1:0"];
    let mut site = world.process_with("far", &serve, &[("DROVER_TEST_CRASH", "replica-given")]);
    pair(&world, "near", &[]);
    let source = Source::new(&world, "near", 1);
    let first = source.round("web", 1);
    let killed = world.run("far", &["failover", "web", "--yes"]);
    assert_ne!(killed.code, Some(0));
    site.wait();
    let _site = world.serve("far", &[]);
    let listed = world.run("far", &["replicate", "--list", "--json"]).ok();
    assert_eq!(listed.json()[0]["state"], "kept");
    // Its source goes on, and what the failover had made this site's own is removed like any older state.
    // At its new address.
    pair(&world, "near", &[]);
    let source = Source::new(&world, "near", 1);
    let second = source.round("web", 2);
    assert_ne!(first.images, second.images);
    assert_eq!(known(&world, first.images[0].as_str()), None);
    let done = over(&world, &["--yes"]);
    assert_eq!(done["images"][0], second.images[0].as_str());
}
