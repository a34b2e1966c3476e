//! Signatures of image formats. They are looked for when somebody says that a file is raw, and never to choose a format: a guest
//! can write any of them into its raw disk.

/// How many bytes of an image [`of`] needs.
pub const LENGTH: usize = 512;

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

/// The image format whose signature the first bytes of a file have; `None` when they have none that is known.
pub fn of(head: &[u8]) -> Option<&'static str> {
    let found = SIGNATURES
        .iter()
        .find(|(bytes, offset, _)| head.get(*offset..).is_some_and(|rest| rest.starts_with(bytes)));
    found.map(|(.., format)| *format)
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
