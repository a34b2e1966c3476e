//! The target's side: the requests of the source.

use std::{collections::BTreeMap, os::unix::net::UnixStream as Pair, sync::Arc, time::Duration};

use tokio::{io::AsyncWriteExt as _, net::UnixStream, sync::oneshot, time::timeout};
use tonic::Streaming;
use uuid::Uuid;
use vm_lifecycle::handover::{Message, Target, heard_without_record};
use vmmd_api::v1;
use vmmd_host::{
    failure::{Failure, Kind},
    fault, text,
};
use vmmd_objects::context::Context;
use vmmd_spec::{cpu::Model, vm::Attachment};
use vmmd_store::{
    HandoverRecord, Hardware, NicHardware, ProcessorRecord,
    handover::{self, Handover},
};

use super::{
    Moving,
    peer_message::{self, Offer},
};
use crate::{
    disk::{self, moved},
    host::Host,
    registry::vms::command::HandoverRequest,
    vm::{Incoming, create_incoming},
};

/// Lifetime of an offered VM without data, and of a received VM without a decision.
const KEPT: Duration = Duration::from_secs(60);
/// How long the source may send nothing, and this node's `vmm` may take nothing.
const SILENCE: Duration = Duration::from_secs(30);
/// How long the source waits for the removal of the received data, before it receives a report of
/// the delay.
const REMOVAL: Duration = Duration::from_secs(10);
/// How long a machine of which everything has come may take until it is ready.
const BUILD: Duration = Duration::from_secs(60);

/// Takes an offer of the node `from`: afterwards this node has the VM, and refuses to start it.
pub async fn offer(
    host: &Arc<Host>,
    from: String,
    request: v1::OfferVmRequest,
    context: &Context,
) -> Result<v1::OfferVmResponse, Failure> {
    let (of, context) = (Arc::clone(host), context.clone());
    // A separate task, because a source that disconnects would otherwise leave half a VM without an
    // owner.
    let taken = tokio::spawn(async move { take_offer(&of, from, request, &context).await }).await;
    taken.map_err(|error| Failure::internal(error.to_string()))?
}

async fn take_offer(
    host: &Arc<Host>,
    from: String,
    request: v1::OfferVmRequest,
    context: &Context,
) -> Result<v1::OfferVmResponse, Failure> {
    fault::hold(&host.config.run_dir, "received-OfferVm").await;
    host.peers.takes_part()?;
    let offer = Offer::new(request, &host.cpus)?;
    let uid = offer.uid;
    if host.vms.find(uid).is_some() {
        let message = "this node has the VM already: an earlier migration of it is not over";
        return Err(Failure::new(Kind::Exists, "VM_EXISTS", message));
    }
    let moving = Moving {
        name: offer.vm.metadata.clone().unwrap_or_default().name,
        uid,
        migration: offer.migration,
    };
    if let Some(pod) = &offer.spec.pod {
        host.pods.connected(pod.as_str())?;
        host.vms.check_pod(pod.as_str())?;
    }
    let disks = moved::make(host, &moving.name, &offer.disks, context).await?;
    fault::hold(&host.config.run_dir, "made-disks").await;
    let incoming = Incoming {
        uid,
        hardware: hardware(&offer),
        access_keys: offer.access_keys.clone(),
        handover: HandoverRecord {
            disks: disks.clone(),
            peer: from,
            began_ms: text::now_ms(),
            ..handover::record(Handover::Target(Target::Idle(offer.migration.saturating_sub(1))))
        },
    };
    if let Err(failure) = create_incoming(host, offer.vm.clone(), incoming, context).await {
        moved::unmake(host, &disks).await;
        return Err(failure);
    }
    // They are the VM's from now on, and go when it does.
    let names: Vec<_> = moved::along(&offer.spec.disks)
        .map(|(_, name)| name.to_owned())
        .collect();
    if let Err(failure) = disk::keep(host, &names).await {
        moving.expires_within(host, REMOVAL).await;
        return Err(failure);
    }
    if let Err(failure) = lease(host, &offer, &moving.name).await {
        moving.expires_within(host, REMOVAL).await;
        return Err(failure);
    }
    keep(host, moving, true);
    fault::hold(&host.config.run_dir, "says-OfferVm").await;
    Ok(v1::OfferVmResponse {
        build: env!("CARGO_PKG_VERSION").to_owned(),
        header_first: true,
    })
}

