//! Machine description for a `vmm`: the spec with descriptors instead of paths and addresses
//! instead of defaults.

pub mod change;
pub mod limits;
pub mod secret;
pub mod zone;

use std::{
    collections::{BTreeMap, BTreeSet},
    net::Ipv4Addr,
    ops::Range,
    os::fd::OwnedFd,
};

use uuid::Uuid;
use vmm_protocol::{
    convert,
    vmm::{self, MachineSpec},
};
use vmmd_host::failure::Failure;
use vmmd_network::{self, NicEnd, Tap};
use vmmd_spec::{
    cpu::{Model, Processor},
    disk::{Bus, Disk, Source},
    nic::Mac,
    pci,
    policy::ClockOnResume,
    resources::HugePages,
    share::Share,
    vm::{Boot, Nic, VmSpec},
};
use vmmd_store::{Hardware, NicHardware, ProcessorRecord};

use crate::files::{Files, OpenDisk};

/// PCI slots of platform v1 on bus 0, whose device 0 is the host bridge. Each kind of device has
/// its own range, so that a new device never moves an existing one. Slot 31 has the LPC bridge and the
/// SATA controller of a machine with firmware. Disks and NICs without room on bus 0 use further buses,
/// as all shares do.
const RNG_SLOT: u32 = 1;
const NIC_SLOTS: Range<u32> = 2..10;
const DISK_SLOTS: Range<u32> = 10..23;
/// Slot of the watchdog, which has a BAR of 32 bits and so its place on bus 0. Not in the record.
const WATCHDOG_SLOT: u32 = 23;
/// Slot of the socket device. Not in the record.
const VSOCK_SLOT: u32 = 24;
/// Of the channels. Not in the record: no VM ever has them elsewhere.
const CHANNELS_SLOT: u32 = 25;
/// Of the balloon. Not in the record: no VM ever has it elsewhere, and one gets or loses it between two runs.
const BALLOON_SLOT: u32 = 26;
/// Slots of graphics adapter, keyboard and tablet. Not in the record either.
const DISPLAY_SLOTS: [u32; 3] = [27, 28, 29];
/// Of the virtio-console. Not in the record either.
const CONSOLE_SLOT: u32 = 30;

/// All that a `vmm` gets beside the spec.
#[derive(Debug)]
pub struct Parts {
    /// /dev/kvm.
    pub kvm: OwnedFd,
    /// /dev/urandom.
    pub random: OwnedFd,
    /// Kernel, initrd and disks.
    pub files: Files,
    /// In the order of the spec's NICs.
    pub taps: Vec<Tap>,
    /// The serial log and the file for its older half.
    pub serial: (OwnedFd, OwnedFd),
    /// Sockets for VNC clients and for view-only clients, of a VM with a screen.
    pub vnc: Option<(OwnedFd, OwnedFd)>,
    /// Socket for clients of the virtio-console, of a VM with one.
    pub hvc: Option<OwnedFd>,
    /// Names of the channels, and a socket for the client of each.
    pub channels: Vec<(String, OwnedFd)>,
    /// Connections to the processes of the spec's shares, in their order.
    pub shares: Vec<OwnedFd>,
    /// Data channel and control channel of swtpm, of a VM with a TPM.
    pub tpm: Option<(OwnedFd, OwnedFd)>,
    /// Difference of its real-time clock to UTC.
    pub clock_offsets: Vec<vmm::ClockOffset>,
    /// Pages that are free in the pool that its memory is to come from, as far as that can be told.
    pub free_huge_pages: Option<u64>,
}

/// Gives a new VM its PCI addresses and MACs. `chosen` gives the MAC of a NIC without `mac`.
pub fn allocate(spec: &VmSpec, chosen: impl FnMut(&Nic) -> Mac) -> Hardware {
    let none = Hardware {
        rng_slot: RNG_SLOT,
        ..Hardware::default()
    };
    reallocate(spec, &none, &none, chosen)
}

