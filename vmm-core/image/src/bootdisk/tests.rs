//! Disks as distributions make them, by the tools that they are made with.

mod systems;

use std::{
    fs,
    io::Write as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    rc::Rc,
};

use fatfs::{FileSystem, FormatVolumeOptions, FsOptions};

use super::*;

const MIB: u64 = 1 << 20;
pub const ROOT: &str = "11111111-2222-4333-8444-555555555555";
const BOOT: &str = "66666666-7777-4888-9999-aaaaaaaaaaaa";

/// A folder for the parts of a disk.
pub struct Workshop(tempfile::TempDir);

impl Workshop {
    pub fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    /// An ext4 file system with these files; what begins with `->` is a link.
    fn ext4(&self, uuid: &str, files: &[(&str, &str)]) -> Vec<u8> {
        self.ext4_with(uuid, files, &[])
    }

    pub fn ext4_with(&self, uuid: &str, files: &[(&str, &str)], options: &[&str]) -> Vec<u8> {
        let root = self.folder(files);
        let image = self.0.path().join("ext4");
        fs::File::create(&image).unwrap().set_len(8 * MIB).unwrap();
        let tool = tool("mkfs.ext4");
        let done = Command::new(tool)
            .args(["-q", "-F", "-U", uuid, "-L", "system"])
            .args(options)
            .arg("-d")
            .args([root.path(), &image])
            .status();
        assert!(done.unwrap().success());
        fs::read(image).unwrap()
    }

    /// An XFS file system with these files.
    pub fn xfs(&self, files: &[(&str, &str)]) -> Vec<u8> {
        let folder = self.folder(files);
        let prototype = self.0.path().join("prototype");
        fs::write(
            &prototype,
            format!("/\n0 0\nd--755 0 0\n{}$\n", prototype_of(folder.path())),
        )
        .unwrap();
        let image = self.0.path().join("xfs");
        fs::File::create(&image).unwrap().set_len(24 * MIB).unwrap();
        let done = Command::new(tool("mkfs.xfs"))
            // The environment of its own tests, with which mkfs.xfs creates a small file system.
            .envs(["TEST_DIR", "TEST_DEV", "QA_CHECK_FS"].map(|name| (name, "1")))
            .args(["-q", "-f", "-L", "system", "-m"])
            .arg(format!("uuid={ROOT}"))
            .args(["-d", "agcount=1", "-p"])
            .args([&prototype, &image])
            .output()
            .unwrap();
        assert!(done.status.success(), "{done:?}");
        fs::read(image).unwrap()
    }

    /// A Btrfs file system with these files.
    pub fn btrfs(&self, files: &[(&str, &str)]) -> Vec<u8> {
        let folder = self.folder(files);
        let image = self.0.path().join("btrfs");
        fs::File::create(&image).unwrap().set_len(32 * MIB).unwrap();
        let done = Command::new(tool("mkfs.btrfs"))
            .args([
                "-q",
                "-f",
                "--mixed",
                "-n",
                "4096",
                "-U",
                ROOT,
                "-L",
                "system",
                "--rootdir",
            ])
            .args([folder.path(), &image])
            .output()
            .unwrap();
        assert!(done.status.success(), "{done:?}");
        let mut bytes = fs::read(image).unwrap();
        bytes.resize(32 << 20, 0);
        bytes
    }

    /// A folder with these files.
    fn folder(&self, files: &[(&str, &str)]) -> tempfile::TempDir {
        let folder = tempfile::tempdir_in(self.0.path()).unwrap();
        let root = folder.path();
        for (path, content) in files {
            let path = root.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            match content.strip_prefix("->") {
                Some(target) => std::os::unix::fs::symlink(target, path).unwrap(),
                None => fs::write(path, content).unwrap(),
            }
        }
        folder
    }

