//! What people type.

use std::{
    io::{BufRead as _, BufReader},
    process::{Command, Stdio},
    time::Duration,
};

use serde_json::json;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};
use vmmd_kubernetes_tests::{eventually, fleet::Fleet, session::Session};
use vmmd_testing::namespace::Namespace;

const PATIENCE: Duration = Duration::from_secs(60);

/// The placeholder of a VM's run.
fn pod(fleet: &Fleet, name: &str) -> String {
    fleet
        .cluster
        .kubectl(&["get", "vmmvm", name, "-o=jsonpath={.status.run.pod}"])
}

async fn node_of(fleet: &Fleet, name: &str) -> String {
    let vms = fleet.vms().await.unwrap();
    vms.into_iter().find(|vm| vm.name == name).unwrap().node
}

#[tokio::test]
async fn a_vm_is_listed_described_followed_and_deleted() {
    let fleet = Fleet::start(1, 1).await;
    let cluster = &fleet.cluster;
    cluster.apply(&fleet.vm("web"));
    fleet.all_run(&["web".into()], PATIENCE).await;
    let listed = cluster.kubectl(&["get", "vmmvm", "-o", "wide"]);
    assert!(
        listed
            .lines()
            .nth(1)
            .is_some_and(|line| line.contains("Running") && line.contains("node-0")),
        "{listed}"
    );
    let described = cluster.kubectl(&["describe", "vmmvm", "web"]);
    assert!(
        described.contains("Events:") && !described.contains("Events:  <none>"),
        "{described}"
    );
    let pod = pod(&fleet, "web");
    let described = cluster.kubectl(&["describe", "pod", &pod]);
    assert!(
        described.contains("Successfully assigned default/"),
        "{described}"
    );
    let pods = cluster.kubectl(&["get", "pod", &pod]);
    assert!(pods.contains("1/1") && pods.contains("Running"), "{pods}");

    let mut logs = Session::start(cluster.command(&["logs", "-f", &pod]));
    logs.expect("booted", PATIENCE).await;
    cluster.kubectl(&["delete", "vmmvm", "web", "--timeout=60s"]);
    assert!(logs.end(PATIENCE).await, "logs -f ends with the VM");
    assert!(cluster.refused(&["get", "vmmvm", "web"]).contains("NotFound"));
    fleet.nothing_left(PATIENCE).await;
}

/// A command as somebody types it at a terminal.
fn on_terminal(command: &Command) -> Command {
    let words = [command.get_program()].into_iter().chain(command.get_args());
    let words: Vec<_> = words.map(|word| word.to_str().unwrap()).collect();
    let mut script = Command::new("script");
    script.args(["-qefc", &words.join(" "), "/dev/null"]);
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => script.env(name, value),
            None => script.env_remove(name),
        };
    }
    script
}

#[tokio::test]
async fn a_console_is_attached_to_and_left() {
    let fleet = Fleet::start(1, 1).await;
    let cluster = &fleet.cluster;
    cluster.apply(&fleet.vm("web"));
    fleet.all_run(&["web".into()], PATIENCE).await;
    let pod = pod(&fleet, "web");

    let mut console = Session::typing(cluster.command(&["exec", "-i", &pod, "--", "console"]));
    console.expect("booted", PATIENCE).await;
    console.type_in("hello guest\n").await;
    console.expect("hello guest", PATIENCE).await;
    // Two are there at a time.
    let mut attached = Session::typing(cluster.command(&["attach", "-i", &pod]));
    attached.type_in("machine\n").await;
    attached.expect("vcpus=1", PATIENCE).await;
    console.expect("vcpus=1", PATIENCE).await;
    assert!(!attached.seen().contains("booted"), "{}", attached.seen());
    console.type_in("\x1d").await;
    assert!(console.end(PATIENCE).await, "it was left");
    let mut terminal = Session::typing(on_terminal(&cluster.command(&["attach", "-it", &pod])));
    terminal.expect("try pressing enter", PATIENCE).await;
    terminal.type_in("machine\n").await;
    terminal.expect("vcpus=1", PATIENCE).await;
    terminal.type_in("\x1d").await;
    assert!(terminal.end(PATIENCE).await, "it was left");
    // Output continues after the end of the input.
    attached.type_in("print 100000\n").await;
    attached.end_input();
    attached.expect("printed", PATIENCE).await;
    let mut last = Session::typing(cluster.command(&["attach", "-i", &pod]));
    last.type_in("poweroff\n").await;
    for session in [last, attached] {
        assert!(session.end(PATIENCE).await, "it ends with the run");
    }

    let said = cluster.refused(&["exec", &pod, "--", "sh", "-c", "true"]);
    assert!(said.contains("there is `console`"), "{said}");
    // Not what this VM has.
    let said = cluster.refused(&["exec", &pod, "--", "console", "--hvc"]);
    assert!(
        said.contains("virtio-console") && !said.contains("there is"),
        "{said}"
    );
    fleet.end(PATIENCE).await;
}

