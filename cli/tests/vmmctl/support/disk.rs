//! The daemon's part that is about disks.

use tonic::{Code, Request, Response, Status};
use tonic_types::{ErrorDetails, StatusExt as _};
use vmmd_api::v1::{
    self, AttachmentPhase, VmPhase, WatchEventType, disk_service_server::DiskService, volume_spec::Source,
};

use super::{Answer, Events, State, lock, refusal};

/// A disk that no guest lets go of.
pub const BUSY: &str = "busy";
/// A disk for which no VM has a slot.
pub const TOO_MANY: &str = "one-too-many";

/// Id of the operation that creates a disk without a wait in the call.
pub const DISK_MADE: &str = "0d6b9b07-4f0d-4f5a-8f3e-2d3a6a1c9f10";

impl State {
    /// The disk as the daemon has it.
    pub fn disk(&self, name: &str) -> Option<v1::Disk> {
        lock(&self.disks).get(name).cloned()
    }

    /// Notifies watchers of a change of a disk.
    pub fn announce_disk(&self, kind: WatchEventType, disk: v1::Disk) {
        // Nobody may watch.
        let _ = self.disk_changes.send(v1::WatchDisksResponse {
            r#type: kind.into(),
            disk: Some(disk),
            ..Default::default()
        });
    }

    fn find_disk(&self, name: &str) -> Result<v1::Disk, Status> {
        let message = || format!("there is no disk \"{name}\" on this node");
        self.disk(name)
            .ok_or_else(|| refusal(Code::NotFound, "DISK_NOT_FOUND", message()))
    }

    fn vm_with(&self, vm: &str, disk: &str) -> Result<v1::Vm, Status> {
        let found = self.find(vm)?;
        let spec = found.spec.as_ref().unwrap();
        if spec.disks.iter().any(|other| other.name == disk) {
            return Ok(found);
        }
        let message = format!("VM \"{vm}\" has no disk \"{disk}\"");
        Err(refusal(Code::NotFound, "DISK_NOT_FOUND", message))
    }

    pub(super) fn store(&self, name: &str, vm: v1::Vm) -> v1::Vm {
        lock(&self.vms).insert(name.into(), vm.clone());
        vm
    }

    /// `AttachDisk`.
    pub fn attach(&self, request: v1::AttachDiskRequest) -> Result<v1::Vm, Status> {
        let mut vm = self.find(&request.vm)?;
        let disk = request.disk.unwrap();
        self.called(format!("attach {} {}", request.vm, disk.name));
        if !disk.disk().is_empty() {
            let missing = |status: Status| {
                let message = format!("disk: {}", status.message());
                refusal(Code::NotFound, "DISK_NOT_FOUND", message)
            };
            self.find_disk(disk.disk()).map_err(missing)?;
        }
        if disk.name == TOO_MANY {
            let message =
                "VM \"web\" has 64 disks and NICs, as many as there are slots: detach one first".to_owned();
            return Err(refusal(Code::ResourceExhausted, "NO_FREE_SLOT", message));
        }
        let status = vm.status.as_mut().unwrap();
        let running = status.phase() == VmPhase::Running;
        status.disks.push(v1::DiskStatus {
            name: disk.name.clone(),
            phase: if running {
                AttachmentPhase::Attached.into()
            } else {
                AttachmentPhase::Pending.into()
            },
            path: disk.path().to_owned(),
            capacity_bytes: Some(1 << 30),
            pci_slot: running.then_some(9),
            ..v1::DiskStatus::default()
        });
        vm.spec.as_mut().unwrap().disks.push(disk);
        Ok(self.store(&request.vm, vm))
    }

    /// `DetachDisk`.
    pub fn detach(&self, request: v1::DetachDiskRequest) -> Result<v1::Vm, Status> {
        let v1::DetachDiskRequest {
            vm: name,
            disk,
            timeout,
            force,
            ..
        } = request;
        let seconds = timeout.map(|timeout| timeout.seconds);
        self.called(format!("detach {name} {disk} timeout={seconds:?} force={force}"));
        let mut vm = self.vm_with(&name, &disk)?;
        if disk == BUSY && !force {
            let message = format!("the guest did not eject disk \"{disk}\" within 30s: it stays attached");
            return Err(refusal(Code::DeadlineExceeded, "EJECT_TIMEOUT", message));
        }
        vm.spec.as_mut().unwrap().disks.retain(|other| other.name != disk);
        vm.status
            .as_mut()
            .unwrap()
            .disks
            .retain(|other| other.name != disk);
        Ok(self.store(&name, vm))
    }

