//! `vmm-image import`: creates a raw image from an untrusted file of any known format.
//!
//! The process has given up its rights before it reads the first byte. The daemon gives it a user
//! of its own and no capabilities. It has no path, no socket and no other program, and limits on
//! memory, files and time.

use std::{
    fs::File,
    io::{self, Read},
    ops::Range,
    os::unix::fs::FileExt as _,
    rc::Rc,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, anyhow, bail};
use block::SECTOR;
use serde_json::{Value, json};
use vmm_base::sys::lock::{LockKind, lock_image};

use super::{
    args::Import,
    boot::Raw,
    compression::Compression,
    foreign::{self, Foreign, Sink},
    layers::{self, Disk},
    qcow2,
    source::{Content, HEAD, Kind, Part, has_file_system},
    take,
};
use crate::{
    bootdisk::{medium::Window, partitions},
    confine,
};

/// Copied at a time, in bytes.
const PIECE: usize = 1 << 20;
/// Granularity in bytes at which zeroes become holes.
const BLOCK: usize = 64 << 10;
/// Compared with as a whole, which a build that is not optimized also does quickly.
static ZEROES: [u8; BLOCK] = [0; BLOCK];
/// Bytes of a disk that one thread copies before it takes the next ones.
const TURN: u64 = 16 << 20;
/// Most threads that copy.
const THREADS: usize = 4;
/// Bytes that are written between two looks at the room on the file system.
const LOOK: u64 = 4 << 20;
/// How often the caller hears how far it is.
const TELL: Duration = Duration::from_millis(200);
/// Where the first volume descriptor of an ISO 9660 image has its identifier, in bytes (ECMA-119, 8.1).
const ISO_MAGIC: u64 = 32769;
/// Shortest raw disk that may have neither a partition table nor a file system, in bytes: shorter ones are other files.
const LEAST: u64 = 64 << 10;

/// Format and size of the disk that was imported.
#[derive(Clone, Copy)]
struct Found {
    kind: Kind,
    compression: Option<Compression>,
    /// Size of the disk in bytes.
    size: u64,
    /// Logical blocks of the disk in bytes, if its format says so.
    block: Option<u32>,
}

/// Layers that a disk may still be packed in.
#[derive(Clone, Copy)]
struct Around {
    compression: bool,
    archive: bool,
}

/// Runs the command and returns a report of the image.
pub fn import(args: &Import) -> Result<Value> {
    let source = File::from(take(args.fd)?);
    let target = File::from(take(args.to_fd)?);
    let scratch = File::from(take(args.scratch_fd)?);
    confine::close_in_converter(args.max_size)?;
    if target.metadata().context("look at the target")?.len() != 0 {
        bail!("the target is not empty");
    }
    let writer = Writer::new(&target, args);
    if !args.layer.is_empty() {
        return import_layers(&source, &scratch, &writer);
    }
    let whole = Part::whole(&source)?;
    let found = match Content::of(&whole.head()?)? {
        Content::Disk(kind @ (Kind::Qcow2 | Kind::Foreign(_))) => unpacked(kind, &source, &writer)?,
        Content::Disk(kind) => {
            let size = copy(&source, &writer)?;
            Found {
                kind,
                compression: None,
                size,
                block: None,
            }
        }
        Content::Compressed(_) | Content::Tar => {
            let around = Around {
                compression: true,
                archive: true,
            };
            let damaged = || "the file can't be read to its end".to_owned();
            read_through(&mut { whole }, &damaged, around, &scratch, &writer)?
        }
    };
    finish(&target, found)
}

/// Makes the image of the disk in one of several layers.
fn import_layers(source: &File, scratch: &File, writer: &Writer<'_>) -> Result<Value> {
    let args = writer.args;
    let mut found = None;
    let has_disk = layers::walk(source, &args.layer, args.max_size, &mut |disk, content| {
        found = Some(read_entry(disk, content, scratch, writer)?);
        Ok(())
    })?;
    let Some(found) = found.filter(|_| has_disk) else {
        bail!(
            "no layer has a file below \"disk/\", as a containerDisk has: there is no disk in this OCI image"
        );
    };
    finish(writer.target, found)
}

