//! The serial log: the end of a port's output, in two files of bounded size.

use std::{fs::File, io, os::unix::fs::FileExt as _};

use vmm_base::sys::file;

use crate::log_limit::LogLimit;

/// Bytes in each of the two files when nothing else is asked for.
pub const DEFAULT_LIMIT: u64 = 1 << 20;

/// Bytes that are copied at once to the older file.
const PIECE: usize = 64 << 10;

/// A log in two files: when the current one is full, its content replaces that of the older one. It
/// works only on open files, so no path is needed. It never fails: text that cannot be written (a
/// full file system) is counted and left out.
#[derive(Debug)]
pub struct Log {
    current: File,
    older: Option<File>,
    limit: u64,
    length: u64,
    left_out: u64,
    complaints: LogLimit,
}

impl Log {
    /// Continues at the end of `current`. Both files are open for reading and writing, and belong
    /// to this log alone; without `older` the content of a full file is dropped. Each file holds at
    /// most `limit` bytes (at least 1).
    pub fn new(current: File, older: Option<File>, limit: u64) -> io::Result<Self> {
        let length = file::length(&current)?;
        Ok(Self {
            current,
            older,
            limit: limit.max(1),
            length,
            left_out: 0,
            complaints: LogLimit::new(),
        })
    }

    /// Appends `text`, or as much of it as can be written.
    pub fn append(&mut self, text: &[u8]) {
        let mut left = text;
        while !left.is_empty() {
            if self.length >= self.limit {
                self.rotate();
            }
            let room = usize::try_from(self.limit.saturating_sub(self.length)).unwrap_or(usize::MAX);
            let (now, rest) = left.split_at_checked(room).unwrap_or((left, &[]));
            self.write(now);
            left = rest;
        }
    }

    /// How many bytes could not be written.
    pub fn left_out(&self) -> u64 {
        self.left_out
    }

    fn write(&mut self, text: &[u8]) {
        let mut left = text;
        while !left.is_empty() {
            match self.current.write_at(left, self.length) {
                Ok(count) if count > 0 => {
                    self.length = self.length.saturating_add(count as u64);
                    left = left.get(count..).unwrap_or_default();
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                result => {
                    self.left_out = self.left_out.saturating_add(left.len() as u64);
                    return self.complain("write the serial log", result.err());
                }
            }
        }
    }

    fn rotate(&mut self) {
        if let Err(error) = self.keep_older() {
            self.complain("keep the older half of the serial log", Some(error));
        }
        if let Err(error) = self.current.set_len(0) {
            self.complain("truncate the serial log", Some(error));
        }
        // Also when it could not be truncated: then the oldest bytes are overwritten, and the size stays bounded.
        self.length = 0;
    }

    fn keep_older(&self) -> io::Result<()> {
        let Some(older) = &self.older else {
            return Ok(());
        };
        older.set_len(0)?;
        // Not io::copy, which tries calls that no thread of a limited process may make (copy_file_range, sendfile, splice).
        let mut piece = vec![0; PIECE];
        let mut offset = 0;
        loop {
            let count = match self.current.read_at(&mut piece, offset) {
                Ok(0) => return Ok(()),
                Ok(count) => count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            };
            older.write_all_at(piece.get(..count).unwrap_or_default(), offset)?;
            offset = offset.saturating_add(count as u64);
        }
    }

    fn complain(&self, what: &str, error: Option<io::Error>) {
        let error = error.unwrap_or_else(|| io::ErrorKind::WriteZero.into());
        if let Some(suppressed) = self.complaints.allow() {
            tracing::warn!(%error, left_out = self.left_out, %suppressed, "{what}");
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::io::{Read, Seek as _, Write};

    use super::*;

    fn content(file: &File) -> String {
        let mut file = file.try_clone().unwrap();
        let mut text = String::new();
        file.rewind().unwrap();
        file.read_to_string(&mut text).unwrap();
        text
    }

    #[test]
    fn a_full_file_becomes_the_older_one() {
        let (current, older) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
        let files = (current.try_clone().unwrap(), older.try_clone().unwrap());
        let mut log = Log::new(current, Some(older), 10).unwrap();
        log.append(b"0123");
        assert_eq!(
            (content(&files.0), content(&files.1)),
            ("0123".into(), String::new())
        );
        log.append(b"456789abc");
        assert_eq!(
            (content(&files.0), content(&files.1)),
            ("abc".into(), "0123456789".into())
        );
        log.append(b"defghijklmnopqrstuvw");
        assert_eq!(
            (content(&files.0), content(&files.1)),
            ("uvw".into(), "klmnopqrst".into())
        );
        assert_eq!(log.left_out(), 0);
    }

    #[test]
    fn a_log_goes_on_where_the_file_ends_and_may_have_one_half_only() {
        let mut current = tempfile::tempfile().unwrap();
        current.write_all(b"before ").unwrap();
        let file = current.try_clone().unwrap();
        let mut log = Log::new(current, None, 12).unwrap();
        log.append(b"after");
        assert_eq!(content(&file), "before after");
        log.append(b"!");
        assert_eq!(content(&file), "!");
    }

    #[test]
    fn what_can_not_be_written_is_left_out_and_counted() {
        let full = File::options().read(true).write(true).open("/dev/full").unwrap();
        let mut log = Log::new(full, None, 100).unwrap();
        log.append(&[b'x'; 250]);
        assert_eq!(log.left_out(), 250);
    }

    #[test]
    fn an_older_half_that_can_not_be_kept_does_not_stop_the_log() {
        let (current, full) = (
            tempfile::tempfile().unwrap(),
            File::options().read(true).write(true).open("/dev/full").unwrap(),
        );
        let file = current.try_clone().unwrap();
        let mut log = Log::new(current, Some(full), 4).unwrap();
        log.append(b"01234567ab");
        assert_eq!(content(&file), "ab");
    }
}
