//! A session at the source: connects, offers one image after the other, walks them and answers the destination's
//! requests.

mod control;
mod estimate;
mod giving;
mod lane;
mod pool;
mod reading;
mod tally;

use std::sync::Arc;
use std::time::Instant;

use drover_image::Outgoing;
use drover_net::service::{Request, open};
use drover_net::{Code, Frame, FrameWriter, KeepAlive, Refusal, Role, decode, encode, random_id};
use drover_store::profile::Profile;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use self::control::{Control, Frames, broken};
use self::giving::Giver;
pub use self::lane::Lane;
use self::pool::{DataPool, Wait};
pub use self::reading::source_stamp;
use self::reading::{Begun, Walked};
use self::tally::Tally;
use super::{OnEvent, SendItem, SendOptions};
use crate::TeleportError;
use crate::codec::{Have, Need, Want};
use crate::frames::{CLOSE_LIMIT, frame_bytes, read_frames_after, write_frames};
use crate::progress::{Counters, ImageReport, SendEvent, Stages, WireTotals};
use crate::protocol::{
    Delivered, End, Estimate, FlockDelivered, GiveUp, LAYOUT_PART_BYTES, MAX_SESSION_FRAME, Offer,
    kind,
};
use crate::services::{OpenSession, SendFlock};
use crate::source::{Action, Event, FIRST_WINDOW, Source};
use crate::walk::{check_unchanged, read_image};

/// Sends a list of images over as many sessions as necessary.
pub struct Sender {
    items: Vec<SendItem>,
    options: SendOptions,
    on_event: OnEvent,
    counters: Arc<Counters>,
    wire: Arc<WireTotals>,
    stop: watch::Receiver<bool>,
    reports: Vec<ImageReport>,
    /// Number of images delivered or given up.
    done: usize,
    /// Images given up, and why.
    failed: Vec<(String, TeleportError)>,
    /// Whether the destination has accepted the current session.
    open: bool,
    /// When the image being sent was first offered, and the wire counters at that time.
    started: Option<(Instant, u64, u64)>,
    connected: bool,
    /// Increases when blocks become complete: reconnecting is worthwhile only while it does.
    progress: u64,
    /// Blocks of the current image that were not read, in this session.
    unread_blocks: u64,
    /// The flock whose images it sends.
    lane: Option<Lane>,
}

impl Sender {
    /// Creates a sender that is not connected yet.
    pub fn new(
        items: Vec<SendItem>,
        options: SendOptions,
        on_event: OnEvent,
        counters: Arc<Counters>,
        wire: Arc<WireTotals>,
        stop: watch::Receiver<bool>,
    ) -> Self {
        Sender {
            items,
            options,
            on_event,
            counters,
            wire,
            stop,
            reports: Vec::new(),
            done: 0,
            failed: Vec::new(),
            open: false,
            started: None,
            connected: false,
            progress: 0,
            unread_blocks: 0,
            lane: None,
        }
    }

    /// A counter that increases with progress.
    pub fn progress(&self) -> u64 {
        self.progress
    }

    /// Whether a connection was ever established; only then are broken ones retried.
    pub fn was_connected(&self) -> bool {
        self.connected
    }

    /// Whether the error is the destination's refusal of the current image.
    fn is_refusal(&self, error: &TeleportError) -> bool {
        matches!(error, TeleportError::Refused(r) if self.open && r.code != Code::Untrusted)
    }

    /// Whether the error concerns only the current image and there are more images.
    pub fn skips(&self, error: &TeleportError) -> bool {
        let of_image = match error {
            TeleportError::Refused(_) => self.is_refusal(error),
            TeleportError::Failed(_) => self.open,
            TeleportError::SourceChanged(_)
            | TeleportError::Image(_)
            | TeleportError::File { .. } => true,
            _ => false,
        };
        let others = match &self.lane {
            Some(lane) => lane.goes_on,
            None => self.items.len() > 1,
        };
        of_image && others && self.done < self.items.len()
    }

    /// Gives up the current image.
    pub fn skip(&mut self, error: TeleportError) {
        let name = self.items[self.done].name.to_string();
        (self.on_event)(SendEvent::Failed {
            name: name.clone(),
            error: error.to_string(),
        });
        self.failed.push((name, error));
        self.done += 1;
        self.started = None;
    }

    /// The error that ends the send. A destination's refusal does not name the image.
    pub fn final_error(&self, error: TeleportError) -> TeleportError {
        let refused = self.is_refusal(&error);
        match (error, self.items.get(self.done)) {
            (TeleportError::Refused(r), Some(item)) if refused => {
                let message = format!("{}: {}", item.name, r.message);
                TeleportError::Refused(Refusal { message, ..r })
            }
            (error, _) => error,
        }
    }

