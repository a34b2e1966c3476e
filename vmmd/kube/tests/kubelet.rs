//! The agent's own API, as the API server calls it.

use std::{
    io::{Read as _, Write as _},
    net::{TcpListener, TcpStream},
    path::Path,
    sync::Arc,
};

use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer,
    KeyPair,
};
use rustls::{
    ClientConfig, ClientConnection, DigitallySignedStruct, Error, SignatureScheme, StreamOwned,
    client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    crypto::{CryptoProvider, ring},
    pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, ServerName, UnixTime},
};

use crate::mock::{Cluster, Program, api::ALLOWED, wait};

/// A CA, in a file as well.
fn authority(file: &Path) -> Issuer<'static, KeyPair> {
    let key = KeyPair::generate().unwrap();
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    std::fs::write(file, params.self_signed(&key).unwrap().pem()).unwrap();
    Issuer::new(params, key)
}

/// A client's configuration, with a certificate for this user when one is given.
pub fn client(user: Option<&str>, authority: &Issuer<'static, KeyPair>) -> ClientConfig {
    let provider = Arc::new(ring::default_provider());
    let builder = ClientConfig::builder_with_provider(Arc::clone(&provider));
    let builder = builder.with_safe_default_protocol_versions().unwrap();
    let builder = builder
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(Anyone(provider)));
    let Some(user) = user else {
        return builder.with_no_client_auth();
    };
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, user);
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
    let key = KeyPair::generate().unwrap();
    let certificate = params.signed_by(&key, authority).unwrap();
    let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(key.serialize_der()));
    builder
        .with_client_auth_cert(vec![certificate.der().clone()], key)
        .unwrap()
}

/// As an API server without a CA for nodes.
#[derive(Debug)]
struct Anyone(Arc<CryptoProvider>);

impl ServerCertVerifier for Anyone {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}

/// The answer to a request, head and body; `None` when there is none.
fn ask(port: u16, config: ClientConfig, path: &str) -> Option<String> {
    let stream = TcpStream::connect(("127.0.0.1", port)).ok()?;
    let name = ServerName::try_from("node").unwrap();
    let connection = ClientConnection::new(Arc::new(config), name).unwrap();
    let mut tls = StreamOwned::new(connection, stream);
    let request = format!("GET {path} HTTP/1.1\r\nhost: node\r\nconnection: close\r\n\r\n");
    tls.write_all(request.as_bytes()).ok()?;
    let mut answer = Vec::new();
    let _ = tls.read_to_end(&mut answer);
    Some(String::from_utf8(answer).unwrap()).filter(|answer| !answer.is_empty())
}

pub struct Fixture {
    pub cluster: Cluster,
    /// The controller and the agent.
    programs: [Program; 2],
    _folder: tempfile::TempDir,
    pub authority: Issuer<'static, KeyPair>,
    pub port: u16,
}

/// A VM `web` that runs, on a node whose agent serves its API.
pub fn fixture() -> Fixture {
    let folder = tempfile::tempdir().unwrap();
    let ca = folder.path().join("ca.crt");
    let authority = authority(&ca);
    let port = TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .port();
    let cluster = Cluster::start(1);
    let port_text = port.to_string();
    let options = ["--client-ca", ca.to_str().unwrap(), "--port", &*port_text];
    let programs = [cluster.controller(), cluster.agent_with(0, &options)];
    cluster.create("web", "always_on");
    cluster.run("web", 1, "n0");
    wait("it listens", || TcpStream::connect(("127.0.0.1", port)).is_ok());
    Fixture {
        cluster,
        programs,
        _folder: folder,
        authority,
        port,
    }
}

#[test]
fn the_log_of_a_pod_is_the_serial_log_of_its_vm() {
    let fixture = fixture();
    let get = |path: &str| ask(fixture.port, client(Some(ALLOWED), &fixture.authority), path).unwrap();
    let all = get("/containerLogs/shop/web-1/vm");
    assert!(all.starts_with("HTTP/1.1 200"), "{all}");
    assert!(all.contains("one\n") && all.contains("two\n"), "{all}");
    let last = get("/containerLogs/shop/web-1/vm?tailLines=1");
    assert!(!last.contains("one") && last.contains("two\n"), "{last}");
    let followed = get("/containerLogs/shop/web-1/vm?follow=true&tailLines=1");
    assert!(!followed.contains("one"), "{followed}");
    assert!(
        followed.contains("two\n") && followed.contains("three\n"),
        "{followed}"
    );
    for (path, code) in [
        ("/containerLogs/shop/web-1/other", "404"),
        ("/containerLogs/shop/web-9/vm", "404"),
        ("/containerLogs/shop/web-1/vm?tailLines=x", "400"),
        ("/run/shop/web-1/vm", "404"),
    ] {
        let answer = get(path);
        assert!(
            answer.starts_with(&format!("HTTP/1.1 {code}")),
            "{path}: {answer}"
        );
    }
}

#[test]
fn nobody_gets_a_log_whom_the_api_server_does_not_allow_it() {
    let fixture = fixture();
    let path = "/containerLogs/shop/web-1/vm";
    let mallory = ask(fixture.port, client(Some("mallory"), &fixture.authority), path).unwrap();
    assert!(mallory.starts_with("HTTP/1.1 403"), "{mallory}");
    assert_eq!(ask(fixture.port, client(None, &fixture.authority), path), None);
    let folder = tempfile::tempdir().unwrap();
    let other = authority(&folder.path().join("ca.crt"));
    assert_eq!(ask(fixture.port, client(Some(ALLOWED), &other), path), None);
}

#[test]
fn connections_without_a_word_hold_few_descriptors_and_end() {
    let fixture = fixture();
    let agent = fixture.programs[1].pid().as_raw_nonzero();
    let descriptors = || std::fs::read_dir(format!("/proc/{agent}/fd")).unwrap().count();
    let silent: Vec<_> = (0..120)
        .map(|_| TcpStream::connect(("127.0.0.1", fixture.port)).unwrap())
        .collect();
    let config = client(Some(ALLOWED), &fixture.authority);
    let asked = std::thread::scope(|scope| {
        let asked = scope.spawn(|| ask(fixture.port, config, "/containerLogs/shop/web-1/vm"));
        wait("one with a certificate is served", || {
            assert!(descriptors() < 100);
            asked.is_finished()
        });
        asked.join().unwrap()
    });
    assert!(asked.unwrap().starts_with("HTTP/1.1 200"));
    assert!(descriptors() < 100);
    drop(silent);
}
