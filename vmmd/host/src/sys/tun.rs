//! TUNSETIFF (Linux' Documentation/networking/tuntap.rst).

use std::{
    io,
    os::fd::{AsFd, AsRawFd},
};

/// Makes an open `/dev/net/tun` the tap device `name`: Ethernet frames without a packet information header, with a
/// virtio-net header. The device is made when there is none, and then vanishes with the last descriptor. With `queues` it is
/// another one of several queues (IFF_MULTI_QUEUE).
pub fn attach_tap(tun: impl AsFd, name: &str, queues: bool) -> io::Result<()> {
    if name.is_empty() || name.len() >= libc::IFNAMSIZ || name.contains('\0') {
        return Err(io::Error::from(io::ErrorKind::InvalidInput));
    }
    let mut flags = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
    if queues {
        flags |= libc::IFF_MULTI_QUEUE;
    }
    let mut request = libc::ifreq {
        ifr_name: [0; libc::IFNAMSIZ],
        ifr_ifru: libc::__c_anonymous_ifr_ifru {
            // IFF_VNET_HDR is bit 14, so it fits.
            ifru_flags: libc::c_short::try_from(flags).unwrap_or_default(),
        },
    };
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = from.cast_signed();
    }
    let fd = tun.as_fd().as_raw_fd();
    // SAFETY: the descriptor is open, and TUNSETIFF reads and writes one `ifreq`, which outlives the call.
    let result = unsafe { libc::ioctl(fd, libc::TUNSETIFF, &raw mut request) };
    if result == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}
