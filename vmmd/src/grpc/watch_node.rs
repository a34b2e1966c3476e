//! `WatchNode`: the node as it is, and after each change.

use std::{sync::Arc, time::Duration};

use tokio::{sync::mpsc, time::sleep};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;
use vmmd_api::v1::{Node, WatchNodeResponse};
use vmmd_host::{failure::Failure, paced::Paced};

use crate::{host::Host, node::describe};

/// The stream of states.
pub type Stream = ReceiverStream<Result<WatchNodeResponse, Status>>;

/// The node, examined once for all clients that ask at the same time.
pub type Shared = Paced<Result<Node, Failure>>;

/// Changes within this time are sent as one. All watchers together have the node looked at once in this time.
pub const TOGETHER: Duration = Duration::from_millis(200);
/// Polling interval for values without change notifications: free memory and disk space.
const LOOK: Duration = Duration::from_secs(10);

/// Watches the node.
pub fn watch(host: Arc<Host>, shared: Arc<Shared>) -> Stream {
    let (sender, receiver) = mpsc::channel(1);
    tokio::spawn(async move {
        tokio::select! {
            end = follow(&host, &shared, &sender) => {
                if let Err(failure) = end {
                    let _ = sender.send(Err(failure.into())).await;
                }
            }
            () = sender.closed() => {}
            () = host.stopping.cancelled() => {
                let _ = sender.send(Err(Failure::stopping().into())).await;
            }
        }
    });
    ReceiverStream::new(receiver)
}

/// Sends the node for as long as somebody listens.
async fn follow(
    host: &Arc<Host>,
    shared: &Shared,
    sender: &mpsc::Sender<Result<WatchNodeResponse, Status>>,
) -> Result<(), Failure> {
    let mut news = host.node.news();
    let mut sent: Option<Node> = None;
    let mut vms = host.vms.registry.news();
    loop {
        // Changes from here on cause another look.
        vms.mark_unchanged();
        news.mark_unchanged();
        let node = shared.get(|| describe(host)).await?;
        if sent.as_ref().is_none_or(|sent| differs(sent, &node)) {
            let response = WatchNodeResponse {
                node: Some(node.clone()),
            };
            if sender.send(Ok(response)).await.is_err() {
                return Ok(());
            }
            sent = Some(node);
        }
        tokio::select! {
            changed = vms.changed() => if changed.is_err() {
                return Ok(());
            },
            changed = news.changed() => if changed.is_err() {
                return Ok(());
            },
            () = sleep(LOOK) => {}
        }
        sleep(TOGETHER).await;
    }
}

/// Whether there is something to send. Free memory moves all the time: only much of it counts.
fn differs(sent: &Node, now: &Node) -> bool {
    let (Some(before), Some(after)) = (&sent.status, &now.status) else {
        return sent != now;
    };
    let moved = before
        .memory_available_bytes
        .abs_diff(after.memory_available_bytes);
    if moved > after.memory_bytes / 64 {
        return true;
    }
    let mut same = now.clone();
    if let Some(status) = &mut same.status {
        status.memory_available_bytes = before.memory_available_bytes;
        for condition in &mut status.conditions {
            // Messages have amounts in them.
            let known = before.conditions.iter().find(|known| {
                known.r#type == condition.r#type
                    && known.status == condition.status
                    && known.reason == condition.reason
            });
            if let Some(known) = known {
                condition.message.clone_from(&known.message);
            }
        }
    }
    same != *sent
}

#[cfg(test)]
mod tests {
    use vmmd_api::v1::{Condition, NodeStatus};

    use super::*;

    fn node(available: u64, message: &str, status: i32) -> Node {
        Node {
            status: Some(NodeStatus {
                memory_bytes: 6400,
                memory_available_bytes: available,
                conditions: vec![Condition {
                    message: message.into(),
                    status,
                    ..Default::default()
                }],
                ..Default::default()
            }),
            ..Default::default()
        }
    }

    #[test]
    fn small_changes_of_free_memory_are_not_sent() {
        let sent = node(1000, "1 of 2", 1);
        assert!(!differs(&sent, &node(1100, "2 of 2", 1)));
        assert!(differs(&sent, &node(1101, "1 of 2", 1)));
        assert!(differs(&sent, &node(899, "1 of 2", 1)));
        assert!(differs(&sent, &node(1000, "1 of 2", 2)));
    }
}