fn hardware(offer: &Offer) -> Hardware {
    let wire = &offer.hardware;
    let processor = &offer.spec.processor;
    let texts = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
    let is_in_pod = |name: &str| {
        let mut nics = offer.spec.nics.iter().filter(|nic| nic.name.as_str() == name);
        nics.any(|nic| matches!(nic.attachment, Attachment::PodNetwork { .. }))
    };
    let nic = |(name, nic): (&String, &v1::PeerNic)| {
        let nic = NicHardware {
            slot: nic.slot,
            mac: nic.mac.clone(),
            pod_address: if is_in_pod(name) { nic.address } else { 0 },
        };
        (name.clone(), nic)
    };
    Hardware {
        rng_slot: wire.rng_slot,
        disk_slots: wire.disk_slots.clone().into_iter().collect(),
        nics: wire.nics.iter().map(nic).collect::<BTreeMap<_, _>>(),
        // A VM with shares is not migrated.
        share_slots: BTreeMap::new(),
        firmware: wire.firmware,
        processor: (processor.model != Model::Host).then(|| ProcessorRecord {
            model: processor.model.name().to_owned(),
            add: texts(&processor.add),
            remove: texts(&processor.remove),
            features: offer.features.clone(),
        }),
    }
}

/// Gives the NICs the addresses that they have at the source.
async fn lease(host: &Arc<Host>, offer: &Offer, vm: &str) -> Result<(), Failure> {
    let range = |network: &str| {
        let range = host.networks.range(network).unwrap_or_default();
        (range, host.networks.has_ipv4(network))
    };
    for address in offer.addresses(range)? {
        let Attachment::Network { access, .. } = &address.nic.attachment else {
            continue;
        };
        let request = vmmd_network::Lease {
            vm: (offer.uid, vm),
            nic: address.nic.name.as_str(),
            tap: vmmd_network::tap_name(offer.uid, address.slot),
            mac: address.mac,
            address: address.address,
            access,
            metadata: address.nic.metadata,
            plugged: false,
        };
        host.networks
            .lease(host.for_networks(), address.network, &request)
            .await?;
    }
    Ok(())
}

/// Removes the VM after a while, unless somebody has said by then what becomes of it, or `unless_begun` while it is being received.
fn keep(host: &Arc<Host>, moving: Moving, unless_begun: bool) {
    let host = Arc::clone(host);
    tokio::spawn(async move {
        tokio::select! {
            () = fault::wait(&host.config.run_dir, "hasty", KEPT) => {}
            () = host.stopping.cancelled() => return,
        }
        moving.expires(&host, unless_begun).await;
    });
}

/// Receives a VM that the node `from` has offered. After an error nothing of the VM is left.
pub async fn receive(
    host: &Arc<Host>,
    from: String,
    mut parts: Streaming<v1::ReceiveVmRequest>,
    context: &Context,
) -> Result<(), Failure> {
    let first = parts.message().await.map_err(|status| broken(&status))?;
    let (vm, uid) = peer_message::opened(first)?;
    fault::hold(&host.config.run_dir, "received-ReceiveVm").await;
    let moving = Moving {
        name: vm.name,
        uid,
        migration: vm.migration,
    };
    let sockets = Pair::pair().and_then(|(near, far)| {
        near.set_nonblocking(true)?;
        Ok((UnixStream::from_std(near)?, far))
    });
    let (near, far) = sockets.map_err(|error| Failure::internal(error.to_string()))?;
    let (started, waiting) = oneshot::channel();
    let request = HandoverRequest::Receive {
        from,
        migration: vm.migration,
        stream: Arc::new(far.into()),
        context: context.clone(),
        started,
    };
    // A call of another node, or a second one, is refused and removes nothing.
    moving.ask(host, request).await?;
    let received = receive_parts(host, &moving.name, parts, near, waiting).await;
    if received.is_err() {
        moving.expires_within(host, REMOVAL).await;
    } else {
        keep(host, moving, false);
        fault::hold(&host.config.run_dir, "says-ReceiveVm").await;
    }
    received
}