    /// `ResizeVmDisk`.
    pub fn resize(&self, request: v1::ResizeVmDiskRequest) -> Result<v1::Vm, Status> {
        let v1::ResizeVmDiskRequest {
            vm: name,
            disk,
            size_bytes,
            ..
        } = request;
        self.called(format!("resize {name} {disk} {}", size_bytes.unwrap_or_default()));
        let mut vm = self.vm_with(&name, &disk)?;
        for status in &mut vm.status.as_mut().unwrap().disks {
            if status.name == disk {
                status.capacity_bytes = Some(size_bytes.unwrap_or(7 << 30));
            }
        }
        Ok(self.store(&name, vm))
    }

    /// `GetVmDiskStats`.
    pub fn stats(&self, name: &str) -> Result<Vec<v1::DiskStats>, Status> {
        let vm = self.find(name)?;
        if vm.status.unwrap().phase() != VmPhase::Running {
            let message = format!("VM \"{name}\" does not run");
            return Err(refusal(Code::FailedPrecondition, "NOT_RUNNING", message));
        }
        let operation = |requests: u64, bytes: u64, errors: u64, latency: &[u64]| {
            Some(v1::DiskOperationStats {
                requests,
                bytes,
                errors,
                total_time: Some(std::time::Duration::from_micros(requests * 90).into()),
                latency: Some(v1::LatencyHistogram {
                    bounds_us: (1..latency.len()).map(|power| 1 << (power - 1)).collect(),
                    counts: latency.to_vec(),
                }),
            })
        };
        let disks = vm.spec.unwrap().disks.into_iter().map(|disk| v1::DiskStats {
            name: disk.name,
            capacity_bytes: 1 << 30,
            read: operation(1000, 4096 * 1000, 0, &[0, 0, 0, 0, 0, 0, 500, 489, 11, 0]),
            write: operation(10, 1 << 20, 2, &[0, 0, 0, 0, 0, 0, 10, 0, 0, 0]),
            flush: operation(0, 0, 0, &[0; 10]),
            discard: None,
            in_flight: 3,
            throttled: 1,
            held: 0,
            waiting: 2,
        });
        Ok(disks.collect())
    }
}

#[tonic::async_trait]
impl DiskService for State {
    async fn create_disk(&self, request: Request<v1::CreateDiskRequest>) -> Answer<v1::CreateDiskResponse> {
        self.once(request.get_ref())?;
        let v1::CreateDiskRequest { disk, no_wait, .. } = request.into_inner();
        let mut disk = disk.unwrap();
        let metadata = disk.metadata.get_or_insert_default();
        if metadata.name.is_empty() {
            metadata.name = "adopted".into();
        }
        let name = metadata.name.clone();
        metadata.uid = "0c6b9b07-4f0d-4f5a-8f3e-2d3a6a1c9f10".into();
        metadata.generation = 1;
        self.called(format!("create disk {name}"));
        if self.disk(&name).is_some() {
            let message = format!("there is a disk \"{name}\" already");
            return Err(refusal(Code::AlreadyExists, "DISK_EXISTS", message));
        }
        let mut status = v1::VolumeStatus {
            phase: v1::DiskPhase::Ready.into(),
            path: format!("/var/lib/vmmd/disks/{name}"),
            allocated_bytes: 196_608,
            ..Default::default()
        };
        let spec = disk.spec.get_or_insert_default();
        match spec.source.clone() {
            Some(Source::RawFile(path)) if path.starts_with("/missing") => {
                let details =
                    ErrorDetails::with_bad_request_violation("disk.spec.rawFile", "there is no such file");
                let message = "the disk is not valid";
                return Err(Status::with_error_details(
                    Code::InvalidArgument,
                    message,
                    details,
                ));
            }
            Some(Source::RawFile(_) | Source::Adopt(_)) => spec.size_bytes = spec.size_bytes.max(2 << 30),
            Some(Source::OverlayOf(below)) => {
                let below_size = self.find_disk(&below)?.spec.unwrap().size_bytes;
                spec.size_bytes = spec.size_bytes.max(below_size);
                status.backing_disk = below;
            }
            Some(Source::Image(_)) | None => {}
        }
        disk.status = Some(status);
        lock(&self.disks).insert(name, disk.clone());
        let operation = no_wait.then(|| v1::Operation {
            id: DISK_MADE.into(),
            ..Default::default()
        });
        Ok(Response::new(v1::CreateDiskResponse {
            disk: Some(disk),
            operation,
        }))
    }

    async fn get_disk(&self, request: Request<v1::GetDiskRequest>) -> Answer<v1::GetDiskResponse> {
        let disk = Some(self.find_disk(&request.get_ref().name)?);
        Ok(Response::new(v1::GetDiskResponse { disk }))
    }

