//! Tests that every virtio device with saved state must pass.
//! [`virtio_saved_device_tests!`](crate::virtio_saved_device_tests) generates them.

use proptest::{prelude::*, sample::Index};
use prost::Message;

use super::{Area, Driver, Rig, suite::DeviceUnderTest};
use crate::{
    component::Component,
    state::{Section, message},
};

const EVENT_IDX: u64 = 1 << 29;
const INDIRECT: u64 = 1 << 28;

/// Makes the tests for a type that is a [`DeviceUnderTest`] and can be saved. A saved state of it is in the file of that name in
/// the folder `golden` of this package.
#[macro_export]
macro_rules! virtio_saved_device_tests {
    ($device:ty, $golden:literal) => {
        #[test]
        fn a_state_of_the_first_version_is_still_taken() {
            $crate::virtio::testing::saved::a_state_of_the_first_version_is_still_taken::<$device>($golden);
        }

        $crate::virtio_saved_device_tests!(@ $device:
            a_restored_device_goes_on_with_all_its_requests,
            a_device_is_restored_in_each_stage_of_its_setup,
            a_device_that_is_not_paused_is_not_saved,
            a_device_that_is_in_use_is_not_restored,
            a_damaged_state_does_no_harm_that_a_reset_does_not_end,
        );
    };
    (@ $device:ty: $($name:ident,)*) => {
        $(
            #[test]
            fn $name() {
                $crate::virtio::testing::saved::$name::<$device>();
            }
        )*
    };
}

/// Replaces the driver's device with a restored one, and drops the old device.
fn replace<T: DeviceUnderTest>(driver: &mut Driver) -> (T, Section) {
    let section = driver.rig.device.save().unwrap();
    let (device, front) = T::build();
    driver.rig = driver.rig.restored(front, &section).unwrap();
    assert_eq!(driver.rig.device.save().unwrap(), section);
    (device, section)
}

/// The stored state restores, and is saved again as the same bytes; the device works after a reset.
pub fn a_state_of_the_first_version_is_still_taken<T: DeviceUnderTest>(name: &str) {
    let path = format!("{}/golden/{name}.bin", env!("CARGO_MANIFEST_DIR"));
    let (mut device, front) = T::build();
    let mut driver = Driver::new(Rig::new(front));
    if std::env::var_os("VMMD_WRITE_GOLDEN").is_some() {
        driver.start(T::FEATURES | EVENT_IDX | INDIRECT);
        device.probe(&mut driver);
        driver.rig.pause();
        std::fs::write(&path, driver.rig.device.save().unwrap().encode_to_vec()).unwrap();
    }
    let golden = std::fs::read(&path).unwrap_or_else(|error| panic!("{path}: {error}"));
    let section = Section::decode(golden.as_slice()).unwrap();
    let state: message::VirtioPci = section.open().unwrap();
    assert!(state.transport.is_some_and(|transport| transport.running));
    let (mut device, front) = T::build();
    let mut driver = Driver::new(driver.rig.restored(front, &section).unwrap());
    assert!(
        driver.rig.device.save().unwrap().encode_to_vec() == golden,
        "{name} is saved otherwise"
    );
    driver.rig.device.resume().unwrap();
    driver.rig.reset_machine();
    driver.start(T::FEATURES);
    device.probe(&mut driver);
}

pub fn a_restored_device_goes_on_with_all_its_requests<T: DeviceUnderTest>() {
    for features in [0, T::FEATURES | EVENT_IDX | INDIRECT] {
        let (mut device, front) = T::build();
        let mut driver = Driver::new(Rig::new(front));
        driver.start(features);
        driver.indirect = driver.features & INDIRECT != 0;
        for _generation in 0..4 {
            device.probe(&mut driver);
            driver.rig.pause();
            let (queue, buffers) = device.request();
            for _ in 0..5 {
                // The notifications are lost with the old device.
                driver.submit(queue, &buffers);
            }
            (device, _) = replace(&mut driver);
            assert_eq!(driver.under_way(queue), 5);
            assert!(driver.try_used(queue).is_none(), "it works while it is paused");
            driver.rig.device.resume().unwrap();
            for _ in 0..5 {
                driver.wait_used(queue);
            }
            device.probe(&mut driver);
        }
        assert_eq!(driver.rig.sink.events(), []);
    }
}

