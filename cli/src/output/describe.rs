//! `describe vm`: everything about a VM as lines of `Key: value`.

use vmmd_api::v1;

use super::{
    age,
    disk::{self, pairs},
    guest, part,
    table::Table,
    value,
    vm::{attachment, camel, now_and_then, phase},
};
use crate::{failure::printable, manifest::quantity};

/// Column at which values begin.
const WIDTH: usize = 16;

/// Everything about a VM.
pub fn vm(vm: &v1::Vm, now: jiff::Timestamp) -> String {
    let metadata = vm.metadata.clone().unwrap_or_default();
    let status = vm.status.clone().unwrap_or_default();
    let mut text = Lines::default();
    text.put("Name", &metadata.name);
    text.put("UID", &metadata.uid);
    text.put("Labels", &pairs(&metadata.labels, ", "));
    text.put("Created", &when(metadata.create_time.as_ref(), now));
    text.put("Generation", &metadata.generation.to_string());
    text.put("Phase", &phase(&status));
    text.put("Since", &when(status.phase_time.as_ref(), now));
    text.put("Reason", &status.reason);
    text.put("Message", &status.message);
    text.put("Operation", &status.operation);
    let policy = match vm.spec.as_ref().map(v1::VmSpec::run_policy).unwrap_or_default() {
        v1::RunPolicy::Unspecified => v1::RunPolicy::AlwaysOnUnlessStopped,
        policy => policy,
    };
    text.put("Run policy", &camel(policy.as_str_name(), "RUN_POLICY_"));
    let on_panic = vm.spec.as_ref().map(v1::VmSpec::on_panic).unwrap_or_default();
    if on_panic != v1::PanicPolicy::Unspecified {
        text.put("On panic", &camel(on_panic.as_str_name(), "PANIC_POLICY_"));
    }
    restart(&mut text, &status);
    instance(&mut text, &status, now);
    if let Some(guest) = &status.guest {
        guest::of_vm(&mut text, guest, now);
    }
    spec(&mut text, &vm.spec.clone().unwrap_or_default(), &status);
    pending(&mut text, &status.pending_changes);
    conditions(&mut text, &status.conditions, now);
    text.0
}

/// Lists the changes that wait for the next start, if any.
fn pending(text: &mut Lines, changes: &[v1::PendingChange]) {
    let rows: Vec<_> = changes
        .iter()
        .map(|change| {
            vec![
                change.path.clone(),
                value::value(change.current.as_ref()),
                value::value(change.desired.as_ref()),
                change.message.clone(),
            ]
        })
        .collect();
    if !rows.is_empty() {
        let headers = vec!["PATH", "CURRENT", "DESIRED", "MESSAGE"];
        text.list("Changes at the next start", headers, &rows);
    }
}

/// Conditions as a table under their title.
pub fn conditions(text: &mut Lines, conditions: &[v1::Condition], now: jiff::Timestamp) {
    let rows: Vec<_> = conditions
        .iter()
        .map(|condition| {
            vec![
                condition.r#type.clone(),
                camel(condition.status().as_str_name(), "CONDITION_STATUS_"),
                condition.reason.clone(),
                age::since(condition.transition_time.as_ref(), now),
                condition.message.clone(),
            ]
        })
        .collect();
    text.list(
        "Conditions",
        vec!["TYPE", "STATUS", "REASON", "AGE", "MESSAGE"],
        &rows,
    );
}

