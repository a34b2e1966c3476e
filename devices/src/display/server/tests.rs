//! Clients on a real socket.

use std::{
    io::{ErrorKind, Read, Write},
    os::unix::net::{UnixListener, UnixStream},
    sync::{
        Arc, Barrier, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use rfb::{
    Frame, Rect, Size,
    testing::{Decoder, decoder, pattern, size},
};

use super::{Access, MAX_CLIENTS, Resizer, Server, Setup, start};
use crate::{
    display::{BootScreen, Framebuffer, PIXEL, VideoMemory, boot::tests::Memory},
    input::{Hub, Key, Keyboard, Layout},
};

const PATIENCE: Duration = Duration::from_secs(20);

#[derive(Default)]
struct Guest {
    keys: Mutex<Vec<(u8, bool)>>,
    waiting: AtomicBool,
    wish: Mutex<Option<Size>>,
}

impl Keyboard for Guest {
    fn is_listening(&self) -> bool {
        true
    }

    fn key(&self, key: Key, down: bool) {
        self.keys.lock().unwrap().push((key.code(), down));
    }

    fn is_waiting(&self) -> bool {
        self.waiting.load(Ordering::SeqCst)
    }

    fn repeat(&self, _key: Key) {}
}

impl Resizer for Guest {
    fn request_size(&self, size: Size) -> bool {
        *self.wish.lock().unwrap() = Some(size);
        true
    }
}

struct Rig {
    framebuffer: Arc<Framebuffer>,
    guest: Arc<Guest>,
    hub: Arc<Hub>,
    server: Server,
    folder: tempfile::TempDir,
}

impl Rig {
    fn new(size: Size) -> Self {
        Self::of(Arc::new(Framebuffer::new(size)), None)
    }

    fn of(framebuffer: Arc<Framebuffer>, boot: Option<Arc<BootScreen>>) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let bind = |name: &str| UnixListener::bind(folder.path().join(name)).unwrap().into();
        let (guest, hub) = (Arc::new(Guest::default()), Arc::new(Hub::new(Layout::Us)));
        hub.add_keyboard(guest.clone());
        let server = start(Setup {
            listeners: vec![(bind("full"), Access::Full), (bind("view"), Access::ViewOnly)],
            name: "rig".into(),
            framebuffer: framebuffer.clone(),
            boot,
            input: hub.clone(),
            resizer: guest.clone(),
        })
        .unwrap();
        Self {
            framebuffer,
            guest,
            hub,
            server,
            folder,
        }
    }

    fn connect(&self, socket: &str) -> UnixStream {
        let stream = UnixStream::connect(self.folder.path().join(socket)).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream
    }

    fn client(&self, socket: &str, shared: u8, encodings: &[i32]) -> Client {
        let mut client = Client {
            stream: self.connect(socket),
            decoder: Decoder::default(),
        };
        client.send(b"RFB 003.008\n\x01");
        client.send(&[shared]);
        client.until("a ServerInit", |decoder| !decoder.name.is_empty());
        client.send(&decoder::set_encodings(encodings));
        client
    }

    fn paint(&self, frame: &Frame) {
        let all = frame.size().rect();
        self.framebuffer
            .write(all, |y, row| row.copy_from_slice(frame.row(all, y)));
    }

    fn keys(&self, count: usize) -> Vec<(u8, bool)> {
        let begin = Instant::now();
        loop {
            let keys = self.guest.keys.lock().unwrap().clone();
            if keys.len() >= count {
                return keys;
            }
            assert!(begin.elapsed() < PATIENCE, "{keys:?} only");
            std::thread::yield_now();
        }
    }
}

struct Client {
    stream: UnixStream,
    decoder: Decoder,
}

impl Client {
    /// A client on a connection, unless the server closes that.
    fn admitted(mut stream: UnixStream) -> Option<Self> {
        stream.write_all(b"RFB 003.008\n\x01\x01").ok()?;
        let (mut decoder, mut chunk) = (Decoder::default(), [0; 4096]);
        while decoder.name.is_empty() {
            let count = match stream.read(&mut chunk) {
                Err(error) if error.kind() != ErrorKind::ConnectionReset => panic!("{error}"),
                Ok(0) | Err(_) => return None,
                Ok(count) => count,
            };
            decoder.receive(&chunk[..count]);
        }
        Some(Self { stream, decoder })
    }

    fn send(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).unwrap();
    }

    fn request(&mut self, incremental: bool) {
        let (width, height) = self.decoder.size;
        self.send(&decoder::request(incremental, Rect::new(0, 0, width, height)));
    }

    /// Waits until the server has taken all that was sent.
    fn fence(&mut self) {
        let fences = self.decoder.fences.len();
        self.send(&[248, 0, 0, 0, 0x80, 0, 0, 0, 0]);
        self.until("a fence", |decoder| decoder.fences.len() > fences);
    }

    /// Reads until something is so.
    fn until(&mut self, what: &str, mut is_so: impl FnMut(&Decoder) -> bool) {
        let mut chunk = vec![0; 64 << 10];
        while !is_so(&self.decoder) {
            let count = self
                .stream
                .read(&mut chunk)
                .unwrap_or_else(|error| panic!("{what}: {error}"));
            assert!(count > 0, "{what}: the connection was closed");
            let replies = self.decoder.receive(&chunk[..count]);
            self.stream.write_all(&replies).unwrap();
        }
    }

    /// Asks for changes until it has that picture.
    fn until_it_shows(&mut self, frame: &Frame) {
        while self.decoder.pixels != frame.pixels() {
            let updates = self.decoder.updates;
            self.request(true);
            self.until("an update", |decoder| decoder.updates > updates);
        }
    }

    fn is_closed(&mut self) -> bool {
        let mut chunk = vec![0; 64 << 10];
        loop {
            match self.stream.read(&mut chunk) {
                Ok(0) => return true,
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::ConnectionReset => return true,
                Err(error) => panic!("{error}"),
            }
        }
    }
}

