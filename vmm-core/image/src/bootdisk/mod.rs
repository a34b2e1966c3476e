//! Finds the kernel that is installed on a disk, as the disk's boot loader would: by entries of the
//! Boot Loader Specification and unified kernel images, or by grub.cfg.
//!
//! A disk is refused if the boot loader may boot it differently: a guess would boot the guest without
//! its initial RAM disk or with another command line. Firmware boots such a disk.
//!
//! The content of the disk is untrusted. This module limits all work that the content can cause,
//! and mounts nothing. The caller has given up all rights before.

mod bls;
mod btrfs;
mod ext4;
mod fat;
mod files;
pub mod firmware;
#[cfg(any(test, feature = "testing"))]
pub mod fuzzing;
mod grub;
mod loader;
pub mod medium;
pub mod partitions;
mod uki;
mod volume;
mod xfs;

#[cfg(test)]
mod tests;

use std::{
    io::{self, Read as _, Write},
    ops::Range,
    rc::Rc,
};

use grub::{NEXT, Once, PREVIOUS, Root, Unknown, Variables};
use medium::{Bounded, Medium, Window};
use volume::{Volume, Volumes};

/// Longest kernel in bytes.
pub const MAX_KERNEL: u64 = 256 << 20;
/// Longest initial RAM disks together in bytes.
pub const MAX_INITRD: u64 = 1 << 30;
/// Longest command line in bytes.
const MAX_CMDLINE: usize = vmmd_spec::vm::MAX_CMDLINE;
/// Where grub.cfg is, on a file system for all or on one for `/boot`.
const GRUB: [&str; 4] = ["/boot/grub", "/boot/grub2", "/grub", "/grub2"];
/// Configurations of SYSLINUX and EXTLINUX.
const SYSLINUX: [&str; 6] = [
    "/extlinux.conf",
    "/boot/extlinux.conf",
    "/boot/extlinux/extlinux.conf",
    "/extlinux/extlinux.conf",
    "/syslinux.cfg",
    "/boot/syslinux/syslinux.cfg",
];
/// Most entries that are looked at, of a kind.
const MOST_ENTRIES: usize = 256;
/// Most configurations of GRUB that are looked at.
const MOST_CONFIGURATIONS: usize = 16;
/// Longest grub.cfg, and the longest of all other texts, in bytes.
const GRUB_TEXT: u64 = 1 << 20;
const TEXT: u64 = 64 << 10;
/// How much of a disk is read to find a kernel, and how much to copy it or the initial RAM disks, in bytes; far more than it takes where a file
/// system is sound.
const LOOKING: u64 = 1 << 30;
const COPYING: u64 = 16 << 30;
/// Alignment of the archives of an initial RAM disk, in bytes
/// (Documentation/driver-api/early-userspace/buffer-format.rst).
const ALIGNMENT: u64 = 4;

