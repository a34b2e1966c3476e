//! The source's side: one task that carries out a migration, and one that repeats unanswered
//! messages.

use std::{
    os::{fd::OwnedFd, unix::net::UnixStream as Pair},
    sync::Arc,
    time::Duration,
};

use tokio::{
    io::AsyncReadExt as _,
    net::UnixStream,
    sync::{mpsc, oneshot},
    time::{Instant, sleep, sleep_until, timeout},
};
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Channel;
use tonic_types::StatusExt as _;
use uuid::Uuid;
use vm_lifecycle::handover::{Message, SourceEvent};
use vmm_protocol::vmm::{MigrationPolicy, SendReply};
use vmmd_api::v1::{self, DiskPreallocation, peer_service_client::PeerServiceClient};
use vmmd_host::{
    failure::{Failure, Kind},
    fault, text,
};
use vmmd_objects::{
    context::Context,
    event::{Draft, Object},
    operation::{Handle, Progress, Type},
    request::preconditions,
};
use vmmd_spec::{
    pod::PodUid,
    vm::{Boot, VmSpec},
};
use vmmd_store::store_failure;
use vmmd_store::{AbortRecord, NicHardware, VmRecord};

use super::{
    FIRST_WAIT, LAST_ABORT_WAIT, LAST_WAIT, Moving,
    peer_message::{self, PROTOCOL},
};
use crate::{
    control::Extras,
    disk::moved,
    host::Host,
    registry::{
        pods,
        vms::command::{Begin, Begun, Command, HandoverRequest, Purpose},
    },
    vm::{access_keys, as_it_runs, migratable, refused},
};

/// Bytes of a message to the target.
const CHUNK: usize = 128 << 10;
/// Messages on their way to the target.
const AHEAD: usize = 4;
/// Timeout of a write of the `vmm`, after which it checks whether to continue.
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
    /// Its number is 0 before the migration has begun.
    moving: Moving,
    target: String,
    /// Generation of the VM that was looked at.
    generation: u64,
    peer: PeerServiceClient<Channel>,
    /// The pod of the target that gets the VM.
    pod: Option<PodUid>,
    /// Disks that go along.
    disks: Vec<v1::PeerDisk>,
    /// The same, as the VM calls them.
    copied: Vec<String>,
    /// Whether the kernel comes from a disk, so that the target has no file with it.
    boot_files: bool,
    downtime: Duration,
    /// Handling of a guest that is too fast for that.
    policy: MigrationPolicy,
    bytes_per_second: u64,
}

impl Plan {
    /// UUIDs of the disks that go along.
    fn uids(&self) -> Vec<Vec<u8>> {
        let uids = self
            .disks
            .iter()
            .filter_map(|disk| Uuid::parse_str(&disk.uid).ok());
        uids.map(|uid| uid.as_bytes().to_vec()).collect()
    }
}

/// Policy of the request for a guest that is too fast.
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

