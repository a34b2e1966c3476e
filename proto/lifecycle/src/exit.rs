//! Classification of the end of a `vmm` process. A pure function of the evidence.
//!
//! A compromised `vmm` can write any exit record. Observations of the daemon and the kernel
//! therefore outrank the record: a restart of the node, an OOM kill, a signal.

use vmm_protocol::vmm::{ExitKind, ExitRecord};
use vmmd_api::time::timestamp;
use vmmd_api::v1::{ExitReason, ExitStatus, RunCounts, VmPhase};

/// Request to the VM at the time of its end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Asked {
    /// Nothing.
    #[default]
    Nothing,
    /// To power off.
    PowerOff,
    /// To end at once.
    Kill,
    /// To power off, and then to end at once because it didn't in time.
    Overdue,
    /// To end at once, because its guest's kernel had panicked.
    Panicked,
    /// To power off, and then to end at once, because a probe has failed.
    ProbeFailed,
}

impl Asked {
    /// The same when the daemon ends it now.
    pub fn ended(self) -> Self {
        match self {
            Self::Overdue | Self::Panicked | Self::ProbeFailed => self,
            Self::Nothing | Self::PowerOff | Self::Kill => Self::Kill,
        }
    }

    /// True when the daemon has ended it.
    fn to_end(self) -> bool {
        matches!(
            self,
            Self::Kill | Self::Overdue | Self::Panicked | Self::ProbeFailed
        )
    }

    /// The reason of the exit after the daemon ended the run.
    fn reason(self) -> ExitReason {
        match self {
            Self::Panicked => ExitReason::GuestPanic,
            Self::ProbeFailed => ExitReason::ProbeFailed,
            _ => ExitReason::Killed,
        }
    }
}

const OVERDUE: &str = "the guest did not power off within the grace period";
/// The message about a guest whose kernel has panicked.
pub const PANICKED: &str = "the guest's kernel has panicked";
const PROBE_FAILED: &str = "a probe of the guest has failed: see the VM's events";

/// Evidence about an ended process.
#[derive(Clone, Debug, Default)]
pub struct Evidence {
    /// Exit record of the process.
    pub record: Option<ExitRecord>,
    /// Request to the process.
    pub asked: Asked,
    /// The kernel ran out of memory and killed a process in its cgroup.
    pub oom_killed: bool,
    /// The signal that ended it, where the daemon is its parent.
    pub signal: Option<i32>,
    /// The node has been restarted since.
    pub node_restarted: bool,
    /// Now, in milliseconds of Unix time: the time of an end without a record.
    pub now_ms: u64,
}

/// The phase that follows, why, and how the run ended.
#[derive(Clone, Debug, PartialEq)]
pub struct Exit {
    /// Stopped or Failed.
    pub phase: VmPhase,
    /// One CamelCase word.
    pub reason: &'static str,
    /// For the status.
    pub status: ExitStatus,
}

/// Decides.
pub fn classify(evidence: &Evidence) -> Exit {
    let (reason, message) = match (seen(evidence), &evidence.record) {
        (Some(reason), _) => (reason, seen_message(evidence, reason)),
        (None, Some(record)) => recorded(record, evidence.asked),
        (None, None) if evidence.asked.to_end() => (evidence.asked.reason(), killed_message(evidence.asked)),
        (None, None) => (ExitReason::Lost, seen_message(evidence, ExitReason::Lost)),
    };
    let time = evidence.record.as_ref().map_or(0, |record| record.time_unix_ms);
    let time = timestamp(if time == 0 { evidence.now_ms } else { time });
    let (phase, word) = phase(reason);
    Exit {
        phase,
        reason: word,
        status: ExitStatus {
            reason: reason.into(),
            message,
            time,
        },
    }
}

