use vmm_protocol::vmm::{
    DeviceError, DiskDetached, DiskStatsReply, Ended, ExitKind, PauseReason, ShareStats, State, StateChanged,
};
use vmmd_api::v1;

use super::*;

fn disk(name: &str) -> DiskStats {
    DiskStats {
        name: name.to_owned(),
        read: Some(OperationStats {
            latency_us_log2: vec![1; BUCKETS],
            ..OperationStats::default()
        }),
        ..DiskStats::default()
    }
}

fn nic(name: &str) -> NicStats {
    NicStats {
        name: name.to_owned(),
        ..NicStats::default()
    }
}

fn share(name: &str) -> ShareStats {
    ShareStats {
        name: name.to_owned(),
    }
}

fn truth() -> MachineStats {
    MachineStats {
        vcpus: (0..4)
            .map(|index| VcpuStats {
                index,
                ..VcpuStats::default()
            })
            .collect(),
        exits: [("io_exits".to_owned(), 1)].into(),
        nics: vec![nic("lan")],
        disks: vec![disk("root"), disk("data")],
        shares: vec![share("home")],
        balloon: Some(BalloonStats {
            guest: [(4, 1)].into(),
            guest_time_ms: 5,
            ..BalloonStats::default()
        }),
    }
}

#[test]
fn what_is_true_passes_unchanged() {
    assert_eq!(
        response(Outcome::MachineStats(truth())),
        Ok(Outcome::MachineStats(truth()))
    );
    let gone = Event {
        kind: Some(event::Kind::DiskDetached(DiskDetached {
            name: "root".into(),
            forced: true,
        })),
    };
    assert_eq!(event(gone.clone()), Ok(gone));
}

#[test]
fn each_lie_about_a_machine_is_found() {
    let long = "x".repeat(NAME + 1);
    let lies: [fn(&mut MachineStats, &str); 12] = [
        |it, _| it.disks.push(disk("root")),
        |it, _| it.disks = (0..=DEVICES).map(|at| disk(&at.to_string())).collect(),
        |it, long| it.disks[0].name = long.to_owned(),
        |it, _| it.disks[0].name = "a\nb".to_owned(),
        |it, _| it.disks[0].read.as_mut().unwrap().latency_us_log2.push(1),
        |it, _| it.nics.push(nic("lan")),
        |it, _| it.nics.push(nic("")),
        |it, _| it.shares.push(share("home")),
        |it, long| it.shares.push(share(long)),
        |it, _| it.vcpus.push(VcpuStats::default()),
        |it, long| {
            it.exits.insert(long.to_owned(), 1);
        },
        |it, _| it.exits = (0..=COUNTERS).map(|at| (at.to_string(), 1)).collect(),
    ];
    for (number, lie) in lies.iter().enumerate() {
        let mut stats = truth();
        lie(&mut stats, &long);
        assert!(response(Outcome::MachineStats(stats)).is_err(), "lie {number}");
    }
    let twice = DiskStatsReply {
        disks: vec![disk("a"), disk("a")],
    };
    assert!(response(Outcome::DiskStats(twice)).is_err());
}

#[test]
fn text_is_cut_to_one_line_and_odd_numbers_are_unknown() {
    let status = Status {
        state: 99,
        pause_reason: 99,
        pause_message: format!("a\u{1b}[2J\n{}", "ä".repeat(TEXT)),
        exit: Some(ExitRecord {
            kind: 99,
            message: "m".repeat(TEXT * 2),
            time_unix_ms: u64::MAX,
        }),
        name: "n".repeat(1 << 16),
        guest_resets: 7,
        panicked: true,
        crash_resets: 3,
        open_channels: vec!["\u{1b}[2J".into()],
    };
    let Ok(Outcome::Status(bound)) = response(Outcome::Status(status)) else {
        panic!("a status");
    };
    assert_eq!(
        (bound.state, bound.pause_reason),
        (State::Unspecified.into(), PauseReason::Unspecified.into())
    );
    assert!(bound.pause_message.len() <= TEXT && !bound.pause_message.contains(char::is_control));
    assert!(bound.pause_message.starts_with("a"));
    assert!(bound.open_channels.is_empty());
    let exit = bound.exit.unwrap();
    assert_eq!((exit.kind, exit.time_unix_ms), (ExitKind::Unspecified.into(), 0));
    assert_eq!(
        (exit.message.len(), exit.message.capacity() <= 2 * TEXT),
        (TEXT, true)
    );
    assert_eq!(
        (bound.name.as_str(), bound.guest_resets, bound.crash_resets),
        ("", 7, 3)
    );
}

#[test]
fn events_are_bounded_too() {
    let error = |device: &str| Event {
        kind: Some(event::Kind::DeviceError(DeviceError {
            device: device.into(),
            message: "m".repeat(1 << 18),
        })),
    };
    assert!(event(error("")).is_err());
    assert!(event(error("disk \u{7}")).is_err());
    let Ok(Event {
        kind: Some(event::Kind::DeviceError(bound)),
    }) = event(error("disk root"))
    else {
        panic!("an error");
    };
    assert_eq!(bound.message.len(), TEXT);
    let ended = Event {
        kind: Some(event::Kind::Ended(Ended {
            exit: Some(ExitRecord {
                time_unix_ms: LATEST_MS + 1,
                ..ExitRecord::default()
            }),
        })),
    };
    let changed = Event {
        kind: Some(event::Kind::StateChanged(StateChanged {
            status: Some(Status {
                pause_message: "m".repeat(1 << 18),
                ..Status::default()
            }),
        })),
    };
    for (bound, longest) in [(event(ended), 16), (event(changed), TEXT + 16)] {
        assert!(prost::Message::encoded_len(&bound.unwrap()) <= longest);
    }
}

#[test]
fn only_devices_that_the_vm_has_are_counted() {
    let vm = Vm {
        spec: Some(v1::VmSpec {
            disks: vec![v1::DiskSpec {
                name: "data".into(),
                ..v1::DiskSpec::default()
            }],
            ..v1::VmSpec::default()
        }),
        status: Some(v1::VmStatus {
            nics: vec![v1::NicStatus {
                name: "lan".into(),
                ..v1::NicStatus::default()
            }],
            ..v1::VmStatus::default()
        }),
        ..Vm::default()
    };
    let left = of_vm(truth(), &vm);
    let disks: Vec<_> = left.disks.iter().map(|disk| disk.name.as_str()).collect();
    assert_eq!((disks, left.nics.len()), (vec!["data"], 1));
    let none = of_vm(truth(), &Vm::default());
    assert_eq!((none.disks.len(), none.nics.len()), (0, 0));
}
