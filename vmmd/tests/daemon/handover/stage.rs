//! Two daemons, and a VM whose migration waits at a step while something happens.

use std::{fs, os::unix::fs::PermissionsExt, path::PathBuf, time::Duration};

use tokio::time::timeout;
use vmmd_api::v1::{self, MigrationResolution, OperationPhase, VmPhase};

use super::{
    End, Trouble,
    network::Network,
    steps::{Side, Step},
};
use crate::{
    disks::{named, raw, state},
    harness::{Daemon, status},
    migration::{kill_vmm, pair},
    verbs::within,
};

const VM: &str = "web";
/// A disk of the node that migrates with the VM, and its content.
const DISK: &str = "data";
const CONTENT: [u8; 4096] = [b'x'; 4096];
/// A file system that is full, below a daemon's folder.
const FULL: &str = "state/fault/store-full";

pub struct Stage {
    pub source: Daemon,
    pub target: Daemon,
    pub network: Network,
    /// Only one machine at a time can lock it.
    exclusive: PathBuf,
    /// File that the source's machine waits for before it sends.
    go: PathBuf,
    operation: v1::Operation,
}

impl Stage {
    pub async fn new() -> Self {
        let (source, target) = pair().await;
        let network = Network::to(&target).await;
        let folder = source.path("exclusive");
        fs::create_dir(&folder).unwrap();
        for reached in [source.folder.path(), &folder] {
            fs::set_permissions(reached, fs::Permissions::from_mode(0o755)).unwrap();
        }
        let exclusive = folder.join("lock");
        fs::write(&exclusive, "").unwrap();
        fs::set_permissions(&exclusive, fs::Permissions::from_mode(0o666)).unwrap();
        Self {
            source,
            target,
            network,
            exclusive,
            go: folder.join("go"),
            operation: v1::Operation::default(),
        }
    }

    fn daemon(&self, side: Side) -> &Daemon {
        match side {
            Side::Source => &self.source,
            Side::Target => &self.target,
        }
    }

    /// A new VM's migration comes to this step and waits there; by way of `first`, where a client cancels it.
    pub async fn comes_to(&mut self, step: &Step, first: Option<&Step>) {
        for daemon in [&self.source, &self.target] {
            for faults in ["run/fault", "state/fault"] {
                let _ = fs::remove_dir_all(daemon.path(faults));
            }
        }
        let mut options = format!("mock.exclusive={}", self.exclusive.display());
        if step.is_transfer() {
            let _ = fs::remove_file(&self.go);
            options += &format!(" mock.send={}", self.go.display());
        }
        self.starts(&options).await;
        for step in [first, Some(step)].into_iter().flatten() {
            self.daemon(step.side).fault(&step.name);
        }
        self.begins().await;
        if let Some(first) = first {
            self.reached(first).await;
            self.cancel(true).await;
            self.release(first);
        }
        self.reached(step).await;
    }

    /// Makes and starts a VM with a disk of the node.
    async fn starts(&self, options: &str) {
        let disk = self.source.make(raw(DISK, 4096), None).await.unwrap();
        fs::write(&state(&disk).path, CONTENT).unwrap();
        let mut vm = self.source.manifest(VM, options);
        vm.spec.as_mut().unwrap().disks.push(named(DISK));
        self.source.create(vm).await.unwrap();
        self.source.start_vm(VM).await.unwrap();
    }

    async fn begins(&mut self) {
        let migrating = self.source.migrate_to(VM, &self.network.address).await;
        self.operation = migrating.unwrap();
    }

    async fn reached(&self, step: &Step) {
        if step.is_transfer() {
            self.target.waits_for(VM, VmPhase::Starting).await;
            within(async || (self.target.vmm_processes().len() == 1).then_some(())).await;
            return;
        }
        self.daemon(step.side).reached(&step.name).await;
    }

    fn release(&self, step: &Step) {
        if step.is_transfer() {
            fs::write(&self.go, "").unwrap();
        } else {
            self.daemon(step.side).release(&step.name);
        }
    }

    /// A client asks for its end, which is possible, or not any more.
    async fn cancel(&self, possible: bool) {
        let request = v1::CancelOperationRequest {
            id: self.operation.id.clone(),
        };
        let mut operations = self.source.operations().await;
        if !possible {
            operations.cancel_operation(request).await.unwrap_err();
            return;
        }
        let heard = Step::new(Side::Source, "received-CancelOperation");
        self.source.fault(&heard.name);
        // It is answered when the migration has ended, which waits for this test.
        tokio::spawn(async move { operations.cancel_operation(request).await });
        self.reached(&heard).await;
        self.release(&heard);
    }

