//! Content of RAM when the guest begins: firmware tables, kernel, initial RAM disk. Each reset
//! rebuilds it; the files stay open but are not kept in memory.

use std::{fs::File, os::unix::fs::FileExt, thread::JoinHandle};

use devices::{
    firmware::fw_cfg,
    legacy,
    pci::{PciWindows, hotplug},
};
use uuid::Uuid;
use vm_memory::{Bytes, GuestAddress};
use vmm_base::{
    GuestMemory,
    sys::file,
    thread::{self, ThreadKind},
};
use vmm_protocol::{machine::Boot, vmm::ErrorKind};
use vmmd_spec::{smbios::Smbios, topology::Topology};

use super::{
    COM1_GSI, COM1_PORT, GENERATION_GSI, HOTPLUG_GSI, KEYBOARD_GSI, POWER_BUTTON_GSI,
    acpi::{self, Platform},
    assemble::{Fds, display},
    boot::{BootFramebuffer, BootParams, BootSource, Entry},
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
    texts: Smbios,
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
    /// The code of UEFI firmware, in flash memory.
    Uefi(File),
    /// A BIOS.
    Bios(File),
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
            Boot::Firmware { code, variables, .. } => {
                let code = File::from(fds.take(*code)?);
                match variables {
                    Some(_) => Source::Uefi(code),
                    None => Source::Bios(code),
                }
            }
        };
        Ok(Self {
            source,
            uuid: spec.uuid,
            serial: match spec.smbios.serial.as_str() {
                "" => spec.uuid.to_string(),
                serial => serial.to_owned(),
            },
            texts: spec.smbios.clone(),
            topology: spec.topology,
            platform: platform(spec, apic_ids, windows),
            screen: spec
                .display
                .as_ref()
                .map(|display| display::boot_framebuffer(display, windows))
                .transpose()?,
            generation: Uuid::new_v4(),
        })
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
            Source::Uefi(_) | Source::Bios(_) => Err(Failure::of(
                ErrorKind::Invalid,
                "a machine that boots through firmware has no boot files",
            )),
        }
    }

    /// The code of the machine's firmware, if it boots through firmware.
    pub(super) fn firmware(&self) -> Option<&File> {
        match &self.source {
            Source::Kernel(_) => None,
            Source::Uefi(code) | Source::Bios(code) => Some(code),
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
        let memory = ram.memory();
        let source = match &self.source {
            Source::Kernel(source) => source,
            // Its code is in flash memory.
            Source::Uefi(_) => return Ok(Entry::ResetVector),
            Source::Bios(code) => {
                write_bios(memory, code)?;
                return Ok(Entry::ResetVector);
            }
        };
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
            texts: &self.texts,
            sockets: self.topology.sockets,
            cores_per_socket: self.topology.cores_per_socket,
            ram,
            map: match self.source {
                Source::Kernel(_) => Map::Direct,
                Source::Uefi(_) => Map::Uefi,
                Source::Bios(_) => Map::Bios,
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
        Boot::Firmware {
            variables: Some(_), ..
        } => Map::Uefi,
        Boot::Firmware { variables: None, .. } => Map::Bios,
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

/// Number of ports of fw_cfg.
const FW_CFG_PORTS: u8 = 12;
const _: () = assert!(FW_CFG_PORTS as u64 == fw_cfg::PORTS);

fn platform(spec: &vmm_protocol::machine::Machine, apic_ids: Vec<u32>, windows: &PciWindows) -> Platform {
    let map = map(spec);
    let mmio64 = std::array::from_fn(|bus| {
        let reach = windows.reach_of_bus(bus).into_iter();
        reach.map(|range| range.start..=range.end - 1).collect()
    });
    let (ecam, mmio32) = (map.ecam(), map.mmio32());
    let has_firmware = map.has_firmware();
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
        keyboard: spec.display.is_some().then_some((
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
        tpm: spec.tpm.map(|_| acpi::Tpm {
            log_bytes: match map {
                Map::Bios => firmware::TPM_LOG,
                Map::Direct | Map::Uefi => 0,
            },
        }),
        fw_cfg: (!spec.ignition.is_empty()).then_some((port(fw_cfg::PORT), FW_CFG_PORTS)),
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

/// Writes the end of a BIOS below 1 MiB, where its code runs in real mode. A PC has read-only memory
/// there until the BIOS selects RAM in the host bridge and copies itself. Here it is always RAM.
fn write_bios(memory: &GuestMemory, code: &File) -> Result<(), Failure> {
    let image = |error| Failure::new(ErrorKind::Image, &error);
    let length = file::status(code).map_err(image)?.length;
    let place = layout::BIOS;
    let mut bytes = vec![0; usize::try_from(length.min(place.end - place.start)).unwrap_or(0)];
    let tail = bytes.len() as u64;
    code.read_exact_at(&mut bytes, length.saturating_sub(tail))
        .map_err(image)?;
    write(memory, place.end - tail, place.end, &bytes)
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
