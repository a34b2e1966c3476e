//! Tiny guests on the machine's own KVM: 32-bit code with integer instructions only, which even a backend that
//! emulates every instruction runs.

mod hyperv;
mod nmi;
mod slots;
mod state;

use std::{
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
        mpsc::{Receiver, RecvTimeoutError, channel},
    },
    time::Duration,
};

use devices::{
    bus::{Bus, BusDevice, Effect},
    interrupt::{MsiMessage, NotifyAddress},
};
use vm_memory::{Bytes, GuestAddress};
use vmm_protocol::machine::Processor;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};
use vmmd_spec::topology::Topology;

use super::*;
use crate::{
    board::{
        boot::Entry,
        cpuid::{self, Cpuid},
    },
    kvm::{Host, IrqChipState},
    memory::{Backing, GuestRam, layout},
};

/// Longer than any step here; a test fails after this time instead of hanging.
const PATIENCE: Duration = Duration::from_secs(100);
const CODE: u64 = 0x10_0000;
const MMIO: u64 = layout::MMIO32.start;

/// Records writes and sends them to the test; reads give a count that goes up.
struct Probe {
    writes: std::sync::mpsc::Sender<(u64, Vec<u8>)>,
    reads: u8,
    effect: Effect,
}

impl BusDevice for Probe {
    fn read(&mut self, _offset: u64, data: &mut [u8]) {
        self.reads = self.reads.wrapping_add(1);
        data.fill(self.reads);
    }
    fn write(&mut self, offset: u64, data: &[u8]) -> Effect {
        self.writes.send((offset, data.to_vec())).ok();
        self.effect
    }
}

struct Rig {
    vcpus: Vcpus,
    vm: Arc<Vm>,
    ram: GuestRam,
    spaces: AddressSpaces,
    reports: Receiver<Report>,
    remaps: Arc<AtomicU64>,
    irqchip: IrqChipState,
}

/// A machine with this code at `CODE` and one probe per address space range asked for.
fn rig(cores: u32, code: &[u8]) -> Rig {
    rig_with(cores, code, &Processor::default())
}

/// The same with this processor.
fn rig_with(cores: u32, code: &[u8], processor: &Processor) -> Rig {
    let host = Host::open().unwrap_or_else(|error| panic!("these tests need KVM: {error}"));
    let vm = Vm::create(&host).unwrap();
    let irqchip = IrqChipState::capture(&vm).unwrap();
    let ram = GuestRam::new(layout::RAM_MIN, Backing::Private).unwrap();
    vm.set_ram(&ram).unwrap();
    ram.memory().write_slice(code, GuestAddress(CODE)).unwrap();
    // The descriptor of the code segment at 0x10, which an interrupt gate names.
    ram.memory()
        .write_obj(0x00cf_9b00_0000_ffff_u64, GuestAddress(0x510))
        .unwrap();
    let spaces = AddressSpaces {
        pio: Arc::new(Bus::new()),
        mmio: Arc::new(Bus::new()),
    };
    let (sender, reports) = channel();
    let sender = Mutex::new(sender);
    let remaps = Arc::new(AtomicU64::new(0));
    let counted = Arc::clone(&remaps);
    let handlers = ExitHandlers {
        spaces: spaces.clone(),
        remap: Box::new(move || {
            counted.fetch_add(1, Ordering::Relaxed);
        }),
        eject: Box::new(|| panic!("nothing can be ejected")),
        report: Box::new(move |report| sender.lock().unwrap().send(report).unwrap()),
    };
    let cpuid = Cpuid::new(&host, Topology::for_cores(cores).unwrap(), processor).unwrap();
    let vcpus = Vcpus::new(&vm, cpuid.vcpus().unwrap(), &Arc::new(handlers)).unwrap();
    let mut rig = Rig {
        vcpus,
        vm,
        ram,
        spaces,
        reports,
        remaps,
        irqchip,
    };
    rig.enter();
    rig
}

impl Rig {
    fn enter(&mut self) {
        let entry = Entry::Pvh {
            eip: u32::try_from(CODE).unwrap(),
            start_info: 0x6000,
        };
        self.vcpus
            .set_entry(move |special| entry.registers(special))
            .unwrap();
    }

