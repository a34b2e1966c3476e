//! Periodic checks of a guest.

use std::{ops::RangeInclusive, time::Duration};

use vmmd_api::v1;

use super::Violations;

/// Most seconds before the first check, and between two checks.
pub const MAX_PERIOD: u32 = 86_400;
/// Most seconds of a check.
pub const MAX_TIMEOUT: u32 = 3_600;
/// Most successes in a row that a probe can need.
pub const MAX_SUCCESSES: u32 = 1_000;
/// Most failures in a row that a probe can have.
pub const MAX_FAILURES: u32 = 100_000;
/// Longest path of a request in bytes.
pub const MAX_PATH: usize = 1_024;
/// Most headers of a request, and most bytes of one.
pub const MAX_HEADERS: usize = 16;
/// Longest name or value of a header in bytes.
pub const MAX_HEADER: usize = 1_024;
/// Most words of a command.
pub const MAX_WORDS: usize = 64;
/// Most bytes of all words of a command together.
pub const MAX_COMMAND: usize = 4 << 10;

/// The probes of a VM.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Probes {
    /// The others begin when this one has succeeded.
    pub startup: Option<Probe>,
    /// The VM is ready while this one succeeds.
    pub readiness: Option<Probe>,
    /// Its failure ends the run.
    pub liveness: Option<Probe>,
}

/// A periodic check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Probe {
    /// The check.
    pub check: Check,
    /// Time before the first check.
    pub initial_delay: Duration,
    /// Time from the end of a check to the next one.
    pub period: Duration,
    /// Time limit of a check.
    pub timeout: Duration,
    /// Successes in a row after which the probe succeeds, at least 1.
    pub success_threshold: u32,
    /// Failures in a row after which the probe has failed, at least 1.
    pub failure_threshold: u32,
}

/// Check of a probe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Check {
    /// A connection is accepted.
    Tcp(Port),
    /// A GET request is answered with a status from 200 to 399.
    Http {
        /// The server.
        port: Port,
        /// Path with its query; begins with "/".
        path: String,
        /// By HTTPS.
        tls: bool,
        /// Further headers: names and values.
        headers: Vec<(String, String)>,
    },
    /// A command in the guest ends with the code 0; not empty.
    Exec(Vec<String>),
    /// The agent answers.
    Agent,
    /// systemd has notified that the guest is ready.
    Notify,
}

/// A port of the guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Port {
    /// Its number, not 0.
    pub number: u16,
    /// Name of the NIC; the first one with an address when empty.
    pub nic: String,
}

/// Port of the host at which the notifications of a guest arrive.
pub const NOTIFY_PORT: u32 = 4_000_000_000;

/// The credential that names that port to systemd in the guest (systemd(1), "System credentials").
pub(super) fn notify_credential() -> v1::Credential {
    v1::Credential {
        name: "vmm.notify_socket".to_owned(),
        value: format!("vsock-stream:2:{NOTIFY_PORT}"),
        ..v1::Credential::default()
    }
}

