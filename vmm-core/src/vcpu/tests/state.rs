//! Machines that are saved, dropped, rebuilt and restored.

use std::sync::mpsc::Receiver;

use vm_memory::{Bytes, GuestAddress};
use vmm_protocol::state::{self, Msr, StateError};

use super::*;

/// All of RAM that the guests here use: low memory with tables and code, and the data behind.
const USED: usize = 0x40_0000;

/// Saved state of a machine that has ended.
struct Saved {
    vcpus: Vec<state::Vcpu>,
    chips: state::InterruptControllers,
    clock: state::Clock,
    ram: Vec<u8>,
}

/// Output of a guest: port writes.
struct Ports {
    counts: Receiver<(u64, Vec<u8>)>,
    ticks: Receiver<(u64, Vec<u8>)>,
}

impl Rig {
    fn ports(&self) -> Ports {
        Ports {
            counts: self.probe(&self.spaces.pio, 0x500, 8, Effect::None),
            ticks: self.probe(&self.spaces.pio, 0x82, 1, Effect::None),
        }
    }

    /// Saves the machine, which is stopped, and ends it.
    fn save(mut self) -> Saved {
        let mut ram = vec![0; USED];
        let chips = self.vm.save_interrupt_controllers().unwrap();
        let vcpus = self.vcpus.save().unwrap();
        self.ram.memory().read_slice(&mut ram, GuestAddress(0)).unwrap();
        Saved {
            vcpus,
            chips,
            clock: self.vm.clock().unwrap().into(),
            ram,
        }
    }
}

impl Saved {
    /// Returns a new machine that continues from the saved state.
    fn restore(&self) -> Rig {
        let cores = u32::try_from(self.vcpus.len()).unwrap();
        let mut rig = rig(cores, &[]);
        rig.ram.memory().write_slice(&self.ram, GuestAddress(0)).unwrap();
        rig.vm.set_clock(self.clock.into()).unwrap();
        rig.vcpus.restore(self.vcpus.clone()).unwrap();
        rig.vm.restore_interrupt_controllers(&self.chips).unwrap();
        rig
    }
}

/// Counts in EAX, sums up in EBX, and writes both to ports 0x500 and 0x504. The local APIC's timer
/// interrupts the guest, and the handler writes to port 0x82.
fn counting_guest() -> Vec<u8> {
    let handler = u32::try_from(CODE + 0x100).unwrap();
    let mut guest = code(&[
        &[0xc7, 0x05, 0x08, 0x02, 0x20, 0x00],
        &(0x0010_0000 | handler & 0xffff).to_le_bytes(),
        &[0xc7, 0x05, 0x0c, 0x02, 0x20, 0x00],
        &(handler & 0xffff_0000 | 0x8e00).to_le_bytes(),
        &[0xc7, 0x05, 0x00, 0x10, 0x20, 0x00, 0xff, 0x07, 0x00, 0x00],
        &[0xc7, 0x05, 0x02, 0x10, 0x20, 0x00, 0x00, 0x00, 0x20, 0x00],
        &[0x0f, 0x01, 0x1d, 0x00, 0x10, 0x20, 0x00], // lidt [0x201000]
        &[0xbc, 0x00, 0x00, 0x30, 0x00],             // mov esp, 0x300000
        &[0xc7, 0x05, 0xf0, 0x00, 0xe0, 0xfe, 0xff, 0x01, 0x00, 0x00], // APIC on
        &[0xc7, 0x05, 0xe0, 0x03, 0xe0, 0xfe, 0x0b, 0x00, 0x00, 0x00], // timer: divide by 1
        &[0xc7, 0x05, 0x20, 0x03, 0xe0, 0xfe, 0x41, 0x00, 0x02, 0x00], // periodic, vector 0x41
        &[0xc7, 0x05, 0x80, 0x03, 0xe0, 0xfe, 0x40, 0x4b, 0x4c, 0x00], // every 5,000,000 cycles
        &[0xbe, 0x11, 0x11, 0x11, 0x11],             // mov esi, 0x11111111
        &[0xbf, 0x22, 0x22, 0x22, 0x22],             // mov edi, 0x22222222
        &[0xbd, 0x33, 0x33, 0x33, 0x33],             // mov ebp, 0x33333333
        &[0x31, 0xc0, 0x31, 0xdb],                   // xor eax, eax; xor ebx, ebx
        &[0xfb],                                     // sti
        // again:
        &[0x40],                         // inc eax
        &[0x01, 0xc3],                   // add ebx, eax
        &[0xa3, 0x00, 0x30, 0x20, 0x00], // mov [0x203000], eax
        &[0x66, 0xba, 0x00, 0x05],       // mov dx, 0x500
        &[0xef],                         // out dx, eax
        &[0x93],                         // xchg eax, ebx
        &[0x66, 0xba, 0x04, 0x05],       // mov dx, 0x504
        &[0xef],                         // out dx, eax
        &[0x93],                         // xchg eax, ebx
        &[0xeb, 0xea],                   // jmp again
    ]);
    assert!(guest.len() <= 0x100);
    guest.resize(0x100, 0x90);
    guest.extend(code(&[
        &[0xff, 0x05, 0x00, 0x20, 0x20, 0x00], // inc dword [0x202000]
        &[0xe6, 0x82],                         // out 0x82, al
        &[0xc7, 0x05, 0xb0, 0x00, 0xe0, 0xfe, 0x00, 0x00, 0x00, 0x00], // end of interrupt
        // Equivalent of `iret`, which KVM's emulator lacks in protected mode.
        &[0xff, 0x74, 0x24, 0x08], // push dword [esp + 8]
        &[0x9d],                   // popfd
        &[0xc2, 0x08, 0x00],       // ret 8
    ]));
    guest
}

