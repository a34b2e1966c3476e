//! Sleeping inside of io_uring_enter, for calls and for one other descriptor.

use std::{
    io,
    os::fd::RawFd,
    sync::atomic::{Ordering, fence},
    time::Duration,
};

use io_uring::{opcode, types};

use super::{POLL, POLL_INDEX, Ring};

impl<T> Ring<T> {
    /// Hands all pushed calls to the kernel and waits until a call returns, `other` is readable, a
    /// signal arrives, or `limit` has passed. Returns false without waiting if the ring does not
    /// support this wait, if the result of [`other_called`](Self::other_called) is pending, or if
    /// the kernel takes no calls, which [`submit`](Self::submit) then reports.
    ///
    /// From the first call on `other` is polled until [`forget_other`](Self::forget_other).
    /// [`other_called`](Self::other_called) reports each time that `other` becomes readable, or is
    /// signalled again while readable. So no read of `other` is needed in between.
    pub fn wait_beside(&mut self, other: RawFd, limit: Option<Duration>) -> io::Result<bool> {
        if !self.deferred || self.dead || self.called {
            return Ok(false);
        }
        self.wake_up()?;
        if self.poll.is_none() {
            let events = u32::try_from(libc::POLLIN).unwrap_or(0);
            let entry = opcode::PollAdd::new(types::Fd(other), events)
                .multi(true)
                .build()
                .user_data(POLL | u64::from(self.next_poll));
            // SAFETY: the entry points to no memory. The kernel holds on to the descriptor's file as long as it polls.
            if unsafe { self.ring.submission().push(&entry) }.is_err() {
                return self.stay_awake();
            }
            self.pushed.push(POLL_INDEX);
            self.poll = Some(self.next_poll);
            self.next_poll = self.next_poll.wrapping_add(1);
        }
        let result = match limit {
            None => self.ring.submit_and_wait(1),
            Some(limit) => {
                let limit = types::Timespec::from(limit);
                let arguments = types::SubmitArgs::new().timespec(&limit);
                self.ring.submitter().submit_with_args(1, &arguments)
            }
        };
        self.note_handed();
        match result {
            Ok(_) => Ok(true),
            Err(error) if matches!(error.raw_os_error(), Some(libc::ETIME | libc::EINTR)) => Ok(true),
            // It may pass (EAGAIN, EBUSY).
            Err(_) => self.stay_awake(),
        }
    }

    /// Returns without a sleep. The event wakes a thread that sleeps by other means then, also for
    /// completions from the time while the event was off.
    fn stay_awake(&mut self) -> io::Result<bool> {
        self.ring.completion().enable_eventfd();
        fence(Ordering::SeqCst);
        self.armed = true;
        // Full only when it is readable anyway.
        let _full = self.event.write(1);
        Ok(false)
    }

    /// Whether what [`wait_beside`](Self::wait_beside) polls became readable, since this was asked last. Known once
    /// [`returned`](Self::returned) has given `None`.
    pub fn other_called(&mut self) -> bool {
        std::mem::take(&mut self.called)
    }

    /// Stops polling `other`.
    pub fn forget_other(&mut self) {
        self.called = false;
        if let Some(number) = self.poll.take() {
            let which = types::CancelBuilder::user_data(POLL | u64::from(number));
            // A poll request that is already gone has its completion under way to the queue, and
            // its number is ignored there.
            let _gone = self.ring.submitter().register_sync_cancel(None, which);
            if self.under_way() == 0 {
                // The poll request's own completion would end the next wait.
                let _gathered = self.gather();
                let _none = self.at_hand();
            }
        }
    }
}
