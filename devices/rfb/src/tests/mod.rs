mod hostile;
mod pictures;
mod protocol;

use std::sync::Arc;

use crate::{
    Cursor, Damage, Frame, Rect, Size,
    encode::Encoding,
    message::MAX_BUFFERED,
    session::{Event, Move, ProtocolError, ResizeStatus, Session},
    testing::{Decoder, decoder, paint, painted, pattern, size},
};

/// A client that is through with its handshake, and the server's half of it.
struct Pair {
    session: Session,
    decoder: Decoder,
    frame: Frame,
    events: Vec<Event>,
}

impl Pair {
    fn new(frame: Frame, encodings: &[i32]) -> Self {
        let mut pair = Self {
            session: Session::new("screen of a test", frame.size()),
            decoder: Decoder::default(),
            frame,
            events: Vec::new(),
        };
        pair.send(b"RFB 003.008\n\x01\x01");
        pair.pump();
        pair.send(&decoder::set_encodings(encodings));
        pair
    }

    fn send(&mut self, bytes: &[u8]) {
        self.session.receive(bytes, &mut self.events).unwrap();
    }

    fn format(&mut self, raw: [u8; 16]) {
        self.send(&[&[0, 0, 0, 0][..], &raw[..]].concat());
        self.decoder.format = raw;
    }

    /// Lets the server send all that it has to say.
    fn pump(&mut self) {
        for _ in 0..10_000 {
            if self.session.wants_update() {
                self.session.begin_update(None);
            }
            self.session.took_effect();
            self.session.fill(&self.frame);
            let output = self.session.output().to_vec();
            if output.is_empty() {
                return;
            }
            self.session.sent(output.len());
            let replies = self.decoder.receive(&output);
            if !replies.is_empty() {
                self.send(&replies);
            }
        }
        panic!("the server does not stop to send");
    }

    fn request(&mut self, incremental: bool) {
        let area = self.session_size().rect();
        self.send(&decoder::request(incremental, area));
        self.pump();
    }

    fn session_size(&self) -> Size {
        let (width, height) = self.decoder.size;
        size(width.into(), height.into())
    }

    /// The picture is another one, of which that is different.
    fn show(&mut self, frame: Frame, damage: &Damage) {
        if frame.size() != self.frame.size() {
            self.session.resize(frame.size());
        }
        self.frame = frame;
        self.session.add_damage(damage);
    }

    /// Checks that the client's picture equals the server's, within the precision of the client's
    /// format.
    fn assert_same(&self, what: &str) {
        let expected: Vec<u32> = self
            .frame
            .pixels()
            .iter()
            .map(|pixel| decoder::expected(&self.decoder.format, *pixel))
            .collect();
        assert_eq!(self.decoder.pixels.len(), expected.len(), "{what}");
        if let Some(at) = (0..expected.len()).find(|at| expected[*at] != self.decoder.pixels[*at]) {
            let width = usize::from(self.frame.size().width());
            panic!(
                "{what}: pixel {}, {} is {:#x} instead of {:#x}",
                at % width,
                at / width,
                self.decoder.pixels[at],
                expected[at]
            );
        }
    }
}
