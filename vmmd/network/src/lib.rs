//! Networks of VMs: tap devices of NICs, and the networks that the node makes (bridge, rules of the packet filter, DHCP and DNS).
//!
//! This crate never knows a VM's actor: [`Ports`] has the parts of the daemon that it works with. A reader starts at
//! [`open_tap`] for one NIC, and at [`Networks`] for managed networks. The program `vmmd-netd` is in [`netd`].
//!
//! A tap on a bridge is not persistent: it exists while a process has its descriptor, which is the
//! `vmm` after its boot. A crash of any process therefore leaves no tap to clean up. The same holds for the tap in the network
//! namespace of a pod ([`pod`]).

mod announce;
mod guard;
mod link;
mod managed;
pub mod netd;
pub mod pod;
mod ports;

use std::{
    io,
    net::Ipv4Addr,
    os::fd::{AsFd, OwnedFd},
};

use rustix::{
    fs::{FlockOperation, Mode, OFlags, flock},
    io::Errno,
    net::{AddressFamily, SocketFlags, SocketType, netdevice::name_to_index, socket_with},
};
use uuid::Uuid;
use vmmd_spec::{
    name::Name,
    nic::{Mac, NicAddress},
    vm::{Attachment, Nic},
};

use guard::{MacFilter, TapGuard};
pub use link::{Link, Links};
pub use managed::floating::floats;
pub use managed::metadata::{publish as publish_metadata, withdraw as withdraw_metadata};
pub use managed::{NetworkKind, Networks, PERIOD, Request as Lease, SeenNetwork, describe};
pub use pod::{PodNetwork, Resolver, close_pod, serve_pods};
pub use ports::{Pods, Ports, Users};

use vmmd_host::{failure::Failure, fault, sys, text};

/// A NIC's end on the node.
#[derive(Debug)]
pub struct Tap {
    /// The open device: a descriptor for each queue, at least one.
    pub queues: Vec<OwnedFd>,
    /// An open vhost-net for each queue, or none.
    pub vhosts: Vec<OwnedFd>,
    /// Largest packet without the Ethernet header, in bytes.
    pub mtu: u32,
}

/// Place of a NIC in its machine.
#[derive(Clone, Debug)]
pub struct NicEnd {
    /// MAC address.
    pub mac: Mac,
    /// Name of the tap that is made for it.
    pub tap: String,
    /// The machine of the VM runs.
    pub plugged: bool,
    /// Address that the guest has in the network of its pod already.
    pub pod_address: Option<Ipv4Addr>,
}

/// Name of the tap that is made for a NIC of a VM on a bridge. `slot` is its place in the machine, which no other NIC has.
pub fn tap_name(vm: Uuid, slot: u32) -> String {
    // 40 random bits of the UUID: 2 + 10 + 1 + 2 characters.
    let uid = vm.simple().to_string();
    format!("vm{}n{slot}", uid.get(..10).unwrap_or_default())
}

/// Whether the name has the form of [`tap_name`]. Such a tap exists only while its VM runs.
fn is_tap_name(name: &str) -> bool {
    let parts = name.strip_prefix("vm").and_then(|rest| rest.split_at_checked(10));
    parts.is_some_and(|(uid, slot)| {
        let slot = slot.strip_prefix('n').unwrap_or_default();
        uid.bytes().all(|byte| byte.is_ascii_hexdigit()) && slot.parse::<u32>().is_ok()
    })
}

/// MAC address of the reservation that a NIC names.
pub fn reserved_mac(networks: &Networks, nic: &Nic) -> Option<Mac> {
    match &nic.attachment {
        Attachment::Network {
            name,
            address: Some(NicAddress::Reserved(reservation)),
            ..
        } => networks.reserved_mac(name.as_str(), reservation),
        _ => None,
    }
}

