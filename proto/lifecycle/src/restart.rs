//! Scheduling of starts by the run policy. A pure step maps the notes, the event and the node's
//! state to new notes and effects; the actor waits and carries out the effects.
//!
//! The VM's record stores a wait, so that the next daemon continues it. Room is reserved for the
//! start. A cordon applies only to VMs that are not on the node: a VM whose run ends on a cordoned
//! node is started again. A VM that made room, or that its policy starts for the first time, waits
//! until the node takes VMs.

use std::time::{Duration, Instant};

use vmmd_api::v1::ExitReason;
use vmmd_spec::policy::RunPolicy;

use super::policy::{BackOff, Decision, Intent, Occasion, decide};

/// Starts of a VM by its run policy.
#[derive(Clone, PartialEq, prost::Message)]
pub struct RestartRecord {
    /// In a row since the VM last ran for long enough.
    #[prost(uint32, tag = "1")]
    pub attempts: u32,
    /// When the next one is, in milliseconds of Unix time; 0 when none is to come.
    #[prost(uint64, tag = "2")]
    pub next_ms: u64,
    /// How long that one waits.
    #[prost(uint64, tag = "3")]
    pub back_off_ms: u64,
    /// Boot id of the node's kernel when the restart was planned.
    #[prost(string, tag = "4")]
    pub boot_id: String,
}

/// Notes about the next start by the run policy.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Restarts {
    /// Restart state of the VM's record.
    pub record: Option<RestartRecord>,
    /// When the VM is started.
    pub due: Option<Instant>,
    /// It would be started, but the node takes no VMs.
    pub held: bool,
    /// The VM is started only while the node takes VMs. In its record too.
    pub evacuated: bool,
}

/// What has happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Input {
    /// Something that the policy has an opinion of, after a run of that many milliseconds.
    Occurred(Occasion, u64),
    /// The actor has begun. The occasion that it found, and the length of the run that has ended, in milliseconds.
    /// For a VM that was stopped to make room the daemon's start ends the time for that.
    Found(Occasion, u64),
    /// The VM makes room. The policy's start waits until the node restarts or takes VMs again. A
    /// node that takes VMs all the time has no such change, so the start is due after
    /// [`Situation::room_ms`] there.
    MakeRoom,
    /// The time has come, and the VM is down.
    Due,
    /// The policy, or whether the node takes VMs, may be another. With how the last run ended.
    Reconsidered(Option<ExitReason>),
    /// A start begins.
    Started {
        /// The run policy requested the start.
        by_policy: bool,
    },
    /// A stop by request cancels the policy's start.
    Stopped,
}

/// Input state of the step.
#[derive(Clone, Copy, Debug)]
pub struct Situation<'a> {
    /// The VM's policy.
    pub policy: RunPolicy,
    /// Last requested state.
    pub intent: Intent,
    /// The VM is down.
    pub down: bool,
    /// The node takes VMs.
    pub schedulable: bool,
    /// How long starts wait.
    pub back_off: BackOff,
    /// How long room is made for on a node that takes VMs, in milliseconds.
    pub room_ms: u64,
    /// Boot id of the running kernel.
    pub boot_id: &'a str,
    /// Now.
    pub now: Instant,
    /// The same in milliseconds of Unix time.
    pub now_ms: u64,
}

/// Action for the actor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Keep room for the VM, or give it back.
    Expect(bool),
    /// Start the VM: so many starts in a row by now.
    Start(u32),
    /// Say that the node stands in the way.
    Hold,
    /// Note that the VM is to be stopped.
    IntendStop,
}

impl Restarts {
    /// The step.
    pub fn step(&mut self, input: Input, of: &Situation<'_>) -> Vec<Effect> {
        let mut effects = self.restarts(input, of);
        if of.policy == RunPolicy::Off && of.down {
            // This includes a VM that ended before the policy could stop it: under a later policy,
            // it waits for a start.
            effects.push(Effect::IntendStop);
        }
        effects
    }

