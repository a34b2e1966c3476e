//! The model: a driver on one vCPU, a worker, a device, and one or two processors. Times are nanoseconds.
//!
//! A thread is a sequence of steps; each step acts at once and then takes time. Two threads on one processor are
//! scheduled fairly: the one that wakes preempts the other when it has had less time, and a slice ends after 3 ms.

use std::{
    cmp::Reverse,
    collections::{BinaryHeap, VecDeque},
};

/// To add one request to the ring, the application's part included.
const SUBMIT: u64 = 1500;
/// To take one completion from the ring.
const REAP: u64 = 700;
/// One poll of the ring and of the completions.
const POLL: u64 = 200;
/// To take one request from the ring and to prepare it.
const TAKE: u64 = 500;
/// To complete one request.
const COMPLETE: u64 = 300;
/// The system call that hands requests to the host.
const COMMIT: u64 = 1500;
/// The system call that raises an interrupt.
const SEND: u64 = 1500;
/// The system call that gives the processor up, or sleeps.
const SYSCALL: u64 = 500;
/// From what wakes a sleeping thread until it runs.
const WAKE: u64 = 10_000;
/// To change from one thread to the other on one processor.
const SWITCH: u64 = 1500;
/// The scheduler's slice, and the credit of a thread that wakes.
const SLICE: u64 = 3_000_000;
const CREDIT: u64 = 1_000_000;

pub(super) const VCPU: usize = 0;
pub(super) const WORKER: usize = 1;

/// One point of the grid; times in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Point {
    /// Time of one request at the device.
    pub latency: u64,
    pub exit: u64,
    pub interrupt: u64,
    /// Requests that the driver keeps outstanding.
    pub depth: usize,
    pub processors: usize,
    /// The device works on one request at a time, not on 128.
    pub serial: bool,
}

/// Result of a run.
#[derive(Clone, Copy, Debug)]
pub(super) struct Outcome {
    /// Requests in a second.
    pub throughput: f64,
    /// 99th percentile of a request's time from the driver's point of view, in nanoseconds. The
    /// time starts when the driver takes the completion of the request's predecessor, because it
    /// could add the request then. It ends when the driver takes the request's own completion.
    pub p99: u64,
    /// Median of the same time.
    pub median: u64,
    /// Median of the time that the device had a request, its queue included, in nanoseconds.
    pub device: u64,
    /// 99th percentile of how long completions waited for their interrupt after the round that found the first of them,
    /// in nanoseconds.
    pub held: u64,
}

/// Next action of a worker after one round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// The next round, at once.
    Poll,
    /// The next round, after others had the processor.
    Yield,
    /// Sleep until a request completes or the driver notifies.
    Sleep,
}

/// Policy of a worker. The model calls it after each round with the round's results.
pub(super) trait Policy {
    fn round(&mut self, worker: &mut Worker<'_>, completed: usize, taken: usize) -> Next;
}

/// A policy's view of a worker, and the actions on it.
pub(super) struct Worker<'a> {
    machine: &'a mut Machine,
    cost: u64,
}

impl Worker<'_> {
    pub(super) fn now(&self) -> u64 {
        self.machine.now + self.cost
    }

    pub(super) fn in_flight(&self) -> usize {
        self.machine.device.len()
    }

    /// Requests that the driver keeps outstanding. A worker can't know.
    pub(super) fn depth(&self) -> usize {
        self.machine.point.depth
    }

    /// Whether the driver has requests to add and is at it. A worker can't know.
    pub(super) fn driver_is_busy(&self) -> bool {
        let machine = &self.machine;
        let runs = machine.threads[VCPU].state != State::Asleep && machine.driver != Driver::Halts;
        runs && !machine.to_add.is_empty()
    }

    /// Raises an interrupt if the driver wants one.
    pub(super) fn signal(&mut self) {
        let (old, new) = (self.machine.signalled, self.machine.used);
        if let Some(since) = self.machine.unsignalled_since.take() {
            self.machine.holds.push(self.machine.now - since);
        }
        self.machine.signalled = new;
        if (old..new).contains(&self.machine.used_event) {
            self.cost += SEND;
            self.machine.interrupt();
        }
    }

    /// Enables notifications. Returns whether requests are available already.
    pub(super) fn enable(&mut self) -> bool {
        self.machine.avail_event = Some(self.machine.taken);
        self.machine.added > self.machine.taken
    }

    pub(super) fn disable(&mut self) {
        self.machine.avail_event = None;
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Runs,
    Ready,
    Asleep,
}

#[derive(Clone, Copy, Debug)]
struct Thread {
    state: State,
    /// Remaining time of the thread's step.
    left: u64,
    /// The processor time that it had, as the scheduler counts it.
    had: u64,
}

