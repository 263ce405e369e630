//! Image names, which are also file names.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The name of an image at a site, also used as its file name there; it cannot point outside of its directory.
///
/// One to 200 bytes of UTF-8 without `/`, NUL or other control characters, not starting with a dot. (200 leaves room
/// for the suffixes of related files under the limit of 255.)
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ImageName(String);

/// Why a text is not a valid image name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NameError {
    /// It is empty.
    #[error("an image name cannot be empty")]
    Empty,
    /// It is longer than [`ImageName::MAX_BYTES`].
    #[error("an image name of {0} bytes is too long (at most {max})", max = ImageName::MAX_BYTES)]
    TooLong(usize),
    /// It starts with a dot: a hidden file, `.` or `..`.
    #[error("an image name cannot start with a dot: {0:?}")]
    Dot(String),
    /// It has a separator or a control character.
    #[error("an image name cannot contain {0:?}")]
    Character(char),
}

impl ImageName {
    /// Maximum length in bytes.
    pub const MAX_BYTES: usize = 200;

    /// Checks `name`.
    ///
    /// # Errors
    /// [`NameError`] when it is invalid.
    pub fn new(name: impl Into<String>) -> Result<Self, NameError> {
        let name = name.into();
        if name.is_empty() {
            return Err(NameError::Empty);
        }
        if name.len() > Self::MAX_BYTES {
            return Err(NameError::TooLong(name.len()));
        }
        if let Some(c) = name
            .chars()
            .find(|&c| c == '/' || c == '\\' || c.is_control())
        {
            return Err(NameError::Character(c));
        }
        if name.starts_with('.') {
            return Err(NameError::Dot(name));
        }
        Ok(ImageName(name))
    }

    /// The name as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl TryFrom<String> for ImageName {
    type Error = NameError;
    fn try_from(s: String) -> Result<Self, NameError> {
        ImageName::new(s)
    }
}

impl From<ImageName> for String {
    fn from(n: ImageName) -> String {
        n.0
    }
}

impl fmt::Display for ImageName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn names_that_could_leave_their_directory_are_refused() {
        for bad in [
            "", ".", "..", "../x", "a/b", "a\0b", "a\nb", ".hidden", "a\\b", "a\u{85}b",
        ] {
            assert!(ImageName::new(bad).is_err(), "{bad:?}");
        }
        assert_eq!(
            ImageName::new("x".repeat(4096)),
            Err(NameError::TooLong(4096))
        );
        assert_eq!(
            ImageName::new("web-01 (copy).qcow2").unwrap().as_str(),
            "web-01 (copy).qcow2"
        );
    }

    proptest! {
        #[test]
        fn a_name_is_one_component(s in "\\PC{0,40}") {
            if let Ok(n) = ImageName::new(s) {
                let p = std::path::Path::new("dir").join(n.as_str());
                prop_assert_eq!(p.parent(), Some(std::path::Path::new("dir")));
            }
        }

        #[test]
        fn what_a_peer_sends_is_checked(s in any::<String>()) {
            let bytes = postcard::to_stdvec(&s).unwrap();
            prop_assert_eq!(postcard::from_bytes::<ImageName>(&bytes).is_ok(), ImageName::new(s).is_ok());
        }
    }
}
