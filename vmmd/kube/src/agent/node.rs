//! The node that Kubernetes sees, from the node that vmmd describes.

use std::collections::BTreeMap;

use jiff::Timestamp;
use k8s_openapi::{
    api::core::v1::{
        DaemonEndpoint, Node, NodeAddress, NodeCondition, NodeDaemonEndpoints, NodeSpec, NodeStatus,
        NodeSystemInfo, Taint,
    },
    apimachinery::pkg::{
        api::resource::Quantity,
        apis::meta::v1::{ObjectMeta, Time},
    },
};
use vmmd_api::v1::{self, ConditionStatus};

use crate::{names, sources::Allowed};

/// The release of Kubernetes whose kubelet the agent behaves like.
const KUBELET: &str = "v1.20.0";

/// Before the features of vmmd, and those of the processor, in the labels that say that the node has them.
const FEATURES: [&str; 2] = ["feature.vmmd.dev/", "cpu.vmmd.dev/"];

/// Settings of the agent for the node.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The node's name in the cluster.
    pub name: String,
    /// Host name and addresses, by the words of the API: `InternalIP`, `Hostname`.
    pub addresses: Vec<(&'static str, String)>,
    /// Most VMs.
    pub max_vms: u32,
    /// Port of the agent's own API; none when not served.
    pub port: Option<u16>,
    /// Where the vmmds of other nodes reach this one's, as HOST:PORT; no VM is moved here when it is not given.
    pub migration_address: Option<String>,
    /// Things of the node that VMs may name.
    pub allowed: Allowed,
    /// Labels in addition to the labels that the agent finds.
    pub labels: BTreeMap<String, String>,
    /// What /etc/machine-id holds.
    pub machine_id: String,
    /// Name of the operating system for people.
    pub os_image: String,
}

/// The node as it is made. Afterwards only its labels and its status are kept current: its taints may be changed.
pub fn new(settings: &Settings, node: Option<&v1::Node>) -> Node {
    let taint = Taint {
        key: names::NODE.to_owned(),
        effect: "NoSchedule".to_owned(),
        ..Taint::default()
    };
    Node {
        metadata: ObjectMeta {
            name: Some(settings.name.clone()),
            labels: Some(labels(settings, node)),
            annotations: Some(annotations(settings)),
            ..ObjectMeta::default()
        },
        spec: Some(NodeSpec {
            taints: Some(vec![taint]),
            ..NodeSpec::default()
        }),
        status: None,
    }
}

/// Annotations of the node that other components need.
pub fn annotations(settings: &Settings) -> BTreeMap<String, String> {
    let address = settings.migration_address.iter();
    address
        .map(|address| (names::MIGRATION_ADDRESS.to_owned(), address.clone()))
        .collect()
}

/// Labels of the node for the placement of VMs.
pub fn labels(settings: &Settings, node: Option<&v1::Node>) -> BTreeMap<String, String> {
    let mut labels = settings.labels.clone();
    let mut set = |key: &str, value: &str| labels.insert(key.to_owned(), value.to_owned());
    set(names::NODE, "");
    set("kubernetes.io/hostname", &settings.name);
    set("kubernetes.io/os", "linux");
    set("kubernetes.io/arch", names::ARCHITECTURE);
    if settings.migration_address.is_some() {
        set(names::MIGRATION, "");
    }
    let Some(status) = node.and_then(|node| node.status.as_ref()) else {
        return labels;
    };
    set(names::CPU_MODEL, &label(&status.cpu_model));
    set("vmmd.dev/numa-nodes", &status.numa_nodes.len().max(1).to_string());
    for (prefix, words) in FEATURES.into_iter().zip([&status.features, &status.cpu_features]) {
        for word in words {
            set(&format!("{prefix}{}", label(word)), "true");
        }
    }
    labels
}

/// Whether a label says that the node has a feature.
pub fn is_feature(key: &str) -> bool {
    FEATURES.iter().any(|prefix| key.starts_with(prefix))
}

/// Text as a label may be: up to 63 letters, digits, `-`, `_` and `.`, the first and the last one a letter or digit.
fn label(text: &str) -> String {
    let allowed = |letter: char| letter.is_ascii_alphanumeric() || matches!(letter, '-' | '_' | '.');
    let mut label: String = text
        .chars()
        .map(|letter| if allowed(letter) { letter } else { '-' })
        .collect();
    label = label
        .trim_matches(|letter: char| !letter.is_ascii_alphanumeric())
        .to_owned();
    while label.contains("--") {
        label = label.replace("--", "-");
    }
    label.truncate(63);
    label
        .trim_end_matches(|letter: char| !letter.is_ascii_alphanumeric())
        .to_owned()
}

