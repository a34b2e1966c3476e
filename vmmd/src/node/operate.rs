//! Actions of an operator on the node: labels, cordon, uncordon. Each is durable on return, and
//! emits an event when it changes something. An action without a change succeeds.

use std::collections::BTreeMap;

use vmmd_host::failure::Failure;
use vmmd_objects::{
    context::Context,
    event::{Draft, Object},
};
use vmmd_spec::{
    Violations,
    metadata::{MAX_PAIRS, labels},
};

use crate::{host::Host, registry::vms::command::Command};

/// Longest reason of a cordon in bytes.
const MAX_REASON: usize = 500;

/// Sets and removes labels.
pub async fn label(
    host: &Host,
    set: BTreeMap<String, String>,
    remove: Vec<String>,
    context: &Context,
) -> Result<(), Failure> {
    let mut found = Violations::default();
    labels(&mut found, "set", &set);
    for (index, key) in remove.iter().enumerate() {
        if set.contains_key(key) {
            found.add(format_args!("remove[{index}]"), "must not be in `set` too");
        }
    }
    found.or(())?;
    let mut now = BTreeMap::new();
    let changed = host.node.change_if(&context.preconditions, |record| {
        record.labels.retain(|key, _| !remove.contains(key));
        record.labels.extend(set);
        if record.labels.len() > MAX_PAIRS {
            let problem = format_args!(
                "would make {} labels of the node, at most {MAX_PAIRS}",
                record.labels.len()
            );
            return Err(Failure::field("set", problem));
        }
        now.clone_from(&record.labels);
        Ok(())
    });
    if changed.await? {
        let labels: Vec<_> = now.iter().map(|(key, value)| format!("{key}={value}")).collect();
        let message = format!("the node's labels are now: {}", labels.join(", "));
        host.events
            .emit(Draft::normal(Object::Node, "LabelsChanged", message).of(context.clone()));
    }
    Ok(())
}

/// No VM is created or started here any more.
pub async fn cordon(host: &Host, reason: String, context: &Context) -> Result<(), Failure> {
    if reason.len() > MAX_REASON || reason.chars().any(char::is_control) {
        let problem = format_args!("must be at most {MAX_REASON} bytes without control characters");
        return Err(Failure::field("reason", problem));
    }
    let why = if reason.is_empty() {
        String::new()
    } else {
        format!(": {reason}")
    };
    let changed = host.node.change_if(&context.preconditions, |record| {
        (record.cordoned, record.cordon_reason) = (true, reason);
        Ok(())
    });
    if changed.await? {
        let message = format!("no VM is created or started here any more{why}");
        host.events
            .emit(Draft::normal(Object::Node, "Cordoned", message).of(context.clone()));
    }
    Ok(())
}

/// VMs are created and started again, those first whose run policy wants it.
pub async fn uncordon(host: &Host, context: &Context) -> Result<(), Failure> {
    let changed = host.node.change_if(&context.preconditions, |record| {
        if record.draining {
            let message = "the node is being drained: `vmmctl get operation --active` shows the drain, and `vmmctl \
                           operation cancel ID` ends it";
            return Err(Failure::precondition("NODE_DRAINING", message));
        }
        record.cordoned = false;
        record.cordon_reason.clear();
        Ok(())
    });
    if changed.await? {
        let message = "VMs are created and started here again";
        host.events
            .emit(Draft::normal(Object::Node, "Uncordoned", message).of(context.clone()));
        for vm in host.vms.list() {
            let name = vm.metadata.as_ref().map(|metadata| metadata.name.as_str());
            if let Some(entry) = name.and_then(|name| host.vms.get(name)) {
                let _ = entry.mailbox.send(Command::Reconsider).await;
            }
        }
    }
    Ok(())
}
