//! Worker of the balloon: takes pages, gives pages back, and holds the buffer for statistics.
//!
//! ```text
//!  inflate, deflate, report:  pop ─▶ Job ─ a piece at each kick ─▶ used
//!  statistics:                pop ─▶ held ─ request of the host ─▶ used (the driver refills it)
//! ```
//!
//! A pause puts an unfinished job back into the ring, and the job starts again later. All steps of
//! a job are idempotent.

use std::{io, sync::Arc, time::Instant};

use vm_memory::GuestAddress;
use vmm_base::GuestMemory;
use vmm_sys_util::eventfd::EventFd;

use super::{
    Reclaim,
    config::{F_PAGE_POISON, PAGE, PAGE_SHIFT, QUEUE_SIZES, Role},
    pages::PageSet,
    request::{self, NUMBER, NUMBERS},
    state::Shared,
};
use crate::{
    state::{Section, StateError, message},
    virtio::{
        chain::Chain,
        device::{Drained, Progress, QueueHandler},
        fault::Fault,
        session::{EventSet, Session},
    },
};

/// Token of the request for statistics.
const ASKED: u32 = 0;
/// Page numbers worked off, or pieces of reports, in one kick; then other queues and commands have their turn.
const BATCH: usize = 4 * NUMBERS;
/// Most pages of a report that are given back in one piece: 64 MiB.
const PIECE: u64 = 1 << 14;
/// Cost of a piece in a batch.
const PIECE_COST: usize = NUMBERS;

/// A request under way.
#[derive(Default)]
struct Job {
    chain: Chain,
    active: bool,
    /// Bytes of page numbers done, or reported buffers done.
    at: u32,
    /// Pages done of the reported buffer.
    within: u64,
    /// Pages that were given back.
    reclaimed: u64,
    /// Error of the driver in this request.
    wrong: Option<&'static str>,
    /// Why the host did not take something.
    refused: Option<io::Error>,
}

impl Job {
    fn begin(&mut self) {
        *self = Self {
            chain: std::mem::take(&mut self.chain),
            active: true,
            ..Self::default()
        };
    }
}

/// The back.
pub(super) struct BalloonHandler {
    reclaim: Box<dyn Reclaim>,
    shared: Arc<Shared>,
    wake: Arc<EventFd>,
    pages: PageSet,
    /// By queue.
    jobs: [Job; QUEUE_SIZES.len()],
    /// Chain that statistics are read from.
    statistics: Chain,
    /// Queue and head of the buffer for statistics, while it is ours.
    held: Option<(u16, u16)>,
    /// It was put back into the ring and says nothing new.
    put_back: bool,
    /// Somebody asks, and it is not here.
    asked: bool,
    numbers: Vec<u32>,
}

impl BalloonHandler {
    pub(super) fn new(reclaim: Box<dyn Reclaim>, shared: Arc<Shared>, wake: Arc<EventFd>) -> Self {
        Self {
            reclaim,
            shared,
            wake,
            pages: PageSet::default(),
            jobs: Default::default(),
            statistics: Chain::new(),
            held: None,
            put_back: false,
            asked: false,
            numbers: Vec::new(),
        }
    }

    fn work(&mut self, session: &mut Session, queue: u16, role: Role) -> Result<Progress, Fault> {
        let mut budget = BATCH;
        loop {
            let Some(slot) = self.jobs.get_mut(usize::from(queue)) else {
                return Ok(Progress::Waiting);
            };
            if budget == 0 {
                session.kick_again(queue);
                return Ok(Progress::Waiting);
            }
            if !slot.active {
                if !session.pop(queue, &mut slot.chain)? {
                    return Ok(Progress::Done);
                }
                slot.begin();
            }
            let mut job = std::mem::take(slot);
            let ended = match role {
                Role::Report => self.report(session, &mut job, &mut budget),
                _ => self.number(session.memory(), role, &mut job, &mut budget),
            };
            let result = if ended {
                self.end(session, queue, &mut job)
            } else {
                Ok(())
            };
            if let Some(slot) = self.jobs.get_mut(usize::from(queue)) {
                *slot = job;
            }
            result?;
        }
    }

