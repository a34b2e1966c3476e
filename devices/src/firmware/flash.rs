//! Flash memory with the Intel command set (JEDEC CFI command set 0x0001), 8 bits wide: the
//! firmware's variable store.
//!
//! ```text
//!            READ ARRAY (0xff), CLEAR STATUS (0x50)
//!   ┌───────────────────────────────────────────────┐
//!   ▼        0x10 0x40 0xe8 0x20 0x70 0x90 0x98     │
//! array ─────────────────────────────────────────▶ status, ID, CFI
//! ```
//!
//! In array mode the guest reads the memory without exits ([`FlashMemory::show`]); each write leaves
//! to this device. In the other modes reads leave to this device, too.
//!
//! A program or an erase changes the memory at once. The *pending range* holds the bytes that are
//! not in the file yet. It is written and synchronized before the guest can observe the end of the
//! operation: at the return to array mode, and when the guest reads the status. So the file has, at
//! each moment, all operations that the guest knows to be complete, and the operations that follow
//! one another without such an observation are in it in part at most. Firmware programs the bytes of
//! a variable in this way one by one, at the cost of one synchronization.

use std::{fs::File, io, ops::Range, os::unix::fs::FileExt, sync::Arc};

use crate::{
    bus::{BusDevice, Effect},
    log_limit::LogLimit,
    state::{StateError, check, message, message::FlashMode, narrow},
};

/// Size of a block that is erased as a whole, in bytes: that of OVMF (`PcdOvmfFirmwareBlockSize`).
pub const BLOCK: usize = 4096;
/// Bytes of the write buffer: 2 to the power of this.
const BUFFER_BITS: u8 = 11;
const BUFFER: usize = 1 << BUFFER_BITS;

/// Commands (Intel StrataFlash J3, table "Command Bus Operations").
mod command {
    pub(super) const PROGRAM_ALTERNATE: u8 = 0x10;
    pub(super) const ERASE: u8 = 0x20;
    pub(super) const PROGRAM: u8 = 0x40;
    pub(super) const CLEAR_STATUS: u8 = 0x50;
    pub(super) const READ_STATUS: u8 = 0x70;
    pub(super) const READ_ID: u8 = 0x90;
    pub(super) const CFI_QUERY: u8 = 0x98;
    pub(super) const CONFIRM: u8 = 0xd0;
    pub(super) const BUFFERED_PROGRAM: u8 = 0xe8;
}

/// Bits of the status register.
mod status {
    pub(super) const READY: u8 = 1 << 7;
    pub(super) const ERASE_ERROR: u8 = 1 << 5;
    pub(super) const PROGRAM_ERROR: u8 = 1 << 4;
}

/// The memory as the guest reads it.
pub trait FlashMemory: Send + Sync {
    /// Its size in bytes, a multiple of [`BLOCK`].
    fn size(&self) -> usize;
    /// Reads bytes within the size.
    fn read(&self, offset: usize, bytes: &mut [u8]);
    /// Changes bytes within the size.
    fn write(&self, offset: usize, bytes: &[u8]);
    /// Has the guest's reads reach the memory without exits, or leave to the device.
    fn show(&self, shown: bool);
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    Array,
    Status,
    Id,
    Cfi,
    /// The next write is the byte to program.
    Program,
    /// The next write confirms the erasure.
    Erase,
    /// The next write is the count of bytes less one.
    Count,
    /// Bytes of a buffered program that are still to come; then the confirmation.
    Fill(usize),
}

/// The device.
pub struct Flash {
    memory: Arc<dyn FlashMemory>,
    file: File,
    mode: Mode,
    status: u8,
    /// Bytes of the buffered program: offset and value.
    buffer: Vec<(usize, u8)>,
    /// Changed bytes of the memory that are not in the file.
    pending: Option<Range<usize>>,
    limit: LogLimit,
}

