use std::{
    io::{Read, Write},
    os::unix::net::UnixStream,
    path::PathBuf,
    sync::{atomic::Ordering, mpsc},
    time::Duration,
};

use tempfile::TempDir;

use super::{
    protocol::{Control, event},
    *,
};
use crate::{
    component::Component as _,
    virtio::testing::{Area, Buffer, Driver, Rig, suite::DeviceUnderTest},
};

const CONTROL_IN: u16 = 2;
const CONTROL_OUT: u16 = 3;
/// Queues of the first channel.
const INPUT: u16 = 4;
const OUTPUT: u16 = 5;

const AGENT: &str = "org.qemu.guest_agent.0";

/// Two channels, with a socket for each in the folder.
fn channels(folder: &TempDir) -> Channels {
    reporting(folder, mpsc::channel().0)
}

/// The same; each change of the open channels is reported to the sender.
fn reporting(folder: &TempDir, changes: mpsc::Sender<()>) -> Channels {
    let channel = |name: &str| Channel {
        name: name.to_owned(),
        listener: Some(UnixListener::bind(folder.path().join(name)).unwrap()),
    };
    // A test without an interest in the changes has no receiver.
    let on_change = move || {
        let _unheard = changes.send(());
    };
    Channels::new(
        vec![channel(AGENT), channel("com.example.0")],
        Box::new(on_change),
    )
    .unwrap()
}

/// A driver as Linux's.
struct Guest {
    driver: Driver,
    folder: TempDir,
}

fn message(id: u32, event: u16, value: u16) -> Vec<u8> {
    Control { id, event, value }.encode("")
}

/// The next message of the device, with the text behind it.
fn heard(driver: &mut Driver) -> (Control, String) {
    let (used, raw) = driver.request(CONTROL_IN, &[Buffer::Writable(80)]);
    let raw = &raw[..used.written as usize];
    let text = String::from_utf8(raw[8..].to_vec()).unwrap();
    (Control::decode(raw[..8].try_into().unwrap()), text)
}

fn says(driver: &mut Driver, id: u32, event: u16, value: u16) {
    driver.request(CONTROL_OUT, &[Buffer::Readable(message(id, event, value))]);
}

/// Brings the device and its first port up, without a program that opens the port.
fn set_up(driver: &mut Driver) {
    says(driver, u32::MAX, event::DEVICE_READY, 1);
    for id in [1, 2] {
        let (control, _) = heard(driver);
        assert_eq!(
            control,
            Control {
                id,
                event: event::DEVICE_ADD,
                value: 1
            }
        );
    }
    says(driver, 1, event::PORT_READY, 1);
    let (control, name) = heard(driver);
    assert_eq!((control.id, control.event), (1, event::PORT_NAME));
    assert_eq!(name, AGENT);
    let (control, _) = heard(driver);
    assert_eq!(
        control,
        Control {
            id: 1,
            event: event::PORT_OPEN,
            value: 1
        }
    );
}

impl Guest {
    /// No client, and no program that has the port open.
    fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let device = channels(&folder);
        let mut driver = Driver::new(Rig::new(Box::new(device)));
        driver.start(F_MULTIPORT);
        set_up(&mut driver);
        Self { driver, folder }
    }

    fn opens(&mut self, open: bool) {
        says(&mut self.driver, 1, event::PORT_OPEN, open.into());
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join(AGENT)
    }

    fn client(&self) -> UnixStream {
        connect(&self.path())
    }

    /// A client and a program that are connected.
    fn connected() -> (Self, UnixStream) {
        let mut guest = Self::start();
        guest.opens(true);
        let mut client = guest.client();
        // The worker has accepted the client when input arrives. Output is dropped before.
        client.write_all(b"hello").unwrap();
        assert_eq!(guest.reads(64), b"hello");
        (guest, client)
    }

    fn reads(&mut self, most: u32) -> Vec<u8> {
        let (used, raw) = self.driver.request(INPUT, &[Buffer::Writable(most)]);
        raw[..used.written as usize].to_vec()
    }

    fn writes(&mut self, text: &[u8]) {
        self.driver.request(OUTPUT, &[Buffer::Readable(text.to_vec())]);
    }
}

fn connect(path: &std::path::Path) -> UnixStream {
    let client = UnixStream::connect(path).unwrap();
    client.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    client
}

fn read(client: &mut UnixStream, count: usize) -> Vec<u8> {
    let mut text = vec![0; count];
    client.read_exact(&mut text).unwrap();
    text
}

fn ends(client: &mut UnixStream) {
    assert_eq!(client.read(&mut [0]).unwrap(), 0);
}

struct ChannelsTest {
    _folder: TempDir,
}

impl DeviceUnderTest for ChannelsTest {
    const FEATURES: u64 = F_MULTIPORT;
    const EAGER_QUEUES: &'static [u16] = &[];

    fn build() -> (Self, Box<dyn VirtioDevice>) {
        let folder = tempfile::tempdir().unwrap();
        let device = channels(&folder);
        (Self { _folder: folder }, Box::new(device))
    }

