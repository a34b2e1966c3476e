//! Updates of VMs: cores wait for a restart, everything else is live.

use tonic::{Code, Status};
use vmmd_api::v1::{self, ApplyMode, VmPhase};
use vmmd_spec::mask::UpdateMask;

use super::{State, lock, refusal};

impl State {
    /// Somebody else changes the VM, if that is to be.
    pub(super) fn change_in_between(&self, name: &str) -> Result<(), Status> {
        let mut play = lock(&self.play);
        if play.changes_before_updates > 0 {
            play.changes_before_updates -= 1;
            let mut vm = self.find(name)?;
            let metadata = vm.metadata.as_mut().unwrap();
            metadata.generation += 1;
            let label = format!("other-{}", play.changes_before_updates);
            metadata.labels.insert(label, String::new());
            self.store(name, vm);
        }
        Ok(())
    }

    /// `UpdateVm`.
    pub fn update(&self, request: v1::UpdateVmRequest) -> Result<v1::Vm, Status> {
        let mode = request.apply();
        let v1::UpdateVmRequest {
            vm: Some(mut wanted),
            update_mask,
            grace_period,
            ..
        } = request
        else {
            return Err(Status::invalid_argument("no VM"));
        };
        let metadata = wanted.metadata.clone().unwrap();
        self.change_in_between(&metadata.name)?;
        let there = self.find(&metadata.name)?;
        let known = there.metadata.clone().unwrap();
        let mask = update_mask.map(|mask| mask.paths);
        if let Some(paths) = &mask {
            let mask = UpdateMask::new("updateMask", paths)
                .map_err(|found| Status::invalid_argument(found.to_string()))?;
            let applied = mask.apply(&there, &wanted);
            wanted = applied.map_err(|error| refusal(Code::NotFound, "DISK_NOT_FOUND", error.to_string()))?;
        }
        let (metadata, mut spec) = (
            v1::ObjectMetadata {
                generation: metadata.generation,
                ..wanted.metadata.unwrap()
            },
            wanted.spec.unwrap(),
        );
        if ![0, known.generation].contains(&metadata.generation) {
            let message = format!("VM \"{}\" has generation {}", known.name, known.generation);
            return Err(refusal(Code::Aborted, "GENERATION_MISMATCH", message));
        }
        for disk in spec.disks.iter().filter(|disk| !disk.disk().is_empty()) {
            if self.disk(disk.disk()).is_none() {
                let message = format!("there is no disk \"{}\" on this node", disk.disk());
                return Err(refusal(Code::FailedPrecondition, "DISK_NOT_FOUND", message));
            }
        }
        let mut vm = there.clone();
        let before = there.spec.unwrap();
        for nic in spec.nics.iter_mut().filter(|nic| nic.mac.is_empty()) {
            let same = before.nics.iter().find(|other| other.name == nic.name);
            nic.mac = same.map(|nic| nic.mac.clone()).unwrap_or_default();
        }
        let cores = |spec: &v1::VmSpec| spec.cpu.as_ref().unwrap().cores;
        let status = vm.status.as_mut().unwrap();
        if status.phase() == VmPhase::Running && cores(&before) != cores(&spec) {
            status.pending_changes = vec![v1::PendingChange {
                path: "spec.cpu.cores".into(),
                current: Some(f64::from(cores(&before)).into()),
                desired: Some(f64::from(cores(&spec)).into()),
                ..Default::default()
            }];
        }
        let grace = grace_period.map(|grace| grace.seconds);
        let mask = mask.map_or_else(String::new, |paths| format!(" {}", paths.join(" ")));
        self.called(format!(
            "update {} {} grace={grace:?}{mask}",
            known.name,
            mode.as_str_name()
        ));
        if mode == ApplyMode::Restart && !status.pending_changes.is_empty() {
            status.pending_changes.clear();
            let instance = status.instance.get_or_insert_default();
            instance.pid += 1;
        }
        if before != spec || known.labels != metadata.labels || known.annotations != metadata.annotations {
            let changed = vm.metadata.as_mut().unwrap();
            changed.labels = metadata.labels;
            changed.annotations = metadata.annotations;
            changed.generation += 1;
        }
        vm.spec = Some(spec);
        if mode != ApplyMode::DryRun {
            lock(&self.vms).insert(known.name, vm.clone());
        }
        Ok(vm)
    }
}