/// Returns the addresses of a VM with a new spec. An existing device keeps its address (but a NIC
/// takes the MAC of the spec), a new device gets the lowest free address, and a removed device
/// frees its address. `running` has the machine's current addresses: a new device avoids them as
/// far as there is room.
pub fn reallocate(
    spec: &VmSpec,
    old: &Hardware,
    running: &Hardware,
    mut chosen: impl FnMut(&Nic) -> Mac,
) -> Hardware {
    let mut new = Hardware {
        disk_slots: BTreeMap::new(),
        nics: BTreeMap::new(),
        share_slots: BTreeMap::new(),
        processor: processor(&spec.processor, [old, running]),
        ..old.clone()
    };
    for known in [old, running] {
        for share in &spec.shares {
            let name = share.name.as_str();
            let slot = known.share_slots.get(name);
            let free = slot.filter(|slot| !taken(&[&new]).contains(slot));
            if let (false, Some(slot)) = (new.share_slots.contains_key(name), free) {
                new.share_slots.insert(name.to_owned(), *slot);
            }
        }
        for disk in &spec.disks {
            let name = disk.name.as_str();
            let slot = known.disk_slots.get(name);
            // Earlier daemons gave these slots to disks.
            let slot = slot.filter(|slot| !spec.has_channels() || **slot != CHANNELS_SLOT);
            let slot = slot.filter(|slot| spec.vsock.is_none() || **slot != VSOCK_SLOT);
            let slot = slot.filter(|slot| spec.watchdog.is_none() || **slot != WATCHDOG_SLOT);
            let free = slot.filter(|slot| !taken(&[&new]).contains(slot) && disk.bus.has(**slot));
            if let (false, Some(slot)) = (new.disk_slots.contains_key(name), free) {
                new.disk_slots.insert(name.to_owned(), *slot);
            }
        }
        for nic in &spec.nics {
            let name = nic.name.as_str();
            let known = known.nics.get(name);
            let free = known.filter(|nic| !taken(&[&new]).contains(&nic.slot)).cloned();
            if let (false, Some(mut known)) = (new.nics.contains_key(name), free) {
                if let Some(mac) = nic.mac {
                    known.mac = mac.octets().to_vec();
                }
                new.nics.insert(name.to_owned(), known);
            }
        }
    }
    for disk in &spec.disks {
        let name = disk.name.to_string();
        let slot = free_slot(disk.bus, &[&new, running]).or_else(|| free_slot(disk.bus, &[&new]));
        if let (false, Some(slot)) = (new.disk_slots.contains_key(&name), slot) {
            new.disk_slots.insert(name, slot);
        }
    }
    for nic in &spec.nics {
        let name = nic.name.to_string();
        if new.nics.contains_key(&name) {
            continue;
        }
        let slot = free_nic_slot(&[&new, running]).or_else(|| free_nic_slot(&[&new]));
        if let Some(slot) = slot {
            let mac = nic.mac.unwrap_or_else(|| chosen(nic)).octets().to_vec();
            let nic = NicHardware {
                slot,
                mac,
                ..NicHardware::default()
            };
            new.nics.insert(name, nic);
        }
    }
    for share in &spec.shares {
        let name = share.name.to_string();
        let slot = free_share_slot(&[&new, running]).or_else(|| free_share_slot(&[&new]));
        if let (false, Some(slot)) = (new.share_slots.contains_key(&name), slot) {
            new.share_slots.insert(name, slot);
        }
    }
    new
}

/// Processor of the guest: the known one, unless it is of another spec.
fn processor(spec: &Processor, known: [&Hardware; 2]) -> Option<ProcessorRecord> {
    let texts = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
    if spec.model == Model::Host {
        return None;
    }
    let new = ProcessorRecord {
        model: spec.model.name().to_owned(),
        add: texts(&spec.add),
        remove: texts(&spec.remove),
        features: texts(&spec.features()),
    };
    let mut known = known
        .into_iter()
        .filter_map(|hardware| hardware.processor.as_ref());
    let same = known.find(|it| (&it.model, &it.add, &it.remove) == (&new.model, &new.add, &new.remove));
    Some(same.cloned().unwrap_or(new))
}

/// Features that the node has to have for the guest.
pub fn needed_features(spec: &VmSpec, hardware: &Hardware) -> Vec<String> {
    match &hardware.processor {
        Some(processor) => processor.features.clone(),
        None => spec.processor.features().into_iter().map(str::to_owned).collect(),
    }
}

fn free_share_slot(hardware: &[&Hardware]) -> Option<u32> {
    let taken = taken(hardware);
    pci::further().rev().find(|slot| !taken.contains(slot))
}

