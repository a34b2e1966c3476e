//! Files of a VM's firmware: the code from the distribution's package, and the VM's own variables.

use std::{
    fs::{self, File},
    io::{self, Write},
    os::unix::fs::OpenOptionsExt,
    path::Path,
};

use vmmd_host::{failure::Failure, text};

use crate::{config::Firmware, paths::VariablesDir};

/// The firmware of a VM, open.
#[derive(Debug)]
pub struct FirmwareFiles {
    /// Its code, open for reading.
    pub code: File,
    /// The VM's variables, open for reading and writing.
    pub variables: File,
}

/// Opens the firmware of a VM. The first start makes the variables from the package's template.
///
/// # Errors
///
/// `FIRMWARE_NOT_FOUND` when the package is not installed.
pub fn open(config: &Firmware, dir: &VariablesDir) -> Result<FirmwareFiles, Failure> {
    let code = File::open(&config.uefi_code).map_err(|error| missing(&config.uefi_code, &error))?;
    let path = dir.variables();
    let existing = || File::options().read(true).write(true).open(&path);
    let variables = match existing() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let template =
                fs::read(&config.uefi_variables).map_err(|error| missing(&config.uefi_variables, &error))?;
            make(dir, &path, &template).and_then(|()| existing())
        }
        opened => opened,
    };
    let variables = variables.map_err(|error| {
        Failure::internal(format!(
            "open the firmware's variables {}: {}",
            path.display(),
            text::words(&error)
        ))
    })?;
    Ok(FirmwareFiles { code, variables })
}

/// Makes the file complete before it has its name.
fn make(dir: &VariablesDir, path: &Path, content: &[u8]) -> io::Result<()> {
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

fn missing(path: &Path, error: &io::Error) -> Failure {
    let message = format!(
        "spec.boot.firmware: open the UEFI firmware {}: {}: install it (`apt install ovmf`), or set `firmware` in vmmd's configuration",
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
        };
        let dir = VariablesDir::below(folder.path(), Uuid::from_bytes([7; 16]));
        let refused = open(&config, &dir).unwrap_err();
        assert_eq!(refused.reason, "FIRMWARE_NOT_FOUND");
        assert!(
            refused.message.contains("apt install ovmf"),
            "{}",
            refused.message
        );
        fs::write(&config.uefi_code, b"code").unwrap();
        assert_eq!(open(&config, &dir).unwrap_err().reason, "FIRMWARE_NOT_FOUND");
        fs::write(&config.uefi_variables, b"template").unwrap();
        let first = open(&config, &dir).unwrap();
        first.variables.write_all_at(b"T", 0).unwrap();
        let again = open(&config, &dir).unwrap();
        let mut content = [0; 8];
        again.variables.read_exact_at(&mut content, 0).unwrap();
        assert_eq!(&content, b"Template");
        assert_eq!(fs::read(&config.uefi_variables).unwrap(), b"template");
        dir.remove().unwrap();
        assert!(!dir.variables().exists());
    }
}
