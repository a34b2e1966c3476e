//! The clients of one round: their calls and the results.

use std::{
    collections::BTreeMap,
    future::Future,
    path::PathBuf,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
};

use rustix::process::{Pid, Signal, kill_process};
use tokio::{sync::Notify, time::timeout};
use tonic::{Code, Status, transport::Channel};
use vmmd_api::v1::{
    self, node_service_client::NodeServiceClient, operation_service_client::OperationServiceClient,
};

use super::{
    calls::{
        self, Answer, Call, Client, Kind, NEVER, Request, is_final, is_gone, looks, name, reason, wrong,
    },
    model::{Look, Time},
};
use crate::harness::PATIENCE;

/// A call that was made, and its result.
pub struct Made {
    pub client: usize,
    pub call: Call,
    pub mark: u64,
    pub generation: u64,
    pub request: Option<Request>,
    pub begin: Time,
    pub end: Time,
    /// `None` when the daemon was killed before the answer.
    pub answer: Option<Answer>,
    pub looks: BTreeMap<u8, Look>,
}

/// State shared by the clients.
pub struct Scene {
    pub manifest: v1::Vm,
    pub clock: AtomicU64,
    pub killed: AtomicBool,
    pub answers: AtomicUsize,
    pub answered: Notify,
    /// Numbers of requests.
    pub next: AtomicU64,
    pub made: Mutex<Vec<Made>>,
    pub generations: BTreeMap<u8, u64>,
    /// Of the daemon.
    pub folder: PathBuf,
}

impl Scene {
    pub fn now(&self) -> Time {
        self.clock.fetch_add(1, Ordering::SeqCst)
    }

    /// An answer, if there is one. Only a daemon that was killed may owe one.
    pub fn came(&self, answer: Answer) -> Option<Answer> {
        match answer {
            Err(status) if reason(&status).is_none() => {
                assert!(
                    self.killed.load(Ordering::SeqCst),
                    "lost without cause: {status:?}"
                );
                None
            }
            answer => Some(answer),
        }
    }
}

pub async fn in_time<T>(what: impl std::fmt::Debug, future: impl Future<Output = T>) -> T {
    match timeout(PATIENCE, future).await {
        Ok(value) => value,
        Err(_) => panic!("{what:?} was not answered in time"),
    }
}

/// Makes the calls of one client until it is done or the daemon is gone.
pub async fn client(number: usize, scene: Arc<Scene>, channel: Channel, calls: Vec<Call>) {
    let mut client = Client::new(channel.clone());
    for call in calls {
        if scene.killed.load(Ordering::SeqCst) {
            return;
        }
        let mark = scene.next.fetch_add(1, Ordering::SeqCst);
        let generation = scene.generations[&call.vm];
        let request = call.request(
            scene.manifest.clone(),
            mark,
            format!("request {mark}"),
            generation,
            &scene.folder.join("disks"),
        );
        let mut made = Made {
            client: number,
            generation: if call.generation { generation } else { 0 },
            mark,
            begin: scene.now(),
            end: NEVER,
            answer: None,
            looks: BTreeMap::new(),
            request,
            call,
        };
        in_time(
            made.call.clone(),
            carry_out(&scene, &channel, &mut client, &mut made),
        )
        .await;
        scene.made.lock().unwrap().push(made);
        scene.answers.fetch_add(1, Ordering::SeqCst);
        scene.answered.notify_one();
    }
}

async fn carry_out(scene: &Scene, channel: &Channel, client: &mut Client, made: &mut Made) {
    let answer = if let Some(request) = &made.request {
        let mut other = client.clone();
        let first = async { scene.came(request.send(client).await) };
        if made.call.twice {
            let second = async { scene.came(request.send(&mut other).await) };
            let (first, second) = tokio::join!(first, second);
            of_two(first, second)
        } else {
            first.await
        }
    } else {
        scene.came(
            look(scene, channel, client, made)
                .await
                .map(|()| serde_json::Value::Null),
        )
    };
    // A process that was killed is found to be gone later.
    if answer.is_some() && !made.call.is_felt_later() {
        made.end = scene.now();
    }
    made.answer = answer;
}

/// Combines the answers to a request that was sent twice at the same time.
fn of_two(first: Option<Answer>, second: Option<Answer>) -> Option<Answer> {
    match (first, second) {
        // For a creation whose VM is gone when the later request arrives.
        (Some(made), Some(gone)) | (Some(gone), Some(made)) if made.is_ok() && is_gone(&gone) => Some(made),
        (Some(first), Some(second)) if is_final(&first) && is_final(&second) => {
            assert_eq!(plain(&first), plain(&second), "two answers to one request");
            Some(first)
        }
        // A request that another call in progress has blocked is carried out by the other attempt,
        (Some(one), Some(other)) => {
            let weight = |answer: &Answer| match answer {
                Ok(_) => 3,
                Err(status) if reason(status).as_deref() == Some("BUSY") => 0,
                Err(status) if status.code() == Code::Aborted => 2,
                Err(_) => 1,
            };
            Some(std::cmp::max_by_key(one, other, weight))
        }
        // and perhaps by one that was never answered.
        (answer, None) | (None, answer) => answer.filter(|answer| is_final(answer) && !is_gone(answer)),
    }
}

