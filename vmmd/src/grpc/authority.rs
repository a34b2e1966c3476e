//! Support for clients of the UNIX socket whose `:authority` is a path.
//!
//! gRPC's C core (Python, C++, …) and other clients send the socket's path as `:authority`, escaped
//! (`%2Frun%2Fvmmd.sock`) or unchanged. Such a path is not a valid authority (RFC 9110, 7.2), and
//! the HTTP/2 library resets the stream before our code sees it. On this socket the authority is
//! irrelevant, so the filter replaces `%` and `/` in it by `-` in the incoming bytes.
//!
//! The replacement never changes the length: all three characters have six bits in HPACK's Huffman
//! code (RFC 7541, appendix B). So frames keep their positions, and the tables of both sides stay
//! equal, because the lengths of names and values bound them. Input that the filter cannot parse
//! passes unchanged, and the library reports the error.

use std::{
    io,
    ops::Range,
    pin::Pin,
    task::{Context, Poll, ready},
};

use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::UnixStream,
};

/// Client connection preface (RFC 9113, 3.4).
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// Length, type, flags and stream of a frame (RFC 9113, 4.1).
const FRAME_HEADER: usize = 9;
/// Type of the frame that begins the headers of a request (RFC 9113, 6.2).
const HEADERS: u8 = 1;
const PADDED: u8 = 0x08;
const PRIORITY: u8 = 0x20;
/// Length of what [`PRIORITY`] adds.
const PRIORITY_LENGTH: usize = 5;
/// Longest frame that is looked into, in bytes; the authority is among the first headers.
const LONGEST: usize = 16 << 10;
/// Index of `:authority` in the static table (RFC 7541, appendix A).
const AUTHORITY: usize = 1;
/// Bytes that are read at once.
const CHUNK: usize = 16 << 10;

/// A connection to the UNIX socket, with authorities that can be understood.
#[derive(Debug)]
pub struct LocalStream {
    stream: UnixStream,
    filter: Filter,
    /// Received bytes; the bytes from `next` on are unread.
    ready: Vec<u8>,
    next: usize,
}

impl LocalStream {
    /// Wraps an accepted connection.
    pub fn new(stream: UnixStream) -> Self {
        Self {
            stream,
            filter: Filter::default(),
            ready: Vec::new(),
            next: 0,
        }
    }
}

impl AsyncRead for LocalStream {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        loop {
            let left = this.ready.get(this.next..).unwrap_or_default();
            if !left.is_empty() {
                let (now, _) = left.split_at(left.len().min(buffer.remaining()));
                buffer.put_slice(now);
                this.next += now.len();
                return Poll::Ready(Ok(()));
            }
            this.ready.clear();
            this.next = 0;
            let mut chunk = [0; CHUNK];
            let mut chunk = ReadBuf::new(&mut chunk);
            ready!(Pin::new(&mut this.stream).poll_read(context, &mut chunk))?;
            if chunk.filled().is_empty() {
                // End of the stream: the library handles the rest of a frame.
                this.filter.finish(&mut this.ready);
                if this.ready.is_empty() {
                    return Poll::Ready(Ok(()));
                }
            }
            this.filter.take(chunk.filled(), &mut this.ready);
        }
    }
}

impl AsyncWrite for LocalStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

/// The bytes of a client, frame by frame.
#[derive(Debug, Default)]
struct Filter {
    at: Place,
    /// Bytes received so far of the preface, a frame's header or an inspected frame.
    held: Vec<u8>,
}

/// Where in its bytes a client is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Place {
    /// In the preface.
    #[default]
    Preface,
    /// In a frame's header.
    Header,
    /// In a frame of this length, header included, that is looked into.
    Headers(usize),
    /// In the rest of another frame, which has so many bytes.
    Other(usize),
    /// It does not speak HTTP/2.
    Lost,
}

impl Filter {
    /// Takes received bytes, and appends the bytes to pass on to `out`.
    fn take(&mut self, mut bytes: &[u8], out: &mut Vec<u8>) {
        while !bytes.is_empty() {
            let wanted = match self.at {
                Place::Preface => PREFACE.len(),
                Place::Header => FRAME_HEADER,
                Place::Headers(length) => length,
                Place::Other(left) => {
                    let (now, rest) = bytes.split_at(bytes.len().min(left));
                    out.extend_from_slice(now);
                    bytes = rest;
                    self.at = match left - now.len() {
                        0 => Place::Header,
                        left => Place::Other(left),
                    };
                    continue;
                }
                Place::Lost => return out.extend_from_slice(bytes),
            };
            let missing = wanted.saturating_sub(self.held.len());
            let (now, rest) = bytes.split_at(bytes.len().min(missing));
            self.held.extend_from_slice(now);
            bytes = rest;
            if self.held.len() == wanted {
                self.complete(out);
            }
        }
    }

