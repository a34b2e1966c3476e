//! Finds the kernel that is installed on a disk, as the boot loader there would: by entries of the Boot Loader Specification, by
//! grub.cfg, or by the links that Debian makes in `/boot` and `/`.
//!
//! The disk is hostile: whoever wrote it may have written anything. Nothing here follows what it says beyond bounds, nothing is
//! mounted, and whoever calls this has given up all rights before.

mod bls;
mod ext4;
mod fat;
mod files;
#[cfg(any(test, feature = "testing"))]
pub mod fuzzing;
mod grub;
pub mod medium;
mod partitions;
mod volume;

#[cfg(test)]
mod tests;

use std::{
    io::{self, Read as _, Write},
    rc::Rc,
};

use grub::{Root, Variables};
use medium::{Bounded, Medium, Window};
use volume::{Volume, Volumes};

/// Longest kernel in bytes.
pub const MAX_KERNEL: u64 = 256 << 20;
/// Longest initial RAM disks together in bytes.
pub const MAX_INITRD: u64 = 1 << 30;
/// Longest command line in bytes.
const MAX_CMDLINE: usize = proto::model::vm::MAX_CMDLINE;
/// Where grub.cfg is, on a file system for all or on one for `/boot`.
const GRUB: [&str; 4] = ["/boot/grub", "/boot/grub2", "/grub", "/grub2"];
/// Where entries of the Boot Loader Specification are, on the EFI system partition, on one for `/boot`, or on a file system for all; and
/// what their paths are below of, when they are not below of the file system.
const LOADER: [(&str, &str); 2] = [("/loader", ""), ("/boot/loader", "/boot")];
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
/// What the archives of an initial RAM disk begin at a multiple of, in bytes (Documentation/driver-api/early-userspace/buffer-format.rst).
const ALIGNMENT: u64 = 4;

