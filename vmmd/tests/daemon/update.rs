//! Changes of a VM's spec: changes to a running machine, changes that wait for a restart, and
//! refused changes.

mod disks;

use std::time::Duration;

use tonic::{Code, Status};
use vmmd_api::{
    v1::{
        self, ApplyMode, AttachmentPhase, ConditionStatus, DiskSpec, NicSpec, RateGroup, RateLimit, VmPhase,
        nic_spec,
    },
    well_known,
};

use crate::{
    attach::{disk, generations, names, phase},
    console::Client,
    harness::{Daemon, assert_refused, assert_says, generation, metadata_of, refusal, status, vm_pid},
    namespace::Namespace,
    verbs::{condition, fields},
};

fn milliseconds(milliseconds: i32) -> Option<well_known::Duration> {
    Some(well_known::Duration {
        seconds: 0,
        nanos: milliseconds * 1_000_000,
    })
}

pub fn request(vm: v1::Vm) -> v1::UpdateVmRequest {
    v1::UpdateVmRequest {
        vm: Some(vm),
        ..Default::default()
    }
}

/// A change of fields of a VM.
pub fn masked(name: &str, paths: &[&str], change: impl FnOnce(&mut v1::VmSpec)) -> v1::UpdateVmRequest {
    let mut spec = v1::VmSpec::default();
    change(&mut spec);
    let paths = paths.iter().map(|path| (*path).to_owned()).collect();
    v1::UpdateVmRequest {
        vm: Some(v1::Vm {
            metadata: metadata_of(name),
            spec: Some(spec),
            ..Default::default()
        }),
        update_mask: Some(well_known::FieldMask { paths }),
        ..Default::default()
    }
}

impl Daemon {
    async fn update(&self, request: v1::UpdateVmRequest) -> Result<v1::Vm, Status> {
        Ok(self.client().update_vm(request).await?.into_inner().vm.unwrap())
    }

    /// Changes the manifest of a VM.
    pub async fn change(&self, name: &str, change: impl FnOnce(&mut v1::VmSpec)) -> Result<v1::Vm, Status> {
        let there = self.get(name).await?;
        self.update(request(self.with_change(there, change))).await
    }

    /// Changes fields of a VM by a mask; `change` gives the new values.
    pub async fn change_fields(
        &self,
        name: &str,
        paths: &[&str],
        change: impl FnOnce(&mut v1::VmSpec),
    ) -> Result<v1::Vm, Status> {
        self.update(masked(name, paths, change)).await
    }

    pub async fn changed(&self, name: &str, change: impl FnOnce(&mut v1::VmSpec)) -> v1::Vm {
        self.with_change(self.get(name).await.unwrap(), change)
    }

    fn with_change(&self, there: v1::Vm, change: impl FnOnce(&mut v1::VmSpec)) -> v1::Vm {
        let metadata = there.metadata.unwrap();
        let mut vm = self.manifest(&metadata.name, "");
        vm.metadata.as_mut().unwrap().labels = metadata.labels;
        vm.spec = there.spec;
        change(vm.spec.as_mut().unwrap());
        vm
    }

    /// Configuration of the mock's machine.
    async fn machine(&self, name: &str) -> String {
        let mut console = Client::open(self, name).await;
        console.type_in("machine\n").await;
        let seen = console.expect(" nics=").await;
        let seen = if seen.ends_with('\n') {
            seen
        } else {
            seen + &console.expect("\n").await
        };
        let line = seen.lines().find(|line| line.starts_with("vcpus=")).unwrap();
        line.to_owned()
    }

    async fn limit_of(&self, vm: &str, disk: &str) -> u64 {
        let stats = self.stats(vm).await.unwrap();
        stats.iter().find(|stats| stats.name == disk).unwrap().throttled
    }
}

pub fn limit(bytes_per_second: u64) -> RateLimit {
    RateLimit {
        bytes_per_second,
        ..Default::default()
    }
}

