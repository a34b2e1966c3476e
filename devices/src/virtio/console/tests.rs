use std::{
    io::{Read, Write},
    os::unix::net::{UnixListener, UnixStream},
    sync::atomic::Ordering,
};

use super::*;
use crate::{
    component::Component as _,
    serial::{
        history::Capacity,
        server::{self, Setup},
    },
    state::refuses,
    virtio::testing::{Area, Buffer, Driver, Rig, suite::DeviceUnderTest},
};

const RECEIVE: u16 = 0;
const TRANSMIT: u16 = 1;

fn console() -> (Arc<dyn Port>, ConsoleControl, Console) {
    let history = Arc::new(History::new(Capacity::default()).unwrap());
    let console = Console::new(history).unwrap();
    (console.port(), console.control(), console)
}

fn printed(port: &dyn Port) -> Vec<u8> {
    port.history().replay(usize::MAX).0
}

struct ConsoleTest {
    port: Arc<dyn Port>,
}

impl DeviceUnderTest for ConsoleTest {
    const FEATURES: u64 = F_SIZE | F_EMERG_WRITE;
    const EAGER_QUEUES: &'static [u16] = &[TRANSMIT];

    fn build() -> (Self, Box<dyn VirtioDevice>) {
        let (port, _, console) = console();
        (Self { port }, Box::new(console))
    }

    fn probe(&mut self, driver: &mut Driver) {
        let before = printed(self.port.as_ref()).len();
        driver.request(
            TRANSMIT,
            &[
                Buffer::Readable(b"log".to_vec()),
                Buffer::Readable(b"in: ".to_vec()),
            ],
        );
        assert_eq!(printed(self.port.as_ref())[before..], *b"login: ");
        self.port.receive(b"root");
        let (used, input) = driver.request(RECEIVE, &[Buffer::Writable(2), Buffer::Writable(16)]);
        assert_eq!((used.written, &input[..4]), (4, &b"root"[..]));
    }

    fn request(&self) -> (u16, Vec<Buffer>) {
        (TRANSMIT, vec![Buffer::Readable(b"output".to_vec())])
    }
}

crate::virtio_device_tests!(ConsoleTest);
crate::virtio_saved_device_tests!(ConsoleTest, "virtio-console");

fn running() -> (Arc<dyn Port>, ConsoleControl, Driver) {
    let (port, control, console) = console();
    let mut driver = Driver::new(Rig::new(Box::new(console)));
    driver.start(F_SIZE);
    (port, control, driver)
}

#[test]
fn input_waits_for_buffers_and_comes_in_order_in_pieces_that_fit() {
    let (port, _, mut driver) = running();
    port.receive(b"abcde");
    let take = |driver: &mut Driver, length| {
        let (used, text) = driver.request(RECEIVE, &[Buffer::Writable(length)]);
        String::from_utf8(text[..used.written as usize].to_vec()).unwrap()
    };
    assert_eq!(take(&mut driver, 3), "abc");
    assert_eq!(take(&mut driver, 3), "de");
    driver.submit(RECEIVE, &[Buffer::Writable(8)]);
    port.receive(b"!");
    assert_eq!(driver.wait_used(RECEIVE).0.written, 1);
}

#[test]
fn more_input_than_a_console_keeps_stays_with_its_sender_until_there_is_room() {
    let (port, _, mut driver) = running();
    let room = port.room_event().unwrap();
    port.receive(&vec![b'x'; port.room()]);
    assert_eq!(port.room(), 0);
    assert!(room.read().is_err());
    driver.request(RECEIVE, &[Buffer::Writable(1024)]);
    assert_eq!(port.room(), 0, "a sender is not woken for a little room");
    driver.request(RECEIVE, &[Buffer::Writable(1024)]);
    assert_eq!((room.read().unwrap(), port.room()), (1, 2048));
}

#[test]
fn a_buffer_of_gigabytes_is_printed_up_to_a_limit() {
    let (port, _, mut driver) = running();
    let before = port.history().end();
    driver.request(
        TRANSMIT,
        &[
            Buffer::Readable(vec![b'.'; 1 << 20]),
            Buffer::Readable(vec![b'.'; 9]),
        ],
    );
    assert_eq!(port.history().end() - before, 1 << 20);
}

