//! A peer's stream of frames, hello first: read to its end or refused, never more than the limit
//! in memory. Half of the inputs are frames with valid headers made here.

use std::io::Write;
use std::sync::LazyLock;

use drover_net::{Connection, Role, greet};

static RUNTIME: LazyLock<tokio::runtime::Runtime> = LazyLock::new(|| {
    let mut builder = tokio::runtime::Builder::new_current_thread();
    builder.enable_all().build().expect("a runtime")
});

/// Frames `kind, length, payload` with the headers that belong to them.
fn framed(mut data: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    while let [kind, length, rest @ ..] = data {
        let (payload, rest) = rest.split_at(usize::from(*length).min(rest.len()));
        data = rest;
        let mut head = vec![1, *kind, 0, 0];
        head.extend((payload.len() as u32).to_le_bytes());
        let mut crc = crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc32Iscsi);
        crc.update(&head);
        crc.update(payload);
        out.extend(head);
        out.extend((crc.finalize() as u32).to_le_bytes());
        out.extend(payload);
    }
    out
}

pub fn run(data: &[u8]) {
    let Some((&mode, data)) = data.split_first() else {
        return;
    };
    let bytes = match mode & 1 {
        0 => data.to_vec(),
        _ => framed(data),
    };
    // At most a socket's buffer, so that writing never blocks on reading.
    let bytes = &bytes[..bytes.len().min(60_000)];
    RUNTIME.block_on(async {
        let (mut peer, ours) = std::os::unix::net::UnixStream::pair().expect("sockets");
        peer.write_all(bytes).expect("room");
        peer.shutdown(std::net::Shutdown::Write).expect("open");
        ours.set_nonblocking(true).expect("a socket");
        let ours = tokio::net::UnixStream::from_std(ours).expect("a socket");
        let (mut reader, mut writer) = Connection::from_unix(ours, "peer").split();
        reader.set_max_frame(1 << 16);
        if mode & 2 == 0 && greet(&mut reader, &mut writer, Role::Server).await.is_err() {
            return;
        }
        while let Ok(Some(frame)) = reader.next().await {
            assert!(frame.payload.len() <= 1 << 16 && frame.kind < 0xf0);
        }
    });
}
