//! May this request be carried out in this state? A pure function.
//!
//! ```text
//!            Boot                 Pause
//!   Empty ─────────▶ Running ◀────────────▶ Paused
//!     │                 │        Resume        │
//!     │ Stop            │ power-off, crash, Stop
//!     └─────────────▶ Ended ◀──────────────────┘
//! ```

use vmm_protocol::vmm;

/// Where a machine is in its life. There is no way back from `Ended`, and none to `Empty`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum State {
    /// Nothing is built.
    #[default]
    Empty,
    /// The vCPUs run.
    Running,
    /// The vCPUs and all devices are quiet.
    Paused,
    /// The guest is gone.
    Ended,
}

impl From<State> for vmm::State {
    fn from(state: State) -> Self {
        match state {
            State::Empty => Self::Empty,
            State::Running => Self::Running,
            State::Paused => Self::Paused,
            State::Ended => Self::Ended,
        }
    }
}

/// Operations on a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Build it and start the guest.
    Boot,
    /// Make it quiet.
    Pause,
    /// Go on.
    Resume,
    /// Press the power button.
    PowerButton,
    /// Press the reset button.
    Reset,
    /// End it at once.
    Stop,
    /// Plug a disk in, take one away, make one larger, limit it, set the balloon, use a console, ask for counters: the same for a guest that runs and for
    /// one that is paused.
    Disk,
    /// Write a snapshot.
    Save,
    /// Send it to another `vmm`.
    Send,
}

/// The answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    /// Do it.
    Go,
    /// It is so already: succeed and do nothing.
    Already,
    /// Not in this state, for this reason.
    Refuse(&'static str),
}

/// Decides.
pub fn admit(state: State, action: Action) -> Admission {
    use Action::{Boot, Disk, Pause, PowerButton, Reset, Resume, Save, Send, Stop};
    use Admission::{Already, Go, Refuse};
    match (state, action) {
        (State::Empty, Boot) => Go,
        (_, Boot) => Refuse("a process boots one machine in its life"),

        (State::Running, Pause) | (State::Paused, Resume) => Go,
        (State::Paused, Pause) | (State::Running, Resume) => Already,

        (State::Running, PowerButton | Reset) => Go,
        (State::Paused, PowerButton) => Refuse("the machine is paused: its guest can't react"),

        (State::Paused, Reset) => Refuse("the machine is paused: resume it first"),

        (State::Running | State::Paused, Disk | Save) | (State::Running, Send) => Go,
        (State::Paused, Send) => Refuse("the machine is paused: resume it first"),

        (State::Ended, Stop) => Already,
        (_, Stop) => Go,

        (State::Empty, _) => Refuse("no machine was booted"),
        (State::Ended, _) => Refuse("the machine has ended"),
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::{
        Action::{Boot, Disk, Pause, PowerButton, Reset, Resume, Save, Send, Stop},
        State::{Empty, Ended, Paused, Running},
        *,
    };

    #[derive(PartialEq, Eq, Debug)]
    enum Answer {
        Go,
        Already,
        Refuse,
    }

    #[rstest]
    #[case(Empty, [(Boot, Answer::Go), (Pause, Answer::Refuse), (Resume, Answer::Refuse), (PowerButton, Answer::Refuse), (Stop, Answer::Go), (Disk, Answer::Refuse), (Reset, Answer::Refuse), (Save, Answer::Refuse), (Send, Answer::Refuse)])]
    #[case(Running, [(Boot, Answer::Refuse), (Pause, Answer::Go), (Resume, Answer::Already), (PowerButton, Answer::Go), (Stop, Answer::Go), (Disk, Answer::Go), (Reset, Answer::Go), (Save, Answer::Go), (Send, Answer::Go)])]
    #[case(Paused, [(Boot, Answer::Refuse), (Pause, Answer::Already), (Resume, Answer::Go), (PowerButton, Answer::Refuse), (Stop, Answer::Go), (Disk, Answer::Go), (Reset, Answer::Refuse), (Save, Answer::Go), (Send, Answer::Refuse)])]
    #[case(Ended, [(Boot, Answer::Refuse), (Pause, Answer::Refuse), (Resume, Answer::Refuse), (PowerButton, Answer::Refuse), (Stop, Answer::Already), (Disk, Answer::Refuse), (Reset, Answer::Refuse), (Save, Answer::Refuse), (Send, Answer::Refuse)])]
    fn each_action_in_each_state_has_its_answer(#[case] state: State, #[case] table: [(Action, Answer); 9]) {
        for (action, expected) in table {
            let answer = match admit(state, action) {
                Admission::Go => Answer::Go,
                Admission::Already => Answer::Already,
                Admission::Refuse(reason) => {
                    assert!(!reason.is_empty());
                    Answer::Refuse
                }
            };
            assert_eq!(answer, expected, "{action:?} in {state:?}");
        }
    }
}
