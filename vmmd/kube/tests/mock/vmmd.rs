//! A vmmd on a UNIX socket: VMs in a map, and guests that power off on request, or not.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError, atomic::Ordering},
};

use tokio::{net::UnixListener, runtime::Runtime, sync::watch};
use tokio_stream::{Stream, wrappers::UnixListenerStream};
use tonic::{Code, Request, Response, Status, Streaming};
use tonic_types::{ErrorDetails, StatusExt as _};
use vmmd_api::v1::{
    self, ConditionStatus, ExitReason, VmPhase, WatchEventType,
    disk_service_server::DiskServiceServer,
    image_service_server::ImageServiceServer,
    migration_service_server::MigrationServiceServer,
    node_service_server::NodeServiceServer,
    operation_service_server::OperationServiceServer,
    pod_service_server::PodServiceServer,
    vm_service_server::{VmService, VmServiceServer},
};

use super::{
    ledger::Ledger,
    migration::{Moves, migrating},
    pods::{Pods, not_connected},
    role::Refused,
    storage::Storage,
};

pub type Answer<T> = Result<Response<T>, Status>;
pub type Events<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[derive(Clone)]
pub struct State {
    pub vms: Arc<Mutex<BTreeMap<String, v1::Vm>>>,
    /// Events since the beginning.
    log: Arc<Mutex<Vec<v1::WatchVmsResponse>>>,
    changed: Arc<watch::Sender<usize>>,
    calls: Arc<Mutex<Vec<String>>>,
    answered: Arc<Mutex<BTreeMap<String, v1::Vm>>>,
    /// Ids of creations that were refused since there was a VM of the name: each repetition is refused as well.
    taken: Arc<Mutex<BTreeSet<String>>>,
    /// Refusal for the creation of a VM.
    pub refusal: Arc<Mutex<Option<Status>>>,
    /// The next VM is created, and the answer is lost.
    pub cut: Arc<Mutex<bool>>,
    /// The node has no KVM.
    pub no_kvm: Arc<Mutex<bool>>,
    /// The node takes no VMs.
    pub cordoned: Arc<Mutex<bool>>,
    pub storage: Storage,
    pub pods: Pods,
    pub moves: Moves,
    pub ledger: Ledger,
    pub node: String,
    /// Calls that the agent may not make.
    refused: Refused,
}

pub struct Vmmd {
    pub state: State,
    pub socket: PathBuf,
    folder: tempfile::TempDir,
    runtime: Option<Runtime>,
}

pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Vmmd {
    pub fn start(node: &str, ledger: &Ledger) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("vmmd.sock");
        let state = State {
            vms: Arc::default(),
            log: Arc::default(),
            changed: Arc::new(watch::channel(0).0),
            calls: Arc::default(),
            answered: Arc::default(),
            taken: Arc::default(),
            refusal: Arc::default(),
            cut: Arc::default(),
            no_kvm: Arc::default(),
            cordoned: Arc::default(),
            storage: Storage::default(),
            pods: Pods::default(),
            moves: Moves::default(),
            ledger: ledger.clone(),
            node: node.to_owned(),
            refused: Refused::default(),
        };
        ledger.add_node(&format!("{node}:7443"), &state);
        Self {
            runtime: Some(serve(&socket, &state)),
            state,
            socket,
            folder,
        }
    }

    /// The kubelet's directory for device plugins.
    pub fn plugins(&self) -> PathBuf {
        let folder = self.folder.path().join("plugins");
        std::fs::create_dir_all(&folder).unwrap();
        folder
    }

    /// As after a crash of the daemon: VMs stay.
    pub fn stop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            self.state.moves.up.store(false, Ordering::SeqCst);
            runtime.shutdown_background();
            std::fs::remove_file(&self.socket).unwrap();
        }
    }

    pub fn resume(&mut self) {
        self.stop();
        self.runtime = Some(serve(&self.socket, &self.state));
    }
}

impl Drop for Vmmd {
    /// A test fails when its agent has called what its role does not allow.
    fn drop(&mut self) {
        let refused = self.state.refused.methods();
        assert!(
            refused.is_empty() || std::thread::panicking(),
            "not for agents: {refused:?}"
        );
    }
}

