//! Stages of a stop: the guest is asked to power off, then the `vmm` is asked to end, then the
//! process is killed. A pure step; the actor carries out its effects.
//!
//! ```text
//!              grace                  time is over            2 s
//!  (begin) ───────────▶ Asked ─────────────────▶ Ending ─────────────▶ Killed ──▶ the exit, however long it takes
//!     │                  │  ▲ haste, the vmm answers again      ▲
//!     │ by force         │ cancel: the guest runs on            │ no connection
//!     └──────────────────┴──────────────────────────────────────┘
//! ```
//!
//! Invariants: `asked` decides the meaning of an exit, so it is written before the `vmm` receives a
//! request. A deadline never moves later.

use std::time::{Duration, Instant};

use super::exit::Asked;

/// Time that a `vmm` has to end before it is killed. No data that it has acknowledged to the guest
/// depends on this time.
pub const END_TIMEOUT: Duration = Duration::from_secs(2);
/// Time that a killed process has to be gone before it is killed again.
pub const KILL_TIMEOUT: Duration = Duration::from_secs(2);

/// How far a stop is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stage {
    /// The guest was asked to power off.
    Asked,
    /// The `vmm` was asked to end.
    Ending,
    /// The process was killed.
    Killed,
}

/// Action after a stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Then {
    /// Nothing.
    Stay,
    /// A start.
    Start,
    /// The VM's deletion.
    Delete,
}

/// A stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stopping {
    /// How far it is.
    pub stage: Stage,
    /// When the next stage begins; `None` while a start is waited for that is being cancelled, and when nothing follows but the exit.
    pub deadline: Option<Instant>,
    /// Last request, which decides the meaning of the exit.
    pub asked: Asked,
    /// What follows.
    pub then: Then,
}

/// Event of a stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Input {
    /// It begins.
    Begin {
        /// How long the guest may take; none by force.
        grace: Option<Duration>,
        /// The guest is paused, or may be: it has to run to hear the power button.
        paused: bool,
    },
    /// The start that it cancels has come up all the same.
    CameUp,
    /// It continues as another stop whose `vmm` was already asked, without grace from here on.
    TakeOver,
    /// Somebody else asks for the same with this grace, which may shorten the time and not lengthen it.
    Hasten(Option<Duration>),
    /// The deadline is over.
    Deadline,
    /// The `vmm` answers again after its connection was lost.
    Reachable {
        /// See [`Self::Begin`].
        paused: bool,
    },
}

/// Action for the actor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Commit the operation: it is not cancellable any more.
    Commit,
    /// Say how far it is.
    Report,
    /// Press the power button.
    PressButton {
        /// The guest is let run first.
        resume: bool,
    },
    /// Ask the `vmm` to end.
    End,
    /// Kill the process.
    Kill,
    /// Say that the process was killed and does not die.
    Linger,
}

impl Stopping {
    /// One that has not begun.
    pub fn new(asked: Asked, then: Then) -> Self {
        Self {
            stage: Stage::Asked,
            deadline: None,
            asked,
            then,
        }
    }

    /// The step. `reachable` says whether the `vmm` can be told anything.
    pub fn step(&mut self, input: Input, now: Instant, reachable: bool) -> Vec<Effect> {
        match (input, self.stage) {
            (
                Input::Begin {
                    grace: Some(grace),
                    paused,
                },
                _,
            ) => {
                self.stage = Stage::Asked;
                self.deadline = Some(now + grace);
                vec![Effect::Report, Effect::PressButton { resume: paused }]
            }
            (Input::Begin { grace: None, .. } | Input::CameUp, _)
            | (Input::TakeOver | Input::Hasten(None), Stage::Asked) => self.end(now, reachable),
            (Input::TakeOver, _) => vec![Effect::Commit, Effect::Report],
            (Input::Hasten(Some(grace)), Stage::Asked) => {
                self.deadline = self.deadline.map(|deadline| deadline.min(now + grace));
                vec![Effect::Report]
            }
            (Input::Deadline, Stage::Asked) => {
                if self.asked != Asked::ProbeFailed {
                    self.asked = Asked::Overdue;
                }
                self.end(now, reachable)
            }
            (Input::Deadline, Stage::Ending) => self.kill(now),
            (Input::Deadline, Stage::Killed) => {
                self.deadline = None;
                vec![Effect::Linger]
            }
            // The guest did not receive the power button, or may have missed it. Its grace time
            // continues all the same.
            (Input::Reachable { paused }, Stage::Asked) => vec![Effect::PressButton { resume: paused }],
            (Input::Hasten(_) | Input::Reachable { .. }, _) => Vec::new(),
        }
    }

    fn end(&mut self, now: Instant, reachable: bool) -> Vec<Effect> {
        if !reachable {
            return self.kill(now);
        }
        self.asked = self.asked.ended();
        self.stage = Stage::Ending;
        self.deadline = Some(now + END_TIMEOUT);
        vec![Effect::Commit, Effect::Report, Effect::End]
    }

    fn kill(&mut self, now: Instant) -> Vec<Effect> {
        self.asked = self.asked.ended();
        self.stage = Stage::Killed;
        self.deadline = Some(now + KILL_TIMEOUT);
        vec![Effect::Commit, Effect::Report, Effect::Kill]
    }
}

#[cfg(test)]
mod tests {
    use super::{Asked as A, Effect::*, *};

    const GRACE: Duration = Duration::from_secs(60);
    const SOON: Duration = Duration::from_secs(5);

