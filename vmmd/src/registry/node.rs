//! Durable settings of the node's operator: labels, cordon. Changes are serialized, and written to
//! the store first.

use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::watch;
use uuid::Uuid;
use vmmd_api::v1::Preconditions;
use vmmd_host::failure::Failure;
use vmmd_objects::request::preconditions;
use vmmd_store::store_failure;
use vmmd_store::{NodeRecord, Store};

/// The state.
#[derive(Debug)]
pub struct State {
    store: Store,
    record: Mutex<NodeRecord>,
    /// Held during a change.
    writer: tokio::sync::Mutex<()>,
    /// Counts changes, those of conditions too.
    news: watch::Sender<u64>,
}

impl State {
    /// As the store has it.
    pub fn new(store: Store, record: NodeRecord) -> Self {
        Self {
            store,
            record: Mutex::new(record),
            writer: tokio::sync::Mutex::default(),
            news: watch::Sender::new(0),
        }
    }

    /// Assigns the node's permanent UUID unless the node already has one.
    pub async fn identify(&self) -> Result<(), Failure> {
        let identified = self.change(|record| {
            if record.uid.is_empty() {
                record.uid = Uuid::new_v4().into_bytes().to_vec();
            }
            Ok(())
        });
        identified.await.map(drop)
    }

    /// Changes with each change of it.
    pub fn news(&self) -> watch::Receiver<u64> {
        self.news.subscribe()
    }

    /// What it is.
    pub fn record(&self) -> NodeRecord {
        self.lock().clone()
    }

    /// Changes it. Durable on return; true when anything was changed.
    pub async fn change(
        &self,
        change: impl FnOnce(&mut NodeRecord) -> Result<(), Failure>,
    ) -> Result<bool, Failure> {
        self.change_if(&Preconditions::default(), change).await
    }

    /// Changes it if `wanted` is true of it. The generation is compared only when something changes: a retry of a request that has
    /// changed the generation itself succeeds.
    pub async fn change_if(
        &self,
        wanted: &Preconditions,
        change: impl FnOnce(&mut NodeRecord) -> Result<(), Failure>,
    ) -> Result<bool, Failure> {
        let _writer = self.writer.lock().await;
        let mut record = self.record();
        let system = rustix::system::uname();
        let name = system.nodename().to_string_lossy();
        let mut present = Preconditions {
            uid: Uuid::from_slice(&record.uid).unwrap_or_default().to_string(),
            generation: None,
        };
        preconditions::check("node", name.as_ref(), wanted, &present)?;
        change(&mut record)?;
        {
            let before = self.lock();
            if record == *before {
                return Ok(false);
            }
            present.generation = Some(before.generation);
            preconditions::check("node", name.as_ref(), wanted, &present)?;
            let same = record.labels == before.labels
                && record.cordoned == before.cordoned
                && record.cordon_reason == before.cordon_reason;
            record.generation = before.generation + u64::from(!same);
        }
        self.store.put_node(&record).await.map_err(store_failure)?;
        *self.lock() = record;
        self.news.send_modify(|changes| *changes += 1);
        Ok(true)
    }

    /// Whether a drain is under way.
    pub fn is_draining(&self) -> bool {
        self.lock().draining
    }

    /// Refused as NODE_CORDONED while no VM is to be made or started here.
    pub fn schedulable(&self) -> Result<(), Failure> {
        let record = self.lock();
        if !record.cordoned {
            return Ok(());
        }
        let why = match record.cordon_reason.as_str() {
            "" => String::new(),
            reason => format!(" ({reason})"),
        };
        let message = format!(
            "the node is cordoned{why}: no VM is created or placed here until it is uncordoned; VMs that run here continue, also over restarts"
        );
        Err(Failure::precondition("NODE_CORDONED", message))
    }

    fn lock(&self) -> MutexGuard<'_, NodeRecord> {
        self.record.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
