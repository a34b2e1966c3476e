//! A guest's network interface: several queues, large packets, link and limits at run time.

use serde_json::json;
use vmmd_tests::node::Kernel;
use vmmd_tests::vm::{Console, Vm, VmSpec};
use vmmd_tests::{Case, long};

/// How long a transfer, or a change of the link, may take in a slow node.
const PATIENCE: u64 = 120;

/// Size of a transfer, in MiB.
const MIB: u32 = 8;

/// A guest whose NICs are on a bridge on which the node is 10.9.NUMBER.1, and the guest 10.9.NUMBER.2 with its first NIC.
struct Wired<'case> {
    case: &'case Case,
    vm: Vm<'case>,
    console: Console,
    guest: String,
}

impl<'case> Wired<'case> {
    fn start(case: &'case Case, number: u8, spec: impl FnOnce(&str) -> VmSpec) -> Self {
        let bridge = case.bridge();
        case.node()
            .sh(&format!("ip addr add 10.9.{number}.1/24 dev {bridge}"));
        let (vm, mut console) = Vm::boot(case, "", &spec(&bridge));
        let guest = format!("10.9.{number}.2");
        console.run(&format!("ip addr add {guest}/24 dev eth0 && ip link set eth0 up"));
        Self {
            case,
            vm,
            console,
            guest,
        }
    }

    /// Waits for an answer of `address`. One ping does not suffice: a neighbour entry of the node can end while its resolution still
    /// counts probes of the time before, and then all packets of this moment are lost.
    fn reach(&self, address: &str) {
        let node = self.case.node();
        node.sh(&format!(
            "for _ in $(seq {PATIENCE}); do ping -c 1 -W 1 {address} && exit; done; exit 1"
        ));
    }

    fn ping(&self) {
        self.reach(&self.guest);
    }

    fn listen(&mut self, port: u16, then: &str) {
        self.console.run(&format!("({then}) & true"));
        self.console.run(&format!(
            "until busybox netstat -lnt | grep -q :{port}; do usleep 100000; done"
        ));
    }

    /// Checks that transferred data is unchanged in both directions, in streams that no side cuts
    /// off. `ports` are two free ports of the guest.
    fn compare(&mut self, [there, back]: [u16; 2]) {
        let (node, guest) = (self.case.node(), self.guest.clone());
        let folder = self.case.folder();
        node.sh(&format!("head -c {MIB}M /dev/urandom > {folder}/sent"));
        let sum = node.sh(&format!("sha256sum < {folder}/sent"));
        let sum = sum.split_whitespace().next().expect("a checksum").to_owned();
        self.listen(
            there,
            &format!("nc -l -p {there} < /dev/null > /received; echo received"),
        );
        node.sh(&format!("bash -c 'cat {folder}/sent > /dev/tcp/{guest}/{there}'"));
        self.console.until("received", PATIENCE);
        let received = self.console.run("sha256sum < /received");
        assert!(received.contains(&sum), "{sum} was sent: {received}");
        self.listen(back, &format!("nc -l -p {back} < /received; echo sent"));
        let returned = node.sh(&format!(
            "bash -c 'timeout 120 cat < /dev/tcp/{guest}/{back} | sha256sum'"
        ));
        assert!(returned.contains(&sum));
    }

    fn set_link(&mut self, link: &str) {
        self.vm.ctl_with("nic update", &format!("eth0 link={link}"));
        let carrier = u8::from(link == "up");
        self.console.run(&format!(
            "until [ $(cat /sys/class/net/eth0/carrier) = {carrier} ]; do usleep 100000; done"
        ));
    }

    /// The link goes down and up, and packets follow.
    fn flap(&mut self) {
        let guest = self.guest.clone();
        self.set_link("down");
        assert!(
            self.case
                .node()
                .try_sh(&format!("ping -c 1 -W 2 {guest}"))
                .is_err()
        );
        self.set_link("up");
        self.ping();
    }
}

impl Wired<'_> {
    /// The second NIC is in its VLAN alone, and frames with another MAC address do not pass.
    fn is_in_its_vlan_with_its_mac(&mut self) {
        let node = self.case.node();
        let bridge = self.vm.field("/status/nics/1/bridge");
        let tap = self.vm.field("/status/nics/1/tap");
        let shown = node.sh(&format!("bridge -c=never vlan show dev {tap} | tail -n 1"));
        let words: Vec<_> = shown.split_whitespace().collect();
        assert!(words.ends_with(&["20", "PVID", "Egress", "Untagged"]), "{shown}");
        self.console
            .run("ip addr add 10.9.100.2/24 dev eth1 && ip link set eth1 up");
        let address = "10.9.100.2";
        self.reach(address);
        let mac = self.vm.field("/status/nics/1/mac");
        self.console.run("ip link set eth1 address 02:00:00:00:00:99");
        node.sh(&format!("ip neigh flush dev {bridge}.20"));
        assert!(node.try_sh(&format!("ping -c 1 -W 2 {address}")).is_err());
        self.console.run(&format!("ip link set eth1 address {mac}"));
        self.reach(address);
        node.sh(&format!("ip link del {bridge}.20"));
    }
}

