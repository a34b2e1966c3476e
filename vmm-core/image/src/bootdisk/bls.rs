//! Entries of the Boot Loader Specification: `loader/entries/*.conf`.

use std::cmp::Ordering;

use super::{
    files::LONGEST_PATH,
    grub::{LONGEST_COMMAND, Variables},
    uki::Image,
};

/// An entry.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Entry {
    /// Name of its file, without `.conf`.
    pub id: String,
    /// Title in the menu.
    pub title: String,
    /// First criterion of the order.
    pub sort_key: String,
    /// Version of the kernel.
    pub version: String,
    /// Path of the kernel.
    pub kernel: String,
    /// Paths of the initial RAM disks.
    pub initrds: Vec<String>,
    /// Command line.
    pub cmdline: String,
    /// Layout of the kernel's file, if the kernel is a unified image.
    pub image: Option<Image>,
    /// Variables of GRUB that have no value here.
    pub undefined: Vec<String>,
}

/// Reads one; nothing when it boots no kernel. One with `uki` or `efi` names an image, which is to be read by the caller. `variables` are those of GRUB's environment block, which Fedora's entries use.
pub fn entry(id: &str, text: &str, variables: &Variables) -> Option<Entry> {
    let mut entry = Entry {
        id: id.to_owned(),
        ..Entry::default()
    };
    let mut options = String::new();
    for line in text.lines().map(str::trim) {
        let Some((key, value)) = line.split_once([' ', '\t']) else {
            continue;
        };
        let value = value.trim();
        match key {
            "title" => value.clone_into(&mut entry.title),
            "sort-key" => value.clone_into(&mut entry.sort_key),
            "version" => value.clone_into(&mut entry.version),
            "linux" => value.clone_into(&mut entry.kernel),
            "uki" | "efi" if entry.kernel.is_empty() => {
                value.clone_into(&mut entry.kernel);
                entry.image = Some(Image::default());
            }
            // GRUB takes several in a line, and variables.
            "initrd" => {
                for word in value.split_whitespace() {
                    let paths = variable(word, variables, &mut entry.undefined);
                    entry.initrds.extend(paths.split_whitespace().map(str::to_owned));
                }
            }
            "options" => {
                for word in value.split_whitespace() {
                    let word = variable(word, variables, &mut entry.undefined);
                    // Further words are dropped: the options are already too long for a command
                    // line.
                    if !word.is_empty() && options.len() <= LONGEST_COMMAND {
                        options.extend((!options.is_empty()).then_some(' '));
                        options.push_str(word);
                    }
                }
            }
            _ => {}
        }
    }
    entry.cmdline = options;
    let has_kernel = !entry.kernel.is_empty() && entry.kernel.len() <= LONGEST_PATH;
    has_kernel.then_some(entry)
}

/// A word, or the value of the variable that it names.
fn variable<'a>(word: &'a str, variables: &'a Variables, undefined: &mut Vec<String>) -> &'a str {
    let Some(name) = word.strip_prefix('$') else {
        return word;
    };
    let value = variables.get(name);
    if value.is_none() {
        undefined.push(name.to_owned());
    }
    value.map_or("", String::as_str)
}

/// Sorts the entries, and puts the default entry first: `saved` is GRUB's saved name, or a number
/// from the top.
pub fn sort(entries: &mut Vec<Entry>, saved: &str) {
    entries.sort_by(order);
    let by_name = entries
        .iter()
        .position(|entry| entry.id == saved || (!saved.is_empty() && entry.title == saved));
    let chosen = by_name.or_else(|| saved.parse().ok());
    if let Some(chosen) = chosen.filter(|chosen| *chosen < entries.len()) {
        let chosen = entries.remove(chosen);
        entries.insert(0, chosen);
    }
}

/// As the specification sorts: those with a sort key first, the newest version of each first. A rescue kernel is the last, and one that has
/// used up its attempts to boot (`NAME+0-3`).
fn order(a: &Entry, b: &Entry) -> Ordering {
    let rescue = |entry: &Entry| {
        let counter = entry.id.rsplit_once('+').map(|(_, counter)| counter);
        let is_bad = counter.is_some_and(|counter| counter == "0" || counter.starts_with("0-"));
        entry.id.contains("rescue") || is_bad
    };
    let keys = || match (a.sort_key.is_empty(), b.sort_key.is_empty()) {
        (false, false) => a.sort_key.cmp(&b.sort_key),
        (a, b) => a.cmp(&b),
    };
    rescue(a)
        .cmp(&rescue(b))
        .then_with(keys)
        .then_with(|| versions(&b.version, &a.version))
        .then_with(|| versions(&b.id, &a.id))
}

