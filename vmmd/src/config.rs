//! `/etc/vmmd/config.toml`. Every key is optional; an unknown one is an error. All paths can be moved, so that two
//! daemons can run on one machine as long as none of their folders is shared.

use std::{
    fs, io,
    net::SocketAddr,
    path::{Path, PathBuf},
};

use serde::Deserialize;
use vmmd_host::{
    capacity::{
        limits::{Overcommit, Pressure, Reserved},
        sizing,
    },
    ledger::UidRange,
    roots::Roots,
};
use vmmd_images::rules::ImportRules;
use vmmd_spec::{firewall::Addresses, nic};

mod clients;
#[cfg(test)]
mod reference;

pub use clients::{Limits, Tcp};

/// Where the configuration is looked for when the command line names no other file.
pub const DEFAULT_PATH: &str = "/etc/vmmd/config.toml";

/// Longest `run_dir` in bytes: with `/vms/<uid>/console.sock` behind it (54 bytes) it must fit into a UNIX socket's
/// address (108 bytes with the final NUL).
const MAX_RUN_DIR: usize = 107 - 54;

/// Configuration of the daemon.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[cfg_attr(test, derive(serde::Serialize))]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Durable state: the store. Default `/var/lib/vmmd`.
    pub state_dir: PathBuf,
    /// Volatile state, which a restart of the node deletes: sockets, locks, exit records. At most
    /// 53 bytes. Default `/run/vmmd`.
    pub run_dir: PathBuf,
    /// Serial logs and the logs of the `vmm` processes. Default `/var/log/vmmd`.
    pub log_dir: PathBuf,
    /// The key with which secrets (user data and hashes of passwords of VMs, passwords for registries of images) are encrypted in the store: a
    /// file of 32 random bytes. Default: the credential `vmmd.secrets-key` of the unit, or else `secrets.key` in `state_dir`, which is made when
    /// it is not there.
    pub secrets_key: Option<PathBuf>,
    /// The socket of the API. Default `vmmd.sock` in `run_dir`.
    pub socket: Option<PathBuf>,
    /// Group whose members are admins on the socket, as root is. Default `vmmd`; when that group doesn't exist, root only.
    pub socket_group: Option<String>,
    /// Group whose members are operators on the socket. Default: none.
    pub operator_group: Option<String>,
    /// Group whose members are viewers on the socket. Default: none.
    pub viewer_group: Option<String>,
    /// Group whose members are agents of a cluster on the socket, as `vmmd-kube agent` is. Default
    /// `vmmd-agents`; when that group doesn't exist, there are no agents.
    pub agent_group: Option<String>,
    /// The `vmm` program. Default: `vmm` beside the daemon's own binary, or else `/usr/lib/vmmd/vmm`.
    pub vmm: Option<PathBuf>,
    /// The program that reads and changes disk images. Default: `vmm-image` beside the `vmm`.
    pub vmm_image: Option<PathBuf>,
    /// The program that serves DHCP and DNS in managed networks. Default: `vmmd-netd` beside the daemon's own
    /// binary, or else `/usr/lib/vmmd/vmmd-netd`.
    pub netd: Option<PathBuf>,
    /// Ports of the node that VMs may publish: `"443"`, `"20000-29999"`. Default: all.
    pub published_ports: Vec<String>,
    /// How long an address of a network stays reserved for its NIC when the NIC is removed or the VM is deleted, in seconds. Default 600.
    pub address_retention_seconds: u32,
    /// Subnets that VMs may have behind their NICs: `"10.64.0.0/10"`, `"fd00:90::/32"`. Default: all.
    pub routed_subnets: Vec<String>,
    /// Addresses that VMs may have as floating addresses: `"192.0.2.64/26"`, `"2001:db8::/64"`. Default: none.
    pub floating_addresses: Vec<String>,
    /// The program that serves shares. Default: `virtiofsd` beside the `vmm`.
    pub virtiofsd: Option<PathBuf>,
    /// The program that serves the TPM of a VM. Default `/usr/bin/swtpm`, of Debian's package `swtpm`.
    pub swtpm: PathBuf,
    /// The device of KVM. Default `/dev/kvm`.
    pub kvm_device: PathBuf,
    /// A cgroup v2 directory below which each VM gets a cgroup; made when missing. Default: `vms` below the daemon's
    /// own cgroup.
    pub cgroup: Option<PathBuf>,
    /// Firmware of VMs.
    pub firmware: Firmware,
    /// User ids for the `vmm` processes.
    pub vm_uids: UidRange,
    /// How long starts by a run policy wait.
    pub restart: Restart,
    /// The API over TCP. Default: not at all.
    pub tcp: Option<Tcp>,
    /// Limits of clients.
    pub limits: Limits,
    /// A file for the audit log, beside the journal. Default: none.
    pub audit_log: Option<PathBuf>,
    /// Overcommit ratios of the node's resources.
    pub overcommit: Overcommit,
    /// Resources of the node that VMs never get.
    pub reserved: Reserved,
    /// When the node says that it runs short.
    pub pressure: Pressure,
    /// Sizes that VMs may have; any when the list is empty.
    pub sizing: Vec<sizing::Policy>,
    /// Figures for Prometheus.
    pub metrics: Metrics,
    /// Ways to the screens of VMs beside the API.
    pub screen: Screen,
    /// Where the files of VMs may be.
    pub roots: Roots,
    /// How many snapshots there may be, and what room they may take.
    pub snapshots: SnapshotLimits,
    /// Limits of imports.
    pub images: ImportRules,
    /// Pods of a cluster that have VMs.
    pub pods: Pods,
}