/// Checks that the guest continues its count.
struct Count {
    last: u32,
    sum: u32,
}

impl Count {
    fn see(&mut self, (offset, data): (u64, Vec<u8>)) {
        let value = u32::from_le_bytes(data.try_into().unwrap());
        if offset == 0 {
            assert_eq!(value, self.last + 1, "no count is lost or told twice");
            self.last = value;
            self.sum = self.sum.wrapping_add(value);
        } else {
            assert_eq!(value, self.sum, "at {}", self.last);
        }
    }
}

#[test]
fn a_guest_that_is_restored_at_any_point_sees_no_difference() {
    let mut rig = rig(1, &counting_guest());
    let mut ports = rig.ports();
    let mut count = Count { last: 0, sum: 0 };
    let mut ticks = 0;
    for round in 0..40_usize {
        rig.vcpus.run().unwrap();
        // Each round ends at another instruction: some at once, some behind a number of accesses, some behind a tick.
        for _ in 0..round % 7 {
            count.see(ports.counts.recv_timeout(PATIENCE).unwrap());
        }
        if round % 5 == 4 {
            ports.ticks.recv_timeout(PATIENCE).expect("the timer goes on");
            ticks += 1;
        }
        rig.vcpus.stop().unwrap();
        ports.counts.try_iter().for_each(|write| count.see(write));
        ticks += u32::try_from(ports.ticks.try_iter().count()).unwrap();
        let before = rig.vcpus.call_one(0, |vcpu| vcpu.registers()).unwrap();
        let saved = rig.save();
        rig = saved.restore();
        ports = rig.ports();
        let after = rig.vcpus.call_one(0, |vcpu| vcpu.registers()).unwrap();
        assert_eq!(after, before, "round {round}");
        if count.last > 0 {
            assert_eq!(
                [after.rsi, after.rdi, after.rbp],
                [0x1111_1111, 0x2222_2222, 0x3333_3333]
            );
        }
    }
    assert!(
        count.last > 40 && ticks >= 8,
        "{} counts, {ticks} ticks",
        count.last
    );
    // The handler counts before its port write: at most one tick was counted and not written.
    assert!([ticks, ticks + 1].contains(&rig.word(0x20_2000)));
}

/// The state without values that advance while no vCPU runs: the counter, and the current count of
/// the APIC's timer.
fn at_rest(mut vcpu: state::Vcpu) -> state::Vcpu {
    const TIMER_CURRENT: usize = 0x390;
    vcpu.local_apic[TIMER_CURRENT..TIMER_CURRENT + 4].fill(0);
    let tsc = vcpu.tsc.as_mut().unwrap();
    (tsc.value, tsc.offset) = (0, None);
    vcpu
}

