//! How a destination reaches its teleporter: in the same process, or over a connection.

use std::collections::VecDeque;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;
use std::time::{Duration, Instant};

use drover_index::{ImageId, MAX_FREED, MatcherStats, Trimmed};
use drover_net::{Frame, Identity, PeerKey};
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::mpsc;

use crate::TeleportError;
use crate::codec::{Batch, Malformed, Reader, decode_plan, encode_plan};
use crate::protocol::{BATCH_BLOCKS, kind};
use crate::teleporter::{Answer, Event, Failure, ImageEvent, Teleporter};
use drover_core::put_varint;

/// Images that a teleporter lists at most; a frame has room for more.
const MAX_LISTED: u64 = 100_000;

/// Steps of a trimming that are answered together as long as they look at images.
const LOOKS: usize = 64;

/// A teleporter on a third machine.
#[derive(Debug, Clone)]
pub struct RemoteTeleporter {
    /// This site's identity.
    pub identity: Identity,
    /// The teleporter's key.
    pub key: PeerKey,
    /// Where it listens.
    pub addresses: Vec<String>,
}

/// The teleporter inside a site.
pub type LocalTeleporter = Arc<Mutex<Teleporter>>;

/// Where a site's matching happens.
#[derive(Debug, Clone)]
pub enum Matching {
    /// Here.
    Local(LocalTeleporter),
    /// On another machine.
    Remote(RemoteTeleporter),
}

impl Matching {
    /// What the matcher has done, when it is here.
    #[must_use]
    pub fn stats(&self) -> Option<MatcherStats> {
        match self {
            Matching::Local(t) => Some(t.lock().stats()),
            Matching::Remote(_) => None,
        }
    }

    /// Tells the teleporter one thing and waits. For the rare events outside a transfer.
    ///
    /// # Errors
    /// When the teleporter fails or cannot be reached.
    pub fn tell(&self, event: Event) -> Result<Answer, TeleportError> {
        let mut link = self.link()?;
        link.submit(event)?;
        link.collect()
    }

    /// The images that the teleporter has whole hash files of.
    ///
    /// # Errors
    /// When the teleporter fails or cannot be reached.
    pub fn images(&self) -> Result<Vec<ImageId>, TeleportError> {
        match self.tell(Event::List)? {
            Answer::Images(images) => Ok(images),
            _ => Err(wrong_answer()),
        }
    }

    /// A link for one transfer. Blocks until it is connected; call it from a blocking thread of a
    /// tokio runtime.
    ///
    /// # Errors
    /// When the teleporter cannot be reached.
    pub fn link(&self) -> Result<Link, TeleportError> {
        match self {
            Matching::Local(t) => Ok(Link::Local(t.clone(), VecDeque::new())),
            Matching::Remote(r) => {
                let runtime = tokio::runtime::Handle::current();
                runtime
                    .block_on(crate::session::teleporter::connect(r))
                    .map(Link::Remote)
            }
        }
    }
}

/// A way to submit events and collect the answers in the same order.
pub enum Link {
    /// Answers at once.
    Local(LocalTeleporter, VecDeque<Answer>),
    /// Answers a round trip later.
    Remote(RemoteLink),
}

/// Frames to and from a lone teleporter, and how many blocks each awaited answer is for.
pub struct RemoteLink {
    /// Frames to send.
    pub to: mpsc::Sender<Frame>,
    /// Frames that came.
    pub from: mpsc::Receiver<Result<Frame, TeleportError>>,
    /// Data blocks of each event that has no answer yet.
    pub waiting: VecDeque<u64>,
}

impl Link {
    /// How many events may be submitted before their answers are collected.
    #[must_use]
    pub fn depth(&self) -> usize {
        match self {
            Link::Local(..) => 1,
            Link::Remote(_) => 64,
        }
    }

    /// Hands an event over.
    ///
    /// # Errors
    /// When the teleporter fails or is gone.
    pub fn submit(&mut self, event: Event) -> Result<(), TeleportError> {
        self.submit_then(event, |_| {})
    }

    /// Hands an event over. A teleporter in this process has `then` called with the answer before
    /// it handles any other event.
    ///
    /// # Errors
    /// When the teleporter fails or is gone.
    pub fn submit_then(
        &mut self,
        event: Event,
        then: impl FnOnce(&Answer),
    ) -> Result<(), TeleportError> {
        match self {
            Link::Local(teleporter, answers) => {
                answers.push_back(handle_then(teleporter, event, then)?);
            }
            Link::Remote(link) => {
                link.waiting.push_back(event.blocks());
                let frame = Frame {
                    kind: kind::MATCH,
                    payload: encode_event(&event).into(),
                };
                link.to.blocking_send(frame).map_err(|_| gone())?;
            }
        }
        Ok(())
    }

