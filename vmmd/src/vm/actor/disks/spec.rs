//! Disks of the VM's record. The store receives each change first.

use vmmd_host::failure::Failure;
use vmmd_spec::{Violations, vm::VmSpec};
use vmmd_store::VmRecord;
use vmmd_store::store_failure;

use crate::vm::{
    actor::Actor,
    machine::change::{self, Live},
};

impl Actor {
    /// Removes from the spec a disk that the machine does not have, even if the write to the store
    /// fails: the next start of the daemon corrects the store. If the spec has come to require the
    /// disk meanwhile, the disk stays in the spec and the next start plugs it in.
    pub(super) async fn drop_disk(&mut self, name: &str) -> Result<(), Failure> {
        let (record, spec) = self.without(name);
        let spec = match spec {
            Ok(spec) => spec,
            Err(violations) => {
                self.ejected(name);
                return Err(violations.into());
            }
        };
        (self.record, self.spec) = (record, spec);
        self.forget_disk(name);
        self.persist().await;
        self.publish();
        Ok(())
    }

    /// Removes a disk that the machine does not have from the spec.
    pub(super) async fn remove_from_spec(&mut self, name: &str) -> Result<(), Failure> {
        let (record, spec) = self.without(name);
        let spec = spec?;
        self.host.store.put(&record).await.map_err(store_failure)?;
        (self.record, self.spec) = (record, spec);
        self.forget_disk(name);
        Ok(())
    }

    pub(super) fn without(&self, name: &str) -> (VmRecord, Result<VmSpec, Violations>) {
        let mut record = self.record.clone();
        let spec = without_disk(&mut record, name);
        (record, spec)
    }

    pub(super) fn forget_disk(&mut self, name: &str) {
        self.disks.remove(name);
        change::hold_disks(&self.host, &self.record);
        if let Some(instance) = &mut self.instance {
            instance.set_disk(name, None);
        }
    }

    /// Writes a changed record of the run; nothing is changed when that fails.
    pub(super) async fn change_run(
        &mut self,
        change: impl FnOnce(&mut vmmd_store::InstanceRecord),
    ) -> Result<(), Failure> {
        let mut record = self.record.clone();
        change(record.instance.get_or_insert_default());
        self.host.store.put(&record).await.map_err(store_failure)?;
        self.record = record;
        Ok(())
    }
}

/// Removes a disk from a record, with its slot and its notes.
pub fn without_disk(record: &mut VmRecord, name: &str) -> Result<VmSpec, Violations> {
    let spec = record.spec.get_or_insert_default();
    let before = spec.disks.len();
    spec.disks.retain(|disk| disk.name != name);
    // An update may have taken it from the spec already.
    record.generation += u64::from(spec.disks.len() < before);
    let spec = VmSpec::try_from(&*spec);
    if let Some(hardware) = &mut record.hardware {
        hardware.disk_slots.remove(name);
    }
    if let Some(run) = &mut record.instance {
        run.attaching.retain(|noted| noted != name);
        run.ejecting.retain(|noted| noted != name);
    }
    change::take_over(record, &Live::Detach(name.to_owned()));
    change::settle(record);
    spec
}
