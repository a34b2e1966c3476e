//! Shares of a VM for people.

use vmmd_api::v1::{self, SharePhase};

use super::table::Table;

/// What [`rows`] has.
pub const HEADERS: [&str; 7] = ["NAME", "PATH", "TAG", "MODE", "PHASE", "PID", "RESTARTS"];

/// The shares in the VM's spec, and the shares of the running VM.
pub fn table(vm: &v1::Vm) -> String {
    let mut table = Table::new(HEADERS.to_vec());
    let spec = vm.spec.as_ref().map_or(&[][..], |spec| &spec.shares);
    let status = vm.status.as_ref().map_or(&[][..], |status| &status.shares);
    let rows = rows(spec, status);
    table.whole(&rows, true)
}

/// One for each share.
pub fn rows(wanted: &[v1::ShareSpec], states: &[v1::ShareStatus]) -> Vec<Vec<String>> {
    let mut rows: Vec<_> = wanted
        .iter()
        .map(|share| {
            let state = states.iter().find(|state| state.name == share.name);
            let mode = if share.read_only { "ro" } else { "rw" };
            row(&share.name, &share.path, mode, state)
        })
        .collect();
    let goes = states
        .iter()
        .filter(|state| wanted.iter().all(|share| share.name != state.name));
    rows.extend(goes.map(|state| row(&state.name, "until it is detached", "", Some(state))));
    rows
}

fn row(name: &str, path: &str, mode: &str, state: Option<&v1::ShareStatus>) -> Vec<String> {
    let state = state.cloned().unwrap_or_default();
    let phase = match state.phase() {
        SharePhase::Unspecified | SharePhase::Pending => "pending",
        SharePhase::Served => "served",
        SharePhase::Restarting => "restarting",
        SharePhase::Attaching => "attaching",
        SharePhase::Detaching => "detaching",
    };
    let number = |number: u32| match number {
        0 => String::new(),
        number => number.to_string(),
    };
    vec![
        name.to_owned(),
        path.to_owned(),
        state.tag.clone(),
        mode.to_owned(),
        phase.to_owned(),
        number(state.pid),
        number(state.restarts),
    ]
}
