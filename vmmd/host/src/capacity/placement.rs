//! Placement decision for one more VM: a pure function of the collected node state.

use super::Resources;
use crate::failure::{Failure, Kind};

/// Something that stands against a VM's being here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// Kind of refusal.
    pub kind: Kind,
    /// For programs.
    pub reason: &'static str,
    /// For people.
    pub message: String,
    /// The manifest's field; empty when it is about none.
    pub field: String,
}

/// The node as far as the decision goes.
#[derive(Clone, Debug, Default)]
pub struct Picture {
    /// Why no VM is to be started here, when the node is cordoned.
    pub cordoned: Option<Failure>,
    /// Reason why KVM is unusable.
    pub no_kvm: Option<Failure>,
    /// Resources that all VMs together may have.
    pub allocatable: Resources,
    /// Resources committed to the other VMs.
    pub committed: Resources,
    /// Bytes that are free on the file system with the daemon's state.
    pub disk_available: u64,
    /// Bytes that are to stay free there.
    pub disk_reserved: u64,
}

impl Picture {
    /// The node as a VM finds it that was placed there before: neither a cordon nor the reserve of disk space is asked about.
    #[must_use]
    pub fn without_admission(self) -> Self {
        Self {
            cordoned: None,
            disk_reserved: 0,
            ..self
        }
    }
}

impl Problem {
    /// A refusal that is about this field.
    pub fn of(failure: Failure, field: impl Into<String>) -> Self {
        Self {
            kind: failure.kind,
            reason: failure.reason,
            message: failure.message,
            field: field.into(),
        }
    }

    /// It is that others have what this VM needs, or that the node has not so much.
    pub fn is_shortage(&self) -> bool {
        self.reason.starts_with("INSUFFICIENT_")
    }
}

/// All that stands against a VM which needs `demand`.
pub fn decide(demand: &Resources, node: &Picture) -> Vec<Problem> {
    let stops = node.cordoned.iter().chain(&node.no_kvm);
    let mut problems: Vec<_> = stops.map(|failure| Problem::of(failure.clone(), "")).collect();
    problems.extend(amounts(demand, &node.allocatable, &node.committed));
    if node.disk_available < node.disk_reserved {
        let message = format!(
            "not enough disk space: {} MiB are free where vmmd keeps its state, {} MiB are reserved; make room there",
            node.disk_available >> 20,
            node.disk_reserved >> 20,
        );
        problems.push(exhausted("INSUFFICIENT_DISK", message, ""));
    }
    problems
}

/// Resources that are short.
fn amounts(demand: &Resources, allocatable: &Resources, committed: &Resources) -> Vec<Problem> {
    const MIB: u64 = 1 << 20;
    /// Unit of amounts that are counted in thousandths.
    const THOUSANDTH: u64 = 1000;
    // Reason, (name, unit, unit size), field, [needed, allocatable, committed].
    let rows = [
        (
            "INSUFFICIENT_VCPUS",
            ("cores", "cores", THOUSANDTH),
            "spec.cpu.cores",
            [demand.vcpu_millis, allocatable.vcpu_millis, committed.vcpu_millis],
        ),
        (
            "INSUFFICIENT_CPU",
            ("processor time", "processors", THOUSANDTH),
            "spec.cpu",
            [demand.cpu_millis, allocatable.cpu_millis, committed.cpu_millis],
        ),
        (
            "INSUFFICIENT_MEMORY",
            ("memory", "MiB", MIB),
            "spec.memory.sizeBytes",
            [demand.memory, allocatable.memory, committed.memory],
        ),
        (
            "INSUFFICIENT_HUGE_PAGES",
            ("huge pages of 2 MiB", "MiB", MIB),
            "spec.memory.hugePages",
            [demand.huge_2m, allocatable.huge_2m, committed.huge_2m],
        ),
        (
            "INSUFFICIENT_HUGE_PAGES",
            ("huge pages of 1 GiB", "MiB", MIB),
            "spec.memory.hugePages",
            [demand.huge_1g, allocatable.huge_1g, committed.huge_1g],
        ),
    ];
    let short = rows.into_iter().filter(|(.., [needed, there, taken])| {
        // A demand of 0 is never short, even when the others exceed the allocatable amount.
        *needed > 0 && *needed > there.saturating_sub(*taken)
    });
    short
        .map(|(reason, (what, unit, size), field, [needed, there, taken])| {
            let (needs, all) = (up(needed, size), down(there, size));
            let message = if needed > there {
                format!(
                    "not enough {what}: the VM needs {needs} {unit}, all VMs together may have {all} on this node, so that it \
                     never fits here; give it less, or take another node"
                )
            } else {
                format!(
                    "not enough {what}: the VM needs {needs} {unit}, VMs may have {all} of which others have {} now; stop \
                     another VM or give this one less",
                    up(taken, size),
                )
            };
            exhausted(reason, message, field)
        })
        .collect()
}

