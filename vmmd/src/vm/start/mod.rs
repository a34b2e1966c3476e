//! Start of a VM: from its spec to a booted `vmm`. On a failure, everything that the start created
//! is removed before the failure is returned.

mod failures;
mod firmware;
mod fork;
mod iso;
mod kernel;
mod prepare;
pub(in crate::vm) mod rollback;
mod seed;
mod tpm;
mod vendor;

use std::{
    collections::BTreeMap,
    fs::File,
    io,
    os::fd::{AsRawFd as _, OwnedFd},
    path::Path,
    pin::pin,
    sync::Arc,
    time::{Duration, Instant},
};

use tokio::{
    sync::{Mutex, oneshot},
    task::spawn_blocking,
    time::timeout,
};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;
use vmm_protocol::vmm::{self, Boot, HelloReply, request::Op};
use vmmd_spec::{
    disk::Format,
    vm::{self, VmSpec},
};

pub use self::failures::refused;
use vmmd_host::{
    cgroup::{Group, LEAVING, facts},
    failure::{Failure, Kind},
    image_process::Job,
    ledger::{Claim, FileId},
    process::Process,
    sys::clone::FIRST_FD,
};
use vmmd_objects::{
    event::{Draft, Object},
    operation::{Progress, Reporter},
};
use vmmd_store::store_failure;
use vmmd_store::{ReplacingRecord, VmRecord};

use self::{
    failures::{GONE, OUT_OF_MEMORY, cancelled, died, failed, out_of_memory},
    fork::{Spawn, spawn},
    prepare::{Checked, Made, check, make},
};
use super::{
    instance::{AgentState, Health, Instance, Unreaped, link::State},
    machine::{self, Parts},
};
use crate::{
    control::{Client, Notices},
    disk::moved,
    files::{self, Known, OpenDisk},
    host::Host,
    paths::{NonVolatileDir, RuntimeDir},
    registry::{pods::Pod, vms::command::Restore},
    share::{self, Keepers, Run, Serving},
};

/// How long a `vmm` may take from its fork to a booted machine. Loading a kernel from a slow disk is the longest part.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Guest RAM in bytes that is touched in a second at the least, when it is to be there before the guest starts.
const TOUCHED_PER_SECOND: u64 = 256 << 20;
/// How long a machine may take that comes from another node.
const RECEIVING: Duration = Duration::from_secs(24 * 60 * 60);
/// Bytes of a snapshot that are read in a second at the least.
const READ_PER_SECOND: u64 = 32 << 20;

/// Parameters of a start.
#[derive(Debug)]
pub struct Plan {
    /// The VM.
    pub uid: Uuid,
    /// The VM was placed on the node before: whether the node takes VMs is not asked.
    pub is_here: bool,
    /// Its validated spec.
    pub spec: VmSpec,
    /// Record that the store must have before the fork. Files other than those in the record are
    /// refused.
    pub record: VmRecord,
    /// The user id that it runs with; what else it needs is taken by the start.
    pub claim: Claim,
    /// Trace of the request.
    pub trace: String,
    /// The operation that it is part of.
    pub report: Reporter,
    /// Hears it when the start has failed, and its process was killed and does not die.
    pub lingers: oneshot::Sender<Unreaped>,
    /// Held while the VM's files are changed: the start waits for its release.
    pub offline: Arc<Mutex<()>>,
    /// Source of a restore; without it the machine boots.
    pub restore: Option<Box<Restore>>,
    /// The firmware begins with new variables, and that of FIRMWARE_TYPE_AUTO is chosen again.
    pub reset_nvram: bool,
}

impl Plan {
    /// Whether the machine comes from another node.
    fn comes(&self) -> bool {
        self.restore.as_ref().is_some_and(|restore| restore.stream)
    }

    /// Whether the boot files come with the machine.
    fn receives_boot(&self) -> bool {
        self.comes() && matches!(self.spec.boot, vm::Boot::Disk { .. })
    }
}

