//! The target's side: what the source asks.

use std::{collections::BTreeMap, os::unix::net::UnixStream as Pair, sync::Arc, time::Duration};

use proto::{
    handover::{Message, Target},
    v1,
};
use tokio::{io::AsyncWriteExt as _, net::UnixStream, time::timeout};
use tonic::Streaming;
use uuid::Uuid;

use super::{PROTOCOL, ask, source::refuse_what_stays};
use crate::{
    context::Context,
    failure::{Failure, Kind},
    fault,
    host::Host,
    registry::vms::command::HandoverRequest,
    store::{
        Hardware, NicHardware,
        handover::{Handover, message_of, step},
    },
    vm::{Incoming, create_incoming},
};

/// How long a VM that was offered is kept while nothing of it comes, and one that was received while nobody says what becomes of it.
const KEPT: Duration = Duration::from_secs(60);
/// How long the source may send nothing.
const SILENCE: Duration = Duration::from_secs(30);

/// Takes an offer: afterwards the node has the VM, which nobody can start.
pub async fn offer(
    host: &Arc<Host>,
    request: v1::OfferVmRequest,
    context: &Context,
) -> Result<v1::OfferVmResponse, Failure> {
    host.peers.takes_part()?;
    if request.protocol != PROTOCOL {
        let message = format!(
            "this vmmd speaks version {PROTOCOL} of the protocol of migrations, the source {}",
            request.protocol
        );
        return Err(Failure::precondition("PEER_PROTOCOL", message));
    }
    let uid = Uuid::parse_str(&request.uid).map_err(|_| Failure::field("uid", "must be a UUID"))?;
    let over = request
        .migration
        .checked_sub(1)
        .ok_or_else(|| Failure::field("migration", "must be above 0"))?;
    let own = &host.cpus.features;
    let missing: Vec<_> = request
        .cpu_features
        .iter()
        .filter(|feature| own.binary_search(feature).is_err())
        .map(String::as_str)
        .collect();
    if !missing.is_empty() {
        let message = format!("this node's processors lack {}", missing.join(", "));
        return Err(Failure::precondition("CPU_FEATURES_MISSING", message));
    }
    let vm = request.vm.ok_or_else(|| Failure::field("vm", "must be given"))?;
    refuse_what_stays(&vm.spec.clone().unwrap_or_default())?;
    if host.vms.find(uid).is_some() {
        let message = "this node has the VM already: an earlier migration of it is not over";
        return Err(Failure::new(Kind::Exists, "VM_EXISTS", message));
    }
    let name = vm.metadata.as_ref().map(|metadata| metadata.name.clone());
    let incoming = Incoming {
        uid,
        hardware: request.hardware.map(hardware).unwrap_or_default(),
        handover: Handover::Target(Target::Idle(over)).record(""),
    };
    create_incoming(host, vm, incoming, context).await?;
    keep(host, name.unwrap_or_default(), request.migration, true);
    Ok(v1::OfferVmResponse {
        build: env!("CARGO_PKG_VERSION").to_owned(),
    })
}

fn hardware(wire: v1::PeerHardware) -> Hardware {
    let nic = |(name, nic): (String, v1::PeerNic)| {
        let nic = NicHardware {
            slot: nic.slot,
            mac: nic.mac,
        };
        (name, nic)
    };
    Hardware {
        rng_slot: wire.rng_slot,
        disk_slots: wire.disk_slots.into_iter().collect(),
        nics: wire.nics.into_iter().map(nic).collect::<BTreeMap<_, _>>(),
    }
}

/// Removes the VM after a while, unless somebody has said by then what becomes of it, or `unless_begun` while it is being received.
fn keep(host: &Arc<Host>, name: String, migration: u64, unless_begun: bool) {
    let host = Arc::clone(host);
    tokio::spawn(async move {
        tokio::select! {
            () = tokio::time::sleep(KEPT) => {}
            () = host.stopping.cancelled() => return,
        }
        expire(&host, &name, migration, unless_begun).await;
    });
}

/// Removes a VM that nobody has prepared.
async fn expire(host: &Arc<Host>, name: &str, migration: u64, unless_begun: bool) {
    // It may be gone, or another one.
    let _ = ask(
        host,
        name,
        HandoverRequest::Expire {
            migration,
            unless_begun,
        },
    )
    .await;
}

