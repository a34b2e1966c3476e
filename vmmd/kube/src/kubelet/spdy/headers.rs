//! Blocks of headers (draft-mbelshe-httpbis-spdy-00, 2.6.10): all blocks of one direction form one
//! zlib stream that uses the dictionary from its start.

use std::collections::BTreeMap;

use flate2::{Compress, Compression, Decompress, FlushCompress, FlushDecompress, Status};

use super::{dictionary::dictionary, session::Violation};

/// Limit on the bytes of an inflated block. Blocks of `kubectl` have about a hundred.
pub const MAX_BLOCK: usize = 16 << 10;
/// Headers in a block at most.
pub const MAX_HEADERS: usize = 64;

/// Names, in lower case, and values. For a header with several values, the first one.
pub type Headers = BTreeMap<String, String>;

/// Inflates the blocks of one direction, in their order.
#[derive(Debug)]
pub struct Inflater(Decompress);

impl Inflater {
    pub fn new() -> Self {
        Self(Decompress::new(true))
    }

    /// The headers of the next block.
    pub fn headers(&mut self, block: &[u8]) -> Result<Headers, Violation> {
        parse(&self.inflate(block)?)
    }

    fn inflate(&mut self, block: &[u8]) -> Result<Vec<u8>, Violation> {
        let begin = self.0.total_in();
        // One byte more, so that excess length is detected.
        let mut inflated = vec![0; MAX_BLOCK + 1];
        let mut length = 0;
        loop {
            let consumed = usize::try_from(self.0.total_in() - begin).unwrap_or(usize::MAX);
            let input = block.get(consumed..).unwrap_or_default();
            let room = inflated.get_mut(length..).unwrap_or_default();
            let (read, written) = (self.0.total_in(), self.0.total_out());
            match self.0.decompress(input, room, FlushDecompress::Sync) {
                Ok(Status::StreamEnd) => return Err(Violation::Compression),
                Ok(Status::Ok | Status::BufError) => {}
                Err(error) if error.needs_dictionary().is_some() => {
                    let set = self.0.set_dictionary(&dictionary());
                    set.map_err(|_| Violation::Compression)?;
                    continue;
                }
                Err(_) => return Err(Violation::Compression),
            }
            length += usize::try_from(self.0.total_out() - written).unwrap_or(usize::MAX);
            if length > MAX_BLOCK {
                return Err(Violation::TooManyHeaders);
            }
            if (self.0.total_in(), self.0.total_out()) == (read, written) {
                inflated.truncate(length);
                return Ok(inflated);
            }
        }
    }
}

fn parse(block: &[u8]) -> Result<Headers, Violation> {
    let (count, mut rest) = number(block)?;
    if count > MAX_HEADERS {
        return Err(Violation::TooManyHeaders);
    }
    let mut headers = Headers::new();
    for _ in 0..count {
        let name = text(&mut rest)?;
        let value = text(&mut rest)?;
        if name.is_empty() || name.bytes().any(|byte| byte.is_ascii_uppercase()) {
            return Err(Violation::Header);
        }
        let first = value.split('\0').next().unwrap_or_default();
        if headers.insert(name.to_owned(), first.to_owned()).is_some() {
            return Err(Violation::Header);
        }
    }
    match rest {
        [] => Ok(headers),
        _ => Err(Violation::Header),
    }
}

fn number(bytes: &[u8]) -> Result<(usize, &[u8]), Violation> {
    let (number, rest) = bytes.split_first_chunk().ok_or(Violation::Header)?;
    let number = usize::try_from(u32::from_be_bytes(*number)).map_err(|_| Violation::Header)?;
    Ok((number, rest))
}

fn text<'a>(rest: &mut &'a [u8]) -> Result<&'a str, Violation> {
    let (length, after) = number(rest)?;
    let (text, after) = after.split_at_checked(length).ok_or(Violation::Header)?;
    *rest = after;
    std::str::from_utf8(text).map_err(|_| Violation::Header)
}

/// Deflates the blocks of one direction, in their order.
#[derive(Debug)]
pub struct Deflater {
    compress: Compress,
    begun: bool,
}

impl Deflater {
    pub fn new() -> Self {
        Self {
            compress: Compress::new(Compression::fast(), true),
            begun: false,
        }
    }

