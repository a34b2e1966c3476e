//! The process of a VM's TPM: swtpm. It ends when the `vmm` closes its sockets. vmmd starts no other one
//! in the same run, because its PCRs would be empty. The `vmm` notices the end and reports it.

use std::{
    ffi::CString,
    fs::File,
    io,
    os::{
        fd::{AsFd, OwnedFd},
        unix::net::UnixStream,
    },
    path::Path,
};

use rustix::fs::{AtFlags, Dir, FileType, Gid, Mode, OFlags, Uid, chownat, fchown, fstat, open, openat};
use vmmd_host::{
    failure::Failure,
    process::Process,
    sys::clone::{self, Child, FIRST_FD, Network, Program},
    text,
};

use super::{failures::failed, fork::Spawn};
use crate::paths::NonVolatileDir;

/// Most files in the directory of the state; swtpm has four.
const MAX_FILES: usize = 64;

/// A swtpm that is not switched on.
pub(super) struct Swtpm {
    child: Child,
    /// The other ends of its data channel and its control channel.
    pub(super) sockets: (OwnedFd, OwnedFd),
}

impl Swtpm {
    /// Has the process reaped at its end. It stays when this was called.
    pub(super) fn keep(self) -> io::Result<(OwnedFd, OwnedFd)> {
        let process = self.child.watched(Process::new)?;
        tokio::spawn(async move { process.ended().await });
        Ok(self.sockets)
    }
}

/// Opens the program. Refused as TPM_PROGRAM_MISSING.
pub(super) fn program(path: &Path) -> Result<File, Failure> {
    File::open(path).map_err(|error| {
        let message = format!(
            "spec.tpm: the program {} cannot be opened ({}): install it (`apt install swtpm`), or set `swtpm` in vmmd's configuration",
            path.display(),
            text::words(&error)
        );
        Failure::precondition("TPM_PROGRAM_MISSING", message)
    })
}

/// Starts swtpm for a `vmm`, as its user and in its control group. The first start makes the directory of
/// the state. Blocking.
pub(super) fn serve(executable: &File, vmm: &Spawn, state: &NonVolatileDir) -> Result<Swtpm, Failure> {
    let directory = directory(state, vmm.uid).map_err(|error| {
        failed(
            &format!("open the state of the TPM {}", state.tpm().display()),
            &error,
        )
    })?;
    start(executable, vmm, &directory).map_err(|error| failed("start swtpm", &error))
}

fn start(executable: &File, vmm: &Spawn, directory: &OwnedFd) -> io::Result<Swtpm> {
    let (data, its_data) = UnixStream::pair()?;
    let (control, its_control) = UnixStream::pair()?;
    let arguments = [
        "swtpm".to_owned(),
        "socket".to_owned(),
        "--tpm2".to_owned(),
        format!("--fd={FIRST_FD}"),
        format!("--ctrl=type=unixio,clientfd={}", FIRST_FD + 1),
        // Its user may not look into the directories above.
        format!("--tpmstate=dir=/proc/self/fd/{},mode=0600", FIRST_FD + 2),
    ];
    let arguments: Vec<_> = arguments.into_iter().flat_map(CString::new).collect();
    let program = Program {
        executable: executable.as_fd(),
        arguments: &arguments,
        fds: &[its_data.as_fd(), its_control.as_fd(), directory.as_fd()],
        output: None,
        log: vmm.log.as_fd(),
        uid: vmm.uid,
        network: Network::Empty,
        cgroup: vmm.group.as_ref().map(AsFd::as_fd),
        namespaces: None,
    };
    Ok(Swtpm {
        child: clone::spawn(&program)?,
        sockets: (data.into(), control.into()),
    })
}

/// The directory of swtpm's state, with its files given to the user of this run. Each run has another user,
/// and the swtpm of an earlier run is not trusted.
fn directory(state: &NonVolatileDir, user: u32) -> io::Result<OwnedFd> {
    state.create_tpm()?;
    let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let directory = open(state.tpm(), flags | OFlags::RDONLY, Mode::empty())?;
    let (uid, gid) = (Uid::from_raw(user), Gid::from_raw(user));
    for (count, entry) in Dir::read_from(&directory)?.enumerate() {
        let entry = entry?;
        if matches!(entry.file_name().to_bytes(), b"." | b"..") {
            continue;
        }
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = openat(&directory, entry.file_name(), flags, Mode::empty())?;
        let stat = fstat(&file)?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile
            || stat.st_nlink != 1
            || count > MAX_FILES
        {
            let message = format!("{:?} is no file of swtpm: remove it", entry.file_name());
            return Err(io::Error::new(io::ErrorKind::InvalidData, message));
        }
        chownat(&file, "", Some(uid), Some(gid), AtFlags::EMPTY_PATH)?;
    }
    fchown(&directory, Some(uid), Some(gid))?;
    Ok(directory)
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        os::unix::fs::{MetadataExt, symlink},
    };

    use uuid::Uuid;

    use super::*;

    #[test]
    fn state_belongs_to_the_user_of_the_run_and_has_plain_files() {
        let folder = tempfile::tempdir().unwrap();
        let state = NonVolatileDir::below(folder.path(), Uuid::from_bytes([7; 16]));
        directory(&state, 4711).unwrap();
        let file = state.tpm().join("tpm2-00.permall");
        fs::write(&file, "state").unwrap();
        directory(&state, 4712).unwrap();
        for path in [state.tpm(), file.clone()] {
            let owner = fs::metadata(path).unwrap();
            assert_eq!((owner.uid(), owner.gid()), (4712, 4712));
        }
        assert_eq!(fs::metadata(state.tpm()).unwrap().mode() & 0o777, 0o700);
        let other = folder.path().join("other");
        fs::write(&other, "x").unwrap();
        for make in [
            |from: &Path, to: &Path| symlink(from, to),
            |from: &Path, to: &Path| fs::hard_link(from, to),
            |_: &Path, to: &Path| fs::create_dir(to),
        ] {
            let entry = state.tpm().join("entry");
            make(&other, &entry).unwrap();
            let refused = directory(&state, 4713).unwrap_err();
            assert!(refused.to_string().contains("\"entry\""), "{refused}");
            assert_ne!(fs::metadata(&other).unwrap().uid(), 4713);
            fs::remove_file(&entry)
                .or_else(|_| fs::remove_dir(&entry))
                .unwrap();
        }
    }

    #[test]
    fn missing_program_says_what_to_install() {
        let refused = program(Path::new("/none/swtpm")).unwrap_err();
        assert_eq!(refused.reason, "TPM_PROGRAM_MISSING");
        assert!(
            refused.message.contains("apt install swtpm"),
            "{}",
            refused.message
        );
    }
}