const KEY_A: [u8; 12] = [255, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0x1e];

#[test]
fn several_clients_see_each_picture_and_scrolling_is_told_as_moves() {
    let rig = Rig::new(size(320, 240));
    let mut clients: Vec<_> = [&[16][..], &[1, 7], &[5], &[0]]
        .into_iter()
        .map(|encodings| rig.client("full", 1, encodings))
        .collect();
    for seed in 0..4 {
        let frame = pattern(size(320, 240), seed);
        rig.paint(&frame);
        for client in &mut clients {
            client.until_it_shows(&frame);
        }
    }
    let before = pattern(size(320, 240), 3);
    // A client without a pending request at that moment receives pixels.
    for client in &mut clients {
        client.request(true);
        client.fence();
    }
    rig.framebuffer.write(before.size().rect(), |y, row| {
        row.copy_from_slice(before.row(before.size().rect(), (y + 16).min(239)));
    });
    let after = rig.framebuffer.snapshot();
    for client in &mut clients {
        let updates = client.decoder.updates;
        client.until("the picture that moved", |decoder| decoder.updates > updates);
        client.until_it_shows(&after);
    }
    assert!(clients[1].decoder.encodings.contains(&1));
    assert!(!clients[0].decoder.encodings.contains(&1));
}

#[test]
fn what_is_held_is_released_when_its_client_goes() {
    let rig = Rig::new(size(64, 64));
    let mut client = rig.client("full", 1, &[]);
    client.send(&KEY_A);
    assert_eq!(rig.keys(1), [(30, true)]);
    drop(client);
    assert_eq!(rig.keys(2), [(30, true), (30, false)]);
}

#[test]
fn a_fence_that_asks_for_effect_is_answered_when_the_guest_has_taken_the_keys_before_it() {
    let rig = Rig::new(size(64, 64));
    let mut client = rig.client("full", 1, &[]);
    rig.guest.waiting.store(true, Ordering::SeqCst);
    client.send(&KEY_A);
    // Request and BlockBefore.
    client.send(&[248, 0, 0, 0, 0x80, 0, 0, 1, 1, 7]);
    client.fence();
    assert_eq!(client.decoder.fences, [(0, Vec::new())]);
    rig.guest.waiting.store(false, Ordering::SeqCst);
    client.until("the answer", |decoder| decoder.fences.len() == 2);
    assert_eq!(client.decoder.fences[1], (1, vec![7]));
}

