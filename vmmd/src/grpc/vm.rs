//! `vmmd.v1.VmService`.

use std::{sync::Arc, time::Duration};

use proto::{
    v1::{self, vm_service_server::VmService},
    well_known,
};
use tokio::sync::oneshot;
use tonic::{Request, Response, Status, Streaming};

use super::{console, watch};
use crate::{
    failure::Failure,
    host::Host,
    vm::{self, Command, admission, table::Entry},
};

/// Grace period when none is given.
const DEFAULT_GRACE: Duration = Duration::from_secs(60);
/// Longest grace period.
const MAX_GRACE: Duration = Duration::from_secs(3600);

/// The service.
#[derive(Debug)]
pub struct Vms {
    host: Arc<Host>,
}

impl Vms {
    /// Over the VMs of `host`.
    pub fn new(host: Arc<Host>) -> Self {
        Self { host }
    }

    fn find(&self, name: &str) -> Result<Entry, Failure> {
        self.host.table.get(name).ok_or_else(|| Failure::no_vm(name))
    }

    /// Asks a VM's actor. What was begun goes on when the caller goes away.
    async fn ask(
        &self,
        name: &str,
        request: admission::Request,
        grace: Option<Duration>,
    ) -> Result<v1::Vm, Failure> {
        let entry = self.find(name)?;
        let (reply, answer) = oneshot::channel();
        let command = Command {
            request,
            grace,
            reply,
        };
        let gone = || {
            if self.host.stopping.is_cancelled() {
                Failure::stopping()
            } else {
                Failure::no_vm(name)
            }
        };
        entry.mailbox.send(command).await.map_err(|_| gone())?;
        tokio::select! {
            answer = answer => Ok(answer.map_err(|_| gone())??.as_ref().clone()),
            () = self.host.stopping.cancelled() => Err(Failure::stopping()),
        }
    }
}

/// How long the guest may take; `None` by force.
fn grace(period: Option<well_known::Duration>, force: bool) -> Result<Option<Duration>, Failure> {
    let Some(period) = period else {
        return Ok((!force).then_some(DEFAULT_GRACE));
    };
    let seconds = u64::try_from(period.seconds).ok();
    let nanos = u32::try_from(period.nanos)
        .ok()
        .filter(|nanos| *nanos < 1_000_000_000);
    let duration = seconds
        .zip(nanos)
        .map(|(seconds, nanos)| Duration::new(seconds, nanos));
    match duration.filter(|duration| *duration <= MAX_GRACE) {
        Some(duration) => Ok((!force).then_some(duration)),
        None => Err(Failure::field("gracePeriod", "must be 0 to 3600 s")),
    }
}

#[tonic::async_trait]
impl VmService for Vms {
    async fn create_vm(
        &self,
        request: Request<v1::CreateVmRequest>,
    ) -> Result<Response<v1::CreateVmResponse>, Status> {
        let v1::CreateVmRequest { vm, start, dry_run } = request.into_inner();
        let vm = vm.ok_or_else(|| Failure::field("vm", "must be given"))?;
        // In a task of its own: a caller that goes away must not leave it half done.
        let created = tokio::spawn(vm::create(Arc::clone(&self.host), vm, start, dry_run)).await;
        let vm = created.map_err(|error| Failure::internal(error.to_string()))??;
        Ok(Response::new(v1::CreateVmResponse {
            vm: Some(vm.as_ref().clone()),
        }))
    }

    async fn get_vm(
        &self,
        request: Request<v1::GetVmRequest>,
    ) -> Result<Response<v1::GetVmResponse>, Status> {
        let entry = self.find(&request.get_ref().name)?;
        let vm = entry.state.borrow().as_ref().clone();
        Ok(Response::new(v1::GetVmResponse { vm: Some(vm) }))
    }

    async fn list_vms(
        &self,
        _: Request<v1::ListVmsRequest>,
    ) -> Result<Response<v1::ListVmsResponse>, Status> {
        let vms = self
            .host
            .table
            .list()
            .iter()
            .map(|vm| vm.as_ref().clone())
            .collect();
        Ok(Response::new(v1::ListVmsResponse { vms }))
    }

    type WatchVmsStream = watch::Stream;

    async fn watch_vms(
        &self,
        request: Request<v1::WatchVmsRequest>,
    ) -> Result<Response<Self::WatchVmsStream>, Status> {
        Ok(Response::new(watch::watch(
            Arc::clone(&self.host),
            request.into_inner().name,
        )))
    }

    async fn delete_vm(
        &self,
        request: Request<v1::DeleteVmRequest>,
    ) -> Result<Response<v1::DeleteVmResponse>, Status> {
        let v1::DeleteVmRequest { name, force } = request.into_inner();
        self.ask(&name, admission::Request::Delete { force }, None)
            .await?;
        Ok(Response::new(v1::DeleteVmResponse {}))
    }

