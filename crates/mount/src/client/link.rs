//! Connections to the site: made, watched, made again.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use drover_core::DeviceError;
use drover_device::remote::{Chunks, Epoch, Link, Staged};
use drover_net::service::{self, reply_in};
use drover_net::{Backoff, NetError, Refusal, Role, hear_hello};
use drover_store::lease::{Access, Identity};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::timeout;
use tracing::{debug, info};

use super::presence::Pages;
use super::scheduler::ChunksAnswer;
use super::tell::ChunksTask;
use super::{CLOSE_WAIT, ConnectError, Connected, Connector, Inner, Options, Reply};
use crate::MountError;
use crate::protocol::{
    Answer, Ask, LaneKind, MAX_MOUNT_FRAME, MAX_RUNS, Open, Opened, check_shape, decode_message,
    device_error, encode_message, kind,
};
use crate::server::KEEP_ALIVE;

/// The first and the longest pause between attempts to connect.
const PAUSES: (Duration, Duration) = (Duration::from_millis(250), Duration::from_secs(10));

/// How long the site may take to open a lane.
const OPEN_LIMIT: Duration = Duration::from_secs(30);

/// A lane that the site has opened.
pub struct Lane {
    number: usize,
    kind: LaneKind,
    connected: Connected,
    opened: Opened,
}

type Joining = JoinSet<Result<Lane, ConnectError>>;

/// The first link, of which the front lane is open and the others are being opened.
pub struct First {
    /// What the site said.
    pub opened: Opened,
    link: u64,
    front: Lane,
    others: Joining,
    /// What was asked with the front lane's open.
    asked: Vec<Ask>,
}

/// The number of the link after `before`: the time, so that it also grows when a program takes up the mount of one
/// before it.
fn next_link(before: u64) -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let micros = since.map_or(0, |since| since.as_micros());
    u64::try_from(micros).unwrap_or(0).max(before + 1)
}

/// Whether what the site said can be used.
pub fn check(opened: &Opened, options: &Options) -> Result<(), String> {
    check_shape(opened.shape())?;
    match opened.chunk == options.chunk {
        true => Ok(()),
        false => Err(format!("chunks of {} bytes", opened.chunk)),
    }
}

/// Makes the first link.
pub async fn first(connector: &Arc<dyn Connector>, options: &Options) -> Result<First, MountError> {
    let mut backoff = Backoff::new(PAUSES.0, PAUSES.1);
    let mut link = 0;
    let mut last = None;
    let mut expected = options.expected;
    if expected.is_none() {
        expected = options.known.as_ref().map(|known| known.identity);
    }
    let asked = options.early();
    let tries = async {
        loop {
            link = next_link(link);
            let error = match attempt(connector, options, expected, link, &asked).await {
                Ok((front, others)) => {
                    check(&front.opened, options).map_err(|what| MountError::Protocol {
                        peer: front.connected.reader.peer_text().to_owned(),
                        what,
                    })?;
                    return Ok(First {
                        opened: front.opened.clone(),
                        link,
                        front,
                        others,
                        asked: asked.clone(),
                    });
                }
                Err(error) => error,
            };
            if error.fatal {
                return Err(match error.code {
                    Some(code) => MountError::Refused(Refusal::new(code, error.message)),
                    None => MountError::Denied(error.message),
                });
            }
            debug!(image = %options.image, %error, "no link yet");
            last = Some(error.message);
            tokio::time::sleep(backoff.next_delay()).await;
        }
    };
    match timeout(options.first_contact, tries).await {
        Ok(made) => made,
        Err(_) => Err(MountError::Unreachable(last.unwrap_or_else(|| {
            format!("no answer within {:?}", options.first_contact)
        }))),
    }
}

