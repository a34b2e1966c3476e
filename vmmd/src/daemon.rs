//! Assembly of the daemon: opens its parts, adopts the records of the last run, serves, and ends in order.

use std::{
    fs::{self, DirBuilder, File},
    os::unix::fs::{DirBuilderExt, OpenOptionsExt},
    path::{Path, PathBuf},
    sync::{Arc, OnceLock},
};

use anyhow::Context;
use rustix::process::{Resource, getrlimit, setrlimit};
use tokio::{
    signal::unix::{Signal, SignalKind, signal},
    sync::{mpsc, watch},
    task::JoinSet,
};
use tokio_util::sync::CancellationToken;
use vmmd_host::capacity;
use vmmd_host::cgroup;
use vmmd_host::clock;
use vmmd_host::image_process::ImageProcesses;
use vmmd_host::ledger::Ledger;
use vmmd_host::lock;
use vmmd_host::pool;
use vmmd_host::text;
use vmmd_images::registry::Images;
use vmmd_network::{Links, Networks};
use vmmd_objects::event;
use vmmd_objects::operation;
use vmmd_objects::registry::Registry;
use vmmd_objects::request;
use vmmd_store::Store;

use crate::disk;
use crate::grpc;
use crate::metrics;
use crate::migration;
use crate::node;
use crate::peers;
use crate::pod;
use crate::registry;
use crate::screen;
use crate::service;
use crate::snapshot;
use crate::state_dir;
use crate::tls;
use crate::vm;
use crate::{
    auth::Audit,
    config::Config,
    grpc::Socket,
    host::Host,
    log_rotation::LogGuard,
    registry::{
        disks::Disks,
        screens::Screens,
        snapshots::Snapshots,
        vms::{Vms, command::ResumeMigration},
    },
};

/// In the runtime folder: the bound address of the API over TCP, as long as that is served.
const ADDRESS_FILE: &str = "tcp.addr";

