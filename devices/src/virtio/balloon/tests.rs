use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Range,
    sync::atomic::Ordering,
    time::Duration,
};

use proptest::prelude::*;
use vm_memory::Bytes;
use vmm_base::GuestMemory;

use super::{
    harness::{DATA, Harness, MockHost, REGIONS},
    *,
};
use crate::{
    component::Component,
    virtio::testing::{Area, Buffer, Driver, PATIENCE, Rig, suite::DeviceUnderTest},
};

const INFLATE: u16 = 0;
const DEFLATE: u16 = 1;
const STATS: u16 = 2;
const REPORT: u16 = 3;
const ALL: u64 = 1 << config::F_STATS_VQ
    | 1 << config::F_DEFLATE_ON_OOM
    | 1 << config::F_PAGE_POISON
    | 1 << config::F_PAGE_REPORTING;
/// Features that a Linux guest accepts if it does not poison its pages.
const USUAL: u64 = ALL & !(1 << config::F_PAGE_POISON);
const REPORTING: BalloonOptions = BalloonOptions {
    free_page_reporting: true,
    target: 0,
};

/// Takes everything.
struct Anything;

impl Reclaim for Anything {
    fn reclaim(&self, _address: GuestAddress, _length: u64) -> io::Result<()> {
        Ok(())
    }
}

fn numbers(pages: impl IntoIterator<Item = u32>) -> Vec<u8> {
    pages.into_iter().flat_map(u32::to_le_bytes).collect()
}

struct BalloonTest(BalloonControl);

impl DeviceUnderTest for BalloonTest {
    const FEATURES: u64 = ALL;
    const EAGER_QUEUES: &'static [u16] = &[INFLATE, DEFLATE, REPORT, 4];

    fn build() -> (Self, Box<dyn VirtioDevice>) {
        let front = Balloon::new(Box::new(Anything), REPORTING);
        (Self(front.control()), Box::new(front))
    }

    fn probe(&mut self, driver: &mut Driver) {
        let held = self.0.stats().held;
        let list = || vec![Buffer::Readable(numbers(13_000..13_100))];
        driver.request(INFLATE, &list());
        assert_eq!(self.0.stats().held, held + 100 * PAGE);
        driver.request(DEFLATE, &list());
        assert_eq!(self.0.stats().held, held);
    }

    fn request(&self) -> (u16, Vec<Buffer>) {
        (INFLATE, vec![Buffer::Readable(numbers(12_000..12_256))])
    }
}

crate::virtio_device_tests!(BalloonTest);
crate::virtio_saved_device_tests!(BalloonTest, "virtio-balloon");

/// A harness with a driver that puts one request after the other into the rings.
struct Guest {
    harness: Harness,
}

impl Guest {
    fn new(features: u64) -> Self {
        Self {
            harness: Harness::new(features, REPORTING),
        }
    }

    fn memory(&self) -> &GuestMemory {
        &self.harness.memory
    }

    fn offer(&mut self, queue: u16, parts: &[(u64, u32)], flags: u16) {
        let parts: Vec<_> = parts
            .iter()
            .map(|(address, length)| (*address, *length, flags))
            .collect();
        self.harness.describe_chain(queue, 0, &parts);
        self.harness.offer(queue, 0);
    }

    /// Offers a list of page numbers, which is at `DATA` then.
    fn list(&mut self, queue: u16, pages: impl IntoIterator<Item = u32>) {
        let bytes = numbers(pages);
        self.memory().write_slice(&bytes, GuestAddress(DATA)).unwrap();
        self.offer(queue, &[(DATA, bytes.len() as u32)], 0);
    }

    /// Offers the list, lets the device process it, and returns the ranges that the host got, in
    /// pages.
    fn given(&mut self, queue: u16, pages: impl IntoIterator<Item = u32>) -> Vec<Range<u64>> {
        self.list(queue, pages);
        self.harness.kick(queue);
        assert_eq!(self.harness.outstanding(queue), 0);
        std::mem::take(&mut *self.harness.host.given.lock().unwrap())
    }