impl Flash {
    /// A device over `memory`, which has the content of `file`. Changes are written to the file.
    pub fn new(memory: Arc<dyn FlashMemory>, file: File) -> Self {
        memory.show(true);
        Self {
            memory,
            file,
            mode: Mode::Array,
            status: 0,
            buffer: Vec::new(),
            pending: None,
            limit: LogLimit::new(),
        }
    }

    /// To the state after power-on. The content stays.
    pub fn reset(&mut self) {
        self.flush();
        self.buffer.clear();
        self.status = 0;
        self.enter(Mode::Array);
    }

    /// Its state. The file has the content afterwards, unless the file refuses writes.
    pub fn save(&mut self) -> message::Flash {
        self.flush();
        let mut content = vec![0; self.memory.size()];
        self.memory.read(0, &mut content);
        let (mode, left) = match self.mode {
            Mode::Array => (FlashMode::Array, 0),
            Mode::Status => (FlashMode::Status, 0),
            Mode::Id => (FlashMode::Id, 0),
            Mode::Cfi => (FlashMode::Cfi, 0),
            Mode::Program => (FlashMode::Program, 0),
            Mode::Erase => (FlashMode::Erase, 0),
            Mode::Count => (FlashMode::Count, 0),
            Mode::Fill(left) => (FlashMode::Fill, left),
        };
        let byte = |(offset, value): &(usize, u8)| message::FlashByte {
            offset: u32::try_from(*offset).unwrap_or(u32::MAX),
            value: (*value).into(),
        };
        message::Flash {
            content,
            mode: mode.into(),
            status: self.status.into(),
            left: u32::try_from(left).unwrap_or(u32::MAX),
            buffer: self.buffer.iter().map(byte).collect(),
        }
    }

    /// Takes over a saved state, which is untrusted. The content is in the file afterwards.
    pub fn restore(&mut self, saved: &message::Flash) -> Result<(), StateError> {
        let size = self.memory.size();
        if saved.content.len() != size {
            let why = format!(
                "{} bytes of variables, this machine's firmware has {size}: use the same firmware on both sides",
                saved.content.len()
            );
            return Err(StateError::invalid("flash.content", why));
        }
        let mode = mode(saved)?;
        let filled = saved.buffer.len().saturating_add(saved.left as usize);
        check(filled <= BUFFER, "flash.buffer", "too many bytes")?;
        let is_filling = matches!(mode, Mode::Fill(_));
        check(
            is_filling || filled == 0,
            "flash.buffer",
            "no program is under way",
        )?;
        let byte = |byte: &message::FlashByte| {
            let offset: usize = narrow("flash.buffer", byte.offset)?;
            check(offset < size, "flash.buffer", "beyond the end")?;
            Ok((offset, narrow("flash.buffer", byte.value)?))
        };
        let buffer = saved.buffer.iter().map(byte).collect::<Result<_, StateError>>()?;
        let status = narrow("flash.status", saved.status)?;
        self.memory.write(0, &saved.content);
        self.store(0, &saved.content)
            .map_err(|error| StateError::Host("write the firmware's variables to their file", error))?;
        self.pending = None;
        self.enter(mode);
        (self.buffer, self.status) = (buffer, status);
        Ok(())
    }

    fn enter(&mut self, mode: Mode) {
        let (was, is) = (self.mode == Mode::Array, mode == Mode::Array);
        if is {
            self.flush();
        }
        self.mode = mode;
        if was != is {
            self.memory.show(is);
        }
    }

    /// Programs bytes: bits can be cleared only.
    fn program(&mut self, offset: usize, new: &[u8]) {
        let mut bytes = vec![0; new.len()];
        self.memory.read(offset, &mut bytes);
        for (byte, new) in bytes.iter_mut().zip(new) {
            *byte &= new;
        }
        self.change(offset, &bytes);
    }

    fn change(&mut self, offset: usize, bytes: &[u8]) {
        self.memory.write(offset, bytes);
        let end = offset.saturating_add(bytes.len());
        if self
            .pending
            .as_ref()
            .is_some_and(|old| offset > old.end || old.start > end)
        {
            // Distant ranges reach the file one by one, in their order.
            self.flush();
        }
        // A range is left here only when it adjoins, or when the file refused it.
        self.pending = Some(match self.pending.take() {
            Some(old) => old.start.min(offset)..old.end.max(end),
            None => offset..end,
        });
    }

