//! Signatures of image formats. They are looked for when somebody says that a file is raw, and never to choose a format: a guest
//! can write any of them into its raw disk.

use std::{io, os::fd::AsFd};

use vmmd_host::{failure::Failure, text};

/// How many bytes of an image [`of`] is given.
const LENGTH: usize = 4096;

/// Aligned as every file and device wants it that is read past the page cache.
#[repr(align(4096))]
struct Head([u8; LENGTH]);

/// Bytes, where they are, and whose they are: QEMU's docs/interop/qcow2.txt and qed_spec.txt, the VMDK specification 5.0 (4.1, "Sparse Extent
/// Header"), the VHD specification ("Hard Disk Footer Format", of which a dynamic disk has a copy at its beginning), MS-VHDX 2.2.1, and
/// VirtualBox' VDICore.h (offset 64, little-endian).
const SIGNATURES: [(&[u8], usize, &str); 6] = [
    (b"QFI\xfb", 0, "qcow2"),
    (b"QED\0", 0, "QED"),
    (b"KDMV", 0, "VMDK"),
    (b"conectix", 0, "VHD"),
    (b"vhdxfile", 0, "VHDX"),
    (&[0x7f, 0x10, 0xda, 0xbe], 64, "VDI"),
];

/// Image format with this signature; `None` for an unknown signature.
fn of(head: &[u8]) -> Option<&'static str> {
    let found = SIGNATURES
        .iter()
        .find(|(bytes, offset, _)| head.get(*offset..).is_some_and(|rest| rest.starts_with(bytes)));
    found.map(|(.., format)| *format)
}

/// Refused as IMAGE_FORMAT_MISMATCH when a file that is said to be raw begins as an image of another format does. Blocking; `label`
/// begins the message.
pub fn refuse(label: &str, file: impl AsFd) -> Result<(), Failure> {
    let mut head = Head([0; LENGTH]);
    let read = rustix::io::pread(file, &mut head.0, 0).map_err(|errno| {
        let problem = text::words(&io::Error::from(errno));
        Failure::precondition("DISK_UNUSABLE", format!("{label}: {problem}"))
    })?;
    let Some(format) = of(head.0.get(..read).unwrap_or_default()) else {
        return Ok(());
    };
    let message = format!(
        "{label} is a {format} image, not a raw one: say so, or convert it first (`qemu-img convert -O raw`), or set `anyContent` if \
         its raw content is meant"
    );
    Err(Failure::precondition("IMAGE_FORMAT_MISMATCH", message))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signatures_are_known_at_their_place_only() {
        for (bytes, offset, format) in SIGNATURES {
            let mut head = [0; LENGTH];
            head[offset..offset + bytes.len()].copy_from_slice(bytes);
            assert_eq!(of(&head), Some(format));
            head.rotate_right(1);
            assert_eq!(of(&head), None, "{format}");
            assert_eq!(of(&bytes[..bytes.len() - 1]), None, "{format}");
        }
        assert_eq!(of(&[]), None);
    }
}
