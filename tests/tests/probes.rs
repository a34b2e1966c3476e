//! Probes of a guest with a web server.

use serde_json::json;
use vmmd_tests::Case;
use vmmd_tests::node::Kernel;
use vmmd_tests::vm::{Console, Vm};

/// How long a change of a condition may take in a slow node, in seconds.
const PATIENCE: u64 = 120;

fn wait(vm: &Vm<'_>, condition: &str) {
    vm.ctl_with(
        "wait",
        &format!("--for condition={condition} --timeout {PATIENCE}s"),
    );
}

/// Checks the guest's view of its metadata and credentials.
fn the_guest_reads_metadata_and_credentials(console: &mut Console) {
    let data = console.run("wget -q -O - http://169.254.169.254/user-data");
    assert!(data.contains("hostname: by-metadata"), "{data}");
    let strings = console.run("tr '\\0' '\\n' </sys/firmware/dmi/tables/DMI | grep io.systemd");
    // Their number is in front of the first one (SMBIOS 3.7, 7.12).
    assert_eq!(strings.trim(), "\u{1}io.systemd.credential:greeting=hello");
}

#[test]
fn probes_follow_a_server_that_is_late_hangs_and_fails() {
    let case = Case::new("probes");
    let node = case.node();
    let network = case.name();
    node.sh(&format!(
        "vmmctl network create {network} --cidr 10.91.0.0/24 --security-group probed,in=tcp:80-81"
    ));
    case.at_end(format!("vmmctl network rm {network}"));
    let spec = case
        .net_guest(Kernel::Cloud612)
        .set("/nics", json!([{
                "name": "eth0", "network": network, "metadata": true, "securityGroups": ["probed"], "firewall": {"egress": {}},
            }]))
        .set("/cloudInit", json!({"userData": "#cloud-config\nhostname: by-metadata\n"}))
        .set("/credentials", json!([{"name": "greeting", "value": "hello"}]))
        .set("/runPolicy", json!("RUN_POLICY_RERUN_ON_FAILURE"))
        .set(
            "/probes",
            json!({
                "startup": {"tcp": {"port": 81}, "periodSeconds": 1, "timeoutSeconds": 5, "failureThreshold": 300},
                "readiness": {"http": {"port": 80, "path": "/health"}, "periodSeconds": 1, "timeoutSeconds": 5},
                "liveness": {"tcp": {"port": 81}, "periodSeconds": 1, "timeoutSeconds": 5},
            }),
        );
    let (vm, mut console) = Vm::boot(&case, "", &spec);
    // Late: the guest runs, and is not ready.
    wait(&vm, "Ready=false");
    console.run("ip link set eth0 up && udhcpc -i eth0 -s /lib/udhcpc -n -q -t 20 -T 2");
    the_guest_reads_metadata_and_credentials(&mut console);
    console.run("mkdir /www && echo fine >/www/health");
    console.run("busybox httpd -p 80 -h /www && busybox httpd -p 81 -h /www");
    wait(&vm, "Ready");
    // It hangs.
    let server = console.run("ps | awk '/[h]ttpd -p 80/ {print $1}'");
    let server = server.trim();
    console.run(&format!("kill -STOP {server}"));
    wait(&vm, "Ready=false");
    console.run(&format!("kill -CONT {server}"));
    wait(&vm, "Ready");
    // It answers with a failure.
    console.run("mv /www/health /www/other");
    wait(&vm, "Ready=false");
    let ready = vm.ctl("describe");
    assert!(ready.contains("status 404"), "{ready}");
    console.run("mv /www/other /www/health");
    wait(&vm, "Ready");
    // Its security group drops the connections, and passes them again.
    let rules = |ports: &str| {
        node.sh(&format!(
            "vmmctl update network {network} --security-group probed,in=tcp:{ports}"
        ));
    };
    rules("81");
    wait(&vm, "Ready=false");
    rules("80-81");
    wait(&vm, "Ready");
    // The server of the liveness probe ends: the guest starts again.
    let pid = vm.pid();
    console.run("kill $(ps | awk '/[h]ttpd -p 81/ {print $1}')");
    node.sh(&format!(
        "timeout {PATIENCE} sh -c 'while kill -0 {pid}; do sleep 0.2; done'"
    ));
    vm.wait_phase("RUNNING", PATIENCE);
    assert_eq!(vm.exit_reason(), "PROBE_FAILED");
    let events = node.sh(&format!("vmmctl get event --vm {}", vm.name()));
    for reason in ["Healthy", "Unhealthy", "ProbeFailed"] {
        assert!(events.contains(reason), "{reason}: {events}");
    }
}
