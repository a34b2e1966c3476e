//! A machine that boots through firmware: the code, the flash memory with the variables of UEFI, and
//! the items by which firmware learns about the machine.
//!
//! The code ends at 4 GiB, as on QEMU's Q35, and the variables end at its start. The code is
//! read-only memory that all machines share; writes to it have no effect.

use std::{
    fs::File,
    io,
    ops::Range,
    os::unix::fs::FileExt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Instant,
};

use devices::{
    bus::Bus,
    component::{Component, ComponentError},
    firmware::{
        flash::{BLOCK, Flash, FlashMemory},
        fw_cfg::{self, FwCfg, Items},
    },
    log_limit::LogLimit,
    state::{Section, StateError, message},
};
use rustix::fs::FileType;
use vm_memory::{Bytes, GuestMemoryRegion, MemoryRegionAddress};
use vmm_base::{GuestMemory, sys::file};
use vmm_protocol::{
    machine::{Boot, DiskPlace, Machine},
    vmm::ErrorKind,
};
use vmmd_spec::disk::BootOrder;

use super::{
    COM1_PORT,
    acpi::{self, Platform},
    smbios::{self, EntryPoint, System},
};
use crate::{
    kvm::{Region, SlotId, Vm},
    lifecycle::Failure,
    memory::{
        guest,
        layout::{self, Map},
    },
};

/// Where the flash may begin: behind the local APICs.
const FLASH_START: u64 = 0xff00_0000;
/// The end of the flash.
const FLASH_END: u64 = 4 * layout::GIB;

/// Length of the TPM's event log of a BIOS, in bytes: as long as QEMU makes it.
pub(super) const TPM_LOG: u32 = 64 << 10;

/// Files of fw_cfg.
mod name {
    pub(super) const E820: &str = "etc/e820";
    pub(super) const LOADER: &str = "etc/table-loader";
    pub(super) const RSDP: &str = "etc/acpi/rsdp";
    pub(super) const ACPI: &str = "etc/acpi/tables";
    pub(super) const TPM_LOG: &str = "etc/tpm/log";
    pub(super) const SMBIOS_ANCHOR: &str = "etc/smbios/smbios-anchor";
    pub(super) const SMBIOS_TABLES: &str = "etc/smbios/smbios-tables";
    pub(super) const BOOT_ORDER: &str = "bootorder";
    pub(super) const MENU_WAIT: &str = "etc/boot-menu-wait";
    pub(super) const SERIAL_CONSOLE: &str = "etc/sercon-port";
    /// Ignition reads its configuration there on the platform `qemu`.
    pub(super) const IGNITION: &str = "opt/com.coreos/config";
}

/// Properties of the machine that firmware reads.
pub(super) struct Described<'a> {
    /// For the boot order.
    pub machine: &'a Machine,
    /// For the ACPI tables.
    pub platform: &'a Platform,
    /// For the SMBIOS tables.
    pub system: System<'a>,
}

/// The device of the machine. It holds the code's memory slot as long as the machine lives.
pub(super) struct Firmware {
    /// The variables of UEFI firmware.
    flash: Option<Arc<Mutex<Flash>>>,
    fw_cfg: Arc<Mutex<FwCfg>>,
    code_bytes: u64,
}

impl Firmware {
    /// Puts firmware with this code into the machine: UEFI with these variables, or a BIOS.
    pub(super) fn new(
        vm: &Arc<Vm>,
        memory: &GuestMemory,
        mmio: &Bus,
        pio: &Bus,
        files: (&File, Option<File>),
        described: &Described<'_>,
    ) -> Result<Self, Failure> {
        let (code, variables) = files;
        let code_length = length("the firmware's code", code)?;
        let variables_length = match &variables {
            Some(variables) => length("the firmware's variables", variables)?,
            None => 0,
        };
        let code_start = FLASH_END
            .checked_sub(code_length)
            .filter(|start| start.saturating_sub(variables_length) >= FLASH_START);
        let code_start = code_start.ok_or_else(|| {
            let message = "the firmware's code and variables are larger than 16 MiB together";
            Failure::of(ErrorKind::Image, message)
        })?;
        let region = Arc::new(guest::file_region(code, code_length)?);
        vm.add_read_only_slot(&region, code_start)?;

        let start = code_start.saturating_sub(variables_length);
        let flash = match variables {
            Some(variables) => {
                let slot = VariablesSlot::new(vm, &variables, start..code_start)?;
                let flash = Arc::new(Mutex::new(Flash::new(Arc::new(slot), variables)));
                mmio.insert(start, variables_length, flash.clone())?;
                Some(flash)
            }
            None => None,
        };
        let items = items(described)?;
        let fw_cfg = Arc::new(Mutex::new(FwCfg::new(items, memory.clone())));
        pio.insert(fw_cfg::PORT, fw_cfg::PORTS, fw_cfg.clone())?;
        Ok(Self {
            flash,
            fw_cfg,
            code_bytes: code_length,
        })
    }
}

