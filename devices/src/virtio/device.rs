//! The two halves of a virtio device: the front behind the transport, and the back that a worker thread owns.

use std::{io, sync::Arc, time::Instant};

use vmm_base::{GuestMemory, thread::ThreadKind};

use super::{fault::Fault, session::Session, signals::Signals};
use crate::{
    pci::BarMemory,
    state::{Section, StateError},
};

/// Type of a device (virtio 1.3, 5: device IDs).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
#[allow(missing_docs, reason = "the specification's names")]
pub enum DeviceKind {
    Net = 1,
    Block = 2,
    Console = 3,
    Entropy = 4,
    Balloon = 5,
    Gpu = 16,
    Input = 18,
    Socket = 19,
    FileSystem = 26,
}

/// The front of a device: what its driver sees before and beside the queues. Owned by the transport, used on vCPU
/// threads, so no method may block.
pub trait VirtioDevice: Send {
    /// What it is.
    fn kind(&self) -> DeviceKind;
    /// Device-specific feature bits on offer (bits 0 to 23 and 50 to 127, of which the low 64 are
    /// used). The transport adds its own features and those of the rings: INDIRECT_DESC, EVENT_IDX
    /// and VERSION_1.
    fn features(&self) -> u64;
    /// Largest size of each queue: powers of two, at most 1024. The list's length is the number of queues.
    fn queue_sizes(&self) -> &[u16];
    /// Length of the configuration space in bytes, at most 4096.
    fn config_len(&self) -> usize;
    /// Reads configuration; `offset` and `data` lie within [`config_len`](Self::config_len), alignment and width
    /// are the guest's choice. See [`read_bytes`].
    fn read_config(&self, offset: usize, data: &mut [u8]);
    /// Writes configuration; `offset` and `data` lie within [`config_len`](Self::config_len). Writes to fields that
    /// are not writable, or of another width than the field's, do nothing.
    fn write_config(&mut self, offset: usize, data: &[u8]);
    /// Memory that the guest reaches behind a BAR of its own; most devices have none.
    fn bar_memory(&self) -> Option<Arc<dyn BarMemory>> {
        None
    }
    /// Discards the driver's configuration writes after a reset of the device. The workers are
    /// quiet.
    fn reset(&mut self);
    /// Returns the backs, one for each worker thread. Called once, when the VM is built. Later
    /// changes of the configuration space that the driver did not make must be reported through
    /// `signals`.
    fn workers(&mut self, signals: &Arc<Signals>) -> io::Result<Vec<WorkerSpec>>;
    /// State of the front. The transport saves its registers and the configuration space itself.
    fn save(&self) -> Result<Section, StateError>;
    /// Takes over the state of a front; the section is untrusted. The device has never run. Afterwards the transport
    /// compares the configuration space with the saved one.
    fn restore(&mut self, section: &Section) -> Result<(), StateError>;
}

/// Specification of a worker thread.
pub struct WorkerSpec {
    /// Name of the thread, at most 15 bytes: "blk0-q1".
    pub name: String,
    /// Permissions of the thread: [`ThreadKind::Worker`], or [`ThreadKind::Delegate`] if it passes
    /// queues to another process.
    pub kind: ThreadKind,
    /// The queues it serves; each of the device's queues is in exactly one worker's list.
    pub queues: Vec<u16>,
    /// The back.
    pub handler: Box<dyn QueueHandler>,
}

/// Back of a device, owned by its worker thread. The framework calls one method at a time. Outside
/// of `start` … `drain` it calls only `reset`, `save` and `restore`.
///
/// After each call, the framework signals new entries of used rings to the driver, subject to the
/// driver's notification suppression. Handlers do not raise interrupts.
pub trait QueueHandler: Send {
    /// Starts the back when the driver is ready, or when the machine continues after a pause.
    /// Registers events with [`Session::watch`] and reads [`Session::features`]. Afterwards the
    /// framework kicks each queue once without a notification. An error makes the device ask for a
    /// reset.
    fn start(&mut self, session: &mut Session) -> Result<(), Fault>;
    /// Takes buffers from `queue`, which has or may have new ones. Calls [`Session::pop`] until it
    /// returns none, or until the handler must wait for something. A flood cannot occupy the
    /// thread: `pop` returns none at the end of a batch, and the framework handles other queues and
    /// commands before the next call. After an error that the device survives, the framework calls
    /// `kick` again. Therefore the handler must have taken the request that caused the error.
    ///
    /// A handler of a single queue may sleep, here and in `event`, while [`Session::events`] is not
    /// readable. The framework does not repeat events that were ready at the time of the call.
    /// Therefore the handler checks all its watched descriptors before it sleeps.
    fn kick(&mut self, session: &mut Session, queue: u16) -> Result<Progress, Fault>;
    /// A watched file descriptor is ready. It is level-triggered, so the work done here is to be bounded. One that was
    /// just unwatched may still come once.
    fn event(&mut self, session: &mut Session, token: u32) -> Result<(), Fault>;
    /// Completes or cancels requests in progress and waits for them; meanwhile the framework
    /// delivers no events. Takes no new requests. Returns [`Drained::Quiet`] when no part of this
    /// device accesses guest memory or the backend. Returns [`Drained::Late`] if `deadline` passed
    /// first; the framework then continues to use the handler.
    fn drain(&mut self, session: &mut Session, deadline: Instant) -> Result<Drained, Fault>;
    /// Discards the driver's state after a reset of the device. Called after `drain`, but not for a
    /// pause.
    fn reset(&mut self);
    /// State of the drained back. The framework saves the progress of the queues.
    fn save(&self) -> Result<Section, StateError>;
    /// Takes over the state of a back; the section is untrusted. The back was never started.
    fn restore(&mut self, section: &Section, memory: &GuestMemory) -> Result<(), StateError>;
}

/// Result of [`QueueHandler::kick`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// All available buffers were taken. The framework asks the driver for a notification of the next one (and looks
    /// again, so that none is lost).
    Done,
    /// Buffers may be left: the handler waits for something else and then calls [`Session::kick_again`], or asks for
    /// notifications itself with [`Session::ask_for_kick`].
    Waiting,
}

/// What [`QueueHandler::drain`] achieved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Drained {
    /// No request is in progress.
    Quiet,
    /// The deadline passed, something is still under way.
    Late,
}

/// "blk-root-q1": the name of the thread that serves a device's queue, or pair of queues, `index`. The device's `name` is cut
/// so that the kernel keeps the rest (15 bytes).
pub(crate) fn thread_name(kind: &str, name: &str, index: u16) -> String {
    let tail = format!("-q{index}");
    let room = 14_usize.saturating_sub(kind.len()).saturating_sub(tail.len());
    let head: String = name
        .char_indices()
        .take_while(|(at, letter)| at.saturating_add(letter.len_utf8()) <= room)
        .map(|(_, letter)| letter)
        .collect();
    format!("{kind}-{head}{tail}")
}

/// Copies from `source` at `offset`. Bytes beyond its end read as zero.
pub fn read_bytes(source: &[u8], offset: usize, data: &mut [u8]) {
    let available = source.get(offset..).unwrap_or_default();
    for (at, byte) in data.iter_mut().enumerate() {
        *byte = available.get(at).copied().unwrap_or(0);
    }
}
