//! The processes that answer DHCP and DNS.

use std::{
    fs,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

use seccompiler::{BpfProgram, SeccompAction, SeccompFilter, TargetArch};
use vmmd_api::v1::NetworkMode;

use super::nic;
use crate::{
    harness::{Daemon, status},
    namespace::Namespace,
    verbs::within,
};

/// Makes a network; gives the folder of its helper.
async fn folder(daemon: &Daemon, name: &str, cidr: &str) -> PathBuf {
    let made = daemon.make_network(name, cidr, NetworkMode::Nat).await.unwrap();
    daemon.path("run/networks").join(made.metadata.unwrap().uid)
}

/// The number of the helper that has this folder.
fn helper(folder: &Path) -> i32 {
    let known = fs::read(folder.join("server.json")).unwrap();
    let known: serde_json::Value = serde_json::from_slice(&known).unwrap();
    i32::try_from(known["pid"].as_i64().unwrap()).unwrap()
}

/// A field of a process, of proc_pid_status(5).
fn field(pid: i32, name: &str) -> String {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
    line.trim().to_owned()
}

/// chroot(2) fails as in a user namespace without rights: in this thread, the daemon and the daemon's helpers.
#[tokio::test]
async fn helper_that_may_not_chroot_serves_nevertheless() {
    let namespace = Namespace::new();
    let filter = SeccompFilter::new(
        [(libc::SYS_chroot, Vec::new())].into(),
        SeccompAction::Allow,
        SeccompAction::Errno(libc::EPERM.cast_unsigned()),
        TargetArch::x86_64,
    );
    let filter: BpfProgram = filter.unwrap().try_into().unwrap();
    seccompiler::apply_filter(&filter).unwrap();
    let daemon = Daemon::in_network(&namespace.0).await;
    let folder = folder(&daemon, "lan", "10.80.0.0/24").await;
    let pid = helper(&folder);
    // It serves when it has added its own filter to the test's.
    within(async || (field(pid, "Seccomp_filters:") == "2").then_some(())).await;
    let link = |of: &str, name: &str| fs::read_link(format!("/proc/{of}/{name}")).unwrap();
    let (own, of_daemon) = (pid.to_string(), daemon.pid().as_raw_nonzero().to_string());
    assert_eq!(link(&own, "root"), Path::new("/"));
    assert_ne!(link(&own, "ns/net"), link(&of_daemon, "ns/net"));
    assert_eq!(helper(&folder), pid);
}

#[tokio::test]
async fn helper_of_another_program_is_exchanged_and_leases_stay() {
    let namespace = Namespace::new();
    let mut daemon = Daemon::in_network(&namespace.0).await;
    let folder = folder(&daemon, "lan", "10.80.0.0/24").await;
    let addresses = daemon.start_in("web", nic("lan")).await.unwrap();
    let known = || -> serde_json::Value {
        serde_json::from_slice(&fs::read(folder.join("server.json")).unwrap()).unwrap()
    };
    let netd = Path::new(env!("CARGO_BIN_EXE_vmmd")).with_file_name("vmmd-netd");
    let own = fs::metadata(netd).unwrap();
    let program = serde_json::json!({"device": own.dev(), "inode": own.ino()});
    assert_eq!(known()["program"], program);
    let (before, table) = (helper(&folder), fs::read(folder.join("table.json")).unwrap());

    // The program that the next daemon starts too.
    daemon.kill_and_restart().await;
    assert_eq!(helper(&folder), before);

    // Another file of the same version, and what an older daemon has written.
    for wrong in [
        serde_json::json!({"device": own.dev(), "inode": 0}),
        serde_json::Value::Null,
    ] {
        let before = helper(&folder);
        daemon.kill();
        let mut record = known();
        record["program"] = wrong;
        if record["program"].is_null() {
            record.as_object_mut().unwrap().remove("program");
        }
        fs::write(folder.join("server.json"), record.to_string()).unwrap();
        daemon.relaunch().await;
        within(async || (helper(&folder) != before).then_some(())).await;
        let lives = || {
            let status = fs::read_to_string(format!("/proc/{before}/status"));
            status.is_ok_and(|status| !status.contains("State:\tZ"))
        };
        within(async || (!lives()).then_some(())).await;
        assert_eq!(known()["program"], program);
    }
    assert_eq!(fs::read(folder.join("table.json")).unwrap(), table);
    assert_eq!(
        status(&daemon.get("web").await.unwrap()).nics[0].addresses,
        addresses
    );
}

#[tokio::test]
async fn missing_helper_program_is_a_problem_of_the_network() {
    let namespace = Namespace::new();
    let daemon = Daemon::in_network_with(&namespace.0, "netd = \"/nonexistent/vmmd-netd\"\n").await;
    let made = daemon.make_network("lan", "10.80.0.0/24", NetworkMode::Nat).await;
    let problem = match made {
        Ok(network) => network.status.unwrap().message,
        Err(status) => status.message().to_owned(),
    };
    assert!(problem.contains("/nonexistent/vmmd-netd"), "{problem}");
    assert!(problem.contains("install vmmd again"), "{problem}");
}

#[tokio::test]
async fn helper_that_ends_is_replaced_at_once() {
    let namespace = Namespace::new();
    let mut daemon = Daemon::in_network(&namespace.0).await;
    let folder = folder(&daemon, "lan", "10.80.0.0/24").await;
    let helper = || helper(&folder);
    // One that this daemon started, and one that an earlier daemon started.
    for _ in 0..2 {
        let before = helper();
        let process = rustix::process::Pid::from_raw(before).unwrap();
        rustix::process::kill_process(process, rustix::process::Signal::KILL).unwrap();
        within(async || (helper() != before).then_some(())).await;
        daemon.kill_and_restart().await;
    }
}

#[tokio::test]
async fn helper_of_a_network_is_confined_as_one_without_rights() {
    let namespace = Namespace::new();
    let mut daemon = Daemon::in_network(&namespace.0).await;
    let mut helpers = Vec::new();
    for (name, subnet) in [("lan", "10.80.0.0/24"), ("dmz", "10.81.0.0/24")] {
        let folder = folder(&daemon, name, subnet).await;
        helpers.push((helper(&folder), folder));
    }
    let network = |pid: &str| fs::read_link(format!("/proc/{pid}/ns/net")).unwrap();
    let mut users = Vec::new();
    for (pid, folder) in &helpers {
        // It serves when it has given up all.
        within(async || (field(*pid, "Seccomp:") == "2").then_some(())).await;
        let field = |name: &str| field(*pid, name);
        let user: u32 = field("Uid:").split('\t').next().unwrap().parse().unwrap();
        assert!(daemon.uids.contains(&user), "{user}");
        users.push(user);
        for set in ["CapInh:", "CapPrm:", "CapEff:", "CapAmb:"] {
            assert_eq!(field(set), "0".repeat(16), "{set}");
        }
        assert_eq!(
            (field("NoNewPrivs:").as_str(), field("Threads:").as_str()),
            ("1", "1")
        );
        let of_daemon = daemon.pid().as_raw_nonzero().to_string();
        assert_ne!(network(&pid.to_string()), network(&of_daemon));
        let root = fs::read_link(format!("/proc/{pid}/root")).unwrap();
        assert_eq!(&root, folder);
    }
    assert_ne!(users[0], users[1]);
    // A later daemon does not reuse these user ids.
    daemon.kill_and_restart().await;
    let vm = daemon.run("web", "").await;
    assert!(!users.contains(&status(&vm).instance.as_ref().unwrap().uid));
}
