//! From a request to a SPDY session: what client and server have in common is agreed upon in headers, then the connection is the session's.

use std::{sync::Arc, time::Duration};

use axum::{
    body::Body,
    extract::Request,
    http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header},
    response::Response,
};
use hyper::upgrade::Upgraded;
use hyper_util::rt::TokioIo;
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::timeout,
};

use super::refusal;

/// Protocol on the connection.
const SPDY: &str = "SPDY/3.1";
/// Header for the protocol of the streams: the client's list, of which the server chooses one.
const PROTOCOL: HeaderName = HeaderName::from_static("x-stream-protocol-version");
/// Header for the protocols that the server accepts.
const ACCEPTED: HeaderName = HeaderName::from_static("x-accepted-stream-protocol-versions");
/// Sessions at the same time.
const SESSIONS: usize = 128;
/// How long the client may take to be sent the answer.
const SWITCH: Duration = Duration::from_secs(10);

/// How many sessions there may be.
#[derive(Clone)]
pub struct Sessions(Arc<Semaphore>);

impl Sessions {
    pub fn new() -> Self {
        Self(Arc::new(Semaphore::new(SESSIONS)))
    }

    /// Answers the request and begins the session, which `serve` is until its end.
    ///
    /// # Errors
    ///
    /// The answer to a request that begins none.
    pub fn begin<F: Future<Output = ()> + Send + 'static>(
        &self,
        request: Request,
        protocol: &'static str,
        serve: impl FnOnce(TokioIo<Upgraded>) -> F + Send + 'static,
    ) -> Result<Response, Box<Response>> {
        let headers = agree(request.headers(), protocol)?;
        let place = self.place()?;
        tokio::spawn(async move {
            if let Ok(Ok(connection)) = timeout(SWITCH, hyper::upgrade::on(request)).await {
                serve(TokioIo::new(connection)).await;
            }
            drop(place);
        });
        let mut response = Response::new(Body::empty());
        *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
        *response.headers_mut() = headers;
        Ok(response)
    }

    fn place(&self) -> Result<OwnedSemaphorePermit, Box<Response>> {
        let place = Arc::clone(&self.0).try_acquire_owned();
        place.map_err(|_| {
            let problem = format!("this node has {SESSIONS} sessions: end one of them");
            Box::new(refusal(StatusCode::SERVICE_UNAVAILABLE, &problem))
        })
    }
}

/// The headers of the answer.
fn agree(request: &HeaderMap, protocol: &'static str) -> Result<HeaderMap, Box<Response>> {
    if !words(request, &header::CONNECTION).any(|word| word.eq_ignore_ascii_case("upgrade"))
        || !words(request, &header::UPGRADE).any(|word| word.eq_ignore_ascii_case(SPDY))
    {
        let problem = format!("this needs an upgrade of the connection to {SPDY}");
        return Err(Box::new(refusal(StatusCode::BAD_REQUEST, &problem)));
    }
    if !words(request, &PROTOCOL).any(|word| word == protocol) {
        let mut answer = refusal(
            StatusCode::FORBIDDEN,
            &format!("this node speaks {protocol}, the client does not"),
        );
        answer
            .headers_mut()
            .insert(ACCEPTED, HeaderValue::from_static(protocol));
        return Err(Box::new(answer));
    }
    let answer = [
        (header::CONNECTION, "Upgrade"),
        (header::UPGRADE, SPDY),
        (PROTOCOL, protocol),
    ];
    let answer = answer.map(|(name, value)| (name, HeaderValue::from_static(value)));
    Ok(answer.into_iter().collect())
}

/// The parts of a header that may be there several times, with several values each.
fn words<'a>(headers: &'a HeaderMap, name: &HeaderName) -> impl Iterator<Item = &'a str> {
    let values = headers.get_all(name).into_iter();
    values
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .map(str::trim)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(headers: &[(&'static str, &'static str)]) -> HeaderMap {
        let mut map = HeaderMap::new();
        for (name, value) in headers {
            map.append(HeaderName::from_static(name), HeaderValue::from_static(value));
        }
        map
    }

    #[test]
    fn a_protocol_is_chosen_that_both_know() {
        let kubectl = request(&[
            ("connection", "Upgrade"),
            ("upgrade", "SPDY/3.1"),
            ("x-stream-protocol-version", "v4.channel.k8s.io"),
            ("x-stream-protocol-version", "v3.channel.k8s.io, channel.k8s.io"),
        ]);
        let answer = agree(&kubectl, "v4.channel.k8s.io").unwrap();
        assert_eq!(answer.get("upgrade").unwrap(), "SPDY/3.1");
        assert_eq!(answer.get("connection").unwrap(), "Upgrade");
        assert_eq!(
            answer.get("x-stream-protocol-version").unwrap(),
            "v4.channel.k8s.io"
        );
        let refused = agree(&kubectl, "portforward.k8s.io").unwrap_err();
        assert_eq!(refused.status(), StatusCode::FORBIDDEN);
        assert_eq!(
            refused
                .headers()
                .get("x-accepted-stream-protocol-versions")
                .unwrap(),
            "portforward.k8s.io"
        );
    }

    #[test]
    fn a_request_that_does_not_upgrade_is_refused() {
        for headers in [
            &[][..],
            &[("connection", "close"), ("upgrade", "SPDY/3.1")],
            &[("connection", "Upgrade"), ("upgrade", "websocket")],
        ] {
            let refused = agree(&request(headers), "v4.channel.k8s.io").unwrap_err();
            assert_eq!(refused.status(), StatusCode::BAD_REQUEST, "{headers:?}");
        }
    }
}