    /// Handles a complete unit in `held`.
    fn complete(&mut self, out: &mut Vec<u8>) {
        self.at = match self.at {
            Place::Preface if self.held == PREFACE => Place::Header,
            Place::Header => match self.held.as_slice() {
                [high, middle, low, kind, ..] => {
                    let length = [*high, *middle, *low]
                        .into_iter()
                        .fold(0, |length, byte| length << 8 | usize::from(byte));
                    match length {
                        0 => Place::Header,
                        length if *kind == HEADERS && length <= LONGEST => {
                            self.at = Place::Headers(FRAME_HEADER + length);
                            return;
                        }
                        length => Place::Other(length),
                    }
                }
                _ => Place::Lost,
            },
            Place::Headers(_) => {
                let _ = rewrite(&mut self.held);
                Place::Header
            }
            Place::Preface | Place::Other(_) | Place::Lost => Place::Lost,
        };
        out.append(&mut self.held);
    }

    /// No more comes.
    fn finish(&mut self, out: &mut Vec<u8>) {
        out.append(&mut self.held);
    }
}

/// Replaces an invalid authority in a HEADERS frame. Returns `None` if the frame is not parseable.
fn rewrite(frame: &mut [u8]) -> Option<()> {
    let flags = *frame.get(4)?;
    let mut payload = frame.get_mut(FRAME_HEADER..)?;
    if flags & PADDED != 0 {
        let (padding, rest) = payload.split_first_mut()?;
        let length = rest.len().checked_sub(usize::from(*padding))?;
        payload = rest.get_mut(..length)?;
    }
    if flags & PRIORITY != 0 {
        payload = payload.get_mut(PRIORITY_LENGTH..)?;
    }
    let mut at = 0;
    // The representations of RFC 7541, 6.
    while let Some(first) = payload.get(at) {
        let prefix = match first {
            0x80.. => 7,
            0x40.. => 6,
            0x20.. => 5,
            _ => 4,
        };
        let is_literal = !matches!(prefix, 7 | 5);
        let index = integer(payload, &mut at, prefix)?;
        if !is_literal {
            continue;
        }
        let named = index == 0 && {
            let (huffman, name) = string(payload, &mut at)?;
            !huffman && payload.get(name)? == b":authority"
        };
        let (huffman, value) = string(payload, &mut at)?;
        if index != AUTHORITY && !named {
            continue;
        }
        let value = payload.get_mut(value)?;
        if huffman {
            replace_coded(value);
        } else {
            let wrong = value.iter_mut().filter(|byte| b"%/".contains(byte));
            wrong.for_each(|byte| *byte = b'-');
        }
    }
    Some(())
}

/// An integer whose first byte has so many bits of it (RFC 7541, 5.1); `at` is behind it then.
fn integer(bytes: &[u8], at: &mut usize, prefix: u32) -> Option<usize> {
    let most = (1 << prefix) - 1;
    let mut value = usize::from(*bytes.get(*at)?) & most;
    *at += 1;
    if value < most {
        return Some(value);
    }
    for shift in (0..28).step_by(7) {
        let byte = usize::from(*bytes.get(*at)?);
        *at += 1;
        value += (byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Some(value);
        }
    }
    None
}

/// A string (RFC 7541, 5.2): whether it is Huffman coded, and where it is; `at` is behind it then.
fn string(bytes: &[u8], at: &mut usize) -> Option<(bool, Range<usize>)> {
    let huffman = bytes.get(*at)? & 0x80 != 0;
    let length = integer(bytes, at, 7)?;
    let range = *at..at.checked_add(length)?;
    bytes.get(range.clone())?;
    *at = range.end;
    Some((huffman, range))
}

/// Replaces `%` and `/` in a Huffman-coded string by `-`. The code is canonical: the codes of one
/// length are consecutive, and `LENGTHS` has their ends for up to 8 bits. A longer code does not
/// occur in a path of a client, and ends the scan.
fn replace_coded(bytes: &mut [u8]) {
    /// Length of codes, and the first code of that length that is none.
    const LENGTHS: [(u32, u32); 4] = [(5, 0x0a), (6, 0x2e), (7, 0x7c), (8, 0xfe)];
    const PERCENT: u32 = 0x15;
    const DASH: u32 = 0x16;
    const SLASH: u32 = 0x18;
    let mut at = 0;
    loop {
        let found = LENGTHS.iter().find_map(|(length, end)| {
            let code = bits(bytes, at, *length)?;
            (code < *end).then_some((*length, code))
        });
        let Some((length, code)) = found else { return };
        if length == 6 && [PERCENT, SLASH].contains(&code) {
            set_bits(bytes, at, length, DASH);
        }
        at += length as usize;
    }
}

/// So many bits from the bit `at` on; `None` where there are no more.
fn bits(bytes: &[u8], at: usize, length: u32) -> Option<u32> {
    (at..at + length as usize).try_fold(0, |value, bit| {
        let byte = u32::from(*bytes.get(bit / 8)?);
        Some(value << 1 | (byte >> (7 - bit % 8) & 1))
    })
}

