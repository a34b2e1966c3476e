//! Tests that every virtio device must pass. [`virtio_device_tests!`](crate::virtio_device_tests)
//! generates them.

use proptest::prelude::*;
use vm_memory::{Bytes, GuestAddress};

use super::{Area, Buffer, Driver, MEMORY_END, Rig};
use crate::{
    component::Component,
    virtio::{device::VirtioDevice, fault::DeviceEvent},
};

/// A device as the suite needs it.
pub trait DeviceUnderTest {
    /// Feature bits that the driver takes if they are offered (VERSION_1 always is).
    const FEATURES: u64;
    /// Queues whose buffers the device takes as soon as they are there.
    const EAGER_QUEUES: &'static [u16];
    /// A new one with a backend of its own, which lives as long as the value.
    fn build() -> (Self, Box<dyn VirtioDevice>)
    where
        Self: Sized;
    /// Uses a running device, and checks its function.
    fn probe(&mut self, driver: &mut Driver);
    /// A request that the device answers soon: which queue, and what.
    fn request(&self) -> (u16, Vec<Buffer>);
}

/// Makes the tests of the suite for a type that is a [`DeviceUnderTest`].
#[macro_export]
macro_rules! virtio_device_tests {
    ($device:ty) => {
        $crate::virtio_device_tests!(@ $device:
            works_with_all_features_and_with_none,
            works_again_after_a_reset_in_any_state,
            a_reset_with_requests_under_way_ends_all_writes,
            pause_and_resume_lose_no_request,
            a_corrupt_ring_makes_the_device_ask_for_a_reset_and_a_reset_helps,
            a_ring_outside_memory_makes_the_device_ask_for_a_reset,
            strange_but_legal_buffers_do_no_harm,
            configuration_of_any_width_and_offset_can_be_accessed,
            notifications_work_through_the_bus_too,
            a_machine_reset_brings_the_initial_state_back,
            no_walk_over_the_registers_harms_the_device,
        );
    };
    (@ $device:ty: $($name:ident,)*) => {
        $(
            #[test]
            fn $name() {
                $crate::virtio::testing::suite::$name::<$device>();
            }
        )*
    };
}

const EVENT_IDX: u64 = 1 << 29;
const INDIRECT: u64 = 1 << 28;

fn driver<T: DeviceUnderTest>() -> (T, Driver) {
    let (device, front) = T::build();
    (device, Driver::new(Rig::new(front)))
}

fn works<T: DeviceUnderTest>(device: &mut T, driver: &mut Driver) {
    driver.indirect = false;
    driver.start(T::FEATURES | EVENT_IDX | INDIRECT);
    device.probe(driver);
}

pub fn works_with_all_features_and_with_none<T: DeviceUnderTest>() {
    let (mut device, mut driver) = driver::<T>();
    for features in [0, EVENT_IDX, T::FEATURES, T::FEATURES | EVENT_IDX | INDIRECT] {
        driver.start(features);
        driver.indirect = driver.features & INDIRECT != 0;
        for _ in 0..3 {
            device.probe(&mut driver);
        }
    }
    assert!(
        driver.rig.sink.events().is_empty(),
        "{:?}",
        driver.rig.sink.events()
    );
}

pub fn works_again_after_a_reset_in_any_state<T: DeviceUnderTest>() {
    let (mut device, mut driver) = driver::<T>();
    let stages: [fn(&mut Driver); 7] = [
        |_| {},
        |driver| driver.rig.write(Area::Common, 0x14, 1, 1),
        |driver| driver.negotiate(u64::MAX),
        |driver| {
            driver.negotiate(u64::MAX);
            driver.set_up_queues();
        },
        |driver| driver.start(u64::MAX),
        |driver| driver.rig.write(Area::Common, 0x14, 1, 0x80),
        |driver| {
            driver.start(0);
            driver.rings[0].set_avail_index(&driver.rig.memory, 0x7777);
            driver.kick(0);
        },
    ];
    for stage in stages {
        stage(&mut driver);
        driver.rig.reset_device();
        for (register, width, value) in [
            (0x16, 2, 0),
            (0x1c, 2, 0),
            (0x20, 4, 0),
            (0x10, 2, 0xffff),
            (0x0c, 4, 0),
        ] {
            assert_eq!(
                driver.rig.read(Area::Common, register, width),
                value,
                "{register:#x}"
            );
        }
        works(&mut device, &mut driver);
    }
}