fn lock<T>(device: &Mutex<T>) -> MutexGuard<'_, T> {
    device.lock().unwrap_or_else(PoisonError::into_inner)
}

fn image(error: &io::Error) -> Failure {
    Failure::new(ErrorKind::Image, error)
}

/// Length of a regular file of whole blocks.
fn length(what: &str, file: &File) -> Result<u64, Failure> {
    let status = file::status(file).map_err(|error| image(&error))?;
    let whole = status.length > 0 && status.length.is_multiple_of(BLOCK as u64);
    if status.kind != FileType::RegularFile || !whole {
        return Err(Failure::of(
            ErrorKind::Image,
            format!("{what}: must be a file of whole blocks of {BLOCK} bytes"),
        ));
    }
    Ok(status.length)
}

impl Component for Firmware {
    fn name(&self) -> &str {
        "firmware"
    }

    /// Each access is complete when its vCPU continues.
    fn pause(&mut self, _deadline: Instant) -> Result<(), ComponentError> {
        Ok(())
    }

    fn resume(&mut self) -> Result<(), ComponentError> {
        Ok(())
    }

    fn reset(&mut self) -> Result<(), ComponentError> {
        if let Some(flash) = &self.flash {
            lock(flash).reset();
        }
        lock(&self.fw_cfg).reset();
        Ok(())
    }

    /// The variables are part of the state, so they go wherever the machine goes.
    fn save(&self) -> Result<Section, StateError> {
        let state = message::Firmware {
            flash: self.flash.as_ref().map(|flash| lock(flash).save()),
            fw_cfg: Some(lock(&self.fw_cfg).save()),
            code_bytes: self.code_bytes,
        };
        Ok(Section::new(self.name(), &state))
    }

    /// The code may be of another version: it is read at the next reset. Another length would be at another address.
    fn restore(&mut self, section: &Section) -> Result<(), StateError> {
        let saved: message::Firmware = section.open()?;
        if saved.code_bytes != self.code_bytes {
            let why = format!(
                "{} bytes of code, this machine's firmware has {}: use the same firmware on both sides",
                saved.code_bytes, self.code_bytes
            );
            return Err(StateError::invalid("code_bytes", why));
        }
        let fw_cfg = saved
            .fw_cfg
            .ok_or_else(|| StateError::invalid("fw_cfg", "it is absent"))?;
        lock(&self.fw_cfg).restore(&fw_cfg)?;
        match (&self.flash, saved.flash) {
            (Some(flash), Some(saved)) => lock(flash).restore(&saved),
            (None, None) => Ok(()),
            _ => Err(StateError::invalid(
                "flash",
                "it is of the other kind of firmware: UEFI has variables, a BIOS has none",
            )),
        }
    }
}

/// The memory of the variables, which the guest sees while it is the array that the flash shows.
struct VariablesSlot {
    vm: Arc<Vm>,
    region: Arc<Region>,
    /// Guest-physical address.
    start: u64,
    slot: Mutex<Option<SlotId>>,
    limit: LogLimit,
}

impl VariablesSlot {
    /// Memory with the content of the file, which is as long as `place`. The guest does not see it yet.
    fn new(vm: &Arc<Vm>, file: &File, place: Range<u64>) -> Result<Self, Failure> {
        let length = place.end.saturating_sub(place.start);
        let region = guest::detached_region(length)?;
        let mut content = vec![0; usize::try_from(length).unwrap_or(0)];
        file.read_exact_at(&mut content, 0)
            .map_err(|error| image(&error))?;
        region
            .write_slice(&content, MemoryRegionAddress(0))
            .map_err(|error| Failure::new(ErrorKind::Internal, &error))?;
        Ok(Self {
            vm: Arc::clone(vm),
            region: Arc::new(region),
            start: place.start,
            slot: Mutex::new(None),
            limit: LogLimit::new(),
        })
    }
}

