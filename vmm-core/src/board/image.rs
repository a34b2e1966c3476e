//! Content of RAM when the guest begins: firmware tables, kernel, initial RAM disk. Each reset
//! rebuilds it; the files stay open but are not kept in memory.

use std::{fs::File, thread::JoinHandle};

use devices::{
    legacy,
    pci::{PciWindows, hotplug},
};
use uuid::Uuid;
use vm_memory::{Bytes, GuestAddress};
use vmm_base::{
    GuestMemory,
    thread::{self, ThreadKind},
};
use vmm_protocol::{machine::Boot, vmm::ErrorKind};
use vmmd_spec::topology::Topology;

use super::{
    COM1_GSI, COM1_PORT, GENERATION_GSI, HOTPLUG_GSI, KEYBOARD_GSI, POWER_BUTTON_GSI,
    acpi::{self, Platform},
    assemble::{Fds, display},
    boot::{BootFramebuffer, BootParams, BootSource, Entry, Format},
    firmware,
    smbios::{self, System},
};
use crate::{
    lifecycle::Failure,
    memory::{
        GuestRam,
        layout::{self, Map},
    },
    migration::BootFiles,
};

/// Where a processor begins in real mode, and where a guest jumps that wants "the BIOS" to restart the machine. Linux
/// does so on hardware-reduced ACPI without EFI: it takes the reset for a service of EFI, and this for the next best.
const RESET_VECTOR: u64 = 0xf_fff0;

/// Asks for a reset: `mov dx, 0x600; mov al, 1; out dx, al; hlt; jmp $-1`, 16-bit.
const RESET_CODE: [u8; 9] = {
    let [low, high] = port(legacy::pm::POWER_PORT).to_le_bytes();
    [
        0xba,
        low,
        high,
        0xb0,
        legacy::pm::RESET_VALUE,
        0xee,
        0xf4,
        0xeb,
        0xfd,
    ]
};

/// See the module.
#[derive(Debug)]
pub struct Image {
    source: Source,
    uuid: Uuid,
    serial: String,
    topology: Topology,
    platform: Platform,
    screen: Option<BootFramebuffer>,
    /// The guest's generation id: another for each machine that is built.
    generation: Uuid,
}

/// The guest's first code.
#[derive(Debug)]
enum Source {
    Kernel(BootSource),
    Firmware,
}

impl Image {
    /// Takes the files of `spec`. The vCPUs have the local APIC ids `apic_ids`, the PCI buses these windows.
    pub(super) fn new(
        spec: &vmm_protocol::machine::Machine,
        fds: &mut Fds,
        apic_ids: Vec<u32>,
        windows: &PciWindows,
    ) -> Result<Self, Failure> {
        let source = match &spec.boot {
            Boot::Kernel {
                kernel,
                initrd,
                cmdline,
            } => Source::Kernel(BootSource {
                kernel: File::from(fds.take(*kernel)?),
                initrd: match initrd {
                    Some(initrd) => Some(File::from(fds.take(*initrd)?)),
                    None => None,
                },
                cmdline: cmdline.clone(),
            }),
            Boot::Firmware { .. } => Source::Firmware,
        };
        Ok(Self {
            source,
            uuid: spec.uuid,
            serial: spec.uuid.to_string(),
            topology: spec.topology,
            platform: platform(map(spec), apic_ids, windows, spec.display.is_some()),
            screen: spec
                .display
                .as_ref()
                .map(|display| display::boot_framebuffer(display, windows))
                .transpose()?,
            generation: Uuid::new_v4(),
        })
    }

    /// Whether the kernel is known to be Linux, before it is loaded.
    pub(super) fn is_linux(&self) -> Result<bool, Failure> {
        match &self.source {
            Source::Kernel(source) => Ok(source.format()? == Format::Linux),
            Source::Firmware => Ok(false),
        }
    }

    /// The files that a reset loads, for a machine on another node.
    pub(super) fn boot_files(&self) -> Result<BootFiles, Failure> {
        let again = |file: &File| {
            let file = file.try_clone();
            file.map_err(|error| {
                Failure::of(ErrorKind::Resources, format!("open a boot file again: {error}"))
            })
        };
        match &self.source {
            Source::Kernel(source) => Ok(BootFiles {
                kernel: again(&source.kernel)?,
                initrd: source.initrd.as_ref().map(again).transpose()?,
                cmdline: source.cmdline.clone(),
            }),
            Source::Firmware => Err(Failure::of(
                ErrorKind::Invalid,
                "a machine that boots through firmware has no boot files",
            )),
        }
    }

