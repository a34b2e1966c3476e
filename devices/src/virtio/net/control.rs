//! State that an interface's front, its workers and the machine's control share.

use std::{
    fmt, io,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
    },
    time::Duration,
};

use virtio_bindings::virtio_net::VIRTIO_NET_F_GUEST_ANNOUNCE;
use vmm_sys_util::eventfd::EventFd;

use super::{
    config,
    filter::{Address, Filter},
    stats::{self, NetStats, PairCounters},
};
use crate::{
    net::{NetBackend, Offloads},
    state::{StateError, check, message, narrow},
    virtio::{
        rate::{Limiter, LimiterCell},
        signals::{Connection, Signals},
    },
};

/// Settings of the driver, from the control queue and from its features.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Driver {
    pub mac: Address,
    pub filter: Arc<Filter>,
    /// Pairs of queues in use, at least 1.
    pub pairs: u16,
    /// Feature bits of the receive offloads, if the driver chose others than the accepted ones.
    pub guest_offloads: Option<u64>,
}

impl Driver {
    /// Settings of an interface with the address `mac` and without a driver.
    fn none(mac: Address) -> Self {
        Self {
            mac,
            filter: Arc::default(),
            pairs: 1,
            guest_offloads: None,
        }
    }
}

/// State of an interface that more than one thread looks at.
pub(super) struct Shared {
    /// By pair of queues.
    pub backends: Vec<Arc<dyn NetBackend>>,
    /// The address that it was built with.
    mac: Address,
    pub mtu: u16,
    driver: Mutex<Driver>,
    /// Changes with `driver`'s address and filter.
    filter_version: AtomicU32,
    /// Current receive offloads of the driver ([`Offloads`]).
    offloads: AtomicU32,
    /// Features of the current driver.
    negotiated: AtomicU64,
    /// Pairs that the host hands packets to.
    active: AtomicU32,
    link_up: AtomicBool,
    announce: AtomicBool,
    pub receive_limit: LimiterCell,
    pub transmit_limit: LimiterCell,
    served: Mutex<Served>,
    /// Signalled when the kernel serves a pair less.
    served_less: Condvar,
    /// By pair of queues.
    counters: Vec<PairCounters>,
    /// There once the device is in a machine.
    connection: OnceLock<Connection>,
}

/// Pairs that the kernel serves (vhost-net).
#[derive(Default)]
struct Served {
    /// Number of pairs.
    pairs: u32,
    /// The workers are to serve all of them.
    kept: bool,
}

impl Shared {
    pub(super) fn new(
        backends: Vec<Arc<dyn NetBackend>>,
        mac: Address,
        mtu: u16,
        link_up: bool,
        [receive, transmit]: [Option<Arc<Limiter>>; 2],
    ) -> Self {
        Self {
            counters: backends.iter().map(|_| PairCounters::default()).collect(),
            backends,
            mac,
            mtu,
            driver: Mutex::new(Driver::none(mac)),
            filter_version: AtomicU32::new(0),
            offloads: AtomicU32::new(0),
            negotiated: AtomicU64::new(0),
            active: AtomicU32::new(1),
            link_up: AtomicBool::new(link_up),
            announce: AtomicBool::new(false),
            receive_limit: LimiterCell::new(receive),
            transmit_limit: LimiterCell::new(transmit),
            served: Mutex::default(),
            served_less: Condvar::new(),
            connection: OnceLock::new(),
        }
    }

    /// Connects it to the machine, once.
    pub(super) fn connect(&self, signals: &Arc<Signals>) -> io::Result<()> {
        let connection = Connection::new(signals, self.backends.len())?;
        self.connection
            .set(connection)
            .map_err(|_| io::ErrorKind::AlreadyExists.into())
    }

    /// Returns the event that wakes a pair's worker after a change of this state.
    pub(super) fn wake_of(&self, pair: u16) -> Option<&Arc<EventFd>> {
        self.connection.get()?.wakes.get(usize::from(pair))
    }

    pub(super) fn counters(&self, pair: u16) -> Option<&PairCounters> {
        self.counters.get(usize::from(pair))
    }

    /// Number of pairs.
    pub(super) fn pairs(&self) -> u16 {
        u16::try_from(self.backends.len()).unwrap_or(u16::MAX)
    }

    fn driver(&self) -> MutexGuard<'_, Driver> {
        self.driver.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The configuration space.
    pub(super) fn config(&self) -> config::Config {
        let mac = self.driver().mac;
        config::Config::new(
            mac,
            self.is_link_up(),
            self.announce.load(Ordering::SeqCst),
            self.pairs(),
            self.mtu,
        )
    }

