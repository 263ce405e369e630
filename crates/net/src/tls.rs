//! TLS 1.3 between two Ed25519 keys.
//!
//! Keys travel as raw public keys (RFC 7250), not as self-signed certificates: what a peer is
//! trusted by is its key and nothing else, so there is no X.509 to parse from a stranger, no
//! name, no validity period and no chain that could be got wrong. Each end proves possession by
//! the handshake's signature. The client accepts exactly the key that it pinned; the server
//! accepts any well-formed key and hands it up, since who may do what is the site's decision (a
//! ticket's holder has a key that the site has never seen).
//!
//! No session tickets, no resumption, no early data: a ticket that the client never reads turns
//! into a reset that eats the tail of a one-way stream, and replays would be ours to handle.

use std::sync::Arc;

use parking_lot::Mutex;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{AlwaysResolvesClientRawPublicKeys, Resumption};
use rustls::crypto::aws_lc_rs::{cipher_suite, kx_group, sign::any_eddsa_type};
use rustls::crypto::{
    CryptoProvider, WebPkiSupportedAlgorithms, verify_tls13_signature_with_raw_key,
};
use rustls::pki_types::{CertificateDer, ServerName, SubjectPublicKeyInfoDer, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{AlwaysResolvesServerRawPublicKeys, NoServerSessionStorage};
use rustls::sign::CertifiedKey;
use rustls::{
    AlertDescription, CertificateError, ClientConfig, DigitallySignedStruct, DistinguishedName,
    Error, PeerIncompatible, ServerConfig, SignatureScheme, version::TLS13,
};

use crate::{Identity, PeerKey};

/// The application protocol, agreed on inside the handshake; a new number for a wire format that
/// cannot talk to this one at all.
pub(crate) const ALPN: &[u8] = b"drover/1";

/// How much ciphertext rustls may hold that the socket has not taken: enough for one `writev` of
/// many records. Measured on loopback: 64 KiB 3.7 GB/s, 256 KiB 4.9, 1 MiB 1.6, where it no longer
/// fits the cache or the socket.
pub(crate) const SEND_BUFFER: usize = 256 << 10;

/// DER of a SubjectPublicKeyInfo for Ed25519 up to the key (RFC 8410 §4).
const SPKI_PREFIX: [u8; 12] = [
    0x30, 0x2a, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x03, 0x21, 0x00,
];

fn spki(key: &PeerKey) -> Vec<u8> {
    [&SPKI_PREFIX[..], &key.0].concat()
}

/// The key in a peer's SubjectPublicKeyInfo, which must be the one encoding of an Ed25519 key.
pub(crate) fn peer_key(spki: &[u8]) -> Option<PeerKey> {
    let key = spki.strip_prefix(&SPKI_PREFIX)?;
    key.try_into().ok().map(PeerKey)
}

fn provider() -> CryptoProvider {
    CryptoProvider {
        cipher_suites: vec![
            cipher_suite::TLS13_AES_256_GCM_SHA384,
            cipher_suite::TLS13_AES_128_GCM_SHA256,
            cipher_suite::TLS13_CHACHA20_POLY1305_SHA256,
        ],
        // What crosses the link today must not be readable by a quantum computer later.
        kx_groups: vec![kx_group::X25519MLKEM768, kx_group::X25519],
        ..rustls::crypto::aws_lc_rs::default_provider()
    }
}

fn certified(identity: &Identity) -> Result<Arc<CertifiedKey>, Error> {
    let signer = any_eddsa_type(identity.pkcs8())?;
    Ok(Arc::new(CertifiedKey::new(
        vec![CertificateDer::from(spki(&identity.key()))],
        signer,
    )))
}

/// The listening side's settings.
pub(crate) fn server_config(identity: &Identity) -> Result<Arc<ServerConfig>, Error> {
    let provider = Arc::new(provider());
    let verifier = AnyKey {
        algorithms: provider.signature_verification_algorithms,
    };
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&TLS13])?
        .with_client_cert_verifier(Arc::new(verifier))
        .with_cert_resolver(Arc::new(AlwaysResolvesServerRawPublicKeys::new(certified(
            identity,
        )?)));
    config.alpn_protocols = vec![ALPN.to_vec()];
    config.send_tls13_tickets = 0;
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.max_early_data_size = 0;
    Ok(Arc::new(config))
}

/// Where a client's handshake leaves the key that the server proved when it is the wrong one.
pub(crate) type PeerKeySlot = Arc<Mutex<Option<PeerKey>>>;

