//! A port where Prometheus fetches metrics: HTTP/1.1, one path, one answer a connection.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::time::timeout;

use super::Server;

/// The longest request head that is read.
const MAX_HEAD: usize = 8 << 10;

/// How long a request and its answer may take.
const TIME_LIMIT: Duration = Duration::from_secs(5);

/// Requests at once; more wait.
const MAX_AT_ONCE: usize = 8;

/// How long to wait when no connection can be taken, as when file descriptors have run out.
const PAUSE: Duration = Duration::from_millis(200);

/// Listens for scrapes.
pub async fn bind(address: SocketAddr) -> Result<TcpListener> {
    TcpListener::bind(address)
        .await
        .with_context(|| format!("cannot listen on {address} for metrics"))
}

/// Answers scrapes until it is dropped.
pub async fn run(listener: TcpListener, server: Arc<Server>) {
    let places = Arc::new(Semaphore::new(MAX_AT_ONCE));
    loop {
        let Ok(place) = Arc::clone(&places).acquire_owned().await else {
            return;
        };
        match listener.accept().await {
            Ok((stream, _)) => {
                let server = Arc::clone(&server);
                tokio::spawn(async move {
                    let _ = timeout(TIME_LIMIT, answer(stream, &server)).await;
                    drop(place);
                });
            }
            Err(e) => {
                tracing::debug!("metrics port: {e}");
                tokio::time::sleep(PAUSE).await;
            }
        }
    }
}

async fn answer(mut stream: TcpStream, server: &Arc<Server>) -> std::io::Result<()> {
    let mut head = Vec::new();
    let mut part = [0u8; 1024];
    while !head.windows(4).any(|w| w == b"\r\n\r\n") {
        let n = stream.read(&mut part).await?;
        if n == 0 || head.len() + n > MAX_HEAD {
            return Ok(());
        }
        head.extend_from_slice(&part[..n]);
    }
    let (status, body) = match route(&head) {
        Ok(()) => match server.metrics_text().await {
            Ok(text) => ("200 OK", text),
            Err(e) => (
                "500 Internal Server Error",
                format!("{}\n", crate::failure::one_line(&e)),
            ),
        },
        Err(status) => (status, format!("{status}; the metrics are at /metrics\n")),
    };
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n\
         Content-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes()).await?;
    stream.write_all(body.as_bytes()).await?;
    stream.shutdown().await
}

/// Whether the request is for the metrics, else the status that it gets.
fn route(head: &[u8]) -> Result<(), &'static str> {
    let line = head.split(|&b| b == b'\r').next().unwrap_or_default();
    let mut words = line.split(|&b| b == b' ');
    let (method, target, version) = (words.next(), words.next(), words.next());
    if words.next().is_some() || !version.is_some_and(|v| v.starts_with(b"HTTP/1.")) {
        return Err("400 Bad Request");
    }
    if method != Some(b"GET") {
        return Err("405 Method Not Allowed");
    }
    let path = target.unwrap_or_default().split(|&b| b == b'?').next();
    if path == Some(b"/metrics") {
        Ok(())
    } else {
        Err("404 Not Found")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_metrics_are_there() {
        assert_eq!(route(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"), Ok(()));
        assert_eq!(route(b"GET /metrics?x=1 HTTP/1.0\r\n\r\n"), Ok(()));
        assert_eq!(route(b"GET / HTTP/1.1\r\n\r\n"), Err("404 Not Found"));
        assert_eq!(
            route(b"POST /metrics HTTP/1.1\r\n\r\n"),
            Err("405 Method Not Allowed")
        );
        for bad in [
            &b""[..],
            b"\r\n\r\n",
            b"GET\r\n\r\n",
            b"GET /metrics SSH-2.0\r\n\r\n",
            b"\xff\xfe \x00",
        ] {
            assert_eq!(route(bad), Err("400 Bad Request"));
        }
    }
}
