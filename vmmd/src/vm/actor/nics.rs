//! NICs that come and go while the machine runs. Which ones the VM is to have is its spec: an update says it, and what the machine has
//! otherwise is a pending change, like others that a machine takes over ([`live`](super::update)).
//!
//! ```text
//!            update                vmm has it               update                  guest ejects it
//!   (none) ─────────▶ InProgress ─────────────▶ Attached ─────────▶ Detaching ─────────────────────▶ (none)
//!                        │ refused                 │ the guest ejects it   │ it does not in time
//!                        └───────▶ Pending ◀───────┘                       └──────▶ Attached, with the reason
//! ```
//!
//! The spec is stored before the `vmm` is asked. A daemon that starts anew compares what the `vmm` has with it, and goes on.

use std::sync::Arc;

use proto::{
    model::vm::Attachment,
    v1::EventSeverity,
    vmm::{AttachNic, DetachNic, ErrorKind, NicDetached, NicStats, request::Op},
};
use tokio::time::{Instant, sleep_until, timeout};
use uuid::Uuid;

use crate::{
    control::{self, Client},
    failure::{Failure, Kind},
    files,
    host::Host,
    network,
    store::VmRecord,
    vm::{
        actor::{
            Actor,
            plug::{Outcome, TIMEOUT, refused, unclear_about},
            run::SEVENTH_MINOR,
            update::DEFAULT_EJECT,
        },
        machine::{
            self,
            change::{self, Live, Verdict},
            limits,
        },
    },
};

/// What a NIC's change is called in a status.
pub fn path(name: &str) -> String {
    format!("spec.nics[{name}]")
}

/// Makes the tap of the NIC `name` of a VM's spec, and plugs it in.
pub async fn attach(
    host: Arc<Host>,
    client: Client,
    uid: Uuid,
    record: VmRecord,
    name: &str,
) -> Result<(), Failure> {
    let wire = record.spec.clone().unwrap_or_default();
    let hardware = record.hardware.clone().unwrap_or_default();
    let spec = proto::model::vm::VmSpec::try_from(&wire)?;
    let mut nics = spec.nics.iter().enumerate();
    let Some((index, nic)) = nics.find(|(_, nic)| nic.name.as_str() == name) else {
        return Err(not_found(name));
    };
    let Some(mac) = machine::mac(&hardware, name) else {
        let message = format!("the VM has no PCI slot free for NIC \"{name}\": detach a disk or a NIC first");
        return Err(Failure::new(Kind::Exhausted, "NO_FREE_SLOT", message));
    };
    // Its buffers take memory, its threads are tasks.
    let (limited, larger) = (Arc::clone(&host), change::machine(&record, &spec));
    let paths = files::named(&larger, &host.sources());
    let renewing = host
        .pools
        .files
        .run(&paths, move || limits::renew(&limited, uid, &larger));
    if let Err(error) = renewing.await {
        tracing::error!(%uid, %error, "set the limits of a running VM anew");
    }
    let tap = machine::taps(uid, &hardware).remove(name).unwrap_or_default();
    let tap = network::open_tap(host.for_networks(), uid, &record.name, index, nic, (mac, tap)).await?;
    let (wire, fds) = machine::plug_nic(&hardware, nic, tap);
    let op = Op::AttachNic(AttachNic { nic: Some(wire) });
    let answer = timeout(TIMEOUT, client.request(op, &fds)).await;
    drop(fds);
    match answer {
        Ok(Ok(_)) => Ok(()),
        // The answer to an earlier request may have been lost.
        Ok(Err(control::Error::Refused(error))) => match has(&client, name).await {
            Some(true) if error.kind() == ErrorKind::State => Ok(()),
            _ => Err(about(name, refused(&control::Error::Refused(error)))),
        },
        unclear => match has(&client, name).await {
            Some(true) => Ok(()),
            _ => Err(unclear_about(&format!("NIC \"{name}\""), unclear)),
        },
    }
}

/// Lets a NIC in a network of the node have the connections of its spec, and the ports that it publishes.
pub async fn admit(host: &Arc<Host>, uid: Uuid, record: &VmRecord, name: &str) -> Result<(), Failure> {
    let spec = proto::model::vm::VmSpec::try_from(&record.spec.clone().unwrap_or_default())?;
    let nic = spec.nics.iter().find(|nic| nic.name.as_str() == name);
    match nic.map(|nic| &nic.attachment) {
        Some(Attachment::Network {
            name: network,
            ports,
            firewall,
            ..
        }) => {
            let nic = ((uid, record.name.as_str()), name);
            let networks = &host.networks;
            networks
                .admit(host.for_networks(), network.as_str(), nic, ports, firewall)
                .await
        }
        _ => Err(not_found(name)),
    }
}

