//! Whether a connection to a database server is encrypted, and by which certificates the server proves who it is: the options
//! `sslmode` and `sslrootcert` of its address. There is no encryption without proof, which would only look like it.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, aws_lc_rs};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, Error, RootCertStore, SignatureScheme,
};
use tokio_postgres_rustls::MakeRustlsConnect;

/// Upper bound on a file of certificates, in bytes.
const MAX_ROOTS: u64 = 16 << 20;

/// How a server is connected to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Security {
    /// Without TLS; `said` if the address asks for that.
    Plain {
        /// Whether it does.
        said: bool,
    },
    /// With TLS: the server's certificate leads to one in the file.
    Tls {
        /// The file, PEM.
        roots: PathBuf,
        /// Whether the certificate must also be for the name of the host.
        names: bool,
    },
}

impl Security {
    /// Takes the options out of an address; returns the rest of it, which the library understands.
    ///
    /// # Errors
    /// When they are unknown, or contradict each other.
    pub fn of(url: &str) -> Result<(String, Security), String> {
        let (base, options) = url.split_once('?').unwrap_or((url, ""));
        let (mut mode, mut roots, mut rest) = (None, None, Vec::new());
        for option in options.split('&').filter(|option| !option.is_empty()) {
            match option.split_once('=') {
                Some(("sslmode", value)) => mode = Some(value),
                Some(("sslrootcert", value)) => roots = Some(PathBuf::from(decoded(value)?)),
                _ => rest.push(option),
            }
        }
        let rest = match rest.is_empty() {
            true => base.to_owned(),
            false => format!("{base}?{}", rest.join("&")),
        };
        let security = match (mode, roots) {
            (Some("disable"), None) => Security::Plain { said: true },
            (Some("disable"), Some(_)) => {
                return Err(
                    "it has sslrootcert, and sslmode=disable, which does not use it".into(),
                );
            }
            (None | Some("prefer"), None) => Security::Plain { said: false },
            (Some("require" | "verify-ca"), Some(roots)) => Security::Tls {
                roots,
                names: false,
            },
            (None | Some("verify-full"), Some(roots)) => Security::Tls { roots, names: true },
            (Some(mode @ ("require" | "verify-ca" | "verify-full")), None) => {
                return Err(format!(
                    "sslmode={mode} needs sslrootcert=FILE, the certificates that the server's is signed by, as /etc/ssl/certs/ca-certificates.crt: without them anybody could be the server"
                ));
            }
            (Some(mode), _) => {
                return Err(format!(
                    "sslmode is disable, require, verify-ca or verify-full, and not {mode}"
                ));
            }
        };
        Ok((rest, security))
    }

    /// What connects in that way.
    ///
    /// # Errors
    /// When the file of certificates cannot be used.
    pub fn connector(&self) -> Result<MakeRustlsConnect, String> {
        let provider = Arc::new(aws_lc_rs::default_provider());
        let builder = ClientConfig::builder_with_provider(Arc::clone(&provider));
        let builder = builder.with_safe_default_protocol_versions();
        let builder = builder.map_err(|e| e.to_string())?;
        let config = match self {
            // It is never asked to connect.
            Security::Plain { .. } => builder.with_root_certificates(RootCertStore::empty()),
            Security::Tls { roots, names } => {
                let verifier = verifier(roots, *names, provider)?;
                let builder = builder.dangerous();
                builder.with_custom_certificate_verifier(verifier)
            }
        };
        Ok(MakeRustlsConnect::new(config.with_no_client_auth()))
    }
}

/// The value of an option, in which %2F is a slash.
fn decoded(value: &str) -> Result<String, String> {
    let wrong = || format!("{value} is not the name of a file: % stands before two digits");
    let mut out = Vec::new();
    let mut parts = value.split('%');
    out.extend(parts.next().unwrap_or_default().bytes());
    for part in parts {
        let (digits, rest) = part.split_at_checked(2).ok_or_else(wrong)?;
        out.push(u8::from_str_radix(digits, 16).map_err(|_| wrong())?);
        out.extend(rest.bytes());
    }
    String::from_utf8(out).map_err(|_| wrong())
}

