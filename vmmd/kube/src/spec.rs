//! A VirtualMachine as a VM of vmmd: its validation before a request to a node, and its use of a
//! node.

use serde_json::{Map, Value, json};
use vmmd_api::v1::{self, RunPolicy};
use vmmd_spec::{
    Violations,
    manifest::{self, yaml},
    overhead,
    resources::HugePages,
    vm::Manifest,
};

/// Errors in a spec, one sentence with the paths of the fields.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Invalid(pub String);

/// The VM of vmmd with this name.
///
/// # Errors
///
/// All that is wrong with it.
pub fn vm(name: &str, spec: &Map<String, Value>) -> Result<v1::Vm, Invalid> {
    let document = manifest::with_head(manifest::VM, json!({"metadata": {"name": name}, "spec": spec}));
    // JSON is YAML.
    let roots = yaml::documents(&document.to_string()).map_err(|error| Invalid(error.message))?;
    let [root] = roots.as_slice() else {
        return Err(Invalid("spec.vm: is no single object".to_owned()));
    };
    match manifest::vm(root) {
        Ok((vm, _)) => Ok(vm),
        Err(problems) => Err(said(
            problems.into_iter().map(|problem| (problem.path, problem.text)),
        )),
    }
}

/// When a run is followed by another one.
pub fn run_policy(vm: &v1::Vm) -> RunPolicy {
    match vm.spec.as_ref().map(v1::VmSpec::run_policy).unwrap_or_default() {
        RunPolicy::Unspecified => RunPolicy::AlwaysOnUnlessStopped,
        policy => policy,
    }
}

/// Resources of a node that a VM takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Requests {
    /// Guaranteed processor time, in thousandths of a processor.
    pub cpu_millis: u64,
    /// Memory, huge pages not included.
    pub memory_bytes: u64,
    /// Huge pages of 2 MiB.
    pub huge_pages_2m_bytes: u64,
    /// Huge pages of 1 GiB.
    pub huge_pages_1g_bytes: u64,
}

/// As vmmd sets it aside, with `extra` bytes of memory.
///
/// # Errors
///
/// All that is wrong with the VM.
pub fn requests(vm: &v1::Vm, extra: u64) -> Result<Requests, Invalid> {
    let spec = Manifest::try_from(vm).map_err(invalid)?.spec;
    let size = spec.memory_bytes;
    let (small, large, huge) = match spec.memory.huge_pages {
        None => (size, 0, 0),
        Some(HugePages::Size2M) => (0, size, 0),
        Some(HugePages::Size1G) => (0, 0, size),
    };
    Ok(Requests {
        cpu_millis: spec.cpu.millis(spec.topology.cores()),
        memory_bytes: small
            .saturating_add(overhead::memory(&spec))
            .saturating_add(extra),
        huge_pages_2m_bytes: large,
        huge_pages_1g_bytes: huge,
    })
}

fn invalid(violations: Violations) -> Invalid {
    let problems = violations.0.into_iter();
    let problems = problems.map(|problem| (problem.field, problem.description));
    said(problems)
}

/// Fields of a manifest as they are called in a VirtualMachine.
fn said(problems: impl Iterator<Item = (String, String)>) -> Invalid {
    let texts = problems.map(|(path, text)| {
        let path = path
            .strip_prefix("spec")
            .map_or_else(|| path.clone(), |rest| format!("spec.vm{rest}"));
        format!("{path}: {text}")
    });
    Invalid(texts.collect::<Vec<_>>().join("; "))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(value: &Value) -> Map<String, Value> {
        value.as_object().unwrap().clone()
    }

    fn small() -> Value {
        json!({
            "cpu": {"cores": 2, "coreFractionPercent": 50},
            "memory": {"sizeBytes": "256Mi"},
            "boot": {"linux": {"kernel": "/srv/vmlinuz"}},
            "runPolicy": "manual",
        })
    }

    /// Memory that vmmd sets aside beside the guest's memory.
    fn beside(vm: &v1::Vm) -> u64 {
        overhead::memory(&Manifest::try_from(vm).unwrap().spec)
    }

    #[test]
    fn a_spec_is_a_manifest() {
        let vm = vm("demo", &spec(&small())).unwrap();
        assert_eq!(vm.metadata.as_ref().unwrap().name, "demo");
        assert_eq!(run_policy(&vm), RunPolicy::Manual);
        let wanted = Requests {
            cpu_millis: 1000,
            memory_bytes: (256 << 20) + beside(&vm) + 5,
            huge_pages_2m_bytes: 0,
            huge_pages_1g_bytes: 0,
        };
        assert_eq!(requests(&vm, 5), Ok(wanted));
    }

    #[test]
    fn huge_pages_are_no_memory() {
        let mut value = small();
        value["memory"]["hugePages"] = "HUGE_PAGES_2M".into();
        let vm = vm("demo", &spec(&value)).unwrap();
        let requests = requests(&vm, 5).unwrap();
        assert_eq!(
            (requests.memory_bytes, requests.huge_pages_2m_bytes),
            (beside(&vm) + 5, 256 << 20)
        );
    }

    #[test]
    fn all_that_is_wrong_is_said_with_the_path_of_the_field() {
        let mut value = small();
        value["memory"]["sizeBytes"] = 5.into();
        value["disks"] = json!([{"name": "root", "path": "relative"}]);
        let Invalid(text) = vm("demo", &spec(&value)).unwrap_err();
        assert!(text.contains("spec.vm.memory.sizeBytes: "), "{text}");
        assert!(text.contains("spec.vm.disks[0].path: "), "{text}");
    }
}
