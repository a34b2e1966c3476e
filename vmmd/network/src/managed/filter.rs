//! The packet filter in the kernel, and the changes that bring it to the state of the records.
//!
//! A change of a network or a NIC is a transaction of a few elements by netlink. Only the chains of
//! guests with a firewall need the program nft. At the daemon's start, and when a change fails or
//! another program has changed the tables, one transaction of nft replaces all. The sets are filled
//! in the same transaction as the rules, so there is no moment without them.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, VecDeque},
    io,
    sync::{Arc, Mutex, PoisonError},
};

use vmmd_host::fault;
use vmmd_spec::nic::Protocol;
use vmmd_store::{LeaseRecord, NetworkRecord};

use crate::guard::Guard;

use super::{
    conntrack::{self, Moved},
    firewall::{self, Chains},
    floating,
    netlink::Transactions,
    nft,
    node::{filtered, port},
    routes,
    rules::{self, Element, Family, Field, Network, Set},
};

/// Elements of a change, above which replacing all takes less time. The kernel takes a transaction
/// from a buffer of 200 KiB (net.core.wmem_default).
const MOST: usize = 500;
/// Programs whose notifications may still be in a queue.
const RECENT: usize = 64;

/// The packet filter as the daemon has set it up.
#[derive(Debug, Default)]
pub struct Filter {
    /// State of the kernel; `None` when unknown.
    known: Option<Known>,
    transactions: Option<Arc<Transactions>>,
    own: Arc<Own>,
    /// By UUID: the guards of networks' bridges.
    pub guards: BTreeMap<Vec<u8>, Guard>,
    /// Indexes of taps that have guards.
    pub taps: BTreeSet<u32>,
    /// Routes to subnets behind guests.
    pub routes: routes::Known,
    /// Interfaces that answer for floating addresses; `None` when unknown.
    pub proxies: Option<floating::Known>,
}

/// State of the kernel.
#[derive(Debug, Default)]
struct Known {
    /// By UUID: the records that the elements are of.
    records: BTreeMap<Vec<u8>, NetworkRecord>,
    /// Chains of guests, by the map that leads there and their name.
    chains: BTreeSet<(&'static str, String)>,
}

/// Netlink ports of changes by this daemon. Notifications have the port of the author.
#[derive(Debug, Default)]
pub struct Own(Mutex<VecDeque<u32>>);

impl Own {
    /// Notes the port of a program's first netlink socket, which is its process id (netlink(7)), or of
    /// a socket.
    pub fn note(&self, port: u32) {
        let mut ports = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        ports.push_front(port);
        ports.truncate(RECENT);
    }

    /// Whether a change with this author is the daemon's own.
    pub fn has(&self, port: u32) -> bool {
        let ports = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        ports.contains(&port)
    }
}

/// What networks and NICs have in the tables.
#[derive(Debug, Default, PartialEq)]
struct Parts {
    elements: BTreeSet<Element>,
    chains: Chains,
}

impl Parts {
    fn of<'a>(records: impl IntoIterator<Item = &'a NetworkRecord>) -> Self {
        let mut parts = Self::default();
        records.into_iter().for_each(|record| parts.add_network(record));
        parts
    }

    fn add_network(&mut self, record: &NetworkRecord) {
        let Some(network) = filtered(record) else {
            return;
        };
        self.elements.extend(network.elements());
        for lease in &record.leases {
            self.add_lease(&network, lease);
        }
        self.add_groups(&network, record);
    }

    /// Adds the chains of the security groups that NICs name.
    fn add_groups(&mut self, network: &Network, record: &NetworkRecord) {
        let live = record.leases.iter().filter(|lease| lease.released_ms == 0);
        let used: BTreeSet<_> = live.flat_map(|lease| &lease.groups).collect();
        self.chains.extend(firewall::group_chains(network, used));
    }

    fn add_lease(&mut self, network: &Network, lease: &LeaseRecord) {
        if let Some(port) = port(network, lease) {
            self.elements.extend(network.elements_of(&port));
            self.chains.extend(firewall::chains(network, &port));
        }
    }
}