impl FlashMemory for VariablesSlot {
    fn size(&self) -> usize {
        usize::try_from(self.region.len()).unwrap_or(0)
    }

    fn read(&self, offset: usize, bytes: &mut [u8]) {
        let read = self.region.read(bytes, MemoryRegionAddress(offset as u64));
        if let Some(rest) = bytes.get_mut(read.unwrap_or(0)..) {
            rest.fill(0xff);
        }
    }

    fn write(&self, offset: usize, bytes: &[u8]) {
        // Bytes beyond the end are lost, as the trait specifies.
        let _written = self.region.write(bytes, MemoryRegionAddress(offset as u64));
    }

    fn show(&self, shown: bool) {
        let mut slot = lock(&self.slot);
        let changed = match (*slot, shown) {
            (None, true) => self
                .vm
                .add_read_only_slot(&self.region, self.start)
                .map(|id| *slot = Some(id)),
            (Some(id), false) => self.vm.remove_slot(id).map(|()| *slot = None),
            _ => Ok(()),
        };
        if let Err(error) = changed
            && self.limit.allow().is_some()
        {
            tracing::error!(%error, "move the memory slot of the firmware's variables");
        }
    }
}

fn items(described: &Described<'_>) -> Result<Items, Failure> {
    let cpus = u16::try_from(described.platform.apic_ids.len()).unwrap_or(u16::MAX);
    let mut items = Items::new(cpus);
    let acpi = tables(described.platform)?;
    let is_bios = described.system.map == Map::Bios;
    let entry = match is_bios {
        // SeaBIOS 1.16.2 reads no other.
        true => EntryPoint::Narrow,
        false => EntryPoint::Wide,
    };
    let (anchor, table) = smbios::parts(&described.system, entry);
    let mut files = vec![
        (name::E820, e820(described.system.map, described.system.ram)),
        (name::LOADER, acpi.loader),
        (name::RSDP, acpi.rsdp),
        (name::ACPI, acpi.tables),
        (name::SMBIOS_ANCHOR, anchor),
        (name::SMBIOS_TABLES, table),
        (name::BOOT_ORDER, boot_order(described.machine)),
        (name::MENU_WAIT, menu_wait(described.machine)),
    ];
    if is_bios {
        // OVMF searches for the serial port.
        files.push((name::SERIAL_CONSOLE, COM1_PORT.to_le_bytes().to_vec()));
    }
    if !described.machine.ignition.is_empty() {
        files.push((name::IGNITION, described.machine.ignition.clone()));
    }
    if acpi.has_tpm_log {
        files.push((name::TPM_LOG, vec![0; TPM_LOG as usize]));
    }
    for (name, content) in files {
        items
            .add_file(name, &content)
            .map_err(|error| Failure::new(ErrorKind::Internal, &error))?;
    }
    Ok(items)
}

/// Time for the boot menu in milliseconds, of which OVMF reads 16 bits.
fn menu_wait(machine: &Machine) -> Vec<u8> {
    let seconds = match machine.boot {
        Boot::Firmware { menu_seconds, .. } => menu_seconds,
        Boot::Kernel { .. } => 0,
    };
    let milliseconds = u16::try_from(seconds.saturating_mul(1000)).unwrap_or(u16::MAX);
    milliseconds.to_le_bytes().to_vec()
}

/// RAM as entries of the e820 map: address, length, type.
fn e820(map: Map, ram: u64) -> Vec<u8> {
    let (low, high) = map.ram_ranges(ram);
    let mut bytes = Vec::new();
    for Range { start, end } in [low, high].into_iter().filter(|range| !range.is_empty()) {
        bytes.extend(start.to_le_bytes());
        bytes.extend(end.saturating_sub(start).to_le_bytes());
        bytes.extend((layout::RangeKind::Ram as u32).to_le_bytes());
    }
    bytes
}

