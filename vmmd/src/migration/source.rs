//! The source's side: a task that carries a migration out, and one that repeats what was not answered.

use std::{
    os::{fd::OwnedFd, unix::net::UnixStream as Pair},
    sync::Arc,
    time::Duration,
};

use proto::{
    handover::{Message, SourceEvent},
    model::vm::VmSpec,
    v1::{self, DiskPreallocation, peer_service_client::PeerServiceClient},
    vmm::{MigrationPolicy, SendReply},
};
use tokio::{
    io::AsyncReadExt as _,
    net::UnixStream,
    sync::{mpsc, oneshot},
    time::{Instant, sleep, sleep_until, timeout},
};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;
use uuid::Uuid;

use super::{
    FIRST_WAIT, LAST_WAIT, Moving, ask, go_on,
    heard::{self, PROTOCOL},
};
use crate::{
    context::Context,
    control::Client,
    disk::moved,
    event::{Draft, Object},
    failure::{Failure, Kind, store_failure},
    fault,
    host::Host,
    operation::{Handle, Progress, Type},
    registry::vms::command::{Attend, Command, HandoverRequest, Purpose},
    request::preconditions,
    store::{HandoverStage, Hardware, NicHardware, VmRecord},
    text,
    vm::{guest_reset, refused},
};

/// Bytes of a message to the target.
const CHUNK: usize = 128 << 10;
/// Messages on their way to the target.
const AHEAD: usize = 4;
/// How long a write of the `vmm` waits before it asks whether to go on.
const SEND_TIMEOUT: Duration = Duration::from_millis(200);
/// How long a call that moves nothing may take.
const CALL: Duration = Duration::from_secs(30);
/// The same of the call that the guest stands still for: the target writes one record.
const PREPARATION: Duration = Duration::from_secs(10);
/// The same of an offer with disks whose space the target reserves, which some file systems do by writing it.
const RESERVATION: Duration = Duration::from_secs(3600);
/// How long the guest may stand still, when nothing is said.
const DOWNTIME: Duration = Duration::from_millis(300);
/// How long it may take until nothing of a VM that has moved is left here: its `vmm` ends, and its files are removed.
const REMOVAL: Duration = Duration::from_secs(60);

/// What is migrated.
struct Plan {
    name: String,
    uid: Uuid,
    target: String,
    client: Client,
    peer: PeerServiceClient<Channel>,
    offer: v1::OfferVmRequest,
    /// Disks that go along, as the VM calls them.
    copied: Vec<String>,
    downtime: Duration,
    /// What is done to a guest that is too fast for that.
    policy: MigrationPolicy,
    bytes_per_second: u64,
}

impl Plan {
    /// UUIDs of the disks that go along.
    fn disks(&self) -> Vec<Vec<u8>> {
        let uids = self
            .offer
            .disks
            .iter()
            .filter_map(|disk| Uuid::parse_str(&disk.uid).ok());
        uids.map(|uid| uid.as_bytes().to_vec()).collect()
    }
}

/// What a request says of a guest that is too fast.
fn policy(request: &v1::MigrateVmRequest) -> Result<MigrationPolicy, Failure> {
    use v1::MigrationPolicy as Wire;
    let policy = Wire::try_from(request.policy)
        .map_err(|_| Failure::field("policy", "is not one that this vmmd knows"))?;
    Ok(match policy {
        Wire::Unspecified if request.force => MigrationPolicy::PreferForced,
        Wire::PreferForced => MigrationPolicy::PreferForced,
        _ if request.force => {
            let problem = "says PREFER_FORCED: leave it out, or say that";
            return Err(Failure::field("force", problem));
        }
        Wire::Unspecified | Wire::AlwaysSafe => MigrationPolicy::AlwaysSafe,
        Wire::PreferSafe => MigrationPolicy::PreferSafe,
        Wire::AlwaysForced => MigrationPolicy::AlwaysForced,
    })
}

