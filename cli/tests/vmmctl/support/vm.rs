//! The daemon's part that is about VMs.

use tokio_stream::StreamExt as _;
use tonic::{Code, Request, Response, Status, Streaming};
use tonic_types::{ErrorDetails, StatusExt as _};
use vmmd_api::v1::{
    self, VmPhase, WatchEventType, console_request, console_response, vm_service_server::VmService,
};

use super::{Answer, Events, State, lock, matches, refusal};

#[tonic::async_trait]
impl VmService for State {
    async fn create_vm(&self, request: Request<v1::CreateVmRequest>) -> Answer<v1::CreateVmResponse> {
        self.once(request.get_ref())?;
        let v1::CreateVmRequest {
            vm, start, dry_run, ..
        } = request.into_inner();
        let mut vm = vm.unwrap();
        let name = vm.metadata.as_ref().unwrap().name.clone();
        self.called(format!("create {name} start={start} dry_run={dry_run}"));
        for (index, disk) in vm.spec.as_ref().unwrap().disks.iter().enumerate() {
            if disk.path().starts_with("/missing") {
                let details = ErrorDetails::with_bad_request_violation(
                    format!("spec.disks[{index}].path"),
                    "there is no such file",
                );
                return Err(Status::with_error_details(
                    Code::InvalidArgument,
                    "the VM is not valid",
                    details,
                ));
            }
        }
        for (index, share) in vm.spec.as_ref().unwrap().shares.iter().enumerate() {
            if share.path == "/root" {
                let details = ErrorDetails::with_bad_request_violation(
                    format!("spec.shares[{index}]"),
                    "only root may share it",
                );
                let message = "spec.disks[0].disk: there is no such disk; only root may share it";
                return Err(Status::with_error_details(
                    Code::FailedPrecondition,
                    message,
                    details,
                ));
            }
        }
        for disk in &vm.spec.as_ref().unwrap().disks {
            if let Some(v1::disk_spec::Source::Disk(disk)) = &disk.source
                && self.disk(disk).is_none()
            {
                let message = format!("there is no disk \"{disk}\" on this node");
                return Err(refusal(Code::FailedPrecondition, "DISK_NOT_FOUND", message));
            }
        }
        if lock(&self.vms).contains_key(&name) {
            let message = format!("there is a VM \"{name}\" already");
            return Err(refusal(Code::AlreadyExists, "VM_EXISTS", message));
        }
        for nic in &mut vm.spec.as_mut().unwrap().nics {
            nic.mac = "52:54:00:00:00:01".into();
        }
        let phase = if start { VmPhase::Running } else { VmPhase::Stopped };
        let metadata = vm.metadata.as_mut().unwrap();
        (metadata.uid, metadata.generation) = ("7b5ba9f5-6ad1-4d56-8e35-6bd3ba9d1ef8".into(), 1);
        vm.status = Some(v1::VmStatus {
            phase: phase.into(),
            ..v1::VmStatus::default()
        });
        if !dry_run {
            lock(&self.vms).insert(name, vm.clone());
        }
        Ok(Response::new(v1::CreateVmResponse {
            vm: Some(vm),
            ..Default::default()
        }))
    }

    async fn get_vm(&self, request: Request<v1::GetVmRequest>) -> Answer<v1::GetVmResponse> {
        let vm = Some(self.find(&request.get_ref().name)?);
        Ok(Response::new(v1::GetVmResponse { vm }))
    }

    /// Two on a page.
    async fn list_vms(&self, request: Request<v1::ListVmsRequest>) -> Answer<v1::ListVmsResponse> {
        let v1::ListVmsRequest {
            filter, page_token, ..
        } = request.into_inner();
        let filter = filter.unwrap_or_default();
        let vms = lock(&self.vms);
        let wanted = vms
            .iter()
            .filter(|(name, vm)| **name > page_token && matches(&filter, vm));
        let wanted: Vec<_> = wanted.map(|(_, vm)| vm.clone()).collect();
        let more = wanted.len() > 2;
        let vms: Vec<_> = wanted.into_iter().take(2).collect();
        let last = vms.last().and_then(|vm| vm.metadata.clone()).filter(|_| more);
        Ok(Response::new(v1::ListVmsResponse {
            vms,
            next_page_token: last.map(|last| last.name).unwrap_or_default(),
            ..Default::default()
        }))
    }

