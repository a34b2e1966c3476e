//! All VMs of the node by name, with the last state that each actor published. A read does not wait for an actor.

pub mod command;

use std::{
    collections::{BTreeMap, BTreeSet},
    pin::pin,
    sync::Arc,
};

use tokio::sync::{Notify, watch};
use uuid::Uuid;
use vmmd_api::v1::{self, ObjectMetadata};
use vmmd_host::failure::Failure;
use vmmd_objects::registry::{Kind, Objects, Record, Registry};
use vmmd_spec::pod::PodUid;
use vmmd_store::{DeletionRecords, HandoverRecord, Tombstone, handover};

use crate::registry::{pods::HAS_VM, vms::command::Mailbox};

/// The VMs.
#[derive(Debug, Default)]
pub struct Vms {
    /// All VMs.
    pub registry: Registry<VmKind>,
    /// Some name or pod is not reserved any more.
    released: Notify,
    /// Some NIC is gone, or a VM that had some, or floating addresses of a VM begin or end.
    nics_gone: Notify,
}

/// VMs.
#[derive(Clone, Debug, PartialEq)]
pub enum VmKind {}

/// A VM as its actor published it. Its store record belongs to the actor.
#[derive(Clone, Debug, PartialEq)]
pub struct Published {
    uid: Uuid,
    name: String,
    /// Run and revision of its creation.
    made: (u64, u64),
    /// Uid of the pod that has it.
    pod: Option<String>,
    /// Its state.
    pub vm: Arc<v1::Vm>,
}

/// Names and pods of VMs.
#[derive(Debug, Default)]
pub struct Claims {
    /// Names of VMs that are being made.
    names: BTreeSet<String>,
    /// Pods of VMs that are being made.
    pods: BTreeSet<String>,
    /// Names of VMs, by the uids of their pods.
    by_pod: BTreeMap<String, String>,
}

/// The way to a VM.
#[derive(Debug, Default)]
pub struct Reach {
    /// Missing for a moment while a VM is added.
    entry: Option<Entry>,
    /// Number of failures of the VM's task.
    failures: u32,
}

/// How a VM is reached.
#[derive(Clone, Debug)]
pub struct Entry {
    /// The VM.
    pub uid: Uuid,
    /// Its actor.
    pub mailbox: Mailbox,
    /// Last state that the actor published.
    pub state: watch::Receiver<Arc<v1::Vm>>,
}

/// Reservation of a name and a pod until it is dropped.
#[derive(Debug)]
pub struct Reservation<'a> {
    vms: &'a Vms,
    name: String,
    pod: Option<String>,
}

impl Kind for VmKind {
    const NAME: &'static str = "VM";
    const A: &'static str = "a VM";
    const EXISTS: &'static str = "VM_EXISTS";
    const NOT_FOUND: &'static str = "VM_NOT_FOUND";
    type Record = Published;
    type State = Reach;
    type Index = Claims;
    type View = ();

    fn view(_: &Objects<Self>, _: &Published, _: &Reach) {}

    fn enter(claims: &mut Claims, record: &Published) {
        if let Some(pod) = &record.pod {
            claims.by_pod.insert(pod.clone(), record.name.clone());
        }
    }

    fn leave(claims: &mut Claims, record: &Published) {
        if let Some(pod) = &record.pod {
            claims.by_pod.remove(pod);
        }
    }
}

impl Record for Published {
    fn uid(&self) -> &[u8] {
        self.uid.as_bytes()
    }

    fn name(&self) -> &str {
        &self.name
    }

    fn metadata(&self) -> ObjectMetadata {
        self.vm.metadata.clone().unwrap_or_default()
    }

    fn made(&self) -> (u64, u64) {
        self.made
    }

    /// The generation is in the VM's own record.
    fn begin(&mut self, _: u64, made: (u64, u64)) {
        self.made = made;
    }
}

impl vmmd_network::Users for Vms {
    fn vms(&self) -> Vec<Arc<v1::Vm>> {
        self.list()
    }

    fn vm(&self, uid: Uuid) -> Option<Arc<v1::Vm>> {
        let vms = self.registry.lock();
        let record = vms.get(vms.name_of(uid.as_bytes())?)?;
        Some(Arc::clone(&record.vm))
    }
}