    /// A disk with these partitions, 8 MiB each from 1 MiB on.
    pub fn disk(&self, label: &str, kinds: &[&str], parts: &[Vec<u8>]) -> Rc<dyn Medium> {
        let path = self.0.path().join("disk");
        let size = MIB * (10 + 9 * parts.len() as u64);
        fs::File::create(&path).unwrap().set_len(size).unwrap();
        let mut child = Command::new(tool("sfdisk"))
            .arg("-q")
            .arg(&path)
            .stdin(Stdio::piped())
            .spawn()
            .unwrap();
        let mut script = format!("label: {label}\nlabel-id: 0x12345678\n");
        if label == "gpt" {
            script = "label: gpt\n".to_owned();
        }
        for (number, kind) in kinds.iter().enumerate() {
            // An extended partition has the others in it, each behind a record of its own.
            let number = number as u64;
            let (start, size) = match *kind {
                "E" => (1, MIB * 10 * parts.len() as u64),
                _ if kinds.contains(&"E") => (2 + 9 * (number - 1), 8 * MIB),
                _ => (1 + 9 * number, 8 * MIB),
            };
            script += &format!("start={}, size={}, type={kind}\n", start * MIB / 512, size / 512);
        }
        child.stdin.take().unwrap().write_all(script.as_bytes()).unwrap();
        assert!(child.wait().unwrap().success());
        let mut disk = fs::read(&path).unwrap();
        let table = partitions::partitions(&Window::whole(Rc::new(disk.clone())));
        assert_eq!(table.len(), parts.len(), "{table:?}");
        for (partition, content) in table.iter().zip(parts) {
            let start = usize::try_from(partition.window.start()).unwrap();
            disk[start..start + content.len()].copy_from_slice(content);
        }
        Rc::new(disk)
    }
}

fn tool(name: &str) -> PathBuf {
    let found = ["/usr/sbin", "/sbin", "/usr/bin"].map(|folder| Path::new(folder).join(name));
    let found = found.into_iter().find(|path| path.exists());
    found.unwrap_or_else(|| panic!("{name} is missing: install e2fsprogs, xfsprogs, btrfs-progs and fdisk"))
}

/// Content of a folder, as a prototype file for mkfs.xfs.
fn prototype_of(folder: &Path) -> String {
    let mut text = String::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap();
        if path.is_symlink() {
            let target = fs::read_link(&path).unwrap();
            text += &format!("{name} l--777 0 0 {}\n", target.display());
        } else if path.is_dir() {
            text += &format!("{name} d--755 0 0\n{}$\n", prototype_of(&path));
        } else {
            text += &format!("{name} ---644 0 0 {}\n", path.display());
        }
    }
    text
}

/// A FAT file system with these files.
pub fn fat(files: &[(&str, &str)]) -> Vec<u8> {
    let files: Vec<_> = files
        .iter()
        .map(|(path, content)| (*path, content.as_bytes()))
        .collect();
    fat_of(&files)
}

pub fn fat_of(files: &[(&str, &[u8])]) -> Vec<u8> {
    let mut bytes = vec![0; 8 << 20];
    let mut cursor = std::io::Cursor::new(&mut bytes);
    fatfs::format_volume(&mut cursor, FormatVolumeOptions::new().volume_id(0xabcd_0123)).unwrap();
    {
        let volume = FileSystem::new(&mut cursor, FsOptions::new()).unwrap();
        for (path, content) in files {
            let mut folder = volume.root_dir();
            let (folders, name) = path.rsplit_once('/').unwrap_or(("", path));
            for part in folders.split('/').filter(|part| !part.is_empty()) {
                folder = folder.create_dir(part).unwrap();
            }
            folder.create_file(name).unwrap().write_all(content).unwrap();
        }
    }
    bytes
}

fn content(found: &Found) -> (String, String) {
    let (mut kernel, mut initrd) = (Vec::new(), Vec::new());
    let lengths = (
        found.copy_kernel(&mut kernel).unwrap(),
        found.copy_initrd(&mut initrd).unwrap(),
    );
    assert_eq!(lengths, (kernel.len() as u64, initrd.len() as u64));
    (
        String::from_utf8(kernel).unwrap(),
        String::from_utf8(initrd).unwrap(),
    )
}

const GRUB_CFG: &str = "set default=0\nmenuentry 'Debian' { search --fs-uuid --set=root 11111111-2222-4333-8444-555555555555\n\
    linux /boot/vmlinuz-6.1 root=UUID=11111111-2222-4333-8444-555555555555 ro console=ttyS0\n initrd /boot/initrd.img-6.1\n}\n\
    menuentry old { linux /boot/vmlinuz-6.0 }\n";

