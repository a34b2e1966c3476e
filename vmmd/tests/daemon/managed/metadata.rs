//! The metadata service of guests.

use std::{fs, os::unix::fs::PermissionsExt as _, path::PathBuf};

use super::{guest::Guest, *};

impl Namespace {
    /// The status and the content of an answer of the metadata service at an address, or the error of a client's connection.
    fn metadata(&self, to: (&str, u16), source: &str, method: &str, path: &str, fields: &[&str]) -> String {
        let program = r#"
import http.client, sys
address, port, source, method, path, *fields = sys.argv[1:]
client = http.client.HTTPConnection(address, int(port), timeout=3, source_address=(source, 0))
try:
    client.request(method, path, headers=dict([('Host', '169.254.169.254')] + [field.split('=', 1) for field in fields]))
    answer = client.getresponse()
    print(answer.status, answer.read().decode())
except OSError as error:
    print(type(error).__name__)
"#;
        let arguments = [to.0, &to.1.to_string(), source, method, path];
        let output = self
            .python(program)
            .args(arguments)
            .args(fields)
            .output()
            .unwrap();
        String::from_utf8(output.stdout).unwrap().trim_end().to_owned()
    }

    fn get(&self, path: &str) -> String {
        self.metadata(SERVICE, "", "GET", path, &[])
    }
}

const SERVICE: (&str, u16) = ("169.254.169.254", 80);
const USER_DATA: &str = "#cloud-config\nhostname: by-metadata\n";

/// Starts a VM in the network "lan"; returns the file of its documents.
async fn start(daemon: &mut Daemon, vm: &str, metadata: bool) -> PathBuf {
    let wanted = daemon.manifest_with(vm, "", |spec| {
        spec.nics = vec![NicSpec {
            metadata,
            ..nic("lan")
        }];
        spec.cloud_init = Some(v1::CloudInit {
            user_data: USER_DATA.into(),
            ssh_authorized_keys: vec!["ssh-ed25519 AAAA me".into()],
            ..v1::CloudInit::default()
        });
    });
    daemon.create(wanted).await.unwrap();
    let uid = daemon.start_vm(vm).await.unwrap().metadata.unwrap().uid;
    let network = daemon.network("lan").await.unwrap().metadata.unwrap().uid;
    daemon
        .path("run/networks")
        .join(network)
        .join("metadata")
        .join(uid)
}

/// A guest in place of a running VM, which has the documents of the VM.
async fn in_place_of(node: &Namespace, daemon: &Daemon, vm: &str, file: &std::path::Path) -> Guest {
    let documents = fs::read(file).unwrap();
    let guest = Guest::in_place_of(node, daemon, vm).await;
    assert!(!file.exists(), "documents of a VM that has ended");
    fs::write(file, documents).unwrap();
    guest
}

#[tokio::test]
async fn only_a_guest_with_the_service_reads_its_metadata() {
    let (namespace, mut daemon, _) = Daemon::with_networks(["lan"]).await;
    let file = start(&mut daemon, "web", true).await;
    assert!(!start(&mut daemon, "other", false).await.exists());
    // Only the helper's user enters the folder.
    let folder = fs::metadata(file.parent().unwrap()).unwrap();
    assert_eq!(folder.permissions().mode() & 0o7777, 0o710);
    let id = file.file_name().unwrap().to_str().unwrap().to_owned();
    let web = in_place_of(&namespace, &daemon, "web", &file).await;
    let other = Guest::in_place_of(&namespace, &daemon, "other").await;

    assert_eq!(
        web.namespace.get("/user-data"),
        format!("200 {}", USER_DATA.trim_end())
    );
    let meta = web.namespace.get("/meta-data");
    assert!(
        meta.contains(&format!("instance-id: {id}")) && meta.contains("AAAA me"),
        "{meta}"
    );
    assert!(web.namespace.get("/network-config").contains("dhcp4: true"));
    assert_eq!(
        web.namespace.get("/latest/meta-data/instance-id"),
        format!("200 {id}")
    );
    assert_eq!(web.namespace.get("/latest/meta-data/local-ipv4"), "200 10.80.0.2");
    let token = web.namespace.metadata(
        SERVICE,
        "",
        "PUT",
        "/latest/api/token",
        &["X-aws-ec2-metadata-token-ttl-seconds=60"],
    );
    let token = token.strip_prefix("200 ").unwrap();
    let field = format!("X-aws-ec2-metadata-token={token}");
    let hostname = "/2021-03-23/meta-data/local-hostname";
    let with_token = |fields: &[&str]| web.namespace.metadata(SERVICE, "", "GET", hostname, fields);
    assert_eq!(with_token(&[&field]), "200 web");
    assert_eq!(with_token(&["X-aws-ec2-metadata-token=AAAA"]), "401");
    assert_eq!(with_token(&[&field, "X-Forwarded-For=10.80.0.9"]), "403");

    // Neither by the address of the helper, nor for other guests, spoofed addresses and the node.
    let helper = ("10.80.0.1", 254);
    let direct = |of: &Namespace| of.metadata(helper, "", "GET", "/user-data", &[]);
    assert_eq!(direct(&web.namespace), "ConnectionRefusedError");
    assert_eq!(direct(&other.namespace), "ConnectionRefusedError");
    // The node reaches the socket, and gets no answer.
    namespace.ip("link set lo up");
    assert_no_answer(&direct(&namespace));
    assert_no_answer(&other.namespace.get("/user-data"));
    other.namespace.ip("addr add 10.80.0.2/32 dev eth0");
    let spoofed = other
        .namespace
        .metadata(SERVICE, "10.80.0.2", "GET", "/user-data", &[]);
    assert_no_answer(&spoofed);
    let elsewhere = ("169.254.169.253", 80);
    let elsewhere = web.namespace.metadata(elsewhere, "", "GET", "/user-data", &[]);
    assert_no_answer(&elsewhere);
}

/// An answer begins with its status, and the error of a client with a letter.
#[track_caller]
fn assert_no_answer(text: &str) {
    assert!(
        text.starts_with(|first: char| first.is_ascii_alphabetic()),
        "{text}"
    );
}

#[tokio::test]
async fn metadata_outlives_the_daemon_and_the_helper() {
    let (namespace, mut daemon, _) = Daemon::with_networks(["lan"]).await;
    let file = start(&mut daemon, "web", true).await;
    daemon.kill_and_restart().await;
    daemon.wait_phase("web", v1::VmPhase::Running).await;
    let web = in_place_of(&namespace, &daemon, "web", &file).await;
    let server = file.parent().unwrap().with_file_name("server.json");
    let pid = || {
        let known: serde_json::Value = serde_json::from_slice(&fs::read(&server).unwrap()).unwrap();
        i32::try_from(known["pid"].as_i64().unwrap()).unwrap()
    };
    let first = pid();
    let process = rustix::process::Pid::from_raw(first).unwrap();
    rustix::process::kill_process(process, rustix::process::Signal::KILL).unwrap();
    within(async || (pid() != first).then_some(())).await;
    within(async || web.namespace.get("/user-data").starts_with("200 ").then_some(())).await;
}

#[tokio::test]
async fn isolated_guest_reads_its_metadata() {
    let namespace = Namespace::new();
    let mut daemon = Daemon::in_network(&namespace.0).await;
    let made = daemon
        .make_network("lan", "10.80.0.0/24", NetworkMode::Isolated)
        .await;
    made.unwrap();
    let file = start(&mut daemon, "web", true).await;
    let web = in_place_of(&namespace, &daemon, "web", &file).await;
    assert!(web.namespace.get("/user-data").starts_with("200 "));
}
