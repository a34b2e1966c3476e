//! Effect of the `vmm`'s reported state on the phase of its VM. A guest is paused by request, by a
//! failed disk, or as long as a snapshot or a migration needs.

use vmm_protocol::vmm::{PauseReason, State, Status};
use vmmd_api::v1::VmPhase;

/// Reason of a pause because a disk failed.
pub const DISK_ERROR: &str = "DiskError";
/// Reason of a pause for a snapshot. The `vmm` ends this pause on its own.
pub const SNAPSHOT: &str = "Snapshot";
/// Why a VM that is being migrated is in its phase.
pub const MIGRATING: &str = "Migrating";

/// Reason of a pause, and of an event, because the guest did not restart its watchdog in time.
pub const WATCHDOG_EXPIRED: &str = "WatchdogExpired";
/// Message of that pause.
pub const EXPIRED: &str = "the guest did not restart its watchdog in time";

/// Effect of a reported state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    /// The VM is in another phase, for this reason, with this message.
    Enter(VmPhase, &'static str, String),
    /// A disk has failed, with this message.
    NoteDiskError(String),
    /// The failed disk requests are retried; a new failure is reported again.
    ForgetDiskErrors,
}

/// Returns the effects of a reported state on a VM in this phase with this reason. Only running and
/// paused VMs change: in other phases the work under way decides.
pub fn follow(status: &Status, phase: VmPhase, reason: &str) -> Vec<Effect> {
    match (status.state(), phase) {
        (State::Running, VmPhase::Paused) => {
            let again = (reason == DISK_ERROR).then_some(Effect::ForgetDiskErrors);
            let running = Effect::Enter(VmPhase::Running, "Running", String::new());
            again.into_iter().chain([running]).collect()
        }
        (State::Paused, VmPhase::Running) => paused(status),
        _ => Vec::new(),
    }
}

fn paused(status: &Status) -> Vec<Effect> {
    let enter = |reason, message: &str| Effect::Enter(VmPhase::Paused, reason, message.to_owned());
    match status.pause_reason() {
        PauseReason::DiskError => vec![
            Effect::NoteDiskError(status.pause_message.clone()),
            enter(DISK_ERROR, &status.pause_message),
        ],
        PauseReason::Watchdog => vec![enter(WATCHDOG_EXPIRED, EXPIRED)],
        PauseReason::Snapshot => vec![enter(SNAPSHOT, "a snapshot is written")],
        PauseReason::Migration => vec![enter(MIGRATING, "the rest of its memory is sent to another node")],
        _ => vec![enter("Paused", "")],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn says(state: State, why: PauseReason) -> Status {
        Status {
            state: state.into(),
            pause_reason: why.into(),
            pause_message: "disk root: no space".into(),
            ..Status::default()
        }
    }

    #[test]
    fn a_pause_has_its_reason_and_ends_with_the_next_run() {
        let enter = |phase, reason, message: &str| Effect::Enter(phase, reason, message.to_owned());
        let (running, paused) = (VmPhase::Running, VmPhase::Paused);
        let none = PauseReason::Unspecified;
        let error = "disk root: no space";
        for (said, phase, reason, expected) in [
            (
                says(State::Paused, none),
                running,
                "Running",
                vec![enter(paused, "Paused", "")],
            ),
            (
                says(State::Paused, PauseReason::DiskError),
                running,
                "Running",
                vec![
                    Effect::NoteDiskError(error.into()),
                    enter(paused, DISK_ERROR, error),
                ],
            ),
            (
                says(State::Paused, PauseReason::Snapshot),
                running,
                "Running",
                vec![enter(paused, SNAPSHOT, "a snapshot is written")],
            ),
            (
                says(State::Paused, PauseReason::Migration),
                running,
                "Running",
                vec![enter(
                    paused,
                    MIGRATING,
                    "the rest of its memory is sent to another node",
                )],
            ),
            (
                says(State::Running, none),
                paused,
                "Paused",
                vec![enter(running, "Running", "")],
            ),
            (
                says(State::Running, none),
                paused,
                DISK_ERROR,
                vec![Effect::ForgetDiskErrors, enter(running, "Running", "")],
            ),
            // States without a change, and states that other work handles.
            (says(State::Running, none), running, "Running", vec![]),
            (
                says(State::Paused, PauseReason::DiskError),
                paused,
                "Paused",
                vec![],
            ),
            (says(State::Running, none), VmPhase::Stopping, "Stopping", vec![]),
            (says(State::Paused, none), VmPhase::Starting, "Starting", vec![]),
        ] {
            assert_eq!(
                follow(&said, phase, reason),
                expected,
                "{said:?} {phase:?} {reason}"
            );
        }
    }
}
