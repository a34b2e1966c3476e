//! Periodic checks of a guest: `spec.probes`.
//!
//! A [`Prober`] is the task of one run. It checks, counts ([`vm_lifecycle::probe`]) and reports
//! changes to the actor, which decides. The task waits without a wake-up while the guest does not run.

mod check;

use std::{sync::Arc, time::Duration};

use tokio::{
    sync::watch,
    task::JoinHandle,
    time::{sleep, timeout},
};
use uuid::Uuid;
use vm_lifecycle::probe::{Tally, Verdict};
use vmmd_api::{
    v1::{Vm, VmPhase},
    well_known::Timestamp,
};
use vmmd_spec::probe::{Check, Probe, Probes};

use self::check::Checker;
use crate::{
    guest::Notices,
    host::Host,
    registry::vms::{
        Entry,
        command::{Command, Probe as Kind, Report},
    },
};

/// The probes of one run. They end when this is dropped.
#[derive(Debug)]
pub struct Prober {
    /// The probes.
    pub probes: Arc<Probes>,
    task: JoinHandle<()>,
}

impl Drop for Prober {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Prober {
    /// Begins to probe the guest of `entry`.
    pub fn start(host: &Arc<Host>, entry: &Entry, number: u64, probes: &Probes, guest: Guest) -> Self {
        let probes = Arc::new(probes.clone());
        let notices = probes
            .notify()
            .then(|| Notices::receive(host, entry.uid, guest.notified));
        let task = Task {
            checker: Checker::default(),
            host: Arc::clone(host),
            uid: entry.uid,
            state: entry.state.clone(),
            number,
            probes: Arc::clone(&probes),
            notices,
            may_have_notified: guest.may_have_notified,
        };
        let started = guest.started;
        let task = tokio::spawn(async move {
            // The end of the VM, which has no more reports.
            let _gone = task.run(started).await;
        });
        Self { probes, task }
    }
}

/// A guest at the begin of its probes.
#[derive(Clone, Copy, Debug)]
pub struct Guest {
    /// The guest has started already: the startup probe and the initial delays are over.
    pub started: bool,
    /// The guest has notified that it is ready.
    pub notified: bool,
    /// A notification of the guest may be lost.
    pub may_have_notified: bool,
}

#[derive(Debug)]
struct Task {
    host: Arc<Host>,
    uid: Uuid,
    state: watch::Receiver<Arc<Vm>>,
    number: u64,
    probes: Arc<Probes>,
    checker: Checker,
    /// With a probe that needs them.
    notices: Option<Notices>,
    may_have_notified: bool,
}

impl Task {
    /// Probes. `None` when the VM is gone.
    async fn run(&self, started: bool) -> Option<()> {
        if let Some(probe) = self.probes.startup.as_ref().filter(|_| !started) {
            self.repeat(Kind::Startup, probe, probe.initial_delay).await?;
        }
        let repeat = async |kind, probe: &Option<Probe>| match probe {
            Some(probe) => {
                let delay = if started {
                    Duration::ZERO
                } else {
                    probe.initial_delay
                };
                self.repeat(kind, probe, delay).await
            }
            None => Some(()),
        };
        let readiness = repeat(Kind::Readiness, &self.probes.readiness);
        let liveness = repeat(Kind::Liveness, &self.probes.liveness);
        tokio::join!(readiness, liveness);
        Some(())
    }

    /// Repeats a check: that of a startup probe up to its success, others without end.
    async fn repeat(&self, kind: Kind, probe: &Probe, delay: Duration) -> Option<()> {
        if let (Check::Notify, Some(notices)) = (&probe.check, &self.notices) {
            let patience = delay.saturating_add(probe.period.saturating_mul(probe.failure_threshold));
            return self.follow(kind, notices, patience).await;
        }
        let mut tally = Tally::new(probe);
        let mut reported = None;
        self.runs().await?;
        sleep(delay).await;
        loop {
            let since = self.runs().await?;
            let check = self.checker.check(&self.host, self.uid, &probe.check);
            let result = timeout(probe.timeout, check).await.unwrap_or_else(|_| {
                let seconds = probe.timeout.as_secs();
                Err(format!("no answer in {seconds} s"))
            });
            // The result of a guest that stood still in the meantime says nothing.
            if running(&self.state.borrow()) == Some(since) {
                let verdict = tally.add(result.is_ok());
                let ends_run = kind != Kind::Readiness && verdict == Some(Verdict::Failed);
                if verdict.is_some() && (verdict != reported || ends_run) {
                    reported = verdict;
                    self.report(kind, result).await?;
                }
                if kind == Kind::Startup && verdict == Some(Verdict::Succeeded) {
                    return Some(());
                }
            }
            sleep(probe.period).await;
        }
    }

    /// Follows the notifications of a guest, which has failed without one for `patience`. Ends with the
    /// success of a startup probe.
    async fn follow(&self, kind: Kind, notices: &Notices, patience: Duration) -> Option<()> {
        let mut guest = notices.guest.clone();
        let mut has_failed = false;
        loop {
            let since = self.runs().await?;
            let is_over = kind != Kind::Startup && has_failed;
            let ready = async { guest.wait_for(|guest| guest.ready).await.is_ok() };
            let ready = match is_over {
                true => ready.await,
                false => timeout(patience, ready).await.unwrap_or(false),
            };
            // A guest that stood still in the meantime has more time.
            if !ready && running(&self.state.borrow()) != Some(since) {
                continue;
            }
            if !ready && !self.may_have_notified {
                has_failed = true;
                let status = guest.borrow().status.clone();
                self.report(kind, Err(format!("no READY=1 of the guest: {status}")))
                    .await?;
                continue;
            }
            self.report(kind, Ok(())).await?;
            if kind == Kind::Startup {
                return Some(());
            }
            guest.wait_for(|guest| guest.stopping).await.ok()?;
            has_failed = true;
            self.report(kind, Err("the guest stops".to_owned())).await?;
        }
    }

    /// Waits until the guest runs. Returns the time since when it does.
    async fn runs(&self) -> Option<Timestamp> {
        let mut state = self.state.clone();
        let state = state.wait_for(|vm| running(vm).is_some()).await.ok()?;
        running(&state)
    }

    async fn report(&self, kind: Kind, state: Result<(), String>) -> Option<()> {
        let report = Report {
            prober: self.number,
            kind,
            state,
        };
        // The mailbox is not kept: an actor ends when no client has its mailbox any more.
        let entry = self.host.vms.find(self.uid)?;
        entry.mailbox.send(Command::Probed(report)).await.ok()
    }
}

/// Since when the guest runs, if it does and is not on its way to another node.
fn running(vm: &Vm) -> Option<Timestamp> {
    let status = vm.status.as_ref()?;
    let runs = status.phase() == VmPhase::Running && status.migration.is_none();
    runs.then(|| status.phase_time.unwrap_or_default())
}