impl Vms {
    /// Creates a registry without VMs; see [`Registry::new`].
    pub fn new(run: u64, nonces: BTreeMap<u64, u64>, history: DeletionRecords) -> Self {
        Self {
            registry: Registry::new(run, nonces, history),
            ..Self::default()
        }
    }

    /// The VM of this name.
    pub fn get(&self, name: &str) -> Option<Entry> {
        self.registry.lock().state(name)?.entry.clone()
    }

    /// The VM with this UUID.
    pub fn find(&self, uid: Uuid) -> Option<Entry> {
        let vms = self.registry.lock();
        vms.state(vms.name_of(uid.as_bytes())?)?.entry.clone()
    }

    /// The VM of the pod with this uid.
    pub fn of_pod(&self, uid: &str) -> Option<Entry> {
        let vms = self.registry.lock();
        vms.state(vms.index.by_pod.get(uid)?)?.entry.clone()
    }

    /// Refused as POD_HAS_VM when a VM has the pod with this uid.
    pub fn check_pod(&self, uid: &str) -> Result<(), Failure> {
        check_pod(&self.registry.lock(), uid)
    }

    /// Whether the VM of the pod with this uid has moved to another node, as far as that is remembered.
    pub fn moved_from(&self, uid: &str) -> bool {
        self.registry.lock().feed().moved_from(uid)
    }

    /// The states of all VMs, by name.
    pub fn list(&self) -> Vec<Arc<v1::Vm>> {
        let vms = self.registry.lock();
        vms.records().map(|record| Arc::clone(&record.vm)).collect()
    }

    /// Run of the daemon and revision.
    pub fn now(&self) -> (u64, u64) {
        let position = self.registry.lock().feed().position();
        (position.run, position.revision)
    }

