//! Packets of all sizes between a guest and the node arrive unchanged, with each combination of
//! offloads. Packets in transit survive operations on the VM.

use rstest::rstest;
use serde_json::{Value, json};
use vmmd_tests::node::Kernel;
use vmmd_tests::vm::{Console, Vm};
use vmmd_tests::wait::Deadline;
use vmmd_tests::{Case, long};

/// How long a step may take in a slow node.
const PATIENCE: u64 = 120;
/// How long a million packets in each direction may take.
const MILLION: u64 = 1800;
/// The same as in `netcheck`: a stream has at most two windows of so many datagrams under way.
const UNDER_WAY: u64 = 2 * 63;
/// Times that the link goes down under load.
const FLAPS: u64 = 2;

/// Offloads that a NIC does not offer. Without checksums there is no segmentation.
type Off = &'static [&'static str];
const TCP: &str = "TCP_SEGMENTATION";
const UDP: &str = "UDP_SEGMENTATION";
const CHECKSUM: &str = "CHECKSUM";
const MERGEABLE: &str = "MERGEABLE_BUFFERS";
/// All combinations; each line is a guest.
const ALL: [&[Off]; 2] = [
    &[&[], &[UDP], &[TCP], &[TCP, UDP], &[CHECKSUM]],
    &[
        &[MERGEABLE],
        &[UDP, MERGEABLE],
        &[TCP, MERGEABLE],
        &[TCP, UDP, MERGEABLE],
        &[CHECKSUM, MERGEABLE],
    ],
];
/// Each value of each at least once. The first NIC offers everything.
const SOME: [&[Off]; 1] = [&[&[], &[UDP, MERGEABLE], &[TCP], &[CHECKSUM, MERGEABLE]]];

/// Offloads that a guest's kernel may perform in software, with a NIC that offers all of them.
const SWITCHED: [&str; 4] = [
    "tx-udp-segmentation=off",
    "tx-udp-segmentation=on tx-tcp-segmentation=off tx-tcp6-segmentation=off rx-gro-hw=off",
    "tx-checksum-ip-generic=off tx-udp-segmentation=off",
    "tx-checksum-ip-generic=on tx-udp-segmentation=on tx-tcp-segmentation=on tx-tcp6-segmentation=on rx-gro-hw=on",
];

/// Has a guest's kernel write down why it drops packets. From its command line, since a kernel that runs on several emulated processors may be lost
/// when it changes its own code.
const TRACE: &str = "trace_event=skb:kfree_skb";

/// Without mergeable buffers each of the 256 buffers of a receive queue takes a packet of 64 KiB.
const WHOLE_BUFFERS_MIB: u64 = 20;

/// A guest's queue in front of its NIC. The kernel's own choice, `fq_codel`, drops packets that have waited there for a while, as they do while a
/// snapshot is taken, or where the NIC's thread waits for a processor.
const QUEUE: &str = "pfifo_fast";

/// A guest with several NICs on one bridge, each with a network of its own. The node is
/// 10.NUMBER.NIC.1 and fd09:NUMBER:NIC::1 there; the guest's addresses end with 2. The first NIC
/// also has a VLAN, 10.NUMBER.100.0/24.
///
/// Both ends have permanent neighbor entries. While a kernel resolves a neighbor, it queues at most
/// 212,992 bytes (some 13 packets of 9,000 bytes) and drops the rest.
struct Wired<'case> {
    case: &'case Case,
    vm: Vm<'case>,
    console: Console,
    bridge: String,
    netcheck: String,
    number: u8,
    nics: &'static [Off],
    queues: u64,
}