    /// Makes the pending range durable.
    fn flush(&mut self) {
        let Some(range) = self.pending.take() else {
            return;
        };
        let mut bytes = vec![0; range.len()];
        self.memory.read(range.start, &mut bytes);
        if let Err(error) = self.store(range.start, &bytes) {
            // The next operation tries these bytes again.
            self.pending = Some(range);
            self.status |= status::PROGRAM_ERROR | status::ERASE_ERROR;
            if self.limit.allow().is_some() {
                tracing::error!(%error, "write the firmware's variables to their file");
            }
        }
    }

    fn store(&self, offset: usize, bytes: &[u8]) -> io::Result<()> {
        self.file.write_all_at(bytes, offset as u64)?;
        self.file.sync_data()
    }

    fn command(&mut self, value: u8) {
        match value {
            command::PROGRAM | command::PROGRAM_ALTERNATE => self.enter(Mode::Program),
            command::ERASE => self.enter(Mode::Erase),
            command::BUFFERED_PROGRAM => {
                self.buffer.clear();
                self.status |= status::READY;
                self.enter(Mode::Count);
            }
            command::READ_STATUS => self.enter(Mode::Status),
            command::READ_ID => self.enter(Mode::Id),
            command::CFI_QUERY => self.enter(Mode::Cfi),
            // OVMF expects a status of zero after it has cleared the status, and the array to be readable.
            command::CLEAR_STATUS => {
                self.enter(Mode::Array);
                self.status = 0;
            }
            // READ ARRAY, and all commands that do not exist.
            _ => self.enter(Mode::Array),
        }
    }

    fn write_byte(&mut self, offset: usize, value: u8) {
        match self.mode {
            Mode::Array | Mode::Status | Mode::Id | Mode::Cfi => self.command(value),
            Mode::Program => {
                self.program(offset, &[value]);
                self.status |= status::READY;
                self.enter(Mode::Status);
            }
            Mode::Erase if value == command::CONFIRM => {
                let start = offset.saturating_sub(offset % BLOCK);
                self.change(start, &[0xff; BLOCK]);
                self.status |= status::READY;
                self.enter(Mode::Status);
                self.flush();
            }
            Mode::Erase => {
                // A command sequence error sets both bits.
                self.status |= status::READY | status::ERASE_ERROR | status::PROGRAM_ERROR;
                self.enter(Mode::Status);
            }
            Mode::Count => {
                let bytes = usize::from(value).saturating_add(1).min(BUFFER);
                self.enter(Mode::Fill(bytes));
            }
            Mode::Fill(0) => {
                let buffer = std::mem::take(&mut self.buffer);
                if value == command::CONFIRM {
                    for (offset, byte) in buffer {
                        self.program(offset, &[byte]);
                    }
                } else {
                    self.status |= status::PROGRAM_ERROR | status::ERASE_ERROR;
                }
                self.status |= status::READY;
                self.enter(Mode::Status);
            }
            Mode::Fill(left) => {
                self.buffer.push((offset, value));
                self.mode = Mode::Fill(left.saturating_sub(1));
            }
        }
    }

    fn read_byte(&mut self, offset: usize) -> u8 {
        match self.mode {
            Mode::Array => {
                let mut byte = [0xff];
                self.memory.read(offset, &mut byte);
                let [byte] = byte;
                byte
            }
            Mode::Id => match offset & 0xff {
                // Intel; the device's code; not locked.
                0 => 0x89,
                1 => 0x18,
                _ => 0,
            },
            Mode::Cfi => self.cfi(offset),
            Mode::Status | Mode::Program | Mode::Erase | Mode::Count | Mode::Fill(_) => {
                self.flush();
                self.status
            }
        }
    }