/// Where the driver is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Driver {
    Looks,
    Reaps,
    Adds,
    Notifies,
    Halts,
}

struct Machine {
    now: u64,
    point: Point,
    random: u64,
    threads: [Thread; 2],
    on: Option<usize>,
    since: u64,
    // The driver.
    driver: Driver,
    /// Since when it may add each of the requests that it has not added.
    to_add: VecDeque<u64>,
    interrupted: bool,
    // The ring; free-running indices.
    added: u64,
    taken: u64,
    used: u64,
    consumed: u64,
    signalled: u64,
    used_event: u64,
    avail_event: Option<u64>,
    available: VecDeque<u64>,
    completed: VecDeque<u64>,
    // The worker.
    kicked: bool,
    // The device: when each request is done, when the driver added it, when the worker handed it over.
    device: BinaryHeap<Reverse<(u64, u64, u64)>>,
    free_at: u64,
    idle_since: Option<u64>,
    // Figures.
    unsignalled_since: Option<u64>,
    latencies: Vec<u64>,
    device_times: Vec<u64>,
    holds: Vec<u64>,
}

impl Machine {
    fn new(point: Point) -> Self {
        let thread = Thread {
            state: State::Ready,
            left: 0,
            had: 0,
        };
        Self {
            now: 0,
            point,
            random: 88_172_645_463_325_252,
            threads: [thread; 2],
            on: None,
            since: 0,
            driver: Driver::Looks,
            to_add: std::iter::repeat_n(0, point.depth).collect(),
            interrupted: false,
            added: 0,
            taken: 0,
            used: 0,
            consumed: 0,
            signalled: 0,
            used_event: 0,
            avail_event: Some(0),
            available: VecDeque::new(),
            completed: VecDeque::new(),
            kicked: false,
            device: BinaryHeap::new(),
            free_at: 0,
            idle_since: None,
            unsignalled_since: None,
            latencies: Vec::new(),
            device_times: Vec::new(),
            holds: Vec::new(),
        }
    }