fn serve(socket: &Path, state: &State) -> Runtime {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .unwrap();
    let guard = runtime.enter();
    let listener = UnixListener::bind(socket).unwrap();
    drop(guard);
    let (vms, nodes) = (
        VmServiceServer::new(state.clone()),
        NodeServiceServer::new(state.clone()),
    );
    let pods = PodServiceServer::new(state.clone());
    let (storage, migrations) = (state.storage.clone(), MigrationServiceServer::new(state.clone()));
    let refused = state.refused.clone();
    state.moves.lives.fetch_add(1, Ordering::SeqCst);
    state.moves.up.store(true, Ordering::SeqCst);
    runtime.spawn(async move {
        let server = tonic::transport::Server::builder()
            .layer(refused)
            .add_service(vms)
            .add_service(nodes)
            .add_service(migrations)
            .add_service(pods)
            .add_service(DiskServiceServer::new(storage.clone()))
            .add_service(ImageServiceServer::new(storage.clone()))
            .add_service(OperationServiceServer::new(storage));
        server
            .serve_with_incoming(UnixListenerStream::new(listener))
            .await
    });
    runtime
}

fn label(vm: &v1::Vm, key: &str) -> String {
    vm.metadata
        .as_ref()
        .unwrap()
        .labels
        .get(key)
        .cloned()
        .unwrap_or_default()
}

/// The machine of a VM.
pub fn move_id(vm: &v1::Vm) -> String {
    id(vm).0
}

fn id(vm: &v1::Vm) -> (String, i64) {
    (
        label(vm, "vmmd.dev/machine-uid"),
        label(vm, "vmmd.dev/epoch").parse().unwrap_or(0),
    )
}

fn selected(vm: &v1::Vm, filter: &v1::VmFilter) -> bool {
    filter.labels.iter().all(|one| {
        let labels = &vm.metadata.as_ref().unwrap().labels;
        match one.split_once('=') {
            Some((key, value)) => labels.get(key).is_some_and(|found| found == value),
            None => labels.contains_key(one),
        }
    })
}

pub fn unused<T>() -> Answer<T> {
    Err(Status::unimplemented("the agent does not use it"))
}

impl State {
    pub fn vms(&self) -> Vec<v1::Vm> {
        lock(&self.vms).values().cloned().collect()
    }

    pub fn calls(&self) -> Vec<String> {
        lock(&self.calls).clone()
    }

    /// The guest's own doing, or the VM's end.
    pub fn end(&self, name: &str, reason: ExitReason) {
        let mut vms = lock(&self.vms);
        // It may have been taken away in this moment.
        if let Some(vm) = vms.get_mut(name) {
            self.finish(vm, reason);
        }
    }

    pub fn called(&self, call: String) {
        self.ledger.trap.pass(&format!("{}: {call}", self.node));
        lock(&self.calls).push(call);
    }

    pub fn tell(&self, kind: WatchEventType, vm: &v1::Vm) {
        let mut log = lock(&self.log);
        log.push(v1::WatchVmsResponse {
            r#type: kind.into(),
            vm: Some(vm.clone()),
            cursor: String::new(),
        });
        self.changed.send_replace(log.len());
    }

    /// Somebody else has a VM of this name.
    pub fn put(&self, name: &str) {
        let mut vm = v1::Vm::default();
        name.clone_into(&mut vm.metadata.get_or_insert_default().name);
        lock(&self.vms).insert(name.to_owned(), vm);
    }

    /// Somebody else deletes the VM.
    pub fn remove(&self, name: &str) {
        let mut vms = lock(&self.vms);
        let vm = vms.remove(name).unwrap();
        self.bury(&vm);
    }

    fn bury(&self, vm: &v1::Vm) {
        self.ledger.end(&id(vm).0, &self.node);
        let metadata = vm.metadata.as_ref().unwrap();
        self.storage.use_by(&metadata.name, Vec::new());
        // A repeated creation returns the VM in its last state.
        for known in lock(&self.answered).values_mut() {
            if known.metadata.as_ref().unwrap().uid == metadata.uid {
                known
                    .status
                    .get_or_insert_default()
                    .set_phase(VmPhase::Terminating);
            }
        }
        self.tell(WatchEventType::Deleted, vm);
    }

    pub fn finish(&self, vm: &mut v1::Vm, reason: ExitReason) {
        let (machine, _) = id(vm);
        let status = vm.status.get_or_insert_default();
        let failed = !matches!(
            reason,
            ExitReason::GuestShutdown | ExitReason::Stopped | ExitReason::Killed
        );
        let phase = if failed { VmPhase::Failed } else { VmPhase::Stopped };
        status.phase = phase.into();
        status.reason = reason.as_str_name().to_owned();
        status.conditions = ready(false);
        status.instance = None;
        status.last_exit = Some(v1::ExitStatus {
            reason: reason.into(),
            message: "it ended".to_owned(),
            time: None,
        });
        self.ledger.end(&machine, &self.node);
        self.tell(WatchEventType::Modified, vm);
    }

