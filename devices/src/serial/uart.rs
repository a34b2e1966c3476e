//! A 16550A (National Semiconductor PC16550D) with an infinitely fast line: written bytes are sent
//! at once, so that a driver never waits for the transmitter.
//!
//! # Interrupts
//!
//! The interrupt controllers get edges. One is sent whenever a cause of an interrupt *arises*:
//! input enters an empty FIFO, the transmitter becomes empty after a write or is found empty when
//! its interrupt is enabled, an error or a modem line changes. Input beyond the FIFO's size waits
//! in a backlog and enters when the FIFO is empty, which counts as arising again. After a pause
//! each cause that persists sends an edge, so none is lost. OUT2 does not gate interrupts (as in
//! QEMU's model: small kernels rely on that).

use std::{collections::VecDeque, io, sync::Arc};

use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::history::History;
use crate::{
    bus::{BusDevice, Effect},
    interrupt::IrqLine,
};

/// Depth of the receiver FIFO in bytes.
const FIFO: usize = 16;
/// Input that waits for room in the FIFO, in bytes.
pub(super) const BACKLOG: usize = 4096;

/// Registers by offset. Some have another meaning when [`Lcr::DLAB`] is set, or when written.
mod reg {
    /// Receiver buffer, transmitter holding; with DLAB the divisor's low byte.
    pub const DATA: u64 = 0;
    /// Interrupt enable; with DLAB the divisor's high byte.
    pub const IER: u64 = 1;
    /// Interrupt identification; written: FIFO control.
    pub const IIR: u64 = 2;
    pub const LCR: u64 = 3;
    pub const MCR: u64 = 4;
    pub const LSR: u64 = 5;
    pub const MSR: u64 = 6;
    pub const SCR: u64 = 7;
}

bitflags::bitflags! {
    /// Interrupt enable, and the causes that are there.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(super) struct Ier: u8 {
        const RECEIVED = 1;
        const TRANSMITTER_EMPTY = 1 << 1;
        const LINE_STATUS = 1 << 2;
        const MODEM_STATUS = 1 << 3;
    }

    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(super) struct Fcr: u8 {
        const ENABLE = 1;
        const CLEAR_RECEIVER = 1 << 1;
        const CLEAR_TRANSMITTER = 1 << 2;
        /// Receiver trigger level: 1, 4, 8 or 14 bytes.
        const TRIGGER_LOW = 1 << 6;
        const TRIGGER_HIGH = 1 << 7;
    }

    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(super) struct Lcr: u8 {
        /// Divisor latch access.
        const DLAB = 1 << 7;
        const _ = !0;
    }

    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(super) struct Mcr: u8 {
        const DTR = 1;
        const RTS = 1 << 1;
        const OUT1 = 1 << 2;
        const OUT2 = 1 << 3;
        const LOOP = 1 << 4;
    }

    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    struct Lsr: u8 {
        const DATA_READY = 1;
        const OVERRUN = 1 << 1;
        const BREAK = 1 << 4;
        const HOLDING_EMPTY = 1 << 5;
        const TRANSMITTER_EMPTY = 1 << 6;
    }

    /// The upper half is the state of the lines, the lower half says which changed.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(super) struct Msr: u8 {
        const DELTA_CTS = 1;
        const DELTA_DSR = 1 << 1;
        /// The ring indicator went from on to off.
        const TRAILING_RI = 1 << 2;
        const DELTA_DCD = 1 << 3;
        const CTS = 1 << 4;
        const DSR = 1 << 5;
        const RI = 1 << 6;
        const DCD = 1 << 7;
    }
}

impl Msr {
    const LINES: Self = Self::CTS.union(Self::DSR).union(Self::RI).union(Self::DCD);
    /// A connected and ready peer.
    const CONNECTED: Self = Self::CTS.union(Self::DSR).union(Self::DCD);
}

/// Values of the interrupt identification register (table III of the data sheet), by falling priority.
mod iir {
    pub const LINE_STATUS: u8 = 0b0110;
    pub const RECEIVED: u8 = 0b0100;
    /// Less than the trigger level is in the FIFO, and nothing more came for a while.
    pub const TIMEOUT: u8 = 0b1100;
    pub const TRANSMITTER_EMPTY: u8 = 0b0010;
    pub const MODEM_STATUS: u8 = 0b0000;
    pub const NONE: u8 = 0b0001;
    pub const FIFOS_ENABLED: u8 = 0b1100_0000;
}