/// The way of pods to the daemon.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[cfg_attr(test, derive(serde::Serialize))]
#[serde(deny_unknown_fields, default)]
pub struct Pods {
    /// The socket for the launchers of pods, in a folder of its own: the agent mounts the folder into each pod with a VM. Each
    /// process that reaches the socket can connect; the daemon serves the processes in cgroups of pods. Default `pod/vmmd.sock` in
    /// `run_dir`.
    pub socket: Option<PathBuf>,
}

/// Files of the firmware for VMs with `boot.firmware`. The defaults are those of Debian's packages `ovmf` and `seabios`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[cfg_attr(test, derive(serde::Serialize))]
#[serde(deny_unknown_fields, default)]
pub struct Firmware {
    /// Code of the UEFI firmware. Default `/usr/share/OVMF/OVMF_CODE_4M.fd`.
    pub uefi_code: PathBuf,
    /// Variables that a VM begins with at its first start. Default `/usr/share/OVMF/OVMF_VARS_4M.fd`.
    pub uefi_variables: PathBuf,
    /// The BIOS. Default `/usr/share/seabios/bios-256k.bin`.
    pub bios: PathBuf,
}

impl Default for Firmware {
    fn default() -> Self {
        Self {
            uefi_code: "/usr/share/OVMF/OVMF_CODE_4M.fd".into(),
            uefi_variables: "/usr/share/OVMF/OVMF_VARS_4M.fd".into(),
            bios: "/usr/share/seabios/bios-256k.bin".into(),
        }
    }
}

/// Limits of the number and the size of snapshots. A snapshot above a limit is refused before vmmd
/// creates any of its files (`SNAPSHOT_QUOTA`). A lower limit does not delete existing snapshots.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[cfg_attr(test, derive(serde::Serialize))]
#[serde(deny_unknown_fields, default)]
pub struct SnapshotLimits {
    /// Room for the files of all snapshots together, in bytes: memory and copies of disks, as they are allocated. Blocks that a copy shares with
    /// its disk count too. At least 1. Default: no limit.
    pub max_bytes: Option<u64>,
    /// Snapshots of one VM. At least 1. Default: no limit.
    pub max_count_per_vm: Option<u32>,
}

impl SnapshotLimits {
    /// The first key that is 0, which would allow no snapshot.
    fn zero(&self) -> Option<&'static str> {
        let zeroes = [
            ("snapshots.max_bytes", self.max_bytes == Some(0)),
            ("snapshots.max_count_per_vm", self.max_count_per_vm == Some(0)),
        ];
        zeroes.into_iter().find(|(_, zero)| *zero).map(|(key, _)| key)
    }
}

