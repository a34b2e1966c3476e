//! Validation of all data from a `vmm`.
//!
//! A guest that has compromised its `vmm` can send any data. All data from a `vmm`, over its socket
//! or in its exit record, passes through this module before any other part of the daemon reads it:
//! counts are bounded, names are printable and short, and the API can express all numbers. Free
//! text is cut, since a true message may be long. Any other value out of bounds is a [`Lie`]: the
//! daemon closes the connection and discards the whole message.
//!
//! [`of_vm`] lists the devices of a given VM.

use std::collections::HashSet;

use vmm_protocol::{
    vmm::{
        BalloonStats, DiskStats, Error, Event, ExitRecord, HelloReply, MachineStats, NicStats,
        OperationStats, Status, VcpuStats, event, response::Result as Outcome,
    },
    wire::Limits,
};
use vmmd_api::v1::Vm;
use vmmd_host::text;

/// Limits of received messages. The largest true message counts 64 disks with four kinds of
/// requests, 24 buckets each, and 254 vCPUs: some 60 KiB. A field decodes to 300 bytes at most, so
/// that a message takes at most 20 MiB for a moment.
pub const LIMITS: Limits = Limits {
    frame_bytes: 256 << 10,
    fields: 64 << 10,
    // A vmm sends no descriptors.
    fds: 0,
};

/// Longest free text in bytes.
const TEXT: usize = 2048;
/// Longest name of a device, or of one with its kind before it ("disk root"), in bytes.
const NAME: usize = 80;
/// Longest name of a program's build or of a feature, in bytes.
const WORD: usize = 64;
/// Most features.
const FEATURES: usize = 64;
/// Most disks, and most NICs.
const DEVICES: usize = 64;
/// Most vCPUs.
const VCPUS: usize = 512;
/// Most counters of KVM: Linux 6.12 has about 60 for x86.
const COUNTERS: usize = 256;
/// Buckets of a latency histogram: `latency_us_log2` of the private protocol.
const BUCKETS: usize = 24;
/// Highest tag of the balloon's statistics that is passed on; virtio 1.3, 5.5.6.3 has 0 to 15.
const TAGS: u32 = 64;
/// Latest time: the end of the year 9999 in milliseconds of Unix time, the last that RFC 3339 can express.
const LATEST_MS: u64 = 253_402_300_799_999;

