//! Values of properties, and names.

use serde::{Deserialize, Serialize};

/// Upper bound on names and texts, in bytes.
pub const MAX_TEXT: usize = 64;

/// The value of a property.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Value {
    /// On or off.
    Switch(bool),
    /// A number.
    Number(u64),
    /// A text.
    Text(String),
}

/// Whether a text is a name of QEMU's, which no option can be hidden in.
pub(super) fn is_name(text: &str) -> bool {
    let first = text.starts_with(|c: char| c.is_ascii_alphanumeric());
    let rest = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    first && text.len() <= MAX_TEXT && text.chars().all(rest)
}
