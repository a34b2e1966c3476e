//! Every behaviour of three daemons, their `vmm` processes and the network between them, by exhaustive search.
//!
//! Each migration goes from the node that has the VM to any other one, also back, also while targets of earlier ones are not reached. A message
//! may be heard at any later time and any number of times, or never: that is delay, reordering, repetition and loss. Daemons end and start
//! again at any time, also between the write of a record and each part of what follows, and `vmm` processes that wait die. One node may be lost for
//! good. Clients cancel and delete. No kind of fault has a budget: only the number of migrations ends the search ([`Scope`]).
//!
//! Reductions of the state space that keep all behaviours:
//! - Messages are never removed, so a loss needs no step of its own. A daemon sends each message of its state at once, since a message need not be
//!   heard.
//! - Progress is checked from each state with all messages lost, which is the hardest case. Only the messages that daemons repeat are sent again.
//! - A daemon that is down does the same as one that hears nothing, so it starts again in the step in which it ends.
//! - The second and the third node are the same before the first migration, which therefore goes to the second.
//! - A migration's number says its source and its target: no number is used twice, except after an operator's decision, when a lost node may have
//!   used the next ones. Targets hold each migration to the node that has offered it, so nothing more is begun then.

use std::collections::{HashMap, VecDeque, hash_map::Entry};

use super::*;

const NODES: usize = 3;

/// Events beside crashes, losses of messages and cancels.
#[derive(Clone, Copy)]
struct Scope {
    /// Migrations that clients ask for.
    migrations: Migration,
    /// A node is lost for good, and clients delete the VM.
    ends: bool,
}

/// A `vmm` process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Vmm {
    None,
    /// There, with its vCPUs stopped.
    Still,
    Runs,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Life {
    Up,
    /// Gone for good.
    Lost,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Node {
    life: Life,
    /// `None` when the node does not have the VM.
    record: Option<Handover>,
    /// `owned` of its tombstone of the VM, see [`heard_without_record`].
    owned: Migration,
    aborts: Aborts<usize>,
    vmm: Vmm,
    /// Number of the migration of which its `vmm` has received everything.
    loaded: Migration,
    /// It has sent everything of the migration under way.
    sent: bool,
}

impl Node {
    const EMPTY: Self = Self {
        life: Life::Up,
        record: None,
        owned: 0,
        aborts: Aborts::NEW,
        vmm: Vmm::None,
        loaded: 0,
        sent: false,
    };

    fn is(&self, life: Life) -> bool {
        self.life == life
    }

    fn source(&self) -> Option<Source> {
        self.record.and_then(Handover::source)
    }

    fn may_run(&self) -> bool {
        self.record.is_some_and(Handover::may_run)
    }

    /// The migration that it sends.
    fn sends(&self) -> Option<Migration> {
        match self.record {
            Some(Handover::Source(Source::Owner {
                last,
                migrating: true,
            })) => Some(last),
            _ => None,
        }
    }

    /// The VM is removed.
    fn forget(&mut self) {
        self.owned = self.record.map_or(0, Handover::owned).max(self.owned);
        (self.record, self.vmm, self.loaded, self.sent) = (None, Vmm::None, 0, false);
    }
}

/// What daemons say: the messages of the state machines, and the calls beside them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Said {
    /// `OfferVm`.
    Offer,
    Prepare,
    Commit,
    Abort,
    Ready,
    Refuse,
    Running,
    /// The answer to an `Abort`: nothing of the migration is left.
    Over,
}

impl Said {
    const OF_SOURCE: [Self; 4] = [Self::Offer, Self::Prepare, Self::Commit, Self::Abort];
    const OF_TARGET: [Self; 4] = [Self::Ready, Self::Refuse, Self::Running, Self::Over];

    fn of(message: Message) -> (Self, Migration) {
        match message {
            Message::Prepare(it) => (Self::Prepare, it),
            Message::Commit(it) => (Self::Commit, it),
            Message::Abort(it) => (Self::Abort, it),
            Message::Ready(it) => (Self::Ready, it),
            Message::Refuse(it) => (Self::Refuse, it),
            Message::Running(it) => (Self::Running, it),
        }
    }

