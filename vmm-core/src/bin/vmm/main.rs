//! The program `vmm`: one virtual machine.
//!
//! `vmm serve` ([`serve`]) is what vmmd starts; `vmm run` ([`run`]) boots a VM without it. Both end up in
//! [`vmm_core::lifecycle::driver`].

mod args;
mod control;
mod exit_code;
mod exit_record;
mod run;
mod sandbox;
mod serve;
mod sys;

use std::io::{self, IsTerminal};

use clap::Parser;
use tracing::Level;
use tracing_subscriber::{filter::Targets, fmt, layer::SubscriberExt, util::SubscriberInitExt};

use args::{Cli, Command};
use run::terminal::LogOutput;

fn main() {
    sys::keep_memory_small();
    let cli = Cli::parse();
    init_log(&cli.command);
    exit_record::install_panic_hook();
    let result = match &cli.command {
        Command::Run(args) => run::run(args),
        Command::Serve(args) => serve::serve(args),
    };
    let code = result.unwrap_or_else(|error| {
        eprintln!("vmm: {error:#}");
        exit_code::ERROR
    });
    std::process::exit(code);
}

/// To standard error, which journald catches under the daemon and stamps with the time.
fn init_log(command: &Command) {
    let level = match command {
        // The terminal is the guest's.
        Command::Run(_) => Level::WARN,
        Command::Serve(_) => Level::INFO,
    };
    let filter = std::env::var("VMM_LOG")
        .ok()
        .and_then(|filter| filter.parse().ok());
    let filter: Targets = filter.unwrap_or_else(|| Targets::new().with_default(level));
    let lines = fmt::layer()
        .with_writer(|| LogOutput)
        .with_ansi(io::stderr().is_terminal())
        .without_time()
        .with_target(false);
    tracing_subscriber::registry().with(lines).with(filter).init();
}
