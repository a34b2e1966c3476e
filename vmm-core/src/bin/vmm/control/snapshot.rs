//! What clients ask about snapshots and migration, as the driver takes it.

use std::{os::fd::OwnedFd, time::Duration};

use proto::vmm::{Save, Send};
use vmm_core::lifecycle::Request;

/// Longest description of a snapshot in bytes.
const MAX_DESCRIPTION: usize = 512 << 10;

/// The request for `save`, or what is wrong with it.
pub(super) fn request(save: Save, fds: Vec<OwnedFd>) -> Result<Request, &'static str> {
    if save.description.len() > MAX_DESCRIPTION {
        return Err("the description of a snapshot has at most 512 KiB");
    }
    let index = usize::try_from(save.file_fd).unwrap_or(usize::MAX);
    let file = fds.into_iter().nth(index).ok_or("Save without a file")?;
    Ok(Request::Save {
        file,
        paused: save.paused,
        description: save.description,
        keep_paused: save.keep_paused,
    })
}

/// The request for `send`, or what is wrong with it.
pub(super) fn send_request(send: &Send, fds: Vec<OwnedFd>) -> Result<Request, &'static str> {
    let index = usize::try_from(send.socket_fd).unwrap_or(usize::MAX);
    let socket = fds.into_iter().nth(index).ok_or("Send without a socket")?;
    Ok(Request::Send {
        socket,
        downtime: Duration::from_millis(send.downtime_ms),
        throttle: send.throttle,
        disks: send.disks.clone(),
    })
}
