use super::*;

fn ready() -> Session {
    let mut session = Session::new("a", size(64, 64));
    session
        .receive(b"RFB 003.008\n\x01\x01", &mut Vec::new())
        .unwrap();
    session.sent(usize::MAX);
    session
}

#[test]
fn a_clipboard_of_4_gib_is_thrown_away_as_it_comes() {
    let mut session = ready();
    let mut events = Vec::new();
    session
        .receive(&[6, 0, 0, 0, 0xff, 0xff, 0xff, 0xff], &mut events)
        .unwrap();
    // Not all of it is worth the test's time; what looks like a message is none.
    for _ in 0..64 {
        session.receive(&[4; 1 << 16], &mut events).unwrap();
    }
    assert_eq!(events, []);
}

#[test]
fn all_encodings_that_can_be_named_are_read_without_being_kept() {
    let mut session = ready();
    let mut message = vec![2, 0, 0xff, 0xff];
    message.extend((0..65535_i32).flat_map(|number| (number - 400).to_be_bytes()));
    session.receive(&message, &mut Vec::new()).unwrap();
    session.receive(&[2, 0, 0, 0], &mut Vec::new()).unwrap();
    let mut events = Vec::new();
    session.receive(&[5, 0, 0, 1, 0, 2], &mut events).unwrap();
    assert_eq!(events.len(), 1, "the next message is understood");
}

#[test]
fn unknown_messages_and_those_that_make_no_sense_end_the_connection() {
    for message in [
        &[1][..],
        &[7],
        &[99],
        &[252, 0, 1, 2],
        &[255, 1],
        &[248, 0, 0, 0, 0, 0, 0, 0, 65],
        &[
            0, 0, 0, 0, 24, 24, 0, 1, 0, 255, 0, 255, 0, 255, 16, 8, 0, 0, 0, 0,
        ],
    ] {
        let error = ready().receive(message, &mut Vec::new()).unwrap_err();
        assert!(matches!(error, ProtocolError::Message(_)), "{message:?}");
    }
}

#[test]
fn a_client_that_floods_without_reading_is_not_listened_to_any_more() {
    // With BlockBefore, and without.
    for flags in [7, 6] {
        let mut session = ready();
        let mut fence = vec![248, 0, 0, 0, 0x80, 0, 0, flags, 64];
        fence.extend([7; 64]);
        let mut sent = 0;
        while session.listens() {
            session.receive(&fence, &mut Vec::new()).unwrap();
            sent += fence.len();
            assert!(sent < 4 << 20, "the replies pile up");
        }
        session.took_effect();
        session.sent(usize::MAX);
        assert!(session.listens());
    }
}

#[test]
fn requests_for_parts_that_are_not_there_do_no_harm() {
    let mut pair = Pair::new(pattern(size(64, 64), 0), &[16, 1]);
    for area in [
        Rect::new(0, 0, 0, 0),
        Rect::new(64, 64, 1, 1),
        Rect::new(u16::MAX, u16::MAX, u16::MAX, u16::MAX),
        Rect::new(10, 10, u16::MAX, 1),
    ] {
        pair.send(&decoder::request(false, area));
        pair.pump();
    }
    pair.request(false);
    pair.assert_same("afterwards");
}

#[test]
fn no_message_is_kept_that_is_longer_than_the_longest() {
    let mut session = ready();
    let mut message = vec![251, 0, 4, 0, 3, 0, 255, 0];
    message.resize(MAX_BUFFERED, 0);
    let mut events = Vec::new();
    for byte in &message {
        session.receive(&[*byte], &mut events).unwrap();
    }
    let expected = Event::Resize {
        width: 1024,
        height: 768,
        screens: 255,
    };
    assert_eq!(events, [expected]);
}

#[test]
fn each_encoding_has_the_number_that_it_is_found_by() {
    for encoding in [Encoding::Raw, Encoding::Hextile, Encoding::Zrle, Encoding::Tight] {
        assert_eq!(Encoding::from_number(encoding.number()), Some(encoding));
    }
    assert_eq!(Encoding::from_number(2), None);
}
