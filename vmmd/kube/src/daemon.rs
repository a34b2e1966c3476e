//! The local vmmd: its connection, and how its refusals are read.

use std::{io, path::PathBuf, time::Duration};

use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tonic::{
    Code, Status,
    codegen::http::Uri,
    transport::{Channel, Endpoint},
};
use tonic_types::StatusExt as _;
use vmmd_api::v1::{
    self, disk_service_client::DiskServiceClient, event_service_client::EventServiceClient,
    image_service_client::ImageServiceClient, migration_service_client::MigrationServiceClient,
    node_service_client::NodeServiceClient, operation_service_client::OperationServiceClient,
    pod_service_client::PodServiceClient, vm_service_client::VmServiceClient,
};

use crate::names;

/// How long a connection may take.
const CONNECT: Duration = Duration::from_secs(5);
/// How long a call may take that waits for no guest.
pub const CALL: Duration = Duration::from_secs(60);

/// The local vmmd. Its connection is made when it is needed, and again when it was lost.
#[derive(Clone, Debug)]
pub struct Daemon {
    /// Its VMs.
    pub vms: VmServiceClient<Channel>,
    /// Its node.
    pub nodes: NodeServiceClient<Channel>,
    /// What happens there.
    pub events: EventServiceClient<Channel>,
    /// Its disks.
    pub disks: DiskServiceClient<Channel>,
    /// Its migrations.
    pub migrations: MigrationServiceClient<Channel>,
    /// Its images.
    pub images: ImageServiceClient<Channel>,
    /// Its operations.
    operations: OperationServiceClient<Channel>,
    /// Pods whose launchers are connected to it.
    pub pods: PodServiceClient<Channel>,
}

impl Daemon {
    /// The one that listens on this socket.
    pub fn new(socket: PathBuf) -> Self {
        let connector = tower::service_fn(move |_: Uri| {
            let socket = socket.clone();
            async move { Ok::<_, io::Error>(TokioIo::new(UnixStream::connect(socket).await?)) }
        });
        // The address is not used: the connector knows where to go.
        let endpoint = Endpoint::from_static("http://vmmd").connect_timeout(CONNECT);
        let channel = endpoint.connect_with_connector_lazy(connector);
        Self {
            vms: VmServiceClient::new(channel.clone()),
            nodes: NodeServiceClient::new(channel.clone()),
            events: EventServiceClient::new(channel.clone()),
            disks: DiskServiceClient::new(channel.clone()),
            migrations: MigrationServiceClient::new(channel.clone()),
            images: ImageServiceClient::new(channel.clone()),
            operations: OperationServiceClient::new(channel.clone()),
            pods: PodServiceClient::new(channel),
        }
    }

    /// The VM with this name, when there is one.
    ///
    /// # Errors
    ///
    /// Everything but that there is none.
    pub async fn vm(&self, name: &str) -> Result<Option<v1::Vm>, Status> {
        let request = v1::GetVmRequest {
            name: name.to_owned(),
        };
        let answer = within(CALL, self.vms.clone().get_vm(request)).await;
        Ok(there(answer)?.and_then(|answer| answer.vm))
    }

    /// The disk with this name, when there is one.
    ///
    /// # Errors
    ///
    /// Everything but that there is none.
    pub async fn disk(&self, name: &str) -> Result<Option<v1::Disk>, Status> {
        let request = v1::GetDiskRequest {
            name: name.to_owned(),
        };
        let answer = within(CALL, self.disks.clone().get_disk(request)).await;
        Ok(there(answer)?.and_then(|answer| answer.disk))
    }

    /// The image with this name, when there is one.
    ///
    /// # Errors
    ///
    /// Everything but that there is none.
    pub async fn image(&self, name: &str) -> Result<Option<v1::Image>, Status> {
        let request = v1::GetImageRequest {
            name: name.to_owned(),
        };
        let answer = within(CALL, self.images.clone().get_image(request)).await;
        Ok(there(answer)?.and_then(|answer| answer.image))
    }

    /// The operation with this id, while it is known.
    ///
    /// # Errors
    ///
    /// Everything but that it is not known.
    pub async fn operation(&self, id: &str) -> Result<Option<v1::Operation>, Status> {
        let request = v1::GetOperationRequest { id: id.to_owned() };
        let answer = within(CALL, self.operations.clone().get_operation(request)).await;
        Ok(there(answer)?.and_then(|answer| answer.operation))
    }
}

