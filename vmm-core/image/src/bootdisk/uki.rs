//! Unified kernel images (UAPI.5): a PE file with a kernel, its initial RAM disk and its command line as sections.

use std::ops::Range;

use super::{MAX_INITRD, MAX_KERNEL, bls};

/// Reads some bytes of the file; nothing when it does not have them all.
pub type Read<'a> = dyn Fn(Range<u64>) -> Option<Vec<u8>> + 'a;

/// Where the PE header's offset is, the longest way to it, and the lengths of both headers and of a section's in bytes (PE format).
const OFFSET: u64 = 0x3c;
const FARTHEST: u64 = 1 << 20;
const HEADER: u64 = 24;
const SECTION: u64 = 40;
/// Most sections, as the format has it.
const SECTIONS: u64 = 96;
/// The machine: x86-64.
const MACHINE: u16 = 0x8664;
/// Longest text of a section in bytes.
const TEXT: u64 = 64 << 10;

/// A unified kernel image.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Image {
    /// Which bytes of the file are the kernel.
    pub kernel: Range<u64>,
    /// Which are the initial RAM disk.
    pub initrd: Option<Range<u64>>,
    /// Command line.
    pub cmdline: String,
    /// First criterion of the order, and the second one.
    pub sort_key: String,
    /// Its version.
    pub version: String,
    /// Title in the menu.
    pub title: String,
}

/// Reads one; nothing when it is none, or its parts are longer than the file or than they may be.
pub fn image(read: &Read<'_>) -> Option<Image> {
    let text = |range: &Range<u64>| {
        let end = range.end.min(range.start.saturating_add(TEXT));
        let bytes = read(range.start..end)?;
        let bytes = bytes.split(|byte| *byte == 0).next()?.to_vec();
        String::from_utf8(bytes).ok()
    };
    let mut image = Image::default();
    let mut profiles = 0;
    for (name, range) in sections(read)? {
        match name.as_slice() {
            // Each `.profile` begins the changes for one way to boot the image. The first profile
            // is the default, so the rest is ignored.
            b".profile" if profiles > 0 => break,
            b".profile" => profiles = 1,
            b".linux" => image.kernel = range,
            b".initrd" => image.initrd = Some(range),
            b".cmdline" => image.cmdline = text(&range)?.split_whitespace().collect::<Vec<_>>().join(" "),
            b".osrel" => release(&text(&range)?, &mut image),
            _ => {}
        }
    }
    let fits = |range: &Range<u64>, most: u64| {
        let length = range.end.saturating_sub(range.start);
        (1..=most).contains(&length) && read(range.end.saturating_sub(1)..range.end).is_some()
    };
    let initrd = image.initrd.as_ref();
    let is_sound = fits(&image.kernel, MAX_KERNEL) && initrd.is_none_or(|initrd| fits(initrd, MAX_INITRD));
    is_sound.then_some(image)
}

/// Names of the sections and where they are in the file.
fn sections(read: &Read<'_>) -> Option<Vec<(Vec<u8>, Range<u64>)>> {
    if read(0..2)? != b"MZ" {
        return None;
    }
    let start = u64::from(u32_at(&read(OFFSET..OFFSET + 4)?, 0)?);
    if start > FARTHEST {
        return None;
    }
    let header = read(start..start + HEADER)?;
    if !header.starts_with(b"PE\0\0") || u16_at(&header, 4)? != MACHINE {
        return None;
    }
    let (count, optional) = (u64::from(u16_at(&header, 6)?), u64::from(u16_at(&header, 20)?));
    let table = start + HEADER + optional;
    let table = read(table..table + count.min(SECTIONS) * SECTION)?;
    let found = table.chunks_exact(usize::try_from(SECTION).ok()?).map(|entry| {
        let name = entry.get(..8)?.split(|byte| *byte == 0).next()?.to_vec();
        // A section that is longer in memory ends with zeroes, and one that is longer in the file
        // has padding.
        let length = u64::from(u32_at(entry, 8)?.min(u32_at(entry, 16)?));
        let start = u64::from(u32_at(entry, 20)?);
        Some((name, start..start + length))
    });
    found.collect()
}

/// Takes the sort criteria from the image's os-release(5), as systemd-boot does.
fn release(text: &str, image: &mut Image) {
    let value = |wanted: &[&str]| {
        let lines = || text.lines().filter_map(|line| line.trim().split_once('='));
        let found = wanted
            .iter()
            .find_map(|wanted| lines().find(|(name, _)| name == wanted));
        let value = found.map_or("", |(_, value)| value);
        value.trim_matches(['"', '\'']).to_owned()
    };
    image.title = value(&["PRETTY_NAME", "IMAGE_ID", "NAME", "ID"]);
    image.sort_key = value(&["IMAGE_ID", "ID"]);
    image.version = value(&["IMAGE_VERSION", "VERSION", "VERSION_ID", "BUILD_ID"]);
}

/// The entry of a boot loader that an image is.
pub fn entry(id: &str, path: &str, image: Image) -> bls::Entry {
    bls::Entry {
        id: id.to_owned(),
        title: image.title.clone(),
        sort_key: image.sort_key.clone(),
        version: image.version.clone(),
        kernel: path.to_owned(),
        initrds: Vec::new(),
        cmdline: image.cmdline.clone(),
        image: Some(image),
        undefined: Vec::new(),
    }
}

fn u16_at(bytes: &[u8], offset: usize) -> Option<u16> {
    let piece = bytes.get(offset..)?.first_chunk()?;
    Some(u16::from_le_bytes(*piece))
}

fn u32_at(bytes: &[u8], offset: usize) -> Option<u32> {
    let piece = bytes.get(offset..)?.first_chunk()?;
    Some(u32::from_le_bytes(*piece))
}

#[cfg(test)]
pub mod tests;
