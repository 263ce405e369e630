//! Requests that end without a reply: cancelled, timed out, or lost with the link.

use std::collections::VecDeque;
use std::time::Duration;

use drover_device::remote::Chunks;

use super::job::Job;
use super::runs::{bytes, missing};
use super::{EndedJob, InFlight, Scheduler};
use crate::protocol::Request;

impl<T> Scheduler<T> {
    /// Cancels the reads of exactly this run: their replies are dropped.
    pub fn forget(&mut self, run: Chunks) {
        let is_it = |job: &Job<T>| job.chunks() == Some(run);
        let asked = self.in_flight.iter().filter(|(_, asked)| is_it(&asked.job));
        let ids: Vec<u64> = asked.map(|(id, _)| *id).collect();
        for id in ids {
            if let Some(asked) = self.remove(id) {
                self.give_up(asked);
            }
        }
        for queue in [&mut self.front, &mut self.back] {
            let (gone, kept): (VecDeque<_>, VecDeque<_>) = queue.drain(..).partition(&is_it);
            *queue = kept;
            let bytes = bytes(self.shape, run.count);
            for job in gone {
                match job.is_background() {
                    true => self.ahead -= bytes,
                    false => self.waited -= bytes,
                }
            }
        }
    }

    /// A job that is not in flight any more, and the runs of a read that have not arrived.
    pub(super) fn give_up(&mut self, asked: InFlight<T>) -> EndedJob<T> {
        let runs = asked.missing();
        let bytes = bytes(self.shape, asked.left);
        *self.counter(asked.job.is_background()) -= bytes;
        (asked.job, runs)
    }

    /// The link is lost. Requests that can be repeated wait for the next link; returns those that cannot.
    pub fn link_down(&mut self) -> Vec<Job<T>>
    where
        T: Default,
    {
        self.group.close();
        self.plan.link_down();
        let mut ids: Vec<u64> = self.in_flight.keys().copied().collect();
        // In the order sent, before those never sent.
        ids.sort_unstable_by(|a, b| b.cmp(a));
        let mut lost = Vec::new();
        for id in ids {
            let Some(asked) = self.in_flight.remove(&id) else {
                continue;
            };
            if asked.job.repeats {
                // It is kept, and repeated once more.
                continue;
            }
            if !asked.job.survives() {
                lost.push(asked.job);
                continue;
            }
            let queue = if asked.job.is_background() {
                &mut self.back
            } else {
                &mut self.front
            };
            let runs = asked.missing();
            match asked.job.request {
                Request::Read { background, .. } => {
                    for run in runs.into_iter().rev() {
                        queue.push_front(Job {
                            again: asked.job.again,
                            ..Job::read(run, background, asked.job.deadline)
                        });
                    }
                }
                _ => queue.push_front(asked.job),
            }
        }
        let (kept, gone) = self.front.drain(..).partition(Job::survives);
        self.front = kept;
        lost.extend(gone);
        self.unflushed.repeat(self.shape.size);
        lost
    }

    /// The jobs that timed out, with the runs of reads that have not arrived. The second value says whether any of
    /// them had been sent.
    pub fn expire(&mut self, now: Duration) -> (Vec<EndedJob<T>>, bool) {
        let went_on = self.went_on;
        let late = |job: &Job<T>| match job.is_background() {
            true => job.deadline.max(went_on) <= now,
            false => job.deadline <= now,
        };
        let mut out = Vec::new();
        let ids: Vec<u64> = self
            .in_flight
            .iter()
            .filter(|(_, asked)| late(&asked.job))
            .map(|(id, _)| *id)
            .collect();
        let stalled = !ids.is_empty();
        for id in ids {
            if self.in_flight.get(&id).is_some_and(|a| a.job.repeats) {
                // It stays until the link is down: those that overlap it must not overtake it.
                continue;
            }
            if let Some(asked) = self.remove(id) {
                out.push(self.give_up(asked));
            }
        }
        for background in [false, true] {
            let queue = if background {
                &mut self.back
            } else {
                &mut self.front
            };
            let (gone, kept): (VecDeque<_>, VecDeque<_>) =
                queue.drain(..).partition(|job| late(job));
            *queue = kept;
            for job in gone {
                out.push(self.unsent(job));
            }
        }
        (out, stalled)
    }

    /// A part of an epoch was answered: those behind it on a slow link get a deadline no earlier than `deadline`.
    pub fn pushed(&mut self, deadline: Duration) {
        let asked = self.in_flight.values_mut().map(|asked| &mut asked.job);
        for job in asked.chain(&mut self.front) {
            if matches!(job.request, Request::Write { .. } | Request::Zero { .. }) {
                job.deadline = job.deadline.max(deadline);
            }
        }
    }

    /// A repeated change was answered: the others get a deadline no earlier than `deadline`, and so do the requests that
    /// wait for them, if no link has come as far before (`farther`).
    pub(super) fn goes_on(&mut self, deadline: Duration, farther: bool) {
        let repeated = self.in_flight.values_mut().map(|asked| &mut asked.job);
        for job in repeated.filter(|job| job.repeats) {
            job.deadline = job.deadline.max(deadline);
        }
        let waiting = self.front.iter_mut().chain(&mut self.back);
        for job in waiting.filter(|job| farther && job.survives()) {
            job.deadline = job.deadline.max(deadline);
        }
    }

    /// Removes and returns all requests, because no more replies will arrive.
    pub fn take_all(&mut self) -> Vec<EndedJob<T>> {
        self.expire(Duration::MAX).0
    }

    fn unsent(&mut self, job: Job<T>) -> EndedJob<T> {
        let runs: Vec<Chunks> = job.chunks().into_iter().collect();
        for run in &runs {
            let bytes = bytes(self.shape, run.count);
            *self.counter(job.is_background()) -= bytes;
        }
        (job, runs)
    }
}

impl<T> InFlight<T> {
    /// Runs of a read that have not arrived.
    fn missing(&self) -> Vec<Chunks> {
        self.job
            .chunks()
            .map_or_else(Vec::new, |run| missing(run, &self.arrived))
    }
}
