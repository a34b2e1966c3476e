//! A client that understands all that the server may send, written from RFC 6143 and not from the server.

use flate2::{Decompress, FlushDecompress};

use crate::Rect;

/// Decodes the server's messages and produces the client's replies.
pub struct Decoder {
    input: Vec<u8>,
    stage: u8,
    pub format: [u8; 16],
    pub size: (u16, u16),
    pub pixels: Vec<u32>,
    pub name: String,
    pub cursor: Option<(Rect, Vec<u32>, Vec<u8>)>,
    pub leds: Option<u8>,
    pub qemu_keys: bool,
    /// Reason, status, width and height of each ExtendedDesktopSize.
    pub sizes: Vec<(u16, u16, u16, u16)>,
    pub colour_map: Option<Vec<u8>>,
    pub ends_of_continuous: usize,
    /// Flags and payload of each fence.
    pub fences: Vec<(u32, Vec<u8>)>,
    /// Encodings of all rectangles.
    pub encodings: Vec<i32>,
    pub updates: usize,
    pub answers_fences: bool,
    zrle: Decompress,
    tight: [Decompress; 4],
}

pub const NATIVE: [u8; 16] = [32, 24, 0, 1, 0, 255, 0, 255, 0, 255, 16, 8, 0, 0, 0, 0];

pub fn set_encodings(encodings: &[i32]) -> Vec<u8> {
    let mut message = vec![2, 0];
    message.extend((encodings.len() as u16).to_be_bytes());
    message.extend(encodings.iter().flat_map(|encoding| encoding.to_be_bytes()));
    message
}

pub fn request(incremental: bool, area: Rect) -> Vec<u8> {
    let mut message = vec![3, incremental.into()];
    for field in [area.x, area.y, area.width, area.height] {
        message.extend(field.to_be_bytes());
    }
    message
}

/// Returns the pixel 0x00RRGGBB in a format: each colour rounded to the nearest.
pub fn expected(format: &[u8; 16], pixel: u32) -> u32 {
    let channel = |at: usize, shift: usize, from: u32| {
        let max = f64::from(u16::from_be_bytes([format[at], format[at + 1]]));
        let value = f64::from(pixel >> from & 0xff);
        ((value * max / 255.0).round() as u32) << format[shift]
    };
    channel(4, 10, 16) | channel(6, 11, 8) | channel(8, 12, 0)
}

/// Big-endian fields; `None` when there are not enough bytes yet.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, length: usize) -> Option<&'a [u8]> {
        let (first, rest) = self.0.split_at_checked(length)?;
        self.0 = rest;
        Some(first)
    }

    fn u8(&mut self) -> Option<u8> {
        Some(self.take(1)?[0])
    }

    fn u16(&mut self) -> Option<u16> {
        Some(u16::from_be_bytes(self.take(2)?.try_into().unwrap()))
    }

    fn u32(&mut self) -> Option<u32> {
        Some(u32::from_be_bytes(self.take(4)?.try_into().unwrap()))
    }
}

fn inflate(stream: &mut Decompress, data: &[u8], length: Option<usize>) -> Vec<u8> {
    let mut out = Vec::with_capacity(length.unwrap_or(1 << 20));
    let begin = stream.total_in();
    loop {
        let taken = (stream.total_in() - begin) as usize;
        stream
            .decompress_vec(&data[taken..], &mut out, FlushDecompress::Sync)
            .unwrap();
        if (stream.total_in() - begin) as usize == data.len() && out.len() < out.capacity() {
            break;
        }
        if length == Some(out.len()) && (stream.total_in() - begin) as usize == data.len() {
            break;
        }
        out.reserve(1 << 20);
    }
    if let Some(length) = length {
        assert_eq!(out.len(), length, "compressed data of another length");
    }
    out
}

impl Default for Decoder {
    fn default() -> Self {
        Self {
            input: Vec::new(),
            stage: 0,
            format: NATIVE,
            size: (0, 0),
            pixels: Vec::new(),
            name: String::new(),
            cursor: None,
            leds: None,
            qemu_keys: false,
            sizes: Vec::new(),
            colour_map: None,
            ends_of_continuous: 0,
            fences: Vec::new(),
            encodings: Vec::new(),
            updates: 0,
            answers_fences: true,
            zrle: Decompress::new(true),
            tight: std::array::from_fn(|_| Decompress::new(true)),
        }
    }
}

