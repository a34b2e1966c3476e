//! The validated form of a VM's manifest.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Component, Path, PathBuf},
};

use vmmd_api::v1;

use super::{
    Violations,
    access::{self, AccessCredential},
    balloon::Balloon,
    channel,
    cloud_init::{CloudInit, SeedType},
    cpu::{CpuShare, Processor},
    credential,
    disk::{Bus, Disk, Limit, MAX_SATA, RateGroup, Source},
    display::Display,
    metadata::Metadata,
    name::Name,
    nic,
    pod::{self, PodUid},
    policy::{ClockOnResume, OnCrash, OnPanic, RunPolicy, WatchdogAction},
    probe::{self, Probes},
    resources::{self, CpuSet, MemoryOptions},
    share::{self, MAX_SHARES, Share},
    smbios::Smbios,
    topology::Topology,
    vsock::Vsock,
};

pub use self::interface::{Attachment, Nic, nic};

mod interface;

const MIB: u64 = 1 << 20;
/// Least guest RAM in bytes.
pub const MIN_MEMORY: u64 = 64 * MIB;
/// Least guest RAM of a VM that may boot through UEFI, in bytes.
pub const MIN_UEFI_MEMORY: u64 = 128 * MIB;
/// Most guest RAM in bytes.
pub const MAX_MEMORY: u64 = 4 << 40;
/// Guest RAM is a multiple of this many bytes.
pub const MEMORY_STEP: u64 = 2 * MIB;
/// The least that a guest can be left with by its balloon, in bytes: below it hardly anything runs.
pub const MIN_TARGET: u64 = 64 * MIB;
/// Longest kernel command line in bytes (Linux' COMMAND_LINE_SIZE on x86 is 2,048 with the final NUL).
pub const MAX_CMDLINE: usize = 2047;
/// Most disks and NICs of a VM together.
pub const MAX_DISKS_AND_NICS: usize = 64;
/// Most rate groups of a VM.
pub const MAX_RATE_GROUPS: usize = 16;
/// Longest name of a time zone in bytes.
pub const MAX_ZONE: usize = 64;
/// Longest name of a network interface in bytes (Linux' IFNAMSIZ less the final NUL).
pub const MAX_IFNAME: usize = 15;

/// A client's manifest of a VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Manifest {
    /// Name and metadata of the VM, kept beside its spec.
    pub metadata: Metadata,
    /// What is wanted.
    pub spec: VmSpec,
}

/// Specification of a VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VmSpec {
    /// CPUs and how they are laid out.
    pub topology: Topology,
    /// Share of the node's processors for each CPU.
    pub cpu: CpuShare,
    /// Processor that the guest sees.
    pub processor: Processor,
    /// The node's processors that it runs on; all when `None`.
    pub host_cpus: Option<CpuSet>,
    /// Guest RAM in bytes.
    pub memory_bytes: u64,
    /// How it is backed.
    pub backing: Backing,
    /// How the RAM is got.
    pub memory: MemoryOptions,
    /// What is booted.
    pub boot: Boot,
    /// Disks in the order of the manifest.
    pub disks: Vec<Disk>,
    /// NICs in the order of the manifest.
    pub nics: Vec<Nic>,
    /// Limits that several disks share.
    pub rate_groups: Vec<RateGroup>,
    /// When it is started without having been asked to.
    pub run_policy: RunPolicy,
    /// Action on a triple fault.
    pub on_crash: OnCrash,
    /// The action after a panic of the guest's kernel.
    pub on_panic: OnPanic,
    /// Time of the guest's clock after a pause.
    pub clock: ClockOnResume,
    /// Time zone of the real-time clock; empty for UTC.
    pub timezone: String,
    /// Identity and credentials in the SMBIOS tables.
    pub smbios: Smbios,
    /// The balloon, if it has one.
    pub balloon: Option<Balloon>,
    /// The screen, if it has one.
    pub display: Option<Display>,
    /// It has a virtio-console beside its serial port.
    pub virtio_console: bool,
    /// It has a channel to the agent in the guest.
    pub guest_agent: bool,
    /// It has a TPM.
    pub tpm: bool,
    /// The socket device, if it has one.
    pub vsock: Option<Vsock>,
    /// The watchdog's action, if it has a watchdog.
    pub watchdog: Option<WatchdogAction>,
    /// Directories of the node in the order of the manifest. With any, its memory is shared.
    pub shares: Vec<Share>,
    /// Directory of the node where the daemon keeps files about the VM; absolute, without `..`.
    pub state_dir: Option<PathBuf>,
    /// Data for the first boot of the guest; with it, the last of `disks` is its seed, except as [`VmSpec::ignition`] says.
    pub cloud_init: Option<CloudInit>,
    /// The pod that has the VM.
    pub pod: Option<PodUid>,
    /// Periodic checks of the guest.
    pub probes: Probes,
    /// Users of the guest, as its agent sets them.
    pub access: Vec<AccessCredential>,
    /// Names of channels to programs of the guest.
    pub channels: Vec<String>,
}