fn fill<T: DeviceUnderTest>(device: &T, driver: &mut Driver, most: usize) -> u16 {
    let (queue, buffers) = device.request();
    let size = usize::from(driver.rings[usize::from(queue)].size);
    for _ in 0..most.min(size / buffers.len()) {
        driver.offer(queue, &buffers);
    }
    driver.kick(queue);
    queue
}

pub fn a_reset_with_requests_under_way_ends_all_writes<T: DeviceUnderTest>() {
    const BUFFERS: std::ops::Range<u64> = 18 << 20..24 << 20;
    let (mut device, mut driver) = driver::<T>();
    for _ in 0..20 {
        driver.relocate_back();
        driver.start(T::FEATURES);
        let queue = fill(&device, &mut driver, usize::MAX);
        driver.rig.reset_device();
        let ring = &driver.rings[usize::from(queue)];
        let (used, length) = (GuestAddress(ring.used), usize::from(ring.size) * 8 + 6);
        let pattern = vec![0xa5; (BUFFERS.end - BUFFERS.start) as usize];
        driver
            .rig
            .memory
            .write_slice(&pattern, GuestAddress(BUFFERS.start))
            .unwrap();
        let mut before = vec![0; length];
        driver.rig.memory.read_slice(&mut before, used).unwrap();
        // The workers get other work, so that any late writes for the old requests become visible.
        driver.relocate();
        works(&mut device, &mut driver);
        let (mut after, mut buffers) = (vec![0; length], vec![0; pattern.len()]);
        driver.rig.memory.read_slice(&mut after, used).unwrap();
        driver
            .rig
            .memory
            .read_slice(&mut buffers, GuestAddress(BUFFERS.start))
            .unwrap();
        assert!(before == after, "the used ring was written after the reset");
        assert!(buffers == pattern, "a buffer was written after the reset");
    }
}

pub fn pause_and_resume_lose_no_request<T: DeviceUnderTest>() {
    let (mut device, mut driver) = driver::<T>();
    for features in [0, EVENT_IDX] {
        driver.start(T::FEATURES | features);
        for round in 0..30 {
            let queue = fill(&device, &mut driver, usize::MAX);
            driver.rig.pause();
            let mut answered = 0;
            while driver.try_used(queue).is_some() {
                answered += 1;
            }
            // A paused device answers no request, and kicks are not lost.
            if round % 2 == 0 {
                driver.kick(queue);
            }
            assert!(
                driver.try_used(queue).is_none(),
                "answered while paused, after {answered}"
            );
            driver.rig.device.resume().unwrap();
            while driver.under_way(queue) > 0 {
                driver.wait_used(queue);
            }
        }
        device.probe(&mut driver);
    }
    // A pause of a stopped device is valid, too.
    driver.rig.reset_device();
    driver.rig.pause();
    driver.rig.device.resume().unwrap();
    works(&mut device, &mut driver);
}

pub fn a_corrupt_ring_makes_the_device_ask_for_a_reset_and_a_reset_helps<T: DeviceUnderTest>() {
    const WRITE: u16 = 2;
    const TABLE: u16 = 4;
    let (mut device, mut driver) = driver::<T>();
    // One of each kind; `tests/queue.rs` has the others.
    let corruptions: [(&str, fn(&mut Driver, usize)); 4] = [
        ("an available index far ahead", |driver, queue| {
            let ring = &driver.rings[queue];
            ring.set_avail_index(&driver.rig.memory, ring.size + 1);
        }),
        ("a head that is no descriptor", |driver, queue| {
            let size = driver.rings[queue].size;
            driver.rings[queue].offer(&driver.rig.memory, size);
        }),
        ("a buffer outside memory", |driver, queue| {
            driver.rings[queue].describe(&driver.rig.memory, 0, 0xfff0_0000_0000, 16, WRITE, 0);
            driver.rings[queue].offer(&driver.rig.memory, 0);
        }),
        ("an indirect table in an indirect table", |driver, queue| {
            let ring = &mut driver.rings[queue];
            ring.describe(&driver.rig.memory, 0, ring.desc + 16, 16, TABLE, 0);
            ring.describe(&driver.rig.memory, 1, ring.desc + 32, 16, TABLE, 0);
            ring.offer(&driver.rig.memory, 0);
        }),
    ];
    for (what, corrupt) in corruptions {
        driver.start(T::FEATURES);
        let queues = driver.rings.len();
        for queue in 0..queues {
            driver.start(T::FEATURES);
            corrupt(&mut driver, queue);
            driver.kick(queue as u16);
            if T::EAGER_QUEUES.contains(&(queue as u16)) {
                driver.wait_needs_reset();
            }
            works(&mut device, &mut driver);
        }
        assert!(
            driver
                .rig
                .sink
                .events()
                .iter()
                .all(|event| matches!(event, DeviceEvent::NeedsReset(_))),
            "{what}: {:?}",
            driver.rig.sink.events()
        );
    }
}