/// Starts by the run policy, and counts of starts and ends of runs.
fn restart(text: &mut Lines, status: &v1::VmStatus) {
    if let Some(restart) = status.restart.as_ref().filter(|restart| restart.attempts > 0) {
        text.put("Restarts", &format!("{} in a row", restart.attempts));
    }
    let next = status
        .restart
        .as_ref()
        .and_then(|restart| restart.next_start_time.as_ref());
    if next.is_some() {
        text.put("Next start", &age::exact(next));
    }
    let Some(counts) = status.counts else { return };
    let plural = |count: u64, one: &'static str, more: &'static str| match count {
        1 => (1, one),
        count => (count, more),
    };
    let counted = [
        plural(counts.starts, "start", "starts"),
        (counts.automatic_starts, "by the run policy"),
        (counts.failed_starts, "failed"),
        plural(counts.guest_shutdowns, "power-off", "power-offs"),
        plural(counts.guest_resets, "reset", "resets"),
        plural(counts.guest_panics, "panic", "panics"),
        plural(counts.crash_resets, "reset after a crash", "resets after a crash"),
        plural(counts.guest_crashes, "crash", "crashes"),
        plural(counts.vmm_errors, "error of the vmm", "errors of the vmm"),
        (counts.out_of_memory, "out of memory"),
        (counts.lost, "lost"),
        plural(counts.probe_failures, "failed probe", "failed probes"),
    ];
    let counted = counted.into_iter().filter(|(count, _)| *count > 0);
    let parts: Vec<_> = counted.map(|(count, what)| format!("{count} {what}")).collect();
    text.put("Counts", &parts.join(", "));
}

/// The probes of a VM in one line.
fn probes(spec: Option<&v1::ProbesSpec>) -> String {
    use v1::probe::Check;
    let Some(spec) = spec else { return String::new() };
    let check = |probe: &v1::Probe| match &probe.check {
        Some(Check::Tcp(tcp)) => format!("tcp {}", tcp.port),
        Some(Check::Http(http)) => {
            let scheme = if http.tls { "https" } else { "http" };
            format!("{scheme} {}{}", http.port, http.path)
        }
        Some(Check::Exec(exec)) => format!("exec {}", exec.command.join(" ")),
        Some(Check::Agent(_)) => "agent".to_owned(),
        Some(Check::Notify(_)) => "notify".to_owned(),
        None => String::new(),
    };
    let probes = [
        ("startup", &spec.startup),
        ("readiness", &spec.readiness),
        ("liveness", &spec.liveness),
    ];
    let parts = probes.iter().filter_map(|(name, probe)| {
        let probe = probe.as_ref()?;
        Some(format!("{name}: {}", check(probe)))
    });
    parts.collect::<Vec<_>>().join(", ")
}

fn instance(text: &mut Lines, status: &v1::VmStatus, now: jiff::Timestamp) {
    if let Some(instance) = &status.instance {
        text.title("Instance");
        text.put("  PID", &instance.pid.to_string());
        text.put("  User", &instance.uid.to_string());
        text.put("  Started", &when(instance.start_time.as_ref(), now));
        text.put("  Guest resets", &instance.guest_resets.to_string());
        if instance.crash_resets > 0 {
            text.put("  After a crash", &instance.crash_resets.to_string());
        }
        text.put("  vmm version", &instance.vmm_version);
    }
    if let Some(exit) = &status.last_exit {
        text.title("Last exit");
        text.put("  Reason", &camel(exit.reason().as_str_name(), "EXIT_REASON_"));
        text.put("  Message", &exit.message);
        text.put("  Time", &when(exit.time.as_ref(), now));
    }
}

