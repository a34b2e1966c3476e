//! Pods whose launchers are connected, in memory: their descriptors, files and names. A launcher connects again after a restart
//! of the daemon, so nothing of this is stored.
//!
//! Invariant: a pod has one connection. A later connection of the same container replaces an earlier one.

use std::{
    collections::BTreeMap,
    fmt,
    os::fd::OwnedFd,
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio_util::sync::CancellationToken;
use vmmd_api::v1;
use vmmd_host::{
    failure::{Failure, Kind},
    process::Process,
    text,
};
use vmmd_network::{PodNetwork, Resolver};
use vmmd_spec::pod::PodUid;

/// Most bytes of the files of all pods.
const MAX_FILES_BYTES: usize = 128 << 20;

/// Reason of a refused start without a launcher.
pub const NOT_CONNECTED: &str = "POD_NOT_CONNECTED";
/// Reason of a refusal of a pod that has another VM.
pub const HAS_VM: &str = "POD_HAS_VM";
/// Reason of a refused start without the volume.
pub const NO_VOLUME: &str = "POD_VOLUME_NOT_FOUND";

/// The connected pods.
#[derive(Debug)]
pub struct Pods {
    pods: Mutex<Table>,
    news: watch::Sender<()>,
    /// A permit for each byte of a file.
    files: Arc<Semaphore>,
}

#[derive(Debug, Default)]
struct Table {
    /// By uid.
    pods: BTreeMap<String, Arc<Pod>>,
    /// Number of the last connection.
    last: u64,
}

/// A connected pod.
#[derive(Debug)]
pub struct Pod {
    /// Number of the connection; [`Pods::insert`] gives it.
    pub number: u64,
    /// Its uid, verified by the cgroup of the launcher.
    pub uid: PodUid,
    /// As the launcher gives them: the pod, the VirtualMachine and the number of its run.
    pub names: Names,
    /// Its network namespace; `None` when that is the node's.
    pub network: Option<OwnedFd>,
    /// Content of its resolv.conf.
    pub resolver: Resolver,
    /// Its volumes, by name.
    pub volumes: BTreeMap<String, Volume>,
    /// Files of Secrets and ConfigMaps, by path.
    pub files: Files,
    /// Read end of a pipe whose write end the launcher has.
    pub lifeline: OwnedFd,
    /// Directory of the launcher's cgroup.
    pub cgroup: PathBuf,
    /// The launcher.
    pub launcher: Process,
    /// When it connected, in milliseconds of Unix time.
    pub connected_ms: u64,
    /// Last report about it.
    pub report: watch::Sender<Option<Report>>,
    /// Cancelled when another connection has replaced this one.
    pub replaced: CancellationToken,
}

/// Names that a launcher gives. Nothing verifies them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Names {
    /// Namespace of the pod.
    pub namespace: String,
    /// Name of the pod.
    pub name: String,
    /// Name of the VirtualMachine.
    pub vm: String,
    /// Number of its run.
    pub run: i64,
}

/// A volume of a pod.
#[derive(Debug)]
pub struct Volume {
    /// Opened with O_PATH.
    pub fd: OwnedFd,
    /// A block device, else a directory.
    pub block_device: bool,
    /// It is mounted read-only.
    pub read_only: bool,
}

/// Files of a pod, within the bound of all pods.
#[derive(Default)]
pub struct Files {
    content: BTreeMap<String, Vec<u8>>,
    room: Vec<OwnedSemaphorePermit>,
}

impl Files {
    /// Appends to a file. An error says that the pods have too many files.
    pub fn append(&mut self, pods: &Pods, path: &str, content: &[u8]) -> Result<(), String> {
        let bytes = u32::try_from(content.len()).unwrap_or(u32::MAX);
        let room = Arc::clone(&pods.files).try_acquire_many_owned(bytes);
        let room = room.map_err(|_| {
            format!("the files of all pods of this node have more than {MAX_FILES_BYTES} bytes")
        })?;
        self.room.push(room);
        let file = self.content.entry(path.to_owned()).or_default();
        file.extend_from_slice(content);
        Ok(())
    }

    /// The files by path.
    pub fn content(&self) -> &BTreeMap<String, Vec<u8>> {
        &self.content
    }
}

/// Secrets are not shown.
impl fmt::Debug for Files {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.content.keys()).finish()
    }
}

/// A report of the agent about a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// The pod gets no VM, else its VM waits.
    pub refused: bool,
    /// One CamelCase word.
    pub reason: String,
    /// For people.
    pub message: String,
}