    async fn list_disks(&self, request: Request<v1::ListDisksRequest>) -> Answer<v1::ListDisksResponse> {
        // One a page.
        let after = request.into_inner().page_token;
        let disks = lock(&self.disks);
        let mut rest = disks.iter().filter(|(name, _)| **name > after);
        let page: Vec<_> = rest.next().map(|(_, disk)| disk.clone()).into_iter().collect();
        let last = page
            .last()
            .and_then(|disk| disk.metadata.clone())
            .filter(|_| rest.next().is_some());
        Ok(Response::new(v1::ListDisksResponse {
            disks: page,
            next_page_token: last.map(|metadata| metadata.name).unwrap_or_default(),
            cursor: String::new(),
        }))
    }

    type WatchDisksStream = Events<v1::WatchDisksResponse>;

    async fn watch_disks(&self, request: Request<v1::WatchDisksRequest>) -> Answer<Self::WatchDisksStream> {
        let v1::WatchDisksRequest { filter, cursor } = request.into_inner();
        let filter = filter.unwrap_or_default();
        self.called(format!(
            "watch disks {} {} {cursor}",
            filter.names.join(","),
            filter.labels.join(",")
        ));
        let mut changes = self.disk_changes.subscribe();
        let event = |kind: WatchEventType, disk| v1::WatchDisksResponse {
            r#type: kind.into(),
            disk,
            ..Default::default()
        };
        let disks = lock(&self.disks).clone().into_values();
        let mut first: Vec<_> = disks
            .map(|disk| event(WatchEventType::Added, Some(disk)))
            .collect();
        first.push(event(WatchEventType::Synced, None));
        let (send, receive) = tokio::sync::mpsc::channel(64);
        tokio::spawn(async move {
            for event in first {
                let _ = send.send(Ok(event)).await;
            }
            while let Ok(event) = changes.recv().await {
                if send.send(Ok(event)).await.is_err() {
                    break;
                }
            }
        });
        Ok(Response::new(Box::pin(
            tokio_stream::wrappers::ReceiverStream::new(receive),
        )))
    }

    async fn update_disk(&self, request: Request<v1::UpdateDiskRequest>) -> Answer<v1::UpdateDiskResponse> {
        self.once(request.get_ref())?;
        let request = request.into_inner();
        let wanted = request.disk.unwrap();
        let (metadata, spec) = (wanted.metadata.unwrap(), wanted.spec.unwrap_or_default());
        let mask = request.update_mask.unwrap().paths;
        self.called(format!("update disk {} {}", metadata.name, mask.join(" ")));
        let mut disk = self.find_disk(&metadata.name)?;
        let known = disk.metadata.as_mut().unwrap();
        if std::mem::take(&mut lock(&self.play).changes_before_updates) > 0 {
            known.generation += 1;
            known.labels.insert("other".into(), "1".into());
            lock(&self.disks).insert(metadata.name.clone(), disk.clone());
        }
        let known = disk.metadata.as_mut().unwrap();
        let expected = request.preconditions.unwrap_or_default().generation;
        if expected.is_some_and(|expected| expected != known.generation) {
            let message = format!("disk \"{}\" has changed", metadata.name);
            return Err(refusal(Code::Aborted, "GENERATION_MISMATCH", message));
        }
        known.generation += 1;
        let present = disk.spec.as_mut().unwrap();
        if mask.iter().any(|path| path == "spec.size_bytes") {
            if spec.size_bytes < present.size_bytes {
                let details = ErrorDetails::with_bad_request_violation(
                    "disk.spec.sizeBytes",
                    format!(
                        "a disk can't be made smaller: it has {} bytes",
                        present.size_bytes
                    ),
                );
                let message = "the request is not valid";
                return Err(Status::with_error_details(
                    Code::InvalidArgument,
                    message,
                    details,
                ));
            }
            present.size_bytes = spec.size_bytes;
        }
        if mask.iter().any(|path| path == "metadata.labels") {
            disk.metadata.as_mut().unwrap().labels = metadata.labels;
        }
        lock(&self.disks).insert(metadata.name, disk.clone());
        Ok(Response::new(v1::UpdateDiskResponse {
            disk: Some(disk),
            operation: None,
        }))
    }

    async fn delete_disk(&self, request: Request<v1::DeleteDiskRequest>) -> Answer<v1::DeleteDiskResponse> {
        self.once(request.get_ref())?;
        let name = request.into_inner().name;
        self.called(format!("delete disk {name}"));
        self.find_disk(&name)?;
        let overlay = |disk: &v1::Disk| {
            disk.status
                .as_ref()
                .is_some_and(|status| status.backing_disk == name)
        };
        if let Some(overlay) = lock(&self.disks).values().find(|disk| overlay(disk)) {
            let message = format!(
                "disk \"{name}\" has overlays ({}): delete those first",
                overlay.metadata.as_ref().unwrap().name
            );
            return Err(refusal(Code::FailedPrecondition, "DISK_HAS_OVERLAYS", message));
        }
        lock(&self.disks).remove(&name);
        Ok(Response::new(v1::DeleteDiskResponse {}))
    }
}