fn spec(text: &mut Lines, spec: &v1::VmSpec, status: &v1::VmStatus) {
    let memory = spec.memory.unwrap_or_default();
    let cores = u64::from(spec.cpu.as_ref().map_or(0, |cpu| cpu.cores));
    let cores = now_and_then(status, "spec.cpu.cores", cores, |cores| cores.to_string());
    text.put("CPUs", &cores);
    let backing = match memory.backing() {
        v1::MemoryBacking::Unspecified => String::new(),
        backing => format!(
            ", {}",
            camel(backing.as_str_name(), "MEMORY_BACKING_").to_lowercase()
        ),
    };
    let bytes = memory.size_bytes;
    let size = now_and_then(status, "spec.memory.sizeBytes", bytes, quantity::show);
    text.put("Memory", &format!("{size} ({bytes} bytes{backing})"));
    resources(text, spec);
    text.put("Balloon", &balloon(spec.balloon.as_ref()));
    text.put("Display", &display(spec.display.as_ref()));
    text.put(
        "Console",
        spec.virtio_console.as_ref().map_or("", |_| "virtio (hvc0)"),
    );
    text.put(
        "Guest agent",
        spec.guest_agent.as_ref().map_or("", |_| "qemu-guest-agent"),
    );
    text.put("Probes", &probes(spec.probes.as_ref()));
    let cid = |vsock: &v1::VsockSpec| match vsock.cid {
        0 => "default CID".to_owned(),
        cid => format!("CID {cid}"),
    };
    text.put("Vsock", &spec.vsock.as_ref().map(cid).unwrap_or_default());
    let action = |watchdog: &v1::WatchdogSpec| match watchdog.action() {
        v1::WatchdogAction::Unspecified | v1::WatchdogAction::Reset => "reset",
        v1::WatchdogAction::Poweroff => "power-off",
        v1::WatchdogAction::Pause => "pause",
        v1::WatchdogAction::None => "event alone",
    };
    text.put("Watchdog", spec.watchdog.as_ref().map_or("", action));
    let hyperv = spec.cpu.as_ref().is_some_and(|cpu| cpu.hyperv);
    text.put("Hyper-V", if hyperv { "yes" } else { "" });
    text.put("TPM", spec.tpm.as_ref().map_or("", |_| "2.0 (swtpm)"));
    match spec.boot.as_ref().and_then(|boot| boot.source.as_ref()) {
        Some(v1::boot_spec::Source::Linux(linux)) => {
            text.title("Boot");
            text.put("  Kernel", &linux.kernel);
            text.put("  Initrd", &linux.initrd);
            text.put("  Command line", &linux.cmdline);
        }
        Some(v1::boot_spec::Source::FromDisk(boot)) => {
            let first = spec.disks.first().map_or("", |disk| disk.name.as_str());
            let disk = if boot.disk.is_empty() { first } else { &boot.disk };
            text.put("Boot", &format!("the kernel on disk {disk}"));
            text.put("  Command line", &boot.cmdline_append);
        }
        Some(v1::boot_spec::Source::Firmware(firmware)) => {
            let chosen = match status.firmware() {
                v1::FirmwareType::Uefi => "UEFI firmware, as the disks need",
                v1::FirmwareType::Bios => "BIOS firmware, as the disks need",
                _ => "the firmware that the disks need",
            };
            let boot = match firmware.r#type() {
                v1::FirmwareType::Bios => "BIOS firmware",
                v1::FirmwareType::Auto => chosen,
                v1::FirmwareType::Unspecified | v1::FirmwareType::Uefi => "UEFI firmware",
            };
            text.put("Boot", boot);
        }
        None => {}
    }
    let clock = spec.clock.as_ref().map_or("", |clock| clock.timezone.as_str());
    text.put("Clock", clock);
    text.put("SMBIOS", &smbios(spec.smbios.as_ref()));
    text.put("cloud-init", &cloud_init(spec.cloud_init.as_ref()));
    let credentials: Vec<_> = spec.credentials.iter().map(|it| it.name.as_str()).collect();
    text.put("Credentials", &credentials.join(", "));
    let channels = status.channels.iter().map(|channel| {
        let state = if channel.open { "open" } else { "closed" };
        format!("{} ({state} in the guest)", channel.name)
    });
    text.put("Channels", &channels.collect::<Vec<_>>().join(", "));
    let users = spec.access_credentials.iter().map(|user| {
        let password = if user.password_hash_digest.is_empty() {
            ""
        } else {
            ", password"
        };
        let keys = user.ssh_authorized_keys.len();
        format!("{} ({keys} SSH keys{password})", user.name)
    });
    text.put("Guest users", &users.collect::<Vec<_>>().join(", "));
    disk::of_vm(text, spec, status);
    let nics: Vec<_> = spec
        .nics
        .iter()
        .map(|nic| {
            let now = status.nics.iter().find(|now| now.name == nic.name);
            let mac = now.map_or(&nic.mac, |now| &now.mac);
            let addresses = now.map(|now| now.addresses.join(",")).unwrap_or_default();
            let tap = now.map(|now| now.tap.clone()).unwrap_or_default();
            vec![nic.name.clone(), attachment(nic), mac.clone(), addresses, tap]
        })
        .collect();
    text.list(
        "NICs",
        vec!["NAME", "ATTACHED TO", "MAC", "ADDRESS", "TAP"],
        &nics,
    );
    let shares = part::share_rows(&spec.shares, &status.shares);
    if !shares.is_empty() {
        text.list("Shares", part::SHARE_COLUMNS.to_vec(), &shares);
    }
}

