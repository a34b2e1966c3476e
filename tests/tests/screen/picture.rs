//! Pictures of screens.

use std::{fs::File, io::BufReader, path::Path};

/// A screenshot.
pub struct Picture {
    /// In pixels.
    pub width: usize,
    /// 0x00RRGGBB, row after row.
    pub pixels: Vec<u32>,
}

impl Picture {
    /// Reads a PNG of 8-bit RGB.
    pub fn read(path: &Path) -> Self {
        let file = BufReader::new(File::open(path).expect("the PNG"));
        let mut reader = png::Decoder::new(file).read_info().expect("a PNG");
        let mut bytes = vec![0; reader.output_buffer_size().expect("a picture that fits")];
        let info = reader.next_frame(&mut bytes).expect("a picture");
        assert_eq!(
            (info.color_type, info.bit_depth),
            (png::ColorType::Rgb, png::BitDepth::Eight)
        );
        let pixels = bytes.chunks_exact(3);
        let pixels = pixels.map(|rgb| rgb.iter().fold(0, |pixel, byte| pixel << 8 | u32::from(*byte)));
        Self {
            width: info.width as usize,
            pixels: pixels.collect(),
        }
    }

    /// Width and height.
    pub fn size(&self) -> (usize, usize) {
        (self.width, self.pixels.len() / self.width)
    }
}
