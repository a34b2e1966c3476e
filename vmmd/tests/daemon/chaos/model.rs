//! Model of the history of one VM's name. It searches for an order of all calls that is consistent
//! with their begin and end times, in which each answer is right, and which ends with the present
//! state.
//!
//! A call is one or more steps, each of which happens at one moment between the call and its
//! answer. For a call without an answer, any number of its steps may have happened, or none.
//! Between any two steps the run policy may act.

use std::collections::HashSet;

/// A moment, as a number that grows.
pub type Time = u64;

/// State of a name.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum State {
    Absent,
    There(Vm),
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Vm {
    /// `None` until an answer has shown it.
    pub uid: Option<String>,
    pub generation: Generation,
    /// Mark of the last written spec.
    pub mark: u64,
    pub policy: Policy,
    /// It has its one disk.
    pub disk: bool,
    /// It was last asked to run.
    pub wanted: bool,
    pub run: Run,
}

/// Spec that a call writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Spec {
    pub mark: u64,
    pub policy: Policy,
    pub disk: bool,
}

/// A run policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Policy {
    UnlessStopped,
    Always,
    OnFailure,
    Manual,
    Off,
}

/// Generation of a VM, relative to its first value. The daemon chooses the first value, which is
/// above 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Generation {
    /// `None` until an answer has shown it.
    first: Option<u64>,
    updates: u64,
}

impl Generation {
    const NEW: Self = Self {
        first: None,
        updates: 0,
    };

    /// The number, when it is known.
    pub fn known(self) -> Option<u64> {
        self.first.map(|first| first + self.updates)
    }

    /// Adds an observed generation; `None` for a contradiction.
    fn seen(self, generation: u64) -> Option<Self> {
        let first = generation.checked_sub(self.updates).filter(|first| *first > 0)?;
        let same = self.first.is_none_or(|known| known == first);
        same.then_some(Self {
            first: Some(first),
            ..self
        })
    }

