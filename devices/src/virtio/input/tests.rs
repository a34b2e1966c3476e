use std::{collections::VecDeque, sync::atomic::Ordering};

use rfb::Size;

use super::*;
use crate::{
    component::Component as _,
    input::{LED_CAPS, LED_NUM, Layout, Source, TABLET_MAX},
    state::{Change, refuses},
    virtio::testing::{Area, Buffer, Driver, Rig, suite::DeviceUnderTest},
};

const EVENTS: u16 = 0;
const STATUS: u16 = 1;
const ENTER: u32 = 0x1c;

/// Type, code, value.
type Seen = (u16, u16, u32);

fn decode(raw: &[u8]) -> Seen {
    let event = Event::decode(raw.try_into().unwrap());
    (event.kind, event.code, event.value)
}

/// Gives the driver's queue buffers for that many events.
fn offer(driver: &mut Driver, count: usize) {
    for _ in 0..count {
        driver.submit(EVENTS, &[Buffer::Writable(8)]);
    }
}

fn next(driver: &mut Driver) -> Seen {
    let (used, raw) = driver.wait_used(EVENTS);
    assert_eq!(used.written, 8);
    decode(&raw)
}

struct KeyboardTest {
    hub: Arc<Hub>,
}

impl DeviceUnderTest for KeyboardTest {
    const FEATURES: u64 = 0;
    const EAGER_QUEUES: &'static [u16] = &[STATUS];

    fn build() -> (Self, Box<dyn VirtioDevice>) {
        let hub = Arc::new(Hub::new(Layout::Us));
        let device = Input::keyboard(&hub).unwrap();
        (Self { hub }, Box::new(device))
    }

    fn probe(&mut self, driver: &mut Driver) {
        wait_for_driver(driver, &self.hub);
        let mut source = Hub::source(&self.hub);
        offer(driver, 4);
        source.scancode(ENTER, true);
        source.scancode(ENTER, false);
        let seen = [(); 4].map(|()| next(driver));
        assert_eq!(seen, [(1, 28, 1), (0, 0, 0), (1, 28, 0), (0, 0, 0)]);
    }

    fn request(&self) -> (u16, Vec<Buffer>) {
        (STATUS, vec![Buffer::Readable(vec![0; 8])])
    }
}

/// Waits until the worker runs. It starts after DRIVER_OK and drops earlier input. A returned
/// status buffer shows that it runs.
fn wait_for_driver(driver: &mut Driver, _hub: &Hub) {
    driver.request(STATUS, &[Buffer::Readable(vec![0; 8])]);
}

crate::virtio_device_tests!(KeyboardTest);
crate::virtio_saved_device_tests!(KeyboardTest, "virtio-input");

fn running(build: fn(&Arc<Hub>) -> io::Result<Input>) -> (Arc<Hub>, Driver) {
    let hub = Arc::new(Hub::new(Layout::Us));
    let mut driver = Driver::new(Rig::new(Box::new(build(&hub).unwrap())));
    driver.start(0);
    wait_for_driver(&mut driver, &hub);
    (hub, driver)
}

fn select(driver: &Driver, select: u64, subsel: u64) -> Vec<u8> {
    driver.rig.write(Area::Device, 0, 1, select);
    driver.rig.write(Area::Device, 1, 1, subsel);
    let length = driver.rig.read(Area::Device, 2, 1);
    (0..length)
        .map(|at| driver.rig.read(Area::Device, 8 + at, 1) as u8)
        .collect()
}

#[test]
fn each_device_says_what_it_has() {
    let (_, keyboard) = running(Input::keyboard);
    assert_eq!(select(&keyboard, 1, 0), b"vmmd keyboard");
    assert_eq!(select(&keyboard, 0x11, 1), [&[0xfe][..], &[0xff; 15]].concat());
    assert_eq!(select(&keyboard, 0x11, 0x11), [7]);
    // EV_REP: the guest does not generate key repetitions.
    assert!(select(&keyboard, 0x11, 0x14).is_empty());
    assert!(select(&keyboard, 0x11, 3).is_empty());
    let (_, tablet) = running(Input::tablet);
    assert_eq!(select(&tablet, 1, 0), b"vmmd tablet");
    assert_eq!(select(&tablet, 3, 0), [6, 0, 0xf4, 0x1a, 2, 0, 1, 0]);
    assert_eq!(select(&tablet, 0x11, 1), [&[0; 34][..], &[7]].concat());
    assert_eq!(select(&tablet, 0x11, 3), [3]);
    assert_eq!(
        select(&tablet, 0x12, 1)[4..8],
        u32::from(TABLET_MAX).to_le_bytes()
    );
    assert!(select(&tablet, 0x12, 2).is_empty());
    assert!(select(&tablet, 0xff, 0xff).is_empty());
}

