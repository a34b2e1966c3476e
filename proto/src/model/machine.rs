//! The validated form of what a machine is built of: a [`vmm::MachineSpec`](crate::vmm::MachineSpec) in which every
//! fd index names one of the descriptors that came with it, and every PCI device number is in range and used once.

use std::collections::{BTreeMap, BTreeSet};

use uuid::Uuid;

use super::{
    Violations,
    disk::MAX_SERIAL,
    nic::Mac,
    topology::Topology,
    vm::{MAX_CMDLINE, MAX_DISKS, MAX_MEMORY, MAX_NICS, MEMORY_STEP, MIN_MEMORY},
};
use crate::vmm;

/// Index into the list of descriptors that came with the message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FdIndex(pub usize);

/// A device number on PCI bus 0, 1 to 31 (0 is the host bridge).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PciSlot(u8);

impl PciSlot {
    /// The device number.
    pub fn number(self) -> u8 {
        self.0
    }
}

impl TryFrom<u32> for PciSlot {
    type Error = u32;

    fn try_from(number: u32) -> Result<Self, u32> {
        u8::try_from(number)
            .ok()
            .filter(|slot| (1..32).contains(slot))
            .map(Self)
            .ok_or(number)
    }
}

/// What a machine is built of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Machine {
    /// The VM's name, for messages.
    pub name: String,
    /// The SMBIOS UUID.
    pub uuid: Uuid,
    /// Virtual CPUs.
    pub topology: Topology,
    /// Guest RAM in bytes.
    pub memory_bytes: u64,
    /// Backed by a memfd instead of private memory.
    pub memory_shared: bool,
    /// /dev/kvm.
    pub kvm: FdIndex,
    /// Kernel image.
    pub kernel: FdIndex,
    /// Initial RAM disk.
    pub initrd: Option<FdIndex>,
    /// Kernel command line.
    pub cmdline: String,
    /// Disks in order.
    pub disks: Vec<Disk>,
    /// NICs in order.
    pub nics: Vec<Nic>,
    /// The entropy device.
    pub rng: Rng,
    /// The serial log and the file that takes its older half.
    pub serial_log: Option<(FdIndex, FdIndex)>,
}

/// A disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Disk {
    /// For messages.
    pub name: String,
    /// Image file or block device.
    pub fd: FdIndex,
    /// The guest can't write to it.
    pub read_only: bool,
    /// What GET_ID answers.
    pub serial: String,
    /// Where it is.
    pub slot: PciSlot,
}

/// A NIC.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Nic {
    /// For messages.
    pub name: String,
    /// The tap.
    pub fd: FdIndex,
    /// Its address.
    pub mac: Mac,
    /// Where it is.
    pub slot: PciSlot,
    /// Largest packet without the Ethernet header, in bytes (virtio 1.3, 5.1.4: 68 to 65,535).
    pub mtu: u16,
}

/// The entropy device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rng {
    /// Where it is.
    pub slot: PciSlot,
    /// The random source.
    pub fd: FdIndex,
}

/// What is claimed while a spec is read; each may be claimed once.
struct Claims {
    found: Violations,
    fds: BTreeMap<u32, String>,
    available: usize,
    slots: BTreeSet<u32>,
}

impl Claims {
    fn fd(&mut self, field: &str, index: u32) -> FdIndex {
        let position = usize::try_from(index).unwrap_or(usize::MAX);
        if position >= self.available {
            let available = self.available;
            self.found
                .add(field, format_args!("descriptor {index} of {available} that came"));
        } else if let Some(other) = self.fds.insert(index, field.to_owned()) {
            self.found
                .add(field, format_args!("the same descriptor as {other}"));
        }
        FdIndex(position)
    }

    fn slot(&mut self, field: &str, number: u32) -> PciSlot {
        if !self.slots.insert(number) {
            self.found
                .add(field, format_args!("PCI device {number} is taken"));
        }
        PciSlot::try_from(number).unwrap_or_else(|number| {
            self.found
                .add(field, format_args!("must be 1 to 31, is {number}"));
            PciSlot(31)
        })
    }
}

