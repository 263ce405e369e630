//! The state machines against arbitrary messages in any order: they refuse, or continue and keep their
//! invariants.

use std::collections::HashSet;
use std::sync::Arc;

use drover_core::{CompactIndex, Digest, Head};
use drover_index::{ImageId, Via};
use drover_store::DataBits;
use drover_store::sequences::From;
use drover_teleport::protocol::{Accept, BATCH_BLOCKS, Delivered};
use drover_teleport::testing::destination::{Action, Destination, Event, Given, ReuseJob, Run};
use drover_teleport::testing::source::{self, Source};
use drover_teleport::testing::{Batch, Need, Runs, Want};

/// Numbers from the input; zeros when it is used up.
struct Input<'a>(&'a [u8]);

impl Input<'_> {
    fn byte(&mut self) -> u64 {
        let Some((&b, rest)) = self.0.split_first() else {
            return 0;
        };
        self.0 = rest;
        u64::from(b)
    }

    fn number(&mut self) -> u64 {
        match self.byte() {
            255 => u64::MAX,
            254 => 1 << 40,
            253 => BATCH_BLOCKS,
            b if b >= 200 => b << 8 | self.byte(),
            b => b,
        }
    }

    fn runs(&mut self) -> Runs {
        let mut blocks: Vec<u64> = (0..self.byte() % 8)
            .map(|_| self.number() % (1 << 32))
            .collect();
        blocks.sort_unstable();
        blocks.dedup();
        blocks.into_iter().collect()
    }

    fn want(&mut self) -> Want {
        Want {
            waited: self.byte() & 1 == 1,
            runs: self.runs(),
        }
    }
}

fn batch(input: &mut Input<'_>, index: u64, blocks: u64) -> Batch {
    let mut data = DataBits::new(blocks.clamp(1, BATCH_BLOCKS));
    let every = 1 + input.byte();
    (0..data.blocks())
        .filter(|i| i % every == 0 && every < 250)
        .for_each(|i| data.set(i));
    let digests = vec![Digest([1; 32]); data.count() as usize];
    Batch::new(index, data, vec![Head::No; digests.len()], &digests)
}

fn plan(input: &mut Input<'_>, blocks: u64) -> Vec<Run> {
    let (mut out, mut left) = (Vec::new(), blocks);
    while left > 0 {
        let count = if input.0.is_empty() {
            left
        } else {
            input.number().saturating_add(1).min(left)
        };
        left -= count;
        let first = input.number().min(1 << 41);
        let from = match input.byte() % 4 {
            0 => From::Literal,
            1 => From::Image {
                image: ImageId(7),
                first: CompactIndex(first),
            },
            2 => From::Own {
                first: CompactIndex(first),
            },
            _ => From::Sequence { first },
        };
        out.push(Run {
            count: count as u32,
            from,
            via: Via::C2,
        });
    }
    out
}

