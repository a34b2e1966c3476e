//! The API over TCP: admitted clients, their methods, and the audit log.

use std::{collections::BTreeMap, fs, future::Future, process::Command, time::Duration};

use prost::Message;
use prost_types::FileDescriptorSet;
use rustix::process::{Signal, kill_process};
use tokio::time::timeout;
use tonic::{Code, Request, Status, client::Grpc, codegen::http::uri::PathAndQuery, transport::Channel};
use tonic_prost::ProstCodec;
use tonic_types::StatusExt;
use vmmd_api::v1::{self, node_service_client::NodeServiceClient, vm_service_client::VmServiceClient};

use crate::{
    harness::{Daemon, assert_refused, assert_says, refusal, temporary_folder},
    pki::{self, Leaf, Pki},
    update::masked,
};

const PATIENCE: Duration = Duration::from_secs(20);

/// Calls any method by its path with one empty message.
async fn call(channel: &Channel, method: &str) -> Result<(), Status> {
    let mut grpc = Grpc::new(channel.clone());
    let path: PathAndQuery = format!("/{method}").parse().unwrap();
    let called = async {
        grpc.ready()
            .await
            .map_err(|error| Status::from_error(error.into()))?;
        let request = Request::new(tokio_stream::once(()));
        grpc.streaming(request, path, ProstCodec::<(), ()>::default())
            .await
            .map(drop)
    };
    timeout(PATIENCE, called)
        .await
        .unwrap_or_else(|_| panic!("{method} does not answer"))
}

/// All methods of the public protocol, of health and of reflection.
fn methods() -> Vec<String> {
    let mut methods = Vec::new();
    for set in [
        vmmd_api::DESCRIPTORS,
        tonic_health::pb::FILE_DESCRIPTOR_SET,
        tonic_reflection::pb::v1::FILE_DESCRIPTOR_SET,
        tonic_reflection::pb::v1alpha::FILE_DESCRIPTOR_SET,
    ] {
        for file in FileDescriptorSet::decode(set).unwrap().file {
            for service in &file.service {
                let methods_of = service.method.iter();
                methods.extend(
                    methods_of
                        .map(|method| format!("{}.{}/{}", file.package(), service.name(), method.name())),
                );
            }
        }
    }
    assert!(methods.len() > 30, "{methods:?}");
    methods
}

/// Documented permissions: the roles by method.
fn documented() -> BTreeMap<String, Vec<&'static str>> {
    let page = include_str!("../../../docs/src/security.md");
    let rows = page
        .lines()
        .filter_map(|line| line.strip_prefix("| `")?.split_once("` |"));
    rows.map(|(method, row)| {
        let cells = row.split('|').map(str::trim);
        let roles = ["viewer", "operator", "admin", "agent", "peer"]
            .into_iter()
            .zip(cells);
        let roles = roles.filter(|(_, cell)| *cell == "yes").map(|(role, _)| role);
        let whole = match method.contains('.') {
            true => method.to_owned(),
            false => format!("vmmd.v1.{method}"),
        };
        (whole, roles.collect())
    })
    .collect()
}

/// The failure of a connection, not the answer of a daemon.
fn is_no_connection(status: &Status) -> bool {
    std::error::Error::source(status).is_some()
}

