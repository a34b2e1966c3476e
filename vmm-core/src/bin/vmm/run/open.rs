//! Resolution of the manifest and opening of its files, as the daemon does for a VM before it
//! starts a `vmm`.

use std::{
    fs::{File, OpenOptions},
    io,
    os::{
        fd::OwnedFd,
        unix::{
            fs::{FileTypeExt as _, OpenOptionsExt as _},
            net::UnixListener,
        },
    },
    path::Path,
};

use anyhow::{Context, Result, anyhow, bail};
use devices::sys::tap;
use vmm_base::sys::{
    blockdev,
    lock::{LockKind, holder, lock_image},
};
use vmm_core::memory::huge;
use vmm_protocol::{convert, machine::AGENT_CHANNEL, vmm};
use vmmd_spec::{
    disk::{Bus, Cache, Disk, Format, Source},
    display::Display,
    nic::Mac,
    pci,
    policy::ClockOnResume,
    resources::HugePages,
    vm::{Attachment, Boot, FirmwareType, Manifest, Nic},
};

use crate::{args::FirmwareFiles, sys};

/// PCI slots: on bus 0 the entropy device, then disks, then NICs, then the channels, then the balloon, then graphics adapter,
/// keyboard and tablet, then the virtio-console; more disks and NICs on further buses.
const RNG_SLOT: u32 = 1;
const DISK_SLOTS: std::ops::Range<u32> = 2..18;
const NIC_SLOTS: std::ops::Range<u32> = 18..24;
const WATCHDOG_SLOT: u32 = 24;
const CHANNELS_SLOT: u32 = 25;
const BALLOON_SLOT: u32 = 26;
const DISPLAY_SLOTS: [u32; 3] = [27, 28, 29];
const CONSOLE_SLOT: u32 = 30;

/// A machine's spec with the descriptors that it names.
pub type Resolved = (vmm::MachineSpec, Vec<OwnedFd>);

/// Reads a manifest.
pub fn manifest(path: &Path) -> Result<Manifest> {
    let text = std::fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))?;
    vmmd_spec::manifest::single_vm(&text).with_context(|| path.display().to_string())
}

/// Where sockets for clients are made.
#[derive(Clone, Copy, Debug)]
pub struct Sockets<'a> {
    /// For VNC clients.
    pub vnc: Option<&'a Path>,
    /// For clients of the virtio-console.
    pub hvc: Option<&'a Path>,
    /// For the client of the guest's agent.
    pub agent: Option<&'a Path>,
}