#[test]
fn who_may_only_look_cannot_type_resize_or_turn_others_out() {
    let rig = Rig::new(size(64, 64));
    let mut other = rig.client("full", 1, &[]);
    let mut viewer = rig.client("view", 0, &[-308]);
    viewer.send(&KEY_A);
    viewer.send(&[&[251, 0, 0, 100, 0, 100, 1, 0][..], &[0; 16]].concat());
    viewer.request(false);
    viewer.until("a refusal", |decoder| {
        decoder
            .sizes
            .iter()
            .any(|(reason, status, ..)| (*reason, *status) == (1, 1))
    });
    other.send(&KEY_A);
    assert_eq!(rig.keys(1), [(30, true)]);
    assert_eq!(*rig.guest.wish.lock().unwrap(), None);
    let frame = pattern(size(64, 64), 1);
    rig.paint(&frame);
    viewer.until_it_shows(&frame);
}

#[test]
fn a_client_that_does_not_share_turns_the_others_out() {
    let rig = Rig::new(size(64, 64));
    let mut first = rig.client("full", 1, &[]);
    let mut second = rig.client("full", 0, &[]);
    assert!(first.is_closed());
    second.request(false);
    second.until("an update", |decoder| decoder.updates > 0);
}

#[test]
fn a_size_that_the_guest_takes_reaches_all_clients() {
    let rig = Rig::new(size(64, 64));
    let mut clients = [rig.client("full", 1, &[-308]), rig.client("full", 1, &[-223])];
    clients[0].send(&[&[251, 0, 0, 100, 0, 50, 1, 0][..], &[0; 16]].concat());
    let begin = Instant::now();
    while rig.guest.wish.lock().unwrap().is_none() {
        assert!(begin.elapsed() < PATIENCE);
        std::thread::yield_now();
    }
    rig.framebuffer
        .clear(rig.guest.wish.lock().unwrap().take().unwrap());
    let frame = pattern(size(100, 50), 2);
    rig.paint(&frame);
    for client in &mut clients {
        client.until_it_shows(&frame);
    }
}

#[test]
fn a_client_that_stops_to_read_disturbs_nobody_and_then_gets_the_latest_picture() {
    let rig = Rig::new(size(400, 300));
    let mut stuck = rig.client("full", 1, &[0, -313]);
    stuck.send(&[150, 1, 0, 0, 0, 0, 1, 144, 1, 44]);
    let mut lively = rig.client("full", 1, &[16]);
    // In the long form it reads nothing for a minute.
    let stuck_for = Duration::from_secs(if std::env::var_os("VMMD_LONG").is_some() {
        60
    } else {
        0
    });
    let begin = Instant::now();
    let mut last = pattern(size(400, 300), 0);
    for seed in 0.. {
        if seed >= 10 && begin.elapsed() >= stuck_for {
            break;
        }
        last = pattern(size(400, 300), seed);
        rig.paint(&last);
        lively.until_it_shows(&last);
    }
    // Much less than ten pictures wait for it.
    let updates = |client: &Client| client.decoder.updates;
    while stuck.decoder.pixels != last.pixels() {
        let before = updates(&stuck);
        stuck.until("an update", |decoder| decoder.updates > before);
    }
    assert!(updates(&stuck) <= 5, "{}", updates(&stuck));
}

#[test]
fn a_crowd_of_silent_connections_leaves_room_for_one_that_speaks() {
    let rig = Rig::new(size(64, 64));
    let _silent: Vec<_> = (0..2 * MAX_CLIENTS).map(|_| rig.connect("full")).collect();
    let mut client = rig.client("full", 1, &[16]);
    let frame = pattern(size(64, 64), 1);
    rig.paint(&frame);
    client.until_it_shows(&frame);
    // Clients that completed the handshake are not removed for others.
    let _more: Vec<_> = (0..2 * MAX_CLIENTS).map(|_| rig.connect("full")).collect();
    let frame = pattern(size(64, 64), 2);
    rig.paint(&frame);
    client.until_it_shows(&frame);
}

