//! Debian root folders by mmdebstrap, and file systems made from folders.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::cache::{self, Inputs};
use crate::wait::Deadline;
use crate::{paths, run};

/// A release of Debian.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Release {
    /// 12, which all images are of that nothing else is said of.
    Bookworm,
    /// 13.
    Trixie,
}

impl Release {
    /// All of them.
    pub const ALL: [Release; 2] = [Release::Bookworm, Release::Trixie];

    /// Its name in archives.
    pub fn suite(self) -> &'static str {
        match self {
            Release::Bookworm => "bookworm",
            Release::Trixie => "trixie",
        }
    }

    /// Its apt sources.
    pub fn sources(self) -> PathBuf {
        match self {
            Release::Bookworm => sources(),
            Release::Trixie => paths::crate_dir().join("guest/trixie.sources"),
        }
    }
}

/// Description of a Debian root folder.
pub struct Root<'a> {
    /// Which Debian.
    pub release: Release,
    /// mmdebstrap's variant: `minbase` for a system, `extract` for unpacked packages only.
    pub variant: &'a str,
    /// Packages in addition to those of the variant.
    pub packages: &'a [String],
    /// apt sources in addition to those of the release, for packages that only another release of
    /// Debian has. The newer version of a package wins.
    pub more_sources: Option<PathBuf>,
    /// A folder whose files are laid over the root before packages are configured, and again at the end.
    pub overlay: Option<PathBuf>,
    /// A script that is run at the end with the root folder as its argument.
    pub customize: Option<PathBuf>,
}

/// The apt sources of all images of Debian 12.
pub fn sources() -> PathBuf {
    paths::crate_dir().join("debian.sources")
}

/// A package list: one name a line, `#` starts a comment.
pub fn packages(list: &Path) -> Result<Vec<String>> {
    let text = fs::read_to_string(list).with_context(|| format!("read {}", list.display()))?;
    Ok(text
        .lines()
        .map(|line| line.split('#').next().unwrap_or_default().trim())
        .filter(|line| !line.is_empty())
        .map(str::to_owned)
        .collect())
}

impl Root<'_> {
    /// Makes it in the folder `target`, which must not exist yet. Needs root.
    pub fn make(&self, target: &Path) -> Result<()> {
        ensure!(
            rustix::process::geteuid().is_root(),
            "the images are built as root: run this as root"
        );
        let mut command = Command::new("mmdebstrap");
        command
            .arg(format!("--variant={}", self.variant))
            .arg(format!("--include={}", self.packages.join(",")))
            .args([
                r#"--aptopt=APT::Install-Recommends "false""#,
                r#"--aptopt=Acquire::Languages "none""#,
                "--dpkgopt=force-unsafe-io",
                // Configuration files that the overlay brings first are kept.
                "--dpkgopt=force-confold",
                "--dpkgopt=path-exclude=/usr/share/doc/*",
                "--dpkgopt=path-exclude=/usr/share/man/*",
                "--dpkgopt=path-exclude=/usr/share/locale/*",
                "--dpkgopt=path-exclude=/usr/share/info/*",
            ])
            .env("DEBIAN_FRONTEND", "noninteractive");
        if let Some(overlay) = &self.overlay {
            let sync = format!("sync-in {} /", overlay.display());
            command
                .arg(format!("--essential-hook={sync}"))
                .arg(format!("--customize-hook={sync}"));
        }
        if let Some(customize) = &self.customize {
            command.arg(format!("--customize-hook={}", customize.display()));
        }
        command
            .arg(self.release.suite())
            .arg(target)
            .arg(self.release.sources());
        command.args(&self.more_sources);
        run::check(&mut command, Deadline::seconds(1200)).map(drop)
    }
}

