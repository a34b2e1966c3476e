#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::arithmetic_side_effects
)]

use std::{
    io::{Read, Write},
    os::{fd::AsRawFd, unix::net::UnixStream},
    process::{Child, Command, Stdio},
    sync::mpsc::{self, Receiver},
    thread,
    time::Duration,
};

use tempfile::TempDir;

use super::*;
use crate::{
    bus::Bus,
    state::{Change, refuses},
};

/// TPM2_Startup(TPM_SU_CLEAR).
const STARTUP: [u8; 12] = [0x80, 1, 0, 0, 0, 12, 0, 0, 1, 0x44, 0, 0];
const SUCCESS: [u8; 10] = [0x80, 1, 0, 0, 0, 10, 0, 0, 0, 0];
const FAILURE: [u8; 10] = [0x80, 1, 0, 0, 0, 10, 0, 0, 1, 1];

const BASE: u64 = ADDRESS as u64;

/// Collects reports.
struct Reports(Mutex<mpsc::Sender<String>>);

impl EventSink for Reports {
    fn report(&self, device: &str, event: DeviceEvent) {
        let DeviceEvent::BackendError(message) = event else {
            panic!("{event:?}");
        };
        assert_eq!(device, "tpm");
        let _closed = self.0.lock().unwrap().send(message);
    }
}

/// A driver of a TPM on a bus.
struct Driver {
    bus: Bus,
    tpm: Tpm,
    reports: Receiver<String>,
}

impl Driver {
    fn new(data: UnixStream, control: UnixStream) -> io::Result<Self> {
        let (sender, reports) = mpsc::channel();
        let sink = Arc::new(Reports(Mutex::new(sender)));
        let tpm = Tpm::new(data.into(), control.into(), sink)?;
        let bus = Bus::new();
        bus.insert(BASE, LENGTH.into(), tpm.registers()).unwrap();
        Ok(Self { bus, tpm, reports })
    }

    fn register(&self, offset: u64) -> u32 {
        let mut bytes = [0; 4];
        self.bus.read(BASE + offset, &mut bytes);
        u32::from_le_bytes(bytes)
    }

    fn set(&self, offset: u64, value: u32) {
        let _none = self.bus.write(BASE + offset, &value.to_le_bytes());
    }

    fn acquire(&self) {
        self.set(0x08, 1);
        assert_eq!((self.register(0x00), self.register(0x0c)), (0x83, 1));
        self.set(0x40, 1);
        assert_eq!(self.register(0x44), 0);
    }

    fn begin(&self, command: &[u8]) {
        for (at, byte) in (0x80..).zip(command) {
            let _none = self.bus.write(BASE + at, &[*byte]);
        }
        self.set(0x4c, 1);
    }

    fn end(&mut self) -> Vec<u8> {
        self.tpm.pause(Instant::now() + Duration::from_secs(60)).unwrap();
        self.tpm.resume().unwrap();
        assert_eq!(self.register(0x4c), 0);
        let mut answer = vec![0; BUFFER];
        for (at, bytes) in (0x80..).step_by(8).zip(answer.chunks_mut(8)) {
            self.bus.read(BASE + at, bytes);
        }
        let length = u32::from_be_bytes(answer[2..6].try_into().unwrap());
        answer.truncate(length as usize);
        answer
    }

    fn run(&mut self, command: &[u8]) -> Vec<u8> {
        self.begin(command);
        self.end()
    }

    fn report(&self) -> String {
        self.reports.recv_timeout(Duration::from_secs(60)).unwrap()
    }
}

const BUFFER: usize = 3968;

type Log = Vec<(u32, Vec<u8>)>;

/// A stand-in for swtpm with a state of a few bytes.
#[derive(Default)]
struct Peer {
    /// Codes of the requests, and content that was loaded.
    log: Arc<Mutex<Log>>,
}