#[test]
fn grub_cfg_says_what_a_debian_on_gpt_boots() {
    let workshop = Workshop::new();
    let root = workshop.ext4(
        ROOT,
        &[
            ("boot/grub/grub.cfg", GRUB_CFG),
            ("boot/vmlinuz-6.1", "kernel 6.1"),
            ("boot/vmlinuz-6.0", "kernel 6.0"),
            ("boot/initrd.img-6.1", "ramdisk 6.1"),
        ],
    );
    let esp = fat(&[(
        "EFI/debian/grub.cfg",
        "search.fs_uuid 11111111-2222-4333-8444-555555555555 root\nconfigfile ($root)/boot/grub/grub.cfg\n",
    )]);
    let disk = workshop.disk("gpt", &["U", "L"], &[esp, root]);
    let found = find(disk).unwrap();
    assert_eq!(
        found.cmdline,
        "root=UUID=11111111-2222-4333-8444-555555555555 ro console=ttyS0"
    );
    assert_eq!(
        found.by,
        "the entry \"Debian\" of /boot/grub/grub.cfg on partition 2"
    );
    assert_eq!(content(&found), ("kernel 6.1".into(), "ramdisk 6.1".into()));
}

#[test]
fn boot_partition_has_own_entries_and_grubs_saved_one() {
    let workshop = Workshop::new();
    let entry = |version: &str| {
        format!(
            "title Fedora {version}\nversion {version}\nlinux /vmlinuz-{version}\ninitrd /initramfs-{version}.img\n\
             options root=UUID={ROOT} ro $tuned_params\n"
        )
    };
    let boot = |saved: &str| {
        workshop.ext4(
            BOOT,
            &[
                ("loader/entries/m-6.9.conf", &entry("6.9")),
                ("loader/entries/m-6.11.conf", &entry("6.11")),
                ("vmlinuz-6.9", "kernel 6.9"),
                ("vmlinuz-6.11", "kernel 6.11"),
                ("initramfs-6.9.img", "12345"),
                ("initramfs-6.11.img", "ramdisk 6.11"),
                (
                    "grub2/grubenv",
                    &format!("# GRUB Environment Block\nsaved_entry={saved}\n###"),
                ),
                ("grub2/grub.cfg", "insmod blscfg\nblscfg\n"),
            ],
        )
    };
    let root = workshop.ext4(ROOT, &[("etc/os-release", "ID=fedora\n")]);
    for (saved, kernel) in [
        ("", "kernel 6.11"),
        ("m-6.9", "kernel 6.9"),
        ("gone", "kernel 6.11"),
    ] {
        let disk = workshop.disk("gpt", &["L", "L"], &[boot(saved), root.clone()]);
        let found = find(disk).unwrap();
        assert_eq!(content(&found).0, kernel, "{saved}");
        // The console is added, since the boot would be invisible without it.
        assert_eq!(found.cmdline, format!("root=UUID={ROOT} ro console=ttyS0"));
    }
}