fn destination(input: &mut Input<'_>) {
    let walk_blocks = input.number().min(1 << 32);
    let mut machine = Destination::new(walk_blocks);
    let mut open: Vec<Arc<Batch>> = Vec::new();
    let mut questions: Vec<Arc<Batch>> = Vec::new();
    let mut jobs: Vec<ReuseJob> = Vec::new();
    let mut proofs: Vec<u64> = Vec::new();
    let mut asked = HashSet::new();
    let mut complete = HashSet::new();
    let mut finished = false;
    while !input.0.is_empty() {
        let event = match input.byte() % 10 {
            0 | 1 => {
                let next = machine.next_batch();
                let left = walk_blocks.saturating_sub(next.saturating_mul(BATCH_BLOCKS));
                Event::Batch(Arc::new(batch(input, next, left)))
            }
            2 => {
                let (index, blocks) = (input.number() % (1 << 32), input.number());
                Event::Batch(Arc::new(batch(input, index, blocks)))
            }
            3 if !questions.is_empty() => {
                let at = input.byte() as usize % questions.len();
                let batch = questions.remove(at);
                let runs = plan(input, batch.digests.len() as u64);
                Event::Planned {
                    index: batch.index,
                    runs,
                }
            }
            4 if !jobs.is_empty() => {
                let at = input.byte() as usize % jobs.len();
                let job = jobs.swap_remove(at);
                let every = 1 + input.byte() as u32;
                let blocks = job.runs.iter().flat_map(|(s, r)| *s..*s + r.count);
                let failed = blocks.filter(|i| i % every == 0 && every < 250).collect();
                Event::Reused { job, failed }
            }
            // As a data connection lets them through: data blocks of batches that are not complete.
            5 if !open.is_empty() => {
                let batch = &open[input.byte() as usize % open.len()];
                let (from, n) = (input.byte(), input.number());
                let some = batch
                    .data
                    .iter()
                    .skip(from as usize)
                    .take(n.min(256) as usize);
                Event::Written(some.map(|i| batch.first_block() + i).collect())
            }
            6 if !proofs.is_empty() => {
                let index = proofs.remove(0);
                let groups = open
                    .iter()
                    .find(|b| b.index == index)
                    .map_or(0, |b| b.proofs.len());
                let wrong = (0..groups as u32)
                    .filter(|_| input.byte() & 1 == 1)
                    .collect();
                Event::Proved { index, wrong }
            }
            7 => Event::Want(input.want()),
            // As the driver lets them through: blocks that are wanted, and whose batches are not here.
            8 => {
                let runs = input.runs();
                let came = |block: &u64| machine.given(*block) == Given::Ahead;
                let (zero, data): (Vec<u64>, Vec<u64>) =
                    runs.blocks().filter(came).partition(|block| block % 5 == 0);
                Event::Ahead {
                    data: data.into_iter().collect(),
                    zero: zero.into_iter().collect(),
                }
            }
            _ => Event::End(Some(Digest([9; 32]))),
        };
        let mut actions = Vec::new();
        if machine.handle(event, &mut actions).is_err() {
            return;
        }
        for action in actions {
            match action {
                Action::Match(batch) => {
                    if !batch.digests.is_empty() {
                        open.push(batch.clone());
                        questions.push(batch);
                    }
                }
                Action::Reuse(job) => {
                    for (start, run) in &job.runs {
                        assert!(run.from != From::Literal && run.count > 0);
                        assert!((start + run.count) as usize <= job.batch.digests.len());
                        if let From::Own { first } = run.from {
                            let own = machine.map().walk_runs(first, u64::from(run.count));
                            assert!(own.is_some(), "blocks that have not come");
                        }
                    }
                    jobs.push(job);
                }
                Action::Need(need) => {
                    assert!(!need.runs.is_empty());
                    assert!(need.runs.blocks().all(|b| asked.insert(b)), "asked twice");
                    let need = Need::decode(&need.encode()).expect("a need");
                    assert!(
                        need.runs
                            .blocks()
                            .all(|b| b / BATCH_BLOCKS < machine.next_batch())
                    );
                }
                Action::Want(want) => {
                    let mut blocks = want.runs.blocks();
                    assert!(
                        blocks.all(|b| b < walk_blocks && b / BATCH_BLOCKS >= machine.next_batch())
                    );
                }
                Action::Hurry(want) => assert!(want.runs.blocks().all(|b| b < walk_blocks)),
                // The driver ends the transfer.
                Action::Changed(_) => return,
                Action::Prove(index) => proofs.push(index),
                Action::Complete(index) => {
                    assert!(complete.insert(index), "complete twice");
                    open.retain(|b| b.index != index);
                }
                Action::Finish(_) => {
                    assert!(!finished && open.is_empty(), "finished too early, or twice");
                    finished = true;
                }
            }
        }
    }
}

fn the_source(input: &mut Input<'_>) {
    let walk_blocks = input.number().min(1 << 32);
    let mut machine = Source::new(walk_blocks);
    // The first batches need not be accepted.
    let ahead = source::FIRST_WINDOW.min(walk_blocks.div_ceil(BATCH_BLOCKS));
    let (mut walked, mut walk_to, mut ended) = (0, ahead, false);
    let mut done = false;
    while !input.0.is_empty() {
        let event = match input.byte() % 8 {
            0 => source::Event::Accepted(Accept {
                resume_batch: input.number(),
                resumed_blocks: 0,
                open_batches: 0,
            }),
            1 if walked < walk_to => {
                walked += 1;
                match input.byte() & 1 {
                    0 => source::Event::Walked {
                        index: walked - 1,
                        frame: vec![],
                    },
                    _ => source::Event::Skipped(walked - 1),
                }
            }
            2 => source::Event::Need(Need { runs: input.runs() }),
            3 => source::Event::Ack(input.number()),
            4 if walked == walk_blocks.div_ceil(BATCH_BLOCKS) && !ended => {
                ended = true;
                source::Event::WalkEnded((input.byte() & 1 == 0).then_some(Digest([1; 32])))
            }
            5 => source::Event::Want(input.want()),
            6 => source::Event::Hurry(input.want()),
            _ => source::Event::Delivered(Delivered {
                digest: Digest([input.byte() as u8; 32]),
                ..Delivered::default()
            }),
        };
        let mut actions = Vec::new();
        if machine.handle(event, &mut actions).is_err() {
            return;
        }
        assert!(machine.done_blocks() <= walk_blocks);
        for action in actions {
            match action {
                source::Action::WalkTo(to) => {
                    assert!(to >= walk_to && to <= walk_blocks.div_ceil(BATCH_BLOCKS));
                    walk_to = to;
                }
                source::Action::Skip(index) => assert_eq!(index, walked - 1),
                source::Action::Literals(runs) => {
                    assert!(runs.blocks().all(|b| b < walk_blocks));
                }
                source::Action::Give(want) => {
                    assert!(want.runs.blocks().all(|b| b < walk_blocks));
                }
                source::Action::Done(_) => {
                    assert!(ended && !done);
                    done = true;
                }
                source::Action::Batch(_)
                | source::Action::End(_)
                | source::Action::GiveQueued(_) => {}
            }
        }
    }
}

pub fn run(data: &[u8]) {
    match data.split_first() {
        Some((0, rest)) => the_source(&mut Input(rest)),
        Some((_, rest)) => destination(&mut Input(rest)),
        None => {}
    }
}