/// Opens everything that the machine needs, and makes the sockets.
pub fn resolve(manifest: &Manifest, sockets: Sockets<'_>, files: &FirmwareFiles) -> Result<Resolved> {
    let mut fds = Fds::default();
    let name = manifest.metadata.name.as_str();
    let spec = &manifest.spec;
    if let Some(share) = spec.shares.first() {
        anyhow::bail!(
            "share \"{}\": only vmmd starts what serves a share: start the VM with vmmd, or leave spec.shares out",
            share.name
        );
    }
    if spec.tpm {
        bail!("spec.tpm: only vmmd starts swtpm: start the VM with vmmd, or leave spec.tpm out");
    }
    if spec.vsock.is_some() {
        bail!("spec.vsock: only vmmd connects clients: start the VM with vmmd, or leave spec.vsock out");
    }
    let (kernel, firmware) = match &spec.boot {
        Boot::Linux {
            kernel,
            initrd,
            cmdline,
        } => {
            let kernel = vmm::Kernel {
                kernel_fd: fds.add(open("kernel", kernel, false)?),
                initrd_fd: match initrd {
                    Some(initrd) => Some(fds.add(open("initrd", initrd, false)?)),
                    None => None,
                },
                cmdline: cmdline.clone(),
            };
            (Some(kernel), None)
        }
        Boot::Firmware {
            kind: Some(kind),
            menu_seconds,
        } => {
            let firmware = vmm::Firmware {
                menu_seconds: *menu_seconds,
                ..open_firmware(&mut fds, *kind, files)?
            };
            (None, Some(firmware))
        }
        Boot::Firmware { kind: None, .. } => bail!(
            "spec.boot.firmware: the firmware is chosen by the daemon: set the type to UEFI or BIOS here"
        ),
        Boot::Disk { .. } => bail!(
            "spec.boot.fromDisk: the kernel on a disk is found by the daemon: give spec.boot.linux.kernel here"
        ),
    };
    if !spec.timezone.is_empty() {
        bail!("spec.clock.timezone: the daemon knows time zones: start the VM with vmmd, or leave it out");
    }
    let uuid = spec
        .smbios
        .uuid
        .unwrap_or_else(|| uuid::Builder::from_custom_bytes(digest(&[name])).into_uuid());
    let machine = vmm::MachineSpec {
        name: name.to_owned(),
        uuid: uuid.as_bytes().to_vec(),
        smbios: Some(convert::smbios(&spec.smbios)),
        clock_offsets: Vec::new(),
        vcpus: spec.topology.cores(),
        processor: convert::processor(
            &spec.processor,
            spec.processor.features().into_iter().map(str::to_owned).collect(),
        ),
        memory_bytes: spec.memory_bytes,
        memory_shared: spec.shares_memory(),
        kvm_fd: fds.add(open_kvm()?),
        kernel,
        firmware,
        disks: open_disks(&mut fds, &spec.disks)?,
        nics: NIC_SLOTS
            .chain(pci::further().rev())
            .zip(&spec.nics)
            .map(|(slot, nic)| open_nic(&mut fds, slot, name, nic))
            .collect::<Result<_>>()?,
        rng_pci_slot: RNG_SLOT,
        rng_fd: fds.add(open("random source", Path::new("/dev/urandom"), false)?),
        serial_log_fd: None,
        serial_log_old_fd: None,
        rate_groups: spec.rate_groups.iter().map(Into::into).collect(),
        huge_page_bytes: spec.memory.huge_pages.map_or(0, HugePages::bytes),
        prefault: spec.memory.prefault,
        mergeable: spec.memory.mergeable,
        numa_node: spec.memory.numa_node,
        free_huge_pages: spec
            .memory
            .huge_pages
            .and_then(|size| huge::free(size, spec.memory.numa_node)),
        balloon: spec
            .balloon
            .map(|balloon| convert::balloon(&balloon, BALLOON_SLOT, spec.memory_bytes)),
        on_crash: vmm::OnCrash::from(spec.on_crash).into(),
        sync_clock: spec.clock == ClockOnResume::Sync,
        shares: Vec::new(),
        tpm: None,
        vsock: None,
        ignition: spec.ignition().to_vec(),
        watchdog: spec.watchdog.map(|action| vmm::Watchdog {
            pci_slot: WATCHDOG_SLOT,
            action: vmm::WatchdogAction::from(action).into(),
        }),
        display: open_display(&mut fds, spec.display.as_ref(), sockets.vnc)?,
        console: open_console(&mut fds, spec.virtio_console, sockets.hvc)?,
        channels: open_channels(&mut fds, spec.guest_agent, sockets.agent)?,
    };
    Ok((machine, fds.0))
}

/// Descriptors in the order of their indices.
#[derive(Default)]
struct Fds(Vec<OwnedFd>);

impl Fds {
    fn add(&mut self, fd: impl Into<OwnedFd>) -> u32 {
        self.0.push(fd.into());
        u32::try_from(self.0.len() - 1).unwrap_or(u32::MAX)
    }
}

/// Opens /dev/kvm, or says what to do.
fn open_kvm() -> Result<File> {
    OpenOptions::new().read(true).write(true).open("/dev/kvm").map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => anyhow!(
            "this host has no /dev/kvm: turn hardware virtualization (VT-x or SVM) on in its firmware, or for this \
             VM in its hypervisor, and load the module kvm_intel or kvm_amd"
        ),
        io::ErrorKind::PermissionDenied => anyhow!(
            "no permission to open /dev/kvm: run as root, or as a member of the group that owns it (usually `kvm`)"
        ),
        _ => anyhow!("/dev/kvm can't be opened ({error}): see the kernel's log for why kvm_intel or kvm_amd refused"),
    })
}

fn open(what: &str, path: &Path, write: bool) -> Result<File> {
    OpenOptions::new()
        .read(true)
        .write(write)
        .open(path)
        .with_context(|| format!("opening {what} {}", path.display()))
}

/// Opens all disks, each with the next address on its bus.
fn open_disks(fds: &mut Fds, disks: &[Disk]) -> Result<Vec<vmm::Disk>> {
    let (mut slots, mut ports) = (DISK_SLOTS.chain(pci::further()), pci::SATA_PORTS.clone());
    let addresses = disks.iter().map_while(|disk| match disk.bus {
        Bus::Virtio => Some((slots.next()?, disk)),
        Bus::Sata { .. } => Some((ports.next()?, disk)),
    });
    addresses
        .map(|(address, disk)| open_disk(fds, address, disk))
        .collect()
}

