//! Two daemons that know each other: what migrations go between. They are beside the node's own, and each has a network namespace of its own, so that
//! both may have a bridge of one name, and a tap of one VM; or they are those of two nodes.

pub mod load;
pub mod nodes;
pub mod traveller;

use std::collections::BTreeSet;

use anyhow::{Context as _, Result};

use crate::vm::{Console, VmSpec};
use crate::wait::Deadline;
use crate::{Case, Node, must};

/// Longest time that a migration takes, in seconds, in a slow node: an emulated processor encrypts some megabytes in a second, and much less in a
/// development build beside other work.
const MIGRATION: u64 = 1200;
/// How many lines of each log a report shows.
const LINES: usize = 60;
/// Where their API is.
const PORT: u16 = 7443;

/// A daemon that takes part in migrations.
pub struct Daemon<'case> {
    node: &'case Node,
    unit: String,
    /// Its sockets, and its VMs' logs.
    run: String,
    log: String,
    /// Where each of its VMs has a control group, as a word of the node's shell.
    cgroup: String,
    address: String,
    /// When it is not in the node's own.
    namespace: Option<String>,
    /// Traces that existed when the test took over the daemon.
    before: BTreeSet<String>,
}

/// Starts two daemons in the test's node, each with its own root, and with certificates of one CA.
/// `number`, 1 to 99, distinguishes cases: it is part of addresses and of interface names.
#[track_caller]
pub fn pair(case: &Case, number: u32) -> [Daemon<'_>; 2] {
    let tls = format!("{}/tls", case.folder());
    let [one, two] = [1, 2].map(|side| format!("10.78.{number}.{side}"));
    let [near, far] = ["near", "far"].map(|side| format!("{side}{number}"));
    init_certs(case.node(), &tls, [&one, &two]);
    case.node().sh(&format!(
        "ip netns add {near} && ip netns add {far} && \
         ip link add peer netns {near} type veth peer name peer netns {far} && \
         for side in '{near} {one}' '{far} {two}'; do set -- $side; \
             ip -n $1 link set lo up && ip -n $1 addr add $2/30 dev peer && ip -n $1 link set peer up || exit; done"
    ));
    [
        Daemon::start(case, &tls, 2 * number, &one, near),
        Daemon::start(case, &tls, 2 * number + 1, &two, far),
    ]
}

/// Creates server certificates for daemons at two addresses, and the client certificate that each
/// uses for the other.
#[track_caller]
fn init_certs(node: &Node, tls: &str, [one, two]: [&str; 2]) {
    node.sh(&format!(
        "/usr/lib/vmmd/vmmd init-certs --dir {tls} --server-name {one} --server-name {two} --client node=peer >/dev/null"
    ));
}

/// The part of a daemon's configuration for an API that other daemons reach.
pub(crate) fn tcp_config(tls: &str, address: &str) -> String {
    format!(
        "[tcp]\nlisten = '{address}'\ncertificate = '{tls}/server.crt'\nkey = '{tls}/server.key'\n\
         client_ca = '{tls}/ca.crt'\npeer_certificate = '{tls}/node.crt'\npeer_key = '{tls}/node.key'\n"
    )
}

impl<'case> Daemon<'case> {
    #[track_caller]
    fn start(case: &'case Case, tls: &str, number: u32, address: &str, namespace: String) -> Self {
        let node = case.node();
        let folder = format!("{}/{number}", case.folder());
        let unit = format!("{}-{number}", case.name());
        let first = 1_800_000_000 + number * 1000;
        let address = format!("{address}:{PORT}");
        let config = format!(
            "state_dir = '{folder}/state'\nrun_dir = '{folder}/run'\nlog_dir = '{folder}/log'\n\
             [vm_uids]\nfirst = {first}\ncount = 100\n{}",
            tcp_config(tls, &address)
        );
        node.sh(&format!(
            "mkdir -p {folder}/state {folder}/run {folder}/log && cat >{folder}/vmmd.toml <<'CONFIG'\n{config}CONFIG\n\
             systemd-run -q --collect --unit={unit} -p Type=notify -p Delegate=yes -p KillMode=process -p Restart=on-failure -p RestartSec=250ms \
                 -p NetworkNamespacePath=/run/netns/{namespace} /usr/lib/vmmd/vmmd --config {folder}/vmmd.toml"
        ));
        Self {
            node,
            run: format!("{folder}/run"),
            log: format!("{folder}/log"),
            cgroup: format!("/sys/fs/cgroup/$(systemctl show -P ControlGroup {unit})/vms"),
            unit,
            address,
            namespace: Some(namespace),
            before: BTreeSet::new(),
        }
    }

    /// The installed one of a node, which others reach at `address`.
    #[track_caller]
    fn installed(node: &'case Node, address: &str) -> Self {
        let mut daemon = Self {
            node,
            unit: "vmmd.service".into(),
            run: "/run/vmmd".into(),
            log: "/var/log/vmmd".into(),
            cgroup: "/sys/fs/cgroup/machine.slice/vmmd-vms.service".into(),
            address: format!("{address}:{PORT}"),
            namespace: None,
            before: BTreeSet::new(),
        };
        daemon.before = daemon.found();
        daemon
    }

    /// Runs `vmmctl` for this daemon; it must end with 0.
    #[track_caller]
    pub fn ctl(&self, command: &str) -> String {
        must(self.try_ctl(command))
    }

    /// Like [`Self::ctl`], for a caller that handles the failure.
    pub fn try_ctl(&self, command: &str) -> Result<String> {
        self.node.try_sh(&self.command(command))
    }

    /// The same as a command of the node's shell.
    pub fn command(&self, command: &str) -> String {
        format!("vmmctl --socket {} {command}", self.socket())
    }