/// Begins a migration.
pub async fn migrate(
    host: &Arc<Host>,
    request: v1::MigrateVmRequest,
    downtime: Option<Duration>,
    deadline: Option<Duration>,
    context: &Context,
) -> Result<v1::Operation, Failure> {
    let name = request.name.clone();
    if !request
        .target
        .rsplit_once(':')
        .is_some_and(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok())
    {
        let problem = "must be HOST:PORT, as in node-2.example:7443";
        return Err(Failure::field("target", problem));
    }
    let policy = policy(&request)?;
    let entry = host.vms.get(&name).ok_or_else(|| Failure::no_vm(&name))?;
    let uid = entry.uid;
    let record = host.store.vm(uid.as_bytes()).await.map_err(store_failure)?;
    let record = record.ok_or_else(|| Failure::no_vm(&name))?;
    let present = v1::Preconditions {
        uid: uid.to_string(),
        generation: Some(record.generation),
    };
    preconditions::check("VM", &name, &context.preconditions, &present)?;
    let Some(run) = record.instance.clone() else {
        let message = format!("VM \"{name}\" does not run: start it, or create it on the other node");
        return Err(Failure::precondition("VM_NOT_RUNNING", message));
    };
    let wire = run.spec.or_else(|| record.spec.clone()).unwrap_or_default();
    if record.spec.as_ref().is_some_and(|wanted| *wanted != wire) {
        let message = format!(
            "the spec of VM \"{name}\" was changed since its start, which only a restart can apply: restart it, or undo the change"
        );
        return Err(Failure::precondition("RESTART_REQUIRED", message));
    }
    let spec = VmSpec::try_from(&wire)?;
    heard::refuse_what_stays(&spec)?;
    let has_disks = spec.disks.iter().any(|disk| !disk.read_only);
    let disks = moved::going(host, &name, &spec.disks).await?;
    let copied: Vec<_> = moved::along(&spec.disks)
        .map(|(in_vm, _)| in_vm.to_owned())
        .collect();
    let later = matches!(
        policy,
        MigrationPolicy::PreferSafe | MigrationPolicy::AlwaysForced
    );
    let is_newer = later || !copied.is_empty();
    let hardware = run
        .hardware
        .or_else(|| record.hardware.clone())
        .unwrap_or_default();
    let (reply, answer) = oneshot::channel();
    let sent = entry
        .mailbox
        .send(Command::Client(Purpose::Migration { has_disks, is_newer }, reply))
        .await;
    sent.map_err(|_| Failure::unavailable(&name))?;
    let client = answer.await.map_err(|_| Failure::unavailable(&name))??;
    let peer = host.peers.connect(&request.target).await?;
    let object = Object::Vm(name.clone(), uid);
    let operation = host.operations.begin(Type::VmMigrate, &object, context, deadline);
    operation.progress(Progress::bytes(0, 0), "asking the other node");
    let plan = Plan {
        offer: v1::OfferVmRequest {
            disks,
            ..offer(host, &record, wire, hardware, uid)
        },
        copied,
        name,
        uid,
        target: request.target,
        client,
        peer,
        downtime: downtime.unwrap_or(DOWNTIME),
        policy,
        bytes_per_second: request.bytes_per_second,
    };
    let pending = operation.pending();
    tokio::spawn(carry_out(Arc::clone(host), plan, operation));
    host.operations.recorded().await;
    Ok(pending.operation())
}

fn offer(
    host: &Host,
    record: &VmRecord,
    spec: v1::VmSpec,
    hardware: Hardware,
    uid: Uuid,
) -> v1::OfferVmRequest {
    let nic = |(name, nic): (String, NicHardware)| {
        let network = network_of(&spec, &name);
        let address = network.and_then(|network| host.networks.address(network, uid, &name));
        let range = network.and_then(|network| host.networks.range(network));
        let nic = v1::PeerNic {
            slot: nic.slot,
            mac: nic.mac,
            address: address.map_or(0, u32::from),
            range: range.unwrap_or_default(),
        };
        (name, nic)
    };
    let nics = hardware.nics.into_iter().map(nic).collect();
    let (mut protocol, mut cpu_features) = (PROTOCOL, host.cpus.features.clone());
    if fault::is_set(&host.config.run_dir, "other-version") {
        protocol += 1;
    }
    if fault::is_set(&host.config.run_dir, "other-processor") {
        cpu_features.push("of-another-processor".to_owned());
    }
    v1::OfferVmRequest {
        protocol,
        vm: Some(v1::Vm {
            metadata: Some(v1::ObjectMetadata {
                name: record.name.clone(),
                labels: record.labels.clone(),
                annotations: record.annotations.clone(),
                owner: record.owner.clone(),
                ..Default::default()
            }),
            spec: Some(spec),
            status: None,
        }),
        uid: uid.to_string(),
        migration: 0,
        hardware: Some(v1::PeerHardware {
            rng_slot: hardware.rng_slot,
            disk_slots: hardware.disk_slots.into_iter().collect(),
            nics,
        }),
        cpu_features,
        disks: Vec::new(),
    }
}