impl Decoder {
    /// Takes bytes of the server and returns the client's replies. Decodes a message when it is
    /// complete.
    pub fn receive(&mut self, bytes: &[u8]) -> Vec<u8> {
        self.input.extend(bytes);
        let input = std::mem::take(&mut self.input);
        let (mut at, mut replies) = (0, Vec::new());
        while at < input.len() {
            let mut reader = Reader(&input[at..]);
            if !self.is_whole(&input[at..]) {
                break;
            }
            self.message(&mut reader, &mut replies).unwrap();
            at = input.len() - reader.0.len();
        }
        self.input = input[at..].to_vec();
        replies
    }

    /// Whether there is a whole message: walks over it without decoding.
    fn is_whole(&self, bytes: &[u8]) -> bool {
        let mut reader = Reader(bytes);
        self.walk(&mut reader).is_some()
    }

    fn walk(&self, reader: &mut Reader<'_>) -> Option<()> {
        match self.stage {
            0 => reader.take(12).map(drop),
            1 => {
                let count = reader.u8()?;
                reader.take(count.into()).map(drop)
            }
            2 => reader.take(4).map(drop),
            3 => {
                reader.take(20)?;
                let length = reader.u32()?;
                reader.take(length as usize).map(drop)
            }
            _ => match reader.u8()? {
                0 => {
                    reader.u8()?;
                    let count = reader.u16()?;
                    for _ in 0..count {
                        self.walk_rectangle(reader)?;
                    }
                    Some(())
                }
                1 => reader.take(5 + 256 * 6).map(drop),
                150 => Some(()),
                248 => {
                    reader.take(7)?;
                    let length = reader.u8()?;
                    reader.take(length.into()).map(drop)
                }
                other => panic!("message {other}"),
            },
        }
    }

    fn walk_rectangle(&self, reader: &mut Reader<'_>) -> Option<()> {
        let (_x, _y) = (reader.u16()?, reader.u16()?);
        let (width, height) = (usize::from(reader.u16()?), usize::from(reader.u16()?));
        let bytes = usize::from(self.format[0]) / 8;
        match reader.u32()? as i32 {
            0 => reader.take(width * height * bytes).map(drop),
            1 => reader.take(4).map(drop),
            5 => {
                for y in (0..height).step_by(16) {
                    for x in (0..width).step_by(16) {
                        let pixels = 16.min(width - x) * 16.min(height - y);
                        let mask = reader.u8()?;
                        if mask & 1 != 0 {
                            reader.take(pixels * bytes)?;
                            continue;
                        }
                        reader.take(usize::from((mask & 6).count_ones() as u8) * bytes)?;
                        if mask & 8 != 0 {
                            let count = usize::from(reader.u8()?);
                            let each = 2 + if mask & 16 != 0 { bytes } else { 0 };
                            reader.take(count * each)?;
                        }
                    }
                }
                Some(())
            }
            16 => {
                let length = reader.u32()?;
                reader.take(length as usize).map(drop)
            }
            7 => self.walk_tight(reader, width, height),
            -223 | -258 => Some(()),
            -239 => reader
                .take(width * height * bytes + width.div_ceil(8) * height)
                .map(drop),
            -261 => reader.u8().map(drop),
            -307 => {
                let length = reader.u32()?;
                reader.take(length as usize).map(drop)
            }
            -308 => {
                let screens = usize::from(reader.u8()?);
                reader.take(3 + screens * 16).map(drop)
            }
            other => panic!("encoding {other}"),
        }
    }

    fn tight_pixel(&self) -> usize {
        let eight = self.format[4..10] == [0, 255, 0, 255, 0, 255];
        if self.format[0] == 32 && self.format[1] == 24 && eight {
            3
        } else {
            usize::from(self.format[0]) / 8
        }
    }

    fn walk_tight(&self, reader: &mut Reader<'_>, width: usize, height: usize) -> Option<()> {
        let pixel = self.tight_pixel();
        let control = reader.u8()?;
        if control >> 4 == 8 {
            return reader.take(pixel).map(drop);
        }
        assert!(control >> 4 < 8, "control {control:#x}");
        let mut length = width * height * pixel;
        if control & 0x40 != 0 {
            match reader.u8()? {
                0 => {}
                1 => {
                    let colours = usize::from(reader.u8()?) + 1;
                    reader.take(colours * pixel)?;
                    length = if colours == 2 {
                        width.div_ceil(8) * height
                    } else {
                        width * height
                    };
                }
                other => panic!("filter {other}"),
            }
        }
        if length >= 12 {
            length = compact_length(reader)?;
        }
        reader.take(length).map(drop)
    }