#[test]
fn nic_with_two_queues_keeps_data_and_follows_its_link() {
    let case = Case::new("nic");
    // The second NIC is in VLAN 20, in which the node is 10.9.100.1.
    let mut wired = Wired::start(&case, 0, |bridge| {
        case.node().sh(&format!(
            "modprobe 8021q && ip link set {bridge} type bridge vlan_filtering 1 && bridge vlan add dev {bridge} vid 20 self && \
             ip link add link {bridge} name {bridge}.20 type vlan id 20 && ip addr add 10.9.100.1/24 dev {bridge}.20 && ip link set {bridge}.20 up"
        ));
        VmSpec::busybox(Kernel::Cloud612)
            .cores(2)
            .nic("eth0", bridge)
            .set("/nics/0/queues", json!(2))
            .nic("lan", bridge)
            .set("/nics/1/vlan", json!(20))
            .set("/nics/1/macFilter", json!(true))
    });
    let queues = wired.console.run("ls /sys/class/net/eth0/queues");
    assert!(queues.contains("rx-1") && queues.contains("tx-1"), "{queues}");
    wired.ping();
    wired.compare([7000, 7001]);
    wired.flap();
    wired.is_in_its_vlan_with_its_mac();
}

/// A macvtap that somebody made, on a bridge that has a port, and so a carrier: the node is on the same network by a macvlan. The kernel
/// carries its packets only in the long form.
#[test]
fn macvtap_keeps_data_with_both_backends_and_has_one_vm() {
    let backends: &[_] = if long() {
        &[(4, "USERSPACE"), (5, "VHOST")]
    } else {
        &[(4, "USERSPACE")]
    };
    for &(number, backend) in backends {
        let case = Case::new("nic-macvtap");
        let node = case.node();
        let mut spec = None;
        let mut wired = Wired::start(&case, number, |bridge| {
            let [tap, end, port] = ["mt", "mv", "md"].map(|kind| bridge.replace("br", kind));
            let kind = |name: &str, kind: &str| {
                format!("ip link add link {bridge} name {name} type {kind} mode bridge")
            };
            node.sh(&format!(
                "ip link add {port} type dummy && ip link set {port} master {bridge} up && ip addr flush dev {bridge} && {} && {} && \
                 ip addr add 10.9.{number}.1/24 dev {end} && ip link set {end} up",
                kind(&tap, "macvtap"),
                kind(&end, "macvlan")
            ));
            let nic = json!({"name": "eth0", "tap": tap, "queues": 2, "backend": backend});
            let made = VmSpec::busybox(Kernel::Cloud612).cores(2);
            spec.insert(made.set("/nics", json!([nic]))).clone()
        });
        wired.ping();
        wired.compare([7000, 7001]);
        wired.flap();
        let stats = wired.vm.stats();
        for direction in ["receivedBytes", "sentBytes"] {
            let bytes = stats.pointer(&format!("/nics/0/{direction}"));
            let bytes = bytes.and_then(|bytes| bytes.as_str()?.parse::<u64>().ok());
            assert!(bytes > Some(u64::from(MIB) << 20), "{direction}: {stats}");
        }
        // The second user of the tap receives an error, and can start when the first one has
        // stopped.
        let other = Vm::create(&case, "-other", &spec.expect("the spec"));
        let refused = other.try_ctl("start");
        let said = &refused.stderr;
        assert!(said.contains("is in use by another process"), "{said}");
        wired.vm.ctl("stop --force");
        other.ctl("start");
        let bridge = case.bridge_name();
        node.sh(&format!("ip link del {}", bridge.replace("br", "md")));
    }
}

