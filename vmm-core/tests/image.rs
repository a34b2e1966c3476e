//! `vmm image` as vmmd runs it: with descriptors.

use std::{
    fs::{self, File},
    os::unix::fs::{FileExt as _, MetadataExt as _},
    path::{Path, PathBuf},
    process::{Command, Output},
};

use serde_json::Value;

/// Files in a folder of their own.
struct Images(tempfile::TempDir);

impl Images {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Runs `vmm image ARGUMENTS` with the files as descriptors from 3 on.
    fn run(&self, arguments: &str, files: &[&str]) -> Output {
        self.command(arguments, files).output().unwrap()
    }

    fn command(&self, arguments: &str, files: &[&str]) -> Command {
        let redirections: String = (3..)
            .zip(files)
            .map(|(fd, name)| format!(" {fd}<>'{}'", self.path(name).display()))
            .collect();
        let vmm = env!("CARGO_BIN_EXE_vmm");
        let mut command = Command::new("sh");
        command.args(["-c", &format!("exec '{vmm}' image {arguments}{redirections}")]);
        command
    }

    fn json(&self, arguments: &str, files: &[&str]) -> Value {
        let output = self.run(arguments, files);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && errors.is_empty(), "{errors}");
        serde_json::from_slice(&output.stdout).unwrap()
    }

    /// The one line that it says when it fails.
    fn error(&self, arguments: &str, files: &[&str]) -> String {
        let output = self.run(arguments, files);
        assert_eq!(output.status.code(), Some(1));
        assert!(output.stdout.is_empty());
        let errors = String::from_utf8(output.stderr).unwrap();
        assert_eq!(errors.lines().count(), 1, "{errors}");
        errors.trim_end().to_owned()
    }
}

/// Deeds of a process that an image has taken over.
const DEEDS: &str = "\
    open openat open_by_handle_at stat statx rename unlink chroot mount fsopen move_mount socket \
    unix-socket netlink connect bind accept sendmsg fork vfork clone-process clone-users unshare \
    setns execve execveat ptrace process_vm_readv process_vm_writev pidfd_open kill tgkill \
    tgkill-other signal-of-others signal-handler setuid prlimit dumpable keyctl bpf perf_event_open \
    init_module finit_module userfaultfd shmget semget msgget mq_unlink memfd_create splice vmsplice \
    mmap-exec mprotect-exec tiocsti kvm-create io_uring_setup io_uring_enter ring-register";

#[test]
fn images_commands_can_not_do_forbidden_deeds() {
    let images = Images::new();
    images.json("create --fd 3 --format qcow2 --size 1048576", &["disk"]);
    for name in ["raw", "source"] {
        fs::write(images.path(name), vec![1; 4096]).unwrap();
    }
    let expected = DEEDS.split_whitespace().map(|deed| (deed, libc::EPERM));
    let expected: Vec<_> = expected.chain([("clone3", libc::ENOSYS)]).collect();
    let deeds: Vec<_> = expected.iter().map(|(deed, _)| *deed).collect();
    let wanted = format!("image:{}", deeds.join(","));
    for (command, files) in [
        ("info --fd 3 --format qcow2", &["disk"][..]),
        ("check --fd 3 --format qcow2 --repair", &["disk"]),
        ("resize --fd 3 --format qcow2 --size 2097152", &["disk"]),
        ("create --fd 3 --format qcow2 --size 1048576", &["new"]),
        (&format!("{IMPORT} 1048576"), &IMPORT_FILES),
        (
            "boot --fd 3 --format raw --kernel-fd 4 --initrd-fd 5",
            &["raw", "kernel", "initrd"],
        ),
    ] {
        // See vmm-core/src/bin/vmm/sys/attempt.rs.
        let mut process = images.command(command, files);
        let output = process.env("VMM_ATTEMPT", &wanted).output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        let attempts = said.lines().filter(|line| line.starts_with("attempt "));
        let told: Vec<_> = attempts.map(str::to_owned).collect();
        let expected = expected
            .iter()
            .map(|(deed, errno)| format!("attempt {deed}: errno {errno}"));
        assert_eq!(told, expected.collect::<Vec<_>>(), "{command}");
        // No kernel is on that disk; all else succeeds as if nothing had been tried.
        assert_eq!(output.status.success(), !command.starts_with("boot"), "{said}");
    }
}