/// Why there is nothing to boot.
#[derive(Debug, thiserror::Error)]
pub enum FindError {
    /// There is no kernel.
    #[error("no kernel was found on the disk: {0}")]
    None(String),
    /// A kernel exists, but is not usable.
    #[error("{what} can't be booted: {problem}")]
    Unusable {
        /// What names it: "the entry "Debian" of grub.cfg".
        what: String,
        /// Why not.
        problem: String,
    },
    /// A file on the disk failed to read.
    #[error("copy {0} from the disk")]
    Copy(String, #[source] io::Error),
}

/// The kernel that a disk boots.
#[derive(Debug)]
pub struct Found {
    /// Path of the kernel on its file system, or of the unified kernel image that has it.
    pub kernel: String,
    /// Which bytes of that file are the kernel.
    range: Range<u64>,
    /// Paths of the initial RAM disks, on the same one, and which bytes of them.
    initrds: Vec<(String, Range<u64>)>,
    /// Command line.
    pub cmdline: String,
    /// What chose it: "the entry "Debian" of /boot/grub/grub.cfg on partition 1".
    pub by: String,
    volume: Volume,
    disk: Rc<Bounded>,
    copying: u64,
}

/// An entry of a boot loader, and where it was read.
struct Candidate {
    root: Root,
    kernel: String,
    /// A further folder in which the paths are tried.
    below: &'static str,
    initrds: Vec<String>,
    cmdline: String,
    by: String,
    /// Layout of the kernel's file, if the kernel is a unified image.
    image: Option<uki::Image>,
    volume: usize,
    /// Why the boot loader may boot this entry differently, or another one.
    doubt: Option<String>,
}

/// A grub.cfg.
struct Configuration {
    volume: usize,
    /// Its path, and where that is.
    place: String,
    text: String,
}

/// All bytes of a file.
const WHOLE: Range<u64> = 0..u64::MAX;

/// Finds the kernel that a disk boots.
///
/// # Errors
///
/// The disk has no bootable kernel; the error gives the reason.
pub fn find(disk: Rc<dyn Medium>) -> Result<Found, FindError> {
    find_within(disk, LOOKING, COPYING)
}

/// Finds it while no more bytes are read than that, and later no more for each copy.
fn find_within(disk: Rc<dyn Medium>, looking: u64, copying: u64) -> Result<Found, FindError> {
    let disk = Rc::new(Bounded::new(disk, looking));
    let Volumes { mut readable, others } =
        volume::volumes(&Window::whole(Rc::clone(&disk) as Rc<dyn Medium>));
    let mut missing = None;
    let configurations = configurations(&readable);
    let variables = environment(&readable, &configurations);
    let mut unknown = Unknown::default();
    for configuration in &configurations {
        unknown.add(&configuration.text);
    }
    let candidates = loader::entries(&readable, &variables, &unknown)
        .into_iter()
        .chain(grub_entries(&configurations, &variables, &unknown));
    for mut candidate in candidates {
        let doubt = candidate.doubt.take();
        let unusable = |problem| FindError::Unusable {
            what: candidate.by.clone(),
            problem,
        };
        // A path with a variable may be wrong, so the doubt counts before the search for the file.
        if let Some(doubt) = doubt {
            return Err(unusable(doubt));
        }
        let Some((at, below)) = place(&readable, &candidate) else {
            missing.get_or_insert_with(|| {
                format!("{} names {}, which is not there", candidate.by, candidate.kernel)
            });
            continue;
        };
        let path = |path: &String| format!("{below}/{}", path.trim_start_matches('/'));
        let kernel = path(&candidate.kernel);
        let (range, initrds) = match &candidate.image {
            Some(image) => {
                let initrd = image.initrd.clone().map(|range| (kernel.clone(), range));
                (image.kernel.clone(), initrd.into_iter().collect())
            }
            None => {
                let paths = candidate.initrds.iter().map(path);
                (WHOLE, paths.map(|path| (path, WHOLE)).collect::<Vec<_>>())
            }
        };
        let volume = readable.swap_remove(at);
        if let Some((lost, _)) = initrds.iter().find(|(path, _)| !volume.has(path)) {
            return Err(unusable(format!("the initial RAM disk {lost} is not there")));
        }
        let cmdline = cmdline(&candidate)?;
        return Ok(Found {
            kernel,
            range,
            initrds,
            cmdline,
            by: candidate.by,
            volume,
            disk,
            copying,
        });
    }
    if disk.is_exhausted() {
        let problem =
            format!("more than {looking} bytes would have to be read to look through its file systems");
        return Err(FindError::None(problem));
    }
    if missing.is_none() && readable.is_empty() && partitions::has_lost_gpt(&Window::whole(disk)) {
        let problem =
            "its partition table (GPT) has no header in sector 1, and the copy at its end is not read";
        return Err(FindError::None(problem.to_owned()));
    }
    Err(FindError::None(nothing(&readable, &others, missing)))
}

impl Found {
    /// Copies the kernel; returns its length in bytes.
    ///
    /// # Errors
    ///
    /// A read or a write failed, or the kernel is longer than [`MAX_KERNEL`].
    pub fn copy_kernel(&self, to: &mut dyn Write) -> Result<u64, FindError> {
        self.disk.refill(self.copying);
        let copied = self.volume.copy(&self.kernel, self.range.clone(), to, MAX_KERNEL);
        copied.map_err(|error| FindError::Copy(self.kernel.clone(), error))
    }

