//! Addresses and names with the clients of real guests: Debian's packages in a guest's namespaces, and a program that sends the
//! messages of Windows.

use std::{fs, path::PathBuf};

use super::{
    packages::{BUS, Packages},
    *,
};

/// Writes the messages of DHCP that it sees into a file.
const LISTENER: &str = r#"
import socket, struct, sys
four = '? discover offer request decline ack nak release inform'.split()
six = '? solicit advertise request confirm renew rebind reply release decline reconfigure information'.split()
file = open(sys.argv[1], 'a', buffering=1)
s = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
s.bind(('eth0', 0))
print('ready', flush=True)
while True:
    try:
        frame = s.recv(2000)
    except OSError:
        # The interface is down.
        continue
    if frame[12:14] == b'\x08\x00' and frame[23] == 17 and set(struct.unpack('!HH', frame[34:38])) == {67, 68}:
        options = frame[42 + 240:]
        while options[0] != 53:
            options = options[1:] if options[0] == 0 else options[2 + options[1]:]
        print('4', four[options[2]], file=file)
    elif frame[12:14] == b'\x86\xdd' and frame[20] == 17 and set(struct.unpack('!HH', frame[54:58])) == {546, 547}:
        print('6', six[frame[62]], file=file)
"#;

/// A guest with Debian's packages in a network of both families.
struct Client {
    /// IPv4 and IPv6 address of its NIC.
    own: [String; 2],
    mac: String,
    guest: Guest,
    packages: Packages,
    /// File with the messages of DHCP.
    heard: PathBuf,
    _listener: Program,
    _names: NameServer,
    _daemon: Daemon,
    _node: Namespace,
}

impl Client {
    async fn new() -> Self {
        let node = Namespace::new();
        let mut daemon = Daemon::in_network(&node.0).await;
        let names = NameServer::beside(&node);
        let spec = v1::NetworkSpec {
            dns_servers: vec!["198.51.100.2".into()],
            ..dual_stack()
        };
        let made = daemon.make_network_as("lan", spec).await.unwrap();
        let own = daemon.start_in("web", nic("lan")).await.unwrap();
        let running = daemon.get("web").await.unwrap();
        let nic = status(&running).nics[0].clone();
        daemon.kill_vm("web").await.unwrap();
        let guest = Guest::on(&node, &nic.tap, &made.status.unwrap().bridge, &nic.mac);
        guest.namespace.ip("link set lo up");
        let heard = daemon.path("heard");
        let listener = Program::start(guest.namespace.python(LISTENER).arg(&heard));
        Self {
            own: own.try_into().unwrap(),
            mac: nic.mac,
            packages: Packages::of(&guest.namespace),
            guest,
            heard,
            _listener: listener,
            _names: names,
            _daemon: daemon,
            _node: node,
        }
    }

    fn run(&self, script: &str) -> String {
        self.packages.run(script)
    }

    /// The addresses of the guest, except link-local ones.
    fn addresses(&self) -> Vec<String> {
        let shown = self.guest.namespace.ip("-o addr show dev eth0 scope global");
        let of_line = |line: &str| {
            let address = line.split_whitespace().nth(3)?;
            Some(address.split_once('/')?.0.to_owned())
        };
        let is_usable = |line: &&str| !line.contains("tentative");
        shown.lines().filter(is_usable).filter_map(of_line).collect()
    }