/// Receives a VM that was offered. What came is gone when it fails.
pub async fn receive(
    host: &Arc<Host>,
    mut parts: Streaming<v1::ReceiveVmRequest>,
    context: &Context,
) -> Result<(), Failure> {
    use v1::receive_vm_request::Part;
    let first = parts.message().await.map_err(|status| broken(&status))?;
    let Some(Part::Open(vm)) = first.and_then(|first| first.part) else {
        return Err(Failure::field("open", "must come first"));
    };
    let received = receive_parts(host, &vm, parts, context).await;
    if received.is_err() {
        expire(host, &vm.name, vm.migration, false).await;
    } else {
        keep(host, vm.name, vm.migration, false);
    }
    received
}

async fn receive_parts(
    host: &Arc<Host>,
    vm: &v1::PeerVm,
    mut parts: Streaming<v1::ReceiveVmRequest>,
    context: &Context,
) -> Result<(), Failure> {
    use v1::receive_vm_request::Part;
    let sockets = Pair::pair().and_then(|(near, far)| {
        near.set_nonblocking(true)?;
        Ok((UnixStream::from_std(near)?, far))
    });
    let (mut near, far) = sockets.map_err(|error| Failure::internal(error.to_string()))?;
    let (started, mut waiting) = tokio::sync::oneshot::channel();
    let request = HandoverRequest::Receive {
        migration: vm.migration,
        stream: Arc::new(far.into()),
        context: context.clone(),
        started,
    };
    ask(host, &vm.name, request).await?;
    let mut ended = None;
    loop {
        let next = tokio::select! {
            next = timeout(SILENCE, parts.message()) => next,
            // Its vmm has ended before it had all.
            started = &mut waiting => {
                ended = Some(started);
                break;
            }
        };
        let part = match next {
            Ok(Ok(Some(message))) => message.part,
            Ok(Ok(None)) => break,
            Ok(Err(status)) => return Err(broken(&status)),
            Err(_) => {
                let message = format!("nothing came from the source for {} s", SILENCE.as_secs());
                return Err(Failure::new(Kind::Unavailable, "PEER_SILENT", message));
            }
        };
        let Some(Part::Data(data)) = part else {
            return Err(Failure::field("data", "must follow"));
        };
        if near.write_all(&data).await.is_err() {
            // The end of the start says why.
            break;
        }
    }
    drop(near);
    let started = match ended {
        Some(started) => started,
        None => waiting.await,
    };
    started.unwrap_or_else(|_| Err(Failure::unavailable(&vm.name)))
}

fn broken(status: &tonic::Status) -> Failure {
    let message = format!("the source went away: {}", status.message());
    Failure::new(Kind::Unavailable, "PEER_GONE", message)
}

/// Carries out a step of the hand-over.
pub async fn settle(host: &Arc<Host>, request: v1::SettleVmRequest) -> Result<v1::SettleVmResponse, Failure> {
    let wrong = || Failure::field("step", "must be PREPARE, COMMIT or ABORT");
    let message = message_of(request.step(), request.migration).ok_or_else(wrong)?;
    if !matches!(
        message,
        Message::Prepare(_) | Message::Commit(_) | Message::Abort(_)
    ) {
        return Err(wrong());
    }
    if matches!(message, Message::Commit(_)) {
        fault::point(&host.config.run_dir, "commit-lost");
    }
    let found = Uuid::parse_str(&request.uid)
        .ok()
        .and_then(|uid| host.vms.find(uid));
    let Some(entry) = found else {
        return match message {
            Message::Prepare(_) => Ok(said(Some(Message::Refuse(request.migration)))),
            // There is nothing to take back.
            Message::Abort(_) => Ok(said(None)),
            // Whoever has committed must not hear that the VM is here.
            _ => Err(Failure::no_vm(&request.name)),
        };
    };
    let vm = Arc::clone(&entry.state.borrow());
    let name = vm.metadata.as_ref().map_or("", |metadata| &metadata.name);
    let said_back = ask(host, name, HandoverRequest::Target { message }).await?;
    if matches!(message, Message::Commit(_)) {
        fault::point(&host.config.run_dir, "answer-lost");
    }
    Ok(said(said_back.into_iter().next()))
}

fn said(message: Option<Message>) -> v1::SettleVmResponse {
    let step = message.map_or(v1::HandoverStep::Unspecified, step);
    v1::SettleVmResponse { step: step.into() }
}
