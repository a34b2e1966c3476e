//! Entries of systemd-boot and of GRUB with its `blscfg`: the Boot Loader Specification's entries,
//! and unified kernel images.

use super::{
    Candidate, MOST_ENTRIES, TEXT,
    bls::{self, Entry},
    grub::{self, Root, Unknown, Variables},
    on, once_doubt, uki, variable_doubt,
    volume::Volume,
};

/// Where entries are, on the EFI system partition, on one for `/boot`, or on a file system for all; and what their paths are below of, when they
/// are not below of the file system.
const LOADER: [(&str, &str); 2] = [("/loader", ""), ("/boot/loader", "/boot")];
/// Where unified kernel images are, below of the same.
const IMAGES: &str = "EFI/Linux";
/// Arguments that name the root file system (kernel-command-line(7)).
const ROOTS: [&str; 3] = ["root=", "roothash=", "usrhash="];
/// Most unified kernel images that are looked at.
const MOST_IMAGES: usize = 64;

/// The entries of all file systems, with each file system's default entry first. `variables` are
/// those of GRUB's environment block.
pub fn entries(volumes: &[Volume], variables: &Variables, unknown: &Unknown) -> Vec<Candidate> {
    let mut later = variables.clone();
    let once = grub::take_once(&mut later);
    let saved = later.get("saved_entry").cloned().unwrap_or_default();
    // systemd-boot has one file for the EFI system partition and the one for `/boot`.
    let defaults = volumes.iter().find_map(|volume| {
        let texts = LOADER.map(|(folder, _)| volume.text(&format!("{folder}/loader.conf"), TEXT));
        texts.into_iter().flatten().next()
    });
    let (mut found, mut images) = (Vec::new(), MOST_IMAGES);
    for (number, volume) in volumes.iter().enumerate() {
        for (folder, below) in LOADER {
            let left = MOST_ENTRIES.saturating_sub(found.len());
            let mut entries = of_folder(volume, folder, below, variables);
            entries.extend(unified(volume, below, &mut images));
            entries.truncate(left);
            let text = volume.text(&format!("{folder}/loader.conf"), TEXT);
            let text = text.as_ref().or(defaults.as_ref());
            let chosen = text.and_then(|text| default_of_loader(text, &entries));
            bls::sort(&mut entries, chosen.as_deref().unwrap_or(&saved));
            // GRUB boots these entries where systemd-boot has no default.
            let once = once.clone().filter(|once| {
                let mut now = entries.clone();
                bls::sort(&mut now, &once.entry);
                let is_named = now.iter().zip(&entries).all(|(now, later)| now.id == later.id);
                chosen.is_none() && !is_named
            });
            let once = once.as_ref().map(once_doubt);
            found.extend(entries.into_iter().map(|entry| {
                Candidate {
                    doubt: once
                        .clone()
                        .or_else(|| unknown.first(&entry.undefined).map(variable_doubt))
                        .or_else(|| image_doubt(volume, below, &entry)),
                    by: format!("{} {}{}", what(&entry), entry.id, on(volume)),
                    root: Root::Here,
                    kernel: entry.kernel,
                    below,
                    initrds: entry.initrds,
                    cmdline: entry.cmdline,
                    image: entry.image,
                    volume: number,
                }
            }));
        }
    }
    found
}

/// Why systemd-boot may boot a unified kernel image differently.
fn image_doubt(volume: &Volume, below: &str, entry: &Entry) -> Option<String> {
    entry.image.as_ref()?;
    let path = entry.kernel.trim_start_matches('/');
    let folders = [
        format!("{below}/{path}.extra.d"),
        format!("{below}/loader/addons"),
    ];
    let is_addon = |name: &String| name.to_lowercase().ends_with(".addon.efi");
    if folders
        .iter()
        .any(|folder| volume.names(folder).iter().any(is_addon))
    {
        return Some("its addons (*.addon.efi) are not read".to_owned());
    }
    let mut words = entry.cmdline.split_whitespace();
    let is_root = |word: &str| ROOTS.iter().any(|start| word.starts_with(start));
    (!words.any(is_root)).then(|| {
        "its command line has no root=, so the guest looks for its root partition by a variable of UEFI"
            .to_owned()
    })
}

fn what(entry: &Entry) -> &'static str {
    match entry.image {
        Some(_) => "the unified kernel image",
        None => "the boot loader entry",
    }
}

