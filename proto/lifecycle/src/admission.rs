//! Admission of requests, depending on the VM's current situation. A pure function; the actor
//! carries out its verdict.

use vmmd_api::failure::Failure;

/// Life-cycle request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// Start it.
    Start,
    /// Stop it: gracefully, or by force.
    Stop,
    /// Stop and start it.
    Restart,
    /// Stop its vCPUs.
    Pause,
    /// Let them run again.
    Resume,
    /// Press its machine's reset button.
    Reset,
    /// Give its vCPUs a non-maskable interrupt.
    Nmi,
    /// Delete it; `force` even if it runs.
    Delete {
        /// Kill it first.
        force: bool,
    },
}

/// Current situation of a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Situation {
    /// No process: stopped, failed, or never started.
    Down,
    /// A process is being made and booted.
    Starting,
    /// The guest runs.
    Running,
    /// Its vCPUs are stopped.
    Paused,
    /// A pause or resume is under way.
    Changing,
    /// On the way down; `restarting` when it is to come up again.
    Stopping {
        /// A start follows.
        restarting: bool,
    },
    /// It is being deleted.
    Terminating,
    /// It goes to another node or comes from one: what becomes of it is decided by that.
    Migrating,
}

/// Kind of a request about a VM's disks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiskRequest {
    /// Add one.
    Attach,
    /// Take one away.
    Detach,
    /// Make one larger.
    Resize,
    /// Look at the counters.
    Stats,
}

/// Where a request about disks is carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// In the spec, and in files: there is no process.
    Spec,
    /// In the spec and in the machine.
    Machine,
}

/// Effect of an update of the spec.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Applied {
    /// It is recorded, for the next start: there is no machine, or it is about to end.
    Recorded,
    /// It is recorded, and the machine is changed as far as it can be.
    Live,
}

/// Decision about a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Begin the request; it replaces the work under way.
    Begin,
    /// Wait for the work under way, which has the same result.
    Join,
    /// It is so already.
    Done,
    /// No.
    Refuse(Refusal),
}

/// Why not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// A start of a VM that is paused.
    IsPaused,
    /// It doesn't run.
    NotRunning,
    /// It runs and must be deleted with force.
    StillRunning,
    /// Something is under way that must end first.
    Busy(Situation),
    /// It will be gone in a moment.
    BeingDeleted,
}

/// Decides.
pub fn admit(situation: Situation, request: Request) -> Verdict {
    use Request::{Delete, Nmi, Pause, Reset, Restart, Resume, Start, Stop};
    use Situation::{Changing, Down, Paused, Running, Starting, Stopping, Terminating};
    use Verdict::{Begin, Done, Join};
    let refuse = |refusal| Verdict::Refuse(refusal);
    let busy = || refuse(Refusal::Busy(situation));
    match (situation, request) {
        (Situation::Migrating, _) => busy(),
        (Terminating, Delete { .. }) => Join,
        (Terminating, _) => refuse(Refusal::BeingDeleted),

        (Down, Start | Restart | Delete { .. }) => Begin,
        (Down, Stop) => Done,
        (Down, Pause | Resume | Reset | Nmi) => refuse(Refusal::NotRunning),

        (_, Delete { force: true }) => Begin,
        (_, Delete { force: false }) => refuse(Refusal::StillRunning),

        (Starting, Start) => Join,
        (Starting, Stop) => Begin,
        (Starting, Restart | Pause | Resume | Reset | Nmi) => busy(),

        (Running, Start) => Done,
        (Paused, Start | Reset | Nmi) => refuse(Refusal::IsPaused),
        (Running | Paused | Changing, Stop | Restart) => Begin,
        (Running, Pause | Reset | Nmi) | (Paused, Resume) => Begin,
        (Running, Resume) | (Paused, Pause) => Done,
        (Changing, Start | Pause | Resume | Reset | Nmi) => busy(),

        (Stopping { .. }, Stop) => Join,
        (Stopping { restarting: true }, Restart) => Join,
        (Stopping { .. }, _) => busy(),
    }
}

