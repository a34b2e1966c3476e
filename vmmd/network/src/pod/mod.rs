//! The network of a VM in a pod.
//!
//! ```text
//!  cluster ── uplink (eth0, the pod's address) ── translation ── tap (the gateway's address) ── guest (private address)
//! ```
//!
//! All parts are in the network namespace of the pod: the tap, its addresses, the rules (`rules.nft`) and the sockets of the helper
//! `vmmd-netd`, which serves DHCP, router advertisements and DNS. The daemon enters the namespace with a thread of its own for each
//! piece of work ([`namespace::within`]).
//!
//! Invariants: [`open`] replaces all remains of an earlier run. The tap ends with its holders, and with it its addresses and routes. The
//! helper has a folder named by the UUID of its VM, so a later daemon adopts it, replaces it ([`serve_pods`]) or ends it
//! ([`close_pod`]). Switches of the kernel that [`open`] sets end with the pod.

mod namespace;
mod plan;
mod rules;

use std::{
    collections::HashMap,
    fs::{self, File},
    io,
    net::{IpAddr, Ipv4Addr},
    os::fd::{AsFd as _, OwnedFd},
    path::{Path, PathBuf},
    sync::Arc,
};

use rustix::io::Errno;
use tokio::task::spawn_blocking;
use uuid::Uuid;
use vmmd_api::v1::{self, VmPhase};
use vmmd_host::{cgroup, failure::Failure, ledger::Ledger, text};
use vmmd_spec::{network::Ipv6Net, nic::Mac};

use self::{
    namespace::{forbidden, within},
    plan::{Addresses, PREFIX},
};
use crate::{
    Link, Links, Ports, Tap, host_mac, interface_index,
    managed::{
        helper::{self, Ends, PODS, Served, Started},
        nft,
        node::{forwarding, switch},
    },
    netd::{Table, server::TABLE},
    open_queues,
};

/// The network of a pod, as its launcher has passed it.
#[derive(Debug)]
pub struct PodNetwork {
    /// The network namespace.
    pub namespace: OwnedFd,
    /// The configuration for name resolution.
    pub resolver: Resolver,
}

/// The part of a resolv.conf(5) that a guest gets.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Resolver {
    /// Name servers; three are used at most.
    pub servers: Vec<IpAddr>,
    /// Search domains. Invalid ones are left out.
    pub search: Vec<String>,
}

/// A NIC of a VM in the network of its pod.
#[derive(Clone, Debug)]
pub struct End {
    /// UUID of the VM.
    pub vm: Uuid,
    /// Name of the VM.
    pub name: String,
    /// Name of the NIC.
    pub nic: String,
    /// The pod's interface that leads to the cluster; that of the default route when there is none.
    pub interface: Option<String>,
    /// Name of the tap.
    pub tap: String,
    /// MAC address of the NIC.
    pub mac: Mac,
    /// IPv4 address that the guest has already; chosen when there is none.
    pub address: Option<Ipv4Addr>,
    /// Pairs of queues.
    pub queues: u16,
    /// MTU of the guest in bytes; that of the pod's interface when there is none.
    pub mtu: Option<u16>,
}

/// The parts of the daemon that networks of pods take.
#[derive(Clone, Debug)]
pub struct Node {
    /// The daemon's runtime folder.
    pub run_dir: PathBuf,
    /// The program `vmmd-netd`.
    pub netd: Arc<File>,
    /// Source of the helpers' user ids.
    pub ledger: Arc<Ledger>,
    /// Parent of the helpers' cgroup.
    pub cgroups: Option<cgroup::Parent>,
    /// Notified when a helper ends.
    pub ends: Arc<Ends>,
}

impl Node {
    pub(crate) fn new(host: Ports<'_>) -> Result<Self, Failure> {
        let netd = host.networks.netd(host.netd).and_then(File::try_clone);
        let netd = netd.map_err(|error| failed("open the program of DHCP and DNS", &error))?;
        Ok(Self {
            run_dir: host.run_dir.to_owned(),
            netd: Arc::new(netd),
            ledger: Arc::clone(host.ledger),
            cgroups: host.cgroups.cloned(),
            ends: Arc::clone(&host.networks.helper_ends),
        })
    }