fn allocated(path: &Path) -> u64 {
    fs::metadata(path).unwrap().blocks() * 512
}

#[test]
fn images_are_created_described_and_grown() {
    let images = Images::new();
    for (format, cluster) in [("raw", Value::Null), ("qcow2", 65536.into())] {
        let options = format!("--fd 3 --format {format}");
        let created = images.json(&format!("create {options} --size 1073741824 --json"), &[format]);
        assert_eq!(created["virtual_size"], 1 << 30);
        assert_eq!(created["cluster_size"], cluster);
        assert!(created["allocated"].as_u64().unwrap() < 1 << 20);
        let grown = images.json(&format!("resize {options} --size 3221225472"), &[format]);
        assert_eq!(grown["virtual_size"], 3_u64 << 30);
        let info = images.json(&format!("info {options}"), &[format]);
        assert_eq!(info, grown);
        for flag in ["dirty", "corrupt", "encrypted", "backing"] {
            assert_eq!(info[flag], false, "{flag}");
        }
        let check = images.json(&format!("check {options}"), &[format]);
        assert_eq!((&check["corruptions"], &check["leaks"]), (&0.into(), &0.into()));
        assert_eq!(
            images.error(&format!("resize {options} --size 1073741824"), &[format]),
            "vmm: the disk has 3221225472 bytes and can't be made smaller: 1073741824"
        );
        let again = images.error(&format!("create {options} --size 512"), &[format]);
        assert!(again.ends_with("the file is not empty"), "{again}");
    }
    assert_eq!(
        images.json("info --fd 3 --format qcow2", &["qcow2"])["version"],
        3
    );
}

#[test]
fn space_is_reserved_as_asked_for() {
    const SIZE: u64 = 16 << 20;
    let images = Images::new();
    for (format, preallocation, clusters, least, most) in [
        ("raw", "off", 0, 0, 4096),
        ("raw", "metadata", 0, 0, 4096),
        ("raw", "full", 0, SIZE, SIZE + 65536),
        ("qcow2", "off", 0, 0, 1 << 20),
        ("qcow2", "metadata", 256, 0, 1 << 20),
        ("qcow2", "full", 256, SIZE, SIZE + (1 << 20)),
    ] {
        let name = format!("{format}-{preallocation}");
        let create = format!("create --fd 3 --format {format} --size {SIZE} --preallocation {preallocation}");
        images.json(&create, &[&name]);
        let taken = allocated(&images.path(&name));
        assert!((least..=most).contains(&taken), "{name}: {taken}");
        let check = images.json(&format!("check --fd 3 --format {format}"), &[&name]);
        assert_eq!(check["allocated_clusters"], clusters, "{name}");
        assert_eq!(check["leaks"], 0, "{name}");
    }
}

#[test]
fn an_overlay_has_the_size_of_what_is_below_or_more() {
    let images = Images::new();
    images.json("create --fd 3 --format raw --size 1048576", &["base"]);
    let below = "--backing-fd 4 --backing-format raw";
    let overlay = images.json(
        &format!("create --fd 3 --format qcow2 {below}"),
        &["overlay", "base"],
    );
    assert_eq!(
        (&overlay["virtual_size"], &overlay["backing"]),
        (&(1 << 20).into(), &true.into())
    );
    let second = "create --fd 3 --format qcow2 --size 2097152 --backing-fd 4 --backing-format qcow2 --backing-fd 5 --backing-format raw";
    let second = images.json(second, &["second", "overlay", "base"]);
    assert_eq!(second["virtual_size"], 2 << 20);
    let grown = images.json(
        &format!("resize --fd 3 --format qcow2 --size 4194304 {below}"),
        &["overlay", "base"],
    );
    assert_eq!(grown["virtual_size"], 4 << 20);
    let alone = images.error("resize --fd 3 --format qcow2 --size 8388608", &["overlay"]);
    assert!(alone.contains("never followed"), "{alone}");
    let raw = images.error(&format!("create --fd 3 --format raw {below}"), &["raw", "base"]);
    assert_eq!(raw, "vmm: only a qcow2 image can be an overlay");
    let full = format!("create --fd 3 --format qcow2 --preallocation full {below}");
    let full = images.error(&full, &["full", "base"]);
    assert!(full.ends_with("an overlay can't be preallocated"), "{full}");
}

