//! State that all VMs of the daemon share.

use std::{
    fs::File,
    path::{Path, PathBuf},
    sync::{Arc, OnceLock},
};

use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;
use vmmd_api::v1;
use vmmd_host::{
    capacity::Cpus, cgroup, failure::Failure, image_process::ImageProcesses, ledger::Ledger, pool::Pools,
    process::open_program, roots::Within,
};
use vmmd_images::{SourceFile, folder, registry::Images, rules::ImportRules};
use vmmd_network::{self, Links, Networks};
use vmmd_objects::{
    event::{Events, Object},
    operation::Operations,
    request::{self, Requests},
};
use vmmd_spec::disk::Cache;
use vmmd_store::{DiskStage, ImageRecord, ImageStage, Store};

use crate::{
    config::Config,
    files::{self, Sources, Use},
    log_rotation::LogGuard,
    paths::disk::Folder,
    peers::Peers,
    registry::{
        aborts::Aborts,
        agents::Agents,
        channels::Channels,
        clients::Clients,
        consoles::Consoles,
        disks::Disks,
        node,
        pods::Pods,
        screens::Screens,
        snapshots::Snapshots,
        state_dirs::StateDirs,
        vms::{Vms, command::ResumeMigration},
    },
    tls::Certificates,
};

/// The node as the VM actors and the services see it.
#[derive(Debug)]
pub struct Host {
    /// Configuration of the daemon.
    pub config: Config,
    /// The `vmm` program.
    pub vmm: PathBuf,
    /// Runs the program `vmm-image`.
    pub image_processes: ImageProcesses,
    /// The program `vmmd-netd`.
    pub netd: PathBuf,
    /// Durable state.
    pub store: Store,
    /// Resources that living VMs hold.
    pub ledger: Arc<Ledger>,
    /// Node state that the operator sets.
    pub node: node::State,
    /// Constant facts about the processors.
    pub cpus: Cpus,
    /// Where their cgroups go.
    pub cgroups: Option<cgroup::Parent>,
    /// Network interfaces.
    pub links: Links,
    /// All VMs.
    pub vms: Vms,
    /// For asking their `vmm` processes what no actor has to know of.
    pub clients: Clients,
    /// Networks of the NetworkService.
    pub networks: Networks,
    /// Writers of their consoles.
    pub consoles: Arc<Consoles>,
    /// Turns at their agents.
    pub agents: Agents,
    /// Clients of their channels.
    pub channels: Channels,
    /// Pods whose launchers are connected.
    pub pods: Arc<Pods>,
    /// Ways to their screens beside the API.
    pub screens: Screens,
    /// Disks of the DiskService.
    pub disks: Disks,
    /// Snapshots of VMs.
    pub snapshots: Snapshots,
    /// Certificates of the API over TCP, where it is served.
    pub certificates: OnceLock<Arc<Certificates>>,
    /// How other nodes are reached.
    pub peers: Peers,
    /// Receives migrations of an earlier daemon, and aborted migrations.
    pub attend: mpsc::UnboundedSender<ResumeMigration>,
    /// Migrations that were taken back, without their targets' confirmation.
    pub aborts: Aborts,
    /// Images of the ImageService.
    pub images: Images,
    /// Requests with an id.
    pub requests: Requests,
    /// Events of the node.
    pub events: Events,
    /// Where blocking work on files of others is done.
    pub pools: Pools,
    /// State last written to the VMs' state directories.
    pub state_dirs: StateDirs,
    /// Bounds what VMs write to their logs.
    pub logs: LogGuard,
    /// Long-running operations and their progress.
    pub operations: Operations,
    /// Boot id of the running kernel.
    pub boot_id: String,
    /// When the daemon was started, in milliseconds of Unix time.
    pub started_ms: u64,
    /// Told each time that the node's wall clock is set.
    pub clock_steps: watch::Sender<()>,
    /// Cancelled when the daemon ends.
    pub stopping: CancellationToken,
}

impl Host {
    /// Opens the `vmm` program. Blocking. Refused as VMM_NOT_FOUND on failure.
    pub fn open_vmm(&self) -> Result<File, Failure> {
        open_program(&self.vmm, "vmm")
    }

    /// Refused as NODE_CORDONED while no VM is to be created or started here.
    pub fn schedulable(&self) -> Result<(), Failure> {
        self.node.schedulable()
    }