impl VmSpec {
    /// Whether the machine has a device for channels: of the agent, or of others.
    pub fn has_channels(&self) -> bool {
        self.guest_agent || !self.channels.is_empty()
    }

    /// Configuration of Ignition that the guest gets by its firmware instead of a disk; empty for none.
    pub fn ignition(&self) -> &[u8] {
        match (&self.cloud_init, &self.boot) {
            (Some(init), Boot::Firmware { .. }) if init.kind == SeedType::Ignition => &init.user_data,
            _ => &[],
        }
    }

    /// Whether guest RAM is a memfd that other processes can map, or private to the VM's process.
    pub fn shares_memory(&self) -> bool {
        match self.backing {
            // The server of a share maps the guest's memory.
            Backing::Auto => self.memory.huge_pages.is_some() || !self.shares.is_empty(),
            Backing::Private => false,
            Backing::Shared => true,
        }
    }
}

/// How guest RAM is backed on the host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Backing {
    /// Shared when it has to be (a VM with shares), or costs nothing (huge pages that the node has set aside); else private.
    #[default]
    Auto,
    /// Private anonymous memory with transparent huge pages.
    Private,
    /// A memfd.
    Shared,
}

/// Boot method of a VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Boot {
    /// A Linux kernel, directly.
    Linux {
        /// bzImage or PVH ELF.
        kernel: PathBuf,
        /// Initial RAM disk.
        initrd: Option<PathBuf>,
        /// Command line, without NUL.
        cmdline: String,
    },
    /// The Linux kernel that is installed on a disk of the VM.
    Disk {
        /// Name of the disk in the VM.
        disk: Name,
        /// Text appended to the command line of the disk, without NUL.
        append: String,
    },
    /// Firmware, which starts a boot loader from the disks and NICs in their order.
    Firmware {
        /// `None` is the firmware that the disks need.
        kind: Option<FirmwareType>,
        /// Time for its boot menu, at most [`MAX_MENU_SECONDS`].
        menu_seconds: u32,
    },
}

/// Longest time for the boot menu of firmware, in seconds.
pub const MAX_MENU_SECONDS: u32 = 60;

/// Kind of firmware.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FirmwareType {
    /// UEFI: OVMF.
    Uefi,
    /// BIOS: SeaBIOS.
    Bios,
}

impl FirmwareType {
    /// The firmware of a value of the API; `None` when the value names none.
    pub fn of(wire: v1::FirmwareType) -> Option<Self> {
        match wire {
            v1::FirmwareType::Unspecified | v1::FirmwareType::Auto => None,
            v1::FirmwareType::Uefi => Some(Self::Uefi),
            v1::FirmwareType::Bios => Some(Self::Bios),
        }
    }
}

impl From<FirmwareType> for v1::FirmwareType {
    fn from(kind: FirmwareType) -> Self {
        match kind {
            FirmwareType::Uefi => Self::Uefi,
            FirmwareType::Bios => Self::Bios,
        }
    }
}

