//! Input of an NBD client: options in any order, then requests. Replies are well-formed and bounded by the request; a
//! request that passes the check is valid for a device.

use drover_core::Capabilities;
use drover_frontend::nbd::Facts;
use drover_frontend::nbd::fuzzing::{Negotiation, Offer, Security, Session, Step, check};
use drover_frontend::nbd::wire::{self, OptionHeader, Request, command, flag, reply};

/// Names, alignments, and whether they are read-only.
const EXPORTS: [(&str, u32, bool); 3] = [("", 1, false), ("a", 512, false), ("b", 4096, true)];
const SIZE: u64 = 1 << 20;
/// The longest replies to one option: three infos of at most a string each, or the list of exports.
const MAX_REPLIES: usize = 4 * (20 + 12 + wire::MAX_STRING);

fn offers() -> Vec<Offer> {
    EXPORTS
        .iter()
        .map(|(name, alignment, read_only)| {
            let can = Capabilities {
                read_only: false,
                fast_zeroes: true,
                trim: true,
                durable: true,
                extents: true,
                alignment: *alignment,
                preferred: 4096,
                longest: 1 << 20,
            };
            Offer {
                name: (*name).into(),
                description: "an export".into(),
                facts: Facts::new(SIZE, can, *read_only).expect("an export"),
            }
        })
        .collect()
}

/// Replies to `option`, of which the last one ends them.
fn well_formed(option: u32, mut out: &[u8]) {
    assert!(out.len() <= MAX_REPLIES);
    let mut ended = false;
    while !out.is_empty() {
        assert!(!ended, "a reply after the last");
        let (head, rest) = out.split_at(20);
        assert_eq!(head[..8], wire::OPTION_REPLY.to_be_bytes());
        assert_eq!(head[8..12], option.to_be_bytes());
        let kind = u32::from_be_bytes(head[12..16].try_into().unwrap());
        let length = u32::from_be_bytes(head[16..].try_into().unwrap()) as usize;
        ended = kind == reply::ACK || kind >> 31 == 1;
        out = &rest[length..];
    }
    assert!(ended, "no reply");
}

fn requests(offers: &[Offer], session: Session, mut data: &[u8]) {
    let facts = &offers[session.export].facts;
    while let Some((header, rest)) = data.split_first_chunk() {
        data = rest;
        let Ok(request) = Request::parse(header) else {
            return;
        };
        assert_eq!(request.encode(), *header);
        if request.command == command::DISCONNECT {
            return;
        }
        if check(&request, facts, session.allocation).is_err() {
            continue;
        }
        assert!(request.command <= command::BLOCK_STATUS);
        assert!(request.flags <= flag::FAST_ZERO << 1);
        if request.command == command::FLUSH {
            continue;
        }
        let length = u64::from(request.length);
        assert!(request.offset <= SIZE && length <= SIZE - request.offset);
        let unit = u64::from(facts.minimum);
        assert!(request.offset.is_multiple_of(unit) && length.is_multiple_of(unit));
        let writes = [command::WRITE, command::TRIM, command::WRITE_ZEROES];
        assert!(!facts.read_only || !writes.contains(&request.command));
        if request.command == command::BLOCK_STATUS {
            assert!(session.allocation && length > 0);
        }
    }
}

pub fn run(data: &[u8]) {
    let [security, flags, data @ ..] = data else {
        return;
    };
    let security = [
        Security::Plain,
        Security::Offered,
        Security::Demanded,
        Security::Secured,
    ][usize::from(security % 4)];
    let offers = offers();
    let Some(mut negotiation) = Negotiation::new(&offers, security, u32::from(*flags)) else {
        return;
    };
    let mut data = data;
    let mut clear = security != Security::Demanded;
    while let Some((header, rest)) = data.split_first_chunk() {
        let Ok(header) = OptionHeader::parse(header) else {
            return;
        };
        let Some((option, rest)) = rest.split_at_checked(header.length as usize) else {
            return;
        };
        data = rest;
        let mut out = Vec::new();
        let step = negotiation.option(header.option, option, &mut out);
        if header.option != wire::option::EXPORT_NAME && flags & 1 == 1 {
            well_formed(header.option, &out);
        }
        match step {
            Step::Continue => {}
            Step::StartTls => {
                negotiation.secured();
                clear = true;
            }
            Step::Close => return,
            Step::Transmit(session) => {
                assert!(clear, "requests without TLS");
                return requests(&offers, session, data);
            }
        }
    }
}
