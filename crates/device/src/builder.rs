//! The only place where stages are ordered.

use std::sync::Arc;
use std::time::Duration;

use drover_core::BlockDevice;

use crate::stage::{
    Chunked, Cut, CutHandle, Delay, Errors, ErrorsHandle, Fault, LockHandle, Lockable, Rate,
    Strict, TrackHandle, Tracked,
};
use crate::synced::{PullHandle, PushHandle, Synced, SyncedError, SyncedOptions};

/// What a stack can be made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Part {
    /// [`Lockable`].
    Lockable,
    /// [`Tracked`].
    Tracked,
    /// [`Chunked`].
    Chunked,
    /// [`Strict`].
    Strict,
    /// [`Cut`].
    Cut,
    /// [`Rate`].
    Rate,
    /// [`Delay`].
    Delay,
    /// [`Errors`].
    Errors,
    /// [`Synced`], with its puller, its pusher and its far side.
    Managed,
    /// Any other device at the bottom.
    Backend,
}

impl Part {
    /// All parts in the order of every stack, from the front end down. One of the last two is at the bottom.
    ///
    /// - A lock holds back what a front end asks, and drains all that is below.
    /// - What is tracked is what the front end changed, not the chunks that were rewritten for it.
    /// - Any offset and length becomes whole chunks before anything demands them.
    /// - Then comes what stands for a link: it can be cut, is narrow and long; and behind it a disk that fails.
    pub const ORDER: [Self; 10] = [
        Self::Lockable,
        Self::Tracked,
        Self::Chunked,
        Self::Strict,
        Self::Cut,
        Self::Rate,
        Self::Delay,
        Self::Errors,
        Self::Managed,
        Self::Backend,
    ];
}

impl std::fmt::Display for Part {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Lockable => "lockable",
            Self::Tracked => "tracked",
            Self::Chunked => "chunked",
            Self::Strict => "strict",
            Self::Cut => "cut",
            Self::Rate => "rate",
            Self::Delay => "delay",
            Self::Errors => "errors",
            Self::Managed => "managed",
            Self::Backend => "backend",
        })
    }
}

/// Why a stack cannot be built.
#[derive(Debug, thiserror::Error)]
pub enum BuildError {
    /// A part was asked for more than once.
    #[error("a stack has one {0} stage, not two: leave one out")]
    Twice(Part),
    /// Two parts do not go together.
    #[error("{one} and {other} cannot be in one stack: {why}")]
    Together {
        /// The upper one.
        one: Part,
        /// The lower one.
        other: Part,
        /// Why not, and what to do.
        why: &'static str,
    },
    /// A part cannot be as it was asked for.
    #[error("no {part} stage can be like that: {why}")]
    Value {
        /// Which.
        part: Part,
        /// Why not.
        why: &'static str,
    },
    /// The managed device cannot be opened.
    #[error(transparent)]
    Managed(#[from] SyncedError),
}

enum Bottom {
    Backend(Arc<dyn BlockDevice>),
    Managed(Box<SyncedOptions>),
}

/// What a stack is to be, said in any order; [`Stack::build`] stacks it in the order of [`Part::ORDER`].
///
/// ```
/// use drover_device::backend::MemoryDevice;
/// use drover_device::builder::Stack;
///
/// let built = Stack::over(MemoryDevice::new(1 << 20))
///     .tracked(4096)
///     .chunked(64 << 10)
///     .build()?;
/// built.device.write(100, b"some bytes").expect("memory does not fail");
/// let track = built.track.expect("it was asked for");
/// assert_eq!(track.take().bytes(), 4096);
/// # Ok::<(), drover_device::builder::BuildError>(())
/// ```
pub struct Stack {
    bottom: Bottom,
    lockable: Option<Duration>,
    tracked: Option<u32>,
    chunked: Option<u32>,
    strict: Option<(u32, u32)>,
    cut: Option<Duration>,
    rate: Option<(u64, u64)>,
    delay: Option<(Duration, Duration)>,
    errors: Option<(u64, Vec<Fault>)>,
    twice: Option<Part>,
}

/// A stack and what steers its parts, each where it was asked for.
pub struct Built {
    /// The top.
    pub device: Arc<dyn BlockDevice>,
    /// What it is made of, from the top down.
    pub parts: Vec<Part>,
    /// Of [`Stack::lockable`].
    pub lock: Option<LockHandle>,
    /// Of [`Stack::tracked`].
    pub track: Option<TrackHandle>,
    /// Of [`Stack::cut`].
    pub cut: Option<CutHandle>,
    /// Of [`Stack::errors`].
    pub errors: Option<ErrorsHandle>,
    /// Of [`Stack::managed`].
    pub managed: Option<Managed>,
}

/// What steers a managed device.
pub struct Managed {
    /// The device itself, for its progress and to close it: dropping a stack stops it like a process that was killed.
    pub synced: Arc<Synced>,
    /// What is pulled.
    pub pull: PullHandle,
    /// What is pushed.
    pub push: PushHandle,
}

impl Stack {
    /// A stack over a backend, or over any other device.
    #[must_use]
    pub fn over(backend: impl BlockDevice + 'static) -> Self {
        Self::on(Bottom::Backend(Arc::new(backend)))
    }

