//! `vmmd.v1.VmService`.

mod kind;

use std::{sync::Arc, time::Duration};

use tonic::{Request, Response, Status, Streaming};
use vmmd_api::v1::{self, vm_service_server::VmService};
use vmmd_host::failure::Failure;
use vmmd_objects::{
    context::Initiator,
    request::{once, to_completion},
};

use super::{
    ask::Asked,
    channel, console, exec,
    filter::Filter,
    guest_file, logs,
    mask::Mask,
    objects::{Stream, Wanted, get, list, watch},
    period::{grace, period, timeout},
    port_forward, update, vnc, vsock,
};
use crate::{
    auth::Caller,
    guest::{self, Agent},
    host::Host,
    registry::vms::{
        Entry, VmKind,
        command::{self, Command, DiskRequest},
    },
    stats, vm,
};

/// How long the guest may take to eject a disk when nothing is given.
const DEFAULT_EJECT: Duration = Duration::from_secs(30);

/// The service.
#[derive(Debug)]
pub struct Vms {
    pub(super) host: Arc<Host>,
}

impl Vms {
    /// Over the VMs of `host`.
    pub fn new(host: Arc<Host>) -> Self {
        Self { host }
    }

    pub(super) fn find(&self, name: &str) -> Result<Entry, Failure> {
        self.host.vms.get(name).ok_or_else(|| Failure::no_vm(name))
    }
}

/// Name of the caller.
fn who<T>(request: &Request<T>) -> String {
    let caller = request.extensions().get::<Arc<Caller>>();
    caller.map_or_else(String::new, |caller| caller.initiator.to_string())
}

#[tonic::async_trait]
impl VmService for Vms {
    async fn create_vm(
        &self,
        request: Request<v1::CreateVmRequest>,
    ) -> Result<Response<v1::CreateVmResponse>, Status> {
        once(&self.host, request, |host, request, context| async move {
            let v1::CreateVmRequest {
                vm, start, dry_run, ..
            } = request;
            let vm = vm.ok_or_else(|| Failure::field("vm", "must be given"))?;
            // In a task of its own: a caller that goes away must not leave it half done.
            let create = async move { vm::create(host, vm, start, dry_run, &context).await };
            let (vm, operation) = to_completion(create).await?;
            Ok(v1::CreateVmResponse {
                vm: Some(vm.as_ref().clone()),
                operation,
            })
        })
        .await
    }

    async fn get_vm(
        &self,
        request: Request<v1::GetVmRequest>,
    ) -> Result<Response<v1::GetVmResponse>, Status> {
        let vm = get::<VmKind>(&self.host, &request.get_ref().name).await?;
        Ok(Response::new(v1::GetVmResponse { vm: Some(vm) }))
    }

    async fn list_vms(
        &self,
        request: Request<v1::ListVmsRequest>,
    ) -> Result<Response<v1::ListVmsResponse>, Status> {
        let request = request.get_ref();
        let wanted = Wanted {
            filter: Filter::new(request.filter.as_ref(), "")?,
            mask: Mask::new(&request.fields)?,
            page_size: request.page_size,
            page_token: &request.page_token,
        };
        let page = list::<VmKind>(&self.host, wanted).await?;
        Ok(Response::new(v1::ListVmsResponse {
            vms: page.objects,
            next_page_token: page.next_page_token,
            cursor: page.cursor,
        }))
    }

    type WatchVmsStream = Stream<VmKind>;

    async fn watch_vms(
        &self,
        request: Request<v1::WatchVmsRequest>,
    ) -> Result<Response<Self::WatchVmsStream>, Status> {
        let request = request.get_ref();
        let filter = Filter::new(request.filter.as_ref(), &request.name)?;
        let mask = Mask::new(&request.fields)?;
        let stream = watch::<VmKind>(&self.host, filter, mask, &request.cursor)?;
        Ok(Response::new(stream))
    }

    async fn delete_vm(
        &self,
        request: Request<v1::DeleteVmRequest>,
    ) -> Result<Response<v1::DeleteVmResponse>, Status> {
        once(&self.host, request, |host, request, context| async move {
            let force = request.force;
            let asked = Asked {
                deadline: timeout(request.timeout)?,
                ..Asked::new(command::Request::Delete { force }, context)
            };
            let (_, operation) = Self::new(host).ask(&request.name, asked, request.no_wait).await?;
            Ok(v1::DeleteVmResponse { operation })
        })
        .await
    }

