//! An API server over HTTP, for the programs under test. It can be stopped and started again.

use std::{
    collections::BTreeMap,
    convert::Infallible,
    net::SocketAddr,
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use axum::{
    Router,
    body::{Body, Bytes},
    extract::{Request, State},
    http::Method,
    response::Response,
};
use serde_json::{Value, json};
use tokio::{net::TcpListener, runtime::Runtime, sync::watch};

use super::{
    store::{Deletion, Key, Refusal, Store},
    trap::{Trap, Verdict},
};

const PODS: &str = "pods";

#[derive(Clone)]
pub struct Inner {
    store: Arc<Mutex<Store>>,
    changed: Arc<watch::Sender<u64>>,
    /// Method and path of each request.
    pub requests: Arc<Mutex<Vec<String>>>,
    /// Version of the API group `policy`.
    pub policy: Arc<Mutex<&'static str>>,
    /// Why no pod may be made.
    pub quota: Arc<Mutex<Option<String>>>,
    trap: Trap,
}

pub struct Api {
    pub inner: Inner,
    address: SocketAddr,
    runtime: Option<Runtime>,
    _folder: tempfile::TempDir,
    pub kubeconfig: PathBuf,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Api {
    pub fn start(trap: &Trap) -> Self {
        let inner = Inner {
            store: Arc::default(),
            changed: Arc::new(watch::channel(0).0),
            requests: Arc::default(),
            policy: Arc::new(Mutex::new("v1")),
            quota: Arc::default(),
            trap: trap.clone(),
        };
        let (runtime, address) = serve(&inner, SocketAddr::from(([127, 0, 0, 1], 0)));
        let folder = tempfile::tempdir().unwrap();
        let kubeconfig = folder.path().join("kubeconfig");
        let config = json!({
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "mock", "cluster": {"server": format!("http://{address}")}}],
            "contexts": [{"name": "mock", "context": {"cluster": "mock", "user": "mock"}}],
            "users": [{"name": "mock", "user": {}}],
            "current-context": "mock",
        });
        std::fs::write(&kubeconfig, config.to_string()).unwrap();
        Self {
            inner,
            address,
            runtime: Some(runtime),
            _folder: folder,
            kubeconfig,
        }
    }

    /// Ends all connections and listens no more.
    pub fn stop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }

    /// Listens again, with the existing objects.
    pub fn resume(&mut self) {
        self.stop();
        self.runtime = Some(serve(&self.inner, self.address).0);
    }

    pub fn store<T>(&self, change: impl FnOnce(&mut Store) -> T) -> T {
        self.inner.with(change)
    }

    pub fn requests(&self) -> usize {
        lock(&self.inner.requests).len()
    }
}

impl Inner {
    pub fn with<T>(&self, change: impl FnOnce(&mut Store) -> T) -> T {
        let mut store = lock(&self.store);
        let result = change(&mut store);
        self.changed.send_replace(store.version());
        result
    }
}

fn serve(inner: &Inner, address: SocketAddr) -> (Runtime, SocketAddr) {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .unwrap();
    // The address of one that was stopped is free when its tasks have ended.
    let listener = runtime.block_on(async {
        loop {
            match TcpListener::bind(address).await {
                Ok(listener) => return listener,
                Err(_) => tokio::time::sleep(std::time::Duration::from_millis(20)).await,
            }
        }
    });
    let address = listener.local_addr().unwrap();
    let router = Router::new().fallback(answer).with_state(inner.clone());
    runtime.spawn(async move { axum::serve(listener, router).await });
    (runtime, address)
}

/// A path as the key, and the subresource.
fn parse(path: &str) -> Option<(Key, String)> {
    let mut words: Vec<_> = path.trim_matches('/').split('/').collect();
    let head = if words.first() == Some(&"api") { 2 } else { 3 };
    let group = words.drain(..head.min(words.len())).collect::<Vec<_>>().join("/");
    let mut words = words.into_iter().peekable();
    let mut namespace = String::new();
    if words.peek() == Some(&"namespaces") {
        words.next();
        namespace = words.next()?.to_owned();
    }
    let key = Key {
        group,
        namespace,
        resource: words.next()?.to_owned(),
        name: words.next().unwrap_or_default().to_owned(),
    };
    Some((key, words.next().unwrap_or_default().to_owned()))
}