    fn bit(self, it: Migration) -> u32 {
        1 << ((it - 1) * 8 + self as u64)
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct World {
    nodes: [Node; NODES],
    /// Source and target of each migration, the first one first.
    ways: Vec<(usize, usize)>,
    /// A set of [`Said`].
    said: u32,
    /// A client has deleted the VM.
    deleted: bool,
}

impl World {
    fn begin() -> Self {
        let mut nodes = [Node::EMPTY; NODES];
        (nodes[0].record, nodes[0].vmm) = (Some(Handover::Source(Source::NEW)), Vmm::Runs);
        Self {
            nodes,
            ways: Vec::new(),
            said: 0,
            deleted: false,
        }
    }

    /// After a change of one node.
    fn with(&self, node: usize, change: impl FnOnce(&mut Node)) -> Self {
        let mut world = self.clone();
        change(&mut world.nodes[node]);
        world
    }

    fn say(&mut self, said: Said, it: Migration) {
        self.said |= said.bit(it);
    }

    fn was_said(&self, said: Said, it: Migration) -> bool {
        self.said & said.bit(it) != 0
    }

    fn way(&self, it: Migration) -> (usize, usize) {
        self.ways[usize::try_from(it).unwrap() - 1]
    }

    fn migrations(&self) -> impl Iterator<Item = Migration> {
        1..=self.ways.len() as Migration
    }

    /// A node has written a record and does what follows; what each moment leaves at which its daemon may end, the last one whole.
    fn carry_out(&self, node: usize, record: Handover, effects: Vec<Effect>) -> Vec<Self> {
        let mut world = self.with(node, |it| it.record = Some(record));
        // Written together with the record.
        for effect in &effects {
            if let Effect::Send(Message::Abort(it)) = effect {
                let target = self.way(*it).1;
                world.nodes[node].aborts.note(target, *it);
            }
        }
        let mut moments = vec![world.clone()];
        for effect in effects {
            match effect {
                Effect::Send(message) => {
                    let (said, it) = Said::of(message);
                    world.say(said, it);
                }
                // One that has died is started again.
                Effect::Run => (world.nodes[node].vmm, world.nodes[node].sent) = (Vmm::Runs, false),
                Effect::Kill => world.nodes[node].vmm = Vmm::None,
            }
            moments.push(world.clone());
        }
        moments
    }

    fn of_source(&self, node: usize, event: SourceEvent) -> Option<Vec<Self>> {
        let before = self.nodes[node].source()?;
        let (after, effects) = before.on(event);
        if after == before && effects.is_empty() {
            return None;
        }
        Some(self.carry_out(node, Handover::Source(after), effects))
    }

    /// A node hears a message of a migration's source.
    fn heard_from_source(&self, said: Said, it: Migration) -> Option<Vec<Self>> {
        let (_, node) = self.way(it);
        let here = &self.nodes[node];
        let message = match said {
            Said::Offer => {
                let idle = Handover::Target(Target::Idle(it - 1));
                return (here.record.is_none()).then(|| vec![self.with(node, |to| to.record = Some(idle))]);
            }
            Said::Prepare => Message::Prepare(it),
            Said::Commit => Message::Commit(it),
            _ => Message::Abort(it),
        };
        let loaded = here.loaded == it && here.vmm == Vmm::Still;
        let mut moments = match here.record {
            Some(record) => {
                let (after, effects) = record.received(message, loaded)?;
                self.carry_out(node, after, effects)
            }
            None => {
                let mut world = self.clone();
                if let Some(answer) = heard_without_record(here.owned, message)? {
                    let (said, it) = Said::of(answer);
                    world.say(said, it);
                }
                vec![world]
            }
        };
        if said == Said::Abort {
            // It is answered when nothing is left; that the VM is removed is a step of its own.
            let mut over = moments.last()?.clone();
            over.say(Said::Over, it);
            moments.push(over);
        }
        Some(moments)
    }

    /// A source hears a message of a migration's target.
    fn heard_from_target(&self, said: Said, it: Migration) -> Option<Vec<Self>> {
        let (node, target) = self.way(it);
        let message = match said {
            Said::Ready => Message::Ready(it),
            Said::Refuse => Message::Refuse(it),
            Said::Running => Message::Running(it),
            _ => return Some(vec![self.with(node, |to| to.aborts.answered(&target, it))]),
        };
        self.of_source(node, SourceEvent::Received(message))
    }

    /// A client asks for a migration.
    fn begins(&self, node: usize, target: usize, scope: Scope) -> Option<Vec<Self>> {
        let it = self.ways.len() as Migration + 1;
        let here = &self.nodes[node];
        let ready = here.vmm == Vmm::Runs
            && self.nodes[target].is(Life::Up)
            && it <= scope.migrations
            && (it != 1 || target == 1)
            && here.source()?
                == Source::Owner {
                    last: it - 1,
                    migrating: false,
                };
        if node == target || !ready {
            return None;
        }
        let mut moments = self.of_source(node, SourceEvent::Begin)?;
        for world in &mut moments {
            world.ways.push((node, target));
        }
        let mut offered = moments.last()?.clone();
        offered.say(Said::Offer, it);
        moments.push(offered);
        Some(moments)
    }

    /// Everything reaches a `vmm` at the target, and the source's guest stands still.
    fn transfers(&self, node: usize) -> Option<Self> {
        let it = self.nodes[node].sends()?;
        let (_, target) = self.way(it);
        let (from, to) = (&self.nodes[node], &self.nodes[target]);
        let expects = to.record == Some(Handover::Target(Target::Idle(it - 1)));
        let ready = from.vmm == Vmm::Runs && !from.sent && expects && to.vmm == Vmm::None && to.is(Life::Up);
        ready.then(|| {
            let world = self.with(node, |it| (it.sent, it.vmm) = (true, Vmm::Still));
            world.with(target, |to| (to.loaded, to.vmm) = (it, Vmm::Still))
        })
    }

    /// The rest of a migration is removed: at a target an offer that is not prepared, at any time.
    fn removes(&self, node: usize) -> Option<Vec<Self>> {
        match self.nodes[node].record? {
            Handover::Target(Target::Idle(_)) => Some(vec![
                self.with(node, |it| it.vmm = Vmm::None),
                self.with(node, Node::forget),
            ]),
            Handover::Source(Source::Gone(_)) if self.nodes[node].vmm == Vmm::None => {
                Some(vec![self.with(node, Node::forget)])
            }
            _ => None,
        }
    }

    /// The steps of a daemon: each with the moments of which the last is the whole. With a scope, also what clients begin.
    fn steps(&self, node: usize, scope: Option<Scope>) -> Vec<Vec<Self>> {
        let mut steps = Vec::new();
        for it in self.migrations() {
            let (source, target) = self.way(it);
            let mine = |said: &&Said| self.was_said(**said, it);
            if target == node {
                let heard = Said::OF_SOURCE.iter().filter(mine);
                steps.extend(heard.filter_map(|said| self.heard_from_source(*said, it)));
            }
            if source == node {
                let heard = Said::OF_TARGET.iter().filter(mine);
                steps.extend(heard.filter_map(|said| self.heard_from_target(*said, it)));
            }
        }
        let here = &self.nodes[node];
        steps.extend(self.of_source(node, SourceEvent::Tick));
        steps.extend(self.of_source(node, SourceEvent::Cancel));
        if here.sent {
            steps.extend(self.of_source(node, SourceEvent::Sent));
        }
        for (_, it) in here.aborts.iter() {
            let mut world = self.clone();
            world.say(Said::Abort, it);
            steps.push(vec![world]);
        }
        steps.extend(self.transfers(node).map(|world| vec![world]));
        steps.extend(self.removes(node));
        if let Some(Handover::Target(Target::Owned(last))) = here.record
            && here.vmm == Vmm::Runs
        {
            let own = Handover::Source(Source::Owner {
                last,
                migrating: false,
            });
            steps.push(vec![self.with(node, |it| it.record = Some(own))]);
        }
        steps.extend(self.resolves(node));
        if let Some(scope) = scope {
            steps.extend((0..NODES).filter_map(|target| self.begins(node, target, scope)));
            if scope.ends && here.may_run() && !here.record.is_some_and(Handover::is_under_way) {
                let mut world = self.with(node, Node::forget);
                world.deleted = true;
                steps.push(vec![world]);
            }
        }
        steps
    }

    /// An operator decides after a look at all nodes. The other node of the migration is gone.
    fn resolves(&self, node: usize) -> Option<Vec<Self>> {
        let number = |record: Option<Handover>| match record {
            Some(Handover::Source(Source::Given(it)) | Handover::Target(Target::Prepared(it))) => Some(it),
            _ => None,
        };
        let record = self.nodes[node].record?;
        let it = number(Some(record))?;
        let (source, target) = self.way(it);
        let other = if node == source { target } else { source };
        if !self.nodes[other].is(Life::Lost) {
            return None;
        }
        let is_elsewhere = self.nodes.iter().enumerate().any(|(index, elsewhere)| {
            index != node
                && !elsewhere.is(Life::Lost)
                && (elsewhere.may_run() || number(elsewhere.record).is_some_and(|newer| newer > it))
        });
        let resolution = match is_elsewhere || self.deleted {
            true => Resolution::Drop,
            false => Resolution::Run,
        };
        let (after, mut effects) = match record {
            Handover::Source(source) => {
                let (after, effects) = source.on(SourceEvent::Resolve(resolution));
                (Handover::Source(after), effects)
            }
            Handover::Target(target) => {
                let (after, effects) = target.on(TargetEvent::Resolve(resolution));
                (Handover::Target(after), effects)
            }
        };
        // The other node is gone: no message is sent to it.
        effects.retain(|effect| !matches!(effect, Effect::Send(_)));
        Some(self.carry_out(node, after, effects))
    }

    /// The daemon of a node ends, and another one starts.
    fn restarts(&self, node: usize) -> Self {
        let world = self.with(node, |it| it.sent = false);
        let (after, effects) = match world.nodes[node].record {
            None => return world,
            Some(Handover::Source(source)) => {
                let (after, effects) = source.on(SourceEvent::Restarted);
                (Handover::Source(after), effects)
            }
            Some(Handover::Target(target)) => {
                let (after, effects) = target.on(TargetEvent::Restarted);
                (Handover::Target(after), effects)
            }
        };
        world.carry_out(node, after, effects).pop().unwrap_or(world)
    }

    /// With all that daemons repeat; `eager`: and with all that they say in their state.
    fn spoken(mut self, eager: bool) -> Self {
        for node in 0..NODES {
            let here = self.nodes[node].clone();
            for (_, it) in here.aborts.iter().filter(|_| here.is(Life::Up)) {
                self.say(Said::Abort, it);
            }
            match here.record.filter(|_| here.is(Life::Up)) {
                Some(Handover::Source(Source::Given(it))) => self.say(Said::Commit, it),
                Some(Handover::Target(Target::Prepared(it))) if eager => self.say(Said::Ready, it),
                Some(Handover::Target(Target::Owned(it))) if eager => self.say(Said::Running, it),
                Some(Handover::Source(Source::Owner { last, .. })) if eager && here.sent => {
                    self.say(Said::Prepare, last);
                }
                _ => {}
            }
            let here = &mut self.nodes[node];
            if here.vmm == Vmm::None {
                here.loaded = 0;
            }
        }
        self
    }

    /// Next worlds without a fault.
    fn progress(&self) -> Vec<Self> {
        let up = (0..NODES).filter(|node| self.nodes[*node].is(Life::Up));
        let steps = up.flat_map(|node| self.steps(node, None));
        let ends = steps.filter_map(|mut moments| moments.pop());
        ends.map(|world| world.spoken(false)).collect()
    }

    /// Next worlds with all requests of clients and with any fault.
    fn anything(&self, scope: Scope) -> Vec<Self> {
        let mut next = Vec::new();
        let lost = !scope.ends || self.nodes.iter().any(|node| node.is(Life::Lost));
        for node in 0..NODES {
            let here = &self.nodes[node];
            if here.is(Life::Lost) {
                continue;
            }
            next.push(self.restarts(node));
            for mut moments in self.steps(node, Some(scope)) {
                next.extend(moments.pop());
                // The daemon ends before it has done all.
                for moment in moments {
                    assert!(moment.is_safe(), "two run, or may:\n{self:?}\n{moment:?}");
                    next.push(moment.restarts(node));
                }
            }
            if here.vmm == Vmm::Still && !here.may_run() && here.source().is_none() {
                next.push(self.with(node, |it| it.vmm = Vmm::None));
            }
            if !lost {
                next.push(self.with(node, |it| {
                    (it.life, it.vmm, it.sent) = (Life::Lost, Vmm::None, false);
                }));
            }
        }
        next.into_iter().map(|world| world.spoken(true)).collect()
    }

    fn without_messages(&self) -> Self {
        let silent = Self {
            said: 0,
            ..self.clone()
        };
        silent.spoken(false)
    }

    fn left(&self) -> impl Iterator<Item = &Node> {
        self.nodes.iter().filter(|node| !node.is(Life::Lost))
    }

    fn is_safe(&self) -> bool {
        self.left().filter(|node| node.vmm == Vmm::Runs).count() <= 1
            && self.left().filter(|node| node.may_run()).count() <= 1
    }

    /// The guest runs on the one node that has the VM, unless that was deleted or is lost with its node; nothing is left on the others, and none of
    /// them is still to be told anything.
    fn is_well(&self) -> bool {
        let is_lost = |node: &usize| self.nodes[*node].is(Life::Lost);
        let mut has = 0;
        for node in self.left() {
            let told = node.aborts.iter().all(|(target, _)| is_lost(target));
            let owns = node.may_run() && node.vmm == Vmm::Runs && node.sends().is_none();
            let nothing = node.record.is_none() && node.vmm == Vmm::None;
            if !told || !(owns || nothing) {
                return false;
            }
            has += usize::from(owns);
        }
        let is_lost = self
            .nodes
            .iter()
            .any(|node| node.is(Life::Lost) && node.may_run());
        has == 1 || self.deleted || is_lost
    }
}

/// Worlds with their followers, and the one that each was first reached from.
#[derive(Default)]
struct Search {
    places: HashMap<World, usize>,
    worlds: Vec<World>,
    from: Vec<usize>,
    followers: Vec<Vec<usize>>,
}

impl Search {
    /// Everything that follows from some worlds.
    fn from(roots: impl IntoIterator<Item = World>, next: impl Fn(&World) -> Vec<World>) -> Self {
        let mut search = Self::default();
        let mut waiting = VecDeque::new();
        for root in roots {
            search.place(root, None, &mut waiting);
        }
        while let Some(at) = waiting.pop_front() {
            for world in next(&search.worlds[at]) {
                let follower = search.place(world, Some(at), &mut waiting);
                search.followers[at].push(follower);
            }
        }
        search
    }

    fn place(&mut self, world: World, from: Option<usize>, waiting: &mut VecDeque<usize>) -> usize {
        let place = self.worlds.len();
        match self.places.entry(world) {
            Entry::Occupied(known) => *known.get(),
            Entry::Vacant(new) => {
                self.worlds.push(new.key().clone());
                self.from.push(from.unwrap_or(place));
                self.followers.push(Vec::new());
                new.insert(place);
                waiting.push_back(place);
                place
            }
        }
    }

    /// How a world came about, for a failure.
    fn path(&self, mut at: usize) -> String {
        let mut steps = vec![format!("{:?}", self.worlds[at])];
        while self.from[at] != at {
            at = self.from[at];
            steps.push(format!("{:?}", self.worlds[at]));
        }
        steps.reverse();
        steps.join("\n")
    }
}

/// Looks at everything in a scope; how many worlds there are.
fn look(scope: Scope) -> usize {
    let all = Search::from([World::begin()], |world| world.anything(scope));
    for (at, world) in all.worlds.iter().enumerate() {
        assert!(world.is_safe(), "two run, or may:\n{}", all.path(at));
    }
    let silent = Search::from(all.worlds.iter().map(World::without_messages), World::progress);
    let mut before = vec![Vec::new(); silent.worlds.len()];
    for (at, followers) in silent.followers.iter().enumerate() {
        followers.iter().for_each(|follower| before[*follower].push(at));
    }
    let mut good: Vec<bool> = silent.worlds.iter().map(World::is_well).collect();
    let mut waiting: Vec<usize> = (0..good.len()).filter(|at| good[*at]).collect();
    while let Some(at) = waiting.pop() {
        for earlier in &before[at] {
            if !std::mem::replace(&mut good[*earlier], true) {
                waiting.push(*earlier);
            }
        }
    }
    for (at, world) in silent.worlds.iter().enumerate() {
        assert!(world.is_safe(), "two run, or may:\n{}", silent.path(at));
        assert!(
            good[at],
            "none runs for ever, or something is left:\n{}",
            silent.path(at)
        );
    }
    all.worlds.len()
}

#[test]
fn never_two_run_and_one_does_in_the_end() {
    let worlds = look(Scope {
        migrations: 2,
        ends: true,
    });
    assert!(worlds > 10_000, "only {worlds} worlds");
}

/// With `VMMD_LONG`, nodes are lost and VMs deleted too: that takes minutes.
#[test]
fn never_two_run_after_three_migrations() {
    let worlds = look(Scope {
        migrations: 3,
        ends: std::env::var_os("VMMD_LONG").is_some(),
    });
    assert!(worlds > 10_000, "only {worlds} worlds");
}

#[test]
fn source_takes_the_vm_back_alone_only_before_it_gives_it_away() {
    for (source, is_taken_back) in [
        (Source::NEW, false),
        (
            Source::Owner {
                last: 2,
                migrating: true,
            },
            true,
        ),
        (Source::Given(2), false),
        (Source::Gone(2), false),
    ] {
        let (after, effects) = source.on(SourceEvent::Cancel);
        if is_taken_back {
            let owner = Source::Owner {
                last: 2,
                migrating: false,
            };
            assert_eq!(after, owner);
            assert_eq!(effects, [Effect::Run, Effect::Send(Message::Abort(2))]);
        } else {
            assert_eq!((after, effects), (source, Vec::new()));
        }
    }
}

#[test]
fn only_a_later_abort_ends_a_prepared_migration() {
    let on = |it| {
        let message = Message::Abort(it);
        Target::Prepared(2).on(TargetEvent::Received {
            message,
            loaded: true,
        })
    };
    assert_eq!(on(1), (Target::Prepared(2), Vec::new()));
    assert_eq!(on(2), (Target::Idle(2), vec![Effect::Kill]));
    assert_eq!(on(3), (Target::Idle(3), vec![Effect::Kill]));
}

#[test]
fn aborts_stay_until_their_targets_have_answered_the_last_one() {
    let mut aborts = Aborts::NEW;
    aborts.note("a", 1);
    aborts.note("b", 2);
    aborts.note("a", 3);
    aborts.answered(&"a", 1);
    assert_eq!(aborts.iter().collect::<Vec<_>>(), [(&"a", 3), (&"b", 2)]);
    aborts.answered(&"a", 3);
    assert_eq!((aborts.get(&"a"), aborts.get(&"b")), (None, Some(2)));
}

#[test]
fn a_migration_without_faults_takes_four_messages() {
    let (source, _) = Source::NEW.on(SourceEvent::Begin);
    let (source, prepare) = source.on(SourceEvent::Sent);
    let heard = |target: Target, message| {
        target.on(TargetEvent::Received {
            message,
            loaded: true,
        })
    };
    let (target, ready) = heard(Target::Idle(0), Message::Prepare(1));
    let (source, commit) = source.on(SourceEvent::Received(Message::Ready(1)));
    assert!(!source.may_run() && !target.may_run(), "the blackout");
    let (target, running) = heard(target, Message::Commit(1));
    let (source, kill) = source.on(SourceEvent::Received(Message::Running(1)));
    assert_eq!((source, target), (Source::Gone(1), Target::Owned(1)));
    assert_eq!(prepare, [Effect::Send(Message::Prepare(1))]);
    assert_eq!(ready, [Effect::Send(Message::Ready(1))]);
    assert_eq!(commit, [Effect::Send(Message::Commit(1))]);
    assert_eq!(running, [Effect::Run, Effect::Send(Message::Running(1))]);
    assert_eq!(kill, [Effect::Kill]);
}
