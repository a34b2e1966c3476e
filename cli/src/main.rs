//! `vmmctl`, the operator's tool for vmmd.

#[allow(
    rustdoc::broken_intra_doc_links,
    reason = "these comments are help texts, which have brackets"
)]
mod args;
mod client;
mod command;
mod complete;
mod console;
mod contexts;
mod failure;
#[cfg(test)]
mod hints;
mod manifest;
mod output;
mod screen;
mod tls;

use std::process::ExitCode;

use clap::{CommandFactory as _, Parser as _};

use crate::failure::{Code, Failure};

fn main() -> ExitCode {
    // The completer of a context is added here: `contexts` is below `complete`.
    complete::answer(|| args::Cli::command().mut_arg("context", |option| option.add(complete::contexts())));
    let cli = args::Cli::try_parse_from(args::canonical(std::env::args_os()))
        .unwrap_or_else(|error| command::habits::improved(error).exit());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let result = match runtime {
        Ok(runtime) => runtime.block_on(command::run(cli)),
        Err(error) => Err(vec![Failure::new(Code::Other, format!("cannot start: {error}"))]),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failures) => {
            for failure in &failures {
                eprintln!("{}: {failure}", failure.code.severity());
            }
            ExitCode::from(failures.first().map_or(Code::Other, |failure| failure.code) as u8)
        }
    }
}
