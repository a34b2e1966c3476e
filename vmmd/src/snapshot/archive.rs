//! Container format of a snapshot for export and import.
//!
//! ```text
//! archive = "vmmdsnapshot" version:u32 RECORD (FILE DATA*)+ END          numbers are little-endian
//! part    = kind:u32 length:u32 content[length] checksum:u32
//! ```
//!
//! | kind | content |
//! |---|---|
//! | 1 RECORD | description of the snapshot, opaque to this module |
//! | 2 FILE | number:u32 length:u64; numbers go up from 0 |
//! | 3 DATA | offset:u64, then bytes of the file there; bytes without a part are zeroes |
//! | 4 END | nothing |
//!
//! The checksum of a part is the CRC32C of all earlier bytes of the archive except the checksums.
//! (The CRC of data that includes its own checksum would be a constant.) A changed, lost,
//! duplicated or moved part is therefore detected at its own position or at the next part. The
//! checksum protects against accidents; the archive has no proof of its origin.

use std::fmt;

/// The first bytes.
const MAGIC: &[u8; 12] = b"vmmdsnapshot";
/// Version of the container.
const VERSION: u32 = 1;
/// Length of the bytes before the first part.
const BEGIN: usize = MAGIC.len() + 4;
/// Length of a part's kind and length.
const HEADER: usize = 8;
const CHECKSUM: usize = 4;

/// Longest record in bytes.
pub const MAX_RECORD: usize = 1 << 20;
/// Most bytes of a file in a part.
pub const MAX_DATA: usize = 128 << 10;

const RECORD: u32 = 1;
const FILE: u32 = 2;
const DATA: u32 = 3;
const END: u32 = 4;

/// A part of an archive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Part {
    /// Description of the snapshot.
    Record(Vec<u8>),
    /// The bytes that follow are of this file.
    File {
        /// From 0.
        number: u32,
        /// Its length in bytes.
        length: u64,
    },
    /// Bytes of the file.
    Data {
        /// Where they are in it.
        offset: u64,
        /// At least one.
        bytes: Vec<u8>,
    },
    /// Nothing follows.
    End,
}

/// Where an archive is not as it must be.
#[derive(Debug, PartialEq, Eq)]
pub struct Damaged {
    /// Position in the archive, in bytes.
    at: u64,
    problem: &'static str,
}

impl fmt::Display for Damaged {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the archive is damaged at byte {}: {}", self.at, self.problem)
    }
}

/// Makes the bytes of an archive.
#[derive(Debug)]
pub struct Writer {
    checksum: u32,
}

impl Writer {
    /// One, and the bytes with which the archive begins.
    pub fn begin() -> (Self, Vec<u8>) {
        let bytes = [MAGIC.as_slice(), &VERSION.to_le_bytes()].concat();
        let checksum = crc32c::crc32c(&bytes);
        (Self { checksum }, bytes)
    }

    /// The bytes of the next part.
    pub fn part(&mut self, part: &Part) -> Vec<u8> {
        match part {
            Part::Record(record) => self.bytes(RECORD, &[record]),
            Part::File { number, length } => {
                self.bytes(FILE, &[&number.to_le_bytes(), &length.to_le_bytes()])
            }
            Part::Data { offset, bytes } => self.bytes(DATA, &[&offset.to_le_bytes(), bytes]),
            Part::End => self.bytes(END, &[]),
        }
    }

    /// The bytes of a part of any kind.
    pub(super) fn bytes(&mut self, kind: u32, content: &[&[u8]]) -> Vec<u8> {
        let length: usize = content.iter().map(|piece| piece.len()).sum();
        let mut bytes = Vec::with_capacity(HEADER + length + CHECKSUM);
        bytes.extend(kind.to_le_bytes());
        bytes.extend(u32::try_from(length).unwrap_or(u32::MAX).to_le_bytes());
        for piece in content {
            bytes.extend_from_slice(piece);
        }
        self.checksum = crc32c::crc32c_append(self.checksum, &bytes);
        bytes.extend(self.checksum.to_le_bytes());
        bytes
    }
}

/// Parts that may follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Next {
    Begin,
    Record,
    /// The first file.
    File,
    /// Data of a file, the next file, or the end.
    Data {
        number: u32,
        length: u64,
        /// Where the next data may begin.
        from: u64,
    },
    /// It was whole.
    Nothing,
}

/// Parser of an archive in pieces of any size. Buffers one part at most.
#[derive(Debug)]
pub struct Reader {
    next: Next,
    /// Where the part that is coming begins.
    at: u64,
    checksum: u32,
    /// Bytes of the part received so far.
    come: Vec<u8>,
}