    fn probe(&mut self, driver: &mut Driver) {
        if driver.features & F_MULTIPORT == 0 {
            return;
        }
        says(driver, 2, event::PORT_READY, 1);
        let (control, name) = heard(driver);
        assert_eq!(
            (control.event, name.as_str()),
            (event::PORT_NAME, "com.example.0")
        );
        let (control, _) = heard(driver);
        assert_eq!((control.event, control.value), (event::PORT_OPEN, 1));
    }

    fn request(&self) -> (u16, Vec<Buffer>) {
        (
            CONTROL_OUT,
            vec![Buffer::Readable(message(9, event::PORT_READY, 1))],
        )
    }
}

crate::virtio_device_tests!(ChannelsTest);
crate::virtio_saved_device_tests!(ChannelsTest, "virtio-channels");

#[test]
fn bytes_go_both_ways_in_order() {
    let (mut guest, mut client) = Guest::connected();
    client.write_all(b"{\"execute\"").unwrap();
    assert_eq!(guest.reads(4), b"{\"ex");
    assert_eq!(guest.reads(64), b"ecute\"");
    guest.driver.submit(INPUT, &[Buffer::Writable(64)]);
    client.write_all(b"later").unwrap();
    assert_eq!(guest.driver.wait_used(INPUT).0.written, 5);
    guest.writes(b"{\"return\"");
    guest.writes(b": {}}");
    assert_eq!(read(&mut client, 14), b"{\"return\": {}}");
}

#[test]
fn input_waits_until_a_program_opens_the_port() {
    let mut guest = Guest::start();
    let mut client = guest.client();
    client.write_all(b"hello").unwrap();
    guest.driver.submit(INPUT, &[Buffer::Writable(64)]);
    // An answer to a message shows that the worker has looked at all.
    says(&mut guest.driver, 2, event::PORT_READY, 1);
    heard(&mut guest.driver);
    assert!(guest.driver.try_used(INPUT).is_none());
    guest.opens(true);
    assert_eq!(guest.driver.wait_used(INPUT).0.written, 5);
}

#[test]
fn client_that_does_not_read_makes_the_guest_wait() {
    let (mut guest, mut client) = Guest::connected();
    let piece = |number: u8| vec![number; 32 << 10];
    let mut sent: u8 = 0;
    // The socket and the device take some, then the buffers stay with the device.
    for number in 0..64 {
        guest.driver.submit(OUTPUT, &[Buffer::Readable(piece(number))]);
        sent += 1;
    }
    let mut text = vec![0; usize::from(sent) * (32 << 10)];
    client.read_exact(&mut text).unwrap();
    for (number, piece) in text.chunks(32 << 10).enumerate() {
        assert!(piece.iter().all(|byte| usize::from(*byte) == number), "{number}");
    }
}

#[test]
fn end_of_the_guests_program_ends_the_connection() {
    let (mut guest, mut client) = Guest::connected();
    guest.writes(b"last words");
    guest.opens(false);
    assert_eq!(read(&mut client, 10), b"last words");
    ends(&mut client);
    // The next client waits for the next program.
    let mut next = guest.client();
    next.write_all(b"again").unwrap();
    guest.opens(true);
    assert_eq!(guest.reads(64), b"again");
}

#[test]
fn input_of_a_client_that_has_ended_is_delivered() {
    let (mut guest, mut client) = Guest::connected();
    client.write_all(b"bye").unwrap();
    drop(client);
    assert_eq!(guest.reads(64), b"bye");
    guest.driver.submit(INPUT, &[Buffer::Writable(64)]);
    let mut next = guest.client();
    next.write_all(b"next").unwrap();
    assert_eq!(guest.driver.wait_used(INPUT).0.written, 4);
}

#[test]
fn a_new_client_replaces_one_whose_input_nobody_reads() {
    let (mut guest, mut client) = Guest::connected();
    client.write_all(b"old").unwrap();
    let mut new = connect(&guest.path());
    ends_or_resets(&mut client);
    new.write_all(b"new").unwrap();
    assert_eq!(guest.reads(64), b"new");
}

/// Input that was not read resets the connection.
fn ends_or_resets(client: &mut UnixStream) {
    assert!(matches!(client.read(&mut [0]), Ok(0) | Err(_)));
}

#[test]
fn a_reset_of_the_device_ends_the_connection() {
    let (mut guest, mut client) = Guest::connected();
    guest.driver.start(F_MULTIPORT);
    ends(&mut client);
    set_up(&mut guest.driver);
}

#[test]
fn output_without_a_client_is_dropped_and_the_driver_goes_on() {
    let mut guest = Guest::start();
    guest.opens(true);
    for _ in 0..3 {
        guest.writes(&[b'x'; 4096]);
    }
}

