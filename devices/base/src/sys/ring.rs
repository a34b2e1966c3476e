//! An io_uring on one file, with the guest memory that its requests work on (io_uring(7)).
//!
//! Where the kernel can (6.1 and later), completions are gathered by the thread that submits, inside of
//! io_uring_enter, and nowhere else (IORING_SETUP_DEFER_TASKRUN): no other CPU touches the completion queue, and the
//! event can be switched off while that thread is awake. The kernel says in the ring that there is something to
//! gather, and signals the event if it is on; both sides do so behind full barriers, so that no wake-up is lost.
//!
//! There the thread can also sleep inside of io_uring_enter ([`Ring::wait_beside`]), for completions and for one other
//! descriptor, which a poll request in the ring stands for: to hand calls over, sleep and gather is one system call then.

use std::{
    fs::File,
    io,
    os::fd::{AsRawFd, RawFd},
    sync::{
        Arc,
        atomic::{Ordering, fence},
    },
    time::Duration,
};

use io_uring::{IoUring, cqueue, opcode, register::Restriction, squeue, types};
use vmm_sys_util::eventfd::EventFd;

use super::Iovecs;

/// User data of poll requests: this bit, and which one it is. Tags of calls have 32 bits.
const POLL: u64 = 1 << 32;
/// A poll request among the tags of calls.
const POLL_INDEX: u32 = u32::MAX;
/// The file's place among the registered ones.
const FILE: types::Fixed = types::Fixed(0);
/// Above all tags.
const MAX_TAG: u32 = 1 << 16;

/// Operation of the kernel on the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    /// preadv at this byte.
    Read(u64),
    /// pwritev2 at this byte.
    Write {
        /// In bytes.
        offset: u64,
        /// With RWF_DSYNC.
        stable: bool,
    },
    /// fdatasync.
    Sync,
    /// fallocate.
    Allocate {
        /// FALLOC_FL_*.
        mode: i32,
        /// In bytes.
        offset: u64,
        /// In bytes.
        length: u64,
    },
}

/// A call that came back.
#[derive(Debug)]
pub struct Return<T> {
    /// The caller's number for it.
    pub tag: u32,
    /// Result of the system call: a count, or the negative error number.
    pub result: i32,
    /// The value passed to `push`.
    pub held: Held<T>,
}

/// State that a ring keeps for a call.
#[derive(Debug)]
pub struct Held<T> {
    /// The caller's note, returned with the result.
    pub note: T,
    /// Buffers of the call.
    pub buffers: Box<Iovecs>,
}

/// The ring. Only one thread uses it from the first [`submit`](Self::submit) on.
///
/// `T` is the caller's note for each call.
///
/// Invariant: the buffers of each call that the kernel may know are in `held`, at the index that is
/// the call's tag and its user data.
pub struct Ring<T> {
    ring: IoUring,
    event: Arc<EventFd>,
    held: Vec<Option<Held<T>>>,
    /// Calls in `held`.
    under_way: usize,
    /// Tags of calls that were pushed since the last submission, and [`POLL_INDEX`].
    pushed: Vec<u32>,
    /// The kernel takes no calls any more: those in `pushed` can be abandoned.
    dead: bool,
    /// It was made disabled: its thread is the one that enables it.
    disabled: bool,
    /// Completions are gathered in io_uring_enter alone.
    deferred: bool,
    /// The kernel signals the event.
    armed: bool,
    /// Number of the poll request that is in the ring.
    poll: Option<u32>,
    /// Number of the next poll request.
    next_poll: u32,
    /// It has found something.
    called: bool,
}

impl<T> std::fmt::Debug for Ring<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ring")
            .field("under_way", &self.under_way())
            .field("deferred", &self.deferred)
            .finish_non_exhaustive()
    }
}

