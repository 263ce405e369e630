//! The metrics endpoint for Prometheus: HTTP/1.1, one path, one response per connection.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use hyper::server::conn::http1;
use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio::time::timeout;

use super::server::Server;
use crate::error::{Context, Result, one_line};

/// Upper bound on the size of a request head.
const MAX_HEAD: usize = 8 << 10;

/// Timeout for a request and its response.
const TIME_LIMIT: Duration = Duration::from_secs(5);

/// Upper bound on concurrent requests; more wait.
const MAX_AT_ONCE: usize = 8;

/// Pause after a failed accept, as when file descriptors have run out.
const PAUSE: Duration = Duration::from_millis(200);

/// The format that `prometheus_client` writes.
const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Binds the endpoint.
pub async fn bind(address: SocketAddr) -> Result<TcpListener> {
    TcpListener::bind(address)
        .await
        .with_context(|| format!("cannot listen on {address} for metrics"))
}

/// Serves scrapes until dropped.
pub async fn run(listener: TcpListener, server: Arc<Server>) {
    let app = Router::new()
        .route("/metrics", get(metrics))
        .fallback((StatusCode::NOT_FOUND, "the metrics are at /metrics\n"))
        .with_state(server);
    let app = TowerToHyperService::new(app);
    let places = Arc::new(Semaphore::new(MAX_AT_ONCE));
    loop {
        let Ok(place) = Arc::clone(&places).acquire_owned().await else {
            return;
        };
        match listener.accept().await {
            Ok((stream, _)) => {
                let answer = http1::Builder::new()
                    .keep_alive(false)
                    // Clients may shut down their sending side after the request.
                    .half_close(true)
                    .header_read_timeout(None)
                    .max_buf_size(MAX_HEAD)
                    .serve_connection(TokioIo::new(stream), app.clone());
                tokio::spawn(async move {
                    let _ = timeout(TIME_LIMIT, answer).await;
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

async fn metrics(State(server): State<Arc<Server>>) -> Response {
    match server.metrics_text().await {
        Ok(text) => ([(header::CONTENT_TYPE, CONTENT_TYPE)], text).into_response(),
        Err(e) => {
            let text = format!("{}\n", one_line(&e));
            (StatusCode::INTERNAL_SERVER_ERROR, text).into_response()
        }
    }
}
