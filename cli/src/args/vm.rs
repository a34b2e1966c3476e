//! Arguments of the commands that define VMs: `create vm`, `run`, `edit vm`, `apply`, `diff`, `set memory`.

use std::{path::PathBuf, time::Duration};

use clap::{Args, Subcommand};
use vmmd_api::v1::{self, HugePages, KeyboardLayout, PanicPolicy, RunPolicy, WatchdogAction};

use super::{
    FORMAT, HELP, Label, Output, Timeout,
    disk::CLONES,
    duration, image_name, size,
    value::{Words, words},
    vm_name,
};
use crate::complete;

/// Kinds of firmware.
const FIRMWARES: Words<v1::FirmwareType> = &[
    ("uefi", v1::FirmwareType::Uefi, "UEFI: OVMF of the node"),
    (
        "bios",
        v1::FirmwareType::Bios,
        "BIOS: SeaBIOS of the node, for disks with an MBR",
    ),
    (
        "auto",
        v1::FirmwareType::Auto,
        "The one that the disks need, chosen at the first start",
    ),
];
/// Run policies.
const RUN_POLICIES: Words<RunPolicy> = &[
    (
        "always-on-unless-stopped",
        RunPolicy::AlwaysOnUnlessStopped,
        "Start again after every end of the run, also a power-off by the guest, but not after `stop` (default)",
    ),
    (
        "always-on",
        RunPolicy::AlwaysOn,
        "Start again after every end of the run",
    ),
    (
        "rerun-on-failure",
        RunPolicy::RerunOnFailure,
        "Start again after a failure of the guest or the vmm process",
    ),
    ("manual", RunPolicy::Manual, "Start and stop by request only"),
    ("always-off", RunPolicy::AlwaysOff, "Refuse starts"),
];
const PANIC_POLICIES: Words<PanicPolicy> = &[
    ("restart", PanicPolicy::Restart, ""),
    ("stop", PanicPolicy::Stop, ""),
    ("pause", PanicPolicy::Pause, ""),
    ("ignore", PanicPolicy::Ignore, ""),
];
/// Forms of the data for the first boot.
const SEED_TYPES: Words<v1::SeedType> = &[
    ("no-cloud", v1::SeedType::NoCloud, "NoCloud of cloud-init"),
    (
        "config-drive",
        v1::SeedType::ConfigDrive,
        "ConfigDrive of OpenStack, for cloud-init and cloudbase-init",
    ),
    (
        "sysprep",
        v1::SeedType::Sysprep,
        "Answer file of Windows Setup and sysprep, from --user-data",
    ),
    (
        "ignition",
        v1::SeedType::Ignition,
        "Configuration of Ignition, from --user-data",
    ),
];
/// Actions of an expired watchdog.
const WATCHDOG_ACTIONS: Words<WatchdogAction> = &[
    ("reset", WatchdogAction::Reset, "Reset the machine"),
    (
        "poweroff",
        WatchdogAction::Poweroff,
        "End the run: a failure for the run policy",
    ),
    ("pause", WatchdogAction::Pause, "Pause the VM"),
    ("none", WatchdogAction::None, "An event alone"),
];
/// Keyboard layouts.
pub const LAYOUTS: Words<KeyboardLayout> = &[
    ("us", KeyboardLayout::Us, ""),
    ("de", KeyboardLayout::De, ""),
    ("dk", KeyboardLayout::Dk, ""),
    ("fr", KeyboardLayout::Fr, ""),
    ("gb", KeyboardLayout::Gb, ""),
    ("es", KeyboardLayout::Es, ""),
    ("jp", KeyboardLayout::Jp, ""),
];
const HUGE_PAGES: Words<HugePages> = &[
    ("2Mi", HugePages::HugePages2m, ""),
    ("1Gi", HugePages::HugePages1g, ""),
];

/// `apply`.
#[derive(Debug, Args)]
pub struct Apply {
    #[command(flatten)]
    pub files: Files,
    /// Start VMs that do not run
    #[arg(long)]
    pub start: bool,
    /// Restart running VMs with changes that wait for the next start
    #[arg(long)]
    pub restart: bool,
    /// How long guests may take to release disks (30s when not given), and to power off with --restart (60s); at most 1h
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    pub grace: Option<Duration>,
    /// Let the daemon check everything, print the changes, and change nothing. For new disks
    /// and networks, only the manifest is checked
    #[arg(long, conflicts_with = "restart")]
    pub dry_run: bool,
    #[command(flatten)]
    pub timeout: Timeout,
}