async fn answer(State(inner): State<Inner>, request: Request) -> Response {
    let (parts, body) = request.into_parts();
    let body = axum::body::to_bytes(body, 4 << 20).await.unwrap_or_default();
    let path = parts.uri.path().to_owned();
    lock(&inner.requests).push(format!("{} {path}", parts.method));
    let query: BTreeMap<_, _> = parts
        .uri
        .query()
        .unwrap_or_default()
        .split('&')
        .filter_map(|pair| pair.split_once('='))
        .map(|(key, value)| (key.to_owned(), decode(value)))
        .collect();
    if path == "/apis" {
        let version = *lock(&inner.policy);
        let version = json!({"groupVersion": format!("policy/{version}"), "version": version});
        let group = json!({"name": "policy", "versions": [version], "preferredVersion": version});
        return reply(
            200,
            json!({"kind": "APIGroupList", "groups": [group]}).to_string(),
        );
    }
    let Some((key, subresource)) = parse(&path) else {
        return refuse((404, "NotFound"), "");
    };
    if parts.method == Method::GET && key.name.is_empty() {
        return if query
            .get("watch")
            .is_some_and(|watch| watch == "true" || watch == "1")
        {
            watch_from(&inner, key, query)
        } else {
            list(&inner, &key, &query)
        };
    }
    let object: Value = serde_json::from_slice(&body).unwrap_or_default();
    let counted = parts.method != Method::GET && matches!(&*key.resource, PODS | "virtualmachines");
    let verdict = match counted {
        true => inner.trap.pass(&format!("{} {path}", parts.method)),
        false => Verdict::Pass,
    };
    match verdict {
        Verdict::Refuse => return refuse((503, "ServiceUnavailable"), ""),
        Verdict::Fail => return refuse((500, "InternalError"), ""),
        Verdict::Pass | Verdict::Lose => {}
    }
    if parts.method == Method::POST
        && key.resource == PODS
        && let Some(message) = lock(&inner.quota).clone()
    {
        return explain((403, "Forbidden"), "", &message);
    }
    let name = key.name.clone();
    let result = inner.with(|store| match parts.method {
        Method::GET => store.get(&key),
        Method::POST => store.create(key.clone(), object),
        Method::PUT => store.replace(&key, &subresource, object),
        Method::PATCH => store.patch(&key, &subresource, &object),
        Method::DELETE => {
            let deletion = Deletion {
                grace: object["gracePeriodSeconds"].as_i64(),
                uid: object["preconditions"]["uid"].as_str().map(str::to_owned),
            };
            store.delete(&key, &deletion)
        }
        _ => Err((405, "MethodNotAllowed")),
    });
    if verdict == Verdict::Lose {
        return refuse((503, "ServiceUnavailable"), "");
    }
    match result {
        Ok(object) => reply(200, object.to_string()),
        Err(refusal) => refuse(refusal, &name),
    }
}

fn list(inner: &Inner, key: &Key, query: &BTreeMap<String, String>) -> Response {
    let (items, version) = inner.with(|store| (store.list(key), store.version()));
    let items: Vec<_> = items.into_iter().filter(|item| matches(item, query)).collect();
    let list = json!({"kind": "List", "apiVersion": "v1", "metadata": {"resourceVersion": version.to_string()}, "items": items});
    reply(200, list.to_string())
}

/// Changes since the version that is named, and then each change as it happens.
fn watch_from(inner: &Inner, of: Key, query: BTreeMap<String, String>) -> Response {
    let since: u64 = query
        .get("resourceVersion")
        .and_then(|text| text.parse().ok())
        .unwrap_or(0);
    if inner.with(|store| store.is_forgotten(&of.resource, since)) {
        let expired = json!({"type": "ERROR", "object": {
            "kind": "Status",
            "status": "Failure",
            "code": 410,
            "reason": "Expired",
            "message": "too old resource version",
        }});
        return reply(200, format!("{expired}\n"));
    }
    let (send, receive) = tokio::sync::mpsc::channel::<Result<Bytes, Infallible>>(64);
    let inner = inner.clone();
    tokio::spawn(async move {
        let mut changed = inner.changed.subscribe();
        let mut sent = since;
        loop {
            changed.borrow_and_update();
            let (events, version) = {
                let store = lock(&inner.store);
                let news = store.log.iter().skip_while(|(version, ..)| *version <= sent);
                (news.cloned().collect::<Vec<_>>(), store.version())
            };
            sent = version;
            for (_, kind, key, object) in events {
                let same = (&key.group, &key.resource) == (&of.group, &of.resource)
                    && (of.namespace.is_empty() || key.namespace == of.namespace);
                if !same {
                    continue;
                }
                // An object that a selector does not select any more is gone for its watch.
                let kind = match matches(&object, &query) {
                    true => kind,
                    false if query.contains_key("labelSelector") => "DELETED",
                    false => continue,
                };
                let line = format!("{}\n", json!({"type": kind, "object": object}));
                if send.send(Ok(line.into())).await.is_err() {
                    return;
                }
            }
            tokio::select! {
                done = changed.changed() => if done.is_err() { return },
                () = send.closed() => return,
            }
        }
    });
    let stream = tokio_stream::wrappers::ReceiverStream::new(receive);
    Response::builder()
        .header("content-type", "application/json")
        .body(Body::from_stream(stream))
        .unwrap()
}

