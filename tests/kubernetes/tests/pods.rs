//! VMs as pods of machines with a real kubelet.

use std::{
    fs,
    os::unix::fs::{FileExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use serde_json::{Value, json};
use vmmd_kubernetes_tests::{
    cluster::{Cluster, NAMESPACE},
    eventually,
    machine::{self, BUSYBOX, Machine},
    program::Program,
};
use vmmd_testing::{harness::Daemon, namespace::Namespace};

/// The launcher's image.
const LAUNCHER: &str = "vmmd.test/vmmd-pod:1";
/// Time for a change to be seen by all programs.
const PATIENCE: Duration = Duration::from_secs(90);
/// VirtualMachines of the namespace of the tests.
const VMS: &str = "/apis/vmmd.dev/v1alpha1/namespaces/default/virtualmachines";
/// Pods of the namespace of the tests.
const PODS: &str = "/api/v1/namespaces/default/pods";

/// A cluster with one machine, its vmmd with the mock `vmm`, and the programs of vmmd-kube.
struct World {
    controller: Program,
    agent: Program,
    daemon: Daemon,
    machine: Machine,
    cluster: Cluster,
    _network: Namespace,
}

impl World {
    async fn start() -> Self {
        let network = machine::enter_network();
        let cluster = Cluster::start_in(machine::NETWORK).await;
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        for file in ["namespace", "crd", "rbac-agent", "rbac-controller"] {
            let path = root.join(format!("vmmd/kube/manifests/{file}.yaml"));
            cluster.kubectl(&["apply", "-f", path.to_str().unwrap()]);
        }
        let machine = Machine::start(&cluster, 1).await;
        let image = cluster.path("launcher.tar");
        let built = Command::new(root.join("vmmd/package/pod-image"))
            .arg(&image)
            .arg(LAUNCHER)
            .env("VMMD_POD", launcher(&root))
            .status()
            .unwrap();
        assert!(built.success());
        machine.import(&image).await;
        let folder = tempfile::Builder::new()
            .prefix("vmmd")
            .tempdir_in("/tmp")
            .unwrap();
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o711)).unwrap();
        fs::write(folder.path().join("log.txt"), "").unwrap();
        let extra = "restart = { first_ms = 200 }\n";
        let daemon = Daemon::with(folder, extra, Some(machine.namespace.0.clone())).await;
        let account = cluster
            .service_account("agent", NAMESPACE, "vmmd-kube-agent")
            .await;
        let plugins = machine.kubelet_folder().join("device-plugins");
        let mut agent = cluster.program(
            "agent",
            [
                "agent".to_owned(),
                format!("--kubeconfig={}", account.display()),
                format!("--node-name={}", machine.name),
                format!("--socket={}", daemon.path("run/vmmd.sock").display()),
                format!("--pods-directory={}", daemon.path("run/pod").display()),
                format!("--device-plugin-directory={}", plugins.display()),
            ],
        );
        agent.launch();
        let account = cluster
            .service_account("controller", NAMESPACE, "vmmd-kube-controller")
            .await;
        let mut controller = cluster.program(
            "controller",
            [
                "controller".to_owned(),
                format!("--kubeconfig={}", account.display()),
                format!("--launcher-image={LAUNCHER}"),
            ],
        );
        controller.launch();
        Self {
            controller,
            agent,
            daemon,
            machine,
            cluster,
            _network: network,
        }
    }

    /// A claim of a volume with an image of this content.
    fn claim(&self, name: &str, content: &str) -> PathBuf {
        let folder = self.cluster.path(&format!("volume-{name}"));
        fs::create_dir(&folder).unwrap();
        fs::set_permissions(self.cluster.path(""), fs::Permissions::from_mode(0o711)).unwrap();
        let image = fs::File::create(folder.join("disk.img")).unwrap();
        image.set_len(1 << 20).unwrap();
        image.write_all_at(content.as_bytes(), 0).unwrap();
        let capacity = json!({"storage": "1Mi"});
        self.cluster.apply(&json!({
            "apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name},
            "spec": {
                "capacity": capacity, "accessModes": ["ReadWriteOnce"], "storageClassName": "",
                "hostPath": {"path": folder}, "claimRef": {"namespace": "default", "name": name},
            },
        }));
        self.cluster.apply(&json!({
            "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": name},
            "spec": {"accessModes": ["ReadWriteOnce"], "storageClassName": "", "resources": {"requests": capacity}},
        }));
        folder
    }

    fn vm(&self, name: &str) -> Value {
        json!({
            "apiVersion": "vmmd.dev/v1alpha1", "kind": "VirtualMachine", "metadata": {"name": name},
            "spec": {
                "podMetadata": {"labels": {"app": name}},
                "terminationGracePeriodSeconds": 10,
                "volumes": [{"name": "root", "persistentVolumeClaim": {"claimName": name}}],
                "vm": {
                    "cpu": {"cores": 1},
                    "memory": {"sizeBytes": "128Mi"},
                    "boot": {"fromDisk": {}},
                    "disks": [{"name": "root"}],
                    "runPolicy": "always_on",
                },
            },
        })
    }

    /// Waits for the state of a VirtualMachine.
    async fn until(&mut self, name: &str, what: &str, has: impl Fn(&Value) -> bool) -> Value {
        let (programs, api) = ([&mut self.controller, &mut self.agent], self.cluster.api.clone());
        let mut programs = programs;
        eventually(&format!("{name} {what}"), PATIENCE, async || {
            for program in &mut programs {
                program.check().unwrap();
            }
            let vm = api.get(&format!("{VMS}/{name}")).await?;
            if has(&vm) {
                Ok(vm)
            } else {
                Err(vm["status"].to_string())
            }
        })
        .await
    }

    async fn runs(&mut self, name: &str, epoch: i64) -> Value {
        self.until(name, &format!("runs as run {epoch}"), |vm| {
            vm["status"]["phase"] == "Running" && vm["status"]["epoch"] == epoch
        })
        .await
    }

    /// Waits until this is printed by the container of a pod.
    async fn logged(&self, pod: &str, text: &str) {
        eventually(&format!("{pod} prints {text}"), PATIENCE, async || {
            let output = self.cluster.run(&["logs", pod]);
            let printed = String::from_utf8_lossy(&output.stdout).into_owned();
            match printed.contains(text) {
                true => Ok(()),
                false => Err(printed + &String::from_utf8_lossy(&output.stderr)),
            }
        })
        .await;
    }

    async fn is_gone(&self, path: &str) {
        eventually(&format!("{path} is gone"), PATIENCE, async || {
            match self.cluster.api.get(path).await {
                Err(error) if error.contains("404") => Ok(()),
                found => Err(format!("{found:?}")),
            }
        })
        .await;
    }

    async fn end(&mut self, name: &str) {
        self.cluster.kubectl(&["delete", "--wait=false", "vmmvm", name]);
        self.is_gone(&format!("{VMS}/{name}")).await;
        let left = self.daemon.list().await;
        assert!(left.is_empty(), "{left:?}");
    }
}