/// Result of a successful start.
#[derive(Debug)]
pub struct Started {
    /// The run.
    pub instance: Instance,
    /// The files that it was started with.
    pub files: Known,
    /// Firmware that was chosen for it ([`Hardware::firmware`](vmmd_store::Hardware::firmware)).
    pub firmware: i32,
    /// Directory of its cgroup, if that is below the cgroup of a pod.
    pub cgroup: String,
    /// Unfinished part of a restore, which the next start completes.
    pub replacing: Option<ReplacingRecord>,
}

/// Steps of a start, as its operation counts them: checks, the process, the machine.
pub const STEPS: u64 = 3;

/// Starts it. `cancel` ends the attempt at any time.
pub async fn start(host: Arc<Host>, mut plan: Plan, cancel: CancellationToken) -> Result<Started, Failure> {
    let began = Instant::now();
    let name = plan.record.name.clone();
    let offline = Arc::clone(&plan.offline);
    if offline.try_lock().is_err() {
        plan.report.progress(
            Progress::steps(0, STEPS),
            "waiting until its disks are resized or copied",
        );
    }
    let _files_are_whole = tokio::select! {
        whole = offline.lock() => whole,
        () = cancel.cancelled() => return Err(cancelled(&name)),
    };
    rollback::take_up(&host, &mut plan.record, None).await?;
    let mut replacing = None;
    let result = bring_up(&host, plan, &cancel, began, &mut replacing).await;
    if result.is_err()
        && let Some(replacing) = replacing
    {
        rollback::remove(&host, &name, replacing).await;
    }
    result
}

/// Starts it; `replacing` are copies that are made for it meanwhile.
async fn bring_up(
    host: &Arc<Host>,
    plan: Plan,
    cancel: &CancellationToken,
    began: Instant,
    replacing: &mut Option<ReplacingRecord>,
) -> Result<Started, Failure> {
    let blocking_host = Arc::clone(host);
    let name = plan.record.name.clone();
    let paths = files::named(&plan.spec, &host.sources());
    let checking = host.pools.starts.run(&paths, move || {
        let checked = check(&blocking_host, &plan)?;
        Ok::<_, Failure>((plan, checked))
    });
    // A cancel needs no cleanup yet.
    let (mut plan, checked) = tokio::select! {
        checked = checking => checked??,
        () = cancel.cancelled() => return Err(cancelled(&name)),
    };
    let prepared = rollback::prepare(host, &mut plan, checked, cancel).await;
    replacing.clone_from(&plan.record.replacing);
    let mut checked = prepared?;
    tokio::select! {
        opened = firmware::open(host, &mut plan, &mut checked.files) => opened?,
        () = cancel.cancelled() => return Err(cancelled(&name)),
    }
    if plan.receives_boot() {
        kernel::expect(host, &mut checked.files).await?;
    } else {
        tokio::select! {
            found = kernel::find(host, &name, &plan.spec, &mut checked.files) => found?,
            () = cancel.cancelled() => return Err(cancelled(&name)),
        }
    }
    plan.report
        .progress(Progress::steps(1, STEPS), "making the vmm process");
    let uid = plan.uid;
    place(host, &mut plan, checked.pod.as_deref());
    let blocking_host = Arc::clone(host);
    let (name, limits) = (plan.record.name.clone(), checked.limits.clone());
    let spec = plan.spec.clone();
    let made = blocking(move || make(&blocking_host, uid, &name, &spec, &limits)).await;
    let result = match made {
        Ok(made) => run(host, plan, checked, made, cancel, began).await,
        Err(failure) => Err(failure),
    };
    if result.is_err() {
        let host = Arc::clone(host);
        let cleaned = spawn_blocking(move || clean_up(&host, uid)).await;
        if let Err(error) = cleaned.unwrap_or_else(|error| Err(io::Error::other(error))) {
            tracing::warn!(%uid, %error, "clean up after a failed start");
        }
    }
    result
}

/// Notes where the cgroup of the run is: that of a VM of a pod is below that of the launcher.
fn place(host: &Host, plan: &mut Plan, pod: Option<&Pod>) {
    let dir = pod.map(|pod| pod.cgroup.join("vmm"));
    if let Some(run) = &mut plan.record.instance {
        let path = dir.as_deref().map(Path::to_string_lossy);
        run.cgroup = path.unwrap_or_default().into_owned();
    }
    if let Some(parent) = &host.cgroups {
        parent.place(plan.uid, dir);
    }
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Failure> + Send + 'static,
) -> Result<T, Failure> {
    let result = spawn_blocking(work).await;
    result.unwrap_or_else(|error| Err(Failure::internal(error.to_string())))
}

