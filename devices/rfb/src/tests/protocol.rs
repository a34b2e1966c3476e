use rstest::rstest;

use super::*;

/// Sends the bytes in pieces of that length; returns the server's output after all pieces.
fn talk(session: &mut Session, bytes: &[u8], piece: usize) -> Result<Vec<u8>, ProtocolError> {
    let (mut said, mut events) = (Vec::new(), Vec::new());
    for part in bytes.chunks(piece) {
        session.receive(part, &mut events)?;
        said.extend(session.output());
        session.sent(usize::MAX);
    }
    Ok(said)
}

#[rstest]
#[case::rfb_3_3(b"RFB 003.003\n\x01", &[0, 0, 0, 1])]
#[case::apple_s_3_889(b"RFB 003.889\n\x01\x01", &[1, 1, 0, 0, 0, 0])]
#[case::rfb_3_5_is_3_3(b"RFB 003.005\n\x01", &[0, 0, 0, 1])]
#[case::rfb_3_7(b"RFB 003.007\n\x01\x01", &[1, 1])]
#[case::rfb_3_8(b"RFB 003.008\n\x01\x01", &[1, 1, 0, 0, 0, 0])]
#[case::newer(b"RFB 004.001\n\x01\x01", &[1, 1, 0, 0, 0, 0])]
fn each_version_has_its_handshake(#[case] client: &[u8], #[case] server: &[u8]) {
    for piece in [1, 3, 100] {
        let mut session = Session::new("a", size(640, 480));
        let said = talk(&mut session, client, piece).unwrap();
        let init = [
            2, 128, 1, 224, 32, 24, 0, 1, 0, 255, 0, 255, 0, 255, 16, 8, 0, 0, 0, 0, 0, 0, 0, 1, b'a',
        ];
        assert_eq!(said, [b"RFB 003.008\n", server, &init].concat());
        assert!(session.is_ready());
    }
}

#[test]
fn who_does_not_speak_rfb_or_wants_another_security_type_is_refused() {
    for hello in [
        &b"GET / HTTP/1"[..],
        b"RFB 002.008\n",
        b"RFB 003.002\n",
        b"RFB 00x.008\n",
        b"RFB 003 008\n",
        &[0xff; 12],
    ] {
        let mut session = Session::new("a", size(640, 480));
        assert_eq!(
            talk(&mut session, hello, 5),
            Err(ProtocolError::Version),
            "{hello:?}"
        );
    }
    let mut session = Session::new("a", size(640, 480));
    assert_eq!(
        talk(&mut session, b"RFB 003.008\n\x02", 99),
        Err(ProtocolError::Security(2))
    );
    let said = session.output();
    assert!(
        said.windows(4).any(|part| part == [0, 0, 0, 1]),
        "with a result and a reason: {said:?}"
    );
}

#[test]
fn keys_and_pointer_come_through_whole_or_in_pieces() {
    let mut session = Session::new("a", size(640, 480));
    let mut messages = b"RFB 003.008\n\x01\x00".to_vec();
    messages.extend([4, 1, 0, 0, 0, 0, 0, 0x41]);
    messages.extend([5, 3, 1, 0, 0, 200]);
    messages.extend([255, 0, 0, 1, 0, 0, 0, 0x41, 0, 0, 0, 0x1e]);
    messages.extend([6, 0, 0, 0, 0, 0, 0, 5]);
    messages.extend(b"hello");
    messages.extend([4, 0, 0, 0, 0, 0, 0, 0x41]);
    messages.extend([251, 0, 3, 32, 2, 88, 1, 0]);
    messages.extend([0; 16]);
    let expected = [
        Event::Ready { shared: false },
        Event::Key {
            down: true,
            keysym: 0x41,
        },
        Event::Pointer {
            buttons: 3,
            x: 256,
            y: 200,
            size: size(640, 480),
        },
        Event::Scancode {
            down: true,
            scancode: 0x1e,
        },
        Event::Key {
            down: false,
            keysym: 0x41,
        },
        Event::Resize {
            width: 800,
            height: 600,
            screens: 1,
        },
    ];
    for piece in [1, 2, 7, 1000] {
        let mut session = Session::new("a", size(640, 480));
        let mut events = Vec::new();
        for part in messages.chunks(piece) {
            session.receive(part, &mut events).unwrap();
        }
        assert_eq!(events, expected, "in pieces of {piece}");
    }
    session.receive(&messages, &mut Vec::new()).unwrap();
}

