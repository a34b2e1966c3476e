//! The network interfaces of a machine, which come and go while it lives, as disks do ([`disks`](super::disks)): a *fitted* one has its
//! function on the PCI bus, and a *leaving* one, which the guest has ejected or which was taken away, ends on a thread of its own. Its tap is
//! closed then.

use std::{
    os::fd::OwnedFd,
    sync::Arc,
    time::{Duration, Instant},
};

use devices::{
    component::Component,
    pci::HotPlug,
    rate::Limiter,
    virtio::{net::NetControl, transport::VirtioPciDevice},
};
use proto::{
    model::{disk::RateLimit, machine},
    vmm::{self, ErrorKind, NicStats},
};

use super::{
    assemble::{Fds, Sockets, disk, nic},
    leaving::{Leaving, Phase},
};
use crate::lifecycle::{Detached, Failure, NicChange, Pluggable, Progress, Token};

/// How long a NIC that is taken away by force may take before whoever asked is told that it takes longer.
const FORCE_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a NIC's worker may take to take its queues back from the kernel.
const TAKE_BACK: Duration = Duration::from_secs(5);

/// One of them.
pub(super) struct Nic {
    pub name: String,
    pub slot: u8,
    pub device: VirtioPciDevice,
    pub control: NetControl,
    /// Of what the guest receives and sends, if they are limited.
    pub receive_limiter: Option<Arc<Limiter>>,
    pub transmit_limiter: Option<Arc<Limiter>>,
}

/// See the module.
pub(super) struct Nics {
    fitted: Vec<Nic>,
    leaving: Vec<Leaving>,
    sockets: Sockets,
    hotplug: Arc<HotPlug>,
    /// Memory is logged: no kernel serves queues.
    kept: bool,
    /// Answers that nobody collected yet.
    answers: Vec<(Token, Result<(), Failure>)>,
}

impl Nics {
    /// Of a machine whose guest is told of changes through `hotplug`.
    pub fn new(sockets: Sockets, hotplug: Arc<HotPlug>) -> Self {
        Self {
            fitted: Vec::new(),
            leaving: Vec::new(),
            sockets,
            hotplug,
            kept: false,
            answers: Vec::new(),
        }
    }

    /// Puts in a NIC that is there when the machine is switched on.
    pub fn fit(&mut self, spec: &machine::Nic, fds: &mut Fds) -> Result<(), Failure> {
        let nic = nic::plug(&self.sockets, spec, fds)?;
        self.fitted.push(nic);
        Ok(())
    }

    /// Those that the machine's pause, resume and reset are for.
    pub fn components(&mut self) -> impl Iterator<Item = &mut dyn Component> {
        self.fitted
            .iter_mut()
            .map(|nic| &mut nic.device as &mut dyn Component)
    }

    /// Slots of those that the guest has, by the names of their components.
    pub fn slots(&self) -> impl Iterator<Item = (u8, String)> {
        self.fitted
            .iter()
            .map(|nic| (nic.slot, nic.device.name().to_owned()))
    }

    /// See [`Machine::attach_nic`](crate::lifecycle::Machine::attach_nic).
    pub fn attach(&mut self, wire: &vmm::Nic, fds: Vec<OwnedFd>) -> Result<(), Failure> {
        let spec = machine::Nic::new(wire, fds.len()).map_err(|violations| Failure {
            kind: ErrorKind::Invalid,
            message: violations.to_string(),
        })?;
        let refused = |message| {
            Err(Failure {
                kind: ErrorKind::State,
                message,
            })
        };
        self.sweep();
        if self.fitted.iter().any(|nic| nic.name == spec.name) {
            return refused(format!("there is a NIC {} already", spec.name));
        }
        if self.leaving.iter().any(|nic| nic.name == spec.name) {
            return refused(format!("a NIC {} is still being taken away", spec.name));
        }
        let slot = spec.slot.number();
        if self.sockets.pci.is_taken(slot) {
            return refused(format!("PCI slot {slot} is taken"));
        }
        let nic = nic::plug(&self.sockets, &spec, &mut Fds::new(fds))?;
        if self.kept {
            // It serves nothing yet, so this waits for nothing.
            nic.control.keep_queues(true, TAKE_BACK);
        }
        self.fitted.push(nic);
        self.hotplug.plugged(slot);
        Ok(())
    }

    /// See [`Machine::detach_nic`](crate::lifecycle::Machine::detach_nic).
    pub fn detach(&mut self, token: Token, name: &str, force: bool) -> Result<Progress, Failure> {
        self.sweep();
        match self.fitted.iter().position(|nic| nic.name == name) {
            Some(index) if force => {
                let nic = self.fitted.remove(index);
                self.hotplug.withdraw(nic.slot, || {
                    self.sockets.pci.remove_by_force(nic.slot, &self.sockets.mmio);
                });
                self.leave(nic, true);
            }
            Some(index) => {
                if let Some(nic) = self.fitted.get(index) {
                    self.hotplug.ask(nic.slot);
                }
            }
            None if self.leaving.iter().any(|nic| nic.name == name) => {}
            None => return Err(not_found(name)),
        }
        match self.leaving.iter_mut().find(|nic| nic.name == name) {
            Some(nic) if force => {
                nic.waiting.push((token, Instant::now() + FORCE_TIMEOUT));
                Ok(Progress::Pending)
            }
            _ => Ok(Progress::Done),
        }
    }

