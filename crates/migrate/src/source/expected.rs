//! What a dry run says that a move will take, as far as that is known before.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use drover_net::{Code, ConnectOptions, NetError, connect_any, service};
use drover_teleport::progress::SendEvent;

use super::aim::{DEFAULT_PAUSE, FIRST, for_hypervisor};
use super::report::{Expected, MoveEvent, MoveOptions, OnMove};
use crate::error::MigrateError;
use crate::measure::measure;
use crate::memory::behind_at;
use crate::protocol::{DescribeMachine, MeasureLink};

/// How often the round trip is measured: the shortest counts.
const MEASURES: u32 = 3;

/// Round trips of a pause: the last round and all of the memory are acknowledged, then the machine is handed over.
const PAUSE_ROUND_TRIPS: u32 = 2;

/// What the hypervisors need besides, at both ends: the state of devices, and the switch.
const SWITCH: Duration = Duration::from_millis(20);

/// Adds up what the images would cost.
pub(super) struct Estimated(Arc<AtomicU64>);

impl Estimated {
    /// Counts what `on_event` is told.
    pub fn of(on_event: OnMove) -> (Self, OnMove) {
        let sum = Arc::<AtomicU64>::default();
        let of_images = Arc::clone(&sum);
        let counting: OnMove = Arc::new(move |event| {
            if let MoveEvent::Send(SendEvent::Estimated { wire_bytes, .. }) = &event {
                of_images.fetch_add(*wire_bytes, Ordering::Relaxed);
            }
            on_event(event);
        });
        (Self(sum), counting)
    }

    /// What a move would take that sends these images, and so much memory.
    pub fn expected(
        &self,
        memory_bytes: u64,
        round_trip: Duration,
        measured: Option<u64>,
        options: &MoveOptions,
    ) -> Expected {
        let image_bytes = self.0.load(Ordering::Relaxed);
        let longest = options.max_pause.unwrap_or(DEFAULT_PAUSE);
        let limit = options.send.limit.as_ref();
        let limit = limit.map(|limit| limit.bytes_per_second().max(1));
        let behind = limit.map_or(Duration::ZERO, behind_at);
        let memory = for_hypervisor(FIRST.min(longest), behind).saturating_add(behind);
        let rest = SWITCH + round_trip * PAUSE_ROUND_TRIPS;
        let pause = memory.saturating_add(rest);
        // A measurement is not exact: a little less than the limit is the limit.
        let slower = |rate: &u64| limit.is_none_or(|limit| *rate < limit / 10 * 9);
        let measured = measured.filter(slower).map(|rate| rate.max(1));
        let rate = measured.or(limit);
        Expected {
            image_wire_bytes: image_bytes,
            round_trip_ms: round_trip.as_secs_f64() * 1000.0,
            pause_ms: pause.as_millis() as u64,
            bytes_per_second: rate,
            measured: measured.is_some(),
            seconds: rate.map(|rate| {
                let bytes = image_bytes.saturating_add(memory_bytes);
                bytes as f64 / rate as f64 + pause.as_secs_f64()
            }),
        }
    }
}

/// Bytes that the link carries in a second, within the limit; `None` if the other site, which is of an earlier version, does not
/// measure, or nothing can be said of it.
///
/// # Errors
/// When the connection breaks.
pub(super) async fn link(
    options: &MoveOptions,
    round_trip: Duration,
) -> Result<Option<u64>, MigrateError> {
    let send = &options.send;
    let to = ConnectOptions::named(&send.peer_name);
    let connection = connect_any(&send.addresses, &send.identity, &send.peer, &to).await?;
    let (mut reader, mut writer) = connection.split();
    writer.set_rate(send.limit.clone());
    service::open(&mut writer, &MeasureLink).await?;
    writer.flush().await?;
    match service::read_reply::<MeasureLink>(&mut reader).await {
        Ok(()) => measure(reader, writer, round_trip).await,
        Err(NetError::Refused(refusal)) if refusal.code == Code::Unsupported => Ok(None),
        Err(e) => Err(e.into()),
    }
}

/// How long the other site takes to answer.
///
/// # Errors
/// When it cannot be reached, or does not expect the machine.
pub(super) async fn round_trip(options: &MoveOptions) -> Result<Duration, MigrateError> {
    let send = &options.send;
    let to = ConnectOptions::named(&send.peer_name);
    let ask = DescribeMachine {
        machine: options.name_there.clone(),
        token: None,
        spec: None,
    };
    let mut shortest = Duration::MAX;
    for _ in 0..MEASURES {
        let connection = connect_any(&send.addresses, &send.identity, &send.peer, &to).await?;
        let (mut reader, mut writer) = connection.split();
        let asked = Instant::now();
        service::open(&mut writer, &ask).await?;
        writer.flush().await?;
        match service::read_reply::<DescribeMachine>(&mut reader).await {
            // An earlier version answers that it does not know the question.
            Err(NetError::Refused(refusal)) if refusal.code == Code::Unsupported => {}
            answered => drop(answered?),
        }
        shortest = shortest.min(asked.elapsed());
    }
    Ok(shortest)
}