    /// Takes a request's pages into the balloon, or out of it, up to `budget` page numbers; says whether it is done.
    fn number(&mut self, memory: &GuestMemory, role: Role, job: &mut Job, budget: &mut usize) -> bool {
        let length = job.chain.readable_len();
        if length == 0 || !length.is_multiple_of(NUMBER) {
            job.wrong = Some("not a list of page numbers");
            *budget = budget.saturating_sub(1);
            return true;
        }
        while job.at < length && *budget > 0 {
            if request::read_numbers(&job.chain, memory, job.at, &mut self.numbers).is_err() {
                job.wrong = Some("page numbers that can't be read");
                return true;
            }
            let count = self.numbers.len();
            *budget = budget.saturating_sub(count);
            let bytes = u32::try_from(count).unwrap_or(u32::MAX).saturating_mul(NUMBER);
            job.at = job.at.saturating_add(bytes);
            for run in request::runs(&mut self.numbers) {
                let mut left = count_of(&run);
                for part in self.pages.within(&run).collect::<Vec<_>>() {
                    left = left.saturating_sub(count_of(&part));
                    if role == Role::Inflate {
                        // Pages that are in the balloon already are given back again, because the
                        // guest may have touched them.
                        self.pages.insert(&part);
                        give(&*self.reclaim, &part, job);
                    } else if self.pages.remove(&part) < count_of(&part) {
                        job.wrong = Some("a page that is not in the balloon");
                    }
                }
                if left > 0 {
                    job.wrong = Some("a page outside guest memory");
                }
            }
        }
        self.shared.set_held(self.pages.len());
        job.at >= length
    }

    /// Gives reported pages back; says whether the request is done.
    fn report(&mut self, session: &Session, job: &mut Job, budget: &mut usize) -> bool {
        // 5.5.6.7: free pages must keep the driver's poison value, but pages that were given back
        // read as zeroes.
        let keep = session.has_feature(F_PAGE_POISON) && self.shared.poison() != 0;
        if job.chain.writable_len() == 0 {
            job.wrong = Some("a report of no pages");
        }
        while *budget > 0 {
            let Some(segment) = job.chain.writable().get(job.at as usize) else {
                return true;
            };
            let pages = request::pages_of(segment);
            let start = pages.start.saturating_add(job.within);
            let piece = start..pages.end.min(start.saturating_add(PIECE));
            *budget = budget.saturating_sub(cost(&piece));
            if !keep && !piece.is_empty() {
                // All buffers lie in memory, but one buffer may continue from one region into the
                // next.
                for part in self.pages.within(&piece).collect::<Vec<_>>() {
                    give(&*self.reclaim, &part, job);
                }
            }
            job.within = job.within.saturating_add(PIECE);
            if piece.end >= pages.end {
                (job.at, job.within) = (job.at.saturating_add(1), 0);
            }
        }
        job.chain.writable().len() <= job.at as usize
    }

    /// Answers a request that is done.
    fn end(&self, session: &mut Session, queue: u16, job: &mut Job) -> Result<(), Fault> {
        job.active = false;
        let head = job.chain.head();
        if Role::of(queue, session.features()) == Some(Role::Report) {
            self.shared.add_reported(job.reclaimed.saturating_mul(PAGE));
        }
        if let Some(error) = job.refused.take() {
            session.add_used(queue, head, 0)?;
            return Err(Fault::Backend("give memory back to the host", error));
        }
        match job.wrong {
            Some(reason) => Err(Fault::Guest { queue, head, reason }),
            None => session.add_used(queue, head, 0),
        }
    }

