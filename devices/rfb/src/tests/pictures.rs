use rstest::rstest;

use super::*;

/// Bits, big-endian, largest values, shifts.
type Format = (u8, bool, [u16; 3], [u8; 3]);

fn raw((bits, big_endian, maxes, shifts): Format) -> [u8; 16] {
    let depth = if bits == 32 { 24 } else { bits };
    let mut raw = [0; 16];
    raw[..4].copy_from_slice(&[bits, depth, big_endian.into(), 1]);
    for (at, max) in maxes.into_iter().enumerate() {
        raw[4 + 2 * at..6 + 2 * at].copy_from_slice(&max.to_be_bytes());
    }
    raw[10..13].copy_from_slice(&shifts);
    raw
}

const FORMATS: [Format; 9] = [
    (32, false, [255; 3], [16, 8, 0]),
    (32, true, [255; 3], [16, 8, 0]),
    (32, false, [255; 3], [24, 16, 8]),
    (32, true, [255; 3], [8, 16, 24]),
    (32, false, [255; 3], [0, 12, 24]),
    (32, true, [127, 255, 63], [1, 8, 16]),
    (16, false, [31, 63, 31], [11, 5, 0]),
    (16, true, [31, 31, 31], [10, 5, 0]),
    (8, false, [7, 7, 3], [5, 2, 0]),
];

#[rstest]
#[case::raw(0)]
#[case::hextile(5)]
#[case::zrle(16)]
#[case::tight(7)]
fn a_picture_arrives_bit_for_bit_in_every_pixel_format(#[case] encoding: i32) {
    for format in FORMATS {
        let mut pair = Pair::new(pattern(size(401, 303), 0), &[encoding]);
        pair.format(raw(format));
        pair.request(false);
        pair.assert_same(&format!("{encoding}, {format:?}"));
        assert!(pair.decoder.encodings.iter().all(|used| *used == encoding));
        // The streams of the encodings continue.
        for seed in 1..4 {
            let all = Damage::all(pair.frame.size());
            pair.show(pattern(size(401, 303), seed), &all);
            pair.request(true);
            pair.assert_same(&format!("{encoding}, {format:?}, picture {seed}"));
        }
    }
}

#[rstest]
#[case::raw(0)]
#[case::hextile(5)]
#[case::zrle(16)]
#[case::tight(7)]
fn pictures_of_any_size_arrive(#[case] encoding: i32) {
    for (width, height) in [
        (1, 1),
        (3, 1),
        (1, 70),
        (15, 17),
        (64, 64),
        (65, 129),
        (2049, 40),
        (4096, 3),
        (8192, 1),
    ] {
        let mut pair = Pair::new(pattern(size(width, height), 3), &[encoding]);
        pair.request(false);
        pair.assert_same(&format!("{encoding}, {width} × {height}"));
    }
}

#[test]
fn a_client_that_wants_a_colour_map_gets_one_and_indices_into_it() {
    let mut pair = Pair::new(pattern(size(100, 80), 0), &[0]);
    let mut format = raw((8, false, [0; 3], [0; 3]));
    format[3] = 0;
    pair.send(&[&[0, 0, 0, 0][..], &format[..]].concat());
    pair.decoder.format = raw((8, false, [7, 7, 3], [5, 2, 0]));
    pair.request(false);
    assert!(pair.decoder.colour_map.is_some());
    pair.assert_same("indices");
}

#[test]
fn only_what_has_changed_is_sent_to_a_client_that_asks_for_changes() {
    let before = pattern(size(640, 480), 0);
    let mut pair = Pair::new(before.clone(), &[16]);
    pair.request(false);
    let updates = pair.decoder.updates;
    pair.request(true);
    assert_eq!(pair.decoder.updates, updates, "nothing changed, nothing is said");
    let (mut frame, mut damage) = (before, Damage::none(size(640, 480)));
    let changed = Rect::new(320, 160, 10, 10);
    paint(&mut frame, changed, |_, row| row.fill(0x00_ff_00));
    damage.add(changed);
    pair.decoder.encodings.clear();
    pair.show(frame, &damage);
    pair.pump();
    assert_eq!(pair.decoder.updates, updates + 1, "the request waited for it");
    assert_eq!(pair.decoder.encodings, [16]);
    pair.assert_same("a small change");
}

#[test]
fn what_moved_is_told_as_moved_to_those_who_have_what_was_there() {
    let before = pattern(size(320, 200), 0);
    let mut pair = Pair::new(before.clone(), &[1, 7]);
    pair.request(false);
    let all = size(320, 200).rect();
    let after = painted(size(320, 200), |y, row| {
        row.copy_from_slice(before.row(all, (y + 16).min(199)));
    });
    let moved = Move {
        to: Rect::new(0, 0, 320, 184),
        from: (0, 16),
    };
    assert!(!pair.session.accepts_move(moved), "it did not ask");
    pair.send(&decoder::request(true, all));
    assert!(pair.session.accepts_move(moved));
    let mut rest = Damage::none(size(320, 200));
    rest.add(Rect::new(0, 184, 320, 16));
    pair.frame = after;
    pair.session.add_damage(&rest);
    pair.decoder.encodings.clear();
    pair.session.begin_update(Some(moved));
    pair.pump();
    assert_eq!(pair.decoder.encodings[0], 1);
    pair.assert_same("a move");
    // Not while something of it is still to be sent, and not to a client without CopyRect.
    pair.send(&decoder::request(true, all));
    pair.session.add_damage(&rest);
    assert!(!pair.session.accepts_move(moved));
    let mut plain = Pair::new(before, &[7]);
    plain.request(false);
    plain.send(&decoder::request(true, all));
    assert!(!plain.session.accepts_move(moved));
}

#[test]
fn a_cursor_is_sent_with_its_hotspot_and_its_mask() {
    let mut pair = Pair::new(pattern(size(64, 64), 0), &[7, -239]);
    let mut pixels = vec![0x00_12_34_56; 12 * 3];
    pixels[0] = 0xff_00_00_ff;
    pixels[11] = 0x80_ff_ff_ff;
    pixels[35] = 0xff_ff_00_00;
    pair.session.set_cursor(Arc::new(Cursor {
        width: 12,
        height: 3,
        hotspot: (5, 2),
        pixels,
    }));
    pair.request(true);
    let (rect, pixels, mask) = pair.decoder.cursor.take().unwrap();
    assert_eq!(rect, Rect::new(5, 2, 12, 3));
    assert_eq!((pixels[0], pixels[35]), (0x00_00_ff, 0xff_00_00));
    assert_eq!(mask, [0x80, 0x10, 0, 0, 0, 0x10]);
    // An invisible cursor.
    pair.session.set_cursor(Arc::default());
    pair.request(true);
    assert_eq!(pair.decoder.cursor.take().unwrap().0, Rect::default());
}
