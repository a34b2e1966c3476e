//! Work on disk images of unknown origin, for the program `vmm-image`.
//!
//! This crate owns the formats of files that hold disks ([`foreign`], [`qcow2`], [`compression`]), layers of OCI images ([`layers`]),
//! the import of both ([`import`]), the search for a kernel on a disk and the choice of its firmware ([`bootdisk`]), and creation, resize and check of qcow2 and raw
//! images. The image is untrusted: the process works on inherited descriptors, gives up all other rights before it reads the first byte
//! ([`confine`]), and limits all work that the content can cause.
//!
//! It must never link KVM, open a file by name or keep a right after [`confine`].
//!
//! vmmd runs the program, one process for each image. The process writes one JSON object to standard output, after lines of progress, and
//! one line to standard error when it fails. A reader starts with [`main`] and the command in [`args`].

mod args;
mod boot;
pub mod bootdisk;
mod compression;
mod confine;
mod foreign;
mod import;
mod layers;
mod qcow2;
mod source;
mod sparse;

use std::{
    fs::File,
    io,
    os::{fd::OwnedFd, unix::fs::MetadataExt as _},
    process::ExitCode,
};

use anyhow::{Context as _, Result, bail};
use block::{
    Backing, Image as _, Qcow2Image, RawImage, SECTOR,
    qcow2::{
        Header, check,
        create::{self, CreateOptions},
    },
};
use clap::Parser as _;
use serde_json::{Value, json};
use tracing::Level;
use vmm_base::sys::lock::{LockKind, holder, lock_image};
use vmm_sandbox::process::inherited_fd;

use self::args::{Below, Check, Cli, Command, Create, Format, Preallocation, Resize, Which};

/// Bytes in a unit of `st_blocks` (stat(3type)).
const BLOCK: u64 = 512;