/// Manifests: `diff`, `node check`.
#[derive(Debug, Args)]
pub struct Files {
    /// Manifest with VMs, disks and networks as YAML or JSON; `-` is standard input. May be given several times
    #[arg(short, long = "filename", value_name = "FILE", required = true)]
    pub files: Vec<PathBuf>,
}

/// `edit vm`.
#[derive(Debug, Args)]
pub struct EditVm {
    /// Name of the VM
    #[arg(value_parser = vm_name, add = complete::vms())]
    pub name: String,
    #[command(flatten)]
    pub restart: Restarted,
    #[command(flatten)]
    pub timeout: Timeout,
}

/// A restart for changes that a running VM cannot take over.
#[derive(Clone, Copy, Debug, Args)]
pub struct Restarted {
    /// Restart the VM if a part of the change waits for the next start
    #[arg(long)]
    pub restart: bool,
    /// How long the guest may take to release disks (30s when not given), and to power off with --restart (60s); at most 1h
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    pub grace: Option<Duration>,
}

/// `create vm`.
#[derive(Debug, Args)]
#[command(override_usage = "\
vmmctl create vm NAME --kernel PATH [OPTIONS]
       vmmctl create vm NAME --from-disk --disk disk=NAME [OPTIONS]
       vmmctl create vm NAME --firmware uefi --disk disk=NAME [OPTIONS]
       vmmctl create vm -f FILE [OPTIONS]")]
pub struct CreateVm {
    /// Name of the VM
    #[arg(value_parser = vm_name, add = complete::vms(), required_unless_present = "files", conflicts_with = "files")]
    pub name: Option<String>,
    /// Manifest with VMs, disks and networks as YAML or JSON; `-` is standard input. May be given several times
    #[arg(short, long = "filename", value_name = "FILE", conflicts_with_all = FLAGS)]
    pub files: Vec<PathBuf>,
    #[command(flatten)]
    pub flags: Flags,
    #[command(flatten)]
    pub guest: Guest,
    #[command(flatten)]
    pub resources: Resources,
    /// Start the VM too
    #[arg(long)]
    pub start: bool,
    /// Let the daemon check everything, and change nothing
    #[arg(long)]
    pub dry_run: bool,
    /// Print the created VM in this form (with --dry-run: the VM that would be created)
    #[arg(short, long, value_name = FORMAT, help = HELP)]
    pub output: Option<Output>,
    #[command(flatten)]
    pub timeout: Timeout,
}

/// Ids of the options that describe a VM, which a manifest excludes.
const FLAGS: [&str; 44] = [
    "credentials",
    "smbios",
    "timezone",
    "boot_menu",
    "kernel",
    "initrd",
    "from_disk",
    "firmware",
    "cmdline",
    "cpus",
    "memory",
    "disks",
    "cdroms",
    "rate_groups",
    "nics",
    "shares",
    "state_dir",
    "run_policy",
    "labels",
    "user_data",
    "ssh_keys",
    "seed",
    "hostname",
    "on_panic",
    "no_balloon",
    "free_page_reporting",
    "display",
    "virtio_console",
    "guest_agent",
    "tpm",
    "vsock",
    "channels",
    "watchdog",
    "hyperv",
    "probes",
    "core_fraction",
    "core_limit",
    "host_cpus",
    "cpu_model",
    "cpu_features",
    "huge_pages",
    "prefault",
    "mergeable",
    "numa_node",
];

