//! What is measured: our `vmm` and QEMU's machines, each with the same guest: 1 vCPU, 256 MiB, serial console,
//! entropy device, no network; no disk or one.

use std::{
    ffi::OsString,
    fs,
    net::Ipv4Addr,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use serde_json::{Value, json};

use crate::tiny;

/// Guest RAM of each in bytes.
pub const MEMORY: u64 = 256 << 20;
const CMDLINE: &str = "console=ttyS0 quiet reboot=t panic=-1";
/// For a guest without a disk: it starts without loading modules.
const NO_MODULES: &str = "guest.modules=none";

/// A program with arguments that boots the guest with its serial console on the standard output.
pub struct Subject {
    /// Name in the tables.
    pub name: &'static str,
    /// Its file.
    pub program: PathBuf,
    /// Its arguments.
    pub arguments: Vec<OsString>,
    /// The image of its disk, if it has one.
    pub image: Option<Image>,
}

/// A subject's own copy of an image, as several can't write to one.
pub struct Image {
    template: PathBuf,
    path: PathBuf,
}

/// The copied file, removed on drop.
pub struct Copied(PathBuf);

impl Image {
    /// Makes the copy.
    pub fn copy(&self) -> Result<Copied> {
        let copied = Copied(self.path.clone());
        fs::copy(&self.template, &self.path)
            .and_then(|_| fs::File::open(&self.path)?.sync_all())
            .with_context(|| format!("copy {} to {}", self.template.display(), self.path.display()))?;
        Ok(copied)
    }
}

impl Drop for Copied {
    fn drop(&mut self) {
        fs::remove_file(&self.0).ok();
    }
}

/// Numbers of peers begin here.
pub const PEERS: u8 = 4;

/// The tap, the address and the hardware address of the subject with that number.
pub fn place(number: u8) -> (String, Ipv4Addr, String) {
    let host = number.saturating_add(2);
    (
        format!("measure0t{number}"),
        Ipv4Addr::new(10, 8, 0, host),
        format!("52:54:00:00:08:{host:02x}"),
    )
}

/// Where a subject's screen is served.
pub fn socket(subject: &str) -> PathBuf {
    std::env::temp_dir().join(format!("measure-{subject}.vnc"))
}

/// Where the virtio-console of [`OURS`] is served.
pub fn hvc() -> PathBuf {
    std::env::temp_dir().join("measure-vmm.hvc")
}

/// The subject that is our VMM.
pub const OURS: &str = "vmm";

/// Programs and guest files.
pub struct Programs {
    /// Ours.
    pub vmm: PathBuf,
    /// QEMU.
    pub qemu: PathBuf,
    /// A bzImage.
    pub kernel: PathBuf,
    /// An initial RAM disk, if it has one.
    pub initrd: Option<PathBuf>,
}

impl Programs {
    /// Returns the same programs with a kernel of a few bytes that halts: the time to its first
    /// instruction is the VMM's own.
    pub fn with_tiny_kernel(&self) -> Result<Self> {
        let kernel = std::env::temp_dir().join("measure-tiny");
        fs::write(&kernel, tiny::kernel()).context("write the tiny kernel")?;
        Ok(Self {
            kernel,
            initrd: None,
            vmm: self.vmm.clone(),
            qemu: self.qemu.clone(),
        })
    }
}

/// A disk of the guest, past the page cache of the node, with one queue and one thread of the VMM's for it.
#[derive(Clone, Copy)]
pub struct Disk<'a> {
    /// "raw" or "qcow2".
    pub format: &'a str,
    /// Image that each subject gets a copy of.
    pub template: &'a Path,
}

impl Disk<'_> {
    fn image(&self, subject: &str) -> Image {
        let mut path = self.template.as_os_str().to_owned();
        path.push(format!(".{subject}"));
        Image {
            template: self.template.to_owned(),
            path: path.into(),
        }
    }
}

/// All of them without a disk.
pub fn subjects(programs: &Programs) -> Result<Vec<Subject>> {
    Ok(vec![
        ours("vmm", programs, None, json!({}))?,
        qemu("microvm", programs, MICROVM, None),
        qemu("q35", programs, "q35", None),
    ])
}

/// Ours without a disk, with `spec.memory` and `spec.balloon` as they are given.
pub fn with_memory(
    name: &'static str,
    programs: &Programs,
    memory: &Value,
    balloon: Option<Value>,
) -> Result<Subject> {
    let mut more = json!({"memory": memory});
    if let Some(balloon) = balloon {
        more["balloon"] = balloon;
    }
    ours(name, programs, None, more)
}

