//! A vault at a peer: over connections that are cut at any frame, and against peers that do not behave.

mod hostile;

use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use proptest::prelude::*;

use super::*;
use crate::peer::{
    Answer, Ask, Connect, Frame, Guard, Link, LinkError, Own, PeerObjects, PeerPatience, Serving,
    kind,
};
use crate::{Secret, SnapshotId, SnapshotRecord};

/// What a link does with one frame.
type Cuts = Arc<dyn Fn(u64) -> bool + Send + Sync>;

/// A site with a vault, as its peers reach it.
#[derive(Clone)]
struct There {
    objects: MemoryObjects,
    peer: &'static str,
    is_admin: bool,
    own: Arc<Own>,
    cuts: Cuts,
    frames: Arc<AtomicU64>,
    sent: Arc<AtomicU64>,
}

impl There {
    fn new(objects: &MemoryObjects, peer: &'static str) -> Self {
        There {
            objects: objects.clone(),
            peer,
            is_admin: false,
            own: Arc::default(),
            cuts: Arc::new(|_| false),
            frames: Arc::default(),
            sent: Arc::default(),
        }
    }

    fn guard(&self) -> Guard {
        let objects = Arc::new(self.objects.clone());
        let guard = Guard::new(objects, self.peer.into(), self.is_admin, self.own.clone());
        guard.unwrap().at(|| 1000)
    }

    fn objects(&self) -> Arc<dyn Objects> {
        let patience = PeerPatience {
            pause: Duration::ZERO,
            max_pause: Duration::ZERO,
            ..PeerPatience::default()
        };
        Arc::new(PeerObjects::new(Box::new(self.clone()), patience))
    }

    fn vault(&self) -> Vault {
        Vault::open_on(self.objects()).unwrap()
    }

    fn is_cut(&self) -> bool {
        (self.cuts)(self.frames.fetch_add(1, Ordering::Relaxed))
    }
}

struct Wire {
    there: There,
    guard: Guard,
    serving: Serving,
    answers: std::collections::VecDeque<Frame>,
}

fn lost() -> LinkError {
    LinkError {
        why: "the connection is lost".into(),
        can_retry: true,
    }
}

impl Connect for There {
    fn connect(&self) -> Result<Box<dyn Link>, LinkError> {
        if self.is_cut() {
            return Err(lost());
        }
        Ok(Box::new(Wire {
            there: self.clone(),
            guard: self.guard(),
            serving: Serving::default(),
            answers: Default::default(),
        }))
    }
    fn describe(&self) -> String {
        "there".into()
    }
}

impl Link for Wire {
    fn send(&mut self, frames: Vec<Frame>) -> Result<(), LinkError> {
        for (kind, payload) in frames {
            if self.there.is_cut() {
                return Err(lost());
            }
            self.there
                .sent
                .fetch_add(payload.len() as u64, Ordering::Relaxed);
            if let Some(task) = self.serving.frame(kind, &payload).unwrap() {
                self.answers.extend(task.run(&self.guard));
            }
        }
        Ok(())
    }
    fn next(&mut self) -> Result<Frame, LinkError> {
        // What was asked for may be done all the same.
        match self.there.is_cut() {
            true => Err(lost()),
            false => Ok(self.answers.pop_front().unwrap()),
        }
    }
}

