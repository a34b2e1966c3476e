//! Asking the actor of a VM.

use std::time::Duration;

use tokio::sync::oneshot;
use vmmd_api::v1;
use vmmd_host::failure::Failure;
use vmmd_objects::context::Context;

use super::vm::Vms;
use crate::registry::vms::command::{self, Answer, Command, DiskRequest, Life, Reply};

/// Life-cycle request for a VM.
pub(super) struct Asked {
    pub(super) context: Context,
    pub(super) request: command::Request,
    pub(super) grace: Option<Duration>,
    pub(super) deadline: Option<Duration>,
    pub(super) evacuate: bool,
    pub(super) reset_nvram: bool,
}

impl Asked {
    pub(super) fn new(request: command::Request, context: Context) -> Self {
        Self {
            context,
            request,
            grace: None,
            deadline: None,
            evacuate: false,
            reset_nvram: false,
        }
    }
}

impl Vms {
    /// Sends a request to a VM's actor, and waits for the end of the operation unless `no_wait`.
    /// The operation continues if the caller disconnects.
    pub(super) async fn ask(
        &self,
        name: &str,
        asked: Asked,
        no_wait: bool,
    ) -> Result<(v1::Vm, Option<v1::Operation>), Failure> {
        let command = |reply| {
            Command::Life(Life {
                grace: asked.grace,
                deadline: asked.deadline,
                evacuate: asked.evacuate,
                reset_nvram: asked.reset_nvram,
                ..Life::new(asked.context, asked.request, reply)
            })
        };
        self.operate(name, command, no_wait).await
    }

    /// Sends what may lead to an operation.
    pub(super) async fn operate(
        &self,
        name: &str,
        command: impl FnOnce(oneshot::Sender<Result<Answer, Failure>>) -> Command,
        no_wait: bool,
    ) -> Result<(v1::Vm, Option<v1::Operation>), Failure> {
        let entry = self.find(name)?;
        let (reply, answer) = oneshot::channel();
        let command = command(reply);
        let context = command.context().cloned().unwrap_or_default();
        let sent = entry.mailbox.send(command).await;
        sent.map_err(|_| self.gone(name))?;
        let answered = async {
            let Answer { vm, pending } = answer.await.map_err(|_| self.gone(name))??;
            let Some(pending) = pending else {
                return Ok::<_, Failure>((vm, None));
            };
            if no_wait {
                self.host.operations.recorded_for(&context).await;
                return Ok((vm, Some(pending.operation())));
            }
            let ended = pending.clone().ended().await?;
            Ok((ended.unwrap_or(vm), Some(pending.operation())))
        };
        let (vm, operation) = tokio::select! {
            answered = answered => answered?,
            () = self.host.stopping.cancelled() => return Err(Failure::stopping()),
        };
        Ok((vm.as_ref().clone(), operation))
    }

    pub(super) async fn ask_disk(
        &self,
        context: Context,
        vm: &str,
        request: DiskRequest,
    ) -> Result<v1::Vm, Failure> {
        let command = |reply| Command::Disk {
            context,
            request,
            reply,
        };
        self.send(vm, command).await
    }

    pub(super) async fn send(
        &self,
        name: &str,
        command: impl FnOnce(Reply) -> Command,
    ) -> Result<v1::Vm, Failure> {
        let entry = self.find(name)?;
        let (reply, answer) = oneshot::channel();
        entry
            .mailbox
            .send(command(reply))
            .await
            .map_err(|_| self.gone(name))?;
        tokio::select! {
            answer = answer => Ok(answer.map_err(|_| self.gone(name))??.as_ref().clone()),
            () = self.host.stopping.cancelled() => Err(Failure::stopping()),
        }
    }

    pub(super) fn gone(&self, name: &str) -> Failure {
        if self.host.stopping.is_cancelled() {
            Failure::stopping()
        } else if self.host.vms.get(name).is_some() {
            Failure::unavailable(name)
        } else {
            Failure::no_vm(name)
        }
    }
}