#[tokio::test]
async fn operator_changes_only_limits_and_the_memory_target() {
    let pki = Pki::new("ca");
    let daemon = pki::serve(&pki, "").await;
    let vm = daemon.manifest_with("web", "", |spec| {
        spec.disks = vec![crate::attach::disk(&daemon, "data")];
    });
    daemon.create(vm.clone()).await.unwrap();
    let leaf = pki.role("oscar", "operator");
    let mut operator = VmServiceClient::new(pki.channel(&daemon, Some(&leaf)));
    let disks = |spec: &mut v1::VmSpec| {
        let limit = v1::RateLimit {
            operations_per_second: 500,
            ..Default::default()
        };
        let mut disk = vm.spec.as_ref().unwrap().disks[0].clone();
        disk.rate_limit = Some(limit);
        spec.disks = vec![disk];
    };
    let limit = masked("web", &["spec.disks[data].rate_limit"], disks);
    operator.update_vm(limit).await.unwrap();
    let target = |spec: &mut v1::VmSpec| {
        spec.balloon = Some(v1::BalloonSpec {
            target_bytes: 64 << 20,
            ..Default::default()
        });
    };
    let target = masked("web", &["spec.balloon.target_bytes"], target);
    operator.update_vm(target).await.unwrap();
    let whole = v1::UpdateVmRequest {
        vm: Some(vm.clone()),
        ..Default::default()
    };
    for refused in [
        masked("web", &["spec.disks[data]"], disks),
        masked(
            "web",
            &["spec.disks[data].rate_limit", "spec.disks[data].path"],
            disks,
        ),
        whole,
    ] {
        let refused = operator.update_vm(refused).await.unwrap_err();
        assert_refused(&refused, Code::PermissionDenied, "ROLE_REQUIRED");
        assert_says(&refused, "admin");
    }
}

#[tokio::test]
async fn agent_creates_and_changes_vms_but_takes_no_snapshots() {
    let pki = Pki::new("ca");
    let daemon = pki::serve(&pki, "").await;
    let channel = pki.channel(&daemon, Some(&pki.role("kube", "agent")));
    let mut agent = VmServiceClient::new(channel.clone());
    let request = v1::CreateVmRequest {
        vm: Some(daemon.manifest("web", "")),
        ..Default::default()
    };
    agent.create_vm(request).await.unwrap();
    let two_cores = |spec: &mut v1::VmSpec| {
        spec.cpu = Some(v1::CpuSpec {
            cores: 2,
            ..Default::default()
        });
    };
    let request = masked("web", &["spec.cpu.cores"], two_cores);
    agent.update_vm(request).await.unwrap();
    let cores = daemon.get("web").await.unwrap().spec.unwrap().cpu.unwrap().cores;
    assert_eq!(cores, 2);
    for method in ["SnapshotService/CreateSnapshot", "VmService/AttachDisk"] {
        let refused = call(&channel, &format!("vmmd.v1.{method}")).await.unwrap_err();
        assert_refused(&refused, Code::PermissionDenied, "ROLE_REQUIRED");
    }
}

#[tokio::test]
async fn every_method_is_for_those_with_its_role_and_for_nobody_else() {
    let (pki, other) = (Pki::new("ca"), Pki::new("other"));
    let daemon = pki::serve(&pki, "").await;
    let documented = documented();
    let strangers = [
        ("no certificate", None),
        ("another CA", Some(other.role("mallory", "admin"))),
        ("expired", Some(pki.expired())),
        ("for servers", Some(pki.for_servers())),
    ];
    for (who, leaf) in &strangers {
        let channel = pki.channel(&daemon, leaf.as_ref());
        for method in methods() {
            let refused = call(&channel, &method).await.expect_err(&method);
            assert!(is_no_connection(&refused), "{method}, {who}: {refused:?}");
        }
    }
    for role in ["viewer", "operator", "admin", "agent", "peer", "none", "two"] {
        let leaf = match role {
            "none" => pki.client("nobody", &["https://example.com/"]),
            "two" => pki.client("both", &["vmmd://role/viewer", "vmmd://role/admin"]),
            role => pki.role(role, role),
        };
        let channel = pki.channel(&daemon, Some(&leaf));
        for method in methods() {
            let allowed = documented[&method].contains(&role);
            let answer = call(&channel, &method).await;
            let denied = answer
                .as_ref()
                .err()
                .filter(|status| status.code() == Code::PermissionDenied);
            assert_eq!(denied.is_none(), allowed, "{method}, {role}: {answer:?}");
            let Err(status) = &answer else { continue };
            assert!(!is_no_connection(status), "{method}, {role}: {status:?}");
            assert_ne!(status.code(), Code::Unauthenticated, "{method}, {role}");
            let Some(denied) = denied else { continue };
            assert_eq!(refusal(denied).1, "ROLE_REQUIRED");
            let details = denied.get_error_details();
            let needed = &details.error_info().unwrap().metadata["role"];
            assert!(
                documented[&method].contains(&needed.as_str()),
                "{method}: {needed}"
            );
            assert_says(denied, needed);
        }
    }
    // Over the socket everything is allowed.
    let local = crate::harness::connect(daemon.folder.path()).await;
    for method in methods() {
        if let Err(status) = call(&local, &method).await {
            assert!(
                ![Code::PermissionDenied, Code::Unauthenticated].contains(&status.code()),
                "{status:?}"
            );
        }
    }
}

