//! The negotiation, without any I/O: options in, replies and what comes next out.

use super::check::Facts;
use super::wire::{
    ContextRequest, InfoRequest, allocation, handshake, info, name, option, option_reply, reply,
};

/// An export as clients see it.
#[derive(Debug, Clone)]
pub struct Offer {
    /// Its name.
    pub name: String,
    /// A one-line description.
    pub description: String,
    /// Its size, flags and block sizes.
    pub facts: Facts,
}

/// The outcome of the negotiation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Session {
    /// Index of the export.
    pub export: usize,
    /// Reads are answered in chunks.
    pub structured: bool,
    /// `BLOCK_STATUS` may be requested for `base:allocation`.
    pub allocation: bool,
}

/// Whether TLS is unavailable, optional or required.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Security {
    /// TLS is unavailable.
    Plain,
    /// TLS is optional.
    Offered,
    /// TLS is required before anything else.
    Demanded,
    /// TLS has been established.
    Secured,
}

/// What follows an option.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// Another option.
    Continue,
    /// TLS, then another option.
    StartTls,
    /// The transmission phase.
    Transmit(Session),
    /// The end: requested by the client, or the only way to refuse.
    Close,
}

/// One client's negotiation.
#[derive(Debug)]
pub struct Negotiation<'a> {
    offers: &'a [Offer],
    security: Security,
    fixed: bool,
    no_zeroes: bool,
    structured: bool,
    /// The export for which `base:allocation` was negotiated.
    context: Option<usize>,
}

impl<'a> Negotiation<'a> {
    /// Starts, with the client's flags in reply to the greeting. None if they contain unknown flags, which ends the
    /// connection.
    #[must_use]
    pub fn new(offers: &'a [Offer], security: Security, client_flags: u32) -> Option<Self> {
        if client_flags & !(handshake::FIXED_NEWSTYLE | handshake::NO_ZEROES) != 0 {
            return None;
        }
        Some(Self {
            offers,
            security,
            fixed: client_flags & handshake::FIXED_NEWSTYLE != 0,
            no_zeroes: client_flags & handshake::NO_ZEROES != 0,
            structured: false,
            context: None,
        })
    }

    /// TLS has been established: everything negotiated before, in the clear, is void.
    pub fn secured(&mut self) {
        self.security = Security::Secured;
        self.structured = false;
        self.context = None;
    }

    /// Processes an option and appends the replies to it.
    pub fn option(&mut self, option: u32, data: &[u8], out: &mut Vec<u8>) -> Step {
        if option == option::EXPORT_NAME {
            return self.export_name(data, out);
        }
        if !self.fixed {
            // There is no way to reply to such a client.
            return Step::Close;
        }
        let mut answer = |kind, parts: &[&[u8]]| option_reply(out, option, kind, parts);
        if option == option::ABORT {
            answer(reply::ACK, &[]);
            return Step::Close;
        }
        if self.security == Security::Demanded && option != option::STARTTLS {
            answer(reply::ERR_TLS_REQD, &[b"this server speaks only TLS"]);
            return Step::Continue;
        }
        let bare = matches!(
            option,
            option::LIST | option::STARTTLS | option::STRUCTURED_REPLY
        );
        if bare && !data.is_empty() {
            answer(reply::ERR_INVALID, &[b"this option takes no data"]);
            return Step::Continue;
        }
        match option {
            option::LIST => {
                for offer in self.offers {
                    let length = (offer.name.len() as u32).to_be_bytes();
                    let parts = [&length, offer.name.as_bytes(), offer.description.as_bytes()];
                    answer(reply::SERVER, &parts);
                }
                answer(reply::ACK, &[]);
            }
            option::STARTTLS => match self.security {
                Security::Offered | Security::Demanded => {
                    answer(reply::ACK, &[]);
                    return Step::StartTls;
                }
                Security::Plain => answer(reply::ERR_UNSUP, &[b"this server has no certificate"]),
                Security::Secured => answer(reply::ERR_INVALID, &[b"TLS has begun"]),
            },
            option::STRUCTURED_REPLY => {
                self.structured = true;
                answer(reply::ACK, &[]);
            }
            option::INFO | option::GO => return self.info(option, data, out),
            option::LIST_META_CONTEXT | option::SET_META_CONTEXT => {
                self.contexts(option, data, out);
            }
            _ => answer(reply::ERR_UNSUP, &[b"unknown option"]),
        }
        Step::Continue
    }