impl Boot {
    /// The kernel and the initial RAM disk on the node, if they are there.
    pub fn files(&self) -> (Option<&Path>, Option<&Path>) {
        match self {
            Self::Linux { kernel, initrd, .. } => (Some(kernel), initrd.as_deref()),
            Self::Disk { .. } | Self::Firmware { .. } => (None, None),
        }
    }
}

impl TryFrom<&v1::Vm> for Manifest {
    type Error = Violations;

    fn try_from(vm: &v1::Vm) -> Result<Self, Violations> {
        let mut found = Violations::default();
        let metadata = vm.metadata.clone().unwrap_or_default();
        let metadata = Metadata::new(&mut found, "metadata", &metadata);
        let spec = match vm.spec.as_ref() {
            Some(spec) => VmSpec::try_from(spec).map_err(|more| found.0.extend(more.0)).ok(),
            None => {
                found.add("spec", "must be given");
                None
            }
        };
        match (metadata, spec) {
            (Some(metadata), Some(spec)) => found.or(Self { metadata, spec }),
            _ => Err(found),
        }
    }
}

impl TryFrom<&v1::VmSpec> for VmSpec {
    type Error = Violations;

    fn try_from(spec: &v1::VmSpec) -> Result<Self, Violations> {
        let mut found = Violations::default();
        let cores = spec.cpu.as_ref().map_or(0, |cpu| cpu.cores);
        let topology = Topology::for_cores(cores)
            .map_err(|error| found.add("spec.cpu.cores", error))
            .ok();
        let wire = spec.cpu.clone().unwrap_or_default();
        let cpu = CpuShare::new(&mut found, &wire);
        let processor = Processor::new(&mut found, &wire);
        let host_cpus = spec.cpu.as_ref().map_or("", |cpu| &cpu.host_cpus);
        let host_cpus = resources::host_cpus(&mut found, host_cpus);
        let memory = spec.memory.unwrap_or_default();
        let memory_bytes = memory.size_bytes;
        memory_size(&mut found, memory_bytes);
        let backing = backing(&mut found, memory.backing);
        let memory = resources::memory(&mut found, &memory, backing);
        let boot = boot(&mut found, spec);
        let may_be_uefi = match &boot {
            Some(Boot::Firmware { kind, .. }) => *kind != Some(FirmwareType::Bios),
            _ => false,
        };
        if may_be_uefi && (MIN_MEMORY..MIN_UEFI_MEMORY).contains(&memory_bytes) {
            let least = format_args!("must be at least 128 MiB ({MIN_UEFI_MEMORY}) with UEFI firmware");
            found.add("spec.memory.sizeBytes", least);
        }
        let mut disks = list(
            &mut found,
            "spec.disks",
            &spec.disks,
            MAX_DISKS_AND_NICS,
            Disk::new,
        );
        let cloud_init = spec.cloud_init.as_ref();
        let cloud_init = cloud_init.map(|wire| CloudInit::new(&mut found, wire));
        let has_firmware = matches!(boot, Some(Boot::Firmware { .. }));
        match cloud_init.as_ref().map(|init| init.kind) {
            Some(SeedType::Sysprep) if boot.is_some() && !has_firmware => {
                let needs = "SYSPREP needs `spec.boot.firmware`: Windows does not boot without it";
                found.add("spec.cloudInit.type", needs);
            }
            // By fw_cfg.
            Some(SeedType::Ignition) if has_firmware => {}
            kind => disks.extend(kind.and_then(Disk::seed)),
        }
        let nics = list(&mut found, "spec.nics", &spec.nics, MAX_DISKS_AND_NICS, nic);
        let together = disks.len() + nics.len();
        if together > MAX_DISKS_AND_NICS {
            let most = format_args!("at most {MAX_DISKS_AND_NICS} disks and NICs together, are {together}");
            found.add("spec.disks", most);
        }
        let queues: usize = nics.iter().map(|nic| usize::from(nic.queues)).sum();
        if queues > nic::MAX_QUEUES_TOGETHER {
            let most = nic::MAX_QUEUES_TOGETHER;
            let most = format_args!("at most {most} queues of all NICs together, are {queues}");
            found.add("spec.nics", most);
        }
        interface::disjoint_subnets(&mut found, &nics);
        let run_policy = RunPolicy::new(&mut found, spec.run_policy);
        let on_crash = OnCrash::new(&mut found, spec.on_crash);
        let on_panic = OnPanic::new(&mut found, spec.on_panic, run_policy);
        let clock = ClockOnResume::new(&mut found, spec.clock.as_ref());
        let timezone = timezone(&mut found, spec.clock.as_ref());
        let smbios = spec.smbios.as_ref().map(|wire| Smbios::new(&mut found, wire));
        let mut smbios = smbios.unwrap_or_default();
        let probes = Probes::new(&mut found, spec);
        let mut credentials = spec.credentials.clone();
        credentials.extend(probes.notify().then(probe::notify_credential));
        smbios.oem_strings = credential::oem_strings(&mut found, &credentials);
        let field = "spec.rateGroups";
        let rate_groups = list(
            &mut found,
            field,
            &spec.rate_groups,
            MAX_RATE_GROUPS,
            RateGroup::new,
        );
        // The names include those of items with other problems.
        let seed = disks.iter().filter(|disk| disk.source == Source::Seed);
        let names = spec.disks.iter().map(|disk| disk.name.as_str());
        let names = names.chain(seed.map(|disk| disk.name.as_str()));
        unique(&mut found, "spec.disks", "name", names);
        let names = spec.nics.iter().map(|nic| nic.name.as_str());
        unique(&mut found, "spec.nics", "name", names);
        unique(
            &mut found,
            field,
            "name",
            spec.rate_groups.iter().map(|group| group.name.as_str()),
        );
        disks_together(&mut found, &disks, spec);
        sata(&mut found, &disks, spec, boot.as_ref());
        boot_order(&mut found, spec, boot.as_ref());
        let balloon = Balloon::new(&mut found, spec);
        let mut shares = list(&mut found, "spec.shares", &spec.shares, MAX_SHARES, Share::new);
        let pod = spec.pod.as_ref();
        let pod = pod.and_then(|wire| PodUid::of_spec(&mut found, wire));
        pod::parts(&mut found, spec);
        disks.iter_mut().for_each(|disk| disk.set_pod(pod.as_ref()));
        shares.iter_mut().for_each(|share| share.set_pod(pod.as_ref()));
        if together + shares.len() > MAX_DISKS_AND_NICS && together <= MAX_DISKS_AND_NICS {
            let most = format_args!(
                "at most {MAX_DISKS_AND_NICS} disks, NICs and shares together, are {}",
                together + shares.len()
            );
            found.add("spec.shares", most);
        }
        let names = spec.shares.iter().map(|share| share.name.as_str());
        unique(&mut found, "spec.shares", "name", names);
        let tags = shares.iter().map(|share| share.tag.as_str());
        unique(&mut found, "spec.shares", "tag", tags);
        share::shared_memory(&mut found, &shares, backing, spec);
        share::mounts(&mut found, &shares, spec);
        let state_dir = match spec.state_dir.as_str() {
            "" => None,
            path => absolute(&mut found, "spec.stateDir", path),
        };
        let display = spec.display.as_ref().map(|wire| Display::new(&mut found, wire));
        let vsock = spec.vsock.map(|wire| Vsock::new(&mut found, wire));
        let watchdog = spec.watchdog.map(|wire| WatchdogAction::new(&mut found, wire));
        pod::one_network(&mut found, &spec.nics);
        let access = access::users(&mut found, spec);
        let channels = channel::names(&mut found, &spec.channels);
        metadata(&mut found, spec);
        let macs = nics.iter().filter_map(|nic| nic.mac);
        unique(&mut found, "spec.nics", "mac", macs);
        match (topology, boot) {
            (Some(topology), Some(boot)) => found.or(Self {
                topology,
                cpu,
                processor,
                host_cpus,
                memory_bytes,
                backing,
                memory,
                boot,
                disks,
                nics,
                rate_groups,
                run_policy,
                on_crash,
                on_panic,
                clock,
                timezone,
                smbios,
                balloon,
                display,
                virtio_console: spec.virtio_console.is_some(),
                guest_agent: spec.guest_agent.is_some(),
                tpm: spec.tpm.is_some(),
                vsock,
                watchdog,
                shares,
                state_dir,
                cloud_init,
                pod,
                probes,
                access,
                channels,
            }),
            _ => Err(found),
        }
    }
}

