//! Every behaviour of two daemons, their `vmm` processes and the network between them, by exhaustive search.
//!
//! What was said once may be heard at any time later and any number of times: that is delay, reordering and repetition. All that is under way
//! may be lost. Daemons end and start anew, also between the write of a record and what follows it. Each kind of fault has a budget, so that
//! the search ends.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    sync::LazyLock,
};

use super::*;

/// How many of each may happen.
const CRASHES: u8 = 2;
const VMM_DEATHS: u8 = 1;
const LOSSES: u8 = 1;
/// Migrations that clients ask for.
const MIGRATIONS: u64 = 2;

/// A `vmm` process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Vmm {
    None,
    /// There, with its vCPUs stopped.
    Still,
    Runs,
}

/// What a node may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Node {
    Up,
    /// Its daemon is down; its `vmm` goes on.
    Down,
    /// Gone for good.
    Lost,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct World {
    source: Source,
    target: Target,
    source_vmm: Vmm,
    target_vmm: Vmm,
    source_node: Node,
    target_node: Node,
    /// Of which migration the target's `vmm` has everything.
    loaded: Migration,
    /// The source has sent everything of the migration under way.
    sent: bool,
    said: BTreeSet<Message>,
    crashes: u8,
    deaths: u8,
    losses: u8,
    lost: bool,
    /// The source could not remove its machine when it was to.
    kept: bool,
}

impl World {
    const BEGIN: Self = Self {
        source: Source::NEW,
        target: Target::NEW,
        source_vmm: Vmm::Runs,
        target_vmm: Vmm::None,
        source_node: Node::Up,
        target_node: Node::Up,
        loaded: 0,
        sent: false,
        said: BTreeSet::new(),
        crashes: 0,
        deaths: 0,
        losses: 0,
        lost: false,
        kept: false,
    };

    /// The source hears something; what each moment leaves at which its daemon may end, the last one whole.
    fn source(&self, event: SourceEvent) -> Vec<Self> {
        let (record, effects) = self.source.on(event);
        let mut world = self.clone();
        world.source = record;
        let mut moments = vec![world.clone()];
        for effect in effects {
            match effect {
                Effect::Send(message) => drop(world.said.insert(message)),
                Effect::Run if world.source_vmm != Vmm::None => {
                    world.source_vmm = Vmm::Runs;
                    world.sent = false;
                }
                Effect::Run => {}
                Effect::Kill => world.source_vmm = Vmm::None,
            }
            moments.push(world.clone());
        }
        moments
    }

    fn target(&self, event: TargetEvent) -> Vec<Self> {
        let (record, effects) = self.target.on(event);
        let mut world = self.clone();
        world.target = record;
        let mut moments = vec![world.clone()];
        for effect in effects {
            match effect {
                Effect::Send(message) => drop(world.said.insert(message)),
                Effect::Run if world.target_vmm != Vmm::None => world.target_vmm = Vmm::Runs,
                // It is started anew, as after any death of a `vmm`.
                Effect::Run => world.target_vmm = Vmm::Runs,
                Effect::Kill => world.target_vmm = Vmm::None,
            }
            moments.push(world.clone());
        }
        moments
    }

    /// All that can be heard by each side.
    fn heard(&self, to_source: bool) -> Vec<Message> {
        let to = |message: &&Message| {
            let of_target = matches!(
                message,
                Message::Ready(_) | Message::Refuse(_) | Message::Query(_) | Message::Running(_)
            );
            of_target == to_source
        };
        self.said.iter().filter(to).copied().collect()
    }

    fn source_events(&self) -> Vec<SourceEvent> {
        let mut events = vec![SourceEvent::Tick];
        events.extend(self.heard(true).into_iter().map(SourceEvent::Heard));
        if matches!(self.source, Source::Owner { last, migrating: false } if last < MIGRATIONS) {
            events.push(SourceEvent::Begin);
        }
        if self.sent {
            events.push(SourceEvent::Sent);
        }
        if matches!(self.source, Source::Owner { migrating: true, .. }) {
            // By a client, or because the guest has stood still for too long.
            events.push(SourceEvent::Cancel);
        }
        events
    }

    fn target_events(&self) -> Vec<TargetEvent> {
        let mut events = vec![TargetEvent::Tick];
        events.extend(self.heard(false).into_iter().map(|message| TargetEvent::Heard {
            message,
            loaded: matches!(message, Message::Prepare(it) if it == self.loaded)
                && self.target_vmm == Vmm::Still,
        }));
        events
    }