    fn probe(&self, bus: &Bus, base: u64, length: u64, effect: Effect) -> Receiver<(u64, Vec<u8>)> {
        let (writes, written) = channel();
        let probe = Probe {
            writes,
            reads: 0,
            effect,
        };
        bus.insert(base, length, Arc::new(Mutex::new(probe))).unwrap();
        written
    }

    /// A run that ends with a write to port 0x80.
    fn run_to_end(&mut self) {
        self.vcpus.run().unwrap();
        match self
            .reports
            .recv_timeout(PATIENCE)
            .expect("the guest never ends")
            .kind
        {
            ReportKind::PowerOff => {}
            other => panic!("{other:?}"),
        }
        self.vcpus.stop().unwrap();
    }

    fn word(&self, address: u64) -> u32 {
        self.ram.memory().read_obj(GuestAddress(address)).unwrap()
    }
}

/// `out 0x80, al`: the end of a guest.
const END: [u8; 2] = [0xe6, 0x80];
/// `jmp $`.
const SPIN: [u8; 2] = [0xeb, 0xfe];

fn code(parts: &[&[u8]]) -> Vec<u8> {
    parts.concat()
}

fn mov_dx(port: u16) -> Vec<u8> {
    [&[0x66, 0xba][..], &port.to_le_bytes()].concat()
}

#[test]
fn accesses_reach_their_bus_in_the_guests_width() {
    let mmio = u32::try_from(MMIO).unwrap().to_le_bytes();
    let code = code(&[
        &mov_dx(0x500),
        &[0xb8, 0x78, 0x56, 0x34, 0x12], // mov eax, 0x12345678
        &[0xef],                         // out dx, eax
        &[0x66, 0xef],                   // out dx, ax
        &[0xee],                         // out dx, al
        &[0xa3],
        &mmio, // mov [MMIO], eax
        &[0xa2],
        &mmio,                           // mov [MMIO], al
        &[0xed],                         // in eax, dx
        &[0xa3, 0x00, 0x00, 0x20, 0x00], // mov [0x200000], eax
        &[0xa1],
        &mmio,                           // mov eax, [MMIO]
        &[0xa3, 0x04, 0x00, 0x20, 0x00], // mov [0x200004], eax
        &END,
    ]);
    let mut rig = rig(1, &code);
    let ports = rig.probe(&rig.spaces.pio, 0x500, 8, Effect::None);
    let memory = rig.probe(&rig.spaces.mmio, MMIO, 0x1000, Effect::None);
    let _end = rig.probe(&rig.spaces.pio, 0x80, 1, Effect::PowerOff);
    rig.run_to_end();
    let widths =
        |writes: Receiver<(u64, Vec<u8>)>| writes.try_iter().map(|(_, data)| data).collect::<Vec<_>>();
    let bytes = [0x78, 0x56, 0x34, 0x12];
    assert_eq!(
        widths(ports),
        [bytes.to_vec(), bytes[..2].to_vec(), bytes[..1].to_vec()]
    );
    assert_eq!(widths(memory), [bytes.to_vec(), bytes[..1].to_vec()]);
    assert_eq!(
        (rig.word(0x20_0000), rig.word(0x20_0004)),
        (0x0101_0101, 0x0101_0101)
    );
    assert_eq!(rig.vcpus.exit_counts().next().unwrap().accesses, 8);
}

#[test]
fn a_string_access_reaches_the_device_element_by_element() {
    let code = code(&[
        &mov_dx(0x500),
        &[0xbe, 0x00, 0x00, 0x20, 0x00], // mov esi, 0x200000
        &[0xb9, 0x03, 0x00, 0x00, 0x00], // mov ecx, 3
        &[0xfc, 0xf3, 0x66, 0x6f],       // cld; rep outsw
        &END,
    ]);
    let mut rig = rig(1, &code);
    rig.ram
        .memory()
        .write_slice(&[1, 2, 3, 4, 5, 6], GuestAddress(0x20_0000))
        .unwrap();
    let ports = rig.probe(&rig.spaces.pio, 0x500, 2, Effect::None);
    let _end = rig.probe(&rig.spaces.pio, 0x80, 1, Effect::PowerOff);
    rig.run_to_end();
    let writes: Vec<_> = ports.try_iter().map(|(_, data)| data).collect();
    assert_eq!(writes, [vec![1, 2], vec![3, 4], vec![5, 6]]);
}