async fn receive_parts(
    host: &Arc<Host>,
    vm: &str,
    mut parts: Streaming<v1::ReceiveVmRequest>,
    mut near: UnixStream,
    mut waiting: oneshot::Receiver<Result<(), Failure>>,
) -> Result<(), Failure> {
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
        let data = match next {
            Ok(Ok(Some(message))) => peer_message::data(message)?,
            Ok(Ok(None)) => break,
            Ok(Err(status)) => return Err(broken(&status)),
            Err(_) => {
                let message = format!("nothing came from the source for {} s", SILENCE.as_secs());
                return Err(Failure::new(Kind::Unavailable, "PEER_SILENT", message));
            }
        };
        let written = tokio::select! {
            written = near.write_all(&data) => written,
            () = fault::wait(&host.config.run_dir, "hasty", SILENCE) => {
                let message = format!("this node's vmm has taken nothing for {} s", SILENCE.as_secs());
                return Err(Failure::internal(message));
            }
            started = &mut waiting => {
                ended = Some(started);
                break;
            }
        };
        // The end of the start says why.
        if written.is_err() {
            break;
        }
    }
    drop(near);
    let started = match ended {
        Some(started) => started,
        // It has all, and builds the machine.
        None => match timeout(BUILD, waiting).await {
            Ok(started) => started,
            Err(_) => {
                let message = format!(
                    "this node's vmm has not built the machine in {} s",
                    BUILD.as_secs()
                );
                return Err(Failure::internal(message));
            }
        },
    };
    started.unwrap_or_else(|_| Err(Failure::unavailable(vm)))
}

fn broken(status: &tonic::Status) -> Failure {
    let message = format!("the source went away: {}", peer_message::reason(status.message()));
    Failure::new(Kind::Unavailable, "PEER_GONE", message)
}

/// Carries out a step of the hand-over, which the node `from` has said.
pub async fn settle(
    host: &Arc<Host>,
    from: String,
    request: v1::SettleVmRequest,
) -> Result<v1::SettleVmResponse, Failure> {
    let message = peer_message::settled(&request)?;
    if matches!(message, Message::Commit(_)) {
        fault::point(&host.config.run_dir, "commit-lost");
    }
    fault::hold(&host.config.run_dir, &format!("received-{:?}", request.step())).await;
    let uid = Uuid::parse_str(&request.uid);
    let found = uid.as_ref().ok().and_then(|uid| host.vms.find(*uid));
    let Some(entry) = found else {
        let owned = uid.map_or(0, |uid| host.vms.owned(uid));
        let answer = heard_without_record(owned, message);
        return answer.map(said).ok_or_else(|| Failure::no_vm(&request.name));
    };
    let vm = Arc::clone(&entry.state.borrow());
    let moving = Moving {
        name: vm.metadata.clone().unwrap_or_default().name,
        uid: entry.uid,
        migration: request.migration,
    };
    let said_back = moving
        .ask(host, HandoverRequest::Target { from, message })
        .await?;
    if matches!(message, Message::Commit(_)) {
        fault::point(&host.config.run_dir, "answer-lost");
    }
    if matches!(message, Message::Abort(_)) && !moving.expires_within(host, REMOVAL).await {
        let message = "the VM is not removed yet: its events say why";
        return Err(Failure::new(Kind::Unavailable, "REMOVAL_PENDING", message));
    }
    let said = said(said_back.into_iter().next());
    fault::hold(&host.config.run_dir, &format!("says-{:?}", said.step())).await;
    Ok(said)
}

fn said(message: Option<Message>) -> v1::SettleVmResponse {
    let step = message.map_or(v1::HandoverStep::Unspecified, peer_message::step);
    v1::SettleVmResponse { step: step.into() }
}