    /// A stack over a managed device, whose far side and cache `options` name. Opened, and beginning to pull, when the
    /// stack is built.
    #[must_use]
    pub fn managed(options: SyncedOptions) -> Self {
        Self::on(Bottom::Managed(Box::new(options)))
    }

    fn on(bottom: Bottom) -> Self {
        Self {
            bottom,
            lockable: None,
            tracked: None,
            chunked: None,
            strict: None,
            cut: None,
            rate: None,
            delay: None,
            errors: None,
            twice: None,
        }
    }

    fn once<T>(slot: &mut Option<T>, twice: &mut Option<Part>, value: T, part: Part) {
        if slot.replace(value).is_some() {
            twice.get_or_insert(part);
        }
    }

    /// Can be locked; see [`Lockable::new`].
    #[must_use]
    pub fn lockable(mut self, patience: Duration) -> Self {
        Self::once(
            &mut self.lockable,
            &mut self.twice,
            patience,
            Part::Lockable,
        );
        self
    }

    /// Knows what was changed; see [`Tracked::new`].
    #[must_use]
    pub fn tracked(mut self, granularity: u32) -> Self {
        Self::once(
            &mut self.tracked,
            &mut self.twice,
            granularity,
            Part::Tracked,
        );
        self
    }

    /// Takes any offset and length; see [`Chunked::new`].
    #[must_use]
    pub fn chunked(mut self, chunk: u32) -> Self {
        Self::once(&mut self.chunked, &mut self.twice, chunk, Part::Chunked);
        self
    }

    /// Refuses what is not aligned or too long; see [`Strict::new`].
    #[must_use]
    pub fn strict(mut self, alignment: u32, longest: u32) -> Self {
        let value = (alignment, longest);
        Self::once(&mut self.strict, &mut self.twice, value, Part::Strict);
        self
    }

    /// Can be made unreachable; see [`Cut::new`].
    #[must_use]
    pub fn cut(mut self, patience: Duration) -> Self {
        Self::once(&mut self.cut, &mut self.twice, patience, Part::Cut);
        self
    }

    /// Lets so many bytes pass in a second; see [`Rate::new`].
    #[must_use]
    pub fn rate(mut self, per_second: u64, burst: u64) -> Self {
        let value = (per_second, burst);
        Self::once(&mut self.rate, &mut self.twice, value, Part::Rate);
        self
    }

    /// Takes time for each request and byte; see [`Delay::new`].
    #[must_use]
    pub fn delay(mut self, request: Duration, byte: Duration) -> Self {
        let value = (request, byte);
        Self::once(&mut self.delay, &mut self.twice, value, Part::Delay);
        self
    }

    /// Fails on purpose; see [`Errors::new`].
    #[must_use]
    pub fn errors(mut self, seed: u64, faults: Vec<Fault>) -> Self {
        let value = (seed, faults);
        Self::once(&mut self.errors, &mut self.twice, value, Part::Errors);
        self
    }

    /// Stacks what was asked for.
    ///
    /// # Errors
    /// [`BuildError`], before anything is opened or begun, unless it is [`BuildError::Managed`].
    pub fn build(self) -> Result<Built, BuildError> {
        self.check()?;
        let (mut device, managed): (Arc<dyn BlockDevice>, _) = match self.bottom {
            Bottom::Backend(device) => (device, None),
            Bottom::Managed(options) => {
                let synced = Synced::open(*options)?;
                let managed = Managed {
                    pull: synced.puller(),
                    push: synced.pusher(),
                    synced: Arc::clone(&synced),
                };
                (synced, Some(managed))
            }
        };
        let mut parts = vec![match managed {
            Some(_) => Part::Managed,
            None => Part::Backend,
        }];
        // From the bottom up: the reverse of `Part::ORDER`.
        let errors = self.errors.map(|(seed, faults)| {
            let (stage, handle) = Errors::new(Arc::clone(&device), seed, faults);
            put(&mut device, &mut parts, stage, Part::Errors);
            handle
        });
        if let Some((request, byte)) = self.delay {
            let stage = Delay::new(Arc::clone(&device), request, byte);
            put(&mut device, &mut parts, stage, Part::Delay);
        }
        if let Some((per_second, burst)) = self.rate {
            let stage = Rate::new(Arc::clone(&device), per_second, burst);
            put(&mut device, &mut parts, stage, Part::Rate);
        }
        let cut = self.cut.map(|patience| {
            let (stage, handle) = Cut::new(Arc::clone(&device), patience);
            put(&mut device, &mut parts, stage, Part::Cut);
            handle
        });
        if let Some((alignment, longest)) = self.strict {
            let stage = Strict::new(Arc::clone(&device), alignment, longest);
            put(&mut device, &mut parts, stage, Part::Strict);
        }
        if let Some(chunk) = self.chunked {
            let stage = Chunked::new(Arc::clone(&device), chunk);
            put(&mut device, &mut parts, stage, Part::Chunked);
        }
        let track = self.tracked.map(|granularity| {
            let (stage, handle) = Tracked::new(Arc::clone(&device), granularity);
            put(&mut device, &mut parts, stage, Part::Tracked);
            handle
        });
        let lock = self.lockable.map(|patience| {
            let (stage, handle) = Lockable::new(Arc::clone(&device), patience);
            put(&mut device, &mut parts, stage, Part::Lockable);
            handle
        });
        parts.reverse();
        Ok(Built {
            device,
            parts,
            lock,
            track,
            cut,
            errors,
            managed,
        })
    }