/// All of them with a disk: raw under each, qcow2 under ours and q35.
pub fn with_disks(programs: &Programs, raw: &Path, qcow2: &Path) -> Result<Vec<Subject>> {
    let raw = Some(Disk {
        format: "raw",
        template: raw,
    });
    let qcow2 = Some(Disk {
        format: "qcow2",
        template: qcow2,
    });
    Ok(vec![
        ours("vmm-raw", programs, raw, json!({}))?,
        qemu("microvm-raw", programs, MICROVM, raw),
        qemu("q35-raw", programs, "q35", raw),
        ours("vmm-qcow2", programs, qcow2, json!({}))?,
        qemu("q35-qcow2", programs, "q35", qcow2),
    ])
}

/// Ours and QEMU's microvm with a network interface, without vhost-net and with it. Each is on the tap of its number
/// ([`place`]), with one pair of queues.
pub fn with_nics(programs: &Programs) -> Result<Vec<Subject>> {
    nics(programs, 0, ["vmm", "vmm-vhost", "qemu", "qemu-vhost"])
}

/// Another one of each, which the first is to reach.
pub fn with_nics_of_peers(programs: &Programs) -> Result<Vec<Subject>> {
    let names = ["vmm-peer", "vmm-vhost-peer", "qemu-peer", "qemu-vhost-peer"];
    nics(programs, PEERS, names)
}