/// vhost-net: the kernel carries the packets, and the `vmm` carries packets that vhost-net cannot.
/// The guest sees no difference. With one queue only in the long form.
#[test]
fn vhost_nic_keeps_data_with_one_and_four_queues() {
    let kinds: &[(u8, usize)] = if long() { &[(1, 1), (2, 4)] } else { &[(2, 4)] };
    for &(number, queues) in kinds {
        // A case has one bridge.
        let case = Case::new("nic-vhost");
        let node = case.node();
        let mut wired = Wired::start(&case, number, |bridge| {
            VmSpec::busybox(Kernel::Cloud612)
                .cores(if queues == 1 { 1 } else { 2 })
                .nic("eth0", bridge)
                .set("/nics/0/queues", json!(queues))
                .set("/nics/0/backend", json!("VHOST"))
        });
        wired.ping();
        let pid = wired.vm.pid();
        let threads = node.sh(&format!("cat /proc/{pid}/task/*/comm"));
        let kernels = threads.lines().filter(|name| name.starts_with("vhost-")).count();
        assert_eq!(kernels, queues, "{threads}");
        let spent = || {
            let cpu = node.sh(&format!(
                "cat /proc/{pid}/task/*/stat | sed -n 's/^[0-9]* (vnet-[^)]*) //p' | awk '{{sum += $12 + $13}} END {{print sum}}'"
            ));
            let ticks = cpu.trim().parse::<u64>();
            ticks.expect("ticks")
        };
        let before = spent();
        wired.compare([7000, 7001]);
        let stats = wired.vm.stats();
        let bytes = stats
            .pointer("/nics/0/receivedBytes")
            .and_then(|bytes| bytes.as_str());
        let bytes: u64 = bytes.and_then(|bytes| bytes.parse().ok()).expect("bytes");
        assert!(bytes > u64::from(MIB) << 20, "{stats}");
        // The `vmm` had nothing to do with it.
        let ticks = spent() - before;
        assert!(ticks < 10, "{ticks} ticks of the vmm's threads");
        // With a limit and without a cable the `vmm` serves, and the kernel again afterwards.
        wired.flap();
        wired.vm.ctl_with("nic update", "eth0 rx-pps=100000");
        wired.compare([7002, 7003]);
        wired.vm.ctl_with("nic update", "eth0 rx-pps=0");
        wired.vm.ctl("pause");
        wired.vm.ctl("resume");
        wired.compare([7004, 7005]);
    }
}

/// Tests that need the node to themselves.
mod exclusive {
    use super::*;

    /// As with disks: the spec says which NICs a VM has, and the machine follows while the guest runs.
    #[test]
    fn nics_are_plugged_also_when_the_daemon_is_killed() {
        let case = Case::new("nic-plug");
        let node = case.node();
        let mut wired = Wired::start(&case, 3, |bridge| {
            VmSpec::busybox(Kernel::Cloud612).nic("eth0", bridge)
        });
        let bridge = wired.vm.field("/status/nics/0/bridge");
        wired.ping();
        // Each NIC has an address of its own: the node remembers for some time which MAC address one had.
        for (backend, address) in [("userspace", "10.9.3.3"), ("vhost", "10.9.3.4")] {
            wired.vm.ctl_with(
                "nic attach",
                &format!("bridge={bridge},name=lan,backend={backend}"),
            );
            assert_eq!(
                wired.vm.field("/status/nics/1/phase"),
                "ATTACHMENT_PHASE_ATTACHED"
            );
            let mac = wired.vm.field("/status/nics/1/mac");
            wired.console.run(&format!(
                "until grep -q {mac} /sys/class/net/*/address; do usleep 100000; done"
            ));
            let name = wired.console.run(&format!(
                "basename $(dirname $(grep -l {mac} /sys/class/net/*/address))"
            ));
            let name = name
                .split_whitespace()
                .find(|word| word.starts_with("eth"))
                .expect("a name")
                .to_owned();
            wired.console.run(&format!(
                "ip addr add {address}/24 dev {name} && ip link set {name} up"
            ));
            node.sh(&format!("ping -c 3 -i 0.2 -W 10 {address}"));
            if backend == "vhost" {
                // The daemon is killed while it asks the guest; the next daemon continues.
                node.sh(&format!(
                    "(vmmctl nic detach {} lan >/dev/null 2>&1 &); sleep 0.05; systemctl kill -s KILL vmmd; \
                     until vmmctl node >/dev/null 2>&1; do sleep 0.2; done",
                    wired.vm.name()
                ));
                wired.console.attached_again();
                // When it was killed before it had heard of the detach, nothing has happened.
                let _asked_before = wired.vm.try_ctl_with("nic detach", "lan");
            } else {
                wired.vm.ctl_with("nic detach", "lan");
            }
            let begin = std::time::Instant::now();
            while !wired.vm.field("/status/nics/1/phase").is_empty() {
                assert!(begin.elapsed().as_secs() < PATIENCE, "{:?}", wired.vm.get());
                std::thread::sleep(std::time::Duration::from_millis(200));
            }
            wired.console.run(&format!(
                "while grep -q {mac} /sys/class/net/*/address; do usleep 100000; done"
            ));
            let taps = node.sh(&format!("ls /sys/class/net/{bridge}/brif | wc -l"));
            assert_eq!(taps.trim(), "1", "no tap is left");
        }
        wired.ping();
    }
}