impl<'case> Wired<'case> {
    fn start(case: &'case Case, number: u8, backend: &str, queues: u64, nics: &'static [Off]) -> Self {
        let bridge = case.bridge();
        let mut node = format!(
            "ip link set {bridge} mtu 9000 address {NODE_MAC} && modprobe 8021q && \
             ip link add link {bridge} name {bridge}.7 type vlan id 7 && ip addr add 10.{number}.100.1/24 dev {bridge}.7 && ip link set {bridge}.7 up"
        );
        // Before the NICs are up, which then have their queues. Lines of their own, as the guest's shell takes 1,023 characters.
        let mut guest = vec![format!(
            "mount -t tracefs tracefs /sys/kernel/tracing && echo {QUEUE} > /proc/sys/net/core/default_qdisc && \
             echo 1 > /proc/sys/net/ipv4/conf/all/arp_ignore"
        )];
        let mut specs = Vec::new();
        for (nic, off) in nics.iter().enumerate() {
            node += &format!(
                " && ip addr add 10.{number}.{nic}.1/24 dev {bridge} && ip addr add fd09:{number}:{nic}::1/64 dev {bridge} nodad"
            );
            guest.push(format!(
                "echo 0 > /proc/sys/net/ipv6/conf/eth{nic}/accept_dad && ip link set eth{nic} up && \
                 ip addr add 10.{number}.{nic}.2/24 dev eth{nic} && ip addr add fd09:{number}:{nic}::2/64 dev eth{nic}"
            ));
            specs.push(json!({
                "name": format!("eth{nic}"), "mac": mac(number, nic), "bridge": bridge, "backend": backend, "queues": queues,
                "disabledOffloads": off,
            }));
        }
        case.node().sh(&node);
        let spec = case.net_guest(Kernel::Cloud612);
        let whole = nics.iter().filter(|off| off.contains(&MERGEABLE)).count();
        let memory = 256 + WHOLE_BUFFERS_MIB * queues * u64::try_from(whole).expect("a few");
        let spec = spec.cores(2).memory_mib(memory).cmdline(TRACE);
        let (vm, mut console) = Vm::boot(case, "", &spec.set("/nics", json!(specs)));
        guest.push(format!(
            "busybox ip link add link eth0 name vlan7 type vlan id 7 && ip addr add 10.{number}.100.2/24 dev vlan7 && \
             ip link set vlan7 up && {{ netcheck serve & }} && until busybox netstat -lnt | grep -q :9000; do usleep 100000; done"
        ));
        for line in &guest {
            console.run(line);
        }
        let mut wired = Self {
            case,
            vm,
            console,
            bridge,
            netcheck: case.netcheck(),
            number,
            nics,
            queues,
        };
        wired.pin();
        for nic in 0..nics.len() {
            wired.switch(nic, wired.offers(nic));
        }
        wired
    }

    /// Gives both ends permanent neighbor entries for each other.
    fn pin(&mut self) {
        let (bridge, number) = (&self.bridge, self.number);
        let mut node = format!(
            "ip neigh replace 10.{number}.100.2 lladdr {} dev {bridge}.7 nud permanent",
            mac(number, 0)
        );
        let mut guest = format!("netcheck pin vlan7 {NODE_MAC} 10.{number}.100.1");
        for nic in 0..self.nics.len() {
            let (mac, networks) = (
                mac(number, nic),
                [format!("10.{number}.{nic}."), format!("fd09:{number}:{nic}::")],
            );
            for network in &networks {
                node += &format!(" && ip neigh replace {network}2 lladdr {mac} dev {bridge} nud permanent");
            }
            let [four, six] = networks;
            guest += &format!(" && netcheck pin eth{nic} {NODE_MAC} {four}1 {six}1");
        }
        self.case.node().sh(&node);
        self.console.run(&guest);
    }

