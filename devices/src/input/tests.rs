use super::*;

/// Keyboard and tablet that record their events.
#[derive(Default)]
struct Notes {
    deaf: std::sync::atomic::AtomicBool,
    keys: Mutex<Vec<(u8, bool)>>,
    repeated: Mutex<Vec<u8>>,
    pointers: Mutex<Vec<Pointer>>,
}

impl Keyboard for Notes {
    fn is_listening(&self) -> bool {
        !self.deaf.load(std::sync::atomic::Ordering::SeqCst)
    }

    fn key(&self, key: Key, down: bool) {
        self.keys.lock().unwrap().push((key.code(), down));
    }

    fn is_waiting(&self) -> bool {
        false
    }

    fn repeat(&self, key: Key) {
        self.repeated.lock().unwrap().push(key.code());
    }
}

impl Tablet for Notes {
    fn point(&self, pointer: Pointer) {
        self.pointers.lock().unwrap().push(pointer);
    }
}

impl Notes {
    fn take(&self) -> Vec<(u8, bool)> {
        std::mem::take(&mut self.keys.lock().unwrap())
    }
}

fn hub(layout: Layout) -> (Arc<Hub>, Arc<Notes>) {
    let (hub, notes) = (Arc::new(Hub::new(layout)), Arc::new(Notes::default()));
    hub.add_keyboard(notes.clone());
    hub.set_tablet(notes.clone());
    (hub, notes)
}

const SHIFT: u8 = 42;
const ALT_GR: u8 = 100;
const SHIFT_L: u32 = 0xffe1;

#[test]
fn a_key_that_several_hold_is_released_by_the_last_one_and_by_one_that_goes() {
    let (hub, notes) = hub(Layout::Us);
    let (mut first, mut second) = (Hub::source(&hub), Hub::source(&hub));
    first.scancode(0x1e, true);
    second.scancode(0x1e, true);
    second.scancode(0x1e, true);
    first.scancode(0x1e, false);
    assert_eq!(notes.take(), [(30, true)]);
    drop(second);
    assert_eq!(notes.take(), [(30, false)]);
    first.scancode(0x1e, false);
    assert_eq!(notes.take(), []);
}

#[test]
fn keys_go_to_the_last_keyboard_that_is_listened_to_and_their_release_to_the_same() {
    let (hub, early) = hub(Layout::Us);
    let late = Arc::new(Notes::default());
    hub.add_keyboard(late.clone());
    late.deaf.store(true, std::sync::atomic::Ordering::SeqCst);
    let mut source = Hub::source(&hub);
    source.key(Key::ENTER, true);
    late.deaf.store(false, std::sync::atomic::Ordering::SeqCst);
    source.key(Key::ENTER, false);
    source.key(Key::ESC, true);
    assert_eq!(early.take(), [(28, true), (28, false)]);
    assert_eq!(late.take(), [(1, true)]);
}

#[test]
fn modifiers_are_made_to_fit_the_character() {
    let (hub, notes) = hub(Layout::Us);
    let mut source = Hub::source(&hub);
    // A client that sends the character without the modifier.
    source.keysym('A'.into(), true);
    assert_eq!(notes.take(), [(SHIFT, true), (30, true), (SHIFT, false)]);
    source.keysym('A'.into(), false);
    assert_eq!(notes.take(), [(30, false)]);
    // A client whose layout has the character with a modifier that this one must not have.
    source.keysym(SHIFT_L, true);
    source.keysym('/'.into(), true);
    source.keysym('/'.into(), false);
    source.keysym(SHIFT_L, false);
    let expected = [
        (SHIFT, true),
        (SHIFT, false),
        (53, true),
        (SHIFT, true),
        (53, false),
        (SHIFT, false),
    ];
    assert_eq!(notes.take(), expected);
    // Released in another case than pressed: Shift was let go of first.
    source.keysym(SHIFT_L, true);
    source.keysym('B'.into(), true);
    source.keysym(SHIFT_L, false);
    source.keysym('b'.into(), false);
    assert_eq!(
        notes.take(),
        [(SHIFT, true), (48, true), (SHIFT, false), (48, false)]
    );
}

#[test]
fn caps_lock_of_the_guest_is_reckoned_with_for_letters_alone() {
    let (hub, notes) = hub(Layout::De);
    hub.set_leds(LED_CAPS);
    let mut source = Hub::source(&hub);
    assert!(source.character('a') && source.character('Ä') && source.character('1'));
    let expected = [
        (SHIFT, true),
        (30, true),
        (SHIFT, false),
        (30, false),
        (40, true),
        (40, false),
        (2, true),
        (2, false),
    ];
    assert_eq!(notes.take(), expected);
}

