//! System calls without a wrapper in the standard library or rustix: segmentation, settings of
//! ethtool(8), raw frames.
#![allow(unsafe_code)]

use std::{
    io,
    net::UdpSocket,
    os::fd::{AsRawFd, OwnedFd},
};

use anyhow::{Context, Result, ensure};
use rustix::net::{AddressFamily, Protocol, RawProtocol, SocketType, netdevice};

/// Requests of SIOCETHTOOL (linux/ethtool.h).
const GET_STRINGS: u32 = 0x1b;
const GET_SET_INFO: u32 = 0x37;
const GET_FEATURES: u32 = 0x3a;
const SET_FEATURES: u32 = 0x3b;
const GET_CHANNELS: u32 = 0x3c;
const SET_CHANNELS: u32 = 0x3d;
/// The set of the features' names.
const FEATURES: u32 = 4;
/// ETH_GSTRING_LEN.
const NAME: usize = 32;

/// Cuts later sends into datagrams of this many bytes (UDP_SEGMENT); 0 disables the segmentation.
pub fn set_segment(socket: &UdpSocket, bytes: usize) -> Result<()> {
    let bytes = libc::c_int::try_from(bytes)?;
    // SAFETY: the option is an int, which lives for the call.
    let status = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_UDP,
            libc::UDP_SEGMENT,
            (&raw const bytes).cast(),
            4,
        )
    };
    ensure!(status == 0, "UDP_SEGMENT: {}", io::Error::last_os_error());
    Ok(())
}

/// Performs an ethtool request. `words` begins with its number and is as long as its structure,
/// including the part that the kernel fills.
fn ethtool(device: &str, words: &mut [u32]) -> Result<()> {
    let socket = UdpSocket::bind("0.0.0.0:0")?;
    ensure!(
        device.len() < libc::IFNAMSIZ,
        "{device} is no name of an interface"
    );
    // SAFETY: an ifreq of zeroes is valid: its union has a null pointer.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(device.bytes()) {
        *to = from.cast_signed();
    }
    request.ifr_ifru.ifru_data = words.as_mut_ptr().cast();
    // SAFETY: the structure that `words` is large enough for lives for the call, and so does the request.
    let status = unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCETHTOOL, &raw mut request) };
    ensure!(
        status >= 0,
        "ethtool request {:#x} on {device}: {}",
        words[0],
        io::Error::last_os_error()
    );
    Ok(())
}

/// Switches features by name, as `ethtool -K` does. Fails if a feature does not have the requested
/// state afterwards.
pub fn set_features(device: &str, wanted: &[(String, bool)]) -> Result<()> {
    let mut info = [GET_SET_INFO, 0, 1 << FEATURES, 0, 0];
    ethtool(device, &mut info)?;
    let count = info[4] as usize;
    let mut names = vec![0; 3 + count * NAME / 4];
    names[..3].copy_from_slice(&[GET_STRINGS, FEATURES, info[4]]);
    ethtool(device, &mut names)?;
    let names: Vec<u8> = names[3..].iter().flat_map(|word| word.to_ne_bytes()).collect();
    let blocks = count.div_ceil(32);
    let mut set = vec![0; 2 + blocks * 2];
    (set[0], set[1]) = (SET_FEATURES, u32::try_from(blocks)?);
    let mut bits = Vec::new();
    for (name, on) in wanted {
        let is = |found: &[u8]| found.split(|byte| *byte == 0).next() == Some(name.as_bytes());
        let bit = names.chunks_exact(NAME).position(is);
        let bit = bit.with_context(|| format!("{device} knows no feature {name}"))?;
        set[2 + bit / 32 * 2] |= 1 << (bit % 32);
        set[3 + bit / 32 * 2] |= u32::from(*on) << (bit % 32);
        bits.push(bit);
    }
    ethtool(device, &mut set)?;
    let mut now = vec![0; 2 + blocks * 4];
    (now[0], now[1]) = (GET_FEATURES, set[1]);
    ethtool(device, &mut now)?;
    for ((name, on), bit) in wanted.iter().zip(bits) {
        let active = now[4 + bit / 32 * 4] >> (bit % 32) & 1 == 1;
        ensure!(active == *on, "{name} of {device} stays {active}");
    }
    Ok(())
}

/// Has a device use this many pairs of queues, as `ethtool -L DEVICE combined PAIRS` does.
pub fn set_pairs(device: &str, pairs: u32) -> Result<()> {
    let mut channels = [0; 9];
    channels[0] = GET_CHANNELS;
    ethtool(device, &mut channels)?;
    (channels[0], channels[8]) = (SET_CHANNELS, pairs);
    ethtool(device, &mut channels)
}

/// A socket for the frames of a device, each with its Ethernet header.
pub fn frames(device: &str) -> Result<OwnedFd> {
    let all = u16::try_from(libc::ETH_P_ALL)?.to_be();
    let protocol = RawProtocol::new(all.into()).map(Protocol::from_raw);
    let socket = rustix::net::socket(AddressFamily::PACKET, SocketType::RAW, protocol)
        .context("a socket for frames")?;
    let index = netdevice::name_to_index(&socket, device).with_context(|| format!("find {device}"))?;
    // SAFETY: an address of zeroes is valid.
    let mut address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
    address.sll_family = u16::try_from(libc::AF_PACKET)?;
    address.sll_protocol = all;
    address.sll_ifindex = i32::try_from(index)?;
    let length = libc::socklen_t::try_from(size_of_val(&address))?;
    // SAFETY: the address lives for the call and is as long as is said.
    let status = unsafe { libc::bind(socket.as_raw_fd(), (&raw const address).cast(), length) };
    ensure!(status == 0, "bind to {device}: {}", io::Error::last_os_error());
    Ok(socket)
}
