//! A registry of OCI images: Debian's `docker-registry` on a port of 127.0.0.1, and a proxy between
//! registry and daemon.

use std::{
    fs,
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::{Shutdown, TcpListener, TcpStream},
    path::Path,
    process::{Child, Command, Stdio},
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
        mpsc,
    },
    thread,
};

use reqwest::{Client, Method, header::LOCATION};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use vmmd_spec::image::checksum_text;

pub const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
pub const INDEX: &str = "application/vnd.oci.image.index.v1+json";
pub const LAYER: &str = "application/vnd.oci.image.layer.v1.tar";
pub const CONFIG: &str = "application/vnd.oci.image.config.v1+json";

/// The user of a registry that asks for one, and the file that has the password's hash (bcrypt).
pub const USER: &str = "ci";
pub const PASSWORD: &str = "correct horse";
const HTPASSWD: &str = "ci:$2y$05$abcdefghijklmnopqrstuuHNbAKRhpaujgo33bRWs.NLUTJO3lOy2\n";

/// "sha256:…" of it.
pub fn digest(content: &[u8]) -> String {
    checksum_text(&Sha256::digest(content))
}

pub fn descriptor(kind: &str, content: &[u8]) -> Value {
    json!({"mediaType": kind, "digest": digest(content), "size": content.len()})
}

/// An archive of tar with the disk where a containerDisk has it.
pub fn layer(disk: &[u8]) -> Vec<u8> {
    let mut archive = tar::Builder::new(Vec::new());
    let mut header = tar::Header::new_ustar();
    header.set_size(disk.len() as u64);
    header.set_mode(0o440);
    archive.append_data(&mut header, "disk/disk.img", disk).unwrap();
    archive.into_inner().unwrap()
}

/// Content of an image: its manifest, and its blobs.
pub struct Image {
    pub manifest: Vec<u8>,
    pub blobs: Vec<Vec<u8>>,
}

impl Image {
    pub fn new(architecture: &str, layers: Vec<Vec<u8>>) -> Self {
        let config = json!({"os": "linux", "architecture": architecture})
            .to_string()
            .into_bytes();
        let manifest = json!({
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": descriptor(CONFIG, &config),
            "layers": layers.iter().map(|layer| descriptor(LAYER, layer)).collect::<Vec<_>>(),
        });
        let blobs = layers.into_iter().chain([config]).collect();
        Self {
            manifest: manifest.to_string().into_bytes(),
            blobs,
        }
    }
}

/// It ends when it is dropped.
pub struct Registry {
    pub address: String,
    child: Child,
    client: Client,
    password: bool,
    _folder: tempfile::TempDir,
}

impl Registry {
    /// Starts a registry; with `password`, access requires the password.
    pub fn start(password: bool) -> Self {
        // The package of tests that contains this file.
        let mut folders = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors();
        let program = folders
            .find_map(|folder| folder.join("target/registry/docker-registry").canonicalize().ok())
            .expect("target/registry/docker-registry is missing: .ci/setup installs it");
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let mut config = json!({
            "version": "0.1",
            "log": {"level": "info"},
            "storage": {"filesystem": {"rootdirectory": path("blobs")}},
            "http": {"addr": "127.0.0.1:0"},
        });
        if password {
            fs::write(path("htpasswd"), HTPASSWD).unwrap();
            config["auth"] = json!({"htpasswd": {"realm": "us", "path": path("htpasswd")}});
        }
        // JSON is YAML.
        fs::write(path("config.yml"), config.to_string()).unwrap();
        let mut command = Command::new(program);
        command
            .arg("serve")
            .arg(path("config.yml"))
            .env("OTEL_TRACES_EXPORTER", "none");
        let mut child = command
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let listening = |line: String| {
            let (_, rest) = line.split_once("listening on ")?;
            Some(rest.split('"').next()?.to_owned())
        };
        let address = lines.find_map(|line| listening(line.unwrap()));
        let address = address.expect("the registry ended before it listened");
        // It must not wait for a reader.
        thread::spawn(move || lines.for_each(drop));
        let _ = rustls::crypto::ring::default_provider().install_default();
        Self {
            address,
            child,
            client: Client::builder().tls_certs_only([]).build().unwrap(),
            password,
            _folder: folder,
        }
    }