    /// Ends, and gives up an image that was begun on it: one that nobody goes on with would keep its
    /// place at the teleporter.
    pub fn give_up(self, image: ImageId) {
        match self {
            Link::Local(teleporter, _) => {
                // It cannot fail; and if it did, there would be nothing else to do.
                let _ = handle(&teleporter, Event::Image(image, ImageEvent::Abort));
            }
            // A lone teleporter gives up what was begun on a connection when that ends.
            Link::Remote(_) => {}
        }
    }

    /// Waits for the answer to the oldest event without one.
    ///
    /// # Errors
    /// When the teleporter fails or is gone.
    pub fn collect(&mut self) -> Result<Answer, TeleportError> {
        match self {
            Link::Local(_, answers) => answers.pop_front().ok_or_else(gone),
            Link::Remote(link) => {
                let frame = link.from.blocking_recv();
                link.answered(frame)
            }
        }
    }

    /// The same, for so long at most; then the link is of no more use.
    ///
    /// # Errors
    /// When the teleporter fails, is gone, or takes longer.
    pub(crate) fn collect_within(&mut self, at_most: Duration) -> Result<Answer, TeleportError> {
        let Link::Remote(link) = self else {
            return self.collect();
        };
        let until = Instant::now() + at_most;
        let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
        let mut context = Context::from_waker(&waker);
        loop {
            if let Poll::Ready(frame) = link.from.poll_recv(&mut context) {
                return link.answered(frame);
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let why = "the teleporter takes too long to answer";
                return Err(TeleportError::Remote(why.into()));
            }
            std::thread::park_timeout(left);
        }
    }
}

/// Wakes a thread that waits for a frame.
struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

impl RemoteLink {
    /// The answer to the oldest event without one, as it came; none when nothing comes any more.
    fn answered(
        &mut self,
        frame: Option<Result<Frame, TeleportError>>,
    ) -> Result<Answer, TeleportError> {
        let frame = frame.ok_or_else(gone)??;
        let blocks = self.waiting.pop_front().unwrap_or(0);
        if frame.kind != kind::PLAN {
            return Err(TeleportError::Protocol(
                "the teleporter sent no plan".into(),
            ));
        }
        decode_answer(&frame.payload, blocks)?.map_err(TeleportError::Remote)
    }
}

/// The teleporter answers something else than it was asked.
pub(crate) fn wrong_answer() -> TeleportError {
    TeleportError::Protocol("the teleporter gave a wrong answer".into())
}

fn gone() -> TeleportError {
    TeleportError::Remote("the teleporter is gone".into())
}

/// Has the teleporter here handle an event. Nobody else waits while the disk syncs for it.
///
/// # Errors
/// What it reports.
pub fn handle(teleporter: &Mutex<Teleporter>, event: Event) -> Result<Answer, TeleportError> {
    handle_then(teleporter, event, |_| {})
}

fn handle_then(
    teleporter: &Mutex<Teleporter>,
    event: Event,
    then: impl FnOnce(&Answer),
) -> Result<Answer, TeleportError> {
    let answer = match event {
        Event::Image(image, ImageEvent::Finish) => {
            let mut finishing = held(teleporter, |t| t.begin_finish(image))?;
            finishing.sync();
            held(teleporter, |t| t.mark_complete(&mut finishing))?;
            finishing.sync();
            held(teleporter, |t| t.end_finish(finishing))?;
            Answer::Done
        }
        Event::Image(image, ImageEvent::Forget) => {
            if let Some(sync) = held(teleporter, |t| t.begin_forget(image))? {
                // What comes back with the power is forgotten when the site opens.
                let _ = sync();
            }
            Answer::Done
        }
        Event::Image(image, ImageEvent::Abort) => {
            // Dropped here, not while it is held.
            drop(held(teleporter, |t| Ok(t.begin_abort(image)))?);
            Answer::Done
        }
        Event::Trim => return Ok(trim_then(teleporter, then)),
        event => {
            return held(teleporter, |t| {
                let answer = t.handle(event)?;
                then(&answer);
                Ok(answer)
            });
        }
    };
    then(&answer);
    Ok(answer)
}

/// The next steps of a trimming that look at images, between which others are matched, or one of those behind them, before
/// each of which the destination must be asked.
fn trim_then(teleporter: &Mutex<Teleporter>, then: impl FnOnce(&Answer)) -> Answer {
    for _ in 0..LOOKS {
        let mut teleporter = teleporter.lock();
        let answer = match teleporter.trim() {
            Trimmed::Looked => {
                MutexGuard::unlock_fair(teleporter);
                continue;
            }
            Trimmed::Freed(segments) => Answer::Freed(segments),
            Trimmed::Done => Answer::Done,
        };
        then(&answer);
        return answer;
    }
    Answer::Freed(Vec::new())
}

