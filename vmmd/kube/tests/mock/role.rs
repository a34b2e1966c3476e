//! The role `agent`: as vmmd's own guard, lets calls through whose rule is for agents, and remembers the others.

use std::{
    collections::BTreeSet,
    pin::Pin,
    sync::{Arc, Mutex},
    task::{Context, Poll},
};

use tonic::{Status, body::Body, codegen::http};
use tower::{Layer, Service};
use vmmd_api::rule::METHOD_RULES;

use super::vmmd::lock;

/// The methods that the agent has called without having the role for them.
#[derive(Clone, Default)]
pub struct Refused(Arc<Mutex<BTreeSet<String>>>);

impl Refused {
    pub fn methods(&self) -> BTreeSet<String> {
        lock(&self.0).clone()
    }
}

impl<S> Layer<S> for Refused {
    type Service = Guarded<S>;

    fn layer(&self, inner: S) -> Guarded<S> {
        Guarded {
            inner,
            refused: self.clone(),
        }
    }
}

#[derive(Clone)]
pub struct Guarded<S> {
    inner: S,
    refused: Refused,
}

impl<S> Service<http::Request<Body>> for Guarded<S>
where
    S: Service<http::Request<Body>, Response = http::Response<Body>>,
    S::Future: Send + 'static,
{
    type Response = http::Response<Body>;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Self::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let method = request.uri().path().trim_start_matches('/');
        if METHOD_RULES
            .iter()
            .any(|rule| rule.agents && rule.method == method)
        {
            return Box::pin(self.inner.call(request));
        }
        lock(&self.refused.0).insert(method.to_owned());
        let status = Status::permission_denied(format!("{method} is not for agents"));
        Box::pin(async move { Ok(status.into_http()) })
    }
}