/// Work on a disk of the VM in a process without rights. The disk and the images below it are opened again for reading, through the page
/// cache and without the lock of the VM's own descriptors. `further` are options with a descriptor each.
fn disk_job(
    command: &'static str,
    opened: &OpenDisk,
    block: u32,
    further: Vec<(&'static str, OwnedFd)>,
    deadline: Duration,
) -> io::Result<Job> {
    let again = |fd: &OwnedFd| {
        Ok::<OwnedFd, io::Error>(File::open(format!("/proc/self/fd/{}", fd.as_raw_fd()))?.into())
    };
    let word = |format| match format {
        Format::Raw | Format::Iso => "raw".to_owned(),
        Format::Qcow2 => "qcow2".to_owned(),
    };
    let mut fds = Vec::new();
    let mut add = |fd| {
        fds.push(fd);
        FIRST_FD.saturating_add(fds.len() - 1).to_string()
    };
    let mut arguments = vec!["--fd".to_owned(), add(again(&opened.fd)?)];
    arguments.extend(["--format".to_owned(), word(opened.format)]);
    arguments.extend(["--logical-block".to_owned(), block.to_string()]);
    for (option, fd) in further {
        arguments.extend([option.to_owned(), add(fd)]);
    }
    for (fd, format) in &opened.backing {
        arguments.extend(["--backing-fd".to_owned(), add(again(fd)?)]);
        arguments.extend(["--backing-format".to_owned(), word(*format)]);
    }
    Ok(Job {
        command,
        arguments,
        fds,
        deadline,
    })
}

/// Removes a run's files, metadata and cgroup from the node, and its network from its pod. Its process must have ended.
pub fn clean_up(host: &Host, uid: Uuid) -> io::Result<()> {
    host.logs.forget(uid);
    let pod = vmmd_network::close_pod(host.for_networks(), uid);
    let metadata = vmmd_network::withdraw_metadata(host.for_networks(), uid);
    let runtime = RuntimeDir::of(&host.config, uid).remove();
    let group = host.cgroups.as_ref().map_or(Ok(()), |parent| {
        let cleared = parent.group(uid).clear();
        parent.place(uid, None);
        cleared
    });
    runtime.and(group).and(metadata).and(pod)
}

async fn run(
    host: &Arc<Host>,
    plan: Plan,
    mut checked: Checked,
    made: Made,
    cancel: &CancellationToken,
    began: Instant,
) -> Result<Started, Failure> {
    let (comes, receives_boot) = (plan.comes(), plan.receives_boot());
    let Plan {
        uid,
        is_here: _,
        spec,
        mut record,
        claim,
        trace,
        report,
        lingers,
        offline: _,
        restore,
        reset_nvram: _,
    } = plan;
    let name = record.name.clone();
    let hardware = record.instance.as_ref().and_then(|run| run.hardware.clone());
    let hardware = hardware.unwrap_or_default();
    let ids = spec.disks.iter().zip(&checked.files.disks);
    let ids: BTreeMap<_, _> = ids
        .map(|(disk, opened)| (disk.name.to_string(), opened.ids.clone()))
        .collect();
    claim.set_disks(ids.values().flatten().copied().collect());
    let mut taps = Vec::new();
    for (index, nic) in spec.nics.iter().enumerate() {
        let end = machine::nic_end(uid, &hardware, nic.name.as_str());
        let end = end.ok_or_else(|| Failure::internal(format!("no slot of NIC \"{}\"", nic.name)))?;
        taps.push(vmmd_network::open_tap(host.for_networks(), uid, &name, index, nic, end).await?);
        if let (true, Some(instance), vm::Attachment::Network { name, .. }) =
            (nic.metadata, &checked.metadata, &nic.attachment)
        {
            vmmd_network::publish_metadata(host.for_networks(), name.as_str(), uid, instance)?;
        }
    }
    let runtime = RuntimeDir::of(&host.config, uid);
    let (client, notices) = Client::connect(&runtime.control())
        .await
        .map_err(|error| failed("connect to the control socket", &error))?;
    let client = client.traced(&trace);
    if cancel.is_cancelled() {
        return Err(cancelled(&name));
    }
    // A stop cancels the start before it writes the record.
    record.files = std::mem::take(&mut checked.known);
    let written = host.store.put_unless(cancel, &record).await;
    if !written.map_err(store_failure)? {
        return Err(cancelled(&name));
    }

    let received: Vec<_> = match comes {
        true => moved::along(&spec.disks)
            .map(|(in_vm, _)| in_vm.to_owned())
            .collect(),
        false => Vec::new(),
    };
    let Checked {
        kvm,
        files,
        known: _,
        executable,
        pod,
        swtpm,
        limits: _,
        clock_offsets,
        metadata: _,
        replaced: _replaced,
    } = checked;
    let Made {
        random,
        serial,
        control,
        console,
        vnc,
        hvc,
        channels,
        exit,
        lock,
        log,
        group,
    } = made;
    let lifeline = pod.as_ref().map(|pod| pod.lifeline.try_clone()).transpose();
    let lifeline = lifeline.map_err(|error| failed("copy the lifeline of the VM's pod", &error))?;
    drop(pod);
    let cgroup = record.instance.as_ref().map(|run| run.cgroup.clone());
    let cgroup = cgroup.unwrap_or_default();
    let program = Spawn {
        executable,
        control,
        console,
        exit,
        lock,
        log,
        group,
        lifeline,
        uid: claim.user(),
    };
    // Before the fork: later failures have to end the process.
    let snapshot = restore.as_ref().and_then(|restore| restore.file.as_ref());
    let snapshot = snapshot.map(|file| file.try_clone()).transpose();
    let snapshot = snapshot.map_err(|error| failed("open the snapshot", &error))?;
    let memory = spec.memory;
    let serving = tokio::select! {
        serving = share::serve(host, uid, spec.shares.clone(), None) => serving?,
        () = cancel.cancelled() => return Err(cancelled(&name)),
    };
    let state = NonVolatileDir::of(&host.config, uid);
    let (process, swtpm, free_huge_pages) = blocking(move || {
        let swtpm = swtpm.map(|executable| tpm::serve(&executable, &program, &state));
        let swtpm = swtpm.transpose()?;
        Ok((spawn(&program)?, swtpm, facts::free_huge_pages_for(memory)))
    })
    .await?;
    let swtpm = swtpm.map(tpm::Swtpm::keep).transpose();
    let swtpm = swtpm.map_err(|error| failed("watch swtpm", &error))?;
    let (mut sharers, mut share_sockets) = (Vec::new(), Vec::new());
    for Serving { child, socket, .. } in serving {
        let watched = child.watched(Process::new);
        sharers.push(watched.map_err(|error| failed("watch the process of a share", &error))?);
        share_sockets.push(socket);
    }
    let forked = Instant::now();
    report.progress(Progress::steps(2, STEPS), "booting the machine");
    let process = process
        .watched(Process::new)
        .map_err(|error| failed("watch the vmm", &error))?;
    let (machine, mut fds) = machine::assemble(
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
            vnc,
            hvc,
            channels,
            shares: share_sockets,
            tpm: swtpm,
            clock_offsets,
            free_huge_pages,
        },
    );
    let from = restore.as_ref().zip(snapshot);
    let boot = Boot {
        machine: Some(machine),
        restore: from.as_ref().map(|(restore, _)| vmm::Restore {
            snapshot_fd: u32::try_from(fds.len()).unwrap_or(u32::MAX),
            on_demand: restore.on_demand,
            stream: restore.stream,
            disks: received,
            boot_files: receives_boot,
        }),
        paused: restore.as_ref().is_some_and(|restore| restore.stream),
    };
    let copied = match from {
        Some((restore, file)) => {
            fds.push(file);
            restore.bytes
        }
        None => 0,
    };
    let patience = match boot.paused {
        // The sender of the stream reports a timeout.
        true => RECEIVING,
        false => patience(&spec) + Duration::from_secs(copied / READ_PER_SECOND),
    };
    let booted = tokio::select! {
        booted = timeout(patience, boot_machine(&client, boot, fds)) => booted.unwrap_or_else(|_| {
            let message = format!("the vmm did not boot the machine within {} s", patience.as_secs());
            Err(Failure::internal(message))
        }),
        () = cancel.cancelled() => Err(cancelled(&name)),
        signal = process.ended() => Err(died(&runtime, signal)),
    };
    let booted = match booted {
        Ok(hello) => {
            let committed = rollback::commit(host, &mut record, cancel).await;
            committed.map(|replacing| (hello, replacing))
        }
        Err(failure) => Err(failure),
    };
    match booted {
        Ok((hello, replacing)) => {
            // Times of the daemon's and the vmm's part of a start; benchmarks read them.
            let (daemon_us, vmm_us) = ((forked - began).as_micros(), forked.elapsed().as_micros());
            tracing::info!(vm = name, daemon_us, vmm_us, "started");
            let group = host.cgroups.as_ref().map(|parent| parent.group(uid));
            let run = Run {
                uid,
                vm: &name,
                vmm: &process,
            };
            let shares = Keepers::begin(host, &run, &spec, sharers);
            Ok(Started {
                instance: Instance {
                    shares,
                    ..instance((process, group), client, notices, claim, ids, hello)
                },
                files: record.files,
                firmware: hardware.firmware,
                cgroup,
                replacing,
            })
        }
        Err(failure) => {
            end(host, uid, &name, &process, lingers).await;
            for sharer in sharers {
                // Where there are no cgroups it has only lost its connection.
                sharer.kill();
                sharer.ended().await;
            }
            if out_of_memory(host, uid).await {
                return Err(Failure::new(Kind::Exhausted, "OUT_OF_MEMORY", OUT_OF_MEMORY));
            }
            // The exit record has more detail than a lost connection.
            Err(if failure.reason == GONE {
                died(&runtime, None)
            } else {
                failure
            })
        }
    }
}