    type WatchVmsStream = Events<v1::WatchVmsResponse>;

    async fn watch_vms(&self, request: Request<v1::WatchVmsRequest>) -> Answer<Self::WatchVmsStream> {
        let request = request.into_inner();
        let filter = request.filter.unwrap_or_default();
        if !request.cursor.is_empty() {
            self.called(format!("watch from {}", request.cursor));
        }
        let mut changes = self.changes.subscribe();
        let added = |vm: v1::Vm| v1::WatchVmsResponse {
            r#type: WatchEventType::Added.into(),
            vm: Some(vm),
            ..Default::default()
        };
        let mut first: Vec<_> = lock(&self.vms).values().cloned().map(added).collect();
        first.push(v1::WatchVmsResponse {
            r#type: WatchEventType::Synced.into(),
            vm: None,
            ..Default::default()
        });
        let wanted =
            move |event: &v1::WatchVmsResponse| event.vm.as_ref().is_none_or(|vm| matches(&filter, vm));
        let (send, receive) = tokio::sync::mpsc::channel(64);
        tokio::spawn(async move {
            for event in first.into_iter().filter(&wanted) {
                let _ = send.send(Ok(event)).await;
            }
            while let Ok(event) = changes.recv().await {
                if wanted(&event) && send.send(Ok(event)).await.is_err() {
                    break;
                }
            }
        });
        Ok(Response::new(Box::pin(
            tokio_stream::wrappers::ReceiverStream::new(receive),
        )))
    }

    async fn delete_vm(&self, request: Request<v1::DeleteVmRequest>) -> Answer<v1::DeleteVmResponse> {
        self.once(request.get_ref())?;
        let v1::DeleteVmRequest { name, force, .. } = request.into_inner();
        self.called(format!("delete {name} force={force}"));
        if !force {
            self.change(&name, &[VmPhase::Stopped, VmPhase::Failed], VmPhase::Terminating)?;
        }
        self.find(&name)?;
        lock(&self.vms).remove(&name);
        Ok(Response::new(v1::DeleteVmResponse { ..Default::default() }))
    }

    async fn start_vm(&self, request: Request<v1::StartVmRequest>) -> Answer<v1::StartVmResponse> {
        self.once(request.get_ref())?;
        let v1::StartVmRequest {
            name,
            request_id,
            timeout,
            ..
        } = request.into_inner();
        assert!(!request_id.is_empty(), "each request has an id");
        let timeout = timeout.map(|timeout| format!(" timeout={}", timeout.seconds));
        if name == "endless" {
            self.operation_of("op-1", &name, &request_id);
        }
        self.called(format!("start {name}{}", timeout.unwrap_or_default()));
        self.start_slowly().await;
        match name.as_str() {
            "endless" => std::future::pending().await,
            "cancelled" => return Err(Status::cancelled("the start was cancelled")),
            _ => {}
        }
        if name == "restarting" {
            let asked = self.ids(&request_id);
            if asked == 1 {
                let message = "vmmd is stopping; try again in a moment".to_owned();
                return Err(refusal(Code::Unavailable, "DAEMON_STOPPING", message));
            }
        }
        if name == "greedy" {
            return Err(Status::resource_exhausted(
                "the node has 1Gi of memory left, the VM needs 2Gi",
            ));
        }
        let vm = self.change(&name, &[VmPhase::Stopped, VmPhase::Failed], VmPhase::Running)?;
        Ok(Response::new(v1::StartVmResponse {
            vm,
            operation: Some(v1::Operation::default()),
        }))
    }

