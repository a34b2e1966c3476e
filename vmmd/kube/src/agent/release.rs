//! The end of a pod: nothing of it is on the node any more.

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use kube::{
    Api, ResourceExt as _,
    api::{DeleteParams, Patch, PatchParams, Preconditions},
};
use serde_json::json;
use tonic::Code;
use vmmd_api::v1;

use super::{
    migrate::Owner,
    step::{self, Step},
    work::{After, Worker},
};
use crate::{daemon, names, provision::Error, sources::Sources};

/// How soon the API server is asked again for a VirtualMachine that it does not know.
const NO_OWNER: Duration = Duration::from_secs(5);

impl Worker {
    /// Takes the finalizer away, which says that nothing of the pod runs here, and ends the pod's deletion.
    pub async fn release(&self, pod: &Pod) -> Result<After, Error> {
        let uid = pod.uid().unwrap_or_default();
        if step::is_placeholder(pod) {
            match self.owner(pod).await? {
                Owner::Unknown => return Ok(After::Again(NO_OWNER)),
                Owner::Gone => {}
                Owner::Found(machine) => {
                    let status = machine.status.unwrap_or_default();
                    if let Some(after) = self.is_named(pod, &status).await? {
                        return Ok(after);
                    }
                }
            }
        }
        if let Some(vm) = self.find(pod, &uid).await? {
            return Ok(After::Vm(Box::new(vm)));
        }
        let sources = pod.annotations().get(names::SOURCES);
        let sources = sources.and_then(|text| serde_json::from_str::<Sources>(text).ok());
        if sources.is_some_and(|sources| sources.make_disks()) {
            self.provisioner.delete_disks(&uid).await?;
        }
        let pods = self.pods(pod);
        let finalizers: Vec<_> = pod
            .finalizers()
            .iter()
            .filter(|name| *name != names::VM_GONE)
            .collect();
        if finalizers.len() != pod.finalizers().len() {
            let patch = json!({"metadata": {
                "uid": uid,
                "resourceVersion": pod.resource_version(),
                "finalizers": finalizers,
            }});
            let parameters = PatchParams::default();
            match pods
                .patch(&pod.name_any(), &parameters, &Patch::Merge(patch))
                .await
            {
                Ok(_) => {}
                Err(kube::Error::Api(status)) if status.is_not_found() => return Ok(After::Done),
                Err(error) => return Err(error.into()),
            }
        }
        let parameters = DeleteParams {
            grace_period_seconds: Some(0),
            preconditions: Some(Preconditions {
                uid: Some(uid),
                resource_version: None,
            }),
            ..DeleteParams::default()
        };
        match pods.delete(&pod.name_any(), &parameters).await {
            Ok(_) => Ok(After::Done),
            Err(kube::Error::Api(status)) if status.is_not_found() || status.is_conflict() => Ok(After::Done),
            Err(error) => Err(error.into()),
        }
    }

    /// Returns the VM of a pod that the watch has not shown yet. An unanswered creation request is
    /// repeated first: after its answer, the request is not carried out later. The existence of the
    /// VM is queried afterwards, since the answer may be an old one.
    pub async fn find(&self, pod: &Pod, uid: &str) -> Result<Option<v1::Vm>, Error> {
        let Some(name) = step::vm_name(pod) else {
            return Ok(None);
        };
        let unanswered = self.provisioner.unanswered_of(uid);
        if let Some(request) = unanswered {
            match self.provisioner.ask_to_make(uid, request).await {
                Ok(_) => {}
                Err(status) if daemon::refused(&status) || status.code() == Code::AlreadyExists => {}
                Err(status) => return Err(status.into()),
            }
        }
        let found = self.daemon.vm(&name).await?;
        Ok(found.filter(|vm| step::key(vm, &self.node).as_deref() == Some(uid)))
    }

    /// For a pod whose VM was there, and was taken away by somebody else.
    pub async fn removed(&self, pod: &Pod) -> Result<After, Error> {
        self.give_up(pod, "VmRemoved", "the VM was removed from vmmd")
            .await
    }

    /// For a VM whose pod the watch does not show: only when the API server says that it is gone, or another one, the VM goes.
    pub async fn check_pod(&self, uid: &str, vm: &v1::Vm) -> Result<After, Error> {
        let metadata = vm.metadata.clone().unwrap_or_default();
        let path = |key| {
            metadata
                .annotations
                .get(key)
                .map(String::as_str)
                .unwrap_or_default()
        };
        let path = match path(names::MOVING).rsplit_once('/') {
            Some((path, _)) if step::is_incoming(vm, &self.node) => path,
            _ => path(names::POD),
        };
        let Some((namespace, pod)) = path.split_once('/') else {
            return Ok(After::Done);
        };
        let pods = Api::<Pod>::namespaced(self.client.clone(), namespace);
        if let Some(pod) = pods.get_opt(pod).await?
            && pod.metadata.uid.as_deref() == Some(uid)
        {
            return Ok(After::Pod(Box::new(pod)));
        }
        let now = Timestamp::now();
        tracing::warn!(vm = metadata.name, "its pod is gone: it is stopped");
        match step::end(vm, now, now) {
            Step::Remove => self.remove(vm).await,
            _ => Ok(After::Done),
        }
    }
}