    fn restarts(&mut self, input: Input, of: &Situation<'_>) -> Vec<Effect> {
        match input {
            Input::Occurred(occasion, ran_ms) => self.occurred(occasion, ran_ms, of),
            Input::Found(occasion, ran_ms) => {
                if self.evacuated {
                    self.record.get_or_insert_default().next_ms = 0;
                }
                self.occurred(occasion, ran_ms, of)
            }
            Input::MakeRoom => self.make_room(of),
            Input::Due => self.due(of),
            Input::Reconsidered(last) => self.reconsider(last, of),
            Input::Started { by_policy } => {
                (self.due, self.held) = (None, false);
                if !by_policy {
                    // Somebody wants it now: what went wrong before does not count.
                    self.record = None;
                }
                Vec::new()
            }
            Input::Stopped => {
                *self = Self {
                    evacuated: self.evacuated,
                    ..Self::default()
                };
                vec![Effect::Expect(false)]
            }
        }
    }

    fn occurred(&mut self, occasion: Occasion, ran_ms: u64, of: &Situation<'_>) -> Vec<Effect> {
        let mut restart = self.record.take().unwrap_or_default();
        self.due = None;
        match decide(of.policy, occasion, of.intent) {
            Decision::Stay => return vec![Effect::Expect(false)],
            Decision::Start => (restart.next_ms, restart.back_off_ms) = (of.now_ms, 0),
            // A wait that an earlier daemon began continues.
            Decision::StartLater if matches!(occasion, Occasion::DaemonStart(_)) && restart.next_ms != 0 => {}
            Decision::StartLater => {
                restart.attempts = of.back_off.after_run(restart.attempts, ran_ms);
                let wait = of.back_off.wait(restart.attempts);
                restart.back_off_ms = u64::try_from(wait.as_millis()).unwrap_or(u64::MAX);
                restart.next_ms = of.now_ms.saturating_add(restart.back_off_ms);
            }
        }
        of.boot_id.clone_into(&mut restart.boot_id);
        // A clock that was set back makes no wait longer.
        let left = restart.next_ms.saturating_sub(of.now_ms).min(of.back_off.max_ms);
        self.due = Some(of.now + Duration::from_millis(left));
        self.record = Some(restart);
        vec![Effect::Expect(true)]
    }

    fn make_room(&mut self, of: &Situation<'_>) -> Vec<Effect> {
        if self.due.take().is_none() {
            return Vec::new();
        }
        self.evacuated = true;
        let restart = self.record.get_or_insert_default();
        if !of.schedulable {
            self.held = true;
            (restart.next_ms, restart.back_off_ms) = (0, 0);
            return Vec::new();
        }
        restart.next_ms = of.now_ms.saturating_add(of.room_ms);
        restart.back_off_ms = of.room_ms;
        self.due = Some(of.now + Duration::from_millis(of.room_ms));
        Vec::new()
    }

    fn due(&mut self, of: &Situation<'_>) -> Vec<Effect> {
        self.due = None;
        if self.evacuated && !of.schedulable {
            self.held = true;
            return vec![Effect::Hold];
        }
        let restart = self.record.take().unwrap_or_default();
        let attempts = restart.attempts.saturating_add(1);
        self.record = Some(RestartRecord {
            attempts,
            next_ms: 0,
            back_off_ms: 0,
            ..restart
        });
        vec![Effect::Start(attempts)]
    }

    fn reconsider(&mut self, last: Option<ExitReason>, of: &Situation<'_>) -> Vec<Effect> {
        let held = std::mem::take(&mut self.held);
        let waits = held || self.due.is_some();
        let occasion = if waits {
            Occasion::DaemonStart(last)
        } else {
            Occasion::Changed
        };
        let attempts = self.record.as_ref().map_or(0, |before| before.attempts);
        let effects = self.occurred(occasion, 0, of);
        // A policy that is new places the VM on the node.
        self.evacuated |= !waits && self.due.is_some() && !of.schedulable;
        if held && self.due.is_some() {
            // The node stood in the way, not the VM: there is nothing to wait for.
            let restart = self.record.get_or_insert_default();
            restart.attempts = attempts;
            (restart.next_ms, restart.back_off_ms) = (of.now_ms, 0);
            self.due = Some(of.now);
        }
        effects
    }
}

#[cfg(test)]
mod tests {
    use super::{Effect::*, ExitReason as R, *};

    const NOW_MS: u64 = 1_000_000;
    const BACK_OFF: BackOff = BackOff {
        first_ms: 1000,
        max_ms: 300_000,
        reset_after_ms: 600_000,
    };