#[test]
fn events_wait_for_buffers_and_come_in_order() {
    let (hub, mut driver) = running(Input::keyboard);
    let mut source = Hub::source(&hub);
    for character in "hello".chars() {
        assert!(source.character(character));
    }
    offer(&mut driver, 20);
    let codes: Vec<_> = (0..20)
        .map(|_| next(&mut driver))
        .filter(|event| event.0 == 1)
        .collect();
    let pressed: Vec<_> = codes
        .iter()
        .filter(|event| event.2 == 1)
        .map(|event| event.1)
        .collect();
    assert_eq!(pressed, [35, 18, 38, 38, 24]);
    assert_eq!(codes.len(), 10);
}

#[test]
fn a_held_key_repeats_as_often_as_its_client_says_so_and_a_slow_guest_sees_one_of_many() {
    let (hub, mut driver) = running(Input::keyboard);
    let mut source = Hub::source(&hub);
    source.scancode(ENTER, true);
    for _ in 0..2 {
        for _ in 0..9 {
            source.scancode(ENTER, true);
        }
        source.scancode(0x2a, true);
        source.scancode(0x2a, false);
    }
    source.scancode(ENTER, false);
    // A key that is not down does not repeat.
    source.scancode(ENTER, false);
    offer(&mut driver, 16);
    let seen: Vec<_> = (0..16)
        .map(|_| next(&mut driver))
        .filter(|event| event.0 == 1)
        .map(|(_, code, value)| (code, value))
        .collect();
    let turn = [(28, 2), (42, 1), (42, 0)];
    assert_eq!(seen, [&[(28, 1)][..], &turn, &turn, &[(28, 0)]].concat());
}

#[test]
fn a_flood_is_cut_and_all_that_is_down_is_released_all_the_same() {
    let (hub, mut driver) = running(Input::keyboard);
    let mut source = Hub::source(&hub);
    source.scancode(ENTER, true);
    for _ in 0..5000 {
        source.character('x');
    }
    drop(source);
    let mut down = std::collections::BTreeSet::new();
    let mut count = 0;
    loop {
        offer(&mut driver, 2);
        // All that comes ends with the release of the first key.
        for _ in 0..2 {
            let (kind, code, value) = next(&mut driver);
            count += 1;
            if kind == 1 && value == 1 {
                assert!(down.insert(code));
            } else if kind == 1 {
                assert!(down.remove(&code));
            }
        }
        if down.is_empty() {
            break;
        }
    }
    assert!(count <= events::MAX_EVENTS, "{count}");
}

#[test]
fn the_pointer_moves_to_its_last_place_and_no_click_is_lost() {
    let (hub, mut driver) = running(Input::tablet);
    let mut source = Hub::source(&hub);
    let size = Size::new(1001, 1001).unwrap();
    for x in 0..=500 {
        source.point(0, (x, 0), size);
    }
    source.point(1, (500, 0), size);
    source.point(0, (500, 0), size);
    source.point(8, (500, 1000), size);
    offer(&mut driver, 14);
    let seen: Vec<_> = (0..14).map(|_| next(&mut driver)).collect();
    let middle = u32::from(TABLET_MAX) / 2;
    let expected = [
        (3, 0, 0),
        (3, 1, 0),
        (0, 0, 0),
        (3, 0, middle),
        (3, 1, 0),
        (0, 0, 0),
        (1, 0x110, 1),
        (0, 0, 0),
        (1, 0x110, 0),
        (0, 0, 0),
        (3, 0, middle),
        (3, 1, u32::from(TABLET_MAX)),
        (2, 8, 1),
        (0, 0, 0),
    ];
    assert_eq!(seen, expected);
}

/// Status buffer for the state of a light.
fn led(code: u16, value: u32) -> Vec<Buffer> {
    let event = Event {
        kind: 0x11,
        code,
        value,
    };
    vec![Buffer::Readable(event.encode().to_vec())]
}