    async fn stop_vm(&self, request: Request<v1::StopVmRequest>) -> Answer<v1::StopVmResponse> {
        self.once(request.get_ref())?;
        let v1::StopVmRequest {
            name,
            grace_period,
            force,
            ..
        } = request.into_inner();
        let grace = grace_period.map(|grace| grace.seconds);
        self.called(format!("stop {name} grace={grace:?} force={force}"));
        let mut vm = self.change(&name, &[VmPhase::Running, VmPhase::Paused], VmPhase::Stopped)?;
        self.end_run(vm.as_mut());
        Ok(Response::new(v1::StopVmResponse {
            vm,
            operation: Some(v1::Operation::default()),
        }))
    }

    async fn restart_vm(&self, request: Request<v1::RestartVmRequest>) -> Answer<v1::RestartVmResponse> {
        self.once(request.get_ref())?;
        let v1::RestartVmRequest {
            name,
            grace_period,
            force,
            ..
        } = request.into_inner();
        let grace = grace_period.map(|grace| grace.seconds);
        self.called(format!("restart {name} grace={grace:?} force={force}"));
        let mut vm = self.change(&name, &[VmPhase::Running], VmPhase::Running)?;
        self.end_run(vm.as_mut());
        Ok(Response::new(v1::RestartVmResponse {
            vm,
            operation: Some(v1::Operation::default()),
        }))
    }

    async fn pause_vm(&self, request: Request<v1::PauseVmRequest>) -> Answer<v1::PauseVmResponse> {
        self.once(request.get_ref())?;
        if request.get_ref().name == "silent" {
            std::future::pending::<()>().await;
        }
        let vm = self.change(&request.into_inner().name, &[VmPhase::Running], VmPhase::Paused)?;
        Ok(Response::new(v1::PauseVmResponse { vm }))
    }

    async fn resume_vm(&self, request: Request<v1::ResumeVmRequest>) -> Answer<v1::ResumeVmResponse> {
        self.once(request.get_ref())?;
        let vm = self.change(&request.into_inner().name, &[VmPhase::Paused], VmPhase::Running)?;
        Ok(Response::new(v1::ResumeVmResponse { vm }))
    }

    async fn attach_disk(&self, request: Request<v1::AttachDiskRequest>) -> Answer<v1::AttachDiskResponse> {
        self.once(request.get_ref())?;
        let vm = Some(self.attach(request.into_inner())?);
        Ok(Response::new(v1::AttachDiskResponse { vm }))
    }

    async fn detach_disk(&self, request: Request<v1::DetachDiskRequest>) -> Answer<v1::DetachDiskResponse> {
        self.once(request.get_ref())?;
        let vm = Some(self.detach(request.into_inner())?);
        Ok(Response::new(v1::DetachDiskResponse { vm }))
    }

    async fn resize_vm_disk(
        &self,
        request: Request<v1::ResizeVmDiskRequest>,
    ) -> Answer<v1::ResizeVmDiskResponse> {
        self.once(request.get_ref())?;
        let vm = Some(self.resize(request.into_inner())?);
        Ok(Response::new(v1::ResizeVmDiskResponse { vm }))
    }

    async fn get_vm_disk_stats(
        &self,
        request: Request<v1::GetVmDiskStatsRequest>,
    ) -> Answer<v1::GetVmDiskStatsResponse> {
        let disks = self.stats(&request.into_inner().vm)?;
        Ok(Response::new(v1::GetVmDiskStatsResponse { disks }))
    }

    async fn update_vm(&self, request: Request<v1::UpdateVmRequest>) -> Answer<v1::UpdateVmResponse> {
        self.once(request.get_ref())?;
        let vm = Some(self.update(request.into_inner())?);
        Ok(Response::new(v1::UpdateVmResponse {
            vm,
            ..Default::default()
        }))
    }

