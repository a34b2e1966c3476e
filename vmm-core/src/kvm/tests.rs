use std::{fs::File, os::fd::AsFd, sync::Arc};

use super::*;

fn host() -> Host {
    Host::open().unwrap_or_else(|error| panic!("these tests need KVM: {error}"))
}

#[test]
fn a_host_without_kvm_is_told_what_to_do() {
    let error = Host::open_at("/nonexistent/kvm").unwrap_err();
    assert!(matches!(error, KvmError::Missing));
    assert!(error.to_string().contains("kvm_intel"), "{error}");
    // A file of sysfs that is read-only for all users, including root.
    let error = Host::open_at("/sys/devices/system/cpu/online").unwrap_err();
    assert!(matches!(error, KvmError::Permission));
    assert!(error.to_string().contains("run as root"), "{error}");
}

#[test]
fn another_file_in_kvms_place_is_told_apart() {
    let null = File::open("/dev/null").unwrap();
    assert!(matches!(Host::from_fd(null.into()), Err(KvmError::NotKvm)));
    let vm_fd = Vm::create(&host()).unwrap();
    drop(vm_fd);
}

#[test]
fn an_open_kvm_is_taken() {
    let kvm = File::options()
        .read(true)
        .write(true)
        .open("/dev/kvm")
        .expect("these tests need KVM");
    let host = Host::from_fd(kvm.as_fd().try_clone_to_owned().unwrap()).unwrap();
    assert!(Vm::create(&host).unwrap().max_vcpus() >= 254);
}

#[test]
fn a_crash_is_one_sentence_that_names_the_cause() {
    let unusable = Crash::Emulation {
        rip: 0xffff_ffff_8100_0000,
        bytes: vec![0x0f, 0x01, 0xca],
        hardware: false,
    };
    assert!(unusable.is_host_unusable());
    let text = unusable.to_string();
    assert!(
        text.starts_with("this host's KVM can't run ordinary guests"),
        "{text}"
    );
    assert!(text.ends_with("at 0xffffffff81000000 (0f 01 ca)"), "{text}");
    let astray = Crash::Emulation {
        rip: 0,
        bytes: Vec::new(),
        hardware: true,
    };
    assert!(!astray.is_host_unusable());
    assert_eq!(astray.to_string(), "KVM can't emulate the instruction at 0x0");
    assert_eq!(Crash::TripleFault.to_string(), "triple fault");
}

#[test]
fn a_second_ram_is_refused() {
    use crate::memory::{Backing, GuestRam, layout::RAM_MIN};
    let vm = Vm::create(&host()).unwrap();
    let ram = GuestRam::new(RAM_MIN, Backing::Private).unwrap();
    vm.set_ram(&ram).unwrap();
    assert!(vm.set_ram(&ram).is_err());
}

#[test]
fn largest_ram_is_built_without_allocation() {
    use vm_memory::{Bytes as _, GuestAddress, GuestMemoryBackend as _};

    use crate::memory::{
        Backing, GuestRam,
        layout::{MIB, Map, RAM_MAX, TooLarge},
    };
    let host = host();
    let bits = address_bits(host.supported_cpuid().unwrap().as_slice());
    let ram = match Map::Direct.fits(RAM_MAX, bits) {
        Ok(()) => RAM_MAX,
        Err(TooLarge { most, .. }) => most * MIB,
    };
    for backing in [Backing::Private, Backing::Shared] {
        let memory = GuestRam::new(ram, backing).unwrap();
        // For so much memory, KVM may need seconds for its own tables with either backing, so only
        // one is tested.
        if backing == Backing::Private {
            Vm::create(&host).unwrap().set_ram(&memory).unwrap();
        }
        let last = memory.memory().last_addr().0;
        let end = GuestAddress(last - 7);
        memory.memory().write_obj(0x1234_5678_u64, end).unwrap();
        assert_eq!(memory.memory().read_obj::<u64>(end).unwrap(), 0x1234_5678);
    }
}

#[test]
fn kvmclock_catches_up_with_the_real_time() {
    let vm = Vm::create(&host()).unwrap();
    let now = vm.clock().unwrap();
    let Some(realtime_ns) = now.realtime_ns else {
        return vm.set_clock_caught_up(now).unwrap();
    };
    const HOUR: u64 = 3_600_000_000_000;
    let an_hour_ago = Clock {
        realtime_ns: Some(realtime_ns - HOUR),
        ..now
    };
    vm.set_clock_caught_up(an_hour_ago).unwrap();
    assert!(vm.clock().unwrap().nanoseconds >= now.nanoseconds + HOUR);
    vm.set_clock(an_hour_ago).unwrap();
    assert!(vm.clock().unwrap().nanoseconds < now.nanoseconds + HOUR);
}

#[test]
fn kvmclock_can_be_set_back() {
    let vm = Vm::create(&host()).unwrap();
    let then = vm.clock().unwrap();
    vm.set_clock(Clock {
        nanoseconds: then.nanoseconds + 3_600_000_000_000,
        ..then
    })
    .unwrap();
    assert!(vm.clock().unwrap().nanoseconds > then.nanoseconds + 3_500_000_000_000);
    vm.set_clock(then).unwrap();
    assert!(vm.clock().unwrap().nanoseconds < then.nanoseconds + 3_500_000_000_000);
}

