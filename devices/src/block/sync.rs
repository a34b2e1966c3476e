//! An engine that does each request at once, on the thread that submits it.

use std::{collections::VecDeque, fs::File, io, sync::Arc, time::Instant};

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
