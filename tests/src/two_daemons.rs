//! Two daemons beside the node's own, which know each other: what migrations go between. Each has a network namespace of its own: both may
//! have a bridge of one name, and a tap of one VM.

pub mod traveller;

use anyhow::Result;

use crate::Case;
use crate::vm::{Console, VmSpec};

/// A daemon beside the node's own, with a root of its own.
pub struct Daemon<'case> {
    case: &'case Case,
    unit: String,
    folder: String,
    address: String,
    namespace: String,
}

/// Two of them, with certificates of one CA. `number`, 1 to 99, tells cases apart: it is in addresses and interfaces' names.
pub fn pair(case: &Case, number: u32) -> Result<[Daemon<'_>; 2]> {
    let tls = format!("{}/tls", case.folder()?);
    let [one, two] = [1, 2].map(|side| format!("10.78.{number}.{side}"));
    let [near, far] = ["near", "far"].map(|side| format!("{side}{number}"));
    case.node().sh(&format!(
        "/usr/lib/vmmd/vmmd init-certs --dir {tls} --server-name {one} --server-name {two} --client node=peer >/dev/null && \
         ip netns add {near} && ip netns add {far} && \
         ip link add peer netns {near} type veth peer name peer netns {far} && \
         for side in '{near} {one}' '{far} {two}'; do set -- $side; \
             ip -n $1 link set lo up && ip -n $1 addr add $2/30 dev peer && ip -n $1 link set peer up || exit; done"
    ))?;
    Ok([
        Daemon::start(case, &tls, 2 * number, &one, near)?,
        Daemon::start(case, &tls, 2 * number + 1, &two, far)?,
    ])
}

impl<'case> Daemon<'case> {
    fn start(case: &'case Case, tls: &str, number: u32, address: &str, namespace: String) -> Result<Self> {
        let folder = format!("{}/{number}", case.folder()?);
        let unit = format!("{}-{number}", case.name());
        let first = 1_800_000_000 + number * 1000;
        let address = format!("{address}:7443");
        let config = format!(
            "state_dir = '{folder}/state'\nrun_dir = '{folder}/run'\nlog_dir = '{folder}/log'\n\
             [vm_uids]\nfirst = {first}\ncount = 100\n\
             [tcp]\nlisten = '{address}'\ncertificate = '{tls}/server.crt'\nkey = '{tls}/server.key'\n\
             client_ca = '{tls}/ca.crt'\npeer_certificate = '{tls}/node.crt'\npeer_key = '{tls}/node.key'\n"
        );
        case.node().sh(&format!(
            "mkdir -p {folder}/state {folder}/run {folder}/log && cat >{folder}/vmmd.toml <<'CONFIG'\n{config}CONFIG\n\
             systemd-run -q --collect --unit={unit} -p Type=notify -p Delegate=yes -p KillMode=process -p Restart=on-failure -p RestartSec=250ms \
                 -p NetworkNamespacePath=/run/netns/{namespace} /usr/lib/vmmd/vmmd --config {folder}/vmmd.toml"
        ))?;
        Ok(Self {
            case,
            unit,
            folder,
            address,
            namespace,
        })
    }

    /// Runs `vmmctl` for this daemon; it must end with 0.
    pub fn ctl(&self, command: &str) -> Result<String> {
        self.case.node().sh(&self.command(command))
    }

    /// The same as a command of the node's shell.
    pub fn command(&self, command: &str) -> String {
        format!("vmmctl --socket {}/run/vmmd.sock {command}", self.folder)
    }

    /// Creates a VM and starts it.
    pub fn start_vm(&self, name: &str, spec: &VmSpec) -> Result<()> {
        let manifest = spec.manifest(name);
        self.ctl(&format!(
            "create -f - --start <<'MANIFEST'\n{manifest}\nMANIFEST\n"
        ))
        .map(drop)
    }

    /// Moves a VM to another daemon; `more` are options. Returns what was told on the way.
    pub fn migrate(&self, name: &str, to: &Daemon<'_>, more: &str) -> Result<String> {
        self.ctl(&format!("migrate {name} --to {} {more} 2>&1", to.address()))
    }

    /// Kills the daemon with SIGKILL, and waits until another one of it is ready.
    pub fn kill(&self) -> Result<()> {
        let unit = &self.unit;
        self.case.node().sh(&format!(
            "pid=$(systemctl show -P MainPID {unit}); kill -9 $pid; \
             while [ \"$(systemctl show -P MainPID {unit})\" = $pid ] || ! systemctl is-active -q {unit}; do sleep 0.1; done"
        ))?;
        Ok(())
    }

    /// The processes of all its VMs, by pid.
    pub fn processes(&self) -> Result<Vec<u32>> {
        let unit = &self.unit;
        let pids = self.case.node().sh(&format!(
            "cat /sys/fs/cgroup/$(systemctl show -P ControlGroup {unit})/vms/*/cgroup.procs 2>/dev/null; true"
        ))?;
        pids.split_whitespace().map(|pid| Ok(pid.parse()?)).collect()
    }

    /// What there is of VMs: processes, control groups, folders, taps. Empty when it has none.
    pub fn traces(&self) -> Result<String> {
        let Self {
            unit,
            folder,
            namespace,
            ..
        } = self;
        self.case.node().sh(&format!(
            "ls -d /sys/fs/cgroup/$(systemctl show -P ControlGroup {unit})/vms/*/ {folder}/run/vms/* {folder}/log/vms/* 2>/dev/null; \
             ip -n {namespace} -o link | grep -o ' vm[0-9a-f]*n[0-9]'; true"
        ))
    }

    /// Cuts it off from the other daemon, or joins them again.
    pub fn link(&self, up: bool) -> Result<()> {
        let state = if up { "up" } else { "down" };
        self.case
            .node()
            .sh(&format!("ip -n {} link set peer {state}", self.namespace))?;
        Ok(())
    }

    /// A VM's serial console.
    pub fn console(&self, vm: &str) -> Result<Console> {
        Console::open(self.case, &self.command(&format!("console {vm}")))
    }

    /// The names of its VMs.
    pub fn vms(&self) -> Result<String> {
        self.ctl("get vm -o name")
    }

    /// Where other daemons reach it.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Runs a command in its network namespace; it must end with 0.
    pub fn within(&self, command: &str) -> Result<String> {
        self.case
            .node()
            .sh(&format!("ip netns exec {} {command}", self.namespace))
    }

    /// Gives it a bridge of the same name as one of the node's, on the same network.
    pub fn join_bridge(&self, bridge: &str) -> Result<()> {
        let namespace = &self.namespace;
        self.case.node().sh(&format!(
            "ip link add b{namespace} type veth peer name uplink netns {namespace} && ip link set b{namespace} master {bridge} up && \
             ip -n {namespace} link add {bridge} type bridge && ip -n {namespace} link set uplink master {bridge} up && \
             ip -n {namespace} link set {bridge} up"
        ))?;
        Ok(())
    }
}

impl Drop for Daemon<'_> {
    fn drop(&mut self) {
        let Self { unit, namespace, .. } = &*self;
        let delete = self.command("delete --force --yes --all");
        // What a failed test leaves is reported by the test of leftovers.
        let _ = self.case.node().ssh(&format!(
            "{delete}; systemctl stop {unit}; ip netns del {namespace}"
        ));
    }
}