fn cores(spec: &mut v1::VmSpec, cores: u32) {
    spec.cpu.get_or_insert_default().cores = cores;
}

/// Pending changes, as `path: current -> desired`.
fn pending(vm: &v1::Vm) -> Vec<String> {
    let changes = status(vm).pending_changes.iter();
    changes
        .map(|change| {
            let v1::PendingChange {
                path,
                current,
                desired,
                ..
            } = change;
            let text = |value: &Option<well_known::Value>| {
                let json = value.as_ref().map(|value| serde_json::to_string(value).unwrap());
                json.unwrap_or_default().trim_end_matches(".0").to_owned()
            };
            format!("{path}: {} -> {}", text(current), text(desired))
        })
        .collect()
}

fn restart_required(vm: &v1::Vm) -> bool {
    let condition = condition(status(vm), "RestartRequired");
    assert!(condition.transition_time.is_some());
    condition.status() == ConditionStatus::True
}

async fn running_with_disk(daemon: &Daemon, options: &str) -> v1::Vm {
    let mut vm = daemon.manifest("web", options);
    let spec = vm.spec.as_mut().unwrap();
    spec.rate_groups = vec![RateGroup {
        name: "slow".into(),
        limit: Some(limit(1 << 20)),
    }];
    let grouped = DiskSpec {
        rate_group: "slow".into(),
        ..disk(daemon, "grouped")
    };
    spec.disks = vec![disk(daemon, "root"), grouped];
    daemon.run_vm(vm).await;
    let known = |status: &v1::VmStatus| status.disks.iter().all(|disk| disk.capacity_bytes == Some(4096));
    daemon.wait("web", known).await;
    daemon.get("web").await.unwrap()
}

#[tokio::test]
async fn limits_labels_and_the_run_policy_change_at_once() {
    let daemon = Daemon::start().await;
    running_with_disk(&daemon, "").await;
    let mut vm = daemon
        .changed("web", |spec| {
            spec.disks[0].rate_limit = Some(limit(5000));
            spec.rate_groups[0].limit = Some(limit(6000));
            spec.set_run_policy(v1::RunPolicy::Manual);
        })
        .await;
    let labels = &mut vm.metadata.as_mut().unwrap().labels;
    labels.insert("tier".into(), "front".into());
    let changed = daemon.update(request(vm.clone())).await.unwrap();
    assert_eq!(pending(&changed), [""; 0]);
    assert!(!restart_required(&changed));
    assert_eq!(generations(&changed), (2, 2));
    assert_eq!(changed.metadata.as_ref().unwrap().labels["tier"], "front");
    assert_eq!(daemon.limit_of("web", "root").await, 5000);
    assert_eq!(daemon.limit_of("web", "grouped").await, 6000);
    // The same again changes nothing.
    let again = daemon.update(request(vm)).await.unwrap();
    assert_eq!((generations(&again), again.spec), ((2, 2), changed.spec));
}

#[tokio::test]
async fn cores_wait_for_a_restart_and_outlive_the_daemon() {
    let mut daemon = Daemon::start().await;
    let started = daemon.run("web", "").await;
    let changed = daemon.change("web", |spec| cores(spec, 4)).await.unwrap();
    let expected = ["spec.cpu.cores: 1 -> 4"];
    assert_eq!(pending(&changed), expected);
    assert!(restart_required(&changed));
    assert_eq!(generations(&changed), (2, 1));
    daemon.kill_and_restart().await;
    let found = daemon.get("web").await.unwrap();
    assert_eq!(pending(&found), expected);
    assert!(restart_required(&found));
    assert_eq!((generations(&found), vm_pid(&found)), ((2, 1), vm_pid(&started)));
    assert!(daemon.machine("web").await.starts_with("vcpus=1 "));
    daemon.stop("web", None).await.unwrap();
    let stopped = daemon.get("web").await.unwrap();
    assert_eq!((pending(&stopped).len(), restart_required(&stopped)), (0, false));
    let restarted = daemon.start_vm("web").await.unwrap();
    assert_eq!(
        (pending(&restarted).len(), restart_required(&restarted)),
        (0, false)
    );
    assert_eq!(generations(&restarted), (2, 2));
    assert!(daemon.machine("web").await.starts_with("vcpus=4 "));
}