    fn report(&mut self, parts: &[(u64, u32)]) -> Vec<Range<u64>> {
        self.offer(REPORT, parts, 2);
        self.harness.kick(REPORT);
        assert_eq!(self.harness.outstanding(REPORT), 0);
        std::mem::take(&mut *self.harness.host.given.lock().unwrap())
    }

    /// Gives the buffer with statistics.
    fn say(&mut self, values: &[(u16, u64)]) {
        let bytes: Vec<u8> = values
            .iter()
            .flat_map(|(tag, value)| [&tag.to_le_bytes()[..], &value.to_le_bytes()].concat())
            .collect();
        let place = DATA + 0x8000;
        self.memory().write_slice(&bytes, GuestAddress(place)).unwrap();
        self.offer(STATS, &[(place, bytes.len() as u32)], 0);
        self.harness.kick(STATS);
    }

    fn held(&self) -> u64 {
        self.harness.control.stats().held / PAGE
    }

    fn said(&self) -> Option<BTreeMap<u16, u64>> {
        self.harness.control.stats().guest.map(|guest| guest.values)
    }
}

#[test]
fn neighbouring_pages_are_given_back_in_one_piece() {
    let mut guest = Guest::new(USUAL);
    assert_eq!(guest.given(INFLATE, [600, 602, 601, 700]), [600..603, 700..701]);
    assert_eq!((guest.held(), guest.harness.guest_faults), (4, 0));
    assert_eq!(guest.given(DEFLATE, [601, 700]), []);
    assert_eq!((guest.held(), guest.harness.guest_faults), (2, 0));
}

#[test]
fn a_page_given_twice_counts_once_and_is_given_back_again() {
    let mut guest = Guest::new(USUAL);
    guest.given(INFLATE, [600, 600]);
    assert_eq!(guest.held(), 1);
    // The guest may have used it meanwhile.
    assert_eq!(guest.given(INFLATE, 600..602), [600..602]);
    assert_eq!((guest.held(), guest.harness.guest_faults), (2, 0));
}

#[test]
fn pages_outside_memory_are_counted_as_the_guests_fault_and_the_others_are_taken() {
    let mut guest = Guest::new(USUAL);
    // Over the end of the first region, in the hole, over the end of memory, and at the end of the numbers.
    let pages = (254..258).chain([300]).chain(1022..1026).chain([u32::MAX]);
    assert_eq!(guest.given(INFLATE, pages), [254..256, 1022..1024]);
    assert_eq!((guest.held(), guest.harness.guest_faults), (4, 1));
}

#[test]
fn taking_back_what_was_never_given_changes_nothing() {
    let mut guest = Guest::new(USUAL);
    guest.given(DEFLATE, 600..700);
    assert_eq!((guest.held(), guest.harness.guest_faults), (0, 1));
    guest.given(INFLATE, 600..604);
    guest.given(DEFLATE, (602..900).chain([300, u32::MAX]));
    assert_eq!((guest.held(), guest.harness.guest_faults), (2, 2));
}

#[test]
fn a_list_of_odd_length_or_of_nothing_is_refused_whole() {
    let mut guest = Guest::new(USUAL);
    for (length, flags) in [(1, 0), (7, 0), (0, 0), (4, 2)] {
        guest.offer(INFLATE, &[(DATA, length)], flags);
        guest.harness.kick(INFLATE);
    }
    assert_eq!((guest.held(), guest.harness.guest_faults), (0, 4));
    assert_eq!(guest.harness.outstanding(INFLATE), 0);
}

#[test]
fn a_number_may_lie_in_two_buffers() {
    let mut guest = Guest::new(USUAL);
    let bytes = numbers([600, 601]);
    guest.memory().write_slice(&bytes, GuestAddress(DATA)).unwrap();
    guest.offer(INFLATE, &[(DATA, 3), (DATA + 3, 5)], 0);
    guest.harness.kick(INFLATE);
    assert_eq!((guest.held(), guest.harness.guest_faults), (2, 0));
}

