//! The screen of a VM.

use vmmd_api::v1;

use super::{Violations, keyboard::Layout};

/// Largest width and height in pixels: what an EDID can say.
pub const MAX_SIDE: u32 = 4095;
/// Most pixels.
pub const MAX_PIXELS: u32 = 4096 * 2304;
/// The size when nothing is said of it.
const DEFAULT: (u32, u32) = (1280, 800);

/// A screen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Display {
    /// Pixels from left to right, 1 to [`MAX_SIDE`].
    pub width: u32,
    /// Pixels from top to bottom, 1 to [`MAX_SIDE`]; at most [`MAX_PIXELS`] together.
    pub height: u32,
    /// Layout of the guest's keyboard.
    pub layout: Layout,
}

impl Display {
    /// Validates the screen of a VM.
    pub(super) fn new(found: &mut Violations, wire: &v1::DisplaySpec) -> Self {
        let (width, height) = match (wire.width, wire.height) {
            (0, 0) => DEFAULT,
            size => size,
        };
        if !is_size(width, height) {
            let wrong = format_args!(
                "must be 1 to {MAX_SIDE} pixels each way and at most {MAX_PIXELS} together, is {width} x {height}"
            );
            found.add("spec.display.width", wrong);
        }
        let layout = Layout::of_spec(wire.keyboard_layout).unwrap_or_else(|| {
            let wrong = format_args!("unknown value {}", wire.keyboard_layout);
            found.add("spec.display.keyboardLayout", wrong);
            Layout::default()
        });
        Self {
            width,
            height,
            layout,
        }
    }
}

/// Whether a screen can have that size.
pub fn is_size(width: u32, height: u32) -> bool {
    let sides = (1..=MAX_SIDE).contains(&width) && (1..=MAX_SIDE).contains(&height);
    sides && width * height <= MAX_PIXELS
}

#[cfg(test)]
mod tests {
    use super::*;

    fn new(width: u32, height: u32, keyboard_layout: i32) -> (Display, Vec<String>) {
        let mut found = Violations::default();
        let wire = v1::DisplaySpec {
            width,
            height,
            keyboard_layout,
        };
        let display = Display::new(&mut found, &wire);
        (display, found.0.iter().map(|one| one.field.clone()).collect())
    }

    #[test]
    fn a_screen_has_a_size_when_nothing_is_said_of_it() {
        let (display, found) = new(0, 0, 0);
        assert_eq!(
            (display.width, display.height, display.layout),
            (1280, 800, Layout::Us)
        );
        assert!(found.is_empty());
        assert!(new(4095, 2304, 3).1.is_empty());
    }

    #[test]
    fn sizes_and_layouts_that_there_are_not_are_refused() {
        for (width, height) in [(0, 600), (800, 0), (4096, 1), (4095, 2400), (u32::MAX, u32::MAX)] {
            assert_eq!(
                new(width, height, 0).1,
                ["spec.display.width"],
                "{width} x {height}"
            );
        }
        assert_eq!(new(0, 0, 9).1, ["spec.display.keyboardLayout"]);
    }
}