    fn message(&mut self, reader: &mut Reader<'_>, replies: &mut Vec<u8>) -> Option<()> {
        match self.stage {
            0 => assert_eq!(reader.take(12)?, b"RFB 003.008\n"),
            1 => assert_eq!(reader.take(2)?, [1, 1]),
            2 => assert_eq!(reader.u32()?, 0),
            3 => {
                self.size = (reader.u16()?, reader.u16()?);
                self.pixels = vec![0xdead_beef; usize::from(self.size.0) * usize::from(self.size.1)];
                assert_eq!(reader.take(16)?, NATIVE);
                let length = reader.u32()?;
                self.name = String::from_utf8(reader.take(length as usize)?.to_vec()).unwrap();
            }
            _ => return self.normal(reader, replies),
        }
        self.stage += 1;
        Some(())
    }

    fn normal(&mut self, reader: &mut Reader<'_>, replies: &mut Vec<u8>) -> Option<()> {
        match reader.u8()? {
            0 => {
                reader.u8()?;
                self.updates += 1;
                for _ in 0..reader.u16()? {
                    self.rectangle(reader)?;
                }
            }
            1 => self.colour_map = Some(reader.take(5 + 256 * 6)?.to_vec()),
            150 => self.ends_of_continuous += 1,
            _ => {
                reader.take(3)?;
                let (flags, length) = (reader.u32()?, reader.u8()?);
                let payload = reader.take(length.into())?.to_vec();
                if flags >> 31 == 1 && self.answers_fences {
                    replies.extend([248, 0, 0, 0]);
                    replies.extend((flags & 7).to_be_bytes());
                    replies.push(length);
                    replies.extend(&payload);
                }
                self.fences.push((flags, payload));
            }
        }
        Some(())
    }

    fn rectangle(&mut self, reader: &mut Reader<'_>) -> Option<()> {
        let rect = Rect::new(reader.u16()?, reader.u16()?, reader.u16()?, reader.u16()?);
        let encoding = reader.u32()? as i32;
        self.encodings.push(encoding);
        let (width, height) = (usize::from(rect.width), usize::from(rect.height));
        match encoding {
            0 => {
                for at in 0..width * height {
                    let value = self.pixel(reader)?;
                    self.put(rect, at % width, at / width, value);
                }
            }
            1 => self.copy(rect, (reader.u16()?, reader.u16()?)),
            5 => self.hextile(reader, rect)?,
            16 => {
                let length = reader.u32()?;
                let data = inflate(&mut self.zrle, reader.take(length as usize)?, None);
                let mut data = Reader(&data);
                self.zrle_tiles(&mut data, rect)?;
                assert!(data.0.is_empty(), "{} bytes too many", data.0.len());
            }
            7 => self.tight_rectangle(reader, rect)?,
            -223 => self.resize(rect.width, rect.height),
            -239 => {
                let pixels = (0..width * height)
                    .map(|_| self.pixel(reader))
                    .collect::<Option<_>>()?;
                let mask = reader.take(width.div_ceil(8) * height)?.to_vec();
                self.cursor = Some((rect, pixels, mask));
            }
            -258 => self.qemu_keys = true,
            -261 => self.leds = Some(reader.u8()?),
            -307 => {
                let length = reader.u32()?;
                self.name = String::from_utf8(reader.take(length as usize)?.to_vec()).unwrap();
            }
            _ => {
                let screens = reader.take(4)?[0];
                let screen = reader.take(usize::from(screens) * 16)?;
                let field = |at: usize| u16::from_be_bytes([screen[at], screen[at + 1]]);
                assert_eq!((screens, field(8), field(10)), (1, rect.width, rect.height));
                self.sizes.push((rect.x, rect.y, rect.width, rect.height));
                // As viewers do: a wish that has not come true changes nothing.
                if (rect.x, rect.y) == (1, 0) || rect.x != 1 {
                    self.resize(rect.width, rect.height);
                }
            }
        }
        Some(())
    }

