//! The command line of `wait`.

use std::{str::FromStr, time::Duration};

use clap::Args;
use vmmd_api::v1::{self, ConditionStatus};

use super::{Selector, duration, kind::PHASES, operation_id, value::word, vm_name};
use crate::complete;

/// `wait`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  vmmctl wait web --for condition=Ready
  vmmctl wait web db --for phase=Stopped --timeout 5m
  vmmctl wait -l tier=front --for phase=Running
  vmmctl wait web --for deleted
  vmmctl wait web --for operation
  vmmctl wait operation/0197c1f0-8a5e-7b63-9c0e-3d1f2a4b5c6d")]
pub struct Wait {
    /// Names of VMs, as NAME or vm/NAME, or operations as operation/ID
    #[arg(value_name = "NAME|operation/ID", add = complete::vms(), required_unless_present_any = ["selector", "all"])]
    pub subjects: Vec<Subject>,
    /// VMs with this label (KEY=VALUE, KEY!=VALUE or KEY); several must all match
    #[arg(short = 'l', long, value_delimiter = ',', conflicts_with = "subjects")]
    pub selector: Vec<Selector>,
    /// All VMs that exist now
    #[arg(long, conflicts_with_all = ["subjects", "selector"])]
    pub all: bool,
    /// condition=TYPE[=true|false|unknown], phase=PHASE, deleted, or operation: no operation on the VM is in progress
    #[arg(long = "for", value_name = "STATE", required_unless_present = "subjects")]
    pub wanted: Option<Wanted>,
    /// How long to wait, at most 1h
    #[arg(long, value_name = "DURATION", default_value = "5m", value_parser = duration)]
    pub timeout: Duration,
}

/// Subject of a wait.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Subject {
    /// A VM by its name.
    Vm(String),
    /// An operation by its id.
    Operation(String),
}

impl FromStr for Subject {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.starts_with("operation/") || text.starts_with("operations/") {
            operation_id(text).map(Self::Operation)
        } else {
            vm_name(text).map(Self::Vm)
        }
    }
}

/// State to wait for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// A condition of this type has this status.
    Condition(String, ConditionStatus),
    /// The VM is in this phase.
    Phase(v1::VmPhase),
    /// The VM does not exist.
    Deleted,
    /// No operation on the VM is in progress.
    Idle,
}

impl FromStr for Wanted {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (what, rest) = text.split_once('=').unwrap_or((text, ""));
        match (what, rest) {
            ("deleted", "") => Ok(Self::Deleted),
            ("operation", "") => Ok(Self::Idle),
            ("phase", phase) => word(PHASES, phase).map(Self::Phase),
            ("condition", condition) if !condition.is_empty() => {
                let (kind, status) = condition.split_once('=').unwrap_or((condition, "true"));
                let status = match status.to_lowercase().as_str() {
                    "true" => ConditionStatus::True,
                    "false" => ConditionStatus::False,
                    "unknown" => ConditionStatus::Unknown,
                    _ => return Err("a condition is true, false or unknown".into()),
                };
                Ok(Self::Condition(kind.to_owned(), status))
            }
            _ => {
                Err("must be condition=TYPE, condition=TYPE=false, phase=PHASE, deleted or operation".into())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn awaited_state_is_read() {
        let ready = |status| Wanted::Condition("Ready".into(), status);
        for (text, wanted) in [
            ("condition=Ready", ready(ConditionStatus::True)),
            ("condition=Ready=False", ready(ConditionStatus::False)),
            ("phase=running", Wanted::Phase(v1::VmPhase::Running)),
            ("deleted", Wanted::Deleted),
            ("operation", Wanted::Idle),
        ] {
            assert_eq!(text.parse(), Ok(wanted), "{text}");
        }
        for wrong in [
            "",
            "condition",
            "condition=",
            "condition=Ready=maybe",
            "phase=Happy",
            "deleted=yes",
        ] {
            assert!(wrong.parse::<Wanted>().is_err(), "{wrong}");
        }
        assert_eq!("vm/web".parse(), Ok(Subject::Vm("web".into())));
        assert_eq!("operation/1".parse(), Ok(Subject::Operation("1".into())));
        assert!("disk/a".parse::<Subject>().is_err());
    }
}