#[test]
fn a_giant_list_is_worked_off_a_piece_at_a_time_and_a_pause_in_between_loses_nothing() {
    let mut guest = Guest::new(USUAL);
    // 512 KiB of numbers: 131,072, of which the last is a page that is not mentioned before.
    let (place, length) = (REGIONS[1].start, 512 << 10);
    let zeroes = vec![0; length];
    guest.memory().write_slice(&zeroes, GuestAddress(place)).unwrap();
    let last = GuestAddress(place + length as u64 - 4);
    guest.memory().write_obj(1000_u32, last).unwrap();
    guest.offer(INFLATE, &[(place, length as u32)], 0);
    guest.harness.kicks_done = 0;
    guest.harness.kick_once(INFLATE);
    assert_eq!((guest.held(), guest.harness.outstanding(INFLATE)), (1, 1));
    guest.harness.pause_and_resume();
    assert_eq!((guest.held(), guest.harness.outstanding(INFLATE)), (2, 0));
    assert!(guest.harness.kicks_done > 32, "{}", guest.harness.kicks_done);
}

#[test]
fn many_small_requests_leave_their_turn_to_others() {
    let mut guest = Guest::new(USUAL);
    let parts: Vec<_> = (0..8).map(|_| (DATA, 4 * 1024)).collect();
    let zeroes = vec![0; 4 * 1024];
    guest.memory().write_slice(&zeroes, GuestAddress(DATA)).unwrap();
    for _ in 0..8 {
        guest.offer(INFLATE, &parts, 0);
    }
    guest.harness.kick_once(INFLATE);
    assert_eq!(guest.harness.outstanding(INFLATE), 1);
    guest.harness.run();
    assert_eq!(guest.harness.outstanding(INFLATE), 0);
}

#[test]
fn reported_pages_are_given_back_without_getting_into_the_balloon() {
    let mut guest = Guest::new(USUAL);
    let region = REGIONS[1].start;
    let parts = [
        (region, 8192),
        (region + 0x1_0001, 8192),
        (region + 0x2_0000, 100),
    ];
    assert_eq!(guest.report(&parts), [512..514, 529..530]);
    let stats = guest.harness.control.stats();
    assert_eq!((stats.held, stats.reported), (0, 3 * PAGE));
    assert_eq!(guest.harness.guest_faults, 0);
}

#[test]
fn a_report_that_leaves_memory_makes_the_device_ask_for_a_reset() {
    let mut guest = Guest::new(USUAL);
    let end = REGIONS[0].end;
    for part in [(end - 4096, 8192), (end, 4096), (REGIONS[1].end - 1, 2)] {
        let resets = guest.harness.resets;
        guest.offer(REPORT, &[part], 2);
        guest.harness.kick(REPORT);
        assert_eq!(guest.harness.resets, resets + 1, "{part:x?}");
    }
    assert_eq!(*guest.harness.host.given.lock().unwrap(), []);
}

#[test]
fn what_free_pages_are_filled_with_stays_in_reported_pages() {
    for (features, poison, given) in [(ALL, 0_u32, true), (ALL, 0xaa, false), (USUAL, 0xaa, true)] {
        let mut guest = Guest::new(features);
        guest
            .harness
            .front
            .write_config(config::POISON, &poison.to_le_bytes());
        let ranges = guest.report(&[(REGIONS[1].start, 4096)]);
        assert_eq!(!ranges.is_empty(), given, "{features:#x} {poison:#x}");
        let reported = guest.harness.control.stats().reported;
        assert_eq!(reported, if given { PAGE } else { 0 });
        assert_eq!(guest.harness.guest_faults, 0);
    }
}

#[test]
fn the_host_refusing_to_take_pages_is_reported_and_the_guest_goes_on() {
    let mut guest = Guest::new(USUAL);
    guest.harness.host.failures.store(1, Ordering::SeqCst);
    guest.given(INFLATE, [600]);
    assert_eq!((guest.harness.backend_faults, guest.held()), (1, 1));
    assert_eq!(
        guest.given(INFLATE, [601]),
        std::iter::once(601..602).collect::<Vec<_>>()
    );
    assert_eq!(guest.harness.backend_faults, 1);
}