fn nics(programs: &Programs, first: u8, names: [&'static str; 4]) -> Result<Vec<Subject>> {
    let [ours, ours_vhost, qemus, qemus_vhost] = names;
    Ok(vec![
        our_nic(programs, first, ours, false)?,
        our_nic(programs, first + 1, ours_vhost, true)?,
        qemu_nic(programs, first + 2, qemus, false),
        qemu_nic(programs, first + 3, qemus_vhost, true),
    ])
}

fn our_nic(programs: &Programs, number: u8, name: &'static str, vhost: bool) -> Result<Subject> {
    let (tap, address, mac) = place(number);
    let backend = if vhost { "VHOST" } else { "USERSPACE" };
    let nic = json!({"name": "eth0", "tap": tap, "mac": mac, "backend": backend});
    let cmdline = format!("{CMDLINE} guest.ip={address}/24");
    let linux = json!({"kernel": programs.kernel, "initrd": programs.initrd, "cmdline": cmdline});
    let more = json!({"nics": [nic], "boot": {"linux": linux}});
    ours(name, programs, None, more)
}

fn qemu_nic(programs: &Programs, number: u8, name: &'static str, vhost: bool) -> Subject {
    let (tap, address, mac) = place(number);
    let vhost = if vhost { "on" } else { "off" };
    let mut subject = qemu(name, programs, MICROVM, None);
    let net = [
        "-netdev".to_owned(),
        format!("tap,id=net,ifname={tap},script=no,downscript=no,vhost={vhost}"),
        "-device".to_owned(),
        format!("virtio-net-pci,netdev=net,mac={mac}"),
        // The last one counts.
        "-append".to_owned(),
        format!("{CMDLINE} guest.ip={address}/24"),
    ];
    subject.arguments.extend(net.map(OsString::from));
    subject
}

/// Our VMM and QEMU's q35 with a screen of 1920 × 1080, served without a password at
/// [`socket`], a keyboard and a virtio-console. Ours is served at [`hvc`]; QEMU's
/// has no reader.
pub fn with_screens(programs: &Programs) -> Result<Vec<Subject>> {
    screens(programs, None, MEMORY >> 20, CMDLINE)
}

/// The same with the whole Debian in that folder: `vmlinuz`, `initrd` and a root disk, with an X server.
pub fn with_desktops(programs: &Programs, folder: &Path) -> Result<Vec<Subject>> {
    let programs = Programs {
        vmm: programs.vmm.clone(),
        qemu: programs.qemu.clone(),
        kernel: folder.join("vmlinuz"),
        initrd: Some(folder.join("initrd")),
    };
    let template = folder.join("disk.raw");
    // Copies go beside the template's name, where there is room for them.
    let copied = Path::new("/var/tmp/measure-desktop").to_owned();
    fs::remove_file(&copied).ok();
    std::os::unix::fs::symlink(&template, &copied).context("name the desktop's disk")?;
    let disk = Disk {
        format: "raw",
        template: &copied,
    };
    screens(&programs, Some(disk), 768, "console=ttyS0 root=/dev/vda rw quiet")
}

fn screens(
    programs: &Programs,
    disk: Option<Disk<'_>>,
    memory_mib: u64,
    cmdline: &str,
) -> Result<Vec<Subject>> {
    let more = json!({
        "display": {"width": 1920, "height": 1080},
        "virtioConsole": {},
        "memory": {"sizeBytes": memory_mib << 20},
        "boot": {"linux": {"kernel": programs.kernel, "initrd": programs.initrd, "cmdline": cmdline}},
    });
    let mut ours = ours(OURS, programs, disk, more)?;
    ours.arguments
        .extend(["--vnc".into(), socket(OURS).into_os_string()]);
    ours.arguments.extend(["--hvc".into(), hvc().into_os_string()]);
    let mut qemu = qemu("q35", programs, "q35", disk);
    for (option, value) in [
        ("-device", "virtio-gpu-pci,xres=1920,yres=1080".to_owned()),
        ("-device", "virtio-keyboard-pci".to_owned()),
        ("-vnc", format!("unix:{}", socket("q35").display())),
        ("-device", "virtio-serial-pci".to_owned()),
        ("-chardev", "null,id=hvc".to_owned()),
        ("-device", "virtconsole,chardev=hvc".to_owned()),
        // The last one counts.
        ("-m", format!("{memory_mib}M")),
        ("-append", cmdline.to_owned()),
    ] {
        qemu.arguments.extend([option.into(), value.into()]);
    }
    Ok(vec![ours, qemu])
}

fn cmdline(disk: Option<Disk<'_>>) -> String {
    match disk {
        Some(_) => CMDLINE.to_owned(),
        None => format!("{CMDLINE} {NO_MODULES}"),
    }
}

/// `more` takes the place of fields of the spec.
fn ours(name: &'static str, programs: &Programs, disk: Option<Disk<'_>>, more: Value) -> Result<Subject> {
    let spec = std::env::temp_dir().join(format!("measure-{name}.yaml"));
    let mut manifest = json!({
        "apiVersion": "vmmd/v1",
        "kind": "Vm",
        "metadata": {"name": "measure"},
        "spec": {
            "cpu": {"cores": 1},
            "memory": {"sizeBytes": MEMORY},
            "boot": {"linux": {"kernel": programs.kernel, "cmdline": cmdline(disk)}},
        },
    });
    if let Some(initrd) = &programs.initrd {
        manifest["spec"]["boot"]["linux"]["initrd"] = json!(initrd);
    }
    if let (Value::Object(spec), Value::Object(more)) = (&mut manifest["spec"], more) {
        spec.extend(more);
    }
    let image = disk.map(|disk| disk.image(name));
    if let (Some(disk), Some(image)) = (disk, &image) {
        let format = format!("DISK_FORMAT_{}", disk.format.to_uppercase());
        manifest["spec"]["disks"] = json!([{
            "name": "data", "path": image.path, "format": format, "cache": "DISK_CACHE_NONE", "queues": 1,
        }]);
    }
    fs::write(&spec, manifest.to_string()).context("write the manifest")?;
    Ok(Subject {
        name,
        program: programs.vmm.clone(),
        arguments: vec!["run".into(), "--spec".into(), spec.into_os_string()],
        image,
    })
}

const MICROVM: &str = "microvm,x-option-roms=off,pit=off,pic=off,isa-serial=on,rtc=on,acpi=on,pcie=on";

fn qemu(name: &'static str, programs: &Programs, machine: &str, disk: Option<Disk<'_>>) -> Subject {
    let mut arguments: Vec<OsString> = Vec::new();
    let fixed = [
        "-nodefaults",
        "-no-user-config",
        "-nographic",
        "-enable-kvm",
        "-cpu",
        "host",
        "-smp",
        "1",
    ];
    arguments.extend(fixed.map(OsString::from));
    for (option, value) in [
        ("-m", "256M"),
        // Threads have names.
        ("-name", "measure,debug-threads=on"),
        ("-machine", machine),
        ("-serial", "stdio"),
        ("-device", "virtio-rng-pci"),
        ("-append", cmdline(disk).as_str()),
    ] {
        arguments.extend([option.into(), value.into()]);
    }
    arguments.extend(["-kernel".into(), programs.kernel.clone().into()]);
    if let Some(initrd) = &programs.initrd {
        arguments.extend(["-initrd".into(), initrd.clone().into()]);
    }
    let image = disk.map(|disk| disk.image(name));
    if let (Some(disk), Some(image)) = (disk, &image) {
        let drive = format!(
            "if=none,id=data,file={},format={},cache=none,aio=io_uring,discard=unmap",
            image.path.display(),
            disk.format
        );
        for (option, value) in [
            ("-object", "iothread,id=io"),
            ("-drive", drive.as_str()),
            ("-device", "virtio-blk-pci,drive=data,iothread=io,num-queues=1"),
        ] {
            arguments.extend([option.into(), value.into()]);
        }
    }
    Subject {
        name,
        program: programs.qemu.clone(),
        arguments,
        image,
    }
}
