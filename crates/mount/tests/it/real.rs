//! A real image over real connections.

use std::process::Command;
use std::sync::Arc;

use drover_device::backend::ImageDevice;
use drover_device::remote::Remote;
use drover_mount::client::{Client, Connecting, Connector, Options};
use drover_mount::server::Server;
use drover_net::service::IncomingCall;
use drover_net::{ConnectOptions, Identity, Listener, Peer, PeerKey, Rights, connect};
use drover_store::lease::Access;
use tokio::sync::watch;

use crate::local_stub::LocalStub;
use crate::util::{Site, content, name, runtime};

/// Connects over TLS.
struct Tls {
    identity: Identity,
    address: String,
    site: PeerKey,
}

impl Connector for Tls {
    fn connect(&self) -> Connecting<'_> {
        Box::pin(async move {
            let options = ConnectOptions::default();
            Ok(connect(&self.address, &self.identity, &self.site, &options).await?)
        })
    }
}

async fn listen(listener: Listener, server: Arc<Server>) {
    while let Ok(pending) = listener.accept().await {
        let server = server.clone();
        tokio::spawn(async move {
            let connection = pending.handshake().await.expect("a handshake");
            let peer = Peer {
                key: connection.peer().expect("a key"),
                name: "nantes".into(),
                rights: Rights::DEFAULT.of_peer(),
                domain: "default".into(),
            };
            let (_go, stop) = watch::channel(false);
            let call = IncomingCall::receive(connection, stop)
                .await
                .expect("a call");
            let _ = server.serve_connection(peer, call).await;
        });
    }
}

#[test]
fn an_image_that_qemu_made_is_read_whole_over_tls() {
    let directory = tempfile::tempdir().unwrap();
    let (raw, qcow2) = (directory.path().join("a"), directory.path().join("b"));
    let bytes = content(5_000_192, 11);
    std::fs::write(&raw, &bytes).unwrap();
    let convert = |from: &str, to: &str, a: &std::path::Path, b: &std::path::Path| {
        let mut command = Command::new("qemu-img");
        command.args(["convert", "-f", from, "-O", to]).args([a, b]);
        command.output()
    };
    match convert("raw", "qcow2", &raw, &qcow2) {
        Err(e) => {
            eprintln!("SKIP an_image_that_qemu_made_is_read_whole_over_tls: no qemu-img: {e}");
            return;
        }
        Ok(output) => assert!(output.status.success(), "{output:?}"),
    }
    let device = Arc::new(ImageDevice::open(&qcow2).unwrap());
    let runtime = runtime();
    let _inside = runtime.enter();
    let site = Site::with("web.qcow2", device);
    let own = Identity::generate();
    let listener = runtime
        .block_on(Listener::bind(([127, 0, 0, 1], 0).into(), &own))
        .unwrap();
    let tls = Arc::new(Tls {
        identity: Identity::generate(),
        address: listener.local_addr().to_string(),
        site: own.key(),
    });
    runtime.spawn(listen(listener, site.server.clone()));
    let options = Options::new(name("web.qcow2"), Access::ReadOnly);
    let client = runtime
        .block_on(Client::open(runtime.handle(), tls, options))
        .unwrap();
    let local = LocalStub::attach(&client, true);
    local.wait_all();
    let size = client.shape().size as usize;
    let mut expected = bytes;
    expected.resize(size, 0);
    local.all_is(&expected);
}