/// The network of the node that a NIC of this VM is in.
pub fn network_of<'a>(spec: &'a v1::VmSpec, nic: &str) -> Option<&'a str> {
    let nic = spec.nics.iter().find(|it| it.name == nic)?;
    match &nic.attachment {
        Some(v1::nic_spec::Attachment::Network(network)) => Some(network.as_str()),
        _ => None,
    }
}

async fn carry_out(host: Arc<Host>, mut plan: Plan, operation: Handle) {
    let began = Instant::now();
    let result = hand_over(&host, &mut plan, &operation).await;
    let object = Object::Vm(plan.name.clone(), plan.uid);
    match result {
        Ok(Outcome::Moved(sent)) => {
            let took = began.elapsed();
            // Whoever waits for the operation may create a VM of this name, or take the VM back.
            let moving = Moving {
                name: plan.name.clone(),
                uid: plan.uid,
                migration: plan.offer.migration,
            };
            if !moving.expires_within(&host, REMOVAL).await {
                tracing::warn!(vm = plan.name, "a VM that has moved is not removed yet");
            }
            let of_disks = match sent.disk_bytes {
                0 => String::new(),
                bytes => format!(" and {bytes} of disks"),
            };
            let message = format!(
                "the VM runs on {}: {} bytes were sent, {} of them memory{of_disks}, in {} ms and {} rounds; the guest stood still for {} ms and until the hand-over was done",
                plan.target,
                sent.sent_bytes,
                sent.memory_bytes,
                took.as_millis(),
                sent.rounds,
                sent.pause_ns / 1_000_000
            );
            host.events
                .emit(Draft::normal(object, "Migrated", message.clone()));
            operation.complete(&message);
        }
        Ok(Outcome::Decided) => {
            let message = format!(
                "{} has not confirmed that the VM runs there, and an operator has decided what becomes of it here",
                plan.target
            );
            operation.fail(&Failure::new(Kind::Aborted, "MIGRATION_RESOLVED", message));
        }
        Err(failure) => {
            // One that has not begun has no number, and must not end another one that is under way.
            if plan.offer.migration > 0 {
                take_back(&host, (&plan.name, plan.uid), Some(&operation)).await;
                let left = Attend {
                    uid: plan.uid,
                    name: plan.name.clone(),
                    migration: plan.offer.migration,
                    target: plan.target.clone(),
                };
                go_on(&host, left);
            }
            let message = format!("the migration has failed, the VM stays here: {}", failure.message);
            host.events
                .emit(Draft::warning(object, "MigrationFailed", message));
            match operation.cause() {
                Some(_) => operation.cancelled("the migration was cancelled: the VM stays here"),
                None => operation.fail(&failure),
            }
        }
    }
}

/// Ends a migration that has failed: the guest goes on as soon as that is written, which a full file system may delay.
pub(super) async fn take_back(host: &Host, (name, uid): (&str, Uuid), operation: Option<&Handle>) {
    let mut wait = FIRST_WAIT;
    loop {
        let event = SourceEvent::Cancel;
        let Err(failure) = ask(host, name, HandoverRequest::Source { event }).await else {
            return;
        };
        if !is_in(host, uid, HandoverStage::Migrating).await {
            tracing::debug!(vm = name, %failure, "end a migration that has failed");
            return;
        }
        let message = format!("the guest stands still until it is written that the VM stays: {failure}");
        tracing::warn!(vm = name, message, "end a migration that has failed");
        if let Some(operation) = operation {
            operation.progress(Progress::bytes(0, 0), &message);
        }
        tokio::select! {
            () = sleep(wait) => {}
            () = host.stopping.cancelled() => return,
        }
        wait = (wait * 2).min(LAST_WAIT);
    }
}

