//! Whole machines on the host's own KVM that are saved, dropped, rebuilt and restored.

mod ended;
mod golden;
mod processor;
mod refusals;
mod snapshot;
mod throttle;
mod walk;
mod watchdog;

use std::{
    fs::File,
    io::{Read, Write},
    os::{
        fd::{AsFd, OwnedFd},
        unix::net::UnixStream,
    },
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
        mpsc::{Receiver, channel},
    },
    thread,
    time::Duration,
};

use devices::{bus::Bus, serial::Terminal};
use vmm_protocol::{
    state::{self, Serial},
    vmm::{self, MachineSpec, request::Op},
};

use super::super::{
    assemble::{Assembler, Console},
    machine::Machine,
    rebuilt::{Consoles, Rebuilder},
};
use crate::{
    kvm::{GuestTime, Host},
    lifecycle::{Builder as _, Failure, Input, Machine as _, Notice, Notifier, Progress, Token},
    memory::layout,
};

/// Longer than any step here; a test fails after this time instead of hanging.
const PATIENCE: Duration = Duration::from_secs(100);
/// Slots of the devices.
const RNG: u8 = 1;
const DISK: u8 = 10;
const FURTHER_DISK: u8 = 33;
const BALLOON: u8 = 26;
/// Bytes of each disk.
const DISK_SIZE: u64 = 1 << 20;

/// Adds a count to each byte that is typed and prints it.
const ECHO: [u8; 24] = [
    0x31, 0xdb, // xor ebx, ebx
    0x66, 0xba, 0xfd, 0x03, // again: mov dx, 0x3fd
    0xec, // wait: in al, dx
    0xa8, 0x01, // test al, 1
    0x74, 0xfb, // jz wait
    0x66, 0xba, 0xf8, 0x03, // mov dx, 0x3f8
    0xec, // in al, dx
    0x00, 0xd8, // add al, bl
    0xee, // out dx, al
    0xfe, 0xc3, // inc bl
    0xeb, 0xeb, // jmp again
    0x90,
];
/// Power off by ACPI's sleep control register, again and again.
const POWER_OFF: [u8; 10] = [0x66, 0xba, 0x00, 0x06, 0xb0, 0x34, 0xee, 0xeb, 0xfd, 0x90];
/// `jmp $`.
const SPIN: [u8; 2] = [0xeb, 0xfe];

/// An ELF with a PVH note (Xen's `XEN_ELFNOTE_PHYS32_ENTRY`) whose code is at 1 MiB.
fn kernel(code: &[u8]) -> File {
    let mut image = vec![0; 0x200];
    let mut put = |at: usize, bytes: &[u8]| image[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, b"\x7fELF\x02\x01\x01");
    put(16, &[2, 0, 62, 0, 1, 0, 0, 0]);
    put(32, &64_u64.to_le_bytes());
    put(52, &[64, 0, 56, 0, 2, 0]);
    // Kind; offset, virtual and physical address, size in the file and in memory, alignment.
    let length = code.len() as u64;
    let load = [
        0x180,
        layout::LOW_RESERVED_END,
        layout::LOW_RESERVED_END,
        length,
        length,
        0,
    ];
    for (index, (kind, words)) in [(1_u32, load), (4, [0x100, 0, 0, 20, 20, 4])]
        .into_iter()
        .enumerate()
    {
        let at = 64 + index * 56;
        put(at, &kind.to_le_bytes());
        for (word, value) in words.iter().enumerate() {
            put(at + 8 + word * 8, &value.to_le_bytes());
        }
    }
    put(0x100, &[4, 0, 0, 0, 4, 0, 0, 0, 18, 0, 0, 0]);
    put(0x10c, b"Xen\0");
    put(0x110, &0x10_0000_u32.to_le_bytes());
    put(0x180, code);
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(&image).unwrap();
    file
}