/// The status; `node` is `None` when vmmd does not answer.
pub fn status(
    settings: &Settings,
    node: Option<&v1::Node>,
    old: Option<&NodeStatus>,
    now: Timestamp,
) -> NodeStatus {
    let known = node.and_then(|node| node.status.clone());
    let described = known.clone().unwrap_or_default();
    let mut status = NodeStatus {
        conditions: Some(conditions(known.as_ref(), old, now)),
        addresses: Some(
            settings
                .addresses
                .iter()
                .map(|(kind, address)| NodeAddress {
                    type_: (*kind).to_owned(),
                    address: address.clone(),
                })
                .collect(),
        ),
        daemon_endpoints: settings.port.map(|port| NodeDaemonEndpoints {
            kubelet_endpoint: Some(DaemonEndpoint { port: port.into() }),
        }),
        ..NodeStatus::default()
    };
    // A daemon that does not answer keeps its previous values.
    let Some(known) = known else {
        let old = old.cloned().unwrap_or_default();
        status.capacity = old.capacity;
        status.allocatable = old.allocatable;
        status.node_info = Some(old.node_info.unwrap_or_else(|| info(settings, &described)));
        return status;
    };
    status.capacity = known
        .capacity
        .as_ref()
        .map(|has| resources(has, settings.max_vms));
    status.allocatable = known
        .allocatable
        .as_ref()
        .map(|has| resources(has, settings.max_vms));
    status.node_info = Some(info(settings, &described));
    status
}

fn resources(has: &v1::Resources, max_vms: u32) -> BTreeMap<String, Quantity> {
    let bytes = |bytes: u64| Quantity(bytes.to_string());
    BTreeMap::from([
        ("cpu".to_owned(), Quantity(format!("{}m", has.cpu_millis))),
        ("memory".to_owned(), bytes(has.memory_bytes)),
        ("hugepages-2Mi".to_owned(), bytes(has.huge_pages_2m_bytes)),
        ("hugepages-1Gi".to_owned(), bytes(has.huge_pages_1g_bytes)),
        ("ephemeral-storage".to_owned(), bytes(has.disk_bytes)),
        ("pods".to_owned(), Quantity(max_vms.to_string())),
    ])
}

fn info(settings: &Settings, status: &v1::NodeStatus) -> NodeSystemInfo {
    NodeSystemInfo {
        machine_id: settings.machine_id.clone(),
        system_uuid: settings.machine_id.clone(),
        boot_id: status.boot_id.clone(),
        kernel_version: status.kernel_version.clone(),
        os_image: settings.os_image.clone(),
        container_runtime_version: format!("vmmd://{}", status.version),
        kubelet_version: format!("{KUBELET}-vmmd.{}", env!("CARGO_PKG_VERSION")),
        kube_proxy_version: String::new(),
        operating_system: "linux".to_owned(),
        architecture: names::ARCHITECTURE.to_owned(),
        ..NodeSystemInfo::default()
    }
}

