use proptest::prelude::*;

use super::puppet::puppet;
use crate::{
    interrupt::NotifyAddress,
    virtio::testing::{Area, Buffer, Driver, Rig},
};

const STATUS: u64 = 0x14;

fn set_status(rig: &Rig, status: u8) -> u8 {
    rig.write(Area::Common, STATUS, 1, status.into());
    rig.status()
}

fn acknowledge(rig: &Rig, features: u64) {
    rig.reset_device();
    set_status(rig, 1);
    set_status(rig, 3);
    for half in 0..2 {
        rig.write(Area::Common, 8, 4, half);
        rig.write(Area::Common, 0xc, 4, features >> (32 * half) & 0xffff_ffff);
    }
}

#[test]
fn it_identifies_itself_as_a_modern_virtio_device() {
    let (driver, _, _) = puppet();
    let config = |offset, width| driver.rig.read(Area::Config, offset, width);
    assert_eq!((config(0, 2), config(2, 2), config(8, 1)), (0x1af4, 0x1043, 1));
    assert_eq!(config(8, 4) >> 8, 0x07_80_00);
    assert!(config(0x2e, 2) >= 0x40);
    assert_eq!(config(0x3d, 1), 0, "no INTx");
    assert_eq!(driver.offered(), 1 << 3 | 1 << 28 | 1 << 29 | 1 << 32);
    assert_eq!(driver.rig.read(Area::Common, 0x12, 2), 2);
}

#[test]
fn features_that_were_not_offered_or_miss_version_1_are_refused() {
    let (driver, _, _) = puppet();
    for (features, accepted) in [
        (1 << 32, true),
        (1 << 32 | 1 << 3 | 1 << 28, true),
        (0, false),
        (1 << 3, false),
        (1 << 32 | 1, false),
        (1 << 32 | 1 << 33, false),
        (u64::MAX, false),
    ] {
        acknowledge(&driver.rig, features);
        assert_eq!(
            set_status(&driver.rig, 0xb),
            if accepted { 0xb } else { 3 },
            "{features:#x}"
        );
    }
    acknowledge(&driver.rig, 1 << 32);
    driver.rig.write(Area::Common, 8, 4, 2);
    driver.rig.write(Area::Common, 0xc, 4, 1);
    assert_eq!(
        set_status(&driver.rig, 0xb),
        3,
        "a feature beyond those that there are"
    );
    for select in [2, 3, u32::MAX] {
        driver.rig.write(Area::Common, 0, 4, select.into());
        assert_eq!(driver.rig.read(Area::Common, 4, 4), 0);
    }
}

#[test]
fn features_are_fixed_once_they_are_agreed_on() {
    let (driver, _, _) = puppet();
    acknowledge(&driver.rig, 1 << 32);
    assert_eq!(set_status(&driver.rig, 0xb), 0xb);
    driver.rig.write(Area::Common, 8, 4, 0);
    driver.rig.write(Area::Common, 0xc, 4, 8);
    assert_eq!(driver.rig.read(Area::Common, 0xc, 4), 0);
}

#[test]
fn the_status_takes_no_step_back_and_none_too_early() {
    let (driver, [first, _], _) = puppet();
    let rig = &driver.rig;
    assert_eq!(set_status(rig, 7), 3, "DRIVER_OK without FEATURES_OK");
    assert_eq!(set_status(rig, 1), 3, "a bit is cleared");
    assert_eq!(set_status(rig, 0x43), 3, "NEEDS_RESET is the device's");
    assert_eq!(set_status(rig, 0x33), 3, "bits that there are not");
    assert_eq!(set_status(rig, 0x83), 0x83);
    assert_eq!(set_status(rig, 0x87), 0x83);
    rig.reset_device();
    assert_eq!(first.starts.load(std::sync::atomic::Ordering::SeqCst), 0);
}

