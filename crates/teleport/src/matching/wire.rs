//! Events and answers as frames (`docs/format/wire.md`).

use std::sync::Arc;

use drover_core::put_varint;
use drover_index::{ImageId, MAX_FREED};
use drover_net::{Refusal, decode, encode};

use crate::codec::{Batch, Malformed, Reader, decode_plan, encode_plan};
use crate::protocol::BATCH_BLOCKS;
use crate::teleporter::{Answer, Event, ImageEvent};

/// Maximum number of images in a teleporter's list; a frame has space for more.
const MAX_LISTED: u64 = 100_000;

/// Encodes an event as the payload of a MATCH frame.
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
        Event::Image(i, ImageEvent::Recall) => (11, i),
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

/// Decodes the payload of a MATCH frame.
///
/// # Errors
/// When it is not a valid event.
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
        11 => ImageEvent::Recall,
        _ => return Err(r.malformed()),
    };
    r.end()?;
    Ok(Event::Image(image, event))
}

/// A count of segments, or a segment's index.
fn segments(r: &mut Reader<'_>) -> Result<u32, Malformed> {
    let n = r.varint()?;
    u32::try_from(n).map_err(|_| r.malformed())
}

/// Encodes an answer, or a refusal instead of one, as the payload of a PLAN frame.
#[must_use]
pub fn encode_answer(answer: &Result<Answer, Refusal>) -> Vec<u8> {
    match answer {
        Ok(Answer::Done) => vec![0],
        Ok(Answer::Plan(plan)) => [vec![1], encode_plan(plan)].concat(),
        Err(refusal) => [vec![2], encode(refusal)].concat(),
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

/// Decodes the payload of a PLAN frame for an event of `blocks` data blocks.
///
/// # Errors
/// When it is not a valid answer.
pub fn decode_answer(bytes: &[u8], blocks: u64) -> Result<Result<Answer, Refusal>, Malformed> {
    debug_assert!(blocks <= BATCH_BLOCKS);
    let mut r = Reader::new(bytes, "plan");
    match r.byte()? {
        0 => r.end().map(|()| Ok(Answer::Done)),
        1 => Ok(Ok(Answer::Plan(decode_plan(r.rest(), blocks)?))),
        2 => {
            let malformed = r.malformed();
            decode(r.rest()).map(Err).map_err(|_| malformed)
        }
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
mod tests {
    use super::*;
    use crate::codec::any_batch;
    use drover_net::Code;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn events_and_back(batch in any_batch(), image in any::<u64>(), tag in 0u8..12) {
            let (id, batch) = (ImageId(image), Arc::new(batch));
            use ImageEvent::*;
            let event = match tag {
                5 => Event::Match(id, batch),
                6 => Event::Record(id, batch),
                7 => Event::List,
                8 => Event::Probe(batch),
                9 => Event::BeginTrim { keep: image as u32, have: (image >> 32) as u32 },
                10 => Event::Trim,
                11 => Event::Image(id, Recall),
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
            Err(Refusal::new(Code::NoSpace, "disk full")),
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
