//! Operations on the VM that an earlier daemon left under way. Each one continues or ends,
//! depending on the state at the actor's start.

use vm_lifecycle::handover::Source;
use vmmd_api::v1::StopResult;
use vmmd_host::failure::{Failure, Kind};
use vmmd_objects::operation::{Detail, Handle, Type, interrupted};
use vmmd_store::handover::Handover;

use super::Actor;

impl Actor {
    /// Ends the operations that are over. Keeps a stop or deletion that the record notes, because
    /// it continues.
    pub(super) fn settle_left(&mut self) {
        for operation in std::mem::take(&mut self.left) {
            let runs = self.instance.is_some();
            match operation.kind() {
                Some(Type::VmStart | Type::VmRestart) if runs && self.began_run(operation.id()) => {
                    operation.complete_with("the VM runs", self.state(), None);
                }
                Some(Type::VmStop) if !runs => {
                    let exit = self.record.last_exit.clone();
                    let result = Detail::Stopped(StopResult { exit });
                    operation.complete_with("the VM is stopped", self.state(), Some(result));
                }
                Some(Type::VmStop) if self.record.stop.is_some() => self.left.push(operation),
                Some(Type::VmDelete) if self.record.deleting.is_some() => self.left.push(operation),
                _ => self.interrupted(operation),
            }
        }
    }

    /// Ends the operations that were not resumed.
    pub(super) fn give_up_left(&mut self) {
        for operation in std::mem::take(&mut self.left) {
            self.interrupted(operation);
        }
    }

    /// Takes the operation of a migration that has handed the VM over: it ends when the other node has confirmed that.
    pub(super) fn take_handed_over(&mut self) {
        let stage = self.handover();
        let operation = self
            .record
            .handover
            .as_ref()
            .map_or("", |record| &record.operation);
        if matches!(stage, Handover::Source(Source::Given(_) | Source::Gone(_))) {
            let begun = self.left.iter().position(|it| it.id() == operation);
            self.handed_over = begun.map(|place| self.left.swap_remove(place));
        }
    }

    /// Ends the operation of a migration that an earlier daemon has handed over, as an operator has decided.
    pub(super) fn end_resolved(&mut self) {
        if let Some(operation) = self.handed_over.take() {
            let message = "the other node has not confirmed that the VM runs there, and an operator has decided what becomes of it here";
            operation.fail(&Failure::new(Kind::Aborted, "MIGRATION_RESOLVED", message));
        }
    }

    fn began_run(&self, operation: &str) -> bool {
        let run = self.record.instance.as_ref();
        run.is_some_and(|run| run.operation == operation)
    }

    fn interrupted(&self, operation: Handle) {
        let name = &self.record.name;
        let now = if self.instance.is_some() {
            "runs".to_owned()
        } else {
            let exit = self.record.last_exit.as_ref().map(|exit| exit.message.as_str());
            match exit.filter(|message| !message.is_empty()) {
                Some(message) => format!("does not run ({message})"),
                None => "does not run".to_owned(),
            }
        };
        let message = format!(
            "the daemon was restarted meanwhile: VM \"{name}\" {now}; ask again if that is not wanted"
        );
        operation.fail(&interrupted(message));
    }
}
