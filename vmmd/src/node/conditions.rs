//! Conditions of the node, with the times of their last changes. They are computed at a request or
//! at the start of a VM, never by a timer.

use std::collections::BTreeMap;

use vmmd_api::v1::{Condition, ConditionStatus};
use vmmd_host::{
    capacity::{Facts, limits::Pressure},
    failure::Failure,
    text,
};
use vmmd_objects::event::{Draft, Object};
use vmmd_store::ConditionRecord;

/// Derives the conditions from the facts, without times.
pub fn judge(
    facts: &Facts,
    kvm: Option<&Failure>,
    cordoned: Option<&Failure>,
    pressure: &Pressure,
) -> Vec<Condition> {
    let condition = |kind: &str, status, reason: &str, message: String| Condition {
        r#type: kind.to_owned(),
        status: ConditionStatus::into(status),
        reason: reason.to_owned(),
        message,
        transition_time: None,
    };
    let free = |kind, what, advice, all: u64, free: u64, percent: u8| {
        let least = u128::from(all) * u128::from(percent) / 100;
        if all == 0 {
            return condition(
                kind,
                ConditionStatus::Unknown,
                "NotKnown",
                format!("how much of the {what} is free can't be found out"),
            );
        }
        if u128::from(free) >= least {
            return condition(kind, ConditionStatus::False, "Sufficient", String::new());
        }
        let message = format!(
            "{} MiB of {} MiB of the {what} are free, less than {percent} %: {advice}",
            free >> 20,
            all >> 20
        );
        condition(kind, ConditionStatus::True, "Low", message)
    };
    let kvm = match kvm {
        // The daemon has no KVM code: it only checks whether the device opens. Errors that a `vmm`
        // finds later are in the error of the start.
        None => condition(
            "KvmAvailable",
            ConditionStatus::True,
            "DeviceUsable",
            String::new(),
        ),
        Some(failure) => condition(
            "KvmAvailable",
            ConditionStatus::False,
            "DeviceUnusable",
            failure.message.clone(),
        ),
    };
    let schedulable = match cordoned {
        None => condition("Schedulable", ConditionStatus::True, "NotCordoned", String::new()),
        Some(failure) => condition(
            "Schedulable",
            ConditionStatus::False,
            "Cordoned",
            failure.message.clone(),
        ),
    };
    let disk = free(
        "DiskPressure",
        "file system with the daemon's state",
        "make room there, or move disks away",
        facts.disk,
        facts.disk_available,
        pressure.disk_percent,
    );
    let memory = free(
        "MemoryPressure",
        "memory",
        "stop VMs or other programs, or reserve more",
        facts.memory,
        facts.memory_available,
        pressure.memory_percent,
    );
    vec![kvm, disk, memory, schedulable]
}

/// Sets the time of each condition's last change, and stores changes in `known`. Returns an event
/// for each change of a condition that was known before.
pub fn stamp(
    conditions: &mut [Condition],
    known: &mut BTreeMap<String, ConditionRecord>,
    now_ms: u64,
) -> Vec<Draft> {
    let mut news = Vec::new();
    for condition in conditions {
        let seen = known.get(&condition.r#type);
        let since = match seen {
            Some(seen) if seen.status() == condition.status() => seen.since_ms,
            _ => {
                let changed = ConditionRecord {
                    status: condition.status,
                    since_ms: now_ms,
                };
                if seen.is_some() {
                    news.push(tell(condition));
                }
                known.insert(condition.r#type.clone(), changed);
                now_ms
            }
        };
        condition.transition_time = text::timestamp(since);
    }
    news
}

/// Event for a changed condition.
fn tell(condition: &Condition) -> Draft {
    let good = match condition.r#type.as_str() {
        "DiskPressure" | "MemoryPressure" => ConditionStatus::False,
        _ => ConditionStatus::True,
    };
    let status = match condition.status() {
        ConditionStatus::True => "true",
        ConditionStatus::False => "false",
        _ => "unknown",
    };
    let detail = match condition.message.as_str() {
        "" => String::new(),
        message => format!(": {message}"),
    };
    let message = format!("{} is {status} now{detail}", condition.r#type);
    if condition.status() == good {
        Draft::normal(Object::Node, "ConditionChanged", message)
    } else {
        Draft::warning(Object::Node, "ConditionChanged", message)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROOMY: Facts = Facts {
        cpus: 1,
        memory: 1000,
        memory_available: 50,
        huge_2m: 0,
        huge_1g: 0,
        disk: 1000,
        disk_available: 50,
        numa: Vec::new(),
    };

    fn statuses(facts: &Facts, kvm: Option<&Failure>, cordoned: Option<&Failure>) -> [ConditionStatus; 4] {
        let conditions = judge(facts, kvm, cordoned, &Pressure::default());
        let statuses: Vec<_> = conditions.iter().map(Condition::status).collect();
        statuses.try_into().unwrap()
    }

    #[test]
    fn each_condition_says_what_was_found() {
        use ConditionStatus::{False, True, Unknown};
        let no = Failure::precondition("NO", "no");
        assert_eq!(statuses(&ROOMY, None, None), [True, False, False, True]);
        assert_eq!(
            statuses(&ROOMY, Some(&no), Some(&no)),
            [False, False, False, False]
        );
        let full = Facts {
            memory_available: 49,
            disk_available: 49,
            ..ROOMY
        };
        assert_eq!(statuses(&full, None, None), [True, True, True, True]);
        assert_eq!(
            statuses(&Facts::default(), None, None),
            [True, Unknown, Unknown, True]
        );
    }

    #[test]
    fn condition_keeps_its_time_until_its_status_changes() {
        let mut known = BTreeMap::new();
        let mut seen = |status: ConditionStatus, message: &str, now_ms| {
            let mut conditions = [Condition {
                r#type: "KvmAvailable".into(),
                status: status.into(),
                message: message.to_owned(),
                ..Default::default()
            }];
            let news = stamp(&mut conditions, &mut known, now_ms);
            let [condition] = conditions;
            assert_eq!(
                (condition.status(), condition.message.as_str()),
                (status, message)
            );
            let news: Vec<_> = news.into_iter().map(|draft| draft.message).collect();
            (condition.transition_time, news.join(","))
        };
        let at = text::timestamp;
        assert_eq!(seen(ConditionStatus::False, "a", 1000), (at(1000), String::new()));
        assert_eq!(seen(ConditionStatus::False, "b", 2000), (at(1000), String::new()));
        let told = "KvmAvailable is true now".to_owned();
        assert_eq!(seen(ConditionStatus::True, "", 3000), (at(3000), told));
        assert_eq!(seen(ConditionStatus::True, "", 4000), (at(3000), String::new()));
        let told = "KvmAvailable is false now: a".to_owned();
        assert_eq!(seen(ConditionStatus::False, "a", 5000), (at(5000), told));
    }
}
