//! The worker of a port: fetches commands, has the engine of the image carry them out, and completes them.
//!
//! It is a worker of the virtio framework that serves no queue, so that pauses, resets, bus-master enable and reports
//! of faults are those of all disks. The port's *wake* event takes the place of a queue's notification.
//!
//! A command is in exactly one place: issued in the port, in the engine (*in flight*), in the slot that [`Throttle`]
//! names, or *held* after an error of the host. At most one command that is not queued is fetched, and no other
//! command with it (AHCI 1.3.1, 5.3.10). A pause gives the commands that wait or are held back to the port, which has
//! them issued, so that they are fetched again.

use std::{
    io,
    sync::{Arc, atomic::Ordering},
    time::Instant,
};

use block::{Completion, Engine, Operation, Request};
use vmm_base::{GuestMemory, dirty, ram::Segment, sys::Iovecs};

use super::{
    ata::{self, Disk},
    atapi,
    fis::{CommandFis, Fetched, Registers, SLOTS, gather, scatter},
    hba::{Hba, HbaPort},
    port::{Answer, Device, End, Failure, Medium, Protocol},
};
use crate::{
    state::{Section, StateError},
    virtio::{
        blk::{
            OnError,
            control::Shared,
            plan::{Limits, Plan, Range},
        },
        chain::mark,
        device::{Drained, Progress, QueueHandler},
        fault::Fault,
        rate::Throttle,
        session::{EventSet, Session},
    },
};

/// Tokens of events.
const COMPLETIONS: u32 = 0;
const WAKE: u32 = 1;
const TIMER: u32 = 2;

/// Device Control register: software reset.
const SOFTWARE_RESET: u8 = 1 << 2;

/// A command that was fetched and asks for the image.
struct Command {
    fetched: Fetched,
    registers: Registers,
    era: u32,
    protocol: Protocol,
    plan: Plan,
    stable: bool,
    /// Ranges to discard, one after the other.
    ranges: Vec<Range>,
    range: usize,
    segments: Vec<Segment>,
    since: Instant,
    /// `None` while it is in flight.
    buffers: Option<Box<Iovecs>>,
}

/// Properties of the drive that its worker uses.
pub(super) struct Setup {
    pub index: usize,
    pub hba: Arc<Hba>,
    pub shared: Arc<Shared>,
    pub engine: Box<dyn Engine>,
    pub limits: Limits,
    pub medium: Medium,
    pub on_error: OnError,
}

/// See the module.
pub(super) struct PortHandler {
    setup: Setup,
    memory: Option<Arc<GuestMemory>>,
    /// By slot.
    commands: Vec<Option<Command>>,
    /// Buffers of earlier commands, which saves allocations. They hold on to guest memory.
    #[allow(clippy::vec_box, reason = "an engine takes and gives boxes")]
    spare: Vec<Box<Iovecs>>,
    throttle: Throttle<u32>,
    /// Commands that failed and are fetched again after a pause, as a bit for each slot. A flush is not queued, so none
    /// begins before they are gone.
    held: u32,
    /// Held commands were reported since the last pause.
    reported: bool,
    era: u32,
    /// The slot that is looked at first.
    next: u32,
    /// The port has an interrupt that its driver wants.
    interrupt: bool,
    /// To be reported at the end of a round.
    fault: Option<Fault>,
}

impl PortHandler {
    pub(super) fn new(setup: Setup) -> Self {
        Self {
            setup,
            memory: None,
            commands: Vec::new(),
            spare: Vec::new(),
            throttle: Throttle::default(),
            held: 0,
            reported: false,
            era: 0,
            next: 0,
            interrupt: false,
            fault: None,
        }
    }

    fn port(&self) -> Option<&HbaPort> {
        self.setup.hba.ports().get(self.setup.index)
    }

    fn wake(&self) {
        if let Some(port) = self.port() {
            port.wake();
        }
    }