/// The phase and its reason after a run that ended so.
pub fn phase(reason: ExitReason) -> (VmPhase, &'static str) {
    match reason {
        ExitReason::GuestShutdown => (VmPhase::Stopped, "GuestShutdown"),
        ExitReason::Stopped => (VmPhase::Stopped, "Stopped"),
        ExitReason::Killed => (VmPhase::Stopped, "Killed"),
        ExitReason::GuestPanic => (VmPhase::Failed, "GuestPanic"),
        ExitReason::GuestCrash => (VmPhase::Failed, "GuestCrash"),
        ExitReason::VmmError => (VmPhase::Failed, "VmmError"),
        ExitReason::StartFailed => (VmPhase::Failed, "StartFailed"),
        ExitReason::OutOfMemory => (VmPhase::Failed, "OutOfMemory"),
        ExitReason::NodeRestart => (VmPhase::Failed, "NodeRestart"),
        ExitReason::LauncherGone => (VmPhase::Failed, "LauncherGone"),
        ExitReason::ProbeFailed => (VmPhase::Failed, "ProbeFailed"),
        ExitReason::Lost | ExitReason::Unspecified => (VmPhase::Failed, "Lost"),
    }
}

fn recorded(record: &ExitRecord, asked: Asked) -> (ExitReason, String) {
    let reason = match record.kind() {
        ExitKind::PowerOff if asked == Asked::Nothing => ExitReason::GuestShutdown,
        ExitKind::PowerOff if asked == Asked::ProbeFailed => ExitReason::ProbeFailed,
        ExitKind::PowerOff => ExitReason::Stopped,
        ExitKind::Stopped => asked.reason(),
        ExitKind::GuestPanic => ExitReason::GuestPanic,
        ExitKind::GuestCrash => ExitReason::GuestCrash,
        ExitKind::StartFailed => ExitReason::StartFailed,
        ExitKind::LifelineClosed => ExitReason::LauncherGone,
        ExitKind::VmmError | ExitKind::Unspecified => ExitReason::VmmError,
    };
    let message = match record.kind() {
        ExitKind::Stopped => killed_message(asked),
        ExitKind::PowerOff if reason == ExitReason::ProbeFailed => killed_message(asked),
        _ => record.message.clone(),
    };
    (reason, message)
}

/// Returns the reason that the external evidence alone proves, if any.
fn seen(evidence: &Evidence) -> Option<ExitReason> {
    let killed = evidence.signal == Some(libc::SIGKILL);
    let errs = |record: &ExitRecord| record.kind() == ExitKind::VmmError;
    if evidence.node_restarted {
        Some(ExitReason::NodeRestart)
    } else if killed && evidence.asked.to_end() {
        Some(evidence.asked.reason())
    } else if evidence.oom_killed && !evidence.asked.to_end() {
        Some(ExitReason::OutOfMemory)
    } else if killed {
        Some(ExitReason::Lost)
    } else if evidence.signal.is_some() && !evidence.record.as_ref().is_some_and(errs) {
        // A vmm that dies of a fault of its own may have said of which.
        Some(ExitReason::Lost)
    } else {
        None
    }
}

fn seen_message(evidence: &Evidence, reason: ExitReason) -> String {
    match (reason, evidence.signal) {
        (ExitReason::NodeRestart, _) => "the node was restarted while the VM ran".to_owned(),
        (ExitReason::Killed | ExitReason::GuestPanic | ExitReason::ProbeFailed, _) => {
            killed_message(evidence.asked)
        }
        (ExitReason::OutOfMemory, _) => {
            "the VM's memory ran out on the node and the kernel killed the vmm process".to_owned()
        }
        (_, Some(signal)) => format!("the vmm process was killed by signal {signal}"),
        (_, None) => "the vmm process vanished without a record".to_owned(),
    }
}

fn killed_message(asked: Asked) -> String {
    // A requested end needs no message.
    match asked {
        Asked::Overdue => OVERDUE.to_owned(),
        Asked::Panicked => PANICKED.to_owned(),
        Asked::ProbeFailed => PROBE_FAILED.to_owned(),
        Asked::Nothing | Asked::PowerOff | Asked::Kill => String::new(),
    }
}

