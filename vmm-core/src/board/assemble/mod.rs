//! Builds platform v1 from a spec and open descriptors. Each kind of device has its builder in a file beside this one
//! and one line in [`Assembly::build`].

pub(super) mod balloon;
mod channels;
mod console;
pub(super) mod disk;
pub(super) mod display;
mod firmware;
mod legacy;
pub(super) mod nic;
mod rng;
mod sata;
mod serial;
pub(super) mod share;
mod tpm;
mod vsock;
mod watchdog;

use std::{
    fs::File,
    io,
    os::fd::OwnedFd,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use devices::{
    bus::Bus,
    component::Component,
    interrupt::{IrqLine, MsiController, NotifyRegistry},
    log_limit::LogLimit,
    pci::{
        Chipset, HotPlug, PciRoot, PciWindows, hotplug,
        root::{ECAM_SIZE, FIRST_PORT, PORTS},
    },
    serial::Terminal,
    virtio::{
        balloon::BalloonControl,
        device::VirtioDevice,
        fault::{DeviceEvent, EventSink},
        transport::{Parts, VirtioPciDevice},
    },
};
use vmm_base::GuestMemory;
use vmm_protocol::{
    machine::{Boot, DiskPlace, FdIndex},
    state::{self, MachineHeader},
    vmm::{self, ErrorKind, MachineSpec},
};
use vmmd_spec::{pci::PciSlot, resources::MemoryOptions};

use self::disk::Locks;
use super::{
    cpuid::{self, Cpuid},
    disks::Disks,
    image::{Image, Loading, map, pci_windows},
    machine::Machine,
    nics::Nics,
    saved,
    shares::Shares,
};
use crate::{
    kvm::{AddressSpaces, Crash, Host, IrqChipState, KvmError, Vm},
    lifecycle::{self, Builder, Failure, Notice, Notifier},
    memory::{Backing, GuestRam, layout::Map},
    migration::{self, ReceivedBoot},
    snapshot::Snapshot,
    vcpu::{ExitHandlers, Identity, Report, ReportKind, Vcpus},
};

/// Where the serial console is served.
#[derive(Debug)]
pub enum Console {
    /// To clients of this listening UNIX stream socket.
    Socket(OwnedFd),
    /// On this terminal.
    Terminal(Terminal),
}

/// Builds one machine.
#[derive(Debug)]
pub struct Assembler {
    console: Option<Console>,
    /// CPUID that the host supports, instead of its own.
    #[cfg(test)]
    pub(super) supported: Option<kvm_bindings::CpuId>,
}

impl Assembler {
    /// Serves the machine's console at `console`.
    pub fn new(console: Console) -> Self {
        Self {
            console: Some(console),
            #[cfg(test)]
            supported: None,
        }
    }

    /// The host's KVM.
    fn host(&self, spec: &vmm_protocol::machine::Machine, fds: &mut Fds) -> Result<Host, Failure> {
        let host = Host::from_fd(fds.take(spec.kvm)?)?;
        #[cfg(test)]
        if let Some(supported) = &self.supported {
            return Ok(host.supporting(supported.clone()));
        }
        Ok(host)
    }

    /// The ground of a machine that continues from a state with this header. Refused when this host can't continue it.
    fn ground_of_saved(
        &self,
        spec: &vmm_protocol::machine::Machine,
        fds: &mut Fds,
        header: &MachineHeader,
    ) -> Result<Ground, Failure> {
        let host = self.host(spec, fds)?;
        let cpuid = Cpuid::restored(&host, spec.topology, header);
        let cpuid = cpuid.map_err(saved::failed(saved::CHECKING.0, saved::CHECKING.1))?;
        Ok(Ground::new(spec, host, cpuid))
    }

    /// Builds a machine as `spec` says, which is switched on and does not run yet.
    pub(super) fn assemble(
        &mut self,
        spec: &MachineSpec,
        fds: Vec<OwnedFd>,
        notifier: Notifier,
    ) -> Result<Machine, Failure> {
        let spec = vmm_protocol::machine::Machine::new(spec, fds.len())?;
        let mut fds = Fds::new(fds);
        let ram = GuestRam::with_map(map(&spec), spec.memory_bytes, backing(&spec), &spec.memory)?;
        let host = self.host(&spec, &mut fds)?;
        let cpuid = Cpuid::new(&host, spec.topology, &spec.processor)?;
        let ground = Ground::new(&spec, host, cpuid);
        let image = image(&spec, &mut fds, &ground.windows)?;
        let mut assembly = Assembly::new(&spec, ground, fds, ram.clone(), notifier)?;
        firmware::build(&mut assembly, &spec, &image)?;
        let loading = Loading::start(image, ram)?;
        let (mut machine, entry) = assembly.build(&spec, self.console.take(), || loading.finish())?;
        // Maps the BARs of a screen that works without a driver. A restored machine finds all BARs
        // in its state.
        machine.pci.remap(&machine.spaces.mmio);
        machine.enter_at(entry)?;
        Ok(machine)
    }

    /// Builds a paused machine from `spec`, with `ram` as its memory, and loads a saved state. The
    /// spec has all devices of the saved machine at their addresses, including those attached
    /// later. `ram` has the content of the saved machine's memory. `saved` is untrusted.
    pub fn restore(
        &mut self,
        spec: &MachineSpec,
        fds: Vec<OwnedFd>,
        notifier: Notifier,
        ram: GuestRam,
        saved: state::Machine,
    ) -> Result<Machine, Failure> {
        let spec = vmm_protocol::machine::Machine::new(spec, fds.len())?;
        let mut fds = Fds::new(fds);
        let header = saved::header_of(&saved)?;
        let ground = self.ground_of_saved(&spec, &mut fds, &header)?;
        self.restore_onto(&spec, Grounds::new(fds, ground), notifier, ram, saved)
    }

    /// Builds a paused machine from `spec` that continues from a snapshot. The snapshot is
    /// untrusted.
    pub(super) fn assemble_restored(
        &mut self,
        spec: &MachineSpec,
        fds: Vec<OwnedFd>,
        notifier: Notifier,
        restore: &vmm::Restore,
    ) -> Result<Machine, Failure> {
        let spec = vmm_protocol::machine::Machine::new(spec, fds.len())?;
        let mut fds = Fds::new(fds);
        let index = usize::try_from(restore.snapshot_fd).unwrap_or(usize::MAX);
        let source = File::from(fds.take(FdIndex(index))?);
        if restore.stream {
            return self.assemble_received(&spec, fds, notifier, restore, source);
        }
        let mut snapshot = Snapshot::open(source)?;
        holds_memory(spec.memory_bytes, snapshot.memory_bytes())?;
        // Before memory is read.
        let header = saved::header_of(&snapshot.machine)?;
        let ground = self.ground_of_saved(&spec, &mut fds, &header)?;
        let ram = if restore.on_demand {
            let MemoryOptions {
                huge_pages,
                prefault,
                numa_node,
                mergeable,
                ..
            } = spec.memory;
            if spec.memory_shared || prefault || huge_pages.is_some() || numa_node.is_some() {
                let message = "memory that is shared, of huge pages, of a NUMA node or touched at the start is not \
                               restored on demand";
                return Err(Failure::of(ErrorKind::Invalid, message));
            }
            snapshot.map(map(&spec), mergeable)?
        } else {
            let ram = GuestRam::with_map(map(&spec), spec.memory_bytes, backing(&spec), &spec.memory)?;
            snapshot.load(ram.memory())?;
            ram
        };
        let saved = std::mem::take(&mut snapshot.machine);
        let grounds = Grounds::new(fds, ground);
        let mut machine = self.restore_onto(&spec, grounds, notifier, ram, saved)?;
        machine.renew_generation()?;
        Ok(machine)
    }

    /// Builds a paused machine from `spec` with the state that another `vmm` sends over `source`.
    /// The received data is untrusted.
    fn assemble_received(
        &mut self,
        spec: &vmm_protocol::machine::Machine,
        mut fds: Fds,
        notifier: Notifier,
        restore: &vmm::Restore,
        source: File,
    ) -> Result<Machine, Failure> {
        if restore.on_demand {
            return Err(Failure::of(
                ErrorKind::Invalid,
                "a machine that is received is not restored on demand",
            ));
        }
        let ram = GuestRam::with_map(map(spec), spec.memory_bytes, backing(spec), &spec.memory)?;
        let (images, mut disks) = disk::open_received(spec, &mut fds, &restore.disks)?;
        let mut boot = match restore.boot_files {
            true => Some(received_boot(spec, &fds)?),
            false => None,
        };
        let mut ground = None;
        let mut check = |header: &MachineHeader| {
            ground = Some(self.ground_of_saved(spec, &mut fds, header)?);
            Ok(())
        };
        let received = migration::receive(source, ram.memory(), &mut disks, boot.as_mut(), &mut check)?;
        drop(disks);
        let ground = match ground {
            Some(ground) => ground,
            // An older program sends the header with the rest of the state.
            None => self.ground_of_saved(spec, &mut fds, &saved::header_of(&received.machine)?)?,
        };
        let mut spec = spec.clone();
        if let Some(boot) = boot {
            spec.boot = received_kernel(&spec.boot, boot)?;
        }
        let spec = &spec;
        // The sender may still use the disks that both processes have open.
        let grounds = Grounds {
            fds,
            ground,
            locks: Locks::Later,
            images,
        };
        self.restore_onto(spec, grounds, notifier, ram, received.machine)
    }

    fn restore_onto(
        &mut self,
        spec: &vmm_protocol::machine::Machine,
        Grounds {
            mut fds,
            ground,
            locks,
            images,
        }: Grounds,
        notifier: Notifier,
        ram: GuestRam,
        saved: state::Machine,
    ) -> Result<Machine, Failure> {
        holds_memory(spec.memory_bytes, ram.size())?;
        let image = image(spec, &mut fds, &ground.windows)?;
        let mut assembly = Assembly::new(spec, ground, fds, ram, notifier)?;
        assembly.locks = locks;
        assembly.images = images;
        firmware::build(&mut assembly, spec, &image)?;
        let (machine, ()) = assembly.build(spec, self.console.take(), || Ok((image, ())))?;
        machine.restore(saved)
    }
}

impl Builder for Assembler {
    type Machine = Machine;

    fn build(
        &mut self,
        spec: &MachineSpec,
        fds: Vec<OwnedFd>,
        restore: Option<&vmm::Restore>,
        notifier: Notifier,
    ) -> Result<Machine, Failure> {
        match restore {
            Some(restore) => self.assemble_restored(spec, fds, notifier, restore),
            None => self.assemble(spec, fds, notifier),
        }
    }
}

fn backing(spec: &vmm_protocol::machine::Machine) -> Backing {
    if spec.memory_shared {
        Backing::Shared
    } else {
        Backing::Private
    }
}

/// A machine has as much memory as is restored.
fn holds_memory(bytes: u64, restored: u64) -> Result<(), Failure> {
    if bytes == restored {
        return Ok(());
    }
    Err(Failure::of(
        ErrorKind::Invalid,
        format!("the machine has {bytes} bytes of memory, and {restored} are to be restored"),
    ))
}

/// Base of a machine: the host's KVM, the CPUID of the machine, and the addresses of its PCI buses.
struct Ground {
    host: Host,
    cpuid: Cpuid,
    windows: PciWindows,
}

impl Ground {
    fn new(spec: &vmm_protocol::machine::Machine, host: Host, cpuid: Cpuid) -> Self {
        let windows = pci_windows(map(spec), spec.memory_bytes, cpuid.physical_address_bits());
        Self { host, cpuid, windows }
    }
}

fn image(
    spec: &vmm_protocol::machine::Machine,
    fds: &mut Fds,
    windows: &PciWindows,
) -> Result<Image, Failure> {
    let apic_ids = (0..spec.topology.cores()).map(|vcpu| cpuid::apic_id(spec.topology, vcpu));
    Image::new(spec, fds, apic_ids.collect(), windows)
}

/// Resources for a machine that continues from a saved state.
struct Grounds {
    fds: Fds,
    ground: Ground,
    locks: Locks,
    images: disk::Images,
}

impl Grounds {
    /// For a machine whose disks no other process uses.
    fn new(fds: Fds, ground: Ground) -> Self {
        Self {
            fds,
            ground,
            locks: Locks::AtOnce,
            images: disk::Images::new(),
        }
    }
}

/// A machine under construction: what its devices are built with and added to.
struct Assembly {
    fds: Fds,
    cpuid: Cpuid,
    vm: Arc<Vm>,
    ram: GuestRam,
    spaces: AddressSpaces,
    hotplug: Arc<HotPlug>,
    sockets: Sockets,
    components: Vec<Box<dyn Component>>,
    /// When the images of its disks are locked.
    locks: Locks,
    /// Images that are open already, by the disks' names.
    images: disk::Images,
    /// PCI slots and names of the components in slots.
    slots: Vec<(u8, String)>,
    balloon: Option<BalloonControl>,
}

/// Parts of a machine that virtio devices are built with and added to, during assembly and later.
#[derive(Clone)]
pub(super) struct Sockets {
    memory: GuestMemory,
    msi: Arc<dyn MsiController>,
    notify: Arc<dyn NotifyRegistry>,
    pub pci: Arc<PciRoot>,
    pub mmio: Arc<Bus>,
    pub notifier: Notifier,
    /// The machine's memory map, which shows its kind of firmware.
    pub map: Map,
}

impl Assembly {
    fn new(
        spec: &vmm_protocol::machine::Machine,
        Ground { host, cpuid, windows }: Ground,
        fds: Fds,
        ram: GuestRam,
        notifier: Notifier,
    ) -> Result<Self, Failure> {
        let vm = Vm::create(&host)?;
        holds(&cpuid, &vm, spec)?;
        vm.set_ram(&ram)?;
        let map = map(spec);
        let chipset = match map {
            Map::Direct => Chipset::CloudHv,
            Map::Uefi | Map::Bios => Chipset::Q35,
        };
        let root = PciRoot::with_chipset(windows, chipset);
        let spaces = AddressSpaces {
            pio: Arc::new(Bus::new()),
            mmio: Arc::new(Bus::new()),
        };
        spaces.mmio.insert(map.ecam().start, ECAM_SIZE, root.ecam())?;
        if map.has_firmware() {
            // The older way to PCI configuration spaces. Linux prefers the ports where they are, and pays two exits for each access
            // instead of one. A kernel that is booted directly finds ECAM in the ACPI tables.
            spaces.pio.insert(FIRST_PORT, PORTS, root.ports())?;
        }
        let hotplug = HotPlug::new(vm.level_line(super::HOTPLUG_GSI));
        let registers = hotplug.registers();
        spaces
            .pio
            .insert(hotplug::PORT.into(), hotplug::PORTS.into(), registers)?;
        Ok(Self {
            fds,
            cpuid,
            sockets: Sockets {
                memory: ram.memory().clone(),
                msi: vm.msi_controller(),
                notify: vm.notify_registry(),
                pci: root,
                mmio: Arc::clone(&spaces.mmio),
                notifier,
                map,
            },
            vm,
            ram,
            spaces,
            hotplug,
            components: Vec::new(),
            locks: Locks::AtOnce,
            images: disk::Images::new(),
            slots: Vec::new(),
            balloon: None,
        })
    }

    /// Builds the machine. `image` runs last, and returns the image that a reset loads, and a
    /// result for the caller.
    fn build<T>(
        mut self,
        spec: &vmm_protocol::machine::Machine,
        console: Option<Console>,
        image: impl FnOnce() -> Result<(Image, T), Failure>,
    ) -> Result<(Machine, T), Failure> {
        let identities = self.cpuid.vcpus()?;
        let header = saved::header(spec.memory_bytes, &identities, &self.cpuid);
        // The vCPUs' threads set them up while the devices are made.
        let panicked = Arc::new(AtomicBool::new(false));
        let vcpus = self.vcpus(identities, Arc::clone(&panicked))?;

        let hub = spec.display.as_ref().map(display::hub);
        let serial = serial::build(&mut self, spec, console)?;
        let power_button = legacy::build(&mut self, spec, hub.as_ref())?;
        rng::build(&mut self, &spec.rng)?;
        if let Some(spec) = spec.tpm {
            tpm::build(&mut self, spec)?;
        }
        if let Some(spec) = &spec.balloon {
            balloon::build(&mut self, spec)?;
        }
        let mut disks = Disks::new(self.sockets.clone(), Arc::clone(&self.hotplug), spec);
        let mut drives = Vec::new();
        for disk in &spec.disks {
            let image = match self.images.remove(&disk.name) {
                Some(image) => image,
                None => disk::open_locked(disk, &mut self.fds, self.locks)?,
            };
            match disk.place {
                DiskPlace::Virtio(_) => disks.fit(disk, image)?,
                DiskPlace::Sata { port, cdrom } => drives.push((port, disks.fit_drive(disk, cdrom, image)?)),
            }
        }
        sata::build(&mut self, drives)?;
        let mut nics = Nics::new(self.sockets.clone(), Arc::clone(&self.hotplug));
        for nic in &spec.nics {
            nics.fit(nic, &mut self.fds)?;
        }
        let mut shares = Shares::new(
            self.sockets.clone(),
            Arc::clone(&self.hotplug),
            spec.memory_shared,
        );
        for share in &spec.shares {
            shares.fit(share, &mut self.fds)?;
        }
        let screen = match spec.display.as_ref().zip(hub) {
            Some((display, hub)) => display::build(&mut self, &spec.name, display, hub)?,
            None => None,
        };
        let console = match &spec.console {
            Some(spec) => Some(console::build(&mut self, spec)?),
            None => None,
        };
        let channels = match &spec.channels {
            Some(spec) => Some(channels::build(&mut self, spec)?),
            None => None,
        };
        let vsock = match spec.vsock {
            Some(spec) => Some(vsock::build(&mut self, spec)?),
            None => None,
        };
        let watchdog = match spec.watchdog {
            Some(slot) => Some(watchdog::build(&mut self, slot)?),
            None => None,
        };
        self.hotplug.power_on(|slot| self.sockets.pci.is_taken(slot));

        let generation_line = self.irq_line(super::GENERATION_GSI)?;
        let irqchip = IrqChipState::capture(&self.vm)?;
        let (image, known) = image()?;
        let machine = Machine {
            vcpus,
            components: self.components,
            balloon: self.balloon,
            disks,
            serial,
            console,
            channels,
            vsock,
            watchdog,
            screen,
            nics,
            shares,
            slots: self.slots,
            pci: self.sockets.pci,
            hotplug: self.hotplug,
            spaces: self.spaces,
            power_button,
            image,
            ram: self.ram,
            irqchip,
            vm_stats: self.vm.stats(),
            vm: self.vm,
            paused_at: None,
            unlocked: self.locks == Locks::Later,
            sync_clock: spec.sync_clock,
            header,
            saving: None,
            saving_devices: Vec::new(),
            throttle: None,
            generation_line,
            notifier: self.sockets.notifier,
            panicked,
        };
        Ok((machine, known))
    }

    fn vcpus(&self, identities: Vec<Identity>, panicked: Arc<AtomicBool>) -> Result<Vcpus, Failure> {
        let (pci, mmio) = (Arc::clone(&self.sockets.pci), Arc::clone(&self.spaces.mmio));
        let notifier = self.sockets.notifier.clone();
        let (slots, hotplug) = (self.sockets.clone(), Arc::clone(&self.hotplug));
        let handlers = ExitHandlers {
            spaces: self.spaces.clone(),
            remap: Box::new(move || pci.remap(&mmio)),
            eject: Box::new(move || {
                hotplug.eject(|slot| {
                    slots.pci.remove(slot, &slots.mmio);
                });
                slots.notifier.notify(Notice::Unplugged);
            }),
            report: Box::new(move |report| {
                // A panicking kernel can say so any number of times.
                let again = matches!(report.kind, ReportKind::GuestPanicked(_))
                    && panicked.swap(true, Ordering::Relaxed);
                if !again {
                    notifier.notify(notice(&report));
                }
            }),
        };
        Vcpus::new(&self.vm, identities, &Arc::new(handlers))
            .map_err(|error| Failure::new(ErrorKind::Kvm, &error))
    }

    /// Puts a virtio device into its PCI slot.
    fn add_virtio(
        &mut self,
        name: &str,
        slot: PciSlot,
        device: Box<dyn VirtioDevice>,
    ) -> Result<(), Failure> {
        let device = self.sockets.plug(name, slot, device)?;
        self.slots.push((slot.number(), name.to_owned()));
        self.components.push(Box::new(device));
        Ok(())
    }

    fn irq_line(&self, gsi: u32) -> Result<Arc<dyn IrqLine>, Failure> {
        Ok(self.vm.irq_line(gsi)?)
    }
}

impl Sockets {
    /// Sockets of a machine without KVM and without vCPUs.
    #[cfg(test)]
    pub(super) fn of(
        memory: GuestMemory,
        msi: Arc<dyn MsiController>,
        notify: Arc<dyn NotifyRegistry>,
        notifier: Notifier,
    ) -> Self {
        Self {
            memory,
            msi,
            notify,
            pci: PciRoot::new(pci_windows(Map::Direct, 1 << 30, 40)),
            mmio: Arc::new(Bus::new()),
            notifier,
            map: Map::Direct,
        }
    }

    /// Passes reports of a device to the driver.
    fn sink(&self) -> Arc<dyn EventSink> {
        Arc::new(Sink {
            notifier: self.notifier.clone(),
            limit: LogLimit::new(),
        })
    }

    /// Puts a virtio device into a PCI slot.
    pub(super) fn plug(
        &self,
        name: &str,
        slot: PciSlot,
        device: Box<dyn VirtioDevice>,
    ) -> Result<VirtioPciDevice, Failure> {
        let parts = Parts {
            name: name.to_owned(),
            memory: self.memory.clone(),
            msi: self.msi.as_ref(),
            notify: Arc::clone(&self.notify),
            sink: self.sink(),
        };
        let device = VirtioPciDevice::new(parts, device).map_err(|error| {
            Failure::of(
                match error.kind() {
                    io::ErrorKind::InvalidInput => ErrorKind::Invalid,
                    _ => ErrorKind::Resources,
                },
                format!("{name}: {error}"),
            )
        })?;
        self.pci
            .add(slot.number(), device.function())
            .map_err(Failure::during(ErrorKind::Invalid, name))?;
        Ok(device)
    }
}

/// Checks the machine's size against the limits of KVM and of the host's processors.
fn holds(cpuid: &Cpuid, vm: &Vm, spec: &vmm_protocol::machine::Machine) -> Result<(), Failure> {
    let wanted = usize::try_from(spec.topology.cores()).unwrap_or(usize::MAX);
    let max = vm.max_vcpus();
    if wanted > max {
        return Err(KvmError::TooManyVcpus { wanted, max }.into());
    }
    map(spec)
        .fits(spec.memory_bytes, cpuid.physical_address_bits())
        .map_err(|error| Failure::of(ErrorKind::Resources, error.to_string()))
}

/// The descriptors that came with the spec; each is taken once.
pub(super) struct Fds(Vec<Option<OwnedFd>>);

impl Fds {
    pub(super) fn new(fds: Vec<OwnedFd>) -> Self {
        Self(fds.into_iter().map(Some).collect())
    }

    /// Another descriptor of a file that is taken later.
    fn again(&self, index: FdIndex) -> Result<File, Failure> {
        let fd = self.0.get(index.0).and_then(Option::as_ref);
        let fd = fd.ok_or_else(|| missing(index))?.try_clone();
        let fd =
            fd.map_err(|error| Failure::of(ErrorKind::Resources, format!("open a file again: {error}")))?;
        Ok(fd.into())
    }

    pub(super) fn take(&mut self, index: FdIndex) -> Result<OwnedFd, Failure> {
        let fd = self.0.get_mut(index.0).and_then(Option::take);
        fd.ok_or_else(|| missing(index))
    }
}

fn missing(index: FdIndex) -> Failure {
    let message = format!("descriptor {} did not come, or is named twice", index.0);
    Failure::of(ErrorKind::Invalid, message)
}

/// The empty files for the boot files that another node sends.
fn received_boot(spec: &vmm_protocol::machine::Machine, fds: &Fds) -> Result<ReceivedBoot, Failure> {
    let Boot::Kernel {
        kernel,
        initrd: Some(initrd),
        ..
    } = &spec.boot
    else {
        let message = "boot files are received into a kernel and an initial RAM disk";
        return Err(Failure::of(ErrorKind::Invalid, message));
    };
    Ok(ReceivedBoot::new(fds.again(*kernel)?, fds.again(*initrd)?))
}

/// The boot of the received machine.
fn received_kernel(boot: &Boot, received: ReceivedBoot) -> Result<Boot, Failure> {
    let (cmdline, has_initrd) = received.complete().ok_or_else(|| {
        let message = "the other node sent no kernel: is its vmm an older one?";
        Failure::of(ErrorKind::Invalid, message)
    })?;
    match boot {
        Boot::Kernel { kernel, initrd, .. } => Ok(Boot::Kernel {
            kernel: *kernel,
            initrd: initrd.filter(|_| has_initrd),
            cmdline,
        }),
        Boot::Firmware { .. } => Ok(boot.clone()),
    }
}

/// Passes device reports to the driver. Limits the rate of reports that a guest can cause
/// repeatedly.
struct Sink {
    notifier: Notifier,
    limit: LogLimit,
}

impl EventSink for Sink {
    fn report(&self, device: &str, event: DeviceEvent) {
        let message = match event {
            DeviceEvent::Failed(message) => {
                return self
                    .notifier
                    .notify(Notice::VmmFailed(format!("{device}: {message}")));
            }
            DeviceEvent::Held(message) => {
                return self.notifier.notify(Notice::DiskHeld {
                    device: device.to_owned(),
                    message,
                });
            }
            DeviceEvent::NeedsReset(message) | DeviceEvent::BackendError(message) => message,
        };
        if self.limit.allow().is_some() {
            self.notifier.notify(Notice::DeviceError {
                device: device.to_owned(),
                message,
            });
        }
    }
}

fn notice(report: &Report) -> Notice {
    let of_vcpu = |what: &dyn std::fmt::Display| format!("vCPU {}: {what}", report.vcpu);
    match &report.kind {
        ReportKind::Reset => Notice::Reset,
        ReportKind::PowerOff => Notice::PowerOff,
        ReportKind::GuestPanicked(parameters) => Notice::GuestPanicked(*parameters),
        ReportKind::Crashed(crash) if crash.is_host_unusable() => Notice::VmmFailed(crash.to_string()),
        ReportKind::Crashed(crash @ Crash::TripleFault) => Notice::TripleFault(of_vcpu(crash)),
        ReportKind::Crashed(crash) => Notice::GuestCrashed(of_vcpu(crash)),
        ReportKind::Failed(error) => Notice::VmmFailed(of_vcpu(&lifecycle::with_causes(error))),
    }
}