#[test]
fn leaks_and_corruption_are_found_and_leaks_freed() {
    let images = Images::new();
    images.json("create --fd 3 --format qcow2 --size 1048576", &["disk"]);
    let file = File::options()
        .read(true)
        .write(true)
        .open(images.path("disk"))
        .unwrap();
    let read = |offset| {
        let mut bytes = [0; 8];
        file.read_exact_at(&mut bytes, offset).unwrap();
        u64::from_be_bytes(bytes)
    };
    let refcounts = read(read(48));
    file.write_all_at(&[0, 1], refcounts + 100).unwrap();
    let check = "check --fd 3 --format qcow2";
    assert_eq!(images.json(check, &["disk"])["leaks"], 1);
    let repaired = images.json(&format!("{check} --repair"), &["disk"]);
    assert_eq!(
        (&repaired["leaks"], &repaired["repaired"]),
        (&1.into(), &true.into())
    );
    assert_eq!(images.json(check, &["disk"])["leaks"], 0);
    file.write_all_at(&[0, 0], refcounts).unwrap();
    let output = images.run(check, &["disk"]);
    assert_eq!(output.status.code(), Some(1));
    let found: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(found["corruptions"], 1);
    let errors = String::from_utf8(output.stderr).unwrap();
    assert_eq!(
        errors,
        "vmm: the image is corrupt: cluster 0 is used 1 times, its refcount is 0\n"
    );
}

#[test]
fn what_is_no_image_or_in_use_is_refused() {
    let images = Images::new();
    fs::write(images.path("text"), [b'x'; 4096]).unwrap();
    for command in ["info", "check"] {
        let error = images.error(&format!("{command} --fd 3 --format qcow2"), &["text"]);
        assert_eq!(error, "vmm: not a qcow2 image");
    }
    let size = images.error("create --fd 3 --format raw --size 1000", &["new"]);
    assert_eq!(
        size,
        "vmm: a disk of 1000 bytes can't be: its size is a multiple of 512, and not 0"
    );
    let fd = images.error("info --fd 9 --format raw", &["text"]);
    assert!(fd.starts_with("vmm: descriptor 9: Bad file descriptor"), "{fd}");
    let file = File::options()
        .read(true)
        .write(true)
        .open(images.path("text"))
        .unwrap();
    let lock = devices::sys::lock::LockKind::Write;
    assert!(devices::sys::lock::lock_image(&file, lock).unwrap());
    let error = images.error("resize --fd 3 --format raw --size 8192", &["text"]);
    assert!(error.contains("in use by"), "{error}");
    let error = images.error("check --fd 3 --format raw", &["text"]);
    assert!(error.contains("in use by"), "{error}");
}

/// A disk of 8 MiB with some data and many zeroes.
fn disk() -> Vec<u8> {
    let mut disk = vec![0; 8 << 20];
    let mut word = 1_u32;
    for byte in &mut disk[(1 << 20)..(1 << 20) + 200_000] {
        word = word.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        *byte = word.to_le_bytes()[3];
    }
    disk[510..512].copy_from_slice(&[0x55, 0xaa]);
    disk[(6 << 20) + 17] = 9;
    disk
}

fn packed(kind: &str, content: &[u8]) -> Vec<u8> {
    use std::io::Write as _;
    match kind {
        "gzip" => {
            let mut writer = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
            writer.write_all(content).unwrap();
            writer.finish().unwrap()
        }
        "bzip2" => {
            let mut writer = bzip2::write::BzEncoder::new(Vec::new(), bzip2::Compression::fast());
            writer.write_all(content).unwrap();
            writer.finish().unwrap()
        }
        "xz" => {
            let options = lzma_rust2::XzOptions::with_preset(1);
            let mut writer = lzma_rust2::XzWriter::new(Vec::new(), options).unwrap();
            writer.write_all(content).unwrap();
            writer.finish().unwrap()
        }
        "zstd" => ruzstd::encoding::compress_to_vec(content, ruzstd::encoding::CompressionLevel::Fastest),
        _ => content.to_vec(),
    }
}

