//! The serial log of a VM from a position on, over restarts of the daemon.
//!
//! The `vmm` keeps the log in two files: when the current one is full, its content replaces that of the older one, and the current
//! one is truncated. Each run has new files. A position is the inode number of the current file with an offset: an offset behind
//! the end of the file says that it was truncated since, and then the rest is in the older file. A flood of output between two
//! looks is lost; nothing is read twice.

use std::{
    fs::File,
    io,
    os::unix::fs::{FileExt, MetadataExt},
    path::PathBuf,
};

use tokio::task::spawn_blocking;
use vmmd_host::folder_watch::FolderWatch;
use vmmd_pod::{MAX_PIECE, message::Position};

use crate::paths::LogDir;

/// See the module.
#[derive(Debug)]
pub struct Output {
    dir: LogDir,
    /// Missing while it reads.
    cursor: Option<Cursor>,
    watch: Option<FolderWatch>,
}

impl Output {
    /// The output of a VM behind `position`, or all of it.
    pub fn new(dir: LogDir, position: Option<Position>) -> Self {
        let cursor = Cursor {
            current: dir.serial(),
            older: dir.serial_old(),
            position: position.unwrap_or_default(),
            open: None,
            rest: None,
        };
        Self {
            dir,
            cursor: Some(cursor),
            watch: None,
        }
    }

    /// Begins to watch the log, as soon as the VM has one. [`Self::next`] returns earlier output too.
    pub fn watch(&mut self) {
        if self.watch.is_none() && self.dir.path().is_dir() {
            match FolderWatch::new(self.dir.path()) {
                Ok(watch) => self.watch = Some(watch),
                Err(error) => tracing::warn!(%error, "watch the serial log of a VM"),
            }
        }
    }

    /// Waits until the log has changed. Never returns while the log is not watched. Cancel-safe.
    pub async fn changed(&self) {
        match &self.watch {
            Some(watch) => {
                if let Err(error) = watch.changed().await {
                    tracing::warn!(%error, "watch the serial log of a VM");
                    std::future::pending::<()>().await;
                }
            }
            None => std::future::pending().await,
        }
    }

    /// The next piece with the position behind it; `None` at the end. Not cancel-safe.
    pub async fn next(&mut self) -> io::Result<Option<(Vec<u8>, Position)>> {
        let Some(mut cursor) = self.cursor.take() else {
            return Ok(None);
        };
        let read = spawn_blocking(move || {
            let read = cursor.read();
            (cursor, read)
        });
        let (cursor, read) = read.await.map_err(io::Error::other)?;
        self.cursor = Some(cursor);
        read
    }
}

/// A reader of the two files.
#[derive(Debug)]
struct Cursor {
    current: PathBuf,
    older: PathBuf,
    position: Position,
    /// The file of the position.
    open: Option<File>,
    /// The older file, with the offset of its unread part.
    rest: Option<(File, u64)>,
}

impl Cursor {
    fn read(&mut self) -> io::Result<Option<(Vec<u8>, Position)>> {
        loop {
            if let Some((older, offset)) = &mut self.rest {
                let bytes = piece(older, *offset)?;
                *offset += bytes.len() as u64;
                if !bytes.is_empty() {
                    return Ok(Some((bytes, self.position)));
                }
                self.rest = None;
            }
            if let Some(file) = &self.open {
                if file.metadata()?.len() < self.position.offset {
                    self.rest = self.older(self.position.offset)?;
                    self.position.offset = 0;
                    continue;
                }
                let bytes = piece(file, self.position.offset)?;
                if !bytes.is_empty() {
                    self.position.offset += bytes.len() as u64;
                    return Ok(Some((bytes, self.position)));
                }
            }
            if !self.switch()? {
                return Ok(None);
            }
        }
    }

    /// Opens the current file, if it is another one than that of the position; returns whether it did.
    fn switch(&mut self) -> io::Result<bool> {
        let file = match File::open(&self.current) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
            file => file?,
        };
        let log = file.metadata()?.ino();
        if self.position.log == log {
            let first = self.open.is_none();
            self.open = Some(file);
            return Ok(first);
        }
        self.position = Position { log, offset: 0 };
        self.open = Some(file);
        self.rest = self.older(0)?;
        Ok(true)
    }

    /// The older file from an offset on, if there is one.
    fn older(&self, offset: u64) -> io::Result<Option<(File, u64)>> {
        match File::open(&self.older) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            file => Ok(Some((file?, offset))),
        }
    }
}

/// Reads at most [`MAX_PIECE`] bytes.
fn piece(file: &File, offset: u64) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; MAX_PIECE];
    loop {
        match file.read_at(&mut bytes, offset) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            read => {
                bytes.truncate(read?);
                return Ok(bytes);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, path::Path};

    use super::*;

    fn cursor(folder: &Path, position: Position) -> Cursor {
        Cursor {
            current: folder.join("serial.log"),
            older: folder.join("serial.log.1"),
            position,
            open: None,
            rest: None,
        }
    }

    fn all(cursor: &mut Cursor) -> String {
        let mut text = Vec::new();
        while let Some((bytes, _)) = cursor.read().unwrap() {
            text.extend(bytes);
        }
        String::from_utf8(text).unwrap()
    }

    /// As the `vmm` rotates its log.
    fn rotate(folder: &Path) {
        let (current, older) = (folder.join("serial.log"), folder.join("serial.log.1"));
        let content = fs::read(&current).unwrap();
        fs::write(older, content).unwrap();
        File::options()
            .write(true)
            .open(current)
            .unwrap()
            .set_len(0)
            .unwrap();
    }

    fn append(folder: &Path, text: &str) {
        let mut file = File::options()
            .append(true)
            .create(true)
            .open(folder.join("serial.log"))
            .unwrap();
        io::Write::write_all(&mut file, text.as_bytes()).unwrap();
    }

    #[test]
    fn each_byte_is_read_once_over_rotations_and_runs() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let mut reader = cursor(folder.path(), Position::default());
        assert_eq!(all(&mut reader), "");
        append(folder.path(), "one ");
        assert_eq!(all(&mut reader), "one ");
        append(folder.path(), "two ");
        rotate(folder.path());
        append(folder.path(), "x ");
        assert_eq!(all(&mut reader), "two x ");
        // Another daemon continues.
        append(folder.path(), "three ");
        let mut reader = cursor(folder.path(), reader.position);
        assert_eq!(all(&mut reader), "three ");
        append(folder.path(), "four ");
        rotate(folder.path());
        let mut reader = cursor(folder.path(), reader.position);
        assert_eq!(all(&mut reader), "four ");
        // Another run.
        append(folder.path(), "end ");
        fs::rename(at("serial.log"), at("serial.previous.log")).unwrap();
        fs::write(at("serial.log.1"), "").unwrap();
        append(folder.path(), "begin ");
        assert_eq!(all(&mut reader), "end begin ");
        assert_eq!(all(&mut cursor(folder.path(), reader.position)), "");
    }

    #[test]
    fn long_log_comes_in_pieces() {
        let folder = tempfile::tempdir().unwrap();
        append(folder.path(), &"x".repeat(MAX_PIECE + 1));
        let mut reader = cursor(folder.path(), Position::default());
        let lengths = [MAX_PIECE, 1].map(|_| reader.read().unwrap().unwrap().0.len());
        assert_eq!(lengths, [MAX_PIECE, 1]);
        assert_eq!(reader.read().unwrap(), None);
    }
}
