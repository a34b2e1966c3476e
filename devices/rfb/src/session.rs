//! One client's side of the protocol as a state machine: bytes in, bytes out, no I/O.
//!
//! ```text
//!  Version ──▶ Security ──▶ ClientInit ──▶ Normal
//!         └── 3.3 ────────────▲
//! ```
//!
//! Invariant on the order of output: an update consists of pieces (rectangles), which are encoded
//! one after the other as the client takes them, without other messages between them. Messages that
//! become due meanwhile wait in `behind`. `out` holds at most one piece more than [`LOW_WATER`].
//!
//! A client always receives the newest possible picture: damage is collected until the client has
//! requested an update and has taken all of the previous one, and pixels are read at the time of
//! encoding.

use std::{collections::VecDeque, sync::Arc};

use crate::handshake;

use crate::{
    Cursor, Damage, Frame, Rect, Size,
    encode::{Block, Encoders, Encoding},
    message::{BadMessage, ClientMessage, Parser},
    pixel::{self, PixelFormat},
};

/// More pieces are encoded when less than this many bytes wait for the client.
const LOW_WATER: usize = 64 << 10;
/// Replies that may wait for a client; one that has more is not listened to.
const MAX_BEHIND: usize = 16 << 10;
/// Widest piece of an update (Tight allows 2048), and about how many pixels it has.
const MAX_PIECE_WIDTH: u16 = 2048;
const PIECE_PIXELS: u16 = u16::MAX;
/// Updates that a client with continuous updates may be behind.
const MAX_IN_FLIGHT: u8 = 2;

const SECURITY_NONE: u8 = 1;

/// Numbers of pseudo-encodings.
mod pseudo {
    pub const COPY_RECT: i32 = 1;
    pub const DESKTOP_SIZE: i32 = -223;
    pub const CURSOR: i32 = -239;
    pub const QEMU_KEYS: i32 = -258;
    pub const QEMU_LEDS: i32 = -261;
    pub const DESKTOP_NAME: i32 = -307;
    pub const EXTENDED_DESKTOP_SIZE: i32 = -308;
    pub const FENCE: i32 = -312;
    pub const CONTINUOUS_UPDATES: i32 = -313;
}

const FENCE_BLOCK_BEFORE: u32 = 1;
const FENCE_BLOCK_AFTER: u32 = 2;
const FENCE_SYNC_NEXT: u32 = 4;
const FENCE_REQUEST: u32 = 1 << 31;

const MESSAGE_END_OF_CONTINUOUS_UPDATES: u8 = 150;
const MESSAGE_FENCE: u8 = 248;

/// Why a client is not served any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProtocolError {
    /// No version of RFB.
    #[error("the client does not speak RFB")]
    Version,
    /// A security type that was not offered.
    #[error("the client chose the security type {0}, which was not offered")]
    Security(u8),
    /// A message.
    #[error(transparent)]
    Message(#[from] BadMessage),
}

/// Event of a client for the server to handle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// The handshake is over; a client that does not share wants to be the only one.
    Ready {
        /// Others may stay.
        shared: bool,
    },
    /// A key by its keysym.
    Key {
        /// Pressed, or released.
        down: bool,
        /// X11 keysym.
        keysym: u32,
    },
    /// A key by where it is on the keyboard.
    Scancode {
        /// Pressed, or released.
        down: bool,
        /// XT scancode; keys with the prefix 0xe0 have bit 7 set.
        scancode: u32,
    },
    /// The pointer, in pixels of the picture that the client knows.
    Pointer {
        /// Left, middle, right, wheel up, wheel down, wheel left, wheel right.
        buttons: u8,
        /// Column.
        x: u16,
        /// Row.
        y: u16,
        /// Of that picture.
        size: Size,
    },
    /// The client wants another size. To be answered with [`Session::answer_resize`].
    Resize {
        /// Columns.
        width: u16,
        /// Rows.
        height: u16,
        /// Screens.
        screens: u8,
    },
}