fn free_nic_slot(hardware: &[&Hardware]) -> Option<u32> {
    let taken = taken(hardware);
    let mut slots = NIC_SLOTS.chain(pci::further().rev());
    slots.find(|slot| !taken.contains(slot))
}

/// The taps that are made for the NICs of a machine, by the NICs' names.
pub fn taps(uid: Uuid, hardware: &Hardware) -> BTreeMap<String, String> {
    let nics = hardware.nics.iter();
    let named = nics.map(|(name, nic)| (name.clone(), vmmd_network::tap_name(uid, nic.slot)));
    named.collect()
}

/// The slots of all disks, NICs and shares.
fn taken(hardware: &[&Hardware]) -> BTreeSet<u32> {
    let slots = hardware.iter().flat_map(|hardware| {
        let disks = hardware.disk_slots.values().copied();
        let nics = hardware.nics.values().map(|nic| nic.slot);
        disks.chain(nics).chain(hardware.share_slots.values().copied())
    });
    slots.collect()
}

/// The address of a NIC.
pub fn mac(hardware: &Hardware, nic: &str) -> Option<Mac> {
    let octets = hardware.nics.get(nic)?.mac.as_slice();
    Mac::try_from(<[u8; 6]>::try_from(octets).ok()?).ok()
}

/// The end of a NIC on the node, for [`vmmd_network::open_tap`]; `None` for a NIC without a place in the machine.
pub fn nic_end(uid: Uuid, hardware: &Hardware, nic: &str) -> Option<NicEnd> {
    let placed = hardware.nics.get(nic)?;
    Some(NicEnd {
        mac: mac(hardware, nic)?,
        tap: vmmd_network::tap_name(uid, placed.slot),
        plugged: false,
        pod_address: Some(placed.pod_address.into()).filter(|address: &Ipv4Addr| !address.is_unspecified()),
    })
}

/// Puts it together, with the descriptors in the order in which the message names them.
pub fn assemble(
    uid: Uuid,
    name: &str,
    spec: &VmSpec,
    hardware: &Hardware,
    parts: Parts,
) -> (MachineSpec, Vec<OwnedFd>) {
    let mut fds = Descriptors::default();
    let Files {
        kernel,
        initrd,
        cmdline,
        firmware,
        disks,
    } = parts.files;
    let machine = MachineSpec {
        name: name.to_owned(),
        uuid: spec.smbios.uuid.unwrap_or(uid).as_bytes().to_vec(),
        smbios: Some(convert::smbios(&spec.smbios)),
        clock_offsets: parts.clock_offsets,
        vcpus: spec.topology.cores(),
        processor: convert::processor(&spec.processor, needed_features(spec, hardware)),
        memory_bytes: spec.memory_bytes,
        memory_shared: spec.shares_memory(),
        kvm_fd: fds.add(parts.kvm),
        rng_fd: fds.add(parts.random),
        rng_pci_slot: hardware.rng_slot,
        kernel: kernel.map(|kernel| vmm::Kernel {
            kernel_fd: fds.add(kernel),
            initrd_fd: initrd.map(|fd| fds.add(fd)),
            cmdline,
        }),
        firmware: firmware.map(|firmware| vmm::Firmware {
            code_fd: fds.add(firmware.code.into()),
            variables_fd: firmware.variables.map(|file| fds.add(file.into())),
            menu_seconds: match spec.boot {
                Boot::Firmware { menu_seconds, .. } => menu_seconds,
                Boot::Linux { .. } | Boot::Disk { .. } => 0,
            },
        }),
        serial_log_fd: Some(fds.add(parts.serial.0)),
        serial_log_old_fd: Some(fds.add(parts.serial.1)),
        disks: spec
            .disks
            .iter()
            .zip(disks)
            .map(|(disk, opened)| wire_disk(&mut fds, hardware, disk, opened))
            .collect(),
        nics: spec
            .nics
            .iter()
            .zip(parts.taps)
            .map(|(nic, tap)| wire_nic(&mut fds, hardware, nic, tap))
            .collect(),
        shares: spec
            .shares
            .iter()
            .zip(parts.shares)
            .map(|(share, socket)| wire_share(&mut fds, hardware, share, socket))
            .collect(),
        rate_groups: spec.rate_groups.iter().map(Into::into).collect(),
        huge_page_bytes: spec.memory.huge_pages.map_or(0, HugePages::bytes),
        prefault: spec.memory.prefault,
        mergeable: spec.memory.mergeable,
        numa_node: spec.memory.numa_node,
        free_huge_pages: parts.free_huge_pages,
        balloon: spec
            .balloon
            .map(|balloon| convert::balloon(&balloon, BALLOON_SLOT, spec.memory_bytes)),
        on_crash: vmm::OnCrash::from(spec.on_crash).into(),
        sync_clock: spec.clock == ClockOnResume::Sync,
        display: spec.display.map(|display| {
            let (vnc_fd, vnc_view_fd) = parts.vnc.map(|(all, view)| (fds.add(all), fds.add(view))).unzip();
            vmm::Display {
                vnc_fd,
                vnc_view_fd,
                ..convert::display(&display, DISPLAY_SLOTS)
            }
        }),
        console: spec.virtio_console.then(|| vmm::Console {
            pci_slot: CONSOLE_SLOT,
            socket_fd: parts.hvc.map(|fd| fds.add(fd)),
        }),
        tpm: parts.tpm.map(|(data, control)| vmm::Tpm {
            data_fd: fds.add(data),
            control_fd: fds.add(control),
        }),
        ignition: spec.ignition().to_vec(),
        watchdog: spec.watchdog.map(|action| vmm::Watchdog {
            pci_slot: WATCHDOG_SLOT,
            action: vmm::WatchdogAction::from(action).into(),
        }),
        vsock: spec.vsock.map(|vsock| vmm::Vsock {
            pci_slot: VSOCK_SLOT,
            cid: vsock.cid,
        }),
        channels: spec.has_channels().then(|| vmm::Channels {
            pci_slot: CHANNELS_SLOT,
            channels: parts
                .channels
                .into_iter()
                .map(|(name, fd)| vmm::Channel {
                    name,
                    socket_fd: fds.add(fd),
                })
                .collect(),
        }),
    };
    (machine, fds.0)
}

