//! MSI-X: the capability, its table and its pending bits (PCI 3.0, 6.8.2).
//!
//! Two halves. [`Msix`] is the registers, owned by the PCI function. [`MsixVectors`] is what workers raise interrupts
//! through: atomics only. A vector is *open* when MSI-X is enabled, the function is a bus master and not masked, and the
//! vector is not masked; only then it is connected. An interrupt raised on a vector that is not open stays pending until it opens.
//! Invariant: once a raise has returned, the message was sent or the pending bit is set (or MSI-X is disabled).

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
};

use vmm_sys_util::eventfd::EventFd;

use crate::{
    interrupt::{MsiController, MsiMessage, MsiVector},
    state::{StateError, check, message},
};

/// Most vectors in a table (11 bits hold the count less one).
pub const MAX_VECTORS: usize = 2048;
/// Bytes of a table entry.
pub const ENTRY_SIZE: u64 = 16;

/// Message control: MSI-X is enabled.
const CONTROL_ENABLE: u16 = 1 << 15;
/// Message control: all vectors are masked.
const CONTROL_FUNCTION_MASK: u16 = 1 << 14;
/// Vector control: the vector is masked.
const VECTOR_MASKED: u32 = 1;

/// State of a vector: open, in the lowest bit; above it a count of changes.
const OPEN: u32 = 1;
const CHANGE: u32 = 2;

struct Vector {
    interrupt: Arc<dyn MsiVector>,
    state: AtomicU32,
    pending: AtomicBool,
}

/// The vectors as workers see them.
pub struct MsixVectors {
    vectors: Vec<Vector>,
    enabled: AtomicBool,
}

impl MsixVectors {
    /// Number of vectors.
    pub fn len(&self) -> usize {
        self.vectors.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.vectors.is_empty()
    }

    /// Sends the vector's message, or leaves it pending. False when that can't reach the guest: there is no such
    /// vector, or MSI-X is disabled.
    pub fn raise(&self, vector: u16) -> bool {
        let Some(vector) = self.vectors.get(usize::from(vector)) else {
            return false;
        };
        if !self.enabled.load(Ordering::SeqCst) {
            return false;
        }
        let state = vector.state.load(Ordering::SeqCst);
        if state & OPEN != 0 {
            vector.interrupt.trigger();
            // Was it closed at the same time, then the message may be lost. Twice is harmless.
            if vector.state.load(Ordering::SeqCst) == state {
                return true;
            }
        }
        vector.pending.store(true, Ordering::SeqCst);
        // Was it opened at the same time, then the opener may not have seen that it is pending.
        if vector.state.load(Ordering::SeqCst) & OPEN != 0 && vector.pending.swap(false, Ordering::SeqCst) {
            vector.interrupt.trigger();
        }
        true
    }

    /// The eventfd behind a vector.
    pub fn event(&self, vector: u16) -> Option<&EventFd> {
        self.vectors.get(usize::from(vector))?.interrupt.event()
    }
}

#[derive(Clone, Copy)]
struct Entry {
    message: MsiMessage,
    control: u32,
    /// Message that the vector is connected to.
    connected: Option<MsiMessage>,
}

const RESET_ENTRY: Entry = Entry {
    message: MsiMessage { address: 0, data: 0 },
    control: VECTOR_MASKED,
    connected: None,
};

/// The registers.
pub struct Msix {
    shared: Arc<MsixVectors>,
    table: Vec<Entry>,
    control: u16,
    bus_master: bool,
}

impl Msix {
    /// `count` vectors (1 to [`MAX_VECTORS`]), all masked, MSI-X disabled.
    pub fn new(controller: &dyn MsiController, count: usize) -> io::Result<Self> {
        let count = count.clamp(1, MAX_VECTORS);
        let vectors: Vec<_> = (0..count)
            .map(|_| {
                let interrupt = controller.allocate()?;
                Ok(Vector {
                    interrupt,
                    state: AtomicU32::new(0),
                    pending: AtomicBool::new(false),
                })
            })
            .collect::<io::Result<_>>()?;
        let shared = Arc::new(MsixVectors {
            vectors,
            enabled: AtomicBool::new(false),
        });
        Ok(Self {
            shared,
            table: vec![RESET_ENTRY; count],
            control: 0,
            bus_master: false,
        })
    }

