//! The control plane: etcd, API server, scheduler and controller manager.

use std::{
    env, fs,
    net::Ipv4Addr,
    path::{Path, PathBuf},
    process::{Command, Output},
    thread,
    time::Duration,
};

use rcgen::KeyPair;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::{api::Api, certificates::Authority, eventually, program::Program};

/// Controllers of the controller manager: those for vmmd-kube's objects, and those for manual work
/// with pods.
const CONTROLLERS: &str = "clusterrole-aggregation,deployment,disruption,endpoint,endpointslice,garbagecollector,namespace,nodelifecycle,\
    persistentvolume-binder,podgc,pv-protection,pvc-protection,replicaset,resourcequota,root-ca-cert-publisher,serviceaccount,\
    serviceaccount-token";

/// Where the manifests of vmmd-kube put it.
pub const NAMESPACE: &str = "vmmd-system";

/// Token of the administrator.
const ADMIN: &str = "token-of-the-administrator";

/// A running control plane. When it is dropped, its programs are killed and its folder is removed; in a test that fails, the ends of all
/// logs are printed before.
pub struct Cluster {
    folder: TempDir,
    programs: PathBuf,
    network: [u8; 3],
    /// The server, for a test that asks it often.
    pub api: Api,
    /// The store.
    pub etcd: Program,
    /// The API server.
    pub api_server: Program,
    /// The scheduler.
    pub scheduler: Program,
    /// The controller manager.
    pub controller_manager: Program,
}

/// The folder of the programs, `None` when they are not built.
pub fn programs() -> Option<PathBuf> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("build.sh");
    let output = Command::new(script).arg("--find").output().unwrap();
    let found = String::from_utf8(output.stdout).unwrap();
    output.status.success().then(|| found.trim().into())
}

impl Cluster {
    /// Starts all on addresses of a network of /24, and waits until the API server is ready.
    pub async fn start_in(network: [u8; 3]) -> Self {
        let programs = programs().expect("the control plane is not built: `make kubernetes` builds it");
        let folder = tempfile::Builder::new()
            .prefix("vmmd-kubernetes")
            .tempdir()
            .unwrap();
        for name in ["pki", "logs", "config", "home"] {
            fs::create_dir(folder.path().join(name)).unwrap();
        }
        let [a, b, c] = network;
        let server = Ipv4Addr::new(a, b, c, 1);
        let base = format!("https://{server}:6443");
        prepare(folder.path(), server);
        let api = Api::new(base, ADMIN, &folder.path().join("pki/ca.crt"));
        let program = |name: &str, arguments: Vec<String>| {
            Program::new(
                name,
                &programs.join("bin").join(name),
                arguments,
                &folder.path().join("logs"),
            )
        };
        let [etcd, api_server, scheduler, controller_manager] = [
            ("etcd", etcd(folder.path(), server)),
            ("kube-apiserver", api_server(folder.path(), server)),
            ("kube-scheduler", scheduler(folder.path(), server)),
            (
                "kube-controller-manager",
                controller_manager(folder.path(), server),
            ),
        ]
        .map(|(name, arguments)| program(name, arguments));
        let mut cluster = Self {
            folder,
            programs,
            network,
            api,
            etcd,
            api_server,
            scheduler,
            controller_manager,
        };
        for (name, token) in [
            ("admin", ADMIN),
            ("kube-scheduler", "token-of-kube-scheduler"),
            ("kube-controller-manager", "token-of-kube-controller-manager"),
        ] {
            cluster.kubeconfig(name, token);
        }
        cluster.etcd.launch();
        cluster.api_server.launch();
        cluster.ready().await;
        // It gives up when the API server is not there in ten seconds.
        cluster.controller_manager.launch();
        cluster.scheduler.launch();
        cluster
    }

    /// Waits until the API server is ready.
    pub async fn ready(&mut self) {
        let api = self.api.clone();
        let (etcd, server) = (&mut self.etcd, &mut self.api_server);
        eventually("the API server is ready", Duration::from_secs(90), async || {
            etcd.check().unwrap();
            server.check().unwrap();
            api.ready().await
        })
        .await;
    }

    /// `vmmd-kube` with these arguments. It does not run yet.
    pub fn program(&self, name: &str, arguments: impl IntoIterator<Item = String>) -> Program {
        let executable = vmmd_testing::program("vmmd-kube");
        let program = Program::new(name, &executable, arguments, &self.path("logs"));
        let level = env::var_os("VMMD_KUBE_LOG").unwrap_or_else(|| "info,kube=warn".into());
        program.env("VMMD_KUBE_LOG", level)
    }