#[test]
fn a_place_that_is_being_handed_over_is_not_replaced() {
    let events = Events::new(EventFd::new(0).unwrap());
    events.set_driven();
    let point = |x, y| {
        events.point(Pointer {
            x,
            y,
            ..Pointer::default()
        });
    };
    point(1, 1);
    let mut seen = vec![events.first().unwrap()];
    point(2, 2);
    point(3, 3);
    events.pop();
    while let Some(event) = events.first() {
        seen.push(event);
        events.pop();
    }
    let seen: Vec<_> = seen.iter().map(|event| decode(&event.encode())).collect();
    let expected = [(3, 0, 1), (3, 1, 1), (0, 0, 0), (3, 0, 3), (3, 1, 3), (0, 0, 0)];
    assert_eq!(seen, expected);
}

#[test]
fn lights_that_the_driver_switches_reach_the_hub_and_go_out_with_it() {
    let (hub, mut driver) = running(Input::keyboard);
    driver.request(STATUS, &led(1, 1));
    driver.request(STATUS, &led(0, 1));
    driver.request(STATUS, &led(9, 1));
    assert_eq!(hub.leds(), LED_CAPS | LED_NUM);
    driver.request(STATUS, &led(1, 0));
    assert_eq!(hub.leds(), LED_NUM);
    driver.rig.reset_device();
    assert_eq!(hub.leds(), 0);
}

#[test]
fn nothing_is_kept_for_a_guest_that_has_no_driver() {
    let hub = Arc::new(Hub::new(Layout::Us));
    let mut driver = Driver::new(Rig::new(Box::new(Input::keyboard(&hub).unwrap())));
    let mut source = Hub::source(&hub);
    source.character('x');
    driver.start(0);
    wait_for_driver(&mut driver, &hub);
    source.character('y');
    offer(&mut driver, 1);
    assert_eq!(next(&mut driver), (1, 21, 1));
}

#[test]
fn a_buffer_too_short_for_an_event_comes_back_empty_and_the_event_waits_for_another() {
    let (hub, mut driver) = running(Input::keyboard);
    driver.submit(EVENTS, &[Buffer::Writable(7)]);
    driver.submit(EVENTS, &[Buffer::Writable(8)]);
    let mut source = Hub::source(&hub);
    source.scancode(ENTER, true);
    assert_eq!(driver.wait_used(EVENTS).0.written, 0);
    assert_eq!(next(&mut driver), (1, 28, 1));
    assert_eq!(
        driver.rig.device.counters().guest_faults.load(Ordering::Relaxed),
        1
    );
}

#[test]
fn a_restored_keyboard_hands_over_what_waited_and_releases_what_was_held() {
    let (hub, mut driver) = running(Input::keyboard);
    let mut source: Source = Hub::source(&hub);
    source.scancode(ENTER, true);
    driver.rig.pause();
    let section = driver.rig.device.save().unwrap();
    let hub = Arc::new(Hub::new(Layout::Us));
    driver.rig = driver
        .rig
        .restored(Box::new(Input::keyboard(&hub).unwrap()), &section)
        .unwrap();
    driver.rig.device.resume().unwrap();
    offer(&mut driver, 4);
    let seen = [(); 4].map(|()| next(&mut driver));
    assert_eq!(seen, [(1, 28, 1), (0, 0, 0), (1, 28, 0), (0, 0, 0)]);
}

#[test]
fn the_lights_of_a_restored_keyboard_are_as_they_were() {
    let (hub, mut driver) = running(Input::keyboard);
    driver.request(STATUS, &led(1, 1));
    assert_eq!(hub.leds(), LED_CAPS);
    driver.rig.pause();
    let section = driver.rig.device.save().unwrap();
    let hub = Arc::new(Hub::new(Layout::Us));
    driver.rig = driver
        .rig
        .restored(Box::new(Input::keyboard(&hub).unwrap()), &section)
        .unwrap();
    driver.rig.device.resume().unwrap();
    assert_eq!(hub.leds(), LED_CAPS);
    driver.request(STATUS, &led(0, 1));
    assert_eq!(hub.leds(), LED_CAPS | LED_NUM);
}

#[test]
fn saved_events_that_no_device_has_are_refused() {
    let events = Events::new(EventFd::new(0).unwrap());
    let changes: [Change<message::VirtioInputQueues>; 5] = [
        ("events", |saved| saved.events = vec![0; 7]),
        ("events", |saved| saved.events = vec![0; 8 * 5000]),
        ("down", |saved| saved.down = vec![0x1_0000]),
        ("down", |saved| saved.down = vec![1; 1000]),
        ("leds", |saved| saved.leds = 8),
    ];
    refuses(&events.save(0), &changes, |saved| {
        events.restore(saved).map(|_| ())
    });
    assert_eq!(events.state(), (VecDeque::new().into(), vec![]));
}
