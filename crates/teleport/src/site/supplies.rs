//! What sessions take from: places and memory, shared between peers.

use std::sync::Arc;
use std::time::{Duration, Instant};

use drover_net::{Code, PeerKey, Refusal, Share, ShareLimits, Shares};
use parking_lot::Mutex;

/// Maximum number of concurrent sessions of one peer.
pub const MAX_PEER_SESSIONS: u64 = 8;

/// Default of [`Supplies::max_idle`].
pub const MAX_IDLE: Duration = Duration::from_secs(300);

/// Maximum memory for the layouts of incoming images, in bytes. An offer that needs more waits, and is then refused.
pub const MAX_LAYOUT_MEMORY: ShareLimits = ShareLimits {
    all: 512 << 20,
    // One of the largest that is permitted.
    one: 288 << 20,
    sure: 16 << 20,
};

/// What the sessions of a site, or of all sites of a process, take from. Clones are the same supplies.
#[derive(Debug, Clone)]
pub struct Supplies {
    /// After how long without a frame, other than keep-alives, a session ends: between images in any case, during an
    /// image if others wait for a session.
    pub max_idle: Duration,
    sessions: Shares<PeerKey>,
    /// Memory for layouts, in bytes.
    pub(crate) layout_memory: Shares<PeerKey>,
    /// When a session was last refused because all places were taken.
    turned_away: Arc<Mutex<Option<Instant>>>,
}

impl Supplies {
    /// Supplies for this many concurrent sessions, of which one peer has at most [`MAX_PEER_SESSIONS`]. A peer that has
    /// none may always open one.
    #[must_use]
    pub fn new(max_sessions: usize) -> Self {
        let all = max_sessions as u64;
        Supplies {
            max_idle: MAX_IDLE,
            sessions: Shares::new(ShareLimits {
                all,
                one: all.clamp(1, MAX_PEER_SESSIONS),
                sure: 1,
            }),
            layout_memory: Shares::new(MAX_LAYOUT_MEMORY),
            turned_away: Arc::default(),
        }
    }

    /// The same with other limits on the memory for layouts, in bytes, than [`MAX_LAYOUT_MEMORY`].
    #[must_use]
    pub fn with_layout_memory(self, limits: ShareLimits) -> Self {
        Supplies {
            layout_memory: Shares::new(limits),
            ..self
        }
    }

    /// A place for a session of `peer`.
    pub(crate) fn session(&self, peer: PeerKey) -> Result<Share<PeerKey>, Refusal> {
        self.sessions.try_take(peer, 1).ok_or_else(|| {
            let own = self.sessions.taken(&peer).1;
            let text = if own >= self.sessions.limits().one {
                format!(
                    "your site has {own} sessions open, the most that one peer may have; try again when one has ended"
                )
            } else {
                *self.turned_away.lock() = Some(Instant::now());
                "all sessions of the site are in use; try again later".into()
            };
            Refusal::new(Code::Busy, text)
        })
    }

    /// Whether a session was turned away within the time after which one is idle.
    pub(crate) fn others_wait(&self) -> bool {
        let last = *self.turned_away.lock();
        last.is_some_and(|at| at.elapsed() <= self.max_idle)
    }
}
