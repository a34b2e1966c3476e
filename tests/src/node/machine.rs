//! A node as a QEMU process.

use std::fs::{self, File};
use std::io::ErrorKind;
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::cable;
use super::emulator;
use super::image::NodeImage;
use super::monitor::Monitor;
use crate::host::Accel;
use crate::wait::{self, Deadline, Follow, Process};

/// MAC address of the management NIC, which is eth0 in the node.
const MANAGEMENT_MAC: &str = "52:54:00:76:6d:01";

/// The size of a node.
#[derive(Clone, Copy, Debug)]
pub struct Size {
    /// Virtual processors.
    pub cpus: u32,
    /// RAM in MiB. It is not touched before the node needs it.
    pub memory_mib: u32,
}

impl Default for Size {
    fn default() -> Self {
        Size {
            cpus: 2,
            memory_mib: 14_336,
        }
    }
}

/// Record of a running node, in `node.json` of its folder.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Machine {
    /// The node's name.
    pub name: String,
    /// QEMU's process id.
    pub pid: u32,
    /// The local port that leads to the node's sshd.
    pub ssh_port: u16,
    /// The folder with its console log.
    pub dir: PathBuf,
    /// The folder with its sockets. It is apart because a socket's path may have 107 bytes only.
    pub sockets: PathBuf,
}

impl Machine {
    /// The log of the node's serial console.
    pub fn console_log(&self) -> PathBuf {
        self.dir.join("console.log")
    }

    fn record(dir: &Path) -> PathBuf {
        dir.join("node.json")
    }

    /// The node whose folder is `dir`, when it runs.
    pub fn load(dir: &Path) -> Result<Option<Machine>> {
        let Some(machine) = Self::read(dir)? else {
            return Ok(None);
        };
        Ok(machine.process()?.map(|_| machine))
    }

    /// Returns the node in `dir` if it failed, that is, if it ended without a stop.
    pub fn failed(dir: &Path) -> Result<Option<Machine>> {
        let Some(machine) = Self::read(dir)? else {
            return Ok(None);
        };
        Ok(if machine.process()?.is_none() {
            Some(machine)
        } else {
            None
        })
    }