    /// Files of the helper of a VM.
    fn folder(&self, vm: Uuid) -> PathBuf {
        folder(&self.run_dir, vm)
    }

    /// Ensures that a helper serves the tap, in the network namespace of the caller.
    fn serve(&self, vm: Uuid, (tap, index): (&str, u32), table: &Table) -> io::Result<Option<Started>> {
        let folder = self.folder(vm);
        helper::write_table(&folder, table)?;
        let served = Served {
            program: &self.netd,
            folder: &folder,
            bridge: (tap, index),
            table,
            helpers: helper::count(&self.run_dir),
        };
        helper::ensure(&served, &self.ledger, self.cgroups.as_ref())
    }

    /// Carries out work in the network namespace of a pod, and watches the helper that it starts.
    async fn work<T: Send + 'static>(
        self,
        network: PodNetwork,
        work: impl AsyncFnOnce(&Self, &Resolver) -> Result<(T, Option<Started>), Failure> + Send + 'static,
    ) -> Result<T, Failure> {
        let ends = Arc::clone(&self.ends);
        let working = spawn_blocking(move || {
            let PodNetwork { namespace, resolver } = &network;
            within(namespace.as_fd(), async || work(&self, resolver).await)
        });
        let (result, started) = working
            .await
            .map_err(|error| Failure::internal(error.to_string()))??;
        let watched = started.map_or(Ok(()), |started| started.watched(&ends));
        watched.map_err(|error| failed("watch the server of DHCP and DNS", &error))?;
        Ok(result)
    }
}

/// Makes the network of a VM in its pod, and replaces the remains of an earlier run.
///
/// Fails as `POD_INTERFACE_NOT_FOUND`, `POD_HAS_NO_ADDRESS`, `POD_HAS_NODE_NETWORK`, `TAP_IN_USE`, `MIGRATION_NETWORK` and
/// `POD_NETWORK_FORBIDDEN`.
pub async fn open(node: Node, network: PodNetwork, end: End) -> Result<Tap, Failure> {
    let opening = async move |node: &Node, resolver: &Resolver| open_here(node, resolver, &end).await;
    node.work(network, opening).await
}

/// In the network namespace of the pod.
async fn open_here(node: &Node, resolver: &Resolver, end: &End) -> Result<(Tap, Option<Started>), Failure> {
    let links = Links::connect().map_err(|error| failed("connect to the kernel", &error))?;
    let (uplink, link) = uplink(&links, end).await?;
    let facts = links
        .inspect(&uplink)
        .await
        .map_err(|error| failed("read addresses", &error))?;
    let own = facts.map(|facts| facts.addresses).unwrap_or_default();
    let has = |is_ipv6: bool| own.iter().any(|(address, _)| address.is_ipv6() == is_ipv6);
    let families = [has(false), has(true)];
    if families == [false, false] {
        let message = format!(
            "NIC \"{}\": the pod's interface \"{uplink}\" has no address: give the interface that leads to the cluster",
            end.nic
        );
        return Err(Failure::precondition("POD_HAS_NO_ADDRESS", message));
    }
    let mut taken: Vec<_> = own;
    let routes = links
        .routes()
        .await
        .map_err(|error| failed("read routes", &error))?;
    taken.extend(routes.into_iter().map(|(range, _)| range));
    let addresses = Addresses::new(end.mac, end.address, &taken).ok_or_else(|| {
        let message = format!(
            "NIC \"{}\": the guest has an address of a network to which the pod has an address or a route: migrate the VM to another node",
            end.nic
        );
        Failure::precondition("MIGRATION_NETWORK", message)
    })?;
    let queues = open_queues(&end.tap, end.queues)?.map_err(|error| match Errno::from_io_error(&error) {
        Some(Errno::BUSY) => crate::in_use(&end.nic, &end.tap),
        _ => failed("make a tap device", &error),
    })?;
    let set_up = set_up(&links, end, (&uplink, &link), &addresses, families).await;
    let index = set_up.map_err(|error| match error.kind() {
        io::ErrorKind::ReadOnlyFilesystem => forbidden("set a switch of the kernel", &error),
        _ => failed("set up the tap device", &error),
    })?;
    let mtu = end.mtu.map_or(link.mtu, |mtu| link.mtu.min(mtu.into()));
    let table = plan::table(end, resolver, &addresses, families, (host_mac(end.mac), mtu));
    let started = node.serve(end.vm, (&end.tap, index), &table);
    let started = started.map_err(|error| failed("start the server of DHCP and DNS", &error))?;
    let tap = Tap {
        queues,
        vhosts: Vec::new(),
        mtu: link.mtu,
    };
    Ok((tap, started))
}