/// The spec of a machine with one device of each kind that needs no rights, and its descriptors.
fn spec(vcpus: u32, code: &[u8]) -> (MachineSpec, Vec<OwnedFd>) {
    let kvm = File::options().read(true).write(true).open("/dev/kvm");
    let kvm = kvm.unwrap_or_else(|error| panic!("these tests need KVM: {error}"));
    let disk = || {
        let file = tempfile::tempfile().unwrap();
        file.set_len(DISK_SIZE).unwrap();
        file
    };
    let files = [
        kvm,
        kernel(code),
        File::open("/dev/urandom").unwrap(),
        disk(),
        disk(),
    ];
    let disk = |name: &str, slot: u8, fd| vmm::Disk {
        name: name.to_owned(),
        fd,
        pci_slot: slot.into(),
        ..vmm::Disk::default()
    };
    let spec = MachineSpec {
        name: "test".to_owned(),
        uuid: vec![7; 16],
        vcpus,
        memory_bytes: 128 * layout::MIB,
        kvm_fd: 0,
        kernel: Some(vmm::Kernel {
            kernel_fd: 1,
            ..vmm::Kernel::default()
        }),
        rng_pci_slot: RNG.into(),
        rng_fd: 2,
        disks: vec![disk("root", DISK, 3), disk("data", FURTHER_DISK, 4)],
        balloon: Some(vmm::Balloon {
            pci_slot: BALLOON.into(),
            ..vmm::Balloon::default()
        }),
        ..MachineSpec::default()
    };
    (spec, files.map(OwnedFd::from).into())
}

/// A machine's console, and what makes consoles of machines that are at its other end.
fn console() -> (UnixStream, Consoles) {
    let (near, far) = UnixStream::pair().unwrap();
    far.set_nonblocking(true).unwrap();
    near.set_read_timeout(Some(PATIENCE)).unwrap();
    let consoles = move || {
        let end = || far.as_fd().try_clone_to_owned();
        Ok(Console::Terminal(Terminal {
            input: end()?,
            output: end()?,
            escape: None,
        }))
    };
    (near, Box::new(consoles))
}

/// A machine that is restored at each resume.
struct Rig {
    /// `None` while it is rebuilt.
    machine: Option<Machine>,
    rebuilder: Rebuilder,
    console: UnixStream,
    notices: Receiver<Input>,
    restores: Arc<AtomicU64>,
}

impl Rig {
    fn new(vcpus: u32, code: &[u8]) -> Self {
        let (spec, fds) = spec(vcpus, code);
        Self::of(&spec, fds)
    }

    fn of(spec: &MachineSpec, fds: Vec<OwnedFd>) -> Self {
        let (inputs, notices) = channel();
        let (console, consoles) = console();
        let mut rebuilder = Rebuilder::new(consoles);
        let restores = rebuilder.restores();
        let machine = rebuilder.build(spec, fds, None, Notifier::new(inputs)).unwrap();
        Self {
            machine: Some(machine),
            rebuilder,
            console,
            notices,
            restores,
        }
    }

    /// Types `byte` and returns the guest's output.
    fn echo(&mut self, byte: u8) -> u8 {
        self.console.write_all(&[byte]).unwrap();
        let mut printed = [0];
        self.console.read_exact(&mut printed).unwrap();
        printed[0]
    }

    fn pause_and_resume(&mut self) {
        self.inner().pause().unwrap();
        self.resume();
    }

    fn rebuild(&mut self) {
        let machine = self.machine.take().unwrap();
        self.machine = Some(self.rebuilder.rebuild(machine).unwrap());
    }

    /// As a client's resume.
    fn resume(&mut self) {
        let machine = self.machine.take().unwrap();
        self.machine = Some(self.rebuilder.renew(machine).unwrap());
        self.inner().resume().unwrap();
    }

    fn inner(&mut self) -> &mut Machine {
        self.machine.as_mut().unwrap()
    }

    fn notice(&self) -> Notice {
        match self.notices.recv_timeout(PATIENCE) {
            Ok(Input::Notice(notice)) => notice,
            other => panic!("{other:?}"),
        }
    }
}