    /// Has those leave that the guest ejected.
    fn sweep(&mut self) {
        let pci = &self.sockets.pci;
        let ejected: Vec<Nic> = self
            .fitted
            .extract_if(.., |nic| !pci.holds(nic.slot, &nic.device.function()))
            .collect();
        for nic in ejected {
            self.leave(nic, false);
        }
    }

    fn leave(&mut self, nic: Nic, forced: bool) {
        let rest = (nic.control, nic.receive_limiter, nic.transmit_limiter);
        let notifier = self.sockets.notifier.clone();
        let which = (Pluggable::Nic, nic.name, forced);
        self.leaving.push(Leaving::end(which, nic.device, rest, notifier));
    }

    /// See [`Machine::collect_detached`](crate::lifecycle::Machine::collect_detached).
    pub fn collect_detached(&mut self) -> Vec<Detached> {
        self.sweep();
        let gone = self
            .leaving
            .extract_if(.., |nic| nic.look(Instant::now()) == Phase::Gone);
        gone.map(|nic| {
            let waiting = nic.waiting.into_iter();
            self.answers.extend(waiting.map(|(token, _)| (token, Ok(()))));
            Detached {
                what: Pluggable::Nic,
                name: nic.name,
                forced: nic.forced,
            }
        })
        .collect()
    }

    /// See [`Machine::collect_answers`](crate::lifecycle::Machine::collect_answers).
    pub fn collect_answers(&mut self) -> Vec<(Token, Result<(), Failure>)> {
        let now = Instant::now();
        for nic in &mut self.leaving {
            self.answers.extend(nic.give_up(now));
        }
        std::mem::take(&mut self.answers)
    }

    /// See [`Machine::next_deadline`](crate::lifecycle::Machine::next_deadline).
    pub fn next_deadline(&self) -> Option<Instant> {
        let waiting = self.leaving.iter().flat_map(|nic| &nic.waiting);
        waiting.map(|(_, deadline)| *deadline).min()
    }

    /// Waits until nothing that is off the bus touches guest memory any more.
    pub fn wait_for_leaving(&mut self, deadline: Instant) -> Result<(), Failure> {
        self.sweep();
        let stays = |nic: &mut Leaving| (nic.look(deadline) != Phase::Gone).then(|| nic.name.clone());
        match self.leaving.iter_mut().find_map(stays) {
            None => Ok(()),
            Some(name) => Err(Failure {
                kind: ErrorKind::Internal,
                message: format!("NIC {name}, which is being taken away, did not end"),
            }),
        }
    }

    /// While memory is logged no kernel (vhost-net) serves NICs: the dirty log does not see what it writes. Without `keep` it may
    /// again.
    pub fn keep_queues(&mut self, keep: bool) -> Result<(), Failure> {
        self.kept = keep;
        for nic in &self.fitted {
            if !nic.control.keep_queues(keep, TAKE_BACK) {
                return Err(Failure {
                    kind: ErrorKind::Internal,
                    message: format!("NIC {}: its queues can't be taken back from the kernel", nic.name),
                });
            }
        }
        Ok(())
    }

    /// See [`Machine::update_nic`](crate::lifecycle::Machine::update_nic).
    pub fn update(&mut self, name: &str, change: &NicChange) -> Result<(), Failure> {
        let nic = self.fitted.iter_mut().find(|nic| nic.name == name);
        nic.ok_or_else(|| not_found(name))?.apply(change);
        Ok(())
    }

    /// What they did so far, in the order of their slots.
    pub fn stats(&self) -> Vec<NicStats> {
        let mut nics: Vec<&Nic> = self.fitted.iter().collect();
        nics.sort_by_key(|nic| nic.slot);
        nics.into_iter().map(Nic::stats).collect()
    }
}

fn not_found(name: &str) -> Failure {
    Failure {
        kind: ErrorKind::NotFound,
        message: format!("there is no NIC {name}"),
    }
}

impl Nic {
    fn stats(&self) -> NicStats {
        let stats = self.control.stats();
        NicStats {
            name: self.name.clone(),
            received_packets: stats.received,
            received_bytes: stats.received_bytes,
            received_dropped: stats.receive_dropped,
            received_filtered: stats.receive_filtered,
            sent_packets: stats.sent,
            sent_bytes: stats.sent_bytes,
            sent_dropped: stats.send_dropped,
            sent_invalid: stats.send_invalid,
        }
    }

    fn apply(&mut self, change: &NicChange) {
        if let Some(up) = change.link_up {
            self.control.set_link(up);
        }
        let control = &self.control;
        if let Some(limit) = change.receive_limit {
            set(&mut self.receive_limiter, limit, |it| {
                control.set_receive_limit(it);
            });
        }
        if let Some(limit) = change.transmit_limit {
            set(&mut self.transmit_limiter, limit, |it| {
                control.set_transmit_limit(it);
            });
        }
    }
}

/// Changes a limit. A limiter that is there keeps what its tenants owe.
fn set(limiter: &mut Option<Arc<Limiter>>, limit: RateLimit, exchange: impl Fn(Option<Arc<Limiter>>)) {
    if limit == RateLimit::default() {
        *limiter = None;
        return exchange(None);
    }
    let limits = disk::limits(limit);
    match limiter {
        Some(limiter) => limiter.set(limits),
        None => {
            let new = Limiter::new(limits);
            *limiter = Some(Arc::clone(&new));
            exchange(Some(new));
        }
    }
}