#[test]
fn disk_whose_boot_loader_boots_another_entry_once_is_refused() {
    let workshop = Workshop::new();
    let entry = |version: &str| format!("version {version}\nlinux /vmlinuz-{version}\n");
    let once = "if [ \"${next_entry}\" ] ; then\n set default=\"${next_entry}\"\n set next_entry=\n save_env next_entry\nfi\n";
    let of_cfg = |next: &str, reads: &str| {
        workshop.ext4(
            ROOT,
            &[
                ("boot/grub/grub.cfg", &format!("{reads}{GRUB_CFG}")),
                (
                    "boot/grub/grubenv",
                    &format!("# GRUB Environment Block\nnext_entry={next}\n"),
                ),
                ("boot/vmlinuz-6.1", "kernel 6.1"),
                ("boot/vmlinuz-6.0", "kernel 6.0"),
                ("boot/initrd.img-6.1", "ramdisk 6.1"),
            ],
        )
    };
    let of_loader = |next: &str, reads: &str, loader: (&str, &str)| {
        workshop.ext4(
            BOOT,
            &[
                ("loader/entries/m-6.9.conf", &entry("6.9")),
                ("loader/entries/m-6.11.conf", &entry("6.11")),
                loader,
                ("vmlinuz-6.9", "kernel 6.9"),
                ("vmlinuz-6.11", "kernel 6.11"),
                (
                    "grub2/grubenv",
                    &format!("saved_entry=m-6.9\nnext_entry={next}\n"),
                ),
                ("grub2/grub.cfg", &format!("{reads}insmod blscfg\nblscfg\n")),
            ],
        )
    };
    let none = ("loader/nothing", "");
    let systemd = ("loader/loader.conf", "default m-6.9\n");
    for (disk, kernel) in [
        (of_cfg("", once), "kernel 6.1"),
        (of_cfg("Debian", once), "kernel 6.1"),
        // The configuration does not read it.
        (of_cfg("old", ""), "kernel 6.1"),
        (of_loader("", once, none), "kernel 6.9"),
        (of_loader("m-6.9", once, none), "kernel 6.9"),
        (of_loader("m-6.11", "", none), "kernel 6.9"),
        // systemd-boot does not read it.
        (of_loader("m-6.11", once, systemd), "kernel 6.9"),
    ] {
        assert_eq!(content(&find(Rc::new(disk)).unwrap()).0, kernel);
    }
    for (disk, by, next) in [
        (
            of_cfg("old", once),
            "the entry \"Debian\" of /boot/grub/grub.cfg",
            "old",
        ),
        (
            of_loader("m-6.11", once, none),
            "the boot loader entry m-6.9",
            "m-6.11",
        ),
        (of_loader("0", once, none), "the boot loader entry m-6.9", "0"),
    ] {
        let refused = find(Rc::new(disk)).unwrap_err().to_string();
        let begin =
            format!("{by} can't be booted: GRUB has been asked to boot the entry \"{next}\" instead, once");
        assert!(refused.starts_with(&begin), "{refused}");
        assert!(refused.contains("grubenv unset next_entry"), "{refused}");
    }
}

#[test]
fn entries_on_the_efi_system_partition_name_their_kernels_there() {
    let entry = "linux /6b/6.1/linux\ninitrd /6b/6.1/initrd\ninitrd /6b/6.1/second\noptions root=LABEL=system console=hvc0\n";
    let esp = fat(&[
        ("loader/entries/6b-6.1.conf", entry),
        ("6b/6.1/linux", "kernel"),
        ("6b/6.1/initrd", "12345"),
        ("6b/6.1/second", "67"),
    ]);
    let workshop = Workshop::new();
    let root = workshop.ext4(ROOT, &[("etc/os-release", "ID=debian\n")]);
    let found = find(workshop.disk("gpt", &["U", "L"], &[esp, root])).unwrap();
    assert_eq!(found.cmdline, "root=LABEL=system console=hvc0");
    // Each archive begins at a multiple of 4 bytes.
    assert_eq!(content(&found), ("kernel".into(), "12345\x00\x00\x0067".into()));
}

#[test]
fn unified_kernel_images_are_booted_as_systemd_boot_sorts_them() {
    let image = |version: &str, kernel: &str| {
        let release = format!("ID=sample\nIMAGE_VERSION={version}\n");
        uki::tests::pe(&[
            (".osrel", release.as_bytes()),
            (".cmdline", b"root=LABEL=system console=hvc0\n"),
            (".initrd", b"12345"),
            (".linux", kernel.as_bytes()),
        ])
    };
    let (old, new) = (image("6.9", "kernel 6.9"), image("6.11", "kernel 6.11"));
    let found = |files: &[(&str, &str)]| {
        let files = files.iter().map(|(path, content)| (*path, content.as_bytes()));
        let images = [
            ("EFI/Linux/a.efi", old.as_slice()),
            ("EFI/Linux/b.EFI", new.as_slice()),
        ];
        let files: Vec<_> = images.into_iter().chain(files).collect();
        find(Rc::new(fat_of(&files))).unwrap()
    };
    let newest = found(&[]);
    assert_eq!(newest.by, "the unified kernel image b");
    assert_eq!(newest.kernel, "/EFI/Linux/b.EFI");
    assert_eq!(newest.cmdline, "root=LABEL=system console=hvc0");
    assert_eq!(content(&newest), ("kernel 6.11".into(), "12345".into()));
    for default in ["default a.efi\n", "timeout 1\ndefault a*\n", "default A\n"] {
        let chosen = found(&[("loader/loader.conf", default)]);
        assert_eq!(content(&chosen).0, "kernel 6.9", "{default}");
    }
    // An entry that names one, with a command line of its own; the other names a program that is no kernel.
    let named = found(&[
        ("loader/loader.conf", "default entry.efi\n"),
        (
            "loader/entries/entry.conf",
            "uki /EFI/Linux/a.efi\noptions root=LABEL=system single\n",
        ),
        ("loader/entries/shell.conf", "efi /shell.efi\n"),
        ("shell.efi", "MZ"),
    ]);
    assert_eq!(named.cmdline, "root=LABEL=system single console=ttyS0");
    assert_eq!(content(&named).0, "kernel 6.9");
    // With entries of kernels it is one list.
    let sorted = found(&[
        (
            "loader/entries/c.conf",
            "sort-key sample\nversion 6.12\nlinux /linux\n",
        ),
        ("linux", "kernel 6.12"),
    ]);
    assert_eq!(content(&sorted).0, "kernel 6.12");
}

