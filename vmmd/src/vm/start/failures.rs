//! Failures of a start, as the client receives them.

use std::{io, sync::Arc};

use tokio::task::spawn_blocking;
use uuid::Uuid;
use vmm_protocol::vmm::ErrorKind;
use vmmd_host::{
    failure::{Failure, Kind},
    text,
};

use crate::{control, host::Host, paths::RuntimeDir, vm::instance::exit_record};

pub(super) fn failed(operation: &str, error: &io::Error) -> Failure {
    let message = format!("{operation}: {}", text::words(error));
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            Failure::new(Kind::Exhausted, "NODE_DISK_FULL", message)
        }
        _ => Failure::internal(message),
    }
}

/// Reason of a failure that only says that the connection is gone.
pub(super) const GONE: &str = "VMM_GONE";

/// Failure for the client when a `vmm` does not carry out a request.
pub fn refused(error: &control::Error) -> Failure {
    let control::Error::Refused(remote) = error else {
        let reason = if matches!(error, control::Error::Closed) {
            GONE
        } else {
            "VMM_FAILED"
        };
        return Failure::new(Kind::Internal, reason, text::chain(error));
    };
    let message = remote.message.clone();
    match remote.kind() {
        ErrorKind::Image => Failure::precondition("IMAGE_UNUSABLE", message),
        ErrorKind::InUse => Failure::precondition("DISK_IN_USE", message),
        ErrorKind::Kvm => Failure::precondition("KVM_UNUSABLE", message),
        ErrorKind::Resources => Failure::new(Kind::Exhausted, "NODE_EXHAUSTED", message),
        _ => Failure::internal(message),
    }
}

pub(super) const OUT_OF_MEMORY: &str = "the kernel ran out of memory and killed the vmm process while it booted the machine: the node has less free memory \
     than the VM needs; stop another VM, or give this one less";

/// Whether that was the end of the process.
pub(super) async fn out_of_memory(host: &Arc<Host>, uid: Uuid) -> bool {
    let host = Arc::clone(host);
    let killed = spawn_blocking(move || {
        let group = host.cgroups.as_ref().map(|parent| parent.group(uid));
        group.is_some_and(|group| group.oom_killed())
    });
    killed.await.unwrap_or(false)
}

pub(super) fn died(runtime: &RuntimeDir, signal: Option<i32>) -> Failure {
    let message = match (exit_record(&runtime.exit()), signal) {
        (Some(record), _) if !record.message.is_empty() => record.message,
        (_, Some(signal)) => {
            format!("the vmm process was killed by signal {signal} while it booted the machine")
        }
        _ => "the vmm process ended before the machine was booted; its log says more".to_owned(),
    };
    Failure::new(Kind::Internal, "VMM_FAILED", message)
}

pub(super) fn cancelled(name: &str) -> Failure {
    Failure::new(
        Kind::Aborted,
        "START_CANCELLED",
        format!("VM \"{name}\" was stopped while it was being started"),
    )
}