/// Runs the daemon until a signal ends it.
pub async fn run(config: Config) -> anyhow::Result<()> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let hangup = signal(SignalKind::hangup())?;
    raise_descriptor_limit();
    make_dirs(&config)?;
    // Held as long as the daemon runs.
    let _state_lock = lock_dir(&config.state_dir).await?;
    let _run_lock = lock_dir(&config.run_dir).await?;
    lock::released(&Store::file(&config.state_dir))
        .await
        .context("look at the store")?;
    let credentials = std::env::var_os("CREDENTIALS_DIRECTORY").map(PathBuf::from);
    let key = vmmd_store::Key::find(
        config.secrets_key.as_deref(),
        credentials.as_deref(),
        &config.state_dir,
    );
    let key = key.context("the key of the VMs' secrets")?;
    let (store, records) = Store::open(&config.state_dir, &key)
        .with_context(|| format!("store in {}", config.state_dir.display()))?;
    let cgroups = cgroup::Parent::open(config.cgroup.as_deref()).context("make the cgroup for VMs")?;
    if cgroups.is_none() {
        tracing::warn!("the node has no cgroup v2 hierarchy: VMs run without cgroups of their own");
    }
    let (vmm, vmm_image, netd) = (config.vmm(), config.vmm_image(), config.netd());
    let ledger = Ledger::new(config.vm_uids);
    let image_processes = ImageProcesses {
        program: vmm_image,
        ledger: Arc::clone(&ledger),
        cgroups: cgroups.clone(),
    };
    for (program, effect) in [
        (&vmm, "no VM can be started"),
        (
            &image_processes.program,
            "no image can be imported, created as qcow2 or searched for a kernel",
        ),
        (&netd, "VMs in managed networks get no addresses"),
    ] {
        if !program.is_file() {
            tracing::warn!(
                "{} does not exist: {effect}; install vmmd again",
                program.display()
            );
        }
    }
    let boot_id = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let boot_id = boot_id.trim().to_owned();
    let events = event::Events::open(&config.state_dir, &boot_id).context("begin the thread of events")?;
    let _closing = event::Closing(events.clone());
    let (attend, left) = mpsc::unbounded_channel();
    let moved = records.history.moved();
    let (run, nonces) = (records.history.run, records.history.nonces.clone());
    let host = Arc::new(Host {
        attend,
        vmm,
        image_processes,
        netd,
        node: registry::node::State::new(store.clone(), records.node),
        operations: operation::Operations::new(store.clone(), records.operations),
        store,
        cpus: capacity::Cpus::read(Path::new("/"), &config.kvm_device),
        ledger,
        cgroups,
        links: Links::connect().context("connect to the kernel's network configuration")?,
        disks: Disks::new(Registry::new(run, nonces.clone(), records.history.disks.clone())),
        images: Images::new(Registry::new(run, nonces.clone(), records.history.images.clone())),
        networks: Networks::new(Registry::new(
            run,
            nonces.clone(),
            records.history.networks.clone(),
        )),
        vms: Vms::new(run, nonces, records.history.vms),
        aborts: registry::aborts::Aborts::default(),
        clients: registry::clients::Clients::default(),
        snapshots: Snapshots::default(),
        agents: registry::agents::Agents::default(),
        channels: registry::channels::Channels::default(),
        consoles: Arc::default(),
        pods: Arc::default(),
        certificates: OnceLock::new(),
        screens: Screens::new(&config.limits),
        peers: peers::Peers::new(config.tcp.clone()),
        requests: request::Requests::default(),
        logs: LogGuard::start(events.clone()).context("watch the logs of VMs")?,
        events,
        pools: pool::Pools::new(config.limits.files()),
        state_dirs: registry::state_dirs::StateDirs::default(),
        boot_id,
        started_ms: text::now_ms(),
        clock_steps: watch::Sender::new(()),
        stopping: CancellationToken::new(),
        config,
    });
    host.events.emit(event::Draft::normal(
        event::Object::Node,
        "DaemonStarted",
        format!("vmmd {} has started", env!("CARGO_PKG_VERSION")),
    ));
    if let Err(error) = host.node.identify().await {
        tracing::warn!(%error, "give the node its UUID");
    }
    // Conditions are seen from the daemon's start on.
    match node::check::look(&host).await {
        Ok(look) => drop(look.conditions(&host).await),
        Err(error) => tracing::warn!(%error, "look at the node"),
    }
    node::drain::give_up(&host).await;
    // A VM with an unreadable name may have any name.
    let has_vm = |name: &str| {
        let mut unreadable = records.unreadable.iter();
        records.vms.iter().any(|vm| vm.name == name)
            || unreadable.any(|vm| vm.name.is_empty() || vm.name == name)
    };
    disk::restore(&host, records.disks, has_vm).await;
    vmmd_images::restore(&host, records.images).await;
    snapshot::adopt(&host, records.snapshots).await;
    host.networks.adopt(host.for_networks(), records.networks);
    for abort in records.aborts {
        let was_read = true;
        let _ = host.attend.send(ResumeMigration::Abort { abort, was_read });
    }
    vm::recovery::reconcile::reconcile(&host, records.vms, records.unreadable).await;
    host.operations.give_up_left(|kind, uid| match kind {
        operation::Type::VmDelete if uid.parse().is_ok_and(|uid| host.vms.find(uid).is_none()) => {
            Some("the VM is deleted")
        }
        operation::Type::VmMigrate if moved.contains(uid) => Some("the VM runs on the other node"),
        _ => None,
    });
    let socket = Socket::bind(&host.config.socket(), &host.config)
        .with_context(|| format!("API socket {}", host.config.socket().display()))?;
    if let Some(listen) = &host.config.metrics.listen {
        let listener = metrics::Listener::bind(listen).await;
        let listener = listener.with_context(|| format!("listen for Prometheus on {listen}"))?;
        tokio::spawn(listener.serve(Arc::clone(&host)));
    }
    let pods = host.config.pod_socket();
    let pods = pod::bind(&pods).with_context(|| format!("socket for pods {}", pods.display()))?;
    screen::serve(&host).await?;
    let audit = Arc::new(Audit::open(host.config.audit_log.as_deref()).context("open the audit log")?);
    let tcp = listen(&host).await?;
    let mut serving = tokio::spawn(grpc::serve(Arc::clone(&host), socket, tcp, Arc::clone(&audit)));
    // These tasks run until the daemon ends.
    let mut parts = JoinSet::new();
    parts.spawn(migration::attend(Arc::clone(&host), left));
    parts.spawn(pod::serve(Arc::clone(&host), pods));
    parts.spawn(reopen(Arc::clone(&audit), hangup));
    parts.spawn(watch_networks(Arc::clone(&host)));
    parts.spawn(watch_filter(Arc::clone(&host)));
    parts.spawn(state_dir::keep(Arc::clone(&host)));
    parts.spawn(service::watchdog(host.store.clone()));
    parts.spawn(clock::watch_steps(host.clock_steps.clone()));
    parts.spawn(service::tell_failures(host.store.clone(), host.events.clone()));
    service::ready();
    tracing::info!(
        version = env!("CARGO_PKG_VERSION"),
        vms = host.vms.list().len(),
        "ready"
    );
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
        // In any case systemd restarts the daemon, and VMs continue to run.
        ended = parts.join_next() => anyhow::bail!("a part of the daemon has ended: {ended:?}"),
        ended = &mut serving => anyhow::bail!("the API is not served any more: {ended:?}"),
    }
    tracing::info!("stopping; running VMs continue");
    service::stopping();
    host.events.emit(event::Draft::normal(
        event::Object::Node,
        "DaemonStopping",
        "vmmd was asked to stop; VMs run on",
    ));
    host.stopping.cancel();
    let served = serving.await;
    let _ = fs::remove_file(host.config.run_dir.join(ADDRESS_FILE));
    audit.flush().await;
    if let Err(error) = host.store.flush().await {
        tracing::warn!(%error, "write the last operations");
    }
    served.context("serve the API")?
}