    /// What the daemons do without any fault: (world, whole steps only).
    fn progress(&self) -> Vec<Self> {
        let mut next = Vec::new();
        if self.source_node == Node::Up {
            for event in self.source_events() {
                next.extend(self.source(event).pop());
            }
            // The transfer: everything reaches a `vmm` at the target, and the source's guest stands.
            if let Source::Owner {
                last,
                migrating: true,
            } = self.source
                && !self.sent
                && self.source_vmm == Vmm::Runs
            {
                let mut world = self.clone();
                (world.sent, world.source_vmm) = (true, Vmm::Still);
                if matches!(self.target, Target::Idle(_)) && self.target_node == Node::Up {
                    (world.loaded, world.target_vmm) = (last, Vmm::Still);
                }
                next.push(world);
            }
        }
        if self.target_node == Node::Up {
            for event in self.target_events() {
                next.extend(self.target(event).pop());
            }
        }
        next.extend(self.restarts());
        next.extend(self.resolutions());
        next
    }

    /// Daemons that are down come back.
    fn restarts(&self) -> Vec<Self> {
        let mut next = Vec::new();
        if self.source_node == Node::Down {
            let mut world = self.clone();
            world.source_node = Node::Up;
            // What was being sent is over with the daemon that sent it.
            world.sent = false;
            next.extend(world.source(SourceEvent::Restarted).pop());
        }
        if self.target_node == Node::Down {
            let mut world = self.clone();
            world.target_node = Node::Up;
            next.extend(world.target(TargetEvent::Restarted).pop());
        }
        next
    }

    /// An operator who knows that the other node is gone.
    fn resolutions(&self) -> Vec<Self> {
        let mut next = Vec::new();
        if self.target.waits() && self.target_node == Node::Up && self.source_node == Node::Lost {
            next.extend(self.target(TargetEvent::Resolve(Resolution::Run)).pop());
        }
        if self.source.waits() && self.source_node == Node::Up && self.target_node == Node::Lost {
            next.extend(self.source(SourceEvent::Resolve(Resolution::Run)).pop());
        }
        next
    }

    /// What can go wrong at this moment.
    fn faults(&self) -> Vec<Self> {
        let mut next = Vec::new();
        if self.crashes < CRASHES {
            if self.source_node == Node::Up {
                for event in self.source_events() {
                    // Ended before the last effect, or after it.
                    next.extend(self.source(event).into_iter().map(|mut world| {
                        world.source_node = Node::Down;
                        world.crashes += 1;
                        world
                    }));
                }
            }
            if self.target_node == Node::Up {
                for event in self.target_events() {
                    next.extend(self.target(event).into_iter().map(|mut world| {
                        world.target_node = Node::Down;
                        world.crashes += 1;
                        world
                    }));
                }
            }
        }
        if !self.kept && self.source_node == Node::Up {
            for event in self.source_events() {
                let (record, effects) = self.source.on(event);
                if effects == [Effect::Kill] {
                    let mut world = self.clone();
                    (world.source, world.kept) = (record, true);
                    next.push(world);
                }
            }
        }
        if self.deaths < VMM_DEATHS && self.target_vmm == Vmm::Still {
            let mut world = self.clone();
            (world.target_vmm, world.deaths) = (Vmm::None, self.deaths + 1);
            let told = match self.target_node {
                Node::Up => world.target(TargetEvent::VmmDied).pop(),
                _ => Some(world),
            };
            next.extend(told);
        }
        if self.losses < LOSSES && !self.said.is_empty() {
            let mut world = self.clone();
            world.said.clear();
            world.losses += 1;
            next.push(world);
        }
        if !self.lost {
            for source in [true, false] {
                let mut world = self.clone();
                world.lost = true;
                if source {
                    (world.source_node, world.source_vmm) = (Node::Lost, Vmm::None);
                } else {
                    (world.target_node, world.target_vmm) = (Node::Lost, Vmm::None);
                }
                next.push(world);
            }
        }
        next
    }

    /// How many sides could run the guest.
    fn running(&self) -> usize {
        [self.source_vmm, self.target_vmm]
            .iter()
            .filter(|vmm| **vmm == Vmm::Runs)
            .count()
    }

    /// The guest runs, with the side that owns it, neither waits for the other, and nothing is left at a source that has given it away.
    fn is_well(&self) -> bool {
        let left = self.source_node == Node::Up && !self.source.may_run() && self.source_vmm != Vmm::None;
        let waits = (self.source.waits() && self.source_node == Node::Up)
            || (self.target.waits() && self.target_node == Node::Up);
        let source = self.source.may_run() && self.source_vmm == Vmm::Runs && self.source_node == Node::Up;
        let target = self.target.may_run() && self.target_vmm == Vmm::Runs && self.target_node == Node::Up;
        source != target && self.running() == 1 && !waits && !left
    }
}