/// Asks the guest to eject a NIC, and waits until `deadline`. That it has is news that comes to the actor, which ends this.
pub async fn detach(client: Client, name: &str, deadline: Instant) -> Result<(), Failure> {
    let began = Instant::now();
    let op = Op::DetachNic(DetachNic {
        name: name.to_owned(),
        force: false,
    });
    match timeout(TIMEOUT, client.request(op, &[])).await {
        Ok(Ok(_)) => {}
        Ok(Err(control::Error::Refused(error))) if error.kind() == ErrorKind::NotFound => return Ok(()),
        Ok(Err(error @ control::Error::Refused(_))) => return Err(about(name, refused(&error))),
        unclear => return Err(unclear_about(&format!("NIC \"{name}\""), unclear)),
    }
    sleep_until(deadline).await;
    // An event can be lost.
    if has(&client, name).await == Some(false) {
        return Ok(());
    }
    let message = format!(
        "the guest did not eject NIC \"{name}\" within {:.0?}: it stays attached; detach it again, or restart the VM",
        deadline.saturating_duration_since(began)
    );
    Err(Failure::new(Kind::Deadline, "EJECT_TIMEOUT", message))
}

/// Whether a machine has a NIC, where it says so.
async fn has(client: &Client, name: &str) -> Option<bool> {
    let stats = timeout(TIMEOUT, client.machine_stats()).await.ok()?.ok()?;
    Some(stats.nics.iter().any(|nic| nic.name == name))
}

fn about(name: &str, failure: Failure) -> Failure {
    if failure.message.contains(name) {
        return failure;
    }
    Failure {
        message: format!("NIC \"{name}\": {}", failure.message),
        ..failure
    }
}

fn not_found(name: &str) -> Failure {
    Failure::new(
        Kind::NotFound,
        "NIC_NOT_FOUND",
        format!("the VM has no NIC \"{name}\""),
    )
}

impl Actor {
    /// Asks the `vmm` which NICs it has, if it can plug any.
    pub(super) fn look_at_nics(&mut self) {
        let client = self.instance.as_ref().and_then(|instance| instance.client());
        if let Some(client) = client.filter(|_| self.knows_minor(SEVENTH_MINOR, "plug NICs").is_ok()) {
            let changes = self.disks.live.nics_changed;
            self.disks.tasks.spawn(async move {
                let stats = client.machine_stats().await;
                Outcome::NicsLooked(changes, stats.map(|stats| stats.nics))
            });
        }
    }

    /// Makes what is known agree with what the machine has, and begins what an earlier daemon did not come to.
    pub(super) async fn converge_nics(&mut self, changes: u64, present: &[NicStats]) {
        if changes != self.disks.live.nics_changed {
            return self.look_at_nics();
        }
        let has = |name: &str| present.iter().any(|nic| nic.name == name);
        let mut settled = Vec::new();
        for change in change::pending(&self.record) {
            match &change.verdict {
                Verdict::Live(live @ Live::AttachNic(name)) if has(name) => settled.push(live.clone()),
                Verdict::Live(live @ Live::DetachNic(name)) if !has(name) => settled.push(live.clone()),
                _ => {}
            }
        }
        if !settled.is_empty() {
            for live in &settled {
                change::take_over(&mut self.record, live);
            }
            change::settle(&mut self.record);
            self.persist().await;
        }
        let running = self.record.instance.as_ref().and_then(|run| run.spec.clone());
        for nic in running.unwrap_or_default().nics {
            if !has(&nic.name) && !self.disks.live.is_under_way(&path(&nic.name)) {
                self.ejected_nic(&nic.name).await;
            }
        }
        if let Ok(client) = self.running_client() {
            for change in change::pending(&self.record) {
                let of_nic = matches!(
                    &change.verdict,
                    Verdict::Live(Live::AttachNic(_) | Live::DetachNic(_))
                );
                if of_nic && !self.disks.live.failed.contains_key(&change.path) {
                    self.begin_live(change, client.clone(), Instant::now() + DEFAULT_EJECT);
                }
            }
        }
        self.publish();
    }

    /// A NIC is gone from the machine.
    pub(super) async fn on_nic_gone(&mut self, gone: NicDetached) {
        let NicDetached { name, forced } = gone;
        tracing::info!(
            vm = self.record.name,
            nic = name,
            forced,
            "a NIC is gone from the machine"
        );
        if self.spec.nics.iter().any(|nic| nic.name.as_str() == name) {
            return self.ejected_nic(&name).await;
        }
        self.disks.live.end(&path(&name));
        change::take_over(&mut self.record, &Live::DetachNic(name.clone()));
        change::settle(&mut self.record);
        self.persist().await;
        self.publish();
        let message = format!("NIC \"{name}\" is gone from the machine");
        self.tell(EventSeverity::Normal, "NicDetached", &message);
    }

    /// The guest has ejected a NIC by itself, or the machine lacks it: it is plugged in by the next update or start.
    async fn ejected_nic(&mut self, name: &str) {
        change::take_over(&mut self.record, &Live::DetachNic(name.to_owned()));
        self.persist().await;
        let why = "the guest ejected it; the next update or start of the VM plugs it in";
        self.disks.live.end(&path(name));
        self.disks.live.failed.insert(path(name), why.to_owned());
        self.publish();
        let message = format!("the guest has ejected NIC \"{name}\" by itself; it is still in the spec");
        self.tell(EventSeverity::Warning, "NicEjected", &message);
    }
}
