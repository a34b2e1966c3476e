//! Files with checksums, as distributions publish them beside their images: lines of `sha256sum`, lines of BSD, or one checksum alone.

use std::{fs::File, io::Read as _, path::Path};

use vmmd_spec::image::{checksum_text, file_checksum};

use crate::failure::{Code, Failure, Result};

/// Longest file, in bytes: those of whole releases have some thousand lines.
const LONGEST: u64 = 4 << 20;

/// The checksum in a list for the file at `from`, an address or a path.
pub fn of(path: &Path, from: &str) -> Result<String> {
    let failed = |problem: &dyn std::fmt::Display| {
        let message = format!("--checksum-file {}: {problem}", path.display());
        Failure::new(Code::Invalid, message)
    };
    let mut text = Vec::new();
    let file = File::open(path).map_err(|error| failed(&error))?;
    let read = file.take(LONGEST + 1).read_to_end(&mut text);
    read.map_err(|error| failed(&error))?;
    if text.len() as u64 > LONGEST {
        return Err(failed(
            &"the file is longer than 4 MiB: it is no list of checksums",
        ));
    }
    find(&String::from_utf8_lossy(&text), name(from)).map_err(|problem| failed(&problem))
}

/// The name of a file in an address or a path.
fn name(from: &str) -> &str {
    let bare = from.split(['?', '#']).next().unwrap_or_default();
    bare.rsplit('/').next().unwrap_or_default()
}

/// The strongest checksum that a text has for a file with this name.
fn find(text: &str, name: &str) -> std::result::Result<String, String> {
    let lines = || text.lines().map(str::trim).filter(|line| !line.is_empty());
    let mut found: Vec<_> = lines().filter_map(entry).filter(|(of, _)| of == name).collect();
    let alone = lines().filter_map(|line| file_checksum(line).ok());
    if lines().count() == 1 {
        found.extend(alone.map(|checksum| (String::new(), checksum)));
    }
    found.sort_by_key(|(_, checksum)| checksum.len());
    found.dedup();
    match found.as_slice() {
        [] => Err(format!(
            "it has no SHA-256 or SHA-512 of \"{name}\": give the checksum with --checksum"
        )),
        [.., (_, first), (_, second)] if first.len() == second.len() => Err(format!(
            "it has several checksums of \"{name}\": give the right one with --checksum"
        )),
        [.., (_, last)] => Ok(checksum_text(last)),
    }
}

/// File name and checksum in a line: "DIGITS  NAME", "DIGITS *NAME" or "SHA256 (NAME) = DIGITS".
fn entry(line: &str) -> Option<(String, Vec<u8>)> {
    let bsd = || {
        let (_, rest) = line.split_once(" (")?;
        let (name, digits) = rest.rsplit_once(") = ")?;
        Some((name, digits))
    };
    let gnu = || {
        let (digits, name) = line.split_once([' ', '\t'])?;
        let name = name.trim_start();
        Some((name.strip_prefix('*').unwrap_or(name), digits))
    };
    let (name, digits) = bsd().or_else(gnu)?;
    let checksum = file_checksum(digits.trim()).ok()?;
    Some((self::name(name).to_owned(), checksum))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksum_is_found_in_each_published_form() {
        let (short, long) = ("ab".repeat(32), "cd".repeat(64));
        let debian = format!("{long}  debian-13.raw\n{}  debian-13.qcow2\n", "00".repeat(64));
        let fedora = format!(
            "-----BEGIN PGP SIGNED MESSAGE-----\nHash: SHA256\n\n# Fedora.qcow2: 7 bytes\nSHA256 (Fedora.qcow2) = {short}\n"
        );
        let both = format!(
            "{short} *./a.img\nMD5 (a.img) = {}\n{long}\t*dir/a.img\n",
            "00".repeat(16)
        );
        for (text, name, wanted) in [
            (debian.as_str(), "debian-13.raw", format!("sha512:{long}")),
            (&fedora, "Fedora.qcow2", format!("sha256:{short}")),
            (&both, "a.img", format!("sha512:{long}")),
            (&format!("{short}\n"), "any", format!("sha256:{short}")),
            (
                &format!("{short}  image.qcow2"),
                "image.qcow2",
                format!("sha256:{short}"),
            ),
        ] {
            assert_eq!(find(text, name), Ok(wanted), "{name}");
        }
        let twice = format!("{short}  a\n{}  a\n", "00".repeat(32));
        for (text, name, words) in [
            (debian.as_str(), "other", "no SHA-256 or SHA-512"),
            (&format!("{}  a", "00".repeat(20)), "a", "no SHA-256 or SHA-512"),
            ("", "a", "no SHA-256 or SHA-512"),
            (&twice, "a", "several checksums"),
        ] {
            let problem = find(text, name).unwrap_err();
            assert!(problem.contains(words), "{problem}");
        }
    }

    #[test]
    fn name_is_the_last_part_of_an_address_or_path() {
        for (from, wanted) in [
            ("https://a.example/b/c.img?token=x/y", "c.img"),
            ("/srv/c.img", "c.img"),
            ("https://a.example/", ""),
        ] {
            assert_eq!(name(from), wanted);
        }
    }
}