pub fn a_ring_outside_memory_makes_the_device_ask_for_a_reset<T: DeviceUnderTest>() {
    let (mut device, mut driver) = driver::<T>();
    for part in 0..3 {
        for address in [
            0xfff0_0000_0000,
            MEMORY_END - 16,
            (16 << 20) - 4,
            u64::MAX - 15,
            (2 << 20) + 1,
        ] {
            driver.negotiate(T::FEATURES);
            driver.set_up_queues();
            driver.rig.reset_device();
            driver.negotiate(T::FEATURES);
            driver.rig.write(Area::Common, 0x10, 2, 0);
            let ring = &mut driver.rings[0];
            *[&mut ring.desc, &mut ring.avail, &mut ring.used][part] = address;
            driver.place_queue(0);
            driver.driver_ok();
            driver.wait_needs_reset();
        }
    }
    works(&mut device, &mut driver);
}

pub fn strange_but_legal_buffers_do_no_harm<T: DeviceUnderTest>() {
    let (mut device, mut driver) = driver::<T>();
    let oddities = [
        vec![Buffer::Readable(vec![])],
        vec![Buffer::Writable(0)],
        vec![Buffer::Readable(vec![0xff; 1])],
        vec![Buffer::Writable(1)],
        vec![Buffer::Readable(vec![0xff; 4096])],
        vec![Buffer::Writable(8 << 20)],
        vec![Buffer::Readable(vec![]), Buffer::Writable(0), Buffer::Writable(1)],
        vec![Buffer::Readable(vec![0xff; 3]); 20],
        vec![Buffer::Writable(1); 30],
        vec![Buffer::Readable(vec![0; 64 << 10]), Buffer::Writable(64 << 10)],
    ];
    for indirect in [false, true] {
        for queue in 0..1024 {
            driver.start(T::FEATURES | INDIRECT);
            if queue >= driver.rings.len() {
                break;
            }
            driver.indirect = indirect;
            for buffers in &oddities {
                driver.submit(queue as u16, buffers);
            }
            driver.kick(queue as u16);
            if T::EAGER_QUEUES.contains(&(queue as u16)) {
                while driver.under_way(queue as u16) > 0 {
                    driver.wait_used(queue as u16);
                }
                assert_eq!(driver.rig.status(), 0xf);
            }
            works(&mut device, &mut driver);
        }
    }
}

pub fn configuration_of_any_width_and_offset_can_be_accessed<T: DeviceUnderTest>() {
    let (mut device, mut driver) = driver::<T>();
    for area in [Area::Common, Area::Device, Area::Isr, Area::Notify] {
        for offset in 0..0x120 {
            for width in 1..=8 {
                driver.rig.read(area, offset, width);
                driver.rig.write(area, offset, width, 0);
                driver.rig.write(area, offset, width, u64::MAX);
                driver.rig.read(area, offset, width);
            }
        }
    }
    driver.rig.reset_machine();
    let rig = &driver.rig;
    for queue in [rig.read(Area::Common, 0x12, 2), 0x7fff, 0xffff] {
        rig.write(Area::Common, 0x16, 2, queue);
        for (register, value) in [(0x18, 0), (0x1a, 0xffff), (0x1c, 0), (0x1e, 0), (0x20, 0)] {
            rig.write(Area::Common, register, 2, 1);
            assert_eq!(
                rig.read(Area::Common, register, 2 + 2 * usize::from(register == 0x20)),
                value
            );
        }
    }
    works(&mut device, &mut driver);
}

