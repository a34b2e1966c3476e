//! Control connections of all VMs, for read-only queries without a wait for an actor.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use uuid::Uuid;
use vmmd_api::v1::VmStats;
use vmmd_host::{failure::Failure, paced::Paced};

use crate::control::Client;

/// Between two times that a `vmm` counts for clients: however many ask, its guest has the rest.
const PACE: Duration = Duration::from_millis(100);

/// The counters of a VM's `vmm`.
pub type Counted = Paced<Result<VmStats, Failure>>;

/// By the VM's uid; each is kept up to date by the VM's actor.
#[derive(Debug, Default)]
pub struct Clients(Mutex<HashMap<Uuid, (Client, Arc<Counted>)>>);

impl Clients {
    /// Notes how a VM's `vmm` is reached, or that it is not.
    pub fn set(&self, vm: Uuid, client: Option<Client>) {
        let before = match client {
            Some(client) => {
                let counted = Arc::new(Counted::new(PACE));
                self.lock().insert(vm, (client, counted))
            }
            None => self.lock().remove(&vm),
        };
        // Outside of the lock: it may be the connection's end.
        drop(before);
    }

    /// How a VM's `vmm` is reached.
    pub fn get(&self, vm: Uuid) -> Option<Client> {
        self.counting(vm).map(|(client, _)| client)
    }

    /// The same, with the counters of the last look.
    pub fn counting(&self, vm: Uuid) -> Option<(Client, Arc<Counted>)> {
        self.lock().get(&vm).cloned()
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Uuid, (Client, Arc<Counted>)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