/// A disk on the bus SATA is not hot-plugged.
pub fn no_hot_plug(what: &str, disk: &str) -> Failure {
    let message = format!(
        "disk \"{disk}\" is on DISK_BUS_SATA, and is {what} only while the VM is stopped: stop the VM first"
    );
    Failure::precondition("DISK_NOT_HOT_PLUGGABLE", message)
}

/// Description of a hot-plugged disk for the `vmm`, with its descriptors.
pub fn plug(hardware: &Hardware, disk: &Disk, opened: OpenDisk) -> (vmm::Disk, Vec<OwnedFd>) {
    let mut fds = Descriptors::default();
    let wire = wire_disk(&mut fds, hardware, disk, opened);
    (wire, fds.0)
}

/// The same of a NIC.
pub fn plug_nic(hardware: &Hardware, nic: &Nic, tap: Tap) -> (vmm::Nic, Vec<OwnedFd>) {
    let mut fds = Descriptors::default();
    let wire = wire_nic(&mut fds, hardware, nic, tap);
    (wire, fds.0)
}

/// The same of a share, with the connection to its process.
pub fn plug_share(hardware: &Hardware, share: &Share, socket: OwnedFd) -> (vmm::Share, Vec<OwnedFd>) {
    let mut fds = Descriptors::default();
    let wire = wire_share(&mut fds, hardware, share, socket);
    (wire, fds.0)
}

fn wire_share(fds: &mut Descriptors, hardware: &Hardware, share: &Share, socket: OwnedFd) -> vmm::Share {
    let slot = hardware.share_slots.get(share.name.as_str());
    vmm::Share {
        name: share.name.to_string(),
        tag: share.tag.clone(),
        pci_slot: slot.copied().unwrap_or_default(),
        fd: fds.add(socket),
    }
}

fn wire_nic(fds: &mut Descriptors, hardware: &Hardware, nic: &Nic, tap: Tap) -> vmm::Nic {
    let hardware = hardware.nics.get(nic.name.as_str()).cloned().unwrap_or_default();
    let mut queues = tap.queues.into_iter().map(|fd| fds.add(fd));
    vmm::Nic {
        fd: queues.next().unwrap_or(u32::MAX),
        further_fds: queues.collect(),
        vhost_fds: tap.vhosts.into_iter().map(|fd| fds.add(fd)).collect(),
        mac: hardware.mac,
        pci_slot: hardware.slot,
        mtu: nic.mtu_on(tap.mtu),
        ..convert::nic(nic)
    }
}