const IMPORT: &str = "import --fd 3 --to-fd 4 --scratch-fd 5 --max-size";
const IMPORT_FILES: [&str; 3] = ["source", "target", "scratch"];

/// What `vmm image import` says last, of a file with this content.
fn imported(images: &Images, content: &[u8], max_size: u64) -> Result<Value, String> {
    fs::write(images.path("source"), content).unwrap();
    for name in ["target", "scratch"] {
        let _ = fs::remove_file(images.path(name));
    }
    let output = images.run(&format!("{IMPORT} {max_size}"), &IMPORT_FILES);
    if !output.status.success() {
        return Err(String::from_utf8(output.stderr).unwrap());
    }
    let said = String::from_utf8(output.stdout).unwrap();
    Ok(serde_json::from_str(said.lines().last().unwrap()).unwrap())
}

/// A qcow2 image with `content`, of version 3 with clusters of 64 KiB; clusters of zeroes are left out (qcow2 specification, "Header",
/// "Cluster mapping").
fn qcow2(content: &[u8]) -> Vec<u8> {
    const CLUSTER: usize = 64 << 10;
    let mut image = vec![0; 3 * CLUSTER];
    let fields: [(usize, &[u8]); 9] = [
        (0, b"QFI\xfb"),
        (4, &3_u32.to_be_bytes()),
        (20, &16_u32.to_be_bytes()),
        (24, &(content.len() as u64).to_be_bytes()),
        (36, &1_u32.to_be_bytes()),
        (40, &(CLUSTER as u64).to_be_bytes()),
        // Refcounts: that nothing is counted is of no interest to who only reads.
        (48, &(CLUSTER as u64).to_be_bytes()),
        (56, &1_u32.to_be_bytes()),
        (96, &[0, 0, 0, 4, 0, 0, 0, 104]),
    ];
    for (offset, bytes) in fields {
        image[offset..offset + bytes.len()].copy_from_slice(bytes);
    }
    const COPIED: u64 = 1 << 63;
    image[CLUSTER..CLUSTER + 8].copy_from_slice(&((2 * CLUSTER as u64) | COPIED).to_be_bytes());
    for (number, cluster) in content.chunks(CLUSTER).enumerate() {
        if cluster.iter().any(|byte| *byte != 0) {
            let entry = 2 * CLUSTER + 8 * number;
            let place = image.len() as u64 | COPIED;
            image[entry..entry + 8].copy_from_slice(&place.to_be_bytes());
            image.extend(cluster);
        }
    }
    image
}

#[test]
fn a_file_of_any_known_format_becomes_the_same_sparse_raw_image() {
    let images = Images::new();
    let disk = disk();
    let image = qcow2(&disk);
    for (format, content) in [("raw", &disk), ("qcow2", &image)] {
        for compression in ["none", "gzip", "bzip2", "xz", "zstd"] {
            let found = imported(&images, &packed(compression, content), 1 << 30).unwrap();
            assert_eq!(
                (found["format"].as_str(), found["virtual_size"].as_u64()),
                (Some(format), Some(8 << 20))
            );
            assert_eq!(found["compression"].as_str().unwrap_or("none"), compression);
            assert!(
                fs::read(images.path("target")).unwrap() == disk,
                "{format} {compression}"
            );
            assert!(
                allocated(&images.path("target")) < 1 << 20,
                "{format} {compression}: holes are kept"
            );
        }
    }
}

#[test]
fn a_file_that_is_not_whole_sectors_is_filled_up_with_zeroes() {
    let images = Images::new();
    let found = imported(&images, &[7; 700], 1 << 20).unwrap();
    assert_eq!(found["virtual_size"].as_u64(), Some(1024));
    assert_eq!(fs::read(images.path("target")).unwrap()[699..702], [7, 0, 0]);
}