    /// Which packets were dropped, as the guest and the node count it.
    fn drops(&mut self) -> String {
        let counted = "grep -H . /proc/net/snmp /proc/net/snmp6 /proc/net/stat/arp_cache /proc/net/dev /proc/net/softnet_stat";
        // Of each packet: its protocol, where and why.
        let traced = "sed -n 's/.*kfree_skb:.*protocol=\\([0-9]*\\) location=\\([^ ]*\\) reason: *\\(.*\\)/\\1 \\2 \\3/p' \
                      /sys/kernel/tracing/trace | sort | uniq -c";
        let guest = self.console.try_run(&format!("{counted}; {traced}"));
        let node = self
            .case
            .node()
            .try_sh(&format!("{counted}; ip -s -s link; tc -s qdisc"));
        let [guest, node] = [guest, node].map(|said| said.unwrap_or_else(|error| format!("{error:#}")));
        format!("The guest:\n{guest}\nThe node:\n{node}")
    }

    /// The features that a guest's kernel has by what its NIC offers.
    fn offers(&self, nic: usize) -> String {
        let off = self.nics[nic];
        let has = |what: &str| !off.contains(&CHECKSUM) && !off.contains(&what);
        let state = |on: bool| if on { "on" } else { "off" };
        format!(
            "tx-checksum-ip-generic={} tx-tcp-segmentation={tcp} tx-tcp6-segmentation={tcp} tx-udp-segmentation={}",
            state(has(CHECKSUM)),
            state(has(UDP)),
            tcp = state(has(TCP)),
        )
    }

    /// Fails when the guest's device is not like this afterwards.
    fn switch(&self, nic: usize, features: impl AsRef<str>) {
        let (netcheck, number, queues) = (&self.netcheck, self.number, self.queues);
        let features = features.as_ref();
        self.case.node().sh(&format!(
            "{netcheck} switch 10.{number}.{nic}.2 eth{nic} --pairs {queues} {features}"
        ));
    }

    fn set_mtu(&mut self, mtu: u32) {
        let last = self.nics.len() - 1;
        self.console.run(
            &format!("for nic in $(seq 0 {last}); do ip link set eth$nic mtu {mtu} || exit 1; done; ip link set vlan7 mtu {mtu}"));
        let bridge = &self.bridge;
        let set = format!("ip link set {bridge} mtu {mtu} && ip link set {bridge}.7 mtu {mtu}");
        self.case.node().sh(&set);
    }

    /// Checks that all packets arrive unchanged. `to` is the end of an address of the guest.
    fn compare(&self, to: &str, mtu: u32, kinds: &str, seconds: u64) {
        let (netcheck, number) = (&self.netcheck, self.number);
        let to = match to.split_once(':') {
            Some((nic, _)) => format!("fd09:{number}:{nic}::2"),
            None => format!("10.{number}.{to}.2"),
        };
        let flows = self.queues;
        let run = format!("{netcheck} run {to} --mtu {mtu} --flows {flows} {kinds}");
        let node = self.case.node();
        let said = node.sh_within(&run, Deadline::seconds(seconds));
        println!("{run}: {}", said.trim());
        for kind in kinds.split(' ') {
            let (kind, packets) = kind.split_once(':').expect("kind and packets");
            for direction in ["there", "back"] {
                let counts = Counts::of(&said, kind, direction);
                let wanted: u64 = packets.parse().expect("packets");
                assert!(counts.sent >= wanted, "{run}: {said}");
                assert_eq!(counts.received, counts.sent, "{run}: {said}");
                counts.whole(0, &run);
            }
        }
    }

    fn load(&self) -> Load {
        let (netcheck, number, flows) = (&self.netcheck, self.number, self.queues);
        let run = format!("{netcheck} run 10.{number}.0.2 --mtu 9000 --flows {flows} udp:0 tcp:0");
        let mut load = Load(Console::open(self.case, &run));
        load.goes_on();
        load
    }

    fn ctl(&self, verb: &str) {
        self.vm.ctl(verb);
    }
}

impl Drop for Wired<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{}", self.drops());
        }
        // The case removes the bridge; it fails only when that is gone.
        let _ = self.case.node().ssh(&format!("ip link del {}.7", self.bridge));
    }
}

/// The node's MAC address on its bridge.
const NODE_MAC: &str = "02:00:00:00:00:01";

