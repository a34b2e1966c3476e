//! The validated configuration of a machine: a [`vmm::MachineSpec`] in which every fd index names
//! one of the descriptors that came with it, and every PCI slot is in range and used once.

mod disk;

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
};

use uuid::Uuid;
use vmmd_spec::{
    Violations, channel,
    cloud_init::MAX_DATA,
    cpu::{Model, features},
    disk::{BootOrder, RateLimit},
    display::is_size,
    keyboard::Layout,
    nic::{self, Mac, NicSwitches},
    pci::PciSlot,
    policy::OnCrash,
    resources::{HugePages, MAX_NUMA_NODE, MemoryOptions},
    share::{MAX_SHARES, MAX_TAG},
    smbios::{self, OemString, Smbios, is_text},
    topology::Topology,
    vm::{MAX_CMDLINE, MAX_DISKS_AND_NICS, MAX_MEMORY, MAX_MENU_SECONDS, MEMORY_STEP, MIN_MEMORY},
    vsock,
};

use self::disk::disk;
use crate::{convert, vmm};

pub use self::disk::{BackingImage, Disk, DiskLimit, DiskPlace, MAX_BACKING};

/// Index into the list of descriptors that came with the message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FdIndex(pub usize);

/// Configuration of a machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Machine {
    /// The VM's name, for messages.
    pub name: String,
    /// The SMBIOS UUID.
    pub uuid: Uuid,
    /// Virtual CPUs.
    pub topology: Topology,
    /// Processor that the guest sees.
    pub processor: Processor,
    /// Guest RAM in bytes.
    pub memory_bytes: u64,
    /// Backed by a memfd instead of private memory.
    pub memory_shared: bool,
    /// How it is got from the host.
    pub memory: MemoryOptions,
    /// /dev/kvm.
    pub kvm: FdIndex,
    /// How the guest begins.
    pub boot: Boot,
    /// Disks in order.
    pub disks: Vec<Disk>,
    /// Limits that several disks share, by name.
    pub rate_groups: BTreeMap<String, RateLimit>,
    /// NICs in order.
    pub nics: Vec<Nic>,
    /// The entropy device.
    pub rng: Rng,
    /// The serial log and the file that takes its older half.
    pub serial_log: Option<(FdIndex, FdIndex)>,
    /// The balloon, if it has one.
    pub balloon: Option<Balloon>,
    /// The screen, if it has one.
    pub display: Option<Display>,
    /// The virtio-console, if it has one.
    pub console: Option<Console>,
    /// Channels to programs of the guest, if it has some.
    pub channels: Option<Channels>,
    /// Directories of the node in order.
    pub shares: Vec<Share>,
    /// Action on a triple fault.
    pub on_crash: OnCrash,
    /// After a pause kvmclock continues with the host's real time.
    pub sync_clock: bool,
    /// Texts of the SMBIOS tables; empty ones are the default. The UUID is [`Machine::uuid`].
    pub smbios: Smbios,
    /// Difference of the real-time clock to UTC: from a time on, in seconds of Unix time, so many seconds.
    pub clock_offsets: Vec<(u64, i32)>,
    /// The TPM, if it has one.
    pub tpm: Option<Tpm>,
    /// The socket device, if it has one.
    pub vsock: Option<Vsock>,
    /// Configuration of Ignition, of a machine with firmware; empty for none.
    pub ignition: Vec<u8>,
    /// Slot of the watchdog, if it has one.
    pub watchdog: Option<PciSlot>,
}

/// A socket device (AF_VSOCK).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Vsock {
    /// Where it is.
    pub slot: PciSlot,
    /// CID of the guest.
    pub cid: u32,
}

/// A TPM, served by swtpm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tpm {
    /// Socket for the TPM's commands.
    pub data: FdIndex,
    /// Socket for swtpm's control channel.
    pub control: FdIndex,
}

/// Processor that the guest sees.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Processor {
    /// Model.
    pub model: Model,
    /// All features of the guest. With [`Model::Host`], only the features that the host must have.
    pub features: Vec<&'static str>,
    /// With [`Model::Host`]: features that the guest does not have.
    pub without: Vec<&'static str>,
    /// It has Hyper-V's interface.
    pub hyperv: bool,
}