/// Decides where a request about disks is carried out, if it is. A pause or resume under way is no hindrance: the `vmm`
/// does one thing after the other.
pub fn admit_disk(situation: Situation, request: DiskRequest) -> Result<Place, Refusal> {
    use DiskRequest::Stats;
    use Situation::{Changing, Down, Paused, Running, Starting, Stopping, Terminating};
    match (situation, request) {
        (Situation::Migrating, _) => Err(Refusal::Busy(situation)),
        (Terminating, _) => Err(Refusal::BeingDeleted),
        (Down, Stats) => Err(Refusal::NotRunning),
        (Down, _) => Ok(Place::Spec),
        (Running | Paused | Changing, _) | (Stopping { .. }, Stats) => Ok(Place::Machine),
        (Starting | Stopping { .. }, _) => Err(Refusal::Busy(situation)),
    }
}

/// Decides whether a spec may be changed now. A start under way reads the spec and must end first;
/// a stop does not conflict.
pub fn admit_update(situation: Situation) -> Result<Applied, Refusal> {
    use Situation::{Changing, Down, Paused, Running, Starting, Stopping, Terminating};
    match situation {
        Down | Stopping { .. } => Ok(Applied::Recorded),
        Running | Paused | Changing => Ok(Applied::Live),
        Starting | Situation::Migrating => Err(Refusal::Busy(situation)),
        Terminating => Err(Refusal::BeingDeleted),
    }
}

impl Refusal {
    /// The same for the client.
    pub fn into_failure(self, name: &str) -> Failure {
        let (reason, problem) = match self {
            Self::IsPaused => ("VM_PAUSED", "is paused: resume it instead"),
            Self::NotRunning => ("NOT_RUNNING", "is not running: start it first"),
            Self::StillRunning => (
                "STILL_RUNNING",
                "is running: stop it first, or delete it with force",
            ),
            Self::BeingDeleted => ("BEING_DELETED", "is being deleted"),
            Self::Busy(situation) => match situation {
                Situation::Starting => ("BUSY", "is being started: wait, or stop it"),
                Situation::Migrating => (
                    "MIGRATING",
                    "is being migrated: wait, or cancel the migration's operation; `vmmctl describe` says when it waits for a decision",
                ),
                Situation::Stopping { .. } => ("BUSY", "is being stopped: wait, or stop it with force"),
                _ => ("BUSY", "is being paused, resumed or reset: wait a moment"),
            },
        };
        Failure::precondition(reason, format!("VM \"{name}\" {problem}"))
    }
}

#[cfg(test)]
mod tests {
    use super::{Refusal::*, Request::*, Situation::*, Verdict::*, *};

    /// One row per situation; columns: start, stop, restart, pause, resume, reset, delete, delete by force.
    const TABLE: &[(Situation, [Verdict; 8])] = &[
        (
            Down,
            [
                Begin,
                Done,
                Begin,
                Refuse(NotRunning),
                Refuse(NotRunning),
                Refuse(NotRunning),
                Begin,
                Begin,
            ],
        ),
        (
            Starting,
            [
                Join,
                Begin,
                Refuse(Busy(Starting)),
                Refuse(Busy(Starting)),
                Refuse(Busy(Starting)),
                Refuse(Busy(Starting)),
                Refuse(StillRunning),
                Begin,
            ],
        ),
        (
            Running,
            [
                Done,
                Begin,
                Begin,
                Begin,
                Done,
                Begin,
                Refuse(StillRunning),
                Begin,
            ],
        ),
        (
            Paused,
            [
                Refuse(IsPaused),
                Begin,
                Begin,
                Done,
                Begin,
                Refuse(IsPaused),
                Refuse(StillRunning),
                Begin,
            ],
        ),
        (
            Changing,
            [
                Refuse(Busy(Changing)),
                Begin,
                Begin,
                Refuse(Busy(Changing)),
                Refuse(Busy(Changing)),
                Refuse(Busy(Changing)),
                Refuse(StillRunning),
                Begin,
            ],
        ),
        (
            STOPPING,
            [
                Refuse(Busy(STOPPING)),
                Join,
                Refuse(Busy(STOPPING)),
                Refuse(Busy(STOPPING)),
                Refuse(Busy(STOPPING)),
                Refuse(Busy(STOPPING)),
                Refuse(StillRunning),
                Begin,
            ],
        ),
        (
            RESTARTING,
            [
                Refuse(Busy(RESTARTING)),
                Join,
                Join,
                Refuse(Busy(RESTARTING)),
                Refuse(Busy(RESTARTING)),
                Refuse(Busy(RESTARTING)),
                Refuse(StillRunning),
                Begin,
            ],
        ),
        (
            Terminating,
            [
                Refuse(BeingDeleted),
                Refuse(BeingDeleted),
                Refuse(BeingDeleted),
                Refuse(BeingDeleted),
                Refuse(BeingDeleted),
                Refuse(BeingDeleted),
                Join,
                Join,
            ],
        ),
    ];
    const STOPPING: Situation = Stopping { restarting: false };
    const RESTARTING: Situation = Stopping { restarting: true };
    const REQUESTS: [Request; 8] = [
        Start,
        Stop,
        Restart,
        Pause,
        Resume,
        Reset,
        Delete { force: false },
        Delete { force: true },
    ];