/// The reason why a disk with these files is refused.
fn refusal(workshop: &Workshop, files: &[(&str, &str)]) -> String {
    let disk = workshop.ext4(ROOT, files);
    find(Rc::new(disk)).unwrap_err().to_string()
}

#[test]
fn kernel_without_boot_loader_entry_is_refused() {
    let workshop = Workshop::new();
    let kernel = [
        ("vmlinuz", "->boot/vmlinuz-6.1"),
        ("boot/vmlinuz-6.1", "kernel 6.1"),
        ("boot/initrd.img-6.1", "ramdisk 6.1"),
        ("etc/os-release", "ID=alpine\n"),
    ];
    let refused = refusal(&workshop, &kernel);
    assert!(
        refused.ends_with("there are no boot loader entries and no grub.cfg on it"),
        "{refused}"
    );
    for path in [
        "extlinux.conf",
        "boot/extlinux.conf",
        "boot/syslinux/syslinux.cfg",
    ] {
        let config = (path, "LABEL virt\nLINUX vmlinuz-virt\nINITRD initramfs-virt\n");
        let refused = refusal(&workshop, &[&kernel[..], &[config]].concat());
        assert!(refused.contains("SYSLINUX or EXTLINUX"), "{refused}");
    }
}

#[test]
fn entry_with_a_variable_that_grub_cfg_sets_is_refused() {
    let workshop = Workshop::new();
    let disk = |options: &str, configuration: &str, environment: &str| {
        let entry = format!("linux /vmlinuz\ninitrd /initrd $tuned_initrd\noptions {options}\n");
        workshop.ext4(
            BOOT,
            &[
                ("loader/entries/m.conf", &entry),
                ("vmlinuz", "kernel"),
                ("initrd", "ramdisk"),
                ("grub2/grubenv", environment),
                ("grub2/grub.cfg", configuration),
            ],
        )
    };
    let kernelopts = "if [ -z \"${kernelopts}\" ]; then\n  set kernelopts=\"root=UUID=1 ro \"\nfi\nblscfg\n";
    let ignition = "set ignition_firstboot=\"\"\nif [ -f \"/ignition.firstboot\" ]; then\n \
                    set ignition_firstboot=\"ignition.firstboot ${x}\"\nfi\nblscfg\n";
    let harmless =
        "set tuned_params=\"\"\nset tuned_initrd=\"\"\nload_env -f ${config_directory}/grubenv\nblscfg\n";
    for (options, configuration, name) in [
        ("$kernelopts", kernelopts, "kernelopts"),
        ("root=UUID=1 $ignition_firstboot", ignition, "ignition_firstboot"),
        (
            "root=UUID=1 $more",
            "load_env -f /boot/photon.cfg\nblscfg\n",
            "tuned_initrd",
        ),
    ] {
        let refused = find(Rc::new(disk(options, configuration, "")))
            .unwrap_err()
            .to_string();
        assert!(
            refused.starts_with(&format!(
                "the boot loader entry m can't be booted: it uses ${name}, and grub.cfg sets"
            )),
            "{refused}"
        );
    }
    for (options, configuration, environment) in [
        ("$kernelopts", kernelopts, "kernelopts=root=UUID=1 ro\n"),
        ("root=UUID=1 ro $tuned_params", harmless, ""),
    ] {
        let found = find(Rc::new(disk(options, configuration, environment))).unwrap();
        assert_eq!(found.cmdline, "root=UUID=1 ro console=ttyS0");
    }
    let photon = "load_env -f /boot/photon.cfg\nmenuentry \"Photon\" {\n linux /boot/$photon_linux root=$rootpartition\n}\n";
    let refused = refusal(
        &workshop,
        &[("boot/grub/grub.cfg", photon), ("boot/vmlinuz-6.1", "kernel")],
    );
    assert!(refused.contains("it uses $photon_linux"), "{refused}");
}