fn wire_disk(fds: &mut Descriptors, hardware: &Hardware, disk: &Disk, opened: OpenDisk) -> vmm::Disk {
    let slot = hardware.disk_slots.get(disk.name.as_str());
    let (pci_slot, sata_port) = convert::disk_address(slot.copied().unwrap_or_default());
    let fd = match disk.source {
        Source::Empty => 0,
        _ => fds.add(opened.fd),
    };
    vmm::Disk {
        fd,
        pci_slot,
        sata_port,
        backing: opened
            .backing
            .into_iter()
            .map(|(fd, format)| vmm::BackingImage {
                fd: fds.add(fd),
                format: vmm::ImageFormat::from(format).into(),
            })
            .collect(),
        discard_granularity_bytes: opened.discard_granularity,
        ..convert::disk(disk, opened.format)
    }
}

/// The lowest address that is free for another disk on that bus in all of these.
pub fn free_slot(bus: Bus, hardware: &[&Hardware]) -> Option<u32> {
    let taken = taken(hardware);
    let free = |slot: &u32| !taken.contains(slot);
    match bus {
        Bus::Virtio => DISK_SLOTS.chain(pci::further()).find(free),
        Bus::Sata { .. } => pci::SATA_PORTS.clone().find(free),
    }
}

#[derive(Default)]
struct Descriptors(Vec<OwnedFd>);