    fn of(policy: RunPolicy, intent: Intent, schedulable: bool) -> Situation<'static> {
        Situation {
            policy,
            intent,
            down: false,
            schedulable,
            back_off: BACK_OFF,
            room_ms: 60_000,
            boot_id: "boot",
            now: Instant::now(),
            now_ms: NOW_MS,
        }
    }

    /// Attempts, time of the next start, and remaining wait; the times are in milliseconds after
    /// now.
    fn noted(restarts: &Restarts, of: &Situation<'_>) -> (u32, i64, Option<u128>) {
        let record = restarts.record.clone().unwrap_or_default();
        let next = i64::try_from(record.next_ms).unwrap() - i64::try_from(NOW_MS).unwrap();
        let wait = restarts.due.map(|due| (due - of.now).as_millis());
        (record.attempts, next, wait)
    }

    #[test]
    fn runs_that_fail_are_started_again_and_wait_longer_each_time() {
        let of = of(RunPolicy::OnFailure, Intent::Running, true);
        let mut restarts = Restarts::default();
        for (attempts, wait) in [(0, 1000_u32), (1, 2000), (2, 4000), (3, 8000)] {
            let effects = restarts.step(Input::Occurred(Occasion::Ended(R::GuestPanic), 10), &of);
            assert_eq!(effects, [Expect(true)]);
            assert_eq!(
                noted(&restarts, &of),
                (attempts, i64::from(wait), Some(u128::from(wait)))
            );
            assert_eq!(restarts.step(Input::Due, &of), [Start(attempts + 1)]);
            restarts.step(Input::Started { by_policy: true }, &of);
        }
        // A long run resets the attempts, and so does a start by request.
        let ended = Input::Occurred(Occasion::Ended(R::GuestPanic), BACK_OFF.reset_after_ms);
        restarts.step(ended, &of);
        assert_eq!(noted(&restarts, &of).0, 0);
        restarts.step(Input::Due, &of);
        restarts.step(Input::Started { by_policy: false }, &of);
        assert_eq!(restarts, Restarts::default());
    }

    #[test]
    fn what_the_policy_does_not_start_leaves_nothing_behind() {
        let ended = |reason| Input::Occurred(Occasion::Ended(reason), 0);
        for (policy, intent, input) in [
            (RunPolicy::Manual, Intent::Running, ended(R::Lost)),
            (RunPolicy::Off, Intent::Running, ended(R::Lost)),
            (RunPolicy::OnFailure, Intent::Running, ended(R::GuestShutdown)),
            (RunPolicy::OnFailure, Intent::Stopped, ended(R::Lost)),
            (RunPolicy::UnlessStopped, Intent::Stopped, ended(R::Killed)),
            (RunPolicy::Always, Intent::Running, Input::Stopped),
        ] {
            let of = of(policy, intent, true);
            let mut restarts = Restarts {
                record: Some(RestartRecord {
                    attempts: 3,
                    next_ms: NOW_MS,
                    ..Default::default()
                }),
                due: Some(of.now),
                ..Default::default()
            };
            assert_eq!(restarts.step(input, &of), [Expect(false)], "{policy:?} {input:?}");
            assert_eq!(restarts, Restarts::default(), "{policy:?} {input:?}");
        }
    }

    #[test]
    fn what_is_down_under_the_policy_off_is_meant_to_be() {
        for (policy, down, effects) in [
            (RunPolicy::Off, true, vec![Expect(false), IntendStop]),
            (RunPolicy::Off, false, vec![Expect(false)]),
            (RunPolicy::Manual, true, vec![Expect(false)]),
        ] {
            let of = Situation {
                down,
                ..of(policy, Intent::Running, true)
            };
            let ended = Input::Occurred(Occasion::Ended(R::GuestShutdown), 0);
            assert_eq!(Restarts::default().step(ended, &of), effects, "{policy:?} {down}");
        }
    }

    #[test]
    fn wait_continues_under_the_next_daemon_and_is_no_longer() {
        let of = of(RunPolicy::Always, Intent::Running, true);
        for (next_ms, wait) in [
            (NOW_MS + 500, 500),
            (NOW_MS - 500, 0),
            // The clock was set back by a year.
            (NOW_MS + 31_536_000_000, 300_000),
        ] {
            let record = RestartRecord {
                attempts: 2,
                next_ms,
                ..Default::default()
            };
            let mut restarts = Restarts {
                record: Some(record),
                ..Default::default()
            };
            let found = Input::Found(Occasion::DaemonStart(Some(R::Lost)), 0);
            restarts.step(found, &of);
            let (attempts, _, waits) = noted(&restarts, &of);
            assert_eq!((attempts, waits), (2, Some(wait)), "{next_ms}");
        }
    }

    #[test]
    fn run_that_ends_on_a_cordoned_node_is_started_again() {
        let closed = of(RunPolicy::OnFailure, Intent::Running, false);
        for input in [
            Input::Occurred(Occasion::Ended(R::Lost), 0),
            Input::Found(Occasion::NodeBoot(Some(R::NodeRestart)), 0),
            Input::Found(Occasion::DaemonStart(Some(R::Lost)), 0),
        ] {
            let mut restarts = Restarts::default();
            assert_eq!(restarts.step(input, &closed), [Expect(true)]);
            assert_eq!(restarts.step(Input::Due, &closed), [Start(1)], "{input:?}");
        }
    }

    #[test]
    fn new_policy_on_a_cordoned_node_waits_also_after_a_restart() {
        let closed = of(RunPolicy::Always, Intent::Stopped, false);
        let mut restarts = Restarts::default();
        restarts.step(Input::Reconsidered(None), &closed);
        assert_eq!(restarts.step(Input::Due, &closed), [Hold]);
        let mut next = Restarts {
            record: restarts.record.clone(),
            evacuated: restarts.evacuated,
            ..Default::default()
        };
        next.step(Input::Found(Occasion::DaemonStart(None), 0), &closed);
        assert_eq!(next.step(Input::Due, &closed), [Hold]);
    }

    #[test]
    fn a_cordoned_node_holds_starts_until_it_takes_vms_again() {
        let (closed, open) = (
            of(RunPolicy::Always, Intent::Running, false),
            of(RunPolicy::Always, Intent::Running, true),
        );
        let ended = Input::Occurred(Occasion::Ended(R::Lost), 0);
        let mut restarts = Restarts {
            evacuated: true,
            ..Default::default()
        };
        restarts.step(ended, &closed);
        assert_eq!(restarts.step(Input::Due, &closed), [Hold]);
        assert!(restarts.held && restarts.due.is_none());
        // Once the node takes VMs again, the start is due at once.
        assert_eq!(
            restarts.step(Input::Reconsidered(Some(R::Lost)), &open),
            [Expect(true)]
        );
        assert_eq!(noted(&restarts, &open), (0, 0, Some(0)));
        assert_eq!(restarts.step(Input::Due, &open), [Start(1)]);
    }

    #[test]
    fn a_vm_that_makes_room_waits_for_the_node() {
        let (closed, open) = (
            of(RunPolicy::Always, Intent::Running, false),
            of(RunPolicy::Always, Intent::Running, true),
        );
        let ended = Input::Occurred(Occasion::Ended(R::Stopped), 0);
        let mut restarts = Restarts::default();
        restarts.step(ended, &closed);
        assert_eq!(restarts.step(Input::MakeRoom, &closed), []);
        assert!(restarts.held && restarts.due.is_none());
        let mut restarts = Restarts::default();
        restarts.step(ended, &open);
        restarts.step(Input::MakeRoom, &open);
        assert_eq!(noted(&restarts, &open).2, Some(60_000));
        // Without a planned start, making room has no effect.
        let mut restarts = Restarts::default();
        restarts.step(Input::MakeRoom, &open);
        assert_eq!(restarts, Restarts::default());
        // The daemon's start ends that time.
        let record = RestartRecord {
            next_ms: NOW_MS + 60_000,
            ..Default::default()
        };
        let mut restarts = Restarts {
            record: Some(record),
            evacuated: true,
            ..Default::default()
        };
        let found = Input::Found(Occasion::DaemonStart(Some(R::Stopped)), 0);
        restarts.step(found, &open);
        assert_eq!(noted(&restarts, &open).2, Some(1000));
    }
}