    fn read(dir: &Path) -> Result<Option<Machine>> {
        let text = match fs::read_to_string(Self::record(dir)) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            text => text.with_context(|| format!("read {}", Self::record(dir).display()))?,
        };
        serde_json::from_str(&text).context("read node.json").map(Some)
    }

    /// Its process, when it runs: QEMU with this node's name, not another process with the same number.
    pub fn process(&self) -> Result<Option<Process>> {
        let Some(process) = Process::open(self.pid)? else {
            return Ok(None);
        };
        // Read after the pidfd is open: if it still names our node, the pidfd is our node's.
        let command = fs::read(format!("/proc/{}/cmdline", self.pid)).unwrap_or_default();
        let qmp = qmp_argument(&self.sockets);
        Ok(command
            .split(|byte| *byte == 0)
            .any(|argument| argument == qmp.as_bytes())
            .then_some(process))
    }

    /// Starts QEMU and waits until the node says that it is ready. With `tied` the node ends with the calling process,
    /// however that ends.
    pub fn start(
        name: &str,
        dir: &Path,
        image: &NodeImage,
        guests: Option<&Path>,
        size: Size,
        tied: bool,
    ) -> Result<Machine> {
        let deadline = Deadline::seconds(240);
        fs::create_dir_all(dir).with_context(|| format!("create {}", dir.display()))?;
        if let Some(dead) = Self::read(dir)? {
            ensure!(dead.process()?.is_none(), "the node {name} runs already");
            dead.forget()?;
        }
        let sockets = tempfile::Builder::new()
            .prefix("vmmd-node.")
            .tempdir()
            .context("create a socket folder")?;
        // QEMU connects before it starts the machine: its end of this stream is open for as long as it lives.
        let ready = UnixListener::bind(sockets.path().join("ready.sock"))?;
        let console = dir.join("console.log");
        File::create(&console)?;
        let log = File::create(dir.join("qemu.log"))?;

        let accel = Accel::detect();
        let mut command = if tied {
            tied_to_us()
        } else {
            Command::new("qemu-system-x86_64")
        };
        command
            .args([
                "-name",
                name,
                "-nodefaults",
                "-no-user-config",
                "-no-reboot",
                "-display",
                "none",
            ])
            .args(["-machine", "q35"])
            .args(accel.qemu_args())
            .args(["-smp", &(size.cpus + accel.idle_cpus()).to_string()])
            .args(["-m", &size.memory_mib.to_string()])
            .arg("-kernel")
            .arg(&image.kernel)
            .arg("-initrd")
            .arg(&image.initrd)
            .args([
                "-append",
                &format!(
                    "{KERNEL_ARGUMENTS} {} systemd.machine_id={}",
                    accel.kernel_arguments(),
                    machine_id(name)
                ),
            ])
            .args(drive("root", &image.disk, "snapshot=on,cache=unsafe"))
            .arg("-chardev")
            .arg(format!("file,id=console,path={}", console.display()))
            .args(["-device", "isa-serial,chardev=console"])
            .arg("-chardev")
            .arg(format!(
                "socket,id=ready,path={}",
                sockets.path().join("ready.sock").display()
            ))
            .args(["-device", "isa-serial,chardev=ready"])
            // The node cannot reach anything beyond this machine.
            .args([
                "-netdev",
                "user,id=management,restrict=on,hostfwd=tcp:127.0.0.1:0-:22",
            ])
            .args([
                "-device",
                &format!("virtio-net-pci,netdev=management,mac={MANAGEMENT_MAC}"),
            ])
            .args(["-device", "virtio-rng-pci"])
            .args(["-device", &format!("pcie-root-port,id={},chassis=1", cable::PORT)])
            .args(["-qmp", &qmp_argument(sockets.path())])
            .process_group(0)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log);
        if accel == Accel::Tcg
            && let Some(modules) = emulator::modules(dir)?
        {
            command.env("QEMU_MODULE_DIR", modules);
        }
        if let Some(guests) = guests {
            command.args(drive("guests", guests, "readonly=on"));
        }
        let child = command
            .spawn()
            .context("start qemu-system-x86_64 (tests/setup-host.sh installs it)")?;
        let mut machine = Machine {
            name: name.to_owned(),
            pid: child.id(),
            ssh_port: 0,
            dir: dir.to_owned(),
            sockets: sockets.path().to_owned(),
        };
        if let Err(error) = machine.wait_ready(&ready, deadline) {
            machine.kill(Deadline::seconds(10))?;
            return Err(error);
        }
        fs::write(Self::record(dir), serde_json::to_string_pretty(&machine)?)?;
        // From here on the folder is the running node's; `stop` removes it.
        let _ = sockets.keep();
        Ok(machine)
    }

    fn wait_ready(&mut self, ready: &UnixListener, deadline: Deadline) -> Result<()> {
        let log = |name: &str| fs::read_to_string(self.dir.join(name)).unwrap_or_default();
        let process = self.process_any()?;
        // Either QEMU connects or it ends with a message.
        ready.set_nonblocking(true)?;
        let stream = loop {
            match ready.accept() {
                Ok((stream, _)) => break stream,
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(error) => return Err(error).context("accept QEMU's connection"),
            }
            match wait::either_readable(ready, &process, deadline)? {
                Some(wait::Which::First) => {}
                Some(wait::Which::Second) => bail!("QEMU ended at once: {}", log("qemu.log").trim()),
                None => bail!("QEMU did not start within {deadline}"),
            }
        };
        stream.set_nonblocking(false)?;
        let said = Follow::new(&stream).until("\n", deadline).map_err(|error| {
            let (console, qemu) = (log("console.log"), log("qemu.log"));
            error.context(format!(
                "the node did not come up; its console ends with:\n{}\n{qemu}",
                wait::tail(&console, 40)
            ))
        })?;
        ensure!(
            said.contains("kvm-idle-vm=active"),
            "the node has no usable KVM ({}); see {}",
            said.trim(),
            self.console_log().display()
        );
        self.ssh_port = self.find_ssh_port()?;
        Ok(())
    }

    fn process_any(&self) -> Result<Process> {
        Process::open(self.pid)?.context("QEMU ended at once")
    }

    /// QEMU's monitor.
    pub fn monitor(&self) -> Result<Monitor> {
        Monitor::connect(&self.sockets.join("qmp.sock"))
    }

    /// The local port that leads to the node's sshd, which QEMU has chosen.
    fn find_ssh_port(&self) -> Result<u16> {
        let command = serde_json::json!({"command-line": "info usernet"});
        let answer = self.monitor()?.ask("human-monitor-command", &command)?;
        forwarded_port(answer.as_str().unwrap_or_default())
    }

    /// Ends the node and removes its sockets and its record. Its logs stay.
    pub fn stop(&self) -> Result<()> {
        self.kill(Deadline::seconds(20))?;
        self.forget()
    }

    fn forget(&self) -> Result<()> {
        if let Err(error) = fs::remove_dir_all(&self.sockets)
            && error.kind() != ErrorKind::NotFound
        {
            return Err(error).with_context(|| format!("remove {}", self.sockets.display()));
        }
        fs::remove_file(Self::record(&self.dir)).context("remove node.json")
    }

    /// A node's disk is thrown away with it: nothing is lost by ending it at once.
    fn kill(&self, deadline: Deadline) -> Result<()> {
        let Some(process) = self.process()? else {
            return Ok(());
        };
        process.signal(rustix::process::Signal::TERM)?;
        if !process.wait_exit(deadline)? {
            process.signal(rustix::process::Signal::KILL)?;
            ensure!(
                process.wait_exit(deadline)?,
                "QEMU (pid {}) survives SIGKILL",
                self.pid
            );
        }
        Ok(())
    }
}