impl Peer {
    /// Serves a control channel until its other end is closed.
    fn control(&self, mut socket: UnixStream) {
        let log = Arc::clone(&self.log);
        thread::spawn(move || {
            let mut word = [0; 4];
            let mut number = move |socket: &mut UnixStream| {
                socket.read_exact(&mut word).ok()?;
                Some(u32::from_be_bytes(word))
            };
            while let Some(code) = number(&mut socket) {
                let mut content = Vec::new();
                let answer = match code {
                    0x0e => vec![0],
                    0x02 => {
                        content.push(number(&mut socket).unwrap().try_into().unwrap());
                        vec![0]
                    }
                    0x11 => {
                        let size = number(&mut socket).unwrap();
                        vec![0, size, 1000, 5000]
                    }
                    0x0c => {
                        let [_, kind, _] = [(); 3].map(|()| number(&mut socket).unwrap());
                        match kind {
                            3 => vec![0x800, 0, 0, 0],
                            kind => vec![0, 0, 4, 4, 0xabcd_0000 | kind],
                        }
                    }
                    0x0d => {
                        let [_, kind, length] = [(); 3].map(|()| number(&mut socket).unwrap());
                        content = vec![0; length as usize];
                        socket.read_exact(&mut content).unwrap();
                        content.push(kind.try_into().unwrap());
                        vec![0]
                    }
                    other => panic!("{other:#x}"),
                };
                log.lock().unwrap().push((code, content));
                let answer: Vec<_> = answer.into_iter().flat_map(u32::to_be_bytes).collect();
                let _closed = socket.write_all(&answer);
            }
        });
    }

    fn codes(&self) -> Vec<u32> {
        self.log.lock().unwrap().drain(..).map(|(code, _)| code).collect()
    }
}

/// A driver of a TPM whose data channel has the other end at hand.
fn scripted() -> (Driver, UnixStream, Peer) {
    let (data, other) = UnixStream::pair().unwrap();
    let (control, requests) = UnixStream::pair().unwrap();
    let peer = Peer::default();
    peer.control(requests);
    let driver = Driver::new(data, control).unwrap();
    assert_eq!(peer.codes(), [0x0e, 0x11, 0x02]);
    (driver, other, peer)
}

/// Reads a command of this length.
fn command(socket: &mut UnixStream, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    socket.read_exact(&mut bytes).unwrap();
    bytes
}

#[test]
fn registers_describe_a_crb_with_its_buffer() {
    let (driver, _swtpm, _) = scripted();
    assert_eq!((driver.register(0x00), driver.register(0x0c)), (0x81, 0));
    assert_eq!(
        (driver.register(0x30), driver.register(0x34)),
        (0x0002_5811, 0x1014)
    );
    assert_eq!((driver.register(0x44), driver.register(0x4c)), (2, 0));
    assert_eq!((driver.register(0x58), driver.register(0x64)), (3968, 3968));
    for address in [0x5c, 0x68] {
        assert_eq!(
            (driver.register(address), driver.register(address + 4)),
            (0xfed4_0080, 0)
        );
    }
    driver.acquire();
    driver.set(0x40, 2);
    driver.set(0x08, 2);
    assert_eq!((driver.register(0x44), driver.register(0x0c)), (2, 0));
}

#[test]
fn command_of_any_length_gets_its_answer() {
    let (mut driver, mut swtpm, _) = scripted();
    driver.acquire();
    for length in [10_u32, 12, 3967, 3968] {
        let mut long = STARTUP.to_vec();
        long[2..6].copy_from_slice(&length.to_be_bytes());
        long.resize(length as usize, 7);
        driver.begin(&long);
        assert_eq!(driver.register(0x4c), 1);
        assert_eq!(command(&mut swtpm, length as usize), long);
        // No write reaches a command in progress.
        driver.set(0x80, 0);
        driver.set(0x4c, 1);
        long.reverse();
        long[2..6].copy_from_slice(&length.to_be_bytes());
        let (first, rest) = long.split_at(7);
        swtpm.write_all(first).unwrap();
        swtpm.write_all(rest).unwrap();
        assert_eq!(driver.end(), long);
    }
}

#[test]
fn start_without_the_locality_has_no_effect() {
    let (mut driver, mut swtpm, _) = scripted();
    driver.begin(&STARTUP);
    assert_eq!(driver.register(0x4c), 0);
    driver.acquire();
    driver.set(0x4c, 1);
    assert_eq!(command(&mut swtpm, 12), STARTUP);
    swtpm.write_all(&SUCCESS).unwrap();
    assert_eq!(driver.end(), SUCCESS);
}