/// An amount in units of `size`: thousandths as they are, others rounded up.
fn up(amount: u64, size: u64) -> String {
    if size == 1000 {
        down(amount, size)
    } else {
        amount.div_ceil(size).to_string()
    }
}

/// The same rounded down.
fn down(amount: u64, size: u64) -> String {
    match amount % size {
        rest if size == 1000 && rest > 0 => {
            let digits = format!("{rest:03}");
            format!("{}.{}", amount / size, digits.trim_end_matches('0'))
        }
        _ => (amount / size).to_string(),
    }
}

fn exhausted(reason: &'static str, message: String, field: &str) -> Problem {
    Problem {
        kind: Kind::Exhausted,
        reason,
        message,
        field: field.to_owned(),
    }
}

/// All of them as one refusal, of the first one's kind and reason; nothing when there are none.
pub fn refuse(problems: &[Problem]) -> Result<(), Failure> {
    let Some(first) = problems.first() else {
        return Ok(());
    };
    let messages: Vec<_> = problems.iter().map(|problem| problem.message.as_str()).collect();
    let mut failure = Failure::new(first.kind, first.reason, messages.join("; "));
    for problem in problems.iter().filter(|problem| problem.kind == Kind::Invalid) {
        let Problem { message, field, .. } = problem;
        let said = message
            .strip_prefix(field.as_str())
            .and_then(|said| said.strip_prefix(": "));
        failure.violations.add(field, said.unwrap_or(message));
    }
    Err(failure)
}

#[cfg(test)]
pub(crate) mod tests {
    use proptest::prelude::*;
    use vmmd_api::v1;
    use vmmd_spec::vm::VmSpec;

    use super::*;

    /// A spec of this size.
    pub fn spec(cores: u32, memory_mib: u64, fraction: u32) -> VmSpec {
        let linux = v1::LinuxBoot {
            kernel: "/k".into(),
            ..Default::default()
        };
        let wire = v1::VmSpec {
            cpu: Some(v1::CpuSpec {
                cores,
                core_fraction_percent: fraction,
                ..Default::default()
            }),
            memory: Some(v1::MemorySpec {
                size_bytes: memory_mib << 20,
                ..Default::default()
            }),
            boot: Some(v1::BootSpec {
                source: Some(v1::boot_spec::Source::Linux(linux)),
            }),
            ..Default::default()
        };
        // A fraction of a core is the only amount that a spec cannot express.
        VmSpec::try_from(&wire).unwrap()
    }

    fn amounts_of(amounts: [u64; 5]) -> Resources {
        let [vcpu_millis, cpu_millis, memory, huge_2m, huge_1g] = amounts;
        Resources {
            vcpu_millis,
            cpu_millis,
            memory,
            huge_2m,
            huge_1g,
            disk: 0,
        }
    }

    fn picture(allocatable: [u64; 5], committed: [u64; 5]) -> Picture {
        Picture {
            allocatable: amounts_of(allocatable),
            committed: amounts_of(committed),
            ..Picture::default()
        }
    }