    fn run(&self, vm: &mut v1::Vm) {
        let (machine, epoch) = id(vm);
        let status = vm.status.get_or_insert_default();
        status.phase = VmPhase::Running.into();
        status.conditions = ready(true);
        status.instance = Some(v1::InstanceStatus::default());
        status.counts.get_or_insert_default().starts += 1;
        self.ledger.start(&machine, epoch, &self.node);
    }
}

/// The VM that a request has created is not there any more.
fn gone() -> Status {
    let details = ErrorDetails::with_error_info("OBJECT_GONE", "vmmd", []);
    Status::with_error_details(Code::NotFound, "it is gone", details)
}

fn ready(is: bool) -> Vec<v1::Condition> {
    vec![v1::Condition {
        r#type: "Ready".to_owned(),
        status: if is {
            ConditionStatus::True
        } else {
            ConditionStatus::False
        }
        .into(),
        ..v1::Condition::default()
    }]
}

#[tonic::async_trait]
impl VmService for State {
    async fn create_vm(&self, request: Request<v1::CreateVmRequest>) -> Answer<v1::CreateVmResponse> {
        let request = request.into_inner();
        let mut vm = request.vm.unwrap();
        let name = vm.metadata.as_ref().unwrap().name.clone();
        self.called(format!("create {name}"));
        if let Some(refusal) = lock(&self.refusal).clone() {
            return Err(refusal);
        }
        let mut vms = lock(&self.vms);
        if let Some(vm) = lock(&self.answered).get(&request.request_id) {
            let uid = |vm: &v1::Vm| vm.metadata.as_ref().unwrap().uid.clone();
            let there = vms.get(&name).is_some_and(|now| uid(now) == uid(vm));
            if !there {
                return Err(gone());
            }
            let vm = Some(vm.clone());
            return Ok(Response::new(v1::CreateVmResponse { vm, operation: None }));
        }
        let pod = vm.spec.as_ref().and_then(|spec| spec.pod.as_ref());
        if pod.is_some_and(|pod| !self.pods.is_connected(&pod.uid)) {
            return Err(not_connected());
        }
        let mut taken = lock(&self.taken);
        if vms.contains_key(&name) || taken.contains(&request.request_id) {
            taken.insert(request.request_id);
            return Err(Status::already_exists("there is one"));
        }
        let metadata = vm.metadata.as_mut().unwrap();
        metadata.uid = format!("vm-{}-{}", self.node, lock(&self.log).len());
        metadata.generation = 1;
        let disks = vm.spec.iter().flat_map(|spec| spec.disks.iter());
        let disks = disks.filter_map(|disk| match &disk.source {
            Some(v1::disk_spec::Source::Disk(name)) => Some(name.clone()),
            _ => None,
        });
        self.storage.use_by(&name, disks.collect());
        self.run(&mut vm);
        lock(&self.answered).insert(request.request_id, vm.clone());
        vms.insert(name, vm.clone());
        self.tell(WatchEventType::Added, &vm);
        if std::mem::take(&mut *lock(&self.cut)) {
            return Err(Status::unavailable("the connection broke"));
        }
        Ok(Response::new(v1::CreateVmResponse {
            vm: Some(vm),
            operation: None,
        }))
    }

    async fn get_vm(&self, request: Request<v1::GetVmRequest>) -> Answer<v1::GetVmResponse> {
        let vm = lock(&self.vms).get(&request.get_ref().name).cloned();
        let vm = vm.ok_or_else(|| Status::not_found("there is none"))?;
        Ok(Response::new(v1::GetVmResponse { vm: Some(vm) }))
    }

    async fn list_vms(&self, request: Request<v1::ListVmsRequest>) -> Answer<v1::ListVmsResponse> {
        let filter = request.into_inner().filter.unwrap_or_default();
        let vms = self
            .vms()
            .into_iter()
            .filter(|vm| selected(vm, &filter))
            .collect();
        Ok(Response::new(v1::ListVmsResponse {
            vms,
            ..v1::ListVmsResponse::default()
        }))
    }

    type WatchVmsStream = Events<v1::WatchVmsResponse>;