impl Drop for World {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let programs = [
                &self.controller,
                &self.agent,
                &self.machine.kubelet,
                &self.machine.containerd,
            ];
            for program in programs {
                eprintln!("--- {}\n{}", program.name, program.tail(30));
            }
            let log = fs::read_to_string(self.daemon.path("log.txt")).unwrap_or_default();
            let lines: Vec<_> = log.lines().collect();
            eprintln!("--- vmmd\n{}", lines[lines.len().saturating_sub(40)..].join("\n"));
            for pod in ["describe pods", "get events -A"] {
                let output = self.cluster.run(&pod.split(' ').collect::<Vec<_>>());
                eprintln!("--- {pod}\n{}", String::from_utf8_lossy(&output.stdout));
            }
        }
    }
}

/// The launcher as a static program. `make kubernetes` builds it.
fn launcher(root: &Path) -> PathBuf {
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), Into::into);
    let program = target.join("x86_64-unknown-linux-gnu/debug/vmmd-pod");
    assert!(
        program.exists(),
        "{}: `make kubernetes` builds it",
        program.display()
    );
    program
}

#[tokio::test]
async fn a_vm_is_a_pod_of_a_kubelet() {
    let mut world = World::start().await;
    world.claim("web", "boots:root=/dev/vda1\n");
    world.cluster.apply(&world.vm("web"));
    let vm = world.runs("web", 1).await;
    let pod = world.cluster.api.get(&format!("{PODS}/web-1")).await.unwrap();
    assert_eq!(vm["status"]["addresses"][0], pod["status"]["podIP"], "{vm}");
    assert_eq!(pod["spec"]["nodeName"], "machine-1");
    world.logged("web-1", "booted").await;
    let first = world.daemon.list().await;
    let identity = |vms: &[vmmd_api::v1::Vm]| {
        let spec = vms[0].spec.clone().unwrap();
        (spec.smbios.unwrap().uuid, spec.nics[0].mac.clone())
    };

    // A vmmd that was killed finds its VM, and the launcher finds vmmd.
    world.daemon.kill_and_restart().await;
    world.runs("web", 1).await;
    world
        .cluster
        .kubectl(&["exec", "web-1", "--", "/vmmd-pod", "ready"]);

    // A deleted pod has another run, with the same identity.
    world.cluster.kubectl(&["delete", "pod", "web-1"]);
    world.runs("web", 2).await;
    world.logged("web-2", "booted").await;
    assert_eq!(identity(&first), identity(&world.daemon.list().await));

    // A launcher that is killed takes its VM along.
    world.cluster.kubectl(&[
        "delete",
        "pod",
        "web-2",
        "--grace-period=0",
        "--force",
        "--wait=false",
    ]);
    world.runs("web", 3).await;
    world.end("web").await;
    world.is_gone(&format!("{PODS}/web-3")).await;
}

