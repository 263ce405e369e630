//! The server with TLS, and clients with valid, wrong or no certificates.

use std::path::Path;
use std::sync::Arc;

use drover_core::BlockDevice;
use drover_device::backend::MemoryDevice;
use drover_frontend::nbd::wire::{command as c, option, reply};
use drover_frontend::nbd::{Address, NbdError, ServerOptions, Tls};
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};

use super::Served;
use super::raw::Raw;
use crate::support::{fails, installed, noise, succeeds, text};

/// An authority.
struct Authority(Issuer<'static, KeyPair>);

impl Authority {
    /// Makes one, and leaves its certificate at `path`.
    fn new(name: &str, path: &Path) -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        params.distinguished_name.push(DnType::CommonName, name);
        let key = KeyPair::generate().unwrap();
        let certificate = params.self_signed(&key).unwrap();
        std::fs::write(path, certificate.pem()).unwrap();
        Self(Issuer::new(params, key))
    }

    /// Leaves a certificate and its key in a directory.
    fn sign(&self, usage: ExtendedKeyUsagePurpose, directory: &Path, name: &str) {
        let names = vec!["localhost".to_string(), "127.0.0.1".to_string()];
        let mut params = CertificateParams::new(names).unwrap();
        params.distinguished_name.push(DnType::CommonName, name);
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![usage];
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.0).unwrap();
        std::fs::write(
            directory.join(format!("{name}-cert.pem")),
            certificate.pem(),
        )
        .unwrap();
        std::fs::write(
            directory.join(format!("{name}-key.pem")),
            key.serialize_pem(),
        )
        .unwrap();
    }
}

/// Certificates as libnbd and QEMU look for them: `good` has what the server believes, `bad` a client of another
/// authority, `none` no client at all.
struct Certificates(tempfile::TempDir);

impl Certificates {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| {
            let path = directory.path().join(name);
            std::fs::create_dir(&path).unwrap();
            path
        };
        let (good, bad, none) = (at("good"), at("bad"), at("none"));
        let authority = Authority::new("the authority", &good.join("ca-cert.pem"));
        authority.sign(ExtendedKeyUsagePurpose::ServerAuth, &good, "server");
        authority.sign(ExtendedKeyUsagePurpose::ClientAuth, &good, "client");
        let other = Authority::new("another", &bad.join("ca-cert.pem"));
        other.sign(ExtendedKeyUsagePurpose::ClientAuth, &bad, "client");
        for to in [&bad, &none] {
            std::fs::copy(good.join("ca-cert.pem"), to.join("ca-cert.pem")).unwrap();
        }
        Self(directory)
    }

    fn path(&self, name: &str) -> String {
        text(&self.0.path().join(name)).to_string()
    }

    fn tls(&self, clients: bool) -> Tls {
        let good = self.0.path().join("good");
        let authority = good.join("ca-cert.pem");
        Tls::from_files(
            &good.join("server-cert.pem"),
            &good.join("server-key.pem"),
            clients.then_some(authority.as_path()),
        )
        .expect("certificates")
    }

    fn serve(&self, device: Arc<dyn BlockDevice>, clients: bool) -> Served {
        let options = ServerOptions {
            tls: Some(self.tls(clients)),
            ..ServerOptions::default()
        };
        Served::new(vec![("", device)], options)
    }
}

/// What a client calls a server on TCP, with the certificates of a directory.
fn uri(served: &Served, certificates: &str) -> (drover_frontend::nbd::Listening, u16, String) {
    let listening = served
        .server
        .listen_tcp("127.0.0.1:0".parse().unwrap())
        .unwrap();
    let &Address::Tcp(address) = listening.local_addr() else {
        panic!("not TCP");
    };
    let port = address.port();
    (
        listening,
        port,
        format!("nbds://localhost:{port}/?tls-certificates={certificates}"),
    )
}

#[test]
fn nothing_is_served_in_the_clear() {
    let certificates = Certificates::new();
    let served = certificates.serve(Arc::new(MemoryDevice::new(4096)), false);
    let mut raw = Raw::connect(&served.socket());
    for (option, data) in [
        (option::LIST, &[][..]),
        (option::GO, &[0; 6]),
        (option::STRUCTURED_REPLY, &[]),
        (99, &[]),
    ] {
        assert_eq!(raw.option(option, data)[0].0, reply::ERR_TLS_REQD);
    }
    assert_eq!(raw.option(option::STARTTLS, &[1])[0].0, reply::ERR_INVALID);
    raw.send_option(option::EXPORT_NAME, &[]);
    assert!(raw.is_hung_up());
    // What is no TLS after the option is not taken for anything.
    let mut raw = Raw::connect(&served.socket());
    assert_eq!(raw.option(option::STARTTLS, &[])[0].0, reply::ACK);
    raw.send_option(option::GO, &[0; 6]);
    assert!(raw.is_hung_up());

    // Where it is allowed on a unix socket, it is; TCP stays in TLS.
    let options = ServerOptions {
        tls: Some(certificates.tls(false)),
        plain_unix: true,
        ..ServerOptions::default()
    };
    let served = Served::new(vec![("", Arc::new(MemoryDevice::new(4096)) as _)], options);
    let mut raw = Raw::go(&served.socket(), "", true);
    assert_eq!(raw.does(c::READ, 0, 0, 4, &[]).data, [0; 4]);
    if installed("nothing_is_served_in_the_clear", &["nbdinfo"]) {
        let (_listening, port, _) = uri(&served, "");
        let said = fails("nbdinfo", &[&format!("nbd://localhost:{port}")]);
        assert!(said.contains("TLS"), "{said}");
    }
}