#[tokio::test]
async fn what_is_changed_back_needs_no_restart() {
    let daemon = Daemon::start().await;
    daemon.run("web", "").await;
    daemon.change("web", |spec| cores(spec, 4)).await.unwrap();
    let back = daemon.change("web", |spec| cores(spec, 1)).await.unwrap();
    assert_eq!((pending(&back).len(), restart_required(&back)), (0, false));
    assert_eq!(generations(&back), (3, 3));
}

#[tokio::test]
async fn update_with_restart_is_answered_by_the_new_machine() {
    let daemon = Daemon::start().await;
    let before = running_with_disk(&daemon, "").await;
    let restart = |vm| v1::UpdateVmRequest {
        apply: ApplyMode::Restart.into(),
        ..request(vm)
    };
    // No change is left that needs a restart.
    let live = daemon
        .changed("web", |spec| spec.disks[0].rate_limit = Some(limit(5000)))
        .await;
    let same = daemon.update(restart(live)).await.unwrap();
    assert_eq!(vm_pid(&same), vm_pid(&before));
    let both = daemon
        .changed("web", |spec| {
            cores(spec, 2);
            spec.disks[0].rate_limit = Some(limit(6000));
        })
        .await;
    let changed = daemon.update(restart(both)).await.unwrap();
    assert_ne!(vm_pid(&changed), vm_pid(&before));
    assert_eq!((pending(&changed).len(), generations(&changed)), (0, (3, 3)));
    assert_eq!(status(&changed).phase(), VmPhase::Running);
    assert!(daemon.machine("web").await.starts_with("vcpus=2 "));
    assert_eq!(daemon.limit_of("web", "root").await, 6000);
}

#[tokio::test]
async fn with_no_wait_the_answer_comes_when_the_restart_has_begun() {
    let daemon = Daemon::start().await;
    daemon.run("web", "mock.power=ignore").await;
    let vm = daemon.changed("web", |spec| cores(spec, 2)).await;
    let asked = v1::UpdateVmRequest {
        apply: ApplyMode::Restart.into(),
        grace_period: Some(well_known::Duration {
            seconds: 3600,
            nanos: 0,
        }),
        no_wait: true,
        ..request(vm)
    };
    let answered = daemon.client().update_vm(asked).await.unwrap().into_inner();
    let operation = answered.operation.unwrap();
    assert_eq!(operation.r#type, "vm.restart");
    assert_eq!(status(&answered.vm.unwrap()).phase(), VmPhase::Stopping);
    daemon.kill_vm("web").await.unwrap();
}

#[tokio::test]
async fn a_run_policy_has_its_effect_when_it_is_set() {
    let daemon = Daemon::start().await;
    daemon.run("web", "").await;
    daemon
        .change("web", |spec| spec.set_run_policy(v1::RunPolicy::AlwaysOff))
        .await
        .unwrap();
    daemon.wait_phase("web", VmPhase::Stopped).await;
    let refused = daemon.start_vm("web").await.unwrap_err();
    assert_refused(&refused, Code::FailedPrecondition, "RUN_POLICY");
}

#[tokio::test]
async fn a_dry_run_says_what_would_wait_and_changes_nothing() {
    let daemon = Daemon::start().await;
    running_with_disk(&daemon, "").await;
    let before = daemon.get("web").await.unwrap();
    let vm = daemon
        .changed("web", |spec| {
            cores(spec, 4);
            spec.disks[0].rate_limit = Some(limit(5000));
            spec.disks.push(disk(&daemon, "more"));
        })
        .await;
    let dry = |vm| v1::UpdateVmRequest {
        apply: ApplyMode::DryRun.into(),
        ..request(vm)
    };
    let would_be = daemon.update(dry(vm.clone())).await.unwrap();
    assert_eq!(pending(&would_be), ["spec.cpu.cores: 1 -> 4"]);
    assert!(restart_required(&would_be));
    assert_eq!(generations(&would_be), (2, 1));
    assert_eq!(names(&would_be), ["root", "grouped", "more"]);
    assert_eq!(daemon.get("web").await.unwrap(), before);
    assert_eq!(daemon.limit_of("web", "root").await, 0);
    assert_eq!(daemon.plugged("web").await, ["root", "grouped"]);
    // A dry run refuses the same changes as an update, and checks files too.
    let missing = daemon
        .changed("web", |spec| {
            spec.disks.push(DiskSpec {
                source: Some(v1::disk_spec::Source::Path("/nowhere.raw".into())),
                ..disk(&daemon, "none")
            });
        })
        .await;
    let refused = daemon.update(dry(missing)).await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition, "{refused:?}");
}

