//! PodDisruptionBudgets: the API server refuses evictions of pods whose VMs are moved instead. When a
//! VM has left its pod, the pod has ended, and the eviction of an ended pod is not refused.

use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard, PoisonError},
};

use kube::{
    Api, Client, ResourceExt as _,
    api::{ApiResource, DeleteParams, DynamicObject, GroupVersionKind, PostParams},
};
use serde_json::json;
use tokio::sync::OnceCell;

use crate::{crd::VirtualMachine, names, run};

/// The budgets of all VirtualMachines.
pub struct Budgets {
    client: Client,
    /// The version of the API that the server has.
    resource: OnceCell<ApiResource>,
    /// Whether there is one, by the uids of VirtualMachines.
    known: Mutex<HashMap<String, bool>>,
}

impl Budgets {
    /// Without knowledge of any budget.
    pub fn new(client: Client) -> Self {
        Self {
            client,
            resource: OnceCell::new(),
            known: Mutex::default(),
        }
    }

    /// Whether there is the budget of a VirtualMachine; `None`: not known.
    pub fn known(&self, machine: &VirtualMachine) -> Option<bool> {
        self.all().get(&machine.uid()?).copied()
    }

    /// Forgets a VirtualMachine. The garbage collector deletes the budget.
    pub fn forget(&self, machine: &VirtualMachine) {
        self.all().remove(&machine.uid().unwrap_or_default());
    }

    /// Makes, or deletes, the budget of a VirtualMachine. After a refusal there is no other attempt.
    ///
    /// # Errors
    ///
    /// A failure of the API server.
    pub async fn set(&self, machine: &VirtualMachine, wanted: bool) -> kube::Result<()> {
        let namespace = machine.namespace().unwrap_or_default();
        let uid = machine.uid().unwrap_or_default();
        let name = names::vm_name(&namespace, &machine.name_any(), &uid);
        let resource = self.resource().await?;
        let budgets = Api::<DynamicObject>::namespaced_with(self.client.clone(), &namespace, resource);
        let result = if wanted {
            // A number: Kubernetes knows no size of a VirtualMachine, so other forms allow nothing.
            let spec = json!({
                "minAvailable": 1,
                "selector": {"matchLabels": {names::MACHINE_UID: uid}},
            });
            let mut budget = DynamicObject::new(&name, resource).data(json!({"spec": spec}));
            budget.metadata.owner_references = Some(vec![run::owner(machine)]);
            budgets.create(&PostParams::default(), &budget).await.map(drop)
        } else {
            budgets.delete(&name, &DeleteParams::default()).await.map(drop)
        };
        match result {
            Err(kube::Error::Api(status)) if status.is_already_exists() || status.is_not_found() => {}
            // Without the right, or with a quota, the run is not held up.
            Err(kube::Error::Api(status)) if matches!(status.code, 403 | 422) => {
                tracing::warn!(vm = machine.name_any(), "PodDisruptionBudget {name}: {status}");
            }
            result => result?,
        }
        self.all().insert(uid, wanted);
        Ok(())
    }

    /// Servers before Kubernetes 1.21 have the version v1beta1 only.
    async fn resource(&self) -> kube::Result<&ApiResource> {
        let discover = || async {
            let groups = self.client.list_api_groups().await?.groups;
            let policy = groups.iter().find(|group| group.name == "policy");
            let stable = policy.is_some_and(|group| group.versions.iter().any(|one| one.version == "v1"));
            let version = if stable { "v1" } else { "v1beta1" };
            let kind = GroupVersionKind::gvk("policy", version, "PodDisruptionBudget");
            Ok(ApiResource::from_gvk_with_plural(&kind, "poddisruptionbudgets"))
        };
        self.resource.get_or_try_init(discover).await
    }

    fn all(&self) -> MutexGuard<'_, HashMap<String, bool>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
