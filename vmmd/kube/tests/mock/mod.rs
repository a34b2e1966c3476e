//! A cluster for the programs under test: an API server, vmmds, and a scheduler that the test is.

pub mod api;
pub mod kubelet;
pub mod ledger;
pub mod migration;
mod node;
pub mod pods;
pub mod role;
pub mod storage;
pub mod store;
pub mod trap;
pub mod vmmd;

use std::{
    process::{Child, Command, ExitStatus},
    time::{Duration, Instant},
};

use rustix::process::{Signal, kill_process};
use serde_json::{Value, json};

use self::{api::Api, kubelet::Kubelet, ledger::Ledger, vmmd::Vmmd};

/// How long anything may take on a loaded machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// A program that is killed when the test ends.
pub struct Program(Child);

impl Program {
    /// As by `kill -9`.
    pub fn kill(mut self) {
        self.end();
    }

    /// For one that kills it at a moment of its own.
    pub fn pid(&self) -> rustix::process::Pid {
        rustix::process::Pid::from_child(&self.0)
    }

    pub fn has_ended(&mut self) -> bool {
        self.0.try_wait().unwrap().is_some()
    }

    /// Asks it to end, as Kubernetes does, and waits until it has.
    pub fn terminate(mut self) -> ExitStatus {
        kill_process(self.pid(), Signal::TERM).unwrap();
        wait("it ends", || self.has_ended());
        self.0.wait().unwrap()
    }

    fn end(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        self.end();
    }
}

pub struct Cluster {
    pub api: Api,
    pub vmmds: Vec<Vmmd>,
    pub ledger: Ledger,
}

impl Cluster {
    /// With that many nodes, `n0`, `n1`, ….
    pub fn start(nodes: usize) -> Self {
        let ledger = Ledger::default();
        let api = Api::start(&ledger.trap);
        for index in 0..nodes {
            let node = json!({"metadata": {"name": format!("n{index}")}, "spec": {}});
            api.store(|store| store.create(api::node(""), node)).unwrap();
        }
        Self {
            api,
            vmmds: (0..nodes)
                .map(|index| Vmmd::start(&format!("n{index}"), &ledger))
                .collect(),
            ledger,
        }
    }