/// The connecting side's settings for one attempt, and where the key that the server showed is
/// found when it was not `expected`.
pub(crate) fn client_config(
    identity: &Identity,
    expected: &PeerKey,
) -> Result<(Arc<ClientConfig>, PeerKeySlot), Error> {
    let provider = Arc::new(provider());
    let found = Arc::new(Mutex::new(None));
    let verifier = PinnedKey {
        algorithms: provider.signature_verification_algorithms,
        expected: *expected,
        found: found.clone(),
    };
    let mut config = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&TLS13])?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(verifier))
        .with_client_cert_resolver(Arc::new(AlwaysResolvesClientRawPublicKeys::new(certified(
            identity,
        )?)));
    config.alpn_protocols = vec![ALPN.to_vec()];
    config.resumption = Resumption::disabled();
    config.enable_sni = false;
    config.enable_early_data = false;
    Ok((Arc::new(config), found))
}

/// rustls wants a server's name; it is not checked, and not sent.
pub(crate) fn server_name() -> ServerName<'static> {
    ServerName::try_from("drover").expect("a valid name")
}

/// What went wrong in a handshake, for a person.
pub(crate) fn explain(e: &Error) -> String {
    match e {
        Error::InvalidCertificate(CertificateError::BadEncoding) => {
            "the other end's key is not an Ed25519 key".into()
        }
        Error::NoCertificatesPresented
        | Error::PeerIncompatible(PeerIncompatible::IncorrectCertificateTypeExtension) => {
            "the other end shows no raw public key".into()
        }
        Error::AlertReceived(AlertDescription::ProtocolVersion) => {
            "the other end does not speak TLS 1.3".into()
        }
        Error::AlertReceived(AlertDescription::NoApplicationProtocol)
        | Error::NoApplicationProtocol => "the other end is not a drover site".into(),
        Error::AlertReceived(AlertDescription::AccessDenied | AlertDescription::BadCertificate) => {
            "the other end expected another key".into()
        }
        Error::InvalidMessage(_) => "the other end does not speak TLS".into(),
        other => other.to_string(),
    }
}

fn ed25519_of(end_entity: &CertificateDer<'_>, chain: &[CertificateDer<'_>]) -> Option<PeerKey> {
    if chain.is_empty() {
        peer_key(end_entity)
    } else {
        None
    }
}

fn check_signature(
    message: &[u8],
    key: &CertificateDer<'_>,
    signature: &DigitallySignedStruct,
    algorithms: &WebPkiSupportedAlgorithms,
) -> Result<HandshakeSignatureValid, Error> {
    if signature.scheme != SignatureScheme::ED25519 {
        return Err(Error::InvalidCertificate(CertificateError::BadEncoding));
    }
    let spki = SubjectPublicKeyInfoDer::from(key.as_ref());
    verify_tls13_signature_with_raw_key(message, &spki, signature, algorithms)
}

/// TLS 1.2 is not compiled in; should it ever be, it stays refused.
fn not_tls12() -> Result<HandshakeSignatureValid, Error> {
    Err(Error::General("TLS 1.3 only".into()))
}

/// The client's check: this key and no other.
#[derive(Debug)]
struct PinnedKey {
    algorithms: WebPkiSupportedAlgorithms,
    expected: PeerKey,
    found: PeerKeySlot,
}

impl ServerCertVerifier for PinnedKey {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        // Which key it is, is looked at after the signature: an error names a key only when the
        // other end really has it.
        ed25519_of(end_entity, intermediates)
            .map(|_| ServerCertVerified::assertion())
            .ok_or(Error::InvalidCertificate(CertificateError::BadEncoding))
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _cert: &CertificateDer<'_>,
        _dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        not_tls12()
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let valid = check_signature(message, cert, dss, &self.algorithms)?;
        let key = peer_key(cert);
        if key == Some(self.expected) {
            return Ok(valid);
        }
        *self.found.lock() = key;
        Err(Error::InvalidCertificate(
            CertificateError::ApplicationVerificationFailure,
        ))
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        vec![SignatureScheme::ED25519]
    }

    fn requires_raw_public_keys(&self) -> bool {
        true
    }
}

/// The server's check: any Ed25519 key whose possession is proven.
#[derive(Debug)]
struct AnyKey {
    algorithms: WebPkiSupportedAlgorithms,
}

impl ClientCertVerifier for AnyKey {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        ed25519_of(end_entity, intermediates)
            .map(|_| ClientCertVerified::assertion())
            .ok_or(Error::InvalidCertificate(CertificateError::BadEncoding))
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _cert: &CertificateDer<'_>,
        _dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        not_tls12()
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        check_signature(message, cert, dss, &self.algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        vec![SignatureScheme::ED25519]
    }

    fn requires_raw_public_keys(&self) -> bool {
        true
    }
}