/// How the guest of a machine begins.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Boot {
    /// A kernel is loaded into RAM.
    Kernel {
        /// Kernel image.
        kernel: FdIndex,
        /// Initial RAM disk.
        initrd: Option<FdIndex>,
        /// Kernel command line.
        cmdline: String,
    },
    /// Firmware boots from the disks and NICs, in their order.
    Firmware {
        /// Its code.
        code: FdIndex,
        /// The variables of UEFI firmware; absent for a BIOS.
        variables: Option<FdIndex>,
        /// Time for the boot menu, at most [`MAX_MENU_SECONDS`].
        menu_seconds: u32,
    },
}

/// The balloon.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Balloon {
    /// Where it is.
    pub slot: PciSlot,
    /// The guest reports free pages.
    pub free_page_reporting: bool,
    /// Initial size of the balloon, in bytes: whole pages of 4 KiB, at most the machine's memory.
    pub target_bytes: u64,
}

/// A virtio-console.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Console {
    /// Where it is.
    pub slot: PciSlot,
    /// Socket for its clients.
    pub socket: Option<FdIndex>,
}

/// Named channels to programs of the guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Channels {
    /// Where the device is.
    pub slot: PciSlot,
    /// Name and socket of each, at least one.
    pub channels: Vec<(String, FdIndex)>,
}

/// The screen, with a keyboard and a tablet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Display {
    /// Where the graphics adapter is.
    pub gpu: PciSlot,
    /// Where the keyboard is.
    pub keyboard: PciSlot,
    /// Where the tablet is.
    pub tablet: PciSlot,
    /// Width and height in pixels, within the limits of [`display`](vmmd_spec::display).
    pub size: (u32, u32),
    /// Layout of the guest's keyboard.
    pub layout: Layout,
    /// Socket for VNC clients.
    pub vnc: Option<FdIndex>,
    /// Socket for VNC clients that may only look.
    pub vnc_view: Option<FdIndex>,
}

/// Most rate groups of a machine.
pub const MAX_RATE_GROUPS: usize = 16;
/// Most channels of a machine. Each has two queues.
pub const MAX_CHANNELS: usize = channel::MAX_CHANNELS + 1;
/// Longest name of a channel in bytes. It fits a buffer of Linux's driver with much to spare.
pub const MAX_CHANNEL_NAME: usize = channel::MAX_NAME;
/// The channel that qemu-guest-agent opens.
pub const AGENT_CHANNEL: &str = channel::AGENT;
/// End of the PCI slots of bus 0.
const FIRST_BUS_END: u32 = 32;
/// Most changes of the real-time clock's difference to UTC.
pub const MAX_CLOCK_OFFSETS: usize = 64;
/// A NIC.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Nic {
    /// Unique in the machine, not empty.
    pub name: String,
    /// The queues of the tap: 1 to [`MAX_QUEUES`](nic::MAX_QUEUES).
    pub fds: Vec<FdIndex>,
    /// An open vhost-net for each queue, or none.
    pub vhosts: Vec<FdIndex>,
    /// It has a control queue.
    pub control: bool,
    /// Features that are not offered to the guest.
    pub without: NicSwitches,
    /// The link is up at first.
    pub link_up: bool,
    /// Limit on traffic to the guest. Operations are packets.
    pub receive_limit: Option<RateLimit>,
    /// Limit on traffic from the guest.
    pub transmit_limit: Option<RateLimit>,
    /// Its address.
    pub mac: Mac,
    /// Where it is.
    pub slot: PciSlot,
    /// Largest packet without the Ethernet header, in bytes (virtio 1.3, 5.1.4: 68 to 65,535).
    pub mtu: u16,
    /// Position in the boot order.
    pub boot_order: Option<BootOrder>,
}

/// A directory of the node, served by another process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Share {
    /// Unique in the machine, not empty.
    pub name: String,
    /// Mount tag in the guest: 1 to [`MAX_TAG`] bytes.
    pub tag: String,
    /// Connected to the process.
    pub fd: FdIndex,
    /// Where it is.
    pub slot: PciSlot,
}

