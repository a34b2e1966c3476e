//! The controller as a PCI function and as a part of the machine. Its identity is that of ICH9's AHCI controller, by
//! which firmware finds the drives that it boots from.

use std::{
    io,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use vmm_base::{GuestMemory, thread::ThreadKind};

use super::{
    Drive, MAX_PORTS,
    ata::Disk,
    atapi::Cdrom,
    hba::{self, Hba, HbaPort},
    port::{Device, Port},
    worker::{PortHandler, Setup},
};
use crate::{
    bus::Effect,
    component::{Component, ComponentError},
    interrupt::MsiController,
    log_limit::LogLimit,
    pci::{BarKind, ConfigSpace, Header, PciFunction, SharedFunction, msi::Msi, root::lock},
    state::{Section, StateError},
    virtio::{
        blk::control::{Shared as DiskShared, SharedImage},
        device::{WorkerSpec, thread_name},
        fault::{Counters, EventSink},
        signals::Signals,
        worker::{Shared, StopError, Stopping, Workers},
    },
};

/// The BAR of the registers (AHCI 1.3.1, 2.1.11: ABAR).
const BAR: usize = 5;
/// How long a reset of the machine waits for commands in process before the caller has to try again.
const RESET_TIMEOUT: Duration = Duration::from_millis(250);
/// How long a driver that disables bus mastering waits for commands in process.
const HALT_TIMEOUT: Duration = Duration::from_millis(100);

/// Services of the machine for the controller.
pub struct Parts<'a> {
    /// Name of the controller in messages: "sata".
    pub name: String,
    /// Guest memory.
    pub memory: GuestMemory,
    /// Gives the interrupt vector.
    pub msi: &'a dyn MsiController,
    /// Receives events of the drives.
    pub sink: Arc<dyn EventSink>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// The driver has not enabled the function as a bus master since power-on: the workers are parked.
    Idle,
    Running,
    Paused,
}

/// The drive at a port, as the controller keeps it.
pub(super) struct Back {
    workers: Workers,
    pub(super) disk: Arc<DiskShared>,
    /// In bytes.
    pub(super) block: u64,
    /// Handles on the drive do not keep the image open.
    _image: Arc<SharedImage>,
}

/// See the module.
pub(super) struct Function {
    pub(super) name: String,
    pub(super) config: ConfigSpace,
    pub(super) msi: Msi,
    pub(super) hba: Arc<Hba>,
    pub(super) backs: Vec<Back>,
    pub(super) phase: Phase,
    /// Bus-master enable as the workers and the interrupt know it.
    pub(super) bus_master: bool,
    /// A reset of the machine is under way.
    resetting: Vec<Stopping>,
}

/// An AHCI controller with its drives and their worker threads.
///
/// The threads end when it and all users of [`function`](Self::function) are dropped.
pub struct Ahci {
    name: String,
    pub(super) function: Arc<Mutex<Function>>,
}

impl Ahci {
    /// A controller with `drives` at the ports of these numbers. Its threads are there afterwards, parked.
    /// `InvalidInput` for a number that is not below [`MAX_PORTS`], or that two drives have.
    pub fn new(parts: Parts<'_>, mut drives: Vec<(u8, Drive)>) -> io::Result<Self> {
        drives.sort_by_key(|(number, _)| *number);
        let twice = drives
            .windows(2)
            .any(|pair| matches!(pair, [(one, _), (other, _)] if one == other));
        if twice || drives.iter().any(|(number, _)| usize::from(*number) >= MAX_PORTS) {
            let message = format!("a SATA controller has {MAX_PORTS} ports, each for one drive");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, message));
        }
        let invalid = |error| io::Error::new(io::ErrorKind::InvalidInput, error);
        let mut config = ConfigSpace::new(&Header {
            vendor: 0x8086,
            device: 0x2922,
            revision: 2,
            class: 0x01_06_01,
            ..Header::default()
        });
        config
            .add_bar(BAR, BarKind::Memory32, hba::SIZE)
            .map_err(invalid)?;
        let msi = Msi::new(parts.msi, &mut config)?;
        let signals = Arc::new(Signals::new(Arc::clone(msi.vectors()), 0));
        let ports = drives.iter().map(|(number, drive)| {
            drive.shared.connect(&signals)?;
            let wake = drive.shared.wake_of(0).ok_or(io::ErrorKind::NotConnected)?;
            let device = if drive.options.cdrom {
                Device::Cdrom(Cdrom::default())
            } else {
                Device::Disk(Disk::default())
            };
            Ok(HbaPort::new(*number, Port::new(device), Arc::clone(wake)))
        });
        let ports = ports.collect::<io::Result<_>>()?;
        let hba = Arc::new(Hba::new(ports, Arc::clone(msi.vectors())));
        let mut backs = Vec::with_capacity(drives.len());
        for (index, (_, drive)) in drives.into_iter().enumerate() {
            backs.push(back(&parts, &hba, &signals, index, drive)?);
        }
        Ok(Self {
            name: parts.name.clone(),
            function: Arc::new(Mutex::new(Function {
                name: parts.name,
                config,
                msi,
                hba,
                backs,
                phase: Phase::Idle,
                bus_master: false,
                resetting: Vec::new(),
            })),
        })
    }

    /// For [`PciRoot::add_sata`](crate::pci::PciRoot::add_sata).
    pub fn function(&self) -> SharedFunction {
        let function: Arc<Mutex<Function>> = Arc::clone(&self.function);
        function
    }
}