/// Opens the tap of `nic`, or makes the tap of `end` on its bridge or in its pod. `index` is its number in the spec.
pub async fn open_tap(
    host: Ports<'_>,
    vm: Uuid,
    name: &str,
    index: usize,
    nic: &Nic,
    end: NicEnd,
) -> Result<Tap, Failure> {
    let NicEnd {
        mac,
        tap,
        plugged,
        pod_address,
    } = end;
    let links = &host.links;
    let mut tap = match &nic.attachment {
        Attachment::Network {
            name: network,
            address,
            access,
        } => {
            let address = host
                .networks
                .wanted(network.as_str(), (&nic.name, mac), address.as_ref())?;
            let request = managed::Request {
                vm: (vm, name),
                nic: nic.name.as_str(),
                tap: tap.clone(),
                mac,
                address,
                access,
                metadata: nic.metadata,
                plugged,
            };
            let bridge = host.networks.lease(host, network.as_str(), &request).await?;
            on_bridge(links, tap, name, index, (&bridge, nic, true), mac).await
        }
        Attachment::Bridge(bridge) => {
            refuse_networks_bridge(host, index, bridge)?;
            on_bridge(links, tap, name, index, (bridge, nic, false), mac).await
        }
        Attachment::Tap(tap) => existing(links, nic, tap, mac).await,
        Attachment::PodNetwork { interface } => {
            let end = pod::End {
                vm,
                name: name.to_owned(),
                nic: nic.name.to_string(),
                interface: interface.clone(),
                tap,
                mac,
                address: pod_address,
                queues: nic.queues,
                mtu: nic.mtu,
            };
            pod::open(pod::Node::new(host)?, host.pods.network(vm)?, end).await
        }
    }?;
    if nic.vhost {
        tap.vhosts = (0..nic.queues)
            .map(|_| open_vhost(&nic.name))
            .collect::<Result<_, _>>()?;
    }
    Ok(tap)
}

/// Checks that the bridge, tap or network of `nic` exists, and that the network can give the NIC its address and ports; `mac` is its MAC
/// address. Changes nothing. Whether a tap is free shows at the start.
pub async fn look(
    host: Ports<'_>,
    vm: (Uuid, &str),
    index: usize,
    nic: &Nic,
    mac: Mac,
) -> Result<(), Failure> {
    let links = &host.links;
    if nic.vhost {
        drop(open_vhost(&nic.name)?);
    }
    match &nic.attachment {
        Attachment::Network {
            name,
            address,
            access,
        } => {
            let address = host
                .networks
                .wanted(name.as_str(), (&nic.name, mac), address.as_ref())?;
            let request = managed::Request {
                vm,
                nic: nic.name.as_str(),
                tap: String::new(),
                mac,
                address,
                access,
                metadata: nic.metadata,
                plugged: false,
            };
            host.networks.would_give(host, name.as_str(), &request).await
        }
        Attachment::Bridge(name) => {
            refuse_networks_bridge(host, index, name)?;
            let link = bridge(links, index, name).await?;
            vlan_of(index, name, &link, nic).map(drop)
        }
        Attachment::Tap(name) => tap(links, nic, name).await.map(drop),
        // The pod's launcher may connect later.
        Attachment::PodNetwork { .. } => Ok(()),
    }
}

/// A NIC on a network's bridge has an address of the network and is held to it: it names the network.
fn refuse_networks_bridge(host: Ports<'_>, index: usize, bridge: &str) -> Result<(), Failure> {
    let Some(network) = host.networks.of_bridge(bridge) else {
        return Ok(());
    };
    let message = format!(
        "spec.nics[{index}].bridge: \"{bridge}\" is the bridge of the network \"{network}\": give `network: {network}` in its place"
    );
    Err(Failure::precondition("NETWORK_BRIDGE", message))
}

async fn bridge(links: &Links, index: usize, bridge: &str) -> Result<Link, Failure> {
    let field = format!("spec.nics[{index}].bridge");
    let found = links.find(bridge).await.map_err(|error| failed(&error))?;
    let Some(link) = found else {
        let message = format!("{field}: there is no network interface \"{bridge}\" on the node");
        return Err(Failure::precondition("BRIDGE_NOT_FOUND", message));
    };
    if !link.is_bridge {
        let message = format!("{field}: the network interface \"{bridge}\" is not a bridge");
        return Err(Failure::precondition("NOT_A_BRIDGE", message));
    }
    Ok(link)
}

/// The VLAN of a NIC on this bridge. Refused when the bridge does not filter VLANs.
fn vlan_of(index: usize, bridge: &str, link: &Link, nic: &Nic) -> Result<Option<u16>, Failure> {
    if nic.vlan.is_some() && !link.filters_vlans {
        let message = format!(
            "spec.nics[{index}].vlan: the bridge \"{bridge}\" does not filter VLANs: run `ip link set {bridge} type bridge \
             vlan_filtering 1`"
        );
        return Err(Failure::precondition("BRIDGE_WITHOUT_VLANS", message));
    }
    Ok(nic.vlan)
}

async fn tap(links: &Links, nic: &Nic, tap: &str) -> Result<Link, Failure> {
    let found = links.find(tap).await.map_err(|error| failed(&error))?;
    let link = found.ok_or_else(|| {
        let message = format!(
            "NIC \"{}\": there is no tap device \"{tap}\" on the node",
            nic.name
        );
        Failure::precondition("TAP_NOT_FOUND", message)
    })?;
    if is_tap_name(tap) {
        return Err(in_use(nic.name.as_str(), tap));
    }
    Ok(link)
}