    /// Causes the trouble, then lets the migration continue. Repairs the cause when it was noticed.
    pub async fn happens(&mut self, trouble: Trouble, step: &Step, expected: &Expected) {
        match trouble {
            Trouble::Cancel => self.cancel(expected.ends.contains(&End::RunsAtSource)).await,
            Trouble::Cut => drop(self.network.up.send_replace(false)),
            Trouble::SourcesDaemon => self.source.kill(),
            Trouble::TargetsDaemon => self.target.kill(),
            Trouble::SourcesVmm => self.loses_vmm(Side::Source, step).await,
            Trouble::TargetsVmm => self.loses_vmm(Side::Target, step).await,
            Trouble::SourcesDisk => self.fills(Side::Source, true),
            Trouble::TargetsDisk => self.fills(Side::Target, true),
            Trouble::SourceGone => self.loses_node(Side::Source).await,
            Trouble::TargetGone => self.loses_node(Side::Target).await,
        }
        let mut refused = self.network.refused.subscribe();
        let offers = async |target: &Daemon| target.events("Created").await.len();
        let lost = [
            Trouble::Cancel,
            Trouble::Cut,
            Trouble::SourcesDaemon,
            Trouble::SourceGone,
        ];
        // The target takes an offer whose source is not there any more.
        let late = step.name == "received-OfferVm" && lost.contains(&trouble);
        let before = if late { offers(&self.target).await } else { 0 };
        self.release(step);
        if late {
            within(async || (offers(&self.target).await > before).then_some(())).await;
        }
        match trouble {
            Trouble::Cut | Trouble::TargetsDaemon if expected.is_noticed => {
                let noticed = timeout(Duration::from_secs(30), refused.changed()).await;
                noticed.expect("the source tries to reach the target").unwrap();
            }
            Trouble::SourcesDisk => {
                self.finds_no_room(Side::Source).await;
                if expected.stands_still {
                    within(async || {
                        let now = self.source.operation(&self.operation.id).await;
                        now.message.contains("the guest stands still").then_some(())
                    })
                    .await;
                }
            }
            Trouble::TargetsDisk => self.finds_no_room(Side::Target).await,
            _ => {}
        }
        match trouble {
            Trouble::Cut => drop(self.network.up.send_replace(true)),
            Trouble::SourcesDaemon => self.source.relaunch().await,
            Trouble::TargetsDaemon => {
                self.target.relaunch().await;
                self.network.leads_to(&self.target);
            }
            Trouble::SourcesDisk => self.fills(Side::Source, false),
            Trouble::TargetsDisk => self.fills(Side::Target, false),
            _ => {}
        }
        if lost.contains(&trouble) {
            // The target removes a migration after a while when the source does not revoke it.
            self.target.fault("hasty");
        }
    }

    /// Its `vmm` is killed, and its daemon notices that unless it is held.
    async fn loses_vmm(&self, side: Side, step: &Step) {
        let daemon = self.daemon(side);
        kill_vmm(daemon);
        no_vmm_is_left(daemon).await;
        if !step.holds_actor_of(side) {
            within(async || {
                let vm = daemon.get(VM).await;
                vm.map_or(true, |vm| status(&vm).phase() == VmPhase::Failed)
                    .then_some(())
            })
            .await;
        }
    }

    /// Daemon and `vmm` end, for good.
    async fn loses_node(&mut self, side: Side) {
        match side {
            Side::Source => self.source.kill(),
            Side::Target => self.target.kill(),
        }
        let daemon = self.daemon(side);
        for process in daemon.vmm_processes() {
            rustix::process::kill_process(process, rustix::process::Signal::KILL).unwrap();
        }
        no_vmm_is_left(daemon).await;
    }

