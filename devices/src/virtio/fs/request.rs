//! As much of FUSE as it takes to refuse a request (linux/fuse.h): the header of requests and that of answers.

/// Bytes of `struct fuse_in_header`.
pub(super) const IN_HEADER: usize = 40;
/// Bytes of `struct fuse_out_header`.
pub(super) const OUT_HEADER: usize = 16;
/// FUSE_INIT: a driver mounts the file system, and knows nothing of an earlier server.
const INIT: u32 = 26;

/// Header of a request; its content is untrusted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Head {
    opcode: u32,
    unique: u64,
}

impl Head {
    /// `bytes` are the first of a request; missing ones are zeroes.
    pub(super) fn new(bytes: [u8; IN_HEADER]) -> Self {
        let [_, _, _, _, a, b, c, d, e, f, g, h, i, j, k, l, ..] = bytes;
        Self {
            opcode: u32::from_le_bytes([a, b, c, d]),
            unique: u64::from_le_bytes([e, f, g, h, i, j, k, l]),
        }
    }

    pub(super) fn is_init(self) -> bool {
        self.opcode == INIT
    }

    /// The answer that the server is not there (ENOTCONN).
    pub(super) fn refusal(self) -> [u8; OUT_HEADER] {
        let mut answer = [0; OUT_HEADER];
        let length = u32::try_from(OUT_HEADER).unwrap_or(0);
        let error = libc::ENOTCONN.wrapping_neg();
        let bytes = length
            .to_le_bytes()
            .into_iter()
            .chain(error.to_le_bytes())
            .chain(self.unique.to_le_bytes());
        for (place, byte) in answer.iter_mut().zip(bytes) {
            *place = byte;
        }
        answer
    }
}

#[cfg(test)]
#[allow(clippy::indexing_slicing)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_names_the_request_and_says_that_nobody_is_connected() {
        let mut bytes = [0; IN_HEADER];
        bytes[4] = 15;
        bytes[8..16].copy_from_slice(&0x1122_3344_5566_7788_u64.to_le_bytes());
        let head = Head::new(bytes);
        assert!(!head.is_init());
        let mut expected = [16_u8, 0, 0, 0, 0x95, 0xff, 0xff, 0xff].to_vec();
        expected.extend_from_slice(&bytes[8..16]);
        assert_eq!(head.refusal().as_slice(), expected);
        bytes[4] = 26;
        assert!(Head::new(bytes).is_init());
    }
}