#[test]
fn command_of_an_invalid_length_does_not_reach_swtpm() {
    let (mut driver, mut swtpm, _) = scripted();
    driver.acquire();
    // The last one is swtpm's prefix with a locality.
    for header in [
        [0x80, 1, 0, 0, 0, 9],
        [0x80, 1, 0, 0, 0x0f, 0x81],
        [0x80, 1, 0xff, 0, 0, 12],
        [0, 0, 0, 8, 4, 0],
    ] {
        let answer = driver.run(&header);
        assert_eq!(answer[6..], [0, 0, 1, 0x42], "{header:?}");
    }
    driver.begin(&STARTUP);
    assert_eq!(command(&mut swtpm, 12), STARTUP);
    swtpm.write_all(&SUCCESS).unwrap();
    assert_eq!(driver.end(), SUCCESS);
}

#[test]
fn invalid_answers_and_a_closed_socket_fail_all_later_commands() {
    let too_long = [0x80, 1, 0, 0, 0x0f, 0x81, 0, 0, 0, 0];
    let too_short = [0x80, 1, 0, 0, 0, 9, 0, 0, 0, 0];
    for answer in [Some(too_long), Some(too_short), None] {
        let (mut driver, mut swtpm, peer) = scripted();
        driver.acquire();
        driver.begin(&STARTUP);
        command(&mut swtpm, 12);
        match answer {
            Some(answer) => swtpm.write_all(&answer).unwrap(),
            None => drop(swtpm),
        }
        assert_eq!(driver.end(), FAILURE);
        let report = driver.report();
        assert!(report.contains("until the VM's next start"), "{report}");
        peer.codes();
        driver.tpm.reset().unwrap();
        assert_eq!((peer.codes(), driver.register(0x0c)), (vec![], 0));
        driver.acquire();
        assert_eq!(driver.run(&STARTUP), FAILURE);
        let refused = driver.tpm.save().unwrap_err();
        assert!(matches!(refused, StateError::NotMigratable { .. }), "{refused}");
        assert!(driver.reports.try_recv().is_err());
    }
}

#[test]
fn end_of_swtpm_is_reported_without_a_command() {
    let (driver, swtpm, _) = scripted();
    drop(swtpm);
    assert!(driver.report().starts_with("swtpm has ended"));
    let (driver, mut swtpm, _) = scripted();
    swtpm.write_all(&SUCCESS).unwrap();
    assert!(driver.report().starts_with("swtpm gives an invalid answer"));
}

#[test]
fn device_ends_while_a_command_is_in_progress() {
    let (driver, mut swtpm, _) = scripted();
    driver.acquire();
    driver.begin(&STARTUP);
    command(&mut swtpm, 12);
    drop(driver);
    assert_eq!(swtpm.read(&mut [0]).unwrap(), 0);
}

#[test]
fn pause_and_reset_wait_for_the_command_in_progress() {
    let (mut driver, mut swtpm, peer) = scripted();
    driver.acquire();
    driver.begin(&STARTUP);
    let late = driver.tpm.pause(Instant::now());
    assert!(matches!(late, Err(ComponentError::DrainTimeout)));
    let late = driver.tpm.reset();
    assert!(matches!(late, Err(ComponentError::DrainTimeout)));
    command(&mut swtpm, 12);
    swtpm.write_all(&SUCCESS).unwrap();
    assert_eq!(driver.end(), SUCCESS);
    driver.tpm.reset().unwrap();
    assert_eq!(peer.codes(), [0x0e, 0x11, 0x02]);
    assert_eq!((driver.register(0x0c), driver.register(0x80)), (0, 0));
}