/// Why there is nothing to boot.
#[derive(Debug, thiserror::Error)]
pub enum FindError {
    /// There is no kernel.
    #[error("no kernel was found on the disk: {0}")]
    None(String),
    /// There is one that can't be used.
    #[error("{what} can't be booted: {problem}")]
    Unusable {
        /// What names it: "the entry "Debian" of grub.cfg".
        what: String,
        /// Why not.
        problem: String,
    },
    /// A file can't be read.
    #[error("copy {0} from the disk")]
    Copy(String, #[source] io::Error),
}

/// What a disk boots.
#[derive(Debug)]
pub struct Found {
    /// Path of the kernel on its file system.
    pub kernel: String,
    /// Paths of the initial RAM disks, on the same one.
    pub initrds: Vec<String>,
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
    /// What paths are also tried below of.
    below: &'static str,
    initrds: Vec<String>,
    cmdline: String,
    by: String,
    volume: usize,
}

/// Finds what a disk boots.
///
/// # Errors
///
/// There is nothing that can be booted, with the reason.
pub fn find(disk: Rc<dyn Medium>) -> Result<Found, FindError> {
    find_within(disk, LOOKING, COPYING)
}

/// Finds it while no more bytes are read than that, and later no more for each copy.
fn find_within(disk: Rc<dyn Medium>, looking: u64, copying: u64) -> Result<Found, FindError> {
    let disk = Rc::new(Bounded::new(disk, looking));
    let Volumes { mut readable, others } =
        volume::volumes(&Window::whole(Rc::clone(&disk) as Rc<dyn Medium>));
    let mut missing = None;
    let candidates = loader_entries(&readable)
        .into_iter()
        .chain(grub_entries(&readable))
        .chain(links(&readable));
    for candidate in candidates {
        let Some((at, below)) = place(&readable, &candidate) else {
            missing.get_or_insert_with(|| {
                format!("{} names {}, which is not there", candidate.by, candidate.kernel)
            });
            continue;
        };
        let path = |path: &String| format!("{below}/{}", path.trim_start_matches('/'));
        let (kernel, initrds) = (
            path(&candidate.kernel),
            candidate.initrds.iter().map(path).collect::<Vec<_>>(),
        );
        let volume = readable.swap_remove(at);
        if let Some(lost) = initrds.iter().find(|path| !volume.has(path)) {
            return Err(FindError::Unusable {
                what: candidate.by,
                problem: format!("the initial RAM disk {lost} is not there"),
            });
        }
        let cmdline = cmdline(&candidate)?;
        return Ok(Found {
            kernel,
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
    Err(FindError::None(nothing(&readable, &others, missing)))
}

impl Found {
    /// Copies the kernel; returns its length in bytes.
    ///
    /// # Errors
    ///
    /// It can't be read or written, or is longer than [`MAX_KERNEL`].
    pub fn copy_kernel(&self, to: &mut dyn Write) -> Result<u64, FindError> {
        self.disk.refill(self.copying);
        let copied = self.volume.copy(&self.kernel, to, MAX_KERNEL);
        copied.map_err(|error| FindError::Copy(self.kernel.clone(), error))
    }

    /// Copies the initial RAM disks, one behind the other; returns their length in bytes.
    ///
    /// # Errors
    ///
    /// One can't be read or written, or they are longer than [`MAX_INITRD`].
    pub fn copy_initrd(&self, to: &mut dyn Write) -> Result<u64, FindError> {
        self.disk.refill(self.copying);
        let mut length: u64 = 0;
        for path in &self.initrds {
            let failed = |error| FindError::Copy(path.clone(), error);
            let gap = length.next_multiple_of(ALIGNMENT).saturating_sub(length);
            io::copy(&mut io::repeat(0).take(gap), &mut *to).map_err(failed)?;
            length = length.next_multiple_of(ALIGNMENT);
            let copied = self
                .volume
                .copy(path, to, MAX_INITRD.saturating_sub(length))
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
    let named = match &candidate.root {
        Root::Here => None,
        Root::Uuid(uuid) => volumes
            .iter()
            .position(|volume| volume.uuid.eq_ignore_ascii_case(uuid)),
        Root::Label(label) => volumes.iter().position(|volume| volume.label == *label),
        Root::File(path) => volumes.iter().position(|volume| volume.has(path)),
        Root::Partition(number) => volumes.iter().position(|volume| volume.number == *number),
    };
    let volume = named.unwrap_or(candidate.volume);
    let there = volumes.get(volume)?;
    let has = |below: &str| there.has(&format!("{below}/{}", candidate.kernel.trim_start_matches('/')));
    ["", candidate.below]
        .into_iter()
        .find(|below| has(below))
        .map(|below| (volume, below))
}

fn on(volume: &Volume) -> String {
    match volume.number {
        0 => String::new(),
        number => format!(" on partition {number}"),
    }
}

/// GRUB's environment block, of whichever file system has one.
fn environment(volumes: &[Volume]) -> Variables {
    let places = GRUB.iter().map(|folder| format!("{folder}/grubenv"));
    let places: Vec<_> = places.chain(["/EFI/fedora/grubenv".to_owned()]).collect();
    let text = volumes
        .iter()
        .find_map(|volume| places.iter().find_map(|path| volume.text(path, TEXT)));
    grub::environment(&text.unwrap_or_default())
}

fn loader_entries(volumes: &[Volume]) -> Vec<Candidate> {
    let variables = environment(volumes);
    let saved = variables.get("saved_entry").cloned().unwrap_or_default();
    let mut found = Vec::new();
    for (number, volume) in volumes.iter().enumerate() {
        for (folder, below) in LOADER {
            let left = MOST_ENTRIES.saturating_sub(found.len());
            let names = volume.names(&format!("{folder}/entries"));
            let ids = names.iter().filter_map(|name| name.strip_suffix(".conf"));
            let read = |id: &str| {
                let text = volume.text(&format!("{folder}/entries/{id}.conf"), TEXT)?;
                bls::entry(id, &text, &variables)
            };
            let mut entries: Vec<_> = ids.take(left).filter_map(read).collect();
            let chosen = volume
                .text(&format!("{folder}/loader.conf"), TEXT)
                .and_then(|text| default_of_loader(&text, &entries));
            bls::sort(&mut entries, chosen.as_deref().unwrap_or(&saved));
            found.extend(entries.into_iter().map(|entry| Candidate {
                by: format!("the boot loader entry {}{}", entry.id, on(volume)),
                root: Root::Here,
                kernel: entry.kernel,
                below,
                initrds: entry.initrds,
                cmdline: entry.cmdline,
                volume: number,
            }));
        }
    }
    found
}

/// The entry that systemd-boot's `loader.conf` names, by its id or the beginning of it.
fn default_of_loader(text: &str, entries: &[bls::Entry]) -> Option<String> {
    let lines = text
        .lines()
        .filter_map(|line| line.trim().split_once([' ', '\t']));
    let (_, name) = lines.into_iter().find(|(key, _)| *key == "default")?;
    let name = name.trim().trim_end_matches(".conf");
    let mut newest: Vec<_> = entries.to_vec();
    bls::sort(&mut newest, "");
    let matches = |entry: &&bls::Entry| match name.strip_suffix('*') {
        Some(beginning) => entry.id.starts_with(beginning),
        None => entry.id == name,
    };
    newest.iter().find(matches).map(|entry| entry.id.clone())
}

fn grub_entries(volumes: &[Volume]) -> Vec<Candidate> {
    let variables = environment(volumes);
    let places = GRUB
        .iter()
        .flat_map(|folder| volumes.iter().enumerate().map(move |place| (folder, place)));
    let texts = places.filter_map(|(folder, (number, volume))| {
        let path = format!("{folder}/grub.cfg");
        let text = volume.text(&path, GRUB_TEXT)?;
        Some((number, format!("{path}{}", on(volume)), text))
    });
    let mut found = Vec::new();
    for (number, path, text) in texts.take(MOST_CONFIGURATIONS) {
        let left = MOST_ENTRIES.saturating_sub(found.len());
        let entries = grub::entries(&text, &variables).into_iter();
        found.extend(entries.take(left).map(|entry| Candidate {
            by: format!("the entry \"{}\" of {path}", entry.title),
            root: entry.root,
            kernel: entry.kernel,
            below: "",
            initrds: entry.initrds,
            cmdline: entry.cmdline,
            volume: number,
        }));
    }
    found
}

/// Kernels without a boot loader: the links that packages of kernels keep, then the newest kernel.
fn links(volumes: &[Volume]) -> Vec<Candidate> {
    let root = volumes
        .iter()
        .find(|volume| volume.has("/etc/os-release") || volume.has("/usr/lib/os-release"));
    let mut found = Vec::new();
    for (number, volume) in volumes.iter().enumerate() {
        let mut candidate = |folder: &str, kernel: &str, initrds: &[String]| {
            let path = |name: &str| format!("{folder}/{name}");
            let initrd = initrds
                .iter()
                .map(|name| path(name))
                .find(|path| volume.has(path));
            if found.len() < MOST_ENTRIES && volume.has(&path(kernel)) {
                found.push(Candidate {
                    by: format!("{}{}", path(kernel), on(volume)),
                    root: Root::Here,
                    kernel: path(kernel),
                    below: "",
                    initrds: initrd.into_iter().collect(),
                    cmdline: default_cmdline(root.unwrap_or(volume)),
                    volume: number,
                });
            }
        };
        for folder in ["/boot", ""] {
            candidate(folder, "vmlinuz", &["initrd.img".to_owned()]);
        }
        for folder in ["/boot", ""] {
            let names = volume.names(if folder.is_empty() { "/" } else { folder });
            let mut releases: Vec<_> = names
                .iter()
                .filter_map(|name| name.strip_prefix("vmlinuz-"))
                .collect();
            releases.sort_by(|a, b| bls::versions(b, a));
            for release in releases.into_iter().take(MOST_ENTRIES) {
                let initrds = [
                    format!("initrd.img-{release}"),
                    format!("initramfs-{release}.img"),
                    format!("initrd-{release}"),
                ];
                candidate(folder, &format!("vmlinuz-{release}"), &initrds);
            }
        }
    }
    found
}

/// The command line of a system whose boot loader has none: kernel-install's, or that which grub-mkconfig would use.
fn default_cmdline(root: &Volume) -> String {
    let written = root.text("/etc/kernel/cmdline", TEXT).or_else(|| {
        let text = root.text("/etc/default/grub", TEXT)?;
        let variables = text.lines().filter_map(|line| line.trim().split_once('='));
        let variables: Vec<_> = variables.collect();
        let value = |wanted: &str| {
            let found = variables.iter().rev().find(|(name, _)| *name == wanted);
            found.map_or("", |(_, value)| value.trim_matches(['"', '\'']))
        };
        let (both, normal) = (value("GRUB_CMDLINE_LINUX"), value("GRUB_CMDLINE_LINUX_DEFAULT"));
        Some(format!("{both} {normal}"))
    });
    let written = written.unwrap_or_default();
    let words: Vec<_> = written.split_whitespace().collect();
    let names_root = words.iter().any(|word| word.starts_with("root="));
    let root = (!names_root).then(|| format!("root=UUID={} ro", root.uuid));
    let words = root.iter().map(String::as_str).chain(words);
    words.collect::<Vec<_>>().join(" ")
}

/// What there is instead of a kernel, in words.
fn nothing(readable: &[Volume], others: &[String], missing: Option<String>) -> String {
    if let Some(missing) = missing {
        return missing;
    }
    let has_unified = |volume: &Volume| {
        let names = volume.names("/EFI/Linux");
        names.iter().any(|name| name.to_lowercase().ends_with(".efi"))
    };
    if readable.iter().any(has_unified) {
        return "it has unified kernel images (/EFI/Linux), which are not read".to_owned();
    }
    if !others.is_empty() {
        return others.join(", ");
    }
    match readable.len() {
        0 => "it has no file system that is known here (ext2 to ext4, FAT)".to_owned(),
        _ => "there are no boot loader entries, no grub.cfg and no /boot/vmlinuz on it".to_owned(),
    }
}