impl Descriptors {
    fn add(&mut self, fd: OwnedFd) -> u32 {
        self.0.push(fd);
        u32::try_from(self.0.len() - 1).unwrap_or(u32::MAX)
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use vmm_protocol::machine::Machine;
    use vmmd_api::v1;
    use vmmd_spec::{disk::Format, resources::MemoryOptions, vsock::Vsock};

    use super::*;

    /// A spec with as many disks and NICs as bus 0 has room for.
    fn full() -> VmSpec {
        of(16, 8)
    }

    fn of(disks: usize, nics: usize) -> VmSpec {
        let disks = (0..disks).map(|index| v1::DiskSpec {
            name: format!("disk{index}"),
            source: Some(v1::disk_spec::Source::Path(format!("/d{index}"))),
            format: v1::DiskFormat::Raw.into(),
            ..Default::default()
        });
        let nics = (0..nics).map(|index| v1::NicSpec {
            name: format!("eth{index}"),
            attachment: Some(v1::nic_spec::Attachment::Bridge("br0".into())),
            ..Default::default()
        });
        let linux = v1::LinuxBoot {
            kernel: "/k".into(),
            initrd: "/i".into(),
            cmdline: "console=ttyS0".into(),
        };
        let wire = v1::VmSpec {
            cpu: Some(v1::CpuSpec {
                cores: 2,
                ..Default::default()
            }),
            memory: Some(v1::MemorySpec {
                size_bytes: 256 << 20,
                backing: v1::MemoryBacking::Shared.into(),
                huge_pages: v1::HugePages::HugePages2m.into(),
                prefault: true,
                numa_node: Some(0),
                ..Default::default()
            }),
            boot: Some(v1::BootSpec {
                source: Some(v1::boot_spec::Source::Linux(linux)),
            }),
            disks: disks.collect(),
            nics: nics.collect(),
            ..Default::default()
        };
        VmSpec::try_from(&wire).unwrap()
    }

    fn null() -> OwnedFd {
        File::open("/dev/null").unwrap().into()
    }

    fn open_disk(below: usize) -> OpenDisk {
        OpenDisk {
            fd: null(),
            discard_granularity: None,
            format: Format::Qcow2,
            backing: (0..below).map(|_| (null(), Format::Raw)).collect(),
            ids: Vec::new(),
        }
    }

    #[test]
    fn plugged_disk_takes_the_lowest_free_slot() {
        let mut spec = full();
        let disk = spec.disks.remove(3);
        spec.disks.truncate(12);
        let mut hardware = allocate(&spec, |_| Mac::local([2; 6]));
        assert_eq!(free_slot(Bus::Virtio, &[&hardware]), Some(22));
        hardware.disk_slots.remove("disk5");
        let slot = free_slot(Bus::Virtio, &[&hardware]).unwrap();
        hardware.disk_slots.insert(disk.name.to_string(), slot);
        let (wire, fds) = plug(&hardware, &disk, open_disk(2));
        assert_eq!((wire.name.as_str(), wire.pci_slot, wire.fd), ("disk3", slot, 0));
        let below: Vec<_> = wire.backing.iter().map(|image| image.fd).collect();
        assert_eq!((below, fds.len()), (vec![1, 2], 3));
        hardware.disk_slots.insert("more".into(), 22);
        assert_eq!(
            free_slot(Bus::Virtio, &[&hardware]),
            Some(33),
            "the first of the next bus"
        );
    }

    #[test]
    fn largest_vms_make_machines_that_the_other_side_accepts() {
        for (disks, nics) in [(64, 0), (0, 64), (16, 48), (56, 8), (32, 32), (60, 4)] {
            let spec = of(disks, nics);
            let mut last = 0;
            let hardware = allocate(&spec, |_| {
                last += 1;
                Mac::local([2, 0, 0, 0, last, 0])
            });
            let tap = || Tap {
                queues: vec![null()],
                vhosts: vec![null()],
                mtu: 1500,
            };
            let parts = Parts {
                kvm: null(),
                random: null(),
                files: Files {
                    kernel: Some(null()),
                    initrd: Some(null()),
                    cmdline: String::new(),
                    firmware: None,
                    disks: (0..disks).map(|_| open_disk(6)).collect(),
                },
                taps: (0..nics).map(|_| tap()).collect(),
                serial: (null(), null()),
                vnc: Some((null(), null())),
                hvc: Some(null()),
                channels: vec![("org.qemu.guest_agent.0".to_owned(), null())],
                shares: spec.shares.iter().map(|_| null()).collect(),
                tpm: Some((null(), null())),
                clock_offsets: Vec::new(),
                free_huge_pages: Some(7),
            };
            let (machine, fds) = assemble(Uuid::new_v4(), "web", &spec, &hardware, parts);
            assert!(fds.len() <= vmm_protocol::wire::MAX_FDS);
            let machine = Machine::new(&machine, fds.len()).unwrap();
            assert_eq!((machine.disks.len(), machine.nics.len()), (disks, nics));
            let memory = MemoryOptions {
                free_huge_pages: Some(7),
                ..spec.memory
            };
            assert_eq!((machine.memory, machine.memory_shared), (memory, true));
            if nics > 1 {
                assert_eq!(machine.nics[1].mac, mac(&hardware, "eth1").unwrap());
            }
        }
    }

    #[test]
    fn shares_are_on_the_further_buses_and_keep_their_places() {
        let share = |index| {
            let wire = v1::ShareSpec {
                name: format!("share{index}"),
                path: format!("/s{index}"),
                ..Default::default()
            };
            Share::new(&mut vmmd_spec::Violations::default(), "", &wire).unwrap()
        };
        let mut spec = of(0, 48);
        spec.shares = (0..16).map(share).collect();
        let mut last = 0;
        let mut mac = |_: &Nic| {
            last += 1;
            Mac::local([2, 0, 0, 0, last, 0])
        };
        let hardware = allocate(&spec, &mut mac);
        let slots: BTreeSet<_> = hardware.share_slots.values().copied().collect();
        assert_eq!(slots.len(), 16);
        assert!(slots.iter().all(|slot| pci::is_further(*slot)));
        assert!(hardware.nics.values().all(|nic| !slots.contains(&nic.slot)));
        spec.shares.remove(3);
        let fewer = reallocate(&spec, &hardware, &hardware, &mut mac);
        spec.shares.push(share(16));
        let other = reallocate(&spec, &fewer, &fewer, &mut mac);
        for share in spec
            .shares
            .iter()
            .filter(|share| share.name.as_str() != "share16")
        {
            let name = share.name.as_str();
            assert_eq!(other.share_slots[name], hardware.share_slots[name], "{name}");
        }
        assert_eq!(other.share_slots["share16"], hardware.share_slots["share3"]);
    }

    #[test]
    fn disks_and_nics_beyond_bus_0_fill_the_others_from_both_ends() {
        let hardware = allocate(&of(18, 10), |_| Mac::local([2; 6]));
        let disks: Vec<u32> = (0..18)
            .map(|disk| hardware.disk_slots[&format!("disk{disk}")])
            .collect();
        let nics: Vec<u32> = (0..10)
            .map(|nic| hardware.nics[&format!("eth{nic}")].slot)
            .collect();
        assert_eq!(disks, (10..23).chain([33, 34, 35, 36, 37]).collect::<Vec<_>>());
        assert_eq!(nics, (2..10).chain([95, 94]).collect::<Vec<_>>());
    }

    #[test]
    fn addresses_depend_on_the_kind_so_that_a_new_disk_moves_no_nic() {
        let mut spec = full();
        let before = allocate(&spec, |_| Mac::local([2; 6]));
        spec.disks.truncate(1);
        let after = allocate(&spec, |_| Mac::local([2; 6]));
        assert_eq!(before.nics, after.nics);
        assert_eq!(before.disk_slots["disk0"], after.disk_slots["disk0"]);
    }

    proptest::proptest! {
        /// Over any history of a VM, a remaining device keeps its address and no two devices share
        /// one.
        #[test]
        fn addresses_never_move_and_never_clash(
            rounds in proptest::collection::vec((proptest::bits::u64::ANY, proptest::bits::u64::ANY, 0..=64_usize), 1..8)
        ) {
            let mut next = 0;
            let mut hardware = Hardware::default();
            let all = of(64, 0);
            for (disks, nics, most_disks) in rounds {
                let mut spec = all.clone();
                spec.disks.retain(|disk| disks >> disk.name.as_str()[4..].parse::<u32>().unwrap() & 1 == 1);
                spec.disks.truncate(most_disks);
                let nic = |name: &str| vmmd_spec::vm::nic(
                    &mut vmmd_spec::Violations::default(),
                    "nic",
                    &v1::NicSpec {
                        name: name.into(),
                        attachment: Some(v1::nic_spec::Attachment::Bridge("br0".into())),
                        ..v1::NicSpec::default()
                    },
                ).unwrap();
                spec.nics = (0..64).filter(|bit| nics >> bit & 1 == 1).take(64 - spec.disks.len()).map(|bit| nic(&format!("nic{bit}"))).collect();
                let new = reallocate(&spec, &hardware, &hardware, |_| {
                    next += 1;
                    Mac::local([2, 0, 0, 0, next, 0])
                });
                proptest::prop_assert_eq!(new.disk_slots.len(), spec.disks.len());
                proptest::prop_assert_eq!(new.nics.len(), spec.nics.len());
                for (name, slot) in &hardware.disk_slots {
                    proptest::prop_assert!(new.disk_slots.get(name).is_none_or(|new| new == slot));
                }
                for (name, nic) in &hardware.nics {
                    proptest::prop_assert!(new.nics.get(name).is_none_or(|new| new == nic));
                }
                let slots: Vec<_> = new.disk_slots.values().copied().chain(new.nics.values().map(|nic| nic.slot)).collect();
                let different: BTreeSet<_> = slots.iter().collect();
                proptest::prop_assert_eq!(different.len(), slots.len());
                let reserved = [RNG_SLOT, WATCHDOG_SLOT, VSOCK_SLOT, CHANNELS_SLOT, BALLOON_SLOT, CONSOLE_SLOT];
                proptest::prop_assert!(slots.iter().all(|slot| pci::PciSlot::try_from(*slot).is_ok() && !reserved.contains(slot)));
                hardware = new;
            }
        }
    }

    #[test]
    fn a_new_disk_does_not_go_where_the_machine_still_has_one() {
        let mut spec = full();
        spec.disks.truncate(2);
        let running = allocate(&spec, |_| Mac::local([2; 6]));
        let removed = spec.disks.remove(0);
        let without = reallocate(&spec, &running, &running, |_| Mac::local([2; 6]));
        let mut more = full().disks.remove(5);
        more.read_only = true;
        spec.disks.push(more);
        let with = reallocate(&spec, &without, &running, |_| Mac::local([2; 6]));
        assert_eq!((with.disk_slots["disk1"], with.disk_slots["disk5"]), (11, 12));
        // It comes back while the machine still has it.
        spec.disks.push(removed);
        let again = reallocate(&spec, &without, &running, |_| Mac::local([2; 6]));
        assert_eq!(again.disk_slots["disk0"], 10);
    }

    #[test]
    fn disk_that_changes_its_bus_gets_another_address() {
        let mut spec = full();
        let before = allocate(&spec, |_| Mac::local([2; 6]));
        let cdrom = Bus::Sata { cdrom: true };
        (spec.disks[2].bus, spec.disks[5].bus) = (Bus::Sata { cdrom: false }, cdrom);
        let after = reallocate(&spec, &before, &before, |_| Mac::local([2; 6]));
        let of = |hardware: &Hardware, name: &str| hardware.disk_slots[name];
        assert_eq!((of(&after, "disk2"), of(&after, "disk5")), (96, 97));
        assert_eq!(of(&after, "disk3"), of(&before, "disk3"));
        assert_eq!(free_slot(cdrom, &[&after]), Some(98));
        let (wire, _) = plug(&after, &spec.disks[5], open_disk(0));
        assert_eq!((wire.pci_slot, wire.sata_port, wire.cdrom), (0, Some(1), true));
        spec.disks[2].bus = Bus::Virtio;
        let again = reallocate(&spec, &after, &after, |_| Mac::local([2; 6]));
        assert_eq!((of(&again, "disk2"), of(&again, "disk5")), (12, 97));
    }

    #[test]
    fn disk_in_the_slot_of_another_device_moves() {
        let mut spec = full();
        spec.disks.truncate(2);
        let mut old = allocate(&spec, |_| Mac::local([2; 6]));
        old.disk_slots.insert("disk1".to_owned(), CHANNELS_SLOT);
        let same = reallocate(&spec, &old, &old, |_| Mac::local([2; 6]));
        assert_eq!(same.disk_slots, old.disk_slots);
        spec.guest_agent = true;
        let moved = reallocate(&spec, &old, &old, |_| Mac::local([2; 6]));
        assert_eq!(moved.disk_slots["disk0"], old.disk_slots["disk0"]);
        assert_ne!(moved.disk_slots["disk1"], CHANNELS_SLOT);
        old.disk_slots.insert("disk1".to_owned(), VSOCK_SLOT);
        assert_eq!(
            reallocate(&spec, &old, &old, |_| Mac::local([2; 6])).disk_slots,
            old.disk_slots
        );
        spec.vsock = Some(Vsock { cid: 3 });
        let moved = reallocate(&spec, &old, &old, |_| Mac::local([2; 6]));
        assert_ne!(moved.disk_slots["disk1"], VSOCK_SLOT);
    }

    #[test]
    fn processor_of_a_model_stays_until_its_spec_changes() {
        let mut spec = full();
        let made = |spec: &VmSpec, old: &Hardware| reallocate(spec, old, old, |_| Mac::local([2; 6]));
        assert_eq!(made(&spec, &Hardware::default()).processor, None);
        assert_eq!(convert::processor(&spec.processor, Vec::new()), None);
        spec.processor.model = Model::V3;
        spec.processor.add = vec!["aes"];
        let mut hardware = made(&spec, &Hardware::default());
        let first = needed_features(&spec, &hardware);
        assert!(first.contains(&"aes".to_owned()) && first.contains(&"avx2".to_owned()));
        // An earlier daemon gave the model fewer features.
        let record = hardware.processor.as_mut().unwrap();
        record.features.retain(|name| name != "movbe");
        let same = made(&spec, &hardware);
        assert_eq!(same.processor, hardware.processor);
        let wire = convert::processor(&spec.processor, needed_features(&spec, &same)).unwrap();
        assert!(wire.model == "x86-64-v3" && !wire.features.contains(&"movbe".to_owned()));
        spec.processor.remove = vec!["fma"];
        let other = needed_features(&spec, &made(&spec, &hardware));
        assert!(other.contains(&"movbe".to_owned()) && !other.contains(&"fma".to_owned()));
        spec.processor.model = Model::Host;
        assert_eq!(made(&spec, &hardware).processor, None);
        assert_eq!(needed_features(&spec, &Hardware::default()), ["aes"]);
    }

    #[test]
    fn a_mac_of_the_manifest_is_kept() {
        let mut spec = full();
        spec.nics[0].mac = Some("52:54:00:12:34:56".parse().unwrap());
        let hardware = allocate(&spec, |_| Mac::local([2; 6]));
        assert_eq!(mac(&hardware, "eth0").unwrap().to_string(), "52:54:00:12:34:56");
        assert_eq!(mac(&hardware, "none"), None);
    }
}
