use std::fs;

use rustix::event::poll;

use super::*;
use crate::netd::tests::table;

fn instance() -> Instance {
    let documents = [
        ("meta-data", "instance-id: i-1\n"),
        ("user-data", "#cloud-config\n{}\n"),
    ];
    Instance {
        instance_id: "i-1".into(),
        hostname: "web".into(),
        public_keys: vec!["ssh-ed25519 AAAA a".into(), "ssh-rsa BBBB b".into()],
        documents: documents
            .map(|(name, text)| (name.to_owned(), Document(text.into())))
            .into(),
    }
}

fn get(path: &str) -> Option<String> {
    let requester = Requester {
        mac: "52:54:00:00:00:01",
        address: Ipv4Addr::new(10, 80, 0, 2),
        mask: Some(Ipv4Addr::new(255, 255, 255, 0)),
    };
    tree::get(&instance(), &requester, path).map(|bytes| String::from_utf8(bytes).unwrap())
}

#[test]
fn documents_of_nocloud_are_below_the_root() {
    for (path, content) in [
        ("/meta-data", Some("instance-id: i-1\n")),
        ("/user-data", Some("#cloud-config\n{}\n")),
        ("/vendor-data", Some("")),
        ("/network-config", None),
        ("/other", None),
        ("/meta-data/instance-id", None),
    ] {
        assert_eq!(get(path).as_deref(), content, "{path}");
    }
}

#[test]
fn each_version_of_ec2_has_the_tree_that_cloud_init_walks() {
    assert_eq!(get("/").unwrap(), "2009-04-04\n2021-03-23\nlatest");
    let nic = "meta-data/network/interfaces/macs/52:54:00:00:00:01";
    for version in ["2009-04-04", "2021-03-23", "latest"] {
        for (path, content) in [
            ("user-data", "#cloud-config\n{}\n"),
            ("meta-data/instance-id", "i-1"),
            ("meta-data/local-hostname", "web"),
            ("meta-data/local-ipv4", "10.80.0.2"),
            ("meta-data/mac", "52:54:00:00:00:01"),
            ("meta-data/public-keys/", "0=key-0\n1=key-1"),
            ("meta-data/public-keys/1/", "openssh-key"),
            ("meta-data/public-keys/1/openssh-key", "ssh-rsa BBBB b"),
            ("meta-data/placement/", "availability-zone"),
            ("meta-data/network/", "interfaces/"),
            (&format!("{nic}/subnet-ipv4-cidr-block"), "10.80.0.0/24"),
            ("dynamic/instance-identity/", "document"),
        ] {
            assert_eq!(
                get(&format!("/{version}/{path}")).as_deref(),
                Some(content),
                "{path}"
            );
        }
        let list = get(&format!("/{version}/meta-data/")).unwrap();
        assert_eq!(get(&format!("/{version}/meta-data")).unwrap(), list);
        let names: Vec<_> = list.lines().collect();
        assert!(
            names.contains(&"network/") && names.contains(&"instance-id"),
            "{list}"
        );
        let identity = get(&format!("/{version}/dynamic/instance-identity/document")).unwrap();
        let identity: serde_json::Value = serde_json::from_str(&identity).unwrap();
        assert_eq!(identity["instanceId"], "i-1");
    }
    for missing in [
        "/2010-01-01/meta-data/",
        "/latest/none",
        "/latest/meta-data/none/",
        "//",
        "/latest//",
    ] {
        assert_eq!(get(missing), None, "{missing}");
    }
}

fn request(head: &str) -> Outcome {
    http::parse(
        format!("{head}\r\n\r\n")
            .replace('\n', "\r\n")
            .replace("\r\r", "\r")
            .as_bytes(),
    )
}

