//! A virtio device on PCI as the machine holds it.

use std::{
    io,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use vmm_base::GuestMemory;
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use super::{
    super::{
        device::{VirtioDevice, WorkerSpec},
        fault::{Counters, EventSink},
        queue::MAX_SIZE,
        signals::Signals,
        worker::{Shared, Workers},
    },
    core::Core,
    function::{MAX_CONFIG, MAX_QUEUES, VirtioFunction},
};
use crate::{
    component::{Component, ComponentError},
    interrupt::{MsiController, NotifyRegistry},
    log_limit::LogLimit,
    pci::{PciFunction, SharedFunction, msix::Msix, root::lock},
    state::{Section, StateError},
};

/// How long a reset of the machine waits for requests under way before the caller has to try again.
const RESET_TIMEOUT: Duration = Duration::from_millis(250);

/// Services of the machine for a device.
pub struct Parts<'a> {
    /// Name of the device in messages: "disk root".
    pub name: String,
    /// Guest memory.
    pub memory: GuestMemory,
    /// Gives interrupt vectors: one for each queue and one for configuration changes.
    pub msi: &'a dyn MsiController,
    /// Turns notifications into signals without an exit.
    pub notify: Arc<dyn NotifyRegistry>,
    /// Receives events of the device.
    pub sink: Arc<dyn EventSink>,
}

/// A virtio device with its worker threads and its PCI function.
///
/// Its threads end when it and all users of [`function`](Self::function) are dropped.
pub struct VirtioPciDevice {
    name: String,
    function: Arc<Mutex<VirtioFunction>>,
    shared: Arc<Shared>,
}

impl VirtioPciDevice {
    /// Builds it; its worker threads are there afterwards, parked.
    pub fn new(parts: Parts<'_>, mut device: Box<dyn VirtioDevice>) -> io::Result<Self> {
        let max_sizes = device.queue_sizes().to_vec();
        let msix = Msix::new(parts.msi, max_sizes.len().saturating_add(1))?;
        let signals = Arc::new(Signals::new(Arc::clone(msix.vectors()), max_sizes.len()));
        let specs = device.workers(&signals)?;
        check(&*device, &specs).map_err(|what| io::Error::new(io::ErrorKind::InvalidInput, what))?;
        let kick = |_: &u16| EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK).map(Arc::new);
        let shared = Arc::new(Shared {
            name: parts.name.clone(),
            memory: parts.memory,
            kicks: max_sizes.iter().map(kick).collect::<io::Result<_>>()?,
            signals,
            max_sizes,
            counters: Arc::new(Counters::default()),
            sink: parts.sink,
            log_limit: LogLimit::new(),
        });
        let workers = Workers::spawn(&shared, specs)?;
        let core = Core::new(device, Arc::clone(&shared), workers);
        let function = Arc::new(Mutex::new(VirtioFunction::new(core, msix, parts.notify)?));
        Ok(Self {
            name: parts.name,
            function,
            shared,
        })
    }

    /// Ends the device after its removal from the bus. Completes its requests, ends its threads,
    /// and closes its descriptors. The duration is unbounded, so a thread that others wait for must
    /// not call it. After an error ([`ComponentError::WorkerGone`]) requests may stay in progress
    /// indefinitely.
    pub fn end(self) -> Result<(), ComponentError> {
        let workers = {
            let mut function = lock(&self.function);
            function.reset();
            function.core.retire()
        };
        workers.end().map_err(|_| ComponentError::WorkerGone)
    }

    /// For [`PciRoot::add`](crate::pci::PciRoot::add).
    pub fn function(&self) -> SharedFunction {
        let function: Arc<Mutex<VirtioFunction>> = Arc::clone(&self.function);
        function
    }

    /// Counters of the device.
    pub fn counters(&self) -> &Arc<Counters> {
        &self.shared.counters
    }

    /// Signals for reporting a configuration change, after the front shows the change.
    pub fn signals(&self) -> &Arc<Signals> {
        &self.shared.signals
    }
}

/// Checks the transport's requirements on a device.
fn check(device: &dyn VirtioDevice, specs: &[WorkerSpec]) -> Result<(), &'static str> {
    let sizes = device.queue_sizes();
    if sizes.len() > MAX_QUEUES || device.config_len() > MAX_CONFIG {
        return Err("the device has too many queues or too much configuration");
    }
    if sizes
        .iter()
        .any(|size| !size.is_power_of_two() || *size > MAX_SIZE)
    {
        return Err("a queue's size is no power of two up to 1024");
    }
    let mut served: Vec<usize> = specs
        .iter()
        .flat_map(|spec| &spec.queues)
        .map(|queue| usize::from(*queue))
        .collect();
    served.sort_unstable();
    if !served.into_iter().eq(0..sizes.len()) {
        return Err("the workers don't serve each queue once");
    }
    Ok(())
}

impl Component for VirtioPciDevice {
    fn name(&self) -> &str {
        &self.name
    }

    fn pause(&mut self, deadline: Instant) -> Result<(), ComponentError> {
        lock(&self.function).core.pause(deadline)
    }

    fn resume(&mut self) -> Result<(), ComponentError> {
        lock(&self.function).resume();
        Ok(())
    }

    /// Also resets the PCI function; [`PciRoot::reset`](crate::pci::PciRoot::reset) has to follow.
    fn reset(&mut self) -> Result<(), ComponentError> {
        let now = Instant::now();
        let deadline = now.checked_add(RESET_TIMEOUT).unwrap_or(now);
        let mut function = lock(&self.function);
        function.core.reset(deadline)?;
        function.reset();
        Ok(())
    }

    fn save(&self) -> Result<Section, StateError> {
        Ok(Section::new(&self.name, &lock(&self.function).save()?))
    }

    /// Restores the device. [`PciRoot::remap`](crate::pci::PciRoot::remap) must follow before the
    /// machine continues: it maps the BAR at the address in the restored configuration.
    fn restore(&mut self, section: &Section) -> Result<(), StateError> {
        let saved = section.open()?;
        lock(&self.function).restore(&saved)
    }
}