/// Does something with the teleporter, alone.
fn held<T>(
    teleporter: &Mutex<Teleporter>,
    what: impl FnOnce(&mut Teleporter) -> Result<T, Failure>,
) -> Result<T, TeleportError> {
    let mut teleporter = teleporter.lock();
    let done = what(&mut teleporter);
    for repair in teleporter.take_repairs() {
        tracing::warn!(repair, "the matcher's files were damaged");
    }
    Ok(done?)
}

/// An event as the payload of a MATCH frame.
#[must_use]
pub fn encode_event(event: &Event) -> Vec<u8> {
    let none = &ImageId(0);
    let (tag, image) = match event {
        Event::Image(i, ImageEvent::Begin) => (0, i),
        Event::Image(i, ImageEvent::Finish) => (1, i),
        Event::Image(i, ImageEvent::Abort) => (2, i),
        Event::Image(i, ImageEvent::Forget) => (3, i),
        Event::Image(i, ImageEvent::Reindex) => (4, i),
        Event::Match(i, _) => (5, i),
        Event::Record(i, _) => (6, i),
        Event::List => (7, none),
        Event::Probe(_) => (8, none),
        Event::BeginTrim { .. } => (9, none),
        Event::Trim => (10, none),
    };
    let mut out = vec![tag];
    put_varint(&mut out, image.0);
    if let Event::BeginTrim { keep, have } = event {
        put_varint(&mut out, u64::from(*keep));
        put_varint(&mut out, u64::from(*have));
    }
    if let Event::Match(_, batch) | Event::Record(_, batch) | Event::Probe(batch) = event {
        out.extend(batch.encode());
    }
    out
}

/// Reads the payload of a MATCH frame.
///
/// # Errors
/// When it is not an event.
pub fn decode_event(bytes: &[u8]) -> Result<Event, Malformed> {
    let mut r = Reader::new(bytes, "match request");
    let tag = r.byte()?;
    let image = ImageId(r.varint()?);
    let event = match tag {
        0 => ImageEvent::Begin,
        1 => ImageEvent::Finish,
        2 => ImageEvent::Abort,
        3 => ImageEvent::Forget,
        4 => ImageEvent::Reindex,
        5 => return Ok(Event::Match(image, Arc::new(Batch::decode(r.rest())?))),
        6 => return Ok(Event::Record(image, Arc::new(Batch::decode(r.rest())?))),
        7 => return r.end().map(|()| Event::List),
        8 => return Ok(Event::Probe(Arc::new(Batch::decode(r.rest())?))),
        9 => {
            let (keep, have) = (segments(&mut r)?, segments(&mut r)?);
            return r.end().map(|()| Event::BeginTrim { keep, have });
        }
        10 => return r.end().map(|()| Event::Trim),
        _ => return Err(r.malformed()),
    };
    r.end()?;
    Ok(Event::Image(image, event))
}

/// A number of segments, or of one.
fn segments(r: &mut Reader<'_>) -> Result<u32, Malformed> {
    let n = r.varint()?;
    u32::try_from(n).map_err(|_| r.malformed())
}

/// An answer, or why there is none, as the payload of a PLAN frame.
#[must_use]
pub fn encode_answer(answer: &Result<Answer, String>) -> Vec<u8> {
    match answer {
        Ok(Answer::Done) => vec![0],
        Ok(Answer::Plan(plan)) => [vec![1], encode_plan(plan)].concat(),
        Err(message) => [vec![2], message.as_bytes().to_vec()].concat(),
        Ok(Answer::Images(images)) => {
            let mut out = vec![3];
            put_varint(&mut out, images.len() as u64);
            images.iter().for_each(|i| put_varint(&mut out, i.0));
            out
        }
        Ok(Answer::Known(known)) => {
            let mut out = vec![4];
            out.resize(1 + known.len().div_ceil(8), 0);
            for i in (0..known.len()).filter(|i| known[*i]) {
                out[1 + i / 8] |= 1 << (i % 8);
            }
            out
        }
        Ok(Answer::Freed(freed)) => {
            let mut out = vec![5];
            put_varint(&mut out, freed.len() as u64);
            freed
                .iter()
                .for_each(|no| put_varint(&mut out, u64::from(*no)));
            out
        }
        Ok(Answer::Holding(n)) => {
            let mut out = vec![6];
            put_varint(&mut out, u64::from(*n));
            out
        }
    }
}

