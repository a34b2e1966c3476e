use rstest::rstest;
use vmmd_api::{v1, well_known::Timestamp};

use super::*;

const NOW: i64 = 1_800_000_000;

fn now() -> jiff::Timestamp {
    jiff::Timestamp::from_second(NOW).unwrap()
}

fn ago(seconds: i64) -> Option<Timestamp> {
    Some(Timestamp {
        seconds: NOW - seconds,
        nanos: 0,
    })
}

#[rstest]
#[case(-5, "0s")]
#[case(0, "0s")]
#[case(119, "119s")]
#[case(120, "2m")]
#[case(192, "3m12s")]
#[case(600, "10m")]
#[case(3 * 3600, "3h")]
#[case(5 * 3600 + 1200, "5h20m")]
#[case(31 * 3600, "31h")]
#[case(4 * 86400 + 6 * 3600, "4d6h")]
#[case(90 * 86400, "90d")]
#[case(3 * 365 * 86400 + 41 * 86400, "3y41d")]
fn an_age_has_two_units_at_most(#[case] seconds: i64, #[case] text: &str) {
    assert_eq!(age::since(ago(seconds).as_ref(), now()), text);
}

#[test]
fn an_age_that_is_not_known_is_a_dash() {
    assert_eq!(age::since(None, now()), "-");
    assert_eq!(
        age::since(
            Some(&Timestamp {
                seconds: i64::MAX,
                nanos: 0
            }),
            now()
        ),
        "-"
    );
    assert_eq!(age::exact(ago(0).as_ref()), "2027-01-15T08:00:00Z");
}

fn disks() -> Vec<v1::DiskSpec> {
    let root = v1::DiskSpec {
        name: "root".into(),
        source: Some(v1::disk_spec::Source::Path("/srv/root.raw".into())),
        format: v1::DiskFormat::Raw.into(),
        rate_limit: Some(v1::RateLimit {
            bytes_per_second: 100 << 20,
            operations_per_second: 500,
            ..v1::RateLimit::default()
        }),
        ..v1::DiskSpec::default()
    };
    let data = v1::DiskSpec {
        name: "data".into(),
        source: Some(v1::disk_spec::Source::Disk("data".into())),
        format: v1::DiskFormat::Qcow2.into(),
        read_only: true,
        serial: "S1".into(),
        cache: v1::DiskCache::None.into(),
        queues: 4,
        logical_block_bytes: 4096,
        on_error: v1::DiskErrorPolicy::Pause.into(),
        rate_group: "shared".into(),
        ..v1::DiskSpec::default()
    };
    let cd = v1::DiskSpec {
        name: "cd".into(),
        source: Some(v1::disk_spec::Source::Path("/srv/a.iso".into())),
        format: v1::DiskFormat::Iso.into(),
        ..v1::DiskSpec::default()
    };
    vec![root, data, cd]
}

fn disk_status() -> Vec<v1::DiskStatus> {
    let status = |name: &str, phase: v1::AttachmentPhase| v1::DiskStatus {
        name: name.into(),
        phase: phase.into(),
        path: format!("/srv/{name}.raw"),
        ..v1::DiskStatus::default()
    };
    vec![
        v1::DiskStatus {
            capacity_bytes: Some(1 << 30),
            pci_slot: Some(4),
            ..status("root", v1::AttachmentPhase::Attached)
        },
        v1::DiskStatus {
            path: "/var/lib/vmmd/disks/data".into(),
            message: "the guest did not let go of it".into(),
            ..status("data", v1::AttachmentPhase::Detaching)
        },
        // It is out of the spec already.
        status("going", v1::AttachmentPhase::Detaching),
    ]
}