    async fn start_vm(
        &self,
        request: Request<v1::StartVmRequest>,
    ) -> Result<Response<v1::StartVmResponse>, Status> {
        once(&self.host, request, |host, request, context| async move {
            let asked = Asked {
                deadline: timeout(request.timeout)?,
                reset_nvram: request.reset_nvram,
                ..Asked::new(command::Request::Start, context)
            };
            let (vm, operation) = Self::new(host).ask(&request.name, asked, request.no_wait).await?;
            Ok(v1::StartVmResponse {
                vm: Some(vm),
                operation,
            })
        })
        .await
    }

    async fn stop_vm(
        &self,
        request: Request<v1::StopVmRequest>,
    ) -> Result<Response<v1::StopVmResponse>, Status> {
        once(&self.host, request, |host, request, context| async move {
            let asked = Asked {
                grace: grace(request.grace_period, request.force)?,
                deadline: timeout(request.timeout)?,
                evacuate: request.evacuate,
                ..Asked::new(command::Request::Stop, context)
            };
            let (vm, operation) = Self::new(host).ask(&request.name, asked, request.no_wait).await?;
            Ok(v1::StopVmResponse {
                vm: Some(vm),
                operation,
            })
        })
        .await
    }

    async fn restart_vm(
        &self,
        request: Request<v1::RestartVmRequest>,
    ) -> Result<Response<v1::RestartVmResponse>, Status> {
        once(&self.host, request, |host, request, context| async move {
            let asked = Asked {
                grace: grace(request.grace_period, request.force)?,
                deadline: timeout(request.timeout)?,
                ..Asked::new(command::Request::Restart, context)
            };
            let (vm, operation) = Self::new(host).ask(&request.name, asked, request.no_wait).await?;
            Ok(v1::RestartVmResponse {
                vm: Some(vm),
                operation,
            })
        })
        .await
    }

    async fn reset_vm(
        &self,
        request: Request<v1::ResetVmRequest>,
    ) -> Result<Response<v1::ResetVmResponse>, Status> {
        once(&self.host, request, |host, request, context| async move {
            let asked = Asked::new(command::Request::Reset, context);
            let (vm, _) = Self::new(host).ask(&request.name, asked, false).await?;
            Ok(v1::ResetVmResponse { vm: Some(vm) })
        })
        .await
    }

    async fn inject_nmi(
        &self,
        request: Request<v1::InjectNmiRequest>,
    ) -> Result<Response<v1::InjectNmiResponse>, Status> {
        once(&self.host, request, |host, request, context| async move {
            let asked = Asked::new(command::Request::Nmi, context);
            let (vm, _) = Self::new(host).ask(&request.name, asked, false).await?;
            Ok(v1::InjectNmiResponse { vm: Some(vm) })
        })
        .await
    }

    async fn pause_vm(
        &self,
        request: Request<v1::PauseVmRequest>,
    ) -> Result<Response<v1::PauseVmResponse>, Status> {
        once(&self.host, request, |host, request, context| async move {
            let asked = Asked::new(command::Request::Pause, context);
            let (vm, _) = Self::new(host).ask(&request.name, asked, false).await?;
            Ok(v1::PauseVmResponse { vm: Some(vm) })
        })
        .await
    }

    async fn resume_vm(
        &self,
        request: Request<v1::ResumeVmRequest>,
    ) -> Result<Response<v1::ResumeVmResponse>, Status> {
        once(&self.host, request, |host, request, context| async move {
            let asked = Asked::new(command::Request::Resume, context);
            let (vm, _) = Self::new(host).ask(&request.name, asked, false).await?;
            Ok(v1::ResumeVmResponse { vm: Some(vm) })
        })
        .await
    }

    async fn attach_disk(
        &self,
        request: Request<v1::AttachDiskRequest>,
    ) -> Result<Response<v1::AttachDiskResponse>, Status> {
        once(&self.host, request, |host, request, context| async move {
            let v1::AttachDiskRequest { vm, disk, .. } = request;
            let disk = disk.ok_or_else(|| Failure::field("disk", "must be given"))?;
            let vm = Self::new(host)
                .ask_disk(context, &vm, DiskRequest::Attach(disk))
                .await?;
            Ok(v1::AttachDiskResponse { vm: Some(vm) })
        })
        .await
    }