    /// Where a stop is after inputs that come one second after the other, and the effects of each.
    fn run(inputs: &[Input], reachable: bool) -> (Stopping, Vec<Vec<Effect>>) {
        let mut now = Instant::now();
        let mut stop = Stopping::new(A::PowerOff, Then::Stay);
        let mut effects = Vec::new();
        for input in inputs {
            effects.push(stop.step(*input, now, reachable));
            now += Duration::from_secs(1);
        }
        (stop, effects)
    }

    const BEGIN: Input = Input::Begin {
        grace: Some(GRACE),
        paused: false,
    };
    const FORCE: Input = Input::Begin {
        grace: None,
        paused: false,
    };

    #[test]
    fn each_input_has_its_effects() {
        let again = Input::Reachable { paused: true };
        let press = |resume| vec![Report, PressButton { resume }];
        let (end, kill) = (vec![Commit, Report, End], vec![Commit, Report, Kill]);
        // Inputs and whether the vmm is reachable; then the last effects, the stage and the last
        // request.
        type Row<'a> = (&'a [Input], bool, Vec<Effect>, Stage, Asked);
        let table: &[Row<'_>] = &[
            (&[BEGIN], true, press(false), Stage::Asked, A::PowerOff),
            (
                &[Input::Begin {
                    grace: Some(GRACE),
                    paused: true,
                }],
                true,
                press(true),
                Stage::Asked,
                A::PowerOff,
            ),
            // Without a connection no request is sent; the grace time of the guest runs all the
            // same.
            (&[BEGIN], false, press(false), Stage::Asked, A::PowerOff),
            (
                &[BEGIN, again],
                true,
                vec![PressButton { resume: true }],
                Stage::Asked,
                A::PowerOff,
            ),
            (&[FORCE], true, end.clone(), Stage::Ending, A::Kill),
            (&[FORCE], false, kill.clone(), Stage::Killed, A::Kill),
            (&[Input::CameUp], true, end.clone(), Stage::Ending, A::Kill),
            (
                &[BEGIN, Input::Deadline],
                true,
                end.clone(),
                Stage::Ending,
                A::Overdue,
            ),
            (
                &[BEGIN, Input::Deadline],
                false,
                kill.clone(),
                Stage::Killed,
                A::Overdue,
            ),
            (
                &[BEGIN, Input::Deadline, Input::Deadline],
                true,
                kill.clone(),
                Stage::Killed,
                A::Overdue,
            ),
            (&[FORCE, Input::Deadline], true, kill, Stage::Killed, A::Kill),
            (
                &[FORCE, Input::Deadline, Input::Deadline],
                true,
                vec![Linger],
                Stage::Killed,
                A::Kill,
            ),
            (
                &[BEGIN, Input::Hasten(None)],
                true,
                end.clone(),
                Stage::Ending,
                A::Kill,
            ),
            (
                &[BEGIN, Input::Hasten(Some(SOON))],
                true,
                vec![Report],
                Stage::Asked,
                A::PowerOff,
            ),
            (&[BEGIN, Input::TakeOver], true, end, Stage::Ending, A::Kill),
            // A `vmm` that was asked to end is not asked again.
            (
                &[FORCE, Input::TakeOver],
                true,
                vec![Commit, Report],
                Stage::Ending,
                A::Kill,
            ),
            (
                &[FORCE, Input::Hasten(None)],
                true,
                vec![],
                Stage::Ending,
                A::Kill,
            ),
            (&[FORCE, again], true, vec![], Stage::Ending, A::Kill),
        ];
        for (inputs, reachable, expected, stage, asked) in table {
            let (stop, effects) = run(inputs, *reachable);
            assert_eq!(effects.last(), Some(expected), "{inputs:?} {reachable}");
            assert_eq!(
                (stop.stage, stop.asked),
                (*stage, *asked),
                "{inputs:?} {reachable}"
            );
        }
    }

    #[test]
    fn a_deadline_never_gets_later() {
        let now = Instant::now();
        for (first, second, expected) in [(GRACE, SOON, SOON), (SOON, GRACE, SOON), (SOON, SOON, SOON)] {
            let mut stop = Stopping::new(A::PowerOff, Then::Stay);
            stop.step(
                Input::Begin {
                    grace: Some(first),
                    paused: false,
                },
                now,
                true,
            );
            stop.step(Input::Hasten(Some(second)), now, true);
            assert_eq!(stop.deadline, Some(now + expected), "{first:?} {second:?}");
        }
    }

    #[test]
    fn every_stop_comes_to_its_end() {
        // After any inputs with three deadlines, only the exit remains.
        let inputs = [
            Input::Hasten(None),
            Input::Hasten(Some(SOON)),
            Input::TakeOver,
            Input::Reachable { paused: false },
        ];
        for reachable in [true, false] {
            for first in [BEGIN, FORCE] {
                for a in inputs {
                    for b in inputs {
                        let all = [first, a, Input::Deadline, b, Input::Deadline, a, Input::Deadline];
                        let (stop, effects) = run(&all, reachable);
                        assert_eq!(
                            (stop.stage, stop.deadline),
                            (Stage::Killed, None),
                            "{all:?} {reachable}"
                        );
                        let kills = effects.iter().flatten().filter(|effect| **effect == Kill);
                        assert_eq!(kills.count(), 1, "{all:?} {reachable}");
                    }
                }
            }
        }
    }
}