/// The device behind 8 I/O ports.
pub struct Uart {
    irq: Arc<dyn IrqLine>,
    history: Arc<History>,
    pub(super) registers: Registers,
    /// Input that the guest has not been shown yet.
    pub(super) backlog: VecDeque<u8>,
    /// A break comes after that many bytes of the backlog.
    pub(super) break_after: Option<usize>,
    /// No input is let in.
    paused: bool,
    /// A sender found no room: `room` is signalled when there is room again.
    starved: bool,
    room: EventFd,
}

/// Registers that a reset restores.
pub(super) struct Registers {
    pub ier: Ier,
    pub fcr: Fcr,
    pub lcr: Lcr,
    pub mcr: Mcr,
    pub msr: Msr,
    pub scratch: u8,
    pub divisor: [u8; 2],
    pub overrun: bool,
    /// The FIFO's only byte is a break, which the guest has not been told.
    pub break_received: bool,
    /// The transmitter became empty and the guest has not been told.
    pub transmitted: bool,
    pub fifo: VecDeque<u8>,
}

impl Registers {
    pub fn new() -> Self {
        Self {
            ier: Ier::empty(),
            fcr: Fcr::empty(),
            lcr: Lcr::empty(),
            mcr: Mcr::empty(),
            msr: Msr::CONNECTED,
            scratch: 0,
            // 9,600 baud.
            divisor: 12_u16.to_le_bytes(),
            overrun: false,
            break_received: false,
            transmitted: false,
            fifo: VecDeque::with_capacity(FIFO),
        }
    }

    /// The enabled causes that are there.
    fn causes(&self) -> Ier {
        let mut causes = Ier::empty();
        causes.set(Ier::RECEIVED, !self.fifo.is_empty());
        causes.set(Ier::TRANSMITTER_EMPTY, self.transmitted);
        causes.set(Ier::LINE_STATUS, self.overrun || self.break_received);
        causes.set(Ier::MODEM_STATUS, !self.msr.difference(Msr::LINES).is_empty());
        causes & self.ier
    }

    pub fn depth(&self) -> usize {
        if self.fcr.contains(Fcr::ENABLE) { FIFO } else { 1 }
    }

    fn trigger(&self) -> usize {
        match (
            self.fcr.contains(Fcr::TRIGGER_HIGH),
            self.fcr.contains(Fcr::TRIGGER_LOW),
        ) {
            (false, false) => 1,
            (false, true) => 4,
            (true, false) => 8,
            (true, true) => 14,
        }
    }

    /// In loopback the modem's outputs are its inputs (8.8 of the data sheet).
    fn update_modem_lines(&mut self) {
        let lines = if self.mcr.contains(Mcr::LOOP) {
            let mut lines = Msr::empty();
            lines.set(Msr::CTS, self.mcr.contains(Mcr::RTS));
            lines.set(Msr::DSR, self.mcr.contains(Mcr::DTR));
            lines.set(Msr::RI, self.mcr.contains(Mcr::OUT1));
            lines.set(Msr::DCD, self.mcr.contains(Mcr::OUT2));
            lines
        } else {
            Msr::CONNECTED
        };
        let changed = (self.msr ^ lines) & Msr::LINES;
        let mut msr = self.msr.difference(Msr::LINES) | lines;
        msr.set(
            Msr::DELTA_CTS,
            msr.contains(Msr::DELTA_CTS) || changed.contains(Msr::CTS),
        );
        msr.set(
            Msr::DELTA_DSR,
            msr.contains(Msr::DELTA_DSR) || changed.contains(Msr::DSR),
        );
        msr.set(
            Msr::DELTA_DCD,
            msr.contains(Msr::DELTA_DCD) || changed.contains(Msr::DCD),
        );
        if changed.contains(Msr::RI) && !lines.contains(Msr::RI) {
            msr |= Msr::TRAILING_RI;
        }
        self.msr = msr;
    }

