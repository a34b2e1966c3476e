//! The kubelet's API, as far as the API server uses it of a node: the serial log of a VM as the log
//! of its pod's container, its consoles for `attach`, and its ports.
//!
//! The API uses TLS, and accepts only clients with a certificate of the cluster's CA. Clients may
//! do only what SubjectAccessReview of the API server permits, as with a kubelet with
//! `--authorization-mode=Webhook`.

mod attach;
mod listener;
mod logs;
mod port_forward;
mod spdy;
mod upgrade;

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    path::Path,
    sync::Arc,
};

use anyhow::Context as _;
use axum::{
    Router,
    body::Body,
    extract::{ConnectInfo, Path as UrlPath, Request, State},
    http::{Method, StatusCode, header},
    middleware::{self, Next},
    response::{IntoResponse as _, Response},
    routing::{any, get},
};
use k8s_openapi::api::{
    authorization::v1::{ResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec},
    core::v1::Pod,
};
use kube::{Api, Client, ResourceExt as _, api::PostParams};
use serde_json::json;
use vmmd_api::v1;

use self::{
    listener::{Listener, Peer},
    upgrade::Sessions,
};
use crate::{daemon::Daemon, metrics, names};

/// State for the answers to requests.
#[derive(Clone)]
struct Context {
    client: Client,
    daemon: Daemon,
    node: Arc<str>,
    sessions: Sessions,
}

/// Serves the API for the lifetime of the process.
///
/// # Errors
///
/// Fails for an unusable port or CA.
pub async fn serve(
    client: Client,
    daemon: Daemon,
    node: &str,
    addresses: &[String],
    port: u16,
    client_ca: &Path,
) -> anyhow::Result<()> {
    let listener = Listener::bind(SocketAddr::new(all(addresses), port), client_ca, addresses)
        .await
        .with_context(|| format!("port {port} for the API server"))?;
    let context = Context {
        client,
        daemon,
        node: node.into(),
        sessions: Sessions::new(),
    };
    let router = Router::new()
        .route("/healthz", get(|| async { "ok" }))
        .route(
            "/containerLogs/{namespace}/{pod}/{container}",
            get(container_logs),
        )
        .route("/attach/{namespace}/{pod}/{container}", any(attach))
        .route("/exec/{namespace}/{pod}/{container}", any(exec))
        .route("/portForward/{namespace}/{pod}", any(port_forward))
        .layer(middleware::from_fn_with_state(context.clone(), authorize))
        .with_state(context);
    let service = router.into_make_service_with_connect_info::<Peer>();
    axum::serve(listener, service).await?;
    Ok(())
}

/// All addresses of this machine, those of IPv6 as well when the node's own is one.
fn all(addresses: &[String]) -> IpAddr {
    let mut own = addresses.iter().filter_map(|address| address.parse().ok());
    if own.any(|address: IpAddr| address.is_ipv6()) {
        Ipv6Addr::UNSPECIFIED.into()
    } else {
        Ipv4Addr::UNSPECIFIED.into()
    }
}

/// Lets a request through that the API server allows its caller.
async fn authorize(State(context): State<Context>, request: Request, next: Next) -> Response {
    let peer = request
        .extensions()
        .get::<ConnectInfo<Peer>>()
        .map(|info| info.0.clone());
    let Some(peer) = peer else {
        return text(StatusCode::UNAUTHORIZED, "no certificate");
    };
    let review = review(&peer, request.method(), &context.node);
    let reviews = Api::<SubjectAccessReview>::all(context.client.clone());
    match reviews.create(&PostParams::default(), &review).await {
        Ok(answer) if answer.status.as_ref().is_some_and(|status| status.allowed) => next.run(request).await,
        Ok(_) => text(StatusCode::FORBIDDEN, &format!("{} may not do this", peer.user)),
        Err(error) => text(
            StatusCode::SERVICE_UNAVAILABLE,
            &format!("can't ask the API server: {error}"),
        ),
    }
}

/// As a kubelet asks for everything but its own logs, figures and specification.
fn review(peer: &Peer, method: &Method, node: &str) -> SubjectAccessReview {
    let verb = match *method {
        Method::POST => "create",
        Method::PUT => "update",
        Method::PATCH => "patch",
        Method::DELETE => "delete",
        _ => "get",
    };
    let attributes = ResourceAttributes {
        verb: Some(verb.to_owned()),
        version: Some("v1".to_owned()),
        resource: Some("nodes".to_owned()),
        subresource: Some("proxy".to_owned()),
        name: Some(node.to_owned()),
        ..ResourceAttributes::default()
    };
    SubjectAccessReview {
        spec: SubjectAccessReviewSpec {
            user: Some(peer.user.clone()),
            groups: Some(peer.groups.clone()),
            resource_attributes: Some(attributes),
            ..SubjectAccessReviewSpec::default()
        },
        ..SubjectAccessReview::default()
    }
}

async fn container_logs(
    State(context): State<Context>,
    UrlPath((namespace, pod, container)): UrlPath<(String, String, String)>,
    request: Request,
) -> Response {
    if container != names::CONTAINER {
        return text(StatusCode::NOT_FOUND, "the pod has no such container");
    }
    let options = match logs::Options::of(request.uri().query().unwrap_or_default()) {
        Ok(options) => options,
        Err(problem) => return text(StatusCode::BAD_REQUEST, &problem),
    };
    let vm = match context.vm(&namespace, &pod).await {
        Ok(vm) => vm,
        Err((code, problem)) => return text(code, &problem),
    };
    match logs::stream(&context.daemon, vm, options).await {
        Ok(bytes) => Body::from_stream(bytes).into_response(),
        Err(status) => text(StatusCode::BAD_GATEWAY, status.message()),
    }
}

