//! Conversion of requests about disks and other devices into requests of the driver.

use std::os::fd::OwnedFd;

use vmm_core::lifecycle::{LimitTarget, NicChange, Request};
use vmm_protocol::vmm::{request::Op, set_rate_limit::Target};

/// Returns the driver's request for `op`, or an error that names the missing part.
pub(super) fn request(op: Op, fds: Vec<OwnedFd>) -> Result<Request, &'static str> {
    Ok(match op {
        Op::AttachDisk(attach) => Request::AttachDisk {
            disk: Box::new(attach.disk.ok_or("AttachDisk without a disk")?),
            fds,
        },
        Op::DetachDisk(detach) => Request::DetachDisk {
            name: detach.name,
            force: detach.force,
        },
        Op::ResizeDisk(resize) => Request::ResizeDisk {
            name: resize.name,
            capacity: (resize.capacity_bytes != 0).then_some(resize.capacity_bytes),
        },
        Op::SetRateLimit(set) => Request::SetRateLimit {
            target: match set.target.ok_or("SetRateLimit without a disk or a group")? {
                Target::Disk(name) => LimitTarget::Disk(name),
                Target::Group(name) => LimitTarget::Group(name),
            },
            limit: (&set.limit.ok_or("SetRateLimit without a limit")?).into(),
        },
        Op::AttachNic(attach) => Request::AttachNic {
            nic: Box::new(attach.nic.ok_or("AttachNic without a NIC")?),
            fds,
        },
        Op::DetachNic(detach) => Request::DetachNic {
            name: detach.name,
            force: detach.force,
        },
        Op::UpdateNic(update) => Request::UpdateNic {
            name: update.name,
            change: NicChange {
                link_up: update.link_up,
                receive_limit: update.receive_limit.as_ref().map(Into::into),
                transmit_limit: update.transmit_limit.as_ref().map(Into::into),
            },
        },
        Op::AttachShare(attach) => Request::AttachShare {
            share: Box::new(attach.share.ok_or("AttachShare without a share")?),
            fds,
        },
        Op::DetachShare(detach) => Request::DetachShare {
            name: detach.name,
            force: detach.force,
        },
        Op::SetShareBackend(set) => {
            let index = usize::try_from(set.fd).unwrap_or(usize::MAX);
            let socket = fds.into_iter().nth(index);
            Request::SetShareBackend {
                name: set.name,
                socket: socket.ok_or("SetShareBackend without a socket")?,
            }
        }
        Op::SetBalloon(set) => Request::SetBalloon(set.target_bytes),
        Op::SendBreak(_) => Request::SendBreak,
        Op::ResizeConsole(size) => {
            let characters =
                |number| u16::try_from(number).map_err(|_| "a terminal has at most 65535 each way");
            Request::ResizeConsole {
                columns: characters(size.columns)?,
                rows: characters(size.rows)?,
            }
        }
        Op::GetDiskStats(_) => Request::GetDiskStats,
        Op::GetMachineStats(_) => Request::GetMachineStats,
        _ => return Err("unknown request"),
    })
}
