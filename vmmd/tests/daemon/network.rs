//! Taps on a bridge, in a network namespace of the test's own.

use tonic::Code;
use vmmd_api::v1::{AttachmentPhase, NicSpec, RateLimit, nic_spec::Attachment};

use crate::{
    console::Client,
    harness::{Daemon, assert_refused, status},
    namespace::Namespace,
};

pub fn nic(name: &str, attachment: Attachment) -> NicSpec {
    NicSpec {
        name: name.into(),
        attachment: Some(attachment),
        ..NicSpec::default()
    }
}

/// The manifest of a VM with a NIC on `br0`.
fn on_bridge(daemon: &Daemon, nic: NicSpec) -> vmmd_api::v1::Vm {
    daemon.manifest_with("web", "", |spec| {
        spec.nics = vec![NicSpec {
            name: "eth0".into(),
            attachment: Some(Attachment::Bridge("br0".into())),
            ..nic
        }];
    })
}

#[tokio::test]
async fn nic_on_a_bridge_has_a_filter_of_its_mac_address() {
    let network = Namespace::new();
    network.ip("link add br0 type bridge");
    let daemon = Daemon::in_network(&network.0).await;
    let filtered = NicSpec {
        mac_filter: true,
        ..NicSpec::default()
    };
    daemon.create(on_bridge(&daemon, filtered)).await.unwrap();
    let running = daemon.start_vm("web").await.unwrap();
    let tap = &status(&running).nics[0].tap;
    let filters = network.run(&format!("tc filter show dev {tap} ingress"));
    assert!(filters.contains("bpf"), "{filters}");
}

#[tokio::test]
async fn vlan_of_a_nic_needs_a_bridge_that_filters_vlans() {
    let network = Namespace::new();
    network.ip("link add br0 type bridge");
    network.ip("link set br0 up");
    let daemon = Daemon::in_network(&network.0).await;
    let in_vlan = NicSpec {
        vlan: 20,
        ..NicSpec::default()
    };
    let refused = daemon.create(on_bridge(&daemon, in_vlan)).await.unwrap_err();
    assert_refused(&refused, Code::FailedPrecondition, "BRIDGE_WITHOUT_VLANS");
}