/// Result of a client's request for another size (status in ExtendedDesktopSize).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum ResizeStatus {
    /// The size is fixed, or this client lacks the right.
    Prohibited = 1,
    /// A layout or size that there is not.
    Invalid = 3,
    /// The guest was asked.
    Forwarded = 4,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Version,
    Security { results: bool },
    ClientInit,
    Normal,
}

/// Extensions that the client supports.
#[derive(Clone, Copy, Debug, Default)]
struct Capabilities {
    copy_rect: bool,
    desktop_size: bool,
    extended_desktop_size: bool,
    cursor: bool,
    desktop_name: bool,
    qemu_keys: bool,
    leds: bool,
    fence: bool,
    continuous_updates: bool,
}

/// Pseudo-rectangles that are due.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Due {
    /// The status of an ExtendedDesktopSize that answers the client. Clients ignore the size in it, unless their wish has come true.
    answer: Option<ResizeStatus>,
    /// The size: an ExtendedDesktopSize that answers nothing, or a DesktopSize.
    size: bool,
    cursor: bool,
    name: bool,
    qemu_keys: bool,
    leds: bool,
}

impl Due {
    fn is_empty(self) -> bool {
        self == Self::default()
    }
}

/// A rectangle of an update that is under way.
#[derive(Clone, Copy, Debug)]
enum Piece {
    Pixels(Rect),
    Copy { to: Rect, from: (u16, u16) },
}

/// A part of the picture that moved from `from` to `to`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Move {
    /// Where it is.
    pub to: Rect,
    /// Upper left corner of where it was.
    pub from: (u16, u16),
}

impl Move {
    /// Where it was.
    pub fn source(self) -> Rect {
        Rect::new(self.from.0, self.from.1, self.to.width, self.to.height)
    }
}

/// One client.
#[derive(Debug)]
pub struct Session {
    stage: Stage,
    name: String,
    /// Bytes of a message of the handshake.
    handshake: Vec<u8>,
    parser: Parser,
    capabilities: Capabilities,
    /// [`Capabilities`] collected from a SetEncodings message during parsing, and its encoding.
    announced: Capabilities,
    chosen: Option<Encoding>,
    format: PixelFormat,
    /// Format that takes effect with the next update.
    next_format: Option<PixelFormat>,
    encoding: Encoding,
    encoders: Encoders,
    /// The size of the picture that the client knows.
    size: Size,
    /// The size that the client is to know.
    new_size: Size,
    damage: Damage,
    cursor: Arc<Cursor>,
    leds: u8,
    due: Due,
    /// Area of the pending update request.
    request: Option<Rect>,
    continuous: Option<Rect>,
    in_flight: u8,
    pieces: VecDeque<Piece>,
    out: Vec<u8>,
    written: usize,
    behind: Vec<u8>,
    /// Answers to fences that wait until the client's earlier messages have taken effect.
    held: Vec<u8>,
    values: Vec<u32>,
}

impl Session {
    /// A client that just connected to a screen of that size, called `name`.
    pub fn new(name: &str, size: Size) -> Self {
        Self {
            stage: Stage::Version,
            name: name.to_owned(),
            handshake: Vec::new(),
            parser: Parser::default(),
            capabilities: Capabilities::default(),
            announced: Capabilities::default(),
            chosen: None,
            format: PixelFormat::NATIVE,
            next_format: None,
            encoding: Encoding::Raw,
            encoders: Encoders::default(),
            size,
            new_size: size,
            damage: Damage::all(size),
            cursor: Arc::default(),
            leds: 0,
            due: Due::default(),
            request: None,
            continuous: None,
            in_flight: 0,
            pieces: VecDeque::new(),
            out: handshake::VERSION.to_vec(),
            written: 0,
            behind: Vec::new(),
            held: Vec::new(),
            values: Vec::new(),
        }
    }

    /// Whether the handshake is over.
    pub fn is_ready(&self) -> bool {
        self.stage == Stage::Normal
    }