#[test]
fn a_hostile_file_is_refused_with_the_reason() {
    let images = Images::new();
    let image = qcow2(&disk());
    let changed = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut image = image.clone();
        change(&mut image);
        image
    };
    // qcow2 specification, "Header": backing file name at 8 (offset) and 16 (length), size at 24, features at 72.
    let backing = changed(&|image| {
        image[8..16].copy_from_slice(&400_u64.to_be_bytes());
        image[16..20].copy_from_slice(&11_u32.to_be_bytes());
        image[400..411].copy_from_slice(b"/etc/shadow");
    });
    let data_file = changed(&|image| image[79] |= 4);
    let enormous = changed(&|image| image[24..32].copy_from_slice(&(u64::MAX / 2).to_be_bytes()));
    let large = changed(&|image| image[24..32].copy_from_slice(&(1_u64 << 40).to_be_bytes()));
    let bomb = packed("gzip", &vec![0; 64 << 20]);
    let cut = packed("xz", &disk());
    for (content, reason) in [
        (&backing, "backing file"),
        (&data_file, "external file"),
        (&enormous, "qcow2"),
        (&large, "qcow2"),
        (&image[..image.len() / 2].to_vec(), "damaged"),
        (&image[..50].to_vec(), "qcow2"),
        (&bomb, "longer than the 33554432 bytes"),
        (&cut[..cut.len() / 2].to_vec(), "can't be decompressed with xz"),
        (
            &packed("gzip", &packed("xz", &disk())),
            "compressed with xz again",
        ),
        (&b"QED\0....".to_vec(), "format qed"),
        (
            &b"# Disk DescriptorFile\nRW 1 FLAT \"/etc/shadow\" 0".to_vec(),
            "names other files",
        ),
        (&Vec::new(), "empty"),
    ] {
        let error = imported(&images, content, 32 << 20).unwrap_err();
        assert!(error.contains(reason), "{reason}: {error}");
        assert_eq!(error.lines().count(), 1, "{error}");
    }
}

#[test]
fn an_import_ends_when_the_file_system_has_too_little_room_left() {
    let images = Images::new();
    fs::write(images.path("source"), vec![1; 8 << 20]).unwrap();
    let arguments = format!("{IMPORT} 33554432 --keep-free {}", u64::MAX);
    let output = images.run(&arguments, &IMPORT_FILES);
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(
        !output.status.success() && error.contains("No space left"),
        "{error}"
    );
}

/// What qemu-img makes of the disk.
fn by_qemu(images: &Images, format: &str, options: &str) -> Vec<u8> {
    let (from, to) = (images.path("disk"), images.path("foreign"));
    fs::write(&from, disk()).unwrap();
    let _ = fs::remove_file(&to);
    let mut command = Command::new("qemu-img");
    command.args(["convert", "-f", "raw", "-O", format]);
    if !options.is_empty() {
        command.args(["-o", options]);
    }
    let done = command.args([&from, &to]).status();
    assert!(done.expect("install qemu-utils").success(), "{format} {options}");
    fs::read(to).unwrap()
}

#[test]
fn images_of_other_hypervisors_become_the_same_raw_image() {
    let images = Images::new();
    let disk = disk();
    for (name, format, options) in [
        ("vdi", "vdi", ""),
        ("vdi", "vdi", "static=on"),
        ("vhdx", "vhdx", ""),
        ("vhdx", "vhdx", "subformat=fixed"),
        ("vhd", "vpc", "force_size=on"),
        ("vhd", "vpc", "force_size=on,subformat=fixed"),
        ("vmdk", "vmdk", ""),
        ("vmdk", "vmdk", "subformat=streamOptimized"),
    ] {
        let image = by_qemu(&images, format, options);
        for compression in ["none", "gzip"] {
            let found = imported(&images, &packed(compression, &image), 1 << 30);
            let found = found.unwrap_or_else(|error| panic!("{format} {options}: {error}"));
            assert_eq!(found["format"].as_str(), Some(name));
            assert_eq!(found["virtual_size"].as_u64(), Some(disk.len() as u64));
            assert!(
                fs::read(images.path("target")).unwrap() == disk,
                "{format} {options} {compression}"
            );
        }
    }
    // Without that option qemu-img makes the disk as large as a geometry can say.
    let found = imported(&images, &by_qemu(&images, "vpc", ""), 1 << 30).unwrap();
    let size = usize::try_from(found["virtual_size"].as_u64().unwrap()).unwrap();
    assert!(size >= disk.len() && size < disk.len() + (1 << 20));
    assert!(fs::read(images.path("target")).unwrap()[..disk.len()] == disk);
}