#[test]
fn effects_precede_the_next_instruction_and_reset_parks() {
    let code = code(&[&[0xe6, 0x81], &[0xe6, 0x82], &[0xe6, 0x83], &END]);
    let mut rig = rig(1, &code);
    let _remap = rig.probe(&rig.spaces.pio, 0x81, 1, Effect::Remap);
    let _panicked = rig.probe(&rig.spaces.pio, 0x82, 1, Effect::GuestPanicked);
    let _reset = rig.probe(&rig.spaces.pio, 0x83, 1, Effect::Reset);
    let end = rig.probe(&rig.spaces.pio, 0x80, 1, Effect::PowerOff);
    rig.vcpus.run().unwrap();
    let next = || rig.reports.recv_timeout(PATIENCE).unwrap().kind;
    assert!(matches!(next(), ReportKind::GuestPanicked(None)));
    assert_eq!(rig.remaps.load(Ordering::Relaxed), 1);
    assert!(matches!(next(), ReportKind::Reset));
    rig.vcpus.stop().unwrap();
    assert!(end.try_recv().is_err(), "it runs no further");
    // The access is completed: the vCPU is behind it.
    let rip = rig.vcpus.call_one(0, |vcpu| vcpu.registers()).unwrap().rip;
    assert_eq!(rip, CODE + 6);
    rig.run_to_end();
}

#[test]
fn stopped_vcpu_is_released_and_an_ended_one_is_not() {
    let mut rig = rig(1, &code(&[&[0xeb, 0xfe]]));
    rig.vcpus.run().unwrap();
    for _ in 0..50 {
        rig.vcpus.stop().unwrap();
        rig.vcpus.release().unwrap();
    }
    assert!(rig.vcpus.reset().is_err(), "it runs");
    rig.vcpus.stop().unwrap();

    // out 0x83: a reset; what follows it must not be reached.
    let mut rig = self::rig(1, &code(&[&[0xe6, 0x83], &[0xe6, 0x84], &[0xeb, 0xfe]]));
    let _reset = rig.probe(&rig.spaces.pio, 0x83, 1, Effect::Reset);
    let behind = rig.probe(&rig.spaces.pio, 0x84, 1, Effect::None);
    rig.vcpus.run().unwrap();
    let report = rig.reports.recv_timeout(PATIENCE).unwrap();
    assert!(matches!(report.kind, ReportKind::Reset));
    for _ in 0..50 {
        rig.vcpus.stop().unwrap();
        rig.vcpus.release().unwrap();
    }
    rig.vcpus.stop().unwrap();
    assert_eq!(rig.vcpus.ended(), Some(0));
    assert!(behind.try_recv().is_err(), "it ran on behind its reset");
    rig.vcpus.run().unwrap();
    behind.recv_timeout(PATIENCE).expect("a run is one anew");
}

#[test]
fn no_stop_is_lost_and_none_leaves_an_access_half_done() {
    // A loop of increments, each told by a port write and read back from memory.
    let code = code(&[
        &mov_dx(0x500),
        &[0x31, 0xc0],                   // xor eax, eax
        &[0x40],                         // again: inc eax
        &[0xa3, 0x00, 0x00, 0x20, 0x00], // mov [0x200000], eax
        &[0xef],                         // out dx, eax
        &[0xeb, 0xf7],                   // jmp again
    ]);
    let mut rig = rig(1, &code);
    let ports = rig.probe(&rig.spaces.pio, 0x500, 4, Effect::None);
    let mut last = 0;
    for round in 0..300 {
        rig.vcpus.run().unwrap();
        if round % 3 == 0 {
            // Otherwise the stop comes at once, before the guest is entered.
            let (_, data) = ports.recv_timeout(PATIENCE).unwrap();
            let count = u32::from_le_bytes(data.try_into().unwrap());
            assert_eq!(count, last + 1, "round {round}: each count is told once");
            last = count;
        }
        rig.vcpus.stop().unwrap();
        for (_, data) in ports.try_iter() {
            let count = u32::from_le_bytes(data.try_into().unwrap());
            assert_eq!(count, last + 1, "round {round}: each count is told once");
            last = count;
        }
        let registers = rig.vcpus.call_one(0, |vcpu| vcpu.registers()).unwrap();
        let counter = u32::try_from(registers.rax).unwrap();
        // The device has seen the count if and only if the vCPU is behind `out`.
        let between = [CODE + 7, CODE + 12].contains(&registers.rip);
        assert_eq!(
            counter,
            last + u32::from(between),
            "round {round}, at {:#x}",
            registers.rip
        );
    }
    assert!(last >= 100);
}