/// The entropy device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rng {
    /// Where it is.
    pub slot: PciSlot,
    /// The random source.
    pub fd: FdIndex,
}

/// Descriptors and slots claimed by a spec; each may be claimed once.
struct Claims {
    found: Violations,
    fds: BTreeMap<u32, String>,
    available: usize,
    slots: BTreeSet<u32>,
}

impl Claims {
    fn add(&mut self, field: impl fmt::Display, wrong: impl fmt::Display) {
        self.found.add(field, wrong);
    }

    /// Records a violation for each repeated name.
    fn unique<'a>(&mut self, kind: &str, names: impl Iterator<Item = &'a String>) {
        let mut found = BTreeSet::new();
        for name in names {
            if !found.insert(name) {
                self.add(format_args!("{kind} {name}"), "two with that name");
            }
        }
    }

    fn of(fds: usize) -> Self {
        Self {
            found: Violations::default(),
            fds: BTreeMap::new(),
            available: fds,
            slots: BTreeSet::new(),
        }
    }

    fn fd(&mut self, field: &str, index: u32) -> FdIndex {
        let position = usize::try_from(index).unwrap_or(usize::MAX);
        if position >= self.available {
            let available = self.available;
            self.add(field, format_args!("descriptor {index} of {available} that came"));
        } else if let Some(other) = self.fds.insert(index, field.to_owned()) {
            self.found
                .add(field, format_args!("the same descriptor as {other}"));
        }
        FdIndex(position)
    }

    fn slot(&mut self, field: &str, number: u32) -> PciSlot {
        if !self.slots.insert(number) {
            self.found.add(field, format_args!("PCI slot {number} is taken"));
        }
        PciSlot::try_from(number).unwrap_or_else(|number| {
            let wrong = format_args!("must be 1 to 95 and no multiple of 32, is {number}");
            self.found.add(field, wrong);
            PciSlot::LAST
        })
    }
}