#[test]
fn restored_tpm_has_the_state_of_swtpm_and_of_the_registers() {
    let (mut driver, mut swtpm, peer) = scripted();
    driver.acquire();
    driver.begin(&STARTUP);
    command(&mut swtpm, 12);
    swtpm.write_all(&SUCCESS).unwrap();
    driver.end();
    driver.tpm.pause(Instant::now()).unwrap();
    let section = driver.tpm.save().unwrap();
    assert_eq!(peer.codes(), [0x0c; 3]);
    let (mut other, mut swtpm, peer) = scripted();
    other.tpm.restore(&section).unwrap();
    let permanent = vec![0xab, 0xcd, 0, 1, 1];
    let volatile = vec![0xab, 0xcd, 0, 2, 2];
    let log: Vec<_> = peer.log.lock().unwrap().drain(..).collect();
    let expected = [
        (0x0e, vec![]),
        (0x0d, permanent),
        (0x0d, volatile),
        (0x11, vec![]),
        (0x02, vec![1]),
    ];
    assert_eq!(log, expected);
    assert_eq!(other.tpm.save().unwrap(), section);
    assert_eq!((other.register(0x0c), other.register(0x44)), (1, 0));
    other.tpm.resume().unwrap();
    assert_eq!(other.end(), SUCCESS);
    other.begin(&STARTUP);
    assert_eq!(command(&mut swtpm, 12), STARTUP);
    swtpm.write_all(&SUCCESS).unwrap();
    assert_eq!(other.end(), SUCCESS);
}

#[test]
fn state_that_no_tpm_has_is_refused() {
    let (driver, _swtpm, _) = scripted();
    let good: message::Tpm = driver.tpm.save().unwrap().open().unwrap();
    let changes: [Change<message::Tpm>; 5] = [
        ("buffer", |saved| saved.buffer.push(0)),
        ("permanent", |saved| saved.permanent.clear()),
        ("permanent", |saved| saved.permanent = vec![0; (1 << 20) + 1]),
        ("volatile", |saved| saved.volatile = vec![0; (1 << 20) + 1]),
        ("save_state", |saved| saved.save_state = vec![0; (1 << 20) + 1]),
    ];
    let (mut other, _swtpm, peer) = scripted();
    refuses(&good, &changes, |saved| {
        other.tpm.restore(&Section::new("tpm", saved))
    });
    assert_eq!(peer.codes(), [0; 0]);
}

#[test]
fn state_of_the_first_version_is_still_taken() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/golden/tpm.bin");
    let (mut driver, _swtpm, _) = scripted();
    if std::env::var_os("VMMD_WRITE_GOLDEN").is_some() {
        driver.acquire();
        std::fs::write(path, prost::Message::encode_to_vec(&driver.tpm.save().unwrap())).unwrap();
    }
    let golden = std::fs::read(path).unwrap();
    let section = <Section as prost::Message>::decode(golden.as_slice()).unwrap();
    driver.tpm.restore(&section).unwrap();
    assert_eq!(driver.tpm.save().unwrap(), section);
    assert_eq!(driver.register(0x0c), 1);
}

/// The program swtpm with a state of its own.
struct Swtpm {
    process: Child,
    folder: TempDir,
}

impl Swtpm {
    /// Starts it as the daemon does.
    fn start() -> (Self, UnixStream, UnixStream) {
        let folder = tempfile::tempdir().unwrap();
        let (data, its_data) = UnixStream::pair().unwrap();
        let (control, its_control) = UnixStream::pair().unwrap();
        for socket in [&its_data, &its_control] {
            rustix::io::fcntl_setfd(socket, rustix::io::FdFlags::empty()).unwrap();
        }
        let process = Command::new("swtpm")
            .args(["socket", "--tpm2", "--tpmstate"])
            .arg(format!("dir={},mode=0600", folder.path().display()))
            .arg(format!("--fd={}", its_data.as_raw_fd()))
            .arg(format!("--ctrl=type=unixio,clientfd={}", its_control.as_raw_fd()))
            .stderr(Stdio::null())
            .spawn()
            .unwrap_or_else(|error| panic!("swtpm: {error}: .ci/setup installs it"));
        (Self { process, folder }, data, control)
    }
}

impl Drop for Swtpm {
    fn drop(&mut self) {
        let _ended = self.process.kill();
        let _reaped = self.process.wait();
    }
}

/// TPM2_PCR_Read of PCR 10 in the SHA-256 bank.
const PCR_READ: [u8; 20] = [
    0x80, 1, 0, 0, 0, 20, 0, 0, 1, 0x7e, 0, 0, 0, 1, 0, 0x0b, 3, 0, 4, 0,
];