/// A change of the packet filter.
#[derive(Debug, Default)]
pub struct Plan {
    removed: Parts,
    added: Parts,
    /// By UUID: records that differ from the known ones; `None` for networks that are gone.
    records: BTreeMap<Vec<u8>, Option<NetworkRecord>>,
    /// Everything is replaced.
    replaces: bool,
}

impl Plan {
    /// Adds the difference between two records of a network.
    fn compare(&mut self, before: Option<&NetworkRecord>, record: &NetworkRecord) {
        let alike = |before: &NetworkRecord| before.spec == record.spec && before.leaving == record.leaving;
        match before {
            Some(before) if alike(before) && before.leases == record.leases => return,
            Some(before) if alike(before) => {
                if let Some(network) = filtered(record) {
                    differing(before, record).for_each(|lease| self.removed.add_lease(&network, lease));
                    differing(record, before).for_each(|lease| self.added.add_lease(&network, lease));
                    self.removed.add_groups(&network, before);
                    self.added.add_groups(&network, record);
                }
            }
            before => {
                if let Some(before) = before {
                    self.removed.add_network(before);
                }
                self.added.add_network(record);
            }
        }
        self.records.insert(record.uid.clone(), Some(record.clone()));
    }

    /// Takes out what is removed and added.
    fn cancel(&mut self) {
        let (removed, added) = (&mut self.removed, &mut self.added);
        let elements = &removed.elements - &added.elements;
        added.elements = &added.elements - &removed.elements;
        removed.elements = elements;
        // A chain with other rules is changed.
        let chains = removed.chains.clone();
        removed.chains.retain(|name, _| !added.chains.contains_key(name));
        added.chains.retain(|name, rules| chains.get(name) != Some(rules));
    }

    /// Removes nothing of a tap that another NIC has now.
    fn keep(&mut self, records: &[&NetworkRecord]) {
        let removed = self.removed.elements.iter();
        let taps = removed.filter_map(|element| match (element.set, element.key.as_slice()) {
            (Set(Family::Bridge, "taps"), [Field::Interface(tap)]) => Some(tap.as_str()),
            _ => None,
        });
        let taps: BTreeSet<_> = taps.collect();
        let mut kept = Parts::default();
        for record in records.iter().filter(|_| !taps.is_empty()) {
            let live = |lease: &&LeaseRecord| lease.released_ms == 0 && taps.contains(lease.tap.as_str());
            for lease in record.leases.iter().filter(live) {
                if let Some(network) = filtered(record) {
                    kept.add_lease(&network, lease);
                }
            }
        }
        self.removed.elements = &self.removed.elements - &kept.elements;
        self.removed
            .chains
            .retain(|name, _| !kept.chains.contains_key(name));
    }

    /// Ports of the node where datagrams lead elsewhere after the change, and floating addresses that lead no more where they led.
    fn moved(&self) -> Moved {
        let elements = self.removed.elements.iter().chain(&self.added.elements);
        let ports = elements.filter_map(|element| match element.key.as_slice() {
            [.., Field::Protocol(Protocol::Udp), Field::Port(port)] => Some(*port),
            _ => None,
        });
        let removed = self.removed.elements.iter();
        let addresses = removed.filter_map(|element| match (element.set.1, element.key.as_slice()) {
            ("floating4" | "floating6", [Field::Ip(address)]) => Some(*address),
            _ => None,
        });
        Moved {
            ports: ports.collect(),
            addresses: addresses.collect(),
        }
    }
}

/// Leases of `record` that `other` has not, or not so.
fn differing<'a>(
    record: &'a NetworkRecord,
    other: &'a NetworkRecord,
) -> impl Iterator<Item = &'a LeaseRecord> {
    let key = |lease: &'a LeaseRecord| (lease.address, &lease.vm, &lease.nic);
    let others: HashMap<_, _> = other.leases.iter().map(|lease| (key(lease), lease)).collect();
    let leases = record.leases.iter();
    leases.filter(move |lease| others.get(&key(lease)) != Some(lease))
}

impl Filter {
    /// Notes its changes in `own`.
    pub fn new(own: Arc<Own>) -> Self {
        Self {
            own,
            ..Self::default()
        }
    }

