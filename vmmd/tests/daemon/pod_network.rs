//! The network of a VM in a pod, with a namespace for the cluster and one for the pod. A guest is a namespace whose interface is connected to
//! the descriptor of the tap.

use std::{
    fs::File,
    io::{self, ErrorKind, Read as _, Write as _},
    net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    os::fd::OwnedFd,
    path::Path,
    sync::Arc,
    thread::{self, JoinHandle},
    time::Duration,
};

use rustix::{
    event::{PollFd, PollFlags, poll},
    fs::OFlags,
    pipe::{PipeFlags, pipe_with},
    process::{Pid, Signal, kill_process},
    thread::{LinkNameSpaceType, move_into_link_name_space},
};
use uuid::Uuid;
use vmmd_host::{ledger::Ledger, sys};
use vmmd_network::{
    PodNetwork, Resolver, Tap,
    pod::{self, End, Node},
};

use crate::{
    managed::guest::{Guest, Program},
    namespace::Namespace,
    verbs::within,
};

const MAC: &str = "52:54:00:12:34:56";
/// The guest's addresses, and those of its gateway.
const GUEST: &str = "10.0.2.2";
const GATEWAY: &str = "10.0.2.1";
const GUEST6: &str = "fd10:0:2:0:5054:ff:fe12:3456";
const GATEWAY6: &str = "fd10:0:2::1";
/// Addresses of the cluster and of the pod.
const CLUSTER: &str = "10.244.0.1";
const POD: &str = "10.244.0.9";
const CLUSTER6: &str = "fd00:244::1";
const POD6: &str = "fd00:244::9";
/// How long a test waits for a connection that must not come.
const SHORT: Duration = Duration::from_secs(2);

/// Carries out work in a namespace. The sockets that it returns stay there.
fn inside<T: Send>(namespace: &Namespace, work: impl FnOnce() -> T + Send) -> T {
    let path = Path::new("/run/netns").join(&namespace.0);
    thread::scope(|scope| {
        let thread = scope.spawn(move || {
            let namespace = File::open(path).unwrap();
            move_into_link_name_space(
                std::os::fd::AsFd::as_fd(&namespace),
                Some(LinkNameSpaceType::Network),
            )
            .unwrap();
            work()
        });
        thread.join().unwrap()
    })
}

/// A cluster, and a pod that is connected to it.
struct Cluster {
    pod: Namespace,
    world: Namespace,
    run_dir: tempfile::TempDir,
    node: Node,
    vm: Uuid,
}

impl Cluster {
    fn new() -> Self {
        let (pod, world) = (Namespace::new(), Namespace::new());
        world.ip(&format!(
            "link add cluster mtu 1400 type veth peer name eth0 mtu 1400 netns {}",
            pod.0
        ));
        for (namespace, interface, addresses) in [
            (&world, "cluster", [CLUSTER, CLUSTER6]),
            (&pod, "eth0", [POD, POD6]),
        ] {
            namespace.ip("link set lo up");
            namespace.ip(&format!("addr add {}/24 dev {interface}", addresses[0]));
            namespace.ip(&format!("addr add {}/64 dev {interface} nodad", addresses[1]));
            namespace.ip(&format!("link set {interface} up"));
        }
        pod.ip(&format!("route add default via {CLUSTER}"));
        pod.ip(&format!("-6 route add default via {CLUSTER6}"));
        let run_dir = tempfile::tempdir().unwrap();
        let node = Node {
            run_dir: run_dir.path().to_owned(),
            netd: Arc::new(File::open(vmmd_testing::program("vmmd-netd")).unwrap()),
            ledger: Ledger::new(vmmd_host::ledger::UidRange::default()),
            cgroups: None,
            ends: Arc::default(),
        };
        Self {
            pod,
            world,
            run_dir,
            node,
            vm: Uuid::new_v4(),
        }
    }

    fn network(&self) -> PodNetwork {
        PodNetwork {
            namespace: File::open(Path::new("/run/netns").join(&self.pod.0))
                .unwrap()
                .into(),
            resolver: Resolver {
                servers: vec![CLUSTER.parse().unwrap()],
                search: vec!["default.svc.cluster.local".to_owned()],
            },
        }
    }

    fn tap(&self) -> String {
        vmmd_network::tap_name(self.vm, 2)
    }