/// Calls that change nothing, and the end of a process.
async fn look(scene: &Scene, channel: &Channel, client: &mut Client, made: &mut Made) -> Result<(), Status> {
    let get = v1::GetVmRequest {
        name: name(made.call.vm),
    };
    match made.call.kind {
        Kind::List => {
            let listed = client.list_vms(v1::ListVmsRequest::default()).await?;
            made.looks = looks(&listed.into_inner().vms);
        }
        Kind::Illegal(which) => wrong(client, which, scene.manifest.clone()).await?,
        Kind::Panic => {
            let folder = scene.folder.join("run/fault");
            std::fs::create_dir_all(&folder).unwrap();
            std::fs::write(folder.join(name(made.call.vm)), "").unwrap();
        }
        Kind::Drain => drain(channel).await?,
        Kind::Cancel => {
            let found = client.get_vm(get).await;
            let operation = found.ok().and_then(|found| found.into_inner().vm?.status);
            let id = operation.map(|status| status.operation).unwrap_or_default();
            if !id.is_empty() {
                let mut operations = OperationServiceClient::new(channel.clone());
                let request = v1::CancelOperationRequest { id };
                // It may have ended, or be past the point of no return.
                let _ = operations.cancel_operation(request).await;
            }
        }
        Kind::Get | Kind::Die => {
            let found = match client.get_vm(get).await {
                Ok(found) => found.into_inner().vm,
                Err(status) if reason(&status).as_deref() == Some("VM_NOT_FOUND") => None,
                Err(status) => return Err(status),
            };
            if made.call.kind == Kind::Die {
                let instance = found.and_then(|vm| vm.status?.instance);
                let pid = instance.and_then(|instance| Pid::from_raw(instance.pid.try_into().ok()?));
                // The process may have ended on its own.
                let _ended = pid.map(|pid| kill_process(pid, Signal::KILL));
            } else {
                let look = found.as_ref().map_or(Look::Absent, calls::look);
                made.looks.insert(made.call.vm, look);
            }
        }
        _ => {}
    }
    Ok(())
}

/// All VMs are stopped; then the node takes VMs again, unless another client drains it.
pub async fn drain(channel: &Channel) -> Result<(), Status> {
    let mut nodes = NodeServiceClient::new(channel.clone());
    let drain = v1::DrainNodeRequest {
        grace_period: Some(calls::SHORT),
        ..Default::default()
    };
    for result in [
        nodes.drain_node(drain).await.map(drop),
        nodes
            .uncordon_node(v1::UncordonNodeRequest::default())
            .await
            .map(drop),
    ] {
        match result {
            Err(status) if reason(&status).is_none() => return Err(status),
            _ => {}
        }
    }
    Ok(())
}

/// Part of an answer that is equal in two answers to the same request.
pub fn plain(answer: &Answer) -> Result<Option<&serde_json::Value>, (tonic::Code, &str)> {
    match answer {
        // The VM is shown as it is then.
        Ok(response) => Ok(response.pointer("/vm/metadata/uid")),
        Err(status) => Err((status.code(), status.message())),
    }
}

mod tests {
    use tonic_types::{ErrorDetails, StatusExt};

    use super::*;

    fn refused(code: Code, reason: &str) -> Option<Answer> {
        let details = ErrorDetails::with_error_info(reason, "vmmd", []);
        Some(Err(Status::with_error_details(code, "", details)))
    }

    #[test]
    fn unanswered_attempt_may_have_been_carried_out() {
        let busy = || refused(Code::FailedPrecondition, "BUSY");
        let cut = || refused(Code::Aborted, "SUPERSEDED");
        let missing = || refused(Code::NotFound, "VM_NOT_FOUND");
        let gone = || refused(Code::NotFound, "OBJECT_GONE");
        let done = || Some(Ok(serde_json::Value::Null));
        for (first, second, expected) in [
            (busy(), None, None),
            (None, None, None),
            (done(), None, done()),
            (missing(), None, None),
            (busy(), done(), done()),
            (busy(), missing(), missing()),
            (busy(), busy(), busy()),
            (busy(), cut(), cut()),
            (cut(), missing(), cut()),
            (gone(), done(), done()),
            (gone(), None, None),
            (done(), done(), done()),
        ] {
            for answer in [of_two(first.clone(), second.clone()), of_two(second, first)] {
                assert_eq!(answer.as_ref().map(plain), expected.as_ref().map(plain));
            }
        }
    }
}