#[test]
fn hostile_images_of_other_hypervisors_are_refused_with_the_reason() {
    let images = Images::new();
    let changed = |image: &[u8], at: usize, bytes: &[u8]| {
        let mut image = image.to_vec();
        image[at..at + bytes.len()].copy_from_slice(bytes);
        image
    };
    let (vdi, vhd) = (
        by_qemu(&images, "vdi", ""),
        by_qemu(&images, "vpc", "force_size=on"),
    );
    let (vhdx, vmdk) = (by_qemu(&images, "vhdx", ""), by_qemu(&images, "vmdk", ""));
    let packed = by_qemu(&images, "vmdk", "subformat=streamOptimized");
    let parent = vmdk.windows(9).position(|text| text == b"parentCID").unwrap();
    for (content, reason) in [
        (changed(&vdi, 0x170, &u64::MAX.to_le_bytes()), "damaged"),
        (changed(&vdi, 0x170, &(1_u64 << 40).to_le_bytes()), "damaged"),
        (changed(&vdi, 0x1a8, &[1; 16]), "needs another image"),
        (changed(&vdi, 0x178, &[0; 4]), "damaged"),
        (vdi[..vdi.len() - (1 << 20)].to_vec(), "cut off"),
        (vdi[..100].to_vec(), "cut off"),
        (vhd[..1000].to_vec(), "cut off"),
        (changed(&vhd, vhd.len() - 500, &[7; 4]), "not whole"),
        (changed(&vhd, 512 + 32, &[0; 4]), "damaged"),
        (changed(&vhd, 512 + 28, &[0; 4]), "entries for"),
        (vhdx[..(192 << 10)].to_vec(), "region is missing"),
        (vhdx[..vhdx.len() - (1 << 20)].to_vec(), "cut off"),
        (
            changed(
                &changed(&vhdx, (64 << 10) + 48, &[1; 16]),
                (128 << 10) + 48,
                &[1; 16],
            ),
            "not closed",
        ),
        (changed(&vmdk, 20, &[0; 8]), "damaged"),
        (changed(&vmdk, 12, &[0xff; 8]), "damaged"),
        (changed(&vmdk, 12, &(1_u64 << 31).to_le_bytes()), "more than the"),
        (changed(&vmdk, parent + 10, b"00000001"), "needs another image"),
        (packed[..packed.len() / 2].to_vec(), "cut off"),
    ] {
        let error = imported(&images, &content, 32 << 20).expect_err(reason);
        assert!(error.contains(reason), "{reason}: {error}");
        assert_eq!(error.lines().count(), 1, "{error}");
    }
}

/// A header of tar, and the content filled up to whole blocks (POSIX.1-2024, "ustar Interchange Format").
fn entry(kind: u8, name: &str, content: &[u8]) -> Vec<u8> {
    let mut header = tar::Header::new_ustar();
    header.as_mut_bytes()[..name.len()].copy_from_slice(name.as_bytes());
    header.set_entry_type(tar::EntryType::new(kind));
    header.set_mode(0o644);
    header.set_size(content.len() as u64);
    header.set_cksum();
    let mut bytes = header.as_bytes().to_vec();
    bytes.extend(content);
    bytes.resize(bytes.len().next_multiple_of(512), 0);
    bytes
}

/// An archive with these entries and its end.
fn archive(entries: &[Vec<u8>]) -> Vec<u8> {
    [entries.concat(), vec![0; 1024]].concat()
}