    /// Whether the client is to be listened to: it is not while too many replies wait for it.
    pub fn listens(&self) -> bool {
        self.behind.len() < MAX_BEHIND
            && self.held.len() < MAX_BEHIND
            && self.output().len() < LOW_WATER.saturating_mul(16)
    }

    /// Handles input of the client. After an error the session takes no more input; the caller may
    /// still send the [`output`](Self::output).
    pub fn receive(&mut self, mut input: &[u8], events: &mut Vec<Event>) -> Result<(), ProtocolError> {
        while self.stage != Stage::Normal {
            if !self.shake_hands(&mut input, events)? {
                return Ok(());
            }
        }
        while let Some(message) = self.parser.next(&mut input)? {
            self.act(message, events);
        }
        Ok(())
    }

    /// Bytes that are ready to be sent.
    pub fn output(&self) -> &[u8] {
        self.out.get(self.written..).unwrap_or_default()
    }

    /// So many bytes of [`output`](Self::output) were sent.
    pub fn sent(&mut self, count: usize) {
        self.written = self.written.saturating_add(count).min(self.out.len());
        if self.written == self.out.len() {
            self.written = 0;
            self.out.clear();
            // Frees the memory that one large piece needed.
            self.out.shrink_to(LOW_WATER);
        }
    }

    /// These parts of the picture are different.
    pub fn add_damage(&mut self, damage: &Damage) {
        self.damage.add_all(damage);
    }

    /// The picture has that size. If it is another one than before, all of it is different.
    pub fn resize(&mut self, size: Size) {
        if size != self.new_size {
            self.new_size = size;
            self.note_size();
            self.damage = Damage::all(self.size);
        }
    }

    /// The cursor is this one.
    pub fn set_cursor(&mut self, cursor: Arc<Cursor>) {
        self.cursor = cursor;
        self.due.cursor |= self.capabilities.cursor;
    }

    /// The keyboard's lights are these: bit 0 scroll lock, bit 1 num lock, bit 2 caps lock.
    pub fn set_leds(&mut self, leds: u8) {
        if leds != self.leds {
            self.leds = leds;
            self.due.leds |= self.capabilities.leds;
        }
    }

    /// Answers [`Event::Resize`]. The new size itself comes with [`resize`](Self::resize), if the guest takes it.
    pub fn answer_resize(&mut self, status: ResizeStatus) {
        if self.capabilities.extended_desktop_size {
            self.due.answer = Some(status);
        }
    }

    /// Returns whether the client waits for a confirmation that its messages have taken effect.
    /// [`took_effect`](Self::took_effect) confirms it.
    pub fn waits_for_effect(&self) -> bool {
        !self.held.is_empty()
    }

    /// All that the client has sent has taken effect.
    pub fn took_effect(&mut self) {
        let held = std::mem::take(&mut self.held);
        self.reply(&held);
    }

    /// Whether an update could begin, if there were something to say.
    pub fn accepts_update(&self) -> bool {
        self.area().is_some() && self.pieces.is_empty() && self.output().is_empty() && self.behind.is_empty()
    }

    /// Whether there is something to be said, and the client takes it.
    pub fn wants_update(&self) -> bool {
        self.accepts_update()
            && (!self.due.is_empty() || self.area().is_some_and(|area| self.damage.touches(area)))
    }

    /// Whether a part of the picture that moved can be told as such now: the client has all that it had before.
    pub fn accepts_move(&self, moved: Move) -> bool {
        let known = self.area().map(|area| area.intersection(self.size.rect()));
        let whole = known.is_some_and(|area| area.intersection(moved.to) == moved.to)
            && self.size.rect().intersection(moved.source()) == moved.source();
        self.accepts_update()
            && self.capabilities.copy_rect
            && !self.due.size
            && whole
            && !self.damage.touches(moved.source())
            && !self.damage.touches(moved.to)
    }