    async fn inject_nmi(&self, _: Request<v1::InjectNmiRequest>) -> Answer<v1::InjectNmiResponse> {
        Err(Status::unimplemented("inject_nmi"))
    }
    async fn reset_vm(&self, _: Request<v1::ResetVmRequest>) -> Answer<v1::ResetVmResponse> {
        Err(Status::unimplemented("reset_vm"))
    }

    async fn get_vm_stats(&self, request: Request<v1::GetVmStatsRequest>) -> Answer<v1::GetVmStatsResponse> {
        let stats = Some(self.all_stats(&request.into_inner().name)?);
        Ok(Response::new(v1::GetVmStatsResponse { stats }))
    }

    type GetVmLogsStream = Events<v1::GetVmLogsResponse>;

    async fn get_vm_logs(&self, request: Request<v1::GetVmLogsRequest>) -> Answer<Self::GetVmLogsStream> {
        self.logs(&request.into_inner())
    }

    type ConsoleStream = Events<v1::ConsoleResponse>;

    /// Prints a banner, then echoes input in capitals; a line `halt` ends the run. Ends when the
    /// client does.
    async fn console(&self, request: Request<Streaming<v1::ConsoleRequest>>) -> Answer<Self::ConsoleStream> {
        let mut input = request.into_inner();
        let first = input.message().await?.and_then(|request| request.message);
        let Some(console_request::Message::Open(open)) = first else {
            return Err(Status::invalid_argument("the first message must be `open`"));
        };
        let vm = self.find(&open.name)?;
        *lock(&self.consoles) += 1;
        if open.device != 0 && open.device() != v1::ConsoleDevice::Serial {
            self.called(format!(
                "open {:?} {:?} force={}",
                open.device(),
                open.access(),
                open.force
            ));
        }
        if open.name == "held" && open.access() != v1::ConsoleAccess::ReadOnly && !open.force {
            return Err(Status::failed_precondition(
                "another client types there (ann, for 3 s)",
            ));
        }
        let mut banner = Vec::new();
        if !open.no_replay {
            banner.extend_from_slice(b"old output\r\n");
            banner.extend(lock(&self.printed).get(&open.name).cloned().unwrap_or_default());
        }
        let running = vm.status.unwrap_or_default().phase() == VmPhase::Running;
        let message = |message| {
            Ok(v1::ConsoleResponse {
                message: Some(message),
            })
        };
        let opened = v1::ConsoleOpened {
            replay_bytes: banner.len() as u64,
            writers: Vec::new(),
        };
        let before = [
            message(console_response::Message::Opened(opened)),
            message(console_response::Message::Output(banner)),
        ];
        if !running {
            let closed = v1::ConsoleClosed {
                reason: "the VM is not running".into(),
            };
            let after = message(console_response::Message::Closed(closed));
            return Ok(Response::new(Box::pin(tokio_stream::iter(
                before.into_iter().chain([after]),
            ))));
        }
        let calls = self.clone();
        let echo = input.map(move |request| {
            let bytes = match request?.message {
                Some(console_request::Message::Input(bytes)) => bytes,
                Some(console_request::Message::SendBreak(_)) => b"<break>".to_vec(),
                Some(console_request::Message::Size(size)) => {
                    format!("<{}x{}>", size.columns, size.rows).into_bytes()
                }
                _ => return Err(Status::invalid_argument("opened twice")),
            };
            if bytes.starts_with(b"lose it") {
                let by = Some(v1::ConsoleWriter {
                    name: "ann".into(),
                    ..v1::ConsoleWriter::default()
                });
                return message(console_response::Message::TakenOver(v1::ConsoleTakenOver { by }));
            }
            calls.called(format!("input {}", String::from_utf8_lossy(&bytes)));
            calls.print(&open.name, &bytes.to_ascii_uppercase());
            if bytes.starts_with(b"halt") {
                let closed = v1::ConsoleClosed {
                    reason: "the guest powered off".into(),
                };
                return message(console_response::Message::Closed(closed));
            }
            message(console_response::Message::Output(bytes.to_ascii_uppercase()))
        });
        // The run's end is the stream's end.
        let mut ended = false;
        let echo = echo.take_while(move |response| {
            let last = ended;
            let closed = |response: &v1::ConsoleResponse| {
                matches!(response.message, Some(console_response::Message::Closed(_)))
            };
            ended = response.as_ref().map_or(true, closed);
            !last
        });
        Ok(Response::new(Box::pin(tokio_stream::iter(before).chain(echo))))
    }

