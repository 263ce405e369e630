//! Validation of the names by which a site knows its peers.

/// Maximum length of a peer name, in bytes.
pub const MAX_BYTES: usize = 63;

/// Prefixes of command-line targets that cannot be peer names: `file:PATH`, `dir:PATH`.
const RESERVED: [&str; 2] = ["file", "dir"];

/// Validates a user's choice of name: a letter or digit, then letters, digits, `.`, `-` and `_`; not a reserved one.
///
/// # Errors
/// A message for the user.
pub fn check(name: &str) -> Result<String, String> {
    if name.is_empty() {
        return Err("the name of a site cannot be empty".into());
    }
    if name.len() > MAX_BYTES {
        return Err(format!("the name of a site has at most {MAX_BYTES} bytes"));
    }
    let good = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
    if !name.chars().all(good) || !name.starts_with(|c: char| c.is_ascii_alphanumeric()) {
        return Err(
            "the name of a site must start with a letter or digit and contain only letters, digits, '.', '-' and '_'".into(),
        );
    }
    if is_reserved(name) {
        return Err(format!(
            "no site can be called {name}: {name}:PATH is a disk of this host"
        ));
    }
    Ok(name.into())
}

/// Whether a name cannot be given because it is a prefix of targets. A peer paired by an older version may have it.
pub fn is_reserved(name: &str) -> bool {
    RESERVED.contains(&name)
}

/// Derives a valid name from the one that another machine announces.
pub fn from_untrusted(text: &str) -> String {
    let name: String = text
        .chars()
        .map(|c| {
            if c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_') {
                c
            } else {
                '-'
            }
        })
        .skip_while(|c| !c.is_ascii_alphanumeric())
        .take(MAX_BYTES)
        .collect();
    if name.is_empty() { "peer".into() } else { name }
}

/// `wanted`, or `wanted-2` and so on if it is reserved or `taken`.
pub fn unique(wanted: &str, taken: impl Fn(&str) -> bool) -> String {
    let taken = |name: &str| is_reserved(name) || taken(name);
    if !taken(wanted) {
        return wanted.into();
    }
    (2u32..)
        .map(|n| {
            let suffix = format!("-{n}");
            let stem: String = wanted.chars().take(MAX_BYTES - suffix.len()).collect();
            stem + &suffix
        })
        .find(|name| !taken(name))
        .unwrap_or_else(|| wanted.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_people_may_choose() {
        for good in ["lyon", "a", "node-1.example_x", "7"] {
            assert_eq!(check(good).as_deref(), Ok(good));
        }
        for bad in [
            "",
            "-x",
            ".",
            "..",
            "a/b",
            "a b",
            "é",
            "a\n",
            "file",
            "dir",
            &"x".repeat(64),
        ] {
            assert!(check(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn whatever_a_machine_calls_itself_becomes_a_name() {
        for wild in [
            "",
            "..",
            "\u{1b}[2J",
            "a\nb",
            "Émile's host",
            &"x".repeat(4096),
            "日本",
        ] {
            let name = from_untrusted(wild);
            assert_eq!(check(&name).as_ref(), Ok(&name), "{wild:?}");
        }
        assert_eq!(from_untrusted("web.example"), "web.example");
    }

    #[test]
    fn a_taken_name_gets_a_number() {
        let taken = ["a", "a-2"];
        assert_eq!(unique("a", |n| taken.contains(&n)), "a-3");
        assert_eq!(unique("b", |n| taken.contains(&n)), "b");
        let long = "x".repeat(MAX_BYTES);
        let next = unique(&long, |n| n == long);
        assert_eq!(next.len(), MAX_BYTES);
        assert!(check(&next).is_ok());
    }
}