    fn resize(&mut self, width: u16, height: u16) {
        if self.size != (width, height) {
            self.size = (width, height);
            self.pixels = vec![0xdead_beef; usize::from(width) * usize::from(height)];
        }
    }

    fn put(&mut self, rect: Rect, x: usize, y: usize, value: u32) {
        let (x, y) = (usize::from(rect.x) + x, usize::from(rect.y) + y);
        assert!(
            x < self.size.0.into() && y < self.size.1.into(),
            "{x}, {y} is outside"
        );
        self.pixels[y * usize::from(self.size.0) + x] = value;
    }

    fn copy(&mut self, to: Rect, from: (u16, u16)) {
        let old = self.pixels.clone();
        for y in 0..usize::from(to.height) {
            for x in 0..usize::from(to.width) {
                let at = (usize::from(from.1) + y) * usize::from(self.size.0) + usize::from(from.0) + x;
                self.put(to, x, y, old[at]);
            }
        }
    }

    fn value(&self, bytes: &[u8]) -> u32 {
        let fold = |value: u32, byte: &u8| value << 8 | u32::from(*byte);
        if self.format[2] == 0 {
            bytes.iter().rev().fold(0, fold)
        } else {
            bytes.iter().fold(0, fold)
        }
    }

    fn pixel(&self, reader: &mut Reader<'_>) -> Option<u32> {
        let bytes = reader.take(usize::from(self.format[0]) / 8)?;
        Some(self.value(bytes))
    }

    fn hextile(&mut self, reader: &mut Reader<'_>, rect: Rect) -> Option<()> {
        let (width, height) = (usize::from(rect.width), usize::from(rect.height));
        let (mut background, mut foreground) = (0, 0);
        for top in (0..height).step_by(16) {
            for left in (0..width).step_by(16) {
                let (columns, rows) = (16.min(width - left), 16.min(height - top));
                let mask = reader.u8()?;
                if mask & 1 != 0 {
                    for at in 0..columns * rows {
                        let value = self.pixel(reader)?;
                        self.put(rect, left + at % columns, top + at / columns, value);
                    }
                    continue;
                }
                if mask & 2 != 0 {
                    background = self.pixel(reader)?;
                }
                if mask & 4 != 0 {
                    foreground = self.pixel(reader)?;
                }
                for at in 0..columns * rows {
                    self.put(rect, left + at % columns, top + at / columns, background);
                }
                let count = if mask & 8 != 0 { reader.u8()? } else { 0 };
                for _ in 0..count {
                    let colour = if mask & 16 != 0 {
                        self.pixel(reader)?
                    } else {
                        foreground
                    };
                    let (place, extent) = (usize::from(reader.u8()?), usize::from(reader.u8()?));
                    for y in 0..=extent & 15 {
                        for x in 0..=extent >> 4 {
                            let (x, y) = ((place >> 4) + x, (place & 15) + y);
                            assert!(x < columns && y < rows);
                            self.put(rect, left + x, top + y, colour);
                        }
                    }
                }
            }
        }
        Some(())
    }

    /// A CPIXEL.
    fn compact(&self, reader: &mut Reader<'_>) -> Option<u32> {
        let mask = |at: usize, shift: usize| {
            u32::from(u16::from_be_bytes([self.format[at], self.format[at + 1]])) << self.format[shift]
        };
        let used = mask(4, 10) | mask(6, 11) | mask(8, 12);
        if self.format[0] != 32 || self.format[1] > 24 {
            return self.pixel(reader);
        }
        if used >> 24 == 0 {
            Some(self.value(reader.take(3)?))
        } else if used & 0xff == 0 {
            Some(self.value(reader.take(3)?) << 8)
        } else {
            self.pixel(reader)
        }
    }

    fn zrle_tiles(&mut self, reader: &mut Reader<'_>, rect: Rect) -> Option<()> {
        let (width, height) = (usize::from(rect.width), usize::from(rect.height));
        for top in (0..height).step_by(64) {
            for left in (0..width).step_by(64) {
                let (columns, rows) = (64.min(width - left), 64.min(height - top));
                let tile = self.zrle_tile(reader, columns, rows)?;
                assert_eq!(tile.len(), columns * rows);
                for (at, value) in tile.into_iter().enumerate() {
                    self.put(rect, left + at % columns, top + at / columns, value);
                }
            }
        }
        Some(())
    }

