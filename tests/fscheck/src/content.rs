//! Content: reading, writing, holes, mappings, locks.

use std::{
    fs::{self, File},
    io::{self, Read as _, Seek as _, SeekFrom, Write as _},
    os::unix::fs::{FileExt, MetadataExt},
    path::Path,
    thread,
};

use rustix::{
    fs::{AtFlags, CWD, FallocateFlags, FlockOperation, Mode, OFlags, SeekFrom as Seek},
    mm::{MapFlags, MsyncFlags, ProtFlags},
};

use crate::{Check, Outcome, io_of, of};

/// In the order of the table.
pub const CHECKS: &[Check] = &[
    ("two that append", append),
    ("truncate at opening", truncate_at_opening),
    ("an open file that is removed", removed),
    ("O_TMPFILE, and a name for it", tmpfile),
    ("holes", holes),
    ("a file of 5 GiB with a hole", large),
    ("set aside, and a hole punched", set_aside),
    ("made longer and shorter", longer_and_shorter),
    ("a shared mapping", shared_mapping),
    ("a private mapping", private_mapping),
    ("read at the end, and beyond", at_the_end),
    ("write to what is open to read", read_only_descriptor),
    ("flush: fsync, fdatasync, syncfs", flush),
    ("past the cache: O_DIRECT", direct),
    ("copy_file_range", copy_range),
    ("flock between two descriptors", flock),
    ("fcntl's lock between two open files", ofd_lock),
    ("8 threads write 8 parts", threads),
    ("1 MiB reads as it was written", mebibyte),
];

fn open(path: &Path, flags: OFlags) -> io::Result<File> {
    Ok(rustix::fs::open(path, flags, Mode::RUSR | Mode::WUSR)?.into())
}

fn append(at: &Path) -> Outcome {
    let path = at.join("a");
    let flags = OFlags::CREATE | OFlags::WRONLY | OFlags::APPEND;
    let (mut one, mut two) = (open(&path, flags)?, open(&path, flags)?);
    one.write_all(b"1")?;
    two.write_all(b"2")?;
    one.seek(SeekFrom::Start(0))?;
    one.write_all(b"3")?;
    fs::read_to_string(path)
}

fn truncate_at_opening(at: &Path) -> Outcome {
    let path = at.join("a");
    fs::write(&path, "content")?;
    drop(open(&path, OFlags::WRONLY | OFlags::TRUNC)?);
    Ok(fs::metadata(path)?.len().to_string())
}

fn removed(at: &Path) -> Outcome {
    let path = at.join("a");
    let mut file = open(&path, OFlags::CREATE | OFlags::RDWR)?;
    fs::remove_file(&path)?;
    file.write_all(b"still there")?;
    let mut text = String::new();
    file.seek(SeekFrom::Start(0))?;
    file.read_to_string(&mut text)?;
    let left = fs::read_dir(at)?.count();
    Ok(format!("{text} {} {left}", file.metadata()?.nlink()))
}

fn tmpfile(at: &Path) -> Outcome {
    let mut file = open(at, OFlags::TMPFILE | OFlags::RDWR)?;
    file.write_all(b"no name")?;
    let before = fs::read_dir(at)?.count();
    let own = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&file));
    rustix::fs::linkat(CWD, own, CWD, at.join("named"), AtFlags::SYMLINK_FOLLOW)?;
    Ok(format!("{before} {}", fs::read_to_string(at.join("named"))?))
}

fn holes(at: &Path) -> Outcome {
    let file = open(&at.join("a"), OFlags::CREATE | OFlags::RDWR)?;
    file.write_all_at(&[1; 4096], 1 << 20)?;
    file.set_len(2 << 20)?;
    file.sync_all()?;
    let hole = rustix::fs::seek(&file, Seek::Hole(0))?;
    let data = rustix::fs::seek(&file, Seek::Data(0))?;
    let blocks = file.metadata()?.blocks();
    Ok(format!("{hole} {data} {}", blocks * 512 < 1 << 20))
}

fn large(at: &Path) -> Outcome {
    let file = open(&at.join("a"), OFlags::CREATE | OFlags::RDWR)?;
    let end = (5 << 30) - 4;
    file.write_all_at(b"last", end)?;
    let mut read = [0; 8];
    file.read_exact_at(&mut read, end - 4)?;
    Ok(format!("{} {read:?}", file.metadata()?.len()))
}

fn set_aside(at: &Path) -> Outcome {
    let file = open(&at.join("a"), OFlags::CREATE | OFlags::RDWR)?;
    let kept = of(rustix::fs::fallocate(
        &file,
        FallocateFlags::KEEP_SIZE,
        0,
        1 << 20,
    ));
    let size = file.metadata()?.len();
    let grown = of(rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, 1 << 16));
    file.write_all_at(&[7; 1 << 16], 0)?;
    let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    let punched = of(rustix::fs::fallocate(&file, punch, 4096, 4096));
    let mut read = [0; 3 * 4096];
    file.read_exact_at(&mut read, 0)?;
    let sum: u32 = read.iter().map(|byte| u32::from(*byte)).sum();
    Ok(format!(
        "{kept} {size} {grown} {} {punched} {sum}",
        file.metadata()?.len()
    ))
}

fn longer_and_shorter(at: &Path) -> Outcome {
    let file = open(&at.join("a"), OFlags::CREATE | OFlags::RDWR)?;
    file.write_all_at(b"0123456789", 0)?;
    file.set_len(4)?;
    file.set_len(8)?;
    let mut read = [9; 8];
    file.read_exact_at(&mut read, 0)?;
    Ok(format!("{read:?}"))
}