/// Makes the image of a file of an archive, instead of that of another one before.
fn read_entry(disk: &Disk<'_>, content: &mut dyn Read, scratch: &File, writer: &Writer<'_>) -> Result<Found> {
    for file in [writer.target, scratch] {
        file.set_len(0).context("empty the image")?;
    }
    writer.begin(disk.size)?;
    let damaged = || format!("{} can't be read to its end", disk.name);
    let around = Around {
        compression: true,
        archive: false,
    };
    let found =
        read_through(content, &damaged, around, scratch, writer).with_context(|| disk.name.to_owned())?;
    Ok(Found {
        compression: disk.compression.or(found.compression),
        ..found
    })
}

/// Makes the image from a stream. `damaged` describes the stream for an error.
fn read_through(
    content: &mut dyn Read,
    damaged: &dyn Fn() -> String,
    around: Around,
    scratch: &File,
    writer: &Writer<'_>,
) -> Result<Found> {
    let mut first = Vec::new();
    (&mut *content)
        .take(HEAD as u64)
        .read_to_end(&mut first)
        .with_context(damaged)?;
    let mut content = first.as_slice().chain(content);
    let kind = match Content::of(&first)? {
        Content::Compressed(compression) if around.compression => {
            let around = Around {
                compression: false,
                ..around
            };
            let damaged = || broken(compression);
            let mut content = compression.decompressed(content);
            let found = read_through(&mut content, &damaged, around, scratch, writer)?;
            return Ok(Found {
                compression: Some(compression),
                ..found
            });
        }
        Content::Compressed(again) => bail!(
            "what was compressed is compressed with {} again: decompress it first",
            again.name()
        ),
        Content::Tar if around.archive => {
            let mut found = None;
            layers::walk_one(&mut content, writer.args.max_size, &mut |disk, content| {
                found = Some(read_entry(disk, content, scratch, writer)?);
                Ok(())
            })?;
            return found.context("the archive has no disk");
        }
        Content::Tar => {
            bail!("an archive has a further archive: unpack it, and import the disk that is in it")
        }
        Content::Disk(kind) => kind,
    };
    if !matches!(kind, Kind::Qcow2 | Kind::Foreign(_)) {
        let size = writer.unpack(&mut content, damaged)?;
        return Ok(Found {
            kind,
            compression: None,
            size,
            block: None,
        });
    }
    let length = Writer::new(scratch, writer.args).unpack(&mut content, damaged)?;
    // Zeroes at the end were not written.
    scratch.set_len(length).context("unpack the image")?;
    unpacked(kind, scratch, writer)
}

/// Makes the image of one in a format with tables.
fn unpacked(kind: Kind, source: &File, writer: &Writer<'_>) -> Result<Found> {
    let (size, block) = match kind {
        Kind::Foreign(kind) => read_foreign(kind, source, writer)?,
        _ => (convert(source, writer)?, None),
    };
    Ok(Found {
        kind,
        compression: None,
        size,
        block,
    })
}

fn broken(compression: Compression) -> String {
    format!(
        "the file is damaged, it can't be decompressed with {}",
        compression.name()
    )
}

/// Makes the size one of a disk. The caller brings the image to stable storage.
fn finish(target: &File, found: Found) -> Result<Value> {
    let Found {
        mut kind,
        compression,
        size,
        block,
    } = found;
    if size == 0 {
        bail!("the image is empty");
    }
    if kind == Kind::Raw {
        check_raw(target, size)?;
    }
    let mut size = size.next_multiple_of(SECTOR);
    if kind == Kind::Raw && foreign::is_fixed_vhd(target) {
        // The disk is all that comes before the footer.
        kind = Kind::Foreign(Foreign::Vhd);
        size -= SECTOR;
    }
    target
        .set_len(size)
        .with_context(|| format!("make the image {size} bytes long"))?;
    let mut magic = [0; 5];
    let iso = kind == Kind::Raw && target.read_exact_at(&mut magic, ISO_MAGIC).is_ok() && &magic == b"CD001";
    let mut partitioned = [0; 2];
    let boots = target.read_exact_at(&mut partitioned, 510).is_ok() && partitioned == [0x55, 0xaa];
    let layout = partitions::layout(&Window::whole(Rc::new(Raw::new(target.try_clone()?.into())?)));
    if kind == Kind::Raw
        && !iso
        && let Some(layout) = layout.filter(|layout| layout.end > size)
    {
        bail!(
            "the image is cut off: its partition table has a partition that ends at byte {}, and the image has {size} bytes; get the whole \
             file, or extend it with `truncate` if it is complete",
            layout.end
        );
    }
    let kind = if iso && !boots { Kind::Iso } else { kind };
    let block = block.map(u64::from).or(layout.and_then(|layout| layout.block));
    Ok(json!({
        "format": kind.name(),
        "compression": compression.map(Compression::name),
        "virtual_size": size,
        "logical_block": block.unwrap_or(SECTOR),
    }))
}