#[test]
fn a_buffer_without_room_for_input_comes_back_empty_and_the_input_waits_for_another() {
    let (port, _, mut driver) = running();
    port.receive(b"x");
    let (used, _) = driver.request(RECEIVE, &[Buffer::Readable(vec![0; 4])]);
    assert_eq!(used.written, 0);
    let (used, text) = driver.request(RECEIVE, &[Buffer::Writable(4)]);
    assert_eq!((used.written, text[0]), (1, b'x'));
    let faults = &driver.rig.device.counters().guest_faults;
    assert_eq!(faults.load(Ordering::Relaxed), 1);
}

#[test]
fn a_byte_of_the_emergency_write_is_printed_before_there_are_queues() {
    let (port, _, console) = console();
    let driver = Driver::new(Rig::new(Box::new(console)));
    driver.rig.write(Area::Device, 8, 4, u64::from(b'!'));
    // Other widths are no writes of the field.
    driver.rig.write(Area::Device, 8, 1, u64::from(b'?'));
    assert_eq!(printed(port.as_ref()), b"!");
}

#[test]
fn the_guest_is_told_the_size_of_the_terminal_when_it_changes() {
    let (_, control, driver) = running();
    let size = |driver: &Driver| {
        (
            driver.rig.read(Area::Device, 0, 2),
            driver.rig.read(Area::Device, 2, 2),
        )
    };
    assert_eq!(size(&driver), (0, 0));
    let before = driver.rig.read(Area::Common, 0x15, 1);
    control.resize(132, 43);
    assert_eq!(size(&driver), (132, 43));
    // The configuration generation.
    assert_ne!(driver.rig.read(Area::Common, 0x15, 1), before);
}

#[test]
fn while_paused_no_input_is_let_in_and_a_restored_console_has_what_waited() {
    let (port, control, mut driver) = running();
    control.resize(80, 25);
    port.receive(b"waits");
    driver.rig.pause();
    assert_eq!(port.room(), 0);
    let section = driver.rig.device.save().unwrap();
    let (other, _, console) = console();
    driver.rig = driver.rig.restored(Box::new(console), &section).unwrap();
    assert_eq!(other.room(), 0);
    driver.rig.device.resume().unwrap();
    let (used, text) = driver.request(RECEIVE, &[Buffer::Writable(16)]);
    assert_eq!(&text[..used.written as usize], b"waits");
    assert_eq!(driver.rig.read(Area::Device, 0, 2), 80);
}

#[test]
fn a_saved_state_that_no_console_has_is_refused() {
    let (_, _, mut console) = console();
    let size = message::VirtioConsole { columns: 1, rows: 1 };
    refuses(&size, &[("columns", |saved| saved.columns = 0x1_0000)], |saved| {
        console.restore(&Section::new("console", saved))
    });
    let queues = message::VirtioConsoleQueues::default();
    refuses(
        &queues,
        &[("backlog", |saved| saved.backlog = vec![0; 4097])],
        |saved| console.shared.restore(saved),
    );
}

#[test]
fn a_server_shows_its_output_and_types_into_it() {
    let (port, _, mut driver) = running();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("hvc.sock");
    let setup = Setup {
        listener: Some(UnixListener::bind(&path).unwrap().into()),
        ..Setup::default()
    };
    let _server = server::start(port, setup).unwrap();
    driver.request(TRANSMIT, &[Buffer::Readable(b"early ".to_vec())]);
    let mut client = UnixStream::connect(&path).unwrap();
    let mut first = [0; 14];
    client.read_exact(&mut first).unwrap();
    assert_eq!(&first, b"\x06\0\0\0\0\0\0\0early ");
    driver.request(TRANSMIT, &[Buffer::Readable(b"late".to_vec())]);
    let mut late = [0; 4];
    client.read_exact(&mut late).unwrap();
    assert_eq!(&late, b"late");
    driver.submit(RECEIVE, &[Buffer::Writable(16)]);
    client.write_all(b"typed").unwrap();
    let (used, text) = driver.wait_used(RECEIVE);
    assert_eq!(&text[..used.written as usize], b"typed");
}