/// The node's kernel command line.
///
/// - `mitigations=off nokaslr norandmaps` save time under emulation. QEMU reuses the translation of
///   a program for the next process that has the program at the same address, which halves the time
///   of a call of vmmctl.
/// - A processor that is stuck for 40 s (twice the threshold) ends the node: see `keeper`.
/// - `no_timer_check`: on a busy host QEMU's timer may not tick within the short time that the
///   kernel waits for it, and the kernel would panic.
const KERNEL_ARGUMENTS: &str = "root=/dev/vda rw console=ttyS0 net.ifnames=0 mitigations=off nokaslr norandmaps no_timer_check panic=1 \
                                softlockup_panic=1 watchdog_thresh=20 systemd.show_status=false quiet loglevel=5";

/// An id of the node's own, the same at each boot: a version 4 UUID without dashes, as systemd wants it.
fn machine_id(name: &str) -> String {
    let mut bytes = [0u8; 16];
    for (byte, digest) in bytes.iter_mut().zip(Sha256::digest(name.as_bytes())) {
        *byte = digest;
    }
    let id = (u128::from_be_bytes(bytes) & !(0xf << 76) & !(3 << 62)) | (4 << 76) | (2 << 62);
    format!("{id:032x}")
}

fn qmp_argument(sockets: &Path) -> String {
    format!("unix:{},server=on,wait=off", sockets.join("qmp.sock").display())
}

fn drive(id: &str, file: &Path, options: &str) -> [String; 4] {
    [
        "-drive".to_owned(),
        format!("if=none,id={id},format=raw,file={},{options}", file.display()),
        "-device".to_owned(),
        format!("virtio-blk-pci,drive={id},serial={id}"),
    ]
}

/// QEMU that the kernel ends when the thread that started it ends.
fn tied_to_us() -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "TERM", "qemu-system-x86_64"]);
    command
}

/// The local port in the answer to `info usernet`, whose line for it looks like
/// `  TCP[HOST_FORWARD]  15       127.0.0.1 41859       10.0.2.15    22     0     0`.
fn forwarded_port(usernet: &str) -> Result<u16> {
    usernet
        .lines()
        .find(|line| line.contains("HOST_FORWARD"))
        .and_then(|line| line.split_ascii_whitespace().nth(3)?.parse().ok())
        .filter(|port| *port != 0)
        .with_context(|| format!("no forwarded port in {usernet:?}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_forwarded_port_is_read_from_the_monitor() {
        let text = "Hub -1 (management):\r\n  Protocol[State]    FD  Source Address  Port   Dest. Address  Port RecvQ SendQ\r\n  \
                    TCP[HOST_FORWARD]  15       127.0.0.1 41859       10.0.2.15    22     0     0\r\n";
        assert_eq!(forwarded_port(text).expect("port"), 41859);
        assert!(forwarded_port("").is_err());
    }

    #[test]
    fn a_record_of_another_process_is_no_running_node() {
        let dir = tempfile::tempdir().expect("folder");
        let machine = Machine {
            name: "x".to_owned(),
            pid: std::process::id(),
            ssh_port: 1,
            dir: dir.path().to_owned(),
            sockets: dir.path().to_owned(),
        };
        fs::write(
            Machine::record(dir.path()),
            serde_json::to_string(&machine).expect("json"),
        )
        .expect("write");
        assert!(Machine::load(dir.path()).expect("load").is_none());
    }
}