fn resize_console(rig: &mut Rig, columns: u32, rows: u32) -> Result<Progress, Failure> {
    let token = Token {
        connection: 1,
        request: 1,
    };
    let op = Op::ResizeConsole(vmm::ResizeConsole { columns, rows });
    rig.inner().operate(token, op, Vec::new())
}

#[test]
fn virtio_console_is_restored_and_its_absence_refuses_sizes() {
    let (mut spec, fds) = spec(1, &ECHO);
    spec.console = Some(vmm::Console {
        pci_slot: 30,
        socket_fd: None,
    });
    let mut rig = Rig::of(&spec, fds);
    rig.inner().start().unwrap();
    resize_console(&mut rig, 80, 25).unwrap();
    for count in 0..3 {
        assert_eq!(rig.echo(b'a'), b'a' + count);
        rig.pause_and_resume();
        resize_console(&mut rig, 132, 43).unwrap();
    }
    let mut without = Rig::new(1, &ECHO);
    let refused = resize_console(&mut without, 80, 25).unwrap_err();
    assert_eq!(refused.kind, vmm::ErrorKind::NotFound);
}

#[test]
fn a_guest_goes_on_where_it_was_over_any_number_of_restores() {
    for vcpus in [1, 3] {
        let mut rig = Rig::new(vcpus, &ECHO);
        rig.inner().start().unwrap();
        for count in 0..40 {
            assert_eq!(rig.echo(b'a'), b'a'.wrapping_add(count));
            if count % 2 == 0 {
                rig.pause_and_resume();
            }
        }
        assert_eq!(rig.restores.load(Ordering::Relaxed), 20);
        rig.inner().halt();
    }
}

#[test]
fn pending_serial_input_survives_a_restore() {
    let mut rig = Rig::new(1, &SPIN);
    rig.inner().start().unwrap();
    rig.console.write_all(b"xyz").unwrap();
    let input = |rig: &mut Rig| {
        let sections = rig.inner().save().unwrap().sections;
        let section = sections.iter().find(|section| section.id == "serial").unwrap();
        let state: Serial = section.open().unwrap();
        [state.fifo, state.backlog].concat()
    };
    loop {
        rig.inner().pause().unwrap();
        if input(&mut rig) == b"xyz" {
            break;
        }
        // The console's thread has not read all of it.
        rig.inner().resume().unwrap();
        std::thread::yield_now();
    }
    // A port that is paused takes no more.
    rig.console.write_all(b"!").unwrap();
    rig.resume();
    for byte in b"xyz!" {
        let mut data = [0];
        while data[0] & 1 == 0 {
            rig.inner().spaces.pio.read(0x3fd, &mut data);
        }
        rig.inner().spaces.pio.read(0x3f8, &mut data);
        assert_eq!(data, [*byte]);
    }
    rig.inner().halt();
}

#[test]
fn a_restored_machine_resets_as_a_new_one() {
    let mut rig = Rig::new(2, &ECHO);
    rig.inner().start().unwrap();
    assert_eq!((rig.echo(b'a'), rig.echo(b'a')), (b'a', b'b'));
    rig.pause_and_resume();
    assert_eq!(rig.echo(b'a'), b'c');
    rig.inner().reset().unwrap();
    rig.inner().start().unwrap();
    assert_eq!((rig.echo(b'a'), rig.echo(b'a')), (b'a', b'b'), "it counts anew");
    rig.pause_and_resume();
    assert_eq!(rig.echo(b'a'), b'c');
    rig.inner().halt();
}

#[test]
fn what_a_restored_guest_asks_of_the_machine_reaches_its_driver() {
    // Powers off when a byte is typed.
    let typed = [
        0x66, 0xba, 0xfd, 0x03, // mov dx, 0x3fd
        0xec, // wait: in al, dx
        0xa8, 0x01, // test al, 1
        0x74, 0xfb, // jz wait
    ];
    let mut rig = Rig::new(1, &[&typed[..], &POWER_OFF].concat());
    rig.inner().start().unwrap();
    rig.pause_and_resume();
    rig.console.write_all(b"x").unwrap();
    assert_eq!(rig.notice(), Notice::PowerOff);
    // A guest that has ended is neither restored nor continued.
    rig.pause_and_resume();
    assert_eq!(rig.restores.load(Ordering::Relaxed), 1);
    assert!(rig.notices.try_recv().is_err());
    rig.inner().halt();
}

