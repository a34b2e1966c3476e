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
use tracing_subscriber::{
    filter::Targets,
    fmt::{
        self,
        format::Writer,
        time::{FormatTime, SystemTime},
    },
    layer::SubscriberExt,
    util::SubscriberInitExt,
};

use args::{Cli, Command};
use run::terminal::LogOutput;

fn main() {
    let cli = Cli::parse();
    sys::keep_memory_small();
    init_log(&cli.command);
    exit_record::install_panic_hook();
    if let Err(error) = sys::fatal::install() {
        tracing::warn!(%error, "a signal that ends this process leaves no exit record");
    }
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

/// Logs to standard error, with timestamps for `vmm serve` only.
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
        .with_timer(Timer {
            on: matches!(command, Command::Serve(_)),
        })
        .with_target(false);
    tracing_subscriber::registry().with(lines).with(filter).init();
}

struct Timer {
    on: bool,
}

impl FormatTime for Timer {
    fn format_time(&self, writer: &mut Writer<'_>) -> std::fmt::Result {
        if self.on {
            SystemTime.format_time(writer)
        } else {
            Ok(())
        }
    }
}
