//! Snapshots of whole machines: files from which other machines continue.

use std::{
    fs::File,
    io::{self, Seek},
    os::unix::fs::FileExt,
    thread::{self, JoinHandle},
};

use vm_memory::Bytes;

use super::*;
use crate::snapshot::{
    Report,
    format::MEMORY_OFFSET,
    saving::{Event, GoesOn, Policy, Purpose, Round},
};

/// Counts in a register and in two pages of memory without end. When a byte is typed, prints it if both pages hold the
/// register's value, else `!`.
const COUNTER: [u8; 47] = [
    0x31, 0xdb, // xor ebx, ebx
    0xbf, 0x00, 0x00, 0x40, 0x00, // mov edi, 0x400000
    0x43, // again: inc ebx
    0x89, 0x1f, // mov [edi], ebx
    0x89, 0x9f, 0x00, 0x00, 0x10, 0x00, // mov [edi + 0x100000], ebx
    0x66, 0xba, 0xfd, 0x03, // mov dx, 0x3fd
    0xec, // in al, dx
    0xa8, 0x01, // test al, 1
    0x74, 0xee, // jz again
    0x66, 0xba, 0xf8, 0x03, // mov dx, 0x3f8
    0xec, // in al, dx
    0x3b, 0x1f, // cmp ebx, [edi]
    0x75, 0x08, // jne bad
    0x3b, 0x9f, 0x00, 0x00, 0x10, 0x00, // cmp ebx, [edi + 0x100000]
    0x74, 0x02, // je good
    0xb0, 0x21, // bad: mov al, '!'
    0xee, // good: out dx, al
    0xeb, 0xd8, // jmp again
];

/// A machine with the other end of its console.
pub(super) struct One {
    pub(super) machine: Machine,
    pub(super) console: UnixStream,
    pub(super) notices: Receiver<Input>,
}

/// Spec and descriptors for building machines.
pub(super) struct Kit {
    pub(super) spec: MachineSpec,
    fds: Vec<OwnedFd>,
    /// CPUID of the host instead of its own.
    pub(super) supported: Option<kvm_bindings::CpuId>,
}

impl Kit {
    pub(super) fn new(code: &[u8]) -> Self {
        let (spec, fds) = spec(1, code);
        Self {
            spec,
            fds,
            supported: None,
        }
    }

    fn assembler(&self, console: Console) -> Assembler {
        let mut assembler = Assembler::new(console);
        assembler.supported.clone_from(&self.supported);
        assembler
    }

    fn fds(&self) -> Vec<OwnedFd> {
        self.fds.iter().map(|fd| fd.try_clone().unwrap()).collect()
    }

    /// Why no machine can be built.
    pub(super) fn refused(&self) -> Failure {
        let (inputs, _notices) = channel();
        let (_console, mut consoles) = console();
        let mut assembler = self.assembler(consoles().unwrap());
        let machine = assembler.assemble(&self.spec, self.fds(), Notifier::new(inputs));
        machine.err().unwrap()
    }

    pub(super) fn started(&self) -> One {
        let (inputs, notices) = channel();
        let (console, mut consoles) = console();
        let mut assembler = self.assembler(consoles().unwrap());
        let machine = assembler.assemble(&self.spec, self.fds(), Notifier::new(inputs));
        let mut machine = machine.unwrap();
        machine.start().unwrap();
        One {
            machine,
            console,
            notices,
        }
    }

    /// Returns a paused machine that continues from a snapshot.
    pub(super) fn restored(&self, snapshot: &File, on_demand: bool) -> Result<One, Failure> {
        let (inputs, notices) = channel();
        let (console, mut consoles) = console();
        let mut assembler = self.assembler(consoles().unwrap());
        let mut fds = self.fds();
        let restore = vmm::Restore {
            snapshot_fd: u32::try_from(fds.len()).unwrap(),
            on_demand,
            stream: false,
            ..vmm::Restore::default()
        };
        fds.push(snapshot.try_clone().unwrap().into());
        let machine = assembler.assemble_restored(&self.spec, fds, Notifier::new(inputs), &restore)?;
        Ok(One {
            machine,
            console,
            notices,
        })
    }
}

impl Kit {
    /// A machine that is received from a stream; paused.
    pub(super) fn received(&self, mut stream: File) -> Result<One, Failure> {
        let (inputs, notices) = channel();
        let (console, mut consoles) = console();
        let mut assembler = self.assembler(consoles().unwrap());
        let mut fds = self.fds();
        let restore = vmm::Restore {
            snapshot_fd: u32::try_from(fds.len()).unwrap(),
            stream: true,
            ..vmm::Restore::default()
        };
        stream.rewind().unwrap();
        fds.push(stream.into());
        let machine = assembler.assemble_restored(&self.spec, fds, Notifier::new(inputs), &restore)?;
        Ok(One {
            machine,
            console,
            notices,
        })
    }
}

