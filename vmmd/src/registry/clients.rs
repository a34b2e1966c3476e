//! The control connections of all VMs, for those who only want to know something: they need not wait for an actor.

use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard, PoisonError},
};

use uuid::Uuid;

use crate::control::Client;

/// By the VM's uid; each is kept up to date by the VM's actor.
#[derive(Debug, Default)]
pub struct Clients(Mutex<HashMap<Uuid, Client>>);

impl Clients {
    /// Notes how a VM's `vmm` is reached, or that it is not.
    pub fn set(&self, vm: Uuid, client: Option<Client>) {
        let before = match client {
            Some(client) => self.lock().insert(vm, client),
            None => self.lock().remove(&vm),
        };
        // Outside of the lock: it may be the connection's end.
        drop(before);
    }

    /// How a VM's `vmm` is reached.
    pub fn get(&self, vm: Uuid) -> Option<Client> {
        self.lock().get(&vm).cloned()
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Uuid, Client>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
