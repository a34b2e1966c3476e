//! The process of a launcher, as the kernel knows it.

use std::{
    fs,
    path::{Component, Path, PathBuf},
};

use rustix::fs::stat;
use vmmd_host::process::Process;

use super::stream::Stream;
use crate::host::Host;

/// See the module.
#[derive(Debug)]
pub struct Peer {
    /// Uid of its pod as the path of its cgroup has it, with dashes.
    pub uid: String,
    /// Directory of its cgroup.
    pub cgroup: PathBuf,
    /// The process.
    pub process: Process,
    /// Device and inode number of its network namespace.
    pub network: (u64, u64),
}

impl Peer {
    /// The process at the other end. The error says why it is no launcher of a pod.
    pub fn of(host: &Host, stream: &Stream) -> Result<Self, String> {
        let cgroups = host.cgroups.as_ref();
        let cgroups = cgroups.ok_or("the node has no cgroup v2 hierarchy, which pods with VMs need")?;
        let found = || {
            let pid = stream.peer_pid()?;
            let process = Process::open(pid)?;
            let text = fs::read_to_string(format!("/proc/{pid}/cgroup"))?;
            let network = stat(format!("/proc/{pid}/ns/net"))?;
            // The pid is that of the process as long as the process has not ended.
            match process.has_ended() {
                false => Ok((process, text, (network.st_dev, network.st_ino))),
                true => Err(std::io::ErrorKind::NotFound.into()),
            }
        };
        let found: std::io::Result<_> = found();
        let (process, text, network) =
            found.map_err(|error| format!("the process of the launcher can't be read: {error}"))?;
        let path = own_path(&text).ok_or("the launcher is not in the node's cgroup v2 hierarchy")?;
        let uid = pod_of(path).ok_or_else(|| {
            format!(
                "the launcher's cgroup {} is not that of a pod: run the launcher in a pod of this node's kubelet",
                path.display()
            )
        })?;
        Ok(Self {
            uid,
            cgroup: cgroups.at(path),
            process,
            network,
        })
    }

    /// Whether the launcher claims its own pod.
    pub fn is(&self, uid: &str) -> bool {
        self.uid == uid.replace('_', "-")
    }
}

/// The path in the cgroup v2 hierarchy (cgroups(7): the line "0::/path").
fn own_path(text: &str) -> Option<&Path> {
    let path = text.lines().find_map(|line| line.strip_prefix("0::"))?;
    let path = Path::new(path);
    let plain = |part| matches!(part, Component::RootDir | Component::Normal(_));
    (path.is_absolute() && path.components().all(plain)).then_some(path)
}

/// Uid of the pod in a path, with dashes. The first component of a pod decides: a container that makes cgroups below its own can't
/// claim another pod.
fn pod_of(path: &Path) -> Option<String> {
    path.iter().find_map(|part| {
        let part = part.to_str()?;
        // The kubelet's driver `cgroupfs` names "podUID", and `systemd` "kubepods-CLASS-podUID.slice" with underscores.
        let uid = match part.strip_suffix(".slice") {
            Some(slice) if slice.starts_with("kubepods") => slice.split_once("-pod")?.1,
            _ => part.strip_prefix("pod")?,
        };
        (!uid.is_empty()).then(|| uid.replace('_', "-"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pod_is_found_in_the_paths_of_both_drivers() {
        let uid = "6fd1bd2c-8a4e-4c39-9a6f-2c4f9c7a1b10";
        let slice = format!("kubepods-burstable-pod{}.slice", uid.replace('-', "_"));
        for path in [
            format!("/kubepods/burstable/pod{uid}/0123abcd"),
            format!("/kubepods.slice/kubepods-burstable.slice/{slice}/cri-containerd-0123.scope"),
            format!(
                "/kubepods.slice/kubepods-pod{}.slice/crio-0123.scope",
                uid.replace('-', "_")
            ),
            format!("/vmmd-test/pod{uid}"),
            format!("/kubepods/pod{uid}/0123abcd/podother"),
        ] {
            assert_eq!(pod_of(Path::new(&path)).as_deref(), Some(uid), "{path}");
        }
        for path in [
            "/",
            "/system.slice/ssh.service",
            "/kubepods.slice",
            "/kubepods/pod",
            "/user.slice",
        ] {
            assert_eq!(pod_of(Path::new(path)), None, "{path}");
        }
    }

    #[test]
    fn path_of_the_unified_hierarchy_is_absolute_and_plain() {
        let text = "4:memory:/a\n1:name=systemd:/b\n0::/kubepods/pod1/c\n";
        assert_eq!(own_path(text), Some(Path::new("/kubepods/pod1/c")));
        for text in ["", "4:memory:/a\n", "0::/../pod1\n", "0::pod1\n"] {
            assert_eq!(own_path(text), None, "{text}");
        }
    }
}