/// Whether the store has the VM's migration at this stage. True when the store can't be read.
async fn is_in(host: &Host, uid: Uuid, stage: HandoverStage) -> bool {
    match host.store.vm(uid.as_bytes()).await {
        Ok(record) => record
            .and_then(|it| it.handover)
            .is_some_and(|it| it.stage() == stage),
        Err(_) => true,
    }
}

/// What came of a migration after its point of no return.
enum Outcome {
    /// The VM runs on the other node.
    Moved(SendReply),
    /// The other node has not said so before somebody decided what becomes of the VM, or before the daemon ended.
    Decided,
}

/// From the offer to the end. An error is one from before the point of no return.
async fn hand_over(host: &Arc<Host>, plan: &mut Plan, operation: &Handle) -> Result<Outcome, Failure> {
    let give_up = CancellationToken::new();
    let begin = HandoverRequest::Begin {
        peer: plan.target.clone(),
        reporter: operation.reporter(),
        give_up: give_up.clone(),
        disks: plan.disks(),
    };
    fault::hold(&host.config.run_dir, "begin").await;
    let begun = ask(host, &plan.name, begin).await?;
    let Some(Message::Prepare(migration)) = begun.into_iter().next() else {
        return Err(Failure::internal("a migration without a number"));
    };
    plan.offer.migration = migration;
    let cancel = operation.token().clone();
    let prepared = async {
        let sent = send(plan, migration).await?;
        let answer = prepare(host, plan).await?;
        Ok((sent, answer))
    };
    // The guest stands still from its last part on: a cancel does not wait for the other node.
    let prepared = tokio::select! {
        prepared = prepared => prepared,
        () = cancel.cancelled() => Err(cancelled()),
        () = give_up.cancelled() => Err(guest_reset()),
    };
    let (sent, answer) = prepared?;
    // From here on nobody can cancel it.
    if !operation.commit() {
        return Err(cancelled());
    }
    let event = SourceEvent::Heard(answer);
    let commit = ask(host, &plan.name, HandoverRequest::Source { event }).await?;
    if !matches!(commit.first(), Some(Message::Commit(_))) {
        return Err(Failure::internal("the VM can't be handed over"));
    }
    operation.progress(
        Progress::bytes(sent.sent_bytes, sent.sent_bytes),
        "handing the VM over",
    );
    fault::point(&host.config.run_dir, "given");
    let to = (plan.name.as_str(), plan.uid, plan.target.as_str());
    // The connection that is there: a new one would take its time while the guest stands still.
    let peer = Some(plan.peer.clone());
    Ok(match repeat(host, to, peer, Message::Commit(migration)).await {
        true => Outcome::Moved(sent),
        false => Outcome::Decided,
    })
}

/// Everything was sent. The target's `Ready`; what it says too late is answered as over.
async fn prepare(host: &Host, plan: &mut Plan) -> Result<Message, Failure> {
    let event = SourceEvent::Sent;
    let prepare = ask(host, &plan.name, HandoverRequest::Source { event }).await?;
    let mut said = None;
    for message in prepare {
        let to = (plan.name.as_str(), plan.uid);
        said = call(host, &mut plan.peer, to, message, PREPARATION).await?;
    }
    said.filter(|answer| matches!(answer, Message::Ready(_)))
        .ok_or_else(|| {
            let message = "the other node does not take the VM any more: its events say why";
            Failure::new(Kind::Aborted, "MIGRATION_REFUSED", message)
        })
}

fn cancelled() -> Failure {
    Failure::new(Kind::Aborted, "CANCELLED", "the migration was cancelled")
}