#[test]
fn what_is_restored_is_what_was_saved() {
    let mut rig = rig(2, &counting_guest());
    let ports = rig.ports();
    rig.vcpus.run().unwrap();
    for _ in 0..9 {
        ports.counts.recv_timeout(PATIENCE).unwrap();
    }
    rig.vcpus.stop().unwrap();
    let mut first = rig.save();
    // State that these guests cannot produce: SSE, debug registers, a pending exception.
    let vcpu = &mut first.vcpus[0];
    vcpu.xsave[160..160 + 256]
        .iter_mut()
        .zip(1..=255)
        .for_each(|(byte, value)| *byte = value);
    vcpu.xsave[512] |= 0b11;
    let debug = vcpu.debug.as_mut().unwrap();
    debug.addresses = vec![0x1000, 0x2000, 0x3000, 0x4000];
    debug.dr7 |= 0xff;
    vcpu.special.as_mut().unwrap().cr2 = 0x1234_5678;
    let events = vcpu.events.as_mut().unwrap();
    events.nmi_pending = true;
    events.nmi_masked = true;
    events.exception_pending = true;
    events.exception_vector = 14;
    events.exception_error_code = Some(2);
    events.exception_payload = Some(0xdead_b000);

    let second = first.restore().save();
    for (first, second) in first.vcpus.iter().zip(&second.vcpus) {
        assert_eq!(at_rest(first.clone()), at_rest(second.clone()));
        assert!(
            second.tsc.unwrap().value >= first.tsc.unwrap().value,
            "the counter goes on"
        );
    }
    assert_eq!(first.chips, second.chips);
    assert!(second.clock.nanoseconds >= first.clock.nanoseconds);
}

/// Saved state whose counters are far ahead and `apart`, and the state after a restore and a second
/// save. `None` if this host's KVM has only the host's counters, and the restore must then fail
/// with an error about them.
fn with_counters(offsets: bool, apart: u64) -> (Saved, Option<Saved>) {
    let mut saved = rig(3, &SPIN).save();
    for (index, vcpu) in (0..).zip(&mut saved.vcpus) {
        let tsc = vcpu.tsc.as_mut().unwrap();
        let offset = tsc.offset.map(|offset| offset.wrapping_add(index * apart));
        tsc.offset = offset.filter(|_| offsets);
        tsc.value += (1 << 50) + index * apart;
    }
    let mut rig = rig(3, &SPIN);
    let again = match rig.vcpus.restore(saved.vcpus.clone()) {
        Ok(()) => Some(rig.save()),
        Err(VcpuError::State { source, .. }) if !Host::has_hardware_virtualization() => {
            assert!(source.to_string().starts_with("field `tsc.value`: "), "{source}");
            None
        }
        Err(error) => panic!("{error:?}"),
    };
    (saved, again)
}

#[test]
fn counters_go_on_and_differ_by_exactly_what_they_did() {
    let (saved, Some(again)) = with_counters(true, 1 << 40) else {
        return;
    };
    let offset = |vcpu: &state::Vcpu| vcpu.tsc.unwrap().offset.expect("kernel 5.16 or later");
    for (before, after) in saved.vcpus.iter().zip(&again.vcpus) {
        let apart = |of: &state::Vcpu, first: &state::Vcpu| offset(of).wrapping_sub(offset(first));
        assert_eq!(apart(before, &saved.vcpus[0]), apart(after, &again.vcpus[0]));
        assert!(after.tsc.unwrap().value >= before.tsc.unwrap().value);
    }
}

#[test]
fn a_counter_that_was_read_long_after_the_first_one_is_restored() {
    let mut saved = rig(2, &SPIN).save();
    // A second at least; without offsets each vCPU is given its own value, which is no use here.
    let Some(tsc) = saved.vcpus[1].tsc.as_mut().filter(|tsc| tsc.offset.is_some()) else {
        assert!(!Host::has_hardware_virtualization(), "kernel 5.16 or later");
        return;
    };
    tsc.value += 10_000_000_000;
    rig(2, &SPIN).vcpus.restore(saved.vcpus).unwrap();
}

#[test]
fn counters_go_on_also_where_the_kernel_tells_no_offsets() {
    let (saved, Some(again)) = with_counters(false, 0) else {
        return;
    };
    for (before, after) in saved.vcpus.iter().zip(&again.vcpus) {
        assert!(after.tsc.unwrap().value >= before.tsc.unwrap().value);
    }
}

