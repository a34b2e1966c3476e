//! Kernels without a boot loader.

use super::{Candidate, MOST_ENTRIES, TEXT, bls, grub::Root, on, volume::Volume};

/// The links that packages of kernels keep, then the newest kernel.
pub fn links(volumes: &[Volume]) -> Vec<Candidate> {
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
                    image: None,
                    volume: number,
                    once: None,
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

/// The command line of a system whose boot loader gives none: that of kernel-install, or that of
/// grub-mkconfig.
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
    let mut first = Vec::new();
    if !names_root {
        first.push(format!("root=UUID={} ro", root.uuid));
        // Without that the kernel would mount the default one. grub-mkconfig says so too.
        let named = words.iter().any(|word| word.starts_with("rootflags="));
        let subvolume = root.subvolume.as_ref().filter(|_| !named);
        first.extend(subvolume.map(|path| format!("rootflags=subvol={path}")));
    }
    let words = first.iter().map(String::as_str).chain(words);
    words.collect::<Vec<_>>().join(" ")
}
