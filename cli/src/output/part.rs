//! NICs and shares of a VM as tables.

use vmmd_api::v1::{self, SharePhase};

use super::{table::Table, vm::attachment};

/// The NICs in the VM's spec, and the NICs of the running VM.
pub fn nics(vm: &v1::Vm) -> String {
    let mut table = Table::new(vec!["NAME", "ATTACHED TO", "MAC", "ADDRESS", "LINK", "TAP"]);
    let wanted: Vec<_> = vm.spec.iter().flat_map(|spec| &spec.nics).collect();
    let states: Vec<_> = vm.status.iter().flat_map(|status| &status.nics).collect();
    let mut rows: Vec<_> = wanted
        .iter()
        .map(|nic| {
            let state = states.iter().find(|state| state.name == nic.name);
            nic_row(&nic.name, &attachment(nic), state.copied())
        })
        .collect();
    let goes = states
        .iter()
        .filter(|state| wanted.iter().all(|nic| nic.name != state.name));
    rows.extend(goes.map(|state| nic_row(&state.name, "until the next start", Some(state))));
    table.whole(&rows, true)
}

fn nic_row(name: &str, attachment: &str, state: Option<&v1::NicStatus>) -> Vec<String> {
    let state = state.cloned().unwrap_or_default();
    vec![
        name.to_owned(),
        attachment.to_owned(),
        state.mac,
        state.addresses.join(","),
        if state.link_down { "down" } else { "up" }.to_owned(),
        state.tap,
    ]
}

/// Columns of [`share_rows`].
pub const SHARE_COLUMNS: [&str; 7] = ["NAME", "PATH", "TAG", "MODE", "PHASE", "PID", "RESTARTS"];

/// The shares in the VM's spec, and the shares of the running VM.
pub fn shares(vm: &v1::Vm) -> String {
    let mut table = Table::new(SHARE_COLUMNS.to_vec());
    let spec = vm.spec.as_ref().map_or(&[][..], |spec| &spec.shares);
    let status = vm.status.as_ref().map_or(&[][..], |status| &status.shares);
    let rows = share_rows(spec, status);
    table.whole(&rows, true)
}

/// One for each share.
pub fn share_rows(wanted: &[v1::ShareSpec], states: &[v1::ShareStatus]) -> Vec<Vec<String>> {
    let mut rows: Vec<_> = wanted
        .iter()
        .map(|share| {
            let state = states.iter().find(|state| state.name == share.name);
            let mode = if share.read_only { "ro" } else { "rw" };
            share_row(&share.name, &share.path, mode, state)
        })
        .collect();
    let goes = states
        .iter()
        .filter(|state| wanted.iter().all(|share| share.name != state.name));
    rows.extend(goes.map(|state| share_row(&state.name, "until it is detached", "", Some(state))));
    rows
}

fn share_row(name: &str, path: &str, mode: &str, state: Option<&v1::ShareStatus>) -> Vec<String> {
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