impl<T> Ring<T> {
    /// A ring on `file` for up to `depth` calls at once. `event`, which must not block, is signalled when calls come back.
    ///
    /// Fails with ENOSYS or EPERM where io_uring is not there or forbidden.
    pub fn new(file: &File, depth: u32, event: Arc<EventFd>) -> io::Result<Self> {
        match Self::made(file, depth, Arc::clone(&event), true) {
            // A kernel before 6.1.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => Self::made(file, depth, event, false),
            result => result,
        }
    }

    /// As kernels before 6.1 do it: completions come from everywhere, the event is always on.
    #[cfg(any(test, feature = "testing"))]
    pub fn undeferred(file: &File, depth: u32, event: Arc<EventFd>) -> io::Result<Self> {
        Self::made(file, depth, event, false)
    }

    fn made(file: &File, depth: u32, event: Arc<EventFd>, deferred: bool) -> io::Result<Self> {
        let ring = if deferred {
            IoUring::builder()
                .setup_submit_all()
                .setup_single_issuer()
                .setup_defer_taskrun()
                .setup_taskrun_flag()
                .setup_r_disabled()
                .build(depth)?
        } else {
            IoUring::builder().setup_r_disabled().build(depth)?
        };
        let submitter = ring.submitter();
        submitter.register_files(&[file.as_raw_fd()])?;
        submitter.register_eventfd(event.as_raw_fd())?;
        restrict(&ring)?;
        if !deferred {
            submitter.register_enable_rings()?;
        }
        Ok(Self {
            ring,
            event,
            held: Vec::new(),
            under_way: 0,
            pushed: Vec::new(),
            dead: false,
            disabled: deferred,
            deferred,
            armed: true,
            poll: None,
            next_poll: 0,
            called: false,
        })
    }

    /// Readable when calls may have come back that [`returned`](Self::returned) has not given, once it has given `None`.
    pub fn event(&self) -> &Arc<EventFd> {
        &self.event
    }

    /// Calls that [`returned`](Self::returned) has not given.
    pub fn under_way(&self) -> usize {
        self.under_way
    }

    /// Puts a call into the ring; `patient` hands it to a kernel thread that may wait. Returns
    /// `held` with an error if the ring is full even after a submission, if a call with that tag is
    /// under way, or if the tag is 65,536 or more. A list is indexed by the tag.
    pub fn push(
        &mut self,
        tag: u32,
        call: Call,
        held: Held<T>,
        patient: bool,
    ) -> Result<(), (Held<T>, io::Error)> {
        let index = tag as usize;
        if index >= self.held.len() && tag < MAX_TAG {
            self.held.resize_with(index.saturating_add(1), || None);
        }
        if self.held.get(index).is_none_or(Option::is_some) {
            return Err((held, io::ErrorKind::InvalidInput.into()));
        }
        if !self.enqueue(tag, call, &held.buffers, patient) {
            // It is full.
            let pushed = self
                .submit()
                .and_then(|()| match self.enqueue(tag, call, &held.buffers, patient) {
                    true => Ok(()),
                    false => Err(io::ErrorKind::ResourceBusy.into()),
                });
            if let Err(error) = pushed {
                return Err((held, error));
            }
        }
        self.pushed.push(tag);
        if let Some(place) = self.held.get_mut(index) {
            *place = Some(held);
        }
        self.under_way = self.under_way.saturating_add(1);
        Ok(())
    }

    /// Puts the entry of a call into the submission queue; false if the queue is full.
    ///
    /// The entry is rebuilt for each try: no pointer to it exists, so the compiler builds it in
    /// registers.
    #[inline(always)]
    fn enqueue(&mut self, tag: u32, call: Call, buffers: &Iovecs, patient: bool) -> bool {
        let mut entry = build(call, buffers).user_data(tag.into());
        if patient {
            entry = entry.flags(squeue::Flags::ASYNC);
        }
        // SAFETY: `buffers` owns everything that the entry points to: the list of pieces on the
        // heap, which does not move, and mappings of guest memory. Both live in `self.held` until
        // the call has returned (or are leaked, see `drop`), and no Rust reference into guest
        // memory exists. The file is registered with the ring.
        unsafe { self.ring.submission().push(&entry) }.is_ok()
    }