#[test]
fn a_buffer_that_is_too_large_or_too_short_is_refused() {
    let (mut guest, mut client) = Guest::connected();
    guest.driver.request(
        OUTPUT,
        &[Buffer::Readable(vec![0; 1 << 20]), Buffer::Readable(vec![0; 1])],
    );
    guest.driver.request(CONTROL_OUT, &[Buffer::Readable(vec![0; 7])]);
    says(&mut guest.driver, 1, event::PORT_READY, 1);
    guest.driver.request(CONTROL_IN, &[Buffer::Writable(7)]);
    let faults = &guest.driver.rig.device.counters().guest_faults;
    assert_eq!(faults.load(Ordering::Relaxed), 3);
    // The message that had no room comes again.
    assert_eq!(heard(&mut guest.driver).1, AGENT);
    guest.writes(b"fine");
    assert_eq!(read(&mut client, 4), b"fine");
}

#[test]
fn ports_that_are_not_there_are_ignored() {
    let (mut guest, mut client) = Guest::connected();
    for id in [0, 3, u32::MAX] {
        says(&mut guest.driver, id, event::PORT_READY, 1);
        says(&mut guest.driver, id, event::PORT_OPEN, 1);
    }
    says(&mut guest.driver, 1, 99, 1);
    guest.writes(b"fine");
    assert_eq!(read(&mut client, 4), b"fine");
}

#[test]
fn a_restored_guest_serves_a_new_client() {
    let (mut guest, mut client) = Guest::connected();
    guest.driver.rig.pause();
    let section = guest.driver.rig.device.save().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let device = Box::new(channels(&folder));
    guest.driver.rig = guest.driver.rig.restored(device, &section).unwrap();
    guest.folder = folder;
    ends(&mut client);
    guest.driver.rig.device.resume().unwrap();
    let mut client = guest.client();
    client.write_all(b"hello").unwrap();
    assert_eq!(guest.reads(64), b"hello");
}

#[test]
fn number_of_ports_is_in_the_configuration() {
    let guest = Guest::start();
    assert_eq!(guest.driver.rig.read(Area::Device, 4, 4), 3);
}

#[test]
fn channels_without_a_name_or_too_many_are_refused() {
    let channel = |name: String| Channel { name, listener: None };
    let long = "x".repeat(MAX_CHANNEL_NAME + 1);
    let refused = |channels| Channels::new(channels, Box::new(|| ())).is_err();
    assert!(refused(vec![]));
    assert!(refused(vec![channel(String::new())]));
    assert!(refused(vec![channel(long)]));
    let many = (0..=MAX_CHANNELS).map(|number| channel(format!("c{number}")));
    assert!(refused(many.collect()));
}

#[test]
fn a_saved_state_that_no_channels_have_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let mut device = channels(&folder);
    let other = message::VirtioChannels {
        names: vec![AGENT.into()],
    };
    let error = device.restore(&Section::new("channels", &other)).unwrap_err();
    assert!(
        matches!(error, StateError::Invalid { field: "names", .. }),
        "{error}"
    );
}

/// A guest whose driver has set up the first port, and the state that the device reports.
fn reported() -> (Guest, Arc<OpenChannels>, mpsc::Receiver<()>) {
    let folder = tempfile::tempdir().unwrap();
    let (sender, changes) = mpsc::channel();
    let device = reporting(&folder, sender);
    let open = device.open();
    let mut driver = Driver::new(Rig::new(Box::new(device)));
    driver.start(F_MULTIPORT);
    set_up(&mut driver);
    (Guest { driver, folder }, open, changes)
}

#[test]
fn open_channels_are_reported_until_a_reset() {
    let (mut guest, open, changes) = reported();
    assert!(open.names().is_empty());
    guest.opens(true);
    changes.recv().unwrap();
    assert_eq!(open.names(), [AGENT]);
    // The same again is no change.
    guest.opens(true);
    says(&mut guest.driver, 2, event::PORT_OPEN, 1);
    changes.recv().unwrap();
    assert_eq!(open.names(), [AGENT, "com.example.0"]);
    guest.opens(false);
    changes.recv().unwrap();
    assert_eq!(open.names(), ["com.example.0"]);
    guest.driver.start(F_MULTIPORT);
    changes.recv().unwrap();
    assert!(open.names().is_empty());
    assert!(changes.try_recv().is_err());
}

#[test]
fn changes_that_no_thread_reads_are_reported_once() {
    let (mut guest, open, changes) = reported();
    for _ in 0..50 {
        guest.opens(true);
        guest.opens(false);
    }
    guest.opens(true);
    assert_eq!(changes.try_iter().count(), 1);
    assert_eq!(open.names(), [AGENT]);
    guest.opens(false);
    changes.recv().unwrap();
    assert!(open.names().is_empty());
}

#[test]
fn open_channels_of_a_restored_guest_are_reported() {
    let (mut guest, _, _changes) = reported();
    guest.opens(true);
    guest.driver.rig.pause();
    let section = guest.driver.rig.device.save().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let (sender, changes) = mpsc::channel();
    let device = reporting(&folder, sender);
    let open = device.open();
    guest.driver.rig = guest.driver.rig.restored(Box::new(device), &section).unwrap();
    changes.recv().unwrap();
    assert_eq!(open.names(), [AGENT]);
}
