//! A guest that does not react to its power button.

use std::{sync::Arc, time::Duration};

use serde_json::json;
use tokio::time::timeout;
use uuid::Uuid;
use vmmd_api::v1::{self, VmPhase};
use vmmd_host::fault;

use super::Agent;
use crate::host::Host;

/// How long a guest may take to react to its power button.
const BUTTON: Duration = Duration::from_secs(10);

/// Waits for the reaction of a guest to its power button, and then asks its agent to power it off. A
/// guest that shuts down ends its agent, which closes the agent's channel.
pub async fn shut_down_late(host: Arc<Host>, uid: Uuid) {
    let Some(entry) = host.vms.find(uid) else {
        return;
    };
    let mut state = entry.state.clone();
    let patience = fault::patience(&host.config.run_dir, "power-button", BUTTON);
    let reacts = state.wait_for(|vm| !waits_for_guest(vm));
    if timeout(patience, reacts).await.is_ok() {
        return;
    }
    tracing::info!(%uid, "the guest ignores its power button: its agent is asked");
    let asked = async {
        let mut session = Agent::new(&host, &entry).session().await?;
        session.tell("guest-shutdown", json!({"mode": "powerdown"})).await
    };
    if let Err(failure) = asked.await {
        tracing::debug!(%uid, %failure, "ask an agent to power its guest off");
    }
}

/// The VM is being stopped, and an agent has its channel open.
fn waits_for_guest(vm: &v1::Vm) -> bool {
    vm.status.as_ref().is_some_and(|status| {
        let mut conditions = status.conditions.iter();
        let is_open = |it: &v1::Condition| it.r#type == "AgentReady" && it.reason != "AgentNotConnected";
        status.phase() == VmPhase::Stopping && conditions.any(is_open)
    })
}