/// Begins to open all lanes and returns when the front one is open.
async fn attempt(
    connector: &Arc<dyn Connector>,
    options: &Options,
    expected: Option<Identity>,
    link: u64,
    asks: &[Ask],
) -> Result<(Lane, Joining), ConnectError> {
    let mut joining = Joining::new();
    for (number, lane) in options.lanes().into_iter().enumerate() {
        let open = Open {
            mount: options.mount,
            lane,
            link,
            image: options.image.clone(),
            access: options.access,
            chunk: options.chunk,
            expected,
            note: cut(&options.note, crate::protocol::MAX_NAME),
        };
        let connector = connector.clone();
        let asks = match lane {
            LaneKind::Front => asks.iter().map(encode_message).collect(),
            _ => Vec::new(),
        };
        joining.spawn(async move {
            let opened = open_lane(connector.as_ref(), &open, asks);
            let (connected, opened) = timeout(OPEN_LIMIT, opened).await.map_err(|_| {
                let limit = OPEN_LIMIT;
                ConnectError::lost(format!("the site did not open the device within {limit:?}"))
            })??;
            Ok(Lane {
                number,
                kind: lane,
                connected,
                opened,
            })
        });
    }
    let mut early = Vec::new();
    while let Some(joined) = joining.join_next().await {
        let lane = joined.map_err(|e| ConnectError::lost(e.to_string()))??;
        if lane.kind == LaneKind::Front {
            for lane in early {
                joining.spawn(std::future::ready(Ok(lane)));
            }
            return Ok((lane, joining));
        }
        early.push(lane);
    }
    Err(ConnectError::fatal("no lane was opened"))
}

async fn open_lane(
    connector: &dyn Connector,
    open: &Open,
    asks: Vec<Vec<u8>>,
) -> Result<(Connected, Opened), ConnectError> {
    let connection = connector.connect().await?;
    let wire = connection.wire();
    let (mut reader, mut writer) = connection.split();
    reader.set_max_frame(MAX_MOUNT_FRAME);
    writer.set_max_frame(MAX_MOUNT_FRAME);
    KEEP_ALIVE.apply(&mut reader, &mut writer);
    let greeted = async {
        // Everything in one flight: over a WAN each round trip is seen.
        service::open(&mut writer, open).await?;
        for ask in &asks {
            writer.send(kind::ASK, ask).await?;
        }
        writer.flush().await?;
        hear_hello(&mut reader, Role::Client).await
    };
    // What greets wrongly, unlike what breaks a link that is up, may be something that stands there only while the site
    // does not.
    greeted.await.map_err(|e| ConnectError {
        fatal: e.refused(),
        ..ConnectError::lost(e.to_string())
    })?;
    let frame = reader.next().await?;
    let peer = reader.peer_text();
    let Some(frame) = frame else {
        return Err(ConnectError::lost(format!("{peer} closed the connection")));
    };
    let opened = reply_in::<Open>(&frame, peer).map_err(|e| match e {
        NetError::Refused(refusal) => ConnectError {
            fatal: !refusal.retry,
            message: refusal.message,
            code: Some(refusal.code),
        },
        e => ConnectError::fatal(format!("{peer} broke the protocol of mounts: {e}")),
    })?;
    let connected = Connected {
        reader,
        writer,
        wire,
    };
    Ok((connected, opened))
}

/// Why a link ended.
enum Ended {
    /// Nobody wants it any more.
    Stopped,
    /// It may come back.
    Lost(String),
    /// It will not.
    Gone(DeviceError),
}

/// A link that is up: lanes that run, and lanes that are still being opened.
pub struct Up {
    link: u64,
    joining: Joining,
    running: JoinSet<MountError>,
}

impl Up {
    /// The front lane is open: that is the link.
    fn begin(
        inner: &Arc<Inner>,
        link: u64,
        front: Lane,
        joining: Joining,
        asked: Vec<Ask>,
    ) -> Self {
        let mut running = JoinSet::new();
        inner.lane_up(front, asked, &mut running);
        inner.up();
        Self {
            link,
            joining,
            running,
        }
    }

    /// The first link.
    pub fn first(inner: &Arc<Inner>, first: First) -> Self {
        Self::begin(inner, first.link, first.front, first.others, first.asked)
    }
}