    type VncStream = Events<v1::VncResponse>;

    async fn vnc(&self, request: Request<Streaming<v1::VncRequest>>) -> Answer<Self::VncStream> {
        self.screen(request.into_inner()).await
    }

    async fn create_vnc_ticket(
        &self,
        request: Request<v1::CreateVncTicketRequest>,
    ) -> Answer<v1::CreateVncTicketResponse> {
        let request = request.into_inner();
        self.find(&request.name)?;
        let web = request.kind() == v1::VncTicketKind::Web;
        let only = |wanted: bool, text: &str| if wanted { text.to_owned() } else { String::new() };
        Ok(Response::new(v1::CreateVncTicketResponse {
            address: "127.0.0.1:5900".into(),
            password: only(!web, "sEcr-t_1"),
            url: only(web, "http://127.0.0.1:6080/vnc.html?token"),
            expire_time: None,
        }))
    }

    type ConnectChannelStream = Events<v1::ConnectChannelResponse>;

    /// The channel "echo" echoes its input; there is no other one.
    async fn connect_channel(
        &self,
        request: Request<Streaming<v1::ConnectChannelRequest>>,
    ) -> Answer<Self::ConnectChannelStream> {
        use v1::connect_channel_request::Message;
        let mut input = request.into_inner();
        match input.message().await?.and_then(|first| first.message) {
            Some(Message::Open(open)) if open.channel == "echo" => {}
            _ => return Err(Status::failed_precondition("no such channel")),
        }
        let echo = input.map(|request| match request?.message {
            Some(Message::Data(data)) => Ok(v1::ConnectChannelResponse { data }),
            _ => Err(Status::invalid_argument("opened twice")),
        });
        Ok(Response::new(Box::pin(echo)))
    }

    type ConnectVsockStream = Events<v1::ConnectVsockResponse>;

    /// Port 7 echoes its input, for both directions, and port 22 greets. No other port is used.
    async fn connect_vsock(
        &self,
        request: Request<Streaming<v1::ConnectVsockRequest>>,
    ) -> Answer<Self::ConnectVsockStream> {
        use v1::connect_vsock_request::Message;
        let mut input = request.into_inner();
        match input.message().await?.and_then(|first| first.message) {
            Some(Message::Open(open)) if open.port == 7 => {
                self.called(format!(
                    "vsock {}",
                    if open.accept { "accept" } else { "connect" }
                ));
            }
            Some(Message::Open(open)) if open.port == 22 => {
                let data = b"SSH-2.0-guest\r\n".to_vec();
                let greeting = tokio_stream::once(Ok(v1::ConnectVsockResponse { data }));
                return Ok(Response::new(Box::pin(greeting)));
            }
            _ => return Err(Status::failed_precondition("nothing listens there")),
        }
        let echo = input.map(|request| match request?.message {
            Some(Message::Data(data)) => Ok(v1::ConnectVsockResponse { data }),
            _ => Err(Status::invalid_argument("opened twice")),
        });
        Ok(Response::new(Box::pin(echo)))
    }

    type PortForwardStream = Events<v1::PortForwardResponse>;

