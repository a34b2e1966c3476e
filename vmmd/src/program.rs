//! The command line of the program `vmmd`.

use std::{path::PathBuf, thread::available_parallelism, time::Duration};

use anyhow::Context;
use clap::{Parser, Subcommand};
use tokio::runtime;
use vmmd_host::pool;

use crate::{
    config::Config,
    daemon,
    init_certs::{self, InitCerts},
    log,
};

/// Threads of the runtime: the daemon waits far more than it works.
const MAX_WORKERS: usize = 4;
/// How long blocking work under way may take when the daemon ends.
const SHUTDOWN: Duration = Duration::from_secs(2);

/// The per-node hypervisor daemon.
#[derive(Debug, Parser)]
#[command(version, args_conflicts_with_subcommands = true)]
struct Arguments {
    /// Configuration file [default: /etc/vmmd/config.toml, which need not exist]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Only check the configuration
    #[arg(long)]
    check: bool,
    #[command(subcommand)]
    action: Option<Action>,
}

/// Other functions of the program.
#[derive(Debug, Subcommand)]
enum Action {
    /// Make a CA and certificates for the server and for clients, for a first setup of the API over TCP
    InitCerts(InitCerts),
}

/// Runs the program.
///
/// # Errors
///
/// The configuration is invalid, or the daemon cannot start.
pub fn main() -> anyhow::Result<()> {
    let arguments = Arguments::parse();
    if let Some(Action::InitCerts(arguments)) = &arguments.action {
        return init_certs::run(arguments);
    }
    let config = Config::load(arguments.config.as_deref())?;
    if arguments.check {
        return Ok(());
    }
    let log = log::init().context("begin the log")?;
    // Fails when there is one already.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let workers = available_parallelism().map_or(1, usize::from).min(MAX_WORKERS);
    let runtime = runtime::Builder::new_multi_thread()
        .worker_threads(workers)
        .max_blocking_threads(pool::THREADS)
        .enable_all()
        .build()
        .context("start the runtime")?;
    let result = runtime.block_on(daemon::run(config));
    runtime.shutdown_timeout(SHUTDOWN);
    if let Err(error) = &result {
        tracing::error!("{error:#}");
    }
    log.flush();
    result
}
