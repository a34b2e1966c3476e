//! Pixel formats of clients (RFC 6143, 7.4).

/// How a client wants pixels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PixelFormat {
    /// Bytes of a pixel: 1, 2 or 4.
    bytes: u8,
    depth: u8,
    big_endian: bool,
    red: Channel,
    green: Channel,
    blue: Channel,
}

/// Where in a pixel a colour is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Channel {
    /// Largest value: a power of two minus one.
    max: u16,
    shift: u8,
}

impl Channel {
    fn new(max: u16, shift: u8, bits: u8) -> Option<Self> {
        let width = max.count_ones();
        let contiguous = u32::from(max).checked_add(1)?.is_power_of_two();
        let fits = width.checked_add(shift.into())? <= bits.into();
        (contiguous && max > 0 && fits).then_some(Self { max, shift })
    }

    /// The bits of a pixel that it has.
    fn mask(self) -> u32 {
        u32::from(self.max).wrapping_shl(self.shift.into())
    }

    /// `value` (0 to 255) at its place.
    fn place(self, value: u32) -> u32 {
        // Rounded to the nearest. At most 255 × 65535 + 127.
        let scaled = value.wrapping_mul(self.max.into()).wrapping_add(127) / 255;
        scaled.wrapping_shl(self.shift.into())
    }
}

/// A PIXEL_FORMAT that makes no sense.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the pixel format is none of RFB's")]
pub struct BadFormat;

impl PixelFormat {
    /// Format in the server's ServerInit: 32 bits, 0x00RRGGBB in little-endian order.
    pub const NATIVE: Self = Self {
        bytes: 4,
        depth: 24,
        big_endian: false,
        red: Channel { max: 255, shift: 16 },
        green: Channel { max: 255, shift: 8 },
        blue: Channel { max: 255, shift: 0 },
    };

    /// Format for a client that requests a colour map: 3 bits of red, 3 of green, 2 of blue, with a
    /// fixed map ([`colour_map`]).
    const INDEXED: Self = Self {
        bytes: 1,
        depth: 8,
        big_endian: false,
        red: Channel { max: 7, shift: 5 },
        green: Channel { max: 7, shift: 2 },
        blue: Channel { max: 3, shift: 0 },
    };

    /// Reads a PIXEL_FORMAT. True with it: the client needs the [`colour_map`].
    pub fn parse(raw: &[u8; 16]) -> Result<(Self, bool), BadFormat> {
        let [
            bits,
            depth,
            big_endian,
            true_colour,
            red_high,
            red_low,
            green_high,
            green_low,
            blue_high,
            blue_low,
            red_shift,
            green_shift,
            blue_shift,
            ..,
        ] = *raw;
        if true_colour == 0 {
            return if bits == 8 {
                Ok((Self::INDEXED, true))
            } else {
                Err(BadFormat)
            };
        }
        if !matches!(bits, 8 | 16 | 32) {
            return Err(BadFormat);
        }
        let channel =
            |high, low, shift| Channel::new(u16::from_be_bytes([high, low]), shift, bits).ok_or(BadFormat);
        let format = Self {
            bytes: bits / 8,
            depth,
            big_endian: big_endian != 0,
            red: channel(red_high, red_low, red_shift)?,
            green: channel(green_high, green_low, green_shift)?,
            blue: channel(blue_high, blue_low, blue_shift)?,
        };
        let masks = [format.red, format.green, format.blue].map(Channel::mask);
        let apart = masks.iter().map(|mask| mask.count_ones()).sum::<u32>()
            == masks.iter().fold(0, |all, mask| all | mask).count_ones();
        apart.then_some((format, false)).ok_or(BadFormat)
    }

    /// As a PIXEL_FORMAT.
    pub fn encode(&self) -> [u8; 16] {
        let max = |channel: Channel| channel.max.to_be_bytes();
        let ([rh, rl], [gh, gl], [bh, bl]) = (max(self.red), max(self.green), max(self.blue));
        [
            self.bytes.saturating_mul(8),
            self.depth,
            self.big_endian.into(),
            1,
            rh,
            rl,
            gh,
            gl,
            bh,
            bl,
            self.red.shift,
            self.green.shift,
            self.blue.shift,
            0,
            0,
            0,
        ]
    }