/// The entries that are files of their own.
fn of_folder(volume: &Volume, folder: &str, below: &str, variables: &Variables) -> Vec<Entry> {
    let names = volume.names(&format!("{folder}/entries"));
    let ids = names.iter().filter_map(|name| name.strip_suffix(".conf"));
    let read = |id: &str| {
        let text = volume.text(&format!("{folder}/entries/{id}.conf"), TEXT)?;
        let entry = bls::entry(id, &text, variables)?;
        if entry.image.is_none() {
            return Some(entry);
        }
        // Other programs than kernels are not booted.
        let path = entry.kernel.trim_start_matches('/');
        let image = ["", below].iter().find_map(|below| {
            let path = format!("{below}/{path}");
            uki::image(&|range| volume.bytes(&path, range))
        })?;
        let cmdline = match entry.cmdline.as_str() {
            "" => image.cmdline.clone(),
            options => options.to_owned(),
        };
        Some(Entry {
            cmdline,
            image: Some(image),
            ..entry
        })
    };
    ids.take(MOST_ENTRIES).filter_map(read).collect()
}

/// The unified kernel images, no more than `left`.
fn unified(volume: &Volume, below: &str, left: &mut usize) -> Vec<Entry> {
    let folder = format!("{below}/{IMAGES}");
    let names = volume.names(&folder);
    let ids = names.iter().filter_map(|name| {
        let at = name.len().checked_sub(4)?;
        let (id, end) = (name.get(..at)?, name.get(at..)?);
        end.eq_ignore_ascii_case(".efi").then_some((id, name))
    });
    let mut found = Vec::new();
    for (id, name) in ids {
        let Some(fewer) = left.checked_sub(1) else {
            break;
        };
        *left = fewer;
        let path = format!("{folder}/{name}");
        let image = uki::image(&|range| volume.bytes(&path, range));
        found.extend(image.map(|image| uki::entry(id, &path, image)));
    }
    found
}

/// The entry that `default` of systemd-boot's `loader.conf` names: by a pattern of its file's name, with or without the end of that.
pub fn default_of_loader(text: &str, entries: &[Entry]) -> Option<String> {
    let mut lines = text
        .lines()
        .filter_map(|line| line.trim().split_once([' ', '\t']));
    let (_, pattern) = lines.find(|(key, _)| *key == "default")?;
    let pattern = pattern.trim().to_lowercase();
    let mut newest: Vec<_> = entries.to_vec();
    bls::sort(&mut newest, "");
    let matches = |entry: &&Entry| {
        let id = entry.id.to_lowercase();
        let end = if entry.image.is_some() { ".efi" } else { ".conf" };
        is_match(&pattern, &id) || is_match(&pattern, &format!("{id}{end}"))
    };
    newest.iter().find(matches).map(|entry| entry.id.clone())
}

/// Whether a pattern with `*` and `?` fits.
fn is_match(pattern: &str, text: &str) -> bool {
    let (pattern, text): (Vec<_>, Vec<_>) = (pattern.chars().collect(), text.chars().collect());
    let (mut at, mut read) = (0_usize, 0_usize);
    // The last star, and the position in `text` at which the star was tried.
    let mut star: Option<(usize, usize)> = None;
    while let Some(letter) = text.get(read) {
        match pattern.get(at) {
            Some('*') => {
                star = Some((at, read));
                at = at.saturating_add(1);
            }
            Some(wanted) if *wanted == '?' || wanted == letter => {
                at = at.saturating_add(1);
                read = read.saturating_add(1);
            }
            _ => {
                let Some((place, from)) = star else {
                    return false;
                };
                star = Some((place, from.saturating_add(1)));
                at = place.saturating_add(1);
                read = from.saturating_add(1);
            }
        }
    }
    pattern.iter().skip(at).all(|letter| *letter == '*')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_is_a_pattern_of_a_files_name() {
        for (pattern, text, fits) in [
            ("*", "", true),
            ("arch-*", "arch-6.1", true),
            ("*-6.1.efi", "arch-6.1.efi", true),
            ("a*b*c", "aXbYbZc", true),
            ("a?c", "abc", true),
            ("a?c", "ac", false),
            ("arch", "arch-6.1", false),
            ("a*b", "aXbY", false),
        ] {
            assert_eq!(is_match(pattern, text), fits, "{pattern} {text}");
        }
        let entry = |id: &str, version: &str| Entry {
            id: id.to_owned(),
            version: version.to_owned(),
            ..Entry::default()
        };
        let entries = [entry("M-6.1", "6.1"), entry("m-6.9", "6.9"), entry("x", "7")];
        let chosen = |text: &str| default_of_loader(text, &entries);
        assert_eq!(chosen("timeout 3\ndefault m-*\n").as_deref(), Some("m-6.9"));
        assert_eq!(chosen("default\tM-6.1.conf\n").as_deref(), Some("M-6.1"));
        assert_eq!(chosen("default m-6.1.efi\n"), None);
        assert_eq!(chosen("timeout 3\n"), None);
    }
}
