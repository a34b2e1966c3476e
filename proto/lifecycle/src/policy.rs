//! Reactions of a run policy to a VM's events. Pure functions; the actor carries out their
//! decisions.
//!
//! A start by the policy after the end of a run waits: 1 s at first, doubled with each start until
//! the VM has run for long enough, 5 min at most. The VM's record stores the wait, so that it
//! survives a restart of the daemon.

use std::time::Duration;

use vmmd_api::v1::ExitReason;
use vmmd_spec::policy::{OnPanic, RunPolicy};

use super::admission::Request;

/// Last requested state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, prost::Enumeration)]
#[repr(i32)]
pub enum Intent {
    /// Not to run.
    Stopped = 0,
    /// To run.
    Running = 1,
}

/// What has happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Occasion {
    /// The VM was made.
    Created,
    /// A run has ended, or a start has failed.
    Ended(ExitReason),
    /// The node was restarted since; how the last run ended, if there was one.
    NodeBoot(Option<ExitReason>),
    /// The daemon was restarted and the VM does not run; how the last run ended, if there was one.
    DaemonStart(Option<ExitReason>),
    /// The policy was changed, or set again, and the VM does not run.
    Changed,
}

/// What follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// It is started at once.
    Start,
    /// It is started after the back-off.
    StartLater,
    /// Nothing.
    Stay,
}

/// How long starts wait, in milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BackOff {
    /// The first.
    pub first_ms: u64,
    /// The longest.
    pub max_ms: u64,
    /// A run of at least this length resets the back-off.
    pub reset_after_ms: u64,
}

/// Decides whether and when the VM is started. `intent` is the last requested state.
pub fn decide(policy: RunPolicy, occasion: Occasion, intent: Intent) -> Decision {
    use Decision::{Start, StartLater, Stay};
    let wanted = intent == Intent::Running;
    let runs = match (policy, occasion) {
        (RunPolicy::Manual | RunPolicy::Off, _) => false,
        (RunPolicy::Always, _) => true,
        (_, Occasion::Created | Occasion::Changed) => false,
        (RunPolicy::UnlessStopped, _) => wanted,
        (RunPolicy::OnFailure, Occasion::Ended(reason)) => wanted && is_failure(reason),
        (RunPolicy::OnFailure, Occasion::NodeBoot(last) | Occasion::DaemonStart(last)) => {
            wanted && last.is_some_and(is_failure)
        }
    };
    match occasion {
        _ if !runs => Stay,
        Occasion::Created | Occasion::NodeBoot(_) | Occasion::Changed => Start,
        Occasion::Ended(_) | Occasion::DaemonStart(_) => StartLater,
    }
}

/// The policy that judges a VM whose last run ended so: after a panic of the guest's kernel, the VM's own rule for that goes first.
/// A start that failed while a restart was `pending` has tried to end that panic: under the policy manual, only a panic makes one pending.
pub fn after(policy: RunPolicy, on_panic: OnPanic, last: Option<ExitReason>, pending: bool) -> RunPolicy {
    let panicked = match last {
        Some(ExitReason::GuestPanic) => true,
        Some(ExitReason::StartFailed) => pending,
        _ => false,
    };
    match (last, on_panic, policy) {
        // The pod never comes back.
        (Some(ExitReason::LauncherGone), _, _) => RunPolicy::Manual,
        (_, OnPanic::Restart, RunPolicy::Manual) if panicked => RunPolicy::OnFailure,
        (Some(ExitReason::GuestPanic), OnPanic::Stop, RunPolicy::UnlessStopped | RunPolicy::OnFailure) => {
            RunPolicy::Manual
        }
        _ => policy,
    }
}

/// Why the policy refuses a request, with what to do; `None` when it does not.
pub fn refuses(policy: RunPolicy, request: Request) -> Option<&'static str> {
    match (policy, request) {
        (RunPolicy::Always, Request::Stop) => Some("it is not stopped; change the policy, or delete the VM"),
        (RunPolicy::Off, Request::Start | Request::Restart) => {
            Some("it is not started; change the policy first")
        }
        _ => None,
    }
}

/// Whether the policy starts a VM at all.
pub fn starts(policy: RunPolicy) -> bool {
    !matches!(policy, RunPolicy::Manual | RunPolicy::Off)
}