/// A pod that stays in the table until this is dropped.
#[derive(Debug)]
pub struct Connected {
    pods: Arc<Pods>,
    /// The pod.
    pub pod: Arc<Pod>,
}

impl Default for Pods {
    fn default() -> Self {
        Self {
            pods: Mutex::default(),
            news: watch::channel(()).0,
            files: Arc::new(Semaphore::new(MAX_FILES_BYTES)),
        }
    }
}

impl Pods {
    /// Adds a pod. The error says why another container has it.
    pub fn insert(self: &Arc<Self>, mut pod: Pod) -> Result<Connected, String> {
        let mut table = self.lock();
        let before = table.pods.get(pod.uid.as_str());
        if let Some(before) = before {
            if before.cgroup != pod.cgroup && !before.launcher.has_ended() {
                return Err("another container of this pod is its launcher".to_owned());
            }
            before.replaced.cancel();
        }
        table.last += 1;
        pod.number = table.last;
        let pod = Arc::new(pod);
        let before = table.pods.insert(pod.uid.as_str().to_owned(), Arc::clone(&pod));
        drop(table);
        drop(before);
        self.news.send_replace(());
        Ok(Connected {
            pods: Arc::clone(self),
            pod,
        })
    }

    /// The pod with this uid, if it is connected.
    pub fn get(&self, uid: &str) -> Option<Arc<Pod>> {
        self.lock().pods.get(uid).cloned()
    }

    /// The same. Refused as POD_NOT_CONNECTED.
    pub fn connected(&self, uid: &str) -> Result<Arc<Pod>, Failure> {
        self.get(uid).ok_or_else(|| {
            let message = format!(
                "spec.pod: the launcher of pod {uid} is not connected to vmmd: the VM starts when the pod runs on this node"
            );
            Failure::new(Kind::Unavailable, NOT_CONNECTED, message)
        })
    }

    /// All connected pods, by uid.
    pub fn list(&self) -> Vec<Arc<Pod>> {
        self.lock().pods.values().cloned().collect()
    }

    /// Wakes up when pods have connected or disconnected.
    pub fn news(&self) -> watch::Receiver<()> {
        self.news.subscribe()
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        self.pods.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Pod {
    /// The volume with this name. Refused as POD_VOLUME_NOT_FOUND.
    pub fn volume(&self, name: &str) -> Result<&Volume, Failure> {
        self.volumes.get(name).ok_or_else(|| {
            let message = format!("the VM's pod has no volume \"{name}\": add it to the pod");
            Failure::precondition(NO_VOLUME, message)
        })
    }

    /// Its network, for a NIC. Refused as POD_HAS_NODE_NETWORK.
    pub fn network(&self) -> Result<PodNetwork, Failure> {
        let Some(namespace) = &self.network else {
            let message = "the VM's pod has the network of the node: make the pod without hostNetwork";
            return Err(Failure::precondition("POD_HAS_NODE_NETWORK", message));
        };
        let copied = namespace.try_clone();
        Ok(PodNetwork {
            namespace: copied
                .map_err(|error| Failure::internal(format!("copy a network namespace: {error}")))?,
            resolver: self.resolver.clone(),
        })
    }

    /// The pod as clients see it, without its files.
    pub fn describe(&self) -> v1::Pod {
        let volumes = self.volumes.iter().map(|(name, volume)| v1::PodVolume {
            name: name.clone(),
            kind: match volume.block_device {
                false => v1::PodVolumeKind::Directory,
                true => v1::PodVolumeKind::BlockDevice,
            }
            .into(),
            read_only: volume.read_only,
        });
        v1::Pod {
            uid: self.uid.as_str().to_owned(),
            namespace: self.names.namespace.clone(),
            name: self.names.name.clone(),
            vm: self.names.vm.clone(),
            run: self.names.run,
            volumes: volumes.collect(),
            files: Vec::new(),
            connect_time: text::timestamp(self.connected_ms),
        }
    }
}

impl Drop for Connected {
    fn drop(&mut self) {
        let mut table = self.pods.lock();
        let uid = self.pod.uid.as_str();
        let is_ours = table
            .pods
            .get(uid)
            .is_some_and(|pod| pod.number == self.pod.number);
        let removed = is_ours.then(|| table.pods.remove(uid));
        drop(table);
        if removed.is_some() {
            self.pods.news.send_replace(());
        }
    }
}
