//! The registers of the controller (AHCI 1.3.1, 3.1), its ports and its interrupt, as vCPUs and workers share them.

use std::sync::{
    Arc, Mutex, MutexGuard, PoisonError,
    atomic::{AtomicBool, AtomicU32, Ordering},
};

use block::Engine;
use vmm_sys_util::eventfd::EventFd;

use super::port::Port;
use crate::pci::msix::MsixVectors;

/// Bytes of the registers, and of each port's among them.
pub(super) const SIZE: u64 = 0x1000;
const PORTS: u64 = 0x100;
const PORT: u64 = 0x80;

/// CAP: 64-bit addresses, native command queuing, command list override, second generation, AHCI only, 32 command
/// slots; the lowest bits are the highest number of a port.
const CAPABILITIES: u32 = 1 << 31 | 1 << 30 | 1 << 24 | 2 << 20 | 1 << 18 | 31 << 8;
/// PxIS: after a write that leaves some of its bits, there is an interrupt again.
const INTERRUPT_STATUS: u64 = 0x10;

/// GHC: AHCI is enabled, always; interrupts are; a reset is under way.
const AHCI_ENABLE: u32 = 1 << 31;
const INTERRUPT_ENABLE: u32 = 1 << 1;
const RESET: u32 = 1 << 0;
const VERSION: u32 = 0x0001_0301;

/// Registers, by their offset.
mod register {
    pub(super) const CAPABILITIES: u64 = 0x00;
    pub(super) const CONTROL: u64 = 0x04;
    pub(super) const INTERRUPT: u64 = 0x08;
    pub(super) const PORTS: u64 = 0x0c;
    pub(super) const VERSION: u64 = 0x10;
}

/// A port, with the event that wakes its worker.
pub(super) struct HbaPort {
    /// Below [`MAX_PORTS`](super::MAX_PORTS).
    number: u8,
    port: Mutex<Port>,
    wake: Arc<EventFd>,
    /// Engine of a new medium, until the worker takes it. It is set with the port locked.
    engine: Mutex<Option<Box<dyn Engine>>>,
    /// A new engine is there.
    changed: AtomicBool,
}

impl HbaPort {
    pub(super) fn new(number: u8, port: Port, wake: Arc<EventFd>) -> Self {
        Self {
            number,
            port: Mutex::new(port),
            wake,
            engine: Mutex::new(None),
            changed: AtomicBool::new(false),
        }
    }

    /// The worker is to carry the next commands out with this engine. The caller has locked the port.
    pub(super) fn set_engine(&self, engine: Box<dyn Engine>) {
        *self.engine.lock().unwrap_or_else(PoisonError::into_inner) = Some(engine);
        self.changed.store(true, Ordering::SeqCst);
    }

    /// Whether there is an engine that the worker has not taken.
    pub(super) fn has_engine(&self) -> bool {
        self.changed.load(Ordering::SeqCst)
    }