    fn check(&self) -> Result<(), BuildError> {
        if let Some(part) = self.twice {
            return Err(BuildError::Twice(part));
        }
        self.check_values()?;
        match &self.bottom {
            Bottom::Managed(_) => self.check_managed(),
            Bottom::Backend(device) => self.check_backend(device.as_ref()),
        }
    }

    fn check_values(&self) -> Result<(), BuildError> {
        let wrong = |part, why| Err(BuildError::Value { part, why });
        let not_a_power = |n: Option<u32>| n.is_some_and(|n| !n.is_power_of_two());
        if not_a_power(self.tracked) {
            return wrong(Part::Tracked, "a granularity is a power of two");
        }
        if not_a_power(self.chunked) {
            return wrong(Part::Chunked, "a chunk is a power of two");
        }
        if not_a_power(self.strict.map(|(alignment, _)| alignment)) {
            return wrong(Part::Strict, "an alignment is a power of two");
        }
        if self
            .strict
            .is_some_and(|(alignment, longest)| longest < alignment)
        {
            return wrong(Part::Strict, "nothing is both aligned and short enough");
        }
        if self.rate.is_some_and(|(per_second, _)| per_second == 0) {
            return wrong(Part::Rate, "a rate is more than nothing");
        }
        Ok(())
    }

    fn check_managed(&self) -> Result<(), BuildError> {
        let refuse = |one, why| {
            let other = Part::Managed;
            Err(BuildError::Together { one, other, why })
        };
        if self.chunked.is_some() {
            return refuse(
                Part::Chunked,
                "a managed device takes any range without fetching chunks for it: leave chunked out",
            );
        }
        let link = [
            (self.cut.is_some(), Part::Cut),
            (self.rate.is_some(), Part::Rate),
            (self.delay.is_some(), Part::Delay),
            (self.errors.is_some(), Part::Errors),
        ];
        match link.into_iter().find(|(wanted, _)| *wanted) {
            Some((_, part)) => refuse(
                part,
                "it stands for a link or a far disk, and would come before the cache: put it beneath the far side",
            ),
            None => Ok(()),
        }
    }

    fn check_backend(&self, backend: &dyn BlockDevice) -> Result<(), BuildError> {
        let refuse = |one, other, why| Err(BuildError::Together { one, other, why });
        let own = backend.capabilities();
        if let Some((_, longest)) = self.strict
            && longest < own.alignment
        {
            let why = "its longest request is shorter than the shortest that the backend takes";
            return refuse(Part::Strict, Part::Backend, why);
        }
        if let Some((alignment, _)) = self.strict
            && own.longest < alignment
        {
            let why = "the backend takes no request as long as its alignment";
            return refuse(Part::Strict, Part::Backend, why);
        }
        let Some(chunk) = self.chunked else {
            return Ok(());
        };
        if self.strict.is_some_and(|(alignment, _)| alignment > chunk) {
            let why = "a chunk is no smaller than the alignment that strict demands";
            return refuse(Part::Chunked, Part::Strict, why);
        }
        if own.alignment > chunk {
            let why = "a chunk is no smaller than the alignment that the backend demands";
            return refuse(Part::Chunked, Part::Backend, why);
        }
        Ok(())
    }
}

fn put(
    device: &mut Arc<dyn BlockDevice>,
    parts: &mut Vec<Part>,
    stage: impl BlockDevice + 'static,
    part: Part,
) {
    *device = Arc::new(stage);
    parts.push(part);
}

impl std::fmt::Debug for Built {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Built")
            .field("parts", &self.parts)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