    /// Whether every image was delivered or given up.
    pub fn is_over(&self) -> bool {
        let waiting = self.lane.as_ref().map_or(0, Lane::waiting);
        self.done >= self.items.len() && waiting == 0
    }

    /// Reports of the delivered images.
    ///
    /// # Errors
    /// When some images were given up.
    pub fn into_reports(self) -> Result<Vec<ImageReport>, TeleportError> {
        let (failed, of) = (self.failed.len(), self.items.len());
        match self.failed.into_iter().next() {
            None => Ok(self.reports),
            Some((name, first)) => Err(TeleportError::Images {
                failed,
                of,
                name,
                first: Box::new(first),
            }),
        }
    }

    /// Makes it send images of a flock.
    pub fn in_lane(&mut self, lane: Lane) {
        self.lane = Some(lane);
    }

    /// The image that it was sending when it ended.
    pub fn current(&self) -> Option<String> {
        Some(self.items.get(self.done)?.name.to_string())
    }

    /// Reports of the images that are complete, and the images that were given up with the reasons.
    pub fn into_parts(self) -> (Vec<ImageReport>, Vec<(String, TeleportError)>) {
        (self.reports, self.failed)
    }

    /// Runs one session: connects and sends the remaining images.
    pub async fn run(&mut self) -> Result<(), TeleportError> {
        self.open = false;
        let waiting = self.lane.as_ref().map_or(0, Lane::waiting);
        let images = (self.items.len() - self.done + waiting) as u32;
        let session = random_id();
        let pool = DataPool::start(
            session,
            self.options.clone(),
            self.counters.clone(),
            self.wire.clone(),
        );
        // The first image is opened and read while the connections are made.
        let first = self.begin();
        let dialled = match &self.lane {
            None => self.dial(OpenSession { images, session }).await,
            Some(lane) => {
                let flock = lane.flock;
                let request = SendFlock {
                    images,
                    session,
                    flock,
                };
                self.dial(request).await
            }
        };
        let (frames, writer) = match dialled {
            Ok(dialled) => dialled,
            Err(e) => {
                pool.close(Wait::ForPeer).await;
                return Err(e);
            }
        };
        let (out, written) = write_frames(writer);
        // The first offer is sent right after the request; the replies to both are read once the source waits for
        // one.
        let mut control = Control {
            frames,
            out,
            written,
            open: false,
        };
        let mut result = self.images(first, &mut control, &pool).await;
        let mut wait = Wait::ForPeer;
        if result.is_ok() {
            result = control.send(kind::GOODBYE, Vec::new()).await;
            // Everything was acknowledged: no need to wait for the peer to close.
            wait = Wait::ForSocket;
        }
        pool.close(wait).await;
        self.open = control.open;
        let Control {
            frames,
            out,
            written,
            ..
        } = control;
        drop(out);
        let _ = tokio::time::timeout(CLOSE_LIMIT, written).await;
        drop(frames);
        result
    }

    /// Opens a connection with `request` as the first request; nothing has been received yet.
    async fn dial(
        &mut self,
        request: impl Request<Reply = ()>,
    ) -> Result<(Frames, FrameWriter), TeleportError> {
        let connection = self.options.connect(&self.wire).await?;
        self.connected = true;
        let (mut reader, mut writer) = connection.split();
        writer.set_rate(self.options.limit.clone());
        reader.set_max_frame(MAX_SESSION_FRAME);
        KeepAlive::default().apply(&mut reader, &mut writer);
        open(&mut writer, &request).await?;
        let frames = read_frames_after(reader, Some(Role::Client));
        Ok((frames, writer))
    }

    /// Opens the next image, if any, and starts to read it.
    fn begin(&mut self) -> Option<JoinHandle<Result<Begun, TeleportError>>> {
        if self.done == self.items.len() {
            self.items.extend(self.lane.as_ref().and_then(Lane::next));
        }
        let item = self.items.get(self.done)?.clone();
        // A destination that accepted it earlier already has some batches, which need not be sent again.
        let ahead = match self.started {
            None => FIRST_WINDOW,
            Some(_) => 0,
        };
        self.counters.reset();
        let counters = self.counters.clone();
        let profiles = self.options.profiles.clone();
        let profiles = profiles.filter(|_| !self.options.dry_run);
        Some(tokio::task::spawn_blocking(move || {
            Begun::open(&item, ahead, counters, profiles.as_ref())
        }))
    }

