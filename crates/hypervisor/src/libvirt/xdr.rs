//! The encoding of libvirt's protocol: XDR (RFC 4506), as far as it is used here.

/// A body that is written.
#[derive(Default)]
pub struct Writer(Vec<u8>);

impl Writer {
    /// Unsigned integer.
    pub fn number(mut self, value: u32) -> Self {
        self.0.extend(value.to_be_bytes());
        self
    }

    /// Unsigned hyper integer.
    pub fn long(mut self, value: u64) -> Self {
        self.0.extend(value.to_be_bytes());
        self
    }

    /// Opaque data of a fixed length, a multiple of 4.
    pub fn fixed(mut self, bytes: &[u8]) -> Self {
        self.0.extend(bytes);
        self
    }

    /// Opaque data of variable length, and strings.
    pub fn bytes(self, bytes: &[u8]) -> Self {
        let mut written = self.number(u32::try_from(bytes.len()).unwrap_or(u32::MAX));
        written.0.extend(bytes);
        let padded = written.0.len().next_multiple_of(4);
        written.0.resize(padded, 0);
        written
    }

    /// A string.
    pub fn text(self, text: &str) -> Self {
        self.bytes(text.as_bytes())
    }

    /// A string that may be absent.
    pub fn optional(self, text: Option<&str>) -> Self {
        match text {
            Some(text) => self.number(1).text(text),
            None => self.number(0),
        }
    }

    /// libvirt's typed parameters, all of them strings.
    pub fn parameters(self, parameters: &[(&str, String)]) -> Self {
        /// Its type of a string.
        const STRING: u32 = 7;
        let count = u32::try_from(parameters.len()).unwrap_or(u32::MAX);
        let begun = self.number(count);
        let add = |body: Writer, (name, value): &(&str, String)| {
            body.text(name).number(STRING).text(value)
        };
        parameters.iter().fold(begun, add)
    }

    /// What another one has written.
    pub fn append(self, other: Writer) -> Self {
        self.fixed(&other.0)
    }

    /// What was written.
    pub fn finish(self) -> Vec<u8> {
        self.0
    }
}

/// A body that is read. `None` where it is too short, or not what was expected.
pub struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    /// Reads this body.
    pub fn new(body: &'a [u8]) -> Self {
        Self(body)
    }

    /// Opaque data of a fixed length.
    pub fn fixed(&mut self, length: usize) -> Option<&'a [u8]> {
        let (read, rest) = self.0.split_at_checked(length)?;
        self.0 = rest;
        Some(read)
    }

    /// Unsigned integer.
    pub fn number(&mut self) -> Option<u32> {
        Some(u32::from_be_bytes(self.fixed(4)?.try_into().ok()?))
    }

    /// Unsigned hyper integer.
    pub fn long(&mut self) -> Option<u64> {
        Some(u64::from_be_bytes(self.fixed(8)?.try_into().ok()?))
    }

    /// Opaque data of variable length.
    pub fn bytes(&mut self) -> Option<&'a [u8]> {
        let length = self.number()? as usize;
        let padded = self.fixed(length.checked_next_multiple_of(4)?)?;
        padded.get(..length)
    }

    /// A string.
    pub fn text(&mut self) -> Option<String> {
        Some(String::from_utf8_lossy(self.bytes()?).into_owned())
    }

    /// A string that may be absent.
    pub fn optional(&mut self) -> Option<Option<String>> {
        match self.number()? {
            0 => Some(None),
            _ => Some(Some(self.text()?)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read() {
        let body = Writer::default()
            .number(7)
            .long(1 << 40)
            .text("five5")
            .optional(None)
            .optional(Some("x"))
            .fixed(&[1, 2, 3, 4])
            .finish();
        assert_eq!(body.len() % 4, 0);
        let mut reader = Reader::new(&body);
        assert_eq!(reader.number(), Some(7));
        assert_eq!(reader.long(), Some(1 << 40));
        assert_eq!(reader.text().as_deref(), Some("five5"));
        assert_eq!(reader.optional(), Some(None));
        assert_eq!(reader.optional(), Some(Some("x".into())));
        assert_eq!(reader.fixed(4), Some(&[1, 2, 3, 4][..]));
        assert_eq!(reader.number(), None);
    }

    #[test]
    fn lengths_are_not_believed() {
        for length in [5, u32::MAX - 1, u32::MAX] {
            let body = Writer::default().number(length).fixed(&[0; 4]).finish();
            assert_eq!(Reader::new(&body).bytes(), None, "{length}");
        }
    }

    #[test]
    fn parameters_are_a_list_of_names_and_strings() {
        let body = Writer::default().parameters(&[("a", "bc".into())]).finish();
        let mut reader = Reader::new(&body);
        assert_eq!(reader.number(), Some(1));
        assert_eq!(reader.text().as_deref(), Some("a"));
        assert_eq!(reader.number(), Some(7));
        assert_eq!(reader.text().as_deref(), Some("bc"));
    }
}