    /// Completes and fetches commands until there is nothing to do.
    fn run(&mut self, session: &mut Session) -> Result<(), Fault> {
        let Some(memory) = self.memory.clone() else {
            return Ok(());
        };
        let wake = self.setup.shared.wake_of(0);
        self.throttle.refresh(&self.setup.shared.limiter, wake);
        let mut result = Ok(true);
        while let Ok(true) = result {
            result = self.round(session, &memory);
            self.signal();
            if session.has_command() || result.is_err() {
                // The framework handles it first.
                self.wake();
                break;
            }
        }
        self.publish();
        match self.fault.take() {
            Some(fault) => Err(fault),
            None => result.map(|_| ()),
        }
    }

    /// Returns whether there was something to do.
    fn round(&mut self, session: &Session, memory: &Arc<GuestMemory>) -> Result<bool, Fault> {
        self.drop_stopped(memory);
        let completed = self.complete(memory)?;
        let fetched = self.fetch(session, memory)?;
        self.commit()?;
        Ok(completed > 0 || fetched > 0)
    }

    /// Gives back commands of an earlier era that wait or are held.
    fn drop_stopped(&mut self, memory: &GuestMemory) {
        let Some(era) = self.port().map(|port| port.lock().era) else {
            return;
        };
        if std::mem::replace(&mut self.era, era) == era {
            return;
        }
        for slot in 0..SLOTS {
            let stale = self
                .command(slot)
                .is_some_and(|command| command.era != era && command.buffers.is_some());
            if stale {
                if self.throttle.waiting == Some(slot) {
                    self.throttle.give_up();
                }
                self.finish(memory, slot, Ok(()));
            }
        }
    }

    fn command(&mut self, slot: u32) -> Option<&mut Command> {
        self.commands.get_mut(slot as usize)?.as_mut()
    }

    /// Fetches commands as long as the engine takes more. Returns their number.
    fn fetch(&mut self, session: &Session, memory: &Arc<GuestMemory>) -> Result<usize, Fault> {
        let mut count = 0_usize;
        if let Some(slot) = self.throttle.waiting {
            if self.has_to_wait(session, slot)? {
                return Ok(count);
            }
            count = 1;
            self.submit(memory, slot);
        }
        // A batch, between which other work has its turn.
        while count < SLOTS as usize
            && self.setup.engine.in_flight() < self.setup.engine.depth()
            && self.throttle.waiting.is_none()
            && self.fetch_one(session, memory)?
        {
            count = count.saturating_add(1);
        }
        Ok(count)
    }

    /// Changes to the image of a new medium. False while commands of the old medium are in process.
    fn change_medium(&mut self, session: &Session) -> Result<bool, Fault> {
        if !self.port().is_some_and(HbaPort::has_engine) {
            return Ok(true);
        }
        if self.commands.iter().any(Option::is_some) {
            return Ok(false);
        }
        if let Some(engine) = self.port().and_then(HbaPort::take_engine) {
            // The event of the old engine is closed, which ends its watch.
            self.setup.engine = engine;
            self.watch_engine(session)?;
        }
        Ok(true)
    }

    fn watch_engine(&self, session: &Session) -> Result<(), Fault> {
        match self.setup.engine.event() {
            Some(event) => session.watch(event, COMPLETIONS, EventSet::IN | EventSet::EDGE_TRIGGERED),
            None => Ok(()),
        }
    }