    /// Waits for these messages of DHCP, and forgets all that came until then.
    async fn hears(&self, messages: &[&str]) {
        let heard = || fs::read_to_string(&self.heard).unwrap();
        let all = || {
            messages
                .iter()
                .all(|message| heard().lines().any(|line| line == *message))
        };
        let deadline = Instant::now() + PATIENCE;
        while !all() {
            assert!(Instant::now() < deadline, "{messages:?} of {}", heard());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        assert!(!heard().contains("nak"), "{}", heard());
        fs::write(&self.heard, "").unwrap();
    }

    /// Waits for the addresses of the NIC, and for routes to the outside.
    async fn is_connected(&self) {
        within(async || (self.addresses() == self.own).then_some(())).await;
        for family in ["-4", "-6"] {
            let has_route = || self.guest.namespace.ip(&format!("{family} route show default"));
            within(async || has_route().contains("default via").then_some(())).await;
        }
    }

    /// A guest whose client brings the interface up, and chooses its link-local address.
    async fn unconfigured() -> Self {
        let client = Self::new().await;
        client.guest.namespace.ip("link set eth0 down");
        client
    }

    /// Waits for the link-local address.
    async fn has_link_local(&self) {
        within(async || {
            let shown = self.guest.namespace.ip("-6 addr show dev eth0 scope link");
            (shown.contains("fe80::") && !shown.contains("tentative")).then_some(())
        })
        .await;
    }

    /// Resolves names by the C library: a short one of the network, and one of the outside whose answer is too long for UDP.
    async fn resolves(&self) {
        within(async || {
            let shown = self.packages.try_run("cat /etc/resolv.conf");
            String::from_utf8_lossy(&shown.stdout)
                .contains("lan.internal")
                .then_some(())
        })
        .await;
        for (database, own) in ["ahostsv4", "ahostsv6"].into_iter().zip(&self.own) {
            let found = self.run(&format!("getent {database} web"));
            assert!(found.starts_with(&format!("{own} ")), "{found}");
        }
        let long = self.run("dig +short long.example.com | sort -u | wc -l");
        assert_eq!(long.trim(), "500", "{long}");
        let found = self.run("getent ahostsv4 long.example.com");
        let first = |line: &str| line.starts_with("192.0.2.7 ");
        assert!(found.lines().any(first), "{found}");
    }
}

#[tokio::test]
async fn udhcpc_has_addresses_and_names() {
    let client = Client::new().await;
    // As in BusyBox's examples/udhcp/simple.script.
    client.run(
        r#"cat >/run/script <<'END'
#!/bin/sh
case $1 in
deconfig) ip -4 addr flush dev eth0;;
bound|renew)
    ip addr replace $ip/$mask dev eth0
    ip route replace default via $router
    echo search $domain >/run/resolv
    for server in $dns; do echo nameserver $server >>/run/resolv; done
    mv /run/resolv /etc/resolv.conf;;
esac
END
chmod +x /run/script
busybox udhcpc -i eth0 -s /run/script -p /run/udhcpc.pid >/run/log 2>&1"#,
    );
    client.hears(&["4 offer", "4 ack"]).await;
    client.is_connected().await;
    client.resolves().await;
    client.run("kill -USR1 $(cat /run/udhcpc.pid)");
    client.hears(&["4 request", "4 ack"]).await;
    client.run("kill -USR2 $(cat /run/udhcpc.pid)");
    client.hears(&["4 release"]).await;
}

#[tokio::test]
async fn dhcpcd_has_addresses_and_names() {
    let client = Client::unconfigured().await;
    client.run("dhcpcd --nodev >/run/log 2>&1");
    client.hears(&["4 ack", "6 reply"]).await;
    client.is_connected().await;
    client.resolves().await;
    client.run("dhcpcd --renew eth0 >>/run/log 2>&1");
    client.hears(&["4 request", "4 ack", "6 renew", "6 reply"]).await;
}

#[tokio::test]
async fn dhclient_has_addresses_and_names() {
    let client = Client::new().await;
    let both = |options: &str| {
        for family in [4, 6] {
            client.run(&format!(
                "dhclient -{family} {options} -pf /run/dhclient{family} -lf /var/lib/dhcp/leases{family} eth0 >>/run/log 2>&1"
            ));
        }
    };
    client.has_link_local().await;
    both("");
    client.hears(&["4 ack", "6 reply"]).await;
    client.is_connected().await;
    client.resolves().await;
    // A client that starts again with a lease asks for the same address.
    both("-x");
    both("");
    client
        .hears(&["4 request", "4 ack", "6 confirm", "6 reply"])
        .await;
    client.is_connected().await;
    both("-r");
    client.hears(&["4 release", "6 release", "6 reply"]).await;
}