#[tokio::test]
async fn a_pod_that_no_vm_names_gets_none() {
    let mut world = World::start().await;
    let folder = world.claim("linked", "boots:root=/dev/vda1\n");
    fs::rename(folder.join("disk.img"), folder.join("other.img")).unwrap();
    std::os::unix::fs::symlink("other.img", folder.join("disk.img")).unwrap();
    world.cluster.apply(&world.vm("linked"));
    world
        .until("linked", "is refused", |vm| {
            vm["status"].to_string().contains("PATH_NOT_ALLOWED")
                || vm["status"].to_string().contains("PathNotAllowed")
        })
        .await;
    // The right to create pods is enough to name the resource and the image.
    let env = |name: &str, value: &str| json!({"name": name, "value": value});
    let uid = json!({"name": "VMMD_POD_UID", "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}}});
    world.cluster.apply(&json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "stranger"},
        "spec": {
            "restartPolicy": "Never",
            "automountServiceAccountToken": false,
            "containers": [{
                "name": "vm", "image": LAUNCHER,
                "env": [
                    env("VMMD_POD_NAMESPACE", "default"), env("VMMD_POD_NAME", "stranger"),
                    env("VMMD_POD_VM", "linked"), env("VMMD_POD_RUN", "1"), uid,
                ],
                "resources": {"limits": {"vmmd.dev/vm": "1"}},
            }],
        },
    }));
    eventually("the stranger is refused", PATIENCE, async || {
        let pod = world.cluster.api.get(&format!("{PODS}/stranger")).await?;
        let state = &pod["status"]["containerStatuses"][0]["state"]["terminated"];
        match state["exitCode"].as_i64() {
            Some(1) => Ok(()),
            _ => Err(pod["status"].to_string()),
        }
    })
    .await;
    let vms = world.daemon.list().await;
    assert!(vms.len() <= 1, "{vms:?}");
    world.cluster.kubectl(&["delete", "pod", "stranger"]);
    world.end("linked").await;
}

#[tokio::test]
async fn an_ordinary_pod_runs_on_a_machine() {
    let _network = machine::enter_network();
    let cluster = Cluster::start_in(machine::NETWORK).await;
    let _machine = Machine::start(&cluster, 1).await;
    cluster.apply(&json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "ordinary"},
        "spec": {
            "automountServiceAccountToken": false,
            "containers": [{"name": "one", "image": BUSYBOX, "imagePullPolicy": "Never"}],
            "terminationGracePeriodSeconds": 0,
        },
    }));
    eventually("the pod runs", PATIENCE, async || {
        let pod = cluster.api.get(&format!("{PODS}/ordinary")).await?;
        match pod["status"]["phase"].as_str() {
            Some("Running") => Ok(()),
            _ => Err(pod["status"].to_string()),
        }
    })
    .await;
    cluster.kubectl(&["delete", "pod", "ordinary"]);
}