    /// Begins an update; `moved` is first, if there is one. Its pieces come with [`fill`](Self::fill).
    pub fn begin_update(&mut self, moved: Option<Move>) {
        let Some(area) = self.area() else { return };
        self.request = None;
        self.format = self.next_format.take().unwrap_or(self.format);
        let mut pseudo = Vec::new();
        let mut count = self.put_pseudo(&mut pseudo);
        // A change of the picture's size restarts the client with full damage.
        if self.size == self.new_size || !self.can_resize() {
            let copy = moved.map(|moved| Piece::Copy {
                to: moved.to,
                from: moved.from,
            });
            self.pieces.extend(copy);
            for rect in self.damage.take(area).rects() {
                self.pieces.extend(pieces(rect).map(Piece::Pixels));
            }
        } else {
            self.size = self.new_size;
            self.damage = Damage::all(self.size);
            // Continuous updates of a part cover the whole picture from here on.
            self.continuous = self.continuous.map(|_| self.size.rect());
        }
        count = count.saturating_add(u16::try_from(self.pieces.len()).unwrap_or(u16::MAX));
        self.out.extend_from_slice(&[0, 0]);
        self.out.extend_from_slice(&count.to_be_bytes());
        self.out.extend_from_slice(&pseudo);
        if self.continuous.is_some() && self.capabilities.fence {
            self.in_flight = self.in_flight.saturating_add(1);
            put_fence(FENCE_REQUEST | FENCE_BLOCK_BEFORE, &[], &mut self.behind);
        }
    }

    /// Encodes as much of the update as the client is likely to take soon.
    pub fn fill(&mut self, frame: &Frame) {
        while self.output().len() < LOW_WATER {
            let Some(piece) = self.pieces.pop_front() else {
                break;
            };
            match piece {
                Piece::Copy { to, from } => {
                    put_header(to, pseudo::COPY_RECT, &mut self.out);
                    self.out.extend_from_slice(&from.0.to_be_bytes());
                    self.out.extend_from_slice(&from.1.to_be_bytes());
                }
                Piece::Pixels(rect) => {
                    put_header(rect, self.encoding.number(), &mut self.out);
                    values(frame, rect, &self.format, &mut self.values);
                    let block = Block {
                        values: &self.values,
                        width: rect.width.into(),
                    };
                    self.encoders
                        .encode(self.encoding, block, &self.format, &mut self.out);
                }
            }
        }
        if self.pieces.is_empty() && !self.behind.is_empty() {
            self.out.append(&mut self.behind);
        }
    }

    /// The part of the picture that the client waits for.
    fn area(&self) -> Option<Rect> {
        let continuous = self.continuous.filter(|_| self.in_flight < MAX_IN_FLIGHT);
        (self.stage == Stage::Normal).then_some(())?;
        self.request.or(continuous)
    }

    fn can_resize(&self) -> bool {
        self.capabilities.desktop_size || self.capabilities.extended_desktop_size
    }

    fn note_size(&mut self) {
        self.due.size |= self.can_resize();
    }

    /// One step of the handshake; false when bytes are missing.
    fn shake_hands(&mut self, input: &mut &[u8], events: &mut Vec<Event>) -> Result<bool, ProtocolError> {
        let wanted = if self.stage == Stage::Version {
            handshake::VERSION.len()
        } else {
            1
        };
        let missing = wanted.saturating_sub(self.handshake.len());
        let (now, rest) = input.split_at_checked(missing).unwrap_or((*input, &[]));
        self.handshake.extend_from_slice(now);
        *input = rest;
        if self.handshake.len() < wanted {
            return Ok(false);
        }
        let message = std::mem::take(&mut self.handshake);
        let first = message.first().copied().unwrap_or(0);
        match self.stage {
            Stage::Version => match handshake::minor_version(&message).ok_or(ProtocolError::Version)? {
                ..=6 => {
                    self.out
                        .extend_from_slice(&u32::from(SECURITY_NONE).to_be_bytes());
                    self.stage = Stage::ClientInit;
                }
                minor => {
                    self.out.extend_from_slice(&[1, SECURITY_NONE]);
                    self.stage = Stage::Security { results: minor >= 8 };
                }
            },
            Stage::Security { results } if first == SECURITY_NONE => {
                if results {
                    self.out.extend_from_slice(&[0; 4]);
                }
                self.stage = Stage::ClientInit;
            }
            Stage::Security { results } => {
                if results {
                    let reason = b"this security type was not offered";
                    self.out.extend_from_slice(&[0, 0, 0, 1]);
                    put_text(reason, &mut self.out);
                }
                return Err(ProtocolError::Security(first));
            }
            Stage::ClientInit => {
                self.put_server_init();
                self.stage = Stage::Normal;
                events.push(Event::Ready { shared: first != 0 });
            }
            Stage::Normal => {}
        }
        Ok(true)
    }