/// The VM of `create vm`, beside the flags that it shares with `run`.
#[derive(Debug, Args)]
pub struct Flags {
    /// Kernel on the node: a bzImage, or an ELF file with a PVH entry
    #[arg(long, value_name = "PATH", required_unless_present_any = ["files", "from_disk", "firmware"])]
    pub kernel: Option<String>,
    /// Initial RAM disk on the node
    #[arg(long, value_name = "PATH")]
    pub initrd: Option<String>,
    /// Boot the kernel that is installed on the first disk, without firmware
    #[arg(long, visible_alias = "fast-boot", conflicts_with_all = ["kernel", "initrd"])]
    pub from_disk: bool,
    /// Boot through firmware, which starts the boot loader on a disk
    #[arg(long, value_name = "TYPE", value_parser = words(FIRMWARES), conflicts_with_all = ["kernel", "initrd", "from_disk", "cmdline"])]
    pub firmware: Option<v1::FirmwareType>,
    /// Kernel command line (console=ttyS0 when not given); with --from-disk, text to append to the
    /// disk's own command line
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    pub cmdline: Option<String>,
    /// Guest RAM: bytes, or with a suffix as in 512Mi or 2Gi
    #[arg(long, value_name = "SIZE", default_value = "512Mi", value_parser = size)]
    pub memory: u64,
    /// Disk: a raw image or block device on the node, or disk=NAME for a disk that vmmd manages, or
    /// path=/srv/a.qcow2,format=qcow2. More keys, as in `vmmctl attach`: name, any-content, serial, readonly, bus, cdrom, cache,
    /// queues, block-size, on-error, boot-order, bps, iops, burst, burst-ops, rate-group
    #[arg(long = "disk", value_name = "PATH|KEY=VALUE,…")]
    pub disks: Vec<String>,
    /// Limit that several disks share (rate-group=NAME in --disk): name=NAME[,bps=100Mi][,iops=500][,burst=…][,burst-ops=…]
    #[arg(long = "rate-group", value_name = "KEY=VALUE,…")]
    pub rate_groups: Vec<String>,
    /// Action after a panic of the guest's kernel; by the run policy when not given
    #[arg(long, value_name = "RULE", value_parser = words(PANIC_POLICIES))]
    pub on_panic: Option<PanicPolicy>,
    /// Create the VM without a balloon: the node cannot reclaim guest memory
    #[arg(long, conflicts_with = "free_page_reporting")]
    pub no_balloon: bool,
    /// Return pages that the guest has freed to the node at once
    #[arg(long)]
    pub free_page_reporting: bool,
    /// Time in which firmware offers its boot menu on the serial console, in seconds: at most 60
    #[arg(long, value_name = "SECONDS", requires = "firmware")]
    pub boot_menu: Option<u32>,
    /// Identity of the system in its SMBIOS tables: uuid=, serial=, manufacturer=, product=, version=, sku=, family=, asset-tag=
    #[arg(long, value_name = "KEY=VALUE,…")]
    pub smbios: Option<String>,
    /// Time zone of the real-time clock, as in Europe/Copenhagen; localtime is the node's zone [default: UTC]
    #[arg(long, value_name = "ZONE")]
    pub timezone: Option<String>,
    /// Add a console beside the serial port, hvc0 in Linux: `vmmctl console --hvc`
    #[arg(long)]
    pub virtio_console: bool,
}

