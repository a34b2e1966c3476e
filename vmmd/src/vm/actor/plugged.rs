//! Hot-plug of NICs and shares. The spec says which ones the VM should have, and an update changes
//! the spec. A difference between the spec and the machine is a pending change, like other live
//! changes ([`live`](super::update)).
//!
//! ```text
//!            update                vmm has it               update                  guest ejects it
//!   (none) ─────────▶ InProgress ─────────────▶ Attached ─────────▶ Detaching ─────────────────────▶ (none)
//!                        │ refused                 │ the guest ejects it   │ it does not in time
//!                        └───────▶ Pending ◀───────┘                       └──────▶ Attached, with the reason
//! ```
//!
//! A device that an update adds again while the guest is asked to eject it stays Attached. If the
//! guest ejects the device all the same, the actor attaches it again.
//!
//! The spec is stored before the `vmm` receives the request. After a restart, the daemon compares
//! the `vmm`'s devices with the spec and continues.

use std::{os::fd::OwnedFd, sync::Arc};

use tokio::time::{Instant, sleep_until, timeout};
use uuid::Uuid;
use vmm_protocol::vmm::{DetachNic, DetachShare, ErrorKind, MachineStats, request::Op};
use vmmd_api::v1::EventSeverity;
use vmmd_host::{
    failure::{Failure, Kind},
    fault,
};
use vmmd_spec::vm::VmSpec;
use vmmd_store::VmRecord;

use crate::{
    control::{self, Client},
    files,
    host::Host,
    vm::{
        actor::{
            Actor,
            plug::{Outcome, TIMEOUT, refused, unclear_about},
            update::DEFAULT_EJECT,
        },
        machine::{
            change::{self, Live, Verdict},
            limits,
        },
    },
};

/// Kind of a hot-pluggable device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// A network interface.
    Nic,
    /// A directory of the node.
    Share,
}

impl What {
    /// Device that a change attaches or detaches, if it does.
    pub fn of(live: &Live) -> Option<(Self, &str)> {
        match live {
            Live::AttachNic(name) | Live::DetachNic(name) => Some((Self::Nic, name)),
            Live::AttachShare(name) | Live::DetachShare(name) => Some((Self::Share, name)),
            _ => None,
        }
    }

    /// How its change is called in a status.
    pub fn path(self, name: &str) -> String {
        match self {
            Self::Nic => format!("spec.nics[{name}]"),
            Self::Share => format!("spec.shares[{name}]"),
        }
    }

    /// As messages have it: `NIC "lan"`.
    fn named(self, name: &str) -> String {
        match self {
            Self::Nic => format!("NIC \"{name}\""),
            Self::Share => format!("share \"{name}\""),
        }
    }

    /// Why an update has to wait.
    pub fn is_being_attached(self, name: &str) -> Failure {
        let message = format!("{} is being attached: wait until it is", self.named(name));
        Failure::precondition("BUSY", message)
    }

    /// Event reasons: for a detached device, and for one that the guest ejected without a request.
    fn events(self) -> (&'static str, &'static str) {
        match self {
            Self::Nic => ("NicDetached", "NicEjected"),
            Self::Share => ("ShareDetached", "ShareEjected"),
        }
    }

    fn detach_op(self, name: &str, force: bool) -> Op {
        let name = name.to_owned();
        match self {
            Self::Nic => Op::DetachNic(DetachNic { name, force }),
            Self::Share => Op::DetachShare(DetachShare { name, force }),
        }
    }

    fn detach_change(self, name: &str) -> Live {
        match self {
            Self::Nic => Live::DetachNic(name.to_owned()),
            Self::Share => Live::DetachShare(name.to_owned()),
        }
    }

    fn is_in(self, name: &str, stats: &MachineStats) -> bool {
        match self {
            Self::Nic => stats.nics.iter().any(|nic| nic.name == name),
            Self::Share => stats.shares.iter().any(|share| share.name == name),
        }
    }

    fn is_wanted(self, name: &str, spec: &VmSpec) -> bool {
        match self {
            Self::Nic => spec.nics.iter().any(|nic| nic.name.as_str() == name),
            Self::Share => spec.shares.iter().any(|share| share.name.as_str() == name),
        }
    }
}

/// Raises the limits of the VM for the device that it is about to receive: buffers take memory,
/// threads and processes are tasks.
pub async fn make_room(host: &Arc<Host>, uid: Uuid, record: &VmRecord, spec: &VmSpec) {
    let (limited, larger) = (Arc::clone(host), change::machine(record, spec));
    let paths = files::named(&larger, &host.sources());
    let renewing = host
        .pools
        .files
        .run(&paths, move || limits::renew(&limited, uid, &larger));
    if let Err(error) = renewing.await {
        tracing::error!(%uid, %error, "set the limits of a running VM again");
    }
}