/// Offers the machine and sends it.
async fn send(plan: &mut Plan, migration: u64) -> Result<SendReply, Failure> {
    let patience = match plan
        .offer
        .disks
        .iter()
        .any(|disk| disk.preallocation() == DiskPreallocation::Full)
    {
        true => RESERVATION,
        false => CALL,
    };
    let offered = timeout(patience, plan.peer.offer_vm(plan.offer.clone())).await;
    offered
        .map_err(|_| silent())?
        .map_err(|status| said_no(&status))?;
    let sockets = Pair::pair().and_then(|(near, far)| {
        far.set_write_timeout(Some(SEND_TIMEOUT))?;
        near.set_nonblocking(true)?;
        Ok((UnixStream::from_std(near)?, OwnedFd::from(far)))
    });
    let (near, far) = sockets.map_err(|error| Failure::internal(error.to_string()))?;
    let (parts, stream) = mpsc::channel(AHEAD);
    let open = v1::receive_vm_request::Part::Open(v1::PeerVm {
        name: plan.name.clone(),
        uid: plan.uid.to_string(),
        migration,
    });
    let open = v1::ReceiveVmRequest { part: Some(open) };
    parts.send(open).await.map_err(|_| silent())?;
    let relaying = relay(near, parts, plan.bytes_per_second);
    let receiving = async {
        let received = plan.peer.receive_vm(ReceiverStream::new(stream)).await;
        received.map(drop).map_err(|status| said_no(&status))
    };
    let sending = async {
        let how = (plan.downtime, plan.policy);
        let sent = plan.client.send_machine(far, how, plan.copied.clone()).await;
        sent.map_err(|error| refused(&error))
    };
    // When one of them fails the others end: the sockets are closed.
    let (sent, (), ()) = tokio::try_join!(sending, relaying, receiving)?;
    Ok(sent)
}

fn silent() -> Failure {
    Failure::new(Kind::Unavailable, "PEER_SILENT", "the other node does not answer")
}

fn said_no(status: &tonic::Status) -> Failure {
    let message = format!("the other node: {}", heard::reason(status.message()));
    match status.code() {
        tonic::Code::Unavailable | tonic::Code::Cancelled | tonic::Code::Unknown => {
            Failure::new(Kind::Unavailable, "PEER_GONE", message)
        }
        _ => Failure::precondition("MIGRATION_REFUSED", message),
    }
}

/// Passes on what the `vmm` writes, not faster than allowed.
async fn relay(
    mut near: UnixStream,
    parts: mpsc::Sender<v1::ReceiveVmRequest>,
    bytes_per_second: u64,
) -> Result<(), Failure> {
    let mut pace = Pace::new(bytes_per_second, Instant::now());
    loop {
        let mut data = Vec::with_capacity(CHUNK);
        let read = near.read_buf(&mut data).await;
        let length = read.map_err(|error| Failure::internal(text::words(&error)))?;
        if length == 0 {
            return Ok(());
        }
        // What is there already goes along: the vmm writes in small pieces, and each message costs. An error or the end comes again.
        while data.len() < data.capacity() && matches!(near.try_read_buf(&mut data), Ok(1..)) {}
        let length = data.len();
        let part = v1::receive_vm_request::Part::Data(data);
        let part = v1::ReceiveVmRequest { part: Some(part) };
        if parts.send(part).await.is_err() {
            // The end of the call says why, and is about to come: until then the socket stays open, or the vmm's next write would
            // fail and its error would be told in the place of the reason.
            sleep(CALL).await;
            return Err(silent());
        }
        if let Some(until) = pace.passed(length, Instant::now()) {
            sleep_until(until).await;
        }
    }
}

/// Time for which nothing was sent and that is made up for, since timers are late.
const LATE: Duration = Duration::from_millis(20);

/// Keeps what is sent below a rate at any time: what was not sent while there was nothing is not sent faster later.
#[derive(Debug)]
struct Pace {
    /// 0 for no limit.
    bytes_per_second: u64,
    /// When all that was sent has had its time.
    next: Instant,
}

impl Pace {
    fn new(bytes_per_second: u64, now: Instant) -> Self {
        Self {
            bytes_per_second,
            next: now,
        }
    }

    /// So much was sent. When more may be; at once when `None`.
    fn passed(&mut self, bytes: usize, now: Instant) -> Option<Instant> {
        let nanos = u128::try_from(bytes).ok()? * 1_000_000_000;
        let takes = nanos.checked_div(u128::from(self.bytes_per_second))?;
        let takes = Duration::from_nanos(u64::try_from(takes).unwrap_or(u64::MAX));
        let from = now.checked_sub(LATE).unwrap_or(now);
        self.next = self.next.max(from).checked_add(takes)?;
        Some(self.next)
    }
}