    fn updated(self) -> Self {
        Self {
            updates: self.updates + 1,
            ..self
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Run {
    Down,
    Up,
    Paused,
}

#[derive(Clone, Debug)]
pub enum Step {
    Create {
        uid: Option<String>,
        spec: Spec,
        /// With a start, which may be refused: then it is wanted all the same.
        wanted: bool,
    },
    Start,
    /// Stop by request: the VM is not wanted afterwards.
    Stop,
    /// It ends, and is wanted as before.
    End,
    /// The VM is wanted, such as after a cancelled stop.
    Want,
    /// A guest that is to hear something must run.
    Wake,
    Pause,
    Resume,
    Remove,
    Update {
        spec: Spec,
    },
    /// Its disk comes, if it is not there.
    Attach,
    /// Removes its disk, if present.
    Detach,
    Look(Look),
}

/// What was seen.
#[derive(Clone, Debug)]
pub enum Look {
    Anything,
    Absent,
    Present,
    /// It has this run policy.
    Policy(Policy),
    NoDisk,
    Down,
    NotDown,
    Paused,
    /// The generation is another.
    Not(u64),
    /// The complete state, except the run of a VM that is starting or stopping.
    Whole {
        uid: String,
        generation: u64,
        spec: Spec,
        run: Option<Run>,
    },
}

/// A call.
#[derive(Clone, Debug)]
pub struct Op {
    /// For messages.
    pub name: String,
    pub begin: Time,
    pub end: Time,
    /// One of these has happened.
    pub ways: Vec<Vec<Step>>,
    /// Perhaps not to its end.
    pub partial: bool,
    /// The call that this one repeats, with the same request id: nothing is done again that was done to its end.
    pub repeats: Option<usize>,
    /// It can only be so when another call is under way.
    pub disturbed: bool,
}

impl State {
    fn after(&self, step: &Step, foreign: &HashSet<String>) -> Option<Self> {
        let there = match self {
            Self::Absent => None,
            Self::There(vm) => Some(vm),
        };
        let with = |change: &dyn Fn(&mut Vm)| {
            let mut vm = there?.clone();
            change(&mut vm);
            Some(Self::There(vm))
        };
        let run = |run| with(&|vm| vm.run = run);
        match step {
            Step::Create { uid, spec, wanted } => there.is_none().then(|| {
                Self::There(Vm {
                    uid: uid.clone(),
                    generation: Generation::NEW,
                    mark: spec.mark,
                    policy: spec.policy,
                    disk: spec.disk,
                    wanted: *wanted,
                    run: Run::Down,
                })
            }),
            Step::Start if there?.run == Run::Down => with(&|vm| (vm.run, vm.wanted) = (Run::Up, true)),
            // A start of a running VM does nothing.
            Step::Start if there?.run == Run::Up => Some(self.clone()),
            Step::Start => None,
            Step::Stop => with(&|vm| (vm.run, vm.wanted) = (Run::Down, false)),
            Step::End => run(Run::Down),
            Step::Want => with(&|vm| vm.wanted = true),
            Step::Wake if there?.run == Run::Down => Some(self.clone()),
            Step::Wake => run(Run::Up),
            Step::Pause if there?.run != Run::Down => run(Run::Paused),
            Step::Resume if there?.run != Run::Down => run(Run::Up),
            Step::Pause | Step::Resume => None,
            Step::Remove => there.map(|_| Self::Absent),
            Step::Update { spec } => with(&|vm| {
                (vm.mark, vm.policy, vm.disk) = (spec.mark, spec.policy, spec.disk);
                vm.generation = vm.generation.updated();
            }),
            Step::Attach | Step::Detach => with(&|vm| {
                let disk = matches!(step, Step::Attach);
                if vm.disk != disk {
                    vm.generation = vm.generation.updated();
                }
                vm.disk = disk;
            }),
            Step::Look(look) => self.seen(look, foreign),
        }
    }

    /// State after an action of the run policy alone.
    fn drift(&self) -> Option<Self> {
        let Self::There(vm) = self else { return None };
        let run = match (vm.policy, vm.run) {
            (Policy::Always, Run::Down) => Run::Up,
            (Policy::UnlessStopped | Policy::OnFailure, Run::Down) if vm.wanted => Run::Up,
            (Policy::Off, Run::Up | Run::Paused) => Run::Down,
            _ => return None,
        };
        let wanted = vm.wanted && vm.policy != Policy::Off || run == Run::Up;
        Some(Self::There(Vm {
            run,
            wanted,
            ..vm.clone()
        }))
    }

    fn seen(&self, look: &Look, foreign: &HashSet<String>) -> Option<Self> {
        let vm = match self {
            Self::Absent => {
                return matches!(look, Look::Absent | Look::Anything).then_some(Self::Absent);
            }
            Self::There(vm) => vm,
        };
        let right = match look {
            Look::Absent => false,
            Look::Anything => true,
            Look::Policy(policy) => vm.policy == *policy,
            Look::NoDisk => !vm.disk,
            Look::Present => true,
            Look::Down => vm.run == Run::Down,
            Look::NotDown => vm.run != Run::Down,
            Look::Paused => vm.run == Run::Paused,
            Look::Not(generation) => vm.generation.known() != Some(*generation),
            Look::Whole {
                uid,
                generation,
                spec,
                run,
            } => {
                let same = vm
                    .uid
                    .as_ref()
                    .map_or(!foreign.contains(uid), |known| known == uid);
                if !same
                    || (vm.mark, vm.policy, vm.disk) != (spec.mark, spec.policy, spec.disk)
                    || run.is_some_and(|run| run != vm.run)
                {
                    return None;
                }
                return Some(Self::There(Vm {
                    uid: Some(uid.clone()),
                    generation: vm.generation.seen(*generation)?,
                    ..vm.clone()
                }));
            }
        };
        right.then(|| self.clone())
    }
}

/// How far a call is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Progress {
    Waits,
    Within {
        way: u8,
        steps: u8,
    },
    /// To its end.
    Whole,
    /// It ended early, or had nothing left to do.
    Over,
}

impl Progress {
    fn is_over(self) -> bool {
        matches!(self, Self::Whole | Self::Over)
    }
}

/// Most states of one search for an order in which the VM is wanted.
const WANTED_STATES: usize = 200_000;
/// Most states of one search. A history that needs more is a fault of the model or of the harness.
const MAX_STATES: usize = 3_000_000;

/// Returns the state at the end of all calls that `now` confirms; `None` when no order explains it.
/// `foreign` are uids that belong to other VMs. Where some orders may leave the VM wanted, it is
/// wanted: this state allows more successors.
///
/// # Panics
///
/// After [`MAX_STATES`] states without an answer, with the calls.
pub fn explain(from: &State, ops: &[Op], now: &Look, foreign: &HashSet<String>) -> Option<State> {
    let restless = |policy| policy != Policy::Manual;
    let policy_acts = matches!(from, State::There(vm) if restless(vm.policy))
        || ops.iter().flat_map(|op| op.ways.iter().flatten()).any(
            |step| matches!(step, Step::Create { spec, .. } | Step::Update { spec } if restless(spec.policy)),
        );
    for op in ops.iter().filter(|op| op.disturbed && !policy_acts) {
        let others = ops.iter().filter(|other| !std::ptr::eq(*other, op));
        let mut others = others.filter(|other| !other.only_looks());
        if !others.any(|other| other.begin < op.end && op.begin < other.end) {
            eprintln!("{} was disturbed by nobody", op.name);
            return None;
        }
    }
    let search = |wanted, limit| {
        let mut search = Search {
            ops,
            now,
            foreign,
            wanted,
            limit,
            seen: HashSet::new(),
        };
        let end = search.go(from, vec![Progress::Waits; ops.len()]);
        (end, search.seen.len() > limit)
    };
    let (wanted, unfinished) = search(true, WANTED_STATES);
    if wanted.is_some() {
        return wanted;
    }
    let (mut end, endless) = search(false, MAX_STATES);
    assert!(
        end.is_some() || !endless,
        "no order was found among {MAX_STATES} states that leads from {from:?} to {now:?}:\n{ops:#?}"
    );
    if let Some(State::There(vm)) = &mut end {
        vm.wanted |= unfinished;
    }
    end
}

impl Op {
    fn only_looks(&self) -> bool {
        let mut steps = self.ways.iter().flatten();
        steps.all(|step| matches!(step, Step::Look(_)))
    }
}

struct Search<'a> {
    ops: &'a [Op],
    now: &'a Look,
    foreign: &'a HashSet<String>,
    /// Whether the VM is to be wanted in the end.
    wanted: bool,
    /// Most states.
    limit: usize,
    seen: HashSet<(State, Vec<Progress>)>,
}

impl Search<'_> {
    /// Two rules keep the states few, and lose no order. A call that may have stopped early holds nothing up: it is over
    /// when a call begins that came after it. A look that changes nothing known, and nothing over, is made as soon as it is
    /// right.
    fn go(&mut self, state: &State, mut progress: Vec<Progress>) -> Option<State> {
        for (index, op) in self.ops.iter().enumerate() {
            let closes = |(other, at): (&Op, &Progress)| other.end < op.begin && !at.is_over();
            if progress[index] == Progress::Waits && !self.ops.iter().zip(&progress).any(closes) {
                let right = |way: &Vec<Step>| match &way[..] {
                    [look @ Step::Look(_)] => state.after(look, self.foreign).as_ref() == Some(state),
                    _ => false,
                };
                if op.ways.iter().any(right) && op.only_looks() {
                    progress = self.stepped(index, Progress::Whole, &progress);
                }
            }
        }
        if self.seen.len() > self.limit || !self.seen.insert((state.clone(), progress.clone())) {
            return None;
        }
        if (0..self.ops.len()).all(|index| progress[index].is_over() || self.ops[index].partial) {
            let end = state.seen(self.now, self.foreign);
            let found = end.filter(|state| match state {
                State::There(vm) => !self.wanted || vm.wanted,
                State::Absent => true,
            });
            if found.is_some() {
                return found;
            }
        }
        if let Some(next) = state.drift() {
            let end = self.go(&next, progress.clone());
            if end.is_some() {
                return end;
            }
        }
        for (index, op) in self.ops.iter().enumerate() {
            if !self.may_step(index, &progress) {
                continue;
            }
            let before = progress[index];
            let repeated = op.repeats.is_some_and(|first| progress[first] == Progress::Whole);
            if repeated && before == Progress::Waits {
                let end = self.go(state, self.stepped(index, Progress::Over, &progress));
                if end.is_some() {
                    return end;
                }
            }
            // Creations, removals and updates are done only once; steps that set a wanted state may
            // be repeated.
            let once = |step: &Step| matches!(step, Step::Create { .. } | Step::Remove | Step::Update { .. });
            if repeated && op.ways.iter().flatten().any(once) {
                continue;
            }
            for (way, steps) in op.ways.iter().enumerate() {
                let done = match before {
                    Progress::Within { way: chosen, steps } if usize::from(chosen) == way => {
                        usize::from(steps)
                    }
                    Progress::Waits => 0,
                    _ => continue,
                };
                let next = match steps.get(done) {
                    Some(step) => state.after(step, self.foreign),
                    None => Some(state.clone()),
                };
                let Some(next) = next else { continue };
                let at = if done + 1 >= steps.len() {
                    Progress::Whole
                } else {
                    Progress::Within {
                        way: u8::try_from(way).unwrap(),
                        steps: u8::try_from(done + 1).unwrap(),
                    }
                };
                let end = self.go(&next, self.stepped(index, at, &progress));
                if end.is_some() {
                    return end;
                }
            }
        }
        None
    }

