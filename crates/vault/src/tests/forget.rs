//! What forgetting frees, against a plain model: sets of blocks.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;
use crate::names::container_key;
use crate::{ContainerId, Forgotten, Share, SnapshotId, Uses};

/// The machine that a container belongs to, the container, and a block of it.
type Block = (usize, u64, u16);

/// A snapshot: of which machine, its runs of blocks, and whether it is forgotten already.
#[derive(Debug, Clone)]
struct Made {
    machine: usize,
    runs: Vec<(usize, u64, u16, u16)>,
    is_forgotten: bool,
}

impl Made {
    fn blocks(&self) -> impl Iterator<Item = Block> + '_ {
        let run = |&(machine, id, first, count): &(usize, u64, u16, u16)| {
            (first..first + count).map(move |local| (machine, id, local))
        };
        self.runs.iter().flat_map(run)
    }

    fn id(&self, number: usize) -> SnapshotId {
        SnapshotId {
            machine: machine(&format!("m{}", self.machine)),
            time: 1000 + number as i64,
            session: SessionId(number as u64 + 1),
        }
    }
}

/// Few containers with few different blocks, so that much is shared; containers of several machines have one number.
fn made() -> impl Strategy<Value = Made> {
    let run = (0usize..3, 0u64..4, 0u16..40, 1u16..30);
    (0usize..3, proptest::collection::vec(run, 0..6), 0u8..5).prop_map(
        |(machine, mut runs, forgotten)| {
            // Uses name a container once: with the machine that comes first.
            let mut owners = BTreeMap::new();
            for run in &mut runs {
                run.0 = *owners.entry(run.1).or_insert(run.0);
            }
            Made {
                machine,
                runs,
                is_forgotten: forgotten == 0,
            }
        },
    )
}

fn container(number: u64) -> ContainerId {
    ContainerId(number << 24)
}

/// What a person would count.
fn model(all: &[Made], chosen: &BTreeSet<usize>) -> Forgotten {
    let others = all.iter().enumerate();
    let others = others.filter(|(n, made)| !chosen.contains(n) && !made.is_forgotten);
    let kept: BTreeSet<Block> = others.flat_map(|(_, made)| made.blocks()).collect();
    let gone: BTreeSet<Block> = chosen.iter().flat_map(|&n| all[n].blocks()).collect();
    let of = |blocks: &BTreeSet<Block>| -> BTreeSet<(usize, u64)> {
        blocks
            .iter()
            .map(|(machine, id, _)| (*machine, *id))
            .collect()
    };
    let dead: Vec<_> = of(&gone).difference(&of(&kept)).copied().collect();
    Forgotten {
        snapshots: chosen.len() as u64,
        garbage_bytes: gone.difference(&kept).count() as u64 * 4096,
        dead_containers: dead.len() as u64,
        dead_bytes: dead
            .iter()
            .map(|(machine, id)| 100 + *machine as u64 + id)
            .sum(),
    }
}

fn stored(share: Share, all: &[Made]) -> Vault {
    let objects = MemoryObjects::default();
    let vault = Vault::create_shared_on(Arc::new(objects.clone()), share, None).unwrap();
    let put = |key: String, bytes: Vec<u8>| assert!(objects.create(&key, bytes.into()).unwrap());
    for owner in 0..3usize {
        for id in 0..4u64 {
            let key = container_key(&machine(&format!("m{owner}")), container(id), 0);
            put(key, vec![0; 100 + owner + id as usize]);
        }
    }
    for (number, made) in all.iter().enumerate() {
        let id = made.id(number);
        let mut uses = Uses::default();
        for &(owner, container_of, first, count) in &made.runs {
            let owner = machine(&format!("m{owner}"));
            uses.insert_run(&owner, container(container_of), first, count.into());
        }
        put(id.uses(), uses.encode());
        put(id.record(), b"not read".to_vec());
        if made.is_forgotten {
            put(id.tombstone(), b"forgotten".to_vec());
        }
    }
    vault
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// With few snapshots, which are read one after the other, and with many, which are read by several threads.
    #[test]
    fn what_becomes_free_is_what_nobody_else_uses(
        few in proptest::collection::vec(made(), 1..12),
        many in proptest::collection::vec(made(), 32..60),
        choose in proptest::collection::vec(any::<prop::sample::Index>(), 1..50),
        chosen_few in 1usize..4,
    ) {
        for all in [few, many] {
            let vault = stored(Share::All, &all);
            for count in [chosen_few, choose.len()] {
                let chosen: BTreeSet<usize> = choose.iter().take(count).map(|n| n.index(all.len())).collect();
                let ids: Vec<SnapshotId> = chosen.iter().map(|&n| all[n].id(n)).collect();
                prop_assert_eq!(vault.would_free(&ids).unwrap(), model(&all, &chosen));
            }
        }
    }

    /// Where no machine uses what another one has, only its own snapshots are asked.
    #[test]
    fn the_same_where_nothing_is_shared(
        mut all in proptest::collection::vec(made(), 1..50),
        chosen in any::<prop::sample::Index>(),
    ) {
        for made in &mut all {
            made.runs.iter_mut().for_each(|run| run.0 = made.machine);
        }
        let vault = stored(Share::Nothing, &all);
        let chosen = chosen.index(all.len());
        let freed = vault.would_free(&[all[chosen].id(chosen)]).unwrap();
        prop_assert_eq!(freed, model(&all, &BTreeSet::from([chosen])));
    }
}

/// Of many that are asked, one that is damaged or gone ends it, wherever it is.
#[test]
fn nothing_is_said_to_be_free_if_one_cannot_say_what_it_uses() {
    let made = |n: usize| Made {
        machine: n % 3,
        runs: vec![(0, 0, n as u16, 2)],
        is_forgotten: false,
    };
    let all: Vec<Made> = (0..40).map(made).collect();
    for bad in [0, 17, 39] {
        let vault = stored(Share::All, &all);
        let chosen = all[20].id(20);
        assert_eq!(
            vault
                .would_free(std::slice::from_ref(&chosen))
                .unwrap()
                .garbage_bytes,
            0
        );
        let key = all[bad].id(bad).uses();
        vault.objects.remove(&key).unwrap();
        let error = vault.would_free(std::slice::from_ref(&chosen)).unwrap_err();
        assert!(error.is_damage(), "{error}");
        vault
            .objects
            .create(&key, Bytes::from_static(b"DRVRUSE\0 of what"))
            .unwrap();
        let error = vault.would_free(std::slice::from_ref(&chosen)).unwrap_err();
        assert!(error.to_string().contains(&key), "{error}");
    }
}