#[tokio::test]
async fn a_method_that_nobody_knows_is_refused() {
    let daemon = Daemon::start().await;
    let local = crate::harness::connect(daemon.folder.path()).await;
    let refused = call(&local, "vmmd.v1.VmService/FormatNode").await.unwrap_err();
    assert_refused(&refused, Code::Unimplemented, "METHOD_UNKNOWN");
}

async fn list(channel: &Channel) -> Result<(), Status> {
    let mut vms = VmServiceClient::new(channel.clone());
    vms.list_vms(v1::ListVmsRequest::default()).await.map(drop)
}

/// Retries until success, which is the only sign of the awaited state.
async fn until<F: Future<Output = bool>>(what: &str, mut attempt: impl FnMut() -> F) {
    let tried = timeout(PATIENCE, async { while !attempt().await {} });
    tried.await.unwrap_or_else(|_| panic!("in vain: {what}"));
}

#[tokio::test]
async fn new_certificates_are_used_for_new_connections() {
    let (old, new) = (Pki::new("old"), Pki::new("new"));
    let daemon = pki::serve(&old, "").await;
    let (alice, bob) = (old.role("alice", "viewer"), new.role("bob", "viewer"));
    let before = old.channel(&daemon, Some(&alice));
    list(&before).await.unwrap();
    let dir = daemon.path("tls");
    // A key that does not match the certificate: the previous pair stays in use.
    let key = fs::read_to_string(dir.join("server.key")).unwrap();
    pki::replace(&dir.join("server.key"), "broken");
    kill_process(daemon.pid(), Signal::HUP).unwrap();
    list(&old.channel(&daemon, Some(&alice))).await.unwrap();
    pki::replace(&dir.join("server.key"), &key);
    new.install(&dir, &new.server("node"));
    until("a client of the new CA", || async {
        list(&new.channel(&daemon, Some(&bob))).await.is_ok()
    })
    .await;
    list(&old.channel(&daemon, Some(&alice))).await.unwrap_err();
    // A connection whose certificate is not good any more ends.
    until("the end of the old connection", || async {
        list(&before).await.is_err_and(|ended| is_no_connection(&ended))
    })
    .await;
    // Also when it is asked for, and written in place.
    fs::write(dir.join("ca.crt"), old.certificate.pem()).unwrap();
    kill_process(daemon.pid(), Signal::HUP).unwrap();
    until("a client of the old CA", || async {
        list(&new.channel(&daemon, Some(&alice))).await.is_ok()
    })
    .await;
    assert!(daemon.list().await.is_empty(), "the daemon has outlived all this");
}

#[tokio::test]
async fn without_usable_certificates_only_the_socket_works() {
    let pki = Pki::new("ca");
    let folder = temporary_folder();
    fs::create_dir(folder.path().join("tls")).unwrap();
    let config = pki::configuration(folder.path(), "");
    let daemon = Daemon::in_folder(folder, &config).await;
    let alice = pki.role("alice", "viewer");
    assert!(daemon.list().await.is_empty());
    list(&pki.channel(&daemon, Some(&alice))).await.unwrap_err();
    pki.install(&daemon.path("tls"), &pki.server("node"));
    until("a client", || async {
        list(&pki.channel(&daemon, Some(&alice))).await.is_ok()
    })
    .await;
}

