//! Brings a VM up: from its spec to a booted `vmm`. Whatever fails, everything made on the way is gone again when the
//! failure is returned.

use std::{
    collections::BTreeMap,
    ffi::CString,
    fs::{self, File},
    io,
    os::{
        fd::{AsFd, OwnedFd},
        unix::{fs::OpenOptionsExt, net::UnixListener},
    },
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use proto::{
    model::{nic::Mac, vm::VmSpec},
    vmm::{Boot, ErrorKind, HelloReply, request::Op},
};
use tokio::{sync::mpsc, task::spawn_blocking, time::timeout};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::{
    cgroup::plan::Plan as Limits,
    control::{self, Client},
    failure::{Failure, Kind},
    host::Host,
    ledger::{Claim, FileId},
    lock, network,
    node::{Demand, check::Look, placement},
    paths::{LogDir, RuntimeDir},
    store::{self, VmRecord},
    sys::clone::{self, FIRST_FD, Program},
    text,
    vm::{
        files::{self, Files, Locks},
        instance::{Instance, Link, exit_record},
        limits,
        machine::{self, Parts},
        process::Process,
    },
};

/// How long a `vmm` may take from its fork to a booted machine. Loading a kernel from a slow disk is the longest part.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Guest RAM in bytes that is touched in a second at the least, when it is to be there before the guest starts.
const TOUCHED_PER_SECOND: u64 = 256 << 20;

/// What is to be started.
#[derive(Debug)]
pub struct Plan {
    /// The VM.
    pub uid: Uuid,
    /// Its validated spec.
    pub spec: VmSpec,
    /// What the store is to hold before the fork.
    pub record: VmRecord,
    /// The user id that it runs with; what else it needs is taken by the start.
    pub claim: Claim,
    /// Of the request that it is part of.
    pub trace: String,
}

/// What the VM needs of what is there.
struct Checked {
    kvm: OwnedFd,
    files: Files,
    executable: File,
    limits: Limits,
}

/// What is made for it before the fork.
struct Made {
    random: OwnedFd,
    serial: (OwnedFd, OwnedFd),
    control: UnixListener,
    console: UnixListener,
    exit: File,
    lock: File,
    log: File,
    group: Option<OwnedFd>,
}

/// Starts it. `cancel` ends the attempt at any time.
pub async fn start(host: Arc<Host>, plan: Plan, cancel: CancellationToken) -> Result<Instance, Failure> {
    let began = Instant::now();
    let blocking_host = Arc::clone(&host);
    let (plan, checked) = blocking(move || {
        let checked = check(&blocking_host, &plan)?;
        Ok((plan, checked))
    })
    .await?;
    let uid = plan.uid;
    let blocking_host = Arc::clone(&host);
    let limits = checked.limits.clone();
    let result = match blocking(move || make(&blocking_host, uid, &limits)).await {
        Ok(made) => run(&host, plan, checked, made, &cancel, began).await,
        Err(failure) => Err(failure),
    };
    if result.is_err() {
        let cleaned = spawn_blocking(move || clean_up(&host, uid)).await;
        if let Err(error) = cleaned.unwrap_or_else(|error| Err(io::Error::other(error))) {
            tracing::warn!(%uid, %error, "clean up after a failed start");
        }
    }
    result
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Failure> + Send + 'static,
) -> Result<T, Failure> {
    let result = spawn_blocking(work).await;
    result.unwrap_or_else(|error| Err(Failure::internal(error.to_string())))
}

/// Removes what a run leaves on the node. Its process must have ended.
pub fn clean_up(host: &Host, uid: Uuid) -> io::Result<()> {
    let runtime = RuntimeDir::of(&host.config, uid).remove();
    let group = host
        .cgroups
        .as_ref()
        .map_or(Ok(()), |parent| parent.group(uid).remove());
    runtime.and(group)
}

/// Finds room and files, and changes nothing on the node.
fn check(host: &Host, plan: &Plan) -> Result<Checked, Failure> {
    let Plan { uid, spec, claim, .. } = plan;
    let uid = *uid;
    let (look, demand) = (Look::now(host), Demand::of(spec));
    claim.take(demand, |others| {
        placement::refuse(&placement::decide(&demand.resources, &look.picture(host, others)))
    })?;
    let kvm = files::open_kvm(&host.config.kvm_device)?;
    let files = files::open(spec, &host.sources(), Locks::Take)?;
    let executable = host.open_vmm()?;
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
        executable,
        limits,
    })
}

