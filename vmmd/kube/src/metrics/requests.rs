//! Counts the requests to the API server, below everything that makes some.

use std::{
    pin::Pin,
    task::{Context, Poll},
};

use axum::http::{Request, Response, Uri};
use tower::{Layer, Service};

/// The layer of a client that counts.
#[derive(Clone, Copy, Debug)]
pub struct Count;

impl<S> Layer<S> for Count {
    type Service = Counted<S>;

    fn layer(&self, inner: S) -> Counted<S> {
        Counted(inner)
    }
}

/// A client whose requests are counted.
#[derive(Clone, Debug)]
pub struct Counted<S>(S);

impl<S, A, B> Service<Request<A>> for Counted<S>
where
    S: Service<Request<A>, Response = Response<B>>,
    S::Future: Send + 'static,
{
    type Response = Response<B>;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Response<B>, S::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.0.poll_ready(context)
    }

    fn call(&mut self, request: Request<A>) -> Self::Future {
        let method = match request.uri().query() {
            Some(query) if query.split('&').any(|pair| pair == "watch=true") => "watch".to_owned(),
            _ => request.method().as_str().to_lowercase(),
        };
        let resource = resource(request.uri());
        let answer = self.0.call(request);
        Box::pin(async move {
            let answer = answer.await;
            let code = answer.as_ref().ok().map(|answer| answer.status().as_u16());
            super::answered(&method, &resource, code);
            answer
        })
    }
}

/// `pods`, or `pods/status`: of what kind of object a path is.
fn resource(uri: &Uri) -> String {
    let mut words = uri.path().split('/').filter(|word| !word.is_empty());
    // The version, with its group before it when there is one.
    let skipped = match words.next() {
        Some("api") => 1,
        Some("apis") => 2,
        _ => return "other".to_owned(),
    };
    let words: Vec<_> = words.skip(skipped).collect();
    let words = match words.as_slice() {
        ["namespaces", _, rest @ ..] if !rest.is_empty() => rest,
        words => words,
    };
    match words {
        [resource] | [resource, _] => (*resource).to_owned(),
        [resource, _, part, ..] => format!("{resource}/{part}"),
        [] => "other".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_of_a_kind_of_object() {
        for (path, wanted) in [
            ("/api/v1/pods?watch=true", "pods"),
            ("/api/v1/namespaces/shop/pods/web-1", "pods"),
            ("/api/v1/namespaces/shop/pods/web-1/status", "pods/status"),
            ("/api/v1/nodes/n1/status", "nodes/status"),
            (
                "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/n1",
                "leases",
            ),
            (
                "/apis/authorization.k8s.io/v1/subjectaccessreviews",
                "subjectaccessreviews",
            ),
            (
                "/apis/vmmd.dev/v1alpha1/namespaces/shop/virtualmachines/web/status",
                "virtualmachines/status",
            ),
            ("/version", "other"),
            ("/", "other"),
        ] {
            assert_eq!(resource(&path.parse().unwrap()), wanted, "{path}");
        }
    }
}
