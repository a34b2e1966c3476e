//! Requests to the kernel's vhost drivers (`linux/vhost.h`): owner of a device, addresses of the
//! rings, events of the device.

use std::{
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd},
};

use vm_memory::{Address as _, GuestAddress, GuestMemoryBackend, GuestMemoryRegion};
use vmm_base::GuestMemory;
use vmm_sys_util::{
    eventfd::EventFd,
    ioctl::{ioctl, ioctl_with_mut_ref, ioctl_with_ptr, ioctl_with_ref},
};

/// `struct vhost_vring_state`.
#[derive(Clone, Copy, Default)]
#[repr(C)]
struct State {
    index: u32,
    number: u32,
}

/// `struct vhost_vring_file`.
#[repr(C)]
struct RingFile {
    index: u32,
    fd: i32,
}

/// `struct vhost_vring_addr`: addresses in this process, of which `log` is a guest-physical one.
#[repr(C)]
struct Addresses {
    index: u32,
    flags: u32,
    descriptors: u64,
    used: u64,
    available: u64,
    log: u64,
}

/// `struct vhost_memory` without its regions.
#[repr(C)]
struct MemoryHead {
    regions: u32,
    padding: u32,
}

#[allow(missing_docs, reason = "the kernel's names")]
mod request {
    use vmm_sys_util::{ioctl_io_nr, ioctl_ior_nr, ioctl_iow_nr, ioctl_iowr_nr};

    use super::{Addresses, MemoryHead, RingFile, State};

    const VHOST: libc::c_uint = 0xaf;

    ioctl_ior_nr!(VHOST_GET_FEATURES, VHOST, 0x00, u64);
    ioctl_iow_nr!(VHOST_SET_FEATURES, VHOST, 0x00, u64);
    ioctl_io_nr!(VHOST_SET_OWNER, VHOST, 0x01);
    ioctl_iow_nr!(VHOST_SET_MEM_TABLE, VHOST, 0x03, MemoryHead);
    ioctl_iow_nr!(VHOST_SET_VRING_NUM, VHOST, 0x10, State);
    ioctl_iow_nr!(VHOST_SET_VRING_ADDR, VHOST, 0x11, Addresses);
    ioctl_iow_nr!(VHOST_SET_VRING_BASE, VHOST, 0x12, State);
    ioctl_iowr_nr!(VHOST_GET_VRING_BASE, VHOST, 0x12, State);
    ioctl_iow_nr!(VHOST_SET_VRING_KICK, VHOST, 0x20, RingFile);
    ioctl_iow_nr!(VHOST_SET_VRING_CALL, VHOST, 0x21, RingFile);
    ioctl_iow_nr!(VHOST_SET_VRING_ERR, VHOST, 0x22, RingFile);
    ioctl_iow_nr!(VHOST_NET_SET_BACKEND, VHOST, 0x30, RingFile);
}

use request::*;

/// Which event of a ring is set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RingEvent {
    /// Signalled by the driver's notification.
    Kick,
    /// To be signalled for an interrupt.
    Call,
    /// To be signalled when the ring makes no sense.
    Error,
}

/// Makes this process the owner of the device: the device works in this process's memory. Starts
/// the device's thread.
pub fn set_owner(vhost: impl AsFd) -> io::Result<()> {
    // SAFETY: VHOST_SET_OWNER has no argument.
    check(unsafe { ioctl(&vhost.as_fd(), VHOST_SET_OWNER()) })
}

/// The feature bits on offer.
pub fn features(vhost: impl AsFd) -> io::Result<u64> {
    let mut features = 0_u64;
    // SAFETY: VHOST_GET_FEATURES writes one `u64` through the pointer, which is valid for the duration of the call.
    check(unsafe { ioctl_with_mut_ref(&vhost.as_fd(), VHOST_GET_FEATURES(), &mut features) })?;
    Ok(features)
}

/// Accepts features, all of which have to be on offer.
pub fn set_features(vhost: impl AsFd, features: u64) -> io::Result<()> {
    // SAFETY: VHOST_SET_FEATURES reads one `u64` through the pointer, which is valid for the duration of the call.
    check(unsafe { ioctl_with_ref(&vhost.as_fd(), VHOST_SET_FEATURES(), &features) })
}

/// Sets the addresses of guest memory in this process. The caller keeps `memory` until the device
/// has been closed or has lost its backend, because the kernel uses these addresses.
pub fn set_memory(vhost: impl AsFd, memory: &GuestMemory) -> io::Result<()> {
    let mut regions: Vec<[u64; 4]> = Vec::new();
    for region in memory.iter() {
        let host = address(memory, region.start_addr().raw_value())?;
        // The last word is for flags, of which there are none.
        regions.push([region.start_addr().raw_value(), region.len(), host, 0]);
    }
    let count = u32::try_from(regions.len()).unwrap_or(u32::MAX);
    // The head is one word: the count, and four bytes of padding.
    let mut table = vec![u64::from(count)];
    table.extend(regions.iter().flatten());
    // SAFETY: VHOST_SET_MEM_TABLE reads a `vhost_memory` and as many regions of 32 bytes as it says, which `table` holds; it is
    // little-endian x86, so that the count is the first half of the first word.
    check(unsafe {
        ioctl_with_ptr(
            &vhost.as_fd(),
            VHOST_SET_MEM_TABLE(),
            table.as_ptr().cast::<MemoryHead>(),
        )
    })
}