#[test]
fn a_snapshot_goes_to_a_peer_and_only_what_it_lacks_crosses_the_link() {
    for is_encrypted in [false, true] {
        let setting = Setting::new();
        let objects = MemoryObjects::default();
        let secret = Secret::new(b"correct horse").unwrap();
        let here: Arc<dyn Objects> = Arc::new(objects.clone());
        let local = match is_encrypted {
            true => Vault::create_encrypted_on(here, &secret, "").unwrap(),
            false => Vault::create_on(here).unwrap(),
        };
        let there = There::new(&objects, "a");
        let vault = Vault::open_with(there.objects(), &mut || Ok(secret.clone())).unwrap();
        let wanted = disk(&(1..9000).collect::<Vec<_>>());
        let backup = |vault: &Vault, name: &str, content: &[u8], time| {
            let path = setting.image("image", content);
            vault
                .backup_at(&path, &machine(name), "host", time, &mut |_| {})
                .unwrap()
        };
        let one = backup(&vault, "web", &wanted, 100);
        let sent = |there: &There| there.sent.swap(0, Ordering::Relaxed);
        assert!(sent(&there) > 9000 * 2048);
        let two = backup(&vault, "web", &wanted, 200);
        assert_eq!(
            (two.record.new_bytes, two.record.root),
            (0, one.record.root)
        );
        // Another site's machine: the same files.
        let other = There::new(&objects, "b");
        let theirs = Vault::open_with(other.objects(), &mut || Ok(secret.clone())).unwrap();
        let three = backup(&theirs, "db", &wanted, 300);
        // The site of an encrypted vault cannot vouch for what another one has written.
        assert_eq!(three.record.new_bytes == 0, !is_encrypted);
        assert!(sent(&there) < 40_000 && (is_encrypted || sent(&other) < 40_000));
        // Nothing but the snapshots is left, and the vault is one as any other.
        assert!(!objects.keys().iter().any(|key| {
            ["claims/", "probe/", "held/"]
                .iter()
                .any(|kind| key.starts_with(kind))
        }));
        let report = local.check(Checking::Full, &mut |_, _| {}).unwrap();
        assert_eq!((report.snapshots, report.problems), (3, vec![]));
        assert!(content(&vault, &two.id).unwrap() == wanted);
        let hold = vault.hold(&two.id, SessionId(7), "a mount").unwrap();
        assert!(matches!(
            local.forget(std::slice::from_ref(&two.id)),
            Err(VaultError::Held { .. })
        ));
        drop(hold);
        // Each sees its own machines, and may not delete even those.
        let names = |vault: &Vault| {
            vault
                .machines()
                .unwrap()
                .iter()
                .map(ToString::to_string)
                .collect::<Vec<_>>()
        };
        assert_eq!(names(&vault), ["web"]);
        assert_eq!(names(&theirs), ["db"]);
        assert!(content(&theirs, &two.id).is_err());
        assert!(vault.forget(std::slice::from_ref(&two.id)).is_err());
        let path = setting.image("image", &wanted);
        let taken = theirs.backup_at(&path, &machine("web"), "host", 400, &mut |_| {});
        assert!(taken.unwrap_err().to_string().contains("of another site"));
        // Who may change what others own, may read it.
        let mut admin = There::new(&objects, "c");
        admin.is_admin = true;
        let all = Vault::open_with(admin.objects(), &mut || Ok(secret.clone())).unwrap();
        assert_eq!(names(&all), ["db", "web"]);
        assert!(content(&all, &one.id).unwrap() == wanted);
        // What was there before is no peer's.
        backup(&local, "own", &disk(&[1]), 500);
        let taken = vault.backup_at(&path, &machine("own"), "host", 600, &mut |_| {});
        assert!(taken.unwrap_err().to_string().contains("of another site"));
    }
}

/// A vault in which machines share nothing, with the same disk of two machines: `web` of one peer, and `db` of the other.
fn that_share_nothing() -> (MemoryObjects, [There; 2]) {
    let setting = Setting::new();
    let objects = MemoryObjects::default();
    let none = crate::Share::Nothing;
    Vault::create_shared_on(Arc::new(objects.clone()), none, None).unwrap();
    let path = setting.image("image", &disk(&(1..400).collect::<Vec<_>>()));
    let peers = [There::new(&objects, "a"), There::new(&objects, "b")];
    for (there, name) in peers.iter().zip(["web", "db"]) {
        let vault = there.vault();
        let made = vault.backup_at(&path, &machine(name), "host", 100, &mut |_| {});
        assert!(made.unwrap().record.new_bytes > 0);
    }
    (objects, peers)
}