#[tokio::test]
async fn wrong_generation_is_refused_with_both_generations() {
    let daemon = Daemon::start().await;
    daemon.run("web", "").await;
    daemon.change("web", |spec| cores(spec, 2)).await.unwrap();
    let mut vm = daemon.changed("web", |spec| cores(spec, 4)).await;
    let of_request = v1::UpdateVmRequest {
        preconditions: generation(1),
        ..request(vm.clone())
    };
    vm.metadata.as_mut().unwrap().generation = 3;
    for (asked, other) in [(of_request, "not 1"), (request(vm.clone()), "not 3")] {
        let refused = daemon.update(asked).await.unwrap_err();
        assert_refused(&refused, Code::Aborted, "GENERATION_MISMATCH");
        assert_says(&refused, "generation 2");
        assert_says(&refused, other);
    }
    vm.metadata.as_mut().unwrap().generation = 2;
    let changed = daemon.update(request(vm)).await.unwrap();
    assert_eq!(generations(&changed), (3, 1));
}

#[tokio::test]
async fn of_two_updates_at_once_one_wins() {
    let daemon = Daemon::start().await;
    daemon.run("web", "").await;
    let with = |cores_: u32, preconditions| {
        let daemon = &daemon;
        async move {
            let vm = daemon.changed("web", |spec| cores(spec, cores_)).await;
            let asked = v1::UpdateVmRequest {
                preconditions,
                ..request(vm)
            };
            daemon.update(asked).await
        }
    };
    let results: [_; 2] = tokio::join!(with(2, generation(1)), with(4, generation(1))).into();
    let refused: Vec<_> = results
        .iter()
        .filter_map(|result| result.as_ref().err())
        .collect();
    assert_eq!(refused.len(), 1, "{results:?}");
    assert_eq!(refusal(refused[0]), (Code::Aborted, "GENERATION_MISMATCH".into()));
    // Without generations both are carried out, one after the other.
    let results = tokio::join!(with(6, None), with(8, None));
    assert!(results.0.is_ok() && results.1.is_ok());
    assert_eq!(generations(&daemon.get("web").await.unwrap()), (4, 1));
}