fn open_disk(fds: &mut Fds, address: u32, disk: &Disk) -> Result<vmm::Disk> {
    if disk.source == Source::Seed {
        bail!("spec.cloudInit: the seed of cloud-init is made by the daemon: leave it out here");
    }
    if disk.source == Source::Empty {
        let (pci_slot, sata_port) = convert::disk_address(address);
        return Ok(vmm::Disk {
            pci_slot,
            sata_port,
            ..convert::disk(disk, Format::Iso)
        });
    }
    let Source::Path {
        path,
        format,
        beneath: None,
    } = &disk.source
    else {
        bail!(
            "disk {}: there is no DiskService and no pod without the daemon, and `beneath` is for the daemon: give its `path` alone",
            disk.name
        );
    };
    let file = open_image(path, !disk.read_only, disk.cache)
        .with_context(|| format!("disk {}: opening {}", disk.name, path.display()))?;
    let kind = if disk.read_only {
        LockKind::Read
    } else {
        LockKind::Write
    };
    // The lock belongs to the descriptor. Only this place can name the lock's holder.
    if !lock_image(&file, kind).with_context(|| format!("disk {}: locking its image", disk.name))? {
        let holder = holder(&file, kind);
        bail!(
            "disk {}: {} is in use by {}",
            disk.name,
            path.display(),
            holder.as_deref().unwrap_or("another VM or program")
        );
    }
    let (pci_slot, sata_port) = convert::disk_address(address);
    Ok(vmm::Disk {
        discard_granularity_bytes: blockdev::discard_granularity(&file),
        fd: fds.add(file),
        pci_slot,
        sata_port,
        ..convert::disk(disk, *format)
    })
}

/// Opens the firmware's code and the VM's variables, in the files that the command line names.
fn open_firmware(fds: &mut Fds, kind: FirmwareType, files: &FirmwareFiles) -> Result<vmm::Firmware> {
    if kind == FirmwareType::Bios {
        return Ok(vmm::Firmware {
            code_fd: fds.add(open("BIOS", &files.bios, false)?),
            variables_fd: None,
            ..vmm::Firmware::default()
        });
    }
    let Some(variables) = &files.variables else {
        bail!(
            "spec.boot.firmware: give the VM's variables with --uefi-variables: a copy of /usr/share/OVMF/OVMF_VARS_4M.fd"
        );
    };
    Ok(vmm::Firmware {
        code_fd: fds.add(open("UEFI code", &files.code, false)?),
        variables_fd: Some(fds.add(open("UEFI variables", variables, true)?)),
        ..vmm::Firmware::default()
    })
}

/// Opens an image with or without the page cache.
fn open_image(path: &Path, write: bool, cache: Cache) -> Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(write);
    let mut direct = options.clone();
    direct.custom_flags(libc::O_DIRECT);
    // open(2), EINVAL: the file system or device does not support O_DIRECT.
    let refused = |error: &io::Error| error.raw_os_error() == Some(libc::EINVAL);
    match cache {
        Cache::Writeback => Ok(options.open(path)?),
        Cache::Auto => match direct.open(path) {
            Err(error) if refused(&error) => Ok(options.open(path)?),
            opened => Ok(opened?),
        },
        Cache::None => match direct.open(path) {
            Err(error) if refused(&error) => {
                bail!("its file system can't do without the page cache: leave `cache` out")
            }
            opened => Ok(opened?),
        },
    }
}

fn open_display(
    fds: &mut Fds,
    display: Option<&Display>,
    vnc: Option<&Path>,
) -> Result<Option<vmm::Display>> {
    let Some(display) = display else {
        return match vnc {
            Some(_) => bail!("--vnc: the VM has no screen: give its manifest a `spec.display`"),
            None => Ok(None),
        };
    };
    let mut machine = convert::display(display, DISPLAY_SLOTS);
    if let Some(path) = vnc {
        machine.vnc_fd = Some(fds.add(listen(path)?));
    }
    Ok(Some(machine))
}

fn open_console(fds: &mut Fds, wanted: bool, hvc: Option<&Path>) -> Result<Option<vmm::Console>> {
    if !wanted {
        return match hvc {
            Some(_) => bail!("--hvc: the VM has no virtio-console: give its manifest a `spec.virtioConsole`"),
            None => Ok(None),
        };
    }
    let socket = hvc.map(listen).transpose()?;
    Ok(Some(vmm::Console {
        pci_slot: CONSOLE_SLOT,
        socket_fd: socket.map(|socket| fds.add(socket)),
    }))
}