/// Copies the data from a socket to a file.
fn taken(mut socket: UnixStream) -> JoinHandle<File> {
    thread::spawn(move || {
        let mut stream = tempfile::tempfile().unwrap();
        io::copy(&mut socket, &mut stream).unwrap();
        stream
    })
}

impl One {
    /// Sends the machine, which is paused then.
    fn send(&mut self) -> (File, Report, Vec<Round>) {
        self.send_as(&vmm_protocol::vmm::Send::default())
    }

    /// The same with these options.
    pub(super) fn send_as(&mut self, send: &vmm_protocol::vmm::Send) -> (File, Report, Vec<Round>) {
        let (near, far) = UnixStream::pair().unwrap();
        let stream = taken(far);
        let socket = OwnedFd::from(near);
        let purpose = Purpose::Migration {
            downtime: Duration::from_secs(10),
            policy: Policy::AlwaysSafe,
        };
        self.machine
            .begin_migration(socket.into(), purpose, send)
            .unwrap();
        let mut rounds = Vec::new();
        loop {
            match self.notices.recv_timeout(PATIENCE) {
                Ok(Input::Notice(Notice::Snapshot(Event::Round(round)))) => rounds.push(round),
                Ok(Input::Notice(Notice::Snapshot(Event::Ready))) => break,
                other => panic!("{other:?}"),
            }
        }
        self.machine.pause().unwrap();
        let goes_on = self.machine.complete_snapshot(Vec::new(), false).unwrap();
        assert_eq!(goes_on, GoesOn::WhenEnded);
        self.wait_for(Event::Ended);
        let report = self.machine.end_snapshot().unwrap();
        (stream.join().unwrap(), report, rounds)
    }

    pub(super) fn echo(&mut self, byte: u8) -> u8 {
        self.console.write_all(&[byte]).unwrap();
        let mut printed = [0];
        self.console.read_exact(&mut printed).unwrap();
        printed[0]
    }

    pub(super) fn wait_for(&self, wanted: Event) {
        match self.notices.recv_timeout(PATIENCE) {
            Ok(Input::Notice(Notice::Snapshot(event))) => assert_eq!(event, wanted),
            other => panic!("{other:?}"),
        }
    }

    /// Takes a snapshot of the machine, which is paused all the time or runs; it runs afterwards.
    pub(super) fn snapshot(&mut self, runs: bool) -> (File, Report, GoesOn) {
        if !runs {
            self.machine.pause().unwrap();
        }
        let file = tempfile::tempfile().unwrap();
        self.machine
            .begin_snapshot(file.try_clone().unwrap(), runs)
            .unwrap();
        self.wait_for(Event::Ready);
        if runs {
            self.machine.pause().unwrap();
        }
        let goes_on = self.machine.complete_snapshot(b"echo".to_vec(), false).unwrap();
        if goes_on == GoesOn::Now {
            self.machine.resume().unwrap();
        }
        self.wait_for(Event::Ended);
        let report = self.machine.end_snapshot().unwrap();
        if goes_on == GoesOn::WhenEnded {
            self.machine.resume().unwrap();
        }
        (file, report, goes_on)
    }

    fn generation(&self) -> [u8; 16] {
        let place = vm_memory::GuestAddress(layout::GENERATION_ID.start);
        self.machine.ram.memory().read_obj(place).unwrap()
    }
}

impl Drop for One {
    fn drop(&mut self) {
        self.machine.halt();
    }
}

#[test]
fn guest_resumes_from_a_snapshot_repeatedly() {
    let kit = Kit::new(&ECHO);
    let mut first = kit.started();
    assert_eq!((first.echo(b'a'), first.echo(b'a')), (b'a', b'b'));
    let (file, report, _) = first.snapshot(false);
    assert_eq!(report.file_bytes, file.metadata().unwrap().len());
    assert!(report.memory_bytes > 0 && report.memory_bytes < layout::RAM_MIN / 16);
    assert_eq!(first.echo(b'a'), b'c', "the first one goes on too");
    let mut others = Vec::new();
    for on_demand in [false, true, true] {
        let mut other = kit.restored(&file, on_demand).unwrap();
        other.machine.resume().unwrap();
        others.push(other);
    }
    for other in &mut others {
        assert_eq!((other.echo(b'a'), other.echo(b'a')), (b'c', b'd'));
    }
    // They are restored machines in all respects: they reset, and are saved again.
    for other in &mut others {
        let (file, _, _) = other.snapshot(true);
        let mut next = kit.restored(&file, true).unwrap();
        next.machine.resume().unwrap();
        assert_eq!((next.echo(b'a'), other.echo(b'a')), (b'e', b'e'));
        other.machine.reset().unwrap();
        other.machine.start().unwrap();
        assert_eq!(other.echo(b'a'), b'a', "it counts anew");
    }
}