    /// The CFI query structure (JEDEC JESD68.01): identification, system interface, geometry.
    fn cfi(&self, offset: usize) -> u8 {
        let size = self.memory.size();
        let size_bits = u8::try_from(size.checked_next_power_of_two().unwrap_or(0).trailing_zeros());
        let [blocks_low, blocks_high, ..] = (size / BLOCK).saturating_sub(1).to_le_bytes();
        match offset {
            0x10 => b'Q',
            0x11 => b'R',
            0x12 => b'Y',
            // Command set 1, its table at 0x31.
            0x13 => 1,
            0x15 => 0x31,
            // Supply of 4.5 to 5.5 V; typical and longest times.
            0x1b => 0x45,
            0x1c => 0x55,
            0x1f | 0x20 => 7,
            0x21 => 10,
            0x23..=0x25 => 4,
            0x27 => size_bits.unwrap_or(0),
            // 8 bits wide.
            0x2a => BUFFER_BITS,
            // One region of blocks of 256 × 16 bytes.
            0x2c => 1,
            0x2d => blocks_low,
            0x2e => blocks_high,
            0x2f => 16,
            0x31 => b'P',
            0x32 => b'R',
            0x33 => b'I',
            0x34 => b'1',
            0x35 => b'0',
            _ => 0,
        }
    }
}

/// The mode of a saved state.
fn mode(saved: &message::Flash) -> Result<Mode, StateError> {
    let mode = match saved.mode() {
        FlashMode::Unspecified => return Err(StateError::invalid("flash.mode", "unknown")),
        FlashMode::Array => Mode::Array,
        FlashMode::Status => Mode::Status,
        FlashMode::Id => Mode::Id,
        FlashMode::Cfi => Mode::Cfi,
        FlashMode::Program => Mode::Program,
        FlashMode::Erase => Mode::Erase,
        FlashMode::Count => Mode::Count,
        FlashMode::Fill => Mode::Fill(narrow("flash.left", saved.left)?),
    };
    Ok(mode)
}

impl BusDevice for Flash {
    fn read(&mut self, offset: u64, data: &mut [u8]) {
        let start = usize::try_from(offset).unwrap_or(usize::MAX);
        for (offset, byte) in (start..).zip(data) {
            *byte = self.read_byte(offset);
        }
    }

    fn write(&mut self, offset: u64, data: &[u8]) -> Effect {
        let start = usize::try_from(offset).unwrap_or(usize::MAX);
        // A bus of 8 bits sees a wide write as several.
        for (offset, byte) in (start..).zip(data) {
            self.write_byte(offset, *byte);
        }
        Effect::None
    }
}

#[cfg(test)]
#[allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::arithmetic_side_effects
)]
mod tests {
    use std::sync::{
        Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    };

    use super::*;
    use crate::state::{Change, refuses};

    const SIZE: usize = 4 * BLOCK;

    struct Memory {
        bytes: Mutex<Vec<u8>>,
        shown: AtomicBool,
        changes: AtomicUsize,
    }

    impl FlashMemory for Memory {
        fn size(&self) -> usize {
            SIZE
        }
        fn read(&self, offset: usize, bytes: &mut [u8]) {
            let memory = self.bytes.lock().unwrap();
            bytes.copy_from_slice(&memory[offset..offset + bytes.len()]);
        }
        fn write(&self, offset: usize, bytes: &[u8]) {
            self.bytes.lock().unwrap()[offset..offset + bytes.len()].copy_from_slice(bytes);
        }
        fn show(&self, shown: bool) {
            self.shown.store(shown, Ordering::Relaxed);
            self.changes.fetch_add(1, Ordering::Relaxed);
        }
    }

    struct Rig {
        flash: Flash,
        memory: Arc<Memory>,
        file: File,
    }

    impl Rig {
        fn new() -> Self {
            let file = tempfile::tempfile().unwrap();
            file.write_all_at(&[0xff; SIZE], 0).unwrap();
            Self::over(file)
        }

        fn over(file: File) -> Self {
            let memory = Arc::new(Memory {
                bytes: Mutex::new(vec![0xff; SIZE]),
                shown: AtomicBool::new(false),
                changes: AtomicUsize::new(0),
            });
            let flash = Flash::new(memory.clone(), file.try_clone().unwrap());
            Self { flash, memory, file }
        }

