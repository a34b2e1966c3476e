//! HTTP for Prometheus: `GET /metrics`, and nothing else.

use std::net::SocketAddr;

use anyhow::Context as _;
use axum::{Router, http::header, response::IntoResponse, routing::get};
use tokio::net::TcpListener;

use super::gather;

/// Of OpenMetrics 1.0.
const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Serves the metrics on this address for the lifetime of the process; without an address, never
/// returns.
///
/// # Errors
///
/// Fails for an unusable address.
pub async fn serve(address: Option<SocketAddr>) -> anyhow::Result<()> {
    let Some(address) = address else {
        return std::future::pending().await;
    };
    let listener = TcpListener::bind(address)
        .await
        .with_context(|| format!("{address} for metrics"))?;
    let router = Router::new().route("/metrics", get(answer));
    axum::serve(listener, router).await?;
    Ok(())
}

async fn answer() -> impl IntoResponse {
    ([(header::CONTENT_TYPE, CONTENT_TYPE)], gather())
}