#[tokio::test]
async fn everything_that_is_wrong_is_said_at_once_and_nothing_changes() {
    let daemon = Daemon::start().await;
    running_with_disk(&daemon, "").await;
    let before = daemon.get("web").await.unwrap();
    let mut vm = daemon
        .changed("web", |spec| {
            cores(spec, 0);
            spec.memory.as_mut().unwrap().size_bytes = 1;
            spec.disks[0].source = Some(v1::disk_spec::Source::Path("relative".into()));
        })
        .await;
    vm.status = Some(v1::VmStatus::default());
    let asked = v1::UpdateVmRequest {
        apply: 9,
        ..request(vm)
    };
    let refused = daemon.update(asked).await.unwrap_err();
    let expected = [
        "apply",
        "status",
        "spec.cpu.cores",
        "spec.memory.sizeBytes",
        "spec.disks[0].path",
    ];
    assert_eq!(fields(&refused), expected);
    // The name says which VM; the uid that it is the one that was meant.
    daemon.create(daemon.manifest("db", "")).await.unwrap();
    let mut renamed = daemon.changed("web", |_| {}).await;
    let metadata = renamed.metadata.as_mut().unwrap();
    metadata.uid = before.metadata.as_ref().unwrap().uid.clone();
    metadata.name = "db".into();
    let refused = daemon.update(request(renamed.clone())).await.unwrap_err();
    assert_refused(&refused, Code::Aborted, "UID_MISMATCH");
    renamed.metadata.as_mut().unwrap().name = "none".into();
    let refused = daemon.update(request(renamed)).await.unwrap_err();
    assert_refused(&refused, Code::NotFound, "VM_NOT_FOUND");
    let greedy = daemon
        .changed("web", |spec| {
            spec.memory.as_mut().unwrap().size_bytes = 16 << 30;
            spec.disks.push(DiskSpec {
                source: Some(v1::disk_spec::Source::Disk("none".into())),
                ..disk(&daemon, "x")
            });
        })
        .await;
    let refused = daemon.update(request(greedy)).await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition);
    assert_eq!(daemon.get("web").await.unwrap(), before);
}

#[tokio::test]
async fn a_stopped_vm_is_changed_for_its_next_start() {
    let daemon = Daemon::start().await;
    daemon.create(daemon.manifest("web", "")).await.unwrap();
    let changed = daemon
        .change("web", |spec| {
            cores(spec, 2);
            spec.disks.push(disk(&daemon, "data"));
        })
        .await
        .unwrap();
    assert_eq!((pending(&changed).len(), generations(&changed)), (0, (2, 0)));
    assert_eq!(phase(status(&changed), "data"), Some(AttachmentPhase::Pending));
    daemon.start_vm("web").await.unwrap();
    assert!(daemon.machine("web").await.starts_with("vcpus=2 "));
    assert_eq!(daemon.plugged("web").await, ["data"]);
}

#[tokio::test]
async fn a_vm_on_its_way_down_is_changed_and_one_on_its_way_up_is_not() {
    let daemon = Daemon::start().await;
    daemon.run("down", "mock.power=ignore").await;
    let (stopped, changed) = tokio::join!(daemon.stop("down", Some(Duration::from_secs(3600))), async {
        daemon.wait_phase("down", VmPhase::Stopping).await;
        let changed = daemon.change("down", |spec| cores(spec, 2)).await;
        daemon.kill_vm("down").await.unwrap();
        changed
    });
    stopped.unwrap();
    assert_eq!(generations(&changed.unwrap()), (2, 1));
    daemon.start_vm("down").await.unwrap();
    assert!(daemon.machine("down").await.starts_with("vcpus=2 "));

    daemon.define("up", "mock.boot=hang").await;
    let (started, refused) = tokio::join!(daemon.start_vm("up"), async {
        daemon.wait_phase("up", VmPhase::Starting).await;
        let refused = daemon.change("up", |spec| cores(spec, 2)).await;
        daemon.kill_vm("up").await.unwrap();
        refused
    });
    started.unwrap_err();
    let refused = refusal(&refused.unwrap_err());
    assert_eq!(refused, (Code::FailedPrecondition, "BUSY".into()));
}