fn pcr_10(driver: &mut Driver) -> Vec<u8> {
    let answer = driver.run(&PCR_READ);
    assert_eq!(answer[6..10], [0; 4], "{answer:x?}");
    answer[answer.len() - 32..].to_vec()
}

fn extend_pcr_10(driver: &mut Driver) {
    // TPM2_PCR_Extend(PCR 10, an empty password, one SHA-256 digest).
    let mut extend = vec![0x80, 2, 0, 0, 0, 65, 0, 0, 1, 0x82, 0, 0, 0, 10, 0, 0, 0, 9];
    extend.extend([0x40, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0x0b]);
    extend.extend([0x5a; 32]);
    let answer = driver.run(&extend);
    assert_eq!(answer[6..10], [0; 4], "{answer:x?}");
}

#[test]
fn real_swtpm_serves_a_driver_over_resets_and_a_restore() {
    let (swtpm, data, control) = Swtpm::start();
    let mut driver = Driver::new(data, control).unwrap();
    driver.acquire();
    // TPM_RC_INITIALIZE.
    assert_eq!(driver.run(&PCR_READ)[6..], [0, 0, 1, 0]);
    assert_eq!(driver.run(&STARTUP), SUCCESS);
    // TPM2_GetCapability(TPM_CAP_TPM_PROPERTIES, TPM_PT_FAMILY_INDICATOR): "2.0".
    let capability = [
        0x80, 1, 0, 0, 0, 22, 0, 0, 1, 0x7a, 0, 0, 0, 6, 0, 0, 1, 0, 0, 0, 0, 1,
    ];
    assert!(driver.run(&capability).ends_with(b"2.0\0"));
    assert_eq!(pcr_10(&mut driver), [0; 32]);
    extend_pcr_10(&mut driver);
    let extended = pcr_10(&mut driver);
    assert_ne!(extended, [0; 32]);
    // It does not know this command.
    assert_eq!(
        driver.run(&[0x80, 1, 0, 0, 0, 10, 0, 0, 0xff, 0xff])[6..],
        [0, 0, 1, 0x43]
    );

    driver.tpm.pause(Instant::now()).unwrap();
    let section = driver.tpm.save().unwrap();
    let (swtpm_2, data, control) = Swtpm::start();
    let mut other = Driver::new(data, control).unwrap();
    other.tpm.restore(&section).unwrap();
    other.tpm.resume().unwrap();
    assert_eq!(pcr_10(&mut other), extended);
    let state = |swtpm: &Swtpm| std::fs::read(swtpm.folder.path().join("tpm2-00.permall")).unwrap();
    assert_eq!(state(&swtpm_2), state(&swtpm));

    driver.tpm.resume().unwrap();
    assert_eq!(pcr_10(&mut driver), extended);
    driver.tpm.reset().unwrap();
    driver.acquire();
    assert_eq!(driver.run(&STARTUP), SUCCESS);
    assert_eq!(pcr_10(&mut driver), [0; 32]);

    // A state of garbage is refused.
    let mut garbage: message::Tpm = section.open().unwrap();
    garbage.volatile.truncate(100);
    let (_swtpm_3, data, control) = Swtpm::start();
    let mut third = Driver::new(data, control).unwrap();
    let refused = third.tpm.restore(&Section::new("tpm", &garbage));
    assert!(matches!(refused, Err(StateError::Invalid { .. })), "{refused:?}");
}

#[test]
fn real_swtpm_ends_with_the_device_and_its_end_is_reported() {
    let (mut swtpm, data, control) = Swtpm::start();
    let driver = Driver::new(data, control).unwrap();
    drop(driver);
    assert!(swtpm.process.wait().unwrap().success());
    let (mut swtpm, data, control) = Swtpm::start();
    let mut driver = Driver::new(data, control).unwrap();
    swtpm.process.kill().unwrap();
    assert!(driver.report().starts_with("swtpm has ended"));
    driver.acquire();
    assert_eq!(driver.run(&STARTUP), FAILURE);
}
