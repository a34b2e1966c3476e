//! Both daemons on this machine, which has hardware virtualization.

use std::fs;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result};
use tempfile::TempDir;

use super::{FAR, NEAR, tcp_config};
use crate::demo::image;
use crate::demo::ready::{self, Readiness};
use crate::wait::{Deadline, Process};
use crate::{paths, run};

/// The network namespaces of the two daemons.
const NAMESPACES: [&str; 2] = ["vmmd-demo-near", "vmmd-demo-far"];

/// Two daemons under a temporary folder.
pub struct Here {
    pub dir: TempDir,
    pub guest: PathBuf,
    daemons: Vec<Child>,
}

impl Here {
    /// Starts them.
    pub fn start() -> Result<Here> {
        let mut here = Here {
            dir: tempfile::Builder::new().prefix("vmmd-demo.").tempdir()?,
            guest: image::get()?,
            daemons: Vec::new(),
        };
        let tls = here.dir.path().join("tls");
        let [near, far] = NAMESPACES;
        host(&format!(
            "set -e; for name in {near} {far}; do ip netns del $name 2>/dev/null || true; ip netns add $name; ip -n $name link set lo up; done
             ip link add peer netns {near} type veth peer name peer netns {far}
             ip -n {near} addr add {NEAR}/30 dev peer; ip -n {near} link set peer up
             ip -n {far} addr add {FAR}/30 dev peer; ip -n {far} link set peer up
             {} init-certs --dir {} --server-name {NEAR} --server-name {FAR} --client node=peer >/dev/null",
            programs().join("vmmd").display(),
            tls.display()
        ))?;
        for (number, (name, address)) in ["near", "far"].into_iter().zip([NEAR, FAR]).enumerate() {
            let config = format!(
                "[vm_uids]\nfirst = {}\ncount = 100\n{}",
                1_800_000_000 + number * 1000,
                tcp_config(&tls.display().to_string(), &format!("{address}:7443"))
            );
            let daemon = here.daemon(name, &config)?;
            here.daemons.push(daemon);
        }
        Ok(here)
    }

    fn daemon(&self, name: &str, config: &str) -> Result<Child> {
        let folder = self.dir.path().join(name);
        fs::create_dir(&folder)?;
        let root = folder.display();
        let file = folder.join("config.toml");
        fs::write(
            &file,
            format!(
                "state_dir = \"{root}/state\"\nrun_dir = \"{root}/run\"\nlog_dir = \"{root}/log\"\n{config}"
            ),
        )?;
        let readiness = Readiness::new(&folder)?;
        let path = folder.join("vmmd.log");
        let mut daemon = Command::new("nsenter")
            .arg(format!("--net=/run/netns/vmmd-demo-{name}"))
            .arg(programs().join("vmmd"))
            .arg("--config")
            .arg(&file)
            .env(ready::VARIABLE, &readiness.path)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(fs::File::create(&path)?)
            .spawn()
            .context("start vmmd")?;
        // Until it is waited for, a process that has ended keeps its number.
        let process = Process::open(daemon.id())?.context("vmmd is not there")?;
        if let Err(error) = readiness.wait(&process, Deadline::seconds(60)) {
            let _ = daemon.kill();
            let log = fs::read_to_string(path).unwrap_or_default();
            return Err(error.context(format!("vmmd does not serve: {log}")));
        }
        Ok(daemon)
    }

    /// A shell command whose `vmmctl` speaks to the near daemon, in the temporary folder.
    pub fn command(&self, command: &str) -> Command {
        let mut path = programs().into_os_string();
        path.push(":");
        path.push(std::env::var_os("PATH").unwrap_or_default());
        let mut nsenter = Command::new("nsenter");
        nsenter
            .arg(format!("--net=/run/netns/{}", NAMESPACES[0]))
            .args(["sh", "-c", command])
            .current_dir(self.dir.path())
            .env("PATH", path)
            .env("HOME", self.dir.path())
            .env("VMMD_SOCKET", self.dir.path().join("near/run/vmmd.sock"));
        nsenter
    }
}

impl Drop for Here {
    /// Ends the daemons, and VMs that a failed step has left.
    fn drop(&mut self) {
        let [near, far] = ["near", "far"].map(|name| {
            let socket = self.dir.path().join(name).join("run/vmmd.sock");
            format!(
                "vmmctl --socket {} delete vm --all --force --yes",
                socket.display()
            )
        });
        // The command fails without a VM or a daemon, which is no problem here.
        let _ = run::output(
            &mut self.command(&format!("{near}; {far}")),
            Deadline::seconds(60),
        );
        for daemon in &mut self.daemons {
            let _ = daemon.kill();
            let _ = daemon.wait();
        }
        let _ = host(&NAMESPACES.map(|name| format!("ip netns del {name}")).join("; "));
    }
}

/// The folder of the programs, which `make demo` builds first.
fn programs() -> PathBuf {
    paths::target_dir().join("demo")
}

fn host(script: &str) -> Result<()> {
    run::check(Command::new("sh").args(["-c", script]), Deadline::seconds(60)).map(drop)
}