/// The pod's interface that leads to the cluster.
async fn uplink(links: &Links, end: &End) -> Result<(String, Link), Failure> {
    let found = match &end.interface {
        Some(name) => links
            .find(name)
            .await
            .map(|link| link.map(|link| (name.clone(), link))),
        None => links.uplink().await,
    };
    found.map_err(|error| failed("find the pod's interface", &error))?.ok_or_else(|| {
        let message = match &end.interface {
            Some(name) => format!("NIC \"{}\": the pod has no interface \"{name}\"", end.nic),
            None => format!(
                "NIC \"{}\": the pod has no default route: give the interface that leads to the cluster (`podNetwork.interface`)",
                end.nic
            ),
        };
        Failure::precondition("POD_INTERFACE_NOT_FOUND", message)
    })
}

/// Puts the rules in place, and brings the tap up; its index. The tap exists.
async fn set_up(
    links: &Links,
    end: &End,
    (uplink, link): (&str, &Link),
    addresses: &Addresses,
    [has_ipv4, has_ipv6]: [bool; 2],
) -> io::Result<u32> {
    let tap = end.tap.as_str();
    let index = interface_index(tap)?.ok_or(io::ErrorKind::NotFound)?;
    nft::apply(&rules::whole((tap, uplink), end.mac, addresses), None).await?;
    let ipv4 = |interface: &str, name: &str| {
        let path = format!("/proc/sys/net/ipv4/conf/{interface}/{name}");
        switch(&path, "1").map_err(|error| io::Error::new(error.kind(), format!("{path}: {error}")))
    };
    if has_ipv4 {
        ipv4(uplink, "forwarding")?;
        ipv4(tap, "forwarding")?;
        // The guest need not know the pod's addresses on other interfaces (ip-sysctl: arp_ignore).
        ipv4(tap, "arp_ignore")?;
        // Connections of the pod to 127.0.0.0/8 continue on the tap.
        ipv4(tap, "route_localnet")?;
    }
    if has_ipv6 {
        // The pod must not accept routes from the guest.
        switch(&format!("/proc/sys/net/ipv6/conf/{tap}/accept_ra"), "0")?;
        forwarding(false, true)?;
    }
    let alias = format!("vmmd: {}", end.name);
    links.set_tap(index, host_mac(end.mac), link.mtu, alias).await?;
    if has_ipv4 {
        links
            .add_address(index, addresses.gateway4.into(), PREFIX)
            .await?;
    }
    if has_ipv6 {
        links
            .add_address(index, addresses.gateway6.into(), Ipv6Net::PREFIX)
            .await?;
        links.accept_loopback6(index).await?;
    }
    Ok(index)
}

/// Ends the helpers of VMs that are gone or stopped, and starts the missing ones of running VMs. A helper that ends without notice, or whose
/// program another one has replaced, is missing until the launcher of the pod is connected.
pub async fn serve_pods(host: Ports<'_>) {
    let folders = match fs::read_dir(host.run_dir.join(PODS)) {
        Ok(folders) => folders,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return,
        Err(error) => {
            tracing::error!(%error, "look for the servers of DHCP and DNS in pods");
            return;
        }
    };
    let vms = host.vms.vms();
    let by_uid = vms
        .iter()
        .filter_map(|vm| Some((vm.metadata.as_ref()?.uid.as_str(), vm.status.as_ref())));
    let by_uid: HashMap<_, _> = by_uid.collect();
    for folder in folders.flatten() {
        let name = folder.file_name();
        let Some(uid) = name.to_str().and_then(|name| Uuid::parse_str(name).ok()) else {
            continue;
        };
        let vm = name.to_str().and_then(|name| by_uid.get(name));
        let phase = vm.map(|status| status.map_or(VmPhase::Unspecified, v1::VmStatus::phase));
        let nics = vm.copied().flatten().map_or(&[][..], |status| &status.nics);
        let served = match phase {
            None | Some(VmPhase::Stopped | VmPhase::Failed) => {
                helper::end(&folder.path()).map_err(|error| failed("end the server of DHCP and DNS", &error))
            }
            Some(VmPhase::Running | VmPhase::Paused) => serve_again(host, uid, nics, &folder.path()).await,
            // A start or a stop is in progress, which cares for its helper.
            Some(_) => Ok(()),
        };
        if let Err(failure) = served {
            tracing::warn!(vm = %uid, error = failure.message, "the DHCP and DNS of a VM in a pod");
        }
    }
}