#[tokio::test]
async fn hardware_addresses_never_move() {
    let network = Namespace::new();
    network.ip("link add none0 type bridge");
    let daemon = Daemon::in_network(&network.0).await;
    let nic = |name: &str| NicSpec {
        name: name.into(),
        attachment: Some(nic_spec::Attachment::Bridge("none0".into())),
        ..Default::default()
    };
    let vm = daemon.manifest_with("web", "", |spec| spec.nics = vec![nic("a"), nic("b")]);
    daemon.create(vm).await.unwrap();
    let macs = |vm: &v1::Vm| -> Vec<_> {
        let nics = status(vm).nics.iter();
        nics.map(|nic| (nic.name.clone(), nic.mac.clone())).collect()
    };
    let before = macs(&daemon.get("web").await.unwrap());
    let changed = daemon
        .change("web", |spec| spec.nics = vec![nic("c"), nic("b")])
        .await
        .unwrap();
    let after = macs(&changed);
    assert_eq!((after[1].clone(), after.len()), (before[1].clone(), 2));
    assert_ne!(after[0].1, before[1].1);
    // The MAC that a VM has anyway is no change.
    let said = daemon
        .change("web", |spec| spec.nics[1].mac = before[1].1.to_uppercase())
        .await
        .unwrap();
    assert_eq!(generations(&said), (2, 0));
}

#[tokio::test]
async fn by_a_mask_only_the_fields_that_it_names_are_changed() {
    let daemon = Daemon::start().await;
    let before = running_with_disk(&daemon, "").await;
    let change = |spec: &mut v1::VmSpec| cores(spec, 3);
    let vm = daemon
        .change_fields("web", &["spec.cpu.cores"], change)
        .await
        .unwrap();
    let mut expected = before.spec.clone().unwrap();
    cores(&mut expected, 3);
    assert_eq!(vm.spec, Some(expected));
    assert_eq!(
        vm.metadata.as_ref().unwrap().labels,
        before.metadata.unwrap().labels
    );
    assert_eq!(pending(&vm).len(), 1, "{vm:?}");

    // Two at once, of what neither has seen of the other.
    let one = |label: &str| {
        let mut request = masked("web", &[&format!("metadata.labels[{label}]")], |_| {});
        let metadata = request.vm.as_mut().unwrap().metadata.as_mut().unwrap();
        metadata.labels.insert(label.to_owned(), "here".into());
        daemon.update(request)
    };
    let (first, second) = tokio::join!(one("first"), one("second"));
    assert!(first.is_ok() && second.is_ok());
    let labels = daemon.get("web").await.unwrap().metadata.unwrap().labels;
    assert!(
        labels.contains_key("first") && labels.contains_key("second"),
        "{labels:?}"
    );

    // A disk leaves the spec and the machine.
    let disk = vm.spec.unwrap().disks[0].name.clone();
    let vm = daemon
        .change_fields("web", &[&format!("spec.disks[{disk}]")], |_| {})
        .await
        .unwrap();
    let left = vm.spec.unwrap().disks;
    assert!(left.iter().all(|other| other.name != disk), "{left:?}");

    let dry = v1::UpdateVmRequest {
        apply: ApplyMode::DryRun.into(),
        ..masked("web", &["spec.cpu.cores"], |spec| cores(spec, 4))
    };
    assert_eq!(
        daemon.update(dry).await.unwrap().spec.unwrap().cpu.unwrap().cores,
        4
    );
    assert_eq!(
        daemon.get("web").await.unwrap().spec.unwrap().cpu.unwrap().cores,
        3
    );
}

#[tokio::test]
async fn invalid_mask_or_resulting_spec_is_refused() {
    let daemon = Daemon::start().await;
    let there = daemon.create(daemon.manifest("web", "")).await.unwrap();
    for (paths, field) in [
        (&["spec.nothing", "metadata.name"][..], "updateMask.paths[1]"),
        (&[], "updateMask"),
        (&["spec.boot"], "spec.boot"),
        (&["spec.cpu.cores"], "spec.cpu.cores"),
    ] {
        let refused = daemon.change_fields("web", paths, |_| {}).await.unwrap_err();
        assert_eq!(
            refusal(&refused),
            (Code::InvalidArgument, "INVALID_FIELDS".into()),
            "{paths:?}"
        );
        assert_says(&refused, field);
    }
    let mut request = masked("web", &["spec.cpu.cores"], |spec| cores(spec, 2));
    let metadata = request.vm.as_mut().unwrap().metadata.as_mut().unwrap();
    metadata.generation = generations(&there).0 + 1;
    let refused = daemon.update(request).await.unwrap_err();
    assert_refused(&refused, Code::Aborted, "GENERATION_MISMATCH");
    assert_eq!(daemon.get("web").await.unwrap().spec, there.spec);
}