#[test]
fn each_layout_has_its_keys_for_the_characters_of_a_shell() {
    // Character, then the key in each layout; S is with Shift, G with AltGr. On US keyboards the asterisk is that of the keypad,
    // which needs no Shift.
    let layouts = [
        Layout::Us,
        Layout::De,
        Layout::Dk,
        Layout::Fr,
        Layout::Gb,
        Layout::Es,
        Layout::Jp,
    ];
    for row in [
        "y 21 44 21 - - - -",
        "@ S3 G16 G3 G11 S40 G3 26",
        "/ 53 S8 S8 S52 53 S8 53",
        "\\ 43 G12 G86 G9 86 G41 89",
        "| S43 G86 G13 G7 S86 G2 S124",
        "{ S26 G8 G8 G5 S26 G40 S27",
        "- 12 53 53 7 12 53 12",
        "_ S12 S53 S53 9 S12 S53 S89",
        ": S39 S52 S52 52 S39 S52 40",
        "~ S41 G27 G27 G3 S43 G5 S13",
        "$ S5 S5 G5 27 S5 S5 S5",
        "\" S40 S3 S3 4 S3 S3 S3",
        "' 40 S43 43 5 40 12 S8",
        "* 55 S27 S43 43 S9 S27 S40",
        "# S4 43 S4 G4 43 G4 S4",
        "q - - - 30 16 16 16",
        "1 - - - S2 2 2 2",
    ] {
        let mut row = row.split(' ');
        let character = row.next().unwrap().chars().next().unwrap();
        for (layout, key) in layouts.into_iter().zip(row) {
            if key == "-" {
                continue;
            }
            let stroke = Stroke::of_character(layout, character).unwrap();
            let code = key.trim_start_matches(['S', 'G']).parse::<u8>().unwrap();
            assert_eq!(stroke.key.code(), code, "{character} in {layout:?}");
            if (layout, character) != (Layout::Us, '*') {
                let modifiers = (Some(key.contains('S')), Some(key.contains('G')));
                assert_eq!(
                    (stroke.shift, stroke.alt_gr),
                    modifiers,
                    "{character} in {layout:?}"
                );
            }
        }
    }
    assert_eq!(Stroke::of_character(Layout::Us, 'ä'), None);
    // Caps lock turns ñ into Ñ, and leaves the digit row of a French keyboard alone.
    let letter = |layout: Layout, character| Stroke::of_character(layout, character).unwrap().letter;
    assert!(letter(Layout::Es, 'ñ') && letter(Layout::Fr, 'a'));
    assert!(!letter(Layout::Fr, 'é') && !letter(Layout::Fr, '2'));
    assert!(Stroke::of_character(Layout::Fr, '^').unwrap().dead);
    assert!(!Stroke::of_character(Layout::Gb, '^').unwrap().dead);
}

#[test]
fn a_dead_key_is_followed_by_a_space() {
    let (hub, notes) = hub(Layout::Dk);
    let mut source = Hub::source(&hub);
    assert!(source.character('~'));
    let expected = [
        (ALT_GR, true),
        (27, true),
        (27, false),
        (ALT_GR, false),
        (57, true),
        (57, false),
    ];
    assert_eq!(notes.take(), expected);
    // dead_tilde: the client sends what follows.
    source.keysym(0xfe53, true);
    source.keysym(0xfe53, false);
    assert_eq!(
        notes.take(),
        [(ALT_GR, true), (27, true), (ALT_GR, false), (27, false)]
    );
}

#[test]
fn scancodes_and_keys_are_the_same_in_both_directions() {
    for scancode in 0..=0xff {
        if let Some(key) = Key::from_xt(scancode)
            && let Some((code, extended)) = key.xt()
        {
            let back = u32::from(code) | if extended { 0x80 } else { 0 };
            assert_eq!(Key::from_xt(back), Some(key), "{scancode:#x}");
        }
    }
    assert_eq!(Key::from_xt(0xb8), Some(Key::RIGHT_ALT));
    assert_eq!(Key::from_xt(0x100), None);
    assert_eq!(Key::RIGHT_ALT.xt(), Some((0x38, true)));
}

#[test]
fn the_pointer_reaches_all_corners_and_wheels_turn_by_steps() {
    let (hub, notes) = hub(Layout::Us);
    let mut source = Hub::source(&hub);
    let size = Size::new(1920, 1080).unwrap();
    source.point(0, (0, 0), size);
    source.point(1, (1919, 1079), size);
    source.point(1 | 8, (5000, 5000), size);
    source.point(1 | 16, (0, 1079), size);
    source.point(1 | 16, (0, 1079), size);
    drop(source);
    let pointers = notes.pointers.lock().unwrap();
    let places: Vec<_> = pointers.iter().map(|pointer| (pointer.x, pointer.y)).collect();
    let max = TABLET_MAX;
    assert_eq!(
        places,
        [(0, 0), (max, max), (max, max), (0, max), (0, max), (0, max)]
    );
    let rest: Vec<_> = pointers
        .iter()
        .map(|pointer| (pointer.buttons, pointer.wheel))
        .collect();
    assert_eq!(rest, [(0, 0), (1, 0), (1, 1), (1, -1), (1, 0), (0, 0)]);
}

use rfb::Size;