    /// Takes the buffer for statistics and reads its values. The driver may offer one buffer
    /// (5.5.6.3). A second buffer stays in the ring.
    fn take_statistics(&mut self, session: &mut Session, queue: u16) -> Result<Progress, Fault> {
        if self.held.is_some() {
            return Ok(Progress::Waiting);
        }
        while session.pop(queue, &mut self.statistics)? {
            let head = self.statistics.head();
            let (old, asked) = (
                std::mem::take(&mut self.put_back),
                std::mem::take(&mut self.asked),
            );
            self.shared.set_speaks(true);
            if old && asked {
                session.add_used(queue, head, 0)?;
                continue;
            }
            if !old {
                self.shared
                    .said(request::statistics(&self.statistics, session.memory()));
            }
            self.held = Some((queue, head));
            return Ok(Progress::Waiting);
        }
        Ok(Progress::Done)
    }
}

impl QueueHandler for BalloonHandler {
    fn start(&mut self, session: &mut Session) -> Result<(), Fault> {
        if self.pages.len() == 0 {
            self.pages = PageSet::new(session.memory());
        }
        session.watch(&*self.wake, ASKED, EventSet::IN)
    }

    fn kick(&mut self, session: &mut Session, queue: u16) -> Result<Progress, Fault> {
        match Role::of(queue, session.features()) {
            Some(Role::Stats) => self.take_statistics(session, queue),
            Some(role) => self.work(session, queue, role),
            None => Ok(Progress::Waiting),
        }
    }

    fn event(&mut self, session: &mut Session, _token: u32) -> Result<(), Fault> {
        // The worker is the only reader. After a spurious event the counter is empty.
        let _count = self.wake.read();
        if let Some((queue, head)) = self.held.take() {
            session.add_used(queue, head, 0)?;
            session.kick_again(queue);
        } else {
            self.asked = true;
        }
        Ok(())
    }

    fn drain(&mut self, session: &mut Session, _deadline: Instant) -> Result<Drained, Fault> {
        for (queue, job) in (0..).zip(&mut self.jobs) {
            if std::mem::take(&mut job.active) {
                session.unpop(queue);
            }
        }
        if let Some((queue, _)) = self.held.take() {
            session.unpop(queue);
            self.put_back = true;
        }
        self.shared.set_speaks(false);
        Ok(Drained::Quiet)
    }

    fn reset(&mut self) {
        self.pages.clear();
        self.held = None;
        self.put_back = false;
        self.asked = false;
        for job in &mut self.jobs {
            job.active = false;
        }
        self.shared.forget();
    }

    fn save(&self) -> Result<Section, StateError> {
        let state = message::VirtioBalloonQueues {
            pages: self.pages.save(),
            put_back: self.put_back,
            asked: self.asked,
        };
        Ok(Section::new("balloon", &state))
    }

    fn restore(&mut self, section: &Section, memory: &GuestMemory) -> Result<(), StateError> {
        let saved: message::VirtioBalloonQueues = section.open()?;
        self.pages = PageSet::restored(memory, &saved.pages)?;
        self.shared.set_held(self.pages.len());
        self.put_back = saved.put_back;
        self.asked = saved.asked;
        Ok(())
    }
}

/// Gives pages in one region of memory back to the host.
fn give(reclaim: &dyn Reclaim, pages: &std::ops::Range<u64>, job: &mut Job) {
    let count = count_of(pages);
    let address = GuestAddress(pages.start << PAGE_SHIFT);
    match reclaim.reclaim(address, count.saturating_mul(PAGE)) {
        Ok(()) => job.reclaimed = job.reclaimed.saturating_add(count),
        Err(error) => job.refused = Some(error),
    }
}

fn count_of(pages: &std::ops::Range<u64>) -> u64 {
    pages.end.saturating_sub(pages.start)
}

/// In page numbers of a list: the kernel drops a large piece at less cost than its pages one by one.
fn cost(piece: &std::ops::Range<u64>) -> usize {
    let part = count_of(piece).saturating_mul(PIECE_COST as u64) >> PIECE.trailing_zeros();
    usize::try_from(part).unwrap_or(usize::MAX).max(1)
}
