//! Networks that the daemon makes, in a network namespace of the test's own.

mod changes;
mod clients;
mod dhcp;
mod floating;
mod groups;
pub mod guest;
mod helpers;
mod ipv6;
mod metadata;
mod neighbors;
mod packages;
mod packets;
mod probes;
mod reserved;
mod routed;
mod steps;

use std::{
    collections::BTreeMap,
    net::Ipv4Addr,
    process::Command,
    time::{Duration, Instant},
};

use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Status, Streaming, transport::Channel};
use vmmd_api::v1::{
    self, NetworkMode, NicSpec, PublishedPort, network_service_client::NetworkServiceClient,
    nic_spec::Attachment, port_forward_request::Message,
};

use self::guest::{Guest, NameServer, Program};
use crate::{
    harness::{Daemon, PATIENCE, assert_refused, assert_says, connect, metadata_of, refusal, status},
    namespace::Namespace,
    verbs::within,
};

impl Daemon {
    async fn networks(&self) -> NetworkServiceClient<Channel> {
        NetworkServiceClient::new(connect(self.folder.path()).await)
    }

    async fn make_network(&self, name: &str, cidr: &str, mode: NetworkMode) -> Result<v1::Network, Status> {
        let spec = v1::NetworkSpec {
            mode: mode.into(),
            ipv4_cidr: cidr.into(),
            ..v1::NetworkSpec::default()
        };
        self.make_network_as(name, spec).await
    }

    async fn make_network_as(&self, name: &str, spec: v1::NetworkSpec) -> Result<v1::Network, Status> {
        self.create_network(name, spec, &format!("make-{name}")).await
    }

    async fn create_network(
        &self,
        name: &str,
        spec: v1::NetworkSpec,
        id: &str,
    ) -> Result<v1::Network, Status> {
        let request = creation(name, spec, id);
        let answer = self.networks().await.create_network(request).await?;
        Ok(answer.into_inner().network.unwrap())
    }

    async fn network(&self, name: &str) -> Result<v1::Network, Status> {
        let request = v1::GetNetworkRequest { name: name.into() };
        let answer = self.networks().await.get_network(request).await?;
        Ok(answer.into_inner().network.unwrap())
    }

    async fn remove_network(&self, name: &str) -> Result<(), Status> {
        let request = v1::DeleteNetworkRequest {
            name: name.into(),
            request_id: format!("remove-{name}"),
            ..Default::default()
        };
        self.networks().await.delete_network(request).await.map(drop)
    }

    /// One in a namespace of its own, with NAT networks of these names: 10.80.0.0/24, 10.80.1.0/24, …
    async fn with_networks<const N: usize>(names: [&str; N]) -> (Namespace, Self, [v1::Network; N]) {
        let namespace = Namespace::new();
        let daemon = Self::in_network(&namespace.0).await;
        let mut made = Vec::new();
        for (number, name) in names.into_iter().enumerate() {
            let cidr = format!("10.80.{number}.0/24");
            made.push(daemon.make_network(name, &cidr, NetworkMode::Nat).await.unwrap());
        }
        (namespace, daemon, made.try_into().unwrap())
    }

    /// Starts a VM with one NIC; its addresses.
    async fn start_in(&mut self, vm: &str, nic: NicSpec) -> Result<Vec<String>, Status> {
        let wanted = self.manifest_with(vm, "", |spec| spec.nics = vec![nic]);
        self.create(wanted).await?;
        let running = self.start_vm(vm).await?;
        Ok(status(&running).nics[0].addresses.clone())
    }
}

fn creation(name: &str, spec: v1::NetworkSpec, id: &str) -> v1::CreateNetworkRequest {
    v1::CreateNetworkRequest {
        network: Some(v1::Network {
            metadata: metadata_of(name),
            spec: Some(spec),
            status: None,
        }),
        request_id: id.into(),
    }
}