impl Reader {
    /// One at the beginning of an archive.
    pub fn new() -> Self {
        Self {
            next: Next::Begin,
            at: 0,
            checksum: 0,
            come: Vec::new(),
        }
    }

    /// How many bytes of the archive have come.
    pub fn position(&self) -> u64 {
        self.at.saturating_add(self.come.len() as u64)
    }

    /// Returns the next part when `bytes`, which continue those of earlier calls, complete it, and
    /// removes the used bytes. `None` when the part is incomplete; all bytes are then used.
    pub fn next(&mut self, bytes: &mut &[u8]) -> Result<Option<Part>, Damaged> {
        loop {
            if self.next == Next::Nothing {
                return match bytes.is_empty() {
                    true => Ok(None),
                    false => Err(self.damaged("there is data behind its end")),
                };
            }
            let missing = self.wanted()?.saturating_sub(self.come.len());
            if missing > 0 {
                let Some((come, rest)) = bytes.split_at_checked(missing.min(bytes.len())) else {
                    return Ok(None);
                };
                if come.is_empty() {
                    return Ok(None);
                }
                self.come.extend_from_slice(come);
                *bytes = rest;
                continue;
            }
            let whole = std::mem::take(&mut self.come);
            if self.next == Next::Begin {
                self.begin(&whole)?;
                self.checksum = crc32c::crc32c(&whole);
                self.pass(&whole, Next::Record);
                continue;
            }
            return self.part(&whole).map(Some);
        }
    }

    /// Refuses an archive that ends here too early.
    pub fn finish(&self) -> Result<(), Damaged> {
        match self.next {
            Next::Nothing => Ok(()),
            _ => Err(Damaged {
                at: self.position(),
                problem: "it ends there, before its end mark",
            }),
        }
    }

    /// Length of the present part, as far as it is known. An invalid length is refused before any
    /// of its bytes are buffered.
    fn wanted(&self) -> Result<usize, Damaged> {
        if self.next == Next::Begin {
            return Ok(BEGIN);
        }
        let Some((kind, length)) = header(&self.come) else {
            return Ok(HEADER);
        };
        let lengths = match (self.next, kind) {
            (Next::Record, RECORD) => 1..=MAX_RECORD,
            (Next::File | Next::Data { .. }, FILE) => 12..=12,
            (Next::Data { .. }, DATA) => 9..=8 + MAX_DATA,
            (Next::Data { .. }, END) => 0..=0,
            (_, RECORD | FILE | DATA | END) => {
                return Err(self.damaged("a part is there that may not come here"));
            }
            _ => return Err(self.damaged("a part is of a kind that this vmmd does not know")),
        };
        match lengths.contains(&length) {
            true => Ok(HEADER + length + CHECKSUM),
            false => Err(self.damaged("a part says a length that it can't have")),
        }
    }

    fn begin(&self, bytes: &[u8]) -> Result<(), Damaged> {
        match bytes.split_first_chunk() {
            Some((MAGIC, version)) if version == VERSION.to_le_bytes() => Ok(()),
            Some((MAGIC, _)) => Err(self.damaged("it is of a version that this vmmd does not know")),
            _ => Err(self.damaged("it does not begin as an archive of a snapshot does")),
        }
    }

    fn part(&mut self, whole: &[u8]) -> Result<Part, Damaged> {
        let (kind, _) = header(whole).unwrap_or_default();
        let Some((bytes, sum)) = whole.split_last_chunk::<CHECKSUM>() else {
            return Err(self.damaged("a part has no checksum"));
        };
        let checksum = crc32c::crc32c_append(self.checksum, bytes);
        if checksum != u32::from_le_bytes(*sum) {
            return Err(self.damaged("the checksum of a part is wrong"));
        }
        let content = bytes.get(HEADER..).unwrap_or_default();
        let (part, next) = match (self.next, kind) {
            (Next::Record, _) => (Part::Record(content.to_vec()), Next::File),
            (before, FILE) => self.file(before, content)?,
            (Next::Data { .. }, DATA) => self.data(content)?,
            _ => (Part::End, Next::Nothing),
        };
        self.checksum = checksum;
        self.pass(whole, next);
        Ok(part)
    }

    fn file(&self, before: Next, content: &[u8]) -> Result<(Part, Next), Damaged> {
        let wanted = match before {
            Next::Data { number, .. } => number.checked_add(1),
            _ => Some(0),
        };
        let Some((number, length)) = content
            .split_first_chunk()
            .and_then(|(number, length)| Some((u32::from_le_bytes(*number), length.first_chunk()?)))
        else {
            return Err(self.damaged("a file has no length"));
        };
        if Some(number) != wanted {
            return Err(self.damaged("a file is not the one that comes next"));
        }
        let length = u64::from_le_bytes(*length);
        let next = Next::Data {
            number,
            length,
            from: 0,
        };
        Ok((Part::File { number, length }, next))
    }

