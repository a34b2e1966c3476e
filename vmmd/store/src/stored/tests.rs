//! Tests that a store round trip is lossless, and that records of the first release keep their
//! meaning.

use prost::Message as _;
use vmmd_api::v1;

use super::*;
use crate::{InstanceRecord, VmRecord};

/// [`record`] in the first form of the separate stored types. The file must not change.
const GOLDEN: &[u8] = include_bytes!("golden/vm.bin");

/// One that has every field.
fn spec() -> v1::VmSpec {
    let json = serde_json::json!({
        "cpu": {"cores": 3, "coreFractionPercent": 40, "coreLimitPercent": 80, "hostCpus": "0-3"},
        "memory": {"sizeBytes": 1_u64 << 30, "backing": "MEMORY_BACKING_SHARED", "hugePages": "HUGE_PAGES_2M",
                   "prefault": true, "mergeable": true, "numaNode": 0},
        "boot": {"linux": {"kernel": "/k", "initrd": "/i", "cmdline": "c"}},
        "disks": [
            {"name": "a", "path": "/a", "format": "DISK_FORMAT_QCOW2", "readOnly": true, "serial": "S",
             "cache": "DISK_CACHE_NONE", "queues": 4, "logicalBlockBytes": 4096,
             "onError": "DISK_ERROR_POLICY_PAUSE",
             "rateLimit": {"bytesPerSecond": 1, "operationsPerSecond": 2, "burstBytes": 3, "burstOperations": 4}},
            {"name": "b", "disk": "kept", "rateGroup": "slow"},
        ],
        "nics": [{"name": "e", "bridge": "br0", "mac": "52:54:00:00:00:01"}, {"name": "f", "tap": "tap9"}],
        "rateGroups": [{"name": "slow", "limit": {"bytesPerSecond": 5}}],
        "runPolicy": "RUN_POLICY_MANUAL",
        "balloon": {"disabled": true, "freePageReporting": true, "targetBytes": 7},
        "onCrash": "CRASH_POLICY_STOP",
        "clock": {"onResume": "CLOCK_ON_RESUME_SYNC"},
    });
    serde_json::from_value(json).unwrap()
}

#[test]
fn a_spec_is_read_as_it_was_written() {
    let spec = v1::VmSpec {
        display: Some(v1::DisplaySpec {
            width: 800,
            height: 600,
            keyboard_layout: v1::KeyboardLayout::Dk.into(),
        }),
        virtio_console: Some(v1::VirtioConsoleSpec {}),
        guest_agent: Some(v1::GuestAgentSpec {}),
        tpm: Some(v1::TpmSpec {}),
        vsock: Some(v1::VsockSpec { cid: 7 }),
        channels: vec![v1::ChannelSpec {
            name: "com.example.0".into(),
        }],
        access_credentials: vec![v1::AccessCredential {
            name: "root".into(),
            ssh_authorized_keys: vec!["ssh-ed25519 A".into()],
            password_hash: "$6$a$b".into(),
            ..v1::AccessCredential::default()
        }],
        watchdog: Some(v1::WatchdogSpec { action: 3 }),
        probes: Some(v1::ProbesSpec {
            startup: Some(v1::Probe {
                check: Some(v1::probe::Check::Http(v1::HttpCheck {
                    port: 80,
                    path: "/".into(),
                    tls: true,
                    ..v1::HttpCheck::default()
                })),
                period_seconds: 7,
                ..v1::Probe::default()
            }),
            ..v1::ProbesSpec::default()
        }),
        shares: vec![v1::ShareSpec {
            name: "s".into(),
            path: "/srv/s".into(),
            mount: "/s".into(),
            ..v1::ShareSpec::default()
        }],
        state_dir: "/srv/job".into(),
        ..spec()
    };
    let bytes = VmSpec::from(spec.clone()).encode_to_vec();
    assert_eq!(v1::VmSpec::from(VmSpec::decode(bytes.as_slice()).unwrap()), spec);
}

/// Earlier releases wrote the API's messages; their stores are read without a migration.
#[test]
fn what_earlier_releases_wrote_means_the_same() {
    let bytes = spec().encode_to_vec();
    assert_eq!(VmSpec::decode(bytes.as_slice()).unwrap(), VmSpec::from(spec()));
    let metadata = v1::ObjectMetadata {
        name: "web".into(),
        uid: "u".into(),
        generation: 7,
        labels: [("a".to_owned(), "b".to_owned())].into(),
        create_time: vmmd_host::text::timestamp(1500),
        annotations: [("c".to_owned(), "d".to_owned())].into(),
        owner: "me".into(),
    };
    let stored = Metadata::decode(metadata.encode_to_vec().as_slice()).unwrap();
    assert_eq!(v1::ObjectMetadata::from(stored), metadata);
}

/// With a value for everything that is kept today.
fn record() -> VmRecord {
    VmRecord {
        uid: vec![1; 16],
        name: "web".into(),
        generation: 7,
        created_ms: 5,
        spec: Some(spec()),
        instance: Some(InstanceRecord {
            user: 9,
            spec: Some(spec()),
            attaching: vec!["a".into()],
            ..InstanceRecord::default()
        }),
        last_exit: Some(v1::ExitStatus {
            reason: v1::ExitReason::Lost.into(),
            message: "gone".into(),
            time: vmmd_host::text::timestamp(1500),
        }),
        counts: Some(v1::RunCounts {
            starts: 3,
            crash_resets: 2,
            ..v1::RunCounts::default()
        }),
        evacuated: true,
        made_run: 4,
        made_revision: 6,
        ..VmRecord::default()
    }
}

#[test]
fn a_record_means_what_it_has_meant_and_is_written_as_it_was() {
    assert_eq!(VmRecord::from(Vm::decode(GOLDEN).unwrap()), record());
    assert_eq!(Vm::from(record()).encode_to_vec(), GOLDEN);
}