impl Machine {
    /// Validates `spec`, which came with `fds` descriptors.
    pub fn new(spec: &vmm::MachineSpec, fds: usize) -> Result<Self, Violations> {
        let mut claims = Claims::of(fds);
        let topology = Topology::for_cores(spec.vcpus).unwrap_or_else(|error| {
            claims.add("vcpus", error);
            Topology {
                sockets: 1,
                cores_per_socket: 1,
            }
        });
        let uuid = Uuid::from_slice(&spec.uuid).unwrap_or_else(|_| {
            claims.add("uuid", "must be 16 bytes");
            Uuid::nil()
        });
        let memory = spec.memory_bytes;
        if !(MIN_MEMORY..=MAX_MEMORY).contains(&memory) || !memory.is_multiple_of(MEMORY_STEP) {
            claims.add("memory_bytes", format_args!("unsupported size {memory}"));
        }
        let groups = spec.rate_groups.len();
        if spec.disks.len() + spec.nics.len() > MAX_DISKS_AND_NICS || groups > MAX_RATE_GROUPS {
            claims.add("disks, nics, rate_groups", "too many");
            return Err(claims.found);
        }
        let rate_groups = rate_groups(&mut claims, &spec.rate_groups);
        claims.unique("disk", spec.disks.iter().map(|disk| &disk.name));
        let serial_log = match (spec.serial_log_fd, spec.serial_log_old_fd) {
            (Some(current), Some(old)) => Some((
                claims.fd("serial_log_fd", current),
                claims.fd("serial_log_old_fd", old),
            )),
            (None, None) => None,
            _ => {
                claims.add("serial_log_fd", "goes with serial_log_old_fd");
                None
            }
        };
        let machine = Self {
            name: spec.name.clone(),
            uuid,
            topology,
            processor: processor(&mut claims.found, spec.processor.as_ref()),
            memory_bytes: memory,
            memory_shared: spec.memory_shared,
            memory: memory_options(&mut claims.found, spec),
            kvm: claims.fd("kvm_fd", spec.kvm_fd),
            boot: boot(&mut claims, spec),
            disks: spec
                .disks
                .iter()
                .map(|wire| {
                    disk(&mut claims, wire, topology, |group| {
                        rate_groups.contains_key(group)
                    })
                })
                .collect(),
            rate_groups,
            nics: spec.nics.iter().map(|wire| nic(&mut claims, wire)).collect(),
            rng: Rng {
                slot: claims.slot("rng_pci_slot", spec.rng_pci_slot),
                fd: claims.fd("rng_fd", spec.rng_fd),
            },
            serial_log,
            balloon: spec.balloon.as_ref().map(|wire| balloon(&mut claims, wire, spec)),
            display: spec.display.as_ref().map(|wire| display(&mut claims, wire)),
            console: spec.console.as_ref().map(|wire| Console {
                slot: claims.slot("console.pci_slot", wire.pci_slot),
                socket: wire.socket_fd.map(|index| claims.fd("console.socket_fd", index)),
            }),
            channels: spec.channels.as_ref().map(|wire| channels(&mut claims, wire)),
            shares: shares(&mut claims, spec),
            on_crash: on_crash(&mut claims.found, spec.on_crash),
            sync_clock: spec.sync_clock,
            smbios: smbios(&mut claims, spec.smbios.as_ref()),
            clock_offsets: clock_offsets(&mut claims, &spec.clock_offsets),
            tpm: spec.tpm.map(|wire| Tpm {
                data: claims.fd("tpm.data_fd", wire.data_fd),
                control: claims.fd("tpm.control_fd", wire.control_fd),
            }),
            ignition: spec.ignition.clone(),
            watchdog: spec.watchdog.map(|wire| {
                if vmm::WatchdogAction::try_from(wire.action).is_err() {
                    let unknown = format_args!("unknown value {}", wire.action);
                    claims.add("watchdog.action", unknown);
                }
                claims.slot("watchdog.pci_slot", wire.pci_slot)
            }),
            vsock: spec.vsock.map(|wire| {
                vsock::cid(&mut claims.found, "vsock.cid", wire.cid);
                Vsock {
                    slot: claims.slot("vsock.pci_slot", wire.pci_slot),
                    cid: wire.cid,
                }
            }),
        };
        if machine.ignition.len() > MAX_DATA {
            claims.add("ignition", format_args!("has more than {MAX_DATA} bytes"));
        }
        let on_sata = |disk: &Disk| matches!(disk.place, DiskPlace::Sata { .. });
        if machine.disks.iter().any(on_sata) && !matches!(machine.boot, Boot::Firmware { .. }) {
            claims.add("disks.sata_port", "only with firmware");
        }
        claims.found.or(machine)
    }
}

fn processor(found: &mut Violations, wire: Option<&vmm::Processor>) -> Processor {
    let Some(wire) = wire else {
        return Processor::default();
    };
    let model = Model::named(&wire.model).unwrap_or_else(|| {
        found.add("processor.model", format_args!("no model {:?}", wire.model));
        Model::Host
    });
    let mut known = |field: &str, names: &[String]| {
        let named = names.iter().filter_map(|name| {
            let feature = features::find(name);
            if feature.is_none() {
                found.add(field, format_args!("no feature {name:?}"));
            }
            feature.map(|feature| feature.name)
        });
        named.collect()
    };
    Processor {
        model,
        features: known("processor.features", &wire.features),
        without: known("processor.without", &wire.without),
        hyperv: wire.hyperv,
    }
}

impl Share {
    /// Validates a share that is plugged into a machine. `wire` came with `fds` descriptors. Does
    /// not check whether the machine already uses that slot or name.
    pub fn new(wire: &vmm::Share, fds: usize) -> Result<Self, Violations> {
        let mut claims = Claims::of(fds);
        let share = share(&mut claims, wire);
        claims.found.or(share)
    }
}