#[test]
fn statistics_come_when_they_are_asked_for() {
    let mut guest = Guest::new(USUAL);
    assert_eq!(guest.said(), None);
    guest.say(&[(4, 100), (5, 200), (0xffff, 1)]);
    assert_eq!(
        guest.said(),
        Some(BTreeMap::from([(4, 100), (5, 200), (0xffff, 1)]))
    );
    assert_eq!(guest.harness.outstanding(STATS), 1, "the device keeps the buffer");
    // A second buffer is against the rules: it stays where it is.
    guest.say(&[(4, 7)]);
    assert_eq!(guest.said().unwrap()[&4], 100);
    guest.harness.asked();
    assert_eq!(guest.said().unwrap()[&4], 7);
    guest.harness.asked();
    assert_eq!(guest.harness.outstanding(STATS), 0);
    guest.say(&[(4, 50)]);
    assert_eq!(guest.said(), Some(BTreeMap::from([(4, 50)])));
    // After a pause, the device does not count the driver's last statistics as new.
    let before = guest.harness.control.stats().guest;
    guest.harness.pause_and_resume();
    assert_eq!(guest.harness.control.stats().guest, before);
    guest.harness.asked();
    assert_eq!(guest.harness.outstanding(STATS), 0);
}

#[test]
fn statistics_of_strange_lengths_are_read_as_far_as_they_go() {
    let mut guest = Guest::new(USUAL);
    guest.say(&[(4, 100), (5, 200)]);
    guest.harness.asked();
    guest.offer(STATS, &[(DATA + 0x8000, 19)], 0);
    guest.harness.kick(STATS);
    assert_eq!(guest.said(), Some(BTreeMap::from([(4, 100)])));
    guest.harness.asked();
    guest.offer(STATS, &[(REGIONS[1].start, 1 << 20)], 0);
    guest.harness.kick(STATS);
    assert_eq!(guest.said(), Some(BTreeMap::from([(0, 0)])));
    assert_eq!(guest.harness.guest_faults, 0);
}

#[test]
fn a_reset_gives_all_pages_back_to_the_guest_and_keeps_the_target() {
    let mut guest = Guest::new(USUAL);
    guest.harness.control.set_target(1 << 20);
    guest.given(INFLATE, 600..700);
    guest
        .harness
        .front
        .write_config(config::ACTUAL, &100_u32.to_le_bytes());
    let stats = guest.harness.control.stats();
    assert_eq!((stats.held, stats.claimed), (100 * PAGE, 100 * PAGE));
    guest.harness.reset();
    let stats = guest.harness.control.stats();
    assert_eq!((stats.held, stats.claimed, stats.target), (0, 0, 1 << 20));
}

