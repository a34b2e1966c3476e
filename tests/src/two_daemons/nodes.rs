//! Two nodes, each with its installed daemon: the test's node, and a small one that is booted for the test.

use anyhow::{Context, Result};

use super::{Daemon, PORT, init_certs, tcp_config};
use crate::Case;
use crate::node::{Cable, Node, SECOND, Size, newest_package, quote};
use crate::wait::tail;

/// Their addresses on the cable between them.
const ADDRESSES: [&str; 2] = ["10.79.0.1", "10.79.0.2"];

/// Size of the second node.
const SIZE: Size = Size {
    cpus: 2,
    memory_mib: 2048,
};

/// Where the daemons' certificates are in both.
const TLS: &str = "/etc/vmmd/peers";

/// Backup of the configuration of the test's node.
const CONFIG_BEFORE: &str = "/run/vmmd-config.before";

/// Both nodes. The drop ends the second node and restores the test's node.
pub struct Nodes<'case> {
    case: &'case Case,
    cable: Option<Cable>,
    second: Node,
}

impl<'case> Nodes<'case> {
    /// Boots the second node and installs the package that is in the first one; then it has both daemons serve each other over the cable. The second node ends with
    /// the calling thread. The test has to be alone in its node: the node's daemon is restarted.
    pub fn boot(case: &'case Case) -> Result<Self> {
        let name = format!("{}{SECOND}", case.node().machine().name);
        let package = newest_package()?.context("no package was built")?;
        let mut nodes = Self {
            case,
            cable: None,
            second: Node::boot(&name, SIZE, true).context("the second node")?,
        };
        nodes.second.install(&package)?;
        let [one, two] = ADDRESSES;
        nodes.cable = Some(Cable::between(
            nodes.both(),
            [&format!("{one}/30"), &format!("{two}/30")],
        )?);
        let [first, second] = nodes.both();
        init_certs(first, TLS, ADDRESSES);
        let files = first.sh(&format!("tar -C {TLS} -c . | base64 -w 0"));
        second.sh(&format!(
            "mkdir -p {TLS} && echo {files} | base64 -d | tar -C {TLS} -x"
        ));
        for (node, address) in nodes.both().into_iter().zip(ADDRESSES) {
            let config = tcp_config(TLS, &format!("{address}:{PORT}"));
            node.sh(&format!(
                "cp -p /etc/vmmd/config.toml {CONFIG_BEFORE} && printf %s {} >>/etc/vmmd/config.toml",
                quote(&config)
            ));
            node.restart_daemon()?;
        }
        Ok(nodes)
    }

    fn both(&self) -> [&Node; 2] {
        [self.case.node(), &self.second]
    }

    /// Their daemons, that of the test's node first.
    #[track_caller]
    pub fn daemons(&self) -> [Daemon<'_>; 2] {
        let [first, second] = self.both();
        let [one, two] = ADDRESSES;
        [Daemon::installed(first, one), Daemon::installed(second, two)]
    }

    /// How the second one is: the case reports the first.
    fn report(&self) {
        let console = std::fs::read_to_string(self.second.machine().console_log()).unwrap_or_default();
        eprintln!("── console of the second node\n{}", tail(&console, 20));
        let journal = self
            .second
            .ssh("journalctl --no-pager -o short-precise -u 'vmmd*' | tail -n 60");
        match journal {
            Ok(output) => eprintln!("── its journal of vmmd and its VMs\n{}", output.stdout),
            Err(error) => eprintln!("the second node does not answer: {error:#}"),
        }
    }
}

impl Drop for Nodes<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.report();
        }
        let back = self.case.node().try_sh(&format!(
            "vmmctl delete --force --yes --ignore-not-found {}; rm -rf {TLS}; \
             [ ! -e {CONFIG_BEFORE} ] || {{ mv {CONFIG_BEFORE} /etc/vmmd/config.toml && systemctl restart vmmd; }}",
            self.case.name()
        ));
        // Its NIC goes before the second node does.
        self.cable = None;
        let lost = matches!(self.second.machine().process(), Ok(None));
        // The record of a node that ended on its own must stay: the test runner inspects it before
        // a retry.
        let ended = if lost { Ok(()) } else { self.second.stop() };
        if let Err(error) = back.map(drop).and(ended)
            && !std::thread::panicking()
        {
            panic!("the nodes are not as before: {error:#}");
        }
    }
}