/// Checks that the metadata service has documents for the guest.
fn metadata(found: &mut Violations, spec: &v1::VmSpec) {
    let nics = spec.nics.iter().enumerate().filter(|(_, nic)| nic.metadata);
    for (index, _) in nics.filter(|_| spec.cloud_init.is_none()) {
        let problem = "needs spec.cloudInit, whose documents the guest reads: give it, `{}` at least";
        found.add(format_args!("spec.nics[{index}].metadata"), problem);
    }
}

/// Checks the conditions between the disks of a VM.
fn disks_together(found: &mut Violations, disks: &[Disk], spec: &v1::VmSpec) {
    let source = |disk: &Disk| match &disk.source {
        Source::Path { path, .. } => ("path", path.display().to_string()),
        Source::Disk { name, .. } => ("disk", name.to_string()),
        Source::Pod { volume, .. } => ("podVolume", volume.name.to_string()),
        Source::Seed => ("cloudInit", String::new()),
        Source::Empty => ("medium", disk.name.to_string()),
    };
    let mut seen = BTreeMap::new();
    for disk in disks {
        let (what, value) = source(disk);
        // Several may read the same.
        if let Some(read_only) = seen.insert((what, value.clone()), disk.read_only)
            && !(read_only && disk.read_only)
        {
            found.add("spec.disks", format_args!("two with the same {what} \"{value}\""));
        }
    }
    let field = |index| format!("spec.disks[{index}].rateGroup");
    for (index, disk) in spec.disks.iter().enumerate() {
        let exists = spec.rate_groups.iter().any(|group| group.name == disk.rate_group);
        let names = disks
            .iter()
            .any(|valid| matches!(&valid.limit, Limit::Group(name) if name.as_str() == disk.rate_group));
        if names && !exists {
            let problem = format_args!(
                "must be the name of one of spec.rateGroups, is \"{}\"",
                disk.rate_group
            );
            found.add(field(index), problem);
        }
    }
}