    /// Where the files of the DiskService's disks are.
    pub fn disk_folder(&self) -> Folder {
        Folder::of(&self.config.state_dir)
    }

    /// Where the files of the ImageService's images are.
    pub fn image_folder(&self) -> folder::Folder {
        folder::Folder::of(&self.config.state_dir)
    }

    /// Returns the sources for opening the files of a spec.
    pub fn sources(&self) -> Sources<'_> {
        Sources {
            ledger: &self.ledger,
            disks: &self.disks,
            pods: &self.pods,
            folder: self.disk_folder(),
            roots: &self.config.roots,
        }
    }

    /// Returns the dependencies of the networks.
    pub fn for_networks(&self) -> vmmd_network::Ports<'_> {
        vmmd_network::Ports {
            run_dir: &self.config.run_dir,
            netd: &self.netd,
            store: &self.store,
            requests: &self.requests,
            events: &self.events,
            ledger: &self.ledger,
            cgroups: self.cgroups.as_ref(),
            publishable: &self.config.published_ports,
            routable: &self.config.routed_subnets,
            floatable: &self.config.floating_addresses,
            retention_ms: u64::from(self.config.address_retention_seconds) * 1000,
            links: &self.links,
            networks: &self.networks,
            vms: &self.vms,
            pods: self,
        }
    }
}

impl vmmd_network::Pods for Host {
    fn network(&self, vm: Uuid) -> Result<vmmd_network::PodNetwork, Failure> {
        let pod = self.vms.find(vm).and_then(|entry| {
            let state = entry.state.borrow();
            Some(state.spec.as_ref()?.pod.as_ref()?.uid.clone())
        });
        self.pods.connected(pod.as_deref().unwrap_or_default())?.network()
    }
}

impl request::Ports for Host {
    fn requests(&self) -> &Requests {
        &self.requests
    }

    fn store(&self) -> &Store {
        &self.store
    }

    fn has(&self, object: &Object) -> bool {
        match object {
            Object::Vm(_, uid) => self.vms.find(*uid).is_some(),
            Object::Disk(_, uid) => {
                let disk = self.disks.registry.find(uid.as_bytes());
                disk.is_some_and(|seen| seen.record.stage() != DiskStage::Deleting)
            }
            Object::Image(_, uid) => {
                let image = self.images.registry.find(uid.as_bytes());
                image.is_some_and(|seen| seen.record.stage() != ImageStage::Deleting)
            }
            Object::Network(_, uid) => self.networks.registry.find(uid.as_bytes()).is_some(),
            Object::Snapshot(_, uid) => self.snapshots.registry.find(uid.as_bytes()).is_some(),
            Object::Node => true,
        }
    }

    fn vm(&self, uid: Uuid) -> Option<Arc<v1::Vm>> {
        let entry = self.vms.find(uid)?;
        Some(Arc::clone(&entry.state.borrow()))
    }
}

impl vmmd_images::Ports for Host {
    fn images(&self) -> &Images {
        &self.images
    }

    fn operations(&self) -> &Operations {
        &self.operations
    }

    fn events(&self) -> &Events {
        &self.events
    }

    fn pools(&self) -> &Pools {
        &self.pools
    }

    fn image_processes(&self) -> &ImageProcesses {
        &self.image_processes
    }

    fn rules(&self) -> &ImportRules {
        &self.config.images
    }

    fn run_dir(&self) -> &Path {
        &self.config.run_dir
    }

    fn folder(&self) -> folder::Folder {
        self.image_folder()
    }

    fn stopping(&self) -> &CancellationToken {
        &self.stopping
    }

    fn users(&self, image: &ImageRecord) -> (Vec<String>, Vec<String>) {
        self.disks.users_of_image(image)
    }

    fn snapshot_with(&self, image: &[u8]) -> Option<String> {
        self.snapshots.needs_image(image)
    }

    fn open_source(&self, label: &str, path: &Path) -> Result<SourceFile, Failure> {
        let within = Within::Roots(&self.config.roots.disks);
        let opened = files::open_image_file(label, path, within, Cache::Writeback, Use::Read)?;
        Ok(SourceFile {
            file: opened.fd.into(),
            size: opened.size,
            block_device: opened.block_device,
        })
    }
}
