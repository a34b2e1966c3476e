//! A device with two queues, each with its own worker, that answers requests when the test lets it.

use std::{
    collections::VecDeque,
    io,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use vmm_base::GuestMemory;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::{
    state::{Section, StateError},
    virtio::{
        chain::Chain,
        device::{DeviceKind, Drained, Progress, QueueHandler, VirtioDevice, WorkerSpec, read_bytes},
        fault::Fault,
        session::{EventSet, Session},
        signals::Signals,
        testing::{Buffer, Driver, PATIENCE, Rig},
    },
};

/// How one worker behaves; shared with the test.
pub struct Strings {
    /// Requests are kept until `release` is signalled.
    pub hold: AtomicBool,
    /// The backend: signalled when held requests are done.
    pub release: EventFd,
    /// The next call panics.
    pub panic: AtomicBool,
    /// `kick` always reports more work.
    pub endless: AtomicBool,
    /// Starting fails.
    pub refuse_start: AtomicBool,
    pub starts: AtomicU64,
    pub resets: AtomicU64,
    /// Requests taken.
    pub taken: AtomicU64,
    /// Calls of `drain`, each of which waits for a moment only.
    pub drains: AtomicU64,
    /// The handler was dropped with requests under way.
    pub abandoned: AtomicBool,
}

/// How long a call of `drain` waits at most.
const DRAIN: Duration = Duration::from_millis(5);

impl Strings {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            hold: AtomicBool::new(false),
            release: EventFd::new(EFD_NONBLOCK).unwrap(),
            panic: AtomicBool::new(false),
            endless: AtomicBool::new(false),
            refuse_start: AtomicBool::new(false),
            starts: AtomicU64::new(0),
            resets: AtomicU64::new(0),
            taken: AtomicU64::new(0),
            drains: AtomicU64::new(0),
            abandoned: AtomicBool::new(false),
        })
    }

    /// Waits until that many requests were taken since the device was made.
    pub fn wait_for_taken(&self, count: u64) {
        until(|| self.taken.load(Ordering::SeqCst) >= count);
    }

    /// Waits for `count` further calls of `drain`.
    pub fn wait_for_drains(&self, count: u64) {
        let goal = self.drains.load(Ordering::SeqCst) + count;
        until(|| self.drains.load(Ordering::SeqCst) >= goal);
    }

    /// Makes the backend answer all held requests and all future ones.
    pub fn let_go(&self) {
        self.hold.store(false, Ordering::SeqCst);
        self.release.write(1).unwrap();
    }
}

/// Waits for what another thread does without an interrupt.
pub fn until(done: impl Fn() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < PATIENCE);
        std::thread::yield_now();
    }
}

pub struct Puppet {
    strings: [Arc<Strings>; 2],
    pub config: Arc<Mutex<[u8; 6]>>,
}

/// A rig with a puppet, and what moves it.
pub fn puppet() -> (Driver, [Arc<Strings>; 2], Arc<Mutex<[u8; 6]>>) {
    let strings = [Strings::new(), Strings::new()];
    let config = Arc::new(Mutex::new([1, 2, 3, 4, 5, 6]));
    let device = Puppet {
        strings: strings.clone(),
        config: config.clone(),
    };
    (Driver::new(Rig::new(Box::new(device))), strings, config)
}

/// A request.
pub fn ask() -> Vec<Buffer> {
    vec![Buffer::Readable(vec![1, 2, 3]), Buffer::Writable(8)]
}

/// A running puppet with a request of the first queue under way until [`Strings::let_go`].
pub fn puppet_at_work() -> (Driver, [Arc<Strings>; 2], Arc<Mutex<[u8; 6]>>) {
    let (mut driver, strings, config) = puppet();
    driver.start(0);
    strings[0].hold.store(true, Ordering::SeqCst);
    driver.submit(0, &ask());
    strings[0].wait_for_taken(1);
    (driver, strings, config)
}