    async fn watch_vms(&self, request: Request<v1::WatchVmsRequest>) -> Answer<Self::WatchVmsStream> {
        let filter = request.into_inner().filter.unwrap_or_default();
        let wanted = move |vm: &v1::Vm| selected(vm, &filter);
        let (send, receive) = tokio::sync::mpsc::channel(64);
        let mut changed = self.changed.subscribe();
        let state = self.clone();
        let (first, mut sent) = {
            let vms = lock(&self.vms);
            let first: Vec<_> = vms.values().filter(|vm| wanted(vm)).cloned().collect();
            (first, lock(&self.log).len())
        };
        tokio::spawn(async move {
            for vm in first.into_iter().map(Some).chain([None]) {
                let kind = if vm.is_some() {
                    WatchEventType::Added
                } else {
                    WatchEventType::Synced
                };
                let event = v1::WatchVmsResponse {
                    r#type: kind.into(),
                    vm,
                    cursor: "c".to_owned(),
                };
                if send.send(Ok(event)).await.is_err() {
                    return;
                }
            }
            loop {
                changed.borrow_and_update();
                let events: Vec<_> = lock(&state.log)[sent..].to_vec();
                sent += events.len();
                for event in events
                    .into_iter()
                    .filter(|event| event.vm.as_ref().is_some_and(&wanted))
                {
                    if send.send(Ok(event)).await.is_err() {
                        return;
                    }
                }
                tokio::select! {
                    done = changed.changed() => if done.is_err() { return },
                    () = send.closed() => return,
                }
            }
        });
        Ok(Response::new(Box::pin(
            tokio_stream::wrappers::ReceiverStream::new(receive),
        )))
    }

    async fn delete_vm(&self, request: Request<v1::DeleteVmRequest>) -> Answer<v1::DeleteVmResponse> {
        let request = request.into_inner();
        self.called(format!("delete {} force={}", request.name, request.force));
        if self.moves.concern(&request.name) {
            return Err(migrating());
        }
        let mut vms = lock(&self.vms);
        let vm = vms
            .remove(&request.name)
            .ok_or_else(|| Status::not_found("there is none"))?;
        self.bury(&vm);
        Ok(Response::new(v1::DeleteVmResponse::default()))
    }

    async fn start_vm(&self, request: Request<v1::StartVmRequest>) -> Answer<v1::StartVmResponse> {
        let name = request.into_inner().name;
        self.called(format!("start {name}"));
        let mut vms = lock(&self.vms);
        let vm = vms
            .get_mut(&name)
            .ok_or_else(|| Status::not_found("there is none"))?;
        self.run(vm);
        self.tell(WatchEventType::Modified, vm);
        Ok(Response::new(v1::StartVmResponse::default()))
    }

    async fn stop_vm(&self, _: Request<v1::StopVmRequest>) -> Answer<v1::StopVmResponse> {
        unused()
    }

    type GetVmLogsStream = Events<v1::GetVmLogsResponse>;

    async fn get_vm_logs(&self, _: Request<v1::GetVmLogsRequest>) -> Answer<Self::GetVmLogsStream> {
        unused()
    }

    /// Only labels and annotations are changed.
    async fn update_vm(&self, request: Request<v1::UpdateVmRequest>) -> Answer<v1::UpdateVmResponse> {
        let request = request.into_inner();
        let new = request.vm.unwrap().metadata.unwrap();
        self.called(format!("update {}", new.name));
        let mut vms = lock(&self.vms);
        let vm = vms
            .get_mut(&new.name)
            .ok_or_else(|| Status::not_found("there is none"))?;
        if self.moves.concern(&new.name) {
            return Err(migrating());
        }
        let metadata = vm.metadata.as_mut().unwrap();
        if metadata.uid != request.preconditions.unwrap().uid {
            return Err(Status::not_found("it is another one"));
        }
        let before = metadata.clone();
        for path in request.update_mask.unwrap().paths {
            let (field, key) = path.trim_end_matches(']').split_once('[').unwrap();
            let (old, new) = match field {
                "metadata.labels" => (&mut metadata.labels, &new.labels),
                "metadata.annotations" => (&mut metadata.annotations, &new.annotations),
                other => panic!("{other}"),
            };
            match new.get(key) {
                Some(value) => old.insert(key.to_owned(), value.clone()),
                None => old.remove(key),
            };
        }
        if *metadata != before {
            metadata.generation += 1;
        }
        let vm = vm.clone();
        self.tell(WatchEventType::Modified, &vm);
        Ok(Response::new(v1::UpdateVmResponse {
            vm: Some(vm),
            operation: None,
        }))
    }