/// Asks the `vmm` to plug something in; succeeds when the machine has it. The answer to an earlier request may have been lost.
pub async fn plug_in(
    client: &Client,
    (what, name): (What, &str),
    op: Op,
    fds: Vec<OwnedFd>,
) -> Result<(), Failure> {
    fault::step("plug in");
    let answer = timeout(TIMEOUT, client.request(op, &fds)).await;
    fault::step("hear that it is plugged in");
    drop(fds);
    match answer {
        Ok(Ok(_)) => Ok(()),
        Ok(Err(control::Error::Refused(error))) => match has(client, what, name).await {
            Some(true) if error.kind() == ErrorKind::State => Ok(()),
            _ => Err(about(what, name, refused(&control::Error::Refused(error)))),
        },
        unclear => match has(client, what, name).await {
            Some(true) => Ok(()),
            _ => Err(unclear_about(&what.named(name), unclear)),
        },
    }
}

/// Asks the guest to eject something, and waits until `deadline`. That it has is news that comes to the actor, which ends this.
pub async fn detach(client: Client, what: What, name: &str, deadline: Instant) -> Result<(), Failure> {
    let began = Instant::now();
    fault::step("ask for an eject");
    match timeout(TIMEOUT, client.request(what.detach_op(name, false), &[])).await {
        Ok(Ok(_)) => {}
        Ok(Err(control::Error::Refused(error))) if error.kind() == ErrorKind::NotFound => return Ok(()),
        Ok(Err(error @ control::Error::Refused(_))) => return Err(about(what, name, refused(&error))),
        unclear => return Err(unclear_about(&what.named(name), unclear)),
    }
    sleep_until(deadline).await;
    // An event can be lost.
    if has(&client, what, name).await == Some(false) {
        return Ok(());
    }
    let message = format!(
        "the guest did not eject {} within {:.0?}: it stays attached; detach it again, or restart the VM",
        what.named(name),
        deadline.saturating_duration_since(began)
    );
    Err(Failure::new(Kind::Deadline, "EJECT_TIMEOUT", message))
}

/// Whether a machine has something, where it says so.
pub async fn has(client: &Client, what: What, name: &str) -> Option<bool> {
    let stats = timeout(TIMEOUT, client.machine_stats()).await.ok()?.ok()?;
    Some(what.is_in(name, &stats))
}

fn about(what: What, name: &str, failure: Failure) -> Failure {
    if failure.message.contains(name) {
        return failure;
    }
    Failure {
        message: format!("{}: {}", what.named(name), failure.message),
        ..failure
    }
}

impl Actor {
    /// Asks the `vmm` which NICs and shares it has, if it can plug any.
    pub(super) fn look_at_plugged(&mut self) {
        let client = self.instance.as_ref().and_then(|instance| instance.client());
        if let Some(client) = client {
            let changes = self.disks.live.plugs_changed;
            self.disks
                .tasks
                .spawn(async move { Outcome::PluggedLooked(changes, client.machine_stats().await) });
        }
    }

    /// Whether it is on its way into the machine.
    pub(super) fn is_attaching(&self, what: What, name: &str) -> bool {
        let run = self.record.instance.as_ref();
        let running = run.and_then(|run| run.spec.as_ref());
        let has = running.is_some_and(|spec| match what {
            What::Nic => spec.nics.iter().any(|nic| nic.name == name),
            What::Share => spec.shares.iter().any(|share| share.name == name),
        });
        !has && self.disks.live.is_under_way(&what.path(name))
    }