    #[test]
    fn the_table_holds() {
        for (situation, verdicts) in TABLE {
            for (request, verdict) in REQUESTS.into_iter().zip(verdicts) {
                assert_eq!(
                    admit(*situation, request),
                    *verdict,
                    "{request:?} when {situation:?}"
                );
            }
        }
    }

    #[test]
    fn the_table_of_disk_requests_holds() {
        use super::DiskRequest::*;
        let machine = Ok(Place::Machine);
        let spec = Ok(Place::Spec);
        // One row per situation; columns: attach, detach, resize, stats.
        let table = [
            (Down, [spec, spec, spec, Err(NotRunning)]),
            (Starting, [Err(Busy(Starting)); 4]),
            (Running, [machine; 4]),
            (Paused, [machine; 4]),
            (Changing, [machine; 4]),
            (
                STOPPING,
                [
                    Err(Busy(STOPPING)),
                    Err(Busy(STOPPING)),
                    Err(Busy(STOPPING)),
                    machine,
                ],
            ),
            (
                RESTARTING,
                [
                    Err(Busy(RESTARTING)),
                    Err(Busy(RESTARTING)),
                    Err(Busy(RESTARTING)),
                    machine,
                ],
            ),
            (Terminating, [Err(BeingDeleted); 4]),
        ];
        for (situation, row) in table {
            for (request, expected) in [Attach, Detach, Resize, Stats].into_iter().zip(row) {
                assert_eq!(
                    admit_disk(situation, request),
                    expected,
                    "{request:?} when {situation:?}"
                );
            }
        }
    }

    #[test]
    fn the_table_of_updates_holds() {
        let table = [
            (Down, Ok(Applied::Recorded)),
            (Starting, Err(Busy(Starting))),
            (Running, Ok(Applied::Live)),
            (Paused, Ok(Applied::Live)),
            (Changing, Ok(Applied::Live)),
            (STOPPING, Ok(Applied::Recorded)),
            (RESTARTING, Ok(Applied::Recorded)),
            (Terminating, Err(BeingDeleted)),
        ];
        for (situation, expected) in table {
            assert_eq!(admit_update(situation), expected, "{situation:?}");
        }
    }

    #[test]
    fn force_always_gets_through() {
        for (situation, _) in TABLE {
            assert!(
                !matches!(admit(*situation, Delete { force: true }), Refuse(_)),
                "{situation:?}"
            );
        }
    }

    #[test]
    fn every_refusal_names_the_vm_and_a_reason() {
        for (situation, verdicts) in TABLE {
            for verdict in verdicts {
                if let Refuse(refusal) = verdict {
                    let failure = refusal.into_failure("web");
                    assert!(failure.message.contains("\"web\""), "{situation:?}");
                    assert!(!failure.reason.is_empty());
                }
            }
        }
    }
}