/// The MAC address of a guest's NIC.
fn mac(number: u8, nic: usize) -> String {
    format!("52:54:00:00:{number:02x}:{nic:02x}")
}

/// Counters of `netcheck` in one direction.
struct Counts {
    sent: u64,
    received: u64,
    lost: u64,
    doubled: u64,
    damaged: u64,
}

impl Counts {
    fn of(said: &str, kind: &str, direction: &str) -> Self {
        let report: Value = serde_json::from_str(said).unwrap_or_else(|error| panic!("{said}: {error}"));
        let count = |name: &str| {
            report[kind][direction][name]
                .as_u64()
                .unwrap_or_else(|| panic!("no {name} of {kind}, {direction}: {said}"))
        };
        Self {
            sent: count("sent"),
            received: count("received"),
            lost: count("lost"),
            doubled: count("doubled"),
            damaged: count("damaged"),
        }
    }

    #[track_caller]
    fn whole(&self, lost: u64, what: &str) {
        assert_eq!((self.damaged, self.doubled), (0, 0), "{what}");
        assert!(
            self.lost <= lost,
            "{} of {} are lost: {what}",
            self.lost,
            self.sent
        );
    }
}

/// `netcheck` in the node, which sends and receives until it is stopped.
struct Load(Console);

impl Load {
    /// Hundreds of packets more arrive in each direction.
    #[track_caller]
    fn goes_on(&mut self) {
        self.0.type_line("go on");
        self.0.until("going", PATIENCE);
    }

    /// At most `lost` datagrams of each direction are lost, and none is damaged or doubled.
    #[track_caller]
    fn ends(mut self, lost: u64) {
        self.0.type_line("stop");
        self.0.until("{", 300);
        let said = format!("{{{}", self.0.until("\n", PATIENCE));
        println!("under load, at most {lost} lost: {}", said.trim());
        for (kind, direction, lost) in [("udp", "there", lost), ("udp", "back", lost), ("tcp", "there", 0)] {
            let counts = Counts::of(&said, kind, direction);
            assert!(counts.received > 0, "{said}");
            counts.whole(lost, &said);
        }
    }
}

/// Takes a snapshot, and returns its name.
fn snapshot(wired: &Wired<'_>, suffix: &str) -> String {
    let name = format!("{}-{suffix}", wired.case.name());
    let take = format!("vmmctl snapshot create {name} --vm {}", wired.vm.name());
    wired.case.node().sh(&take);
    wired.case.at_end(format!("vmmctl snapshot rm {name}"));
    name
}

