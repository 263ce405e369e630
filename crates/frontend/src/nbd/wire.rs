//! What a server reads of the NBD protocol, without any I/O; the rest of the protocol is [`drover_core::nbd`].

pub use drover_core::nbd::*;

/// The header of an option.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OptionHeader {
    /// One of [`option`], or an unknown one.
    pub option: u32,
    /// Bytes of data that follow.
    pub length: u32,
}

impl OptionHeader {
    /// Reads one.
    ///
    /// # Errors
    /// [`WireError::Magic`].
    pub fn parse(bytes: &[u8; OPTION_BYTES]) -> Result<Self, WireError> {
        let [a, b, c, d, e, f, g, h, rest @ ..] = *bytes;
        if u64::from_be_bytes([a, b, c, d, e, f, g, h]) != OPTION {
            return Err(WireError::Magic("option"));
        }
        let [a, b, c, d, e, f, g, h] = rest;
        Ok(Self {
            option: u32::from_be_bytes([a, b, c, d]),
            length: u32::from_be_bytes([e, f, g, h]),
        })
    }
}

/// The data of `INFO` and `GO`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InfoRequest<'a> {
    /// Which export; empty: the default.
    pub export: &'a str,
    /// [`info::NAME`] is requested.
    pub name: bool,
    /// [`info::DESCRIPTION`] is requested.
    pub description: bool,
    /// [`info::BLOCK_SIZE`] is requested.
    pub block_size: bool,
}

impl<'a> InfoRequest<'a> {
    /// Reads one.
    ///
    /// # Errors
    /// [`WireError::Malformed`].
    pub fn parse(data: &'a [u8]) -> Result<Self, WireError> {
        Self::fields(Fields(data)).ok_or(WireError::Malformed("request for an export"))
    }

    fn fields(mut fields: Fields<'a>) -> Option<Self> {
        let mut request = Self {
            export: fields.string()?,
            name: false,
            description: false,
            block_size: false,
        };
        for _ in 0..fields.u16()? {
            match fields.u16()? {
                info::NAME => request.name = true,
                info::DESCRIPTION => request.description = true,
                info::BLOCK_SIZE => request.block_size = true,
                // Unknown information types are ignored.
                _ => {}
            }
        }
        fields.0.is_empty().then_some(request)
    }
}

/// The data of `LIST_META_CONTEXT` and `SET_META_CONTEXT`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ContextRequest<'a> {
    /// Which export; empty: the default.
    pub export: &'a str,
    /// Number of queries.
    pub queries: u32,
    /// One of the queries is `base:allocation` itself.
    pub allocation: bool,
    /// One of the queries is for the whole namespace `base:`.
    pub base: bool,
}

impl<'a> ContextRequest<'a> {
    /// Reads one.
    ///
    /// # Errors
    /// [`WireError::Malformed`].
    pub fn parse(data: &'a [u8]) -> Result<Self, WireError> {
        Self::fields(Fields(data)).ok_or(WireError::Malformed("request for contexts"))
    }

    fn fields(mut fields: Fields<'a>) -> Option<Self> {
        let export = fields.string()?;
        let queries = fields.u32()?;
        let (mut allocation, mut base) = (false, false);
        for _ in 0..queries {
            match fields.string()? {
                allocation::NAME => allocation = true,
                "base:" => base = true,
                _ => {}
            }
        }
        fields.0.is_empty().then_some(Self {
            export,
            queries,
            allocation,
            base,
        })
    }
}
