//! Files that a VM was last started with. A start by the run policy refuses a replaced file: no
//! operator has reviewed the new file, and write access to a folder of images must not decide about
//! the boot of a VM. A start by request accepts the present file. Blocking.

use std::{collections::BTreeMap, io, os::fd::AsFd, path::Path};

use rustix::fs::{AtFlags, FileType, StatxFlags, fstat, fstatfs, statx};
use vmmd_host::{failure::Failure, text};
use vmmd_spec::{
    disk::{Disk, Format, Source},
    vm::VmSpec,
};
use vmmd_store::FileRecord;

use super::{OpenDisk, signature};

/// Files by path. An empty record stands for any file: the file has no stable identity, or a
/// request has accepted it.
pub type Known = BTreeMap<String, FileRecord>;

/// From statfs(2). The server of such a file system may renumber its files at each mount.
const FUSE_MAGIC: rustix::fs::FsWord = 0x6573_5546;

/// Identifies the open file of a path, and refuses it as FILE_REPLACED when another one is `known` there. `field` is the path's place in
/// the spec.
pub(super) fn check(
    known: &Known,
    field: &str,
    path: &Path,
    file: impl AsFd,
) -> Result<(String, FileRecord), Failure> {
    let refuse = |reason, problem: &str| {
        Failure::precondition(reason, format!("{field}: \"{}\" {problem}", path.display()))
    };
    let found = identify(file).map_err(|error| refuse("FILE_UNUSABLE", &text::words(&error)))?;
    let key = key(path);
    let other = |known: &&FileRecord| **known != found && **known != FileRecord::default();
    if known.get(&key).filter(other).is_some() {
        let problem = "is not the file that the VM was last started with: if the new one is meant, start the VM by request";
        return Err(refuse("FILE_REPLACED", problem));
    }
    Ok((key, found))
}

/// The same of a disk; nothing when it is one of the DiskService, or on a volume of a pod: each run of a pod is another VM, whose
/// guest may have written to the disk before. Raw content that is new to the VM and has another format's signature
/// is refused: of a file that the VM was started with before, the guest may have made it such.
pub(super) fn check_disk(
    known: &Known,
    field: &str,
    disk: &Disk,
    opened: &OpenDisk,
) -> Result<Option<(String, FileRecord)>, Failure> {
    let Source::Path { path, format, .. } = &disk.source else {
        return Ok(None);
    };
    if *format == Format::Raw && !disk.any_content && !known.contains_key(&key(path)) {
        let label = format!("{field}.path: disk \"{}\": \"{}\"", disk.name, path.display());
        signature::refuse(&label, &opened.fd)?;
    }
    check(known, &format!("{field}.path"), path, &opened.fd).map(Some)
}

/// The same paths, with any file.
pub fn any_of(known: &Known) -> Known {
    let any = |path: &String| (path.clone(), FileRecord::default());
    known.keys().map(any).collect()
}

/// The paths of a spec's disks, with any file.
pub fn any_of_disks(spec: &VmSpec) -> Known {
    let paths = spec.disks.iter().filter_map(|disk| match &disk.source {
        Source::Path { path, .. } => Some((key(path), FileRecord::default())),
        Source::Disk { .. } | Source::Pod { .. } | Source::Seed | Source::Empty => None,
    });
    paths.collect()
}

/// The key of a path in [`Known`]. Paths of specs are UTF-8.
pub fn key(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

/// Identity of a file that is stable over reboots and differs from that of a replacement at the
/// same path.
pub fn identify(file: impl AsFd) -> io::Result<FileRecord> {
    let stat = fstat(&file)?;
    if FileType::from_raw_mode(stat.st_mode) == FileType::BlockDevice {
        // Each boot recreates its node, and the numbers may change.
        return Ok(FileRecord {
            block_device: true,
            ..FileRecord::default()
        });
    }
    if fstatfs(&file)?.f_type == FUSE_MAGIC {
        return Ok(FileRecord::default());
    }
    let found = statx(&file, "", AtFlags::EMPTY_PATH, StatxFlags::BTIME)?;
    let born = (found.stx_mask & StatxFlags::BTIME.bits() != 0).then_some(found.stx_btime);
    Ok(FileRecord {
        inode: stat.st_ino,
        born_s: born.map_or(0, |time| time.tv_sec),
        born_ns: born.map_or(0, |time| time.tv_nsec),
        block_device: false,
    })
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};

    use super::*;

    #[test]
    fn written_file_is_the_same_and_a_replaced_one_is_another() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        let look = || identify(File::open(&path).unwrap()).unwrap();
        fs::write(&path, "1").unwrap();
        let first = look();
        fs::write(&path, "22").unwrap();
        fs::rename(&path, folder.path().join("b")).unwrap();
        fs::rename(folder.path().join("b"), &path).unwrap();
        assert_eq!(look(), first);
        fs::write(folder.path().join("b"), "1").unwrap();
        fs::rename(folder.path().join("b"), &path).unwrap();
        assert_ne!(look(), first);
    }

    #[test]
    fn another_file_is_refused_and_an_unknown_path_is_learned() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        fs::write(&path, "1").unwrap();
        let file = File::open(&path).unwrap();
        let right = identify(&file).unwrap();
        let wrong = FileRecord {
            inode: right.inode + 1,
            ..right
        };
        let any = FileRecord::default();
        for (known, refused) in [
            (None, false),
            (Some(right), false),
            (Some(any), false),
            (Some(wrong), true),
        ] {
            let known = known.map(|known| (key(&path), known)).into_iter().collect();
            match check(&known, "spec.boot.linux.kernel", &path, &file) {
                Ok(found) => assert!(!refused && found == (key(&path), right)),
                Err(failure) => assert!(refused && failure.reason == "FILE_REPLACED", "{failure}"),
            }
        }
    }
}