/// Checks the disks on the bus SATA, which machines with firmware have.
fn sata(found: &mut Violations, disks: &[Disk], spec: &v1::VmSpec, boot: Option<&Boot>) {
    let on_sata = |disk: &&Disk| disk.bus != Bus::Virtio;
    let Some(first) = disks.iter().find(on_sata) else {
        return;
    };
    let index = spec
        .disks
        .iter()
        .position(|disk| disk.name == first.name.as_str());
    if boot.is_some_and(|boot| !matches!(boot, Boot::Firmware { .. })) {
        let wrong =
            "DISK_BUS_SATA needs spec.boot.firmware: boot the VM through firmware, or use DISK_BUS_VIRTIO";
        found.add(format_args!("spec.disks[{}].bus", index.unwrap_or(0)), wrong);
    }
    let count = disks.iter().filter(on_sata).count();
    if count > MAX_SATA {
        let most = format_args!("at most {MAX_SATA} with DISK_BUS_SATA, are {count}");
        found.add("spec.disks", most);
    }
}

/// Checks the boot order, which is that of firmware: each position belongs to one device.
fn boot_order(found: &mut Violations, spec: &v1::VmSpec, boot: Option<&Boot>) {
    let disks = spec.disks.iter().enumerate();
    let disks = disks.map(|(index, disk)| (format!("spec.disks[{index}].bootOrder"), disk.boot_order));
    let nics = spec.nics.iter().enumerate();
    let nics = nics.map(|(index, nic)| (format!("spec.nics[{index}].bootOrder"), nic.boot_order));
    let mut seen = BTreeMap::new();
    for (field, position) in disks.chain(nics).filter(|(_, position)| *position != 0) {
        match boot {
            Some(Boot::Linux { .. } | Boot::Disk { .. }) => {
                found.add(&field, "needs spec.boot.firmware: only firmware has a boot order");
            }
            Some(Boot::Firmware {
                kind: Some(FirmwareType::Bios),
                ..
            }) if field.starts_with("spec.nics") => {
                found.add(&field, "must be left out with a BIOS, which boots from no NIC");
            }
            _ => {}
        }
        if let Some(other) = seen.insert(position, field.clone()) {
            found.add(field, format_args!("position {position} is that of {other} too"));
        }
    }
}

