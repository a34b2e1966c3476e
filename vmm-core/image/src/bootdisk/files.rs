//! The interface to file system libraries. Links are followed here, in the same way for all
//! libraries, and within limits.

use std::{io, ops::Range, path::Path};

/// Most names of a folder.
pub const NAMES: usize = 4096;
/// Copied at a time, in bytes.
pub const PIECE: usize = 1 << 20;
/// Most links on the way to a file, and the longest path: as Linux has them (path_resolution(7)).
const LINKS: usize = 40;
/// Longest path in bytes, and the longest target of a link.
pub const LONGEST_PATH: usize = 4096;

/// Type of the file at a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A regular file.
    File,
    /// A folder.
    Folder,
    /// A symbolic link, with its target.
    Link(String),
}

/// Takes a piece of a file.
pub type Sink<'a> = dyn FnMut(&[u8]) -> io::Result<()> + 'a;

/// A file system. Paths begin with a slash and contain no links, except perhaps as their last part.
/// Any function may panic, because libraries panic on unexpected content.
pub trait Files {
    /// Type of the file at a path; `None` if the file does not exist, or is a device or another
    /// special file.
    fn kind(&self, path: &str) -> Option<Kind>;
    /// Names in a folder, [`NAMES`] at most.
    fn names(&self, path: &str) -> Vec<String>;
    /// Passes the bytes of a regular file in this range to `to`, in pieces of at most [`PIECE`]
    /// bytes.
    ///
    /// # Errors
    ///
    /// The file cannot be read, or `to` fails.
    fn copy(&self, path: &str, range: Range<u64>, to: &mut Sink<'_>) -> io::Result<()>;
}

/// Passes these bytes from `read` to `to`. `read` receives the offset of the next bytes, and
/// returns the number of bytes read: 0 at the end.
pub fn stream(
    range: Range<u64>,
    to: &mut Sink<'_>,
    mut read: impl FnMut(u64, &mut [u8]) -> io::Result<usize>,
) -> io::Result<()> {
    let mut at = range.start;
    let most = |at: u64| usize::try_from(range.end.saturating_sub(at)).map_or(PIECE, |left| left.min(PIECE));
    let mut buffer = vec![0; most(at)];
    while at < range.end {
        let piece = buffer.get_mut(..most(at)).unwrap_or_default();
        let count = read(at, piece)?;
        if count == 0 {
            break;
        }
        to(piece.get(..count).unwrap_or_default())?;
        at = at.saturating_add(count as u64);
    }
    Ok(())
}

/// Follows all links of a path. Returns the resolved path and the file's type.
pub fn follow(files: &dyn Files, path: &str) -> Option<(String, Kind)> {
    let mut left = parts(path);
    let (mut there, mut links) = (Vec::new(), 0_usize);
    let mut kind = Kind::Folder;
    while let Some(part) = left.pop() {
        if kind != Kind::Folder {
            return None;
        }
        if part == ".." {
            there.pop();
            continue;
        }
        there.push(part);
        let path = format!("/{}", there.join("/"));
        if path.len() > LONGEST_PATH {
            return None;
        }
        kind = files.kind(&path)?;
        let Kind::Link(target) = &kind else {
            continue;
        };
        links = links.saturating_add(1);
        if links > LINKS || target.is_empty() || target.len() > LONGEST_PATH {
            return None;
        }
        match Path::new(target).is_absolute() {
            true => there.clear(),
            false => drop(there.pop()),
        }
        left.extend(parts(target));
        kind = Kind::Folder;
    }
    Some((format!("/{}", there.join("/")), kind))
}

/// The parts of a path, the last one first.
fn parts(path: &str) -> Vec<String> {
    let parts = path.rsplit('/').filter(|part| !matches!(*part, "" | "."));
    parts.map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Paths and their types.
    struct Tree(Vec<(&'static str, Kind)>);

    impl Files for Tree {
        fn kind(&self, path: &str) -> Option<Kind> {
            let found = self.0.iter().find(|(name, _)| *name == path);
            found.map(|(_, kind)| kind.clone())
        }

        fn names(&self, _: &str) -> Vec<String> {
            Vec::new()
        }

        fn copy(&self, _: &str, _: Range<u64>, _: &mut Sink<'_>) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn links_are_followed_as_linux_does_and_not_for_ever() {
        let link = |target: &str| Kind::Link(target.to_owned());
        let tree = Tree(vec![
            ("/boot", Kind::Folder),
            ("/boot/a", Kind::File),
            ("/boot/b", link("a")),
            ("/boot/c", link("/b")),
            ("/boot/up", link("../../../boot/./a")),
            ("/boot/self", link("self")),
            ("/boot/longer", link("longer/x")),
            ("/boot/under", link("a/x")),
            ("/b", link("boot")),
            ("/gone", link("/nowhere")),
        ]);
        for (path, wanted) in [
            ("/", Some(("/", Kind::Folder))),
            ("/boot/a", Some(("/boot/a", Kind::File))),
            ("boot//b", Some(("/boot/a", Kind::File))),
            ("/b/b", Some(("/boot/a", Kind::File))),
            ("/boot/c/b", Some(("/boot/a", Kind::File))),
            ("/boot/up", Some(("/boot/a", Kind::File))),
            ("/boot/a/../a", None),
            ("/boot/self", None),
            ("/boot/longer", None),
            ("/boot/under", None),
            ("/gone", None),
        ] {
            let wanted = wanted.map(|(path, kind)| (path.to_owned(), kind));
            assert_eq!(follow(&tree, path), wanted, "{path}");
        }
    }
}
