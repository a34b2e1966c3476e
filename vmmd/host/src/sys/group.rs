//! Groups: their ids, from the name service of the node (NSS: files, LDAP, systemd), and the groups
//! of a peer.

use std::{
    ffi::{CStr, CString},
    io, mem,
    os::fd::{AsFd, AsRawFd},
    ptr,
};

/// Largest entry of a group in bytes: names of all its members.
const LARGEST: usize = 1 << 20;

/// The id of a group; `None` when there is none of this name. Blocking: a name service may ask a server.
pub fn group_id(name: &str) -> io::Result<Option<u32>> {
    let Ok(name) = CString::new(name) else {
        return Ok(None);
    };
    let mut size = 1024;
    loop {
        match look_up(&name, size) {
            Err(error) if error.raw_os_error() == Some(libc::ERANGE) && size < LARGEST => size *= 4,
            result => return result,
        }
    }
}

fn look_up(name: &CStr, size: usize) -> io::Result<Option<u32>> {
    let mut buffer: Vec<libc::c_char> = vec![0; size];
    // SAFETY: all zeroes are a value of this structure of numbers and pointers.
    let mut group: libc::group = unsafe { mem::zeroed() };
    let mut found = ptr::null_mut();
    // SAFETY: the name ends with a NUL, the buffer has the length that is given, and all of them outlive the call.
    let code = unsafe {
        libc::getgrnam_r(
            name.as_ptr(),
            &raw mut group,
            buffer.as_mut_ptr(),
            buffer.len(),
            &raw mut found,
        )
    };
    match code {
        0 if found.is_null() => Ok(None),
        0 => Ok(Some(group.gr_gid)),
        // getgrnam(3): what some name services say of a name that they don't know.
        libc::ENOENT | libc::ESRCH => Ok(None),
        code => Err(io::Error::from_raw_os_error(code)),
    }
}

/// The supplementary groups that the process at the other end of a UNIX socket had when it connected (SO_PEERGROUPS,
/// socket(7)).
pub fn peer_groups(socket: impl AsFd) -> io::Result<Vec<u32>> {
    // NGROUPS_MAX is 65,536.
    let mut groups: Vec<libc::gid_t> = vec![0; 1 << 16];
    let mut length = libc::socklen_t::try_from(mem::size_of_val(groups.as_slice())).unwrap_or(0);
    // SAFETY: the buffer is as long as `length` says, and both outlive the call.
    let code = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERGROUPS,
            groups.as_mut_ptr().cast(),
            &raw mut length,
        )
    };
    if code != 0 {
        return Err(io::Error::last_os_error());
    }
    groups.truncate(usize::try_from(length).unwrap_or(0) / mem::size_of::<libc::gid_t>());
    Ok(groups)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_are_found_by_name() {
        assert_eq!(group_id("root").unwrap(), Some(0));
        assert_eq!(group_id("nonexistent-group").unwrap(), None);
        assert_eq!(group_id("a\0b").unwrap(), None);
    }

    #[test]
    fn the_groups_of_a_peer_are_its_own() {
        let (here, _there) = std::os::unix::net::UnixStream::pair().unwrap();
        let mut own: Vec<_> = rustix::process::getgroups()
            .unwrap()
            .iter()
            .map(|gid| gid.as_raw())
            .collect();
        let mut told = peer_groups(&here).unwrap();
        own.sort_unstable();
        told.sort_unstable();
        assert_eq!(told, own);
    }
}