/// Something that no `vmm` of ours says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the vmm sent {0}, which no vmm does")]
pub struct Lie(&'static str);

/// Bounds a response.
pub fn response(outcome: Outcome) -> Result<Outcome, Lie> {
    Ok(match outcome {
        Outcome::Error(error) => Outcome::Error(Error {
            message: cut(&error.message),
            kind: error.kind().into(),
        }),
        Outcome::Hello(reply) => Outcome::Hello(hello(reply)?),
        Outcome::Status(status) => Outcome::Status(bound_status(&status)),
        Outcome::DiskStats(mut reply) => {
            check_disks(&reply.disks)?;
            reply.disks.shrink_to_fit();
            Outcome::DiskStats(reply)
        }
        Outcome::MachineStats(stats) => Outcome::MachineStats(machine(stats)?),
        // Numbers alone.
        Outcome::Saved(reply) => Outcome::Saved(reply),
        Outcome::Sent(reply) => Outcome::Sent(reply),
    })
}

/// Bounds an event.
pub fn event(mut event: Event) -> Result<Event, Lie> {
    match &mut event.kind {
        Some(event::Kind::StateChanged(changed)) => {
            changed.status = changed.status.as_ref().map(bound_status);
        }
        Some(event::Kind::DeviceError(error)) => {
            check_name(&error.device, "a device without a proper name")?;
            error.message = cut(&error.message);
        }
        Some(event::Kind::Ended(ended)) => ended.exit = ended.exit.as_ref().map(exit_record),
        Some(event::Kind::DiskDetached(gone)) => {
            check_name(&gone.name, "a disk without a proper name")?;
        }
        Some(event::Kind::NicDetached(gone)) => {
            check_name(&gone.name, "a NIC without a proper name")?;
        }
        Some(event::Kind::ShareDetached(gone)) => {
            check_name(&gone.name, "a share without a proper name")?;
        }
        Some(event::Kind::GuestPanicked(panicked)) => panicked.parameters.truncate(MAX_PARAMETERS),
        Some(event::Kind::ChannelsChanged(changed)) => {
            let names = changed.open.iter().map(String::as_str);
            check_names(names, changed.open.len())?;
        }
        Some(
            event::Kind::GuestReset(_)
            | event::Kind::CrashReset(_)
            | event::Kind::WatchdogExpired(_)
            | event::Kind::DisksQuiet(_)
            | event::Kind::MigrationRound(_)
            | event::Kind::MigrationDisks(_),
        )
        | None => {}
    }
    Ok(event)
}

/// Bounds an exit record. One of a time that the API can't express is of no time.
pub fn exit_record(record: &ExitRecord) -> ExitRecord {
    ExitRecord {
        kind: record.kind().into(),
        message: cut(&record.message),
        time_unix_ms: if record.time_unix_ms <= LATEST_MS {
            record.time_unix_ms
        } else {
            0
        },
    }
}

/// Most parameters of a crash that a guest reports.
const MAX_PARAMETERS: usize = 5;

/// Leaves the disks and NICs that the VM has by its spec, or had when it was started.
pub fn of_vm(mut stats: MachineStats, vm: &Vm) -> MachineStats {
    let (mut disks, mut nics) = (HashSet::new(), HashSet::new());
    if let Some(spec) = &vm.spec {
        disks.extend(spec.disks.iter().map(|disk| disk.name.as_str()));
        nics.extend(spec.nics.iter().map(|nic| nic.name.as_str()));
    }
    if let Some(status) = &vm.status {
        disks.extend(status.disks.iter().map(|disk| disk.name.as_str()));
        nics.extend(status.nics.iter().map(|nic| nic.name.as_str()));
    }
    stats.disks.retain(|disk| disks.contains(disk.name.as_str()));
    stats.nics.retain(|nic| nics.contains(nic.name.as_str()));
    stats
}

fn hello(reply: HelloReply) -> Result<HelloReply, Lie> {
    if reply.features.len() > FEATURES || !reply.features.iter().all(|feature| is_word(feature, WORD)) {
        return Err(Lie("features without proper names"));
    }
    if !reply.build.is_empty() && !is_word(&reply.build, WORD) {
        return Err(Lie("a build without a proper name"));
    }
    Ok(HelloReply {
        status: reply.status.as_ref().map(bound_status),
        ..reply
    })
}

fn bound_status(status: &Status) -> Status {
    Status {
        state: status.state().into(),
        guest_resets: status.guest_resets,
        panicked: status.panicked,
        crash_resets: status.crash_resets,
        // The daemon knows the VM by its own record.
        name: String::new(),
        pause_reason: status.pause_reason().into(),
        pause_message: cut(&status.pause_message),
        exit: status.exit.as_ref().map(exit_record),
        open_channels: match check_names(
            status.open_channels.iter().map(String::as_str),
            status.open_channels.len(),
        ) {
            Ok(()) => status.open_channels.clone(),
            Err(_) => Vec::new(),
        },
    }
}

fn machine(stats: MachineStats) -> Result<MachineStats, Lie> {
    check_disks(&stats.disks)?;
    check_nics(&stats.nics)?;
    let shares = stats.shares.iter().map(|share| share.name.as_str());
    check_names(shares, stats.shares.len())?;
    check_vcpus(&stats.vcpus)?;
    if stats.exits.len() > COUNTERS || !stats.exits.keys().all(|name| is_word(name, WORD)) {
        return Err(Lie("counters of KVM without proper names"));
    }
    Ok(MachineStats {
        balloon: stats.balloon.map(balloon),
        ..stats
    })
}

fn balloon(stats: BalloonStats) -> BalloonStats {
    let guest = stats.guest.into_iter().filter(|(tag, _)| *tag < TAGS).collect();
    BalloonStats {
        guest_time_ms: if stats.guest_time_ms <= LATEST_MS {
            stats.guest_time_ms
        } else {
            0
        },
        guest,
        ..stats
    }
}

fn check_disks(disks: &[DiskStats]) -> Result<(), Lie> {
    check_names(disks.iter().map(|disk| disk.name.as_str()), disks.len())?;
    let operations = |disk: &DiskStats| {
        [&disk.read, &disk.write, &disk.flush, &disk.discard]
            .into_iter()
            .flatten()
            .all(|stats: &OperationStats| stats.latency_us_log2.len() <= BUCKETS)
    };
    if disks.iter().all(operations) {
        Ok(())
    } else {
        Err(Lie("a histogram with too many buckets"))
    }
}

fn check_nics(nics: &[NicStats]) -> Result<(), Lie> {
    check_names(nics.iter().map(|nic| nic.name.as_str()), nics.len())
}

fn check_vcpus(vcpus: &[VcpuStats]) -> Result<(), Lie> {
    let different: HashSet<_> = vcpus.iter().map(|vcpu| vcpu.index).collect();
    let most = u32::try_from(VCPUS).unwrap_or(u32::MAX);
    if different.len() < vcpus.len() || different.iter().any(|index| *index >= most) {
        return Err(Lie("vCPUs that can't be"));
    }
    Ok(())
}

/// Devices of one kind: not too many, each with a name of its own.
fn check_names<'a>(names: impl Iterator<Item = &'a str>, count: usize) -> Result<(), Lie> {
    if count > DEVICES {
        return Err(Lie("too many devices"));
    }
    let mut seen = HashSet::with_capacity(count);
    for name in names {
        check_name(name, "a device without a proper name")?;
        if !seen.insert(name) {
            return Err(Lie("two devices of one name"));
        }
    }
    Ok(())
}

fn check_name(name: &str, lie: &'static str) -> Result<(), Lie> {
    let printable = |byte: u8| byte == b' ' || byte.is_ascii_graphic();
    if name.is_empty() || name.len() > NAME || !name.bytes().all(printable) {
        return Err(Lie(lie));
    }
    Ok(())
}

/// Printable ASCII without spaces, at least one character.
fn is_word(text: &str, longest: usize) -> bool {
    !text.is_empty() && text.len() <= longest && text.bytes().all(|byte| byte.is_ascii_graphic())
}

/// Free text in one line of at most [`TEXT`] bytes, in a string of that size.
fn cut(message: &str) -> String {
    text::one_line(message, TEXT)
}

#[cfg(test)]
mod tests;