#[test]
fn all_vcpus_of_a_large_machine_stop_and_run_together() {
    let mut rig = rig(32, &SPIN);
    for _ in 0..20 {
        rig.vcpus.run().unwrap();
        rig.vcpus.run().unwrap();
        rig.vcpus.stop().unwrap();
        rig.vcpus.stop().unwrap();
    }
    assert!(rig.reports.try_recv().is_err());
}

/// 254 vCPUs: each vCPU has the local APIC ID of the topology, and the last one starts when the
/// first one sends it INIT and a startup IPI.
#[test]
fn last_vcpu_of_the_largest_machine_starts_by_ipi() {
    const FLAG: u64 = 0x9000;
    // Real mode at 0x8000: mov word [0x9000], 1; hlt; jmp $-1.
    let startup = [0xc7, 0x06, 0x00, 0x90, 1, 0, 0xf4, 0xeb, 0xfd];
    let topology = Topology::for_cores(254).unwrap();
    let id = cpuid::apic_id(topology, 253);
    assert_eq!(id, 254);
    let mut rig = rig(
        254,
        &code(&[
            // mov dword [0xfee00310], id << 24; INIT and startup IPI with vector 8; wait for the flag.
            &[
                0xc7,
                0x05,
                0x10,
                0x03,
                0xe0,
                0xfe,
                0,
                0,
                0,
                u8::try_from(id).unwrap(),
            ],
            &[0xc7, 0x05, 0x00, 0x03, 0xe0, 0xfe, 0x00, 0x45, 0x00, 0x00],
            &[0xc7, 0x05, 0x00, 0x03, 0xe0, 0xfe, 0x08, 0x46, 0x00, 0x00],
            // cmp dword [0x9000], 0; je -9.
            &[0x83, 0x3d, 0x00, 0x90, 0x00, 0x00, 0x00, 0x74, 0xf7],
            &END,
        ]),
    );
    rig.ram
        .memory()
        .write_slice(&startup, GuestAddress(0x8000))
        .unwrap();
    let _end = rig.probe(&rig.spaces.pio, 0x80, 1, Effect::PowerOff);
    rig.run_to_end();
    assert_eq!(rig.word(FLAG), 1);
}

#[test]
fn a_call_is_refused_while_the_vcpu_runs() {
    let mut rig = rig(1, &SPIN);
    rig.vcpus.run().unwrap();
    assert!(matches!(
        rig.vcpus.call_one(0, |vcpu| vcpu.registers()),
        Err(VcpuError::Running)
    ));
    assert!(matches!(rig.vcpus.reset(), Err(VcpuError::Running)));
    rig.vcpus.stop().unwrap();
    assert!(rig.vcpus.call_one(0, |vcpu| vcpu.registers()).is_ok());
}

#[test]
fn a_triple_fault_is_told_and_a_reset_gives_a_fresh_machine() {
    // lidt with a limit of 0, then an interrupt that has no gate.
    let code = code(&[
        &[0x0f, 0x01, 0x1d, 0x00, 0x00, 0x20, 0x00], // lidt [0x200000] (all zeroes)
        &[0xbb, 0x34, 0x12, 0x00, 0x00],             // mov ebx, 0x1234
        &[0x0f, 0x0b],                               // ud2
    ]);
    let mut rig = rig(1, &code);
    let first = rig.vcpus.call_one(0, |vcpu| vcpu.registers()).unwrap();
    for _ in 0..3 {
        rig.vcpus.run().unwrap();
        let report = rig.reports.recv_timeout(PATIENCE).unwrap();
        assert!(
            matches!(report.kind, ReportKind::Crashed(Crash::TripleFault)),
            "{:?}",
            report.kind
        );
        rig.vcpus.stop().unwrap();
        rig.irqchip.restore(&rig.vm).unwrap();
        assert_eq!(rig.vcpus.ended(), Some(0));
        rig.vcpus.reset().unwrap();
        assert_eq!(rig.vcpus.ended(), None);
        rig.enter();
        assert_eq!(rig.vcpus.call_one(0, |vcpu| vcpu.registers()).unwrap(), first);
    }
    // After a reset it is one that was stopped.
    rig.vcpus.release().unwrap();
    let report = rig.reports.recv_timeout(PATIENCE).unwrap();
    assert!(matches!(report.kind, ReportKind::Crashed(Crash::TripleFault)));
}