    /// Reserves the name and the pod of a new VM. Waits for another creation with this name or pod, because its result decides.
    ///
    /// Refused as VM_EXISTS, POD_HAS_VM, and POD_MIGRATED for a pod whose VM has moved to another node.
    pub async fn reserve(&self, name: &str, pod: Option<&PodUid>) -> Result<Reservation<'_>, Failure> {
        let pod = pod.map(PodUid::as_str);
        loop {
            let mut released = pin!(self.released.notified());
            // Releases from here on wake this task.
            released.as_mut().enable();
            {
                let mut vms = self.registry.lock();
                vms.check_free(name)?;
                if let Some(uid) = pod {
                    check_pod(&vms, uid)?;
                    if vms.feed().moved_from(uid) {
                        let message = format!(
                            "spec.pod: the VM of the pod {uid} has moved to another node: make another pod"
                        );
                        return Err(Failure::precondition("POD_MIGRATED", message));
                    }
                }
                let claims = &mut vms.index;
                if !claims.names.contains(name) && pod.is_none_or(|uid| !claims.pods.contains(uid)) {
                    let pod = pod.map(str::to_owned);
                    claims.names.insert(name.to_owned());
                    claims.pods.extend(pod.clone());
                    return Ok(Reservation {
                        vms: self,
                        name: name.to_owned(),
                        pod,
                    });
                }
            }
            released.await;
        }
    }

    /// Adds a VM, or replaces a failed actor; `made` is a run and revision at or before the VM's
    /// creation.
    pub fn insert(&self, name: &str, entry: Entry, made: (u64, u64)) {
        let mut vms = self.registry.lock();
        let vm = Arc::clone(&entry.state.borrow());
        let pod = vm.spec.as_ref().and_then(|spec| spec.pod.as_ref());
        let mut record = Published {
            uid: entry.uid,
            name: name.to_owned(),
            made,
            pod: pod.map(|pod| pod.uid.clone()),
            vm,
        };
        match vms.get(name) {
            Some(before) => record.made = before.made,
            // The exact revision of a VM of this run is this one.
            None if made.0 == vms.feed().run() => vms.begin(&mut record),
            None => {}
        }
        vms.put(record);
        vms.change(name, |_, reach| reach.entry = Some(entry));
    }

    /// Counts a failure of a VM's task. Returns the number of failures.
    pub fn failed(&self, name: &str) -> u32 {
        let mut failures = 0;
        self.registry.lock().change(name, |_, reach| {
            reach.failures = reach.failures.saturating_add(1);
            failures = reach.failures;
        });
        failures
    }

    /// Removes a VM whose record is gone already.
    pub fn drop_out(&self, name: &str) {
        let metadata = self.registry.lock().get(name).map(Record::metadata);
        let tombstone = self.begin_delete(metadata.unwrap_or_default(), None);
        self.remove(name, tombstone);
    }

    /// Publishes a VM's new state.
    pub fn publish(&self, publisher: &watch::Sender<Arc<v1::Vm>>, state: &Arc<v1::Vm>) {
        let mut vms = self.registry.lock();
        let before = publisher.send_replace(Arc::clone(state));
        let floats = vmmd_network::floats(state);
        if !nics(&before).is_subset(&nics(state))
            || floats.is_some() && floats != vmmd_network::floats(&before)
        {
            self.nics_gone.notify_one();
        }
        let name = state.metadata.as_ref().map_or("", |metadata| &metadata.name);
        vms.change(name, |record, _| record.vm = Arc::clone(state));
    }

    /// Waits until a NIC is gone since this was last waited for, of a VM or with it, or until floating addresses begin or end.
    pub async fn nic_gone(&self) {
        self.nics_gone.notified().await;
    }

    /// Begins a deletion. Returns the record for the store. `handover` is that of the VM's record. [`Self::remove`] follows, or
    /// [`Self::keep`].
    pub fn begin_delete(&self, metadata: ObjectMetadata, handover: Option<&HandoverRecord>) -> Tombstone {
        let mut vms = self.registry.lock();
        let moved = handover::has_moved(handover);
        let pod = vms.get(&metadata.name).and_then(|record| record.pod.clone());
        Tombstone {
            owned: handover::of(handover).owned(),
            moved,
            pod: pod.filter(|_| moved).unwrap_or_default(),
            ..vms.bury(metadata)
        }
    }

    /// The last migration up to which a VM that was deleted was this node's, as far as that is remembered; 0 when it never was.
    pub fn owned(&self, uid: Uuid) -> u64 {
        self.registry.lock().feed().owned(&uid.to_string())
    }

    /// The generation that a new VM begins with: above that of each VM that was deleted, also of one that had its name.
    pub fn first_generation(&self) -> u64 {
        self.registry.lock().feed().first_generation()
    }

    /// Takes the beginning of a deletion back.
    pub fn keep(&self, tombstone: &Tombstone) {
        self.registry.lock().kept(tombstone);
    }

    /// Removes a VM whose deletion is in the store.
    pub fn remove(&self, name: &str, tombstone: Tombstone) {
        let mut vms = self.registry.lock();
        let Some(record) = vms.get(name).cloned() else {
            return vms.kept(&tombstone);
        };
        if !nics(&record.vm).is_empty() {
            self.nics_gone.notify_one();
        }
        vms.remove(record.uid());
        vms.buried(tombstone);
    }
}

/// Names of a VM's NICs, each with that of the network that it is in: of its spec, and of its machine.
fn nics(vm: &v1::Vm) -> BTreeSet<(&str, &str)> {
    let wanted = vm.spec.iter().flat_map(|spec| &spec.nics);
    let wanted = wanted.filter_map(|nic| match &nic.attachment {
        Some(v1::nic_spec::Attachment::Network(network)) => Some((nic.name.as_str(), network.as_str())),
        _ => None,
    });
    let there = vm.status.iter().flat_map(|status| &status.nics);
    let there = there.map(|nic| (nic.name.as_str(), nic.network.as_str()));
    wanted
        .chain(there.filter(|(_, network)| !network.is_empty()))
        .collect()
}

fn check_pod(vms: &Objects<VmKind>, uid: &str) -> Result<(), Failure> {
    let Some(name) = vms.index.by_pod.get(uid) else {
        return Ok(());
    };
    let message = format!("spec.pod: VM \"{name}\" has the pod {uid} already: delete that VM first");
    Err(Failure::precondition(HAS_VM, message))
}

impl Drop for Reservation<'_> {
    fn drop(&mut self) {
        {
            let claims = &mut self.vms.registry.lock().index;
            claims.names.remove(&self.name);
            if let Some(pod) = &self.pod {
                claims.pods.remove(pod);
            }
        }
        self.vms.released.notify_waiters();
    }
}

#[cfg(test)]
mod tests;