/// Binds the TCP listener, if one is configured. With unusable certificates the listener exists too
/// and waits for new ones: the UNIX socket must work in any case.
async fn listen(host: &Arc<Host>) -> anyhow::Result<Option<grpc::Listener>> {
    let address_file = host.config.run_dir.join(ADDRESS_FILE);
    let Some(tcp) = host.config.tcp.clone() else {
        let _ = fs::remove_file(address_file);
        return Ok(None);
    };
    let address = tcp.listen;
    let certificates = Arc::new(tls::Certificates::new(tcp));
    tls::reload(&host.events, &certificates).await;
    let _set_once = host.certificates.set(Arc::clone(&certificates));
    let listener = grpc::Listener::bind(address, Arc::clone(&certificates)).await;
    let listener = listener.with_context(|| format!("listen on {address}"))?;
    let bound = listener.address().context("ask for the bound address")?;
    fs::write(&address_file, format!("{bound}\n"))
        .with_context(|| format!("write {}", address_file.display()))?;
    tracing::info!(address = %bound, "the API is served over TCP");
    tokio::spawn(tls::watch(
        host.events.clone(),
        certificates,
        signal(SignalKind::hangup())?,
    ));
    Ok(Some(listener))
}

/// Releases the network resources of removed NICs at their removal. Periodically compares the node
/// with the configured networks, and repairs differences. Never ends.
async fn watch_networks(host: Arc<Host>) {
    let mut ticks = tokio::time::interval(vmmd_network::PERIOD);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut pods = host.pods.news();
    loop {
        let only_pods = tokio::select! {
            () = host.vms.nic_gone() => {
                host.networks.forget_gone(host.for_networks()).await;
                continue;
            }
            reports = host.networks.declined() => {
                for vm in host.networks.decline(host.for_networks(), reports).await {
                    if let Some(entry) = host.vms.find(vm) {
                        entry.mailbox.offer(registry::vms::command::Command::Addresses);
                    }
                }
                continue;
            }
            _ = ticks.tick() => false,
            () = host.networks.helper_due() => false,
            // A pod may have lost its helper while its launcher was not connected.
            Ok(()) = pods.changed() => true,
        };
        if !only_pods {
            host.networks.reconcile(host.for_networks()).await;
        }
        vmmd_network::serve_pods(host.for_networks()).await;
    }
}

/// Restores the rules of networks whenever another program has changed them. Never ends.
async fn watch_filter(host: Arc<Host>) {
    loop {
        let author = host.networks.filter_changed().await;
        host.networks.restore_filter(host.for_networks(), author).await;
    }
}

/// Reopens the audit log on each `hangup`. Never ends.
async fn reopen(audit: Arc<Audit>, mut hangup: Signal) {
    while hangup.recv().await.is_some() {
        if let Err(error) = audit.reopen().await {
            tracing::error!(%error, "open the audit log again; vmmd still writes to the old file");
        }
    }
}

/// Creates the daemon's folders. All users may enter the folder with the socket, but not its
/// subfolders.
fn make_dirs(config: &Config) -> anyhow::Result<()> {
    let make = |dir: &Path, mode| {
        let made = DirBuilder::new().recursive(true).mode(mode).create(dir);
        made.with_context(|| format!("make {}", dir.display()))
    };
    make(&config.run_dir, 0o755)?;
    make(&config.state_dir, 0o700)?;
    make(&config.log_dir, 0o750)?;
    make(&config.run_dir.join("vms"), 0o700)?;
    make(&config.log_dir.join("vms"), 0o700)
}

/// Keeps a second daemon out of `dir`.
async fn lock_dir(dir: &Path) -> anyhow::Result<File> {
    let path = dir.join("lock");
    let file = File::options()
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(&path);
    let file = file.with_context(|| format!("open {}", path.display()))?;
    let locked = lock::take(file)
        .await
        .with_context(|| format!("lock {}", path.display()))?;
    locked.with_context(|| {
        format!(
            "another vmmd uses {}: stop it, or give this one folders of its own",
            dir.display()
        )
    })
}

/// Each VM takes two descriptors and each client one; the usual soft limit of 1,024 is for programs that use
/// select(2).
fn raise_descriptor_limit() {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    if let Err(error) = setrlimit(Resource::Nofile, limit) {
        tracing::debug!(%error, "raise the limit of descriptors");
    }
}
