//! Where the catalog of a home is, if it is not a file in it.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use drover_storage::atomic_replace;
use drover_store::CatalogUrl;

use crate::error::{Context, Result, bail};

/// What `drover serve --catalog` was last given; with mode 0600, since it may have a password.
const FILE: &str = "catalog.url";

/// Longest content of that file.
const MAX_BYTES: u64 = 8192;

/// The address that was given last.
///
/// # Errors
/// When the file cannot be read.
pub(super) fn remembered(dir: &Path) -> Result<Option<CatalogUrl>> {
    let path = dir.join(FILE);
    let cannot = || format!("cannot read {}", path.display());
    let file = match File::open(&path) {
        Ok(file) => file,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(e).with_context(cannot),
    };
    let mut text = String::new();
    let read = file.take(MAX_BYTES).read_to_string(&mut text);
    read.with_context(cannot)?;
    match text.trim().parse() {
        Ok(url) => Ok(Some(url)),
        Err(e) => bail!("cannot read {}: {e}", path.display()),
    }
}

/// Whether an address was given.
pub(super) fn is_remembered(dir: &Path) -> bool {
    dir.join(FILE).exists()
}

/// Remembers an address.
///
/// # Errors
/// When the file cannot be written.
pub(super) fn remember(dir: &Path, url: &CatalogUrl) -> Result<()> {
    let path = dir.join(FILE);
    atomic_replace(&path, format!("{}\n", url.secret()).as_bytes())
        .with_context(|| format!("cannot write {}", path.display()))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;
    use crate::home::Home;

    #[test]
    fn what_serve_was_given_is_what_the_other_commands_use() {
        let tmp = tempfile::tempdir().unwrap();
        let open = || Home::create(tmp.path().to_owned()).unwrap();
        let url = |text: &str| text.parse::<CatalogUrl>().unwrap();
        let (first, second) = (
            url("postgres://u:secret@localhost/x"),
            url("postgres://localhost/y"),
        );
        let mut home = open();
        assert_eq!(home.config.catalog, None);
        home.use_catalog(first.clone()).unwrap();
        assert_eq!(
            open().config.catalog,
            None,
            "nobody knows whether it is good"
        );
        home.remember_catalog().unwrap();
        let mode = tmp
            .path()
            .join(FILE)
            .metadata()
            .unwrap()
            .permissions()
            .mode();
        assert_eq!(mode & 0o777, 0o600);
        let mut home = open();
        assert_eq!(home.config.catalog, Some(first.clone()));
        home.use_catalog(second.clone()).unwrap();
        home.remember_catalog().unwrap();
        assert_eq!(open().config.catalog, Some(second.clone()));
        std::fs::write(tmp.path().join(FILE), "nonsense").unwrap();
        assert!(Home::create(tmp.path().to_owned()).is_err());
        std::fs::remove_file(tmp.path().join(FILE)).unwrap();
        let config = "catalog = \"postgres://u:secret@localhost/x\"";
        std::fs::write(tmp.path().join("config.toml"), config).unwrap();
        let mut home = open();
        assert_eq!(home.config.catalog, Some(first));
        home.remember_catalog().unwrap();
        assert!(!tmp.path().join(FILE).exists(), "config.toml has it");
        let e = home.use_catalog(second).unwrap_err().to_string();
        assert!(e.contains("config.toml") && !e.contains("secret"), "{e}");
    }
}