fn web() -> v1::Vm {
    v1::Vm {
        metadata: Some(v1::ObjectMetadata {
            name: "web".into(),
            uid: "7b5ba9f5-6ad1-4d56-8e35-6bd3ba9d1ef8".into(),
            generation: 1,
            labels: [("tier".to_owned(), "front".to_owned())].into(),
            create_time: ago(4000),
            ..Default::default()
        }),
        spec: Some(v1::VmSpec {
            cpu: Some(v1::CpuSpec {
                cores: 2,
                ..Default::default()
            }),
            memory: Some(v1::MemorySpec {
                size_bytes: 256 << 20,
                backing: 2,
                ..Default::default()
            }),
            boot: Some(v1::BootSpec {
                source: Some(v1::boot_spec::Source::Linux(v1::LinuxBoot {
                    kernel: "/boot/vmlinuz".into(),
                    initrd: String::new(),
                    cmdline: "console=ttyS0".into(),
                })),
            }),
            disks: disks(),
            rate_groups: vec![v1::RateGroup {
                name: "shared".into(),
                limit: Some(v1::RateLimit {
                    bytes_per_second: 1 << 30,
                    burst_bytes: 2 << 30,
                    burst_operations: 50,
                    ..v1::RateLimit::default()
                }),
            }],
            nics: vec![v1::NicSpec {
                name: "eth0".into(),
                attachment: Some(v1::nic_spec::Attachment::Network("lan".into())),
                mac: "52:54:00:12:34:56".into(),
                ..v1::NicSpec::default()
            }],
            ..Default::default()
        }),
        status: Some(v1::VmStatus {
            disks: disk_status(),
            phase: v1::VmPhase::Running.into(),
            reason: "GuestRunning".into(),
            instance: Some(v1::InstanceStatus {
                pid: 4711,
                uid: 990_001,
                start_time: ago(60),
                vmm_version: "0.1.0".into(),
                ..v1::InstanceStatus::default()
            }),
            last_exit: Some(v1::ExitStatus {
                reason: v1::ExitReason::GuestPanic.into(),
                message: "the guest's kernel\u{1b}[31m panicked".into(),
                time: ago(70),
            }),
            conditions: vec![v1::Condition {
                r#type: "Ready".into(),
                status: v1::ConditionStatus::True.into(),
                reason: "Running".into(),
                transition_time: ago(60),
                ..v1::Condition::default()
            }],
            nics: vec![v1::NicStatus {
                name: "eth0".into(),
                mac: "52:54:00:12:34:56".into(),
                tap: "vmtap3".into(),
                bridge: "vmb0c5a7e21d4".into(),
                addresses: vec!["10.80.0.2".into()],
                ..v1::NicStatus::default()
            }],
            ..v1::VmStatus::default()
        }),
    }
}