    fn interrupt_identification(&mut self) -> u8 {
        let causes = self.causes();
        let cause = if causes.contains(Ier::LINE_STATUS) {
            iir::LINE_STATUS
        } else if causes.contains(Ier::RECEIVED) {
            if self.fifo.len() < self.trigger() {
                iir::TIMEOUT
            } else {
                iir::RECEIVED
            }
        } else if causes.contains(Ier::TRANSMITTER_EMPTY) {
            // Reading it acknowledges this cause, and only when it is the one told.
            self.transmitted = false;
            iir::TRANSMITTER_EMPTY
        } else if causes.contains(Ier::MODEM_STATUS) {
            iir::MODEM_STATUS
        } else {
            iir::NONE
        };
        if self.fcr.contains(Fcr::ENABLE) {
            cause | iir::FIFOS_ENABLED
        } else {
            cause
        }
    }

    fn line_status(&mut self) -> u8 {
        let mut lsr = Lsr::HOLDING_EMPTY | Lsr::TRANSMITTER_EMPTY;
        lsr.set(Lsr::DATA_READY, !self.fifo.is_empty());
        lsr.set(Lsr::OVERRUN, std::mem::take(&mut self.overrun));
        lsr.set(Lsr::BREAK, std::mem::take(&mut self.break_received));
        lsr.bits()
    }

    fn modem_status(&mut self) -> u8 {
        let msr = self.msr;
        self.msr &= Msr::LINES;
        msr.bits()
    }
}

impl Uart {
    /// A port after power-on that prints into `history`.
    pub fn new(irq: Arc<dyn IrqLine>, history: Arc<History>) -> io::Result<Self> {
        Ok(Self {
            irq,
            history,
            registers: Registers::new(),
            backlog: VecDeque::new(),
            break_after: None,
            paused: false,
            starved: false,
            room: EventFd::new(EFD_NONBLOCK)?,
        })
    }

    /// What was printed.
    pub fn history(&self) -> &Arc<History> {
        &self.history
    }

    /// How many bytes of input may be sent now. After 0 the eventfd of [`room_event`](Self::room_event) is signalled
    /// when it is worth asking again: half of it is free then.
    pub fn room(&mut self) -> usize {
        let room = BACKLOG.saturating_sub(self.backlog.len());
        self.starved |= room == 0 || self.paused;
        if self.starved { 0 } else { room }
    }

    /// See [`room`](Self::room). It belongs to one thread, which serves all senders.
    pub fn room_event(&self) -> io::Result<EventFd> {
        self.room.try_clone()
    }

    /// Takes input, at most what [`room`](Self::room) said (also when a pause came between); returns how many bytes
    /// it took.
    pub fn receive(&mut self, input: &[u8]) -> usize {
        let room = BACKLOG.saturating_sub(self.backlog.len());
        let taken = input.get(..room).unwrap_or(input);
        self.backlog.extend(taken);
        self.refill();
        taken.len()
    }

    /// Takes a break, which follows the pending input. A second break before the guest has received
    /// the first is merged with it.
    pub fn receive_break(&mut self) {
        self.break_after.get_or_insert(self.backlog.len());
        self.refill();
    }

    /// Lets no input in any more. Called with the vCPUs stopped.
    pub fn pause(&mut self) {
        self.paused = true;
    }

    /// Accepts input again, and repeats notifications that the guest may have missed.
    pub fn resume(&mut self) {
        self.paused = false;
        self.tell_of_room();
        self.refill();
        if !self.registers.causes().is_empty() {
            self.irq.pulse();
        }
    }

    /// Resets to the state after power-on; unread input is dropped, the printed output stays.
    pub fn reset(&mut self) {
        self.registers = Registers::new();
        self.backlog.clear();
        self.break_after = None;
        self.tell_of_room();
    }

    /// Lets input into an empty FIFO.
    fn refill(&mut self) {
        let registers = &mut self.registers;
        let closed = self.paused || registers.mcr.contains(Mcr::LOOP);
        if closed || !registers.fifo.is_empty() {
            return;
        }
        if self.break_after == Some(0) {
            // A break is a byte of zeroes with an error flag that marks the break (8.6.3 of the
            // data sheet). The byte is alone in the FIFO, so that the flag applies to no other
            // byte.
            self.break_after = None;
            registers.fifo.push_back(0);
            registers.break_received = true;
            return self.interrupt_for(Ier::RECEIVED | Ier::LINE_STATUS);
        }
        let most = self.break_after.unwrap_or(usize::MAX);
        let count = registers.depth().min(self.backlog.len()).min(most);
        if count == 0 {
            return;
        }
        registers.fifo.extend(self.backlog.drain(..count));
        self.break_after = self.break_after.map(|after| after.saturating_sub(count));
        // Half of it free: a sender is not woken for every handful of bytes.
        if self.backlog.len() <= BACKLOG.wrapping_div(2) {
            self.tell_of_room();
        }
        self.interrupt_for(Ier::RECEIVED);
    }