/// Says how many descriptors a ring has, and from which available entry on it is to be served.
pub fn set_progress(vhost: impl AsFd, index: u32, size: u16, next_avail: u16) -> io::Result<()> {
    let vhost = vhost.as_fd();
    let number = |number: u16| State {
        index,
        number: number.into(),
    };
    // SAFETY: VHOST_SET_VRING_NUM reads one `vhost_vring_state` through the pointer, which is valid for the call.
    check(unsafe { ioctl_with_ref(&vhost, VHOST_SET_VRING_NUM(), &number(size)) })?;
    // SAFETY: the same of VHOST_SET_VRING_BASE.
    check(unsafe { ioctl_with_ref(&vhost, VHOST_SET_VRING_BASE(), &number(next_avail)) })
}

/// The available entry of a ring without a backend that would be taken next.
pub fn next_available(vhost: impl AsFd, index: u32) -> io::Result<u16> {
    let mut state = State { index, number: 0 };
    // SAFETY: VHOST_GET_VRING_BASE reads and writes one `vhost_vring_state` through the pointer, which is valid for the call.
    check(unsafe { ioctl_with_mut_ref(&vhost.as_fd(), VHOST_GET_VRING_BASE(), &mut state) })?;
    u16::try_from(state.number).map_err(|_| io::ErrorKind::InvalidData.into())
}

/// Says where the parts of a ring are: guest-physical addresses in `memory`, as for [`set_memory`].
pub fn set_addresses(
    vhost: impl AsFd,
    memory: &GuestMemory,
    index: u32,
    [descriptors, available, used]: [u64; 3],
) -> io::Result<()> {
    let addresses = Addresses {
        index,
        flags: 0,
        descriptors: address(memory, descriptors)?,
        available: address(memory, available)?,
        used: address(memory, used)?,
        log: 0,
    };
    // SAFETY: VHOST_SET_VRING_ADDR reads one `vhost_vring_addr` through the pointer, which is valid for the call. The kernel
    // checks that the addresses are this process's, and takes each access to them for one of a process.
    check(unsafe { ioctl_with_ref(&vhost.as_fd(), VHOST_SET_VRING_ADDR(), &addresses) })
}

/// Gives a ring an event, or takes it.
pub fn set_event(vhost: impl AsFd, index: u32, which: RingEvent, event: Option<&EventFd>) -> io::Result<()> {
    let request = match which {
        RingEvent::Kick => VHOST_SET_VRING_KICK(),
        RingEvent::Call => VHOST_SET_VRING_CALL(),
        RingEvent::Error => VHOST_SET_VRING_ERR(),
    };
    set_file(vhost, index, request, event.map_or(-1, AsRawFd::as_raw_fd))
}

/// Has a ring of vhost-net served with packets of `tap`, or with none: when this has returned nothing of the ring is under way.
pub fn set_net_backend(vhost: impl AsFd, index: u32, tap: Option<BorrowedFd<'_>>) -> io::Result<()> {
    let fd = tap.map_or(-1, |tap| tap.as_raw_fd());
    set_file(vhost, index, VHOST_NET_SET_BACKEND(), fd)
}

fn set_file(vhost: impl AsFd, index: u32, request: libc::c_ulong, fd: i32) -> io::Result<()> {
    let file = RingFile { index, fd };
    // SAFETY: these requests read one `vhost_vring_file` through the pointer, which is valid for the call.
    check(unsafe { ioctl_with_ref(&vhost.as_fd(), request, &file) })
}

/// Where in this process a guest-physical address is.
fn address(memory: &GuestMemory, address: u64) -> io::Result<u64> {
    let host = memory.get_host_address(GuestAddress(address));
    let host = host.map_err(|_| io::Error::other("a ring is not in guest memory"))?;
    // The kernel reads and writes there.
    u64::try_from(host.expose_provenance()).map_err(|_| io::ErrorKind::InvalidData.into())
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
    fn requests_have_the_kernels_numbers() {
        // linux/vhost.h, as a C compiler gives them.
        assert_eq!(VHOST_GET_FEATURES(), 0x8008_af00);
        assert_eq!(VHOST_SET_FEATURES(), 0x4008_af00);
        assert_eq!(VHOST_SET_OWNER(), 0xaf01);
        assert_eq!(VHOST_SET_MEM_TABLE(), 0x4008_af03);
        assert_eq!(VHOST_SET_VRING_NUM(), 0x4008_af10);
        assert_eq!(VHOST_SET_VRING_ADDR(), 0x4028_af11);
        assert_eq!(VHOST_SET_VRING_BASE(), 0x4008_af12);
        assert_eq!(VHOST_GET_VRING_BASE(), 0xc008_af12);
        assert_eq!(VHOST_SET_VRING_KICK(), 0x4008_af20);
        assert_eq!(VHOST_SET_VRING_CALL(), 0x4008_af21);
        assert_eq!(VHOST_SET_VRING_ERR(), 0x4008_af22);
        assert_eq!(VHOST_NET_SET_BACKEND(), 0x4008_af30);
    }

    #[test]
    fn what_is_no_vhost_device_is_told_so() {
        let file = tempfile::tempfile().unwrap();
        assert!(set_owner(&file).is_err() && features(&file).is_err());
    }
}
