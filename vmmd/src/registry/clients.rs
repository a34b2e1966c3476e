//! Control connections of all VMs, for read-only queries without a wait for an actor.

use std::{
    collections::HashMap,
    os::fd::OwnedFd,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::time::timeout;
use uuid::Uuid;
use vmm_protocol::vmm::{Error as Refusal, request::Op};
use vmmd_api::v1::VmStats;
use vmmd_host::{
    failure::{Failure, Kind},
    paced::Paced,
    text,
};

use crate::control::{self, Client};

/// Between two times that a `vmm` counts for clients: however many ask, its guest has the rest.
const PACE: Duration = Duration::from_millis(100);

/// How long a `vmm` may take for a request of [`Clients::ask`].
const PATIENCE: Duration = Duration::from_secs(5);

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

    /// Sends a `vmm` a request about a device that changes nothing for the VM's actor. Gives the refusal
    /// of the `vmm`, if it refuses.
    ///
    /// # Errors
    ///
    /// Fails as VMM_UNRESPONSIVE when the `vmm` does not answer within 5 s.
    pub async fn ask(&self, vm: Uuid, op: Op, fds: &[OwnedFd]) -> Result<Result<(), Refusal>, Failure> {
        let unresponsive = |why: &str| {
            let message = format!("the vmm of the VM does not answer: {why}");
            Failure::new(Kind::Unavailable, "VMM_UNRESPONSIVE", message)
        };
        let client = self.get(vm).ok_or_else(|| unresponsive("it can't be reached"))?;
        let asked = timeout(PATIENCE, client.request(op, fds)).await;
        match asked.unwrap_or(Err(control::Error::Timeout(PATIENCE))) {
            Ok(_) => Ok(Ok(())),
            Err(control::Error::Refused(refusal)) => Ok(Err(refusal)),
            Err(error) => Err(unresponsive(&text::chain(&error))),
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Uuid, (Client, Arc<Counted>)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
