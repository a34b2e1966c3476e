//! `vmmd-kube`: runs VMs as pods of a Kubernetes cluster.
//!
//! The [`controller`] runs anywhere: it makes a pod with a [`launcher`] for each run of a
//! VirtualMachine ([`crd`]), and the scheduler places the pod. The [`agent`] runs beside the vmmd and
//! the kubelet of a node: it creates the VMs of the pods that the kubelet has started.

mod agent;
mod arguments;
mod backoff;
mod clients;
mod controller;
mod crd;
mod daemon;
mod launcher;
mod leader;
mod metrics;
mod names;
mod provision;
mod run;
mod schema;
mod sources;
mod spec;

use anyhow::Context as _;
use clap::Parser as _;
use k8s_openapi::api::coordination::v1::Lease;
use kube::{Api, CustomResourceExt as _};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tracing_subscriber::{EnvFilter, layer::SubscriberExt as _, util::SubscriberInitExt as _};

use self::{
    arguments::{Action, AgentArguments, Arguments, ControllerArguments},
    clients::Clients,
};

/// Threads: the program waits far more than it works.
const WORKERS: usize = 2;

fn main() -> anyhow::Result<()> {
    let arguments = Arguments::parse();
    if matches!(arguments.action, Action::Crd) {
        print!("{}", crd_yaml()?);
        return Ok(());
    }
    start_log()?;
    let provider = rustls::crypto::ring::default_provider();
    let _ = provider.install_default();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(WORKERS)
        .enable_all()
        .build()?;
    runtime.block_on(run(arguments))
}

async fn run(arguments: Arguments) -> anyhow::Result<()> {
    let clients = Clients::new(arguments.kubeconfig.as_deref()).await?;
    match arguments.action {
        Action::Agent(arguments) => run_agent(clients, arguments).await,
        Action::Controller(arguments) => run_controller(clients, arguments).await,
        Action::Crd => Ok(()),
    }
}

async fn run_agent(clients: Clients, arguments: AgentArguments) -> anyhow::Result<()> {
    let settings = arguments.settings();
    // In a container this is the first process, which is only ended by signals that it handles.
    let mut terminated = signal(SignalKind::terminate())?;
    let daemon = daemon::Daemon::new(arguments.socket);
    tokio::select! {
        () = agent::run(clients, daemon, settings) => anyhow::bail!("the agent has ended"),
        result = metrics::serve(arguments.metrics) => result,
        _ = terminated.recv() => Ok(()),
    }
}

async fn run_controller(clients: Clients, arguments: ControllerArguments) -> anyhow::Result<()> {
    // In a container this is the first process, which is only ended by signals that it handles.
    let terminated = signal(SignalKind::terminate())?;
    let settings = arguments.settings();
    let metrics = arguments.metrics;
    tokio::select! {
        result = lead(clients, arguments, settings, terminated) => result,
        result = metrics::serve(metrics) => result,
    }
}

/// Works as the controller that leads, once it is.
async fn lead(
    clients: Clients,
    arguments: ControllerArguments,
    settings: run::Settings,
    mut terminated: Signal,
) -> anyhow::Result<()> {
    metrics::leads(arguments.no_leader_election);
    if arguments.no_leader_election {
        tokio::select! {
            () = controller::run(clients, settings) => anyhow::bail!("the controller has ended"),
            _ = terminated.recv() => return Ok(()),
        }
    }
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let identity = format!("{host}_{}", uuid::Uuid::new_v4());
    let leases = Api::<Lease>::namespaced(clients.calls.clone(), &arguments.namespace);
    let leadership = leader::Leadership::new(leases, "vmmd-kube-controller", &identity);
    tokio::select! {
        () = leadership.acquire() => {}
        _ = terminated.recv() => {
            // It may have been got in this moment.
            leadership.release().await;
            return Ok(());
        }
    }
    metrics::leads(true);
    tracing::info!("leads as {identity}");
    tokio::select! {
        () = controller::run(clients, settings) => anyhow::bail!("the controller has ended"),
        // All work in progress ends with the process.
        () = leadership.hold() => anyhow::bail!("the lease is lost"),
        _ = terminated.recv() => {
            leadership.release().await;
            Ok(())
        }
    }
}

/// The custom resource's definition as it is in the manifests.
fn crd_yaml() -> anyhow::Result<String> {
    let mut definition = serde_json::to_value(crd::VirtualMachine::crd())?;
    schema::without_empty_defaults(&mut definition);
    let yaml = serde_saphyr::to_string(&definition).context("the definition as YAML")?;
    Ok(format!("# Made by `vmmd-kube crd`.\n{}\n", yaml.trim_end()))
}

fn start_log() -> anyhow::Result<()> {
    let filter =
        EnvFilter::try_from_env("VMMD_KUBE_LOG").unwrap_or_else(|_| EnvFilter::new("info,kube=warn"));
    let registry = tracing_subscriber::registry().with(filter);
    if std::env::var_os("JOURNAL_STREAM").is_some() {
        registry.with(tracing_journald::layer()?).init();
    } else {
        let lines = tracing_subscriber::fmt::layer()
            .with_writer(std::io::stderr)
            .with_ansi(false);
        registry.with(lines).init();
    }
    Ok(())
}
