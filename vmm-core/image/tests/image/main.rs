//! `vmm-image` as vmmd runs it: with descriptors.

mod forms;
mod import;
mod layers;

use std::{
    fs::{self, File},
    os::unix::fs::{FileExt as _, MetadataExt as _},
    path::{Path, PathBuf},
    process::{Command, Output},
};

use serde_json::Value;

use self::import::{IMPORT, IMPORT_FILES};

/// Files in a folder of their own.
struct Images(tempfile::TempDir);

impl Images {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Runs `vmm-image ARGUMENTS` with the files as descriptors from 3 on.
    fn run(&self, arguments: &str, files: &[&str]) -> Output {
        self.command(arguments, files).output().unwrap()
    }

    fn command(&self, arguments: &str, files: &[&str]) -> Command {
        let redirections: String = (3..)
            .zip(files)
            .map(|(fd, name)| format!(" {fd}<>'{}'", self.path(name).display()))
            .collect();
        let program = env!("CARGO_BIN_EXE_vmm-image");
        let mut command = Command::new("sh");
        command.args(["-c", &format!("exec '{program}' {arguments}{redirections}")]);
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
        fs::write(images.path(name), vec![1; 64 << 10]).unwrap();
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
        ("firmware --fd 3 --format qcow2", &["disk"]),
    ] {
        // See vmm-core/sandbox/src/attempt.rs.
        let mut process = images.command(command, files);
        let output = process.env("VMM_ATTEMPT", &wanted).output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        let attempts = said.lines().filter(|line| line.starts_with("attempt "));
        let told: Vec<_> = attempts.map(str::to_owned).collect();
        let expected = expected
            .iter()
            .map(|(deed, errno)| format!("attempt {deed}: errno {errno}"));
        assert_eq!(told, expected.collect::<Vec<_>>(), "{command}");
        // No kernel and no boot loader are on those disks; all else succeeds as if nothing had been tried.
        let searches = command.starts_with("boot") || command.starts_with("firmware");
        assert_eq!(output.status.success(), !searches, "{said}");
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
            "vmm-image: the disk has 3221225472 bytes and can't be made smaller: 1073741824"
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
    assert!(alone.contains("never follows"), "{alone}");
    let raw = images.error(&format!("create --fd 3 --format raw {below}"), &["raw", "base"]);
    assert_eq!(raw, "vmm-image: only a qcow2 image can be an overlay");
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
        "vmm-image: the image is corrupt: cluster 0 is used 1 times, its refcount is 0\n"
    );
}

#[test]
fn what_is_no_image_or_in_use_is_refused() {
    let images = Images::new();
    fs::write(images.path("text"), [b'x'; 4096]).unwrap();
    for command in ["info", "check"] {
        let error = images.error(&format!("{command} --fd 3 --format qcow2"), &["text"]);
        assert_eq!(error, "vmm-image: not a qcow2 image");
    }
    let size = images.error("create --fd 3 --format raw --size 1000", &["new"]);
    assert_eq!(
        size,
        "vmm-image: a disk of 1000 bytes can't be: its size is a multiple of 512, and not 0"
    );
    let fd = images.error("info --fd 9 --format raw", &["text"]);
    assert!(
        fd.starts_with("vmm-image: descriptor 9: Bad file descriptor"),
        "{fd}"
    );
    let file = File::options()
        .read(true)
        .write(true)
        .open(images.path("text"))
        .unwrap();
    let lock = vmm_base::sys::lock::LockKind::Write;
    assert!(vmm_base::sys::lock::lock_image(&file, lock).unwrap());
    let error = images.error("resize --fd 3 --format raw --size 8192", &["text"]);
    assert!(error.contains("in use by"), "{error}");
    let error = images.error("check --fd 3 --format raw", &["text"]);
    assert!(error.contains("in use by"), "{error}");
}