    /// Whether a call may take a step: it is not over, and each call that was answered before it began is.
    fn may_step(&self, index: usize, progress: &[Progress]) -> bool {
        let earlier = |(other, at): (&Op, &Progress)| {
            other.end < self.ops[index].begin && !other.partial && !at.is_over()
        };
        !progress[index].is_over() && !self.ops.iter().zip(progress).any(earlier)
    }

    /// The progress after a step of a call: calls before it that may have stopped early have.
    fn stepped(&self, index: usize, at: Progress, progress: &[Progress]) -> Vec<Progress> {
        let mut progress = progress.to_vec();
        progress[index] = at;
        for (other, progress) in self.ops.iter().zip(&mut progress) {
            if other.end < self.ops[index].begin && !progress.is_over() {
                *progress = Progress::Over;
            }
        }
        progress
    }
}

mod tests {
    use super::*;

    fn op(begin: Time, end: Time, steps: &[Step]) -> Op {
        Op {
            name: "test".into(),
            begin,
            end,
            ways: vec![steps.to_vec()],
            partial: false,
            repeats: None,
            disturbed: false,
        }
    }

    fn create(uid: Option<&str>) -> Step {
        let spec = spec(Policy::Manual);
        Step::Create {
            uid: uid.map(Into::into),
            spec,
            wanted: false,
        }
    }