/// Options of `create vm` and `run`.
#[derive(Debug, Args)]
pub struct Guest {
    #[command(flatten)]
    pub cloud_init: CloudInit,
    /// Virtual CPUs
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub cpus: u32,
    /// Processor that the guest sees: host, x86-64-v2, x86-64-v3 or x86-64-v4; `vmmctl get node` lists the models that the node
    /// supports [default: host]
    #[arg(long, value_name = "MODEL")]
    pub cpu_model: Option<String>,
    /// Features that differ from the model: +NAME adds one, -NAME removes one, as in +aes,-rtm
    #[arg(long, value_name = "LIST", value_delimiter = ',', allow_hyphen_values = true, value_parser = cpu_feature)]
    pub cpu_features: Vec<CpuFeature>,
    /// Add a channel to the QEMU guest agent in the guest: `vmmctl exec`
    #[arg(long)]
    pub guest_agent: bool,
    /// Add a socket device (AF_VSOCK): `vmmctl vsock connect`, `vmmctl ssh --vsock`
    #[arg(long)]
    pub vsock: bool,
    /// Add a channel of this name to programs of the guest (a virtio-serial port): `vmmctl channel connect`. Repeatable
    #[arg(long = "channel", value_name = "NAME")]
    pub channels: Vec<String>,
    /// Add a TPM 2.0; needs the package swtpm on the node
    #[arg(long)]
    pub tpm: bool,
    /// Add a watchdog (i6300esb), with this action when the guest does not restart it in time
    #[arg(long, value_name = "ACTION", value_parser = words(WATCHDOG_ACTIONS))]
    pub watchdog: Option<WatchdogAction>,
    /// Give the guest Hyper-V's interface, for Windows
    #[arg(long)]
    pub hyperv: bool,
    /// Check the guest periodically: readiness=http:80/healthz, startup=tcp:22, liveness=agent or liveness=exec:COMMAND, with the keys
    /// delay=, period= and timeout= in seconds, successes= and failures=, as in startup=tcp:22,period=5,failures=60. May be given
    /// for each of the three
    #[arg(long = "probe", value_name = "KIND=CHECK[,KEY=VALUE…]")]
    pub probes: Vec<String>,
    /// CD-ROM drive with an ISO image of the node, or a disk that vmmd manages, as its medium; needs --firmware. May be given several
    /// times
    #[arg(long = "cdrom", value_name = "PATH|DISK")]
    pub cdroms: Vec<String>,
    /// Network interface: network=lan, bridge=br0, tap=tap0, or pod-network (of the VM's pod; pod-network=eth0 names the interface). In a network: address=10.80.0.9,
    /// or address=NAME of a reserved address, publish=8080:80+53/udp (ports of the node that lead to the VM; also 8000-8010:80 and 192.0.2.1:8080:80), routed=10.90.0.0/24+fd00:90::/64 (subnets behind the VM), floating=192.0.2.7 (floating addresses), groups=web+db (security groups of the network). More keys: name=eth0,
    /// vlan=20 and mac-filter=on (on a bridge), metadata=on (with network=), mac=52:54:00:12:34:56, queues=4, mtu=9000, boot-order=2, backend=vhost (the node's kernel carries its
    /// packets), link=down, off=tso+uso (offloads to hide from the guest: checksum, tso, uso,
    /// merge), rx-bps=100Mi, rx-pps=20000, tx-bps=…, tx-pps=… (limits on received and sent traffic,
    /// in bytes and packets a second)
    #[arg(long = "nic", value_name = "KEY=VALUE,…")]
    pub nics: Vec<String>,
    /// Directory of the node that the guest can mount: /srv/data, or /srv/data,mount=/data to have it mounted there, with keys
    /// as in `vmmctl create share`
    #[arg(long = "share", value_name = "PATH[,KEY=VALUE…]")]
    pub shares: Vec<String>,
    /// Directory of the node where the daemon keeps the VM's description, logs and counters
    #[arg(long, value_name = "PATH")]
    pub state_dir: Option<String>,
    /// Give the VM a screen with a keyboard and a tablet. The value is the keyboard layout of the guest, us when not given
    #[arg(long, value_name = "LAYOUT", value_parser = words(LAYOUTS), num_args = 0..=1, default_missing_value = "us")]
    pub display: Option<KeyboardLayout>,
    /// Automatic starts of the VM by the node
    #[arg(long, value_name = "POLICY", value_parser = words(RUN_POLICIES))]
    pub run_policy: Option<RunPolicy>,
    /// Credential for systemd in the guest: NAME=VALUE, or NAME=@FILE for the content of a file. May be given several times
    #[arg(long = "credential", value_name = "NAME=VALUE|NAME=@FILE")]
    pub credentials: Vec<String>,
    /// Label of the VM; with `run`, of its disk too
    #[arg(short, long = "label", value_name = "KEY=VALUE")]
    pub labels: Vec<Label>,
}

/// Cloud-init data for the first boot of a guest.
#[derive(Debug, Default, Args)]
pub struct CloudInit {
    /// File with user data for cloud-init; `-` is standard input
    #[arg(long, value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    pub user_data: Option<PathBuf>,
    /// Public SSH key for the image's default user: a file, or the key itself. May be given several times
    #[arg(long = "ssh-key", value_name = "FILE|KEY")]
    pub ssh_keys: Vec<String>,
    /// Form of the data for the first boot [default: no-cloud]
    #[arg(long, value_name = "TYPE", value_parser = words(SEED_TYPES))]
    pub seed: Option<v1::SeedType>,
    /// Host name of the guest (the name of the VM when not given); needs cloud-init in the guest
    #[arg(long, value_name = "NAME")]
    pub hostname: Option<String>,
}

impl Guest {
    /// The vCPUs.
    pub fn cpu(&self) -> v1::CpuSpec {
        v1::CpuSpec {
            cores: self.cpus,
            model: self.cpu_model.clone().unwrap_or_default(),
            features: self.cpu_features(),
            hyperv: self.hyperv,
            ..v1::CpuSpec::default()
        }
    }