/// Counts the end of a run, or a start that failed.
pub fn count(counts: &mut RunCounts, reason: ExitReason) {
    let counter = match reason {
        ExitReason::GuestShutdown => &mut counts.guest_shutdowns,
        ExitReason::GuestPanic => &mut counts.guest_panics,
        ExitReason::GuestCrash => &mut counts.guest_crashes,
        ExitReason::VmmError => &mut counts.vmm_errors,
        ExitReason::OutOfMemory => &mut counts.out_of_memory,
        ExitReason::Lost => &mut counts.lost,
        ExitReason::StartFailed => &mut counts.failed_starts,
        ExitReason::ProbeFailed => &mut counts.probe_failures,
        // These ends are not failures of the VM.
        ExitReason::Stopped
        | ExitReason::Killed
        | ExitReason::NodeRestart
        | ExitReason::LauncherGone
        | ExitReason::Unspecified => return,
    };
    *counter += 1;
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(kind: ExitKind) -> Evidence {
        let record = ExitRecord {
            kind: kind.into(),
            message: "m".into(),
            time_unix_ms: 1000,
        };
        Evidence {
            record: Some(record),
            ..Evidence::default()
        }
    }

    #[test]
    fn what_a_process_recorded_decides() {
        use ExitKind as K;
        use ExitReason as R;
        for (kind, asked, reason, phase) in [
            (K::PowerOff, Asked::Nothing, R::GuestShutdown, VmPhase::Stopped),
            (K::PowerOff, Asked::PowerOff, R::Stopped, VmPhase::Stopped),
            (K::PowerOff, Asked::Kill, R::Stopped, VmPhase::Stopped),
            (K::Stopped, Asked::Kill, R::Killed, VmPhase::Stopped),
            (K::Stopped, Asked::Overdue, R::Killed, VmPhase::Stopped),
            (K::Stopped, Asked::Panicked, R::GuestPanic, VmPhase::Failed),
            (K::GuestPanic, Asked::Panicked, R::GuestPanic, VmPhase::Failed),
            (K::PowerOff, Asked::ProbeFailed, R::ProbeFailed, VmPhase::Failed),
            (K::Stopped, Asked::ProbeFailed, R::ProbeFailed, VmPhase::Failed),
            (K::GuestPanic, Asked::Nothing, R::GuestPanic, VmPhase::Failed),
            (K::GuestPanic, Asked::PowerOff, R::GuestPanic, VmPhase::Failed),
            (K::GuestCrash, Asked::Nothing, R::GuestCrash, VmPhase::Failed),
            (K::VmmError, Asked::Kill, R::VmmError, VmPhase::Failed),
            (K::StartFailed, Asked::Nothing, R::StartFailed, VmPhase::Failed),
            (
                K::LifelineClosed,
                Asked::Nothing,
                R::LauncherGone,
                VmPhase::Failed,
            ),
            (
                K::LifelineClosed,
                Asked::PowerOff,
                R::LauncherGone,
                VmPhase::Failed,
            ),
            (K::Unspecified, Asked::Nothing, R::VmmError, VmPhase::Failed),
        ] {
            let exit = classify(&Evidence {
                asked,
                ..record(kind)
            });
            assert_eq!(
                (exit.status.reason(), exit.phase),
                (reason, phase),
                "{kind:?} {asked:?}"
            );
            let message = match (kind, asked) {
                (K::Stopped, Asked::Overdue) => OVERDUE,
                (K::Stopped, Asked::Panicked) => PANICKED,
                (K::Stopped | K::PowerOff, Asked::ProbeFailed) => PROBE_FAILED,
                (K::Stopped, _) => "",
                _ => "m",
            };
            assert_eq!(exit.status.message, message);
            assert_eq!(exit.status.time.map(|time| time.seconds), Some(1));
        }
    }

    #[test]
    fn a_process_without_a_record_is_lost_unless_we_killed_it() {
        let lost = classify(&Evidence {
            signal: Some(9),
            ..Evidence::default()
        });
        assert_eq!(
            (lost.status.reason(), lost.phase),
            (ExitReason::Lost, VmPhase::Failed)
        );
        assert!(lost.status.message.contains("signal 9"));
        let killed = classify(&Evidence {
            asked: Asked::Kill,
            signal: Some(9),
            ..Evidence::default()
        });
        assert_eq!(
            (killed.status.reason(), killed.phase),
            (ExitReason::Killed, VmPhase::Stopped)
        );
    }

    #[test]
    fn out_of_memory_and_restart_of_the_node_are_own_reasons() {
        use ExitReason as R;
        let oom = Evidence {
            oom_killed: true,
            signal: Some(9),
            ..Evidence::default()
        };
        let restarted = Evidence {
            node_restarted: true,
            ..Evidence::default()
        };
        for (evidence, asked, reason, phase, word) in [
            (&oom, Asked::Nothing, R::OutOfMemory, VmPhase::Failed, "ran out"),
            (&oom, Asked::PowerOff, R::OutOfMemory, VmPhase::Failed, "ran out"),
            (&oom, Asked::Kill, R::Killed, VmPhase::Stopped, ""),
            (
                &restarted,
                Asked::Nothing,
                R::NodeRestart,
                VmPhase::Failed,
                "restarted",
            ),
            (
                &restarted,
                Asked::Kill,
                R::NodeRestart,
                VmPhase::Failed,
                "restarted",
            ),
        ] {
            let exit = classify(&Evidence {
                asked,
                ..evidence.clone()
            });
            assert_eq!(
                (exit.status.reason(), exit.phase),
                (reason, phase),
                "{evidence:?}"
            );
            assert!(exit.status.message.contains(word), "{exit:?}");
        }
    }

    #[test]
    fn what_was_seen_outranks_what_the_process_wrote() {
        use ExitKind as K;
        use ExitReason as R;
        let oom = |kind| Evidence {
            oom_killed: true,
            ..record(kind)
        };
        let signal = |kind, signal| Evidence {
            signal: Some(signal),
            ..record(kind)
        };
        for (evidence, asked, reason) in [
            (oom(K::PowerOff), Asked::Nothing, R::OutOfMemory),
            (oom(K::PowerOff), Asked::PowerOff, R::OutOfMemory),
            (oom(K::Stopped), Asked::Kill, R::Killed),
            (signal(K::PowerOff, libc::SIGKILL), Asked::Nothing, R::Lost),
            (signal(K::PowerOff, libc::SIGKILL), Asked::Kill, R::Killed),
            (signal(K::GuestPanic, libc::SIGKILL), Asked::Overdue, R::Killed),
            (signal(K::Stopped, libc::SIGKILL), Asked::Panicked, R::GuestPanic),
            (signal(K::PowerOff, libc::SIGSEGV), Asked::Nothing, R::Lost),
            (signal(K::PowerOff, libc::SIGSEGV), Asked::Kill, R::Lost),
            // The record names the cause of death, and the signal does not contradict it.
            (signal(K::VmmError, libc::SIGBUS), Asked::Nothing, R::VmmError),
            (signal(K::VmmError, libc::SIGKILL), Asked::Nothing, R::Lost),
        ] {
            let exit = classify(&Evidence {
                asked,
                ..evidence.clone()
            });
            assert_eq!(exit.status.reason(), reason, "{evidence:?} {asked:?}");
        }
    }

    #[test]
    fn each_kind_of_end_has_a_counter_of_its_own() {
        use ExitReason as R;
        let mut counts = RunCounts::default();
        let reasons = [
            R::GuestShutdown,
            R::GuestPanic,
            R::GuestCrash,
            R::VmmError,
            R::OutOfMemory,
            R::Lost,
            R::StartFailed,
        ];
        for (index, reason) in reasons.into_iter().enumerate() {
            (0..=index).for_each(|_| count(&mut counts, reason));
        }
        for reason in [R::Stopped, R::Killed, R::NodeRestart] {
            count(&mut counts, reason);
        }
        let expected = RunCounts {
            guest_shutdowns: 1,
            guest_panics: 2,
            guest_crashes: 3,
            vmm_errors: 4,
            out_of_memory: 5,
            lost: 6,
            failed_starts: 7,
            ..RunCounts::default()
        };
        assert_eq!(counts, expected);
    }
}