    fn command(&self) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_vmmd-kube"));
        command
            .env_clear()
            .env("VMMD_KUBE_LOG", "warn,vmmd_kube=debug")
            .arg("--kubeconfig")
            .arg(&self.api.kubeconfig);
        command
    }

    /// The agent of a node.
    pub fn agent(&self, node: usize) -> Program {
        let vmmd = &self.vmmds[node];
        let mut command = self.command();
        command
            .args([
                "agent",
                "--pods-directory",
                "/run/vmmd/pod",
                "--max-vms",
                "3",
                "--reconnect-seconds",
                "1",
            ])
            .arg(format!("--node-name=n{node}"))
            .arg("--socket")
            .arg(&vmmd.socket)
            .arg("--device-plugin-directory")
            .arg(vmmd.plugins());
        Program(command.spawn().unwrap())
    }

    /// A kubelet with launchers.
    pub fn kubelet(&self, node: usize) -> Kubelet {
        Kubelet::start(&self.api.inner, &self.vmmds[node].state)
    }

    pub fn controller(&self) -> Program {
        self.controller_with(&["--no-leader-election"])
    }

    fn controller_with(&self, options: &[&str]) -> Program {
        let mut command = self.command();
        command.args(["controller", "--launcher-image", "vmmd-pod:test"]);
        Program(command.args(options).spawn().unwrap())
    }

    /// One of several.
    pub fn elected_controller(&self) -> Program {
        self.controller_with(&["--namespace", "vmmd-system"])
    }

    /// Makes a VirtualMachine of this run policy with an emptyDisk in the namespace `shop`.
    pub fn create(&self, name: &str, policy: &str) {
        self.create_with(name, policy, |_| {});
    }

    /// The same, with changes of its spec.
    pub fn create_with(&self, name: &str, policy: &str, change: impl FnOnce(&mut Value)) {
        let mut object = json!({
            "apiVersion": "vmmd.dev/v1alpha1",
            "kind": "VirtualMachine",
            "metadata": {"name": name},
            "spec": {"terminationGracePeriodSeconds": 30, "vm": {
                "cpu": {"cores": 1},
                "memory": {"sizeBytes": "128Mi"},
                "boot": {"fromDisk": {}},
                "disks": [{"name": "root"}],
                "runPolicy": policy,
            }, "volumes": [{"name": "root", "emptyDisk": {"size": "1Mi"}}]},
        });
        change(&mut object["spec"]);
        let key = api::machine("shop", "");
        self.api.store(|store| store.create(key, object)).unwrap();
    }

    pub fn machine(&self, name: &str) -> Value {
        self.api
            .store(|store| store.get(&api::machine("shop", name)))
            .unwrap_or_default()
    }

    pub fn pod(&self, name: &str) -> Value {
        self.api
            .store(|store| store.get(&api::pod("shop", name)))
            .unwrap_or_default()
    }

    pub fn pods(&self) -> Vec<Value> {
        self.api.store(|store| store.list(&api::pod("", "")))
    }

    /// Binds a pod to a node, as the scheduler does; not one that is being deleted.
    pub fn bind(&self, pod: &str, node: &str) -> bool {
        let key = api::pod("shop", pod);
        self.api.store(|store| {
            let Ok(mut object) = store.get(&key) else {
                return false;
            };
            if !object["metadata"]["deletionTimestamp"].is_null() {
                return false;
            }
            object["spec"]["nodeName"] = node.into();
            store.replace(&key, "", object).is_ok()
        })
    }

    /// Makes a pod like one that was there before, bound to this node if any.
    pub fn create_again(&self, mut pod: Value, node: Option<&str>) {
        pod["spec"]["nodeName"] = node.into();
        for name in [
            "uid",
            "resourceVersion",
            "deletionTimestamp",
            "deletionGracePeriodSeconds",
        ] {
            pod["metadata"].as_object_mut().unwrap().remove(name);
        }
        let key = api::pod("shop", "");
        self.api.store(|store| store.create(key, pod)).unwrap();
    }

    /// Makes a claim of the namespace `shop` with this access mode.
    pub fn create_claim(&self, name: &str, mode: &str) {
        let claim = json!({"metadata": {"name": name}, "spec": {"accessModes": [mode]}});
        let key = api::core("persistentvolumeclaims", "shop", "");
        self.api.store(|store| store.create(key, claim)).unwrap();
    }

    /// As `kubectl cordon` and `uncordon` do.
    pub fn cordon(&self, node: &str, unschedulable: bool) {
        let patch = json!({"spec": {"unschedulable": unschedulable}});
        let patched = self.api.store(|store| store.patch(&api::node(node), "", &patch));
        patched.unwrap();
    }

    /// As `kubectl annotate` does.
    pub fn annotate(&self, machine: &str, key: &str, value: &str) {
        assert!(self.annotate_if_there(machine, key, value), "no {machine}");
    }

    /// The same of one that may be gone; says whether it was there.
    pub fn annotate_if_there(&self, machine: &str, key: &str, value: &str) -> bool {
        let patch = json!({"metadata": {"annotations": {key: value}}});
        let key = api::machine("shop", machine);
        self.api.store(|store| store.patch(&key, "", &patch)).is_ok()
    }

    pub fn delete_pod(&self, name: &str, grace: Option<i64>) {
        let deletion = store::Deletion { grace, uid: None };
        let _ = self
            .api
            .store(|store| store.delete(&api::pod("shop", name), &deletion));
    }

    pub fn delete_machine(&self, name: &str) {
        let deletion = store::Deletion::default();
        let _ = self
            .api
            .store(|store| store.delete(&api::machine("shop", name), &deletion));
    }

    /// Waits for the pod, binds it, and waits until its VM runs.
    pub fn run(&self, machine: &str, epoch: i64, node: &str) {
        let pod = format!("{machine}-{epoch}");
        wait(&format!("pod {pod}"), || self.pod(&pod).is_object());
        assert!(self.bind(&pod, node));
        wait(&format!("{machine} runs"), || {
            let machine = self.machine(machine);
            machine["status"]["phase"] == "Running" && machine["status"]["node"] == node
        });
    }
}

/// Waits until that is true.
pub fn wait(what: &str, is: impl FnMut() -> bool) {
    assert!(wait_until(is), "in vain: {what}");
}

/// Waits until that is true; false when it does not become true in time.
pub fn wait_until(mut is: impl FnMut() -> bool) -> bool {
    let end = Instant::now() + PATIENCE;
    while !is() {
        if Instant::now() >= end {
            return false;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    true
}
