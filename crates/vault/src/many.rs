//! Reading many small objects, several at once: a store may be far away.

use parking_lot::Mutex;

use crate::error::Result;

/// Objects that are read at once.
const MAX_AT_ONCE: usize = 8;
/// Fewer are read one after the other.
const MIN_AT_ONCE: usize = 32;

/// Reads something for each of `items`, and hands it to `take` in any order, until one of both fails.
pub(crate) fn for_each<I: Sync, T>(
    items: &[I],
    read: impl Fn(&I) -> Result<T> + Sync,
    mut take: impl FnMut(T) -> Result<()> + Send,
) -> Result<()> {
    if items.len() < MIN_AT_ONCE {
        return items.iter().try_for_each(|item| take(read(item)?));
    }
    let left = Mutex::new(items.iter());
    let done = Mutex::new((take, Ok(())));
    std::thread::scope(|scope| {
        for _ in 0..MAX_AT_ONCE {
            scope.spawn(|| {
                loop {
                    let Some(item) = left.lock().next() else {
                        return;
                    };
                    let got = read(item);
                    let mut done = done.lock();
                    let (take, outcome) = &mut *done;
                    if outcome.is_ok() {
                        *outcome = got.and_then(&mut *take);
                    }
                    if outcome.is_err() {
                        return;
                    }
                }
            });
        }
    });
    done.into_inner().1
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::VaultError;

    #[test]
    fn each_is_read_once_and_errors_end_it() {
        for count in [0, 1, 31, 32, 1000] {
            let items: Vec<u32> = (0..count).collect();
            let mut got = Vec::new();
            let take = |n| {
                got.push(n / 2);
                Ok(())
            };
            for_each(&items, |n| Ok(n * 2), take).unwrap();
            got.sort_unstable();
            assert_eq!(got, items);
            let error = |n: &u32| match *n {
                20 => Err(VaultError::Worker),
                n => Ok(n),
            };
            assert_eq!(for_each(&items, error, |_| Ok(())).is_err(), count > 20);
            let mut taken = 0;
            let take = |_| {
                taken += 1;
                if taken > 25 {
                    Err(VaultError::Worker)
                } else {
                    Ok(())
                }
            };
            assert_eq!(for_each(&items, |n| Ok(*n), take).is_err(), count > 25);
        }
    }
}