    fn data(&self, content: &[u8]) -> Result<(Part, Next), Damaged> {
        let Next::Data { number, length, from } = self.next else {
            return Err(self.damaged("data is of no file"));
        };
        let Some((offset, bytes)) = content.split_first_chunk() else {
            return Err(self.damaged("data has no offset"));
        };
        let offset = u64::from_le_bytes(*offset);
        let end = offset
            .checked_add(bytes.len() as u64)
            .filter(|end| *end <= length);
        let Some(end) = end.filter(|_| offset >= from) else {
            return Err(self.damaged("data is not behind that before it, or not within its file"));
        };
        let part = Part::Data {
            offset,
            bytes: bytes.to_vec(),
        };
        let next = Next::Data {
            number,
            length,
            from: end,
        };
        Ok((part, next))
    }

    /// Moves the position behind these bytes.
    fn pass(&mut self, bytes: &[u8], next: Next) {
        self.at = self.at.saturating_add(bytes.len() as u64);
        self.next = next;
    }

    fn damaged(&self, problem: &'static str) -> Damaged {
        Damaged { at: self.at, problem }
    }
}

/// Kind and length of a part.
fn header(bytes: &[u8]) -> Option<(u32, usize)> {
    let (kind, rest) = bytes.split_first_chunk()?;
    let length = u32::from_le_bytes(*rest.first_chunk()?);
    Some((u32::from_le_bytes(*kind), usize::try_from(length).ok()?))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Parts, and where each of them ends.
    fn archive(parts: &[Part]) -> (Vec<u8>, Vec<usize>) {
        let (mut writer, mut bytes) = Writer::begin();
        let mut ends = vec![bytes.len()];
        for part in parts {
            bytes.extend(writer.part(part));
            ends.push(bytes.len());
        }
        (bytes, ends)
    }

    fn read(bytes: &[u8], piece: usize) -> Result<Vec<Part>, Damaged> {
        let (mut reader, mut parts) = (Reader::new(), Vec::new());
        for mut piece in bytes.chunks(piece) {
            while let Some(part) = reader.next(&mut piece)? {
                parts.push(part);
            }
            assert!(piece.is_empty());
            assert!(reader.come.len() <= HEADER + MAX_RECORD + CHECKSUM);
        }
        reader.finish().map(|()| parts)
    }

    fn data(offset: u64, bytes: &[u8]) -> Part {
        Part::Data {
            offset,
            bytes: bytes.to_vec(),
        }
    }

    fn file(number: u32, length: u64) -> Part {
        Part::File { number, length }
    }

    fn whole() -> Vec<Part> {
        vec![
            Part::Record(b"record".to_vec()),
            file(0, 1 << 40),
            data(0, b"first"),
            data(4096, b"second"),
            data((1 << 40) - 4, b"last"),
            file(1, 0),
            file(2, 5),
            data(0, b"whole"),
            Part::End,
        ]
    }

    #[test]
    fn an_archive_is_read_as_it_was_written_whatever_its_pieces() {
        let (bytes, _) = archive(&whole());
        for piece in [1, 2, 3, 7, 16, 1000] {
            assert_eq!(read(&bytes, piece).as_ref(), Ok(&whole()), "{piece}");
        }
    }

    #[test]
    fn archive_that_was_cut_off_is_refused_with_the_place() {
        let (bytes, _) = archive(&whole());
        for length in 0..bytes.len() {
            let refused = read(&bytes[..length], 64).unwrap_err();
            assert_eq!(refused.at, length as u64);
        }
    }

    #[test]
    fn a_byte_that_was_changed_is_found_in_its_part() {
        let (bytes, ends) = archive(&whole());
        for at in 0..bytes.len() {
            for bit in 0..8 {
                let mut changed = bytes.clone();
                changed[at] ^= 1 << bit;
                let refused = read(&changed, 64).unwrap_err();
                let begin = ends.iter().rev().find(|end| **end <= at).copied().unwrap_or(0);
                let cut_off = refused.at == bytes.len() as u64;
                assert!(refused.at == begin as u64 || cut_off, "byte {at}: {refused}");
            }
        }
    }

    #[test]
    fn a_part_that_is_lost_doubled_or_moved_is_found() {
        let (bytes, ends) = archive(&whole());
        let parts: Vec<_> = ends.windows(2).map(|ends| &bytes[ends[0]..ends[1]]).collect();
        let begin = &bytes[..BEGIN];
        let with = |parts: &[&[u8]]| read(&[begin, &parts.concat()].concat(), 64);
        assert!(with(&parts).is_ok());
        for at in 0..parts.len() {
            let mut lost = parts.clone();
            lost.remove(at);
            assert!(with(&lost).is_err(), "part {at} is lost");
            let mut doubled = parts.clone();
            doubled.insert(at, parts[at]);
            assert!(with(&doubled).is_err(), "part {at} is doubled");
            if at > 0 {
                let mut moved = parts.clone();
                moved.swap(at - 1, at);
                assert!(with(&moved).is_err(), "part {at} is moved");
            }
        }
    }

    #[test]
    fn misplaced_parts_with_right_checksums_are_refused() {
        let record = || Part::Record(b"record".to_vec());
        for (why, parts) in [
            ("no record", vec![file(0, 1), Part::End]),
            ("two records", vec![record(), record()]),
            ("no file", vec![record(), Part::End]),
            ("no record's bytes", vec![Part::Record(Vec::new())]),
            ("data of no file", vec![record(), data(0, b"x")]),
            ("another file", vec![record(), file(1, 1)]),
            ("a file again", vec![record(), file(0, 1), file(0, 1)]),
            ("a gap of files", vec![record(), file(0, 1), file(2, 1)]),
            (
                "overlap",
                vec![record(), file(0, 9), data(1, b"xx"), data(2, b"x")],
            ),
            (
                "backwards",
                vec![record(), file(0, 9), data(4, b"x"), data(1, b"x")],
            ),
            ("beyond the end", vec![record(), file(0, 9), data(8, b"xx")]),
            (
                "offset that overflows",
                vec![record(), file(0, u64::MAX), data(u64::MAX, b"xx")],
            ),
            ("empty data", vec![record(), file(0, 9), data(8, b"")]),
            (
                "too much data",
                vec![record(), file(0, u64::MAX), data(0, &vec![1; MAX_DATA + 1])],
            ),
            ("too long a record", vec![Part::Record(vec![1; MAX_RECORD + 1])]),
            (
                "a part behind the end",
                vec![record(), file(0, 9), Part::End, Part::End],
            ),
        ] {
            let (bytes, _) = archive(&parts);
            let refused = read(&bytes, 1000).unwrap_err();
            assert!(refused.at < bytes.len() as u64, "{why}: {refused}");
        }
    }

    #[test]
    fn another_version_and_another_file_are_said_to_be_that() {
        let (mut bytes, _) = archive(&whole());
        bytes[12] = 2;
        let refused = read(&bytes, 64).unwrap_err().to_string();
        assert!(refused.contains("of a version"), "{refused}");
        let refused = read(&[0x7f; 100], 64).unwrap_err().to_string();
        assert!(refused.contains("does not begin as"), "{refused}");
    }

    /// As an archive is written, with lengths and checksums that are right more often than not.
    fn parts() -> impl Strategy<Value = Vec<Part>> {
        let part = prop_oneof![
            1 => prop::collection::vec(any::<u8>(), 0..20).prop_map(Part::Record),
            2 => (0_u32..4, any::<u64>()).prop_map(|(number, length)| file(number, length)),
            4 => (any::<u64>(), prop::collection::vec(any::<u8>(), 0..20))
                .prop_map(|(offset, bytes)| data(offset, &bytes)),
            1 => Just(Part::End),
        ];
        prop::collection::vec(part, 0..20)
    }

    proptest! {
        #[test]
        fn any_bytes_are_refused_or_read_and_pieces_do_not_matter(
            bytes in prop::collection::vec(any::<u8>(), 0..300),
            kept in 0_usize..=BEGIN + HEADER,
            piece in 1_usize..50,
        ) {
            let (whole, _) = archive(&whole());
            let bytes = [&whole[..kept], &bytes].concat();
            prop_assert!(read(&bytes, piece).is_err());
            prop_assert_eq!(read(&bytes, piece), read(&bytes, 1000));
        }

        #[test]
        fn what_is_read_is_in_order_and_within_its_file(parts in parts(), piece in 1_usize..50) {
            let (bytes, _) = archive(&parts);
            let Ok(read) = read(&bytes, piece) else { return Ok(()) };
            prop_assert_eq!(&read, &parts);
            let (mut files, mut from, mut within) = (0, 0, 0);
            for part in read {
                match part {
                    Part::File { number, length } => {
                        prop_assert_eq!(number, files);
                        (files, from, within) = (files + 1, 0, length);
                    }
                    Part::Data { offset, bytes } => {
                        prop_assert!(offset >= from && !bytes.is_empty());
                        from = offset + bytes.len() as u64;
                        prop_assert!(from <= within);
                    }
                    Part::Record(_) | Part::End => {}
                }
            }
        }
    }
}