/// Addresses of both families.
fn dual_stack() -> v1::NetworkSpec {
    v1::NetworkSpec {
        ipv4_cidr: "10.80.0.0/24".into(),
        ipv6_cidr: "fd00:80::/64".into(),
        ..v1::NetworkSpec::default()
    }
}

/// Whether a network of the node has NAT, as the packet filter has it.
fn translates(namespace: &Namespace) -> bool {
    namespace.run("nft list map inet vmmd to").contains("goto to-nat")
}

fn nic(network: &str) -> NicSpec {
    NicSpec {
        name: "eth0".into(),
        attachment: Some(Attachment::Network(network.into())),
        ..NicSpec::default()
    }
}

impl Namespace {
    fn interfaces(&self) -> Vec<String> {
        let text = self.ip("-o link show");
        text.lines()
            .map(|line| line.split(": ").nth(1).unwrap().to_owned())
            .filter(|name| name != "lo")
            .collect()
    }
}

#[tokio::test]
async fn network_has_a_bridge_rules_and_a_server_until_deletion() {
    let namespace = Namespace::new();
    let daemon = Daemon::in_network(&namespace.0).await;
    let made = daemon
        .make_network("lan", "10.80.0.0/24", NetworkMode::Nat)
        .await
        .unwrap();
    let state = made.status.unwrap();
    assert!(state.ready && state.leases.is_empty(), "{state:?}");
    assert_eq!(
        (state.gateway.as_str(), state.available_addresses),
        ("10.80.0.1", 253)
    );
    let bridge = namespace.ip(&format!("-o addr show {}", state.bridge));
    assert!(bridge.contains("inet 10.80.0.1/24"), "{bridge}");
    let rules = namespace.run("nft list ruleset");
    assert!(
        rules.contains("table inet vmmd") && rules.contains("masquerade"),
        "{rules}"
    );
    assert_eq!(namespace.run("cat /proc/sys/net/ipv4/ip_forward").trim(), "1");
    let sockets = namespace.run("cat /proc/net/udp");
    assert!(sockets.contains(":0043"), "{sockets}");

    // The same request again is the same network; another one with its name or addresses is none.
    let again = daemon
        .make_network("lan", "10.80.0.0/24", NetworkMode::Nat)
        .await
        .unwrap();
    assert_eq!(again.metadata, made.metadata);
    let clash = daemon
        .make_network("other", "10.80.0.128/25", NetworkMode::Nat)
        .await
        .unwrap_err();
    assert_refused(&clash, Code::FailedPrecondition, "NETWORK_OVERLAPS");

    daemon.remove_network("lan").await.unwrap();
    assert_refused(
        &daemon.network("lan").await.unwrap_err(),
        Code::NotFound,
        "NETWORK_NOT_FOUND",
    );
    let again = daemon.make_network("lan", "10.80.0.0/24", NetworkMode::Nat).await;
    assert_eq!(refusal(&again.unwrap_err()), crate::request::gone());
    assert_eq!(namespace.interfaces(), Vec::<String>::new());
    assert!(!namespace.run("nft list ruleset").contains("vmmd"));
    assert!(!namespace.run("cat /proc/net/udp").contains(":0043"));
}

#[tokio::test]
async fn a_network_takes_no_addresses_that_the_node_reaches_otherwise() {
    let namespace = Namespace::new();
    let daemon = Daemon::in_network(&namespace.0).await;
    for command in [
        "link add eth1 up type bridge",
        "addr add 192.168.1.200/24 dev eth1",
        "addr add fd00:7::5/64 dev eth1 nodad",
        "route add 172.20.0.0/16 via 192.168.1.1",
        "route add default via 192.168.1.1",
    ] {
        namespace.ip(command);
    }
    for (number, (ipv4, ipv6)) in [
        ("192.168.1.0/25", ""),
        ("192.168.0.0/16", ""),
        ("172.20.5.0/24", ""),
        ("10.80.0.0/24", "fd00:7::/64"),
    ]
    .into_iter()
    .enumerate()
    {
        let spec = v1::NetworkSpec {
            ipv4_cidr: ipv4.into(),
            ipv6_cidr: ipv6.into(),
            ..v1::NetworkSpec::default()
        };
        let refused = daemon.make_network_as(&format!("lan{number}"), spec).await;
        let refused = refused.unwrap_err();
        assert_refused(&refused, Code::FailedPrecondition, "NETWORK_OVERLAPS");
        assert_says(&refused, "\"eth1\"");
    }
    assert_eq!(namespace.interfaces(), ["eth1"]);
    // The default route and the daemon's own bridges do not count as overlaps.
    for (name, cidr) in [("lan", "10.80.0.0/24"), ("dmz", "10.81.0.0/24")] {
        daemon.make_network(name, cidr, NetworkMode::Nat).await.unwrap();
    }
}