    /// Fetches the next command. False if there is none, or if it has to wait for others.
    fn fetch_one(&mut self, session: &Session, memory: &Arc<GuestMemory>) -> Result<bool, Fault> {
        if !self.change_medium(session)? {
            return Ok(false);
        }
        let Some(port) = self.setup.hba.ports().get(self.setup.index) else {
            return Ok(false);
        };
        let (list, era, ready) = {
            let port = port.lock();
            (port.list, port.era, port.ready())
        };
        if ready == 0 {
            return Ok(false);
        }
        let slot = ready
            .rotate_right(self.next)
            .trailing_zeros()
            .wrapping_add(self.next)
            % SLOTS;
        let bit = 1_u32.wrapping_shl(slot);
        let fetched = Fetched::read(memory, list, slot);
        let is_queued = |fetched: &Fetched| matches!(fetched.fis, CommandFis::Command(registers) if Disk::is_queued(registers.command));
        let queued = fetched.as_ref().is_ok_and(is_queued);
        let mut others = self.commands.iter().flatten();
        if others.any(|other| !queued || other.protocol != Protocol::Queued) {
            return Ok(false);
        }
        let mut locked = port.lock();
        if locked.era != era || locked.ready() & bit == 0 || port.has_engine() {
            return Ok(true);
        }
        locked.fetched |= bit;
        self.next = slot.wrapping_add(1) % SLOTS;
        if !queued {
            locked.begin(slot);
        }
        let capacity = self.setup.shared.capacity.load(Ordering::Acquire);
        let Setup { limits, medium, .. } = &self.setup;
        let answer = match &fetched {
            Err(_) => None,
            Ok(Fetched {
                fis: CommandFis::Control(control),
                ..
            }) if control & SOFTWARE_RESET != 0 => {
                Some((Registers::default(), Answer::Done(locked.reset_device())))
            }
            Ok(Fetched {
                fis: CommandFis::Control(_),
                ..
            }) => Some((Registers::default(), Answer::Reset)),
            Ok(Fetched {
                fis: CommandFis::Command(registers),
                packet,
                ..
            }) => {
                let answer = match &mut locked.device {
                    Device::Disk(disk) => disk.execute(registers, slot, capacity, limits, medium),
                    Device::Cdrom(drive) => drive.execute(registers, packet, capacity, medium),
                };
                Some((*registers, answer))
            }
        };
        drop(locked);
        match (fetched, answer) {
            (Ok(fetched), Some((registers, answer))) => {
                self.begin(session, memory, slot, era, fetched, registers, answer)?;
            }
            _ => {
                let end = End {
                    protocol: Protocol::Dma,
                    registers: Registers::default(),
                    bytes: 0,
                    result: Err(Failure::Bus),
                };
                self.give_back(memory, slot, era, None, &end);
            }
        }
        Ok(true)
    }

    /// Carries out the device's decision on a command.
    #[allow(clippy::too_many_arguments, reason = "the parts of one command")]
    fn begin(
        &mut self,
        session: &Session,
        memory: &Arc<GuestMemory>,
        slot: u32,
        era: u32,
        fetched: Fetched,
        registers: Registers,
        answer: Answer,
    ) -> Result<(), Fault> {
        let mut command = Command {
            fetched,
            registers,
            era,
            protocol: Protocol::Dma,
            plan: Plan::Flush,
            stable: false,
            ranges: Vec::new(),
            range: 0,
            segments: Vec::new(),
            since: Instant::now(),
            buffers: None,
        };
        let mut end = End {
            protocol: Protocol::Dma,
            registers,
            bytes: 0,
            result: Ok(()),
        };
        let planned = match answer {
            Answer::Medium {
                plan,
                stable,
                protocol,
            } => {
                (command.plan, command.stable, command.protocol) = (plan, stable, protocol);
                let length = match plan {
                    Plan::Read { length, .. } | Plan::Write { length, .. } => length,
                    _ => 0,
                };
                if matches!(protocol, Protocol::Packet | Protocol::PacketPio) {
                    command.registers = atapi::ended();
                }
                buffers(memory, &mut command, length).map(|()| true)
            }
            Answer::Trim { blocks } => self.plan_trim(memory, &mut command, blocks),
            Answer::Reply { data, protocol } => {
                end.protocol = protocol;
                if matches!(protocol, Protocol::Packet | Protocol::PacketPio) {
                    end.registers = atapi::ended();
                }
                end.bytes = u32::try_from(data.len()).unwrap_or(u32::MAX);
                buffers(memory, &mut command, end.bytes)
                    .and_then(|()| Ok(scatter(memory, &command.segments, &data)?))
                    .map(|()| false)
            }
            Answer::Done(registers) => {
                end.registers = registers;
                Ok(false)
            }
            Answer::Fail(error) => Err(Failure::Device(error)),
            Answer::Signature(error) => {
                end.registers = self.port().map_or(end.registers, |port| port.lock().signature());
                Err(Failure::Device(error))
            }
            Answer::Reset => {
                end.registers = self
                    .port()
                    .map_or(end.registers, |port| port.lock().reset_device());
                Ok(false)
            }
        };
        match planned {
            Ok(true) => {
                let spare = self.spare.pop();
                command.buffers = Some(spare.unwrap_or_else(|| Box::new(Iovecs::new(Arc::clone(memory)))));
                if let Some(place) = self.commands.get_mut(slot as usize) {
                    *place = Some(command);
                }
                if self.throttle.limits() && self.has_to_wait(session, slot)? {
                    return Ok(());
                }
                self.submit(memory, slot);
            }
            Ok(false) => self.give_back(memory, slot, era, Some(&fetched), &end),
            Err(failure) => {
                end.result = Err(failure);
                if command.protocol == Protocol::Queued {
                    end.protocol = Protocol::Queued;
                }
                self.give_back(memory, slot, era, Some(&fetched), &end);
            }
        }
        Ok(())
    }