    /// Bytes of a pixel: 1, 2 or 4.
    pub fn bytes(&self) -> usize {
        self.bytes.into()
    }

    /// A pixel 0x00RRGGBB as a value of this format.
    pub fn convert(&self, pixel: u32) -> u32 {
        if self.is_native_value() {
            return pixel & 0x00ff_ffff;
        }
        let value = |shift: u32| pixel.wrapping_shr(shift) & 0xff;
        self.red.place(value(16)) | self.green.place(value(8)) | self.blue.place(value(0))
    }

    fn is_native_value(&self) -> bool {
        (self.red, self.green, self.blue) == (Self::NATIVE.red, Self::NATIVE.green, Self::NATIVE.blue)
    }

    /// Appends pixels 0x00RRGGBB as values of this format to `values`.
    pub fn convert_all(&self, pixels: &[u32], values: &mut Vec<u32>) {
        if self.is_native_value() {
            values.extend(pixels.iter().map(|pixel| pixel & 0x00ff_ffff));
        } else {
            values.extend(pixels.iter().map(|pixel| self.convert(*pixel)));
        }
    }

    /// Appends values as PIXELs.
    pub fn put(&self, values: &[u32], out: &mut Vec<u8>) {
        match (self.bytes, self.big_endian) {
            (1, _) => append(values, out, |[a, ..]| [a]),
            (2, false) => append(values, out, |[a, b, ..]| [a, b]),
            (2, true) => append(values, out, |[a, b, ..]| [b, a]),
            (_, false) => append(values, out, |bytes| bytes),
            (_, true) => append(values, out, |[a, b, c, d]| [d, c, b, a]),
        }
    }

    /// How a CPIXEL of ZRLE is written (7.7.5).
    pub fn compact(&self) -> Compact {
        let used = self.red.mask() | self.green.mask() | self.blue.mask();
        if self.bytes != 4 || self.depth > 24 {
            Compact::Whole
        } else if used & 0xff00_0000 == 0 {
            Compact::Low
        } else if used & 0xff == 0 {
            Compact::High
        } else {
            Compact::Whole
        }
    }

    /// How a TPIXEL of Tight is written: three bytes red, green, blue, where each has eight bits.
    pub fn tight(&self) -> Compact {
        let eight = [self.red, self.green, self.blue]
            .iter()
            .all(|channel| channel.max == 255);
        if self.bytes == 4 && self.depth == 24 && eight {
            Compact::Colours
        } else {
            Compact::Whole
        }
    }

    /// Appends values in a compact form, which is one that [`compact`](Self::compact) or [`tight`](Self::tight) gave.
    pub fn put_compact(&self, compact: Compact, values: &[u32], out: &mut Vec<u8>) {
        match (compact, self.big_endian) {
            (Compact::Whole, _) => self.put(values, out),
            (Compact::Low, false) => append(values, out, |[a, b, c, _]| [a, b, c]),
            (Compact::Low, true) => append(values, out, |[a, b, c, _]| [c, b, a]),
            (Compact::High, false) => append(values, out, |[_, b, c, d]| [b, c, d]),
            (Compact::High, true) => append(values, out, |[_, b, c, d]| [d, c, b]),
            (Compact::Colours, _) => {
                let shifts = [self.red, self.green, self.blue].map(|channel| u32::from(channel.shift));
                append(values, out, |bytes| {
                    let value = u32::from_le_bytes(bytes);
                    shifts.map(|shift| {
                        let [byte, ..] = value.wrapping_shr(shift).to_le_bytes();
                        byte
                    })
                });
            }
        }
    }

    /// Bytes of a pixel in a compact form.
    pub fn compact_bytes(&self, compact: Compact) -> usize {
        match compact {
            Compact::Whole => self.bytes(),
            Compact::Low | Compact::High | Compact::Colours => 3,
        }
    }
}

/// Appends what `bytes` makes of each value, whose bytes it gets in little-endian order. Room is made once for all of them.
fn append<const N: usize>(values: &[u32], out: &mut Vec<u8>, bytes: impl Fn([u8; 4]) -> [u8; N]) {
    let begin = out.len();
    out.resize(begin.saturating_add(values.len().saturating_mul(N)), 0);
    let (places, _) = out.get_mut(begin..).unwrap_or_default().as_chunks_mut();
    for (place, value) in places.iter_mut().zip(values) {
        *place = bytes(value.to_le_bytes());
    }
}