    async fn images(
        &mut self,
        mut begun: Option<JoinHandle<Result<Begun, TeleportError>>>,
        control: &mut Control,
        pool: &DataPool,
    ) -> Result<(), TeleportError> {
        while let Some(next) = begun.take() {
            let next = next.await.map_err(|_| broken())??;
            let image = next.image.clone();
            let result = self.image(next, control, pool).await;
            if let Err(e) = result {
                // Whatever the error, a change of the image is what to report to the user.
                let changed = tokio::task::spawn_blocking(move || check_unchanged(&image)).await;
                return Err(match changed {
                    Ok(Err(changed)) if !matches!(e, TeleportError::Stopped) => changed,
                    _ => e,
                });
            }
            self.done += 1;
            self.started = None;
            self.progress += 1;
            begun = self.begin();
        }
        Ok(())
    }

    /// Offers one image and drives it to completion.
    async fn image(
        &mut self,
        begun: Begun,
        control: &mut Control,
        pool: &DataPool,
    ) -> Result<(), TeleportError> {
        let item = self.items[self.done].clone();
        let image = begun.image.clone();
        let offer = self.offer(&item, &begun, control).await?;
        pool.set_image(offer.slot, image.clone());
        let mut machine = Source::new(offer.walk_blocks);
        let end = self.drive(&mut machine, &offer, begun, control, pool).await;
        let end = match end {
            Err(e) if e.retryable() => Err(control.why(e).await),
            end => end,
        };
        if let Err(e) = &end
            && !matches!(e, TeleportError::Net(_))
            // A destination that refused the offer already knows.
            && (machine.is_accepted() || !matches!(e, TeleportError::Refused(_) | TeleportError::Failed(_)))
        {
            let discard = matches!(e, TeleportError::SourceChanged(_));
            let give_up = GiveUp {
                discard,
                message: e.to_string(),
            };
            let _ = control.send(kind::GIVE_UP, encode(&give_up)).await;
        }
        match end? {
            Outcome::Delivered(delivered) => {
                let checked = image.clone();
                let same = tokio::task::spawn_blocking(move || check_unchanged(&checked)).await;
                if !matches!(same, Ok(Ok(()))) {
                    let text = "it changed after it had been read; what was delivered is the image as it was before".into();
                    (self.on_event)(SendEvent::Note {
                        path: item.path.clone(),
                        text,
                    });
                }
                self.report(&item, &image, delivered);
            }
            Outcome::Estimated(estimate) => self.estimated(&item, &image, estimate, pool).await?,
        }
        Ok(())
    }

    async fn offer(
        &mut self,
        item: &SendItem,
        begun: &Begun,
        control: &Control,
    ) -> Result<Offer, TeleportError> {
        let image = &*begun.image;
        if self.started.is_none() {
            self.started = Some((Instant::now(), self.wire.sent(), self.wire.received()));
            for text in &image.notes {
                (self.on_event)(SendEvent::Note {
                    path: item.path.clone(),
                    text: text.clone(),
                });
            }
        }
        let layout = image.layout.encode();
        let offer = Offer {
            slot: self.done as u32,
            name: item.name.clone(),
            format: image.format.as_str().into(),
            file_bytes: image.layout.file_len(),
            virtual_bytes: image.virtual_size,
            walk_blocks: image.layout.walk_blocks(),
            layout_bytes: layout.len() as u64,
            stamp: begun.stamp,
            dry_run: self.options.dry_run,
        };
        let payload = encode(&offer);
        Counters::add(
            &self.counters.header_bytes,
            frame_bytes(payload.len()) + frame_bytes(layout.len()),
        );
        if let Some(generations) = &begun.generations {
            let generations = generations.to_vec();
            Counters::add(&self.counters.header_bytes, frame_bytes(generations.len()));
            control.send(kind::GENERATIONS, generations).await?;
        }
        if let Some(likeness) = &begun.likeness {
            Counters::add(&self.counters.header_bytes, frame_bytes(likeness.len()));
            control.send(kind::LIKENESS, likeness.clone()).await?;
        }
        // One of another disk, as in an image that is sent as a mere file, is of no use there.
        let of_disk = |profile: &&Arc<Profile>| profile.disk_bytes() == image.virtual_size;
        let profile = begun.profile.as_ref().filter(of_disk);
        if let Some(profile) = profile.filter(|_| !self.options.dry_run) {
            for part in profile.encode().chunks(LAYOUT_PART_BYTES) {
                Counters::add(&self.counters.header_bytes, frame_bytes(part.len()));
                control.send(kind::PROFILE, part.to_vec()).await?;
            }
        }
        control.send(kind::OFFER, payload).await?;
        for part in layout.chunks(LAYOUT_PART_BYTES) {
            control.send(kind::LAYOUT, part.to_vec()).await?;
        }
        Ok(offer)
    }