#[test]
fn unified_kernel_image_that_needs_systemd_boot_is_refused() {
    let image = |cmdline: &[u8]| uki::tests::pe(&[(".cmdline", cmdline), (".linux", b"kernel")]);
    let refused = |files: &[(&str, &[u8])]| find(Rc::new(fat_of(files))).unwrap_err().to_string();
    let (without, with) = (image(b"quiet"), image(b"root=LABEL=system"));
    let text = refused(&[("EFI/Linux/a.efi", &without)]);
    assert!(text.contains("no root="), "{text}");
    for addon in [
        "EFI/Linux/a.efi.extra.d/fips.addon.efi",
        "loader/addons/console.addon.efi",
    ] {
        let text = refused(&[("EFI/Linux/a.efi", &with), (addon, b"MZ")]);
        assert!(text.contains("addons"), "{text}");
    }
    let other = find(Rc::new(fat_of(&[
        ("EFI/Linux/a.efi", &with),
        ("EFI/Linux/a.efi.extra.d/x.cred", b""),
    ])));
    assert_eq!(content(&other.unwrap()).0, "kernel");
}

#[test]
fn gpt_without_its_first_header_is_named() {
    let workshop = Workshop::new();
    let root = workshop.ext4(ROOT, &[("boot/grub/grub.cfg", GRUB_CFG)]);
    let disk = workshop.disk("gpt", &["L"], &[root]);
    let mut bytes = vec![0; usize::try_from(disk.size()).unwrap()];
    disk.read_at(&mut bytes, 0).unwrap();
    bytes[512..1024].fill(0);
    let refused = find(Rc::new(bytes)).unwrap_err().to_string();
    assert!(refused.contains("no header in sector 1"), "{refused}");
}

#[test]
fn a_disk_without_a_kernel_is_refused_with_what_it_has() {
    let workshop = Workshop::new();
    let refused = |disk: Rc<dyn Medium>| find(disk).unwrap_err().to_string();
    assert!(refused(Rc::new(vec![0; 1 << 20])).contains("no file system that is known here"));
    let mut lvm = vec![0; 8 << 20];
    lvm[512..520].copy_from_slice(b"LABELONE");
    let disk = workshop.disk("gpt", &["L"], &[lvm]);
    assert_eq!(
        refused(disk),
        "no kernel was found on the disk: partition 1 has LVM, which is not read"
    );
    let root = |files: &[(&str, &str)]| Rc::new(workshop.ext4(ROOT, files));
    assert!(refused(root(&[("a", "b")])).contains("no grub.cfg"));
    let gone = root(&[("boot/grub/grub.cfg", GRUB_CFG)]);
    assert!(refused(gone).contains("names /boot/vmlinuz-6.1, which is not there"));
    let no_initrd = root(&[("boot/grub/grub.cfg", GRUB_CFG), ("boot/vmlinuz-6.1", "kernel")]);
    assert!(refused(no_initrd).contains("initrd.img-6.1 is not there"));
    let long = GRUB_CFG.replace("console=ttyS0", &"x".repeat(3000));
    let long = root(&[
        ("boot/grub/grub.cfg", &long),
        ("boot/vmlinuz-6.1", "kernel"),
        ("boot/initrd.img-6.1", "ramdisk"),
    ]);
    assert!(refused(long).contains("longer than 2047 bytes"));
    // Values that a library would trust: more blocks than the partition has, and more block groups
    // than fit into memory.
    for (field, value, reason) in [
        (0x4, 0xffff_ffff_u32, "more than its partition"),
        (0x20, 0, "groups of blocks"),
    ] {
        let mut spoiled = workshop.ext4_with(ROOT, &[], &["-O", "^metadata_csum"]);
        spoiled[1024 + field..1024 + field + 4].copy_from_slice(&value.to_le_bytes());
        assert!(refused(Rc::new(spoiled)).contains(reason));
    }
    let long_way = find_within(root(&[("boot/grub/grub.cfg", GRUB_CFG)]), 5000, 0).unwrap_err();
    assert!(
        long_way
            .to_string()
            .contains("more than 5000 bytes would have to be read")
    );
    let unified = fat(&[("EFI/Linux/a.efi", "MZ")]);
    assert!(refused(Rc::new(unified)).contains("unified kernel images (/EFI/Linux) have no kernel"));
    // A link to itself, and one that leads out.
    let looped = root(&[
        ("boot/grub/grub.cfg", "->grub.cfg"),
        ("boot/grub2/grub.cfg", "->../../../../../etc/shadow"),
    ]);
    assert!(refused(looped).contains("no grub.cfg"));
}

