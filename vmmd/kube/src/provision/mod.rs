//! Parts of a run's VM that an agent makes on its node, or reads from the cluster (see
//! [`crate::sources`]): disks, images, and values of Secrets and ConfigMaps; and the creation of
//! the VM.
//!
//! The values are in the request to vmmd alone. Statuses, events and logs name objects and keys,
//! never values.

mod create;
pub mod disks;
pub mod images;
pub mod seed;

use std::{
    collections::{BTreeMap, HashMap},
    sync::{Arc, Mutex},
};

use tonic::Status;
use vmmd_api::v1::{self, RunPolicy, disk_spec};

pub use self::create::{Made, has_process, is_unstarted};
use self::images::Imports;
use crate::{
    daemon::Daemon,
    names,
    sources::{self, Sources},
};

/// Error of a step. The step is repeated.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Error of the API server.
    #[error("API server: {0}")]
    Api(#[from] kube::Error),
    /// Error of vmmd.
    #[error("vmmd: {}: {}", .0.code(), .0.message())]
    Vmmd(Box<Status>),
}

impl From<Status> for Error {
    fn from(status: Status) -> Self {
        Self::Vmmd(Box::new(status))
    }
}

/// Reason why a VM cannot be created yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lack {
    /// One CamelCase word.
    pub reason: &'static str,
    /// The same for people.
    pub message: String,
}

impl Lack {
    /// With these words.
    pub fn new(reason: &'static str, message: impl Into<String>) -> Self {
        Self {
            reason,
            message: message.into(),
        }
    }
}

/// Reason of a lack while an image is imported.
pub const IMPORTING_IMAGE: &str = "ImportingImage";
/// Reason of a lack while vmmd makes a disk.
pub const MAKING_DISK: &str = "MakingDisk";

/// Result of the preparation of a VM.
pub enum Prepared {
    /// The complete VM.
    Ready(Box<v1::Vm>),
    /// Something does not exist yet. At least one.
    Lacks(Vec<Lack>),
    /// vmmd has refused to make a disk for a volume.
    Refused {
        /// Name of the volume.
        volume: String,
        /// The refusal.
        status: Box<Status>,
    },
}

/// Data of a Secret or a ConfigMap.
pub type Data = BTreeMap<String, Vec<u8>>;

/// Kind of an object with values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    Secret,
    ConfigMap,
}

/// Secrets and ConfigMaps in the namespace of a run.
pub trait Objects: Sync {
    /// The data of an object.
    ///
    /// # Errors
    ///
    /// A failure of the query. A missing object is a [`Lack`].
    fn data(&self, kind: Kind, name: &str) -> impl Future<Output = Result<Result<Data, Lack>, Error>> + Send;
}

/// The pod of a run, as objects that were made for it name the pod.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RunPod {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Its uid.
    pub uid: String,
    /// Uid of the VirtualMachine.
    pub machine: String,
    /// Number of the run, as a label has it.
    pub epoch: String,
}

impl RunPod {
    /// Labels of the VM and the disks of the run.
    pub fn labels(&self, node: &str) -> [(String, String); 4] {
        [
            (names::MACHINE_UID.to_owned(), self.machine.clone()),
            (names::EPOCH.to_owned(), self.epoch.clone()),
            (names::POD_UID.to_owned(), self.uid.clone()),
            (names::AGENT.to_owned(), node.to_owned()),
        ]
    }

    /// Namespace and name.
    pub fn path(&self) -> String {
        format!("{}/{}", self.namespace, self.name)
    }

    /// Returns a VM with the labels by which the agent of `node` recognizes the VM.
    pub fn marked(&self, mut vm: v1::Vm, node: &str) -> v1::Vm {
        let metadata = vm.metadata.get_or_insert_default();
        metadata.labels.extend(self.labels(node));
        metadata.annotations.insert(names::POD.to_owned(), self.path());
        names::MANAGER.clone_into(&mut metadata.owner);
        if let Some(spec) = &mut vm.spec
            && spec.run_policy() == RunPolicy::AlwaysOn
        {
            // vmmd stops no VM of that policy. After an end here the controller begins another run.
            spec.set_run_policy(RunPolicy::AlwaysOnUnlessStopped);
        }
        vm
    }
}

/// Makes VMs and their disks in the vmmd of this node.
#[derive(Clone)]
pub struct Provisioner {
    /// The vmmd.
    pub daemon: Daemon,
    /// Name of the Kubernetes node.
    pub node: String,
    /// Images that vmmd was asked to import.
    imports: Arc<Mutex<Imports>>,
    /// Requests to create VMs that had no answer yet, by the uids of their pods.
    unanswered: Arc<Mutex<HashMap<String, v1::CreateVmRequest>>>,
    /// Number of requests to create a VM that were refused because of another VM of its name, which is gone, by the uids of their pods.
    spent: Arc<Mutex<HashMap<String, u32>>>,
}

impl Provisioner {
    /// For a node without work in progress.
    pub fn new(daemon: Daemon, node: String) -> Self {
        Self {
            daemon,
            node,
            imports: Arc::default(),
            unanswered: Arc::default(),
            spent: Arc::default(),
        }
    }

    /// Completes a VM whose other sources are filled in: makes the disks of its volumes. No disk is
    /// made while `lacks` has an entry.
    pub async fn finish(
        &self,
        pod: &RunPod,
        mut vm: v1::Vm,
        sources: &Sources,
        objects: &impl Objects,
        mut lacks: Vec<Lack>,
    ) -> Result<Prepared, Error> {
        if !lacks.is_empty() {
            return Ok(Prepared::Lacks(lacks));
        }
        for volume in &sources.volumes {
            if volume.persistent_volume_claim.is_some() {
                continue;
            }
            match self
                .disk(pod, volume, &sources.image_pull_secrets, objects)
                .await?
            {
                Ok(name) => {
                    sources::fill(&mut vm, &volume.name, &disk_spec::Source::Disk(name));
                }
                Err(disks::NoDisk::Lacks(lack)) => lacks.push(lack),
                Err(disks::NoDisk::Refused(status)) => {
                    let volume = volume.name.clone();
                    return Ok(Prepared::Refused { volume, status });
                }
            }
        }
        if lacks.is_empty() {
            Ok(Prepared::Ready(Box::new(vm)))
        } else {
            Ok(Prepared::Lacks(lacks))
        }
    }
}