/// Kills the process and its cgroup and waits for their end. Reports a wait longer than
/// [`LEAVING`].
async fn end(host: &Host, uid: Uuid, name: &str, process: &Process, lingers: oneshot::Sender<Unreaped>) {
    process.kill();
    let mut ending = pin!(async {
        process.ended().await;
        if let Some(parent) = &host.cgroups {
            parent.group(uid).end().await;
        }
    });
    if timeout(LEAVING, &mut ending).await.is_err() {
        // The actor reports it, unless the actor is gone.
        if let Err(what) = lingers.send(Unreaped::Vmm) {
            let object = Object::Vm(name.to_owned(), uid);
            let draft = Draft::warning(object, what.reason(), what.message());
            host.events.emit(draft);
        }
        ending.await;
    }
}

/// How long the boot may take.
fn patience(spec: &VmSpec) -> Duration {
    let touched = spec.memory.prefault || spec.memory.huge_pages.is_some();
    let bytes = if touched { spec.memory_bytes } else { 0 };
    TIMEOUT + Duration::from_secs(bytes / TOUCHED_PER_SECOND)
}

fn instance(
    (process, group): (Process, Option<Group>),
    client: Client,
    notices: Notices,
    claim: Claim,
    disks: BTreeMap<String, Vec<FileId>>,
    hello: HelloReply,
) -> Instance {
    let link = State::Up(client, notices).into();
    Instance {
        process,
        group,
        exited: None,
        link,
        claim,
        disks,
        version: hello.build,
        guest_resets: 0,
        crash_resets: 0,
        panicked: false,
        paused_for_panic: false,
        silent: false,
        lingering: None,
        ended: None,
        shares: Keepers::default(),
        open_channels: Vec::new(),
        agent: AgentState::default(),
        health: Health::default(),
    }
}

async fn boot_machine(client: &Client, boot: Boot, fds: Vec<OwnedFd>) -> Result<HelloReply, Failure> {
    let hello = client.hello().await.map_err(|error| refused(&error))?;
    let booted = client.request(Op::Boot(boot), &fds).await;
    booted.map_err(|error| refused(&error))?;
    Ok(hello)
}