#[tokio::test]
async fn change_that_the_next_start_refuses_is_not_stored() {
    let daemon = Daemon::start().await;
    daemon.create(daemon.manifest("down", "")).await.unwrap();
    daemon.run("up", "").await;
    let nic = |attachment| NicSpec {
        name: "eth0".into(),
        attachment: Some(attachment),
        ..Default::default()
    };
    let missing = || DiskSpec {
        source: Some(v1::disk_spec::Source::Path("/nowhere.raw".into())),
        ..disk(&daemon, "none")
    };
    for name in ["down", "up"] {
        let before = daemon.get(name).await.unwrap();
        let refused = [
            ("BRIDGE_NOT_FOUND", {
                let added = nic(nic_spec::Attachment::Bridge("nowhere0".into()));
                daemon.change(name, |spec| spec.nics.push(added)).await
            }),
            ("NETWORK_NOT_FOUND", {
                let added = nic(nic_spec::Attachment::Network("nowhere".into()));
                daemon.change(name, |spec| spec.nics.push(added)).await
            }),
            ("TAP_NOT_FOUND", {
                let added = nic(nic_spec::Attachment::Tap("nowhere0".into()));
                daemon.change(name, |spec| spec.nics.push(added)).await
            }),
            ("HOST_CPUS_UNAVAILABLE", {
                let change = |spec: &mut v1::VmSpec| {
                    spec.cpu.get_or_insert_default().host_cpus = "8191".into();
                };
                daemon.change(name, change).await
            }),
            (
                "DISK_NOT_FOUND",
                daemon.change(name, |spec| spec.disks.push(missing())).await,
            ),
        ];
        for (reason, result) in refused {
            let refused = result.unwrap_err();
            assert_eq!(
                refusal(&refused),
                (Code::FailedPrecondition, reason.into()),
                "{name}: {refused}"
            );
        }
        assert_eq!(daemon.get(name).await.unwrap(), before);
    }
}

#[tokio::test]
async fn new_vm_that_can_never_start_here_is_not_created() {
    let daemon = Daemon::start().await;
    let with_nic = |name: &str, attachment| {
        daemon.manifest_with(name, "", |spec| {
            spec.nics.push(NicSpec {
                name: "eth0".into(),
                attachment: Some(attachment),
                ..Default::default()
            });
        })
    };
    let mut placed = daemon.manifest("placed", "");
    placed
        .spec
        .as_mut()
        .unwrap()
        .cpu
        .get_or_insert_default()
        .host_cpus = "8191".into();
    for (reason, vm) in [
        (
            "BRIDGE_NOT_FOUND",
            with_nic("bridge", nic_spec::Attachment::Bridge("nowhere0".into())),
        ),
        (
            "NOT_A_BRIDGE",
            with_nic("loopback", nic_spec::Attachment::Bridge("lo".into())),
        ),
        (
            "NETWORK_NOT_FOUND",
            with_nic("network", nic_spec::Attachment::Network("nowhere".into())),
        ),
        (
            "TAP_NOT_FOUND",
            with_nic("tap", nic_spec::Attachment::Tap("nowhere0".into())),
        ),
        ("HOST_CPUS_UNAVAILABLE", placed),
    ] {
        let refused = daemon.create(vm).await.unwrap_err();
        assert_refused(&refused, Code::FailedPrecondition, reason);
    }
    // Its files may come before its start.
    let vm = daemon.manifest_with("web", "", |spec| {
        spec.disks.push(DiskSpec {
            source: Some(v1::disk_spec::Source::Path("/nowhere.raw".into())),
            ..disk(&daemon, "none")
        });
    });
    daemon.create(vm).await.unwrap();
    assert_eq!(daemon.list().await.len(), 1);
}