    /// The vectors through which workers raise interrupts.
    pub fn vectors(&self) -> &Arc<MsixVectors> {
        &self.shared
    }

    /// Message control, with the table's size.
    pub fn message_control(&self) -> u16 {
        let last = self.table.len().saturating_sub(1);
        self.control | u16::try_from(last).unwrap_or(0)
    }

    /// Writes message control; only the enable and function mask bits are writable.
    pub fn write_message_control(&mut self, value: u16) {
        let new = value & (CONTROL_ENABLE | CONTROL_FUNCTION_MASK);
        if new & !self.control & CONTROL_ENABLE != 0 {
            // Interrupts raised before MSI-X was enabled are not meant for its vectors.
            for vector in &self.shared.vectors {
                vector.pending.store(false, Ordering::SeqCst);
            }
        }
        self.control = new;
        self.shared
            .enabled
            .store(new & CONTROL_ENABLE != 0, Ordering::SeqCst);
        for index in 0..self.table.len() {
            self.apply(index);
        }
    }

    /// Whether the function may write to memory, and with that send messages. It may not after power-on.
    pub fn set_bus_master(&mut self, on: bool) {
        self.bus_master = on;
        for index in 0..self.table.len() {
            self.apply(index);
        }
    }

    /// Reads the table: aligned accesses of 4 and 8 bytes, all others give ones.
    pub fn read_table(&self, offset: u64, data: &mut [u8]) {
        data.fill(0xff);
        if !is_natural(offset, data.len()) {
            return;
        }
        let Some((entry, field)) = self.locate(offset) else {
            return;
        };
        let Some(entry) = self.table.get(entry) else {
            return;
        };
        let words = [entry.low(), entry.high(), entry.message.data, entry.control];
        for (chunk, word) in data.chunks_exact_mut(4).zip(words.iter().skip(field)) {
            chunk.copy_from_slice(&word.to_le_bytes());
        }
    }

    /// Writes the table: aligned accesses of 4 and 8 bytes, all others do nothing.
    pub fn write_table(&mut self, offset: u64, data: &[u8]) {
        if !is_natural(offset, data.len()) {
            return;
        }
        let Some((index, field)) = self.locate(offset) else {
            return;
        };
        let Some(entry) = self.table.get_mut(index) else {
            return;
        };
        for (field, chunk) in (field..).zip(data.chunks_exact(4)) {
            let Ok(bytes) = chunk.try_into() else { return };
            let value = u32::from_le_bytes(bytes);
            match field {
                // The two lowest bits are reserved: a message address is aligned.
                0 => entry.set_low(value & !3),
                1 => entry.set_high(value),
                2 => entry.message.data = value,
                _ => entry.control = value & VECTOR_MASKED,
            }
        }
        self.apply(index);
    }

    /// Reads the pending bits: aligned accesses of 4 and 8 bytes, all others give ones.
    pub fn read_pba(&self, offset: u64, data: &mut [u8]) {
        if !is_natural(offset, data.len()) {
            data.fill(0xff);
            return;
        }
        let first = usize::try_from(offset).unwrap_or(usize::MAX).saturating_mul(8);
        let mut bits = self
            .shared
            .vectors
            .iter()
            .skip(first)
            .map(|vector| &vector.pending);
        for byte in data {
            *byte = (0..8).fold(0, |byte, bit| match bits.next() {
                Some(pending) if pending.load(Ordering::SeqCst) => byte | 1 << bit,
                _ => byte,
            });
        }
    }

    /// To the state after power-on.
    pub fn reset(&mut self) {
        self.bus_master = false;
        self.write_message_control(0);
        self.table.fill(RESET_ENTRY);
        for vector in &self.shared.vectors {
            vector.pending.store(false, Ordering::SeqCst);
        }
    }

