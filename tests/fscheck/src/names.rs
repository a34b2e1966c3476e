//! Names: folders, links, renames.

use std::{
    ffi::{OsStr, OsString},
    fs::{self, File},
    io::{self, Write as _},
    os::unix::{
        ffi::OsStrExt,
        fs::{MetadataExt, symlink},
        net::UnixListener,
    },
    path::Path,
};

use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, RenameFlags};

use crate::{Check, Outcome, io_of, of};

/// In the order of the table.
pub const CHECKS: &[Check] = &[
    ("create anew, and exclusively once more", exclusive),
    ("open what is not there", missing),
    ("open a file as a folder, and a folder for writing", wrong_kind),
    ("make a folder that is there", folder_twice),
    ("remove a folder that is not empty", not_empty),
    ("unlink a folder", unlink_folder),
    ("rename over a file", rename_over),
    ("rename without replacing", rename_noreplace),
    ("rename by exchanging", rename_exchange),
    ("rename a folder into itself", rename_into_itself),
    ("rename a folder over one with content", rename_over_content),
    ("hard links", hard_links),
    ("hard link to a folder", link_folder),
    ("symbolic links", symbolic_links),
    ("a loop of links", link_loop),
    ("a link is not followed", nofollow),
    ("names of each byte", every_byte),
    ("the longest name, and one byte more", longest_name),
    ("a path of 3,000 bytes", long_path),
    ("1,000 entries are listed once each", many_entries),
    ("entries that go while they are listed", entries_go),
    ("a FIFO and a socket", fifo_and_socket),
    ("a device node", device_node),
];

fn exclusive(at: &Path) -> Outcome {
    let open = || {
        rustix::fs::open(
            at.join("a"),
            OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY,
            Mode::RUSR,
        )
    };
    Ok(format!("{} {}", of(open()), of(open())))
}

fn missing(at: &Path) -> Outcome {
    Ok(format!(
        "{} {}",
        io_of(File::open(at.join("none"))),
        io_of(File::open(at.join("none/below")))
    ))
}

fn wrong_kind(at: &Path) -> Outcome {
    fs::write(at.join("file"), "x")?;
    fs::create_dir(at.join("folder"))?;
    let as_folder = rustix::fs::open(at.join("file"), OFlags::DIRECTORY | OFlags::RDONLY, Mode::empty());
    let written = rustix::fs::open(at.join("folder"), OFlags::WRONLY, Mode::empty());
    let below = File::open(at.join("file/below"));
    Ok(format!("{} {} {}", of(as_folder), of(written), io_of(below)))
}

fn folder_twice(at: &Path) -> Outcome {
    fs::create_dir(at.join("a"))?;
    Ok(io_of(fs::create_dir(at.join("a"))))
}

fn not_empty(at: &Path) -> Outcome {
    fs::create_dir_all(at.join("a/b"))?;
    let full = io_of(fs::remove_dir(at.join("a")));
    fs::remove_dir(at.join("a/b"))?;
    Ok(format!("{full} {}", io_of(fs::remove_dir(at.join("a")))))
}

fn unlink_folder(at: &Path) -> Outcome {
    fs::create_dir(at.join("a"))?;
    Ok(io_of(fs::remove_file(at.join("a"))))
}

fn rename_over(at: &Path) -> Outcome {
    fs::write(at.join("a"), "new")?;
    fs::write(at.join("b"), "old")?;
    let old = File::open(at.join("b"))?;
    fs::rename(at.join("a"), at.join("b"))?;
    let links = old.metadata()?.nlink();
    let there = fs::read_to_string(at.join("b"))?;
    Ok(format!("{there} {links} {}", io::read_to_string(old)?))
}

fn rename_noreplace(at: &Path) -> Outcome {
    fs::write(at.join("a"), "a")?;
    fs::write(at.join("b"), "b")?;
    let rename =
        |to: &str| rustix::fs::renameat_with(CWD, at.join("a"), CWD, at.join(to), RenameFlags::NOREPLACE);
    Ok(format!("{} {}", of(rename("b")), of(rename("c"))))
}

fn rename_exchange(at: &Path) -> Outcome {
    fs::write(at.join("a"), "a")?;
    fs::create_dir(at.join("b"))?;
    let done = of(rustix::fs::renameat_with(
        CWD,
        at.join("a"),
        CWD,
        at.join("b"),
        RenameFlags::EXCHANGE,
    ));
    Ok(format!(
        "{done} {} {}",
        at.join("a").is_dir(),
        at.join("b").is_file()
    ))
}

fn rename_into_itself(at: &Path) -> Outcome {
    fs::create_dir(at.join("a"))?;
    Ok(io_of(fs::rename(at.join("a"), at.join("a/b"))))
}

fn rename_over_content(at: &Path) -> Outcome {
    fs::create_dir_all(at.join("a"))?;
    fs::create_dir_all(at.join("b/c"))?;
    let full = io_of(fs::rename(at.join("a"), at.join("b")));
    fs::remove_dir(at.join("b/c"))?;
    Ok(format!(
        "{full} {}",
        io_of(fs::rename(at.join("a"), at.join("b")))
    ))
}