    /// The description of a machine with `ram` bytes of RAM for its firmware.
    pub(super) fn described<'a>(
        &'a self,
        machine: &'a vmm_protocol::machine::Machine,
        ram: u64,
    ) -> firmware::Described<'a> {
        firmware::Described {
            machine,
            platform: &self.platform,
            system: self.system(ram),
        }
    }

    /// Writes everything into `ram`, which is all zeroes; says how the bootstrap processor begins.
    pub(super) fn load(&self, ram: &GuestRam) -> Result<Entry, Failure> {
        let Source::Kernel(source) = &self.source else {
            // Its code is in flash memory.
            return Ok(Entry::ResetVector);
        };
        let memory = ram.memory();
        write(
            memory,
            layout::ACPI.start,
            layout::GENERATION_ID.start,
            &acpi::build(&self.platform, layout::ACPI.start).bytes,
        )?;
        let tables = smbios::build(&self.system(ram.size()));
        write(memory, layout::SMBIOS.start, layout::SMBIOS.end, &tables)?;
        self.write_generation(memory)?;
        write(memory, RESET_VECTOR, layout::LOW_RESERVED_END, &RESET_CODE)?;
        let params = BootParams {
            ram: ram.size(),
            rsdp: layout::ACPI.start,
            screen: self.screen,
        };
        Ok(source.load(memory, &params)?)
    }

    /// Whether the guest finds a generation ID: firmware owns the memory where it would be.
    pub(super) fn has_generation(&self) -> bool {
        matches!(self.source, Source::Kernel(_))
    }

    /// Writes the generation ID to the address that the ACPI tables give.
    pub(super) fn write_generation(&self, memory: &GuestMemory) -> Result<(), Failure> {
        let place = layout::GENERATION_ID;
        write(memory, place.start, place.end, &self.generation.to_bytes_le())
    }

    fn system(&self, ram: u64) -> System<'_> {
        System {
            uuid: self.uuid.into_bytes(),
            serial: &self.serial,
            sockets: self.topology.sockets,
            cores_per_socket: self.topology.cores_per_socket,
            ram,
            map: match self.source {
                Source::Kernel(_) => Map::Direct,
                Source::Firmware => Map::Firmware,
            },
        }
    }
}

/// An image that a thread of its own loads, in parallel with the assembly of the machine: to read a
/// kernel takes as long as the assembly.
pub(super) struct Loading(JoinHandle<Result<(Image, Entry), Failure>>);

impl Loading {
    /// Begins to load `image` into `ram`.
    pub(super) fn start(image: Image, ram: GuestRam) -> Result<Self, Failure> {
        let load = move || image.load(&ram).map(|entry| (image, entry));
        let thread = thread::spawn(ThreadKind::Helper, "loader", load);
        thread.map(Self).map_err(|error| {
            Failure::of(
                ErrorKind::Resources,
                format!("starting a thread for loading the kernel: {error}"),
            )
        })
    }

    /// Waits until everything is in RAM.
    pub(super) fn finish(self) -> Result<(Image, Entry), Failure> {
        self.0
            .join()
            .unwrap_or_else(|_| Err(Failure::of(ErrorKind::Internal, "loading the kernel panicked")))
    }
}

/// The memory map of a machine.
pub(super) fn map(spec: &vmm_protocol::machine::Machine) -> Map {
    match spec.boot {
        Boot::Kernel { .. } => Map::Direct,
        Boot::Firmware { .. } => Map::Firmware,
    }
}

/// Where the BARs of a machine with `ram` bytes of RAM may be, whose physical addresses have `bits` bits.
pub(super) fn pci_windows(map: Map, ram: u64, bits: u32) -> PciWindows {
    let (_, high_ram) = map.ram_ranges(ram);
    PciWindows {
        low: map.mmio32(),
        high: map.mmio64(ram),
        reach: high_ram.end..1_u64.checked_shl(bits).unwrap_or(u64::MAX),
    }
}

fn platform(map: Map, apic_ids: Vec<u32>, windows: &PciWindows, has_keyboard: bool) -> Platform {
    let mmio64 = std::array::from_fn(|bus| {
        let reach = windows.reach_of_bus(bus).into_iter();
        reach.map(|range| range.start..=range.end - 1).collect()
    });
    let (ecam, mmio32) = (map.ecam(), map.mmio32());
    let has_firmware = map == Map::Firmware;
    let button = match has_firmware {
        true => legacy::pm::FIRMWARE_BUTTON_PORT,
        false => legacy::pm::BUTTON_PORT,
    };
    Platform {
        apic_ids,
        local_apic: low(layout::LOCAL_APIC),
        io_apic: low(layout::IO_APIC),
        ecam: low(ecam.start)..=low(ecam.end - 1),
        mmio32: low(mmio32.start)..=low(mmio32.end - 1),
        mmio64,
        com1: (COM1_PORT, COM1_GSI),
        keyboard: has_keyboard.then_some((
            port(legacy::i8042::DATA_PORT),
            port(legacy::i8042::COMMAND_PORT),
            KEYBOARD_GSI,
        )),
        power_port: port(legacy::pm::POWER_PORT),
        reset_value: legacy::pm::RESET_VALUE,
        power_button_port: port(button),
        power_button_gsi: POWER_BUTTON_GSI,
        rtc_port: port(legacy::rtc::PORT),
        pvpanic_port: port(legacy::pvpanic::PORT),
        hotplug_port: hotplug::PORT,
        hotplug_gsi: HOTPLUG_GSI,
        // Firmware owns the memory where it would be.
        generation_id: (!has_firmware).then_some(low(layout::GENERATION_ID.start)),
        generation_gsi: GENERATION_GSI,
    }
}

/// An address of the platform that is below 4 GiB.
#[allow(
    clippy::cast_possible_truncation,
    reason = "constants of the platform's memory map"
)]
fn low(address: u64) -> u32 {
    address as u32
}

/// An I/O port of the platform.
#[allow(
    clippy::cast_possible_truncation,
    reason = "constants of the platform's port map"
)]
const fn port(port: u64) -> u16 {
    port as u16
}

fn write(memory: &GuestMemory, start: u64, end: u64, bytes: &[u8]) -> Result<(), Failure> {
    if bytes.len() as u64 > end - start {
        return Err(Failure::of(
            ErrorKind::Internal,
            format!("{} bytes of firmware tables don't fit at {start:#x}", bytes.len()),
        ));
    }
    memory
        .write_slice(bytes, GuestAddress(start))
        .map_err(|error| Failure::new(ErrorKind::Internal, &error))
}