/// The worker of a drive, parked.
fn back(
    parts: &Parts<'_>,
    hba: &Arc<Hba>,
    signals: &Arc<Signals>,
    index: usize,
    drive: Drive,
) -> io::Result<Back> {
    drive.tray.connect(hba, index);
    let name = &drive.options.name;
    let shared = Arc::new(Shared {
        name: format!("disk {name}"),
        memory: parts.memory.clone(),
        max_sizes: Vec::new(),
        kicks: Vec::new(),
        signals: Arc::clone(signals),
        counters: Arc::new(Counters::default()),
        sink: Arc::clone(&parts.sink),
        log_limit: LogLimit::new(),
    });
    let block = drive.limits.block.into();
    let handler = PortHandler::new(Setup {
        index,
        hba: Arc::clone(hba),
        shared: Arc::clone(&drive.shared),
        engine: drive.engine,
        limits: drive.limits,
        medium: drive.medium,
        on_error: drive.options.on_error,
    });
    let spec = WorkerSpec {
        name: thread_name("sata", name, 0),
        kind: ThreadKind::Worker,
        queues: Vec::new(),
        handler: Box::new(handler),
    };
    Ok(Back {
        workers: Workers::spawn(&shared, vec![spec])?,
        disk: drive.shared,
        block,
        _image: drive.image,
    })
}

impl Function {
    /// Makes the workers and the interrupt agree with bus-master enable in the configuration. The first time the workers
    /// start.
    fn apply_bus_master(&mut self) {
        let on = self.config.is_bus_master();
        if on == self.bus_master {
            return;
        }
        self.bus_master = on;
        if on {
            self.msi.set_bus_master(true);
        }
        let deadline = Instant::now().checked_add(HALT_TIMEOUT).filter(|_| !on);
        for back in &self.backs {
            back.workers.set_bus_master(on, deadline);
        }
        if !on {
            // Commands that end in time still have their interrupt.
            self.msi.set_bus_master(false);
        }
        if on && self.phase == Phase::Idle {
            self.start();
        }
    }

    fn start(&mut self) {
        for back in &self.backs {
            back.workers.start(&[], 0);
        }
        self.phase = Phase::Running;
    }

    fn pause(&mut self, deadline: Instant) -> Result<(), ComponentError> {
        if self.phase != Phase::Running {
            return Ok(());
        }
        for (index, back) in self.backs.iter().enumerate() {
            if let Err(error) = back.workers.pause(deadline, 0) {
                for paused in self.backs.iter().take(index) {
                    paused.workers.start(&[], 0);
                }
                return Err(match error {
                    StopError::Late => ComponentError::DrainTimeout,
                    StopError::Gone => ComponentError::WorkerGone,
                });
            }
        }
        self.phase = Phase::Paused;
        Ok(())
    }

    fn resume(&mut self) {
        self.apply_bus_master();
        if self.phase == Phase::Paused {
            self.start();
        }
    }

    fn reset_device(&mut self, deadline: Instant) -> Result<(), ComponentError> {
        // Commands in process have no effect from here on.
        self.hba.reset();
        if self.resetting.is_empty() {
            self.resetting = self.backs.iter().map(|back| back.workers.reset()).collect();
        }
        for stopping in &mut self.resetting {
            if !stopping.wait(deadline) {
                return Err(if stopping.gone() {
                    ComponentError::WorkerGone
                } else {
                    ComponentError::DrainTimeout
                });
            }
        }
        self.resetting.clear();
        self.phase = Phase::Idle;
        self.hba.power_on();
        self.reset();
        Ok(())
    }
}

impl PciFunction for Function {
    fn config(&self) -> &ConfigSpace {
        &self.config
    }

    fn config_mut(&mut self) -> &mut ConfigSpace {
        &mut self.config
    }

    fn read_config(&mut self, offset: usize, data: &mut [u8]) {
        self.config.read(offset, data);
    }

    fn write_config(&mut self, offset: usize, data: &[u8]) -> Effect {
        self.config.write(offset, data);
        self.apply_bus_master();
        self.msi.apply(&self.config);
        Effect::None
    }

    fn read_bar(&mut self, _bar: usize, offset: u64, data: &mut [u8]) {
        self.hba.read(offset, data);
    }

    fn write_bar(&mut self, _bar: usize, offset: u64, data: &[u8]) -> Effect {
        self.hba.write(offset, data);
        Effect::None
    }

    fn bar_moved(&mut self, _bar: usize, _address: Option<u64>) {}

    fn reset(&mut self) {
        self.config.reset();
        self.msi.reset();
        self.bus_master = false;
        for back in &self.backs {
            back.workers.set_bus_master(false, None);
        }
    }
}

impl Component for Ahci {
    fn name(&self) -> &str {
        &self.name
    }

    fn pause(&mut self, deadline: Instant) -> Result<(), ComponentError> {
        lock(&self.function).pause(deadline)
    }

    fn resume(&mut self) -> Result<(), ComponentError> {
        lock(&self.function).resume();
        Ok(())
    }

    /// Also resets the PCI function; [`PciRoot::reset`](crate::pci::PciRoot::reset) has to follow.
    fn reset(&mut self) -> Result<(), ComponentError> {
        let now = Instant::now();
        let deadline = now.checked_add(RESET_TIMEOUT).unwrap_or(now);
        lock(&self.function).reset_device(deadline)
    }

    fn save(&self) -> Result<Section, StateError> {
        Ok(Section::new(&self.name, &lock(&self.function).save()?))
    }

    /// Restores the controller. [`PciRoot::remap`](crate::pci::PciRoot::remap) must follow before the machine continues.
    fn restore(&mut self, section: &Section) -> Result<(), StateError> {
        lock(&self.function).restore(&section.open()?)
    }
}