#[test]
fn of_64_clients_at_once_as_many_are_served_as_may_be_and_each_of_them_gets_the_picture() {
    const CROWD: usize = 64;
    let rig = Rig::new(size(160, 120));
    let connected = Barrier::new(CROWD);
    let enter = || {
        let stream = rig.connect("full");
        connected.wait();
        Client::admitted(stream)
    };
    let mut served: Vec<_> = std::thread::scope(|scope| {
        let entering: Vec<_> = (0..CROWD).map(|_| scope.spawn(enter)).collect();
        let entered = entering.into_iter().map(|client| client.join().unwrap());
        entered.flatten().collect()
    });
    assert_eq!(served.len(), MAX_CLIENTS);
    for seed in 0..3 {
        let frame = pattern(size(160, 120), seed);
        rig.paint(&frame);
        for (number, client) in served.iter_mut().enumerate() {
            client.send(&decoder::set_encodings(&[[16, 7, 5, 0][number % 4]]));
            client.until_it_shows(&frame);
        }
    }
    // One more finds the connection closed, until there is a place.
    assert!(Client::admitted(rig.connect("full")).is_none());
    served.pop();
    let begin = Instant::now();
    while Client::admitted(rig.connect("full")).is_none() {
        assert!(begin.elapsed() < PATIENCE);
    }
}

#[test]
fn garbage_ends_its_own_connection_only() {
    let rig = Rig::new(size(64, 64));
    let mut good = rig.client("full", 1, &[16]);
    let mut bad = rig.client("full", 1, &[]);
    bad.send(&[77; 100]);
    assert!(bad.is_closed());
    let frame = pattern(size(64, 64), 1);
    rig.paint(&frame);
    good.until_it_shows(&frame);
}

#[test]
fn lights_reach_clients_without_a_change_of_the_picture() {
    let rig = Rig::new(size(64, 64));
    let mut client = rig.client("full", 1, &[-261]);
    client.request(false);
    client.until("the picture", |decoder| decoder.leds == Some(0));
    client.request(true);
    rig.hub.set_leds(4);
    client.until("the light", |decoder| decoder.leds == Some(4));
}

#[test]
fn the_server_ends_when_it_is_told_to_with_its_connections() {
    let mut rig = Rig::new(size(64, 64));
    let mut client = rig.client("full", 1, &[16]);
    assert!(!rig.server.failed());
    assert!(rig.server.stop());
    assert!(client.is_closed());
}

#[test]
fn what_a_guest_without_a_driver_draws_is_seen_until_its_driver_shows_something() {
    let size = Size::new(64, 48).unwrap();
    let (memory, framebuffer) = (Memory::new(size), Arc::new(Framebuffer::new(size)));
    let boot = BootScreen::new(Arc::clone(&framebuffer), size, Arc::clone(&memory) as _);
    let boot = Arc::new(boot);
    memory.write(0, &[0x30, 0x20, 0x10, 0]);
    let rig = Rig::of(framebuffer, Some(Arc::clone(&boot)));
    let mut client = rig.client("full", 1, &[0]);
    client.request(false);
    client.until("the first pixel", |decoder| {
        decoder.pixels.first() == Some(&0x10_2030)
    });

    // The boot screen signals no changes: the server polls.
    memory.write(3 * PIXEL, &[0xff; PIXEL]);
    client.request(true);
    client.until("a change", |decoder| decoder.pixels.get(3) == Some(&0xff_ffff));

    boot.hide();
    let picture = Frame::black(size);
    rig.paint(&picture);
    memory.write(5 * PIXEL, &[0xff; PIXEL]);
    client.until_it_shows(&picture);

    boot.show();
    client.request(true);
    client.until("the boot screen", |decoder| {
        decoder.pixels.get(5) == Some(&0xff_ffff)
    });
}
