//! Next step of the agent for a pod: a pure function.

use vmmd_api::v1;

use crate::provision::{has_process, is_unstarted};

/// Next step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// No step, until something changes.
    Idle,
    /// Ask the API server whether the VirtualMachine names the pod, and create its VM.
    Admit,
    /// Mark the VM, which has moved to this node, as one of this agent.
    Adopt,
    /// Start the VM, which was created and never started.
    Start,
    /// Delete the VM, and the disks of the run.
    Remove,
    /// Delete the disks of the run, which has no VM.
    Clean,
    /// Forget the pod: it has no VM and no disks.
    Forget,
}

/// Known state of a pod.
pub struct Seen<'a> {
    /// Its launcher is connected.
    pub connected: bool,
    /// Its VM.
    pub vm: Option<&'a v1::Vm>,
    /// The VM has the labels of this agent and the pod.
    pub marked: bool,
    /// It gets no VM.
    pub refused: bool,
    /// All its disks are deleted.
    pub clean: bool,
}

/// Returns the next step for a pod.
pub fn next(seen: &Seen<'_>) -> Step {
    match (seen.connected, seen.vm) {
        (true, None) if seen.refused => Step::Idle,
        (true, None) => Step::Admit,
        (true, Some(_)) if !seen.marked => Step::Adopt,
        (true, Some(vm)) if is_unstarted(vm) => Step::Start,
        // vmmd reports the VM to the launcher, and restarts the VM by the run policy.
        (true, Some(_)) => Step::Idle,
        // The VM ends with its launcher, and another launcher may still come from a restart of vmmd.
        (false, Some(vm)) if has_process(vm) && !is_unstarted(vm) => Step::Idle,
        (false, Some(vm)) if is_being_deleted(vm) => Step::Idle,
        (false, Some(_)) => Step::Remove,
        (false, None) if !seen.clean => Step::Clean,
        (false, None) => Step::Forget,
    }
}

fn is_being_deleted(vm: &v1::Vm) -> bool {
    let phase = vm.status.as_ref().map(v1::VmStatus::phase);
    matches!(phase, Some(v1::VmPhase::Terminating | v1::VmPhase::Stopping))
}

#[cfg(test)]
mod tests {
    use vmmd_api::v1::VmPhase;

    use super::*;

    #[test]
    fn step_follows_from_launcher_and_vm() {
        let vm = |phase: VmPhase, starts: u64| {
            let mut vm = v1::Vm::default();
            let status = vm.status.get_or_insert_default();
            status.set_phase(phase);
            status.counts.get_or_insert_default().starts = starts;
            Some(vm)
        };
        let table = [
            (true, None, false, Step::Admit),
            (true, None, true, Step::Idle),
            (true, vm(VmPhase::Stopped, 0), false, Step::Start),
            (true, vm(VmPhase::Starting, 0), false, Step::Idle),
            (true, vm(VmPhase::Running, 1), false, Step::Idle),
            // Its launcher has the end from vmmd.
            (true, vm(VmPhase::Stopped, 1), false, Step::Idle),
            (true, vm(VmPhase::Failed, 1), false, Step::Idle),
            // vmmd was restarted, or the VM is about to end.
            (false, vm(VmPhase::Running, 1), false, Step::Idle),
            (false, vm(VmPhase::Starting, 0), false, Step::Idle),
            (false, vm(VmPhase::Stopping, 1), false, Step::Idle),
            (false, vm(VmPhase::Terminating, 1), false, Step::Idle),
            (false, vm(VmPhase::Stopped, 1), false, Step::Remove),
            (false, vm(VmPhase::Stopped, 0), false, Step::Remove),
            (false, vm(VmPhase::Failed, 1), false, Step::Remove),
            (false, None, false, Step::Clean),
        ];
        for (index, (connected, vm, refused, wanted)) in table.iter().enumerate() {
            let seen = Seen {
                connected: *connected,
                vm: vm.as_ref(),
                marked: true,
                refused: *refused,
                clean: false,
            };
            assert_eq!(next(&seen), *wanted, "{index}");
        }
        let moved = Seen {
            connected: true,
            vm: table[4].1.as_ref(),
            marked: false,
            refused: false,
            clean: false,
        };
        assert_eq!(next(&moved), Step::Adopt);
        let over = Seen {
            connected: false,
            vm: None,
            marked: false,
            refused: true,
            clean: true,
        };
        assert_eq!(next(&over), Step::Forget);
    }
}