fn audit(daemon: &Daemon) -> Vec<serde_json::Value> {
    let text = fs::read_to_string(daemon.path("audit.log")).unwrap();
    text.lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

/// The fields `event`, `who`, `role`, `method`, `object`, `request_id` and `code` of a line.
fn facts(line: &serde_json::Value) -> [&str; 7] {
    ["event", "who", "role", "method", "object", "request_id", "code"]
        .map(|key| line[key].as_str().unwrap_or_default())
}

#[tokio::test]
async fn audit_log_has_changes_and_refusals_but_no_reads() {
    let pki = Pki::new("ca");
    let mut daemon = pki::serve(&pki, "").await;
    daemon.create(daemon.manifest("web", "")).await.unwrap();
    let client = |leaf: &Leaf| VmServiceClient::new(pki.channel(&daemon, Some(leaf)));
    let (mut alice, mut eve) = (
        client(&pki.role("alice", "operator")),
        client(&pki.role("eve", "viewer")),
    );
    let start = v1::StartVmRequest {
        name: "web".into(),
        request_id: "r1".into(),
        ..Default::default()
    };
    eve.start_vm(start.clone()).await.unwrap_err();
    eve.list_vms(v1::ListVmsRequest::default()).await.unwrap();
    alice.start_vm(start).await.unwrap();
    let missing = v1::PauseVmRequest {
        name: "db".into(),
        ..Default::default()
    };
    alice.pause_vm(missing).await.unwrap_err();
    let open = v1::ConsoleRequest {
        message: Some(v1::console_request::Message::Open(v1::ConsoleOpen {
            name: "web".into(),
            no_replay: true,
            ..Default::default()
        })),
    };
    let console = alice.console(tokio_stream::once(open)).await.unwrap();
    drop(console);
    daemon.kill_vm("web").await.unwrap();
    drop((alice, eve));
    // Calls in progress are logged at the end at the latest.
    daemon.terminate();
    let lines = audit(&daemon);
    let facts: Vec<_> = lines.iter().map(facts).collect();
    let service = |method: &str| format!("vmmd.v1.VmService/{method}");
    let (create, begin, pause) = (service("CreateVm"), service("StartVm"), service("PauseVm"));
    let (console, stop) = (service("Console"), service("StopVm"));
    assert_eq!(facts[0], ["call", "uid 0", "admin", &create, "vm/web", "", "OK"]);
    assert_eq!(
        facts[1],
        ["denied", "eve", "viewer", &begin, "", "", "PERMISSION_DENIED"]
    );
    assert_eq!(
        facts[2],
        ["call", "alice", "operator", &begin, "vm/web", "r1", "OK"]
    );
    assert_eq!(
        facts[3],
        ["call", "alice", "operator", &pause, "vm/db", "", "NOT_FOUND"]
    );
    assert_eq!(
        facts[4],
        ["begin", "alice", "operator", &console, "vm/web", "", ""]
    );
    let rest: Vec<_> = facts[5..].iter().map(|facts| (facts[0], facts[3])).collect();
    assert!(
        rest.contains(&("end", &console)) && rest.contains(&("call", &stop)),
        "{facts:?}"
    );
    assert_eq!(facts.len(), 7, "{facts:?}");
    assert!(
        lines[2]["peer"].as_str().unwrap().starts_with("127.0.0.1:"),
        "{}",
        lines[2]
    );
    assert!(
        lines[0]["peer"].as_str().unwrap().starts_with("unix"),
        "{}",
        lines[0]
    );
}

#[tokio::test]
async fn an_audit_log_that_was_moved_is_opened_anew() {
    let daemon = pki::serve(&Pki::new("ca"), "").await;
    daemon.delete("none", false).await.unwrap_err();
    let (log, old) = (daemon.path("audit.log"), daemon.path("audit.log.1"));
    fs::rename(&log, &old).unwrap();
    kill_process(daemon.pid(), Signal::HUP).unwrap();
    until("a new audit log", || async {
        let _ = daemon.delete("none", false).await;
        fs::metadata(&log).is_ok_and(|log| log.len() > 0)
    })
    .await;
    assert!(fs::metadata(&old).unwrap().len() > 0);
}

#[tokio::test]
async fn what_init_certs_makes_is_all_that_is_needed() {
    let folder = temporary_folder();
    let dir = folder.path().join("tls");
    let made = Command::new(env!("CARGO_BIN_EXE_vmmd"))
        .args([
            "init-certs",
            "--server-name",
            "127.0.0.1",
            "--client",
            "alice=operator",
            "--dir",
        ])
        .arg(&dir)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&made.stdout).into_owned();
    assert!(made.status.success(), "{made:?}");
    assert!(said.contains("alice.key") && said.contains("listen ="), "{said}");
    let config = pki::configuration(folder.path(), "");
    let daemon = Daemon::in_folder(folder, &config).await;
    let channel = made_client(&daemon, "alice");
    let mut nodes = NodeServiceClient::new(channel.clone());
    nodes.get_node(v1::GetNodeRequest {}).await.unwrap();
    let refused = call(&channel, "vmmd.v1.VmService/CreateVm").await.unwrap_err();
    assert_eq!(refused.code(), Code::PermissionDenied);
}