    /// Forgets the state of the kernel: the next change replaces all.
    pub fn distrust(&mut self) {
        self.known = None;
    }

    /// Whether the kernel has the rules of a network that is not being deleted, with this specification.
    pub fn has(&self, record: &NetworkRecord) -> bool {
        let known = self
            .known
            .as_ref()
            .and_then(|known| known.records.get(&record.uid));
        !record.leaving && known.is_some_and(|known| !known.leaving && known.spec == record.spec)
    }

    /// What differs between the kernel and the records of all networks.
    pub fn plan(&self, records: &[&NetworkRecord]) -> Plan {
        let mut plan = Plan::default();
        let none = Known::default();
        let known = self.known.as_ref().unwrap_or(&none);
        for record in records {
            plan.compare(known.records.get(&record.uid), record);
        }
        let present: BTreeSet<_> = records.iter().map(|record| &record.uid).collect();
        for (uid, before) in &known.records {
            if !present.contains(uid) {
                plan.removed.add_network(before);
                plan.records.insert(uid.clone(), None);
            }
        }
        plan.cancel();
        plan.keep(records);
        let (before, after) = (
            known.records.values().any(|record| !record.leaving),
            records.iter().any(|record| !record.leaving),
        );
        let many = plan.removed.elements.len() + plan.added.elements.len() > MOST;
        // A node without networks needs no nft.
        let unknown = self.known.is_none() && !records.is_empty();
        plan.replaces = unknown || before != after || many;
        plan
    }

    /// Carries a plan out.
    pub async fn apply(&mut self, plan: Plan) -> io::Result<()> {
        let moved = plan.moved();
        let Known {
            mut records,
            mut chains,
        } = self.known.take().unwrap_or_default();
        let mut replaces = plan.replaces;
        if !replaces && let Err(error) = self.change(&plan, &mut chains).await {
            tracing::warn!(%error, "the packet filter was changed by another program and is set up again");
            replaces = true;
        }
        for (uid, record) in plan.records {
            match record {
                Some(record) => drop(records.insert(uid, record)),
                None => drop(records.remove(&uid)),
            }
        }
        if replaces {
            chains = self.replace(&records).await?;
        }
        self.known = Some(Known { records, chains });
        if !moved.is_empty()
            && let Err(error) = conntrack::forget(&moved).await
        {
            tracing::warn!(%error, "make the kernel forget where published ports and floating addresses led");
        }
        Ok(())
    }

    /// Changes what differs. A chain is made before an element leads there, and removed after.
    async fn change(&mut self, plan: &Plan, chains: &mut BTreeSet<(&'static str, String)>) -> io::Result<()> {
        let (removed, added) = (&plan.removed, &plan.added);
        if !added.chains.is_empty() {
            let shared = if chains.is_empty() { firewall::SHARED } else { "" };
            nft::apply(
                &(shared.to_owned() + &firewall::text(&added.chains)),
                Some(&self.own),
            )
            .await?;
            chains.extend(added.chains.keys().cloned());
        }
        if !removed.elements.is_empty() || !added.elements.is_empty() {
            self.transact(removed.elements.clone(), added.elements.clone())
                .await?;
        }
        if !removed.chains.is_empty() {
            chains.retain(|name| !removed.chains.contains_key(name));
            let shared = if chains.is_empty() {
                firewall::NOT_SHARED
            } else {
                ""
            };
            nft::apply(&(firewall::removal(&removed.chains) + shared), Some(&self.own)).await?;
        }
        Ok(())
    }

    async fn transact(&mut self, removed: BTreeSet<Element>, added: BTreeSet<Element>) -> io::Result<()> {
        fault::step("change the packet filter");
        let transactions = match &self.transactions {
            Some(transactions) => transactions,
            None => self.transactions.insert(Arc::new(Transactions::open()?)),
        };
        if !self.own.has(transactions.port) {
            self.own.note(transactions.port);
        }
        let transactions = Arc::clone(transactions);
        // Another program's change can take seconds, and the kernel carries one out at a time.
        let changed = tokio::task::spawn_blocking(move || transactions.change(&removed, &added));
        changed.await.map_err(io::Error::other)?
    }

    /// Replaces everything; the chains of guests.
    async fn replace(
        &self,
        records: &BTreeMap<Vec<u8>, NetworkRecord>,
    ) -> io::Result<BTreeSet<(&'static str, String)>> {
        let parts = Parts::of(records.values());
        let text = if parts.elements.is_empty() {
            rules::none()
        } else {
            rules::whole(&parts.elements, &parts.chains)
        };
        nft::apply(&text, Some(&self.own)).await?;
        Ok(parts.chains.into_keys().collect())
    }
}

#[cfg(test)]
mod tests {
    use vmmd_api::v1::{self, NetworkMode};
    use vmmd_store::PortRecord;

