//! Signals from workers to the driver: used buffers, configuration changes, the need for a reset.
//!
//! The transport and the workers of a device share the signals. Raising an interrupt takes no lock:
//! all state is atomic, except the generation of the configuration space. A read of the generation
//! waits while the space changes.

use std::{
    io,
    sync::{
        Arc, Mutex, OnceLock, PoisonError,
        atomic::{AtomicBool, AtomicU8, AtomicU16, Ordering},
    },
};

use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use crate::pci::msix::MsixVectors;

/// No MSI-X vector is assigned (virtio 1.3, 4.1.5.1.2).
pub const NO_VECTOR: u16 = 0xffff;
/// ISR status: a queue has used buffers (4.1.4.5).
const ISR_QUEUE: u8 = 1;
/// ISR status: the configuration changed.
const ISR_CONFIG: u8 = 2;

/// See the module.
pub struct Signals {
    msix: Arc<MsixVectors>,
    config_vector: AtomicU16,
    queue_vectors: Vec<AtomicU16>,
    isr: AtomicU8,
    generation: Mutex<u8>,
    needs_reset: AtomicBool,
    driver_ok: AtomicBool,
    /// Signalled when a queue gets another vector, if anybody wants to know.
    vector_changes: OnceLock<EventFd>,
}

impl Signals {
    /// For a device with that many queues; no vectors are assigned.
    pub fn new(msix: Arc<MsixVectors>, queues: usize) -> Self {
        Self {
            msix,
            config_vector: AtomicU16::new(NO_VECTOR),
            queue_vectors: (0..queues).map(|_| AtomicU16::new(NO_VECTOR)).collect(),
            isr: AtomicU8::new(0),
            generation: Mutex::new(0),
            needs_reset: AtomicBool::new(false),
            driver_ok: AtomicBool::new(false),
            vector_changes: OnceLock::new(),
        }
    }

    /// Used buffers are in `queue`.
    pub fn queue_interrupt(&self, queue: u16) {
        let vector = self.queue_vector(queue).unwrap_or(NO_VECTOR);
        if !self.msix.raise(vector) {
            self.isr.fetch_or(ISR_QUEUE, Ordering::SeqCst);
        }
    }

    /// Reports a change of the configuration space or the status: increments the generation and
    /// notifies the driver, if one runs.
    pub fn config_changed(&self) {
        self.change_config(|| ());
    }

    /// Changes the configuration space with `change`, increments the generation, and notifies the
    /// driver, if one runs. A driver that has read a new value sees another generation afterwards
    /// and reads again (4.1.4.3.1).
    pub fn change_config<T>(&self, change: impl FnOnce() -> T) -> T {
        let mut generation = self.generation.lock().unwrap_or_else(PoisonError::into_inner);
        let result = change();
        *generation = generation.wrapping_add(1);
        drop(generation);
        if self.driver_ok.load(Ordering::SeqCst) {
            self.isr.fetch_or(ISR_CONFIG, Ordering::SeqCst);
            self.msix.raise(self.config_vector());
        }
        result
    }

    /// Reports that the device cannot continue without a reset (2.1.1).
    pub fn need_reset(&self) {
        self.needs_reset.store(true, Ordering::SeqCst);
        self.config_changed();
    }

    /// Whether DEVICE_NEEDS_RESET is set.
    pub fn needs_reset(&self) -> bool {
        self.needs_reset.load(Ordering::SeqCst)
    }