    /// Differences to the model; `None` without any.
    fn cpu_features(&self) -> Option<v1::CpuFeatures> {
        let mut features = v1::CpuFeatures::default();
        for feature in &self.cpu_features {
            match feature {
                CpuFeature::Add(name) => features.add.push(name.clone()),
                CpuFeature::Remove(name) => features.remove.push(name.clone()),
            }
        }
        (!self.cpu_features.is_empty()).then_some(features)
    }
}

/// Difference to a processor model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CpuFeature {
    /// The guest has this feature.
    Add(String),
    /// The guest lacks this feature.
    Remove(String),
}

fn cpu_feature(text: &str) -> Result<CpuFeature, String> {
    match text.split_at_checked(1) {
        Some(("+", name)) if !name.is_empty() => Ok(CpuFeature::Add(name.to_owned())),
        Some(("-", name)) if !name.is_empty() => Ok(CpuFeature::Remove(name.to_owned())),
        _ => Err("must be +NAME or -NAME, as in +aes,-rtm".to_owned()),
    }
}

/// Processor time and properties of guest memory.
#[derive(Debug, Args)]
pub struct Resources {
    /// Share of a physical processor that each vCPU is guaranteed, in percent: 1 to 100 [default: 100]
    #[arg(long, value_name = "PERCENT")]
    pub core_fraction: Option<u32>,
    /// Maximum use by each vCPU, in percent of a physical processor, from the core fraction to 100
    /// [default: no limit]
    #[arg(long, value_name = "PERCENT")]
    pub core_limit: Option<u32>,
    /// Processors of the node that the VM runs on, as in 0-3,8 [default: all]
    #[arg(long, value_name = "LIST")]
    pub host_cpus: Option<String>,
    /// Use huge pages of this size, which the node has reserved, for guest RAM
    #[arg(long, value_name = "SIZE", value_parser = words(HUGE_PAGES))]
    pub huge_pages: Option<HugePages>,
    /// Allocate all guest RAM before the guest starts
    #[arg(long)]
    pub prefault: bool,
    /// Let the node merge equal pages of this VM and others (KSM)
    #[arg(long)]
    pub mergeable: bool,
    /// NUMA node of the host for all guest RAM, and for the vCPUs unless --host-cpus is given
    #[arg(long, value_name = "N")]
    pub numa_node: Option<u32>,
}

impl Resources {
    /// The processors of a VM with these vCPUs.
    pub fn cpu(&self, guest: &Guest) -> v1::CpuSpec {
        v1::CpuSpec {
            core_fraction_percent: self.core_fraction.unwrap_or_default(),
            core_limit_percent: self.core_limit.unwrap_or_default(),
            host_cpus: self.host_cpus.clone().unwrap_or_default(),
            ..guest.cpu()
        }
    }

    /// The memory of a VM with this size of RAM.
    pub fn memory(&self, size_bytes: u64) -> v1::MemorySpec {
        v1::MemorySpec {
            size_bytes,
            huge_pages: self.huge_pages.unwrap_or_default().into(),
            prefault: self.prefault,
            mergeable: self.mergeable,
            numa_node: self.numa_node,
            ..v1::MemorySpec::default()
        }
    }
}

/// `run`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  vmmctl run debian13 --name web --cpus 2 --memory 2Gi --disk-size 20Gi --network lan --publish 8080:80 \\
    --ssh-key ~/.ssh/id_ed25519.pub --wait
  vmmctl run debian13 --user-data web.yaml --console
  vmmctl run debian13 --fast-boot --cmdline quiet
  vmmctl stop web && vmmctl delete vm web --with-disks")]
