//! Waiting for one event.

use std::{
    io,
    os::fd::{AsRawFd, BorrowedFd},
    time::Instant,
};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use vmm_sys_util::eventfd::EventFd;

/// Its descriptor, which the type of the library does not lend.
pub fn event_fd(event: &EventFd) -> BorrowedFd<'_> {
    // SAFETY: the descriptor is open as long as the event lives, which the result does not outlive.
    unsafe { BorrowedFd::borrow_raw(event.as_raw_fd()) }
}

/// Waits until `event` is on, `deadline` passes, or a signal comes; turns the event off.
pub fn wait_for(event: &EventFd, deadline: Instant) -> io::Result<()> {
    let fd = event_fd(event);
    let left = deadline.saturating_duration_since(Instant::now());
    // A time too long for the type means no timeout.
    let timeout = Timespec::try_from(left).ok();
    match poll(&mut [PollFd::new(&fd, PollFlags::IN)], timeout.as_ref()) {
        Ok(0) | Err(rustix::io::Errno::INTR) => Ok(()),
        Ok(_) => {
            // Another thread may have read the event; it is reset in that case too.
            let _count = event.read();
            Ok(())
        }
        Err(errno) => Err(errno.into()),
    }
}
