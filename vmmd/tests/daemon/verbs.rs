//! Calls and waits that many tests share.

use std::{fs, path::Path, time::Duration};

use tonic::{Status, transport::Channel};
use tonic_types::StatusExt;
use vmmd_api::v1::{
    self, AttachmentPhase, ConditionStatus, ExitReason, OperationPhase, VmPhase,
    operation_service_client::OperationServiceClient,
};

use crate::harness::{Daemon, connect, status};

impl Daemon {
    /// Makes a VM of a manifest, and starts it.
    pub async fn run_vm(&self, vm: v1::Vm) -> v1::Vm {
        let name = self.create(vm).await.unwrap().metadata.unwrap().name;
        self.start_vm(&name).await.unwrap()
    }

    /// As [`run`](Self::run), with a change of the spec before.
    pub async fn run_with(&self, name: &str, options: &str, change: impl FnOnce(&mut v1::VmSpec)) -> v1::Vm {
        self.run_vm(self.manifest_with(name, options, change)).await
    }

    pub fn manifest_with(&self, name: &str, options: &str, change: impl FnOnce(&mut v1::VmSpec)) -> v1::Vm {
        let mut vm = self.manifest(name, options);
        change(vm.spec.as_mut().unwrap());
        vm
    }

    /// Makes a VM and does not start it.
    pub async fn define(&self, name: &str, options: &str) -> v1::Vm {
        self.create(self.manifest(name, options)).await.unwrap()
    }

    pub async fn create_as(
        &self,
        vm: v1::Vm,
        start: bool,
        dry_run: bool,
    ) -> Result<v1::CreateVmResponse, Status> {
        let request = v1::CreateVmRequest {
            vm: Some(vm),
            start,
            dry_run,
            ..Default::default()
        };
        Ok(self.client().create_vm(request).await?.into_inner())
    }

    /// Gives a VM this manifest.
    pub async fn replace(&self, vm: v1::Vm) -> Result<v1::Vm, Status> {
        let request = v1::UpdateVmRequest {
            vm: Some(vm),
            ..Default::default()
        };
        Ok(self.client().update_vm(request).await?.into_inner().vm.unwrap())
    }

    /// Asks a VM to start and does not wait; returns the operation.
    pub async fn start_without_wait(&self, name: &str) -> v1::Operation {
        let request = v1::StartVmRequest {
            name: name.into(),
            no_wait: true,
            ..Default::default()
        };
        let begun = self.client().start_vm(request).await.unwrap().into_inner();
        begun.operation.unwrap()
    }

    /// Asks a VM to restart and does not wait; returns the operation.
    pub async fn begin_restart(&self, name: &str) -> v1::Operation {
        let request = v1::RestartVmRequest {
            name: name.into(),
            no_wait: true,
            ..Default::default()
        };
        let begun = self.client().restart_vm(request).await.unwrap().into_inner();
        begun.operation.unwrap()
    }

    pub async fn restart(&self, name: &str, force: bool) -> Result<v1::Vm, Status> {
        let request = v1::RestartVmRequest {
            name: name.into(),
            force,
            ..Default::default()
        };
        Ok(self.client().restart_vm(request).await?.into_inner().vm.unwrap())
    }

    /// Asks a VM to stop and does not wait; returns the operation.
    pub async fn begin_stop(&self, name: &str, force: bool) -> v1::Operation {
        let request = v1::StopVmRequest {
            name: name.into(),
            force,
            no_wait: true,
            ..Default::default()
        };
        let begun = self.client().stop_vm(request).await.unwrap().into_inner();
        begun.operation.unwrap()
    }

    pub async fn phase(&self, name: &str) -> VmPhase {
        status(&self.get(name).await.unwrap()).phase()
    }

    /// Names of all VMs.
    pub async fn names(&self) -> Vec<String> {
        let vms = self.list().await.into_iter();
        vms.map(|vm| vm.metadata.unwrap().name).collect()
    }

    /// Waits until the daemon has control of the `vmm`.
    pub async fn wait_ready(&self, name: &str) -> v1::VmStatus {
        let ready = |status: &v1::VmStatus| status.conditions[0].status() == ConditionStatus::True;
        self.wait(name, ready).await
    }

    pub async fn wait_disk(&self, vm: &str, disk: &str, phase: AttachmentPhase) -> v1::VmStatus {
        let reached = |status: &v1::VmStatus| crate::attach::phase(status, disk) == Some(phase);
        self.wait(vm, reached).await
    }

    /// Waits until no process of a VM or helper is left.
    pub async fn wait_no_processes(&self) {
        within(async || self.vmm_processes().is_empty().then_some(())).await;
    }