#[test]
fn extensions_are_confirmed_to_those_who_have_them() {
    let mut pair = Pair::new(pattern(size(64, 64), 0), &[-258, -261, -307, -308, -312, -313]);
    pair.session.set_leds(2);
    pair.request(false);
    let decoder = &pair.decoder;
    assert!(decoder.qemu_keys);
    assert_eq!(decoder.leds, Some(2));
    assert_eq!(decoder.name, "screen of a test");
    assert_eq!(decoder.sizes, [(0, 0, 64, 64)]);
    assert_eq!((decoder.fences.len(), decoder.ends_of_continuous), (1, 1));
    // Later updates contain only changes.
    pair.session.set_leds(6);
    pair.request(true);
    assert_eq!(pair.decoder.leds, Some(6));
    assert_eq!(pair.decoder.sizes.len(), 1);
    // A client without extensions receives no extension messages.
    let mut plain = Pair::new(pattern(size(64, 64), 0), &[]);
    plain.session.set_leds(1);
    plain.session.set_cursor(Arc::default());
    plain.request(false);
    assert!(plain.decoder.encodings.iter().all(|encoding| *encoding == 0));
    assert!(plain.decoder.fences.is_empty());
}

#[test]
fn fences_are_answered_in_order_with_their_payload() {
    let mut pair = Pair::new(pattern(size(64, 64), 0), &[-312]);
    let mut fence = vec![248, 0, 0, 0, 0x80, 0, 0, 0xff, 3];
    fence.extend(b"abc");
    pair.send(&fence);
    pair.pump();
    assert_eq!(pair.decoder.fences.last().unwrap(), &(7, b"abc".to_vec()));
}

#[test]
fn continuous_updates_come_unasked_until_they_are_ended_and_no_faster_than_fences_are_answered() {
    let mut pair = Pair::new(pattern(size(64, 64), 0), &[7, -312, -313]);
    let all = Damage::all(size(64, 64));
    let enable = |on: u8| [150, on, 0, 0, 0, 0, 0, 64, 0, 64];
    pair.send(&enable(1));
    pair.pump();
    pair.assert_same("unasked");
    for seed in 1..5 {
        pair.show(pattern(size(64, 64), seed), &all);
        pair.pump();
        pair.assert_same("unasked again");
    }
    // A client that does not get so far.
    pair.decoder.answers_fences = false;
    let before = pair.decoder.updates;
    for seed in 5..15 {
        pair.show(pattern(size(64, 64), seed), &all);
        pair.pump();
    }
    assert_eq!(pair.decoder.updates, before + 2);
    // When it answers it gets the latest picture, and none of those in between.
    for _ in 0..2 {
        pair.send(&[248, 0, 0, 0, 0, 0, 0, 1, 0]);
    }
    pair.pump();
    assert_eq!(pair.decoder.updates, before + 3);
    pair.assert_same("the latest");
    pair.send(&enable(0));
    pair.pump();
    assert_eq!(pair.decoder.ends_of_continuous, 2);
    pair.show(pattern(size(64, 64), 99), &all);
    pair.pump();
    assert_eq!(pair.decoder.updates, before + 3);
}

#[rstest]
#[case::desktop_size(-223)]
#[case::extended_desktop_size(-308)]
fn a_client_that_can_follows_the_size_of_the_screen(#[case] capability: i32) {
    let mut pair = Pair::new(pattern(size(100, 100), 0), &[16, capability]);
    pair.request(false);
    for (width, height) in [(200, 150), (33, 300), (100, 100)] {
        pair.show(pattern(size(width, height), 1), &Damage::all(size(width, height)));
        pair.request(true);
        assert_eq!(pair.decoder.size, (width as u16, height as u16));
        pair.request(false);
        pair.assert_same("after the size has changed");
    }
}