/// Fetches the upstream archive of the source package `name` in `version` into the folder `target`, from the sources of
/// the images; apt checks its signature.
pub fn source(name: &str, version: &str, target: &Path) -> Result<()> {
    let apt = tempfile::tempdir().context("create a folder for apt")?;
    let sources = fs::read_to_string(sources()).context("read the sources")?;
    fs::create_dir_all(apt.path().join("parts"))?;
    for folder in ["lists/partial", "cache/archives/partial"] {
        fs::create_dir_all(apt.path().join(folder))?;
    }
    fs::write(apt.path().join("status"), "")?;
    fs::write(
        apt.path().join("parts/debian.sources"),
        sources.replace("Types: deb\n", "Types: deb-src\n"),
    )?;
    let version = format!("{name}={version}");
    for action in [
        &["update"][..],
        &["source", "--download-only", "--tar-only", &version],
    ] {
        let mut command = Command::new("apt-get");
        command.arg("-q");
        for (option, value) in [
            ("Dir::State", ""),
            ("Dir::State::status", "status"),
            ("Dir::Cache", "cache"),
            ("Dir::Etc::sourceparts", "parts"),
        ] {
            command
                .arg("-o")
                .arg(format!("{option}={}", apt.path().join(value).display()));
        }
        command
            .args([
                "-o",
                "Dir::Etc::sourcelist=/dev/null",
                "-o",
                "APT::Sandbox::User=root",
            ])
            .args(action)
            .current_dir(target);
        run::check(&mut command, Deadline::seconds(300))?;
    }
    Ok(())
}

/// Makes a sparse ext4 image of `size_mib` MiB labelled `label` from the folder `root`.
pub fn ext4_image(root: &Path, image: &Path, label: &str, size_mib: u64) -> Result<()> {
    let file = fs::File::create(image).with_context(|| format!("create {}", image.display()))?;
    file.set_len(size_mib << 20)?;
    // The kernel must not initialise the rest in the background later, while a test measures
    // something else.
    let mut command = Command::new("mkfs.ext4");
    command
        .args([
            "-q",
            "-F",
            "-E",
            "lazy_itable_init=0,lazy_journal_init=0",
            "-L",
            label,
            "-d",
        ])
        .arg(root)
        .arg(image)
        .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
    run::check(&mut command, Deadline::seconds(600)).map(drop)
}

/// Makes the list of the dependencies between the modules of the kernel `version` in the folder `root`.
pub fn depmod(root: &Path, version: &str) -> Result<()> {
    let mut command = Command::new("depmod");
    command
        .arg("-b")
        .arg(root)
        .arg(version)
        .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
    run::check(&mut command, Deadline::seconds(120)).map(drop)
}

/// The private key that opens the nodes and the Debian guests of this build tree; the public one is beside it.
/// Made when there is none yet.
pub fn ssh_key() -> Result<PathBuf> {
    let inputs = Inputs::new(1);
    let dir = cache::get_or_build("ssh", &inputs, |out| {
        let mut keygen = Command::new("ssh-keygen");
        keygen
            .args(["-q", "-t", "ed25519", "-N", "", "-C", "vmmd test node", "-f"])
            .arg(out.join("id_ed25519"));
        run::check(&mut keygen, Deadline::seconds(60)).map(drop)
    })?;
    Ok(dir.join("id_ed25519"))
}

/// Makes the root folder of a Debian 12 that `packages`, `overlay` and `customize.sh` in `source` define. The holder of `key` may log in.
pub fn make_system(source: &Path, key: &Path, root: &Path) -> Result<()> {
    Root {
        release: Release::Bookworm,
        variant: "minbase",
        packages: &packages(&source.join("packages"))?,
        more_sources: None,
        overlay: Some(source.join("overlay")),
        customize: Some(source.join("customize.sh")),
    }
    .make(root)?;
    install_ssh_key(root, key)
}

/// Writes `key` into a root folder. The holder of the key may log in as root, and root there holds
/// the key, too.
fn install_ssh_key(root: &Path, key: &Path) -> Result<()> {
    let folder = root.join("root/.ssh");
    fs::create_dir_all(&folder)?;
    fs::set_permissions(&folder, fs::Permissions::from_mode(0o700))?;
    fs::copy(key.with_extension("pub"), folder.join("authorized_keys"))?;
    fs::copy(key, folder.join("id_ed25519"))?;
    fs::set_permissions(folder.join("id_ed25519"), fs::Permissions::from_mode(0o600))?;
    Ok(())
}

/// The one file in `root`'s /boot whose name begins with `prefix`.
pub fn boot_file(root: &Path, prefix: &str) -> Result<PathBuf> {
    let boot = root.join("boot");
    fs::read_dir(&boot)
        .with_context(|| format!("read {}", boot.display()))?
        .filter_map(|entry| entry.ok().map(|entry| entry.path()))
        .find(|path| {
            path.file_name()
                .is_some_and(|name| name.to_string_lossy().starts_with(prefix))
        })
        .with_context(|| format!("no {prefix}* in {}", boot.display()))
}
