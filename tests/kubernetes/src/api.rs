//! Client of the API server without kubectl, for frequent requests of a test.

use std::{path::Path, time::Duration};

use reqwest::{Certificate, Client, Method, StatusCode};
use serde_json::Value;

/// A client of the API server with all rights.
#[derive(Clone)]
pub struct Api {
    client: Client,
    base: String,
    token: String,
}

impl Api {
    pub(crate) fn new(base: String, token: &str, authority: &Path) -> Self {
        // Another one in this process may have done so.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let authority = Certificate::from_pem(&std::fs::read(authority).unwrap()).unwrap();
        let client = Client::builder()
            .tls_certs_only([authority])
            .no_proxy()
            .timeout(Duration::from_secs(10))
            // A server that was killed has left connections behind that nothing is known of.
            .pool_max_idle_per_host(0)
            .build()
            .unwrap();
        Self {
            client,
            base,
            token: token.into(),
        }
    }

    async fn call(
        &self,
        method: Method,
        path: &str,
        body: Option<(&str, Vec<u8>)>,
    ) -> Result<(StatusCode, Vec<u8>), String> {
        let mut request = self
            .client
            .request(method, format!("{}{path}", self.base))
            .bearer_auth(&self.token);
        if let Some((kind, body)) = body {
            request = request.header("content-type", kind).body(body);
        }
        let response = request.send().await.map_err(|error| format!("{error:?}"))?;
        let status = response.status();
        let body = response.bytes().await.map_err(|error| format!("{error:?}"))?;
        Ok((status, body.to_vec()))
    }

    async fn value(
        &self,
        method: Method,
        path: &str,
        body: Option<(&str, Vec<u8>)>,
    ) -> Result<Value, String> {
        let (status, body) = self.call(method, path, body).await?;
        if !status.is_success() {
            return Err(format!("{path}: {status}: {}", String::from_utf8_lossy(&body)));
        }
        serde_json::from_slice(&body).map_err(|error| format!("{path}: {error}"))
    }

    /// Returns the object or collection at this path.
    pub async fn get(&self, path: &str) -> Result<Value, String> {
        self.value(Method::GET, path, None).await
    }

    /// Makes an object.
    pub async fn post(&self, path: &str, object: &Value) -> Result<Value, String> {
        self.value(
            Method::POST,
            path,
            Some(("application/json", object.to_string().into_bytes())),
        )
        .await
    }

    /// Whether the API server says that all of it is ready.
    pub async fn ready(&self) -> Result<(), String> {
        match self.call(Method::GET, "/readyz", None).await? {
            (StatusCode::OK, _) => Ok(()),
            (status, body) => Err(format!("{status}: {}", String::from_utf8_lossy(&body))),
        }
    }
}