/// Refuses a raw file of this length that is none of a disk.
fn check_raw(target: &File, size: u64) -> Result<()> {
    let mut magic = [0; 4];
    // Images of macOS end with a block that describes them.
    let trailer = size.checked_sub(SECTOR);
    if trailer.is_some_and(|at| target.read_exact_at(&mut magic, at).is_ok()) && &magic == b"koly" {
        bail!("the image is in the format dmg: convert it to qcow2 or raw first, as with `qemu-img convert`");
    }
    let mut head = Vec::new();
    Part::of(target, 0, size)?
        .take(HEAD as u64)
        .read_to_end(&mut head)
        .context("read the image")?;
    if (size < LEAST || !size.is_multiple_of(SECTOR)) && !has_file_system(&head) {
        bail!(
            "the file has {size} bytes, and neither a partition table nor a file system: it is no image of a disk, or was cut off (an empty disk \
             has at least {LEAST} bytes, in whole sectors of {SECTOR})"
        );
    }
    Ok(())
}

/// Copies a raw file.
fn copy(source: &File, writer: &Writer<'_>) -> Result<u64> {
    let size = source.metadata().context("look at the file")?.len();
    writer.begin(size)?;
    in_turns(size, &|range| {
        let mut buffer = vec![0; PIECE];
        let mut offset = range.start;
        while offset < range.end {
            // Holes are not read.
            match rustix::fs::seek(source, rustix::fs::SeekFrom::Data(offset)) {
                Ok(data) => offset = data,
                Err(rustix::io::Errno::NXIO) => break,
                Err(_) => {}
            }
            let left = usize::try_from(range.end.saturating_sub(offset))?.min(PIECE);
            let buffer = buffer.get_mut(..left).unwrap_or_default();
            let count = source.read_at(buffer, offset).context("read the file")?;
            if count == 0 {
                break;
            }
            writer.write(buffer.get(..count).unwrap_or_default(), offset)?;
            offset += count as u64;
        }
        Ok(())
    })?;
    Ok(size)
}

/// Has several threads do `work` on a disk of this size, turn by turn; each part is done once. The first failure ends it.
fn in_turns(size: u64, work: &(dyn Fn(Range<u64>) -> Result<()> + Sync)) -> Result<()> {
    let next = AtomicU64::new(0);
    let one = || {
        loop {
            let start = next.fetch_add(TURN, Ordering::Relaxed);
            if start >= size {
                return Ok(());
            }
            if let Err(error) = work(start..size.min(start.saturating_add(TURN))) {
                next.store(size, Ordering::Relaxed);
                return Err(error);
            }
        }
    };
    let turns = usize::try_from(size.div_ceil(TURN)).unwrap_or(usize::MAX);
    let threads = thread::available_parallelism().map_or(1, usize::from);
    thread::scope(|scope| {
        let more = 1..threads.min(THREADS).min(turns);
        let others: Vec<_> = more.map(|_| scope.spawn(one)).collect();
        let mine = one();
        others.into_iter().fold(mine, |done, other| {
            let other = other.join().unwrap_or_else(|_| Err(anyhow!("a thread panicked")));
            done.and(other)
        })
    })
}

/// Copies the content of a qcow2 image.
fn convert(source: &File, writer: &Writer<'_>) -> Result<u64> {
    if !lock_image(source, LockKind::Read).context("lock the image")? {
        bail!("the image is in use by a VM or another program: stop it first");
    }
    let header = super::header(source)?;
    let size = header.size;
    writer.begin(size)?;
    let image = qcow2::Image::open(source, header).context("open the image")?;
    in_turns(size, &|range| {
        image.each_data(range, &mut |offset, data| writer.write(data, offset))
    })?;
    Ok(size)
}