/// The identity of the system, in the form of `--smbios`.
fn smbios(smbios: Option<&v1::SmbiosSpec>) -> String {
    let smbios = smbios.cloned().unwrap_or_default();
    let texts = [
        ("uuid", smbios.uuid),
        ("serial", smbios.serial),
        ("manufacturer", smbios.manufacturer),
        ("product", smbios.product),
        ("version", smbios.version),
        ("sku", smbios.sku),
        ("family", smbios.family),
        ("asset-tag", smbios.asset_tag),
    ];
    let set = texts.iter().filter(|(_, text)| !text.is_empty());
    let set: Vec<_> = set.map(|(key, text)| format!("{key}={text}")).collect();
    set.join(",")
}

/// Prints the set resources of the spec, besides the number of vCPUs and the size of the RAM.
fn resources(text: &mut Lines, spec: &v1::VmSpec) {
    let cpu = spec.cpu.clone().unwrap_or_default();
    for (key, percent) in [
        ("Core fraction", cpu.core_fraction_percent),
        ("Core limit", cpu.core_limit_percent),
    ] {
        if percent != 0 {
            text.put(key, &format!("{percent} %"));
        }
    }
    text.put("Host CPUs", &cpu.host_cpus);
    text.put("CPU model", &cpu.model);
    let features = cpu.features.unwrap_or_default();
    let added = features.add.iter().map(|name| format!("+{name}"));
    let removed = features.remove.iter().map(|name| format!("-{name}"));
    text.put(
        "CPU features",
        &added.chain(removed).collect::<Vec<_>>().join(" "),
    );
    let memory = spec.memory.unwrap_or_default();
    text.put(
        "Huge pages",
        match memory.huge_pages() {
            v1::HugePages::Unspecified => "",
            v1::HugePages::HugePages2m => "2Mi",
            v1::HugePages::HugePages1g => "1Gi",
        },
    );
    for (key, wanted) in [("Prefault", memory.prefault), ("Mergeable", memory.mergeable)] {
        if wanted {
            text.put(key, "yes");
        }
    }
    let node = memory.numa_node.map(|node| node.to_string());
    text.put("NUMA node", &node.unwrap_or_default());
}

/// Describes the balloon, if any: "64Mi left to the guest, free page reporting".
fn balloon(spec: Option<&v1::BalloonSpec>) -> String {
    let Some(spec) = spec else {
        return String::new();
    };
    if spec.disabled {
        return "none".to_owned();
    }
    let mut said = Vec::new();
    if spec.target_bytes != 0 {
        said.push(format!("{} left to the guest", quantity::show(spec.target_bytes)));
    }
    if spec.free_page_reporting {
        said.push("free page reporting".to_owned());
    }
    said.join(", ")
}

/// The content of the seed for cloud-init, if the VM has one: "user data hmac-sha256:…, 2 SSH keys, password".
fn cloud_init(init: Option<&v1::CloudInit>) -> String {
    let Some(init) = init else {
        return String::new();
    };
    let mut said = match init.r#type() {
        v1::SeedType::Unspecified | v1::SeedType::NoCloud => Vec::new(),
        v1::SeedType::ConfigDrive => vec!["ConfigDrive".to_owned()],
        v1::SeedType::Sysprep => vec!["sysprep".to_owned()],
        v1::SeedType::Ignition => vec!["Ignition".to_owned()],
    };
    if !init.user_data_digest.is_empty() {
        said.push(format!("user data {}", init.user_data_digest));
    }
    for (what, digest) in [
        ("network configuration", &init.network_config_digest),
        ("vendor data", &init.vendor_data_digest),
    ] {
        if !digest.is_empty() {
            said.push(what.to_owned());
        }
    }
    match init.ssh_authorized_keys.len() {
        0 => {}
        1 => said.push("1 SSH key".to_owned()),
        count => said.push(format!("{count} SSH keys")),
    }
    if !init.password_hash_digest.is_empty() {
        said.push("password".to_owned());
    }
    for (what, value) in [("hostname", &init.hostname), ("instance", &init.instance_id)] {
        if !value.is_empty() {
            said.push(format!("{what} {value}"));
        }
    }
    match said.is_empty() {
        true => "name and network".to_owned(),
        false => said.join(", "),
    }
}