/// Namespace, pod and container.
type Container = UrlPath<(String, String, String)>;

async fn attach(State(context): State<Context>, path: Container, request: Request) -> Response {
    let options = attach::Options::attach(request.uri().query().unwrap_or_default());
    console(context, path, options, "attach", request).await
}

async fn exec(State(context): State<Context>, path: Container, request: Request) -> Response {
    let options = attach::Options::exec(request.uri().query().unwrap_or_default());
    console(context, path, options, "exec", request).await
}

async fn console(
    context: Context,
    UrlPath((namespace, pod, container)): Container,
    options: Result<attach::Options, String>,
    kind: &'static str,
    request: Request,
) -> Response {
    if container != names::CONTAINER {
        return refusal(StatusCode::NOT_FOUND, "the pod has no such container");
    }
    let options = match options {
        Ok(options) => options,
        Err(problem) => return refusal(StatusCode::BAD_REQUEST, &problem),
    };
    let vm = match context.vm(&namespace, &pod).await {
        Ok(vm) => vm,
        Err((code, problem)) => return refusal(code, &problem),
    };
    let daemon = context.daemon.clone();
    let begun = context
        .sessions
        .begin(request, attach::PROTOCOL, move |connection| {
            let serve = move |acceptor| attach::serve(daemon, vm, options, acceptor);
            ended(pod, kind, spdy::run(connection, serve))
        });
    begun.unwrap_or_else(|answer| *answer)
}

async fn port_forward(
    State(context): State<Context>,
    UrlPath((namespace, pod)): UrlPath<(String, String)>,
    request: Request,
) -> Response {
    let vm = match context.vm(&namespace, &pod).await {
        Ok(vm) => vm,
        Err((code, problem)) => return refusal(code, &problem),
    };
    let daemon = context.daemon.clone();
    let begun = context
        .sessions
        .begin(request, port_forward::PROTOCOL, move |connection| {
            let serve = move |acceptor| port_forward::serve(daemon, vm, acceptor);
            ended(pod, "port-forward", spdy::run(connection, serve))
        });
    begun.unwrap_or_else(|answer| *answer)
}

/// Waits for the end of a session.
async fn ended(pod: String, kind: &str, session: impl Future<Output = Result<(), spdy::Ended>>) {
    let _counted = metrics::Session::begin(kind);
    if let Err(error) = session.await {
        tracing::debug!(pod, "{kind}: {error}");
    }
}

impl Context {
    /// Name of the VM of a pod of this node.
    async fn vm(&self, namespace: &str, pod: &str) -> Result<String, (StatusCode, String)> {
        let away = |error: &dyn std::fmt::Display| (StatusCode::BAD_GATEWAY, error.to_string());
        let none = || (StatusCode::NOT_FOUND, "there is no VM of such a pod".to_owned());
        let pods = Api::<Pod>::namespaced(self.client.clone(), namespace);
        let found = pods.get_opt(pod).await.map_err(|error| away(&error))?;
        let uid = found.and_then(|pod| pod.uid()).ok_or_else(none)?;
        let filter = v1::VmFilter {
            labels: vec![format!("{}={uid}", names::POD_UID)],
            ..v1::VmFilter::default()
        };
        let request = v1::ListVmsRequest {
            filter: Some(filter),
            ..v1::ListVmsRequest::default()
        };
        let list = self.daemon.vms.clone().list_vms(request).await;
        let list = list.map_err(|status| away(&status.message()))?.into_inner();
        let vm = list.vms.into_iter().next().and_then(|vm| vm.metadata);
        vm.map(|metadata| metadata.name).ok_or_else(none)
    }
}

fn text(code: StatusCode, text: &str) -> Response {
    (code, format!("{text}\n")).into_response()
}

/// As the API server refuses things: of a request that upgrades no connection, `kubectl` takes a text with a colon for YAML, and shows none of it.
fn refusal(code: StatusCode, message: &str) -> Response {
    let reason = match code {
        StatusCode::BAD_REQUEST => "BadRequest",
        StatusCode::FORBIDDEN => "Forbidden",
        StatusCode::NOT_FOUND => "NotFound",
        _ => "ServiceUnavailable",
    };
    let status = json!({
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
        "message": message, "reason": reason, "code": code.as_u16(),
    });
    let kind = [(header::CONTENT_TYPE, "application/json")];
    (code, kind, status.to_string()).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_with_an_ipv6_address_is_reached_there() {
        for (address, wanted) in [("192.0.2.1", "0.0.0.0"), ("2001:db8::1", "::")] {
            let addresses = [address, "n1"].map(str::to_owned);
            assert_eq!(all(&addresses).to_string(), wanted);
        }
    }

    #[test]
    fn a_request_is_reviewed_as_one_for_the_node_s_proxy() {
        let peer = Peer {
            user: "kube-apiserver-kubelet-client".to_owned(),
            groups: vec!["system:masters".to_owned()],
        };
        for (method, verb) in [
            (Method::GET, "get"),
            (Method::POST, "create"),
            (Method::HEAD, "get"),
        ] {
            let review = serde_json::to_value(review(&peer, &method, "n1").spec).unwrap();
            assert_eq!(
                review,
                serde_json::json!({
                    "user": "kube-apiserver-kubelet-client",
                    "groups": ["system:masters"],
                    "resourceAttributes": {
                        "verb": verb, "version": "v1", "resource": "nodes", "subresource": "proxy", "name": "n1",
                    },
                })
            );
        }
    }
}
