//! Whatever happens at each step of a migration, at most one of both machines runs at any time, and in the end one of them does, or has ended
//! where it was; nothing is left on the other side.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::PathBuf,
    sync::{Arc, Mutex},
    time::Duration,
};

use proto::v1::{self, OperationPhase, VmPhase, operation_service_client::OperationServiceClient};
use tokio::{
    io::copy_bidirectional,
    net::{TcpListener, TcpStream},
    sync::watch,
    time::timeout,
};

use crate::{
    harness::{Daemon, connect, status},
    migration::{kill_vmm, pair, within, within_seconds},
    pki,
};

/// Within which time a daemon hears of a cancel.
const HEARD: Duration = Duration::from_secs(1);

/// Where a daemon waits while something happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Step {
    /// The source has written that it migrates, and has not asked yet.
    Begun,
    /// Everything is at the target, and the source has not asked it to prepare.
    Sent,
    /// The target has prepared, and the source has not given the VM away.
    Ready,
    /// The source has given the VM away, and has not said so.
    Given,
    /// The target has been told, and has done nothing.
    Committed,
    /// The target has taken the VM, and has not said so.
    Answer,
}

impl Step {
    const fn name(self) -> &'static str {
        match self {
            Self::Begun => "begun",
            Self::Sent => "sent",
            Self::Ready => "ready",
            Self::Given => "commit",
            Self::Committed => "committed",
            Self::Answer => "answer",
        }
    }

    const fn is_at_target(self) -> bool {
        matches!(self, Self::Committed | Self::Answer)
    }

    /// There is a `vmm` at the target.
    fn is_loaded(self) -> bool {
        self > Self::Begun
    }
}

/// What happens there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Trouble {
    Cancel,
    Cut,
    SourcesDaemon,
    TargetsDaemon,
    SourcesVmm,
    TargetsVmm,
}

/// How it comes out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    RunsAtSource,
    RunsAtTarget,
    EndedAtSource,
    EndedAtTarget,
}

/// What comes of it. Before the point of no return the VM is the source's, whatever happens; a target that dies without its source noticing has
/// prepared all the same, and is found again.
fn expected(step: Step, trouble: Trouble) -> End {
    use {End::*, Step::*};
    match (step, trouble) {
        (Begun | Sent | Ready, Trouble::SourcesVmm) => EndedAtSource,
        (Ready, Trouble::TargetsDaemon) => RunsAtTarget,
        (Ready | Given | Committed | Answer, Trouble::TargetsVmm) => EndedAtTarget,
        (Ready, Trouble::Cut) => RunsAtTarget,
        (Begun | Sent | Ready, _) => RunsAtSource,
        (Given | Committed | Answer, _) => RunsAtTarget,
    }
}

/// The network between both daemons.
#[derive(Clone)]
struct Network {
    address: String,
    to: Arc<Mutex<String>>,
    up: watch::Sender<bool>,
    /// Nothing comes through, and nobody is told.
    silent: watch::Sender<bool>,
}

impl Network {
    /// Leads to a daemon.
    async fn to(daemon: &Daemon) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let network = Self {
            address: listener.local_addr().unwrap().to_string(),
            to: Arc::new(Mutex::new(pki::address(daemon))),
            up: watch::Sender::new(true),
            silent: watch::Sender::new(false),
        };
        let own = network.clone();
        tokio::spawn(async move {
            loop {
                let (mut near, _) = listener.accept().await.unwrap();
                let (to, mut up) = (own.to.lock().unwrap().clone(), own.up.subscribe());
                let mut silent = own.silent.subscribe();
                tokio::spawn(async move {
                    if !*up.borrow() {
                        return;
                    }
                    let _ = silent.wait_for(|silent| !silent).await;
                    let Ok(mut far) = TcpStream::connect(to).await else {
                        return;
                    };
                    let swallows = tokio::select! {
                        _ = copy_bidirectional(&mut near, &mut far) => false,
                        _ = up.wait_for(|up| !up) => false,
                        _ = silent.wait_for(|silent| *silent) => true,
                    };
                    if swallows {
                        let _ = silent.wait_for(|silent| !silent).await;
                    }
                });
            }
        });
        network
    }

    /// The daemon listens elsewhere since its restart.
    fn leads_to(&self, daemon: &Daemon) {
        *self.to.lock().unwrap() = pki::address(daemon);
    }
}

/// Two daemons and a VM whose migration waits at a step.
struct Stage {
    source: Daemon,
    target: Daemon,
    network: Network,
    /// Only one machine at a time can lock it.
    exclusive: PathBuf,
    operation: v1::Operation,
}

impl Stage {
    async fn at(step: Step) -> Self {
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
        source
            .run("web", &format!("mock.exclusive={}", exclusive.display()))
            .await;
        let stage_of = if step.is_at_target() { &target } else { &source };
        stage_of.fault(step.name());
        let request = v1::MigrateVmRequest {
            name: "web".into(),
            target: network.address.clone(),
            ..Default::default()
        };
        let answer = source.migrations().await.migrate_vm(request).await.unwrap();
        let stage = Self {
            operation: answer.into_inner().operation.unwrap(),
            source,
            target,
            network,
            exclusive,
        };
        let reached = stage.held(step).with_extension("reached");
        within(async || reached.exists().then_some(())).await;
        stage
    }

    fn held(&self, step: Step) -> PathBuf {
        let daemon = if step.is_at_target() {
            &self.target
        } else {
            &self.source
        };
        daemon.path("run/fault").join(step.name())
    }