    async fn start_vm(
        &self,
        request: Request<v1::StartVmRequest>,
    ) -> Result<Response<v1::StartVmResponse>, Status> {
        let vm = self
            .ask(&request.get_ref().name, admission::Request::Start, None)
            .await?;
        Ok(Response::new(v1::StartVmResponse { vm: Some(vm) }))
    }

    async fn stop_vm(
        &self,
        request: Request<v1::StopVmRequest>,
    ) -> Result<Response<v1::StopVmResponse>, Status> {
        let v1::StopVmRequest {
            name,
            grace_period,
            force,
        } = request.into_inner();
        let vm = self
            .ask(&name, admission::Request::Stop, grace(grace_period, force)?)
            .await?;
        Ok(Response::new(v1::StopVmResponse { vm: Some(vm) }))
    }

    async fn restart_vm(
        &self,
        request: Request<v1::RestartVmRequest>,
    ) -> Result<Response<v1::RestartVmResponse>, Status> {
        let v1::RestartVmRequest {
            name,
            grace_period,
            force,
        } = request.into_inner();
        let vm = self
            .ask(&name, admission::Request::Restart, grace(grace_period, force)?)
            .await?;
        Ok(Response::new(v1::RestartVmResponse { vm: Some(vm) }))
    }

    async fn pause_vm(
        &self,
        request: Request<v1::PauseVmRequest>,
    ) -> Result<Response<v1::PauseVmResponse>, Status> {
        let vm = self
            .ask(&request.get_ref().name, admission::Request::Pause, None)
            .await?;
        Ok(Response::new(v1::PauseVmResponse { vm: Some(vm) }))
    }

    async fn resume_vm(
        &self,
        request: Request<v1::ResumeVmRequest>,
    ) -> Result<Response<v1::ResumeVmResponse>, Status> {
        let vm = self
            .ask(&request.get_ref().name, admission::Request::Resume, None)
            .await?;
        Ok(Response::new(v1::ResumeVmResponse { vm: Some(vm) }))
    }

    async fn attach_disk(
        &self,
        _request: Request<v1::AttachDiskRequest>,
    ) -> Result<Response<v1::AttachDiskResponse>, Status> {
        Err(Status::unimplemented("not there yet"))
    }

    async fn detach_disk(
        &self,
        _request: Request<v1::DetachDiskRequest>,
    ) -> Result<Response<v1::DetachDiskResponse>, Status> {
        Err(Status::unimplemented("not there yet"))
    }

    async fn resize_vm_disk(
        &self,
        _request: Request<v1::ResizeVmDiskRequest>,
    ) -> Result<Response<v1::ResizeVmDiskResponse>, Status> {
        Err(Status::unimplemented("not there yet"))
    }

    async fn set_rate_limit(
        &self,
        _request: Request<v1::SetRateLimitRequest>,
    ) -> Result<Response<v1::SetRateLimitResponse>, Status> {
        Err(Status::unimplemented("not there yet"))
    }

    async fn get_vm_disk_stats(
        &self,
        _request: Request<v1::GetVmDiskStatsRequest>,
    ) -> Result<Response<v1::GetVmDiskStatsResponse>, Status> {
        Err(Status::unimplemented("not there yet"))
    }

    type ConsoleStream = console::Stream;

    async fn console(
        &self,
        request: Request<Streaming<v1::ConsoleRequest>>,
    ) -> Result<Response<Self::ConsoleStream>, Status> {
        Ok(Response::new(
            console::open(Arc::clone(&self.host), request.into_inner()).await?,
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn period(seconds: i64, nanos: i32) -> Option<well_known::Duration> {
        Some(well_known::Duration { seconds, nanos })
    }

    #[test]
    fn a_grace_period_is_at_most_an_hour_and_never_negative() {
        assert_eq!(grace(None, false).unwrap(), Some(DEFAULT_GRACE));
        assert_eq!(grace(None, true).unwrap(), None);
        assert_eq!(grace(period(3600, 0), false).unwrap(), Some(MAX_GRACE));
        assert_eq!(
            grace(period(0, 500_000_000), false).unwrap(),
            Some(Duration::from_millis(500))
        );
        assert_eq!(grace(period(5, 0), true).unwrap(), None);
        for wrong in [
            period(-1, 0),
            period(3600, 1),
            period(0, -1),
            period(0, i32::MAX),
            period(i64::MAX, 0),
        ] {
            assert!(grace(wrong, false).is_err(), "{wrong:?}");
        }
    }
}