    async fn drive(
        &mut self,
        machine: &mut Source,
        offer: &Offer,
        begun: Begun,
        control: &mut Control,
        pool: &DataPool,
    ) -> Result<Outcome, TeleportError> {
        let Begun {
            image,
            walk_to,
            mut walked,
            have,
            generations,
            ..
        } = begun;
        let giver = Giver::start(
            offer.slot,
            image.clone(),
            control.out.clone(),
            pool.needs(),
            self.counters.clone(),
        );
        let mut walking = true;
        let mut actions = Vec::new();
        let mut stop = self.stop.clone();
        let mut outgoing: std::collections::VecDeque<Frame> = Default::default();
        let mut tally = Tally::default();
        self.unread_blocks = 0;
        loop {
            for action in actions.drain(..) {
                match action {
                    Action::WalkTo(batch) => drop(walk_to.send_replace(batch)),
                    Action::Batch(payload) => {
                        Counters::add(&self.counters.digest_bytes, frame_bytes(payload.len()));
                        outgoing.push_back(Frame::new(kind::BATCH, payload));
                    }
                    Action::Skip(index) => {
                        let payload = index.to_le_bytes().to_vec();
                        Counters::add(&self.counters.digest_bytes, frame_bytes(payload.len()));
                        outgoing.push_back(Frame::new(kind::SKIPPED, payload));
                    }
                    Action::Literals(runs) => {
                        Counters::add(&self.counters.needed_blocks, runs.count());
                        if !offer.dry_run {
                            pool.need(&runs);
                        } else {
                            pool.sample(&runs);
                        }
                    }
                    Action::Give(want) => giver.give(&want)?,
                    Action::GiveQueued(want) => giver.hurry(&want, pool.take_back(&want.runs))?,
                    Action::End(digest) => {
                        let image = image.clone();
                        let same =
                            tokio::task::spawn_blocking(move || check_unchanged(&image)).await;
                        same.map_err(|_| broken())??;
                        outgoing.push_back(match digest {
                            Some(digest) => Frame::new(kind::END, encode(&End { digest })),
                            None => Frame::new(kind::END_UNREAD, Vec::new()),
                        });
                    }
                    Action::Done(delivered) => return Ok(Outcome::Delivered(delivered)),
                }
            }
            self.note_progress(machine.done_blocks());
            let event = tokio::select! {
                biased;
                _ = stop.wait_for(|s| *s) => return Err(TeleportError::Stopped),
                failed = pool.failed() => return Err(failed),
                failed = giver.failed() => return Err(failed),
                frame = control.next() => {
                    match self.event_of(frame?)? {
                        Heard::Event(Event::Accepted(accept)) => {
                            (self.on_event)(SendEvent::Started {
                                name: offer.name.to_string(),
                                walk_blocks: offer.walk_blocks,
                                size_bytes: offer.file_bytes,
                                data_bytes: image.layout.covered_bytes(),
                                resumed_blocks: accept.resumed_blocks,
                            });
                            self.progress += accept.resumed_blocks;
                            Event::Accepted(accept)
                        }
                        Heard::Event(event) => event,
                        Heard::Have(batches) => {
                            let too_late = generations.is_none() || machine.is_accepted();
                            if too_late || have.set(batches).is_err() {
                                let text = "the destination has batches that it was not asked about";
                                return Err(TeleportError::Protocol(text.into()));
                            }
                            continue;
                        }
                        Heard::Estimate(estimate) => return Ok(Outcome::Estimated(estimate)),
                    }
                }
                // The walk pauses while a frame waits for the socket: this is the backpressure of a slow link.
                room = pool.first.reserve(), if !outgoing.is_empty() => {
                    if let (Ok(room), Some(frame)) = (room, outgoing.pop_front()) {
                        room.send(frame);
                    } else {
                        return Err(broken());
                    }
                    continue;
                }
                next = async {
                    pool.room().await;
                    walked.recv().await
                }, if walking && outgoing.is_empty() => match next {
                    Some(Ok(Walked::Batch { index, data, frame })) => {
                        tally.walked(index, data);
                        Event::Walked { index, frame }
                    }
                    Some(Ok(Walked::Skipped { index, blocks })) => {
                        if self.unread_blocks == 0 {
                            (self.on_event)(SendEvent::Skips {
                                name: offer.name.to_string(),
                            });
                        }
                        self.unread_blocks += blocks;
                        Event::Skipped(index)
                    }
                    Some(Ok(Walked::End(digest))) => Event::WalkEnded(digest),
                    Some(Err(e)) => return Err(e),
                    // The walk is complete; only frames from the destination remain.
                    None => {
                        walking = false;
                        continue;
                    }
                },
            };
            tally.heard(&event, &self.counters);
            machine.handle(event, &mut actions)?;
        }
    }