#[test]
fn files_that_are_no_certificates_are_named() {
    let certificates = Certificates::new();
    let good = certificates.0.path().join("good");
    let (certificate, key) = (good.join("server-cert.pem"), good.join("server-key.pem"));
    let other_key = good.join("client-key.pem");
    let missing = good.join("missing.pem");
    for (result, named) in [
        (Tls::from_files(&missing, &key, None), &missing),
        (Tls::from_files(&key, &key, None), &key),
        (
            Tls::from_files(&certificate, &certificate, None),
            &certificate,
        ),
        (
            Tls::from_files(&certificate, &other_key, None),
            &certificate,
        ),
        (
            Tls::from_files(&certificate, &key, Some(&missing)),
            &missing,
        ),
    ] {
        let error = result.unwrap_err();
        assert!(matches!(error, NbdError::Tls { .. }));
        assert!(error.to_string().contains(text(named)), "{error}");
    }
}

#[test]
fn libnbd_copies_in_tls() {
    if !installed("libnbd_copies_in_tls", &["nbdinfo", "nbdcopy"]) {
        return;
    }
    let certificates = Certificates::new();
    let device = Arc::new(MemoryDevice::new(20 << 20));
    let served = certificates.serve(device.clone(), true);
    let (listening, _, good) = uri(&served, &certificates.path("good"));
    let info = succeeds("nbdinfo", &[&good]);
    assert!(info.contains("with TLS"), "{info}");
    let mut bytes = noise(3, 20 << 20);
    bytes[1 << 20..2 << 20].fill(0);
    let (from, back) = (served.path("from"), served.path("back"));
    std::fs::write(&from, &bytes).unwrap();
    succeeds("nbdcopy", &[text(&from), &good]);
    let mut there = vec![1; bytes.len()];
    device.read(0, &mut there).unwrap();
    assert!(there == bytes, "what was written is not there");
    succeeds("nbdcopy", &[&good, text(&back)]);
    assert!(
        std::fs::read(&back).unwrap() == bytes,
        "what was read differs"
    );

    // Without a certificate, or with one of another authority: not a byte.
    let read = served.server.counts().read_bytes;
    let (_a, _, none) = uri(&served, &certificates.path("none"));
    fails("nbdcopy", &[&none, text(&back)]);
    let (_b, _, bad) = uri(&served, &certificates.path("bad"));
    fails("nbdcopy", &[&bad, text(&back)]);
    let counts = served.server.counts();
    assert_eq!(counts.read_bytes, read);
    assert!(counts.failed_handshakes >= 2, "{counts:?}");
    assert_eq!(listening.stop(), 0);
}

#[test]
fn qemu_reads_and_writes_in_tls() {
    if !installed("qemu_reads_and_writes_in_tls", &["qemu-io", "qemu-img"]) {
        return;
    }
    let certificates = Certificates::new();
    let served = certificates.serve(Arc::new(MemoryDevice::new(8 << 20)), true);
    let (_listening, port, _) = uri(&served, "");
    let object = |which: &str| {
        let directory = certificates.path(which);
        format!("tls-creds-x509,id=tls0,endpoint=client,dir={directory}")
    };
    let image = format!(
        "driver=raw,file.driver=nbd,file.server.type=inet,file.server.host=localhost,file.server.port={port},\
         file.tls-creds=tls0"
    );
    let io = |which: &str| {
        let object = object(which);
        let arguments = [
            "--object",
            &object,
            "--image-opts",
            "-c",
            "write -P 9 1M 3M",
            "-c",
            "write -z 2M 64k",
            "-c",
            "read -P 9 1M 1M",
            "-c",
            "read -P 0 2M 64k",
            "-c",
            "flush",
            &image,
        ];
        crate::support::run("qemu-io", &arguments)
    };
    let output = io("good");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success(),
        "{said}{}",
        String::from_utf8_lossy(&output.stderr)
    );
    assert!(!said.contains("failed"), "{said}");
    assert_eq!(served.server.counts().written_bytes, 3 << 20);
    assert!(!io("bad").status.success());
    let info = succeeds(
        "qemu-img",
        &["info", "--object", &object("good"), "--image-opts", &image],
    );
    assert!(info.contains("8 MiB"), "{info}");
}