    async fn send(&self, method: Method, url: &str, kind: &str, body: Vec<u8>) -> reqwest::Response {
        let mut request = self
            .client
            .request(method, url)
            .header("content-type", kind)
            .body(body);
        if self.password {
            request = request.basic_auth(USER, Some(PASSWORD));
        }
        let response = request.send().await.unwrap();
        assert!(response.status().is_success(), "{url}: {}", response.status());
        response
    }

    pub async fn put_manifest(&self, name: &str, reference: &str, kind: &str, manifest: &[u8]) {
        let url = format!("http://{}/v2/{name}/manifests/{reference}", self.address);
        self.send(Method::PUT, &url, kind, manifest.to_vec()).await;
    }

    /// Pushes an image with a tag.
    pub async fn push(&self, name: &str, tag: &str, image: &Image) {
        for blob in &image.blobs {
            let url = format!("http://{}/v2/{name}/blobs/uploads/", self.address);
            let begun = self.send(Method::POST, &url, "", Vec::new()).await;
            let place = begun.headers()[LOCATION].to_str().unwrap();
            let url = format!("{place}&digest={}", digest(blob));
            self.send(Method::PUT, &url, "application/octet-stream", blob.clone())
                .await;
        }
        self.put_manifest(name, tag, MANIFEST, &image.manifest).await;
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Proxy between the daemon and a registry. Sends `most` bytes of the first longer answer, then
/// waits for a signal.
pub struct Between {
    pub address: String,
    /// Data that the daemon has sent, in lower case.
    pub requests: Arc<Mutex<String>>,
    most: Arc<AtomicU64>,
    go: mpsc::Sender<()>,
}

impl Between {
    pub fn new(registry: &Registry, most: u64) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let (requests, to) = (Arc::<Mutex<String>>::default(), registry.address.clone());
        let most = Arc::new(AtomicU64::new(most));
        let (go, may_go) = mpsc::channel();
        let (seen, limit, may_go) = (
            Arc::clone(&requests),
            Arc::clone(&most),
            Arc::new(Mutex::new(may_go)),
        );
        thread::spawn(move || {
            for stream in listener.incoming() {
                let (Ok(daemon), Ok(registry)) = (stream, TcpStream::connect(&to)) else {
                    return;
                };
                let both = || (daemon.try_clone().unwrap(), registry.try_clone().unwrap());
                let ((mut from, mut to), seen) = (both(), Arc::clone(&seen));
                thread::spawn(move || {
                    let mut buffer = [0; 4096];
                    while let Ok(count @ 1..) = from.read(&mut buffer) {
                        let text = String::from_utf8_lossy(&buffer[..count]).to_lowercase();
                        seen.lock().unwrap().push_str(&text);
                        if to.write_all(&buffer[..count]).is_err() {
                            break;
                        }
                    }
                    let _ = to.shutdown(Shutdown::Both);
                });
                let ((mut to, mut from), limit, may_go) = (both(), Arc::clone(&limit), Arc::clone(&may_go));
                thread::spawn(move || {
                    let (mut buffer, mut sent) = (vec![0; 65536], 0);
                    while let Ok(count @ 1..) = from.read(&mut buffer) {
                        if sent + count as u64 > limit.load(Ordering::Relaxed) {
                            // The end of the test ends it too.
                            let _ = may_go.lock().unwrap().recv();
                            break;
                        }
                        sent += count as u64;
                        if to.write_all(&buffer[..count]).is_err() {
                            break;
                        }
                    }
                    let _ = to.shutdown(Shutdown::Both);
                });
            }
        });
        Self {
            address,
            requests,
            most,
            go,
        }
    }

    /// Lets everything through, and breaks off what waits.
    pub fn let_through(&self) {
        self.most.store(u64::MAX, Ordering::Relaxed);
        let _ = self.go.send(());
    }
}