    /// Generation of the configuration space (4.1.4.3, `config_generation`). Waits while the space is being changed.
    pub fn generation(&self) -> u8 {
        *self.generation.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the ISR status and clears it, as a read of the register does.
    pub fn take_isr(&self) -> u8 {
        self.isr.swap(0, Ordering::SeqCst)
    }

    /// The ISR status as it is.
    pub(super) fn isr(&self) -> u8 {
        self.isr.load(Ordering::SeqCst)
    }

    /// Takes over a saved state without an interrupt.
    pub(super) fn restore(&self, isr: u8, generation: u8, needs_reset: bool, driver_ok: bool) {
        self.isr.store(isr, Ordering::SeqCst);
        *self.generation.lock().unwrap_or_else(PoisonError::into_inner) = generation;
        self.needs_reset.store(needs_reset, Ordering::SeqCst);
        self.set_driver_ok(driver_ok);
    }

    /// Vector for configuration changes.
    pub fn config_vector(&self) -> u16 {
        self.config_vector.load(Ordering::Acquire)
    }

    /// Sets the vector for configuration changes; one that does not exist gives [`NO_VECTOR`].
    pub fn set_config_vector(&self, vector: u16) {
        self.config_vector.store(self.checked(vector), Ordering::Release);
    }

    /// Vector of a queue, `None` if there is no such queue.
    pub fn queue_vector(&self, queue: u16) -> Option<u16> {
        Some(
            self.queue_vectors
                .get(usize::from(queue))?
                .load(Ordering::Acquire),
        )
    }

    /// Sets the vector of a queue; one that does not exist gives [`NO_VECTOR`].
    pub fn set_queue_vector(&self, queue: u16, vector: u16) {
        if let Some(slot) = self.queue_vectors.get(usize::from(queue)) {
            let vector = self.checked(vector);
            let before = slot.swap(vector, Ordering::AcqRel);
            if before != vector
                && let Some(event) = self.vector_changes.get()
            {
                // Fails when the counter is full: then it is readable.
                let _full = event.write(1);
            }
        }
    }

    /// Event that becomes readable when a queue gets another vector, until
    /// [`take_vector_change`](Self::take_vector_change). A caller that passed
    /// [`queue_event`](Self::queue_event) to a server must then pass the new one.
    pub fn vector_changes(&self) -> io::Result<&EventFd> {
        if let Some(event) = self.vector_changes.get() {
            return Ok(event);
        }
        let event = EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK)?;
        Ok(self.vector_changes.get_or_init(|| event))
    }

    /// Changes of vectors are known up to here.
    pub fn take_vector_change(&self) {
        if let Some(event) = self.vector_changes.get() {
            let _none = event.read();
        }
    }

    /// The eventfd behind a queue's vector.
    pub fn queue_event(&self, queue: u16) -> Option<&EventFd> {
        self.msix.event(self.queue_vector(queue)?)
    }

    /// Whether there is a driver to be told of changes.
    pub(super) fn set_driver_ok(&self, driver_ok: bool) {
        self.driver_ok.store(driver_ok, Ordering::SeqCst);
    }

    /// To the state after power-on, apart from the generation.
    pub(super) fn reset(&self) {
        self.set_driver_ok(false);
        self.needs_reset.store(false, Ordering::SeqCst);
        self.isr.store(0, Ordering::SeqCst);
        self.config_vector.store(NO_VECTOR, Ordering::Release);
        for vector in &self.queue_vectors {
            vector.store(NO_VECTOR, Ordering::Release);
        }
    }

    fn checked(&self, vector: u16) -> u16 {
        if usize::from(vector) < self.msix.len() {
            vector
        } else {
            NO_VECTOR
        }
    }
}

/// The part of a machine that the front, the workers and the control of a device share.
pub(crate) struct Connection {
    pub signals: Arc<Signals>,
    /// One event per worker. Wakes the worker after a change of shared state.
    pub wakes: Vec<Arc<EventFd>>,
}

impl Connection {
    /// A connection of a device with `workers` workers.
    pub(crate) fn new(signals: &Arc<Signals>, workers: usize) -> io::Result<Self> {
        let wake = |_| EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK).map(Arc::new);
        Ok(Self {
            signals: Arc::clone(signals),
            wakes: (0..workers).map(wake).collect::<io::Result<_>>()?,
        })
    }

    /// Wakes all workers.
    pub(crate) fn wake_all(&self) {
        for wake in &self.wakes {
            // Full only when it is readable anyway.
            let _full = wake.write(1);
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::{sync::mpsc, time::Duration};

    use super::*;
    use crate::{pci::msix::Msix, virtio::testing::MockMsi};

    #[test]
    fn nobody_reads_the_old_generation_once_the_configuration_has_begun_to_change() {
        let msix = Msix::new(&MockMsi::default(), 1).unwrap();
        let signals = Arc::new(Signals::new(Arc::clone(msix.vectors()), 1));
        let (begin, other) = (signals.generation(), Arc::clone(&signals));
        let (sender, receiver) = mpsc::channel();
        let reader = signals.change_config(|| {
            let reader = std::thread::spawn(move || sender.send(other.generation()).unwrap());
            assert!(
                receiver.recv_timeout(Duration::from_millis(50)).is_err(),
                "it did not wait"
            );
            reader
        });
        assert_eq!(receiver.recv().unwrap(), begin.wrapping_add(1));
        reader.join().unwrap();
    }
}
