//! Interface between a console's server and a port, independent of the guest's device.

use std::{
    io,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use vmm_sys_util::eventfd::EventFd;

use super::{history::History, uart::Uart};

/// A port: output that is kept, and input that is taken as there is room.
pub trait Port: Send + Sync {
    /// What was printed.
    fn history(&self) -> Arc<History>;
    /// How many bytes of input may be sent now. After 0 the eventfd of [`room_event`](Self::room_event) is signalled when it
    /// is worth asking again.
    fn room(&self) -> usize;
    /// See [`room`](Self::room). It belongs to one thread, which serves all senders.
    fn room_event(&self) -> io::Result<EventFd>;
    /// Takes input, at most what [`room`](Self::room) said.
    fn receive(&self, input: &[u8]);
}

impl Port for Mutex<Uart> {
    fn history(&self) -> Arc<History> {
        Arc::clone(lock(self).history())
    }

    fn room(&self) -> usize {
        lock(self).room()
    }

    fn room_event(&self) -> io::Result<EventFd> {
        lock(self).room_event()
    }

    fn receive(&self, input: &[u8]) {
        lock(self).receive(input);
    }
}

fn lock(uart: &Mutex<Uart>) -> MutexGuard<'_, Uart> {
    uart.lock().unwrap_or_else(PoisonError::into_inner)
}
