//! The address of a catalog on a database server.

use std::fmt;
use std::str::FromStr;

/// The address of a PostgreSQL database: `postgres://[USER[:PASSWORD]@]HOST[:PORT]/DATABASE[?OPTIONS]`. It is shown
/// without its password and options.
#[derive(Clone, PartialEq, Eq)]
pub struct CatalogUrl(String);

/// Longest address.
const MAX_BYTES: usize = 4096;

impl CatalogUrl {
    /// The address with everything in it.
    #[must_use]
    pub fn secret(&self) -> &str {
        &self.0
    }
}

impl FromStr for CatalogUrl {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let known = ["postgres://", "postgresql://"];
        if !known.iter().any(|scheme| text.starts_with(scheme)) {
            return Err(
                "the address of a catalog begins with postgres://, as in postgres://drover@/drover?host=/run/postgresql"
                    .into(),
            );
        }
        if text.len() > MAX_BYTES || text.chars().any(char::is_control) {
            return Err(format!(
                "the address of a catalog has at most {MAX_BYTES} characters, all printable"
            ));
        }
        Ok(CatalogUrl(text.into()))
    }
}

impl fmt::Display for CatalogUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (scheme, rest) = self.0.split_once("://").unwrap_or_default();
        let (rest, options) = rest.split_once('?').unwrap_or((rest, ""));
        // A password may contain an `@`, but no `/` that is not written as %2F.
        let (login, place) = rest.rsplit_once('@').unwrap_or(("", rest));
        let user = login.split(':').next().unwrap_or_default();
        write!(f, "{scheme}://")?;
        if !user.is_empty() {
            write!(f, "{user}@")?;
        }
        f.write_str(place)?;
        // Where its socket is, is part of the place.
        let host = options.split('&').find(|o| o.starts_with("host="));
        host.map_or(Ok(()), |host| write!(f, "?{host}"))
    }
}

impl fmt::Debug for CatalogUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CatalogUrl({self})")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_shown_without_its_secrets() {
        for (text, shown) in [
            ("postgres://db/x", "postgres://db/x"),
            ("postgres://u:pw@db:5433/x", "postgres://u@db:5433/x"),
            ("postgresql://u:p@w@db/x", "postgresql://u@db/x"),
            (
                "postgres://u@/x?password=pw&host=/run/pg",
                "postgres://u@/x?host=/run/pg",
            ),
            ("postgres://u:pw@db/x?password=pw", "postgres://u@db/x"),
        ] {
            let url: CatalogUrl = text.parse().unwrap();
            assert_eq!(url.to_string(), shown);
            assert!(!format!("{url:?}").contains("pw"), "{url:?}");
            assert_eq!(url.secret(), text);
        }
        let long = format!("postgres://{}", "x".repeat(MAX_BYTES));
        for bad in ["", "sqlite:x", "mysql://db/x", "postgres://a\nb", &*long] {
            assert!(bad.parse::<CatalogUrl>().is_err(), "{bad}");
        }
    }
}
