//! `wait` for a state of VMs, or for the end of an operation, by watches, across restarts of the daemon.

use std::collections::BTreeSet;

use tokio::time::{Instant, sleep, timeout_at};
use vmmd_api::v1::{self, ConditionStatus, WatchEventType};

use super::{act, operation};
use crate::{
    args::{
        Targets,
        wait::{Subject, Wait, Wanted},
    },
    client::{self, Client, Kind as _, QUICK, RESTART, call, watch_ended, went_away},
    failure::{Code, Failure, Result},
    output::{self, vm},
};

impl Wanted {
    fn holds(&self, vm: &v1::Vm) -> bool {
        let status = vm.status.as_ref();
        match self {
            Self::Condition(kind, wanted) => status.is_some_and(|status| {
                let mut conditions = status.conditions.iter();
                conditions.any(|condition| {
                    condition.r#type.eq_ignore_ascii_case(kind) && condition.status() == *wanted
                })
            }),
            Self::Phase(phase) => act::phase(vm) == *phase,
            Self::Deleted | Self::Idle => false,
        }
    }

    /// Describes a VM that meets the condition.
    fn text(&self) -> String {
        match self {
            Self::Condition(kind, status) => format!("has {kind}={}", condition_word(*status)),
            Self::Phase(phase) => format!("is {}", vm::camel(phase.as_str_name(), "VM_PHASE_")),
            Self::Deleted => "is deleted".into(),
            Self::Idle => "has no operation in progress".into(),
        }
    }
}

fn condition_word(status: ConditionStatus) -> String {
    vm::camel(status.as_str_name(), "CONDITION_STATUS_").to_lowercase()
}

/// Waits for all of them.
pub async fn wait(client: &Client, args: &Wait) -> Result<(), Vec<Failure>> {
    let end = Instant::now() + args.timeout;
    let (mut vms, mut operations) = (Vec::new(), Vec::new());
    for subject in &args.subjects {
        match subject {
            Subject::Vm(name) => vms.push(name.clone()),
            Subject::Operation(id) => operations.push(id.clone()),
        }
    }
    if args.subjects.is_empty() {
        let targets = Targets {
            names: Vec::new(),
            selector: args.selector.clone(),
            all: args.all,
        };
        vms = act::names(client, &targets, |_| true).await?;
    }
    if vms.is_empty() && operations.is_empty() {
        eprintln!("There are no VMs to wait for.");
        return Ok(());
    }
    let mut failures = Vec::new();
    match (&args.wanted, vms.is_empty()) {
        (_, true) => {}
        (None, false) => {
            let message = "--for with the state to wait for is required for VMs";
            return Err(Failure::new(Code::Usage, message).into());
        }
        (Some(Wanted::Idle), false) => failures.extend(all_idle(client, &vms, end).await),
        (Some(wanted), false) => failures.extend(all_are(client, vms, wanted, end).await),
    }
    for id in operations {
        let waited = timeout_at(end, operation::until_ended(client, &id)).await;
        match waited.unwrap_or_else(|_| Err(late(&format!("operation/{id} has not ended")))) {
            Ok(_) => output::line(format!("operation/{id} is complete"))?,
            Err(failure) => failures.push(failure),
        }
    }
    super::all(failures)
}

fn late(text: &str) -> Failure {
    Failure::new(Code::Timeout, format!("{text} in time"))
}

/// Waits until no operation on these VMs is in progress.
async fn all_idle(client: &Client, vms: &[String], end: Instant) -> Vec<Failure> {
    let mut failures = Vec::new();
    for name in vms {
        let waited = timeout_at(end, idle(client, name)).await;
        let waited =
            waited.unwrap_or_else(|_| Err(late(&format!("an operation on vm/{name} has not ended"))));
        let told = waited.and_then(|()| output::line(format!("vm/{name} {}", Wanted::Idle.text())));
        failures.extend(told.err());
    }
    failures
}

async fn idle(client: &Client, name: &str) -> Result<()> {
    client.get(name).await?;
    loop {
        let request = v1::ListOperationsRequest {
            filter: Some(client::in_progress(name)),
            ..Default::default()
        };
        let listed = client.again(QUICK, || {
            let mut operations = client.operations.clone();
            let request = request.clone();
            async move { operations.list_operations(request).await }
        });
        let Some(operation) = listed.await?.operations.into_iter().next() else {
            return Ok(());
        };
        match operation::until_ended(client, &operation.id).await {
            // The result does not matter, and the daemon may not know the operation any more.
            Err(failure) if went_away(&failure) => return Err(failure),
            _ => {}
        }
    }
}

