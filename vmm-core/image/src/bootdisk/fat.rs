//! FAT as the library reads it.

use std::{
    io::{self, Read as _, Seek as _, SeekFrom},
    ops::Range,
};

use fatfs::FileSystem;

use super::{
    files::{Files, Kind, NAMES, Sink, stream},
    medium::Window,
};

/// A FAT file system. It has no links.
pub struct Fat(pub FileSystem<Window>);

/// A path as the library wants it.
fn relative(path: &str) -> &str {
    path.trim_matches('/')
}

impl Files for Fat {
    fn kind(&self, path: &str) -> Option<Kind> {
        let root = self.0.root_dir();
        let path = relative(path);
        if path.is_empty() || root.open_dir(path).is_ok() {
            return Some(Kind::Folder);
        }
        root.open_file(path).ok().map(|_| Kind::File)
    }

    fn names(&self, path: &str) -> Vec<String> {
        let root = self.0.root_dir();
        let folder = match relative(path) {
            "" => Ok(root),
            path => root.open_dir(path),
        };
        folder.map_or_else(
            |_| Vec::new(),
            |folder| {
                let entries = folder.iter().take(NAMES).filter_map(Result::ok);
                entries.map(|entry| entry.file_name()).collect()
            },
        )
    }

    fn copy(&self, path: &str, range: Range<u64>, to: &mut Sink<'_>) -> io::Result<()> {
        let mut file = self.0.root_dir().open_file(relative(path))?;
        // For an offset beyond the end, the library's seek moves to the end, and the copy is empty.
        file.seek(SeekFrom::Start(range.start))?;
        stream(range, to, |_, buffer| file.read(buffer))
    }
}