/// The pod of the target, of a VM in a pod. Refused as MIGRATION_POD.
fn target_pod(spec: &VmSpec, request: &v1::MigrateVmRequest) -> Result<Option<PodUid>, Failure> {
    let refuse = |message| Err(Failure::precondition("MIGRATION_POD", message));
    match (&spec.pod, request.target_pod.as_str()) {
        (None, "") => Ok(None),
        (None, _) => refuse("target_pod: the VM is in no pod: leave the field out"),
        (Some(_), "") => {
            refuse("target_pod: the VM is in a pod: give the uid of a pod on the other node that has no VM")
        }
        (Some(_), uid) => match PodUid::new(uid) {
            Some(uid) => Ok(Some(uid)),
            None => Err(Failure::field("target_pod", "must be the uid of a pod")),
        },
    }
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
    // First, since it may take long. The record is read afterwards, and compared again when the migration begins.
    let peer = host.peers.connect(&request.target).await?;
    fault::hold(&host.config.run_dir, "connected").await;
    let uid = entry.uid;
    let record = host.store.vm(uid.as_bytes()).await.map_err(store_failure)?;
    let record = record.ok_or_else(|| Failure::no_vm(&name))?;
    let present = v1::Preconditions {
        uid: uid.to_string(),
        generation: Some(record.generation),
    };
    preconditions::check("VM", &name, &context.preconditions, &present)?;
    let (wire, _) = as_it_runs(&record)?;
    let spec = VmSpec::try_from(&wire)?;
    migratable(host, &record, &spec)?;
    let pod = target_pod(&spec, &request)?;
    let disks = moved::going(host, &name, &spec.disks).await?;
    let copied: Vec<_> = moved::along(&spec.disks)
        .map(|(in_vm, _)| in_vm.to_owned())
        .collect();
    let (reply, answer) = oneshot::channel();
    let sent = entry
        .mailbox
        .send(Command::Client(Purpose::Migration, reply))
        .await;
    sent.map_err(|_| Failure::unavailable(&name))?;
    answer.await.map_err(|_| Failure::unavailable(&name))??;
    let object = Object::Vm(name.clone(), uid);
    let operation = host.operations.begin(Type::VmMigrate, &object, context, deadline);
    operation.progress(Progress::bytes(0, 0), "asking the other node");
    let plan = Plan {
        moving: Moving {
            name,
            uid,
            migration: 0,
        },
        target: request.target,
        generation: record.generation,
        peer,
        pod,
        disks,
        copied,
        boot_files: matches!(spec.boot, Boot::Disk { .. }),
        downtime: downtime.unwrap_or(DOWNTIME),
        policy,
        bytes_per_second: request.bytes_per_second,
    };
    let pending = operation.pending();
    tokio::spawn(carry_out(Arc::clone(host), plan, operation));
    host.operations.recorded().await;
    Ok(pending.operation())
}