#[tokio::test]
async fn systemd_networkd_has_addresses_and_names() {
    let client = Client::unconfigured().await;
    client.run(BUS);
    client.run(
        r#"mkdir -p /run/systemd/network /run/systemd/netif /run/systemd/resolve
chown systemd-network: /run/systemd/netif
chown systemd-resolve: /run/systemd/resolve
printf '[Match]\nName=eth0\n[Network]\nDHCP=yes\nIPv6LinkLocalAddressGenerationMode=stable-privacy\n[DHCPv4]\nUseDomains=yes\n' >/run/systemd/network/eth0.network
ln -s /run/systemd/resolve/stub-resolv.conf /etc/resolv.conf
/lib/systemd/systemd-resolved >/run/resolved.log 2>&1 &
/lib/systemd/systemd-networkd >/run/networkd.log 2>&1 & echo $! >/run/networkd.pid"#,
    );
    client.hears(&["4 ack", "6 reply"]).await;
    client.is_connected().await;
    client.resolves().await;
    client.run("networkctl renew eth0");
    client.hears(&["4 request", "4 ack"]).await;
    client.run("kill $(cat /run/networkd.pid)");
    client.hears(&["4 release"]).await;
}

#[tokio::test]
async fn network_manager_has_addresses_and_names() {
    let client = Client::unconfigured().await;
    client.run(BUS);
    client.run(
        r#"mkdir -p /run/NetworkManager /var/lib/NetworkManager
printf '[main]\nplugins=keyfile\ndhcp=internal\nrc-manager=file\nauth-polkit=false\nno-auto-default=*\n' >/etc/NetworkManager/NetworkManager.conf
cat >/etc/NetworkManager/system-connections/lan.nmconnection <<'END'
[connection]
id=lan
type=ethernet
interface-name=eth0
[ipv4]
method=auto
[ipv6]
method=auto
addr-gen-mode=stable-privacy
ip6-privacy=2
END
chmod 600 /etc/NetworkManager/system-connections/lan.nmconnection
NetworkManager --no-daemon >/run/log 2>&1 &"#,
    );
    client.hears(&["4 ack", "6 reply"]).await;
    client.is_connected().await;
    client.resolves().await;
    client.run("nmcli connection up lan");
    client.hears(&["4 request", "4 ack", "6 reply"]).await;
    client.is_connected().await;
    client.run("nmcli connection down lan");
    within(async || client.addresses().is_empty().then_some(())).await;
}

/// Sends the messages of a client of Windows in both families, and prints the addresses of the answers.
const WINDOWS: &str = r#"
import socket, struct, subprocess, sys
mac, own4, own6 = bytes.fromhex(sys.argv[1].replace(':', '')), sys.argv[2], sys.argv[3]
ip = lambda *words: subprocess.run(['ip', *words], check=True)

def ask(s, message, to, fits):
    for _ in range(5):
        s.sendto(message, to)
        try:
            answer = s.recv(2000)
        except TimeoutError:
            continue
        assert fits(answer), answer
        return answer
    sys.exit('no answer')

# DHCP (MS-DHCPE): a client identifier of the MAC address, and the class "MSFT 5.0".
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
s.setsockopt(socket.SOL_SOCKET, 25, b'eth0')
s.bind(('', 68))
s.settimeout(2)
own = socket.inet_aton(own4)
option = lambda code, value: bytes([code, len(value)]) + value
identity = option(61, b'\x01' + mac) + option(12, b'WIN-WEB') + option(60, b'MSFT 5.0')
wanted = option(55, bytes([1, 3, 6, 15, 31, 33, 43, 44, 46, 47, 119, 121, 249, 252]))

def four(kind, options, ciaddr=bytes(4), to='255.255.255.255', answered=True):
    head = struct.pack('!BBBBIHH4s4s4s4s16s64s128s4s', 1, 1, 6, 0, 0x5eed0000 + kind, 0, 0, ciaddr, b'', b'', b'', mac, b'', b'',
                       bytes([99, 130, 83, 99]))
    message = head + bytes([53, 1, kind]) + options + b'\xff'
    if not answered:
        return s.sendto(message, (to, 67))
    answer = ask(s, message, (to, 67), lambda answer: answer[4:8] == message[4:8])
    options, rest = {}, answer[240:]
    while rest and rest[0] != 255:
        if rest[0] == 0:
            rest = rest[1:]
            continue
        options[rest[0]], rest = rest[2:2 + rest[1]], rest[2 + rest[1]:]
    # RFC 6842, 3.
    assert options.get(61) == b'\x01' + mac, options
    return options[53][0], socket.inet_ntoa(answer[16:20]), options