/// Copies what an image of another hypervisor holds; gives the size of the disk, and its logical blocks if they are known.
fn read_foreign(kind: Foreign, source: &File, writer: &Writer<'_>) -> Result<(u64, Option<u32>)> {
    struct Into<'a, 'b> {
        writer: &'a Writer<'b>,
        size: u64,
        block: Option<u32>,
    }
    impl Sink for Into<'_, '_> {
        fn size(&mut self, bytes: u64) -> Result<()> {
            self.size = bytes;
            self.writer.begin(bytes)
        }

        fn logical_block(&mut self, bytes: u32) {
            self.block = Some(bytes);
        }

        fn data(&mut self, offset: u64, data: &[u8]) -> Result<()> {
            self.writer.write(data, offset)
        }
    }
    let mut sink = Into {
        writer,
        size: 0,
        block: None,
    };
    foreign::read(kind, source, &mut sink)?;
    Ok((sink.size, sink.block))
}

/// Writes an image, with holes for zeroes. Several threads may write parts of it.
struct Writer<'a> {
    target: &'a File,
    args: &'a Import,
    told: Mutex<Instant>,
    /// Bytes of the disk; 0 when not known.
    total: AtomicU64,
    /// Bytes that were written since the file system was looked at.
    since_look: AtomicU64,
}

impl<'a> Writer<'a> {
    fn new(target: &'a File, args: &'a Import) -> Self {
        Self {
            target,
            args,
            told: Mutex::new(Instant::now()),
            total: AtomicU64::new(0),
            since_look: AtomicU64::new(0),
        }
    }

    fn check_size(&self, size: u64) -> Result<()> {
        let most = self.args.max_size;
        if size > most {
            bail!("the image has {size} bytes, more than the {most} that it may have");
        }
        Ok(())
    }

    /// Notes how large the disk is, if it may be so large.
    fn begin(&self, size: u64) -> Result<()> {
        self.total.store(size, Ordering::Relaxed);
        self.check_size(size)
    }

    /// Reads to the end; returns how long the content is.
    fn unpack(&self, content: &mut dyn Read, damaged: &dyn Fn() -> String) -> Result<u64> {
        let mut buffer = vec![0; PIECE];
        let mut offset = 0;
        loop {
            let mut filled = 0;
            // Whole pieces, so that zeroes are found.
            while let Some(rest) = buffer.get_mut(filled..).filter(|rest| !rest.is_empty()) {
                match content.read(rest) {
                    Ok(0) => break,
                    Ok(count) => filled += count,
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    Err(error) => return Err(error).with_context(damaged),
                }
            }
            if filled == 0 {
                return Ok(offset);
            }
            let end = offset + filled as u64;
            if end > self.args.max_size {
                bail!(
                    "what was compressed is longer than the {} bytes that it may have",
                    self.args.max_size
                );
            }
            self.write(buffer.get(..filled).unwrap_or_default(), offset)?;
            offset = end;
        }
    }

    fn write(&self, data: &[u8], offset: u64) -> Result<()> {
        // Start of the next write, and its end so far.
        let (mut from, mut at) = (0, 0);
        for block in data.chunks(BLOCK) {
            let end = at + block.len();
            if ZEROES.get(..block.len()) == Some(block) {
                self.write_out(data.get(from..at), offset + from as u64)?;
                from = end;
            }
            at = end;
        }
        self.write_out(data.get(from..at), offset + from as u64)?;
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        if told.elapsed() >= TELL {
            *told = Instant::now();
            let total = self.total.load(Ordering::Relaxed);
            println!("{}", json!({"done": offset + at as u64, "total": total}));
        }
        Ok(())
    }

    fn write_out(&self, data: Option<&[u8]>, offset: u64) -> Result<()> {
        let Some(data) = data.filter(|data| !data.is_empty()) else {
            return Ok(());
        };
        self.target
            .write_all_at(data, offset)
            .context("write the image")?;
        let length = data.len() as u64;
        if self.since_look.fetch_add(length, Ordering::Relaxed) + length >= LOOK {
            self.since_look.store(0, Ordering::Relaxed);
            let stat = rustix::fs::fstatvfs(self.target).context("look at the file system")?;
            if stat.f_bavail.saturating_mul(stat.f_frsize) < self.args.keep_free {
                bail!("No space left on device");
            }
        }
        Ok(())
    }
}