#[rstest]
#[case::userspace("USERSPACE", 1, 41)]
#[case::vhost("VHOST", 4, 42)]
#[case::userspace_with_four_pairs("USERSPACE", 4, 43)]
#[case::vhost_with_one_pair("VHOST", 1, 44)]
fn packets_of_all_sizes_arrive_as_they_were_sent(
    #[case] backend: &str,
    #[case] queues: u64,
    #[case] number: u8,
) {
    let guests: &[&'static [Off]] = if long() { &ALL } else { &SOME };
    for (guest, nics) in guests.iter().enumerate() {
        let case = Case::new("nic-data");
        let mut wired = Wired::start(&case, number, backend, queues, nics);
        all_nics(&mut wired);
        if guest == 0 {
            switched_offloads(&mut wired);
            vlan_and_groups(&mut wired, backend);
            under_load(&mut wired);
        }
    }
}

/// All sizes, by each NIC, with both MTUs and both versions of IP.
fn all_nics(wired: &mut Wired<'_>) {
    let kinds = |times: u32| {
        let (few, many) = (20 * times, 300 * times);
        format!("tcp:{few} udp:{many} trains:{many} large:{few}")
    };
    // A million packets have a test of their own.
    let times = if long() { 3 } else { 1 };
    for mtu in [9000, 1500] {
        wired.set_mtu(mtu);
        for nic in 0..wired.nics.len() {
            let (four, six) = (format!("{nic}"), format!("{nic}:"));
            match mtu {
                _ if long() => {
                    wired.compare(&four, mtu, &kinds(times), MILLION);
                    wired.compare(&six, mtu, &kinds(times), MILLION);
                }
                9000 => wired.compare(&four, mtu, &kinds(times), PATIENCE),
                _ => wired.compare(&six, mtu, &kinds(times), PATIENCE),
            }
        }
    }
}

#[rstest]
#[case::userspace("USERSPACE", 1, 45)]
#[case::vhost("VHOST", 4, 46)]
fn a_million_packets_arrive_each_way_as_they_were_sent(
    #[case] backend: &str,
    #[case] queues: u64,
    #[case] number: u8,
) {
    let case = Case::new("nic-million");
    let mut wired = Wired::start(&case, number, backend, queues, &[&[]]);
    wired.set_mtu(1500);
    wired.compare("0", 1500, "udp:1000000", MILLION);
}

/// The guest's kernel performs the offloads of the NIC in software.
fn switched_offloads(wired: &mut Wired<'_>) {
    for features in SWITCHED {
        wired.switch(0, features);
        wired.compare("0", 1500, "tcp:20 trains:300", PATIENCE);
        if long() {
            wired.compare("0:", 1500, "tcp:500 trains:5000 udp:5000", MILLION);
        }
    }
}

/// Packets with a VLAN tag, and packets to multicast groups of the guest or the node. The `vmm`
/// filters packets to groups that the guest has not joined.
fn vlan_and_groups(wired: &mut Wired<'_>, backend: &str) {
    wired.compare("0", 1500, "udp:1500 multicast:1500", PATIENCE);
    wired.compare("100", 1500, "tcp:20 udp:300 trains:300 multicast:300", PATIENCE);
    wired.set_mtu(9000);
    wired.compare("100", 9000, "tcp:20 udp:300", PATIENCE);
    if backend == "USERSPACE" {
        let filtered = || {
            let stats = wired.vm.stats();
            let count = stats["nics"][0]["receivedFiltered"].as_str();
            count.map_or(0, |count| count.parse::<u64>().expect("a number"))
        };
        let before = filtered();
        // Nobody answers.
        let bridge = &wired.bridge;
        let ping = format!("ping -c 5 -i 0.2 -W 1 -I {bridge} 239.9.0.99");
        assert!(wired.case.node().try_sh(&ping).is_err());
        assert!(filtered() >= before + 5, "{} and {before}", filtered());
    }
}

/// Operations on a VM while packets are in transit. A pause loses no packets: the rings and the tap
/// have room for them.
///
/// During a snapshot of the running guest, the guest is slow for seconds. With four pairs, the tap
/// and the guest's network stack drop some of the waiting packets.
///
/// Packets in transit are lost once when the link is down, or when the VM has another process and
/// another tap. The sender waits for an acknowledgement after two windows.
fn under_load(wired: &mut Wired<'_>) {
    let mut load = wired.load();
    for _ in 0..2 {
        wired.ctl("pause");
        wired.ctl("resume");
        load.goes_on();
    }
    load.ends(0);

    let mut load = wired.load();
    snapshot(wired, "live");
    load.goes_on();
    load.ends(UNDER_WAY * wired.queues);

    let mut load = wired.load();
    for _ in 0..FLAPS {
        for link in ["down", "up"] {
            wired.vm.ctl_with("nic update", &format!("eth0 link={link}"));
        }
        load.goes_on();
    }
    load.ends(FLAPS * UNDER_WAY * wired.queues);

    let mut load = wired.load();
    wired.ctl("pause");
    let still = snapshot(wired, "still");
    wired.ctl("stop --force");
    let restore = format!("vmmctl restore {still}");
    wired.case.node().sh(&restore);
    load.goes_on();
    load.ends(UNDER_WAY * wired.queues);
}
