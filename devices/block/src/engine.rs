//! How requests on an image are carried out: they are submitted, and complete later, in any order.

use std::{
    io,
    os::fd::RawFd,
    time::{Duration, Instant},
};

use vmm_base::sys::Iovecs;
use vmm_sys_util::eventfd::EventFd;

/// Kind of a request and its arguments.
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
    /// Discard the content of these bytes to free their space. Later reads of the bytes return
    /// undefined data. The request has no effect if the image does not support discards. It has no
    /// buffers.
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

/// A request and its buffers.
#[derive(Debug)]
pub struct Request {
    /// Identifies the request in its completion. Unique among the requests in flight, and small,
    /// because an engine may index a list by it: the caller counts from 0 and reuses freed tokens
    /// first. Tokens of 65,536 or more may fail.
    pub token: u32,
    /// Operation to carry out.
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

/// Carries out requests. Any thread may create an engine, but only one thread uses it from the
/// first [`commit`](Self::commit) on.
///
/// The caller takes completions until [`completed`](Self::completed) returns `None`. Only then does
/// [`event`](Self::event) signal the next one.
///
/// The provided methods are those of an engine that sleeps nowhere but in [`wait`](Self::wait).
pub trait Engine: Send {
    /// Begins a request; it may wait for [`commit`](Self::commit), and may complete at once. Not more at once than
    /// [`depth`](Self::depth).
    fn submit(&mut self, request: Request);
    /// Hands all that was submitted to the host. Requests that the host does not take complete with the reason.
    fn commit(&mut self) -> io::Result<()>;
    /// A request that completed.
    fn completed(&mut self) -> Option<Completion>;
    /// Returns a completed request without a system call, if one is known. `None` does not exclude
    /// further completions, and the event need not signal them: the caller uses
    /// [`completed`](Self::completed) later.
    fn at_hand(&mut self) -> Option<Completion> {
        self.completed()
    }
    /// Requests submitted of which [`completed`](Self::completed) has not told.
    fn in_flight(&self) -> usize;
    /// Most requests at once.
    fn depth(&self) -> usize;
    /// Readable when requests may have completed since [`completed`](Self::completed) last returned
    /// `None`. Each later completion signals the event again, so an edge-triggered watch works
    /// without reading the event. The event need not signal completions within `submit` and
    /// `commit`: the caller checks `completed` after them. `None` if all requests complete before
    /// `commit` returns.
    fn event(&self) -> Option<&EventFd>;
    /// Commits like [`commit`](Self::commit) and sleeps until requests may have completed, `other`
    /// is readable, a signal arrives, or the optional `limit` has passed. Returns false if the
    /// engine did not do both; the caller then sleeps by other means. `other` must be readable
    /// whenever [`event`](Self::event) is. Without requests in flight, a limit is required.
    fn commit_and_sleep(&mut self, _other: RawFd, _limit: Option<Duration>) -> io::Result<bool> {
        Ok(false)
    }
    /// Returns whether `other` became readable since the last call; true may be reported once too
    /// often. The value is valid once [`completed`](Self::completed) has returned `None`. The
    /// engine does not sleep while a true value is pending.
    fn other_called(&mut self) -> bool {
        false
    }
    /// Stops watching `other`. Call it before a sleep by other means without requests in flight.
    fn forget_other(&mut self) {}
    /// Whether requests often have completed as soon as [`commit`](Self::commit) returns.
    fn is_prompt(&self) -> bool {
        true
    }
    /// Waits until a request completes, nothing is under way, or `deadline` passes.
    fn wait(&mut self, deadline: Instant) -> io::Result<()>;
}
