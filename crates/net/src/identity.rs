//! A site's Ed25519 key pair and the name that others know it by.

use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use aws_lc_rs::signature::{Ed25519KeyPair, KeyPair};
use data_encoding::{BASE32_NOPAD, BASE64};
use rustls::pki_types::PrivatePkcs8KeyDer;
use rustls::pki_types::pem::PemObject;

use crate::error::plain;
use crate::{NetError, PeerKey};

/// A site's key pair. Cheap to clone; the secret half is never printed.
#[derive(Clone)]
pub struct Identity(Arc<Inner>);

struct Inner {
    key: PeerKey,
    pkcs8: PrivatePkcs8KeyDer<'static>,
}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Identity({})", self.0.key)
    }
}

/// Maximum size of a key file; a larger file is something else.
const MAX_FILE: u64 = 16 << 10;

impl Identity {
    /// A new key pair that is nowhere stored.
    ///
    /// # Panics
    /// When the system has no randomness to give, without which no key may be made.
    #[must_use]
    pub fn generate() -> Self {
        let pair = Ed25519KeyPair::generate().expect("the system gives randomness");
        let pkcs8 = pair.to_pkcs8v1().expect("a fresh key pair has an encoding");
        Identity(Arc::new(Inner {
            key: public_key(&pair),
            pkcs8: PrivatePkcs8KeyDer::from(pkcs8.as_ref().to_vec()),
        }))
    }

    /// The public half.
    #[must_use]
    pub fn key(&self) -> PeerKey {
        self.0.key
    }

    /// Reads the key pair in `path` (PKCS#8, PEM or DER), or makes one there: PEM, mode 0600,
    /// complete and synced before it carries its name. Two processes that do this at the same
    /// time end with the same identity. Blocks on the disk.
    ///
    /// # Errors
    /// [`NetError::Identity`] when the file cannot be read or made, is not an Ed25519 key, or
    /// may be read by others than its owner.
    pub fn load_or_create(path: impl AsRef<Path>) -> Result<Self, NetError> {
        let path = path.as_ref();
        match Self::load(path) {
            Err(Failure::Io(e)) if e.kind() == io::ErrorKind::NotFound => {
                let new = Self::generate();
                match new.store(path) {
                    Ok(()) => Ok(new),
                    // Another process was faster: its key is the site's.
                    Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Self::load(path),
                    Err(e) => Err(Failure::Io(e)),
                }
            }
            other => other,
        }
        .map_err(|failure| NetError::Identity {
            path: path.to_owned(),
            reason: match failure {
                Failure::Io(e) => plain(&e),
                Failure::Unusable(why) => why,
            },
        })
    }

    fn load(path: &Path) -> Result<Self, Failure> {
        let file = File::open(path)?;
        let meta = file.metadata()?;
        if !meta.is_file() {
            return Err(Failure::Unusable("not a regular file".into()));
        }
        let mode = meta.permissions().mode() & 0o777;
        if mode & 0o077 != 0 {
            return Err(Failure::Unusable(format!(
                "others may read the secret key (mode {mode:03o}); run chmod 600 on it, or remove \
                 it to get a new identity"
            )));
        }
        let mut bytes = Vec::new();
        file.take(MAX_FILE).read_to_end(&mut bytes)?;
        let pkcs8 = if bytes.starts_with(b"-----") {
            PrivatePkcs8KeyDer::from_pem_slice(&bytes)
                .map_err(|_| Failure::Unusable("not a PKCS#8 private key in PEM".into()))?
        } else {
            PrivatePkcs8KeyDer::from(bytes)
        };
        let pair = Ed25519KeyPair::from_pkcs8_maybe_unchecked(pkcs8.secret_pkcs8_der())
            .map_err(|_| Failure::Unusable("not an Ed25519 private key".into()))?;
        Ok(Identity(Arc::new(Inner {
            key: public_key(&pair),
            pkcs8,
        })))
    }

    fn store(&self, path: &Path) -> io::Result<()> {
        let directory = match path.parent() {
            Some(p) if !p.as_os_str().is_empty() => p,
            _ => Path::new("."),
        };
        let name = path.file_name().ok_or(io::ErrorKind::InvalidInput)?;
        let mut random = [0u8; 5];
        aws_lc_rs::rand::fill(&mut random).map_err(|_| io::Error::other("no randomness"))?;
        let mut temporary = std::ffi::OsString::from(".");
        temporary.push(name);
        temporary.push(".");
        temporary.push(BASE32_NOPAD.encode(&random));
        let temporary = Temporary(directory.join(temporary));

        let mut file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&temporary.0)?;
        file.write_all(self.to_pem().as_bytes())?;
        file.sync_all()?;
        // A link, unlike a rename, does not replace a key that appeared meanwhile.
        fs::hard_link(&temporary.0, path)?;
        drop(temporary);
        File::open(directory)?.sync_all()
    }

    fn to_pem(&self) -> String {
        let text = BASE64.encode(self.0.pkcs8.secret_pkcs8_der());
        let mut pem = String::from("-----BEGIN PRIVATE KEY-----\n");
        for line in text.as_bytes().chunks(64) {
            pem.extend(line.iter().copied().map(char::from));
            pem.push('\n');
        }
        pem.push_str("-----END PRIVATE KEY-----\n");
        pem
    }

    /// The secret half, for the TLS library.
    pub(crate) fn pkcs8(&self) -> &PrivatePkcs8KeyDer<'static> {
        &self.0.pkcs8
    }
}

