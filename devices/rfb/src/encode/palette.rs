//! The few colours of a block.

/// Slots of the look-up table: more than twice the most colours.
const SLOTS: usize = 1024;

/// Colours in the order in which they were found, at most 256.
#[derive(Debug)]
pub(super) struct Palette {
    colours: Vec<u32>,
    /// Index and 1 of the colour that hashes there; 0 for none.
    slots: Vec<u16>,
}

impl Palette {
    /// The colours of `values`; `None` when they are more than `most`, which is 256 at most.
    pub fn of(values: &[u32], most: usize) -> Option<Self> {
        let mut palette = Self {
            colours: Vec::new(),
            slots: vec![0; SLOTS],
        };
        let mut last = None;
        for value in values {
            if last == Some(*value) {
                continue;
            }
            last = Some(*value);
            let slot = palette.slot(*value);
            if palette.slots.get(slot).is_some_and(|index| *index == 0) {
                if palette.colours.len() >= most.min(256) {
                    return None;
                }
                palette.colours.push(*value);
                if let Some(place) = palette.slots.get_mut(slot) {
                    *place = u16::try_from(palette.colours.len()).unwrap_or(0);
                }
            }
        }
        Some(palette)
    }

    /// All of them.
    pub fn colours(&self) -> &[u32] {
        &self.colours
    }

    /// The number of a colour that it has.
    pub fn index(&self, value: u32) -> u8 {
        let index = self.slots.get(self.slot(value)).copied().unwrap_or(0);
        u8::try_from(index.saturating_sub(1)).unwrap_or(0)
    }

    /// The slot that has the colour, or would have it.
    fn slot(&self, value: u32) -> usize {
        let hash = value.wrapping_mul(0x9e37_79b1) >> 22;
        let mut slot = usize::try_from(hash).unwrap_or(0) % SLOTS;
        loop {
            let index = self.slots.get(slot).copied().unwrap_or(0);
            let found = usize::from(index)
                .checked_sub(1)
                .and_then(|at| self.colours.get(at));
            if found.is_none_or(|colour| *colour == value) {
                return slot;
            }
            // Never full: there are at most 256 colours.
            slot = slot.wrapping_add(1) % SLOTS;
        }
    }
}