    /// Plans a TRIM, whose ranges are in the command's buffers. False if there is nothing to discard.
    fn plan_trim(&self, memory: &GuestMemory, command: &mut Command, blocks: u16) -> Result<bool, Failure> {
        let mut data = vec![0; usize::from(blocks.min(ata::MAX_TRIM_BLOCKS)).saturating_mul(ata::PAGE)];
        let length = u32::try_from(data.len()).unwrap_or(u32::MAX);
        buffers(memory, command, length)?;
        gather(memory, &command.segments, &mut data)?;
        let capacity = self.setup.shared.capacity.load(Ordering::Acquire);
        let ranges = ata::trim_ranges(&data, capacity, &self.setup.limits);
        command.ranges = ranges.ok_or(Failure::Device(ata::ABORT))?;
        command.plan = Plan::Discard { ranges: length };
        Ok(!command.ranges.is_empty())
    }

    /// Whether the command waits for its rate limit; it is the throttle's then.
    fn has_to_wait(&mut self, session: &Session, slot: u32) -> Result<bool, Fault> {
        let Some(Some(command)) = self.commands.get(slot as usize) else {
            self.throttle.waiting = None;
            return Ok(false);
        };
        let cost = command.plan.cost(&command.ranges);
        match self.throttle.wait_for(cost, Instant::now) {
            None => {
                self.throttle.waiting = None;
                Ok(false)
            }
            Some(wait) => {
                self.throttle.waiting = Some(slot);
                self.throttle.arm(session, TIMER, wait)?;
                Ok(true)
            }
        }
    }

    /// Hands the command in `slot`, or its next range, to the engine.
    fn submit(&mut self, memory: &GuestMemory, slot: u32) {
        let Some(Some(command)) = self.commands.get_mut(slot as usize) else {
            return;
        };
        let Some(mut buffers) = command.buffers.take() else {
            return;
        };
        buffers.clear();
        let prepared = match (command.plan, command.ranges.get(command.range)) {
            (Plan::Read { offset, length }, _) => buffers
                .append(&command.segments, 0, length)
                .map(|()| Operation::Read { offset }),
            (Plan::Write { offset, length }, _) => {
                let stable = command.stable;
                buffers
                    .append(&command.segments, 0, length)
                    .map(|()| Operation::Write { offset, stable })
            }
            (Plan::Discard { .. }, Some(range)) => Ok(range.operation(false)),
            _ => Ok(Operation::Flush),
        };
        match prepared {
            Ok(operation) => self.setup.engine.submit(Request {
                token: slot,
                operation,
                buffers,
            }),
            Err(_) => {
                command.buffers = Some(buffers);
                self.finish(memory, slot, Err(Failure::Bus));
            }
        }
    }