    fn put_server_init(&mut self) {
        // The picture may have got another size since the client connected.
        self.size = self.new_size;
        self.damage = Damage::all(self.size);
        self.due.size = false;
        self.out.extend_from_slice(&self.size.width().to_be_bytes());
        self.out.extend_from_slice(&self.size.height().to_be_bytes());
        self.out.extend_from_slice(&PixelFormat::NATIVE.encode());
        put_text(self.name.as_bytes(), &mut self.out);
    }

    fn act(&mut self, message: ClientMessage, events: &mut Vec<Event>) {
        match message {
            ClientMessage::PixelFormat(format, indexed) => self.set_format(format, indexed),
            ClientMessage::EncodingsBegin => {
                self.announced = Capabilities::default();
                self.chosen = None;
            }
            ClientMessage::Encoding(number) => self.note_encoding(number),
            ClientMessage::EncodingsEnd => self.apply_encodings(),
            ClientMessage::UpdateRequest { incremental, area } => self.note_request(incremental, area),
            ClientMessage::ContinuousUpdates { enable, area } => {
                if enable {
                    self.continuous = Some(area);
                } else if self.continuous.take().is_some() {
                    self.reply(&[MESSAGE_END_OF_CONTINUOUS_UPDATES]);
                }
            }
            ClientMessage::Fence { flags, payload } => {
                if flags & FENCE_REQUEST == 0 {
                    self.in_flight = self.in_flight.saturating_sub(1);
                } else {
                    let known = FENCE_BLOCK_BEFORE | FENCE_BLOCK_AFTER | FENCE_SYNC_NEXT;
                    let mut reply = Vec::new();
                    put_fence(flags & known, &payload, &mut reply);
                    if flags & FENCE_BLOCK_BEFORE == 0 {
                        self.reply(&reply);
                    } else {
                        self.held.append(&mut reply);
                    }
                }
            }
            ClientMessage::Key { down, keysym } => events.push(Event::Key { down, keysym }),
            ClientMessage::ExtendedKey { down, scancode, .. } => {
                events.push(Event::Scancode { down, scancode });
            }
            ClientMessage::Pointer { buttons, x, y } => events.push(Event::Pointer {
                buttons,
                x,
                y,
                size: self.size,
            }),
            ClientMessage::DesktopSize {
                width,
                height,
                screens,
            } => events.push(Event::Resize {
                width,
                height,
                screens,
            }),
        }
    }

    fn note_request(&mut self, incremental: bool, area: Rect) {
        if incremental && self.continuous.is_some() {
            return;
        }
        if !incremental {
            self.damage.add(area);
            // A client that restarts may have lost these as well.
            self.due.cursor |= self.capabilities.cursor;
            self.due.size |= self.capabilities.extended_desktop_size;
        }
        self.request = Some(self.request.map_or(area, |before| hull(before, area)));
    }

    /// Sets the pixel format from the next update on. The update under way keeps the old format,
    /// because the client cannot distinguish the rectangles.
    fn set_format(&mut self, format: PixelFormat, indexed: bool) {
        self.next_format = Some(format);
        if indexed {
            self.reply(&pixel::colour_map());
        }
        self.due.cursor |= self.capabilities.cursor;
    }