#[test]
fn snapshot_of_a_running_guest_is_of_one_moment() {
    let kit = Kit::new(&COUNTER);
    let mut first = kit.started();
    for _ in 0..3 {
        let (file, report, goes_on) = first.snapshot(true);
        assert_eq!(goes_on, GoesOn::Now);
        assert!(report.rounds >= 1, "{report:?}");
        assert_eq!(first.echo(b'x'), b'x');
        for on_demand in [false, true] {
            let mut other = kit.restored(&file, on_demand).unwrap();
            other.machine.resume().unwrap();
            assert_eq!((other.echo(b'x'), other.echo(b'y')), (b'x', b'y'));
        }
    }
}

#[test]
fn each_restored_machine_has_a_generation_of_its_own() {
    let kit = Kit::new(&ECHO);
    let mut first = kit.started();
    let (file, _, _) = first.snapshot(false);
    let others = [false, true].map(|on_demand| kit.restored(&file, on_demand).unwrap());
    let ids = [first.generation(), others[0].generation(), others[1].generation()];
    assert!(
        ids[0] != ids[1] && ids[1] != ids[2] && ids[0] != ids[2],
        "{ids:?}"
    );
    assert!(!ids.contains(&[0; 16]));
    first.machine.reset().unwrap();
    assert_eq!(first.generation(), ids[0], "a reset is no new generation");
}

#[test]
fn changed_snapshot_is_refused_before_a_machine_is_built() {
    let kit = Kit::new(&ECHO);
    let mut first = kit.started();
    let (file, report, _) = first.snapshot(false);
    let why = |on_demand| match kit.restored(&file, on_demand) {
        Err(failure) => {
            assert_eq!(failure.kind, vmm::ErrorKind::Invalid);
            failure.message
        }
        Ok(_) => panic!("it is taken"),
    };
    let flip = |at: u64| {
        let mut byte = [0];
        file.read_exact_at(&mut byte, at).unwrap();
        file.write_all_at(&[!byte[0]], at).unwrap();
    };
    let code = MEMORY_OFFSET + layout::LOW_RESERVED_END;
    flip(code + 7);
    let message = why(false);
    let wanted = format!("the snapshot is damaged in its memory page 0x100000 at byte {code}");
    assert!(message.starts_with(&wanted), "{message}");
    flip(code + 7);
    flip(report.file_bytes - 1);
    for on_demand in [false, true] {
        let message = why(on_demand);
        assert!(
            message.contains("the snapshot is damaged in its section"),
            "{message}"
        );
    }
    flip(report.file_bytes - 1);
    file.set_len(report.file_bytes - 1).unwrap();
    assert!(why(true).contains("was written with"));
}

#[test]
fn a_machine_that_is_built_otherwise_does_not_take_a_snapshot() {
    let kit = Kit::new(&ECHO);
    let mut first = kit.started();
    let (file, _, _) = first.snapshot(false);
    let mut larger = Kit::new(&ECHO);
    larger.spec.memory_bytes *= 2;
    let failure = larger.restored(&file, false).err().unwrap();
    assert!(failure.message.contains("are to be restored"), "{failure:?}");
    let mut shared = Kit::new(&ECHO);
    shared.spec.memory_shared = true;
    let failure = shared.restored(&file, true).err().unwrap();
    assert!(
        failure.message.contains("is not restored on demand"),
        "{failure:?}"
    );
    let mut copied = shared.restored(&file, false).unwrap();
    copied.machine.resume().unwrap();
    assert_eq!(copied.echo(b'a'), b'a');
    let mut fewer = Kit::new(&ECHO);
    fewer.spec.disks.pop();
    let failure = fewer.restored(&file, false).err().unwrap();
    assert!(failure.message.contains("devices"), "{failure:?}");
}

#[test]
fn failed_begin_leaves_nic_queues_to_the_kernel() {
    let kit = Kit::new(&ECHO);
    let mut first = kit.started();
    let unwritable = File::open("/dev/null").unwrap();
    first.machine.begin_snapshot(unwritable, true).unwrap_err();
    assert!(!first.machine.nics.kept);
    let (file, _, _) = first.snapshot(true);
    kit.restored(&file, false).unwrap();
    assert_eq!(first.echo(b'a'), b'a');
}

