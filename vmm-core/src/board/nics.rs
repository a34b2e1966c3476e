//! The network interfaces of a machine, which come and go while it lives.

use std::{
    ops::{Deref, DerefMut},
    os::fd::OwnedFd,
    sync::Arc,
    time::Duration,
};

use devices::{
    pci::HotPlug,
    virtio::{net::NetControl, rate::Limiter, transport::VirtioPciDevice},
};
use vmm_protocol::{
    machine,
    vmm::{self, ErrorKind, NicStats},
};
use vmmd_spec::disk::RateLimit;

use super::{
    assemble::{Fds, Sockets, disk, nic},
    plugs::{Plug, Plugs},
};
use crate::lifecycle::{Failure, NicChange, Pluggable};

/// How long a NIC's worker may take to take its queues back from the kernel.
const TAKE_BACK: Duration = Duration::from_secs(5);

/// One of them.
pub(super) struct Nic {
    pub name: String,
    pub slot: u8,
    pub device: VirtioPciDevice,
    pub control: NetControl,
    /// Limiters of received and sent data, for limited directions only.
    pub receive_limiter: Option<Arc<Limiter>>,
    pub transmit_limiter: Option<Arc<Limiter>>,
}

impl Plug for Nic {
    const WHAT: Pluggable = Pluggable::Nic;

    fn name(&self) -> &str {
        &self.name
    }

    fn device(&self) -> &VirtioPciDevice {
        &self.device
    }

    fn device_mut(&mut self) -> &mut VirtioPciDevice {
        &mut self.device
    }

    fn apart(self) -> (VirtioPciDevice, Box<dyn Send>) {
        let rest = (self.control, self.receive_limiter, self.transmit_limiter);
        (self.device, Box::new(rest))
    }
}

/// See the module.
pub(super) struct Nics {
    plugs: Plugs<Nic>,
    /// Memory is logged: no kernel serves queues.
    pub kept: bool,
}

impl Deref for Nics {
    type Target = Plugs<Nic>;

    fn deref(&self) -> &Plugs<Nic> {
        &self.plugs
    }
}

impl DerefMut for Nics {
    fn deref_mut(&mut self) -> &mut Plugs<Nic> {
        &mut self.plugs
    }
}

impl Nics {
    /// NICs of a machine that notifies its guest of changes through `hotplug`.
    pub fn new(sockets: Sockets, hotplug: Arc<HotPlug>) -> Self {
        Self {
            plugs: Plugs::new(sockets, hotplug),
            kept: false,
        }
    }

    /// Adds a NIC that exists when the machine is switched on.
    pub fn fit(&mut self, spec: &machine::Nic, fds: &mut Fds) -> Result<(), Failure> {
        let nic = nic::plug(&self.plugs.sockets, spec, fds)?;
        self.plugs.fit(spec.slot, nic);
        Ok(())
    }

    /// See [`Machine::attach_nic`](crate::lifecycle::Machine::attach_nic).
    pub fn attach(&mut self, wire: &vmm::Nic, fds: Vec<OwnedFd>) -> Result<(), Failure> {
        let spec = machine::Nic::new(wire, fds.len()).map_err(|violations| Failure {
            kind: ErrorKind::Invalid,
            message: violations.to_string(),
        })?;
        let kept = self.kept;
        self.plugs.attach(&spec.name, spec.slot, |sockets| {
            let nic = nic::plug(sockets, &spec, &mut Fds::new(fds))?;
            if kept {
                // It serves nothing yet, so this waits for nothing.
                nic.control.keep_queues(true, TAKE_BACK);
            }
            Ok(nic)
        })
    }

    /// With `keep`, the kernel (vhost-net) serves no NIC: its writes are missing in the dirty log
    /// of guest memory. Without `keep`, the kernel may serve NICs again.
    pub fn keep_queues(&mut self, keep: bool) -> Result<(), Failure> {
        self.kept = keep;
        let serves = |nic: &&Nic| !nic.control.keep_queues(keep, TAKE_BACK);
        let serving = self.plugs.iter().find(serves).map(|nic| nic.name.clone());
        let Some(name) = serving else { return Ok(()) };
        if keep {
            // After this failure no memory log starts, so the kernel may serve all NICs again. The
            // call does not wait.
            let _free = self.keep_queues(false);
        }
        Err(Failure {
            kind: ErrorKind::Internal,
            message: format!("NIC {name}: its queues can't be taken back from the kernel"),
        })
    }

    /// See [`Machine::update_nic`](crate::lifecycle::Machine::update_nic).
    pub fn update(&mut self, name: &str, change: &NicChange) -> Result<(), Failure> {
        self.plugs.get_mut(name)?.apply(change);
        Ok(())
    }

    /// Statistics of the NICs, in the order of their slots.
    pub fn stats(&self) -> Vec<NicStats> {
        let mut nics: Vec<&Nic> = self.plugs.iter().collect();
        nics.sort_by_key(|nic| nic.slot);
        nics.into_iter().map(Nic::stats).collect()
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

/// Changes a limit. An existing limiter keeps the debts of its users.
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