/// Says something to the target, which has so long; what it says back.
async fn call(
    host: &Host,
    peer: &mut PeerServiceClient<Channel>,
    (name, uid): (&str, Uuid),
    message: Message,
    patience: Duration,
) -> Result<Option<Message>, Failure> {
    let (Message::Prepare(migration)
    | Message::Ready(migration)
    | Message::Refuse(migration)
    | Message::Commit(migration)
    | Message::Abort(migration)
    | Message::Query(migration)
    | Message::Running(migration)) = message;
    let request = v1::SettleVmRequest {
        name: name.to_owned(),
        uid: uid.to_string(),
        migration,
        step: heard::step(message).into(),
    };
    let step = request.step();
    fault::hold(&host.config.run_dir, &format!("says-{step:?}")).await;
    let settled = timeout(patience, peer.settle_vm(request)).await;
    let answer = settled
        .map_err(|_| silent())?
        .map_err(|status| said_no(&status))?;
    let step = answer.into_inner().step();
    fault::hold(&host.config.run_dir, &format!("heard-{step:?}")).await;
    Ok(heard::message_of(step, migration))
}

/// Repeats a message until it is answered, first over `peer`, then over new connections. The target's answer goes to the VM's actor. False when
/// nobody waits for an answer any more: an operator has decided otherwise, or the daemon ends.
pub(super) async fn repeat(
    host: &Arc<Host>,
    (name, uid, target): (&str, Uuid, &str),
    mut peer: Option<PeerServiceClient<Channel>>,
    message: Message,
) -> bool {
    let mut wait = FIRST_WAIT;
    loop {
        let connected = match peer.take() {
            Some(peer) => Ok(peer),
            None => host.peers.connect(target).await,
        };
        let said = match connected {
            Ok(mut peer) => call(host, &mut peer, (name, uid), message, CALL).await,
            Err(failure) => Err(failure),
        };
        let request = match (message, said) {
            (Message::Abort(migration), Ok(_)) => Some(HandoverRequest::Told { migration }),
            (_, Ok(Some(answer @ Message::Running(_)))) => Some(HandoverRequest::Source {
                event: SourceEvent::Heard(answer),
            }),
            (_, Ok(_)) => None,
            (_, Err(failure)) => {
                tracing::info!(vm = name, peer = target, %failure, "the other node has not answered: it is asked again");
                None
            }
        };
        if let Some(request) = request {
            match ask(host, name, request).await {
                // The VM may be gone: that is what was wanted.
                Err(failure) if host.vms.find(uid).is_some() => {
                    tracing::warn!(vm = name, %failure, "the other node's answer can't be kept: it is asked again");
                }
                _ => return true,
            }
        }
        tokio::select! {
            () = sleep(wait) => {}
            () = host.stopping.cancelled() => return false,
        }
        wait = (wait * 2).min(LAST_WAIT);
        let waits = match message {
            Message::Commit(_) => HandoverStage::Given,
            _ => HandoverStage::Owner,
        };
        if !is_in(host, uid, waits).await {
            return false;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_not_sent_in_time_is_not_sent_faster_later() {
        let began = Instant::now();
        let at = |ms| began + Duration::from_millis(ms);
        let mut pace = Pace::new(1000, began);
        assert_eq!(pace.passed(100, at(0)), Some(at(100)));
        assert_eq!(pace.passed(100, at(100)), Some(at(200)));
        // A timer was late.
        assert_eq!(pace.passed(100, at(210)), Some(at(300)));
        // There was nothing to send for a minute.
        assert_eq!(pace.passed(100, at(60_000)), Some(at(60_080)));
        assert_eq!(pace.passed(100, at(60_080)), Some(at(60_180)));
        assert_eq!(pace.passed(0, at(60_180)), Some(at(60_180)));
        assert_eq!(Pace::new(0, began).passed(100, began), None);
        assert_eq!(
            Pace::new(1, began).passed(usize::MAX, began),
            Some(began + Duration::from_nanos(u64::MAX))
        );
    }
}