fn make(host: &Host, uid: Uuid, limits: &Limits) -> Result<Made, Failure> {
    let runtime = RuntimeDir::of(&host.config, uid);
    runtime
        .create()
        .map_err(|error| failed("make the VM's runtime directory", &error))?;
    let logs = LogDir::of(&host.config, uid);
    let (serial, log) = open_logs(&logs).map_err(|error| failed("open the VM's logs", &error))?;
    let group = limits::create(host, uid, limits)?.map(|group| group.descriptor());
    // Listening before the fork: the first connection waits in the queue until the vmm accepts it, so that nobody
    // has to find out when it does. The vmm listens again, which makes it the peer of later connections.
    let listen = |path: &Path| UnixListener::bind(path);
    Ok(Made {
        serial,
        log,
        random: File::open("/dev/urandom")
            .map_err(|error| failed("open the random source", &error))?
            .into(),
        control: listen(&runtime.control()).map_err(|error| failed("make the control socket", &error))?,
        console: listen(&runtime.console()).map_err(|error| failed("make the console socket", &error))?,
        exit: private_file(&runtime.exit()).map_err(|error| failed("make the exit record", &error))?,
        lock: lock::create(&runtime.lock()).map_err(|error| failed("make the VM's lock", &error))?,
        group: group
            .transpose()
            .map_err(|error| failed("open the VM's cgroup", &error))?,
    })
}

fn failed(operation: &str, error: &io::Error) -> Failure {
    let message = format!("{operation}: {}", text::words(error));
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            Failure::new(Kind::Exhausted, "NODE_DISK_FULL", message)
        }
        _ => Failure::internal(message),
    }
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

async fn run(
    host: &Arc<Host>,
    plan: Plan,
    checked: Checked,
    made: Made,
    cancel: &CancellationToken,
    began: Instant,
) -> Result<Instance, Failure> {
    let Plan {
        uid,
        spec,
        record,
        claim,
        trace,
    } = plan;
    let name = record.name.clone();
    let hardware = record.hardware.clone().unwrap_or_default();
    let ids = spec.disks.iter().zip(&checked.files.disks);
    let ids: BTreeMap<_, _> = ids
        .map(|(disk, opened)| (disk.name.to_string(), opened.ids.clone()))
        .collect();
    claim.set_disks(ids.values().flatten().copied().collect());
    let mut taps = Vec::new();
    for (index, nic) in spec.nics.iter().enumerate() {
        let mac = machine::mac(&hardware, nic.name.as_str()).unwrap_or_else(|| Mac::local([0; 6]));
        taps.push(network::open_tap(&host.links, uid, &name, index, nic, mac).await?);
    }
    let runtime = RuntimeDir::of(&host.config, uid);
    let (client, events) = Client::connect(&runtime.control())
        .await
        .map_err(|error| failed("connect to the control socket", &error))?;
    let client = client.traced(&trace);
    if cancel.is_cancelled() {
        return Err(cancelled(&name));
    }
    host.store.put(&record).await.map_err(store_failure)?;

    let Checked {
        kvm,
        files,
        executable,
        limits: _,
    } = checked;
    let Made {
        random,
        serial,
        control,
        console,
        exit,
        lock,
        log,
        group,
    } = made;
    let program = Spawn {
        executable,
        control,
        console,
        exit,
        lock,
        log,
        group,
        uid: claim.uid(),
    };
    let process = blocking(move || spawn(&program)).await?;
    let forked = Instant::now();
    let process =
        Process::new(process.pid, process.pidfd).map_err(|error| failed("watch the vmm", &error))?;
    let (machine, fds) = machine::assemble(
        uid,
        &name,
        &spec,
        &hardware,
        Parts {
            kvm,
            random,
            files,
            taps,
            serial,
        },
    );
    let boot = Boot {
        machine: Some(machine),
        paused: false,
    };
    let patience = patience(&spec);
    let booted = tokio::select! {
        booted = timeout(patience, boot_machine(&client, boot, fds)) => booted.unwrap_or_else(|_| {
            let message = format!("the vmm did not boot the machine within {} s", patience.as_secs());
            Err(Failure::internal(message))
        }),
        () = cancel.cancelled() => Err(cancelled(&name)),
        signal = process.ended() => Err(died(&runtime, signal)),
    };
    match booted {
        Ok(hello) => {
            // What of a start is the daemon's and what the vmm's; benchmarks read it.
            let (daemon_us, vmm_us) = ((forked - began).as_micros(), forked.elapsed().as_micros());
            tracing::info!(vm = name, daemon_us, vmm_us, "started");
            Ok(instance(process, client, events, claim, ids, hello))
        }
        Err(failure) => {
            process.kill();
            process.ended().await;
            if out_of_memory(host, uid).await {
                return Err(Failure::new(Kind::Exhausted, "OUT_OF_MEMORY", OUT_OF_MEMORY));
            }
            // What it wrote itself says more than that it has gone.
            Err(if failure.reason == GONE {
                died(&runtime, None)
            } else {
                failure
            })
        }
    }
}

/// How long the boot may take.
fn patience(spec: &VmSpec) -> Duration {
    let touched = spec.memory.prefault || spec.memory.huge_pages.is_some();
    let bytes = if touched { spec.memory_bytes } else { 0 };
    TIMEOUT + Duration::from_secs(bytes / TOUCHED_PER_SECOND)
}