    /// Reconciles the known state with the machine's devices, and begins the changes that an
    /// earlier daemon did not begin.
    pub(super) async fn converge_plugged(&mut self, changes: u64, present: &MachineStats) {
        if changes != self.disks.live.plugs_changed {
            return self.look_at_plugged();
        }
        let mut settled = Vec::new();
        for change in change::pending(&self.record) {
            let Verdict::Live(live) = change.verdict else {
                continue;
            };
            let comes = matches!(live, Live::AttachNic(_) | Live::AttachShare(_));
            if What::of(&live).is_some_and(|(what, name)| what.is_in(name, present) == comes) {
                settled.push(live);
            }
        }
        if !settled.is_empty() {
            for live in &settled {
                change::take_over(&mut self.record, live);
                match live {
                    Live::AttachShare(name) => self.keep_share(name, None),
                    Live::DetachShare(name) => self.forget_share(name),
                    _ => {}
                }
            }
            change::settle(&mut self.record);
            self.persist().await;
        }
        let running = self.record.instance.as_ref().and_then(|run| run.spec.clone());
        let running = running.unwrap_or_default();
        let nics = running.nics.iter().map(|nic| (What::Nic, &nic.name));
        let shares = running.shares.iter().map(|share| (What::Share, &share.name));
        for (what, name) in nics.chain(shares) {
            if !what.is_in(name, present) && !self.disks.live.is_under_way(&what.path(name)) {
                self.ejected_by_itself(what, name).await;
            }
        }
        if let Ok(client) = self.running_client() {
            for change in change::pending(&self.record) {
                let plugs = match &change.verdict {
                    Verdict::Live(live) => What::of(live).is_some(),
                    Verdict::Restart => false,
                };
                if plugs && !self.disks.live.failed.contains_key(&change.path) {
                    self.begin_live(change, client.clone(), Instant::now() + DEFAULT_EJECT);
                }
            }
        }
        self.publish();
    }

    /// Detaches a device that was just attached if the spec does not have it any more. The record
    /// of the machine never had the device.
    pub(super) fn take_back_unwanted(&mut self, live: &Live) {
        let comes = matches!(live, Live::AttachNic(_) | Live::AttachShare(_));
        if let Some((what, name)) = What::of(live).filter(|_| comes)
            && !what.is_wanted(name, &self.spec)
            && let Ok(client) = self.running_client()
        {
            let op = what.detach_op(name, true);
            tokio::spawn(async move { client.request(op, &[]).await.is_ok() });
        }
    }

    /// Something is gone from the machine.
    pub(super) async fn on_gone(&mut self, what: What, name: &str, forced: bool) {
        let (detached, _) = what.events();
        fault::step("hear that it is gone");
        tracing::info!(
            vm = self.record.name,
            ?what,
            name,
            forced,
            "gone from the machine"
        );
        let asked = self.disks.live.was_asked(&what.path(name));
        if what.is_wanted(name, &self.spec) && !asked {
            return self.ejected_by_itself(what, name).await;
        }
        self.disks.live.end(&what.path(name));
        change::take_over(&mut self.record, &what.detach_change(name));
        if what == What::Share {
            self.forget_share(name);
        }
        change::settle(&mut self.record);
        self.persist().await;
        self.publish();
        let message = format!("{} is gone from the machine", what.named(name));
        self.tell(EventSeverity::Normal, detached, &message);
        if what.is_wanted(name, &self.spec) {
            self.plug_again(what, name);
        }
    }

    /// The spec has had it again before the guest came to eject it.
    fn plug_again(&mut self, what: What, name: &str) {
        let path = what.path(name);
        let mut pending = change::pending(&self.record).into_iter();
        if let Some(change) = pending.find(|change| change.path == path) {
            match self.running_client() {
                Ok(client) => {
                    self.begin_live(change, client, Instant::now() + DEFAULT_EJECT);
                }
                Err(failure) => {
                    self.disks.live.failed.insert(path, failure.message);
                }
            }
            self.publish();
        }
    }

    /// Cancels the detach of NICs and shares that the spec has again and that `before` did not
    /// have. The request to the guest cannot be withdrawn; if the guest ejects a device all the
    /// same, the actor attaches it again.
    pub(super) fn keep_plugged(&mut self, before: &VmSpec) {
        let nics = self.spec.nics.iter().map(|nic| (What::Nic, &nic.name));
        let shares = self.spec.shares.iter().map(|share| (What::Share, &share.name));
        let back = nics.chain(shares).map(|(what, name)| (what, name.as_str()));
        let back =
            back.filter(|(what, name)| !what.is_wanted(name, before) && !self.is_attaching(*what, name));
        for path in back.map(|(what, name)| what.path(name)).collect::<Vec<_>>() {
            self.disks.live.end(&path);
        }
    }

    /// Handles a device that the guest ejected without a request, or that the machine lacks. The
    /// next update or start plugs it in.
    async fn ejected_by_itself(&mut self, what: What, name: &str) {
        let (_, ejected) = what.events();
        change::take_over(&mut self.record, &what.detach_change(name));
        if what == What::Share {
            self.forget_share(name);
        }
        self.persist().await;
        let why = "the guest ejected it; the next update or start of the VM plugs it in";
        let path = what.path(name);
        self.disks.live.end(&path);
        self.disks.live.failed.insert(path, why.to_owned());
        self.publish();
        let message = format!(
            "the guest has ejected {} by itself; it is still in the spec",
            what.named(name)
        );
        self.tell(EventSeverity::Warning, ejected, &message);
    }
}