/// Sets up a handler for vector 0x41 that counts at 0x202000, enables the local APIC, signals the
/// test, and waits in HLT.
fn interrupt_guest() -> Vec<u8> {
    let handler = u32::try_from(CODE + 0x80).unwrap();
    let mut guest = code(&[
        // The gate at 0x200000 + 8 * 0x41: 32-bit interrupt gate to CODE + 0x80.
        &[0xc7, 0x05, 0x08, 0x02, 0x20, 0x00],
        &(0x0010_0000 | handler & 0xffff).to_le_bytes(),
        &[0xc7, 0x05, 0x0c, 0x02, 0x20, 0x00],
        &(handler & 0xffff_0000 | 0x8e00).to_le_bytes(),
        // The table's descriptor: limit 0x7ff, base 0x200000.
        &[0xc7, 0x05, 0x00, 0x10, 0x20, 0x00, 0xff, 0x07, 0x00, 0x00],
        &[0xc7, 0x05, 0x02, 0x10, 0x20, 0x00, 0x00, 0x00, 0x20, 0x00],
        &[0x0f, 0x01, 0x1d, 0x00, 0x10, 0x20, 0x00], // lidt [0x201000]
        &[0xbc, 0x00, 0x00, 0x30, 0x00],             // mov esp, 0x300000
        // Spurious vector 0xff, APIC enabled.
        &[0xc7, 0x05, 0xf0, 0x00, 0xe0, 0xfe, 0xff, 0x01, 0x00, 0x00],
        &[0xfb],       // sti
        &[0xe6, 0x81], // out 0x81, al: ready
        &[0xf4],       // again: hlt
        &[0xeb, 0xfd], // jmp again
    ]);
    assert!(guest.len() <= 0x80);
    let again = i32::try_from(guest.len()).unwrap() - 3;
    // From the end of the jump, the last instruction of the handler.
    let back = again - (0x80 + 6 + 10 + 2 + 3 + 1 + 5);
    guest.resize(0x80, 0x90);
    guest.extend(code(&[
        &[0xff, 0x05, 0x00, 0x20, 0x20, 0x00], // inc dword [0x202000]
        &[0xc7, 0x05, 0xb0, 0x00, 0xe0, 0xfe, 0x00, 0x00, 0x00, 0x00], // end of interrupt
        &[0xe6, 0x82],                         // out 0x82, al: handled
        // Not `iret`, which KVM's emulator does not know in protected mode: drop the frame, go back to `hlt`.
        &[0x83, 0xc4, 0x0c], // add esp, 12
        &[0xfb],             // sti
        &[0xe9],
        &back.to_le_bytes(), // jmp again
    ]));
    guest
}

const MESSAGE: MsiMessage = MsiMessage {
    address: layout::LOCAL_APIC,
    data: 0x41,
};

#[test]
fn msi_wakes_a_halted_vcpu_by_ioctl_and_by_eventfd() {
    let mut rig = rig(1, &interrupt_guest());
    let ready = rig.probe(&rig.spaces.pio, 0x81, 1, Effect::None);
    let handled = rig.probe(&rig.spaces.pio, 0x82, 1, Effect::None);
    let vectors = rig.vm.msi_controller();
    let vector = vectors.allocate().unwrap();
    rig.vcpus.run().unwrap();
    ready.recv_timeout(PATIENCE).expect("the guest halts");

    vector.trigger();
    vector.connect(Some(MESSAGE)).unwrap();
    vector.trigger();
    handled.recv_timeout(PATIENCE).expect("by ioctl");
    // From here on with an irqfd.
    let event = vector.event().unwrap();
    event.write(1).unwrap();
    handled.recv_timeout(PATIENCE).expect("by eventfd");
    vector.trigger();
    handled
        .recv_timeout(PATIENCE)
        .expect("by ioctl beside the eventfd");

    vector.connect(None).unwrap();
    vector.trigger();
    event.write(1).unwrap();
    // Signals while masked arrive once, after the vector is connected again.
    vector.connect(Some(MESSAGE)).unwrap();
    handled.recv_timeout(PATIENCE).expect("pending while masked");
    rig.vcpus.stop().unwrap();
    assert_eq!(rig.word(0x20_2000), 4);
}

