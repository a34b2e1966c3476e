//! Nodes of the cluster, as far as the controller needs them: whether they are cordoned.

use futures::{Stream, StreamExt as _, channel::mpsc};
use k8s_openapi::api::core::v1::Node;
use kube::{
    Api, Client, ResourceExt as _,
    runtime::{
        WatchStreamExt as _,
        reflector::{self, ObjectRef, Store},
        watcher,
    },
};

use crate::{backoff::watching, crd::VirtualMachine};

/// Watches the nodes. The stream has their changes, and keeps the store up to date while it is read. A
/// new list is in the store when it is signalled to `listed`, and not when the stream has its nodes.
pub fn watch(
    client: Client,
    listed: mpsc::UnboundedSender<()>,
) -> (Store<Node>, impl Stream<Item = Result<Node, watcher::Error>>) {
    let (store, writer) = reflector::store();
    let changes = watcher(Api::<Node>::all(client), watching())
        .modify(|node: &mut Node| {
            // Most of a node is not needed.
            node.status = None;
            node.metadata.managed_fields = None;
            node.metadata.annotations = None;
            node.metadata.labels = None;
        })
        .reflect(writer)
        .inspect(move |event| {
            if matches!(event, Ok(watcher::Event::InitDone)) {
                // The receiver is closed only when the controller ends.
                let _ = listed.unbounded_send(());
            }
        })
        .touched_objects();
    (store, changes)
}

/// Whether the node with this name is known to be cordoned.
pub fn is_cordoned(nodes: &Store<Node>, name: &str) -> bool {
    nodes
        .get(&ObjectRef::new(name))
        .is_some_and(|node| cordoned(&node))
}

fn cordoned(node: &Node) -> bool {
    node.spec.as_ref().and_then(|spec| spec.unschedulable) == Some(true)
}

/// The VirtualMachines on a cordoned node; none of another node.
pub fn leaving(machines: &Store<VirtualMachine>, node: &Node) -> Vec<ObjectRef<VirtualMachine>> {
    if !cordoned(node) {
        return Vec::new();
    }
    let name = node.name_any();
    let is_there = |machine: &VirtualMachine| {
        let status = machine.status.as_ref();
        status.is_some_and(|status| status.node.as_ref() == Some(&name))
    };
    let found = machines.state_filter(is_there);
    found
        .iter()
        .map(|machine| ObjectRef::from_obj(&**machine))
        .collect()
}
