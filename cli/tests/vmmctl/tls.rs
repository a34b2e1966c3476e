//! A vmmd over TCP: contexts, and messages for TLS failures.

use std::{
    fs,
    io::{Read as _, Write as _},
    net::TcpListener,
    path::{Path, PathBuf},
    sync::Arc,
    thread,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use rcgen::{
    BasicConstraints, CertificateParams, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, date_time_ymd,
};
use rustls::{
    RootCertStore, ServerConfig,
    crypto::ring,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject as _},
    server::WebPkiClientVerifier,
};
use tokio::net::UnixStream;
use vmmd_api::v1::VmPhase;

use crate::support::Daemon;

/// A CA whose certificates are files in a folder.
struct Pki {
    authority: Issuer<'static, KeyPair>,
    folder: PathBuf,
}

#[derive(Clone, Copy, PartialEq)]
enum Valid {
    Now,
    Past,
}

impl Pki {
    fn new(folder: &Path) -> Self {
        fs::create_dir_all(folder).unwrap();
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        // Two CAs of the same name would be told apart by their keys only.
        params.distinguished_name = rcgen::DistinguishedName::new();
        params
            .distinguished_name
            .push(rcgen::DnType::CommonName, folder.to_str().unwrap());
        let certificate = params.self_signed(&key).unwrap();
        fs::write(folder.join("ca.crt"), certificate.pem()).unwrap();
        Self {
            authority: Issuer::new(params, key),
            folder: folder.to_owned(),
        }
    }

    fn issue(&self, file: &str, names: &[&str], purpose: ExtendedKeyUsagePurpose, valid: Valid) {
        let names: Vec<_> = names.iter().map(|name| (*name).to_owned()).collect();
        let mut params = CertificateParams::new(names).unwrap();
        params.extended_key_usages = vec![purpose];
        if valid == Valid::Past {
            let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
            params.not_after = date_time_ymd(1970, 1, 1) + (now - Duration::from_secs(60));
        }
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.authority).unwrap();
        fs::write(self.folder.join(format!("{file}.crt")), certificate.pem()).unwrap();
        fs::write(self.folder.join(format!("{file}.key")), key.serialize_pem()).unwrap();
    }

    fn client(&self, valid: Valid) {
        self.issue("client", &[], ExtendedKeyUsagePurpose::ClientAuth, valid);
    }

    fn path(&self, file: &str) -> String {
        self.folder.join(file).to_str().unwrap().to_owned()
    }
}

/// Port of a TLS server that forwards data from trusted clients to the daemon's socket.
fn front(daemon: &Daemon, pki: &Pki) -> u16 {
    let mut roots = RootCertStore::empty();
    roots
        .add(CertificateDer::from_pem_file(pki.path("ca.crt")).unwrap())
        .unwrap();
    let provider = Arc::new(ring::default_provider());
    let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), Arc::clone(&provider));
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_client_cert_verifier(verifier.build().unwrap())
        .with_single_cert(
            vec![CertificateDer::from_pem_file(pki.path("server.crt")).unwrap()],
            PrivateKeyDer::from_pem_file(pki.path("server.key")).unwrap(),
        )
        .unwrap();
    config.alpn_protocols = vec![b"h2".to_vec()];
    let acceptor = tokio_rustls::TlsAcceptor::from(Arc::new(config));
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    listener.set_nonblocking(true).unwrap();
    let socket = daemon.socket.clone();
    daemon.spawn(async move {
        let listener = tokio::net::TcpListener::from_std(listener).unwrap();
        while let Ok((stream, _)) = listener.accept().await {
            let (acceptor, socket) = (acceptor.clone(), socket.clone());
            tokio::spawn(async move {
                let Ok(mut stream) = acceptor.accept(stream).await else {
                    return;
                };
                let mut inner = UnixStream::connect(socket).await.unwrap();
                let _ = tokio::io::copy_bidirectional(&mut stream, &mut inner).await;
            });
        }
    });
    port
}

/// A server that answers each connection with `answer` and closes it.
fn other_server(answer: &'static [u8]) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    thread::spawn(move || {
        for peer in listener.incoming() {
            let mut peer = peer.unwrap();
            let _ = peer.read(&mut [0; 4096]);
            let _ = peer.write_all(answer);
        }
    });
    port
}

/// `vmmctl` in a home of its own, and with nothing in the environment.
fn vmmctl(home: &Path, args: &[&str]) -> (Option<i32>, String, String) {
    let mut command = assert_cmd::Command::cargo_bin("vmmctl").unwrap();
    command.timeout(Duration::from_secs(60)).env("HOME", home);
    for name in ["VMMD_SOCKET", "VMMCTL_CONTEXT", "XDG_CONFIG_HOME"] {
        command.env_remove(name);
    }
    let output = command.current_dir(home).args(args).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.code(), text(output.stdout), text(output.stderr))
}

struct Case {
    folder: tempfile::TempDir,
    daemon: Daemon,
    pki: Pki,
}

