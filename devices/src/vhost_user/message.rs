//! Messages as they are on the wire: a header of three words and a body, in the host's order of bytes, which is little-endian on
//! all hosts that there are.

/// Feature bit: the protocol has features of its own (VHOST_USER_F_PROTOCOL_FEATURES).
pub const PROTOCOL_FEATURES: u64 = 1 << 30;
/// Bytes of a header.
pub(super) const HEADER: usize = 12;
/// The version of the protocol, in the two lowest bits of the flags.
const VERSION: u32 = 1;
const FLAG_REPLY: u32 = 1 << 2;
/// An acknowledgement is wanted.
pub(super) const FLAG_NEED_REPLY: u32 = 1 << 3;

/// Requests of a front end ("Front-end message types").
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(super) enum Request {
    GetFeatures = 1,
    SetFeatures = 2,
    SetOwner = 3,
    SetMemTable = 5,
    SetVringNum = 8,
    SetVringAddr = 9,
    SetVringBase = 10,
    GetVringBase = 11,
    SetVringKick = 12,
    SetVringCall = 13,
    SetVringErr = 14,
    GetProtocolFeatures = 15,
    SetProtocolFeatures = 16,
    SetVringEnable = 18,
    SetDeviceStateFd = 42,
    CheckDeviceState = 43,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    request: u32,
    flags: u32,
    size: u32,
}

impl Header {
    pub(super) fn new(request: Request, flags: u32, size: usize) -> Self {
        Self {
            request: request as u32,
            flags: VERSION | flags,
            size: u32::try_from(size).unwrap_or(u32::MAX),
        }
    }

    pub(super) fn bytes(self) -> [u8; HEADER] {
        let mut bytes = [0; HEADER];
        let words = [self.request, self.flags, self.size];
        for (place, word) in bytes.chunks_exact_mut(4).zip(words) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// Whether it is of an answer to `request` with a body of that many bytes.
    pub(super) fn answers(self, request: Request, size: usize) -> bool {
        let flags = self.flags & !FLAG_NEED_REPLY;
        self == Self {
            flags: self.flags,
            ..Self::new(request, 0, size)
        } && flags == VERSION | FLAG_REPLY
    }
}

impl From<[u8; HEADER]> for Header {
    fn from(bytes: [u8; HEADER]) -> Self {
        let [a, b, c, d, e, f, g, h, i, j, k, l] = bytes;
        Self {
            request: u32::from_le_bytes([a, b, c, d]),
            flags: u32::from_le_bytes([e, f, g, h]),
            size: u32::from_le_bytes([i, j, k, l]),
        }
    }
}

/// Where a ring is in guest memory, by guest-physical addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingAddresses {
    /// Number of descriptors.
    pub size: u16,
    /// Descriptor table.
    pub descriptors: u64,
    /// Available ring.
    pub available: u64,
    /// Used ring.
    pub used: u64,
}

impl RingAddresses {
    /// The body of SET_VRING_ADDR; nothing is logged.
    pub(super) fn body(&self, index: u32) -> Vec<u8> {
        let mut body = [index.to_le_bytes(), [0; 4]].concat();
        for address in [self.descriptors, self.used, self.available, 0] {
            body.extend_from_slice(&address.to_le_bytes());
        }
        body
    }
}
