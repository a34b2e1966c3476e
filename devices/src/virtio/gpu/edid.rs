//! Identification data of the screen: a block of E-EDID 1.4 (VESA E-EDID Standard, release A,
//! revision 2).

use rfb::Size;

/// Length of a block.
pub(super) const LENGTH: usize = 128;
/// Refresh rate in Hz.
const RATE: u32 = 60;
/// Blanking in pixels and lines, as VESA's reduced blanking has it: front porch, sync, total.
const HORIZONTAL: [u32; 3] = [48, 32, 160];
const VERTICAL: [u32; 3] = [3, 6, 40];

/// Returns the block of a screen with the preferred mode `size`. Each direction is limited to 4095.
pub(super) fn block(size: Size) -> [u8; LENGTH] {
    let mut block = Vec::with_capacity(LENGTH);
    block.extend_from_slice(&[0, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0]);
    // Manufacturer "VMD", five bits for each letter; product 1, no serial number; week 0 of 2026.
    block.extend_from_slice(&[0x59, 0xa4, 1, 0, 0, 0, 0, 0, 0, 36]);
    // Version 1.4; digital, 8 bits for each colour.
    block.extend_from_slice(&[1, 4, 0xa0]);
    let (width, height) = (
        u32::from(size.width().min(0xfff)),
        u32::from(size.height().min(0xfff)),
    );
    let (wide, high) = (millimetres(width), millimetres(height));
    // In centimetres; gamma 2.2; sRGB and a preferred timing.
    block.extend_from_slice(&[low(wide / 10), low(high / 10), 120, 0x06]);
    // sRGB's primaries and white.
    block.extend_from_slice(&[0xee, 0x91, 0xa3, 0x54, 0x4c, 0x99, 0x26, 0x0f, 0x50, 0x54]);
    // 640 × 480, 800 × 600, 1024 × 768 at 60 Hz.
    block.extend_from_slice(&[0x21, 0x08, 0]);
    // 1920 × 1080, 1680 × 1050, 1600 × 900, 1440 × 900, 1280 × 1024, 1280 × 720; two that are not used.
    block.extend_from_slice(&[
        209, 0xc0, 179, 0, 169, 0xc0, 149, 0, 129, 0x80, 129, 0xc0, 1, 1, 1, 1,
    ]);
    block.extend_from_slice(&timing(width, height, wide, high));
    block.extend_from_slice(b"\0\0\0\xfc\0vmmd screen\n ");
    // Rates: 50 to 75 Hz, 30 to 255 kHz, 2550 MHz at most; nothing more.
    block.extend_from_slice(&[0, 0, 0, 0xfd, 0, 50, 75, 30, 255, 255, 1, b'\n']);
    block.extend_from_slice(&[b' '; 6]);
    // A descriptor that is not used; no further blocks.
    block.extend_from_slice(&[0, 0, 0, 0x10]);
    block.resize(LENGTH.saturating_sub(1), 0);
    let sum = block.iter().fold(0_u8, |sum, byte| sum.wrapping_add(*byte));
    block.push(sum.wrapping_neg());
    block.try_into().unwrap_or([0; LENGTH])
}

/// At 96 pixels to the inch.
fn millimetres(pixels: u32) -> u32 {
    pixels.wrapping_mul(254) / 960
}

fn low(value: u32) -> u8 {
    let [low, ..] = value.to_le_bytes();
    low
}

/// A detailed timing descriptor (3.10.2).
fn timing(width: u32, height: u32, wide: u32, high: u32) -> [u8; 18] {
    let [h_front, h_sync, h_blank] = HORIZONTAL;
    let [v_front, v_sync, v_blank] = VERTICAL;
    let lines = height.wrapping_add(v_blank).wrapping_mul(RATE);
    // In units of 10 kHz; the largest mode has 16,956.
    let clock = width.wrapping_add(h_blank).wrapping_mul(lines) / 10_000;
    let top = |value: u32| value >> 8 & 0xf;
    [
        low(clock),
        low(clock >> 8),
        low(width),
        low(h_blank),
        low(top(width) << 4 | top(h_blank)),
        low(height),
        low(v_blank),
        low(top(height) << 4 | top(v_blank)),
        low(h_front),
        low(h_sync),
        low(v_front << 4 | v_sync),
        0,
        low(wide),
        low(high),
        low(top(wide) << 4 | top(high)),
        0,
        0,
        // Digital separate syncs, horizontal positive.
        0x1a,
    ]
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::indexing_slicing)]
mod tests {
    use super::*;

    #[test]
    fn a_block_is_summed_up_to_zero_and_says_the_preferred_size() {
        for (width, height) in [(1024, 768), (1920, 1080), (4095, 2000), (1, 1), (8192, 1)] {
            let block = block(Size::new(width, height).unwrap());
            assert_eq!(block.iter().fold(0_u8, |sum, byte| sum.wrapping_add(*byte)), 0);
            let twelve = |low: usize, high: usize| u32::from(block[low]) | u32::from(block[high] >> 4) << 8;
            assert_eq!(
                (twelve(56, 58), twelve(59, 61)),
                (width.min(0xfff), height),
                "{width} × {height}"
            );
            assert_ne!((block[54], block[55]), (0, 0), "a timing has a clock");
            // The four descriptors.
            assert_eq!(block[72..77], [0, 0, 0, 0xfc, 0]);
            assert_eq!(block[90..95], [0, 0, 0, 0xfd, 0]);
            assert_eq!(block[108..112], [0, 0, 0, 0x10]);
            assert_eq!(block[126], 0);
        }
    }
}