/// A server in a namespace that answers each connection with all that it has read.
fn server(namespace: &Namespace, port: u16) -> std::process::Child {
    let program = format!(
        r#"
import socket, threading
s = socket.create_server(('', {port}))
print('ready', flush=True)
def serve(c):
    had = b''
    while data := c.recv(65536):
        had += data
    c.sendall(b'had ' + had)
    c.close()
while True:
    threading.Thread(target=serve, args=(s.accept()[0],), daemon=True).start()
"#
    );
    let mut server = Command::new("ip")
        .args(["netns", "exec", &namespace.0, "python3", "-c", &program])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut said = String::new();
    BufReader::new(server.stdout.take().unwrap())
        .read_line(&mut said)
        .unwrap();
    assert_eq!(said, "ready\n");
    server
}

#[tokio::test]
async fn a_port_of_a_guest_is_forwarded() {
    let namespace = Namespace::new();
    let fleet = Fleet::start_in(1, 1, "", Some(&namespace.0)).await;
    let cluster = &fleet.cluster;
    fleet.make_network(0, "lan", "10.80.0.0/24").await;
    let mut vm = fleet.vm("web");
    vm["spec"]["vm"]["nics"] = json!([{"name": "eth0", "network": "lan"}]);
    cluster.apply(&vm);
    fleet.all_run(&["web".into()], PATIENCE).await;
    let pod = pod(&fleet, "web");
    let address = cluster.kubectl(&["get", "pod", &pod, "-o=jsonpath={.status.podIP}"]);
    // The guest of a mock does not answer: the daemon's own namespace does at its address.
    namespace.ip("link set lo up");
    namespace.ip(&format!("addr add {address}/32 dev lo"));
    let mut server = server(&namespace, 7000);

    let forward = ["port-forward", "--address=127.0.0.1", &pod, ":7000", ":7001"];
    let mut forward = Session::start(cluster.command(&forward));
    forward.expect("-> 7000", PATIENCE).await;
    forward.expect("-> 7001", PATIENCE).await;
    let port = |of: &str| -> u16 {
        let seen = forward.seen();
        let line = seen
            .lines()
            .find(|line| line.ends_with(&format!("-> {of}")))
            .unwrap();
        let words = line.trim_end_matches(&format!(" -> {of}")).rsplit(':');
        words.map(|word| word.parse().unwrap()).next().unwrap()
    };
    let (open, closed) = (port("7000"), port("7001"));
    // Two connections at a time, a small and a large one.
    let texts = ["GET /".to_owned(), "x".repeat(1 << 20)];
    let mut connections = Vec::new();
    for text in &texts {
        let mut connection = TcpStream::connect(("127.0.0.1", open)).await.unwrap();
        connection.write_all(text.as_bytes()).await.unwrap();
        connections.push(connection);
    }
    for (mut connection, text) in connections.into_iter().zip(&texts) {
        connection.shutdown().await.unwrap();
        let mut had = String::new();
        connection.read_to_string(&mut had).await.unwrap();
        assert!(had == format!("had {text}"), "{} bytes", had.len());
    }
    // A connection to a port without a listener ends, and other connections continue.
    let mut connection = TcpStream::connect(("127.0.0.1", closed)).await.unwrap();
    let mut had = Vec::new();
    let _ended = connection.read_to_end(&mut had).await;
    assert_eq!(had, b"");
    let mut connection = TcpStream::connect(("127.0.0.1", open)).await.unwrap();
    connection.shutdown().await.unwrap();
    connection.read_to_end(&mut had).await.unwrap();
    assert_eq!(had, b"had ");

    drop(forward);
    server.kill().unwrap();
    server.wait().unwrap();
    cluster.kubectl(&["delete", "vmmvm", "web", "--timeout=60s"]);
    // The network stays.
    assert_eq!(fleet.nodes[0].daemon.list().await, []);
}