fn public_key(pair: &Ed25519KeyPair) -> PeerKey {
    let mut key = [0u8; 32];
    key.copy_from_slice(pair.public_key().as_ref());
    PeerKey(key)
}

enum Failure {
    Io(io::Error),
    Unusable(String),
}

impl From<io::Error> for Failure {
    fn from(e: io::Error) -> Self {
        Failure::Io(e)
    }
}

/// A file that is removed when this goes away.
struct Temporary(PathBuf);

impl Drop for Temporary {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ParseKeyError;

    #[test]
    fn made_once_then_the_same() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("identity.pem");
        let made = Identity::load_or_create(&path).unwrap();
        let mode = fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let again = Identity::load_or_create(&path).unwrap();
        assert_eq!(made.key(), again.key());
        assert_eq!(
            fs::read_dir(dir.path()).unwrap().count(),
            1,
            "no temporary stays"
        );
        assert_ne!(Identity::generate().key(), made.key());
        assert!(!format!("{made:?}").contains("PRIVATE"));

        // DER is read as well.
        let der = dir.path().join("identity.der");
        fs::write(&der, made.pkcs8().secret_pkcs8_der()).unwrap();
        fs::set_permissions(&der, fs::Permissions::from_mode(0o400)).unwrap();
        assert_eq!(Identity::load_or_create(&der).unwrap().key(), made.key());
    }

    #[test]
    fn openssl_reads_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("identity.pem");
        let made = Identity::load_or_create(&path).unwrap();
        let run = std::process::Command::new("openssl")
            .args(["pkey", "-pubout", "-outform", "DER", "-in"])
            .arg(&path)
            .output();
        match run {
            Ok(out) => {
                assert!(out.status.success(), "{out:?}");
                assert!(out.stdout.ends_with(&made.key().0));
            }
            Err(e) => eprintln!("SKIP openssl_reads_the_file: cannot run openssl: {e}"),
        }
    }

    #[test]
    fn two_at_once_agree() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("identity.pem");
        let keys: Vec<_> = std::thread::scope(|s| {
            let all: Vec<_> = (0..8)
                .map(|_| s.spawn(|| Identity::load_or_create(&path).unwrap().key()))
                .collect();
            all.into_iter().map(|t| t.join().unwrap()).collect()
        });
        assert!(keys.iter().all(|k| *k == keys[0]), "{keys:?}");
    }

    #[test]
    fn unusable_files_are_refused_and_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("identity.pem");
        Identity::load_or_create(&path).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
        let e = Identity::load_or_create(&path).unwrap_err();
        assert!(e.to_string().contains("mode 640"), "{e}");
        assert!(e.refused());

        for junk in [&b""[..], b"-----BEGIN PRIVATE KEY-----\nAAAA", &[7; 9000]] {
            fs::write(&path, junk).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
            assert!(matches!(
                Identity::load_or_create(&path),
                Err(NetError::Identity { .. })
            ));
            assert_eq!(fs::read(&path).unwrap(), junk);
        }
        let e = Identity::load_or_create(dir.path().join("no/such/file")).unwrap_err();
        assert!(e.to_string().contains("no such file"), "{e}");
    }

    #[test]
    fn keys_as_text() {
        let key = Identity::generate().key();
        let text = key.to_string();
        assert_eq!(text.len(), 52);
        assert_eq!(text.parse(), Ok(key));
        assert_eq!(text.to_ascii_uppercase().parse(), Ok(key));
        assert!(text.starts_with(&key.short()));
        assert_eq!(text[1..].parse::<PeerKey>(), Err(ParseKeyError));
        assert_eq!("1".repeat(52).parse::<PeerKey>(), Err(ParseKeyError));
        assert_eq!("é".repeat(26).parse::<PeerKey>(), Err(ParseKeyError));
        let bytes = crate::encode(&key);
        assert_eq!(bytes, key.0);
        assert_eq!(crate::decode::<PeerKey>(&bytes).unwrap(), key);
    }
}
