//! A daemon that is killed repeatedly while eight clients send valid and invalid requests for the
//! same few VMs. After each restart the VMs, the answers and the processes agree with a model. Each
//! request was carried out once, and no VM has run twice at the same time. In the end, a watch that
//! continues across all restarts has reported every change.
//!
//! VMs have run policies and a disk, operations are cancelled, the node is drained, and actors
//! panic. Failing rounds are made fewer and shorter as long as they still fail.

mod calls;
mod clients;
mod history;
mod model;
mod watcher;

use std::{
    collections::{BTreeMap, HashSet},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use proptest::{prelude::*, test_runner::TestRunner};
use tokio::{sync::Notify, time::Instant};
use tonic::transport::Channel;
use vmmd_api::v1;

use self::{
    calls::{Answer, Call, Client, Kind, NEVER, call, is_final, is_gone, looks, name, seen},
    clients::{Made, Scene, client, in_time, plain},
    history::join,
    model::{Look, Op, Policy, Run, State, Step, Time, explain},
    watcher::Watcher,
};
use crate::{
    harness::{Daemon, PATIENCE, connect},
    survival::consistent,
};

const CLIENTS: usize = 8;
/// Of one daemon; each ends with a kill.
const ROUNDS: usize = 25;
/// Daemons, one after the other. The environment's `VMMD_CHAOS=long` is for 500 kills in all.
const DAEMONS: u32 = 4;
const DAEMONS_LONG: u32 = 20;
/// How often rounds that are to be made fewer are played, as they need not fail each time.
const TRIES: usize = 3;
/// Fewer and shorter rounds that are tried at most, unless the environment's `PROPTEST_MAX_SHRINK_ITERS` says fewer.
const SHRINKS: u32 = 1000;
/// How long that may take in all.
const SHRINKING: Duration = Duration::from_secs(240);
/// The run policy starts VMs at once.
const CONFIGURATION: &str = "[restart]\nfirst_ms = 1\nmax_ms = 2\n";

/// Activity between two starts of the daemon.
#[derive(Clone, Debug)]
struct Round {
    /// Of each client.
    calls: Vec<Vec<Call>>,
    /// The daemon is killed after so many answers,
    answers: usize,
    /// and so many microseconds.
    after: u64,
    /// Whether each client repeats requests without an answer.
    again: Vec<bool>,
}

fn round() -> impl Strategy<Value = Round> {
    let calls = proptest::collection::vec(call(), 1..4);
    let again = proptest::collection::vec(any::<bool>(), CLIENTS);
    (
        proptest::collection::vec(calls, CLIENTS),
        0..20_usize,
        0..3000_u64,
        again,
    )
        .prop_map(|(calls, answers, after, again)| Round {
            calls,
            answers,
            after,
            again,
        })
}

/// When a call was made again, when it was answered, and how.
type Again = (Time, Time, Answer);

/// The world as the test knows it.
struct World {
    daemon: Daemon,
    states: BTreeMap<u8, State>,
    /// UIDs of all VMs that ever existed.
    uids: HashSet<String>,
    /// Operations that a `vmm` may still carry out for a daemon that is gone.
    late: Vec<(u8, Op)>,
    next: u64,
    watcher: Watcher,
}

impl World {
    /// Two of its VMs with the same name can't run at the same time without that being told.
    fn alone(&self) -> String {
        format!("mock.alone={}", self.daemon.folder.path().display())
    }

    async fn channels(&self) -> Vec<Channel> {
        let mut channels = Vec::new();
        for _ in 0..CLIENTS {
            channels.push(connect(self.daemon.folder.path()).await);
        }
        channels
    }

    /// Uncordons the node, and waits until the daemon is consistent and all run policies have
    /// acted.
    async fn settle(&self) {
        let request = v1::UncordonNodeRequest::default();
        self.daemon.nodes().await.uncordon_node(request).await.unwrap();
        let began = Instant::now();
        loop {
            consistent(&self.daemon).await;
            let there = looks(&self.daemon.list().await);
            let waits = |look: &&Look| match look {
                Look::Whole { spec, run, .. } => match spec.policy {
                    Policy::Always => *run == Some(Run::Down),
                    Policy::Off => *run != Some(Run::Down),
                    _ => false,
                },
                _ => false,
            };
            let Some(waiting) = there.values().find(waits) else {
                return;
            };
            assert!(
                began.elapsed() < PATIENCE,
                "its run policy does nothing: {waiting:?}"
            );
            tokio::task::yield_now().await;
        }
    }

    async fn play(&mut self, round: Round) {
        let generation = |state: &State| match state {
            State::Absent => 0,
            State::There(vm) => vm.generation.known().unwrap_or(0),
        };
        let states = self.states.iter();
        let scene = Arc::new(Scene {
            manifest: self.daemon.manifest("vm", &self.alone()),
            clock: AtomicU64::new(1),
            killed: AtomicBool::new(false),
            answers: AtomicUsize::new(0),
            answered: Notify::new(),
            next: AtomicU64::new(self.next),
            made: Mutex::default(),
            generations: states.map(|(vm, state)| (*vm, generation(state))).collect(),
            folder: self.daemon.folder.path().to_owned(),
        });
        let channels = self.channels().await;
        let watch = self.watcher.follow(&self.daemon).await;
        let mut tasks = tokio::task::JoinSet::new();
        for (number, (channel, calls)) in channels.into_iter().zip(round.calls).enumerate() {
            tasks.spawn(client(number, Arc::clone(&scene), channel, calls));
        }
        let total = async {
            while let Some(ended) = tasks.join_next().await {
                ended.unwrap();
            }
        };
        let enough = async {
            while scene.answers.load(Ordering::SeqCst) < round.answers {
                scene.answered.notified().await;
            }
        };
        tokio::select! {
            () = total => {}
            () = enough => {}
        }
        // Not a wait for something: the moment of the kill is what varies.
        tokio::time::sleep(Duration::from_micros(round.after)).await;
        scene.killed.store(true, Ordering::SeqCst);
        self.daemon.kill();
        while let Some(ended) = tasks.join_next().await {
            ended.unwrap();
        }
        self.watcher = watch.await.unwrap();
        self.daemon.relaunch().await;
        let made = std::mem::take(&mut *scene.made.lock().unwrap());
        let again = self.ask_again(&scene, &made, &round.again).await;
        self.settle().await;
        self.watcher.catch_up(&self.daemon).await;
        self.next = scene.next.load(Ordering::SeqCst);
        self.judge(&made, &again).await;
    }

    /// Repeats requests without an answer, if their client does so, and requests with a final
    /// answer.
    async fn ask_again(&self, scene: &Arc<Scene>, made: &[Made], again: &[bool]) -> BTreeMap<usize, Again> {
        let channels = self.channels().await;
        scene.killed.store(false, Ordering::SeqCst);
        let mut calls = tokio::task::JoinSet::new();
        for (index, made) in made.iter().enumerate() {
            let Some(request) = made.request.clone().filter(|request| !request.id().is_empty()) else {
                continue;
            };
            let wanted = made.answer.as_ref().map_or(again[made.client], is_final);
            if wanted {
                let scene = Arc::clone(scene);
                let mut client = Client::new(channels[made.client].clone());
                calls.spawn(async move {
                    let begin = scene.now();
                    let answer = in_time(&request, request.send(&mut client)).await;
                    let answer = scene.came(answer).unwrap();
                    (index, (begin, scene.now(), answer))
                });
            }
        }
        let mut new = BTreeMap::new();
        let mut gone = Vec::new();
        while let Some(call) = calls.join_next().await {
            let (index, again) = call.unwrap();
            let Some(first) = &made[index].answer else {
                new.insert(index, again);
                continue;
            };
            if let (Ok(made), true) = (first, is_gone(&again.2)) {
                gone.push(&made["vm"]["metadata"]["uid"]);
                continue;
            }
            assert_eq!(
                plain(first),
                plain(&again.2),
                "another answer to {:?}",
                made[index].request
            );
        }
        let there = self.daemon.list().await;
        let is_gone = |vm: &v1::Vm| gone.iter().any(|uid| **uid == crate::harness::uid(vm));
        assert!(!there.iter().any(is_gone), "some of {gone:?} are there");
        new
    }

    /// Checks that some order of the calls explains all answers and the present state.
    async fn judge(&mut self, made: &[Made], again: &BTreeMap<usize, Again>) {
        let mut ops: BTreeMap<u8, Vec<Op>> = BTreeMap::new();
        for (vm, op) in self.late.drain(..) {
            ops.entry(vm).or_default().push(op);
        }
        for (index, made) in made.iter().enumerate() {
            for (vm, look) in &made.looks {
                let op = seen(made.begin, made.end, look.clone());
                ops.entry(*vm).or_default().push(op);
            }
            if made.request.is_none() && !made.call.is_felt_later() {
                continue;
            }
            if made.call.kind == Kind::Drain {
                for vm in 0..calls::VMS {
                    let of_vm = made.ops(made.begin, NEVER, None, None);
                    self.late.extend(of_vm.iter().map(|op| (vm, later(op))));
                    ops.entry(vm).or_default().extend(of_vm);
                }
                continue;
            }
            let ops = ops.entry(made.call.vm).or_default();
            let first = ops.len();
            ops.extend(made.ops(made.begin, made.end, made.answer.as_ref(), None));
            if let Some((begin, end, answer)) = again.get(&index) {
                // A refusal may be the one that the first would have been answered with.
                let begin = if answer.is_ok() { *begin } else { made.begin };
                ops.extend(made.ops(begin, *end, Some(answer), Some(first)));
            }
            let open = ops.iter().skip(first).filter(|op| op.end == NEVER);
            for op in open {
                let steps = op.ways.iter().flatten().filter(|step| can_be_late(step));
                let late = steps.map(|step| (made.call.vm, made.op(0, NEVER, vec![step.clone()], true)));
                self.late.extend(late);
            }
        }
        let there = looks(&self.daemon.list().await);
        for (vm, now) in &there {
            let from = self.states[vm].clone();
            let ops = join(&ops.remove(vm).unwrap_or_default());
            let Some(state) = explain(&from, &ops, now, &self.uids) else {
                let ops: Vec<_> = ops.iter().map(|op| format!("{op:?}\n")).collect();
                panic!(
                    "{} was {from:?} and is {now:?} after\n{}",
                    name(*vm),
                    ops.concat()
                );
            };
            // Late operations cannot affect a VM without a process.
            let runs = matches!(&state, State::There(vm) if vm.run != Run::Down);
            self.late.retain(|(late, _)| late != vm || runs);
            self.states.insert(*vm, state);
        }
        for look in there.into_values() {
            if let Look::Whole { uid, .. } = look {
                self.uids.insert(uid);
            }
        }
    }
}

/// Whether a `vmm`, or the guest in it, may still carry out the step after the requesting daemon is
/// gone.
fn can_be_late(step: &Step) -> bool {
    matches!(
        step,
        Step::Wake | Step::Stop | Step::End | Step::Pause | Step::Resume | Step::Detach
    )
}

/// The same call, in later rounds.
fn later(op: &Op) -> Op {
    Op {
        begin: 0,
        ..op.clone()
    }
}

async fn play(rounds: Vec<Round>) {
    let daemon = Daemon::configured(CONFIGURATION).await;
    std::fs::create_dir(daemon.path("disks")).unwrap();
    for vm in 0..calls::VMS {
        std::fs::write(daemon.path("disks").join(name(vm)), [0; 4096]).unwrap();
    }
    let mut world = World {
        daemon,
        watcher: Watcher::default(),
        states: (0..calls::VMS).map(|vm| (vm, State::Absent)).collect(),
        uids: HashSet::new(),
        late: Vec::new(),
        next: 0,
    };
    for round in rounds {
        world.play(round).await;
    }
}

/// Plays the rounds; returns the failure, if any.
fn outcome(rounds: &[Round]) -> Result<(), String> {
    let rounds = rounds.to_vec();
    let played = std::panic::catch_unwind(|| {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(play(rounds));
    });
    played.map_err(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
        text.unwrap_or("it panicked").to_owned()
    })
}

