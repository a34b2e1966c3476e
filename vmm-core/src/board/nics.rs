//! The network interfaces of a machine, as others than the guest see them.

use std::{sync::Arc, time::Duration};

use devices::{rate::Limiter, virtio::net::NetControl};
use proto::{
    model::disk::RateLimit,
    vmm::{ErrorKind, NicStats},
};

use super::assemble::disk;
use crate::lifecycle::{Failure, NicChange};

/// One of them.
pub(super) struct Nic {
    pub name: String,
    pub control: NetControl,
    /// Of what the guest receives and sends, if they are limited.
    pub receive_limiter: Option<Arc<Limiter>>,
    pub transmit_limiter: Option<Arc<Limiter>>,
}

impl Nic {
    /// What it did so far.
    pub fn stats(&self) -> NicStats {
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

/// How long a NIC's worker may take to take its queues back from the kernel.
const TAKE_BACK: Duration = Duration::from_secs(5);

/// While memory is logged no kernel (vhost-net) serves NICs: the dirty log does not see what it writes. Without `keep` it may again.
pub(super) fn keep_queues(nics: &[Nic], keep: bool) -> Result<(), Failure> {
    for nic in nics {
        if !nic.control.keep_queues(keep, TAKE_BACK) {
            return Err(Failure {
                kind: ErrorKind::Internal,
                message: format!("nic {}: its queues can't be taken back from the kernel", nic.name),
            });
        }
    }
    Ok(())
}

/// See [`Machine::update_nic`](crate::lifecycle::Machine::update_nic).
pub(super) fn update(nics: &mut [Nic], name: &str, change: &NicChange) -> Result<(), Failure> {
    let nic = nics.iter_mut().find(|nic| nic.name == name);
    let nic = nic.ok_or_else(|| Failure {
        kind: ErrorKind::NotFound,
        message: format!("there is no NIC {name}"),
    })?;
    nic.apply(change);
    Ok(())
}