/// The devices that firmware tries, as Open Firmware paths: first those with a position, then the other disks, then the other NICs.
/// Firmware sees bus 0 alone.
fn boot_order(machine: &Machine) -> Vec<u8> {
    let on_bus_0 = |slot: u8| (slot < 32).then_some(slot);
    let disks = machine.disks.iter().filter_map(|disk| match disk.place {
        DiskPlace::Virtio(slot) => {
            let slot = on_bus_0(slot.number())?;
            let path = format!("/pci@i0cf8/scsi@{slot:x}/disk@0,0");
            Some((disk.boot_order, path))
        }
        DiskPlace::Sata { port, .. } => {
            let path = format!("/pci@i0cf8/pci8086,2922@1f,2/drive@{port:x}/disk@0");
            Some((disk.boot_order, path))
        }
    });
    let nics = machine.nics.iter().filter_map(|nic| {
        let slot = on_bus_0(nic.slot.number())?;
        let path = format!("/pci@i0cf8/ethernet@{slot:x}/ethernet-phy@0");
        Some((nic.boot_order, path))
    });
    let mut devices: Vec<_> = disks.chain(nics).collect();
    BootOrder::sort(&mut devices, |(position, _)| *position);
    let paths: Vec<_> = devices.into_iter().map(|(_, path)| path).collect();
    let mut bytes = paths.join("\n").into_bytes();
    bytes.push(0);
    bytes
}

/// Commands of the table loader, each 128 bytes long (QEMU's `hw/acpi/bios-linker-loader.c` defines them).
mod loader {
    pub(super) const LENGTH: usize = 128;
    pub(super) const NAME: usize = 56;
    pub(super) const ALLOCATE: u32 = 1;
    pub(super) const ADD_POINTER: u32 = 2;
    pub(super) const ADD_CHECKSUM: u32 = 3;
    /// Anywhere.
    pub(super) const ZONE_HIGH: u8 = 1;
    /// Between 0xf_0000 and 0x10_0000, where guests of a BIOS search for the RSDP.
    pub(super) const ZONE_FSEG: u8 = 2;
    pub(super) const ALIGNMENT: u32 = 64;
}

/// Files with the ACPI tables.
struct AcpiFiles {
    rsdp: Vec<u8>,
    /// The other tables, with zeroes in place of the RSDP.
    tables: Vec<u8>,
    /// The commands that turn the offsets in both files into addresses.
    loader: Vec<u8>,
    /// The commands name a file for the TPM's event log.
    has_tpm_log: bool,
}

