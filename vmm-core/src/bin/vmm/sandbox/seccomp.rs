//! System calls by kind of thread: [`lists`](super::lists) as BPF programs.
//!
//! Filters only accumulate, so a thread that creates another needs all calls of the new thread. The
//! main thread's filter is therefore the union of all lists. Each new thread installs the filter of
//! its kind before its body runs.
//!
//! One more filter, for all threads, makes clone3(2) fail ([`no_clone3`]).

use std::sync::OnceLock;

use anyhow::{Context, Result, anyhow, bail};
use seccompiler::{BpfProgram, SeccompAction, apply_filter};
use vmm_base::thread::{ThreadKind, set_entry};
use vmm_sandbox::{
    bpf::{self, no_clone3},
    lists::Entry,
};

use super::lists::of;
use crate::args::Seccomp;

/// Action on a call outside the lists; set when the process is limited.
static OTHERWISE: OnceLock<SeccompAction> = OnceLock::new();

/// One program for each of [`ThreadKind::ALL`], made when the first thread of the kind begins.
static PROGRAMS: [OnceLock<BpfProgram>; ThreadKind::ALL.len()] =
    [const { OnceLock::new() }; ThreadKind::ALL.len()];

/// Limits the main thread, and each thread that is made from now on. To be called once, by the main thread, before it
/// makes another.
pub fn enforce(mode: Seccomp) -> Result<()> {
    let otherwise = match mode {
        Seccomp::Off => None,
        Seccomp::Log => Some(SeccompAction::Log),
        Seccomp::On => Some(SeccompAction::Trap),
    };
    if let Some(otherwise) = otherwise {
        OTHERWISE
            .set(otherwise)
            .map_err(|_| anyhow!("system calls are limited already"))?;
        apply_filter(&no_clone3()?).context("limiting clone3")?;
    }
    if !set_entry(enter) {
        bail!("threads run something else first");
    }
    enter(ThreadKind::Main);
    Ok(())
}

/// First function of a new thread. If the thread cannot be limited, the process ends.
fn enter(kind: ThreadKind) {
    if let Some(otherwise) = OTHERWISE.get()
        && let Err(error) = limit(kind, otherwise)
    {
        crate::exit_record::fail(&format!(
            "limiting the system calls of a {kind} thread: {error:#}"
        ));
    }
    #[cfg(debug_assertions)]
    super::attempt(kind);
}

fn limit(kind: ThreadKind, otherwise: &SeccompAction) -> Result<()> {
    let place = ThreadKind::ALL.iter().zip(&PROGRAMS).find(|(of, _)| **of == kind);
    let (_, place) = place.ok_or_else(|| anyhow!("it has no list of permitted system calls"))?;
    let program = match place.get() {
        Some(program) => program,
        None => {
            let program = bpf::program(&entries(kind), otherwise.clone().into())?;
            place.get_or_init(|| program)
        }
    };
    Ok(apply_filter(program)?)
}

/// The list of a kind; the main thread's has all others besides.
pub(super) fn entries(kind: ThreadKind) -> Vec<&'static Entry> {
    let mut lists: Vec<&'static [Entry]> = Vec::new();
    let kinds = match kind {
        // The calls of a vCPU thread also pass this filter, and are the most frequent: their list
        // comes first.
        ThreadKind::Main => [&[ThreadKind::Vcpu][..], &ThreadKind::ALL].concat(),
        kind => vec![kind],
    };
    for list in kinds.into_iter().flat_map(of) {
        if !lists.iter().any(|known| std::ptr::eq(*known, list)) {
            lists.push(list);
        }
    }
    lists.into_iter().flatten().collect()
}