pub fn notifications_work_through_the_bus_too<T: DeviceUnderTest>() {
    let (mut device, mut driver) = driver::<T>();
    driver.rig.ioeventfd = false;
    works(&mut device, &mut driver);
}

pub fn a_machine_reset_brings_the_initial_state_back<T: DeviceUnderTest>() {
    let (mut device, mut driver) = driver::<T>();
    let bar = driver.rig.bar();
    for _ in 0..3 {
        works(&mut device, &mut driver);
        fill(&device, &mut driver, 10);
        driver.rig.reset_machine();
        assert_eq!(driver.rig.bar(), bar);
        assert_eq!(driver.rig.status(), 0);
    }
    works(&mut device, &mut driver);
}

#[derive(Clone, Debug)]
enum Step {
    Read(Area, u64, usize),
    Write(Area, u64, usize, u64),
    Offer(u16, Vec<(u64, u32, u16)>),
    PauseAndResume,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let area = prop_oneof![
        4 => Just(Area::Common), 2 => Just(Area::Device), 1 => Just(Area::Isr), 2 => Just(Area::Notify),
        2 => Just(Area::Config), 1 => Just(Area::Bar),
    ];
    let offset = prop_oneof![6 => 0_u64..0x40, 2 => 0_u64..0x100, 1 => 0_u64..0x8000];
    let width = prop_oneof![Just(1_usize), Just(2), Just(4), Just(8), 1_usize..=8];
    let value = prop_oneof![
        Just(0_u64),
        Just(1),
        Just(u64::MAX),
        0_u64..16,
        (0_u64..64).prop_map(|bit| 1 << bit),
        (0_u64..0x4000).prop_map(|n| n << 12),
        any::<u64>(),
    ];
    let place = (area, offset, width).prop_map(|(area, offset, width)| {
        // The PCI configuration space of one function.
        let limit = if area == Area::Config { 0x100 } else { 0x8000 };
        (area, offset % limit, width)
    });
    let segment = (
        prop_oneof![Just(18_u64 << 20), Just(1 << 20), any::<u64>()],
        0_u32..70_000,
        any::<u16>(),
    );
    let step = prop_oneof![
        4 => place.clone().prop_map(|(area, offset, width)| Step::Read(area, offset, width)),
        12 => (place, value).prop_map(|((area, offset, width), value)| Step::Write(area, offset, width, value)),
        2 => (0_u16..4, prop::collection::vec(segment, 1..5)).prop_map(|(queue, chain)| Step::Offer(queue, chain)),
        1 => Just(Step::PauseAndResume),
    ];
    prop::collection::vec(step, 1..120)
}

fn walk(driver: &mut Driver, steps: &[Step]) {
    for step in steps {
        match step {
            Step::Read(area, offset, width) => {
                driver.rig.read(*area, *offset, *width);
            }
            Step::Write(area, offset, width, value) => driver.rig.write(*area, *offset, *width, *value),
            Step::Offer(queue, chain) => {
                let Some(ring) = driver.rings.get_mut(usize::from(*queue)) else {
                    continue;
                };
                for (at, (address, length, flags)) in chain.iter().enumerate() {
                    ring.describe(
                        &driver.rig.memory,
                        at as u16,
                        *address,
                        *length,
                        *flags & 7,
                        at as u16 + 1,
                    );
                }
                ring.offer(&driver.rig.memory, 0);
                driver.kick(*queue);
            }
            Step::PauseAndResume => {
                driver.rig.pause();
                driver.rig.device.resume().unwrap();
            }
        }
    }
}

pub fn no_walk_over_the_registers_harms_the_device<T: DeviceUnderTest>() {
    let cases = if cfg!(miri) { 1 } else { 64 };
    let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig {
        cases,
        failure_persistence: None,
        ..ProptestConfig::default()
    });
    runner
        .run(&(any::<bool>(), steps()), |(running, steps)| {
            let (mut device, mut driver) = driver::<T>();
            if running {
                driver.start(T::FEATURES | EVENT_IDX);
            }
            walk(&mut driver, &steps);
            driver.rig.reset_machine();
            works(&mut device, &mut driver);
            Ok(())
        })
        .unwrap();
}