#[test]
fn a_client_that_cannot_follow_the_size_sees_what_fits_and_black() {
    let mut pair = Pair::new(pattern(size(100, 100), 0), &[16]);
    pair.request(false);
    pair.show(pattern(size(60, 200), 1), &Damage::all(size(60, 200)));
    pair.request(true);
    assert_eq!(pair.decoder.size, (100, 100));
    let frame = pattern(size(60, 200), 1);
    for y in 0..100 {
        for x in 0..100 {
            let expected = if x < 60 { frame.pixels()[y * 60 + x] } else { 0 };
            assert_eq!(pair.decoder.pixels[y * 100 + x], expected, "{x}, {y}");
        }
    }
}

#[test]
fn a_client_is_told_what_became_of_its_wish_for_another_size() {
    let mut pair = Pair::new(pattern(size(100, 100), 0), &[-308]);
    pair.request(false);
    for (status, number) in [
        (ResizeStatus::Prohibited, 1),
        (ResizeStatus::Invalid, 3),
        (ResizeStatus::Forwarded, 4),
    ] {
        pair.session.answer_resize(status);
        pair.request(true);
        assert_eq!(pair.decoder.sizes.last().unwrap(), &(1, number, 100, 100));
    }
}

#[test]
fn a_wish_that_is_answered_hides_no_new_size() {
    for answer_first in [false, true] {
        let mut pair = Pair::new(pattern(size(100, 100), 0), &[-308]);
        pair.request(false);
        if answer_first {
            pair.session.answer_resize(ResizeStatus::Forwarded);
        }
        pair.show(pattern(size(60, 50), 1), &Damage::all(size(60, 50)));
        if !answer_first {
            pair.session.answer_resize(ResizeStatus::Forwarded);
        }
        let told = pair.decoder.sizes.len();
        pair.request(true);
        assert_eq!(pair.decoder.sizes[told..], [(1, 4, 100, 100), (0, 0, 60, 50)]);
        pair.request(false);
        pair.assert_same("after the new size");
    }
}

#[test]
fn a_client_that_takes_nothing_costs_a_bounded_amount_and_then_gets_the_latest_picture() {
    let mut pair = Pair::new(pattern(size(1920, 1080), 7), &[0]);
    pair.pump();
    let all = Damage::all(size(1920, 1080));
    pair.send(&decoder::request(false, size(1920, 1080).rect()));
    pair.session.begin_update(None);
    pair.session.fill(&pair.frame);
    for seed in 8..12 {
        pair.frame = pattern(size(1920, 1080), seed);
        pair.session.add_damage(&all);
        pair.send(&decoder::request(true, size(1920, 1080).rect()));
        assert!(!pair.session.wants_update());
        pair.session.fill(&pair.frame);
        assert!(
            pair.session.output().len() < 1 << 20,
            "{}",
            pair.session.output().len()
        );
    }
    let updates = pair.decoder.updates;
    pair.pump();
    pair.assert_same("the latest");
    assert_eq!(pair.decoder.updates, updates + 2);
}

#[test]
fn the_format_of_an_update_that_is_under_way_stays() {
    let mut pair = Pair::new(pattern(size(500, 500), 7), &[0]);
    pair.pump();
    pair.send(&decoder::request(false, size(500, 500).rect()));
    pair.session.begin_update(None);
    let wide = [16, 16, 0, 1, 0, 31, 0, 63, 0, 31, 11, 5, 0, 0, 0, 0];
    pair.send(&[&[0, 0, 0, 0][..], &wide[..]].concat());
    pair.pump();
    pair.assert_same("the old format");
    pair.decoder.format = wide;
    pair.request(false);
    pair.assert_same("the new format");
}