/// Access to the screens of VMs without the API. A client authenticates with a secret from
/// `CreateVncTicket`, which is valid once and for one minute. Without a certificate there is no
/// encryption, so each address must be of the loopback interface. Use ssh's port forwarding from
/// other hosts. With port 0, `vnc.addr` and `web.addr` in `run_dir` contain the bound address.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[cfg_attr(test, derive(serde::Serialize))]
#[serde(deny_unknown_fields, default)]
pub struct Screen {
    /// Address and port for VNC viewers, which ask for a password: `127.0.0.1:5900`. Default: none.
    pub vnc: Option<SocketAddr>,
    /// Address and port for browsers: `127.0.0.1:6080`. Default: none.
    pub web: Option<SocketAddr>,
    /// Where noVNC's files are. Default `/usr/share/novnc`, of Debian's package novnc.
    pub novnc: PathBuf,
    /// A certificate for the node with those between it and its CA, a PEM file. With it VNC viewers are served by VeNCrypt and browsers by
    /// HTTPS, and no others, at any address. New files are read for each connection. Default: none.
    pub certificate: Option<PathBuf>,
    /// The certificate's private key, a PEM file. Default: none.
    pub key: Option<PathBuf>,
}

impl Screen {
    /// Everything is encrypted.
    pub fn is_encrypted(&self) -> bool {
        self.certificate.is_some()
    }

    /// The first key with an invalid value, and the problem.
    fn wrong(&self) -> Option<(&'static str, &'static str)> {
        match (&self.certificate, &self.key) {
            (Some(_), None) => return Some(("screen.key", "must be given too, as `certificate` is")),
            (None, Some(_)) => return Some(("screen.certificate", "must be given too, as `key` is")),
            (Some(_), Some(_)) => return None,
            (None, None) => {}
        }
        let addresses = [("screen.vnc", self.vnc), ("screen.web", self.web)];
        let is_open =
            |address: Option<SocketAddr>| address.is_some_and(|address| !address.ip().is_loopback());
        let (key, _) = addresses.into_iter().find(|(_, address)| is_open(*address))?;
        Some((
            key,
            "must be an address of the loopback interface, as nothing of it is encrypted without `certificate` and `key`",
        ))
    }
}

impl Default for Screen {
    fn default() -> Self {
        Self {
            vnc: None,
            web: None,
            novnc: "/usr/share/novnc".into(),
            certificate: None,
            key: None,
        }
    }
}

/// How long starts by a run policy wait after a failure or the end of a run, in milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[cfg_attr(test, derive(serde::Serialize))]
#[serde(deny_unknown_fields, default)]
pub struct Restart {
    /// The first wait. Default 1,000.
    pub first_ms: u64,
    /// The longest wait; each one is twice the one before up to that. Default 300,000.
    pub max_ms: u64,
    /// After a run that lasted as long the next wait is the first again. Default 600,000.
    pub reset_after_ms: u64,
    /// How long a VM that makes room (`stop --evacuate`) stays down on a node that is neither cordoned nor shut down meanwhile. Default
    /// 600,000.
    pub room_ms: u64,
}

impl Default for Restart {
    fn default() -> Self {
        Self {
            first_ms: 1_000,
            max_ms: 300_000,
            reset_after_ms: 600_000,
            room_ms: 600_000,
        }
    }
}