    /// The socket of its API in the node.
    pub fn socket(&self) -> String {
        format!("{}/vmmd.sock", self.run)
    }

    /// The unit that it is.
    pub fn unit(&self) -> &str {
        &self.unit
    }

    /// Creates a VM and starts it.
    #[track_caller]
    pub fn start_vm(&self, name: &str, spec: &VmSpec) {
        let manifest = spec.manifest(name);
        self.ctl(&format!(
            "create -f - --start <<'MANIFEST'\n{manifest}\nMANIFEST\n"
        ));
    }

    /// Moves a VM to another daemon; `more` contains options. Returns the command's output, which
    /// includes the guest's downtime.
    #[track_caller]
    pub fn migrate(&self, name: &str, to: &Daemon<'_>, more: &str) -> String {
        let command = self.command(&format!("migrate {name} --to {} {more} 2>&1", to.address()));
        self.node.sh_within(&command, Deadline::seconds(MIGRATION))
    }

    /// Kills the daemon with SIGKILL, and waits until another one of it is ready.
    #[track_caller]
    pub fn kill(&self) {
        let killed = self.node.kill_unit(&self.unit);
        self.node.wait_restarted(&killed);
    }

    /// The processes of all its VMs, by pid.
    #[track_caller]
    pub fn processes(&self) -> Vec<u32> {
        let pids = self.node.sh(&format!(
            "cat {}/*-*-*/cgroup.procs 2>/dev/null; true",
            self.cgroup
        ));
        pids.split_whitespace()
            .map(|pid| must(pid.parse().context("a pid")))
            .collect()
    }

    /// Lists new traces of VMs: control groups, folders, taps. Empty if none remain.
    #[track_caller]
    pub fn traces(&self) -> String {
        let found = self.found();
        let new: Vec<_> = found.difference(&self.before).map(String::as_str).collect();
        new.join("\n")
    }

    #[track_caller]
    fn found(&self) -> BTreeSet<String> {
        let Self { run, log, cgroup, .. } = self;
        let found = self.node.sh(&format!(
            "ls -d {cgroup}/*-*-*/ {run}/vms/* {log}/vms/* 2>/dev/null; ip{} -o link | grep -o ' vm[0-9a-f]*n[0-9]'; true",
            self.in_namespace()
        ));
        found.lines().map(str::to_owned).collect()
    }

    /// The option of ip(8).
    fn in_namespace(&self) -> String {
        let option = |namespace| format!(" -n {namespace}");
        self.namespace.as_ref().map(option).unwrap_or_default()
    }

    /// Cuts it off from the other daemon, or joins them again.
    #[track_caller]
    pub fn link(&self, up: bool) {
        let state = if up { "up" } else { "down" };
        let command = format!("ip{} link set peer {state}", self.in_namespace());
        self.node.sh(&command);
    }

    /// A VM's serial console.
    #[track_caller]
    pub fn console(&self, vm: &str) -> Console {
        self.open(&self.command(&format!("console {vm}")))
    }

    /// Runs a command in its node whose input and output are a console's.
    #[track_caller]
    pub fn open(&self, command: &str) -> Console {
        must(Console::spawn(self.node.ssh_command().args(["--", command])))
    }

    /// The names of its VMs.
    #[track_caller]
    pub fn vms(&self) -> String {
        self.ctl("get vm -o name")
    }

    /// Where other daemons reach it.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Runs a command in its network namespace; it must end with 0.
    #[track_caller]
    pub fn within(&self, command: &str) -> String {
        let there = |namespace| format!("ip netns exec {namespace} ");
        let there = self.namespace.as_ref().map(there).unwrap_or_default();
        self.node.sh(&format!("{there}{command}"))
    }

    /// Gives it a bridge of the same name as one of the node's, on the same network.
    #[track_caller]
    pub fn join_bridge(&self, bridge: &str) {
        let namespace = must(self.namespace.as_ref().context("it is where the bridge is"));
        self.node.sh(&format!(
            "ip link add b{namespace} type veth peer name uplink netns {namespace} && ip link set b{namespace} master {bridge} up && \
             ip -n {namespace} link add {bridge} type bridge && ip -n {namespace} link set uplink master {bridge} up && \
             ip -n {namespace} link set {bridge} up"
        ));
    }

    /// Lets nothing pass its bridges from now on, so that VMs with the same addresses do not see each other.
    #[track_caller]
    pub fn keep_apart(&self) {
        self.within("nft 'add table bridge apart; add chain bridge apart forward { type filter hook forward priority 0; policy drop; }'");
    }

    /// Its journal and what its VMs have logged, for a test that fails.
    fn report(&self) -> String {
        let Self { unit, log, .. } = self;
        let script = format!(
            "journalctl --no-pager -o short-precise -u {unit} | tail -n {LINES}; \
             for log in $(find {log}/vms -name '*.log'); do printf '\n── %s\n' $log; tail -n {LINES} $log; done"
        );
        match self.node.ssh_within(&script, Deadline::seconds(60)) {
            Ok(output) => format!("── journal of {unit}\n{}", output.stdout),
            Err(error) => format!("the node does not answer: {error:#}"),
        }
    }
}

impl Drop for Daemon<'_> {
    fn drop(&mut self) {
        let Self { unit, namespace, .. } = &*self;
        // An installed daemon continues to run, and the report of its node covers it.
        let Some(namespace) = namespace else { return };
        if std::thread::panicking() {
            eprintln!("\n{}", self.report());
        }
        let delete = self.command("delete --force --yes --all");
        // The test of leftovers reports a failure.
        let _ = self.node.ssh(&format!(
            "{delete}; systemctl stop {unit}; ip netns del {namespace}"
        ));
    }
}
