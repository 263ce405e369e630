//! Waiting for a state whose changes are notified.

use tokio::sync::Notify;

/// Waits until `look` finds something; looks again whenever `changed` notifies its waiters. Cancel safe.
pub async fn until<T>(changed: &Notify, mut look: impl FnMut() -> Option<T>) -> T {
    loop {
        let next = changed.notified();
        tokio::pin!(next);
        // From here on a change is not missed.
        next.as_mut().enable();
        if let Some(found) = look() {
            return found;
        }
        next.await;
    }
}
