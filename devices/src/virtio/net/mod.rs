//! Network device (virtio 1.3, 5.1).
//!
//! Each pair of queues has its own worker thread and its own queue of the host's interface. The
//! shared state is in [`control`]: the driver's settings, the link, limiters, counters. With
//! vhost-net the kernel serves the pairs instead of their workers: see [`delegation`].

mod announce;
mod command;
mod config;
mod control;
mod delegation;
mod filter;
#[cfg(any(test, feature = "testing"))]
pub mod fuzz;
mod header;
mod receive;
mod stats;
mod transmit;
mod worker;

use std::{io, sync::Arc};

use zerocopy::IntoBytes;

use self::{
    config::{CONTROL_SIZE, Config, QUEUE_SIZE},
    control::Shared,
    delegation::Delegation,
    worker::NetHandler,
};
pub use self::{control::NetControl, stats::NetStats};
use vmm_base::thread::ThreadKind;

use super::{
    device::{DeviceKind, VirtioDevice, WorkerSpec, read_bytes, thread_name},
    rate::Limiter,
    signals::Signals,
};
use crate::{
    net::{NetBackend, Offloads, PairServer},
    state::{Section, StateError},
};

/// Most pairs of queues of an interface.
pub const MAX_PAIRS: u16 = 16;

/// Options of a network interface.
#[derive(Clone, Debug)]
pub struct NetOptions {
    /// Goes into the threads' names.
    pub name: String,
    /// Its address.
    pub mac: [u8; 6],
    /// MTU in bytes: 68 to 65,535 (5.1.4.1). Smaller values are raised to 68.
    pub mtu: u16,
    /// Offloads that the driver may use in both directions, limited to the host's capabilities.
    pub offloads: Offloads,
    /// Packets may lie in several buffers of the driver (VIRTIO_NET_F_MRG_RXBUF).
    pub merge: bool,
    /// There is a control queue. Without one there is one pair of queues.
    pub control: bool,
    /// The link is up at first.
    pub link_up: bool,
    /// Limiter of the guest's incoming packets. Operations are packets.
    pub receive_limit: Option<Arc<Limiter>>,
    /// Limiter of the guest's outgoing packets.
    pub transmit_limit: Option<Arc<Limiter>>,
}

impl NetOptions {
    /// An interface with everything that the host can do, and without limits.
    pub fn new(name: &str, mac: [u8; 6], mtu: u16) -> Self {
        Self {
            name: name.to_owned(),
            mac,
            mtu,
            offloads: Offloads::all(),
            merge: true,
            control: true,
            link_up: true,
            receive_limit: None,
            transmit_limit: None,
        }
    }
}

/// The front of a network interface.
pub struct Net {
    shared: Arc<Shared>,
    features: u64,
    queue_sizes: Vec<u16>,
    name: String,
    /// By pair; until the workers are made.
    servers: Vec<Box<dyn PairServer>>,
}

impl Net {
    /// Creates an interface with a pair of queues for each of `backends`, which are the queues of
    /// one interface of the host: 1 to [`MAX_PAIRS`]. Surplus backends are dropped.
    pub fn new(backends: Vec<Box<dyn NetBackend>>, options: NetOptions) -> Self {
        let most = if options.control { MAX_PAIRS } else { 1 };
        let backends: Vec<Arc<dyn NetBackend>> =
            backends.into_iter().take(most.into()).map(Arc::from).collect();
        let possible = backends
            .iter()
            .fold(Offloads::all(), |all, backend| all & backend.capabilities());
        let limits = [options.receive_limit, options.transmit_limit];
        let mtu = options.mtu.max(68);
        let shared = Shared::new(backends, options.mac, mtu, options.link_up, limits);
        let offloads = config::consistent(options.offloads & possible);
        let features = config::features(offloads, options.merge, options.control, shared.pairs());
        let mut queue_sizes = vec![QUEUE_SIZE; usize::from(shared.pairs()).saturating_mul(2)];
        if options.control {
            queue_sizes.push(CONTROL_SIZE);
        }
        Self {
            shared: Arc::new(shared),
            features,
            queue_sizes,
            name: options.name,
            servers: Vec::new(),
        }
    }

    /// Has the pairs of queues served by others (vhost-net) than this process whenever they can be, one for each pair. See
    /// [`delegation`]. The control queue stays with this process.
    pub fn serve_by(&mut self, servers: Vec<Box<dyn PairServer>>) {
        self.servers = servers;
    }

    /// The handle for others than the driver.
    pub fn control(&self) -> NetControl {
        NetControl {
            shared: Arc::clone(&self.shared),
        }
    }

    /// The queues of the worker of a pair: the first one has the last queue too, see [`worker`].
    fn queues(&self, pair: u16) -> Vec<u16> {
        let first = pair.wrapping_mul(2);
        let mut queues = vec![first, first.wrapping_add(1)];
        let control = self.shared.pairs().wrapping_mul(2);
        if pair == 0 && self.queue_sizes.len() > usize::from(control) {
            queues.push(control);
        }
        queues
    }
}

impl VirtioDevice for Net {
    fn kind(&self) -> DeviceKind {
        DeviceKind::Net
    }

    fn features(&self) -> u64 {
        self.features
    }

    fn queue_sizes(&self) -> &[u16] {
        &self.queue_sizes
    }

    fn config_len(&self) -> usize {
        size_of::<Config>()
    }

    fn read_config(&self, offset: usize, data: &mut [u8]) {
        read_bytes(self.shared.config().as_bytes(), offset, data);
    }

    /// Nothing is writable: the address can only be set over the control queue.
    fn write_config(&mut self, _offset: usize, _data: &[u8]) {}

    fn reset(&mut self) {
        self.shared.reset();
    }

    fn workers(&mut self, signals: &Arc<Signals>) -> io::Result<Vec<WorkerSpec>> {
        if self.shared.backends.is_empty() {
            let message = "a network interface needs a queue of the host";
            return Err(io::Error::new(io::ErrorKind::InvalidInput, message));
        }
        self.shared.connect(signals)?;
        let mut servers = std::mem::take(&mut self.servers).into_iter();
        (0_u16..)
            .zip(&self.shared.backends)
            .map(|(pair, backend)| {
                if pair > 0 {
                    // Until the driver uses it.
                    backend.set_attached(false)?;
                }
                let delegation = servers
                    .next()
                    .map(|server| Delegation::new(server, signals, &self.shared, pair));
                let delegation = delegation.transpose()?;
                let (kind, prefix) = match delegation {
                    Some(_) => (ThreadKind::Vhost, "vnet"),
                    None => (ThreadKind::Worker, "net"),
                };
                let shared = Arc::clone(&self.shared);
                let handler = NetHandler::new(shared, Arc::clone(backend), pair, delegation);
                Ok(WorkerSpec {
                    kind,
                    name: thread_name(prefix, &self.name, pair),
                    queues: self.queues(pair),
                    handler: Box::new(handler),
                })
            })
            .collect()
    }

    /// Address, link and MTU are in the configuration space, which the transport compares.
    fn save(&self) -> Result<Section, StateError> {
        Ok(Section::new("net", &self.shared.save()))
    }

    fn restore(&mut self, section: &Section) -> Result<(), StateError> {
        self.shared.restore(&section.open()?)
    }
}

#[cfg(test)]
#[allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::arithmetic_side_effects,
    clippy::cast_possible_truncation
)]
mod tests;
