use std::{fs::File, os::fd::AsFd};

use super::*;

fn host() -> Host {
    Host::open().unwrap_or_else(|error| panic!("these tests need KVM: {error}"))
}

#[test]
fn a_host_without_kvm_is_told_what_to_do() {
    let error = Host::open_at("/nonexistent/kvm").unwrap_err();
    assert!(matches!(error, KvmError::Missing));
    assert!(error.to_string().contains("kvm_intel"), "{error}");
    // A file of sysfs that nobody may write to, not even root.
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
fn the_most_ram_that_fits_the_host_can_be_built_without_having_it() {
    use vm_memory::{Bytes as _, GuestAddress, GuestMemoryBackend as _};

    use crate::memory::{
        Backing, GuestRam,
        layout::{MIB, RAM_MAX, TooLarge, fits},
    };
    let host = host();
    let ram = match fits(RAM_MAX, host.physical_address_bits().unwrap()) {
        Ok(()) => RAM_MAX,
        Err(TooLarge { most, .. }) => most * MIB,
    };
    for backing in [Backing::Private, Backing::Shared] {
        let memory = GuestRam::new(ram, backing).unwrap();
        // KVM may need seconds for its own tables of so much, whatever is behind the memory.
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