    async fn happens(&mut self, trouble: Trouble, step: Step) {
        match trouble {
            Trouble::Cancel => {
                let request = v1::CancelOperationRequest {
                    id: self.operation.id.clone(),
                };
                let mut operations = OperationServiceClient::new(connect(self.source.folder.path()).await);
                // It is answered when the migration has ended, which waits for this test; nothing else says that the daemon has heard it.
                let cancelled = timeout(HEARD, operations.cancel_operation(request)).await;
                match cancelled {
                    Ok(refused) => assert!(step >= Step::Given && refused.is_err(), "{refused:?}"),
                    Err(_) => assert!(step < Step::Given, "it is beyond that"),
                }
            }
            Trouble::Cut => drop(self.network.up.send_replace(false)),
            Trouble::SourcesDaemon => self.source.kill(),
            Trouble::TargetsDaemon => self.target.kill(),
            Trouble::SourcesVmm => {
                kill_vmm(&self.source);
                if step < Step::Given {
                    self.source.waits_for("web", VmPhase::Failed).await;
                }
            }
            Trouble::TargetsVmm => kill_vmm(&self.target),
        }
        let held = self.held(step);
        fs::remove_file(held).unwrap();
        if matches!(trouble, Trouble::Cut | Trouble::TargetsDaemon) {
            self.source_notices().await;
        }
        match trouble {
            Trouble::SourcesDaemon => self.source.relaunch().await,
            Trouble::TargetsDaemon => {
                self.target.relaunch().await;
                self.network.leads_to(&self.target);
            }
            Trouble::Cut => drop(self.network.up.send_replace(true)),
            _ => {}
        }
    }

    /// The source, which can't reach the target, has given up, or waits for an answer.
    async fn source_notices(&self) {
        within(async || {
            let now = self.source.operation(&self.operation.id).await;
            let over = !matches!(now.phase(), OperationPhase::Pending | OperationPhase::InProgress);
            let vm = self.source.get("web").await.ok();
            let waits = vm.is_some_and(|vm| status(&vm).reason == "HandedOver");
            (over || waits).then_some(())
        })
        .await;
    }

    /// Waits for the end, and sees that nothing else is left.
    async fn ends(&self, end: End) {
        let (has, other, phase) = match end {
            End::RunsAtSource => (&self.source, &self.target, VmPhase::Running),
            End::RunsAtTarget => (&self.target, &self.source, VmPhase::Running),
            End::EndedAtSource => (&self.source, &self.target, VmPhase::Failed),
            End::EndedAtTarget => (&self.target, &self.source, VmPhase::Failed),
        };
        other.forgets("web").await;
        let vm = has.waits_for("web", phase).await;
        within(async || other.vmm_processes().is_empty().then_some(())).await;
        let runs = usize::from(phase == VmPhase::Running);
        assert_eq!(has.vmm_processes().len(), runs, "{vm:?}");
        assert_eq!(
            fs::read_to_string(&self.exclusive).unwrap(),
            "",
            "both ran at once"
        );
        // It can be used like any other.
        within(async || has.delete("web", true).await.ok()).await;
    }
}

async fn everything_at(step: Step) {
    for trouble in [
        Trouble::Cancel,
        Trouble::Cut,
        Trouble::SourcesDaemon,
        Trouble::TargetsDaemon,
        Trouble::SourcesVmm,
        Trouble::TargetsVmm,
    ] {
        if trouble == Trouble::TargetsVmm && !step.is_loaded() {
            continue;
        }
        println!("{step:?}: {trouble:?}");
        let mut stage = Stage::at(step).await;
        stage.happens(trouble, step).await;
        stage.ends(expected(step, trouble)).await;
    }
}

#[tokio::test]
async fn whatever_happens_when_it_has_begun() {
    everything_at(Step::Begun).await;
}

#[tokio::test]
async fn whatever_happens_when_everything_was_sent() {
    everything_at(Step::Sent).await;
}

#[tokio::test]
async fn whatever_happens_when_the_target_has_prepared() {
    everything_at(Step::Ready).await;
}

#[tokio::test]
async fn whatever_happens_when_the_vm_was_given_away() {
    everything_at(Step::Given).await;
}

#[tokio::test]
async fn whatever_happens_when_the_target_was_told() {
    everything_at(Step::Committed).await;
}

#[tokio::test]
async fn whatever_happens_when_the_target_has_taken_it() {
    everything_at(Step::Answer).await;
}

#[tokio::test]
async fn a_network_that_swallows_everything_is_noticed_on_both_sides() {
    let (source, target) = pair().await;
    let network = Network::to(&target).await;
    source.run("web", "mock.send=hang").await;
    let request = v1::MigrateVmRequest {
        name: "web".into(),
        target: network.address.clone(),
        ..Default::default()
    };
    let answer = source.migrations().await.migrate_vm(request).await.unwrap();
    let operation = answer.into_inner().operation.unwrap();
    target.waits_for("web", VmPhase::Starting).await;
    network.silent.send_replace(true);
    within_seconds(60, async || {
        let now = source.operation(&operation.id).await;
        (now.phase() == OperationPhase::Failed).then_some(())
    })
    .await;
    source.waits_for("web", VmPhase::Running).await;
    within_seconds(60, async || target.get("web").await.is_err().then_some(())).await;
    within(async || target.vmm_processes().is_empty().then_some(())).await;
    network.silent.send_replace(false);
    within(async || source.delete("web", true).await.ok()).await;
}