fn hard_links(at: &Path) -> Outcome {
    fs::write(at.join("a"), "x")?;
    fs::hard_link(at.join("a"), at.join("b"))?;
    let (a, b) = (fs::metadata(at.join("a"))?, fs::metadata(at.join("b"))?);
    fs::remove_file(at.join("a"))?;
    let left = fs::metadata(at.join("b"))?.nlink();
    Ok(format!("{} {} {left}", a.ino() == b.ino(), b.nlink()))
}

fn link_folder(at: &Path) -> Outcome {
    fs::create_dir(at.join("a"))?;
    Ok(io_of(fs::hard_link(at.join("a"), at.join("b"))))
}

fn symbolic_links(at: &Path) -> Outcome {
    fs::create_dir(at.join("folder"))?;
    fs::write(at.join("folder/file"), "there")?;
    symlink("folder", at.join("link"))?;
    symlink("nowhere", at.join("dangling"))?;
    let length = fs::symlink_metadata(at.join("link"))?.len();
    let target = fs::read_link(at.join("link"))?;
    let through = fs::read_to_string(at.join("link/file"))?;
    let dangling = io_of(File::open(at.join("dangling")));
    Ok(format!("{length} {} {through} {dangling}", target.display()))
}

fn link_loop(at: &Path) -> Outcome {
    symlink("b", at.join("a"))?;
    symlink("a", at.join("b"))?;
    Ok(io_of(File::open(at.join("a"))))
}

fn nofollow(at: &Path) -> Outcome {
    fs::write(at.join("file"), "")?;
    symlink("file", at.join("link"))?;
    let open = rustix::fs::open(at.join("link"), OFlags::NOFOLLOW | OFlags::RDONLY, Mode::empty());
    Ok(of(open))
}

fn every_byte(at: &Path) -> Outcome {
    for byte in (1..=255_u8).filter(|byte| *byte != b'/') {
        fs::write(at.join(OsStr::from_bytes(&[b'n', byte])), [byte])?;
    }
    let mut found = 0_u32;
    for entry in fs::read_dir(at)? {
        let entry = entry?;
        let name: OsString = entry.file_name();
        let content = fs::read(entry.path())?;
        found += u32::from(name.as_bytes().get(1) == content.first() && content.len() == 1);
    }
    Ok(found.to_string())
}

fn longest_name(at: &Path) -> Outcome {
    let make = |length: usize| io_of(fs::write(at.join("x".repeat(length)), ""));
    Ok(format!("{} {}", make(255), make(256)))
}

fn long_path(at: &Path) -> Outcome {
    let mut path = at.to_path_buf();
    for _ in 0..12 {
        path.push("y".repeat(249));
        fs::create_dir(&path)?;
    }
    fs::write(path.join("file"), "deep")?;
    fs::read_to_string(path.join("file"))
}

fn many_entries(at: &Path) -> Outcome {
    for number in 0..1000 {
        fs::write(at.join(number.to_string()), "")?;
    }
    let mut names = fs::read_dir(at)?
        .map(|entry| Ok(entry?.file_name()))
        .collect::<io::Result<Vec<_>>>()?;
    let listed = names.len();
    names.sort();
    names.dedup();
    Ok(format!("{listed} {}", names.len()))
}

fn entries_go(at: &Path) -> Outcome {
    for number in 0..500 {
        fs::write(at.join(number.to_string()), "")?;
    }
    for entry in fs::read_dir(at)? {
        fs::remove_file(entry?.path())?;
    }
    Ok(fs::read_dir(at)?.count().to_string())
}

fn fifo_and_socket(at: &Path) -> Outcome {
    rustix::fs::mknodat(CWD, at.join("fifo"), FileType::Fifo, Mode::RUSR | Mode::WUSR, 0)?;
    let socket = io_of(UnixListener::bind(at.join("socket")));
    let kind =
        |name: &str| -> io::Result<u32> { Ok(fs::symlink_metadata(at.join(name))?.mode() & 0o170_000) };
    // Both ends, so that opening does not wait.
    let fifo = rustix::fs::open(at.join("fifo"), OFlags::RDWR, Mode::empty())?;
    let mut writer = File::from(fifo.try_clone()?);
    writer.write_all(b"through")?;
    let mut read = [0; 7];
    rustix::io::read(&fifo, &mut read)?;
    Ok(format!(
        "{:o} {:o} {socket} {}",
        kind("fifo")?,
        kind("socket")?,
        String::from_utf8_lossy(&read)
    ))
}

fn device_node(at: &Path) -> Outcome {
    let make = |kind, number| rustix::fs::mknodat(CWD, at.join("device"), kind, Mode::RUSR, number);
    let null = rustix::fs::makedev(1, 3);
    let made = format!(
        "{} {}",
        of(make(FileType::CharacterDevice, null)),
        of(make(FileType::BlockDevice, null))
    );
    let there = rustix::fs::statat(CWD, at.join("device"), AtFlags::SYMLINK_NOFOLLOW);
    Ok(format!("{made} {}", of(there)))
}
