//! Stand-ins for a guest and for a name server outside.

use std::{
    collections::BTreeMap,
    io::{BufRead as _, BufReader},
    net::Ipv4Addr,
    process::{Child, ChildStdout, Command, Stdio},
};

use crate::namespace::Namespace;

impl Namespace {
    /// A program of Python's in it.
    pub fn python(&self, program: &str) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.0, "python3", "-c", program]);
        command
    }
}

/// A running program of a test, which ends with the test.
pub struct Program {
    pub process: Child,
    output: BufReader<ChildStdout>,
}

impl Program {
    /// Starts it, and waits until it says that it is ready.
    pub fn start(command: &mut Command) -> Self {
        let mut process = command.stdout(Stdio::piped()).spawn().unwrap();
        let output = BufReader::new(process.stdout.take().unwrap());
        let mut program = Self { process, output };
        assert_eq!(program.next(), "ready");
        program
    }

    /// The next line that it prints.
    pub fn next(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        line.trim_end().to_owned()
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// A namespace outside of `node`: 198.51.100.2 (RFC 5737) on a link to 198.51.100.1 of `node`.
pub fn world(node: &Namespace) -> Namespace {
    let namespace = Namespace::new();
    node.ip(&format!(
        "link add world type veth peer name eth0 netns {}",
        namespace.0
    ));
    node.ip("addr add 198.51.100.1/24 dev world");
    node.ip("link set world up");
    namespace.ip("addr add 198.51.100.2/24 dev eth0");
    namespace.ip("link set eth0 up");
    namespace
}

/// Answers each datagram to port 7100 of these addresses with the address of its sender.
pub fn mirror(namespace: &Namespace, addresses: &[&str]) -> Program {
    let program = r#"
import select, socket, sys
sockets = []
for address in sys.argv[1:]:
    s = socket.socket(socket.AF_INET6 if ':' in address else socket.AF_INET, socket.SOCK_DGRAM)
    s.bind((address, 7100))
    sockets.append(s)
print('ready', flush=True)
while True:
    for s in select.select(sockets, [], [])[0]:
        _, client = s.recvfrom(2000)
        s.sendto(client[0].encode(), client)
"#;
    Program::start(namespace.python(program).args(addresses))
}

/// The address that the mirror at `to` sees of a sender with the address `from`; "none" without an answer.
pub fn seen_by(namespace: &Namespace, from: &str, to: &str) -> String {
    let program = r#"
import socket, sys
source, to = sys.argv[1:]
s = socket.socket(socket.AF_INET6 if ':' in to else socket.AF_INET, socket.SOCK_DGRAM)
s.bind((source, 0))
s.settimeout(1)
for _ in range(5):
    try:
        s.sendto(b'who', (to, 7100))
        sys.exit(print(s.recv(2000).decode()))
    except TimeoutError:
        pass
print('none')
"#;
    let output = namespace.python(program).args([from, to]).output().unwrap();
    assert!(output.stderr.is_empty(), "{output:?}");
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

/// Options of a message of DHCP.
fn options(message: &[u8]) -> BTreeMap<u8, Vec<u8>> {
    let (mut rest, mut options) = (&message[240..], BTreeMap::new());
    while let [code @ 1..=254, length, more @ ..] = rest {
        let (value, more) = more.split_at((*length).into());
        options.insert(*code, value.to_vec());
        rest = more;
    }
    options
}

/// A client on a port of the bridge, in a namespace of its own: a guest as the network sees it.
pub struct Guest {
    pub namespace: Namespace,
}

impl Guest {
    /// In place of a VM whose tap had this name.
    pub fn on(node: &Namespace, tap: &str, bridge: &str, mac: &str) -> Self {
        let namespace = Namespace::new();
        node.ip(&format!(
            "link add {tap} type veth peer name eth0 netns {}",
            namespace.0
        ));
        node.ip(&format!("link set {tap} master {bridge} up"));
        namespace.ip(&format!("link set eth0 address {mac} up"));
        Self { namespace }
    }

    /// Asks for an address by DHCP; the answer's address and router.
    pub fn dhcp(&self, mac: &str) -> Option<(Ipv4Addr, Ipv4Addr)> {
        let answer = self.dhcp_answer(mac)?;
        let address = |bytes: &[u8]| Ipv4Addr::from(<[u8; 4]>::try_from(bytes).unwrap());
        let router = options(&answer)
            .get(&3)
            .map_or(Ipv4Addr::UNSPECIFIED, |router| address(router));
        Some((address(&answer[16..20]), router))
    }

    /// Asks for an address by DHCP; the answer's options.
    pub fn dhcp_options(&self, mac: &str) -> BTreeMap<u8, Vec<u8>> {
        options(&self.dhcp_answer(mac).unwrap())
    }

    /// Asks for an address by DHCP, by a program of Python's; the answer.
    fn dhcp_answer(&self, mac: &str) -> Option<Vec<u8>> {
        let program = r#"
import socket, struct, sys
mac = bytes.fromhex(sys.argv[1].replace(':', ''))
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
s.setsockopt(socket.SOL_SOCKET, 25, b'eth0')
s.bind(('', 68))
s.settimeout(2)
head = struct.pack('!BBBBIHH4s4s4s4s16s64s128s4s', 1, 1, 6, 0, 7, 0, 0, b'', b'', b'', b'', mac, b'', b'', bytes([99, 130, 83, 99]))
for _ in range(5):
    s.sendto(head + bytes([53, 1, 1, 255]), ('255.255.255.255', 67))
    try:
        answer = s.recv(2000)
    except TimeoutError:
        continue
    print(answer.hex())
    break
"#;
        let output = self.namespace.python(program).args([mac]).output().unwrap();
        let digits = output.stdout.trim_ascii().as_chunks::<2>().0;
        let byte = |digits: &[u8; 2]| u8::from_str_radix(str::from_utf8(digits).unwrap(), 16).unwrap();
        (!digits.is_empty()).then(|| digits.iter().map(byte).collect())
    }

    /// Asks a name server for the address of a name, of the family of the server's address: the response code (RFC 1035, 4.1.1), and
    /// the address.
    pub fn resolve(&self, server: &str, name: &str) -> String {
        let program = r#"
import socket, struct, sys
server, name = sys.argv[1:]
labels = b''.join(bytes([len(label)]) + label.encode() for label in name.split('.'))
family, kind, length = (socket.AF_INET6, 28, 16) if ':' in server else (socket.AF_INET, 1, 4)
query = struct.pack('!HHHHHH', 7, 0x100, 1, 0, 0, 0) + labels + struct.pack('!BHH', 0, kind, 1)
s = socket.socket(family, socket.SOCK_DGRAM)
s.settimeout(2)
for _ in range(5):
    s.sendto(query, (server, 53))
    try:
        answer = s.recv(2000)
    except TimeoutError:
        continue
    assert answer[:2] == query[:2]
    print(answer[3] & 15, socket.inet_ntop(family, answer[-length:]) if answer[7] else '-')
    break
"#;
        let output = self
            .namespace
            .python(program)
            .args([server, name])
            .output()
            .unwrap();
        String::from_utf8(output.stdout).unwrap().trim().to_owned()
    }
}

impl Guest {
    /// Asks a name server by TCP: the response code, and the length of the answer. "refused" where nothing listens on `port`.
    pub fn resolve_by_tcp(&self, server: &str, port: u16, name: &str) -> String {
        let program = r#"
import socket, struct, sys
server, port, name = sys.argv[1:]
labels = b''.join(bytes([len(label)]) + label.encode() for label in name.split('.'))
query = struct.pack('!HHHHHH', 7, 0x100, 1, 0, 0, 0) + labels + struct.pack('!BHH', 0, 1, 1)
try:
    s = socket.create_connection((server, int(port)), timeout=20)
except ConnectionRefusedError:
    sys.exit(print('refused'))
s.sendall(struct.pack('!H', len(query)) + query)
def take(length):
    data = b''
    while len(data) < length:
        more = s.recv(length - len(data))
        assert more, data
        data += more
    return data
answer = take(*struct.unpack('!H', take(2)))
assert answer[:2] == query[:2]
print(answer[3] & 15, len(answer))
"#;
        let arguments = [server, &port.to_string(), name];
        let output = self.namespace.python(program).args(arguments).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap().trim().to_owned()
    }
}

/// A name server in a namespace that stands for the world, which knows one address for all names.
pub struct NameServer {
    _program: Program,
    _namespace: Namespace,
}

impl NameServer {
    /// In the [`world`] of `node`.
    pub fn beside(node: &Namespace) -> Self {
        let namespace = world(node);
        let program = r#"
import socket, struct, threading
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.bind(('', 53))
# By TCP an answer has 500 addresses, and by UDP one. Only that for names below "long" is marked as truncated.
def serve():
    while True:
        c, _ = listener.accept()
        query = c.recv(2000)[2:]
        c.sendall(b''.join((lambda m: (struct.pack('!H', len(m)), m))(answer(query, 500))))
def answer(query, count):
    question = query[12:query.index(0, 12) + 5]
    truncated = 2 if count == 1 and question.startswith(b'\x04long') else 0
    # EDNS, for a client that has it (RFC 6891, 6.1.1).
    extended = bytes([0, 0, 41, 4, 0xd0, 0, 0, 0, 0, 0, 0]) if query[11] else b''
    head = query[:2] + bytes([0x81 | truncated, 0x80, 0, 1]) + struct.pack('!HHH', count, 0, query[11])
    records = (bytes([0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 60, 0, 4]) + struct.pack('!I', 0xc0000207 + i) for i in range(count))
    return head + question + b''.join(records) + extended
listener = socket.create_server(('', 53))
threading.Thread(target=serve, daemon=True).start()
print('ready', flush=True)
while True:
    query, client = s.recvfrom(2000)
    s.sendto(answer(query, 1), client)
"#;
        Self {
            _program: Program::start(&mut namespace.python(program)),
            _namespace: namespace,
        }
    }
}