#[test]
fn pause_keeps_a_halted_vcpu_halted_and_delays_interrupts() {
    let mut rig = rig(1, &interrupt_guest());
    let ready = rig.probe(&rig.spaces.pio, 0x81, 1, Effect::None);
    let handled = rig.probe(&rig.spaces.pio, 0x82, 1, Effect::None);
    let vector = rig.vm.msi_controller().allocate().unwrap();
    vector.connect(Some(MESSAGE)).unwrap();
    rig.vcpus.run().unwrap();
    ready.recv_timeout(PATIENCE).unwrap();
    for round in 1..=20 {
        rig.vcpus.stop().unwrap();
        let clock = rig.vm.clock().unwrap();
        vector.trigger();
        assert!(matches!(
            handled.try_recv(),
            Err(std::sync::mpsc::TryRecvError::Empty)
        ));
        rig.vm.set_clock(clock).unwrap();
        rig.vcpus.run().unwrap();
        handled
            .recv_timeout(PATIENCE)
            .unwrap_or_else(|_| panic!("round {round}"));
    }
}

#[test]
fn a_vcpu_lives_when_idle_and_not_without_interrupts() {
    // out 0x80, then: cli, hlt; a loop; sti, hlt.
    for (rest, lives) in [
        (&[0xfa, 0xf4][..], false),
        (&[0xeb, 0xfe], false),
        (&[0xfb, 0xf4], true),
    ] {
        let mut rig = rig(1, &code(&[&[0xe6, 0x80], rest]));
        let begun = rig.probe(&rig.spaces.pio, 0x80, 1, Effect::None);
        rig.vcpus.run().unwrap();
        begun.recv_timeout(PATIENCE).unwrap();
        let start = std::time::Instant::now();
        // It comes to its last instruction at some time, and stays there.
        loop {
            rig.vcpus.stop().unwrap();
            let found = rig.vcpus.lives().unwrap();
            let rip = rig.vcpus.call_one(0, |vcpu| vcpu.registers()).unwrap().rip;
            let there = rip >= CODE + 2 + u64::from(rest[0] != 0xeb) * 2;
            if there {
                assert_eq!(found, lives, "{rest:x?}");
                break;
            }
            assert!(start.elapsed() < PATIENCE);
            rig.vcpus.release().unwrap();
        }
    }
}

#[test]
fn many_vectors_are_routed_and_given_back() {
    let rig = rig(1, &SPIN);
    let vectors = rig.vm.msi_controller();
    for _ in 0..3 {
        let all: Vec<_> = (0..64).map(|_| vectors.allocate().unwrap()).collect();
        for vector in &all {
            assert!(vector.event().is_some());
            vector.connect(Some(MESSAGE)).unwrap();
        }
    }
}

#[test]
fn notification_of_any_width_signals_without_an_exit() {
    let mmio = u32::try_from(MMIO).unwrap().to_le_bytes();
    let code = code(&[
        &[0xa3],
        &mmio, // mov [MMIO], eax
        &[0x66, 0xa3],
        &mmio, // mov [MMIO], ax
        &[0xa2],
        &mmio, // mov [MMIO], al
        &mov_dx(0x500),
        &[0xee], // out dx, al
        &END,
    ]);
    let mut rig = rig(1, &code);
    let _end = rig.probe(&rig.spaces.pio, 0x80, 1, Effect::PowerOff);
    let (memory, port) = (
        EventFd::new(EFD_NONBLOCK).unwrap(),
        EventFd::new(EFD_NONBLOCK).unwrap(),
    );
    let registry = rig.vm.notify_registry();
    registry.register(NotifyAddress::Mmio(MMIO), &memory).unwrap();
    registry.register(NotifyAddress::Pio(0x500), &port).unwrap();
    rig.run_to_end();
    assert_eq!((memory.read().unwrap(), port.read().unwrap()), (3, 1));
    assert_eq!(rig.vcpus.exit_counts().next().unwrap().accesses, 1);
    registry.unregister(NotifyAddress::Mmio(MMIO), &memory).unwrap();
    assert!(registry.unregister(NotifyAddress::Mmio(MMIO), &memory).is_err());
}

