//! The client's side of SPDY, for tests: frames as bytes.

use flate2::{Compress, Compression, FlushCompress};

use super::dictionary::dictionary;

/// Has what its headers are deflated with.
pub struct Client(Compress);

impl Client {
    pub fn new() -> Self {
        let mut compress = Compress::new(Compression::best(), true);
        compress.set_dictionary(&dictionary()).unwrap();
        Self(compress)
    }

    /// SYN_STREAM.
    pub fn open(&mut self, stream: u32, headers: &[(&str, &str)]) -> Vec<u8> {
        self.with_flags(1, stream, 0, headers)
    }

    /// SYN_STREAM (1) or HEADERS (8).
    pub fn with_flags(&mut self, kind: u8, stream: u32, flags: u8, headers: &[(&str, &str)]) -> Vec<u8> {
        let number = |number: usize| u32::try_from(number).unwrap().to_be_bytes();
        let mut plain = number(headers.len()).to_vec();
        for text in headers.iter().flat_map(|(name, value)| [name, value]) {
            plain.extend(number(text.len()));
            plain.extend(text.as_bytes());
        }
        let mut payload = stream.to_be_bytes().to_vec();
        if kind == 1 {
            payload.extend([0; 6]);
        }
        let mut block = Vec::with_capacity(plain.len() + 100);
        self.0
            .compress_vec(&plain, &mut block, FlushCompress::Sync)
            .unwrap();
        payload.extend(block);
        Self::control(kind, flags, &payload)
    }

    /// Any control frame.
    pub fn control(kind: u8, flags: u8, payload: &[u8]) -> Vec<u8> {
        let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
        let head = [0x80, 3, 0, kind, flags, length[1], length[2], length[3]];
        [&head[..], payload].concat()
    }

    /// A data frame.
    pub fn data(stream: u32, ends: bool, bytes: &[u8]) -> Vec<u8> {
        let length = u32::try_from(bytes.len()).unwrap().to_be_bytes();
        let stream = stream.to_be_bytes();
        [&stream[..], &[u8::from(ends)], &length[1..], bytes].concat()
    }
}