    fn end(&self) -> End {
        End {
            vm: self.vm,
            name: "web".to_owned(),
            nic: "eth0".to_owned(),
            interface: None,
            tap: self.tap(),
            mac: MAC.parse().unwrap(),
            address: None,
            queues: 1,
            mtu: None,
        }
    }

    async fn open(&self) -> Tap {
        pod::open(self.node.clone(), self.network(), self.end())
            .await
            .unwrap()
    }

    /// A guest with its addresses, in place of a VM that has started.
    async fn guest(&self) -> Wired {
        let tap = self.open().await;
        let guest = Wired::new(tap);
        assert_eq!(
            guest.guest.dhcp(MAC),
            Some((GUEST.parse().unwrap(), GATEWAY.parse().unwrap()))
        );
        guest.guest.namespace.ip(&format!("addr add {GUEST}/24 dev eth0"));
        guest
            .guest
            .namespace
            .ip(&format!("route add default via {GATEWAY}"));
        guest.guest.has(GUEST6).await;
        guest
    }

    /// Number of the process that serves DHCP and DNS.
    fn helper(&self) -> i32 {
        let file = self
            .run_dir
            .path()
            .join("pods")
            .join(self.vm.to_string())
            .join("server.json");
        let server: serde_json::Value =
            serde_json::from_str(&std::fs::read_to_string(file).unwrap()).unwrap();
        server["pid"].as_i64().unwrap().try_into().unwrap()
    }

    fn close(&self) {
        pod::close(self.run_dir.path(), Some(&self.network()), self.vm).unwrap();
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        let _ = pod::close(self.run_dir.path(), None, self.vm);
    }
}

/// A guest, and the thread that carries its packets to the tap and back.
struct Wired {
    guest: Guest,
    stop: Option<OwnedFd>,
    wire: Option<JoinHandle<()>>,
}

impl Wired {
    fn new(tap: Tap) -> Self {
        let namespace = Namespace::new();
        let end = inside(&namespace, || {
            let tun = File::options()
                .read(true)
                .write(true)
                .open("/dev/net/tun")
                .unwrap();
            sys::attach_tap(&tun, "eth0", false).unwrap();
            rustix::fs::fcntl_setfl(&tun, OFlags::NONBLOCK).unwrap();
            OwnedFd::from(tun)
        });
        namespace.ip("link set lo up");
        let (stopped, stop) = pipe_with(PipeFlags::CLOEXEC).unwrap();
        let wire = thread::spawn(move || {
            let taps = [tap.queues.into_iter().next().unwrap(), end];
            carry(&taps, &stopped);
        });
        namespace.ip(&format!("link set eth0 address {MAC} mtu {} up", tap.mtu));
        Self {
            guest: Guest { namespace },
            stop: Some(stop),
            wire: Some(wire),
        }
    }

    /// Sends an IPv4 datagram to port 7 as a guest can that makes frames itself.
    fn forge(&self, mac: &str, from: &str, to: &str) {
        let program = r#"
import socket, struct, sys
mac, source, to = sys.argv[1:]
gateway = bytes.fromhex('fe') + bytes.fromhex('52:54:00:12:34:56'.replace(':', ''))[1:]
body = struct.pack('!HHHH', 7, 7, 14, 0) + b'forged'
head = struct.pack('!BBHHHBBH4s4s', 0x45, 0, 20 + len(body), 0, 0, 64, 17, 0, socket.inet_aton(source), socket.inet_aton(to))
total = sum(struct.unpack('!10H', head))
total = (total & 0xffff) + (total >> 16)
head = head[:10] + struct.pack('!H', ~(total + (total >> 16)) & 0xffff) + head[12:]
s = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
s.bind(('eth0', 0))
s.send(gateway + bytes.fromhex(mac.replace(':', '')) + struct.pack('!H', 0x800) + head + body)
"#;
        let output = self
            .guest
            .namespace
            .python(program)
            .args([mac, from, to])
            .output()
            .unwrap();
        assert!(output.status.success(), "{output:?}");
    }
}

impl Drop for Wired {
    fn drop(&mut self) {
        drop(self.stop.take());
        self.wire.take().unwrap().join().unwrap();
    }
}