/// Without a socket the machine has no channel, so that the guest's agent does not wait.
fn open_channels(fds: &mut Fds, wanted: bool, agent: Option<&Path>) -> Result<Option<vmm::Channels>> {
    match agent {
        None => Ok(None),
        Some(_) if !wanted => {
            bail!("--agent: the VM has no channel to an agent: give its manifest a `spec.guestAgent`")
        }
        Some(path) => Ok(Some(vmm::Channels {
            pci_slot: CHANNELS_SLOT,
            channels: vec![vmm::Channel {
                name: AGENT_CHANNEL.to_owned(),
                socket_fd: fds.add(listen(path)?),
            }],
        })),
    }
}

/// Makes a socket; one that an earlier run left behind is removed.
fn listen(path: &Path) -> Result<UnixListener> {
    if path
        .metadata()
        .is_ok_and(|metadata| metadata.file_type().is_socket())
    {
        std::fs::remove_file(path).with_context(|| format!("removing {}", path.display()))?;
    }
    UnixListener::bind(path).with_context(|| format!("making the socket {}", path.display()))
}

fn open_nic(fds: &mut Fds, slot: u32, vm: &str, nic: &Nic) -> Result<vmm::Nic> {
    let (name, bridge) = match &nic.attachment {
        Attachment::Tap(tap) => (tap.clone(), None),
        // It vanishes with this process.
        Attachment::Bridge(bridge) => (format!("vmm{}n{slot}", std::process::id()), Some(bridge)),
        Attachment::PodNetwork { .. } => bail!(
            "nic {}: vmmd connects VMs to pods; without it give a `bridge` or a `tap`",
            nic.name
        ),
        Attachment::Network { .. } => bail!(
            "nic {}: networks are made by vmmd; without it give a `bridge` or a `tap`",
            nic.name
        ),
    };
    if bridge.is_none() && !sys::interface_exists(&name) {
        bail!(
            "nic {}: there is no tap device {name}: make it with `ip tuntap add {name} mode tap`",
            nic.name
        );
    }
    let several = nic.queues > 1;
    let mut queues = Vec::new();
    for _ in 0..nic.queues {
        let fd = tap::open(&name, several).with_context(|| {
            let multi = if several { ", made with `multi_queue`" } else { "" };
            format!(
                "nic {}: opening tap {name}: it needs to be root, or the owner of the tap{multi}",
                nic.name
            )
        })?;
        queues.push(fds.add(fd));
    }
    if let Some(bridge) = bridge {
        sys::attach_to_bridge(&name, bridge).with_context(|| {
            format!(
                "nic {}: attaching to bridge {bridge}: does it exist, and is this root?",
                nic.name
            )
        })?;
    }
    let mac = nic.mac.unwrap_or_else(|| {
        let [a, b, c, d, e, f, ..] = digest(&[vm, nic.name.as_str()]);
        Mac::local([a, b, c, d, e, f])
    });
    let mut vhosts = Vec::new();
    for _ in 0..if nic.vhost { nic.queues } else { 0 } {
        let vhost = File::options().read(true).write(true).open("/dev/vhost-net");
        let vhost = vhost.with_context(|| format!("nic {}: opening /dev/vhost-net", nic.name))?;
        vhosts.push(fds.add(vhost));
    }
    let (fd, further) = queues.split_first().unwrap_or((&0, &[]));
    Ok(vmm::Nic {
        vhost_fds: vhosts,
        fd: *fd,
        further_fds: further.to_vec(),
        mac: mac.octets().to_vec(),
        pci_slot: slot,
        mtu: nic.mtu_on(1500),
        ..convert::nic(nic)
    })
}