#[tokio::test]
async fn packet_filter_of_another_program_is_a_warning() {
    let namespace = Namespace::new();
    for command in [
        "add table inet fw",
        "add chain inet fw in { type filter hook input priority 0 ; policy drop ; }",
        "add chain inet fw through { type filter hook forward priority 0 ; }",
        "add rule inet fw through counter reject",
    ] {
        namespace.run(&format!("nft {command}"));
    }
    let mut daemon = Daemon::in_network(&namespace.0).await;
    let warning = |network: v1::Network| {
        let state = network.status.unwrap();
        assert!(state.ready, "{state:?}");
        let has = |hint| state.message.contains(hint);
        [
            has("nft insert rule inet fw in iifname \"vmb*\" accept"),
            has("nft insert rule inet fw through oifname \"vmb*\" accept"),
        ]
    };
    let make = async |name, cidr, mode| daemon.make_network(name, cidr, mode).await.unwrap();
    let made = make("lan", "10.80.0.0/24", NetworkMode::Nat).await;
    assert_eq!(warning(made), [true, true]);
    let made = make("alone", "10.81.0.0/24", NetworkMode::Isolated).await;
    assert_eq!(warning(made), [true, false], "nothing is forwarded");
    // The rules that the warning names.
    namespace.run("nft insert rule inet fw in iifname \"vmb*\" accept");
    namespace.run("nft delete chain inet fw through");
    daemon.kill_and_restart().await;
    within(async || {
        let state = daemon.network("lan").await.unwrap().status.unwrap();
        (state.ready && state.message.is_empty()).then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_vm_keeps_its_address_and_shows_it() {
    let namespace = Namespace::new();
    let mut daemon = Daemon::in_network(&namespace.0).await;
    daemon
        .make_network("lan", "10.80.0.0/29", NetworkMode::Nat)
        .await
        .unwrap();
    assert_eq!(daemon.start_in("a", nic("lan")).await.unwrap(), ["10.80.0.2"]);
    let chosen = NicSpec {
        address: "10.80.0.6".into(),
        ..nic("lan")
    };
    assert_eq!(daemon.start_in("b", chosen.clone()).await.unwrap(), ["10.80.0.6"]);
    let taken = daemon.start_in("c", chosen).await.unwrap_err();
    assert_refused(&taken, Code::FailedPrecondition, "ADDRESS_IN_USE");
    assert_says(&taken, "VM \"b\"");
    let ports = namespace.ports(&daemon.network("lan").await.unwrap().status.unwrap().bridge);
    assert_eq!(ports.len(), 2);

    // Over a stop, and over a daemon that is killed.
    daemon.kill_vm("a").await.unwrap();
    daemon.kill_and_restart().await;
    let running = daemon.start_vm("a").await.unwrap();
    assert_eq!(status(&running).nics[0].addresses, ["10.80.0.2"]);
    assert_eq!(status(&running).nics[0].network, "lan");
    let refused = daemon.remove_network("lan").await.unwrap_err();
    assert_refused(&refused, Code::FailedPrecondition, "NETWORK_IN_USE");
}

#[tokio::test]
async fn a_mac_address_is_one_nics_in_a_network() {
    let namespace = Namespace::new();
    let mut daemon = Daemon::in_network(&namespace.0).await;
    for (name, cidr) in [("lan", "10.80.0.0/24"), ("dmz", "10.81.0.0/24")] {
        daemon.make_network(name, cidr, NetworkMode::Nat).await.unwrap();
    }
    let same = |network| NicSpec {
        mac: "52:54:00:00:00:01".into(),
        ..nic(network)
    };
    daemon.start_in("a", same("lan")).await.unwrap();
    daemon.kill_vm("a").await.unwrap();
    let refused = daemon.start_in("b", same("lan")).await.unwrap_err();
    assert_refused(&refused, Code::FailedPrecondition, "MAC_IN_USE");
    assert_says(&refused, "VM \"a\"");
    daemon.start_in("c", same("dmz")).await.unwrap();
    daemon.start_vm("a").await.unwrap();
    // The deletion releases it at once.
    daemon.delete("a", true).await.unwrap();
    daemon.start_vm("b").await.unwrap();
}

/// For a VM that is restored beside the snapshot's own, with shared addresses that something else
/// keeps apart.
#[tokio::test]
async fn network_addresses_are_of_one_vm_also_with_share_addresses() {
    let (_namespace, mut daemon, _) = Daemon::with_networks(["lan"]).await;
    let before = daemon.start_in("web", nic("lan")).await.unwrap();
    daemon.snapshot("one", "web", false).await.unwrap();
    let request = v1::RestoreVmRequest {
        snapshot: "one".into(),
        vm: "copy".into(),
        share_addresses: true,
        ..Default::default()
    };
    let refused = daemon.snapshots().await.restore_vm(request).await.unwrap_err();
    assert_refused(&refused, Code::FailedPrecondition, "MAC_IN_USE");
    assert_says(&refused, "VM \"web\"");

    // The copy leaves no remains, and the first VM keeps its leases.
    let names = daemon.names().await;
    assert_eq!(names, ["web"]);
    let leases = daemon.network("lan").await.unwrap().status.unwrap().leases;
    assert_eq!(leases.len(), before.len(), "{leases:?}");
}

#[tokio::test]
async fn nic_in_another_network_may_use_its_new_address_only() {
    let namespace = Namespace::new();
    let mut daemon = Daemon::in_network(&namespace.0).await;
    for (name, cidr) in [("lan", "10.80.0.0/24"), ("dmz", "10.81.0.0/24")] {
        daemon.make_network(name, cidr, NetworkMode::Nat).await.unwrap();
    }
    assert_eq!(daemon.start_in("a", nic("lan")).await.unwrap(), ["10.80.0.2"]);
    daemon.kill_vm("a").await.unwrap();
    daemon
        .change("a", |spec| spec.nics = vec![nic("dmz")])
        .await
        .unwrap();
    let running = daemon.start_vm("a").await.unwrap();
    assert_eq!(status(&running).nics[0].addresses, ["10.81.0.2"]);
    // Immediately, not at the daemon's next check of its networks.
    let rules = namespace.run("nft list table bridge vmmd");
    assert!(
        rules.contains("10.81.0.2") && !rules.contains("10.80.0.2"),
        "{rules}"
    );
    let leases = daemon.network("lan").await.unwrap().status.unwrap().leases;
    assert!(
        leases.len() == 1 && leases[0].release_time.is_some(),
        "{leases:?}"
    );
}

#[tokio::test]
async fn ports_are_published_once() {
    let (namespace, mut daemon, _) = Daemon::with_networks(["lan"]).await;
    let published = |vm_port| NicSpec {
        published_ports: vec![PublishedPort {
            protocol: v1::PortProtocol::Tcp.into(),
            node_port: 8080,
            guest_port: vm_port,
            ..Default::default()
        }],
        ..nic("lan")
    };
    daemon.start_in("a", published(80)).await.unwrap();
    let rules = namespace.run("nft list ruleset");
    assert!(rules.contains("8080 : 10.80.0.2 . 80"), "{rules}");
    let clash = daemon.start_in("b", published(81)).await.unwrap_err();
    assert_refused(&clash, Code::FailedPrecondition, "PORT_IN_USE");
    assert_says(&clash, "VM \"a\"");
    let warnings = daemon.told_exactly("StartWouldBeRefused", 1).await;
    assert!(warnings[0].message.contains("VM \"a\""), "{warnings:?}");
    // `vmmctl run` asks before it makes a disk.
    let wanted = daemon.manifest_with("c", "", |spec| spec.nics = vec![published(82)]);
    let clash = daemon.create_as(wanted, true, true).await.unwrap_err();
    assert_refused(&clash, Code::FailedPrecondition, "PORT_IN_USE");
    // The deletion releases it at once.
    daemon.delete("a", true).await.unwrap();
    daemon.start_vm("b").await.unwrap();
    let rules = namespace.run("nft list ruleset");
    assert!(
        rules.contains("8080 : 10.80.0.3 . 81") && !rules.contains("10.80.0.2 . 80"),
        "{rules}"
    );
}

#[tokio::test]
async fn the_rules_of_a_nic_go_with_it() {
    let (namespace, mut daemon, _) = Daemon::with_networks(["lan"]).await;
    daemon.start_in("a", nic("lan")).await.unwrap();
    assert!(namespace.run("nft list ruleset").contains("10.80.0.2"));
    daemon.delete("a", true).await.unwrap();
    // Sooner than the node is looked at as a whole.
    let rules = || namespace.run("nft list ruleset");
    within(async || (!rules().contains("10.80.0.2")).then_some(())).await;
    let leases = daemon.network("lan").await.unwrap().status.unwrap().leases;
    assert!(
        leases.len() == 1 && leases[0].release_time.is_some(),
        "{leases:?}"
    );
}

/// Whether this machine's kernel tracks connections on bridges.
fn tracks_bridges(namespace: &Namespace) -> bool {
    let rules = "add table bridge probe; add chain bridge probe c { type filter hook postrouting priority 0; }; \
                 add rule bridge probe c ct state established accept";
    let output = Command::new("ip")
        .args(["netns", "exec", &namespace.0, "nft", "-c", rules])
        .output()
        .unwrap();
    output.status.success()
}

#[tokio::test]
async fn firewall_and_published_ports_change_live_and_are_kept() {
    let (namespace, mut daemon, _) = Daemon::with_networks(["lan"]).await;
    let published = |node_port| {
        vec![PublishedPort {
            node_port,
            guest_port: 80,
            ..PublishedPort::default()
        }]
    };
    let open = NicSpec {
        published_ports: published(8080),
        ..nic("lan")
    };
    daemon.start_in("a", open.clone()).await.unwrap();
    let moved = NicSpec {
        published_ports: published(8081),
        ..open.clone()
    };
    let changed = daemon
        .change("a", |spec| spec.nics = vec![moved.clone()])
        .await
        .unwrap();
    assert_eq!(status(&changed).pending_changes, []);
    let rules = namespace.run("nft list ruleset");
    assert!(rules.contains("8081 : ") && !rules.contains("8080 : "), "{rules}");

    let closed = NicSpec {
        firewall: Some(v1::NicFirewall {
            ingress: Some(v1::NicRules {
                allow: vec![v1::NicRule {
                    addresses: vec!["10.80.0.9".into()],
                    protocol: v1::RuleProtocol::Tcp.into(),
                    ports: vec![v1::PortRange {
                        first: 8000,
                        last: 8100,
                    }],
                }],
            }),
            egress: Some(v1::NicRules::default()),
        }),
        ..moved
    };
    let changed = daemon.change("a", |spec| spec.nics = vec![closed.clone()]).await;
    if !tracks_bridges(&namespace) {
        // The change is not stored, and everything else continues.
        assert_refused(
            &changed.unwrap_err(),
            Code::FailedPrecondition,
            "FIREWALL_UNAVAILABLE",
        );
        let alone = NicSpec {
            published_ports: Vec::new(),
            ..closed
        };
        let refused = daemon.start_in("b", alone).await.unwrap_err();
        assert_refused(&refused, Code::FailedPrecondition, "FIREWALL_UNAVAILABLE");
        daemon.start_in("c", nic("lan")).await.unwrap();
        return;
    }
    let changed = changed.unwrap();
    assert_eq!(status(&changed).pending_changes, []);
    let tap = status(&changed).nics[0].tap.clone();
    let expected = [
        "8000-8100".to_owned(),
        format!("\"{tap}\" : goto egress-{tap}"),
        format!("\"{tap}\" : goto ingress-{tap}"),
    ];
    let firewalled = |rules: &str| expected.iter().all(|rule| rules.contains(rule));
    let rules = namespace.run("nft list table bridge vmmd");
    assert!(firewalled(&rules), "{expected:?}: {rules}");
    daemon.kill_and_restart().await;
    daemon.kill_vm("a").await.unwrap();
    daemon.start_vm("a").await.unwrap();
    let rules = namespace.run("nft list table bridge vmmd");
    assert!(firewalled(&rules), "{expected:?}: {rules}");
    let changed = daemon.change("a", |spec| spec.nics = vec![open]).await.unwrap();
    assert_eq!(status(&changed).pending_changes, []);
    let rules = namespace.run("nft list table bridge vmmd");
    assert!(!rules.contains("chain ingress"), "{rules}");
}

#[tokio::test]
async fn what_others_take_away_is_put_back_when_the_daemon_starts() {
    let namespace = Namespace::new();
    let mut daemon = Daemon::in_network(&namespace.0).await;
    let made = daemon
        .make_network("lan", "10.80.0.0/24", NetworkMode::Nat)
        .await
        .unwrap();
    let bridge = made.status.unwrap().bridge;
    namespace.run("nft add table inet theirs");
    namespace.run("nft delete table inet vmmd");
    namespace.ip(&format!("link delete {bridge}"));
    daemon.kill_and_restart().await;
    let rules = within(async || {
        let rules = namespace.run("nft list ruleset");
        let back = rules.contains("table inet vmmd") && namespace.interfaces() == [bridge.clone()];
        back.then_some(rules)
    })
    .await;
    assert!(rules.contains("table inet theirs"), "{rules}");
    daemon.remove_network("lan").await.unwrap();
    assert!(namespace.run("nft list ruleset").contains("table inet theirs"));
}

/// The rules of each chain, and the elements of each set and map.
fn rules(namespace: &Namespace) -> BTreeMap<String, Vec<serde_json::Value>> {
    let listed = namespace.run("nft -j list ruleset");
    let listed: serde_json::Value = serde_json::from_str(&listed).unwrap();
    let mut chains = BTreeMap::<_, Vec<_>>::new();
    for object in listed["nftables"].as_array().unwrap() {
        if let Some(rule) = object.get("rule") {
            let chain = format!("{} {}", rule["family"], rule["chain"]);
            chains.entry(chain).or_default().push(rule["expr"].clone());
        }
        if let Some(set) = object.get("set").or(object.get("map")) {
            let name = format!("{} {}", set["family"], set["name"]);
            let mut elements = set["elem"].as_array().cloned().unwrap_or_default();
            elements.sort_by_key(ToString::to_string);
            chains.insert(name, elements);
        }
    }
    chains
}

#[tokio::test]
async fn packet_filter_after_many_changes_equals_a_new_one() {
    let namespace = Namespace::new();
    let mut daemon = Daemon::in_network(&namespace.0).await;
    for (name, cidr, mode) in [
        ("lan", "10.80.0.0/24", NetworkMode::Nat),
        ("dmz", "10.81.0.0/24", NetworkMode::Isolated),
        ("gone", "10.82.0.0/24", NetworkMode::Routed),
    ] {
        daemon.make_network(name, cidr, mode).await.unwrap();
    }
    let published = |node_port| NicSpec {
        published_ports: vec![PublishedPort {
            node_port,
            guest_port: 80,
            ..PublishedPort::default()
        }],
        ..nic("lan")
    };
    daemon.start_in("a", published(8080)).await.unwrap();
    daemon.start_in("b", nic("dmz")).await.unwrap();
    daemon.remove_network("gone").await.unwrap();
    daemon
        .change("a", |spec| spec.nics = vec![published(8081)])
        .await
        .unwrap();
    daemon.kill_vm("b").await.unwrap();
    daemon
        .change("b", |spec| spec.nics = vec![nic("lan")])
        .await
        .unwrap();
    daemon.start_vm("b").await.unwrap();
    daemon.start_in("c", nic("dmz")).await.unwrap();
    let changed = rules(&namespace);
    daemon.kill();
    namespace.run("nft flush ruleset");
    daemon.relaunch().await;
    within(async || (rules(&namespace) == changed).then_some(())).await;
    // Changes while another program has removed a table.
    namespace.run("nft delete table bridge vmmd");
    daemon
        .change("a", |spec| spec.nics = vec![published(8080)])
        .await
        .unwrap();
    daemon
        .change("a", |spec| spec.nics = vec![published(8081)])
        .await
        .unwrap();
    within(async || (rules(&namespace) == changed).then_some(())).await;
}

/// Opens a port of a VM.
async fn forward(
    daemon: &Daemon,
    vm: &str,
    port: u32,
) -> Result<
    (
        mpsc::Sender<v1::PortForwardRequest>,
        Streaming<v1::PortForwardResponse>,
    ),
    Status,
> {
    let (sender, receiver) = mpsc::channel(4);
    let open = v1::PortForwardOpen {
        name: vm.into(),
        port,
        nic: String::new(),
    };
    sender.send(forwarded(Message::Open(open))).await.unwrap();
    let output = daemon
        .client()
        .port_forward(ReceiverStream::new(receiver))
        .await?;
    Ok((sender, output.into_inner()))
}

fn forwarded(message: Message) -> v1::PortForwardRequest {
    v1::PortForwardRequest {
        message: Some(message),
    }
}

#[tokio::test]
async fn a_port_of_a_guest_is_reached_through_the_api() {
    let namespace = Namespace::new();
    let mut daemon = Daemon::in_network(&namespace.0).await;
    let made = daemon
        .make_network("lan", "10.80.0.0/24", NetworkMode::Isolated)
        .await
        .unwrap();
    let bridge = made.status.unwrap().bridge;
    daemon.start_in("a", nic("lan")).await.unwrap();
    // The guest of a mock does not answer: another one takes its place while its VM runs.
    let running = daemon.get("a").await.unwrap();
    let (tap, mac) = (&status(&running).nics[0].tap, &status(&running).nics[0].mac);
    namespace.ip(&format!("link delete {tap}"));
    let guest = Guest::on(&namespace, tap, &bridge, mac);
    guest.namespace.ip("addr add 10.80.0.2/24 dev eth0");
    let refused = forward(&daemon, "a", 7000).await.unwrap_err();
    assert_refused(&refused, Code::FailedPrecondition, "PORT_UNREACHABLE");
    // A server that sends back its input at the end of the input.
    let program = r#"
import socket
s = socket.create_server(('', 7000))
print('ready', flush=True)
c, _ = s.accept()
had = b''
while data := c.recv(65536):
    had += data
c.sendall(b'had ' + had)
c.close()
"#;
    let mut server = Program::start(&mut guest.namespace.python(program));
    let (sender, mut output) = forward(&daemon, "a", 7000).await.unwrap();
    for part in ["GET", " /"] {
        sender.send(forwarded(Message::Data(part.into()))).await.unwrap();
    }
    drop(sender);
    let mut had = Vec::new();
    while let Some(response) = output.message().await.unwrap() {
        had.extend(response.data);
    }
    assert_eq!(had, b"had GET /");
    assert!(server.process.wait().unwrap().success());

    daemon.kill_vm("a").await.unwrap();
    let refused = forward(&daemon, "a", 7000).await.unwrap_err();
    assert_refused(&refused, Code::FailedPrecondition, "NOT_RUNNING");
    assert_eq!(
        forward(&daemon, "a", 0).await.unwrap_err().code(),
        Code::InvalidArgument
    );
    assert_eq!(
        forward(&daemon, "nobody", 7000).await.unwrap_err().code(),
        Code::NotFound
    );
}

#[tokio::test]
async fn a_guest_finds_the_others_and_the_outside_by_name() {
    let namespace = Namespace::new();
    let world = NameServer::beside(&namespace);
    let mut daemon = Daemon::in_network(&namespace.0).await;
    let spec = v1::NetworkSpec {
        ipv4_cidr: "10.80.0.0/24".into(),
        // The first one is the node, which has no name server.
        dns_servers: vec!["198.51.100.1".into(), "198.51.100.2".into()],
        ..v1::NetworkSpec::default()
    };
    daemon.make_network_as("lan", spec).await.unwrap();
    daemon.start_in("a", nic("lan")).await.unwrap();
    daemon.start_in("b", nic("lan")).await.unwrap();
    let guest = Guest::in_place_of(&namespace, &daemon, "a").await;
    assert_eq!(guest.resolve("10.80.0.1", "b.lan.internal"), "0 10.80.0.3");
    assert_eq!(guest.resolve("10.80.0.1", "c.lan.internal"), "3 -");
    assert_eq!(guest.resolve("10.80.0.1", "www.example.com"), "0 192.0.2.7");
    // Also by TCP, and what UDP does not carry; other ports of the gateway are closed.
    let by_tcp = |port, name| guest.resolve_by_tcp("10.80.0.1", port, name);
    assert_eq!(by_tcp(53, "b.lan.internal"), "0 48");
    assert_eq!(by_tcp(53, "www.example.com"), format!("0 {}", 33 + 500 * 16));
    assert_eq!(by_tcp(80, "www.example.com"), "refused");
    // The helper needs no daemon.
    daemon.kill();
    assert_eq!(guest.resolve("10.80.0.1", "b.lan.internal"), "0 10.80.0.3");
    assert_eq!(guest.resolve("10.80.0.1", "www.example.com"), "0 192.0.2.7");
    // An unreachable server does not affect the network's own names.
    drop(world);
    assert_eq!(guest.resolve("10.80.0.1", "a.lan.internal"), "0 10.80.0.2");
}

#[tokio::test]
async fn guest_gets_its_address_by_dhcp_without_the_daemon() {
    let namespace = Namespace::new();
    let mut daemon = Daemon::in_network(&namespace.0).await;
    let made = daemon
        .make_network("lan", "10.80.0.0/24", NetworkMode::Nat)
        .await
        .unwrap();
    daemon.start_in("a", nic("lan")).await.unwrap();
    let running = daemon.get("a").await.unwrap();
    let (tap, mac) = (
        status(&running).nics[0].tap.clone(),
        status(&running).nics[0].mac.clone(),
    );
    let bridge = made.status.unwrap().bridge;
    // The VM's process holds its tap; without it the tap vanishes, and a guest of the test's takes its place.
    daemon.kill_vm("a").await.unwrap();
    let guest = Guest::on(&namespace, &tap, &bridge, &mac);
    let expected = (Ipv4Addr::new(10, 80, 0, 2), Ipv4Addr::new(10, 80, 0, 1));
    assert_eq!(guest.dhcp(&mac), Some(expected));
    daemon.kill();
    assert_eq!(guest.dhcp(&mac), Some(expected));
    // A stranger's MAC address is not served, and does not even pass.
    guest.namespace.ip("link set eth0 address 02:00:00:00:00:99");
    assert_eq!(guest.dhcp("02:00:00:00:00:99"), None);
}
