//! The probes of the guest: `spec.probes` selects the checks.

use std::time::Duration;

use vm_lifecycle::{exit::Asked, stop::Then};
use vmmd_api::v1::{EventSeverity, VmPhase};
use vmmd_objects::{
    context::{Context, Initiator},
    operation::Type,
};
use vmmd_spec::probe::Check;

use super::{Actor, work::Work};
use crate::{
    registry::vms::command::{Probe as Kind, Report},
    vm::probe::{Guest, Prober},
};

/// Time that a guest with a failed probe has to power off, as a container of Kubernetes.
const GRACE: Duration = Duration::from_secs(30);

/// Why probes begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Occasion {
    /// The guest starts, or runs again.
    Runs,
    /// The spec was changed.
    Changed,
    /// An earlier daemon may have probed the guest.
    Adopted,
}

impl Actor {
    /// Begins to probe a guest that runs, and again after a change of the probes.
    pub(super) fn probe_guest(&mut self, occasion: Occasion) {
        let Some(instance) = &mut self.instance else {
            return;
        };
        let health = &mut instance.health;
        let probed = health.prober.as_ref().map(|prober| prober.probes.as_ref());
        if self.spec.probes.is_empty() {
            if health.prober.take().is_some() {
                self.publish();
            }
            return;
        }
        if self.view.phase != VmPhase::Running || probed == Some(&self.spec.probes) {
            return;
        }
        let Some(entry) = self.host.vms.find(self.uid) else {
            return;
        };
        let run = self.record.instance.as_ref();
        let is_adopted = occasion == Occasion::Adopted;
        let is_started =
            run.is_some_and(|run| run.started) || is_adopted && self.spec.probes.startup.is_none();
        let guest = Guest {
            started: is_started,
            notified: run.is_some_and(|run| run.notified),
            may_have_notified: occasion != Occasion::Runs,
        };
        health.number = health.number.wrapping_add(1);
        let waits = self.spec.probes.readiness.is_some() || self.spec.probes.startup.is_some() && !is_started;
        health.ready = (!waits).then_some(Ok(()));
        health.prober = Some(Prober::start(
            &self.host,
            &entry,
            health.number,
            &self.spec.probes,
            guest,
        ));
        self.publish();
    }

    /// The guest has reset its machine: it starts again.
    pub(super) fn probe_again(&mut self) {
        let prober = self.instance.as_mut().map(|instance| &mut instance.health.prober);
        if prober.is_none_or(|prober| prober.take().is_none()) {
            return;
        }
        if let Some(run) = self.record.instance.as_mut() {
            (run.started, run.notified) = (false, false);
        }
        self.probe_guest(Occasion::Runs);
    }

    /// A probe has changed its state.
    pub(super) async fn on_probed(&mut self, report: Report) {
        let Report { prober, kind, state } = report;
        let health = self.instance.as_ref().map(|instance| &instance.health);
        if health.is_none_or(|health| health.prober.is_none() || health.number != prober) {
            return;
        }
        self.note_notified(kind, state.is_ok()).await;
        let Some(health) = self.instance.as_mut().map(|instance| &mut instance.health) else {
            return;
        };
        let name = kind.name();
        match (kind, state) {
            (Kind::Startup, Ok(())) => {
                health.ready = self.spec.probes.readiness.is_none().then_some(Ok(()));
                if let Some(run) = self.record.instance.as_mut() {
                    run.started = true;
                    self.persist().await;
                }
                self.tell(EventSeverity::Normal, "Healthy", "the startup probe succeeds");
            }
            (Kind::Readiness, Ok(())) => {
                health.ready = Some(Ok(()));
                self.tell(EventSeverity::Normal, "Healthy", "the readiness probe succeeds");
            }
            (Kind::Readiness, Err(why)) => {
                let message = format!("the {name} probe has failed: {why}");
                health.ready = Some(Err(message.clone()));
                self.tell(EventSeverity::Warning, "Unhealthy", &message);
            }
            (Kind::Liveness, Ok(())) => return,
            (Kind::Startup | Kind::Liveness, Err(why)) => {
                let message = format!("the {name} probe has failed: {why}");
                health.ready = Some(Err(message.clone()));
                self.end_unhealthy(&message);
            }
        }
        self.publish();
    }

    /// Notes durably whether the guest has notified that it is ready, for a probe of notifications.
    async fn note_notified(&mut self, kind: Kind, is_ready: bool) {
        let probes = &self.spec.probes;
        let probe = match kind {
            Kind::Startup => &probes.startup,
            Kind::Readiness => &probes.readiness,
            Kind::Liveness => &None,
        };
        let is_by_notice = probe.as_ref().is_some_and(|probe| probe.check == Check::Notify);
        if is_by_notice
            && let Some(run) = self.record.instance.as_mut()
            && std::mem::replace(&mut run.notified, is_ready) != is_ready
        {
            self.persist().await;
        }
    }

    /// Ends the run of a guest with a failed probe, and the run policy decides. While something else
    /// is under way nothing happens: the report is repeated.
    fn end_unhealthy(&mut self, message: &str) {
        let is_free = matches!(self.work, Work::None) && !self.handover().is_under_way();
        if !is_free || self.view.phase != VmPhase::Running {
            return;
        }
        let context = Context {
            initiator: Initiator::RunPolicy,
            ..Context::default()
        };
        let operation = self.operation(Type::VmStop, &context, None);
        self.tell(EventSeverity::Warning, "Unhealthy", message);
        self.begin_stop_as(Asked::ProbeFailed, Some(GRACE), operation, Then::Stay);
    }
}