    /// Copies the initial RAM disks, one after the other; returns their length in bytes.
    ///
    /// # Errors
    ///
    /// A read or a write failed, or they are longer than [`MAX_INITRD`].
    pub fn copy_initrd(&self, to: &mut dyn Write) -> Result<u64, FindError> {
        self.disk.refill(self.copying);
        let mut length: u64 = 0;
        for (path, range) in &self.initrds {
            let failed = |error| FindError::Copy(path.clone(), error);
            let gap = length.next_multiple_of(ALIGNMENT).saturating_sub(length);
            io::copy(&mut io::repeat(0).take(gap), &mut *to).map_err(failed)?;
            length = length.next_multiple_of(ALIGNMENT);
            let copied = self
                .volume
                .copy(path, range.clone(), to, MAX_INITRD.saturating_sub(length))
                .map_err(failed)?;
            length = length.saturating_add(copied);
        }
        Ok(length)
    }
}

/// The command line, with the serial console if it names no console at all.
fn cmdline(candidate: &Candidate) -> Result<String, FindError> {
    let mut line = candidate.cmdline.clone();
    if !line.split_whitespace().any(|word| word.starts_with("console=")) {
        line = format!("{line} console=ttyS0").trim_start().to_owned();
    }
    if line.len() > MAX_CMDLINE || line.contains(['\0', '\n']) {
        return Err(FindError::Unusable {
            what: candidate.by.clone(),
            problem: format!("its command line is longer than {MAX_CMDLINE} bytes, or no line"),
        });
    }
    Ok(line)
}

/// Which file system has a candidate's kernel, and below what.
fn place(volumes: &[Volume], candidate: &Candidate) -> Option<(usize, &'static str)> {
    let own = volumes.get(candidate.volume)?;
    let is_named = |volume: &Volume| match &candidate.root {
        Root::Here => false,
        Root::Uuid(uuid) => volume.uuid.eq_ignore_ascii_case(uuid),
        Root::Label(label) => volume.label == *label,
        Root::File(path) => volume.has(path),
        Root::Partition(number) => volume.number == *number,
    };
    // The subvolumes of a partition have the same UUID and label, so all of them are tried.
    let named = volumes.iter().position(is_named).and_then(|at| volumes.get(at));
    let number = named.unwrap_or(own).number;
    let is_there = |at: &usize| volumes.get(*at).is_some_and(|volume| volume.number == number);
    let mut places: Vec<_> = (0..volumes.len()).filter(is_there).collect();
    places.sort_by_key(|at| *at != candidate.volume);
    let path = candidate.kernel.trim_start_matches('/');
    let has = |at: usize, below: &str| {
        let volume = volumes.get(at);
        volume.is_some_and(|volume| volume.has(&format!("{below}/{path}")))
    };
    places.into_iter().find_map(|at| {
        let below = ["", candidate.below].into_iter().find(|below| has(at, below));
        below.map(|below| (at, below))
    })
}

fn on(volume: &Volume) -> String {
    let partition = match volume.number {
        0 => String::new(),
        number => format!(" on partition {number}"),
    };
    match &volume.subvolume {
        Some(name) => format!("{partition}, subvolume {name}"),
        None => partition,
    }
}

/// The doubt about a disk whose boot loader boots another entry at the next start alone. Without the boot loader's write, that entry would be
/// booted at all later starts too. The guest has not asked for the default entry.
fn once_doubt(Once { variable, entry }: &Once) -> String {
    format!(
        "GRUB has been asked to boot the entry \"{entry}\" instead, once (`{variable}` in its grubenv, which grub-reboot sets), and \
         only GRUB itself can note on the disk that this is done: attach the disk to another VM, mount it there and run `grub-editenv \
         MOUNTPOINT/boot/grub/grubenv unset {variable}`"
    )
}

/// The doubt about an entry with a variable to which a configuration of GRUB may give a value.
fn variable_doubt(name: &str) -> String {
    format!("it uses ${name}, and grub.cfg sets this variable by commands that are not evaluated here")
}

/// GRUB's environment block, from the first file system that has one. A setting for one start that no configuration reads is left out.
fn environment(volumes: &[Volume], configurations: &[Configuration]) -> Variables {
    let places = GRUB.iter().map(|folder| format!("{folder}/grubenv"));
    let places: Vec<_> = places.chain(["/EFI/fedora/grubenv".to_owned()]).collect();
    let text = volumes
        .iter()
        .find_map(|volume| places.iter().find_map(|path| volume.text(path, TEXT)));
    let mut variables = grub::environment(&text.unwrap_or_default());
    for name in [NEXT, PREVIOUS] {
        if !configurations.iter().any(|it| it.text.contains(name)) {
            variables.remove(name);
        }
    }
    variables
}

/// The configurations of GRUB.
fn configurations(volumes: &[Volume]) -> Vec<Configuration> {
    let places = GRUB
        .iter()
        .flat_map(|folder| volumes.iter().enumerate().map(move |place| (folder, place)));
    let texts = places.filter_map(|(folder, (number, volume))| {
        let path = format!("{folder}/grub.cfg");
        let text = volume.text(&path, GRUB_TEXT)?;
        Some(Configuration {
            volume: number,
            place: format!("{path}{}", on(volume)),
            text,
        })
    });
    texts.take(MOST_CONFIGURATIONS).collect()
}

fn grub_entries(
    configurations: &[Configuration],
    variables: &Variables,
    unknown: &Unknown,
) -> Vec<Candidate> {
    let mut found = Vec::new();
    for Configuration { volume, place, text } in configurations {
        let left = MOST_ENTRIES.saturating_sub(found.len());
        let menu = grub::menu(text, variables);
        let once = menu.once.as_ref().map(once_doubt);
        found.extend(menu.entries.into_iter().take(left).map(|entry| {
            Candidate {
                doubt: once
                    .clone()
                    .or_else(|| unknown.first(&entry.undefined).map(variable_doubt)),
                by: format!("the entry \"{}\" of {place}", entry.title),
                root: entry.root,
                kernel: entry.kernel,
                below: "",
                initrds: entry.initrds,
                cmdline: entry.cmdline,
                image: None,
                volume: *volume,
            }
        }));
    }
    found
}

/// A text that describes the disk's content other than a kernel.
fn nothing(readable: &[Volume], others: &[String], missing: Option<String>) -> String {
    if let Some(missing) = missing {
        return missing;
    }
    let has_unified = |volume: &Volume| {
        let names = volume.names("/EFI/Linux");
        names.iter().any(|name| name.to_lowercase().ends_with(".efi"))
    };
    let has_syslinux = |volume: &Volume| SYSLINUX.iter().any(|path| volume.has(path));
    if readable.iter().any(has_unified) {
        return "its unified kernel images (/EFI/Linux) have no kernel for this processor, or are damaged"
            .to_owned();
    }
    if !others.is_empty() {
        return others.join(", ");
    }
    match readable.len() {
        0 => "it has no file system that is known here (ext2 to ext4, XFS, Btrfs, FAT)".to_owned(),
        _ if readable.iter().any(has_syslinux) => {
            "its boot loader is SYSLINUX or EXTLINUX, whose configuration is not read".to_owned()
        }
        _ => "there are no boot loader entries and no grub.cfg on it".to_owned(),
    }
}