    /// Takes the state of a call that is not under way any more.
    fn release(&mut self, tag: u32) -> Option<Held<T>> {
        let held = self.held.get_mut(tag as usize)?.take()?;
        self.under_way = self.under_way.saturating_sub(1);
        Some(held)
    }

    /// Hands all pushed calls to the kernel with one system call, or without one if there are none.
    /// After EAGAIN, EBUSY and ENOMEM the caller can try again; after another error the ring takes
    /// no further calls, see [`abandoned`](Self::abandoned).
    pub fn submit(&mut self) -> io::Result<()> {
        if self.pushed.is_empty() {
            return Ok(());
        }
        let result = self.enter();
        self.note_handed();
        if let Err(error) = &result {
            self.dead |= !is_passing(error);
        }
        result
    }

    /// Forgets those in `pushed` that the kernel has taken, which it does in order.
    fn note_handed(&mut self) {
        let left = self.ring.submission().len();
        self.pushed.drain(..self.pushed.len().saturating_sub(left));
    }

    fn enter(&mut self) -> io::Result<()> {
        if self.dead {
            return Err(io::Error::from_raw_os_error(libc::EBADFD));
        }
        self.wake_up()?;
        loop {
            match self.ring.submit() {
                Ok(_) if self.ring.submission().is_empty() => return Ok(()),
                Ok(0) => return Err(io::Error::from_raw_os_error(libc::EBUSY)),
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Prepares for an awake thread, which gathers completions on its own.
    fn wake_up(&mut self) -> io::Result<()> {
        if self.disabled {
            self.ring.submitter().register_enable_rings()?;
            self.disabled = false;
        }
        if self.deferred && std::mem::take(&mut self.armed) {
            self.ring.completion().disable_eventfd();
        }
        Ok(())
    }

    /// A call that the kernel never saw and never will, with its tag.
    pub fn abandoned(&mut self) -> Option<(u32, Held<T>)> {
        if !self.dead {
            return None;
        }
        loop {
            let tag = self.pushed.pop()?;
            // A poll request holds no state.
            if let Some(held) = self.release(tag) {
                return Some((tag, held));
            }
        }
    }

    /// A call that came back. Makes a system call only where the kernel has something to gather.
    pub fn returned(&mut self) -> Option<Return<T>> {
        loop {
            if let Some(back) = self.at_hand() {
                return Some(back);
            }
            if self.under_way() == 0 {
                return None;
            }
            let (taskrun, overflow) = {
                let queue = self.ring.submission();
                (queue.taskrun(), queue.cq_overflow())
            };
            if taskrun || overflow {
                self.gather()?;
            } else if self.armed {
                return None;
            } else {
                self.ring.completion().enable_eventfd();
                // The kernel sets its flag, then looks whether the event is on.
                fence(Ordering::SeqCst);
                self.armed = true;
            }
        }
    }

    /// Returns a completed call from the completion queue. `None` does not exclude further
    /// completions in the kernel, and the event need not signal them: the caller uses
    /// [`returned`](Self::returned) later.
    #[inline]
    pub fn at_hand(&mut self) -> Option<Return<T>> {
        loop {
            let entry = self.ring.completion().next()?;
            if let Some(number) = poll_number(&entry) {
                if self.poll == Some(number) {
                    self.called = true;
                    if !cqueue::more(entry.flags()) {
                        self.poll = None;
                    }
                }
                continue;
            }
            let tag = u32::try_from(entry.user_data()).ok()?;
            let held = self.release(tag)?;
            return Some(Return {
                tag,
                result: entry.result(),
                held,
            });
        }
    }

    /// Moves the kernel's pending completions into the completion queue. `None` on an error.
    fn gather(&self) -> Option<()> {
        const GET_EVENTS: u32 = 1;
        // SAFETY: submits nothing, waits for nothing, and passes no argument.
        match unsafe {
            self.ring
                .submitter()
                .enter::<libc::sigset_t>(0, 0, GET_EVENTS, None)
        } {
            Ok(_) => Some(()),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Some(()),
            Err(error) => {
                tracing::error!(%error, "io_uring gives no completions");
                None
            }
        }
    }
}

/// Sleep inside of io_uring_enter, for calls and for one other descriptor.
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

impl<T> Drop for Ring<T> {
    fn drop(&mut self) {
        // The file would else be closed some time after the ring. Another thread than the ring's can't do that.
        let _later = self.ring.submitter().unregister_files();
        if self.under_way() > 0 {
            // The kernel may continue to use guest memory and the lists without a time limit.
            std::mem::forget(std::mem::take(&mut self.held));
        }
    }
}

/// Restricts a ring that is not enabled yet to the operations of this module, because seccomp
/// filters do not see operations of a ring (io_uring_register(2), IORING_REGISTER_RESTRICTIONS).
/// The kernel completes other requests with EACCES.
fn restrict(ring: &IoUring) -> io::Result<()> {
    // linux/io_uring.h; the crate does not name them.
    const IORING_UNREGISTER_FILES: u8 = 3;
    const IORING_REGISTER_SYNC_CANCEL: u8 = 24;
    let flags = squeue::Flags::FIXED_FILE | squeue::Flags::ASYNC;
    let mut allowed = vec![
        Restriction::register_op(IORING_UNREGISTER_FILES),
        Restriction::register_op(IORING_REGISTER_SYNC_CANCEL),
        Restriction::sqe_flags_allowed(flags.bits()),
    ];
    let calls = OPCODES.into_iter().chain([opcode::PollAdd::CODE]);
    allowed.extend(calls.map(Restriction::sqe_op));
    match ring.submitter().register_restrictions(&mut allowed) {
        // A kernel that does not know one of the operations, which is none that it could be asked for then.
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
            allowed.remove(1);
            ring.submitter().register_restrictions(&mut allowed)
        }
        result => result,
    }
}

/// Whether the kernel may take calls again after that.
fn is_passing(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::EAGAIN | libc::EBUSY | libc::ENOMEM)
    )
}