/// Carries frames between two taps until the other end of the pipe is closed.
fn carry(taps: &[OwnedFd; 2], stopped: &OwnedFd) {
    let mut frame = vec![0; 1 << 17];
    loop {
        let mut watched = [
            PollFd::new(&taps[0], PollFlags::IN),
            PollFd::new(&taps[1], PollFlags::IN),
            PollFd::new(stopped, PollFlags::IN),
        ];
        poll(&mut watched, None).unwrap();
        if !watched[2].revents().is_empty() {
            return;
        }
        for (from, to) in [(0, 1), (1, 0)] {
            while let Ok(length) = rustix::io::read(&taps[from], &mut frame) {
                // The interface of the other end may be down.
                let _ = rustix::io::write(&taps[to], &frame[..length]);
            }
        }
    }
}

/// Answers each connection to port 80 of a namespace with `what` and the address that the connection comes from.
fn listen(namespace: &Namespace, what: &'static str) {
    for address in ["0.0.0.0", "::"] {
        let listener = inside(namespace, || match address {
            "::" => socket6(),
            address => TcpListener::bind((address, 80)).unwrap(),
        });
        thread::spawn(move || {
            while let Ok((mut stream, peer)) = listener.accept() {
                let _ = write!(stream, "{what} {}", peer.ip());
            }
        });
    }
}

/// A listener of IPv6 alone.
fn socket6() -> TcpListener {
    use rustix::net::{AddressFamily, SocketType, bind, listen, socket, sockopt::set_ipv6_v6only};
    let socket = socket(AddressFamily::INET6, SocketType::STREAM, None).unwrap();
    set_ipv6_v6only(&socket, true).unwrap();
    bind(&socket, &"[::]:80".parse::<SocketAddr>().unwrap()).unwrap();
    listen(&socket, 16).unwrap();
    socket.into()
}

/// The answer to a connection to port 80.
fn connect(namespace: &Namespace, to: &str) -> io::Result<String> {
    let to = SocketAddr::new(to.parse::<IpAddr>().unwrap(), 80);
    inside(namespace, || {
        let mut stream = TcpStream::connect_timeout(&to, SHORT)?;
        let mut text = String::new();
        stream.set_read_timeout(Some(SHORT))?;
        stream.read_to_string(&mut text)?;
        Ok(text)
    })
}

fn rules(namespace: &Namespace) -> String {
    namespace.run("nft list ruleset")
}

/// A name server in the cluster, which knows one address for all names.
fn name_server(namespace: &Namespace) -> Program {
    let program = r#"
import socket, struct, threading
def answer(query):
    head = query[:2] + bytes([0x81, 0x80, 0, 1]) + struct.pack('!HHH', 1, 0, 0)
    return head + query[12:] + bytes([0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 60, 0, 4, 192, 0, 2, 7])
def serve():
    while True:
        c, _ = listener.accept()
        reply = answer(c.recv(2000)[2:])
        c.sendall(struct.pack('!H', len(reply)) + reply)
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.bind(('', 53))
listener = socket.create_server(('', 53))
threading.Thread(target=serve, daemon=True).start()
print('ready', flush=True)
while True:
    query, client = s.recvfrom(2000)
    s.sendto(answer(query), client)
"#;
    Program::start(&mut namespace.python(program))
}