#[test]
fn interrupt_between_stop_and_save_comes_after_the_restore() {
    let mut rig = rig(1, &interrupt_guest());
    let ready = rig.probe(&rig.spaces.pio, 0x81, 1, Effect::None);
    let vector = rig.vm.msi_controller().allocate().unwrap();
    vector.connect(Some(MESSAGE)).unwrap();
    rig.vcpus.run().unwrap();
    ready.recv_timeout(PATIENCE).expect("the guest halts");
    for by_irqfd in [false, true] {
        rig.vcpus.stop().unwrap();
        let vector = rig.vm.msi_controller().allocate().unwrap();
        vector.connect(Some(MESSAGE)).unwrap();
        vector.trigger();
        let saved = rig.save();
        drop(vector);
        rig = saved.restore();
        let handled = rig.probe(&rig.spaces.pio, 0x82, 1, Effect::None);
        rig.vcpus.run().unwrap();
        handled.recv_timeout(PATIENCE).expect("what was pending");
        // A vector that is reconnected on the new machine, as a device's restore does, by ioctl and
        // by irqfd.
        let vector = rig.vm.msi_controller().allocate().unwrap();
        vector.connect(Some(MESSAGE)).unwrap();
        if by_irqfd {
            vector.event().unwrap().write(1).unwrap();
        } else {
            vector.trigger();
        }
        handled.recv_timeout(PATIENCE).expect("what came after");
    }
    rig.vcpus.stop().unwrap();
    assert_eq!(rig.word(0x20_2000), 4);
}

#[test]
fn a_vcpu_that_waits_to_be_started_still_does_after_a_restore() {
    let icr = |value: u32| code(&[&[0xc7, 0x05, 0x00, 0x03, 0xe0, 0xfe], &value.to_le_bytes()]);
    let guest = code(&[
        &[0xe6, 0x81],                                                 // out 0x81, al
        &[0xc7, 0x05, 0x10, 0x03, 0xe0, 0xfe, 0x00, 0x00, 0x00, 0x01], // destination: id 1
        &icr(0x0000_c500),
        &icr(0x0000_c608),
        &SPIN,
    ]);
    let mut rig = rig(2, &guest);
    rig.ram
        .memory()
        .write_slice(&[0xe6, 0x80, 0xeb, 0xfe], GuestAddress(0x8000))
        .unwrap();
    let before = rig.probe(&rig.spaces.pio, 0x81, 1, Effect::Reset);
    rig.vcpus.run().unwrap();
    before.recv_timeout(PATIENCE).unwrap();
    rig.vcpus.stop().unwrap();
    let mut rig = rig.save().restore();
    let _end = rig.probe(&rig.spaces.pio, 0x80, 1, Effect::PowerOff);
    rig.vcpus.run().unwrap();
    let report = rig.reports.recv_timeout(PATIENCE).unwrap();
    assert!(
        report.vcpu == 1 && matches!(report.kind, ReportKind::PowerOff),
        "{report:?}"
    );
    rig.vcpus.stop().unwrap();
    // It is in real mode, behind its first instruction; and it stays there.
    let mut rig = rig.save().restore();
    let rip = rig.vcpus.call_one(1, |vcpu| vcpu.registers()).unwrap().rip;
    assert_eq!(rip, 2);
}

#[test]
fn a_vcpu_begins_as_firmware_leaves_it_also_after_a_reset() {
    let mut rig = rig(2, &SPIN);
    let check = |vcpus: Vec<state::Vcpu>| {
        for vcpu in vcpus {
            let value = |index| {
                vcpu.msrs
                    .iter()
                    .find(|msr| msr.index == index)
                    .map(|msr| msr.value)
            };
            assert_eq!(value(0x2ff), Some(0xc06), "MTRRs are on, memory is write-back");
            assert_eq!(value(0x200), Some(0xc000_0000), "the hole is not");
            // Banks 0 to 9.
            assert!(value(0x427).is_some() && value(0x428).is_none());
        }
    };
    check(rig.vcpus.save().unwrap());
    rig.vcpus.reset().unwrap();
    check(rig.vcpus.save().unwrap());
}