#[test]
fn file_system_with_unknown_features_is_named() {
    let workshop = Workshop::new();
    let files = [("boot/grub/grub.cfg", GRUB_CFG)];
    for features in ["meta_bg,^resize_inode", "mmp", "large_dir", "inline_data"] {
        let disk = workshop.ext4_with(ROOT, &files, &["-O", features]);
        let refused = find(Rc::new(disk)).unwrap_err().to_string();
        assert!(
            refused.contains("the disk has an ext4 file system that can't be read"),
            "{refused}"
        );
    }
}

#[test]
fn mbr_is_for_blocks_of_512_bytes() {
    let workshop = Workshop::new();
    let root = workshop.ext4(ROOT, &[]);
    let check = |label: &str, kind: &str, block: u64| {
        let disk = workshop.disk(label, &[kind], std::slice::from_ref(&root));
        partitions::check_block(&Window::whole(disk), block)
    };
    assert_eq!(check("dos", "L", 512), Ok(()));
    assert!(check("dos", "L", 4096).unwrap_err().contains("is an MBR"));
    assert_eq!(check("gpt", "L", 512), Ok(()));
    assert!(check("gpt", "L", 4096).unwrap_err().contains("logicalBlockBytes"));
    let whole: Rc<dyn Medium> = Rc::new(root.clone());
    assert_eq!(partitions::check_block(&Window::whole(whole), 4096), Ok(()));
}

#[test]
fn a_damaged_disk_is_refused_or_read_and_nothing_else_happens() {
    let workshop = Workshop::new();
    let root = workshop.ext4(
        ROOT,
        &[
            ("boot/grub/grub.cfg", GRUB_CFG),
            ("boot/vmlinuz-6.1", "kernel 6.1"),
            ("boot/initrd.img-6.1", "ramdisk 6.1"),
        ],
    );
    let esp = fat(&[("loader/entries/a.conf", "linux /a\n")]);
    let disk = workshop.disk("gpt", &["U", "L"], &[esp, root]);
    let mut whole = vec![0; usize::try_from(disk.size()).unwrap()];
    disk.read_at(&mut whole, 0).unwrap();
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    // Tables, superblocks and the first blocks of both file systems.
    let mebibytes = [0, 1, 10_usize];
    let spoiled = (
        0..3_usize,
        0..128_usize << 10,
        proptest::num::u64::ANY,
        1..64_usize,
    );
    let many = proptest::test_runner::Config {
        cases: 100,
        ..Default::default()
    };
    runner = proptest::test_runner::TestRunner::new_with_rng(many, runner.new_rng());
    runner
        .run(&spoiled, |(region, offset, value, length)| {
            let mut disk = whole.clone();
            let at = (mebibytes[region] << 20) + offset;
            for (index, byte) in disk[at..at + length].iter_mut().enumerate() {
                *byte = value
                    .rotate_left(u32::try_from(index).unwrap_or_default() * 7)
                    .to_le_bytes()[0];
            }
            if let Ok(found) = find(Rc::new(disk)) {
                let _ = found.copy_kernel(&mut std::io::sink());
                let _ = found.copy_initrd(&mut std::io::sink());
            }
            Ok(())
        })
        .unwrap();
}