fn set_bits(bytes: &mut [u8], at: usize, length: u32, value: u32) {
    for (bit, shift) in (at..).zip((0..length).rev()) {
        if let Some(byte) = bytes.get_mut(bit / 8) {
            let mask = 0x80 >> (bit % 8);
            *byte = if value >> shift & 1 == 1 {
                *byte | mask
            } else {
                *byte & !mask
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `www.example.com` in RFC 7541, C.4.1, of which both dots are replaced by another letter with six bits.
    fn coded(code: u32) -> Vec<u8> {
        let mut bytes = vec![
            0xf1, 0xe3, 0xc2, 0xe5, 0xf2, 0x3a, 0x6b, 0xa0, 0xab, 0x90, 0xf4, 0xff,
        ];
        // w has seven bits, e five, x seven, a five, m six, p six, l six.
        for at in [21, 21 + 6 + 5 + 7 + 5 + 6 + 6 + 6 + 5] {
            assert_eq!(bits(&bytes, at, 6), Some(0x17), "a dot");
            set_bits(&mut bytes, at, 6, code);
        }
        bytes
    }

    fn frame(flags: u8, payload: &[u8]) -> Vec<u8> {
        let length = u8::try_from(payload.len()).unwrap();
        [&[0, 0, length, HEADERS, flags, 0, 0, 0, 1], payload].concat()
    }

    /// A literal with the name `:authority` of the static table, to be remembered.
    fn authority(value: &[u8], huffman: bool) -> Vec<u8> {
        let length = u8::try_from(value.len()).unwrap() | if huffman { 0x80 } else { 0 };
        [&[0x41, length], value].concat()
    }

    fn filtered(bytes: &[u8], chunk: usize) -> Vec<u8> {
        let (mut filter, mut out) = (Filter::default(), Vec::new());
        bytes.chunks(chunk).for_each(|bytes| filter.take(bytes, &mut out));
        filter.finish(&mut out);
        out
    }

    #[test]
    fn path_becomes_an_authority_of_the_same_length() {
        // :method POST, :scheme http, then a path with 4-bit prefix, as a client sends them before.
        let before = [&[0x83, 0x86, 0x04, 2][..], b"/a"].concat();
        let with = |value: &[u8], huffman| [before.clone(), authority(value, huffman)].concat();
        let named = |value: &[u8]| {
            [
                &[0x00, 10][..],
                b":authority",
                &[u8::try_from(value.len()).unwrap()],
                value,
            ]
            .concat()
        };
        let padded = |block: &[u8]| [&[3, 0, 0, 0, 0, 7], block, &[0x41, 1, b'%']].concat();
        for (sent, passed) in [
            (
                frame(4, &with(b"%2Frun%2Fv.sock", false)),
                frame(4, &with(b"-2Frun-2Fv.sock", false)),
            ),
            (
                frame(4, &with(b"/run/v.sock", false)),
                frame(4, &with(b"-run-v.sock", false)),
            ),
            (
                frame(4, &with(&coded(0x15), true)),
                frame(4, &with(&coded(0x16), true)),
            ),
            (
                frame(4, &with(&coded(0x18), true)),
                frame(4, &with(&coded(0x16), true)),
            ),
            (
                frame(4, &with(&coded(0x17), true)),
                frame(4, &with(&coded(0x17), true)),
            ),
            (frame(4, &named(b"%2F")), frame(4, &named(b"-2F"))),
            // With padding, which is no header, and priority.
            (
                frame(PADDED | PRIORITY | 4, &padded(&with(b"%2F", false))),
                frame(PADDED | PRIORITY | 4, &padded(&with(b"-2F", false))),
            ),
        ] {
            // Data with what looks like an authority, before and after.
            let data = [&[0, 0, 5, 0, 0, 0, 0, 0, 1][..], &authority(b"%2F", false)].concat();
            let around = |frame: &[u8]| [PREFACE, &data, frame, &data, frame].concat();
            for chunk in [1, 7, 1000] {
                assert_eq!(filtered(&around(&sent), chunk), around(&passed), "{chunk}");
            }
        }
    }

    #[test]
    fn what_is_no_http_2_or_cut_off_passes_as_it_is() {
        for bytes in [
            &b"GET /%2F HTTP/1.1\r\n\r\n and much more than a preface"[..],
            b"PRI",
            &[PREFACE, &frame(4, &authority(b"%2F", false))[..12]].concat(),
            &[PREFACE, &frame(4, &[0x41, 0x7f, 0xff, 0xff, 0xff, 0xff, b'%'])].concat(),
            &[PREFACE, &frame(PADDED, &[200, 0x41, 1, b'%'])].concat(),
        ] {
            assert_eq!(filtered(bytes, 5), bytes);
        }
    }

    proptest::proptest! {
        #[test]
        fn nothing_is_lost_or_added(bytes: Vec<u8>, chunk in 1_usize..50) {
            let bytes = [PREFACE, &bytes].concat();
            proptest::prop_assert_eq!(filtered(&bytes, chunk).len(), bytes.len());
        }

        #[test]
        fn any_frame_passes(flags: u8, payload in proptest::collection::vec(0_u8.., 0..200)) {
            let sent = [PREFACE, &frame(flags, &payload)].concat();
            let passed = filtered(&sent, 9);
            let changed = sent.iter().zip(&passed).filter(|(one, other)| one != other);
            proptest::prop_assert!(changed.count() <= payload.len());
            proptest::prop_assert_eq!(passed.len(), sent.len());
        }
    }
}