impl Probes {
    /// Whether a probe needs the notifications of the guest.
    pub fn notify(&self) -> bool {
        let probes = [&self.startup, &self.readiness];
        let mut checks = probes.into_iter().flatten().map(|probe| &probe.check);
        checks.any(|check| *check == Check::Notify)
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Checks the probes of a spec and records violations.
    pub(super) fn new(found: &mut Violations, spec: &v1::VmSpec) -> Self {
        let wire = spec.probes.clone().unwrap_or_default();
        let mut probe = |name: &str, wire: Option<v1::Probe>| {
            let field = format!("spec.probes.{name}");
            let probe = Probe::new(found, &field, wire.as_ref()?, spec)?;
            if probe.success_threshold != 1 && name != "readiness" {
                let field = format_args!("{field}.successThreshold");
                found.add(
                    field,
                    "must be 1: only a readiness probe can need several successes",
                );
            }
            if probe.check == Check::Notify && name == "liveness" {
                let message =
                    "must not be the check of a liveness probe: the guest does not notify that it lives";
                found.add(format_args!("{field}.notify"), message);
            }
            Some(probe)
        };
        Self {
            startup: probe("startup", wire.startup),
            readiness: probe("readiness", wire.readiness),
            liveness: probe("liveness", wire.liveness),
        }
    }
}

impl Probe {
    fn new(found: &mut Violations, field: &str, wire: &v1::Probe, spec: &v1::VmSpec) -> Option<Self> {
        let check = Check::new(found, field, wire, spec);
        let by_agent = matches!(check, Some(Check::Exec(_) | Check::Agent));
        let mut number = |name: &str, value: u32, range: RangeInclusive<u32>, default: u32| match value {
            0 => default,
            value => {
                if !range.contains(&value) {
                    let (from, to) = (range.start(), range.end());
                    found.add(
                        format_args!("{field}.{name}"),
                        format_args!("must be {from} to {to}, is {value}"),
                    );
                }
                value
            }
        };
        let seconds = |value: u32| Duration::from_secs(value.into());
        let initial_delay = number(
            "initialDelaySeconds",
            wire.initial_delay_seconds,
            0..=MAX_PERIOD,
            0,
        );
        let period = number("periodSeconds", wire.period_seconds, 1..=MAX_PERIOD, 10);
        // An answer of an agent takes longer than one of the network.
        let default = if by_agent { 10 } else { 1 };
        let timeout = number("timeoutSeconds", wire.timeout_seconds, 1..=MAX_TIMEOUT, default);
        Some(Self {
            initial_delay: seconds(initial_delay),
            period: seconds(period),
            timeout: seconds(timeout),
            success_threshold: number("successThreshold", wire.success_threshold, 1..=MAX_SUCCESSES, 1),
            failure_threshold: number("failureThreshold", wire.failure_threshold, 1..=MAX_FAILURES, 3),
            check: check?,
        })
    }
}

impl Check {
    fn new(found: &mut Violations, field: &str, wire: &v1::Probe, spec: &v1::VmSpec) -> Option<Self> {
        use v1::probe::Check as Wire;
        let Some(check) = &wire.check else {
            found.add(field, "must have one of tcp, http, exec, agent and notify");
            return None;
        };
        let (name, by_agent) = match check {
            Wire::Tcp(_) => ("tcp", false),
            Wire::Http(_) => ("http", false),
            Wire::Exec(_) => ("exec", true),
            Wire::Agent(_) => ("agent", true),
            Wire::Notify(_) => ("notify", false),
        };
        let by_network = matches!(check, Wire::Tcp(_) | Wire::Http(_));
        let field = format!("{field}.{name}");
        if by_agent && spec.guest_agent.is_none() {
            found.add(
                &field,
                "needs spec.guestAgent, the channel to the agent in the guest",
            );
        }
        if matches!(check, Wire::Notify(_)) && spec.vsock.is_none() {
            found.add(&field, "needs spec.vsock, the socket device of the guest");
        }
        if by_network && spec.pod.is_some() {
            let message = "must not be set with spec.pod: give the pod a probe, which reaches the guest";
            found.add(&field, message);
        }
        match check {
            Wire::Tcp(tcp) => Port::new(found, &field, tcp.port, &tcp.nic, spec).map(Self::Tcp),
            Wire::Http(http) => {
                let port = Port::new(found, &field, http.port, &http.nic, spec);
                let path = if http.path.is_empty() { "/" } else { &http.path };
                let printable = path.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'#');
                if !path.starts_with('/') || !printable || path.len() > MAX_PATH {
                    let message = format_args!(
                        "must begin with \"/\" and have at most {MAX_PATH} printable ASCII characters without spaces and \"#\""
                    );
                    found.add(format_args!("{field}.path"), message);
                }
                let headers = headers(found, &field, &http.headers);
                Some(Self::Http {
                    port: port?,
                    path: path.to_owned(),
                    tls: http.tls,
                    headers,
                })
            }
            Wire::Exec(exec) => {
                let command = &exec.command;
                let bytes: usize = command.iter().map(String::len).sum();
                if command.first().is_none_or(String::is_empty)
                    || command.len() > MAX_WORDS
                    || bytes > MAX_COMMAND
                    || command.iter().any(|word| word.contains('\0'))
                {
                    let message = format_args!(
                        "must be a program and its arguments, at most {MAX_WORDS} words of {MAX_COMMAND} bytes together without NUL"
                    );
                    found.add(format_args!("{field}.command"), message);
                }
                Some(Self::Exec(command.clone()))
            }
            Wire::Agent(_) => Some(Self::Agent),
            Wire::Notify(_) => Some(Self::Notify),
        }
    }
}

impl Port {
    fn new(found: &mut Violations, field: &str, port: u32, nic: &str, spec: &v1::VmSpec) -> Option<Self> {
        if !nic.is_empty() && !spec.nics.iter().any(|of_spec| of_spec.name == nic) {
            let message = format_args!("must be the name of a NIC of the VM, is \"{nic}\"");
            found.add(format_args!("{field}.nic"), message);
        }
        let number = u16::try_from(port).ok().filter(|number| *number != 0);
        if number.is_none() {
            let message = format_args!("must be 1 to 65535, is {port}");
            found.add(format_args!("{field}.port"), message);
        }
        Some(Self {
            number: number?,
            nic: nic.to_owned(),
        })
    }
}