fn instance(
    process: Process,
    client: Client,
    events: mpsc::Receiver<proto::vmm::Event>,
    claim: Claim,
    disks: BTreeMap<String, Vec<FileId>>,
    hello: HelloReply,
) -> Instance {
    let link = Link::Up(client, events);
    Instance {
        process,
        link,
        claim,
        disks,
        version: hello.build,
        minor: hello.minor,
        guest_resets: 0,
        panicked: false,
        ended: None,
    }
}

struct Spawn {
    executable: File,
    control: UnixListener,
    console: UnixListener,
    exit: File,
    lock: File,
    log: File,
    group: Option<OwnedFd>,
    uid: u32,
}

/// Forks the `vmm`. The daemon's copies of what it gets are closed with `spawn`, above all the lock's.
fn spawn(spawn: &Spawn) -> Result<clone::Child, Failure> {
    let options = ["--control-fd", "--console-fd", "--exit-fd", "--lock-fd"];
    let mut arguments = vec![c"vmm".to_owned(), c"serve".to_owned()];
    for (number, option) in (FIRST_FD..).zip(options) {
        arguments.extend(CString::new(option).ok());
        arguments.extend(CString::new(number.to_string()).ok());
    }
    let program = Program {
        executable: spawn.executable.as_fd(),
        arguments: &arguments,
        fds: &[
            spawn.control.as_fd(),
            spawn.console.as_fd(),
            spawn.exit.as_fd(),
            spawn.lock.as_fd(),
        ],
        output: None,
        log: spawn.log.as_fd(),
        uid: spawn.uid,
        cgroup: spawn.group.as_ref().map(AsFd::as_fd),
    };
    clone::spawn(&program).map_err(|error| failed("start the vmm", &error))
}

async fn boot_machine(client: &Client, boot: Boot, fds: Vec<OwnedFd>) -> Result<HelloReply, Failure> {
    let hello = client.hello().await.map_err(|error| refused(&error))?;
    let booted = client.request(Op::Boot(boot), &fds).await;
    booted.map_err(|error| refused(&error))?;
    Ok(hello)
}

/// Reason of a failure that only says that the connection is gone.
const GONE: &str = "VMM_GONE";

/// What a client is told when a `vmm` does not do what it was asked.
pub fn refused(error: &control::Error) -> Failure {
    let control::Error::Refused(remote) = error else {
        let reason = if matches!(error, control::Error::Closed) {
            GONE
        } else {
            "VMM_FAILED"
        };
        return Failure::new(Kind::Internal, reason, text::chain(error));
    };
    let message = remote.message.clone();
    match remote.kind() {
        ErrorKind::Image => Failure::precondition("IMAGE_UNUSABLE", message),
        ErrorKind::InUse => Failure::precondition("DISK_IN_USE", message),
        ErrorKind::Kvm => Failure::precondition("KVM_UNUSABLE", message),
        ErrorKind::Resources => Failure::new(Kind::Exhausted, "NODE_EXHAUSTED", message),
        _ => Failure::internal(message),
    }
}

const OUT_OF_MEMORY: &str = "the kernel killed the vmm process for want of memory while it booted the machine: the node has less to give than was \
     asked for; stop another VM, or give this one less";

/// Whether that was the end of the process.
async fn out_of_memory(host: &Arc<Host>, uid: Uuid) -> bool {
    let host = Arc::clone(host);
    let killed = spawn_blocking(move || {
        let group = host.cgroups.as_ref().map(|parent| parent.group(uid));
        group.is_some_and(|group| group.oom_killed())
    });
    killed.await.unwrap_or(false)
}

fn died(runtime: &RuntimeDir, signal: Option<i32>) -> Failure {
    let message = match (exit_record(&runtime.exit()), signal) {
        (Some(record), _) if !record.message.is_empty() => record.message,
        (_, Some(signal)) => {
            format!("the vmm process was killed by signal {signal} while it booted the machine")
        }
        _ => "the vmm process ended before the machine was booted; its log says more".to_owned(),
    };
    Failure::new(Kind::Internal, "VMM_FAILED", message)
}

fn cancelled(name: &str) -> Failure {
    Failure::new(
        Kind::Aborted,
        "START_CANCELLED",
        format!("VM \"{name}\" was stopped while it was being started"),
    )
}

/// What a client is told when the store can't be written.
pub fn store_failure(error: store::Error) -> Failure {
    match error {
        store::Error::Full => Failure::new(
            Kind::Exhausted,
            "STORE_FULL",
            "the file system of the daemon's state is full: nothing was changed; make room and try again",
        ),
        error => {
            tracing::error!(%error, "write the store");
            Failure::internal("the daemon's store can't be written: nothing was changed; its log says more")
        }
    }
}
