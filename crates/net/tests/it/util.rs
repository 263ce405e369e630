//! Test helpers.

use std::net::SocketAddr;
use std::sync::{Arc, LazyLock};

use drover_net::{
    ConnectOptions, Connection, FrameReader, FrameWriter, Identity, Listener, MAX_FRAME, NetError,
    connect,
};
use rustls::ClientConfig;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{AlwaysResolvesClientRawPublicKeys, ResolvesClientCert};
use rustls::crypto::aws_lc_rs as provider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivatePkcs8KeyDer, ServerName, UnixTime};
use rustls::sign::CertifiedKey;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

/// A listener on the loopback and whose it is.
pub async fn listener() -> (Listener, Identity) {
    let identity = Identity::generate();
    let listener = Listener::bind(([127, 0, 0, 1], 0).into(), &identity)
        .await
        .unwrap();
    (listener, identity)
}

/// Both ends of a TLS connection: the server's, then the client's.
pub async fn tls_pair() -> (Connection, Connection) {
    let (listener, server) = listener().await;
    let (client, key) = (Identity::generate(), server.key());
    let address = listener.local_addr().to_string();
    let options = ConnectOptions::default();
    let (there, here) = tokio::join!(
        async { listener.accept().await.unwrap().handshake().await },
        connect(&address, &client, &key, &options)
    );
    (there.unwrap(), here.unwrap())
}

/// A client that need not keep to our rules.
pub struct Rude {
    /// Offers to show a key.
    pub key: bool,
    /// Has none to show when asked.
    pub empty: bool,
    /// Speaks raw public keys.
    pub raw: bool,
    /// What it offers to speak.
    pub alpn: &'static [&'static [u8]],
}

impl Default for Rude {
    fn default() -> Self {
        Rude {
            key: true,
            empty: false,
            raw: true,
            alpn: &[b"drover/1"],
        }
    }
}

impl Rude {
    pub async fn connect(&self, address: SocketAddr) -> std::io::Result<TlsStream<TcpStream>> {
        let builder = ClientConfig::builder_with_provider(Arc::new(provider::default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(Anything { raw: self.raw }));
        let mut config = if self.empty {
            builder.with_client_cert_resolver(Arc::new(Empty))
        } else if self.key {
            let (spki, pkcs8) = key_pair();
            let signer = provider::sign::any_eddsa_type(&pkcs8).unwrap();
            let key = CertifiedKey::new(vec![CertificateDer::from(spki)], signer);
            builder.with_client_cert_resolver(Arc::new(AlwaysResolvesClientRawPublicKeys::new(
                Arc::new(key),
            )))
        } else {
            builder.with_no_client_auth()
        };
        config.alpn_protocols = self.alpn.iter().map(|a| a.to_vec()).collect();
        let tcp = TcpStream::connect(address).await?;
        TlsConnector::from(Arc::new(config))
            .connect(ServerName::try_from("localhost").unwrap(), tcp)
            .await
    }
}

/// A key as TLS wants it, made the way a site makes its own.
fn key_pair() -> (Vec<u8>, PrivatePkcs8KeyDer<'static>) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("key.pem");
    let identity = Identity::load_or_create(&path).unwrap();
    let mut spki = vec![0x30, 0x2a, 0x30, 5, 6, 3, 0x2b, 0x65, 0x70, 3, 0x21, 0];
    spki.extend(identity.key().0);
    (spki, PrivatePkcs8KeyDer::from_pem_file(&path).unwrap())
}

/// Agrees to show a raw key and then does not.
#[derive(Debug)]
struct Empty;

impl ResolvesClientCert for Empty {
    fn resolve(&self, _: &[&[u8]], _: &[rustls::SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        None
    }
    fn only_raw_public_keys(&self) -> bool {
        true
    }
    fn has_certs(&self) -> bool {
        true
    }
}

#[derive(Debug)]
struct Anything {
    raw: bool,
}

impl ServerCertVerifier for Anything {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }
    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &rustls::DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }
    fn verify_tls13_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &rustls::DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }
    fn supported_verify_schemes(&self) -> Vec<rustls::SignatureScheme> {
        vec![rustls::SignatureScheme::ED25519]
    }
    fn requires_raw_public_keys(&self) -> bool {
        self.raw
    }
}

/// A frame as the format page describes it, made without the crate's help.
pub fn raw_frame(version: u8, kind: u8, reserved: u16, payload: &[u8]) -> Vec<u8> {
    let mut out = vec![version, kind];
    out.extend(reserved.to_le_bytes());
    out.extend((payload.len() as u32).to_le_bytes());
    let mut checked = out.clone();
    checked.extend(payload);
    let crc = crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, &checked) as u32;
    out.extend(crc.to_le_bytes());
    out.extend(payload);
    out
}

/// Reads to the end and returns how many payload bytes came, checking that each is the expected
/// one of [`pattern`].
pub async fn count_pattern(reader: &mut FrameReader) -> Result<u64, NetError> {
    let mut at = 0u64;
    while let Some(frame) = reader.next().await? {
        assert_eq!(&frame.payload[..], pattern(at, frame.payload.len()));
        at += frame.payload.len() as u64;
    }
    Ok(at)
}

/// Sends `total` bytes of the pattern in frames of `frame` bytes.
pub async fn send_pattern(
    writer: &mut FrameWriter,
    total: u64,
    frame: usize,
) -> Result<(), NetError> {
    let mut at = 0u64;
    while at < total {
        let n = frame.min((total - at) as usize);
        writer.send(7, pattern(at, n)).await?;
        at += n as u64;
    }
    Ok(())
}

/// `len` bytes, at most [`MAX_FRAME`], that say where in a stream they are: the period is a prime,
/// so a lost or doubled frame shows.
pub fn pattern(at: u64, len: usize) -> &'static [u8] {
    const PERIOD: u64 = 1_048_573;
    static BYTES: LazyLock<Vec<u8>> = LazyLock::new(|| {
        let noise = |i: u64| (i % PERIOD).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56;
        (0..PERIOD + MAX_FRAME as u64)
            .map(|i| noise(i) as u8)
            .collect()
    });
    &BYTES[(at % PERIOD) as usize..][..len]
}