impl Case {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let pki = Pki::new(&folder.path().join("tls"));
        pki.client(Valid::Now);
        pki.issue(
            "server",
            &["localhost"],
            ExtendedKeyUsagePurpose::ServerAuth,
            Valid::Now,
        );
        let daemon = Daemon::start();
        daemon.state.put("web", VmPhase::Running, &[]);
        Self { folder, daemon, pki }
    }

    fn get(&self, endpoint: &str, client: &Pki) -> (Option<i32>, String, String) {
        let (ca, cert, key) = (
            self.pki.path("ca.crt"),
            client.path("client.crt"),
            client.path("client.key"),
        );
        let options = [
            "--endpoint",
            endpoint,
            "--ca",
            &ca,
            "--cert",
            &cert,
            "--key",
            &key,
        ];
        vmmctl(
            self.folder.path(),
            &[&["get", "vm", "-o", "name"][..], &options].concat(),
        )
    }

    fn fails(&self, endpoint: &str, client: &Pki, code: i32, what: &str) {
        let (ended, _, said) = self.get(endpoint, client);
        assert_eq!(ended, Some(code), "{said}");
        assert!(said.starts_with("error: ") && said.contains(what), "{said}");
        assert_eq!(said.lines().count(), 1, "{said}");
    }
}

#[test]
fn contexts_name_daemons_and_one_of_them_is_used() {
    let case = Case::new();
    let port = front(&case.daemon, &case.pki);
    let endpoint = format!("https://localhost:{port}");
    assert_eq!(case.get(&endpoint, &case.pki).1, "vm/web\n");
    let home = case.folder.path();
    let ok = |args: &[&str]| {
        let (code, out, err) = vmmctl(home, args);
        assert_eq!(code, Some(0), "{args:?}: {err}");
        out
    };
    let set = ["config", "set-context", "far", "--endpoint", &endpoint];
    let files = [
        "--ca",
        "tls/ca.crt",
        "--cert",
        "tls/client.crt",
        "--key",
        "tls/client.key",
    ];
    assert_eq!(ok(&[&set[..], &files].concat()), "context/far set\n");
    let socket = case.daemon.socket.to_str().unwrap();
    ok(&["config", "set-context", "near", "--socket", socket]);
    assert_eq!(ok(&["get", "vm", "-o", "name", "--context", "far"]), "vm/web\n");
    assert_eq!(vmmctl(home, &["get", "vm", "--context", "nowhere"]).0, Some(3));
    ok(&["config", "use-context", "far"]);
    // Paths are kept whole: another folder is no other context.
    let listed = ok(&["config", "get-contexts"]);
    let far = listed.lines().find(|line| line.contains("far")).unwrap();
    assert!(
        far.starts_with('*') && far.contains(&endpoint) && far.contains(home.to_str().unwrap()),
        "{listed}"
    );
    assert_eq!(ok(&["get", "vm", "-o", "name"]), "vm/web\n");
    ok(&["config", "delete-context", "far"]);
    let listed = ok(&["config", "get-contexts"]);
    assert!(!listed.contains("far") && !listed.contains('*'), "{listed}");
    assert_eq!(vmmctl(home, &["config", "use-context", "far"]).0, Some(3));
    assert_eq!(
        vmmctl(home, &["config", "set-context", "x", "--endpoint", &endpoint]).0,
        Some(2)
    );
    assert_eq!(vmmctl(home, &["config", "set-context", "x"]).0, Some(2));
}

#[test]
fn each_failure_of_tls_is_said_in_its_own_words() {
    let case = Case::new();
    let port = front(&case.daemon, &case.pki);
    let endpoint = format!("https://localhost:{port}");
    // The client's certificate.
    let other = Pki::new(&case.folder.path().join("other"));
    other.client(Valid::Now);
    case.fails(&endpoint, &other, 8, "from a CA that vmmd does not know");
    case.pki.client(Valid::Past);
    case.fails(&endpoint, &case.pki, 8, "it has expired");
    case.pki
        .issue("client", &[], ExtendedKeyUsagePurpose::ServerAuth, Valid::Now);
    case.fails(&endpoint, &case.pki, 8, "not for clients");
    case.pki.client(Valid::Now);
    // The daemon's.
    case.fails(
        &format!("https://127.0.0.1:{port}"),
        &case.pki,
        12,
        "for other names than \"127.0.0.1\"",
    );
    other.issue(
        "server",
        &["localhost"],
        ExtendedKeyUsagePurpose::ServerAuth,
        Valid::Now,
    );
    let foreign = front(&case.daemon, &other);
    case.fails(
        &format!("https://localhost:{foreign}"),
        &case.pki,
        12,
        "from another CA",
    );
    case.pki.issue(
        "server",
        &["localhost"],
        ExtendedKeyUsagePurpose::ServerAuth,
        Valid::Past,
    );
    let expired = front(&case.daemon, &case.pki);
    case.fails(
        &format!("https://localhost:{expired}"),
        &case.pki,
        12,
        "has expired",
    );
    // No TLS at all.
    let http = other_server(b"HTTP/1.1 400 Bad Request\r\n\r\n");
    case.fails(
        &format!("https://localhost:{http}"),
        &case.pki,
        12,
        "does not speak TLS",
    );
    let mute = other_server(b"");
    case.fails(
        &format!("https://localhost:{mute}"),
        &case.pki,
        7,
        "closed the connection",
    );
    let free = TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .port();
    case.fails(
        &format!("https://localhost:{free}"),
        &case.pki,
        7,
        "cannot connect",
    );
    // Files and the command line.
    fs::write(case.pki.path("client.key"), "nothing").unwrap();
    case.fails(&endpoint, &case.pki, 6, "client.key has no private key");
    case.fails("http://localhost", &case.pki, 2, "must be https://");
}
