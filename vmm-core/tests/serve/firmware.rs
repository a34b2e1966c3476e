//! A machine that boots through firmware: its variables are part of its state.

use std::{
    fs::{self, File},
    os::{
        fd::AsRawFd,
        unix::{fs::FileExt, net::UnixStream},
    },
    path::Path,
    process::{Child, Command},
};

use super::{
    process::{Client, Vmm},
    *,
};

/// Bytes of the code and of the variables.
const SIZE: usize = 4096;

/// Firmware that prints `hi`, programs a variable, and answers each received byte with the variable. The segment of
/// the first instruction begins 64 KiB below 4 GiB.
fn code() -> Vec<u8> {
    const START: usize = 0xf00;
    #[rustfmt::skip]
    let program = [
        0xba, 0xf8, 0x03, // mov dx, 0x3f8
        0xb0, b'h', 0xee, 0xb0, b'i', 0xee, // mov al, 'h'; out dx, al
        0x2e, 0xc6, 0x06, 0x10, 0xe0, 0x40, // mov byte cs:[0xe010], PROGRAM
        0x2e, 0xc6, 0x06, 0x10, 0xe0, b'Z', // mov byte cs:[0xe010], 'Z'
        0x2e, 0xc6, 0x06, 0x10, 0xe0, 0xff, // mov byte cs:[0xe010], READ ARRAY
        0xb0, b'!', 0xee, // mov al, '!'; out dx, al
        0xba, 0xfd, 0x03, // mov dx, 0x3fd
        0xec, 0xa8, 0x01, 0x74, 0xfb, // in al, dx; test al, 1; jz -5
        0xba, 0xf8, 0x03, 0xec, // mov dx, 0x3f8; in al, dx
        0x2e, 0xa0, 0x10, 0xe0, 0xee, // mov al, cs:[0xe010]; out dx, al
        0xeb, 0xed, // jmp -19
    ];
    let mut code = vec![0xff; SIZE];
    code[START..START + program.len()].copy_from_slice(&program);
    // The first instruction, 16 bytes before the end: jmp START.
    code[0xff0..0xff3].copy_from_slice(&[0xe9, 0x0d, 0xff]);
    code
}

fn erased() -> File {
    let file = tempfile::tempfile().unwrap();
    file.write_all_at(&[0xff; SIZE], 0).unwrap();
    file
}

fn stored(file: &File) -> u8 {
    let mut byte = [0];
    file.read_exact_at(&mut byte, 0x10).unwrap();
    byte[0]
}

/// The guest's answer to a typed byte.
fn answer(vmm: &Vmm) -> Vec<u8> {
    let mut console = vmm.console();
    let replay = u64::from_le_bytes(console.read(8).try_into().unwrap());
    console.read(usize::try_from(replay).unwrap());
    console.write(b"x");
    console.read(1)
}

fn ask(client: &mut Client, variables: &File, restore: Option<&File>) {
    client.send_firmware(&code(), variables, None, restore);
    assert_eq!(state(&client.answer()), State::Running);
}

#[test]
fn variables_are_stored_and_go_with_a_snapshot() {
    let variables = erased();
    let first = Vmm::start();
    let mut client = first.client();
    ask(&mut client, &variables, None);
    first.wait_for_serial("hi!");
    assert_eq!(stored(&variables), b'Z');
    assert_eq!(answer(&first), b"Z");
    let snapshot = tempfile::tempfile().unwrap();
    assert!(matches!(client.save(&snapshot, false), Answer::Saved(_)));
    client.ask(Op::Stop(Stop {}));

    let variables = erased();
    let other = Vmm::start();
    let mut client = other.client();
    ask(&mut client, &variables, Some(&snapshot));
    assert_eq!(answer(&other), b"Z");
    assert_eq!(stored(&variables), b'Z');
    assert_eq!(other.serial_log(), "Z", "it did not begin anew");
    client.ask(Op::Stop(Stop {}));
}