#[tokio::test]
async fn a_node_is_cordoned_drained_and_uncordoned() {
    let fleet = Fleet::start(2, 1).await;
    let cluster = &fleet.cluster;
    cluster.kubectl(&["cordon", "node-0"]);
    let names: Vec<String> = (0..4).map(|number| format!("vm-{number}")).collect();
    for name in &names[..2] {
        cluster.apply(&fleet.vm(name));
    }
    fleet.all_run(&names[..2], PATIENCE).await;
    for name in &names[..2] {
        assert_eq!(node_of(&fleet, name).await, "node-1", "the other one is cordoned");
    }
    cluster.kubectl(&["uncordon", "node-0"]);
    cluster.kubectl(&["cordon", "node-1"]);
    for name in &names[2..] {
        cluster.apply(&fleet.vm(name));
    }
    fleet.all_run(&names, PATIENCE).await;
    for name in &names[2..] {
        assert_eq!(node_of(&fleet, name).await, "node-0");
    }
    let drained = cluster.kubectl(&["drain", "node-1", "--ignore-daemonsets", "--timeout=120s"]);
    assert!(drained.contains("evicted"), "{drained}");
    assert_eq!(
        fleet.nodes[1].daemon.vmm_processes(),
        [],
        "nothing runs when the drain has ended"
    );
    fleet.all_run(&names, PATIENCE).await;
    for name in &names {
        assert_eq!(node_of(&fleet, name).await, "node-0");
    }
    cluster.kubectl(&["uncordon", "node-1"]);
    let mut vm = fleet.vm("back");
    vm["spec"]["nodeSelector"] = serde_json::json!({"kubernetes.io/hostname": "node-1"});
    cluster.apply(&vm);
    let all: Vec<_> = names.into_iter().chain(["back".to_owned()]).collect();
    fleet.all_run(&all, PATIENCE).await;
    fleet.end(PATIENCE).await;
}

#[tokio::test]
async fn invalid_spec_is_refused_with_the_path_of_the_field() {
    let fleet = Fleet::start(1, 1).await;
    let mut vm = fleet.vm("bad");
    vm["spec"]["vm"]["memory"]["sizeBytes"] = 5.into();
    // By the schema at admission, or by the controller in the status.
    let file = fleet.cluster.path("home/bad.json");
    std::fs::write(&file, vm.to_string()).unwrap();
    let output = fleet.cluster.run(&["apply", "-f", file.to_str().unwrap()]);
    let said = if output.status.success() {
        fleet.cluster.kubectl(&[
            "wait",
            "vmmvm/bad",
            "--for=condition=Valid=false",
            "--timeout=30s",
        ]);
        fleet.cluster.kubectl(&["get", "vmmvm", "bad", "-o", "yaml"])
    } else {
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    assert!(said.contains("spec.vm.memory.sizeBytes"), "{said}");
    assert_eq!(fleet.nodes[0].daemon.list().await, []);
}

#[tokio::test]
async fn a_vm_whose_starts_fail_is_not_said_to_run() {
    let fleet = Fleet::start(1, 1).await;
    let cluster = &fleet.cluster;
    let mut vm = fleet.vm("bad");
    // As on a node whose KVM runs no guests.
    vm["spec"]["vm"]["boot"]["linux"]["cmdline"] = "mock.boot=kvm".into();
    cluster.apply(&vm);
    let path = "-o=jsonpath={.status.phase} {.status.conditions[?(@.type=='Ready')]}";
    let ready = eventually("the status says why", PATIENCE, async || {
        let found = cluster.kubectl(&["get", "vmmvm", "bad", path]);
        if found.contains("KVM can't run guests") {
            Ok(found)
        } else {
            Err(found)
        }
    })
    .await;
    assert!(ready.starts_with("Starting "), "{ready}");
    let pods = cluster.kubectl(&["get", "pods"]);
    assert!(pods.contains("StartFailed") && pods.contains("0/1"), "{pods}");
    fleet.end(PATIENCE).await;
}