#[test]
fn a_queue_takes_only_sizes_that_are_powers_of_two_up_to_its_largest() {
    let (driver, _, _) = puppet();
    let rig = &driver.rig;
    rig.write(Area::Common, 0x16, 2, 1);
    for (size, taken) in [
        (128, 128),
        (256, 256),
        (512, 256),
        (0, 256),
        (100, 256),
        (0xffff, 256),
        (1, 1),
    ] {
        rig.write(Area::Common, 0x18, 2, size);
        assert_eq!(rig.read(Area::Common, 0x18, 2), taken, "{size}");
    }
}

#[test]
fn an_enabled_queue_and_a_running_device_do_not_change() {
    let (mut driver, _, _) = puppet();
    driver.negotiate(0);
    driver.set_up_queues();
    let check = |driver: &Driver| {
        let rig = &driver.rig;
        rig.write(Area::Common, 0x16, 2, 0);
        for (register, width) in [(0x18, 2), (0x1c, 2), (0x20, 4), (0x24, 4), (0x28, 8), (0x30, 4)] {
            let before = rig.read(Area::Common, register, width);
            for value in [0, 1, 2, u64::MAX] {
                rig.write(Area::Common, register, width, value);
                assert_eq!(rig.read(Area::Common, register, width), before, "{register:#x}");
            }
        }
    };
    check(&driver);
    driver.driver_ok();
    check(&driver);
    driver.request(0, &[Buffer::Writable(8)]);
}

#[test]
fn queue_addresses_can_be_written_in_halves_or_whole() {
    let (driver, _, _) = puppet();
    let rig = &driver.rig;
    for register in [0x20, 0x28, 0x30] {
        rig.write(Area::Common, register, 8, 0x1122_3344_5566_7788);
        assert_eq!(rig.read(Area::Common, register + 4, 4), 0x1122_3344);
        rig.write(Area::Common, register, 4, 0x99aa_bbcc);
        assert_eq!(rig.read(Area::Common, register, 8), 0x1122_3344_99aa_bbcc);
        rig.write(Area::Common, register + 4, 8, 0);
        rig.write(Area::Common, register + 2, 2, 0);
        rig.write(Area::Common, register, 1, 0);
        assert_eq!(rig.read(Area::Common, register, 8), 0x1122_3344_99aa_bbcc);
    }
}

#[test]
fn vectors_that_do_not_exist_read_back_as_none() {
    let (driver, _, _) = puppet();
    for register in [0x10, 0x1a] {
        for (vector, taken) in [(2, 2), (3, 0xffff), (0, 0), (0xffff, 0xffff)] {
            driver.rig.write(Area::Common, register, 2, vector);
            assert_eq!(driver.rig.read(Area::Common, register, 2), taken);
        }
    }
}

#[test]
fn the_isr_status_tells_what_msix_can_not_and_is_cleared_by_reading() {
    let (mut driver, _, _) = puppet();
    driver.negotiate(0);
    driver.set_up_queues();
    driver.rig.write(Area::Common, 0x16, 2, 0);
    driver.rig.write(Area::Common, 0x1a, 2, 0xffff);
    driver.driver_ok();
    driver.submit(0, &[Buffer::Writable(8)]);
    let mut isr = 0;
    while isr & 1 == 0 {
        isr = driver.rig.read(Area::Isr, 0, 1);
    }
    assert!(driver.try_used(0).is_some());
    driver.rig.device.signals().config_changed();
    assert_eq!(driver.rig.read(Area::Isr, 0, 1), 2);
    assert_eq!(driver.rig.read(Area::Isr, 0, 1), 0);
}

#[test]
fn notifications_are_listened_for_where_the_bar_is_and_nowhere_else() {
    let (driver, _, _) = puppet();
    let rig = &driver.rig;
    let at = |bar: u64| {
        let mut addresses = [
            NotifyAddress::Mmio(bar + 0x3000),
            NotifyAddress::Mmio(bar + 0x3004),
        ];
        addresses.sort_by_key(|address| format!("{address:?}"));
        addresses
    };
    let listened = || {
        let mut addresses = rig.notify.addresses();
        addresses.sort_by_key(|address| format!("{address:?}"));
        addresses
    };
    assert_eq!(listened(), at(rig.bar()));
    rig.write(Area::Config, 4, 2, 0);
    assert_eq!(listened(), []);
    rig.write(Area::Config, 0x10, 4, 0xc800_0000);
    rig.write(Area::Config, 0x14, 4, 0);
    rig.write(Area::Config, 4, 2, 2);
    assert_eq!(listened(), at(0xc800_0000));
}