/// Starts a helper with the table of the last one, unless it runs. `nics` are those of the machine.
async fn serve_again(
    host: Ports<'_>,
    vm: Uuid,
    nics: &[v1::NicStatus],
    folder: &Path,
) -> Result<(), Failure> {
    let node = Node::new(host)?;
    let lives = helper::runs(folder, &node.netd);
    if lives.map_err(|error| failed("look for the server of DHCP and DNS", &error))? {
        return Ok(());
    }
    let table = table_in(folder)?;
    let nic = nics.iter().find(|nic| table.hosts.contains_key(&nic.mac));
    let nic = nic.ok_or_else(|| Failure::internal("the VM has no NIC in the network of its pod"))?;
    serve(node, host.pods.network(vm)?, vm, nic.tap.clone()).await
}

/// Ensures that a helper serves the tap of a running VM, with the table that [`open`] has written.
pub async fn serve(node: Node, network: PodNetwork, vm: Uuid, tap: String) -> Result<(), Failure> {
    let serving = async move |node: &Node, _: &Resolver| {
        let table = table_in(&node.folder(vm))?;
        let index = interface_index(&tap).map_err(io::Error::from);
        let index = index.and_then(|index| index.ok_or_else(|| io::ErrorKind::NotFound.into()));
        let started = index.and_then(|index| node.serve(vm, (&tap, index), &table));
        let started = started.map_err(|error| failed("start the server of DHCP and DNS", &error))?;
        Ok(((), started))
    };
    node.work(network, serving).await
}

/// The private IPv4 address of the guest of a running VM in its pod, if it has one.
pub fn guest_address(run_dir: &Path, vm: Uuid, mac: Mac) -> Option<Ipv4Addr> {
    let table = table_in(&folder(run_dir, vm)).ok()?;
    table.hosts.get(&mac.to_string())?.address
}

fn table_in(folder: &Path) -> Result<Table, Failure> {
    let table = fs::read(folder.join(TABLE)).and_then(|text| Ok(serde_json::from_slice(&text)?));
    table.map_err(|error| failed("read the table of the server of DHCP and DNS", &error))
}

/// Removes the network of a VM from its pod; see [`close`].
pub fn close_pod(host: Ports<'_>, vm: Uuid) -> io::Result<()> {
    // Most VMs have none.
    if !folder(host.run_dir, vm).exists() {
        return Ok(());
    }
    close(host.run_dir, host.pods.network(vm).ok().as_ref(), vm)
}

/// Ends the helper of a VM, and removes the rules from its pod, if there is a `network`: without it the rules end with the pod. The process
/// that has the tap must have ended. Idempotent. Blocking.
pub fn close(run_dir: &Path, network: Option<&PodNetwork>, vm: Uuid) -> io::Result<()> {
    let removed = network.map_or(Ok(()), |network| {
        within(network.namespace.as_fd(), async || {
            let removed = nft::apply(&rules::none(), None).await;
            removed.map_err(|error| failed("remove the rules", &error))
        })
    });
    if let Err(failure) = removed {
        tracing::debug!(%vm, error = failure.message, "remove the network of a VM from its pod");
    }
    helper::end(&folder(run_dir, vm))
}

fn folder(run_dir: &Path, vm: Uuid) -> PathBuf {
    run_dir.join(PODS).join(vm.to_string())
}

fn failed(operation: &str, error: &io::Error) -> Failure {
    Failure::internal(format!(
        "set up the network of the pod: {operation}: {}",
        text::words(error)
    ))
}