/// Writes through a mapping of the file's page. Returns the byte of the mapping and of the file
/// afterwards.
#[allow(unsafe_code)]
fn mapped(at: &Path, kind: MapFlags) -> io::Result<(u8, u8)> {
    let file = open(&at.join("a"), OFlags::CREATE | OFlags::RDWR)?;
    file.write_all_at(&[1; 4096], 0)?;
    let access = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping at a place that the kernel chooses.
    let page = unsafe { rustix::mm::mmap(std::ptr::null_mut(), 4096, access, kind, &file, 0) }?;
    let byte = page.cast::<u8>();
    // SAFETY: the page is mapped for writing, and no other code has a reference to it.
    unsafe { byte.write_volatile(2) };
    // SAFETY: as above.
    let seen = unsafe { byte.read_volatile() };
    // SAFETY: the mapping above.
    unsafe { rustix::mm::msync(page, 4096, MsyncFlags::SYNC) }?;
    // SAFETY: the mapping above, which is not used any more.
    unsafe { rustix::mm::munmap(page, 4096) }?;
    let mut read = [0];
    file.read_exact_at(&mut read, 0)?;
    Ok((seen, read[0]))
}

fn shared_mapping(at: &Path) -> Outcome {
    mapped(at, MapFlags::SHARED).map(|seen| format!("{seen:?}"))
}

fn private_mapping(at: &Path) -> Outcome {
    mapped(at, MapFlags::PRIVATE).map(|seen| format!("{seen:?}"))
}

fn at_the_end(at: &Path) -> Outcome {
    fs::write(at.join("a"), "abc")?;
    let file = File::open(at.join("a"))?;
    let mut read = [0; 8];
    let counts = [2, 3, 100].map(|offset| file.read_at(&mut read, offset).map_or(99, |count| count));
    Ok(format!("{counts:?}"))
}

fn read_only_descriptor(at: &Path) -> Outcome {
    fs::write(at.join("a"), "abc")?;
    let file = File::open(at.join("a"))?;
    Ok(format!(
        "{} {}",
        io_of(file.write_at(b"x", 0)),
        io_of(file.set_len(1))
    ))
}

fn flush(at: &Path) -> Outcome {
    fs::write(at.join("a"), "abc")?;
    let (file, folder) = (File::options().write(true).open(at.join("a"))?, File::open(at)?);
    Ok(format!(
        "{} {} {} {}",
        io_of(file.sync_all()),
        io_of(file.sync_data()),
        of(rustix::fs::syncfs(&file)),
        io_of(folder.sync_all())
    ))
}

fn direct(at: &Path) -> Outcome {
    #[repr(align(4096))]
    struct Page([u8; 4096]);
    let file = open(&at.join("a"), OFlags::CREATE | OFlags::RDWR | OFlags::DIRECT)?;
    let mut page = Page([5; 4096]);
    file.write_all_at(&page.0, 0)?;
    page.0.fill(0);
    file.read_exact_at(&mut page.0, 0)?;
    Ok(format!("{}", page.0.iter().all(|byte| *byte == 5)))
}

fn copy_range(at: &Path) -> Outcome {
    fs::write(at.join("a"), vec![3; 100_000])?;
    let from = File::open(at.join("a"))?;
    let to = open(&at.join("b"), OFlags::CREATE | OFlags::RDWR)?;
    let mut copied = 0;
    while copied < 100_000 {
        match rustix::fs::copy_file_range(&from, None, &to, None, 100_000 - copied)? {
            0 => break,
            count => copied += count,
        }
    }
    Ok(format!(
        "{copied} {}",
        fs::read(at.join("b"))? == vec![3; 100_000]
    ))
}

fn flock(at: &Path) -> Outcome {
    fs::write(at.join("a"), "")?;
    let (one, two) = (File::open(at.join("a"))?, File::open(at.join("a"))?);
    let exclusive = FlockOperation::NonBlockingLockExclusive;
    let first = of(rustix::fs::flock(&one, exclusive));
    let second = of(rustix::fs::flock(&two, exclusive));
    drop(one);
    Ok(format!(
        "{first} {second} {}",
        of(rustix::fs::flock(&two, exclusive))
    ))
}

fn ofd_lock(at: &Path) -> Outcome {
    // The lock belongs to the process; another thread's open file is of the same one, so it is not refused.
    let (one, two) = (
        open(&at.join("a"), OFlags::CREATE | OFlags::RDWR)?,
        open(&at.join("a"), OFlags::RDWR)?,
    );
    let lock = FlockOperation::NonBlockingLockExclusive;
    let first = of(rustix::fs::fcntl_lock(&one, lock));
    Ok(format!("{first} {}", of(rustix::fs::fcntl_lock(&two, lock))))
}

fn threads(at: &Path) -> Outcome {
    let file = open(&at.join("a"), OFlags::CREATE | OFlags::RDWR)?;
    thread::scope(|scope| {
        for part in 0..8_u8 {
            let file = &file;
            scope.spawn(move || {
                for block in 0..64 {
                    let offset = (block * 8 + u64::from(part)) * 512;
                    let _ = file.write_all_at(&[part; 512], offset);
                }
            });
        }
    });
    let content = fs::read(at.join("a"))?;
    let mut blocks = content.chunks(512).zip((0..8_u8).cycle());
    Ok(format!(
        "{} {}",
        content.len(),
        blocks.all(|(block, part)| block.iter().all(|byte| *byte == part))
    ))
}

fn mebibyte(at: &Path) -> Outcome {
    let content: Vec<u8> = (0..1 << 20_u32)
        .map(|number: u32| number.to_le_bytes()[1] ^ number.to_le_bytes()[0])
        .collect();
    fs::write(at.join("a"), &content)?;
    Ok(format!("{}", fs::read(at.join("a"))? == content))
}
