//! NICs of a VM for people.

use vmmd_api::v1;

use super::{table::Table, vm::attachment};

/// The NICs in the VM's spec, and the NICs of the running VM.
pub fn table(vm: &v1::Vm) -> String {
    let mut table = Table::new(vec!["NAME", "ATTACHED TO", "MAC", "ADDRESS", "LINK", "TAP"]);
    let wanted: Vec<_> = vm.spec.iter().flat_map(|spec| &spec.nics).collect();
    let states: Vec<_> = vm.status.iter().flat_map(|status| &status.nics).collect();
    let mut rows: Vec<_> = wanted
        .iter()
        .map(|nic| {
            let state = states.iter().find(|state| state.name == nic.name);
            row(&nic.name, &attachment(nic), state.copied())
        })
        .collect();
    let goes = states
        .iter()
        .filter(|state| wanted.iter().all(|nic| nic.name != state.name));
    rows.extend(goes.map(|state| row(&state.name, "until the next start", Some(state))));
    table.whole(&rows, true)
}

fn row(name: &str, attachment: &str, state: Option<&v1::NicStatus>) -> Vec<String> {
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
