//! Queue of replies and events from the driver to the clients.

use std::{
    os::fd::OwnedFd,
    sync::{Arc, mpsc::Sender},
};

use vmm_core::lifecycle::{Answer, Failure, Token, publisher::Audience};
use vmm_protocol::vmm::Event;

/// Message from the driver to the clients.
#[derive(Debug)]
pub(super) enum Outgoing {
    Event(Event),
    Reply(Token, Result<Answer, Failure>),
    Finish,
}

/// The driver's way to the clients.
#[derive(Clone, Debug)]
pub struct Outbox {
    outgoing: Sender<Outgoing>,
    wake: Arc<OwnedFd>,
}

impl Outbox {
    /// Puts into `outgoing`, and signals `wake` each time.
    pub(super) fn new(outgoing: Sender<Outgoing>, wake: Arc<OwnedFd>) -> Self {
        Self { outgoing, wake }
    }

    fn put(&self, outgoing: Outgoing) {
        // Both fail only when the control thread is gone, and with it all clients.
        let _ = self.outgoing.send(outgoing);
        let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
    }

    /// Lets the thread end after the clients received their pending data, or after a short time
    /// limit.
    pub fn finish(&self) {
        self.put(Outgoing::Finish);
    }
}

impl Audience for Outbox {
    fn event(&self, event: Event) {
        self.put(Outgoing::Event(event));
    }

    fn reply(&self, token: Token, answer: Result<Answer, Failure>) {
        self.put(Outgoing::Reply(token, answer));
    }
}