/// Runs the program: exit code 0, or 1 when it failed or the image is corrupt.
#[must_use]
pub fn main() -> ExitCode {
    let cli = Cli::parse();
    tracing_subscriber::fmt()
        .with_writer(io::stderr)
        .with_max_level(Level::WARN)
        .with_ansi(false)
        .without_time()
        .with_target(false)
        .init();
    match run(&cli.command) {
        Ok((result, code)) => {
            println!("{result}");
            code
        }
        Err(error) => {
            eprintln!("vmm-image: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(command: &Command) -> Result<(Value, ExitCode)> {
    let result = match command {
        Command::Create(args) => create(args)?,
        Command::Info(which) => {
            let file = File::from(take(which.fd)?);
            confine::close_in()?;
            info(&file, which.format)?
        }
        Command::Resize(args) => resize(args)?,
        Command::Check(args) => return check(args),
        Command::Boot(args) => boot::boot(args)?,
        Command::Firmware(args) => boot::firmware(args)?,
        Command::Import(args) => import::import(args)?,
    };
    Ok((result, ExitCode::SUCCESS))
}

fn take(fd: i32) -> Result<OwnedFd> {
    inherited_fd(fd).with_context(|| format!("descriptor {fd}"))
}

/// Takes the image and locks it against other users.
fn take_locked(which: &Which, kind: LockKind) -> Result<File> {
    let file = File::from(take(which.fd)?);
    if lock_image(&file, kind).context("lock the image")? {
        return Ok(file);
    }
    let holder = holder(&file, kind);
    bail!(
        "the image is in use by {}",
        holder.as_deref().unwrap_or("a VM or another program")
    );
}

/// The images below, as descriptors with their formats.
fn take_below(below: &Below) -> Result<Vec<(OwnedFd, Format)>> {
    if below.backing_fd.len() != below.backing_format.len() {
        bail!("each --backing-fd needs a --backing-format");
    }
    let below = below.backing_fd.iter().zip(&below.backing_format);
    below.map(|(fd, format)| Ok((take(*fd)?, *format))).collect()
}

fn create(args: &Create) -> Result<Value> {
    let file = take_locked(&args.which, LockKind::Write)?;
    let below = take_below(&args.below)?;
    confine::close_in()?;
    let size = match (args.size, below.first()) {
        (Some(size), _) => size,
        (None, Some((fd, format))) => virtual_size(&File::from(fd.try_clone()?), *format)?,
        (None, None) => bail!("--size is missing: give the size of the new image"),
    };
    if size == 0 || !size.is_multiple_of(SECTOR) {
        bail!("a disk of {size} bytes can't be: its size is a multiple of {SECTOR}, and not 0");
    }
    let result = file.try_clone()?;
    match args.which.format {
        Format::Raw if !below.is_empty() => bail!("only a qcow2 image can be an overlay"),
        Format::Raw => create_raw(&file, size, args.preallocation)?,
        Format::Qcow2 => {
            let options = CreateOptions {
                size,
                cluster_size: create::CLUSTER_SIZE,
                preallocation: match args.preallocation {
                    Preallocation::Off => create::Preallocation::Off,
                    Preallocation::Metadata => create::Preallocation::Metadata,
                    Preallocation::Full => create::Preallocation::Full,
                },
                backing: below.first().map(|(_, format)| format.name()),
            };
            create::create(file, options).context("create the qcow2 image")?;
        }
    }
    info(&result, args.which.format)
}

fn create_raw(file: &File, size: u64, preallocation: Preallocation) -> Result<()> {
    if file.metadata()?.len() != 0 {
        bail!("the file is not empty");
    }
    file.set_len(size)
        .with_context(|| format!("make the file {size} bytes long"))?;
    if preallocation == Preallocation::Full {
        rustix::fs::fallocate(file, rustix::fs::FallocateFlags::empty(), 0, size)
            .with_context(|| format!("reserve {size} bytes"))?;
    }
    file.sync_all().context("write the image to stable storage")
}

fn header(file: &File) -> Result<Header> {
    Ok(Header::read(file).context("read the qcow2 header")??)
}

fn virtual_size(file: &File, format: Format) -> Result<u64> {
    match format {
        Format::Raw => Ok(file.metadata()?.len()),
        Format::Qcow2 => Ok(header(file)?.size),
    }
}

fn info(file: &File, format: Format) -> Result<Value> {
    let metadata = file.metadata().context("look at the image")?;
    let mut info = json!({
        "format": format.name(),
        "virtual_size": metadata.len(),
        "allocated": metadata.blocks().saturating_mul(BLOCK),
        "cluster_size": null,
        "dirty": false,
        "corrupt": false,
        "encrypted": false,
        "backing": false,
        "version": null,
    });
    if format == Format::Qcow2 {
        let header = header(file)?;
        info["virtual_size"] = header.size.into();
        info["cluster_size"] = header.cluster_size().into();
        info["dirty"] = header.dirty().into();
        info["corrupt"] = header.corrupt().into();
        info["encrypted"] = header.encrypted.into();
        info["backing"] = header.backing.into();
        info["version"] = header.version.into();
    }
    Ok(info)
}

fn resize(args: &Resize) -> Result<Value> {
    let fd = take(args.which.fd)?;
    let file = File::from(fd.try_clone()?);
    let below = take_below(&args.below)?;
    confine::close_in()?;
    let before = virtual_size(&file, args.which.format)?;
    if args.size < before {
        bail!(
            "the disk has {before} bytes and can't be made smaller: {}",
            args.size
        );
    }
    if !args.size.is_multiple_of(SECTOR) {
        bail!(
            "a disk of {} bytes can't be: its size is a multiple of {SECTOR}",
            args.size
        );
    }
    match args.which.format {
        Format::Raw => RawImage::open(fd, false)
            .context("open the image")?
            .grow(Some(args.size)),
        Format::Qcow2 => {
            let below = below.into_iter().map(|(fd, format)| match format {
                Format::Raw => Backing::Raw(fd),
                Format::Qcow2 => Backing::Qcow2(fd),
            });
            Qcow2Image::open(fd, false, below.collect())
                .context("open the image")?
                .grow(Some(args.size))
        }
    }
    .with_context(|| format!("make the disk {} bytes large", args.size))?;
    info(&file, args.which.format)
}

fn check(args: &Check) -> Result<(Value, ExitCode)> {
    let kind = if args.repair {
        LockKind::Write
    } else {
        LockKind::Read
    };
    let file = take_locked(&args.which, kind)?;
    confine::close_in()?;
    let mut report = check::Report::default();
    if args.which.format == Format::Qcow2 {
        let header = header(&file)?;
        // It is checked as what will be written to.
        header.check_usable(true, header.backing)?;
        header
            .check_extensions(&file)
            .context("read the qcow2 header")??;
        let inspection = check::inspect(&file, &header).context("read the tables")??;
        if args.repair && inspection.report.corruptions == 0 && inspection.report.leaks != 0 {
            inspection.free_leaks(&file, &header).context("free leaks")?;
        }
        report = inspection.report;
    }
    let result = json!({
        "corruptions": report.corruptions,
        "first_corruption": report.first,
        "leaks": report.leaks,
        "allocated_clusters": report.allocated,
        "repaired": args.repair && report.corruptions == 0 && report.leaks != 0,
    });
    if let Some(first) = &report.first {
        eprintln!("vmm-image: the image is corrupt: {first}");
        return Ok((result, ExitCode::FAILURE));
    }
    Ok((result, ExitCode::SUCCESS))
}
