//! Domains: the peers and images of a site that trust each other.

/// The domain of everything that was not given another.
pub const DEFAULT: &str = drover_net::DEFAULT_DOMAIN;

/// Maximum length of the name of a domain, in bytes.
pub const MAX_BYTES: usize = 64;

/// Validates the name of a domain: a lower-case letter or digit, then lower-case letters, digits, `-` and `_`.
///
/// # Errors
/// A message for the user.
pub fn check(name: &str) -> Result<String, String> {
    if name.is_empty() {
        return Err("the name of a domain cannot be empty".into());
    }
    if name.len() > MAX_BYTES {
        return Err(format!(
            "the name of a domain has at most {MAX_BYTES} bytes"
        ));
    }
    let first = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
    let good = |c: char| first(c) || matches!(c, '-' | '_');
    if !name.starts_with(first) || !name.chars().all(good) {
        return Err(
            "the name of a domain must start with a lower-case letter or digit and contain only lower-case letters, digits, '-' and '_'".into(),
        );
    }
    Ok(name.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_one_directory_entry_however_it_is_written() {
        for good in [DEFAULT, "a", "7", "acme-2_x", &"x".repeat(64)] {
            assert_eq!(check(good).as_deref(), Ok(good));
        }
        for bad in [
            "",
            "-x",
            "_x",
            ".",
            "..",
            "a.b",
            "a/b",
            "a b",
            "Acme",
            "é",
            "a\n",
            &"x".repeat(65),
        ] {
            assert!(check(bad).is_err(), "{bad:?}");
        }
    }
}