    /// Handles requests that the engine completed. Returns their number.
    fn complete(&mut self, memory: &GuestMemory) -> Result<usize, Fault> {
        let mut count = 0_usize;
        while let Some(Completion {
            token: slot,
            result,
            buffers,
        }) = self.setup.engine.completed()
        {
            count = count.saturating_add(1);
            let tracking = &self.setup.shared.tracking;
            let Some(Some(command)) = self.commands.get_mut(slot as usize) else {
                return Err(Fault::Bug(format!(
                    "a completion of slot {slot} without a command"
                )));
            };
            command.buffers = Some(buffers);
            let discards = matches!(command.plan, Plan::Discard { .. });
            match (command.plan, command.ranges.get(command.range)) {
                // A failed operation may have written a part. The mark precedes the answer to the driver.
                (Plan::Write { offset, length }, _) => tracking.mark(offset, length.into()),
                (Plan::Discard { .. }, Some(range)) => tracking.mark(range.offset, range.length),
                (Plan::Read { length, .. }, _) if dirty::is_used() => {
                    mark(&command.segments, memory, 0, length);
                }
                _ => {}
            }
            match result {
                Ok(()) => {
                    command.range = command.range.saturating_add(1);
                    if command.range < command.ranges.len() {
                        self.submit(memory, slot);
                    } else {
                        self.finish(memory, slot, Ok(()));
                    }
                }
                // TRIM is a hint.
                Err(error) if discards && error.kind() == io::ErrorKind::Unsupported => {
                    self.finish(memory, slot, Ok(()));
                }
                Err(error) => self.fail(memory, slot, error),
            }
        }
        Ok(count)
    }

    /// The host could not carry a command out.
    fn fail(&mut self, memory: &GuestMemory, slot: u32, error: io::Error) {
        let Some(command) = self.command(slot) else {
            return;
        };
        let (what, plan) = (command.plan.failure(), command.plan);
        match self.setup.on_error {
            OnError::Report => {
                self.fault.get_or_insert(Fault::Backend(what, error));
                let reads = matches!(plan, Plan::Read { .. });
                let unreadable = self.port().map(|port| port.lock().device.unreadable());
                let error = unreadable.filter(|_| reads).unwrap_or(ata::ABORT);
                self.finish(memory, slot, Err(Failure::Device(error)));
            }
            OnError::Hold => {
                self.held |= 1_u32.wrapping_shl(slot);
                if !std::mem::replace(&mut self.reported, true) {
                    self.fault = Some(Fault::Held(what, error));
                }
            }
        }
    }

    /// Completes the command in `slot`.
    fn finish(&mut self, memory: &GuestMemory, slot: u32, result: Result<(), Failure>) {
        let Some(command) = self.commands.get_mut(slot as usize).and_then(Option::take) else {
            return;
        };
        self.held &= !1_u32.wrapping_shl(slot);
        let bytes = match command.plan {
            Plan::Read { length, .. } | Plan::Write { length, .. } => length,
            Plan::Discard { ranges } => ranges,
            _ => 0,
        };
        if let (Some(kind), Some(counters)) = (command.plan.kind(), self.setup.shared.counters(0))
            && command.era == self.era
        {
            let counted = match command.plan {
                Plan::Discard { .. } => command.ranges.iter().map(|range| range.length).sum(),
                _ => u64::from(bytes),
            };
            let took = u64::try_from(command.since.elapsed().as_nanos()).unwrap_or(u64::MAX);
            counters.completed(kind, counted, took, result.is_ok());
        }
        let end = End {
            protocol: command.protocol,
            registers: command.registers,
            bytes,
            result,
        };
        self.give_back(memory, slot, command.era, Some(&command.fetched), &end);
        self.spare.extend(command.buffers);
    }

    fn give_back(&mut self, memory: &GuestMemory, slot: u32, era: u32, fetched: Option<&Fetched>, end: &End) {
        let Some(port) = self.setup.hba.ports().get(self.setup.index) else {
            return;
        };
        let mut port = port.lock();
        port.complete(memory, slot, era, fetched, end);
        self.interrupt |= port.is_pending();
    }

    /// Raises the interrupt for what completed.
    fn signal(&mut self) {
        if std::mem::take(&mut self.interrupt) {
            self.setup.hba.interrupt(self.setup.index);
        }
    }

    fn commit(&mut self) -> Result<(), Fault> {
        self.setup
            .engine
            .commit()
            .map_err(|error| Fault::Backend("submit requests", error))
    }