#[test]
fn the_drivers_own_count_is_only_shown() {
    let mut guest = Guest::new(USUAL);
    let front = &mut guest.harness.front;
    front.write_config(config::ACTUAL, &u32::MAX.to_le_bytes());
    // Not of the field's width, or not writable.
    front.write_config(config::ACTUAL, &[1]);
    front.write_config(config::ACTUAL, &[1; 8]);
    front.write_config(0, &[1; 4]);
    let mut config = [0; 16];
    front.read_config(0, &mut config);
    assert_eq!(config, [0, 0, 0, 0, 255, 255, 255, 255, 0, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(guest.harness.control.stats().held, 0);
}

#[test]
fn without_reporting_nothing_of_it_is_on_offer() {
    let front = Balloon::new(Box::new(MockHost::default()), BalloonOptions::default());
    let driver = Driver::new(Rig::new(Box::new(front)));
    assert_eq!(driver.offered() & 0xff, 0b110);
    assert_eq!(driver.rig.read(Area::Common, 0x12, 2), 3);
}

#[test]
fn a_new_target_raises_a_configuration_interrupt() {
    let front = Balloon::new(
        Box::new(Anything),
        BalloonOptions {
            target: 3 * PAGE + 1,
            ..REPORTING
        },
    );
    let control = front.control();
    let mut driver = Driver::new(Rig::new(Box::new(front)));
    driver.start(USUAL);
    assert_eq!(driver.rig.read(Area::Device, 0, 4), 3);
    let before = driver.rig.msi.count(0);
    control.set_target(512 << 20);
    driver.rig.msi.wait_for(0, before + 1);
    assert_eq!(driver.rig.read(Area::Device, 0, 4), 131_072);
    assert_eq!(control.stats().target, 512 << 20);
}

#[test]
fn a_driver_is_asked_across_threads_and_one_that_is_not_there_is_not_waited_for() {
    let front = Balloon::new(Box::new(Anything), REPORTING);
    let control = front.control();
    let mut driver = Driver::new(Rig::new(Box::new(front)));
    // A wait for the missing driver would never end.
    assert_eq!(control.ask(Duration::MAX).guest, None);
    driver.start(USUAL);
    assert_eq!(control.ask(Duration::MAX).guest, None);
    let say = |driver: &mut Driver, value: u64| {
        let bytes = [&4_u16.to_le_bytes()[..], &value.to_le_bytes()].concat();
        driver.submit(STATS, &[Buffer::Readable(bytes)]);
    };
    say(&mut driver, 1);
    let asker = control.clone();
    let deadline = std::time::Instant::now() + PATIENCE;
    while control.stats().guest.is_none() {
        assert!(std::time::Instant::now() < deadline);
        std::thread::yield_now();
    }
    let answer = std::thread::spawn(move || asker.ask(PATIENCE));
    driver.wait_used(STATS);
    say(&mut driver, 2);
    assert_eq!(answer.join().unwrap().guest.unwrap().values[&4], 2);
    // For a driver that does not answer, `ask` returns the last statistics.
    assert_eq!(control.ask(Duration::from_millis(1)).guest.unwrap().values[&4], 2);
    // One that goes away while it is asked.
    let asker = control.clone();
    let answer = std::thread::spawn(move || asker.ask(PATIENCE * 100));
    driver.rig.reset_device();
    // The stop of the device ends the wait. The last statistics remain until the reset, which
    // follows the stop.
    let last = answer.join().unwrap().guest;
    assert!(last.is_none_or(|said| said.values[&4] == 2));
    assert_eq!(control.ask(Duration::MAX).guest, None);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, failure_persistence: None, ..ProptestConfig::default() })]

    /// For all lists of a driver, the balloon holds the pages that the driver gave and did not take
    /// back. The host got exactly the given pages.
    #[test]
    fn the_balloon_holds_what_was_given_and_not_taken_back(
        steps in prop::collection::vec(
            (0_u8..8, prop::collection::vec(prop_oneof![200_u32..320, 500_u32..560, 1000_u32..1040], 1..80)),
            1..30,
        )
    ) {
        let mut guest = Guest::new(USUAL);
        let is_memory = |page: u64| REGIONS.iter().any(|region| region.contains(&(page * PAGE)));
        // Free, or in the balloon.
        let mut model = BTreeSet::new();
        for (kind, pages) in steps {
            let wanted: BTreeSet<u64> = pages.iter().map(|page| u64::from(*page)).filter(|page| is_memory(*page)).collect();
            match kind {
                0..=3 => {
                    let given: Vec<_> = guest.given(INFLATE, pages).into_iter().flatten().collect();
                    prop_assert_eq!(given, wanted.iter().copied().collect::<Vec<_>>());
                    model.extend(wanted);
                }
                4..=5 => {
                    prop_assert_eq!(guest.given(DEFLATE, pages), []);
                    model.retain(|page| !wanted.contains(page));
                }
                6 => guest.harness.pause_and_resume(),
                _ => {
                    guest.harness.reset();
                                model.clear();
                }
            }
            prop_assert_eq!(guest.held(), model.len() as u64);
        }
    }
}