    /// The table and the pending bits. Message control is in the configuration space.
    pub fn save(&self) -> message::Msix {
        let entries = self.table.iter().zip(&self.shared.vectors);
        let entry = |(entry, vector): (&Entry, &Vector)| message::MsixEntry {
            address: entry.message.address,
            data: entry.message.data,
            control: entry.control,
            pending: vector.pending.load(Ordering::SeqCst),
        };
        message::Msix {
            entries: entries.map(entry).collect(),
        }
    }

    /// Restores a saved state; `message_control` is the value in the restored configuration space.
    /// The function is no bus master yet, so no message is sent:
    /// [`set_bus_master`](Self::set_bus_master) sends the pending ones.
    pub fn restore(&mut self, saved: &message::Msix, message_control: u16) -> Result<(), StateError> {
        check(
            saved.entries.len() == self.table.len(),
            "msix.entries",
            "not as many as the function has",
        )?;
        for entry in &saved.entries {
            check(entry.address & 3 == 0, "msix.entries.address", "not aligned")?;
            check(
                entry.control & !VECTOR_MASKED == 0,
                "msix.entries.control",
                "unknown bits are set",
            )?;
        }
        self.reset();
        for (entry, saved) in self.table.iter_mut().zip(&saved.entries) {
            entry.message = MsiMessage {
                address: saved.address,
                data: saved.data,
            };
            entry.control = saved.control;
        }
        self.write_message_control(message_control);
        for (vector, saved) in self.shared.vectors.iter().zip(&saved.entries) {
            vector.pending.store(saved.pending, Ordering::SeqCst);
        }
        Ok(())
    }

    fn locate(&self, offset: u64) -> Option<(usize, usize)> {
        let entry = usize::try_from(offset.checked_div(ENTRY_SIZE)?).ok()?;
        let field = usize::try_from(offset.checked_rem(ENTRY_SIZE)?.checked_div(4)?).ok()?;
        (entry < self.table.len()).then_some((entry, field))
    }

    /// Brings a vector into the state that the registers ask for.
    fn apply(&mut self, index: usize) {
        let (Some(entry), Some(vector)) = (self.table.get_mut(index), self.shared.vectors.get(index)) else {
            return;
        };
        let open = self.bus_master
            && self.control & (CONTROL_ENABLE | CONTROL_FUNCTION_MASK) == CONTROL_ENABLE
            && entry.control & VECTOR_MASKED == 0;
        let wanted = open.then_some(entry.message);
        if wanted == entry.connected {
            return;
        }
        // Close first: from here on raises become pending, also while the message changes.
        let state = vector.state.load(Ordering::SeqCst).wrapping_add(CHANGE) & !OPEN;
        vector.state.store(state, Ordering::SeqCst);
        match vector.interrupt.connect(wanted) {
            Ok(()) => entry.connected = wanted,
            Err(error) => {
                // The vector stays closed, its interrupts pending; the next write tries again.
                entry.connected = None;
                tracing::error!(vector = index, %error, "an interrupt can't be connected");
                return;
            }
        }
        if open {
            vector.state.store(state | OPEN, Ordering::SeqCst);
            if vector.pending.swap(false, Ordering::SeqCst) {
                vector.interrupt.trigger();
            }
        }
    }
}

impl Entry {
    fn low(&self) -> u32 {
        u32::try_from(self.message.address & u64::from(u32::MAX)).unwrap_or(0)
    }

    fn high(&self) -> u32 {
        u32::try_from(self.message.address >> 32).unwrap_or(0)
    }

    fn set_low(&mut self, value: u32) {
        self.message.address = self.message.address & !u64::from(u32::MAX) | u64::from(value);
    }

    fn set_high(&mut self, value: u32) {
        self.message.address = self.message.address & u64::from(u32::MAX) | u64::from(value) << 32;
    }
}

fn is_natural(offset: u64, length: usize) -> bool {
    match length {
        4 => offset.is_multiple_of(4),
        8 => offset.is_multiple_of(8),
        _ => false,
    }
}

#[cfg(test)]
mod tests;