/// Of `vmm image import` with these layers.
fn of_layers(images: &Images, layers: &[Vec<u8>], max_size: u64) -> Result<Value, String> {
    fs::write(images.path("source"), layers.concat()).unwrap();
    for name in ["target", "scratch"] {
        let _ = fs::remove_file(images.path(name));
    }
    let lengths: String = layers
        .iter()
        .map(|layer| format!(" --layer {}", layer.len()))
        .collect();
    let output = images.run(&format!("{IMPORT} {max_size}{lengths}"), &IMPORT_FILES);
    if !output.status.success() {
        let error = String::from_utf8(output.stderr).unwrap();
        assert_eq!(error.lines().count(), 1, "{error}");
        return Err(error);
    }
    let said = String::from_utf8(output.stdout).unwrap();
    Ok(serde_json::from_str(said.lines().last().unwrap()).unwrap())
}

#[test]
fn the_file_below_disk_in_a_layer_becomes_the_image() {
    let images = Images::new();
    let disk = disk();
    let length = format!("{}", disk.len());
    let long = format!("./disk/{}.img", "x".repeat(120));
    // Records of an extended header: the size may be in it alone (in Go's archives, of files from 8 GiB on).
    let record = |text: &str| format!("{} {text}\n", text.len() + 4).into_bytes();
    let mut sized = entry(b'0', "disk/a", &disk);
    let mut header = tar::Header::from_byte_slice(&sized[..512]).clone();
    header.set_size(0);
    header.set_cksum();
    sized[..512].copy_from_slice(header.as_bytes());
    let others = archive(&[
        entry(b'5', "boot/", b""),
        entry(b'0', "boot/vmlinuz", &[1; 700]),
        entry(b'0', "disk", b"no folder"),
    ]);
    let plain = [entry(b'5', "./disk/", b""), entry(b'0', "./disk/a.img", &disk)];
    for (name, entries) in [
        ("a name", plain.to_vec()),
        ("a qcow2 image", vec![entry(b'0', "disk/a.qcow2", &qcow2(&disk))]),
        (
            "a long name of GNU's",
            vec![
                entry(b'L', "././@LongLink", format!("{long}\0").as_bytes()),
                entry(b'0', "disk/xxx", &disk),
            ],
        ),
        (
            "a long name of pax",
            vec![
                entry(b'x', "h", format!("141 path={long}\n").as_bytes()),
                entry(b'0', "xxx", &disk),
            ],
        ),
        (
            "a size of pax",
            vec![entry(b'x', "h", &record(&format!("size={length}"))), sized],
        ),
    ] {
        for compression in ["none", "gzip", "zstd"] {
            let layer = packed(compression, &archive(&entries));
            let layers = [packed("gzip", &others), layer, others.clone()];
            let found = of_layers(&images, &layers, 1 << 30);
            let found = found.unwrap_or_else(|error| panic!("{name} {compression}: {error}"));
            assert_eq!(found["compression"].as_str().unwrap_or("none"), compression);
            assert_eq!(found["virtual_size"].as_u64(), Some(8 << 20), "{name}");
            assert!(
                fs::read(images.path("target")).unwrap() == disk,
                "{name} {compression}"
            );
            assert!(allocated(&images.path("target")) < 1 << 20);
        }
    }
}

