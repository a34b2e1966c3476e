//! Turns at the agents of guests: an agent answers one question after the other.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError, Weak},
    time::Duration,
};

use tokio::sync::{Mutex as Turns, OwnedMutexGuard};
use uuid::Uuid;
use vmmd_api::v1::GuestInfo;
use vmmd_host::{failure::Failure, paced::Paced};

/// A turn at the agent of a VM, until it is dropped.
#[derive(Debug)]
pub struct Turn {
    _turn: OwnedMutexGuard<()>,
    _shared: Arc<Shared>,
}

/// State that all users of an agent share.
#[derive(Debug)]
pub struct Shared {
    turns: Arc<Turns<()>>,
    /// Answers about the guest: callers at the same time get the same one.
    pub info: Paced<Result<GuestInfo, Failure>>,
}

/// All agents that are used or waited for.
#[derive(Debug, Default)]
pub struct Agents(Mutex<HashMap<Uuid, Weak<Shared>>>);

impl Agents {
    /// The agent of the VM `uid`.
    pub fn share(&self, uid: Uuid) -> Arc<Shared> {
        let mut agents = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        agents.retain(|_, shared| shared.strong_count() > 0);
        let known = agents.get(&uid).and_then(Weak::upgrade);
        known.unwrap_or_else(|| {
            let shared = Arc::new(Shared {
                turns: Arc::default(),
                info: Paced::new(Duration::ZERO),
            });
            agents.insert(uid, Arc::downgrade(&shared));
            shared
        })
    }

    /// Waits for a turn at the agent of the VM `uid`, in the order of the calls.
    pub async fn turn(&self, uid: Uuid) -> Turn {
        let shared = self.share(uid);
        Turn {
            _turn: Arc::clone(&shared.turns).lock_owned().await,
            _shared: shared,
        }
    }
}