impl Nic {
    /// Validates a NIC that is plugged into a machine. `wire` came with `fds` descriptors. Does not
    /// check whether the machine already uses that slot or name.
    pub fn new(wire: &vmm::Nic, fds: usize) -> Result<Self, Violations> {
        let mut claims = Claims::of(fds);
        if wire.name.is_empty() {
            claims.add("nic", "has no name");
        }
        let nic = nic(&mut claims, wire);
        claims.found.or(nic)
    }
}

fn channels(claims: &mut Claims, wire: &vmm::Channels) -> Channels {
    let names = wire.channels.iter().map(|channel| &channel.name);
    claims.unique("channel", names);
    if wire.channels.is_empty() || wire.channels.len() > MAX_CHANNELS {
        claims.add("channels", format_args!("must be 1 to {MAX_CHANNELS}"));
    }
    let slot = claims.slot("channels.pci_slot", wire.pci_slot);
    let mut channel = |wire: &vmm::Channel| {
        if !(1..=MAX_CHANNEL_NAME).contains(&wire.name.len()) {
            claims.add(
                "channels.name",
                format_args!("must have 1 to {MAX_CHANNEL_NAME} bytes"),
            );
        }
        (wire.name.clone(), claims.fd("channels.socket_fd", wire.socket_fd))
    };
    let channels = wire.channels.iter().map(&mut channel).collect();
    Channels { slot, channels }
}

/// Validates the kernel or the firmware of a machine: it has one of them.
fn boot(claims: &mut Claims, spec: &vmm::MachineSpec) -> Boot {
    match (&spec.kernel, &spec.firmware) {
        (None, Some(firmware)) => Boot::Firmware {
            code: claims.fd("firmware.code_fd", firmware.code_fd),
            variables: firmware
                .variables_fd
                .map(|index| claims.fd("firmware.variables_fd", index)),
            menu_seconds: match firmware.menu_seconds {
                seconds @ 0..=MAX_MENU_SECONDS => seconds,
                seconds => {
                    let wrong = format_args!("at most {MAX_MENU_SECONDS}, are {seconds}");
                    claims.add("firmware.menu_seconds", wrong);
                    0
                }
            },
        },
        (kernel, firmware) => {
            if firmware.is_some() {
                claims.add("firmware", "goes without kernel");
            }
            let kernel = kernel.clone().unwrap_or_else(|| {
                claims.add("kernel", "must be given");
                vmm::Kernel::default()
            });
            if kernel.cmdline.len() > MAX_CMDLINE || kernel.cmdline.contains('\0') {
                claims.add("kernel.cmdline", "too long, or with NUL");
            }
            Boot::Kernel {
                kernel: claims.fd("kernel.kernel_fd", kernel.kernel_fd),
                initrd: kernel.initrd_fd.map(|index| claims.fd("kernel.initrd_fd", index)),
                cmdline: kernel.cmdline,
            }
        }
    }
}

fn smbios(claims: &mut Claims, wire: Option<&vmm::Smbios>) -> Smbios {
    let wire = wire.cloned().unwrap_or_default();
    let oem_strings: Option<Vec<_>> = wire.oem_strings.into_iter().map(OemString::new).collect();
    let oem_strings = oem_strings.filter(|strings| smbios::fit(strings));
    if oem_strings.is_none() {
        claims.add("smbios.oem_strings", "too many, too long, or with NUL");
    }
    let mut text = |text: String| {
        if !is_text(&text) {
            claims.add("smbios", format_args!("unsupported text {text:?}"));
        }
        text
    };
    Smbios {
        uuid: None,
        serial: text(wire.serial),
        manufacturer: text(wire.manufacturer),
        product: text(wire.product),
        version: text(wire.version),
        sku: text(wire.sku),
        family: text(wire.family),
        asset_tag: text(wire.asset_tag),
        oem_strings: oem_strings.unwrap_or_default(),
    }
}

fn clock_offsets(claims: &mut Claims, wire: &[vmm::ClockOffset]) -> Vec<(u64, i32)> {
    const DAY: u32 = 24 * 60 * 60;
    let ascends = wire.is_sorted_by(|one, other| one.from < other.from);
    let small = wire.iter().all(|offset| offset.seconds.unsigned_abs() <= DAY);
    if wire.len() > MAX_CLOCK_OFFSETS || !ascends || !small {
        let wrong = format_args!("at most {MAX_CLOCK_OFFSETS}, with ascending times, of a day at most");
        claims.add("clock_offsets", wrong);
        return Vec::new();
    }
    wire.iter().map(|offset| (offset.from, offset.seconds)).collect()
}

