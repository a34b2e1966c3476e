//! A daemon that is killed again and again while eight clients want something of it, right and wrong, of the same few VMs:
//! after each restart what is there, what was answered and what runs agree with a model, each request was carried out
//! once, and no VM has run twice at the same time.

mod calls;
mod clients;
mod history;
mod model;

use std::{
    collections::{BTreeMap, HashSet},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use proptest::prelude::*;
use proto::v1::vm_service_client::VmServiceClient;
use tokio::sync::Notify;

use self::{
    calls::{Answer, Call, Client, Kind, NEVER, call, is_final, looks, name, seen},
    clients::{Made, Scene, client, in_time, plain},
    history::join,
    model::{Look, Op, Run, State, Step, Time, explain},
};
use crate::{
    harness::{Daemon, connect},
    survival::consistent,
};

const CLIENTS: usize = 8;
/// Of one daemon; each ends with a kill.
const ROUNDS: usize = 25;
/// Daemons. Together they are killed 500 times.
const DAEMONS: u32 = 20;

/// What happens between two starts of the daemon.
#[derive(Clone, Debug)]
struct Round {
    /// Of each client.
    calls: Vec<Vec<Call>>,
    /// The daemon is killed after so many answers,
    answers: usize,
    /// and so many microseconds.
    after: u64,
    /// Whether a client asks again for what it has no answer to.
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
    /// Of all VMs that ever were.
    uids: HashSet<String>,
    /// What a `vmm` may still have been told by a daemon that is no more.
    late: Vec<(u8, Op)>,
    next: u64,
}

impl World {
    /// Two of its VMs with the same name can't run at the same time without that being told.
    fn alone(&self) -> String {
        format!("mock.alone={}", self.daemon.folder.path().display())
    }

    async fn clients(&self) -> Vec<Client> {
        let mut clients = Vec::new();
        for _ in 0..CLIENTS {
            clients.push(VmServiceClient::new(connect(self.daemon.folder.path()).await));
        }
        clients
    }

    async fn play(&mut self, round: Round) {
        let generation = |state: &State| match state {
            State::Absent => 0,
            State::There(vm) => vm.generation,
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
        });
        let clients = self.clients().await;
        let mut tasks = tokio::task::JoinSet::new();
        for (number, (api, calls)) in clients.into_iter().zip(round.calls).enumerate() {
            tasks.spawn(client(number, Arc::clone(&scene), api, calls));
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
        self.daemon.relaunch().await;
        let made = std::mem::take(&mut *scene.made.lock().unwrap());
        let again = self.ask_again(&scene, &made, &round.again).await;
        consistent(&self.daemon).await;
        self.next = scene.next.load(Ordering::SeqCst);
        self.judge(&made, &again).await;
    }

    /// Sends again what was not answered, if its client is one that does so, and what was answered for good.
    async fn ask_again(&self, scene: &Arc<Scene>, made: &[Made], again: &[bool]) -> BTreeMap<usize, Again> {
        let clients = self.clients().await;
        scene.killed.store(false, Ordering::SeqCst);
        let mut calls = tokio::task::JoinSet::new();
        for (index, made) in made.iter().enumerate() {
            let Some(request) = made.request.clone().filter(|request| !request.id().is_empty()) else {
                continue;
            };
            let wanted = made.answer.as_ref().map_or(again[made.client], is_final);
            if wanted {
                let (scene, mut client) = (Arc::clone(scene), clients[made.client].clone());
                calls.spawn(async move {
                    let begin = scene.now();
                    let answer = in_time(&request, request.send(&mut client)).await;
                    let answer = scene.came(answer).unwrap();
                    (index, (begin, scene.now(), answer))
                });
            }
        }
        let mut new = BTreeMap::new();
        while let Some(call) = calls.join_next().await {
            let (index, again) = call.unwrap();
            let Some(first) = &made[index].answer else {
                new.insert(index, again);
                continue;
            };
            assert_eq!(
                plain(first),
                plain(&again.2),
                "another answer to {:?}",
                made[index].request
            );
        }
        new
    }

    /// Whether all that was answered, and what is there now, has happened in some order.
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
            if made.request.is_none() && made.call.kind != Kind::Die {
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
            if made.answer.is_none() || made.call.kind == Kind::Die {
                let steps = made.call.steps(made.mark, None).into_iter();
                let late =
                    steps.filter(|step| matches!(step, Step::Wake | Step::Stop | Step::Pause | Step::Resume));
                let late = late.map(|step| (made.call.vm, made.op(0, NEVER, vec![step], true)));
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
            // Nothing more can come to one that has no process.
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

async fn play(rounds: Vec<Round>) {
    let mut world = World {
        daemon: Daemon::start().await,
        states: (0..calls::VMS).map(|vm| (vm, State::Absent)).collect(),
        uids: HashSet::new(),
        late: Vec::new(),
        next: 0,
    };
    for round in rounds {
        world.play(round).await;
    }
}

proptest! {
    // What happens is not only in the steps: the same ones need not fail again.
    #![proptest_config(ProptestConfig { cases: DAEMONS, max_shrink_iters: 0, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn a_daemon_that_is_killed_500_times_agrees_with_a_model(
        rounds in proptest::collection::vec(round(), ROUNDS),
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(play(rounds));
    }
}