#[test]
fn a_restored_balloon_knows_its_pages_its_statistics_and_its_target() {
    let (control, front) = BalloonTest::build();
    control.0.set_target(8 << 20);
    let mut driver = Driver::new(Rig::new(front));
    driver.start(USUAL);
    driver.rig.write(Area::Device, 4, 4, 200);
    // Pages beside the hole and at both ends of a word; one of them leaves again.
    let pages = || (0..130).chain([4095]).chain(4352..4354).chain([16_383]);
    driver.request(INFLATE, &[Buffer::Readable(numbers(pages()))]);
    driver.request(DEFLATE, &[Buffer::Readable(numbers([64]))]);
    let statistics = [&5_u16.to_le_bytes()[..], &77_u64.to_le_bytes()].concat();
    driver.submit(STATS, &[Buffer::Readable(statistics.clone())]);
    let deadline = std::time::Instant::now() + PATIENCE;
    while control.0.stats().guest.is_none() {
        assert!(std::time::Instant::now() < deadline);
        std::thread::yield_now();
    }
    driver.rig.pause();
    let before = control.0.stats();
    assert_eq!(before.held, 133 * PAGE);

    let section = driver.rig.device.save().unwrap();
    let (restored, front) = BalloonTest::build();
    driver.rig = driver.rig.restored(front, &section).unwrap();
    let now = restored.0.stats();
    assert_eq!(
        (now.target, now.held, now.claimed, now.reported),
        (before.target, before.held, before.claimed, before.reported)
    );
    assert_eq!(now.guest, before.guest);
    driver.rig.device.resume().unwrap();
    // Each page comes out, and only once.
    let faults = |driver: &Driver| driver.rig.device.counters().guest_faults.load(Ordering::Relaxed);
    driver.request(
        DEFLATE,
        &[Buffer::Readable(numbers(pages().filter(|page| *page != 64)))],
    );
    assert_eq!((restored.0.stats().held, faults(&driver)), (0, 0));
    driver.request(DEFLATE, &[Buffer::Readable(numbers([64]))]);
    assert_eq!(faults(&driver), 1);
    // The buffer for statistics is still the device's: it comes back when somebody asks. The device has taken it: all queues
    // had their turn between the two requests.
    let ask = std::thread::spawn(move || restored.0.ask(PATIENCE));
    driver.wait_used(STATS);
    driver.submit(STATS, &[Buffer::Readable(statistics)]);
    assert_eq!(ask.join().unwrap().guest.unwrap().values[&5], 77);
}

proptest! {
    #[test]
    fn a_set_of_pages_is_the_same_after_a_restore(
        runs in prop::collection::vec((0_u64..132_000, prop_oneof![1_u64..300, 30_000..70_000_u64]), 0..8)
    ) {
        // Some pieces of 32,768 pages, at no multiple of that.
        let ranges = [(GuestAddress(0), 1 << 20), (GuestAddress(3 << 20), 512 << 20)];
        let memory = GuestMemory::from_ranges(&ranges).unwrap();
        let mut set = pages::PageSet::new(&memory);
        for (start, length) in runs {
            set.insert(&(start..start + length));
        }
        let restored = pages::PageSet::restored(&memory, &set.save()).unwrap();
        prop_assert_eq!(restored.len(), set.len());
        prop_assert_eq!(restored.save(), set.save());
    }
}

#[test]
fn pages_that_memory_does_not_have_or_that_are_given_twice_are_refused() {
    let memory = Guest::new(0).harness.memory.clone();
    let piece = |first, bits: &[u8]| crate::state::message::PageBitmap {
        first,
        bits: bits.to_vec(),
    };
    let refused = [
        vec![piece(u64::MAX, &[1])],
        vec![piece(u64::MAX - 3, &[0, 1])],
        vec![piece(1 << 40, &[0xff])],
        vec![piece(0, &[6]), piece(1, &[1])],
    ];
    for saved in refused {
        assert!(pages::PageSet::restored(&memory, &saved).is_err(), "{saved:?}");
    }
    assert_eq!(
        pages::PageSet::restored(&memory, &[piece(0, &[0xe7])])
            .unwrap()
            .len(),
        6
    );
}