/// Records a violation for an unknown crash policy.
fn on_crash(found: &mut Violations, value: i32) -> OnCrash {
    match vmm::OnCrash::try_from(value) {
        Ok(vmm::OnCrash::Unspecified | vmm::OnCrash::Restart) => OnCrash::Restart,
        Ok(vmm::OnCrash::Stop) => OnCrash::Stop,
        Err(_) => {
            found.add("on_crash", format_args!("unknown value {value}"));
            OnCrash::default()
        }
    }
}

/// Options of the RAM. The sizes of pages and RAM must fit, and KSM merges neither huge nor shared pages.
fn memory_options(found: &mut Violations, spec: &vmm::MachineSpec) -> MemoryOptions {
    let huge_pages = match spec.huge_page_bytes {
        0 => None,
        bytes => match HugePages::of_bytes(bytes) {
            Some(size) if spec.memory_bytes.is_multiple_of(bytes) => Some(size),
            _ => {
                found.add(
                    "huge_page_bytes",
                    format_args!(
                        "no pages of {bytes} bytes for {} bytes of memory",
                        spec.memory_bytes
                    ),
                );
                None
            }
        },
    };
    if spec.mergeable && (huge_pages.is_some() || spec.memory_shared) {
        found.add("mergeable", "not with huge pages or shared memory");
    }
    if spec.numa_node.is_some_and(|node| node > MAX_NUMA_NODE) {
        found.add("numa_node", format_args!("at most {MAX_NUMA_NODE}"));
    }
    MemoryOptions {
        huge_pages,
        prefault: spec.prefault,
        mergeable: spec.mergeable,
        numa_node: spec.numa_node,
        free_huge_pages: spec.free_huge_pages,
    }
}

fn balloon(claims: &mut Claims, wire: &vmm::Balloon, spec: &vmm::MachineSpec) -> Balloon {
    let target = wire.target_bytes;
    if target > spec.memory_bytes || !target.is_multiple_of(4096) {
        claims.add("balloon.target_bytes", format_args!("unsupported size {target}"));
    }
    if spec.huge_page_bytes != 0 {
        claims.add(
            "balloon",
            "not with huge pages, which can't be given back in part",
        );
    }
    Balloon {
        slot: claims.slot("balloon.pci_slot", wire.pci_slot),
        free_page_reporting: wire.free_page_reporting,
        target_bytes: target,
    }
}

fn display(claims: &mut Claims, wire: &vmm::Display) -> Display {
    if !is_size(wire.width, wire.height) {
        let wrong = format_args!("unsupported size {} x {}", wire.width, wire.height);
        claims.add("display.width", wrong);
    }
    let layout = convert::layout(wire.layout).unwrap_or_else(|| {
        let wrong = format_args!("unknown layout {}", wire.layout);
        claims.add("display.layout", wrong);
        Layout::default()
    });
    let (vnc, vnc_view) = (wire.vnc_fd, wire.vnc_view_fd);
    Display {
        gpu: claims.slot("display.gpu_pci_slot", wire.gpu_pci_slot),
        keyboard: claims.slot("display.keyboard_pci_slot", wire.keyboard_pci_slot),
        tablet: claims.slot("display.tablet_pci_slot", wire.tablet_pci_slot),
        size: (wire.width, wire.height),
        layout,
        vnc: vnc.map(|index| claims.fd("display.vnc_fd", index)),
        vnc_view: vnc_view.map(|index| claims.fd("display.vnc_view_fd", index)),
    }
}

fn shares(claims: &mut Claims, spec: &vmm::MachineSpec) -> Vec<Share> {
    if spec.shares.len() > MAX_SHARES {
        claims.add("shares", "too many");
        return Vec::new();
    }
    if !spec.shares.is_empty() && !spec.memory_shared {
        claims.add("shares", "only with shared memory");
    }
    claims.unique("share", spec.shares.iter().map(|share| &share.name));
    spec.shares.iter().map(|wire| share(claims, wire)).collect()
}