    fn zrle_tile(&self, reader: &mut Reader<'_>, columns: usize, rows: usize) -> Option<Vec<u32>> {
        let kind = reader.u8()?;
        let palette = (0..kind & 0x7f)
            .map(|_| self.compact(reader))
            .collect::<Option<Vec<_>>>()?;
        let pixels = columns * rows;
        let mut tile = Vec::new();
        let run = |reader: &mut Reader<'_>| {
            let mut length = 1;
            loop {
                let byte = reader.u8()?;
                length += usize::from(byte);
                if byte != 255 {
                    return Some(length);
                }
            }
        };
        match kind {
            0 => {
                for _ in 0..pixels {
                    tile.push(self.compact(reader)?);
                }
            }
            1 => tile = vec![palette[0]; pixels],
            2..=16 => {
                let bits = match kind {
                    2 => 1,
                    3 | 4 => 2,
                    _ => 4,
                };
                for _ in 0..rows {
                    let row = reader.take((columns * bits).div_ceil(8))?;
                    for x in 0..columns {
                        let shift = 8 - bits - x * bits % 8;
                        tile.push(palette[usize::from(row[x * bits / 8] >> shift) & ((1 << bits) - 1)]);
                    }
                }
            }
            128 => {
                while tile.len() < pixels {
                    let value = self.compact(reader)?;
                    tile.extend(std::iter::repeat_n(value, run(reader)?));
                }
            }
            130.. => {
                while tile.len() < pixels {
                    let index = reader.u8()?;
                    let length = if index & 0x80 != 0 { run(reader)? } else { 1 };
                    tile.extend(std::iter::repeat_n(palette[usize::from(index & 0x7f)], length));
                }
            }
            other => panic!("ZRLE tile of type {other}"),
        }
        Some(tile)
    }

    /// A TPIXEL.
    fn tpixel(&self, reader: &mut Reader<'_>) -> Option<u32> {
        if self.tight_pixel() == 3 {
            let colours = reader.take(3)?;
            let place = |at: usize| u32::from(colours[at]) << self.format[10 + at];
            return Some(place(0) | place(1) | place(2));
        }
        self.pixel(reader)
    }

    fn tight_rectangle(&mut self, reader: &mut Reader<'_>, rect: Rect) -> Option<()> {
        let (width, height) = (usize::from(rect.width), usize::from(rect.height));
        assert!(width <= 2048);
        let control = reader.u8()?;
        assert_eq!(control & 0xf, 0, "no stream is ever reset");
        if control >> 4 == 8 {
            let value = self.tpixel(reader)?;
            for at in 0..width * height {
                self.put(rect, at % width, at / width, value);
            }
            return Some(());
        }
        let filter = if control & 0x40 != 0 { reader.u8()? } else { 0 };
        let mut palette = Vec::new();
        if filter == 1 {
            for _ in 0..=reader.u8()? {
                palette.push(self.tpixel(reader)?);
            }
        }
        let row = match palette.len() {
            0 => width * self.tight_pixel(),
            2 => width.div_ceil(8),
            _ => width,
        };
        let data = if row * height < 12 {
            reader.take(row * height)?.to_vec()
        } else {
            let length = compact_length(reader)?;
            let stream = &mut self.tight[usize::from(control >> 4 & 3)];
            inflate(stream, reader.take(length)?, Some(row * height))
        };
        let mut data_reader = Reader(&data);
        for y in 0..height {
            for x in 0..width {
                let value = match palette.len() {
                    0 => self.tpixel(&mut data_reader)?,
                    2 => palette[usize::from(data[y * row + x / 8] >> (7 - x % 8) & 1)],
                    _ => palette[usize::from(data[y * row + x])],
                };
                self.put(rect, x, y, value);
            }
        }
        Some(())
    }
}

fn compact_length(reader: &mut Reader<'_>) -> Option<usize> {
    let first = usize::from(reader.u8()?);
    if first & 0x80 == 0 {
        return Some(first);
    }
    let second = usize::from(reader.u8()?);
    let length = first & 0x7f | (second & 0x7f) << 7;
    if second & 0x80 == 0 {
        return Some(length);
    }
    Some(length | usize::from(reader.u8()?) << 14)
}