kind, address, offer = four(1, option(50, own) + identity + wanted)
print('offer', kind, address)
kind, address, options = four(3, option(50, own) + option(54, offer[54]) + option(81, bytes(3) + b'WIN-WEB') + identity + wanted)
print('ack', kind, address, options[15].rstrip(b'\0').decode(), socket.inet_ntoa(options[6]), struct.unpack('!I', options[51])[0])
ip('addr', 'add', own4 + '/24', 'dev', 'eth0')
server = socket.inet_ntoa(offer[54])
print('renew', *four(3, identity + wanted, ciaddr=own, to=server)[:2])
kind, address, options = four(8, identity + wanted, ciaddr=own, to=server)
print('inform', kind, address, 51 in options)
four(7, option(54, offer[54]) + identity, ciaddr=own, to=server, answered=False)

# DHCP for IPv6: a DUID-LLT (RFC 8415, 11.2), and the vendor class 311, "MSFT 5.0".
s = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
s.bind(('::', 546))
s.settimeout(2)
to = ('ff02::1:2', 547, 0, socket.if_nametoindex('eth0'))
option = lambda code, value: struct.pack('!HH', code, len(value)) + value
client = option(1, struct.pack('!HHI', 1, 1, 0x2c0ffee0) + mac)
rest = (option(8, bytes(2)) + option(39, b'\0\x07WIN-WEB') + option(16, struct.pack('!IH', 311, 8) + b'MSFT 5.0')
        + option(6, struct.pack('!HHHH', 17, 23, 24, 32)))
lease = struct.pack('!III', 0x06525400, 0, 0)

def six(kind, options):
    message = bytes([kind, 1, 2, kind]) + client + options + rest
    answer = ask(s, message, to, lambda answer: answer[1:4] == message[1:4])
    found, options = {}, answer[4:]
    while options:
        code, length = struct.unpack('!HH', options[:4])
        found[code], options = options[4:4 + length], options[4 + length:]
    address = socket.inet_ntop(socket.AF_INET6, found[3][16:32]) if len(found.get(3, b'')) >= 32 else '-'
    assert found[1] == client[4:], found
    return answer[0], address, found

kind, address, found = six(1, option(3, lease))
print('advertise', kind, address)
server = option(2, found[2])
lease += option(5, socket.inet_pton(socket.AF_INET6, address) + bytes(8))
kind, address, found = six(3, server + option(3, lease))
print('reply', kind, address, socket.inet_ntop(socket.AF_INET6, found[23]))
print('renew', *six(5, server + option(3, lease))[:2])
kind, _, found = six(11, b'')
print('information', kind, 23 in found, 24 in found)
kind, _, found = six(8, server + option(3, lease))
print('release', kind, found[13][:2].hex())
"#;

#[tokio::test]
async fn windows_like_client_has_addresses_and_names() {
    let client = Client::new().await;
    // A link-local address of Windows has no part of the MAC address (RFC 7217).
    client.guest.namespace.ip("link set eth0 down");
    let sysctl = "sysctl -qw net.ipv6.conf.eth0.addr_gen_mode=3";
    client.guest.namespace.run(sysctl);
    client.guest.namespace.ip("link set eth0 up");
    client.has_link_local().await;
    let [own4, own6] = &client.own;
    let mut windows = client.guest.namespace.python(WINDOWS);
    let output = windows.args([&client.mac, own4, own6]).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let expected = format!(
        "offer 2 {own4}\nack 5 {own4} lan.internal 10.80.0.1 3600\nrenew 5 {own4}\ninform 5 0.0.0.0 False\n\
         advertise 2 {own6}\nreply 7 {own6} fd00:80::1\nrenew 7 {own6}\ninformation 7 True True\nrelease 7 0000\n"
    );
    assert_eq!(String::from_utf8(output.stdout).unwrap(), expected);
}
