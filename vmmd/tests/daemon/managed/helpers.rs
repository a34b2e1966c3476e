//! The processes that answer DHCP and DNS.

use std::{
    fs,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use proto::v1::NetworkMode;

use crate::{
    harness::{Daemon, PATIENCE, status},
    namespace::Namespace,
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
        let begun = Instant::now();
        while helper() == before {
            assert!(begun.elapsed() < PATIENCE, "no other helper");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
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
        let status = || fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        // It serves when it has given up all.
        let begun = Instant::now();
        while !status().contains("\nSeccomp:\t2\n") {
            assert!(begun.elapsed() < PATIENCE, "{}", status());
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let status = status();
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
            line.trim().to_owned()
        };
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
    // A later daemon gives these user ids to nobody else.
    daemon.kill_and_restart().await;
    let vm = daemon.run("web", "").await;
    assert!(!users.contains(&status(&vm).instance.as_ref().unwrap().uid));
}