/// Compares versions: runs of digits as numbers, everything else as text; `~` is before everything (UAPI.10).
pub fn versions(a: &str, b: &str) -> Ordering {
    let (mut a, mut b) = (a, b);
    loop {
        match (a.starts_with('~'), b.starts_with('~')) {
            (true, true) => {}
            (true, false) => return Ordering::Less,
            (false, true) => return Ordering::Greater,
            (false, false) if a.is_empty() || b.is_empty() => return a.len().cmp(&b.len()),
            (false, false) => {}
        }
        let (digits_a, rest_a) = split(a, |letter| letter.is_ascii_digit());
        let (digits_b, rest_b) = split(b, |letter| letter.is_ascii_digit());
        let (number_a, number_b) = (digits_a.trim_start_matches('0'), digits_b.trim_start_matches('0'));
        let numbers = match (digits_a.is_empty(), digits_b.is_empty()) {
            (false, false) => number_a.len().cmp(&number_b.len()).then(number_a.cmp(number_b)),
            // A number is newer than a word: 6.1.0 and 6.1.rc.
            (a, b) => b.cmp(&a),
        };
        if numbers != Ordering::Equal {
            return numbers;
        }
        let (text_a, text_b) = (
            split(rest_a, |letter| !letter.is_ascii_digit()),
            split(rest_b, |letter| !letter.is_ascii_digit()),
        );
        match tilde(text_a, text_b) {
            Ordering::Equal => {}
            different => return different,
        }
        (a, b) = (text_a.1, text_b.1);
        if a.is_empty() && b.is_empty() {
            return Ordering::Equal;
        }
    }
}

/// Compares pieces without digits, each with what follows it.
fn tilde((a, after_a): (&str, &str), (b, after_b): (&str, &str)) -> Ordering {
    let weight = |letter: Option<char>, after: &str| match letter {
        Some('~') => (0, ' '),
        None if after.is_empty() => (1, ' '),
        Some(letter) => (2, letter),
        // A number is newer than a word.
        None => (3, ' '),
    };
    let (mut a, mut b) = (a.chars(), b.chars());
    loop {
        match (a.next(), b.next()) {
            (None, None) => return Ordering::Equal,
            (a, b) if a == b => {}
            (a, b) => return weight(a, after_a).cmp(&weight(b, after_b)),
        }
    }
}

fn split(text: &str, belongs: impl Fn(char) -> bool) -> (&str, &str) {
    let end = text.find(|letter| !belongs(letter)).unwrap_or(text.len());
    text.split_at(end)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_compared_as_numbers_and_words() {
        for (older, newer) in [
            ("6.1.0-9-cloud-amd64", "6.1.0-27-cloud-amd64"),
            ("6.1.0-27-cloud-amd64", "6.12.0-1-cloud-amd64"),
            ("5.14.0-70.el9", "5.14.0-362.8.1.el9_3"),
            ("6.1~rc1", "6.1"),
            ("6.1", "6.1.1"),
            ("6.1.rc", "6.1.0"),
            ("", "1"),
        ] {
            assert_eq!(versions(older, newer), Ordering::Less, "{older} {newer}");
            assert_eq!(versions(newer, older), Ordering::Greater, "{older} {newer}");
            assert_eq!(versions(newer, newer), Ordering::Equal);
        }
    }

    #[test]
    fn the_newest_entry_is_booted_unless_another_was_chosen() {
        let variables = Variables::from([("kernelopts".to_owned(), "root=UUID=1 ro".to_owned())]);
        let read = |id: &str, version: &str| {
            let text = format!(
                "# made by kernel-install\ntitle Fedora ({version})\nversion {version}\nlinux /vmlinuz-{version}\n\
                 initrd /initramfs-{version}.img $tuned_initrd\noptions $kernelopts $tuned_params quiet\n"
            );
            entry(id, &text, &variables).unwrap()
        };
        let mut entries = vec![
            read("m-0-rescue", "0-rescue"),
            read("m-5.9", "5.9"),
            read("m-5.14", "5.14"),
        ];
        sort(&mut entries, "");
        assert_eq!(
            (entries[0].kernel.as_str(), entries[0].cmdline.as_str()),
            ("/vmlinuz-5.14", "root=UUID=1 ro quiet")
        );
        assert_eq!(entries[0].initrds, ["/initramfs-5.14.img"]);
        assert_eq!(entries[2].id, "m-0-rescue");
        sort(&mut entries, "m-5.9");
        assert_eq!(entries[0].id, "m-5.9");
        sort(&mut entries, "1");
        assert_eq!(entries[0].id, "m-5.9");
        let mut entries = vec![read("m-5.14+0-3", "5.14"), read("m-5.9+2-1", "5.9")];
        sort(&mut entries, "");
        assert_eq!(entries[0].id, "m-5.9+2-1");
        let image = entry("efi", "title Linux\nefi /EFI/x.efi\n", &variables).unwrap();
        assert!(image.image.is_some() && image.kernel == "/EFI/x.efi");
        assert!(entry("none", "title Nothing\n", &variables).is_none());
    }
}