    /// Raises an interrupt if one of these causes is enabled.
    fn interrupt_for(&self, arisen: Ier) {
        if self.registers.causes().intersects(arisen) {
            self.irq.pulse();
        }
    }

    fn tell_of_room(&mut self) {
        if std::mem::take(&mut self.starved) {
            // It can only fail when the counter is full, and then it is readable.
            let _ = self.room.write(1);
        }
    }

    fn read_register(&mut self, offset: u64) -> u8 {
        let registers = &mut self.registers;
        let dlab = registers.lcr.contains(Lcr::DLAB);
        let [divisor_low, divisor_high] = registers.divisor;
        match offset {
            reg::DATA if dlab => divisor_low,
            reg::DATA => {
                let byte = registers.fifo.pop_front().unwrap_or(0);
                self.refill();
                byte
            }
            reg::IER if dlab => divisor_high,
            reg::IER => registers.ier.bits(),
            reg::IIR => registers.interrupt_identification(),
            reg::LCR => registers.lcr.bits(),
            reg::MCR => registers.mcr.bits(),
            reg::LSR => registers.line_status(),
            reg::MSR => registers.modem_status(),
            reg::SCR => registers.scratch,
            _ => 0xff,
        }
    }

    fn write_register(&mut self, offset: u64, value: u8) {
        let before = self.registers.causes();
        let registers = &mut self.registers;
        let dlab = registers.lcr.contains(Lcr::DLAB);
        match offset {
            reg::DATA if dlab => registers.divisor = [value, registers.divisor[1]],
            reg::DATA => self.transmit(value),
            reg::IER if dlab => registers.divisor = [registers.divisor[0], value],
            reg::IER => {
                let ier = Ier::from_bits_truncate(value);
                // Enabling the interrupt finds the transmitter empty, always (drivers test for it).
                registers.transmitted |= ier.difference(registers.ier).contains(Ier::TRANSMITTER_EMPTY);
                registers.ier = ier;
            }
            reg::IIR => self.control_fifo(value),
            reg::LCR => registers.lcr = Lcr::from_bits_retain(value),
            reg::MCR => {
                registers.mcr = Mcr::from_bits_truncate(value);
                registers.update_modem_lines();
            }
            // The status registers are not written (factory test).
            reg::SCR => registers.scratch = value,
            _ => {}
        }
        if !self.registers.causes().difference(before).is_empty() {
            self.irq.pulse();
        }
        self.refill();
    }

    fn transmit(&mut self, byte: u8) {
        let registers = &mut self.registers;
        registers.transmitted = true;
        if !registers.mcr.contains(Mcr::LOOP) {
            self.history.push(byte);
        } else if registers.fifo.len() < registers.depth() {
            registers.fifo.push_back(byte);
        } else {
            registers.overrun = true;
        }
    }

    fn control_fifo(&mut self, value: u8) {
        let fcr = Fcr::from_bits_truncate(value);
        let registers = &mut self.registers;
        // Turning the FIFOs on or off empties them (8.4 of the data sheet). The backlog is on the line still.
        let toggled = (fcr ^ registers.fcr).contains(Fcr::ENABLE);
        if toggled || fcr.contains(Fcr::CLEAR_RECEIVER) {
            registers.fifo.clear();
            registers.break_received = false;
        }
        registers.fcr = if fcr.contains(Fcr::ENABLE) {
            fcr.difference(Fcr::CLEAR_RECEIVER | Fcr::CLEAR_TRANSMITTER)
        } else {
            Fcr::empty()
        };
    }
}

/// The registers are a byte wide, and are not there for other widths.
impl BusDevice for Uart {
    fn read(&mut self, offset: u64, data: &mut [u8]) {
        match data {
            [byte] => *byte = self.read_register(offset),
            _ => data.fill(0xff),
        }
    }

    fn write(&mut self, offset: u64, data: &[u8]) -> Effect {
        if let [byte] = data {
            self.write_register(offset, *byte);
        }
        Effect::None
    }
}