    fn note_encoding(&mut self, number: i32) {
        let announced = &mut self.announced;
        match number {
            pseudo::COPY_RECT => announced.copy_rect = true,
            pseudo::DESKTOP_SIZE => announced.desktop_size = true,
            pseudo::EXTENDED_DESKTOP_SIZE => announced.extended_desktop_size = true,
            pseudo::CURSOR => announced.cursor = true,
            pseudo::DESKTOP_NAME => announced.desktop_name = true,
            pseudo::QEMU_KEYS => announced.qemu_keys = true,
            pseudo::QEMU_LEDS => announced.leds = true,
            pseudo::FENCE => announced.fence = true,
            pseudo::CONTINUOUS_UPDATES => announced.continuous_updates = true,
            other => self.chosen = self.chosen.or_else(|| Encoding::from_number(other)),
        }
    }

    fn apply_encodings(&mut self) {
        let (old, new) = (self.capabilities, self.announced);
        self.capabilities = new;
        self.encoding = self.chosen.unwrap_or_default();
        if new.fence && !old.fence {
            let mut fence = Vec::new();
            put_fence(FENCE_REQUEST, &[], &mut fence);
            // Its answer counts as one of an update.
            self.in_flight = self.in_flight.saturating_add(1);
            self.reply(&fence);
        }
        if new.continuous_updates && !old.continuous_updates {
            self.reply(&[MESSAGE_END_OF_CONTINUOUS_UPDATES]);
        }
        self.due.qemu_keys |= new.qemu_keys && !old.qemu_keys;
        self.due.leds |= new.leds && !old.leds;
        self.due.name |= new.desktop_name && !old.desktop_name;
        self.due.cursor |= new.cursor && !old.cursor;
        if (new.extended_desktop_size && !old.extended_desktop_size) || self.size != self.new_size {
            self.note_size();
        }
    }

    /// Sends a message, behind the update that is under way.
    fn reply(&mut self, message: &[u8]) {
        let queue = if self.pieces.is_empty() && self.behind.is_empty() {
            &mut self.out
        } else {
            &mut self.behind
        };
        queue.extend_from_slice(message);
    }

    /// Appends the pseudo-rectangles that are due; gives their number.
    fn put_pseudo(&mut self, out: &mut Vec<u8>) -> u16 {
        let due = std::mem::take(&mut self.due);
        let mut count: u16 = 0;
        let mut begin = |rect: Rect, number: i32, out: &mut Vec<u8>| {
            put_header(rect, number, out);
            count = count.saturating_add(1);
        };
        if due.qemu_keys {
            begin(Rect::default(), pseudo::QEMU_KEYS, out);
        }
        if due.leds {
            begin(Rect::default(), pseudo::QEMU_LEDS, out);
            out.push(self.leds);
        }
        if due.name {
            begin(Rect::default(), pseudo::DESKTOP_NAME, out);
            put_text(self.name.as_bytes(), out);
        }
        if due.cursor {
            let cursor = &*self.cursor;
            let (x, y) = cursor.hotspot;
            begin(Rect::new(x, y, cursor.width, cursor.height), pseudo::CURSOR, out);
            put_cursor(cursor, &self.format, out);
        }
        let mut begin_size = |reason: u16, status: u8, size: Size, out: &mut Vec<u8>| {
            let (width, height) = (size.width(), size.height());
            let rect = Rect::new(reason, status.into(), width, height);
            begin(rect, pseudo::EXTENDED_DESKTOP_SIZE, out);
            // One screen, padding; its id, place, size and flags.
            out.extend_from_slice(&[1, 0, 0, 0]);
            out.extend_from_slice(&[0; 8]);
            out.extend_from_slice(&width.to_be_bytes());
            out.extend_from_slice(&height.to_be_bytes());
            out.extend_from_slice(&[0; 4]);
        };
        if let Some(status) = due.answer {
            begin_size(1, status as u8, self.size, out);
        }
        if due.size {
            let (width, height) = (self.new_size.width(), self.new_size.height());
            if self.capabilities.extended_desktop_size {
                begin_size(0, 0, self.new_size, out);
            } else if self.size != self.new_size {
                begin(Rect::new(0, 0, width, height), pseudo::DESKTOP_SIZE, out);
            }
        }
        count
    }
}