pub(super) fn name(found: &mut Violations, field: &str, name: &str) -> Option<Name> {
    Name::try_from(name)
        .map_err(|error| found.add(field, format_args!("{error}, is \"{name}\"")))
        .ok()
}

/// The name of a time zone. Whether it exists is known to the node.
fn timezone(found: &mut Violations, clock: Option<&v1::ClockSpec>) -> String {
    let zone = clock.map_or("", |clock| clock.timezone.as_str());
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"/_+-".contains(&byte);
    if zone.len() > MAX_ZONE || !zone.bytes().all(allowed) || zone.starts_with('/') {
        let wanted = "must be a name as in \"Europe/Copenhagen\", or \"localtime\"";
        found.add("spec.clock.timezone", wanted);
    }
    zone.to_owned()
}

fn memory_size(found: &mut Violations, bytes: u64) {
    let field = "spec.memory.sizeBytes";
    if !(MIN_MEMORY..=MAX_MEMORY).contains(&bytes) {
        found.add(
            field,
            format_args!("must be 64 MiB to 4 TiB ({MIN_MEMORY} to {MAX_MEMORY}), is {bytes}"),
        );
    } else if !bytes.is_multiple_of(MEMORY_STEP) {
        found.add(
            field,
            format_args!("must be a multiple of 2 MiB ({MEMORY_STEP}), is {bytes}"),
        );
    }
}

fn backing(found: &mut Violations, value: i32) -> Backing {
    match v1::MemoryBacking::try_from(value) {
        Ok(v1::MemoryBacking::Unspecified) => Backing::Auto,
        Ok(v1::MemoryBacking::Private) => Backing::Private,
        Ok(v1::MemoryBacking::Shared) => Backing::Shared,
        Err(_) => {
            found.add("spec.memory.backing", format_args!("unknown value {value}"));
            Backing::Auto
        }
    }
}

fn boot(found: &mut Violations, spec: &v1::VmSpec) -> Option<Boot> {
    match spec.boot.as_ref().and_then(|boot| boot.source.as_ref()) {
        Some(v1::boot_spec::Source::Linux(linux)) => linux_boot(found, linux),
        Some(v1::boot_spec::Source::FromDisk(disk)) => disk_boot(found, disk, spec),
        Some(v1::boot_spec::Source::Firmware(firmware)) => firmware_boot(found, firmware),
        None => {
            let problem = "must say what to boot: give spec.boot.linux.kernel, spec.boot.fromDisk for the kernel on a disk, or spec.boot.firmware";
            found.add("spec.boot", problem);
            None
        }
    }
}