    /// The driver reset the device.
    pub(super) fn reset(&self) {
        *self.driver() = Driver::none(self.mac);
        self.filter_version.fetch_add(1, Ordering::SeqCst);
        self.active.store(1, Ordering::SeqCst);
        self.negotiated.store(0, Ordering::SeqCst);
        self.announce.store(false, Ordering::SeqCst);
    }

    pub(super) fn is_link_up(&self) -> bool {
        self.link_up.load(Ordering::SeqCst)
    }

    /// Version of the address and filter; [`filter`](Self::filter) may give newer ones.
    pub(super) fn filter_version(&self) -> u32 {
        self.filter_version.load(Ordering::Acquire)
    }

    /// The driver's filter and its address.
    pub(super) fn filter(&self) -> (Arc<Filter>, Address) {
        let driver = self.driver();
        (Arc::clone(&driver.filter), driver.mac)
    }

    pub(super) fn set_mac(&self, mac: Address) {
        self.driver().mac = mac;
        self.filter_version.fetch_add(1, Ordering::SeqCst);
    }

    pub(super) fn change_filter<T>(&self, change: impl FnOnce(&mut Filter) -> T) -> T {
        let result = change(Arc::make_mut(&mut self.driver().filter));
        self.filter_version.fetch_add(1, Ordering::SeqCst);
        result
    }

    /// Current receive offloads of the driver.
    pub(super) fn offloads(&self) -> Offloads {
        Offloads::from_bits_truncate(self.offloads.load(Ordering::Relaxed))
    }

    /// Records the features of a new driver, and sets the offloads that the host may use.
    pub(super) fn begin(&self, features: u64) -> io::Result<()> {
        self.negotiated.store(features, Ordering::SeqCst);
        let chosen = self.driver().guest_offloads;
        self.apply_offloads(config::offloads(chosen.unwrap_or(features)))
    }

    /// The driver takes what these feature bits name unfinished, from now on.
    pub(super) fn set_guest_offloads(&self, bits: u64) -> io::Result<()> {
        self.apply_offloads(config::offloads(bits))?;
        self.driver().guest_offloads = Some(bits);
        Ok(())
    }

    /// There is no driver any more.
    pub(super) fn end(&self) -> io::Result<()> {
        self.apply_offloads(Offloads::empty())
    }

    fn apply_offloads(&self, offloads: Offloads) -> io::Result<()> {
        if let Some(first) = self.backends.first() {
            first.set_offloads(offloads)?;
        }
        self.offloads.store(offloads.bits(), Ordering::SeqCst);
        Ok(())
    }

    /// The driver uses that many pairs, 1 to [`pairs`](Self::pairs). The pairs' workers see to it.
    pub(super) fn set_active(&self, pairs: u16) {
        self.driver().pairs = pairs;
        self.active.store(pairs.into(), Ordering::SeqCst);
        self.wake_all();
    }

    /// Whether the host is to hand packets to that pair.
    pub(super) fn is_active(&self, pair: u16) -> bool {
        u32::from(pair) < self.active.load(Ordering::SeqCst)
    }

    fn served(&self) -> MutexGuard<'_, Served> {
        self.served.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the workers are to serve all pairs themselves.
    pub(super) fn keeps_queues(&self) -> bool {
        self.served().kept
    }

    /// A worker is about to have the kernel serve its pair; false when it must not.
    pub(super) fn begin_serving(&self) -> bool {
        let mut served = self.served();
        if !served.kept {
            served.pairs = served.pairs.saturating_add(1);
        }
        !served.kept
    }

    /// A worker serves its pair again.
    pub(super) fn end_serving(&self) {
        let mut served = self.served();
        served.pairs = served.pairs.saturating_sub(1);
        self.served_less.notify_all();
    }

    /// Asks the driver to make itself known in the network (5.1.6.5.4); false when it can't.
    pub(super) fn announce(&self) -> bool {
        let can = self.negotiated.load(Ordering::SeqCst) & 1 << VIRTIO_NET_F_GUEST_ANNOUNCE != 0;
        if can && let Some(connection) = self.connection.get() {
            connection
                .signals
                .change_config(|| self.announce.store(true, Ordering::SeqCst));
        }
        can
    }

    /// The driver does so.
    pub(super) fn announced(&self) {
        self.announce.store(false, Ordering::SeqCst);
    }

    fn wake_all(&self) {
        if let Some(connection) = self.connection.get() {
            connection.wake_all();
        }
    }

