//! Decompresses a file from its beginning to its end. Several members, streams or frames, one after the other, are one content.

use std::io::{self, BufRead, Read};

use bzip2::bufread::BzDecoder;
use flate2::bufread::GzDecoder;
use lzma_rust2::XzReader;
use ruzstd::decoding::{BlockDecodingStrategy, FrameDecoder};

/// Read at a time, in bytes.
const BUFFER: usize = 256 << 10;
/// Enough to know what follows in the compressed bytes.
const MAGIC: usize = 10;

/// How a file is compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compression {
    Gzip,
    Xz,
    Zstd,
    Bzip2,
}

impl Compression {
    /// By the first bytes of a file; `None` when it is not compressed.
    pub fn of(head: &[u8]) -> Option<Self> {
        let all = [Self::Gzip, Self::Xz, Self::Zstd, Self::Bzip2];
        // A frame to skip may also be the first one of lz4: the next frame decides.
        let skippable = is_skippable(head).then_some(Self::Zstd);
        all.into_iter().find(|kind| kind.begins(head)).or(skippable)
    }

    /// Whether a member of it begins here: RFC 1952, 2.3.1; .xz 1.2, 2.1.1.1; RFC 8878, 3.1.1; bzip2 has no specification: "BZh", the level,
    /// and the digits of pi before a block or those of its root before the end.
    fn begins(self, head: &[u8]) -> bool {
        match self {
            Self::Gzip => head.starts_with(b"\x1f\x8b\x08"),
            Self::Xz => head.starts_with(b"\xfd7zXZ\0"),
            Self::Zstd => head.starts_with(b"\x28\xb5\x2f\xfd"),
            Self::Bzip2 => {
                let block = head.get(4..10).unwrap_or_default();
                let level = head.get(3).is_some_and(|level| (b'1'..=b'9').contains(level));
                head.starts_with(b"BZh")
                    && level
                    && (block == b"\x31\x41\x59\x26\x53\x59" || block == b"\x17\x72\x45\x38\x50\x90")
            }
        }
    }

    /// Whether other bytes behind the last member are ignored, as gzip(1) and bzip2(1) do: images with metadata behind the compressed
    /// disk are published. Zeroes, which fill up a block, are ignored in any case.
    fn ignores_trailer(self) -> bool {
        matches!(self, Self::Gzip | Self::Bzip2)
    }

    pub fn name(self) -> &'static str {
        match self {
            Self::Gzip => "gzip",
            Self::Xz => "xz",
            Self::Zstd => "zstd",
            Self::Bzip2 => "bzip2",
        }
    }

    /// The content of a compressed file.
    pub fn decompressed<'a>(self, content: impl Read + 'a) -> Box<dyn Read + 'a> {
        Box::new(Members {
            kind: self,
            state: State::Between(Input::new(Box::new(content))),
            any: false,
        })
    }
}

/// A frame of zstd or lz4 that decoders skip (RFC 8878, 3.1.2).
fn is_skippable(head: &[u8]) -> bool {
    head.get(1..4) == Some(b"\x2a\x4d\x18") && head.first().is_some_and(|byte| byte & 0xf0 == 0x50)
}

/// Compressed bytes, of which the next ones can be looked at.
struct Input<'a> {
    content: Box<dyn Read + 'a>,
    buffer: Vec<u8>,
    from: usize,
    to: usize,
}

impl<'a> Input<'a> {
    fn new(content: Box<dyn Read + 'a>) -> Self {
        Self {
            content,
            buffer: vec![0; BUFFER],
            from: 0,
            to: 0,
        }
    }

    /// The next bytes, fewer at the end.
    fn peek(&mut self, count: usize) -> io::Result<&[u8]> {
        if self.to - self.from < count {
            self.buffer.copy_within(self.from..self.to, 0);
            (self.from, self.to) = (0, self.to - self.from);
        }
        while self.to - self.from < count {
            let rest = self.buffer.get_mut(self.to..).unwrap_or_default();
            match self.content.read(rest) {
                Ok(0) => break,
                Ok(more) => self.to += more,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        let rest = self.buffer.get(self.from..self.to).unwrap_or_default();
        Ok(rest.get(..count).unwrap_or(rest))
    }

    /// Skips zeroes; whether the end follows.
    fn skip_zeroes(&mut self) -> io::Result<bool> {
        loop {
            let next = self.fill_buf()?;
            let zeroes = next.iter().take_while(|byte| **byte == 0).count();
            if zeroes == 0 {
                return Ok(next.is_empty());
            }
            self.consume(zeroes);
        }
    }
}

impl Read for Input<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let mut next = self.fill_buf()?;
        let count = next.read(buffer)?;
        self.consume(count);
        Ok(count)
    }
}