/// Firmware that prints whether the function at 00:1f.2 is ICH9's AHCI controller: `S`, or `N`.
fn prober() -> Vec<u8> {
    const START: usize = 0xf00;
    #[rustfmt::skip]
    let program = [
        0xba, 0xf8, 0x0c, // mov dx, 0xcf8
        0x66, 0xb8, 0x00, 0xfa, 0x00, 0x80, 0x66, 0xef, // mov eax, 0x8000fa00; out dx, eax
        0xba, 0xfc, 0x0c, 0x66, 0xed, // mov dx, 0xcfc; in eax, dx
        0x66, 0x3d, 0x86, 0x80, 0x22, 0x29, // cmp eax, 0x29228086
        0xb0, b'S', 0x74, 0x02, 0xb0, b'N', // mov al, 'S'; je +2; mov al, 'N'
        0xba, 0xf8, 0x03, 0xee, // mov dx, 0x3f8; out dx, al
        0xf4, 0xeb, 0xfd, // hlt; jmp -3
    ];
    let mut code = vec![0xff; SIZE];
    code[START..START + program.len()].copy_from_slice(&program);
    code[0xff0..0xff3].copy_from_slice(&[0xe9, 0x0d, 0xff]);
    code
}

#[test]
fn sata_controller_comes_with_a_drive_and_goes_with_a_snapshot() {
    let medium = tempfile::tempfile().unwrap();
    medium.set_len(1 << 20).unwrap();
    let without = Vmm::start();
    without.client().send_firmware(&prober(), &erased(), None, None);
    without.wait_for_serial("N");

    let first = Vmm::start();
    let mut client = first.client();
    client.send_firmware(&prober(), &erased(), Some(&medium), None);
    assert_eq!(state(&client.answer()), State::Running);
    first.wait_for_serial("S");
    let snapshot = tempfile::tempfile().unwrap();
    assert!(matches!(client.save(&snapshot, false), Answer::Saved(_)));
    client.ask(Op::Stop(Stop {}));
    let other = Vmm::start();
    let mut client = other.client();
    client.send_firmware(&prober(), &erased(), Some(&medium), Some(&snapshot));
    assert_eq!(state(&client.answer()), State::Running);
    client.ask(Op::Stop(Stop {}));
}

/// A swtpm with its state in `folder`, and the sockets for a `vmm`.
fn swtpm(folder: &Path) -> (Child, [UnixStream; 2]) {
    let (data, its_data) = UnixStream::pair().unwrap();
    let (control, its_control) = UnixStream::pair().unwrap();
    for socket in [&its_data, &its_control] {
        rustix::io::fcntl_setfd(socket, rustix::io::FdFlags::empty()).unwrap();
    }
    let process = Command::new("swtpm")
        .args(["socket", "--tpm2", "--tpmstate"])
        .arg(format!("dir={}", folder.display()))
        .arg(format!("--fd={}", its_data.as_raw_fd()))
        .arg(format!("--ctrl=type=unixio,clientfd={}", its_control.as_raw_fd()))
        .spawn()
        .unwrap_or_else(|error| panic!("swtpm: {error}: .ci/setup installs it"));
    (process, [data, control])
}

#[test]
fn tpm_goes_with_a_snapshot_and_swtpm_ends_with_its_machine() {
    let folders = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let permanent = |index: usize| {
        let folder: &tempfile::TempDir = &folders[index];
        fs::read(folder.path().join("tpm2-00.permall")).unwrap()
    };
    let (mut its_swtpm, sockets) = swtpm(folders[0].path());
    let first = Vmm::start();
    let mut client = first.client();
    client.send_firmware_with(&code(), &erased(), None, None, Some(&sockets));
    assert_eq!(state(&client.answer()), State::Running);
    drop(sockets);
    first.wait_for_serial("hi!");
    let snapshot = tempfile::tempfile().unwrap();
    assert!(matches!(client.save(&snapshot, true), Answer::Saved(_)));
    assert_eq!(answer(&first), b"Z");
    client.ask(Op::Stop(Stop {}));
    assert!(its_swtpm.wait().unwrap().success());

    let (mut its_swtpm, sockets) = swtpm(folders[1].path());
    let other = Vmm::start();
    let mut client = other.client();
    client.send_firmware_with(&code(), &erased(), None, Some(&snapshot), Some(&sockets));
    assert_eq!(state(&client.answer()), State::Running);
    assert_eq!(answer(&other), b"Z");
    assert_eq!(permanent(1), permanent(0));
    its_swtpm.kill().unwrap();
    its_swtpm.wait().unwrap();
    let message = client.wait_for_event(|kind| match kind {
        event::Kind::DeviceError(error) => Some(error.message.clone()),
        _ => None,
    });
    assert!(message.starts_with("swtpm has ended"), "{message}");
    client.ask(Op::Stop(Stop {}));
}