/// Keeps the link up until the client is closed.
pub async fn keep(inner: Arc<Inner>, connector: Arc<dyn Connector>, first: Option<Up>) {
    let mut backoff = Backoff::new(PAUSES.0, PAUSES.1);
    let mut link = first.as_ref().map_or(0, |up| up.link);
    let mut ready = first;
    let mut stop = inner.stop.subscribe();
    loop {
        let ended = match ready.take() {
            Some(up) => {
                let ended = serve(&inner, up).await;
                backoff.reset();
                ended
            }
            None => {
                link = next_link(link);
                let expected = Identity {
                    epoch: inner.committed.load(Ordering::Acquire),
                    ..inner.opened.identity
                };
                let attempt = attempt(&connector, &inner.options, Some(expected), link, &[]);
                let attempt = tokio::select! {
                    attempt = attempt => attempt,
                    _ = stop.wait_for(|stop| *stop) => return,
                };
                match attempt {
                    Ok((front, joining)) => match inner.same_image(&front.opened, true) {
                        Ok(()) => {
                            ready = Some(Up::begin(&inner, link, front, joining, Vec::new()));
                            continue;
                        }
                        Err(error) => {
                            inner.give_back(front).await;
                            Ended::Gone(error)
                        }
                    },
                    Err(error) if error.fatal => Ended::Gone(DeviceError::Io(Arc::new(
                        std::io::Error::other(error.message),
                    ))),
                    Err(error) => Ended::Lost(error.message),
                }
            }
        };
        match ended {
            Ended::Stopped => return,
            Ended::Gone(error) => {
                info!(image = %inner.options.image, %error, "the mount has ended");
                inner.end(error);
                return;
            }
            Ended::Lost(why) => inner.down(why),
        }
        tokio::select! {
            () = tokio::time::sleep(backoff.next_delay()) => {}
            _ = stop.wait_for(|stop| *stop) => return,
        }
    }
}

/// Runs a link until it ends.
async fn serve(inner: &Arc<Inner>, up: Up) -> Ended {
    let Up {
        mut joining,
        mut running,
        ..
    } = up;
    let mut stop = inner.stop.subscribe();
    let mut cut = inner.cut.subscribe();
    let ups = inner.state.lock().ups;
    loop {
        tokio::select! {
            Some(joined) = joining.join_next() => match joined {
                Ok(Ok(lane)) => {
                    if let Err(error) = inner.same_image(&lane.opened, false) {
                        return Ended::Gone(error);
                    }
                    inner.lane_up(lane, Vec::new(), &mut running);
                    inner.issue_soon();
                }
                Ok(Err(error)) if error.fatal => {
                    return Ended::Gone(DeviceError::Io(Arc::new(std::io::Error::other(error.message))));
                }
                Ok(Err(error)) => return Ended::Lost(error.message),
                Err(error) => return Ended::Lost(error.to_string()),
            },
            Some(ended) = running.join_next() => {
                let why = match ended {
                    Ok(error) => error,
                    Err(error) => MountError::Unreachable(error.to_string()),
                };
                return match why {
                    MountError::Refused(refusal) if !refusal.retry => {
                        Ended::Gone(device_error(refusal, 0, 0, inner.opened.size))
                    }
                    why => Ended::Lost(why.to_string()),
                };
            }
            _ = cut.wait_for(|cut| *cut >= ups) => {
                return Ended::Lost("the site gave no answer".into());
            }
            _ = stop.wait_for(|stop| *stop) => return Ended::Stopped,
        }
    }
}

impl Inner {
    /// Whether what a lane opened is what was mounted.
    fn same_image(&self, opened: &Opened, first_lane: bool) -> Result<(), DeviceError> {
        let (ours, theirs) = (&self.opened, opened);
        let image = self.options.image.as_str();
        let gone = |text: String| Err(DeviceError::Io(Arc::new(std::io::Error::other(text))));
        if ours.shape() != theirs.shape() || ours.identity.digest != theirs.identity.digest {
            return gone(format!(
                "{image} is another image at the site now; unmount it and mount it anew"
            ));
        }
        let (before, now) = (ours.identity, theirs.identity);
        let known = self.committed.load(Ordering::Acquire);
        match self.options.access {
            Access::ReadOnly if before != now => gone(format!(
                "{image} was written by another mount meanwhile; unmount it and mount it anew"
            )),
            Access::ReadWrite if before.edition != now.edition => gone(format!(
                "{image} was written by another mount meanwhile; unmount it and mount it anew"
            )),
            Access::ReadWrite if first_lane && now.epoch < known => gone(format!(
                "{image} is at epoch {} at the site, which had confirmed epoch {known}: it has lost writes",
                now.epoch
            )),
            _ => {
                if first_lane {
                    self.committed.fetch_max(now.epoch, Ordering::AcqRel);
                }
                Ok(())
            }
        }
    }