    #[test]
    fn the_table_holds() {
        let none = [0; 5];
        let has = [8000, 2000, 1000, 500, 100];
        let stop = |reason| Some(Failure::precondition(reason, "no"));
        let cordoned = Picture {
            cordoned: stop("NODE_CORDONED"),
            no_kvm: stop("KVM_UNAVAILABLE"),
            disk_available: 4,
            disk_reserved: 5,
            ..picture(has, none)
        };
        let table: &[(&str, [u64; 5], Picture, &[&str])] = &[
            ("all of it", has, picture(has, none), &[]),
            (
                "what is left",
                [1000, 500, 400, 100, 0],
                picture(has, [7000, 1500, 600, 400, 100]),
                &[],
            ),
            (
                "a core too many",
                [1001, 0, 0, 0, 0],
                picture(has, [7000, 0, 0, 0, 0]),
                &["INSUFFICIENT_VCPUS"],
            ),
            (
                "too much time",
                [1000, 501, 0, 0, 0],
                picture(has, [0, 1500, 0, 0, 0]),
                &["INSUFFICIENT_CPU"],
            ),
            (
                "a byte too many",
                [0, 0, 401, 0, 0],
                picture(has, [0, 0, 600, 0, 0]),
                &["INSUFFICIENT_MEMORY"],
            ),
            (
                "huge",
                [0, 0, 0, 501, 0],
                picture(has, none),
                &["INSUFFICIENT_HUGE_PAGES"],
            ),
            (
                "giant",
                [0, 0, 0, 0, 1],
                picture(has, [0, 0, 0, 0, 100]),
                &["INSUFFICIENT_HUGE_PAGES"],
            ),
            (
                "everything",
                [u64::MAX; 5],
                cordoned.clone(),
                &[
                    "NODE_CORDONED",
                    "KVM_UNAVAILABLE",
                    "INSUFFICIENT_VCPUS",
                    "INSUFFICIENT_CPU",
                    "INSUFFICIENT_MEMORY",
                    "INSUFFICIENT_HUGE_PAGES",
                    "INSUFFICIENT_HUGE_PAGES",
                    "INSUFFICIENT_DISK",
                ],
            ),
            (
                "stopped",
                has,
                cordoned,
                &["NODE_CORDONED", "KVM_UNAVAILABLE", "INSUFFICIENT_DISK"],
            ),
            // The committed amounts exceed the allocatable ones. A demand of 0 is still not short.
            (
                "no huge pages",
                [1, 1, 1, 0, 0],
                picture([1, 1, 1, 0, 0], [0, 0, 0, 9, 9]),
                &[],
            ),
        ];
        for (title, demand, node, expected) in table {
            let found = decide(&amounts_of(*demand), node);
            let reasons: Vec<_> = found.iter().map(|problem| problem.reason).collect();
            assert_eq!(reasons, *expected, "{title}");
            assert_eq!(
                refuse(&found).err().map(|failure| failure.reason),
                expected.first().copied()
            );
        }
    }

    #[test]
    fn a_refusal_says_all_that_is_missing_and_how_much() {
        let node = picture([1500, 1000, 512 << 20, 0, 0], [0, 0, 256 << 20, 0, 0]);
        let failure = refuse(&decide(&amounts_of([2000, 1000, 300 << 20, 0, 0]), &node)).unwrap_err();
        assert_eq!(
            (failure.kind, failure.reason),
            (Kind::Exhausted, "INSUFFICIENT_VCPUS")
        );
        for words in [
            "needs 2 cores, all VMs together may have 1.5 on this node, so that it never fits here",
            "needs 300 MiB, VMs may have 512 of which others have 256 now; stop another VM",
        ] {
            assert!(failure.message.contains(words), "{failure}");
        }
    }

    proptest! {
        #[test]
        fn what_fits_is_never_more_than_there_is(
            demand in prop::array::uniform5(any::<u64>()),
            there in prop::array::uniform5(any::<u64>()),
            taken in prop::array::uniform5(any::<u64>()),
        ) {
            let fits = decide(&amounts_of(demand), &picture(there, taken)).is_empty();
            let rows = demand.iter().zip(there).zip(taken);
            let all = rows.clone().all(|((demand, there), taken)| {
                *demand == 0 || u128::from(*demand) + u128::from(taken) <= u128::from(there)
            });
            prop_assert_eq!(fits, all);
        }
    }
}