    fn event_of(&self, frame: Frame) -> Result<Heard, TeleportError> {
        if frame.kind == kind::ACCEPT {
            return Ok(Heard::Event(Event::Accepted(decode(&frame.payload)?)));
        }
        let bytes = frame_bytes(frame.payload.len());
        Counters::add(&self.counters.plan_bytes, bytes);
        Ok(Heard::Event(match frame.kind {
            kind::HAVE => return Ok(Heard::Have(Have::decode(&frame.payload)?)),
            kind::NEED => Event::Need(Need::decode(&frame.payload)?),
            kind::WANT => Event::Want(Want::decode(&frame.payload)?),
            kind::HURRY => Event::Hurry(Want::decode(&frame.payload)?),
            kind::ACK => {
                let index = frame.payload.as_ref().try_into().map(u64::from_le_bytes);
                Event::Ack(
                    index.map_err(|_| {
                        TeleportError::Protocol("a malformed acknowledgement".into())
                    })?,
                )
            }
            kind::DELIVERED if self.lane.is_none() => {
                Event::Delivered(decode::<Delivered>(&frame.payload)?)
            }
            kind::FLOCK_DELIVERED if self.lane.is_some() => {
                Event::Delivered(decode::<FlockDelivered>(&frame.payload)?.into())
            }
            kind::ESTIMATE => return Ok(Heard::Estimate(decode(&frame.payload)?)),
            other => {
                return Err(TeleportError::Protocol(format!(
                    "frame {other:#04x} from the destination"
                )));
            }
        }))
    }

    fn note_progress(&mut self, done_blocks: u64) {
        let before = Counters::get(&self.counters.done_blocks);
        if done_blocks > before {
            Counters::add(&self.counters.done_blocks, done_blocks - before);
            self.progress += done_blocks - before;
        }
    }

    fn report(&mut self, item: &SendItem, image: &Outgoing, delivered: Delivered) {
        let (start, sent, received) = self.started.unwrap_or((Instant::now(), 0, 0));
        let report = ImageReport {
            name: item.name.to_string(),
            digest: delivered.digest,
            size_bytes: image.layout.file_len(),
            data_bytes: image.layout.covered_bytes(),
            wire_sent_bytes: self.wire.sent() - sent,
            wire_received_bytes: self.wire.received() - received,
            matched_blocks: delivered.matched_blocks,
            sent_blocks: delivered.sent_blocks,
            zero_blocks: delivered.zero_blocks,
            resumed_blocks: delivered.resumed_blocks,
            unread_blocks: self.unread_blocks,
            origins: delivered.origins,
            waits: delivered.waits,
            matched: delivered.matched,
            wire: self.counters.wire(),
            seconds: start.elapsed().as_secs_f64(),
            stages: Stages {
                source: self.counters.stages.times(),
                destination: delivered.stages,
            },
        };
        (self.on_event)(SendEvent::Delivered(Box::new(report.clone())));
        self.reports.push(report);
    }

    async fn estimated(
        &self,
        item: &SendItem,
        image: &Arc<Outgoing>,
        estimate: Estimate,
        pool: &DataPool,
    ) -> Result<(), TeleportError> {
        let (image, stop, blocks) = (image.clone(), self.stop.clone(), pool.sampled());
        let total = estimate.sent_blocks;
        let sampled = tokio::task::spawn_blocking(move || {
            let read = |block, out: &mut [u8]| read_image(&image, block, out).is_ok();
            estimate::literal_bytes(&blocks, total, read, || *stop.borrow())
        });
        let ended = |e: tokio::task::JoinError| TeleportError::Failed(e.to_string());
        let data = sampled.await.map_err(ended)?;
        let data = data.ok_or(TeleportError::Stopped)?;
        let wire = self.counters.wire();
        let wire_bytes = wire.digests + wire.header + data;
        (self.on_event)(SendEvent::Estimated {
            name: item.name.to_string(),
            estimate,
            wire_bytes,
        });
        Ok(())
    }
}

/// How the transfer of an image ended.
enum Outcome {
    Delivered(Delivered),
    Estimated(Estimate),
}

enum Heard {
    Event(Event),
    Have(Have),
    Estimate(Estimate),
}