    use super::*;

    fn lease(last: u8, tap: &str) -> LeaseRecord {
        LeaseRecord {
            address: u32::from_be_bytes([10, 80, 0, last]),
            mac: vec![0x52, 0x54, 0, 0, 0, last],
            tap: tap.into(),
            ..LeaseRecord::default()
        }
    }

    fn network(number: u8, leases: &[LeaseRecord]) -> NetworkRecord {
        NetworkRecord {
            uid: vec![number; 16],
            spec: Some(v1::NetworkSpec {
                mode: NetworkMode::Nat.into(),
                ipv4_cidr: format!("10.{}.0.0/24", 79 + number),
                ..v1::NetworkSpec::default()
            }),
            leases: leases.to_vec(),
            ..NetworkRecord::default()
        }
    }

    /// A filter that has put these records into the kernel.
    fn filter(records: &[NetworkRecord]) -> Filter {
        let by_uid = records.iter().map(|record| (record.uid.clone(), record.clone()));
        let known = Known {
            records: by_uid.collect(),
            chains: Parts::of(records).chains.into_keys().collect(),
        };
        Filter {
            known: Some(known),
            ..Filter::default()
        }
    }

    fn plan(before: &[NetworkRecord], after: &[NetworkRecord]) -> Plan {
        filter(before).plan(&after.iter().collect::<Vec<_>>())
    }

    fn sets(elements: &BTreeSet<Element>) -> Vec<&str> {
        elements.iter().map(|element| element.set.1).collect()
    }

    #[test]
    fn a_new_nic_is_a_few_elements_beside_many_others() {
        let mut leases: Vec<_> = (2..200).map(|last| lease(last, &format!("vm{last}"))).collect();
        let before = [network(1, &leases)];
        leases.push(lease(200, "new"));
        let plan = plan(&before, &[network(1, &leases)]);
        assert!(!plan.replaces && plan.removed == Parts::default());
        let expected = ["inside4", "nat4", "macs", "owned4", "taps"];
        assert_eq!(sets(&plan.added.elements), expected);
    }

    #[test]
    fn a_released_nic_loses_its_elements() {
        let gone = LeaseRecord {
            released_ms: 5,
            ..lease(2, "a")
        };
        let plan = plan(
            &[network(1, &[lease(2, "a"), lease(3, "b")])],
            &[network(1, &[gone, lease(3, "b")])],
        );
        assert!(!plan.replaces && plan.added == Parts::default());
        assert_eq!(plan.removed.elements.len(), 5);
    }

    #[test]
    fn a_tap_that_moves_to_another_network_is_never_without_rules() {
        let before = [network(1, &[lease(2, "a")]), network(2, &[])];
        let after = [network(1, &[]), network(2, &[lease(3, "a")])];
        let moved = plan(&before, &after);
        assert!(!sets(&moved.removed.elements).contains(&"taps"));
        // Also when the records change one after the other.
        let both = [network(1, &[lease(2, "a")]), network(2, &[lease(3, "a")])];
        let left = plan(&both, &after);
        assert!(sets(&left.removed.elements).contains(&"owned4"));
        assert!(!sets(&left.removed.elements).contains(&"taps"));
    }

