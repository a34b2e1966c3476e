//! Where a VM's files are. Everything else about them is elsewhere.

pub mod disk;
pub mod sidecar;

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use sha2::{Digest as _, Sha256};
use uuid::Uuid;
use vmmd_host::dirs::private_dir;

use crate::config::Config;

/// Files of a VM while its `vmm` lives: `<run_dir>/vms/<uid>/`.
#[derive(Clone, Debug)]
pub struct RuntimeDir(PathBuf);

/// Files of a VM until its deletion: `<log_dir>/vms/<uid>/`.
#[derive(Clone, Debug)]
pub struct LogDir(PathBuf);

/// Non-volatile memory of a VM's devices, from its first start to its deletion: `<state_dir>/vms/<uid>/`.
#[derive(Clone, Debug)]
pub struct NonVolatileDir(PathBuf);

impl NonVolatileDir {
    /// Directory of the VM `uid`, whether or not it exists.
    pub fn of(config: &Config, uid: Uuid) -> Self {
        Self::below(&config.state_dir, uid)
    }

    /// The same below another state directory.
    pub fn below(state_dir: &Path, uid: Uuid) -> Self {
        Self(state_dir.join("vms").join(uid.to_string()))
    }

    /// The content of the flash memory: the variables of the firmware.
    pub fn variables(&self) -> PathBuf {
        self.0.join("nvram.fd")
    }

    /// Directory of swtpm's state.
    pub fn tpm(&self) -> PathBuf {
        self.0.join("tpm")
    }

    /// Makes it, for root only.
    pub fn create(&self) -> io::Result<()> {
        private_dir(&self.0)
    }

    /// Makes the directory of swtpm's state in it.
    pub fn create_tpm(&self) -> io::Result<()> {
        self.create()?;
        private_dir(&self.tpm())
    }

    /// Removes the variables alone.
    pub fn remove_variables(&self) -> io::Result<()> {
        match fs::remove_file(self.variables()) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    /// Removes it with all that is in it.
    pub fn remove(&self) -> io::Result<()> {
        remove_dir(&self.0)
    }
}

impl RuntimeDir {
    /// Directory of the VM `uid`, whether or not it exists.
    pub fn of(config: &Config, uid: Uuid) -> Self {
        Self(config.run_dir.join("vms").join(uid.to_string()))
    }

    /// The private protocol's socket.
    pub fn control(&self) -> PathBuf {
        self.0.join("control.sock")
    }

    /// The serial console's socket.
    pub fn console(&self) -> PathBuf {
        self.0.join("console.sock")
    }

    /// The virtio-console's socket.
    pub fn hvc(&self) -> PathBuf {
        self.0.join("hvc.sock")
    }

    /// Socket for the client of the guest's agent.
    pub fn agent(&self) -> PathBuf {
        self.0.join("agent.sock")
    }

    /// Socket for the client of the channel of that name. Names are too long for the path of a socket.
    pub fn channel(&self, name: &str) -> PathBuf {
        let digest = Sha256::digest(name);
        let short = digest.iter().take(8).map(|byte| format!("{byte:02x}"));
        self.0.join(format!("channel-{}.sock", short.collect::<String>()))
    }

    /// Socket for VNC clients, or with `view_only` the one for viewers without input.
    pub fn vnc(&self, view_only: bool) -> PathBuf {
        self.0.join(if view_only { "vnc-view.sock" } else { "vnc.sock" })
    }

    /// Which process serves the share of that name.
    pub fn share(&self, name: &str) -> PathBuf {
        self.0.join(format!("share.{name}"))
    }

    /// All of these that are there.
    pub fn noted_shares(&self) -> Vec<PathBuf> {
        let entries = std::fs::read_dir(&self.0).into_iter().flatten().flatten();
        let noted = |entry: &std::fs::DirEntry| entry.file_name().as_encoded_bytes().starts_with(b"share.");
        entries.filter(noted).map(|entry| entry.path()).collect()
    }

    /// The same of the `index`th share, as daemons wrote it when a run kept the shares that it had begun with.
    pub fn numbered_share(&self, index: usize) -> PathBuf {
        self.0.join(format!("share-{index}"))
    }

    /// A socket over which a process is reached, until it is. Names of shares are too long for the path of a socket.
    pub fn share_socket(&self, number: u64) -> PathBuf {
        self.0.join(format!("share-{number}.sock"))
    }

    /// Locked for as long as the `vmm` lives.
    pub fn lock(&self) -> PathBuf {
        self.0.join("lock")
    }

    /// The exit record.
    pub fn exit(&self) -> PathBuf {
        self.0.join("exit")
    }

    /// Makes it new and empty, for root only.
    pub fn create(&self) -> io::Result<()> {
        self.remove()?;
        private_dir(&self.0)
    }

    /// Removes it with all that is in it.
    pub fn remove(&self) -> io::Result<()> {
        remove_dir(&self.0)
    }
}

impl LogDir {
    /// Directory of the VM `uid`, whether or not it exists.
    pub fn of(config: &Config, uid: Uuid) -> Self {
        Self(config.log_dir.join("vms").join(uid.to_string()))
    }

    /// The directory.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Output of the guest's serial port.
    pub fn serial(&self) -> PathBuf {
        self.0.join("serial.log")
    }

    /// The older half of it.
    pub fn serial_old(&self) -> PathBuf {
        self.0.join("serial.log.1")
    }

    /// The newer half of the log of the run before.
    pub fn serial_previous(&self) -> PathBuf {
        self.0.join("serial.previous.log")
    }

    /// Stdout and stderr of the `vmm` in the last run.
    pub fn vmm(&self) -> PathBuf {
        self.0.join("vmm.log")
    }

    /// The same of the run before.
    pub fn vmm_previous(&self) -> PathBuf {
        self.0.join("vmm.previous.log")
    }

    /// Makes it, for root only.
    pub fn create(&self) -> io::Result<()> {
        private_dir(&self.0)
    }

    /// Removes it with all that is in it.
    pub fn remove(&self) -> io::Result<()> {
        remove_dir(&self.0)
    }
}

/// VMs that have a directory below `dir`'s `vms`.
pub fn list(dir: &Path) -> io::Result<Vec<Uuid>> {
    let entries = match fs::read_dir(dir.join("vms")) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let mut found = Vec::new();
    for entry in entries {
        let name = entry?.file_name();
        found.extend(name.to_str().and_then(|name| Uuid::try_parse(name).ok()));
    }
    Ok(found)
}

fn remove_dir(dir: &Path) -> io::Result<()> {
    match fs::remove_dir_all(dir) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}
