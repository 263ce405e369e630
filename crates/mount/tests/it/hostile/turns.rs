//! A peer whose requests take long, over TLS, and another that must not wait for them.

use drover_core::{Capabilities, Cost, Extent, ExtentKind, Zeroes};
use drover_device::backend::MemoryDevice;
use drover_net::{ConnectOptions, Identity as Key, Listener, Peer, PeerKey, Rights, connect};
use parking_lot::{Condvar, Mutex};

use super::mounts::Rude;
use super::*;

/// An image made so that it takes long to say where its data is.
struct Crafted {
    inner: Arc<MemoryDevice>,
    /// Whether extents are held back, and how many requests for them are.
    gate: Mutex<(bool, usize)>,
    changed: Condvar,
    takes: Duration,
}

impl Crafted {
    fn new(held: bool, takes: Duration) -> Arc<Self> {
        Arc::new(Self {
            inner: memory(&content(3_000_000, 9)),
            gate: Mutex::new((held, 0)),
            changed: Condvar::new(),
            takes,
        })
    }

    fn held(&self) -> usize {
        self.gate.lock().1
    }

    fn let_go(&self) {
        self.gate.lock().0 = false;
        self.changed.notify_all();
    }
}

impl BlockDevice for Crafted {
    fn size(&self) -> u64 {
        self.inner.size()
    }
    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }
    fn read(&self, offset: u64, buffer: &mut [u8]) -> Result<(), DeviceError> {
        self.inner.read(offset, buffer)
    }
    fn write(&self, offset: u64, data: &[u8]) -> Result<(), DeviceError> {
        self.inner.write(offset, data)
    }
    fn write_zeroes(&self, offset: u64, length: u64, zeroes: Zeroes) -> Result<(), DeviceError> {
        self.inner.write_zeroes(offset, length, zeroes)
    }
    fn trim(&self, offset: u64, length: u64) -> Result<(), DeviceError> {
        self.inner.trim(offset, length)
    }
    fn flush(&self) -> Result<(), DeviceError> {
        self.inner.flush()
    }
    fn extents(&self, offset: u64, length: u64) -> Result<Vec<Extent>, DeviceError> {
        let mut gate = self.gate.lock();
        gate.1 += 1;
        while gate.0 {
            self.changed.wait(&mut gate);
        }
        drop(gate);
        std::thread::sleep(self.takes);
        Ok(vec![Extent {
            offset,
            length: length.min(u64::from(CHUNK)),
            kind: ExtentKind::Data,
        }])
    }
    fn prefetch(&self, offset: u64, length: u64) -> Result<(), DeviceError> {
        self.inner.prefetch(offset, length)
    }
    fn cost(&self, offset: u64, length: u64) -> Cost {
        self.inner.cost(offset, length)
    }
    fn write_cost(&self, offset: u64, length: u64) -> Cost {
        self.inner.write_cost(offset, length)
    }
}

/// Lets go what is held, however the test ends.
struct LetGo(Arc<Crafted>);

impl Drop for LetGo {
    fn drop(&mut self) {
        self.0.let_go();
    }
}

/// Serves the site over TLS.
async fn listen(site: &Site) -> (String, PeerKey) {
    let identity = Key::generate();
    let listener = Listener::bind("127.0.0.1:0".parse().unwrap(), &identity).await;
    let listener = listener.unwrap();
    let address = listener.local_addr().to_string();
    let server = site.server.clone();
    tokio::spawn(async move {
        while let Ok(pending) = listener.accept().await {
            let server = server.clone();
            tokio::spawn(async move {
                let connection = pending.handshake().await.unwrap();
                let peer = Peer {
                    key: connection.peer().unwrap(),
                    name: "nantes".into(),
                    rights: Rights::DEFAULT.of_peer(),
                    domain: "default".into(),
                };
                let (_go, stop) = watch::channel(false);
                let call = IncomingCall::receive(connection, stop).await.unwrap();
                let _ = server.serve_connection(peer, call).await;
            });
        }
    });
    (address, identity.key())
}

/// A mount of `web` by this peer.
async fn mount((address, site): &(String, PeerKey), peer: &Key) -> Rude {
    let options = ConnectOptions::named("lyon");
    let connection = connect(address, peer, site, &options).await.unwrap();
    let (mut reader, mut writer) = connection.split();
    let open = Open {
        mount: MountId::random(),
        connection: ConnectionKind::Front,
        link: 1,
        image: name("web"),
        access: Access::ReadOnly,
        chunk: CHUNK,
        expected: None,
        note: String::new(),
        term: None,
    };
    service::open(&mut writer, &open).await.unwrap();
    writer.flush().await.unwrap();
    service::read_reply::<Open>(&mut reader).await.unwrap();
    reader.set_max_frame(MAX_MOUNT_FRAME);
    Rude { reader, writer }
}

fn presence(count: u32) -> Request {
    Request::Presence {
        id: 1,
        first: 0,
        count,
    }
}

/// Sixty requests, each by a mount of its own, that do not end: a short read of another peer is answered while they hang.
#[test]
fn requests_that_hang_keep_no_other_peer_waiting() {
    let runtime = runtime();
    let _inside = runtime.enter();
    let device = Crafted::new(true, Duration::ZERO);
    let _let_go = LetGo(device.clone());
    let site = Site::with("web", device.clone());
    runtime.block_on(async {
        let at = listen(&site).await;
        let rude = Key::generate();
        let mut hanging = Vec::new();
        for _ in 0..60 {
            let mut mount = mount(&at, &rude).await;
            mount.send_request(&presence(10), &[]).await;
            hanging.push(mount);
        }
        while device.held() < 4 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let mut other = mount(&at, &Key::generate()).await;
        let read = Request::DirectRead {
            id: 7,
            offset: 0,
            length: 4096,
        };
        other.send_request(&read, &[]).await;
        let answer = other.hear().await;
        assert!(
            matches!(answer, Some(Reply::Bytes { id: 7, .. })),
            "{answer:?}"
        );
        assert!(device.held() < 10, "the others still hang");
        device.let_go();
        for mut mount in hanging {
            let answer = mount.hear().await;
            assert!(matches!(answer, Some(Reply::Presence { .. })), "{answer:?}");
        }
    });
}

/// What takes long is answered in parts.
#[test]
fn a_presence_request_does_not_take_long() {
    let runtime = runtime();
    let _inside = runtime.enter();
    let site = Site::with("web", Crafted::new(false, Duration::from_millis(30)));
    runtime.block_on(async {
        let at = listen(&site).await;
        let mut mount = mount(&at, &Key::generate()).await;
        mount.send_request(&presence(40), &[]).await;
        let answer = mount.hear().await;
        let Some(Reply::Presence { end, .. }) = answer else {
            panic!("{answer:?}");
        };
        assert_eq!(end, 1, "the first chunk took long enough");
    });
}