impl Machine {
    /// Validates `spec`, which came with `fds` descriptors.
    pub fn new(spec: &vmm::MachineSpec, fds: usize) -> Result<Self, Violations> {
        let (found, slots) = (Violations::default(), BTreeSet::new());
        let mut claims = Claims {
            found,
            fds: BTreeMap::new(),
            available: fds,
            slots,
        };
        let topology = Topology::for_cores(spec.vcpus).unwrap_or_else(|error| {
            claims.found.add("vcpus", error);
            Topology {
                sockets: 1,
                cores_per_socket: 1,
            }
        });
        let uuid = Uuid::from_slice(&spec.uuid).unwrap_or_else(|_| {
            claims.found.add("uuid", "must be 16 bytes");
            Uuid::nil()
        });
        let memory = spec.memory_bytes;
        if !(MIN_MEMORY..=MAX_MEMORY).contains(&memory) || !memory.is_multiple_of(MEMORY_STEP) {
            claims
                .found
                .add("memory_bytes", format_args!("unsupported size {memory}"));
        }
        let kernel = spec.kernel.clone().unwrap_or_else(|| {
            claims.found.add("kernel", "must be given");
            vmm::Kernel::default()
        });
        if kernel.cmdline.len() > MAX_CMDLINE || kernel.cmdline.contains('\0') {
            claims.found.add("kernel.cmdline", "too long, or with NUL");
        }
        if spec.disks.len() > MAX_DISKS || spec.nics.len() > MAX_NICS {
            claims.found.add("disks, nics", "too many");
            return Err(claims.found);
        }
        let serial_log = match (spec.serial_log_fd, spec.serial_log_old_fd) {
            (Some(current), Some(old)) => Some((
                claims.fd("serial_log_fd", current),
                claims.fd("serial_log_old_fd", old),
            )),
            (None, None) => None,
            _ => {
                claims.found.add("serial_log_fd", "goes with serial_log_old_fd");
                None
            }
        };
        let machine = Self {
            name: spec.name.clone(),
            uuid,
            topology,
            memory_bytes: memory,
            memory_shared: spec.memory_shared,
            kvm: claims.fd("kvm_fd", spec.kvm_fd),
            kernel: claims.fd("kernel.kernel_fd", kernel.kernel_fd),
            initrd: kernel.initrd_fd.map(|index| claims.fd("kernel.initrd_fd", index)),
            cmdline: kernel.cmdline,
            disks: spec.disks.iter().map(|wire| disk(&mut claims, wire)).collect(),
            nics: spec.nics.iter().map(|wire| nic(&mut claims, wire)).collect(),
            rng: Rng {
                slot: claims.slot("rng_pci_slot", spec.rng_pci_slot),
                fd: claims.fd("rng_fd", spec.rng_fd),
            },
            serial_log,
        };
        claims.found.or(machine)
    }
}

fn disk(claims: &mut Claims, wire: &vmm::Disk) -> Disk {
    let field = format!("disk {}", wire.name);
    if wire.serial.len() > MAX_SERIAL {
        claims.found.add(&field, "serial too long");
    }
    Disk {
        name: wire.name.clone(),
        fd: claims.fd(&field, wire.fd),
        read_only: wire.read_only,
        serial: wire.serial.clone(),
        slot: claims.slot(&field, wire.pci_slot),
    }
}

fn nic(claims: &mut Claims, wire: &vmm::Nic) -> Nic {
    let field = format!("nic {}", wire.name);
    let octets = <[u8; 6]>::try_from(wire.mac.as_ref()).unwrap_or_default();
    let mac = Mac::try_from(octets).unwrap_or_else(|error| {
        claims.found.add(&field, error);
        Mac::local([0; 6])
    });
    let mtu = u16::try_from(wire.mtu)
        .ok()
        .filter(|mtu| *mtu >= 68)
        .unwrap_or_else(|| {
            claims
                .found
                .add(&field, format_args!("MTU must be 68 to 65535, is {}", wire.mtu));
            1500
        });
    let fd = claims.fd(&field, wire.fd);
    Nic {
        name: wire.name.clone(),
        fd,
        mac,
        slot: claims.slot(&field, wire.pci_slot),
        mtu,
    }
}