async fn on_bridge(
    links: &Links,
    tap: String,
    vm_name: &str,
    index: usize,
    (bridge, nic, guarded): (&str, &Nic, bool),
    mac: Mac,
) -> Result<Tap, Failure> {
    let bridge_link = self::bridge(links, index, bridge).await?;
    let vlan = vlan_of(index, bridge, &bridge_link, nic)?;
    let queues = open_queues(&tap, nic.queues)?.map_err(|error| {
        Failure::internal(format!("make the tap device \"{tap}\": {}", text::words(&error)))
    })?;
    let device = interface_index(&tap)
        .map_err(|errno| failed(&errno.into()))?
        .ok_or_else(|| Failure::internal(format!("the tap device \"{tap}\" vanished while it was set up")))?;
    if guarded && let Err(error) = links.guard_tap(device, TapGuard(managed::MARK)).await {
        // The network has a warning: its bridge has no guard either.
        tracing::debug!(%error, tap, "guard a tap");
    }
    if nic.mac_filter {
        let filtered = links.filter_mac(device, MacFilter(mac.octets())).await;
        filtered.map_err(|error| {
            let message = format!(
                "spec.nics[{index}].macFilter: the node can't filter frames ({}): load the kernel's modules sch_ingress and cls_bpf \
                 (package linux-modules-extra in some distributions)",
                text::words(&error)
            );
            Failure::precondition("MAC_FILTER_UNAVAILABLE", message)
        })?;
    }
    let alias = format!("vmmd: {vm_name}");
    links
        .join_bridge(device, (&bridge_link, vlan), host_mac(mac), alias)
        .await
        .map_err(|error| failed(&error))?;
    Ok(Tap {
        queues,
        vhosts: Vec::new(),
        mtu: bridge_link.mtu,
    })
}

/// Opens that many queues of a tap; the inner error is the tap's.
fn open_queues(tap: &str, queues: u16) -> Result<io::Result<Vec<OwnedFd>>, Failure> {
    let mut opened = Vec::new();
    for _ in 0..queues {
        let fd = open_tun()?;
        fault::step("make a tap");
        if let Err(error) = sys::attach_tap(&fd, tap, queues > 1) {
            return Ok(Err(error));
        }
        opened.push(fd);
    }
    Ok(Ok(opened))
}

/// First byte of a tap's own address, and that of one whose NIC begins with it as well.
const TAP: u8 = 0xfe;
const TAP_OF_SUCH_A_NIC: u8 = 0xfa;

/// MAC address of the tap itself: the NIC's address with a high first byte. A bridge takes the
/// lowest address of its ports, so its address does not change with the VMs. The address must
/// differ from the NIC's: a bridge delivers frames for the address of a port to the node.
fn host_mac(mac: Mac) -> [u8; 6] {
    let [first, b, c, d, e, f] = mac.octets();
    let first = if first == TAP { TAP_OF_SUCH_A_NIC } else { TAP };
    [first, b, c, d, e, f]
}

async fn existing(links: &Links, nic: &Nic, tap: &str, mac: Mac) -> Result<Tap, Failure> {
    let name = &nic.name;
    let link = self::tap(links, nic, tap).await?;
    if link.is_macvtap {
        return macvtap(links, nic, (tap, link), mac).await;
    }
    // The kernel refuses a second one that opens a tap with one queue, but not one with several.
    if link.queues > 0 {
        return Err(in_use(name.as_str(), tap));
    }
    let queues = open_queues(tap, nic.queues)?.map_err(|error| match Errno::from_io_error(&error) {
        Some(Errno::BUSY) => in_use(name.as_str(), tap),
        _ => {
            let multi = if nic.queues > 1 { " multi_queue" } else { "" };
            let message = format!(
                "NIC \"{name}\": \"{tap}\" is not a tap device that can be used ({}); make one with `ip tuntap add \
                 {tap} mode tap{multi}`",
                text::words(&error)
            );
            Failure::precondition("TAP_UNUSABLE", message)
        }
    })?;
    // Another one can have opened it meanwhile, and the kernel makes a tap where there is none of that name any more.
    let opened = self::tap(links, nic, tap).await?;
    if opened.index != link.index {
        let message = format!("NIC \"{name}\": the tap device \"{tap}\" vanished while it was opened");
        return Err(Failure::precondition("TAP_NOT_FOUND", message));
    }
    if nic.queues > 1 && opened.queues != u32::from(nic.queues) {
        return Err(in_use(name.as_str(), tap));
    }
    Ok(Tap {
        queues,
        vhosts: Vec::new(),
        mtu: link.mtu,
    })
}