    /// Gives the engine to the worker.
    pub(super) fn take_engine(&self) -> Option<Box<dyn Engine>> {
        let mut engine = self.engine.lock().unwrap_or_else(PoisonError::into_inner);
        self.changed.store(false, Ordering::SeqCst);
        engine.take()
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Port> {
        self.port.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Its bit in IS and PI.
    fn bit(&self) -> u32 {
        1_u32.wrapping_shl(self.number.into())
    }

    /// Makes the worker look at its port.
    pub(super) fn wake(&self) {
        // Full only when it is readable anyway.
        let _full = self.wake.write(1);
    }
}

/// See the module.
pub(super) struct Hba {
    ports: Vec<HbaPort>,
    /// IS: the ports with interrupts.
    interrupt: AtomicU32,
    /// GHC.IE.
    enabled: AtomicBool,
    /// The driver has set GHC.HR, which stays set while a worker has an older command.
    resets: AtomicBool,
    vectors: Arc<MsixVectors>,
}

impl Hba {
    /// With these ports, in the order of their numbers.
    pub(super) fn new(ports: Vec<HbaPort>, vectors: Arc<MsixVectors>) -> Self {
        Self {
            ports,
            interrupt: AtomicU32::new(0),
            enabled: AtomicBool::new(false),
            resets: AtomicBool::new(false),
            vectors,
        }
    }

    pub(super) fn ports(&self) -> &[HbaPort] {
        &self.ports
    }

    /// A port has an interrupt that its driver wants.
    pub(super) fn interrupt(&self, index: usize) {
        let bit = self.ports.get(index).map_or(0, HbaPort::bit);
        self.interrupt.fetch_or(bit, Ordering::SeqCst);
        if self.enabled.load(Ordering::SeqCst) {
            self.vectors.raise(0);
        }
    }

    /// Reads the registers at `offset`.
    pub(super) fn read(&self, offset: u64, data: &mut [u8]) {
        for (at, byte) in (offset..).zip(data) {
            let word = self.read_word(at & !3).to_le_bytes();
            *byte = word.into_iter().nth((at & 3) as usize).unwrap_or(0);
        }
    }

    /// Writes the registers at `offset`: whole registers, of which there may be two. Other writes do nothing.
    pub(super) fn write(&self, offset: u64, data: &[u8]) {
        if !offset.is_multiple_of(4) || !data.len().is_multiple_of(4) {
            return;
        }
        for (at, word) in (offset..).step_by(4).zip(data.chunks_exact(4)) {
            let word = word.try_into().map_or(0, u32::from_le_bytes);
            self.write_word(at, word);
        }
    }

    fn read_word(&self, offset: u64) -> u32 {
        if offset < PORTS {
            return self.read_global(offset);
        }
        let index = self.port_at(offset);
        let port = index.and_then(|index| self.ports.get(index));
        port.map_or(0, |port| port.lock().read(offset % PORT))
    }

    fn write_word(&self, offset: u64, value: u32) {
        if offset < PORTS {
            return self.write_global(offset, value);
        }
        let index = self.port_at(offset);
        let Some((index, port)) = index.and_then(|index| Some((index, self.ports.get(index)?))) else {
            return;
        };
        let register = offset % PORT;
        let mut locked = port.lock();
        let before = locked.is_pending();
        let wakes = locked.write(register, value);
        let after = locked.is_pending();
        drop(locked);
        if wakes {
            port.wake();
        }
        if after && (!before || register == INTERRUPT_STATUS) {
            self.interrupt(index);
        }
    }

    /// Index of the port whose registers are at `offset`.
    fn port_at(&self, offset: u64) -> Option<usize> {
        let number = offset.checked_sub(PORTS)? / PORT;
        self.ports
            .iter()
            .position(|port| u64::from(port.number) == number)
    }

    /// A bit for each port (PI).
    pub(super) fn implemented(&self) -> u32 {
        self.ports.iter().fold(0, |bits, port| bits | port.bit())
    }

    fn read_global(&self, offset: u64) -> u32 {
        match offset {
            register::CAPABILITIES => {
                let last = self.ports.last().map_or(0, |port| port.number);
                CAPABILITIES | u32::from(last)
            }
            register::CONTROL => {
                let mut control = AHCI_ENABLE;
                if self.enabled.load(Ordering::SeqCst) {
                    control |= INTERRUPT_ENABLE;
                }
                if self.is_resetting() {
                    control |= RESET;
                }
                control
            }
            register::INTERRUPT => self.interrupt.load(Ordering::SeqCst),
            register::PORTS => self.implemented(),
            register::VERSION => VERSION,
            _ => 0,
        }
    }

    fn write_global(&self, offset: u64, value: u32) {
        match offset {
            register::CONTROL if value & RESET != 0 => {
                self.reset();
                for port in &self.ports {
                    port.wake();
                }
                self.resets.store(true, Ordering::SeqCst);
            }
            register::CONTROL => {
                let enabled = value & INTERRUPT_ENABLE != 0;
                self.enabled.store(enabled, Ordering::SeqCst);
                if enabled && self.interrupt.load(Ordering::SeqCst) != 0 {
                    self.vectors.raise(0);
                }
            }
            register::INTERRUPT => {
                self.interrupt.fetch_and(!value, Ordering::SeqCst);
                // A port that still has an interrupt sets its bit again.
                for (index, port) in self.ports.iter().enumerate() {
                    if value & port.bit() != 0 && port.lock().is_pending() {
                        self.interrupt(index);
                    }
                }
            }
            _ => {}
        }
    }

    /// Whether a worker has a command that is older than a reset of the controller.
    fn is_resetting(&self) -> bool {
        if !self.resets.load(Ordering::SeqCst) {
            return false;
        }
        let busy = self.ports.iter().any(|port| port.lock().fetched != 0);
        if !busy {
            self.resets.store(false, Ordering::SeqCst);
        }
        busy
    }

    /// To the state after power-on, except for commands that workers have.
    pub(super) fn reset(&self) {
        for port in &self.ports {
            port.lock().reset();
        }
        self.interrupt.store(0, Ordering::SeqCst);
        self.enabled.store(false, Ordering::SeqCst);
        self.resets.store(false, Ordering::SeqCst);
    }

    /// To the state after power-on. No worker has a command.
    pub(super) fn power_on(&self) {
        self.reset();
        for port in &self.ports {
            port.lock().power_on();
        }
    }

    /// GHC.IE and IS.
    pub(super) fn registers(&self) -> (bool, u32) {
        (
            self.enabled.load(Ordering::SeqCst),
            self.interrupt.load(Ordering::SeqCst),
        )
    }

    /// Takes over saved values of GHC.IE and IS, without an interrupt.
    pub(super) fn restore(&self, enabled: bool, interrupt: u32) {
        self.enabled.store(enabled, Ordering::SeqCst);
        self.interrupt.store(interrupt, Ordering::SeqCst);
    }
}