pub struct Run {
    /// Image of the VM's disk
    #[arg(value_parser = image_name, add = complete::images())]
    pub image: String,
    /// Name of the VM; the name of the image with random digits when not given
    #[arg(long, value_parser = vm_name)]
    pub name: Option<String>,
    /// Guest RAM: bytes, or with a suffix as in 512Mi or 2Gi
    #[arg(long, value_name = "SIZE", default_value = "1Gi", value_parser = size)]
    pub memory: u64,
    /// Size of the disk; the size of the image when not given
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub disk_size: Option<u64>,
    /// How the disk is made from the image; copy when not given
    #[arg(long, value_name = "MODE", value_parser = words(CLONES))]
    pub clone: Option<v1::DiskClone>,
    /// Kernel on the node instead of the one on the disk: a bzImage, or an ELF file with a PVH entry
    #[arg(long, value_name = "PATH", requires = "cmdline")]
    pub kernel: Option<String>,
    /// Firmware, which starts the boot loader on the disk (auto when not given)
    #[arg(long, value_name = "TYPE", value_parser = words(FIRMWARES), conflicts_with_all = ["kernel", "fast_boot", "cmdline"])]
    pub firmware: Option<v1::FirmwareType>,
    /// Boot the kernel that is installed on the disk without firmware, if the configuration of the boot loader can be read
    #[arg(long, conflicts_with = "kernel")]
    pub fast_boot: bool,
    /// Initial RAM disk on the node, for that kernel
    #[arg(long, value_name = "PATH", requires = "kernel")]
    pub initrd: Option<String>,
    /// Kernel command line for --kernel; with --fast-boot, text to append to the disk's own command line
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    pub cmdline: Option<String>,
    #[command(flatten)]
    pub guest: Guest,
    /// Network of the node for the first NIC
    #[arg(long, value_name = "NAME")]
    pub network: Option<String>,
    /// Port of the node that leads to a port of the VM: 8080:80, or 53:53/udp. May be given several times
    #[arg(long, value_name = "PORT:PORT", requires = "network")]
    pub publish: Vec<String>,
    /// Wait until the guest's SSH server answers, at most this time (5m when not given)
    #[arg(long, value_name = "DURATION", value_parser = duration, num_args = 0..=1, require_equals = true, default_missing_value = "5m")]
    pub wait: Option<Duration>,
    /// Attach the terminal to the serial console of the VM
    #[arg(long, conflicts_with = "wait")]
    pub console: bool,
    /// Print no progress
    #[arg(short, long)]
    pub quiet: bool,
    #[command(flatten)]
    pub timeout: Timeout,
}

/// Properties of a VM for `set`.
#[derive(Debug, Subcommand)]
pub enum Set {
    /// Set how much of its memory a VM keeps; the VM returns spare memory above this size to the
    /// node
    Memory(SetMemory),
    /// Set the password of a user of a running guest, by the agent in the guest. The password comes
    /// from standard input or a file
    Password(SetPassword),
}

/// `set memory`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  vmmctl set memory web --target 512Mi
  vmmctl set memory web --all")]
pub struct SetMemory {
    /// Name of the VM
    #[arg(value_parser = vm_name, add = complete::vms())]
    pub name: String,
    /// Memory that the guest keeps: from 64Mi to all its memory, a multiple of 2Mi
    #[arg(long, value_name = "SIZE", value_parser = size, required_unless_present = "all")]
    pub target: Option<u64>,
    /// Give the guest all of its memory back
    #[arg(long, conflicts_with = "target")]
    pub all: bool,
    #[command(flatten)]
    pub timeout: Timeout,
}

/// `set password`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  vmmctl set password web root
  openssl passwd -6 | vmmctl set password web root --crypted")]
pub struct SetPassword {
    /// Name of the VM
    #[arg(value_parser = vm_name, add = complete::vms())]
    pub vm: String,
    /// Name of the user in the guest
    pub user: String,
    /// The password is a hash, as in /etc/shadow
    #[arg(long)]
    pub crypted: bool,
    /// File whose first line is the password; `-` is standard input
    #[arg(long, value_name = "FILE", default_value = "-", value_hint = clap::ValueHint::FilePath)]
    pub file: PathBuf,
}

#[cfg(test)]
mod tests {
    use super::{super::value::word, *};

    #[test]
    fn run_policy_is_read_in_both_forms() {
        for (text, policy) in [
            ("manual", RunPolicy::Manual),
            ("always-on", RunPolicy::AlwaysOn),
            ("ALWAYS_OFF", RunPolicy::AlwaysOff),
            ("RUN_POLICY_RERUN_ON_FAILURE", RunPolicy::RerunOnFailure),
        ] {
            assert_eq!(word(RUN_POLICIES, text), Ok(policy));
        }
        for wrong in ["", "unspecified", "never"] {
            assert!(word(RUN_POLICIES, wrong).is_err(), "{wrong}");
        }
    }
}