/// The ACPI tables with offsets in place of addresses.
fn tables(platform: &Platform) -> Result<AcpiFiles, Failure> {
    let mut tables = acpi::build(platform, 0);
    let mut commands = Vec::new();
    let file = |name: &str| {
        let mut field = name.as_bytes().to_vec();
        field.resize(loader::NAME, 0);
        field
    };
    let mut add = |kind: u32, parts: &[&[u8]]| {
        let mut command = kind.to_le_bytes().to_vec();
        for part in parts {
            command.extend_from_slice(part);
        }
        command.resize(loader::LENGTH, 0);
        commands.append(&mut command);
    };
    let number = |value: usize| {
        let value = u32::try_from(value);
        value.map_err(|_| Failure::of(ErrorKind::Internal, "the ACPI tables are too large"))
    };
    let (first, others) = (file(name::RSDP), file(name::ACPI));
    let file_at = |offset: usize| match offset < acpi::RSDP_LENGTH {
        true => &first,
        false => &others,
    };
    let alignment = loader::ALIGNMENT.to_le_bytes();
    add(loader::ALLOCATE, &[&first, &alignment, &[loader::ZONE_FSEG]]);
    add(loader::ALLOCATE, &[&others, &alignment, &[loader::ZONE_HIGH]]);
    for pointer in &tables.pointers {
        add(
            loader::ADD_POINTER,
            &[file_at(*pointer), &others, &number(*pointer)?.to_le_bytes(), &[8]],
        );
    }
    if let Some(pointer) = tables.tpm_log {
        let log = file(name::TPM_LOG);
        add(
            loader::ALLOCATE,
            &[&log, &1_u32.to_le_bytes(), &[loader::ZONE_HIGH]],
        );
        add(
            loader::ADD_POINTER,
            &[file_at(pointer), &log, &number(pointer)?.to_le_bytes(), &[8]],
        );
    }
    for sum in &tables.checksums {
        if let Some(byte) = tables.bytes.get_mut(sum.at) {
            *byte = 0;
        }
        let (at, start) = (number(sum.at)?, number(sum.range.start)?);
        let length = number(sum.range.len())?;
        let parts = [at.to_le_bytes(), start.to_le_bytes(), length.to_le_bytes()];
        add(loader::ADD_CHECKSUM, &[file_at(sum.range.start), &parts.concat()]);
    }
    let has_tpm_log = tables.tpm_log.is_some();
    let mut tables = tables.bytes;
    let head = tables.iter_mut().take(acpi::RSDP_LENGTH);
    let rsdp = head.map(std::mem::take).collect();
    Ok(AcpiFiles {
        rsdp,
        tables,
        loader: commands,
        has_tpm_log,
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::indexing_slicing)]
mod tests {
    use vmm_protocol::vmm;

    use super::*;

    /// A machine whose devices have these positions in the boot order: `far`, `root`, `cd`, `data`, `eth0`.
    fn machine([far, root, cd, data, eth0]: [u32; 5]) -> Machine {
        let disk = |name: &str, fd, pci_slot, boot_order| vmm::Disk {
            name: name.into(),
            fd,
            pci_slot,
            boot_order,
            ..Default::default()
        };
        let spec = vmm::MachineSpec {
            uuid: vec![1; 16],
            vcpus: 1,
            memory_bytes: 256 << 20,
            firmware: Some(vmm::Firmware {
                code_fd: 1,
                variables_fd: Some(2),
                menu_seconds: 5,
            }),
            rng_pci_slot: 1,
            rng_fd: 3,
            disks: vec![
                disk("far", 4, 33, far),
                disk("root", 5, 10, root),
                vmm::Disk {
                    sata_port: Some(3),
                    cdrom: true,
                    ..disk("cd", 8, 0, cd)
                },
                disk("data", 6, 2, data),
            ],
            nics: vec![vmm::Nic {
                name: "eth0".into(),
                fd: 7,
                pci_slot: 3,
                mac: vec![2, 0, 0, 0, 0, 1],
                mtu: 1500,
                boot_order: eth0,
                ..Default::default()
            }],
            ..Default::default()
        };
        Machine::new(&spec, 9).unwrap()
    }

    #[test]
    fn boot_order_is_by_position_then_disks_then_nics_of_bus_0() {
        let [root, cd, data, eth0] = [
            "/pci@i0cf8/scsi@a/disk@0,0",
            "/pci@i0cf8/pci8086,2922@1f,2/drive@3/disk@0",
            "/pci@i0cf8/scsi@2/disk@0,0",
            "/pci@i0cf8/ethernet@3/ethernet-phy@0",
        ];
        for (positions, expected) in [
            ([0; 5], [root, cd, data, eth0]),
            ([0, 0, 0, 1, 0], [data, root, cd, eth0]),
            ([0, 3, 2, 0, 1], [eth0, cd, root, data]),
            ([0, 4, 3, 16, 2], [eth0, cd, root, data]),
        ] {
            let order = String::from_utf8(boot_order(&machine(positions))).unwrap();
            assert_eq!(order, format!("{}\0", expected.join("\n")), "{positions:?}");
        }
    }

    #[test]
    fn boot_menu_waits_in_milliseconds_of_16_bits() {
        assert_eq!(menu_wait(&machine([0; 5])), 5000_u16.to_le_bytes());
    }

    #[test]
    fn e820_has_ram_below_2_gib_and_above_4_gib() {
        let map = e820(Map::Uefi, 5 * layout::GIB);
        let words: Vec<u32> = map
            .chunks_exact(4)
            .map(|word| u32::from_le_bytes(word.try_into().unwrap()))
            .collect();
        assert_eq!(words, [0, 0, 0x8000_0000, 0, 1, 0, 1, 0xc000_0000, 0, 1]);
        assert_eq!(e820(Map::Bios, layout::GIB).len(), 20);
    }
}
