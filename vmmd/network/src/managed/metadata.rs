//! Documents of the metadata service, one file for each VM and network, while the VM runs. They are
//! below the daemon's runtime folder, in memory, in a folder that only the helper of the network can
//! enter: they have the secrets of the guest's cloud-init.

use std::{
    fs::{self, Permissions},
    io,
    os::unix::fs::{PermissionsExt as _, chown},
    path::Path,
};

use uuid::Uuid;
use vmmd_host::{failure::Failure, fault};

use super::{
    describe::failed,
    folder,
    helper::{self, replace},
};
use crate::{
    Ports,
    netd::metadata::{FOLDER, Instance},
};

/// Name of the file of a VM.
pub fn name(vm: &[u8]) -> String {
    Uuid::from_slice(vm).unwrap_or_default().to_string()
}

/// Makes the folder of the documents in that of a helper, for the helper's user.
pub fn prepare(folder: &Path, user: u32) -> io::Result<()> {
    let folder = folder.join(FOLDER);
    fault::step("make the folder of metadata");
    match fs::create_dir(&folder) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    fs::set_permissions(&folder, Permissions::from_mode(0o710))?;
    chown(&folder, Some(0), Some(user))
}

/// Gives guests of a VM in a network these documents, until [`withdraw`].
///
/// # Errors
///
/// There is no such network, or the file cannot be written.
pub fn publish(host: Ports<'_>, network: &str, vm: Uuid, instance: &Instance) -> Result<(), Failure> {
    let record = host.networks.find(network)?;
    let path = folder(host, &record).join(FOLDER).join(name(vm.as_bytes()));
    let text = serde_json::to_vec(instance).map_err(|error| failed(&error.into()))?;
    // The folder keeps others out.
    replace(&path, &text, 0o644).map_err(|error| failed(&error))
}

/// Removes the documents of a VM in all networks.
///
/// # Errors
///
/// A file cannot be removed.
pub fn withdraw(host: Ports<'_>, vm: Uuid) -> io::Result<()> {
    let networks = match fs::read_dir(host.run_dir.join(helper::NETWORKS)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        networks => networks?,
    };
    for network in networks {
        let path = network?.path().join(FOLDER).join(name(vm.as_bytes()));
        match fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    Ok(())
}