    /// Checks that a node is ready and accepts pods.
    ///
    /// # Errors
    ///
    /// The node's actual state.
    pub async fn node_ready(&self, name: &str) -> Result<(), String> {
        let found = self.api.get(&format!("/api/v1/nodes/{name}")).await?;
        let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
        let conditions = list(&found["status"]["conditions"]);
        let taints = list(&found["spec"]["taints"]);
        let ready = conditions
            .iter()
            .any(|condition| condition["type"] == "Ready" && condition["status"] == "True");
        let other = taints.iter().any(|taint| {
            taint["key"]
                .as_str()
                .is_some_and(|key| key.starts_with("node.kubernetes.io/"))
        });
        if !ready || other {
            return Err(format!("{name}: {conditions:?} {taints:?}"));
        }
        Ok(())
    }

    /// Its programs, in the order in which they are started.
    fn parts(&mut self) -> [&mut Program; 4] {
        [
            &mut self.etcd,
            &mut self.api_server,
            &mut self.scheduler,
            &mut self.controller_manager,
        ]
    }

    /// The folder of the programs, with `bin`, `cni` and `xtables`.
    pub fn programs(&self) -> &Path {
        &self.programs
    }

    /// A file or folder of the test.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// The address of this cluster that ends with `last`; 1 is the control plane's.
    pub fn address(&self, last: u8) -> Ipv4Addr {
        let [a, b, c] = self.network;
        Ipv4Addr::new(a, b, c, last)
    }

    /// Writes a kubeconfig for the user with this token.
    pub fn kubeconfig(&self, name: &str, token: &str) -> PathBuf {
        // YAML is a superset of JSON.
        let config = json!({
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": name}}],
            "clusters": [{"name": "test", "cluster": {
                "server": format!("https://{}:6443", self.address(1)),
                "certificate-authority": self.path("pki/ca.crt"),
            }}],
            "users": [{"name": name, "user": {"token": token}}],
        });
        let path = self.path("config").join(format!("{name}.yaml"));
        fs::write(&path, config.to_string()).unwrap();
        path
    }

    /// A kubeconfig for a service account, once the controller manager knows it.
    pub async fn service_account(&self, file: &str, namespace: &str, name: &str) -> PathBuf {
        let path = format!("/api/v1/namespaces/{namespace}/serviceaccounts/{name}/token");
        let request = json!({
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {"audiences": ["https://kubernetes.default.svc"], "expirationSeconds": 86400},
        });
        let what = format!("a token for {name}");
        let token = eventually(&what, Duration::from_secs(30), async || {
            let granted = self.api.post(&path, &request).await?;
            granted["status"]["token"]
                .as_str()
                .map(str::to_owned)
                .ok_or_else(|| granted.to_string())
        })
        .await;
        self.kubeconfig(file, &token)
    }

    /// `kubectl` with these arguments, as the administrator. It does not run yet.
    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(self.programs.join("bin/kubectl"));
        command
            .args(arguments)
            .env("KUBECONFIG", self.path("config/admin.yaml"))
            .env("HOME", self.path("home"))
            .env_remove("HTTPS_PROXY")
            .env_remove("https_proxy");
        command
    }

    /// Runs `kubectl`.
    pub fn run(&self, arguments: &[&str]) -> Output {
        self.command(arguments).output().unwrap()
    }

    /// What `kubectl` prints; the test fails when it does.
    pub fn kubectl(&self, arguments: &[&str]) -> String {
        let output = self.run(arguments);
        let printed = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(
            output.status.success(),
            "kubectl {}: {}\n{printed}{}",
            arguments.join(" "),
            output.status,
            String::from_utf8_lossy(&output.stderr)
        );
        printed
    }

    /// `kubectl apply` of an object.
    pub fn apply(&self, object: &Value) -> String {
        let file = tempfile::NamedTempFile::new_in(self.path("home")).unwrap();
        fs::write(file.path(), object.to_string()).unwrap();
        self.kubectl(&["apply", "-f", file.path().to_str().unwrap()])
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if !thread::panicking() {
            return;
        }
        for arguments in [
            ["get", "vmmvm,pods,nodes", "-A", "-o=wide"],
            ["get", "events", "-A", "--sort-by=.lastTimestamp"],
        ] {
            let output = self
                .command(&arguments)
                .arg("--request-timeout=5s")
                .output()
                .unwrap();
            eprintln!(
                "--- kubectl {}\n{}",
                arguments.join(" "),
                String::from_utf8_lossy(&output.stdout)
            );
        }
        for program in self.parts() {
            eprintln!("--- {}\n{}", program.name, program.tail(15));
        }
    }
}