#[test]
fn requests_of_clients_are_parsed() {
    let Outcome::Request(request) = request(
        "GET /latest/meta-data/ HTTP/1.1\nHost: 169.254.169.254\nX-aws-ec2-metadata-token: abc\nAccept: */*",
    ) else {
        panic!("refused")
    };
    assert_eq!(
        (request.method, request.path.as_str()),
        (Method::Get, "/latest/meta-data/")
    );
    assert_eq!(
        (request.token.as_deref(), request.ttl, request.is_forwarded),
        (Some("abc"), None, false)
    );
    let whole = b"PUT /latest/api/token HTTP/1.1\r\nHost: 169.254.169.254:80\r\nX-aws-ec2-metadata-token-ttl-seconds: 60\r\nContent-Length: 0\r\n\r\n";
    for length in 0..whole.len() {
        assert_eq!(http::parse(&whole[..length]), Outcome::Incomplete, "{length}");
    }
    let Outcome::Request(request) = http::parse(whole) else {
        panic!("refused")
    };
    assert_eq!((request.method, request.ttl), (Method::Put, Some(60)));
}

#[test]
fn requests_that_are_not_of_a_client_are_refused() {
    const HOST: &str = "Host: 169.254.169.254";
    let fields = |count: usize| "A: b\n".repeat(count);
    for (head, status) in [
        (format!("POST / HTTP/1.1\n{HOST}"), 405),
        (format!("GET http://169.254.169.254/ HTTP/1.1\n{HOST}"), 400),
        (format!("GET /{} HTTP/1.1\n{HOST}", "a".repeat(256)), 414),
        (format!("GET / HTTP/2.0\n{HOST}"), 400),
        ("GET / HTTP/1.1".to_owned(), 400),
        ("GET / HTTP/1.1\nHost: example.com".to_owned(), 400),
        (format!("GET / HTTP/1.1\n{HOST}\n{HOST}"), 400),
        (format!("GET / HTTP/1.1\n{HOST}\nContent-Length: 5"), 413),
        (format!("GET / HTTP/1.1\n{HOST}\nTransfer-Encoding: chunked"), 413),
        (format!("GET / HTTP/1.1\n{HOST}\n\nGET / HTTP/1.1\n{HOST}"), 400),
        (format!("GET / HTTP/1.1\n{}{HOST}", fields(32)), 431),
        (
            format!("GET / HTTP/1.1\nA: {}\n{HOST}", "a".repeat(http::MAX_HEAD)),
            431,
        ),
        (format!("GET / HTTP/1.1\nA : b\n{HOST}"), 400),
    ] {
        assert_eq!(request(&head), Outcome::Refused(status), "{head}");
    }
}

/// A service for the NIC 10.80.0.2 of the table, which is 127.0.0.1 here.
struct Served {
    service: Service,
    table: Table,
    folder: tempfile::TempDir,
}

impl Served {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("vm"), serde_json::to_vec(&instance()).unwrap()).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let mut table = table();
        let host = table.hosts.values_mut().next().unwrap();
        (host.address, host.metadata) = (Some(Ipv4Addr::LOCALHOST), Some("vm".into()));
        Self {
            service: Service::open(Some(listener), folder.path()).unwrap(),
            table,
            folder,
        }
    }

    fn connect(&self) -> TcpStream {
        let listener = self.service.listener.as_ref().unwrap();
        TcpStream::connect(listener.local_addr().unwrap()).unwrap()
    }

    /// Serves until all connections have ended.
    fn serve(&mut self) {
        loop {
            self.service.turn(&self.table, Instant::now());
            if self.service.clients.is_empty() {
                return;
            }
            let mut watched = Vec::new();
            self.service.watch(&mut watched);
            poll(&mut watched, None).unwrap();
        }
    }

    /// The answer to a request, after which the client sends no more.
    fn ask(&mut self, head: &str) -> String {
        let mut client = self.connect();
        client.write_all(head.replace('\n', "\r\n").as_bytes()).unwrap();
        client.write_all(b"\r\nHost: 169.254.169.254\r\n\r\n").unwrap();
        client.shutdown(std::net::Shutdown::Write).unwrap();
        self.serve();
        let mut answer = String::new();
        client.read_to_string(&mut answer).unwrap();
        answer
    }
}

