//! Requests to create VMs, each of which vmmd carries out at most once.

use std::{
    collections::HashMap,
    sync::{MutexGuard, PoisonError},
};

use tonic::{Code, Status};
use vmmd_api::v1;

use super::Provisioner;
use crate::daemon::{self, CALL, within};

impl Provisioner {
    /// Id of the request to create a VM. The next id is used once the previous request cannot take
    /// effect any longer. A restarted agent has the requests refused in the same order, and so
    /// comes to the request that has created the VM, if any.
    pub fn creation_id(&self, uid: &str) -> String {
        match self.spent().get(uid) {
            None => format!("kube-create-{uid}"),
            Some(spent) => format!("kube-create-{uid}-{spent}"),
        }
    }

    /// The same request for the same pod, however often: vmmd carries it out once. So it is the first one that is repeated as long as it has
    /// no answer, also when a Secret that it has values of has changed.
    pub async fn ask_to_make(&self, uid: &str, request: v1::CreateVmRequest) -> Result<v1::Vm, Status> {
        let request = self.unanswered().entry(uid.to_owned()).or_insert(request).clone();
        let answer = within(CALL, self.daemon.vms.clone().create_vm(request)).await;
        let known = match &answer {
            Ok(_) => true,
            Err(status) => daemon::refused(status) || status.code() == Code::AlreadyExists,
        };
        if known {
            self.unanswered().remove(uid);
        }
        answer?
            .vm
            .ok_or_else(|| Status::internal("an answer without a VM"))
    }

    /// The request to create the VM of this pod that had no answer yet.
    pub fn unanswered_of(&self, uid: &str) -> Option<v1::CreateVmRequest> {
        self.unanswered().get(uid).cloned()
    }

    /// Notes that the last request to create the VM of this pod cannot take effect any longer.
    pub fn spend(&self, uid: &str) {
        let mut spent = self.spent();
        let count = spent.entry(uid.to_owned()).or_default();
        *count = count.saturating_add(1);
    }

    fn unanswered(&self) -> MutexGuard<'_, HashMap<String, v1::CreateVmRequest>> {
        self.unanswered.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn spent(&self) -> MutexGuard<'_, HashMap<String, u32>> {
        self.spent.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Forgets the requests of a pod that has its VM, or is gone.
    pub fn forget(&self, uid: &str) {
        self.unanswered().remove(uid);
        self.spent().remove(uid);
    }
}