pub fn a_device_is_restored_in_each_stage_of_its_setup<T: DeviceUnderTest>() {
    let stages: [fn(&mut Driver); 8] = [
        |_| {},
        |driver| driver.rig.write(Area::Config, 4, 2, 0),
        |driver| driver.rig.write(Area::Common, 0x14, 1, 1),
        |driver| driver.negotiate(u64::MAX),
        |driver| {
            driver.negotiate(u64::MAX);
            driver.set_up_queues();
        },
        |driver| driver.rig.write(Area::Common, 0x14, 1, 0x80),
        |driver| {
            driver.start(0);
            driver.rings[0].set_avail_index(&driver.rig.memory, 0x7777);
            driver.kick(0);
            driver.wait_needs_reset();
        },
        |driver| {
            driver.start(0);
            driver.rig.reset_device();
        },
    ];
    for stage in stages {
        let (_device, front) = T::build();
        let mut driver = Driver::new(Rig::new(front));
        stage(&mut driver);
        let registers = |driver: &Driver| -> Vec<u64> {
            let read = |area, width: usize| move |offset| driver.rig.read(area, offset, width);
            let words = (0..0x10).step_by(4).chain((0x20..0x38).step_by(4));
            let halves = [0x10, 0x12, 0x16, 0x18, 0x1a, 0x1c, 0x1e].into_iter();
            // A broken device detects its fault again, which increments its generation (0x15).
            let bytes = [0x14]
                .into_iter()
                .chain((driver.rig.status() & 0x40 == 0).then_some(0x15));
            words
                .map(read(Area::Common, 4))
                .chain(halves.map(read(Area::Common, 2)))
                .chain(bytes.map(read(Area::Common, 1)))
                .chain((0..256).map(read(Area::Config, 1)))
                .collect()
        };
        let before = registers(&driver);
        driver.rig.pause();
        let (mut device, _) = replace::<T>(&mut driver);
        driver.rig.device.resume().unwrap();
        assert_eq!(registers(&driver), before);
        driver.rig.reset_machine();
        driver.relocate_back();
        driver.start(T::FEATURES);
        device.probe(&mut driver);
    }
}

pub fn a_device_that_is_not_paused_is_not_saved<T: DeviceUnderTest>() {
    let (mut device, front) = T::build();
    let mut driver = Driver::new(Rig::new(front));
    driver.start(T::FEATURES);
    assert!(driver.rig.device.save().is_err());
    device.probe(&mut driver);
}

pub fn a_device_that_is_in_use_is_not_restored<T: DeviceUnderTest>() {
    let (mut device, front) = T::build();
    let mut driver = Driver::new(Rig::new(front));
    driver.start(T::FEATURES);
    driver.rig.pause();
    let section = driver.rig.device.save().unwrap();
    assert!(driver.rig.device.restore(&section).is_err());
    driver.rig.device.resume().unwrap();
    device.probe(&mut driver);
}

/// A saved state with bytes changed, in the encoded message or behind a copy that is well-formed.
pub fn a_damaged_state_does_no_harm_that_a_reset_does_not_end<T: DeviceUnderTest>() {
    let (mut device, front) = T::build();
    let mut driver = Driver::new(Rig::new(front));
    driver.start(T::FEATURES);
    device.probe(&mut driver);
    driver.rig.pause();
    let section = driver.rig.device.save().unwrap();
    let change = (any::<Index>(), any::<u8>());
    let config = ProptestConfig {
        cases: 96,
        failure_persistence: None,
        ..ProptestConfig::default()
    };
    proptest!(config, |(changes in prop::collection::vec(change, 1..3))| {
        let mut damaged = section.clone();
        for (at, value) in &changes {
            let length = damaged.payload.len();
            damaged.payload[at.index(length)] = *value;
        }
        let (mut device, front) = T::build();
        // It is refused, or such that the device gets on with it as with a strange driver.
        if let Ok(rig) = driver.rig.restored(front, &damaged) {
            let mut driver = Driver::new(rig);
            driver.rig.device.resume().unwrap();
            driver.rig.reset_machine();
            driver.start(T::FEATURES);
            device.probe(&mut driver);
        }
    });
    // Once more with a good one: not all was refused for another reason.
    let whole: message::VirtioPci = section.open().unwrap();
    assert!(whole.transport.unwrap().running);
    let (mut device, _) = replace::<T>(&mut driver);
    driver.rig.device.resume().unwrap();
    device.probe(&mut driver);
}
