//! May this request be carried out in this state? A pure function.
//!
//! ```text
//!            Boot                 Pause
//!   Empty ─────────▶ Running ◀────────────▶ Paused
//!     │                 │        Resume        │
//!     │ Stop            │ power-off, crash, Stop
//!     └─────────────▶ Ended ◀──────────────────┘
//! ```

use vmm_protocol::vmm::{self, request::Op};

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
pub fn admit(state: State, op: &Op) -> Admission {
    use Admission::{Already, Go, Refuse};
    use State::{Empty, Ended, Paused, Running};
    match (state, op) {
        (Empty, Op::Boot(_)) => Go,
        (_, Op::Boot(_)) => Refuse("a process boots one machine in its life"),

        (Ended, Op::Stop(_)) => Already,
        (_, Op::Stop(_)) => Go,

        (Empty, _) => Refuse("no machine was booted"),
        (Ended, _) => Refuse("the machine has ended"),

        (Paused, Op::Pause(_)) | (Running, Op::Resume(_)) => Already,
        (Paused, Op::PowerButton(_) | Op::InjectNmi(_)) => {
            Refuse("the machine is paused: its guest can't react")
        }
        (Paused, Op::ResetMachine(_) | Op::Send(_)) => Refuse("the machine is paused: resume it first"),
        (Running, Op::UnlockDisks(_)) => Refuse("the machine runs: pause it first"),

        (Running | Paused, _) => Go,
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;
    use vmm_protocol::vmm::{
        Boot, GetDiskStats, InjectNmi, Pause, PowerButton, ResetMachine, Resume, Save, Send, Stop,
        UnlockDisks,
    };

    use super::{
        Admission::{Already, Go, Refuse},
        *,
    };

    /// An expected refusal, for any reason.
    const NO: Admission = Refuse("");

    #[rstest]
    // The states are Empty, Running, Paused and Ended.
    #[case(Op::Boot(Boot::default()), [Go, NO, NO, NO])]
    #[case(Op::Pause(Pause {}), [NO, Go, Already, NO])]
    #[case(Op::Resume(Resume {}), [NO, Already, Go, NO])]
    #[case(Op::PowerButton(PowerButton {}), [NO, Go, NO, NO])]
    #[case(Op::ResetMachine(ResetMachine {}), [NO, Go, NO, NO])]
    #[case(Op::InjectNmi(InjectNmi {}), [NO, Go, NO, NO])]
    #[case(Op::Stop(Stop {}), [Go, Go, Go, Already])]
    #[case(Op::Save(Save::default()), [NO, Go, Go, NO])]
    #[case(Op::Send(Send::default()), [NO, Go, NO, NO])]
    #[case(Op::UnlockDisks(UnlockDisks {}), [NO, NO, Go, NO])]
    #[case(Op::GetDiskStats(GetDiskStats {}), [NO, Go, Go, NO])]
    fn each_operation_in_each_state_has_its_answer(#[case] op: Op, #[case] expected: [Admission; 4]) {
        let states = [State::Empty, State::Running, State::Paused, State::Ended];
        for (state, expected) in states.into_iter().zip(expected) {
            let answer = match admit(state, &op) {
                Refuse(reason) if !reason.is_empty() => NO,
                answer => answer,
            };
            assert_eq!(answer, expected, "{op:?} in {state:?}");
        }
    }
}