    /// The next block.
    pub fn block(&mut self, headers: &Headers) -> Vec<u8> {
        let mut plain = Vec::new();
        let mut put = |length: usize| plain.extend(u32::try_from(length).unwrap_or_default().to_be_bytes());
        put(headers.len());
        for text in headers.iter().flat_map(|(name, value)| [name, value]) {
            plain.extend(u32::try_from(text.len()).unwrap_or_default().to_be_bytes());
            plain.extend(text.as_bytes());
        }
        if !self.begun {
            // It can fail only later in a stream.
            let _ = self.compress.set_dictionary(&dictionary());
            self.begun = true;
        }
        // Enough for any block and its end.
        let mut block = Vec::with_capacity(plain.len() + plain.len() / 100 + 64);
        let _ = self
            .compress
            .compress_vec(&plain, &mut block, FlushCompress::Sync);
        block
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_dictionary_is_that_of_the_draft() {
        let dictionary = dictionary();
        assert_eq!(dictionary.len(), 1423);
        // Checksum by which zlib names a dictionary, after its first two bytes.
        let mut compress = Compress::new(Compression::fast(), true);
        assert_eq!(compress.set_dictionary(&dictionary).unwrap(), 0xe3c6_a7c2);
    }

    /// Blocks as Go's compress/zlib writes them with the dictionary, which is what spdystream has.
    #[test]
    fn what_the_other_side_deflated_is_inflated() {
        let mut inflater = Inflater::new();
        for (block, wanted) in [
            (
                "78f9e3c6a7c26260606004a7b392a2d4c45c6851c29a0a0a6800000000ffff",
                &[("streamtype", "error")][..],
            ),
            ("c22e555c92929907000000ffff", &[("streamtype", "stdin")]),
            (
                "02255548a95d04ce20160616060c0c0c9c459058ce04a57e46030ccda0222a11000000ffff",
                &[("port", "8080"), ("requestid", "0"), ("streamtype", "data")],
            ),
        ] {
            let pairs = block.as_bytes().chunks(2);
            let block: Vec<_> = pairs
                .map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap())
                .collect();
            let wanted = wanted.iter();
            let wanted: Headers = wanted
                .map(|(name, value)| ((*name).into(), (*value).into()))
                .collect();
            assert_eq!(inflater.headers(&block), Ok(wanted));
        }
    }

    #[test]
    fn a_block_that_is_not_right_is_refused() {
        for (block, wanted) in [
            (&b""[..], Violation::Header),
            (&[0, 0, 0, 1], Violation::Header),
            (&[0, 0, 0, 65], Violation::TooManyHeaders),
            (&[0, 0, 0, 1, 0xff, 0xff, 0xff, 0xff], Violation::Header),
            (&[0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0], Violation::Header),
            (&[0, 0, 0, 1, 0, 0, 0, 1, b'A', 0, 0, 0, 0], Violation::Header),
            (&[0, 0, 0, 1, 0, 0, 0, 1, 0xff, 0, 0, 0, 0], Violation::Header),
            (&[0, 0, 0, 0, 0], Violation::Header),
            (
                &[
                    0, 0, 0, 2, 0, 0, 0, 1, b'a', 0, 0, 0, 0, 0, 0, 0, 1, b'a', 0, 0, 0, 0,
                ],
                Violation::Header,
            ),
        ] {
            assert_eq!(parse(block), Err(wanted), "{block:?}");
        }
        let several = [0, 0, 0, 1, 0, 0, 0, 1, b'a', 0, 0, 0, 3, b'x', 0, b'y'];
        assert_eq!(parse(&several), Ok(Headers::from([("a".into(), "x".into())])));
    }

    #[test]
    fn what_inflates_to_more_than_a_block_may_have_is_refused() {
        let mut compress = Compress::new(Compression::best(), true);
        compress.set_dictionary(&dictionary()).unwrap();
        let mut bomb = Vec::with_capacity(1 << 20);
        let zeros = vec![0; 8 << 20];
        compress
            .compress_vec(&zeros, &mut bomb, FlushCompress::Sync)
            .unwrap();
        assert!(bomb.len() < MAX_BLOCK, "{}", bomb.len());
        assert_eq!(Inflater::new().headers(&bomb), Err(Violation::TooManyHeaders));
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn headers_are_the_same_after_the_way(
            blocks in proptest::collection::vec(
                proptest::collection::btree_map("[a-z-]{1,20}", "[ -~]{0,200}", 0..8), 1..5,
            ),
        ) {
            let (mut deflater, mut inflater) = (Deflater::new(), Inflater::new());
            for headers in blocks {
                let block = deflater.block(&headers);
                prop_assert_eq!(inflater.headers(&block), Ok(headers));
            }
        }
    }
}