/// Finds rounds that `fails` rejects, and makes them as few and as short as possible. Failures also
/// depend on timing, so each candidate is tried several times, and may fail later even if it
/// passed.
fn search(
    daemons: u32,
    rounds: impl Strategy<Value = Vec<Round>>,
    fails: impl Fn(&[Round]) -> Result<(), String>,
) -> Result<(), String> {
    let config = ProptestConfig {
        cases: daemons,
        max_shrink_iters: SHRINKS.min(ProptestConfig::default().max_shrink_iters),
        max_shrink_time: u32::try_from(SHRINKING.as_millis()).unwrap(),
        failure_persistence: None,
        ..ProptestConfig::default()
    };
    let failed = std::cell::Cell::new(false);
    let found = TestRunner::new(config).run(&rounds, |rounds| {
        let tries = if failed.get() { TRIES } else { 1 };
        for _ in 0..tries {
            if let Err(failure) = fails(&rounds) {
                failed.set(true);
                eprintln!("{} rounds fail: {failure}", rounds.len());
                return Err(TestCaseError::fail(failure));
            }
        }
        Ok(())
    });
    found.map_err(|error| error.to_string())
}

#[test]
fn a_daemon_that_is_killed_again_and_again_agrees_with_a_model() {
    let long = std::env::var("VMMD_CHAOS").is_ok_and(|form| form == "long");
    let daemons = if long { DAEMONS_LONG } else { DAEMONS };
    // A round is left out by making its word false: that is what shrinking does.
    let kept = (proptest::bool::weighted(1.0), round());
    let rounds = proptest::collection::vec(kept, ROUNDS).prop_map(|rounds| {
        let kept = rounds.into_iter().filter(|(kept, _)| *kept);
        kept.map(|(_, round)| round).collect()
    });
    if let Err(found) = search(daemons, rounds, outcome) {
        panic!("{found}");
    }
}
