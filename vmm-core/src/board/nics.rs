//! The network interfaces of a machine, which come and go while it lives.

use std::{
    ops::{Deref, DerefMut},
    os::fd::OwnedFd,
    sync::Arc,
    time::Duration,
};

use devices::{
    pci::HotPlug,
    virtio::{net::NetControl, rate::Limiter},
};
use vmm_protocol::{
    machine,
    vmm::{self, ErrorKind, NicStats, UpdateNic},
};
use vmmd_spec::disk::RateLimit;

use super::{
    assemble::{Fds, Sockets, disk, nic},
    plugs::{Plugged, Plugs},
};
use crate::lifecycle::{Failure, Pluggable};

/// How long a NIC's worker may take to take its queues back from the kernel.
const TAKE_BACK: Duration = Duration::from_secs(5);

/// Controls of one of them.
pub(super) struct Nic {
    pub control: NetControl,
    /// Limiters of received and sent data, for limited directions only.
    pub receive_limiter: Option<Arc<Limiter>>,
    pub transmit_limiter: Option<Arc<Limiter>>,
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
            plugs: Plugs::new(Pluggable::Nic, sockets, hotplug),
            kept: false,
        }
    }

    /// Adds a NIC that exists when the machine is switched on.
    pub fn fit(&mut self, spec: &machine::Nic, fds: &mut Fds) -> Result<(), Failure> {
        let nic = nic::plug(&self.plugs.sockets, spec, fds)?;
        self.plugs.fit(nic);
        Ok(())
    }

    /// Plugs in a NIC, and notifies the guest.
    pub fn attach(&mut self, wire: &vmm::Nic, fds: Vec<OwnedFd>) -> Result<(), Failure> {
        let spec = machine::Nic::new(wire, fds.len())?;
        self.plugs.check_free(&spec.name, spec.slot)?;
        let nic = nic::plug(&self.plugs.sockets, &spec, &mut Fds::new(fds))?;
        if self.kept {
            // It serves nothing yet, so this waits for nothing.
            nic.control.control.keep_queues(true, TAKE_BACK);
        }
        self.plugs.attach(nic);
        Ok(())
    }

    /// With `keep`, the kernel (vhost-net) serves no NIC: its writes are missing in the dirty log
    /// of guest memory. Without `keep`, the kernel may serve NICs again.
    pub fn keep_queues(&mut self, keep: bool) -> Result<(), Failure> {
        self.kept = keep;
        let serves = |nic: &&Plugged<Nic>| !nic.control.control.keep_queues(keep, TAKE_BACK);
        let serving = self.plugs.iter().find(serves).map(|nic| nic.name.clone());
        let Some(name) = serving else { return Ok(()) };
        if keep {
            // After this failure no memory log starts, so the kernel may serve all NICs again. The
            // call does not wait.
            let _free = self.keep_queues(false);
        }
        Err(Failure::of(
            ErrorKind::Internal,
            format!("NIC {name}: its queues can't be taken back from the kernel"),
        ))
    }

    /// Changes a NIC, and notifies the guest of the changes that it can see.
    pub fn update(&mut self, change: &UpdateNic) -> Result<(), Failure> {
        let Nic {
            control,
            receive_limiter,
            transmit_limiter,
        } = &mut self.plugs.get_mut(&change.name)?.control;
        if let Some(up) = change.link_up {
            control.set_link(up);
        }
        if let Some(limit) = &change.receive_limit {
            set(receive_limiter, limit.into(), |it| {
                control.set_receive_limit(it);
            });
        }
        if let Some(limit) = &change.transmit_limit {
            set(transmit_limiter, limit.into(), |it| {
                control.set_transmit_limit(it);
            });
        }
        Ok(())
    }

    /// Statistics of the NICs, in the order of their slots.
    pub fn stats(&self) -> Vec<NicStats> {
        self.plugs.by_slot().into_iter().map(stats).collect()
    }
}

fn stats(nic: &Plugged<Nic>) -> NicStats {
    let stats = nic.control.control.stats();
    NicStats {
        name: nic.name.clone(),
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