    async fn restart_vm(&self, _: Request<v1::RestartVmRequest>) -> Answer<v1::RestartVmResponse> {
        unused()
    }

    async fn reset_vm(&self, _: Request<v1::ResetVmRequest>) -> Answer<v1::ResetVmResponse> {
        unused()
    }

    async fn inject_nmi(&self, _: Request<v1::InjectNmiRequest>) -> Answer<v1::InjectNmiResponse> {
        unused()
    }

    async fn pause_vm(&self, _: Request<v1::PauseVmRequest>) -> Answer<v1::PauseVmResponse> {
        unused()
    }

    async fn resume_vm(&self, _: Request<v1::ResumeVmRequest>) -> Answer<v1::ResumeVmResponse> {
        unused()
    }

    async fn attach_disk(&self, _: Request<v1::AttachDiskRequest>) -> Answer<v1::AttachDiskResponse> {
        unused()
    }

    async fn detach_disk(&self, _: Request<v1::DetachDiskRequest>) -> Answer<v1::DetachDiskResponse> {
        unused()
    }

    async fn resize_vm_disk(&self, _: Request<v1::ResizeVmDiskRequest>) -> Answer<v1::ResizeVmDiskResponse> {
        unused()
    }

    async fn get_vm_disk_stats(
        &self,
        _: Request<v1::GetVmDiskStatsRequest>,
    ) -> Answer<v1::GetVmDiskStatsResponse> {
        unused()
    }

    async fn get_vm_stats(&self, _: Request<v1::GetVmStatsRequest>) -> Answer<v1::GetVmStatsResponse> {
        unused()
    }

    async fn create_vnc_ticket(
        &self,
        _: Request<v1::CreateVncTicketRequest>,
    ) -> Answer<v1::CreateVncTicketResponse> {
        unused()
    }

    type ConsoleStream = Events<v1::ConsoleResponse>;

    async fn console(&self, _: Request<Streaming<v1::ConsoleRequest>>) -> Answer<Self::ConsoleStream> {
        unused()
    }

    type VncStream = Events<v1::VncResponse>;

    async fn vnc(&self, _: Request<Streaming<v1::VncRequest>>) -> Answer<Self::VncStream> {
        unused()
    }

    type ConnectChannelStream = Events<v1::ConnectChannelResponse>;

    async fn connect_channel(
        &self,
        _: Request<Streaming<v1::ConnectChannelRequest>>,
    ) -> Answer<Self::ConnectChannelStream> {
        unused()
    }

    type ConnectVsockStream = Events<v1::ConnectVsockResponse>;

    async fn connect_vsock(
        &self,
        _: Request<Streaming<v1::ConnectVsockRequest>>,
    ) -> Answer<Self::ConnectVsockStream> {
        unused()
    }

    type PortForwardStream = Events<v1::PortForwardResponse>;

    async fn port_forward(
        &self,
        _: Request<Streaming<v1::PortForwardRequest>>,
    ) -> Answer<Self::PortForwardStream> {
        unused()
    }

    async fn get_guest_info(&self, _: Request<v1::GetGuestInfoRequest>) -> Answer<v1::GetGuestInfoResponse> {
        unused()
    }

    async fn set_guest_password(
        &self,
        _: Request<v1::SetGuestPasswordRequest>,
    ) -> Answer<v1::SetGuestPasswordResponse> {
        unused()
    }

    async fn list_guest_ssh_keys(
        &self,
        _: Request<v1::ListGuestSshKeysRequest>,
    ) -> Answer<v1::ListGuestSshKeysResponse> {
        unused()
    }

    async fn update_guest_ssh_keys(
        &self,
        _: Request<v1::UpdateGuestSshKeysRequest>,
    ) -> Answer<v1::UpdateGuestSshKeysResponse> {
        unused()
    }

    type ReadGuestFileStream = Events<v1::ReadGuestFileResponse>;

    async fn read_guest_file(
        &self,
        _: Request<v1::ReadGuestFileRequest>,
    ) -> Answer<Self::ReadGuestFileStream> {
        unused()
    }

    async fn write_guest_file(
        &self,
        _: Request<Streaming<v1::WriteGuestFileRequest>>,
    ) -> Answer<v1::WriteGuestFileResponse> {
        unused()
    }

    type ExecVmStream = Events<v1::ExecVmResponse>;

    async fn exec_vm(&self, _: Request<Streaming<v1::ExecVmRequest>>) -> Answer<Self::ExecVmStream> {
        unused()
    }
}
