//! A machine that runs from the image while it arrives.

use super::*;

impl World {
    /// A machine reads some of the image.
    pub(super) fn read(&mut self) {
        let first = self.rng.u64(0..self.image.len() as u64);
        let end = (first + self.rng.u64(1..40)).min(self.image.len() as u64);
        let skip = self.rng.u64(1..4);
        let runs = (first..end).filter(|b| b % skip == 0).collect();
        // Or it only will probably.
        let waited = self.rng.bool();
        self.destination(Event::Want(Want { waited, runs }));
    }

    /// A frame of the control connection is made, and arrives.
    pub(super) fn given_arrives(&mut self) {
        let runs = self.session.gives.next().unwrap();
        let to_give = &mut self.session.to_give;
        let some_wait = to_give.values().any(|waited| *waited);
        for block in runs.blocks() {
            // What is asked for twice may come twice.
            let waited = to_give.remove(&block);
            assert!(
                !some_wait || waited != Some(false),
                "{block} is given before one that a machine waits for"
            );
        }
        let (mut data, mut zero, mut announced) = (Vec::new(), Vec::new(), Vec::new());
        for block in runs.blocks() {
            self.session.wanted.remove(&block);
            let content = self.image[block as usize];
            match self.session.destination.given(block) {
                Given::Useless => continue,
                Given::Literal => {
                    self.session.asked.insert(block);
                    self.session.verified[block as usize] = true;
                    announced.push(block);
                }
                Given::Ahead => {
                    self.ahead.insert(block);
                    match content {
                        0 => zero.push(block),
                        _ => data.push(block),
                    }
                }
            }
            self.given += 1;
            // Where the file has zeros anyway nothing is written.
            if content != self.disk.part[block as usize] {
                self.write(block, content);
            }
        }
        let runs = |blocks: Vec<u64>| -> Runs { blocks.into_iter().collect() };
        let (data, zero) = (runs(data), runs(zero));
        self.destination(Event::Ahead { data, zero });
        self.destination(Event::Written(runs(announced)));
    }
}

impl Session {
    /// The source is to send these blocks ahead. What a machine waits for goes on being that.
    pub(super) fn note_to_give(&mut self, waited: bool, blocks: impl Iterator<Item = u64>) {
        for block in blocks {
            *self.to_give.entry(block).or_default() |= waited;
        }
    }

    /// The source has taken `back` from the data connections, to send it ahead.
    pub(super) fn hurried(&mut self, want: &Want, back: Vec<u64>) {
        if want.waited {
            for block in want.runs.blocks() {
                if let Some(waited) = self.to_give.get_mut(&block) {
                    *waited = true;
                }
            }
        }
        self.note_to_give(want.waited, back.iter().copied());
        let back = back.into_iter().collect();
        self.gives.hurry(want, back).unwrap();
    }
}