/// Bytes that depend on the names alone (FNV-1a, in 64-bit halves), so that a guest finds the same identities at
/// each start.
fn digest(names: &[&str]) -> [u8; 16] {
    let mut digest = [0; 16];
    for (half, seed) in digest.chunks_exact_mut(8).zip(0_u8..) {
        let mut hash = 0xcbf2_9ce4_8422_2325_u64;
        let bytes = names.iter().flat_map(|name| name.bytes().chain([0]));
        for byte in [seed].into_iter().chain(bytes) {
            hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
        half.copy_from_slice(&hash.to_le_bytes());
    }
    digest
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn manifest_of(text: &str) -> Result<Manifest> {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(text.as_bytes()).unwrap();
        manifest(file.path())
    }

    const MINIMAL: &str = "
apiVersion: vmmd/v1
kind: Vm
metadata: {name: web}
spec:
  cpu: {cores: 2}
  memory: {sizeBytes: 268435456}
  boot: {linux: {kernel: /boot/vmlinuz, cmdline: console=ttyS0}}
";

    #[test]
    fn a_minimal_manifest_is_read() {
        let manifest = manifest_of(MINIMAL).unwrap();
        assert_eq!(manifest.spec.topology.cores(), 2);
        assert_eq!(manifest.spec.memory_bytes, 256 << 20);
    }

    /// The manifest of the quick start, and fields that only the daemon sets.
    #[test]
    fn what_vmmctl_takes_and_prints_is_read() {
        let text = "
apiVersion: vmmd/v1
kind: Vm
metadata:
  name: web
  uid: 0192f7a4-0000-7000-8000-000000000001
  generation: 3
  createTime: '2026-11-24T08:00:00Z'
spec:
  cpu: {cores: 2}
  memory: {sizeBytes: 1Gi}
  boot: {linux: {kernel: /boot/vmlinuz}}
  disks:
  - {name: root, path: /srv/root.img, format: raw}
  runPolicy: manual
status:
  phase: VM_PHASE_RUNNING
  pendingChanges:
  - {path: spec.cpu.cores, current: 1, desired: 2}
";
        let manifest = manifest_of(text).unwrap();
        assert_eq!(manifest.spec.memory_bytes, 1 << 30);
        assert_eq!(manifest.spec.disks.len(), 1);
    }

    #[test]
    fn what_is_wrong_with_a_manifest_is_said_in_one_line() {
        for (text, expected) in [
            (MINIMAL.replace("cores", "coars"), "coars"),
            (
                MINIMAL.replace("cores: 2", "cores: 10000"),
                "spec.cpu.cores: must be 1 to 254",
            ),
            (MINIMAL.replace("web", "a/b"), "metadata.name"),
            (
                MINIMAL.replace("kind: Vm", "kind: Disk"),
                "line 3: kind: must be Vm",
            ),
            (format!("{MINIMAL}---{MINIMAL}"), "holds 2 documents"),
            (String::new(), "holds 0 documents"),
            (
                MINIMAL.replace("268435456", "1Gib"),
                "line 7: spec.memory.sizeBytes: must be a number of bytes",
            ),
            ("]".to_owned(), "line 1: not valid YAML"),
        ] {
            let message = format!("{:#}", manifest_of(&text).unwrap_err());
            assert!(message.contains(expected) && !message.contains('\n'), "{message}");
        }
    }

    #[test]
    fn image_is_opened_without_page_cache_where_possible() {
        use std::os::fd::AsRawFd as _;
        let is_direct = |file: &File| {
            let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", file.as_raw_fd())).unwrap();
            let flags = info.lines().find_map(|line| line.strip_prefix("flags:")).unwrap();
            i32::from_str_radix(flags.trim(), 8).unwrap() & libc::O_DIRECT != 0
        };
        let file = tempfile::NamedTempFile::new().unwrap();
        assert!(!is_direct(
            &open_image(file.path(), true, Cache::Writeback).unwrap()
        ));
        let auto = open_image(file.path(), true, Cache::Auto).unwrap();
        match open_image(file.path(), true, Cache::None) {
            Ok(none) => assert!(is_direct(&none) && is_direct(&auto)),
            Err(error) => assert!(error.to_string().contains("page cache") && !is_direct(&auto)),
        }
        // No file system stands behind it.
        let error = open_image(Path::new("/proc/self/status"), false, Cache::None).unwrap_err();
        assert!(error.to_string().contains("page cache"), "{error}");
        assert!(open_image(Path::new("/proc/self/status"), false, Cache::Auto).is_ok());
        assert!(open_image(Path::new("/nowhere/disk"), false, Cache::Auto).is_err());
    }

    #[test]
    fn identities_depend_on_the_names_alone() {
        assert_eq!(digest(&["web", "eth0"]), digest(&["web", "eth0"]));
        assert_ne!(digest(&["web", "eth0"]), digest(&["web", "eth1"]));
        assert_ne!(digest(&["a", "bc"]), digest(&["ab", "c"]));
    }
}