/// A pixel in less bytes than the format has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compact {
    /// As a PIXEL.
    Whole,
    /// The three less significant bytes, in the format's order.
    Low,
    /// The three more significant bytes, in the format's order.
    High,
    /// Red, green, blue.
    Colours,
}

/// A SetColourMapEntries message (7.6.2) for [`PixelFormat::parse`]'s indexed colours.
pub fn colour_map() -> Vec<u8> {
    // Type, padding, first colour 0, 256 colours.
    let mut message = vec![1, 0, 0, 0, 1, 0];
    let wide = |value: u8, max: u32| {
        let scaled = u32::from(value)
            .wrapping_mul(0xffff)
            .checked_div(max)
            .unwrap_or(0);
        u16::try_from(scaled).unwrap_or(u16::MAX).to_be_bytes()
    };
    for index in 0..=255_u8 {
        message.extend(wide(index >> 5, 7));
        message.extend(wide(index >> 2 & 7, 7));
        message.extend(wide(index & 3, 3));
    }
    message
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn raw(bits: u8, maxes: [u16; 3], shifts: [u8; 3]) -> [u8; 16] {
        let [[a, b], [c, d], [e, f]] = maxes.map(u16::to_be_bytes);
        let [r, g, bl] = shifts;
        [bits, 24, 0, 1, a, b, c, d, e, f, r, g, bl, 0, 0, 0]
    }

    #[test]
    fn formats_that_make_no_sense_are_refused() {
        for (bits, maxes, shifts) in [
            (24, [255, 255, 255], [16, 8, 0]),
            (0, [255, 255, 255], [16, 8, 0]),
            (16, [31, 63, 31], [12, 5, 0]),
            (32, [255, 255, 255], [25, 8, 0]),
            (32, [255, 255, 255], [255, 8, 0]),
            (32, [0, 255, 255], [16, 8, 0]),
            (32, [254, 255, 255], [16, 8, 0]),
            (32, [255, 255, 255], [8, 8, 0]),
            (8, [7, 7, 7], [5, 2, 0]),
        ] {
            assert_eq!(
                PixelFormat::parse(&raw(bits, maxes, shifts)),
                Err(BadFormat),
                "{bits} {maxes:?}"
            );
        }
        let mut indexed = raw(8, [0; 3], [0; 3]);
        indexed[3] = 0;
        assert_eq!(PixelFormat::parse(&indexed), Ok((PixelFormat::INDEXED, true)));
        indexed[0] = 16;
        assert_eq!(PixelFormat::parse(&indexed), Err(BadFormat));
    }

    #[test]
    fn white_and_black_are_the_ends_of_each_channel_whatever_its_width() {
        for (bits, maxes, shifts) in [
            (8, [7, 7, 3], [5, 2, 0]),
            (16, [31, 63, 31], [11, 5, 0]),
            (16, [31, 31, 31], [10, 5, 0]),
            (32, [255, 255, 255], [0, 8, 16]),
            (32, [1023, 1023, 1023], [20, 10, 0]),
        ] {
            let (format, indexed) = PixelFormat::parse(&raw(bits, maxes, shifts)).unwrap();
            assert!(!indexed);
            assert_eq!(format.encode(), raw(bits, maxes, shifts));
            let channels = maxes.iter().zip(shifts);
            let white = channels.fold(0, |all, (max, shift)| all | u32::from(*max) << shift);
            assert_eq!((format.convert(0xffffff), format.convert(0)), (white, 0));
        }
    }

    #[test]
    fn the_colour_map_is_that_of_the_indexed_format() {
        let map = colour_map();
        assert_eq!(map.len(), 6 + 256 * 6);
        let entry = |index: u32| {
            let at = 6 + usize::try_from(index).unwrap() * 6;
            map.get(at..at + 6).unwrap().to_vec()
        };
        assert_eq!(
            entry(PixelFormat::INDEXED.convert(0xff0000)),
            [0xff, 0xff, 0, 0, 0, 0]
        );
        assert_eq!(
            entry(PixelFormat::INDEXED.convert(0x0000ff)),
            [0, 0, 0, 0, 0xff, 0xff]
        );
        assert_eq!(entry(255), [0xff; 6]);
    }
}