        fn write(&mut self, offset: usize, bytes: &[u8]) {
            for byte in bytes {
                assert_eq!(self.flash.write(offset as u64, &[*byte]), Effect::None);
            }
        }

        fn read(&mut self, offset: usize) -> u8 {
            let mut byte = [0];
            self.flash.read(offset as u64, &mut byte);
            byte[0]
        }

        fn stored(&self, offset: usize, length: usize) -> Vec<u8> {
            let mut bytes = vec![0; length];
            self.file.read_exact_at(&mut bytes, offset as u64).unwrap();
            bytes
        }

        fn is_shown(&self) -> bool {
            self.memory.shown.load(Ordering::Relaxed)
        }
    }

    #[test]
    fn programmed_bytes_are_stored_at_the_return_to_the_array() {
        let mut rig = Rig::new();
        for (offset, byte) in (100..).zip(*b"name") {
            rig.write(offset, &[0x10, byte]);
        }
        assert!(!rig.is_shown());
        assert_eq!(rig.stored(100, 4), [0xff; 4]);
        rig.write(103, &[0xff]);
        assert!(rig.is_shown());
        assert_eq!(rig.stored(99, 6), b"\xffname\xff");
        assert_eq!(rig.read(101), b'a');
        // Shown at first, hidden for all four bytes, shown again.
        assert_eq!(rig.memory.changes.load(Ordering::Relaxed), 3);
    }

    #[test]
    fn programmed_bytes_are_stored_before_the_status_is_read() {
        let mut rig = Rig::new();
        rig.write(5, &[0x40, 1]);
        assert_eq!(rig.read(0), status::READY);
        assert_eq!(rig.stored(5, 1), [1]);
    }

    #[test]
    fn distant_programs_are_stored_in_their_order() {
        let mut rig = Rig::new();
        rig.write(5, &[0x40, 1]);
        rig.write(BLOCK, &[0x40, 2]);
        assert_eq!((rig.stored(5, 1), rig.stored(BLOCK, 1)), (vec![1], vec![0xff]));
        rig.flash.reset();
        assert_eq!(rig.stored(BLOCK, 1), [2]);
    }

    #[test]
    fn a_program_clears_bits_and_an_erase_sets_a_block() {
        let mut rig = Rig::new();
        rig.write(BLOCK + 1, &[0x40, 0xf0]);
        rig.write(BLOCK + 1, &[0x40, 0x3c, 0xff]);
        assert_eq!(rig.read(BLOCK + 1), 0x30);
        rig.write(0, &[0x40, 7, 0xff]);
        rig.write(BLOCK + 9, &[0x20, 0xd0]);
        assert_eq!(rig.stored(BLOCK, BLOCK), [0xff; BLOCK]);
        assert_eq!(rig.read(0), status::READY);
        rig.write(0, &[0xff]);
        assert_eq!((rig.read(0), rig.read(BLOCK + 1)), (7, 0xff));
    }

    #[test]
    fn an_unconfirmed_erase_changes_nothing_and_is_an_error() {
        let mut rig = Rig::new();
        rig.write(0, &[0x40, 7]);
        rig.write(0, &[0x20, 0x20]);
        let error = status::READY | status::ERASE_ERROR | status::PROGRAM_ERROR;
        assert_eq!(rig.read(0), error);
        rig.write(0, &[0x50]);
        assert_eq!(rig.read(0), 7);
        rig.write(0, &[0x70]);
        assert_eq!(rig.read(0), 0);
    }