#[test]
fn a_hostile_layer_is_refused_with_the_entry_and_leaves_no_file() {
    let images = Images::new();
    let disk = [7; 2048];
    let good = || entry(b'0', "disk/a.img", &disk);
    let pax = |record: &str| entry(b'x', "h", format!("{} {record}\n", record.len() + 4).as_bytes());
    let enormous = |name: &str| {
        let mut header = tar::Header::new_ustar();
        header.as_mut_bytes()[..name.len()].copy_from_slice(name.as_bytes());
        header.set_size(1 << 33);
        header.set_cksum();
        header.as_bytes().to_vec()
    };
    let whole = archive(&[good()]);
    let many: Vec<_> = (0..100_001).flat_map(|_| entry(b'5', "a/", b"")).collect();
    let mut damaged = whole.clone();
    damaged[0] = b'x';
    for (layer, reason) in [
        (
            archive(&[good(), entry(b'0', "../../etc/passwd", b"x")]),
            "\"../../etc/passwd\" is refused: its name leads out",
        ),
        (
            archive(&[entry(b'0', "disk/../a", b"x")]),
            "\"disk/../a\" is refused",
        ),
        (
            archive(&[entry(b'0', "/disk/a.img", &disk)]),
            "\"/disk/a.img\" is refused: its name is absolute",
        ),
        (archive(&[pax("path=/disk/x"), good()]), "\"/disk/x\" is refused"),
        (archive(&[entry(b'0', "disk/a\nb", &disk)]), "control characters"),
        (
            archive(&[entry(b'3', "disk/null", b"")]),
            "\"disk/null\" is a device node",
        ),
        (
            archive(&[entry(b'4', "dev/sda", b"")]),
            "\"dev/sda\" is a device node",
        ),
        (
            archive(&[entry(b'2', "disk/a.img", b"")]),
            "\"disk/a.img\" is a symbolic link",
        ),
        (
            archive(&[entry(b'1', "disk/a.img", b"")]),
            "\"disk/a.img\" is a link",
        ),
        (
            archive(&[pax("linkpath=/etc/shadow"), good()]),
            "\"/etc/shadow\" is a link",
        ),
        (
            archive(&[entry(b'6', "disk/pipe", b"")]),
            "\"disk/pipe\" is a FIFO",
        ),
        (
            archive(&[entry(b'S', "disk/a.img", b"")]),
            "\"disk/a.img\" is a sparse file",
        ),
        (archive(&[pax("GNU.sparse.major=1"), good()]), "sparse"),
        (archive(&[entry(b'g', "all", b"")]), "header for all entries"),
        (archive(&[entry(b'Z', "disk/a.img", b"")]), "unknown type"),
        (
            archive(&[good(), entry(b'0', "disk/.wh.a.img", b"")]),
            "\"disk/.wh.a.img\" is refused: it is a whiteout",
        ),
        (
            archive(&[good(), entry(b'0', "disk/b.img", &disk)]),
            "\"disk/b.img\" is a second file",
        ),
        (
            archive(&[entry(b'0', "boot/vmlinuz", &disk)]),
            "no layer has a file below",
        ),
        (
            archive(&[entry(b'x', "h", b"999 path=a\n"), good()]),
            "extended header is damaged",
        ),
        (
            archive(&[pax("size=99999999999999999999"), good()]),
            "extended header is damaged",
        ),
        (
            archive(&[pax("size=18446744073709551615"), good()]),
            "longer than they may be",
        ),
        (
            archive(&[entry(b'L', "l", &vec![b'x'; 2 << 20]), good()]),
            "a header has 2097152 bytes",
        ),
        (enormous("disk/a.img"), "longer than they may be"),
        (enormous("beside"), "\"beside\" has 8589934592 bytes"),
        (
            archive(&[entry(b'0', "disk/a.img", &vec![0; 33 << 20])]),
            "more than the 33554432",
        ),
        (archive(&[many]), "more than 100000 entries"),
        (whole[..1000].to_vec(), "can't be read to its end"),
        (whole[..200].to_vec(), "middle of a header"),
        (damaged, "no archive of tar"),
        (vec![7; 4096], "no archive of tar"),
        (
            archive(&[entry(b'0', "disk/a.xz", &packed("xz", &disk))]),
            "compressed with xz again",
        ),
        (archive(&[entry(b'0', "disk/a.img", b"")]), "the image is empty"),
    ] {
        // Packing so many takes a build that is not optimized seconds.
        let compressions: &[_] = match reason.contains("entries") {
            true => &["none"],
            false => &["none", "gzip"],
        };
        for compression in compressions {
            let error = of_layers(&images, &[packed(compression, &layer)], 32 << 20).expect_err(reason);
            assert!(error.contains(reason), "{reason} {compression}: {error}");
        }
    }
    let cut = packed("gzip", &whole);
    let cut = of_layers(&images, &[cut[..cut.len() / 2].to_vec()], 32 << 20).unwrap_err();
    assert!(cut.contains("layer 1 of 1"), "{cut}");
    let both = of_layers(&images, &[archive(&[good()]), archive(&[good()])], 32 << 20).unwrap_err();
    assert!(
        both.contains("layer 2 of 2") && both.contains("second file"),
        "{both}"
    );
    // All that a layer was unpacked to is in the two files that the caller gave.
    let mut names: Vec<_> = fs::read_dir(images.path(""))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    assert_eq!(names, ["scratch", "source", "target"]);
}