#[test]
fn a_reset_of_a_restored_machine_gives_a_fresh_one() {
    let mut fresh = rig(1, &counting_guest());
    let first = fresh.vcpus.call_one(0, |vcpu| vcpu.registers()).unwrap();
    let ports = fresh.ports();
    fresh.vcpus.run().unwrap();
    ports.ticks.recv_timeout(PATIENCE).unwrap();
    fresh.vcpus.stop().unwrap();
    let mut rig = fresh.save().restore();
    rig.irqchip.restore(&rig.vm).unwrap();
    rig.vcpus.reset().unwrap();
    rig.enter();
    assert_eq!(rig.vcpus.call_one(0, |vcpu| vcpu.registers()).unwrap(), first);
    let ports = rig.ports();
    let mut count = Count { last: 0, sum: 0 };
    rig.vcpus.run().unwrap();
    for _ in 0..10 {
        count.see(ports.counts.recv_timeout(PATIENCE).unwrap());
    }
    rig.vcpus.stop().unwrap();
}

/// Error of a restore of the first vCPU after `change` of its state.
fn refused(saved: &Saved, change: impl FnOnce(&mut state::Vcpu)) -> String {
    let mut vcpu = saved.vcpus[0].clone();
    change(&mut vcpu);
    match rig(1, &SPIN).vcpus.restore(vec![vcpu]) {
        Err(VcpuError::State { vcpu: 0, source }) => source.to_string(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn an_msr_that_can_not_be_restored_is_named() {
    let saved = rig(1, &SPIN).save();
    let message = refused(&saved, |vcpu| {
        vcpu.msrs.push(Msr {
            index: 0xdead,
            value: 1,
        });
    });
    assert_eq!(message, "field `msrs`: MSR 0xdead is not known here");
    let message = refused(&saved, |vcpu| {
        let first = vcpu.msrs[0];
        vcpu.msrs.push(first);
    });
    assert!(message.ends_with("is there twice"), "{message}");
    // A value that this MSR (the base of its SYSENTER stack is canonical) can't have.
    let message = refused(&saved, |vcpu| {
        let base = vcpu.msrs.iter_mut().find(|msr| msr.index == 0xc000_0102);
        base.expect("MSR_KERNEL_GS_BASE").value = 1 << 63;
    });
    assert_eq!(
        message,
        "field `msrs`: MSR 0xc0000102 can't be set to 0x8000000000000000; here it is 0x0"
    );
}

#[test]
fn impossible_state_is_refused_with_its_field() {
    let saved = rig(1, &SPIN).save();
    type Change = fn(&mut state::Vcpu);
    let cases: [(&str, Change); 12] = [
        ("general", |vcpu| vcpu.general = None),
        ("special", |vcpu| vcpu.special = None),
        ("special.cs", |vcpu| vcpu.special.as_mut().unwrap().cs = None),
        ("special.ss", |vcpu| {
            vcpu.special.as_mut().unwrap().ss.as_mut().unwrap().selector = 0x1_0000;
        }),
        ("special.gdt", |vcpu| {
            vcpu.special.as_mut().unwrap().gdt.as_mut().unwrap().limit = 0x1_0000;
        }),
        ("special.pdptrs", |vcpu| {
            vcpu.special.as_mut().unwrap().pdptrs = vec![0; 3];
        }),
        ("xcrs", |vcpu| {
            vcpu.xcrs = vec![state::ExtendedControlRegister::default(); 17];
        }),
        ("xsave", |vcpu| vcpu.xsave.truncate(4092)),
        ("xsave", |vcpu| vcpu.xsave.extend([1; 1 << 16])),
        ("debug.addresses", |vcpu| {
            vcpu.debug.as_mut().unwrap().addresses.clear();
        }),
        ("local_apic", |vcpu| vcpu.local_apic.push(0)),
        ("events.exception_vector", |vcpu| {
            vcpu.events.as_mut().unwrap().exception_vector = 256;
        }),
    ];
    for (field, change) in cases {
        let message = refused(&saved, change);
        assert!(
            message.starts_with(&format!("field `{field}`: ")),
            "{field}: {message}"
        );
    }
    let message = refused(&saved, |vcpu| vcpu.tsc.as_mut().unwrap().khz /= 2);
    assert!(
        message.contains("kHz") || message.contains("KVM_SET_TSC_KHZ"),
        "{message}"
    );
}

#[test]
fn another_number_of_vcpus_is_refused() {
    let saved = rig(1, &SPIN).save();
    let refused = rig(2, &SPIN).vcpus.restore(saved.vcpus).unwrap_err();
    let VcpuError::State {
        source: StateError::Invalid { field, .. },
        ..
    } = refused
    else {
        panic!("{refused}");
    };
    assert_eq!(field, "vcpus");
}
