//! What waits, in two priorities.

use std::collections::VecDeque;

/// Two queues: foreground entries go first, in order; background ones may have to wait for credit.
#[derive(Debug)]
pub struct Queue<T> {
    urgent: VecDeque<T>,
    background: VecDeque<T>,
}

impl<T> Default for Queue<T> {
    fn default() -> Self {
        Self {
            urgent: VecDeque::new(),
            background: VecDeque::new(),
        }
    }
}

impl<T> Queue<T> {
    /// Puts it behind those of its priority.
    pub fn push(&mut self, item: T, urgent: bool) {
        match urgent {
            true => self.urgent.push_back(item),
            false => self.background.push_back(item),
        }
    }

    /// Puts it before all others.
    pub fn push_first(&mut self, item: T) {
        self.urgent.push_front(item);
    }

    /// Moves background entries for which `wanted` holds to the foreground, and calls `moved` for each.
    pub fn hurry(&mut self, wanted: impl Fn(&T) -> bool, mut moved: impl FnMut(&T)) {
        if !self.background.iter().any(&wanted) {
            return;
        }
        for item in std::mem::take(&mut self.background) {
            if wanted(&item) {
                moved(&item);
                self.urgent.push_back(item);
            } else {
                self.background.push_back(item);
            }
        }
    }

    /// The next, and whether it is urgent. One that is not is only taken when it `may` go.
    pub fn pop(&mut self, may: impl FnOnce(&T) -> bool) -> Option<(T, bool)> {
        if let Some(item) = self.urgent.pop_front() {
            return Some((item, true));
        }
        let item = self.background.pop_front_if(|item| may(item))?;
        Some((item, false))
    }

    /// Whether nothing waits.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.urgent.is_empty() && self.background.is_empty()
    }

    /// Whether a background entry waits.
    #[must_use]
    pub fn has_background(&self) -> bool {
        !self.background.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn foreground_work_overtakes_background_work() {
        let mut queue = Queue::default();
        for n in 1..=3 {
            queue.push(n, false);
        }
        queue.push(10, true);
        let mut moved = Vec::new();
        queue.hurry(|n| *n == 2, |n| moved.push(*n));
        queue.hurry(|n| *n == 77, |n| moved.push(*n));
        queue.push_first(0);
        assert_eq!(moved, [2]);
        let urgent: Vec<_> = (0..3).map_while(|_| queue.pop(|_| false)).collect();
        assert_eq!(urgent, [(0, true), (10, true), (2, true)]);
        assert_eq!(queue.pop(|_| false), None, "it may not go");
        assert!(!queue.is_empty() && queue.has_background());
        assert_eq!(queue.pop(|n| *n == 1), Some((1, false)));
    }
}
