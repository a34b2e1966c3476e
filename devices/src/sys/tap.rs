//! Requests to the tun driver (Linux' Documentation/networking/tuntap.rst, `linux/if_tun.h`).

use std::{
    fs::File,
    io,
    os::fd::{AsFd, AsRawFd, OwnedFd},
    os::unix::fs::OpenOptionsExt,
};

/// Flags of a tap that carries whole Ethernet frames, each behind a virtio-net header.
const FLAGS: libc::c_int = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;

/// Opens the tap `name`, non-blocking; with `queues`, as one of several queues (IFF_MULTI_QUEUE), for which each open is
/// another one.
///
/// Needs the rights that tun(4) asks for: the tap's owner, or CAP_NET_ADMIN. When there is no such tap and the
/// caller may make one, it is made and vanishes with the descriptor.
pub fn open(name: &str, queues: bool) -> io::Result<OwnedFd> {
    let file = File::options()
        .read(true)
        .write(true)
        .custom_flags(libc::O_NONBLOCK | libc::O_CLOEXEC)
        .open("/dev/net/tun")?;
    let mut request = request();
    let bytes = name.as_bytes();
    // The name is followed by at least one NUL.
    if bytes.is_empty() || bytes.len() >= libc::IFNAMSIZ || bytes.contains(&0) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    for (to, from) in request.ifr_name.iter_mut().zip(bytes) {
        *to = libc::c_char::from_ne_bytes([*from]);
    }
    let flags = if queues {
        FLAGS | libc::IFF_MULTI_QUEUE
    } else {
        FLAGS
    };
    request.ifr_ifru.ifru_flags = libc::c_short::try_from(flags).unwrap_or_default();
    // SAFETY: TUNSETIFF reads and writes one `ifreq` through the pointer, which is valid for the duration of the call.
    check(unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETIFF, &raw mut request) })?;
    Ok(file.into())
}

/// Whether `fd` is a tap as [`open`] makes them; an error when it is no tun device at all.
pub fn is_vnet_tap(fd: impl AsFd) -> io::Result<bool> {
    let mut request = request();
    // SAFETY: TUNGETIFF writes one `ifreq` through the pointer, which is valid for the duration of the call.
    check(unsafe { libc::ioctl(fd.as_fd().as_raw_fd(), libc::TUNGETIFF, &raw mut request) })?;
    // SAFETY: the kernel filled in the flags; any bit pattern is a valid integer.
    let flags = unsafe { request.ifr_ifru.ifru_flags };
    Ok(libc::c_int::from(flags) & FLAGS == FLAGS)
}

/// Sets the length of the header before each frame.
pub fn set_header_length(fd: impl AsFd, length: libc::c_int) -> io::Result<()> {
    // SAFETY: TUNSETVNETHDRSZ reads one int through the pointer, which is valid for the duration of the call.
    check(unsafe { libc::ioctl(fd.as_fd().as_raw_fd(), libc::TUNSETVNETHDRSZ, &raw const length) })
}

/// Says which unfinished packets the reader of the tap takes: `libc::TUN_F_*`.
pub fn set_offload(fd: impl AsFd, flags: libc::c_uint) -> io::Result<()> {
    // SAFETY: TUNSETOFFLOAD takes its argument by value.
    check(unsafe {
        libc::ioctl(
            fd.as_fd().as_raw_fd(),
            libc::TUNSETOFFLOAD,
            libc::c_ulong::from(flags),
        )
    })
}

/// Whether the host hands packets to this queue of a tap with several.
pub fn set_attached(fd: impl AsFd, attached: bool) -> io::Result<()> {
    let flag = if attached {
        libc::IFF_ATTACH_QUEUE
    } else {
        libc::IFF_DETACH_QUEUE
    };
    let mut request = request();
    request.ifr_ifru.ifru_flags = libc::c_short::try_from(flag).unwrap_or_default();
    // SAFETY: TUNSETQUEUE reads one `ifreq` through the pointer, which is valid for the duration of the call.
    check(unsafe { libc::ioctl(fd.as_fd().as_raw_fd(), libc::TUNSETQUEUE, &raw const request) })
}

fn request() -> libc::ifreq {
    libc::ifreq {
        ifr_name: [0; libc::IFNAMSIZ],
        ifr_ifru: libc::__c_anonymous_ifr_ifru {
            ifru_map: libc::__c_anonymous_ifru_map {
                mem_start: 0,
                mem_end: 0,
                base_addr: 0,
                irq: 0,
                dma: 0,
                port: 0,
            },
        },
    }
}

fn check(result: libc::c_int) -> io::Result<()> {
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn names_that_can_not_be_an_interface_are_refused() {
        for name in ["", "sixteen-letters-", "a\0b"] {
            assert!(open(name, false).is_err(), "{name:?}");
        }
    }

    #[test]
    fn what_is_no_tun_device_is_told_so() {
        assert!(is_vnet_tap(tempfile::tempfile().unwrap()).is_err());
    }
}