#[test]
fn a_table_has_one_line_per_vm_and_aligned_columns() {
    let empty = v1::Vm {
        metadata: Some(v1::ObjectMetadata {
            name: "a-much-longer-name".into(),
            ..v1::ObjectMetadata::default()
        }),
        ..v1::Vm::default()
    };
    let rows = [web().row(true, now()), empty.row(true, now())];
    insta::assert_snapshot!(table::<v1::Vm>(true).whole(&rows, true), @r#"
NAME                 PHASE     CPUS   MEMORY   ADDRESS     UPTIME   AGE   PID    DISKS          NICS               LABELS       REASON
web                  Running   2      256Mi    10.80.0.2   60s      66m   4711   root,data,cd   eth0=network:lan   tier=front   GuestRunning
a-much-longer-name   Unknown   0      0        -           -        -     -      -              -                  -            -
"#);
}

#[test]
fn description_is_complete_without_control_characters() {
    insta::assert_snapshot!(describe::vm(&web(), now()), @r#"
Name:            web
UID:             7b5ba9f5-6ad1-4d56-8e35-6bd3ba9d1ef8
Labels:          tier=front
Created:         2027-01-15T06:53:20Z (66m ago)
Generation:      1
Phase:           Running
Reason:          GuestRunning
Run policy:      AlwaysOnUnlessStopped
Instance:
  PID:           4711
  User:          990001
  Started:       2027-01-15T07:59:00Z (60s ago)
  Guest resets:  0
  vmm version:   0.1.0
Last exit:
  Reason:        GuestPanic
  Message:       the guest's kernel�[31m panicked
  Time:          2027-01-15T07:58:50Z (70s ago)
CPUs:            2
Memory:          256Mi (268435456 bytes, shared)
Boot:
  Kernel:        /boot/vmlinuz
  Command line:  console=ttyS0
Disks:
  NAME    PHASE       FORMAT   MODE   CAPACITY   SLOT   SERIAL   SOURCE
  root    Attached    raw      rw     1Gi        4      -        /srv/root.raw
  data    Detaching   qcow2    ro     -          -      S1       disk data (/var/lib/vmmd/disks/data)
  cd      -           iso      ro     -          -      -        /srv/a.iso
  going   Detaching   -        rw     -          -      -        /srv/going.raw
Disk options:
  NAME   OPTIONS                                              LIMIT
  root   -                                                    100Mi/s, 500 requests/s
  data   cache=none,queues=4,block-size=4096,on-error=pause   group shared
Disk problems:
  NAME   MESSAGE
  data   the guest did not let go of it
Rate groups:
  NAME     LIMIT                                 DISKS
  shared   1Gi/s, burst 2Gi, burst 50 requests   data
NICs:
  NAME   ATTACHED TO   MAC                 ADDRESS     TAP
  eth0   network:lan   52:54:00:12:34:56   10.80.0.2   vmtap3
Conditions:
  TYPE    STATUS   REASON    AGE   MESSAGE
  Ready   True     Running   60s   -
"#);
}

#[test]
fn a_vm_without_anything_can_be_described() {
    insta::assert_snapshot!(describe::vm(&v1::Vm::default(), now()), @r#"
Generation:      0
Phase:           Unknown
Run policy:      AlwaysOnUnlessStopped
CPUs:            0
Memory:          0 (0 bytes)
Disks:           none
NICs:            none
Conditions:      none
"#);
}

#[test]
fn a_node_is_described_with_its_conditions() {
    let status = v1::NodeStatus {
        version: "0.1.0".into(),
        kernel_version: "6.12.1".into(),
        cpu_model: "EPYC".into(),
        cpus: 16,
        memory_bytes: 64 << 30,
        memory_available_bytes: 60 << 30,
        memory_committed_bytes: 1 << 29,
        vms: 2,
        vms_running: 1,
        conditions: vec![v1::Condition {
            r#type: "KvmAvailable".into(),
            status: v1::ConditionStatus::False.into(),
            reason: "NoDevice".into(),
            message: "there is no /dev/kvm: load the module kvm_intel or kvm_amd".into(),
            transition_time: ago(5),
        }],
        ..Default::default()
    };
    let metadata = v1::ObjectMetadata {
        name: "node-1".into(),
        ..Default::default()
    };
    let node = v1::Node {
        metadata: Some(metadata),
        spec: None,
        status: Some(status),
    };
    insta::assert_snapshot!(super::node::node(&node, now()), @r#"
Name:            node-1
vmmd:            0.1.0
Kernel:          6.12.1
CPU:             EPYC
CPUs:            16
Memory:          64Gi
  available:     60Gi
  committed:     512Mi
VMs:             2 (1 running)
Conditions:
  TYPE           STATUS   REASON     AGE   MESSAGE
  KvmAvailable   False    NoDevice   5s    there is no /dev/kvm: load the module kvm_intel or kvm_amd
"#);
}

#[test]
fn rows_that_come_later_are_padded_to_the_columns_of_the_first() {
    let mut table = table::Table::new(vec!["NAME", "PHASE"]);
    let first = table.whole(&[vec!["long-name".into(), "Running".into()]], true);
    let later = table.row(&["a".into(), String::new()]);
    assert_eq!(
        format!("{first}{later}"),
        "NAME        PHASE\nlong-name   Running\na           -"
    );
}

#[test]
fn what_a_run_policy_does_and_has_done_is_described() {
    let status = v1::VmStatus {
        operation: "op-1".into(),
        restart: Some(v1::RestartStatus {
            attempts: 3,
            next_start_time: ago(0),
            back_off: None,
        }),
        counts: Some(v1::RunCounts {
            starts: 4,
            automatic_starts: 3,
            guest_crashes: 4,
            guest_panics: 1,
            ..Default::default()
        }),
        ..Default::default()
    };
    let vm = v1::Vm {
        spec: Some(v1::VmSpec {
            run_policy: v1::RunPolicy::RerunOnFailure.into(),
            ..Default::default()
        }),
        status: Some(status),
        ..Default::default()
    };
    let text = describe::vm(&vm, now());
    for line in [
        "Operation:       op-1",
        "Run policy:      RerunOnFailure",
        "Restarts:        3 in a row",
        "Next start:      2027-",
        "Counts:          4 starts, 3 by the run policy, 1 panic, 4 crashes",
    ] {
        assert!(text.contains(line), "{line}: {text}");
    }
}

#[test]
fn an_operation_is_a_row() {
    let operation = v1::Operation {
        id: "op-1".into(),
        r#type: "vm.stop".into(),
        target: Some(v1::ObjectReference {
            kind: "Vm".into(),
            name: "web".into(),
            ..Default::default()
        }),
        phase: v1::OperationPhase::InProgress.into(),
        progress: Some(v1::OperationProgress {
            percent: 50,
            ..Default::default()
        }),
        create_time: ago(5),
        initiator: "uid 0".into(),
        message: "ending the vmm process".into(),
        ..Default::default()
    };
    let row = super::operation::row(&operation, now());
    let expected = [
        "op-1",
        "vm.stop",
        "vm/web",
        "InProgress",
        "50%",
        "5s",
        "uid 0",
        "ending the vmm process",
    ];
    assert_eq!(row, expected);
}

#[test]
fn running_values_stand_before_pending_ones() {
    let mut vm = web();
    let status = vm.status.as_mut().unwrap();
    let pending = |path: &str, current: serde_json::Value| v1::PendingChange {
        path: path.into(),
        current: serde_json::from_value(current).ok(),
        ..Default::default()
    };
    status.pending_changes = vec![
        pending("spec.cpu.cores", 1.into()),
        // 64-bit numbers are text in the canonical JSON form.
        pending("spec.memory.sizeBytes", (128_u64 << 20).to_string().into()),
    ];
    let row = vm.row(false, now());
    assert_eq!(row[2..4], ["1 -> 2", "128Mi -> 256Mi"]);
    let described = describe::vm(&vm, now());
    assert!(
        described.contains("Memory:          128Mi -> 256Mi ("),
        "{described}"
    );
}

#[test]
fn addresses_of_ipv6_are_in_the_wide_table() {
    let mut vm = web();
    let nics = &mut vm.status.as_mut().unwrap().nics;
    nics[0].addresses.push("fd00:80::2".into());
    assert_eq!(vm.row(false, now())[4], "10.80.0.2");
    assert_eq!(vm.row(true, now())[4], "10.80.0.2,fd00:80::2");
    vm.status.as_mut().unwrap().nics.clear();
    assert_eq!(vm.row(true, now())[4], "-");
}

#[test]
fn snapshot_of_disks_has_the_size_of_its_files() {
    let size = |size_bytes, allocated_bytes| {
        let status = v1::SnapshotStatus {
            size_bytes,
            allocated_bytes,
            ..Default::default()
        };
        let snapshot = v1::Snapshot {
            status: Some(status),
            ..Default::default()
        };
        snapshot.row(false, now())[3].clone()
    };
    assert_eq!(size(0, 245 << 20), "245Mi");
    assert_eq!(size(256 << 20, 100 << 20), "256Mi");
}