impl BufRead for Input<'_> {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        self.peek(1)?;
        Ok(self.buffer.get(self.from..self.to).unwrap_or_default())
    }

    fn consume(&mut self, count: usize) {
        self.from = self.to.min(self.from.saturating_add(count));
    }
}

/// Members one after the other.
struct Members<'a> {
    kind: Compression,
    state: State<'a>,
    /// One was read to its end.
    any: bool,
}

enum State<'a> {
    Between(Input<'a>),
    Gzip(Box<GzDecoder<Input<'a>>>),
    Bzip2(BzDecoder<Input<'a>>),
    Xz(Box<XzReader<Input<'a>>>),
    Zstd(Box<(FrameDecoder, Input<'a>)>),
    /// The end, or an error.
    Ended,
}

impl<'a> Members<'a> {
    /// The state after a member, or at the beginning.
    fn next(&mut self, mut input: Input<'a>) -> io::Result<State<'a>> {
        if self.kind == Compression::Zstd {
            skip_frames(&mut input)?;
        }
        let mut begins = self.kind.begins(input.peek(MAGIC)?);
        if !begins {
            if self.any && self.kind.ignores_trailer() || input.skip_zeroes()? {
                return Ok(State::Ended);
            }
            begins = self.any && self.kind.begins(input.peek(MAGIC)?);
        }
        if !begins && input.peek(MAGIC)?.starts_with(b"\x04\x22\x4d\x18") {
            return Err(io::Error::other("it is compressed with lz4: decompress it first"));
        }
        if !begins && self.any {
            return Err(io::Error::other("other data follows the compressed data"));
        }
        Ok(match self.kind {
            Compression::Gzip => State::Gzip(Box::new(GzDecoder::new(input))),
            Compression::Bzip2 => State::Bzip2(BzDecoder::new(input)),
            Compression::Xz => State::Xz(Box::new(XzReader::new(input, false))),
            Compression::Zstd => {
                let mut decoder = FrameDecoder::default();
                decoder.init(&mut input).map_err(io::Error::other)?;
                State::Zstd(Box::new((decoder, input)))
            }
        })
    }
}

/// Skips frames of zstd without content.
fn skip_frames(input: &mut Input<'_>) -> io::Result<()> {
    while is_skippable(input.peek(8)?) {
        let length = input.peek(8)?.get(4..).and_then(|rest| rest.first_chunk());
        let length = length.map_or(u64::MAX, |length| u32::from_le_bytes(*length).into());
        let whole = length.saturating_add(8);
        if io::copy(&mut input.take(whole), &mut io::sink())? < whole {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
    }
    Ok(())
}

impl Read for Members<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if buffer.is_empty() {
            return Ok(0);
        }
        loop {
            let count = match &mut self.state {
                State::Between(_) => 0,
                State::Gzip(decoder) => decoder.read(buffer)?,
                State::Bzip2(decoder) => decoder.read(buffer)?,
                State::Xz(decoder) => decoder.read(buffer)?,
                State::Zstd(both) => read_frame(&mut both.0, &mut both.1, buffer)?,
                State::Ended => return Ok(0),
            };
            if count > 0 {
                return Ok(count);
            }
            let input = match std::mem::replace(&mut self.state, State::Ended) {
                State::Between(input) => input,
                State::Gzip(decoder) => decoder.into_inner(),
                State::Bzip2(decoder) => decoder.into_inner(),
                State::Xz(decoder) => decoder.into_inner(),
                State::Zstd(both) => both.1,
                State::Ended => return Ok(0),
            };
            self.state = self.next(input)?;
            self.any = true;
        }
    }
}

fn read_frame(decoder: &mut FrameDecoder, input: &mut Input<'_>, buffer: &mut [u8]) -> io::Result<usize> {
    while decoder.can_collect() == 0 && !decoder.is_finished() {
        let some = BlockDecodingStrategy::UptoBytes(buffer.len());
        decoder
            .decode_blocks(&mut *input, some)
            .map_err(io::Error::other)?;
    }
    decoder.read(buffer)
}
