//! Preparation of a VM's start before the fork.

use std::{
    fs::{self, File},
    io,
    os::{
        fd::OwnedFd,
        unix::{fs::OpenOptionsExt, net::UnixListener},
    },
    path::{Path, PathBuf},
    sync::Arc,
};

use uuid::Uuid;
use vmm_protocol::{machine::AGENT_CHANNEL, vmm::ClockOffset};
use vmmd_host::{
    capacity::{Demand, placement},
    cgroup::plan::Plan as Limits,
    failure::Failure,
    fault, lock,
};
use vmmd_network::netd::metadata::Instance;
use vmmd_spec::{cloud_init::CloudInit, nic::Mac, vm::VmSpec};
use vmmd_store::Hardware;

use super::{Plan, failures::failed, seed::Seed, tpm};
use crate::{
    files::{self, Files, Known, Locks, state_dir::StateDir},
    host::Host,
    node::check::Look,
    paths::{LogDir, RuntimeDir},
    registry::pods::Pod,
    vm::machine::{self, limits},
};

/// Existing resources that the VM needs.
pub(super) struct Checked {
    pub(super) kvm: OwnedFd,
    pub(super) files: Files,
    pub(super) known: Known,
    pub(super) executable: File,
    /// The pod that has the VM.
    pub(super) pod: Option<Arc<Pod>>,
    /// The program of the TPM, of a VM with one.
    pub(super) swtpm: Option<File>,
    pub(super) limits: Limits,
    /// Difference of the real-time clock to UTC.
    pub(super) clock_offsets: Vec<ClockOffset>,
    /// Documents for the guest's metadata service, of a VM with a NIC that has it.
    pub(super) metadata: Option<Instance>,
    /// Images that the machine does not get: they stay locked until it runs with others.
    pub(super) replaced: Vec<OwnedFd>,
}

/// Resources that the start creates before the fork.
pub(super) struct Made {
    pub(super) random: OwnedFd,
    pub(super) serial: (OwnedFd, OwnedFd),
    pub(super) control: UnixListener,
    pub(super) console: UnixListener,
    pub(super) vnc: Option<(OwnedFd, OwnedFd)>,
    pub(super) hvc: Option<OwnedFd>,
    pub(super) channels: Vec<(String, OwnedFd)>,
    pub(super) exit: File,
    pub(super) lock: File,
    pub(super) log: File,
    pub(super) group: Option<OwnedFd>,
}

/// Finds room and files, and changes nothing on the node.
pub(super) fn check(host: &Host, plan: &Plan) -> Result<Checked, Failure> {
    let Plan {
        uid,
        spec,
        claim,
        is_here,
        ..
    } = plan;
    let uid = *uid;
    fault::slow(&host.config.run_dir, "slow-files");
    let pod = spec
        .pod
        .as_ref()
        .map(|pod| host.pods.connected(pod.as_str()))
        .transpose()?;
    let (look, demand) = (Look::now(host), Demand::of(spec));
    claim.take(demand, |others| {
        let node = look.picture(host, others);
        let node = if *is_here { node.without_admission() } else { node };
        placement::refuse(&placement::decide(&demand.resources, &node))
    })?;
    let kvm = files::open_kvm(&host.config.kvm_device)?;
    if plan.restore.is_none() {
        // A restored machine has the processor of its state, which the vmm checks.
        let needed = machine::needed_features(spec, &hardware(plan));
        host.cpus.check(needed.iter().map(String::as_str))?;
    }
    let nics = nics(plan);
    let none = CloudInit::default();
    let documents = Seed {
        init: spec.cloud_init.as_ref().unwrap_or(&none),
        uid,
        name: &plan.record.name,
        nics: &nics,
        shares: &spec.shares,
    };
    let seed = || documents.make();
    let (files, known) = if plan.comes() {
        // The source has checked the images' content.
        let any = files::any_of_disks(spec);
        files::open(spec, &host.sources(), &any, Locks::Elsewhere, seed)?
    } else {
        files::open(spec, &host.sources(), &plan.record.files, Locks::Take, seed)?
    };
    for share in &spec.shares {
        files::share::open(share, &host.sources())?;
    }
    if let Some(path) = &spec.state_dir {
        StateDir::open(path, &host.config.roots.shares)?;
    }
    let clock_offsets = machine::zone::offsets(&spec.timezone)?;
    let executable = host.open_vmm()?;
    let swtpm = match spec.tpm {
        true => Some(tpm::program(&host.config.swtpm)?),
        false => None,
    };
    let lock = RuntimeDir::of(&host.config, uid).lock();
    if lock::is_held(&lock).map_err(|error| failed("look at the VM's lock", &error))? {
        return Err(Failure::precondition(
            "OLD_PROCESS_ALIVE",
            "an earlier process of this VM is still alive",
        ));
    }
    let limits = limits::plan_start(host, spec)?;
    Ok(Checked {
        kvm,
        files,
        known,
        executable,
        pod,
        swtpm,
        limits,
        clock_offsets,
        metadata: spec
            .nics
            .iter()
            .any(|nic| nic.metadata)
            .then(|| documents.instance()),
        replaced: Vec::new(),
    })
}