fn share(claims: &mut Claims, wire: &vmm::Share) -> Share {
    let field = format!("share {}", wire.name);
    if wire.name.is_empty() {
        claims.add("share", "has no name");
    }
    if wire.tag.is_empty() || wire.tag.len() > MAX_TAG {
        claims.add(&field, format_args!("a tag has 1 to {MAX_TAG} bytes"));
    }
    Share {
        name: wire.name.clone(),
        tag: wire.tag.clone(),
        fd: claims.fd(&field, wire.fd),
        slot: claims.slot(&field, wire.pci_slot),
    }
}

fn rate_groups(claims: &mut Claims, wire: &[vmm::RateGroup]) -> BTreeMap<String, RateLimit> {
    let mut groups = BTreeMap::new();
    for group in wire {
        let limit = RateLimit::from(&group.limit.unwrap_or_default());
        if group.name.is_empty() {
            claims.add("rate_groups", "one has no name");
        } else if groups.insert(group.name.clone(), limit).is_some() {
            claims.add(format_args!("rate group {}", group.name), "two with that name");
        }
    }
    groups
}

/// The position of a device in the boot order. `slot` is the slot of a PCI device.
fn boot_order(claims: &mut Claims, field: &str, value: u32, slot: Option<u32>) -> Option<BootOrder> {
    let position = BootOrder::new(&mut claims.found, field, value)?;
    if slot.is_some_and(|slot| slot >= FIRST_BUS_END) {
        let wrong = "firmware boots from the first PCI bus alone, and the device is on another one: put it before other disks or NICs, \
                     or leave bootOrder out";
        claims.add(field, wrong);
    }
    Some(position)
}

fn nic(claims: &mut Claims, wire: &vmm::Nic) -> Nic {
    let field = format!("nic {}", wire.name);
    let octets = <[u8; 6]>::try_from(wire.mac.as_ref()).unwrap_or_default();
    let mac = Mac::try_from(octets).unwrap_or_else(|error| {
        claims.add(&field, error);
        Mac::local([0; 6])
    });
    let mtu = u16::try_from(wire.mtu)
        .ok()
        .filter(|mtu| *mtu >= 68)
        .unwrap_or_else(|| {
            claims.add(&field, format_args!("MTU must be 68 to 65535, is {}", wire.mtu));
            1500
        });
    let queues = wire.further_fds.len() + 1;
    let most = nic::MAX_QUEUES;
    if queues > most || queues > 1 && !wire.control_queue {
        let wrong =
            format_args!("at most {most} queues, and more than one only with a control queue, are {queues}");
        claims.add(&field, wrong);
    }
    let fds = std::iter::once(&wire.fd).chain(&wire.further_fds);
    let fds = fds.take(most).map(|index| claims.fd(&field, *index)).collect();
    let vhosts = wire.vhost_fds.len();
    if vhosts != 0 && vhosts != queues {
        let wrong = format_args!("as many vhost-net as queues, are {vhosts} for {queues}");
        claims.add(&field, wrong);
    }
    let vhosts = wire.vhost_fds.iter().take(most);
    let vhosts = vhosts.map(|index| claims.fd(&field, *index)).collect();
    Nic {
        vhosts,
        name: wire.name.clone(),
        fds,
        mac,
        slot: claims.slot(&field, wire.pci_slot),
        mtu,
        control: wire.control_queue,
        without: NicSwitches {
            checksum: wire.no_checksum,
            tso: wire.no_tso,
            uso: wire.no_uso,
            merge: wire.no_merge,
        },
        link_up: !wire.link_down,
        boot_order: boot_order(claims, &field, wire.boot_order, Some(wire.pci_slot)),
        receive_limit: wire.receive_limit.as_ref().map(RateLimit::from),
        transmit_limit: wire.transmit_limit.as_ref().map(RateLimit::from),
    }
}

#[cfg(test)]
mod tests;