/// Where the tiny guest of a machine check has its code, its interrupt table and the words that it writes.
const CODE: u64 = 0x10_0000;
const HANDLER: u64 = CODE + 0x80;
const TABLE: u64 = 0x20_1000;
const WORDS: u64 = 0x20_0000;
/// `CR4.MCE` (Intel SDM vol. 3, 2.5).
const MACHINE_CHECKS: u64 = 1 << 6;

/// A vCPU that writes to port 0x80 and then waits in a loop, with a handler of machine checks that notes the registers of bank 9 and
/// writes to port 0x80.
fn waiting_guest(cr4: u64) -> (Vcpu, crate::memory::GuestRam) {
    use crate::{
        board::{boot::Entry, cpuid::Cpuid},
        memory::{Backing, GuestRam, layout::RAM_MIN},
    };
    use vm_memory::{Bytes as _, GuestAddress};
    use vmm_protocol::machine::Processor;

    let host = host();
    let vm = Vm::create(&host).unwrap();
    let ram = GuestRam::new(RAM_MIN, Backing::Private).unwrap();
    vm.set_ram(&ram).unwrap();
    let rdmsr_to = |msr: u32, address: u64| {
        let address = u32::try_from(address).unwrap().to_le_bytes();
        let high = (u32::from_le_bytes(address) + 4).to_le_bytes();
        // mov ecx, MSR; rdmsr; mov [ADDRESS], eax; mov [ADDRESS + 4], edx
        [
            &[0xb9][..],
            &msr.to_le_bytes(),
            &[0x0f, 0x32, 0xa3],
            &address,
            &[0x89, 0x15],
            &high,
        ]
        .concat()
    };
    let bank = 0x400 + 4 * u32::from(machine_check::BANK);
    let handler = [
        rdmsr_to(bank + 1, WORDS),
        rdmsr_to(bank + 2, WORDS + 8),
        rdmsr_to(0x17a, WORDS + 16),
        // out 0x80, al; jmp $
        vec![0xe6, 0x80, 0xeb, 0xfe],
    ]
    .concat();
    let write = |bytes: &[u8], at: u64| ram.memory().write_slice(bytes, GuestAddress(at)).unwrap();
    write(&[0xe6, 0x80, 0xeb, 0xfe], CODE);
    write(&handler, HANDLER);
    // The code segment at 0x10 of the descriptor table, and a 32-bit interrupt gate for vector 18.
    write(&0x00cf_9b00_0000_ffff_u64.to_le_bytes(), 0x510);
    let gate = 0x0000_8e00_0010_0000 | HANDLER & 0xffff | (HANDLER & 0xffff_0000) << 32;
    write(&gate.to_le_bytes(), TABLE + 8 * 18);
    let vcpu = vm.create_vcpu(0).unwrap();
    let topology = vmmd_spec::topology::Topology::for_cores(1).unwrap();
    let cpuid = Cpuid::new(&host, topology, &Processor::default()).unwrap();
    vcpu.set_cpuid(&cpuid.vcpus().unwrap()[0].cpuid).unwrap();
    vcpu.set_machine_check_banks(MACHINE_CHECK_BANKS).unwrap();
    let entry = Entry::Pvh {
        eip: u32::try_from(CODE).unwrap(),
        start_info: 0x6000,
    };
    vcpu.set_registers(|special| {
        let mut general = entry.registers(special);
        special.cr4 |= cr4;
        special.idt.base = TABLE;
        special.idt.limit = 8 * 19 - 1;
        general.rsp = 0x8_0000;
        general
    })
    .unwrap();
    (vcpu, ram)
}

/// Has failed memory of the host at a guest address while the guest runs.
fn fail_memory(vcpu: &Vcpu, address: u64) {
    machine_check::set_in_guest(true);
    assert!(machine_check::note(libc::BUS_MCEERR_AR, Some(address)));
    machine_check::set_in_guest(false);
    assert_eq!(vcpu.raise_machine_check().unwrap(), Some(address));
}

#[test]
fn machine_check_reaches_the_handler_with_its_address() {
    use devices::bus::{Bus, Effect};
    use vm_memory::{Bytes as _, GuestAddress};

    let spaces = AddressSpaces {
        pio: Arc::new(Bus::new()),
        mmio: Arc::new(Bus::new()),
    };
    let access = Exit::Access(Effect::None);
    let (mut vcpu, ram) = waiting_guest(MACHINE_CHECKS);
    assert_eq!(vcpu.enter(&spaces).unwrap(), access);
    assert_eq!(vcpu.raise_machine_check().unwrap(), None);
    fail_memory(&vcpu, 0x30_5000);
    assert_eq!(vcpu.enter(&spaces).unwrap(), access);
    let record = machine_check::record(0x30_5000);
    let word = |at: u64| ram.memory().read_obj::<u64>(GuestAddress(at)).unwrap();
    assert_eq!(
        [word(WORDS), word(WORDS + 8), word(WORDS + 16)],
        [record.status, record.addr, record.mcg_status]
    );
    // The handler has not ended: a second machine check meanwhile is the end of the guest, as on hardware.
    fail_memory(&vcpu, 0x30_6000);
    let end = Exit::Crashed(Crash::TripleFault);
    assert_eq!(vcpu.enter(&spaces).unwrap(), end);

    let (mut vcpu, _ram) = waiting_guest(0);
    assert_eq!(vcpu.enter(&spaces).unwrap(), access);
    fail_memory(&vcpu, 0x30_5000);
    assert_eq!(vcpu.enter(&spaces).unwrap(), end, "machine checks are off");
}