#[tokio::test]
async fn guest_in_a_pod_has_the_names_of_the_pod() {
    let cluster = Cluster::new();
    let _server = name_server(&cluster.world);
    let guest = cluster.guest().await;
    assert_eq!(guest.guest.resolve(GATEWAY, "kubernetes.default"), "0 192.0.2.7");
    assert_eq!(
        guest.guest.resolve_by_tcp(GATEWAY, 53, "kubernetes.default"),
        "0 52"
    );
    let table = cluster
        .run_dir
        .path()
        .join("pods")
        .join(cluster.vm.to_string())
        .join("table.json");
    let table = std::fs::read_to_string(table).unwrap();
    assert!(
        table.contains(r#""search":["default.svc.cluster.local"]"#),
        "{table}"
    );
    assert!(table.contains(r#""mtu":1400"#), "{table}");
}

#[tokio::test]
async fn connections_of_guest_and_pod_are_translated() {
    let cluster = Cluster::new();
    // Some distributions check the way back of each packet (ip-sysctl: rp_filter).
    inside(&cluster.pod, || {
        std::fs::write("/proc/sys/net/ipv4/conf/all/rp_filter", "1").unwrap();
    });
    let guest = cluster.guest().await;
    let of_guest = &guest.guest.namespace;
    listen(of_guest, "guest");
    listen(&cluster.world, "cluster");
    // A program of the pod, which no connection reaches.
    listen(&cluster.pod, "pod");
    for (from, to, expected) in [
        (of_guest, CLUSTER, format!("cluster {POD}")),
        (of_guest, CLUSTER6, format!("cluster {POD6}")),
        (&cluster.world, POD, format!("guest {CLUSTER}")),
        (&cluster.world, POD6, format!("guest {CLUSTER6}")),
        (&cluster.pod, "127.0.0.1", format!("guest {GATEWAY}")),
        (&cluster.pod, "::1", format!("guest {GATEWAY6}")),
        (&cluster.pod, POD, format!("guest {GATEWAY}")),
        (&cluster.pod, POD6, format!("guest {GATEWAY6}")),
        (of_guest, POD, format!("guest {GATEWAY}")),
        (of_guest, POD6, format!("guest {GATEWAY6}")),
        (&cluster.pod, CLUSTER, format!("cluster {POD}")),
    ] {
        assert_eq!(connect(from, to).unwrap(), expected, "{to}");
    }
}

#[tokio::test]
async fn guest_from_another_pod_keeps_its_private_address() {
    let cluster = Cluster::new();
    let end = |address: &str| End {
        address: Some(address.parse().unwrap()),
        ..cluster.end()
    };
    let open = async |address| pod::open(cluster.node.clone(), cluster.network(), end(address)).await;
    let guest = Wired::new(open("10.254.254.2").await.unwrap());
    let offered = guest.guest.dhcp(MAC).map(|(address, _)| address.to_string());
    assert_eq!(offered.as_deref(), Some("10.254.254.2"));
    let mac = MAC.parse().unwrap();
    let known = pod::guest_address(cluster.run_dir.path(), cluster.vm, mac);
    assert_eq!(known, offered.unwrap().parse().ok());
    drop(guest);
    cluster.pod.ip("route add 10.0.2.0/24 via 10.244.0.1");
    assert_eq!(open("10.0.2.2").await.unwrap_err().reason, "MIGRATION_NETWORK");
}

#[tokio::test]
async fn guest_reaches_no_program_of_its_pod() {
    let cluster = Cluster::new();
    let guest = cluster.guest().await;
    listen(&cluster.pod, "pod");
    for to in [GATEWAY, GATEWAY6] {
        assert!(connect(&guest.guest.namespace, to).is_err(), "{to}");
    }
    // The cluster reaches neither the guest's own address nor the gateway's through the pod.
    cluster.world.ip(&format!("route add 10.0.2.0/24 via {POD}"));
    listen(&guest.guest.namespace, "guest");
    assert!(connect(&cluster.world, GUEST).is_err());
}

#[tokio::test]
async fn forged_addresses_of_a_guest_in_a_pod_are_dropped() {
    let cluster = Cluster::new();
    let _server = name_server(&cluster.world);
    let guest = cluster.guest().await;
    let bind = |namespace, address| {
        let socket = inside(namespace, || UdpSocket::bind((address, 7)).unwrap());
        socket.set_nonblocking(true).unwrap();
        socket
    };
    let local = bind(&cluster.pod, "127.0.0.1");
    let outside = bind(&cluster.world, CLUSTER);
    let other = "52:54:00:00:00:99";
    for (mac, from, to) in [
        (MAC, GUEST, "127.0.0.1"),
        (MAC, "127.0.0.1", "127.0.0.1"),
        (MAC, "10.0.2.3", CLUSTER),
        (MAC, POD, CLUSTER),
        (MAC, GATEWAY, CLUSTER),
        (other, GUEST, CLUSTER),
    ] {
        guest.forge(mac, from, to);
    }
    // Frames of a guest arrive in their order.
    assert_eq!(guest.guest.resolve(GATEWAY, "example.com"), "0 192.0.2.7");
    for socket in [&local, &outside] {
        let received = socket.recv_from(&mut [0; 64]).map_err(|error| error.kind());
        assert_eq!(received, Err(ErrorKind::WouldBlock));
    }
    guest.forge(MAC, GUEST, CLUSTER);
    let (length, from) = within(async || outside.recv_from(&mut [0; 64]).ok()).await;
    assert_eq!((length, from.ip()), (6, POD.parse::<IpAddr>().unwrap()));
}

#[tokio::test]
async fn network_of_a_pod_is_replaced_and_removed() {
    let cluster = Cluster::new();
    let _server = name_server(&cluster.world);
    let before = rules(&cluster.pod);
    let guest = cluster.guest().await;
    let first = cluster.helper();
    let refused = pod::open(cluster.node.clone(), cluster.network(), cluster.end()).await;
    assert_eq!(refused.unwrap_err().reason, "TAP_IN_USE");
    // The VM ends with its daemon, and nothing is closed.
    drop(guest);
    let guest = cluster.guest().await;
    assert_ne!(cluster.helper(), first, "its sockets are of the first tap");
    assert_eq!(guest.guest.resolve(GATEWAY, "example.com"), "0 192.0.2.7");
    assert_eq!(rules(&cluster.pod).matches("table inet vmmd").count(), 1);
    assert_eq!(rules(&cluster.world), "");
    let links = std::process::Command::new("ip")
        .args(["-o", "link"])
        .output()
        .unwrap();
    assert!(!String::from_utf8(links.stdout).unwrap().contains(&cluster.tap()));
    let process = cluster.helper();
    drop(guest);
    cluster.close();
    assert_eq!(rules(&cluster.pod), before);
    assert!(!cluster.pod.ip("-o addr").contains(GATEWAY));
    within(async || (!Path::new(&format!("/proc/{process}")).exists()).then_some(())).await;
    assert!(
        !cluster
            .run_dir
            .path()
            .join("pods")
            .join(cluster.vm.to_string())
            .exists()
    );
    cluster.close();
}

#[tokio::test]
async fn helper_in_a_pod_that_ends_has_a_successor() {
    let cluster = Cluster::new();
    let guest = cluster.guest().await;
    let first = cluster.helper();
    kill_process(Pid::from_raw(first).unwrap(), Signal::KILL).unwrap();
    cluster.node.ends.due().await;
    pod::serve(cluster.node.clone(), cluster.network(), cluster.vm, cluster.tap())
        .await
        .unwrap();
    assert_ne!(cluster.helper(), first);
    assert_eq!(guest.guest.dhcp(MAC).unwrap().0.to_string(), GUEST);
}

#[tokio::test]
async fn pod_without_its_interface_or_address_is_refused() {
    let cluster = Cluster::new();
    let refused = async |interface: Option<&str>| {
        let end = End {
            interface: interface.map(str::to_owned),
            ..cluster.end()
        };
        let opened = pod::open(cluster.node.clone(), cluster.network(), end).await;
        opened.unwrap_err().reason
    };
    assert_eq!(refused(Some("net1")).await, "POD_INTERFACE_NOT_FOUND");
    cluster.pod.ip("addr flush dev eth0");
    cluster.pod.ip("-6 route flush default");
    assert_eq!(refused(Some("eth0")).await, "POD_HAS_NO_ADDRESS");
    assert_eq!(refused(None).await, "POD_INTERFACE_NOT_FOUND");
    assert_eq!(rules(&cluster.pod), "");
    let of_node = PodNetwork {
        namespace: File::open("/proc/self/ns/net").unwrap().into(),
        ..cluster.network()
    };
    let opened = pod::open(cluster.node.clone(), of_node, cluster.end()).await;
    assert_eq!(opened.unwrap_err().reason, "POD_HAS_NODE_NETWORK");
}

#[tokio::test]
async fn pod_without_ipv6_has_a_guest_without_it() {
    let cluster = Cluster::new();
    cluster.pod.ip(&format!("addr del {POD6}/64 dev eth0"));
    let end = End {
        queues: 2,
        interface: Some("eth0".to_owned()),
        mtu: Some(1300),
        ..cluster.end()
    };
    let tap = pod::open(cluster.node.clone(), cluster.network(), end)
        .await
        .unwrap();
    assert_eq!((tap.queues.len(), tap.mtu), (2, 1400));
    let addresses = cluster.pod.ip(&format!("-o addr show dev {}", cluster.tap()));
    assert!(
        addresses.contains("10.0.2.1/24") && !addresses.contains("fd10:"),
        "{addresses}"
    );
    assert_eq!(
        cluster
            .pod
            .run("cat /proc/sys/net/ipv6/conf/all/forwarding")
            .trim(),
        "0"
    );
}