    fn spec(policy: Policy) -> Spec {
        Spec {
            mark: 0,
            policy,
            disk: false,
        }
    }

    fn whole(uid: &str, run: Run) -> Look {
        Look::Whole {
            uid: uid.into(),
            generation: 1,
            spec: spec(Policy::Manual),
            run: Some(run),
        }
    }

    fn explained(ops: &[Op], now: &Look) -> bool {
        explain(&State::Absent, ops, now, &HashSet::new()).is_some()
    }

    fn unanswered(op: Op) -> Op {
        Op { partial: true, ..op }
    }

    #[test]
    fn what_was_acknowledged_is_there() {
        let made = op(1, 2, &[create(Some("a"))]);
        assert!(explained(std::slice::from_ref(&made), &whole("a", Run::Down)));
        assert!(!explained(std::slice::from_ref(&made), &Look::Absent));
        assert!(!explained(std::slice::from_ref(&made), &whole("b", Run::Down)));
        assert!(!explained(std::slice::from_ref(&made), &whole("a", Run::Up)));
        let deleted = op(3, 4, &[Step::Remove]);
        assert!(!explained(
            &[made.clone(), deleted.clone()],
            &whole("a", Run::Down)
        ));
        assert!(explained(&[made.clone(), deleted], &Look::Absent));
        // Two VMs with the same name cannot exist.
        assert!(!explained(
            &[made, op(1, 9, &[create(Some("b"))])],
            &whole("b", Run::Down)
        ));
    }

    #[test]
    fn what_was_not_answered_may_have_happened_in_part() {
        let lost = unanswered(op(1, 9, &[create(None), Step::Start]));
        for now in [Look::Absent, whole("a", Run::Down), whole("a", Run::Up)] {
            assert!(explained(std::slice::from_ref(&lost), &now), "{now:?}");
        }
        assert!(!explained(std::slice::from_ref(&lost), &whole("a", Run::Paused)));
        let foreign = HashSet::from(["a".to_owned()]);
        assert!(explain(&State::Absent, &[lost], &whole("a", Run::Down), &foreign).is_none());
    }

