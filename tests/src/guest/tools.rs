//! Debian's tools for file systems and block devices with the libraries that they need, for an initramfs.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::cache::{self, Inputs};
use crate::debian::{self, Release, Root};
use crate::initramfs::Extra;
use crate::run;
use crate::wait::Deadline;

/// Raise it to fetch newer versions of the packages.
const BUILDER_VERSION: u32 = 1;

/// Programs by their path in Debian and in the guest, in which `/tools` contains them. busybox has
/// programs with some of these names, but without the functions required here.
const PROGRAMS: [(&str, &str); 4] = [
    ("sbin/mke2fs", "tools/mkfs.ext4"),
    ("sbin/e2fsck", "tools/e2fsck"),
    ("sbin/fstrim", "tools/fstrim"),
    ("sbin/blkdiscard", "tools/blkdiscard"),
];

/// The dynamic loader, at the path that is written into every program.
const LOADER: &str = "lib64/ld-linux-x86-64.so.2";

/// The programs, their libraries and the loader.
pub fn files() -> Result<Vec<Extra>> {
    let root = packages()?;
    let mut files = vec![
        Extra::new(root.join(LOADER).canonicalize()?, LOADER),
        Extra::new(root.join("etc/mke2fs.conf"), "etc/mke2fs.conf"),
    ];
    let mut libraries = BTreeSet::new();
    for (from, to) in PROGRAMS {
        let program = [root.join(from), root.join("usr").join(from)]
            .into_iter()
            .find(|path| path.exists())
            .with_context(|| format!("{from} is in none of the packages"))?;
        libraries.extend(needed(&root, &program)?);
        files.push(Extra::new(program, to));
    }
    for library in libraries {
        let name = library.rsplit('/').next().unwrap_or_default();
        let file = root.join(library.trim_start_matches('/')).canonicalize();
        files.push(Extra::new(
            file.with_context(|| format!("find {library}"))?,
            format!("lib/x86_64-linux-gnu/{name}"),
        ));
    }
    Ok(files)
}

fn packages() -> Result<PathBuf> {
    let packages = ["e2fsprogs", "util-linux"].map(str::to_owned);
    let mut inputs = Inputs::new(BUILDER_VERSION);
    inputs
        .add("packages", packages.join(" ").as_bytes())
        .add_file(&debian::sources())?;
    let dir = cache::get_or_build("guest-tools", &inputs, |out| {
        Root {
            release: Release::Bookworm,
            variant: "extract",
            packages: &packages,
            more_sources: None,
            overlay: None,
            customize: None,
        }
        .make(&out.join("root"))
    })?;
    Ok(dir.join("root"))
}

/// The libraries that the loader would load for a program, by their paths in `root`: lines `NAME => PATH (ADDRESS)`.
fn needed(root: &Path, program: &Path) -> Result<BTreeSet<String>> {
    let inside = Path::new("/").join(program.strip_prefix(root).context("a program of the packages")?);
    let mut command = Command::new("chroot");
    command
        .arg(root)
        .arg(Path::new("/").join(LOADER))
        .arg("--list")
        .arg(inside);
    let list = run::check(
        command.env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin"),
        Deadline::seconds(30),
    )?;
    ensure!(!list.contains("not found"), "libraries are missing: {list}");
    Ok(list
        .lines()
        .filter_map(|line| line.split_once(" => ")?.1.split_whitespace().next())
        .map(str::to_owned)
        .collect())
}