#[test]
fn ejected_device_fails_the_snapshot_and_the_guest_runs_on() {
    let kit = Kit::new(&ECHO);
    let mut first = kit.started();
    let file = tempfile::tempfile().unwrap();
    first.machine.begin_snapshot(file, true).unwrap();
    first.machine.pci.remove(FURTHER_DISK, &first.machine.spaces.mmio);
    first.machine.pause().unwrap();
    let failure = first.machine.complete_snapshot(Vec::new(), false).unwrap_err();
    assert_eq!(failure.kind, vmm::ErrorKind::State);
    first.machine.give_up_snapshot();
    first.machine.end_snapshot().unwrap_err();
    first.machine.resume().unwrap();
    assert_eq!(first.echo(b'a'), b'a');
}

#[test]
fn cancelled_snapshot_leaves_no_file_and_the_guest_runs_on() {
    let kit = Kit::new(&ECHO);
    let mut first = kit.started();
    let file = tempfile::tempfile().unwrap();
    first
        .machine
        .begin_snapshot(file.try_clone().unwrap(), true)
        .unwrap();
    first.machine.give_up_snapshot();
    loop {
        match first.notices.recv_timeout(PATIENCE) {
            Ok(Input::Notice(Notice::Snapshot(Event::Ready))) => {}
            Ok(Input::Notice(Notice::Snapshot(Event::Ended))) => break,
            other => panic!("{other:?}"),
        }
    }
    first.machine.end_snapshot().unwrap_err();
    assert!(kit.restored(&file, false).is_err());
    assert_eq!(first.echo(b'a'), b'a');
    // The log of writes has ended with it.
    let (file, _, _) = first.snapshot(true);
    let mut other = kit.restored(&file, false).unwrap();
    other.machine.resume().unwrap();
    assert_eq!((first.echo(b'a'), other.echo(b'a')), (b'b', b'b'));
}

#[test]
fn guest_that_dirties_memory_resumes_in_the_receiver() {
    let kit = Kit::new(&COUNTER);
    let mut first = kit.started();
    assert_eq!(first.echo(b'x'), b'x');
    let (mut turns, mut changed) = (0, false);
    // A guest that does not get a processor meanwhile changes nothing.
    while turns < 3 || !changed {
        assert!(turns < 50, "it never changes anything");
        turns += 1;
        let (stream, report, rounds) = first.send();
        assert_eq!(report.file_bytes, stream.metadata().unwrap().len());
        let numbers: Vec<_> = rounds.iter().map(|round| round.number).collect();
        assert_eq!(numbers, (0..=report.rounds).collect::<Vec<_>>());
        assert!(rounds[0].sent_bytes > 0, "{rounds:?}");
        changed |= rounds[0].dirty_bytes > 0;
        assert!(report.memory_bytes >= rounds.last().unwrap().sent_bytes);
        let mut other = kit.received(stream).unwrap();
        assert_eq!(other.generation(), first.generation(), "it is the same machine");
        other.machine.resume().unwrap();
        assert_eq!((other.echo(b'x'), other.echo(b'y')), (b'x', b'y'));
        // It is sent further.
        let (stream, ..) = other.send();
        let mut third = kit.received(stream).unwrap();
        third.machine.resume().unwrap();
        assert_eq!(third.echo(b'z'), b'z');
        // If the target does not continue, the source can.
        first.machine.resume().unwrap();
        assert_eq!(first.echo(b'x'), b'x');
    }
}

#[test]
fn vanished_target_lets_the_guest_run_on_and_be_sent_again() {
    let kit = Kit::new(&COUNTER);
    let mut first = kit.started();
    let (near, far) = UnixStream::pair().unwrap();
    drop(far);
    let socket = OwnedFd::from(near);
    let purpose = Purpose::Migration {
        downtime: Duration::ZERO,
        policy: Policy::AlwaysSafe,
    };
    first
        .machine
        .begin_migration(socket.into(), purpose, &vmm_protocol::vmm::Send::default())
        .unwrap();
    first.wait_for(Event::Ended);
    let failure = first.machine.end_snapshot().unwrap_err();
    assert!(failure.message.starts_with("writing the snapshot"), "{failure:?}");
    assert_eq!(first.echo(b'x'), b'x');
    let (stream, ..) = first.send();
    stream.set_len(stream.metadata().unwrap().len() - 1).unwrap();
    let message = kit.received(stream.try_clone().unwrap()).err().unwrap().message;
    assert!(message.contains("it ends there"), "{message}");
    first.machine.resume().unwrap();
    let (stream, ..) = first.send();
    let mut other = kit.received(stream).unwrap();
    other.machine.resume().unwrap();
    assert_eq!(other.echo(b'x'), b'x');
}