    #[test]
    fn a_request_is_carried_out_once() {
        let first = unanswered(op(1, 2, &[create(None)]));
        let again = Op {
            repeats: Some(0),
            ..op(5, 6, &[create(None)])
        };
        let deleted = op(3, 4, &[Step::Remove]);
        // As the deletion was answered, the first had made it: it is gone.
        let ops = [first, again, deleted];
        assert!(explained(&ops, &Look::Absent));
        assert!(!explained(&ops, &whole("a", Run::Down)));
    }

    #[test]
    fn looks_are_in_the_order_in_which_they_were_made() {
        let made = op(1, 2, &[create(Some("a"))]);
        let looks = |first, second| {
            let ops = [
                made.clone(),
                op(3, 8, &[Step::Start]),
                op(4, 5, &[Step::Look(whole("a", first))]),
                op(6, 7, &[Step::Look(whole("a", second))]),
            ];
            explained(&ops, &whole("a", Run::Up))
        };
        assert!(looks(Run::Down, Run::Up));
        assert!(!looks(Run::Up, Run::Down));
    }

    #[test]
    fn nobody_is_disturbed_by_nobody() {
        let made = op(1, 2, &[create(Some("a"))]);
        let busy = |begin, end| Op {
            disturbed: true,
            ..unanswered(op(begin, end, &[Step::Start]))
        };
        let stop = op(4, 6, &[Step::Stop]);
        let explained = |busy| explained(&[made.clone(), stop.clone(), busy], &whole("a", Run::Down));
        assert!(explained(busy(3, 5)));
        assert!(!explained(busy(7, 8)));
    }

    #[test]
    fn a_policy_brings_back_what_is_wanted_and_nothing_else() {
        for (policy, again) in [
            (Policy::UnlessStopped, true),
            (Policy::Always, true),
            (Policy::OnFailure, true),
            (Policy::Manual, false),
        ] {
            let made = Step::Create {
                uid: Some("a".into()),
                spec: spec(policy),
                wanted: false,
            };
            let now = |run| Look::Whole {
                uid: "a".into(),
                generation: 1,
                spec: spec(policy),
                run: Some(run),
            };
            let started = op(3, 4, &[Step::Start]);
            let died = op(5, 6, &[Step::End]);
            let stopped = op(7, 8, &[Step::Stop]);
            let ops = [op(1, 2, &[made]), started, died, stopped];
            assert_eq!(explained(&ops[..3], &now(Run::Up)), again, "{policy:?}");
            let always = policy == Policy::Always;
            assert_eq!(explained(&ops, &now(Run::Up)), always, "{policy:?} after a stop");
            assert!(explained(&ops, &now(Run::Down)));
        }
    }

    #[test]
    fn what_may_be_wanted_is() {
        let made = Step::Create {
            uid: Some("a".into()),
            spec: spec(Policy::UnlessStopped),
            wanted: false,
        };
        let ops = [
            op(1, 2, &[made]),
            op(3, 4, &[Step::Start]),
            unanswered(op(5, 9, &[Step::Stop])),
            op(5, 9, &[Step::End]),
        ];
        let now = Look::Whole {
            uid: "a".into(),
            generation: 1,
            spec: spec(Policy::UnlessStopped),
            run: Some(Run::Down),
        };
        let end = explain(&State::Absent, &ops, &now, &HashSet::new());
        assert!(matches!(end, Some(State::There(vm)) if vm.wanted));
    }

    #[test]
    fn a_disk_comes_and_goes_and_each_counts_once() {
        let attached = |begin, end| op(begin, end, &[Step::Attach]);
        let now = |generation, disk| Look::Whole {
            uid: "a".into(),
            generation,
            spec: Spec {
                disk,
                ..spec(Policy::Manual)
            },
            run: Some(Run::Down),
        };
        let made = op(1, 2, &[create(Some("a")), Step::Look(now(1, false))]);
        let twice = [made.clone(), attached(3, 4), attached(5, 6)];
        assert!(explained(&twice, &now(2, true)));
        assert!(!explained(&twice, &now(3, true)));
        let gone = [made, attached(3, 4), op(5, 6, &[Step::Detach])];
        assert!(explained(&gone, &now(3, false)));
        assert!(!explained(&gone, &now(3, true)));
    }
}
