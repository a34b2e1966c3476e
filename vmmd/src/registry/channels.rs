//! Clients of channels: each channel of a VM has one at a time.

use std::{
    collections::HashSet,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use uuid::Uuid;

type Taken = HashSet<(Uuid, String)>;

/// The channels that have clients.
#[derive(Debug, Default)]
pub struct Channels(Arc<Mutex<Taken>>);

/// The client of a channel, until it is dropped.
#[derive(Debug)]
pub struct ChannelClient {
    taken: Arc<Mutex<Taken>>,
    channel: (Uuid, String),
}

impl Channels {
    /// Takes a channel for a client; `None` while another client has it.
    pub fn take(&self, vm: Uuid, name: &str) -> Option<ChannelClient> {
        let channel = (vm, name.to_owned());
        lock(&self.0).insert(channel.clone()).then(|| ChannelClient {
            taken: Arc::clone(&self.0),
            channel,
        })
    }
}

impl Drop for ChannelClient {
    fn drop(&mut self) {
        lock(&self.taken).remove(&self.channel);
    }
}

fn lock(taken: &Mutex<Taken>) -> MutexGuard<'_, Taken> {
    taken.lock().unwrap_or_else(PoisonError::into_inner)
}