    /// Gives back what the site granted over another image than the one that was mounted: nothing of this mount can be
    /// pushed there.
    async fn give_back(&self, lane: Lane) {
        if lane.opened.identity.digest == self.opened.identity.digest {
            return;
        }
        let Connected {
            mut reader,
            mut writer,
            ..
        } = lane.connected;
        let told = async {
            let close = encode_message(&Ask::Close { id: 1 });
            writer.send(kind::ASK, &close).await.ok()?;
            writer.flush().await.ok()?;
            let frame = reader.next().await.ok()??;
            let answer = decode_message::<Answer>(&frame.payload).ok()?.head;
            (answer == Answer::Done { id: 1 }).then_some(())
        };
        if let Ok(Some(())) = timeout(CLOSE_WAIT, told).await {
            self.released.store(true, Ordering::Release);
        }
    }

    /// A lane is up, on which `asked` was sent with its open.
    fn lane_up(self: &Arc<Self>, lane: Lane, asked: Vec<Ask>, running: &mut JoinSet<MountError>) {
        let (way, asks) = mpsc::unbounded_channel();
        let mut state = self.state.lock();
        let credit = state.scheduler.lane_up(lane.number, lane.kind);
        self.note_early(&mut state, lane.number, asked);
        if state.lanes.len() <= lane.number {
            state.lanes.resize_with(lane.number + 1, || None);
        }
        state.lanes[lane.number] = Some(way);
        state.send(lane.number, credit.into(), Bytes::new());
        state.wires.push(lane.connected.wire.clone());
        drop(state);
        let inner = self.clone();
        running.spawn(async move { inner.run_lane(lane, asks).await });
    }

    /// Writes down what was asked with the open. What lies outside the device is answered with an error that nobody hears.
    fn note_early(&self, state: &mut super::State, lane: usize, asked: Vec<Ask>) {
        let deadline = self.now() + self.options.give_up;
        let mut early = Vec::new();
        for ask in asked {
            let Ask::Read { id, first, .. } = ask else {
                continue;
            };
            state.scheduler.used(id);
            if first >= self.opened.shape().chunks() || early.contains(&first) {
                continue;
            }
            early.push(first);
            let job = super::Job {
                ask,
                body: Bytes::new(),
                deadline,
                again: false,
                to: Reply::Chunks,
            };
            state.scheduler.was_asked(lane, id, job);
        }
        if !early.is_empty() {
            *self.early.lock() = super::Early::new(early);
        }
    }

    fn up(self: &Arc<Self>) {
        let mut state = self.state.lock();
        state.ups += 1;
        state.link = Link::Up(state.ups);
        self.tell_link(&state);
        drop(state);
        self.issue_soon();
    }

    fn issue_soon(self: &Arc<Self>) {
        let inner = self.clone();
        // By a thread of ours: it calls the near side.
        self.teller.call(move || inner.pump());
    }

    fn down(&self, why: String) {
        let mut state = self.state.lock();
        if matches!(state.link, Link::Gone(_)) {
            return;
        }
        let was_up = matches!(state.link, Link::Up(_));
        state.link = Link::Down(why.clone());
        if was_up {
            info!(image = %self.options.image, why, "the link is down");
            self.tell_link(&state);
        }
        state.lanes.clear();
        for wire in std::mem::take(&mut state.wires) {
            self.received.fetch_add(wire.received(), Ordering::Relaxed);
            self.sent.fetch_add(wire.sent(), Ordering::Relaxed);
        }
        let lost = state.scheduler.link_down();
        drop(state);
        let error = DeviceError::Unavailable(why);
        for job in lost {
            let runs: Vec<Chunks> = job.chunks().into_iter().collect();
            self.fail(job, &runs, &error);
        }
    }