/// `None` when there is no such thing.
fn there<T>(answer: Result<T, Status>) -> Result<Option<T>, Status> {
    match answer {
        Ok(answer) => Ok(Some(answer)),
        Err(status) if status.code() == Code::NotFound => Ok(None),
        Err(status) => Err(status),
    }
}

/// Waits for an answer that long.
///
/// # Errors
///
/// As the call has, and DEADLINE_EXCEEDED.
pub async fn within<T>(
    limit: Duration,
    call: impl Future<Output = Result<tonic::Response<T>, Status>>,
) -> Result<T, Status> {
    match tokio::time::timeout(limit, call).await {
        Ok(answer) => Ok(answer?.into_inner()),
        Err(_) => Err(Status::deadline_exceeded("vmmd does not answer")),
    }
}

/// Whether vmmd has refused a request, for good as far as this node is concerned: nothing was done, and the same request would be
/// refused again.
pub fn refused(status: &Status) -> bool {
    matches!(
        status.code(),
        Code::InvalidArgument
            | Code::FailedPrecondition
            | Code::NotFound
            | Code::OutOfRange
            | Code::PermissionDenied
            | Code::ResourceExhausted
            | Code::Unimplemented
    )
}

/// One CamelCase word and a text for people, with the fields that are wrong as a VirtualMachine calls them.
pub fn explain(status: &Status) -> (String, String) {
    let details = status.get_error_details();
    let reason = details.error_info().map(|info| camel(&info.reason));
    let fields = details.bad_request().map(|bad| {
        let fields = bad.field_violations.iter().map(|violation| {
            let field = violation
                .field
                .strip_prefix("spec")
                .map_or_else(|| violation.field.clone(), |rest| format!("spec.vm{rest}"));
            format!("{field}: {}", violation.description)
        });
        fields.collect::<Vec<_>>().join("; ")
    });
    let message = fields.filter(|text| !text.is_empty());
    (
        reason
            .filter(|word| !word.is_empty())
            .unwrap_or_else(|| "Refused".to_owned()),
        message.unwrap_or_else(|| status.message().to_owned()),
    )
}

/// `NODE_CORDONED` as `NodeCordoned`.
pub fn camel(word: &str) -> String {
    let parts = word.split('_').filter(|part| !part.is_empty());
    parts
        .map(|part| {
            let (first, rest) = part.split_at_checked(1).unwrap_or((part, ""));
            first.to_uppercase() + &rest.to_lowercase()
        })
        .collect()
}

/// The pod that a VM was made for.
pub fn pod_uid(vm: &v1::Vm) -> Option<&String> {
    vm.metadata.as_ref()?.labels.get(names::POD_UID)
}

/// The pod whose launcher has a VM.
pub fn launcher_uid(vm: &v1::Vm) -> Option<&String> {
    Some(&vm.spec.as_ref()?.pod.as_ref()?.uid)
}

/// A VM's name.
pub fn name(vm: &v1::Vm) -> String {
    vm.metadata
        .as_ref()
        .map(|metadata| metadata.name.clone())
        .unwrap_or_default()
}

/// Preconditions for exactly the VM that was seen, not for a later VM with the same name.
pub fn same(vm: &v1::Vm) -> v1::Preconditions {
    v1::Preconditions {
        uid: vm
            .metadata
            .as_ref()
            .map(|metadata| metadata.uid.clone())
            .unwrap_or_default(),
        generation: None,
    }
}

#[cfg(test)]
mod tests {
    use tonic_types::{ErrorDetails, StatusExt as _};

    use super::*;

    #[test]
    fn a_refusal_names_the_field_as_the_virtual_machine_calls_it() {
        let mut details =
            ErrorDetails::with_bad_request_violation("spec.disks[0].path", "there is no such file");
        details.set_error_info("INVALID_FIELDS", "vmmd", std::collections::HashMap::new());
        let status = Status::with_error_details(Code::InvalidArgument, "the VM is not valid", details);
        let wanted = ("InvalidFields", "spec.vm.disks[0].path: there is no such file");
        let (reason, message) = explain(&status);
        assert_eq!((&*reason, &*message), wanted);
        let plain = explain(&Status::resource_exhausted("no memory"));
        assert_eq!(plain, ("Refused".to_owned(), "no memory".to_owned()));
    }

    #[test]
    fn what_may_have_been_done_is_not_refused() {
        for code in [
            Code::Unavailable,
            Code::DeadlineExceeded,
            Code::Cancelled,
            Code::Unknown,
            Code::Internal,
            Code::Aborted,
        ] {
            assert!(!refused(&Status::new(code, "")), "{code}");
        }
        assert!(refused(&Status::invalid_argument("")));
    }
}
