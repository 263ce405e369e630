//! A real S3 server (`versitygw`), and a proxy before it that fails as told.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use object_store::RetryConfig;
use object_store::aws::AmazonS3Builder;
use object_store::client::ClientOptions;
use object_store::path::Path;

use super::S3Server;
use crate::cloud::{Cloud, Patience};

/// What becomes of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// 503, and nothing is done.
    Busy,
    /// It is done, but 500 is answered.
    LateError,
    /// It is done, but the connection ends without an answer.
    Lost,
    /// Half of the answer comes.
    Torn,
    /// Nothing is done, and nothing is answered for some seconds.
    Silent,
    /// It is done, after some seconds.
    Slow,
    /// A condition that was not met is reported as met.
    Careless,
    /// Nothing is done, and that it was is answered.
    Lie,
}

/// How long nothing is answered.
pub const SILENCE: Duration = Duration::from_secs(3);

/// What a request is: its number, method and path.
type Choose = dyn Fn(u64, &str, &str) -> Option<Fault> + Send + Sync;

/// The server, with a bucket `vaults`; it ends with this.
pub struct Server {
    inner: S3Server,
    _dir: tempfile::TempDir,
}

impl Server {
    /// None, said loudly, if there is no server on this host.
    ///
    /// # Panics
    /// If it does not start.
    #[must_use]
    pub fn start() -> Option<Server> {
        let dir = tempfile::tempdir().unwrap();
        Some(Server {
            inner: S3Server::start(dir.path())?,
            _dir: dir,
        })
    }

    /// A proxy before the server.
    ///
    /// # Panics
    /// If there is no port.
    pub fn proxy(
        &self,
        choose: impl Fn(u64, &str, &str) -> Option<Fault> + Send + Sync + 'static,
    ) -> Proxy {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let server = self.inner.port();
        let ended = Arc::new(AtomicBool::new(false));
        let count = Arc::new(AtomicU64::new(0));
        let choose: Arc<Choose> = Arc::new(choose);
        let (stop, counted) = (ended.clone(), count.clone());
        std::thread::spawn(move || {
            for client in listener.incoming() {
                if stop.load(Ordering::Relaxed) {
                    break;
                }
                let (choose, counted) = (choose.clone(), counted.clone());
                std::thread::spawn(move || {
                    // A client that is gone is no failure of the proxy.
                    let _ = client.and_then(|client| serve(client, server, &counted, &*choose));
                });
            }
        });
        Proxy { port, ended, count }
    }
}

/// A proxy that fails as told; it ends with this.
pub struct Proxy {
    /// Its port on 127.0.0.1.
    pub port: u16,
    ended: Arc<AtomicBool>,
    count: Arc<AtomicU64>,
}

impl Proxy {
    /// A prefix in the bucket of the server, through the proxy.
    ///
    /// # Panics
    /// If the prefix is none.
    #[must_use]
    pub fn cloud(&self, prefix: &str, patience: Patience, secret: &str) -> Cloud {
        let client = ClientOptions::new()
            .with_timeout_disabled()
            .with_connect_timeout(patience.connect)
            .with_allow_http(true);
        let store = AmazonS3Builder::new()
            .with_bucket_name("vaults")
            .with_access_key_id("test")
            .with_secret_access_key(secret)
            .with_region("us-east-1")
            .with_endpoint(format!("http://127.0.0.1:{}", self.port))
            .with_client_options(client)
            .with_disable_bulk_delete(true)
            .with_retry(RetryConfig {
                max_retries: 0,
                ..RetryConfig::default()
            })
            .build()
            .expect("a store");
        let url = format!("s3://vaults/{prefix}");
        let prefix = Path::parse(prefix).expect("a prefix");
        Cloud::over(Arc::new(store), prefix, &url, patience)
    }

    /// How many requests have come.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Relaxed);
        let _ = TcpStream::connect((Ipv4Addr::LOCALHOST, self.port));
    }
}

/// Reads the head of a message, and as much of its body as came with it.
fn head(stream: &mut TcpStream) -> std::io::Result<(String, Vec<u8>)> {
    let mut bytes = Vec::new();
    let mut part = [0; 8192];
    loop {
        if let Some(at) = bytes.windows(4).position(|w| w == b"\r\n\r\n") {
            let rest = bytes.split_off(at + 4);
            return Ok((String::from_utf8_lossy(&bytes).into_owned(), rest));
        }
        match stream.read(&mut part)? {
            0 => return Err(std::io::ErrorKind::UnexpectedEof.into()),
            n => bytes.extend_from_slice(&part[..n]),
        }
    }
}

fn serve(
    mut client: TcpStream,
    server: u16,
    count: &AtomicU64,
    choose: &Choose,
) -> std::io::Result<()> {
    let (head, mut body) = head(&mut client)?;
    let length = head
        .lines()
        .find_map(|line| {
            line.to_ascii_lowercase()
                .strip_prefix("content-length:")?
                .trim()
                .parse()
                .ok()
        })
        .unwrap_or(0);
    let have = body.len();
    body.resize(length, 0);
    client.read_exact(&mut body[have..])?;
    let mut words = head.split(' ');
    let (method, path) = (words.next().unwrap_or(""), words.next().unwrap_or(""));
    let fault = choose(count.fetch_add(1, Ordering::Relaxed), method, path);
    let say = |client: &mut TcpStream, status: &str| {
        write!(
            client,
            "HTTP/1.1 {status}\r\nETag: \"0\"\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
        )
    };
    match fault {
        Some(Fault::Busy) => return say(&mut client, "503 Slow Down"),
        Some(Fault::Lie) => return say(&mut client, "200 OK"),
        Some(Fault::Silent) => {
            std::thread::sleep(SILENCE);
            return Ok(());
        }
        Some(Fault::Slow) => std::thread::sleep(SILENCE),
        _ => {}
    }
    let mut there = TcpStream::connect((Ipv4Addr::LOCALHOST, server))?;
    let head = head.replacen("\r\n", "\r\nConnection: close\r\n", 1);
    there.write_all(head.as_bytes())?;
    // It may refuse without reading it.
    let _ = there.write_all(&body);
    let mut answer = Vec::new();
    there.read_to_end(&mut answer)?;
    match fault {
        Some(Fault::LateError) => say(&mut client, "500 Internal Server Error")?,
        Some(Fault::Lost) => client.shutdown(Shutdown::Both)?,
        Some(Fault::Careless) if answer.starts_with(b"HTTP/1.1 412") => say(&mut client, "200 OK")?,
        Some(Fault::Torn) => {
            let begin = answer
                .windows(4)
                .position(|w| w == b"\r\n\r\n")
                .map_or(0, |at| at + 4);
            client.write_all(&answer[..begin + (answer.len() - begin) / 2])?;
        }
        _ => client.write_all(&answer)?,
    }
    client.shutdown(Shutdown::Both)
}