/// What checks the certificate of a server.
fn verifier(
    roots: &Path,
    names: bool,
    provider: Arc<CryptoProvider>,
) -> Result<Arc<dyn ServerCertVerifier>, String> {
    let cannot = |why: &dyn std::fmt::Display| {
        format!("cannot read certificates from {}: {why}", roots.display())
    };
    let mut pem = Vec::new();
    let file = File::open(roots).map_err(|e| cannot(&e))?;
    let read = file.take(MAX_ROOTS + 1).read_to_end(&mut pem);
    read.map_err(|e| cannot(&e))?;
    if pem.len() as u64 > MAX_ROOTS {
        return Err(cannot(&"it is too long"));
    }
    let mut store = RootCertStore::empty();
    for certificate in CertificateDer::pem_slice_iter(&pem) {
        let certificate = certificate.map_err(|e| cannot(&e))?;
        store.add(certificate).map_err(|e| cannot(&e))?;
    }
    if store.is_empty() {
        return Err(cannot(&"there is none in it"));
    }
    let built = WebPkiServerVerifier::builder_with_provider(Arc::new(store), provider).build();
    let chain = built.map_err(|e| cannot(&e))?;
    match names {
        true => Ok(chain),
        false => Ok(Arc::new(AnyName(chain))),
    }
}

/// Accepts a certificate that leads to a known one, whatever host it is for.
#[derive(Debug)]
struct AnyName(Arc<WebPkiServerVerifier>);

impl ServerCertVerifier for AnyName {
    fn verify_server_cert(
        &self,
        certificate: &CertificateDer<'_>,
        others: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        status: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        use CertificateError::{NotValidForName, NotValidForNameContext};
        let verified = (self.0).verify_server_cert(certificate, others, name, status, now);
        match verified {
            // The name is looked at when all else is right.
            Err(Error::InvalidCertificate(NotValidForName | NotValidForNameContext { .. })) => {
                Ok(ServerCertVerified::assertion())
            }
            verified => verified,
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.0.verify_tls12_signature(message, certificate, signed)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.0.verify_tls13_signature(message, certificate, signed)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.supported_verify_schemes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_says_how_the_server_proves_who_it_is() {
        let tls = |names| Security::Tls {
            roots: "/etc/ca 1.pem".into(),
            names,
        };
        let plain = |said| Security::Plain { said };
        for (options, rest, expected) in [
            ("", "", plain(false)),
            ("?sslmode=disable", "", plain(true)),
            ("?sslmode=prefer&host=/run", "?host=/run", plain(false)),
            ("?sslrootcert=/etc/ca%201.pem", "", tls(true)),
            (
                "?a=1&sslmode=verify-full&sslrootcert=/etc/ca 1.pem&b=2",
                "?a=1&b=2",
                tls(true),
            ),
            (
                "?sslrootcert=%2fetc/ca 1.pem&sslmode=require",
                "",
                tls(false),
            ),
            (
                "?sslmode=verify-ca&sslrootcert=/etc/ca 1.pem",
                "",
                tls(false),
            ),
        ] {
            let url = format!("postgres://u:p@db/x{options}");
            let found = Security::of(&url).unwrap();
            assert_eq!(found, (format!("postgres://u:p@db/x{rest}"), expected));
        }
        for (options, why) in [
            ("sslmode=require", "needs sslrootcert=FILE"),
            ("sslmode=verify-full", "needs sslrootcert=FILE"),
            (
                "sslmode=allow",
                "disable, require, verify-ca or verify-full",
            ),
            ("sslmode=disable&sslrootcert=/x", "does not use it"),
            ("sslrootcert=%2", "two digits"),
            ("sslrootcert=%zz", "two digits"),
            ("sslrootcert=%ff", "two digits"),
        ] {
            let e = Security::of(&format!("postgres://db/x?{options}")).unwrap_err();
            assert!(e.contains(why), "{e}");
        }
    }

    #[test]
    fn certificates_that_cannot_be_used_are_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("roots.pem");
        let security = Security::Tls {
            roots: path.clone(),
            names: true,
        };
        let said = || security.connector().err().unwrap();
        assert!(said().contains("roots.pem"), "{}", said());
        let bad = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
        for text in ["", "no certificate", bad] {
            std::fs::write(&path, text).unwrap();
            assert!(said().contains("roots.pem"), "{}", said());
        }
    }
}
