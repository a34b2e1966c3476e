//! An engine that does each request at once, on the thread that submits it.

use std::{collections::VecDeque, fs::File, io, sync::Arc, time::Instant};

use rustix::fs::{FallocateFlags, fallocate};
use vmm_sys_util::eventfd::EventFd;

use super::engine::{Completion, Engine, Operation, Request};

/// Works on a file with preadv and pwritev, straight from and into guest memory.
#[derive(Debug)]
pub(super) struct SyncEngine {
    file: Arc<File>,
    done: VecDeque<Completion>,
}

impl SyncEngine {
    pub(super) fn new(file: Arc<File>) -> Self {
        Self {
            file,
            done: VecDeque::new(),
        }
    }
}

fn punch(file: &File, offset: u64, length: u64) -> io::Result<()> {
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    fallocate(file, flags, offset, length).map_err(io::Error::from)
}

impl Engine for SyncEngine {
    fn submit(&mut self, request: Request) {
        let Request {
            token,
            operation,
            mut buffers,
        } = request;
        let result = match operation {
            Operation::Read { offset } => buffers.read_exact_at(&self.file, offset),
            Operation::Write { offset, stable } => buffers.write_all_at(&self.file, offset, stable),
            Operation::Flush => self.file.sync_data(),
            Operation::Discard { offset, length } => punch(&self.file, offset, length),
            Operation::WriteZeroes {
                offset,
                length,
                unmap: _,
            } => punch(&self.file, offset, length),
        };
        self.done.push_back(Completion {
            token,
            result,
            buffers,
        });
    }

    fn commit(&mut self) -> io::Result<()> {
        Ok(())
    }

    fn completed(&mut self) -> Option<Completion> {
        self.done.pop_front()
    }

    fn in_flight(&self) -> usize {
        self.done.len()
    }

    /// One: the requester is told of each before the next delays it.
    fn depth(&self) -> usize {
        1
    }

    fn event(&self) -> Option<&EventFd> {
        None
    }

    fn wait(&mut self, _deadline: Instant) -> io::Result<()> {
        Ok(())
    }
}