fn in_use(nic: &str, tap: &str) -> Failure {
    let message = format!("NIC \"{nic}\": the tap device \"{tap}\" is in use by another process");
    Failure::precondition("TAP_IN_USE", message)
}

/// Opens an existing macvtap: a device file, on which each open adds a queue. The kernel gives
/// queues to any process, so a lock on the first queue marks its owner; the lock ends with the
/// descriptor. A macvtap passes only frames for its own address, so it gets the NIC's address.
async fn macvtap(links: &Links, nic: &Nic, (tap, link): (&str, Link), mac: Mac) -> Result<Tap, Failure> {
    let path = format!("/dev/tap{}", link.index);
    let unusable = |errno: Errno| {
        let words = text::words(&errno.into());
        let help = "restart vmmd if the kernel module `macvtap` was not there when it was started";
        let message = format!(
            "NIC \"{}\": the macvtap \"{tap}\" can't be used ({path}: {words}): {help}",
            nic.name
        );
        Failure::precondition("TAP_UNUSABLE", message)
    };
    let mut queues = Vec::new();
    for queue in 0..nic.queues {
        let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let fd = rustix::fs::open(&path, flags, Mode::empty()).map_err(unusable)?;
        if queue == 0 {
            flock(&fd, FlockOperation::NonBlockingLockExclusive).map_err(|errno| match errno {
                Errno::WOULDBLOCK => in_use(nic.name.as_str(), tap),
                errno => unusable(errno),
            })?;
        }
        let attached = sys::attach_tap(&fd, tap, nic.queues > 1);
        attached.map_err(|error| unusable(Errno::from_io_error(&error).unwrap_or(Errno::IO)))?;
        queues.push(fd);
    }
    let taken = links.set_mac(link.index, mac.octets()).await;
    taken.map_err(|error| failed(&error))?;
    Ok(Tap {
        queues,
        vhosts: Vec::new(),
        mtu: link.mtu,
    })
}

fn open_tun() -> Result<OwnedFd, Failure> {
    let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK;
    rustix::fs::open("/dev/net/tun", flags, Mode::empty()).map_err(|errno| {
        let words = text::words(&errno.into());
        let message = format!("the node can't make tap devices ({words}): load the kernel module `tun`");
        Failure::precondition("TUN_UNAVAILABLE", message)
    })
}

/// For a pair of queues of the NIC `name`. The kernel loads the module when the device is opened.
fn open_vhost(name: &Name) -> Result<OwnedFd, Failure> {
    let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK;
    rustix::fs::open("/dev/vhost-net", flags, Mode::empty()).map_err(|errno| {
        let words = text::words(&errno.into());
        let message = format!(
            "NIC \"{name}\": the node has no vhost-net ({words}): load the kernel module `vhost_net`, or take the backend USERSPACE"
        );
        Failure::precondition("VHOST_UNAVAILABLE", message)
    })
}

fn interface_index(name: &str) -> rustix::io::Result<Option<u32>> {
    let socket = socket_with(AddressFamily::UNIX, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
    match name_to_index(socket.as_fd(), name) {
        Err(Errno::NODEV) => Ok(None),
        result => result.map(Some),
    }
}

fn failed(error: &io::Error) -> Failure {
    Failure::internal(format!("set up the VM's network: {}", text::words(error)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tap_names_fit_into_an_interface_name_and_differ_by_nic() {
        let vm = Uuid::new_v4();
        assert!(tap_name(vm, 95).len() <= 15);
        assert_ne!(tap_name(vm, 2), tap_name(vm, 3));
        assert!(is_tap_name(&tap_name(vm, 95)));
        for other in [
            "tap0",
            "vmtap0",
            "vm0123456789n",
            "vm012345678n0",
            "vmb0123456789",
        ] {
            assert!(!is_tap_name(other), "{other}");
        }
    }

    #[test]
    fn a_tap_never_lends_its_address_to_the_bridge() {
        let mac = "52:54:00:12:34:56".parse().unwrap();
        assert_eq!(host_mac(mac), [0xfe, 0x54, 0, 0x12, 0x34, 0x56]);
    }

    #[test]
    fn a_tap_never_has_the_address_of_its_nic() {
        for first in (0..=0xfe).step_by(2) {
            let mac = Mac::try_from([first, 2, 3, 4, 5, 6]).unwrap();
            assert_ne!(host_mac(mac), mac.octets(), "{mac}");
        }
    }
}