    async fn detach_disk(
        &self,
        request: Request<v1::DetachDiskRequest>,
    ) -> Result<Response<v1::DetachDiskResponse>, Status> {
        once(&self.host, request, |host, request, context| async move {
            let v1::DetachDiskRequest {
                vm,
                disk,
                timeout,
                force,
                ..
            } = request;
            let timeout = period("timeout", timeout)?.unwrap_or(DEFAULT_EJECT);
            let request = DiskRequest::Detach { disk, timeout, force };
            let vm = Self::new(host).ask_disk(context, &vm, request).await?;
            Ok(v1::DetachDiskResponse { vm: Some(vm) })
        })
        .await
    }

    async fn resize_vm_disk(
        &self,
        request: Request<v1::ResizeVmDiskRequest>,
    ) -> Result<Response<v1::ResizeVmDiskResponse>, Status> {
        once(&self.host, request, |host, request, context| async move {
            let v1::ResizeVmDiskRequest {
                vm, disk, size_bytes, ..
            } = request;
            let request = DiskRequest::Resize {
                disk,
                size: size_bytes.unwrap_or_default(),
            };
            let vm = Self::new(host).ask_disk(context, &vm, request).await?;
            Ok(v1::ResizeVmDiskResponse { vm: Some(vm) })
        })
        .await
    }

    async fn get_vm_disk_stats(
        &self,
        request: Request<v1::GetVmDiskStatsRequest>,
    ) -> Result<Response<v1::GetVmDiskStatsResponse>, Status> {
        let name = &request.get_ref().vm;
        let disks = stats::of(&self.host, name, &self.find(name)?).await?.disks;
        Ok(Response::new(v1::GetVmDiskStatsResponse { disks }))
    }

    async fn update_vm(
        &self,
        request: Request<v1::UpdateVmRequest>,
    ) -> Result<Response<v1::UpdateVmResponse>, Status> {
        update::permit(&request)?;
        once(&self.host, request, |host, request, context| async move {
            let no_wait = request.no_wait;
            let (name, update) = update::parse(&host, request, context)?;
            let vms = Self::new(Arc::clone(&host));
            let command = |reply| Command::Update { update, reply };
            let (vm, operation) = vms.operate(&name, command, no_wait).await?;
            Ok(v1::UpdateVmResponse {
                vm: Some(vm),
                operation,
            })
        })
        .await
    }

    async fn get_vm_stats(
        &self,
        request: Request<v1::GetVmStatsRequest>,
    ) -> Result<Response<v1::GetVmStatsResponse>, Status> {
        let name = &request.get_ref().name;
        let stats = Some(stats::of(&self.host, name, &self.find(name)?).await?);
        Ok(Response::new(v1::GetVmStatsResponse { stats }))
    }

    type GetVmLogsStream = logs::Stream;

    async fn get_vm_logs(
        &self,
        request: Request<v1::GetVmLogsRequest>,
    ) -> Result<Response<Self::GetVmLogsStream>, Status> {
        let entry = self.find(&request.get_ref().name)?;
        let stream = logs::open(&self.host, entry.uid, request.get_ref()).await?;
        Ok(Response::new(stream))
    }

    type ConsoleStream = console::Stream;

    async fn console(
        &self,
        request: Request<Streaming<v1::ConsoleRequest>>,
    ) -> Result<Response<Self::ConsoleStream>, Status> {
        let who = who(&request);
        Ok(Response::new(
            console::open(Arc::clone(&self.host), request.into_inner(), &who).await?,
        ))
    }

    type VncStream = vnc::Stream;

    async fn vnc(
        &self,
        request: Request<Streaming<v1::VncRequest>>,
    ) -> Result<Response<Self::VncStream>, Status> {
        Ok(Response::new(
            vnc::open(Arc::clone(&self.host), request.into_inner()).await?,
        ))
    }

    async fn create_vnc_ticket(
        &self,
        request: Request<v1::CreateVncTicketRequest>,
    ) -> Result<Response<v1::CreateVncTicketResponse>, Status> {
        let who = request
            .extensions()
            .get::<Initiator>()
            .cloned()
            .unwrap_or_default();
        Ok(Response::new(vnc::ticket(&self.host, request.get_ref(), who)?))
    }