    #[test]
    fn a_buffered_program_takes_effect_when_it_is_confirmed() {
        let mut rig = Rig::new();
        rig.write(64, &[0xe8]);
        assert_eq!(rig.read(64), status::READY);
        rig.write(64, &[2]);
        for (offset, byte) in (64..).zip([1, 2, 3]) {
            rig.write(offset, &[byte]);
        }
        assert_eq!(rig.stored(64, 3), [0xff; 3]);
        rig.write(64, &[0xd0]);
        assert_eq!(rig.read(64), status::READY);
        assert_eq!(rig.stored(64, 4), [1, 2, 3, 0xff]);
        rig.write(64, &[0xe8, 0, 9, 0]);
        assert_ne!(rig.read(64) & status::PROGRAM_ERROR, 0);
        rig.write(0, &[0xff]);
        assert_eq!(rig.read(64), 1);
    }

    #[test]
    fn the_query_describes_the_size_and_the_blocks() {
        let mut rig = Rig::new();
        rig.write(0x55, &[0x98]);
        let bytes: Vec<u8> = (0x10..0x31).map(|offset| rig.read(offset)).collect();
        assert_eq!(bytes[..5], [b'Q', b'R', b'Y', 1, 0]);
        assert_eq!(bytes[0x17], 14);
        assert_eq!(bytes[0x1c..0x21], [1, 3, 0, 16, 0]);
        rig.write(0, &[0x90]);
        assert_eq!((rig.read(0), rig.read(1), rig.read(2)), (0x89, 0x18, 0));
    }

    #[test]
    fn a_restored_flash_goes_on_with_content_file_and_mode() {
        let mut rig = Rig::new();
        rig.write(7, &[0x40, 1]);
        rig.write(64, &[0xe8, 1, 5]);
        let saved = rig.flash.save();
        assert_eq!(rig.stored(7, 1), [1]);
        let mut other = Rig::new();
        other.flash.restore(&saved).unwrap();
        assert!(!other.is_shown());
        assert_eq!(other.stored(7, 1), [1]);
        assert_eq!(other.flash.save(), saved);
        other.write(65, &[6, 0xd0]);
        assert_eq!(other.stored(64, 1), [0xff]);
        other.write(0, &[0xff]);
        assert!(other.is_shown());
        assert_eq!(other.stored(64, 2), [5, 6]);
        assert_eq!((other.read(7), other.read(65)), (1, 6));
    }

    #[test]
    fn a_state_that_no_flash_has_is_refused_and_changes_no_file() {
        let mut rig = Rig::new();
        rig.write(64, &[0xe8, 1, 5]);
        let good = rig.flash.save();
        let changes: [Change<message::Flash>; 7] = [
            ("flash.content", |saved| saved.content.push(0)),
            ("flash.mode", |saved| saved.mode = 0),
            ("flash.mode", |saved| saved.mode = 99),
            ("flash.status", |saved| saved.status = 256),
            ("flash.buffer", |saved| saved.left = u32::MAX),
            ("flash.buffer", |saved| saved.buffer[0].offset = u32::MAX),
            ("flash.buffer", |saved| saved.mode = FlashMode::Array.into()),
        ];
        let mut other = Rig::new();
        refuses(&good, &changes, |saved| {
            let mut saved = saved.clone();
            if let Some(byte) = saved.content.first_mut() {
                *byte = 0;
            }
            other.flash.restore(&saved)
        });
        assert_eq!(other.stored(0, 1), [0xff]);
    }

    #[test]
    fn a_file_that_refuses_writes_is_an_error_and_tried_again() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(SIZE as u64).unwrap();
        let mut rig = Rig::over(File::open(file.path()).unwrap());
        rig.write(0, &[0x40, 1]);
        assert_ne!(rig.read(0) & status::PROGRAM_ERROR, 0);
        rig.write(BLOCK, &[0x40, 1]);
        assert_eq!(rig.flash.pending, Some(0..BLOCK + 1));
    }

    #[test]
    fn wide_accesses_are_those_of_their_bytes() {
        let mut rig = Rig::new();
        let _none = rig.flash.write(8, &[0x40, 0xaa, 0xff, 0xff]);
        let mut bytes = [0; 8];
        rig.flash.read(8, &mut bytes);
        // The byte at 9 was programmed: the command came at 8, the value at 9.
        assert_eq!(bytes, [0xff, 0xaa, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff]);
    }
}