/// Listener for Prometheus metrics.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[cfg_attr(test, derive(serde::Serialize))]
#[serde(deny_unknown_fields, default)]
pub struct Metrics {
    /// `127.0.0.1:9753`, or the absolute path of a UNIX socket. Any client that can connect reads
    /// the metrics. Default: none.
    pub listen: Option<String>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            state_dir: "/var/lib/vmmd".into(),
            run_dir: "/run/vmmd".into(),
            log_dir: "/var/log/vmmd".into(),
            secrets_key: None,
            socket: None,
            socket_group: None,
            operator_group: None,
            viewer_group: None,
            agent_group: None,
            vmm: None,
            vmm_image: None,
            netd: None,
            published_ports: Vec::new(),
            address_retention_seconds: 600,
            routed_subnets: Vec::new(),
            floating_addresses: Vec::new(),
            virtiofsd: None,
            swtpm: "/usr/bin/swtpm".into(),
            kvm_device: "/dev/kvm".into(),
            cgroup: None,
            firmware: Firmware::default(),
            vm_uids: UidRange::default(),
            restart: Restart::default(),
            tcp: None,
            limits: Limits::default(),
            audit_log: None,
            overcommit: Overcommit::default(),
            reserved: Reserved::default(),
            pressure: Pressure::default(),
            sizing: Vec::new(),
            metrics: Metrics::default(),
            screen: Screen::default(),
            roots: Roots::default(),
            snapshots: SnapshotLimits::default(),
            images: ImportRules::default(),
            pods: Pods::default(),
        }
    }
}

/// Error in the configuration.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file is unreadable.
    #[error("read configuration {0}")]
    Read(PathBuf, #[source] io::Error),
    /// It is no TOML, or has unknown keys or wrong types.
    #[error("configuration {0}: {1}")]
    Parse(PathBuf, String),
    /// A value is invalid.
    #[error("configuration: `{key}` {problem}")]
    Value {
        /// The key.
        key: &'static str,
        /// Problem with its value.
        problem: String,
    },
}

impl Config {
    /// Reads `path`, or [`DEFAULT_PATH`] when none is given; the latter need not exist.
    pub fn load(path: Option<&Path>) -> Result<Self, Error> {
        let file = path.unwrap_or(Path::new(DEFAULT_PATH));
        let text = match fs::read_to_string(file) {
            Ok(text) => text,
            Err(error) if path.is_none() && error.kind() == io::ErrorKind::NotFound => String::new(),
            Err(error) => return Err(Error::Read(file.to_owned(), error)),
        };
        Self::parse(&text, file)
    }

    fn parse(text: &str, file: &Path) -> Result<Self, Error> {
        let config: Self =
            toml::from_str(text).map_err(|error| Error::Parse(file.to_owned(), error.to_string()))?;
        config.check()?;
        Ok(config)
    }