    /// The export with a name: an empty one means the export with no name, or the only one.
    fn find(&self, name: &str) -> Option<usize> {
        match self.offers.iter().position(|offer| offer.name == name) {
            None if name.is_empty() && self.offers.len() == 1 => Some(0),
            found => found,
        }
    }

    fn session(&self, export: usize) -> Session {
        Session {
            export,
            structured: self.structured,
            allocation: self.context == Some(export),
        }
    }

    /// The option that can only be refused by disconnecting.
    fn export_name(&self, data: &[u8], out: &mut Vec<u8>) -> Step {
        if self.security == Security::Demanded {
            return Step::Close;
        }
        let Some(export) = name(data).and_then(|name| self.find(name)) else {
            return Step::Close;
        };
        let facts = &self.offers[export].facts;
        out.extend_from_slice(&facts.size.to_be_bytes());
        out.extend_from_slice(&facts.flags(self.structured).to_be_bytes());
        if !self.no_zeroes {
            out.extend_from_slice(&[0; 124]);
        }
        Step::Transmit(self.session(export))
    }

    fn info(&self, option: u32, data: &[u8], out: &mut Vec<u8>) -> Step {
        let mut answer = |kind, parts: &[&[u8]]| option_reply(out, option, kind, parts);
        let request = match InfoRequest::parse(data) {
            Ok(request) => request,
            Err(error) => {
                answer(reply::ERR_INVALID, &[error.to_string().as_bytes()]);
                return Step::Continue;
            }
        };
        let Some(export) = self.find(request.export) else {
            answer(reply::ERR_UNKNOWN, &[b"no such export"]);
            return Step::Continue;
        };
        let Offer {
            name,
            description,
            facts,
        } = &self.offers[export];
        let mut tell = |kind: u16, parts: [&[u8]; 3]| {
            let [a, b, c] = parts;
            answer(reply::INFO, &[&kind.to_be_bytes(), a, b, c]);
        };
        let flags = facts.flags(self.structured).to_be_bytes();
        tell(info::EXPORT, [&facts.size.to_be_bytes(), &flags, &[]]);
        if request.name {
            tell(info::NAME, [name.as_bytes(), &[], &[]]);
        }
        if request.description && !description.is_empty() {
            tell(info::DESCRIPTION, [description.as_bytes(), &[], &[]]);
        }
        if request.block_size {
            let sizes = [facts.minimum, facts.preferred, facts.maximum].map(u32::to_be_bytes);
            tell(info::BLOCK_SIZE, [&sizes[0], &sizes[1], &sizes[2]]);
        } else if option == option::INFO && facts.minimum > 1 {
            answer(
                reply::ERR_BLOCK_SIZE_REQD,
                &[b"ask for the block size: requests must be aligned"],
            );
            return Step::Continue;
        }
        answer(reply::ACK, &[]);
        match option {
            option::GO => Step::Transmit(self.session(export)),
            _ => Step::Continue,
        }
    }

    fn contexts(&mut self, option: u32, data: &[u8], out: &mut Vec<u8>) {
        let set = option == option::SET_META_CONTEXT;
        if set {
            self.context = None;
        }
        let mut answer = |kind, parts: &[&[u8]]| option_reply(out, option, kind, parts);
        let request = match ContextRequest::parse(data) {
            Ok(request) => request,
            Err(error) => {
                return answer(reply::ERR_INVALID, &[error.to_string().as_bytes()]);
            }
        };
        if set && !self.structured {
            return answer(reply::ERR_INVALID, &[b"structured replies come first"]);
        }
        let Some(export) = self.find(request.export) else {
            return answer(reply::ERR_UNKNOWN, &[b"no such export"]);
        };
        let id = match set {
            true => allocation::ID,
            false => 0,
        };
        let wanted = match set {
            true => request.allocation,
            false => request.allocation || request.base || request.queries == 0,
        };
        if wanted {
            let name = allocation::NAME.as_bytes();
            answer(reply::META_CONTEXT, &[&id.to_be_bytes(), name]);
        }
        if set && wanted {
            self.context = Some(export);
        }
        answer(reply::ACK, &[]);
    }
}
