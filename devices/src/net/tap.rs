//! A tap: the host's end of a virtual cable.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use vmm_base::sys::Iovecs;

use super::{NetBackend, Offloads};
use crate::sys::tap;

/// Length of the header before each frame.
const HEADER: libc::c_int = 12;

/// One open queue of a tap.
#[derive(Debug)]
pub struct Tap {
    fd: OwnedFd,
    capabilities: Offloads,
}

/// Reason why a descriptor is not usable as a tap. The caller names the network interface.
#[derive(Debug, thiserror::Error)]
pub enum TapError {
    /// It is something else.
    #[error("not a tap device")]
    NotATap(#[source] io::Error),
    /// The descriptor is a tun, or was attached without the required flags.
    #[error("not attached with IFF_TAP, IFF_NO_PI and IFF_VNET_HDR")]
    Flags,
    /// The host refused something.
    #[error("{0}")]
    Host(&'static str, #[source] io::Error),
}

impl Tap {
    /// Takes one queue of a tap that was attached with `IFF_TAP | IFF_NO_PI | IFF_VNET_HDR`, and sets it up. Needs no rights.
    pub fn new(fd: OwnedFd) -> Result<Self, TapError> {
        let known = match tap::is_vnet_tap(&fd) {
            // A queue that another device has detached is no tap until it is attached again.
            Err(error) if error.raw_os_error() == Some(libc::EBADFD) => {
                tap::set_attached(&fd, true).and_then(|()| tap::is_vnet_tap(&fd))
            }
            known => known,
        };
        if !known.map_err(TapError::NotATap)? {
            return Err(TapError::Flags);
        }
        let host = |what| move |error| TapError::Host(what, error);
        fcntl_getfl(&fd)
            .and_then(|flags| fcntl_setfl(&fd, flags | OFlags::NONBLOCK))
            .map_err(|error| TapError::Host("make the tap non-blocking", error.into()))?;
        tap::set_header_length(&fd, HEADER).map_err(host("set the tap's header length"))?;
        // Linux segments UDP for taps from 6.2 on. Those kernels too take the header of a UDP packet to be cut.
        let mut tap = Self {
            fd,
            capabilities: Offloads::all(),
        };
        if tap.set_offloads(Offloads::all()).is_err() {
            tap.capabilities.remove(Offloads::USO);
        }
        tap.set_offloads(Offloads::empty())
            .map_err(host("turn the tap's offloads off"))?;
        Ok(tap)
    }

    /// Opens the tap with that name; see [`sys::tap::open`](crate::sys::tap::open) for the rights needed.
    pub fn open(name: &str) -> Result<Self, TapError> {
        Self::new(tap::open(name, false).map_err(|error| TapError::Host("open the tap", error))?)
    }
}

impl AsFd for Tap {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl NetBackend for Tap {
    fn capabilities(&self) -> Offloads {
        self.capabilities
    }

    fn receive(&self, buffers: &Iovecs) -> io::Result<usize> {
        buffers.receive(&self.fd)
    }

    fn receive_into(&self, buffer: &mut [u8]) -> io::Result<usize> {
        Ok(rustix::io::retry_on_intr(|| {
            rustix::io::read(&self.fd, &mut *buffer)
        })?)
    }

    fn send(&self, header: &[u8], packet: &mut Iovecs) -> io::Result<()> {
        packet.send(&self.fd, header).map(|_| ())
    }

    fn set_offloads(&self, offloads: Offloads) -> io::Result<()> {
        let map = [
            (Offloads::CHECKSUM, libc::TUN_F_CSUM),
            (Offloads::TSO4, libc::TUN_F_TSO4),
            (Offloads::TSO6, libc::TUN_F_TSO6),
            (Offloads::TSO_ECN, libc::TUN_F_TSO_ECN),
            // Linux takes both or none.
            (Offloads::USO, libc::TUN_F_USO4 | libc::TUN_F_USO6),
        ];
        let flags = map.iter().filter(|(offload, _)| offloads.contains(*offload));
        tap::set_offload(&self.fd, flags.fold(0, |flags, (_, flag)| flags | flag))
    }

    fn set_attached(&self, attached: bool) -> io::Result<()> {
        tap::set_attached(&self.fd, attached)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_tap_is_refused() {
        let file = tempfile::tempfile().unwrap();
        assert!(matches!(Tap::new(file.into()), Err(TapError::NotATap(_))));
        assert!(matches!(Tap::open("no/name"), Err(TapError::Host(..))));
    }
}