    async fn run_lane(
        self: Arc<Self>,
        lane: Lane,
        mut asks: mpsc::UnboundedReceiver<(Ask, Bytes)>,
    ) -> MountError {
        let Connected {
            mut reader,
            mut writer,
            ..
        } = lane.connected;
        let number = lane.number;
        let write = async {
            loop {
                let next = tokio::select! {
                    next = asks.recv() => next,
                    error = writer.ping_when_idle(KEEP_ALIVE.ping_every) => return Err(error),
                };
                let Some(mut next) = next else {
                    let _ = writer.finish().await;
                    return Ok(());
                };
                loop {
                    let head = encode_message(&next.0);
                    writer.send_vectored(kind::ASK, &[&head, &next.1]).await?;
                    match asks.try_recv() {
                        Ok(more) => next = more,
                        Err(_) => break,
                    }
                }
                writer.flush().await?;
            }
        };
        let read = async {
            loop {
                let Some(frame) = reader.next().await? else {
                    return Err(MountError::Unreachable(format!(
                        "{} closed the connection",
                        reader.peer_text()
                    )));
                };
                self.take(number, frame)
                    .map_err(|refusal| MountError::Protocol {
                        peer: reader.peer_text().to_owned(),
                        what: refusal.message,
                    })?;
            }
        };
        let result: Result<(), MountError> = tokio::select! {
            result = write => result.map_err(MountError::Net),
            result = read => result,
        };
        match result {
            Ok(()) => MountError::Unreachable("the link is being closed".into()),
            Err(error) => error,
        }
    }

    /// Does with a frame what it asks for.
    fn take(self: &Arc<Self>, lane: usize, frame: drover_net::Frame) -> Result<(), Refusal> {
        use drover_net::Code::Protocol;
        if frame.kind != kind::ANSWER {
            return Err(Refusal::new(Protocol, "a frame that is no answer"));
        }
        let wire = frame.payload.len() as u64;
        let message = decode_message::<Answer>(&frame.payload)?;
        let now = self.now();
        if let Answer::Chunks {
            id,
            first,
            count,
            zeros,
            coding,
            echo,
            last,
        } = message.head
        {
            let about = ChunksAnswer {
                id,
                first,
                count,
                wire,
                echo,
                last,
            };
            // Looked at before it is believed. What waits to be verified weighs no more than what was asked for.
            let shape = self.opened.shape();
            let (_, length) = crate::protocol::pieces(shape, first, count, &zeros)?;
            if message.body.len() > length {
                return Err(Refusal::new(
                    Protocol,
                    "chunks that are longer than they are",
                ));
            }
            let mut state = self.state.lock();
            let background = state.scheduler.is_background(id);
            state.scheduler.received(lane, wire);
            let taken = state.scheduler.chunks(lane, &about, now)?;
            state.credit(now);
            if let Some(taken) = taken {
                let task = ChunksTask {
                    first,
                    count,
                    zeros,
                    coding,
                    body: message.body,
                    again: taken.again,
                };
                // Under the lock, so that who wants them from now on finds them.
                self.teller.chunks(task, background);
            }
            // The threads may be behind with their disk: the link has room nevertheless.
            let room = state.scheduler.room().is_some();
            drop(state);
            if room && !self.pumping.swap(true, Ordering::AcqRel) {
                let inner = self.clone();
                self.teller.call(move || {
                    inner.pumping.store(false, Ordering::Release);
                    inner.pump();
                });
            }
            return Ok(());
        }
        {
            let mut state = self.state.lock();
            state.scheduler.received(lane, wire);
            state.credit(now);
            if let Answer::Arrived { bytes, at } = message.head {
                state.scheduler.arrived(lane, bytes, at, now)?;
                drop(state);
                self.issue();
                return Ok(());
            }
        }
        if let Answer::Error { id: 0, refusal } = message.head {
            if !refusal.retry {
                // Said about the lane: nothing of the mount will be served any more.
                let error = device_error(refusal.tidy(), 0, 0, self.opened.size);
                self.end(error);
                return Ok(());
            }
            return Err(refusal);
        }
        let ended = {
            let mut state = self.state.lock();
            let ended = state.scheduler.end(lane, message.head.id(), now)?;
            if let Some((job, _)) = &ended
                && matches!(job.ask, Ask::Write { .. } | Ask::Zero { .. })
            {
                state.scheduler.pushed(now + self.options.give_up);
            }
            ended
        };
        if let Some((job, runs)) = ended {
            self.answered(job, &runs, message.head, message.body);
        }
        self.issue();
        Ok(())
    }