/// A client with what `init-certs` has made.
fn made_client(daemon: &Daemon, name: &str) -> Channel {
    use rustls::pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject};
    let path = |name: String| daemon.path("tls").join(name);
    let mut roots = rustls::RootCertStore::empty();
    roots
        .add(CertificateDer::from_pem_file(path("ca.crt".into())).unwrap())
        .unwrap();
    let chain = vec![CertificateDer::from_pem_file(path(format!("{name}.crt"))).unwrap()];
    let key = PrivateKeyDer::from_pem_file(path(format!("{name}.key"))).unwrap();
    let provider = std::sync::Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_client_auth_cert(chain, key);
    let mut config = config.unwrap();
    config.alpn_protocols = vec![b"h2".to_vec()];
    pki::lazy(pki::address(daemon), config)
}

#[tokio::test]
async fn a_revoked_certificate_ends_its_connections_and_makes_no_more() {
    let pki = Pki::new("ca");
    let (alice, bob) = (pki.role("alice", "viewer"), pki.role("bob", "viewer"));
    let daemon = pki::serve_with(&pki, "", "revoked", &pki.revoke(&[])).await;
    let (of_alice, of_bob) = (
        pki.channel(&daemon, Some(&alice)),
        pki.channel(&daemon, Some(&bob)),
    );
    list(&of_alice).await.unwrap();
    list(&of_bob).await.unwrap();
    let mut watch = VmServiceClient::new(of_alice.clone())
        .watch_vms(v1::WatchVmsRequest::default())
        .await
        .unwrap()
        .into_inner();
    pki::replace(&daemon.path("tls/revoked"), &pki.revoke(&[&alice]));
    let ended = timeout(PATIENCE, async {
        while let Ok(Some(_)) = watch.message().await {}
    });
    ended.await.expect("what is under way ends");
    let refused = list(&of_alice).await.unwrap_err();
    assert!(is_no_connection(&refused), "{refused:?}");
    list(&of_bob).await.unwrap();
}

#[tokio::test]
async fn an_old_connection_is_made_anew() {
    let pki = Pki::new("ca");
    let daemon = pki::serve(&pki, "limits = { connection_seconds = 1 }\n").await;
    let leaf = pki.role("alice", "viewer");
    let connects = std::sync::Arc::new(std::sync::atomic::AtomicU32::new(0));
    let channel = pki::counting(pki::address(&daemon), pki.tls(Some(&leaf)), &connects);
    until("a second connection", || async {
        // A call may meet the end of its connection.
        let served = list(&channel).await.is_ok();
        tokio::time::sleep(Duration::from_millis(50)).await;
        served && connects.load(std::sync::atomic::Ordering::Relaxed) > 1
    })
    .await;
}

#[tokio::test]
async fn the_bound_address_is_told_as_long_as_somebody_listens_there() {
    let mut daemon = pki::serve(&Pki::new("ca"), "").await;
    assert!(pki::address(&daemon).starts_with("127.0.0.1:"));
    daemon.terminate();
    assert!(!daemon.path("run/tcp.addr").exists());
}