#[test]
fn the_second_vcpu_starts_when_the_first_says_so() {
    // The bootstrap processor sends INIT and SIPI to APIC id 1; that one begins at 0x8000 in real mode.
    let icr = |value: u32| code(&[&[0xc7, 0x05, 0x00, 0x03, 0xe0, 0xfe], &value.to_le_bytes()]);
    let code = code(&[
        &[0xc7, 0x05, 0x10, 0x03, 0xe0, 0xfe, 0x00, 0x00, 0x00, 0x01], // destination: id 1
        &icr(0x0000_c500),
        &icr(0x0000_c608),
        &SPIN,
    ]);
    let mut rig = rig(2, &code);
    // out 0x80, al; jmp $
    rig.ram
        .memory()
        .write_slice(&[0xe6, 0x80, 0xeb, 0xfe], GuestAddress(0x8000))
        .unwrap();
    let _end = rig.probe(&rig.spaces.pio, 0x80, 1, Effect::PowerOff);
    for _ in 0..2 {
        rig.vcpus.run().unwrap();
        let report = rig.reports.recv_timeout(PATIENCE).unwrap();
        assert_eq!(report.vcpu, 1);
        assert!(matches!(report.kind, ReportKind::PowerOff), "{:?}", report.kind);
        rig.vcpus.stop().unwrap();
        // After a reset it waits for INIT and SIPI again.
        rig.irqchip.restore(&rig.vm).unwrap();
        rig.vcpus.reset().unwrap();
        rig.enter();
    }
}

#[test]
fn statistics_of_the_kernel_count_exits() {
    let code = code(&[&[0xe6, 0x81], &[0xe6, 0x81], &END]);
    let mut rig = rig(1, &code);
    let _counted = rig.probe(&rig.spaces.pio, 0x81, 1, Effect::None);
    let _end = rig.probe(&rig.spaces.pio, 0x80, 1, Effect::PowerOff);
    rig.run_to_end();
    let stats = rig.vcpus.stats().next().unwrap().expect("kernel 5.14 or later");
    let stats = stats.read().unwrap();
    let figure = |name: &str| stats.iter().find(|stat| stat.name == name).map(|stat| stat.value);
    assert!(figure("exits").is_some_and(|exits| exits >= 1), "{stats:?}");
    assert!(figure("io_exits").is_some(), "{stats:?}");
    assert!(
        rig.vm
            .stats()
            .unwrap()
            .read()
            .unwrap()
            .iter()
            .any(|stat| stat.name.starts_with("pages"))
    );
}

#[test]
fn a_vcpu_thread_that_dies_is_noticed() {
    let mut rig = rig(1, &SPIN);
    let died = rig.vcpus.call_one::<()>(0, |_| panic!("as the test wants"));
    assert!(matches!(died, Err(VcpuError::Gone(0))));
    assert!(matches!(rig.vcpus.stop(), Err(VcpuError::Gone(0))));
}

#[test]
fn what_the_host_can_not_emulate_is_told_with_the_instruction() {
    // fwait is a plain instruction wherever the processor has VT-x or SVM.
    let code = code(&[&[0x9b], &END]);
    let mut rig = rig(1, &code);
    let _end = rig.probe(&rig.spaces.pio, 0x80, 1, Effect::PowerOff);
    let hardware = Host::has_hardware_virtualization();
    rig.vcpus.run().unwrap();
    let kind = rig.reports.recv_timeout(PATIENCE).unwrap().kind;
    match kind {
        ReportKind::PowerOff => {}
        ReportKind::Crashed(crash) if !hardware => {
            assert!(crash.is_host_unusable());
            let message = crash.to_string();
            assert!(message.contains("can't run ordinary guests"), "{message}");
            assert!(message.contains("0x100000"), "{message}");
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn dropping_the_vcpus_of_a_running_machine_ends_their_threads() {
    static DROPPED: AtomicBool = AtomicBool::new(false);
    let mut rig = rig(4, &SPIN);
    rig.vcpus.run().unwrap();
    let Rig { vcpus, reports, .. } = rig;
    drop(vcpus);
    DROPPED.store(true, Ordering::Relaxed);
    assert!(matches!(
        reports.recv_timeout(PATIENCE),
        Err(RecvTimeoutError::Disconnected)
    ));
}