    fn answered(
        self: &Arc<Self>,
        job: super::Job<Reply>,
        runs: &[Chunks],
        head: Answer,
        body: Bytes,
    ) {
        if body.len() > most_body(&job.ask) {
            let text = "the site gave a longer answer than was asked for";
            self.fail(job, runs, &DeviceError::Corrupt(text.into()));
            return;
        }
        if let Answer::Error { refusal, .. } = head {
            // Its text as short as if this side had written it.
            let refusal = refusal.tidy();
            let (offset, length) = range(&job.ask, self.opened.chunk);
            let error = device_error(refusal, offset, length, self.opened.size);
            self.fail(job, runs, &error);
            return;
        }
        let fits = match (&job.to, &head) {
            (Reply::Direct(_), _) => true,
            (Reply::Presence(..), Answer::Presence { .. }) => true,
            (Reply::Staged(_), Answer::Staged { runs, end, .. }) => {
                are_runs(runs, *end, self.opened.size)
            }
            (Reply::Done(_), Answer::Committed { epoch, .. }) if matches!(job.ask, Ask::Commit { epoch: asked, .. } if asked == *epoch) =>
            {
                self.committed.fetch_max(*epoch, Ordering::AcqRel);
                true
            }
            (Reply::Done(_), Answer::Done { .. }) => {
                if matches!(job.ask, Ask::Close { .. }) {
                    self.released.store(true, Ordering::Release);
                }
                !matches!(job.ask, Ask::Commit { .. })
            }
            _ => false,
        };
        if !fits {
            let error = DeviceError::Corrupt("the site gave another kind of answer".into());
            self.fail(job, runs, &error);
            return;
        }
        match (job.to, head) {
            (Reply::Direct(say), head) => {
                let _ = say.send(Ok((head, body)));
            }
            (Reply::Done(done), _) => self.teller.call(move || done(Ok(()))),
            (
                Reply::Staged(done),
                Answer::Staged {
                    epoch, runs, end, ..
                },
            ) => {
                let staged = Staged {
                    epoch: Epoch(epoch),
                    runs,
                    end,
                };
                self.teller.call(move || done(Ok(staged)));
            }
            (Reply::Presence(done, pages), Answer::Presence { runs, end, .. }) => {
                self.presence_page(done, pages, &runs, end);
            }
            _ => {}
        }
    }

    /// A page of what is zero: asks for the next, or tells.
    fn presence_page(
        self: &Arc<Self>,
        done: drover_device::remote::PresenceDone,
        mut pages: Pages,
        runs: &[(u64, u32)],
        end: u64,
    ) {
        let Some(rest) = pages.page(runs, end) else {
            self.teller.call(move || done(Ok(pages.found())));
            return;
        };
        let ask = Ask::Presence {
            id: 0,
            first: rest.first,
            count: rest.count,
        };
        self.ask(ask, Bytes::new(), Reply::Presence(done, pages));
    }
}

/// The longest body that the answer to a request may have: packed it is shorter. ([`Ask::Read`] is looked at apart.)
fn most_body(ask: &Ask) -> usize {
    match ask {
        Ask::DirectRead { length, .. } => *length as usize,
        _ => 0,
    }
}

/// Whether runs of an answer are what they should be: in order, apart, up to `end`, inside the device.
fn are_runs(runs: &[(u64, u64)], end: u64, size: u64) -> bool {
    let mut at = 0;
    runs.len() <= MAX_RUNS
        && end <= size
        && runs.iter().all(|(offset, length)| {
            let fine = *offset >= at && *length > 0;
            at = offset.saturating_add(*length);
            fine && at <= end
        })
}

/// The bytes that a request is about.
fn range(ask: &Ask, chunk: u32) -> (u64, u64) {
    match *ask {
        Ask::Read { first, count, .. } => (
            first.saturating_mul(u64::from(chunk)),
            u64::from(count) * u64::from(chunk),
        ),
        Ask::Write { offset, length, .. }
        | Ask::DirectRead { offset, length, .. }
        | Ask::DirectWrite { offset, length, .. } => (offset, u64::from(length)),
        Ask::Zero { offset, length, .. }
        | Ask::DirectZero { offset, length, .. }
        | Ask::DirectTrim { offset, length, .. }
        | Ask::DirectExtents { offset, length, .. } => (offset, length),
        _ => (0, 0),
    }
}

fn cut(text: &str, most: usize) -> String {
    let end = (0..=most.min(text.len()))
        .rev()
        .find(|&at| text.is_char_boundary(at));
    text[..end.unwrap_or(0)].to_owned()
}
