//! VMs as rows of a table.

use serde_json::Value as Json;
use vmmd_api::v1;

use super::{Show, age, disk::pairs};
use crate::{
    failure::Result,
    manifest::{emit, quantity, schema},
};

impl Show for v1::Vm {
    const SCHEMA: &'static str = schema::VM;

    fn columns(wide: bool) -> Vec<&'static str> {
        let mut headers = vec!["NAME", "PHASE", "CPUS", "MEMORY", "ADDRESS", "UPTIME", "AGE"];
        if wide {
            headers.extend(["PID", "DISKS", "NICS", "LABELS", "REASON"]);
        }
        headers
    }

    fn row(&self, wide: bool, now: jiff::Timestamp) -> Vec<String> {
        let metadata = self.metadata.clone().unwrap_or_default();
        let spec = self.spec.clone().unwrap_or_default();
        let status = self.status.clone().unwrap_or_default();
        let instance = status.instance.as_ref();
        let started = instance.and_then(|instance| instance.start_time.as_ref());
        let cores = u64::from(spec.cpu.map_or(0, |cpu| cpu.cores));
        let memory = spec.memory.map_or(0, |memory| memory.size_bytes);
        let mut row = vec![
            metadata.name,
            phase(&status),
            now_and_then(&status, "spec.cpu.cores", cores, |cores| cores.to_string()),
            now_and_then(&status, "spec.memory.sizeBytes", memory, quantity::show),
            addresses(&status, wide),
            age::since(started, now),
            age::since(metadata.create_time.as_ref(), now),
        ];
        if wide {
            let list = |items: Vec<String>| items.join(",");
            let pid = instance.map(|instance| instance.pid.to_string());
            row.extend([
                pid.unwrap_or_default(),
                list(spec.disks.into_iter().map(|disk| disk.name).collect()),
                list(spec.nics.iter().map(nic).collect()),
                pairs(&metadata.labels, ","),
                status.reason,
            ]);
        }
        row
    }

    fn describe(&self, now: jiff::Timestamp) -> String {
        super::describe::vm(self, now)
    }

    fn json(&self) -> Result<Json> {
        emit::manifest(self)
    }
}

/// A number of the spec, with the value of the running machine in front of a pending one: `512Mi -> 768Mi`.
pub fn now_and_then(status: &v1::VmStatus, path: &str, wanted: u64, show: impl Fn(u64) -> String) -> String {
    let mut pending = status.pending_changes.iter();
    let change = pending.find(|change| change.path == path);
    let running = change.and_then(|change| {
        let json = serde_json::to_value(change.current.as_ref()?).ok()?;
        // 64-bit numbers are text in the canonical JSON form.
        match &json {
            serde_json::Value::String(text) => text.parse().ok(),
            json => format!("{:.0}", json.as_f64()?).parse().ok(),
        }
    });
    match running {
        Some(running) if running != wanted => format!("{} -> {}", show(running), show(wanted)),
        _ => show(wanted),
    }
}

/// The addresses of its NICs in networks of the node; with `all` those of IPv6 too.
fn addresses(status: &v1::VmStatus, all: bool) -> String {
    let addresses = status.nics.iter().flat_map(|nic| &nic.addresses);
    let all = addresses.filter(|address| all || !address.contains(':'));
    match all.cloned().collect::<Vec<_>>().join(",") {
        none if none.is_empty() => "-".to_owned(),
        addresses => addresses,
    }
}

/// The phase as a word: `Running`.
pub fn phase(status: &v1::VmStatus) -> String {
    camel(status.phase().as_str_name(), "VM_PHASE_")
}

/// `NAME=bridge:br0`.
pub fn nic(nic: &v1::NicSpec) -> String {
    format!("{}={}", nic.name, attachment(nic))
}

/// `bridge:br0` or `tap:tap0`.
pub fn attachment(nic: &v1::NicSpec) -> String {
    match &nic.attachment {
        Some(v1::nic_spec::Attachment::Bridge(bridge)) => format!("bridge:{bridge}"),
        Some(v1::nic_spec::Attachment::Tap(tap)) => format!("tap:{tap}"),
        Some(v1::nic_spec::Attachment::Network(network)) => format!("network:{network}"),
        Some(v1::nic_spec::Attachment::PodNetwork(pod)) if pod.interface.is_empty() => "pod-network".into(),
        Some(v1::nic_spec::Attachment::PodNetwork(pod)) => format!("pod-network:{}", pod.interface),
        None => "none".into(),
    }
}

/// An enum's name as one word: `EXIT_REASON_GUEST_PANIC` without its prefix is `GuestPanic`; `UNSPECIFIED` is
/// `Unknown`.
pub fn camel(name: &str, prefix: &str) -> String {
    let words = name.strip_prefix(prefix).unwrap_or(name);
    if words == "UNSPECIFIED" {
        return "Unknown".into();
    }
    let word = |word: &str| {
        let mut letters = word.chars();
        let first = letters.next();
        first
            .into_iter()
            .chain(letters.map(|letter| letter.to_ascii_lowercase()))
            .collect::<String>()
    };
    words.split('_').map(word).collect()
}
