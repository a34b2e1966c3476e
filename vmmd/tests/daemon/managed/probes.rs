//! Probes of guests in networks of the node.

use serde_json::json;
use vmmd_api::v1::{ConditionStatus, NetworkMode, VmStatus};

use super::{
    guest::{Guest, Program},
    nic,
};
use crate::{
    harness::{Daemon, status},
    namespace::Namespace,
    probes::{probes, ready},
    verbs::condition,
};

/// Answers by the path of a request, and shows the last one's "Host".
const SERVER: &str = r#"
import http.server
class Server(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        code = int(self.path[1:4])
        if self.headers['Host'] != 'shop.example' or self.headers['X-Probe'] != 'yes':
            code = 400
        self.send_response(code)
        if code == 302:
            self.send_header('Location', '/500')
        self.end_headers()
server = http.server.ThreadingHTTPServer(('', 8080), Server)
print('ready', flush=True)
server.serve_forever()
"#;

#[tokio::test]
async fn a_web_server_in_a_guest_is_probed() {
    let namespace = Namespace::new();
    let mut daemon = Daemon::in_network(&namespace.0).await;
    let made = daemon
        .make_network("lan", "10.80.0.0/24", NetworkMode::Isolated)
        .await
        .unwrap();
    daemon.start_in("a", nic("lan")).await.unwrap();
    // The guest of a mock does not answer: another one takes its place while its VM runs.
    let running = daemon.get("a").await.unwrap();
    let (tap, mac) = (&status(&running).nics[0].tap, &status(&running).nics[0].mac);
    namespace.ip(&format!("link delete {tap}"));
    let guest = Guest::on(&namespace, tap, &made.status.unwrap().bridge, mac);
    guest.namespace.ip("addr add 10.80.0.2/24 dev eth0");
    let set = async |check: serde_json::Value| {
        let mut probe = json!({"periodSeconds": 1, "failureThreshold": 1});
        probe
            .as_object_mut()
            .unwrap()
            .extend(check.as_object().unwrap().clone());
        let set = probes(json!({"readiness": probe}));
        let changed = daemon.change("a", |spec| spec.probes = set);
        changed.await.unwrap();
    };
    let http = |path: &str| {
        let headers = json!([{"name": "host", "value": "shop.example"}, {"name": "X-Probe", "value": "yes"}]);
        json!({"http": {"port": 8080, "path": path, "headers": headers}})
    };
    let is_ready = |status: &VmStatus| ready(status).0 == ConditionStatus::True;
    let says = |text: &'static str| {
        move |status: &VmStatus| {
            let ready = condition(status, "Ready");
            ready.status() == ConditionStatus::False && ready.message.contains(text)
        }
    };
    // Nothing listens.
    set(json!({"tcp": {"port": 8080}})).await;
    daemon.wait("a", says("connect to 10.80.0.2:8080")).await;
    set(http("/200")).await;
    daemon.wait("a", says("http://10.80.0.2:8080/200")).await;

    let server = Program::start(&mut guest.namespace.python(SERVER));
    daemon.wait("a", is_ready).await;
    set(http("/503")).await;
    daemon.wait("a", says("status 503")).await;
    // A redirection is a success, and is not followed.
    set(http("/302")).await;
    daemon.wait("a", is_ready).await;
    set(json!({"tcp": {"port": 8081}})).await;
    daemon.wait("a", says("connect to 10.80.0.2:8081")).await;
    set(json!({"tcp": {"port": 8080, "nic": "eth0"}})).await;
    daemon.wait("a", is_ready).await;
    drop(server);
    daemon.wait("a", says("connect to 10.80.0.2:8080")).await;
    assert!(status(&daemon.get("a").await.unwrap()).instance.is_some());
}
