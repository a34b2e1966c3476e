//! Forwards vmmd's events about VMs, as events of their pods.

use std::time::Duration;

use k8s_openapi::api::core::v1::ObjectReference;
use kube::runtime::events::{Event, EventType, Recorder};
use tonic::{Code, Status};
use vmmd_api::v1::{self, EventSeverity};

use crate::{
    daemon::{CALL, Daemon, within},
    names,
};

/// How soon a vmmd that does not answer is asked again.
const RETRY: Duration = Duration::from_secs(5);

/// Continues after the last forwarded event. Never returns.
pub async fn run(daemon: Daemon, node: String, recorder: Recorder) {
    let mut cursor = String::new();
    loop {
        if let Err(status) = pass_on(&daemon, &node, &recorder, &mut cursor).await {
            tracing::debug!("watch of events: {}: {}", status.code(), status.message());
            if status.code() == Code::OutOfRange {
                cursor.clear();
            }
        }
        tokio::time::sleep(RETRY).await;
    }
}

async fn pass_on(
    daemon: &Daemon,
    node: &str,
    recorder: &Recorder,
    cursor: &mut String,
) -> Result<(), Status> {
    let about = v1::ObjectReference {
        kind: "vm".to_owned(),
        ..v1::ObjectReference::default()
    };
    let request = v1::WatchEventsRequest {
        filter: Some(v1::EventFilter {
            object: Some(about),
            ..v1::EventFilter::default()
        }),
        cursor: cursor.clone(),
    };
    let mut events = within(CALL, daemon.events.clone().watch_events(request)).await?;
    while let Some(response) = events.message().await? {
        response.cursor.clone_into(cursor);
        let Some(event) = response.event else { continue };
        let name = event.object.as_ref().map(|object| object.name.clone());
        // One that is gone has no pod any more.
        let Some(vm) = daemon.vm(&name.unwrap_or_default()).await? else {
            continue;
        };
        let Some(pod) = pod(&vm, node) else { continue };
        if let Err(error) = recorder.publish(&translate(&event), &pod).await {
            tracing::debug!("event {}: {error}", event.reason);
        }
    }
    Ok(())
}

/// The pod of a VM of this agent.
fn pod(vm: &v1::Vm, node: &str) -> Option<ObjectReference> {
    let metadata = vm.metadata.as_ref()?;
    let (namespace, name) = metadata.annotations.get(names::POD)?.split_once('/')?;
    let own = metadata
        .labels
        .get(names::AGENT)
        .is_some_and(|agent| agent == node);
    own.then(|| ObjectReference {
        api_version: Some("v1".to_owned()),
        kind: Some("Pod".to_owned()),
        namespace: Some(namespace.to_owned()),
        name: Some(name.to_owned()),
        uid: metadata.labels.get(names::POD_UID).cloned(),
        ..ObjectReference::default()
    })
}

fn translate(event: &v1::Event) -> Event {
    Event {
        type_: match event.severity() {
            EventSeverity::Warning => EventType::Warning,
            _ => EventType::Normal,
        },
        reason: event.reason.clone(),
        note: Some(event.message.chars().take(1000).collect()),
        action: "Run".to_owned(),
        secondary: None,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn an_event_is_one_of_the_pod_when_the_vm_is_the_agents() {
        let pair = |key: &str, value: &str| (key.to_owned(), value.to_owned());
        let metadata = v1::ObjectMetadata {
            labels: BTreeMap::from([pair(names::AGENT, "n1"), pair(names::POD_UID, "p-3")]),
            annotations: BTreeMap::from([pair(names::POD, "shop/web-3")]),
            ..v1::ObjectMetadata::default()
        };
        let vm = v1::Vm {
            metadata: Some(metadata),
            ..v1::Vm::default()
        };
        let found = pod(&vm, "n1").unwrap();
        assert_eq!(found.namespace.as_deref(), Some("shop"));
        assert_eq!(found.name.as_deref(), Some("web-3"));
        assert_eq!(found.uid.as_deref(), Some("p-3"));
        assert_eq!(pod(&vm, "n2"), None);
        assert_eq!(pod(&v1::Vm::default(), "n1"), None);
    }
}