/// What is of others in a vault in which machines share nothing cannot be read either.
#[test]
fn nothing_of_others_is_read_where_nothing_is_shared() {
    let (objects, [one, two]) = that_share_nothing();
    let web = |key: &String| key.contains("/web/");
    assert_eq!(objects.keys().iter().filter(|key| web(key)).count(), 5);
    for key in objects.keys().iter().filter(|key| web(key)) {
        assert!(one.objects().get(key).unwrap().is_some(), "{key}");
        assert_eq!(two.objects().get(key).unwrap(), None, "{key}");
    }
    let listed = two.objects().list("containers").unwrap();
    assert!(listed.iter().all(|o| o.key.starts_with("containers/db/")));
}

/// Connections are cut at frames of every kind; snapshots of two sites, deletions and collections go on meanwhile.
#[test]
fn whatever_is_cut_what_was_said_to_be_there_is() {
    let (mut cut, mut made) = (0u64, 0);
    for seed in 0..60 {
        let mut rng = fastrand::Rng::with_seed(seed);
        let setting = Setting::new();
        let objects = setting.objects.clone();
        let local = setting.vault();
        let cuts = Arc::new(AtomicU64::new(0));
        // Snapshots that are deleted at some frame, with a collection.
        let due: Arc<Mutex<Vec<SnapshotId>>> = Arc::default();
        let one_in: u32 = [5, 20, 100][seed as usize % 3];
        let mut site = |peer| {
            let rng = Mutex::new(rng.fork());
            let (local, due, cuts) = (local.clone(), due.clone(), cuts.clone());
            There {
                cuts: Arc::new(move |_| {
                    let mut rng = rng.lock();
                    if rng.u32(..20) == 0
                        && let Some(id) = due.lock().pop()
                    {
                        local.forget(&[id]).unwrap();
                        local.collect(Duration::ZERO, &mut |_| {}).unwrap();
                    }
                    let is_cut = rng.u32(..one_in) == 0;
                    cuts.fetch_add(u64::from(is_cut), Ordering::Relaxed);
                    is_cut
                }),
                ..There::new(&objects, peer)
            }
        };
        let mut sites = [site("a"), site("b")];
        let mut wanted: Vec<(SnapshotId, Vec<u8>)> = Vec::new();
        for step in 0..8 {
            let site = &mut sites[rng.usize(..2)];
            match rng.u8(..6) {
                0 | 1 if !wanted.is_empty() => {
                    let (gone, _) = wanted.swap_remove(rng.usize(..wanted.len()));
                    due.lock().push(gone);
                }
                2 => {
                    // The site starts again: it has forgotten what its peers said. Two days later that is void.
                    site.own = Arc::default();
                    objects.advance(DAY * 2);
                    local.collect(Duration::ZERO, &mut |_| {}).unwrap();
                }
                _ => {
                    let from = rng.u32(1..300);
                    let content = disk(&(from..from + rng.u32(1..500)).collect::<Vec<_>>());
                    let path = setting.image("image", &content);
                    let name = machine(&format!("of-{}", site.peer));
                    let backup = Vault::open_on(site.objects()).and_then(|vault| {
                        vault.backup_at(&path, &name, "host", 100 + step, &mut |_| {})
                    });
                    let backup = backup.unwrap_or_else(|e| panic!("seed {seed}: {e}"));
                    made += 1;
                    wanted.push((backup.id, content));
                }
            }
        }
        for (id, bytes) in &wanted {
            assert!(content(&local, id).unwrap() == *bytes, "seed {seed}: {id}");
        }
        let left = due.lock().len();
        let report = local.check(Checking::Full, &mut |_, _| {}).unwrap();
        assert_eq!(
            (report.snapshots as usize, report.problems),
            (wanted.len() + left, vec![]),
            "seed {seed}"
        );
        cut += cuts.load(Ordering::Relaxed);
    }
    println!("{made} snapshots, {cut} connections cut");
    assert!(made > 100 && cut > 300, "{made} {cut}");
}

