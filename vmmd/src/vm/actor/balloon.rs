//! How much of its memory the guest is asked to leave to the node.

use std::time::Duration;

use proto::{
    model::{Violations, balloon},
    vmm::{ErrorKind, SetBalloon, request::Op},
};
use tokio::time::timeout;

use super::{Actor, Reply, answer, plug::Outcome, run::SECOND_MINOR, succession::After};
use crate::{
    context::Context,
    control::{self, Client},
    failure::{Failure, Kind},
    vm::{
        admission::{self, Place, admit_disk},
        change::{self, Live},
        start,
    },
};

/// How long a `vmm` may take to tell its guest.
const TIMEOUT: Duration = Duration::from_secs(5);

impl Actor {
    /// Records another memory target (0 for all of the memory), and tells a machine that there is.
    pub(super) async fn on_memory_target(&mut self, context: &Context, target: u64, reply: Reply) {
        let client = match self.admit_target(context, target) {
            Ok(client) => client,
            Err(failure) => return answer([reply], &Err(failure)),
        };
        self.admitted(context);
        let before = self.spec.balloon.and_then(|balloon| balloon.target_bytes);
        if let Err(failure) = self.store_target(target).await {
            return answer([reply], &Err(failure));
        }
        self.publish();
        let Some(client) = client else {
            return answer([reply], &Ok(self.state()));
        };
        let held = self
            .spec
            .balloon
            .map_or(0, |balloon| balloon.held_bytes(self.spec.memory_bytes));
        let live = &mut self.disks.live;
        let number = live.target.begin(before.unwrap_or(0));
        let mut turn = live.row.join();
        self.disks.tasks.spawn(async move {
            turn.come().await;
            let result = tell(client, held).await;
            Outcome::Target(number, target, reply, result)
        });
    }

    /// What came of it: a target that the machine did not take is taken back, unless there is a newer one.
    pub(super) async fn on_target(
        &mut self,
        number: u64,
        target: u64,
        reply: Reply,
        result: Result<(), Failure>,
    ) {
        match self
            .disks
            .live
            .target
            .end(number, result.is_ok().then_some(target))
        {
            After::Newest => {
                change::take_over(&mut self.record, &Live::BalloonTarget);
                change::settle(&mut self.record);
                self.persist().await;
            }
            After::Superseded => {}
            After::Restore(before) => {
                if let Err(failure) = self.store_target(before).await {
                    tracing::error!(vm = self.record.name, %failure, "a memory target that was refused stays in the spec");
                }
            }
        }
        self.publish();
        answer([reply], &result.map(|()| self.state()));
    }

    /// Gives whom to tell, when there is a machine.
    fn admit_target(&self, context: &Context, target: u64) -> Result<Option<Client>, Failure> {
        let place = admit_disk(self.situation(), admission::DiskRequest::Limit)
            .map_err(|refusal| refusal.into_failure(&self.record.name))?;
        self.expected(context)?;
        if self.spec.balloon.is_none() {
            let message = format!(
                "VM \"{}\" has no balloon: give it one in its spec first",
                self.record.name
            );
            return Err(Failure::precondition("NO_BALLOON", message));
        }
        let mut found = Violations::default();
        balloon::target(&mut found, "targetBytes", target, self.spec.memory_bytes);
        found.or(())?;
        match place {
            Place::Spec => Ok(None),
            Place::Machine => {
                self.knows_minor(SECOND_MINOR, "change how much memory its guest is left with")?;
                self.running_client().map(Some)
            }
        }
    }

    async fn store_target(&mut self, target: u64) -> Result<(), Failure> {
        self.change_spec(|record| {
            let spec = record.spec.get_or_insert_default();
            spec.balloon.get_or_insert_default().target_bytes = target;
        })
        .await
    }
}

/// Has a machine's balloon hold that many bytes.
pub async fn tell(client: Client, held_bytes: u64) -> Result<(), Failure> {
    let op = Op::SetBalloon(SetBalloon {
        target_bytes: held_bytes,
    });
    let asked = timeout(TIMEOUT, client.request(op, &[])).await;
    match asked.unwrap_or(Err(control::Error::Unexpected("not in time"))) {
        Ok(_) => Ok(()),
        Err(control::Error::Refused(remote)) if remote.kind() == ErrorKind::NotFound => {
            let message = "the running machine has no balloon: restart the VM to give it one";
            Err(Failure::precondition("NO_BALLOON", message))
        }
        Err(control::Error::Refused(remote)) if remote.kind() == ErrorKind::State => {
            Err(Failure::precondition("NOT_NOW", remote.message))
        }
        Err(control::Error::Unexpected(what)) => {
            let message = format!("the vmm process does not answer: {what}");
            Err(Failure::new(Kind::Unavailable, "VMM_UNRESPONSIVE", message))
        }
        Err(error) => Err(start::refused(&error)),
    }
}