/// Checks headers (RFC 9110, sections 5.1 and 5.5; values without obs-text).
fn headers(found: &mut Violations, field: &str, wire: &[v1::HttpHeader]) -> Vec<(String, String)> {
    let is_token = |byte: u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte);
    let is_value = |byte: u8| byte.is_ascii_graphic() || byte == b' ';
    if wire.len() > MAX_HEADERS {
        let message = format_args!("at most {MAX_HEADERS}, are {}", wire.len());
        found.add(format_args!("{field}.headers"), message);
    }
    for (index, header) in wire.iter().enumerate() {
        let field = format!("{field}.headers[{index}]");
        if !(1..=MAX_HEADER).contains(&header.name.len()) || !header.name.bytes().all(is_token) {
            let message = "must be the name of a header, as in \"Accept\"";
            found.add(format_args!("{field}.name"), message);
        }
        if header.value.len() > MAX_HEADER || !header.value.bytes().all(is_value) {
            let message = format_args!("must be at most {MAX_HEADER} printable ASCII characters");
            found.add(format_args!("{field}.value"), message);
        }
    }
    let pair = |header: &v1::HttpHeader| (header.name.clone(), header.value.clone());
    wire.iter().map(pair).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn probes(readiness: &serde_json::Value, agent: bool) -> (Probes, Vec<String>) {
        let mut json = json!({"probes": {"readiness": readiness}, "nics": [{"name": "eth0"}]});
        if agent {
            json["guestAgent"] = json!({});
        }
        let spec: v1::VmSpec = serde_json::from_value(json).unwrap();
        let mut found = Violations::default();
        let probes = Probes::new(&mut found, &spec);
        (probes, found.0.into_iter().map(|one| one.field).collect())
    }

    #[test]
    fn defaults_are_those_of_kubernetes() {
        let (probes, found) = probes(&json!({"tcp": {"port": 22}}), false);
        assert_eq!(found, Vec::<String>::new());
        let probe = probes.readiness.unwrap();
        let seconds = [probe.initial_delay, probe.period, probe.timeout].map(|time| time.as_secs());
        assert_eq!(seconds, [0, 10, 1]);
        assert_eq!((probe.success_threshold, probe.failure_threshold), (1, 3));
    }

    #[test]
    fn each_mistake_is_named() {
        let fields = |readiness: serde_json::Value, agent| probes(&readiness, agent).1;
        let of = |field: &str| vec![format!("spec.probes.readiness{field}")];
        assert_eq!(fields(json!({}), true), of(""));
        assert_eq!(fields(json!({"tcp": {}}), true), of(".tcp.port"));
        assert_eq!(
            fields(json!({"tcp": {"port": 1, "nic": "eth9"}}), true),
            of(".tcp.nic")
        );
        assert_eq!(fields(json!({"agent": {}}), false), of(".agent"));
        assert_eq!(fields(json!({"notify": {}}), true), of(".notify"));
        assert_eq!(fields(json!({"exec": {}}), true), of(".exec.command"));
        assert_eq!(
            fields(json!({"http": {"port": 1, "path": "x"}}), true),
            of(".http.path")
        );
        let header = json!({"http": {"port": 1, "headers": [{"name": "a b", "value": "x"}]}});
        assert_eq!(fields(header, true), of(".http.headers[0].name"));
        let late = json!({"agent": {}, "periodSeconds": 100_000});
        assert_eq!(fields(late, true), of(".periodSeconds"));
    }

    #[test]
    fn several_successes_are_for_readiness_only() {
        let spec: v1::VmSpec = serde_json::from_value(json!({
            "guestAgent": {},
            "probes": {
                "liveness": {"agent": {}, "successThreshold": 2},
                "readiness": {"agent": {}, "successThreshold": 2},
            },
        }))
        .unwrap();
        let mut found = Violations::default();
        Probes::new(&mut found, &spec);
        let fields: Vec<_> = found.0.into_iter().map(|one| one.field).collect();
        assert_eq!(fields, ["spec.probes.liveness.successThreshold"]);
    }

    #[test]
    fn the_network_of_a_pod_has_the_probes_of_the_pod() {
        let spec: v1::VmSpec = serde_json::from_value(json!({
            "pod": {"uid": "p"},
            "probes": {"liveness": {"tcp": {"port": 22}}},
        }))
        .unwrap();
        let mut found = Violations::default();
        Probes::new(&mut found, &spec);
        assert_eq!(found.0.first().unwrap().field, "spec.probes.liveness.tcp");
    }

    #[test]
    fn notifications_need_a_socket_device_and_are_no_sign_of_life() {
        let spec = |probe: &str| -> v1::VmSpec {
            let json = json!({"probes": {probe: {"notify": {}}}, "vsock": {}});
            serde_json::from_value(json).unwrap()
        };
        let mut found = Violations::default();
        assert!(Probes::new(&mut found, &spec("startup")).notify());
        assert!(found.0.is_empty());
        Probes::new(&mut found, &spec("liveness"));
        assert_eq!(found.0[0].field, "spec.probes.liveness.notify");
        let credential = notify_credential();
        let mut strings = crate::credential::oem_strings(&mut Violations::default(), &[credential]);
        assert_eq!(
            strings.pop().unwrap().as_str(),
            "io.systemd.credential:vmm.notify_socket=vsock-stream:2:4000000000"
        );
    }
}
