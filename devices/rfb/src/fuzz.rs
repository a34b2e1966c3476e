//! Arbitrary bytes as input from a hostile client.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::arithmetic_side_effects
)]

use std::sync::Arc;

use crate::{
    Cursor, Damage, Frame, Rect, Size,
    session::{Event, Move, ResizeStatus, Session},
};

/// The entry function. The first byte says whether the client is through with its handshake, and each message's first byte
/// what happens on the server meanwhile. It panics if the server keeps more than it may, sends without end, or panics itself.
pub fn client(data: &[u8]) {
    let Some((setting, mut rest)) = data.split_first() else {
        return;
    };
    let mut size = Size::new(80, 60).unwrap();
    let mut frame = Frame::black(size);
    let mut session = Session::new("fuzz", size);
    let mut events = Vec::new();
    if setting & 1 == 1 {
        let encodings = [
            2, 0, 0, 5, 0, 0, 0, 1, 0xff, 0xff, 0xff, 0x11, 0xff, 0xff, 0xfe, 0xcc,
        ];
        session.receive(b"RFB 003.008\n\x01\x01", &mut events).unwrap();
        session.receive(&encodings, &mut events).unwrap();
        session
            .receive(&[0xff, 0xff, 0xfe, 0xc8, 0xff, 0xff, 0xfe, 0xc7], &mut events)
            .unwrap();
    }
    while let Some((happens, input)) = rest.split_first() {
        let length = usize::from(happens >> 4).min(input.len());
        let (now, later) = input.split_at(length);
        rest = later;
        if session.listens() && session.receive(now, &mut events).is_err() {
            return;
        }
        for event in events.drain(..) {
            if let Event::Resize { .. } = event {
                session.answer_resize(ResizeStatus::Forwarded);
            }
        }
        if session.waits_for_effect() && happens & 8 == 0 {
            session.took_effect();
        }
        match happens & 7 {
            0 => {
                size = Size::new(16 + u32::try_from(rest.len()).unwrap() % 100, 33).unwrap();
                frame = Frame::black(size);
                session.resize(size);
            }
            1 => session.set_cursor(Arc::new(Cursor {
                width: 3,
                height: 1,
                hotspot: (0, 0),
                pixels: vec![u32::MAX; 3],
            })),
            2 => {
                let moved = Move {
                    to: Rect::new(0, 0, size.width(), 16),
                    from: (0, 8),
                };
                if session.accepts_move(moved) {
                    session.begin_update(Some(moved));
                }
            }
            3 => session.set_leds(*happens),
            4 => session.sent(session.output().len() / 2),
            _ => session.add_damage(&Damage::all(size)),
        }
        if session.wants_update() {
            session.begin_update(None);
        }
        session.fill(&frame);
        if happens & 8 == 0 {
            session.sent(usize::MAX);
        }
        assert!(session.output().len() < 2 << 20);
    }
    // The rest of the output ends once the client takes it.
    for _ in 0..1000 {
        if session.output().is_empty() {
            return;
        }
        session.sent(usize::MAX);
        session.fill(&frame);
    }
    panic!("the server sends without end");
}