/// A peer that is taken over by somebody who wants to destroy what is there.
#[test]
fn what_would_destroy_is_refused() {
    let setting = Setting::new();
    let objects = &setting.objects;
    let there = There::new(objects, "a");
    let path = setting.image("image", &disk(&(1..600).collect::<Vec<_>>()));
    let vault = there.vault();
    let made = vault
        .backup_at(&path, &machine("web"), "host", 100, &mut |_| {})
        .unwrap();
    let guard = there.guard();
    let before = objects.keys();
    let container = before
        .iter()
        .find(|key| key.starts_with("containers/"))
        .unwrap();
    let bytes = guard.get(container).unwrap().unwrap();
    let get = |key: &str| guard.get(key).unwrap().unwrap();
    let aborted = SnapshotRecord::Aborted.encode();
    let put = |key: &str, bytes: &[u8]| guard.create(key, Bytes::copy_from_slice(bytes));
    let id = |time, session| SnapshotId {
        machine: machine("web"),
        time,
        session: SessionId(session),
    };
    let other = |n: u64| format!("containers/web/{:016x}.0", n);
    let mut wrong = bytes.to_vec();
    *wrong.last_mut().unwrap() ^= 1;
    let next = container.strip_suffix('0').unwrap().to_owned() + "1";
    for (key, bytes) in [
        // Deletion, marks, other generations, keys, the vault itself.
        (made.id.tombstone(), b"forgotten".to_vec()),
        ("marks/0000000000000001/0000000001".into(), b"mark".to_vec()),
        (next, bytes.to_vec()),
        ("keys/0000000001".into(), b"key".to_vec()),
        ("vault".into(), b"vault".to_vec()),
        ("owners/db".into(), b"a".to_vec()),
        ("copied".into(), b"copied".to_vec()),
        ("dropped/web/x".into(), b"dropped".to_vec()),
        // What is not what it says.
        (other(5), bytes.to_vec()),
        (other(5), b"container".to_vec()),
        (container.clone(), wrong),
        (id(100, 9).record(), aborted),
        (id(100, 9).record(), b"record".to_vec()),
        (id(100, 9).uses(), b"uses".to_vec()),
        (id(100, 9).recipe(), b"recipe".to_vec()),
        ("hooks/0000000009".into(), b"hooks".to_vec()),
        // Dated so that others seem old.
        (id(9000, 9).record(), get(&made.id.record()).to_vec()),
        // Too long, and no names at all.
        ("claims/0000000009/0".into(), vec![0; 300]),
        ("claims/x/0".into(), b"claim".to_vec()),
        ("snapshots/web".into(), b"x".to_vec()),
        ("elsewhere/x".into(), b"x".to_vec()),
    ] {
        let refused = put(&key, &bytes);
        assert!(
            refused.as_ref().is_err_and(|e| !e.can_retry),
            "{key}: {refused:?}"
        );
    }
    for key in &before {
        assert!(guard.remove(key).is_err(), "{key}");
    }
    // Not even what its own session said, if another has said it.
    assert!(
        guard
            .create("claims/0000000005/0", Bytes::from_static(b"claim"))
            .unwrap()
    );
    let second = There::new(objects, "b").guard();
    assert!(second.remove("claims/0000000005/0").is_err());
    assert!(
        !second
            .create("claims/0000000005/0", Bytes::from_static(b"claim"))
            .unwrap()
    );
    assert!(second.remove("claims/0000000005/0").is_err());
    guard.remove("claims/0000000005/0").unwrap();
    let mut after = objects.keys();
    after.retain(|key| !key.starts_with("owners/"));
    let mut expected = before.clone();
    expected.retain(|key| !key.starts_with("owners/"));
    assert_eq!(after, expected);
    assert_eq!(guard.list("owners").unwrap().len(), 0);
    for key in ["owners/web", "elsewhere", "vaults"] {
        assert!(guard.get(key).is_err() && guard.list(key).is_err(), "{key}");
    }
    assert!(content(&setting.vault(), &made.id).is_ok());
}

