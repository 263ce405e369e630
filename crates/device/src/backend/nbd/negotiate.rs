//! The negotiation: fixed newstyle, structured replies, metadata contexts, `GO`. Over any stream.

use std::collections::HashSet;
use std::io::{Read, Write};

use drover_core::nbd::{
    COARSEST_ALIGNMENT, Fields, GREETING, MAX_REQUEST, MAX_STRING, OPTION, OPTION_REPLY, WireError,
    allocation, handshake, info, option, reply, transmission,
};

use super::error::{Fault, refused};

/// Maximum metadata contexts of one connection, without `base:allocation`.
pub const MAX_CONTEXTS: usize = 15;
/// Maximum length of a reply to an option (bytes): a string and a few numbers.
const MAX_REPLY: u32 = MAX_STRING as u32 + 64;
/// Maximum replies to an option: information about an export, or one for each context.
const MAX_REPLIES: usize = MAX_CONTEXTS + 32;
/// The length of the head of a reply to an option (bytes).
const REPLY_BYTES: usize = 20;

/// A metadata context that the server has chosen a number for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Context {
    /// The server's number.
    pub id: u32,
    /// Its name.
    pub name: String,
}

/// What was negotiated.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Session {
    /// Size of the export (bytes): a multiple of `minimum`.
    pub size: u64,
    /// Of [`transmission`].
    pub flags: u16,
    /// Alignment of requests (bytes): a power of two.
    pub minimum: u32,
    /// Preferred length of requests (bytes): a power of two.
    pub preferred: u32,
    /// Maximum length of a read or write (bytes): a multiple of `minimum`.
    pub maximum: u32,
    /// Reads are answered in chunks.
    pub structured: bool,
    /// The metadata contexts.
    pub contexts: Vec<Context>,
}

/// Opens `export` with `base:allocation`, if the server has it, and `contexts`, which it must have.
pub fn negotiate(
    stream: &mut (impl Read + Write),
    export: &str,
    contexts: &[String],
) -> Result<Session, Fault> {
    if contexts.len() > MAX_CONTEXTS {
        let why = format!("at most {MAX_CONTEXTS} contexts can be asked for at once");
        return Err(Fault::Refused(why));
    }
    greet(stream)?;
    let structured = ask(stream, option::STRUCTURED_REPLY, &[], |_, _| {
        Err(Fault::Wire(WireError::Malformed("reply to an option")))
    })
    .map(|refusal| refusal.is_none())?;
    let had = match structured {
        true => choose(stream, export, contexts)?,
        false => Vec::new(),
    };
    if let Some(name) = contexts
        .iter()
        .find(|name| !had.iter().any(|c| c.name == **name))
    {
        return Err(Fault::NoContext(name.clone()));
    }
    let mut session = go(stream, export)?;
    session.structured = structured;
    session.contexts = had;
    Ok(session)
}

fn array<const N: usize>(stream: &mut impl Read) -> Result<[u8; N], Fault> {
    let mut bytes = [0; N];
    stream.read_exact(&mut bytes)?;
    Ok(bytes)
}

fn greet(stream: &mut (impl Read + Write)) -> Result<(), Fault> {
    if array(stream)? != GREETING.to_be_bytes() {
        return Err(WireError::Magic("greeting").into());
    }
    if array(stream)? != OPTION.to_be_bytes() {
        let why = "the server is too old: it speaks only the oldstyle protocol";
        return Err(Fault::Refused(why.into()));
    }
    let flags = u32::from(u16::from_be_bytes(array(stream)?));
    if flags & handshake::FIXED_NEWSTYLE == 0 {
        let why = "the server is too old: it does not speak the fixed newstyle protocol";
        return Err(Fault::Refused(why.into()));
    }
    let both = flags & (handshake::FIXED_NEWSTYLE | handshake::NO_ZEROES);
    stream.write_all(&both.to_be_bytes())?;
    Ok(())
}

/// A refusal: its kind and the server's message.
type Refusal = (u32, Vec<u8>);

/// Sends an option and gives each reply but the last to `take`.
fn ask(
    stream: &mut (impl Read + Write),
    option: u32,
    data: &[u8],
    mut take: impl FnMut(u32, &[u8]) -> Result<(), Fault>,
) -> Result<Option<Refusal>, Fault> {
    let mut bytes = OPTION.to_be_bytes().to_vec();
    bytes.extend(option.to_be_bytes());
    bytes.extend((data.len() as u32).to_be_bytes());
    bytes.extend(data);
    stream.write_all(&bytes)?;
    for _ in 0..MAX_REPLIES {
        let (kind, data) = read_reply(stream, option)?;
        match kind {
            reply::ACK if data.is_empty() => return Ok(None),
            _ if kind >> 31 == 1 => return Ok(Some((kind, data))),
            _ => take(kind, &data)?,
        }
    }
    Err(WireError::Malformed("reply to an option: too many").into())
}