    fn check(&self) -> Result<(), Error> {
        let refuse = |key, problem: &str| {
            Err(Error::Value {
                key,
                problem: problem.to_owned(),
            })
        };
        let paths = [
            ("state_dir", Some(&self.state_dir)),
            ("run_dir", Some(&self.run_dir)),
            ("log_dir", Some(&self.log_dir)),
            ("socket", self.socket.as_ref()),
            ("pods.socket", self.pods.socket.as_ref()),
            ("vmm", self.vmm.as_ref()),
            ("virtiofsd", self.virtiofsd.as_ref()),
            ("swtpm", Some(&self.swtpm)),
            ("kvm_device", Some(&self.kvm_device)),
            ("cgroup", self.cgroup.as_ref()),
            ("audit_log", self.audit_log.as_ref()),
            ("firmware.uefi_code", Some(&self.firmware.uefi_code)),
            ("firmware.uefi_variables", Some(&self.firmware.uefi_variables)),
            ("firmware.bios", Some(&self.firmware.bios)),
            ("tcp.certificate", self.tcp.as_ref().map(|tcp| &tcp.certificate)),
            ("tcp.key", self.tcp.as_ref().map(|tcp| &tcp.key)),
            ("tcp.client_ca", self.tcp.as_ref().map(|tcp| &tcp.client_ca)),
            ("screen.novnc", Some(&self.screen.novnc)),
            ("screen.certificate", self.screen.certificate.as_ref()),
            ("screen.key", self.screen.key.as_ref()),
            (
                "tcp.revoked",
                self.tcp.as_ref().and_then(|tcp| tcp.revoked.as_ref()),
            ),
        ];
        for (key, path) in paths {
            if path.is_some_and(|path| !path.is_absolute()) {
                return refuse(key, "must be an absolute path");
            }
        }
        if self.run_dir.as_os_str().len() > MAX_RUN_DIR {
            return refuse("run_dir", &format!("must be at most {MAX_RUN_DIR} bytes long"));
        }
        let Restart { first_ms, max_ms, .. } = self.restart;
        if first_ms == 0 || max_ms < first_ms {
            return refuse(
                "restart",
                "must have a first_ms above 0 and a max_ms not below it",
            );
        }
        if let Some(key) = self.limits.zero() {
            return refuse(key, "must be at least 1");
        }
        if let Some(key) = self.snapshots.zero().or_else(|| self.images.zero()) {
            return refuse(key, "must be at least 1; leave it out for the default");
        }
        if let Err(problem) = self.pressure.check() {
            return refuse("pressure", &format!(": {problem}"));
        }
        for (number, policy) in (1..).zip(&self.sizing) {
            if let Err(problem) = policy.check() {
                return refuse("sizing", &format!("number {number}: {problem}"));
            }
        }
        let is_range = |text: &&String| nic::port_range(text).is_some();
        if let Some(wrong) = self.published_ports.iter().find(|text| !is_range(text)) {
            let problem = format!("must be ports such as \"443\" or \"20000-29999\", is \"{wrong}\"");
            return refuse("published_ports", &problem);
        }
        let is_subnet = |text: &&String| text.parse::<Addresses>().is_ok();
        for (key, ranges) in [
            ("routed_subnets", &self.routed_subnets),
            ("floating_addresses", &self.floating_addresses),
        ] {
            if let Some(wrong) = ranges.iter().find(|text| !is_subnet(text)) {
                let problem =
                    format!("must be ranges such as \"10.64.0.0/10\" or \"fd00:90::/32\", is \"{wrong}\"");
                return refuse(key, &problem);
            }
        }
        if let Err(problem) = self.roots.check() {
            return refuse("roots", problem);
        }
        let listen = self.metrics.listen.as_deref().unwrap_or("/");
        if !listen.starts_with('/') && listen.parse::<std::net::SocketAddr>().is_err() {
            return refuse(
                "metrics.listen",
                "must be an address with a port such as 127.0.0.1:9753, or an absolute path",
            );
        }
        if let Some((key, problem)) = self.screen.wrong() {
            return refuse(key, problem);
        }
        // uid 0 is root; u32::MAX is "unchanged" to setresuid(2).
        let UidRange { first, count } = self.vm_uids;
        if first == 0 || count == 0 || first.checked_add(count).is_none() {
            return refuse(
                "vm_uids",
                "must hold at least one user id and neither 0 nor 4294967295",
            );
        }
        Ok(())
    }

    /// The API's socket.
    pub fn socket(&self) -> PathBuf {
        self.socket
            .clone()
            .unwrap_or_else(|| self.run_dir.join("vmmd.sock"))
    }

    /// The socket for the launchers of pods.
    pub fn pod_socket(&self) -> PathBuf {
        let default = || self.run_dir.join("pod/vmmd.sock");
        self.pods.socket.clone().unwrap_or_else(default)
    }

    /// The `vmm` program.
    pub fn vmm(&self) -> PathBuf {
        self.vmm.clone().unwrap_or_else(|| installed("vmm"))
    }

    /// The program that reads and changes disk images.
    pub fn vmm_image(&self) -> PathBuf {
        let beside = || self.vmm().with_file_name("vmm-image");
        self.vmm_image.clone().unwrap_or_else(beside)
    }

    /// The program that serves DHCP and DNS in managed networks.
    pub fn netd(&self) -> PathBuf {
        self.netd.clone().unwrap_or_else(|| installed("vmmd-netd"))
    }

    /// The program that serves shares.
    pub fn virtiofsd(&self) -> PathBuf {
        let beside = || self.vmm().with_file_name("virtiofsd");
        self.virtiofsd.clone().unwrap_or_else(beside)
    }
}