    /// Port 7 echoes its input (RFC 862); no other port listens.
    async fn port_forward(
        &self,
        request: Request<Streaming<v1::PortForwardRequest>>,
    ) -> Answer<Self::PortForwardStream> {
        use v1::port_forward_request::Message;
        let mut input = request.into_inner();
        match input.message().await?.and_then(|first| first.message) {
            Some(Message::Open(open)) if open.port == 7 => {}
            _ => return Err(Status::failed_precondition("nothing listens there")),
        }
        let echo = input.map(|request| match request?.message {
            Some(Message::Data(data)) => Ok(v1::PortForwardResponse { data }),
            _ => Err(Status::invalid_argument("opened twice")),
        });
        Ok(Response::new(Box::pin(echo)))
    }

    async fn get_guest_info(
        &self,
        request: Request<v1::GetGuestInfoRequest>,
    ) -> Answer<v1::GetGuestInfoResponse> {
        self.find(&request.into_inner().name)?;
        Ok(Response::new(v1::GetGuestInfoResponse {
            guest: Some(super::guest::info()),
        }))
    }

    async fn set_guest_password(
        &self,
        request: Request<v1::SetGuestPasswordRequest>,
    ) -> Answer<v1::SetGuestPasswordResponse> {
        self.set_password(&request.into_inner())
    }

    async fn list_guest_ssh_keys(
        &self,
        request: Request<v1::ListGuestSshKeysRequest>,
    ) -> Answer<v1::ListGuestSshKeysResponse> {
        self.ssh_keys(&request.into_inner())
    }

    async fn update_guest_ssh_keys(
        &self,
        request: Request<v1::UpdateGuestSshKeysRequest>,
    ) -> Answer<v1::UpdateGuestSshKeysResponse> {
        self.change_ssh_keys(&request.into_inner())
    }

    type ReadGuestFileStream = Events<v1::ReadGuestFileResponse>;

    async fn read_guest_file(
        &self,
        request: Request<v1::ReadGuestFileRequest>,
    ) -> Answer<Self::ReadGuestFileStream> {
        self.read_file(&request.into_inner())
    }

    async fn write_guest_file(
        &self,
        request: Request<Streaming<v1::WriteGuestFileRequest>>,
    ) -> Answer<v1::WriteGuestFileResponse> {
        self.write_file(request.into_inner()).await
    }

    type ExecVmStream = Events<v1::ExecVmResponse>;

    /// A guest with three programs: `cat`, which prints its input, `env`, which prints its environment and its arguments as an error and
    /// ends with 3, and `abort`, which a signal ends.
    async fn exec_vm(&self, request: Request<Streaming<v1::ExecVmRequest>>) -> Answer<Self::ExecVmStream> {
        use v1::{exec_vm_request::Message, exec_vm_response::Message as Output};
        let mut messages = request.into_inner();
        let first = messages.message().await?.and_then(|first| first.message);
        let Some(Message::Open(open)) = first else {
            return Err(Status::invalid_argument("not opened"));
        };
        let mut input = Vec::new();
        while let Some(request) = messages.message().await? {
            match request.message {
                Some(Message::Input(bytes)) if open.input => input.extend(bytes),
                _ => return Err(Status::invalid_argument("unexpected input")),
            }
        }
        let exit = |code, signal| {
            Output::Exit(v1::ExecExit {
                code,
                signal,
                truncated: false,
            })
        };
        let answer = match open.command.first().map_or("", String::as_str) {
            "cat" => vec![Output::Stdout(input), exit(0, 0)],
            "env" => {
                let words = [open.env.join(" "), open.command.join(" ")].concat();
                vec![Output::Stderr(words.into_bytes()), exit(3, 0)]
            }
            "abort" => vec![exit(0, 6)],
            _ => return Err(Status::failed_precondition("no such program")),
        };
        let answer = answer.into_iter().map(|message| {
            let message = Some(message);
            Ok(v1::ExecVmResponse { message })
        });
        Ok(Response::new(Box::pin(tokio_stream::iter(answer))))
    }
}