fn read_reply(stream: &mut impl Read, option: u32) -> Result<(u32, Vec<u8>), Fault> {
    let head: [u8; REPLY_BYTES] = array(stream)?;
    let mut fields = Fields(&head);
    if fields.u64() != Some(OPTION_REPLY) {
        return Err(WireError::Magic("option reply").into());
    }
    match (fields.u32(), fields.u32(), fields.u32()) {
        (Some(to), Some(kind), Some(length)) if to == option && length <= MAX_REPLY => {
            let mut data = vec![0; length as usize];
            stream.read_exact(&mut data)?;
            Ok((kind, data))
        }
        _ => Err(WireError::Malformed("reply to an option").into()),
    }
}

fn put_string(data: &mut Vec<u8>, text: &str) {
    data.extend((text.len() as u32).to_be_bytes());
    data.extend(text.as_bytes());
}

/// Chooses `base:allocation` and `contexts`; returns those that the server has.
fn choose(
    stream: &mut (impl Read + Write),
    export: &str,
    contexts: &[String],
) -> Result<Vec<Context>, Fault> {
    let others = contexts.iter().map(String::as_str);
    let wanted: HashSet<&str> = others.chain([allocation::NAME]).collect();
    let mut data = Vec::new();
    put_string(&mut data, export);
    data.extend((wanted.len() as u32).to_be_bytes());
    for name in &wanted {
        put_string(&mut data, name);
    }
    let mut had: Vec<Context> = Vec::new();
    let refusal = ask(stream, option::SET_META_CONTEXT, &data, |kind, data| {
        let malformed = Fault::Wire(WireError::Malformed("metadata context"));
        let mut fields = Fields(data);
        let id = fields.u32();
        match (kind, id, std::str::from_utf8(fields.0)) {
            (reply::META_CONTEXT, Some(id), Ok(name))
                if wanted.contains(name) && had.iter().all(|c| c.id != id && c.name != name) =>
            {
                had.push(Context {
                    id,
                    name: name.into(),
                });
                Ok(())
            }
            _ => Err(malformed),
        }
    })?;
    match refusal {
        None => Ok(had),
        // It has none at all.
        Some((reply::ERR_UNSUP, _)) => Ok(Vec::new()),
        Some((kind, message)) => Err(refused(kind, &message, export)),
    }
}

/// Asks about the export and begins transmission.
fn go(stream: &mut (impl Read + Write), export: &str) -> Result<Session, Fault> {
    let mut data = Vec::new();
    put_string(&mut data, export);
    data.extend(1u16.to_be_bytes());
    data.extend(info::BLOCK_SIZE.to_be_bytes());
    let (mut size, mut sizes) = (None, None);
    let refusal = ask(stream, option::GO, &data, |kind, data| {
        let malformed = Fault::Wire(WireError::Malformed("information about the export"));
        let mut fields = Fields(data);
        match (kind, fields.u16()) {
            (reply::INFO, Some(info::EXPORT)) => {
                size = fields.u64().zip(fields.u16());
                (size.is_some() && fields.0.is_empty())
                    .then_some(())
                    .ok_or(malformed)
            }
            (reply::INFO, Some(info::BLOCK_SIZE)) => {
                sizes = match (fields.u32(), fields.u32(), fields.u32()) {
                    (Some(a), Some(b), Some(c)) if fields.0.is_empty() => Some([a, b, c]),
                    _ => return Err(malformed),
                };
                Ok(())
            }
            // Name, description, and what is not known yet.
            (reply::INFO, Some(_)) => Ok(()),
            _ => Err(malformed),
        }
    })?;
    if let Some((kind, message)) = refusal {
        return Err(refused(kind, &message, export));
    }
    let (size, flags) = size.ok_or(WireError::Malformed("export: no size"))?;
    session(size, flags, sizes.unwrap_or([1, 4096, MAX_REQUEST]))
}

/// Checks what the server says of its export.
fn session(size: u64, flags: u16, sizes: [u32; 3]) -> Result<Session, Fault> {
    let [minimum, preferred, maximum] = sizes;
    let sane = minimum.is_power_of_two()
        && minimum <= COARSEST_ALIGNMENT
        && maximum >= minimum
        && flags & transmission::HAS_FLAGS != 0;
    if !sane {
        return Err(WireError::Malformed("block size or flags of the export").into());
    }
    if size > i64::MAX as u64 || !size.is_multiple_of(u64::from(minimum)) {
        return Err(WireError::Malformed("size of the export").into());
    }
    let maximum = maximum.min(MAX_REQUEST) / minimum * minimum;
    Ok(Session {
        size,
        flags,
        minimum,
        preferred: 1 << preferred.clamp(minimum, maximum).ilog2(),
        maximum,
        structured: false,
        contexts: Vec::new(),
    })
}