/// That of the run: a VM that is restored may have another one by now.
fn hardware(plan: &Plan) -> Hardware {
    let run = plan.record.instance.as_ref();
    let hardware = run.and_then(|run| run.hardware.clone());
    hardware
        .or_else(|| plan.record.hardware.clone())
        .unwrap_or_default()
}

/// The VM's NICs with their addresses.
fn nics(plan: &Plan) -> Vec<(String, Mac)> {
    let hardware = hardware(plan);
    let nics = plan.spec.nics.iter();
    let addressed = nics.filter_map(|nic| {
        let mac = machine::mac(&hardware, nic.name.as_str())?;
        Some((nic.name.to_string(), mac))
    });
    addressed.collect()
}

pub(super) fn make(
    host: &Host,
    uid: Uuid,
    name: &str,
    spec: &VmSpec,
    limits: &Limits,
) -> Result<Made, Failure> {
    let runtime = RuntimeDir::of(&host.config, uid);
    runtime
        .create()
        .map_err(|error| failed("make the VM's runtime directory", &error))?;
    let logs = LogDir::of(&host.config, uid);
    let (serial, log) = open_logs(&logs).map_err(|error| failed("open the VM's logs", &error))?;
    host.logs.watch(uid, name, logs);
    let group = limits::create(host, uid, limits)?.map(|group| group.descriptor());
    let vnc = |view_only| listen(runtime.vnc(view_only), "screen's").map(OwnedFd::from);
    Ok(Made {
        serial,
        log,
        random: File::open("/dev/urandom")
            .map_err(|error| failed("open the random source", &error))?
            .into(),
        control: listen(runtime.control(), "control")?,
        console: listen(runtime.console(), "console")?,
        vnc: match spec.display {
            Some(_) => Some((vnc(false)?, vnc(true)?)),
            None => None,
        },
        hvc: match spec.virtio_console {
            true => Some(listen(runtime.hvc(), "virtio-console's")?.into()),
            false => None,
        },
        channels: channels(spec, &runtime)?,
        exit: private_file(&runtime.exit()).map_err(|error| failed("make the exit record", &error))?,
        lock: lock::create(&runtime.lock()).map_err(|error| failed("make the VM's lock", &error))?,
        group: group
            .transpose()
            .map_err(|error| failed("open the VM's cgroup", &error))?,
    })
}

/// Makes a socket. The sockets listen before the fork: a first connection waits in the queue until the
/// vmm accepts it, so that clients need no retries. The vmm listens again, which makes it the peer of
/// later connections.
fn listen(path: PathBuf, what: &str) -> Result<UnixListener, Failure> {
    UnixListener::bind(path).map_err(|error| failed(&format!("make the {what} socket"), &error))
}

/// The channels of a machine: that of the agent first.
fn channels(spec: &VmSpec, runtime: &RuntimeDir) -> Result<Vec<(String, OwnedFd)>, Failure> {
    let mut channels = Vec::new();
    if spec.guest_agent {
        let socket = listen(runtime.agent(), "guest agent's")?;
        channels.push((AGENT_CHANNEL.to_owned(), socket.into()));
    }
    for name in &spec.channels {
        let socket = listen(runtime.channel(name), "channel's")?;
        channels.push((name.clone(), socket.into()));
    }
    Ok(channels)
}

fn private_file(path: &Path) -> io::Result<File> {
    File::options()
        .read(true)
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(path)
}

/// Moves the logs of the last run aside and makes new ones.
fn open_logs(logs: &LogDir) -> io::Result<((OwnedFd, OwnedFd), File)> {
    logs.create()?;
    for (current, previous) in [
        (logs.serial(), logs.serial_previous()),
        (logs.vmm(), logs.vmm_previous()),
    ] {
        match fs::rename(current, previous) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    let serial = (
        private_file(&logs.serial())?.into(),
        private_file(&logs.serial_old())?.into(),
    );
    let log = File::options()
        .append(true)
        .create(true)
        .mode(0o600)
        .open(logs.vmm())?;
    Ok((serial, log))
}