/// The least rectangle that has both.
fn hull(a: Rect, b: Rect) -> Rect {
    let (x, y) = (a.x.min(b.x), a.y.min(b.y));
    let span = |end: u32, begin: u16| u16::try_from(end.saturating_sub(begin.into())).unwrap_or(u16::MAX);
    let (right, bottom) = (a.right().max(b.right()), a.bottom().max(b.bottom()));
    Rect::new(x, y, span(right, x), span(bottom, y))
}

/// Cuts a rectangle into pieces of a bounded number of pixels, whose corners are on the tiles of all encodings.
fn pieces(rect: Rect) -> impl Iterator<Item = Rect> {
    let width = rect.width.clamp(1, MAX_PIECE_WIDTH);
    let rows = PIECE_PIXELS.checked_div(width).unwrap_or(1) & !63;
    let (columns, rows) = (usize::from(width), usize::from(rows.max(64)));
    let (right, bottom) = (rect.right(), rect.bottom());
    let size = |at: u16, end: u32, most: usize| {
        let left = end.saturating_sub(at.into());
        u16::try_from(left)
            .unwrap_or(u16::MAX)
            .min(u16::try_from(most).unwrap_or(u16::MAX))
    };
    let ends = |begin: u16, end: u32| begin..u16::try_from(end).unwrap_or(u16::MAX);
    ends(rect.y, bottom).step_by(rows).flat_map(move |y| {
        ends(rect.x, right)
            .step_by(columns)
            .map(move |x| Rect::new(x, y, size(x, right, columns), size(y, bottom, rows)))
    })
}

/// Collects the pixels of `rect` in the client's format; pixels outside the frame are black.
fn values(frame: &Frame, rect: Rect, format: &PixelFormat, values: &mut Vec<u32>) {
    values.clear();
    values.reserve(rect.pixels());
    let black = format.convert(0);
    for y in rect.y..rect.y.saturating_add(rect.height) {
        let row = frame.row(rect, y);
        format.convert_all(row, values);
        values.extend(std::iter::repeat_n(
            black,
            usize::from(rect.width).saturating_sub(row.len()),
        ));
    }
}

fn put_header(rect: Rect, encoding: i32, out: &mut Vec<u8>) {
    for field in [rect.x, rect.y, rect.width, rect.height] {
        out.extend_from_slice(&field.to_be_bytes());
    }
    out.extend_from_slice(&encoding.to_be_bytes());
}

fn put_text(text: &[u8], out: &mut Vec<u8>) {
    out.extend_from_slice(&u32::try_from(text.len()).unwrap_or(0).to_be_bytes());
    out.extend_from_slice(text);
}

fn put_fence(flags: u32, payload: &[u8], out: &mut Vec<u8>) {
    out.extend_from_slice(&[MESSAGE_FENCE, 0, 0, 0]);
    out.extend_from_slice(&flags.to_be_bytes());
    out.push(u8::try_from(payload.len()).unwrap_or(0));
    out.extend_from_slice(payload);
}

/// Pixels and bitmask of a cursor (7.8.1). Pixels that are less than half opaque are not there.
fn put_cursor(cursor: &Cursor, format: &PixelFormat, out: &mut Vec<u8>) {
    for pixel in &cursor.pixels {
        format.put(&[format.convert(pixel & 0x00ff_ffff)], out);
    }
    if cursor.width == 0 {
        return;
    }
    for row in cursor.pixels.chunks(cursor.width.into()) {
        for part in row.chunks(8) {
            let bit =
                |(at, pixel): (u32, &u32)| u8::from(pixel >> 31 == 1).wrapping_shl(7_u32.wrapping_sub(at));
            out.push((0..).zip(part).map(bit).fold(0, |byte, bit| byte | bit));
        }
    }
}