/// A program of the package: beside the daemon's own binary, or else where the package has it.
fn installed(name: &str) -> PathBuf {
    let own = std::env::current_exe().ok();
    let beside = own.map(|own| own.with_file_name(name));
    let beside = beside.filter(|path| path.is_file());
    beside.unwrap_or_else(|| Path::new("/usr/lib/vmmd").join(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Config, Error> {
        Config::parse(text, Path::new("test.toml"))
    }

    #[test]
    fn an_empty_file_gives_the_documented_defaults() {
        let config = parse("").unwrap();
        assert_eq!(config, Config::default());
        assert_eq!(config.socket(), Path::new("/run/vmmd/vmmd.sock"));
    }

    #[test]
    fn every_path_can_be_moved() {
        let config = parse(
            "state_dir = '/a'\nrun_dir = '/b'\nlog_dir = '/c'\nvmm = '/d'\nkvm_device = '/e'\ncgroup = '/f'\n\
             socket_group = 'wheel'\n[vm_uids]\nfirst = 5000\ncount = 10\n",
        )
        .unwrap();
        assert_eq!(config.socket(), Path::new("/b/vmmd.sock"));
        assert_eq!(config.vmm(), Path::new("/d"));
        assert_eq!(
            config.vm_uids,
            UidRange {
                first: 5000,
                count: 10
            }
        );
    }

    #[test]
    fn unknown_keys_are_refused_by_name() {
        for text in ["stat_dir = '/a'", "[vm_uids]\nlast = 3"] {
            let error = parse(text).unwrap_err().to_string();
            assert!(error.contains("unknown field"), "{error}");
        }
    }

    #[test]
    fn values_that_cannot_be_are_refused_by_key() {
        let long = format!("run_dir = '/{}'", "x".repeat(MAX_RUN_DIR));
        for (text, key) in [
            ("state_dir = 'relative'", "state_dir"),
            (long.as_str(), "run_dir"),
            ("vm_uids = { first = 0 }", "vm_uids"),
            ("restart = { first_ms = 0 }", "restart"),
            ("restart = { first_ms = 10, max_ms = 9 }", "restart"),
            ("metrics = { listen = 'localhost' }", "metrics.listen"),
            ("vm_uids = { count = 0 }", "vm_uids"),
            ("vm_uids = { first = 4294967290 }", "vm_uids"),
            ("limits = { handshakes = 0 }", "limits.handshakes"),
            ("tcp = { listen = '[::]:7443', key = 'server.key' }", "tcp.key"),
            ("tcp = { listen = 'everywhere' }", "listen"),
            ("overcommit = { memory = 0 }", "0.001 to 1000"),
            ("pressure = { disk_percent = 100 }", "disk_percent"),
            ("[[sizing]]\nmin_cores = 2\nmax_cores = 1", "max_cores"),
            ("[[sizing]]\nmin_cores = 2", "max_cores"),
            ("reserved = { memory_mib = -1 }", "memory_mib"),
            (
                "snapshots = { max_bytes = 0 }",
                "`snapshots.max_bytes` must be at least 1",
            ),
            (
                "snapshots = { max_count_per_vm = 0 }",
                "`snapshots.max_count_per_vm` must be",
            ),
            ("snapshots = { max_count = 1 }", "max_count"),
            ("roots = { disks = ['/srv', 'vm'] }", "roots"),
            ("published_ports = ['80', '90-80']", "published_ports"),
            ("routed_subnets = ['10.64.0.1/10']", "routed_subnets"),
            ("floating_addresses = ['192.0.2.1/26']", "floating_addresses"),
            ("screen = { certificate = '/a' }", "`screen.key` must be given"),
            ("screen = { key = '/a' }", "`screen.certificate` must be given"),
            ("screen = { vnc = '[::]:5900', key = '/a' }", "screen.certificate"),
            ("screen = { vnc = '192.0.2.1:5900' }", "`screen.vnc` must be"),
            (
                "screen = { vnc = '[::1]:5900', web = '[::]:6080' }",
                "`screen.web` must be",
            ),
        ] {
            let error = parse(text).unwrap_err().to_string();
            assert!(error.contains(key), "{text}: {error}");
        }
    }

    #[test]
    fn a_file_named_on_the_command_line_must_exist() {
        assert!(matches!(
            Config::load(Some(Path::new("/nonexistent/x.toml"))),
            Err(Error::Read(..))
        ));
    }
}