impl VirtioDevice for Puppet {
    fn kind(&self) -> DeviceKind {
        DeviceKind::Console
    }
    fn features(&self) -> u64 {
        1 << 3
    }
    fn queue_sizes(&self) -> &[u16] {
        &[16, 256]
    }
    fn config_len(&self) -> usize {
        6
    }
    fn read_config(&self, offset: usize, data: &mut [u8]) {
        read_bytes(&*self.config.lock().unwrap(), offset, data);
    }
    fn write_config(&mut self, offset: usize, data: &[u8]) {
        self.config.lock().unwrap()[offset..offset + data.len()].copy_from_slice(data);
    }
    fn reset(&mut self) {}
    fn save(&self) -> Result<Section, StateError> {
        Err(StateError::not_migratable("puppet", "it hangs on strings"))
    }
    fn restore(&mut self, _section: &Section) -> Result<(), StateError> {
        Err(StateError::not_migratable("puppet", "it hangs on strings"))
    }
    fn workers(&mut self, _signals: &Arc<Signals>) -> io::Result<Vec<WorkerSpec>> {
        let spec = |(queue, strings): (u16, &Arc<Strings>)| WorkerSpec {
            kind: vmm_base::thread::ThreadKind::Worker,
            name: format!("puppet-{queue}"),
            queues: vec![queue],
            handler: Box::new(Hand {
                queue,
                strings: strings.clone(),
                chain: Chain::new(),
                held: VecDeque::new(),
            }),
        };
        Ok((0..).zip(&self.strings).map(spec).collect())
    }
}

struct Hand {
    queue: u16,
    strings: Arc<Strings>,
    chain: Chain,
    held: VecDeque<u16>,
}

impl Hand {
    fn answer(&mut self, session: &mut Session) -> Result<(), Fault> {
        while let Some(head) = self.held.pop_front() {
            session.add_used(self.queue, head, 0)?;
        }
        Ok(())
    }

    fn is_released(&self) -> bool {
        !self.strings.hold.load(Ordering::SeqCst)
    }
}

impl Drop for Hand {
    fn drop(&mut self) {
        if !self.held.is_empty() {
            self.strings.abandoned.store(true, Ordering::SeqCst);
        }
    }
}

impl QueueHandler for Hand {
    fn start(&mut self, session: &mut Session) -> Result<(), Fault> {
        assert!(self.held.is_empty(), "started with requests from before");
        self.strings.starts.fetch_add(1, Ordering::SeqCst);
        if self.strings.refuse_start.load(Ordering::SeqCst) {
            return Err(Fault::Backend("open the puppet", io::ErrorKind::NotFound.into()));
        }
        session.watch(&self.strings.release, 7, EventSet::IN)
    }

    fn kick(&mut self, session: &mut Session, queue: u16) -> Result<Progress, Fault> {
        assert_eq!(queue, self.queue);
        assert!(
            !self.strings.panic.load(Ordering::SeqCst),
            "the string was pulled"
        );
        if self.strings.endless.load(Ordering::SeqCst) {
            session.kick_again(queue);
            return Ok(Progress::Waiting);
        }
        while session.pop(queue, &mut self.chain)? {
            self.held.push_back(self.chain.head());
            self.strings.taken.fetch_add(1, Ordering::SeqCst);
        }
        if self.is_released() {
            self.answer(session)?;
        }
        Ok(Progress::Done)
    }

    fn event(&mut self, session: &mut Session, token: u32) -> Result<(), Fault> {
        assert_eq!(token, 7);
        let _spurious = self.strings.release.read();
        self.answer(session)
    }

    fn drain(&mut self, session: &mut Session, deadline: Instant) -> Result<Drained, Fault> {
        self.strings.drains.fetch_add(1, Ordering::SeqCst);
        let deadline = deadline.min(Instant::now() + DRAIN);
        while !self.held.is_empty() && !self.is_released() {
            if Instant::now() >= deadline {
                return Ok(Drained::Late);
            }
            std::thread::yield_now();
        }
        self.answer(session)?;
        Ok(Drained::Quiet)
    }

    fn reset(&mut self) {
        assert!(self.held.is_empty());
        self.strings.resets.fetch_add(1, Ordering::SeqCst);
    }

    fn save(&self) -> Result<Section, StateError> {
        Err(StateError::not_migratable("puppet", "it hangs on strings"))
    }

    fn restore(&mut self, _section: &Section, _memory: &GuestMemory) -> Result<(), StateError> {
        Err(StateError::not_migratable("puppet", "it hangs on strings"))
    }
}