/// Which poll request that is the completion of, if it is one.
fn poll_number(entry: &cqueue::Entry) -> Option<u32> {
    let number = entry.user_data().checked_sub(POLL)?;
    u32::try_from(number).ok()
}

/// The operations of the entries that [`build`] makes.
const OPCODES: [u8; 6] = [
    opcode::Read::CODE,
    opcode::Readv::CODE,
    opcode::Write::CODE,
    opcode::Writev::CODE,
    opcode::Fsync::CODE,
    opcode::Fallocate::CODE,
];

/// The entry that makes a call on the file and `buffers`. It points to these.
fn build(call: Call, buffers: &Iovecs) -> squeue::Entry {
    match call {
        Call::Read(offset) => match buffers.only() {
            Some((base, length)) => opcode::Read::new(FILE, base, length).offset(offset).build(),
            None => {
                let (entries, count) = buffers.window();
                opcode::Readv::new(FILE, entries, count).offset(offset).build()
            }
        },
        Call::Write { offset, stable } => {
            let flags = if stable { libc::RWF_DSYNC } else { 0 };
            match buffers.only() {
                Some((base, length)) => opcode::Write::new(FILE, base, length)
                    .offset(offset)
                    .rw_flags(flags)
                    .build(),
                None => {
                    let (entries, count) = buffers.window();
                    opcode::Writev::new(FILE, entries, count)
                        .offset(offset)
                        .rw_flags(flags)
                        .build()
                }
            }
        }
        Call::Sync if cfg!(feature = "mutation-flush") => {
            opcode::Read::new(FILE, std::ptr::null_mut(), 0).build()
        }
        Call::Sync => opcode::Fsync::new(FILE)
            .flags(types::FsyncFlags::DATASYNC)
            .build(),
        Call::Allocate { mode, offset, length } => opcode::Fallocate::new(FILE, length)
            .offset(offset)
            .mode(mode)
            .build(),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::arithmetic_side_effects)]
mod tests;