/// Waits until all these VMs have the wanted state; prints each.
async fn all_are(client: &Client, vms: Vec<String>, wanted: &Wanted, end: Instant) -> Vec<Failure> {
    let mut waiting = Waiting {
        wanted,
        left: vms.into_iter().collect(),
        last: None,
        failures: Vec::new(),
    };
    match timeout_at(end, waiting.run(client)).await {
        Ok(Ok(())) => {}
        Ok(Err(failure)) => waiting.failures.push(failure),
        Err(_) => {
            for name in std::mem::take(&mut waiting.left) {
                let mut failure = late(&format!(
                    "vm/{name} did not reach the wanted state ({})",
                    wanted.text()
                ));
                if let Ok(vm) = client.get(&name).await {
                    failure.message += &format!(": it {}", state(&vm, wanted));
                }
                waiting.failures.push(failure);
            }
        }
    }
    waiting.failures
}

/// The present state of a VM, for a message.
fn state(vm: &v1::Vm, wanted: &Wanted) -> String {
    let status = vm.status.clone().unwrap_or_default();
    if let Wanted::Condition(kind, _) = wanted {
        let mut conditions = status.conditions.iter();
        return match conditions.find(|condition| condition.r#type.eq_ignore_ascii_case(kind)) {
            Some(condition) => format!(
                "has {kind}={} ({})",
                condition_word(condition.status()),
                condition.reason
            ),
            None => format!("has no condition {kind}"),
        };
    }
    format!("is {}", vm::phase(&status))
}

/// A wait for VMs.
struct Waiting<'a> {
    wanted: &'a Wanted,
    /// Names of the VMs that do not meet the condition yet.
    left: BTreeSet<String>,
    /// VMs of `left` that the present watch has not shown yet; `None` when the watch has shown all existing VMs.
    last: Option<BTreeSet<String>>,
    failures: Vec<Failure>,
}

impl Waiting<'_> {
    async fn run(&mut self, client: &Client) -> Result<()> {
        while !self.left.is_empty() {
            match self.watch(client).await {
                Err(failure) if went_away(&failure) => sleep(RESTART).await,
                result => result?,
            }
        }
        Ok(())
    }

    /// Watches from the present state until no VM is left, or the watch ends.
    async fn watch(&mut self, client: &Client) -> Result<()> {
        let request = v1::WatchVmsRequest {
            filter: Some(v1::VmFilter {
                names: self.left.iter().cloned().collect(),
                ..Default::default()
            }),
            ..Default::default()
        };
        self.last = Some(self.left.clone());
        let mut stream = call(QUICK, client.vms.clone().watch_vms(request)).await?;
        while let Some(event) = stream.message().await? {
            self.event(&event)?;
            if self.left.is_empty() {
                return Ok(());
            }
        }
        Err(watch_ended())
    }

    fn event(&mut self, event: &v1::WatchVmsResponse) -> Result<()> {
        if event.r#type() == WatchEventType::Synced {
            let absent = self.last.take().unwrap_or_default();
            return absent
                .iter()
                .try_for_each(|name| self.is_gone(name, "does not exist"));
        }
        let Some(vm) = &event.vm else { return Ok(()) };
        let name = vm.name().to_owned();
        if let Some(unseen) = &mut self.last {
            unseen.remove(&name);
        }
        if event.r#type() == WatchEventType::Deleted {
            return self.is_gone(&name, "was deleted");
        }
        if self.left.contains(&name) && self.wanted.holds(vm) {
            self.done(&name)?;
        }
        Ok(())
    }

    fn is_gone(&mut self, name: &str, how: &str) -> Result<()> {
        if *self.wanted == Wanted::Deleted {
            return self.done(name);
        }
        if self.left.remove(name) {
            let failure = Failure::new(Code::NotFound, format!("vm/{name} {how}"));
            self.failures.push(failure.hint("`vmmctl get vm` lists the VMs"));
        }
        Ok(())
    }

    fn done(&mut self, name: &str) -> Result<()> {
        if self.left.remove(name) {
            output::line(format!("vm/{name} {}", self.wanted.text()))?;
        }
        Ok(())
    }
}