/// All worlds that can come about, each with the one before it.
fn reachable() -> BTreeMap<World, Option<World>> {
    let mut found = BTreeMap::from([(World::BEGIN, None)]);
    let mut waiting = VecDeque::from([World::BEGIN]);
    while let Some(world) = waiting.pop_front() {
        for next in world.progress().into_iter().chain(world.faults()) {
            if !found.contains_key(&next) {
                found.insert(next.clone(), Some(world.clone()));
                waiting.push_back(next);
            }
        }
    }
    found
}

static REACHABLE: LazyLock<BTreeMap<World, Option<World>>> = LazyLock::new(reachable);

/// How a world came about, for a failure.
fn path(found: &BTreeMap<World, Option<World>>, world: &World) -> String {
    let mut steps = vec![format!("{world:?}")];
    let mut at = world;
    while let Some(Some(before)) = found.get(at) {
        steps.push(format!("{before:?}"));
        at = before;
    }
    steps.reverse();
    steps.join("\n")
}

#[test]
fn never_two_run_and_one_does_in_the_end_whatever_happens_in_between() {
    let found = &*REACHABLE;
    assert!(found.len() > 10_000, "only {} worlds", found.len());
    for world in found.keys() {
        let both = world.source.may_run() && world.target.may_run();
        // A node that is gone for good runs nothing, whatever its record says.
        let resolved = world.source_node == Node::Lost || world.target_node == Node::Lost;
        assert!(world.running() <= 1, "two run:\n{}", path(found, world));
        assert!(!both || resolved, "two may run:\n{}", path(found, world));
    }
    // Worlds from which the guest comes to run without another fault: backwards from those where it does.
    let mut before: BTreeMap<&World, Vec<&World>> = BTreeMap::new();
    let nexts: Vec<(&World, Vec<World>)> = found.keys().map(|world| (world, world.progress())).collect();
    for (world, next) in &nexts {
        for after in next {
            if let Some((after, _)) = found.get_key_value(after) {
                before.entry(after).or_default().push(world);
            }
        }
    }
    let mut good: BTreeSet<&World> = found.keys().filter(|world| world.is_well()).collect();
    let mut waiting: Vec<&World> = good.iter().copied().collect();
    while let Some(world) = waiting.pop() {
        for earlier in before.get(world).into_iter().flatten() {
            if good.insert(earlier) {
                waiting.push(earlier);
            }
        }
    }
    let owner_is_lost = |world: &World| {
        let source = world.source_node == Node::Lost && !world.target.may_run() && !world.target.waits();
        let target = world.target_node == Node::Lost && world.target.may_run() && !world.source.waits();
        source || target
    };
    for world in found.keys().filter(|world| !owner_is_lost(world)) {
        assert!(
            good.contains(world),
            "none runs for ever, or something is left:\n{}",
            path(found, world)
        );
    }
}

#[test]
fn before_the_source_gives_the_vm_away_it_takes_it_back_alone_and_never_afterwards() {
    for world in REACHABLE.keys() {
        let (after, effects) = world.source.on(SourceEvent::Cancel);
        match world.source {
            Source::Owner {
                migrating: true,
                last,
            } => {
                assert_eq!(
                    after,
                    Source::Owner {
                        migrating: false,
                        last
                    }
                );
                assert_eq!(effects, [Effect::Run, Effect::Send(Message::Abort(last))]);
            }
            _ => assert_eq!((after, effects), (world.source, Vec::new())),
        }
    }
}

#[test]
fn a_migration_without_faults_takes_four_messages() {
    let mut world = World::BEGIN;
    world = world.source(SourceEvent::Begin).pop().unwrap();
    (world.sent, world.source_vmm, world.loaded, world.target_vmm) = (true, Vmm::Still, 1, Vmm::Still);
    world = world.source(SourceEvent::Sent).pop().unwrap();
    let to_target = |world: &World, message| {
        let event = TargetEvent::Heard {
            message,
            loaded: true,
        };
        world.target(event).pop().unwrap()
    };
    world = to_target(&world, Message::Prepare(1));
    world = world.source(SourceEvent::Heard(Message::Ready(1))).pop().unwrap();
    assert_eq!(world.running(), 0, "the blackout");
    world = to_target(&world, Message::Commit(1));
    world = world
        .source(SourceEvent::Heard(Message::Running(1)))
        .pop()
        .unwrap();
    assert_eq!((world.source, world.target), (Source::Gone(1), Target::Owned(1)));
    assert!(world.is_well() && world.said.len() == 4);
    assert_eq!((world.source_vmm, world.target_vmm), (Vmm::None, Vmm::Runs));
}