    pub(super) fn save(&self) -> message::VirtioNet {
        let driver = self.driver().clone();
        message::VirtioNet {
            link_down: !self.is_link_up(),
            announce: self.announce.load(Ordering::SeqCst),
            mac: if driver.mac == self.mac {
                Vec::new()
            } else {
                driver.mac.to_vec()
            },
            filter: driver.filter.save(),
            queue_pairs: if driver.pairs == 1 { 0 } else { driver.pairs.into() },
            guest_offloads: driver.guest_offloads,
        }
    }

    /// Restores a saved state, including the state of the link.
    pub(super) fn restore(&self, saved: &message::VirtioNet) -> Result<(), StateError> {
        let mac = match saved.mac.as_slice() {
            [] => self.mac,
            bytes => bytes
                .try_into()
                .map_err(|_| StateError::invalid("mac", "not six bytes"))?,
        };
        let pairs: u16 = narrow("queue_pairs", saved.queue_pairs)?;
        check(
            pairs <= self.pairs(),
            "queue_pairs",
            "more than the interface has",
        )?;
        let bits = saved.guest_offloads.unwrap_or(0);
        check(
            bits & !config::guest_offload_bits() == 0,
            "guest_offloads",
            "unknown bits are set",
        )?;
        let pairs = pairs.max(1);
        *self.driver() = Driver {
            mac,
            filter: Arc::new(Filter::restored(saved.filter.as_ref())?),
            pairs,
            guest_offloads: saved.guest_offloads,
        };
        self.filter_version.fetch_add(1, Ordering::SeqCst);
        self.active.store(pairs.into(), Ordering::SeqCst);
        self.link_up.store(!saved.link_down, Ordering::SeqCst);
        self.announce.store(saved.announce, Ordering::SeqCst);
        Ok(())
    }
}

/// A handle on an interface for everybody but its driver. It can be used while the interface is in use and after it is gone.
#[derive(Clone)]
pub struct NetControl {
    pub(super) shared: Arc<Shared>,
}

impl fmt::Debug for NetControl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NetControl")
            .field("pairs", &self.shared.pairs())
            .field("link_up", &self.is_link_up())
            .finish_non_exhaustive()
    }
}

impl NetControl {
    /// Returns the interface's statistics.
    pub fn stats(&self) -> NetStats {
        stats::sum(self.shared.counters.iter())
    }

    /// Whether the link is up.
    pub fn is_link_up(&self) -> bool {
        self.shared.is_link_up()
    }

    /// Connects or disconnects the link, and notifies the driver. While the link is down, packets
    /// of both directions are lost.
    pub fn set_link(&self, up: bool) {
        let store = || self.shared.link_up.store(up, Ordering::SeqCst);
        match self.shared.connection.get() {
            Some(connection) if self.is_link_up() != up => connection.signals.change_config(store),
            _ => store(),
        }
        // The workers take queues back from the kernel, or delegate them again.
        self.shared.wake_all();
    }

    /// Number of pairs that the kernel serves at present (vhost-net).
    pub fn served_by_kernel(&self) -> u32 {
        self.shared.served().pairs
    }

    /// With `keep`, the workers of this process serve all queues and mark their writes in the dirty
    /// log. Without `keep`, the kernel may serve queues again. Returns when the kernel serves no
    /// queue. Returns false if it still does after `patience`.
    pub fn keep_queues(&self, keep: bool, patience: Duration) -> bool {
        self.shared.served().kept = keep;
        self.shared.wake_all();
        if !keep {
            return true;
        }
        let serves = |served: &mut Served| served.pairs > 0;
        let waited = self
            .shared
            .served_less
            .wait_timeout_while(self.shared.served(), patience, serves);
        waited.unwrap_or_else(PoisonError::into_inner).0.pairs == 0
    }

    /// Asks the driver to make itself known in the network, if it can: after the interface moved to another place.
    pub fn announce(&self) {
        self.shared.announce();
    }

    /// Replaces the limiter of the guest's incoming packets, or removes it. Operations are packets.
    pub fn set_receive_limit(&self, limiter: Option<Arc<Limiter>>) {
        self.shared.receive_limit.set(limiter);
        self.shared.wake_all();
    }

    /// Replaces the limiter of the guest's outgoing packets, or removes it. Operations are packets.
    pub fn set_transmit_limit(&self, limiter: Option<Arc<Limiter>>) {
        self.shared.transmit_limit.set(limiter);
        self.shared.wake_all();
    }
}
