//! The steps of a migration, as the state machines of both sides and the calls between daemons enumerate them.

use std::collections::VecDeque;

use prost::Message as _;
use vm_lifecycle::handover::{Effect, Message, Source, SourceEvent, Target, TargetEvent};

/// A daemon of a migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    Source,
    Target,
}

/// A moment of a migration: a daemon has just written a state, is about to say something or has just heard it, and has done nothing of what
/// follows. The name is that of the fault that holds it there (`vmmd/host/src/fault.rs`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    pub side: Side,
    pub name: String,
}

impl Step {
    pub fn new(side: Side, name: impl Into<String>) -> Self {
        let name = name.into();
        Self { side, name }
    }

    /// Memory is on its way, and the guest runs: the sender waits.
    pub fn is_transfer(&self) -> bool {
        self.name == TRANSFER
    }

    /// The actor of this side's VM waits, and notices nothing.
    pub fn holds_actor_of(&self, side: Side) -> bool {
        self.side == side && self.name.starts_with("wrote-")
    }
}

pub const TRANSFER: &str = "transfer";

/// The name of a source's state. One that is new is a step that is new.
fn of_source(state: Source) -> &'static str {
    match state {
        Source::Owner { migrating: false, .. } => "Owner",
        Source::Owner { migrating: true, .. } => "Migrating",
        Source::Given(_) => "Given",
        Source::Gone(_) => "Gone",
    }
}

fn of_target(state: Target) -> &'static str {
    match state {
        Target::Idle(_) => "Idle",
        Target::Prepared(_) => "Prepared",
        Target::Owned(_) => "Owned",
    }
}

/// Name of a message, and its receiver.
fn of_message(message: Message) -> (&'static str, Side) {
    match message {
        Message::Prepare(_) => ("Prepare", Side::Target),
        Message::Commit(_) => ("Commit", Side::Target),
        Message::Abort(_) => ("Abort", Side::Target),
        Message::Ready(_) => ("Ready", Side::Source),
        Message::Running(_) => ("Running", Side::Source),
        Message::Refuse(_) => ("Refuse", Side::Source),
    }
}

/// Answer to an `Abort`: nothing remains. No state machine waits for this answer.
const NOTHING_LEFT: &str = "Unspecified";

/// The calls that move something, by which everything comes to the target; `SettleVm` carries the messages of the state machines.
fn calls() -> Vec<Step> {
    let set = prost_types::FileDescriptorSet::decode(vmmd_api::DESCRIPTORS).unwrap();
    let mut services = set.file.into_iter().flat_map(|file| file.service);
    let peer = services.find(|service| service.name() == "PeerService").unwrap();
    let mut steps = Vec::new();
    for call in peer.method.iter().filter(|call| call.name() != "SettleVm") {
        steps.push(Step::new(Side::Target, format!("received-{}", call.name())));
        if call.client_streaming() {
            steps.push(Step::new(Side::Target, TRANSFER));
        }
        steps.push(Step::new(Side::Target, format!("says-{}", call.name())));
    }
    steps
}

/// All steps of a migration without faults. With `cancelled`, the steps after a client's cancel at
/// the last possible moment.
pub fn walk(cancelled: bool) -> Vec<Step> {
    enum Event {
        OfSource(SourceEvent),
        OfTarget(Message),
    }
    let other = |side| match side {
        Side::Source => Side::Target,
        Side::Target => Side::Source,
    };
    let (mut source, mut target) = (Source::NEW, Target::NEW);
    let begin = [SourceEvent::Begin, SourceEvent::Sent].map(Event::OfSource);
    let (mut events, mut steps) = (VecDeque::from(begin), Vec::new());
    let mut aborts = None;
    while let Some(event) = events.pop_front() {
        let effects = match event {
            Event::OfSource(mut event) => {
                if let SourceEvent::Received(message) = event {
                    steps.push(Step::new(
                        Side::Source,
                        format!("received-{}", of_message(message).0),
                    ));
                    if cancelled {
                        aborts = Some(steps.len());
                        event = SourceEvent::Cancel;
                    }
                }
                let (after, effects) = source.on(event);
                if after != source {
                    steps.push(Step::new(Side::Source, format!("wrote-{}", of_source(after))));
                }
                if event == SourceEvent::Begin {
                    steps.extend(calls());
                }
                source = after;
                effects
            }
            Event::OfTarget(message) => {
                steps.push(Step::new(
                    Side::Target,
                    format!("received-{}", of_message(message).0),
                ));
                let loaded = true;
                let (after, effects) = target.on(TargetEvent::Received { message, loaded });
                if after != target {
                    steps.push(Step::new(Side::Target, format!("wrote-{}", of_target(after))));
                }
                target = after;
                if matches!(message, Message::Abort(_)) {
                    steps.push(Step::new(Side::Target, format!("says-{NOTHING_LEFT}")));
                    steps.push(Step::new(Side::Source, format!("received-{NOTHING_LEFT}")));
                }
                effects
            }
        };
        for effect in effects {
            let Effect::Send(message) = effect else {
                continue;
            };
            let (name, to) = of_message(message);
            steps.push(Step::new(other(to), format!("says-{name}")));
            events.push_back(match to {
                Side::Source => Event::OfSource(SourceEvent::Received(message)),
                Side::Target => Event::OfTarget(message),
            });
        }
    }
    steps.split_off(aborts.unwrap_or(0))
}