    /// A time about as long: three quarters to five quarters.
    fn about(&mut self, time: u64) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        time * 3 / 4 + time * (self.random % 1024) / 2048
    }

    fn interrupt(&mut self) {
        self.interrupted = true;
        if self.threads[VCPU].state == State::Asleep {
            self.wake(VCPU);
        }
        self.threads[VCPU].left += self.point.interrupt;
    }

    fn wake(&mut self, who: usize) {
        let other = self.threads[1 - who].had;
        let thread = &mut self.threads[who];
        thread.state = State::Ready;
        thread.left += WAKE;
        if self.point.processors == 1 {
            thread.had = thread.had.max(other.saturating_sub(CREDIT));
            if self.on == Some(1 - who) && thread.had < other {
                self.stop(1 - who, State::Ready);
            }
        }
    }

    /// Takes a thread off its processor.
    fn stop(&mut self, who: usize, state: State) {
        self.threads[who].state = state;
        if self.on == Some(who) {
            self.on = None;
        }
    }

    fn schedule(&mut self) {
        if self.point.processors > 1 {
            for thread in &mut self.threads {
                if thread.state == State::Ready {
                    thread.state = State::Runs;
                }
            }
            return;
        }
        if let Some(on) = self.on {
            let other = self.threads[1 - on];
            if other.state == State::Ready
                && (self.now - self.since >= SLICE || self.threads[on].had > other.had + SLICE)
            {
                self.stop(on, State::Ready);
            }
        }
        if self.on.is_none() {
            let ready = [VCPU, WORKER]
                .into_iter()
                .filter(|who| self.threads[*who].state == State::Ready);
            if let Some(who) = ready.min_by_key(|who| self.threads[*who].had) {
                self.threads[who].state = State::Runs;
                self.threads[who].left += SWITCH;
                self.on = Some(who);
                self.since = self.now;
            }
        }
    }

    /// When the device's completions or the driver's notification wake a sleeping worker.
    fn worker_wakes(&self) -> Option<u64> {
        if self.threads[WORKER].state != State::Asleep {
            return None;
        }
        if self.kicked {
            return Some(self.now);
        }
        self.device.peek().map(|Reverse((done, ..))| *done)
    }

    /// To the next thing that happens; a thread whose step is over is due.
    fn advance(&mut self) -> Option<usize> {
        self.schedule();
        let runs = |who: &usize| self.threads[*who].state == State::Runs;
        let due = [VCPU, WORKER]
            .into_iter()
            .filter(runs)
            .min_by_key(|who| self.threads[*who].left);
        let step = due.map(|who| self.now + self.threads[who].left);
        let wakes = self.worker_wakes();
        let next = step.into_iter().chain(wakes).min().expect("something happens");
        let passed = next.saturating_sub(self.now);
        for thread in self
            .threads
            .iter_mut()
            .filter(|thread| thread.state == State::Runs)
        {
            thread.left -= passed;
            thread.had += passed;
        }
        self.now = self.now.max(next);
        if wakes == Some(next) {
            self.wake(WORKER);
            return None;
        }
        due
    }

    fn drive(&mut self) {
        let cost = match self.driver {
            Driver::Looks if std::mem::take(&mut self.interrupted) => {
                self.driver = Driver::Reaps;
                0
            }
            Driver::Looks if !self.to_add.is_empty() => {
                self.driver = Driver::Adds;
                self.about(SUBMIT)
            }
            Driver::Looks => {
                self.driver = Driver::Halts;
                self.point.exit
            }
            Driver::Reaps if self.consumed < self.used => {
                self.consumed += 1;
                self.to_add.push_back(self.now);
                let added = self.completed.pop_front().expect("a completion");
                self.latencies.push(self.now - added);
                self.about(REAP)
            }
            Driver::Reaps => {
                self.used_event = self.consumed;
                self.driver = Driver::Looks;
                0
            }
            Driver::Adds => {
                self.available.extend(self.to_add.pop_front());
                self.added += 1;
                if self.avail_event == Some(self.added - 1) {
                    self.driver = Driver::Notifies;
                    self.point.exit / 2
                } else {
                    self.driver = Driver::Looks;
                    0
                }
            }
            Driver::Notifies => {
                self.kicked = true;
                self.driver = Driver::Looks;
                self.point.exit / 2
            }
            Driver::Halts => {
                self.driver = Driver::Looks;
                if !self.interrupted {
                    self.stop(VCPU, State::Asleep);
                }
                0
            }
        };
        self.threads[VCPU].left += cost;
    }

    fn work(&mut self, policy: &mut impl Policy) {
        self.kicked = false;
        let (mut cost, mut completed) = (POLL, 0);
        while let Some(Reverse((done, added, handed))) = self.device.peek().copied() {
            if done > self.now {
                break;
            }
            self.device.pop();
            completed += 1;
            self.unsignalled_since.get_or_insert(self.now);
            self.device_times.push(done - handed);
            self.completed.push_back(added);
            self.used += 1;
            cost += COMPLETE;
        }
        let mut taken = 0;
        while let Some(added) = self.available.pop_front() {
            self.taken += 1;
            taken += 1;
            cost += TAKE;
            let latency = self.about(self.point.latency);
            let handed = self.now + cost + COMMIT;
            let done = if self.point.serial {
                self.free_at = self.free_at.max(handed) + latency;
                self.free_at
            } else {
                handed + latency
            };
            self.device.push(Reverse((done, added, handed)));
        }
        if taken > 0 {
            cost += COMMIT;
        }
        let mut worker = Worker { machine: self, cost };
        let next = policy.round(&mut worker, completed, taken);
        cost = worker.cost;
        let now = self.now;
        if completed + taken > 0 || !matches!(next, Next::Poll | Next::Yield) {
            self.idle_since = None;
        } else {
            // Polls that find nothing for long become rarer: a matter of the model's own speed.
            cost += (now - *self.idle_since.get_or_insert(now)) / 32;
        }
        match next {
            Next::Poll => {}
            Next::Yield => {
                cost += SYSCALL;
                if self.on == Some(WORKER) && self.threads[VCPU].state == State::Ready {
                    self.threads[WORKER].had = self.threads[WORKER].had.max(self.threads[VCPU].had + 1);
                    self.stop(WORKER, State::Ready);
                }
            }
            Next::Sleep => {
                cost += SYSCALL;
                self.stop(WORKER, State::Asleep);
            }
        }
        self.threads[WORKER].left += cost;
    }
}

/// Has the driver do so many requests; the first tenth of them is for learning.
pub(super) fn run(point: Point, requests: usize, policy: &mut impl Policy) -> Outcome {
    let mut machine = Machine::new(point);
    let mut begin = None;
    while machine.latencies.len() < requests {
        if begin.is_none() && machine.latencies.len() >= requests / 10 {
            begin = Some((machine.now, machine.latencies.len()));
        }
        match machine.advance() {
            Some(VCPU) => machine.drive(),
            Some(_) => machine.work(policy),
            None => {}
        }
    }
    let (since, first) = begin.expect("a beginning");
    let mut latencies = machine.latencies.split_off(first);
    let count = latencies.len();
    latencies.sort_unstable();
    machine.device_times.sort_unstable();
    machine.holds.sort_unstable();
    Outcome {
        throughput: count as f64 * 1e9 / (machine.now - since) as f64,
        p99: latencies[count * 99 / 100],
        median: latencies[count / 2],
        device: machine.device_times[machine.device_times.len() / 2],
        held: machine.holds[machine.holds.len() * 99 / 100],
    }
}