    /// Shows where commands are.
    fn publish(&self) {
        let Some(counters) = self.setup.shared.counters(0) else {
            return;
        };
        counters.set_in_flight(self.commands.iter().flatten().count());
        counters.set_held(self.held.count_ones() as usize);
        // All issued commands wait behind the one that the throttle has.
        let issued = self.port().map_or(0, |port| port.lock().ready().count_ones());
        counters.set_throttled(match self.throttle.waiting {
            Some(_) => (issued as usize).saturating_add(1),
            None => 0,
        });
    }

    /// The command in `slot`, which is not in flight, is to be fetched again.
    fn unfetch(&mut self, slot: u32) {
        if let Some(place) = self.commands.get_mut(slot as usize) {
            *place = None;
        }
        if let Some(port) = self.port() {
            port.lock().fetched &= !1_u32.wrapping_shl(slot);
            port.wake();
        }
    }

    /// Forgets all commands, none of which is in flight: the port has them issued.
    fn forget(&mut self) {
        self.commands.clear();
        self.commands.resize_with(SLOTS as usize, || None);
        self.spare.clear();
        self.held = 0;
        self.interrupt = false;
        if let Some(port) = self.port() {
            port.lock().fetched = 0;
        }
    }

    fn wait_for_all(&mut self, memory: &GuestMemory, deadline: Instant) -> Result<Drained, Fault> {
        loop {
            self.commit()?;
            if let Some(event) = self.setup.engine.event() {
                // Clears the event, so that the wait ends only for later completions.
                let _empty = event.read();
            }
            self.complete(memory)?;
            // Ranges may follow each other.
            self.commit()?;
            if self.setup.engine.in_flight() == 0 {
                return Ok(Drained::Quiet);
            }
            if Instant::now() >= deadline {
                return Ok(Drained::Late);
            }
            self.setup
                .engine
                .wait(deadline)
                .map_err(|error| Fault::Backend("wait for requests", error))?;
        }
    }
}

/// Gets the buffers of the first `length` bytes of a command.
fn buffers(memory: &GuestMemory, command: &mut Command, length: u32) -> Result<(), Failure> {
    let found = command.fetched.buffers(memory, length, &mut command.segments)?;
    if found < length {
        return Err(Failure::Overflow);
    }
    Ok(())
}

impl QueueHandler for PortHandler {
    fn start(&mut self, session: &mut Session) -> Result<(), Fault> {
        self.memory = Some(Arc::new(session.memory().clone()));
        self.forget();
        self.throttle.start();
        if let Some(engine) = self.port().and_then(HbaPort::take_engine) {
            self.setup.engine = engine;
        }
        self.watch_engine(session)?;
        let edges = EventSet::IN | EventSet::EDGE_TRIGGERED;
        if let Some(wake) = self.setup.shared.wake_of(0) {
            session.watch(&**wake, WAKE, edges)?;
        }
        self.wake();
        Ok(())
    }

    fn kick(&mut self, _session: &mut Session, _queue: u16) -> Result<Progress, Fault> {
        Ok(Progress::Waiting)
    }

    fn event(&mut self, session: &mut Session, _token: u32) -> Result<(), Fault> {
        self.run(session)
    }

    fn drain(&mut self, _session: &mut Session, deadline: Instant) -> Result<Drained, Fault> {
        if let Some(slot) = self.throttle.give_up() {
            self.unfetch(slot);
        }
        let Some(memory) = self.memory.clone() else {
            return Ok(Drained::Quiet);
        };
        let drained = self.wait_for_all(&memory, deadline);
        self.signal();
        self.publish();
        if drained.is_ok()
            && let Some(fault) = self.fault.take()
        {
            return Err(fault);
        }
        let drained = drained?;
        if drained == Drained::Quiet {
            self.reported = false;
            self.forget();
        }
        Ok(drained)
    }

    fn reset(&mut self) {
        self.memory = None;
        self.forget();
        self.publish();
    }

    /// The port has all state.
    fn save(&self) -> Result<Section, StateError> {
        Err(StateError::not_migratable(
            "a port's worker",
            "the port has its state",
        ))
    }

    fn restore(&mut self, _section: &Section, _memory: &GuestMemory) -> Result<(), StateError> {
        Ok(())
    }
}