    /// Waits for the first process of a VM or helper.
    pub async fn wait_process(&self) {
        within(async || (!self.vmm_processes().is_empty()).then_some(())).await;
    }

    pub async fn node(&self) -> v1::Node {
        let answer = self.nodes().await.get_node(v1::GetNodeRequest {}).await;
        answer.unwrap().into_inner().node.unwrap()
    }

    pub async fn cordon(&self, reason: &str) -> v1::Node {
        let request = v1::CordonNodeRequest {
            reason: reason.into(),
            ..Default::default()
        };
        let answer = self.nodes().await.cordon_node(request).await.unwrap();
        answer.into_inner().node.unwrap()
    }

    pub async fn uncordon(&self) -> Result<v1::Node, Status> {
        let request = v1::UncordonNodeRequest::default();
        let answer = self.nodes().await.uncordon_node(request).await?;
        Ok(answer.into_inner().node.unwrap())
    }

    pub async fn operations(&self) -> OperationServiceClient<Channel> {
        OperationServiceClient::new(connect(self.folder.path()).await)
    }

    pub async fn operation(&self, id: &str) -> v1::Operation {
        let request = v1::GetOperationRequest { id: id.into() };
        let response = self.operations().await.get_operation(request).await;
        response.unwrap().into_inner().operation.unwrap()
    }

    pub async fn cancel(&self, id: &str) -> Result<v1::Operation, Status> {
        let request = v1::CancelOperationRequest { id: id.into() };
        let response = self.operations().await.cancel_operation(request).await?;
        Ok(response.into_inner().operation.unwrap())
    }

    /// The operation when it has ended.
    pub async fn ended(&self, operation: &v1::Operation) -> v1::Operation {
        within(async || {
            let now = self.operation(&operation.id).await;
            let ended = !matches!(now.phase(), OperationPhase::Pending | OperationPhase::InProgress);
            ended.then_some(now)
        })
        .await
    }

    pub async fn completes(&self, operation: &v1::Operation) -> v1::Operation {
        let ended = self.ended(operation).await;
        assert_eq!(ended.phase(), OperationPhase::Completed, "{ended:?}");
        ended
    }

    pub async fn fails(&self, operation: &v1::Operation) -> v1::Operation {
        let ended = self.ended(operation).await;
        assert_eq!(ended.phase(), OperationPhase::Failed, "{ended:?}");
        ended
    }

    /// Has the daemon wait, or fail, where it comes to this fault.
    pub fn fault(&self, name: &str) {
        fs::create_dir_all(self.path("run/fault")).unwrap();
        fs::write(self.path("run/fault").join(name), "").unwrap();
    }

    /// Waits until the daemon has come to a fault.
    pub async fn reached(&self, fault: &str) {
        let reached = self.path("run/fault").join(fault).with_extension("reached");
        within(async || reached.exists().then_some(())).await;
    }

    /// Lets the daemon continue at a fault.
    pub fn release(&self, fault: &str) {
        fs::remove_file(self.path("run/fault").join(fault)).unwrap();
    }
}

/// How the last run ended.
pub fn exit_reason(vm: &v1::Vm) -> ExitReason {
    status(vm).last_exit.as_ref().unwrap().reason()
}

/// The condition of this type.
pub fn condition<'a>(status: &'a v1::VmStatus, kind: &str) -> &'a v1::Condition {
    let mut conditions = status.conditions.iter();
    conditions.find(|condition| condition.r#type == kind).unwrap()
}

/// Paths of the fields that a refusal names.
pub fn fields(status: &Status) -> Vec<String> {
    let details = status.get_error_details();
    let bad = details
        .bad_request()
        .unwrap_or_else(|| panic!("no fields in {status:?}"));
    let violations = bad.field_violations.iter();
    violations.map(|violation| violation.field.clone()).collect()
}

/// A raw disk in a file.
pub fn raw_file(name: &str, path: &Path) -> v1::DiskSpec {
    v1::DiskSpec {
        name: name.into(),
        source: Some(v1::disk_spec::Source::Path(path.to_str().unwrap().into())),
        format: v1::DiskFormat::Raw.into(),
        ..Default::default()
    }
}

/// Polls until the awaited state, for states that no watch reports.
pub async fn within<T>(poll: impl AsyncFnMut() -> Option<T>) -> T {
    within_seconds(30, poll).await
}

/// The same for what takes its time.
pub async fn within_seconds<T>(seconds: u64, mut poll: impl AsyncFnMut() -> Option<T>) -> T {
    tokio::time::timeout(Duration::from_secs(seconds), async {
        loop {
            if let Some(found) = poll().await {
                return found;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    })
    .await
    .expect("it did not come to that")
}