/// Whether the end of a run was a failure, as opposed to an end by request or by the guest.
fn is_failure(reason: ExitReason) -> bool {
    match reason {
        ExitReason::GuestShutdown
        | ExitReason::Stopped
        | ExitReason::Killed
        | ExitReason::LauncherGone
        | ExitReason::Unspecified => false,
        ExitReason::GuestPanic
        | ExitReason::GuestCrash
        | ExitReason::VmmError
        | ExitReason::Lost
        | ExitReason::StartFailed
        | ExitReason::OutOfMemory
        | ExitReason::NodeRestart
        | ExitReason::ProbeFailed => true,
    }
}

impl BackOff {
    /// How long the next start waits after so many in a row.
    pub fn wait(&self, attempts: u32) -> Duration {
        let factor = 1_u64.checked_shl(attempts).unwrap_or(u64::MAX);
        Duration::from_millis(self.first_ms.saturating_mul(factor).min(self.max_ms))
    }

    /// Starts in a row that still count after a run of this length.
    pub fn after_run(&self, attempts: u32, ran_ms: u64) -> u32 {
        if ran_ms >= self.reset_after_ms {
            0
        } else {
            attempts
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Decision::*, ExitReason as R, Occasion::*, *};

    const POLICIES: [RunPolicy; 5] = [
        RunPolicy::UnlessStopped,
        RunPolicy::Always,
        RunPolicy::OnFailure,
        RunPolicy::Manual,
        RunPolicy::Off,
    ];

    /// One row per occasion and intent; columns as [`POLICIES`].
    const TABLE: &[(Occasion, Intent, [Decision; 5])] = &[
        (Created, Intent::Stopped, [Stay, Start, Stay, Stay, Stay]),
        (
            Ended(R::GuestShutdown),
            Intent::Running,
            [StartLater, StartLater, Stay, Stay, Stay],
        ),
        (
            Ended(R::Stopped),
            Intent::Running,
            [StartLater, StartLater, Stay, Stay, Stay],
        ),
        (
            Ended(R::Killed),
            Intent::Running,
            [StartLater, StartLater, Stay, Stay, Stay],
        ),
        (
            Ended(R::GuestPanic),
            Intent::Running,
            [StartLater, StartLater, StartLater, Stay, Stay],
        ),
        (
            Ended(R::GuestCrash),
            Intent::Running,
            [StartLater, StartLater, StartLater, Stay, Stay],
        ),
        (
            Ended(R::VmmError),
            Intent::Running,
            [StartLater, StartLater, StartLater, Stay, Stay],
        ),
        (
            Ended(R::Lost),
            Intent::Running,
            [StartLater, StartLater, StartLater, Stay, Stay],
        ),
        (
            Ended(R::OutOfMemory),
            Intent::Running,
            [StartLater, StartLater, StartLater, Stay, Stay],
        ),
        (
            Ended(R::StartFailed),
            Intent::Running,
            [StartLater, StartLater, StartLater, Stay, Stay],
        ),
        (
            Ended(R::Stopped),
            Intent::Stopped,
            [Stay, StartLater, Stay, Stay, Stay],
        ),
        (
            Ended(R::Killed),
            Intent::Stopped,
            [Stay, StartLater, Stay, Stay, Stay],
        ),
        (
            Ended(R::GuestPanic),
            Intent::Stopped,
            [Stay, StartLater, Stay, Stay, Stay],
        ),
        // `after` makes every policy manual.
        (
            Ended(R::ProbeFailed),
            Intent::Running,
            [StartLater, StartLater, StartLater, Stay, Stay],
        ),
        (
            Ended(R::LauncherGone),
            Intent::Running,
            [StartLater, StartLater, Stay, Stay, Stay],
        ),
        (
            NodeBoot(Some(R::NodeRestart)),
            Intent::Running,
            [Start, Start, Start, Stay, Stay],
        ),
        (
            NodeBoot(Some(R::StartFailed)),
            Intent::Running,
            [Start, Start, Start, Stay, Stay],
        ),
        (
            NodeBoot(Some(R::GuestShutdown)),
            Intent::Running,
            [Start, Start, Stay, Stay, Stay],
        ),
        (
            NodeBoot(Some(R::NodeRestart)),
            Intent::Stopped,
            [Stay, Start, Stay, Stay, Stay],
        ),
        (NodeBoot(None), Intent::Stopped, [Stay, Start, Stay, Stay, Stay]),
        (
            DaemonStart(Some(R::Lost)),
            Intent::Running,
            [StartLater, StartLater, StartLater, Stay, Stay],
        ),
        (
            DaemonStart(Some(R::GuestShutdown)),
            Intent::Running,
            [StartLater, StartLater, Stay, Stay, Stay],
        ),
        (
            DaemonStart(Some(R::Stopped)),
            Intent::Stopped,
            [Stay, StartLater, Stay, Stay, Stay],
        ),
        (
            DaemonStart(None),
            Intent::Running,
            [StartLater, StartLater, Stay, Stay, Stay],
        ),
        (
            DaemonStart(None),
            Intent::Stopped,
            [Stay, StartLater, Stay, Stay, Stay],
        ),
        (Changed, Intent::Running, [Stay, Start, Stay, Stay, Stay]),
        (Changed, Intent::Stopped, [Stay, Start, Stay, Stay, Stay]),
    ];

    #[test]
    fn panic_rule_restart_or_stop_goes_before_the_policy() {
        use RunPolicy as P;
        let panic = Some(R::GuestPanic);
        let failed = Some(R::StartFailed);
        for (policy, rule, last, pending, expected) in [
            (P::Manual, OnPanic::Restart, panic, false, P::OnFailure),
            (P::Manual, OnPanic::Restart, failed, true, P::OnFailure),
            (P::Manual, OnPanic::Restart, failed, false, P::Manual),
            (P::Manual, OnPanic::RunPolicy, failed, true, P::Manual),
            (P::Manual, OnPanic::Restart, Some(R::GuestCrash), true, P::Manual),
            (P::Manual, OnPanic::RunPolicy, panic, false, P::Manual),
            (P::Off, OnPanic::Restart, panic, false, P::Off),
            (P::Off, OnPanic::Restart, failed, true, P::Off),
            (P::UnlessStopped, OnPanic::Stop, panic, false, P::Manual),
            (P::UnlessStopped, OnPanic::Stop, failed, true, P::UnlessStopped),
            (P::UnlessStopped, OnPanic::Stop, None, false, P::UnlessStopped),
            (P::OnFailure, OnPanic::Stop, panic, false, P::Manual),
            (P::OnFailure, OnPanic::Restart, panic, false, P::OnFailure),
            (P::Always, OnPanic::Ignore, panic, false, P::Always),
            (
                P::Always,
                OnPanic::RunPolicy,
                Some(R::LauncherGone),
                false,
                P::Manual,
            ),
            (
                P::OnFailure,
                OnPanic::Restart,
                Some(R::LauncherGone),
                false,
                P::Manual,
            ),
        ] {
            assert_eq!(
                after(policy, rule, last, pending),
                expected,
                "{policy:?} {rule:?} {last:?} {pending}"
            );
        }
    }

    #[test]
    fn the_table_holds() {
        for (occasion, intent, decisions) in TABLE {
            for (policy, decision) in POLICIES.into_iter().zip(decisions) {
                assert_eq!(
                    decide(policy, *occasion, *intent),
                    *decision,
                    "{policy:?} {occasion:?} {intent:?}"
                );
            }
        }
    }

    #[test]
    fn every_way_in_which_a_run_can_end_is_in_the_table() {
        for reason in (1..).map_while(|number| ExitReason::try_from(number).ok()) {
            let has = |occasion: &Occasion| match occasion {
                Ended(of) | NodeBoot(Some(of)) | DaemonStart(Some(of)) => *of == reason,
                _ => false,
            };
            assert!(TABLE.iter().any(|(occasion, ..)| has(occasion)), "{reason:?}");
        }
    }

    #[test]
    fn always_on_refuses_a_stop_and_always_off_a_start() {
        use Request::{Delete, Pause, Reset, Restart, Resume, Start, Stop};
        let delete = Delete { force: true };
        for policy in POLICIES {
            for request in [Start, Stop, Restart, Pause, Resume, Reset, delete] {
                let refused = match policy {
                    RunPolicy::Always => request == Stop,
                    RunPolicy::Off => matches!(request, Start | Restart),
                    _ => false,
                };
                assert_eq!(
                    refuses(policy, request).is_some(),
                    refused,
                    "{policy:?} {request:?}"
                );
            }
        }
    }

    #[test]
    fn back_off_doubles_up_to_its_cap_and_a_long_run_resets_it() {
        let back_off = BackOff {
            first_ms: 1_000,
            max_ms: 300_000,
            reset_after_ms: 600_000,
        };
        let waits: Vec<_> = (0..11)
            .map(|attempts| back_off.wait(attempts).as_secs())
            .collect();
        assert_eq!(waits, [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300]);
        assert_eq!(back_off.wait(u32::MAX).as_secs(), 300);
        assert_eq!(back_off.after_run(7, 599_999), 7);
        assert_eq!(back_off.after_run(7, 600_000), 0);
    }
}
