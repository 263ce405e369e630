//! The properties of an export that clients see, and validation of requests against them.

use drover_core::Capabilities;

use super::wire::{COARSEST_ALIGNMENT, MAX_REQUEST, Request, command, errno, flag, transmission};

/// An export's size, capabilities and block sizes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Facts {
    /// Size in bytes.
    pub size: u64,
    /// Read-only.
    pub read_only: bool,
    /// Trim frees space.
    pub trim: bool,
    /// Zeroing can be faster than writing zeros.
    pub fast_zeroes: bool,
    /// Alignment of offsets and lengths (bytes).
    pub minimum: u32,
    /// Preferred request unit (bytes).
    pub preferred: u32,
    /// The longest read or write (bytes).
    pub maximum: u32,
}

impl Facts {
    /// The properties of a device of this size and with these capabilities.
    ///
    /// # Errors
    /// Why it cannot be exported.
    pub fn new(size: u64, can: Capabilities, read_only: bool) -> Result<Self, String> {
        let minimum = can.alignment.max(1);
        if !minimum.is_power_of_two() || minimum > COARSEST_ALIGNMENT {
            return Err(format!(
                "its requests must be aligned to {minimum} bytes, and NBD clients do {COARSEST_ALIGNMENT} at most; \
                 put a stage on it that takes any range"
            ));
        }
        if !size.is_multiple_of(u64::from(minimum)) {
            return Err(format!(
                "its size, {size} bytes, is not a multiple of its alignment of {minimum} bytes"
            ));
        }
        // Beyond the maximum file offset of a client.
        if size > i64::MAX as u64 {
            return Err(format!(
                "{size} bytes are more than NBD clients can address"
            ));
        }
        let preferred = can.preferred.max(1).checked_next_power_of_two();
        Ok(Self {
            size,
            read_only: read_only || can.read_only,
            trim: can.trim,
            fast_zeroes: can.fast_zeroes,
            minimum,
            preferred: preferred
                .unwrap_or(MAX_REQUEST)
                .clamp(minimum.max(512), MAX_REQUEST),
            maximum: MAX_REQUEST,
        })
    }

    /// The transmission flags, for a client with or without structured replies.
    #[must_use]
    pub fn flags(&self, structured: bool) -> u16 {
        use transmission as t;
        let mut flags =
            t::HAS_FLAGS | t::SEND_FLUSH | t::SEND_FUA | t::CAN_MULTI_CONN | t::SEND_CACHE;
        let mut set = |condition, flag| {
            if condition {
                flags |= flag;
            }
        };
        set(structured, t::SEND_DF);
        set(self.read_only, t::READ_ONLY);
        set(!self.read_only, t::SEND_WRITE_ZEROES | t::SEND_FAST_ZERO);
        set(!self.read_only && self.trim, t::SEND_TRIM);
        flags
    }
}

/// Why a request is refused: an error number, and a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Refusal(pub u32, pub &'static str);

/// Checks a request (other than a disconnect) against what its export allows.
///
/// # Errors
/// [`Refusal`].
pub fn check(request: &Request, facts: &Facts, allocation: bool) -> Result<(), Refusal> {
    let allowed = match request.command {
        command::READ => flag::DF,
        command::WRITE | command::TRIM | command::FLUSH | command::CACHE => 0,
        command::WRITE_ZEROES => flag::NO_HOLE | flag::FAST_ZERO,
        command::BLOCK_STATUS => flag::REQ_ONE,
        _ => return Err(Refusal(errno::EINVAL, "unknown request")),
    };
    // FUA is allowed with any request, and has effect only on changes.
    if request.flags & !(allowed | flag::FUA) != 0 {
        return Err(Refusal(errno::EINVAL, "unsupported flag for this request"));
    }
    let writes = matches!(
        request.command,
        command::WRITE | command::TRIM | command::WRITE_ZEROES
    );
    if writes && facts.read_only {
        return Err(Refusal(errno::EPERM, "the export is read-only"));
    }
    if request.command == command::FLUSH {
        // Offset and length are ignored.
        return Ok(());
    }
    if request.command == command::BLOCK_STATUS && !allocation {
        return Err(Refusal(errno::EINVAL, "base:allocation was not negotiated"));
    }
    if request.command == command::BLOCK_STATUS && request.length == 0 {
        return Err(Refusal(errno::EINVAL, "block status of zero bytes"));
    }
    let carries = matches!(request.command, command::READ | command::WRITE);
    if carries && request.length > facts.maximum {
        return Err(Refusal(errno::EINVAL, "longer than 32 MiB"));
    }
    let end = request.offset.checked_add(u64::from(request.length));
    if end.is_none_or(|end| end > facts.size) {
        let grows = matches!(request.command, command::WRITE | command::WRITE_ZEROES);
        let error = if grows { errno::ENOSPC } else { errno::EINVAL };
        return Err(Refusal(error, "beyond the end of the export"));
    }
    let mask = u64::from(facts.minimum) - 1;
    if (request.offset | u64::from(request.length)) & mask != 0 {
        return Err(Refusal(
            errno::EINVAL,
            "not aligned to the minimum block size",
        ));
    }
    Ok(())
}
