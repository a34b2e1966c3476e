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
    /// Hands what was pushed to the kernel and waits until a call comes back, `other` is readable, a signal comes, or
    /// `limit` has passed. False when it did not wait: the ring can't wait for both, or the kernel takes nothing, which
    /// [`submit`](Self::submit) finds out about.
    ///
    /// From then on `other` is polled until [`forget_other`](Self::forget_other): each time that it becomes readable, or would
    /// if it were not, [`other_called`](Self::other_called) tells. Nobody needs to read it in between.
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

    /// There was no sleep: who sleeps otherwise then is woken by the event, also for what came while that was off.
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

    /// Nothing is polled any more.
    pub fn forget_other(&mut self) {
        self.called = false;
        if let Some(number) = self.poll.take() {
            let which = types::CancelBuilder::user_data(POLL | u64::from(number));
            // If it is not there any more, it is on its way to the completion queue, where nobody knows it.
            let _gone = self.ring.submitter().register_sync_cancel(None, which);
            if self.under_way() == 0 {
                // The poll request's own completion would end the next wait.
                let _gathered = self.gather();
                let _none = self.at_hand();
            }
        }
    }
}