    type PortForwardStream = port_forward::Stream;

    async fn port_forward(
        &self,
        request: Request<Streaming<v1::PortForwardRequest>>,
    ) -> Result<Response<Self::PortForwardStream>, Status> {
        Ok(Response::new(
            port_forward::open(Arc::clone(&self.host), request.into_inner()).await?,
        ))
    }

    type ConnectChannelStream = channel::Stream;

    async fn connect_channel(
        &self,
        request: Request<Streaming<v1::ConnectChannelRequest>>,
    ) -> Result<Response<Self::ConnectChannelStream>, Status> {
        Ok(Response::new(
            channel::open(Arc::clone(&self.host), request.into_inner()).await?,
        ))
    }

    type ConnectVsockStream = vsock::Stream;

    async fn connect_vsock(
        &self,
        request: Request<Streaming<v1::ConnectVsockRequest>>,
    ) -> Result<Response<Self::ConnectVsockStream>, Status> {
        Ok(Response::new(
            vsock::open(Arc::clone(&self.host), request.into_inner()).await?,
        ))
    }

    async fn get_guest_info(
        &self,
        request: Request<v1::GetGuestInfoRequest>,
    ) -> Result<Response<v1::GetGuestInfoResponse>, Status> {
        let entry = self.find(&request.get_ref().name)?;
        let guest = Some(guest::look(&self.host, &entry).await?);
        Ok(Response::new(v1::GetGuestInfoResponse { guest }))
    }

    async fn set_guest_password(
        &self,
        request: Request<v1::SetGuestPasswordRequest>,
    ) -> Result<Response<v1::SetGuestPasswordResponse>, Status> {
        let entry = self.find(&request.get_ref().name)?;
        let agent = Agent::of(&self.host, &entry)?;
        agent.set_password(request.get_ref()).await?;
        Ok(Response::new(v1::SetGuestPasswordResponse {}))
    }

    async fn list_guest_ssh_keys(
        &self,
        request: Request<v1::ListGuestSshKeysRequest>,
    ) -> Result<Response<v1::ListGuestSshKeysResponse>, Status> {
        let entry = self.find(&request.get_ref().name)?;
        let agent = Agent::of(&self.host, &entry)?;
        let keys = agent.ssh_keys(&request.get_ref().user).await?;
        Ok(Response::new(v1::ListGuestSshKeysResponse { keys }))
    }

    async fn update_guest_ssh_keys(
        &self,
        request: Request<v1::UpdateGuestSshKeysRequest>,
    ) -> Result<Response<v1::UpdateGuestSshKeysResponse>, Status> {
        let entry = self.find(&request.get_ref().name)?;
        let agent = Agent::of(&self.host, &entry)?;
        agent.change_ssh_keys(request.get_ref()).await?;
        Ok(Response::new(v1::UpdateGuestSshKeysResponse {}))
    }

    type ReadGuestFileStream = guest_file::Stream;

    async fn read_guest_file(
        &self,
        request: Request<v1::ReadGuestFileRequest>,
    ) -> Result<Response<Self::ReadGuestFileStream>, Status> {
        let entry = self.find(&request.get_ref().name)?;
        let stream = guest_file::read(Arc::clone(&self.host), entry, request.into_inner()).await?;
        Ok(Response::new(stream))
    }

    async fn write_guest_file(
        &self,
        request: Request<Streaming<v1::WriteGuestFileRequest>>,
    ) -> Result<Response<v1::WriteGuestFileResponse>, Status> {
        use v1::write_guest_file_request::Message;
        let mut messages = request.into_inner();
        let first = messages.message().await?.and_then(|first| first.message);
        let Some(Message::Open(open)) = first else {
            return Err(Failure::field("open", "must be the first message").into());
        };
        let entry = self.find(&open.name)?;
        let written = guest_file::write(Arc::clone(&self.host), entry, open.path, messages).await?;
        Ok(Response::new(written))
    }

    type ExecVmStream = exec::Stream;

    async fn exec_vm(
        &self,
        request: Request<Streaming<v1::ExecVmRequest>>,
    ) -> Result<Response<Self::ExecVmStream>, Status> {
        Ok(Response::new(
            exec::open(Arc::clone(&self.host), request.into_inner()).await?,
        ))
    }
}
