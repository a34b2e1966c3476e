//! Turns at the agents of guests: an agent answers one question after the other.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError, Weak},
};

use tokio::sync::{Mutex as Turns, OwnedMutexGuard};
use uuid::Uuid;

/// A turn at the agent of a VM, until it is dropped.
pub type Turn = OwnedMutexGuard<()>;

/// All agents that somebody uses or waits for.
#[derive(Debug, Default)]
pub struct Agents(Mutex<HashMap<Uuid, Weak<Turns<()>>>>);

impl Agents {
    /// Waits for a turn at the agent of the VM `uid`, in the order of the calls.
    pub async fn turn(&self, uid: Uuid) -> Turn {
        let turns = {
            let mut agents = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            agents.retain(|_, turns| turns.strong_count() > 0);
            let known = agents.get(&uid).and_then(Weak::upgrade);
            known.unwrap_or_else(|| {
                let turns = Arc::default();
                agents.insert(uid, Arc::downgrade(&turns));
                turns
            })
        };
        turns.lock_owned().await
    }
}