/// A peer that answers something else than was asked for.
#[test]
fn odd_answers_are_errors() {
    struct Says(Vec<Frame>);
    impl Connect for Says {
        fn connect(&self) -> Result<Box<dyn Link>, LinkError> {
            Ok(Box::new(Says(self.0.clone())))
        }
        fn describe(&self) -> String {
            "odd".into()
        }
    }
    impl Link for Says {
        fn send(&mut self, _: Vec<Frame>) -> Result<(), LinkError> {
            Ok(())
        }
        fn next(&mut self) -> Result<Frame, LinkError> {
            match self.0.is_empty() {
                true => Err(LinkError {
                    why: "it is silent".into(),
                    can_retry: false,
                }),
                false => Ok(self.0.remove(0)),
            }
        }
    }
    let answer = |answer: &Answer| -> Frame {
        (kind::ANSWER, postcard::to_allocvec(answer).unwrap().into())
    };
    let some = |key: &str| Answer::Some(vec![(key.to_owned(), 1, 1)]);
    for frames in [
        vec![],
        vec![answer(&Answer::Listed)],
        vec![answer(&some("uses/web/x"))],
        vec![(kind::FOUND, Bytes::from_static(b"more than ten bytes"))],
        vec![(kind::ASK, Bytes::new())],
        vec![(kind::ANSWER, Bytes::from_static(&[9, 9]))],
        vec![answer(&Answer::Created(true))],
    ] {
        let objects = PeerObjects::new(Box::new(Says(frames.clone())), PeerPatience::default());
        assert!(objects.get_range("vault", 0..10).is_err(), "{frames:?}");
    }
    for key in ["snapshots/web/x", "elsewhere/x", "uses/../x", "uses/"] {
        let frames = vec![answer(&some(key)), answer(&Answer::Listed)];
        let objects = PeerObjects::new(Box::new(Says(frames)), PeerPatience::default());
        assert!(objects.list("uses").is_err(), "{key}");
    }
    // A control character in a reason does not reach a terminal.
    let failed = Answer::Failed {
        why: "no\u{1b}[2J".into(),
        can_retry: false,
        is_damage: false,
    };
    let objects = PeerObjects::new(
        Box::new(Says(vec![answer(&failed)])),
        PeerPatience::default(),
    );
    assert!(
        !objects
            .remove("x")
            .unwrap_err()
            .to_string()
            .contains('\u{1b}')
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Whatever frames come, nothing but complete tasks with good keys comes out, and no more is kept than was said.
    #[test]
    fn hostile_frames(frames in proptest::collection::vec(frame(), 0..12)) {
        let mut serving = Serving::default();
        let objects = MemoryObjects::default();
        Vault::create_on(Arc::new(objects.clone())).unwrap();
        let guard = There::new(&objects, "a").guard();
        let before = objects.keys();
        for (kind, payload) in frames {
            match serving.frame(kind, &payload) {
                Err(_) => break,
                Ok(None) => prop_assert!(serving.missing() > 0),
                Ok(Some(task)) => {
                    for (_, answer) in task.run(&guard) {
                        prop_assert!(answer.len() <= 3 << 20);
                    }
                }
            }
        }
        let after = objects.keys();
        prop_assert!(before.iter().all(|key| after.contains(key)));
    }
}

fn frame() -> impl Strategy<Value = (u8, Vec<u8>)> {
    let key = prop_oneof![
        Just("vault".to_owned()),
        Just("claims/0000000001/0".to_owned()),
        Just("snapshots/web".to_owned()),
        Just("containers".to_owned()),
        "[a-z/.]{0,30}",
    ];
    let ask = (key, 0u8..4, any::<u32>()).prop_map(|(key, which, n)| {
        let ask = match which {
            0 => Ask::Create { key, len: n % 40 },
            1 => Ask::Read {
                key,
                from: u64::from(n),
                len: n,
            },
            2 => Ask::List { prefix: key },
            _ => Ask::Remove { key },
        };
        (kind::ASK, postcard::to_allocvec(&ask).unwrap())
    });
    let data = proptest::collection::vec(any::<u8>(), 0..40).prop_map(|bytes| (kind::DATA, bytes));
    let any = (any::<u8>(), proptest::collection::vec(any::<u8>(), 0..40));
    prop_oneof![4 => ask, 3 => data, 1 => any]
}