/// Writes the programs' input files.
fn prepare(folder: &Path, server: Ipv4Addr) {
    let pki = folder.join("pki");
    let authority = Authority::new();
    authority.write(&pki);
    authority.server(&pki, "apiserver", server.into());
    authority.client(&pki, "kubelet-client", "kube-apiserver", "system:masters");
    let accounts = KeyPair::generate().unwrap();
    fs::write(pki.join("sa.key"), accounts.serialize_pem()).unwrap();
    fs::write(pki.join("sa.pub"), accounts.public_key_pem()).unwrap();
    let tokens = format!(
        "{ADMIN},admin,1,system:masters\n\
         token-of-kube-scheduler,system:kube-scheduler,2\n\
         token-of-kube-controller-manager,system:kube-controller-manager,3\n"
    );
    fs::write(pki.join("tokens.csv"), tokens).unwrap();
}

fn etcd(folder: &Path, server: Ipv4Addr) -> Vec<String> {
    vec![
        format!("--data-dir={}", folder.join("etcd").display()),
        format!("--listen-client-urls=http://{server}:2379"),
        format!("--advertise-client-urls=http://{server}:2379"),
        format!("--listen-peer-urls=http://{server}:2380"),
        format!("--initial-advertise-peer-urls=http://{server}:2380"),
        format!("--initial-cluster=default=http://{server}:2380"),
    ]
}

fn api_server(folder: &Path, server: Ipv4Addr) -> Vec<String> {
    let pki = |name: &str| folder.join("pki").join(name).display().to_string();
    vec![
        format!("--etcd-servers=http://{server}:2379"),
        format!("--bind-address={server}"),
        format!("--advertise-address={server}"),
        "--endpoint-reconciler-type=none".into(),
        "--secure-port=6443".into(),
        "--insecure-port=0".into(),
        format!("--cert-dir={}", folder.join("pki").display()),
        format!("--tls-cert-file={}", pki("apiserver.crt")),
        format!("--tls-private-key-file={}", pki("apiserver.key")),
        format!("--client-ca-file={}", pki("ca.crt")),
        format!("--kubelet-client-certificate={}", pki("kubelet-client.crt")),
        format!("--kubelet-client-key={}", pki("kubelet-client.key")),
        "--kubelet-preferred-address-types=InternalIP".into(),
        format!("--token-auth-file={}", pki("tokens.csv")),
        "--authorization-mode=Node,RBAC".into(),
        // Loopback addresses where no node has a proxy of Services.
        match server.is_loopback() {
            true => "--service-cluster-ip-range=127.100.0.0/24".into(),
            false => "--service-cluster-ip-range=10.96.0.0/16".into(),
        },
        "--service-account-issuer=https://kubernetes.default.svc".into(),
        format!("--service-account-key-file={}", pki("sa.pub")),
        format!("--service-account-signing-key-file={}", pki("sa.key")),
        "--event-ttl=1h".into(),
    ]
}

fn scheduler(folder: &Path, server: Ipv4Addr) -> Vec<String> {
    vec![
        format!(
            "--kubeconfig={}",
            folder.join("config/kube-scheduler.yaml").display()
        ),
        format!("--bind-address={server}"),
        "--port=0".into(),
        "--leader-elect=false".into(),
    ]
}

fn controller_manager(folder: &Path, server: Ipv4Addr) -> Vec<String> {
    vec![
        format!(
            "--kubeconfig={}",
            folder.join("config/kube-controller-manager.yaml").display()
        ),
        format!("--bind-address={server}"),
        "--port=0".into(),
        "--leader-elect=false".into(),
        // Each controller has the rights of its own account.
        "--use-service-account-credentials=true".into(),
        format!("--controllers={CONTROLLERS}"),
        format!("--root-ca-file={}", folder.join("pki/ca.crt").display()),
        format!(
            "--service-account-private-key-file={}",
            folder.join("pki/sa.key").display()
        ),
    ]
}
