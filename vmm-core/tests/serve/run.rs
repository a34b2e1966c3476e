//! `vmm run` as a user on a terminal sees it, with tiny guests on the machine's own KVM.

use std::{
    fs::{File, OpenOptions},
    io::{Read, Write},
    os::fd::OwnedFd,
    process::{Command, Output, Stdio},
};

use block::qcow2::create::{CLUSTER_SIZE, CreateOptions, Preallocation, create};
use rstest::rstest;
use rustix::{
    process::{Pid, Signal, kill_process},
    pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt},
    termios::{LocalModes, tcgetattr},
};
use tempfile::TempDir;

use super::guest;

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
    let layered = OpenOptions::new()
        .read(true)
        .write(true)
        .create_new(true)
        .open(dir.path().join("layered"))
        .unwrap();
    let options = CreateOptions {
        size: 1 << 20,
        cluster_size: CLUSTER_SIZE,
        preallocation: Preallocation::Off,
        backing: None,
    };
    create(layered, options).unwrap();
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
fn console_is_on_the_terminal_until_the_escape() {
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

#[test]
fn screen_is_shown_to_vnc_clients_at_its_socket() {
    use std::os::unix::net::UnixStream;
    // Its guest does nothing.
    let dir = vm_with(guest::HALT, "", ", display: {width: 640, height: 480}");
    let socket = dir.path().join("vnc.sock");
    let vmm = command(&dir)
        .arg("--vnc")
        .arg(&socket)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let begin = std::time::Instant::now();
    let mut client = loop {
        match UnixStream::connect(&socket) {
            Ok(client) => break client,
            Err(error) => assert!(begin.elapsed().as_secs() < 20, "{error}"),
        }
        std::thread::yield_now();
    };
    client
        .set_read_timeout(Some(std::time::Duration::from_secs(20)))
        .unwrap();
    client.write_all(b"RFB 003.008\n\x01\x01").unwrap();
    // All of it, in Raw, at once: 640 x 480 black pixels.
    client.write_all(&[3, 0, 0, 0, 0, 0, 2, 128, 1, 224]).unwrap();
    let mut hello = [0; 12 + 2 + 4 + 24 + 3];
    client.read_exact(&mut hello).unwrap();
    assert_eq!(&hello[..12], b"RFB 003.008\n");
    assert_eq!(&hello[18..22], [2, 128, 1, 224]);
    assert_eq!(&hello[42..], b"web");
    let mut head = [0; 4];
    client.read_exact(&mut head).unwrap();
    let mut pixels = 0;
    for _ in 0..u16::from_be_bytes([head[2], head[3]]) {
        let mut rectangle = [0; 12];
        client.read_exact(&mut rectangle).unwrap();
        let side = |at: usize| usize::from(u16::from_be_bytes([rectangle[at], rectangle[at + 1]]));
        let mut raw = vec![1; side(4) * side(6) * 4];
        client.read_exact(&mut raw).unwrap();
        assert!(raw.iter().all(|byte| *byte == 0));
        pixels += side(4) * side(6);
    }
    assert_eq!(pixels, 640 * 480);
    // A key, the pointer and a request for another size do no harm, although the guest ignores
    // them.
    client
        .write_all(&[4, 1, 0, 0, 0, 0, 0, 0x41, 5, 1, 0, 9, 0, 9])
        .unwrap();
    client
        .write_all(&[&[251, 0, 3, 32, 2, 88, 1, 0][..], &[0; 16]].concat())
        .unwrap();
    client
        .write_all(&[2, 0, 0, 1, 0xff, 0xff, 0xfe, 0xc8, 248, 0, 0, 0, 0x80, 0, 0, 0, 0])
        .unwrap();
    let mut fences = [0; 18];
    client.read_exact(&mut fences).unwrap();
    // The machine's end is that of the connection.
    kill_process(Pid::from_child(&vmm), Signal::TERM).unwrap();
    let output = vmm.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert!(matches!(client.read(&mut [0; 64]), Ok(0) | Err(_)));
}

#[test]
fn socket_for_a_missing_screen_is_refused() {
    let dir = vm(guest::POWER_OFF);
    let output = command(&dir)
        .arg("--vnc")
        .arg(dir.path().join("x"))
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("spec.display"), "{}", stderr(&output));
}