fn disk_boot(found: &mut Violations, boot: &v1::DiskBoot, spec: &v1::VmSpec) -> Option<Boot> {
    let field = "spec.boot.fromDisk.disk";
    let named = match boot.disk.as_str() {
        "" => spec.disks.first(),
        name => spec.disks.iter().find(|disk| disk.name == name),
    };
    let Some(disk) = named else {
        let problem = match boot.disk.as_str() {
            "" => "the VM has no disk: give it one in spec.disks".to_owned(),
            name => format!("must be the name of one of spec.disks, is \"{name}\""),
        };
        found.add(field, problem);
        return None;
    };
    let length = boot.cmdline_append.len();
    if length > MAX_CMDLINE || boot.cmdline_append.contains(['\0', '\n']) {
        found.add(
            "spec.boot.fromDisk.cmdlineAppend",
            format_args!("must be at most {MAX_CMDLINE} bytes without NUL and line feed, has {length}"),
        );
    }
    Some(Boot::Disk {
        // The disk itself reports an invalid name.
        disk: Name::try_from(disk.name.as_str()).ok()?,
        append: boot.cmdline_append.clone(),
    })
}

fn firmware_boot(found: &mut Violations, firmware: &v1::FirmwareBoot) -> Option<Boot> {
    let menu_seconds = firmware.menu_seconds;
    if menu_seconds > MAX_MENU_SECONDS {
        found.add(
            "spec.boot.firmware.menuSeconds",
            format_args!("must be at most {MAX_MENU_SECONDS}, is {menu_seconds}"),
        );
    }
    let kind = match v1::FirmwareType::try_from(firmware.r#type) {
        Ok(v1::FirmwareType::Unspecified) => Some(FirmwareType::Uefi),
        Ok(kind) => FirmwareType::of(kind),
        Err(_) => {
            let value = firmware.r#type;
            found.add("spec.boot.firmware.type", format_args!("unknown value {value}"));
            return None;
        }
    };
    Some(Boot::Firmware { kind, menu_seconds })
}

fn linux_boot(found: &mut Violations, linux: &v1::LinuxBoot) -> Option<Boot> {
    let kernel = absolute(found, "spec.boot.linux.kernel", &linux.kernel);
    let initrd = (!linux.initrd.is_empty())
        .then(|| absolute(found, "spec.boot.linux.initrd", &linux.initrd))
        .flatten();
    let length = linux.cmdline.len();
    if length > MAX_CMDLINE || linux.cmdline.contains('\0') {
        found.add(
            "spec.boot.linux.cmdline",
            format_args!("must be at most {MAX_CMDLINE} bytes without NUL, has {length}"),
        );
    }
    Some(Boot::Linux {
        kernel: kernel?,
        initrd,
        cmdline: linux.cmdline.clone(),
    })
}

pub(super) fn absolute(found: &mut Violations, field: impl std::fmt::Display, path: &str) -> Option<PathBuf> {
    let wrong = if path.is_empty() {
        "must be given"
    } else if !path.starts_with('/') {
        "must be an absolute path on the node"
    } else if path.len() >= 4096 || path.contains('\0') {
        "must be shorter than 4,096 bytes, without NUL"
    } else if Path::new(path)
        .components()
        .any(|part| part == Component::ParentDir)
    {
        "must not contain '..'"
    } else {
        return Some(PathBuf::from(path));
    };
    found.add(
        field,
        format_args!("{wrong}, is \"{}\"", path.get(..200).unwrap_or(path)),
    );
    None
}

fn list<W, T>(
    found: &mut Violations,
    field: &str,
    items: &[W],
    max: usize,
    item: impl Fn(&mut Violations, &str, &W) -> Option<T>,
) -> Vec<T> {
    if items.len() > max {
        found.add(field, format_args!("at most {max}, are {}", items.len()));
        return Vec::new();
    }
    let numbered = items.iter().enumerate();
    numbered
        .filter_map(|(index, wire)| item(found, &format!("{field}[{index}]"), wire))
        .collect()
}

pub(super) fn unique<T: ToString>(
    found: &mut Violations,
    list: &str,
    what: &str,
    values: impl Iterator<Item = T>,
) {
    let mut seen = BTreeSet::new();
    let values = values.map(|value| value.to_string());
    // A missing name is a problem of its own.
    for value in values.filter(|value| !value.is_empty()) {
        if seen.contains(&value) {
            found.add(list, format_args!("two with the same {what} \"{value}\""));
        }
        seen.insert(value);
    }
}
