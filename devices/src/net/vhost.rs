//! vhost-net: the kernel carries packets between the rings in guest memory and a tap, without this process.

use std::{
    io,
    os::fd::{BorrowedFd, OwnedFd},
};

use virtio_bindings::{
    virtio_config::VIRTIO_F_VERSION_1,
    virtio_net::VIRTIO_NET_F_MRG_RXBUF,
    virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC},
};
use vmm_base::GuestMemory;
use vmm_sys_util::eventfd::EventFd;

use super::{PairServer, ServedRing};
use crate::sys::vhost::{self, RingEvent};

/// Features that concern the server of the rings. The others belong to the tap and the device.
const OF_RINGS: u64 = 1 << VIRTIO_F_VERSION_1
    | 1 << VIRTIO_NET_F_MRG_RXBUF
    | 1 << VIRTIO_RING_F_EVENT_IDX
    | 1 << VIRTIO_RING_F_INDIRECT_DESC;

/// One open vhost-net: a pair of queues.
#[derive(Debug)]
pub struct VhostNet {
    fd: OwnedFd,
    /// Memory that the kernel uses while it serves. Declared after `fd`, so that `fd` is closed
    /// first.
    memory: Option<GuestMemory>,
}

impl VhostNet {
    /// Takes an open `/dev/vhost-net` over. The thread of the kernel that it starts belongs to this process.
    pub fn new(fd: OwnedFd) -> io::Result<Self> {
        let features = vhost::features(&fd)?;
        if features & OF_RINGS != OF_RINGS {
            let lacks = OF_RINGS & !features;
            return Err(io::Error::other(format!(
                "the kernel's vhost-net lacks virtio features {lacks:#x}"
            )));
        }
        vhost::set_owner(&fd)?;
        Ok(Self { fd, memory: None })
    }

    fn try_start(
        &self,
        memory: &GuestMemory,
        features: u64,
        rings: [ServedRing<'_>; 2],
        tap: BorrowedFd<'_>,
    ) -> io::Result<()> {
        let fd = &self.fd;
        vhost::set_features(fd, features & OF_RINGS)?;
        vhost::set_memory(fd, memory)?;
        for (index, ring) in (0..).zip(rings) {
            let state = ring.state;
            vhost::set_progress(fd, index, state.size, state.next_avail)?;
            let parts = [state.desc_table, state.avail_ring, state.used_ring];
            vhost::set_addresses(fd, memory, index, parts)?;
            vhost::set_event(fd, index, RingEvent::Error, Some(ring.error))?;
            vhost::set_event(fd, index, RingEvent::Call, Some(ring.call))?;
            vhost::set_event(fd, index, RingEvent::Kick, Some(ring.kick))?;
        }
        (0..2).try_for_each(|index| vhost::set_net_backend(fd, index, Some(tap)))
    }

    fn silence(&self) -> io::Result<()> {
        for index in 0..2 {
            vhost::set_net_backend(&self.fd, index, None)?;
            // Notifications are this process's again.
            vhost::set_event(&self.fd, index, RingEvent::Kick, None)?;
            vhost::set_event(&self.fd, index, RingEvent::Call, None)?;
        }
        Ok(())
    }
}

impl PairServer for VhostNet {
    fn start(
        &mut self,
        memory: &GuestMemory,
        features: u64,
        rings: [ServedRing<'_>; 2],
        tap: BorrowedFd<'_>,
    ) -> io::Result<()> {
        self.memory = Some(memory.clone());
        let started = self.try_start(memory, features, rings, tap);
        if started.is_err() {
            // A failure here means that the rings have no backend.
            let _silent = self.silence();
        }
        started
    }

    fn set_call(&mut self, ring: u32, call: &EventFd) -> io::Result<()> {
        vhost::set_event(&self.fd, ring, RingEvent::Call, Some(call))
    }

    fn stop(&mut self) -> io::Result<[u16; 2]> {
        self.silence()?;
        let next = [
            vhost::next_available(&self.fd, 0)?,
            vhost::next_available(&self.fd, 1)?,
        ];
        self.memory = None;
        Ok(next)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_vhost_net_is_refused() {
        let file = tempfile::tempfile().unwrap();
        assert!(VhostNet::new(file.into()).is_err());
    }
}
