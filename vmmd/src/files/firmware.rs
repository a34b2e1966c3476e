//! Files of a VM's firmware: the code from the distribution's package, and the VM's own variables.

use std::{
    fs::{self, File},
    io::{self, Write},
    os::unix::fs::OpenOptionsExt,
    path::Path,
};

use vmmd_host::{failure::Failure, text};
use vmmd_spec::vm::FirmwareType;

use crate::{config::Firmware, paths::NonVolatileDir};

/// The firmware of a VM, open.
#[derive(Debug)]
pub struct FirmwareFiles {
    /// Its code, open for reading.
    pub code: File,
    /// The VM's variables, open for reading and writing; absent for a BIOS.
    pub variables: Option<File>,
}

/// Opens the firmware of a VM. The first start with UEFI makes the variables from the package's template.
///
/// # Errors
///
/// `FIRMWARE_NOT_FOUND` when the package is not installed.
pub fn open(config: &Firmware, kind: FirmwareType, dir: &NonVolatileDir) -> Result<FirmwareFiles, Failure> {
    let missing = |path: &Path, error: &io::Error| missing(kind, path, error);
    let (path, has_variables) = match kind {
        FirmwareType::Uefi => (&config.uefi_code, true),
        FirmwareType::Bios => (&config.bios, false),
    };
    let code = File::open(path).map_err(|error| missing(path, &error))?;
    let variables = match has_variables {
        true => Some(variables(config, dir, missing)?),
        false => None,
    };
    Ok(FirmwareFiles { code, variables })
}

fn variables(
    config: &Firmware,
    dir: &NonVolatileDir,
    missing: impl Fn(&Path, &io::Error) -> Failure,
) -> Result<File, Failure> {
    let path = dir.variables();
    let existing = || File::options().read(true).write(true).open(&path);
    let opened = match existing() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let template =
                fs::read(&config.uefi_variables).map_err(|error| missing(&config.uefi_variables, &error))?;
            make(dir, &path, &template).and_then(|()| existing())
        }
        opened => opened,
    };
    opened.map_err(|error| {
        Failure::internal(format!(
            "open the firmware's variables {}: {}",
            path.display(),
            text::words(&error)
        ))
    })
}

/// Makes the file complete before it has its name.
fn make(dir: &NonVolatileDir, path: &Path, content: &[u8]) -> io::Result<()> {
    dir.create()?;
    let new = path.with_extension("new");
    let mut file = File::options()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(&new)?;
    file.write_all(content)?;
    file.sync_all()?;
    fs::rename(&new, path)?;
    path.parent()
        .map_or(Ok(()), |parent| File::open(parent)?.sync_all())
}

fn missing(kind: FirmwareType, path: &Path, error: &io::Error) -> Failure {
    let (what, package) = match kind {
        FirmwareType::Uefi => ("UEFI firmware", "ovmf"),
        FirmwareType::Bios => ("BIOS", "seabios"),
    };
    let message = format!(
        "spec.boot.firmware: open the {what} {}: {}: install it (`apt install {package}`), or set `firmware` in vmmd's configuration",
        path.display(),
        text::words(error)
    );
    Failure::precondition("FIRMWARE_NOT_FOUND", message)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::os::unix::fs::FileExt;

    use uuid::Uuid;

    use super::*;

    #[test]
    fn variables_are_made_once_from_the_template_and_kept() {
        let folder = tempfile::tempdir().unwrap();
        let config = Firmware {
            uefi_code: folder.path().join("code"),
            uefi_variables: folder.path().join("template"),
            bios: folder.path().join("bios"),
        };
        let open_uefi = |dir: &NonVolatileDir| open(&config, FirmwareType::Uefi, dir);
        let dir = NonVolatileDir::below(folder.path(), Uuid::from_bytes([7; 16]));
        let refused = open_uefi(&dir).unwrap_err();
        assert_eq!(refused.reason, "FIRMWARE_NOT_FOUND");
        assert!(
            refused.message.contains("apt install ovmf"),
            "{}",
            refused.message
        );
        fs::write(&config.uefi_code, b"code").unwrap();
        assert_eq!(open_uefi(&dir).unwrap_err().reason, "FIRMWARE_NOT_FOUND");
        fs::write(&config.uefi_variables, b"template").unwrap();
        let first = open_uefi(&dir).unwrap();
        first.variables.unwrap().write_all_at(b"T", 0).unwrap();
        let again = open_uefi(&dir).unwrap();
        let mut content = [0; 8];
        again.variables.unwrap().read_exact_at(&mut content, 0).unwrap();
        assert_eq!(&content, b"Template");
        assert_eq!(fs::read(&config.uefi_variables).unwrap(), b"template");
        dir.remove().unwrap();
        assert!(!dir.variables().exists());
    }

    #[test]
    fn a_bios_has_no_variables() {
        let folder = tempfile::tempdir().unwrap();
        let config = Firmware {
            bios: folder.path().join("bios"),
            ..Firmware::default()
        };
        let dir = NonVolatileDir::below(folder.path(), Uuid::from_bytes([7; 16]));
        let refused = open(&config, FirmwareType::Bios, &dir).unwrap_err();
        assert_eq!(refused.reason, "FIRMWARE_NOT_FOUND");
        assert!(
            refused.message.contains("apt install seabios"),
            "{}",
            refused.message
        );
        fs::write(&config.bios, b"code").unwrap();
        let files = open(&config, FirmwareType::Bios, &dir).unwrap();
        assert!(files.variables.is_none() && !dir.variables().exists());
    }
}