#[tokio::test]
async fn a_nic_comes_and_goes_while_the_vm_runs_also_over_a_kill() {
    let network = Namespace::new();
    network.ip("link add br0 type bridge");
    network.ip("link set br0 up");
    let mut daemon = Daemon::in_network(&network.0).await;
    let vm = daemon.manifest_with("web", "", |spec| {
        spec.nics = vec![nic("eth0", Attachment::Bridge("br0".into()))];
    });
    daemon.create(vm.clone()).await.unwrap();
    daemon.start_vm("web").await.unwrap();
    let phases = |vm: &vmmd_api::v1::Vm| -> Vec<_> {
        let nics = &status(vm).nics;
        nics.iter().map(|nic| (nic.name.clone(), nic.phase())).collect()
    };
    let attached = |name: &str| (name.to_owned(), AttachmentPhase::Attached);

    let lan = nic("lan", Attachment::Bridge("br0".into()));
    let changed = daemon.change("web", |spec| spec.nics.push(lan)).await.unwrap();
    assert_eq!(phases(&changed), [attached("eth0"), attached("lan")]);
    assert!(status(&changed).pending_changes.is_empty(), "{changed:?}");
    let mut taps: Vec<_> = status(&changed).nics.iter().map(|nic| nic.tap.clone()).collect();
    taps.sort();
    let mut ports = network.ports("br0");
    ports.sort();
    assert_eq!(ports, taps);
    daemon.kill_and_restart().await;
    assert_eq!(
        status(&daemon.get("web").await.unwrap()).nics,
        status(&changed).nics
    );

    // The first one goes; the other one keeps its tap.
    let changed = daemon
        .change("web", |spec| drop(spec.nics.remove(0)))
        .await
        .unwrap();
    assert_eq!(phases(&changed), [attached("lan")]);
    assert!(taps.contains(&status(&changed).nics[0].tap));

    // An attach whose end the daemon does not see is found by the next one.
    network.ip("tuntap add tap9 mode tap");
    let more = nic("more", Attachment::Tap("tap9".into()));
    daemon
        .run_with("other", "", |spec| spec.nics = vec![more.clone()])
        .await;
    let changed = daemon.change("web", |spec| spec.nics.push(more)).await.unwrap();
    let more = status(&changed).nics[1].clone();
    assert_eq!(more.phase(), AttachmentPhase::Pending);
    assert!(more.message.contains("in use"), "{more:?}");
    assert_eq!(status(&changed).pending_changes.len(), 1);
    daemon.kill_vm("other").await.unwrap();
    daemon.kill_and_restart().await;
    let begin = std::time::Instant::now();
    while phases(&daemon.get("web").await.unwrap()) != [attached("lan"), attached("more")] {
        assert!(begin.elapsed().as_secs() < 30, "{:?}", daemon.get("web").await);
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
    daemon.kill_vm("web").await.unwrap();
    assert_eq!(network.ports("br0"), Vec::<String>::new());
}

#[tokio::test]
async fn taps_join_the_bridge_with_its_mtu_and_vanish_with_the_vmm() {
    let network = Namespace::new();
    network.ip("link add br0 mtu 1400 type bridge");
    network.ip("link set br0 up");
    network.ip("tuntap add tap9 mode tap");
    let mut daemon = Daemon::in_network(&network.0).await;
    let mut vm = daemon.manifest_with("web", "", |spec| {
        spec.nics = vec![
            nic("eth0", Attachment::Bridge("br0".into())),
            nic("eth1", Attachment::Bridge("br0".into())),
            nic("eth2", Attachment::Tap("tap9".into())),
        ];
    });
    // The first byte of a tap's own address.
    vm.spec.as_mut().unwrap().nics[0].mac = "fe:00:00:00:00:01".into();
    daemon.create(vm.clone()).await.unwrap();
    let running = daemon.start_vm("web").await.unwrap();
    let nics = status(&running).nics.clone();
    for nic in &nics[..2] {
        let own = network.ip(&format!("-o link show {}", nic.tap));
        assert!(
            !own.contains(&nic.mac),
            "a bridge takes what is for its port's address for the node: {own}"
        );
    }
    let mut taps = [nics[0].tap.clone(), nics[1].tap.clone()];
    taps.sort();
    let mut found = network.ports("br0");
    found.sort();
    assert_eq!(found, taps);
    assert_ne!(nics[0].mac, nics[1].mac);
    assert_eq!(nics[2].tap, "tap9");
    let link = network.ip(&format!("-o link show {}", taps[0]));
    assert!(
        link.contains("mtu 1400") && link.contains(",UP") && link.contains("alias vmmd: web"),
        "{link}"
    );

    vm.metadata.as_mut().unwrap().name = "other".into();
    vm.spec.as_mut().unwrap().nics = vec![nic("eth0", Attachment::Tap("tap9".into()))];
    daemon.create(vm).await.unwrap();
    let refused = daemon.start_vm("other").await.unwrap_err();
    assert_refused(&refused, Code::FailedPrecondition, "TAP_IN_USE");

    // The addresses are those of the record.
    let macs = |nics: &[vmmd_api::v1::NicStatus]| nics.iter().map(|nic| nic.mac.clone()).collect::<Vec<_>>();
    daemon.kill_and_restart().await;
    let again = daemon.get("web").await.unwrap();
    assert_eq!(status(&again).nics, nics);
    let stopped = daemon.kill_vm("web").await.unwrap();
    assert_eq!(macs(&status(&stopped).nics), macs(&nics));
    assert_eq!(status(&stopped).nics[0].tap, "");
    assert_eq!(network.ports("br0"), Vec::<String>::new());
}

#[tokio::test]
async fn the_tap_of_a_vms_nic_is_given_to_no_other_vm() {
    let network = Namespace::new();
    network.ip("link add br0 type bridge");
    let daemon = Daemon::in_network(&network.0).await;
    let mut vm = daemon.manifest("web", "");
    let queues = |nic| NicSpec { queues: 2, ..nic };
    vm.spec.as_mut().unwrap().nics = vec![queues(nic("eth0", Attachment::Bridge("br0".into())))];
    daemon.create(vm.clone()).await.unwrap();
    let running = daemon.start_vm("web").await.unwrap();
    let tap = status(&running).nics[0].tap.clone();
    vm.metadata.as_mut().unwrap().name = "other".into();
    vm.spec.as_mut().unwrap().nics = vec![queues(nic("eth0", Attachment::Tap(tap)))];
    let refused = daemon.create(vm).await.unwrap_err();
    assert_refused(&refused, Code::FailedPrecondition, "TAP_IN_USE");
}

#[tokio::test]
async fn a_given_tap_with_several_queues_is_one_vms() {
    let network = Namespace::new();
    network.ip("tuntap add tap9 mode tap multi_queue");
    let daemon = Daemon::in_network(&network.0).await;
    let mut vm = daemon.manifest_with("web", "", |spec| {
        spec.nics = vec![NicSpec {
            queues: 2,
            ..nic("eth0", Attachment::Tap("tap9".into()))
        }];
    });
    daemon.create(vm.clone()).await.unwrap();
    daemon.start_vm("web").await.unwrap();
    vm.metadata.as_mut().unwrap().name = "other".into();
    daemon.create(vm).await.unwrap();
    let refused = daemon.start_vm("other").await.unwrap_err();
    assert_refused(&refused, Code::FailedPrecondition, "TAP_IN_USE");
    daemon.kill_vm("web").await.unwrap();
    daemon.start_vm("other").await.unwrap();
}

#[tokio::test]
async fn nic_link_and_limits_change_live_and_queues_at_next_start() {
    let network = Namespace::new();
    network.ip("link add br0 type bridge");
    network.ip("link set br0 up");
    let daemon = Daemon::in_network(&network.0).await;
    daemon
        .run_with("web", "", |spec| {
            spec.nics = vec![nic("eth0", Attachment::Bridge("br0".into()))];
        })
        .await;
    let mut console = Client::open(&daemon, "web").await;

    let given = |change: fn(&mut NicSpec)| {
        let mut changed = nic("eth0", Attachment::Bridge("br0".into()));
        change(&mut changed);
        move |spec: &mut vmmd_api::v1::VmSpec| spec.nics = vec![changed]
    };
    let down = given(|nic| nic.link_down = true);
    let changed = daemon
        .change_fields("web", &["spec.nics[eth0].link_down"], down)
        .await;
    console.expect("nic eth0 link Some(false)").await;
    let state = status(&changed.unwrap()).clone();
    assert!(
        state.nics[0].link_down && state.pending_changes.is_empty(),
        "{state:?}"
    );

    let limited = given(|nic| {
        nic.receive_limit = Some(RateLimit {
            operations_per_second: 1000,
            ..RateLimit::default()
        });
    });
    let path = "spec.nics[eth0].receive_limit";
    let changed = daemon.change_fields("web", &[path], limited).await.unwrap();
    console.expect("nic eth0 link None").await;
    assert_eq!(status(&changed).pending_changes, []);

    let more = given(|nic| nic.queues = 4);
    let changed = daemon
        .change_fields("web", &["spec.nics[eth0].queues"], more)
        .await
        .unwrap();
    let pending = &status(&changed).pending_changes;
    assert_eq!(
        pending
            .iter()
            .map(|change| change.path.as_str())
            .collect::<Vec<_>>(),
        ["spec.nics[eth0].queues"]
    );
}