#[test]
fn the_bar_can_be_reached_through_configuration_space() {
    let (driver, _, _) = puppet();
    let rig = &driver.rig;
    let mut capability = rig.read(Area::Config, 0x34, 1);
    while rig.read(Area::Config, capability, 1) != 9 || rig.read(Area::Config, capability + 3, 1) != 5 {
        capability = rig.read(Area::Config, capability + 1, 1);
        assert_ne!(capability, 0, "no PCI configuration access capability");
    }
    let aim = |bar: u64, offset: u64, length: u64| {
        rig.write(Area::Config, capability + 4, 1, bar);
        rig.write(Area::Config, capability + 8, 4, offset);
        rig.write(Area::Config, capability + 12, 4, length);
    };
    // The capability's purpose is access without memory decoding.
    rig.write(Area::Config, 4, 2, 0);
    aim(0, 0x16, 2);
    rig.write(Area::Config, capability + 16, 2, 1);
    assert_eq!(rig.read(Area::Config, capability + 16, 2), 1);
    aim(0, 0x18, 2);
    assert_eq!(rig.read(Area::Config, capability + 16, 2), 256);
    for (bar, offset, length) in [
        (1, 0x18, 2),
        (0, 0x18, 3),
        (0, 0x17, 2),
        (0, 0x8000, 4),
        (0, 0x7fff, 2),
        (0, u64::MAX >> 32, 1),
        (0, 0x18, 0),
    ] {
        aim(bar, offset, length);
        assert_eq!(
            rig.read(Area::Config, capability + 16, 4),
            0xffff_ffff,
            "{bar} {offset:#x} {length}"
        );
    }
}

#[test]
fn the_devices_configuration_ends_where_it_says() {
    let (driver, _, _) = puppet();
    let rig = &driver.rig;
    assert_eq!(rig.read(Area::Device, 0, 4), 0x0403_0201);
    assert_eq!(rig.read(Area::Device, 4, 2), 0x0605);
    assert_eq!(rig.read(Area::Device, 4, 4), 0xffff_ffff);
    rig.write(Area::Device, 4, 4, 0);
    rig.write(Area::Device, 1, 1, 9);
    assert_eq!(rig.read(Area::Device, 0, 2), 0x0901);
    assert_eq!(rig.read(Area::Device, 4, 2), 0x0605);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    /// The common configuration as a state machine: the device's registers are consistent at every
    /// step.
    #[test]
    fn the_status_never_claims_what_was_not_agreed(
        writes in prop::collection::vec(
            prop_oneof![
                3 => (0_u8..=255).prop_map(|status| (STATUS, 1, u64::from(status))),
                2 => (0_u64..0x38, 1_usize..=8, any::<u64>()),
                1 => Just((0xc, 4, 1)),
                1 => Just((8, 4, 1)),
            ],
            1..100,
        ),
    ) {
        let (driver, strings, _) = puppet();
        let rig = &driver.rig;
        for (register, width, value) in writes {
            rig.write(Area::Common, register, width, value);
            let status = rig.status();
            prop_assert_eq!(status & 0x30, 0);
            prop_assert!(status & 4 == 0 || status & 8 != 0, "DRIVER_OK without FEATURES_OK: {:#x}", status);
            let mut accepted = 0;
            if status & 8 != 0 {
                for half in 0..2 {
                    rig.write(Area::Common, 8, 4, half);
                    accepted |= rig.read(Area::Common, 0xc, 4) << (32 * half);
                }
                prop_assert_eq!(accepted & !driver.offered(), 0);
                prop_assert!(accepted >> 32 & 1 == 1);
            }
        }
        rig.reset_device();
        drop(strings);
    }
}
