//! `vmm run` as a user on a terminal sees it, with tiny guests on the machine's own KVM.

#[path = "serve/guest.rs"]
#[allow(dead_code)]
mod guest;

use std::{
    fs::{File, OpenOptions},
    io::{Read, Write},
    os::fd::OwnedFd,
    process::{Command, Output, Stdio},
};

use rstest::rstest;
use rustix::{
    pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt},
    termios::{LocalModes, tcgetattr},
};
use tempfile::TempDir;

/// A folder with a kernel and a manifest that boots it.
fn vm(code: &[u8]) -> TempDir {
    vm_with(code, "", "")
}

/// The same with more of `spec.memory` and of `spec`, each beginning with a comma; DIR in it is the folder.
fn vm_with(code: &[u8], memory: &str, more: &str) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    let kernel = dir.path().join("kernel");
    std::fs::write(&kernel, guest::program(code)).unwrap();
    let manifest = format!(
        "{{apiVersion: vmmd/v1, kind: Vm, metadata: {{name: web}}, spec: {{onCrash: CRASH_POLICY_STOP, cpu: {{cores: 1}}, \
         memory: {{sizeBytes: 134217728{memory}}}, boot: {{linux: {{kernel: {}}}}}{more}}}}}",
        kernel.display()
    )
    .replace("DIR", &dir.path().display().to_string());
    std::fs::write(dir.path().join("vm.yaml"), manifest).unwrap();
    dir
}

fn command(dir: &TempDir) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_vmm"));
    command.args(["run", "--spec"]).arg(dir.path().join("vm.yaml"));
    command
}

fn run(code: &[u8]) -> Output {
    command(&vm(code)).stdin(Stdio::null()).output().unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

#[test]
fn the_exit_code_says_how_the_run_ended() {
    let off = run(&[guest::PRINT_HI, guest::POWER_OFF].concat());
    assert_eq!(
        (off.status.code(), off.stdout.as_slice(), stderr(&off).as_str()),
        (Some(0), &b"hi"[..], "")
    );
    let crash = run(guest::TRIPLE_FAULT);
    assert_eq!(crash.status.code(), Some(2));
    assert_eq!(stderr(&crash), "vmm: VM web: vCPU 0: triple fault\n");
}

/// Each has the vmm make other system calls when it starts, behind its filters.
#[rstest]
#[case::shared(", backing: MEMORY_BACKING_SHARED, prefault: true")]
#[case::mergeable(", mergeable: true, prefault: true")]
#[case::bound(", numaNode: 0")]
fn all_kinds_of_memory_and_images_start_behind_the_filters(#[case] memory: &str) {
    let disks = ", disks: [{name: raw, path: DIR/raw, format: DISK_FORMAT_RAW}, \
         {name: layered, path: DIR/layered, format: DISK_FORMAT_QCOW2}]";
    let dir = vm_with(&[guest::PRINT_HI, guest::POWER_OFF].concat(), memory, disks);
    let raw = File::create(dir.path().join("raw")).unwrap();
    raw.set_len(1 << 20).unwrap();
    let made = Command::new("sh")
        .args([
            "-c",
            "exec \"$0\" image create --format qcow2 --size 1048576 --fd 3 3<>layered",
        ])
        .arg(env!("CARGO_BIN_EXE_vmm"))
        .current_dir(dir.path())
        .status()
        .unwrap();
    assert!(made.success());
    let output = command(&dir).stdin(Stdio::null()).output().unwrap();
    assert_eq!((output.status.code(), stderr(&output).as_str()), (Some(0), ""));
}

#[test]
fn what_is_wrong_is_said_in_one_line() {
    let dir = vm(&[]);
    std::fs::write(dir.path().join("kernel"), [0; 4096]).unwrap();
    let output = command(&dir).stdin(Stdio::null()).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(
        stderr(&output),
        "vmm: starting VM web: the kernel is neither a bzImage nor an x86-64 ELF\n"
    );
    std::fs::remove_file(dir.path().join("kernel")).unwrap();
    let output = command(&dir).stdin(Stdio::null()).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("opening kernel") && stderr(&output).lines().count() == 1);
}

#[test]
fn the_console_is_on_the_terminal_until_the_escape_and_the_terminal_is_as_before() {
    let main = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
    grantpt(&main).unwrap();
    unlockpt(&main).unwrap();
    let path = ptsname(&main, Vec::new()).unwrap().into_string().unwrap();
    let terminal = OpenOptions::new().read(true).write(true).open(path).unwrap();
    let is_cooked = || {
        tcgetattr(&terminal)
            .unwrap()
            .local_modes
            .contains(LocalModes::ICANON)
    };

    let dir = vm(&[guest::PRINT_HI, guest::ECHO].concat());
    let end = || Stdio::from(OwnedFd::from(terminal.try_clone().unwrap()));
    let mut child = command(&dir)
        .stdin(end())
        .stdout(end())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut user = File::from(main);
    let mut seen = [0; 2];
    user.read_exact(&mut seen).unwrap();
    assert_eq!(&seen, b"hi");
    assert!(!is_cooked());
    // An interrupt key is the guest's.
    user.write_all(b"\x03").unwrap();
    user.read_exact(&mut seen[..1]).unwrap();
    assert_eq!(seen[0], 3);
    user.write_all(b"\x1d").unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(0));
    assert!(is_cooked());
}

#[test]
fn output_and_messages_in_one_file_do_not_overwrite_each_other() {
    let dir = vm(&[guest::PRINT_HI, guest::TRIPLE_FAULT].concat());
    let log = File::create(dir.path().join("log")).unwrap();
    let errors = log.try_clone().unwrap();
    let status = command(&dir)
        .stdin(Stdio::null())
        .stdout(log)
        .stderr(errors)
        .status()
        .unwrap();
    assert_eq!(status.code(), Some(2));
    let text = std::fs::read_to_string(dir.path().join("log")).unwrap();
    assert_eq!(text, "hivmm: VM web: vCPU 0: triple fault\n");
}