fn matches(object: &Value, query: &BTreeMap<String, String>) -> bool {
    let empty = String::new();
    let labels = query.get("labelSelector").unwrap_or(&empty);
    let fields = query.get("fieldSelector").unwrap_or(&empty);
    let label = |selector: &str| match selector.split_once('=') {
        Some((key, value)) => object["metadata"]["labels"][key] == value,
        None => object["metadata"]["labels"].get(selector).is_some(),
    };
    let field = |selector: &str| {
        let (path, value) = selector.split_once('=').unwrap();
        let found = path.split('.').fold(object, |object, name| &object[name]);
        *found == value
    };
    labels.split(',').filter(|one| !one.is_empty()).all(label)
        && fields.split(',').filter(|one| !one.is_empty()).all(field)
}

fn decode(text: &str) -> String {
    let mut bytes = text.bytes();
    let mut decoded = Vec::new();
    while let Some(byte) = bytes.next() {
        match byte {
            b'+' => decoded.push(b' '),
            b'%' => {
                let hex: Vec<_> = bytes.by_ref().take(2).collect();
                let hex = String::from_utf8(hex).unwrap();
                decoded.push(u8::from_str_radix(&hex, 16).unwrap());
            }
            byte => decoded.push(byte),
        }
    }
    String::from_utf8(decoded).unwrap()
}

/// The name is that of an object; the server says none when it does not know the resource.
fn refuse(refusal: Refusal, name: &str) -> Response {
    explain(refusal, name, refusal.1)
}

fn explain((code, reason): Refusal, name: &str, message: &str) -> Response {
    let status = json!({
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
        "message": message, "reason": reason, "code": code, "details": {"name": name},
    });
    reply(code, status.to_string())
}

fn reply(code: u16, body: String) -> Response {
    Response::builder()
        .status(code)
        .header("content-type", "application/json")
        .body(Body::from(body))
        .unwrap()
}

/// Key of a pod.
pub fn pod(namespace: &str, name: &str) -> Key {
    Key {
        group: "api/v1".to_owned(),
        resource: PODS.to_owned(),
        namespace: namespace.to_owned(),
        name: name.to_owned(),
    }
}

/// Key of anything else of the first API group, such as a Secret.
pub fn core(resource: &str, namespace: &str, name: &str) -> Key {
    Key {
        resource: resource.to_owned(),
        ..pod(namespace, name)
    }
}

/// Key of an event.
pub fn events(namespace: &str) -> Key {
    Key {
        group: "apis/events.k8s.io/v1".to_owned(),
        resource: "events".to_owned(),
        namespace: namespace.to_owned(),
        name: String::new(),
    }
}

/// Key of a VirtualMachine.
pub fn machine(namespace: &str, name: &str) -> Key {
    Key {
        group: "apis/vmmd.dev/v1alpha1".to_owned(),
        resource: "virtualmachines".to_owned(),
        namespace: namespace.to_owned(),
        name: name.to_owned(),
    }
}

/// Key of a PodDisruptionBudget.
pub fn budget(version: &str, namespace: &str, name: &str) -> Key {
    Key {
        group: format!("apis/policy/{version}"),
        resource: "poddisruptionbudgets".to_owned(),
        namespace: namespace.to_owned(),
        name: name.to_owned(),
    }
}

/// Key of a node.
pub fn node(name: &str) -> Key {
    Key {
        group: "api/v1".to_owned(),
        resource: "nodes".to_owned(),
        namespace: String::new(),
        name: name.to_owned(),
    }
}

/// Key of a lease.
pub fn lease(namespace: &str, name: &str) -> Key {
    Key {
        group: "apis/coordination.k8s.io/v1".to_owned(),
        resource: "leases".to_owned(),
        namespace: namespace.to_owned(),
        name: name.to_owned(),
    }
}
