//! Packet sockets (packet(7)).

use std::{
    io,
    os::fd::{AsFd, AsRawFd},
};

/// Binds a packet socket to the interface with the index `interface`: it gets the frames of the EtherType `protocol` there, and
/// sends there.
pub fn bind_packet(socket: impl AsFd, protocol: u16, interface: u32) -> io::Result<()> {
    let address = libc::sockaddr_ll {
        sll_family: libc::sa_family_t::try_from(libc::AF_PACKET).unwrap_or_default(),
        sll_protocol: protocol.to_be(),
        sll_ifindex: i32::try_from(interface).map_err(io::Error::other)?,
        sll_hatype: 0,
        sll_pkttype: 0,
        sll_halen: 0,
        sll_addr: [0; 8],
    };
    let length = libc::socklen_t::try_from(size_of_val(&address)).map_err(io::Error::other)?;
    let fd = socket.as_fd().as_raw_fd();
    // SAFETY: the descriptor is open, and bind(2) reads `length` bytes of `address`, which outlives the call.
    let result = unsafe { libc::bind(fd, (&raw const address).cast(), length) };
    if result == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}
