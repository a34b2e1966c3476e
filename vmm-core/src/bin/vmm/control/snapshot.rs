//! What clients ask about snapshots and migration, as the driver takes it.

use std::{os::fd::OwnedFd, time::Duration};

use proto::vmm::{MigrationPolicy, Save, Send};
use vmm_core::{lifecycle::Request, snapshot::saving::Policy};

/// Longest description of a snapshot in bytes.
const MAX_DESCRIPTION: usize = 512 << 10;

/// The request for `save`, or what is wrong with it.
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

/// What is done to a guest that is too fast. A client of before minor version 9 knows two of them.
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

/// The request for `send`, or what is wrong with it.
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