fn body(answer: &str) -> &str {
    answer.split_once("\r\n\r\n").unwrap().1
}

#[test]
fn guest_reads_its_documents_with_and_without_a_token() {
    let mut served = Served::new();
    let plain = served.ask("GET /latest/meta-data/instance-id HTTP/1.1");
    assert!(plain.starts_with("HTTP/1.1 200 OK\r\n"), "{plain}");
    assert_eq!(body(&plain), "i-1");
    assert_eq!(body(&served.ask("HEAD /user-data HTTP/1.1")), "");
    let ttl = "X-aws-ec2-metadata-token-ttl-seconds";
    let made = served.ask(&format!("PUT /latest/api/token HTTP/1.1\n{ttl}: 60"));
    assert!(made.contains(&format!("{ttl}: 60\r\n")), "{made}");
    let with = |token: &str| format!("GET /user-data HTTP/1.1\nX-aws-ec2-metadata-token: {token}");
    assert_eq!(body(&served.ask(&with(body(&made)))), "#cloud-config\n{}\n");
    for (head, status) in [
        (with("wrong"), "401"),
        ("PUT /latest/api/token HTTP/1.1".to_owned(), "400"),
        (format!("PUT /latest/api/token HTTP/1.1\n{ttl}: 21601"), "400"),
        (format!("PUT /latest/user-data HTTP/1.1\n{ttl}: 60"), "405"),
        (
            format!("PUT /latest/api/token HTTP/1.1\n{ttl}: 60\nX-Forwarded-For: 10.0.0.1"),
            "403",
        ),
        (
            "GET /user-data HTTP/1.1\nX-Forwarded-For: 10.0.0.1".to_owned(),
            "403",
        ),
        ("GET /none HTTP/1.1".to_owned(), "404"),
    ] {
        let answer = served.ask(&head);
        assert_eq!(answer.get(9..12), Some(status), "{head}: {answer}");
    }
    // The VM has ended.
    fs::remove_file(served.folder.path().join("vm")).unwrap();
    assert!(served.ask("GET /user-data HTTP/1.1").starts_with("HTTP/1.1 404"));
}

#[test]
fn guest_without_the_service_has_no_connection() {
    let mut served = Served::new();
    for host in served.table.hosts.values_mut() {
        host.metadata = None;
    }
    let mut client = served.connect();
    served.serve();
    assert_eq!(client.read(&mut [0; 1]).unwrap(), 0);
}

#[test]
fn connections_of_a_guest_are_bounded_and_end_in_time() {
    let mut served = Served::new();
    let clients: Vec<_> = (0..20).map(|_| served.connect()).collect();
    let now = Instant::now();
    served.service.turn(&served.table, now);
    assert_eq!(served.service.clients.len(), MAX_CONNECTIONS_OF_GUEST);
    assert_eq!(served.service.deadline(), Some(now + PATIENCE));
    served.service.turn(&served.table, now + PATIENCE);
    assert_eq!(served.service.clients.len(), 0);
    drop(clients);
}

#[test]
fn largest_documents_are_read_and_sent_as_a_whole() {
    let mut served = Served::new();
    let mut large = instance();
    for name in ["meta-data", "user-data", "vendor-data", "network-config"] {
        large
            .documents
            .insert(name.to_owned(), Document(vec![b'x'; 192 << 10]));
    }
    large.public_keys = vec!["k".repeat(8 << 10); 64];
    let text = serde_json::to_vec(&large).unwrap();
    assert!(text.len() as u64 <= MAX_FILE, "{}", text.len());
    fs::write(served.folder.path().join("vm"), text).unwrap();
    let mut client = served.connect();
    client.write_all(b"GET /user-data HTTP/1.0\r\n\r\n").unwrap();
    let reader = std::thread::spawn(move || {
        let mut answer = Vec::new();
        client.read_to_end(&mut answer).unwrap();
        answer
    });
    served.serve();
    let answer = reader.join().unwrap();
    assert!(answer.ends_with(&vec![b'x'; 192 << 10]) && answer.len() > 192 << 10);
}