#[test]
fn a_machine_that_runs_is_not_saved_and_a_saved_one_goes_on() {
    let mut rig = Rig::new(1, &ECHO);
    rig.inner().start().unwrap();
    assert_eq!(rig.echo(b'a'), b'a');
    let failure = rig.inner().save().unwrap_err();
    assert_eq!(failure.kind, vmm::ErrorKind::State, "{failure:?}");
    rig.inner().pause().unwrap();
    let saved = rig.inner().save().unwrap();
    assert_eq!(rig.inner().save().unwrap().sections.len(), saved.sections.len());
    // Not restored, but the same machine again.
    rig.inner().resume().unwrap();
    assert_eq!(rig.echo(b'a'), b'b');
    rig.inner().halt();
}

#[test]
fn the_guests_clock_stands_while_the_machine_is_saved() {
    let mut rig = Rig::new(1, &SPIN);
    rig.inner().start().unwrap();
    for _ in 0..3 {
        rig.inner().pause().unwrap();
        let paused = rig.inner().paused_at.unwrap();
        rig.rebuild();
        assert_eq!(rig.inner().paused_at, Some(paused));
        rig.inner().resume().unwrap();
        assert!(rig.inner().vm.clock().unwrap().nanoseconds >= paused.clock.nanoseconds);
    }
    rig.inner().halt();
}

/// How far kvmclock and the first counter have gone apart since `then`, in milliseconds.
fn apart_ms(now: GuestTime, then: GuestTime, khz: u32) -> i64 {
    let clock_ns = now.clock.nanoseconds - then.clock.nanoseconds;
    let counter_ns = u128::from(now.counter.wrapping_sub(then.counter)) * 1_000_000 / u128::from(khz);
    (i64::try_from(counter_ns).unwrap() - i64::try_from(clock_ns).unwrap()) / 1_000_000
}

#[test]
fn kvmclock_and_the_counters_go_on_together_after_a_standstill() {
    const STANDSTILL: Duration = Duration::from_millis(300);
    if !Host::has_hardware_virtualization() {
        // A paravirtual backend takes any offset and keeps the host's counter.
        return;
    }
    for (rebuilt, sync) in [(false, false), (true, false), (false, true)] {
        let mut rig = Rig::new(2, &SPIN);
        rig.inner().start().unwrap();
        rig.inner().sync_clock = sync;
        rig.inner().pause().unwrap();
        let first = rig.inner().vcpus.save().unwrap()[0].tsc.unwrap();
        let begin = rig.inner().paused_at.unwrap();
        for turn in 1..=3 {
            let before = rig.inner().paused_at.unwrap();
            if rebuilt {
                rig.rebuild();
            }
            thread::sleep(STANDSTILL);
            rig.inner().resume().unwrap();
            rig.inner().pause().unwrap();
            let now = rig.inner().paused_at.unwrap();
            let passed = Duration::from_nanos(now.clock.nanoseconds - before.clock.nanoseconds);
            assert_eq!(
                passed >= STANDSTILL,
                sync,
                "turn {turn}: kvmclock went on by {passed:?}"
            );
            let apart = apart_ms(now, begin, first.khz);
            assert!(
                apart.abs() < 50,
                "turn {turn} (rebuilt: {rebuilt}, sync: {sync}): {apart} ms apart"
            );
            let vcpus = rig.inner().vcpus.save().unwrap();
            let offset = |vcpu: &state::Vcpu| vcpu.tsc.unwrap().offset.unwrap();
            assert_eq!(offset(&vcpus[0]), offset(&vcpus[1]), "both are corrected");
        }
        rig.inner().halt();
    }
}