    fn fills(&self, side: Side, full: bool) {
        let file = self.daemon(side).path(FULL);
        if full {
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, "").unwrap();
        } else {
            fs::remove_file(file).unwrap();
        }
    }

    /// Waits until a daemon has tried to write, since it was last asked.
    async fn finds_no_room(&self, side: Side) {
        let reached = self.daemon(side).path(FULL).with_extension("reached");
        within(async || fs::remove_file(&reached).ok()).await;
    }

    /// Both daemons are killed at this step and come up without room, which comes when both have tried again.
    pub async fn comes_up_without_room(&mut self, step: &Step) {
        self.source.kill();
        self.target.kill();
        self.release(step);
        for side in [Side::Source, Side::Target] {
            self.fills(side, true);
        }
        self.source.relaunch().await;
        self.target.relaunch().await;
        self.network.leads_to(&self.target);
        for side in [Side::Source, Side::Target] {
            self.finds_no_room(side).await;
            self.finds_no_room(side).await;
            self.fills(side, false);
        }
    }

    /// Waits for the end, and sees that nothing else is left.
    pub async fn ends(&self, trouble: Option<Trouble>, end: End) {
        let ended = self.source.ended(&self.operation).await;
        // Also when another daemon has ended it.
        if trouble == Some(Trouble::SourcesDaemon) {
            let moved = end == End::RunsAtTarget;
            assert_eq!(ended.phase() == OperationPhase::Completed, moved, "{ended:?}");
        }
        let (has, other, phase) = match end {
            End::RunsAtSource => (&self.source, &self.target, VmPhase::Running),
            End::RunsAtTarget => (&self.target, &self.source, VmPhase::Running),
            End::EndedAtSource => (&self.source, &self.target, VmPhase::Failed),
            End::EndedAtTarget => (&self.target, &self.source, VmPhase::Failed),
            End::Nothing | End::Waits => panic!("it has an owner"),
        };
        other.forgets(VM).await;
        let settled = within(async || {
            let vm = has.get(VM).await.ok()?;
            (status(&vm).phase() == phase && status(&vm).reason != "Migrating").then_some(vm)
        });
        let vm = settled.await;
        has_nothing(other).await;
        let runs = usize::from(phase == VmPhase::Running);
        assert_eq!(has.vmm_processes().len(), runs, "{vm:?}");
        self.ran_once();
        // It can be used like any other.
        within(async || has.delete(VM, true).await.ok()).await;
        loses_its_disk(has).await;
        has_nothing(has).await;
    }

    /// Waits until the remaining side has reached an end on its own, or an expected condition that
    /// an operator ends. A VM may show this condition for a moment.
    pub async fn settles(&self, left: Side, expected: &[End]) -> End {
        let (daemon, runs, waits) = match left {
            Side::Source => (&self.source, End::RunsAtSource, "HandedOver"),
            Side::Target => (&self.target, End::RunsAtTarget, "Migrating"),
        };
        let end = within(async || {
            let Ok(vm) = daemon.get(VM).await else {
                return Some(End::Nothing);
            };
            match (status(&vm).phase(), status(&vm).reason.as_str()) {
                (VmPhase::Running, "Running") => Some(runs),
                (VmPhase::Paused, reason) if reason == waits && expected.contains(&End::Waits) => {
                    let machines = daemon.vmm_processes().len();
                    // One that is about to be removed shows the same for a moment, and does not wait for a decision.
                    daemon.resolve(VM, MigrationResolution::Run).await.ok()?;
                    assert_eq!(machines, 1, "{vm:?}");
                    Some(End::Waits)
                }
                _ => None,
            }
        })
        .await;
        if end != End::Nothing {
            daemon.waits_for(VM, VmPhase::Running).await;
            assert_eq!(daemon.vmm_processes().len(), 1);
            within(async || daemon.delete(VM, true).await.ok()).await;
            loses_its_disk(daemon).await;
        }
        has_nothing(daemon).await;
        self.ran_once();
        end
    }

    fn ran_once(&self) {
        let twice = fs::read_to_string(&self.exclusive).unwrap();
        assert_eq!(twice, "", "both ran at once");
    }

    /// Checks that neither daemon's store contains a VM.
    pub async fn is_forgotten(&mut self) {
        for daemon in [&mut self.source, &mut self.target] {
            let before = daemon.events("Deleted").await.len();
            daemon.kill_and_restart().await;
            has_nothing(daemon).await;
            let after = daemon.events("Deleted").await.len();
            assert_eq!(after, before, "it had a record that it had not told of");
        }
    }

    /// A migration that the target refuses, as `fault` makes it: why.
    pub async fn is_refused(&mut self, fault: &str) -> String {
        self.starts(&format!("mock.exclusive={}", self.exclusive.display()))
            .await;
        self.source.fault(fault);
        self.begins().await;
        let ended = self.source.ended(&self.operation).await;
        assert_eq!(ended.phase(), OperationPhase::Failed, "{ended:?}");
        self.ends(None, End::RunsAtSource).await;
        ended.message
    }
}

/// How something comes out.
pub struct Expected {
    /// One of these.
    pub ends: Vec<End>,
    /// The source tries to reach the target again.
    pub is_noticed: bool,
    /// The source's guest stands still until there is room.
    pub stands_still: bool,
}

/// The disk is at the node of its VM, has its content, and is removable.
async fn loses_its_disk(daemon: &Daemon) {
    let disk = daemon.disk(DISK).await.unwrap();
    assert_eq!(fs::read(&state(&disk).path).unwrap(), CONTENT);
    daemon.remove(DISK).await.unwrap();
}

/// Waits for the end of killed processes: a guest runs until its process has ended.
async fn no_vmm_is_left(daemon: &Daemon) {
    within(async || daemon.vmm_processes().is_empty().then_some(())).await;
}

/// No VM, and nothing that VMs have.
async fn has_nothing(daemon: &Daemon) {
    let node = daemon.node().await.status.unwrap();
    assert_eq!((node.vms, node.memory_committed_bytes), (0, 0));
    assert_eq!(daemon.vmm_processes(), []);
    assert_eq!(daemon.cgroups(), Vec::<PathBuf>::new());
    assert_eq!(daemon.all_disks().await, Vec::<String>::new());
    for folder in ["run/vms", "log/vms", "state/disks"] {
        let left: Vec<_> = fs::read_dir(daemon.path(folder)).into_iter().flatten().collect();
        assert!(left.is_empty(), "{folder}: {left:?}");
    }
}