    #[test]
    fn two_ports_that_lead_to_one_are_told_apart() {
        let port = |node_port| PortRecord {
            node_port,
            guest_port: 80,
            udp: true,
            ..PortRecord::default()
        };
        let with = |ports: &[u32]| LeaseRecord {
            ports: ports.iter().copied().map(port).collect(),
            ..lease(2, "a")
        };
        let plan = plan(
            &[network(1, &[with(&[8080, 8081])])],
            &[network(1, &[with(&[8081])])],
        );
        assert_eq!(sets(&plan.removed.elements), ["published4"]);
        assert_eq!(plan.moved().ports, BTreeSet::from([8080]));
    }

    #[test]
    fn rules_of_a_guest_change_without_its_elements() {
        let with = |rules: usize| LeaseRecord {
            firewall: Some(v1::NicFirewall {
                egress: Some(v1::NicRules {
                    allow: vec![v1::NicRule::default(); rules],
                }),
                ingress: None,
            }),
            ..lease(2, "a")
        };
        let open = [network(1, &[lease(2, "a")])];
        let closed = [network(1, &[with(0)])];
        let begun = plan(&open, &closed);
        assert_eq!(sets(&begun.added.elements), ["egress"]);
        assert_eq!(begun.added.chains.len(), 1);
        let changed = plan(&closed, &[network(1, &[with(1)])]);
        assert!(changed.added.elements.is_empty() && changed.removed == Parts::default());
        assert_eq!(changed.added.chains.len(), 1);
        let ended = plan(&closed, &open);
        assert_eq!((ended.removed.chains.len(), ended.added.chains.len()), (1, 0));
    }

    #[test]
    fn change_of_a_group_changes_one_chain_of_all_its_guests() {
        let with = |last, groups: &[&str]| LeaseRecord {
            groups: groups.iter().map(|name| (*name).to_owned()).collect(),
            ..lease(last, &format!("vm{last}"))
        };
        let network = |rules: usize, leases: &[LeaseRecord]| {
            let mut network = network(1, leases);
            let group = |name: &str, rules| v1::SecurityGroup {
                name: name.into(),
                ingress: Some(v1::NicRules {
                    allow: vec![v1::NicRule::default(); rules],
                }),
                egress: None,
            };
            let spec = network.spec.as_mut().unwrap();
            spec.security_groups = vec![group("web", rules), group("db", 1)];
            [network]
        };
        let names = |parts: &Parts| -> Vec<String> {
            let names = parts.chains.keys();
            names.map(|(_, name)| name.clone()).collect()
        };
        let group = |name: &str| format!("ingress-vmb0101010101-{name}");
        let both = [with(2, &["web"]), with(3, &["web"])];
        let changed = plan(&network(1, &both), &network(2, &both));
        assert_eq!(
            (names(&changed.added), changed.removed),
            (vec![group("web")], Parts::default())
        );
        assert!(changed.added.elements.is_empty());
        // A group has a chain while a guest has the group.
        let one = [with(2, &["web"]), lease(3, "vm3")];
        let begun = plan(
            &network(1, &one),
            &network(1, &[with(2, &["web"]), with(3, &["db"])]),
        );
        assert_eq!(names(&begun.added), ["ingress-vm3".to_owned(), group("db")]);
        assert_eq!(sets(&begun.added.elements), ["ingress"]);
        let ended = plan(&network(1, &both), &network(1, &one));
        assert_eq!(names(&ended.removed), ["ingress-vm3"]);
        let ended = plan(
            &network(1, &one),
            &network(1, &[lease(2, "vm2"), lease(3, "vm3")]),
        );
        assert_eq!(names(&ended.removed), ["ingress-vm2".to_owned(), group("web")]);
    }

    #[test]
    fn everything_is_replaced_for_the_first_and_the_last_network() {
        let one = [network(1, &[])];
        let leaving = NetworkRecord {
            leaving: true,
            ..network(1, &[])
        };
        assert!(plan(&[], &one).replaces);
        assert!(plan(&one, &[leaving]).replaces && plan(&one, &[]).replaces);
        assert!(!plan(&one, &one).replaces);
        // Unknown, and without networks.
        let filter = Filter::default();
        assert!(filter.plan(&[&one[0]]).replaces);
        assert!(!filter.plan(&[]).replaces);
    }
}
