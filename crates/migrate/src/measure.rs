//! How much the link to a site carries: it is sent as much as it takes for a moment, and answers each frame.

use std::time::{Duration, Instant};

use drover_net::{FrameReader, FrameWriter, NetError};

use crate::error::MigrateError;
use crate::protocol::{KEEP_ALIVE, kind};

/// Upper bound on the bytes of a measurement.
pub const MAX_BYTES: u64 = 32 << 20;

/// Bytes of a frame.
const FRAME: usize = 16 << 10;

/// Upper bound on frames.
const MAX_FRAMES: usize = (MAX_BYTES / FRAME as u64) as usize;

/// How long it takes, unless the link is so fast that all has been sent before; and in round trips: a connection begins slowly.
const LONG_ENOUGH: Duration = Duration::from_millis(1500);
const ROUND_TRIPS: u32 = 25;

/// How long at most.
const LONGEST: Duration = Duration::from_secs(6);

/// How many answers tell.
const ENOUGH: usize = 8;

/// Takes what is sent, and answers.
pub(crate) async fn answer(
    mut reader: FrameReader,
    mut writer: FrameWriter,
) -> Result<(), MigrateError> {
    KEEP_ALIVE.apply(&mut reader, &mut writer);
    reader.set_max_frame(FRAME);
    for _ in 0..MAX_FRAMES {
        let frame = match reader.next().await {
            // The other end hangs up in the middle of what it sends.
            Ok(None) | Err(NetError::Truncated { .. }) => return Ok(()),
            frame => frame?,
        };
        if frame.is_none_or(|frame| frame.kind != kind::MEASURE) {
            return Err(MigrateError::Protocol("a measurement"));
        }
        writer.send(kind::MEASURED, &[]).await?;
        writer.flush().await?;
    }
    // No more is wanted.
    reader.next().await?;
    Ok(())
}

/// Sends as much as the link takes; bytes per second, `None` if that cannot be said.
pub(crate) async fn measure(
    mut reader: FrameReader,
    mut writer: FrameWriter,
    round_trip: Duration,
) -> Result<Option<u64>, MigrateError> {
    KEEP_ALIVE.apply(&mut reader, &mut writer);
    let mut noise = vec![0; FRAME];
    blake3::Hasher::new().finalize_xof().fill(&mut noise);
    let begun = Instant::now();
    let until = LONG_ENOUGH.max(round_trip * ROUND_TRIPS).min(LONGEST);
    let mut answers = Vec::new();
    let send = async {
        for _ in 0..MAX_FRAMES {
            writer.send(kind::MEASURE, &noise).await?;
            writer.flush().await?;
        }
        std::future::pending::<Result<(), MigrateError>>().await
    };
    let hear = async {
        while let Some(frame) = reader.next().await? {
            if frame.kind != kind::MEASURED {
                return Err(MigrateError::Protocol("a measurement"));
            }
            answers.push(begun.elapsed());
            let is_over = begun.elapsed() >= until && rate(&answers).is_some();
            if is_over || answers.len() == MAX_FRAMES {
                break;
            }
        }
        Ok(())
    };
    tokio::select! {
        sent = send => sent?,
        heard = hear => heard?,
        () = tokio::time::sleep(LONGEST) => {}
    }
    Ok(rate(&answers))
}

/// What the second half of the time says.
fn rate(answers: &[Duration]) -> Option<u64> {
    let last = *answers.last()?;
    let first = answers.iter().position(|at| *at >= last / 2)?;
    let count = answers.len() - 1 - first;
    let took = last.saturating_sub(answers[first]).as_secs_f64();
    (count >= ENOUGH && took > 0.0).then(|| ((count * FRAME) as f64 / took) as u64)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use drover_net::{Connection, RateLimit};

    use super::*;

    #[test]
    fn what_a_connection_begins_with_does_not_count() {
        let at = |ms| Duration::from_millis(ms);
        // 16 KiB each 100 ms for a second, then each 10 ms.
        let slow = (1..=10).map(|n| at(n * 100));
        let fast = (1..=100).map(|n| at(1000 + n * 10));
        let answers: Vec<_> = slow.chain(fast).collect();
        let rate = rate(&answers).unwrap();
        assert_eq!(rate, 1_638_400);
        assert_eq!(super::rate(&answers[..10]), None, "too few");
        assert_eq!(super::rate(&[]), None);
        assert_eq!(super::rate(&[Duration::ZERO; 20]), None);
    }

    #[tokio::test]
    async fn a_limit_is_what_it_finds() {
        let (here, there) = Connection::pair().unwrap();
        let (reader, writer) = there.split();
        let answers = tokio::spawn(answer(reader, writer));
        let (reader, mut writer) = here.split();
        writer.set_rate(Some(Arc::new(RateLimit::new(2 << 20))));
        let rate = measure(reader, writer, Duration::ZERO).await.unwrap();
        // However slow this computer is, not more, but for what a limit lets pass at once.
        let rate = rate.unwrap();
        assert!(rate > 0 && rate < 4 << 20, "{rate}");
        answers.await.unwrap().unwrap();
    }

    #[tokio::test]
    async fn more_than_a_measurement_is_not_taken() {
        let (here, there) = Connection::pair().unwrap();
        let (reader, writer) = there.split();
        let answers = tokio::spawn(answer(reader, writer));
        let (_reader, mut writer) = here.split();
        writer.send(kind::MEASURE, &[0; FRAME + 1]).await.unwrap();
        writer.flush().await.unwrap();
        assert!(answers.await.unwrap().is_err());
    }
}