/// Reads the payload of a PLAN frame for an event of so many data blocks.
///
/// # Errors
/// When it is not an answer.
pub fn decode_answer(bytes: &[u8], blocks: u64) -> Result<Result<Answer, String>, Malformed> {
    debug_assert!(blocks <= BATCH_BLOCKS);
    let mut r = Reader::new(bytes, "plan");
    match r.byte()? {
        0 => r.end().map(|()| Ok(Answer::Done)),
        1 => Ok(Ok(Answer::Plan(decode_plan(r.rest(), blocks)?))),
        2 => Ok(Err(String::from_utf8_lossy(r.rest()).into_owned())),
        3 => {
            let n = r.at_most(MAX_LISTED)?;
            let images = (0..n).map(|_| r.varint().map(ImageId));
            let images = images.collect::<Result<Vec<_>, _>>()?;
            r.end().map(|()| Ok(Answer::Images(images)))
        }
        4 => {
            let bits = r.take((blocks as usize).div_ceil(8))?;
            let known = (0..blocks as usize).map(|i| bits[i / 8] >> (i % 8) & 1 == 1);
            let known = known.collect();
            r.end().map(|()| Ok(Answer::Known(known)))
        }
        5 => {
            let n = r.at_most(MAX_FREED as u64)?;
            let freed = (0..n).map(|_| segments(&mut r));
            let freed = freed.collect::<Result<Vec<_>, _>>()?;
            r.end().map(|()| Ok(Answer::Freed(freed)))
        }
        6 => {
            let n = segments(&mut r)?;
            r.end().map(|()| Ok(Answer::Holding(n)))
        }
        _ => Err(r.malformed()),
    }
}

#[cfg(test)]
mod held_tests;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::any_batch;
    use proptest::prelude::*;

    #[test]
    fn an_answer_is_waited_for_so_long_at_most() {
        let ((to, _events), (answers, from)) = (mpsc::channel(4), mpsc::channel(4));
        let mut link = Link::Remote(RemoteLink {
            to,
            from,
            waiting: VecDeque::new(),
        });
        link.submit(Event::Trim).unwrap();
        let late = link.collect_within(Duration::from_millis(20)).unwrap_err();
        assert!(late.to_string().contains("too long"), "{late}");
        let answering = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(50));
            let frame = Frame {
                kind: kind::PLAN,
                payload: encode_answer(&Ok(Answer::Done)).into(),
            };
            answers.blocking_send(Ok(frame)).unwrap();
        });
        let long = Duration::from_secs(60);
        assert_eq!(link.collect_within(long).unwrap(), Answer::Done);
        answering.join().unwrap();
        let gone = link.collect_within(long).unwrap_err();
        assert!(gone.to_string().contains("gone"), "{gone}");
    }

    proptest! {
        #[test]
        fn events_and_back(batch in any_batch(), image in any::<u64>(), tag in 0u8..11) {
            let (id, batch) = (ImageId(image), Arc::new(batch));
            use ImageEvent::*;
            let event = match tag {
                5 => Event::Match(id, batch),
                6 => Event::Record(id, batch),
                7 => Event::List,
                8 => Event::Probe(batch),
                9 => Event::BeginTrim { keep: image as u32, have: (image >> 32) as u32 },
                10 => Event::Trim,
                t => Event::Image(id, [Begin, Finish, Abort, Forget, Reindex][t as usize]),
            };
            let bytes = encode_event(&event);
            prop_assert_eq!(bytes[0], tag);
            prop_assert_eq!(format!("{:?}", decode_event(&bytes).unwrap()), format!("{event:?}"));
        }

        #[test]
        fn rubbish_is_refused_without_panic(bytes in prop::collection::vec(any::<u8>(), 0..100)) {
            let _ = decode_event(&bytes);
            let _ = decode_answer(&bytes, 10);
        }
    }

    #[test]
    fn answers_and_back() {
        let images = Answer::Images(vec![ImageId(5), ImageId(u64::MAX)]);
        for a in [
            Ok(Answer::Done),
            Ok(images),
            Ok(Answer::Images(vec![])),
            Ok(Answer::Known(vec![])),
            Ok(Answer::Holding(u32::MAX)),
            Ok(Answer::Freed(vec![])),
            Ok(Answer::Freed(
                (0..MAX_FREED as u32).map(|i| u32::MAX - i).collect(),
            )),
            Err("disk full".to_string()),
        ] {
            assert_eq!(decode_answer(&encode_answer(&a), 0), Ok(a));
        }
        for n in [1, 7, 8, 9, 2048] {
            let known = Ok(Answer::Known((0..n).map(|i| i % 3 == 0).collect()));
            assert_eq!(decode_answer(&encode_answer(&known), n), Ok(known));
        }
        let many = Ok(Answer::Freed(vec![1; MAX_FREED + 1]));
        assert!(decode_answer(&encode_answer(&many), 0).is_err());
    }
}