/// Describes the screen, if any: "1280 x 800, keyboard us".
fn display(spec: Option<&v1::DisplaySpec>) -> String {
    let Some(spec) = spec else {
        return String::new();
    };
    let size = match (spec.width, spec.height) {
        (0, 0) => String::new(),
        (width, height) => format!("{width} x {height}, "),
    };
    let layout = match spec.keyboard_layout() {
        v1::KeyboardLayout::Unspecified => v1::KeyboardLayout::Us,
        layout => layout,
    };
    let layout = camel(layout.as_str_name(), "KEYBOARD_LAYOUT_").to_lowercase();
    format!("{size}keyboard {layout}")
}

/// Bytes with a suffix and as a number: `1Mi (1048576 bytes)`.
pub fn bytes(bytes: u64) -> String {
    format!("{} ({bytes} bytes)", quantity::show(bytes))
}

/// A time and how long ago it was; empty when it is not known.
pub fn when(time: Option<&vmmd_api::well_known::Timestamp>, now: jiff::Timestamp) -> String {
    match time {
        Some(_) => format!("{} ({} ago)", age::exact(time), age::since(time, now)),
        None => String::new(),
    }
}

/// Lines of `Key: value`.
#[derive(Debug, Default)]
pub struct Lines(pub String);

impl Lines {
    /// A key and its value; nothing when the value is empty.
    pub fn put(&mut self, key: &str, value: &str) {
        if !value.is_empty() {
            let key = format!("{key}:");
            self.0.push_str(&format!("{key:WIDTH$} {}\n", printable(value)));
        }
    }

    /// Metadata of an object; its generation too if the spec can change.
    pub fn metadata(
        &mut self,
        metadata: Option<&v1::ObjectMetadata>,
        spec_changes: bool,
        now: jiff::Timestamp,
    ) {
        let metadata = metadata.cloned().unwrap_or_default();
        self.put("Name", &metadata.name);
        self.put("UID", &metadata.uid);
        if spec_changes {
            self.put("Generation", &metadata.generation.to_string());
        }
        self.put("Labels", &pairs(&metadata.labels, ", "));
        self.put("Annotations", &pairs(&metadata.annotations, ", "));
        self.put("Owner", &metadata.owner);
        self.put("Created", &when(metadata.create_time.as_ref(), now));
    }

    /// Messages of conditions.
    pub fn messages(&mut self, conditions: &[v1::Condition]) {
        for condition in conditions
            .iter()
            .filter(|condition| !condition.message.is_empty())
        {
            self.put(&condition.r#type, &condition.message);
        }
    }

    /// A title of the lines that follow.
    pub fn title(&mut self, title: &str) {
        self.0.push_str(&format!("{title}:\n"));
    }

    /// A titled table; `none` when it has no rows.
    pub fn list(&mut self, title: &str, headers: Vec<&'static str>, rows: &[Vec<String>]) {
        if rows.is_empty() {
            self.put(title, "none");
            return;
        }
        self.title(title);
        for line in Table::new(headers).whole(rows, true).lines() {
            self.0.push_str(&format!("  {line}\n"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_set_resources_are_described() {
        let mut text = Lines::default();
        resources(&mut text, &v1::VmSpec::default());
        assert_eq!(text.0, "");
        let spec = v1::VmSpec {
            cpu: Some(v1::CpuSpec {
                cores: 1,
                core_fraction_percent: 20,
                core_limit_percent: 50,
                host_cpus: "0-3".into(),
                ..Default::default()
            }),
            memory: Some(v1::MemorySpec {
                huge_pages: v1::HugePages::HugePages1g.into(),
                prefault: true,
                numa_node: Some(0),
                ..Default::default()
            }),
            ..Default::default()
        };
        resources(&mut text, &spec);
        insta::assert_snapshot!(text.0, @r"
        Core fraction:   20 %
        Core limit:      50 %
        Host CPUs:       0-3
        Huge pages:      1Gi
        Prefault:        yes
        NUMA node:       0
        ");
    }
}