fn conditions(node: Option<&v1::NodeStatus>, old: Option<&NodeStatus>, now: Timestamp) -> Vec<NodeCondition> {
    let find =
        |kind: &str| node.and_then(|node| node.conditions.iter().find(|condition| condition.r#type == kind));
    let ready = match (node, find("KvmAvailable")) {
        (None, _) => ("False", "VmmdUnavailable", "vmmd does not answer".to_owned()),
        (Some(_), Some(kvm)) if kvm.status() == ConditionStatus::False => {
            ("False", "KvmUnavailable", kvm.message.clone())
        }
        (Some(_), _) => ("True", "VmmdReady", "vmmd answers".to_owned()),
    };
    let pressure = |kind: &'static str| match find(kind) {
        Some(condition) if condition.status() == ConditionStatus::True => {
            (kind, "True", "Pressure", condition.message.clone())
        }
        _ if node.is_none() => (kind, "Unknown", "VmmdUnavailable", String::new()),
        _ => (kind, "False", "NoPressure", String::new()),
    };
    let (status, reason, message) = ready;
    let all = [
        ("Ready", status, reason, message),
        pressure("MemoryPressure"),
        pressure("DiskPressure"),
        ("PIDPressure", "False", "NoPressure", String::new()),
        ("NetworkUnavailable", "False", "VmmdNetworks", String::new()),
    ];
    let before = old.and_then(|old| old.conditions.as_ref());
    let since = |kind: &str, status: &str| {
        let before = before?
            .iter()
            .find(|one| one.type_ == kind && one.status == status)?;
        before.last_transition_time.clone()
    };
    let all = all
        .into_iter()
        .map(|(kind, status, reason, message)| NodeCondition {
            type_: kind.to_owned(),
            status: status.to_owned(),
            reason: Some(reason.to_owned()),
            message: Some(message),
            last_heartbeat_time: Some(Time(now)),
            last_transition_time: since(kind, status).or(Some(Time(now))),
        });
    all.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings() -> Settings {
        Settings {
            name: "n1-vmm".to_owned(),
            addresses: vec![("InternalIP", "192.0.2.1".to_owned())],
            max_vms: 50,
            migration_address: Some("node-1.example:7443".to_owned()),
            port: Some(10950),
            allowed: Allowed::default(),
            labels: BTreeMap::from([("rack".to_owned(), "7".to_owned())]),
            machine_id: "m".to_owned(),
            os_image: "Debian".to_owned(),
        }
    }

    fn vmmd(kvm: ConditionStatus) -> v1::Node {
        let has = v1::Resources {
            cpu_millis: 8000,
            memory_bytes: 4 << 30,
            ..v1::Resources::default()
        };
        let status = v1::NodeStatus {
            cpu_model: "AMD EPYC (tm) 7763 ".to_owned(),
            cpu_features: vec!["avx2".to_owned()],
            features: vec!["io_uring".to_owned()],
            capacity: Some(has),
            allocatable: Some(has),
            conditions: vec![v1::Condition {
                r#type: "KvmAvailable".to_owned(),
                status: kvm.into(),
                message: "no /dev/kvm".to_owned(),
                ..v1::Condition::default()
            }],
            ..v1::NodeStatus::default()
        };
        v1::Node {
            status: Some(status),
            ..v1::Node::default()
        }
    }

    fn ready(status: &NodeStatus) -> (&str, &str) {
        let conditions = status.conditions.as_ref().unwrap();
        let ready = conditions.iter().find(|one| one.type_ == "Ready").unwrap();
        (&ready.status, ready.reason.as_deref().unwrap())
    }

    #[test]
    fn labels_say_what_vms_are_placed_by() {
        let labels = labels(&settings(), Some(&vmmd(ConditionStatus::True)));
        let wanted = [
            ("vmmd.dev/vm", ""),
            ("vmmd.dev/migration", ""),
            ("rack", "7"),
            ("vmmd.dev/cpu-model", "AMD-EPYC-tm-7763"),
            ("cpu.vmmd.dev/avx2", "true"),
            ("feature.vmmd.dev/io_uring", "true"),
            ("kubernetes.io/hostname", "n1-vmm"),
        ];
        for (key, value) in wanted {
            assert_eq!(labels.get(key).map(String::as_str), Some(value), "{key}");
        }
        assert!(label(&"x.".repeat(50)).len() <= 63);
        assert_eq!(label("(tm)"), "tm");
        let alone = Settings {
            migration_address: None,
            ..settings()
        };
        assert!(!self::labels(&alone, None).contains_key("vmmd.dev/migration"));
        assert_eq!(annotations(&alone), BTreeMap::new());
    }

    #[test]
    fn a_node_is_ready_when_vmmd_answers_and_has_kvm() {
        let now = Timestamp::now();
        for (node, wanted) in [
            (Some(vmmd(ConditionStatus::True)), ("True", "VmmdReady")),
            (Some(vmmd(ConditionStatus::False)), ("False", "KvmUnavailable")),
            (None, ("False", "VmmdUnavailable")),
        ] {
            let status = status(&settings(), node.as_ref(), None, now);
            assert_eq!(ready(&status), wanted);
        }
    }

    #[test]
    fn what_a_daemon_had_stays_while_it_does_not_answer() {
        let earlier: Timestamp = "2026-01-02T03:04:05Z".parse().unwrap();
        let now: Timestamp = "2026-01-02T03:05:05Z".parse().unwrap();
        let before = status(&settings(), Some(&vmmd(ConditionStatus::True)), None, earlier);
        let after = status(&settings(), None, Some(&before), now);
        assert_eq!(after.capacity, before.capacity);
        assert_eq!(
            after.capacity.as_ref().unwrap()["cpu"],
            Quantity("8000m".to_owned())
        );
        let again = status(
            &settings(),
            Some(&vmmd(ConditionStatus::True)),
            Some(&before),
            now,
        );
        let since = again.conditions.unwrap()[0].last_transition_time.clone();
        assert_eq!(since, Some(Time(earlier)));
    }
}
