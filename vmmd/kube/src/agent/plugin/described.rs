//! The node as vmmd describes it.

use std::time::Duration;

use tokio::{sync::watch, time::Instant};
use vmmd_api::v1;

use crate::daemon::{CALL, Daemon, within};

/// How long vmmd may be away before the node is not ready: a restart of the daemon takes less.
const AWAY: Duration = Duration::from_secs(5);

/// Known state of the node.
#[derive(Clone)]
pub enum Described {
    /// Unknown yet: the values written by an earlier agent stay.
    NotYet,
    /// vmmd does not answer.
    Away,
    /// What vmmd says.
    As(Box<v1::Node>),
}

/// Passes on what vmmd says of the node, and that it has said nothing for a while.
pub async fn describe(daemon: Daemon, send: watch::Sender<Described>) {
    let mut heard = Instant::now();
    loop {
        let request = v1::WatchNodeRequest {};
        if let Ok(mut stream) = within(CALL, daemon.nodes.clone().watch_node(request)).await {
            while let Ok(Some(response)) = stream.message().await {
                send.send_replace(match response.node {
                    Some(node) => Described::As(Box::new(node)),
                    None => Described::Away,
                });
            }
            heard = Instant::now();
        }
        if heard.elapsed() >= AWAY {
            send.send_if_modified(|now| {
                let new = !matches!(now, Described::Away);
                *now = Described::Away;
                new
            });
        }
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
}