/// The offer to the target: the VM at the beginning of its migration.
fn offer(
    host: &Host,
    record: &VmRecord,
    (uid, migration): (Uuid, u64),
    pod: Option<&PodUid>,
    disks: Vec<v1::PeerDisk>,
) -> Result<v1::OfferVmRequest, Failure> {
    let (mut spec, hardware) = as_it_runs(record)?;
    if let (Some(of_vm), Some(pod)) = (&mut spec.pod, pod) {
        pod.as_str().clone_into(&mut of_vm.uid);
    }
    let nic = |(name, nic): (String, NicHardware)| {
        let network = network_of(&spec, &name);
        let address = match network {
            Some(network) => host.networks.address(network, uid, &name),
            None => peer_message::mac(&nic.mac)
                .filter(|_| pod.is_some())
                .and_then(|mac| vmmd_network::pod::guest_address(&host.config.run_dir, uid, mac)),
        };
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
    // With the model "host", the target's vmm checks the machine's own features before anything else is sent.
    let cpu_features = hardware.processor.map(|processor| processor.features);
    let (mut protocol, mut cpu_features) = (PROTOCOL, cpu_features.unwrap_or_default());
    if fault::is_set(&host.config.run_dir, "other-version") {
        protocol += 1;
    }
    if fault::is_set(&host.config.run_dir, "other-processor") {
        cpu_features.push("of-another-processor".to_owned());
    }
    Ok(v1::OfferVmRequest {
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
        migration,
        hardware: Some(v1::PeerHardware {
            rng_slot: hardware.rng_slot,
            disk_slots: hardware.disk_slots.into_iter().collect(),
            nics,
            firmware: hardware.firmware,
        }),
        cpu_features,
        disks,
        access_keys: access_keys::to_wire(&record.access_keys),
    })
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
    let moving = &plan.moving;
    let object = Object::Vm(moving.name.clone(), moving.uid);
    match result {
        Ok(Outcome::Moved(sent)) => {
            let took = began.elapsed();
            // The removal precedes the end of the operation: its client may then create a VM of
            // this name, or take the VM back.
            if !moving.expires_within(&host, REMOVAL).await {
                tracing::warn!(vm = moving.name, "a VM that has moved is not removed yet");
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
        // The next daemon continues with the hand-over, and ends the operation.
        Ok(Outcome::Left) => operation.leave(),
        Err(failure) => {
            // One that has not begun has no number, and must not end another one that is under way.
            if moving.migration > 0 {
                take_back(&host, moving, &operation).await;
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

/// Ends a migration that has failed: the guest continues as soon as that is written, which a full file system may delay.
async fn take_back(host: &Host, moving: &Moving, operation: &Handle) {
    let mut wait = FIRST_WAIT;
    loop {
        let event = SourceEvent::Cancel;
        let migration = moving.migration;
        let Err(failure) = moving
            .ask(host, HandoverRequest::Source { migration, event })
            .await
        else {
            return;
        };
        if host.vms.find(moving.uid).is_none() {
            return;
        }
        let message = format!("the guest stands still until it is written that the VM stays: {failure}");
        tracing::warn!(vm = moving.name, message, "end a migration that has failed");
        operation.progress(Progress::bytes(0, 0), &message);
        tokio::select! {
            () = sleep(wait) => {}
            () = host.stopping.cancelled() => return,
        }
        wait = (wait * 2).min(LAST_WAIT);
    }
}

/// Result of a migration after its point of no return.
enum Outcome {
    /// The VM runs on the other node.
    Moved(SendReply),
    /// The other node has not said so before somebody decided what becomes of the VM.
    Decided,
    /// Nor before the daemon ends.
    Left,
}

/// From the offer to the end. An error is one from before the point of no return.
async fn hand_over(host: &Arc<Host>, plan: &mut Plan, operation: &Handle) -> Result<Outcome, Failure> {
    let (give_up, gives_up) = oneshot::channel();
    let begin = Begin {
        peer: plan.target.clone(),
        generation: plan.generation,
        reporter: operation.reporter(),
        operation: operation.id().to_owned(),
        give_up,
        disks: plan.uids(),
    };
    fault::hold(&host.config.run_dir, "begin").await;
    let (reply, begun) = oneshot::channel();
    let begin = HandoverRequest::Begin(Box::new(begin), reply);
    plan.moving.ask(host, begin).await?;
    let begun = begun.await.map_err(|_| Failure::unavailable(&plan.moving.name))?;
    let migration = begun.migration;
    plan.moving.migration = migration;
    let cancel = operation.token().clone();
    let prepared = async {
        let sent = send(host, plan, &begun).await?;
        let answer = prepare(host, plan).await?;
        Ok((sent, answer))
    };
    // The guest stands still from its last part on: a cancel does not wait for the other node.
    let prepared = tokio::select! {
        prepared = prepared => prepared,
        () = cancel.cancelled() => Err(cancelled()),
        // Without a reason the VM does not end the migration any more.
        Ok(failure) = gives_up => Err(failure),
    };
    let (sent, answer) = prepared?;
    // No cancel is possible after this point.
    if !operation.commit() {
        return Err(cancelled());
    }
    let event = SourceEvent::Received(answer);
    let said = plan
        .moving
        .ask(host, HandoverRequest::Source { migration, event })
        .await?;
    if !matches!(said.first(), Some(Message::Commit(_))) {
        return Err(Failure::internal("the VM can't be handed over"));
    }
    operation.progress(
        Progress::bytes(sent.sent_bytes, sent.sent_bytes),
        "handing the VM over",
    );
    fault::point(&host.config.run_dir, "given");
    // Uses the existing connection: a new one would extend the guest's downtime.
    let peer = Some(plan.peer.clone());
    Ok(match commit(host, &plan.moving, &plan.target, peer).await {
        true => Outcome::Moved(sent),
        false if host.stopping.is_cancelled() => Outcome::Left,
        false => Outcome::Decided,
    })
}

/// Requests the target's `Ready` after the end of the data. A late `Ready` gets an answer that the
/// migration is over.
async fn prepare(host: &Host, plan: &mut Plan) -> Result<Message, Failure> {
    let (migration, event) = (plan.moving.migration, SourceEvent::Sent);
    let prepare = plan
        .moving
        .ask(host, HandoverRequest::Source { migration, event })
        .await?;
    let mut said = None;
    for message in prepare {
        let to = (plan.moving.name.as_str(), plan.moving.uid);
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
async fn send(host: &Host, plan: &mut Plan, begun: &Begun) -> Result<SendReply, Failure> {
    let (uid, migration) = (plan.moving.uid, begun.migration);
    let of = (uid, migration);
    let offer = offer(host, &begun.record, of, plan.pod.as_ref(), plan.disks.clone())?;
    let patience = match offer
        .disks
        .iter()
        .any(|disk| disk.preallocation() == DiskPreallocation::Full)
    {
        true => RESERVATION,
        false => CALL,
    };
    let offered = timeout(patience, plan.peer.offer_vm(offer)).await;
    let answer = offered
        .map_err(|_| silent())?
        .map_err(|status| said_no(&status))?;
    let extras = Extras {
        boot_files: plan.boot_files,
        header_first: answer.into_inner().header_first,
    };
    let sockets = Pair::pair().and_then(|(near, far)| {
        far.set_write_timeout(Some(SEND_TIMEOUT))?;
        near.set_nonblocking(true)?;
        Ok((UnixStream::from_std(near)?, OwnedFd::from(far)))
    });
    let (near, far) = sockets.map_err(|error| Failure::internal(error.to_string()))?;
    let (parts, stream) = mpsc::channel(AHEAD);
    let open = v1::receive_vm_request::Part::Open(v1::PeerVm {
        name: plan.moving.name.clone(),
        uid: uid.to_string(),
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
        let sent = begun.client.send_machine(far, how, plan.copied.clone(), extras);
        sent.await.map_err(|error| refused(&error))
    };
    // When one of them fails the others end: the sockets are closed.
    let (sent, (), ()) = tokio::try_join!(sending, relaying, receiving)?;
    Ok(sent)
}

fn silent() -> Failure {
    Failure::new(Kind::Unavailable, "PEER_SILENT", "the other node does not answer")
}

/// Reasons of a target that programs can act on, with their kinds.
const KEPT_REASONS: [(&str, Kind); 3] = [
    (pods::NOT_CONNECTED, Kind::Unavailable),
    (pods::HAS_VM, Kind::Precondition),
    (pods::NO_VOLUME, Kind::Precondition),
];

fn said_no(status: &tonic::Status) -> Failure {
    let message = format!("the other node: {}", peer_message::reason(status.message()));
    let info = status.get_details_error_info();
    let is_kept = |(reason, _): &(&str, Kind)| info.as_ref().is_some_and(|info| info.reason == *reason);
    if let Some((reason, kind)) = KEPT_REASONS.into_iter().find(is_kept) {
        return Failure::new(kind, reason, message);
    }
    match status.code() {
        tonic::Code::Unavailable | tonic::Code::Cancelled | tonic::Code::Unknown => {
            Failure::new(Kind::Unavailable, "PEER_GONE", message)
        }
        _ => Failure::precondition("MIGRATION_REFUSED", message),
    }
}

/// Passes on the data of the `vmm` within the rate limit.
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
        // Combines all available data, because the vmm writes small pieces and each message has a
        // cost. The next read reports an error or the end again.
        while data.len() < data.capacity() && matches!(near.try_read_buf(&mut data), Ok(1..)) {}
        let length = data.len();
        let part = v1::receive_vm_request::Part::Data(data);
        let part = v1::ReceiveVmRequest { part: Some(part) };
        if parts.send(part).await.is_err() {
            // The end of the call arrives soon with the reason. Until then the socket stays open:
            // otherwise the vmm's next write would fail, and its error would hide the reason.
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

/// Rate limit at any time: idle time gives no credit for later.
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

/// Sends a message to the target and returns its response, within `patience`.
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
    | Message::Running(migration)) = message;
    let request = v1::SettleVmRequest {
        name: name.to_owned(),
        uid: uid.to_string(),
        migration,
        step: peer_message::step(message).into(),
    };
    let step = request.step();
    fault::hold(&host.config.run_dir, &format!("says-{step:?}")).await;
    let settled = timeout(patience, peer.settle_vm(request)).await;
    let answer = settled
        .map_err(|_| silent())?
        .map_err(|status| said_no(&status))?;
    let step = answer.into_inner().step();
    fault::hold(&host.config.run_dir, &format!("received-{step:?}")).await;
    Ok(peer_message::message_of(step, migration))
}

/// Repeats the commit until the target has answered, first over `peer`, then over new connections; the actor says each time whether it still waits. The
/// target's answer goes to the VM's actor. False when nothing waits for an answer: an operator has decided otherwise, or the daemon ends.
pub(super) async fn commit(
    host: &Arc<Host>,
    moving: &Moving,
    target: &str,
    mut peer: Option<PeerServiceClient<Channel>>,
) -> bool {
    let migration = moving.migration;
    let source = |event| HandoverRequest::Source { migration, event };
    let mut wait = FIRST_WAIT;
    loop {
        match moving.ask(host, source(SourceEvent::Tick)).await {
            Ok(said) if matches!(said.first(), Some(Message::Commit(_))) => {
                let message = Message::Commit(migration);
                match say(host, (&moving.name, moving.uid, target), peer.take(), message).await {
                    Ok(Some(answer @ Message::Running(_))) => {
                        let answer = moving.ask(host, source(SourceEvent::Received(answer))).await;
                        match answer {
                            // The VM may be gone, as wanted.
                            Err(failure) if host.vms.find(moving.uid).is_some() => {
                                tracing::warn!(vm = moving.name, %failure, "the other node's answer can't be kept: it is asked again");
                            }
                            _ => return true,
                        }
                    }
                    Ok(_) => {}
                    Err(failure) => {
                        tracing::info!(vm = moving.name, peer = target, %failure, "the other node has not answered: it is asked again");
                    }
                }
            }
            Err(failure) if host.vms.find(moving.uid).is_some() && failure.reason != "MIGRATION_OVER" => {
                tracing::warn!(vm = moving.name, %failure, "hand a VM over");
            }
            _ => return false,
        }
        tokio::select! {
            () = sleep(wait) => {}
            () = host.stopping.cancelled() => return false,
        }
        wait = (wait * 2).min(LAST_WAIT);
    }
}

/// Asks a target until it has confirmed that a migration which was taken back is over.
pub(super) async fn abort(host: Arc<Host>, mut abort: AbortRecord, was_read: bool) {
    let mut wait = FIRST_WAIT;
    let mut is_durable = !was_read;
    loop {
        let uid = Uuid::from_slice(&abort.uid).unwrap_or_default();
        let to = (abort.name.as_str(), uid, abort.peer.as_str());
        let confirmed = async {
            if !is_durable {
                host.store.again(&abort).await.map_err(store_failure)?;
                is_durable = true;
            }
            say(&host, to, None, Message::Abort(abort.migration)).await?;
            host.store.confirmed(&abort).await.map_err(store_failure)
        };
        let confirmed = confirmed.await;
        match confirmed {
            Ok(()) => match host.aborts.confirmed(&abort) {
                None => return,
                Some(later) => (abort.migration, wait) = (later, FIRST_WAIT),
            },
            Err(failure) => {
                tracing::info!(vm = abort.name, peer = abort.peer, %failure, "the other node has not confirmed that a migration is over: it is asked again");
            }
        }
        tokio::select! {
            () = sleep(wait) => {}
            () = host.stopping.cancelled() => return,
        }
        wait = (wait * 2).min(LAST_ABORT_WAIT);
    }
}

/// Sends a message to a target, over a new connection unless there is one; returns the answer.
async fn say(
    host: &Host,
    (name, uid, target): (&str, Uuid, &str),
    peer: Option<PeerServiceClient<Channel>>,
    message: Message,
) -> Result<Option<Message>, Failure> {
    let mut peer = match peer {
        Some(peer) => peer,
        None => host.peers.connect(target).await?,
    };
    call(host, &mut peer, (name, uid), message, CALL).await
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
