//! Conversion of requests about snapshots and migration into requests of the driver.

use std::{os::fd::OwnedFd, time::Duration};

use vmm_core::{lifecycle::Request, snapshot::saving::Policy};
use vmm_protocol::vmm::{MigrationPolicy, Save, Send};

/// Longest description of a snapshot in bytes.
const MAX_DESCRIPTION: usize = 512 << 10;

/// Returns the driver's request for `save`, or a description of its error.
pub(super) fn request(save: Save, fds: Vec<OwnedFd>) -> Result<Request, &'static str> {
    if save.description.len() > MAX_DESCRIPTION {
        return Err("the description of a snapshot has at most 512 KiB");
    }
    let index = usize::try_from(save.file_fd).unwrap_or(usize::MAX);
    let file = match save.disks_alone {
        true => None,
        false => Some(fds.into_iter().nth(index).ok_or("Save without a file")?),
    };
    Ok(Request::Save {
        file,
        paused: save.paused,
        description: save.description,
        keep_paused: save.keep_paused,
        number: save.number,
    })
}

/// Returns the policy for a guest that writes memory too fast. A client older than minor version 9
/// knows two policies.
fn policy(send: &Send) -> Result<Policy, &'static str> {
    Ok(match MigrationPolicy::try_from(send.policy) {
        Ok(MigrationPolicy::Unspecified) if send.throttle => Policy::PreferForced,
        Ok(MigrationPolicy::Unspecified | MigrationPolicy::AlwaysSafe) => Policy::AlwaysSafe,
        Ok(MigrationPolicy::PreferSafe) => Policy::PreferSafe,
        Ok(MigrationPolicy::PreferForced) => Policy::PreferForced,
        Ok(MigrationPolicy::AlwaysForced) => Policy::AlwaysForced,
        Err(_) => return Err("Send with an unknown policy"),
    })
}

/// Returns the driver's request for `send`, or a description of its error.
pub(super) fn send_request(send: &Send, fds: Vec<OwnedFd>) -> Result<Request, &'static str> {
    let index = usize::try_from(send.socket_fd).unwrap_or(usize::MAX);
    let socket = fds.into_iter().nth(index).ok_or("Send without a socket")?;
    Ok(Request::Send {
        socket,
        downtime: Duration::from_millis(send.downtime_ms),
        policy: policy(send)?,
        disks: send.disks.clone(),
    })
}
