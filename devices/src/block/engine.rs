//! How requests on an image are carried out: they are submitted, and complete later, in any order.

use std::{
    io,
    os::fd::RawFd,
    time::{Duration, Instant},
};

use vmm_sys_util::eventfd::EventFd;

use crate::sys::Iovecs;

/// What is to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Fill the buffers from this byte on.
    Read {
        /// In bytes; the buffers' end lies within the image.
        offset: u64,
    },
    /// Write the buffers from this byte on.
    Write {
        /// In bytes; the buffers' end lies within the image.
        offset: u64,
        /// Completes only when the data is on stable storage.
        stable: bool,
    },
    /// Completes when all writes, discards and zeroings that completed before are on stable storage.
    Flush,
    /// Forget the content of these bytes, to give their space back. What is read there afterwards is undefined; where
    /// the image can't do it nothing happens. It has no buffers.
    Discard {
        /// In bytes.
        offset: u64,
        /// In bytes; the end lies within the image.
        length: u64,
    },
    /// Make these bytes read as zero. It has no buffers.
    WriteZeroes {
        /// In bytes.
        offset: u64,
        /// In bytes; the end lies within the image.
        length: u64,
        /// Their space may be given back.
        unmap: bool,
    },
}

/// A request, with what it works on.
#[derive(Debug)]
pub struct Request {
    /// Says which one it is when it completes. Unique among those under way, and small, as an engine may have a list by it:
    /// the caller counts from 0 and takes those that are free again first. One of 65,536 or more may fail.
    pub token: u32,
    /// What is to be done.
    pub operation: Operation,
    /// Guest memory to read from or write to; comes back, used up, with the completion. It goes through several hands: a
    /// box is moved in one register.
    pub buffers: Box<Iovecs>,
}

/// A request that is done with. The guest memory that it wrote is not marked in the dirty bitmap yet.
#[derive(Debug)]
pub struct Completion {
    /// The request's.
    pub token: u32,
    /// How it went. After an error the buffers' content is undefined.
    pub result: io::Result<()>,
    /// The request's, used up.
    pub buffers: Box<Iovecs>,
}

/// Carries out requests. It is made anywhere, and used by one thread from the first [`commit`](Self::commit) on.
///
/// What completes is taken until [`completed`](Self::completed) gives `None`: only then
/// [`event`](Self::event) tells of the next.
pub trait Engine: Send {
    /// Begins a request; it may wait for [`commit`](Self::commit), and may complete at once. Not more at once than
    /// [`depth`](Self::depth).
    fn submit(&mut self, request: Request);
    /// Hands all that was submitted to the host. Requests that the host does not take complete with the reason.
    fn commit(&mut self) -> io::Result<()>;
    /// A request that completed.
    fn completed(&mut self) -> Option<Completion>;
    /// The same, of those only that are known without asking the host, which may take a system call. `None` says nothing
    /// of others, and the event need not tell of them: [`completed`](Self::completed) is asked later.
    fn at_hand(&mut self) -> Option<Completion>;
    /// Requests submitted of which [`completed`](Self::completed) has not told.
    fn in_flight(&self) -> usize;
    /// Most requests at once.
    fn depth(&self) -> usize;
    /// Readable when requests may have completed since [`completed`](Self::completed) last gave `None`; each completion
    /// after that signals it anew, so that it can be watched edge-triggered and need not be read. It need not tell of what
    /// completes within `submit` and `commit`: `completed` is asked after them. `None` when all have completed as soon as
    /// `commit` returns.
    fn event(&self) -> Option<&EventFd>;
    /// Does what [`commit`](Self::commit) does and sleeps until requests may have completed, `other` is readable, a signal
    /// comes, or `limit` has passed, if there is one. False when it did neither, or not all: who wants to sleep does so
    /// otherwise. `other` has to be readable when [`event`](Self::event) is. Without requests in flight it needs a limit.
    fn commit_and_sleep(&mut self, other: RawFd, limit: Option<Duration>) -> io::Result<bool>;
    /// Whether `other` became readable, once more perhaps, since this was asked last. Known when [`completed`](Self::completed) has given `None`.
    /// Until it was asked, nobody sleeps.
    fn other_called(&mut self) -> bool;
    /// Looks after `other` no more: to be called before who wants to sleep does so otherwise, without requests in flight.
    fn forget_other(&mut self);
    /// Whether requests often have completed as soon as [`commit`](Self::commit) returns.
    fn is_prompt(&self) -> bool;
    /// Waits until a request completes, nothing is under way, or `deadline` passes.
    fn wait(&mut self, deadline: Instant) -> io::Result<()>;
}
